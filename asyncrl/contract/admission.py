"""Who may start and what may be trained on: the pure rules that the buffer and `simulate` share.

**Staleness bound** (on_exceed = pace).  An attempt is granted in epoch e while `committed` = c, at
place p < (k+1) * batch: p groups alive come before it: those composed already, batch by batch, then
the others in ticket order, which is how they train. They only leave (trained, filtered, abandoned;
under injection another takes the place), none enters before it, and compositions are durable, so
its batch is at most c + floor(p / batch) <= c + k.  Its tokens carry (e, n) with n >= c: lag <= k
within the epoch. Later epochs judge the tree distance again at the lease; what exceeds k there is
an orphan and is written again.

**A limit that sets itself** (`next_limit`) moves between commits, within hard bounds.  The proof
above is about one grant and the k of that moment: an attempt granted under k_t at p < (k_t+1) *
batch trains in batch c + k_t at the latest, whatever the limit is later, because its place depends
on nobody admitted after it.  So the guarantee is: no token passes the limit that its ticket
announced, and none passes `most`.  The run cannot stand still: a limit is at least 1, so the oldest
batch always has room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from asyncrl.contract.messages import VersionSpan
from asyncrl.contract.versions import Label, PolicyTree


def group_limit(
    max_lag: float, batch: int, stored_bytes: int = 0, byte_limit: int = 1 << 30
) -> float:
    """How many groups may be alive: (k + 1) * batch; without a limit, as many as the bytes
    allow.
    """
    if math.isinf(max_lag):
        return math.inf if stored_bytes < byte_limit else 0
    return (int(max_lag) + 1) * batch


LEAST = 1  # versions: at 0 the learner always waits, and the limit would rise at once
AVERAGED = 3  # batches whose means decide
IDLE = 0.05  # of the learner's time: more is worth a higher limit
CLEAR = 0.25  # of the way from the floor to 1: the ESS that a higher limit needs
# upper edges of the buckets of by_lag/ess_*
EDGES = {"0": 0.0, "1": 1.0, "2": 2.0, "3to4": 4.0, "5to8": 8.0, "9plus": math.inf}


class LimitEvidence(msgspec.Struct, frozen=True, array_like=True):
    """What a committed batch says of the limit."""

    ess: float  # of the raw ratios start/behaviour, share
    held: float  # the largest lag up to which the ESS at every lag keeps the floor
    idle: float  # share of the learner's step in which it waited for the batch


class AdaptiveLimit(msgspec.Struct, frozen=True, array_like=True):
    """A limit that sets itself, and what moved it last."""

    now: int = LEAST
    settling: int = 0  # batches to come that may hold tickets of the limit before
    seen: tuple[LimitEvidence, ...] = ()
    before: int = 0  # the last move: from which limit, by which means; 0: it has not moved
    ess: float = 0.0
    idle: float = 0.0


def limit_evidence(metrics: Mapping[str, float], floor: float) -> LimitEvidence | None:
    """What a commit's metrics say; None: not what the rule needs.

    >>> by_lag = {"by_lag/ess_0": 1.0, "by_lag/ess_1": 0.8, "by_lag/ess_2": 0.4}
    >>> limit_evidence({"is/ess": 0.9} | by_lag, 0.5)
    LimitEvidence(ess=0.9, held=1.0, idle=0.0)
    """
    ess = metrics.get("is/ess", math.nan)
    if not math.isfinite(ess):
        return None
    held = math.inf
    reached = 0.0
    for bucket, edge in EDGES.items():
        here = metrics.get(f"by_lag/ess_{bucket}")
        if here is not None and here < floor:
            held = reached
            break
        reached = edge
    return LimitEvidence(ess, held, metrics.get("time/learner_idle_share", 0.0))


def next_limit(
    limit: AdaptiveLimit, batch: LimitEvidence, floor: float, most: int
) -> AdaptiveLimit:
    """The limit for tickets from now on, after another batch.

    It falls while the mean ESS is below `floor`, to the largest lag whose own ESS holds, at least
    by one; it rises by one while the learner waits for batches and the ESS is clear of the floor.
    After a move it rests until batches of the limit before are through.

    >>> starved = LimitEvidence(ess=0.95, held=math.inf, idle=0.3)
    >>> limit = AdaptiveLimit()
    >>> for _ in range(3): limit = next_limit(limit, starved, 0.5, 16)
    >>> limit.now, limit.settling
    (2, 2)
    >>> stale = LimitEvidence(ess=0.3, held=4.0, idle=0.0)
    >>> limit = AdaptiveLimit(now=8)
    >>> for _ in range(3): limit = next_limit(limit, stale, 0.5, 16)
    >>> limit.now, limit.settling
    (4, 8)
    """
    if limit.settling:
        return msgspec.structs.replace(limit, settling=limit.settling - 1)
    last = (*limit.seen, batch)[-AVERAGED:]
    ess = sum(one.ess for one in last) / len(last)
    idle = sum(one.idle for one in last) / len(last)
    to = limit.now
    if len(last) == AVERAGED and ess < floor:
        to = max(LEAST, int(min(limit.now - 1, max(one.held for one in last))))
    elif len(last) == AVERAGED and idle > IDLE and ess >= floor + CLEAR * (1 - floor):
        to = min(most, limit.now + 1)
    if to == limit.now:
        return msgspec.structs.replace(limit, seen=last)
    return AdaptiveLimit(to, max(to, limit.now), (), limit.now, ess, idle)


def clamp_limit(limit: AdaptiveLimit, most: int) -> AdaptiveLimit:
    """The same as a new life of the learner takes it up, within its own hard bound."""
    now = max(LEAST, min(limit.now, most))
    return AdaptiveLimit(now, now, (), limit.before, limit.ess, limit.idle)


def planned_batch(committed: int, place: int, batch: int) -> int:
    """The batch that a group at `place` among the living trains in, if none before it leaves by
    another way.
    """
    return committed + place // batch


def injected_lag(inject: int | Sequence[float], seed: int, ticket: int) -> int:
    """The lag to inject into a ticket: the constant, or a draw from the probabilities of 0, 1, 2,
    ... by a hash of the ticket.
    """
    if isinstance(inject, int):
        return inject
    drawn = xxhash.xxh3_64_intdigest(f"{seed}:{ticket}:inject".encode()) / 2**64 * sum(inject)
    total = 0.0
    at = 0
    for at, share in enumerate(inject):
        total += share
        if drawn < total:
            return at
    return at


def delay(scale: float, seed: int, *of: int) -> float:
    """Decode steps a token by which answers come late: Lomax of shape 1.5 and `scale` by a hash of
    `of` (a ticket, or a ticket and a sample), 20 scales at most.

    Half of the draws are less than 0.6 scales, one in ten more than 3.6, one in a hundred 20.
    """
    drawn = xxhash.xxh3_64_intdigest(f"{seed}:{':'.join(map(str, of))}:delay".encode()) / 2**64
    return scale * min(20.0, (1 - drawn) ** (-2 / 3) - 1) if scale else 0.0


def span_lags(
    tree: PolicyTree, spans: Iterable[VersionSpan], policy: Label, number: int
) -> list[tuple[int, int, int]]:
    """(start, end, lag) of each span, should it train in batch `number`, a descendant of
    `policy`.
    """
    lag = tree.lag
    return [(s.start, s.end, lag(s.label, policy, number)) for s in spans]


def sample_lag(runs: Iterable[tuple[int, int, int]]) -> int:
    """max over a sample's tokens."""
    most = 0
    for _, _, lag in runs:
        if lag > most:
            most = lag
    return most
