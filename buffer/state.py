"""The state of a store that survives a restart, its snapshot, and the rules of the store.

`StoreState` declares each field once; PACKINGS has its form in a snapshot where that differs.  An
attribute of the store that is not declared here is lost at a restart."""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NamedTuple, get_type_hints

import msgspec

from asyncrl.contract.admission import AdaptiveLimit
from asyncrl.contract.freshness import AdmissionWindow, count_open_batches
from asyncrl.contract.messages import (
    Disposition,
    IntPair,
    LedgerLine,
    Numbers,
    SampleKey,
    Trajectory,
    WeightsSource,
)
from asyncrl.contract.versions import Label, PolicyTree, PolicyTreeState
from buffer.evaluation import Evaluations, EvaluationsState
from buffer.groups import Group, StoreSettings
from buffer.ledger import Ledger
from buffer.mixer import MixtureState, TaskMixer

FORMAT = 2
REMEMBERED = 200_000  # final dispositions of removed groups, kept for late copies
STRAYS = 20_000  # attempts of removed groups that may still report or deliver
# values of fields that older snapshots lack
ADDED_LATER = {
    "suspect": ([], 0.0),
    "patience": {},
    "aside": 0,
    "limit": AdaptiveLimit(),
    "window": AdmissionWindow(),
    "mixer": msgspec.field(default_factory=MixtureState),
}


class Packing(NamedTuple):
    """The form of a field in a snapshot."""

    type: Any
    pack: Callable[[Any], Any]
    # (current value, packed value) -> new value
    unpack: Callable[[Any, Any], Any]


def _restore(current: Any, saved: Any) -> Any:
    current.restore(saved)
    return current


def _pack_table(pair: Any) -> Packing:
    """Make the form of an ordered table: a list of such (key, value) pairs."""
    return Packing(list[pair], lambda table: [*table.items()], lambda _, saved: OrderedDict(saved))


GROUPS = Packing(
    list[Group],
    lambda groups: list(groups.values()),
    lambda _, saved: {group.ticket: group for group in saved},
)
# the fields of the state that have another form in a snapshot
PACKINGS = {
    "evaluations": Packing(EvaluationsState, Evaluations.snapshot, _restore),
    "tree": Packing(PolicyTreeState, PolicyTree.snapshot, _restore),
    "mixer": Packing(
        MixtureState, lambda mixer: mixer.state, lambda mixer, saved: replace(mixer, state=saved)
    ),
    "alive": GROUPS,
    "retained": GROUPS,
    "drawn": _pack_table(tuple[tuple[str, int], int]),
    "gone": _pack_table(tuple[SampleKey, Disposition]),
    "strays": _pack_table(tuple[IntPair, list[int]]),
}


