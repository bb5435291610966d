"""What the pictures of runs in docs/img are drawn from: excerpts of a run's own records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from lib import run_pictures, timelines  # noqa: E402

BATCHES, SIZE = 20, 4


def write_lines(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Batch n begins at second n, three of its samples end at n + 0.3, and it trains at n + 1.

    One sample is evaluated at the start, and one at the end."""
    generator: list[Any] = [["prefill", -1.0, -0.9, 1], ["decode", -0.9, -0.5, 1, 8]]
    for n in range(BATCHES):
        generator += [
            ["weights", n - 0.05, n - 0.01],
            ["prefill", n, n + 0.1, SIZE],
            ["decode", n + 0.1, n + 0.3, SIZE, 8],
            ["decode", n + 0.3, n + 0.6, 1, 8],
        ]
    generator += [["prefill", BATCHES, BATCHES + 0.1, 1], ["decode", BATCHES, BATCHES + 0.3, 1, 8]]
    learner = []
    for n in range(BATCHES):
        learner += [["train", n + 1, n + 1.5, 40], ["publish", n + 1.5, n + 1.6]]
    write_lines(tmp_path / "trace" / "generator-0.jsonl", generator)
    write_lines(tmp_path / "trace" / "learner.jsonl", learner)
    write_lines(
        tmp_path / "trained.jsonl", [{"batch": n, "lags": {"1": 40}} for n in range(BATCHES)]
    )
    return tmp_path


def test_the_queue_counts_the_samples_that_began_and_ended(run_dir: Path) -> None:
    part = timelines.excerpt(run_dir, SIZE, evaluated=1)
    first = BATCHES // 2
    assert part["queue"]["batch_size"] == SIZE
    by_second = {second: (begun, ended) for second, begun, ended in part["queue"]["samples"]}
    start = first - 3 + 1  # of the first batch that trains in the excerpt
    for batch in range(first - 2, first + timelines.BATCHES):
        begun = (batch + 1) * SIZE
        assert by_second[round(batch + 0.1 - start, 4)] == (begun, begun - SIZE)
        assert by_second[round(batch + 0.3 - start, 4)] == (begun, begun - 1)


def test_samples_that_nobody_counted_are_refused(run_dir: Path) -> None:
    with pytest.raises(SystemExit, match="samples began, not those of 20 batches"):
        timelines.excerpt(run_dir, SIZE, evaluated=0)


def test_the_ledger_has_the_lines_with_tokens_after_each_batch(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "t": 1.0, "ledger/trained": 10, "ledger/left_over": 5},
        {"step": 1, "t": 2.5, "ledger/trained": 30, "ledger/dropped_stale": 4},
        {"step": 1, "t": 2.6, "eval/heldout": 0.5},
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert run_pictures.ledger_excerpt(tmp_path) == {
        "seconds": [1.0, 2.5],
        "lines": {"trained": [10, 30], "dropped_stale": [0, 4], "left_over": [5, 0]},
    }


def test_accuracy_is_at_the_second_of_its_version(tmp_path: Path) -> None:
    """An evaluation ends later than the version that it measures begins."""
    rows = [
        {"step": 0, "t": 3.0, "eval/heldout": 0.25},
        {"step": 0, "t": 4.0, "reward/mean": 0.2},
        {"step": 1, "t": 6.0, "reward/mean": 0.3},
        {"step": 1, "t": 9.0, "eval/heldout": 0.5},
        {"step": 2, "t": 11.0, "eval/heldout": 0.75},
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert run_pictures.accuracy_curve(tmp_path) == [[0.0, 0.25], [4.0, 0.5], [6.0, 0.75]]
