"""Weights in memory-mapped files: one writer, many readers, no lock that a dead process could hold.

```
DIR/manifest        msgpack: epoch, bytes, rows of the flat layout
DIR/slot_N          header (sequence, epoch, number, xxh3-64, probe), then the bytes, page-aligned
DIR/pin_READER      the slot that a reader copies from, and its heartbeat
```

The writer takes a slot that no live reader has pinned, makes the sequence odd, writes, stores label
and checksum, makes it even. A reader pins, copies into memory of its own, and believes the copy
only when sequence and checksum agree.  A pin whose heartbeat is older than PIN_S counts for nothing
(its reader is stopped or dead): should it wake, its checksum tells it.

The probe: the learner's log-probabilities of a few fixed tokens (`asyncrl.models.policy.probe_ids`)
under these weights, float32, or nothing."""

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
            # a full memory file system fails here, not later by SIGBUS
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
    """The learner's end.  `slots` files to begin with; more are made, up to `most`, while all are
    pinned or kept.
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
        private.directory(directory)
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
                f"{error}; "
                "lower weights.slots"
            ) from error
        self.rows = rows
        self._declare()

    def _declare(self) -> None:
        manifest = msgspec.msgpack.encode(_Manifest(self.epoch, self.size, self.rows))
        atomic_write.write(self.directory / "manifest", manifest)

    def recreate(self) -> bool:
        """Make the directory anew, with all that the ring holds, if somebody has removed it; True
        when it had to be.

        Whoever maps the old files keeps them, and finds by `RingReader.is_replaced` that nothing
        new
        comes there.  Raises AsyncrlError."""
        if (self.directory / "manifest").exists():
            return False
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            private.directory(self.directory)
            fresh = []
            for number, old in enumerate(self.slots):
                fresh.append(
                    _map(self.directory / f"slot_{number}", HEADER + self.size, create=True)
                )
                with memoryview(old) as source, memoryview(fresh[-1]) as target:
                    target[:] = source
            # the old ones end with their last reader: the chunk server's thread may be in one
            self.slots = fresh
            self._declare()
        except OSError as error:
            raise AsyncrlError(
                f"the weights' directory {self.directory} is gone and cannot be made again: {error}"
            ) from error
        return True

    def _grow(self) -> int:
        slot = _map(self.directory / f"slot_{len(self.slots)}", HEADER + self.size, create=True)
        slot[HEADER:] = bytes(self.size)  # every page is touched now, not in the first publication
        _SLOT.pack_into(slot, 0, 0, -1, -1, 0)
        self.slots.append(slot)
        return len(self.slots) - 1

    def pins(self) -> dict[int, str]:
        """slot -> a live reader that copies from it."""
        out = {}
        for path in self.directory.glob("pin_*"):
            try:
                slot, beat = _PIN.unpack(path.read_bytes()[: _PIN.size])
            except (OSError, struct.error):
                continue
            if slot >= 0 and time.monotonic() - beat < PIN_S:
                out[slot] = path.name.removeprefix("pin_")
        return out

    def labels(self) -> dict[Label, str]:
        """label -> digest of what the ring holds."""
        return {label: digest for _, label, digest in map(_head, self.slots) if label.number >= 0}

    def _choose_slot(self, keep: Iterable[Label]) -> int:
        """The slot to overwrite: the oldest that is not pinned, not kept and not the newest."""
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
                who = ", ".join(sorted(set(pinned.values()))) or "evaluation"
                raise AsyncrlError(
                    f"no weight slot has been free for {self.wait_s:g} s: held by {who}; raise "
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
        """Publish: `fill` writes the flat bytes.  Returns their digest.  Raises AsyncrlError when
        no slot comes free.
        """
        slot = self.slots[self._choose_slot(keep)]
        sequence = _head(slot)[0] | 1
        _SLOT.pack_into(slot, 0, sequence, -1, -1, 0)
        with memoryview(slot) as whole, whole[HEADER:] as data:
            fill(data)
            checksum = xxhash.xxh3_64_intdigest(data)
        _PROBE.pack_into(slot, _SLOT.size, len(probe), probe)
        _SLOT.pack_into(slot, 0, sequence, *label, checksum)
        struct.pack_into("<Q", slot, 0, sequence + 1)
        return f"{checksum:016x}"

    def read_part(
        self, label: Label, digest: str, offset: int, size: int
    ) -> tuple[str, bytes, bytes]:
        """(digest, bytes of a part, probe) of version `label`, digest "" when it is not there: for
        the chunk server.
        """
        for slot in self.slots:
            before = _head(slot)
            if before[1] == label and not before[0] & 1 and digest in ("", before[2]):
                data = slot[HEADER + offset : HEADER + min(offset + size, self.size)]
                probe = _probe(slot)
                if _head(slot) == before:
                    return before[2], data, probe
        return "", b"", b""

    def close(self, *, remove: bool = True) -> None:
        """Unmap, and remove the directory; readers that still map it keep their memory until they
        close.
        """
        for slot in self.slots:
            slot.close()
        self.slots = []
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)


class RingReader:
    """A generator's end.  Raises Damaged when the ring's manifest does not parse, FileNotFoundError
    when there is none, ConfigError when the directory is not this user's alone.
    """

    def __init__(self, directory: Path, reader_id: str) -> None:
        # of the version read last
        self.directory = directory
        self.probe = b""
        private.check(directory)
        try:
            self._manifest = msgspec.msgpack.decode(
                (directory / "manifest").read_bytes(), type=_Manifest
            )
        except msgspec.MsgspecError as error:
            raise DamagedDataError(
                f"{directory / 'manifest'} is no manifest of weights: {error}"
            ) from error
        self.slots: list[mmap.mmap] = []
        self._made = self._inode()
        self._pin = _map(directory / f"pin_{reader_id}", 64, create=True)
        _PIN.pack_into(self._pin, 0, -1, 0.0)
        self._read_manifest()

    def _inode(self) -> int:
        """Of the directory's manifest; 0 when there is none."""
        try:
            return (self.directory / "manifest").stat().st_ino
        except OSError:
            return 0

    def is_replaced(self) -> bool:
        """Was the directory removed, or made anew, since this reader opened it?  Then nothing new
        will come to its maps.
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
        """label -> digest of what the ring holds now."""
        self._read_manifest()
        return {
            label: digest
            for sequence, label, digest in map(_head, self.slots)
            if label.number >= 0 and not sequence & 1
        }

    def read(self, label: Label, digest: str, into: memoryview) -> bool:
        """Copy version `label` into `into` and verify it; False when it is not there or changed
        under the copy.
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
            before = _head(slot)
            if before[0] & 1 or before[1] != label or before[2] != digest:
                return False
            with memoryview(slot) as source:
                for at in range(0, len(into), COPY):
                    piece = into[at : at + COPY]
                    piece[:] = source[HEADER + at : HEADER + at + len(piece)]
                    _PIN.pack_into(self._pin, 0, number, time.monotonic())
            self.probe = _probe(slot)
            return _head(slot) == before and xxhash.xxh3_64_hexdigest(into) == digest
        finally:
            _PIN.pack_into(self._pin, 0, -1, 0.0)

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self.slots = []
        self._pin.close()
