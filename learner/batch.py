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
        for name, x in vars(self.loss).items():
            if isinstance(x, torch.Tensor):
                setattr(self.loss, name, x.to(device))
        return self


def pack(batch: Batch, *, greedy: bool = False) -> Packed:
    """Decode a batch.  Token ids are used exactly as they were sampled.

    greedy: sample 0 of each group is a baseline (remax): left out, its reward kept for the others.
    Rewards per token come with the batch where any answer has them; an answer without has its own
    on its last token."""
    at = [i for i, t in enumerate(batch.samples) if not (greedy and t.sample == 0)]
    s = [batch.samples[i] for i in at]
    baseline = {t.ticket: t for t in batch.samples if t.sample == 0}
    prompts = [np.frombuffer(t.prompt_tokens, "<i4") for t in s]
    responses = [np.frombuffer(t.tokens, "<i4") for t in s]
    lengths = np.array([len(r) for r in responses])
    order = {t: n for n, t in enumerate(dict.fromkeys(t.ticket for t in s))}
    groups = [order[t.ticket] for t in s]
    lag = np.zeros(int(lengths.sum()), np.int64)
    age = np.zeros(int(lengths.sum()), np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for i, runs in enumerate(batch.token_lags[k] for k in at):
        for start, end, value in runs:
            lag[offsets[i] + start : offsets[i] + end] = value
    for i, t in enumerate(s):
        for span in t.spans:
            age[offsets[i] + span.start : offsets[i] + span.end] = max(
                0, span.label.number - span.kv.number
            )
    behavior = np.concatenate([np.frombuffer(t.behavior_logprobs, "<f4") for t in s]).copy()
    mask = np.concatenate([np.frombuffer(t.mask, np.uint8) for t in s]) > 0
    loss = LossBatch(
        seq=torch.from_numpy(np.repeat(np.arange(len(s)), lengths)),
        behavior=torch.from_numpy(behavior),
        mask=torch.from_numpy(mask),
        token_lag=torch.from_numpy(lag),
        rewards=torch.tensor([t.reward for t in s]),
        groups=torch.tensor(groups),
        truncated=torch.tensor([t.finish == "length" for t in s]),
        age=torch.from_numpy(age),
    )
    if greedy:
        beside = [baseline[t.ticket] for t in s]
        loss.greedy = torch.tensor([t.reward for t in beside])
        loss.greedy_truncated = torch.tensor([t.finish == "length" for t in beside])
        loss.greedy_lengths = torch.tensor([t.length for t in beside])
    if any(t.token_rewards for t in s):
        loss.token_rewards, loss.steps = _per_token(s)
    return Packed(
        prompts, responses, groups, torch.tensor([t.temperature for t in s]), offsets, loss, at
    )


def _per_token(samples: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rewards fp32 [N], bool [N]: where a step of process supervision ends).  Raises AsyncrlError
    for another count than tokens.

    A token given no number at all (NaN on the wire) ends no step and has reward 0.  Where a
    function gives a number for every token, its steps end where that is not 0, and with the answer.
    """
    rewards = []
    steps = []
    for t in samples:
        given = np.frombuffer(t.token_rewards, "<f4")
        if len(given) not in (0, t.length):
            raise AsyncrlError(
                f"ticket {t.ticket}, sample {t.sample}: {len(given)} token rewards for {t.length} "
                "tokens"
            )
        last = np.arange(t.length) == t.length - 1
        if not len(given):
            given = np.where(last, np.float32(t.reward), np.float32(0.0))
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

    def length(i: int) -> int:
        return len(packed.prompts[i]) + len(packed.responses[i])

    out: list[list[int]] = []
    for i in sorted(samples, key=lambda i: (length(i), i)):
        if out and len(out[-1]) < rows and (len(out[-1]) + 1) * length(i) <= tokens:
            out[-1].append(i)
        else:
            out.append([i])
    return out
