"""The admission window: how far ahead tickets are granted, below the staleness limit.

A ticket that is granted early waits in the buffer and gets old. A ticket that is granted late makes
the learner wait.  `next_window` chooses the smallest window that costs at most a target share of
the speed.  It replays the last batches with their measured times under other windows:

    granted[b]   = committed[b - w]                  w may be fractional: between two commits
    generated[b] = max(granted[b], generated[b - 1]) + load
    complete[b]  = generated[b] + latency[b] - load
    started[b]   = max(committed[b], complete[b])    committed[b]: batch b - 1 is trained
    committed[b + 1] = started[b] + work[b]

The latencies are those of whole batches, so their tail counts.  No window makes a step shorter than
the work of the slower side: the learner's on a batch, or that of the generators, which is the share
of their capacity in use times the step (`load`).  Latency is measured without the queue for the
reward processes, which is as long as the window makes it.

`BatchMeter` measures; `next_window` is a pure function of the measured times, which the
buffer's journal records.  contract/admission.py has the proof that any window keeps the limit."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

import msgspec

FIRST = 2.0  # window of a run's first batches
GRAIN = 8  # windows are multiples of 1 / GRAIN
KEPT = 24  # batches whose times are replayed
SHIFT = 3  # after this many batches far from all earlier ones, the earlier ones are forgotten
FAR = 1.25  # factor between times that are far apart
GROWTH = 1.5  # a commit widens the window at most by this factor, or by one batch
SHRINKAGE = 0.9  # a commit narrows the window at most by this factor
SPARED = 0.25  # part of the target share that applies if the generators are the slower side
# part of the target share: a window is large enough if the limit itself would gain at most this
LITTLE = 1 / 3
UNMEASURED = math.nan, math.nan
FULL = 0.9  # share of the reward processes in use from which samples wait for each other


class BatchTiming(msgspec.Struct, frozen=True, array_like=True):
    """The measured times of a committed batch, in seconds (decode steps in one process)."""

    step: float  # from the commit before to its own
    wait: float  # the part of `step` in which the learner waited for the batch
    latency: float  # from the grant of its tickets to its last sample; nan: unknown
    # from its last sample to the start of its training; nan: the learner was not waiting for it
    handover: float
    busy: float  # share of the generators' capacity in use


class AdmissionWindow(msgspec.Struct, frozen=True, array_like=True):
    """The window in force, and the measurements behind it."""

    size: float = FIRST  # batches that are granted ahead of the one in training
    opens: float = 0.0  # time from which a fractional window admits its last batch
    timings: tuple[BatchTiming, ...] = ()
    wait: float = 0.0  # the learner's share of waiting, mean over `timings`
    lower: float = FIRST  # the window that would cost half the target share


def count_open_batches(window: AdmissionWindow, now: float) -> int:
    """Count the batches granted ahead at `now`, rounded up from `opens` on.

    >>> window = AdmissionWindow(2.25, opens=10.0)
    >>> count_open_batches(window, 9.0), count_open_batches(window, 10.0)
    (2, 3)
    """
    batches = math.ceil(window.size)
    return batches if now >= window.opens else max(1, batches - 1)


def replay_step(
    works: Sequence[float], latencies: Sequence[float], load: float, size: float
) -> float:
    """Compute the mean step of batches with these times under a window of `size`.

    The batches are replayed again and again; the first half only fills the window.

    works, latencies: of each batch; times in the unit of `BatchTiming`.
    load: the generators' work on a batch.

    >>> replay_step([1.0] * 4, [2.0] * 4, 0.0, 1.0), replay_step([1.0] * 4, [2.0] * 4, 0.0, 2.0)
    (1.5, 1.0)
    >>> round(replay_step([1.0] * 4, [2.0] * 4, 0.0, 1.5), 2)
    1.2
    >>> replay_step([1.0] * 4, [3.0] * 4, 1.25, 9.0)
    1.25
    """
    full_batches = math.ceil(size) - 1
    fraction = size - full_batches
    mean_step = max(sum(works) / len(works), load)
    # the newest is committed[-1]
    committed = [mean_step * number for number in range(-full_batches - 1, 1)]
    generated = 0.0
    half = math.ceil(KEPT / len(works)) * len(works)
    for number in range(2 * half):
        batch = number % len(works)
        later, earlier = committed[-1 - full_batches], committed[-2 - full_batches]
        granted = (1 - fraction) * later + fraction * earlier
        generated = max(granted, generated) + load
        complete = generated + max(0.0, latencies[batch] - load)
        committed.append(max(committed[-1], complete) + works[batch])
    return (committed[-1] - committed[-1 - half]) / half


def select_recent(timings: Sequence[BatchTiming]) -> Sequence[BatchTiming]:
    """Select the timings that describe the present: all, or the last SHIFT after a change.

    Such a change is a generator that joins or ends, or rewards that slow down.  Then the last SHIFT
    latencies, or times of work, are all FAR above or FAR below every earlier one.
    """
    last, earlier = timings[-SHIFT:], timings[:-SHIFT]
    if len(earlier) < SHIFT:
        return timings
    latencies = [timing.latency for timing in timings]
    works = [timing.step - timing.wait for timing in timings]
    for values in (latencies, works):
        new, old = values[-SHIFT:], values[:-SHIFT]
        if min(new) > FAR * max(old) or FAR * max(new) < min(old):
            return last
    return timings


def find_smallest_window(timings: Sequence[BatchTiming], share: float, most: float) -> float:
    """Find the smallest window at which waiting costs at most `share` of the speed.

    If a late sample makes that impossible, it is the smallest at which `most` would gain little.

    timings: at least one.
    most: the largest possible window, in batches.
    """
    count = len(timings)
    works = [timing.step - timing.wait for timing in timings]
    handovers = [timing.handover for timing in timings if not math.isnan(timing.handover)]
    handover = sum(handovers) / len(handovers) if handovers else 0.0
    latencies = [timing.latency + handover for timing in timings]
    load = sum(timing.busy * timing.step for timing in timings) / count
    step = sum(timing.step for timing in timings) / count
    slower = max(sum(works) / count, load)
    share *= count / KEPT  # few batches have not shown the tail
    if load > sum(works) / count:
        share *= SPARED
    if step * (1 - share) > slower:  # the replay predicted less waiting than was measured
        share *= share * step / (step - slower)
    longest_step = max(
        slower / (1 - share), replay_step(works, latencies, load, most) / (1 - LITTLE * share)
    )

    def is_enough(size: int) -> bool:
        return replay_step(works, latencies, load, size / GRAIN) <= longest_step

    sizes = range(GRAIN, math.floor(most * GRAIN))
    return (GRAIN + bisect.bisect_left(sizes, True, key=is_enough)) / GRAIN


def next_window(
    window: AdmissionWindow, timing: BatchTiming, share: float, most: float, now: float
) -> AdmissionWindow:
    """Compute the window after a commit at `now`.

    timing: of the committed batch.
    share: target of the learner's share of waiting, in (0, 1).
    most: the staleness limit, at least 1.

    >>> late = BatchTiming(step=2.0, wait=1.0, latency=2.5, handover=0.0, busy=0.2)
    >>> next_window(AdmissionWindow(), late, share=0.03, most=8.0, now=100.0).size
    2.5
    """
    if math.isnan(timing.latency):
        return msgspec.structs.replace(window, size=min(window.size, most), opens=now)
    timings = tuple(select_recent((*window.timings, timing)[-KEPT:]))
    smallest, largest = SHRINKAGE * window.size, max(window.size + 1, GROWTH * window.size)
    size = min(max(find_smallest_window(timings, share, most), smallest), largest, most)
    step = sum(timing.step for timing in timings) / len(timings)
    return AdmissionWindow(
        size=size,
        opens=now + (math.ceil(size) - size) * step,
        timings=timings,
        wait=sum(timing.wait for timing in timings) / (step * len(timings)),
        lower=find_smallest_window(timings, share / 2, most),
    )


class BatchMeter:
    """Measures the timings of batches.

    The caller passes the time, in seconds or decode steps."""

    def __init__(self) -> None:
        # ticket -> times of its grant and of its last sample; nan: unknown, or it was granted twice
        # and its latency is that of an outage
        self.tickets: dict[int, tuple[float, float]] = {}
        self.last_commit = math.nan
        self.since = math.nan  # time up to which capacity is counted
        self.free = self.capacity = 0.0  # samples
        self.free_seconds = self.capacity_seconds = 0.0
        # name -> (scored samples, seconds that they waited, seconds of calls, time)
        self.rewards: dict[str, tuple[float, ...]] = {}
        # name -> (share of its reward processes in use, seconds that a sample waits for one)
        self.reward_load: dict[str, tuple[float, float]] = {}

    def on_grant(self, tickets: Iterable[int], now: float) -> None:
        """Record granted training tickets."""
        for ticket in tickets:
            granted = math.nan if ticket in self.tickets else now
            self.tickets[ticket] = granted, math.nan

    def on_complete(self, tickets: Iterable[int], now: float) -> None:
        """Record the tickets whose last sample arrived."""
        for ticket in tickets:
            granted, completed = self.tickets.get(ticket, UNMEASURED)
            self.tickets[ticket] = granted, now if math.isnan(completed) else completed

    def on_free(self, free: float, capacity: float, now: float) -> None:
        """Record the free capacity of the generators.

        free: samples requested and not granted, because the window leaves no room.
        capacity: samples that the generators hold at most."""
        if not math.isnan(self.since):
            self.free_seconds += min(self.free, self.capacity) * (now - self.since)
            self.capacity_seconds += self.capacity * (now - self.since)
        self.since, self.free, self.capacity = now, free, capacity

    def on_rewards(
        self, producer: str, numbers: Sequence[float], workers: float, now: float
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
        times = [self.tickets.get(ticket, UNMEASURED) for ticket in tickets]
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
        # also those that were filtered
        newest = max(tickets)
        self.tickets = {ticket: x for ticket, x in self.tickets.items() if ticket > newest}
        if math.isnan(previous_commit) or now <= previous_commit:
            return None
        step = now - previous_commit
        latency = handover = math.nan
        wait = waited_share * step
        if not any(math.isnan(time) for pair in times for time in pair):
            grants, ends = map(sorted, zip(*times, strict=True))
            # most of the batch: single groups come early if others were filtered
            latency = max(0.0, ends[-1] - grants[len(grants) // 4] - queue)
            if ends[-1] > previous_commit:
                handover = max(0.0, previous_commit + wait - ends[-1])
            else:
                wait = 0.0  # the batch was complete: the learner did not wait for samples
        return BatchTiming(step, wait, latency, handover, busy)
