"""The sessions behind the HTTP endpoint, over a gateway.

Leases take samples of the gateway's tickets, and calls go to its router.  One event loop runs the
endpoint and the gateway's turns."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.gateway.agents.agent_pool import AgentPool
from actors.gateway.call_tree import CallNode
from actors.gateway.chat import ChatFormat
from actors.gateway.endpoint.requests import RequestPolicy
from actors.gateway.endpoint.server import ListenAddress
from actors.gateway.endpoint.web import Endpoint, OpenedSession
from actors.gateway.recovery.session_journal import (
    SessionJournal,
    SessionOpening,
    last_ticket,
    restore,
)
from actors.gateway.sessions import CallRefused, Session, SessionCall
from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import encode_prompt
from asyncrl.records import private

if TYPE_CHECKING:
    from actors.gateway.service import Episode, Gateway
    from asyncrl.transport.sockets import BufferSocket, PeerSocket

POLL_S = 0.05  # longest wait between two turns
OVER_S = 1.0  # how long the endpoint still answers, with 410, after the run's end
REMEMBERED = 4096  # leases, and ended sessions, that can still be looked up


class SessionApi:
    """A `web.SessionService` over a gateway, whose turns run in the same thread."""

    def __init__(self, gateway: Gateway) -> None:
        agent = gateway.config.agent
        self.gateway = gateway
        self.manners = RequestPolicy(
            agent.model,
            agent.other_models,
            agent.sampling,
            vocabulary=gateway.vocabulary,
            forced=agent.forced,
            stops=frozenset(gateway.stops),
        )
        self.run_key = read_endpoint_file(gateway.run_dir, "agent.key") or secrets.token_urlsafe(32)
        # None for sessions that end with this process: a program or function plays them
        self.journal: SessionJournal | None = None
        if agent.serve:
            self.journal = SessionJournal(gateway.run_dir / f"sessions-{gateway.index}")
        # (ticket, sample, attempt) -> an ended session whose file is kept until it is acknowledged
        self.unacked: dict[tuple[int, int, int], OpenedSession] = {}
        self.opened: OrderedDict[str, OpenedSession] = OrderedDict()
        self.leases: OrderedDict[str, OpenedSession] = OrderedDict()
        self.episodes: dict[str, Episode] = {}
        self.drawing: dict[int, tuple[SessionCall, asyncio.Future[CallNode | None]]] = {}
        self.asks = 0  # leases that wait for a sample
        # (ticket, sample, an evaluation's version) that a session has begun
        self.begun: set[tuple[int, int, Label | None]] = set()
        self.news = asyncio.Event()  # set after each turn
        self.due = asyncio.Event()  # set when the gateway should take its next turn
        self.pushing: AgentPool | None = None  # plays the sessions, with agent.command or .function

    # ---- called by the endpoint ------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.gateway.over

    @property
    def is_ending(self) -> bool:
        return self.gateway.ending

    def current_time(self) -> float:
        return time.monotonic()

    def find(self, name: str) -> OpenedSession | None:
        return self.opened.get(name)

    async def lease(self, lease: str, wait_s: float) -> OpenedSession | None:
        until = self.current_time() + wait_s
        self.asks += 1
        self.wake()
        try:
            while True:
                opened = self.leases.get(lease) or self.lease_session(lease)
                seconds_left = until - self.current_time()
                if opened is not None or seconds_left <= 0 or self.is_over or self.is_ending:
                    return opened
                self.news.clear()
                try:
                    await asyncio.wait_for(self.news.wait(), seconds_left)
                except TimeoutError:
                    pass
        finally:
            self.asks -= 1

    def lease_session(self, lease: str) -> OpenedSession | None:
        """Begin a session of the next waiting sample; None when there is none or no room."""
        gateway = self.gateway
        grant = next((grant for grant in gateway.waiting_tickets() if grant.waiting), None)
        if grant is None or gateway.free_sessions < 1:
            return None
        name = (grant.ticket.ticket, grant.waiting[0], grant.ticket.exact_version)
        episode = gateway.episode(grant, grant.waiting.pop(0), first=name not in self.begun)
        self.begun.add(name)
        session = episode.session
        assert isinstance(session.composer, ChatFormat)
        opened = OpenedSession(
            session=session,
            chat=session.composer,
            key=secrets.token_urlsafe(32),
            task=describe_task(grant.ticket),
            seed=gateway.env_seed(grant.ticket),
            first=episode.first,
        )
        self.keep(opened, lease)
        self.add(opened, episode, lease)
        return opened

    def keep(self, opened: OpenedSession, lease: str) -> None:
        """Begin the file by which a training session outlives this process.

        An evaluation's session does not: a restarted gateway evaluates another version.
        """
        session = opened.session
        if self.journal is None or session.ticket.kind != "train":
            return
        opening = SessionOpening(
            name=session.name,
            sample=session.sample,
            key=opened.key,
            lease=lease,
            seed=opened.seed,
            first=opened.first,
            date=(opened.chat.when or datetime.now()).isoformat(),
            opened=session.opened,
        )
        opened.file = self.journal.open(opening, session.ticket)

    def add(self, opened: OpenedSession, episode: Episode, lease: str) -> None:
        """Register a session under its name and its lease."""
        self.episodes[opened.session.name] = episode
        self.opened[opened.session.name] = self.leases[lease] = opened
        while len(self.leases) > REMEMBERED:
            self.leases.popitem(last=False)
        while len(self.opened) > REMEMBERED:
            ended = next((x for x in self.opened if x not in self.episodes), None)
            if ended is None:
                break
            del self.opened[ended]

    def restore_sessions(self) -> None:
        """Continue the sessions of an earlier process of this gateway.

        Those that had ended are delivered again; the buffer ignores samples that it has.
        """
        gateway = self.gateway
        for file, opening, records in self.journal.read() if self.journal is not None else ():
            ticket, now = last_ticket(records), self.current_time()
            chat = gateway.chat.with_date(datetime.fromisoformat(opening.date))
            session = Session(
                ticket,
                opening.sample,
                ticket.attempt,
                gateway.limits,
                chat,
                own_prompt=encode_prompt(gateway.tokenizer, ticket.prompt),
                opened=min(opening.opened, now),  # the clock begins anew when the machine restarts
            )
            session.name = opening.name
            try:
                last = restore(session, records, now)
            except KeyError as error:
                file.fail(f"call {error} is missing")
                continue
            episode = gateway.restore(session, last, first=opening.first)
            opened = OpenedSession(
                session=session,
                chat=chat,
                key=opening.key,
                task=describe_task(ticket),
                seed=opening.seed,
                first=opening.first,
                file=file,
            )
            self.begun.add((ticket.ticket, session.sample, ticket.exact_version))
            self.add(opened, episode, opening.lease)
            if session.complete:
                gateway.deliver(episode)
            else:
                self.on_change(session)

    async def draw(self, session: Session, call: SessionCall) -> CallNode | None:
        episode = self.episodes.get(session.name)
        if episode is None:
            raise CallRefused(410, "session_ended", f"session {session.name} has ended")
        answer: asyncio.Future[CallNode | None] = asyncio.get_running_loop().create_future()
        self.drawing[self.gateway.ask(episode, call)] = call, answer
        self.wake()
        return await answer

    def on_change(self, session: Session) -> None:
        episode = self.episodes.get(session.name)
        if episode is not None and session.state != "open":
            self.on_end(session)
        if episode is not None and session.state == "judging":
            self.gateway.submit(episode)
        self.wake()

    # ---- called by the gateway -------------------------------------------------------------------

    def on_result(self, episode: Episode, message: m.CallResult) -> None:
        """Handle a call's result, or a generator's refusal of it."""
        call, answer = self.drawing.pop(message.id)
        if message.failed and not answer.done():
            reason = f"a generator cannot sample this call: {escape_line(message.failed)}"
            answer.set_exception(CallRefused(500, "call_refused", reason))
        node = episode.session.on_result(
            call,
            np.frombuffer(message.tokens, "<i4"),
            np.frombuffer(message.logprobs, "<f4"),
            message.spans,
            message.finish,
            past=message.lost,
            now=self.current_time(),
        )
        if node is not None and not node.aside:
            episode.last = call
        if not answer.done():
            answer.set_result(node)

    def call_of(self, call: SessionCall) -> int | None:
        """Find the number under which a call was submitted."""
        return next((number for number, (own, _) in self.drawing.items() if own is call), None)

    def renumber(self, was: int, now: int) -> None:
        """Move a call to another number, under which it is submitted again."""
        self.drawing[now] = self.drawing.pop(was)

    def on_drop(self, episode: Episode) -> None:
        """Forget a session that was delivered or lost, and refuse its open calls."""
        session = episode.session
        self.episodes.pop(session.name, None)
        opened = self.opened[session.name]
        if opened.file is not None:
            key = (session.ticket.ticket, session.sample, session.attempt)
            if key in self.gateway.outbox.unacked_keys():
                self.unacked[key] = opened
            else:
                opened.file.remove()
        session.fail("its ticket has expired: the learner was restarted", self.current_time())
        for number, (call, answer) in list(self.drawing.items()):
            if session.open_calls.get(call.number) is call:
                del self.drawing[number]
                if not answer.done():
                    reason = f"session {session.name} is lost: lease another"
                    answer.set_exception(CallRefused(410, "session_lost", reason))

    def on_resume(self, session: Session) -> None:
        """Record that the session goes on under another ticket."""
        if (file := self.opened[session.name].file) is not None:
            file.append_progress(session, session.ticket)

    def on_report(self) -> None:
        """Record the token counts of a report, so that a restarted gateway continues them."""
        for name, episode in self.episodes.items():
            session = episode.session
            if session.reported != session.tokens:
                session.reported = session.tokens
                if (file := self.opened[name].file) is not None:
                    file.append_progress(session)

    def on_end(self, session: Session) -> None:
        """Record that the session has its outcome, or waits for its reward."""
        if (file := self.opened[session.name].file) is not None:
            file.append_progress(session)

    def remove_acked_files(self) -> None:
        """Remove the files of the samples that the buffer has acknowledged."""
        waiting = self.gateway.outbox.unacked_keys() if self.unacked else ()
        for key in [key for key in self.unacked if key not in waiting]:
            file = self.unacked.pop(key).file
            assert file is not None
            file.remove()

    def requeue(self, opened: OpenedSession) -> None:
        """Put the sample of a session back that lost its agent through another's fault."""
        episode = self.episodes.get(opened.session.name)
        if episode is not None and episode.session.state == "open":
            session = episode.session
            self.gateway.drop(episode)
            grant = self.gateway.held[session.ticket.ticket, session.attempt]
            grant.waiting.append(session.sample)

    def wake(self) -> None:
        """Make the gateway take its next turn now."""
        self.due.set()

    def after_turn(self) -> None:
        """Wake the leases that wait for a sample, after each turn of the gateway."""
        self.remove_acked_files()
        self.news.set()


