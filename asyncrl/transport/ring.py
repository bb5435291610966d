"""Weights in memory-mapped files: one writer, many readers, no locks.

A process that is killed can therefore never hold a lock.

```
DIR/manifest        msgpack: epoch, bytes, rows of the flat layout DIR/slot_N          header
(sequence, epoch, number, xxh3-64, probe), then the bytes, page-aligned DIR/pin_READER      the slot
that a reader copies from, and its heartbeat
```

The writer takes a slot that no live reader has pinned, makes the sequence odd, writes, stores label
and checksum, and makes the sequence even. A reader pins the slot, copies it into private memory,
and trusts the copy only when sequence and checksum agree. A pin whose heartbeat is older than PIN_S
is ignored, because its reader is suspended or dead. If that reader resumes, its checksum fails.

The probe holds the learner's log-probabilities of a few fixed tokens
(`asyncrl.models.policy.list_probe_ids`) under these weights, float32, or nothing.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import xxhash

from asyncrl.contract.errors import AsyncrlError, DamagedDataError
from asyncrl.contract.versions import Label
from asyncrl.records import atomic_write, private

HEADER = 4096  # one page, so that the bytes are aligned
_SLOT = struct.Struct("<QqqQ")  # sequence, epoch, number, checksum
_PROBE = struct.Struct("<H256s")  # bytes, padded; behind _SLOT
_PIN = struct.Struct("<qd")  # slot or -1, heartbeat (CLOCK_MONOTONIC)
PIN_S = 5.0
COPY = 32 << 20  # bytes between two heartbeats
Rows = list[tuple[str, str, list[int], int, int]]


class _Manifest(msgspec.Struct, frozen=True):
    epoch: int
    size: int
    rows: Rows


def _map(path: Path, size: int, *, create: bool) -> mmap.mmap:
    fd = private.open_private(path, os.O_RDWR | (os.O_CREAT if create else 0))
    try:
        if create:
            # a full memory file system fails here instead of later by SIGBUS
            os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _head(slot: mmap.mmap) -> tuple[int, Label, str]:
    sequence, epoch, number, checksum = _SLOT.unpack_from(slot, 0)
    return sequence, Label(epoch, number), f"{checksum:016x}"


def _probe(slot: mmap.mmap) -> bytes:
    size, padded = _PROBE.unpack_from(slot, _SLOT.size)
    return bytes(padded[:size])


class WeightRing:
    """The learner's end.

    It starts with `slots` files and makes more, up to `most`, while all are pinned or kept.
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        slots: int,
        rows: Rows,
        epoch: int,
        most: int = 0,
        wait_s: float = 60.0,
    ) -> None:
        private.create_directory(directory)
        self.directory = directory
        self.size = size
        self.epoch = epoch
        self.most = max(most, slots)
        self.wait_s = wait_s
        self.slots: list[mmap.mmap] = []
        try:
            for _ in range(slots):
                self._grow()
        except OSError as error:
            raise AsyncrlError(
                f"no room for {slots} weight slots of {size / 2**20:.1f} MiB in {directory}: "
                f"{error}; lower weights.slots"
            ) from error
        self.rows = rows
        self._declare()

    def _declare(self) -> None:
        manifest = msgspec.msgpack.encode(_Manifest(self.epoch, self.size, self.rows))
        atomic_write.write(self.directory / "manifest", manifest)

    def recreate(self) -> bool:
        """Create the directory again if it was removed; return whether it was.

        Readers of the old files keep them, and learn from `RingReader.is_replaced` that no new
        version will come there. Raises AsyncrlError.
        """
        if (self.directory / "manifest").exists():
            return False
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            private.create_directory(self.directory)
            fresh = []
            for number, old in enumerate(self.slots):
                fresh.append(
                    _map(self.directory / f"slot_{number}", HEADER + self.size, create=True)
                )
                with memoryview(old) as source, memoryview(fresh[-1]) as target:
                    target[:] = source
            # the last reader frees the old maps: the chunk server's thread may be using one
            self.slots = fresh
            self._declare()
        except OSError as error:
            raise AsyncrlError(
                f"the weights' directory {self.directory} was removed and cannot be created again: "
                f"{error}"
            ) from error
        return True

    def _grow(self) -> int:
        slot = _map(self.directory / f"slot_{len(self.slots)}", HEADER + self.size, create=True)
        slot[HEADER:] = bytes(self.size)  # touch every page before the first publication
        _SLOT.pack_into(slot, 0, 0, -1, -1, 0)
        self.slots.append(slot)
        return len(self.slots) - 1

    def pins(self) -> dict[int, str]:
        """Return slot -> the live reader that copies from it."""
        readers = {}
        for path in self.directory.glob("pin_*"):
            try:
                slot, beat = _PIN.unpack(path.read_bytes()[: _PIN.size])
            except (OSError, struct.error):
                continue
            if slot >= 0 and time.monotonic() - beat < PIN_S:
                readers[slot] = path.name.removeprefix("pin_")
        return readers

    def labels(self) -> dict[Label, str]:
        """Return label -> digest of the versions in the ring."""
        return {label: digest for _, label, digest in map(_head, self.slots) if label.number >= 0}

    def _choose_slot(self, keep: Iterable[Label]) -> int:
        """Return the slot to overwrite: the oldest not pinned, not kept, not the newest."""
        deadline = time.monotonic() + self.wait_s
        kept = set(keep)
        while True:
            heads = [_head(s)[1] for s in self.slots]
            newest = max(heads)
            pinned = self.pins()
            free = [
                (label, number)
                for number, label in enumerate(heads)
                if number not in pinned
                and label not in kept
                and (label != newest or label.number < 0)
            ]
            if free:
                return min(free)[1]
            if len(self.slots) < self.most:
                return self._grow()
            if time.monotonic() > deadline:
                holders = ", ".join(sorted(set(pinned.values()))) or "evaluation"
                raise AsyncrlError(
                    f"no weight slot has been free for {self.wait_s:g} s: held by {holders}; raise "
                    f"weights.slots ({len(self.slots)})"
                )
            time.sleep(0.001)

    def write(
        self,
        label: Label,
        fill: Callable[[memoryview], None],
        keep: Iterable[Label] = (),
        probe: bytes = b"",
    ) -> str:
        """Publish a version; `fill` writes the flat bytes. Returns their digest.

        Raises AsyncrlError when no slot becomes free.
        """
        slot = self.slots[self._choose_slot(keep)]
        sequence = _head(slot)[0] | 1
        _SLOT.pack_into(slot, 0, sequence, -1, -1, 0)
        with memoryview(slot) as mapped, mapped[HEADER:] as data:
            fill(data)
            checksum = xxhash.xxh3_64_intdigest(data)
        _PROBE.pack_into(slot, _SLOT.size, len(probe), probe)
        _SLOT.pack_into(slot, 0, sequence, *label, checksum)
        struct.pack_into("<Q", slot, 0, sequence + 1)
        return f"{checksum:016x}"

    def read_part(
        self, label: Label, digest: str, offset: int, size: int
    ) -> tuple[str, bytes, bytes]:
        """Return (digest, bytes of a part, probe) of a version, for the chunk server.

        Digest "" when the version is not here.
        """
        for slot in self.slots:
            header = _head(slot)
            if header[1] == label and not header[0] & 1 and digest in ("", header[2]):
                data = slot[HEADER + offset : HEADER + min(offset + size, self.size)]
                probe = _probe(slot)
                if _head(slot) == header:
                    return header[2], data, probe
        return "", b"", b""

    def close(self, *, remove: bool = True) -> None:
        """Unmap, and remove the directory; readers keep their maps until they close."""
        for slot in self.slots:
            slot.close()
        self.slots = []
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)


