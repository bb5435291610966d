"""Who may start and what may be trained on: the pure rules that the buffer and `simulate` share.

**Staleness bound** (on_exceed = pace).  An attempt is granted in epoch e while `committed` = c, at
place p < (k+1) * batch: p groups alive come before it: those composed already, batch by batch, then
the others in ticket order, which is how they train. They only leave (trained, filtered, abandoned;
under injection another takes the place), none enters before it, and compositions are durable, so
its batch is at most c + floor(p / batch) <= c + k.  Its tokens carry (e, n) with n >= c: lag <= k
within the epoch. Later epochs judge the tree distance again at the lease; what exceeds k there is
an orphan and is written again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import xxhash

from asyncrl.contract.messages import Span
from asyncrl.contract.versions import Label, PolicyTree


def room(max_lag: float, batch: int, stored_bytes: int = 0, byte_limit: int = 1 << 30) -> float:
    """How many groups may be alive: (k + 1) * batch; without a limit, as many as the bytes
    allow.
    """
    if math.isinf(max_lag):
        return math.inf if stored_bytes < byte_limit else 0
    return (int(max_lag) + 1) * batch


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


def delay(scale: float, seed: int, ticket: int) -> float:
    """Decode steps a token by which a ticket's answers come late: Lomax of shape 1.5 and `scale` by
    a hash of the ticket, 20 scales at most.

    Half of the tickets get less than 0.6 scales, one in ten more than 3.6, one in a hundred 20.
    """
    drawn = xxhash.xxh3_64_intdigest(f"{seed}:{ticket}:delay".encode()) / 2**64
    return scale * min(20.0, (1 - drawn) ** (-2 / 3) - 1) if scale else 0.0


def span_lags(
    tree: PolicyTree, spans: Iterable[Span], policy: Label, number: int
) -> list[tuple[int, int, int]]:
    """(start, end, lag) of each span, should it train in batch `number`, a descendant of
    `policy`.
    """
    return [(s.start, s.end, tree.lag(s.label, policy, number)) for s in spans]


def sample_lag(runs: Iterable[tuple[int, int, int]]) -> int:
    """max over a sample's tokens."""
    most = 0
    for _, _, lag in runs:
        if lag > most:
            most = lag
    return most