class SocketWatcher:
    """Wakes a gateway when one of its sockets is readable, and every POLL_S."""

    def __init__(self, gateway: Gateway, door: SessionApi) -> None:
        self.gateway = gateway
        self.door = door
        self.loop = asyncio.get_running_loop()
        self.watched: dict[int, Any] = {}  # descriptor -> its socket
        self.clock = self.loop.call_later(POLL_S, self.tick)

    def tick(self) -> None:
        self.door.wake()
        self.clock = self.loop.call_later(POLL_S, self.tick)

    def listen(self) -> None:
        """Register the current descriptors with the event loop.

        Sockets and processes are replaced at times, by others that may get the same descriptor.
        """
        wires = self.door.pushing.wires if self.door.pushing is not None else []
        current: dict[int, Any] = {wire.fileno(): wire for wire in wires}
        callbacks = dict.fromkeys(current, self.door.wake)
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

    def on_readable(self, peer: BufferSocket | PeerSocket) -> None:
        """Wake the gateway if the socket has a message, which zmq does not promise."""
        if peer.waiting:
            self.door.wake()

    async def notify(self) -> None:
        """Wait until the next turn is due."""
        self.listen()
        waiting = (self.gateway.socket.waiting, self.gateway.calls_socket.waiting)
        if any(waiting):  # zmq's descriptors signal new messages only, not those already there
            await asyncio.sleep(0)
        else:
            await self.door.due.wait()
        self.door.due.clear()

    def close(self) -> None:
        self.clock.cancel()
        for descriptor in self.watched:
            self.loop.remove_reader(descriptor)


