"""Sockets.  The only importer of zmq.

DEALER towards one ROUTER: no message is dropped silently for lack of a peer, and the peers' own
rules (requests repeated until answered, samples sent until acknowledged, duplicates suppressed by
key) make up for every loss a killed process can cause."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zmq

from asyncrl.contract.errors import ConfigError, PeerUnreachable
from asyncrl.contract.messages import MAX_FRAME_BYTES, FromBuffer, FromPeer, Refused
from asyncrl.contract.versions import Label

IPC_LIMIT = 107  # bytes of a unix socket's path
CHUNK_BYTES = 1 << 20
# messages; what may be outstanding is bounded by credit and pacing, far below this
HIGH_WATER = 10_000

# what a decoder raises for bytes that somebody else made: wrong types, bad UTF-8, nesting without
# end, sizes that no memory holds
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError)

_encoder = msgspec.msgpack.Encoder()


def check_address(address: str, curve_dir: str, key: str) -> None:
    """Refuse an address that cannot work or that would be open to the network without keys.  Raises
    ConfigError.
    """
    kind, _, rest = address.partition("://")
    if kind not in ("ipc", "tcp") or not rest:
        raise ConfigError(f"{key}: `{address}` is no address; write ipc:///path or tcp://host:port")
    if kind == "ipc" and len(rest.encode()) > IPC_LIMIT:
        raise ConfigError(
            f"{key}: the socket path {rest} has {len(rest.encode())} bytes, the system allows "
            f"{IPC_LIMIT}; choose a shorter one"
        )
    if kind == "tcp" and not curve_dir and not _loopback(rest.rsplit(":", 1)[0]):
        raise ConfigError(
            f"{key}: {address} is open to the network; give CURVE keys by wires.curve_dir "
            "(`asyncrl keys DIR`), or use 127.0.0.1"
        )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def make_keys(directory: Path) -> list[Path]:
    """Write CURVE keys: server.key(_secret), client.key(_secret), and the allow-list clients/;
    returns what a client's host needs.

    Raises ConfigError where keys lie already: whoever holds the old ones would be locked out.
    """
    import zmq.auth

    if (directory / "server.key").exists():
        raise ConfigError(
            f"{directory} holds keys already: choose another directory, or remove it first"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    server, _ = zmq.auth.create_certificates(directory, "server")
    public, secret = zmq.auth.create_certificates(directory, "client")
    (directory / "clients").mkdir(exist_ok=True)
    (directory / "clients" / "client.key").write_bytes(Path(public).read_bytes())
    return [Path(server), Path(secret)]


def _secure(socket: Any, curve_dir: str, *, server: bool) -> Any:
    """Encrypt with the keys in `curve_dir`; a server admits only the keys in its clients/
    folder.
    """
    if not curve_dir:
        return None
    import zmq.auth  # with asyncio and threads of its own: only for those who encrypt
    from zmq.auth.thread import ThreadAuthenticator

    where = Path(curve_dir)
    guard = None
    mine = where / ("server.key_secret" if server else "client.key_secret")
    if not mine.is_file():
        raise ConfigError(
            f"wires.curve_dir: {mine} is missing; `asyncrl keys {curve_dir}` makes keys"
        )
    public, secret = zmq.auth.load_certificate(mine)
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    if server:
        guard = ThreadAuthenticator(socket.context)
        guard.start()
        guard.configure_curve(domain="*", location=str(where / "clients"))
        socket.curve_server = True
    else:
        socket.curve_serverkey, _ = zmq.auth.load_certificate(where / "server.key")
    return guard


class BufferSocket:
    """The buffer's ROUTER.

    A slow peer: its messages queue at its side up to its credit; ours to it up to HIGH_WATER, then
    they are dropped and the peer's repeated request brings them again.  A dead peer: the same,
    nothing blocks.  A peer that connects late finds us."""

    def __init__(self, address: str, curve_dir: str = "") -> None:
        check_address(address, curve_dir, "wires.address")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._guard = _secure(self.socket, curve_dir, server=True)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"wires.address: cannot listen on {address}: {error}; is another run using it?"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._decoder = msgspec.msgpack.Decoder(FromPeer)
        self.undecodable = 0  # frames refused so far

    def recv(self, timeout: float) -> tuple[bytes, FromPeer] | None:
        """The next message within `timeout` seconds, with its peer; a frame that does not decode is
        answered by Refused, and counted.
        """
        if not self.socket.poll(int(timeout * 1000)):
            return None
        frames = self.socket.recv_multipart()
        try:
            return frames[0], self._decoder.decode(frames[-1])
        except UNDECODABLE as error:
            self.undecodable += 1
            self.send(
                frames[0],
                Refused(
                    f"a message that is not of this protocol: {type(error).__name__}: "
                    f"{str(error)[:200]!r}",
                    4,
                ),
            )
            return None

    def send(self, peer: bytes, message: FromBuffer) -> None:
        """Send without blocking; what cannot be queued is dropped (the peer repeats its
        request).
        """
        try:
            self.socket.send_multipart([peer, _encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            pass

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self.socket.close()
        self.context.term()


class PeerSocket:
    """A DEALER to the buffer.

    It connects when the buffer comes and again after it was away; what was sent meanwhile queues
    here.  A dead buffer shows as silence: the caller holds the deadline."""

    def __init__(self, address: str, curve_dir: str = "") -> None:
        check_address(address, curve_dir, "wires.address")
        self.address = address
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        _secure(self.socket, curve_dir, server=False)
        self.socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(FromBuffer)

    def send(self, message: FromPeer) -> None:
        """Queue a message; with HIGH_WATER messages unsent (the buffer is away) it is dropped and
        repeated by its sender.
        """
        try:
            self.socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass

    def recv(self, timeout: float) -> FromBuffer | None:
        """The next message within `timeout` seconds, or None.  Raises PeerUnreachable for a frame
        that does not decode.
        """
        if not self.socket.poll(int(timeout * 1000)):
            return None
        try:
            return self._decoder.decode(self.socket.recv())  # type: ignore[no-any-return]
        except UNDECODABLE as error:
            raise PeerUnreachable(
                f"{self.address} does not speak this protocol: {error}"
            ) from error

    def close(self) -> None:
        self.socket.close()
        self.context.term()


# ---- weights in chunks, for another host ---------------------------------------------------------


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


class ChunkServer:
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
        self._guard = _secure(self.socket, curve_dir, server=True)
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
        _secure(socket, self.curve_dir, server=False)
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
