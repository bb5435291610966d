"""Trust regions in coefficient form.  Each maps (log r [N], A [N], ...) to (phi [N], objective [N]), detached.

The loss is - sum A phi w norm lp with everything but lp detached; phi depends on pi_theta / anchor only, so that a token's weight
against the behaviour policy is never counted twice.  r = exp(lp - anchor).
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.ratios import seq_sum

Pair = tuple[torch.Tensor, torch.Tensor]


def vanilla(log_r: torch.Tensor, adv: torch.Tensor) -> Pair:
    """r A: no trust region."""
    r = log_r.exp()
    return r, r * adv


def ppo(log_r: torch.Tensor, adv: torch.Tensor, *, low: float = 0.2, high: float = 0.2, dual: float = 0.0) -> Pair:
    """min(r A, clip(r, 1-low, 1+high) A) (Schulman et al. 2017, arXiv 1707.06347); dual > 1: dual clip (arXiv 1912.09729).

    With importance weights prox / mu it is decoupled PPO (Hilton et al. 2021, arXiv 2110.00641).
    """
    r = log_r.exp()
    value = torch.minimum(r * adv, r.clamp(1 - low, 1 + high) * adv)
    live = ~(((adv > 0) & (r > 1 + high)) | ((adv < 0) & (r < 1 - low)))
    if dual > 0:
        floor = (adv < 0) & (value < dual * adv)
        value, live = torch.where(floor, dual * adv, value), live & ~floor
    return torch.where(live, r, 0.0), value


def cispo(log_r: torch.Tensor, adv: torch.Tensor, *, high: float = 0.2) -> Pair:
    """sg[min(r, 1 + high)] A lp (MiniMax-M1, arXiv 2506.13585): the gradient never vanishes."""
    r = log_r.exp().clamp(max=1 + high)
    return r, r * adv


def gspo(log_r: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, *, low: float = 3e-4, high: float = 4e-4) -> Pair:
    """Clip on the sequence ratio s = exp(mean log r), each token's gradient through s (Qwen, arXiv 2507.18071)."""
    m = mask.to(log_r.dtype)
    log_s = seq_sum(log_r * m, seq, n) / seq_sum(m, seq, n).clamp(min=1)
    return ppo(log_s[seq], adv, low=low, high=high)


def sapo(log_r: torch.Tensor, adv: torch.Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Pair:
    """Soft gate 4/tau sigma(tau (r - 1)) (SAPO, arXiv 2511.20347); its derivative in r is 4 sigma (1 - sigma)."""
    r, tau = log_r.exp(), torch.where(adv > 0, tau_pos, tau_neg)
    s = torch.sigmoid(tau * (r - 1))
    return 4 * s * (1 - s) * r, 4 / tau * s * adv


def dppo(log_r: torch.Tensor, adv: torch.Tensor, prob: torch.Tensor, *, threshold: float = 0.2) -> Pair:
    """r A, masked where pi - anchor has moved more than `threshold` in the direction of A; prob = exp(lp) [N]."""
    r = log_r.exp()
    moved = prob - prob / r
    live = ~(((adv > 0) & (moved > threshold)) | ((adv < 0) & (moved < -threshold)))
    return torch.where(live, r, 0.0), r * adv
