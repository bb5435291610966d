"""Files from which a restarted gateway continues: of its endpoint and its open HTTP sessions.

Each session has an append-only file, `RUN/sessions-INDEX/NAME` (mode 0600).  It is removed once the
buffer has acknowledged the sample, so that the directory never holds more than the gateway does in
memory.

    frame:  4 bytes length, 8 bytes xxh3 of the record, the record (msgpack)
    first:  SessionRecord with `opening`; then one per answer, before the answer leaves

A process may exit in the middle of a frame.  A torn tail is the record of an answer that was not
sent, and is cut off.  Calls that were being sampled are not kept: a client's retry begins them
again.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from actors.gateway.call_tree import CallNode, chain_digest
from actors.gateway.sessions import (
    Finish,
    HarnessRequest,
    Refusals,
    Session,
    SessionOutcome,
)
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import IntPair, Numbers, Ticket, VersionSpan
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.records import private
from asyncrl.records.append_log import FrameCodec, cut, write_pieces

FRAMES = FrameCodec(b"", covered=4)


class SessionOpening(Struct, frozen=True, array_like=True):
    """The constants of a session.

    date: for the template, ISO 8601
    opened: CLOCK_MONOTONIC seconds
    """

    name: str
    sample: int
    key: str
    lease: str
    seed: int
    first: bool
    date: str
    opened: float


class SessionProgress(Struct, frozen=True, array_like=True):
    """The state of a session; the newest record is valid.

    calls: their number, without the open ones
    """

    state: Literal["open", "judging", "ended"]
    calls: int
    placed: int
    tokens: int
    reported: int
    aside: int
    shortened: bool
    limit: str
    limited_at: float
    adopted: list[IntPair]
    forks: dict[str, int]
    refusals: Refusals
    score: tuple[float, Numbers, dict[int, float]] | None
    outcome: SessionOutcome | None


SAME_NAMES = set(SessionProgress.__struct_fields__) - {"calls", "placed", "forks"}  # as a Session's

# of a call's record, as in its node
NODE_FIELDS = (
    *("number", "aside", "stop", "spans", "finish"),
    *("chain", "tools", "text_length", "text_digest", "images"),
)


ARRAYS = {"tail": "<i4", "ids": "<i4", "logprobs": "<f4"}  # little-endian in a record


class CallRecord(Struct, frozen=True, array_like=True):
    """A call and its answer."""

    number: int
    parent: int | None
    tail: bytes
    ids: bytes
    logprobs: bytes
    spans: list[VersionSpan]
    finish: Finish
    aside: bool
    stop: tuple[str, ...]
    chain: bytes
    ours: dict[int, int]
    tools: list[Any]
    text_length: int
    text_digest: bytes
    message: dict[str, Any] | None
    body: bytes
    idempotency_key: str
    answer: bytes
    support: bytes = b""  # as in `CallResult`
    routed: bytes = b""  # of `CallNode.own_reads`
    images: list[str] = []  # the digests of its tail's images


class SessionRecord(Struct, frozen=True, array_like=True):
    """One frame.

    ticket: if it has changed
    sent: number of a call whose answer was sent
    images: digest -> blob of a call's images that no earlier record holds
    """

    progress: SessionProgress | None = None
    opening: SessionOpening | None = None
    ticket: Ticket | None = None
    call: CallRecord | None = None
    sent: int | None = None
    images: dict[str, bytes] = {}


def build_progress(session: Session) -> SessionProgress:
    """Build the record of a session's state."""
    return SessionProgress(
        calls=session.calls - len(session.open_calls),
        placed=session.tree.placed,
        forks=dict(session.tree.forks),
        **{name: getattr(session, name) for name in SAME_NAMES},
    )


def read_records(path: Path) -> list[SessionRecord]:
    """Read the records of a file and cut off a torn tail.

    Raises OSError, and msgspec.MsgspecError for a record of another version.
    """
    data = path.read_bytes()
    end = 0
    records = []
    for frame in FRAMES.read_all(data):
        records.append(msgspec.msgpack.decode(frame.payload, type=SessionRecord))
        end = frame.end
    if end < len(data):
        cut(path, end)
    return records


