"""Environments in processes of their own: what each session is to do goes in, what happened comes
out.

A process answers in order, so the oldest unanswered step is the one it is at.  One that takes
longer than agent.step_s, or ends its process, has failed; the other sessions of that process are
lost through no fault of theirs, and begin again."""

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

GRACE_S = 60.0  # the import may be slow
START_TRIES = 3
SAID = 5  # lines in the log, of each kind; further ones are only counted
HOPELESS = 3  # processes of each place that were replaced over what has never been done once
DOES = {"reset": "a reset", "step": "a step"}

_decode = msgspec.msgpack.Decoder(EnvironmentEvent).decode


class _EnvironmentProcess(child.ChildProcess):
    """A process, the sessions in it, and the operations it has not answered."""

    def __init__(self, setup: bytes) -> None:
        super().__init__("actors.gateway.environment_worker", setup)
        self.sessions: set[int] = set()
        # (session, reset or step), in the order of their operations
        self.asked: deque[tuple[int, str]] = deque()
        self.since = time.monotonic()  # when its oldest operation can have begun at the latest
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
    """How a process ended: `exit code 3`, `SIGKILL`."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


class EnvironmentPlace(NamedTuple):
    """A session and its process: front: the session whose step is being made there, None while the
    process starts; seconds: since then, at the most; limit: the key that ends it, in left_s.
    """

    front: int | None
    seconds: float
    limit: str
    left_s: float


class EnvironmentPool:
    """The processes of all environments of a gateway."""

    def __init__(self, agent: AgentConfig) -> None:
        self.step_s = agent.step_s
        opponents = sorted({agent.opponent_for("train"), agent.opponent_for("eval")} - {""})
        self.setup = msgspec.msgpack.encode(EnvironmentSetup(agent.env, agent.tools, opponents))
        self.workers = [_EnvironmentProcess(self.setup) for _ in range(agent.workers)]
        self.places: dict[int, _EnvironmentProcess] = {}
        self.hangs = 0
        self.named = agent.source_name
        self.done: set[str] = set()  # what some environment has answered: reset, step
        self.over = Counter[str]()  # processes replaced, by what they were at
        self.replaced = ""  # the same for whoever waits, "" while none was
        self.unborn = 0  # processes in a row that ended before they were ready

    @property
    def descriptors(self) -> list[int]:
        return [worker.wire.fileno() for worker in self.workers]

    def reset(self, op: EnvironmentOperation) -> None:
        """A session begins, where fewest are."""
        worker = min(self.workers, key=lambda worker: len(worker.sessions))
        worker.sessions.add(op.session)
        self.places[op.session] = worker
        self._ask(worker, op)

    def step(self, op: EnvironmentOperation) -> None:
        self._ask(self.places[op.session], op)

    def locate(self, session: int, now: float) -> EnvironmentPlace:
        """Where a session stands that waits for its environment."""
        worker = self.places[session]
        front = worker.asked[0][0] if worker.ready and worker.asked else None
        limit = "agent.step_s" if worker.ready else ""
        left = worker.deadline(self.step_s) - now
        return EnvironmentPlace(front, max(0.0, now - worker.since), limit, max(0.0, left))

    def end(self, session: int) -> None:
        """Nothing more is asked of it."""
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
        """What has happened.  Raises ConfigError where no process can start."""
        out = []
        now = time.monotonic()
        for worker in list(self.workers):
            dead = worker.process.poll() is not None
            found, closed = worker.receive_messages(_decode)
            for each in found:
                if each.kind == "broken":
                    raise ConfigError(each.why)
                worker.since = now
                if each.kind == "ready":
                    worker.ready = True
                    self.unborn = 0
                    continue
                self.done.add(worker.asked.popleft()[1])
                if each.session in worker.sessions:
                    out.append(each)
            if closed or dead:
                out += self._replace(worker, "its process ended ({code})")
            elif now > worker.deadline(self.step_s):
                self.hangs += 1
                took = self.step_s if worker.ready else max(GRACE_S, self.step_s)
                out += self._replace(worker, f"it took more than {took:g} s (agent.step_s)")
        for worker in self.workers:
            worker.flush()
        return out

    def _replace(self, worker: _EnvironmentProcess, why: str) -> list[EnvironmentEvent]:
        """A new process in the place of one that hangs or has ended."""
        code = worker.kill()
        why = why.replace("{code}", describe_exit(code))
        at, kind = worker.asked[0] if worker.ready and worker.asked else (None, "")
        self._count(worker, kind, why)
        self.workers[self.workers.index(worker)] = _EnvironmentProcess(self.setup)
        out = []
        for session in sorted(worker.sessions):
            self.places.pop(session, None)
            if session == at:
                said = f"the environment failed: {why}"
                out.append(EnvironmentEvent(session, "failed", why=said))
            else:
                out.append(EnvironmentEvent(session, "lost"))
        return out

    def _count(self, worker: _EnvironmentProcess, kind: str, why: str) -> None:
        """A process is replaced that was at a reset, a step, its import or nothing.  Raises
        ConfigError for what has been tried often enough, and was never done once.
        """
        self.unborn += not worker.ready
        if self.unborn >= START_TRIES:
            raise ConfigError(
                f"{self.named}: {self.unborn} processes in a row were lost while importing it, the "
                f"last one as {why}; what takes long there may have more time (agent.step_s)"
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
                f"{self.named}: {count} processes were lost in {does}, and none has ever done one; "
                f"the last one as {why}: give it more time (agent.step_s), or do what takes long "
                "while it is imported"
            )

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
