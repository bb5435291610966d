"""Trajectories to packed tensors, and the split of samples into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from asyncrl.algorithms.loss import LossBatch
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import Batch, TrainingSequence, Trajectory
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.models.packed_forward import SupportTable

# most training sequences in a micro-batch: with more, padding and saved activations outgrow caches
ROWS = 96


@dataclass
class PackedBatch:
    """A batch of B samples, R training sequences (rows) and N response tokens.

    A single completion is a sample of one row; a session may have several. Rows exist only in the
    forward pass: `prompts`, `responses` and `shared` hold one entry per row, the rows of a sample
    in order. Everything else is per sample or per token. offsets int64 [B + 1] bound each sample's
    tokens.
    """

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    # rows with the same number share a prompt, and its experts, within a group: it is encoded once
    shared: list[int]
    row_offsets: np.ndarray  # int64 [B + 1]: the rows of each sample
    groups: list[int]
    temperature: torch.Tensor
    offsets: np.ndarray
    loss: LossBatch
    # of each row: the tokens that top-p and top-k kept at each position; None: all
    supports: list[SampledSupport | None]
    routed: list[RoutedExperts | None]  # of each row; None: not recorded
    places: list[int]  # index of each sample in the batch's samples
    images: list[list[bytes]]  # of each row: the blobs of its image tokens

    @property
    def count(self) -> int:
        """Number of samples B."""
        return len(self.groups)

    def rows_of(self, samples: Sequence[int]) -> list[int]:
        """Return the rows of `samples`, in their order."""
        bounds = self.row_offsets
        return [row for i in samples for row in range(bounds[i], bounds[i + 1])]

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row in the forward pass, prompt and response: int64 [R]."""
        return np.array(
            [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]
        )

    def sample_tokens(self) -> list[int]:
        """Return the tokens of each sample in the forward pass, prompts and responses."""
        tokens: list[int] = np.add.reduceat(self.row_lengths, self.row_offsets[:-1]).tolist()
        return tokens

    def token_positions(self, samples: Sequence[int]) -> torch.Tensor:
        """Return the positions among N of the tokens of `samples`, in their order."""
        return torch.from_numpy(
            np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in samples])
        ).to(self.loss.seq.device)

    def row_arrays(self, samples: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (prompts, responses) of the rows of `samples`."""
        rows = self.rows_of(samples)
        return [self.prompts[row] for row in rows], [self.responses[row] for row in rows]

    def row_supports(self, samples: Sequence[int]) -> list[SampledSupport | None]:
        """Return the supports of the rows of `samples`."""
        return [self.supports[row] for row in self.rows_of(samples)]

    def row_routed(self, samples: Sequence[int]) -> list[RoutedExperts | None]:
        """Return the recorded experts of the rows of `samples`."""
        return [self.routed[row] for row in self.rows_of(samples)]

    def row_images(self, samples: Sequence[int]) -> list[list[bytes]]:
        """Return the images of the rows of `samples`."""
        return [self.images[row] for row in self.rows_of(samples)]

    def support_table(self, samples: Sequence[int], device: torch.device) -> SupportTable | None:
        """Return the supports of the tokens of `samples` on `device`; None: nothing truncated."""
        lengths = [len(self.responses[row]) for row in self.rows_of(samples)]
        return SupportTable.build(self.row_supports(samples), lengths, device)

    def row_temperature(self, samples: Sequence[int]) -> torch.Tensor:
        """Return the sampling temperature of each row of `samples`."""
        count = torch.from_numpy(np.diff(self.row_offsets)[list(samples)])
        return self.temperature[list(samples)].repeat_interleave(count)

    def to_device(self, device: torch.device) -> PackedBatch:
        """Move the loss's tensors to `device`; returns self."""
        for name, value in vars(self.loss).items():
            if isinstance(value, torch.Tensor):
                setattr(self.loss, name, value.to(device))
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
    rows = [sample.all_rows() for sample in samples]
    every = [row for of_sample in rows for row in of_sample]
    lengths = np.array([sample.token_count for sample in samples])
    tickets = dict.fromkeys(sample.ticket for sample in samples)
    order = {ticket: place for place, ticket in enumerate(tickets)}
    groups = [order[sample.ticket] for sample in samples]
    known: dict[tuple[int, bytes, bytes], int] = {}
    routed = [_routed(row) for row in every]
    of_prompts = [
        b"" if one is None else one.ids[: len(row.prompt_tokens) // 4].tobytes()
        for row, one in zip(every, routed, strict=True)
    ]
    owners = [group for group, of in zip(groups, rows, strict=True) for _ in of]
    lag = np.zeros(int(lengths.sum()), np.int64)
    age = np.zeros(int(lengths.sum()), np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for row, runs in enumerate(batch.token_lags[k] for k in places):
        for start, end, value in runs:
            lag[offsets[row] + start : offsets[row] + end] = value
    for row, sample in enumerate(samples):
        for span in sample.all_spans():
            age[offsets[row] + span.start : offsets[row] + span.end] = max(
                0, span.label.number - span.kv.number
            )
    behavior = np.concatenate([np.frombuffer(row.behavior_logprobs, "<f4") for row in every]).copy()
    mask = np.concatenate([np.frombuffer(row.mask, np.uint8) for row in every]) > 0
    loss = LossBatch(
        seq=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        behavior=torch.from_numpy(behavior),
        mask=torch.from_numpy(mask),
        token_lag=torch.from_numpy(lag),
        rewards=torch.tensor([sample.reward for sample in samples]),
        groups=torch.tensor(groups),
        truncated=torch.tensor([sample.finish == "length" for sample in samples]),
        age=torch.from_numpy(age),
    )
    if greedy:
        beside = [baseline[sample.ticket] for sample in samples]
        loss.greedy = torch.tensor([sample.reward for sample in beside])
        loss.greedy_truncated = torch.tensor([sample.finish == "length" for sample in beside])
        loss.greedy_lengths = torch.tensor([sample.length for sample in beside])
    if any(row.token_rewards for row in every):
        loss.token_rewards, loss.steps = _per_token(samples)
    names = sorted(samples[0].reward_parts)
    if names and all(sorted(sample.reward_parts) == names for sample in samples):
        loss.part_names = tuple(names)
        loss.parts = torch.tensor([[s.reward_parts[name] for name in names] for s in samples])
    return PackedBatch(
        prompts=[np.frombuffer(row.prompt_tokens, "<i4") for row in every],
        responses=[np.frombuffer(row.tokens, "<i4") for row in every],
        shared=[
            known.setdefault((group, row.prompt_tokens, experts), len(known))
            for group, row, experts in zip(owners, every, of_prompts, strict=True)
        ],
        row_offsets=np.concatenate([[0], np.cumsum([len(of_sample) for of_sample in rows])]),
        groups=groups,
        temperature=torch.tensor([sample.temperature for sample in samples]),
        offsets=offsets,
        loss=loss,
        supports=[
            SampledSupport.decode(row.support, len(row.mask)) if row.support else None
            for row in every
        ],
        routed=routed,
        places=places,
        images=[[batch.images[name] for name in row.images] for row in every],
    )


def _routed(row: TrainingSequence) -> RoutedExperts | None:
    """Decode the experts of a row."""
    tokens = (len(row.prompt_tokens) + len(row.tokens)) // 4
    return RoutedExperts.decode(row.routed, tokens - 1) if row.routed else None


def _per_token(samples: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rewards fp32 [N], bool [N]: ends of process-supervision steps).

    A token without a number (NaN on the wire) ends no step and has reward 0. Where a function gives
    a number for every token, steps end where it is not 0 and at the end of the sample. Raises
    AsyncrlError when the number of rewards is not the number of tokens.
    """
    rewards = []
    steps = []
    for sample in samples:
        given = np.frombuffer(sample.token_rewards, "<f4") if not sample.rows else np.zeros(0)
        if len(given) not in (0, sample.token_count):
            raise AsyncrlError(
                f"ticket {sample.ticket}, sample {sample.sample}: {len(given)} token rewards "
                f"for {sample.token_count} tokens"
            )
        last = np.arange(sample.token_count) == sample.token_count - 1
        if not len(given):
            given = np.where(last, np.float32(sample.reward), np.float32(0.0))
        given_number = ~np.isnan(given)
        steps.append((given != 0) | last if given_number.all() else given_number)
        rewards.append(np.where(given_number, given, np.float32(0.0)))
    return torch.from_numpy(np.concatenate(rewards)), torch.from_numpy(np.concatenate(steps))


def micro_batches(
    packed: PackedBatch,
    samples: Sequence[int],
    tokens: int,
    rows: int = ROWS,
    *,
    by_group: bool = False,
) -> list[list[int]]:
    """Sort `samples` by length and cut them into micro-batches.

    None holds more than `tokens` padded tokens or `rows` rows, and a sample is never cut, because
    per-sample quantities need all its tokens.

    With `by_group` the samples of a group stay together and groups are sorted by their longest
    sample, for a forward pass that encodes a prompt once and pads only rows of similar lengths.
    """
    count = np.diff(packed.row_offsets).tolist()
    widest = np.maximum.reduceat(packed.row_lengths, packed.row_offsets[:-1]).tolist()
    longest: dict[int, int] = {}
    if by_group:
        for answer in samples:
            group = packed.groups[answer]
            longest[group] = max(widest[answer], longest.get(group, 0))

    def place(answer: int) -> tuple[int, ...]:
        group = packed.groups[answer]
        return (
            (longest[group], group, widest[answer], answer)
            if by_group
            else (widest[answer], answer)
        )

    micros: list[list[int]] = []
    row_count = 0  # rows of the last one
    width = 0  # of its widest row
    for answer in sorted(samples, key=place):
        row_count += count[answer]
        width = max(width, widest[answer])
        if micros and row_count <= rows and row_count * width <= tokens:
            micros[-1].append(answer)
        else:
            micros.append([answer])
            row_count, width = count[answer], widest[answer]
    return micros
