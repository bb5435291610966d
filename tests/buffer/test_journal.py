"""The journal: tears are cut, damage is told, a store folded from it is the store that wrote it."""

import dataclasses
import functools
import os
import shutil
import struct
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from journal_kit import evaluations, open_recorded, recorded, state
from process_kit import until
from schedules import PROMPTS, World
from store_kit import hello, judged, sample

from asyncrl.contract.admission import LimitEvidence
from asyncrl.contract.errors import AsyncrlError, DamagedDataError
from asyncrl.contract.freshness import AdmissionWindow, BatchTiming
from asyncrl.contract.messages import (
    Delivery,
    LearnerHello,
    Prompt,
    RewardFailure,
    SamplingSettings,
    WeightsSource,
)
from asyncrl.contract.versions import Label, PolicyTree
from asyncrl.records import append_log
from buffer import journal as j
from buffer.evaluation import EvaluationPlan, Evaluations
from buffer.groups import StoreSettings
from buffer.journal import (
    BatchRequestRecord,
    CheckpointRecord,
    CommitRecord,
    DeliveryRecord,
    ExpiryRecord,
    FinishRecord,
    FrameRecord,
    FreedLeasesRecord,
    GrantRecord,
    HelloRecord,
    RecordedStore,
    RenewalRecord,
    SessionsEndRecord,
    StoreRecord,
    TokenReportRecord,
)
from buffer.ledger import Ledger
from buffer.mixer import TaskMixer
from buffer.state import HINTS, StoreSnapshot, StoreState, _make_snapshot_field
from buffer.store import SESSIONS, Store

PAYLOADS = [bytes([n + 1]) * (7 * n + 1) for n in range(6)]


