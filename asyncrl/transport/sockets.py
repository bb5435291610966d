"""The control sockets.  Beside chunks.py and keys.py the only importer of zmq.

DEALER towards one ROUTER: no message is dropped silently for lack of a peer, and the peers' own
rules (requests repeated until answered, samples sent until acknowledged, duplicates suppressed by
key) make up for every loss a killed process can cause.

A peer's message is two frames: a head, which names protocol and run, and the message itself.  The
head is compared before anything is decoded, so what another run sends is never looked at.
`StatusRequest`
alone may come from somebody who does not know the run: the answer names it."""

from __future__ import annotations

import ipaddress
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import zmq

from asyncrl.contract.errors import BadMessage, ConfigError, PeerUnreachable
from asyncrl.contract.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    FromBuffer,
    FromGateway,
    FromGenerator,
    FromPeer,
    Refusal,
    StatusRequest,
)
from asyncrl.contract.printable import escape_line
from asyncrl.transport import keys, message_checks
from asyncrl.transport.connection_guard import ConnectionGuard

IPC_LIMIT = 107  # bytes of a unix socket's path
# Messages to a peer, or to the buffer: what may be outstanding is bounded by credit and pacing, far
# below this.
HIGH_WATER = 1000
# of a peer's messages that have come and wait to be read; what is beyond stays at its side
WAITING_BYTES = 256 * 1024 * 1024
LEAST_WAITING = 16  # messages
# who does not even answer a heartbeat is gone, and what waits for him with him
HEARTBEAT_MS = 5_000
SILENT_MS = 60_000
WAITING = 1000  # messages that have come and nobody has read
# from here on a message leaves from where it was encoded: of a smaller one a copy costs less than
# to hear from zmq's thread that it has gone
IN_PLACE_BYTES = 1 << 20

SOUGHT_S = 2.0  # of the other side's silence, before it is looked up where it is; then as often

BROKEN = 20  # messages in a row that cannot be: whoever sends them is no peer of ours
BROKEN_SAID = 3  # of these, lines in the log

# what a decoder raises for bytes that somebody else made: wrong types, bad UTF-8, nesting without
# end, sizes that no memory holds
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError)

_encoder = msgspec.msgpack.Encoder()


def head(run: str, protocol: int = PROTOCOL) -> bytes:
    """The first frame of every message of a peer; run: "" when it is not known."""
    return f"asyncrl {protocol} {run}".encode()


def send_message(socket: Any, first: bytes, message: Any) -> None:
    """Send a message behind its first frame, without blocking.  Raises zmq.Again when there is no
    room for it.
    """
    payload = _encoder.encode(message)
    socket.send_multipart([first, payload], zmq.NOBLOCK, copy=len(payload) < IN_PLACE_BYTES)


def receive_frames(socket: Any, most: int, frames: int, *, keep: bool = False) -> list[Any]:
    """The next message, up to so many frames and `most` bytes over all of them; the rest is taken
    off the socket and not kept, and of one with too many bytes only its first frame.

    keep: as zmq's own frames, which know their sender's key and are decoded where they lie."""
    found: list[Any] = []
    size = 0
    while True:
        frame = socket.recv(copy=not keep)
        size += len(frame)
        if len(found) <= frames and (size <= most or not found):
            found.append(frame)
        if not socket.getsockopt(zmq.RCVMORE):
            return found if size <= most else found[:1]


def undecodable(what: str) -> Refusal:
    return Refusal(f"a message that is not of this protocol: {what}", 4)


def foreign_peer_refusal(theirs: bytes, run: str) -> Refusal:
    """What somebody hears whose messages are not of this run or this protocol."""
    name, _, rest = theirs[:200].decode(errors="replace").partition(" ")
    protocol, _, other = rest.partition(" ")
    if name != "asyncrl" or not protocol.isdecimal():
        return Refusal("a message that is not of this protocol: its first frame names no run", 4)
    if int(protocol) != PROTOCOL:
        return Refusal(
            f"the buffer speaks protocol {PROTOCOL}, this process {protocol}: install the same "
            "version on all hosts"
        )
    return Refusal(
        f"the buffer belongs to run {run}, this process to run {other or '(none)'}: give it the "
        "same run directory",
        2,
    )


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


