"""Combinations of settings that cannot work (`check`) or deserve a word (`warnings`).  Pure."""

from __future__ import annotations

from typing import Any

from asyncrl.algorithms import settings
from asyncrl.config.engines import ENGINES


def check(c: Any) -> list[str]:
    """Problems of a config's mathematics; each begins with its key."""
    return (
        _correction(c)
        + _surrogate(c)
        + _kl(c)
        + _reshape(c)
        + _stop(c)
        + _advantage(c)
        + _value(c)
        + _engine(c)
    )


def _correction(c: Any) -> list[str]:
    k = c.correction
    out = []
    if k.lo is not None and k.hi is not None and k.lo > k.hi:
        out.append(f"correction.lo: {k.lo:g} is above correction.hi = {k.hi:g}")
    if k.bound == "truncate" and k.lo is not None:
        out.append("correction.lo: truncate has no lower bound; use clip or mask, or leave it out")
    if k.reject != "none" and k.reject != "ratio" and k.reject_hi is None:
        out.append(f"correction.reject_hi: reject = {k.reject} has no default bound; give one")
    if (
        k.reject != "none"
        and k.reject_lo is not None
        and k.reject_hi is not None
        and k.reject_lo > k.reject_hi
    ):
        out.append(
            f"correction.reject_lo: {k.reject_lo:g} is above correction.reject_hi = {k.reject_hi:g}"
        )
    if k.reject in ("k2", "k3") and k.reject_hi is not None and k.reject_hi < 0:
        out.append(
            f"correction.reject_hi: {k.reject} is never negative, {k.reject_hi:g} would reject "
            "everything"
        )
    acts = [
        n
        for n, on in (
            ("reject", k.reject != "none"),
            ("veto", k.veto == "ratio"),
            ("m2", k.m2 > 0),
            ("function", bool(k.function)),
        )
        if on
    ]
    if k.proximal == "behavior" and acts and c.loss.surrogate != "reinforce":
        out.append(
            f"correction.{acts[0]}: acts on pi_prox / mu, which correction.proximal = behavior "
            "makes 1; use recompute"
        )
    if k.function and ":" not in k.function:
        out.append(f"correction.function: {k.function} is not module:name")
    if k.denominator == "after" and k.reject == "none" and k.veto == "none":
        out.append(
            "correction.denominator: after counts what rejection leaves, and nothing is rejected; "
            "set correction.reject or veto"
        )
    return out


def _surrogate(c: Any) -> list[str]:
    s = c.loss.surrogate
    k = c.correction
    out = []
    if s in settings.ON_BEHAVIOR and k.proximal != "behavior":
        out.append(
            f"loss.surrogate: {s} takes its ratio against the behaviour policy; set "
            "correction.proximal = behavior"
        )
    if s == "reinforce" and k.level == "none" and not k.function:
        out.append(
            "loss.surrogate: reinforce is importance sampling by correction.level, which is none; "
            "choose token, sequence or geometric"
        )
    if s == "reinforce" and k.denominator == "after":
        out.append(
            "correction.denominator: after is not known before the step for loss.surrogate = "
            "reinforce; use before"
        )
    if c.loss.dual_clip and not c.loss.dual_clip > 1:
        out.append(f"loss.dual_clip: {c.loss.dual_clip:g} must be above 1 (0: off)")
    if c.loss.dual_clip and s not in ("ppo", "decoupled_ppo"):
        out.append(f"loss.dual_clip: belongs to ppo and decoupled_ppo, not to {s}")
    if c.loss.cispo_absolute and s != "cispo":
        out.append(f"loss.cispo_absolute: belongs to cispo, not to {s}")
    elif c.loss.cispo_absolute and not (c.loss.eps_high or 0) >= 1:
        given = "absent" if c.loss.eps_high is None else f"{c.loss.eps_high:g}"
        out.append(
            f"loss.eps_high: {given}; with cispo_absolute it is the largest ratio that counts, so "
            "1 or more, for instance 5.0"
        )
    if c.loss.cov_lo >= c.loss.cov_hi:
        out.append(f"loss.cov_lo: {c.loss.cov_lo:g} is not below loss.cov_hi = {c.loss.cov_hi:g}")
    return out


