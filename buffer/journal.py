"""The journal, a segmented log with checksums and group commit, and the store that writes it.

Reading it cuts a torn tail off and reports damage.

```
journal/00000002-00000007.log   [mark 4 | length 4 | sure 8 | xxh3-64 8 | payload] ...
                                the first payload is a snapshot
journal/00000002.sure           [segment 8 | sure 8 | xxh3-64 8]
```

2 is the term of the buffer that writes it (`asyncrl/records/buffer_leadership.py`; without a term
the files are 00000007.log and sure), and 7 counts segments.  A buffer reads the segments of earlier
terms and writes only under its own term: a buffer that does not know yet that it was replaced
cannot do harm.

`sure` is the offset up to which the file was as durable as the mode promises when the frame was
written (`process`: written, `disk`: synced).  An unreadable position, or the end of the file, is a
torn tail and is cut off, unless a readable later frame or the file `sure` proves that it was
durable.  That file is written after the segment, without waiting: after a power cut it may be older
than the segment, never newer.

A segment that has grown too large is replaced by a snapshot. It remains valid meanwhile:

```
records ---> old segment (acknowledged from here)
        +--> tail -----------------+
snapshot --> N+1.part --> + tail --> rename --> N+1.log; the old segment is removed
```
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncrl.contract.admission import LimitEvidence
from asyncrl.contract.blobs.images import Blobs, index_by_digest
from asyncrl.contract.errors import AsyncrlError, DamagedDataError
from asyncrl.contract.freshness import BatchTiming
from asyncrl.contract.messages import (
    AttemptTokens,
    Delivery,
    Disposition,
    IntPair,
    LearnerHello,
    Ticket,
    Trajectory,
)
from asyncrl.contract.versions import Label
from asyncrl.records import atomic_write
from asyncrl.records.append_log import (
    FrameCodec,
    Record,
    count_bytes,
    cut,
    make_disk_full_error,
    write_pieces,
)
from asyncrl.records.buffer_leadership import BufferTerm
from buffer import checks
from buffer.state import FORMAT, SnapshotHead, StoreSnapshot
from buffer.store import NO_IMAGES, Store

FRAMES = FrameCodec(b"aRJ1", covered=4)
SURE = struct.Struct("<QQQ")
SEGMENT_BYTES = 64 * 1024 * 1024
TAIL_BYTES = 256 * 1024  # the caller waits while it writes a tail of at most this length


def parse_position(path: Path) -> IntPair:
    """Read term and number of a segment from its name: the sort key of segments.

    >>> parse_position(Path("journal/00000002-00000007.log"))
    (2, 7)
    >>> parse_position(Path("journal/00000008.log"))
    (0, 8)
    """
    term, _, number = path.stem.rpartition("-")
    return int(term or 0), int(number)


def make_segment_path(directory: Path, term: int, number: int) -> Path:
    """Return the path of a segment."""
    return directory / (f"{term:08d}-{number:08d}.log" if term else f"{number:08d}.log")


def list_segments(directory: Path, before: int = 0) -> list[Path]:
    """List the segments, the oldest first.

    before: only those of earlier terms; 0: all."""
    return sorted(
        (
            path
            for path in directory.glob("[0-9]*.log")
            if not before or parse_position(path)[0] < before
        ),
        key=parse_position,
    )


def read(path: Path) -> Iterator[bytes]:
    """Yield the payloads of a segment; cut a torn tail off the file.

    Raises DamagedDataError for anything else that is unreadable or missing."""
    data = path.read_bytes()
    end = 0
    for frame in FRAMES.read_all(data):
        yield frame.payload
        end = frame.end
    is_torn = end < len(data)
    position = parse_position(path)
    *newest, durable = max(map(_read_sure_file, path.parent.glob("*sure")), default=(0, 0, 0))
    if tuple(newest) > position:
        raise DamagedDataError(f"{make_segment_path(path.parent, *newest)} is missing: restore it")
    if (tuple(newest) == position and durable > end) or (
        is_torn and (not end or any(later.number > end for later in FRAMES.find_later(data, end)))
    ):
        raise DamagedDataError(
            f"{path} is damaged at byte {end} of {len(data)}, where it was intact before: restore "
            "it, or start a new run (a power cut can cause this under durability.mode = process, "
            "but not under disk)"
        )
    if is_torn:
        cut(path, end)


def _read_sure_file(path: Path) -> tuple[int, int, int]:
    """Read (term, number of the segment, durable bytes) from a file `sure`; zeros if it is torn."""
    try:
        number, sure, checksum = SURE.unpack(path.read_bytes())
    except (OSError, struct.error):
        return 0, 0, 0
    if xxhash.xxh3_64_intdigest(struct.pack("<QQ", number, sure)) != checksum:
        return 0, 0, 0
    return _parse_term(path), int(number), int(sure)


def _parse_term(path: Path) -> int:
    """Read the term of a file `sure` from its name; 0 without a term."""
    return int(path.stem) if path.suffix else 0


class NextSegment:
    """The next segment: a thread writes the snapshot and most records appended since.

    sync: whether records must reach the disk."""

    def __init__(self, path: Path, snapshot: bytes, *, sync: bool) -> None:
        self.path = path
        self.part = path.with_suffix(".part")
        self.sync = sync
        self.snapshot = snapshot
        self.fd = -1
        self.size = 0
        self.tail: list[Record] = []
        self.is_ready = False  # the rest of the tail is short
        self.error: OSError | None = None
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._write, name="journal-next", daemon=True)
        self.thread.start()

    def append(self, records: list[Record]) -> None:
        """Append records after the snapshot."""
        with self._lock:
            self.tail += records

    def _write(self) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self.fd = os.open(self.part, flags, 0o600)
            self.write_records([[self.snapshot]])
            self.snapshot = b""
            while not self.is_ready:
                with self._lock:
                    tail_bytes = sum(map(count_bytes, self.tail))
                    self.is_ready = tail_bytes <= TAIL_BYTES
                    records = []
                    if not self.is_ready:
                        records, self.tail = self.tail, []
                self.write_records(records)
        except OSError as error:
            self.error = error
            self.is_ready = True

    def write_records(self, records: list[Record]) -> None:
        """Write records so that they are as durable as the mode promises.  Raises OSError."""
        for record in records:
            self.size += write_pieces(self.fd, [FRAMES.make_header(record, self.size), *record])
        if self.sync and records:
            os.fdatasync(self.fd)

    def finish(self) -> None:
        """Write the rest of the tail and rename the file: it is now the newest segment.

        Raises OSError."""
        if self.error is not None:
            raise self.error
        self.write_records(self.tail)
        os.replace(self.part, self.path)
        if self.sync:
            atomic_write.sync_path(self.path.parent)

    def abandon(self) -> None:
        """Discard the file; the older segment stays valid."""
        self.thread.join()
        if self.fd >= 0:
            os.close(self.fd)
        atomic_write.remove(self.part)


class Journal:
    """The log being written: `append`, then `write`.

    A record is safe once `durable` has reached its number.  With `sync` a thread syncs groups of
    records, while further records are appended and written.

    sync: a record is durable only once the disk has it (durability `disk`).
    segment_bytes: size from which a segment is replaced.
    term: the term of the buffer that writes."""

    def __init__(
        self, directory: Path, *, sync: bool, segment_bytes: int = SEGMENT_BYTES, term: int = 0
    ) -> None:
        self.directory = directory
        self.term = term
        self.sync = sync
        self.segment_bytes = segment_bytes
        atomic_write.create_directory(directory)
        for leftover in directory.glob("*.part"):
            if parse_position(leftover)[0] <= term:
                atomic_write.remove(leftover)
        self.next: NextSegment | None = None
        self._remover: threading.Thread | None = None
        self._sure_fd = os.open(
            directory / (f"{term:08d}.sure" if term else "sure"), os.O_WRONLY | os.O_CREAT, 0o600
        )
        existing = list_segments(directory, term)
        self.number = parse_position(existing[-1])[1] if existing else 0
        self.fd = -1
        self.appended = self.durable = self.size = self.sure = self.first = 0
        self.waiting: list[Record] = []
        self.failure: OSError | None = None
        self._wake = threading.Condition()
        self._goal = (0, 0)  # (record, bytes) written and not yet synced
        self._busy = self._end = False
        self.thread: threading.Thread | None = None
        if sync:
            self.thread = threading.Thread(target=self._sync_records, name="journal", daemon=True)
            self.thread.start()

    def append(self, *record: bytes | memoryview) -> int:
        """Queue a record and return its number; its pieces must not change until it is written."""
        self.waiting.append(record)
        self.appended += 1
        return self.appended

    def write(self) -> None:
        """Write all appended records to the file; the thread syncs them under `disk`.

        Raises AsyncrlError when the disk is full."""
        if self.failure is not None:
            raise make_disk_full_error(self.directory, self.failure) from self.failure
        if self.next is not None and self.next.is_ready:
            self._switch()
        if not self.waiting:
            return
        pieces: list[bytes | memoryview] = []
        for record in self.waiting:
            pieces.append(FRAMES.make_header(record, self.sure))
            pieces += record
        if self.next is not None:
            self.next.append(self.waiting)
        self.waiting = []
        try:
            self.size += write_pieces(self.fd, pieces)
        except OSError as error:
            self.failure = error  # the file may end in a torn tail: append nothing after it
            raise make_disk_full_error(self.directory, error) from error
        if not self.sync:
            self.durable = self.appended
            self.sure = self.size
            self._write_sure()
            return
        with self._wake:
            self._goal = (self.appended, self.size)
            self._wake.notify()

    def _sync_records(self) -> None:
        """Sync the written records in groups, until `close`."""
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
                self._write_sure()
                self._busy = False
                self._wake.notify_all()

    def _write_sure(self) -> None:
        """Write the file `sure`, an additional proof; correctness does not depend on it."""
        position = struct.pack("<QQ", self.number, self.sure)
        checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(position))
        with contextlib.suppress(OSError):
            os.pwrite(self._sure_fd, position + checksum, 0)

    @property
    def is_full(self) -> bool:
        """Whether a new segment is due, which would be smaller than this one."""
        return self.next is None and self.size > max(self.segment_bytes, 2 * self.first)

    def rotate(self, snapshot: bytes, *, wait: bool = True) -> None:
        """Start a new segment with a snapshot of everything appended so far.

        Older segments are removed. With wait=False a thread writes the new segment, and a later
        `write` switches to it.

        Raises AsyncrlError when the disk is full; the older segment is unchanged and stays
        valid."""
        if self.next is not None:
            self.next.abandon()
            self.next = None
        self.write()  # the snapshot contains these records: keep them out of the tail
        path = make_segment_path(self.directory, self.term, self.number + 1)
        self.next = NextSegment(path, snapshot, sync=self.sync)
        if wait:
            self._switch()

    def _switch(self) -> None:
        """Switch to the next segment."""
        new = self.next
        assert new is not None
        self.next = None
        new.thread.join()
        first = new.size
        with self._wake:
            self._wake.wait_for(lambda: not self._busy)
            try:
                new.finish()
            except OSError as error:
                new.abandon()
                raise make_disk_full_error(new.part, error) from error
            old = self.fd
            self.fd = new.fd
            self.number += 1
            self.size = self.sure = new.size
            self.first = first
            self.durable = self.appended - len(self.waiting)
            self._goal = (self.durable, self.size)
            self._write_sure()
        # in a thread, because removing a large file takes long
        self._remover = threading.Thread(target=self._remove, args=(old, new.path), daemon=True)
        self._remover.start()

    def _remove(self, old: int, keep: Path) -> None:
        """Remove the segments that the new one replaces; a later call removes what remains."""
        try:
            with contextlib.suppress(OSError):  # the run directory may be gone
                for other in list_segments(self.directory):
                    if parse_position(other) < parse_position(keep):
                        atomic_write.remove(other)
                for note in self.directory.glob("*sure"):
                    if _parse_term(note) < self.term:
                        atomic_write.remove(note)
        finally:
            if old >= 0:
                os.close(old)

    def abandon(self) -> None:
        """Close without writing the queued records: another buffer's journal is valid now."""
        self.waiting = []
        self.close()

    def close(self) -> None:
        """Write the queued records and close the files.

        Raises AsyncrlError when the disk is full."""
        if self.next is not None:
            self.next.abandon()
            self.next = None
        if self._remover is not None:
            self._remover.join()
        if self.fd >= 0 and self.failure is None:
            self.write()
            if self.sync:
                os.fdatasync(self.fd)
                self.sure = self.size
                self._write_sure()
                os.fsync(self._sure_fd)
        with self._wake:
            self._end = True
            self._wake.notify_all()
        if self.thread is not None:
            self.thread.join()
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._sure_fd)
            self.fd = -1


