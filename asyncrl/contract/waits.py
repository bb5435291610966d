"""Who waits for whom; when is a run stuck, and who holds it up?  Pure: time is an argument.

Progress means commits, evaluation answers, and between two commits the samples of one batch; never
heartbeats.  A run is overdue when none came for `multiple` medians of its own steps, at least
`floor_s`; before the first commit, `startup_s`."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BUFFER = "buffer"  # the process that most waits are for
KEPT = 50  # steps whose median counts


class Wait(NamedTuple):
    """One process waits.  Made by the one that waits, or by the buffer of a learner's batch; read
    by the logs, the watchdog, the live view and `asyncrl doctor`.

    It travels as its age, in seconds: clocks of two hosts have nothing in common."""

    who: str
    what: str
    on: str  # the process that holds what it waits for
    seconds: float

    @property
    def within(self) -> bool:
        """Is it for a part of the same process, as `generator-0-rewards` is of `generator-0`?"""
        return self.on.startswith(f"{self.who}-")


@dataclass
class Watchdog:
    """observe(...) at every status; `overdue` says since when, and the arithmetic of the deadline.

    >>> w = Watchdog(multiple=10, floor_s=1, startup_s=60)
    >>> w.observe(0, 0, 0.0); w.overdue(59.0)
    ''
    >>> for n in range(1, 5): w.observe(n, n, 60.0 + 0.5 * n)
    >>> w.overdue(66.0)
    ''
    >>> print(w.overdue(68.0).replace(": ", ":\\n  "))
    no commit and no evaluation answer for 6.0 s (deadline 5.0 s:
      10 medians of 0.50 s, at least 1 s)
    """

    multiple: float
    floor_s: float
    startup_s: float
    progress: int = -1
    committed: int = 0
    since: float = 0.0
    last_commit: float | None = None
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def observe(self, progress: int, committed: int, now: float) -> None:
        """progress: any number that changes with every commit and evaluation answer; committed:
        batches; now in seconds.
        """
        if progress != self.progress:
            self.progress = progress
            self.since = now
        if committed > self.committed:
            if self.last_commit is not None:
                self.steps.append((now - self.last_commit) / (committed - self.committed))
            self.last_commit = now
        self.committed = committed

    def restart(self, now: float) -> None:
        """A process is being started again: it gets the time of a start."""
        self.since = now
        self.last_commit = None
        self.steps.clear()

    @property
    def deadline(self) -> float:
        return (
            max(self.floor_s, self.multiple * statistics.median(self.steps))
            if self.steps
            else self.startup_s
        )

    def overdue(self, now: float) -> str:
        """What is wrong, with the arithmetic; empty while nothing is."""
        if (silent := now - self.since) <= self.deadline:
            return ""
        if not self.steps:
            return (
                f"no commit and no evaluation answer for {silent:.1f} s (grace of a start: "
                f"watchdog.startup_s = {self.startup_s:g} s)"
            )
        median = statistics.median(self.steps)
        return (
            f"no commit and no evaluation answer for {silent:.1f} s (deadline {self.deadline:.1f} "
            f"s: {self.multiple:g} medians of {median:.2f} s, "
            f"at least {self.floor_s:g} s)"
        )


@dataclass
class WaitLog:
    """Lines for a process's log: a wait that has lasted `first_s` seconds, then again each time its
    age has doubled.

    The processes use 10 s, or half of watchdog.floor_s if that is less: it is said before the
    deadline passes.

    >>> log = WaitLog(first_s=10)
    >>> log.lines([Wait("learner", "batch 3", "buffer", 9.0)])
    []
    >>> log.lines([Wait("learner", "batch 3", "buffer", 11.0)])
    ['learner has waited for buffer for 11 s: batch 3']
    >>> log.lines([Wait("learner", "batch 3", "buffer", 19.0)])
    []
    >>> log.lines([Wait("learner", "batch 3", "buffer", 23.0)])
    ['learner has waited for buffer for 23 s: batch 3']
    """

    first_s: float = 10.0
    said: dict[tuple[str, str], float] = field(default_factory=dict)

    def lines(self, waits: Sequence[Wait]) -> list[str]:
        """waits: all there are now; those not among them have ended."""
        keys = {(wait.who, wait.what) for wait in waits}
        self.said = {key: age for key, age in self.said.items() if key in keys}
        due = [
            wait
            for wait in waits
            if wait.seconds >= self.said.get((wait.who, wait.what), self.first_s)
        ]
        self.said |= {(wait.who, wait.what): 2 * wait.seconds for wait in due}
        return [
            f"{wait.who} has waited for {wait.on} for {wait.seconds:.0f} s: {wait.what}"
            for wait in due
        ]


def culprit(
    names: Sequence[str],
    waits: Sequence[Wait],
    peers: Mapping[str, float],
    buffer_silent: float,
    patience: float,
) -> str:
    """The process that holds the run up: a silent buffer; else the most silent peer; else one that
    waits for nobody; else none.

    >>> both = ["learner", "generator-0"]
    >>> waits = [Wait("learner", "batch 3", "buffer", 9.0)]
    >>> culprit(both, waits, {"learner": 0.1, "generator-0": 9.0}, 0.1, 5.0)
    'generator-0'
    >>> heard = {"learner": 0.4, "generator-0": 0.1}
    >>> culprit(both, [Wait("generator-0", "a ticket", "buffer", 9.0)], heard, 0.1, 5.0)
    'learner'
    >>> waits += [Wait("generator-0", "the rewards of its answers", "generator-0-rewards", 9.0)]
    >>> culprit(both, waits, heard, 0.1, 5.0)
    'generator-0'
    """
    if buffer_silent > patience:
        return "buffer"
    silent = {name: peers.get(name, float("inf")) for name in names}
    if silent and max(silent.values()) > patience:
        return max(silent, key=lambda n: silent[n])
    # who waits for a part of itself, its rewards, waits for nobody
    waiting = {wait.who for wait in waits if not wait.within}
    return next((n for n in names if n not in waiting), "")
