"""Supervised training: the next-token loss on answers that are given, one optimizer step at a time.

Rows are packed by the packed forward where the model has one: linear layers see no padding, and
attention pads within a micro-batch only.  The warm start of tiny models and `asyncrl sft` are both
made of this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.config.sft import SftTraining
from asyncrl.contract.errors import NotFiniteError
from asyncrl.models.policy import PolicyModel


class FitExample(NamedTuple):
    """One example of supervised training.

    prompt: int32 [P], only read.
    answer: int32 [T], learned, with its end token.
    images: the blobs of the prompt's image tokens."""

    prompt: np.ndarray
    answer: np.ndarray
    images: Sequence[bytes] = ()

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


def learning_rate_share(training: SftTraining, step: int) -> float:
    """Return the share of the learning rate at `step`, counted from 0.

    >>> training = SftTraining(steps=100, warmup_steps=20, lr_end=0.05)
    >>> [round(learning_rate_share(training, step), 2) for step in (0, 19, 50, 99)]
    [0.05, 0.81, 0.5, 0.05]
    """
    warm = (step + 1) / max(training.warmup_steps, 1)
    if training.schedule == "constant":
        return min(warm, 1.0)
    left = 1 - step / training.steps
    if training.schedule == "cosine":
        left = (1 + math.cos(math.pi * step / training.steps)) / 2
    return min(warm, max(training.lr_end, left))


def micro_batches(rows: Sequence[FitExample], most: int) -> list[list[FitExample]]:
    """Divide `rows` into passes of at most `most` tokens, padded to the longest row of each.

    If one pass is enough, the order stays; otherwise the rows are sorted by length.  A row with
    more tokens gets its own pass."""
    if len(rows) * max(row.size for row in rows) <= most:
        return [list(rows)]
    passes: list[list[FitExample]] = [[]]
    for row in sorted(rows, key=lambda row: row.size):
        if passes[-1] and (len(passes[-1]) + 1) * row.size > most:
            passes.append([])
        passes[-1].append(row)
    return passes


def batch_at(
    rows: Sequence[FitExample], training: SftTraining, seed: int, step: int
) -> list[FitExample]:
    """Return the rows of a step from repeated passes over the file, each shuffled by (seed, pass).

    A batch may span two passes.  The result depends only on the arguments, so that a resumed run
    continues with the same rows."""
    wanted = range(step * training.batch, (step + 1) * training.batch)
    turns = sorted({place // len(rows) for place in wanted})
    orders = {
        turn: np.random.default_rng([seed, turn]).permutation(len(rows)).tolist() for turn in turns
    }
    return [rows[orders[place // len(rows)][place % len(rows)]] for place in wanted]


class ModelFitter:
    """A model with its optimizer; `number` counts its steps."""

    def __init__(self, model: PolicyModel, training: SftTraining) -> None:
        self.model = model
        self.training = training
        self.number = 0
        self.optimizer = torch.optim.AdamW(
            model.hf.parameters(),
            lr=training.lr,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
            fused=True,
        )

    def step(self, rows: Sequence[FitExample]) -> float:
        """Make one optimizer step on `rows` and return its loss, in nats per answer token.

        Raises NotFiniteError, and then leaves the weights unchanged."""
        self.model.hf.train()
        tokens = sum(len(row.answer) for row in rows)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in micro_batches(rows, self.training.micro_batch_tokens):
            loss = self._loss(part) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.hf.parameters(), self.training.clip_norm or math.inf
        )
        if not math.isfinite(total) or not bool(torch.isfinite(norm)):
            raise NotFiniteError(
                f"the loss or its gradient is not finite in step {self.number}: training.lr = "
                f"{self.training.lr:g} is too large"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.lr * learning_rate_share(self.training, self.number)
        self.optimizer.step()
        self.number += 1
        return total

    @torch.no_grad()
    def loss(self, rows: Sequence[FitExample]) -> float:
        """Return the mean loss on `rows` in nats per answer token, without training on them."""
        self.model.hf.eval()
        parts = micro_batches(rows, self.training.micro_batch_tokens)
        return sum(float(self._loss(part)) for part in parts) / sum(len(r.answer) for r in rows)

    def _loss(self, rows: Sequence[FitExample]) -> torch.Tensor:
        """Return minus the sum of the answers' log-probabilities."""
        out = self.model.logprobs(
            [row.prompt for row in rows],
            [row.answer for row in rows],
            torch.ones(len(rows)),
            images=[row.images for row in rows],
        )
        return -out.logprobs.sum()
