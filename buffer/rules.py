"""The rules of the store. Each is needed: tests override them one by one to show it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from asyncrl.contract.freshness.window import admitted_batches
from asyncrl.contract.messages import Disposition, LedgerLine, Trajectory
from asyncrl.contract.versions import Label
from buffer.groups import Group
from buffer.state import StoreState


class StoreRules(StoreState, ABC):
    """The rules for admitting, granting, composing and training groups."""

    composed: set[int]  # the tickets in `comps`
    # number of changes by `ask`: the journal records only requests that changed something
    changes: int
    # False once no alive group was found with missing samples and no lease
    lacking: bool

    @abstractmethod
    def remove_group(self, group: Group, line: LedgerLine) -> None:
        """Remove a group from the stream and count its samples under a ledger line."""

    @property
    def uses_ticket_order(self) -> bool:
        """Whether batches take groups in ticket order."""
        return self.settings.uses_ticket_order

    def has_room(self, place: int, room: float) -> bool:
        """Whether a group at position `place` may be granted again."""
        return place < room

    def current_limit(self) -> float:
        """The staleness limit of a ticket granted now."""
        return self.limit.now if self.settings.ess_floor else self.max_lag

    def admits_to(self, now: float) -> float:
        """The batches ahead for which there is room: the window, at most the announced limit."""
        if not self.settings.wait:
            return self.current_limit()
        return min(self.current_limit(), admitted_batches(self.window, now))

    def current_window(self) -> float:
        """The admission window in batches."""
        limit = self.current_limit()
        return min(limit, self.window.size) if self.settings.wait else limit

    def opens_at(self, now: float) -> float:
        """When a fractional window will admit its last batch; infinity: it has."""
        return self.window.opens if self.settings.wait and self.window.opens > now else math.inf

    def groups_ahead(self) -> int:
        """Number of groups before a new one; groups of leased batches count until their commit."""
        return len(self.alive)

    def groups_to_train(self) -> int:
        """Number of alive groups that will be trained if none is removed."""
        return len(self.alive)

    def uncomposed_groups(self) -> Iterator[Group]:
        """Groups that are in no batch yet, in ticket order."""
        return (group for group in self.alive.values() if group.ticket not in self.composed)

    def least_version(self, policy: Label) -> Label:
        """The oldest version that may sample a ticket granted now, at `policy`."""
        return policy

    def disposition(self, group: Group, sample: Trajectory) -> Disposition | None:
        """The disposition of an earlier delivery of the sample; None: it is new."""
        return group.finals.get((sample.sample, sample.attempt))

    def may_train(self, sample: Trajectory, lag: float, limit: float) -> bool:
        """Whether the sample may train under a hard limit; asked when the batch is handed out."""
        return lag <= limit

    def on_zero_variance(self, group: Group) -> None:
        """Remove a complete zero-variance group: it has no gradient."""
        self.remove_group(group, "filtered")
