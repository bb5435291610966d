"""The state of a store that survives a restart, and its snapshot.

`StoreState` declares each field once, together with its form in a snapshot where that differs.  An
attribute of the store that is not declared here is lost at a restart."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, get_type_hints

import msgspec

from asyncrl.contract.admission import AdaptiveLimit
from asyncrl.contract.freshness.window import AdmissionWindow
from asyncrl.contract.messages import Disposition, IntPair, Numbers, SampleKey, WeightsSource
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


def _make_packing(
    type_: Any, pack: Callable[[Any], Any], unpack: Callable[[Any, Any], Any]
) -> dict[str, Packing]:
    """Make the metadata of a field that has another form in the snapshot."""
    return {"packing": Packing(type_, pack, unpack)}


NUMBERS = _make_packing(list[int], sorted, lambda _, saved: set(saved))
GROUPS = _make_packing(
    list[Group],
    lambda groups: list(groups.values()),
    lambda _, saved: {group.ticket: group for group in saved},
)
DRAWN, FATES, ATTEMPTS = (
    _make_packing(list[pair], lambda x: [*x.items()], lambda _, x: OrderedDict(x))  # type: ignore
    for pair in (
        tuple[tuple[str, int], int],
        tuple[SampleKey, Disposition],
        tuple[IntPair, list[int]],
    )
)
TREE = _make_packing(PolicyTreeState, PolicyTree.snapshot, _restore)
MIXER = _make_packing(MixtureState, TaskMixer.snapshot, _restore)
EVALUATIONS = _make_packing(EvaluationsState, Evaluations.snapshot, _restore)


@dataclass(eq=False, repr=False)
class StoreState:
    """The state of a store; `snapshot` and `restore` apply to all fields."""

    settings: StoreSettings
    evaluations: Evaluations = field(default_factory=Evaluations, metadata=EVALUATIONS)
    tree: PolicyTree = field(default_factory=PolicyTree, metadata=TREE)
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
    alive: dict[int, Group] = field(default_factory=dict, metadata=GROUPS)  # in ticket order
    # committed after the oldest checkpoint kept
    retained: dict[int, Group] = field(default_factory=dict, metadata=GROUPS)
    comps: list[list[int]] = field(default_factory=list)  # tickets of batch base, base + 1, ...
    # batches that the learner of this epoch has received: their lags and masks no longer change
    leased: set[int] = field(default_factory=set, metadata=NUMBERS)
    past: Ledger = field(default_factory=Ledger)
    # totals of an earlier buffer process, from the learner's checkpoint (`memory`)
    carried: Ledger = field(default_factory=Ledger)
    # of removed groups, for late copies; the newest last
    gone: OrderedDict[SampleKey, Disposition] = field(default_factory=OrderedDict, metadata=FATES)
    # (ticket, attempt) -> [tokens reported, delivered]
    strays: OrderedDict[IntPair, list[int]] = field(default_factory=OrderedDict, metadata=ATTEMPTS)
    # tickets at or above the cursor that are trained in the checkpoint (completion order)
    skip: set[int] = field(default_factory=set, metadata=NUMBERS)
    completions: int = 0
    failed_samples: int = 0  # since the last commit
    failed_machinery: int = 0  # since the last commit
    stored_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by kind
    # (producer, session) -> tokens that the session reports to have sampled
    drawn: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict, metadata=DRAWN)
    drawn_before: int = 0  # tokens of sessions that are no longer in `drawn`
    # producer -> seconds of its leases, for producers that renew too slowly for `lease_s`
    patience: Numbers = field(default_factory=dict)
    # tickets of the batch on which the last learner processes ended, and its points (`store.ENDS`)
    suspect: tuple[list[int], float] = ([], 0.0)
    aside: int = 0  # excluded batches
    finished: bool = False
    mixer: TaskMixer = field(default_factory=TaskMixer, metadata=MIXER)

    def find_group(self, ticket: int) -> Group | None:
        """Find a group that is not retired; None: there is none."""
        return self.alive.get(ticket) or self.retained.get(ticket)

    def list_tickets_up_to(self, number: int) -> set[int]:
        """List the tickets of the composed batches up to batch `number`."""
        return {ticket for comp in self.comps[: number + 1 - self.base] for ticket in comp}

    def snapshot(self) -> msgspec.Struct:
        """Return the whole state. It shares objects with the store: encode it at once."""
        packed = {}
        for state_field in fields(StoreState):
            value = getattr(self, state_field.name)
            packing = state_field.metadata.get("packing")
            packed[state_field.name] = value if packing is None else packing.pack(value)
        return StoreSnapshot(**packed)

    def restore(self, snapshot: msgspec.Struct) -> None:
        """Take over the state of a `StoreSnapshot`."""
        for state_field in fields(StoreState):
            name = state_field.name
            value = getattr(snapshot, name)
            packing = state_field.metadata.get("packing")
            if packing is not None:
                value = packing.unpack(getattr(self, name), value)
            setattr(self, name, value)


class SnapshotHead(msgspec.Struct, tag="snapshot"):
    """The first field of a snapshot in any format."""

    format: int


HINTS = get_type_hints(StoreState)


def _make_snapshot_field(state_field: Field[Any]) -> tuple[Any, ...]:
    """Make (name, type) of a field in the snapshot, and its default if older snapshots lack it."""
    name = state_field.name
    packing = state_field.metadata.get("packing")
    packed_type = HINTS[name] if packing is None else packing.type
    default = (ADDED_LATER[name],) if name in ADDED_LATER else ()
    return name, packed_type, *default


StoreSnapshot = msgspec.defstruct(
    "StoreSnapshot",
    [("format", int, FORMAT), *map(_make_snapshot_field, fields(StoreState))],
    tag="snapshot",
    kw_only=True,
    module=__name__,
)
