"""What a learner carries from batch to batch beside weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class LearnerState:
    """Every rank has the same one; a checkpoint keeps it.  number: of the next batch; baseline:
    running mean of the rewards; beta: of the KL term; prompts: the running mean of each prompt's
    rewards, by the prompt's digest, with advantage.baseline = prompt.
    """

    number: int = 0
    baseline: float = 0.0
    beta: float = 0.0
    early_stops: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
    prompts: dict[str, float] = field(default_factory=dict)


class BatchCursor(msgspec.Struct, frozen=True):
    """What a learner's hello tells the buffer, so that both go on from the same batch; a checkpoint
    keeps it beside the `LearnerState`.

    next_ticket, ledger, trained_above, limit: as the last batch brought them; parent: epoch and
    number of the weights that it was trained on."""

    next_ticket: int = 0
    ledger: dict[str, dict[str, float]] = {}
    trained_above: list[int] = []
    parent: list[int] | None = None
    limit: int = 0

    def as_checkpoint(self) -> dict[str, Any]:
        """As a checkpoint keeps it, for `read`."""
        return msgspec.structs.asdict(self)

    @staticmethod
    def read(kept: dict[str, Any]) -> BatchCursor:
        """What a checkpoint kept; a name that an earlier program did not write has its default."""
        return msgspec.convert(kept, BatchCursor)
