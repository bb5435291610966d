"""A run directory: what lies in it, where its sockets and shared memory are, and who may use it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, buffer_leadership, private

SHM = Path("/dev/shm")
HELD = ".held"  # in a run's directory of shared memory: locked by its processes
LOOK_S = 2.0  # who looks whether a process lives has its lock for an instant (lives.alive)
_POLL_S = 0.05


def prepare(config: Config, toml: str, run_dir: Path, run: str = "") -> None:
    """Make a new run directory, with the resolved config, the command and the commit; run: id of
    the run, where it has one elsewhere.

    Raises ConfigError when the directory is used.
    """
    if (run_dir / "config.toml").exists():
        raise ConfigError(
            f"{run_dir} holds a run already: go on with it by `asyncrl run --resume {run_dir}`, or "
            "choose another name by --set name=..."
        )
    try:
        atomic_write.directory(run_dir, 0o700)
        for part in ("checkpoints", "logs", "trace"):
            (run_dir / part).mkdir(exist_ok=True)
        atomic_write.write(run_dir / "run_id", run or uuid.uuid4().hex[:12], sync=True)
    except OSError as error:
        raise unwritable_error(run_dir, error) from error
    (run_dir / "command").write_text(" ".join(sys.argv) + "\n", encoding="utf-8")
    git = (
        subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout
        if shutil.which("git")
        else ""
    )
    (run_dir / "commit").write_text(git or "unknown\n", encoding="utf-8")
    # last: a directory without it is made again
    atomic_write.write(run_dir / "config.toml", toml, sync=True)


def ensure(config: Config, toml: str, run_dir: Path, run: str = "") -> None:
    """The same for processes started by hand, in any order: whoever comes first makes the
    directory.
    """
    try:
        atomic_write.directory(run_dir, 0o700)
        making = (run_dir / ".making").open("w", encoding="utf-8")
    except OSError as error:
        raise unwritable_error(run_dir, error) from error
    with making as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run_dir / "config.toml").exists():
            prepare(config, toml, run_dir, run)


def unwritable_error(run_dir: Path, error: OSError) -> ConfigError:
    """A run directory that cannot be made."""
    return ConfigError(
        f"runs: the run directory {run_dir} cannot be made: {error.strerror}; choose another place "
        "by "
        "--set runs=DIR (or --run-dir)"
    )


def directory(config: Config, source: str) -> Path:
    """runs/NAME; without a name, the config file's and the time."""
    return Path(config.runs) / (
        config.name or f"{Path(source).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )


def note_limit(run_dir: Path, limit: float) -> None:
    """Remember the staleness limit that a run had until it was resumed with another one."""
    with (run_dir / "limits").open("a", encoding="utf-8") as file:
        file.write(f"{limit:g}\n")


def limits(run_dir: Path) -> list[float]:
    """The staleness limits of the run's earlier lives, where they were others."""
    path = run_dir / "limits"
    return [float(x) for x in path.read_text(encoding="utf-8").split()] if path.exists() else []


def run_id(run_dir: Path) -> str:
    return (run_dir / "run_id").read_text(encoding="utf-8").strip()


def directory_id(run_dir: Path) -> str:
    """Names this directory on this machine: a copy of it has the run's id too, and must not share
    its socket and its weights.
    """
    return f"{run_id(run_dir)}-{run_dir.stat().st_ino:x}"


def socket_dir(run_dir: Path) -> Path:
    """A private directory with a short path, for unix sockets (their paths may have 107 bytes)."""
    own = private.directory(Path(tempfile.gettempdir()) / f"asyncrl-{os.getuid()}")
    return private.directory(own / directory_id(run_dir))


def buffer_address(config: Config, run_dir: Path) -> str:
    return config.wires.address or f"ipc://{socket_dir(run_dir) / 'buffer'}"


def current_buffer_address(config: Config, run_dir: Path) -> str:
    """Where the run's buffer is now: as the config says, unless one elsewhere has taken over."""
    return buffer_leadership.current_address(run_dir) or buffer_address(config, run_dir)


def gateway_address(run_dir: Path, index: int) -> str:
    """Where generators take the calls of gateway `index`: on its own machine."""
    return f"ipc://{socket_dir(run_dir) / f'gateway-{index}'}"


def _memory_base() -> Path:
    return SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())


