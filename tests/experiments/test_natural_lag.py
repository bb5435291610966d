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


@pytest.mark.parametrize("part", ["limits", "methods"])
def test_the_program_runs_its_arms(
    bench: Any,
    part: str,
    sort_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other one; test_bench_configs.py loads the configs of all, those of other parts too."""
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
        assert about["lost"] == 0 or about["lag_largest"] <= 16, arm
