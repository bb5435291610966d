"""Weights in chunks and files for a generator on another host.

The learner serves its ring over a separate socket.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import xxhash
import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, BadMessage, PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label
from asyncrl.transport import keys, message_checks
from asyncrl.transport.file_server import FileEntry, FileServer
from asyncrl.transport.ring import WeightRing
from asyncrl.transport.sockets import UNDECODABLE, DealerSocket, ListeningSocket, receive_frames
from asyncrl.transport.weight_transport import Rows, WeightsClient, WeightsServer

CHUNK_BYTES = 1 << 20
AHEAD = 4  # chunks that a client requests ahead of the one it reads
REQUEST_BYTES = 4096  # a larger request is invalid
MANIFEST_BYTES = 64 << 20
FILES = Label(-1, 0)  # requests files instead of weights
BUFFER = Label(-2, 0)  # requests the buffer's address
BUFFER_S = 2.0  # deadline for that address
LISTING_POLL_S = 0.2
ACCEPTED = zmq.EVENT_HANDSHAKE_SUCCEEDED  # the peer accepted the connection
ANYWHERE = ("0.0.0.0", "*", "::")  # hosts to listen at, not to connect to

_encoder = msgspec.msgpack.Encoder()


class _ChunkRequest(msgspec.Struct, frozen=True):
    """A generator's request to the chunk server.

    offset: of the chunk in bytes; below 0: the layout of the weights, or the list of files.
    """

    label: tuple[int, int]
    digest: str
    offset: int
    size: int


class _ChunkReply(msgspec.Struct, frozen=True):
    """The chunk server's reply."""

    digest: str  # "" when the server does not have these weights or this file
    data: bytes
    checksum: int
    probe: bytes


def make_reply(digest: str, data: bytes, probe: bytes = b"") -> _ChunkReply:
    """Make a reply with the checksum of its data."""
    return _ChunkReply(digest, data, xxhash.xxh3_64_intdigest(data), probe)


def decode_layout(data: bytes) -> Rows:
    """Decode the rows of a manifest. Raises BadMessage or one of UNDECODABLE."""
    rows = msgspec.msgpack.decode(data, type=Rows)
    message_checks.check_weight_layout(rows)
    return rows


