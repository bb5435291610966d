"""benchmarks/studies/natural_lag.py: accuracy at equal time, and what its arms are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_rivals_kit import program


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("natural_lag", monkeypatch)


def record(*accuracy: float, step: float, abandoned: str = "", **row: float) -> dict[str, Any]:
    """An evaluation every second batch; each batch takes `step` decode steps."""
    versions = range(1, 2 * (len(accuracy) - 1) + 1)
    plain = {"lag/mean": 1.0, "is/ess": 0.5}
    return {
        "curve": [{"version": v, "clock": v * step} | plain | row for v in versions],
        "evals": {"heldout": {str(2 * n): [x, x] for n, x in enumerate(accuracy)}},
        "accuracy": [[0.0, 2.0], list(accuracy[:2])],
        "abandoned": abandoned,
        "lag_histogram": {"0": 5, "3": 1},
        "ledger_lines": {"trained": {"tokens": 75}, "dropped_stale": {"tokens": 25}},
    }


def test_accuracy_at_a_time_lies_between_evaluations(bench: Any) -> None:
    run = record(0.2, 0.4, 0.8, step=10.0)
    assert bench.line(run) == ([0.0, 20.0, 40.0], [0.2, 0.4, 0.8])
    # 0 to 20 at a mean of 0.3, 20 to 30 of 0.5
    assert bench.at(run, 30.0) == pytest.approx((0.6, (20 * 0.3 + 10 * 0.5) / 30))
    assert bench.at(run, 40.0) == pytest.approx((0.8, (20 * 0.3 + 20 * 0.6) / 40))


def test_a_run_that_was_given_up_keeps_its_last_and_ends_nobodys_time(bench: Any) -> None:
    run = record(0.4, 0.2, step=10.0, abandoned="collapsed")
    assert bench.last(run) == float("inf") and bench.last(record(0.4, 0.2, step=10.0)) == 20.0
    assert bench.at(run, 40.0) == pytest.approx((0.2, (20 * 0.3 + 20 * 0.2) / 40))
    run["curve"].append({"version": 3, "is/ess": 0.0})  # trained and not committed: no clock
    assert bench.at(run, 40.0) == pytest.approx((0.2, (20 * 0.3 + 20 * 0.2) / 40))
    assert bench.facts({0: run}, 40.0)["ess"] == 0.5


def put(plan: Any, task: str, arm: str, seed: int, found: dict[str, Any]) -> None:
    path = plan.cells.get_path(plan.name(task, arm, seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))


def test_arms_are_compared_when_the_first_run_ends(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.PARTS, "limits", {"4": ["staleness.max_lag=4"], "1": []})
    words = ["limits", "--out", str(tmp_path), "--seeds", "3", "--tasks", "rle-5e-4", "--table"]
    plan = bench.Plan(bench.options(words))
    for seed, gain in enumerate((0.0, 0.04)):  # of seed 2 only one arm is there
        put(plan, "rle-5e-4", "4", seed, record(0.2, 0.4 + gain, 0.8, step=10.0, **{"is/ess": 0.7}))
        put(plan, "rle-5e-4", "1", seed, record(0.2, 0.4, 0.6, step=20.0))
    put(plan, "rle-5e-4", "4", 2, record(0.0, 0.0, step=1.0))
    about = bench.analyse(plan)["rle-5e-4"]
    quick, slow = about["arms"]["4"], about["arms"]["1"]
    assert about["decode_steps"] == 40.0 and quick["seeds"] == slow["seeds"] == [0, 1]
    assert quick["final"] == 0.8 and slow["each"] == [0.4, 0.4]
    assert quick["batches"] == 4 and slow["batches"] == 2
    assert quick["ess"] == 0.7 and slow["ess"] == 0.5
    assert slow["lag"] == 1.0 and slow["lag_largest"] == 3 and slow["lost"] == 0.25
    assert slow["against_first"]["final"]["difference"] == pytest.approx(-0.4)
    # 0.3 against 0.45 and 0.47 in the mean
    assert slow["against_first"]["height"]["difference"] == pytest.approx(-0.16)
    assert "against_first" not in quick and "limit" not in quick
    text = "\n".join(bench.table({"rle-5e-4": about}))
    assert "at 40 decode steps, 2 seeds" in text and "-0.400" in text


def test_singles_have_as_many_answers_a_batch(bench: Any, tmp_path: Path) -> None:
    for part in bench.PARTS:
        words = [part, "--out", str(tmp_path), "--seeds", "1"]
        plan = bench.Plan(bench.options(words))
        for name, config in plan.cells.configs.items():
            learner = config.learner
            assert learner.groups * learner.group_size == 128, name
            assert (learner.group_size == 1) == ("singles" in name), name
            late = config.staleness
            assert late.delay == 1.0
            assert late.delay_of == ("answer" if part == "groups" else "ticket")
        assert len(plan.cells.configs) == len(bench.tasks_of(part)) * len(bench.PARTS[part])


def test_methods_run_at_their_own_rates(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bench.Plan(bench.options(["methods", "--out", str(tmp_path), "--seeds", "1"]))
    found = {
        name: (config.learner.lr, config.loss.surrogate, config.staleness.max_lag)
        for name, config in plan.cells.configs.items()
    }
    assert found["methods-rle-5e-4-ppo-seed0"] == (1.25e-4, "ppo", 16)
    assert found["methods-rle-5e-4-gmpo-seed0"] == (2.5e-4, "gmpo", 16)
    assert found["methods-sort-2e-4-vespo-seed0"] == (2e-4, "vespo", 16)
    assert len(found) == 2 * len(bench.METHODS)
    with pytest.raises(SystemExit):
        bench.options(["methods", "--tasks", "cancel-3e-4"])
    assert "not a task of methods; choose of rle-5e-4, sort-2e-4" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["limits", "groups", "swaps", "methods"])
def test_the_program_runs_its_arms(
    bench: Any,
    part: str,
    sort_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other one, which leaves each kind: the configs of all are loaded above."""
    monkeypatch.setitem(bench.PARTS, part, dict(list(bench.PARTS[part].items())[::2]))
    models = tmp_path / "n-quick" / "models"
    models.mkdir(parents=True)
    (models / "demo").symlink_to(sort_model)
    monkeypatch.setattr(sys, "argv", ["natural_lag.py"])
    task = "sort-2e-4" if part == "methods" else "sort-3e-4"
    bench.main([part, "--out", str(tmp_path / "n"), "--quick", "--json", "--tasks", task])
    found = json.loads(capsys.readouterr().out)
    arms = found["tasks"][task]["arms"]
    assert found["missing"] == 0 and list(arms) == list(bench.PARTS[part])
    for arm, about in arms.items():
        assert about["seeds"] == [0, 1] and about["batches"] >= 1, arm
        assert ("limit" in about) == arm.startswith("auto"), arm
        if "no wait" not in arm:
            assert about["lost"] == 0 or about["lag_largest"] <= 16
