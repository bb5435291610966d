"""Correct: importance weights proximal / behaviour, always detached; and what leaves the loss
because of them.

`sequence` is the product over the answer and `geometric` the geometric mean: the two names never
mix.

log_rho comes as `ratios.difference` gives it and is clamped to [-20, 20] at the last moment: a
token's where it is used by itself, a whole answer's after it was summed or averaged.  Clamping each
token first would change the product: one token at -30 in an answer whose others add up to +25
weighs e^-5, not e^5.

LEVELS, BOUNDS, STATISTICS and OVER have what the config names: a new one is a function and its line
in the dict."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.algorithms.ratios import (
    CLAMP,
    binary_kl,
    choose_function,
    masked_mean,
    seq_max,
    seq_mean,
    seq_sum,
)
from asyncrl.algorithms.settings import Correction
from asyncrl.contract.errors import ConfigError

DEFAULT_BOUNDS = {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
# a level that has none is not bounded until lo and hi are given; of the ratio; k's have none
REJECT_BAND = {"token": (0.5, 2.0), "sum": (0.5, 2.0), "mean": (0.99, 1.01), "max": (0.0, 2.0)}
VETO = {"none": 0.0, "probability": 1e-6, "ratio": 1e-4}


def _none(log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    return torch.ones_like(log_rho)


def _token(log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    """rho."""
    return log_rho.clamp(-CLAMP, CLAMP).exp()


def _sequence(log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    """exp(sum log rho): per-trajectory importance sampling."""
    return seq_sum(log_rho, seq, n).clamp(-CLAMP, CLAMP).exp()[seq]


def _geometric(
    log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int
) -> torch.Tensor:
    """exp(mean log rho): GSPO's ratio (arXiv 2507.18071) taken on proximal / behaviour."""
    return seq_mean(log_rho, mask, seq, n).clamp(-CLAMP, CLAMP).exp()[seq]


# correction.level -> unbounded weights [N] of log rho [N] (0 outside the mask), mask, seq, n
LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "none": _none,
    "token": _token,
    "sequence": _sequence,
    "geometric": _geometric,
}


def weights(
    log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, level: str
) -> torch.Tensor:
    """Unbounded weights [N] from log rho [N], by a name of LEVELS; an answer's is broadcast to its
    tokens.  Raises ConfigError for another level."""
    x = torch.where(mask, log_rho.detach(), 0.0)
    return choose_function("correction.level", LEVELS, level)(x, mask, seq, n)


