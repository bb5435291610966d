"""Answers that come late on purpose (`staleness.delay`): finished ones wait here until their time
has come.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract.messages import Ticket

Item = TypeVar("Item")


def decode_steps(config: Config, ticket: Ticket, sample: int, tokens: int) -> float:
    """Decode steps by which answer `sample` of `tokens` to `ticket` comes late, as if each token
    had taken so much longer; 0 for evaluation.
    """
    if ticket.kind != "train":
        return 0.0
    whose = (ticket.ticket, sample) if config.staleness.delay_of == "answer" else (ticket.ticket,)
    return tokens * admission.delay(config.staleness.delay, ticket.seed, *whose)


class DelayQueue(Generic[Item]):
    """What is held, by the time (in whatever unit the caller counts) at which it is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._held = 0

    def hold(self, until: float, what: Item) -> None:
        self._held += 1
        heapq.heappush(self._heap, (until, self._held, what))

    def due(self, now: float) -> list[Item]:
        """Give back what is due, the earliest first."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            out.append(heapq.heappop(self._heap)[2])
        return out

    @property
    def next_due(self) -> float:
        """When the earliest is due; inf: nothing is held."""
        return self._heap[0][0] if self._heap else float("inf")
