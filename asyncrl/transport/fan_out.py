r"""Relay trees: which generator passes weights to which.

The learner's link then carries few copies.

```
learner ---> generator-0 ---> generator-2     at most `fan_out` arrows leave any node
        \--> generator-1 ---> generator-3     (over links to other hosts, and again to its own host)
```

A generator asks the learner's chunk server for its position in a version's tree. The answer has the
SHA-256 of every chunk, so that a chunk from a relay is checked before it is used or passed on. A
tree grows by request: no generator waits for one that has not begun, and a chunk is passed on as
soon as it has arrived.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from asyncrl.contract.versions import Label

LEARNER = ""  # the learner as a source of weights
LOOK = 16  # candidate sources compared per request
STRIKES = 3  # the highest count of failures that matters
FAILED = 4  # after so many failed sources, a version comes from the learner
TREES = 8  # versions of which a tree is kept
PIECE = 32  # bytes of a SHA-256

Version = tuple[Label, str]  # label, digest


class RelayRequest(msgspec.Struct, frozen=True):
    """From a generator that needs a version: its name, port and failed sources."""

    name: str  # with CURVE, the key's name counts instead
    port: int = 0  # where it serves chunks to others (0: nowhere)
    key: str = ""  # public key of that port; "" without CURVE
    failed: list[str] = []  # names of sources that failed with this version
    guests: bool = False  # it needs the list of permitted peers


class RelayAssignment(msgspec.Struct, frozen=True):
    """From the learner's chunk server: where to get a version, and its digests."""

    digest: str  # of the whole version
    pieces: bytes  # SHA-256 of every chunk, concatenated
    probe: bytes
    name: str = LEARNER  # the source
    address: str = ""
    key: str = ""  # public key of that address
    guests: dict[str, str] = {}  # public key -> generator, if requested


class RelayPeer(NamedTuple):
    """A generator that asked, as the learner knows it."""

    name: str
    host: str  # the address of its connection
    port: int
    key: str


def loopback(host: str) -> bool:
    """Whether `host` is a loopback address.

    >>> loopback("127.0.0.3"), loopback("10.0.0.1"), loopback("")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def can_connect(asking: RelayPeer, giving: RelayPeer) -> bool:
    """Whether `asking` can connect to `giving`, which may listen only on loopback."""
    return (
        giving.port > 0
        and giving.host != ""
        and (loopback(asking.host) or not loopback(giving.host))
    )


class _RelayTree:
    """The tree of one version: the source of every generator.

    Copies within a host use no link, so a node has `fan_out` children on its own host beside those
    on other hosts.
    """

    def __init__(self, fan_out: int) -> None:
        self.fan_out = fan_out
        self.parent: dict[str, str] = {}
        self.far: Counter[str] = Counter()  # children on other hosts
        self.near: Counter[str] = Counter()  # children on the same host
        # nodes with room, in order of arrival: for other hosts, and by host for their own
        self.open: dict[str, None] = {}
        self.here: dict[str, dict[str, None]] = {}
        self._hosts: dict[str, str] = {}
        self._own: dict[str, bool] = {}  # whether its source is on its own host

    def ancestors(self, name: str) -> list[str]:
        """Return the source of `name`, that one's source, and so on, without the learner."""
        names: list[str] = []
        while (name := self.parent.get(name, LEARNER)) != LEARNER and name not in names:
            names.append(name)
        return names

    def add(self, asking: RelayPeer, parent: str) -> None:
        self._hosts[asking.name] = asking.host
        self.parent[asking.name] = parent
        own = parent != LEARNER and asking.host == self._hosts[parent]
        self._own[asking.name] = own
        (self.near if own else self.far)[parent] += 1
        if asking.port:
            self._offer(asking.name)
        if parent in self.parent:
            self._offer(parent)

    def remove(self, name: str) -> None:
        """Detach `name` from its source and send no other generator to it."""
        if (parent := self.parent.pop(name, None)) is not None:
            (self.near if self._own[name] else self.far)[parent] -= 1
            if parent in self.parent:
                self._offer(parent)
            self.open.pop(name, None)
            self.here.get(self._hosts[name], {}).pop(name, None)

    def _offer(self, name: str) -> None:
        """Update whether `name` has room for children."""
        here = self.here.setdefault(self._hosts[name], {})
        for room, count in ((self.open, self.far), (here, self.near)):
            if count[name] < self.fan_out:
                room[name] = None
            else:
                room.pop(name, None)


