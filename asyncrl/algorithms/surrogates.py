"""Trust: surrogates in coefficient form.  Each maps (log r [N], A [N], ...) to a Trust, detached; r
= exp(lp - anchor).

The loss is - sum coefficient w norm lp with everything but lp detached.  The coefficient (A phi)
depends on pi_theta / anchor only, so that a token's weight against the behaviour policy is never
counted twice."""

from __future__ import annotations

from typing import NamedTuple

import torch

from asyncrl.algorithms.ratios import CLAMP, seq_mean, seq_sum

NAMES = (
    "vanilla",
    "reinforce",
    "ppo",
    "decoupled_ppo",
    "gspo",
    "cispo",
    "dppo",
    "sapo",
    "topr",
    "dro",
    "kl_cov",
    "clip_cov",
    "gpg",
    "sft",
    "reshape",
)
# as published their ratio is pi_theta / mu: the anchor must be the behaviour policy
ON_BEHAVIOR = ("topr", "dro", "reshape")
OPEN = 0
LOW = 1
HIGH = 2
DUAL = 3


class Trust(NamedTuple):
    """coefficient [N] of grad lp; objective [N], its value; clipped int8 [N]: OPEN, or which bound
    cut the gradient.
    """

    coefficient: torch.Tensor
    objective: torch.Tensor
    clipped: torch.Tensor


def _open(coefficient: torch.Tensor, objective: torch.Tensor) -> Trust:
    return Trust(coefficient, objective, torch.zeros_like(coefficient, dtype=torch.int8))


