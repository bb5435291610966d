"""benchmarks/studies/mismatch_over_time.py: its arms, and what it reads of a curve."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_rivals_kit import program


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("mismatch_over_time", monkeypatch)


def curve(k3: list[float], entropy: list[float]) -> list[dict[str, float]]:
    early = [{"mismatch/k3_at_lag_0": 9.0, "policy/entropy": 0.1}] * 20  # left out
    return early + [
        {"mismatch/k3_at_lag_0": a, "policy/entropy": b} for a, b in zip(k3, entropy, strict=True)
    ]


def test_the_engines_differ_from_an_uncorrected_learner(bench: Any, tmp_path: Path) -> None:
    study = bench.plan(SimpleNamespace(quick=False, out=tmp_path, groups=4, steps=600, seeds=2))
    configs = {arm: study.cells.configs[names[1]] for arm, names in study.arms.items()}
    assert configs["bf16"].generator.dtype == "bfloat16"
    assert configs["fp8"].generator.quantize == "fp8"
    for config in configs.values():
        assert (config.staleness.limit, config.learner.steps, config.seed) == (0, 600, 1)
        assert (config.loss.surrogate, config.correction.level) == ("vanilla", "none")


def test_a_mismatch_that_follows_the_entropy_does_not_grow_late(bench: Any) -> None:
    entropy = [1.0 - i / 100 for i in range(80)]
    found = bench.over_time(curve([x / 10 for x in entropy], entropy), 20)
    assert found["rank_correlation"] == pytest.approx(1.0) and found["late_growth"] == 0
    assert found["late_growth_per_entropy"] == pytest.approx(0.0)
    assert found["k3_series"][0] == pytest.approx(sum(entropy[:20]) / 200)
    assert len(found["entropy_series"]) == 4


def test_late_growth_is_seen_over_the_seeds(bench: Any) -> None:
    flat = [1.0 + i * 1e-9 for i in range(80)]
    runs = [
        bench.over_time(curve([0.2] * 20 + [0.1] * 40 + [0.1 * late] * 20, flat), 20)
        for late in (1.9, 2.0, 2.1)
    ]
    told = bench.verdicts(runs)
    assert told["late_growth"][0] == pytest.approx(math.log(2.0), abs=0.01)
    assert told["grows_late"] and not told["falls_with_perplexity"]
    falling = [
        bench.over_time(curve([0.2] * 20 + [0.1] * 40 + [0.1 * late] * 20, flat), 20)
        for late in (1.0, 1.01)
    ]
    assert not bench.verdicts(falling)["grows_late"]
