"""A run's files of rows after a power cut or on a full disk: read past what is torn, never
half-written, one clear line."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from journal_kit import recorded, state
from service_kit import Run, answers, ask, want

from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.versions import Label
from asyncrl.records import jsonl, metrics
from asyncrl.records.trace import Tracer, merge
from asyncrl.supervise.report import run_page
from asyncrl.tasks import get_task
from buffer import journal, training_log
from buffer.service import open_store

BATCHES = [
    {"batch": n, "samples": 4, "ids": f"x{n}", "lags": {"0": 3, "1": n}, "tickets": [[n, n]]}
    for n in range(4)
]


def test_trained_batches_cut_at_any_byte_are_read_and_gone_on_with(tmp_path: Path) -> None:
    path, text = tmp_path / "trained.jsonl", "".join(json.dumps(r) + "\n" for r in BATCHES[:3])
    for cut in range(len(text) + 1):
        path.write_text(text[:cut])
        rows = training_log.TrainingLog(path)
        assert [*rows.rows] == list(range(text[:cut].count("]}")))
        rows._write(BATCHES[3])
        rows.close()
        assert [*training_log.read(path)] == [*range(text[:cut].count("]}")), 3]


def test_metrics_cut_at_any_byte_are_read_and_gone_on_with(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": n, "t": 1.0 + n, "reward/mean": 0.5, "lag/samples": {"0": 3}})
        for n in range(3)
    ]
    path, text = tmp_path / "metrics.jsonl", "\n".join(lines) + "\n"
    for cut in range(len(text) + 1):
        path.write_text(text[:cut])
        file = jsonl.JsonlAppender(path)
        known = text[:cut].count("}}")
        assert metrics.RunClock(tmp_path).earlier_s == float(known)
        file.write({"step": 3, "t": 9.0, "reward/mean": 0.5})
        file.close()
        assert [r["step"] for r in metrics.read(tmp_path)] == [*range(known), 3]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"batch": 1, "sam',
        b"\0" * 300,
        b"\xff\xfe{}",
        b"[1, 2]",
        b'"text"',
        b"[" * 100_000,
        b'{"batch": 1}',
        b'{"from": "x"}',
        b'{"batch": 1, "samples": 4, "ids": "x1", "lags": {"0": null}}',
        b'{"batch": 1, "samples": 4, "ids": "x1", "lags": {"x": 3}}',
        b'{"batch": 1, "samples": 4, "ids": "x1", "lags": []}',
    ],
)
def test_a_damaged_line_in_the_middle_is_left_out_and_said_once(
    damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trained.jsonl"
    early = {name: value for name, value in BATCHES[0].items() if name != "tickets"}
    path.write_bytes(
        b"\n".join((json.dumps(early).encode(), damage, json.dumps(BATCHES[2]).encode(), b""))
    )
    assert [*training_log.read(path)] == [0, 2]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(path) in said and "left out" in said
    if "line 2" in said:
        training_log.read(path)
        assert capsys.readouterr().err == ""
    path.rename(tmp_path / "leased.jsonl")
    rows = training_log.TrainingLog(path)
    assert [*rows.leases] == [0, 2]
    rows.close()


def copied_run(gain: Any, tmp_path: Path) -> Path:
    source = Path(gain.json["run_dir"])
    for name in (
        "summary.json",
        "metrics.jsonl",
        "samples.jsonl",
        "config.toml",
        "command",
        "commit",
    ):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


def test_a_report_shows_half_a_character_as_its_escape(gain: Any, tmp_path: Path) -> None:
    with (copied_run(gain, tmp_path) / "samples.jsonl").open("ab") as f:
        f.write(rb'{"prompt": "p", "text": "\ud83d", "batch": 1, "reward": 0.5, "lag": 0}' + b"\n")
    summary = tmp_path / "summary.json"
    sign = {"name": "odd", "said": "a \udc00 b", "try_this": ""}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"signs": [sign]}))
    page = run_page.write(tmp_path).read_bytes().decode()
    assert r"p\ud83d</td>" in page and r"a \udc00 b" in page


def test_the_later_row_of_a_step_wins_and_a_dead_branch_goes(tmp_path: Path) -> None:
    def train(step: int, x: float) -> dict[str, Any]:
        return {"step": step, "t": x, "reward/mean": x}

    def judged(step: int, x: float, split: str = "heldout") -> dict[str, Any]:
        return {"step": step, "t": x, f"eval/{split}": x, f"eval/{split}_n": 8}

    lives = [
        [
            judged(0, 0.1),
            train(0, 0.2),
            train(1, 0.3),
            judged(2, 0.4),
            train(2, 0.5),
            judged(2, 0.55, "ood"),
            train(3, 0.6),
            judged(4, 0.7),
        ],
        # from the checkpoint of version 2: batches 2 and 3, and the evaluation at 4, are of another
        # history
        [train(2, 1.1), judged(0, 1.2)],
        [train(2, 2.1), train(3, 2.2)],
    ]
    with (tmp_path / "metrics.jsonl").open("w") as f:
        f.writelines(json.dumps(r) + "\n" for life in lives for r in life)
    rows = metrics.read(tmp_path)
    assert [(r["step"], r["t"]) for r in rows] == [
        (0, 0.2),
        (1, 0.3),
        (2, 0.4),
        (2, 0.55),
        (0, 1.2),
        (2, 2.1),
        (3, 2.2),
    ]


class Disk:
    """os.write and os.writev into files, with room for so many bytes more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.real = 1 << 40, os.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "writev", lambda fd, pieces: self.write(fd, b"".join(pieces)))

    def write(self, fd: int, data: Any) -> int:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return self.real(fd, data)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n = self.real(fd, bytes(data)[: self.room])
        self.room -= n
        return n


