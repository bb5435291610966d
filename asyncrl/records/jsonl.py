"""Append rows to files of JSON lines atomically, and read them past damaged lines."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from asyncrl.contract.errors import AsyncrlError

_reported: set[tuple[str, int]] = set()  # (file, line) of damage that was reported


def make_disk_full_error(path: Path, error: OSError) -> AsyncrlError:
    """Return the error for a file of the run that cannot be written."""
    return AsyncrlError(
        f"{path} cannot be written: {error.strerror or error}; free some space or check the disk, "
        "then continue with `asyncrl run --resume`, or start `asyncrl tinker` again"
    )


def read_object(path: Path) -> dict[str, Any]:
    """Read a file of one JSON object, or return {} if it has none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file, or none if there is no file.

    Damaged lines are left out and reported once.  An incomplete last line is left out."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            damaged.append(number)
    if damaged and (str(path), damaged[-1]) not in _reported:
        _reported.add((str(path), damaged[-1]))
        others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        print(
            f"note: {path}: line {damaged[0]}{others} is damaged and left out (a cause is a power "
            "cut or a full disk)",
            file=sys.stderr,
            flush=True,
        )
    return rows


class JsonlAppender:
    """Append rows to a file, after completing an incomplete last line.

    Raises AsyncrlError if the file cannot be written; it then ends with the last complete row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self.fd).st_size
            if size and os.pread(self.fd, 1, size - 1) != b"\n":
                self._append(b"\n")
        except OSError as error:
            raise make_disk_full_error(path, error) from error

    def write(self, row: dict[str, Any]) -> None:
        self._append((json.dumps(row) + "\n").encode())

    def clear(self) -> None:
        """Remove all rows."""
        try:
            os.ftruncate(self.fd, 0)
        except OSError as error:
            raise make_disk_full_error(self.path, error) from error

    def _append(self, data: bytes) -> None:
        size = os.fstat(self.fd).st_size
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, size)
            raise make_disk_full_error(self.path, error) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
