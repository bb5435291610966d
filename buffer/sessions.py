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

from collections import deque
from dataclasses import dataclass, field

from asyncrl.contract.messages import Numbers, TicketRequest
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import OpenSession, ProcessWait

# seconds. Frames of a dead process may still arrive, but all at once: a message this much later
# proves that its sender is alive.
MARGIN_S = 1.0
PROOFS = 2  # of the holder, after which a claim is refused
CLAIMS = 8  # most claims on a name
ENDED = 64  # former sessions of a name that are remembered
NAMES = 4096  # most names
FORGET = 30  # times `silent_s` after which a silent name is forgotten


@dataclass
class PeerState:
    """The state of a connected generator, or of the learner.

    stats: the numbers of its last report, sums since its start among them.
    counted: the part of these sums that earlier steps contain; None: no report was counted yet.
    refused: refused samples, which good ones offset.
    early: its request for tickets that came before its hello.
    follows: its request for no sample: it samples the calls of sessions, and needs only new
        versions and the end of the run."""

    at: float = 0.0  # CLOCK_MONOTONIC seconds of its last message
    peer: bytes = b""
    pid: int = 0
    host: str = ""
    is_greeted: bool = False
    waiting: ProcessWait | None = None
    stats: Numbers = field(default_factory=dict)
    counted: Numbers | None = None
    sessions: list[OpenSession] = field(default_factory=list)
    announced: Label | None = None  # the version last sent to it while it waited
    renewed: float = 0.0  # CLOCK_MONOTONIC seconds of its last renewal
    gap: float = 0.0  # its longest recent gap between two renewals, in seconds
    refused: int = 0
    early: TicketRequest | None = None
    follows: TicketRequest | None = None


@dataclass
class NameClaim:
    """The claim of another process on a name."""

    proved_at: float  # seconds: time of the claim, then of the holder's last proof
    proofs: int = 0  # messages of the holder since then, each MARGIN_S after the one before


@dataclass
class NameHolder:
    """The session that holds a name, and the other sessions that used or claim it."""

    token: int | None  # None: the session has ended
    active_at: float  # seconds: time of its last message
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=ENDED))
    claims: dict[int, NameClaim] = field(default_factory=dict)


class PeerSessions:
    """The session that holds each name.

    silent_s: seconds without a message after which another session may take the name.

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

    def on_message(self, name: str, token: int, now: float, *, holder_ended: bool = False) -> str:
        """Record a message of a session of `name`; return the session's state.

        "new" (it holds the name from now on), "holds", "waits" (for the holder to end), "refused"
        (the holder is alive), "over" (it was replaced) or "full" (there are too many names).

        holder_ended: the holder's process has certainly ended.
        """
        holder = self.names.get(name)
        if holder is None:
            if len(self.names) >= NAMES:
                return "full"
            self.names[name] = NameHolder(token, now)
            return "new"
        if token == holder.token:
            holder.active_at = now
            for claim in holder.claims.values():
                if now - claim.proved_at >= MARGIN_S:
                    claim.proved_at = now
                    claim.proofs += 1
            return "holds"
        if token in holder.ended:
            return "over"
        is_free = holder.token is None or holder_ended
        if is_free or now - holder.active_at > self.silent_s:
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

    def forget(self, now: float) -> list[str]:
        """Forget names that have been silent for very long; return them."""
        silent = [
            name
            for name, holder in self.names.items()
            if now - holder.active_at > FORGET * self.silent_s
        ]
        for name in silent:
            del self.names[name]
        return silent
