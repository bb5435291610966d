"""The gateway process, and the sessions that it plays by itself.

These are sessions in environments (agent.env, agent.tools), or of one call."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class EnvironmentState:
    """The results of a session's environment so far."""

    doing: str  # the newest request to it, in words
    tools: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)  # call number -> reward
    pays: bool = False  # its tools score it
    players: dict[int, SessionPlayer] = field(default_factory=dict)  # by their games
    active: SessionPlayer = field(init=False)  # has the turn


class LocalSource(SessionSource):
    """A source that begins the sessions of a part as long as the gateway has room."""

    def __init__(self, gateway: Gateway, part: str = "") -> None:
        self.gateway = gateway
        self.part = part

    def count_wanted(self) -> int:
        return self.gateway.free_sessions

    def open_sessions(self) -> None:
        for grant in self.gateway.list_waiting_tickets({self.part}):
            while grant.waiting and self.gateway.free_sessions > 0:
                self.open(grant, grant.waiting.pop(0), first=True)

    def explain_queue(self, part: str) -> WaitCause:
        sessions = self.gateway.config.agent.sessions
        return WaitCause("place", f"a place: agent.sessions = {sessions}")

    @abstractmethod
    def open(self, grant: LeasedTicket, sample: int, *, first: bool) -> None:
        """Begin a session of a sample."""


class SingleCompletions(LocalSource):
    """A source that makes each sample a session of one call, for the config's reward.

    The call has the random stream of a sample in a run without sessions.
    """

    def open(self, grant: LeasedTicket, sample: int, *, first: bool) -> None:
        session = self.gateway.begin_session(grant, sample, first=first)
        now = time.monotonic()
        try:
            call = session.place(ids=session.own_prompt, now=now)
        except CallRefused as refused:  # a prompt that is empty or too long
            session.fail(str(refused))
        else:
            self.gateway.ask(session, call)

    def on_answer(self, session: Session, call: CallNode, failed: str) -> None:
        now = time.monotonic()
        if failed:
            session.fail(f"a generator cannot sample it: {failed}")
        elif not call.is_answered:  # cut before its first token
            session.fail(f"agent.{session.limit or 'deadline_s'} ended it")
        elif session.state == "open" and session.judge(now):
            self.gateway.submit(session)

    def explain_wait(self, session: Session, limit: str, left_s: float, now: float) -> WaitCause:
        return WaitCause("reward", "the reward of its answer", limit, left_s)