class JournalRecord(msgspec.Struct, array_like=True):
    """A request with its time, not its result.

    That is enough because the store is a deterministic function of its records: its clock is an
    argument, its prompts come from the task, and lag follows from the tree of versions. A segment
    begins with a snapshot that has the settings under which its records were written."""


class GrantRecord(JournalRecord, tag="grant"):
    """A request for tickets that granted some."""

    producer: str
    session: int
    samples: int
    now: float
    attempts: int  # the counter afterwards, which detects a replay that differs
    # the images of prompts, by digest; a replay does not depend on the task for them
    images: dict[int, dict[str, bytes]] = {}  # ticket -> images


class RenewalRecord(JournalRecord, tag="renew"):
    """A renewal of leases."""

    producer: str
    session: int
    progress: list[AttemptTokens]
    now: float
    judging: list[IntPair] = []  # older journals lack this and the next field
    gap: float = 0.0


class ExpiryRecord(JournalRecord, tag="expire"):
    """A time at which leases had expired."""

    now: float


class SessionsEndRecord(JournalRecord, tag="end"):
    """The end of a producer's other sessions."""

    producer: str
    session: int


class SampleRecord(JournalRecord, tag="deliver"):
    """A delivered sample, in older journals."""

    trajectory: Trajectory
    images: dict[str, bytes] = {}  # older journals lack it