def test_a_row_is_appended_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "metrics.jsonl"
    file = jsonl.JsonlAppender(path)
    file.write({"step": 1})
    disk.room = 5
    with pytest.raises(
        AsyncrlError,
        match=rf"{path} cannot be written: No space left on device; free some space .* --resume",
    ):
        file.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n'
    disk.room = 1 << 40
    file.write({"step": 3})
    assert [r["step"] for r in jsonl.read(path)] == [1, 3]


@pytest.mark.parametrize("room", [0, 1, 30, 500])
def test_a_new_segment_that_finds_no_room_leaves_the_old_one_whole(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_kit import hello

    disk, store = Disk(monkeypatch), recorded(tmp_path)
    assert hello(store, 1, 0)
    store.flush_journal()
    before = state(store)
    # full: the next pass begins a new segment
    store.journal.segment_bytes = store.journal.first = 0
    disk.room = room
    with pytest.raises(
        AsyncrlError, match=r"journal|0000000\d\.part cannot be written: No space left"
    ) as error:
        store.flush_journal()
        # a thread writes it; the pass after its end says how it went
        store.journal.next.thread.join()
        store.flush_journal()
    assert error.value.exit_code == 1 and not list(tmp_path.glob("*.part"))
    disk.room = 1 << 40
    store.journal.close()
    assert state(recorded(tmp_path)) == before


@pytest.mark.parametrize("room", [0, 7, 60])
def test_records_that_find_no_room_are_a_torn_tail_and_nothing_comes_behind_it(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    log = journal.Journal(tmp_path, sync=False)
    log.rotate(b"snapshot")
    log.append(b"a" * 40)
    log.write()
    disk.room = room
    log.append(b"b" * 40)
    with pytest.raises(AsyncrlError, match="No space left"):
        log.write()
    # room again: what was lost was never promised, and what comes behind a tear could not be read
    disk.room = 1 << 40
    log.append(b"c" * 40)
    for again in (log.write, lambda: log.rotate(b"x")):
        with pytest.raises(AsyncrlError, match="No space left"):
            again()
    log.close()
    assert list(journal.read(journal.list_segments(tmp_path)[-1])) == [b"snapshot", b"a" * 40]


@pytest.mark.parametrize("mode", ["memory", "process"])
def test_a_full_disk_ends_a_run_in_one_line_and_the_next_life_goes_on(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    run = Run(tmp_path, f"durability.mode='{mode}'")
    generator, learner = run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    tickets = ask(generator, want(1, 9), m.TicketGrant).tickets
    for t in tickets:
        ask(generator, answers(t), m.DeliveryAcks)
    ask(learner, m.BatchRequest(1, 0), m.Batch)
    disk.room = 10
    learner.send(m.Commit(1, 0, Label(1, 1), "d1", {"reward/mean": 0.5}))
    run.thread.join(600)
    assert isinstance(run.error, AsyncrlError)
    assert "cannot be written: No space left on device; free some space" in str(run.error)
    wrong = run.service.close()
    assert "No space left" in wrong or mode == "memory"
    disk.room = 1 << 40
    for name in ("metrics.jsonl", "trained.jsonl", "samples.jsonl"):
        assert all(json.loads(x) for x in (run.dir / name).read_text().splitlines())
    run.service.stop = True
    for p in run.peers:
        p.close()
    if mode == "process":
        store = open_store(run.config, run.dir, get_task(run.config.task))
        # the commit was never answered: it may be there or not
        assert store.committed in (0, 1) and len(store.comps) == 1


def test_a_timeline_without_room_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    # every byte that reaches it: no space left on device
    (tmp_path / "trace" / "learner.jsonl").symlink_to("/dev/full")
    tracer = Tracer(tmp_path, "learner")
    for _ in range(5000):  # more than its file keeps back
        tracer.add("train", 1.0, 2.0)
    assert tracer.events_left == 0
    tracer.close()
    (tmp_path / "trace" / "learner.jsonl").unlink()
    (tmp_path / "trace" / "learner.jsonl").write_text('["train",1.0,2.0]\n')
    assert merge(tmp_path).stat().st_size > 10
    (tmp_path / "trace.json").unlink()
    (tmp_path / "trace.json").symlink_to("/dev/full")
    assert not merge(tmp_path).exists()


def test_tensorboard_without_room_drops_its_events_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(0, {"reward/mean": 0.5})
    writer.board.records.close()
    writer.board.records = metrics.import_protocol()[0]("/dev/full")
    for n in range(1, 100):
        writer.write(n, {"reward/mean": 0.5})
    writer.close()
    assert len(metrics.read(tmp_path)) == 100
    got = capsys.readouterr().err.count(
        "tensorboard can no longer be written: No space left on device"
    )
    assert got == 1
