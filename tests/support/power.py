"""Simulated power losses: what is left of a directory when only what was synced survives.

A disk may keep more than that, never less: a file's bytes as they were at its last fsync, empty
where there was none; the names in a directory as they were at that directory's last fsync, whatever
was made, renamed or removed in it since."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Follows os.fsync and os.fdatasync of this process.  `at_sync` is called before and after each
    of them, by the thread that syncs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.pins: dict[int, int] = {}  # open, so that no inode's number is used again
        self.at_sync: Callable[[], None] = lambda: None
        self.fsync, self.fdatasync = os.fsync, os.fdatasync
        monkeypatch.setattr(os, "fsync", lambda fd: self.synced(fd, self.fsync))
        monkeypatch.setattr(os, "fdatasync", lambda fd: self.synced(fd, self.fdatasync))

    def synced(self, fd: int, sync: Callable[[int], Any]) -> None:
        self.at_sync()
        sync(fd)
        self.keep(fd)
        self.at_sync()

    def keep(self, fd: int) -> None:
        """What this descriptor names is safe as it is now."""
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            names: dict[str, int] = {}
            for name in os.listdir(fd):
                try:
                    names[name] = os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino
                except FileNotFoundError:
                    continue  # removed by another thread, meanwhile
                self.pin(f"/proc/self/fd/{fd}/{name}", names[name])
            self.names[found.st_ino] = names
        else:
            self.files[found.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()
        self.pin(f"/proc/self/fd/{fd}", found.st_ino)

    def pin(self, path: str, inode: int) -> None:
        if inode not in self.pins:
            try:
                self.pins[inode] = os.open(path, os.O_RDONLY)
            except OSError:
                pass  # a lock, a socket: nothing that counts here

    def cut(self, root: Path, into: Path) -> Path:
        """The power fails: what `root` is afterwards, made at `into`."""
        self._make(root.stat().st_ino, into)
        return into

    def boot(self, root: Path) -> None:
        """Go on in a directory that `cut` made: what is there is on the disk."""
        for path in (root, *root.rglob("*")):
            fd = os.open(path, os.O_RDONLY)
            self.keep(fd)
            os.close(fd)

    def _make(self, inode: int, into: Path) -> None:
        kept = self.pins.get(inode)
        is_directory = inode in self.names or (
            kept is not None and stat.S_ISDIR(os.fstat(kept).st_mode)
        )
        if not is_directory:
            into.write_bytes(self.files.get(inode, b""))
            return
        into.mkdir(parents=True)
        for name, child in self.names.get(inode, {}).items():
            self._make(child, into / name)

    def close(self) -> None:
        for fd in self.pins.values():
            os.close(fd)
