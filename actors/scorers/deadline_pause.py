"""Pauses of a call's deadline, shared by reward processes and the judge client.

A call's deadline excludes waits that the call did not cause. The end of the run's judge budget is
defined here too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from asyncrl.contract.errors import ConfigError


class JudgeBudgetSpent(ConfigError):
    """The run's judge budget is used up: no further request is sent and the run ends."""


class DeadlinePause:
    """The waits of one call; overlapping waits count once."""

    def __init__(self) -> None:
        self.total = 0.0  # seconds of finished waits
        self.depth = 0
        self.began: float  # of the present wait

    def count_seconds(self, now: float) -> float:
        """Return the seconds of all waits until `now` (CLOCK_MONOTONIC)."""
        return self.total + (now - self.began if self.depth else 0.0)


current_pause: ContextVar[DeadlinePause | None] = ContextVar("held", default=None)


@contextmanager
def pause_deadline() -> Iterator[None]:
    """Pause the current call's deadline inside the `with` block."""
    pause = current_pause.get()
    if pause is None:
        yield
        return
    if not pause.depth:
        pause.began = time.monotonic()
    pause.depth += 1
    try:
        yield
    finally:
        pause.depth -= 1
        if not pause.depth:
            pause.total += time.monotonic() - pause.began
