"""Each built-in task learns, by its own config with fewer steps: warm start, then RL.

`sort` is the demo's task, and `gain` in test_run.py asserts its gain; `rle` is typed as a user would and runs as processes of its
own; the others run in one process, by turns, through the same store, engine, schedule and learner.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ENV, ROOT

from asyncrl import config_load
from asyncrl.compare import runner
from asyncrl.tasks.warm_start import warm_start

PROMPTS = 512
# Config, RL steps, least gain in held-out accuracy.  One answer a prompt: the standard error of a difference is at most 0.031.
CASES = [("cancel", 70, 0.08), ("dedup", 50, 0.10), ("grid", 50, 0.10), ("rlehack", 80, 0.06), ("rlenarrow", 40, 0.10)]


def short(directory: Path, steps: int) -> list[str]:
    return [f"model.path={str(directory / 'model')!r}", f"runs={str(directory / 'runs')!r}", f"learner.steps={steps}",
            f"evaluation.final_prompts={PROMPTS}", f"evaluation.prompts={PROMPTS}", f"evaluation.every={steps}",
            "evaluation.ood_prompts=128"]  # fmt: skip


def check(name: str, start: float, end: float, least: float, lag: dict[str, Any]) -> None:
    assert end - start >= least, f"{name}: held-out {start:.3f} -> {end:.3f}"
    assert lag["max"] <= lag["limit"]


@pytest.mark.parametrize(("name", "steps", "least"), CASES)
def test_task_learns(name: str, steps: int, least: float, tmp_path: Path) -> None:
    config = config_load.load(ROOT / "configs" / f"{name}.toml", short(tmp_path, steps))
    warm_start(config, tmp_path / "model")
    found = runner.one(config, config.seed)
    assert found["steps"] == steps
    accuracies = found["accuracy"][1]
    lags = [int(k) for k in found["lag_histogram"]]
    check(name, accuracies[0], accuracies[-1], least, {"max": max(lags), "limit": config.staleness.max_lag})


def test_a_task_learns_as_processes_of_its_own(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/rle.toml", "--json", *(x for s in short(tmp_path, 60) for x in ("--set", s))]
    done = subprocess.run(argv, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["steps"] == 60
    check("rle", summary["heldout_start"], summary["heldout_end"], 0.08, summary["lag"])
