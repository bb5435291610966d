"""State that a learner carries from batch to batch, besides weights and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.contract.errors import DamagedDataError
from asyncrl.contract.messages import MixturePosition
from asyncrl.models.adapters import replace_values
from learner.backend import TorchBackend


@dataclass
class LearnerState:
    """Learner state, equal on every rank and kept in checkpoints.

    number: of the next batch.
    baseline: running mean of the rewards.
    beta: coefficient of KL in the reward.
    prompts: running mean of each prompt's rewards by the prompt's digest, with advantage.baseline =
        prompt.
    steps: learner.steps of the last batch, for the learning rate; 0: unknown.
    """

    number: int = 0
    baseline: float = 0.0
    beta: float = 0.0
    early_stops: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
    prompts: dict[str, float] = field(default_factory=dict)
    steps: int = 0


class BatchCursor(msgspec.Struct, frozen=True):
    """Position in the stream of batches, sent in a learner's hello and kept in checkpoints.

    next_ticket, ledger, trained_above, limit, window, mixture: from the last batch.
    parent: epoch and number of the weights that batch was trained on.
    """

    next_ticket: int = 0
    ledger: dict[str, dict[str, float]] = {}
    trained_above: list[int] = []
    parent: list[int] | None = None
    limit: int = 0
    window: float = 0.0
    mixture: MixturePosition | None = None

    @staticmethod
    def read(fields: dict[str, Any]) -> BatchCursor:
        """Read a checkpoint's cursor; names that an earlier version did not write get defaults."""
        return msgspec.convert(fields, BatchCursor)


class WeightAverage:
    """Exponential average of the trained weights over versions, in float32 (arXiv 2110.00641).

    Version k of n has the weight 0.5 ** ((n - k) / half_life) over the sum of all. Each rank keeps
    its parts of the parameters.
    """

    def __init__(self, backend: TorchBackend, half_life: float) -> None:
        self.backend = backend
        self.decay = 0.5 ** (1 / half_life)
        self.values = [part.float().clone() for part in backend.list_parts()]

    def add(self, number: int) -> None:
        """Add the weights of version `number`."""
        share = (1 - self.decay) / (1 - self.decay ** (number + 1))
        parts = [part.float() for part in self.backend.list_parts()]
        torch._foreach_lerp_(self.values, parts, share)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Give the model the average weights inside the block."""
        self.backend.release_gathered()
        with replace_values(self.backend.list_parts(), self.values):
            yield
            self.backend.release_gathered()

    def locate(self, directory: Path) -> Path:
        """Return the file of this rank's values in a checkpoint; whole ones are equal."""
        return directory / f"average_{self.backend.rank if self.backend.sharded else 0}.pt"

    def load(self, directory: Path) -> None:
        """Load from a checkpoint.  Raises DamagedDataError where it has no such parts."""
        file = self.locate(directory)
        values = torch.load(file, "cpu", weights_only=True) if file.exists() else []
        if [x.shape for x in values] != [x.shape for x in self.values]:
            raise DamagedDataError(
                f"checkpoint {directory} has no average of these weights (correction.proximal = "
                "ema): continue with the correction.proximal, learner.backend and learner.ranks "
                "it was made with, or replay from version 0"
            )
        torch._foreach_copy_(self.values, values)
