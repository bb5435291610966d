"""IS-reshape: w^gamma with a detached gamma per token, w = pi_theta / mu, and its repairs.

power:   objective w^gamma A, gradient coefficient gamma w^gamma A
         (gamma -> 0: no gradient at all)
box_cox: objective A (w^gamma - 1) / gamma, gradient coefficient w^gamma A
         (gamma -> 0: weighted log-likelihood)

gamma = 1 is `vanilla` on the behaviour policy in both.  It controls variance and not drift; the
repairs are A an early stop (`[stop]`), B `clip`, C a KL penalty towards mu, D a KL budget on gamma
or the coefficient (here) or on the learning rate (`stopping.Budget`). IS-reshape v3.1 (technical
report); Box and Cox 1964 for the second form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.algorithms.ratios import masked_mean, unknown
from asyncrl.algorithms.surrogates import Trust, sides

MODES = ("v3.1", "base", "constant")
FORMS = ("power", "box_cox")
BUDGETS = ("none", "tokens", "global")


@dataclass
class Statistics:
    """Of the whole batch, before an optimizer step: sigma2 = var(log w), gamma_base, K the k3
    estimate of KL(mu || theta), g of repair D.
    """

    sigma2: torch.Tensor
    base: torch.Tensor
    kl: torch.Tensor
    share: float = 1.0


def statistics(log_w: torch.Tensor, mask: torch.Tensor, rho_min: float = 0.3) -> Statistics:
    """gamma_base = min(1, sqrt(-log rho_min / sigma2)), sigma2 the unbiased variance of log w over
    the mask (1 where it is 0).
    """
    x = torch.where(mask, log_w, 0.0)
    count = mask.sum()
    centred = torch.where(mask, x - masked_mean(x, mask), 0.0)
    sigma2 = centred.square().sum() / (count - 1).clamp(min=1)
    room = -torch.log(torch.as_tensor(rho_min, dtype=log_w.dtype, device=log_w.device))
    base = (room / sigma2.clamp(min=1e-30)).sqrt().clamp(max=1.0)
    return Statistics(sigma2, base, masked_mean(torch.expm1(x) - x, mask))


def gamma_v31(
    log_w: torch.Tensor,
    adv: torch.Tensor,
    base: torch.Tensor,
    *,
    tau: float = 1.0,
    temperature: float = 5.0,
) -> torch.Tensor:
    """gamma_base + (sigmoid(-T log w) - gamma_base) sigmoid(A log w / tau) [N].  At w = 1 it is
    (gamma_base + 1/2) / 2, so 0.75.
    """
    target = torch.sigmoid(-temperature * log_w)
    return base + (target - base) * torch.sigmoid(adv * log_w / tau)


def gamma(log_w: torch.Tensor, adv: torch.Tensor, stats: Statistics, c: Any) -> torch.Tensor:
    """gamma [N] by the config section `c` = reshape: mode, then gamma_min, then repair D (which may
    reach 0).
    """
    if c.mode == "v3.1":
        g = gamma_v31(log_w, adv, stats.base, tau=c.tau, temperature=c.temperature).clamp(
            min=c.gamma_min
        )
    elif c.mode == "base":
        g = stats.base.expand_as(log_w).clamp(min=c.gamma_min)
    elif c.mode == "constant":
        g = torch.full_like(log_w, c.gamma)
    else:
        raise unknown("reshape.mode", c.mode, MODES)
    if c.budget == "none":
        return g
    if c.budget == "tokens":
        return g if c.form == "box_cox" else torch.where(adv * log_w > 0, g * stats.share, g)
    if c.budget != "global":
        raise unknown("reshape.budget", c.budget, BUDGETS)
    # the report's wording of D: gamma_kl for the whole batch
    target = (c.kl_budget / stats.kl.clamp(min=1e-30)).sqrt().clamp(max=1.0)
    return torch.minimum(stats.base, target).expand_as(log_w)


def reshape(
    log_w: torch.Tensor, adv: torch.Tensor, g: torch.Tensor, c: Any, share: float = 1.0
) -> Trust:
    """The Trust of log w [N], A [N], gamma [N]; `c.clip` e > 0 is repair B: no gradient where w
    (not w^gamma, which overshoots) has left [1-e, 1+e] in the direction of A; `c.weight_max` > 0
    bounds w^gamma.

    share: of repair D by tokens, for the Box-Cox form: there gamma = 0 leaves the full gradient of
    the log-likelihood, so what pushes away is multiplied by the share itself (the power form has it
    in gamma, whose gradient goes to 0 with it)."""
    w = (g * log_w).exp()
    bounded = w.clamp(max=c.weight_max) if c.weight_max > 0 else w
    if c.form == "power":
        coefficient = g * bounded * adv
        value = bounded * adv
    elif c.form == "box_cox":
        # w^gamma - 1 over gamma, whose limit at 0 is log w
        value = adv * torch.where(g > 1e-6, torch.expm1(g * log_w) / g.clamp(min=1e-6), log_w)
        slow = (
            torch.where(adv * log_w > 0, torch.full_like(adv, share), 1.0)
            if c.budget == "tokens"
            else torch.ones_like(adv)
        )
        coefficient = slow * bounded * adv
        value = slow * value
    else:
        raise unknown("reshape.form", c.form, FORMS)
    r = log_w.exp()
    if c.clip > 0:
        cut = sides((adv < 0) & (r < 1 - c.clip), (adv > 0) & (r > 1 + c.clip))
    else:
        cut = torch.zeros_like(adv, dtype=torch.int8)
    return Trust(torch.where(cut == 0, coefficient, 0.0), value, cut)
