"""The rules of the store.

Each of them is needed: tests override them one by one to show it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from asyncrl.contract.freshness.window import count_open_batches
from asyncrl.contract.messages import Disposition, LedgerLine, Trajectory
from asyncrl.contract.versions import Label
from buffer.groups import Group
from buffer.state import StoreState


class StoreRules(StoreState, ABC):
    """The rules for admitting, granting, composing and training groups."""

    composed: set[int]  # the tickets in `comps`
    # number of changes: the journal records only calls that changed something
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

    def has_room(self, position: int, room: float) -> bool:
        """Whether a group may be granted again.

        position: number of groups that train before it. room: number of admitted groups."""
        return position < room

    def current_limit(self) -> float:
        """Return the staleness limit of a ticket granted now."""
        return self.limit.now if self.settings.ess_floor else self.max_lag

    def count_admitted_batches(self, now: float) -> float:
        """Count the batches ahead for which there is room: the window, at most the limit."""
        if not self.settings.wait:
            return self.current_limit()
        return min(self.current_limit(), count_open_batches(self.window, now))

    def current_window(self) -> float:
        """Return the admission window in batches."""
        limit = self.current_limit()
        return min(limit, self.window.size) if self.settings.wait else limit

    def next_opening(self, now: float) -> float:
        """Return when a fractional window will admit its last batch; infinity: it has."""
        return self.window.opens if self.settings.wait and self.window.opens > now else math.inf

    def count_groups_ahead(self) -> int:
        """Count the groups before a new one; those of leased batches count until their commit."""
        return len(self.alive)

    def count_groups_to_train(self) -> int:
        """Count the alive groups that will be trained if none is removed."""
        return len(self.alive)

    @property
    def is_covered(self) -> bool:
        """Whether the alive groups suffice for the run's remaining batches."""
        batches = self.count_groups_to_train() // self.settings.batch
        return self.committed + batches >= self.settings.steps

    def iterate_uncomposed_groups(self) -> Iterator[Group]:
        """Iterate over the groups that are in no batch yet, in ticket order."""
        return (group for group in self.alive.values() if group.ticket not in self.composed)

    def find_least_version(self, policy: Label) -> Label:
        """Return the oldest version that may sample a ticket granted now, at `policy`."""
        return policy

    def find_disposition(self, group: Group, sample: Trajectory) -> Disposition | None:
        """Return the disposition of an earlier delivery of the sample; None: it is new."""
        return group.finals.get((sample.sample, sample.attempt))

    def may_train(self, sample: Trajectory, lag: float, limit: float) -> bool:
        """Whether the sample may train under a hard limit.

        `batches.judge` asks this when the learner receives the batch."""
        return lag <= limit

    def on_zero_variance(self, group: Group) -> None:
        """Remove a complete zero-variance group: it has no gradient."""
        self.remove_group(group, "filtered")
