"""The loss of one batch, and the only entry that the learner uses.

    # once per batch: advantages, masks, importance weights where the proximal policy is known
    prep = prepare(batch, config)
    # once per optimizer step: global factors and statistics
    step = begin_step(prep, samples, current)
    # per micro-batch: call backward on `loss`, add up losses and sums over the step
    loss, sums = compute_micro_loss(prep, step, part, lp)
    # share of the learning rate, from the sums of the step
    share = compute_learning_rate_share(prep, step, sums)
    # early stop: KL = sum a / sum b over the micro-batches of the step
    a, b = sum_update_kl(prep, part, lp)
    # once per batch: `prep.reads` copies all numbers from the device together
    add_sums(total, sums); metrics = prep.metrics | finish(total, prep.reads, batch.task_names)

Tensors are packed over response tokens: N tokens of B samples, the tokens of a sample contiguous
and in order. A micro-batch holds whole samples, so it needs nothing from outside for a per-sample
quantity. Statistics of the whole batch are computed in `prepare` and `begin_step`.
`settings.Settings` lists the config keys that are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, where, zeros_like

from asyncrl.algorithms import (
    correction,
    diagnostics,
    kl,
    own_functions,
    ratios,
    reshape,
    surrogates,
)
from asyncrl.algorithms.advantages import compute_advantage
from asyncrl.algorithms.batch import LossBatch as LossBatch
from asyncrl.algorithms.settings import FunctionLoss, Settings
from asyncrl.algorithms.surrogates import StepBatch, SurrogateTokens
from asyncrl.contract.errors import ConfigError

add_sums = diagnostics.add_sums
finish = diagnostics.compute_metrics

# loss.reduction -> the divisor of each sample's tokens. Its arguments are T_i [B], the tokens of
# the mask in each sample (T is their sum), S, the number of samples with any, and a fixed length
REDUCTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    # T (DAPO, arXiv 2503.14476)
    "token-mean": lambda tokens, samples, length: tokens.sum().clamp(min=1),
    # S
    "seq-mean-token-sum": lambda tokens, samples, length: samples,
    # S T_i (GRPO)
    "seq-mean-token-mean": lambda tokens, samples, length: samples * tokens.clamp(min=1),
    # S length (Dr. GRPO, arXiv 2503.20783)
    "seq-mean-token-sum-norm": lambda tokens, samples, length: samples * length,
}


def compute_factors(
    mask: Tensor, seq: Tensor, n: int, reduction: str, length: float = 1.0
) -> Tensor:
    """Return the factor [N] of each token of `mask` bool [N], 0 elsewhere.

    The loss is sum(factor * per-token loss). Denominators are global, so that micro-batches and
    ranks add up to one batch. `reduction` is a name of REDUCTIONS.
    """
    tokens = ratios.sum_by_sample(mask.to(torch.float64), seq, n)
    samples = (tokens > 0).sum().clamp(min=1)
    divisor = REDUCTIONS[reduction](tokens, samples, length)
    return where(mask, (torch.ones_like(tokens) / divisor)[seq], 0.0)


def sum_sample_weights(log_w: Tensor, mask: Tensor, seq: Tensor, n: int) -> Tensor:
    """Return (samples, sum W, sum W^2), float64 [3], over samples with a token in the mask.

    W = exp(sum log w) of each sample, not truncated. Sums of micro-batches and ranks add up.
    """
    has_tokens = ratios.sum_by_sample(mask.double(), seq, n) > 0
    log_ratios = ratios.sum_by_sample(where(mask, log_w, 0.0).double(), seq, n)
    w = where(has_tokens, log_ratios.clamp(-ratios.CLAMP, ratios.CLAMP).exp(), 0.0)
    return torch.stack([has_tokens.double().sum(), w.sum(), w.square().sum()])


@dataclass
class KLBudget:
    """A KL budget over the optimizer steps of one batch, in nats a token.

    It measures dK1, the KL that one full step adds, from its own first step. That step is a full
    one, because nothing is spent and dK1 is unknown. It adds sqrt(K) = 0.15 of 0.2, so a third of a
    step still fits:

    >>> b = KLBudget(0.04)
    >>> round(b.compute_next_share(0.0), 3)
    1.0
    >>> round(b.compute_next_share(0.0225), 3)
    0.333
    """

    limit: float
    step_kl: float | None = None
    # sqrt(K) before the first step, and the g of that step
    _last: tuple[float, float] | None = field(default=None, repr=False)

    def compute_next_share(self, kl: float) -> float:
        """Return g in [0, 1], the share of a full step that still fits; once per optimizer step.

        It is exactly 0 at the budget. To second order sqrt(KL) adds like a distance:

            g = clip((sqrt(budget) - sqrt(K)) / sqrt(dK1), 0, 1)

        Before dK1 is known, g = 1 - sqrt(K / budget). kl: K, measured before the step.
        """
        root = max(kl, 0.0) ** 0.5
        if self.step_kl is None and self._last is not None and self._last[1] > 0:
            self.step_kl = ((root - self._last[0]) / self._last[1]) ** 2
        distance = self.limit**0.5 if self.step_kl is None else max(self.step_kl, 1e-12) ** 0.5
        distance_left = max(self.limit, 0.0) ** 0.5 - root
        g = float(min(1.0, max(0.0, distance_left / max(distance, 1e-12))))
        if self._last is None:
            self._last = (root, g)
        return g


@dataclass(kw_only=True)
class PreparedBatch:
    """A batch after its pre-pass. No tensor in it carries a gradient."""

    batch: LossBatch
    config: Settings
    advantage: Tensor  # [N]
    valid: Tensor  # bool [N]: tokens in the loss, before rejection
    staleness_weight: Tensor  # [N] (staleness.on_exceed = downweight)
    # None: computed from the forward of the only optimizer step
    corrected: correction.ImportanceWeights | None
    returns: Tensor | None  # [N], with a value head
    scalars: dict[str, Tensor]  # metrics of the pre-pass
    reads: diagnostics.HostReads  # of the batch
    budget: KLBudget | None = None  # over the steps of this batch
    steps: int = 0  # optimizer steps begun
    number: int  # of the batch; random choices are a function of (seed, number, step)
    # [N] the learner's policy at the start of the batch, valid where `known`: given with the batch,
    # or recorded by the forward of the first optimizer step
    start: Tensor
    known: Tensor
    # [N] the target policy at the last pass over each token, valid where `passed`
    latest: Tensor
    passed: Tensor
    # bool [N] in the loss of the current step
    live: Tensor
    # bool [N] in the loss of a completed step, which adds `live`
    used: Tensor
    # int8 [N] the bound of the trust region that cut the gradient in the last pass (surrogates)
    clipped: Tensor
    # [N] importance weight in the last pass, 0 for tokens that are not in the loss
    weight: Tensor

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics so far, of the pre-pass and of steps; reads the device."""
        return self.reads.read_scalars(self.scalars)


