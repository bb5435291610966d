"""Who starts the processes of a run, and where: makers, all behind one small interface.

A maker starts a process and says how it fares, and nothing else.  Every rule (what is started
again, how often, what ends the run, in which order) is the supervisor's, and the same for all."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.printable import LONGEST_LINE, escape_line

TAIL_BYTES = 1 << 16  # the end of a log that is looked at for its last lines


class ProcessSpec(NamedTuple):
    """A process to be started."""

    name: str  # buffer, learner, gateway-0, generator-0, ...
    argv: list[str]
    threads: int  # of OpenMP
    log: Path  # stdout and stderr are appended here, wherever the process runs


class ProcessHandle(Protocol):
    """A process that a maker has started."""

    pid: int

    def poll(self) -> int | None:
        """None while it runs; else its exit code, -N when signal N ended it."""

    def signal(self, number: int) -> None:
        """Send it a signal; nothing when it has ended."""

    def kill(self) -> None:
        """SIGKILL; `poll` says its end from here on."""

    def read_refusal(self) -> AsyncrlError | None:
        """After its end: the refusal that it told, None for a crash."""

    def tail(self, lines: int) -> list[str]:
        """The last lines of its log."""

    def close(self) -> None:
        """Let go of what watching it holds, once it has ended."""


class ProcessLauncher(Protocol):
    """Starts processes at one kind of place."""

    def prepare(self) -> None:
        """Once, before the first process: the run directory is there.  Raises AsyncrlError when
        nothing can be started.
        """

    def start(self, order: ProcessSpec) -> ProcessHandle:
        """Raises AsyncrlError or OSError where it cannot be started."""

    def free_slots(self) -> int | None:
        """How many generators it has places for; None: any number."""

    def close(self) -> None:
        """No process is started from here on; what still runs is ended."""


def last_lines(log: Path, lines: int) -> list[str]:
    """Of a log that may be large, or not there; the first of them may be cut."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            found = file.read().decode(errors="replace").splitlines()[-lines:]
            return [escape_line(line, LONGEST_LINE) for line in found]
    except OSError:
        return []
