"""Rows after a power cut or on a full disk, older files, and who lives in a run directory."""

import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from journal_kit import recorded, state
from process_kit import ENV, ROOT, TEXTS
from service_kit import Run, answers, ask, join, want
from store_kit import hello

from actors.gateway.recovery.session_journal import SessionJournal
from asyncrl.cli import main
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.versions import Label
from asyncrl.records import atomic_write, jsonl, metrics, process_log, rundir
from asyncrl.records.trace import Tracer, merge
from asyncrl.supervise import doctor
from asyncrl.supervise import run as runner
from asyncrl.supervise.report import run_view
from asyncrl.tasks import get_task
from buffer import journal, training_log
from buffer.service import open_store

BATCHES = [
    {"batch": n, "samples": 4, "ids": f"x{n}", "lags": {"0": 3, "1": n}, "tickets": [[n, n]]}
    for n in range(4)
]


def test_trained_batches_and_metrics_cut_at_any_byte_are_read_and_gone_on_with(
    tmp_path: Path,
) -> None:
    path, text = tmp_path / "trained.jsonl", "".join(json.dumps(r) + "\n" for r in BATCHES[:3])
    for cut in range(len(text) + 1):
        path.write_text(text[:cut])
        rows = training_log.TrainingLog(path)
        assert [*rows.rows] == list(range(text[:cut].count("]}")))
        rows._write(msgspec.convert(BATCHES[3], training_log.TrainedBatch, strict=False))
        rows.close()
        assert [*training_log.read(path)] == [*range(text[:cut].count("]}")), 3]
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
    for name in TEXTS["copied_run"]:
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


def test_a_report_shows_half_a_character_as_its_escape(gain: Any, tmp_path: Path) -> None:
    with (copied_run(gain, tmp_path) / "samples.jsonl").open("ab") as f:
        f.write(rb'{"prompt": "p", "text": "\ud83d", "batch": 1, "reward": 0.5, "lag": 0}' + b"\n")
    summary = tmp_path / "summary.json"
    sign = {"name": "odd", "said": "a \udc00 b", "try_this": ""}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"signs": [sign]}))
    page = run_view.write_report(tmp_path).read_bytes().decode()
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


def test_a_row_is_appended_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        wait([store.journal.next])
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
    log = journal.Journal(tmp_path, b"snapshot", sync=False)
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
    generator, learner = join(run)
    tickets = ask(generator, want(1, 9), m.TicketGrant).tickets
    for t in tickets:
        ask(generator, answers(t), m.DeliveryAcks)
    ask(learner, m.BatchRequest(1, 0), m.Batch)
    disk.room = 10
    learner.send(m.Commit(1, 0, Label(1, 1), "d1", {"reward/mean": 0.5}))
    run.thread.join(600)
    assert isinstance(run.error, AsyncrlError)
    assert "cannot be written: No space left on device; free some space" in str(run.error)
    assert "No space left" in run.service.close() or mode == "memory"
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


def test_tensorboard_may_lack_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


FILES = ROOT / "tests" / "data" / "older_files"


def test_a_session_of_an_older_version_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir(mode=0o700)
    shutil.copy(FILES / "session_1.0.1", folder / "1.0.1")
    ((opening, records),) = SessionJournal(folder).read()
    assert (opening.name, opening.key, opening.opened) == ("1.0.1", "key", 5.0)
    assert [x.ticket for x in records if x.ticket][-1].ticket == 1
    calls = [record.call for record in records if record.call is not None]
    assert [call.body for call in calls] == [b"a", b"b", b"c", b"d"]
    assert [call.parent for call in calls] == [None, 0, 0, None] and calls[3].aside
    assert records[-2].sent == 0 and records[-1].progress is not None


