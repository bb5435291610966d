"""Surrogates in coefficient form: each maps (log r [N], A [N], ...) to a detached SurrogateTerm.

r = exp(lp - log pi_prox). The loss is - sum coefficient w norm lp with everything but lp detached.
The coefficient (A phi) depends on pi_theta / pi_prox only, so that a token's weight against the
behavior policy is never counted twice.

SURROGATES, at the end, maps config names to functions. To add a surrogate, write a struct with its
keys in `settings` and a function of (SurrogateTokens, that struct), and add its line there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, where, zeros_like

from asyncrl.algorithms import settings
from asyncrl.algorithms.ratios import (
    CLAMP,
    FAR,
    average_by_sample,
    compute_binary_kl,
    compute_log_ratio,
    compute_running_min,
    sum_by_sample,
)
from asyncrl.algorithms.reshape import ReshapeStatistics, compute_gamma, compute_p_correct
from asyncrl.algorithms.settings import Reshape

# their effect on a token depends on the whole batch under the current policy
NEED_CURRENT = ("reshape", "kl_cov", "clip_cov", "bapo", "function")
# bounds of BAPO's ratio: first, step, last
BAPO_LOW = (0.6, 0.02, 0.9)
BAPO_HIGH = (1.2, 0.05, 3.0)
# the bound that cut a token's gradient
OPEN = 0
LOW = 1
HIGH = 2
DUAL = 3


class SurrogateTerm(NamedTuple):
    """The result of a surrogate, detached.

    coefficient: [N], of grad lp.
    objective: [N], the value.
    clipped: int8 [N], OPEN or the bound that cut the gradient.
    """

    coefficient: Tensor
    objective: Tensor
    clipped: Tensor


def build_unclipped(coefficient: Tensor, objective: Tensor) -> SurrogateTerm:
    """Build a term whose gradient no bound has cut."""
    return SurrogateTerm(coefficient, objective, zeros_like(coefficient, dtype=torch.int8))


def mark_sides(low: Tensor, high: Tensor) -> Tensor:
    return where(low, LOW, where(high, HIGH, OPEN)).to(torch.int8)


def mark_away(adv: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Mark the tokens that are low or high in the direction of their advantage."""
    return mark_sides((adv < 0) & low, (adv > 0) & high)


@dataclass
class SurrogateTokens:
    """Inputs of a surrogate: n tokens of whole samples, without gradient.

    raw: [n], log pi_theta / pi_prox, finite and not clamped. `log_r` is clamped to [-20, 20] and
        gives a token's own ratio.
    adv: [n].
    lp: [n], log pi_theta.
    behavior: [n], log mu.
    mask: bool [n], in the loss.
    seq: int64 [n], the sample of each token, of `n` samples.
    stats: statistics of IS-reshape from the whole batch before the step.
    reshape: the config section of IS-reshape.
    sums: the surrogate adds sums for its own metrics here.
    prepass: results of PREPASS.
    """

    raw: Tensor
    adv: Tensor
    lp: Tensor
    behavior: Tensor
    mask: Tensor
    seq: Tensor
    n: int
    stats: ReshapeStatistics | None = None
    reshape: Reshape | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    prepass: dict[str, Tensor] = field(default_factory=dict)

    @property
    def log_r(self) -> Tensor:
        return self.raw.clamp(-CLAMP, CLAMP)

    @property
    def sample_log_ratio(self) -> Tensor:
        """The sum of `raw` over each token's sample [n], not clamped."""
        return sum_by_sample(where(self.mask, self.raw, 0.0), self.seq, self.n)[self.seq]

    @property
    def mean_log_ratio(self) -> Tensor:
        """The mean of `raw` over each token's sample [n]; the mean is clamped, not each token."""
        means = average_by_sample(self.raw, self.mask, self.seq, self.n).clamp(-CLAMP, CLAMP)
        return means[self.seq]


