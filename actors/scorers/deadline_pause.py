"""What a reward process and a judge have to agree on: waits that a call's deadline does not count,
as they are no fault of the call's; and the end of the run's budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from asyncrl.contract.errors import ConfigError


class JudgeBudgetSpent(ConfigError):
    """The run's budget is used up: nothing more is sent, and the run ends."""


class DeadlinePause:
    """The waits of one call, those of its parts side by side counted once."""

    def __init__(self) -> None:
        self.total = 0.0  # seconds of waits that are over
        self.depth = 0
        self.began = 0.0

    def seconds(self, now: float) -> float:
        return self.total + (now - self.began if self.depth else 0.0)


of_this_call: ContextVar[DeadlinePause | None] = ContextVar("held", default=None)


@contextmanager
def waiting() -> Iterator[None]:
    """Around what is waited for."""
    held = of_this_call.get()
    if held is None:
        yield
        return
    if not held.depth:
        held.began = time.monotonic()
    held.depth += 1
    try:
        yield
    finally:
        held.depth -= 1
        if not held.depth:
            held.total += time.monotonic() - held.began