@dataclass(eq=False, repr=False)
class StoreState:
    """The state of a store; `snapshot` and `restore` apply to all fields."""

    settings: StoreSettings
    evaluations: Evaluations = field(default_factory=Evaluations)
    tree: PolicyTree = field(default_factory=PolicyTree)
    epoch: int = 0
    active: int = 0  # the epoch whose learner requested a batch last
    max_lag: float = math.inf  # with an adaptive limit: its hard bound
    # used only if `settings.ess_floor` is set
    limit: AdaptiveLimit = field(default_factory=AdaptiveLimit)
    # used only if `settings.wait` is set
    window: AdmissionWindow = field(default_factory=AdmissionWindow)
    cursor: int = 0  # the next new ticket
    attempts: int = 0  # granted so far
    committed: int = 0
    base: int = 0  # number of the first batch in `comps`: the oldest checkpoint kept
    policy: Label | None = None
    source: WeightsSource | None = None
    alive: dict[int, Group] = field(default_factory=dict)  # in ticket order
    # committed after the oldest checkpoint kept
    retained: dict[int, Group] = field(default_factory=dict)
    comps: list[list[int]] = field(default_factory=list)  # tickets of batch base, base + 1, ...
    # batches that the learner of this epoch has received: their lags and masks no longer change
    leased: set[int] = field(default_factory=set)
    past: Ledger = field(default_factory=Ledger)
    # totals of an earlier buffer process, from the learner's checkpoint (`memory`)
    carried: Ledger = field(default_factory=Ledger)
    # of removed groups, for late copies; the newest last
    gone: OrderedDict[SampleKey, Disposition] = field(default_factory=OrderedDict)
    # (ticket, attempt) -> [tokens reported, delivered]
    strays: OrderedDict[IntPair, list[int]] = field(default_factory=OrderedDict)
    # tickets at or above the cursor that are trained in the checkpoint (completion order)
    skip: set[int] = field(default_factory=set)
    completions: int = 0
    failed_samples: int = 0  # since the last commit
    failed_machinery: int = 0  # since the last commit
    stored_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by kind
    # (producer, session) -> tokens that the session reports to have sampled
    drawn: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    drawn_before: int = 0  # tokens of sessions that are no longer in `drawn`
    # producer -> seconds of its leases, for producers that renew too slowly for `lease_s`
    patience: Numbers = field(default_factory=dict)
    # tickets of the batch on which the last learner processes ended, and its points (`store.ENDS`)
    suspect: tuple[list[int], float] = ([], 0.0)
    aside: int = 0  # excluded batches
    finished: bool = False
    mixer: TaskMixer = field(default_factory=TaskMixer)

    def find_group(self, ticket: int) -> Group | None:
        """Find a group that is not retired; None: there is none."""
        return self.alive.get(ticket) or self.retained.get(ticket)

    def snapshot(self) -> msgspec.Struct:
        """Return the whole state. It shares objects with the store: encode it at once."""
        packed = {}
        for state_field in fields(StoreState):
            value = getattr(self, state_field.name)
            packing = PACKINGS.get(state_field.name)
            packed[state_field.name] = value if packing is None else packing.pack(value)
        return StoreSnapshot(**packed)

    def restore(self, snapshot: msgspec.Struct) -> None:
        """Take over the state of a `StoreSnapshot`."""
        for state_field in fields(StoreState):
            name = state_field.name
            value = getattr(snapshot, name)
            if (packing := PACKINGS.get(name)) is not None:
                value = packing.unpack(getattr(self, name), value)
            setattr(self, name, value)


class SnapshotHead(msgspec.Struct, tag="snapshot"):
    """The first field of a snapshot in any format."""

    format: int


HINTS = get_type_hints(StoreState)


def _make_snapshot_field(state_field: Field[Any]) -> tuple[Any, ...]:
    """Make (name, type) of a field in the snapshot, and its default if older snapshots lack it."""
    name = state_field.name
    packed_type = PACKINGS[name].type if name in PACKINGS else HINTS[name]
    default = (ADDED_LATER[name],) if name in ADDED_LATER else ()
    return name, packed_type, *default


StoreSnapshot = msgspec.defstruct(
    "StoreSnapshot",
    [("format", int, FORMAT), *map(_make_snapshot_field, fields(StoreState))],
    tag="snapshot",
    kw_only=True,
    module=__name__,
)


class StoreRules(StoreState, ABC):
    """The rules for admitting, granting, composing and training groups.

    Each of them is needed: tests override them one by one to show it."""

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
        """Whether batches take groups in ticket order, as the bound of `pace` requires."""
        return self.settings.on_exceed == "pace" and self.settings.order in ("auto", "ticket")

    def has_room(self, position: int, room: float) -> bool:
        """Whether a group may be granted again.

        position: number of groups that train before it. room: number of admitted groups."""
        return position < room

    def current_limit(self) -> float:
        """Return the staleness limit of a ticket granted now."""
        return self.limit.now if self.settings.ess_floor else self.max_lag

    @property
    def mask_limit(self) -> float:
        """The lag past which the loss masks tokens; infinity: none."""
        return self.max_lag if self.settings.on_exceed == "mask" else math.inf

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
