"""A buffer killed under a run of real processes: `process` and `disk` go on with what was promised,
`memory` ends the run."""

import json
import os
import signal
from pathlib import Path

import pytest
from run_kit import check_summary, children, finish, let_go, start, steps_done, wait_until

from asyncrl.records import metrics

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["process", "disk"])
def test_a_killed_buffer_costs_only_its_time(mode: str, tmp_path: Path, sort_model: Path) -> None:
    words = (
        "learner.steps=24",
        "learner.groups=8",
        "learner.group_size=4",
        "learner.checkpoint_every=5",
        f"durability.mode='{mode}'",
        "name='kill'",
    )
    process = start(tmp_path, sort_model, *words, hold=18)
    run_dir = tmp_path / "runs" / "kill"
    killed = [0]
    for at in (5, 12):
        wait_until(lambda at=at: steps_done(run_dir) >= at, process)
        # another one than was killed before
        wait_until(lambda: children(process.pid).get("buffer", killed[-1]) != killed[-1], process)
        killed.append(children(process.pid)["buffer"])
        os.kill(killed[-1], signal.SIGKILL)
    let_go(tmp_path)
    summary = finish(process, tmp_path)
    check_summary(summary, summary["lag"]["limit"])
    # the learner lived: nothing is written anew for it
    assert summary["steps"] == 24 and summary["ledger"]["orphaned"] == 0
    rows = [json.loads(line) for line in (run_dir / "trained.jsonl").read_text().splitlines()]
    assert {r["batch"] for r in rows} == set(range(24)) and summary["trajectories"] == 24 * 32
    assert (tmp_path / "stderr").read_text().count("SIGKILL") == 2


def test_a_killed_memory_buffer_ends_the_run_and_a_resume_goes_on(
    tmp_path: Path, sort_model: Path
) -> None:
    words = ("learner.steps=20", "learner.checkpoint_every=2", "name='kill'")
    words += ("learner.groups=8", "learner.group_size=4")
    process = start(tmp_path, sort_model, *words, hold=15)
    run_dir = tmp_path / "runs" / "kill"
    wait_until(lambda: steps_done(run_dir) >= 6, process)
    os.kill(children(process.pid)["buffer"], signal.SIGKILL)
    let_go(tmp_path)
    assert process.wait(timeout=3600) == 3
    process = start(tmp_path, sort_model, "--resume", str(run_dir))
    summary = finish(process, tmp_path)
    # each batch counts once, over both lives
    assert summary["steps"] == 20 and summary["trajectories"] == 20 * 32
    assert summary["ledger"]["trained"] >= summary["tokens"] > 0
    # the clock of the second life goes on where the first one's stood
    times = [r["t"] for r in metrics.read(run_dir) if "reward/mean" in r]
    assert len(times) >= 20
    assert times == sorted(times)
    assert summary["wall_s"] == pytest.approx(times[-1], abs=0.01)