async def serve(gateway: Gateway) -> None:
    """Run a gateway's turns and its endpoint until the run or the process ends."""
    agent = gateway.config.agent
    door = gateway.door = SessionApi(gateway)
    bind = ListenAddress(
        agent.host,
        agent.port,
        agent.certificate,
        agent.private_key,
        agent.behind_proxy,
    )
    endpoint = listen(door, bind, kept_port(gateway.run_dir))
    door.restore_sessions()
    await endpoint.start()
    write_endpoint_files(gateway.run_dir, endpoint.url, door.run_key)
    gateway.greet()
    if agent.command or agent.function:
        door.pushing = AgentPool(door, endpoint.url)
    watcher = SocketWatcher(gateway, door)
    try:
        while True:
            await watcher.notify()
            if gateway.step():
                break
            if door.pushing is not None:
                door.pushing.step()
            door.after_turn()
        gateway.finish()
        door.news.set()
        if gateway.over:
            if door.journal is not None:
                door.journal.clear()
            await asyncio.sleep(OVER_S)
    finally:
        if door.pushing is not None:
            door.pushing.close()
        await endpoint.stop()
        watcher.close()


def listen(door: SessionApi, bind: ListenAddress, kept: int) -> Endpoint:
    """Bind the endpoint to its port.

    Without agent.port it is the earlier process's port, if that is still free.  Raises ConfigError
    when the port cannot be bound.
    """
    if kept and not bind.port:
        with suppress(ConfigError):
            return Endpoint(door, replace(bind, port=kept))
    return Endpoint(door, bind)


def describe_task(ticket: m.Ticket) -> dict[str, Any]:
    """Describe a sample to its harness: the prompt without its answer."""
    prompt = ticket.prompt
    return {
        "id": prompt.id,
        "text": prompt.text,
        "messages": prompt.messages,
        "meta": prompt.meta,
        "split": prompt.split,
    }


def read_endpoint_file(run_dir: Path, name: str) -> str:
    """Read RUN/agent.url or RUN/agent.key of an earlier process; "" if it is missing."""
    try:
        descriptor = private.open_private(run_dir / name, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor) as file:
        return file.read().strip()


def kept_port(run_dir: Path) -> int:
    """Read the port in RUN/agent.url; 0 if there is none."""
    port = read_endpoint_file(run_dir, "agent.url").rpartition(":")[2]
    return int(port) if port.isdecimal() and int(port) < 1 << 16 else 0


def write_endpoint_files(run_dir: Path, url: str, key: str) -> None:
    """Write RUN/agent.url and RUN/agent.key, which only this user can read."""
    for name, text in (("agent.key", key), ("agent.url", url)):
        new = run_dir / f"{name}.new"
        descriptor = private.open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        new.replace(run_dir / name)
