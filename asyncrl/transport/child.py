"""A child process that runs user code, and length-prefixed frames to and from it.

A frame is a length of four bytes and a payload, over a socket pair. The parent never blocks on the
child. The child ends with its parent, even while the user's code hangs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from asyncrl.contract import importing

FRAME_BYTES = 64 * 1024 * 1024  # a larger frame means a broken child
READ_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1

_Message = TypeVar("_Message")


def frame(payload: bytes) -> bytes:
    """Prefix the payload with its length."""
    return len(payload).to_bytes(4, "big") + payload


def take_frames(incoming: bytearray) -> list[bytes]:
    """Remove the complete frames from `incoming` and return their payloads.

    Raises msgspec.DecodeError for a frame that is too large.
    """
    payloads = []
    start = 0
    while len(incoming) - start >= 4:
        size = int.from_bytes(incoming[start : start + 4], "big")
        if size > FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {size} bytes")
        if len(incoming) - start - 4 < size:
            break
        payloads.append(bytes(incoming[start + 4 : start + 4 + size]))
        start += 4 + size
    del incoming[:start]
    return payloads


class ChildProcess:
    """The parent's side of a process that runs `module`, with pending frames."""

    def __init__(self, module: str, setup: bytes) -> None:
        self.wire, theirs = socket.socketpair()
        with theirs:
            argv = importing.command(module, str(theirs.fileno()), str(os.getpid()))
            self.process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self.wire.setblocking(False)
        self.incoming = bytearray()
        self.outgoing = bytearray(frame(setup))

    def payloads(self) -> tuple[list[bytes], bool]:
        """Return the payloads that have arrived and whether the child closed its side.

        Raises msgspec.DecodeError for a frame that is too large.
        """
        closed = False
        try:
            while data := self.wire.recv(READ_BYTES):
                self.incoming += data
            closed = True
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        return take_frames(self.incoming), closed

    def receive_messages(self, decode: Callable[[bytes], _Message]) -> tuple[list[_Message], bool]:
        """Return decoded messages; a child that sends undecodable bytes counts as closed."""
        try:
            payloads, closed = self.payloads()
            return [decode(payload) for payload in payloads], closed
        except msgspec.MsgspecError:
            return [], True

    def kill(self) -> int:
        """Kill the process and return its exit code."""
        self.process.kill()
        self.wire.close()
        return self.process.wait()

    def flush(self) -> None:
        """Write as much as the socket takes; a closed one is noticed by the next read."""
        try:
            while self.outgoing:
                del self.outgoing[: self.wire.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()


def run(
    fd: int, parent: int, serve: Callable[[socket.socket], None], bounded: Callable[[Any], Any]
) -> None:
    """Run `serve` in the child process, as its main program.

    Standard output goes to standard error, limited by `bounded`: it is shared with the parent,
    whose `--json` output a print would corrupt.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # works while user code hangs
    if os.getppid() != parent:  # the parent exited before the line above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = bounded(sys.stderr)
    wire = socket.socket(fileno=fd)
    wire.set_inheritable(False)
    try:
        serve(wire)
    except BrokenPipeError:
        pass
