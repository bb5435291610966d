"""The files of a run for generators on other machines: model, prompts, reward.

The learner's chunk server lists them with their SHA-256 and serves them in chunks. The receiver
keeps them in a cache with one folder per digest, and continues after a broken connection. Code is
served only if the run permits it (`reward.share`).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from asyncrl.config.scorers import JudgeConfig
from asyncrl.config.tree import Config, TaskSource
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError, DamagedDataError, PeerUnreachable
from asyncrl.records import private

# what a file is for; of a part of a mixture: mixture.LABEL.prompts
Part = Annotated[
    str,
    Meta(
        pattern=r"^(model|(mixture\.[a-z0-9-]+\.)?"
        r"(reward_model|prompts|heldout|ood|template|reward))\Z"
    ),
]
# files of a model directory, without code and weights in other formats
MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja")
PROMPTS = ("prompts", "heldout", "ood")  # keys of a task that name files
TRIES = 5  # connections per file


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file. given: it may be fetched; otherwise only its digest is published."""

    part: Part
    name: str  # without a folder
    size: int
    digest: str  # SHA-256
    given: bool


class FileSource(Protocol):
    """A source of file bytes: `asyncrl.transport.chunks.ChunkClient`."""

    def file(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
        """Yield the bytes from `begin` to `size`, in order. Raises PeerUnreachable."""


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_file(function: str) -> Path | None:
    """Return the file of `module:function` or `file.py:function`.

    None for a package, which must be installed instead.
    """
    name = function.rpartition(":")[0]
    if name.endswith(".py"):
        return Path(name)
    if not name or "." in name:
        return None
    importing.append_working_directory()
    spec = importlib.util.find_spec(name)
    is_single_file = (
        spec is not None and spec.origin is not None and not spec.submodule_search_locations
    )
    return Path(str(spec.origin)) if spec is not None and is_single_file else None


def files_to_serve(config: Config) -> list[tuple[Part, Path, bool]]:
    """List what a generator of this run reads: (part, file, may be fetched)."""
    directories = [("model", config.model.path)]
    if config.uses_sessions:  # whose prompts and rewards are the gateway's
        return _model_files(directories)
    directories.append(("reward_model", config.reward.model.path))
    directories += [
        (f"mixture.{part.title}.reward_model", part.reward_model.path)
        for part in config.task.mixture
    ]
    files = _model_files(directories)
    prompts = [
        (f"{prefix}{key}", getattr(task, key))
        for prefix, task in mixed_tasks(config)
        for key in PROMPTS
    ]
    templates = {f"{prefix}template": judge.template for prefix, judge in judges(config).items()}
    for part, name in (*prompts, *templates.items()):
        if name and not Path(name).is_file():
            raise ValueError(
                f"task.{part} = {name} is not a single file; a machine that joins gets files"
            )
        if name:
            files.append((part, Path(name), True))
    for part, function in reward_functions(config).items():
        code = code_file(function)
        if code is not None:
            files.append((part, code, config.reward.share))
    return files


def _model_files(directories: list[tuple[str, str]]) -> list[tuple[Part, Path, bool]]:
    return [
        (part, path, True)
        for part, name in directories
        if name
        for path in sorted(Path(name).iterdir())
        if path.suffix in MODEL_FILES and path.is_file()
    ]


def mixed_tasks(config: Config) -> list[tuple[str, TaskSource]]:
    """List the run's task and the parts of its mixture, each with the beginning of its names."""
    parts = [(f"mixture.{part.title}.", part) for part in config.task.mixture]
    return [("", config.task), *parts]


def judges(config: Config) -> dict[str, JudgeConfig]:
    """Return the judges of the run and of its mixture's parts."""
    parts = {f"mixture.{part.title}.": part.judge for part in config.task.mixture}
    judges = {"": config.reward.judge} | parts
    return {prefix: judge for prefix, judge in judges.items() if judge.url}


def reward_functions(config: Config) -> dict[Part, str]:
    """Return the reward functions of the run and of its mixture's parts."""
    functions = {"reward": config.reward.function}
    functions |= {f"mixture.{part.title}.reward": part.reward for part in config.task.mixture}
    return {part: function for part, function in functions.items() if function}


class FileServer:
    """The server's end.

    Digests of large models take seconds, so they are computed once, in a thread, on first request.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.entries: list[FileEntry] | None = None
        self.wrong = ""  # the error that prevents a listing
        self._paths: dict[str, Path] = {}
        self._thread: threading.Thread | None = None

    def listing(self) -> list[FileEntry] | None:
        """Return the list of files; None while it is being computed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._refresh, name="library", daemon=True)
            self._thread.start()
        return self.entries

    def _refresh(self) -> None:
        entries = []
        try:
            for part, path, given in files_to_serve(self.config):
                digest = digest_of(path)
                entries.append(FileEntry(part, path.name, path.stat().st_size, digest, given))
                if given:
                    self._paths[digest] = path
        except (OSError, ImportError, ValueError) as error:
            self.wrong = f"{type(error).__name__}: {error}"
            return
        self.entries = entries

    def read(self, digest: str, offset: int, size: int) -> bytes | None:
        """Read bytes of a file that may be fetched; None for any other. Raises OSError."""
        if (path := self._paths.get(digest)) is None:
            return None
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


