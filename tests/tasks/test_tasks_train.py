"""Every built-in task takes its first steps by its config, from a short warm start.

In one process, by turns, through the store, engine, schedule and learner of a run; `calc` in the
processes of a run. What whole runs learn is measured in benchmarks/ and stands in docs/log."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_kit import ROOT, RUN_SEED, run_command

from asyncrl.config import load
from asyncrl.experiments import serial
from asyncrl.tasks import warm_start
from asyncrl.tasks.synthetic import TASKS

pytestmark = pytest.mark.slow

# `sort` is the demo's task, of test_run.py; what is right is test_tasks.py's
TASK_NAMES = ["cancel", "dedup", "grid", "rle", "rlehack", "rlenarrow"]


def short(directory: Path, steps: int) -> list[str]:
    return [
        f"model.path={str(directory / 'model')!r}",
        f"runs={str(directory / 'runs')!r}",
        f"learner.steps={steps}",
        *(f"evaluation.{key}=16" for key in ("final_prompts", "prompts", "ood_prompts")),
        f"evaluation.every={steps}",
    ]


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "BATCH", 16)
        yield


@pytest.mark.parametrize("name", TASK_NAMES)
def test_task_begins(name: str, tmp_path: Path) -> None:
    """The start of its warm start learns the form of its answers; its config trains on them."""
    sets = [*short(tmp_path, 3), "learner.groups=4"]
    config = load.load(ROOT / "configs" / f"{name}.toml", sets)
    began = warm_start.warm_start(config, tmp_path / "model", steps=40, threads=1)
    random_letters = math.log(len(TASKS[name].symbols))
    assert began["task"] == name and began["loss"] < random_letters
    found = serial.run_serial(config, RUN_SEED)
    assert found["steps"] == 3 and len(found["accuracy"][1]) >= 2
    assert all(0 < r["answer/length"] <= 40 for r in found["curve"])
    assert max(int(lag) for lag in found["lag_histogram"]) <= config.staleness.max_lag
    if name == "rle":  # model and task alone: all else is the defaults' choice
        path = tmp_path / "bare.toml"
        path.write_text(f'model.path = "{tmp_path / "model"}"\ntask.name = "rle"\n')
        found = serial.run_serial(load.load(path, short(tmp_path, 6)), RUN_SEED)
        assert found["steps"] == 6 and max(int(lag) for lag in found["lag_histogram"]) == 2


def test_decoupled_makes_several_updates_with_weights(sort_model: Path) -> None:
    """Decoupled PPO: a clip on target / start that acts, and weights that are not all 1."""
    sets = [*short(sort_model.parent, 8), f"model.path={str(sort_model)!r}", "task.name='sort'"]
    sets += ["learner.groups=8", "learner.lr=0.003"]
    config = load.load(ROOT / "configs" / "decoupled.toml", sets)
    found = serial.run_serial(config, RUN_SEED)
    curve = found["curve"]
    assert len(curve) == 8 and all(r["optim/steps"] == 4 for r in curve)
    assert any(r["clip/share"] > 0 for r in curve)
    late = [r for r in curve if r["lag/mean"] > 0]
    assert len(late) > len(curve) / 2 and all(r["is/weight_ess"] < 1 for r in late)
    assert max(int(lag) for lag in found["lag_histogram"]) <= config.staleness.max_lag


def test_sessions_train(tmp_path: Path) -> None:
    """`calc` by its own config: gateway, environment, generator, buffer and learner as processes.

    A run of all 60 steps went from 0.43 to 0.92 (docs/log)."""
    sets = short(tmp_path, 3)
    config = load.load(ROOT / "configs" / "calc.toml", sets)
    warm_start.warm_start(config, tmp_path / "model", steps=120, threads=1)
    sets += ["name='calc'", f"seed={RUN_SEED}", "learner.groups=4", "record.samples=0"]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/calc.toml", "--json"]
    argv += [part for item in sets for part in ("--set", item)]
    run_command(argv, timeout=1800).check()
    summary = json.loads((tmp_path / "runs" / "calc" / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["lag"]["max"] <= 2
    samples = (tmp_path / "runs" / "calc" / "samples.jsonl").read_text().splitlines()
    calls = [json.loads(line)["calls"] for line in samples]
    assert max(calls) >= 2  # it calls the calculator and goes on