@dataclass
class StepBatch:
    """The batch before an optimizer step.

    behavior: [N], log mu.
    adv: [N].
    mask: bool [N], in the loss of the step.
    seq: int64 [N].
    groups: int64 [B].
    current: [N], log pi_theta, where the surrogate needs it.
    valid: bool [N], in the loss of the batch.
    seed: of random choices.
    """

    behavior: Tensor
    adv: Tensor
    mask: Tensor
    seq: Tensor
    groups: Tensor
    current: Tensor | None
    valid: Tensor
    seed: int

    def compute_covariance(self) -> Tensor:
        """(lp - mean lp)(A - mean A) [N], means over `valid`; 0 elsewhere.

        Cui et al. 2025, arXiv 2505.22617.
        """
        assert self.current is not None
        count = self.valid.sum().clamp(min=1)
        x, a = (where(self.valid, x, 0.0) for x in (self.current, self.adv))
        return where(self.valid, (x - x.sum() / count) * (a - a.sum() / count), 0.0)


def _apply_log_probability(t: SurrogateTokens, c: settings.Loss) -> SurrogateTerm:
    """lp A: `reinforce` (Williams 1992), `gpg` (arXiv 2504.02546) and `sft`.

    For `reinforce` the bounded weight pi_theta / mu belongs to the correction. For `sft` A is 1
    where the sample was rewarded and 0 elsewhere.
    """
    return build_unclipped(t.adv, t.lp * t.adv)


def clip_ratio(r: Tensor, adv: Tensor, lo: Any, hi: Any) -> SurrogateTerm:
    """min(r A, clip(r, lo, hi) A), with numbers or scalars for bounds."""
    clipped = mark_away(adv, r < lo, r > hi)
    value = torch.minimum(r * adv, r.clamp(lo, hi) * adv)
    return SurrogateTerm(where(clipped == OPEN, r * adv, 0.0), value, clipped)


def compute_ppo(
    log_r: Tensor, adv: Tensor, *, low: float = 0.2, high: float = 0.2, dual: float = 0.0
) -> SurrogateTerm:
    """`clip_ratio` at 1 - low and 1 + high (Schulman et al. 2017, arXiv 1707.06347).

    dual > 1: dual clip (arXiv 1912.09729). With importance weights prox / mu this is decoupled PPO
    (Hilton et al. 2021, arXiv 2110.00641). high = 0.28 is DAPO's clip-higher.

    Args:
        log_r: [N].
        adv: [N].
    """
    coefficient, value, clipped = clip_ratio(log_r.exp(), adv, 1 - low, 1 + high)
    if dual > 0:
        floor = (adv < 0) & (value < dual * adv)
        coefficient = where(floor, 0.0, coefficient)
        value, clipped = where(floor, dual * adv, value), where(floor, DUAL, clipped)
    return SurrogateTerm(coefficient, value, clipped)


def compute_cispo(log_r: Tensor, t: SurrogateTokens, *, lo: float, hi: float) -> SurrogateTerm:
    """sg[clamp(r, lo, hi)] A lp (MiniMax-M1, arXiv 2506.13585): the gradient never vanishes.

    lo = 0: no lower bound, as published.
    """
    r = log_r.exp()
    weighted = r.clamp(lo, hi) * t.adv
    return SurrogateTerm(weighted, weighted * t.lp, mark_sides(r < lo, r > hi))


def _apply_sapo(t: SurrogateTokens, c: settings.SapoLoss) -> SurrogateTerm:
    """4/tau sigma(tau (r - 1)) A: a soft gate (SAPO, arXiv 2511.20347).

    Its derivative in r is 4 sigma (1 - sigma) A.
    """
    r = _compute_loss_ratio(t, c).exp()
    tau = where(t.adv > 0, torch.full_like(t.adv, c.sapo_tau_pos), c.sapo_tau_neg)
    s = torch.sigmoid(tau * (r - 1))
    return build_unclipped(4 * s * (1 - s) * r * t.adv, 4 / tau * s * t.adv)


