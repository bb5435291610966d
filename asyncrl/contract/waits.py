"""Waits of processes, and the detection of a stuck run. Pure functions: time is an argument.

Progress means commits, evaluation completions, and between two commits the samples of one batch,
but never heartbeats.  A run is overdue after `multiple` medians of its own steps without progress,
at least `floor_s`; before the first commit, after `startup_s`."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.contract.versions import Count

BUFFER = "buffer"  # most waits are for this process
KEPT = 50  # number of steps in the median
Text = Annotated[str, Meta(max_length=1 << 16)]
SessionText = Annotated[str, Meta(max_length=1000)]
NonNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
HOLDS_S = 5.0  # a session blocks a batch only if it is open, or waits for the engine, for longer


class ProcessWait(NamedTuple):
    """The wait of one process for another.

    Made by the waiting process, or by the buffer for a learner's batch; read by the logs, the
    watchdog, the live view and `asyncrl doctor`.  It is sent as its age, because clocks of two
    hosts are not comparable."""

    who: Text  # the waiting process
    what: Text  # the thing that it waits for
    on: Text  # the process that must act
    seconds: NonNegative  # age of the wait

    @property
    def is_internal(self) -> bool:
        """Whether it waits for a part of itself, like `generator-0` for `generator-0-rewards`."""
        return self.on.startswith(f"{self.who}-")


# what a session waits for; all but the engine have their own deadlines
SessionWait = Literal["environment", "agent", "engine", "reward", "place", "grant"]


class OpenSession(msgspec.Struct, frozen=True, array_like=True):
    """An agent's session that has not ended, or a sample without a session yet (name "").

    Made by the gateway; the buffer uses it to explain a learner's wait."""

    ticket: int
    sample: int
    name: SessionText
    task: SessionText  # its prompt: number, first characters
    turn: Count  # calls so far
    kind: SessionWait
    what: SessionText  # the same in words
    seconds: NonNegative  # duration of this wait
    open_s: NonNegative
    limit: SessionText = ""  # the config key whose deadline ends this wait; "": no deadline
    ends_s: NonNegative = 0.0  # seconds until that deadline

    @property
    def is_bounded(self) -> bool:
        """Whether its own deadline ends the wait, so that no other process has to act."""
        return self.kind != "engine" and bool(self.limit) and self.ends_s > 0


