"""Write files and directories atomically: fill them under another name, then rename them."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def write(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Replace the file at `path`; sync: it survives a power cut.

    Raises OSError, and then leaves the earlier file unchanged."""
    with replace(path, sync=sync) as part:
        part.write_bytes(content if isinstance(content, bytes) else content.encode())


@contextlib.contextmanager
def replace(path: Path, *, part: Path | None = None, sync: bool = False) -> Iterator[Path]:
    """Yield a path to fill with a file or directory, which then replaces `path`.

    After a failure the part is removed.  The part of a killed process is removed first.

    part: the path to fill, by default `path` with ".part"; processes that may write the same path
    need different ones.  sync: everything written survives a power cut.  Raises OSError."""
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
    """Sync a file, or a directory with its content, to the disk.

    Its own name survives a power cut only when the parent directory is synced, too."""
    for entry in (path, *path.rglob("*")):
        sync_path(entry)


def create_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its parents so that they survive a power cut.  Raises OSError."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=mode if folder == path else 0o777, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


def remove(path: Path) -> None:
    """Remove a file or a directory as far as possible, and ignore errors."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Sync a file's content, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
