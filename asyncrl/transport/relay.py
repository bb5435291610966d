"""A generator that hands weights on, where `weights.fan_out` says that the learner's uplink carries
few copies.  asyncrl/transport/fan_out.py says who gets them from whom.

Nothing is used or handed on before its SHA-256 is what the learner said, chunk by chunk."""

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

KEPT = 2  # versions: the newest, and the one before it for those that are not done with it
SILENT_S = 5.0  # of a relay, until another is asked for
STARVED_S = 15.0  # of a relay that answers, and has nothing: the one above it may have gone


class _PartialVersion:
    """A version as far as it has come.  The fetching thread writes behind `bytes_there`, the
    serving one reads before it.
    """

    def __init__(self, size: int, probe: bytes) -> None:
        self.data = bytearray(size)
        self.bytes_there = 0
        self.probe = probe


class RelayCache:
    """The versions that this generator can hand on: checked bytes alone."""

    def __init__(self) -> None:
        self._held: dict[fan_out.Version, _PartialVersion] = {}

    def begin_version(self, version: fan_out.Version, size: int, probe: bytes) -> _PartialVersion:
        """Make room for a version, or go on with it; of the others the newest ones stay."""
        held = self._held.get(version) or _PartialVersion(size, probe)
        others = sorted(key for key in self._held if key != version)[1 - KEPT :]
        self._held = {key: self._held[key] for key in others} | {version: held}
        return held

    def forget(self, version: fan_out.Version) -> None:
        self._held = {key: held for key, held in self._held.items() if key != version}

    def read(self, label: Label, digest: str, offset: int, size: int) -> tuple[str, bytes, bytes]:
        """As `WeightRing.read_part`.  Raises NotYet for what has not come."""
        held = self._held.get((label, digest))
        if held is None:
            raise VersionPending("")
        end = min(offset + size, len(held.data))
        if held.bytes_there < end:
            raise VersionPending(digest)
        return digest, bytes(held.data[offset:end]), held.probe


class RelayClient:
    """A generator's end: gets versions from where the learner says, and hands them on.

    A relay that is silent, starved, or gives wrong bytes is left, and the learner asked for another
    place; what has come stays.  bytes_received counts what came from anybody; `left` those that
    were left."""

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
        # checked chunks of a fetch that was not ended, in the caller's memory
        self._begun: tuple[fan_out.Version, int] | None = None

    def _open(self) -> ChunkServer | None:
        """Where others get chunks from this one; None where it cannot listen: then it hands on
        nothing.
        """

        def door(socket: Any, curve_dir: str) -> keys.KeyAuthenticator | None:
            self.door = keys.RelayAuthenticator(socket) if curve_dir else None
            return self.door

        address = "tcp://*:*" if self.curve_dir else "tcp://127.0.0.1:*"
        try:
            return ChunkServer(address, [], self.shelf.read, self.curve_dir, None, door)
        except (ConfigError, OSError) as error:
            print(f"{self.name} hands no weights on: {error}", file=sys.stderr, flush=True)
            return None

    def manifest(self) -> Rows:
        return self.learner.manifest()

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into`; returns its digest, verified over the whole, or "" when
        it is gone.  Goes on behind what has come, as `ChunkClient.fetch` does.

        Raises PeerUnreachable when the learner does not answer."""
        failed: list[str] = []
        while (placed := self._request_source(label, digest, failed)) is not None:
            version = label, placed.digest
            if len(placed.pieces) != fan_out.PIECE * -(-len(into) // CHUNK_BYTES):
                raise PeerUnreachable(f"{self.learner.address} tells of weights of another size")
            goes_on = self._begun is not None and self._begun[0] == version
            got = self._begun[1] if self._begun is not None and goes_on else 0
            digest, self.probe, self._begun = placed.digest, placed.probe, (version, got)
            held = self.shelf.begin_version(version, len(into), placed.probe)
            got = self._from(placed, version, into, held)
            if got * CHUNK_BYTES >= len(into):
                self._begun = None
                if xxhash.xxh3_64_hexdigest(into) == digest:
                    return digest
                self.shelf.forget(version)
                return ""
            if placed.name == fan_out.LEARNER:
                break  # it has no more of it
            self._disconnect()
            failed.append(placed.name)
        self._begun = None
        return ""

    def _request_source(
        self, label: Label, digest: str, failed: list[str]
    ) -> fan_out.RelayAssignment | None:
        port = 0 if self.server is None else int(self.server.address.rpartition(":")[2])
        key = "" if self.door is None else self.door.key
        guests = self.door is not None and not self.door.names
        asking = fan_out.RelayRequest(self.name, port, key, failed, guests)
        placed = self.learner.request_source(label, digest, asking)
        if placed is not None and self.door is not None and guests:
            self.door.allow_peers(placed.guests)
        return placed

    def _from(
        self,
        placed: fan_out.RelayAssignment,
        version: fan_out.Version,
        into: memoryview,
        held: _PartialVersion,
    ) -> int:
        """Chunks that are in `into` when the place has given what it gives.  Raises PeerUnreachable
        when the learner does not answer.
        """
        assert self._begun is not None
        got = self._begun[1]
        learner = placed.name == fan_out.LEARNER
        starved = time.monotonic() + self.starved_s
        try:
            source = self.learner if learner else self._connected(placed)
            while got * CHUNK_BYTES < len(into) and (learner or time.monotonic() < starved):
                for chunk in source.fetch_chunks(*version, got * CHUNK_BYTES, len(into)):
                    if not chunk.data:
                        break
                    self.bytes_received += len(chunk.data)
                    if not fan_out.matches_digest(chunk.data, placed.pieces, got):
                        source.reconnect()
                        return got
                    self._store_chunk(chunk.data, got, into, held)
                    got += 1
                    self._begun = (version, got)
                    starved = time.monotonic() + self.starved_s
                else:
                    continue
                if not chunk.digest:
                    return got
        except (PeerUnreachable, ConfigError):
            if learner:
                raise
        return got

    def _store_chunk(
        self, data: bytes, number: int, into: memoryview, held: _PartialVersion
    ) -> None:
        """A checked chunk, to be used and to be handed on."""
        begin = number * CHUNK_BYTES
        into[begin : begin + len(data)] = data
        if held.bytes_there < begin:  # what had come before it was on the shelf
            held.data[:begin] = into[:begin]
        held.data[begin : begin + len(data)] = data
        held.bytes_there = max(held.bytes_there, begin + len(data))

    def _connected(self, placed: fan_out.RelayAssignment) -> ChunkClient:
        """To the relay that was named: the connection that is there, or a new one."""
        if self._relay is not None:
            before, client = self._relay
            if (before.name, before.address, before.key) == (
                placed.name,
                placed.address,
                placed.key,
            ):
                return client
            self._close_relay()
        client = ChunkClient(
            placed.address, self.silent_s, self.curve_dir, self.name, server_key=placed.key
        )
        self._relay = placed, client
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
