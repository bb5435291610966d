"""The run directory: its files, its sockets and shared memory, and its locks."""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from asyncrl.config.sft import SftConfig
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, buffer_leadership, jsonl, private

SHM = Path("/dev/shm")
HELD = ".held"  # in a run's directory of shared memory, locked by its processes
LOOK_S = 2.0  # process_log.is_alive holds the lock of a process for an instant
_POLL_S = 0.05


def prepare(toml: str, run_dir: Path, run: str = "") -> None:
    """Create a run directory with the resolved config, the command and the commit.

    run: id of the run, if it exists elsewhere.  Raises ConfigError if the directory is in use."""
    if (run_dir / "config.toml").exists():
        raise ConfigError(
            f"{run_dir} holds a run already: continue it with `asyncrl run --resume {run_dir}`, or "
            "choose another name with --set name=..."
        )
    try:
        atomic_write.create_directory(run_dir, 0o700)
        for part in ("checkpoints", "logs", "trace"):
            (run_dir / part).mkdir(exist_ok=True)
        atomic_write.write(run_dir / "run_id", run or uuid.uuid4().hex[:12], sync=True)
    except OSError as error:
        raise make_unwritable_error(run_dir, error) from error
    (run_dir / "command").write_text(" ".join(sys.argv) + "\n", encoding="utf-8")
    git = ""
    if shutil.which("git"):
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout
    (run_dir / "commit").write_text(git or "unknown\n", encoding="utf-8")
    # written last: a directory without it is created again
    atomic_write.write(run_dir / "config.toml", toml, sync=True)


def ensure(toml: str, run_dir: Path, run: str = "") -> None:
    """Create the run directory unless another process started by hand has done so."""
    try:
        atomic_write.create_directory(run_dir, 0o700)
        making = (run_dir / ".making").open("w", encoding="utf-8")
    except OSError as error:
        raise make_unwritable_error(run_dir, error) from error
    with making as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run_dir / "config.toml").exists():
            prepare(toml, run_dir, run)


def make_unwritable_error(run_dir: Path, error: OSError) -> ConfigError:
    """Return the error for a run directory that cannot be created."""
    return ConfigError(
        f"runs: the run directory {run_dir} cannot be created: {error.strerror}; choose another "
        "place with --set runs=DIR (or --run-dir)"
    )