class BlockingSession(msgspec.Struct, frozen=True):
    """The session that a learner waits for: the oldest incomplete ticket of its batch."""

    session: OpenSession
    producer: Text
    usual_s: float = 0.0  # 95 % of sessions end within this time
    step_s: float = 0.0  # of the learner, without its waits
    max_lag: int = 0  # the limit at which it would not wait; 0: unknown, or no limit helps

    def describe(self) -> str:
        """Describe the wait in one line.

        >>> session = OpenSession(17, 3, "17.3.41", "prompt 5 'ab='", 6, "environment",
        ...     "the step of its environment", 209.0, 212.0, "agent.step_s", 88.0)
        >>> blocking = BlockingSession(session, "gateway-0", 150.0, 35.0, 7)
        >>> print(blocking.describe().replace("; ", ";\\n  ").replace(": ", ":\\n  "))
        the learner is held up by session 17.3.41 (prompt 5 'ab=', turn 6):
          it has waited 209 s for the step of its environment;
          agent.step_s ends that in 88 s;
          staleness.max_lag >= 7 would not wait (open for 212 s, a step takes 35 s)
        """
        session = self.session
        blocker = f"sample {session.sample} of ticket {session.ticket} ({session.task})"
        if session.name:
            blocker = f"session {session.name} ({session.task}, turn {session.turn})"
        parts = [
            f"the learner is held up by {blocker}: it has waited {session.seconds:.0f} s for "
            f"{session.what}"
        ]
        if session.limit:
            parts.append(f"{session.limit} ends that in {session.ends_s:.0f} s")
        if self.max_lag:
            duration = f"95 % of sessions end within {self.usual_s:.0f} s"
            if session.open_s >= self.usual_s:
                duration = f"open for {session.open_s:.0f} s"
            parts.append(
                f"staleness.max_lag >= {self.max_lag} would not wait ({duration}, a step takes "
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
    """Find the session that blocks a batch, or None.

    A session of duration D does not block at a limit k with D <= k * S, S the duration of a step.
    A session that waits for the engine lacks throughput, which no limit can provide.

    sessions: gateway -> its open sessions.
    ticket: the ticket that the batch waits for; -1: any.
    usual_s, step_s: see `BlockingSession`. max_lag: the current limit."""
    blocking = [
        (session.ticket, name, session)
        for name, open_sessions in sessions.items()
        for session in open_sessions
        if ticket in (-1, session.ticket)
        and (session.seconds if session.kind == "engine" else session.open_s) >= HOLDS_S
    ]
    if not blocking:
        return None
    _, name, oldest = min(blocking, key=lambda entry: entry[:2])
    needed_lag = math.ceil(max(oldest.open_s, usual_s) / step_s) if step_s > 0 else 0
    if oldest.kind == "engine" or needed_lag <= max_lag:
        needed_lag = 0
    return BlockingSession(oldest, name, usual_s, step_s, needed_lag)


@dataclass
class ProgressWatchdog:
    """Detect a run without progress: call `observe` at every status, then `explain_overdue`.

    >>> w = ProgressWatchdog(multiple=10, floor_s=1, startup_s=60)
    >>> w.explain_overdue(60.0), w.explain_overdue(60.1)[:45]
    ('', 'no commit and no evaluation answer for 60.1 s')
    >>> w.observe(0, 0, 0.0); w.explain_overdue(59.0)
    ''
    >>> for n in range(1, 5): w.observe(n, n, 60.0 + 0.5 * n)
    >>> w.explain_overdue(66.0)
    ''
    >>> print(w.explain_overdue(68.0).replace(": ", ":\\n  "))
    no commit and no evaluation answer for 6.0 s (deadline 5.0 s:
      10 medians of 0.50 s, at least 1 s)

    A run so fast that its first steps share a status has a median too:

    >>> w.restart(70.0); w.observe(4, 4, 70.0); w.deadline
    60
    >>> w.observe(10, 10, 71.0); w.deadline
    2.0

    A learner that starts from a checkpoint has not made its batches in that time:

    >>> w.restart(80.0); w.observe(0, 0, 80.0, epoch=1)
    >>> w.observe(90, 90, 81.0, epoch=2); w.deadline
    60
    """

    multiple: float
    floor_s: float
    startup_s: float
    progress: int = -1
    committed: int = 0
    since: float = 0.0
    observed: float | None = None
    epoch: int = 0
    last_commit: float | None = None
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def observe(self, progress: int, committed: int, now: float, epoch: int = 0) -> None:
        """Record a status.

        progress: a number that changes with every commit and evaluation completion.
        committed: number of committed batches.
        now: seconds.
        epoch: of the learner, which changes when a new one starts from its checkpoint."""
        if progress != self.progress:
            self.progress = progress
            self.since = now
        if (fresh := committed - self.committed) > 0:
            if self.last_commit is not None:
                self.steps.append((now - self.last_commit) / fresh)
            elif self.observed is not None and epoch == self.epoch and fresh > 1:
                # the first of them may have come at once: the others took no longer than this
                self.steps.append((now - self.observed) / (fresh - 1))
            self.last_commit = now
        self.committed = committed
        self.observed, self.epoch = now, epoch

    def restart(self, now: float) -> None:
        """Allow the time of a start again, because a process is restarting."""
        self.since = now
        self.observed = None
        self.last_commit = None
        self.steps.clear()

    @property
    def deadline(self) -> float:
        """Seconds without progress after which the run is overdue."""
        if not self.steps:
            return self.startup_s
        return max(self.floor_s, self.multiple * statistics.median(self.steps))

    def explain_overdue(self, now: float) -> str:
        """Explain that the run is overdue, with the arithmetic of the deadline; "" if it is not."""
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
            f"s: {self.multiple:g} medians of {median:.2f} s, at least {self.floor_s:g} s)"
        )


