"""Combinations of settings that cannot work (`check`) or deserve a word (`warnings`).  Pure."""

from __future__ import annotations

import math
import re

from asyncrl.algorithms import settings
from asyncrl.config.agents import RANDOM, SELF
from asyncrl.config.engines import ENGINES, engines_with
from asyncrl.config.tree import Config


def check(config: Config) -> list[str]:
    """Rules that span several keys; each problem begins with its key and shows its arithmetic."""
    return (
        (_agent(config) if config.agent.uses_sessions else [])
        + (_exact(config) if config.exact else [])
        + _name(config)
        + device_problems(config.model.device)
        + _staleness(config)
        + _sizes(config)
        + _needless(config)
        + _backend(config)
        + _lora(config)
        + _limit(config)
        + _correction(config)
        + _surrogate(config)
        + _kl(config)
        + _reshape(config)
        + _stop(config)
        + _advantage(config)
        + _value(config)
        + _engine(config)
        + _reward(config)
    )


def _name(config: Config) -> list[str]:
    """Of the run directory."""
    out = []
    if config.name in (".", "..") or set(config.name) & {"/", "\\", "\0"}:
        out.append(
            f"name: {config.name!r} is no name of one directory; where the directories of runs lie "
            "is "
            "`runs`"
        )
    return out


def device_problems(device: str) -> list[str]:
    """What is wrong with `model.device`."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        return []
    return [f"model.device: {device!r} is no device; choose one of auto, cpu, cuda, cuda:N"]


def _staleness(config: Config) -> list[str]:
    """The limit, and what is injected under it."""
    out = []
    lag = config.staleness.limit
    inject = config.staleness.inject
    if config.staleness.ess_floor and (inject is not None or config.staleness.on_exceed != "pace"):
        out.append(
            "staleness.max_lag: a limit that sets itself is a promise to each ticket, which needs "
            "staleness.on_exceed = pace and no injected lag"
        )
    if math.isnan(lag) or (not math.isinf(lag) and lag != int(lag)):
        out.append(f"staleness.max_lag: {lag:g} is neither a whole number nor inf")
    most = inject if isinstance(inject, int) else (len(inject) - 1 if inject else 0)
    if inject is not None and most > lag:
        out.append(
            f"staleness.inject: injects up to {most} versions, above staleness.max_lag = {lag:g}"
        )
    if isinstance(inject, list) and (not inject or min(inject) < 0 or sum(inject) <= 0):
        out.append(
            "staleness.inject: give the probabilities of lag 0, 1, 2, ...; none negative, not all "
            "zero"
        )
    if inject is not None and config.staleness.on_exceed != "pace":
        out.append(
            f"staleness.inject: needs staleness.on_exceed = pace, not {config.staleness.on_exceed}"
        )
    if inject is not None and config.advantage.no_spread == "filter":
        out.append(
            "staleness.inject: needs advantage.no_spread = keep: filtered groups shift the planned "
            "batches"
        )
    return out + _order(config)


def _sizes(config: Config) -> list[str]:
    """What must fit into what."""
    out = []
    if config.learner.groups < config.learner.minibatches:
        out.append(
            f"learner.minibatches: {config.learner.minibatches} minibatches of "
            f"{config.learner.groups} "
            "groups: some would be empty"
        )
    if config.generator.max_new_tokens >= config.generator.context:
        out.append(
            f"generator.context: {config.generator.context} tokens leave no room for a prompt "
            "beside "
            f"{config.generator.max_new_tokens} new tokens"
        )
    return out


def _needless(config: Config) -> list[str]:
    """Settings of the update that have nothing to act on."""
    out = []
    if config.correction.proximal == "behavior" and config.correction.preset not in ("", "none"):
        out.append(
            "correction.proximal: behavior makes every weight 1, so the preset "
            f"{config.correction.preset} has nothing to act on; use recompute"
        )
    if config.stop.kl_max > 0 and config.learner.epochs * config.learner.minibatches == 1:
        out.append(
            "stop.kl_max: with one optimizer step a batch there is nothing to stop; raise "
            "learner.epochs or learner.minibatches"
        )
    return out


def _backend(config: Config) -> list[str]:
    """What the learner's backend and the wires can do."""
    out = []
    if config.learner.backend == "torch" and config.learner.ranks > 1:
        out.append(
            f"learner.ranks: {config.learner.ranks} ranks need learner.backend = deepspeed; torch "
            "is "
            "one process"
        )
    if config.learner.offload and (
        config.learner.backend != "deepspeed" or config.learner.zero_stage == 0
    ):
        out.append(
            "learner.offload: needs learner.backend = deepspeed and learner.zero_stage = 1 or "
            "higher; elsewhere nothing moves to the CPU"
        )
    if (
        config.learner.backend == "deepspeed"
        and config.learner.zero_stage == 0
        and config.model.dtype == "bfloat16"
    ):
        out.append(
            "learner.zero_stage: 0 with model.dtype = bfloat16 keeps no fp32 copy of the weights "
            "and drifts from stages 1 to 3; use 1 or higher"
        )
    if config.weights.transport == "tcp" and not config.wires.weights_address:
        out.append(
            "wires.weights_address: weights.transport = tcp needs an address, for instance "
            "tcp://127.0.0.1:0"
        )
    return out


