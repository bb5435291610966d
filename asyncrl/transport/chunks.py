"""Weights in chunks, for another host: the learner's ring over a socket of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash
import zmq

from asyncrl.config.tree import Config
from asyncrl.contract.errors import PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.transport.ring import Ring
from asyncrl.transport.sockets import UNDECODABLE, check_address, secure
from asyncrl.transport.ways import Server

CHUNK_BYTES = 1 << 20

_encoder = msgspec.msgpack.Encoder()


class _ChunkAsk(msgspec.Struct, frozen=True):
    """Made by a generator; read by the chunk server.  offset < 0 asks for the manifest."""

    label: Label
    digest: str
    offset: int
    size: int


class _Chunk(msgspec.Struct, frozen=True):
    digest: str  # "" when these weights are not there (any more)
    data: bytes
    checksum: int
    probe: bytes


class ChunkServer(Server):
    """Serves the learner's ring in chunks from a thread.

    A slow reader may find its version replaced: it gets an empty answer and starts over with a
    newer one.  It never blocks the writer: chunks are copied under the slot's own sequence lock by
    `read` = `Ring.read_part`."""

    def __init__(
        self,
        address: str,
        manifest: list[Any],
        read: Callable[[Label, str, int, int], tuple[str, bytes, bytes]],
        curve_dir: str = "",
    ) -> None:
        check_address(address, curve_dir, "wires.weights_address")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._guard = secure(self.socket, curve_dir, server=True)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.manifest = manifest
        self.read = read
        self.bytes_sent = 0
        self._end = False
        self.thread = threading.Thread(target=self._serve, name="chunk-server", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(_ChunkAsk)
        while not self._end:
            if not self.socket.poll(100):
                continue
            peer, *frames = self.socket.recv_multipart()
            try:
                ask = decoder.decode(frames[-1])
            except UNDECODABLE:
                continue
            if ask.offset < 0:
                digest = "manifest"
                data = msgspec.msgpack.encode(self.manifest)
                probe = b""
            else:
                digest, data, probe = self.read(
                    ask.label, ask.digest, ask.offset, min(max(ask.size, 0), CHUNK_BYTES)
                )
            self.bytes_sent += len(data)
            self.socket.send_multipart(
                [peer, _encoder.encode(_Chunk(digest, data, xxhash.xxh3_64_intdigest(data), probe))]
            )

    def close(self) -> None:
        self._end = True
        self.thread.join(2)
        if self._guard is not None:
            self._guard.stop()
        self.socket.close()
        self.context.term()


class ChunkClient:
    """Fetches versions from a ChunkServer, four chunks ahead; `bytes_received` counts what came
    over the socket.
    """

    AHEAD = 4

    def __init__(self, address: str, timeout: float, curve_dir: str = "") -> None:
        self.address = address
        self.timeout = timeout
        self.bytes_received = 0
        self.probe = b""  # of the version fetched last
        self.context = zmq.Context()
        self.curve_dir = curve_dir
        self.socket = self._connect()
        self._decoder = msgspec.msgpack.Decoder(_Chunk)

    def _connect(self) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        secure(socket, self.curve_dir, server=False)
        socket.connect(self.address)
        return socket

    def _receive(self) -> _Chunk:
        if not self.socket.poll(int(self.timeout * 1000)):
            self.socket.close()
            self.socket = self._connect()
            raise PeerUnreachable(
                f"the learner's chunk server at {self.address} has not answered for "
                f"{self.timeout:g} s; is the learner running?"
            )
        try:
            chunk: _Chunk = self._decoder.decode(self.socket.recv())
        except UNDECODABLE as error:
            raise PeerUnreachable(
                f"{self.address} does not speak this protocol: {error}"
            ) from error
        if xxhash.xxh3_64_intdigest(chunk.data) != chunk.checksum:
            raise PeerUnreachable(f"a damaged chunk of weights from {self.address}")
        self.bytes_received += len(chunk.data)
        return chunk

    def manifest(self) -> list[Any]:
        self.socket.send(_encoder.encode(_ChunkAsk(Label(0, 0), "", -1, 0)))
        return msgspec.msgpack.decode(
            self._receive().data, type=list[tuple[str, str, list[int], int, int]]
        )

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into`; returns its digest, verified over the whole, or "" when
        it is gone.
        """
        offsets = list(range(0, len(into), CHUNK_BYTES))
        got = 0
        found = digest
        asked = 0
        while got < len(offsets):
            while asked < min(len(offsets), got + self.AHEAD):
                self.socket.send(
                    _encoder.encode(
                        _ChunkAsk(
                            label,
                            digest,
                            offsets[asked],
                            min(CHUNK_BYTES, len(into) - offsets[asked]),
                        )
                    )
                )
                asked += 1
            chunk = self._receive()
            if not chunk.digest or (found and chunk.digest != found):
                for _ in range(asked - got - 1):
                    self._receive()
                return ""
            found = chunk.digest
            self.probe = chunk.probe
            into[offsets[got] : offsets[got] + len(chunk.data)] = chunk.data
            got += 1
        return found if xxhash.xxh3_64_hexdigest(into) == found else ""

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def serve(config: Config, ring: Ring) -> ChunkServer | None:
    """The learner's end, when `wires.weights_address` names one."""
    if not config.wires.weights_address:
        return None
    return ChunkServer(
        config.wires.weights_address, ring.rows, ring.read_part, config.wires.curve_dir
    )


def connect(config: Config, source: WeightsSource) -> ChunkClient:
    """A generator's end.  Raises PeerUnreachable when the learner serves no chunks."""
    if not source.address:
        raise PeerUnreachable(
            f"the learner's weights lie on host {source.host} in {source.directory}, which "
            "this host cannot read; "
            "set wires.weights_address to a tcp address of the learner"
        )
    return ChunkClient(source.address, config.wires.connect_s, config.wires.curve_dir)
