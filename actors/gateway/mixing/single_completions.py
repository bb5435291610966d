"""Samples without an agent, beside the sessions of a mixture's other parts."""

from __future__ import annotations

import time

from actors.gateway.call_tree import CallNode
from actors.gateway.service import Gateway
from actors.gateway.session_source import Episode, SessionSource, WaitCause
from actors.gateway.sessions import CallRefused, SessionCall


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
