"""The endpoint's service over a gateway: leases take samples of its tickets, calls go to its
switchboard, all in one event loop with the gateway's own turns.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actors.gateway.chat import Chat
from actors.gateway.forest import Node
from actors.gateway.pushed.pushing import Pushing
from actors.gateway.requests import Manners
from actors.gateway.sessions import Call, CallRefused, Session
from actors.gateway.web import Bind, Endpoint, Opened
from asyncrl.contract import messages as m
from asyncrl.records import private

if TYPE_CHECKING:
    from actors.gateway.service import Episode, Gateway

OVER_S = 1.0  # how long those who ask are told that the run is over
REMEMBERED = 4096  # sessions that ended, and leases


class Door:
    """A `web.Service`.  gateway: its turns and everything here run in one thread."""

    def __init__(self, gateway: Gateway) -> None:
        agent = gateway.config.agent
        self.gateway = gateway
        self.manners = Manners(agent.model, agent.other_models, agent.sampling)
        self.run_key = secrets.token_urlsafe(32)
        self.opened: OrderedDict[str, Opened] = OrderedDict()
        self.leases: OrderedDict[str, Opened] = OrderedDict()
        self.episodes: dict[str, Episode] = {}
        self.drawing: dict[int, tuple[Call, asyncio.Future[Node | None]]] = {}
        self.asks = 0  # leases that wait for a sample
        self.begun: set[tuple[int, int]] = set()  # (ticket, sample) that some session has had
        self.news = asyncio.Event()
        self.bell, self.ring = socket.socketpair()
        self.pushing: Pushing | None = None  # who plays sessions here
        self.bell.setblocking(False)
        self.ring.setblocking(False)

    # ---- what the endpoint asks ------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.gateway.over

    @property
    def ending(self) -> bool:
        return self.gateway.ending

    @property
    def descriptors(self) -> list[int]:
        """What the gateway is to wait for."""
        wires = self.pushing.descriptors if self.pushing is not None else []
        return [self.bell.fileno(), *wires]

    def now(self) -> float:
        return time.monotonic()

    def find(self, name: str) -> Opened | None:
        return self.opened.get(name)

    async def lease(self, lease: str, wait_s: float) -> Opened | None:
        until = self.now() + wait_s
        self.asks += 1
        self.wake()
        try:
            while True:
                found = self.leases.get(lease) or self.take(lease)
                left = until - self.now()
                if found is not None or left <= 0 or self.over or self.ending:
                    return found
                self.news.clear()
                try:
                    await asyncio.wait_for(self.news.wait(), left)
                except TimeoutError:
                    pass
        finally:
            self.asks -= 1

    def take(self, lease: str) -> Opened | None:
        """The next sample as a session."""
        gateway = self.gateway
        held = next((held for held in gateway.line() if held.waiting), None)
        if held is None or gateway.room < 1:
            return None
        name = (held.ticket.ticket, held.waiting[0])
        episode = gateway.episode(held, held.waiting.pop(0), first=name not in self.begun)
        self.begun.add(name)
        session = episode.session
        assert isinstance(session.composer, Chat)
        prompt = held.ticket.prompt
        task = {
            "id": prompt.id,
            "text": prompt.text,
            "messages": prompt.messages,
            "meta": prompt.meta,
            "split": prompt.split,
        }
        made = Opened(
            session=session,
            chat=session.composer,
            key=secrets.token_urlsafe(32),
            task=task,
            seed=gateway.env_seed(held.ticket),
            first=episode.first,
        )
        self.episodes[session.name] = episode
        self.opened[session.name] = self.leases[lease] = made
        while len(self.leases) > REMEMBERED:
            self.leases.popitem(last=False)
        while len(self.opened) > REMEMBERED:
            old = next((x for x in self.opened if x not in self.episodes), None)
            if old is None:
                break
            del self.opened[old]
        return made

    async def draw(self, session: Session, call: Call) -> Node | None:
        episode = self.episodes.get(session.name)
        if episode is None:
            raise CallRefused(410, "session_ended", f"session {session.name} has ended")
        answer: asyncio.Future[Node | None] = asyncio.get_running_loop().create_future()
        self.drawing[self.gateway.ask(episode, call)] = call, answer
        self.wake()
        return await answer

    def changed(self, session: Session) -> None:
        episode = self.episodes.get(session.name)
        if episode is not None and session.state == "judging":
            self.gateway.submit(episode)
        self.wake()

    # ---- what the gateway tells ------------------------------------------------------------------

    def drawn(self, episode: Episode, message: m.Called) -> None:
        """A call's answer has come."""
        call, answer = self.drawing.pop(message.id)
        node = episode.session.drawn(
            call,
            np.frombuffer(message.tokens, "<i4"),
            np.frombuffer(message.logprobs, "<f4"),
            message.spans,
            message.finish,
            past=message.lost,
            now=self.now(),
        )
        if node is not None and not node.aside:
            episode.last = call
        if not answer.done():
            answer.set_result(node)

    def call_of(self, call: Call) -> int | None:
        """The number under which a call is drawn."""
        return next((number for number, (each, _) in self.drawing.items() if each is call), None)

    def renumber(self, was: int, now: int) -> None:
        """A call is to be drawn anew, under another number."""
        self.drawing[now] = self.drawing.pop(was)

    def dropped(self, episode: Episode) -> None:
        """The session is no more: delivered, or lost."""
        session = episode.session
        self.episodes.pop(session.name, None)
        session.fail("its ticket is no more: the learner was started again", self.now())
        for number, (call, answer) in list(self.drawing.items()):
            if session.open_calls.get(call.number) is call:
                del self.drawing[number]
                if not answer.done():
                    why = f"session {session.name} is lost: lease another"
                    answer.set_exception(CallRefused(410, "session_lost", why))

    def lost(self, opened: Opened) -> None:
        """Its agent went with another's: the sample waits again, as one that may have acted."""
        episode = self.episodes.get(opened.session.name)
        if episode is not None and episode.session.state == "open":
            session = episode.session
            self.gateway.drop(episode)
            held = self.gateway.held[session.ticket.ticket, session.attempt]
            held.waiting.append(session.sample)

    def wake(self) -> None:
        """Have the gateway take its turn now."""
        try:
            self.ring.send(b"\0")
        except BlockingIOError:
            pass  # it is woken already

    def turned(self) -> None:
        """After each turn: whoever waits for a sample looks again."""
        try:
            while self.bell.recv(4096):
                pass
        except BlockingIOError:
            pass
        self.news.set()


