"""The files of a run for generators on other machines: model, prompts, reward.

The learner's chunk server lists them with their SHA-256 and serves them in chunks. The receiver
keeps them in a cache with one folder per digest, and continues after a broken connection. Code is
served only if the run permits it (`reward.share`).
"""

from __future__ import annotations

import fcntl
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from asyncrl.config.tree import Config, JudgeConfig
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError, DamagedDataError, PeerUnreachable
from asyncrl.records import private

# the purpose of a file; of a part of a mixture: mixture.LABEL.prompts
Part = Annotated[
    str,
    Meta(
        pattern=r"^(model|(mixture\.[a-z0-9-]+\.)?"
        r"(reward_model|prompts|heldout|ood|template|reward)|reward\.functions\.\d+)\Z"
    ),
]
# files of a model directory, without code and weights in other formats
MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja")
PROMPTS = ("prompts", "heldout", "ood")  # keys of a task that name files
TRIES = 5  # connections per file
# reads a file by its digest, from one byte up to another; raises PeerUnreachable
# (`asyncrl.transport.chunks.ChunkClient.read_file`)
ReadFile = Callable[[str, int, int], Iterator[bytes]]


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file of the run.

    given: whether it may be fetched; otherwise only its digest is published."""

    part: Part
    name: str  # without a folder
    size: int
    digest: str  # SHA-256
    given: bool


def compute_digest(path: Path) -> str:
    """Compute the SHA-256 of a file, as hex digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_code(function: str) -> Path | None:
    """Find the file of `module:function` or `file.py:function`.

    Returns None for a package, which must be installed instead.
    """
    name = function.rpartition(":")[0]
    if name.endswith(".py"):
        return Path(name)
    source = importing.find_source(name) if name and "." not in name else None
    return None if source is None or source.name == "__init__.py" else source


def list_served_files(config: Config) -> list[tuple[Part, Path, bool]]:
    """List the files that a generator of this run reads: (part, file, may be fetched).

    Raises ValueError for prompts that are not a single file."""
    directories = {"model": config.model.path}
    if not config.uses_sessions:  # otherwise prompts and rewards belong to the gateway
        directories["reward_model"] = config.reward.model.path
        for part in config.task.mixture:
            directories[f"mixture.{part.title}.reward_model"] = part.reward_model.path
    files = [
        (name, path, True)
        for name, directory in directories.items()
        if directory
        for path in sorted(Path(directory).iterdir())
        if path.suffix in MODEL_FILES and path.is_file()
    ]
    if config.uses_sessions:
        return files
    parts = ((f"mixture.{part.title}.", part) for part in config.task.mixture)
    prompts = [
        (f"{prefix}{key}", getattr(task, key))
        for prefix, task in [("", config.task), *parts]
        for key in PROMPTS
    ]
    templates = {
        f"{prefix}template": judge.template for prefix, judge in list_judges(config).items()
    }
    for name, file in (*prompts, *templates.items()):
        if file and not Path(file).is_file():
            raise ValueError(
                f"task.{name} = {file} is not a single file; a machine that joins gets files"
            )
        if file:
            files.append((name, Path(file), True))
    for name, function in list_reward_functions(config).items():
        code = find_code(function)
        if code is not None:
            files.append((name, code, config.reward.share))
    return files


def list_judges(config: Config) -> dict[str, JudgeConfig]:
    """List {prefix of its keys: judge} of the run and of its mixture's parts."""
    parts = {f"mixture.{part.title}.": part.judge for part in config.task.mixture}
    judges = {"": config.reward.judge} | parts
    return {prefix: judge for prefix, judge in judges.items() if judge.url}


def list_reward_functions(config: Config) -> dict[Part, str]:
    """List {part: reward function} of the run and of its mixture's parts."""
    functions = {"reward": config.reward.function}
    functions |= {f"reward.functions.{i}": path for i, path in enumerate(config.reward.functions)}
    functions |= {f"mixture.{part.title}.reward": part.reward for part in config.task.mixture}
    return {part: function for part, function in functions.items() if function}


