"""A store that records every change in the journal and restores its state from there.

A record is the request with its time, not its result.  That is enough because the store is a
deterministic function of its records: its clock is an argument, its prompts come from the task, and
lag follows from the tree of versions.  A segment begins with a snapshot that has the settings under
which its records were written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.admission import LimitEvidence
from asyncrl.contract.blobs.images import index_by_digest
from asyncrl.contract.errors import AsyncrlError, DamagedDataError
from asyncrl.contract.freshness.window import BatchTiming
from asyncrl.contract.messages import (
    Delivery,
    Disposition,
    LearnerHello,
    Prompt,
    Ticket,
    Trajectory,
)
from asyncrl.contract.versions import Label
from asyncrl.records.buffer_leadership import BufferTerm
from buffer import checks
from buffer.evaluation import Evaluations
from buffer.groups import StoreSettings
from buffer.journal import Journal, list_segments, read
from buffer.mixer import TaskMixer
from buffer.state import FORMAT, SnapshotHead, StoreSnapshot
from buffer.store import NO_IMAGES, Store


class GrantRecord(msgspec.Struct, tag="grant", array_like=True):
    """A request for tickets that granted some."""

    producer: str
    session: int
    samples: int
    now: float
    attempts: int  # the counter afterwards, which detects a replay that differs
    # the images of prompts, by digest; a replay does not depend on the task for them
    images: dict[int, dict[str, bytes]] = {}  # ticket -> images


class RenewalRecord(msgspec.Struct, tag="renew", array_like=True):
    """A renewal of leases."""

    producer: str
    session: int
    progress: list[tuple[int, int, int]]
    now: float
    judging: list[tuple[int, int]] = []  # older journals lack this and the next field
    gap: float = 0.0


class ExpiryRecord(msgspec.Struct, tag="expire", array_like=True):
    """A time at which leases had expired."""

    now: float


class SessionsEndRecord(msgspec.Struct, tag="end", array_like=True):
    """The end of a producer's other sessions."""

    producer: str
    session: int


class SampleRecord(msgspec.Struct, tag="deliver", array_like=True):
    """A delivered sample."""

    trajectory: Trajectory
    images: dict[str, bytes] = {}  # older journals lack it


class FrameRecord(msgspec.Struct, tag="frame", array_like=True):
    """Several samples; one record costs a third of the separate records."""

    samples: list[Trajectory]
    images: dict[str, bytes] = {}  # older journals lack it


class DeliveryRecord(msgspec.Struct, tag="came", array_like=True):
    """A frame of samples in the generator's encoding, so that it is not encoded again."""

    message: Delivery


class HelloRecord(msgspec.Struct, tag="hello", array_like=True):
    """The hello of a new learner that the store follows."""

    hello: LearnerHello


class BatchRequestRecord(msgspec.Struct, tag="ask", array_like=True):
    """A batch request that changed the store."""

    epoch: int
    number: int


class CommitRecord(msgspec.Struct, tag="commit", array_like=True):
    """The commit of a batch."""

    number: int
    label: Label
    digest: str
    unused: list[tuple[int, int]] = []
    evidence: LimitEvidence | None = None  # older journals lack this and the next fields
    timing: BatchTiming | None = None
    now: float = 0.0


class CheckpointRecord(msgspec.Struct, tag="checkpointed", array_like=True):
    """A checkpoint that retired batches."""

    oldest: int


class FinishRecord(msgspec.Struct, tag="finish", array_like=True):
    """The end of the run."""


class TokenReportRecord(msgspec.Struct, tag="told", array_like=True):
    """A session's own count of sampled tokens."""

    producer: str
    session: int
    drawn: int


class FreedLeasesRecord(msgspec.Struct, tag="free", array_like=True):
    """Leases whose tickets were lost in transit."""

    attempts: list[tuple[int, int]]  # (ticket, attempt)


Record = (
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
_decode = msgspec.msgpack.Decoder(Record).decode


class RecordedStore(Store):
    """A `Store` that appends each change to the journal after making it.

    Replies may leave the process only after the records are durable.
    """

    journal: Journal

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        sync: bool,
        settings: StoreSettings,
        prompt: Callable[[int], Prompt],
        evaluations: Evaluations,
        mixer: TaskMixer | None = None,
        now: float,
        segment_bytes: int = 0,
        term: BufferTerm | None = None,
    ) -> RecordedStore:
        """Restore the store from the journal of earlier processes (of terms before `term`).

        sync: whether a record is durable only once the disk has it.
        segment_bytes: size at which a segment is replaced; 0: the default.
        Raises DamagedDataError if the journal does not replay, BufferTakenOver if there is a later
        term."""
        store = cls(settings, prompt, evaluations, mixer)
        plan = evaluations.plan
        try:
            store._replay_newest(directory, term.number if term else 0)
        finally:
            if term is not None:
                term.check()  # a later buffer may have removed or extended the segments
        # a segment replays with the settings that it was written under; now use the current ones
        evaluations.plan = plan
        store.settings = settings
        store.finished = store.finished and store.committed >= settings.steps
        evaluations.fresh = []
        store.mixer.events = []
        store.renew_all_leases(now)
        store.journal = Journal(
            directory,
            sync=sync,
            term=term.number if term else 0,
            **({"segment_bytes": segment_bytes} if segment_bytes else {}),
        )
        store.journal.rotate(_encode(store.snapshot()))
        return store

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
                f"{path} cannot be replayed: {error or 'it is empty'}; start a new run, or restore "
                "the file"
            ) from error

    def _apply(self, record: Record) -> None:
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
                    super().accept_sample(sample, source.images)
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
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> list[Disposition]:
        accept = super().accept_sample
        dispositions = [accept(sample, images) for sample in samples]
        if encoded:
            self.journal.append(_DELIVERY_HEAD, encoded)
        else:
            self._record(FrameRecord(list(samples), dict(images)))
        return dispositions

    def accept_sample(
        self, sample: Trajectory, images: Mapping[str, bytes] = NO_IMAGES
    ) -> Disposition:
        disposition = super().accept_sample(sample, images)
        self._record(SampleRecord(sample, dict(images)))
        return disposition


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
