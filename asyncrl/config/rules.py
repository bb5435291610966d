"""Rules on combinations of settings: errors (`check`) and warnings (`warnings`).  Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.algorithms import settings
from asyncrl.config import presets
from asyncrl.config.agents import RANDOM, SELF, VERIFIERS, AgentConfig, AgentSource
from asyncrl.config.engines import ENGINES, list_engines
from asyncrl.config.scorers import JudgeConfig
from asyncrl.config.tree import (
    Config,
    EvaluationSetConfig,
    MixedTaskConfig,
    TaskSource,
    interpolate_weight,
)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule of rules.toml, which explains its fields."""

    text: str
    when: dict[str, Any] = {}
    some: dict[str, Any] = {}
    unless: dict[str, Any] = {}
    title: str = ""
    sets: tuple[str, ...] = ()


TABLES = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, list[Rule]]
)


def _read(config: msgspec.Struct, key: str) -> Any:
    """Return a setting; None where the chosen method lacks it. Another unknown key is an error."""
    value: Any = config
    for name in key.split("."):
        has_kinds = value.__struct_config__.tag
        value = getattr(value, name, None) if has_kinds else getattr(value, name)
    return value


def _has_value(config: msgspec.Struct, key: str, wanted: Any) -> bool:
    value = _read(config, key)
    if isinstance(wanted, bool):
        return bool(value) == wanted
    choices = wanted if isinstance(wanted, list) else [wanted]
    return any(
        value == (_read(config, x[1:]) if isinstance(x, str) and x.startswith("=") else x)
        for x in choices
    )


def apply_table(table: str, config: msgspec.Struct) -> Iterator[str]:
    """Yield the text of each rule of a table that applies to a config, or to a part of one."""
    for rule in TABLES[table]:
        when, some, unless = (
            [_has_value(config, key, wanted) for key, wanted in conditions.items()]
            for conditions in (rule.when, rule.some, rule.unless)
        )
        if all(when) and (any(some) or not some) and not any(unless):
            yield rule.text.format(**msgspec.structs.asdict(config))


def check(config: Config) -> list[str]:
    """Return the violations of rules that span several keys.

    Each one starts with its key and contains its numbers."""
    rules = (
        *((_check_sessions,) if config.uses_sessions else ()),
        *((_check_exact,) if config.exact else ()),
        check_name_and_device,
        _check_staleness,
        _check_sizes,
        _check_routing,
        _check_correction,
        _check_surrogate,
        _check_advantage,
        _check_engine,
        _check_reward,
        _check_mixture,
        _check_evaluation,
    )
    return [
        *(problem for rule in rules for problem in rule(config)),
        *apply_table("errors", config),
        *apply_table("backends", config),
    ]


def check_name_and_device(config: Any) -> list[str]:
    """Check the name of the run directory and the device, in the config of any command."""
    problems = []
    if config.name in (".", "..") or set(config.name) & {"/", "\\", "\0"}:
        problems.append(
            f"name: {config.name!r} must be the name of one directory, without a path; `runs` "
            "sets the folder of all runs"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.model.device):
        problems.append(
            f"model.device: {config.model.device!r} is not a device; choose one of auto, cpu, "
            "cuda, cuda:N"
        )
    return problems


