"""The gateway process, and the sessions that it plays by itself.

These are sessions in environments (agent.env, agent.tools), or of one call."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.gateway.call_tree import CallNode
from actors.gateway.environment_pool import EnvironmentPool
from actors.gateway.environment_worker import EnvironmentEvent, EnvironmentOperation
from actors.gateway.refusals import TOO_LONG, CallRefused
from actors.gateway.service import Gateway, SessionSource, WaitCause
from actors.gateway.sessions import Session, SessionPlayer
from actors.schedule import LeasedTicket
from asyncrl.config.tree import Config
from asyncrl.tasks.evaluation_sets import resolve_reward_configs

SHOWN = 40  # characters shown of tool names


class LocalSource(SessionSource):
    """A source that plays the sessions of a part, as long as the gateway has room."""

    def __init__(self, gateway: Gateway, part: str = "") -> None:
        self.gateway = gateway
        self.part = part

    @abstractmethod
    def play(self, session: Session) -> Generator[str, Any, None]:
        """Play a session: yield what it waits for, and get the event or the answered call."""

    def count_wanted(self) -> int:
        return self.gateway.free_sessions

    def open_sessions(self) -> None:
        for grant in self.gateway.list_waiting_tickets({self.part}):
            while grant.waiting and self.gateway.free_sessions > 0:
                self.open(grant, grant.waiting.pop(0))

    def open(self, grant: LeasedTicket, sample: int) -> None:
        """Begin a session of a sample."""
        session = self.gateway.begin_session(grant, sample)
        session.play = self.play(session)
        self.resume(session, None)

    def resume(self, session: Session, result: EnvironmentEvent | CallNode | None) -> None:
        """Go on with an open session that has waited for this result."""
        if session.state == "open":
            with suppress(StopIteration):
                session.waits_for = session.play.send(result)

    def on_answer(self, session: Session, call: CallNode, failed: str) -> None:
        if failed:
            session.fail(f"a generator cannot sample its call: {failed}")
        self.resume(session, call)

    def explain_queue(self, part: str) -> WaitCause:
        sessions = self.gateway.config.agent.sessions
        return WaitCause("place", f"a place: agent.sessions = {sessions}")


class SingleCompletions(LocalSource):
    """A source that makes each sample a session of one call, for the config's reward.

    The call has the random stream of a sample in a run without sessions.
    """

    def play(self, session: Session) -> Generator[str, Any, None]:
        try:
            call = session.place(ids=session.own_prompt, now=time.monotonic())
        except CallRefused as refused:  # a prompt that is empty or too long
            session.shortened = refused.code == TOO_LONG
            session.fail(str(refused))
            return
        self.gateway.ask(session, call)
        yield "its completion"
        if call.is_answered:
            session.judge(time.monotonic())
        else:  # cut before its first token
            session.fail(f"agent.{session.limit or 'deadline_s'} ended it")


class EnvironmentSource(LocalSource):
    """A source that plays each session of a part in an environment, one side or both."""

    def __init__(self, gateway: Gateway, part: str) -> None:
        super().__init__(gateway, part)
        self.agent = gateway.agents[part]
        reward = resolve_reward_configs(gateway.config).get(part, gateway.config).reward
        name = gateway.get_source_name(part)
        self.pool = EnvironmentPool(self.agent, judged=reward.uses_reward_processes, name=name)

    @property
    def wires(self) -> Sequence[socket.socket]:
        return self.pool.wires

    def poll(self) -> None:
        for event in self.pool.poll():
            session = self.gateway.sessions.get(event.session)
            if session is None or session.state != "open":
                continue
            if event.kind == "lost":  # it begins anew after its environment's process was lost
                self.gateway.drop(session)
                grant = self.gateway.held[session.ticket_key]
                self.open(grant, session.sample)
            elif event.kind == "failed":
                session.fail(event.why)
            else:
                self.resume(session, event)

    def play(self, session: Session) -> Generator[str, Any, None]:
        ticket = session.ticket
        operation = EnvironmentOperation(
            session=session.number,
            kind="reset",
            prompt=ticket.prompt,
            seed=session.seed,
            attempt=ticket.attempt,
            first=session.first,
            opponent=self.agent.choose_opponent(ticket.kind),
        )
        self.pool.reset(operation)
        event: EnvironmentEvent = yield "the reset of its environment"
        tools, pays, reward = event.tools, event.pays, 0.0  # pays: its tools score it
        parts: dict[str, float] = {}
        shares: dict[int, float] = {}  # call number -> reward
        players: dict[int, SessionPlayer] = {}  # a new game has a new opponent
        while not event.ended:
            player = SessionPlayer(self.gateway.templated, event.asked)
            player = players.setdefault(event.asked, player)
            call: CallNode | None = None
            try:
                call = player.place_observation(session, event.obs, tools, time.monotonic())
                self.gateway.ask(session, call)
                yield "an answer of the engine"
            except CallRefused as error:
                # a limit ends the session; messages that the template refuses fail it
                if error.code not in ("session_limit", TOO_LONG):
                    session.fail(str(error))
                    return
            if call is not None and call.is_answered and not session.limit:
                player.on_answer(call)
                text = self.gateway.chat.decode_visible(call.ids)
                self.pool.step(EnvironmentOperation(session.number, "step", text, call.answer))
                event = yield describe_request(call.answer)
            else:  # at a limit that the policy can cause, the session has its reward so far
                session.shortened = True
                if self.agent.at_limit == "fail":
                    session.fail(f"it reached agent.{session.limit or 'context'}")
                elif pays:
                    self.pool.step(EnvironmentOperation(session.number, "score"))
                    event = yield "its get_reward"
                else:
                    judge = bool(self.agent.tools)
                    event = EnvironmentEvent(session.number, "ok", ended=True, judge=judge)
            if session.state != "open":
                return
            tools = event.tools or tools
            if event.reward and session.last is not None:
                reward += event.reward
                number = session.last.number
                shares[number] = shares.get(number, 0.0) + event.reward
            for name, value in event.parts.items():
                parts[name] = parts.get(name, 0.0) + value
        session.shortened |= event.truncated
        now = time.monotonic()
        try:
            if not event.judge:
                calls = shares if self.agent.fork == "end" else {}
                session.set_reward(reward, parts, calls, now=now)
            elif session.last is not None:
                session.judge(now)
        except CallRefused as refused:  # its time has run out, or the sum is not a valid reward
            session.fail(f"its environment's rewards cannot be used: {refused}")

    def on_drop(self, session: Session) -> None:
        self.pool.end(session.number)

    def explain_wait(self, session: Session, limit: str, left_s: float, now: float) -> WaitCause:
        text = session.waits_for
        if session.number in self.pool.processes:
            place = self.pool.locate(session.number, now)
            if place.left_s <= left_s or place.front is None:
                limit, left_s = place.limit, place.left_s
            if place.front is None:
                text = f"a process to import {self.pool.named}"
            if self.pool.replaced:
                text += f" ({self.pool.replaced})"
            if place.front not in (None, session.number):
                front = self.gateway.sessions.get(place.front)
                name = front.name if front is not None else "one that has ended"
                text += f", behind that of session {name} in the same process"
        return WaitCause(self.kind, text, limit, left_s)

    def close(self) -> None:
        self.pool.close()


def describe_request(answer: dict[str, Any] | None) -> str:
    """Describe an answer's request to its environment: a step, or named tools."""
    calls = (answer or {}).get("tool_calls") or ()
    names = ascii(", ".join(str(call["function"]["name"]) for call in calls)[:SHOWN])[1:-1]
    return f"its tool {names}" if names else "the step of its environment"


# ---- the process ---------------------------------------------------------------------------------


def make_source(gateway: Gateway, part: str) -> SessionSource:
    """Make the source of a part's sessions; all parts with agents over HTTP share one."""
    agent = gateway.agents[part]
    if not agent.http:
        return (EnvironmentSource if agent.uses_sessions else SingleCompletions)(gateway, part)
    from actors.gateway.session_api import SessionApi

    shared = (source for source in gateway.sources.values() if isinstance(source, SessionApi))
    return next(shared, None) or SessionApi(gateway)


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run gateway `index`.

    Returns True when the run is finished, False when SIGTERM ended the process.
    """
    over_http = config.serves_agents
    if over_http:  # before the heap is frozen
        from actors.gateway import http_gateway
    gateway = Gateway(config, run_dir, index, source=make_source)

    def play() -> None:
        gc.collect()
        gc.freeze()  # before any session waits: later collections skip these objects
        if over_http:
            asyncio.run(http_gateway.serve(gateway))
        else:
            gateway.loop()

    return gateway.run_until_signal(play)