def _lora(config: Config) -> list[str]:
    """What adapters cannot be combined with, or were never tried with."""
    lora = config.lora
    if not lora.rank:
        return []
    dtypes = ("same", config.model.dtype)
    refused = (
        (
            config.learner.backend == "deepspeed" and config.learner.zero_stage == 3,
            "learner.zero_stage: 3 partitions whole models; adapters need no more than 2",
        ),
        (
            config.generator.dtype not in dtypes,
            "generator.dtype: base and adapter belong together bit for bit; use same",
        ),
        (
            config.weights.transport in ("nccl", "gloo"),
            f"weights.transport: {config.weights.transport} sends whole weights only; use auto",
        ),
        (bool(config.exact), "exact: the learner computes beside the base, the engine merged"),
        (config.record.stream, "record.stream: replay trains whole weights only"),
        (config.advantage.name == "gae", "advantage.name: gae was never tried with adapters"),
    )
    return [f"{why} (lora.rank = {lora.rank})" for wrong, why in refused if wrong]


def _limit(config: Config) -> list[str]:
    """What happens above a limit, where there is none."""
    out = []
    if config.staleness.on_exceed in ("drop", "mask", "downweight") and math.isinf(
        config.staleness.limit
    ):
        out.append(
            f"staleness.on_exceed: {config.staleness.on_exceed} never acts without a limit "
            "(staleness.max_lag = inf)"
        )
    return out


def _order(config: Config) -> list[str]:
    """Where `staleness.order` cannot be what it says."""
    staleness = config.staleness
    free = math.isinf(staleness.limit)
    if staleness.order == "auto" or (
        staleness.order == "ticket" and staleness.on_exceed == "pace" and not free
    ):
        return []
    if staleness.order == "ticket":
        if free:
            return [
                "staleness.order: ticket waits for the oldest answer, however late; without a "
                "limit (staleness.max_lag = inf) use completion or freshest"
            ]
        return [
            "staleness.order: with ticket order nothing passes the limit, so on_exceed = "
            f"{staleness.on_exceed} has nothing to do; that is on_exceed = pace"
        ]
    if config.exact or staleness.limit == 0:
        what = "exact" if config.exact else "synchronous (staleness.max_lag = 0)"
        return [
            f"staleness.order: {staleness.order} makes batches of what happens to be ready; runs "
            "that are "
            f"{what} repeat because of ticket order: use that"
        ]
    if staleness.inject is not None:
        return [
            f"staleness.order: {staleness.order} trains a ticket in another batch than lag "
            "injection "
            "planned; use ticket order, or leave staleness.inject out"
        ]
    if staleness.on_exceed == "pace" and not free:
        return [
            f"staleness.order: {staleness.order} lets slow answers past the limit, which on_exceed "
            "= pace "
            "keeps by ticket order alone; use drop, mask or downweight"
        ]
    return []