def _find_moved(c: settings.MovedLoss, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Return bool [N] each: tokens whose probability moved too far down, and too far up."""
    return moved < -c.dppo_threshold, moved > (
        c.dppo_threshold if c.dppo_high is None else c.dppo_high
    )


def _apply_dppo(t: SurrogateTokens, c: settings.DppoLoss) -> SurrogateTerm:
    """r A, 0 where pi_theta - pi_prox moved too far in the direction of A.

    Divergence PPO, total-variation form (Qi et al. 2026, arXiv 2602.04879). With divergence = kl it
    uses the binary KL(pi_prox || pi_theta). As published the proximal policy is mu.
    """
    r, prob = t.log_r.exp(), t.lp.exp()
    if c.dppo_divergence == "kl":
        moved = compute_binary_kl(prob.log() - t.log_r, prob.log()) * t.log_r.sign()
    else:
        moved = prob - prob / r
    clipped = mark_away(t.adv, *_find_moved(c, moved))
    open_value = where(clipped == OPEN, r * t.adv, 0.0)
    return SurrogateTerm(open_value, open_value, clipped)


def _apply_topr(t: SurrogateTokens, c: settings.ToprLoss) -> SurrogateTerm:
    """lp A for A > 0, min(pi_theta / mu, 1) lp A for A < 0 (TOPR, arXiv 2503.14286).

    The ratio is that of the whole sample, detached. Its sum is clamped, not each token.
    """
    w = where(t.adv < 0, t.sample_log_ratio.clamp(-CLAMP, 0.0).exp(), 1.0)
    return build_unclipped(w * t.adv, w * t.adv * t.lp)


def _apply_dro(t: SurrogateTokens, c: settings.DroLoss) -> SurrogateTerm:
    """lp A - beta/2 (log pi_theta / mu)^2: token form of direct reward optimization.

    Richemond et al. 2024, arXiv 2405.19107.
    """
    beta = c.dro_beta
    return build_unclipped(t.adv - beta * t.log_r, t.lp * t.adv - beta / 2 * t.log_r.square())


def choose_highest(
    score: Tensor, candidates: Tensor, share: float, mask: Tensor | None = None
) -> Tensor:
    """Return bool [N]: the candidates with the largest score: a share of the mask (KL-Cov).

    At least one token is chosen. mask: None: the candidates.
    """
    counted = candidates if mask is None else mask
    count = min(max(1, int(share * int(counted.sum()))), len(score))
    chosen = zeros_like(candidates)
    chosen[where(candidates, score, -torch.inf).topk(count).indices] = True
    return chosen & candidates


def sample_by_covariance(
    cov: Tensor, mask: Tensor, share: float, lo: float, hi: float, seed: int
) -> Tensor:
    """Sample `share` of the mask's tokens where lo < covariance < hi: bool [N] (Clip-Cov)."""
    key = torch.rand(len(cov), generator=torch.Generator().manual_seed(seed)).to(cov.device)
    return choose_highest(key, mask & (cov > lo) & (cov < hi), share, mask)


def _apply_kl_cov(t: SurrogateTokens, c: settings.KlCovLoss) -> SurrogateTerm:
    """r A, minus coefficient |log r| on the tokens chosen by `choose_highest`.

    Cui et al. 2025, arXiv 2505.22617.
    """
    value, log_r = t.log_r.exp() * t.adv, t.log_r
    pull = where(t.prepass["chosen"], c.cov_coefficient, 0.0)
    return build_unclipped(value - pull * log_r.sign(), value - pull * log_r.abs())


def _apply_clip_cov(t: SurrogateTokens, c: settings.ClipCovLoss) -> SurrogateTerm:
    """`compute_ppo` without gradient on the tokens chosen by `sample_by_covariance`.

    arXiv 2505.22617.
    """
    term, chosen = compute_ppo(t.log_r, t.adv, **c.clip), t.prepass["chosen"]
    return SurrogateTerm(
        where(chosen, 0.0, term.coefficient),
        where(chosen, 0.0, term.objective),
        where(chosen & (term.clipped == OPEN), HIGH, term.clipped).to(torch.int8),
    )


def compute_reshape(
    log_w: Tensor, adv: Tensor, g: Tensor, c: Reshape, share: float = 1.0
) -> SurrogateTerm:
    """IS-reshape: w^gamma A (power) or A (w^gamma - 1) / gamma (Box-Cox).

    `c.clip` e > 0 is repair B: no gradient where w has left [1-e, 1+e] in the direction of A, and
    the objective of the bound, as in `compute_ppo`. With `c.clip_on` = w_gamma it looks at w^gamma
    as the report does, so that w overshoots. `c.weight_max` > 0 bounds w^gamma.

    Args:
        log_w: [N].
        adv: [N].
        g: [N], gamma.
        share: of repair D by tokens, for the Box-Cox form. There gamma = 0 leaves the full gradient
            of the log-likelihood, so tokens that push away are multiplied by the share itself. The
            power form has the share in gamma, whose gradient goes to 0 with it.
    """
    cut = zeros_like(adv, dtype=torch.int8)
    if c.clip > 0:
        exponent = g if c.clip_on == "w_gamma" else torch.ones_like(g)
        r = (exponent * log_w).exp()
        cut = mark_away(adv, r < 1 - c.clip, r > 1 + c.clip)
        log_w = where(cut == OPEN, log_w, r.clamp(1 - c.clip, 1 + c.clip).log() / exponent)
    w = (g * log_w).exp()
    bounded = w.clamp(max=c.weight_max) if c.weight_max > 0 else w
    slow = torch.ones_like(adv)
    if c.budget == "tokens":
        slow = where(adv * log_w > 0, torch.full_like(adv, share), 1.0)
    coefficient, value = FORMS[c.form](log_w, adv, g, bounded, slow)
    return SurrogateTerm(where(cut == OPEN, coefficient, 0.0), value, cut)


# reshape.form -> (coefficient [N], objective [N]) of log w, A, gamma, the bounded w^gamma, and the
# share left to tokens that push away
FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "power": lambda log_w, adv, g, w, slow: (g * w * adv, w * adv),
    # (w^gamma - 1) / gamma, whose limit at 0 is log w
    "box_cox": lambda log_w, adv, g, w, slow: (
        slow * w * adv,
        slow * (adv * where(g > 1e-6, torch.expm1(g * log_w) / g.clamp(min=1e-6), log_w)),
    ),
}


