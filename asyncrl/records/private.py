"""Places that no other user of the machine may read, fill or redirect: directories of mode 0700,
files of mode 0600, no links followed.

A name under /tmp or /dev/shm can be known in advance, so somebody else may have made it first."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from asyncrl.contract.errors import ConfigError

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def directory(path: Path) -> Path:
    """`path`, made with mode 0700 where it is missing (its parents, too), and `check`ed."""
    for missing in reversed([p for p in (path, *path.parents) if not os.path.lexists(p)]):
        try:
            missing.mkdir(mode=0o700)
        except FileExistsError:
            continue  # by another process, meanwhile
    return check(path)


def check(path: Path) -> Path:
    """`path`, a directory of this user that nobody else can have put anything into; its mode is
    0700 afterwards.  Raises ConfigError for any other, FileNotFoundError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} is a link, no directory, or closed to this user ({error.strerror}): remove it"
        ) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"{path} belongs to user {found.st_uid}, not to this one ({os.getuid()}): have it "
                "removed, or choose another temporary folder by TMPDIR"
            )
        if found.st_mode & OTHERS_WRITE:
            raise ConfigError(
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: other users may have put "
                "something into it; look, then remove it"
            )
        if found.st_mode & OTHERS:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a plain file of this user, new ones with mode 0600.  Raises ConfigError for a
    link or what is somebody else's, OSError.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, and none is followed there: remove it") from error
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise ConfigError(f"{path} is no plain file of this user alone: remove it")


def require_private(path: Path) -> Path:
    """`path`, a file that only this user can read.  Raises ConfigError, FileNotFoundError."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"{path} belongs to user {found.st_uid}: make keys of your own")
    if found.st_mode & OTHERS:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so others can read the key: "
            f"`chmod 600 {path}`, or make new keys if they may have"
        )
    return path
