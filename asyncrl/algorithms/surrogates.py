"""Surrogates in coefficient form: each maps (log r [N], A [N], ...) to a detached SurrogateTerm.

r = exp(lp - log pi_prox). The loss is - sum coefficient w norm lp with everything but lp detached.
The coefficient (A phi) depends on pi_theta / pi_prox only, so that a token's weight against the
behavior policy is never counted twice.

SURROGATES, at the end, maps config names to functions. To add a surrogate, write a struct with its
keys in `settings` and a function of (SurrogateTokens, that struct), and add its line there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncrl.algorithms import settings
from asyncrl.algorithms.ratios import (
    CLAMP,
    binary_kl,
    choose_function,
    log_ratio,
    seq_mean,
    seq_sum,
)
from asyncrl.algorithms.reshape import gamma, p_correct
from asyncrl.algorithms.settings import Reshape, Settings
from asyncrl.algorithms.trust import sequence_surrogates, token_surrogates
from asyncrl.algorithms.trust.view import (
    DUAL,
    HIGH,
    OPEN,
    StepBatch,
    SurrogateTerm,
    SurrogateTokens,
    sides,
    unclipped,
)
from asyncrl.algorithms.trust.view import LOW as LOW

# as published their ratio is pi_theta / mu: the proximal policy must be the behavior policy
ON_BEHAVIOR = (
    "topr",
    "dro",
    "reshape",
    "vespo",
    "oapl",
    "band",
    "gepo",
    "bapo",
    "minpro",
    "ipo",
)
# their effect on a token depends on the whole batch under the current policy
NEED_CURRENT = ("reshape", "kl_cov", "clip_cov", "bapo")
GSPO_CLIP = (3e-4, 4e-4)  # its ratio is a mean: a clip range that is not 0.2


def vanilla(log_r: torch.Tensor, adv: torch.Tensor) -> SurrogateTerm:
    """r A: no trust region (Kakade and Langford 2002)."""
    r = log_r.exp()
    return unclipped(r * adv, r * adv)


def log_probability_term(lp: torch.Tensor, adv: torch.Tensor) -> SurrogateTerm:
    """lp A: `reinforce` (Williams 1992), `gpg` (arXiv 2504.02546) and `sft`.

    For `reinforce` the bounded weight pi_theta / mu belongs to the correction. For `sft` A is 1
    where the sample was rewarded and 0 elsewhere.
    """
    return unclipped(adv.clone(), lp * adv)


def ppo(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 0.0,
) -> SurrogateTerm:
    """min(r A, clip(r, 1-low, 1+high) A) (Schulman et al. 2017, arXiv 1707.06347).

    dual > 1: dual clip (arXiv 1912.09729). With importance weights prox / mu this is decoupled PPO
    (Hilton et al. 2021, arXiv 2110.00641). high = 0.28 is DAPO's clip-higher.

    Args:
        log_r: [N].
        adv: [N].
    """
    r = log_r.exp()
    value = torch.minimum(r * adv, r.clamp(1 - low, 1 + high) * adv)
    clipped = sides((adv < 0) & (r < 1 - low), (adv > 0) & (r > 1 + high))
    if dual > 0:
        floor = (adv < 0) & (value < dual * adv)
        value = torch.where(floor, dual * adv, value)
        clipped = torch.where(floor, DUAL, clipped)
    return SurrogateTerm(torch.where(clipped == OPEN, r * adv, 0.0), value, clipped)


def cispo(
    log_r: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, lo: float = 0.0, hi: float = 1.2
) -> SurrogateTerm:
    """sg[clamp(r, lo, hi)] A lp (MiniMax-M1, arXiv 2506.13585): the gradient never vanishes.

    Args:
        log_r: [N].
        adv: [N].
        lp: [N].
        lo: absolute lower bound; 0: none, as published. The caller computes 1 - e.
        hi: absolute upper bound. The caller computes 1 + e.
    """
    r = log_r.exp()
    w = r.clamp(lo, hi)
    return SurrogateTerm(w * adv, w * adv * lp, sides(r < lo, r > hi))


def gspo(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
    *,
    low: float = GSPO_CLIP[0],
    high: float = GSPO_CLIP[1],
) -> SurrogateTerm:
    """Clip on the sequence ratio s = exp(mean log r) (Qwen, arXiv 2507.18071).

    With seq-mean-token-mean the reduced coefficient of a token is s A / |sample|, the published
    gradient.

    Args:
        log_r: [N], not clamped: the mean is clamped, not each token.
        adv: [N].
        mask: bool [N].
        seq: int64 [N].
        n: number of samples.
    """
    return ppo(seq_mean(log_r, mask, seq, n).clamp(-CLAMP, CLAMP)[seq], adv, low=low, high=high)


def sapo(
    log_r: torch.Tensor, adv: torch.Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> SurrogateTerm:
    """4/tau sigma(tau (r - 1)) A: a soft gate (SAPO, arXiv 2511.20347).

    Its derivative in r is 4 sigma (1 - sigma) A. tau is tau_pos where A > 0, else tau_neg.
    """
    r = log_r.exp()
    tau = torch.where(adv > 0, torch.full_like(adv, tau_pos), tau_neg)
    s = torch.sigmoid(tau * (r - 1))
    return unclipped(4 * s * (1 - s) * r * adv, 4 / tau * s * adv)


def dppo(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    prob: torch.Tensor,
    *,
    threshold: float = 0.2,
    high: float | None = None,
    divergence: str = "tv",
) -> SurrogateTerm:
    """r A, 0 where pi_theta - pi_prox moved more than `threshold` in the direction of A.

    Divergence PPO, total-variation form (Qi et al. 2026, arXiv 2602.04879). With divergence = kl it
    uses the binary KL(pi_prox || pi_theta). As published the proximal policy is mu.

    Args:
        log_r: [N].
        adv: [N].
        prob: [N], exp(lp).
        high: threshold for A > 0; None: `threshold`.
    """
    r = log_r.exp()
    up = threshold if high is None else high
    if divergence == "kl":
        moved = binary_kl(prob.log() - log_r, prob.log()) * log_r.sign()
    else:
        moved = prob - prob / r
    clipped = sides((adv < 0) & (moved < -threshold), (adv > 0) & (moved > up))
    open_value = torch.where(clipped == OPEN, r * adv, 0.0)
    return SurrogateTerm(open_value, open_value.clone(), clipped)


def topr(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    lp: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
) -> SurrogateTerm:
    """lp A for A > 0, min(pi_theta / mu, 1) lp A for A < 0 (TOPR, arXiv 2503.14286).

    The ratio is that of the whole sample, detached.

    Args:
        log_r: [N], not clamped: the sum over the sample is clamped, not each token.
        adv: [N].
        lp: [N].
        mask: bool [N].
        seq: int64 [N].
        n: number of samples.
    """
    whole = seq_sum(torch.where(mask, log_r, 0.0), seq, n).clamp(-CLAMP, 0.0).exp()[seq]
    w = torch.where(adv < 0, whole, 1.0)
    return unclipped(w * adv, w * adv * lp)


def dro(
    log_r: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, beta: float = 0.05
) -> SurrogateTerm:
    """lp A - beta/2 (log pi_theta / mu)^2: token form of direct reward optimization.

    Richemond et al. 2024, arXiv 2405.19107.
    """
    return unclipped(adv - beta * log_r, lp * adv - beta / 2 * log_r.square())


def covariance(lp: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(lp - mean lp)(A - mean A) [N], means over the mask; 0 elsewhere.

    Cui et al. 2025, arXiv 2505.22617.
    """
    count = mask.sum().clamp(min=1)
    x = torch.where(mask, lp, 0.0)
    a = torch.where(mask, adv, 0.0)
    return torch.where(mask, (x - x.sum() / count) * (a - a.sum() / count), 0.0)