def sides(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.where(low, LOW, torch.where(high, HIGH, OPEN)).to(torch.int8)


def vanilla(log_r: torch.Tensor, adv: torch.Tensor) -> Trust:
    """r A: no trust region (Kakade and Langford 2002)."""
    r = log_r.exp()
    return _open(r * adv, r * adv)


def plain(lp: torch.Tensor, adv: torch.Tensor) -> Trust:
    """lp A: `reinforce` (Williams 1992; the bounded weight pi_theta / mu is Correct's), `gpg`
    (arXiv 2504.02546) and `sft`.

    For `sft` A is 1 where the answer was rewarded and 0 elsewhere.
    """
    return _open(adv.clone(), lp * adv)


def ppo(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 0.0,
) -> Trust:
    """min(r A, clip(r, 1-low, 1+high) A) (Schulman et al. 2017, arXiv 1707.06347); dual > 1: dual
    clip (arXiv 1912.09729).

    With importance weights prox / mu it is decoupled PPO (Hilton et al. 2021, arXiv 2110.00641);
    high = 0.28 is DAPO's clip-higher."""
    r = log_r.exp()
    value = torch.minimum(r * adv, r.clamp(1 - low, 1 + high) * adv)
    clipped = sides((adv < 0) & (r < 1 - low), (adv > 0) & (r > 1 + high))
    if dual > 0:
        floor = (adv < 0) & (value < dual * adv)
        value = torch.where(floor, dual * adv, value)
        clipped = torch.where(floor, DUAL, clipped)
    return Trust(torch.where(clipped == OPEN, r * adv, 0.0), value, clipped)


def cispo(
    log_r: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, lo: float = 0.0, hi: float = 1.2
) -> Trust:
    """sg[clamp(r, lo, hi)] A lp (MiniMax-M1, arXiv 2506.13585): the gradient never vanishes.

    lo and hi are absolute here; the caller turns 1 - e and 1 + e into them.  lo = 0: no lower
    bound, as published."""
    r = log_r.exp()
    w = r.clamp(lo, hi)
    return Trust(w * adv, w * adv * lp, sides(r < lo, r > hi))


def gspo(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> Trust:
    """Clip on the sequence ratio s = exp(mean log r), a token's share of its gradient through s
    (Qwen, arXiv 2507.18071).

    log_r as `ratios.difference` gives it: the mean is clamped, not each token.
    With seq-mean-token-mean the reduced coefficient of a token is s A / |answer|, the published
    gradient."""
    return ppo(seq_mean(log_r, mask, seq, n).clamp(-CLAMP, CLAMP)[seq], adv, low=low, high=high)


def sapo(
    log_r: torch.Tensor, adv: torch.Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Trust:
    """Soft gate 4/tau sigma(tau (r - 1)) (SAPO, arXiv 2511.20347); its derivative in r is 4 sigma
    (1 - sigma).
    """
    r = log_r.exp()
    tau = torch.where(adv > 0, torch.full_like(adv, tau_pos), tau_neg)
    s = torch.sigmoid(tau * (r - 1))
    return _open(4 * s * (1 - s) * r * adv, 4 / tau * s * adv)


def dppo(
    log_r: torch.Tensor, adv: torch.Tensor, prob: torch.Tensor, *, threshold: float = 0.2
) -> Trust:
    """r A, 0 where pi_theta - anchor moved more than `threshold` in the direction of A; prob =
    exp(lp) [N].

    Divergence PPO, total-variation form (Qi et al. 2026, arXiv 2602.04879); as published the anchor
    is mu."""
    r = log_r.exp()
    moved = prob - prob / r
    clipped = sides((adv < 0) & (moved < -threshold), (adv > 0) & (moved > threshold))
    left = torch.where(clipped == OPEN, r * adv, 0.0)
    return Trust(left, left.clone(), clipped)


def topr(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    lp: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    n: int,
) -> Trust:
    """Per answer: A > 0: lp A; A < 0: min(pi_theta / mu, 1) lp A, the whole answer's ratio,
    detached (TOPR, arXiv 2503.14286).

    log_r as `ratios.difference` gives it: the answer's sum is clamped, not each token.
    """
    whole = seq_sum(torch.where(mask, log_r, 0.0), seq, n).clamp(-CLAMP, 0.0).exp()[seq]
    w = torch.where(adv < 0, whole, 1.0)
    return _open(w * adv, w * adv * lp)


def dro(log_r: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, *, beta: float = 0.05) -> Trust:
    """lp A - beta/2 (log pi_theta/mu)^2: token form of direct reward optimisation (Richemond et al.
    2024, arXiv 2405.19107).
    """
    return _open(adv - beta * log_r, lp * adv - beta / 2 * log_r.square())


def covariance(lp: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(lp - mean lp)(A - mean A) [N], means over the mask; 0 elsewhere (Cui et al. 2025, arXiv
    2505.22617).
    """
    count = mask.sum().clamp(min=1)
    x = torch.where(mask, lp, 0.0)
    a = torch.where(mask, adv, 0.0)
    return torch.where(mask, (x - x.sum() / count) * (a - a.sum() / count), 0.0)


def highest(cov: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """Bool [N]: the `share` of the mask's tokens with the largest covariance, at least one
    (KL-Cov).
    """
    many = min(max(1, int(share * int(mask.sum()))), len(cov))
    out = torch.zeros_like(mask)
    out[torch.where(mask, cov, -torch.inf).topk(many).indices] = True
    return out & mask


def drawn(
    cov: torch.Tensor, mask: torch.Tensor, share: float, lo: float, hi: float, seed: int
) -> torch.Tensor:
    """Bool [N]: `share` of the mask's tokens, drawn at random among those with lo < covariance < hi
    (Clip-Cov).
    """
    inside = mask & (cov > lo) & (cov < hi)
    many = max(1, int(share * int(mask.sum())))
    key = torch.rand(len(cov), generator=torch.Generator().manual_seed(seed)).to(cov.device)
    out = torch.zeros_like(mask)
    out[torch.where(inside, key, -1.0).topk(min(many, len(cov))).indices] = True
    return out & inside


def kl_cov(
    log_r: torch.Tensor, adv: torch.Tensor, chosen: torch.Tensor, *, coefficient: float = 1.0
) -> Trust:
    """r A, less coefficient |log r| on the tokens `chosen` by `highest` (arXiv 2505.22617)."""
    r = log_r.exp()
    pull = torch.where(chosen, coefficient, 0.0)
    return _open(r * adv - pull * log_r.sign(), r * adv - pull * log_r.abs())


def clip_cov(
    log_r: torch.Tensor,
    adv: torch.Tensor,
    chosen: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> Trust:
    """`ppo`, without gradient on the tokens `chosen` by `drawn` (arXiv 2505.22617)."""
    t = ppo(log_r, adv, low=low, high=high)
    return Trust(
        torch.where(chosen, 0.0, t.coefficient),
        t.objective,
        torch.where(chosen & (t.clipped == OPEN), HIGH, t.clipped).to(torch.int8),
    )
