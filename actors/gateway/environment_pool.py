"""Runs the environments of all sessions in worker processes.

A process answers in order, so it is busy with its oldest unanswered operation.  If that takes
longer than agent.step_s or ends the process, its session fails; the other sessions of the process
begin again."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections import Counter, deque
from typing import NamedTuple

import msgspec

from actors.gateway.environment_worker import (
    EnvironmentEvent,
    EnvironmentOperation,
    EnvironmentSetup,
)
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.transport import child
from asyncrl.transport.child import frame

GRACE_S = 60.0  # for the import, which may be slow
START_TRIES = 3
SAID = 5  # lines in the log for each kind of loss; further losses are only counted
HOPELESS = 3  # replaced processes per worker, after which an operation that never worked is fatal
DOES = {"reset": "a reset", "step": "a step"}

_decode = msgspec.msgpack.Decoder(EnvironmentEvent).decode


class _EnvironmentProcess(child.ChildProcess):
    """A worker process, its sessions and its unanswered operations."""

    def __init__(self, setup: bytes) -> None:
        super().__init__("actors.gateway.environment_worker", setup)
        self.sessions: set[int] = set()
        self.asked: deque[tuple[int, str]] = deque()  # unanswered: (session, "reset" or "step")
        self.since = time.monotonic()  # the latest time at which its oldest operation began
        self.ready = False
        self.fresh: list[EnvironmentOperation] = []

    def flush(self) -> None:
        if self.fresh:
            self.outgoing += frame(msgspec.msgpack.encode(self.fresh))
            self.fresh = []
        super().flush()

    def deadline(self, step_s: float) -> float:
        if not self.ready:
            return self.since + max(GRACE_S, step_s)
        return self.since + step_s if self.asked else math.inf


def describe_exit(code: int | None) -> str:
    """Describe how a process ended: `exit code 3`, `SIGKILL`."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


class EnvironmentPlace(NamedTuple):
    """The current operation of a session's process.

    front: the session whose step is being made; None while the process starts
    seconds: since when, at most
    limit: the config key that ends it, in `left_s` seconds
    """

    front: int | None
    seconds: float
    limit: str
    left_s: float


class EnvironmentPool:
    """The worker processes with the environments of a gateway."""

    def __init__(self, agent: AgentConfig) -> None:
        self.step_s = agent.step_s
        opponents = sorted({agent.opponent_for("train"), agent.opponent_for("eval")} - {""})
        self.setup = msgspec.msgpack.encode(EnvironmentSetup(agent.env, agent.tools, opponents))
        self.workers = [_EnvironmentProcess(self.setup) for _ in range(agent.workers)]
        self.places: dict[int, _EnvironmentProcess] = {}
        self.hangs = 0
        self.named = agent.source_name
        self.done: set[str] = set()  # operations that were answered once: reset, step
        self.over = Counter[str]()  # operation -> processes replaced during it
        self.replaced = ""  # the newest replacement in words, "" without one
        self.unborn = 0  # processes in a row that ended before they were ready

    @property
    def descriptors(self) -> list[int]:
        return [worker.wire.fileno() for worker in self.workers]

    def reset(self, op: EnvironmentOperation) -> None:
        """Begin a session in the process with the fewest."""
        worker = min(self.workers, key=lambda worker: len(worker.sessions))
        worker.sessions.add(op.session)
        self.places[op.session] = worker
        self._ask(worker, op)

    def step(self, op: EnvironmentOperation) -> None:
        self._ask(self.places[op.session], op)

    def locate(self, session: int, now: float) -> EnvironmentPlace:
        """Describe what the process does that a session waits for."""
        worker = self.places[session]
        front = worker.asked[0][0] if worker.ready and worker.asked else None
        limit = "agent.step_s" if worker.ready else ""
        seconds_left = worker.deadline(self.step_s) - now
        return EnvironmentPlace(front, max(0.0, now - worker.since), limit, max(0.0, seconds_left))

    def end(self, session: int) -> None:
        """End a session's environment."""
        worker = self.places.pop(session, None)
        if worker is not None:
            worker.sessions.discard(session)
            worker.fresh.append(EnvironmentOperation(session, "end"))

    def _ask(self, worker: _EnvironmentProcess, op: EnvironmentOperation) -> None:
        if not worker.asked and worker.ready:
            worker.since = time.monotonic()
        worker.asked.append((op.session, op.kind))
        worker.fresh.append(op)

    def poll(self) -> list[EnvironmentEvent]:
        """Exchange messages with the processes; return the events of sessions.

        Raises ConfigError when no process can start.
        """
        events = []
        now = time.monotonic()
        for worker in list(self.workers):
            dead = worker.process.poll() is not None
            received, closed = worker.receive_messages(_decode)
            for event in received:
                if event.kind == "broken":
                    raise ConfigError(event.why)
                worker.since = now
                if event.kind == "ready":
                    worker.ready = True
                    self.unborn = 0
                    continue
                self.done.add(worker.asked.popleft()[1])
                if event.session in worker.sessions:
                    events.append(event)
            if closed or dead:
                events += self._replace(worker, "its process ended ({code})")
            elif now > worker.deadline(self.step_s):
                self.hangs += 1
                took = self.step_s if worker.ready else max(GRACE_S, self.step_s)
                events += self._replace(worker, f"it took more than {took:g} s (agent.step_s)")
        for worker in self.workers:
            worker.flush()
        return events

    def _replace(self, worker: _EnvironmentProcess, why: str) -> list[EnvironmentEvent]:
        """Replace a process that hangs or has ended; return the events of its sessions."""
        code = worker.kill()
        why = why.replace("{code}", describe_exit(code))
        front, kind = worker.asked[0] if worker.ready and worker.asked else (None, "")
        self._count(worker, kind, why)
        self.workers[self.workers.index(worker)] = _EnvironmentProcess(self.setup)
        events = []
        for session in sorted(worker.sessions):
            self.places.pop(session, None)
            if session == front:
                reason = f"the environment failed: {why}"
                events.append(EnvironmentEvent(session, "failed", why=reason))
            else:
                events.append(EnvironmentEvent(session, "lost"))
        return events

    def _count(self, worker: _EnvironmentProcess, kind: str, why: str) -> None:
        """Count a replaced process, by what it was doing, and log the first ones.

        Raises ConfigError for an operation that was tried often and has never worked.
        """
        self.unborn += not worker.ready
        if self.unborn >= START_TRIES:
            raise ConfigError(
                f"{self.named}: {self.unborn} processes in a row were lost while importing it, the "
                f"last one as {why}; if the import is slow, raise agent.step_s"
            )
        does = DOES.get(kind, "a pause" if worker.ready else "its import")
        self.over[does] += 1
        count = self.over[does]
        self.replaced = f"{count} lost in {does} so far, the last one as {why}"
        if count <= SAID:
            print(
                f"{self.named}: a process was lost in {does}: {escape_line(why)}",
                file=sys.stderr,
                flush=True,
            )
        if kind and kind not in self.done and count >= HOPELESS * len(self.workers):
            raise ConfigError(
                f"{self.named}: {count} processes were lost in {does}, and none has ever completed "
                f"one; the last one as {why}: raise agent.step_s, or move slow work to the import"
            )

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
