"""The event loop of a gateway with sessions over HTTP, and the agents that it starts.

A harness plays the sessions, or an `AgentPool`.  An agent that fails fails its session, and the
buffer grants the sample again.  If the session had reached a limit, the config's reward scores it
instead: granting such samples again would bias the batch against long ones.  All sessions of a
process that exits fail.  When a process is killed because an agent does not stop, its other
sessions begin again.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from actors.gateway.agents.session_messages import (
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
)
from actors.gateway.endpoint.web import Endpoint
from actors.gateway.recovery.session_journal import read_kept_port, write_endpoint_files
from actors.gateway.refusals import CallRefused
from actors.gateway.service import Gateway, name_agent_log
from actors.gateway.session_api import SessionApi
from actors.gateway.sessions import Session
from asyncrl.contract.errors import ConfigError
from asyncrl.transport.http_server import ListenAddress
from asyncrl.transport.sockets import BufferSocket, PeerSocket
from asyncrl.transport.worker_pool import Worker, WorkerPool

POLL_S = 0.05  # longest wait between two turns
OVER_S = 1.0  # from the run's end to the endpoint's: requests get the status 410
STOP_S = 10.0  # for an agent to stop after the request
GLOB = set("*?[")


@dataclass(eq=False)
class AgentSession:
    """A session that an agent plays.

    stop_at: the time of the request to stop
    dead_at: the time at which its process is killed if it has not stopped
    """

    session: Session
    stop_at: float = math.inf
    dead_at: float = math.inf


class _AgentProcess(Worker):
    """A worker process and its sessions."""

    def __init__(self, setup: AgentSetup) -> None:
        module = "actors.gateway.agents.agent_process"
        super().__init__(module, msgspec.msgpack.encode(setup), setup.agent.python)
        self.playing: dict[int, AgentSession] = {}  # number of the session in the pool -> session


class AgentPool(WorkerPool[_AgentProcess, SessionResult]):
    """All agents of a gateway, or of one part of a mixture.

    sessions: begins and ends them
    url: of the endpoint

    Raises ConfigError for a missing program, or a missing variable of agent.env_pass.
    """

    hang_text = "importing it takes more than {limit_s:g} s (agent.step_s)"
    start_text = "processes in a row were lost before they were ready, the last one as {reason}"

    def __init__(self, sessions: SessionApi, url: str, part: str = "") -> None:
        self.part = part
        agent = self.agent = sessions.gateway.agents[part]
        if agent.command and shutil.which(agent.command[0]) is None:
            raise ConfigError(
                f"agent.command: there is no program {agent.command[0]!r}; give its path, or add "
                "its directory to PATH"
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
        self.places_per_process = math.ceil(agent.at_once / agent.workers)
        run_dir = sessions.gateway.run_dir

        def make(index: int) -> _AgentProcess:
            return _AgentProcess(AgentSetup(agent, str(run_dir / name_agent_log(part, index))))

        count = min(agent.workers, agent.at_once)
        name = sessions.gateway.get_source_name(part)
        super().__init__(name, make, count, SessionResult, agent.step_s)
        # a process with programs ends them first; an environment tears down what it holds
        self.exit_s = 0.0 if agent.function else STOP_S
        self.numbers = 0  # sessions begun; the last one's number
        self.requested = 0  # samples that are wanted and not granted yet

    def step(self) -> None:
        """Handle results, stop overdue agents and begin new sessions.

        Raises ConfigError when no process can start.
        """
        self.read()
        now = self.sessions.current_time()
        for worker in list(self.workers):
            # stop the agents of ended sessions: at once if failed, else after grace_s
            for number, player in worker.playing.items():
                session = player.session
                if session.state != "open" and player.stop_at == math.inf:
                    failed = session.outcome is not None and session.outcome.failed
                    player.stop_at = now + (0.0 if failed else session.limits.grace_s)
                if now >= player.stop_at and player.dead_at == math.inf:
                    player.dead_at = now + STOP_S
                    worker.send(SessionOrders(stop=[number]))
            if any(now >= player.dead_at for player in worker.playing.values()):
                self.replace(worker, "")
        self._start_sessions()
        self.flush()

    def on_reply(self, worker: _AgentProcess, reply: SessionResult) -> None:
        player = worker.playing.pop(reply.number)
        self._end_session(player.session, reply, self.sessions.current_time())

    def _end_session(self, session: Session, result: SessionResult, now: float) -> None:
        """End a session by its agent's result, unless the agent has ended it over HTTP."""
        try:
            if session.state != "open":
                return
            if session.limit and self.agent.at_limit == "fail":
                session.fail(f"it reached agent.{session.limit}")
            elif result.kind == "scored" or (result.scored and session.limit):
                session.shortened |= result.truncated
                session.set_reward(result.reward, result.parts, now=now)
            elif result.kind == "judge" or session.limit:
                session.judge(now)
            else:
                session.fail(f"the agent {result.why}")
        except CallRefused:  # its time ran out meanwhile
            pass
        finally:
            self.sessions.on_change(session)

    def on_lost(self, worker: _AgentProcess, reason: str, *, hung: bool) -> None:
        """Fail the sessions of a lost process; without a reason they begin again."""
        for player in worker.playing.values():
            session = player.session
            if session.state != "open":
                continue
            if reason:
                session.fail(f"the agent failed: {reason}")
                self.sessions.on_change(session)
            elif self.sessions.is_open(session):
                # another session plays its sample
                self.sessions.gateway.drop(session)
                self.sessions.gateway.held[session.ticket_key].waiting.append(session.sample)

    def _start_sessions(self) -> None:
        """Begin sessions in the processes with the fewest; request samples for the rest."""
        ready = [worker for worker in self.workers if worker.ready]
        if ready:
            self.sessions.starting.discard(self.part)
        else:
            self.sessions.starting.add(self.part)
        room = min(
            sum(self.places_per_process - len(worker.playing) for worker in ready),
            self.agent.at_once - sum(len(worker.playing) for worker in self.workers),
        )
        while room:
            lease = f"played here {self.part} {self.numbers + 1}"
            if (session := self.sessions.lease_session(lease, {self.part})) is None:
                break
            worker = min(ready, key=lambda worker: len(worker.playing))
            room -= 1
            self.numbers += 1
            worker.playing[self.numbers] = AgentSession(session)
            worker.send(SessionOrders([self._build_access(session)]))
        self.sessions.asks += room - self.requested
        self.requested = room

    def _build_access(self, session: Session) -> SessionAccess:
        return SessionAccess(
            number=self.numbers,
            name=session.name,
            url=f"{self.url}/s/{session.name}",
            api_key=session.api_key,
            model=self.agent.model,
            prompt=session.ticket.prompt,
            seed=session.seed,
            attempt=session.attempt,
            first=session.first,
            deadline_s=session.limits.deadline_s,
        )


