"""`asyncrl diff` on real runs: the same twice, another learning rate, and no runs at all."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from process_kit import Ended, run_command

from asyncrl.experiments.replay.diff import find_first_difference


def diff(*words: str) -> Ended:
    return run_command([sys.executable, "-m", "asyncrl.cli", "diff", *words])


def test_how_fast_a_run_was_is_no_difference() -> None:
    """Where answers waited, and for how long, is the machine's; the mean reward is the run's."""
    slow = {"time/step": 9.0, "reward/queue": 21.0, "reward/wait_s": 0.3, "reward/call_s": 0.1}
    fast = {"time/step": 1.0, "reward/queue": 14.0, "reward/wait_s": 0.1, "reward/call_s": 0.2}
    slow |= {"link/ack_s": 0.2, "judge/seconds": 1.0, "prefix/hits": 3.0}
    slow |= {"reward/workers": 2.0, "throughput/learner_tokens_per_s": 5.0, "memory/peak": 1.0}
    fast |= {"reward/workers": 1.0, "throughput/learner_tokens_per_s": 9.0, "memory/peak": 2.0}
    assert not find_first_difference(
        {0: slow | {"reward/mean": 0.5}}, {0: fast | {"reward/mean": 0.5}}
    )
    found = find_first_difference(
        {0: slow | {"reward/mean": 0.5}}, {0: fast | {"reward/mean": 0.4}}
    )
    assert [m["name"] for m in found["metrics"]] == ["reward/mean"]


def test_two_runs_side_by_side(forked: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    small = ("learner.steps=4", "learner.lr=3e-4", "staleness.max_lag=0", "evaluation.every=0")
    small += ("wires.lease_s=600",)
    a, b, c = (
        forked(tmp_path / n, *small, *more)["run_dir"]
        for n, more in (("a", ()), ("b", ()), ("c", ("learner.lr=1e-3",)))
    )
    same = diff(a, b)
    assert same.code == 0 and "configs are the same" in same.out and "bitwise equal" in same.out
    other = diff(a, c, "--json", "--html", str(tmp_path / "d.html"))
    found = other.json
    assert other.code == 1
    assert found["config"] == ["learner.lr: 0.0003 | 0.001"] and not found["equal"]
    # the first batch is drawn by the same weights: only the rate differs there
    first = found["first_difference"]
    assert first["step"] <= 1
    assert ("optim/lr", 0.0003, 0.001) in {(m["name"], m["a"], m["b"]) for m in first["metrics"]}
    page = (tmp_path / "d.html").read_text()
    assert "learner.lr: 0.0003 | 0.001" in page and "Gradient norm" in page
    gone = diff(a, str(tmp_path / "nowhere"))
    assert gone.code == 2 and "no run directory" in gone.err


def test_a_longer_run_is_another_run_also_when_nothing_was_learned(tmp_path: Path) -> None:
    for name, steps in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[learner]\nsteps = {steps}\n")
        (tmp_path / name / "weights_digest").write_text("0123")
        rows = [json.dumps({"step": step, "t": 0.0, "reward/mean": 0.0}) for step in range(steps)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    found = diff(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.code == 1 and "bitwise equal" not in found.out
    assert "in the common steps (up to 1 and 2); the final weights are equal" in found.out
    (tmp_path / "b" / "weights_digest").write_text("4567")
    found = diff(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.code == 1 and "the final weights differ" in found.out
    (tmp_path / "b" / "weights_digest").unlink()
    found = diff(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.code == 1 and "at least one run has not ended" in found.out