def _kl(c: Any) -> list[str]:
    k = c.kl.loss
    r = c.kl.reward
    out = []
    if c.loss.surrogate == "sft" and r.coefficient > 0:
        out.append(
            "kl.reward.coefficient: loss.surrogate = sft takes no advantage, so KL in the reward "
            "would do nothing; use kl.loss.coefficient"
        )
    if k.off_policy == "prefix" and k.estimator != "k3":
        out.append(f"kl.loss.estimator: off_policy = prefix is built on k3, not {k.estimator}")
    if k.off_policy == "prefix_full" and c.learner.backend != "torch":
        out.append(
            "kl.loss.off_policy: prefix_full reads both models' last states, which needs "
            f"learner.backend = torch, not {c.learner.backend}; use prefix"
        )
    if r.controller == "adaptive" and not r.target > 0:
        out.append("kl.reward.target: the adaptive controller needs a target above 0")
    if r.controller == "adaptive" and not r.coefficient > 0:
        out.append(
            "kl.reward.coefficient: the adaptive controller multiplies it, so it must start above 0"
        )
    return out


def _reshape(c: Any) -> list[str]:
    r = c.reshape
    out = []
    if not 0 < r.rho_min < 1:
        out.append(f"reshape.rho_min: {r.rho_min:g} must lie strictly between 0 and 1")
    if c.loss.surrogate == "reshape":
        if r.budget == "tokens" and c.stop.action == "slow":
            out.append(
                "reshape.budget: tokens and stop.action = slow would spend the same KL budget "
                "twice; choose one"
            )
        if r.budget == "global" and r.form == "box_cox":
            out.append(
                "reshape.budget: global lowers gamma, and in the box_cox form gamma = 0 still has "
                "a gradient; use budget = tokens or form = power"
            )
        if r.budget != "none" and c.learner.epochs * c.learner.minibatches == 1:
            out.append(
                "reshape.budget: with one optimizer step a batch there is nothing to budget; raise "
                "learner.epochs or minibatches"
            )
    elif r.budget != "none" or r.kl_penalty > 0 or r.clip > 0:
        out.append(
            "loss.surrogate: the [reshape] section acts on surrogate = reshape only, not on "
            f"{c.loss.surrogate}"
        )
    return out


def _stop(c: Any) -> list[str]:
    out = []
    if c.stop.action == "slow" and not c.stop.kl_max > 0:
        out.append("stop.kl_max: action = slow spreads a KL budget; give one above 0")
    if c.stop.ess_min > 0 and c.learner.epochs * c.learner.minibatches == 1:
        out.append(
            "stop.ess_min: with one optimizer step a batch there is nothing to stop; raise "
            "learner.epochs or learner.minibatches"
        )
    return out


def _advantage(c: Any) -> list[str]:
    a = c.advantage
    out = []
    by_group = a.name in settings.BY_GROUP or (a.name == "reinforce_pp" and a.group_baseline)
    if by_group and c.learner.group_size < 2 and c.loss.surrogate != "sft":
        what = f"{a.name} with advantage.group_baseline" if a.group_baseline else a.name
        out.append(
            f"learner.group_size: {c.learner.group_size} sample a prompt leaves {what} nothing to "
            "compare with; 2 or more"
        )
    if a.no_spread == "filter" and c.learner.group_size < 2:
        out.append(
            "learner.group_size: 1 sample a prompt never has a spread, so advantage.no_spread = "
            "filter would leave nothing to train on; 2 or more"
        )
    if a.truncated in ("penalty", "fixed", "soft") and not a.truncation_penalty > 0:
        hint = "; or advantage.truncated = zero" if a.truncated == "fixed" else ""
        out.append(
            f"advantage.truncation_penalty: 0 makes advantage.truncated = {a.truncated} do nothing "
            f"of its own; give one above 0{hint}"
        )
    if a.name == "reinforce" and a.baseline == "ema" and a.rewards == "whiten":
        out.append(
            "advantage.baseline: ema follows the mean reward from batch to batch, and "
            "advantage.rewards = whiten makes it 0 in each; use none or batch"
        )
    if a.truncated == "soft" and not 0 < a.truncation_ramp <= c.generator.max_new_tokens:
        out.append(
            f"advantage.truncation_ramp: {a.truncation_ramp} tokens; soft needs 1 to "
            f"generator.max_new_tokens = {c.generator.max_new_tokens}"
        )
    if a.name == "remax" and c.learner.group_size < 2:
        out.append(
            f"learner.group_size: {c.learner.group_size}; the first sample of a group is remax's "
            "greedy baseline, so 2 or more"
        )
    if a.name == "remax" and c.exact:
        out.append(
            "advantage.name: remax draws its baseline greedily, among whose logprobs exact mode "
            "does not hold; use rloo"
        )
    if a.group_baseline and a.name != "reinforce_pp":
        out.append(f"advantage.group_baseline: belongs to reinforce_pp, not to {a.name}")
    return out