# ---- on the ratio of whole samples: every token has the coefficient of its sample ---------------


def _apply_vespo(t: SurrogateTokens, c: settings.VespoLoss) -> SurrogateTerm:
    """phi(W) A with phi = W^k e^(l (1 - W)): the coefficient (VESPO, arXiv 2602.10693).

    (k, l) is chosen by the sign of A. phi(1) = 1, and the maximum is at W = k / l.
    """
    k = where(t.adv < 0, c.vespo_k_neg, c.vespo_k_pos)
    m = where(t.adv < 0, c.vespo_l_neg, c.vespo_l_pos)
    x = t.sample_log_ratio.clamp(-CLAMP, CLAMP)
    coefficient = (k * x + m - m * x.exp()).exp() * t.adv
    return build_unclipped(coefficient, coefficient * t.lp)


def _apply_oapl(t: SurrogateTokens, c: settings.OaplLoss) -> SurrogateTerm:
    """2 beta (A* - beta X): the coefficient of OAPL (arXiv 2602.19362).

    The loss is the mean over samples of (beta X - A*)^2, with gradient through X, the sample's log
    ratio; A* is that of `advantage.name = oapl`. X is not clamped: nothing is exponentiated, and
    the pull back would end at a clamp.
    """
    residual = c.oapl_beta * t.sample_log_ratio - t.adv
    length = sum_by_sample(t.mask.to(t.raw.dtype), t.seq, t.n)[t.seq].clamp(min=1)
    return build_unclipped(-2 * c.oapl_beta * residual, -residual.square() / length)