@pytest.mark.slow
def test_a_tinker_server_continues_the_files_of_an_older_version(tmp_path: Path) -> None:
    pytest.importorskip("tinker")
    from tinker.proto import tinker_public_pb2 as pb
    from tinker_local_kit import KEY, LocalServer

    with tarfile.open(FILES / "tinker_server.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    server = LocalServer(tmp_path)
    try:
        (model,) = server.server.models.values()
        assert (model.version, model.next, model.recorded) == (2, 6, 5)
        assert model.ledger.sum_totals(model.record.model)["sampled"] == 2
        assert len(server.server.samplers.samplers) == 1
        headers = {"x-api-key": KEY}

        def retrieve(name: str) -> httpx.Response:
            deadline = time.monotonic() + 600
            url = f"{server.url}/api/v1/retrieve_future"
            while time.monotonic() < deadline:
                reply = httpx.post(url, headers=headers, json={"request_id": name}, timeout=60)
                if reply.status_code != 408:
                    return reply
            raise AssertionError(name)

        assert json.loads(retrieve(f"{model.record.model}:call:5").content)["type"] == "optim_step"
        call = model.log.read_call(4)
        assert call is not None and call.route == "forward_backward"
        again = pb.ForwardBackwardRequest.FromString(call.body)
        again.seq_id = 6
        reply = httpx.post(
            f"{server.url}/api/v1/forward_backward",
            headers=headers | {"content-type": "application/x-protobuf"},
            content=again.SerializeToString(),
        )
        scores = pb.ForwardBackwardOutput.FromString(retrieve(reply.json()["request_id"]).content)
        assert scores.metrics["loss:sum"] > 0 and model.next == 7
    finally:
        server.stop()


def test_text_and_bytes_take_the_place_of_what_was_there_and_leave_no_part(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    atomic_write.write(path, "first")
    assert path.read_text() == "first"
    atomic_write.write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff" and os.listdir(tmp_path) == ["summary.json"]


def test_a_failure_leaves_what_was_there_and_no_part(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("first")
    with pytest.raises(OSError, match="full"), atomic_write.replace(path) as part:
        part.write_text("half")
        assert path.read_text() == "first"
        raise OSError("full")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["summary.json"]


def test_an_interrupt_leaves_no_part_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_write.replace(tmp_path / "model") as part:
        part.mkdir()
        (part / "weights").write_text("half")
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)


def test_a_directory_replaces_another_and_a_killed_process_remains(tmp_path: Path) -> None:
    path = tmp_path / "model"
    hidden = tmp_path / ".mine"
    for directory in (path, hidden):
        directory.mkdir()
        (directory / "old").write_text("old")
    with atomic_write.replace(path, part=hidden) as part:
        assert part == hidden
        part.mkdir()
        (part / "new").write_text("new")
    assert os.listdir(tmp_path) == ["model"] and os.listdir(path) == ["new"]


@pytest.mark.parametrize("sync", [True, False])
def test_with_sync_every_file_and_the_directories_reach_the_disk_before_and_after_the_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    done: list[str] = []

    def fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    replace = os.replace

    def replaced(source: Path, target: Path) -> None:
        done.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    with atomic_write.replace(tmp_path / "kept" / "model", sync=sync) as part:
        part.mkdir(parents=True)
        (part / "weights").write_text("all")
    assert done == (["model.part", "weights", "renamed", "kept"] if sync else ["renamed"])


def test_what_cannot_be_removed_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    atomic_write.remove(tmp_path / "file" / "below")
    atomic_write.remove(tmp_path / "nothing")
    assert os.listdir(tmp_path) == ["file"]


PLAIN_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_files_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from asyncrl.records import atomic_write; "
    code += "atomic_write.write(Path(sys.argv[1]), chr(0x3c0))"
    argv = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(
        argv, env=os.environ | PLAIN_LOCALE, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text(encoding="utf-8") == chr(0x3C0)


def test_a_run_in_a_plain_locale(tmp_path: Path, small_model: Path) -> None:
    """Prompts, reward, config and every path have characters that the locale cannot write."""
    folder = tmp_path / "prøjekt-日本"
    folder.mkdir()
    prompts = [{"prömpt": f"{n}é=", "answer": "1"} for n in range(8)]
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts)
    (folder / "pé.jsonl").write_text(rows, encoding="utf-8")
    (folder / "möin.py").write_text(
        'def reward(prompt, text):\n    print("π")\n    return {"reward": 1.0, "é": 0.5}\n',
        encoding="utf-8",
    )
    (folder / "cü.toml").write_text(
        f"""# é
model.path = "{small_model}"
model.device = "cpu"
task = {{ name = "file", prompts = "pé.jsonl", columns = {{ prompt = "prömpt" }} }}
reward.function = "{{here}}/möin.py:reward"
reward.deadline_s = 600.0
generator = {{ context = 32, max_new_tokens = 4, slots = 4 }}
learner = {{ steps = 2, groups = 2, group_size = 2 }}
wires.connect_s = 1800.0
watchdog = {{ floor_s = 1800.0, startup_s = 3600.0 }}
""",
        encoding="utf-8",
    )
    env = os.environ | PLAIN_LOCALE | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> str:
        argv = [sys.executable, "-m", "asyncrl.cli", *words]
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=7200)
        assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
        return done.stdout.decode("ascii")

    call("run", "cü.toml", "--set", "name=lauf-ä")
    assert "é" in (folder / "runs" / "lauf-ä" / "report.html").read_text(encoding="utf-8")
    assert r"lacks '\xe9'" in call("config", "check", "cü.toml")
    call("report", "runs/lauf-ä")
    call("ls", "runs")
    call("export", "runs/lauf-ä", "mødell")


def test_simultaneous_runs_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command: the first is refused and leaves nothing, the others start at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    begun: list[Path] = []

    def begin(config: Config, run_dir: Path, **_: Any) -> tuple[int, dict[str, Any]]:
        assert run_dir.is_dir() and not any(run_dir.iterdir())
        begun.append(run_dir)
        if len(begun) <= 2:
            raise ConfigError("refused")
        (run_dir / "config.toml").touch()
        return 0, {}

    monkeypatch.setattr(runner, "run", begin)
    for kept in ([], ["runs"]):
        assert CliRunner().invoke(main, ["run", "demo"]).exit_code == 2
        assert [path.name for path in tmp_path.iterdir()] == kept
        (tmp_path / "runs").mkdir(exist_ok=True)
    for _ in range(3):
        done = CliRunner().invoke(main, ["run", "demo"])
        assert done.exit_code == 0, done.output
    names = ["demo-20260101-000000", "demo-20260101-000000-2", "demo-20260101-000000-3"]
    assert [path.name for path in begun] == [names[0], names[0], *names]
    with ThreadPoolExecutor(8) as pool:
        config = load.load("demo", [f"runs='{tmp_path / 'many'}'"])
        made = pool.map(lambda _: rundir.choose_directory(config, "demo", create=True), range(40))
    assert len(set(made)) == 40


SETS = ("learner.steps=4", "generators=2", "name='r'")
HOLD = (
    "import sys; from pathlib import Path; from asyncrl.records import process_log;"
    "life = process_log.ProcessIncarnation(Path(sys.argv[1]), sys.argv[2], alone=True);"
    "print('on', flush=True); input()"
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rundir.ensure(load.dump(config()), tmp_path / "r")
    return tmp_path / "r"


def config(*sets: str) -> Config:
    return load.load(ROOT / "configs" / "demo.toml", [*SETS, *sets])


def holder(run_dir: Path, name: str) -> subprocess.Popen[str]:
    """Another process that lives under this name until its stdin closes."""
    p = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir), name],
        cwd=ROOT,
        env=ENV,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert p.stdout is not None and p.stdout.readline() == "on\n"
    return p