@dataclass
class StepPlan:
    """Factors and batch statistics of one optimizer step, computed before any micro-batch.

    factor [N] is the factor of the reduction.
    """

    factor: Tensor
    mean: Tensor | None = None  # of the weights of the whole batch
    reshape: reshape.ReshapeStatistics | None = None
    # share of the learning rate; 0 skips the remaining steps of the batch
    lr_scale: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)
    # inputs of the surrogate from the whole step: [N] or scalars
    prepass: dict[str, Tensor] = field(default_factory=dict)
    # bool [N]: tokens that M2PO excludes
    m2_excluded: Tensor | None = None


def needs_proximal_first(config: Settings) -> bool:
    """Return whether the recomputed proximal policy is needed before the first optimizer step."""
    several = config.learner.epochs * config.learner.minibatches > 1
    # or the ratios of the whole batch before any weight
    c = config.correction
    return bool(several or c.self_normalize or c.denominator == "after")


def needs_start_first(config: Settings) -> bool:
    """Return whether the learner's start is needed before the first optimizer step.

    It costs one forward over the batch, whatever the proximal policy is. KL in the reward and the
    weights of `opob` are computed from it. Early stopping measures from it: with minibatches the
    first step covers only part of the batch, and each rank sees only its own samples.
    """
    in_advantage = config.advantage.name == "opob"
    in_reward = config.kl.reward.coefficient > 0 and config.kl.reward.at == "start"
    in_parts = config.learner.minibatches > 1 or config.learner.distributed
    return bool(in_advantage or in_reward or (config.stop.kl_max > 0 and in_parts))