def _unbounded(w: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    return w


def _truncate(w: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """min(w, hi) (TIS, Yao et al. 2025)."""
    return w.clamp(max=hi)


def _clip(w: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """clamp(w, lo, hi)."""
    return w.clamp(lo, hi)


def _mask(w: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """w 1[lo <= w <= hi] (IcePop, at token level)."""
    return torch.where((w >= lo) & (w <= hi), w, 0.0)


# correction.bound -> bounded weights [N] of weights [N], lo, hi
BOUNDS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "none": _unbounded,
    "truncate": _truncate,
    "clip": _clip,
    "mask": _mask,
}


def bounded(w: torch.Tensor, bound: str, lo: float, hi: float) -> torch.Tensor:
    """Weights [N] after a name of BOUNDS.  Raises ConfigError for another."""
    return choose_function("correction.bound", BOUNDS, bound)(w, lo, hi)


def mean_weight(
    w: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, level: str
) -> torch.Tensor:
    """What self-normalisation (Owen 2013, chapter 9) divides by: the mean over tokens in the mask
    (token level) or over samples with any (other levels).
    """
    if level == "token":
        mean = masked_mean(w, mask)
    else:
        mean = masked_mean(seq_mean(w, mask, seq, n), seq_sum(mask.to(w.dtype), seq, n) > 0)
    return torch.where(mean > 0, mean, 1.0)


def _raw(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    return raw


def _k1(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    return -raw.clamp(-CLAMP, CLAMP)


def _k2(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    return raw.clamp(-CLAMP, CLAMP).square() / 2


def _k3(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    x = raw.clamp(-CLAMP, CLAMP)
    return torch.expm1(x) - x


def _chi2(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    """rho^2 - 1: its mean over an answer estimates chi^2(pi || mu)."""
    return torch.expm1(2 * raw.clamp(-CLAMP, CLAMP))


def _tv(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    """|pi - mu| of the sampled token: total variation, all other tokens as one."""
    return ((log_mu + raw).exp() - log_mu.exp()).abs()


def _kb(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    """The larger of KL(pi || mu) and KL(mu || pi), binary (KPop): a rare token may move by orders
    of magnitude, a probable one may not."""
    pi = log_mu + raw
    return torch.maximum(binary_kl(pi, log_mu), binary_kl(log_mu, pi))


def _kb_mu(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    """KL(mu || pi), binary (FlashREINFORCE)."""
    return binary_kl(log_mu, log_mu + raw)


def _zero(raw: torch.Tensor, log_mu: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(raw)


# correction.reject -> of a token's log rho [N] and log mu [N]; the ratio is exponentiated when it
# is summed up
STATISTICS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": _zero,
    "ratio": _raw,
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "chi2": _chi2,
    "tv": _tv,
    "kb": _kb,
    "kb_mu": _kb_mu,
}
# those that are never negative
NOT_NEGATIVE = ("k2", "k3", "tv", "kb", "kb_mu")


def _of_token(s: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    return s


def _of_sum(s: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    return seq_sum(s, seq, n)[seq]


def _of_mean(s: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    return seq_mean(s, mask, seq, n)[seq]


def _of_max(s: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    return seq_max(s, mask, seq, n)[seq]


# correction.reject_over -> [N], the token's own statistic or its whole answer's
OVER: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "token": _of_token,
    "sum": _of_sum,
    "mean": _of_mean,
    "max": _of_max,
}


def statistic(
    name: str,
    over: str,
    log_rho: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
    log_mu: torch.Tensor | None = None,
) -> torch.Tensor:
    """What rejection looks at, [N]: a name of STATISTICS, of the token or its whole answer (sum,
    mean, max).

    With x = log rho: k1 = -x, k2 = x^2/2, k3 = e^x - 1 - x.  A ratio over the answer is exp of the
    log-ratios' sum, mean or max.  log_mu [N]: what tv, kb and kb_mu are taken from too; absent: mu
    is 1."""
    raw = torch.where(mask, log_rho.detach(), 0.0)
    mu = torch.zeros_like(raw) if log_mu is None else torch.where(mask, log_mu.detach(), 0.0)
    by_token = choose_function("correction.reject", STATISTICS, name)(raw, mu)
    s = choose_function("correction.reject_over", OVER, over)(by_token, mask, seq, n)
    return s.clamp(-CLAMP, CLAMP).exp() if name == "ratio" else s


def rejection_mask(
    name: str,
    over: str,
    lo: float | None,
    hi: float | None,
    log_rho: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
    log_mu: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rejection, independent of the weight: bool [N], False where the statistic has left [lo, hi];
    `none` keeps all.

    Absent bounds: the defaults of the ratio; for the others `hi` is required, lo is -inf (Liu et
    al. 2025, "When speed kills stability")."""
    if name == "none":
        return torch.ones_like(mask)
    if name != "ratio" and hi is None:
        raise ConfigError(f"correction.reject_hi: reject = {name} has no default bound; give one")
    s = statistic(name, over, log_rho, mask, seq, n, log_mu=log_mu)
    band = REJECT_BAND[over] if name == "ratio" else (-torch.inf, torch.inf)
    return (s >= (band[0] if lo is None else lo)) & (s <= (band[1] if hi is None else hi))


def unrejected(
    log_rho: torch.Tensor,
    log_pi: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
    c: Correction,
    adv: torch.Tensor | None,
) -> torch.Tensor:
    """Bool [N]: what `c.reject` and `c.reject2` leave, both; with reject_when = negative they act
    where A < 0 alone.  log_rho [N]: log pi / mu, not clamped; log_pi, adv [N]."""
    log_mu = log_pi - log_rho
    keep = rejection_mask(
        c.reject,
        c.reject_over,
        c.reject_lo,
        c.reject_hi,
        log_rho,
        mask,
        seq=seq,
        n=n,
        log_mu=log_mu,
    ) & rejection_mask(
        c.reject2,
        c.reject2_over,
        c.reject2_lo,
        c.reject2_hi,
        log_rho,
        mask,
        seq=seq,
        n=n,
        log_mu=log_mu,
    )
    if c.reject_when == "always":
        return keep
    assert adv is not None
    return keep | (adv >= 0)


def masked_by_second_moment(
    log_w: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor, limit: float
) -> torch.Tensor:
    """Bool [N]: tokens that went where their advantage pushes them (A log w > 0), the largest of
    them until `m2_threshold` holds for the others of them; log_w = log pi_theta / mu (M2PO as
    published, arXiv 2510.01161)."""
    pushing = mask & (adv * log_w > 0)
    return pushing & (log_w.abs() >= m2_threshold(log_w, pushing, limit))


def vetoed(
    kind: str,
    threshold: float | None,
    log_rho: torch.Tensor,
    log_prox: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
) -> torch.Tensor:
    """Bool [N]: True for every token of an answer that holds one with pi_prox < 1e-6
    (`probability`) or rho < 1e-4 (`ratio`).
    """
    if kind == "none":
        return torch.zeros_like(mask)
    own = choose_function("correction.veto", VETO, kind)
    below = torch.tensor(own if threshold is None else threshold, dtype=log_rho.dtype)
    limit = below.log().item()
    bad = mask & ((log_prox if kind == "probability" else log_rho) < limit)
    return seq_sum(bad.to(log_rho.dtype), seq, n)[seq] > 0


def m2_threshold(log_rho: torch.Tensor, mask: torch.Tensor, limit: float = 0.04) -> torch.Tensor:
    """|log rho| from which tokens are dropped, largest first, until the mean of (log rho)^2 of the
    rest is at most `limit`.

    A scalar; inf when nothing needs to go; equal ratios go together.  M2PO (Zheng et al. 2025,
    arXiv 2510.01161); the paper restricts it to tokens that push on in the direction of their
    advantage (`masked_by_second_moment`), this form and the preset `m2po` take all tokens."""
    size = torch.where(mask, log_rho.detach().abs(), torch.inf).sort().values
    square = torch.where(size.isfinite(), size, 0.0).square()
    rank = torch.arange(1, len(size) + 1, device=size.device)
    over = size.isfinite() & (square.cumsum(0) / rank > limit)
    return torch.where(over, size, torch.inf).amin() if len(size) else size.new_tensor(torch.inf)


def effective_sample_size(w: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """(sum w)^2 / (n sum w^2), a share in (0, 1] (Kong 1992), over the mask or all; 1 for no
    weights.
    """
    inside = torch.ones_like(w, dtype=torch.bool) if mask is None else mask
    w = torch.where(inside, w, 0.0)
    n = inside.sum()
    return torch.where(n > 0, w.sum().square() / (n * w.square().sum()).clamp(min=1e-30), 1.0)


@dataclass
class WeightStatistics:
    """What weights need of the whole batch: the mean weight of self-normalisation, M2PO's
    threshold.  Scalars or None.
    """

    mean: torch.Tensor | None = None
    m2: torch.Tensor | None = None


@dataclass
class ImportanceWeights:
    """weight [N], 0 where dropped; kept bool [N]: not rejected and not vetoed; vetoed bool [N]."""

    weight: torch.Tensor
    kept: torch.Tensor
    vetoed: torch.Tensor


def needs_statistics(c: Correction) -> bool:
    """Does this `correction` need the whole batch's ratios before any weight is known?"""
    return bool(c.self_normalize or (c.m2 and c.m2_over == "all"))


def correct(
    log_rho: torch.Tensor,
    log_prox: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
    c: Correction,
    stats: WeightStatistics | None = None,
    adv: torch.Tensor | None = None,
) -> ImportanceWeights:
    """All of Correct for whole answers, by the config section `c`.

    log_rho [N] not clamped, log_prox [N]; mask bool [N].  stats: of the whole batch, when these
    tokens are a part of it; None: they are the batch.  adv [N]: for reject_when = negative.  What
    acts at pi_theta is left to the loss (reject_at = target, m2_over = pushing).  Order: level,
    bound, rejection and veto, M2PO, self-normalisation over what is kept."""
    lo, hi = DEFAULT_BOUNDS.get(c.level, (0.0, torch.inf))
    token = log_rho.clamp(-CLAMP, CLAMP)
    if c.function:
        w = torch.as_tensor(load_function(c.function)(token, mask, seq, n, c)).detach()
    else:
        w = bounded(
            weights(log_rho, mask, seq, n, c.level),
            c.bound,
            lo if c.lo is None else c.lo,
            hi if c.hi is None else c.hi,
        )
    veto = vetoed(c.veto, c.veto_below, log_rho, log_prox, mask=mask, seq=seq, n=n)
    keep = ~veto
    if c.reject_at == "proximal":
        keep = keep & unrejected(log_rho, log_prox, mask, seq, n, c=c, adv=adv)
    stats = stats or WeightStatistics()
    if c.m2 and c.m2_over == "all":
        stats.m2 = m2_threshold(token, mask, c.m2) if stats.m2 is None else stats.m2
        w = torch.where(token.abs() < stats.m2, w, 0.0)
    w = torch.where(keep, w, 0.0)
    if c.self_normalize:
        stats.mean = (
            mean_weight(w, mask & keep, seq, n, c.level) if stats.mean is None else stats.mean
        )
        w = w / stats.mean
    return ImportanceWeights(w, keep, veto)


def load_function(path: str) -> Callable[..., Any]:
    """`module:name` imported.  Raises ConfigError that says which half is missing."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(
            f"correction.function = {path}: cannot import {module}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"correction.function = {path}: {module} has no function {name!r}; write module:name"
        )
    return found  # type: ignore[no-any-return]
