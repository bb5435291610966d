"""What a learner carries from batch to batch beside weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class State:
    """Every rank has the same one; a checkpoint keeps it.  number: of the next batch; baseline:
    running mean of the rewards; beta: of the KL term.
    """

    number: int = 0
    baseline: float = 0.0
    beta: float = 0.0
    early_stops: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
