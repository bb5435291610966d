"""Early stopping: when the remaining optimizer steps of a batch are skipped or reduced."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.algorithms.ratios import CLAMP, sum_by_sample


def sum_kl(log_r: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weighted sum, weight) over the mask of r - 1 - log r, r = exp(log_r).

    Their quotient estimates KL(denominator || theta).

    Args:
        log_r: [N], log pi_theta minus that of the policy it is measured from.
        weight: [N], the truncated ratio of that policy to mu where the samples are mu's, else 1.
        mask: bool [N].
    """
    k = torch.expm1(log_r) - log_r
    return torch.where(mask, weight * k, 0.0).sum(), torch.where(mask, weight, 0.0).sum()


def compute_step_share(kl: float, budget: float, step_kl: float | None = None) -> float:
    """Return g in [0, 1]: the share of one full step that still fits into the KL budget.

    It is exactly 0 at the budget. To second order sqrt(KL) adds like a distance:

        g = clip((sqrt(budget) - sqrt(K)) / sqrt(dK1), 0, 1)

    dK1 is the KL that one full step adds. Before it is known, g = 1 - sqrt(K / budget).

    Args:
        kl: K, measured so far, in nats per token.
        budget: in nats per token.
        step_kl: dK1, or None.
    """
    distance_left = max(budget, 0.0) ** 0.5 - max(kl, 0.0) ** 0.5
    step_distance = budget**0.5 if step_kl is None else max(step_kl, 1e-12) ** 0.5
    return float(min(1.0, max(0.0, distance_left / max(step_distance, 1e-12))))


@dataclass
class KLBudget:
    """A KL budget over the optimizer steps of one batch; measures dK1 from its own first step.

    The first step is a full one, because nothing is spent and dK1 is unknown. It adds sqrt(K) =
    0.15 of 0.2, so a third of a step still fits:

    >>> b = KLBudget(0.04)
    >>> round(b.compute_next_share(0.0), 3)
    1.0
    >>> round(b.compute_next_share(0.0225), 3)
    0.333
    """

    limit: float
    step_kl: float | None = None
    # sqrt(K) before the first step, and the g of that step
    _last: tuple[float, float] | None = field(default=None, repr=False)

    def compute_next_share(self, kl: float) -> float:
        """Return g of the coming step, from K measured before it. Call once per optimizer step."""
        root = max(kl, 0.0) ** 0.5
        if self.step_kl is None and self._last is not None and self._last[1] > 0:
            self.step_kl = ((root - self._last[0]) / self._last[1]) ** 2
        g = compute_step_share(kl, self.limit, self.step_kl)
        if self._last is None:
            self._last = (root, g)
        return g


def compute_lr_scale(
    kl: float, ess: float, *, kl_max: float, ess_min: float, budget: KLBudget | None
) -> float:
    """Return the learning-rate scale of the coming step; 0 stops the batch.

    kl_max and ess_min are off at 0. Without a budget the KL limit is a stop (1 or 0), with one it
    is the share that fits.
    """
    if ess_min > 0 and ess < ess_min:
        return 0.0
    if kl_max <= 0:
        return 1.0
    return budget.compute_next_share(kl) if budget is not None else (1.0 if kl <= kl_max else 0.0)


def sum_sample_weights(log_w: Tensor, mask: Tensor, seq: Tensor, n: int) -> Tensor:
    """Return (samples, sum W, sum W^2), float64 [3], over samples with a token in the mask.

    W = exp(sum log w) of each sample, not truncated. Sums of micro-batches and ranks add up.
    """
    has_tokens = sum_by_sample(mask.double(), seq, n) > 0
    sample_ratios = (
        sum_by_sample(torch.where(mask, log_w, 0.0).double(), seq, n).clamp(-CLAMP, CLAMP).exp()
    )
    w = torch.where(has_tokens, sample_ratios, 0.0)
    return torch.stack([has_tokens.double().sum(), w.sum(), w.square().sum()])


def scale_lr_by_ess(ess: float, on_policy: float, form: str) -> float:
    """Return the share of the learning rate: min(1, ess / on_policy), its root with `sqrt`.

    VCPO, arXiv 2602.17616. It scales the rate, because Adam would undo a factor of the loss.
    """
    share = min(1.0, ess / on_policy)
    return share**0.5 if form == "sqrt" else share
