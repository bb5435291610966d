"""Which weights a generator loads next and which samples may start: the generator's rules of the
protocol, pure.

    tickets --take--> waiting --admit--> rows in the engine --done--> (delivery)

1. A ticket is taken once; its samples start only with weights of its epoch, at or above
   `min_version`.
2. A ticket with an exact version (evaluation, lag injection) starts, runs and ends with exactly
   these weights: while such a row is live, nothing is swapped.
3. A newer epoch's weights end every unfinished sample of an older one.
4. Attempts are taken in their order: what the buffer granted before, and has not come, is forgone.
5. In lockstep, no training sample starts while an evaluation ticket is held: which answers share
   the engine's batch, and with it the last bit of every logprob, is then a function of the tickets
   alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.contract.messages import PolicyAnnouncement, Ticket
from asyncrl.contract.versions import Label

Key = tuple[int, int, int]  # (ticket, sample, attempt)


@dataclass
class LeasedTicket:
    """A ticket that this generator has taken: samples not yet started, and rows in the engine."""

    ticket: Ticket
    waiting: list[int]
    live: set[int] = field(default_factory=set)
    tokens: int = 0  # of samples already delivered
    prompt: Any = None  # its tokens, int32 [P]; whoever takes the ticket tokenises

    @property
    def exact(self) -> Label | None:
        return self.ticket.exact_version

    @property
    def epoch(self) -> int:
        return self.ticket.min_version.epoch

    def is_ready(self, loaded: Label | None) -> bool:
        """May a sample start with the weights `loaded`?"""
        if loaded is None:
            return False
        if self.exact is not None:
            return loaded == self.exact
        return loaded.epoch == self.epoch and loaded >= self.ticket.min_version


class TicketSchedule:
    """The tickets one generator holds, in the order in which they are served: evaluation first,
    then by number.
    """

    def __init__(self, *, drain_first: bool, lockstep: bool = False) -> None:
        self.drain_first = drain_first  # weights.in_flight = between_groups
        self.lockstep = lockstep  # evaluation and training never share the engine
        self.held: dict[tuple[int, int], LeasedTicket] = {}  # (ticket, attempt)
        self.newest_attempt = 0
        self.announced: PolicyAnnouncement | None = None

    def announce(self, said: PolicyAnnouncement | None) -> bool:
        """Remember the newest announcement; True when it is news."""
        if said is None or (
            self.announced is not None and said.announcement_key <= self.announced.announcement_key
        ):
            return False
        self.announced = said
        return True

    def add_tickets(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Take each ticket reply once (an attempt number is never used twice); returns those that
        are new.
        """
        new = [ticket for ticket in tickets if ticket.attempt > self.newest_attempt]
        for ticket in new:
            self.newest_attempt = max(self.newest_attempt, ticket.attempt)
            self.held[ticket.ticket, ticket.attempt] = LeasedTicket(ticket, list(ticket.samples))
        return new

    def refuse_up_to(self, attempts: int) -> None:
        """Take no ticket up to this attempt any more: one that has not come by now is granted
        again, and would be written twice.
        """
        self.newest_attempt = max(self.newest_attempt, attempts)

    def order(self) -> list[LeasedTicket]:
        return sorted(
            (held for held in self.held.values() if held.waiting),
            key=lambda held: (held.ticket.kind == "train", held.ticket.ticket),
        )

    def waiting(self) -> int:
        return sum(len(held.waiting) for held in self.held.values())

    def outdated(self) -> list[LeasedTicket]:
        """Held tickets of an epoch older than the announced one: end them."""
        if self.announced is None:
            return []
        return [held for held in self.held.values() if held.epoch < self.announced.label.epoch]

    def is_pinned(self) -> bool:
        return any(held.live and held.exact is not None for held in self.held.values())

    def live(self) -> int:
        return sum(len(held.live) for held in self.held.values())

    def next_version(self, loaded: Label | None) -> Label | None:
        """The version to load now, None to stay.  Exact needs come in order; otherwise the newest
        announced.
        """
        if self.announced is None or self.is_pinned():
            return None
        need = next((held.exact for held in self.order() if held.exact is not None), None)
        goal = need or self.announced.label
        if goal == loaded or (need is None and loaded is not None and goal < loaded):
            return None
        backwards = loaded is not None and goal < loaded
        if self.live() and (self.drain_first or backwards):
            return None
        return goal

    def admit(self, loaded: Label | None, room: int) -> list[tuple[LeasedTicket, int]]:
        """Samples to start now, at most `room`, marked live.  Nothing unpinned starts while a drain
        is awaited.
        """
        out: list[tuple[LeasedTicket, int]] = []
        goal = self._drain_goal(loaded)
        for held in self.order():
            if goal is not None and held.exact != loaded:
                continue
            if (
                self.lockstep
                and held.ticket.kind == "train"
                and any(x.ticket.kind != "train" for x in self.held.values())
            ):
                break
            while held.waiting and len(out) < room and held.is_ready(loaded):
                sample = held.waiting.pop(0)
                held.live.add(sample)
                out.append((held, sample))
        return out

    def _drain_goal(self, loaded: Label | None) -> Label | None:
        """A version that waits for live rows to end before it can be loaded."""
        if self.announced is None or loaded is None or not self.live():
            return None
        need = next(
            (
                held.exact
                for held in self.order()
                if held.exact is not None and held.exact != loaded
            ),
            None,
        )
        if need is not None and (need < loaded or self.drain_first or self.is_pinned()):
            return need
        return self.announced.label if self.drain_first and self.announced.label > loaded else None

    def finish_sample(self, key: Key, tokens: int) -> None:
        """A sample left the engine: its row is free; the ticket is forgotten when nothing of it is
        left.
        """
        held = self.held.get((key[0], key[2]))
        if held is None:
            return
        held.live.discard(key[1])
        held.tokens += tokens
        if not held.waiting and not held.live:
            del self.held[key[0], key[2]]

    def drop(self, held: LeasedTicket) -> list[Key]:
        """Forget a ticket; returns the keys of its live rows, to abort in the engine."""
        self.held.pop((held.ticket.ticket, held.ticket.attempt), None)
        return [(held.ticket.ticket, s, held.ticket.attempt) for s in sorted(held.live)]
