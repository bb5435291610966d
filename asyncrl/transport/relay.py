"""A generator that forwards weights to other generators, under `weights.fan_out`.

asyncrl/transport/fan_out.py assigns the sources. Every chunk is checked against the SHA-256 from
the learner before the generator uses or forwards it.
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
SILENT_S = 5.0  # seconds after which a silent relay is replaced
# seconds after which a relay without data is replaced: its own source may be unreachable
STARVED_S = 15.0


class _PartialVersion:
    """The received part of a version.

    The fetching thread writes behind `received`, the serving thread reads before it.
    """

    def __init__(self, size: int, probe: bytes) -> None:
        self.data = bytearray(size)
        self.received = 0
        self.probe = probe


class RelayCache:
    """The versions that this generator can forward: only checked bytes."""

    def __init__(self) -> None:
        self._versions: dict[fan_out.Version, _PartialVersion] = {}

    def begin_version(self, version: fan_out.Version, size: int, probe: bytes) -> _PartialVersion:
        """Make room for a version or continue it; keep only the newest other versions."""
        partial = self._versions.get(version) or _PartialVersion(size, probe)
        others = sorted(key for key in self._versions if key != version)[1 - KEPT :]
        self._versions = {key: self._versions[key] for key in others} | {version: partial}
        return partial

    def forget(self, version: fan_out.Version) -> None:
        """Drop a version."""
        self._versions = {key: partial for key, partial in self._versions.items() if key != version}

    def read(self, label: Label, digest: str, offset: int, size: int) -> tuple[str, bytes, bytes]:
        """Read as `WeightRing.read_part`. Raises VersionPending for missing bytes."""
        partial = self._versions.get((label, digest))
        if partial is None:
            raise VersionPending("")
        end = min(offset + size, len(partial.data))
        if partial.received < end:
            raise VersionPending(digest)
        return digest, bytes(partial.data[offset:end]), partial.probe


class RelayClient:
    """A generator's end: fetches versions from assigned sources and forwards them.

    A relay that is silent, has no data, or sends wrong bytes is abandoned, and the learner assigns
    another source; the received part stays. `bytes_received` counts bytes from all sources,
    `abandoned` the abandoned relays.

    learner: address of the learner's chunk server. The other arguments are those of `ChunkClient`.
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
        self.bytes_received = self.abandoned = 0
        self.cache = RelayCache()
        self.authenticator: keys.RelayAuthenticator | None = None
        self.server = self._start_server()
        self._relay: tuple[fan_out.RelayAssignment, ChunkClient] | None = None
        # checked chunks of an unfinished fetch, in the caller's memory
        self._begun: tuple[fan_out.Version, int] | None = None

    def _start_server(self) -> ChunkServer | None:
        """Start the server for other generators; None when it cannot listen.

        Without a server this generator forwards no weights.
        """

        def guard(socket: Any, curve_dir: str) -> keys.KeyAuthenticator | None:
            self.authenticator = keys.RelayAuthenticator(socket) if curve_dir else None
            return self.authenticator

        address = "tcp://*:*" if self.curve_dir else "tcp://127.0.0.1:*"
        try:
            return ChunkServer(address, [], self.cache.read, self.curve_dir, None, guard)
        except (ConfigError, OSError) as error:
            print(f"{self.name} forwards no weights: {error}", file=sys.stderr, flush=True)
            return None

    def fetch_layout(self) -> Rows:
        """Fetch the layout of the flat bytes from the learner. Raises PeerUnreachable."""
        return self.learner.fetch_layout()

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into` and return its verified digest.

        Returns "" when the learner no longer has the version. Continues an unfinished fetch, as
        `ChunkClient.fetch` does. Raises PeerUnreachable when the learner does not reply.
        """
        failed: list[str] = []
        while (assignment := self._request_source(label, digest, failed)) is not None:
            version = label, assignment.digest
            if len(assignment.pieces) != fan_out.PIECE * -(-len(into) // CHUNK_BYTES):
                raise PeerUnreachable(f"{self.learner.address} has weights of another size")
            if self._begun is None or self._begun[0] != version:
                self._begun = (version, 0)
            digest = assignment.digest
            self.probe = assignment.probe
            partial = self.cache.begin_version(version, len(into), assignment.probe)
            chunk_count = self._fetch_from(assignment, version, into, partial)
            if chunk_count * CHUNK_BYTES >= len(into):
                self._begun = None
                if xxhash.xxh3_64_hexdigest(into) == digest:
                    return digest
                self.cache.forget(version)
                return ""
            if assignment.name == fan_out.LEARNER:
                break  # the learner has dropped the version
            self.abandoned += 1
            self._close_relay()
            failed.append(assignment.name)
        self._begun = None
        return ""

    def _request_source(
        self, label: Label, digest: str, failed: list[str]
    ) -> fan_out.RelayAssignment | None:
        port = 0 if self.server is None else int(self.server.address.rpartition(":")[2])
        key = "" if self.authenticator is None else self.authenticator.key
        needs_peers = self.authenticator is not None and not self.authenticator.names
        request = fan_out.RelayRequest(self.name, port, key, failed, needs_peers)
        assignment = self.learner.request_source(label, digest, request)
        if assignment is not None and self.authenticator is not None and needs_peers:
            self.authenticator.allow_peers(assignment.guests)
        return assignment

    def _fetch_from(
        self,
        assignment: fan_out.RelayAssignment,
        version: fan_out.Version,
        into: memoryview,
        partial: _PartialVersion,
    ) -> int:
        """Fetch chunks from one source; return the number of chunks in `into` at its end.

        Raises PeerUnreachable when the learner does not reply.
        """
        assert self._begun is not None
        chunk_count = self._begun[1]
        is_learner = assignment.name == fan_out.LEARNER
        deadline = time.monotonic() + self.starved_s
        try:
            source = self.learner if is_learner else self._connect_relay(assignment)
            while chunk_count * CHUNK_BYTES < len(into) and (
                is_learner or time.monotonic() < deadline
            ):
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
                    deadline = time.monotonic() + self.starved_s
                else:
                    continue
                if not chunk.digest:
                    return chunk_count
        except (PeerUnreachable, ConfigError):
            if is_learner:
                raise
        return chunk_count

    def _store_chunk(
        self, data: bytes, number: int, into: memoryview, partial: _PartialVersion
    ) -> None:
        """Store a checked chunk for use and for forwarding."""
        begin = number * CHUNK_BYTES
        into[begin : begin + len(data)] = data
        if partial.received < begin:  # earlier chunks came before the cache had this version
            partial.data[:begin] = into[:begin]
        partial.data[begin : begin + len(data)] = data
        partial.received = max(partial.received, begin + len(data))

    def _connect_relay(self, assignment: fan_out.RelayAssignment) -> ChunkClient:
        """Return the connection to the assigned relay; open it if necessary."""
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

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay[1].close()
        self._relay = None

    def close(self) -> None:
        """Close all connections and the server."""
        self._close_relay()
        if self.server is not None:
            self.server.close()
        self.learner.close()