# ---- the cache -----------------------------------------------------------------------------------


def check_entries(entries: list[FileEntry]) -> list[FileEntry]:
    """Return the entries of one part. Raises DamagedDataError for unsafe names."""
    for entry in entries:
        name = entry.name
        if not name or Path(name).name != name or name in (".", "..") or not name.isprintable():
            raise DamagedDataError(f"the run has a file with an unsafe name: {name[:80]!r}")
    return entries


def folder(entries: list[FileEntry]) -> str:
    """Name the cache folder of these files by their contents."""
    rows = "".join(sorted(f"{entry.digest} {entry.name}\n" for entry in entries))
    return f"{entries[0].part}-{hashlib.sha256(rows.encode()).hexdigest()[:32]}"


def is_complete(directory: Path, entry: FileEntry) -> bool:
    path = directory / entry.name
    same_size = path.is_file() and path.stat().st_size == entry.size
    return same_size and digest_of(path) == entry.digest


def fetch_files(
    source: FileSource, entries: list[FileEntry], cache: Path, say: Callable[[str], None]
) -> Path:
    """Return the cache folder of one part, fetching the files that are missing.

    Raises DamagedDataError when bytes do not match their digest, PeerUnreachable, OSError.
    """
    directory = private.create_directory(cache) / folder(check_entries(entries))
    with (cache / f"{directory.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two joining generators, only one fetches
        part = (
            directory
            if directory.is_dir()
            else private.create_directory(cache / f"{directory.name}.part")
        )
        missing = [entry for entry in entries if not is_complete(part, entry)]
        for entry in missing:
            say(f"fetching {entry.part}: {entry.name}, {entry.size / 2**20:.1f} MiB")
            fetch(source, entry, part / entry.name)
        if not missing:
            say(f"{entries[0].part}: from the cache, {directory}")
        if part != directory:
            part.rename(directory)
    return directory


def fetch(source: FileSource, entry: FileEntry, path: Path) -> None:
    """Fetch one file, continuing a partial one; `path` appears when it is complete."""
    part = path.with_name(path.name + ".part")
    for tries_left in reversed(range(TRIES)):
        size = part.stat().st_size if part.exists() else 0
        try:
            with part.open("ab") as file:
                for data in source.file(entry.digest, min(size, entry.size), entry.size):
                    file.write(data)
            break
        except PeerUnreachable:
            if not tries_left:
                raise
    if digest_of(part) != entry.digest:
        part.unlink()
        raise DamagedDataError(
            f"{entry.part}: {entry.name} does not match its digest: was the file changed since the "
            "run began? Stop the run and continue it with --resume"
        )
    part.replace(path)


def local_code(function: str, entry: FileEntry | None, key: str = "reward.function") -> None:
    """Check that the local copy of an unshared reward function is the run's.

    Raises ConfigError.
    """
    if entry is None:
        return  # of an installed package: nothing to compare
    try:
        local_file = code_file(function)
    except (ImportError, ValueError):
        local_file = None
    if local_file is None or not local_file.is_file() or digest_of(local_file) != entry.digest:
        difference = (
            "is not here"
            if local_file is None or not local_file.is_file()
            else f"differs from {local_file}"
        )
        raise ConfigError(
            f"{key} = {function}: the run's {entry.name} {difference}; copy it here, or "
            "let the run share it: reward.share = true"
        )
