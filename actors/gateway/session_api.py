"""The endpoint's service over a gateway: leases take samples of its tickets, calls go to its
switchboard, all in one event loop with the gateway's own turns.
"""

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
from actors.gateway.recovery.session_journal import (
    SessionJournal,
    SessionOpening,
    last_ticket,
    restore,
)
from actors.gateway.requests import RequestPolicy
from actors.gateway.sessions import CallRefused, Session, SessionCall
from actors.gateway.web import Endpoint, ListenAddress, OpenedSession
from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import encode_prompt
from asyncrl.records import private

if TYPE_CHECKING:
    from actors.gateway.service import Episode, Gateway
    from asyncrl.transport.sockets import BufferSocket, PeerSocket

POLL_S = 0.05  # a turn with no news
OVER_S = 1.0  # how long those who ask are told that the run is over
REMEMBERED = 4096  # sessions that ended, and leases


class SessionApi:
    """A `web.SessionService`.  gateway: its turns and everything here run in one thread."""

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
        # a program or function that plays a session ends with this process
        self.journal: SessionJournal | None = None
        if agent.serve:
            self.journal = SessionJournal(gateway.run_dir / f"sessions-{gateway.index}")
        self.unacked: dict[tuple[int, int, int], OpenedSession] = {}  # that ended, with a file
        self.opened: OrderedDict[str, OpenedSession] = OrderedDict()
        self.leases: OrderedDict[str, OpenedSession] = OrderedDict()
        self.episodes: dict[str, Episode] = {}
        self.drawing: dict[int, tuple[SessionCall, asyncio.Future[CallNode | None]]] = {}
        self.asks = 0  # leases that wait for a sample
        # (ticket, sample, an evaluation's version) that some session has had
        self.begun: set[tuple[int, int, Label | None]] = set()
        self.news = asyncio.Event()
        self.due = asyncio.Event()  # the gateway's next turn is
        self.pushing: AgentPool | None = None  # who plays sessions here

    # ---- what the endpoint asks ------------------------------------------------------------------

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
                found = self.leases.get(lease) or self.lease_session(lease)
                left = until - self.current_time()
                if found is not None or left <= 0 or self.is_over or self.is_ending:
                    return found
                self.news.clear()
                try:
                    await asyncio.wait_for(self.news.wait(), left)
                except TimeoutError:
                    pass
        finally:
            self.asks -= 1

    def lease_session(self, lease: str) -> OpenedSession | None:
        """The next sample as a session."""
        gateway = self.gateway
        held = next((held for held in gateway.waiting_tickets() if held.waiting), None)
        if held is None or gateway.free_sessions < 1:
            return None
        name = (held.ticket.ticket, held.waiting[0], held.ticket.exact_version)
        episode = gateway.episode(held, held.waiting.pop(0), first=name not in self.begun)
        self.begun.add(name)
        session = episode.session
        assert isinstance(session.composer, ChatFormat)
        made = OpenedSession(
            session=session,
            chat=session.composer,
            key=secrets.token_urlsafe(32),
            task=describe_task(held.ticket),
            seed=gateway.env_seed(held.ticket),
            first=episode.first,
        )
        self.keep(made, lease)
        self.add(made, episode, lease)
        return made

    def keep(self, made: OpenedSession, lease: str) -> None:
        """Have a session outlive this process. An evaluation's does not: it is of one version."""
        session = made.session
        if self.journal is None or session.ticket.kind != "train":
            return
        opening = SessionOpening(
            name=session.name,
            sample=session.sample,
            key=made.key,
            lease=lease,
            seed=made.seed,
            first=made.first,
            date=(made.chat.when or datetime.now()).isoformat(),
            opened=session.opened,
        )
        made.file = self.journal.open(opening, session.ticket)

    def add(self, made: OpenedSession, episode: Episode, lease: str) -> None:
        """Have requests find a session, by its name and its lease."""
        self.episodes[made.session.name] = episode
        self.opened[made.session.name] = self.leases[lease] = made
        while len(self.leases) > REMEMBERED:
            self.leases.popitem(last=False)
        while len(self.opened) > REMEMBERED:
            old = next((x for x in self.opened if x not in self.episodes), None)
            if old is None:
                break
            del self.opened[old]

    def restore_sessions(self) -> None:
        """Go on with the sessions of an earlier process of this gateway. Those that had ended are
        delivered again; the buffer knows the ones that it has.
        """
        gateway = self.gateway
        kept = self.journal.read() if self.journal is not None else ()
        for file, opening, records in kept:
            ticket, now = last_ticket(records), self.current_time()
            chat = gateway.chat.with_date(datetime.fromisoformat(opening.date))
            session = Session(
                ticket,
                opening.sample,
                ticket.attempt,
                gateway.limits,
                chat,
                own_prompt=encode_prompt(gateway.tokenizer, ticket.prompt),
                opened=min(opening.opened, now),  # the machine's clock may have begun again
            )
            session.name = opening.name
            try:
                last = restore(session, records, now)
            except KeyError as error:
                file.fail(f"call {error} is missing")
                continue
            episode = gateway.restore(session, last, first=opening.first)
            made = OpenedSession(
                session=session,
                chat=chat,
                key=opening.key,
                task=describe_task(ticket),
                seed=opening.seed,
                first=opening.first,
                file=file,
            )
            self.begun.add((ticket.ticket, session.sample, ticket.exact_version))
            self.add(made, episode, opening.lease)
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

    # ---- what the gateway tells ------------------------------------------------------------------

    def on_result(self, episode: Episode, message: m.CallResult) -> None:
        """A call's answer has come, or a generator has refused it."""
        call, answer = self.drawing.pop(message.id)
        if message.failed and not answer.done():
            why = f"a generator cannot draw this call: {escape_line(message.failed)}"
            answer.set_exception(CallRefused(500, "call_refused", why))
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
        """The number under which a call is drawn."""
        return next((number for number, (each, _) in self.drawing.items() if each is call), None)

    def renumber(self, was: int, now: int) -> None:
        """A call is to be drawn anew, under another number."""
        self.drawing[now] = self.drawing.pop(was)

    def on_drop(self, episode: Episode) -> None:
        """The session is no more: delivered, or lost."""
        session = episode.session
        self.episodes.pop(session.name, None)
        opened = self.opened[session.name]
        if opened.file is not None:
            key = (session.ticket.ticket, session.sample, session.attempt)
            if key in self.gateway.outbox.unacked_keys():
                self.unacked[key] = opened
            else:
                opened.file.remove()
        session.fail("its ticket is no more: the learner was started again", self.current_time())
        for number, (call, answer) in list(self.drawing.items()):
            if session.open_calls.get(call.number) is call:
                del self.drawing[number]
                if not answer.done():
                    why = f"session {session.name} is lost: lease another"
                    answer.set_exception(CallRefused(410, "session_lost", why))

    def on_resume(self, session: Session) -> None:
        """The session goes on under another ticket."""
        if (file := self.opened[session.name].file) is not None:
            file.append_progress(session, session.ticket)

    def on_report(self) -> None:
        """The buffer is told of what was sampled so far: an earlier process's count goes on."""
        for name, episode in self.episodes.items():
            session = episode.session
            if session.reported != session.tokens:
                session.reported = session.tokens
                if (file := self.opened[name].file) is not None:
                    file.append_progress(session)

    def on_end(self, session: Session) -> None:
        """The session has its outcome, or waits for it."""
        if (file := self.opened[session.name].file) is not None:
            file.append_progress(session)

    def remove_acked_files(self) -> None:
        """A sample that the buffer has needs no file."""
        waiting = self.gateway.outbox.unacked_keys() if self.unacked else ()
        for key in [key for key in self.unacked if key not in waiting]:
            file = self.unacked.pop(key).file
            assert file is not None
            file.remove()

    def requeue(self, opened: OpenedSession) -> None:
        """Its agent went with another's: the sample waits again, as one that may have acted."""
        episode = self.episodes.get(opened.session.name)
        if episode is not None and episode.session.state == "open":
            session = episode.session
            self.gateway.drop(episode)
            held = self.gateway.held[session.ticket.ticket, session.attempt]
            held.waiting.append(session.sample)

    def wake(self) -> None:
        """Have the gateway take its turn now."""
        self.due.set()

    def after_turn(self) -> None:
        """After each turn: whoever waits for a sample looks again."""
        self.remove_acked_files()
        self.news.set()