class FrameRecord(JournalRecord, tag="frame"):
    """Several samples; one record costs a third of the separate records."""

    samples: list[Trajectory]
    images: dict[str, bytes] = {}  # older journals lack it


class DeliveryRecord(JournalRecord, tag="came"):
    """A frame of samples in the generator's encoding, so that it is not encoded again."""

    message: Delivery


class HelloRecord(JournalRecord, tag="hello"):
    """The hello of a new learner that the store follows."""

    hello: LearnerHello


class BatchRequestRecord(JournalRecord, tag="ask"):
    """A batch request that changed the store."""

    epoch: int
    number: int


class CommitRecord(JournalRecord, tag="commit"):
    """The commit of a batch."""

    number: int
    label: Label
    digest: str
    unused: list[IntPair] = []
    evidence: LimitEvidence | None = None  # older journals lack this and the next fields
    timing: BatchTiming | None = None
    now: float = 0.0


class CheckpointRecord(JournalRecord, tag="checkpointed"):
    """A checkpoint that retired batches."""

    oldest: int


class FinishRecord(JournalRecord, tag="finish"):
    """The end of the run."""


class TokenReportRecord(JournalRecord, tag="told"):
    """A session's own count of sampled tokens."""

    producer: str
    session: int
    drawn: int


class FreedLeasesRecord(JournalRecord, tag="free"):
    """Leases whose tickets were lost in transit."""

    attempts: list[IntPair]  # (ticket, attempt)


