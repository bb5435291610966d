"""Value loss of PPO."""

from __future__ import annotations

import torch


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, old: torch.Tensor | None = None, clip: float = 0.0
) -> torch.Tensor:
    """Per token [N]: 0.5 (V - R)^2, or with clip > 0 0.5 max((V-R)^2, (clip(V, V_old - c, V_old +
    c) - R)^2) (PPO; Huang et al. 2022, "The 37 implementation details of PPO").  values with
    gradient; returns, old [N] detached."""
    loss = (values - returns).square()
    if clip > 0 and old is not None:
        near = old + (values - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """1 - var(R - V) / var(R) over the mask: 1 is a perfect critic, 0 one that says the mean."""
    v = values[mask]
    r = returns[mask]
    if len(r) < 2:
        return values.new_zeros(())
    return 1 - (r - v).var() / r.var().clamp(min=1e-12)