def _exact(config: Config) -> list[str]:
    """What bitwise equal logprobs rule out."""
    out = []
    generator = config.generator
    if config.model.dtype != "float32" or generator.dtype not in ("same", "float32"):
        out.append("exact: needs model.dtype = float32 and generator.dtype = same")
    if generator.mantissa_bits:
        out.append(
            "exact: generator.mantissa_bits rounds the generator's weights, which the learner's "
            "are not; set it to 0"
        )
    if not ENGINES[config.generator.engine].exact:
        out.append(
            f"exact: needs generator.engine = {engines_with('exact')}, not "
            f"{config.generator.engine}"
        )
    if config.learner.backend != "torch":
        out.append(f"exact: needs learner.backend = torch, not {config.learner.backend}")
    if generator.top_p < 1 or generator.top_k > 0:
        out.append(
            "exact: generator.top_p and top_k renormalise what is sampled from, which the learner "
            "does not; set top_p = 1 and top_k = 0"
        )
    if (
        config.weights.in_flight == "keep_kv"
        and config.staleness.limit > 0
        and config.staleness.inject is None
    ):
        out.append(
            "exact: weights.in_flight = keep_kv mixes keys of several versions in an answer; use "
            "recompute_kv or between_groups"
        )
    return out


def _correction(config: Config) -> list[str]:
    correction = config.correction
    out = []
    if correction.lo is not None and correction.hi is not None and correction.lo > correction.hi:
        out.append(f"correction.lo: {correction.lo:g} is above correction.hi = {correction.hi:g}")
    out += _rejection(config)
    acts = [
        n
        for n, on in (
            ("reject", correction.reject != "none" and correction.reject_at == "proximal"),
            ("veto", correction.veto == "ratio"),
            ("m2", correction.m2 > 0 and correction.m2_over == "all"),
            ("function", bool(correction.function)),
        )
        if on
    ]
    if correction.proximal == "behavior" and acts and config.loss.surrogate != "reinforce":
        out.append(
            f"correction.{acts[0]}: acts on pi_prox / mu, which correction.proximal = behavior "
            "makes 1; use recompute"
        )
    if correction.function and ":" not in correction.function:
        out.append(f"correction.function: {correction.function} is not module:name")
    if (
        correction.denominator == "after"
        and correction.reject == "none"
        and correction.veto == "none"
    ):
        out.append(
            "correction.denominator: after counts what rejection leaves, and nothing is rejected; "
            "set correction.reject or veto"
        )
    return out


def _rejection(config: Config) -> list[str]:
    correction = config.correction
    out = []
    for key in ("reject", "reject2"):
        name, lo, hi = (getattr(correction, key + end) for end in ("", "_lo", "_hi"))
        if name not in ("none", "ratio") and hi is None:
            out.append(f"correction.{key}_hi: {key} = {name} has no default bound; give one")
        if name != "none" and lo is not None and hi is not None and lo > hi:
            out.append(f"correction.{key}_lo: {lo:g} is above correction.{key}_hi = {hi:g}")
        if name in settings.NOT_NEGATIVE and hi is not None and hi < 0:
            out.append(
                f"correction.{key}_hi: {name} is never negative, {hi:g} would reject everything"
            )
    if correction.reject != "none" and correction.reject_at == "target":
        if correction.denominator == "after":
            out.append(
                "correction.denominator: after is not known before the step with reject_at = "
                "target; use before"
            )
        if correction.self_normalize:
            out.append(
                "correction.self_normalize: divides by the mean of what is kept, which is not "
                "known before the step with reject_at = target; leave one out"
            )
    return out