def _value(c: Any) -> list[str]:
    v = c.value
    out = []
    if c.advantage.name != "gae":
        return [
            f"value.{k}: a value head belongs to advantage.name = gae, not to {c.advantage.name}"
            for k in ("path", "clip", "lr")
            if getattr(v, k)
        ][:1]
    if c.learner.backend != "torch":
        out.append(
            "advantage.name: the value head of gae needs learner.backend = torch, not "
            f"{c.learner.backend}"
        )
    if c.loss.surrogate == "sft":
        out.append(
            "advantage.name: gae has nothing to do under loss.surrogate = sft, which takes no "
            "advantage"
        )
    if v.trunk == "shared" and v.init in ("reward_model", "random"):
        out.append(
            f"value.init: {v.init} brings a trunk of its own; with value.trunk = shared choose "
            "policy or zeros"
        )
    if (v.init == "reward_model") != bool(v.path):
        out.append(
            "value.path: the directory of the reward model; value.init = reward_model needs it, "
            "and nothing else reads it"
        )
    if v.trunk == "shared" and v.coefficient == 0:
        out.append("value.coefficient: 0 leaves the value head untrained; give one above 0")
    return out


def _engine(c: Any) -> list[str]:
    engine = ENGINES[c.generator.engine]
    out = []
    for key, t in (
        ("generator.temperature", c.generator.temperature),
        ("evaluation.temperature", c.evaluation.temperature),
    ):
        if t < engine.least_temperature:
            out.append(
                f"{key}: {t:g}; {engine.title} raises temperatures below "
                f"{engine.least_temperature:g} to {engine.least_temperature:g}, and the recorded "
                "one would be wrong"
            )
    if not engine.numbered_gpu and c.model.device.startswith("cuda:"):
        out.append(
            f"model.device: {c.model.device}; {engine.title} takes the first GPU it sees: use "
            "cuda, and generator.gpus to choose"
        )
    for key, gpus in (("generator.gpus", c.generator.gpus), ("learner.gpus", c.learner.gpus)):
        if gpus and c.model.device not in ("auto", "cuda"):
            out.append(
                f"{key}: chooses the GPU, and model.device = {c.model.device} another: use auto or "
                "cuda"
            )
    if c.learner.gpus and (
        len(c.learner.gpus) != c.learner.ranks or len(set(c.learner.gpus)) < len(c.learner.gpus)
    ):
        out.append(
            f"learner.gpus: {c.learner.gpus} for {c.learner.ranks} rank(s) (learner.ranks); each "
            "needs a GPU of its own"
        )
    if c.learner.ranks > 1 and not c.learner.gpus and c.model.device.startswith("cuda"):
        out.append(
            f"learner.gpus: {c.learner.ranks} ranks would share model.device = {c.model.device}; "
            "give one number each"
        )
    if (how := c.weights.transport) in ("nccl", "gloo") and c.wires.weights_address:
        out.append(
            f"wires.weights_address: weights.transport = {how} takes a free port of this machine "
            "and knows no keys; leave it out, or use tcp"
        )
    if how == "nccl" and not (c.learner.gpus and c.generator.gpus):
        out.append(
            "weights.transport: nccl connects two GPUs; give learner.gpus and generator.gpus, or "
            "use auto"
        )
    elif how == "nccl" and (both := sorted(set(c.learner.gpus) & set(c.generator.gpus))):
        out.append(
            f"weights.transport: nccl does not connect GPU {both[0]} with itself (learner.gpus, "
            "generator.gpus); use auto"
        )
    for key in sorted({key for row in ENGINES.values() for key in row.settings}):
        if getattr(c.generator, key) and key not in engine.settings:
            owners = " or ".join(name for name, row in ENGINES.items() if key in row.settings)
            out.append(
                f"generator.{key}: belongs to generator.engine = {owners}, not to "
                f"{c.generator.engine}"
            )
    return out


