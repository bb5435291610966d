"""A run directory that an older version wrote is read, replayed and resumed.

`tests/data/run_3eaeb19.tar.xz` was made by commit 3eaeb19: configs/demo.toml with 2 groups of 2, a
model of 16 channels, `durability.mode = "disk"` and `record.stream = true`, interrupted early.  It
holds a journal, a recording, checkpoints, metrics and the resolved config."""

import json
import sys
import tarfile
from pathlib import Path

import pytest
from process_kit import ROOT, Ended, run_command

import asyncrl
from asyncrl.config import load
from asyncrl.supervise import summary

pytestmark = pytest.mark.slow

ARCHIVE = ROOT / "tests" / "data" / "run_3eaeb19.tar.xz"
BATCHES = 10  # that it had trained


@pytest.fixture
def older_run(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "main-3eaeb19"


def call(run: Path, *words: str) -> Ended:
    argv = [sys.executable, "-m", "asyncrl.cli", *words, "--json"]
    return run_command(argv, cwd=run.parent)


def test_an_older_run_loads_in_python(older_run: Path) -> None:
    run = asyncrl.load_run(older_run)
    lag = run.metrics["lag/mean"]
    assert len(lag.values) == BATCHES and lag.values.max() <= 2
    # it wrote them as adv/mean and adv/abs_max
    assert len(run.metrics["advantage/mean"].values) == BATCHES
    assert not any(name.startswith("adv/") for name in run.metrics)
    got = sum(n for line, n in run.ledger.items() if line != "generated")
    assert got == run.ledger["generated"]


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "buffer killed"])
def test_a_short_run_has_the_rate_of_its_whole_time(older_run: Path, killed: bool) -> None:
    """Generators report at intervals; a run may end before the first report."""
    name = "throughput/generator_tokens_per_s"
    path = older_run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    cut = [json.dumps({k: v for k, v in row.items() if k != name}) for row in rows]
    path.write_text("".join(line + "\n" for line in cut), encoding="utf-8")
    if killed:
        (older_run / "buffer_summary.json").unlink()
    made = summary.compose(load.load(older_run / "config.toml"), older_run)
    rate = made["speed"]["generator_tokens_per_s"]
    assert rate == pytest.approx(made["ledger"]["generated"] / made["wall_s"]) and rate > 0


def test_an_older_recording_replays(older_run: Path) -> None:
    """To rounding: the last bits are those of the processor that recorded it."""
    replayed = call(older_run, "replay", str(older_run))
    assert replayed.code in (0, 1), replayed.err  # 1: not the same bits
    assert replayed.json["to"] == BATCHES and replayed.json["changed"] == []
    recorded, again = replayed.json["recorded"], replayed.json["replayed"]
    assert recorded["optim/grad_norm"] > 0
    for name in ("optim/grad_norm", "policy/entropy", "loss/policy", "is/ess"):
        assert again[name] == pytest.approx(recorded[name], rel=1e-3, abs=1e-5), name


def test_an_older_run_resumes_from_its_journal(older_run: Path) -> None:
    steps = BATCHES + 2
    resumed = call(older_run, "run", "--resume", str(older_run), "--set", f"learner.steps={steps}")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == steps
    ledger = resumed.json["ledger"]
    assert sum(n for line, n in ledger.items() if line != "generated") == ledger["generated"]
    rows = asyncrl.load_run(older_run).metrics["optim/grad_norm"]
    assert list(rows.steps) == list(range(steps))