def _surrogate(config: Config) -> list[str]:
    surrogate = config.loss.surrogate
    correction = config.correction
    out = []
    if config.loss.coefficient == 0 and not (config.kl.loss.coefficient or config.loss.entropy):
        out.append(
            "loss.coefficient: 0 leaves nothing to learn from; give kl.loss.coefficient (kl.preset "
            "= distill), or leave it out"
        )
    if surrogate in settings.ON_BEHAVIOR and correction.proximal != "behavior":
        out.append(
            f"loss.surrogate: {surrogate} takes its ratio against the behaviour policy; set "
            "correction.proximal = behavior"
        )
    if surrogate == "reinforce" and correction.level == "none" and not correction.function:
        out.append(
            "loss.surrogate: reinforce is importance sampling by correction.level, which is none; "
            "set correction.proximal = recompute, and level = token, sequence or geometric"
        )
    if surrogate == "reinforce" and correction.denominator == "after":
        out.append(
            "correction.denominator: after is not known before the step for loss.surrogate = "
            "reinforce; use before"
        )
    loss = config.loss
    if isinstance(loss, settings.PpoFamilyLoss) and loss.dual_clip and not loss.dual_clip > 1:
        out.append(f"loss.dual_clip: {loss.dual_clip:g} must be above 1 (0: off)")
    if (
        isinstance(loss, settings.CispoLoss)
        and loss.cispo_absolute
        and not (loss.eps_high or 0) >= 1
    ):
        given = "absent" if loss.eps_high is None else f"{loss.eps_high:g}"
        out.append(
            f"loss.eps_high: {given}; with cispo_absolute it is the largest ratio that counts, so "
            "1 or more, for instance 5.0"
        )
    if isinstance(loss, settings.BandLoss) and loss.band_lo >= loss.band_hi:
        out.append(f"loss.band_lo: {loss.band_lo:g} is not below loss.band_hi = {loss.band_hi:g}")
    if isinstance(loss, settings.ClipCovLoss) and loss.cov_lo >= loss.cov_hi:
        out.append(f"loss.cov_lo: {loss.cov_lo:g} is not below loss.cov_hi = {loss.cov_hi:g}")
    return out


def _kl(config: Config) -> list[str]:
    in_loss = config.kl.loss
    in_reward = config.kl.reward
    out = []
    if config.loss.surrogate == "sft" and in_reward.coefficient > 0:
        out.append(
            "kl.reward.coefficient: loss.surrogate = sft takes no advantage, so KL in the reward "
            "would do nothing; use kl.loss.coefficient"
        )
    if in_loss.off_policy == "prefix" and in_loss.estimator != "k3":
        out.append(
            f"kl.loss.estimator: off_policy = prefix is built on k3, not {in_loss.estimator}"
        )
    if in_loss.off_policy == "prefix_full" and config.learner.backend != "torch":
        out.append(
            "kl.loss.off_policy: prefix_full reads both models' last states, which needs "
            f"learner.backend = torch, not {config.learner.backend}; use prefix"
        )
    if in_reward.controller == "adaptive" and not in_reward.target > 0:
        out.append("kl.reward.target: the adaptive controller needs a target above 0")
    return out


def _reshape(config: Config) -> list[str]:
    reshape = config.reshape
    out = []
    if config.loss.surrogate == "reshape":
        if reshape.budget == "tokens" and config.stop.action == "slow":
            out.append(
                "reshape.budget: tokens and stop.action = slow would spend the same KL budget "
                "twice; choose one"
            )
        if reshape.budget == "global" and reshape.form == "box_cox":
            out.append(
                "reshape.budget: global lowers gamma, and in the box_cox form gamma = 0 still has "
                "a gradient; use budget = tokens or form = power"
            )
        if reshape.budget != "none" and config.learner.epochs * config.learner.minibatches == 1:
            out.append(
                "reshape.budget: with one optimizer step a batch there is nothing to budget; raise "
                "learner.epochs or minibatches"
            )
    return out


def _stop(config: Config) -> list[str]:
    out = []
    if config.stop.ess_min > 0 and config.learner.epochs * config.learner.minibatches == 1:
        out.append(
            "stop.ess_min: with one optimizer step a batch there is nothing to stop; raise "
            "learner.epochs or learner.minibatches"
        )
    if config.learner.gradient_cosine != "off" and config.learner.backend != "torch":
        out.append(
            "learner.gradient_cosine: reads whole gradients, which needs learner.backend = torch, "
            f"not {config.learner.backend}"
        )
    return out


