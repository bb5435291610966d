r"""Who hands the weights to whom, where the learner hands out `weights.fan_out` copies and no more.

```
learner ---> generator-0 ---> generator-2     at most `fan_out` arrows leave anybody
        \--> generator-1 ---> generator-3     (over another host's link as over one's own)
```

Whoever wants a version asks the learner's chunk server for its place in that version's tree, and
gets the SHA-256 of every chunk with it: what others hand on is checked chunk by chunk by what the
learner said, before it is used or handed on further.  A tree grows as it is asked for, so nobody
waits for somebody who has not begun, and a chunk goes on as soon as it has come."""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from asyncrl.contract.versions import Label

LEARNER = ""  # the learner, as a place to get weights from
LOOK = 16  # places that are compared for one that asks
STRIKES = 3  # more say nothing more
FAILED = 4  # places that have failed somebody with a version: it comes from the learner then
TREES = 8  # versions of which a tree is kept
PIECE = 32  # bytes of a SHA-256

Version = tuple[Label, str]  # label, digest


class RelayRequest(msgspec.Struct, frozen=True):
    """Made by a generator that wants a version: who it is, where it hands on, whom it has tried."""

    name: str  # without keys; with keys it is whom the key says
    port: int = 0  # where others get chunks from it; 0: nowhere
    key: str = ""  # public, of that port; "" without keys
    failed: list[str] = []  # names that did not give it this version
    guests: bool = False  # it wants to know whom it may let in


class RelayAssignment(msgspec.Struct, frozen=True):
    """Made by the learner's chunk server: where to get a version from, and what it must be."""

    digest: str  # of the whole
    pieces: bytes  # SHA-256 of every chunk, one behind the other
    probe: bytes
    name: str = LEARNER  # who gives it
    address: str = ""
    key: str = ""  # of that address
    guests: dict[str, str] = {}  # public key -> generator, where it was asked for


class RelayPeer(NamedTuple):
    """A generator that asked, as the learner knows it."""

    name: str
    host: str  # the address that it asked from
    port: int
    key: str


def loopback(host: str) -> bool:
    """
    >>> loopback("127.0.0.3"), loopback("10.0.0.1"), loopback("")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def can_connect(asking: RelayPeer, giving: RelayPeer) -> bool:
    """Can `asking` connect to `giving`?  Who came by loopback is to be had by loopback alone."""
    return (
        giving.port > 0
        and giving.host != ""
        and (loopback(asking.host) or not loopback(giving.host))
    )


class _RelayTree:
    """Of one version: whom everybody gets it from.

    What goes to the same host costs no link: it has as much room beside the room for others."""

    def __init__(self, fan_out: int) -> None:
        self.fan_out = fan_out
        self.parent: dict[str, str] = {}
        self.far: Counter[str] = Counter()  # children on other hosts
        self.near: Counter[str] = Counter()  # and on its own
        # those with room, in the order in which they came: for others, and by host for its own
        self.open: dict[str, None] = {}
        self.here: dict[str, dict[str, None]] = {}
        self._hosts: dict[str, str] = {}
        self._own: dict[str, bool] = {}  # does it get it from its own host?

    def ancestors(self, name: str) -> list[str]:
        """From whom `name` gets it, from whom that one does, ..., without the learner."""
        out: list[str] = []
        while (name := self.parent.get(name, LEARNER)) != LEARNER and name not in out:
            out.append(name)
        return out

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
        """`name` gets it from nobody (now), and nobody is sent to it."""
        if (parent := self.parent.pop(name, None)) is not None:
            (self.near if self._own[name] else self.far)[parent] -= 1
            if parent in self.parent:
                self._offer(parent)
            self.open.pop(name, None)
            self.here.get(self._hosts[name], {}).pop(name, None)

    def _offer(self, name: str) -> None:
        """Where is there room below `name`?"""
        here = self.here.setdefault(self._hosts[name], {})
        for room, count in ((self.open, self.far), (here, self.near)):
            if count[name] < self.fan_out:
                room[name] = None
            else:
                room.pop(name, None)


class RelayTrees:
    """Every version's tree, as the learner hands it out.

    `beyond` counts the copies that left the learner although `fan_out` had: nobody else had room,
    or could be reached.

    >>> trees = RelayTrees(2)
    >>> version = Label(1, 7), "d"
    >>> def of(name, host, *failed):
    ...     return trees.assign_source(version, RelayPeer(name, host, 5000, ""), failed)
    >>> [of("a", "10.0.0.1"), of("b", "10.0.0.2"), of("c", "10.0.0.3"), of("d", "10.0.0.2")]
    ['', '', 'a', 'b']

    c gets nothing from a: the next time another comes, which is not one that waits for c.

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
        """Whom `asking` gets the version from: a relay's name, or LEARNER.

        A relay of its own host before the learner, the learner before other hosts' relays, the
        nearer to the learner the better; those that have failed somebody of late come last."""
        tree = self._tree(version)
        self._know(asking)
        name, tried = asking.name, set(failed[:FAILED])
        if (before := tree.parent.get(name)) is None:
            self.strikes[name] = self.strikes.get(name, 0) // 2
        elif before in tried and before != LEARNER:  # nobody speaks against others than its own
            self.strikes[before] = min(self.strikes.get(before, 0) + 1, STRIKES)
        tree.remove(name)
        room = tree.far[LEARNER] < self.fan_out
        found = [] if len(tried) >= FAILED else self._candidates(tree, asking, tried)
        if room:
            found.append(((0, 1, 0), LEARNER))
        chosen = min(found, default=((0, 0, 0), LEARNER), key=lambda each: each[0])[1]
        self.beyond += chosen == LEARNER and not room
        tree.add(asking, chosen)
        return chosen

    def _candidates(
        self, tree: _RelayTree, asking: RelayPeer, tried: set[str]
    ) -> list[tuple[tuple[int, int, int], str]]:
        """Relays that have room, each with what it is chosen by: the least is the best."""
        found = []
        here = tree.here.get(asking.host, {})
        for near, names in ((0, here), (2, tree.open)):
            for name in islice(names, LOOK):
                relay = self.relays[name]
                if name in tried or not can_connect(asking, relay):
                    continue
                if near and relay.host == asking.host:
                    continue
                above = tree.ancestors(name)
                if asking.name not in above:  # it would wait for what `asking` has to bring
                    found.append(((self.strikes.get(name, 0), near, len(above)), name))
        return found

    def _tree(self, version: Version) -> _RelayTree:
        tree = self._trees.setdefault(version, _RelayTree(self.fan_out))
        while len(self._trees) > TREES:
            self._trees.pop(next(iter(self._trees)))
        return tree

    def _know(self, asking: RelayPeer) -> None:
        """One that comes anew, at another port, holds nothing any more of what it held."""
        before = self.relays.get(asking.name)
        if before is not None and before != asking:
            for tree in self._trees.values():
                tree.remove(before.name)
        self.relays[asking.name] = asking


def matches_digest(data: bytes, pieces: bytes, number: int) -> bool:
    """Is this chunk `number` of what `pieces` are the digests of?"""
    return hashlib.sha256(data).digest() == pieces[PIECE * number : PIECE * (number + 1)]


class ChunkDigests:
    """The chunks' digests of the last few versions, computed when they are asked for first.

    read(label, digest, offset, size) as of `WeightRing.read_part`."""

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
        """(digest of the whole, of every chunk, probe); digest "" when it is not there (any more).

        digest "": whatever carries the label."""
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
            found, data, _ = self._read(label, digest, offset, self.chunk)
            if not found:
                return
            yield hashlib.sha256(data).digest()
