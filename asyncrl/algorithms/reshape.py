"""IS-reshape: w^gamma with a detached gamma per token, w = pi_theta / mu, and its repairs.

power:   objective w^gamma A, gradient coefficient gamma w^gamma A
         (gamma -> 0: no gradient at all)
box_cox: objective A (w^gamma - 1) / gamma, gradient coefficient w^gamma A
         (gamma -> 0: weighted log-likelihood)

gamma = 1 is `vanilla` on the behavior policy in both forms. IS-reshape controls variance, not
drift. Its repairs against drift are A an early stop (`[stop]`), B `clip`, C a KL penalty towards
mu, and D a KL budget on gamma or the coefficient (here) or on the learning rate
(`loss.KLBudget`). IS-reshape v3.1 (technical report); Box and Cox 1964 for the second form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.ratios import average_masked
from asyncrl.algorithms.settings import Reshape


@dataclass
class ReshapeStatistics:
    """Statistics of the whole batch before an optimizer step.

    sigma2: var(log w).
    base: gamma_base.
    kl: K, the k3 estimate of KL(mu || theta).
    share: g of repair D.
    """

    sigma2: Tensor
    base: Tensor
    kl: Tensor
    share: float = 1.0


def compute_statistics(log_w: Tensor, mask: Tensor, rho_min: float = 0.3) -> ReshapeStatistics:
    """gamma_base = min(1, sqrt(-log rho_min / sigma2)), 1 where sigma2 is 0.

    sigma2 is the unbiased variance of log w [N] over the mask.
    """
    x = torch.where(mask, log_w, 0.0)
    count = mask.sum()
    deviation = torch.where(mask, x - average_masked(x, mask), 0.0)
    sigma2 = deviation.square().sum() / (count - 1).clamp(min=1)
    log_margin = -torch.log(torch.as_tensor(rho_min, dtype=log_w.dtype, device=log_w.device))
    base = (log_margin / sigma2.clamp(min=1e-30)).sqrt().clamp(max=1.0)
    return ReshapeStatistics(sigma2, base, average_masked(torch.expm1(x) - x, mask))


def compute_p_correct(log_w: Tensor, adv: Tensor, tau: float) -> Tensor:
    """Return P_correct = sigmoid(C / tau) [N], C = A log w."""
    return torch.sigmoid(adv * log_w / tau)


@dataclass(frozen=True)
class GammaInputs:
    """Inputs of gamma: log w [N], A [N], the batch's statistics and the section [reshape]."""

    log_w: Tensor
    adv: Tensor
    stats: ReshapeStatistics
    c: Reshape


# reshape.mode -> gamma [N]
MODES: dict[str, Callable[[GammaInputs], Tensor]] = {
    # gamma_base + (sigmoid(-T log w) - gamma_base) P_correct: at w = 1 (gamma_base + 1/2) / 2
    "v3.1": lambda x: (
        x.stats.base
        + (torch.sigmoid(-x.c.temperature * x.log_w) - x.stats.base)
        * compute_p_correct(x.log_w, x.adv, x.c.tau)
    ).clamp(min=x.c.gamma_min),
    "base": lambda x: x.stats.base.expand_as(x.log_w).clamp(min=x.c.gamma_min),
    "constant": lambda x: torch.full_like(x.log_w, x.c.gamma),
}
# reshape.budget -> gamma [N] after repair D
BUDGETS: dict[str, Callable[[Tensor, GammaInputs], Tensor]] = {
    "none": lambda g, x: g,
    # of tokens that push away; box_cox reduces the coefficient instead
    "tokens": lambda g, x: (
        g if x.c.form == "box_cox" else torch.where(x.adv * x.log_w > 0, g * x.stats.share, g)
    ),
    # as the report words it: gamma_kl for the whole batch
    "global": lambda g, x: torch.minimum(
        x.stats.base, (x.c.kl_budget / x.stats.kl.clamp(min=1e-30)).sqrt().clamp(max=1.0)
    ).expand_as(x.log_w),
}


def compute_gamma(log_w: Tensor, adv: Tensor, stats: ReshapeStatistics, c: Reshape) -> Tensor:
    """Return gamma [N]: mode, then gamma_min, then repair D (which may reach 0)."""
    x = GammaInputs(log_w, adv, stats, c)
    return BUDGETS[c.budget](MODES[c.mode](x), x)
