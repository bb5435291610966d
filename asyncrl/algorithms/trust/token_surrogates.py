"""Surrogates on the ratio of tokens and of prefixes."""

from __future__ import annotations

import torch

from asyncrl.algorithms import settings
from asyncrl.algorithms.ratios import FAR, compute_log_ratio, compute_running_min
from asyncrl.algorithms.trust.view import SurrogateTerm, SurrogateTokens, mark_sides

# bounds of BAPO's ratio: first, step, last
BAPO_LOW = (0.6, 0.02, 0.9)
BAPO_HIGH = (1.2, 0.05, 3.0)


def compute_band(
    log_w: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, lo: float, hi: float, pull: float
) -> SurrogateTerm:
    """w A where lo < w < hi for either sign of A, else 0; minus 2 pull log w everywhere.

    Double-sided importance sampling of GLM-5 (arXiv 2602.15763) and SAO (arXiv 2607.07508), whose
    weight is detached. With a pull (tau) it is the loss of Kimi K2.5 (arXiv 2602.02276). That the
    pull acts outside the band too, where it is the only way back, is our reading.
    """
    w = log_w.exp()
    below, above = w <= lo, w >= hi
    weighted = torch.where(below | above, 0.0, w * adv)
    coefficient = weighted - 2 * pull * log_w
    return SurrogateTerm(
        coefficient, weighted * lp - pull * log_w.square(), mark_sides(below, above)
    )


def apply_band(t: SurrogateTokens, c: settings.BandLoss) -> SurrogateTerm:
    return compute_band(t.log_r, t.adv, t.lp, lo=c.band_lo, hi=c.band_hi, pull=c.pull)


def compute_ipo(
    log_w: torch.Tensor,
    adv: torch.Tensor,
    prob: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    pull: float = 0.0,
) -> SurrogateTerm:
    """w A where pi_theta - mu lies within [-low, high], else 0; minus 2 pull log w everywhere.

    It acts for either sign of A. prime-rl's IPO: the total variation of `dppo` on both sides and
    the pull of Kimi K2.5, read in a port.

    Args:
        log_w: [N].
        adv: [N].
        prob: [N], pi_theta.
    """
    w = log_w.exp()
    moved = prob - prob / w
    below, above = moved < -low, moved > high
    weighted = torch.where(below | above, 0.0, w * adv)
    return SurrogateTerm(
        weighted - 2 * pull * log_w, weighted - pull * log_w.square(), mark_sides(below, above)
    )


def apply_ipo(t: SurrogateTokens, c: settings.IpoLoss) -> SurrogateTerm:
    low, high = c.dppo_threshold, c.dppo_high
    return compute_ipo(
        t.log_r,
        t.adv,
        t.lp.exp(),
        low=low,
        high=low if high is None else high,
        pull=c.pull,
    )


def compute_prefix_minimum(
    log_w: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor
) -> torch.Tensor:
    """Return log u [N]: u_t = w_t times the smallest w before it in its sample.

    The first token's u is its w (our reading). Tokens outside the mask are skipped.
    """
    minimum = compute_running_min(torch.where(mask, log_w, FAR), seq)
    starts = torch.ones_like(mask)
    starts[1:] = seq[1:] != seq[:-1]
    previous_min = torch.where(starts, FAR, minimum.roll(1))
    return log_w + torch.where(previous_min >= FAR, 0.0, previous_min)


def compute_minpro(
    log_u: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, low: float, high: float
) -> SurrogateTerm:
    """sg[clip(u, 1 - low, 1 + high)] A lp: the gradient is never 0 (MinPRO, arXiv 2601.22718).

    On samples of one token it is `cispo`.
    """
    u = log_u.exp()
    w = u.clamp(1 - low, 1 + high)
    return SurrogateTerm(w * adv, w * adv * lp, mark_sides(u < 1 - low, u > 1 + high))


def apply_minpro(t: SurrogateTokens, c: settings.MinproLoss) -> SurrogateTerm:
    low = 0.2 if c.eps_low is None else c.eps_low
    high = 0.28 if c.eps_high is None else c.eps_high
    return compute_minpro(
        compute_prefix_minimum(t.log_r, t.mask, t.seq), t.adv, t.lp, low=low, high=high
    )


def find_bapo_bounds(
    current: torch.Tensor,
    behavior: torch.Tensor,
    adv: torch.Tensor,
    mask: torch.Tensor,
    share: float,
) -> dict[str, torch.Tensor]:
    """Return the bounds `lo` and `hi` of the ratio, scalars, from a whole batch [N].

    Starting at the first of BAPO_LOW and BAPO_HIGH, hi rises to its last value and then lo, until
    the tokens with A > 0 have `share` of sum |mu min(w A, clip(w, lo, hi) A)|. For A > 0 the sum
    depends on hi alone, for A < 0 on lo alone. BAPO, arXiv 2510.18927, equation 8 as we read it:
    its code has another order and no mu.
    """
    w = torch.where(mask, compute_log_ratio(current, behavior), 0.0).double().exp()
    mass = torch.where(mask, behavior, -torch.inf).double().exp() * adv.double().abs()
    positive_mass, negative_mass = (torch.where(side, mass, 0.0) for side in (adv > 0, adv < 0))
    lows, highs = _list_bounds(BAPO_LOW), _list_bounds(BAPO_HIGH)
    candidates = [(lows[0], hi) for hi in highs] + [(lo, highs[-1]) for lo in lows[1:]]
    positive = {hi: (positive_mass * w.clamp(max=hi)).sum() for hi in highs}
    negative = {lo: (negative_mass * w.clamp(min=lo)).sum() for lo in lows}
    p, q = (
        torch.stack([sums[x] for x in xs])
        for sums, xs in (
            (positive, [hi for _, hi in candidates]),
            (negative, [lo for lo, _ in candidates]),
        )
    )
    insufficient = p < share * (p + q)  # a batch without any mass is satisfied
    chosen = torch.where(insufficient.all(), len(candidates) - 1, (~insufficient).int().argmax())
    bounds = torch.tensor(candidates, dtype=current.dtype, device=current.device)[chosen]
    return {"lo": bounds[0], "hi": bounds[1]}


def _list_bounds(bounds: tuple[float, float, float]) -> list[float]:
    lowest, step, highest = bounds
    return [lowest + step * i for i in range(round((highest - lowest) / step) + 1)]


def compute_bapo(
    log_w: torch.Tensor, adv: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
) -> SurrogateTerm:
    """min(w A, clip(w, lo, hi) A), with the scalar bounds of `find_bapo_bounds`."""
    w = log_w.exp()
    value = torch.minimum(w * adv, torch.minimum(torch.maximum(w, lo), hi) * adv)
    clipped = mark_sides((adv < 0) & (w < lo), (adv > 0) & (w > hi))
    return SurrogateTerm(torch.where(clipped == 0, w * adv, 0.0), value, clipped)


def apply_bapo(t: SurrogateTokens, c: settings.BapoLoss) -> SurrogateTerm:
    return compute_bapo(t.log_r, t.adv, t.prepass["lo"], t.prepass["hi"])