def _check_staleness(config: Config) -> Iterator[str]:
    """Check the staleness limit and the injected lag."""
    lag = config.staleness.limit
    inject = config.staleness.inject
    if config.staleness.ess_floor and (inject is not None or config.staleness.on_exceed != "pace"):
        yield (
            "staleness.max_lag: an adaptive limit needs staleness.on_exceed = pace and no injected "
            "lag, because each ticket is granted under the limit of its time"
        )
    if math.isnan(lag) or (not math.isinf(lag) and lag != int(lag)):
        yield f"staleness.max_lag: {lag:g} must be a whole number or inf"
    largest = inject if isinstance(inject, int) else (len(inject) - 1 if inject else 0)
    if inject is not None and largest > lag:
        yield (
            f"staleness.inject: injects up to {largest} versions, above staleness.max_lag = {lag:g}"
        )
    if isinstance(inject, list) and (not inject or min(inject) < 0 or sum(inject) <= 0):
        yield (
            "staleness.inject: give the probabilities of lag 0, 1, 2, ...; none negative, not all "
            "zero"
        )
    if inject is not None and config.staleness.on_exceed != "pace":
        yield (
            f"staleness.inject: needs staleness.on_exceed = pace, not {config.staleness.on_exceed}"
        )
    if inject is not None and config.advantage.no_spread == "filter":
        yield (
            "staleness.inject: needs advantage.no_spread = keep: filtered groups shift the planned "
            "batches"
        )
    yield from _check_order(config)


def _check_sizes(config: Config) -> Iterator[str]:
    """Check that batches divide and prompts fit."""
    if config.learner.groups < config.learner.minibatches:
        yield (
            f"learner.minibatches: {config.learner.minibatches} minibatches of "
            f"{config.learner.groups} groups: some would be empty"
        )
    if config.generator.max_new_tokens >= config.generator.context:
        yield (
            f"generator.context: {config.generator.context} tokens leave no room for a prompt "
            f"beside {config.generator.max_new_tokens} new tokens"
        )


def _check_routing(config: Config) -> Iterator[str]:
    """Refuse settings under which the experts of a token cannot be recorded or replayed."""
    model, learner, engine = config.model, config.learner, config.generator.engine
    if model.warm_start_experts == 1 or (model.warm_start_experts and not model.warm_start):
        yield (
            "model.warm_start_experts: needs model.warm_start = true and at least 2 experts, of "
            "which a token uses 2"
        )
    if learner.replay_routing and not ENGINES[engine].records_routing:
        yield (
            f"learner.replay_routing: needs generator.engine = {list_engines('records_routing')}; "
            f"{ENGINES[engine].title} does not record the experts of a token"
        )


def _check_order(config: Config) -> list[str]:
    """Check `staleness.order` against the limit and its treatment."""
    staleness = config.staleness
    unlimited = math.isinf(staleness.limit)
    if staleness.order == "auto" or (
        staleness.order == "ticket" and staleness.on_exceed == "pace" and not unlimited
    ):
        return []
    if staleness.order == "ticket":
        if unlimited:
            return [
                "staleness.order: ticket waits for the oldest completion, even if it is very "
                "late; without a limit (staleness.max_lag = inf) use completion or freshest"
            ]
        return [
            "staleness.order: with ticket order no sample exceeds the limit, so on_exceed = "
            f"{staleness.on_exceed} never acts; use on_exceed = pace"
        ]
    if config.exact or staleness.limit == 0:
        kind = "exact" if config.exact else "synchronous (staleness.max_lag = 0)"
        return [
            f"staleness.order: {staleness.order} forms batches of the groups that are ready first; "
            f"a run that is {kind} can only be repeated with order = ticket"
        ]
    if staleness.inject is not None:
        return [
            f"staleness.order: {staleness.order} trains a ticket in another batch than lag "
            "injection planned; use order = ticket, or remove staleness.inject"
        ]
    if staleness.on_exceed == "pace" and not unlimited:
        return [
            f"staleness.order: {staleness.order} lets slow completions past the limit, and "
            "on_exceed = pace prevents that only with order = ticket; use drop, mask or downweight"
        ]
    return []


def _check_exact(config: Config) -> Iterator[str]:
    """Refuse settings that rule out bitwise equal logprobs."""
    if not ENGINES[config.generator.engine].exact:
        yield (
            f"exact: needs generator.engine = {list_engines('exact')}, not "
            f"{config.generator.engine}"
        )
    if (
        config.weights.in_flight == "keep_kv"
        and config.staleness.limit > 0
        and config.staleness.inject is None
    ):
        yield (
            "exact: weights.in_flight = keep_kv mixes keys of several versions in a completion; "
            "use recompute_kv or between_groups"
        )


