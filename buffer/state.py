"""A store's whole state, as a snapshot keeps it.  `Store.snapshot` fills it, `Store.restore` takes
it up again: a field of the store that the future hangs on stands here, or it is lost at a restart.
"""

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
    """What a snapshot of any format begins with."""

    format: int


class StoreSnapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """See `Store.__init__` for what the fields are."""

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
    # which older snapshots lack
    suspect: tuple[list[int], float] = ([], 0.0)
    patience: dict[str, float] = {}
    aside: int = 0
    limit: AdaptiveLimit = AdaptiveLimit()