StoreRecord = (
    GrantRecord
    | RenewalRecord
    | ExpiryRecord
    | SessionsEndRecord
    | SampleRecord
    | FrameRecord
    | DeliveryRecord
    | HelloRecord
    | BatchRequestRecord
    | CommitRecord
    | CheckpointRecord
    | FinishRecord
    | TokenReportRecord
    | FreedLeasesRecord
)
# The change of the store that a record repeats; its fields are the arguments, under their names.
# `RecordedStore` records each of them after making it.
REPLAYED: dict[type, Callable[..., object]] = {
    RenewalRecord: Store.renew,
    ExpiryRecord: Store.expire,
    SessionsEndRecord: Store.end_sessions,
    HelloRecord: Store.follow_learner,
    BatchRequestRecord: Store.ask,
    CommitRecord: Store.commit,
    CheckpointRecord: Store.retire_batches,
    FinishRecord: Store.finish,
    TokenReportRecord: Store.report_tokens,
    FreedLeasesRecord: Store.free_leases,
}
_encode = msgspec.msgpack.Encoder().encode
# the encoded beginning of a `DeliveryRecord`, which the message follows
_EMPTY_DELIVERY = Delivery("", 0, 0, [])
_DELIVERY_HEAD = _encode(DeliveryRecord(_EMPTY_DELIVERY))[: -len(_encode(_EMPTY_DELIVERY))]
_decode = msgspec.msgpack.Decoder(StoreRecord).decode


