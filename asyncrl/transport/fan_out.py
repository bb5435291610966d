r"""Relay trees: the source of weights of each generator.

Generators forward weights, so that few copies leave the learner.

```
learner ---> generator-0 ---> generator-2     at most `fan_out` arrows leave any node
        \--> generator-1 ---> generator-3     (over links to other hosts, and again to its own host)
```

A generator requests its position in a version's tree from the learner's chunk server. The reply has
the SHA-256 of every chunk, so that a generator checks a chunk from a relay before it uses or
forwards it. A tree grows by request: each generator waits only for generators that have begun, and
forwards a chunk as soon as it has arrived.
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
MOST_CANDIDATES = 16  # candidate sources compared per request
STRIKES = 3  # the highest count of failures that matters
FAILED = 4  # failed sources after which a version comes from the learner
TREES = 8  # versions of which a tree is kept
PIECE = 32  # bytes of a SHA-256

Version = tuple[Label, str]  # label, digest


class RelayRequest(msgspec.Struct, frozen=True):
    """A generator's request for a version: its name, port and failed sources."""

    name: str  # with CURVE, the key's name counts instead
    port: int = 0  # of its own chunk server; 0: it has none
    key: str = ""  # public key of that port; "" without CURVE
    failed: list[str] = []  # names of sources that failed with this version
    guests: bool = False  # whether it needs the list of permitted peers


class RelayAssignment(msgspec.Struct, frozen=True):
    """The reply of the learner's chunk server: the source of a version, and its digests."""

    digest: str  # of the whole version
    pieces: bytes  # SHA-256 of every chunk, concatenated
    probe: bytes
    name: str = LEARNER  # the source
    address: str = ""
    key: str = ""  # public key of that address
    guests: dict[str, str] = {}  # public key -> generator, if requested


class RelayPeer(NamedTuple):
    """A generator, as the learner knows it."""

    name: str
    host: str  # the address of its connection
    port: int
    key: str


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address.

    >>> is_loopback("127.0.0.3"), is_loopback("10.0.0.1"), is_loopback("")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def can_connect(peer: RelayPeer, source: RelayPeer) -> bool:
    """Whether `peer` can connect to `source`, which may listen only on loopback."""
    return (
        source.port > 0
        and source.host != ""
        and (is_loopback(peer.host) or not is_loopback(source.host))
    )


class _RelayTree:
    """The tree of one version: the source of every generator.

    Copies within a host use no link. A node therefore has `fan_out` children on its own host, and
    as many on other hosts.
    """

    def __init__(self, fan_out: int) -> None:
        self.fan_out = fan_out
        self.parent: dict[str, str] = {}
        self.remote_children: Counter[str] = Counter()  # children on other hosts
        self.local_children: Counter[str] = Counter()  # children on the same host
        # nodes with room, in order of arrival: for other hosts, and for their own host by host
        self.open: dict[str, None] = {}
        self.open_by_host: dict[str, dict[str, None]] = {}
        self._hosts: dict[str, str] = {}
        self._is_local: dict[str, bool] = {}  # whether a node's source is on the same host

    def list_ancestors(self, name: str) -> list[str]:
        """List the source of `name`, the source of that source, and so on, up to the learner."""
        names: list[str] = []
        while (name := self.parent.get(name, LEARNER)) != LEARNER and name not in names:
            names.append(name)
        return names

    def add(self, peer: RelayPeer, parent: str) -> None:
        """Attach a generator to its source."""
        self._hosts[peer.name] = peer.host
        self.parent[peer.name] = parent
        is_local = parent != LEARNER and peer.host == self._hosts[parent]
        self._is_local[peer.name] = is_local
        (self.local_children if is_local else self.remote_children)[parent] += 1
        if peer.port:
            self._offer(peer.name)
        if parent in self.parent:
            self._offer(parent)

    def remove(self, name: str) -> None:
        """Detach `name` from its source and assign no further generator to it."""
        if (parent := self.parent.pop(name, None)) is not None:
            (self.local_children if self._is_local[name] else self.remote_children)[parent] -= 1
            if parent in self.parent:
                self._offer(parent)
            self.open.pop(name, None)
            self.open_by_host.get(self._hosts[name], {}).pop(name, None)

    def _offer(self, name: str) -> None:
        """Update whether `name` has room for children."""
        local = self.open_by_host.setdefault(self._hosts[name], {})
        for nodes, children in ((self.open, self.remote_children), (local, self.local_children)):
            if children[name] < self.fan_out:
                nodes[name] = None
            else:
                nodes.pop(name, None)


