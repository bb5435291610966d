"""The snapshot of a store's state.

`Store.snapshot` makes it and `Store.restore` takes it over. A field of the store that is missing
here is lost at a restart."""

from __future__ import annotations

import msgspec

from asyncrl.contract.admission import AdaptiveLimit
from asyncrl.contract.messages import Disposition, WeightsSource
from asyncrl.contract.versions import Label, PolicyTreeState
from buffer.evaluation import EvaluationsState
from buffer.groups import Group, StoreSettings
from buffer.ledger import Ledger

FORMAT = 2


class SnapshotHead(msgspec.Struct, tag="snapshot"):
    """The first field of a snapshot in any format."""

    format: int


class StoreSnapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """The fields are described in `Store.__init__`."""

    format: int = FORMAT
    settings: StoreSettings
    epoch: int
    active: int
    cursor: int
    attempts: int
    committed: int
    base: int
    completions: int
    failed_samples: int
    failed_machinery: int
    stored_bytes: int
    drawn_before: int
    finished: bool
    max_lag: float
    policy: Label | None
    source: WeightsSource | None
    alive: list[Group]
    retained: list[Group]
    comps: list[list[int]]
    leased: list[int]
    past: Ledger
    carried: Ledger
    gone: list[tuple[tuple[int, int, int], Disposition]]
    strays: list[tuple[tuple[int, int], list[int]]]
    skip: list[int]
    failures: dict[str, int]
    drawn: list[tuple[tuple[str, int], int]]
    tree: PolicyTreeState
    evaluations: EvaluationsState
    # fields that older snapshots lack
    suspect: tuple[list[int], float] = ([], 0.0)
    patience: dict[str, float] = {}
    aside: int = 0
    limit: AdaptiveLimit = AdaptiveLimit()