class RecordedStore(Store):
    """A `Store` that appends each change to the journal after making it.

    Replies may leave the process only after the records are durable.
    """

    journal: Journal

    def open(
        self,
        directory: Path,
        *,
        sync: bool,
        now: float,
        segment_bytes: int = SEGMENT_BYTES,
        term: BufferTerm | None = None,
    ) -> RecordedStore:
        """Restore the new store from the journal of earlier processes (of terms before `term`).

        sync: whether a record is durable only once the disk has it.
        segment_bytes: size at which a segment is replaced.
        Raises DamagedDataError if the journal does not replay, BufferTakenOver if there is a later
        term."""
        settings, plan = self.settings, self.evaluations.plan
        term_number = term.number if term else 0
        try:
            self._replay_newest(directory, term_number)
        finally:
            if term is not None:
                term.check()  # a later buffer may have removed or extended the segments
        # a segment replays with the settings that it was written under; now use the current ones
        self.settings, self.evaluations.plan = settings, plan
        self.finished = self.finished and self.committed >= settings.steps
        self.evaluations.fresh = []
        self.mixer.events = []
        self.renew_all_leases(now)
        self.journal = Journal(directory, sync=sync, term=term_number, segment_bytes=segment_bytes)
        self.journal.rotate(_encode(self.snapshot()))
        return self

    def _replay_newest(self, directory: Path, term: int) -> None:
        """Replay the newest segment of earlier terms.

        A segment may vanish meanwhile: a buffer that does not know yet that it was replaced may
        have written a newer one."""
        while paths := list_segments(directory, term):
            try:
                return self._replay_segment(paths[-1])
            except FileNotFoundError:
                if paths[-1] in list_segments(directory, term):
                    raise

    def _replay_segment(self, path: Path) -> None:
        """Replay a segment. Raises DamagedDataError if that fails."""
        records = read(path)
        try:
            snapshot = next(records)
            written_format = msgspec.msgpack.decode(snapshot, type=SnapshotHead).format
            if written_format != FORMAT:
                raise DamagedDataError(
                    f"{path} has format {written_format}, but this version reads {FORMAT}: "
                    "continue with the version that wrote it"
                )
            self.restore(msgspec.msgpack.decode(snapshot, type=StoreSnapshot))
            for payload in records:
                self._apply(_decode(payload))
        except (StopIteration, msgspec.MsgspecError, KeyError) as error:
            raise DamagedDataError(
                f"{path} cannot be replayed: {str(error) or 'it is empty'}; start a new run, or "
                "restore the file"
            ) from error

    def _apply(self, record: StoreRecord) -> None:
        """Replay one record with the methods of `Store`, which do not record."""
        if isinstance(record, GrantRecord):
            tickets = super().grant(record.producer, record.session, record.samples, record.now)
            if self.attempts != record.attempts:
                raise DamagedDataError(
                    f"the journal cannot be replayed: a grant now gives attempt {self.attempts}, "
                    f"but the record has {record.attempts}: restore the task and the code that "
                    "wrote it, or start a new run"
                )
            for ticket in tickets:
                # the recorded images of its prompt; the task may have others now
                images = record.images.get(ticket.ticket, {})
                if (group := self.alive.get(ticket.ticket)) is not None:
                    for name in index_by_digest(ticket.prompt.images).keys() - images.keys():
                        self.stored_bytes -= len(group.images.pop(name, b""))
                    self.stored_bytes += group.add_images(images)
        elif isinstance(record, SampleRecord | FrameRecord | DeliveryRecord):
            try:
                source = record.message if isinstance(record, DeliveryRecord) else record
                for sample in (
                    [source.trajectory] if isinstance(source, SampleRecord) else source.samples
                ):
                    checks.check_sample(self, sample)
                    self.accept_sample(sample, source.images)
            except AsyncrlError as error:
                raise DamagedDataError(f"the journal cannot be replayed: {error}") from error
        else:
            REPLAYED[type(record)](self, *msgspec.structs.astuple(record))

    def _record(self, record: Any) -> None:
        self.journal.append(_encode(record))

    def flush_journal(self) -> None:
        """Write the appended records; begin a new segment when this one is full."""
        if self.journal.is_full:
            self.journal.rotate(_encode(self.snapshot()), wait=False)
        self.journal.write()

    # ---- the store's changes, recorded -----------------------------------------------------------

    def grant(self, producer: str, session: int, samples: int, now: float) -> list[Ticket]:
        tickets = super().grant(producer, session, samples, now)
        if tickets:
            images = {
                ticket.ticket: index_by_digest(ticket.prompt.images)
                for ticket in tickets
                if ticket.prompt.images and ticket.kind == "train"
            }
            record = GrantRecord(producer, session, samples, now, self.attempts, images)
            self._record(record)
        return tickets

    def accept_samples(
        self,
        samples: Sequence[Trajectory],
        encoded: bytes | memoryview = b"",
        images: Blobs = NO_IMAGES,
    ) -> list[Disposition]:
        dispositions = super().accept_samples(samples, encoded, images)
        if encoded:
            self.journal.append(_DELIVERY_HEAD, encoded)
        else:
            self._record(FrameRecord(list(samples), dict(images)))
        return dispositions


def _make_recorder(kind: type, change: Callable[..., object]) -> Callable[..., object]:
    """Make the method that records a change of the store, if it changed something."""

    @functools.wraps(change)
    def make_change(store: RecordedStore, *args: Any, **kwargs: Any) -> object:
        changes_before = store.changes
        result = change(store, *args, **kwargs)
        if store.changes != changes_before:
            store._record(kind(*args, **kwargs))
        return result

    return make_change


for _kind, _change in REPLAYED.items():
    setattr(RecordedStore, _change.__name__, _make_recorder(_kind, _change))
