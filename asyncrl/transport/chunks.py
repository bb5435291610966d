"""Weights in chunks, for another host: the learner's ring over a socket of its own; and the files
that a generator there needs to join.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import xxhash
import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, BadMessage, ConfigError, PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label
from asyncrl.transport import fan_out, keys, message_checks
from asyncrl.transport.connection_guard import ConnectionGuard
from asyncrl.transport.file_server import FileEntry, FileServer
from asyncrl.transport.ring import Rows, WeightRing
from asyncrl.transport.sockets import (
    HEARTBEAT_MS,
    SILENT_MS,
    UNDECODABLE,
    check_address,
    receive_frames,
)
from asyncrl.transport.weight_transport import WeightsClient, WeightsServer

CHUNK_BYTES = 1 << 20
AHEAD = 4  # chunks that a client asks for before it has read the first of them
ASK_BYTES = 4096  # a larger ask is none
MANIFEST_BYTES = 64 << 20
FILES = Label(-1, 0)  # asks for this are for files, not for weights
BUFFER = Label(-2, 0)  # and for this, where the buffer is
BUFFER_S = 2.0  # for the answer: who asks has other things to do
LISTING_POLL_S = 0.2
HEARD_FROM = zmq.EVENT_HANDSHAKE_SUCCEEDED  # a peer that may be spoken with
ANYWHERE = ("0.0.0.0", "*", "::")  # hosts to listen at, and to connect to nowhere

YET_S = 1.0  # what is not there yet is waited for so long before it is said
YET_POLL_MS = 2
CLOSING_S = 60.0  # for the serving thread to end; on a busy machine it may wait for a core so long
MOST_WAITING = 4096  # asks; further ones are not answered
NOTHING = xxhash.xxh3_64_intdigest(b"")

_encoder = msgspec.msgpack.Encoder()


class VersionPending(Exception):
    """A part of a version that is still on its way here.  digest: of the version, "" when nothing
    of it has come.
    """

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest


class _WaitingRequest(NamedTuple):
    peer: bytes
    frames: list[zmq.Frame]
    until: float  # CLOCK_MONOTONIC seconds


class _ChunkRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Made by a generator; read by the chunk server.  offset < 0 asks for the manifest, or the list
    of files.  place: for its place in the tree of `label`, `fan_out.RelayAssignment`.
    """

    label: Label
    digest: str
    offset: int
    size: int
    place: fan_out.RelayRequest | None = None


class _ChunkReply(msgspec.Struct, frozen=True):
    digest: str  # "" when these weights, or this file, are not there (any more)
    data: bytes  # empty, of a relay: it has not come there yet
    checksum: int
    probe: bytes


def layout(data: bytes) -> Rows:
    """The rows of a manifest.  Raises BadMessage or one of UNDECODABLE."""
    found = msgspec.msgpack.decode(data, type=Rows)
    message_checks.check_weight_layout(found)
    return found


