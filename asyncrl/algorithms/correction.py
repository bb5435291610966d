"""Importance weights proximal / behavior, always detached, and the exclusions based on them.

`sequence` is the product over the sample and `geometric` the geometric mean. The two names are
never used for each other.

log_rho comes from `ratios.subtract` unclamped. It is clamped to [-20, 20] last: per token where a
token's ratio is used by itself, and after the sum or mean for a whole sample. Clamping each token
first would change the product: a token at -30 in a sample whose other tokens add up to +25 weighs
e^-5, not e^5.

LEVELS, BOUNDS, STATISTICS and OVER hold the names that a config can choose. To add one, write a
function and add its line to the dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, where

from asyncrl.algorithms.kl import estimate_k3
from asyncrl.algorithms.ratios import (
    CLAMP,
    average_by_sample,
    average_masked,
    compute_binary_kl,
    find_sample_max,
    sum_by_sample,
)
from asyncrl.algorithms.settings import Correction
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function

DEFAULT_BOUNDS = {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
# a level without an entry above is unbounded until lo and hi are given; the bands below are of the
# ratio, and the other statistics have no default
REJECT_BAND = {"token": (0.5, 2.0), "sum": (0.5, 2.0), "mean": (0.99, 1.01), "max": (0.0, 2.0)}
VETO = {"none": 0.0, "probability": 1e-6, "ratio": 1e-4}


# correction.level -> unbounded weights [N] of log rho [N] (0 outside the mask), mask, seq, n
LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "none": lambda log_rho, mask, seq, n: torch.ones_like(log_rho),
    "token": lambda log_rho, mask, seq, n: log_rho.clamp(-CLAMP, CLAMP).exp(),
    # exp(sum log rho): per-trajectory importance sampling
    "sequence": lambda log_rho, mask, seq, n: (
        sum_by_sample(log_rho, seq, n).clamp(-CLAMP, CLAMP).exp()[seq]
    ),
    # exp(mean log rho): GSPO's ratio (arXiv 2507.18071) on proximal / behavior
    "geometric": lambda log_rho, mask, seq, n: (
        average_by_sample(log_rho, mask, seq, n).clamp(-CLAMP, CLAMP).exp()[seq]
    ),
}


def compute_weights(log_rho: Tensor, mask: Tensor, seq: Tensor, n: int, level: str) -> Tensor:
    """Return unbounded weights [N] by a name of LEVELS.

    A sample's weight is broadcast to its tokens.

    Args:
        log_rho: [N].
        mask: bool [N].
        seq: int64 [N].
        n: number of samples.
    """
    x = where(mask, log_rho.detach(), 0.0)
    return LEVELS[level](x, mask, seq, n)


# correction.bound -> bounded weights [N] of weights [N], lo, hi
BOUNDS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": lambda w, lo, hi: w,
    # min(w, hi) (TIS, Yao et al. 2025)
    "truncate": lambda w, lo, hi: w.clamp(max=hi),
    "clip": lambda w, lo, hi: w.clamp(lo, hi),
    # w 1[lo <= w <= hi] (IcePop, at token level)
    "mask": lambda w, lo, hi: where((w >= lo) & (w <= hi), w, 0.0),
}


def _bound_weights(w: Tensor, c: Correction, level: str) -> Tensor:
    lo, hi = DEFAULT_BOUNDS.get(level, (0.0, torch.inf))
    return BOUNDS[c.bound](w, lo if c.lo is None else c.lo, hi if c.hi is None else c.hi)


def compute_score_center(
    logs: Tensor, sampled_logs: Tensor, c: Correction, top: int
) -> tuple[Tensor, Tensor]:
    """Return the center C [n] of score centering, and its gradient by the logits [n, V].

    C = sum over v in H of sg(m(v) q(v) - alpha p(v)) log p(v), whose gradient is what that of
    m(y) log p(y) is expected to be under q.  m is the bounded weight of p / q (level none: 1).  H
    is the vocabulary, alpha then 0; or its `top` likeliest tokens under q, beyond which q is taken
    for rho p, rho = (1 - sum_H q) / max(1 - sum_H p, 1e-6) and alpha = rho m(1 / rho)
    (arXiv 2609.20807).

    Args:
        logs, sampled_logs: [n, V], log p of the policy, log q of the weights that sampled.
        top: 0: the vocabulary.
    """

    def bound(w: Tensor) -> Tensor:
        return torch.ones_like(w) if c.level == "none" else _bound_weights(w, c, "token")

    p, q = logs.exp(), sampled_logs.exp()
    factor = bound((logs - sampled_logs).clamp(-CLAMP, CLAMP).exp()) * q
    if 0 < top < logs.shape[1]:
        inside = torch.zeros_like(q).scatter_(1, q.topk(top).indices, 1.0)
        rho = ((1 - (inside * q).sum(-1)) / (1 - (inside * p).sum(-1)).clamp(min=1e-6)).clamp(min=0)
        factor = inside * (factor - (rho * bound(1 / rho))[:, None] * p)
    return (factor * logs).sum(-1), factor - factor.sum(-1, keepdim=True) * p


def compute_mean_weight(w: Tensor, mask: Tensor, seq: Tensor, n: int, level: str) -> Tensor:
    """Return the divisor of self-normalization (Owen 2013, chapter 9), a scalar.

    It is the mean over tokens in the mask (token level) or over samples with any (other levels).
    """
    if level == "token":
        mean = average_masked(w, mask)
    else:
        mean = average_masked(
            average_by_sample(w, mask, seq, n), sum_by_sample(mask.to(w.dtype), seq, n) > 0
        )
    return where(mean > 0, mean, 1.0)


# correction.reject -> statistic [N] of log rho [N] and log mu [N] per token; the ratio stays a
# logarithm until the sum over the sample
STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda raw, log_mu: torch.zeros_like(raw),
    "ratio": lambda raw, log_mu: raw,
    "k1": lambda raw, log_mu: -raw.clamp(-CLAMP, CLAMP),
    "k2": lambda raw, log_mu: raw.clamp(-CLAMP, CLAMP).square() / 2,
    "k3": lambda raw, log_mu: estimate_k3(-raw.clamp(-CLAMP, CLAMP)),
    # rho^2 - 1, whose mean over a sample estimates chi^2(pi || mu)
    "chi2": lambda raw, log_mu: torch.expm1(2 * raw.clamp(-CLAMP, CLAMP)),
    # |pi - mu| of the sampled token: total variation with all other tokens as one
    "tv": lambda raw, log_mu: ((log_mu + raw).exp() - log_mu.exp()).abs(),
    # the larger of the binary KL(pi || mu) and KL(mu || pi) (KPop): a rare token may move by orders
    # of magnitude, a probable one may not
    "kb": lambda raw, log_mu: torch.maximum(
        compute_binary_kl(log_mu + raw, log_mu), compute_binary_kl(log_mu, log_mu + raw)
    ),
    # the binary KL(mu || pi) (FlashREINFORCE)
    "kb_mu": lambda raw, log_mu: compute_binary_kl(log_mu, log_mu + raw),
}


# correction.reject_over -> [N], the token's own statistic or that of its whole sample
OVER: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "token": lambda s, mask, seq, n: s,
    "sum": lambda s, mask, seq, n: sum_by_sample(s, seq, n)[seq],
    "mean": lambda s, mask, seq, n: average_by_sample(s, mask, seq, n)[seq],
    "max": lambda s, mask, seq, n: find_sample_max(s, mask, seq, n)[seq],
}


def compute_statistic(
    name: str,
    aggregation: str,
    log_rho: Tensor,
    mask: Tensor,
    seq: Tensor,
    n: int,
    log_mu: Tensor | None = None,
) -> Tensor:
    """Return the rejection statistic [N], by a name of STATISTICS and one of OVER.

    With x = log rho: k1 = -x, k2 = x^2/2, k3 = e^x - 1 - x. A ratio over the sample is exp of the
    sum, mean or max of the log-ratios.

    Args:
        log_rho: [N].
        mask: bool [N].
        seq: int64 [N].
        n: number of samples.
        log_mu: [N], used by tv, kb and kb_mu; None: mu is 1.
    """
    raw = where(mask, log_rho.detach(), 0.0)
    mu = torch.zeros_like(raw) if log_mu is None else where(mask, log_mu.detach(), 0.0)
    s = OVER[aggregation](STATISTICS[name](raw, mu), mask, seq, n)
    return s.clamp(-CLAMP, CLAMP).exp() if name == "ratio" else s


def build_rejection_mask(
    name: str,
    aggregation: str,
    lo: float | None,
    hi: float | None,
    log_rho: Tensor,
    mask: Tensor,
    seq: Tensor,
    n: int,
    log_mu: Tensor | None = None,
) -> Tensor:
    """Return bool [N]: False where the statistic lies outside [lo, hi]; `none` keeps all.

    Rejection does not depend on the weight. Missing bounds take the defaults of the ratio; the
    other statistics require `hi`, and their lo is -inf (Liu et al. 2025, "When speed kills
    stability"). Raises ConfigError when `hi` is missing.
    """
    if name == "none":
        return torch.ones_like(mask)
    if name != "ratio" and hi is None:
        raise ConfigError(f"correction.reject_hi: reject = {name} has no default bound; give one")
    s = compute_statistic(name, aggregation, log_rho, mask, seq, n, log_mu=log_mu)
    band = REJECT_BAND[aggregation] if name == "ratio" else (-torch.inf, torch.inf)
    return (s >= (band[0] if lo is None else lo)) & (s <= (band[1] if hi is None else hi))


def find_unrejected(
    log_rho: Tensor,
    log_pi: Tensor,
    mask: Tensor,
    seq: Tensor,
    n: int,
    c: Correction,
    adv: Tensor | None,
) -> Tensor:
    """Return bool [N]: tokens that both `c.reject` and `c.reject2` leave.

    With reject_when = negative they act only where A < 0.

    Args:
        log_rho: [N], log pi / mu, not clamped.
        log_pi: [N].
        adv: [N].
    """
    log_mu = log_pi - log_rho
    unrejected = torch.ones_like(mask)
    for rule in (
        (c.reject, c.reject_over, c.reject_lo, c.reject_hi),
        (c.reject2, c.reject2_over, c.reject2_lo, c.reject2_hi),
    ):
        unrejected &= build_rejection_mask(*rule, log_rho, mask, seq=seq, n=n, log_mu=log_mu)
    if c.reject_when == "always":
        return unrejected
    assert adv is not None
    return unrejected | (adv >= 0)


def find_m2_exclusions(log_w: Tensor, adv: Tensor, mask: Tensor, limit: float) -> Tensor:
    """Return bool [N]: tokens that M2PO excludes (arXiv 2510.01161).

    Candidates are tokens that moved in the direction of their advantage (A log w > 0). The largest
    of them are dropped until `find_m2_threshold` holds for the rest. log_w = log pi_theta / mu.
    """
    candidates = mask & (adv * log_w > 0)
    return candidates & (log_w.abs() >= find_m2_threshold(log_w, candidates, limit))


def find_vetoed(
    kind: str,
    threshold: float | None,
    log_rho: Tensor,
    log_prox: Tensor,
    mask: Tensor,
    seq: Tensor,
    n: int,
) -> Tensor:
    """Return bool [N]: True for every token of a sample that holds a vetoed token.

    The veto is pi_prox < 1e-6 (`probability`) or rho < 1e-4 (`ratio`), unless `threshold` is given.
    """
    if kind == "none":
        return torch.zeros_like(mask)
    least = VETO[kind] if threshold is None else threshold
    limit = torch.tensor(least, dtype=log_rho.dtype).log().item()
    bad = mask & ((log_prox if kind == "probability" else log_rho) < limit)
    return sum_by_sample(bad.to(log_rho.dtype), seq, n)[seq] > 0


def find_m2_threshold(log_rho: Tensor, mask: Tensor, limit: float = 0.04) -> Tensor:
    """Return the |log rho| from which tokens are dropped, a scalar; inf when none needs to be.

    The largest go first, until the mean of (log rho)^2 of the rest is at most `limit`. Equal ratios
    go together. M2PO (Zheng et al. 2025, arXiv 2510.01161). The paper applies it to tokens
    that moved in the direction of their advantage (`find_m2_exclusions`).
    """
    magnitude = where(mask, log_rho.detach().abs(), torch.inf).sort().values
    square = where(magnitude.isfinite(), magnitude, 0.0).square()
    rank = torch.arange(1, len(magnitude) + 1, device=magnitude.device)
    beyond = magnitude.isfinite() & (square.cumsum(0) / rank > limit)
    if not len(magnitude):
        return magnitude.new_tensor(torch.inf)
    return where(beyond, magnitude, torch.inf).amin()


class ImportanceWeights(NamedTuple):
    """Weights of a batch or a part of it.

    weight: [N], 0 where dropped.
    kept: bool [N], neither rejected nor vetoed.
    vetoed: bool [N].
    mean: a scalar, the divisor of self-normalization; None: without it.
    """

    weight: Tensor
    kept: Tensor
    vetoed: Tensor
    mean: Tensor | None = None


def correct(
    log_rho: Tensor,
    log_prox: Tensor,
    mask: Tensor,
    seq: Tensor,
    n: int,
    c: Correction,
    mean: Tensor | None = None,
    adv: Tensor | None = None,
) -> ImportanceWeights:
    """Compute importance weights for whole samples by the config section `c`.

    The order is level, bound, rejection and veto, self-normalization over the kept tokens. The
    parts that act at pi_theta are left to the loss (reject_at = target, M2PO).

    Args:
        log_rho: [N], not clamped.
        log_prox: [N].
        mask: bool [N].
        seq: int64 [N].
        n: number of samples.
        mean: that of the whole batch, when these tokens are a part of it; None: they are the batch.
        adv: [N], for reject_when = negative.
    """
    if c.function:
        own = import_function(c.function, "correction.function")
        token = log_rho.clamp(-CLAMP, CLAMP)
        w = torch.as_tensor(own(token, mask, seq, n, c)).detach()
    else:
        w = _bound_weights(compute_weights(log_rho, mask, seq, n, c.level), c, c.level)
    veto = find_vetoed(c.veto, c.veto_below, log_rho, log_prox, mask=mask, seq=seq, n=n)
    kept = ~veto
    if c.reject_at == "proximal":
        kept = kept & find_unrejected(log_rho, log_prox, mask, seq, n, c=c, adv=adv)
    w = where(kept, w, 0.0)
    if c.self_normalize:
        if mean is None:
            mean = compute_mean_weight(w, mask & kept, seq, n, c.level)
        w = w / mean
    return ImportanceWeights(w, kept, veto, mean)