def choose_proximal(batch: LossBatch, config: Settings, start: Tensor | None) -> Tensor | None:
    """Return the log-probabilities [N] of the proximal policy.

    interpolate: a lp_behavior + (1 - a) lp_theta with a = 1 / (lag + 1), frozen at the batch's
    first pass (A-3PO; AReaL).
    version: log pi_v; the start where the weights of v are no longer held.

    Args:
        start: [N], the learner's policy at the start of the batch (ema: under its average weights);
            None: not computed.
    """
    kind = config.correction.proximal
    if kind == "recompute":
        return start
    if kind == "behavior":
        return batch.behavior
    assert start is not None
    if batch.version is not None:
        return where(batch.version.isnan(), start, batch.version)
    if kind == "ema":
        return start
    share = 1.0 / (batch.token_lag.float() + 1.0)
    return share * batch.behavior + (1 - share) * start


def needs_current(prep: PreparedBatch) -> bool:
    """Return whether `begin_step` needs the log-probabilities [N] of the current policy.

    They cost a forward over the batch without gradient.
    """
    c = prep.config
    needed = (
        c.loss.surrogate in surrogates.NEED_CURRENT
        or c.stop.action == "slow"
        or c.stop.ess_min > 0
        or (c.loss.surrogate == "reinforce" and c.correction.self_normalize)
        or c.correction.m2 > 0
    )
    return bool(needed and not _has_given_start(prep))


def _has_given_start(prep: PreparedBatch) -> bool:
    """Return whether the current policy is the given start: no step has been made yet."""
    return prep.steps == 0 and prep.batch.start is not None


# ---- once a batch --------------------------------------------------------------------------------


@torch.no_grad()
def prepare(
    batch: LossBatch,
    config: Settings,
    *,
    baseline: float = 0.0,
    beta: float | None = None,
    number: int = 0,
    advantages: Tensor | None = None,
) -> PreparedBatch:
    """Run the pre-pass over the whole batch.

    Args:
        baseline: the running baseline of advantage.name = reinforce.
        beta: the current coefficient of KL in the reward; None: the configured one.
        number: the number of the batch, which seeds random choices.
        advantages: [N], instead of those that the config computes.
    """
    beta = config.kl.reward.coefficient if beta is None else beta
    if batch.start is None and config.correction.proximal == "recompute":
        batch.start = batch.proximal
    valid = batch.mask.clone()
    if config.staleness.on_exceed == "mask":
        valid &= batch.token_lag <= config.staleness.limit
    if config.advantage.truncated == "mask":
        valid &= ~batch.truncated[batch.seq]
    staleness_weight = torch.ones_like(batch.behavior)
    if config.staleness.on_exceed == "downweight":
        # half per `half_life` versions above the limit
        staleness_weight = torch.pow(
            0.5,
            (batch.token_lag - config.staleness.limit).clamp(min=0).to(staleness_weight.dtype)
            / config.staleness.half_life,
        )
    if advantages is None:
        adv, returns, scalars = compute_advantage(batch, valid, config, baseline, beta)
    else:
        adv, returns, scalars = advantages, None, {}
    corrected = None
    if batch.proximal is not None and config.loss.surrogate != "reinforce":
        corrected = _correct(batch, slice(None), batch.proximal, valid, config, adv=adv)
    scalars |= {
        "advantage/mean": ratios.average_masked(adv, valid),
        "advantage/abs_max": torch.cat([adv.new_zeros(1), where(valid, adv, 0.0).abs()]).amax(),
        "answer/masked_share": 1 - valid.to(adv.dtype).mean(),
    }
    if batch.version is not None:
        scalars["is/fallback_share"] = ratios.average_masked(batch.version.isnan(), valid)
    reads = diagnostics.HostReads()
    reads.planned += scalars.values()
    start = zeros_like(batch.behavior) if batch.start is None else batch.start.clone()
    known = torch.full_like(batch.mask, batch.start is not None)
    return PreparedBatch(
        batch=batch,
        config=config,
        advantage=adv,
        valid=valid,
        staleness_weight=staleness_weight,
        corrected=corrected,
        returns=returns,
        scalars=scalars,
        reads=reads,
        number=number,
        start=start,
        known=known,
        latest=start.clone(),
        passed=zeros_like(known),
        live=zeros_like(known),
        used=zeros_like(known),
        clipped=zeros_like(known, dtype=torch.int8),
        weight=zeros_like(batch.behavior),
    )


