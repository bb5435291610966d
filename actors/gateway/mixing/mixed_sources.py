"""The sources of a mixture's sessions: one for each part with its own agent."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Collection, Sequence

from actors.gateway.call_tree import CallNode
from actors.gateway.environment_sessions import EnvironmentSource
from actors.gateway.service import Gateway
from actors.gateway.session_source import Episode, SessionSource, WaitCause
from actors.gateway.sessions import CallRefused, Session, SessionCall


class SingleCompletions(SessionSource):
    """A source that makes each sample a session of one call, for the config's reward.

    The call has the random stream of a sample in a run without sessions.
    """

    def __init__(self, gateway: Gateway, part: str = "") -> None:
        self.gateway = gateway
        self.part = part

    def count_wanted(self) -> int:
        return self.gateway.free_sessions

    def open_sessions(self) -> None:
        for grant in self.gateway.list_waiting_tickets({self.part}):
            while grant.waiting and self.gateway.free_sessions > 0:
                episode = self.gateway.begin_episode(grant, grant.waiting.pop(0), first=True)
                session, now = episode.session, time.monotonic()
                try:
                    call = session.place_ids(session.own_prompt, now=now)
                except CallRefused as refused:  # a prompt that is empty or too long
                    session.fail(str(refused))
                else:
                    self.gateway.ask(episode, call)

    def on_answer(
        self, episode: Episode, call: SessionCall, node: CallNode | None, failed: str
    ) -> None:
        session, now = episode.session, time.monotonic()
        if failed:
            session.fail(f"a generator cannot sample it: {failed}")
        elif node is None:  # cut before its first token
            session.fail(f"agent.{session.limit or 'deadline_s'} ended it")
        elif session.state == "open" and session.judge(now):
            self.gateway.submit(episode)

    def on_drop(self, episode: Episode) -> None:
        pass

    def explain_wait(self, episode: Episode, limit: str, left_s: float, now: float) -> WaitCause:
        return WaitCause("reward", "the reward of its answer", limit, left_s)

    def explain_queue(self, part: str) -> WaitCause:
        sessions = self.gateway.config.agent.sessions
        return WaitCause("place", f"a place: agent.sessions = {sessions}")


class MixedSource(SessionSource):
    """A source that passes each session to the source of its part.

    make_http: makes the source of all parts with agents over HTTP, which share an endpoint; None
        without such parts
    """

    def __init__(
        self,
        gateway: Gateway,
        make_http: Callable[[Gateway, Collection[str]], SessionSource] | None,
    ) -> None:
        self.gateway = gateway
        over_http = [part for part, agent in gateway.agents.items() if agent.http]
        self.http = make_http(gateway, over_http) if make_http is not None else None
        self.local: dict[str, SessionSource] = {}
        for part, agent in gateway.agents.items():
            if part not in over_http:
                source_class = EnvironmentSource if agent.uses_sessions else SingleCompletions
                self.local[part] = source_class(gateway, part)

    @property
    def sources(self) -> list[SessionSource]:
        """Every source once."""
        return [*self.local.values(), *([self.http] if self.http is not None else [])]

    def get_session_source(self, session: Session) -> SessionSource:
        """Return the source of a session's part."""
        return self.get_part_source(self.gateway.get_part(session.ticket))

    def get_part_source(self, part: str) -> SessionSource:
        """Return the source of a part."""
        source = self.local.get(part, self.http)
        assert source is not None
        return source

    def count_wanted(self) -> int:
        """Count the samples that wait for a source, and those that sources have room for.

        A part with busy agents does not keep the others from new samples.
        """
        waiting = {True: 0, False: 0}  # for the sources here, and for agents over HTTP
        for grant in self.gateway.held.values():
            is_local = self.gateway.get_part(grant.ticket) in self.local
            waiting[is_local] += len(grant.waiting)
        sample_count = sum(waiting.values())
        if self.local:
            sample_count += max(0, self.gateway.free_sessions - waiting[True])
        if self.http is not None:
            sample_count += max(0, self.http.count_wanted() - waiting[False])
        return sample_count

    @property
    def wires(self) -> Sequence[socket.socket]:
        return list(itertools.chain.from_iterable(source.wires for source in self.sources))

    def on_answer(
        self, episode: Episode, call: SessionCall, node: CallNode | None, failed: str
    ) -> None:
        self.get_session_source(episode.session).on_answer(episode, call, node, failed)

    def on_drop(self, episode: Episode) -> None:
        self.get_session_source(episode.session).on_drop(episode)

    def explain_wait(self, episode: Episode, limit: str, left_s: float, now: float) -> WaitCause:
        return self.get_session_source(episode.session).explain_wait(episode, limit, left_s, now)

    def explain_queue(self, part: str) -> WaitCause:
        return self.get_part_source(part).explain_queue(part)

    def open_sessions(self) -> None:
        for source in self.sources:
            source.open_sessions()

    def poll(self) -> None:
        for source in self.sources:
            source.poll()

    def on_resume(self, session: Session) -> None:
        self.get_session_source(session).on_resume(session)

    def on_deliver(self, session: Session) -> None:
        self.get_session_source(session).on_deliver(session)

    def on_report(self) -> None:
        for source in self.sources:
            source.on_report()

    def close(self) -> None:
        for source in self.sources:
            source.close()
