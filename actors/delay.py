"""Artificial latency (`staleness.delay`): hold finished samples until due."""

from __future__ import annotations

import heapq
from typing import Any

from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract.messages import Ticket


def compute_delay_steps(config: Config, ticket: Ticket, sample: int, tokens: int) -> float:
    """Compute by how many decode steps a sample of `tokens` tokens is late.

    The delay is a factor per token, as if each token had taken that much longer; 0 for evaluation.
    """
    if ticket.kind != "train" or not config.staleness.delay:
        return 0.0
    scope = (ticket.ticket, sample) if config.staleness.delay_of == "answer" else (ticket.ticket,)
    return tokens * admission.sample_delay(config.staleness.delay, ticket.seed, *scope)


class DelayQueue:
    """Items by the time at which they are due, in the caller's unit."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._count = 0

    def hold(self, due_at: float, item: Any) -> None:
        """Hold the item until `due_at`."""
        self._count += 1
        heapq.heappush(self._heap, (due_at, self._count, item))

    def pop_due(self, now: float) -> list[Any]:
        """Remove and return the items that are due, the earliest first."""
        items = []
        while self._heap and self._heap[0][0] <= now:
            items.append(heapq.heappop(self._heap)[2])
        return items

    @property
    def next_due(self) -> float:
        """When the earliest item is due; inf when the queue is empty."""
        return self._heap[0][0] if self._heap else float("inf")