def compute_learning_rate_share(
    prep: PreparedBatch, step: StepPlan, sums: dict[str, Tensor]
) -> float:
    """Return the share of the learning rate for this optimizer step.

    sums covers all micro-batches and ranks of the step. Reads from the device where stop.lr_by_ess
    needs the effective sample size.
    """
    if "ess/answers" not in sums:
        return step.lr_scale
    ((count, total, square),) = prep.reads.read(sums["ess/answers"])
    ess = diagnostics.compute_ess(total, square, count) if count else 1.0
    stop = prep.config.stop
    # VCPO, arXiv 2602.17616; it scales the rate, because Adam would undo a factor of the loss
    share = min(1.0, ess / stop.ess_on_policy)
    share = step.lr_scale * (share**0.5 if stop.lr_by_ess == "sqrt" else share)
    prep.metrics |= {"optim/lr_scale": share, "optim/answer_ess": ess}
    return share


def _correct(
    batch: LossBatch,
    part: Tensor | slice,
    proximal: Tensor,
    valid: Tensor,
    config: Settings,
    *,
    adv: Tensor,
    mean: Tensor | None = None,
) -> correction.ImportanceWeights:
    """Compute the importance weights of the tokens `part`.

    Args:
        part: int64 [n], positions among the batch's N tokens, or a slice of them.
        proximal: [n], log pi_prox (log pi_theta for surrogate = reinforce).
        valid: bool [n], the mask.
        adv: [n], the advantage.
        mean: of the whole batch's weights; None: computed from these tokens.
    """
    log_rho = ratios.subtract(proximal, batch.behavior[part])
    return correction.correct(
        log_rho,
        proximal,
        valid,
        batch.seq[part],
        n=batch.count,
        c=config.correction,
        mean=mean,
        adv=adv,
    )


# ---- once an optimizer step ----------------------------------------------------------------------


