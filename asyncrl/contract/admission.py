"""Admission rules: when a ticket may be granted, and which samples may train.

**Staleness bound** (on_exceed = pace).  An attempt is granted in epoch e while `committed` = c, at
position p < (k+1) * batch: p alive groups come before it. These are the groups of composed batches,
then the others in ticket order, which is the order in which they train.  Groups before it can only
leave (trained, filtered, abandoned; under injection another takes the position), none can enter,
and compositions are durable, so its batch is at most c + floor(p / batch) <= c + k.  Its tokens
carry (e, n) with n >= c: lag <= k within the epoch.  In later epochs the lag, a distance in the
tree of versions, is judged again when the batch is leased; a sample that exceeds k there is an
orphan and is generated again.

**An admission window** (freshness.py) may admit fewer batches ahead: at each grant the room is
(w+1) * batch for a whole w, 1 <= w <= k, that follows from a fractional window and the time.  The
proof concerns one grant, and uses only p < (w+1) * batch <= (k+1) * batch at its moment.  It
therefore holds for any window up to k, however it moves, and gives lag <= w for the w of the grant.
A window that narrows takes no ticket back.  The run cannot deadlock: w >= 1, so the oldest batch
always has room.

**An adaptive limit** (`next_limit`) moves between commits, within hard bounds.  The proof above
concerns one grant and the k of that moment: an attempt granted under k_t at p < (k_t+1) * batch
trains in batch c + k_t at the latest, whatever the limit is later, because its position does not
depend on groups admitted after it.  This guarantees that no token exceeds the limit that its ticket
announced, and none exceeds `most`.  The run cannot deadlock: a limit is at least 1, so the oldest
batch always has room."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import xxhash

from asyncrl.contract.messages import LagRun, VersionSpan
from asyncrl.contract.versions import Label, PolicyTree

Request = TypeVar("Request")


def limit_groups(
    max_lag: float, batch: int, stored_bytes: int = 0, byte_limit: int = 1 << 30
) -> float:
    """Limit the number of alive groups: (k + 1) * batch.

    Without a staleness limit it is infinity until the stored bytes reach `byte_limit`.

    batch: groups of a batch."""
    if math.isinf(max_lag):
        return math.inf if stored_bytes < byte_limit else 0
    return (int(max_lag) + 1) * batch


class TicketQueue(Generic[Request]):
    """The generators that wait for tickets, in the order of their requests.

    The sums of free slots change with each request, so that reading them costs the same however
    many generators wait.

    evaluators: generators that get only tickets of evaluations
    free: free slots of all generators that wait
    waiting: name -> (free slots, request)
    shared: those among which a batch is divided, which are not the evaluators'

    >>> queue: TicketQueue[str] = TicketQueue(evaluators=["generator-1"])
    >>> queue.add("generator-0", 8, "first")
    >>> queue.add("generator-1", 4, "second")
    >>> queue.free, queue.shared, queue.waiting
    (12, 8, {'generator-0': (8, 'first'), 'generator-1': (4, 'second')})
    >>> queue.remove("generator-1")
    >>> queue.free, queue.shared, "generator-1" in queue.waiting
    (8, 8, False)
    """

    def __init__(self, evaluators: Collection[str] = ()) -> None:
        self.evaluators = frozenset(evaluators)
        self.free = self.shared = 0
        self.waiting: dict[str, tuple[int, Request]] = {}

    def add(self, name: str, slots: int, request: Request) -> None:
        """Queue a request; a generator that waits already keeps its place."""
        self._count(name, slots - self._count_slots(name))
        self.waiting[name] = slots, request

    def remove(self, name: str) -> None:
        """Drop the request of a generator, if it has one."""
        self._count(name, -self._count_slots(name))
        self.waiting.pop(name, None)

    def serve(self, batch: float, grant: Callable[[str, int, Request], bool]) -> list[str]:
        """Serve the requests in their order; return the generators whose requests are granted.

        Each gets its share of a batch. It stops at the first request that gets no ticket, because
        the store treats all generators alike unless some are reserved for evaluations.

        batch: samples of a batch, or inf if batches are not divided.
        grant: grants tickets for (name, samples, request); returns whether there were any.
        """
        granted = []
        for name, (slots, request) in self.waiting.items():
            divides = name not in self.evaluators
            if grant(name, share_batch(slots, self.shared, batch) if divides else slots, request):
                granted.append(name)
            elif not self.evaluators:
                break
        for name in granted:
            self.remove(name)
        return granted

    def _count_slots(self, name: str) -> int:
        return self.waiting[name][0] if name in self.waiting else 0

    def _count(self, name: str, slots: int) -> None:
        self.free += slots
        self.shared += 0 if name in self.evaluators else slots


def divides_batches(limit: float, threads: int, cores: int) -> bool:
    """Return whether the generators that wait for tickets divide a batch.

    A batch that several write is complete sooner, but costs more work than by one. On a machine
    with fewer cores than threads the learner loses the time that this takes. There only a
    synchronous run divides its batches, because its learner waits meanwhile.

    limit: staleness.max_lag
    threads: of the learner and of all generators on its machine
    cores: of that machine

    >>> [divides_batches(limit, 3, cores) for limit, cores in ((0, 2), (2, 2), (2, 4))]
    [True, False, True]
    """
    return limit == 0 or threads <= cores


def share_batch(samples: int, waiting: int, batch: float) -> int:
    """Compute how many samples the next grant of a waiting generator may have.

    A batch is divided in proportion to the free slots of the generators that wait for tickets.
    Otherwise the first of them could take a whole batch, and a synchronous run would have one
    generator at work at a time. A generator that waits alone gets all that it requests.

    samples: free slots of the generator.
    waiting: free slots of all generators that wait, this one included.
    batch: samples of a batch; inf: batches are not divided.

    >>> share_batch(256, 512, 256), share_batch(96, 128, 64), share_batch(1024, 1024, 256)
    (128, 48, 1024)
    """
    if waiting <= max(samples, batch):
        return samples
    return math.ceil(batch * samples / waiting)


LEAST = 1  # smallest adaptive limit: at 0 the learner always waits, and the limit would rise again
AVERAGED = 3  # number of batches over which the evidence is averaged
IDLE = 0.05  # share of idle learner time above which the limit may rise
CLEAR = 0.25  # the limit rises only if the ESS is this share of the way from the floor to 1
# upper edges of the buckets of by_lag/ess_*
EDGES = {"0": 0.0, "1": 1.0, "2": 2.0, "3to4": 4.0, "5to8": 8.0, "9plus": math.inf}


class LimitEvidence(msgspec.Struct, frozen=True, array_like=True):
    """The evidence of a committed batch for moving an adaptive limit."""

    ess: float  # of the raw ratios start/behavior, share
    held: float  # the largest lag up to which the ESS of every lag is at least the floor
    idle: float  # share of the learner's step in which it waited for the batch


class AdaptiveLimit(msgspec.Struct, frozen=True, array_like=True):
    """An adaptive limit, and its last move."""

    now: int = LEAST
    settling: int = 0  # number of coming batches that may contain tickets of the previous limit
    seen: tuple[LimitEvidence, ...] = ()
    before: int = 0  # the limit before the last move; 0: it has not moved
    ess: float = 0.0  # the means that caused the last move
    idle: float = 0.0


def read_evidence(metrics: Mapping[str, float], floor: float) -> LimitEvidence | None:
    """Read the evidence from a commit's metrics; None without a finite ESS.

    floor: the ESS below which a lag is not safe.

    >>> by_lag = {"by_lag/ess_0": 1.0, "by_lag/ess_1": 0.8, "by_lag/ess_2": 0.4}
    >>> read_evidence({"is/ess": 0.9} | by_lag, 0.5)
    LimitEvidence(ess=0.9, held=1.0, idle=0.0)
    """
    ess = metrics.get("is/ess", math.nan)
    if not math.isfinite(ess):
        return None
    safe_lag = 0.0
    for bucket, edge in EDGES.items():
        if metrics.get(f"by_lag/ess_{bucket}", floor) < floor:
            break
        safe_lag = edge
    return LimitEvidence(ess, safe_lag, metrics.get("time/learner_idle_share", 0.0))


def next_limit(
    limit: AdaptiveLimit, batch: LimitEvidence, floor: float, most: int
) -> AdaptiveLimit:
    """Compute the limit for new tickets after another batch.

    It falls while the mean ESS is below `floor`: to the largest lag whose ESS is above it, at least
    by one. It rises by one while the learner waits for batches and the ESS is clearly above the
    floor.  After a move it stays until the batches of the previous limit are trained.

    batch: evidence of the committed batch.
    floor: lowest accepted ESS.
    most: hard bound of the limit.

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
    recent = (*limit.seen, batch)[-AVERAGED:]
    ess = sum(evidence.ess for evidence in recent) / len(recent)
    idle = sum(evidence.idle for evidence in recent) / len(recent)
    new_limit = limit.now
    if len(recent) == AVERAGED and ess < floor:
        safe_lag = max(evidence.held for evidence in recent)
        new_limit = max(LEAST, int(min(limit.now - 1, safe_lag)))
    elif len(recent) == AVERAGED and idle > IDLE and ess >= floor + CLEAR * (1 - floor):
        new_limit = min(most, limit.now + 1)
    if new_limit == limit.now:
        return msgspec.structs.replace(limit, seen=recent)
    return AdaptiveLimit(new_limit, max(new_limit, limit.now), (), limit.now, ess, idle)