class SocketWatcher:
    """A watcher that wakes a gateway when a socket is readable."""

    def __init__(self, gateway: Gateway, sessions: SessionApi, agents: list[AgentPool]) -> None:
        self.gateway = gateway
        self.sessions = sessions
        self.agents = agents
        self.loop = asyncio.get_running_loop()
        self.watched: dict[int, Any] = {}  # descriptor -> its socket

    def on_readable(self, peer: BufferSocket | PeerSocket) -> None:
        """Wake the gateway if the socket has a message, which zmq does not promise."""
        if peer.has_message:
            self.sessions.wake()

    async def wait_until_due(self) -> None:
        """Wait until the next turn is due, at most POLL_S."""
        # a new socket or process may get the descriptor of an old one
        wires = [*self.gateway.wires, *(wire for pool in self.agents for wire in pool.wires)]
        current: dict[int, Any] = {wire.fileno(): wire for wire in wires}
        callbacks = dict.fromkeys(current, self.sessions.wake)
        for peer in (self.gateway.socket, self.gateway.calls_socket):
            descriptor = peer.socket.fileno()
            current[descriptor] = peer.socket
            callbacks[descriptor] = partial(self.on_readable, peer)
        for descriptor, watched in list(self.watched.items()):
            if current.get(descriptor) is not watched:
                self.loop.remove_reader(descriptor)
                del self.watched[descriptor]
        for descriptor in current.keys() - self.watched.keys():
            self.loop.add_reader(descriptor, callbacks[descriptor])
        self.watched = current
        waiting = (self.gateway.socket.has_message, self.gateway.calls_socket.has_message)
        if any(waiting):  # zmq's descriptors signal new messages only, not those already there
            await asyncio.sleep(0)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self.sessions.due.wait()
        self.sessions.due.clear()

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self.watched:
            self.loop.remove_reader(descriptor)


async def serve(gateway: Gateway) -> None:
    """Run a gateway's turns and its endpoint until the run or the process ends."""
    agent = gateway.config.agent
    sessions = next(x for x in gateway.sources.values() if isinstance(x, SessionApi))
    bind = ListenAddress(
        agent.host,
        agent.port or read_kept_port(gateway.run_dir),
        agent.certificate,
        agent.private_key,
        agent.behind_proxy,
        further_ports=() if agent.port else (0,),
    )
    endpoint = Endpoint(sessions, bind)
    sessions.restore_sessions()
    await endpoint.start()
    write_endpoint_files(gateway.run_dir, endpoint.url, sessions.run_key)
    gateway.greet()
    agents: list[AgentPool] = []
    watcher = SocketWatcher(gateway, sessions, agents)
    try:
        for part, part_agent in gateway.agents.items():
            if part_agent.starts_agents:
                agents.append(AgentPool(sessions, endpoint.url, part))
        while True:
            await watcher.wait_until_due()
            if gateway.step():
                break
            for pool in agents:
                pool.step()
            sessions.wake_leases()
        gateway.finish()
        sessions.news.set()
        if gateway.over:
            sessions.journal.clear()
            await asyncio.sleep(OVER_S)
    finally:
        for pool in agents:
            pool.close()
        await endpoint.stop()
        watcher.close()
