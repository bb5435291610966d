"""The files of a run that a generator on another machine needs: model, prompts, reward function.

The learner's chunk server lists them with their SHA-256 and gives them out in chunks; who fetches
keeps them in a cache, a folder a digest, and goes on where a broken connection left off.  Code is
given only where the run allows it (`reward.share`)."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError, DamagedDataError, PeerUnreachable
from asyncrl.records import private

Part = Literal["model", "reward_model", "prompts", "heldout", "ood", "template", "reward"]
# of a model directory; no second copy of the weights in another format, no code
MODEL_FILES = (".json", ".safetensors", ".model", ".txt", ".jinja")
TRIES = 5  # connections that a file may take
READ_BYTES = 1 << 20


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file.  given: it may be fetched; otherwise its digest alone is told."""

    part: Part
    name: str  # without a folder
    size: int
    digest: str  # SHA-256
    given: bool


class FileSource(Protocol):
    """Where the bytes of a file come from: `asyncrl.transport.chunks.ChunkClient`."""

    def file(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
        """The bytes from `begin` to `size`, in order.  Raises PeerUnreachable."""


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_file(function: str) -> Path | None:
    """The one file that `module:function` or `file.py:function` is in; None for a package's, which
    has to be installed.
    """
    name = function.rpartition(":")[0]
    if name.endswith(".py"):
        return Path(name)
    if not name or "." in name:
        return None
    importing.append_working_directory()
    spec = importlib.util.find_spec(name)
    alone = spec is not None and spec.origin is not None and not spec.submodule_search_locations
    return Path(str(spec.origin)) if spec is not None and alone else None


def files_to_serve(config: Config) -> list[tuple[Part, Path, bool]]:
    """What a generator of this run reads: (part, file, may it be fetched)."""
    directories: tuple[tuple[Part, str], ...] = (
        ("model", config.model.path),
        ("reward_model", config.reward.model.path),
    )
    found: list[tuple[Part, Path, bool]] = [
        (part, path, True)
        for part, name in directories
        if name
        for path in sorted(Path(name).iterdir())
        if path.suffix in MODEL_FILES and path.is_file()
    ]
    task = config.task
    prompts: tuple[tuple[Part, str], ...] = (
        ("prompts", task.prompts),
        ("heldout", task.heldout),
        ("ood", task.ood),
        ("template", config.reward.judge.template),
    )
    found += [(part, Path(name), True) for part, name in prompts if name]
    code = code_file(config.reward.function) if config.reward.function else None
    if code is not None:
        found.append(("reward", code, config.reward.share))
    return found


class FileServer:
    """The server's end.  Digests of large models take seconds: they are computed once, in a thread,
    when somebody asks first.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.entries: list[FileEntry] | None = None
        self.wrong = ""  # why there is no list
        self._paths: dict[str, Path] = {}
        self._thread: threading.Thread | None = None

    def listing(self) -> list[FileEntry] | None:
        """None: it is being made; ask again."""
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
        """Bytes of a file that may be fetched; None for any other.  Raises OSError."""
        if (path := self._paths.get(digest)) is None:
            return None
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


# ---- the cache -----------------------------------------------------------------------------------


def check_entries(entries: list[FileEntry]) -> list[FileEntry]:
    """The entries of one part.  Raises Damaged for names that lead elsewhere."""
    for entry in entries:
        name = entry.name
        if not name or Path(name).name != name or name in (".", "..") or not name.isprintable():
            raise DamagedDataError(f"the run names a file {name[:80]!r}, which no cache takes")
    return entries


def folder(entries: list[FileEntry]) -> str:
    """Names these files by what is in them."""
    rows = "".join(sorted(f"{entry.digest} {entry.name}\n" for entry in entries))
    return f"{entries[0].part}-{hashlib.sha256(rows.encode()).hexdigest()[:32]}"


def is_complete(where: Path, entry: FileEntry) -> bool:
    path = where / entry.name
    same_size = path.is_file() and path.stat().st_size == entry.size
    return same_size and digest_of(path) == entry.digest


def fetch_files(
    source: FileSource, entries: list[FileEntry], cache: Path, say: Callable[[str], None]
) -> Path:
    """The folder in `cache` that holds the files of one part, fetched as far as they are not there.

    Raises Damaged when bytes do not match their digest, PeerUnreachable, OSError."""
    where = private.directory(cache) / folder(check_entries(entries))
    with (cache / f"{where.name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that join at once, one fetches
        part = where if where.is_dir() else private.directory(cache / f"{where.name}.part")
        missing = [entry for entry in entries if not is_complete(part, entry)]
        for entry in missing:
            say(f"fetching {entry.part}: {entry.name}, {entry.size / 2**20:.1f} MiB")
            fetch(source, entry, part / entry.name)
        if not missing:
            say(f"{entries[0].part}: from the cache, {where}")
        if part != where:
            part.rename(where)
    return where


def fetch(source: FileSource, entry: FileEntry, path: Path) -> None:
    """One file, going on behind what is there of it; read-only and complete afterwards."""
    part = path.with_name(path.name + ".part")
    for left in reversed(range(TRIES)):
        there = part.stat().st_size if part.exists() else 0
        try:
            with part.open("ab") as file:
                for data in source.file(entry.digest, min(there, entry.size), entry.size):
                    file.write(data)
            break
        except PeerUnreachable:
            if not left:
                raise
    if digest_of(part) != entry.digest:
        part.unlink()
        raise DamagedDataError(
            f"{entry.part}: {entry.name} does not match its digest: was the file changed since the "
            "run began? End the run and go on with it by --resume"
        )
    part.replace(path)


def local_code(function: str, entry: FileEntry | None) -> None:
    """A reward function that the run does not give: the one here must be the same.  Raises
    ConfigError.
    """
    if entry is None:
        return  # of an installed package: nothing to compare
    try:
        here = code_file(function)
    except (ImportError, ValueError):
        here = None
    if here is None or not here.is_file() or digest_of(here) != entry.digest:
        found = "is not here" if here is None or not here.is_file() else f"differs from {here}"
        raise ConfigError(
            f"reward.function = {function}: the run's {entry.name} {found}; copy it here, or allow "
            "the run to give it out: reward.share = true"
        )
