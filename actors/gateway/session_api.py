"""Sessions over HTTP: a source for the gateway, and the service of the endpoint.

Leases take samples of the gateway's tickets, and calls go to its router.  One event loop runs the
endpoint and the gateway's turns.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection
from datetime import datetime

from actors.gateway.call_tree import CallNode
from actors.gateway.endpoint.requests import RequestPolicy
from actors.gateway.recovery.session_journal import (
    SessionJournal,
    SessionOpening,
    read_endpoint_file,
    restore,
)
from actors.gateway.refusals import CallRefused
from actors.gateway.service import Gateway, SessionSource, WaitCause
from actors.gateway.sessions import Session
from asyncrl.contract.messages import SampleKey, Ticket
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label

REMEMBERED = 4096  # leases, and ended sessions, that can still be looked up
# the description of a session's wait, by the key of the agent that plays it
AGENTS = {
    "serve": "its harness: the next call, or its reward",
    "command": "its program (agent.command): the next call, or its end",
    "function": "its function (agent.function): the next call, or its end",
    "env": "its environment (agent.env): the next call, or its end",
}


class SessionApi(SessionSource):
    """Sessions over HTTP: the service of a `web.WebApp`, in the thread of the gateway's turns."""

    def __init__(self, gateway: Gateway, part: str = "") -> None:
        self.gateway = gateway
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
        self.answers: dict[CallNode, asyncio.Future[CallNode | None]] = {}  # of open calls
        self.asks = 0  # leases that wait for a sample
        self.starting: set[str] = set()  # parts without a ready agents' process
        # (ticket, sample, an evaluation's version) that a session has begun
        self.begun: set[tuple[int, int, Label | None]] = set()
        self.news = asyncio.Event()  # set after each turn
        self.due = asyncio.Event()  # set when the gateway should take its next turn

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
                session = self.leases.get(lease) or self.lease_session(lease, self.leased_parts)
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

    def lease_session(self, lease: str, parts: Collection[str]) -> Session | None:
        """Begin a session of the parts' next waiting sample; None without one, or room."""
        gateway = self.gateway
        grant = next(iter(gateway.list_waiting_tickets(parts)), None)
        if grant is None or gateway.free_sessions < 1:
            return None
        name = (grant.ticket.ticket, grant.waiting[0], grant.ticket.exact_version)
        session = gateway.begin_session(grant, grant.waiting.pop(0), first=name not in self.begun)
        self.begun.add(name)
        # an evaluation's session has no file: a restarted gateway evaluates another version
        if gateway.get_agent(session).serve and session.ticket.kind == "train":
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
        self.add(session, lease)
        return session

    def is_open(self, session: Session) -> bool:
        """Whether the gateway has the session, which was neither delivered nor lost."""
        return session.number in self.gateway.sessions

    def add(self, session: Session, lease: str) -> None:
        """Register a session under its name and its lease."""
        self.opened[session.name] = self.leases[lease] = session
        while len(self.leases) > REMEMBERED:
            self.leases.popitem(last=False)
        while len(self.opened) > REMEMBERED:
            ended = (x for x, other in self.opened.items() if not self.is_open(other))
            if (ended_name := next(ended, None)) is None:
                break
            del self.opened[ended_name]

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
            session.first, session.seed = opening.first, opening.seed
            session.api_key = opening.key
            gateway.restore(session)
            self.begun.add((ticket.ticket, session.sample, ticket.exact_version))
            self.add(session, opening.lease)
            if session.is_complete:
                gateway.deliver(session)
            else:
                self.on_change(session)

    async def draw(self, session: Session, call: CallNode) -> CallNode | None:
        if not self.is_open(session):
            raise CallRefused(410, "session_ended", f"session {session.name} has ended")
        future: asyncio.Future[CallNode | None] = asyncio.get_running_loop().create_future()
        self.answers[call] = future
        self.gateway.ask(session, call)
        self.wake()
        return await future

    def on_change(self, session: Session) -> None:
        if session.state != "open" and self.is_open(session):
            self.on_progress(session)
            if session.state == "judging":
                self.gateway.submit(session)
        self.wake()

    # ---- called by the gateway -------------------------------------------------------------------

    def count_wanted(self) -> int:
        gateway = self.gateway
        return min(gateway.free_sessions, self.asks) + len(gateway.list_parked_sessions())

    def on_answer(self, session: Session, call: CallNode, failed: str) -> None:
        future = self.answers.pop(call)
        if future.done():
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
            future = self.answers.pop(call, None)
            if future is not None and not future.done():
                reason = f"session {session.name} is lost: lease another"
                future.set_exception(CallRefused(410, "session_lost", reason))

    def on_progress(self, session: Session, ticket: Ticket | None = None) -> None:
        """Record the session's state, from which a restarted gateway continues it."""
        self.journal.append_progress(session, ticket)

    def explain_wait(self, session: Session, limit: str, left_s: float, now: float) -> WaitCause:
        agent = self.gateway.get_agent(session)
        text = AGENTS[next(key for key in AGENTS if getattr(agent, key))]
        return WaitCause("agent", text, limit, left_s)

    def explain_queue(self, part: str) -> WaitCause:
        agent = self.gateway.agents[part]
        if agent.serve:
            return WaitCause("agent", "a harness to lease a session (RUN/agent.url, RUN/agent.key)")
        if part in self.starting:
            name = self.gateway.get_source_name(part)
            return WaitCause("place", f"a process that imports {name} to be ready")
        return WaitCause("place", f"a place: agent.at_once = {agent.at_once}")

    def wake(self) -> None:
        """Make the gateway take its next turn now."""
        self.due.set()

    def wake_leases(self) -> None:
        """Wake the leases that wait for a sample, after each turn of the gateway.

        The files of the samples that the buffer has acknowledged are removed.
        """
        unacked_keys = self.gateway.outbox.list_unacked_keys() if self.unacked else ()
        for key in [key for key in self.unacked if key not in unacked_keys]:
            self.journal.remove(self.unacked.pop(key))
        self.news.set()
