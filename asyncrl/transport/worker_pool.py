"""A pool of worker processes that run user code: rewards, environments and agents.

A worker imports the code, replies "ready" or "broken", and then replies to each piece of work. The
two sides exchange frames, a length of four bytes and a payload, over a socket pair. The pool never
blocks on a worker, which ends with its parent even while user code hangs.

The pool replaces each worker that exits, sends an invalid reply, or passes the deadline of its
start or of its work. Its subclass handles the work of a lost worker in `on_lost`. When several
workers in a row are lost before they are ready, the code cannot be imported, and the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import math
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import describe_exit

# seconds for a start with slow imports, unless one piece of work may take longer
GRACE_S = 60.0
START_TRIES = 3
EXIT_S = 0.2  # seconds that a worker gets to exit after it has closed its socket
READ_BYTES = 1 << 18
FRAME_BYTES = 64 * 1024 * 1024  # a larger frame means a broken worker
PRINTED_CHARACTERS = 1 << 20  # of a worker's output; the rest is dropped
_PR_SET_PDEATHSIG = 1
_is_forked = False  # in the children of a worker

_Message = TypeVar("_Message")


def frame(payload: bytes) -> bytes:
    """Prefix the payload with its length.

    Ends a process that user code forked in a worker and that returned to the worker's loop: its
    message would answer the parent's work.
    """
    if _is_forked:
        os._exit(0)
    return len(payload).to_bytes(4, "big") + payload


def take_frames(incoming: bytearray) -> Iterator[bytes]:
    """Remove the complete frames from `incoming` and yield their payloads.

    Raises msgspec.DecodeError for a frame that is too large.
    """
    while len(incoming) >= 4:
        end = 4 + int.from_bytes(incoming[:4], "big")
        if end > 4 + FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {end - 4} bytes")
        if len(incoming) < end:
            return
        payload = bytes(incoming[4:end])
        del incoming[:end]
        yield payload


class Worker:
    """The process that runs `module`, with its outgoing and incoming bytes.

    setup: payload of the first message to it.
    python: the Python that runs it; "" for this one.
    """

    slack_s = 0.0  # seconds beyond the deadline of its work

    def __init__(self, module: str, setup: bytes, python: str = "") -> None:
        self.wire, worker_end = socket.socketpair()
        with worker_end:
            descriptor = worker_end.fileno()
            argv = importing.make_command(module, str(descriptor), str(os.getpid()), python=python)
            self.process = subprocess.Popen(argv, pass_fds=[descriptor], stdin=subprocess.DEVNULL)
        self.wire.setblocking(False)
        self.incoming = bytearray()
        self.outgoing = bytearray(frame(setup))
        self.closed = False  # the process closed its side
        self.invalid = ""  # the error of a message that does not decode
        self.ready = False
        self.restart_clock()

    @property
    def is_busy(self) -> bool:
        """Whether it has work with a deadline."""
        return False

    def restart_clock(self) -> None:
        """Count the deadline from now, the latest possible start of its oldest work."""
        self.since = time.monotonic()

    def send(self, message: Any) -> None:
        """Queue a message, which `flush` writes."""
        self.outgoing += frame(msgspec.msgpack.encode(message))

    def flush(self) -> None:
        """Write as much as the socket takes; the next read detects a closed socket."""
        try:
            while self.outgoing:
                del self.outgoing[: self.wire.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()

    def receive_messages(self, decode: Callable[[bytes], _Message]) -> Iterator[_Message]:
        """Yield the messages that have arrived, then set `closed` and `invalid`."""
        try:
            while data := self.wire.recv(READ_BYTES):
                self.incoming += data
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        try:
            yield from map(decode, take_frames(self.incoming))
        except msgspec.MsgspecError as error:
            self.invalid = str(error)

    def kill(self, wait_s: float = 0.0) -> int:
        """Kill the process if it does not exit within `wait_s`; return its exit code."""
        self.wire.close()
        try:
            return self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


_Worker = TypeVar("_Worker", bound=Worker)
_Reply = TypeVar("_Reply", bound=Any)  # has `kind` and `why`


class WorkerPool(ABC, Generic[_Worker, _Reply]):
    """The workers of one kind.

    named: the config line of the user's code, for messages.
    make: starts the worker of this index.
    count: number of workers.
    reply: the type of a worker's replies.
    call_s: the deadline of one piece of work, in seconds.
    """

    subject = "its process"  # of messages about a lost worker
    hang_text: str  # {limit_s:g}: the deadline that a worker has passed
    start_text: str  # follows the number of workers lost in a row; {reason}: of the last one

    def __init__(
        self,
        named: str,
        make: Callable[[int], _Worker],
        count: int,
        reply: type[_Reply],
        call_s: float,
    ) -> None:
        self.named = named
        self.make = make
        self.decode = msgspec.msgpack.Decoder(reply).decode
        self.call_s = call_s
        self.start_s = max(GRACE_S, call_s)
        self.exit_s = 0.0  # seconds that workers get to exit when the pool closes
        self.lost_starts = 0  # workers in a row that were lost before they were ready
        self.workers = [make(index) for index in range(count)]

    def on_ready(self, worker: _Worker, reply: _Reply) -> None:
        """Handle the first reply of a worker."""

    @abstractmethod
    def on_reply(self, worker: _Worker, reply: _Reply) -> None:
        """Handle a reply to a worker's work."""

    @abstractmethod
    def on_lost(self, worker: _Worker, reason: str, *, hung: bool) -> None:
        """Handle the work of a worker that was killed.

        hung: it passed its deadline."""

    @property
    def wires(self) -> list[socket.socket]:
        return [worker.wire for worker in self.workers]

    def compute_deadline(self, worker: _Worker) -> float:
        """Return when this worker is overdue (CLOCK_MONOTONIC seconds); inf: never."""
        if not worker.ready:
            return worker.since + self.start_s
        return worker.since + self.call_s + worker.slack_s if worker.is_busy else math.inf

    def read(self) -> None:
        """Handle all replies and replace lost workers.

        Raises ConfigError when a worker cannot import its code.
        """
        for worker in list(self.workers):
            # checked first, so that the last replies of a worker that has exited are still read
            exited = worker.process.poll() is not None
            for reply in worker.receive_messages(self.decode):
                if reply.kind == "broken":
                    raise ConfigError(reply.why)
                if reply.kind == "ready":
                    worker.ready = True
                    worker.restart_clock()
                    self.lost_starts = 0
                    self.on_ready(worker, reply)
                else:
                    self.on_reply(worker, reply)
            if worker.invalid:
                self.replace(worker, f"{self.subject} sent an invalid reply ({worker.invalid})")
            elif worker.closed or exited:
                code = worker.kill(EXIT_S if worker.ready else 0.0)
                self.replace(worker, f"{self.subject} ended ({describe_exit(code)})")
            elif time.monotonic() > self.compute_deadline(worker):
                limit_s = self.call_s if worker.ready else self.start_s
                self.replace(worker, self.hang_text.format(limit_s=limit_s), hung=True)

    def replace(self, worker: _Worker, reason: str, *, hung: bool = False) -> None:
        """Kill a worker, handle its work and start another worker in its place.

        Raises ConfigError after START_TRIES workers that were lost before they were ready."""
        worker.kill()
        self.lost_starts += not worker.ready
        if self.lost_starts >= START_TRIES:
            text = self.start_text.replace("{reason}", reason)
            raise ConfigError(f"{self.named}: {self.lost_starts} {text}")
        self.on_lost(worker, reason, hung=hung)
        index = self.workers.index(worker)
        self.workers[index] = self.make(index)

    def flush(self) -> None:
        """Write queued messages, as far as the sockets take them."""
        for worker in self.workers:
            worker.flush()

    def close(self) -> None:
        """Close all sockets, then kill each worker that does not exit within `exit_s`."""
        for worker in self.workers:
            worker.wire.close()
        for worker in self.workers:
            worker.kill(self.exit_s)


