"""State that a learner carries from batch to batch, besides weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncrl.contract.messages import MixturePosition


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

    def as_checkpoint(self) -> dict[str, Any]:
        """Return the form that a checkpoint keeps and `read` reads."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @staticmethod
    def read(fields: dict[str, Any]) -> BatchCursor:
        """Read a checkpoint's cursor; names that an earlier version did not write get defaults."""
        return msgspec.convert(fields, BatchCursor)
