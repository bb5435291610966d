"""Batches: which groups make one, what may be trained in it, and the message that carries it.
Functions over the store.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.contract import admission
from asyncrl.contract.errors import ProtocolError
from asyncrl.contract.messages import Batch
from asyncrl.contract.waits import BUFFER
from buffer import checks
from buffer.groups import MAX_DROPS, Group, StoredSample

if TYPE_CHECKING:
    from buffer.store import Store


class BatchWait(NamedTuple):
    """Why a batch cannot be handed out: what it waits for, the process that holds it, and the
    ticket, where it is one.
    """

    what: str
    on: str = BUFFER
    ticket: int = -1

    def __str__(self) -> str:
        return self.what


def pick_groups(store: Store, number: int) -> tuple[list[Group], BatchWait | None]:
    if store.uses_ticket_order and not math.isinf(store.max_lag):
        # in ticket order, as `alive` is; asked for again and again, of thousands
        picked = list(itertools.islice(store.uncomposed_groups(), store.settings.batch))
        late = next((group for group in picked if not group.complete), None)
        if late is not None:
            return [], explain_wait(late)
    else:
        line = list(store.uncomposed_groups())
        if store.settings.on_exceed == "drop":
            drop_stale(store, line, number)
        ready = sorted(
            (group for group in line if group.complete and group.ticket in store.alive),
            key=lambda group: (rank(store, group, number), group.completed),
        )
        picked = ready[: store.settings.batch]
    if len(picked) < store.settings.batch:
        more = store.settings.batch - len(picked)
        return [], BatchWait(f"{more} more groups: tickets are out or wait for room")
    return picked, None


def rank(store: Store, group: Group, number: int) -> int:
    """What goes before completion: in the order `freshest` the lag of the group's oldest token,
    should it train in batch `number`.
    """
    if store.settings.order != "freshest":
        return 0
    return max(
        admission.sample_lag(lag_runs(store, stored, number)) for stored in group.stored_samples()
    )


def explain_wait(group: Group) -> BatchWait:
    lacks = f"ticket {group.ticket}: {len(group.missing())} samples"
    if group.lease is None:
        return BatchWait(f"{lacks} to be granted again")
    return BatchWait(f"{lacks} at {group.lease.producer}", group.lease.producer, group.ticket)


def lag_runs(store: Store, stored: StoredSample, number: int) -> list[tuple[int, int, int]]:
    assert store.policy is not None
    return admission.span_lags(store.tree, stored.trajectory.all_spans(), store.policy, number)


def drop_stale(store: Store, line: list[Group], number: int) -> None:
    """`drop`: a complete group past the limit is sent again; the third time it is abandoned."""
    for group in line:
        if not group.complete or all(
            admission.sample_lag(lag_runs(store, stored, number)) <= store.max_lag
            for stored in group.stored_samples()
        ):
            continue
        group.drops += 1
        store.changes += 1
        if group.drops >= MAX_DROPS:
            store.remove_group(group, "abandoned")
            continue
        store.stored_bytes -= group.release_samples()
        for index, stored in enumerate(group.stored_samples()):
            group.other.append(("dropped_stale", stored.length, stored.trajectory.reward))
            group.finals[index, stored.trajectory.attempt] = "dropped_stale"
        group.empty()
        store.lacking = True


def announced_limits(store: Store, group: Group, stored: StoredSample) -> list[float]:
    """The lag up to which each span of a sample may be trained: the run's limit, or the one that
    its ticket announced.  Of an adopted session what a grant announced that the span's version may
    have written under, the largest of them: of two grants in one epoch a token keeps to its own by
    its place, of two epochs no later one excuses what an earlier one drew."""
    sample = stored.trajectory
    spans = sample.all_spans()
    if not sample.adopted:
        grant = group.grants.get(sample.attempt)
        return [store.max_lag if grant is None else min(store.max_lag, grant.limit)] * len(spans)
    grants = [
        grant
        for attempt in (sample.attempt, *(attempt for attempt, _ in sample.adopted))
        if (grant := group.grants.get(attempt)) is not None
    ]
    if len(grants) < 2:
        limit = min(store.max_lag, *(grant.limit for grant in grants), math.inf)
        return [limit] * len(spans)
    return [
        min(
            store.max_lag,
            max((x.limit for x in grants if checks.is_granted(x, span.label)), default=math.inf),
        )
        for span in spans
    ]


def judge(store: Store, groups: list[Group], number: int) -> list[list[tuple[int, int, int]]]:
    """Lag is judged at the lease: orphans of an earlier epoch are written again; in this epoch it
    is a bug of ours.  Returns the runs (start, end, lag) of each sample that stays.
    """
    out = []
    on_exceed = store.settings.on_exceed
    hard = on_exceed in ("pace", "drop")
    for group in groups:
        for index, stored in enumerate(group.samples):
            if stored is None:
                continue
            runs = lag_runs(store, stored, number)
            masked = 0
            if on_exceed == "mask":
                masked = sum(e - b for b, e, lag in runs if lag > store.max_lag)
            if masked != stored.masked:
                stored.masked = masked
                store.changes += 1
            if on_exceed == "downweight":
                stored.faded = sum(
                    (e - b)
                    * (1 - 0.5 ** (max(0.0, lag - store.max_lag) / store.settings.half_life))
                    for b, e, lag in runs
                )
            limits = announced_limits(store, group, stored) if hard else []
            late = [
                (lag, limit)
                for (_, _, lag), limit in zip(runs if hard else [], limits, strict=True)
                if not store.may_train(stored.trajectory, lag, limit)
            ]
            if not late:
                out.append(runs)
                continue
            if min(x.label.epoch for x in stored.trajectory.all_spans()) >= store.epoch:
                lag, limit = max(late)
                raise ProtocolError(
                    f"ticket {group.ticket}, sample {index} would train "
                    f"{lag} versions late in batch {number}, "
                    f"past the limit {limit:g}: a bug of ours; keep the run directory "
                    "and report it"
                )
            group.other.append(("orphaned", stored.length, stored.trajectory.reward))
            group.finals[index, stored.trajectory.attempt] = "orphaned"
            group.set_sample(index, None)
            store.lacking = True
            store.stored_bytes -= stored.size
            store.changes += 1
    return out


def message(store: Store, groups: list[Group], epoch: int, number: int) -> Batch:
    """The message for composed, complete groups."""
    stored = [s for group in groups for s in group.stored_samples()]
    runs = [lag_runs(store, s, number) if s.runs is None else s.runs for s in stored]
    lags = [admission.sample_lag(r) for r in runs]
    in_flight = [min(s.in_flight, lag) for s, lag in zip(stored, lags, strict=True)]
    trained = {t for comp in store.comps[: number + 1 - store.base] for t in comp}
    first = min((t for t in store.alive if t not in trained), default=store.cursor)
    above = [
        t for t in range(first, store.cursor) if t not in store.alive or t in trained
    ] + sorted(store.skip)
    return Batch(
        limit=store.limit.now if store.settings.ess_floor else 0,
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
