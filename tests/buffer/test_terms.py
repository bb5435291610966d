"""Of two buffers of a run one speaks: terms, the journal's segments, what peers do."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import pytest
from journal_kit import open_recorded, state
from process_kit import ROOT, until
from service_kit import answers, greet, want
from store_kit import hello

from asyncrl.cli.processes import move_buffer
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, BufferTakenOver, ConfigError, DamagedDataError
from asyncrl.contract.versions import Label
from asyncrl.records import buffer_leadership, process_log, rundir
from asyncrl.transport import chunks, sockets
from asyncrl.transport.sockets import BufferSocket, PeerSocket
from buffer import journal as j
from buffer import service as service_module
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore
from buffer.service import BufferService
from learner.publisher import Publisher

HERE = "tcp://127.0.0.1:1"
THERE = "tcp://127.0.0.2:1"


def test_the_newest_term_is_the_only_one_that_is_not_over(tmp_path: Path) -> None:
    first = buffer_leadership.take_leadership(tmp_path, HERE)
    first.check()
    second = buffer_leadership.take_leadership(tmp_path, THERE, moved=True)
    assert (first.number, second.number) == (1, 2)
    assert buffer_leadership.read_current_address(tmp_path) == THERE
    with pytest.raises(
        BufferTakenOver, match=rf"term 00000002 is process \d+ on .* at {THERE}\): this"
    ):
        first.check()
    third = buffer_leadership.take_leadership(tmp_path, HERE)
    third.check()
    assert buffer_leadership.read_current_address(tmp_path) == "", "it is where the config says"
    for old in (first, second):
        before = old.path.read_bytes()
        with pytest.raises(BufferTakenOver):
            old.check()
        old.end()
        buffer_leadership.take_leadership(tmp_path, HERE)
        assert old.path.read_bytes() == before, "its end is told once"
    third.path.unlink()
    with pytest.raises(BufferTakenOver, match="was removed"):
        third.check()
    assert not list(buffer_leadership.get_directory(tmp_path).glob(".*.part"))


def test_of_two_takers_one_gets_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[buffer_leadership.BufferTerm] = []
    link = os.link

    def overtaken(source: Any, target: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        part = Path(source).with_name("kept")
        os.rename(source, part)  # both are of this process here
        others.append(buffer_leadership.take_leadership(tmp_path, THERE))
        os.rename(part, source)
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    mine = buffer_leadership.take_leadership(tmp_path, HERE)
    assert (others[0].number, mine.number) == (1, 2)
    mine.check()
    with pytest.raises(BufferTakenOver):
        others[0].check()


def test_no_run_is_taken_from_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_leadership.socket, "gethostname", lambda: "far")
    far = buffer_leadership.take_leadership(tmp_path, HERE)
    monkeypatch.setattr(buffer_leadership.socket, "gethostname", lambda: "near")
    with pytest.raises(ConfigError, match=r"has a buffer on far .*--take-over ADDRESS"):
        buffer_leadership.take_leadership(tmp_path, THERE)
    far.check()
    for may in ({"moved": True}, {"supervised": True}):
        taken = buffer_leadership.take_leadership(tmp_path, THERE, **may)
        taken.check()
    taken.end()
    monkeypatch.setattr(buffer_leadership.socket, "gethostname", lambda: "far")
    assert buffer_leadership.take_leadership(tmp_path, HERE).number == 4, (
        "the one before has said its end"
    )


def test_a_torn_term_is_nobodys_and_still_counts(tmp_path: Path) -> None:
    torn = buffer_leadership.take_leadership(tmp_path, HERE, moved=True)
    torn.path.write_bytes(b'{"host')
    assert buffer_leadership.read(torn.path) == (None, "")
    assert buffer_leadership.read_current_address(tmp_path) == ""
    assert buffer_leadership.take_leadership(tmp_path, HERE).number == 2


def orders(first: int, second: int) -> Iterator[list[bool]]:
    for places in itertools.combinations(range(first + second), second):
        yield [place in places for place in range(first + second)]


def played(where: Path, order: list[bool], *, check_first: bool, rotates: bool) -> tuple[int, int]:
    """A buffer writes two records, and says each when it may, while another takes its term and
    reads.  Returns how many were said, and how many of these the other has read."""
    old = buffer_leadership.take_leadership(where, HERE)
    log = j.Journal(where / "journal", b"snapshot", sync=False, term=old.number)
    said: list[bytes] = []
    over: list[str] = []
    new: list[buffer_leadership.BufferTerm] = []
    found: list[bytes] = []

    made = [b"snapshot"]

    def write(record: bytes) -> None:
        made.append(record)
        log.append(record)
        log.write()

    def rotate() -> None:
        if rotates:
            log.rotate(b"|".join(made))

    def look() -> None:
        try:
            old.check()
        except BufferTakenOver as error:
            over.append(str(error))

    def say(record: bytes) -> None:
        if not over:
            said.append(record)

    steps: list[Callable[[], object]] = []
    for record in (b"one", b"two"):
        both: list[Callable[[], object]] = [partial(write, record), look]
        steps += [*(reversed(both) if check_first else both), partial(say, record)]
        steps += [rotate] if record == b"one" else []
    others: list[Callable[[], object]] = [
        lambda: new.append(buffer_leadership.take_leadership(where, THERE, moved=True)),
        lambda: found.extend(j.read(j.list_segments(log.directory, new[0].number)[-1])),
    ]
    for theirs in order:
        (others if theirs else steps).pop(0)()
    log.close()
    read = b"|".join(found).split(b"|")
    return len(said), sum(record in read for record in said)


@pytest.mark.parametrize("rotates", [False, True])
def test_what_was_said_lies_in_the_journal_of_the_next(rotates: bool, tmp_path: Path) -> None:
    """In every order of the two; with the look before the write instead of behind it, not."""
    lost = {True: 0, False: 0}
    both = 0
    for check_first in (False, True):
        for number, order in enumerate(orders(7, 2)):
            where = tmp_path / f"{check_first}{number}"
            where.mkdir()
            said, read = played(where, order, check_first=check_first, rotates=rotates)
            lost[check_first] += said - read
            both += said == 1
            shutil.rmtree(where)
    assert lost[False] == 0 and lost[True] > 0 and both


def store_of(directory: Path, term: buffer_leadership.BufferTerm) -> RecordedStore:
    settings = StoreSettings(1, 2, 9, m.SamplingSettings())
    return open_recorded(directory / "journal", settings, term=term)


def test_what_one_that_is_over_writes_nobody_reads(tmp_path: Path) -> None:
    """Records, a new segment, its notes, tidying up: the other's journal as if it never lived."""
    old = store_of(tmp_path, buffer_leadership.take_leadership(tmp_path, HERE))
    assert hello(old, 1, 0, k=5)
    old.grant("g", 1, 2, 0.0)
    old.flush_journal()
    new = store_of(tmp_path, buffer_leadership.take_leadership(tmp_path, THERE, moved=True))
    assert new.attempts == old.attempts == 1
    new.grant("h", 1, 2, 0.0)
    new.flush_journal()
    before = state(new)
    for _ in range(3):
        old.grant("g", 1, 2, 0.0)
        old.flush_journal()
        old.journal.rotate(msgspec.msgpack.encode(old.snapshot()))  # removes older segments
    # a segment of it under way, as the next buffer begins, and of a buffer of a later term
    for term in (1, 9):
        (tmp_path / "journal" / f"{term:08d}-00000099.part").write_bytes(b"torn")
    old.journal.close()
    new.journal.close()
    names = sorted(path.name for path in (tmp_path / "journal").glob("*.log"))
    assert names == ["00000001-00000004.log", "00000002-00000002.log"]
    again = store_of(tmp_path, buffer_leadership.take_leadership(tmp_path, HERE))
    assert state(again) == before and again.attempts == 2
    again.journal.close()
    assert not (tmp_path / "journal" / "00000003.sure").stat().st_mode & 0o077
    left = sorted(path.name for path in (tmp_path / "journal").iterdir())
    assert left == ["00000003-00000003.log", "00000003.sure", "00000009-00000099.part"]