def _advantage(config: Config) -> list[str]:
    advantage = config.advantage
    out = []
    size = config.learner.group_size
    group_baseline = (
        isinstance(advantage, settings.ReinforcePpAdvantage) and advantage.group_baseline
    )
    by_group = advantage.name in settings.BY_GROUP or group_baseline
    if by_group and config.learner.group_size < 2 and config.loss.surrogate != "sft":
        what = (
            f"{advantage.name} with advantage.group_baseline" if group_baseline else advantage.name
        )
        out.append(
            f"learner.group_size: {config.learner.group_size} sample a prompt leaves {what} "
            "nothing to "
            "compare with; 2 or more"
        )
    if advantage.no_spread == "filter" and config.learner.group_size < 2:
        out.append(
            "learner.group_size: 1 sample a prompt never has a spread, so advantage.no_spread = "
            "filter would leave nothing to train on; 2 or more"
        )
    if advantage.truncated in ("penalty", "fixed", "soft") and not advantage.truncation_penalty > 0:
        hint = "; or advantage.truncated = zero" if advantage.truncated == "fixed" else ""
        out.append(
            f"advantage.truncation_penalty: 0 makes advantage.truncated = {advantage.truncated} do "
            "nothing "
            f"of its own; give one above 0{hint}"
        )
    if (
        isinstance(advantage, settings.ReinforceAdvantage)
        and advantage.baseline == "ema"
        and advantage.rewards == "whiten"
    ):
        out.append(
            "advantage.baseline: ema follows the mean reward from batch to batch, and "
            "advantage.rewards = whiten makes it 0 in each; use none or batch"
        )
    if (
        advantage.truncated == "soft"
        and not 0 < advantage.truncation_ramp <= config.generator.max_new_tokens
    ):
        out.append(
            f"advantage.truncation_ramp: {advantage.truncation_ramp} tokens; soft needs 1 to "
            f"generator.max_new_tokens = {config.generator.max_new_tokens}"
        )
    if advantage.name == "remax" and config.learner.group_size < 2:
        out.append(
            f"learner.group_size: {config.learner.group_size}; the first sample of a group is "
            "remax's "
            "greedy baseline, so 2 or more"
        )
    if advantage.name == "remax" and config.exact:
        out.append(
            "advantage.name: remax draws its baseline greedily, among whose logprobs exact mode "
            "does not hold; use rloo"
        )
    if isinstance(advantage, settings.PassAtKAdvantage) and not 2 <= (advantage.k or size) <= size:
        out.append(
            f"advantage.k: the best of {advantage.k or size} answers needs 2 or more, and not more "
            f"than learner.group_size = {size}"
        )
    if (
        isinstance(advantage, settings.OpobAdvantage)
        and advantage.squared_norm != "length"
        and config.learner.backend != "torch"
    ):
        out.append(
            f"advantage.squared_norm: {advantage.squared_norm} reads whole gradients and states, "
            f"which needs learner.backend = torch, not {config.learner.backend}; use length"
        )
    if advantage.name == "otb" and config.learner.backend != "torch":
        out.append(
            "advantage.name: otb reads the model's states, which needs learner.backend = torch, "
            f"not {config.learner.backend}"
        )
    out += _as_they_came(config)
    return out


def _as_they_came(config: Config) -> list[str]:
    """gdpo and the baseline of prompts look at rewards as they came: nothing may shape them."""
    advantage = config.advantage
    by_prompt = (
        isinstance(advantage, settings.ReinforceAdvantage) and advantage.baseline == "prompt"
    )
    if not (by_prompt or advantage.name == "gdpo"):
        return []
    what = "advantage.baseline = prompt" if by_prompt else "advantage.name = gdpo"
    shaping = (
        ("advantage.truncated", advantage.truncated not in ("keep", "mask")),
        ("advantage.rewards", advantage.rewards != "raw"),
        ("kl.reward.coefficient", config.kl.reward.coefficient > 0),
    )
    return [
        f"{key}: shapes rewards, and {what} looks at them as they came; leave one out"
        for key, on in shaping
        if on
    ]


def _value(config: Config) -> list[str]:
    value = config.value
    out = []
    if config.advantage.name != "gae":
        return []
    if config.learner.backend != "torch":
        out.append(
            "advantage.name: the value head of gae needs learner.backend = torch, not "
            f"{config.learner.backend}"
        )
    if config.loss.surrogate == "sft":
        out.append(
            "advantage.name: gae has nothing to do under loss.surrogate = sft, which takes no "
            "advantage"
        )
    if value.trunk == "shared" and value.init in ("reward_model", "random"):
        out.append(
            f"value.init: {value.init} brings a trunk of its own; with value.trunk = shared choose "
            "policy or zeros"
        )
    if value.init == "reward_model" and not value.path:
        out.append(
            "value.path: the directory of the reward model; value.init = reward_model needs it"
        )
    if value.trunk == "shared" and value.coefficient == 0:
        out.append("value.coefficient: 0 leaves the value head untrained; give one above 0")
    return out


