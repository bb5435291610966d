"""Rewards to advantages.  rewards [B] float, groups [B] int64 (samples of one prompt share a number); all return [B]."""

from __future__ import annotations

import torch

from asyncrl.errors import ConfigError


def _counts(groups: torch.Tensor) -> torch.Tensor:
    return torch.bincount(groups)[groups]


def group_mean(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Mean of x over each sample's group."""
    total = torch.zeros(int(groups.max()) + 1, dtype=x.dtype).index_add_(0, groups, x)
    return total[groups] / _counts(groups)


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i minus the mean of the other G-1 (Ahmadian et al. 2024, arXiv 2402.14740).  Raises ConfigError for a group of one."""
    n = _counts(groups)
    if int(n.min()) < 2:
        raise ConfigError("advantage.name = rloo needs at least two samples of each prompt: raise learner.group_size")
    return (rewards - group_mean(rewards, groups)) * n / (n - 1)


def grpo(rewards: torch.Tensor, groups: torch.Tensor, *, ddof: int = 1, eps: float = 1e-4) -> torch.Tensor:
    """(r_i - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300).  Raises ConfigError for ddof = 1 and a group of one."""
    n = _counts(groups)
    if int(n.min()) <= ddof:
        raise ConfigError(f"advantage.name = grpo with ddof = {ddof} needs more than {ddof} samples of each prompt: raise learner.group_size")
    centred = rewards - group_mean(rewards, groups)
    var = group_mean(centred.square(), groups) * n / (n - ddof)
    return centred / (var.sqrt() + eps)


def dr_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r_i - mean, no division (Liu et al. 2025, arXiv 2503.20783)."""
    return rewards - group_mean(rewards, groups)


def reinforce(rewards: torch.Tensor, baseline: float) -> torch.Tensor:
    """r - b (Williams 1992)."""
    return rewards - baseline


def whiten(x: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Mean 0, standard deviation 1 over the batch (ddof 1); a single value becomes 0."""
    return (x - x.mean()) / (x.std() + eps) if len(x) > 1 else torch.zeros_like(x)