@torch.no_grad()
def begin_step(prep: PreparedBatch, samples: Tensor, current: Tensor | None = None) -> StepPlan:
    """Compute the factors and statistics of one optimizer step.

    Counts are global, so that micro-batches and ranks add up.

    Args:
        samples: int64, the samples of the step.
        current: [N], log-probabilities under the current policy, where `needs_current` is true.
    """
    batch = prep.batch
    c = prep.config
    assert current is not None or not needs_current(prep)
    if current is not None and prep.steps == 0 and not prep.known.any():
        prep.start, prep.known = current.to(prep.start.dtype).clone(), torch.ones_like(prep.known)
    if current is None:
        current = batch.start if _has_given_start(prep) else batch.proximal
    in_step = torch.zeros(batch.count, dtype=torch.bool, device=batch.seq.device)
    in_step[samples] = True
    counted_tokens = step_tokens = prep.valid & in_step[batch.seq]
    if prep.corrected is not None and c.correction.denominator == "after":
        counted_tokens = counted_tokens & prep.corrected.kept
    length = 1.0
    if c.loss.reduction == "seq-mean-token-sum-norm":
        length = float(c.loss.norm_length or c.generator.max_new_tokens)
    factor = compute_factors(counted_tokens, batch.seq, batch.count, c.loss.reduction, length)
    step = StepPlan(factor.to(batch.behavior.dtype))
    if current is not None:
        _fill_statistics(prep, step, step_tokens, current)
    if c.loss.surrogate in surrogates.PREPASS:
        step_batch = StepBatch(
            batch.behavior,
            prep.advantage,
            step_tokens,
            batch.seq,
            batch.groups,
            current=current,
            valid=prep.valid,
            seed=((c.seed * 1_000_003 + prep.number) * 1009 + prep.steps) % 2**63,
        )
        step.prepass = surrogates.PREPASS[c.loss.surrogate](step_batch, c.loss)
    if isinstance(c.loss, FunctionLoss):
        _call_own_loss(prep, step, step_tokens, current)
    prep.live = zeros_like(prep.live)
    prep.steps += 1
    return step


