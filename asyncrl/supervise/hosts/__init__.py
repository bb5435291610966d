"""The interface between the supervisor and the hosts that run its processes.

A launcher starts a process and reports its state, nothing more.  All rules (which process is
restarted, how often, what ends the run, in which order) are the supervisor's, the same for all
launchers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.printable import LONGEST_LINE, escape_line

TAIL_BYTES = 1 << 16  # of a log's end that are read for its last lines


class ProcessSpec(NamedTuple):
    """The description of a process to start."""

    name: str  # buffer, learner, gateway-0, generator-0, ...
    argv: list[str]
    threads: int  # of OpenMP
    log: Path  # stdout and stderr are appended here, wherever the process runs


class ProcessHandle(Protocol):
    """A process that a launcher has started."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, -N when signal N ended it; None while it runs."""

    def signal(self, number: int) -> None:
        """Send a signal; does nothing when it has ended."""

    def kill(self) -> None:
        """Send SIGKILL; `poll` then returns the exit code."""

    def read_refusal(self) -> AsyncrlError | None:
        """Return the error that it reported before its end; None for a crash."""

    def tail(self, lines: int) -> list[str]:
        """Return the last lines of its log."""

    def close(self) -> None:
        """Release the resources that watching it needs, after its end."""


class ProcessLauncher(Protocol):
    """Start processes on one kind of host."""

    def prepare(self) -> None:
        """Prepare the hosts, once, before the first process; the run directory exists.

        Raises AsyncrlError when no process can be started."""

    def start(self, order: ProcessSpec) -> ProcessHandle:
        """Start a process.  Raises AsyncrlError or OSError when it cannot be started."""

    def free_slots(self) -> int | None:
        """Return how many generators fit in all; None for no limit."""

    def close(self) -> None:
        """End all processes that still run; no process is started afterwards."""


def last_lines(log: Path, lines: int) -> list[str]:
    """Read the last lines of a log, [] if it is missing.  The first line may be incomplete."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode(errors="replace").splitlines()[-lines:]
            return [escape_line(line, LONGEST_LINE) for line in text]
    except OSError:
        return []