class EnvironmentSource(LocalSource):
    """A source that plays each session of a part in an environment, one side or both."""

    def __init__(self, gateway: Gateway, part: str) -> None:
        super().__init__(gateway, part)
        self.agent = gateway.agents[part]
        reward = resolve_reward_configs(gateway.config).get(part, gateway.config).reward
        name = gateway.get_source_name(part)
        self.pool = EnvironmentPool(self.agent, judged=reward.uses_reward_processes, name=name)
        self.states: dict[int, EnvironmentState] = {}  # number of the session -> state

    @property
    def wires(self) -> Sequence[socket.socket]:
        return self.pool.wires

    def open(self, grant: LeasedTicket, sample: int, *, first: bool) -> None:
        """Begin a session with the reset of its environment."""
        session = self.gateway.begin_session(grant, sample, first=first)
        self.states[session.number] = EnvironmentState("the reset of its environment")
        self.pool.reset(
            EnvironmentOperation(
                session=session.number,
                kind="reset",
                prompt=grant.ticket.prompt,
                seed=session.seed,
                attempt=grant.ticket.attempt,
                first=first,
                opponent=self.agent.choose_opponent(grant.ticket.kind),
            )
        )

    # ---- events ----------------------------------------------------------------------------------

    def poll(self) -> None:
        for event in self.pool.poll():
            session = self.gateway.sessions.get(event.session)
            if session is None or session.state != "open":
                continue
            if event.kind == "lost":  # it begins anew after its environment's process was lost
                self.gateway.drop(session)
                grant = self.gateway.held[session.ticket_key]
                self.open(grant, session.sample, first=False)
            elif event.kind == "failed":
                session.fail(event.why)
            else:
                self.on_event(session, event)

    def on_event(self, session: Session, event: EnvironmentEvent) -> None:
        """Record the result of a session's operation; place its next call or end it."""
        state = self.states[session.number]
        state.tools = event.tools or state.tools
        state.pays = state.pays or event.pays
        if event.reward and session.last is not None:
            state.reward += event.reward
            number = session.last.number
            state.shares[number] = state.shares.get(number, 0.0) + event.reward
        for name, value in event.parts.items():
            state.parts[name] = state.parts.get(name, 0.0) + value
        # a new game has a new opponent
        player = SessionPlayer(self.gateway.templated, event.asked)
        state.active = state.players.setdefault(event.asked, player)
        if not event.ended:
            self.place_call(session, event.obs)
            return
        session.shortened |= event.truncated
        if event.judge:
            self.judge(session)
        else:
            self.score(session)

    def place_call(self, session: Session, obs: Any) -> None:
        """Place a call for an observation, or end the session at a limit."""
        state = self.states[session.number]
        now = time.monotonic()
        try:
            call = state.active.place_observation(session, obs, state.tools, now)
        except CallRefused as error:
            # a limit ends the session; messages that the template refuses fail it
            if error.code in ("session_limit", TOO_LONG):
                self.end_at_limit(session)
            else:
                session.fail(str(error))
            return
        self.gateway.ask(session, call)

    def on_answer(self, session: Session, call: CallNode, failed: str) -> None:
        if failed:
            session.fail(f"a generator cannot sample its call: {failed}")
        if session.state != "open":
            return
        if not call.is_answered or session.limit:
            self.end_at_limit(session)
            return
        state = self.states[session.number]
        state.active.on_answer(call)
        state.doing = describe_request(call.answer)
        text = self.gateway.chat.decode_visible(call.ids)
        self.pool.step(EnvironmentOperation(session.number, "step", text, call.answer))

    # ---- the end ---------------------------------------------------------------------------------

    def end_at_limit(self, session: Session) -> None:
        """End a session at a limit that the policy can cause, with its reward so far."""
        session.shortened = True
        if self.agent.at_limit == "fail":
            session.fail(f"it reached agent.{session.limit or 'context'}")
        elif self.states[session.number].pays:
            self.states[session.number].doing = "its get_reward"
            self.pool.step(EnvironmentOperation(session.number, "score"))
        elif self.agent.tools:
            self.judge(session)
        else:
            self.score(session)

    def score(self, session: Session) -> None:
        """Score the session by its environment's rewards.

        The session fails if its time has run out or the sum is not a valid reward.
        """
        state = self.states[session.number]
        calls = state.shares if self.agent.fork == "end" else {}
        now = time.monotonic()
        try:
            session.set_reward(state.reward, state.parts, calls, now=now)
        except CallRefused as refused:
            session.fail(f"its environment's rewards cannot be used: {refused}")

    def judge(self, session: Session) -> None:
        """Have the config's reward score the last answer, unless the session has ended."""
        with suppress(CallRefused):
            if session.last is not None and session.judge(time.monotonic()):
                self.gateway.submit(session)

    def on_drop(self, session: Session) -> None:
        del self.states[session.number]
        self.pool.end(session.number)

    def explain_wait(self, session: Session, limit: str, left_s: float, now: float) -> WaitCause:
        text = self.states[session.number].doing
        if session.number not in self.pool.processes:
            return WaitCause("environment", text, limit, left_s)
        place = self.pool.locate(session.number, now)
        if place.left_s <= left_s or place.front is None:
            limit, left_s = place.limit, place.left_s
        if place.front is None:
            text = f"a process to import {self.pool.named}"
        if self.pool.replaced:
            text += f" ({self.pool.replaced})"
        if place.front is not None and place.front != session.number:
            front = self.gateway.sessions.get(place.front)
            name = front.name if front is not None else "one that has ended"
            text += f", behind that of session {name} in the same process"
        return WaitCause("environment", text, limit, left_s)

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
