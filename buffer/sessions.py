"""Decide which generator process holds a name when several use it.

The order in which their messages arrive decides, never their clocks.

```
free --message--> holder <--further messages--+
                    |
                    |   a message of another process: a claim; it waits
                    |     the holder has ended, or was silent for `silent_s`:
                    |       the claimant gets the name; the holder's leases end
                    |     two more messages of the holder, MARGIN_S apart:
                    |       two live processes have one name; the claimant is refused
                    |
                    +-- a replaced holder stays replaced: it is refused,
                        and only its finished samples are taken
```
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

# Frames of a dead process may still arrive, but all at once: a message this much later proves that
# its sender is alive.
MARGIN_S = 1.0
PROOFS = 2
CLAIMS = 8  # most claims on a name
ENDED = 64  # former sessions of a name that are remembered
NAMES = 4096  # most names
FORGET = 30  # times `silent_s` after which a silent name is forgotten


@dataclass
class NameClaim:
    heard: float  # time of the claim, then of the holder's last proof, at least MARGIN_S later
    proofs: int = 0


@dataclass
class NameHolder:
    token: int | None  # None: the session has ended
    heard: float
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=ENDED))
    claims: dict[int, NameClaim] = field(default_factory=dict)


class PeerSessions:
    """The session that holds each name.

    >>> s = PeerSessions(silent_s=20.0)
    >>> s.on_message("g", 7, 0.0), s.on_message("g", 3, 1.0), s.on_message("g", 7, 3.0)
    ('new', 'waits', 'holds')
    >>> s.on_message("g", 7, 5.0), s.on_message("g", 3, 5.5)
    ('holds', 'refused')

    After the first session's silence the second one takes over for good.

    >>> s.on_message("g", 3, 30.0), s.on_message("g", 7, 31.0)
    ('new', 'over')
    """

    def __init__(self, silent_s: float) -> None:
        self.silent_s = silent_s
        self.names: dict[str, NameHolder] = {}

    def on_message(self, name: str, token: int, now: float, *, gone: bool = False) -> str:
        """Record a message of a session of `name`; return the session's state.

        "new" (it holds the name from now on), "holds", "waits" (for the holder to end), "refused"
        (the holder is alive), "over" (it was replaced) or "full" (there are too many names).

        gone: the holder's process has certainly ended.
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
        """Whether this session has lost the name."""
        return name in self.names and token in self.names[name].ended

    def end_session(self, name: str, token: int) -> bool:
        """End a session; return False if another session holds the name."""
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
        """The session that holds `name`, or None."""
        holder = self.names.get(name)
        return None if holder is None else holder.token

    def forget(self, now: float) -> list[str]:
        """Forget names that have been silent for very long; return them."""
        late = [name for name, h in self.names.items() if now - h.heard > FORGET * self.silent_s]
        for name in late:
            del self.names[name]
        return late
