"""Which life of a generator counts, when several carry one name: by the order in which they are
heard, never by a clock of theirs.

```
nobody --speaks--> holder <--speaks again--+
                     |
                     |   another speaks: a claim; it waits
                     |     the holder is gone, or silent for `silent_s`:
                     |       the claimant holds the name, the leases are given back
                     |     the holder is heard again, twice and MARGIN_S apart:
                     |       two live ones of one name; the claimant is refused
                     |
                     +-- once replaced it is over for good: refused,
                         and only finished samples are taken from it
```
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

# frames of a dead process may still arrive: they come at once, a live one is heard again later
MARGIN_S = 1.0
PROOFS = 2
# of a name; of a name; in all
CLAIMS = 8
ENDED = 64
NAMES = 4096
FORGET = 30  # silences after which a name is forgotten


@dataclass
class NameClaim:
    heard: float  # when it began, then when the holder was heard of last, MARGIN_S later at least
    proofs: int = 0


@dataclass
class NameHolder:
    token: int | None  # None: it has left
    heard: float
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=ENDED))
    claims: dict[int, NameClaim] = field(default_factory=dict)


class PeerSessions:
    """name -> the session that holds it.

    >>> s = PeerSessions(silent_s=20.0)
    >>> s.on_message("g", 7, 0.0), s.on_message("g", 3, 1.0), s.on_message("g", 7, 3.0)
    ('new', 'waits', 'holds')
    >>> s.on_message("g", 7, 5.0), s.on_message("g", 3, 5.5)
    ('holds', 'refused')

    The first one has been silent: the second takes over, for good.

    >>> s.on_message("g", 3, 30.0), s.on_message("g", 7, 31.0)
    ('new', 'over')
    """

    def __init__(self, silent_s: float) -> None:
        self.silent_s = silent_s
        self.names: dict[str, NameHolder] = {}

    def on_message(self, name: str, token: int, now: float, *, gone: bool = False) -> str:
        """A session of `name` is heard: "new" (it holds the name from now on), "holds", "waits",
        "refused", "over" or "full".

        gone: the holder's process is known to have ended.
        """
        holder = self.names.get(name)
        if holder is None:
            if len(self.names) >= NAMES:
                return "full"
            self.names[name] = NameHolder(token, now)
            return "new"
        if token == holder.token:
            self._proof(holder, now)
            return "holds"
        if token in holder.ended:
            return "over"
        if holder.token is None or gone or now - holder.heard > self.silent_s:
            self._end_holder(holder)
            self.names[name] = NameHolder(token, now, holder.ended)
            return "new"
        if token not in holder.claims and len(holder.claims) >= CLAIMS:
            del holder.claims[next(iter(holder.claims))]
        claim = holder.claims.setdefault(token, NameClaim(now))
        return "refused" if claim.proofs >= PROOFS else "waits"

    def is_over(self, name: str, token: int) -> bool:
        """Has this session held the name, and does not any more?"""
        return name in self.names and token in self.names[name].ended

    def end_session(self, name: str, token: int) -> bool:
        """The holder says that it ends; False: it is another that holds the name."""
        holder = self.names.get(name)
        if holder is None:
            return True
        if holder.token != token:
            return False
        self._end_holder(holder)
        return True

    @staticmethod
    def _end_holder(holder: NameHolder) -> None:
        if holder.token is not None:
            holder.ended.append(holder.token)
        holder.token = None

    @staticmethod
    def _proof(holder: NameHolder, now: float) -> None:
        holder.heard = now
        for claim in holder.claims.values():
            if now - claim.heard >= MARGIN_S:
                claim.heard = now
                claim.proofs = claim.proofs + 1

    def token(self, name: str) -> int | None:
        """The session that holds `name`."""
        holder = self.names.get(name)
        return None if holder is None else holder.token

    def forget(self, now: float) -> list[str]:
        """Drop names that have been silent for very long; returns them."""
        late = [name for name, h in self.names.items() if now - h.heard > FORGET * self.silent_s]
        for name in late:
            del self.names[name]
        return late
