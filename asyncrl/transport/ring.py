"""Weights in memory-mapped files: one writer, many readers, no locks.

A process that is killed can therefore never hold a lock.

```
DIR/manifest        msgpack: epoch, bytes, rows of the flat layout
DIR/slot_N          header (sequence, epoch, number, xxh3-64, probe), then the bytes, page-aligned
DIR/pin_READER      the slot that a reader copies from, and its heartbeat
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
from asyncrl.transport.weight_transport import Rows, WeightsClient

HEADER = 4096  # one page, so that the bytes are aligned
_SLOT = struct.Struct("<QqqQ")  # sequence, epoch, number, checksum
_PROBE = struct.Struct("<H256s")  # bytes, padded; behind _SLOT
_PIN = struct.Struct("<qd")  # slot or -1, heartbeat (CLOCK_MONOTONIC)
PIN_S = 5.0  # seconds
COPY = 32 << 20  # bytes between two heartbeats


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


def _read_head(slot: mmap.mmap) -> tuple[int, Label, str]:
    sequence, epoch, number, checksum = _SLOT.unpack_from(slot, 0)
    return sequence, Label(epoch, number), f"{checksum:016x}"


def _read_probe(slot: mmap.mmap) -> bytes:
    size, padded = _PROBE.unpack_from(slot, _SLOT.size)
    return bytes(padded[:size])


class WeightRing:
    """The learner's end.

    It starts with `slots` files and makes more, up to `most`, while all are pinned or kept.

    size: bytes of a version.
    rows: the layout of the flat bytes.
    wait_s: seconds to wait for a free slot.
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
        self._write_manifest()

    def _write_manifest(self) -> None:
        manifest = msgspec.msgpack.encode(_Manifest(self.epoch, self.size, self.rows))
        atomic_write.write(self.directory / "manifest", manifest)

    def recreate(self) -> bool:
        """Create the directory again if it was removed; return whether it was.

        Readers of the old files keep them. `RingReader.is_broken` shows them that these files
        will get no new version. Raises AsyncrlError.
        """
        if (self.directory / "manifest").exists():
            return False
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            private.create_directory(self.directory)
            new_slots = []
            for number, old in enumerate(self.slots):
                new = _map(self.directory / f"slot_{number}", HEADER + self.size, create=True)
                new_slots.append(new)
                with memoryview(old) as source, memoryview(new) as target:
                    target[:] = source
            # the last reader frees the old maps: the chunk server's thread may be using one
            self.slots = new_slots
            self._write_manifest()
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

    def list_pins(self) -> dict[int, str]:
        """List {slot: the live reader that copies from it}."""
        readers = {}
        for path in self.directory.glob("pin_*"):
            try:
                slot, beat = _PIN.unpack(path.read_bytes()[: _PIN.size])
            except (OSError, struct.error):
                continue
            if slot >= 0 and time.monotonic() - beat < PIN_S:
                readers[slot] = path.name.removeprefix("pin_")
        return readers

    def list_labels(self) -> dict[Label, str]:
        """List {label: digest} of the versions in the ring."""
        return {
            label: digest for _, label, digest in map(_read_head, self.slots) if label.number >= 0
        }

    def _choose_slot(self, keep: Iterable[Label]) -> int:
        """Choose the slot to overwrite: the oldest not pinned, not kept, not the newest.

        Raises AsyncrlError when no slot becomes free."""
        deadline = time.monotonic() + self.wait_s
        kept = set(keep)
        while True:
            labels = [_read_head(slot)[1] for slot in self.slots]
            newest = max(labels)
            pinned = self.list_pins()
            free = [
                (label, number)
                for number, label in enumerate(labels)
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
        """Publish a version; return the digest of its bytes.

        fill: writes the flat bytes.
        keep: versions that must stay in the ring.
        probe: stored with the version.
        Raises AsyncrlError when no slot becomes free.
        """
        slot = self.slots[self._choose_slot(keep)]
        sequence = _read_head(slot)[0] | 1
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
        """Read (digest, bytes of a part, probe) of a version, for the chunk server.

        digest: "" for any version with that label.
        Returns the digest "" if the ring does not have the version.
        """
        for slot in self.slots:
            header = _read_head(slot)
            if header[1] == label and not header[0] & 1 and digest in ("", header[2]):
                data = slot[HEADER + offset : HEADER + min(offset + size, self.size)]
                probe = _read_probe(slot)
                if _read_head(slot) == header:
                    return header[2], data, probe
        return "", b"", b""

    def close(self, *, remove: bool = True) -> None:
        """Unmap, and remove the directory; readers keep their maps until they close."""
        for slot in self.slots:
            slot.close()
        self.slots = []
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)


class RingReader(WeightsClient):
    """A generator's end.

    Raises DamagedDataError when the ring's manifest does not parse, FileNotFoundError when it is
    missing, ConfigError when other users have access to the directory.
    """

    def __init__(self, directory: Path, reader_id: str) -> None:
        self.directory = directory
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
        self._inode = self._read_inode()
        self._pin = _map(directory / f"pin_{reader_id}", 64, create=True)
        _PIN.pack_into(self._pin, 0, -1, 0.0)
        self._read_manifest()

    def _read_inode(self) -> int:
        """Return the inode of the directory's manifest; 0 if it is missing."""
        try:
            return (self.directory / "manifest").stat().st_ino
        except OSError:
            return 0

    def fetch_layout(self) -> Rows:
        """Return the layout of the flat bytes."""
        return self._manifest.rows

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        """Do as `WeightsClient.fetch` does."""
        digest = digest or self.list_labels().get(label, "")
        if digest and self.read(label, digest, into):
            return digest
        # the maps of a directory that was removed or recreated get no new version
        self.is_broken = self._read_inode() != self._inode
        return ""

    def _read_manifest(self) -> None:
        while (
            path := self.directory / f"slot_{len(self.slots)}"
        ).exists() and path.stat().st_size == HEADER + self._manifest.size:
            self.slots.append(_map(path, HEADER + self._manifest.size, create=False))

    def list_labels(self) -> dict[Label, str]:
        """List {label: digest} of the versions in the ring now."""
        self._read_manifest()
        return {
            label: digest
            for sequence, label, digest in map(_read_head, self.slots)
            if label.number >= 0 and not sequence & 1
        }

    def read(self, label: Label, digest: str, into: memoryview) -> bool:
        """Copy version `label` into `into` and verify it.

        Returns False if the ring does not have it or it changed during the copy.
        """
        self._read_manifest()
        heads = list(map(_read_head, self.slots))
        number = next((n for n, head in enumerate(heads) if head[1] == label), None)
        if number is None:
            return False
        slot = self.slots[number]
        try:
            _PIN.pack_into(self._pin, 0, number, time.monotonic())
            header = _read_head(slot)
            if header[0] & 1 or header[1] != label or header[2] != digest:
                return False
            with memoryview(slot) as source:
                for start in range(0, len(into), COPY):
                    piece = into[start : start + COPY]
                    piece[:] = source[HEADER + start : HEADER + start + len(piece)]
                    _PIN.pack_into(self._pin, 0, number, time.monotonic())
            self.probe = _read_probe(slot)
            return _read_head(slot) == header and xxhash.xxh3_64_hexdigest(into) == digest
        finally:
            _PIN.pack_into(self._pin, 0, -1, 0.0)

    def close(self) -> None:
        """Unmap all files."""
        for slot in self.slots:
            slot.close()
        self.slots = []
        self._pin.close()
