"""Files and directories that are there whole or not at all: filled beside their place under another
name, then renamed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def write(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Put a file in `path`'s place; sync: it survives a power cut.  Raises OSError; what was there
    is then as it was.
    """
    with replacing(path, sync=sync) as part:
        if isinstance(content, bytes):
            part.write_bytes(content)
        else:
            part.write_text(content, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, *, part: Path | None = None, sync: bool = False) -> Iterator[Path]:
    """The part to fill, a file or a directory: at the end it takes `path`'s place, after a failure
    it is removed.  What a killed process left of it is removed first.

    part: its name, `path` with ".part" as a rule; several processes that may write the same path
    need one each.  sync: it survives a power cut, every file and the directory that holds it.
    Raises OSError.
    """
    part = part or path.with_name(path.name + ".part")
    remove(part)
    try:
        yield part
        if sync:
            sync_tree(part)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(part, path)
        if sync:
            sync_path(path.parent)
    except BaseException:
        remove(part)
        raise


def sync_tree(path: Path) -> None:
    """A file, or a directory with all that is in it, survives a power cut from now on; its own name
    does when the directory above is synced.
    """
    for written in (path, *path.rglob("*")):
        sync_path(written)


def directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory, and those above it, that survive a power cut.  Raises OSError."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for new in reversed(missing):
        new.mkdir(mode=mode if new == path else 0o777, exist_ok=True)
    for new in missing:
        sync_path(new.parent)


def remove(path: Path) -> None:
    """Remove a file or a directory, as far as that can be done, without a word."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """A file's content, or the names in a directory, survive a power cut from now on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