def _check_correction(config: Config) -> Iterator[str]:
    correction = config.correction
    if correction.lo is not None and correction.hi is not None and correction.lo > correction.hi:
        yield f"correction.lo: {correction.lo:g} is above correction.hi = {correction.hi:g}"
    yield from _check_rejection(config)
    acting = [
        name
        for name, is_set in (
            ("reject", correction.reject != "none" and correction.reject_at == "proximal"),
            ("veto", correction.veto == "ratio"),
            ("function", bool(correction.function)),
        )
        if is_set
    ]
    if correction.proximal == "behavior" and acting and config.loss.surrogate != "reinforce":
        yield (
            f"correction.{acting[0]}: acts on pi_prox / mu, which correction.proximal = behavior "
            "makes 1; use recompute"
        )
    versions = config.staleness.limit + 2
    if correction.proximal == "version" and config.weights.slots < versions < math.inf:
        yield (
            f"weights.slots: {config.weights.slots}; correction.proximal = version needs the "
            f"weights of max_lag + 2 = {versions:g} versions; raise weights.slots, lower "
            "staleness.max_lag, or use recompute"
        )
    if correction.function and ":" not in correction.function:
        yield f"correction.function: {correction.function} is not module:name"


def _check_rejection(config: Config) -> Iterator[str]:
    correction = config.correction
    for key in ("reject", "reject2"):
        name, lo, hi = (getattr(correction, key + ending) for ending in ("", "_lo", "_hi"))
        if name not in ("none", "ratio") and hi is None:
            yield f"correction.{key}_hi: {key} = {name} has no default bound; give one"
        if name != "none" and lo is not None and hi is not None and lo > hi:
            yield f"correction.{key}_lo: {lo:g} is above correction.{key}_hi = {hi:g}"
        if name in settings.NOT_NEGATIVE and hi is not None and hi < 0:
            yield (
                f"correction.{key}_hi: {name} is never negative, so {hi:g} would reject everything"
            )


def _check_surrogate(config: Config) -> Iterator[str]:
    surrogate = config.loss.surrogate
    correction = config.correction
    if surrogate in settings.ON_BEHAVIOR and correction.proximal != "behavior":
        yield (
            f"loss.surrogate: {surrogate} takes its ratio against the behavior policy; set "
            "correction.proximal = behavior"
        )
    loss = config.loss
    if isinstance(loss, settings.PpoFamilyLoss) and loss.dual_clip and not loss.dual_clip > 1:
        yield f"loss.dual_clip: {loss.dual_clip:g} must be above 1 (0: off)"
    if (
        isinstance(loss, settings.CispoLoss)
        and loss.cispo_absolute
        and not (loss.eps_high or 0) >= 1
    ):
        value = "absent" if loss.eps_high is None else f"{loss.eps_high:g}"
        yield (
            f"loss.eps_high: {value}; with cispo_absolute it is the largest ratio that counts, so "
            "1 or more, for instance 5.0"
        )
    if isinstance(loss, settings.BandLoss) and loss.band_lo >= loss.band_hi:
        yield f"loss.band_lo: {loss.band_lo:g} is not below loss.band_hi = {loss.band_hi:g}"
    if isinstance(loss, settings.ClipCovLoss) and loss.cov_lo >= loss.cov_hi:
        yield f"loss.cov_lo: {loss.cov_lo:g} is not below loss.cov_hi = {loss.cov_hi:g}"


def _find_unread_advantage(config: Config) -> Iterator[str]:
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