class FileServer:
    """The files that the chunk server serves.

    Digests of large models take seconds. A thread computes them once, on the first request.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.entries: list[FileEntry] | None = None
        self.error = ""  # the error that prevents a listing
        self._paths: dict[str, Path] = {}
        self._thread: threading.Thread | None = None

    def list_files(self) -> list[FileEntry] | None:
        """List the files; None while the digests are being computed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._refresh, name="library", daemon=True)
            self._thread.start()
        return self.entries

    def _refresh(self) -> None:
        entries = []
        try:
            for part, path, given in list_served_files(self.config):
                digest = compute_digest(path)
                entries.append(FileEntry(part, path.name, path.stat().st_size, digest, given))
                if given:
                    self._paths[digest] = path
        except (OSError, ImportError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
            return
        self.entries = entries

    def read(self, digest: str, offset: int, size: int) -> bytes:
        """Read bytes of a file that may be fetched; none of any other file. Raises OSError."""
        if (path := self._paths.get(digest)) is None:
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


# ---- the cache -----------------------------------------------------------------------------------


def name_folder(entries: list[FileEntry]) -> str:
    """Name the cache folder of these files by their contents."""
    rows = "".join(sorted(f"{entry.digest} {entry.name}\n" for entry in entries))
    return f"{entries[0].part}-{hashlib.sha256(rows.encode()).hexdigest()[:32]}"


def is_complete(directory: Path, entry: FileEntry) -> bool:
    """Whether `directory` has the file with all its bytes."""
    path = directory / entry.name
    has_size = path.is_file() and path.stat().st_size == entry.size
    return has_size and compute_digest(path) == entry.digest


def fetch_files(
    read_file: ReadFile, entries: list[FileEntry], cache: Path, log: Callable[[str], None]
) -> Path:
    """Fetch the missing files of one part; return their folder in the cache.

    log: receives lines about the progress.
    Raises DamagedDataError when bytes do not match their digest, PeerUnreachable, OSError.
    """
    for name in (entry.name for entry in entries):
        if not name or Path(name).name != name or name in (".", "..") or not name.isprintable():
            raise DamagedDataError(f"the run has a file with an unsafe name: {name[:80]!r}")
    directory = private.create_directory(cache) / name_folder(entries)
    with (cache / f"{directory.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two joining generators, only one fetches
        part = directory
        if not directory.is_dir():
            part = private.create_directory(cache / f"{directory.name}.part")
        missing = [entry for entry in entries if not is_complete(part, entry)]
        for entry in missing:
            log(f"fetching {entry.part}: {entry.name}, {entry.size / 2**20:.1f} MiB")
            fetch(read_file, entry, part / entry.name)
        if not missing:
            log(f"{entries[0].part}: from the cache, {directory}")
        if part != directory:
            part.rename(directory)
    return directory


def fetch(read_file: ReadFile, entry: FileEntry, path: Path) -> None:
    """Fetch one file, or continue a partial one; `path` appears when it is complete.

    Raises DamagedDataError when its bytes do not match the digest, PeerUnreachable, OSError."""
    part = path.with_name(path.name + ".part")
    for tries_left in reversed(range(TRIES)):
        size = part.stat().st_size if part.exists() else 0
        try:
            with part.open("ab") as file:
                for data in read_file(entry.digest, min(size, entry.size), entry.size):
                    file.write(data)
            break
        except PeerUnreachable:
            if not tries_left:
                raise
    if compute_digest(part) != entry.digest:
        part.unlink()
        raise DamagedDataError(
            f"{entry.part}: {entry.name} does not match its digest: was the file changed since the "
            "run began? Stop the run and continue it with --resume"
        )
    part.replace(path)


def check_local_code(function: str, entry: FileEntry | None, key: str = "reward.function") -> None:
    """Check that the local copy of an unshared reward function is the run's.

    entry: the run's file; None: the function is in an installed package.
    key: the config key of the function, for the error.
    Raises ConfigError.
    """
    if entry is None:
        return
    try:
        local_file = find_code(function)
    except (ImportError, ValueError):
        local_file = None
    if local_file is None or not local_file.is_file():
        difference = "is not here"
    elif compute_digest(local_file) != entry.digest:
        difference = f"differs from {local_file}"
    else:
        return
    raise ConfigError(
        f"{key} = {function}: the run's {entry.name} {difference}; copy it here, or let the run "
        "share it: reward.share = true"
    )