def plan_batch(committed: int, position: int, batch: int) -> int:
    """Compute the batch of an alive group if no group before it is removed.

    position: number of groups that train before it. batch: groups of a batch."""
    return committed + position // batch


def choose_injected_lag(inject: int | Sequence[float], seed: int, ticket: int) -> int:
    """Choose the lag to inject into a ticket.

    inject: a constant, or the weights of lag 0, 1, 2, ..., by which a hash of the ticket samples.
    """
    if isinstance(inject, int):
        return inject
    threshold = xxhash.xxh3_64_intdigest(f"{seed}:{ticket}:inject".encode()) / 2**64 * sum(inject)
    return bisect.bisect([*itertools.accumulate(inject[:-1])], threshold)


def sample_delay(scale: float, seed: int, *scope: int) -> float:
    """Sample the artificial delay of a completion, in decode steps per token.

    Its distribution is Lomax with shape 1.5 and `scale`, cut at 20 scales.  Half of the delays are
    less than 0.6 scales, one in ten more than 3.6, one in a hundred 20.

    scope: a ticket, or a ticket and a sample, whose hash replaces a random number.
    """
    uniform = xxhash.xxh3_64_intdigest(f"{seed}:{':'.join(map(str, scope))}:delay".encode()) / 2**64
    return scale * min(20.0, (1 - uniform) ** (-2 / 3) - 1) if scale else 0.0


def compute_span_lags(
    tree: PolicyTree, spans: Iterable[VersionSpan], policy: Label, number: int
) -> list[LagRun]:
    """Compute (start, end, lag) of each span if it trains in batch `number`.

    The batch starts from a descendant of `policy`."""
    compute_lag = tree.compute_lag
    return [(span.start, span.end, compute_lag(span.label, policy, number)) for span in spans]


def compute_sample_lag(runs: Iterable[LagRun]) -> int:
    """Compute the greatest lag of a sample's tokens; 0 without runs."""
    greatest = 0
    for _, _, lag in runs:
        if lag > greatest:
            greatest = lag
    return greatest
