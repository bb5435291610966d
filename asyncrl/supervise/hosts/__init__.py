"""The interface between the supervisor and the hosts that run its processes.

A launcher only starts processes and reports their state.  The supervisor has all rules (which
process is restarted, how often, what ends the run, in which order); they are the same for all
launchers."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.contract import refusal
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.importing import end_with_parent
from asyncrl.contract.printable import LONGEST_LINE, escape_line

LEAK_REPORT = re.compile(r"\bleak|nanobind|skipped remainder|warnings\.warn\(", re.IGNORECASE)
TAIL_BYTES = 1 << 16  # bytes that are read from a log's end for its last lines


class ProcessSpec(NamedTuple):
    """The description of a process to start."""

    name: str  # buffer, learner, gateway-0, generator-0, ...
    argv: list[str]
    threads: int  # of OpenMP
    log: Path  # stdout and stderr are appended to this file, on whichever host the process runs


def read_last_lines(log: Path, count: int, longest: int = LONGEST_LINE) -> list[str]:
    """Read the last lines of a log, [] if it is missing.  The first line may be incomplete."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            last = file.read().decode(errors="replace").splitlines()[-count:]
            return [escape_line(line, longest) for line in last]
    except OSError:
        return []


def find_last_words(lines: list[str]) -> str:
    """Return the last line that a process wrote about itself, "" if there is none.

    Libraries report at exit what they did not free (nanobind, multiprocessing's resource tracker,
    torch.distributed); such a report does not explain the exit.

    >>> report = ["nanobind: leaked 2 types!", ' - leaked type "ir.context"', ""]
    >>> find_last_words(["error: no space left", *report])
    'error: no space left'
    """
    return next((x.strip() for x in reversed(lines) if x.strip() and not LEAK_REPORT.search(x)), "")


class ProcessHandle(Protocol):
    """A process that a launcher has started."""

    pid: int
    spec: ProcessSpec

    def poll(self) -> int | None:
        """Return the exit code, -N if signal N ended the process, or None while it runs."""

    def signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL; `poll` then returns the exit code."""

    def read_refusal(self) -> AsyncrlError | None:
        """Return the error that the process reported before its end, or None for a crash."""

    def tail(self, lines: int) -> list[str]:
        """Return the last lines of the log."""
        return read_last_lines(self.spec.log, lines)

    def close(self) -> None:
        """Release the handle's resources after the end of the process."""


class LocalProcess(ProcessHandle):
    """A child of this process, with a session of its own; it is killed when its parent exits."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._pipe, child_end = os.pipe()  # the child reports its refusal here
        env = os.environ | {
            "OMP_NUM_THREADS": str(spec.threads),
            "ASYNCRL_SUPERVISED": "1",
            "PYTHONUNBUFFERED": "1",
            refusal.VARIABLE: str(child_end),
        }
        try:
            with spec.log.open("ab") as log:
                self.popen = subprocess.Popen(
                    spec.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                    pass_fds=[child_end],
                    preexec_fn=end_with_parent(),
                )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(child_end)
        self.pid = self.popen.pid

    def poll(self) -> int | None:
        return self.popen.poll()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def read_refusal(self) -> AsyncrlError | None:
        return refusal.read_refusal(self._pipe) if self._pipe >= 0 else None

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


class ProcessLauncher:
    """The launcher for this machine, and the interface of a launcher for other hosts."""

    def prepare(self) -> None:
        """Prepare the hosts, once, before the first process; the run directory exists.

        Raises AsyncrlError when no process can be started."""

    def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start a process.  Raises AsyncrlError or OSError if it cannot be started."""
        return LocalProcess(spec)

    def count_slots(self) -> int | None:
        """Return how many generators fit in total, or None for no limit."""
        return None

    def close(self) -> None:
        """End all running processes; no process is started afterwards.

        On this machine, the kernel kills the children when this process exits."""
