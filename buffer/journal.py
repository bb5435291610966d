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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Union

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


class Segment:
    """A segment under the name `part`, with a snapshot and most records appended since.

    path: its name from `finish` on.
    tail: the records that are appended while the snapshot is written; they are taken from it.
    sync: whether records must reach the disk.
    Raises OSError."""

    def __init__(self, path: Path, snapshot: bytes, tail: deque[Record], *, sync: bool) -> None:
        self.path = path
        self.part = path.with_suffix(".part")
        self.sync = sync
        self.size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self.fd = os.open(self.part, flags, 0o600)
        try:
            self.write([[snapshot]])
            # The caller waits while `finish` writes the rest. Until then it appends to the tail:
            # only copying and popping are safe.
            while sum(map(count_bytes, tuple(tail))) > TAIL_BYTES:
                self.write([tail.popleft() for _ in range(len(tail))])
            if sync:
                os.fdatasync(self.fd)
        except OSError:
            self.abandon()
            raise

    def write(self, records: Iterable[Record], sure: int | None = None) -> None:
        """Write records.  Raises OSError.

        sure: durable bytes of the file; None: those before each record will be at the renaming."""
        pieces: list[bytes | memoryview] = []
        for record in records:
            pieces += FRAMES.make_header(record, self.size if sure is None else sure), *record
            self.size += FRAMES.size + count_bytes(record)
        write_pieces(self.fd, pieces)

    def finish(self, tail: Iterable[Record]) -> None:
        """Write the rest of the tail and rename the file: it is now the newest segment.

        Raises OSError."""
        self.write(tail)
        if self.sync:
            os.fdatasync(self.fd)
        os.replace(self.part, self.path)
        if self.sync:
            atomic_write.sync_path(self.path.parent)

    def abandon(self) -> None:
        """Discard the file; the older segment stays valid."""
        os.close(self.fd)
        atomic_write.remove(self.part)