def _reward(config: Config) -> list[str]:
    """Who asks and who judges: the task, an environment, a function, a judge or a model."""
    reward = config.reward
    judge = reward.judge
    out = []
    if reward.model.path and (reward.function or judge.url):
        out.append(
            "reward.model.path: the model judges alone; leave reward.function and reward.judge out"
        )
    if bool(judge.url) != bool(judge.model):
        out.append("reward.judge: url and model, the name the server knows it by, go together")
    if judge.url and not judge.url.startswith(("http://", "https://")):
        out.append(f"reward.judge.url: {judge.url} begins with neither http:// nor https://")
    if config.task.name in ("seeds", "guess", "nim") and not config.agent.env:
        out.append(
            f"task.name: {config.task.name} is for an environment that asks and pays: give "
            "agent.env"
        )
    if config.model.warm_start and config.task.name.startswith(("seeds", "reasoning_gym:")):
        out.append(
            f"model.warm_start: {config.task.name} shows no answers to learn from; point "
            "model.path at a model of your own"
        )
    if config.task.options and not config.task.name.startswith("reasoning_gym:"):
        out.append(f"task.options: {config.task.name} has none; reasoning_gym:GENERATOR does")
    if config.task.columns and config.task.name != "file":
        out.append(f"task.columns: {config.task.name} reads no file; task.name = file does")
    if judge.low >= judge.high:
        out.append(f"reward.judge.low: {judge.low:g} is not below high = {judge.high:g}")
    return out


DOORS = ("env", "tools", "serve", "command", "function")


def _agent(config: Config) -> list[str]:
    """What sessions cannot be combined with, or were never tried with."""
    agent = config.agent
    out = []
    if agent.env and agent.tools:
        out.append("agent.env: an environment has its own tools; leave agent.tools out")
    if agent.serve and (agent.env or agent.tools):
        out.append("agent.serve: the harness has its own environment; leave env and tools out")
    for key in ("command", "function"):
        others = [name for name in DOORS if name != key and getattr(agent, name)]
        if getattr(agent, key) and others:
            said = " and ".join(f"agent.{name}" for name in others)
            out.append(f"agent.{key}: it is the agent itself; leave {said} out")
    if agent.forced == "refuse" and not agent.http:
        out.append(
            "agent.forced: an agent that asks over HTTP can force an answer; give agent.serve, "
            "command or function"
        )
    if agent.command and not all(agent.command):
        out.append('agent.command: a word is empty; write a list like ["python", "agent.py"]')
    if agent.env_pass and not agent.command:
        out.append("agent.env_pass: is for the program of agent.command; give it, or leave it out")
    if wrong := [name for name in agent.env_pass if not name or "=" in name]:
        out.append(f"agent.env_pass: {wrong[0]!r} is no name of a variable; its value is inherited")
    module, colon, name = agent.function.rpartition(":")
    if agent.function and not (module and colon and name.isidentifier()):
        out.append(f"agent.function: {agent.function}; write module:function or file.py:function")
    out += _opponents(config)
    refused = (
        (config.staleness.inject is not None, "staleness.inject: knows single answers only"),
        (config.staleness.delay > 0, "staleness.delay: knows single answers only"),
        (config.advantage.name == "remax", "advantage.name: remax has no greedy session"),
        (
            config.advantage.truncated == "soft",
            "advantage.truncated: soft knows one answer's limit",
        ),
        (bool(config.wires.curve_dir), "wires.curve_dir: a gateway has no key"),
    )
    out += [f"{why}, and [agent] makes samples sessions" for wrong, why in refused if wrong]
    if agent.fork == "row":
        out += [
            f"{said}: needs the order of a session's tokens, which rows have not: set agent.fork = "
            '"end"'
            for said in settings.ordered(config)
        ]
    if agent.max_tokens < config.generator.max_new_tokens:
        out.append(
            f"agent.max_tokens: {agent.max_tokens} are fewer than one call may draw "
            f"(generator.max_new_tokens = {config.generator.max_new_tokens})"
        )
    return out


