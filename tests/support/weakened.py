"""Stores with one rule switched off each: what the tests show to be needed.

A rule is a method of the store (`has_room`, ...), which a class here overrides."""

from collections.abc import Iterator
from typing import Any

from asyncrl.contract.messages import Trajectory
from asyncrl.contract.versions import Label
from buffer.groups import Group
from buffer.store import Store


class AnyOrder(Store):
    @property
    def uses_ticket_order(self) -> bool:
        return False


class ReissuedUnpaced(Store):
    def has_room(self, position: int, room: float) -> bool:
        return True


class RoomToTheBound(Store):
    """A ticket announces the limit of now, and goes out by the hard bound."""

    def count_admitted_batches(self, now: float) -> float:
        return self.max_lag


class LeasedUncounted(Store):
    def count_groups_ahead(self) -> int:
        return super().count_groups_ahead() - len(self.composed & self.alive.keys())


class AnyVersion(Store):
    def find_least_version(self, policy: Label) -> Label:
        return Label(self.epoch, 0)


class Forgetful(Store):
    def find_disposition(self, group: Group, trajectory: Trajectory) -> None:
        return None


class FilteredStay(Store):
    """A group without spread goes on being counted, and is never trained."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ghosts: set[int] = set()

    def on_zero_variance(self, group: Group) -> None:
        self.ghosts.add(group.ticket)

    def count_groups_to_train(self) -> int:
        return super().count_groups_to_train() - len(self.ghosts & self.alive.keys())

    def iterate_uncomposed_groups(self) -> Iterator[Group]:
        return (g for g in super().iterate_uncomposed_groups() if g.ticket not in self.ghosts)


RULES: dict[str, type[Store]] = {
    "ticket_order": AnyOrder,
    "reissue_paced": ReissuedUnpaced,
    "count_leased": LeasedUncounted,
    "announced_room": RoomToTheBound,
    "min_version": AnyVersion,
    "dedupe": Forgetful,
    "filter_leaves": FilteredStay,
}


def weakened(off: frozenset[str]) -> type[Store]:
    """The store without these rules; with none of them the store as it is."""
    return type("Weakened", (*(RULES[rule] for rule in sorted(off)), Store), {})