def written(directory: Path, *, together: bool = False) -> Path:
    """A segment: a snapshot, then PAYLOADS, each written alone or all in one go; without `sure`, as
    a power cut may leave it."""
    log = j.Journal(directory, b"snapshot", sync=False)
    for p in PAYLOADS:
        log.append(p)
        if not together:
            log.write()
    log.close()
    (directory / "sure").unlink()
    return j.list_segments(directory)[-1]


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_a_record_in_pieces_is_written_whole_whatever_the_system_takes_at_once(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.writev, []

    def some(fd: int, pieces: list[memoryview]) -> int:
        calls.append(len(pieces))
        return real(fd, [memoryview(b"".join(pieces))[:most]])

    monkeypatch.setattr(os, "writev", some)
    log = j.Journal(tmp_path, b"snapshot", sync=False)
    many = [bytes([n % 251]) * (n % 3) for n in range(3 * append_log.PIECES)]
    log.append(b"head", memoryview(b"of it"), b"", b"end")
    log.append(*many)
    log.write()
    size = log.segment.size
    log.close()
    path = j.list_segments(tmp_path)[-1]
    assert list(j.read(path)) == [b"snapshot", b"headof itend", b"".join(many)]
    assert size == path.stat().st_size and max(calls) <= append_log.PIECES


def test_a_tail_torn_at_any_byte_is_cut_to_whole_records(tmp_path: Path) -> None:
    path = written(tmp_path)
    data, whole = path.read_bytes(), [b"snapshot", *PAYLOADS]
    ends = [0]
    for p in whole:
        ends.append(ends[-1] + j.FRAMES.size + len(p))
    for size in range(ends[1], len(data)):
        path.write_bytes(data[:size])
        n = sum(e <= size for e in ends) - 1
        assert list(j.read(path)) == whole[:n] and path.stat().st_size == ends[n]
        # as some file systems leave it after a power cut
        path.write_bytes(data[:size] + b"\0" * 500)
        assert list(j.read(path)) == whole[:n] and path.stat().st_size == ends[n]


def test_damage_before_durable_records_is_reported_at_any_byte(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    last = len(data) - j.FRAMES.size - len(PAYLOADS[-1])
    for at in range(0, last, 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        with pytest.raises(DamagedDataError, match=rf"{path.name} is damaged at byte"):
            list(j.read(path))
        assert path.stat().st_size == len(data)  # nothing was cut


def test_a_write_that_was_never_sure_may_lose_its_first_record(tmp_path: Path) -> None:
    """Records of one group reach the disk in any order: a hole among them is a torn tail."""
    path = written(tmp_path, together=True)
    data, start = path.read_bytes(), j.FRAMES.size + len(b"snapshot")
    path.write_bytes(data[:start] + b"\0" * 12 + data[start + 12 :])
    assert list(j.read(path)) == [b"snapshot"]


def test_damage_to_what_was_acknowledged_is_reported_at_any_byte(tmp_path: Path) -> None:
    """Also in the last group, behind which nothing was written, and after a kill."""
    log = j.Journal(tmp_path, b"snapshot", sync=False)
    for p in PAYLOADS:
        log.append(p)
    log.write()
    path = j.list_segments(tmp_path)[-1]
    data = path.read_bytes()
    # bytes of a write that was under way are no damage
    path.write_bytes(data + j.FRAMES.make_header([b"more"]) + b"mor")
    assert list(j.read(path)) == [b"snapshot", *PAYLOADS] and path.read_bytes() == data
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        for wrong in (flipped, data[:at]):
            path.write_bytes(wrong)
            with pytest.raises(
                DamagedDataError, match=rf"{path.name} is damaged at byte|is missing"
            ):
                list(j.read(path))
            assert path.read_bytes() == wrong, "nothing was cut"
    path.write_bytes(data)
    path.rename(tmp_path / "00000000.log")
    with pytest.raises(DamagedDataError, match=r"00000001\.log is missing"):
        list(j.read(tmp_path / "00000000.log"))


def test_a_note_that_cannot_be_read_proves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    position = struct.pack("<QQ", 1, len(data))
    note = position + struct.pack("<Q", xxhash.xxh3_64_intdigest(position))
    for at in range(len(note)):
        for wrong in (note[:at], note[:at] + bytes([note[at] ^ 1]) + note[at + 1 :]):
            (tmp_path / "sure").write_bytes(wrong)
            path.write_bytes(data[:-1])
            assert list(j.read(path)) == [b"snapshot", *PAYLOADS[:-1]]


def test_a_segment_is_replaced_while_it_goes_on_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot takes its time: what is appended meanwhile is safe, and behind it once."""
    go = threading.Event()
    put = j.Segment.write

    def slow(self: j.Segment, records: Any, sure: int | None = None) -> None:
        assert sure is not None or go.wait(timeout=600)
        put(self, records, sure)

    log = j.Journal(tmp_path, b"one", sync=False, segment_bytes=100)
    monkeypatch.setattr(j.Segment, "write", slow)
    log.append(b"x" * 100)
    log.write()
    assert log.is_full
    log.append(b"before the snapshot")
    log.rotate(b"two", wait=False)
    assert not log.is_full and log.next is not None
    for payload in (b"a", b"b"):
        log.append(payload)
        log.write()
        assert log.durable == log.appended, "nobody waits for the snapshot"
    was = tmp_path / "00000001.log"
    assert list(j.read(was)) == [b"one", b"x" * 100, b"before the snapshot", b"a", b"b"]
    assert j.list_segments(tmp_path) == [was]
    go.set()
    wait([log.next])
    log.append(b"c")
    log.write()
    log.append(b"d")
    log.close()
    assert j.list_segments(tmp_path) == [tmp_path / "00000002.log"]
    assert list(j.read(tmp_path / "00000002.log")) == [b"two", b"a", b"b", b"c", b"d"]
    assert not list(tmp_path.glob("*.part"))
    frames = list(j.FRAMES.read_all((tmp_path / "00000002.log").read_bytes()))
    # a record says what was before it: then it is not taken for a part of a torn end
    assert [frame.number for frame in frames[:3]] == [0, frames[0].end, frames[1].end]


def test_a_failed_segment_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = j.Journal(tmp_path, b"one", sync=False)

    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(j, "Segment", no_room)
    log.rotate(b"two", wait=False)
    assert log.next is not None
    wait([log.next])
    log.append(b"a")
    with pytest.raises(AsyncrlError, match=r"00000002\.part cannot be written: No space"):
        log.write()
    log.close()
    assert list(j.read(tmp_path / "00000001.log")) == [b"one", b"a"]
    assert [p.name for p in tmp_path.glob("0*")] == ["00000001.log"]


def test_a_new_segment_replaces_the_old_ones(tmp_path: Path) -> None:
    log = j.Journal(tmp_path, b"one", sync=True, segment_bytes=100)
    log.append(b"x" * 100)
    log.write()
    assert log.is_full
    log.append(b"not written: the snapshot has it")
    log.rotate(b"two")
    assert log.durable == log.appended == 2 and not log.is_full
    log.append(b"y")
    log.close()
    assert [p.name for p in j.list_segments(tmp_path)] == ["00000002.log"]
    assert list(j.read(tmp_path / "00000002.log")) == [b"two", b"y"]


def test_a_removed_run_ends_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised where no caller sees it, and the old segment's file is closed."""
    log = j.Journal(tmp_path / "journal", b"first", sync=False)
    old = log.segment.fd

    def vanish(directory: Path) -> list[Path]:
        if log.number == 1:  # for the first segment, late
            return []
        shutil.rmtree(directory)
        with pytest.raises(FileNotFoundError) as gone:
            os.listdir(directory)
        raise gone.value

    monkeypatch.setattr(j, "list_segments", vanish)
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    log.rotate(b"second")
    log.close()
    assert not raised and not (tmp_path / "journal").exists()
    with pytest.raises(OSError):
        os.fstat(old)


def test_group_commits_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, syncs = threading.Semaphore(0), threading.Semaphore(0), []
    real = os.fdatasync

    def slow(fd: int) -> None:
        began.release()
        assert go.acquire(timeout=600)
        syncs.append(fd)
        real(fd)

    log = j.Journal(tmp_path, b"", sync=True)
    monkeypatch.setattr(os, "fdatasync", slow)
    log.append(b"a")
    log.write()
    assert began.acquire(timeout=600) and log.durable == 0
    for p in (b"b", b"c", b"d"):  # while the disk works, more is written
        log.append(p)
        log.write()
    go.release()
    until(lambda: log.write() or log.durable)
    assert began.acquire(timeout=600)
    assert log.durable == 1  # the sync that was under way covers what was written before it began
    go.release()
    until(lambda: log.write() or log.durable == 4)
    assert len(syncs) == 2
    monkeypatch.setattr(os, "fdatasync", real)
    log.close()


@pytest.mark.parametrize("on_exceed", ["pace", "drop", "mask"])
def test_a_killed_buffer_folds_to_the_same_and_goes_on(on_exceed: str, tmp_path: Path) -> None:
    kills = 0
    for seed in range(150):
        directory = tmp_path / str(seed)

        make = functools.partial(open_recorded, directory, segment_bytes=3000)
        world = World(
            seed,
            make=make,
            on_exceed=on_exceed,
            order="freshest" if on_exceed != "pace" and seed % 2 else "auto",
            **({"limits": (1, 2, 3), "ess_floor": 0.5} if on_exceed == "pace" and seed % 2 else {}),
            **({"wait": 0.1} if on_exceed == "pace" and seed % 3 == 0 else {}),
        )

        def kill(world: World = world, make: Any = make) -> bool:
            nonlocal kills
            kills += 1
            assert isinstance(world.store, RecordedStore)
            world.store.flush_journal()
            before = state(world.store)
            os.close(world.store.journal.segment.fd)  # as the kernel does
            world.store = make(world.settings, now=world.now)
            assert state(world.store) == before
            return True

        world.more_faults = [kill, kill]
        world.faults += 2
        world.run()
        assert isinstance(world.store, RecordedStore)
        world.store.journal.close()
        shutil.rmtree(directory)
    assert kills > 100


# what a snapshot leaves out: the task's prompts, caches, and what this process alone looks at
OF_THE_PROCESS: dict[type, set[str]] = {
    Store: {"prompt", "on_excluded", "_retained_sums", "changes", "lacking"},
    Evaluations: {"prompt", "on_result"},
    PolicyTree: {"_cached_lags", "_cached_for"},
    TaskMixer: {"parts", "prompt", "lengths", "log"},
}


def fields(owner: Any) -> dict[str, Any]:
    """Every attribute that must come back, those of the parts as `part.name`."""
    out: dict[str, Any] = {}
    for name in vars(owner).keys() - OF_THE_PROCESS[type(owner)]:
        value = getattr(owner, name)
        if type(value) in OF_THE_PROCESS:
            out |= {f"{name}.{inner}": x for inner, x in fields(value).items()}
        else:
            out[name] = value
    return out


def new_store(settings: StoreSettings | None = None) -> Store:
    return Store(
        settings or StoreSettings(9, 9, 9, SamplingSettings()), PROMPTS.__getitem__, Evaluations()
    )


def unusual(store: Store) -> None:
    """What the random schedules do not: a checkpoint of another buffer, failures, the end."""
    totals = {"trained": {"tokens": 3.0, "samples": 1, "mean_length": 3.0, "mean_reward": 1.0}}
    source = WeightsSource(1, "here", "there", "")
    label = Label(1, 2)
    assert store.follow_learner(
        LearnerHello(1, "", 1, label, None, "d", 4, 0, 2.0, source, [], totals, [6, 60])
    )
    for ticket in (t for t in store.grant("g", 1, 9, 0.0) if t.kind == "train"):
        store.report_tokens("g", ticket.attempt, 5)
        failed = RewardFailure("data" if ticket.ticket % 2 else "machinery", "no")
        store.deliver(sample(ticket, 0, (label, 1), digest="d", failed=str(failed)), 0.0)
    store.finish()
    for session in range(SESSIONS + 100):
        store.report_tokens("h", session, 1)


def test_every_attribute_of_a_store_comes_back_from_a_snapshot() -> None:
    """Over random schedules with evaluations, until each attribute has had something to lose."""
    fresh = fields(new_store())
    never = set(fresh)

    def compare(store: Store) -> bool:
        before = fields(store)
        again = new_store()
        again.restore(
            msgspec.msgpack.decode(msgspec.msgpack.encode(store.snapshot()), type=StoreSnapshot)
        )
        after = fields(again)
        assert after.keys() == before.keys()
        for name, value in before.items():
            assert after[name] == value, name
            assert isinstance(value, int) or type(after[name]) is type(value), name
            if fresh[name] != value:
                never.discard(name)
        return False

    for seed in range(30):
        world = World(seed, make=new_store)
        world.faults += 6
        world.more_faults = [lambda world=world: compare(world.store)] * 9
        world.run()
        compare(world.store)
    for split in ("heldout", "ood"):
        store = Store(
            StoreSettings(1, 2, 9, SamplingSettings(), error_budget=9, machinery_budget=9),
            PROMPTS.__getitem__,
            Evaluations(
                EvaluationPlan(2, 1, 1, int(split == "ood"), 0.7, ood_every=5),
                lambda _, i: Prompt(i, ""),
            ),
        )
        unusual(store)
        compare(store)
        assert hello(store, 2, 0) is False  # behind what is kept
    deadly = new_store(StoreSettings(1, 1, 9, SamplingSettings()))
    for epoch in (1, 2, 3):
        assert hello(deadly, epoch, 0, origin=epoch - 1, before="crashed")
        for ticket in deadly.grant("g", 1, 2, 0.0):
            deadly.deliver(sample(ticket), 0.0)
        deadly.ask(epoch, 0)
        compare(deadly)
    deadly.mixer.state.credit["a"] = 0.5
    deadly.mixer.state.past["a"] = Ledger()
    deadly.renew("g", 3, [], 0.0, gap=1e3)
    compare(deadly)
    assert deadly.aside == 1
    deadly.window = AdmissionWindow(3.5, 7.0, (BatchTiming(1.0, 0.5, 2.0, 0.1, 0.4),), 0.5, 4.0)
    compare(deadly)
    evaluated = Store(
        StoreSettings(1, 1, 9, SamplingSettings()), PROMPTS.__getitem__, evaluations()
    )
    assert hello(evaluated, 1, 0)
    one, *_ = evaluated.grant("g", 1, 2, 0.0)
    judged(evaluated, one, 1.0)
    compare(evaluated)
    for ticket in evaluated.grant("g", 1, 2, 0.0):
        if ticket.kind == "eval":
            judged(evaluated, ticket, 0.5)
    compare(evaluated)
    assert not never, f"never other than a new store's: {sorted(never)}"
    made = [_make_snapshot_field(x) for x in dataclasses.fields(StoreState)]
    packed = {"evaluations", "tree", "alive", "retained", "gone", "strays"}
    assert {name for name, form, *_ in made if form != HINTS[name]} == packed | {"drawn", "mixer"}
    added = {"suspect", "patience", "aside", "limit", "window", "mixer"}
    assert {name for name, _, *default in made if default} == added
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(new_store().snapshot()))
    older = {name: value for name, value in older.items() if name not in added}
    again = new_store()
    again.restore(msgspec.convert(older, StoreSnapshot))
    assert fields(again) == fresh


def test_each_change_is_one_record_that_replays_to_the_same_state(tmp_path: Path) -> None:
    """A call that changes nothing is not recorded."""
    settings = StoreSettings(2, 1, 9, SamplingSettings(), ess_floor=0.5, wait=0.02)

    def opened(directory: Path) -> RecordedStore:
        return open_recorded(directory, settings)

    store = opened(tmp_path / "journal")
    known = 0

    def check(*expected: Any) -> None:
        nonlocal known
        store.flush_journal()
        (path,) = j.list_segments(tmp_path / "journal")
        records = [msgspec.msgpack.decode(one, type=StoreRecord) for one in list(j.read(path))[1:]]
        assert records[known:] == list(expected)
        known = len(records)
        shutil.copytree(path.parent, tmp_path / "copy")
        again = opened(tmp_path / "copy")
        assert state(again) == state(store)
        again.journal.close()
        shutil.rmtree(tmp_path / "copy")

    source = WeightsSource(1, "here", "there", "")
    learner = LearnerHello(1, "run", 1, Label(1, 0), None, "d0", 0, 0, 8.0, source, [])
    for records in ([HelloRecord(learner)], []):
        assert store.follow_learner(learner)
        check(*records)
    a, b, c, d = store.grant("g", 1, 4, 1.5)
    check(GrantRecord("g", 1, 4, 1.5, store.attempts))
    for count, records in ((5, [TokenReportRecord("g", 1, 5)]), (5, []), (4, [])):
        store.report_tokens("g", 1, count)
        check(*records)
    progress, judging = [(a.ticket, a.attempt, 2)], [(b.ticket, b.attempt)]
    store.renew("g", 1, progress, 9.0, judging, gap=1e3)
    check(RenewalRecord("g", 1, progress, 9.0, judging, 1e3))
    for gap, records in ((1e3, []), (0.0, [RenewalRecord("g", 1, [], 9.5)]), (0.0, [])):
        store.renew("g", 1, [], 9.5, gap=gap)
        check(*records)
    store.renew("g", 1, [], 9.5, judging)
    check(RenewalRecord("g", 1, [], 9.5, judging))
    store.free_leases([(d.ticket, d.attempt)])
    check(FreedLeasesRecord([(d.ticket, d.attempt)]))
    for records in ([ExpiryRecord(1e4)], []):
        assert store.expire(1e4) == 3 * len(records)
        check(*records)
    samples = [sample(ticket, digest="d0") for ticket in (a, b, c, d)]
    assert store.accept_samples(samples[:3]) == ["accepted"] * 3
    check(FrameRecord(samples[:3]))
    delivery = Delivery("g", 1, 1, samples[3:])
    assert store.accept_samples(samples[3:], msgspec.msgpack.encode(delivery)) == ["accepted"]
    check(DeliveryRecord(delivery))
    for records in ([BatchRequestRecord(1, 0)], []):
        assert store.ask(1, 0)[0]
        check(*records)
    evidence, timing = LimitEvidence(0.9, 4.0, 0.1), BatchTiming(1.0, 0.5, 2.0, 0.1, 0.4)
    for records in (
        [CommitRecord(0, Label(1, 1), "d1", [(1, 2), (0, 1)], evidence, timing, 7.0)],
        [],
    ):
        done = store.commit(
            0, Label(1, 1), "d1", [(1, 2), (0, 1)], evidence=evidence, timing=timing, now=7.0
        )
        assert done is bool(records)
        check(*records)
    assert store.window.timings == (timing,) and store.limit.settling == 0
    for records in ([CheckpointRecord(1)], []):
        store.retire_batches(1)
        check(*records)
    (e,) = store.grant("g", 2, 1, 2e4)
    check(GrantRecord("g", 2, 1, 2e4, store.attempts))
    store.end_sessions("g", 3)
    check(SessionsEndRecord("g", 3))
    assert store.alive[e.ticket].lease is None
    store.settings = settings = dataclasses.replace(settings, steps=1)  # all were made
    store.finish()
    check(FinishRecord())


def test_evaluations_out_and_queued_survive(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    assert hello(store, 1, 0)
    a, b = store.grant("g", 1, 2, 0.0)
    judged(store, a, 1.0)
    store.flush_journal()
    again = recorded(tmp_path)
    assert state(again) == state(store)
    assert [x.label for x in again.evaluations.rounds] == [(1, 0), (1, 0)]
    again.renew_all_leases(500.0)
    assert {job.expires for job in again.evaluations.leased_jobs.values()} == {520.0}
    assert again.evaluations.plan.ood_every == 5
    judged(again, b, 1.0)
    (c, *_) = again.grant("g", 1, 1, 0.0)
    judged(again, c, 0.5)
    assert again.evaluations.results["heldout", 0]["eval/heldout_n"] == 3


@pytest.mark.parametrize("as_it_came", [False, True])
def test_a_frame_is_one_record_and_folds_to_its_samples(as_it_came: bool, tmp_path: Path) -> None:
    store = recorded(tmp_path)
    assert hello(store, 1, 0, k=3)
    train = [ticket for ticket in store.grant("g", 1, 9, 0.0) if ticket.kind == "train"]
    written = store.journal.appended
    frame = [sample(train[0]), sample(train[1], length=7), sample(train[0], length=5)]
    came = msgspec.msgpack.encode(Delivery("g", 1, 1, frame)) if as_it_came else b""
    assert store.accept_samples(frame, came) == ["accepted", "accepted", "accepted"]
    assert store.journal.appended == written + 1
    if as_it_came:  # its bytes, and no others
        assert store.journal.waiting[-1][1] is came
    store.flush_journal()
    before = state(store)
    store.journal.close()
    assert state(recorded(tmp_path)) == before


def test_a_finished_buffer_says_so_again_unless_more_steps_are_wanted(tmp_path: Path) -> None:
    store = recorded(tmp_path, steps=0)
    assert hello(store, 1, 0)
    store.finish()
    store.flush_journal()
    assert recorded(tmp_path, steps=0).finished and not recorded(tmp_path, steps=5).finished


def test_a_journal_without_its_snapshot_or_of_another_task_is_refused(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    assert hello(store, 1, 0)
    store.grant("g", 1, 1, 0.0)
    store.flush_journal()
    path = j.list_segments(tmp_path)[-1]
    data = path.read_bytes()
    path.write_bytes(data[:20])
    with pytest.raises(DamagedDataError, match=r"damaged at byte 0|cannot be replayed"):
        recorded(tmp_path)
    for note in tmp_path.glob("*sure*"):
        note.unlink()
    path.write_bytes(b"")
    with pytest.raises(DamagedDataError) as error:
        recorded(tmp_path)
    assert str(error.value) == (
        f"{path} cannot be replayed: it is empty; start a new run, or restore the file"
    )
