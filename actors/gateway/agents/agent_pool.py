"""The pool of agents that the gateway starts: sessions, processes and results.

An agent that fails has failed its session, and the buffer grants the sample again.  If the session
had reached a limit, the config's reward scores it instead: granting only those again would bias the
samples against long ones.  All sessions of a process that exits fail.  When a process is killed
because an agent does not stop, its other sessions begin again."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass

import msgspec

from actors.gateway.agents.session_messages import (
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
)
from actors.gateway.endpoint.web import OpenedSession
from actors.gateway.environment_pool import describe_exit
from actors.gateway.session_api import SessionApi
from actors.gateway.sessions import CallRefused
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.transport import child
from asyncrl.transport.child import frame

GRACE_S = 60.0  # for the first import, unless agent.step_s is longer
STOP_S = 10.0  # for an agent to stop after the request
START_TRIES = 3
GLOB = set("*?[")

_decode = msgspec.msgpack.Decoder(SessionResult).decode


@dataclass(eq=False)
class AgentSession:
    """A session that an agent plays.

    stop_at: when it is asked to stop
    dead_at: when its process is killed if it has not stopped
    """

    opened: OpenedSession
    stop_at: float = math.inf
    dead_at: float = math.inf


class _AgentProcess(child.ChildProcess):
    """A worker process and its sessions."""

    def __init__(self, agent: AgentConfig, setup: bytes) -> None:
        kind = "agent_programs" if agent.command else "functions"
        super().__init__(f"actors.gateway.agents.{kind}", setup)
        self.playing: dict[int, AgentSession] = {}  # number of the session in the pool -> session
        self.since = time.monotonic()
        self.ready = False
        self.fresh: list[SessionAccess] = []
        self.stop: list[int] = []

    def flush(self) -> None:
        if self.fresh or self.stop:
            self.outgoing += frame(msgspec.msgpack.encode(SessionOrders(self.fresh, self.stop)))
            self.fresh, self.stop = [], []
        super().flush()


class AgentPool:
    """All agents of a gateway.

    sessions: begins and ends them
    url: of the endpoint

    Raises ConfigError for a missing program, or a missing variable of agent.env_pass.
    """

    def __init__(self, sessions: SessionApi, url: str) -> None:
        agent = self.agent = sessions.gateway.config.agent
        if agent.command and shutil.which(agent.command[0]) is None:
            raise ConfigError(
                f"agent.command: there is no program {agent.command[0]!r}: give its path, or have "
                "it on PATH"
            )
        missing = [
            name for name in agent.env_pass if not GLOB & set(name) and name not in os.environ
        ]
        if missing:
            raise ConfigError(
                f"agent.env_pass: {', '.join(missing)} is not in the environment of the run: set "
                "it, or remove it from the list"
            )
        self.sessions = sessions
        self.url = url
        self.each = math.ceil(agent.at_once / agent.workers)
        run_dir = sessions.gateway.run_dir
        self.setups = [
            msgspec.msgpack.encode(
                AgentSetup(
                    agent.command,
                    agent.function,
                    str(run_dir / f"agent-{index}.log"),
                    agent.env_pass,
                )
            )
            for index in range(min(agent.workers, agent.at_once))
        ]
        self.workers = [_AgentProcess(agent, setup) for setup in self.setups]
        self.import_s = max(GRACE_S, agent.step_s)
        self.numbers = 0  # sessions begun, which numbers them
        self.asked = 0  # samples that are wanted and not granted yet
        self.unborn = 0  # processes in a row that ended before they were ready

    @property
    def wires(self) -> list[socket.socket]:
        return [worker.wire for worker in self.workers]

    def step(self) -> None:
        """Handle results, stop overdue agents and begin new sessions.

        Raises ConfigError when no process can start.
        """
        now = self.sessions.current_time()
        for index, worker in enumerate(self.workers):
            dead = worker.process.poll() is not None
            results, closed = worker.receive_messages(_decode)
            for result in results:
                self._on_result(worker, result, now)
            if closed or dead:
                self._replace(index, now, "its process ended ({code})")
            elif not worker.ready and time.monotonic() > worker.since + self.import_s:
                why = f"importing it takes more than {self.import_s:g} s (agent.step_s)"
                self._replace(index, now, why)
            else:
                self._watch(index, worker, now)
        self._start_sessions()
        for worker in self.workers:
            worker.flush()

    def _on_result(self, worker: _AgentProcess, result: SessionResult, now: float) -> None:
        if result.kind == "broken":
            raise ConfigError(result.why)
        if result.kind == "ready":
            worker.ready = True
            self.unborn = 0
            return
        self._end_session(worker.playing.pop(result.number).opened, result, now)

    def _end_session(self, opened: OpenedSession, result: SessionResult, now: float) -> None:
        """End a session by its agent's result, unless the agent has ended it over HTTP."""
        session = opened.session
        try:
            if session.state != "open":
                return
            if session.limit and self.agent.at_limit == "fail":
                session.fail(f"it reached agent.{session.limit}", now)
            elif result.kind == "scored":
                session.reward(result.reward, result.parts, now=now)
            elif result.kind == "judge" or session.limit:
                session.judge(now)
            else:
                session.fail(f"the agent {result.why}", now)
        except CallRefused:  # its time ran out meanwhile
            pass
        finally:
            self.sessions.on_change(session)

    def _watch(self, index: int, worker: _AgentProcess, now: float) -> None:
        """Stop agents whose session is over: at once if it failed, else after grace_s."""
        for number, player in worker.playing.items():
            session = player.opened.session
            if session.state != "open" and player.stop_at == math.inf:
                failed = session.outcome is not None and session.outcome.failed
                player.stop_at = now + (0.0 if failed else session.limits.grace_s)
            if now >= player.stop_at and player.dead_at == math.inf:
                player.dead_at = now + STOP_S
                worker.stop.append(number)
        if any(now >= player.dead_at for player in worker.playing.values()):
            self._replace(index, now)

    def _replace(self, index: int, now: float, why: str = "") -> None:
        """Replace a process.  why: its sessions fail for this reason; "": they begin again."""
        worker = self.workers[index]
        code = worker.kill()
        self.unborn += not worker.ready
        if self.unborn >= START_TRIES:
            raise ConfigError(
                f"{self.agent.source_name}: {self.unborn} processes in a row were lost before they "
                f"were ready, the last one as {why.replace('{code}', describe_exit(code))}"
            )
        self.workers[index] = _AgentProcess(self.agent, self.setups[index])
        for player in worker.playing.values():
            session = player.opened.session
            if session.state != "open":
                continue
            if why:
                session.fail(f"the agent failed: {why.replace('{code}', describe_exit(code))}", now)
                self.sessions.on_change(session)
            else:
                self.sessions.requeue(player.opened)

    def _start_sessions(self) -> None:
        """Begin sessions in the processes with the fewest, and ask for as many as have room."""
        ready = [worker for worker in self.workers if worker.ready]
        free = min(
            sum(self.each - len(worker.playing) for worker in ready),
            self.agent.at_once - sum(len(worker.playing) for worker in self.workers),
        )
        while free and (opened := self.sessions.lease_session(f"played here {self.numbers + 1}")):
            worker = min(ready, key=lambda worker: len(worker.playing))
            free -= 1
            self.numbers += 1
            worker.playing[self.numbers] = AgentSession(opened)
            worker.fresh.append(self._seat(opened))
        self.sessions.asks += free - self.asked
        self.asked = free

    def _seat(self, opened: OpenedSession) -> SessionAccess:
        session = opened.session
        return SessionAccess(
            number=self.numbers,
            name=session.name,
            url=f"{self.url}/s/{session.name}",
            api_key=opened.key,
            model=self.agent.model,
            prompt=session.ticket.prompt,
            seed=opened.seed,
            attempt=session.attempt,
            first=opened.first,
            deadline_s=session.limits.deadline_s,
        )

    def close(self) -> None:
        """End all agents; a process with programs ends them when its socket closes."""
        for worker in self.workers:
            worker.wire.close()
        for worker in self.workers:
            try:
                worker.process.wait(STOP_S if self.agent.command else 0.0)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
