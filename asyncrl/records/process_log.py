"""Log of a run's processes: the ones that run, and the ends of earlier ones.

`asyncrl doctor` reads it when no process answers.

```
RUN/logs/lives.jsonl   a row when a process starts and one when it ends; a killed process leaves no
                       second row unless a supervisor recorded its end
RUN/.NAME.alive        locked by the running process of that name; the kernel frees it at its end
RUN/.parts.lock        shared by all running processes; a process that gets it exclusively is the
                       last one (`conclude_unsupervised` in asyncrl/supervise/run.py)
```
"""

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import describe_exit, escape_line
from asyncrl.records import jsonl, machine_memory, rundir
from asyncrl.records.jsonl import JsonObject

# exit codes: asked to stop, nothing left to do, replaced by another process
INTERRUPTED = 130
NOTHING = 6
TAKEN_OVER = 7
# exit codes of signals from outside; the kernel also sends SIGKILL when memory runs out
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
RANK_LOST = 137
AGAIN_S = 5.0  # a restarted process waits this long for the locks of its predecessor


PreviousEnd = Literal["", "ended", "outside", "killed", "crashed"]


def is_supervised() -> bool:
    """Whether a supervisor started this process."""
    return bool(os.environ.get("ASYNCRL_SUPERVISED"))


def stop_at_signals(stop: Callable[[int, object], None]) -> None:
    """Call `stop` at SIGTERM, and at SIGINT unless the supervisor handles that."""
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_supervised() else stop)


def get_path(run_dir: Path) -> Path:
    return run_dir / "logs" / "lives.jsonl"


def append_event(run_dir: Path, name: str, pid: int, event: str, **details: Any) -> None:
    """Add a row, or ignore a directory that cannot be written: the rows are only informative."""
    row = {
        "at": time.time(),
        "name": name,
        "pid": pid,
        "host": socket.gethostname(),
        "event": event,
    } | details
    with contextlib.suppress(OSError):
        get_path(run_dir).parent.mkdir(exist_ok=True)
    jsonl.note(get_path(run_dir), row)


def read_events(run_dir: Path) -> list[JsonObject]:
    """Read all rows, oldest first; incomplete rows are left out."""
    rows = jsonl.read(get_path(run_dir))
    return [row for row in rows if {"at", "name", "pid", "event"} <= row.keys()]


def read_latest_events(run_dir: Path) -> dict[str, JsonObject]:
    """Return the newest row of each process.

    The end of a replaced process is ignored: it may come long after its successor's start."""
    return {row["name"]: row for row in read_events(run_dir) if row.get("code") != TAKEN_OVER}


def find_shared_cores(run_dir: Path) -> int | None:
    """Return the cores that learner and generators share; None: unknown, or several machines."""
    starts = [row for row in read_events(run_dir) if row["event"] == "began"]
    machines = {
        (row.get("host"), row.get("cores"))
        for row in starts
        if row["name"] == "learner" or row["name"].startswith("generator-")
    }
    return machines.pop()[1] if len(machines) == 1 else None


def list_failed_ends(run_dir: Path) -> list[JsonObject]:
    """Return the newest row of each process that failed or vanished, oldest first."""
    bad = [
        r
        for r in read_latest_events(run_dir).values()
        if (
            r.get("code") not in (0, NOTHING)
            if r["event"] != "began"
            else not is_alive(run_dir, r["name"])
        )
    ]
    return sorted(bad, key=lambda r: float(r["at"]))