class SocketWatcher:
    """Has a gateway take its turn when its sockets or wires have something to read, and every
    POLL_S at the latest, in the endpoint's thread.
    """

    def __init__(self, gateway: Gateway, door: SessionApi) -> None:
        self.gateway = gateway
        self.door = door
        self.loop = asyncio.get_running_loop()
        self.heard: dict[int, Any] = {}  # descriptor -> what it is of
        self.clock = self.loop.call_later(POLL_S, self.tick)

    def tick(self) -> None:
        self.door.wake()
        self.clock = self.loop.call_later(POLL_S, self.tick)

    def listen(self) -> None:
        """Follow what there is to listen to: sockets and processes are replaced at times, by others
        that may have the same descriptor.
        """
        wires = self.door.pushing.wires if self.door.pushing is not None else []
        found: dict[int, Any] = {wire.fileno(): wire for wire in wires}
        tell = dict.fromkeys(found, self.door.wake)
        for each in (self.gateway.socket, self.gateway.calls_socket):
            descriptor = each.socket.fileno()
            found[descriptor] = each.socket
            tell[descriptor] = partial(self.on_readable, each)
        for descriptor, each in list(self.heard.items()):
            if found.get(descriptor) is not each:
                self.loop.remove_reader(descriptor)
                del self.heard[descriptor]
        for descriptor in found.keys() - self.heard.keys():
            self.loop.add_reader(descriptor, tell[descriptor])
        self.heard = found

    def on_readable(self, each: BufferSocket | PeerSocket) -> None:
        """A socket's descriptor has something: not always a message, and it may be read by now."""
        if each.waiting:
            self.door.wake()

    async def notify(self) -> None:
        """Until the next turn is due."""
        self.listen()
        waiting = (self.gateway.socket.waiting, self.gateway.calls_socket.waiting)
        if any(waiting):  # their descriptors tell of what is new, not of what is there
            await asyncio.sleep(0)
        else:
            await self.door.due.wait()
        self.door.due.clear()

    def close(self) -> None:
        self.clock.cancel()
        for descriptor in self.heard:
            self.loop.remove_reader(descriptor)


