"""The control sockets.  Beside chunks.py the only importer of zmq.

DEALER towards one ROUTER: no message is dropped silently for lack of a peer, and the peers' own
rules (requests repeated until answered, samples sent until acknowledged, duplicates suppressed by
key) make up for every loss a killed process can cause."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from asyncrl.contract.errors import ConfigError, PeerUnreachable
from asyncrl.contract.messages import MAX_FRAME_BYTES, FromBuffer, FromPeer, Refused

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


def secure(socket: Any, curve_dir: str, *, server: bool) -> Any:
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
        self._guard = secure(self.socket, curve_dir, server=True)
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
        secure(self.socket, curve_dir, server=False)
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