def shm_dir(run_dir: Path) -> Path:
    """The run's directory on the shared-memory file system."""
    return _memory_base() / f"asyncrl-{os.getuid()}-{directory_id(run_dir)}"


def hold_memory(run_dir: Path) -> IO[str]:
    """Make the run's directory of shared memory, and lock it for as long as this process lives, or
    the file is open: `sweep_memory` leaves it alone.
    """
    while True:
        held = private.directory(shm_dir(run_dir)) / HELD
        with contextlib.suppress(FileNotFoundError):  # swept at this moment
            file = held.open("a", encoding="utf-8")
            fcntl.flock(file, fcntl.LOCK_SH)
            if held.exists() and held.samefile(f"/proc/self/fd/{file.fileno()}"):
                return file
            file.close()


def sweep_memory() -> list[str]:
    """Remove the shared memory of this user's runs that no living process holds, as kill -9 of all
    of a run's processes leaves it.  Returns the names of the directories.

    A directory without a lock file is left alone: nothing says whose it is."""
    swept = []
    for place in _memory_base().glob(f"asyncrl-{os.getuid()}-*"):
        try:
            with open(os.open(place / HELD, os.O_RDWR | os.O_NOFOLLOW), encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
                swept.append(place.name)
        except OSError:  # no such file, or held
            continue
    return swept


def ring_dir(run_dir: Path, epoch: int) -> Path:
    return shm_dir(run_dir) / f"epoch_{epoch}"


def outside_directories(run_dir: Path) -> tuple[Path, Path]:
    """What a run has outside its directory: sockets and shared memory."""
    return shm_dir(run_dir), socket_dir(run_dir)


def remove(places: Sequence[Path]) -> None:
    """Remove what `outside_directories` named while the run's directory was there: it may be gone
    by now."""
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def clean(run_dir: Path) -> None:
    """Remove what a run leaves outside its directory."""
    remove(outside_directories(run_dir))


def is_finished(run_dir: Path, steps: int) -> bool:
    """Has the run made its `steps`, been evaluated, and left its model?  Its last buffer says so at
    its end; one that begins takes it back.
    """
    try:
        left = json.loads((run_dir / "buffer_summary.json").read_text(encoding="utf-8"))
        return (
            bool(left["finished"])
            and left["steps"] >= steps
            and (run_dir / "weights_digest").exists()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def clear_end(run_dir: Path) -> None:
    """A buffer begins: what was said of the run's end before does not hold any more."""
    for name in ("buffer_summary.json", "summary.json"):
        (run_dir / name).unlink(missing_ok=True)


def lock(file: IO[str], how: int, patience_s: float) -> None:
    """flock `file`.  Raises BlockingIOError when another has it for longer than `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(_POLL_S)


class RunLock:
    """One supervisor, or one set of processes, at a time in a run directory; freed by the kernel
    when its holder dies.
    """

    def __init__(self, run_dir: Path, what: str = "run") -> None:
        self.file = (run_dir / f".{what}.lock").open("a+", encoding="utf-8")
        try:
            lock(self.file, fcntl.LOCK_EX, LOOK_S)
        except BlockingIOError as error:
            self.file.seek(0)
            raise ConfigError(
                f"{run_dir} is in use by process {self.file.read().strip() or '?'}: stop that run "
                "first, or choose another name"
            ) from error
        self.file.truncate(0)
        self.file.write(str(os.getpid()))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def note_longest_prompt(run_dir: Path, name: str, tokens: int) -> None:
    """Keep how long a process's longest prompt was, for whoever finds it killed."""
    with contextlib.suppress(OSError):
        (run_dir / f".{name}.longest").write_text(str(tokens), encoding="utf-8")


def longest_prompt(run_dir: Path, name: str) -> int:
    """What the process of this name noted last; 0: nothing."""
    try:
        return int((run_dir / f".{name}.longest").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