def choose_directory(config: Config | SftConfig, source: str, *, create: bool = False) -> Path:
    """Return runs/NAME. Without a name, the config file's name and the time take its place.

    create: create the directory of a run without a name, under a name that no other run has; runs
    that start in the same second get a number.  Raises ConfigError if it cannot be created."""
    path = Path(config.runs) / (
        config.name or f"{Path(source).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if config.name or not create:
        return path
    name, number = path.name, 1
    try:
        atomic_write.create_directory(path.parent)
        while True:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                atomic_write.sync_path(path.parent)
                return path
            number += 1
            path = path.with_name(f"{name}-{number}")
    except OSError as error:
        raise make_unwritable_error(path, error) from error


def remove_empty(*directories: Path) -> None:
    """Remove the directories in their order, up to the first one that holds something."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def read_run_id(run_dir: Path) -> str:
    return (run_dir / "run_id").read_text(encoding="utf-8").strip()


def derive_directory_id(run_dir: Path) -> str:
    """Return an id of this directory on this machine.

    A copy has the same run id, and must not share socket and weights."""
    return f"{read_run_id(run_dir)}-{run_dir.stat().st_ino:x}"


def ensure_socket_dir(run_dir: Path) -> Path:
    """Return a private directory with a short path: unix sockets allow at most 107 bytes."""
    user_dir = private.create_directory(Path(tempfile.gettempdir()) / f"asyncrl-{os.getuid()}")
    return private.create_directory(user_dir / derive_directory_id(run_dir))


def get_buffer_address(config: Config, run_dir: Path) -> str:
    return config.wires.address or f"ipc://{ensure_socket_dir(run_dir) / 'buffer'}"


def get_current_buffer_address(config: Config, run_dir: Path) -> str:
    """Return the buffer's address: the config's, unless a buffer elsewhere has taken over."""
    return buffer_leadership.read_current_address(run_dir) or get_buffer_address(config, run_dir)


def get_gateway_address(config: Config, run_dir: Path, index: int) -> str:
    """Return the address at which generators take the calls of gateway `index`."""
    return (
        config.wires.gateway_address or f"ipc://{ensure_socket_dir(run_dir) / f'gateway-{index}'}"
    )


def _choose_memory_base() -> Path:
    return SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else Path(tempfile.gettempdir())


def get_shm_dir(run_dir: Path) -> Path:
    """Return the run's directory on the shared-memory file system."""
    return _choose_memory_base() / f"asyncrl-{os.getuid()}-{derive_directory_id(run_dir)}"


def hold_memory(run_dir: Path) -> IO[str]:
    """Create the run's directory of shared memory and lock it while the returned file is open.

    `sweep_memory` does not remove a locked directory."""
    while True:
        lock_file = private.create_directory(get_shm_dir(run_dir)) / HELD
        with contextlib.suppress(FileNotFoundError):  # removed by a sweep meanwhile
            file = lock_file.open("a", encoding="utf-8")
            fcntl.flock(file, fcntl.LOCK_SH)
            if lock_file.exists() and lock_file.samefile(f"/proc/self/fd/{file.fileno()}"):
                return file
            file.close()


def sweep_memory() -> list[str]:
    """Remove the shared memory of this user's runs that no living process holds.

    It remains when all processes of a run are killed.  A directory without a lock file is kept,
    because its owner is unknown.  Returns the names of the removed directories."""
    swept = []
    for place in _choose_memory_base().glob(f"asyncrl-{os.getuid()}-*"):
        try:
            with open(os.open(place / HELD, os.O_RDWR | os.O_NOFOLLOW), encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(place, ignore_errors=True)
                swept.append(place.name)
        except OSError:  # no such file, or held
            continue
    return swept


def get_ring_dir(run_dir: Path, epoch: int) -> Path:
    return get_shm_dir(run_dir) / f"epoch_{epoch}"


def list_numbered(directory: Path, pattern: str) -> dict[int, Path]:
    """Return number -> path, ascending, of the names in a directory that match a pattern."""
    matches = ((re.fullmatch(pattern, path.name), path) for path in directory.glob("*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def list_outside_directories(run_dir: Path) -> tuple[Path, Path]:
    """Return a run's directories outside its own: shared memory and sockets."""
    return get_shm_dir(run_dir), ensure_socket_dir(run_dir)


def remove(places: Sequence[Path]) -> None:
    """Remove `list_outside_directories`, determined before the run directory itself was removed."""
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


def clean(run_dir: Path) -> None:
    """Remove a run's directories outside its own."""
    remove(list_outside_directories(run_dir))


def is_finished(run_dir: Path, steps: int) -> bool:
    """Decide whether the run has made its `steps`, evaluated and written its model.

    The last buffer records this at its end, and a new buffer removes the record."""
    summary = jsonl.read_object(run_dir / "buffer_summary.json")
    return bool(
        summary.get("finished")
        and summary.get("steps", 0) >= steps
        and (run_dir / "weights_digest").exists()
    )


def clear_end(run_dir: Path) -> None:
    """Remove the record of the run's end when a buffer starts."""
    for name in ("buffer_summary.json", "summary.json"):
        (run_dir / name).unlink(missing_ok=True)


def lock(file: IO[str], how: int, patience_s: float) -> None:
    """Lock `file`.  Raises BlockingIOError if another process keeps it longer than `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(_POLL_S)


def make_in_use_error(run_dir: Path, process: str) -> ConfigError:
    return ConfigError(
        f"{run_dir} is in use by process {process.strip() or '?'}: stop that run first, or choose "
        "another name"
    )


def require_run(run_dir: Path) -> None:
    """Raise ConfigError unless the directory is a run's."""
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: no run directory (it has no config.toml)")


def refuse_if_in_use(run_dir: Path) -> None:
    """Raise ConfigError if a supervisor of this machine holds the run.  Writes nothing."""
    try:
        with (run_dir / ".run.lock").open("r", encoding="utf-8") as file:
            process = file.read()
            lock(file, fcntl.LOCK_SH, LOOK_S)
    except FileNotFoundError:
        return
    except BlockingIOError as error:
        raise make_in_use_error(run_dir, process) from error


def hold(
    path: Path, how: int, patience_s: float, make_error: Callable[[str], ConfigError]
) -> IO[str]:
    """Lock a file while it is open, and write this process's id into it.

    make_error: makes the error from the process id of the holder, if another process has it."""
    file = path.open("a+", encoding="utf-8")
    try:
        lock(file, how, patience_s)
    except BlockingIOError as error:
        file.seek(0)
        raise make_error(file.read().strip()) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


class RunLock:
    """Lock that admits one supervisor, or one set of processes, to a run directory.

    The kernel frees it when its holder exits."""

    def __init__(self, run_dir: Path, name: str = "run") -> None:
        make_error = partial(make_in_use_error, run_dir)
        self.file = hold(run_dir / f".{name}.lock", fcntl.LOCK_EX, LOOK_S, make_error)

    def close(self) -> None:
        self.file.close()


def note_longest_prompt(run_dir: Path, name: str, tokens: int) -> None:
    """Record the length of a process's longest prompt, to explain a kill for lack of memory."""
    with contextlib.suppress(OSError):
        (run_dir / f".{name}.longest").write_text(str(tokens), encoding="utf-8")