def _check_advantage(config: Config) -> Iterator[str]:
    if config.loss.surrogate == "sft":
        yield from _find_unread_advantage(config)
    advantage = config.advantage
    size = config.learner.group_size
    group_baseline = (
        isinstance(advantage, settings.ReinforcePpAdvantage) and advantage.group_baseline
    )
    by_group = advantage.name in settings.BY_GROUP or group_baseline
    if by_group and config.learner.group_size < 2 and config.loss.surrogate != "sft":
        estimator = (
            f"{advantage.name} with advantage.group_baseline" if group_baseline else advantage.name
        )
        yield (
            f"learner.group_size: {config.learner.group_size} sample a prompt leaves {estimator} "
            "nothing to compare with; use 2 or more"
        )
    if (
        advantage.truncated == "soft"
        and not 0 < advantage.truncation_ramp <= config.generator.max_new_tokens
    ):
        yield (
            f"advantage.truncation_ramp: {advantage.truncation_ramp} tokens; soft needs 1 to "
            f"generator.max_new_tokens = {config.generator.max_new_tokens}"
        )
    if isinstance(advantage, settings.PassAtKAdvantage) and not 2 <= (advantage.k or size) <= size:
        yield (
            f"advantage.k: the best of {advantage.k or size} completions; choose from 2 to "
            f"learner.group_size = {size}"
        )
    yield from _check_unshaped_rewards(config)


def _check_unshaped_rewards(config: Config) -> list[str]:
    """Refuse shaped rewards for gdpo and the baseline per prompt, which need unshaped rewards."""
    advantage = config.advantage
    by_prompt = (
        isinstance(advantage, settings.ReinforceAdvantage) and advantage.baseline == "prompt"
    )
    if not (by_prompt or advantage.name == "gdpo"):
        return []
    setting = "advantage.baseline = prompt" if by_prompt else "advantage.name = gdpo"
    shaping = (
        ("advantage.truncated", advantage.truncated not in ("keep", "mask")),
        ("advantage.rewards", advantage.rewards != "raw"),
        ("kl.reward.coefficient", config.kl.reward.coefficient > 0),
    )
    return [
        f"{key}: shapes the rewards, and {setting} needs them unshaped; remove one of them"
        for key, is_set in shaping
        if is_set
    ]


def _check_reward(config: Config) -> Iterator[str]:
    """Check the sources of prompts and rewards."""
    reward = config.reward
    yield from (f"reward.{problem}" for problem in _check_judge(reward.judge))
    if reward.weights and len(reward.weights) != len(reward.functions):
        yield (
            f"reward.weights: {len(reward.weights)} weights for {len(reward.functions)} "
            "reward.functions; give one for each"
        )
    if len(reward.function_names) != len(reward.functions):
        yield "reward.functions: two have one name and one module's name; rename one of them"
    if not config.task.mixture:
        yield from (f"task.{problem}" for problem in _check_prompts(config.task, config.agent))
    if config.model.warm_start and config.task.name.startswith(WITHOUT_ANSWERS):
        yield (
            f"model.warm_start: {config.task.name} has no answers to learn from; set model.path to "
            "your own model"
        )
    if config.task.options and not config.task.name.startswith("reasoning_gym:"):
        yield f"task.options: {config.task.name} has no options; only reasoning_gym:GENERATOR has"


def _check_judge(judge: JudgeConfig) -> Iterator[str]:
    if bool(judge.url) != bool(judge.model):
        yield "judge: needs both url and model, the model's name on the server"
    if judge.url and not judge.url.startswith(("http://", "https://")):
        yield f"judge.url: {judge.url} must begin with http:// or https://"
    if judge.low >= judge.high:
        yield f"judge.low: {judge.low:g} is not below high = {judge.high:g}"


WITHOUT_ANSWERS = ("env", "seeds", "reasoning_gym:")  # prefixes of task.name


def _check_prompts(task: TaskSource, agent: AgentSource) -> Iterator[str]:
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


SOURCE_KEYS = ("env", "tools", "serve", "command", "function")