# ---- in the worker -------------------------------------------------------------------------------


def read_frame(stream: Any) -> bytes | None:
    """Read one frame's payload; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    payload: bytes = stream.read(size)
    return payload if len(payload) == size else None


async def receive(reader: asyncio.StreamReader, kind: type[_Message]) -> _Message | None:
    """Receive a message in a worker's event loop; None at the end."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
    except (asyncio.IncompleteReadError, OSError):
        return None


class BoundedOutput(io.TextIOWrapper):
    """The worker's log of the output of user code, up to a number of characters."""

    remaining = PRINTED_CHARACTERS

    def write(self, text: str) -> int:
        """Write up to the limit; return the number of characters of the text."""
        if self.remaining > 0:
            super().write(text[: self.remaining])
            self.remaining -= len(text)
            if self.remaining <= 0:
                super().write("\n[the reward function has printed enough: the rest is dropped]\n")
        return len(text)


def run(serve: Callable[[socket.socket], None], argv: Sequence[str] = ()) -> None:
    """Run `serve` in the worker process, as its main program.

    Standard output goes to standard error, bounded: it is shared with the parent, whose `--json`
    output a print would corrupt. argv: FD and PARENT of the command line.
    """
    fd, parent = map(int, argv or sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # works while user code hangs
    if os.getppid() != parent:  # the parent exited before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = BoundedOutput(
        sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True
    )
    wire = socket.socket(fileno=fd)
    wire.set_inheritable(False)
    null = os.open(os.devnull, os.O_RDWR)

    def detach_child() -> None:
        global _is_forked
        _is_forked = True
        os.dup2(null, fd, inheritable=False)  # it neither reads the parent's work nor outlives it
        # an event loop shares its set of watched sockets with the parent's: to close the one would
        # take the wake-ups from the other
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if "eventpoll" in str(link.readlink()):
                    os.dup2(null, int(link.name), inheritable=False)

    os.register_at_fork(after_in_child=detach_child)
    try:
        serve(wire)
    except BrokenPipeError:
        pass
    finally:
        if _is_forked:
            os._exit(0)
