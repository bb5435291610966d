"""The samples of each optimizer step, as a function of the batch's number.

It keeps no state, so a checkpoint stores nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
