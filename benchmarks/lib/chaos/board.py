"""Shared memory of one run of `benchmarks/chaos.py`, and the faults that its processes carry out.

It has each process's orders (what to do at which point of its work), its state and its counters."""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

ROLES = (
    "supervisor",
    "buffer",
    "learner",
    "generator-0",
    "generator-1",
    "reward-0",
    "reward-1",
    "gateway-0",
)
# topology -> the kinds of processes that get faults
TOPOLOGIES = {
    "tickets": ("supervisor", "buffer", "learner", "generator", "reward"),
    "sessions": ("supervisor", "buffer", "learner", "generator", "gateway"),
}
# kind of victim -> the points of its work where it can be held
POINTS = {
    "supervisor": ("idle", "mid-start"),
    "buffer": ("idle", "mid-journal", "mid-answer"),
    "learner": ("idle", "mid-step", "mid-publication", "mid-checkpoint"),
    "generator": ("idle", "mid-answer", "mid-send"),
    "reward": ("idle", "mid-answer", "mid-send"),
    "gateway": ("idle", "mid-answer", "mid-send"),
}
# the faults: SIGKILL, SIGSTOP with a later SIGCONT, broken connections, jumping clocks, a full
# disk, and a flipped byte in a file that it has written, followed by SIGKILL
ACTIONS = ("kill", "stop", "cut", "clock", "disk", "flip")
MAY = {
    "supervisor": ("kill", "stop", "clock", "flip"),
    "buffer": ("kill", "stop", "cut", "clock", "disk"),
    "learner": ("kill", "stop", "cut", "clock", "disk", "flip"),
    "generator": ("kill", "stop", "cut", "clock", "disk"),
    "reward": ("kill", "stop"),
    "gateway": ("kill", "stop"),
}
SLOT = 128
# offsets in a role's slot
ORDER, ACTION, OBEYED = 0, 1, 2  # a byte each
PID, LIVES, WORK, LOST, DOUBLED, HELD = 8, 16, 24, 32, 40, 48  # int64
WALL, MONOTONIC, JUMP = 56, 64, 72  # float64, seconds


def kind_of(role: str) -> str:
    return role.partition("-")[0]


class Board:
    """A slot for each role.  Only its own process writes into it, but for the order."""

    def __init__(self) -> None:
        self.shared = mmap.mmap(-1, 4096)

    def _at(self, role: str, offset: int) -> int:
        return SLOT * ROLES.index(role) + offset

    def number(self, role: str, offset: int) -> int:
        return int(struct.unpack_from("<q", self.shared, self._at(role, offset))[0])

    def put(self, role: str, offset: int, value: int) -> None:
        struct.pack_into("<q", self.shared, self._at(role, offset), value)

    def count(self, role: str, offset: int) -> None:
        self.put(role, offset, self.number(role, offset) + 1)

    def seconds(self, role: str, offset: int) -> float:
        return float(struct.unpack_from("<d", self.shared, self._at(role, offset))[0])

    def put_seconds(self, role: str, offset: int, value: float) -> None:
        struct.pack_into("<d", self.shared, self._at(role, offset), value)

    # ---- orders ----------------------------------------------------------------------------------

    def give(self, role: str, point: str, action: str, jump: float = 0.0) -> None:
        """jump: of its monotonic clock, and some thousand times that of the clock on the wall."""
        self.put_seconds(role, JUMP, jump)
        self.shared[self._at(role, ACTION)] = ACTIONS.index(action)
        self.shared[self._at(role, OBEYED)] = 0
        self.shared[self._at(role, ORDER)] = 1 + POINTS[kind_of(role)].index(point)

    def take_back(self, role: str) -> None:
        """The point was not come to."""
        self.shared[self._at(role, ORDER)] = 0

    def obeyed(self, role: str) -> bool:
        return bool(self.shared[self._at(role, OBEYED)])

    def reached(self, role: str, point: str) -> bool:
        order = self.shared[self._at(role, ORDER)]
        return bool(order) and order == 1 + POINTS[kind_of(role)].index(point)

    def action(self, role: str) -> str:
        return ACTIONS[self.shared[self._at(role, ACTION)]]

    def obey(self, role: str, *, room: int = 0, where: Path | None = None) -> None:
        """In the process, at the point.  room: bytes that a file of it may have on a full disk;
        where: what a byte is flipped in."""
        action = self.action(role)
        self.shared[self._at(role, ORDER)] = 0
        self.shared[self._at(role, OBEYED)] = 1
        if action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "cut":
            cut_connections()
        elif action == "clock":
            jump = self.seconds(role, JUMP)
            # forth and back, by up to some hours
            wall = jump * random.Random(jump).choice((-1000.0, -100.0, 100.0, 1000.0))
            self.put_seconds(role, WALL, self.seconds(role, WALL) + wall)
            self.put_seconds(role, MONOTONIC, self.seconds(role, MONOTONIC) + jump)
        elif action == "disk":
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        else:
            if action == "flip" and where is not None:
                flip(where, random.Random(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    # ---- clocks ----------------------------------------------------------------------------------

    def own_clocks(self, role: str) -> None:
        """From here on this process's clocks are those of its slot."""
        wall, nanoseconds, monotonic = time.time, time.time_ns, time.monotonic
        time.time = lambda: wall() + self.seconds(role, WALL)
        time.time_ns = lambda: nanoseconds() + int(1e9 * self.seconds(role, WALL))
        time.monotonic = lambda: monotonic() + self.seconds(role, MONOTONIC)


def cut_connections() -> int:
    """Shut down every connected stream socket of this process: what was under way is lost."""
    broken = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with found:
            try:
                path = found.getsockname() or found.getpeername()
                named = bool(path) and found.family == socket.AF_UNIX
                if named and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.shutdown(socket.SHUT_RDWR)
                    broken += 1
            except OSError:
                continue
    return broken


def flip(path: Path, choice: random.Random) -> tuple[Path, int, bytes]:
    """Another byte at one place of a file, or of one of a directory's files; returns the file, the
    place, and what was there."""
    files = sorted(x for x in path.rglob("*") if x.is_file()) if path.is_dir() else [path]
    file = choice.choice([x for x in files if x.stat().st_size])
    place = choice.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(place)
        was = opened.read(1)
        opened.seek(place)
        opened.write(bytes([was[0] ^ (1 << choice.randrange(8))]))
    return file, place, was


def mend(found: tuple[Path, int, bytes]) -> None:
    """Undo `flip`."""
    file, place, was = found
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(was)


class Notes:
    """A record that a killed process leaves behind: one write a row."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, row: Any) -> None:
        """The disk that is full for the process is not full for its record."""
        import json

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        os.write(self.fd, json.dumps(row).encode() + b"\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