def _apply_gmpo(t: SurrogateTokens, c: settings.GmpoLoss) -> SurrogateTerm:
    """s A with s = exp(mean x'), no gradient on tokens that are cut (GMPO, arXiv 2507.20673).

    x' is the token's log-ratio cut at `high` for A > 0 and at -low for A < 0. With
    seq-mean-token-mean this is the gradient of the geometric mean. Without a cut it equals `gspo`
    without a cut.
    """
    low, high = c.clip.values()
    clipped = mark_away(t.adv, t.raw < -low, t.raw > high)
    clamped = where(clipped == HIGH, high, where(clipped == LOW, -low, t.raw))
    mean = average_by_sample(clamped, t.mask, t.seq, t.n).clamp(-CLAMP, CLAMP)
    value = mean.exp()[t.seq] * t.adv
    return SurrogateTerm(where(clipped == OPEN, value, 0.0), value, clipped)


def _compute_group_probability(w: StepBatch, c: settings.GepoLoss) -> dict[str, Tensor]:
    """Return log E_q [N] of each token's group: GEPO's denominator.

    E_q = sum q^2 / sum q over the group's samples with a token in the mask, q = exp(mean log mu) of
    a sample. It covers the whole group, so it must be known before any micro-batch.
    """
    n = len(w.groups)
    q = average_by_sample(w.behavior, w.mask, w.seq, n).clamp(-CLAMP, CLAMP).double().exp()
    q = where(sum_by_sample(w.mask.to(q.dtype), w.seq, n) > 0, q, 0.0)
    total, total_square = (sum_by_sample(x, w.groups, n)[w.groups] for x in (q, q.square()))
    log_mean = (total_square / total.clamp(min=1e-30)).clamp(min=1e-30).log()
    return {"group_q": log_mean.to(w.behavior.dtype)[w.seq]}


def _apply_gepo(t: SurrogateTokens, c: settings.GepoLoss) -> SurrogateTerm:
    """(p / E_q) A: the coefficient with seq-mean-token-mean (GEPO, arXiv 2508.17850).

    p = exp(mean log pi_theta) of each token's sample. It is not centered: at pi_theta = mu the
    weight is q / E_q, which is not 1.
    """
    log_p = average_by_sample(t.lp, t.mask, t.seq, t.n)[t.seq]
    coefficient = (log_p - t.prepass["group_q"]).clamp(-CLAMP, CLAMP).exp() * t.adv
    return build_unclipped(coefficient, coefficient)


# ---- on the ratio of tokens and of prefixes ------------------------------------------------------


def _build_pulled(
    t: SurrogateTokens, below: Tensor, above: Tensor, pull: float, score: Tensor | float = 1.0
) -> SurrogateTerm:
    """Build the term w A score, 0 below and above, minus pull (log w)^2 everywhere."""
    weighted = where(below | above, 0.0, t.log_r.exp() * t.adv)
    value = weighted * score - pull * t.log_r.square()
    return SurrogateTerm(weighted - 2 * pull * t.log_r, value, mark_sides(below, above))


def _apply_band(t: SurrogateTokens, c: settings.BandLoss) -> SurrogateTerm:
    """w A where lo < w < hi for either sign of A, else 0; minus 2 pull log w everywhere.

    Double-sided importance sampling of GLM-5 (arXiv 2602.15763) and SAO (arXiv 2607.07508), whose
    weight is detached. With a pull (tau) it is the loss of Kimi K2.5 (arXiv 2602.02276). That the
    pull acts outside the band too, where it is the only way back, is our reading.
    """
    w = t.log_r.exp()
    return _build_pulled(t, w <= c.band_lo, w >= c.band_hi, c.pull, t.lp)


