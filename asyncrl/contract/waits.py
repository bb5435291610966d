"""Who waits for whom; when is a run stuck, and who holds it up?  Pure: time is an argument.

Progress means commits, evaluation answers, and between two commits the samples of one batch; never
heartbeats.  A run is overdue when none came for `multiple` medians of its own steps, at least
`floor_s`; before the first commit, `startup_s`."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from asyncrl.contract.printable import LONGEST_LINE, escape_line

BUFFER = "buffer"  # the process that most waits are for
KEPT = 50  # steps whose median counts
HOLDS_S = 5.0  # a session open for less, or waiting for the engine for less, holds nobody up


class ProcessWait(NamedTuple):
    """One process waits.  Made by the one that waits, or by the buffer of a learner's batch; read
    by the logs, the watchdog, the live view and `asyncrl doctor`.

    It travels as its age, in seconds: clocks of two hosts have nothing in common."""

    who: str
    what: str
    on: str  # the process that holds what it waits for
    seconds: float

    @property
    def is_internal(self) -> bool:
        """Is it for a part of the same process, as `generator-0-rewards` is of `generator-0`?"""
        return self.on.startswith(f"{self.who}-")


# what a session waits for; all but the engine has a deadline of its own
SessionWait = Literal["environment", "agent", "engine", "reward", "place", "grant"]


class OpenSession(msgspec.Struct, frozen=True, array_like=True):
    """A session of an agent that has not ended, as its gateway tells of it; or a sample that none
    has begun (name "").

    Made by the gateway; kept by the buffer, in whose words a learner that waits for it hears of
    it."""

    ticket: int
    sample: int
    name: str
    task: str  # its prompt: number, first characters
    turn: int  # calls so far
    kind: SessionWait
    what: str  # the same in words
    seconds: float  # that it has waited so
    open_s: float
    limit: str = ""  # the key that ends this wait; "": none does
    ends_s: float = 0.0  # seconds until then

    @property
    def bounded(self) -> bool:
        """Does a deadline of its own end the wait?  Then nobody else need do it."""
        return self.kind != "engine" and bool(self.limit) and self.ends_s > 0


class BlockingSession(msgspec.Struct, frozen=True):
    """The session that a learner waits for: the oldest ticket of its batch is the session's.

    usual_s: within which 95 % of sessions end; step_s: of the learner, without its waits; max_lag:
    the limit with which it would not wait, 0 where that is not known, or would change nothing."""

    session: OpenSession
    producer: str
    usual_s: float = 0.0
    step_s: float = 0.0
    max_lag: int = 0

    def describe(self) -> str:
        """In a line.

        >>> one = OpenSession(17, 3, "17.3.41", "prompt 5 'ab='", 6, "environment",
        ...     "the step of its environment", 209.0, 212.0, "agent.step_s", 88.0)
        >>> held = BlockingSession(one, "gateway-0", 150.0, 35.0, 7)
        >>> print(held.describe().replace("; ", ";\\n  ").replace(": ", ":\\n  "))
        the learner is held up by session 17.3.41 (prompt 5 'ab=', turn 6):
          it has waited 209 s for the step of its environment;
          agent.step_s ends that in 88 s;
          staleness.max_lag >= 7 would not wait (open for 212 s, a step takes 35 s)
        """
        one = self.session
        who = (
            f"session {one.name} ({one.task}, turn {one.turn})"
            if one.name
            else f"sample {one.sample} of ticket {one.ticket} ({one.task})"
        )
        parts = [
            f"the learner is held up by {who}: it has waited {one.seconds:.0f} s for {one.what}"
        ]
        if one.limit:
            parts.append(f"{one.limit} ends that in {one.ends_s:.0f} s")
        if self.max_lag:
            usual = (
                f"open for {one.open_s:.0f} s"
                if one.open_s >= self.usual_s
                else f"95 % of sessions end within {self.usual_s:.0f} s"
            )
            parts.append(
                f"staleness.max_lag >= {self.max_lag} would not wait ({usual}, a step takes "
                f"{self.step_s:.2g} s)"
            )
        return "; ".join(parts)


def find_blocking_session(
    sessions: Mapping[str, Sequence[OpenSession]],
    ticket: int,
    *,
    usual_s: float,
    step_s: float,
    max_lag: float,
) -> BlockingSession | None:
    """Who holds a batch up that waits for `ticket` (-1: for any), of the sessions that each gateway
    tells of; None where no session does.

    A session of length D needs no wait at a limit k with D <= k * S, S a step: whoever waits for an
    engine waits for throughput, which no limit gives."""
    found = [
        (one.ticket, name, one)
        for name, each in sessions.items()
        for one in each
        if ticket in (-1, one.ticket)
        and (one.seconds if one.kind == "engine" else one.open_s) >= HOLDS_S
    ]
    if not found:
        return None
    _, name, one = min(found, key=lambda x: x[:2])
    needed = math.ceil(max(one.open_s, usual_s) / step_s) if step_s > 0 else 0
    if one.kind == "engine" or needed <= max_lag:
        needed = 0
    return BlockingSession(one, name, usual_s, step_s, needed)


@dataclass
class ProgressWatchdog:
    """observe(...) at every status; `overdue` says since when, and the arithmetic of the deadline.

    >>> w = ProgressWatchdog(multiple=10, floor_s=1, startup_s=60)
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

    def reset_deadline(self, now: float) -> None:
        """What it waits for now has a deadline of its own: this time does not count."""
        self.since = now

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
    >>> log.lines([ProcessWait("learner", "batch 3", "buffer", 9.0)])
    []
    >>> log.lines([ProcessWait("learner", "batch 3", "buffer", 11.0)])
    ['learner has waited for buffer for 11 s: batch 3']
    >>> log.lines([ProcessWait("learner", "batch 3", "buffer", 19.0)])
    []
    >>> log.lines([ProcessWait("learner", "batch 3", "buffer", 23.0)])
    ['learner has waited for buffer for 23 s: batch 3']
    """

    first_s: float = 10.0
    said: dict[tuple[str, str], float] = field(default_factory=dict)

    def lines(self, waits: Sequence[ProcessWait]) -> list[str]:
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
            escape_line(
                f"{wait.who} has waited for {wait.on} for {wait.seconds:.0f} s: {wait.what}",
                LONGEST_LINE,
            )
            for wait in due
        ]


def blocking_process(
    names: Sequence[str],
    waits: Sequence[ProcessWait],
    peers: Mapping[str, float],
    buffer_silent: float,
    patience: float,
) -> str:
    """The process that holds the run up: a silent buffer; else the most silent peer; else one that
    waits for nobody; else none.

    >>> both = ["learner", "generator-0"]
    >>> waits = [ProcessWait("learner", "batch 3", "buffer", 9.0)]
    >>> blocking_process(both, waits, {"learner": 0.1, "generator-0": 9.0}, 0.1, 5.0)
    'generator-0'
    >>> heard = {"learner": 0.4, "generator-0": 0.1}
    >>> waiting = ProcessWait("generator-0", "a ticket", "buffer", 9.0)
    >>> blocking_process(both, [waiting], heard, 0.1, 5.0)
    'learner'
    >>> waits += [ProcessWait("generator-0", "the rewards", "generator-0-rewards", 9.0)]
    >>> blocking_process(both, waits, heard, 0.1, 5.0)
    'generator-0'
    """
    if buffer_silent > patience:
        return "buffer"
    silent = {name: peers.get(name, float("inf")) for name in names}
    if silent and max(silent.values()) > patience:
        return max(silent, key=lambda n: silent[n])
    # who waits for a part of itself, its rewards, waits for nobody
    waiting = {wait.who for wait in waits if not wait.is_internal}
    return next((n for n in names if n not in waiting), "")
