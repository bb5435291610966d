"""Rules on combinations of settings: errors (`check`) and warnings (`warnings`).  Pure."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from asyncrl.algorithms import settings
from asyncrl.algorithms.settings import Section
from asyncrl.config import presets
from asyncrl.config.agents import VERIFIERS, AgentSource
from asyncrl.config.engines import ENGINES, list_engines
from asyncrl.config.tree import (
    Config,
    EvaluationSetConfig,
    MixedTaskConfig,
    TaskSource,
    interpolate_weight,
)
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


def _read(config: msgspec.Struct, key: str) -> Any:
    """Return a setting; None where the chosen method lacks it. Another unknown key is an error."""
    value: Any = config
    for name in key.split("."):
        has_kinds = value.__struct_config__.tag
        value = getattr(value, name, None) if has_kinds else getattr(value, name)
    return value


def _matches(config: msgspec.Struct, key: str, choice: Any) -> bool:
    if isinstance(choice, list):
        return any(_matches(config, key, one) for one in choice)
    value = _read(config, key)
    if isinstance(choice, bool):
        return bool(value) == choice
    match = re.fullmatch("([<>]=?|[=~])(.+)", choice) if isinstance(choice, str) else None
    if match is None:
        return bool(value == choice)
    sign, text = match.groups()
    if sign == "~":
        return bool(re.fullmatch(text, str(value)))
    other = float(text) if text.isdigit() else _read(config, text)
    return None not in (value, other) and COMPARISONS[sign](value, other)


def apply_table(table: str, config: msgspec.Struct) -> Problems:
    """Yield the text of each rule of a table that applies to a config, or to a part of one."""
    for rule in TABLES[table]:
        when, some, unless = (
            [_matches(config, key, wanted) for key, wanted in conditions.items()]
            for conditions in (rule.when, rule.some, rule.unless)
        )
        if all(when) and (any(some) or not some) and not any(unless):
            yield rule.text.format(
                **msgspec.structs.asdict(config), own=config, engines=ENGINES_WITH
            )


def check(config: Config) -> list[str]:
    """Return the violations of rules that span several keys.

    Each one starts with its key and contains its numbers."""
    rules = (
        *((_check_sessions,) if config.uses_sessions else ()),
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
    largest = config.staleness.most_injected
    if largest > config.staleness.limit:
        yield (
            f"staleness.inject: injects up to {largest} versions, above staleness.max_lag = "
            f"{config.staleness.limit:g}"
        )
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
    by_default = {field.name: field.default for field in msgspec.structs.fields(Config)}
    keys = ["name"] if advantage.name != by_default["advantage"].name else []
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
    group_baseline = (
        isinstance(advantage, settings.ReinforcePpAdvantage) and advantage.group_baseline
    )
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
        yield from (f"task.{problem}" for problem in _check_prompts(config.task, config.agent))


WITHOUT_ANSWERS = ("env", "seeds", "reasoning_gym:")  # prefixes of task.name


def _check_prompts(task: TaskSource, agent: AgentSource) -> Problems:
    """Check that a task and an environment together give prompts and rewards."""
    if task.name in ("seeds", "guess", "nim") and not agent.env:
        yield (
            f"name: {task.name} needs an environment that gives prompts and rewards: set agent.env"
        )
    if (task.name == "env") != (agent.hub == VERIFIERS):
        yield (
            f"name: {task.name} with agent.env = {agent.env or '(none)'}; verifiers:NAME brings "
            "its own prompts and rewards, and only it does: set both task.name = env and "
            "agent.env = verifiers:NAME"
        )
    if agent.hub not in ("", VERIFIERS) and task.name != "seeds":
        yield (
            f"name: {agent.env} gives its own prompts, and {task.name} would only number them; "
            "use seeds"
        )


def _check_sessions(config: Config) -> Problems:
    """Refuse settings that sessions do not support, or were never tested with."""
    for title, agent in config.agents.items():
        prefix = f"task.mixture: {title}: " if title else ""
        yield from (prefix + problem for problem in apply_table("agents", agent))
        if not all(agent.command):
            yield (
                f'{prefix}agent.command: a word is empty; write a list like ["python", "agent.py"]'
            )
        if invalid := [name for name in agent.env_pass if not name or "=" in name]:
            yield (
                f"{prefix}agent.env_pass: {invalid[0]!r} is not a variable's name; give only the "
                "name, the value is inherited"
            )
        if agent.max_tokens < config.generator.max_new_tokens:
            yield (
                f"{prefix}agent.max_tokens: {agent.max_tokens} are fewer than one call may sample "
                f"(generator.max_new_tokens = {config.generator.max_new_tokens})"
            )
    agent = config.agent
    if agent.forced != "ignore" and not any(other.http for other in config.agents.values()):
        yield (
            "agent.forced: only an agent that calls over HTTP can force an answer; set "
            "agent.serve, command or function"
        )
    if agent.fork == "row":
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
    for eval_set in config.evaluation.sets if task.mixture else ():
        if eval_set.file and not eval_set.reward:
            yield (
                f"evaluation.sets: {eval_set.name}: its file belongs to no task of the mixture; "
                "set reward to its reward function"
            )


def _check_part(config: Config, part: MixedTaskConfig) -> Problems:
    """Check a part of a mixture; the problems do not contain its name."""
    yield from apply_table("parts", part)
    agent = part.agent if part.agent.uses_sessions else config.agent
    yield from _check_prompts(part, agent)
    if part.agent != AgentSource() and not part.agent.uses_sessions:
        yield "agent: has no source; set env, tools, command, function or serve"
    if isinstance(part.weight, list):
        batches = [batch for batch, _ in part.weight]
        if batches != sorted(set(batches)):
            yield "weight: a schedule is a list of [batch, weight], each at a later batch"
    if part.max_new_tokens > config.generator.max_new_tokens:
        yield (
            f"max_new_tokens = {part.max_new_tokens} is above generator.max_new_tokens = "
            f"{config.generator.max_new_tokens}; raise that one"
        )
    if part.has_own_reward and agent.env:
        yield (
            "the environment (agent.env) gives the rewards; remove reward, judge and reward_model"
        )
    yield from apply_table("judges", part.judge)
    if config.model.warm_start and part.name.startswith(WITHOUT_ANSWERS):
        yield "model.warm_start: it has no answers to learn from; set model.path to your own model"


def _check_evaluation(config: Config) -> Problems:
    """Check the evaluation sets and the generators reserved for them."""
    names: set[str] = set()
    for eval_set in config.evaluation.sets:
        for problem in _check_evaluation_set(config, eval_set):
            yield f"evaluation.sets: {eval_set.name}: {problem}"
        if eval_set.name in names:
            yield f"evaluation.sets: two sets are called {eval_set.name}; give each its own name"
        names.add(eval_set.name)


def _check_evaluation_set(config: Config, eval_set: EvaluationSetConfig) -> Problems:
    yield from apply_table("evaluation_sets", eval_set)
    if large := [count for count in eval_set.pass_at if count > eval_set.samples]:
        yield f"pass_at = {large[0]} needs at least as many samples, not {eval_set.samples}"
    least = config.generator.abilities.least_temperature
    if 0 < eval_set.temperature < least:
        yield (
            f"temperature = {eval_set.temperature:g} is below what the engine samples at, {least:g}"
        )
    if config.agent.env and (eval_set.reward or eval_set.task or eval_set.file):
        yield "the environment (agent.env) gives prompts and rewards; remove file, task and reward"


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
