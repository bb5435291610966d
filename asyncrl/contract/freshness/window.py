"""The admission window: how far ahead tickets are granted, below the staleness limit.

A ticket that is granted early waits in the buffer and gets old; one that is granted late makes the
learner wait.  `next_window` chooses the smallest window that costs at most a target share of the
speed.  It replays the last batches with their measured times under other windows:

    granted[b]   = committed[b - w]                  w may be fractional: between two commits
    generated[b] = max(granted[b], generated[b - 1]) + load
    complete[b]  = generated[b] + latency[b] - load
    started[b]   = max(committed[b], complete[b])    committed[b]: batch b - 1 is trained
    committed[b + 1] = started[b] + work[b]

The latencies are those of whole batches, so their tail counts.  No window makes a step shorter than
the work of the slower side: the learner's on a batch, or that of the generators, which is the share
of their capacity in use times the step (`load`).  Latency is measured without the queue for the
reward processes, which is as long as the window makes it.

`BatchMeter` (meter.py) measures; `next_window` is a pure function of the measured times, which the
buffer's journal records.  contract/admission.py has the proof that any window keeps the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

FIRST = 2.0  # window of a run's first batches
GRAIN = 8  # windows are multiples of 1 / GRAIN
KEPT = 24  # batches whose times are replayed
SHIFT = 3  # so many batches far beyond all earlier ones: the earlier ones are forgotten
FAR = 1.25  # factor
GROWTH = 1.5  # a commit widens the window at most by this factor, or by one batch
SPARED = 0.25  # of the target share is left to lose if the generators are the slower side
SHRINKAGE = 0.9  # ... and narrows it at most by this one
LITTLE = 1 / 3  # of the target share: what the limit itself would gain at most, if it is reached


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


def admitted_batches(window: AdmissionWindow, now: float) -> int:
    """The whole number of batches granted ahead at `now`: rounded up from `opens` on.

    >>> window = AdmissionWindow(2.25, opens=10.0)
    >>> admitted_batches(window, 9.0), admitted_batches(window, 10.0)
    (2, 3)
    """
    up = math.ceil(window.size)
    return up if now >= window.opens else max(1, up - 1)


def replay_step(
    works: Sequence[float], latencies: Sequence[float], load: float, size: float
) -> float:
    """The mean step of batches with these times under a window of `size`.

    The batches are replayed again and again; the first half only fills the window.

    load: the generators' work on a batch.

    >>> replay_step([1.0] * 4, [2.0] * 4, 0.0, 1.0), replay_step([1.0] * 4, [2.0] * 4, 0.0, 2.0)
    (1.5, 1.0)
    >>> round(replay_step([1.0] * 4, [2.0] * 4, 0.0, 1.5), 2)
    1.2
    >>> replay_step([1.0] * 4, [3.0] * 4, 1.25, 9.0)
    1.25
    """
    whole = math.ceil(size) - 1
    part = size - whole
    usual = max(sum(works) / len(works), load)
    committed = [usual * number for number in range(-whole - 1, 1)]  # the newest is committed[-1]
    generated = 0.0
    half = math.ceil(KEPT / len(works)) * len(works)
    for number in range(2 * half):
        batch = number % len(works)
        granted = (1 - part) * committed[-1 - whole] + part * committed[-2 - whole]
        generated = max(granted, generated) + load
        complete = generated + max(0.0, latencies[batch] - load)
        committed.append(max(committed[-1], complete) + works[batch])
    return (committed[-1] - committed[-1 - half]) / half


def recent(timings: Sequence[BatchTiming]) -> Sequence[BatchTiming]:
    """The timings that describe the present: all, or the last SHIFT after a sudden change.

    Such a change is a generator that joins or ends, or rewards that slow down.  Then the last SHIFT
    latencies, or times of work, are all FAR above or FAR below every earlier one.
    """
    last, earlier = timings[-SHIFT:], timings[:-SHIFT]
    if len(earlier) < SHIFT:
        return timings
    for values, before in (
        ([x.latency for x in last], [x.latency for x in earlier]),
        ([x.step - x.wait for x in last], [x.step - x.wait for x in earlier]),
    ):
        if min(values) > FAR * max(before) or FAR * max(values) < min(before):
            return last
    return timings


def smallest_window(timings: Sequence[BatchTiming], share: float, most: float) -> float:
    """The smallest window up to `most` at which waiting costs at most `share` of the speed.

    Where a late sample makes that impossible, it is the smallest at which `most` would gain little.
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
    if step * (1 - share) > slower:  # the replay promised less waiting than there was
        share *= share * step / (step - slower)
    enough = max(
        slower / (1 - share),
        replay_step(works, latencies, load, most) / (1 - LITTLE * share),
    )
    low, high = GRAIN, math.floor(most * GRAIN)
    while low < high:
        middle = (low + high) // 2
        if replay_step(works, latencies, load, middle / GRAIN) <= enough:
            high = middle
        else:
            low = middle + 1
    return low / GRAIN


def next_window(
    window: AdmissionWindow, timing: BatchTiming, share: float, most: float, now: float
) -> AdmissionWindow:
    """The window after a commit at `now`.

    share: target of the learner's share of waiting, in (0, 1).
    most: the staleness limit, at least 1.

    >>> late = BatchTiming(step=2.0, wait=1.0, latency=2.5, handover=0.0, busy=0.2)
    >>> next_window(AdmissionWindow(), late, share=0.03, most=8.0, now=100.0).size
    2.5
    """
    if math.isnan(timing.latency):
        return msgspec.structs.replace(window, size=min(window.size, most), opens=now)
    timings = tuple(recent((*window.timings, timing)[-KEPT:]))
    least, largest = SHRINKAGE * window.size, max(window.size + 1, GROWTH * window.size)
    size = min(max(smallest_window(timings, share, most), least), largest, most)
    step = sum(timing.step for timing in timings) / len(timings)
    return AdmissionWindow(
        size=size,
        opens=now + (math.ceil(size) - size) * step,
        timings=timings,
        wait=sum(timing.wait for timing in timings) / (step * len(timings)),
        lower=smallest_window(timings, share / 2, most),
    )