class ChunkServer(ListeningSocket, WeightsServer):
    """Serves the learner's ring in chunks from a thread.

    A slow reader may find its version replaced: it gets an empty reply and starts over with a newer
    one. The server never blocks the writer: `read` = `WeightRing.read_part` copies chunks under the
    slot's own sequence lock. For a client that requests without reading, at most 2 * AHEAD chunks
    wait; further chunks are dropped. Invalid requests, and requests with a key that is not a
    generator's, are counted in `refused` and get no reply.

    manifest: the layout of the flat bytes.
    read: (label, digest, offset, size) -> (digest, bytes, probe).
    files: the files for generators on other machines.
    """

    def __init__(
        self,
        address: str,
        manifest: list[Any],
        read: Callable[[Label, str, int, int], tuple[str, bytes, bytes]],
        curve_dir: str = "",
        files: FileServer | None = None,
    ) -> None:
        super().__init__(
            address,
            curve_dir,
            "wires.weights_address",
            most=REQUEST_BYTES,
            linger=0,
            queued=2 * AHEAD,
            unread=64 * AHEAD,
        )
        self.manifest = manifest
        self.read = read
        self.files = files
        self.answered = self.refused = 0
        self.buffer: Callable[[], str] = lambda: ""  # the buffer's address, if it has moved
        self._end = False
        self._decoder = msgspec.msgpack.Decoder(_ChunkRequest)
        self.thread = threading.Thread(target=self._serve, name="chunk-server", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while not self._end:
            try:
                # also true while the address is still unbound
                is_closing = self.connections.close_excess(self.address)
            except AsyncrlError as error:
                print(escape_line(str(error)), file=sys.stderr)
                continue
            if is_closing or not self.socket.poll(100):
                continue
            peer, *frames = receive_frames(self.socket, REQUEST_BYTES, 2)
            if (reply := self._make_reply(frames)) is None:
                self.refused += 1
                continue
            try:
                self.socket.send_multipart([peer.bytes, _encoder.encode(reply)], zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # the peer has disconnected or does not read
            self.answered += 1

    def _make_reply(self, frames: list[zmq.Frame]) -> _ChunkReply | None:
        """Make the reply to a request, or None to ignore it."""
        if len(frames) != 1:
            return None
        if self._guard is not None and not keys.GENERATOR.fullmatch(
            self._guard.get_name(frames[0])
        ):
            return None
        try:
            request = self._decoder.decode(frames[0].buffer)
            size = min(max(request.size, 0), CHUNK_BYTES)
            if request.label == FILES:
                return self._read_file(request, size)
            if request.label == BUFFER:
                return make_reply(self.buffer(), b"")
            if request.offset < 0:
                return make_reply("manifest", msgspec.msgpack.encode(self.manifest))
            digest, data, probe = self.read(
                Label(*request.label), request.digest, request.offset, size
            )
        except UNDECODABLE:  # also a ring that is being closed
            return None
        return make_reply(digest, data, probe)

    def _read_file(self, request: _ChunkRequest, size: int) -> _ChunkReply | None:
        """Return the list of files, empty while it is computed, or bytes of one of them."""
        if self.files is None:
            return None
        if request.offset < 0:
            entries = self.files.list_files()
            data = b"" if entries is None else msgspec.msgpack.encode(entries)
            status = self.files.error if entries is None else "files"
        else:
            try:
                data = self.files.read(request.digest, request.offset, size)
            except OSError:
                data = b""
            status = request.digest
        return make_reply(status, data)

    def close(self) -> None:
        """Stop the thread and close the socket."""
        self._end = True
        self.thread.join()  # closing a socket that another thread uses aborts the process
        super().close()


class ChunkClient(DealerSocket, WeightsClient):
    """Fetches versions from a ChunkServer, AHEAD chunks in flight.

    `bytes_received` counts bytes over the socket.

    timeout: seconds without a reply after which the server is unreachable.
    """

    options = ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MANIFEST_BYTES))

    def __init__(
        self, address: str, timeout: float, curve_dir: str = "", name: str = "generator-0"
    ) -> None:
        self.timeout = timeout
        # (label, digest, chunks in the caller's memory) of a fetch that a broken connection ended
        self._begun: tuple[Label, str, int] | None = None
        super().__init__(address, curve_dir, name, _ChunkReply)

    def make_socket(self) -> Any:
        """Make a socket whose connections are watched from the first one on."""
        socket = super().make_socket()
        self._events = socket.get_monitor_socket(ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._accepted = False
        return socket

    def _receive(self) -> _ChunkReply:
        """Receive a reply. Raises PeerUnreachable without a valid one before the timeout.

        It does so at once when the connection of the requests was cut: their replies will not
        arrive, and a retry uses a new connection.
        """
        until = time.monotonic() + self.timeout
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while (remaining_s := until - time.monotonic()) > 0:
            ready = dict(poller.poll(int(remaining_s * 1000) + 1))
            if self.socket in ready:
                break
            while self._events in ready and self._events.poll(0):
                event = parse_monitor_message(self._events.recv_multipart())["event"]
                if event == zmq.EVENT_DISCONNECTED and self._accepted:
                    self.reconnect()
                    raise PeerUnreachable(f"the connection to {self.address} was cut")
                self._accepted |= event == ACCEPTED
        else:
            self.reconnect()
            raise PeerUnreachable(
                f"the learner's chunk server at {self.address} has not answered for "
                f"{self.timeout:g} s; is the learner running?"
            )
        try:
            chunk: _ChunkReply = self.read(receive_frames(self.socket, MANIFEST_BYTES, 1))
        except (*UNDECODABLE, BadMessage) as error:
            self.reconnect()  # later replies would belong to earlier requests
            raise PeerUnreachable(
                f"{self.address} does not speak this protocol: {error}"
            ) from error
        self.bytes_received += len(chunk.data)
        return chunk

    def check(self, chunk: _ChunkReply) -> None:
        """Check a reply. Raises BadMessage."""
        if xxhash.xxh3_64_intdigest(chunk.data) != chunk.checksum:
            raise BadMessage("a damaged chunk of weights")
        if len(chunk.probe) > message_checks.PROBE_BYTES or len(chunk.probe) % 4:
            raise BadMessage(f"a probe of {len(chunk.probe)} bytes")

    def fetch_layout(self) -> list[Any]:
        """Fetch the layout of the flat bytes. Raises PeerUnreachable."""
        self.socket.send(_encoder.encode(_ChunkRequest(Label(0, 0), "", -1, 0)))
        try:
            return decode_layout(self._receive().data)
        except (*UNDECODABLE, BadMessage) as error:
            raise PeerUnreachable(f"{self.address} has no layout of weights: {error}") from error

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into` and return its verified digest.

        Returns "" when the server no longer has the version. After a PeerUnreachable, a second call
        with the same version and the same `into` continues behind the chunks that have arrived. The
        digest over all bytes shows whether that was right.
        """
        chunk_count = 0
        if self._begun is not None:
            begun_label, begun_digest, chunks = self._begun
            if digest and (begun_label, begun_digest) == (label, digest):
                chunk_count = chunks
            self.reconnect()
        self._begun = (label, digest, chunk_count)
        received_digest = digest
        for chunk in self.fetch_chunks(label, digest, chunk_count * CHUNK_BYTES, len(into)):
            if not chunk.data:
                self._begun = None
                return ""
            received_digest = chunk.digest
            self.probe = chunk.probe
            into[chunk_count * CHUNK_BYTES : (chunk_count + 1) * CHUNK_BYTES] = chunk.data
            chunk_count += 1
            self._begun = (label, digest, chunk_count)
        self._begun = None
        return received_digest if xxhash.xxh3_64_hexdigest(into) == received_digest else ""

    def fetch_chunks(
        self, label: Label, digest: str, begin: int, size: int
    ) -> Iterator[_ChunkReply]:
        """Yield the chunks of a version from byte `begin` to `size`, AHEAD in flight.

        The last chunk is empty when the server does not have it, or has other weights.
        """
        offsets = range(begin, size, CHUNK_BYTES)
        for number in range(len(offsets)):
            for offset in (
                offsets[number + AHEAD - 1 : number + AHEAD] if number else offsets[:AHEAD]
            ):
                chunk_size = min(CHUNK_BYTES, size - offset)
                self.socket.send(_encoder.encode(_ChunkRequest(label, digest, offset, chunk_size)))
            chunk = self._receive()
            has_version = bool(chunk.digest) and chunk.digest == (digest or chunk.digest)
            if not has_version or len(chunk.data) != min(CHUNK_BYTES, size - offsets[number]):
                for _ in offsets[number + 1 : number + AHEAD]:
                    self._receive()
                yield make_reply("", b"")
                return
            digest = chunk.digest
            yield chunk

    # ---- files -----------------------------------------------------------------------------------

    def list_files(self) -> list[FileEntry]:
        """List the files that a generator of the run needs.

        Raises PeerUnreachable, also when the learner's machine cannot read them.
        """
        while True:
            self.socket.send(_encoder.encode(_ChunkRequest(FILES, "", -1, 0)))
            chunk = self._receive()
            if chunk.data:
                return msgspec.msgpack.decode(chunk.data, type=list[FileEntry])
            if chunk.digest:
                raise PeerUnreachable(
                    f"the learner at {self.address} cannot read its files: {chunk.digest}"
                )
            time.sleep(LISTING_POLL_S)  # a large model's digest is being computed

    def read_file(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
        """Yield the bytes of a file from `begin` to `size`, in order.

        Raises PeerUnreachable, also when the server does not serve the file."""
        for chunk in self.fetch_chunks(FILES, digest, begin, size):
            if not chunk.data:
                self.reconnect()
                raise PeerUnreachable(f"{self.address} does not serve the file {digest[:12]}")
            yield chunk.data

    def close_socket(self, linger: int | None = None) -> None:
        """Close the socket and the one that watches it."""
        self.socket.disable_monitor()
        self._events.close(0)
        super().close_socket(linger)


def reachable_address(address: str, buffer: str) -> str:
    """Return the address at which to connect to a server that listens at `address`.

    A server that listens at every host has the buffer's host.

    >>> reachable_address("tcp://0.0.0.0:5556", "tcp://10.0.0.1:5555")
    'tcp://10.0.0.1:5556'
    >>> reachable_address("tcp://10.0.0.2:5556", "tcp://10.0.0.1:5555")
    'tcp://10.0.0.2:5556'
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host.strip("[]") not in ANYWHERE:
        return address
    buffer_host = urlsplit(buffer).netloc.rpartition("@")[2].rpartition(":")[0]
    return f"tcp://{buffer_host}:{port}" if buffer_host else address


def find_buffer(config: Config, source: WeightsSource, name: str) -> str:
    """Request the buffer's current address from the learner.

    Returns "" if it is the configured address or the learner does not reply.
    """
    address = reachable_address(source.address, config.wires.address)
    client = ChunkClient(address, BUFFER_S, config.wires.curve_dir, name)
    try:
        client.socket.send(_encoder.encode(_ChunkRequest(BUFFER, "", 0, 0)))
        return client._receive().digest  # "": it has not moved
    except PeerUnreachable:
        return ""
    finally:
        client.close()


# ---- the transport `tcp` -------------------------------------------------------------------------


def serve(config: Config, ring: WeightRing) -> ChunkServer | None:
    """Start the learner's chunk server, if `wires.weights_address` is set."""
    if not config.wires.weights_address:
        return None
    return ChunkServer(
        config.wires.weights_address,
        ring.rows,
        ring.read_part,
        config.wires.curve_dir,
        FileServer(config),
    )


def connect(config: Config, source: WeightsSource, name: str) -> WeightsClient:
    """Connect generator `name` to the learner's chunk server.

    Raises PeerUnreachable when the learner serves no chunks."""
    if not source.address:
        raise PeerUnreachable(
            f"the learner's weights are on host {source.host} in {source.directory}, which this "
            "host cannot read; set wires.weights_address to a tcp address of the learner"
        )
    address = reachable_address(source.address, config.wires.address)
    return ChunkClient(address, config.wires.connect_s, config.wires.curve_dir, name)
