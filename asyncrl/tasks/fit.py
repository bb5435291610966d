"""Supervised training: the next-token loss on given answers, one optimizer step at a time.

Examples are packed if the model has a packed forward: linear layers process no padding, and
attention pads only within a micro-batch.  The warm start of tiny models and `asyncrl sft` both use
this module."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import compute_learning_rate_share
from asyncrl.contract.errors import NotFiniteError
from asyncrl.models.policy import PolicyModel


class FitExample(NamedTuple):
    """One example of supervised training.

    prompt: int32 [P], not in the loss.
    answer: int32 [T], in the loss, with its end token.
    images: the blobs of the prompt's image tokens."""

    prompt: np.ndarray
    answer: np.ndarray
    images: Sequence[bytes] = ()

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


def split_micro_batches(examples: Sequence[FitExample], limit: int) -> list[list[FitExample]]:
    """Split `examples` into passes of at most `limit` tokens, padded to the longest of each.

    If one pass is enough, the order stays; otherwise the examples are sorted by length.  An example
    with more than `limit` tokens gets its own pass."""
    if len(examples) * max(example.size for example in examples) <= limit:
        return [list(examples)]
    passes: list[list[FitExample]] = [[]]
    for example in sorted(examples, key=lambda example: example.size):
        if passes[-1] and (len(passes[-1]) + 1) * example.size > limit:
            passes.append([])
        passes[-1].append(example)
    return passes


def select_batch(
    examples: Sequence[FitExample], training: SftTraining, seed: int, step: int
) -> list[FitExample]:
    """Return the examples of a step from repeated passes, each shuffled by (seed, pass).

    A batch may span two passes.  The result depends only on the arguments, so that a resumed run
    continues with the same examples."""
    positions = range(step * training.batch, (step + 1) * training.batch)
    turns = sorted({position // len(examples) for position in positions})
    orders = {
        turn: np.random.default_rng([seed, turn]).permutation(len(examples)).tolist()
        for turn in turns
    }
    return [
        examples[orders[position // len(examples)][position % len(examples)]]
        for position in positions
    ]


class ModelFitter:
    """A model with its optimizer; `number` counts the steps.

    share: of training.lr at a step; None: by the keys of `training`."""

    def __init__(
        self,
        model: PolicyModel,
        training: SftTraining,
        share: Callable[[int], float] | None = None,
    ) -> None:
        self.model = model
        self.training = training
        self.share = share or functools.partial(compute_learning_rate_share, training)
        self.number = 0
        self.optimizer = torch.optim.AdamW(
            model.hf.parameters(),
            lr=training.lr,
            betas=(training.beta1, training.beta2),
            weight_decay=training.weight_decay,
            fused=True,
        )

    def step(self, examples: Sequence[FitExample]) -> float:
        """Make one optimizer step on `examples`; return its loss in nats per answer token.

        If it raises NotFiniteError, the weights are unchanged."""
        self.model.hf.train()
        tokens = sum(len(example.answer) for example in examples)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro_batch in split_micro_batches(examples, self.training.micro_batch_tokens):
            loss = self._sum_loss(micro_batch) / tokens
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
            group["lr"] = self.training.lr * self.share(self.number)
        self.optimizer.step()
        self.number += 1
        return total

    @torch.no_grad()
    def measure_loss(self, examples: Sequence[FitExample]) -> float:
        """Return the mean loss on `examples` in nats per answer token, without training."""
        self.model.hf.eval()
        micro_batches = split_micro_batches(examples, self.training.micro_batch_tokens)
        return sum(float(self._sum_loss(micro_batch)) for micro_batch in micro_batches) / sum(
            len(example.answer) for example in examples
        )

    def _sum_loss(self, examples: Sequence[FitExample]) -> torch.Tensor:
        """Return the negative sum of the answers' log-probabilities."""
        scores = self.model.logprobs(
            [example.prompt for example in examples],
            [example.answer for example in examples],
            torch.ones(len(examples)),
            images=[example.images for example in examples],
        )
        return -scores.logprobs.sum()
