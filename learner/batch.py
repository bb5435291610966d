"""Trajectories to packed tensors, and the split of samples into micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, from_numpy, tensor

from asyncrl.algorithms.loss import LossBatch
from asyncrl.algorithms.ratios import sum_by_sample
from asyncrl.contract.messages import Batch, Trajectory
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.models import trainer
from asyncrl.models.packed_forward import copy_to


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


@dataclass(kw_only=True)
class PackedBatch(LossBatch):
    """A batch of B samples, R training sequences (rows) and N response tokens.

    A single completion is a sample of one row; a session may have several. Rows exist only in the
    forward pass: `prompts`, `responses` and `shared` hold one entry per row, the rows of a sample
    in order. Everything else is per sample or per token. offsets int64 [B + 1] bound each sample's
    tokens.
    """

    prompts: list[ndarray]
    responses: list[ndarray]
    # rows with the same number share a prompt, and its experts, within a group: it is encoded once
    shared: list[int]
    row_offsets: ndarray  # int64 [B + 1]: the rows of each sample
    group_of: list[int]  # `groups` as a list
    temperature: Tensor
    offsets: ndarray
    # of each row: the tokens that top-p and top-k kept at each position; None: all
    supports: list[SampledSupport | None]
    routed: list[RoutedExperts | None]  # of each row; None: not recorded
    places: list[int]  # index of each sample in the batch's samples
    images: list[list[bytes]]  # of each row: the blobs of its image tokens
    # loss.center: of each policy that sampled: the row of `states` of each token, -1: none [N],
    # states [n, H] and head [V, H]
    sampling: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def list_rows(self, samples: Sequence[int]) -> list[int]:
        """Return the rows of `samples`, in their order."""
        bounds = self.row_offsets
        return [row for i in samples for row in range(bounds[i], bounds[i + 1])]

    @cached_property
    def row_lengths(self) -> ndarray:
        """Tokens of each row in the forward pass, prompt and response: int64 [R]."""
        return np.array(
            [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]
        )

    def count_sample_tokens(self) -> list[int]:
        """Return the tokens of each sample in the forward pass, prompts and responses."""
        tokens: list[int] = np.add.reduceat(self.row_lengths, self.row_offsets[:-1]).tolist()
        return tokens

    def find_token_positions(self, samples: Sequence[int]) -> Tensor:
        """Return the positions among N of the tokens of `samples`, in their order."""
        parts = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in samples]
        return copy_to(self.seq.device, from_numpy(np.concatenate(parts)))

    def find_whole_samples(self, mask: Tensor) -> list[int]:
        """Return the samples whose tokens are all in the mask, bool [N], and which have any."""
        counts = sum_by_sample(mask.long(), self.seq, self.count).tolist()
        lengths = np.diff(self.offsets)
        return [i for i, count in enumerate(counts) if count == lengths[i] > 0]

    def select_rows(self, samples: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of a forward pass (`ForwardInput`) over the rows of `samples`."""
        names = ("prompts", "responses", "supports", "routed", "images")
        columns = {name: getattr(self, name) for name in names} | {"groups": self.shared}
        rows = self.list_rows(samples)
        count = from_numpy(np.diff(self.row_offsets)[list(samples)])
        temperature = self.temperature[list(samples)].repeat_interleave(count)
        selected = {name: [column[row] for row in rows] for name, column in columns.items()}
        return selected | {"temperature": temperature}

    def to_device(self, device: torch.device) -> PackedBatch:
        """Move the loss's tensors to `device`; returns self."""
        for name in (x.name for x in fields(LossBatch)):
            if isinstance(value := getattr(self, name), Tensor):
                setattr(self, name, copy_to(device, value))
        return self


