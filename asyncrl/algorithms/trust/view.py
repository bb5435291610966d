"""What a surrogate is given and what it returns: the vocabulary that `surrogates` and `lagged`
share."""

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
    """coefficient [N] of grad lp; objective [N], its value; clipped int8 [N]: OPEN, or which bound
    cut the gradient.
    """

    coefficient: torch.Tensor
    objective: torch.Tensor
    clipped: torch.Tensor


def unclipped(coefficient: torch.Tensor, objective: torch.Tensor) -> SurrogateTerm:
    """No bound has cut anything."""
    return SurrogateTerm(coefficient, objective, torch.zeros_like(coefficient, dtype=torch.int8))


def sides(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.where(low, LOW, torch.where(high, HIGH, OPEN)).to(torch.int8)


@dataclass
class SurrogateTokens:
    """What a surrogate may look at: [n] tokens of whole answers, nothing with a gradient.

    raw: log pi_theta / anchor, finite and not clamped; log_r: clamped to [-20, 20], what a token's
    own ratio is taken from. lp: log pi_theta; behavior: log mu; mask bool: in the loss; seq int64:
    each token's answer, of `n`.  drawn bool: the tokens that BEFORE picked, stats: IS-reshape's
    statistics, both of the whole batch before the step; reshape: its keys.  sums: what the
    surrogate adds to the batch's sums for its own metrics."""

    raw: torch.Tensor
    adv: torch.Tensor
    lp: torch.Tensor
    behavior: torch.Tensor
    mask: torch.Tensor
    seq: torch.Tensor
    n: int
    drawn: torch.Tensor | None = None
    stats: ReshapeStatistics | None = None
    reshape: Reshape | None = None
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    prepass: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def log_r(self) -> torch.Tensor:
        return self.raw.clamp(-CLAMP, CLAMP)


@dataclass
class StepBatch:
    """The batch before an optimizer step, [N] tokens: log mu; mask bool: in the step's loss; groups
    int64 [B].  current: log pi_theta, where the surrogate asks for it."""

    behavior: torch.Tensor
    adv: torch.Tensor
    mask: torch.Tensor
    seq: torch.Tensor
    groups: torch.Tensor
    current: torch.Tensor | None
