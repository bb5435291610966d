"""The interface of a source of sessions: environments, or agents over HTTP.

The gateway takes tickets, submits calls and delivers trajectories.  A source begins the sessions,
places their calls and uses the answers.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actors.gateway.call_tree import CallNode
from actors.gateway.sessions import Session, SessionCall
from asyncrl.contract.messages import Ticket
from asyncrl.contract.waits import SessionWait


@dataclass(eq=False)
class Episode:
    """A session that this gateway plays.

    first: no earlier attempt at the sample has begun
    last: the policy's newest answered call
    """

    number: int
    session: Session
    first: bool
    last: SessionCall | None = None


class PlacedCall(NamedTuple):
    """A call that the generators are to sample, and its episode."""

    episode: Episode
    call: SessionCall


class WaitCause(NamedTuple):
    """The cause of a session's wait; limit: the key that ends it in `left_s`, or ""."""

    kind: SessionWait
    text: str
    limit: str = ""
    left_s: float = 0.0


class SessionSource(ABC):
    """A source of sessions; the gateway calls its methods from one thread."""

    @abstractmethod
    def count_wanted(self) -> int:
        """Count the samples that the source has room for, parked sessions included."""

    @abstractmethod
    def on_answer(
        self, episode: Episode, call: SessionCall, node: CallNode | None, failed: str
    ) -> None:
        """Use the answer to a call.

        node: the call's node, or None if it has no token
        failed: the reason of a generator's refusal, or ""
        """

    @abstractmethod
    def on_drop(self, episode: Episode) -> None:
        """Forget an episode that was delivered or lost."""

    @abstractmethod
    def explain_wait(self, episode: Episode, limit: str, left_s: float, now: float) -> WaitCause:
        """Describe the wait of an open session without an open call.

        limit, left_s: the session's own limit and the seconds until it
        """

    @abstractmethod
    def explain_queue(self, part: str) -> WaitCause:
        """Describe the wait of a part's samples that no session has begun."""

    # ---- without effect by default ---------------------------------------------------------------

    @property
    def wires(self) -> Sequence[socket.socket]:
        """Sockets that `poll` reads."""
        return ()

    def open_sessions(self) -> None:
        """Begin sessions of waiting samples, in each turn."""

    def poll(self) -> None:
        """Handle the events of environments, in each turn."""

    def on_progress(self, session: Session, ticket: Ticket | None = None) -> None:
        """Record that a session's tokens are reported or sent, or its new ticket."""

    def close(self) -> None:
        """End the processes that the source has started."""