def pack(batch: Batch, *, greedy: bool = False) -> PackedBatch:
    """Decode a batch. Token ids are used exactly as they were sampled.

    With `greedy`, sample 0 of each group is a baseline (remax): it is excluded, and its reward goes
    to the others. Token rewards are packed where any sample has them. A sample without them has its
    reward on its last token. So does a session of several rows, whose calls have no order.
    """
    places = [
        row for row, sample in enumerate(batch.samples) if not (greedy and sample.sample == 0)
    ]
    samples = [batch.samples[row] for row in places]
    baseline = {sample.ticket: sample for sample in batch.samples if sample.sample == 0}
    rows = [sample.list_rows() for sample in samples]
    all_rows = [row for sample_rows in rows for row in sample_rows]
    lengths = np.array([sample.token_count for sample in samples])
    order: dict[int, int] = {}
    groups = [order.setdefault(sample.ticket, len(order)) for sample in samples]
    prompt_numbers: dict[tuple[int, bytes, bytes], int] = {}
    routed: list[RoutedExperts | None] = []
    shared: list[int] = []
    for group, sample in zip(groups, samples, strict=True):
        for row in sample.list_rows():
            experts, prompt_experts = None, b""
            if row.routed:
                width = (len(row.prompt_tokens) + len(row.tokens)) // 4 - 1
                experts = RoutedExperts.decode(row.routed, width)
                prompt_experts = experts.ids[: len(row.prompt_tokens) // 4].tobytes()
            routed.append(experts)
            prompt = group, row.prompt_tokens, prompt_experts
            shared.append(prompt_numbers.setdefault(prompt, len(prompt_numbers)))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    lag, age = np.zeros((2, offsets[-1]), np.int64)
    for offset, place in zip(offsets.tolist(), places, strict=False):
        for start, end, value in batch.token_lags[place]:
            lag[offset + start : offset + end] = value
        for span in batch.samples[place].list_spans():
            age[offset + span.start : offset + span.end] = max(
                0, span.label.number - span.kv.number
            )
    behavior = np.concatenate([np.frombuffer(row.behavior_logprobs, "<f4") for row in all_rows])
    mask = np.concatenate([np.frombuffer(row.mask, np.uint8) for row in all_rows]) > 0
    packed = PackedBatch(
        seq=from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        behavior=from_numpy(behavior),
        mask=from_numpy(mask),
        token_lag=from_numpy(lag),
        rewards=tensor([sample.reward for sample in samples]),
        groups=tensor(groups),
        smallest_group=min(Counter(groups).values()),
        truncated=tensor([sample.finish == "length" for sample in samples]),
        age=from_numpy(age),
        prompts=[np.frombuffer(row.prompt_tokens, "<i4") for row in all_rows],
        responses=[np.frombuffer(row.tokens, "<i4") for row in all_rows],
        shared=shared,
        row_offsets=np.concatenate([[0], np.cumsum([len(sample_rows) for sample_rows in rows])]),
        group_of=groups,
        temperature=tensor([sample.temperature for sample in samples]),
        offsets=offsets,
        supports=[
            SampledSupport.decode(row.support, len(row.mask)) if row.support else None
            for row in all_rows
        ],
        routed=routed,
        places=places,
        images=[[batch.images[name] for name in row.images] for row in all_rows],
    )
    if batch.tasks:
        packed.task_names = tuple(dict.fromkeys(batch.tasks))
        packed.task = tensor([packed.task_names.index(batch.tasks[place]) for place in places])
    if greedy:
        completions = [baseline[sample.ticket] for sample in samples]
        packed.greedy = tensor([sample.reward for sample in completions])
        packed.greedy_truncated = tensor([x.finish == "length" for x in completions])
        packed.greedy_lengths = tensor([sample.length for sample in completions])
    if any(row.token_rewards for row in all_rows):
        packed.token_rewards, packed.steps = _collect_token_rewards(samples)
    names = sorted(samples[0].reward_parts)
    if names and all(sorted(sample.reward_parts) == names for sample in samples):
        packed.part_names = tuple(names)
        packed.parts = tensor([[s.reward_parts[name] for name in names] for s in samples])
    return packed


def _collect_token_rewards(samples: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """Return (rewards fp32 [N], bool [N]: ends of process-supervision steps).

    A token without a number (NaN on the wire) ends no step and has reward 0. Where a function gives
    a number for every token, steps end where it is not 0 and at the end of the sample.
    """
    rewards = []
    steps = []
    for sample in samples:
        token_rewards = np.frombuffer(b"" if sample.rows else sample.token_rewards, "<f4")
        is_last = np.arange(sample.token_count) == sample.token_count - 1
        if not len(token_rewards):
            token_rewards = np.where(is_last, np.float32(sample.reward), np.float32(0.0))
        has_number = ~np.isnan(token_rewards)
        steps.append((token_rewards != 0) | is_last if has_number.all() else has_number)
        rewards.append(np.where(has_number, token_rewards, np.float32(0.0)))
    return from_numpy(np.concatenate(rewards)), from_numpy(np.concatenate(steps))


def split_micro_batches(
    packed: PackedBatch,
    samples: Sequence[int],
    tokens: int,
    rows: int = trainer.ROWS,
    *,
    by_group: bool = False,
) -> list[list[int]]:
    """Sort `samples` by length and split them into micro-batches.

    A micro-batch holds at most `tokens` padded tokens and `rows` rows, and at least one sample. A
    sample is never split, because per-sample quantities need all its tokens.

    With `by_group` the samples of a group stay together and groups are sorted by their longest
    sample, for a forward pass that encodes a prompt once and pads only rows of similar lengths.
    """
    count = np.diff(packed.row_offsets).tolist()
    widest = np.maximum.reduceat(packed.row_lengths, packed.row_offsets[:-1]).tolist()
    longest: dict[int, int] = {}
    for sample in samples if by_group else ():
        group = packed.group_of[sample]
        longest[group] = max(widest[sample], longest.get(group, 0))

    def sort_key(sample: int) -> tuple[int, ...]:
        group = packed.group_of[sample]
        return longest.get(group, 0), group if by_group else 0, widest[sample], sample

    return trainer.split_micro_batches(sorted(samples, key=sort_key), widest, tokens, rows, count)
