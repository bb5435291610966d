"""Surrogates on the ratio of whole samples.

Every token has the coefficient of its sample, except where a bound cuts it.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms import settings
from asyncrl.algorithms.ratios import CLAMP, seq_mean, seq_sum
from asyncrl.algorithms.trust.view import SurrogateTerm, SurrogateTokens, sides, unclipped

GMPO_CLIP = 0.4  # in nats of a token's log-ratio


def vespo(
    log_w: torch.Tensor,
    adv: torch.Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> torch.Tensor:
    """phi(W) A with phi = W^k e^(l (1 - W)): the coefficient (VESPO, arXiv 2602.10693).

    (k, l) is chosen by the sign of A. phi(1) = 1, and the maximum is at W = k / l.

    Args:
        log_w: [N], X of each token's sample, not clamped.
        adv: [N].
    """
    k = torch.where(adv < 0, negative[0], positive[0])
    m = torch.where(adv < 0, negative[1], positive[1])
    x = log_w.clamp(-CLAMP, CLAMP)
    return (k * x + m - m * x.exp()).exp() * adv


def vespo_term(t: SurrogateTokens, c: settings.VespoLoss) -> SurrogateTerm:
    whole = seq_sum(torch.where(t.mask, t.raw, 0.0), t.seq, t.n)[t.seq]
    coefficient = vespo(
        whole,
        t.adv,
        positive=(c.vespo_k_pos, c.vespo_l_pos),
        negative=(c.vespo_k_neg, c.vespo_l_neg),
    )
    return unclipped(coefficient, coefficient * t.lp)


def oapl(log_w: torch.Tensor, adv: torch.Tensor, beta: float) -> torch.Tensor:
    """2 beta (A* - beta X): the coefficient of OAPL (arXiv 2602.19362).

    The loss is the mean over samples of (beta X - A*)^2, with gradient through X; A* is
    `advantages.oapl`.

    Args:
        log_w: [N], X of each token's sample. It is not clamped: nothing is exponentiated, and the
            pull back would end at a clamp.
        adv: [N].
    """
    return 2 * beta * (adv - beta * log_w)


def oapl_term(t: SurrogateTokens, c: settings.OaplLoss) -> SurrogateTerm:
    inside = t.mask.to(t.raw.dtype)
    whole = seq_sum(torch.where(t.mask, t.raw, 0.0), t.seq, t.n)[t.seq]
    apart = c.oapl_beta * whole - t.adv
    length = seq_sum(inside, t.seq, t.n)[t.seq].clamp(min=1)
    return unclipped(oapl(whole, t.adv, c.oapl_beta), -apart.square() / length)


def gmpo(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
    *,
    low: float = GMPO_CLIP,
    high: float = GMPO_CLIP,
) -> SurrogateTerm:
    """s A with s = exp(mean x'), no gradient on tokens that are cut (GMPO, arXiv 2507.20673).

    x' is the token's log-ratio cut at `high` for A > 0 and at -low for A < 0. With
    seq-mean-token-mean this is the gradient of the geometric mean. Without a cut it equals `gspo`
    without a cut.
    """
    over = (adv > 0) & (log_r > high)
    under = (adv < 0) & (log_r < -low)
    cut = torch.where(over, high, torch.where(under, -low, log_r))
    whole = seq_mean(cut, mask, seq, n).clamp(-CLAMP, CLAMP).exp()[seq]
    clipped = sides(under, over)
    return SurrogateTerm(torch.where(clipped == 0, whole * adv, 0.0), whole * adv, clipped)


def gmpo_term(t: SurrogateTokens, c: settings.GmpoLoss) -> SurrogateTerm:
    low = GMPO_CLIP if c.eps_low is None else c.eps_low
    high = GMPO_CLIP if c.eps_high is None else c.eps_high
    return gmpo(t.raw, t.adv, t.mask, t.seq, t.n, low=low, high=high)


def group_probability(
    behavior: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """Return log E_q [N] of each token's group: GEPO's denominator.

    E_q = sum q^2 / sum q over the group's samples with a token in the mask, q = exp(mean log mu) of
    a sample. It covers the whole group, so it must be known before any micro-batch.

    Args:
        behavior: [N], log mu.
        mask: bool [N].
        seq: int64 [N].
        groups: int64 [B].
    """
    n = len(groups)
    q = seq_mean(behavior, mask, seq, n).clamp(-CLAMP, CLAMP).double().exp()
    q = torch.where(seq_sum(mask.to(q.dtype), seq, n) > 0, q, 0.0)
    first, second = (torch.zeros_like(q).index_add_(0, groups, x)[groups] for x in (q, q.square()))
    whole = (second / first.clamp(min=1e-30)).clamp(min=1e-30).log()
    return whole.to(behavior.dtype)[seq]


def gepo(log_p: torch.Tensor, log_q: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    """(p / E_q) A: the coefficient with seq-mean-token-mean (GEPO, arXiv 2508.17850).

    p = exp(mean log pi_theta) of each token's sample. It is not centered: at pi_theta = mu the
    weight is q / E_q, which is not 1.
    """
    return (log_p - log_q).clamp(-CLAMP, CLAMP).exp() * adv


def gepo_term(t: SurrogateTokens, c: settings.GepoLoss) -> SurrogateTerm:
    now = seq_mean(t.lp, t.mask, t.seq, t.n)[t.seq]
    coefficient = gepo(now, t.prepass["group_q"], t.adv)
    return unclipped(coefficient, coefficient)