class RelayTrees:
    """Every version's tree, by which the learner assigns sources.

    `beyond` counts the copies that left the learner beyond `fan_out`, because every other source
    was full or unreachable.

    >>> trees = RelayTrees(2)
    >>> version = Label(1, 7), "d"
    >>> def assign(name, host, *failed):
    ...     return trees.assign_source(version, RelayPeer(name, host, 5000, ""), failed)
    >>> assign("a", "10.0.0.1"), assign("b", "10.0.0.2")
    ('', '')
    >>> assign("c", "10.0.0.3"), assign("d", "10.0.0.2")
    ('a', 'b')

    If c gets no data from a, the learner assigns another source, which does not wait for c.

    >>> assign("c", "10.0.0.3", "a"), assign("b", "10.0.0.2", "c")
    ('b', '')
    """

    def __init__(self, fan_out: int) -> None:
        self.fan_out = fan_out
        self.relays: dict[str, RelayPeer] = {}
        self.strikes = Counter[str]()
        self.beyond = 0
        self._trees: dict[Version, _RelayTree] = {}

    def assign_source(self, version: Version, peer: RelayPeer, failed: Sequence[str] = ()) -> str:
        """Choose the source of a version for `peer`: a relay's name, or LEARNER.

        Relays on the same host come before the learner, and the learner before relays on other
        hosts. Among equals, sources nearer to the learner come first. Sources that failed recently
        come last.

        failed: names of sources that failed with this version.
        """
        tree = self._get_tree(version)
        self._register(peer)
        name, tried = peer.name, set(failed[:FAILED])
        if (previous := tree.parent.get(name)) is None:
            self.strikes[name] = self.strikes[name] // 2
        elif previous in tried and previous != LEARNER:  # only its own source counts as failed
            self.strikes[previous] = min(self.strikes[previous] + 1, STRIKES)
        tree.remove(name)
        has_room = tree.remote_children[LEARNER] < self.fan_out
        candidates = [] if len(tried) >= FAILED else self._list_candidates(tree, peer, tried)
        if has_room:
            candidates.append(((0, 1, 0), LEARNER))
        _, source = min(
            candidates, default=((0, 0, 0), LEARNER), key=lambda candidate: candidate[0]
        )
        self.beyond += source == LEARNER and not has_room
        tree.add(peer, source)
        return source

    def _list_candidates(
        self, tree: _RelayTree, peer: RelayPeer, tried: set[str]
    ) -> list[tuple[tuple[int, int, int], str]]:
        """List the relays with room as (rank, name): the lowest rank is the best.

        A rank is (failures, 0 on the peer's own host and 2 elsewhere, distance from the learner).
        """
        candidates = []
        local = tree.open_by_host.get(peer.host, {})
        for host_rank, names in ((0, local), (2, tree.open)):
            for name in islice(names, MOST_CANDIDATES):
                relay = self.relays[name]
                if name in tried or not can_connect(peer, relay):
                    continue
                if host_rank and relay.host == peer.host:
                    continue
                ancestors = tree.list_ancestors(name)
                if peer.name not in ancestors:  # otherwise the two would wait for each other
                    rank = self.strikes[name], host_rank, len(ancestors)
                    candidates.append((rank, name))
        return candidates

    def _get_tree(self, version: Version) -> _RelayTree:
        tree = self._trees.setdefault(version, _RelayTree(self.fan_out))
        while len(self._trees) > TREES:
            self._trees.pop(next(iter(self._trees)))
        return tree

    def _register(self, peer: RelayPeer) -> None:
        """Record a peer. A peer that restarted at another port has lost its versions."""
        previous = self.relays.get(peer.name)
        if previous is not None and previous != peer:
            for tree in self._trees.values():
                tree.remove(previous.name)
        self.relays[peer.name] = peer


def matches_digest(data: bytes, pieces: bytes, number: int) -> bool:
    """Whether `data` is chunk `number` of the version with these digests."""
    return hashlib.sha256(data).digest() == pieces[PIECE * number : PIECE * (number + 1)]


class ChunkDigests:
    """The chunk digests of the last few versions, computed on first request.

    read: (label, digest, offset, size), as `WeightRing.read_part`.
    size: bytes of a version. chunk: bytes of a chunk.
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
        self._digests: dict[Version, tuple[bytes, bytes]] = {}

    def compute_digests(self, label: Label, digest: str) -> tuple[str, bytes, bytes]:
        """Return (digest of the version, digests of its chunks, probe).

        digest: "" for any version with that label.
        Returns the digest "" if the ring does not have the version.
        """
        digest, _, probe = self._read(label, digest, 0, 0)
        if digest and (label, digest) not in self._digests:
            parts = list(self._hash_chunks(label, digest))
            if len(parts) * self.chunk < self.size:
                return "", b"", b""
            self._digests[label, digest] = (b"".join(parts), probe)
            while len(self._digests) > TREES:
                self._digests.pop(next(iter(self._digests)))
        return (digest, *self._digests[label, digest]) if digest else ("", b"", b"")

    def _hash_chunks(self, label: Label, digest: str) -> Iterator[bytes]:
        for offset in range(0, self.size, self.chunk):
            ring_digest, data, _ = self._read(label, digest, offset, self.chunk)
            if not ring_digest:
                return
            yield hashlib.sha256(data).digest()