def _call_own_loss(
    prep: PreparedBatch, step: StepPlan, inside: Tensor, current: Tensor | None
) -> None:
    """Call `loss.function` on the step's tokens, bool [N], and plan its gradient and metrics."""
    batch, c = prep.batch, prep.config.loss
    assert isinstance(c, FunctionLoss) and current is not None
    gradient = zeros_like(current)
    step.prepass = {"coefficient": gradient, "objective": gradient.sum()}
    samples = ratios.sum_by_sample(inside.long(), batch.seq, batch.count) > 0
    if not bool(samples.any()):
        return
    chosen = samples[batch.seq]
    rows = ratios.PaddedRows(batch.seq[chosen])
    logprobs, *columns = (
        rows.pad(x[chosen]) for x in (current, batch.behavior, prep.advantage, inside)
    )
    padded = None
    problem = "returned a loss without gradient; compute it from logprobs, without detaching them"
    with torch.enable_grad():
        result = own_functions.call(
            "loss.function",
            c.function,
            logprobs.requires_grad_(True),
            *columns,
            versions=prep.number - rows.pad(batch.token_lag[chosen]),
            current_version=prep.number,
            start=rows.pad(prep.start[chosen]),
            reference=None if batch.reference is None else rows.pad(batch.reference[chosen]),
            groups=batch.groups[samples],
        )
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(loss, Tensor) or loss.dim():
            kind = own_functions.describe(loss)
            problem = f"returned {kind}; return a scalar tensor, or (loss, metrics)"
        elif loss.requires_grad:
            (padded,) = torch.autograd.grad(loss, logprobs, allow_unused=True)
    try:
        step.metrics |= {f"loss/function/{name}": float(x) for name, x in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        padded, problem = None, f"metrics: {error}; return a dict of floats"
    if padded is None:
        raise ConfigError(f"loss.function = {c.function}: {problem}")
    gradient[chosen] = -rows.pack(padded)
    step.prepass["objective"] = -loss.detach() / inside.sum()


def _fill_statistics(
    prep: PreparedBatch, step: StepPlan, step_tokens: Tensor, current: Tensor
) -> None:
    """Fill in what surrogate, correction and stop need of the whole batch.

    step_tokens: bool [N]. current: [N], log pi_theta.
    """
    c = prep.config
    batch = prep.batch
    stop = c.stop
    name = c.loss.surrogate
    if name == "reinforce" and c.correction.self_normalize:
        step.mean = _correct(batch, slice(None), current, prep.valid, c, adv=prep.advantage).mean
    stops = stop.action == "slow" or stop.ess_min > 0
    log_w = ratios.compute_log_ratio(current, batch.behavior)
    if c.correction.m2:
        step.m2_excluded = correction.find_m2_exclusions(
            log_w, prep.advantage, step_tokens, c.correction.m2
        )
    device_values: dict[str, Tensor] = {}
    if stops:
        # of the updates so far, over the whole batch
        total, weight = sum_update_kl(prep, slice(None), current)
        # the effective sample size (Kong 1992), 1 without a token
        w = where(prep.valid, log_w.exp(), 0.0)
        count, squares = prep.valid.sum(), w.square().sum()
        device_values |= {
            "stop": (total / weight.clamp(min=1e-12)).clamp(min=0),
            "ess": where(count > 0, w.sum().square() / (count * squares).clamp(min=1e-30), 1.0),
        }
    if name == "reshape":
        step.reshape = reshape.compute_statistics(log_w, prep.valid, c.reshape.rho_min)
        device_values |= {
            "k": step.reshape.kl,
            "base": step.reshape.base,
            "sigma2": step.reshape.sigma2,
        }
    # the only synchronization with the device before the gradient of the step
    host = prep.reads.read_scalars(device_values)
    if stops:
        if host["ess"] < stop.ess_min:
            step.lr_scale = 0.0
        elif stop.action == "slow" and stop.kl_max > 0:
            prep.budget = prep.budget or KLBudget(stop.kl_max)
            step.lr_scale = prep.budget.compute_next_share(host["stop"])
        step.metrics |= {"optim/stop_ess": host["ess"], "optim/lr_scale": step.lr_scale}
    if step.reshape is not None:
        if c.reshape.budget == "tokens":
            prep.budget = prep.budget or KLBudget(c.reshape.kl_budget)
            step.reshape.share = prep.budget.compute_next_share(host["k"])
        step.metrics |= {
            "reshape/gamma_base": host["base"],
            "reshape/sigma2": host["sigma2"],
            "reshape/share": step.reshape.share,
        }


# ---- per micro-batch -----------------------------------------------------------------------------


def compute_micro_loss(
    prep: PreparedBatch,
    step: StepPlan,
    part: Tensor,
    lp: Tensor,
    entropy: Tensor | None = None,
    values_now: Tensor | None = None,
    step_kl: Tensor | None = None,
    center: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one micro-batch (its share of the step) and the sums for the metrics.

    Args:
        part: int64 [n], positions among the batch's N tokens; whole samples.
        lp: [n], log pi_theta with gradient.
        entropy: [n] with gradient, or None.
        values_now: [n] with gradient, or None.
        step_kl: [n] with gradient, the exact KL(theta || ref) of each step, for
            kl.loss.off_policy = prefix_full.
        center: [n] with gradient, of each token's score, for loss.center.
    """
    b = prep.batch
    c = prep.config
    target = lp.detach()
    valid = prep.valid[part]
    factor = step.factor[part]
    latest = target.to(prep.start.dtype)
    if prep.steps == 1:
        # they are the learner's start, which then costs no extra forward
        prep.start[part] = where(prep.known[part], prep.start[part], latest)
        prep.known[part] = True
    prep.latest[part] = latest
    prep.passed[part] = True
    tokens = SurrogateTokens(
        raw=ratios.subtract(target, target if b.proximal is None else b.proximal[part]),
        adv=prep.advantage[part],
        lp=target,
        behavior=b.behavior[part],
        mask=valid,
        seq=b.seq[part],
        n=b.count,
        stats=step.reshape,
        reshape=c.reshape,
        prepass={name: x[part] if x.dim() else x for name, x in step.prepass.items()},
    )
    if prep.corrected is None:  # the ratio is that of the current policy
        weight, kept, vetoed, _ = _correct(
            b, part, target, valid, c, adv=tokens.adv, mean=step.mean
        )
    else:
        weight, kept, vetoed = (x[part] for x in prep.corrected[:3])
    if c.correction.reject_at == "target":
        log_rho = ratios.subtract(target, tokens.behavior)
        kept = kept & correction.find_unrejected(
            log_rho, target, valid, tokens.seq, b.count, c=c.correction, adv=tokens.adv
        )
        weight = where(kept, weight, 0.0)
    if step.m2_excluded is not None:
        weight = where(step.m2_excluded[part], 0.0, weight)
    trust = surrogates.SURROGATES[c.loss.surrogate](tokens, c.loss)
    live = valid & kept
    scale = where(live, weight * prep.staleness_weight[part], 0.0)
    # what this pass did with the tokens, for the ledger and the log of samples
    prep.live[part] = live & (weight != 0)
    prep.weight[part] = scale.to(prep.weight.dtype)
    prep.clipped[part] = trust.clipped.to(torch.int8)
    # a function of the user is its own mean
    if not isinstance(c.loss, FunctionLoss):
        scale = scale * factor
    if c.loss.coefficient != 1:
        scale = scale * c.loss.coefficient
    coefficient = where(live, trust.coefficient * scale, 0.0)
    live_logprobs = where(live, lp, 0.0)
    loss = -(coefficient * live_logprobs).sum()
    sums = tokens.sums | {"loss/policy": -where(live, trust.objective * scale, 0.0).sum()}
    if c.stop.lr_by_ess != "off":
        log_w = ratios.subtract(target, tokens.behavior)
        sums["ess/answers"] = sum_sample_weights(log_w, valid, tokens.seq, b.count)
    extra, terms = _compute_extra_terms(
        prep,
        part,
        live,
        lp,
        coefficient,
        factor,
        entropy=entropy,
        values_now=values_now,
        step_kl=step_kl,
        center=center,
    )
    view = diagnostics.DiagnosticTokens(
        seq=tokens.seq,
        lag=b.token_lag[part],
        valid=valid,
        kept=kept,
        vetoed=vetoed,
        behavior=tokens.behavior,
        start=prep.start[part],
        target=target,
        weight=weight,
        clipped=trust.clipped,
        rewards=b.rewards,
        reference=None if b.reference is None else b.reference[part],
        entropy=None if entropy is None else entropy.detach(),
        known=prep.known[part],
        age=None if b.age is None else b.age[part],
        task=None if b.task is None else b.task[tokens.seq],
        tasks=len(b.task_names),
    )
    return loss + extra, diagnostics.sum_statistics(view) | sums | terms


def _compute_extra_terms(
    prep: PreparedBatch,
    part: Tensor,
    live: Tensor,
    lp: Tensor,
    coefficient: Tensor,
    factor: Tensor,
    *,
    entropy: Tensor | None,
    values_now: Tensor | None,
    step_kl: Tensor | None,
    center: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the terms added to the policy loss: center, entropy, KL, reshape's KL, value loss."""
    b = prep.batch
    c = prep.config
    total = lp.new_zeros(())
    sums = {}

    def zero_others(x: Tensor) -> Tensor:
        return where(live, x, 0.0)  # x[live] would make the host wait for its size

    def apply_weights(x: Tensor) -> Tensor:
        return (zero_others(x) * factor).sum()

    if center is not None:
        scale = prep.advantage[part] * prep.staleness_weight[part] * c.loss.coefficient
        total = total + apply_weights(scale * center)
    if entropy is not None and c.loss.entropy:
        sums["loss/entropy"] = apply_weights(entropy)
        total = total - c.loss.entropy * sums["loss/entropy"]
    k = c.kl.loss
    if b.reference is not None and k.coefficient > 0:
        # a prefix form is a product over the live tokens only
        chosen = live if k.off_policy in kl.PREFIX_FORMS else slice(None)
        term = kl.compute_term(
            zero_others(lp)[chosen],
            zero_others(b.reference[part])[chosen],
            zero_others(b.behavior[part])[chosen],
            b.seq[part][chosen],
            estimator=k.estimator,
            off_policy=k.off_policy,
            discount=k.discount,
            truncate=k.truncate,
            step_kl=None if step_kl is None else step_kl[chosen],
        )
        sums["loss/kl"] = (where(live[chosen], term, 0.0) * factor[chosen]).sum()
        total = total + k.coefficient * sums["loss/kl"]
        # the full KL's gradient goes to all logits, past the logprobs of the sampled tokens
        if lp.requires_grad and step_kl is None:
            gradient = torch.autograd.grad(sums["loss/kl"], lp, retain_graph=True)[0]
            sums |= {
                "sq/kl": (k.coefficient * gradient).square().sum(),
                "sq/policy": coefficient.square().sum(),
            }
    if c.loss.surrogate == "reshape" and c.reshape.kl_penalty > 0:
        x = ratios.subtract(zero_others(lp), zero_others(b.behavior[part]))
        sums["loss/kl_penalty"] = apply_weights(kl.estimate(c.reshape.kl_estimator, x))
        total = total + c.reshape.kl_penalty * sums["loss/kl_penalty"]
    if values_now is not None and prep.returns is not None:
        batch_values = None if b.values is None else zero_others(b.values[part])
        sums["loss/value"] = apply_weights(
            compute_value_loss(
                zero_others(values_now), zero_others(prep.returns[part]), batch_values, c.value.clip
            )
        )
        total = total + c.value.coefficient * sums["loss/value"]
    return total, {name: x.detach() for name, x in sums.items()}


def compute_value_loss(
    values: Tensor, returns: Tensor, batch_values: Tensor | None = None, clip: float = 0.0
) -> Tensor:
    """Return the value loss per token [N]: 0.5 (V - R)^2.

    With clip c > 0: 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) (PPO; Huang et al.
    2022, "The 37 implementation details of PPO").

    Args:
        values: [N] with gradient.
        returns: [N] detached.
        batch_values: [N] detached, or None.
    """
    loss = (values - returns).square()
    if clip > 0 and batch_values is not None:
        clipped_values = batch_values + (values - batch_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped_values - returns).square())
    return 0.5 * loss


@torch.no_grad()
def sum_update_kl(prep: PreparedBatch, part: Tensor | slice, lp: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weighted sum, weight) of the KL that the updates of this batch alone have added.

    Both are sums over the tokens `part`; their quotient is 0 while lp equals the start. Sums of
    micro-batches and ranks add up, and every rank must decide on the same sums.

    - stop.against = start: KL(start || theta).
    - stop.against = behavior: KL(mu || theta) minus KL(mu || start) of the same tokens, with which
      the batch arrived.
    """
    valid = prep.valid[part]
    behavior = prep.batch.behavior[part]
    start = prep.start[part]
    if prep.config.stop.against == "start":
        return sum_moved_kl(start, lp, behavior, valid)
    total, weight = sum_moved_kl(behavior, lp, behavior, valid)
    return total - sum_moved_kl(behavior, start, behavior, valid)[0], weight


def sum_moved_kl(
    old: Tensor, new: Tensor, behavior: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (weighted sum, weight) of KL(old || new) by k3 on tokens that mu sampled.

    Each token has weight old / mu, at most 2. Their states stay mu's.

    Args:
        old, new: [n], log-probabilities.
        behavior: [n], log mu.
        valid: bool [n].
    """
    weight = where(valid, ratios.compute_log_ratio(old, behavior).exp().clamp(max=2.0), 0.0)
    moved = kl.estimate_k3(ratios.compute_log_ratio(old, new.to(old.dtype)))
    return where(valid, weight * moved, 0.0).sum(), weight.sum()
