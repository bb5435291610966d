"""Sessions over HTTP: a source for the gateway, and the service of the endpoint.

Sessions begin with samples of the gateway's tickets, and their calls go to its router.  A harness
that leases sessions plays them, or an `AgentPool`.  An agent that fails fails its session, and the
buffer grants the sample again.  If the session had reached a limit, the config's reward scores it
instead: granting such samples again would bias the batch against long ones.  All sessions of a
process that exits fail.  When a process is killed because an agent does not stop, its other
sessions begin again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from datetime import datetime

import msgspec

from actors.gateway.agents.session_messages import (
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
)
from actors.gateway.call_tree import CallNode
from actors.gateway.endpoint.requests import RequestPolicy
from actors.gateway.recovery.session_journal import (
    SessionJournal,
    SessionOpening,
    read_endpoint_file,
    restore,
)
from actors.gateway.refusals import CallRefused
from actors.gateway.service import Gateway, SessionSource, WaitCause, name_agent_log
from actors.gateway.sessions import NEVER, Session
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import SampleKey, Ticket
from asyncrl.contract.printable import escape_line
from asyncrl.transport.worker_pool import Worker, WorkerPool

STOP_S = 10.0  # for an agent to stop after the request
GLOB = set("*?[")
REMEMBERED = 4096  # leases, and ended sessions, that can still be looked up
# the description of a session's wait, by the key of the agent that plays it
AGENTS = {
    "serve": "its harness: the next call, or its reward",
    "command": "its program (agent.command): the next call, or its end",
    "function": "its function (agent.function): the next call, or its end",
    "env": "its environment (agent.env): the next call, or its end",
}


class _AgentProcess(Worker):
    """A worker process and its sessions."""

    def __init__(self, setup: AgentSetup) -> None:
        module = "actors.gateway.agents.agent_process"
        super().__init__(module, msgspec.msgpack.encode(setup), setup.agent.python)
        self.playing: dict[int, Session] = {}  # by their numbers
        self.places = 0  # the most of them


class AgentPool(WorkerPool[_AgentProcess, SessionResult]):
    """All agents of a gateway, or of one part of a mixture.

    sessions: begins and ends them

    Raises ConfigError for a missing program, or a missing variable of agent.env_pass.
    """

    hang_text = "importing it takes more than {limit_s:g} s (agent.step_s)"
    start_text = "processes in a row were lost before they were ready, the last one as {reason}"

    def __init__(self, sessions: SessionApi, part: str = "") -> None:
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
        run_dir = sessions.gateway.run_dir
        count = min(agent.workers, agent.at_once)

        def make(index: int) -> _AgentProcess:
            worker = _AgentProcess(AgentSetup(agent, str(run_dir / name_agent_log(part, index))))
            worker.places = agent.at_once // count + (index < agent.at_once % count)
            return worker

        name = sessions.gateway.get_source_name(part)
        super().__init__(name, make, count, SessionResult, agent.step_s)
        # a process with programs ends them first; an environment tears down what it holds
        self.exit_s = 0.0 if agent.function else STOP_S

    def poll(self) -> None:
        """Handle results and stop overdue agents.

        Raises ConfigError when no process can start.
        """
        self.read()
        now = self.sessions.current_time()
        for worker in list(self.workers):
            # stop the agents of ended sessions: at once if failed, else after grace_s
            for number, session in worker.playing.items():
                if session.state != "open" and session.stop_at == NEVER:
                    failed = session.outcome is not None and session.outcome.failed
                    session.stop_at = now + (0.0 if failed else session.limits.grace_s)
                if now >= session.stop_at and session.kill_at == NEVER:
                    session.kill_at = now + STOP_S
                    worker.send(SessionOrders(stop=[number]))
            if any(now >= session.kill_at for session in worker.playing.values()):
                self.replace(worker, "")
        self.flush()

    def on_reply(self, worker: _AgentProcess, reply: SessionResult) -> None:
        session = worker.playing.pop(reply.number)
        self._end_session(session, reply, self.sessions.current_time())

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
        for session in worker.playing.values():
            if session.state != "open":
                continue
            if reason:
                session.fail(f"the agent failed: {reason}")
                self.sessions.on_change(session)
            elif self.sessions.is_open(session):
                # another session plays its sample
                self.sessions.gateway.drop(session)
                self.sessions.gateway.held[session.ticket_key].waiting.append(session.sample)

    def count_places(self) -> int:
        """Count the sessions that may begin."""
        return sum(x.places - len(x.playing) for x in self.workers if x.ready)

    def open_sessions(self) -> None:
        """Begin sessions in the processes with the fewest."""
        while self.count_places() and (session := self.sessions.begin_session({self.part})):
            ready = (worker for worker in self.workers if worker.ready)
            worker = max(ready, key=lambda worker: worker.places - len(worker.playing))
            worker.playing[session.number] = session
            access = SessionAccess(
                number=session.number,
                name=session.name,
                url=f"{self.sessions.url}/s/{session.name}",
                api_key=session.api_key,
                model=self.agent.model,
                prompt=session.ticket.prompt,
                seed=session.seed,
                attempt=session.attempt,
                first=session.first,
                deadline_s=session.limits.deadline_s,
            )
            worker.send(SessionOrders([access]))
        self.flush()


class SessionApi(SessionSource):
    """Sessions over HTTP: the service of a `web.WebApp`, in the thread of the gateway's turns."""

    kind = "agent"

    def __init__(self, gateway: Gateway, part: str = "") -> None:
        self.gateway = gateway
        self.url = ""  # of the endpoint, once it listens
        # a harness leases the sessions of these parts; agents of the gateway play the others
        self.leased_parts = {name for name, one in gateway.agents.items() if one.serve}
        self.request_policy = RequestPolicy(
            gateway.config.agent,
            vocabulary=gateway.vocabulary,
            stops=frozenset(gateway.stops),
            images=gateway.chat.image_shape is not None,
        )
        self.run_key = read_endpoint_file(gateway.run_dir, "agent.key") or secrets.token_urlsafe(32)
        # of the leased sessions; those that a program or function plays end with this process
        self.journal = SessionJournal(gateway.run_dir / f"sessions-{gateway.index}")
        # (ticket, sample, attempt) -> an ended session whose file is kept until it is acknowledged
        self.unacked: dict[SampleKey, str] = {}
        self.opened: OrderedDict[str, Session] = OrderedDict()
        self.leases: OrderedDict[str, Session] = OrderedDict()
        self.asks = 0  # leases that wait for a sample
        self.news = asyncio.Event()  # set after each turn
        self.due = asyncio.Event()  # set when the gateway should take its next turn
        agents = gateway.agents.items()
        self.pools = {part: AgentPool(self, part) for part, one in agents if one.starts_agents}

    # ---- called by the endpoint ------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.gateway.over

    @property
    def is_ending(self) -> bool:
        return self.gateway.ending

    def current_time(self) -> float:
        return time.monotonic()

    def find(self, name: str) -> Session | None:
        return self.opened.get(name)

    async def lease(self, lease: str, wait_s: float) -> Session | None:
        deadline = self.current_time() + wait_s
        self.asks += 1
        self.wake()
        try:
            while True:
                session = self.leases.get(lease) or self.lease_session(lease)
                seconds_left = deadline - self.current_time()
                if session is not None or seconds_left <= 0 or self.is_over or self.is_ending:
                    return session
                self.news.clear()
                try:
                    await asyncio.wait_for(self.news.wait(), seconds_left)
                except TimeoutError:
                    pass
        finally:
            self.asks -= 1

    def lease_session(self, lease: str) -> Session | None:
        """Begin a session for a harness; None without a waiting sample, or room."""
        if (session := self.begin_session(self.leased_parts)) is None:
            return None
        # an evaluation's session has no file: a restarted gateway evaluates another version
        if session.ticket.kind == "train":
            opening = SessionOpening(
                name=session.name,
                sample=session.sample,
                key=session.api_key,
                lease=lease,
                seed=session.seed,
                first=session.first,
                date=(session.composer.when or datetime.now()).isoformat(),
                opened=session.opened,
            )
            self.journal.open(opening, session.ticket)
        self.add_lease(lease, session)
        return session

    def begin_session(self, parts: Collection[str]) -> Session | None:
        """Begin a session of the parts' next waiting sample; None without one, or room."""
        gateway = self.gateway
        grant = next(iter(gateway.list_waiting_tickets(parts)), None)
        if grant is None or gateway.free_sessions < 1:
            return None
        session = gateway.begin_session(grant, grant.waiting.pop(0))
        self.add(session)
        return session

    def is_open(self, session: Session) -> bool:
        """Whether the gateway has the session, which was neither delivered nor lost."""
        return session.number in self.gateway.sessions

    def add(self, session: Session) -> None:
        """Register a session under its name."""
        agent = self.gateway.agents[session.part]
        session.waits_for = AGENTS[next(key for key in AGENTS if getattr(agent, key))]
        self.opened[session.name] = session
        while len(self.opened) > REMEMBERED:
            ended = (x for x, other in self.opened.items() if not self.is_open(other))
            if (ended_name := next(ended, None)) is None:
                break
            del self.opened[ended_name]

    def add_lease(self, lease: str, session: Session) -> None:
        """Register a session under its lease."""
        self.leases[lease] = session
        while len(self.leases) > REMEMBERED:
            self.leases.popitem(last=False)

    def restore_sessions(self) -> None:
        """Continue the sessions of an earlier process of this gateway.

        Ended sessions are delivered again; the buffer ignores samples that it has.
        """
        gateway = self.gateway
        for opening, records in self.journal.read() if self.leased_parts else ():
            ticket = [record.ticket for record in records if record.ticket is not None][-1]
            now = self.current_time()
            when = datetime.fromisoformat(opening.date)
            opened_at = min(opening.opened, now)  # the clock begins anew when the machine restarts
            session = gateway.make_session(ticket, opening.sample, when, opened_at)
            session.name = opening.name
            try:
                restore(session, records, now)
            except KeyError as error:
                self.journal.fail(opening.name, f"call {error} is missing")
                continue
            session.api_key = opening.key
            gateway.restore(session)
            session.first, session.seed = opening.first, opening.seed
            self.add(session)
            self.add_lease(opening.lease, session)
            if session.is_complete:
                gateway.deliver(session)
            else:
                self.on_change(session)

    async def draw(self, session: Session, call: CallNode) -> CallNode | None:
        if not self.is_open(session):
            raise CallRefused(410, "session_ended", f"session {session.name} has ended")
        future: asyncio.Future[CallNode | None] = asyncio.get_running_loop().create_future()
        call.waiter = future
        self.gateway.ask(session, call)
        self.wake()
        return await future

    def on_change(self, session: Session) -> None:
        if session.state != "open" and self.is_open(session):
            self.on_progress(session)
        self.wake()

    # ---- called by the gateway -------------------------------------------------------------------

    @property
    def wires(self) -> Sequence[socket.socket]:
        return [wire for pool in self.pools.values() for wire in pool.wires]

    def poll(self) -> None:
        for pool in self.pools.values():
            pool.poll()

    def open_sessions(self) -> None:
        """Begin the sessions of agents, and wake the leases that wait for a sample.

        The files of the samples that the buffer has acknowledged are removed.
        """
        for pool in self.pools.values():
            pool.open_sessions()
        unacked_keys = self.gateway.outbox.list_unacked_keys() if self.unacked else ()
        for key in [key for key in self.unacked if key not in unacked_keys]:
            self.journal.remove(self.unacked.pop(key))
        self.news.set()

    def count_wanted(self) -> int:
        gateway = self.gateway
        wanted = self.asks + sum(pool.count_places() for pool in self.pools.values())
        return min(gateway.free_sessions, wanted) + len(gateway.list_parked_sessions())

    def on_answer(self, session: Session, call: CallNode, failed: str) -> None:
        future = call.waiter
        if future is None or future.done():
            return
        if failed:
            reason = f"a generator cannot sample this call: {escape_line(failed)}"
            future.set_exception(CallRefused(500, "call_refused", reason))
        else:
            future.set_result(call if call.is_answered else None)

    def on_drop(self, session: Session) -> None:
        """Forget a session that was delivered or lost, and refuse its open calls."""
        has_file = session.name in self.journal.files
        if has_file and session.key in self.gateway.outbox.list_unacked_keys():
            self.unacked[session.key] = session.name
        else:
            self.journal.remove(session.name)
        session.fail("its ticket has expired: the learner was restarted")
        for call in session.open_calls.values():
            future = call.waiter
            if future is not None and not future.done():
                reason = f"session {session.name} is lost: lease another"
                future.set_exception(CallRefused(410, "session_lost", reason))

    def on_progress(self, session: Session, ticket: Ticket | None = None) -> None:
        """Record the session's state, from which a restarted gateway continues it."""
        self.journal.append_progress(session, ticket)

    def explain_queue(self, part: str) -> WaitCause:
        agent = self.gateway.agents[part]
        if agent.serve:
            return WaitCause("agent", "a harness to lease a session (RUN/agent.url, RUN/agent.key)")
        if not any(worker.ready for worker in self.pools[part].workers):
            name = self.gateway.get_source_name(part)
            return WaitCause("place", f"a process that imports {name} to be ready")
        return WaitCause("place", f"a place: agent.at_once = {agent.at_once}")

    def wake(self) -> None:
        """Make the gateway take its next turn now."""
        self.due.set()

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
