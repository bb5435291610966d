"""The control sockets.

Only this module, chunks.py, keys.py and connection_guard.py import zmq.

Peers connect by DEALER to one ROUTER. No message is dropped silently for lack of a peer, and the
peers' own rules (requests repeated until answered, samples sent until acknowledged, duplicates
suppressed by key) compensate every loss that a killed process can cause.

A peer's message has two frames: a head with protocol and run, and the message itself. The head is
compared first, so that messages of other runs are never decoded. Only `StatusRequest` may come
without a known run; its reply names the run.
"""

from __future__ import annotations

import ipaddress
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.msgpack import Decoder

from asyncrl.config.tree import Config
from asyncrl.contract.errors import (
    AsyncrlError,
    BadMessage,
    ConfigError,
    NothingToDo,
    PeerUnreachable,
)
from asyncrl.contract.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    FromBuffer,
    FromGateway,
    FromGenerator,
    FromPeer,
    IntPair,
    Refusal,
    StatusRequest,
)
from asyncrl.contract.printable import escape_line
from asyncrl.contract.waits import BUFFER, ProcessWait, WaitLog
from asyncrl.records.rundir import get_current_buffer_address, is_finished, read_run_id
from asyncrl.transport import keys, message_checks
from asyncrl.transport.connection_guard import ConnectionGuard

IPC_LIMIT = 107  # bytes of a unix socket's path
# messages queued for one peer; credit and pacing keep the number of outstanding messages far lower
HIGH_WATER = 1000
# unread messages of one peer at the buffer; further messages stay at the peer
UNREAD_BYTES = 256 * 1024 * 1024
LEAST_UNREAD = 16  # messages
MOST_UNREAD = 1000  # unread messages at a peer
# a peer that does not answer heartbeats is dropped with its queued messages
HEARTBEAT_MS = 5_000
SILENT_MS = 60_000
# larger messages are sent without a copy; for smaller ones a copy costs less than the notification
# of zmq's thread
IN_PLACE_BYTES = 1 << 20

ENDED_S = 2.0  # seconds of silence before the run directory is checked for the run's end
SEARCH_S = 2.0  # seconds of silence before the buffer's address is looked up, and between look-ups

MOST_BROKEN = 20  # invalid messages in a row after which the connection fails
LOGGED_BROKEN = 3  # invalid messages that are logged

# the errors of a decoder for foreign bytes: wrong types, bad UTF-8, endless nesting, sizes that
# exceed memory
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError)

_encoder = msgspec.msgpack.Encoder()


def make_head(run: str, protocol: int = PROTOCOL) -> bytes:
    """Make the first frame of a peer's messages.

    run: "" if it is unknown."""
    return f"asyncrl {protocol} {run}".encode()


