"""Functions of a batch's number: its learning rate, and the samples of each optimizer step.

Neither keeps state, so a checkpoint stores nothing for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from asyncrl.config.tree import LearnerConfig


def compute_learning_rate_share(settings: LearnerConfig, number: int) -> float:
    """Return batch `number`'s share of `learner.lr`: the schedule, after the warm-up."""
    remaining = 1.0 - number / settings.steps
    share = {
        "constant": 1.0,
        "linear": remaining,
        "cosine": 0.5 * (1 + math.cos(math.pi * (1 - remaining))),
    }[settings.schedule]
    return share * min(1.0, (number + 1) / (settings.warmup_steps + 1))


def split_minibatches(
    groups: Sequence[int], parts: int, *, seed: int, number: int, epoch: int
) -> list[list[int]]:
    """Return the samples of each optimizer step.

    Whole groups are assigned by a permutation that (seed, batch, epoch) determines. groups holds
    each sample's group, numbered from 0.
    """
    if parts == 1:
        return [list(range(len(groups)))]
    source = torch.Generator().manual_seed(((seed * 1_000_003 + number) * 1009 + epoch) % 2**63)
    count = max(groups) + 1
    order = torch.randperm(count, generator=source).tolist()
    part_of_group = {group: rank * parts // count for rank, group in enumerate(order)}
    return [
        [sample for sample, group in enumerate(groups) if part_of_group[group] == part]
        for part in range(parts)
    ]
