"""Measure the times of batches, from which the admission window follows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from asyncrl.contract.freshness.window import BatchTiming

FULL = 0.9  # share of the reward processes in use from which samples wait for each other


class BatchMeter:
    """Measures the timings of batches.

    The caller passes the time, in seconds or decode steps."""

    def __init__(self) -> None:
        self.granted: dict[int, float] = {}  # ticket -> time of its grant
        # tickets that were granted twice: their latency is that of an outage
        self.lost: set[int] = set()
        self.completed: dict[int, float] = {}  # ticket -> time of its last sample
        self.last_commit = math.nan
        self.since = math.nan  # time up to which capacity is counted
        self.free = self.capacity = 0.0  # samples
        self.free_seconds = self.capacity_seconds = 0.0
        # name -> (scored samples, seconds that they waited, seconds of calls, time)
        self.rewards: dict[str, tuple[float, float, float, float]] = {}
        # name -> (share of its reward processes in use, seconds that a sample waits for one)
        self.reward_load: dict[str, tuple[float, float]] = {}

    def on_grant(self, tickets: Iterable[int], now: float) -> None:
        """Record granted training tickets."""
        for ticket in tickets:
            if ticket in self.granted:
                self.lost.add(ticket)
            self.granted.setdefault(ticket, now)

    def on_complete(self, tickets: Iterable[int], now: float) -> None:
        """Record the tickets whose last sample arrived."""
        for ticket in tickets:
            self.completed.setdefault(ticket, now)

    def on_free(self, free: float, capacity: float, now: float) -> None:
        """Record the free capacity of the generators.

        free: samples requested and not granted, because the window leaves no room.
        capacity: samples that the generators hold at most."""
        if not math.isnan(self.since):
            self.free_seconds += min(self.free, self.capacity) * (now - self.since)
            self.capacity_seconds += self.capacity * (now - self.since)
        self.since, self.free, self.capacity = now, free, capacity

    def on_rewards(
        self, producer: str, numbers: tuple[float, float, float], workers: float, now: float
    ) -> None:
        """Record the rewards of a generator so far, and its number of reward processes.

        numbers: samples scored, seconds from their submission to the result, seconds of calls."""
        *previous, since = self.rewards.get(producer, (*numbers, now))
        self.rewards[producer] = *numbers, now
        scored, waited_s, called_s = (
            number - earlier for number, earlier in zip(numbers, previous, strict=True)
        )
        if workers and scored > 0 and now > since:
            busy = min(1.0, called_s / (workers * (now - since)))
            queue = max(0.0, waited_s - called_s) / scored
            self.reward_load[producer] = busy, queue

    def on_commit(
        self, tickets: Sequence[int], waited_share: float, now: float
    ) -> BatchTiming | None:
        """Compute the timing of a committed batch; None for the first one.

        tickets: of the batch.
        waited_share: share of the learner's step in which it waited for the batch."""
        self.on_free(self.free, self.capacity, now)
        grants = sorted(self.granted[ticket] for ticket in tickets if ticket in self.granted)
        ends = [self.completed[ticket] for ticket in tickets if ticket in self.completed]
        is_measured = len(grants) == len(ends) == len(tickets) and self.lost.isdisjoint(tickets)
        previous_commit, self.last_commit = self.last_commit, now
        busy = 1.0 - self.free_seconds / self.capacity_seconds if self.capacity_seconds else 0.0
        queue = 0.0
        if self.reward_load:
            loads = self.reward_load.values()
            reward_busy = sum(load[0] for load in loads) / len(loads)
            busy = max(busy, reward_busy)
            if reward_busy > FULL:
                queue = sum(load[1] for load in loads) / len(loads)
        self.free_seconds = self.capacity_seconds = 0.0
        self._forget(max(tickets))
        if math.isnan(previous_commit) or now <= previous_commit:
            return None
        step = now - previous_commit
        latency = handover = math.nan
        wait = waited_share * step
        if is_measured:
            # most of the batch: single groups come early if others were filtered
            latency = max(0.0, max(ends) - grants[len(grants) // 4] - queue)
            if max(ends) > previous_commit:
                handover = max(0.0, previous_commit + wait - max(ends))
            else:
                wait = 0.0  # the batch was complete: the learner did not wait for samples
        return BatchTiming(step, wait, latency, handover, busy)

    def _forget(self, newest: int) -> None:
        """Forget the tickets up to `newest`, also those that were filtered."""
        self.granted = {ticket: time for ticket, time in self.granted.items() if ticket > newest}
        self.completed = {
            ticket: time for ticket, time in self.completed.items() if ticket > newest
        }
        self.lost = {ticket for ticket in self.lost if ticket > newest}