@dataclass
class WaitLog:
    """Lines about waits for a log: after `first_s` seconds, then whenever the age doubles.

    The processes use 10 s, or half of watchdog.floor_s if that is less, so that the line appears
    before the deadline.

    >>> log = WaitLog(first_s=10)
    >>> log.make_lines([ProcessWait("learner", "batch 3", "buffer", 9.0)])
    []
    >>> log.make_lines([ProcessWait("learner", "batch 3", "buffer", 11.0)])
    ['learner has waited for buffer for 11 s: batch 3']
    >>> log.make_lines([ProcessWait("learner", "batch 3", "buffer", 19.0)])
    []
    >>> log.make_lines([ProcessWait("learner", "batch 3", "buffer", 23.0)])
    ['learner has waited for buffer for 23 s: batch 3']
    >>> log.make_lines([])
    ['learner no longer waits: batch 3']
    """

    first_s: float = 10.0
    # by process and wait; the cause, after a colon, may change while the wait lasts
    next_age: dict[tuple[str, str], float] = field(default_factory=dict)

    def make_lines(self, waits: Sequence[ProcessWait]) -> list[str]:
        """Make the lines that are due.

        waits: all current waits; every other wait has ended."""
        current = {(wait.who, wait.what.partition(":")[0]): wait for wait in waits}
        ended = self.next_age.keys() - current.keys()
        due = {
            key: wait
            for key, wait in current.items()
            if wait.seconds >= self.next_age.get(key, self.first_s)
        }
        lines = [f"{who} no longer waits: {what}" for who, what in sorted(ended)] + [
            f"{wait.who} has waited for {wait.on} for {wait.seconds:.0f} s: {wait.what}"
            for wait in due.values()
        ]
        self.next_age = {key: age for key, age in self.next_age.items() if key not in ended} | {
            key: 2 * wait.seconds for key, wait in due.items()
        }
        return [escape_line(line, LONGEST_LINE) for line in lines]


def find_blocking_process(
    names: Sequence[str],
    waits: Sequence[ProcessWait],
    peers: Mapping[str, float],
    buffer_silent: float,
    patience: float,
) -> str:
    """Find the process that holds the run up, or "".

    A silent buffer comes first, then the peer that was silent longest, then a process that does not
    wait for another one.

    peers: name -> seconds since its last message.
    buffer_silent: seconds since the buffer's last message.
    patience: seconds of silence that are normal.

    >>> both = ["learner", "generator-0"]
    >>> waits = [ProcessWait("learner", "batch 3", "buffer", 9.0)]
    >>> find_blocking_process(both, waits, {"learner": 0.1, "generator-0": 9.0}, 0.1, 5.0)
    'generator-0'
    >>> active = {"learner": 0.4, "generator-0": 0.1}
    >>> waiting = ProcessWait("generator-0", "a ticket", "buffer", 9.0)
    >>> find_blocking_process(both, [waiting], active, 0.1, 5.0)
    'learner'
    >>> waits += [ProcessWait("generator-0", "the rewards", "generator-0-rewards", 9.0)]
    >>> find_blocking_process(both, waits, active, 0.1, 5.0)
    'generator-0'
    """
    if buffer_silent > patience:
        return "buffer"
    silent = {name: peers.get(name, float("inf")) for name in names}
    if silent and max(silent.values()) > patience:
        return max(silent, key=lambda name: silent[name])
    # a process that waits for a part of itself, such as its rewards, does not wait for another one
    waiting = {wait.who for wait in waits if not wait.is_internal}
    return next((name for name in names if name not in waiting), "")
