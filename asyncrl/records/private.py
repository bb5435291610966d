"""Directories and files that no other user may read, fill or redirect (modes 0700 and 0600).

Another user can predict a name under /tmp or /dev/shm and create it first, so links are never
followed and owners are checked."""

import os
import stat
from pathlib import Path

from asyncrl.contract.errors import ConfigError

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def create_directory(path: Path) -> Path:
    """Create `path` and its missing parents with mode 0700, and `check` it."""
    for missing in reversed([p for p in (path, *path.parents) if not os.path.lexists(p)]):
        try:
            missing.mkdir(mode=0o700)
        except FileExistsError:
            continue  # another process created it meanwhile
    return check(path)


def check(path: Path) -> Path:
    """Check that `path` is a directory that only this user could write to, and set mode 0700.

    Raises ConfigError otherwise, and FileNotFoundError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} is a link, is not a directory, or is closed to this user "
            f"({error.strerror}): choose another path, or move it away"
        ) from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid():
            raise ConfigError(
                f"{path} belongs to user {status.st_uid}, not to this one ({os.getuid()}): have it "
                "removed, or choose another temporary folder by TMPDIR"
            )
        if status.st_mode & OTHERS_WRITE:
            raise ConfigError(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: other users may have put "
                "something into it; look, then remove it"
            )
        if status.st_mode & OTHERS:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def open_private(path: Path, flags: int) -> int:
    """Open a regular file of this user; a new one has mode 0600.

    Raises ConfigError for a link or another user's file, and OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link, and links are not followed there: remove it"
            ) from error
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise ConfigError(f"{path} is not a plain file of this user alone: remove it")


def require_private(path: Path) -> Path:
    """Check that only this user can read `path`.  Raises ConfigError, FileNotFoundError."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"{path} belongs to user {status.st_uid}: create your own keys")
    if status.st_mode & OTHERS:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so others can read the key: "
            f"`chmod 600 {path}`, or make new keys if they may have"
        )
    return path
