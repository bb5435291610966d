"""A process of ours that runs a user's code, and the frames to and from it: a length of four bytes,
then a payload, over a pair of sockets.

Its parent never waits for it; it ends with its parent, also while the user's code hangs."""

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

FRAME_BYTES = 64 * 1024 * 1024  # a larger frame is a broken worker
READ_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1

_Message = TypeVar("_Message")


def frame(payload: bytes) -> bytes:
    """The payload behind its length."""
    return len(payload).to_bytes(4, "big") + payload


def take_frames(incoming: bytearray) -> list[bytes]:
    """The payloads of the frames that are there whole, which are taken out.  Raises
    msgspec.DecodeError for a frame that is too large.
    """
    found = []
    at = 0
    while len(incoming) - at >= 4:
        size = int.from_bytes(incoming[at : at + 4], "big")
        if size > FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {size} bytes")
        if len(incoming) - at - 4 < size:
            break
        found.append(bytes(incoming[at + 4 : at + 4 + size]))
        at += 4 + size
    del incoming[:at]
    return found


class ChildProcess:
    """The parent's side: the process that runs `module`, what is to go to it and what has come."""

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
        """What has come, and whether its side has closed.  Raises msgspec.DecodeError for a frame
        that is too large.
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
        """The same, decoded; one that sends what cannot be is broken, as one that has ended."""
        try:
            payloads, closed = self.payloads()
            return [decode(payload) for payload in payloads], closed
        except msgspec.MsgspecError:
            return [], True

    def kill(self) -> int:
        """End it at once; its exit code."""
        self.process.kill()
        self.wire.close()
        return self.process.wait()

    def flush(self) -> None:
        """Write what its socket takes; a dead process is noticed when it is next read from."""
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
    """The process's side: what its main program does.  Standard output goes where errors go, cut by
    `bounded`: it is the parent's, whose `--json` a print would break.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while the function hangs
    if os.getppid() != parent:  # it ended before that
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
