"""Rules on combinations of settings: errors (`check`) and warnings (`warnings`).  Pure."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from asyncrl.algorithms import settings
from asyncrl.algorithms.settings import Section
from asyncrl.config import presets
from asyncrl.config.agents import AgentSource
from asyncrl.config.engines import ENGINES, list_engines
from asyncrl.config.tree import Config, MixedTaskConfig, interpolate_weight
from asyncrl.contract.toml_writer import RawTable, read_table

Problems = Iterator[str]  # each begins with its key


class Rule(Section):
    """A rule of rules.toml, which explains its fields."""

    text: str
    when: RawTable = {}
    some: RawTable = {}
    unless: RawTable = {}
    title: str = ""
    sets: tuple[str, ...] = ()


TABLES: dict[str, list[Rule]] = read_table(__file__, dict[str, list[Rule]])
COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}
# ability -> the engines with it, for texts
ENGINES_WITH = {
    name: list_engines(name) for name in ("exact", "records_routing", "records_support")
}


def _read(scope: RawTable, key: str) -> Any:
    """Return a setting; None where the chosen method lacks it. Another unknown key is an error."""
    first, *names = key.split(".")
    value = scope[first]
    for name in names:
        has_kinds = value.__struct_config__.tag
        value = getattr(value, name, None) if has_kinds else getattr(value, name)
    return value


def _matches(scope: RawTable, key: str, choice: Any) -> bool:
    if isinstance(choice, list):
        return any(_matches(scope, key, one) for one in choice)
    value = _read(scope, key)
    if isinstance(choice, bool):
        return bool(value) == choice
    match = re.fullmatch("([<>]=?|[=~])(.+)", choice) if isinstance(choice, str) else None
    if match is None:
        return bool(value == choice)
    sign, text = match.groups()
    if sign == "~":
        return bool(re.fullmatch(text, str(value)))
    other = float(text) if text.isdigit() else _read(scope, text)
    return None not in (value, other) and COMPARISONS[sign](value, other)


def apply_table(table: str, config: msgspec.Struct, run: Config | None = None) -> Problems:
    """Yield the text of each rule of a table that applies to a config, or to a part of one.

    run: the whole config, for rules on a part that also read keys of the run."""
    scope = asdict(config) | {"own": config, "run": run, "engines": ENGINES_WITH}
    for rule in TABLES[table]:
        when, some, unless = (
            [_matches(scope, key, wanted) for key, wanted in conditions.items()]
            for conditions in (rule.when, rule.some, rule.unless)
        )
        if all(when) and (any(some) or not some) and not any(unless):
            yield rule.text.format(**scope)


def check(config: Config) -> list[str]:
    """Return the violations of rules that span several keys.

    Each one starts with its key and contains its numbers."""
    rules = (
        _check_sessions,
        _check_staleness,
        _check_advantage,
        _check_devices,
        _check_prompt_sources,
        _check_mixture,
        _check_evaluation,
    )
    return [
        *check_name_and_device(config),
        *(problem for rule in rules for problem in rule(config)),
        *apply_table("errors", config),
        *apply_table("backends", config),
    ]


def check_name_and_device(config: Any) -> list[str]:
    """Check the name of the run directory and the device, in the config of any command."""
    return [*apply_table("every", config)]


def _check_staleness(config: Config) -> Problems:
    """Check the injected lag, and the slots that the proximal policy needs."""
    inject = config.staleness.inject
    if isinstance(inject, list) and (not inject or min(inject) < 0 or sum(inject) <= 0):
        yield (
            "staleness.inject: give the probabilities of lag 0, 1, 2, ...; none negative, not all "
            "zero"
        )
    versions = config.staleness.limit + 2
    if config.reads_versions and config.weights.slots < versions < math.inf:
        key = "loss.center" if config.loss.center != "off" else "correction.proximal = version"
        yield (
            f"weights.slots: {config.weights.slots}; {key} needs the "
            f"weights of max_lag + 2 = {versions:g} versions; raise weights.slots, lower "
            "staleness.max_lag, or leave it out"
        )


def _find_unread_advantage(config: Config) -> Problems:
    """Find keys of [advantage] that have no effect with the supervised loss."""
    advantage = config.advantage
    keys = [] if isinstance(advantage, settings.RlooAdvantage) else ["name"]
    for field in msgspec.structs.fields(type(advantage)):
        value = getattr(advantage, field.name)
        acts = field.name == "no_spread" or (field.name == "truncated" and value == "mask")
        if value != field.default and not acts:
            keys.append(field.name)
    for key in keys:
        value = getattr(advantage, key)
        yield (
            f"advantage.{key}: {value} has no effect under loss.surrogate = sft, which takes no "
            "advantage; remove it, or choose another surrogate"
        )


def _check_advantage(config: Config) -> Problems:
    if config.loss.surrogate == "sft":
        yield from _find_unread_advantage(config)
    advantage = config.advantage
    size = config.learner.group_size
    group_baseline = getattr(advantage, "group_baseline", False)
    by_group = advantage.name in settings.BY_GROUP or group_baseline
    if by_group and size < 2 and config.loss.surrogate != "sft":
        estimator = (
            f"{advantage.name} with advantage.group_baseline" if group_baseline else advantage.name
        )
        yield (
            f"learner.group_size: {size} sample a prompt leaves {estimator} "
            "nothing to compare with; use 2 or more"
        )
    surrogate = config.loss.surrogate
    if surrogate in settings.ON_BEHAVIOR and config.correction.proximal != "behavior":
        yield (
            f"loss.surrogate: {surrogate} takes its ratio against the behavior policy; set "
            "correction.proximal = behavior"
        )


def _check_prompt_sources(config: Config) -> Problems:
    """Check the sources of prompts and rewards."""
    reward = config.reward
    yield from (f"reward.{problem}" for problem in apply_table("judges", reward.judge))
    if reward.weights and len(reward.weights) != len(reward.functions):
        yield (
            f"reward.weights: {len(reward.weights)} weights for {len(reward.functions)} "
            "reward.functions; give one for each"
        )
    if len(reward.function_names) != len(reward.functions):
        yield "reward.functions: two have one name and one module's name; rename one of them"
    if not config.task.mixture:
        yield from (f"task.{problem}" for problem in apply_table("prompts", config))


def _check_sessions(config: Config) -> Problems:
    """Refuse settings that sessions do not support, or were never tested with."""
    if not config.uses_sessions:
        return
    for title, agent in config.agents.items():
        prefix = f"task.mixture: {title}: " if title else ""
        yield from (prefix + problem for problem in apply_table("agents", agent, config))
        if not all(agent.command):
            yield (
                f'{prefix}agent.command: a word is empty; write a list like ["python", "agent.py"]'
            )
        if invalid := [name for name in agent.env_pass if not name or "=" in name]:
            yield (
                f"{prefix}agent.env_pass: {invalid[0]!r} is not a variable's name; give only the "
                "name, the value is inherited"
            )
    if config.agent.fork == "row":
        yield from [
            f"{setting}: needs the order of a session's tokens, which several training sequences "
            'do not have: set agent.fork = "end"'
            for setting in settings.list_ordered_settings(config)
        ]


def _check_mixture(config: Config) -> Problems:
    """Check the parts of a mixture of tasks."""
    task = config.task
    if bool(task.mixture) != (task.name == "mixture"):
        yield (
            f"task.name: {task.name} with {len(task.mixture)} parts in task.mixture; a mixture "
            "needs both task.name = mixture and tables [[task.mixture]]"
        )
    names = set(config.evaluation.names)
    for part in task.mixture:
        for problem in _check_part(config, part):
            yield f"task.mixture: {part.title or part.name}: {problem}"
        if {part.title, f"{part.title}-ood"} & names:
            yield (
                f"task.mixture: {part.title}: another part or evaluation set has that name in "
                "eval/NAME; give the part its own label"
            )
        names |= {part.title, f"{part.title}-ood"}
    points = {0, *(x[0] for p in task.mixture if isinstance(p.weight, list) for x in p.weight)}
    for batch in sorted(points) if task.mixture else ():
        if not any(interpolate_weight(part.weight, batch) > 0 for part in task.mixture):
            yield f"task.mixture: all weights are 0 at batch {batch}; one must be above 0"


def _check_part(config: Config, part: MixedTaskConfig) -> Problems:
    """Check a part of a mixture; the problems do not contain its name."""
    agent = part.agent if part.agent.uses_sessions else config.agent
    own = replace(config, task=part, agent=agent)
    yield from apply_table("parts", part, own)
    yield from apply_table("prompts", own)
    if part.agent != AgentSource() and not part.agent.uses_sessions:
        yield "agent: has no source; set env, tools, command, function or serve"
    if isinstance(part.weight, list):
        batches = [batch for batch, _ in part.weight]
        if batches != sorted(set(batches)):
            yield "weight: a schedule is a list of [batch, weight], each at a later batch"
    yield from apply_table("judges", part.judge)


def _check_evaluation(config: Config) -> Problems:
    """Check the evaluation sets and the generators reserved for them."""
    names: set[str] = set()
    for eval_set in config.evaluation.sets:
        name, samples = eval_set.name, eval_set.samples
        for problem in apply_table("evaluation_sets", eval_set, config):
            yield f"evaluation.sets: {name}: {problem}"
        if large := [count for count in eval_set.pass_at if count > samples]:
            yield (
                f"evaluation.sets: {name}: pass_at = {large[0]} needs at least as many samples, "
                f"not {samples}"
            )
        if name in names:
            yield f"evaluation.sets: two sets are called {name}; give each its own name"
        names.add(name)


def _check_devices(config: Config) -> Problems:
    """Check the GPUs of the ranks, and the keys that only some engines read."""
    gpus, mesh, ranks = config.learner.gpus, config.learner.mesh, config.learner.process_count
    here = min(ranks, config.placement.gpus_per_node) if config.placement.nodes else ranks
    if gpus and (len(gpus) != here or len(set(gpus)) < len(gpus)):
        yield f"learner.gpus: {gpus} for {here} rank(s) of a host; each needs its own GPU"
    parts = mesh.replicate * mesh.tensor
    if parts * (shards := mesh.shard or max(1, ranks // parts)) != ranks:
        yield (
            f"learner.mesh: replicate x shard x tensor = {mesh.replicate} x {shards} x "
            f"{mesh.tensor} is not learner.ranks = {ranks}; change one of them"
        )
    shared = sorted(set(gpus) & set(config.generator.gpus))
    if config.weights.transport == "nccl" and shared:
        yield (
            f"weights.transport: nccl cannot connect GPU {shared[0]} with itself (learner.gpus, "
            "generator.gpus); use auto"
        )
    for key in sorted({key for info in ENGINES.values() for key in info.settings}):
        is_on = getattr(config.generator, key) not in (0, "none", "", [])
        if is_on and key not in config.generator.abilities.settings:
            owners = " or ".join(name for name, info in ENGINES.items() if key in info.settings)
            yield (
                f"generator.{key}: belongs to generator.engine = {owners}, not to "
                f"{config.generator.engine}"
            )


def find_warnings(config: Config) -> list[str]:
    """Return the warnings that a run prints once at its start."""
    warnings = [*apply_table("warnings", config)]
    lr, path = config.learner.lr, config.model.path
    if config.learner.optimizer != "sgd" and not path.startswith("hf://"):
        usual, reason = presets.choose_learning_rate(path, lora=bool(config.lora.rank))
        if usual is not None and lr >= 10 * usual:
            text = f"learner.lr: {lr:g} is that of a tiny model; {usual:g} is the {reason}"
            warnings.insert(0, text)
    return warnings
