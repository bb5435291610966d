"""Append rows to files of JSON lines atomically, and read them past damaged lines."""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.records.append_log import AppendLog

JsonObject = dict[str, Any]
_reported: set[tuple[str, int]] = set()  # (file, line) of damage that was reported


@contextlib.contextmanager
def name_damaged(place: object) -> Iterator[None]:
    """Raise ConfigError, with the place of its file, for a value of another kind than expected."""
    try:
        yield
    except (AsyncrlError, OSError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{place}: a file is damaged or of another version of asyncrl: {error!r}"
        ) from error


def read_object(path: Path) -> JsonObject:
    """Read a file of one JSON object, or return {} if it has none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read(path: Path) -> list[JsonObject]:
    """Read the rows of a file, or none if there is no file.

    Damaged lines are left out and reported once.  An incomplete last line is left out."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    damaged: list[int] = []
    rows = [*decode_lines(lines, damaged)]
    if damaged and damaged[-1] == len(lines):
        damaged.pop()
    if damaged and (str(path), damaged[-1]) not in _reported:
        _reported.add((str(path), damaged[-1]))
        others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        print(
            f"note: {path}: line {damaged[0]}{others} is damaged and left out (a cause is a power "
            "cut or a full disk)",
            file=sys.stderr,
        )
    return rows


def decode_lines(lines: Iterable[bytes], damaged: list[int]) -> Iterator[JsonObject]:
    """Yield the objects of lines; add the numbers of damaged lines to `damaged`."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            try:
                row = msgspec.json.decode(line)  # several times as fast
            except msgspec.DecodeError:
                row = json.loads(line)  # accepts NaN
        if isinstance(row, dict):
            yield row
        else:
            damaged.append(number)


class GrowingFile:
    """The complete lines of a file that grows.

    A file that was replaced, removed or has shrunk begins anew; `begins` says so once.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset  # of the bytes that were read
        self.inode = 0
        self.begins = True
        self.damaged = 0  # number of lines that `read_rows` left out

    def read_new(self) -> bytes:
        """Return the lines since the last call; one that is still being written waits."""
        try:
            file = self.path.open("rb")
        except OSError:
            self.begins, self.offset, self.inode = True, 0, 0
            return b""
        with file:
            status = os.fstat(file.fileno())
            self.begins = self.inode not in (0, status.st_ino) or status.st_size < self.offset
            self.inode = status.st_ino
            self.offset = 0 if self.begins else self.offset
            file.seek(self.offset)
            data = file.read(status.st_size - self.offset)
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data

    def read_rows(self) -> list[JsonObject]:
        """Return the rows of steps since the last call; other lines are left out and counted."""
        lines = [*filter(bytes.strip, self.read_new().split(b"\n"))]
        rows = [row for row in decode_lines(lines, []) if isinstance(row.get("step"), int)]
        self.damaged = len(lines) - len(rows) + (0 if self.begins else self.damaged)
        return rows


def encode(rows: Iterable[JsonObject]) -> bytes:
    """Encode rows as lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def note(path: Path, row: JsonObject) -> None:
    """Append a row that is only informative: a file that cannot be written is ignored."""
    with contextlib.suppress(OSError), path.open("ab") as file:
        file.write(encode([row]))


class JsonlAppender(AppendLog):
    """Append rows to a file, after completing an incomplete last line.

    Raises AsyncrlError if the file cannot be written; it then ends with the last complete row."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        size = os.fstat(self.fd).st_size
        if size and os.pread(self.fd, 1, size - 1) != b"\n":
            self.append(b"\n")

    def write(self, row: JsonObject) -> None:
        self.append(encode([row]))
