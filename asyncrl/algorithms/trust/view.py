"""Inputs and output of a surrogate, shared by `surrogates` and the modules of this package."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from asyncrl.algorithms.ratios import CLAMP
from asyncrl.algorithms.reshape import ReshapeStatistics
from asyncrl.algorithms.settings import Reshape

OPEN = 0
LOW = 1
HIGH = 2
DUAL = 3


class SurrogateTerm(NamedTuple):
    """The result of a surrogate, detached.

    coefficient: [N], of grad lp.
    objective: [N], the value.
    clipped: int8 [N], OPEN or the bound that cut the gradient.
    """

    coefficient: torch.Tensor
    objective: torch.Tensor
    clipped: torch.Tensor


def build_unclipped(coefficient: torch.Tensor, objective: torch.Tensor) -> SurrogateTerm:
    """Build a term whose gradient no bound has cut."""
    return SurrogateTerm(coefficient, objective, torch.zeros_like(coefficient, dtype=torch.int8))


def mark_sides(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.where(low, LOW, torch.where(high, HIGH, OPEN)).to(torch.int8)


@dataclass
class SurrogateTokens:
    """Inputs of a surrogate: n tokens of whole samples, without gradient.

    raw: [n], log pi_theta / pi_prox, finite and not clamped. `log_r` is clamped to [-20, 20] and
        gives a token's own ratio.
    adv: [n].
    lp: [n], log pi_theta.
    behavior: [n], log mu.
    mask: bool [n], in the loss.
    seq: int64 [n], the sample of each token, of `n` samples.
    chosen: bool [n], tokens chosen by COVARIANCE_CHOICES from the whole batch before the step.
    stats: statistics of IS-reshape from the whole batch before the step.
    reshape: the config section of IS-reshape.
    sums: the surrogate adds sums for its own metrics here.
    prepass: results of PREPASS.
    """

    raw: torch.Tensor
    adv: torch.Tensor
    lp: torch.Tensor
    behavior: torch.Tensor
    mask: torch.Tensor
    seq: torch.Tensor
    n: int
    chosen: torch.Tensor | None = None
    stats: ReshapeStatistics | None = None
    reshape: Reshape | None = None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    prepass: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def log_r(self) -> torch.Tensor:
        return self.raw.clamp(-CLAMP, CLAMP)


@dataclass
class StepBatch:
    """The batch before an optimizer step.

    behavior: [N], log mu.
    adv: [N].
    mask: bool [N], in the loss of the step.
    seq: int64 [N].
    groups: int64 [B].
    current: [N], log pi_theta, where the surrogate needs it.
    """

    behavior: torch.Tensor
    adv: torch.Tensor
    mask: torch.Tensor
    seq: torch.Tensor
    groups: torch.Tensor
    current: torch.Tensor | None