def _apply_ipo(t: SurrogateTokens, c: settings.IpoLoss) -> SurrogateTerm:
    """w A where pi_theta - mu lies within [-low, high], else 0; minus 2 pull log w everywhere.

    It acts for either sign of A. prime-rl's IPO: the total variation of `dppo` on both sides and
    the pull of Kimi K2.5, read in a port.
    """
    moved = t.lp.exp() - t.lp.exp() / t.log_r.exp()
    return _build_pulled(t, *_find_moved(c, moved), c.pull)


def _apply_minpro(t: SurrogateTokens, c: settings.MinproLoss) -> SurrogateTerm:
    """sg[clip(u, 1 - low, 1 + high)] A lp: the gradient is never 0 (MinPRO, arXiv 2601.22718).

    u_t is w_t times the smallest w before it in its sample; the first token's u is its w (our
    reading). Tokens outside the mask are skipped. On samples of one token it is `cispo`.
    """
    low, high = c.clip.values()
    minimum = compute_running_min(where(t.mask, t.log_r, FAR), t.seq)
    starts = torch.ones_like(t.mask)
    starts[1:] = t.seq[1:] != t.seq[:-1]
    previous_min = where(starts, FAR, minimum.roll(1))
    log_u = t.log_r + where(previous_min >= FAR, 0.0, previous_min)
    return compute_cispo(log_u, t, lo=1 - low, hi=1 + high)


def _find_bapo_bounds(b: StepBatch, c: settings.BapoLoss) -> dict[str, Tensor]:
    """Return the bounds `lo` and `hi` of the ratio, scalars, from a whole batch.

    Starting at the first of BAPO_LOW and BAPO_HIGH, hi rises to its last value and then lo, until
    the tokens with A > 0 have `c.bapo_share` of sum |mu min(w A, clip(w, lo, hi) A)|. For A > 0 the
    sum depends on hi alone, for A < 0 on lo alone. BAPO, arXiv 2510.18927, equation 8 as we read
    it: its code has another order and no mu.
    """
    assert b.current is not None
    w = where(b.mask, compute_log_ratio(b.current, b.behavior), 0.0).double().exp()
    mass = where(b.mask, b.behavior, -torch.inf).double().exp() * b.adv.double().abs()
    positive_mass, negative_mass = (where(side, mass, 0.0) for side in (b.adv > 0, b.adv < 0))
    lows, highs = (
        lowest + step * torch.arange(round((highest - lowest) / step) + 1, device=w.device).double()
        for lowest, step, highest in (BAPO_LOW, BAPO_HIGH)
    )
    lo = torch.cat([lows[:1].expand(len(highs)), lows[1:]])
    hi = torch.cat([highs, highs[-1:].expand(len(lows) - 1)])
    p = (positive_mass * torch.minimum(w, hi[:, None])).sum(1)
    q = (negative_mass * torch.maximum(w, lo[:, None])).sum(1)
    insufficient = p < c.bapo_share * (p + q)  # a batch without any mass is satisfied
    chosen = where(insufficient.all(), len(lo) - 1, (~insufficient).int().argmax())
    return {name: x[chosen].to(b.current.dtype) for name, x in (("lo", lo), ("hi", hi))}


# ---- by name -------------------------------------------------------------------------------------


def _compute_loss_ratio(
    t: SurrogateTokens, c: settings.PpoFamilyLoss | settings.SapoLoss
) -> Tensor:
    """Return log r [N] by `loss.ratio`: of the token, or the sum or mean over its sample."""
    if c.ratio == "token":
        return t.log_r
    if c.ratio == "geometric":
        return t.mean_log_ratio
    return t.sample_log_ratio.clamp(-CLAMP, CLAMP)


def _apply_ppo(t: SurrogateTokens, c: settings.PpoFamilyLoss) -> SurrogateTerm:
    return compute_ppo(_compute_loss_ratio(t, c), t.adv, **c.clip, dual=c.dual_clip)