def _check_sessions(config: Config) -> Iterator[str]:
    """Refuse settings that sessions do not support, or were never tested with."""
    for title, agent in config.agents.items():
        prefix = f"task.mixture: {title}: " if title else ""
        for problem in (
            *apply_table("agents", agent),
            *_check_source(agent),
            *_check_opponents(agent),
        ):
            yield prefix + problem
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
    if agent.forced == "constrain" and not ENGINES[config.generator.engine].records_support:
        yield (
            "agent.forced: constrain needs an engine that records the tokens that each answer was "
            f"sampled from; set generator.engine = {list_engines('records_support')}"
        )
    if config.staleness.inject is not None:
        yield (
            "staleness.inject: supports single completions only, but with [agent] samples are "
            "sessions"
        )
    if agent.fork == "row":
        yield from [
            f"{setting}: needs the order of a session's tokens, which several training sequences "
            'do not have: set agent.fork = "end"'
            for setting in settings.list_ordered_settings(config)
        ]


def _check_source(agent: AgentConfig) -> Iterator[str]:
    """Check the source of an agent's sessions."""
    for key in ("command", "function"):
        others = [name for name in SOURCE_KEYS if name != key and getattr(agent, name)]
        if getattr(agent, key) and others:
            keys = " and ".join(f"agent.{name}" for name in others)
            yield f"agent.{key}: it is the agent itself; remove {keys}"
    if agent.command and not all(agent.command):
        yield ('agent.command: a word is empty; write a list like ["python", "agent.py"]')
    if invalid := [name for name in agent.env_pass if not name or "=" in name]:
        yield (
            f"agent.env_pass: {invalid[0]!r} is not a variable's name; give only the name, the "
            "value is inherited"
        )
    if agent.args and agent.env.startswith("textarena:"):
        yield f"agent.args: {agent.env} takes none; remove them"
    if agent.hub and not agent.env.partition(":")[2]:
        yield f"agent.env: {agent.env} names no environment; write {agent.hub}:NAME"
    module, colon, name = agent.function.rpartition(":")
    if agent.function and not (module and colon and name.isidentifier()):
        yield f"agent.function: {agent.function}; write module:function or file.py:function"


def _check_opponents(agent: AgentConfig) -> Iterator[str]:
    """Check the opponents of a two-player game."""
    for key in ("opponent", "eval_opponent"):
        value = getattr(agent, key)
        module, colon, name = value.rpartition(":")
        if value and value not in (RANDOM, SELF) and not (module and colon and name.isidentifier()):
            yield (
                f"agent.{key}: {value}; choose random or self, or write module:function or "
                "file.py:function"
            )


def _check_mixture(config: Config) -> Iterator[str]:
    """Check the parts of a mixture of tasks."""
    task = config.task
    if bool(task.mixture) != (task.name == "mixture"):
        yield (
            f"task.name: {task.name} with {len(task.mixture)} parts in task.mixture; a mixture "
            "needs both task.name = mixture and tables [[task.mixture]]"
        )
    names = {"heldout", "ood", *(eval_set.name for eval_set in config.evaluation.sets)}
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


def _check_part(config: Config, part: MixedTaskConfig) -> Iterator[str]:
    """Check a part of a mixture; the problems do not contain its name."""
    yield from apply_table("parts", part)
    agent = part.agent if part.agent.uses_sessions else config.agent
    yield from _check_prompts(part, agent)
    if part.agent != AgentSource() and not part.agent.uses_sessions:
        yield "agent: has no source; set env, tools, command, function or serve"
    if part.options and not part.name.startswith("reasoning_gym:"):
        yield f"options: {part.name} has no options; only reasoning_gym:GENERATOR has"
    if isinstance(part.weight, list):
        batches = [batch for batch, _ in part.weight]
        if batches != sorted(set(batches)):
            yield "weight: a schedule is a list of [batch, weight], each at a later batch"
    if part.max_new_tokens > config.generator.max_new_tokens:
        yield (
            f"max_new_tokens = {part.max_new_tokens} is above generator.max_new_tokens = "
            f"{config.generator.max_new_tokens}; raise that one"
        )
    if part.curriculum.hard_to >= part.curriculum.easy_from:
        yield (
            f"curriculum: hard_to = {part.curriculum.hard_to:g} is not below easy_from = "
            f"{part.curriculum.easy_from:g}"
        )
    module, colon, name = part.reward.rpartition(":")
    if part.reward and not (module and colon and name.isidentifier()):
        yield f"reward = {part.reward}; write module:function or file.py:function"
    if part.has_own_reward and agent.env:
        yield (
            "the environment (agent.env) gives the rewards; remove reward, judge and reward_model"
        )
    yield from _check_judge(part.judge)
    if config.model.warm_start and part.name.startswith(WITHOUT_ANSWERS):
        yield "model.warm_start: it has no answers to learn from; set model.path to your own model"


