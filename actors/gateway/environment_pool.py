"""The worker processes that run the environments of all sessions.

A process answers in order, so it is busy with its oldest unanswered operation.  If that takes
longer than agent.step_s or ends the process, its session fails; the other sessions of the process
begin again.
"""

from __future__ import annotations

import sys
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
from asyncrl.transport.worker_pool import Worker, WorkerPool

LOGGED_LOSSES = 5  # lines in the log for each kind of loss; further losses are only counted
HOPELESS = 3  # replaced processes per worker, after which an operation that never worked is fatal
ACTIVITIES = {"reset": "a reset", "step": "a step", "score": "get_reward"}


class _EnvironmentProcess(Worker):
    """A worker process and its unanswered operations."""

    def __init__(self, setup: bytes, python: str) -> None:
        super().__init__("actors.gateway.environment_worker", setup, python)
        self.asked: deque[tuple[int, str]] = deque()  # unanswered: (session, "reset" or "step")

    @property
    def is_busy(self) -> bool:
        return bool(self.asked)


class EnvironmentPlace(NamedTuple):
    """The current operation of a session's process.

    front: the session of the current step; None while the process starts
    limit: the config key that ends it, in `left_s` seconds
    """

    front: int | None
    limit: str
    left_s: float


class EnvironmentPool(WorkerPool[_EnvironmentProcess, EnvironmentEvent]):
    """The worker processes with the environments of a gateway.

    judged: the config names a reward
    name: of the environments, in messages
    """

    hang_text = "it took more than {limit_s:g} s (agent.step_s)"
    start_text = (
        "processes in a row were lost while importing it, the last one as {reason}; if the import "
        "is slow, raise agent.step_s"
    )

    def __init__(self, agent: AgentConfig, *, judged: bool = False, name: str = "") -> None:
        setup = msgspec.msgpack.encode(EnvironmentSetup(agent, judged))
        super().__init__(
            name or agent.source_name,
            lambda _: _EnvironmentProcess(setup, agent.python),
            agent.workers,
            EnvironmentEvent,
            agent.step_s,
        )
        self.processes: dict[int, _EnvironmentProcess] = {}
        self.events: list[EnvironmentEvent] = []  # since the last `poll`
        self.done: set[str] = set()  # operations that were answered once: reset, step
        self.over = Counter[str]()  # operation -> processes replaced during it
        self.replaced = ""  # the newest replacement in words, "" without one

    def reset(self, op: EnvironmentOperation) -> None:
        """Begin a session in the process with the fewest sessions."""
        counts = Counter(self.processes.values())
        self.processes[op.session] = min(self.workers, key=counts.__getitem__)
        self.step(op)

    def step(self, op: EnvironmentOperation) -> None:
        """Queue an operation of a session that has begun."""
        worker = self.processes[op.session]
        if not worker.asked and worker.ready:
            worker.restart_clock()
        worker.asked.append((op.session, op.kind))
        worker.send([op])

    def locate(self, session: int, now: float) -> EnvironmentPlace:
        """Describe the current operation of a session's process."""
        worker = self.processes[session]
        front = worker.asked[0][0] if worker.ready and worker.asked else None
        limit = "agent.step_s" if worker.ready else ""
        seconds_left = self.compute_deadline(worker) - now
        return EnvironmentPlace(front, limit, max(0.0, seconds_left))

    def end(self, session: int) -> None:
        """End a session's environment."""
        worker = self.processes.pop(session, None)
        if worker is not None:
            worker.send([EnvironmentOperation(session, "end")])

    def poll(self) -> list[EnvironmentEvent]:
        """Exchange messages with the processes; return the events of sessions.

        Raises ConfigError when no process can start.
        """
        self.read()
        self.flush()
        events, self.events = self.events, []
        return events

    def on_reply(self, worker: _EnvironmentProcess, reply: EnvironmentEvent) -> None:
        worker.restart_clock()
        self.done.add(worker.asked.popleft()[1])
        if self.processes.get(reply.session) is worker:
            self.events.append(reply)

    def on_lost(self, worker: _EnvironmentProcess, reason: str, *, hung: bool) -> None:
        front, kind = worker.asked[0] if worker.ready and worker.asked else (None, "")
        self._count(worker, kind, reason)
        for session in sorted(x for x, process in self.processes.items() if process is worker):
            del self.processes[session]
            if session == front:
                failure = f"the environment failed: {reason}"
                self.events.append(EnvironmentEvent(session, "failed", why=failure))
            else:
                self.events.append(EnvironmentEvent(session, "lost"))

    def _count(self, worker: _EnvironmentProcess, kind: str, reason: str) -> None:
        """Count a replaced process by its operation, and log the first ones.

        Raises ConfigError for an operation that was tried often and has never worked.
        """
        activity = ACTIVITIES.get(kind, "a pause" if worker.ready else "its import")
        self.over[activity] += 1
        count = self.over[activity]
        self.replaced = f"{count} lost in {activity} so far, the last one as {reason}"
        if count <= LOGGED_LOSSES:
            print(
                f"{self.named}: a process was lost in {activity}: {escape_line(reason)}",
                file=sys.stderr,
            )
        if kind and kind not in self.done and count >= HOPELESS * len(self.workers):
            raise ConfigError(
                f"{self.named}: {count} processes were lost in {activity}, and none has ever "
                f"completed one; the last one as {reason}: raise agent.step_s, or move slow work "
                "to the import"
            )
