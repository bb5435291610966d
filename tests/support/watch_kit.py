"""A run directory as `asyncrl watch` finds it, and the page's routes over it."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asyncrl.config import load
from asyncrl.viewer.app import WatchApp

MARKUP = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\x1b[2J"


def metric_row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "t": step * 0.5, "reward/mean": 0.5 + step / 1000, **more}


def sample_row(batch: int, sample: int = 0, reward: float = 1.0, **more: Any) -> dict[str, Any]:
    """A row of token_samples.jsonl with three tokens, the last two sampled by a later version."""
    sequence = {
        "prompt": f"{MARKUP}12=",
        "pieces": ["1", MARKUP, "<eos>"],
        "tokens": [3, 4, 1],
        "versions": [["1.0", 0, 1], ["1.1", 1, 3]],
        "behavior": [-0.5, -0.25, -0.125],
        "start": [-0.25, -0.25, None],
        "target": [-0.25, 0.0, -0.5],
        "advantage": [0.5, 0.5, 0.5],
        "weight": [1.0, 0.0, 1.5],
        "lag": [2, 1, 1],
        "clip": [0, 1, 2],
        "mask": [1, 1, 0],
        "used": [1, 0, 0],
    }
    return {
        "batch": batch,
        "ticket": batch * 4,
        "sample": sample,
        "attempt": 1,
        "group_key": "sums",
        "rules": ["best"] if reward else ["worst"],
        "reward": reward,
        "parts": {MARKUP: 1.0},
        "finish": "stop",
        "calls": 0,
        "excluded": 0,
        "segments": [],
        "lag_mean": 4 / 3,
        "lag_max": 2,
        "length": 3,
        "group_rewards": [1.0, 0.0],
        "sequences": [sequence],
        **more,
    }


def write_lines(path: Path, rows: list[dict[str, Any]], end: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "first"
    (path / "logs" / "attempt_1").mkdir(parents=True)
    least = {"model": {"path": "m"}, "task": {"name": "sort"}}
    (path / "config.toml").write_text(load.dump(load.build(least)))
    (path / "run_id").write_text("abc")
    (path / "logs" / "attempt_1" / "learner.log").write_text(f"starting\n{MARKUP}\n")
    write_lines(path / "metrics.jsonl", [metric_row(step) for step in range(30)])
    write_lines(path / "token_samples.jsonl", [sample_row(n, n, float(n % 2)) for n in range(4)])
    write_lines(path / "trained.jsonl", [{"batch": n, "lags": {"0": 1, "2": 3}} for n in range(4)])
    return path


@pytest.fixture
def client(run_dir: Path) -> TestClient:
    return TestClient(WatchApp([run_dir.parent]).build_application())