def _check_evaluation(config: Config) -> Iterator[str]:
    """Check the evaluation sets and the generators reserved for them."""
    reserved = config.evaluation.generators
    if reserved and reserved >= config.generators:
        yield (
            f"evaluation.generators: {reserved} of generators = {config.generators} leave none for "
            "training; raise generators or lower it"
        )
    names: set[str] = set()
    for eval_set in config.evaluation.sets:
        for problem in _check_evaluation_set(config, eval_set):
            yield f"evaluation.sets: {eval_set.name}: {problem}"
        if eval_set.name in names:
            yield f"evaluation.sets: two sets are called {eval_set.name}; give each its own name"
        names.add(eval_set.name)


def _check_evaluation_set(config: Config, eval_set: EvaluationSetConfig) -> Iterator[str]:
    yield from apply_table("evaluation_sets", eval_set)
    if eval_set.options and not eval_set.task.startswith("reasoning_gym:"):
        yield "options are for task = reasoning_gym:GENERATOR; remove them"
    if large := [count for count in eval_set.pass_at if count > eval_set.samples]:
        yield f"pass_at = {large[0]} needs at least as many samples, not {eval_set.samples}"
    least = ENGINES[config.generator.engine].least_temperature
    if 0 < eval_set.temperature < least:
        yield (
            f"temperature = {eval_set.temperature:g} is below what the engine samples at, {least:g}"
        )
    module, colon, name = eval_set.reward.rpartition(":")
    if eval_set.reward and not (module and colon and name.isidentifier()):
        yield f"reward = {eval_set.reward}; write module:function or file.py:function"
    if config.agent.env and (eval_set.reward or eval_set.task or eval_set.file):
        yield "the environment (agent.env) gives prompts and rewards; remove file, task and reward"