def _opponents(config: Config) -> list[str]:
    """Who plays the other side of a game of two."""
    agent = config.agent
    out = []
    for key in ("opponent", "eval_opponent"):
        value = getattr(agent, key)
        module, colon, name = value.rpartition(":")
        if value and value not in (RANDOM, SELF) and not (module and colon and name.isidentifier()):
            out.append(
                f"agent.{key}: {value}; choose random or self, or write module:function or "
                "file.py:function"
            )
    if agent.opponent and not agent.env:
        out.append("agent.opponent: plays the other side of an environment; give agent.env")
    if agent.eval_opponent and not agent.opponent:
        out.append("agent.eval_opponent: is for a game of two; give agent.opponent too")
    if agent.opponent == SELF and not agent.eval_opponent:
        out.append(
            "agent.eval_opponent: against itself a policy wins half its games, however well it "
            "plays; give random or module:function"
        )
    return out


def _engine(config: Config) -> list[str]:
    engine = ENGINES[config.generator.engine]
    out = []
    for key, temperature in (
        ("generator.temperature", config.generator.temperature),
        ("evaluation.temperature", config.evaluation.temperature),
    ):
        if temperature < engine.least_temperature:
            out.append(
                f"{key}: {temperature:g}; {engine.title} raises temperatures below "
                f"{engine.least_temperature:g} to {engine.least_temperature:g}, and the recorded "
                "one would be wrong"
            )
    if not engine.numbered_gpu and config.model.device.startswith("cuda:"):
        out.append(
            f"model.device: {config.model.device}; {engine.title} takes the first GPU it sees: use "
            "cuda, and generator.gpus to choose"
        )
    for key, gpus in (
        ("generator.gpus", config.generator.gpus),
        ("learner.gpus", config.learner.gpus),
    ):
        if gpus and config.model.device not in ("auto", "cuda"):
            out.append(
                f"{key}: chooses the GPU, and model.device = {config.model.device} another: use "
                "auto or "
                "cuda"
            )
    if config.learner.gpus and (
        len(config.learner.gpus) != config.learner.ranks
        or len(set(config.learner.gpus)) < len(config.learner.gpus)
    ):
        out.append(
            f"learner.gpus: {config.learner.gpus} for {config.learner.ranks} rank(s) "
            "(learner.ranks); each "
            "needs a GPU of its own"
        )
    if (
        config.learner.ranks > 1
        and not config.learner.gpus
        and config.model.device.startswith("cuda")
    ):
        out.append(
            f"learner.gpus: {config.learner.ranks} ranks would share model.device = "
            f"{config.model.device}; "
            "give one number each"
        )
    if (how := config.weights.transport) in ("nccl", "gloo") and config.wires.weights_address:
        out.append(
            f"wires.weights_address: weights.transport = {how} takes a free port of this machine "
            "and knows no keys; leave it out, or use tcp"
        )
    if how not in ("auto", "tcp") and config.weights.fan_out:
        out.append(
            f"weights.fan_out: weights.transport = {how} sends no copies over a network; leave it "
            "out, or use tcp or auto"
        )
    if how == "nccl" and not (config.learner.gpus and config.generator.gpus):
        out.append(
            "weights.transport: nccl connects two GPUs; give learner.gpus and generator.gpus, or "
            "use auto"
        )
    elif how == "nccl" and (both := sorted(set(config.learner.gpus) & set(config.generator.gpus))):
        out.append(
            f"weights.transport: nccl does not connect GPU {both[0]} with itself (learner.gpus, "
            "generator.gpus); use auto"
        )
    for key in sorted({key for row in ENGINES.values() for key in row.settings}):
        if getattr(config.generator, key) and key not in engine.settings:
            owners = " or ".join(name for name, row in ENGINES.items() if key in row.settings)
            out.append(
                f"generator.{key}: belongs to generator.engine = {owners}, not to "
                f"{config.generator.engine}"
            )
    return out


def warnings(config: Config) -> list[str]:
    """What a run is told once at its start."""
    given = config.reward.function if config.reward.share else ""
    shared = f"reward.share: who joins this run is given the file of {given}, and runs it"
    return _kl_warnings(config) + _other_warnings(config) + ([shared] if given else [])


