"""Surrogates on the ratio of tokens and of prefixes."""

from __future__ import annotations

import torch

from asyncrl.algorithms import settings
from asyncrl.algorithms.ratios import FAR, log_ratio, running_min
from asyncrl.algorithms.trust.view import SurrogateTerm, SurrogateTokens, sides

# bounds of BAPO's ratio: first, step, last
BAPO_LOW = (0.6, 0.02, 0.9)
BAPO_HIGH = (1.2, 0.05, 3.0)


def band(
    log_w: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, lo: float, hi: float, pull: float
) -> SurrogateTerm:
    """w A where lo < w < hi for either sign of A, else 0; minus 2 pull log w everywhere.

    Double-sided importance sampling of GLM-5 (arXiv 2602.15763) and SAO (arXiv 2607.07508), whose
    weight is detached. With a pull (tau) it is the loss of Kimi K2.5 (arXiv 2602.02276). That the
    pull acts outside the band too, where it is the only way back, is our reading.
    """
    w = log_w.exp()
    under, over = w <= lo, w >= hi
    weighed = torch.where(under | over, 0.0, w * adv)
    coefficient = weighed - 2 * pull * log_w
    return SurrogateTerm(coefficient, weighed * lp - pull * log_w.square(), sides(under, over))


def band_term(t: SurrogateTokens, c: settings.BandLoss) -> SurrogateTerm:
    return band(t.log_r, t.adv, t.lp, lo=c.band_lo, hi=c.band_hi, pull=c.pull)


def ipo(
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
    under, over = moved < -low, moved > high
    weighed = torch.where(under | over, 0.0, w * adv)
    return SurrogateTerm(
        weighed - 2 * pull * log_w, weighed - pull * log_w.square(), sides(under, over)
    )


def ipo_term(t: SurrogateTokens, c: settings.IpoLoss) -> SurrogateTerm:
    low, high = c.dppo_threshold, c.dppo_high
    return ipo(
        t.log_r,
        t.adv,
        t.lp.exp(),
        low=low,
        high=low if high is None else high,
        pull=c.pull,
    )


def prefix_minimum(log_w: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
    """Return log u [N]: u_t = w_t times the smallest w before it in its sample.

    The first token's u is its w (our reading). Tokens outside the mask are skipped.
    """
    least = running_min(torch.where(mask, log_w, FAR), seq)
    new = torch.ones_like(mask)
    new[1:] = seq[1:] != seq[:-1]
    previous_min = torch.where(new, FAR, least.roll(1))
    return log_w + torch.where(previous_min >= FAR, 0.0, previous_min)


def minpro(
    log_u: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, low: float, high: float
) -> SurrogateTerm:
    """sg[clip(u, 1 - low, 1 + high)] A lp: the gradient is never 0 (MinPRO, arXiv 2601.22718).

    On samples of one token it is `cispo`.
    """
    u = log_u.exp()
    w = u.clamp(1 - low, 1 + high)
    return SurrogateTerm(w * adv, w * adv * lp, sides(u < 1 - low, u > 1 + high))


def minpro_term(t: SurrogateTokens, c: settings.MinproLoss) -> SurrogateTerm:
    low = 0.2 if c.eps_low is None else c.eps_low
    high = 0.28 if c.eps_high is None else c.eps_high
    return minpro(prefix_minimum(t.log_r, t.mask, t.seq), t.adv, t.lp, low=low, high=high)


def bapo_bounds(
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
    w = torch.where(mask, log_ratio(current, behavior), 0.0).double().exp()
    size = torch.where(mask, behavior, -torch.inf).double().exp() * adv.double().abs()
    up, down = (torch.where(side, size, 0.0) for side in (adv > 0, adv < 0))
    lows, highs = _rising(BAPO_LOW), _rising(BAPO_HIGH)
    tries = [(lows[0], hi) for hi in highs] + [(lo, highs[-1]) for lo in lows[1:]]
    positive = {hi: (up * w.clamp(max=hi)).sum() for hi in highs}
    negative = {lo: (down * w.clamp(min=lo)).sum() for lo in lows}
    p, q = (
        torch.stack([part[x] for x in xs])
        for part, xs in (
            (positive, [hi for _, hi in tries]),
            (negative, [lo for lo, _ in tries]),
        )
    )
    short = p < share * (p + q)  # a batch without any mass is satisfied
    place = torch.where(short.all(), len(tries) - 1, (~short).int().argmax())
    both = torch.tensor(tries, dtype=current.dtype, device=current.device)[place]
    return {"lo": both[0], "hi": both[1]}


def _rising(bounds: tuple[float, float, float]) -> list[float]:
    first, step, last = bounds
    return [first + step * i for i in range(round((last - first) / step) + 1)]


def bapo(
    log_w: torch.Tensor, adv: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
) -> SurrogateTerm:
    """min(w A, clip(w, lo, hi) A), with the scalar bounds of `bapo_bounds`."""
    w = log_w.exp()
    value = torch.minimum(w * adv, torch.minimum(torch.maximum(w, lo), hi) * adv)
    clipped = sides((adv < 0) & (w < lo), (adv > 0) & (w > hi))
    return SurrogateTerm(torch.where(clipped == 0, w * adv, 0.0), value, clipped)


def bapo_term(t: SurrogateTokens, c: settings.BapoLoss) -> SurrogateTerm:
    return bapo(t.log_r, t.adv, t.prepass["lo"], t.prepass["hi"])