def send_message(socket: Any, first: bytes, message: Any) -> None:
    """Send a message behind its first frame without blocking.

    Raises zmq.Again when the queue is full, and AsyncrlError when the message is larger than a
    frame may be: its reader would drop the connection, and both would wait forever.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise AsyncrlError(
            f"a {type(message).__name__} of {len(payload) / 2**20:.0f} MiB cannot be sent, the "
            f"limit is {MAX_FRAME_BYTES / 2**20:.0f} MiB: use smaller batches (learner.groups, "
            "learner.group_size, generator.max_new_tokens) or, with top_p, a smaller support "
            "(generator.top_p, generator.top_k)"
        )
    socket.send_multipart([first, payload], zmq.NOBLOCK, copy=len(payload) < IN_PLACE_BYTES)


def receive_frames(socket: Any, most: int, frames: int) -> list[zmq.Frame]:
    """Receive the next message, at most `frames` + 1 frames and `most` bytes in total.

    Further frames are discarded. A message with too many bytes is reduced to its first frame.
    zmq's own frames have their sender's key and are decoded without a copy.
    """
    received: list[zmq.Frame] = []
    size = 0
    while True:
        frame = socket.recv(copy=False)
        size += len(frame)
        if len(received) <= frames and (size <= most or not received):
            received.append(frame)
        if not socket.getsockopt(zmq.RCVMORE):
            return received if size <= most else received[:1]


def make_undecodable_refusal(reason: str) -> Refusal:
    """Make the refusal of a message that does not decode."""
    return Refusal(f"a message that is not of this protocol: {reason}", 4)


def make_foreign_refusal(head: bytes, run: str) -> Refusal:
    """Make the refusal of a message from another run or protocol.

    head: the first frame of the message. run: the run of this process."""
    name, _, rest = head[:200].decode(errors="replace").partition(" ")
    protocol, _, peer_run = rest.partition(" ")
    if name != "asyncrl" or not protocol.isdecimal():
        return make_undecodable_refusal("its first frame names no run")
    if int(protocol) != PROTOCOL:
        return Refusal(
            f"the buffer speaks protocol {PROTOCOL}, this process {protocol}: install the same "
            "version on all hosts"
        )
    return Refusal(
        f"the buffer belongs to run {run}, this process to run {peer_run or '(none)'}: give it the "
        "same run directory",
        2,
    )


def check_address(address: str, curve_dir: str, key: str) -> None:
    """Check that an address can work and is not open to the network without keys.

    key: the config key of the address, for the error. Raises ConfigError.
    """
    kind, _, rest = address.partition("://")
    if kind not in ("ipc", "tcp") or not rest:
        raise ConfigError(
            f"{key}: `{address}` is not an address; write ipc:///path or tcp://host:port"
        )
    if kind == "ipc" and len(rest.encode()) > IPC_LIMIT:
        raise ConfigError(
            f"{key}: the socket path {rest} has {len(rest.encode())} bytes, the system allows "
            f"{IPC_LIMIT}; choose a shorter one"
        )
    if kind == "tcp" and not curve_dir and not is_loopback(rest.rsplit(":", 1)[0]):
        raise ConfigError(
            f"{key}: {address} is open to the network; give CURVE keys by wires.curve_dir "
            "(`asyncrl keys DIR`), or use 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class MessageReader:
    """A socket that messages arrive at."""

    socket: Any

    @property
    def has_message(self) -> bool:
        """Whether a message has arrived."""
        return bool(self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)


class ListeningSocket(MessageReader):
    """A ROUTER that listens at an address, with a limit on its connections.

    key: the config key that named the address.
    most: bytes of one message.
    linger, queued, unread: milliseconds after closing; messages to and from a peer that may wait.
    """

    def __init__(
        self,
        address: str,
        curve_dir: str,
        key: str,
        *,
        most: int,
        linger: int,
        queued: int,
        unread: int,
    ) -> None:
        check_address(address, curve_dir, key)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, linger),
            (zmq.SNDHWM, queued),
            (zmq.RCVHWM, unread),
            (zmq.MAXMSGSIZE, most),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, SILENT_MS),
            (zmq.ROUTER_HANDOVER, 1),
        ):
            self.socket.setsockopt(option, value)
        self._guard = keys.KeyAuthenticator(self.socket, curve_dir) if curve_dir else None
        try:
            with keys.private_umask():  # connecting to an ipc socket needs write permission
                self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{key}: cannot listen on {address}: {error}; is another run using it?"
            ) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.connections = ConnectionGuard(self.socket)

    def close(self) -> None:
        """Close the socket and its context."""
        if self._guard is not None:
            self._guard.stop()
        self.socket.close()
        self.context.term()


class BufferSocket(ListeningSocket):
    """The ROUTER of the buffer or of a gateway.

    The messages of a slow peer queue at its side up to its credit and here up to UNREAD_BYTES.
    Messages to it queue up to HIGH_WATER, then they are dropped, and the peer repeats its request.
    A dead peer blocks nothing either. A peer may connect at any time.

    reads: the types of accepted messages.
    key: the config key that named the address.
    run: the run whose messages are accepted.
    most: bytes of one message over all its frames.
    """

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
        super().__init__(
            address,
            curve_dir,
            key,
            most=most,
            linger=200,
            queued=HIGH_WATER,
            unread=min(HIGH_WATER, max(LEAST_UNREAD, UNREAD_BYTES // most)),
        )
        self.run = run
        self.head = make_head(run)
        self.most = most
        self.refused: Callable[[str, str], None] = lambda reason, line: None
        self.sender = ""  # the name of the last message's key
        # the last message as it was encoded; a reference to it keeps zmq's memory alive
        self.payload: bytes | memoryview = b""
        self._decoder: Decoder[Any] = Decoder(reads)

    def recv(self, timeout: float) -> tuple[bytes, Any] | None:
        """Return the next message within `timeout` seconds, with its peer.

        Returns None without a message, and for a message of another run, too large, undecodable, or
        not permitted by its sender's key. Such a message gets a Refusal and is reported to
        `refused`.
        """
        if timeout and self.connections.close_excess(self.address):
            return None
        # `poll` builds a poller, which costs as much as reading a short message
        if not self.has_message and not (timeout and self.socket.poll(int(timeout * 1000))):
            return None
        peer_frame, *frames = receive_frames(self.socket, self.most, 3)
        peer = peer_frame.bytes
        if len(frames) != 2:
            self._refuse(
                peer,
                "frame",
                make_undecodable_refusal(f"no head and message, or more than {self.most} bytes"),
            )
            return None
        peer_head, payload = frames[0].bytes, frames[1].buffer
        self.payload = payload
        name = None if self._guard is None else self._guard.get_name(frames[1])
        self.sender = name or ""
        if peer_head != self.head and peer_head != make_head(""):
            self._refuse(peer, "stranger", make_foreign_refusal(peer_head, self.run))
            return None
        try:
            message = self._decoder.decode(payload)
        except UNDECODABLE as error:
            detail = f"{type(error).__name__}: {str(error)[:200]!r}"
            self._refuse(peer, "frame", make_undecodable_refusal(detail))
            return None
        if peer_head != self.head and not isinstance(message, StatusRequest):
            self._refuse(peer, "stranger", make_foreign_refusal(peer_head, self.run))
            return None
        if name is None or keys.is_allowed(name, message):
            return peer, message
        producer = getattr(message, "producer", "a learner")[:200]
        text = f"a {type(message).__name__} of {producer!r}"
        key = f"the key of {name}" if name else "this key"
        reason = f"{key} may not send {text}: use the key of that role"
        self._refuse(peer, "role", Refusal(f"wires.curve_dir: {reason}", 2))
        return None

    def _refuse(self, peer: bytes, reason: str, refusal: Refusal) -> None:
        self.refused(reason, f"refused a message: {refusal.reason}")
        self.send(peer, refusal)

    def send(self, peer: bytes, message: FromBuffer | FromGateway) -> None:
        """Send without blocking; drop a message that cannot be queued.

        The peer repeats its request.
        """
        try:
            send_message(self.socket, peer, message)
        except zmq.ZMQError:
            pass


class DealerSocket(MessageReader):
    """A DEALER that is connected to a listening socket.

    name: selects the CURVE key, if there are keys.
    reads: the types of accepted messages.
    """

    options: Sequence[IntPair]
    check: Callable[[Any], None]  # raises BadMessage

    def __init__(self, address: str, curve_dir: str, name: str, reads: Any) -> None:
        self.address = address
        self.curve_dir = curve_dir
        self.name = name
        self.context = zmq.Context()
        self._decoder: Decoder[Any] = Decoder(reads)
        self.socket = self.connect()

    def connect(self) -> Any:
        """Return a new connected socket."""
        socket = self.make_socket()
        socket.connect(self.address)
        return socket

    def make_socket(self) -> Any:
        """Make a socket that is not connected yet."""
        socket = self.context.socket(zmq.DEALER)
        for option, value in self.options:
            socket.setsockopt(option, value)
        keys.authenticate_client(socket, self.curve_dir, self.name)
        return socket

    def reconnect(self) -> None:
        """Open a new connection, which discards all messages in flight."""
        self.close_socket(linger=0)
        self.socket = self.connect()

    def read(self, frames: Sequence[Any]) -> Any:
        """Decode a message. Raises BadMessage or one of UNDECODABLE."""
        if len(frames) != 1:
            raise BadMessage("a message of more than one frame", "frame")
        message = self._decoder.decode(frames[0])
        self.check(message)
        return message

    def close_socket(self, linger: int | None = None) -> None:
        """Close the socket. linger: milliseconds for unsent messages; None: as `options` say."""
        self.socket.close(linger)

    def close(self) -> None:
        """Close the socket and its context."""
        self.close_socket()
        self.context.term()


class PeerSocket(DealerSocket):
    """A DEALER to the buffer.

    It connects as soon as the buffer listens and again after an outage; messages sent meanwhile
    queue here. A dead buffer shows only as silence: the caller keeps the deadline and calls
    `find_moved_buffer`, which looks up the address by `find_address`.

    A message that does not decode, or that `check` refuses, is counted in `broken` and closes the
    connection. The socket opens a new one, and the caller repeats pending requests.

    run: "" for processes that only watch.
    key: the config key that named the address.
    """

    options = (
        (zmq.LINGER, 500),
        (zmq.RECONNECT_IVL, 50),
        (zmq.RECONNECT_IVL_MAX, 1000),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.RCVHWM, MOST_UNREAD),
    )

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
        self.run = run
        self.head = make_head(run)
        self.check = message_checks.check
        self.find_address: Callable[[], str] = lambda: ""  # looks up the buffer's current address
        self.searched_at = 0.0  # CLOCK_MONOTONIC seconds
        self.broken = self.broken_in_a_row = 0
        super().__init__(address, curve_dir, name, reads)

    def send(self, message: FromPeer | FromGenerator) -> None:
        """Queue a message; with HIGH_WATER unsent messages it is dropped.

        The sender repeats it.
        """
        try:
            send_message(self.socket, self.head, message)
        except zmq.Again:
            pass

    def find_moved_buffer(self, silent: float) -> bool:
        """Connect to the buffer's new address if it has moved.

        silent: seconds of silence so far.
        Returns whether the buffer has moved; the caller must then repeat unanswered requests.
        """
        now = time.monotonic()
        if silent < SEARCH_S or now - self.searched_at < SEARCH_S:
            return False
        address = self.find_address()
        self.searched_at = time.monotonic()
        if not address or address == self.address:
            return False
        try:
            check_address(address, self.curve_dir, "the buffer's address")
        except ConfigError as error:
            print(f"ignored the buffer's new address: {escape_line(str(error))}", file=sys.stderr)
            return False
        print(
            f"{self.address} has been silent for {silent:.0f} s, and the run's buffer is now at "
            f"{address}: connecting to it",
            file=sys.stderr,
        )
        self.address = address
        self.reconnect()
        return True

    def recv(self, timeout: float) -> Any:
        """Return the next message within `timeout` seconds, or None.

        Raises PeerUnreachable after MOST_BROKEN invalid messages in a row.
        """
        if not self.socket.poll(int(timeout * 1000)):
            return None
        frames = receive_frames(self.socket, MAX_FRAME_BYTES, 1)
        try:
            message = self.read(frames)
        except (*UNDECODABLE, BadMessage) as error:
            self.broken += 1
            self.broken_in_a_row += 1
            reason = f"{type(error).__name__}: {str(error)[:200]!r}"
            if self.broken_in_a_row >= MOST_BROKEN:
                raise PeerUnreachable(
                    f"{self.address} does not speak this protocol: {self.broken_in_a_row} invalid "
                    f"messages in a row, the last one {reason}"
                ) from error
            if self.broken <= LOGGED_BROKEN:
                print(
                    f"{self.address} sent an invalid message, reconnecting: {reason}",
                    file=sys.stderr,
                )
            self.reconnect()
            return None
        self.broken_in_a_row = 0
        return message


class BufferPeer(ABC):
    """A process of the run that is connected to the buffer: learner, generator or gateway.

    A dead buffer shows as requests without a reply: `silent_since` is the time from which silence
    counts, 0 while no reply is due. The peer then looks for the buffer at another address, checks
    whether the run has ended, and gives up after wires.connect_s."""

    def __init__(self, config: Config, run_dir: Path, name: str) -> None:
        self.config = config
        self.run_dir = run_dir
        self.name = name
        self.run = read_run_id(run_dir)
        self.socket = PeerSocket(
            get_current_buffer_address(config, run_dir), config.wires.curve_dir, name, run=self.run
        )
        self.socket.find_address = self.find_buffer_address
        self.silent_since = 0.0
        self.has_reply = False
        self.waiting_for = "the buffer's first reply"
        self.waiting_since = time.monotonic()
        self.wait_log = WaitLog(min(10.0, config.watchdog.floor_s / 2))

    def find_buffer_address(self) -> str:
        """Return the buffer's address as far as this process knows."""
        return get_current_buffer_address(self.config, self.run_dir)

    def request(self, message: FromPeer) -> None:
        """Send a message to which the buffer replies at once."""
        self.silent_since = self.silent_since or time.monotonic()
        self.socket.send(message)

    def receive(self, timeout: float) -> Iterator[FromBuffer]:
        """Yield the replies that arrive within `timeout` seconds. Raises the error of a refusal."""
        while (reply := self.socket.recv(timeout)) is not None:
            timeout = 0.0
            if not self.has_reply:
                self.log_change(f"connected to the buffer at {self.socket.address}")
            self.has_reply = True
            self.on_reply()
            if isinstance(reply, Refusal):
                raise AsyncrlError(reply.reason, reply.exit_code)
            yield reply

    def on_reply(self) -> None:
        """End the silence."""
        self.silent_since = 0.0

    def judge_silence(self) -> None:
        """React to the buffer's silence. Raises PeerUnreachable after wires.connect_s."""
        silent = time.monotonic() - self.silent_since if self.silent_since else 0.0
        if self.socket.find_moved_buffer(silent):
            self.silent_since = silent = 0.0
            self.on_moved_buffer()
        if silent > ENDED_S and is_finished(self.run_dir, self.config.learner.steps):
            self.on_finished_run()
        elif silent > self.config.wires.connect_s:
            raise PeerUnreachable(
                f"the buffer at {self.socket.address} has not answered for {silent:.0f} s "
                "(wires.connect_s); start it with `asyncrl buffer`, or set wires.address"
            )

    @abstractmethod
    def on_moved_buffer(self) -> None:
        """Repeat the unanswered messages to the buffer at its new address."""

    @abstractmethod
    def on_finished_run(self) -> None:
        """End, because the run has finished although the buffer sent no message about it."""

    def make_end_error(self, name: str) -> NothingToDo:
        """Make the error of a process that connects after the end of the run."""
        return NothingToDo(
            f"the run in {self.run_dir} has ended, all its {self.config.learner.steps} steps are "
            f"made: {name} came too late"
        )

    def set_wait(self, reason: str) -> None:
        """Set the reason why this process waits; "" while it has work."""
        if reason != self.waiting_for:
            self.waiting_for = reason
            self.waiting_since = time.monotonic()

    def current_wait(self, now: float) -> ProcessWait | None:
        """Return the wait to report to others; None while this process has work."""
        if not self.waiting_for:
            return None
        return ProcessWait(self.name, self.waiting_for, BUFFER, now - self.waiting_since)

    def log_change(self, text: str) -> None:
        """Write a change of this process's state to stderr."""
        print(f"{self.name}: {text}", file=sys.stderr)

    def log_wait(self, wait: ProcessWait | None) -> None:
        """Write a long wait to stderr, with the buffer's address."""
        if wait is not None and wait.on == BUFFER:
            wait = wait._replace(on=f"the buffer at {self.socket.address}")
        for line in self.wait_log.make_lines([wait] if wait is not None else []):
            print(line, file=sys.stderr)


def wait(
    sockets: Iterable[BufferSocket | PeerSocket], descriptors: Iterable[int], timeout: float
) -> None:
    """Wait until a socket has a message, a file descriptor is readable, or time is up.

    timeout: seconds.
    """
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket.socket, zmq.POLLIN)
    for descriptor in descriptors:
        poller.register(descriptor, zmq.POLLIN)
    poller.poll(max(0, int(timeout * 1000)))