class BufferSocket:
    """The buffer's ROUTER.

    A slow peer: its messages queue at its side up to its credit, here up to WAITING_BYTES; ours to
    it up to HIGH_WATER, then they are dropped and the peer's repeated request brings them again.  A
    dead peer: the same, nothing blocks.  A peer that connects late finds us.

    reads: what peers say; key: the config's, that named the address.  A gateway's is one too.  run:
    whose messages are taken; most: bytes of one, over all its frames."""

    def __init__(
        self,
        address: str,
        curve_dir: str = "",
        *,
        run: str = "",
        most: int = MAX_FRAME_BYTES,
        reads: Any = FromPeer,
        key: str = "wires.address",
    ) -> None:
        check_address(address, curve_dir, key)
        self.run = run
        self.head = head(run)
        self.most = most
        self.refused: Callable[[str, str], None] = lambda reason, line: None
        self.speaker = ""  # whose key the last message came with
        # the last message as it was encoded; whoever keeps it keeps zmq's memory with it
        self.payload: bytes | memoryview = b""
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        waiting = min(HIGH_WATER, max(LEAST_WAITING, WAITING_BYTES // most))
        self.socket.setsockopt(zmq.RCVHWM, waiting)
        self.socket.setsockopt(zmq.MAXMSGSIZE, most)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._guard = keys.guard(self.socket, curve_dir)
        try:
            with keys.private_umask():  # of an ipc socket: connecting needs write permission
                self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{key}: cannot listen on {address}: {error}; is another run using it?"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.crowd = ConnectionGuard(self.socket)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reads)

    def recv(self, timeout: float) -> tuple[bytes, Any] | None:
        """The next message within `timeout` seconds, with its peer.  What is of another run, too
        large, does not decode, or may not be said with its sender's key is answered by Refused,
        told to `refused`, and None.
        """
        if timeout and self.crowd.close_excess(self.address):
            return None
        # `poll` builds a poller, which costs as much as reading a short message
        events: Any = self.socket.getsockopt(zmq.EVENTS)
        if not events & zmq.POLLIN and not (timeout and self.socket.poll(int(timeout * 1000))):
            return None
        found = receive_frames(self.socket, self.most, 3, keep=True)
        peer, frames = bytes(found[0]), found[1:]
        if len(frames) != 2:
            self._refuse(
                peer, "frame", undecodable(f"no head and message, or more than {self.most} bytes")
            )
            return None
        theirs, payload = frames[0].bytes, frames[1].buffer
        self.payload = payload
        name = None if self._guard is None else self._guard.name(frames[1])
        self.speaker = name or ""
        if theirs != self.head and theirs != head(""):
            self._refuse(peer, "stranger", foreign_peer_refusal(theirs, self.run))
            return None
        try:
            message = self._decoder.decode(payload)
        except UNDECODABLE as error:
            why = f"{type(error).__name__}: {str(error)[:200]!r}"
            self._refuse(peer, "frame", undecodable(why))
            return None
        if theirs != self.head and not isinstance(message, StatusRequest):
            self._refuse(peer, "stranger", foreign_peer_refusal(theirs, self.run))
            return None
        if name is None or keys.is_allowed(name, message):
            return peer, message
        what = f"a {type(message).__name__} of {getattr(message, 'producer', 'a learner')[:200]!r}"
        reason = f"the key of {name or 'nobody'} may not send {what}: use the key of that role"
        self._refuse(peer, "role", Refusal(f"wires.curve_dir: {reason}", 2))
        return None

    @property
    def waiting(self) -> bool:
        """Whether a message is there."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _refuse(self, peer: bytes, reason: str, why: Refusal) -> None:
        self.refused(reason, f"refused a message: {why.reason}")
        self.send(peer, why)

    def send(self, peer: bytes, message: FromBuffer | FromGateway) -> None:
        """Send without blocking; what cannot be queued is dropped (the peer repeats its
        request).
        """
        try:
            send_message(self.socket, peer, message)
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
    here.  A dead buffer shows as silence: the caller holds the deadline, and `find_moved_buffer`s
    it meanwhile,
    as `find` says where it is.  name: whose key it shows, where there are keys; reads: what the
    other side says; run: "" for those who only watch; key: the config's, that named the address.

    A message that does not decode, or that `check` refuses, is counted in `broken` and costs the
    connection: a new one is made, and what was asked is asked again."""

    def __init__(
        self,
        address: str,
        curve_dir: str = "",
        name: str = keys.VIEWER,
        *,
        reads: Any = FromBuffer,
        run: str = "",
        key: str = "wires.address",
    ) -> None:
        check_address(address, curve_dir, key)
        self.address = address
        self.curve_dir = curve_dir
        self.name = name
        self.run = run
        self.head = head(run)
        self.check: Callable[[Any], None] = message_checks.check
        self.find: Callable[[], str] = lambda: ""  # its address, as far as anybody knows
        self.sought = 0.0
        self.broken = self.broken_in_a_row = 0
        self.context = zmq.Context()
        self.socket = self._connected()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reads)

    def _connected(self) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, WAITING)
        keys.lock(socket, self.curve_dir, self.name)
        socket.connect(self.address)
        return socket

    def send(self, message: FromPeer | FromGenerator) -> None:
        """Queue a message; with HIGH_WATER messages unsent (the buffer is away) it is dropped and
        repeated by its sender.
        """
        try:
            send_message(self.socket, self.head, message)
        except zmq.Again:
            pass

    def find_moved_buffer(self, silent: float) -> bool:
        """The other side has not answered for `silent` seconds: is it elsewhere by now?  True: it
        is, and this socket speaks with it; what was not answered is to be asked again.
        """
        now = time.monotonic()
        if silent < SOUGHT_S or now - self.sought < SOUGHT_S:
            return False
        address = self.find()
        self.sought = time.monotonic()
        if not address or address == self.address:
            return False
        try:
            check_address(address, self.curve_dir, "the buffer's address")
        except ConfigError as error:
            print(f"not followed: {escape_line(str(error))}", file=sys.stderr, flush=True)
            return False
        print(
            f"{self.address} has been silent for {silent:.0f} s, and the run's buffer is at "
            f"{address} now: going on with that one",
            file=sys.stderr,
            flush=True,
        )
        self.address = address
        self.socket.close(linger=0)  # what waits here for the other one is asked again
        self.socket = self._connected()
        return True

    @property
    def waiting(self) -> bool:
        """Whether a message is there."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def recv(self, timeout: float) -> Any:
        """The next message within `timeout` seconds, or None.  Raises PeerUnreachable after BROKEN
        in a row that cannot be.
        """
        if not self.socket.poll(int(timeout * 1000)):
            return None
        frames = receive_frames(self.socket, MAX_FRAME_BYTES, 1, keep=True)
        try:
            message = self.read([frame.buffer for frame in frames])
        except (*UNDECODABLE, BadMessage) as error:
            self._broke(error)
            return None
        self.broken_in_a_row = 0
        return message

    def read(self, frames: Sequence[bytes | memoryview]) -> Any:
        """What these frames say.  Raises BadMessage or one of UNDECODABLE."""
        if len(frames) != 1:
            raise BadMessage("a message of more than one frame", "frame")
        message = self._decoder.decode(frames[0])
        self.check(message)
        return message

    def _broke(self, error: Exception) -> None:
        """Count it, and begin with a new connection."""
        self.broken += 1
        self.broken_in_a_row += 1
        why = f"{type(error).__name__}: {str(error)[:200]!r}"
        if self.broken_in_a_row >= BROKEN:
            raise PeerUnreachable(
                f"{self.address} does not speak this protocol: {self.broken_in_a_row} messages in "
                f"a row cannot be, the last one {why}"
            ) from error
        if self.broken <= BROKEN_SAID:
            print(
                f"{self.address} sent a message that cannot be, and is connected to anew: {why}",
                file=sys.stderr,
                flush=True,
            )
        self.socket.close(linger=0)
        self.socket = self._connected()

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def wait(
    sockets: Iterable[BufferSocket | PeerSocket], descriptors: Iterable[int], timeout: float
) -> None:
    """Until one of the sockets has a message, one of the file descriptors something to read, or
    `timeout` seconds are over.
    """
    poller = zmq.Poller()
    for each in sockets:
        poller.register(each.socket, zmq.POLLIN)
    for descriptor in descriptors:
        poller.register(descriptor, zmq.POLLIN)
    poller.poll(max(0, int(timeout * 1000)))