def _apply_cispo(t: SurrogateTokens, c: settings.CispoLoss) -> SurrogateTerm:
    low, high = c.clip.values()
    hi = high if c.cispo_absolute else 1 + high
    return compute_cispo(t.log_r, t, lo=1 - low, hi=hi)


def _apply_reshape(t: SurrogateTokens, c: settings.ReshapeLoss) -> SurrogateTerm:
    """Apply IS-reshape against mu, whatever the proximal policy is, and add its metric sums."""
    assert t.stats is not None and t.reshape is not None
    log_w = compute_log_ratio(t.lp, t.behavior)
    g = compute_gamma(log_w, t.adv, t.stats, t.reshape)
    push = t.adv * log_w
    w = (g * log_w).exp()
    rows = [
        torch.ones_like(g),
        g,
        log_w.exp(),
        w,
        w * t.adv,
        (w * t.adv).square(),
        g * (push > 0),
        push > 0,
        g * (push < 0),
        push < 0,
        push,
    ]
    if t.reshape.mode == "v3.1":
        rows.append(compute_p_correct(log_w, t.adv, t.reshape.tau))
    t.sums["reshape"] = torch.stack([where(t.mask, x.double(), 0.0).sum() for x in rows])
    return compute_reshape(log_w, t.adv, g, t.reshape, t.stats.share)


# loss.surrogate, the tag of its struct in `settings` -> SurrogateTerm of the tokens
SURROGATES: dict[str, Callable[[SurrogateTokens, Any], SurrogateTerm]] = {
    # r A: no trust region (Kakade and Langford 2002)
    "vanilla": lambda t, c: build_unclipped(*[t.log_r.exp() * t.adv] * 2),
    "reinforce": _apply_log_probability,
    "ppo": _apply_ppo,
    "decoupled_ppo": _apply_ppo,
    # clips the ratio of samples, s = exp(mean log r) (Qwen, arXiv 2507.18071). With
    # seq-mean-token-mean the reduced coefficient of a token is s A / |sample|, the published
    # gradient
    "gspo": lambda t, c: compute_ppo(t.mean_log_ratio, t.adv, **c.clip),
    "cispo": _apply_cispo,
    "dppo": _apply_dppo,
    "sapo": _apply_sapo,
    "topr": _apply_topr,
    "dro": _apply_dro,
    "kl_cov": _apply_kl_cov,
    "clip_cov": _apply_clip_cov,
    "gpg": _apply_log_probability,
    "sft": _apply_log_probability,
    "reshape": _apply_reshape,
    "vespo": _apply_vespo,
    "oapl": _apply_oapl,
    "band": _apply_band,
    "gepo": _apply_gepo,
    # at the bounds of `_find_bapo_bounds`
    "bapo": lambda t, c: clip_ratio(t.log_r.exp(), t.adv, t.prepass["lo"], t.prepass["hi"]),
    "minpro": _apply_minpro,
    "gmpo": _apply_gmpo,
    "ipo": _apply_ipo,
    # of `loss.function`, by `loss.begin_step`
    "function": lambda t, c: build_unclipped(t.prepass["coefficient"], t.prepass["objective"]),
}
# loss.surrogate -> its inputs from all tokens of an optimizer step: tensors [N] and scalars, for
# `SurrogateTokens.prepass`; one that reads `current` stands in NEED_CURRENT too
PREPASS: dict[str, Callable[[StepBatch, Any], dict[str, Tensor]]] = {
    "gepo": _compute_group_probability,
    "bapo": _find_bapo_bounds,
    "kl_cov": lambda w, c: {"chosen": choose_highest(w.compute_covariance(), w.valid, c.cov_share)},
    "clip_cov": lambda w, c: {
        "chosen": sample_by_covariance(
            w.compute_covariance(), w.valid, c.cov_share, c.cov_lo, c.cov_hi, w.seed
        )
    },
}