def warnings(c: Any) -> list[str]:
    """What a run is told once at its start."""
    out = []
    k = c.kl.loss
    on = c.kl.loss.coefficient > 0
    r = c.kl.reward
    stale = c.staleness.max_lag > 0 or c.learner.epochs * c.learner.minibatches > 1
    if on and k.estimator == "k1" and k.off_policy == "none":
        tail = (
            "; off policy, as here, it pushes away from the data (minus the gradient of KL(mu || "
            "pi))"
            if stale
            else ""
        )
        out.append("kl: k1 in the loss has no expected gradient on policy" + tail)
    if r.coefficient > 0 and r.estimator == "k3":
        out.append("kl: k3 in the reward has a strongly biased gradient and is known to collapse")
    if r.coefficient > 0 and r.at == "behavior" and c.staleness.max_lag > 0:
        out.append(
            "kl: kl.reward.at = behavior takes the KL of the policy that wrote the tokens, whose "
            "gradient is more than half wrong off policy; use start"
        )
    if on and k.off_policy == "ratio":
        out.append(
            "kl: off_policy = ratio is right on the behaviour policy's states only; prefix is exact"
        )
    if on and k.off_policy in ("prefix", "prefix_full"):
        cut = "staleness.on_exceed = mask" if c.staleness.on_exceed == "mask" else ""
        if cut := cut or (
            "correction.reject by token"
            if c.correction.reject != "none" and c.correction.reject_over == "token"
            else ""
        ):
            out.append(
                f"kl: off_policy = {k.off_policy} is exact for whole answers; {cut} takes tokens "
                "out of the product of ratios"
            )
    if (
        c.correction.level in ("sequence", "geometric")
        and not c.correction.self_normalize
        and c.correction.proximal != "behavior"
    ):
        out.append(
            f"correction: at {c.correction.level} level without self_normalize the mean weight, an "
            "effective learning rate, wanders"
        )
    if c.generator.top_p < 1 or c.generator.top_k > 0:
        out.append(
            "generator: top_p/top_k cut the sampled distribution; ratios against the full one are "
            "biased"
        )
    if (
        c.loss.surrogate == "reshape"
        and c.reshape.form == "power"
        and c.reshape.mode == "constant"
        and c.reshape.gamma == 0
    ):
        out.append(
            "reshape: gamma = 0 in the power form has no gradient at all; form = box_cox is "
            "weighted log-likelihood there"
        )
    if (
        c.loss.surrogate == "reshape"
        and c.reshape.budget == "none"
        and not (c.stop.kl_max or c.reshape.clip or c.reshape.kl_penalty)
    ):
        out.append(
            "reshape: controls variance and not drift; without a repair (clip, kl_penalty, budget, "
            "stop.kl_max) the KL runs away"
        )
    if c.advantage.name == "dr_grpo" and c.loss.reduction != "seq-mean-token-sum-norm":
        out.append(
            "advantage: dr_grpo goes with loss.reduction = seq-mean-token-sum-norm; another "
            "reduction brings the length bias back"
        )
    if c.loss.surrogate == "gspo" and c.loss.reduction != "seq-mean-token-mean":
        out.append(
            "loss: gspo as published averages each answer over its tokens (loss.reduction = "
            "seq-mean-token-mean)"
        )
    return out
