"""Trajectories to packed tensors, and how samples are split into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.algorithms.loss import LossBatch
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import Batch, Trajectory

ROWS = 64  # samples in a micro-batch at most: more rows mean more padding and colder caches


@dataclass
class Packed:
    """A batch of B samples and N response tokens.  offsets int64 [B + 1] bound each sample's
    tokens.
    """

    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    groups: list[int]
    temperature: torch.Tensor
    offsets: np.ndarray
    loss: LossBatch
    places: list[int]  # of each answer among the batch's samples

    def part(self, samples: Sequence[int]) -> torch.Tensor:
        """Places among N of the tokens of `samples`, in their order."""
        return torch.from_numpy(
            np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in samples])
        ).to(self.loss.seq.device)

    def to(self, device: torch.device) -> Packed:
        """The same with the loss's tensors on `device`."""
        for name, value in vars(self.loss).items():
            if isinstance(value, torch.Tensor):
                setattr(self.loss, name, value.to(device))
        return self


def pack(batch: Batch, *, greedy: bool = False) -> Packed:
    """Decode a batch.  Token ids are used exactly as they were sampled.

    greedy: sample 0 of each group is a baseline (remax): left out, its reward kept for the others.
    Rewards per token come with the batch where any answer has them; an answer without has its own
    on its last token."""
    at = [row for row, sample in enumerate(batch.samples) if not (greedy and sample.sample == 0)]
    samples = [batch.samples[row] for row in at]
    baseline = {sample.ticket: sample for sample in batch.samples if sample.sample == 0}
    prompts = [np.frombuffer(sample.prompt_tokens, "<i4") for sample in samples]
    responses = [np.frombuffer(sample.tokens, "<i4") for sample in samples]
    lengths = np.array([len(r) for r in responses])
    tickets = dict.fromkeys(sample.ticket for sample in samples)
    order = {ticket: place for place, ticket in enumerate(tickets)}
    groups = [order[sample.ticket] for sample in samples]
    lag = np.zeros(int(lengths.sum()), np.int64)
    age = np.zeros(int(lengths.sum()), np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for row, runs in enumerate(batch.token_lags[k] for k in at):
        for start, end, value in runs:
            lag[offsets[row] + start : offsets[row] + end] = value
    for row, sample in enumerate(samples):
        for span in sample.spans:
            age[offsets[row] + span.start : offsets[row] + span.end] = max(
                0, span.label.number - span.kv.number
            )
    behavior = np.concatenate(
        [np.frombuffer(sample.behavior_logprobs, "<f4") for sample in samples]
    ).copy()
    mask = np.concatenate([np.frombuffer(sample.mask, np.uint8) for sample in samples]) > 0
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
    if any(sample.token_rewards for sample in samples):
        loss.token_rewards, loss.steps = _per_token(samples)
    return Packed(
        prompts=prompts,
        responses=responses,
        groups=groups,
        temperature=torch.tensor([sample.temperature for sample in samples]),
        offsets=offsets,
        loss=loss,
        places=at,
    )


def _per_token(samples: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rewards fp32 [N], bool [N]: where a step of process supervision ends).  Raises AsyncrlError
    for another count than tokens.

    A token given no number at all (NaN on the wire) ends no step and has reward 0.  Where a
    function gives a number for every token, its steps end where that is not 0, and with the answer.
    """
    rewards = []
    steps = []
    for sample in samples:
        given = np.frombuffer(sample.token_rewards, "<f4")
        if len(given) not in (0, sample.length):
            raise AsyncrlError(
                f"ticket {sample.ticket}, sample {sample.sample}: {len(given)} token rewards "
                f"for {sample.length} tokens"
            )
        last = np.arange(sample.length) == sample.length - 1
        if not len(given):
            given = np.where(last, np.float32(sample.reward), np.float32(0.0))
        said = ~np.isnan(given)
        steps.append((given != 0) | last if said.all() else said)
        rewards.append(np.where(said, given, np.float32(0.0)))
    return torch.from_numpy(np.concatenate(rewards)), torch.from_numpy(np.concatenate(steps))


def micro_batches(
    packed: Packed, samples: Sequence[int], tokens: int, rows: int = ROWS
) -> list[list[int]]:
    """`samples` sorted by length and cut so that none holds more than `tokens` padded tokens or
    `rows` samples.
    """

    def length(answer: int) -> int:
        return len(packed.prompts[answer]) + len(packed.responses[answer])

    out: list[list[int]] = []
    for answer in sorted(samples, key=lambda answer: (length(answer), answer)):
        if out and len(out[-1]) < rows and (len(out[-1]) + 1) * length(answer) <= tokens:
            out[-1].append(answer)
        else:
            out.append([answer])
    return out