class ChunkServer(WeightsServer):
    """Serves the learner's ring in chunks from a thread.

    A slow reader may find its version replaced: it gets an empty answer and starts over with a
    newer one.  It never blocks the writer: chunks are copied under the slot's own sequence lock by
    `read` = `WeightRing.read_part`.  For one that asks and does not read, 2 * AHEAD chunks wait,
    no more;
    further ones are dropped.  What is no ask, or comes with a key that is no generator's, is
    counted in `refused` and not answered.

    guard: who is let in, made of the socket.  `read` may raise `VersionPending`: what was asked
    for waits
    up to YET_S, then the answer is empty."""

    def __init__(
        self,
        address: str,
        manifest: list[Any],
        read: Callable[[Label, str, int, int], tuple[str, bytes, bytes]],
        curve_dir: str = "",
        library: FileServer | None = None,
        guard: Callable[[Any, str], keys.KeyAuthenticator | None] = keys.guard,
    ) -> None:
        check_address(address, curve_dir, "wires.weights_address")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 2 * AHEAD)
        self.socket.setsockopt(zmq.RCVHWM, 64 * AHEAD)
        self.socket.setsockopt(zmq.MAXMSGSIZE, ASK_BYTES)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        self._guard = guard(self.socket, curve_dir)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"wires.weights_address: cannot listen on {address}: {error}; is another run using "
                "it?"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.crowd = ConnectionGuard(self.socket)
        self.manifest = manifest
        self.read = read
        self.library = library
        self.bytes_sent = 0
        self.answered = self.refused = 0
        self.trees: fan_out.RelayTrees | None = None
        self.pieces: fan_out.ChunkDigests | None = None
        self.buffer: Callable[[], str] = lambda: ""  # where it is, when it is not where it was
        self._waiting: list[_WaitingRequest] = []  # in the order in which they came
        self._end = False
        self._decoder = msgspec.msgpack.Decoder(_ChunkRequest)
        self.thread = threading.Thread(target=self._serve, name="chunk-server", daemon=True)
        self.thread.start()

    def plant(self, copies: int, size: int) -> None:
        """From now on answer, too, who gives versions of `size` bytes to whom, so that so many
        copies leave from here.  The first to ask for a version waits, with all behind it, while its
        chunks' SHA-256 are computed: about a second for a GB.
        """
        self.pieces = fan_out.ChunkDigests(self.read, size, CHUNK_BYTES)
        self.trees = fan_out.RelayTrees(copies)

    def _serve(self) -> None:
        while not self._end:
            if self._relieved():
                continue
            if self.socket.poll(YET_POLL_MS if self._waiting else 100):
                peer, *frames = receive_frames(self.socket, ASK_BYTES, 2, keep=True)
                if len(self._waiting) < MOST_WAITING:
                    self._waiting.append(
                        _WaitingRequest(peer.bytes, frames, time.monotonic() + YET_S)
                    )
            if self._waiting:
                self._answer_waiting()

    def _answer_waiting(self) -> None:
        """Answer what waits, as far as it is there; a peer gets its answers in order."""
        held: dict[bytes, None] = {}
        left: list[_WaitingRequest] = []
        for each in self._waiting:
            if each.peer in held:
                left.append(each)
                continue
            try:
                answer = self._answer(each.frames)
            except VersionPending as wait:
                if time.monotonic() < each.until:
                    left.append(each)
                    held[each.peer] = None
                    continue
                answer = _ChunkReply(wait.digest, b"", NOTHING, b"")
            self._reply(each.peer, answer)
        self._waiting = left

    def _reply(self, peer: bytes, answer: _ChunkReply | None) -> None:
        if answer is None:
            self.refused += 1
            return
        self.bytes_sent += len(answer.data)
        try:
            self.socket.send_multipart([peer, _encoder.encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError:
            pass  # the peer has gone, or does not read
        self.answered += 1

    def _relieved(self) -> bool:
        """Were all connections closed?  Without an address there is nobody to answer: it is tried
        again.
        """
        try:
            return self.crowd.close_excess(self.address)
        except AsyncrlError as error:
            print(escape_line(str(error)), file=sys.stderr, flush=True)
            return True

    def _answer(self, frames: list[zmq.Frame]) -> _ChunkReply | None:
        """What somebody is told who sent these frames; None: nothing."""
        if len(frames) != 1:
            return None
        if self._guard is not None and not keys.GENERATOR.fullmatch(self._guard.name(frames[0])):
            return None
        try:
            ask = self._decoder.decode(frames[0].buffer)
            if ask.place is not None:
                return self._assign_source(ask, ask.place, frames[0])
            if ask.label == FILES:
                return self._file(ask)
            if ask.label == BUFFER:
                return _ChunkReply(self.buffer(), b"", NOTHING, b"")
            if ask.offset < 0:
                data = msgspec.msgpack.encode(self.manifest)
                return _ChunkReply("manifest", data, xxhash.xxh3_64_intdigest(data), b"")
            size = min(max(ask.size, 0), CHUNK_BYTES)
            digest, data, probe = self.read(ask.label, ask.digest, ask.offset, size)
        except UNDECODABLE:  # also a ring that is being closed
            return None
        return _ChunkReply(digest, data, xxhash.xxh3_64_intdigest(data), probe)

    def _assign_source(
        self, ask: _ChunkRequest, said: fan_out.RelayRequest, frame: zmq.Frame
    ) -> _ChunkReply | None:
        """Where somebody gets a version from; with keys, it is whom its key says."""
        if self.trees is None or self.pieces is None:
            return None
        name = said.name if self._guard is None else self._guard.name(frame)
        if not keys.GENERATOR.fullmatch(name) or not 0 <= said.port < 1 << 16:
            return None
        digest, pieces, probe = self.pieces.digests_of(ask.label, ask.digest)
        if not digest:
            return _ChunkReply("", b"", NOTHING, b"")
        try:
            host = str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            host = ""  # not over tcp
        asking = fan_out.RelayPeer(name, host, said.port, said.key)
        giver = self.trees.assign_source((ask.label, digest), asking, said.failed)
        guests: dict[str, str] = {}
        if said.guests and self._guard is not None:
            named = self._guard.names.items()
            guests = {key: who for key, who in named if keys.GENERATOR.fullmatch(who)}
        placed = fan_out.RelayAssignment(digest, pieces, probe, guests=guests)
        if giver != fan_out.LEARNER:
            relay = self.trees.relays[giver]
            placed = msgspec.structs.replace(
                placed, name=giver, address=f"tcp://{relay.host}:{relay.port}", key=relay.key
            )
        data = _encoder.encode(placed)
        return _ChunkReply(digest, data, xxhash.xxh3_64_intdigest(data), b"")

    def _file(self, ask: _ChunkRequest) -> _ChunkReply | None:
        """The list of files, empty while it is being made; or bytes of one of them."""
        if self.library is None:
            return None
        if ask.offset < 0:
            entries = self.library.listing()
            data = b"" if entries is None else msgspec.msgpack.encode(entries)
            said = self.library.wrong if entries is None else "files"
        else:
            size = min(max(ask.size, 0), CHUNK_BYTES)
            try:
                found = self.library.read(ask.digest, ask.offset, size)
            except OSError:
                found = None
            data = found or b""
            said = ask.digest if found is not None else ""
        return _ChunkReply(said, data, xxhash.xxh3_64_intdigest(data), b"")

    def close(self) -> None:
        self._end = True
        self.thread.join(CLOSING_S)
        if self.thread.is_alive():
            return  # a socket that two threads use at once ends the process
        if self._guard is not None:
            self._guard.stop()
        self.socket.close()
        self.context.term()


class ChunkClient:
    """Fetches versions from a ChunkServer, four chunks ahead; `bytes_received` counts what came
    over the socket.
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        curve_dir: str = "",
        name: str = "generator-0",
        server_key: str = "",
    ) -> None:
        self.address = address
        self.name = name  # whose key it shows, where there are keys
        self.server_key = server_key  # of another server than the learner's
        self.timeout = timeout
        self.bytes_received = 0
        self.probe = b""  # of the version fetched last
        # of a fetch that a broken connection ended: version, digest, chunks in the caller's memory
        self._begun: tuple[Label, str, int] | None = None
        self.context = zmq.Context()
        self.curve_dir = curve_dir
        self.socket = self._connect()
        self._decoder = msgspec.msgpack.Decoder(_ChunkReply)

    def _connect(self) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MANIFEST_BYTES)
        keys.lock(socket, self.curve_dir, self.name, self.server_key)
        self._events = socket.get_monitor_socket(HEARD_FROM | zmq.EVENT_DISCONNECTED)
        self._heard = False
        socket.connect(self.address)
        return socket

    def _wait_for_reply(self) -> bool:
        """Wait for an answer.  Raises PeerUnreachable at once where the connection was cut that the
        asks went over: who asks again has another one."""
        until = time.monotonic() + self.timeout
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left_s * 1000) + 1))
            if self.socket in ready:
                return True
            while self._events in ready and self._events.poll(0):
                event = parse_monitor_message(self._events.recv_multipart())["event"]
                if event == zmq.EVENT_DISCONNECTED and self._heard:
                    self.reconnect()
                    raise PeerUnreachable(f"the connection to {self.address} was cut")
                self._heard |= event == HEARD_FROM
        return False

    def _receive(self) -> _ChunkReply:
        if not self._wait_for_reply():
            self.reconnect()
            raise PeerUnreachable(
                f"the learner's chunk server at {self.address} has not answered for "
                f"{self.timeout:g} s; is the learner running?"
            )
        try:
            chunk = self.read(receive_frames(self.socket, MANIFEST_BYTES, 1))
        except (*UNDECODABLE, BadMessage) as error:
            self.reconnect()  # what else is on its way answers earlier asks
            raise PeerUnreachable(
                f"{self.address} does not speak this protocol: {error}"
            ) from error
        self.bytes_received += len(chunk.data)
        return chunk

    def read(self, frames: list[bytes]) -> _ChunkReply:
        """What these frames say.  Raises BadMessage or one of UNDECODABLE."""
        if len(frames) != 1:
            raise BadMessage("a message of more than one frame", "frame")
        chunk: _ChunkReply = self._decoder.decode(frames[0])
        if xxhash.xxh3_64_intdigest(chunk.data) != chunk.checksum:
            raise BadMessage("a damaged chunk of weights")
        if len(chunk.probe) > message_checks.PROBE_BYTES or len(chunk.probe) % 4:
            raise BadMessage(f"a probe of {len(chunk.probe)} bytes")
        return chunk

    def reconnect(self) -> None:
        """Begin with a new connection: what is under way on this one is of no use any more."""
        self._shut()
        self.socket = self._connect()

    def manifest(self) -> list[Any]:
        self.socket.send(_encoder.encode(_ChunkRequest(Label(0, 0), "", -1, 0)))
        try:
            return layout(self._receive().data)
        except (*UNDECODABLE, BadMessage) as error:
            raise PeerUnreachable(f"{self.address} has no layout of weights: {error}") from error

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Copy version `label` into `into`; returns its digest, verified over the whole, or "" when
        it is gone.

        After a PeerUnreachable the same version, asked for again with the same `into`, goes on
        behind what has come: the digest over the whole says whether that was right.
        """
        got = 0
        if self._begun is not None:
            label_before, digest_before, chunks = self._begun
            if digest and (label_before, digest_before) == (label, digest):
                got = chunks
            self.reconnect()
        self._begun = (label, digest, got)
        found = digest
        for chunk in self.fetch_chunks(label, digest, got * CHUNK_BYTES, len(into)):
            if not chunk.data:
                self._begun = None
                return ""
            found = chunk.digest
            self.probe = chunk.probe
            into[got * CHUNK_BYTES : (got + 1) * CHUNK_BYTES] = chunk.data
            got += 1
            self._begun = (label, digest, got)
        self._begun = None
        return found if xxhash.xxh3_64_hexdigest(into) == found else ""

    def fetch_chunks(
        self, label: Label, digest: str, begin: int, size: int
    ) -> Iterator[_ChunkReply]:
        """The chunks of a version from byte `begin` to `size`, AHEAD of them under way.

        The last one is empty where it is not there, or not of these weights: its digest is ""
        then, and `digest` where it is only not there yet."""
        offsets = range(begin, size, CHUNK_BYTES)
        for number in range(len(offsets)):
            chunk = self._next_chunk(label, digest, offsets, number, size)
            of_these = bool(chunk.digest) and chunk.digest == (digest or chunk.digest)
            if not of_these or len(chunk.data) != min(CHUNK_BYTES, size - offsets[number]):
                for _ in offsets[number + 1 : number + AHEAD]:
                    self._receive()
                yet = of_these and not chunk.data
                yield _ChunkReply(digest if yet else "", b"", NOTHING, b"")
                return
            digest = chunk.digest
            yield chunk

    def _next_chunk(
        self, label: Label, digest: str, offsets: range, number: int, size: int
    ) -> _ChunkReply:
        """Chunk `number` of those at `offsets`, with AHEAD of them asked for."""
        ahead = offsets[number + AHEAD - 1 : number + AHEAD] if number else offsets[:AHEAD]
        for offset in ahead:
            wanted = min(CHUNK_BYTES, size - offset)
            self.socket.send(_encoder.encode(_ChunkRequest(label, digest, offset, wanted)))
        return self._receive()

    def request_source(
        self, label: Label, digest: str, asking: fan_out.RelayRequest
    ) -> fan_out.RelayAssignment | None:
        """Where to get a version from; None: it is not there (any more)."""
        self.socket.send(_encoder.encode(_ChunkRequest(label, digest, 0, 0, asking)))
        chunk = self._receive()
        if not chunk.digest:
            return None
        try:
            return msgspec.msgpack.decode(chunk.data, type=fan_out.RelayAssignment)
        except UNDECODABLE as error:
            self.reconnect()
            raise PeerUnreachable(f"{self.address} says no place: {error}") from error

    # ---- files -----------------------------------------------------------------------------------

    def listing(self) -> list[FileEntry]:
        """The files that a generator of the run needs.  Raises PeerUnreachable when the learner's
        machine cannot read them.
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

    def file(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
        """The bytes of a file from `begin` to `size`, in order."""
        offsets = range(begin, size, CHUNK_BYTES)
        for number in range(len(offsets)):
            chunk = self._next_chunk(FILES, digest, offsets, number, size)
            if chunk.digest != digest or len(chunk.data) != min(
                CHUNK_BYTES, size - offsets[number]
            ):
                self.reconnect()
                raise PeerUnreachable(f"{self.address} does not give the file {digest[:12]}")
            yield chunk.data

    def buffer(self) -> str:
        """The address of the run's buffer, where it is not what it was; else "".  Raises
        PeerUnreachable.
        """
        self.socket.send(_encoder.encode(_ChunkRequest(BUFFER, "", 0, 0)))
        return self._receive().digest

    def _shut(self) -> None:
        self.socket.disable_monitor()
        self._events.close(0)
        self.socket.close()

    def close(self) -> None:
        self._shut()
        self.context.term()


def reachable_address(address: str, buffer: str) -> str:
    """Where to connect to a server that listens at `address`: on the buffer's host, when that is
    every host.

    >>> reachable_address("tcp://0.0.0.0:5556", "tcp://10.0.0.1:5555")
    'tcp://10.0.0.1:5556'
    >>> reachable_address("tcp://10.0.0.2:5556", "tcp://10.0.0.1:5555")
    'tcp://10.0.0.2:5556'
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host.strip("[]") not in ANYWHERE:
        return address
    there = urlsplit(buffer).netloc.rpartition("@")[2].rpartition(":")[0]
    return f"tcp://{there}:{port}" if there else address


def buffer_of(config: Config, source: WeightsSource, name: str) -> str:
    """Where the buffer is now, as the learner knows; "" when it knows nothing else than the config,
    or does not answer.
    """
    address = reachable_address(source.address, config.wires.address)
    client = ChunkClient(address, BUFFER_S, config.wires.curve_dir, name)
    try:
        return client.buffer()
    except PeerUnreachable:
        return ""
    finally:
        client.close()


def serve(config: Config, ring: WeightRing) -> ChunkServer | None:
    """The learner's end, when `wires.weights_address` names one."""
    if not config.wires.weights_address:
        return None
    server = ChunkServer(
        config.wires.weights_address,
        ring.rows,
        ring.read_part,
        config.wires.curve_dir,
        FileServer(config),
    )
    if config.weights.fan_out:
        server.plant(config.weights.fan_out, ring.size)
    return server


def connect(config: Config, source: WeightsSource, name: str) -> WeightsClient:
    """A generator's end.  Raises PeerUnreachable when the learner serves no chunks."""
    if not source.address:
        raise PeerUnreachable(
            f"the learner's weights lie on host {source.host} in {source.directory}, which "
            "this host cannot read; "
            "set wires.weights_address to a tcp address of the learner"
        )
    address = reachable_address(source.address, config.wires.address)
    make: Callable[[str, float, str, str], WeightsClient] = ChunkClient
    if config.weights.fan_out:
        from asyncrl.transport.relay import RelayClient  # which is made of what is here

        make = RelayClient
    return make(address, config.wires.connect_s, config.wires.curve_dir, name)