class RingReader:
    """A generator's end.

    Raises DamagedDataError when the ring's manifest does not parse, FileNotFoundError when there is
    none, ConfigError when others have access to the directory.
    """

    def __init__(self, directory: Path, reader_id: str) -> None:
        self.directory = directory
        self.probe = b""  # of the version read last
        private.check(directory)
        try:
            self._manifest = msgspec.msgpack.decode(
                (directory / "manifest").read_bytes(), type=_Manifest
            )
        except msgspec.MsgspecError as error:
            raise DamagedDataError(
                f"{directory / 'manifest'} is not a manifest of weights: {error}"
            ) from error
        self.slots: list[mmap.mmap] = []
        self._made = self._inode()
        self._pin = _map(directory / f"pin_{reader_id}", 64, create=True)
        _PIN.pack_into(self._pin, 0, -1, 0.0)
        self._read_manifest()

    def _inode(self) -> int:
        """Return the inode of the directory's manifest; 0 when there is none."""
        try:
            return (self.directory / "manifest").stat().st_ino
        except OSError:
            return 0

    def is_replaced(self) -> bool:
        """Whether the directory was removed or recreated since this reader opened it.

        If so, nothing new will appear in its maps.
        """
        return self._inode() != self._made

    @property
    def manifest(self) -> Rows:
        return self._manifest.rows

    def _read_manifest(self) -> None:
        while (
            path := self.directory / f"slot_{len(self.slots)}"
        ).exists() and path.stat().st_size == HEADER + self._manifest.size:
            self.slots.append(_map(path, HEADER + self._manifest.size, create=False))

    def labels(self) -> dict[Label, str]:
        """Return label -> digest of the versions in the ring now."""
        self._read_manifest()
        return {
            label: digest
            for sequence, label, digest in map(_head, self.slots)
            if label.number >= 0 and not sequence & 1
        }

    def read(self, label: Label, digest: str, into: memoryview) -> bool:
        """Copy version `label` into `into` and verify it.

        Returns False when it is not there or changed during the copy.
        """
        self._read_manifest()
        for number, slot in enumerate(self.slots):
            if _head(slot)[1] == label:
                return self._copy(number, label, digest, into)
        return False

    def _copy(self, number: int, label: Label, digest: str, into: memoryview) -> bool:
        slot = self.slots[number]
        try:
            _PIN.pack_into(self._pin, 0, number, time.monotonic())
            header = _head(slot)
            if header[0] & 1 or header[1] != label or header[2] != digest:
                return False
            with memoryview(slot) as source:
                for start in range(0, len(into), COPY):
                    piece = into[start : start + COPY]
                    piece[:] = source[HEADER + start : HEADER + start + len(piece)]
                    _PIN.pack_into(self._pin, 0, number, time.monotonic())
            self.probe = _probe(slot)
            return _head(slot) == header and xxhash.xxh3_64_hexdigest(into) == digest
        finally:
            _PIN.pack_into(self._pin, 0, -1, 0.0)

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self.slots = []
        self._pin.close()