def test_a_buffer_that_is_over_before_it_has_read_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still behind its term: a later one has read, removed and written meanwhile."""
    first = store_of(tmp_path, buffer_leadership.take_leadership(tmp_path, HERE))
    assert hello(first, 1, 0, k=5)
    first.grant("g", 1, 2, 0.0)
    first.flush_journal()
    late = buffer_leadership.take_leadership(tmp_path, HERE)
    store = store_of(tmp_path, buffer_leadership.take_leadership(tmp_path, THERE, moved=True))
    store.grant("g", 1, 2, 0.0)
    store.flush_journal()
    # what was before it goes in a thread of its own
    until(lambda: len(j.list_segments(tmp_path / "journal")) == 1)
    assert store._replay_newest(tmp_path / "journal", late.number) is None, "there is nothing left"
    segment = j.list_segments(tmp_path / "journal")[-1]
    data = segment.read_bytes()
    segment.write_bytes(data + b"a record under way")
    with pytest.raises(BufferTakenOver):
        store_of(tmp_path, late)
    assert segment.read_bytes() == data + b"a record under way", "cut by nobody but its own"
    assert j.list_segments(tmp_path / "journal") == [segment]
    # also where it finds damage: that is no news of the run
    monkeypatch.setattr(j, "list_segments", lambda *_: [segment])
    monkeypatch.setattr(
        RecordedStore, "_replay_newest", lambda *_: (_ for _ in ()).throw(DamagedDataError())
    )
    with pytest.raises(BufferTakenOver):
        store_of(tmp_path, late)


def test_a_lost_segment_leads_to_its_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = store_of(tmp_path, buffer_leadership.take_leadership(tmp_path, HERE))
    assert hello(old, 1, 0, k=5)
    old.grant("g", 1, 2, 0.0)
    old.flush_journal()
    second = buffer_leadership.take_leadership(tmp_path, THERE, moved=True)
    read = RecordedStore._replay_segment

    def late(self: RecordedStore, path: Path) -> None:
        monkeypatch.setattr(RecordedStore, "_replay_segment", read)
        old.journal.rotate(msgspec.msgpack.encode(old.snapshot()))
        old.journal.close()  # its remover has ended
        read(self, path)

    monkeypatch.setattr(RecordedStore, "_replay_segment", late)
    assert store_of(tmp_path, second).attempts == 1
    monkeypatch.setattr(j, "read", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    monkeypatch.setattr("buffer.journal.read", j.read)
    with pytest.raises(FileNotFoundError):  # and for ever is nothing looked for
        store_of(tmp_path, buffer_leadership.take_leadership(tmp_path, HERE))


def test_a_journal_from_before_terms_is_gone_on_with(tmp_path: Path) -> None:
    log = j.Journal(tmp_path, b"one", sync=False)
    for _ in range(2):
        log.rotate(b"one")
    log.close()
    assert [path.name for path in j.list_segments(tmp_path, 1)] == ["00000003.log"]
    again = j.Journal(tmp_path, b"two", sync=False, term=1)
    again.close()
    assert [path.name for path in tmp_path.glob("0*.log")] == ["00000001-00000004.log"]
    assert list(j.read(tmp_path / "00000001-00000004.log")) == [b"two"]
    (tmp_path / "00000001-00000004.log").rename(tmp_path / "00000003.log")
    with pytest.raises(DamagedDataError, match=r"00000001-00000004\.log is missing"):
        list(j.read(tmp_path / "00000003.log"))


SMALL = (
    "learner.steps=2",
    "learner.groups=1",
    "learner.group_size=2",
    "staleness.max_lag=2",
    "evaluation.every=0",
    "evaluation.final_prompts=1",
    "durability.mode='disk'",
)


class Wire:
    payload = b""

    def __init__(self, socket: BufferSocket) -> None:
        self.socket = socket
        self.sent: list[Any] = []
        self.come: list[Any] = []

    def recv(self, timeout: float) -> Any:
        return (b"peer", self.come.pop(0)) if self.come else None

    def send(self, peer: bytes, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[BufferService]:
    config = load.load("demo", [*SMALL, "wires.address='tcp://127.0.0.1:*'"])
    rundir.ensure(load.dump(config), tmp_path / "run")
    made = BufferService(config, tmp_path / "run")
    made.socket = Wire(made.socket)  # type: ignore[assignment]
    yield made
    made.close()


def said_hello(run: str) -> m.LearnerHello:
    source = m.WeightsSource(1, "here", "", "")
    return m.LearnerHello(m.PROTOCOL, run, 1, Label(1, 0), None, "d", 0, 0, 2, source, [])


def test_a_buffer_that_is_over_takes_nothing_in_and_says_nothing(service: BufferService) -> None:
    wire: Any = service.socket
    log = service.store.journal  # type: ignore[attr-defined]
    terms_of = buffer_leadership.list_term_files(service.run_dir)
    assert len(terms_of) == 1
    assert buffer_leadership.read(terms_of[0])[0].address == wire.socket.address  # type: ignore[union-attr]
    greeting = greet(service.run, "generator-0", 1)
    wire.come = [said_hello(service.run), greeting, want(1, samples=2)]
    service.receive_messages()
    service.answer()
    while service.outgoing:
        service.flush()
    (tickets,) = [x for x in wire.sent if isinstance(x, m.TicketGrant) and x.tickets]
    # an answer that is taken in and durable, and has not been acknowledged
    wire.come = [answers(tickets.tickets[0], "d")]
    service.receive_messages()
    until(lambda: log.write() or log.durable == log.appended)
    buffer_leadership.take_leadership(service.run_dir, THERE, moved=True)
    before = len(wire.sent)
    with pytest.raises(BufferTakenOver):
        service.flush()
    # and one that comes only now
    appended = log.appended
    wire.come = [want(2)]
    with pytest.raises(BufferTakenOver):
        service.receive_messages()
    assert (len(wire.sent), log.appended) == (before, appended)
    # what the other one has, and this one too: its own segment, and no summary
    log.append(b"late")
    size = j.list_segments(log.directory)[-1].stat().st_size
    service.taken_over = True
    assert service.close() == "" and j.list_segments(log.directory)[-1].stat().st_size == size
    assert not (service.run_dir / "buffer_summary.json").exists()


def test_without_another_its_end_is_told_and_a_summary_written(service: BufferService) -> None:
    assert service.close() == "" and (service.run_dir / "buffer_summary.json").exists()
    found = buffer_leadership.read(buffer_leadership.list_term_files(service.run_dir)[0])[1]
    assert found == "ended"


def test_a_buffer_that_cannot_listen_takes_nothing_over(service: BufferService) -> None:
    wire: Any = service.socket
    wires = msgspec.structs.replace(service.config.wires, address=wire.socket.address)
    config = msgspec.structs.replace(service.config, wires=wires)
    with pytest.raises(ConfigError, match="cannot listen"):
        BufferService(config, service.run_dir, moved=True)
    service.term.check()
    assert service.store.journal.term == service.term.number  # type: ignore[attr-defined]


def test_a_buffer_follows_another(service: BufferService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_leadership.socket, "gethostname", lambda: "near")
    monkeypatch.setenv("ASYNCRL_SUPERVISED", "1")
    assert BufferService(service.config, service.run_dir).close() == ""


def test_the_learner_is_sent_the_error_that_ends_the_buffer(service: BufferService) -> None:
    wire: Any = service.socket
    wire.come, service.answer = [said_hello(service.run)], Mock(side_effect=AsyncrlError("full"))
    stubs = {"stop_at_signals": Mock(), "gc": Mock(), "BufferService": lambda *_, **more: service}
    with patch.multiple(service_module, **stubs), pytest.raises(AsyncrlError, match="full"):
        service_module.main(service.config, service.run_dir)
    assert wire.sent[-1] == m.Refusal("full", 1)


def test_a_process_that_was_taken_over_is_not_the_newest_of_its_name(tmp_path: Path) -> None:
    process_log.append_event(tmp_path, "buffer", 1, "began")
    process_log.append_event(tmp_path, "buffer", 2, "began")
    process_log.append_event(tmp_path, "buffer", 1, "ended", code=BufferTakenOver.exit_code, why="")
    assert process_log.read_latest_events(tmp_path)["buffer"]["pid"] == 2
    process_log.append_event(tmp_path, "buffer", 2, "ended", code=0, why="")
    assert process_log.list_failed_ends(tmp_path) == []


def test_locks_of_one_that_stands_still_hold_up_nobody(tmp_path: Path) -> None:
    held = process_log.ProcessIncarnation(tmp_path, "buffer", alone=True)
    lock = rundir.RunLock(tmp_path, "buffer")
    with pytest.raises(ConfigError, match="is running already"):
        process_log.ProcessIncarnation(tmp_path, "buffer", alone=True)
    for name in buffer_leadership.LOCKS:
        (tmp_path / name).unlink()
    other = process_log.ProcessIncarnation(tmp_path, "buffer", alone=True)
    second = rundir.RunLock(tmp_path, "buffer")
    lock.close()
    held.name_lock.close()
    assert process_log.is_alive(tmp_path, "buffer"), "it is the other one's now"
    second.close()
    other.name_lock.close()


def test_what_can_be_taken_over_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(mode: str = "disk") -> Any:
        return load.load(ROOT / "configs" / "demo.toml", [f"durability.mode={mode!r}"])

    with pytest.raises(ConfigError, match="no buffer has served"):
        move_buffer(config(), tmp_path, THERE)
    monkeypatch.setattr(buffer_leadership.socket, "gethostname", lambda: "far")
    buffer_leadership.take_leadership(tmp_path, HERE)
    monkeypatch.undo()
    assert move_buffer(config(), tmp_path, THERE).wires.address == THERE
    for mode in ("memory", "process"):
        with pytest.raises(ConfigError, match=f"durability.mode = {mode} keeps no journal"):
            move_buffer(config(mode), tmp_path, THERE)
    buffer_leadership.take_leadership(tmp_path, HERE, moved=True)
    assert move_buffer(config("process"), tmp_path, THERE).wires.address == THERE
    for address in ("tcp://127.0.0.1:*", "ipc:///tmp/x"):
        with pytest.raises(ConfigError, match="the address at which the other processes reach"):
            move_buffer(config(), tmp_path, address)
    for address in ("tcp://0.0.0.0:1", "tcp://10.0.0.1:1"):
        with pytest.raises(ConfigError, match=r"--take-over: .* open to the network"):
            move_buffer(config(), tmp_path, address)


def test_a_silent_buffer_is_looked_for_and_followed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = BufferSocket("tcp://127.0.0.1:*"), BufferSocket("tcp://127.0.0.2:*")
    peer = PeerSocket(here.address)
    asked: list[str] = []
    known = [there.address]

    def find() -> str:
        asked.append(known[0])
        return known[0]

    peer.find_address = find
    now = 1000.0
    monkeypatch.setattr(sockets.time, "monotonic", lambda: now)
    try:
        assert not peer.find_moved_buffer(1.9) and asked == []
        peer.send(m.StatusRequest())
        old = peer.socket
        assert peer.find_moved_buffer(2.0) and peer.address == there.address and old.closed
        now += 1.9
        assert not peer.find_moved_buffer(600.0) and len(asked) == 1, "not again at once"
        now += 2.0
        assert not peer.find_moved_buffer(600.0) and len(asked) == 2, "it is there"
        peer.send(m.StatusRequest())
        assert there.recv(600.0) is not None
        for number, wrong in enumerate(("", "tcp://10.0.0.1:5", "nowhere"), 3):
            known[0] = wrong
            now += 2.0
            assert not peer.find_moved_buffer(600.0) and peer.address == there.address
            assert len(asked) == number
    finally:
        for each in (peer, here, there):
            each.close()
    ignored = "ignored the buffer's new address: the buffer's address: "
    assert capsys.readouterr().err.splitlines() == [
        f"{here.address} has been silent for 2 s, and the run's buffer is now at {there.address}: "
        "connecting to it",
        f"{ignored}tcp://10.0.0.1:5 is open to the network; give CURVE keys by wires.curve_dir "
        "(`asyncrl keys DIR`), or use 127.0.0.1",
        f"{ignored}`nowhere` is not an address; write ipc:///path or tcp://host:port",
    ]


def test_a_learner_says_where_buffers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "BUFFER_S", 600.0)
    sets = ("wires.weights_address='tcp://127.0.0.1:*'",)
    config = load.load(ROOT / "configs" / "demo.toml", sets)
    core: Any = SimpleNamespace(layout=[("w", "float32", [4], 0, 16)])
    (tmp_path / "run_id").write_text("run")
    publisher = Publisher(config, tmp_path, 1, core)
    try:
        assert publisher.server is not None and publisher.server.files.config is config  # type: ignore[attr-defined]
        assert chunks.find_buffer(config, publisher.source, "generator-0") == ""
        buffer_leadership.take_leadership(tmp_path, THERE, moved=True)
        assert chunks.find_buffer(config, publisher.source, "generator-0") == THERE
    finally:
        publisher.close()


def test_a_learner_that_is_away_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load.load(ROOT / "configs" / "demo.toml")
    monkeypatch.setattr(chunks, "BUFFER_S", 0.05)
    source = m.WeightsSource(1, "far", "", "tcp://127.0.0.1:1")
    assert chunks.find_buffer(config, source, "generator-0") == ""
