"""The one append-only log: appended records are whole, a torn tail is cut, damage is named.

A process may exit in the middle of a record.  An unreadable record at the end of a file is
therefore a torn tail, which was never promised to anybody.  An unreadable record before one that
was written after it is damage.  A record is either a line of JSON (records/jsonl.py) or a frame:

    with a mark     [mark 4 | length 4 | number 8 | xxh3-64 8 | payload]
    without         [length 4 | xxh3-64 8 | payload]
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from asyncrl.contract.errors import AsyncrlError
from asyncrl.records import atomic_write

PIECES = 512  # pieces written by one system call, which accepts 1,024
Record = Sequence[bytes | memoryview]  # a payload in pieces, which are written without a copy


def make_disk_full_error(path: Path, error: OSError) -> AsyncrlError:
    """Return the error for a file of the run that cannot be written."""
    return AsyncrlError(
        f"{path} cannot be written: {error.strerror or error}; free some space or check the disk, "
        "then continue with `asyncrl run --resume`, or start `asyncrl tinker` again"
    )


@contextlib.contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Raise AsyncrlError, with the path, for a file of the run that cannot be written."""
    try:
        yield
    except OSError as error:
        raise make_disk_full_error(path, error) from error


def write_pieces(fd: int, pieces: Record) -> int:
    """Write all pieces in order; return the number of bytes.  Raises OSError."""
    views = [memoryview(piece) for piece in pieces if len(piece)]
    size = count_bytes(views)
    first = 0
    while first < len(views):
        written = os.writev(fd, views[first : first + PIECES])
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
    return size


def count_bytes(record: Record) -> int:
    return sum(map(len, record))


class AppendLog:
    """A file that only grows; after a failed append it ends with the last whole record.

    Raises AsyncrlError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with name_full_disk(path):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, *pieces: bytes | memoryview) -> None:
        """Append one record in pieces."""
        size = os.fstat(self.fd).st_size
        try:
            write_pieces(self.fd, pieces)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, size)
            raise make_disk_full_error(self.path, error) from error

    def replace(self, content: bytes, *, sync: bool = False) -> None:
        """Replace all records at once, which prunes the log.

        The file is a new one: a replaced process may still have the old one open."""
        with name_full_disk(self.path):
            atomic_write.write(self.path, content, sync=sync)
        self.close()
        self.fd = os.open(self.path, os.O_RDWR | os.O_APPEND)

    def clear(self) -> None:
        """Remove all records."""
        with name_full_disk(self.path):
            os.ftruncate(self.fd, 0)

    def sync(self) -> None:
        """Make the records so far survive a power cut."""
        os.fsync(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Frame(NamedTuple):
    """A readable frame: its number, its payload, and the offset behind it."""

    number: int
    payload: bytes
    end: int


class FrameCodec:
    """The frames of one kind of file.

    mark: with which each frame begins; b"": frames have neither mark nor number.
    covered: offset in the header from which the checksum covers it, with the payload."""

    def __init__(self, mark: bytes, covered: int) -> None:
        self.mark = mark
        self.covered = covered
        self.size = 24 if mark else 12  # of a header

    def make_header(self, record: Record, number: int = 0) -> bytes:
        """Make the header of a record."""
        head = self.mark + count_bytes(record).to_bytes(4, "little")
        head += number.to_bytes(8, "little") if self.mark else b""
        return head + self._compute_checksum(head, record)

    def _compute_checksum(self, head: bytes, record: Record) -> bytes:
        digest = xxhash.xxh3_64(head[self.covered :])
        for piece in record:
            digest.update(piece)
        return digest.intdigest().to_bytes(8, "little")

    def read(self, data: bytes, offset: int) -> Frame | None:
        """Return the complete, undamaged frame at `offset`, or None."""
        start = offset + self.size
        head, fields = data[offset : start - 8], offset + len(self.mark)
        length = int.from_bytes(data[fields : fields + 4], "little")
        payload = data[start : start + length]
        if (
            not head.startswith(self.mark)
            or len(payload) < length
            or self._compute_checksum(head, [payload]) != data[start - 8 : start]
        ):
            return None
        return Frame(int.from_bytes(head[len(self.mark) + 4 :], "little"), payload, start + length)

    def read_all(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames up to the end of the data, or up to the first unreadable one."""
        end = 0
        while (frame := self.read(data, end)) is not None:
            end = frame.end
            yield frame

    def find_later(self, data: bytes, offset: int) -> Iterator[Frame]:
        """Yield the readable frames behind an unreadable one at `offset`."""
        while (offset := data.find(self.mark, offset + 1)) >= 0:
            if (frame := self.read(data, offset)) is not None:
                yield frame


def cut(path: Path, end: int) -> None:
    """Cut a torn tail off."""
    with path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())
