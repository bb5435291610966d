"""Who lives in a run directory and how the others ended: rows, locks, doctor and report."""

import fcntl
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from process_kit import ENV, ROOT

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import process_log, rundir
from asyncrl.supervise import doctor
from asyncrl.supervise import run as runner
from asyncrl.supervise.report import run_page

SETS = ("learner.steps=4", "generators=2", "name='r'")
HOLD = (
    "import sys; from pathlib import Path; from asyncrl.records import process_log;"
    "life = process_log.ProcessIncarnation(Path(sys.argv[1]), sys.argv[2], alone=True);"
    "print('on', flush=True); input()"
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rundir.ensure(config(), load.dump(config()), tmp_path / "r")
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
    return "\n".join(doctor.format_lines(run_dir, doctor.examine_run(config(), run_dir, None)))


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


def test_an_error_that_ended_several_processes_is_shown_once(run_dir: Path) -> None:
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
    ("item", "said"),
    [
        (
            "learner.lr=0.5",
            r"--set learner.lr=0.5: the run has learner.lr = 0.0003, not 0.5 \(R/config.toml\)",
        ),
        ("generator.engine='vllm'", 'the run has generator.engine = "embedded", not "vllm"'),
        ("staleness.inject=1", "the run has staleness.inject = not set, not 1"),
        ("kl.preset='rloo'", 'the run has kl.preset = "", not "rloo"'),
    ],
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
    page = run_page.write(run_dir).read_text()
    assert "<li>Not finished: 3 of 4 steps.</li>" in page
    assert "buffer (process 7) ended with SIGKILL" in page and 'id="steps">3<' in page
    assert 'id="wall">3 s<' in page and 'id="heldout-start">0.250<' in page
    assert 'id="lag-mean">0.17<' in page  # 4 tokens of 24 at lag 1
    assert "the ledger has only the trained tokens" in page and "24" in page
    assert not (run_dir / "summary.json").exists()  # which would say that it has ended


def test_a_run_without_a_batch_has_nothing_to_report(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="no batch has been trained; `asyncrl doctor"):
        run_page.write(run_dir)


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
