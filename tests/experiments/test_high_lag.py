"""benchmarks/studies/high_lag.py: its runs, its choice of a rate, and its possible verdicts."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.algorithms import settings
from asyncrl.config import load
from asyncrl.experiments.compare import warm_pool
from asyncrl.supervise import preflight

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks" / "studies")])
    import high_lag

    return high_lag


def options(program: Any, tmp_path: Path, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "out": tmp_path,
            "quick": False,
            "table": False,
            "workers": 1,
            "budget_minutes": math.inf,
            "steps": 100,
            "groups": 32,
            "tasks": ["rle-5e-4"],
            "methods": ["ppo", "dis"],
            "lags": [16, 0],
            "updates": [1],
            "rates": [1.0, 0.5],
            "tune_at": 16,
            "tune_seeds": 1,
            "kl": 0.01,
            "seeds": 2,
        }
        | more
    )


def put(
    plan: Any,
    cell: Any,
    seed: int,
    accuracy: list[float],
    steps: int = 100,
    moved: float | None = None,
) -> None:
    path = plan.cells.get_path(cell.name(seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    every = [steps * n / (len(accuracy) - 1) for n in range(len(accuracy))]
    curve = [] if moved is None else [{"step": 1, "kl/moved": moved}]
    record = {"accuracy": [every, accuracy], "curve": curve, "abandoned": "", "lag_histogram": {}}
    path.write_text(json.dumps(record))


def test_a_study_may_build_its_model_in_its_own_folder(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start is refused outside a project's folder, and a study's folder is outside."""
    allowed = []
    monkeypatch.setattr(
        program.studies, "preflight", lambda c: allowed.append(preflight.is_own_models_folder(c))
    )
    plan = program.Plan(options(program, tmp_path))
    monkeypatch.setattr(plan.cells, "run", lambda *_, **__: None)
    plan.add([program.Cell("rle-5e-4", "ppo", 1, 16, 1.0)], 0)
    plan.run()
    assert allowed == [True]


def test_every_method_is_a_config_at_every_lag_with_one_update_and_with_four(
    program: Any, tmp_path: Path
) -> None:
    plan = program.Plan(options(program, tmp_path))
    wanted = [
        program.Cell(task, method, updates, lag, 0.5)
        for task in ["rle-1e-3"]
        for method in program.ARMS
        for updates in (1, 4)
        for lag in [64]
    ]
    plan.add(wanted, 3)
    assert plan.refused == {} and len(plan.cells.configs) == len(wanted)
    found = plan.cells.configs["rle-1e-3-dis-u4-lag64-x0.5-seed3"]
    assert (found.learner.lr, found.learner.minibatches, found.seed) == (5e-4, 4, 3)
    assert found.staleness.inject == 64 and found.staleness.max_lag == 64
    assert found.loss.surrogate == "band" and found.task.name == "rle"
    assert set(program.FIRST) | set(program.ALIKE) <= set(program.ARMS)
    apart, gmpo = (
        plan.cells.configs[f"rle-1e-3-{method}-u1-lag64-x0.5-seed3"]
        for method in ("ppo-grpo", "gmpo")
    )
    assert (apart.loss.surrogate, gmpo.loss.surrogate) == ("ppo", "gmpo")
    assert apart == msgspec.structs.replace(
        gmpo, loss=settings.PpoLoss(reduction=gmpo.loss.reduction)
    )


def test_the_rate_is_the_best_of_all_factors_and_unknown_until_all_are_there(
    program: Any, tmp_path: Path
) -> None:
    plan = program.Plan(options(program, tmp_path))
    one, half = plan.tuning("rle-5e-4", "dis", 1)
    assert (one.lag, one.factor, half.factor) == (16, 1.0, 0.5)
    put(plan, one, program.TUNING_SEED, [0.2, 0.4, 0.3])
    assert plan.factor("rle-5e-4", "dis", 1) is None
    assert plan.screen("rle-5e-4", 1, 16) == []
    # one that was given up at half its way keeps its last accuracy
    put(plan, half, program.TUNING_SEED, [0.2, 0.5], steps=50)
    assert plan.factor("rle-5e-4", "dis", 1) == 0.5
    put(plan, half, program.TUNING_SEED, [0.2, 0.4, 0.3])
    assert plan.factor("rle-5e-4", "dis", 1) == 0.5, "the lower of two as good"
    assert plan.screen("rle-5e-4", 1, 64) == [program.Cell("rle-5e-4", "dis", 1, 64, 0.5)]


def test_a_pool_starts_no_run_once_the_time_is_over(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that only says that it is done, and a clock that strikes after two runs."""
    worker = "import sys\nfor _ in sys.stdin: print('{\"done\": true}', flush=True)"
    monkeypatch.setattr(
        warm_pool.importing, "make_command", lambda *words: [sys.executable, "-c", worker]
    )
    cells = warm_pool.CellStore(tmp_path)
    cells.configs = dict.fromkeys(["a", "b", "c", "d"], load.load(ROOT / "configs" / "rle.toml"))
    done: list[str] = []
    cells.run(1, lambda name, _: done.append(name), may_start=lambda: len(done) < 2)
    assert done == ["a", "b"]
    cells.run(1, lambda name, _: done.append(name), may_start=lambda: False)
    assert done == ["a", "b"]
    cells.run(1, lambda name, _: done.append(name))
    assert done[2:] == ["a", "b", "c", "d"]  # none has left a record


def test_the_verdict_is_paired_after_holm_and_says_what_it_could_not_see(
    program: Any, tmp_path: Path
) -> None:
    plan = program.Plan(
        options(program, tmp_path, rates=[1.0], seeds=4, methods=["ppo", "dis", "vespo"])
    )
    ends = {
        "ppo": [0.50, 0.52, 0.48, 0.51],
        "dis": [0.61, 0.62, 0.59, 0.60],
        "vespo": [0.40, 0.62, 0.55, 0.45],
    }
    for method, values in ends.items():
        for seed, end in enumerate(values):
            cell = program.Cell("rle-5e-4", method, 1, 16, 1.0)
            put(plan, cell, seed, [0.2, end, end])
    found = program.analyse(plan)
    row = found["rle-5e-4"]["1"]["by_lag"]["16"]
    assert row["dis"]["against"]["difference"] == pytest.approx(0.1025)
    assert row["dis"]["against"]["p_holm"] < 0.05 < row["vespo"]["against"]["p_holm"]
    assert row["dis"]["area"] == pytest.approx((0.2 + 0.605 * 3) / 4, abs=1e-3)
    # three quarters of the way at the end's height
    assert row["dis"]["height_against"]["difference"] == pytest.approx(0.1025 * 3 / 4)
    assert row["dis"]["height_against"]["p_holm"] < 0.05
    said = "\n".join(program.verdicts(found))
    assert "lag 16: ppo 0.502; better: dis +0.102" in said and "better: vespo" not in said
    row.pop("dis")
    assert "nothing is visibly better than ppo 0.502 (of 0." in program.judged(row)
    for about in row.values():
        about.get("against", {})["seeds"] = 1
    assert "one seed: no verdict is possible" in program.judged(row)
    assert "|`vespo`|1|0.51 (n=4)" in "\n".join(program.table(found))