class RelayTrees:
    """Every version's tree, as assigned by the learner.

    `beyond` counts the copies that left the learner beyond `fan_out`, because no other source had
    room or was reachable.

    >>> trees = RelayTrees(2)
    >>> version = Label(1, 7), "d"
    >>> def of(name, host, *failed):
    ...     return trees.assign_source(version, RelayPeer(name, host, 5000, ""), failed)
    >>> [of("a", "10.0.0.1"), of("b", "10.0.0.2"), of("c", "10.0.0.3"), of("d", "10.0.0.2")]
    ['', '', 'a', 'b']

    If c fails to get anything from a, it is assigned another source, which does not wait for c.

    >>> of("c", "10.0.0.3", "a"), of("b", "10.0.0.2", "c")
    ('b', '')
    """

    def __init__(self, fan_out: int) -> None:
        self.fan_out = fan_out
        self.relays: dict[str, RelayPeer] = {}
        self.strikes: dict[str, int] = {}
        self.beyond = 0
        self._trees: dict[Version, _RelayTree] = {}

    def assign_source(self, version: Version, asking: RelayPeer, failed: Sequence[str] = ()) -> str:
        """Choose the source of a version for `asking`: a relay's name, or LEARNER.

        Relays on the same host come before the learner, and the learner before relays on other
        hosts. Among equals, sources nearer to the learner come first. Sources that failed recently
        come last.
        """
        tree = self._tree(version)
        self._know(asking)
        name, tried = asking.name, set(failed[:FAILED])
        if (previous := tree.parent.get(name)) is None:
            self.strikes[name] = self.strikes.get(name, 0) // 2
        elif previous in tried and previous != LEARNER:  # only its own source counts as failed
            self.strikes[previous] = min(self.strikes.get(previous, 0) + 1, STRIKES)
        tree.remove(name)
        room = tree.far[LEARNER] < self.fan_out
        candidates = [] if len(tried) >= FAILED else self._candidates(tree, asking, tried)
        if room:
            candidates.append(((0, 1, 0), LEARNER))
        chosen = min(candidates, default=((0, 0, 0), LEARNER), key=lambda candidate: candidate[0])[
            1
        ]
        self.beyond += chosen == LEARNER and not room
        tree.add(asking, chosen)
        return chosen

    def _candidates(
        self, tree: _RelayTree, asking: RelayPeer, tried: set[str]
    ) -> list[tuple[tuple[int, int, int], str]]:
        """Return the relays with room, each with its rank: the least is the best."""
        candidates = []
        here = tree.here.get(asking.host, {})
        for near, names in ((0, here), (2, tree.open)):
            for name in islice(names, LOOK):
                relay = self.relays[name]
                if name in tried or not can_connect(asking, relay):
                    continue
                if near and relay.host == asking.host:
                    continue
                above = tree.ancestors(name)
                if asking.name not in above:  # otherwise the two would wait for each other
                    candidates.append(((self.strikes.get(name, 0), near, len(above)), name))
        return candidates

    def _tree(self, version: Version) -> _RelayTree:
        tree = self._trees.setdefault(version, _RelayTree(self.fan_out))
        while len(self._trees) > TREES:
            self._trees.pop(next(iter(self._trees)))
        return tree

    def _know(self, asking: RelayPeer) -> None:
        """Record a peer. One that restarted at another port has lost its versions."""
        previous = self.relays.get(asking.name)
        if previous is not None and previous != asking:
            for tree in self._trees.values():
                tree.remove(previous.name)
        self.relays[asking.name] = asking


def matches_digest(data: bytes, pieces: bytes, number: int) -> bool:
    """Whether `data` is chunk `number` of the version with these digests."""
    return hashlib.sha256(data).digest() == pieces[PIECE * number : PIECE * (number + 1)]


class ChunkDigests:
    """The chunk digests of the last few versions, computed on first request.

    read(label, digest, offset, size): as `WeightRing.read_part`.
    """

    def __init__(
        self,
        read: Callable[[Label, str, int, int], tuple[str, bytes, bytes]],
        size: int,
        chunk: int,
    ) -> None:
        self._read = read
        self.size = size
        self.chunk = chunk
        self._known: dict[Version, tuple[bytes, bytes]] = {}

    def digests_of(self, label: Label, digest: str) -> tuple[str, bytes, bytes]:
        """Return (digest of the version, digests of its chunks, probe).

        Digest "" in the result: the version is not here (any more). digest "" as argument: any
        version with that label.
        """
        digest, _, probe = self._read(label, digest, 0, 0)
        if digest and (label, digest) not in self._known:
            parts = list(self._chunks(label, digest))
            if len(parts) * self.chunk < self.size:
                return "", b"", b""
            self._known[label, digest] = (b"".join(parts), probe)
            while len(self._known) > TREES:
                self._known.pop(next(iter(self._known)))
        return (digest, *self._known[label, digest]) if digest else ("", b"", b"")

    def _chunks(self, label: Label, digest: str) -> Iterator[bytes]:
        for offset in range(0, self.size, self.chunk):
            found_digest, data, _ = self._read(label, digest, offset, self.chunk)
            if not found_digest:
                return
            yield hashlib.sha256(data).digest()
