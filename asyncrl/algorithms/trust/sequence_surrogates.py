"""Surrogates on the ratio of whole samples.

Every token has the coefficient of its sample, except where a bound cuts it.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms import settings
from asyncrl.algorithms.ratios import CLAMP, average_by_sample, sum_by_sample
from asyncrl.algorithms.trust.view import (
    SurrogateTerm,
    SurrogateTokens,
    build_unclipped,
    mark_sides,
)

GMPO_CLIP = 0.4  # in nats of a token's log-ratio


def compute_vespo(
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


def apply_vespo(t: SurrogateTokens, c: settings.VespoLoss) -> SurrogateTerm:
    sample_log_ratio = sum_by_sample(torch.where(t.mask, t.raw, 0.0), t.seq, t.n)[t.seq]
    coefficient = compute_vespo(
        sample_log_ratio,
        t.adv,
        positive=(c.vespo_k_pos, c.vespo_l_pos),
        negative=(c.vespo_k_neg, c.vespo_l_neg),
    )
    return build_unclipped(coefficient, coefficient * t.lp)


def compute_oapl(log_w: torch.Tensor, adv: torch.Tensor, beta: float) -> torch.Tensor:
    """2 beta (A* - beta X): the coefficient of OAPL (arXiv 2602.19362).

    The loss is the mean over samples of (beta X - A*)^2, with gradient through X; A* is
    `advantages.compute_oapl`.

    Args:
        log_w: [N], X of each token's sample. It is not clamped: nothing is exponentiated, and the
            pull back would end at a clamp.
        adv: [N].
    """
    return 2 * beta * (adv - beta * log_w)


def apply_oapl(t: SurrogateTokens, c: settings.OaplLoss) -> SurrogateTerm:
    token_mask = t.mask.to(t.raw.dtype)
    sample_log_ratio = sum_by_sample(torch.where(t.mask, t.raw, 0.0), t.seq, t.n)[t.seq]
    residual = c.oapl_beta * sample_log_ratio - t.adv
    length = sum_by_sample(token_mask, t.seq, t.n)[t.seq].clamp(min=1)
    return build_unclipped(
        compute_oapl(sample_log_ratio, t.adv, c.oapl_beta), -residual.square() / length
    )


def compute_gmpo(
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
    above = (adv > 0) & (log_r > high)
    below = (adv < 0) & (log_r < -low)
    clamped = torch.where(above, high, torch.where(below, -low, log_r))
    sample_ratio = average_by_sample(clamped, mask, seq, n).clamp(-CLAMP, CLAMP).exp()[seq]
    clipped = mark_sides(below, above)
    return SurrogateTerm(
        torch.where(clipped == 0, sample_ratio * adv, 0.0), sample_ratio * adv, clipped
    )


def apply_gmpo(t: SurrogateTokens, c: settings.GmpoLoss) -> SurrogateTerm:
    low = GMPO_CLIP if c.eps_low is None else c.eps_low
    high = GMPO_CLIP if c.eps_high is None else c.eps_high
    return compute_gmpo(t.raw, t.adv, t.mask, t.seq, t.n, low=low, high=high)


def compute_group_probability(
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
    q = average_by_sample(behavior, mask, seq, n).clamp(-CLAMP, CLAMP).double().exp()
    q = torch.where(sum_by_sample(mask.to(q.dtype), seq, n) > 0, q, 0.0)
    total, total_square = (
        torch.zeros_like(q).index_add_(0, groups, x)[groups] for x in (q, q.square())
    )
    log_mean = (total_square / total.clamp(min=1e-30)).clamp(min=1e-30).log()
    return log_mean.to(behavior.dtype)[seq]


def compute_gepo(log_p: torch.Tensor, log_q: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    """(p / E_q) A: the coefficient with seq-mean-token-mean (GEPO, arXiv 2508.17850).

    p = exp(mean log pi_theta) of each token's sample. It is not centered: at pi_theta = mu the
    weight is q / E_q, which is not 1.
    """
    return (log_p - log_q).clamp(-CLAMP, CLAMP).exp() * adv


def apply_gepo(t: SurrogateTokens, c: settings.GepoLoss) -> SurrogateTerm:
    log_p = average_by_sample(t.lp, t.mask, t.seq, t.n)[t.seq]
    coefficient = compute_gepo(log_p, t.prepass["group_q"], t.adv)
    return build_unclipped(coefficient, coefficient)
