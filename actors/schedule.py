"""The generator's protocol rules: which weights to load, which samples may start.

    tickets --take--> waiting --admit--> rows in the engine --done--> (delivery)

1. A ticket is taken once. Its samples start only with weights of its epoch, at or above its
   `min_version`.
2. A ticket with an exact version (evaluation, lag injection) starts, runs and ends with exactly
   these weights: no swap happens while such a row is live.
3. Weights of a newer epoch abort every unfinished sample of an older one.
4. Attempts are taken in order: a missing attempt older than a taken one is refused later.
5. In lockstep, no training sample starts while an evaluation ticket is held. Which samples share
   the engine's batch, and with it the last bit of every logprob, then depends on the tickets alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.contract.messages import IntPair, PolicyAnnouncement, Ticket
from asyncrl.contract.versions import Label

Key = tuple[int, int, int]  # (ticket, sample, attempt)


@dataclass
class LeasedTicket:
    """A held ticket: samples not yet started, and live rows (at a gateway: episodes)."""

    ticket: Ticket
    waiting: list[int]
    live: set[int] = field(default_factory=set)
    tokens: int = 0  # of samples delivered; at a gateway, of its sessions that are gone
    prompt: Any = None  # its tokens, int32 [P]; set by the caller of `add_tickets`
    granted_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def is_used_up(self) -> bool:
        """Whether no sample waits and none is live."""
        return not self.waiting and not self.live

    @property
    def exact(self) -> Label | None:
        return self.ticket.exact_version

    @property
    def epoch(self) -> int:
        return self.ticket.min_version.epoch

    def is_ready(self, loaded: Label | None) -> bool:
        """Whether a sample may start with the weights `loaded`."""
        if loaded is None:
            return False
        if self.exact is not None:
            return loaded == self.exact
        return loaded.epoch == self.epoch and loaded >= self.ticket.min_version


class TicketSchedule:
    """The tickets of one generator in serving order: evaluation first, then by number."""

    def __init__(self, *, drain_first: bool, lockstep: bool = False) -> None:
        self.drain_first = drain_first  # weights.in_flight = between_groups
        self.lockstep = lockstep  # evaluation and training never share the engine
        self.held: dict[IntPair, LeasedTicket] = {}  # (ticket, attempt)
        self.newest_attempt = 0
        self.announced: PolicyAnnouncement | None = None

    def announce(self, announcement: PolicyAnnouncement | None) -> bool:
        """Remember the newest announcement; return whether this one is newer."""
        if announcement is None or (
            self.announced is not None and announcement.label <= self.announced.label
        ):
            return False
        self.announced = announcement
        return True

    def add_tickets(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Take each ticket once (attempt numbers are unique); return the new ones."""
        new_tickets = [ticket for ticket in tickets if ticket.attempt > self.newest_attempt]
        for ticket in new_tickets:
            self.newest_attempt = max(self.newest_attempt, ticket.attempt)
            self.held[ticket.ticket, ticket.attempt] = LeasedTicket(ticket, list(ticket.samples))
        return new_tickets

    def refuse_up_to(self, attempts: int) -> None:
        """Refuse tickets up to this attempt: the buffer grants lost ones again.

        Without this, a late copy would be generated twice.
        """
        self.newest_attempt = max(self.newest_attempt, attempts)

    def sort_waiting(self) -> list[LeasedTicket]:
        """Return the tickets with samples to start, in serving order."""
        return sorted(
            (leased for leased in self.held.values() if leased.waiting),
            key=lambda leased: (leased.ticket.kind == "train", leased.ticket.ticket),
        )

    def count_waiting(self) -> int:
        """Count the samples that have not started."""
        return sum(len(leased.waiting) for leased in self.held.values())

    def find_outdated(self) -> list[LeasedTicket]:
        """Return the held tickets of an epoch older than the announced one, to be dropped."""
        if self.announced is None:
            return []
        return [
            leased for leased in self.held.values() if leased.epoch < self.announced.label.epoch
        ]

    def is_pinned(self) -> bool:
        """Whether a live row needs exactly the loaded version."""
        return any(leased.live and leased.exact is not None for leased in self.held.values())

    def count_live(self) -> int:
        """Count the samples that have started and not ended."""
        return sum(len(leased.live) for leased in self.held.values())

    def next_version(self, loaded: Label | None) -> Label | None:
        """Return the version to load now, or None to keep the loaded one.

        Exact versions come in ticket order; otherwise the newest announced version is loaded.
        """
        if self.announced is None or self.is_pinned():
            return None
        exact_version = next(
            (leased.exact for leased in self.sort_waiting() if leased.exact is not None), None
        )
        goal = exact_version or self.announced.label
        if goal == loaded or (exact_version is None and loaded is not None and goal < loaded):
            return None
        backwards = loaded is not None and goal < loaded
        if self.count_live() and (self.drain_first or backwards):
            return None
        return goal

    def admit(self, loaded: Label | None, room: int) -> list[tuple[LeasedTicket, int]]:
        """Start at most `room` samples and return them, marked live.

        Samples without an exact version wait while the schedule drains the engine.
        """
        started: list[tuple[LeasedTicket, int]] = []
        drain_version = self._find_drain_version(loaded)
        for leased in self.sort_waiting():
            if drain_version is not None and leased.exact != loaded:
                continue
            if (
                self.lockstep
                and leased.ticket.kind == "train"
                and any(other.ticket.kind != "train" for other in self.held.values())
            ):
                break
            while leased.waiting and len(started) < room and leased.is_ready(loaded):
                sample = leased.waiting.pop(0)
                leased.live.add(sample)
                started.append((leased, sample))
        return started

    def _find_drain_version(self, loaded: Label | None) -> Label | None:
        """Return the version that can be loaded only after the live rows end, if any."""
        if self.announced is None or loaded is None or not self.count_live():
            return None
        exact_version = next(
            (
                leased.exact
                for leased in self.sort_waiting()
                if leased.exact is not None and leased.exact != loaded
            ),
            None,
        )
        if exact_version is not None and (
            exact_version < loaded or self.drain_first or self.is_pinned()
        ):
            return exact_version
        return self.announced.label if self.drain_first and self.announced.label > loaded else None

    def finish_sample(self, key: Key, tokens: int) -> None:
        """Free the row of a finished sample; forget the ticket after its last one."""
        leased = self.held.get((key[0], key[2]))
        if leased is None:
            return
        leased.live.discard(key[1])
        leased.tokens += tokens
        if leased.is_used_up:
            del self.held[key[0], key[2]]

    def drop(self, leased: LeasedTicket) -> list[Key]:
        """Forget a ticket and return the keys of its live rows, to be aborted."""
        self.held.pop((leased.ticket.ticket, leased.ticket.attempt), None)
        return [
            (leased.ticket.ticket, sample, leased.ticket.attempt) for sample in sorted(leased.live)
        ]
