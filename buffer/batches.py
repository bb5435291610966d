"""Batches: which groups make one, what may be trained in it, and the message that carries it.
Functions over the store.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.contract import admission
from asyncrl.contract.errors import ProtocolError
from asyncrl.contract.messages import Batch
from asyncrl.contract.waits import BUFFER
from buffer.groups import MAX_DROPS, Group, Stored, size

if TYPE_CHECKING:
    from buffer.store import Store


class Lack(NamedTuple):
    """Why a batch cannot be handed out: what it waits for, and the process that holds it."""

    what: str
    on: str = BUFFER

    def __str__(self) -> str:
        return self.what


def pick(store: Store, number: int) -> tuple[list[Group], Lack | None]:
    line = store.to_compose()
    if store.in_order and not math.isinf(store.max_lag):
        picked = line[: store.s.batch]  # in ticket order, as `alive` is
        late = next((g for g in picked if not g.complete), None)
        if late is not None:
            return [], why(late)
    else:
        if store.s.on_exceed == "drop":
            drop_stale(store, line, number)
        ready = sorted(
            (g for g in line if g.complete and g.ticket in store.alive),
            key=lambda g: (rank(store, g, number), g.completed),
        )
        picked = ready[: store.s.batch]
    if len(picked) < store.s.batch:
        more = store.s.batch - len(picked)
        return [], Lack(f"{more} more groups: tickets are out or wait for room")
    return picked, None


def rank(store: Store, g: Group, number: int) -> int:
    """What goes before completion: in the order `freshest` the lag of the group's oldest token,
    should it train in batch `number`.
    """
    if store.s.order != "freshest":
        return 0
    return max(admission.sample_lag(runs_of(store, s, number)) for s in g.stored())


def why(g: Group) -> Lack:
    lacks = f"ticket {g.ticket}: {len(g.missing())} samples"
    if g.lease is None:
        return Lack(f"{lacks} to be granted again")
    return Lack(f"{lacks} at {g.lease.producer}", on=g.lease.producer)


def runs_of(store: Store, s: Stored, number: int) -> list[tuple[int, int, int]]:
    assert store.policy is not None
    return admission.span_lags(store.tree, s.trajectory.spans, store.policy, number)


def drop_stale(store: Store, line: list[Group], number: int) -> None:
    """`drop`: a complete group past the limit is sent again; the third time it is abandoned."""
    for g in line:
        if not g.complete or all(
            admission.sample_lag(runs_of(store, s, number)) <= store.max_lag for s in g.stored()
        ):
            continue
        g.drops += 1
        store.changes += 1
        if g.drops >= MAX_DROPS:
            store.leave(g, "abandoned")
            continue
        store.stored_bytes -= g.free()
        for i, s in enumerate(g.stored()):
            g.other.append(("dropped_stale", s.trajectory.length, s.trajectory.reward))
            g.finals[i, s.trajectory.attempt] = "dropped_stale"
        g.samples = [None] * store.s.group


def judge(store: Store, groups: list[Group], number: int) -> None:
    """Lag is judged at the lease: orphans of an earlier epoch are written again; in this epoch it
    is a bug of ours.
    """
    hard = store.s.on_exceed in ("pace", "drop")
    for g in groups:
        for i, s in enumerate(g.samples):
            if s is None:
                continue
            runs = runs_of(store, s, number)
            masked = (
                sum(e - b for b, e, lag in runs if lag > store.max_lag)
                if store.s.on_exceed == "mask"
                else 0
            )
            store.changes += masked != s.masked
            s.masked = masked
            if store.s.on_exceed == "downweight":
                s.faded = sum(
                    (e - b) * (1 - 0.5 ** (max(0.0, lag - store.max_lag) / store.s.half_life))
                    for b, e, lag in runs
                )
            if not hard or admission.sample_lag(runs) <= store.max_lag:
                continue
            if min(x.label.epoch for x in s.trajectory.spans) >= store.epoch:
                raise ProtocolError(
                    f"ticket {g.ticket}, sample {i} would train {admission.sample_lag(runs)} "
                    f"versions late in batch {number}, "
                    f"past the limit {store.max_lag:g}: a bug of ours; keep the run directory and "
                    "report it"
                )
            g.other.append(("orphaned", s.trajectory.length, s.trajectory.reward))
            g.finals[i, s.trajectory.attempt] = "orphaned"
            g.samples[i] = None
            store.stored_bytes -= size(s.trajectory)
            store.changes += 1


def message(store: Store, groups: list[Group], epoch: int, number: int) -> Batch:
    """The message for composed, complete groups."""
    stored = [s for g in groups for s in g.stored()]
    runs = [runs_of(store, s, number) if s.runs is None else s.runs for s in stored]
    lags = [admission.sample_lag(r) for r in runs]
    in_flight = [min(s.in_flight, lag) for s, lag in zip(stored, lags, strict=True)]
    trained = {t for comp in store.comps[: number + 1 - store.base] for t in comp}
    first = min((t for t in store.alive if t not in trained), default=store.cursor)
    above = [
        t for t in range(first, store.cursor) if t not in store.alive or t in trained
    ] + sorted(store.skip)
    return Batch(
        epoch=epoch,
        number=number,
        samples=[s.trajectory for s in stored],
        lags=lags,
        in_flight=in_flight,
        token_lags=runs,
        stats={},
        next_ticket=first,
        ledger=store.checkpoint_ledger(trained),
        trained_above=above,
    )