def _kl_warnings(config: Config) -> list[str]:
    """Gradients of KL terms that are not what the name says."""
    out = []
    in_loss = config.kl.loss
    on = config.kl.loss.coefficient > 0
    in_reward = config.kl.reward
    stale = config.staleness.limit > 0 or config.learner.epochs * config.learner.minibatches > 1
    if on and in_loss.estimator == "k1" and in_loss.off_policy == "none":
        tail = (
            "; off policy, as here, it pushes away from the data (minus the gradient of KL(mu || "
            "pi))"
            if stale
            else ""
        )
        out.append("kl: k1 in the loss has no expected gradient on policy" + tail)
    if in_reward.coefficient > 0 and in_reward.estimator == "k3":
        out.append("kl: k3 in the reward has a strongly biased gradient and is known to collapse")
    if in_reward.coefficient > 0 and in_reward.at == "behavior" and config.staleness.limit > 0:
        out.append(
            "kl: kl.reward.at = behavior takes the KL of the policy that wrote the tokens, whose "
            "gradient is more than half wrong off policy; use start"
        )
    if on and in_loss.off_policy == "ratio":
        out.append(
            "kl: off_policy = ratio is right on the behaviour policy's states only; prefix is exact"
        )
    if on and in_loss.off_policy in ("prefix", "prefix_full"):
        cut = "staleness.on_exceed = mask" if config.staleness.on_exceed == "mask" else ""
        if cut := cut or (
            "correction.reject by token"
            if config.correction.reject != "none" and config.correction.reject_over == "token"
            else ""
        ):
            out.append(
                f"kl: off_policy = {in_loss.off_policy} is exact for whole answers; {cut} takes "
                "tokens "
                "out of the product of ratios"
            )
    return out


# surrogates that hold a token back once its ratio has left 1
HELD_BY_RATIO = ("ppo", "decoupled_ppo", "gspo", "cispo", "dppo", "sapo", "clip_cov", "gmpo")


def _inert_clip(config: Config) -> list[str]:
    """Decoupled PPO with one optimizer step a batch: pi_theta is the proximal policy itself."""
    steps = config.learner.epochs * config.learner.minibatches
    surrogate = config.loss.surrogate
    if (
        steps > 1
        or config.staleness.limit == 0
        or config.correction.proximal != "recompute"
        or surrogate not in HELD_BY_RATIO
    ):
        return []
    return [
        f"correction: with proximal = recompute and one optimizer step a batch the ratio of "
        f"{surrogate} is always 1, so nothing bounds the update on stale samples; set "
        "correction.proximal = behavior, or learner.minibatches above 1"
    ]


def _other_warnings(config: Config) -> list[str]:
    """Of the correction, the samples and the surrogate."""
    out = _inert_clip(config)
    if (
        config.correction.level in ("sequence", "geometric")
        and not config.correction.self_normalize
        and config.correction.proximal != "behavior"
    ):
        out.append(
            f"correction: at {config.correction.level} level without self_normalize the mean "
            "weight, an "
            "effective learning rate, wanders"
        )
    if config.generator.top_p < 1 or config.generator.top_k > 0:
        out.append(
            "generator: top_p/top_k cut the sampled distribution; ratios against the full one are "
            "biased"
        )
    if (
        config.loss.surrogate == "reshape"
        and config.reshape.form == "power"
        and config.reshape.mode == "constant"
        and config.reshape.gamma == 0
    ):
        out.append(
            "reshape: gamma = 0 in the power form has no gradient at all; form = box_cox is "
            "weighted log-likelihood there"
        )
    if (
        config.loss.surrogate == "reshape"
        and config.reshape.budget == "none"
        and not (config.stop.kl_max or config.reshape.clip or config.reshape.kl_penalty)
    ):
        out.append(
            "reshape: controls variance and not drift; without a repair (clip, kl_penalty, budget, "
            "stop.kl_max) the KL runs away"
        )
    if config.advantage.name == "dr_grpo" and config.loss.reduction != "seq-mean-token-sum-norm":
        out.append(
            "advantage: dr_grpo goes with loss.reduction = seq-mean-token-sum-norm; another "
            "reduction brings the length bias back"
        )
    if config.loss.surrogate == "gspo" and config.loss.reduction != "seq-mean-token-mean":
        out.append(
            "loss: gspo as published averages each answer over its tokens (loss.reduction = "
            "seq-mean-token-mean)"
        )
    return out