def test_a_name_is_one_process_and_its_pid_is_told(run_dir: Path) -> None:
    p = holder(run_dir, "generator-1")
    try:
        with pytest.raises(
            ConfigError,
            match=f"generator-1 of .* is running already as process {p.pid}: give this one "
            "another --index",
        ):
            process_log.ProcessIncarnation(run_dir, "generator-1", alone=True)
        assert process_log.is_alive(run_dir, "generator-1")
        assert not process_log.is_alive(run_dir, "generator-0")
    finally:
        p.kill()
        p.wait()
    assert not process_log.is_alive(run_dir, "generator-1")  # the kernel frees it, however it ended
    assert process_log.ProcessIncarnation(run_dir, "generator-1", alone=True, supervised=True).end(
        0
    )


@pytest.mark.parametrize("what", ["generator-1", "supervisor"])
def test_who_looks_at_a_process_does_not_keep_it_from_starting(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As doctor does, which stands still while it has the lock."""
    looking = (run_dir / (".run.lock" if what == "supervisor" else f".{what}.alive")).open("w")
    fcntl.flock(looking, fcntl.LOCK_EX)
    clock = itertools.count(0.0, 0.01)
    waits = itertools.count()

    def sleep(_seconds: float) -> None:
        if next(waits) == 3:
            looking.close()

    monkeypatch.setattr(rundir, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=sleep))
    if what == "supervisor":
        rundir.RunLock(run_dir).close()
    else:
        process_log.ProcessIncarnation(run_dir, what, alone=True).release()
    assert looking.closed


def test_two_learners_live_side_by_side(run_dir: Path) -> None:
    one, two = (process_log.ProcessIncarnation(run_dir, "learner", alone=False) for _ in range(2))
    assert process_log.is_alive(run_dir, "learner") and not one.end(0)
    assert process_log.is_alive(run_dir, "learner") and two.end(0)


def test_only_the_last_of_a_directory_is_the_last_and_others_wait_for_it(run_dir: Path) -> None:
    first = process_log.ProcessIncarnation(run_dir, "buffer", alone=True)
    second = process_log.ProcessIncarnation(run_dir, "learner", alone=False)
    assert not first.end(0)
    first.release()
    assert second.end(0)
    came = threading.Event()

    def come() -> None:
        third = process_log.ProcessIncarnation(run_dir, "buffer", alone=True)
        came.set()
        third.end(0)
        third.release()

    thread = threading.Thread(target=come)
    thread.start()
    assert not came.wait(0.2)  # the end of those before is being written
    second.release()
    assert came.wait(600)
    thread.join()


def test_rows_survive_torn_lines_and_tell_who_did_not_end_well(run_dir: Path) -> None:
    process_log.append_event(run_dir, "buffer", 1, "began")
    process_log.append_event(run_dir, "buffer", 1, "ended", code=0, why="")
    process_log.append_event(run_dir, "generator-0", 3, "ended", code=6, why="the run has ended")
    process_log.append_event(run_dir, "generator-1", 4, "ended", code=130, why="")
    process_log.append_event(run_dir, "learner", 2, "began")
    with process_log.get_path(run_dir).open("a") as f:
        f.write('{"at": 3.0, "name": "lear\n[1]\n{}\n')
    assert [r["name"] for r in process_log.list_failed_ends(run_dir)] == ["generator-1", "learner"]
    told, killed = map(process_log.describe_end, process_log.list_failed_ends(run_dir))
    assert told.startswith("generator-1 (process 4) was asked to end")
    assert killed.startswith("learner (process 2) ended without a report")
    process_log.append_event(run_dir, "learner", 2, "died", code=-9, why="half a line")
    assert process_log.describe_end(process_log.list_failed_ends(run_dir)[-1]).startswith(
        "learner (process 2) ended with SIGKILL: half a line at "
    )


def test_a_directory_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    process_log.append_event(tmp_path / "gone" / "r", "learner", 1, "began")
    assert process_log.read_events(tmp_path / "gone" / "r") == []


def said(run_dir: Path) -> str:
    state = doctor.examine_run(config(), run_dir, None)
    return doctor.format_state(config(), run_dir, None, state)


def train(run_dir: Path, batches: int) -> None:
    lags = [{"0": 6, "1": 2}, {"0": 8}]
    with (run_dir / "metrics.jsonl").open("w") as f, (run_dir / "trained.jsonl").open("w") as g:
        f.write(json.dumps({"step": 0, "t": 0.0, "eval/heldout": 0.25, "eval/heldout_n": 4}) + "\n")
        for n in range(batches):
            f.write(
                json.dumps({"step": n, "t": 1.5 * n, "reward/mean": 0.5, "lag/mean": 0.25}) + "\n"
            )
            g.write(
                json.dumps(
                    {"batch": n, "samples": 2, "ids": "a", "lags": lags[n % 2], "tickets": [[n, n]]}
                )
                + "\n"
            )


def test_before_anything_has_started_it_says_what_to_start(run_dir: Path) -> None:
    text = said(run_dir)
    assert text.startswith("step 0/4\n") and "buffer has not been started" in text
    assert "generator-1 has not been started" in text and "none of its processes is running" in text
    (run_dir / "logs" / "attempt_1").mkdir(parents=True)
    for number, name in enumerate(("buffer", "learner", "generator-0")):
        log = run_dir / "logs" / "attempt_1" / f"{name}.log"
        log.write_text("error: 26 samples failed\n" if number else "its own last line\n")
        why = "" if number else "26 samples failed"
        process_log.append_event(run_dir, name, number + 1, "ended", code=1, why=why)
    text = said(run_dir)
    assert text.count("26 samples failed") == 1 and "its own last line" in text


def test_with_some_there_it_says_what_is_missing(run_dir: Path) -> None:
    p = holder(run_dir, "generator-1")
    try:
        text = said(run_dir)
        assert f"generator-1 is running (process {p.pid})" in text
        where = f"{run_dir}/config.toml --run-dir {run_dir}"
        assert text.endswith(
            f"the run waits for a process that is not running; start it: asyncrl buffer {where}; "
            f"asyncrl learner {where}"
        )
        lock = rundir.RunLock(run_dir)
        assert said(run_dir).endswith(
            "a supervisor is running: it restarts failed processes, and ends the run if that does "
            "not help"
        )
        lock.close()
    finally:
        p.kill()
        p.wait()
    others = [process_log.ProcessIncarnation(run_dir, n, alone=True) for n in ("buffer", "learner")]
    assert said(run_dir).endswith(
        f"start it: asyncrl generator {where} --index 0; asyncrl generator {where} --index 1"
    )
    others.append(process_log.ProcessIncarnation(run_dir, "generator-0", alone=True))
    assert said(run_dir).endswith(
        "all processes are running: the run is starting, or one of them hangs"
    )
    for x in others:
        x.end(0)
        x.release()


def test_a_generator_of_another_number_is_not_a_missing_one(run_dir: Path) -> None:
    """Of two planned generators, 1 and 7 run, one of them on another machine."""
    here = process_log.ProcessIncarnation(run_dir, "generator-7", alone=True)
    described = doctor.describe_processes(config(), run_dir, ["generator-1", "learner"])
    states = {p["name"]: (p["alive"], p["connected"]) for p in described}
    assert states == {
        "buffer": (False, False),
        "learner": (False, True),
        "generator-1": (False, True),
        "generator-7": (True, False),
    }
    assert doctor.list_missing({"processes": described, "ended": False}) == ["buffer"]
    assert process_log.list_alive(run_dir) == ["generator-7"]
    here.end(0)
    here.release()
    assert process_log.list_alive(run_dir) == []


def test_of_a_dead_run_it_says_who_died_how_and_where_to_go_on(run_dir: Path) -> None:
    train(run_dir, 3)
    logs = run_dir / "logs" / "attempt_10"
    for log in (run_dir / "logs" / "attempt_9", logs):
        log.mkdir()
        (log / "learner.log").write_text(
            "an older line\n" + "x" * 9000 + f"\nlast words of {log.name}\n\n"
        )
    for number in (2, 3):
        (run_dir / "checkpoints" / "epoch_2" / f"number_{number}").mkdir(parents=True)
    (run_dir / "checkpoints" / "epoch_3.new" / "number_9").mkdir(parents=True)
    process_log.append_event(run_dir, "learner", 7, "died", code=-11, why="")
    text = said(run_dir)
    assert text.startswith("step 3/4  reward/mean 0.5  lag/mean 0.25  (the last one ")
    assert "learner (process 7) ended with SIGSEGV at" in text
    assert f"{logs}/learner.log: last words of attempt_10" in text
    assert "newest checkpoint: version 3," in text
    assert f"asyncrl run --resume {run_dir}` continues" in text
    seen = doctor.examine_run(config(), run_dir, None)
    assert not seen["running"] and not seen["ended"]
    assert next(p for p in seen["processes"] if p["name"] == "learner")["code"] == -11
    process_log.append_event(
        run_dir, "learner", 8, "ended", code=1, why="KeyError: 3", supervised=False
    )
    # its words went to a terminal, not into that log
    assert "KeyError: 3" in said(run_dir) and "last words" not in said(run_dir)


def test_of_a_run_that_has_ended_it_says_where_its_results_are(run_dir: Path) -> None:
    train(run_dir, 4)
    (run_dir / "buffer_summary.json").write_text('{"finished": true, "steps": 4}')
    (run_dir / "weights_digest").write_text("d")
    assert f"the run has ended: {run_dir}/report.html, {run_dir}/model" in said(run_dir)
    rundir.clear_end(run_dir)
    assert not doctor.examine_run(config(), run_dir, None)["ended"]


@pytest.mark.parametrize(
    ("item", "said"), TEXTS["a_set_that_differs_from_the_run_is_refused_with_both_values"]
)
def test_a_set_that_differs_from_the_run_is_refused_with_both_values(item: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load.require_same_config(
            config(item, "staleness.max_lag=4"),
            config("staleness.max_lag=4"),
            [item],
            Path("R/config.toml"),
        )


def test_the_same_values_and_other_files_are_no_contradiction() -> None:
    load.require_same_config(
        config("learner.lr=0.01", "learner.clip_norm=2"),
        config("learner.lr=1e-2", "learner.clip_norm=2.0", "learner.groups=3"),
        ["learner.lr=0.01", "learner.clip_norm=2"],
        Path("R"),
    )


def test_a_run_that_was_killed_has_a_report_of_what_there_is(run_dir: Path) -> None:
    """No summary of any kind, and every file torn in its last line."""
    train(run_dir, 3)
    for name in ("metrics.jsonl", "trained.jsonl", "samples.jsonl", "trace/learner.jsonl"):
        with (run_dir / name).open("a") as f:
            f.write('{"step": 3, "reward/me')
    (run_dir / "commit").unlink()
    process_log.append_event(run_dir, "buffer", 7, "died", code=-9, why="")
    page = run_view.write_report(run_dir).read_text()
    assert "<li>Not finished: 3 of 4 steps.</li>" in page
    assert "buffer (process 7) ended with SIGKILL" in page and 'id="steps">3<' in page
    assert 'id="wall">3 s<' in page and 'id="heldout-start">0.250<' in page
    assert 'id="lag-mean">0.17<' in page  # 4 tokens of 24 at lag 1
    assert "the ledger has only the trained tokens" in page and "24" in page
    assert not (run_dir / "summary.json").exists()  # which would say that it has ended


def test_a_run_without_a_batch_has_nothing_to_report(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no batch has been trained; `asyncrl doctor"):
        run_view.write_report(run_dir)


def test_the_last_process_writes_the_end(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(runner, "conclude", lambda config, run_dir, code: made.append(code))

    def last() -> None:
        life = process_log.ProcessIncarnation(run_dir, "buffer", alone=True)
        assert life.end(0)
        runner.conclude_unsupervised(life)
        life.release()

    last()
    # no buffer has left anything: it was killed, or this is another machine's directory
    assert made == []
    (run_dir / "buffer_summary.json").write_text('{"finished": true}')  # cut by hand
    assert not rundir.is_finished(run_dir, 3)
    (run_dir / "buffer_summary.json").write_text('{"finished": true, "steps": 3}')
    supervisor = rundir.RunLock(run_dir)
    last()
    assert made == []  # a supervisor writes it
    supervisor.close()
    last()
    (run_dir / "buffer_summary.json").write_text('{"finished": true, "steps": 4}')
    (run_dir / "weights_digest").write_text("d")
    last()
    assert made == [1, 0]  # stopped at step 3; ended at step 4
    (run_dir / "summary.json").write_text("{}")
    last()
    assert made == [1, 0]