async def serve(gateway: Gateway) -> None:
    """The gateway's loop with the endpoint."""
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
    ears = SocketWatcher(gateway, door)
    try:
        while True:
            await ears.notify()
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
        ears.close()


def listen(door: SessionApi, bind: ListenAddress, kept: int) -> Endpoint:
    """The endpoint on its port; where the config names none, on the one of the process before, if
    nobody else has it by now. Raises ConfigError.
    """
    if kept and not bind.port:
        with suppress(ConfigError):
            return Endpoint(door, replace(bind, port=kept))
    return Endpoint(door, bind)


def describe_task(ticket: m.Ticket) -> dict[str, Any]:
    """What a harness is told of its sample."""
    prompt = ticket.prompt
    return {
        "id": prompt.id,
        "text": prompt.text,
        "messages": prompt.messages,
        "meta": prompt.meta,
        "split": prompt.split,
    }


def read_endpoint_file(run_dir: Path, name: str) -> str:
    """What an earlier gateway process wrote into RUN/agent.url or RUN/agent.key, or ""."""
    try:
        descriptor = private.open_private(run_dir / name, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor) as file:
        return file.read().strip()


def kept_port(run_dir: Path) -> int:
    """The port in RUN/agent.url; 0: there is none."""
    port = read_endpoint_file(run_dir, "agent.url").rpartition(":")[2]
    return int(port) if port.isdecimal() and int(port) < 1 << 16 else 0


def write_endpoint_files(run_dir: Path, url: str, key: str) -> None:
    """RUN/agent.url and RUN/agent.key, for a harness: the key for this user's eyes alone."""
    for name, text in (("agent.key", key), ("agent.url", url)):
        new = run_dir / f"{name}.new"
        descriptor = private.open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        new.replace(run_dir / name)
