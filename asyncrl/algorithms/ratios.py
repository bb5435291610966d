"""Importance weights between behaviour and proximal policy.  Packed: tensors [N] over tokens, seq [N] the sample of each.

Every log-ratio, a token's and a sequence's sum, is clamped to [-20, 20] before exp.  Weights are detached.
"""

from __future__ import annotations

import torch

CLAMP = 20.0
DEFAULT_BOUNDS = {"token": (0.5, 2.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01), "none": (0.0, float("inf"))}


def log_ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """clamp(a - b, -20, 20); where both are -inf the ratio is 1, and what is not a number counts as 0."""
    return torch.nan_to_num(a - b, nan=0.0, posinf=CLAMP, neginf=-CLAMP).clamp(-CLAMP, CLAMP)


def seq_sum(x: torch.Tensor, seq: torch.Tensor, n: int) -> torch.Tensor:
    """Sum of x over each sample: [n]."""
    return torch.zeros(n, dtype=x.dtype, device=x.device).index_add_(0, seq, x)


def weights(log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, level: str) -> torch.Tensor:
    """Unbounded weights [N]: token rho, `sequence` exp(sum log rho), `geometric` exp(mean log rho), broadcast over tokens.

    The product form is per-trajectory importance sampling; the geometric one is GSPO's (arXiv 2507.18071) on prox / mu.
    """
    x = torch.where(mask, log_rho, 0.0)
    if level == "none":
        return torch.ones_like(x)
    if level == "token":
        return x.exp()
    total = seq_sum(x, seq, n)
    if level == "geometric":
        total = total / seq_sum(mask.to(x.dtype), seq, n).clamp(min=1)
    return total.clamp(-CLAMP, CLAMP).exp()[seq]


def bounded(w: torch.Tensor, bound: str, lo: float, hi: float) -> torch.Tensor:
    """truncate min(w, hi) | clip clamp(w, lo, hi) | mask w * 1[lo <= w <= hi] (IcePop, at token level) | none."""
    if bound == "truncate":
        return w.clamp(max=hi)
    if bound == "clip":
        return w.clamp(lo, hi)
    if bound == "mask":
        return torch.where((w >= lo) & (w <= hi), w, 0.0)
    return w


def self_normalized(w: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, level: str) -> torch.Tensor:
    """w over its mean: over valid tokens at token level, over sequences at the others."""
    if level == "token":
        mean = w[mask].mean() if bool(mask.any()) else w.new_ones(())
    else:
        length = seq_sum(mask.to(w.dtype), seq, n)
        per = seq_sum(torch.where(mask, w, 0.0), seq, n)[length > 0] / length[length > 0]
        mean = per.mean() if len(per) else w.new_ones(())
    return w / mean.clamp(min=1e-8)


def effective_sample_size(w: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (n sum w^2), a share in (0, 1] (Kong 1992)."""
    return w.sum().square() / (len(w) * w.square().sum()).clamp(min=1e-30) if len(w) else w.new_ones(())
