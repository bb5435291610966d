"""KL estimators on sampled tokens.  x = lp - lp_ref [N]; k1 and k3 are unbiased values for samples of pi_theta, gradients differ.

Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.errors import ConfigError


def k1(x: torch.Tensor) -> torch.Tensor:
    """x."""
    return x


def k2(x: torch.Tensor) -> torch.Tensor:
    """x^2 / 2: its gradient in the loss is that of the token-level reverse KL."""
    return x.square() / 2


def k3(x: torch.Tensor) -> torch.Tensor:
    """exp(-x) - 1 + x: its gradient in the loss is that of the token-level forward KL."""
    return torch.expm1(-x) + x


def low_var_kl(x: torch.Tensor) -> torch.Tensor:
    """k3 clamped to [-10, 10]."""
    return k3(x).clamp(-10, 10)


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": torch.abs, "low_var_kl": low_var_kl}


def estimate(name: str, x: torch.Tensor) -> torch.Tensor:
    """The estimator `name`; with `+`: its value with the gradient of k2 (straight-through)."""
    if (base := name.removesuffix("+")) not in ESTIMATORS:
        raise ConfigError(f"kl.estimator = {name}: choose one of {', '.join(ESTIMATORS)}, each also with +")
    value = ESTIMATORS[base](x)
    return value if base == name else k2(x) - k2(x).detach() + value.detach()


def adaptive(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next beta (Ziegler et al. 2019, arXiv 1909.08593)."""
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)
