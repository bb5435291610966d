"""Compose batches: choose groups, judge their lag, make the message."""

import itertools
import math
from collections import Counter
from typing import NamedTuple

from asyncrl.contract import admission
from asyncrl.contract.errors import ProtocolError
from asyncrl.contract.messages import LagRun
from asyncrl.contract.waits import BUFFER
from buffer.groups import MAX_DROPS, Group, StoredSample
from buffer.state import StoreRules

MOST_NAMED = 3  # generators in the reason of a wait


class BatchWait(NamedTuple):
    """The reason why a batch cannot be handed out."""

    reason: str
    process: str = BUFFER  # the process that must act
    ticket: int = -1  # the incomplete ticket, if there is one


def pick_groups(store: StoreRules, number: int) -> tuple[list[Group], BatchWait | None]:
    """Choose the groups of batch `number`; return them, or ([], the reason for waiting)."""
    if store.uses_ticket_order and not math.isinf(store.max_lag):
        # `alive` is in ticket order; called often, with thousands of groups
        picked = list(itertools.islice(store.iterate_uncomposed_groups(), store.settings.batch))
        if (wait := explain_wait(picked)) is not None:
            return [], wait
    else:
        candidates = list(store.iterate_uncomposed_groups())
        if store.settings.on_exceed == "drop":
            drop_stale(store, candidates, number)
        ready = sorted(
            (group for group in candidates if group.is_complete and group.ticket in store.alive),
            key=lambda group: (rank(store, group, number), group.completed),
        )
        picked = ready[: store.settings.batch]
    if len(picked) < store.settings.batch:
        leases = (group.lease for group in store.iterate_uncomposed_groups())
        holders = Counter(lease.producer for lease in leases if lease is not None)
        shares = [f"{count} at {name}" for name, count in holders.most_common(MOST_NAMED)]
        reason = ", ".join(shares) or "no generator has their tickets yet"
        lacking = store.settings.batch - len(picked)
        return [], BatchWait(f"{lacking} more groups: {reason}", next(iter(holders), "generators"))
    return picked, None


def rank(store: StoreRules, group: Group, number: int) -> int:
    """Rank a group for batch `number`, with the lowest rank first.

    In the order `freshest` the rank is the lag of the group's oldest token, else 0. Groups of one
    rank are taken by their order of completion."""
    if store.settings.order != "freshest":
        return 0
    return max(
        admission.compute_sample_lag(compute_lag_runs(store, stored, number))
        for stored in group.list_stored_samples()
    )


def explain_wait(groups: list[Group]) -> BatchWait | None:
    """Explain what the first incomplete group waits for; None: all are complete."""
    group = next((group for group in groups if not group.is_complete), None)
    if group is None:
        return None
    missing = f"ticket {group.ticket}: {len(group.list_missing())} samples"
    if group.lease is None:
        return BatchWait(f"{missing} to be granted again")
    return BatchWait(f"{missing} at {group.lease.producer}", group.lease.producer, group.ticket)


def compute_lag_runs(store: StoreRules, stored: StoredSample, number: int) -> list[LagRun]:
    """Compute (start, end, lag) of each span of a sample in batch `number`."""
    assert store.policy is not None
    return admission.compute_span_lags(
        store.tree, stored.trajectory.list_spans(), store.policy, number
    )


def drop_stale(store: StoreRules, groups: list[Group], number: int) -> None:
    """Drop the samples of complete groups past the limit (on_exceed = drop).

    The group's ticket is granted again; the third time the group is abandoned."""
    for group in groups:
        if not group.is_complete or all(
            admission.compute_sample_lag(compute_lag_runs(store, stored, number)) <= store.max_lag
            for stored in group.list_stored_samples()
        ):
            continue
        group.drops += 1
        store.changes += 1
        if group.drops >= MAX_DROPS:
            store.remove_group(group, "abandoned")
            continue
        store.stored_bytes -= group.count_sample_bytes()
        for stored in group.list_stored_samples():
            group.record_loss(stored, "dropped_stale")
        group.empty()
        store.lacking = True


def compute_announced_limits(store: StoreRules, group: Group, stored: StoredSample) -> list[float]:
    """Compute the greatest lag at which each span of a sample may train.

    It is the smaller of the run's limit and the ticket's limit.  A resumed session has
    several grants. Each span gets the largest limit among the grants that permit its version: a
    grant of a later epoch never permits tokens of an earlier epoch. Within one epoch the position
    of the group bounds the lag of each token by the limit of its own grant."""
    sample = stored.trajectory
    spans = sample.list_spans()
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
            max((grant.limit for grant in grants if grant.permits(span.label)), default=math.inf),
        )
        for span in spans
    ]


def judge(store: StoreRules, groups: list[Group], number: int) -> list[list[LagRun]]:
    """Judge the lag of the samples when the learner receives their batch.

    Under a hard limit, samples of an earlier epoch past the limit become orphans and are generated
    again. In the current epoch that cannot happen, and ProtocolError is raised.

    Returns the runs (start, end, lag) of each sample that stays, in the order of the groups."""
    runs_of_samples = []
    on_exceed = store.settings.on_exceed
    hard = on_exceed in ("pace", "drop")
    for group in groups:
        for index, stored in enumerate(group.samples):
            if stored is None:
                continue
            runs = compute_lag_runs(store, stored, number)
            masked = sum(end - start for start, end, lag in runs if lag > store.mask_limit)
            if masked != stored.masked:
                stored.masked = masked
                store.changes += 1
            if on_exceed == "downweight":
                stored.faded = sum(
                    (end - start)
                    * (1 - 0.5 ** (max(0.0, lag - store.max_lag) / store.settings.half_life))
                    for start, end, lag in runs
                )
            limits = compute_announced_limits(store, group, stored) if hard else []
            late = [
                (lag, limit)
                for (_, _, lag), limit in zip(runs if hard else [], limits, strict=True)
                if not store.may_train(stored.trajectory, lag, limit)
            ]
            if not late:
                runs_of_samples.append(runs)
                continue
            if min(span.label.epoch for span in stored.trajectory.list_spans()) >= store.epoch:
                lag, limit = max(late)
                raise ProtocolError(
                    f"ticket {group.ticket}, sample {index} would train {lag} versions late in "
                    f"batch {number}, past the limit {limit:g}: this is a bug in asyncrl; keep the "
                    "run directory and report it"
                )
            group.record_loss(stored, "orphaned")
            group.set_sample(index, None)
            store.lacking = True
            store.stored_bytes -= stored.size
            store.changes += 1
    return runs_of_samples
