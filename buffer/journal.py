"""The segmented log: records with checksums, group commit, a torn tail cut, damage in the middle
reported.

```
journal/00000007.log   [mark 4 | length 4 | sure 8 | xxh3-64 8 | payload] ...
                       the first payload is a snapshot
```

`sure` is the offset up to which the file was as durable as the mode promises when the frame was
written (`process`: written, `disk`: synced).  An unreadable place is a torn tail, hence cut, unless
a readable frame behind it says that it was sure."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from asyncrl.contract.errors import Damaged
from asyncrl.records import atomic_write
from asyncrl.records.jsonl import full

MARK = b"aRJ1"
HEAD = struct.Struct("<4sIQQ")
SEGMENT_BYTES = 64 * 1024 * 1024


def _sum(length: int, sure: int, payload: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(struct.pack("<IQ", length, sure))
    digest.update(payload)
    return int(digest.intdigest())


def frame(payload: bytes, sure: int) -> bytes:
    return HEAD.pack(MARK, len(payload), sure, _sum(len(payload), sure, payload)) + payload


def _at(data: bytes, offset: int) -> tuple[int, bytes] | None:
    """(sure, payload) of a whole, undamaged frame at `offset`, or None."""
    if offset + HEAD.size > len(data):
        return None
    mark, length, sure, checksum = HEAD.unpack_from(data, offset)
    start = offset + HEAD.size
    if mark != MARK or start + length > len(data):
        return None
    payload = data[start : start + length]
    return (sure, payload) if _sum(length, sure, payload) == checksum else None


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*.log"))


def read(path: Path) -> Iterator[bytes]:
    """The payloads of a segment.  Cuts a torn tail off the file.  Raises Damaged for anything else
    that is unreadable.
    """
    data = path.read_bytes()
    offset = 0
    while offset < len(data):
        found = _at(data, offset)
        if found is None:
            _judge_tail(path, data, offset)
            return
        offset += HEAD.size + len(found[1])
        yield found[1]


def _judge_tail(path: Path, data: bytes, bad: int) -> None:
    """Cut `path` at `bad`, or raise Damaged when a later frame proves that the place had been
    durable.
    """
    at = data.find(MARK, bad + 1) if bad else 0
    while at >= 0:
        found = _at(data, at)
        if not bad or (found is not None and found[0] > bad):
            raise Damaged(
                f"{path} is damaged at byte {bad} of {len(data)}, where it had been whole: restore "
                "it, or start a new run "
                "(a power cut does this under durability.mode = process; disk survives one)"
            )
        at = data.find(MARK, at + 1)
    with path.open("r+b") as file:
        file.truncate(bad)
        os.fsync(file.fileno())


class Journal:
    """The log being written.  `append`, then `write`; a record is safe once `durable` has reached
    its number.

    Under `disk` a thread syncs what is written, in groups: while it does, more is appended and
    written."""

    def __init__(self, directory: Path, *, sync: bool, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self.sync = sync
        self.segment_bytes = segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self.number = int(found[-1].stem) if (found := segments(directory)) else 0
        self.fd = -1
        self.appended = self.durable = self.size = self.sure = self.first = 0
        self.waiting: list[bytes] = []
        self.failure: OSError | None = None
        self._wake = threading.Condition()
        self._goal = (0, 0)  # (record, bytes) written and not yet synced
        self._busy = self._end = False
        self.thread = (
            threading.Thread(target=self._syncer, name="journal", daemon=True) if sync else None
        )
        if self.thread is not None:
            self.thread.start()

    def append(self, payload: bytes) -> int:
        """Queue a record; returns its number."""
        self.waiting.append(payload)
        self.appended += 1
        return self.appended

    def write(self) -> None:
        """Hand everything appended to the kernel; under `disk` the syncer takes it from there."""
        if self.failure is not None:
            raise full(self.directory, self.failure) from self.failure
        if not self.waiting:
            return
        data = b"".join(frame(p, self.sure) for p in self.waiting)
        self.waiting = []
        try:
            _write(self.fd, data)
        except OSError as error:
            self.failure = (
                error  # what was written of it is a torn tail: nothing may come behind it
            )
            raise full(self.directory, error) from error
        self.size += len(data)
        if not self.sync:
            self.durable = self.appended
            self.sure = self.size
            return
        with self._wake:
            self._goal = (self.appended, self.size)
            self._wake.notify()

    def _syncer(self) -> None:
        while True:
            with self._wake:
                while self._goal[0] <= self.durable and not self._end:
                    self._wake.wait()
                if self._end:
                    return
                goal = self._goal
                fd = self.fd
                self._busy = True
            try:
                os.fdatasync(fd)
            except OSError as error:
                with self._wake:
                    self.failure = error
                    self._busy = False
                    self._wake.notify_all()
                return
            with self._wake:
                self.durable = goal[0]
                self.sure = goal[1]
                self._busy = False
                self._wake.notify_all()

    @property
    def full(self) -> bool:
        """Time for a new segment: it would be smaller than what this one has become."""
        return self.size > max(self.segment_bytes, 2 * self.first)

    def rotate(self, snapshot: bytes) -> None:
        """Start a new segment with a snapshot that contains everything appended so far; older
        segments go.

        Raises AsyncrlError when the disk is full: the older segment is then as it was, and goes on
        to count."""
        if self.failure is not None:
            raise full(self.directory, self.failure) from self.failure
        path = self.directory / f"{self.number + 1:08d}.log"
        part = path.with_suffix(".part")
        data = frame(snapshot, 0)
        fd = -1
        try:
            with atomic_write.replacing(path, part=part, sync=self.sync):
                fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
                _write(fd, data)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise full(part, error) from error
        with self._wake:
            self._wake.wait_for(lambda: not self._busy)
            old = self.fd
            self.fd = fd
            self.number = self.number + 1
            self.size = len(data)
            self.sure = len(data)
            self.first = len(data)
            self.durable = self.appended
            self.waiting = []
            self._goal = (self.appended, self.size)
        if old >= 0:
            os.close(old)
        for other in segments(self.directory):
            if other != path:
                other.unlink()

    def close(self) -> None:
        if self.fd >= 0 and self.failure is None:
            self.write()
            if self.sync:
                os.fdatasync(self.fd)
        with self._wake:
            self._end = True
            self._wake.notify_all()
        if self.thread is not None:
            self.thread.join()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