def _check_engine(config: Config) -> Iterator[str]:
    engine = ENGINES[config.generator.engine]
    for key, temperature in (
        ("generator.temperature", config.generator.temperature),
        ("evaluation.temperature", config.evaluation.temperature),
    ):
        if temperature < engine.least_temperature:
            yield (
                f"{key}: {temperature:g}; {engine.title} raises lower temperatures to "
                f"{engine.least_temperature:g}, and the recorded one would be wrong; use "
                f"{engine.least_temperature:g} or more"
            )
    if not engine.numbered_gpu and config.model.device.startswith("cuda:"):
        yield (
            f"model.device: {config.model.device}; {engine.title} uses the first visible GPU: set "
            "cuda, and generator.gpus to choose"
        )
    for key, gpus in (
        ("generator.gpus", config.generator.gpus),
        ("learner.gpus", config.learner.gpus),
    ):
        if gpus and config.model.device not in ("auto", "cuda"):
            yield (
                f"{key}: chooses the GPU, and so does model.device = {config.model.device}: set "
                "that to auto or cuda"
            )
    if config.learner.gpus and (
        len(config.learner.gpus) != config.learner.ranks
        or len(set(config.learner.gpus)) < len(config.learner.gpus)
    ):
        yield (
            f"learner.gpus: {config.learner.gpus} for {config.learner.ranks} rank(s) "
            "(learner.ranks); each needs its own GPU"
        )
    mesh, ranks = config.learner.mesh, config.learner.ranks
    if mesh.replicate * (mesh.shard or max(1, ranks // mesh.replicate)) != ranks:
        yield (
            f"learner.mesh: {mesh.replicate} copies of {mesh.shard or 'equally many'} ranks are "
            f"not the {ranks} of learner.ranks; set learner.ranks to shard x replicate"
        )
    if (
        config.learner.ranks > 1
        and not config.learner.gpus
        and config.model.device.startswith("cuda")
    ):
        yield (
            f"learner.gpus: {config.learner.ranks} ranks would share model.device = "
            f"{config.model.device}; give one number each"
        )
    shared = sorted(set(config.learner.gpus) & set(config.generator.gpus))
    if config.weights.transport == "nccl" and shared:
        yield (
            f"weights.transport: nccl cannot connect GPU {shared[0]} with itself (learner.gpus, "
            "generator.gpus); use auto"
        )
    for key in sorted({key for info in ENGINES.values() for key in info.settings}):
        is_on = getattr(config.generator, key) not in (0, "none", "", [])
        if is_on and key not in engine.settings:
            owners = " or ".join(name for name, info in ENGINES.items() if key in info.settings)
            yield (
                f"generator.{key}: belongs to generator.engine = {owners}, not to "
                f"{config.generator.engine}"
            )


def find_warnings(config: Config) -> list[str]:
    """Return the warnings that a run prints once at its start."""
    return [
        *_find_rate_warnings(config),
        *_find_kl_warnings(config),
        *_find_truncation_warnings(config),
        *apply_table("warnings", config),
    ]


def _find_rate_warnings(config: Config) -> Iterator[str]:
    """Warn about a learning rate that is far above that of the model's size."""
    if config.learner.optimizer != "adamw" or config.model.path.startswith("hf://"):
        return
    usual, reason = presets.choose_learning_rate(config.model.path, lora=bool(config.lora.rank))
    if usual is not None and config.learner.lr >= 10 * usual:
        yield (
            f"learner.lr: {config.learner.lr:g} is that of a tiny model; {usual:g} is the {reason}"
        )


def _find_kl_warnings(config: Config) -> Iterator[str]:
    """Warn about KL penalties whose gradient is not that of the KL."""
    in_loss = config.kl.loss
    has_loss_term = config.kl.loss.coefficient > 0
    stale = config.staleness.limit > 0 or config.learner.epochs * config.learner.minibatches > 1
    if has_loss_term and in_loss.estimator == "k1" and in_loss.off_policy == "none":
        advice = (
            "; off policy, as here, it pushes away from the data (minus the gradient of KL(mu || "
            "pi)); use k3"
            if stale
            else ""
        )
        yield ("kl: k1 in the loss has no expected gradient on policy" + advice)
    if has_loss_term and in_loss.off_policy in ("prefix", "prefix_full"):
        cut = "staleness.on_exceed = mask" if config.staleness.on_exceed == "mask" else ""
        if cut := cut or (
            "correction.reject by token"
            if config.correction.reject != "none" and config.correction.reject_over == "token"
            else ""
        ):
            yield (
                f"kl: off_policy = {in_loss.off_policy} is exact for whole completions; {cut} "
                "removes tokens from the product of ratios"
            )


def _find_truncation_warnings(config: Config) -> Iterator[str]:
    """Warn about top-p and top-k of an engine that does not record what they keep."""
    truncates = config.generator.top_p < 1 or config.generator.top_k > 0
    if truncates and not ENGINES[config.generator.engine].records_support:
        yield (
            "generator: top_p and top_k restrict the sampled distribution, and "
            f"{ENGINES[config.generator.engine].title} does not record the tokens that they keep, "
            "so the ratios are biased and nothing corrects them; set top_p = 1 and top_k = 0, or "
            f"generator.engine = {list_engines('records_support')}"
        )
