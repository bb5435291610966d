"""A generator that passes weights on to others, under `weights.fan_out`.

asyncrl/transport/fan_out.py assigns the sources. Every chunk is checked against the SHA-256 from
the learner before it is used or passed on.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import xxhash

from asyncrl.contract.errors import ConfigError, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.transport import fan_out, keys
from asyncrl.transport.chunks import CHUNK_BYTES, ChunkClient, ChunkServer, VersionPending
from asyncrl.transport.ring import Rows

KEPT = 2  # versions: the newest, and the previous one for peers that still fetch it
SILENT_S = 5.0  # a relay silent for so long is replaced
STARVED_S = 15.0  # so is one that answers without data: its own source may be unreachable


class _PartialVersion:
    """The received part of a version.

    The fetching thread writes behind `bytes_there`, the serving thread reads before it.
    """

    def __init__(self, size: int, probe: bytes) -> None:
        self.data = bytearray(size)
        self.bytes_there = 0
        self.probe = probe


class RelayCache:
    """The versions that this generator can pass on: only checked bytes."""

    def __init__(self) -> None:
        self._held: dict[fan_out.Version, _PartialVersion] = {}

    def begin_version(self, version: fan_out.Version, size: int, probe: bytes) -> _PartialVersion:
        """Make room for a version or continue it; keep only the newest of the others."""
        partial = self._held.get(version) or _PartialVersion(size, probe)
        others = sorted(key for key in self._held if key != version)[1 - KEPT :]
        self._held = {key: self._held[key] for key in others} | {version: partial}
        return partial

    def forget(self, version: fan_out.Version) -> None:
        self._held = {key: partial for key, partial in self._held.items() if key != version}

    def read(self, label: Label, digest: str, offset: int, size: int) -> tuple[str, bytes, bytes]:
        """Read as `WeightRing.read_part`. Raises VersionPending for missing bytes."""
        partial = self._held.get((label, digest))
        if partial is None:
            raise VersionPending("")
        end = min(offset + size, len(partial.data))
        if partial.bytes_there < end:
            raise VersionPending(digest)
        return digest, bytes(partial.data[offset:end]), partial.probe


class RelayClient:
    """A generator's end: fetches versions from assigned sources and passes them on.

    A relay that is silent, has nothing, or sends wrong bytes is abandoned, and the learner assigns
    another source; the received part stays. bytes_received counts bytes from all sources, `left`
    the abandoned relays.
    """

    def __init__(
        self,
        learner: str,
        timeout: float,
        curve_dir: str = "",
        name: str = "generator-0",
    ) -> None:
        self.learner = ChunkClient(learner, timeout, curve_dir, name)
        self.curve_dir = curve_dir
        self.name = name
        self.silent_s = SILENT_S
        self.starved_s = STARVED_S
        self.probe = b""
        self.bytes_received = self.left = 0
        self.shelf = RelayCache()
        self.door: keys.RelayAuthenticator | None = None
        self.server = self._open()
        self._relay: tuple[fan_out.RelayAssignment, ChunkClient] | None = None
        # checked chunks of an unfinished fetch, in the caller's memory
        self._begun: tuple[fan_out.Version, int] | None = None

    def _open(self) -> ChunkServer | None:
        """Open the server for other generators; None when it cannot listen.

        Without a server this generator passes nothing on.
        """

        def door(socket: Any, curve_dir: str) -> keys.KeyAuthenticator | None:
            self.door = keys.RelayAuthenticator(socket) if curve_dir else None
            return self.door

        address = "tcp://*:*" if self.curve_dir else "tcp://127.0.0.1:*"
        try:
            return ChunkServer(address, [], self.shelf.read, self.curve_dir, None, door)
        except (ConfigError, OSError) as error:
            print(f"{self.name} passes no weights on: {error}", file=sys.stderr, flush=True)
            return None

    def manifest(self) -> Rows:
        return self.learner.manifest()

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into` and return its verified digest.

        Returns "" when the version is gone. Continues an unfinished fetch, as `ChunkClient.fetch`
        does. Raises PeerUnreachable when the learner does not answer.
        """
        failed: list[str] = []
        while (assignment := self._request_source(label, digest, failed)) is not None:
            version = label, assignment.digest
            if len(assignment.pieces) != fan_out.PIECE * -(-len(into) // CHUNK_BYTES):
                raise PeerUnreachable(f"{self.learner.address} has weights of another size")
            continues = self._begun is not None and self._begun[0] == version
            chunk_count = self._begun[1] if self._begun is not None and continues else 0
            digest, self.probe, self._begun = (
                assignment.digest,
                assignment.probe,
                (version, chunk_count),
            )
            partial = self.shelf.begin_version(version, len(into), assignment.probe)
            chunk_count = self._from(assignment, version, into, partial)
            if chunk_count * CHUNK_BYTES >= len(into):
                self._begun = None
                if xxhash.xxh3_64_hexdigest(into) == digest:
                    return digest
                self.shelf.forget(version)
                return ""
            if assignment.name == fan_out.LEARNER:
                break  # the learner has dropped the version
            self._disconnect()
            failed.append(assignment.name)
        self._begun = None
        return ""

    def _request_source(
        self, label: Label, digest: str, failed: list[str]
    ) -> fan_out.RelayAssignment | None:
        port = 0 if self.server is None else int(self.server.address.rpartition(":")[2])
        key = "" if self.door is None else self.door.key
        guests = self.door is not None and not self.door.names
        asking = fan_out.RelayRequest(self.name, port, key, failed, guests)
        assignment = self.learner.request_source(label, digest, asking)
        if assignment is not None and self.door is not None and guests:
            self.door.allow_peers(assignment.guests)
        return assignment

    def _from(
        self,
        assignment: fan_out.RelayAssignment,
        version: fan_out.Version,
        into: memoryview,
        partial: _PartialVersion,
    ) -> int:
        """Fetch chunks from one source; return how many are in `into` when it stops.

        Raises PeerUnreachable when the learner does not answer.
        """
        assert self._begun is not None
        chunk_count = self._begun[1]
        learner = assignment.name == fan_out.LEARNER
        starved = time.monotonic() + self.starved_s
        try:
            source = self.learner if learner else self._connected(assignment)
            while chunk_count * CHUNK_BYTES < len(into) and (learner or time.monotonic() < starved):
                for chunk in source.fetch_chunks(*version, chunk_count * CHUNK_BYTES, len(into)):
                    if not chunk.data:
                        break
                    self.bytes_received += len(chunk.data)
                    if not fan_out.matches_digest(chunk.data, assignment.pieces, chunk_count):
                        source.reconnect()
                        return chunk_count
                    self._store_chunk(chunk.data, chunk_count, into, partial)
                    chunk_count += 1
                    self._begun = (version, chunk_count)
                    starved = time.monotonic() + self.starved_s
                else:
                    continue
                if not chunk.digest:
                    return chunk_count
        except (PeerUnreachable, ConfigError):
            if learner:
                raise
        return chunk_count

    def _store_chunk(
        self, data: bytes, number: int, into: memoryview, partial: _PartialVersion
    ) -> None:
        """Store a checked chunk, to be used and to be passed on."""
        begin = number * CHUNK_BYTES
        into[begin : begin + len(data)] = data
        if partial.bytes_there < begin:  # earlier chunks came before the cache had this version
            partial.data[:begin] = into[:begin]
        partial.data[begin : begin + len(data)] = data
        partial.bytes_there = max(partial.bytes_there, begin + len(data))

    def _connected(self, assignment: fan_out.RelayAssignment) -> ChunkClient:
        """Return the connection to the assigned relay, opening it if necessary."""
        if self._relay is not None:
            previous, client = self._relay
            if (previous.name, previous.address, previous.key) == (
                assignment.name,
                assignment.address,
                assignment.key,
            ):
                return client
            self._close_relay()
        client = ChunkClient(
            assignment.address, self.silent_s, self.curve_dir, self.name, server_key=assignment.key
        )
        self._relay = assignment, client
        return client

    def _disconnect(self) -> None:
        self.left += 1
        self._close_relay()

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay[1].close()
        self._relay = None

    def close(self) -> None:
        self._close_relay()
        if self.server is not None:
            self.server.close()
        self.learner.close()