def restore(session: Session, records: list[SessionRecord], now: float) -> None:
    """Restore a new session from its records.

    Its requests get the same answers again, byte by byte. Raises KeyError for a call whose parent
    is missing.
    """
    nodes: dict[int, CallNode] = {}
    requests: dict[int, HarnessRequest] = {}
    for record in records:
        session.images |= record.images
        if (call_record := record.call) is not None:
            # put the call back into the tree, behind its parent, with the answer for a retry
            parent = None if call_record.parent is None else nodes[call_record.parent]
            fields: dict[str, Any] = {name: getattr(call_record, name) for name in NODE_FIELDS}
            for name, kind in ARRAYS.items():
                fields[name] = np.frombuffer(getattr(call_record, name), kind).astype(kind[1:])
            node = CallNode(
                parent=parent,
                support=SampledSupport.decode(call_record.support, len(call_record.ids) // 4),
                ours={index: nodes[number] for index, number in call_record.ours.items()},
                **fields,
            )
            if call_record.routed:
                node.routed = RoutedExperts.decode(call_record.routed, node.own_reads)
            nodes[call_record.number] = node
            session.restore_call(node)
            if call_record.chain and call_record.message is not None:
                session.tree.known_chains.update(
                    (call_record.chain, chain_digest(call_record.chain, call_record.message))
                )
                session.tree.set_answer(node, call_record.message)
            else:
                node.answer = call_record.message
            request = requests[call_record.number] = HarnessRequest(
                call_record.body,
                call_record.idempotency_key,
                node,
                connections=0,
                lost=True,
                answer=call_record.answer,
            )
            session.requests.append(request)
            session.last = session.last if node.aside else node
        if record.sent in requests:
            requests[record.sent].lost = False
        if record.progress is not None:
            progress = record.progress
            for name in SAME_NAMES:
                setattr(session, name, getattr(progress, name))
            session.calls, session.tree.placed = progress.calls, progress.placed
            session.tree.forks = Counter(progress.forks)
    session.call_at = session.active_at = session.judging_at = now


class SessionJournal:
    """The directory of the session files of one gateway.

    A file that cannot be written is removed, and a line is logged.  Its session goes on, but ends
    with this process.  So do the sessions that have no file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # name of a session -> digests of the images that this process has written to its file
        self.files: dict[str, set[str]] = {}

    def open(self, opening: SessionOpening, ticket: Ticket) -> None:
        """Create the file of a new session."""
        private.create_directory(self.directory)
        (self.directory / opening.name).unlink(missing_ok=True)
        self.files[opening.name] = set()
        self.append(opening.name, SessionRecord(opening=opening, ticket=ticket))

    def append(self, name: str, record: SessionRecord) -> None:
        """Write one frame, which outlives a kill of this process."""
        if name not in self.files:
            return
        try:
            payload = msgspec.msgpack.encode(record)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(private.open_private(self.directory / name, flags), "wb", 0) as file:
                write_pieces(file.fileno(), [FRAMES.make_header([payload]), payload])
        except (OSError, ValueError, TypeError, AsyncrlError) as error:
            self.fail(name, error)

    def append_progress(self, session: Session, ticket: Ticket | None = None) -> None:
        """Record the session's state, and its ticket if that has changed."""
        self.append(session.name, SessionRecord(build_progress(session), ticket=ticket))

    def append_answer(self, session: Session, request: HarnessRequest) -> None:
        """Record an answered call with its answer's bytes."""
        if session.name not in self.files:
            return
        written_images = self.files[session.name]
        assert request.call is not None and request.answer is not None
        node = request.call
        call = CallRecord(
            parent=None if node.parent is None else node.parent.number,
            ours={index: own.number for index, own in node.ours.items()},
            message=node.answer,
            body=request.body,
            idempotency_key=request.key,
            answer=request.answer,
            support=b"" if node.support is None else node.support.encode(),
            routed=b"" if node.routed is None else node.routed.encode(),
            **{name: getattr(node, name) for name in NODE_FIELDS},
            **{name: getattr(node, name).astype(kind).tobytes() for name, kind in ARRAYS.items()},
        )
        new_images = {
            name: session.images[name] for name in node.images if name not in written_images
        }
        written_images.update(new_images)
        self.append(
            session.name, SessionRecord(build_progress(session), call=call, images=new_images)
        )

    def append_sent(self, session: Session, request: HarnessRequest) -> None:
        """Record that an answer was sent, so that the same request again is a new one."""
        if request.call is not None and request.answer is not None:
            self.append(session.name, SessionRecord(sent=request.call.number))

    def fail(self, name: str, reason: object) -> None:
        """Log the reason and remove the file of a session."""
        path = self.directory / name
        print(f"{path}: {reason}: a restart ends this session", file=sys.stderr)
        self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a session's file, if it has one; later records are dropped."""
        if self.files.pop(name, None) is not None:
            (self.directory / name).unlink(missing_ok=True)

    def read(self) -> Iterator[tuple[SessionOpening, list[SessionRecord]]]:
        """Yield the kept sessions; an unreadable file is removed and named in the log."""
        if not self.directory.is_dir():
            return
        private.check(self.directory)
        for path in sorted(self.directory.iterdir()):
            self.files[path.name] = set()
            try:
                records = read_records(path)
            except (OSError, msgspec.MsgspecError) as error:
                self.fail(path.name, error)
                continue
            if records and records[0].opening is not None:
                yield records[0].opening, records
            else:
                self.fail(path.name, "it does not begin with the session's opening")

    def clear(self) -> None:
        """Remove all files, at the end of the run."""
        for path in self.directory.glob("*"):
            path.unlink()


def read_endpoint_file(run_dir: Path, name: str) -> str:
    """Read RUN/agent.url or RUN/agent.key of an earlier process; "" if it is missing."""
    try:
        descriptor = private.open_private(run_dir / name, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor) as file:
        return file.read().strip()


def read_kept_port(run_dir: Path) -> int:
    """Read the port in RUN/agent.url; 0 if there is none."""
    port = read_endpoint_file(run_dir, "agent.url").rpartition(":")[2]
    return int(port) if port.isdecimal() and int(port) < 1 << 16 else 0


def write_endpoint_files(run_dir: Path, url: str, key: str) -> None:
    """Write RUN/agent.url and RUN/agent.key, which only this user can read."""
    for name, text in (("agent.key", key), ("agent.url", url)):
        temporary_path = run_dir / f"{name}.new"
        descriptor = private.open_private(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{text}\n".encode())
        temporary_path.replace(run_dir / name)
