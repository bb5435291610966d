"""Environments in processes of their own: what each session is to do goes in, what happened comes
out.

A process answers in order, so the oldest unanswered step is the one it is at.  One that takes
longer than agent.step_s, or ends its process, has failed; the other sessions of that process are
lost through no fault of theirs, and begin again."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

import msgspec

from actors.gateway.env_worker import Happened, Op, Setup
from asyncrl.config.agents import Agent
from asyncrl.contract.errors import ConfigError
from asyncrl.transport import child
from asyncrl.transport.child import frame

GRACE_S = 60.0  # the first import may be slow
START_TRIES = 3

_decode = msgspec.msgpack.Decoder(Happened).decode


class _Worker(child.Child):
    """A process, the sessions in it, and the operations it has not answered."""

    def __init__(self, setup: bytes) -> None:
        super().__init__("actors.gateway.env_worker", setup)
        self.sessions: set[int] = set()
        self.asked: deque[int] = deque()  # sessions, in the order of their operations
        self.since = time.monotonic()  # when its oldest operation can have begun at the latest
        self.ready = False
        self.fresh: list[Op] = []

    def flush(self) -> None:
        if self.fresh:
            self.outgoing += frame(msgspec.msgpack.encode(self.fresh))
            self.fresh = []
        super().flush()

    def deadline(self, step_s: float) -> float:
        if not self.ready:
            return self.since + GRACE_S
        return self.since + step_s if self.asked else math.inf


class At(NamedTuple):
    """A session and its process: front: the session whose step is being made there, None while the
    process starts; seconds: since then, at the most; limit: the key that ends it, in left_s.
    """

    front: int | None
    seconds: float
    limit: str
    left_s: float


class Drive:
    """The processes of all environments of a gateway."""

    def __init__(self, agent: Agent) -> None:
        self.step_s = agent.step_s
        self.setup = msgspec.msgpack.encode(Setup(agent.env, agent.tools))
        self.workers = [_Worker(self.setup) for _ in range(agent.workers)]
        self.places: dict[int, _Worker] = {}
        self.hangs = 0
        self.unborn = 0  # processes in a row that ended before they were ready

    @property
    def descriptors(self) -> list[int]:
        return [worker.wire.fileno() for worker in self.workers]

    def reset(self, op: Op) -> None:
        """A session begins, where fewest are."""
        worker = min(self.workers, key=lambda worker: len(worker.sessions))
        worker.sessions.add(op.session)
        self.places[op.session] = worker
        self._ask(worker, op)

    def step(self, op: Op) -> None:
        self._ask(self.places[op.session], op)

    def at(self, session: int, now: float) -> At:
        """Where a session stands that waits for its environment."""
        worker = self.places[session]
        front = worker.asked[0] if worker.ready and worker.asked else None
        limit = "agent.step_s" if worker.ready else ""
        left = worker.deadline(self.step_s) - now
        return At(front, max(0.0, now - worker.since), limit, max(0.0, left))

    def end(self, session: int) -> None:
        """Nothing more is asked of it."""
        worker = self.places.pop(session, None)
        if worker is not None:
            worker.sessions.discard(session)
            worker.fresh.append(Op(session, "end"))

    def _ask(self, worker: _Worker, op: Op) -> None:
        if not worker.asked and worker.ready:
            worker.since = time.monotonic()
        worker.asked.append(op.session)
        worker.fresh.append(op)

    def poll(self) -> list[Happened]:
        """What has happened.  Raises ConfigError where no process can start."""
        out = []
        now = time.monotonic()
        for worker in list(self.workers):
            dead = worker.process.poll() is not None
            found, closed = worker.received(_decode)
            for each in found:
                if each.kind == "broken":
                    raise ConfigError(f"{each.why}; write module:name or file.py:name")
                worker.since = now
                if each.kind == "ready":
                    worker.ready = True
                    self.unborn = 0
                    continue
                worker.asked.popleft()
                if each.session in worker.sessions:
                    out.append(each)
            if closed or dead:
                out += self._replace(worker, "its process ended ({code})")
            elif now > worker.deadline(self.step_s):
                self.hangs += 1
                out += self._replace(worker, f"it took more than {self.step_s:g} s (agent.step_s)")
        for worker in self.workers:
            worker.flush()
        return out

    def _replace(self, worker: _Worker, why: str) -> list[Happened]:
        """A new process in the place of one that hangs or has ended."""
        code = worker.kill()
        self.unborn += not worker.ready
        if self.unborn >= START_TRIES:
            raise ConfigError(
                f"agent.env: {self.unborn} processes ended or hung while importing it"
            )
        self.workers[self.workers.index(worker)] = _Worker(self.setup)
        at = worker.asked[0] if worker.ready and worker.asked else None
        out = []
        for session in sorted(worker.sessions):
            self.places.pop(session, None)
            if session == at:
                said = f"the environment failed: {why.replace('{code}', str(code))}"
                out.append(Happened(session, "failed", why=said))
            else:
                out.append(Happened(session, "lost"))
        return out

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