class Journal:
    """The log being written, from a snapshot on: `append`, then `write`.

    A record is safe once `durable` has reached its number.  With `sync` a thread syncs groups of
    records, while further records are appended and written.  Only the caller's thread changes the
    journal: a thread of the pool syncs a file, writes the next segment or removes old ones.

    sync: a record is durable only once the disk has it (durability `disk`).
    segment_bytes: size from which a segment is replaced.
    term: the term of the buffer that writes.
    Raises AsyncrlError when the disk is full."""

    def __init__(
        self,
        directory: Path,
        snapshot: bytes,
        *,
        sync: bool,
        segment_bytes: int = SEGMENT_BYTES,
        term: int = 0,
    ) -> None:
        self.directory = directory
        self.term = term
        self.sync = sync
        self.segment_bytes = segment_bytes
        atomic_write.create_directory(directory)
        for leftover in directory.glob("*.part"):
            if parse_position(leftover)[0] <= term:
                atomic_write.remove(leftover)
        self._sure_fd = os.open(
            directory / (f"{term:08d}.sure" if term else "sure"), os.O_WRONLY | os.O_CREAT, 0o600
        )
        existing = list_segments(directory, term)
        self.number = parse_position(existing[-1])[1] if existing else 0
        self.tail: deque[Record] = deque()  # of the next segment
        self.appended = self.durable = self.sure = self.first = 0
        self.waiting: list[Record] = []
        self.failure: OSError | None = None
        self._threads = ThreadPoolExecutor(3, "journal")
        # the sync under way, and the (record, bytes) that are durable after it
        self._syncing: Future[None] | None = None
        self._goal = (0, 0)
        self._begin(snapshot)
        self.segment = self._finish_next(None)

    def append(self, *record: bytes | memoryview) -> int:
        """Queue a record and return its number; its pieces must not change until it is written."""
        self.waiting.append(record)
        self.appended += 1
        return self.appended

    def write(self) -> None:
        """Write all appended records to the file; a thread syncs them under `disk`.

        Raises AsyncrlError when the disk is full."""
        try:
            if self.failure is not None:
                raise self.failure
            if self.next is not None and self.next.done():
                self.segment = self._finish_next(self.segment)
            if self.waiting:
                records, self.waiting = self.waiting, []
                if self.next is not None:
                    self.tail += records
                self.segment.write(records, self.sure)
            self._promise()
        except OSError as error:
            self.failure = error  # the file may end in a torn tail: append nothing after it
            raise make_disk_full_error(self.directory, error) from error

    def _promise(self) -> None:
        """Count what is durable, and sync what was written since.  Raises OSError."""
        if self._syncing is not None and self._syncing.done():
            self._syncing.result()
            self._syncing = None
            self._set_durable(*self._goal)
        written = self.appended - len(self.waiting), self.segment.size
        if self._syncing is not None or written[0] == self.durable:
            return
        if not self.sync:
            self._set_durable(*written)
        else:
            self._goal = written
            self._syncing = self._threads.submit(os.fdatasync, self.segment.fd)

    def _set_durable(self, record: int, size: int) -> None:
        """Count records, and write the file `sure`.

        The file is an additional proof; correctness does not depend on it."""
        self.durable, self.sure = record, size
        position = struct.pack("<QQ", self.number, self.sure)
        checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(position))
        with contextlib.suppress(OSError):
            os.pwrite(self._sure_fd, position + checksum, 0)

    @property
    def is_full(self) -> bool:
        """Whether a new segment is due, which would be smaller than this one."""
        return self.next is None and self.segment.size > max(self.segment_bytes, 2 * self.first)

    def rotate(self, snapshot: bytes, *, wait: bool = True) -> None:
        """Start a new segment with a snapshot of everything appended so far.

        Older segments are removed. With wait=False a thread writes the new segment, and a later
        `write` switches to it.

        Raises AsyncrlError when the disk is full; the older segment is unchanged and stays
        valid."""
        self._abandon_next()
        self.write()  # the snapshot contains these records: keep them out of the tail
        self._begin(snapshot)
        if wait:
            self.segment = self._finish_next(self.segment)

    def _begin(self, snapshot: bytes) -> None:
        """Let a thread write the next segment."""
        path = make_segment_path(self.directory, self.term, self.number + 1)
        self.next: Future[Segment] | None = self._threads.submit(
            Segment, path, snapshot, self.tail, sync=self.sync
        )

    def _abandon_next(self) -> None:
        """Discard the next segment, if one is being written."""
        if self.next is not None:
            with contextlib.suppress(OSError):
                self.next.result().abandon()
            self.next = None
            self.tail.clear()

    def _finish_next(self, old: Segment | None) -> Segment:
        """Finish and return the next segment, and let a thread remove the ones before it.

        old: the segment to which records were written so far."""
        assert self.next is not None
        try:
            new = self.next.result()
            self.first = new.size
            new.finish(self.tail)
        except OSError as error:
            self._abandon_next()
            path = make_segment_path(self.directory, self.term, self.number + 1)
            raise make_disk_full_error(path.with_suffix(".part"), error) from error
        self.next = None
        self.tail.clear()
        if self._syncing is not None:
            futures.wait([self._syncing])  # it uses the old file
            self._syncing = None
        self.number += 1
        self._set_durable(self.appended - len(self.waiting), new.size)
        # removing a large file takes long
        self._threads.submit(self._remove, old, new.path)
        return new

    def _remove(self, old: Segment | None, keep: Path) -> None:
        """Remove the segments that the new one replaces; a later call removes what remains."""
        try:
            for other in list_segments(self.directory):
                if parse_position(other) < parse_position(keep):
                    atomic_write.remove(other)
            for note in self.directory.glob("*sure"):
                if _parse_term(note) < self.term:
                    atomic_write.remove(note)
        finally:
            if old is not None:
                os.close(old.fd)

    def abandon(self) -> None:
        """Close without writing the queued records: another buffer's journal is valid now."""
        self.waiting = []
        self.close()

    def close(self) -> None:
        """Write the queued records and close the files.

        Raises AsyncrlError when the disk is full."""
        self._abandon_next()
        if self.failure is None:
            self.write()
            if self.sync:
                os.fdatasync(self.segment.fd)
                self._set_durable(self.appended, self.segment.size)
                os.fsync(self._sure_fd)
        self._threads.shutdown()
        os.close(self.segment.fd)
        os.close(self._sure_fd)


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


StoreRecord: Any = Union[tuple(JournalRecord.__subclasses__())]  # noqa: UP007 - of all of them
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
        self.renew_all_leases(now)
        self.journal = Journal(
            directory,
            _encode(self.snapshot()),
            sync=sync,
            term=term_number,
            segment_bytes=segment_bytes,
        )
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

    def _apply(self, record: JournalRecord) -> None:
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
