"""Supervised training: the next-token loss on given answers, one optimizer step at a time.

Examples are packed if the model has a packed forward: linear layers process no padding, and
attention pads only within a micro-batch.  The warm start of tiny models and `asyncrl sft` both use
this module."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import compute_learning_rate_share
from asyncrl.contract.errors import NotFiniteError
from asyncrl.models.policy import PolicyModel
from asyncrl.models.trainer import Trainer, split_micro_batches


class FitExample(NamedTuple):
    """One example of supervised training.

    prompt: int32 [P], not in the loss.
    answer: int32 [T], in the loss, with its end token.
    images: the blobs of the prompt's image tokens.
    given: the first tokens of the answer that are not in the loss."""

    prompt: np.ndarray
    answer: np.ndarray
    images: Sequence[bytes] = ()
    given: int = 0

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


def split_examples(examples: Sequence[FitExample], limit: int) -> list[list[FitExample]]:
    """Split `examples` into passes of at most `limit` tokens, padded to the longest of each.

    If one pass is enough, the order stays; otherwise the examples are sorted by length.  An example
    with more than `limit` tokens gets its own pass."""
    widths = [example.size for example in examples]
    order = list(range(len(examples)))
    if len(order) * max(widths) > limit:
        order.sort(key=widths.__getitem__)
    micros = split_micro_batches(order, widths, limit, rows=math.inf)
    return [[examples[index] for index in micro] for micro in micros]


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
    """A model with its trainer; `number` counts the steps.

    rate: the learning rate of a step; None: by the keys of `training`."""

    def __init__(
        self, model: PolicyModel, training: SftTraining, rate: Callable[[int], float] | None = None
    ) -> None:
        self.model = model
        self.training = training
        self.rate = rate or (lambda step: training.lr * compute_learning_rate_share(training, step))
        self.number = 0
        self.trainer = Trainer(model.hf.parameters(), training)

    def step(self, examples: Sequence[FitExample]) -> float:
        """Make one optimizer step on `examples`; return its loss in nats per answer token.

        If it raises NotFiniteError, the weights are unchanged."""
        self.model.hf.train()
        tokens = sum(len(example.answer) - example.given for example in examples)
        self.trainer.drop_gradient()
        total = torch.zeros((), dtype=torch.double)
        for micro_batch in split_examples(examples, self.training.micro_batch_tokens):
            loss = self._sum_loss(micro_batch) / tokens
            self.trainer.accumulate(loss)
            total += loss.detach().cpu()
        if not math.isfinite(self.trainer.apply(self.rate(self.number), total)):
            raise NotFiniteError(
                f"the loss or its gradient is not finite in step {self.number}: training.lr = "
                f"{self.training.lr:g} is too large"
            )
        self.number += 1
        return float(total)

    @torch.no_grad()
    def measure_loss(self, examples: Sequence[FitExample]) -> float:
        """Return the mean loss on `examples` in nats per answer token, without training."""
        self.model.hf.eval()
        micro_batches = split_examples(examples, self.training.micro_batch_tokens)
        return sum(float(self._sum_loss(micro_batch)) for micro_batch in micro_batches) / sum(
            len(example.answer) - example.given for example in examples
        )

    def _sum_loss(self, examples: Sequence[FitExample]) -> torch.Tensor:
        """Return the negative sum of the answers' log-probabilities."""
        scores = self.model.logprobs(
            [example.prompt for example in examples],
            [example.answer for example in examples],
            torch.ones(len(examples)),
            groups=[id(example.prompt) for example in examples],
            images=[example.images for example in examples],
        )
        in_loss = np.concatenate([np.arange(len(x.answer)) >= x.given for x in examples])
        return -(scores.logprobs * torch.from_numpy(in_loss).to(scores.logprobs.device)).sum()