def highest(cov: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """Return bool [N]: the `share` of the mask's tokens with the largest covariance (KL-Cov).

    At least one token is chosen.
    """
    many = min(max(1, int(share * int(mask.sum()))), len(cov))
    chosen = torch.zeros_like(mask)
    chosen[torch.where(mask, cov, -torch.inf).topk(many).indices] = True
    return chosen & mask


def sample_by_covariance(
    cov: torch.Tensor, mask: torch.Tensor, share: float, lo: float, hi: float, seed: int
) -> torch.Tensor:
    """Sample `share` of the mask's tokens where lo < covariance < hi: bool [N] (Clip-Cov)."""
    inside = mask & (cov > lo) & (cov < hi)
    many = max(1, int(share * int(mask.sum())))
    key = torch.rand(len(cov), generator=torch.Generator().manual_seed(seed)).to(cov.device)
    chosen = torch.zeros_like(mask)
    chosen[torch.where(inside, key, -1.0).topk(min(many, len(cov))).indices] = True
    return chosen & inside


def kl_cov(
    log_r: torch.Tensor, adv: torch.Tensor, chosen: torch.Tensor, *, coefficient: float = 1.0
) -> SurrogateTerm:
    """r A, minus coefficient |log r| on the tokens `chosen` by `highest` (arXiv 2505.22617)."""
    r = log_r.exp()
    pull = torch.where(chosen, coefficient, 0.0)
    return unclipped(r * adv - pull * log_r.sign(), r * adv - pull * log_r.abs())


def clip_cov(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    chosen: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> SurrogateTerm:
    """`ppo` without gradient on the tokens `chosen` by `sample_by_covariance`.

    arXiv 2505.22617.
    """
    t = ppo(log_r, adv, low=low, high=high)
    return SurrogateTerm(
        torch.where(chosen, 0.0, t.coefficient),
        t.objective,
        torch.where(chosen & (t.clipped == OPEN), HIGH, t.clipped).to(torch.int8),
    )


def reshape(
    log_w: torch.Tensor, adv: torch.Tensor, g: torch.Tensor, c: Reshape, share: float = 1.0
) -> SurrogateTerm:
    """IS-reshape: w^gamma A (power) or A (w^gamma - 1) / gamma (Box-Cox).

    `c.clip` e > 0 is repair B: no gradient where w has left [1-e, 1+e] in the direction of A. With
    `c.clip_on` = w_gamma it looks at w^gamma as the report does, so that w overshoots.
    `c.weight_max` > 0 bounds w^gamma.

    Args:
        log_w: [N].
        adv: [N].
        g: [N], gamma.
        share: of repair D by tokens, for the Box-Cox form. There gamma = 0 leaves the full gradient
            of the log-likelihood, so tokens that push away are multiplied by the share itself. The
            power form has the share in gamma, whose gradient goes to 0 with it.
    """
    w = (g * log_w).exp()
    bounded = w.clamp(max=c.weight_max) if c.weight_max > 0 else w
    slow = torch.ones_like(adv)
    if c.budget == "tokens":
        slow = torch.where(adv * log_w > 0, torch.full_like(adv, share), 1.0)
    coefficient, value = choose_function("reshape.form", FORMS, c.form)(
        log_w, adv, g, bounded, slow
    )
    if c.clip > 0:
        r = w if c.clip_on == "w_gamma" else log_w.exp()
        cut = sides((adv < 0) & (r < 1 - c.clip), (adv > 0) & (r > 1 + c.clip))
    else:
        cut = torch.zeros_like(adv, dtype=torch.int8)
    return SurrogateTerm(torch.where(cut == 0, coefficient, 0.0), value, cut)


def _power(
    log_w: torch.Tensor, adv: torch.Tensor, g: torch.Tensor, w: torch.Tensor, slow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return g * w * adv, w * adv


def _box_cox(
    log_w: torch.Tensor, adv: torch.Tensor, g: torch.Tensor, w: torch.Tensor, slow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # (w^gamma - 1) / gamma, whose limit at 0 is log w
    value = adv * torch.where(g > 1e-6, torch.expm1(g * log_w) / g.clamp(min=1e-6), log_w)
    return slow * w * adv, slow * value


# reshape.form -> (coefficient [N], objective [N]) of log w, A, gamma, the bounded w^gamma, and the
# share left to tokens that push away
FORMS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "power": _power,
    "box_cox": _box_cox,
}

# ---- by name -------------------------------------------------------------------------------------


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _ratio(t: SurrogateTokens, c: settings.PpoFamilyLoss | settings.SapoLoss) -> torch.Tensor:
    """Return log r [N] by `loss.ratio`: of the token, or the sum or mean over its sample."""
    if c.ratio == "token":
        return t.log_r
    if c.ratio == "geometric":
        return seq_mean(t.raw, t.mask, t.seq, t.n).clamp(-CLAMP, CLAMP)[t.seq]
    return seq_sum(torch.where(t.mask, t.raw, 0.0), t.seq, t.n).clamp(-CLAMP, CLAMP)[t.seq]


def _ppo(t: SurrogateTokens, c: settings.PpoFamilyLoss) -> SurrogateTerm:
    low, high = _or(c.eps_low, 0.2), _or(c.eps_high, 0.2)
    return ppo(_ratio(t, c), t.adv, low=low, high=high, dual=c.dual_clip)


def _vanilla(t: SurrogateTokens, c: settings.Loss) -> SurrogateTerm:
    return vanilla(t.log_r, t.adv)


def _log_probability(t: SurrogateTokens, c: settings.Loss) -> SurrogateTerm:
    return log_probability_term(t.lp, t.adv)


def _gspo(t: SurrogateTokens, c: settings.GspoLoss) -> SurrogateTerm:
    low, high = _or(c.eps_low, GSPO_CLIP[0]), _or(c.eps_high, GSPO_CLIP[1])
    return gspo(t.raw, t.adv, t.mask, t.seq, t.n, low=low, high=high)


def _cispo(t: SurrogateTokens, c: settings.CispoLoss) -> SurrogateTerm:
    high = _or(c.eps_high, 0.2)
    low = 0.0 if c.eps_low is None else 1 - c.eps_low
    return cispo(t.log_r, t.adv, t.lp, lo=low, hi=high if c.cispo_absolute else 1 + high)


def _dppo(t: SurrogateTokens, c: settings.DppoLoss) -> SurrogateTerm:
    return dppo(
        t.log_r,
        t.adv,
        t.lp.exp(),
        threshold=c.dppo_threshold,
        high=c.dppo_high,
        divergence=c.dppo_divergence,
    )


def _sapo(t: SurrogateTokens, c: settings.SapoLoss) -> SurrogateTerm:
    return sapo(_ratio(t, c), t.adv, tau_pos=c.sapo_tau_pos, tau_neg=c.sapo_tau_neg)


def _topr(t: SurrogateTokens, c: settings.Loss) -> SurrogateTerm:
    return topr(t.raw, t.adv, t.lp, t.mask, t.seq, t.n)


def _dro(t: SurrogateTokens, c: settings.DroLoss) -> SurrogateTerm:
    return dro(t.log_r, t.adv, t.lp, beta=c.dro_beta)


def _kl_cov(t: SurrogateTokens, c: settings.KlCovLoss) -> SurrogateTerm:
    assert t.drawn is not None
    return kl_cov(t.log_r, t.adv, t.drawn, coefficient=c.cov_coefficient)


def _clip_cov(t: SurrogateTokens, c: settings.ClipCovLoss) -> SurrogateTerm:
    assert t.drawn is not None
    low, high = _or(c.eps_low, 0.2), _or(c.eps_high, 0.2)
    return clip_cov(t.log_r, t.adv, t.drawn, low=low, high=high)


def _reshape(t: SurrogateTokens, c: settings.ReshapeLoss) -> SurrogateTerm:
    """Apply IS-reshape against mu, whatever the proximal policy is, and add its metric sums."""
    assert t.stats is not None and t.reshape is not None
    log_w = log_ratio(t.lp, t.behavior)
    g = gamma(log_w, t.adv, t.stats, t.reshape)
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
        rows.append(p_correct(log_w, t.adv, t.reshape.tau))
    t.sums["reshape"] = torch.stack([torch.where(t.mask, x.double(), 0.0).sum() for x in rows])
    return reshape(log_w, t.adv, g, t.reshape, t.stats.share)


def _highest(
    cov: torch.Tensor, mask: torch.Tensor, c: settings.KlCovLoss, seed: int
) -> torch.Tensor:
    return highest(cov, mask, c.cov_share)


def _sample_by_covariance(
    cov: torch.Tensor, mask: torch.Tensor, c: settings.ClipCovLoss, seed: int
) -> torch.Tensor:
    return sample_by_covariance(cov, mask, c.cov_share, c.cov_lo, c.cov_hi, seed)


# loss.surrogate, the tag of its struct in `settings` -> SurrogateTerm of the tokens
SURROGATES: dict[str, Callable[[SurrogateTokens, Any], SurrogateTerm]] = {
    "vanilla": _vanilla,
    "reinforce": _log_probability,
    "ppo": _ppo,
    "decoupled_ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "dppo": _dppo,
    "sapo": _sapo,
    "topr": _topr,
    "dro": _dro,
    "kl_cov": _kl_cov,
    "clip_cov": _clip_cov,
    "gpg": _log_probability,
    "sft": _log_probability,
    "reshape": _reshape,
    "vespo": sequence_surrogates.vespo_term,
    "oapl": sequence_surrogates.oapl_term,
    "band": token_surrogates.band_term,
    "gepo": sequence_surrogates.gepo_term,
    "bapo": token_surrogates.bapo_term,
    "minpro": token_surrogates.minpro_term,
    "gmpo": sequence_surrogates.gmpo_term,
    "ipo": token_surrogates.ipo_term,
}
# loss.surrogate -> bool [N]: tokens chosen by their covariance before a step
BEFORE: dict[str, Callable[[torch.Tensor, torch.Tensor, Any, int], torch.Tensor]] = {
    "kl_cov": _highest,
    "clip_cov": _sample_by_covariance,
}


def _group_q(w: StepBatch, c: settings.GepoLoss) -> dict[str, torch.Tensor]:
    return {"group_q": sequence_surrogates.group_probability(w.behavior, w.mask, w.seq, w.groups)}


def _bapo_bounds(w: StepBatch, c: settings.BapoLoss) -> dict[str, torch.Tensor]:
    assert w.current is not None
    return token_surrogates.bapo_bounds(w.current, w.behavior, w.adv, w.mask, c.bapo_share)


# loss.surrogate -> its inputs from all tokens of an optimizer step: tensors [N] and scalars, for
# `SurrogateTokens.prepass`; one that reads `current` stands in NEED_CURRENT too
PREPASS: dict[str, Callable[[StepBatch, Any], dict[str, torch.Tensor]]] = {
    "gepo": _group_q,
    "bapo": _bapo_bounds,
}


def trust(t: SurrogateTokens, c: Settings) -> SurrogateTerm:
    """Apply the configured surrogate. Raises ConfigError for an unknown one."""
    return choose_function("loss.surrogate", SURROGATES, c.loss.surrogate)(t, c.loss)