async def serve(gateway: Gateway) -> None:
    """The gateway's loop with the endpoint."""
    agent = gateway.config.agent
    door = gateway.door = Door(gateway)
    bind = Bind(
        agent.host,
        agent.port,
        agent.certificate,
        agent.private_key,
        agent.behind_proxy,
    )
    endpoint = Endpoint(door, bind)
    await endpoint.start()
    told(gateway.run_dir, endpoint.url, door.run_key)
    loop = asyncio.get_running_loop()
    gateway.greet()
    if agent.command or agent.function:
        door.pushing = Pushing(door, endpoint.url)
    try:
        with ThreadPoolExecutor(1) as pool:
            while True:
                await loop.run_in_executor(pool, gateway.wait)
                if gateway.turn():
                    break
                if door.pushing is not None:
                    door.pushing.turn()
                door.turned()
        gateway.turned_last()
        door.news.set()
        if gateway.over:
            await asyncio.sleep(OVER_S)
    finally:
        if door.pushing is not None:
            door.pushing.close()
        await endpoint.stop()
        door.bell.close()
        door.ring.close()


def told(run_dir: Path, url: str, key: str) -> None:
    """RUN/agent.url and RUN/agent.key, for a harness: the key for this user's eyes alone."""
    for name, text in (("agent.key", key), ("agent.url", url)):
        new = run_dir / f"{name}.new"
        descriptor = private.opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        new.replace(run_dir / name)