def read_memory_kills() -> list[str | int]:
    """Return the machine's boot id and its number of out-of-memory kills, or [] if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return []
    kills = machine_memory.count_memory_kills()
    return [] if kills is None else [boot, kills]


def find_previous_end(run_dir: Path, pid: int) -> PreviousEnd:
    """Return how the incarnation of the learner before process `pid` ended; "" if there was none.

    ended: normally, or as asked.
    crashed: by its own error.
    outside: by a signal or without a trace, with a cause outside: an operator, a scheduler, its
    machine.
    killed: the same, but its supervisor ended it for holding up the run, the kernel has killed a
    process for lack of memory since it began, or the number of such kills is unknown."""
    past = [row for row in read_events(run_dir) if row["name"] == "learner" and row["pid"] != pid]
    if not past:
        return ""
    newest = past[-1]
    code = newest.get("code")
    if code in (0, NOTHING, INTERRUPTED) or newest.get("asked"):
        return "ended"
    if code == RANK_LOST or newest.get("held_up"):
        return "killed"
    if newest["event"] != "began" and code not in FROM_OUTSIDE:
        return "crashed"
    if code in FROM_OUTSIDE and code != -signal.SIGKILL:
        return "outside"
    starts = [row for row in past if row["event"] == "began" and row["pid"] == newest["pid"]]
    kills_before = starts[-1].get("memory_kills") if starts else None
    kills_now = read_memory_kills()
    if (
        not kills_before
        or not kills_now
        or (kills_before[0] == kills_now[0] and kills_before != kills_now)
    ):
        return "killed"
    return "outside"  # the machine has changed or rebooted


def describe_end(row: JsonObject) -> str:
    """Describe the end of a process in one line.

    >>> row = {"at": 0.0, "name": "learner", "pid": 7, "event": "ended", "code": 1}
    >>> describe_end(row | {"why": "KeyError: 3"}).split(" at ")[0]
    'learner (process 7) ended with exit code 1: KeyError: 3'
    """
    process = f"{row['name']} (process {row['pid']})"
    reason = escape_line(str(row.get("why") or ""))
    code = row.get("code")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(row["at"])))
    if row["event"] == "began":
        return (
            f"{process} ended without a report (by SIGKILL, for lack of memory, or with its "
            f"machine), some time after {when}"
        )
    if code == INTERRUPTED:
        return f"{process} was asked to end, and ended at {when}"
    ending = describe_exit(int(row["code"]))
    return f"{process} ended with {ending}{': ' + reason if reason else ''} at {when}"


def get_lock(run_dir: Path, name: str) -> Path:
    return run_dir / (".run.lock" if name == "supervisor" else f".{name}.alive")


def is_alive(run_dir: Path, name: str) -> bool:
    """Decide whether a process of this name runs in this directory on this machine.

    name: `supervisor`, or the name of a process of the run."""
    try:
        with get_lock(run_dir, name).open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def list_alive(run_dir: Path) -> list[str]:
    """List the processes that run in this directory on this machine, the supervisor first."""
    names = [path.name[1:].removesuffix(".alive") for path in sorted(run_dir.glob(".*.alive"))]
    return [name for name in ("supervisor", *names) if is_alive(run_dir, name)]


class ProcessIncarnation:
    """One incarnation of a process, visible to the others while it runs.

    alone: only one process may have its name.  Learners share theirs: the newer epoch wins.

    Raises ConfigError if a process of this name runs already.  A process started by a supervisor
    first waits AGAIN_S for its predecessor."""

    def __init__(self, run_dir: Path, name: str, *, alone: bool, supervised: bool = False) -> None:
        self.run_dir = run_dir
        self.name = name
        self.directory_lock = (run_dir / ".parts.lock").open("a", encoding="utf-8")
        # waits while the last process of the earlier ones writes summary and report
        fcntl.flock(self.directory_lock, fcntl.LOCK_SH)
        other = "give this one another --index, or " if name.startswith("generator") else ""
        self.name_lock = rundir.hold(
            get_lock(run_dir, name),
            fcntl.LOCK_EX if alone else fcntl.LOCK_SH,
            AGAIN_S if supervised else rundir.LOOK_S,
            lambda pid: ConfigError(
                f"{name} of {run_dir} is running already{f' as process {pid}' if pid else ''}: "
                f"{other}end that one first"
            ),
        )
        append_event(
            run_dir,
            name,
            os.getpid(),
            "began",
            supervised=supervised,
            memory_kills=read_memory_kills(),
            cores=len(os.sched_getaffinity(0)),
        )

    def end(self, code: int, reason: str = "") -> bool:
        """Record the end with its exit code and error, if any.

        Returns whether it is the last process of the directory, which it owns until `release`."""
        append_event(self.run_dir, self.name, os.getpid(), "ended", code=code, why=reason)
        self.name_lock.close()
        try:
            # releases the shared lock first, so that one of two ending processes gets it
            fcntl.flock(self.directory_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        self.directory_lock.close()
