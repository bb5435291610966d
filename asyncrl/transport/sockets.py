"""The control sockets.  Beside chunks.py and keys.py the only importer of zmq.

DEALER towards one ROUTER: no message is dropped silently for lack of a peer, and the peers' own
rules (requests repeated until answered, samples sent until acknowledged, duplicates suppressed by
key) make up for every loss a killed process can cause."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from asyncrl.contract.errors import ConfigError, PeerUnreachable
from asyncrl.contract.messages import (
    MAX_FRAME_BYTES,
    FromBuffer,
    FromGateway,
    FromGenerator,
    FromPeer,
    Refused,
)
from asyncrl.transport import keys
from asyncrl.transport.crowd import Crowd

IPC_LIMIT = 107  # bytes of a unix socket's path
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


class BufferSocket:
    """The buffer's ROUTER.

    A slow peer: its messages queue at its side up to its credit; ours to it up to HIGH_WATER, then
    they are dropped and the peer's repeated request brings them again.  A dead peer: the same,
    nothing blocks.  A peer that connects late finds us.

    reads: what peers say; key: the config's, that named the address.  A gateway's is one too."""

    def __init__(
        self,
        address: str,
        curve_dir: str = "",
        *,
        reads: Any = FromPeer,
        key: str = "wires.address",
    ) -> None:
        check_address(address, curve_dir, key)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._guard = keys.guard(self.socket, curve_dir)
        try:
            with keys.for_this_user_alone():  # of an ipc socket: connecting needs write permission
                self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{key}: cannot listen on {address}: {error}; is another run using it?"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.crowd = Crowd(self.socket)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reads)
        self.undecodable = 0  # messages refused so far that are not of this protocol
        self.forbidden = 0  # and those that their sender's key may not say

    def recv(self, timeout: float) -> tuple[bytes, Any] | None:
        """The next message within `timeout` seconds, with its peer; one that does not decode, or
        that its sender's key may not say, is answered by Refused, and counted.
        """
        if timeout and self.crowd.relieve(self.address):
            return None
        if not self.socket.poll(int(timeout * 1000)):
            return None
        if self._guard is None:
            frames = self.socket.recv_multipart()
            return self._decoded(frames[0], frames[1:])
        peer, *rest = self.socket.recv_multipart(copy=False)
        got = self._decoded(peer.bytes, [frame.buffer for frame in rest])
        name = self._guard.name(rest[-1])
        if got is None or keys.allowed(name, got[1]):
            return got
        self.forbidden += 1
        what = f"a {type(got[1]).__name__} of {getattr(got[1], 'producer', 'a learner')[:200]!r}"
        reason = f"the key of {name or 'nobody'} may not send {what}: use the key of that role"
        self.send(got[0], Refused(f"wires.curve_dir: {reason}", 2))
        return None

    def _decoded(self, peer: bytes, frames: list[Any]) -> tuple[bytes, FromPeer] | None:
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames")
            return peer, self._decoder.decode(frames[0])
        except UNDECODABLE as error:
            self.undecodable += 1
            self.send(
                peer,
                Refused(
                    f"a message that is not of this protocol: {type(error).__name__}: "
                    f"{str(error)[:200]!r}",
                    4,
                ),
            )
            return None

    def send(self, peer: bytes, message: FromBuffer | FromGateway) -> None:
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
    here.  A dead buffer shows as silence: the caller holds the deadline.  name: whose key it
    shows, where there are keys; reads: what the other side says; key: the config's, that named the
    address."""

    def __init__(
        self,
        address: str,
        curve_dir: str = "",
        name: str = keys.VIEWER,
        *,
        reads: Any = FromBuffer,
        key: str = "wires.address",
    ) -> None:
        check_address(address, curve_dir, key)
        self.address = address
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        keys.lock(self.socket, curve_dir, name)
        self.socket.connect(address)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reads)

    def send(self, message: FromPeer | FromGenerator) -> None:
        """Queue a message; with HIGH_WATER messages unsent (the buffer is away) it is dropped and
        repeated by its sender.
        """
        try:
            self.socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass

    def recv(self, timeout: float) -> Any:
        """The next message within `timeout` seconds, or None.  Raises PeerUnreachable for a frame
        that does not decode.
        """
        if not self.socket.poll(int(timeout * 1000)):
            return None
        try:
            return self._decoder.decode(self.socket.recv())
        except UNDECODABLE as error:
            raise PeerUnreachable(
                f"{self.address} does not speak this protocol: {error}"
            ) from error

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
