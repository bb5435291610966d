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
    average_by_sample,
    choose_function,
    compute_binary_kl,
    compute_log_ratio,
    sum_by_sample,
)
from asyncrl.algorithms.reshape import compute_gamma, compute_p_correct
from asyncrl.algorithms.settings import Reshape, Settings
from asyncrl.algorithms.trust import sequence_surrogates, token_surrogates
from asyncrl.algorithms.trust.view import (
    DUAL,
    HIGH,
    OPEN,
    StepBatch,
    SurrogateTerm,
    SurrogateTokens,
    build_unclipped,
    mark_sides,
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


def compute_vanilla(log_r: torch.Tensor, adv: torch.Tensor) -> SurrogateTerm:
    """r A: no trust region (Kakade and Langford 2002)."""
    r = log_r.exp()
    return build_unclipped(r * adv, r * adv)


def compute_log_probability_term(lp: torch.Tensor, adv: torch.Tensor) -> SurrogateTerm:
    """lp A: `reinforce` (Williams 1992), `gpg` (arXiv 2504.02546) and `sft`.

    For `reinforce` the bounded weight pi_theta / mu belongs to the correction. For `sft` A is 1
    where the sample was rewarded and 0 elsewhere.
    """
    return build_unclipped(adv.clone(), lp * adv)


def compute_ppo(
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
    clipped = mark_sides((adv < 0) & (r < 1 - low), (adv > 0) & (r > 1 + high))
    if dual > 0:
        floor = (adv < 0) & (value < dual * adv)
        value = torch.where(floor, dual * adv, value)
        clipped = torch.where(floor, DUAL, clipped)
    return SurrogateTerm(torch.where(clipped == OPEN, r * adv, 0.0), value, clipped)


def compute_cispo(
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
    return SurrogateTerm(w * adv, w * adv * lp, mark_sides(r < lo, r > hi))


def compute_gspo(
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
    return compute_ppo(
        average_by_sample(log_r, mask, seq, n).clamp(-CLAMP, CLAMP)[seq], adv, low=low, high=high
    )


def compute_sapo(
    log_r: torch.Tensor, adv: torch.Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> SurrogateTerm:
    """4/tau sigma(tau (r - 1)) A: a soft gate (SAPO, arXiv 2511.20347).

    Its derivative in r is 4 sigma (1 - sigma) A. tau is tau_pos where A > 0, else tau_neg.
    """
    r = log_r.exp()
    tau = torch.where(adv > 0, torch.full_like(adv, tau_pos), tau_neg)
    s = torch.sigmoid(tau * (r - 1))
    return build_unclipped(4 * s * (1 - s) * r * adv, 4 / tau * s * adv)


def compute_dppo(
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
    upper = threshold if high is None else high
    if divergence == "kl":
        moved = compute_binary_kl(prob.log() - log_r, prob.log()) * log_r.sign()
    else:
        moved = prob - prob / r
    clipped = mark_sides((adv < 0) & (moved < -threshold), (adv > 0) & (moved > upper))
    open_value = torch.where(clipped == OPEN, r * adv, 0.0)
    return SurrogateTerm(open_value, open_value.clone(), clipped)


def compute_topr(
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
    sample_ratio = (
        sum_by_sample(torch.where(mask, log_r, 0.0), seq, n).clamp(-CLAMP, 0.0).exp()[seq]
    )
    w = torch.where(adv < 0, sample_ratio, 1.0)
    return build_unclipped(w * adv, w * adv * lp)


def compute_dro(
    log_r: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, beta: float = 0.05
) -> SurrogateTerm:
    """lp A - beta/2 (log pi_theta / mu)^2: token form of direct reward optimization.

    Richemond et al. 2024, arXiv 2405.19107.
    """
    return build_unclipped(adv - beta * log_r, lp * adv - beta / 2 * log_r.square())


def compute_covariance(lp: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(lp - mean lp)(A - mean A) [N], means over the mask; 0 elsewhere.

    Cui et al. 2025, arXiv 2505.22617.
    """
    count = mask.sum().clamp(min=1)
    x = torch.where(mask, lp, 0.0)
    a = torch.where(mask, adv, 0.0)
    return torch.where(mask, (x - x.sum() / count) * (a - a.sum() / count), 0.0)


def choose_highest(cov: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """Return bool [N]: the `share` of the mask's tokens with the largest covariance (KL-Cov).

    At least one token is chosen.
    """
    count = min(max(1, int(share * int(mask.sum()))), len(cov))
    chosen = torch.zeros_like(mask)
    chosen[torch.where(mask, cov, -torch.inf).topk(count).indices] = True
    return chosen & mask


def sample_by_covariance(
    cov: torch.Tensor, mask: torch.Tensor, share: float, lo: float, hi: float, seed: int
) -> torch.Tensor:
    """Sample `share` of the mask's tokens where lo < covariance < hi: bool [N] (Clip-Cov)."""
    candidates = mask & (cov > lo) & (cov < hi)
    count = max(1, int(share * int(mask.sum())))
    key = torch.rand(len(cov), generator=torch.Generator().manual_seed(seed)).to(cov.device)
    chosen = torch.zeros_like(mask)
    chosen[torch.where(candidates, key, -1.0).topk(min(count, len(cov))).indices] = True
    return chosen & candidates


def compute_kl_cov(
    log_r: torch.Tensor, adv: torch.Tensor, chosen: torch.Tensor, *, coefficient: float = 1.0
) -> SurrogateTerm:
    """r A, minus coefficient |log r| on the tokens `chosen` by `choose_highest`.

    Cui et al. 2025, arXiv 2505.22617.
    """
    r = log_r.exp()
    pull = torch.where(chosen, coefficient, 0.0)
    return build_unclipped(r * adv - pull * log_r.sign(), r * adv - pull * log_r.abs())


def compute_clip_cov(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    chosen: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> SurrogateTerm:
    """`compute_ppo` without gradient on the tokens `chosen` by `sample_by_covariance`.

    arXiv 2505.22617.
    """
    t = compute_ppo(log_r, adv, low=low, high=high)
    return SurrogateTerm(
        torch.where(chosen, 0.0, t.coefficient),
        torch.where(chosen, 0.0, t.objective),
        torch.where(chosen & (t.clipped == OPEN), HIGH, t.clipped).to(torch.int8),
    )


def compute_reshape(
    log_w: torch.Tensor, adv: torch.Tensor, g: torch.Tensor, c: Reshape, share: float = 1.0
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
    cut = torch.zeros_like(adv, dtype=torch.int8)
    if c.clip > 0:
        exponent = g if c.clip_on == "w_gamma" else torch.ones_like(g)
        r = (exponent * log_w).exp()
        cut = mark_sides((adv < 0) & (r < 1 - c.clip), (adv > 0) & (r > 1 + c.clip))
        log_w = torch.where(cut == OPEN, log_w, r.clamp(1 - c.clip, 1 + c.clip).log() / exponent)
    w = (g * log_w).exp()
    bounded = w.clamp(max=c.weight_max) if c.weight_max > 0 else w
    slow = torch.ones_like(adv)
    if c.budget == "tokens":
        slow = torch.where(adv * log_w > 0, torch.full_like(adv, share), 1.0)
    coefficient, value = choose_function("reshape.form", FORMS, c.form)(
        log_w, adv, g, bounded, slow
    )
    return SurrogateTerm(torch.where(cut == OPEN, coefficient, 0.0), value, cut)


def _apply_power_form(
    log_w: torch.Tensor, adv: torch.Tensor, g: torch.Tensor, w: torch.Tensor, slow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return g * w * adv, w * adv


def _apply_box_cox_form(
    log_w: torch.Tensor, adv: torch.Tensor, g: torch.Tensor, w: torch.Tensor, slow: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # (w^gamma - 1) / gamma, whose limit at 0 is log w
    value = adv * torch.where(g > 1e-6, torch.expm1(g * log_w) / g.clamp(min=1e-6), log_w)
    return slow * w * adv, slow * value


# reshape.form -> (coefficient [N], objective [N]) of log w, A, gamma, the bounded w^gamma, and the
# share left to tokens that push away
FORMS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "power": _apply_power_form,
    "box_cox": _apply_box_cox_form,
}

# ---- by name -------------------------------------------------------------------------------------


def _use_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _compute_loss_ratio(
    t: SurrogateTokens, c: settings.PpoFamilyLoss | settings.SapoLoss
) -> torch.Tensor:
    """Return log r [N] by `loss.ratio`: of the token, or the sum or mean over its sample."""
    if c.ratio == "token":
        return t.log_r
    if c.ratio == "geometric":
        return average_by_sample(t.raw, t.mask, t.seq, t.n).clamp(-CLAMP, CLAMP)[t.seq]
    return sum_by_sample(torch.where(t.mask, t.raw, 0.0), t.seq, t.n).clamp(-CLAMP, CLAMP)[t.seq]


def _apply_ppo(t: SurrogateTokens, c: settings.PpoFamilyLoss) -> SurrogateTerm:
    low, high = _use_default(c.eps_low, 0.2), _use_default(c.eps_high, 0.2)
    return compute_ppo(_compute_loss_ratio(t, c), t.adv, low=low, high=high, dual=c.dual_clip)


def _apply_vanilla(t: SurrogateTokens, c: settings.Loss) -> SurrogateTerm:
    return compute_vanilla(t.log_r, t.adv)


def _apply_log_probability(t: SurrogateTokens, c: settings.Loss) -> SurrogateTerm:
    return compute_log_probability_term(t.lp, t.adv)


def _apply_gspo(t: SurrogateTokens, c: settings.GspoLoss) -> SurrogateTerm:
    low, high = _use_default(c.eps_low, GSPO_CLIP[0]), _use_default(c.eps_high, GSPO_CLIP[1])
    return compute_gspo(t.raw, t.adv, t.mask, t.seq, t.n, low=low, high=high)


def _apply_cispo(t: SurrogateTokens, c: settings.CispoLoss) -> SurrogateTerm:
    high = _use_default(c.eps_high, 0.2)
    low = 0.0 if c.eps_low is None else 1 - c.eps_low
    return compute_cispo(t.log_r, t.adv, t.lp, lo=low, hi=high if c.cispo_absolute else 1 + high)


def _apply_dppo(t: SurrogateTokens, c: settings.DppoLoss) -> SurrogateTerm:
    return compute_dppo(
        t.log_r,
        t.adv,
        t.lp.exp(),
        threshold=c.dppo_threshold,
        high=c.dppo_high,
        divergence=c.dppo_divergence,
    )


def _apply_sapo(t: SurrogateTokens, c: settings.SapoLoss) -> SurrogateTerm:
    return compute_sapo(
        _compute_loss_ratio(t, c), t.adv, tau_pos=c.sapo_tau_pos, tau_neg=c.sapo_tau_neg
    )


def _apply_topr(t: SurrogateTokens, c: settings.Loss) -> SurrogateTerm:
    return compute_topr(t.raw, t.adv, t.lp, t.mask, t.seq, t.n)


def _apply_dro(t: SurrogateTokens, c: settings.DroLoss) -> SurrogateTerm:
    return compute_dro(t.log_r, t.adv, t.lp, beta=c.dro_beta)


def _apply_kl_cov(t: SurrogateTokens, c: settings.KlCovLoss) -> SurrogateTerm:
    assert t.chosen is not None
    return compute_kl_cov(t.log_r, t.adv, t.chosen, coefficient=c.cov_coefficient)


def _apply_clip_cov(t: SurrogateTokens, c: settings.ClipCovLoss) -> SurrogateTerm:
    assert t.chosen is not None
    low, high = _use_default(c.eps_low, 0.2), _use_default(c.eps_high, 0.2)
    return compute_clip_cov(t.log_r, t.adv, t.chosen, low=low, high=high)


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
    t.sums["reshape"] = torch.stack([torch.where(t.mask, x.double(), 0.0).sum() for x in rows])
    return compute_reshape(log_w, t.adv, g, t.reshape, t.stats.share)


def _choose_for_kl_cov(
    cov: torch.Tensor, mask: torch.Tensor, c: settings.KlCovLoss, seed: int
) -> torch.Tensor:
    return choose_highest(cov, mask, c.cov_share)


def _sample_for_clip_cov(
    cov: torch.Tensor, mask: torch.Tensor, c: settings.ClipCovLoss, seed: int
) -> torch.Tensor:
    return sample_by_covariance(cov, mask, c.cov_share, c.cov_lo, c.cov_hi, seed)


# loss.surrogate, the tag of its struct in `settings` -> SurrogateTerm of the tokens
SURROGATES: dict[str, Callable[[SurrogateTokens, Any], SurrogateTerm]] = {
    "vanilla": _apply_vanilla,
    "reinforce": _apply_log_probability,
    "ppo": _apply_ppo,
    "decoupled_ppo": _apply_ppo,
    "gspo": _apply_gspo,
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
    "vespo": sequence_surrogates.apply_vespo,
    "oapl": sequence_surrogates.apply_oapl,
    "band": token_surrogates.apply_band,
    "gepo": sequence_surrogates.apply_gepo,
    "bapo": token_surrogates.apply_bapo,
    "minpro": token_surrogates.apply_minpro,
    "gmpo": sequence_surrogates.apply_gmpo,
    "ipo": token_surrogates.apply_ipo,
}
# loss.surrogate -> bool [N]: tokens chosen by their covariance before a step
COVARIANCE_CHOICES: dict[str, Callable[[torch.Tensor, torch.Tensor, Any, int], torch.Tensor]] = {
    "kl_cov": _choose_for_kl_cov,
    "clip_cov": _sample_for_clip_cov,
}


def _compute_gepo_prepass(w: StepBatch, c: settings.GepoLoss) -> dict[str, torch.Tensor]:
    return {
        "group_q": sequence_surrogates.compute_group_probability(
            w.behavior, w.mask, w.seq, w.groups
        )
    }


def _compute_bapo_prepass(w: StepBatch, c: settings.BapoLoss) -> dict[str, torch.Tensor]:
    assert w.current is not None
    return token_surrogates.find_bapo_bounds(w.current, w.behavior, w.adv, w.mask, c.bapo_share)


# loss.surrogate -> its inputs from all tokens of an optimizer step: tensors [N] and scalars, for
# `SurrogateTokens.prepass`; one that reads `current` stands in NEED_CURRENT too
PREPASS: dict[str, Callable[[StepBatch, Any], dict[str, torch.Tensor]]] = {
    "gepo": _compute_gepo_prepass,
    "bapo": _compute_bapo_prepass,
}


def apply_surrogate(t: SurrogateTokens, c: Settings) -> SurrogateTerm:
    """Apply the configured surrogate. Raises ConfigError for an unknown one."""
    return choose_function("loss.surrogate", SURROGATES, c.loss.surrogate)(t, c.loss)
