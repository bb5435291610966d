"""kill -9 in real three-process runs: the program that benchmarks/kills.py runs with 24 kills, here
with four."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from process_kit import ROOT

pytestmark = pytest.mark.slow

sys.path.append(str(ROOT / "benchmarks"))  # last: benchmarks/learner.py must not hide the package


def test_killed_processes_cost_no_sample_and_train_none_twice(
    tmp_path: Path, sort_model: Path
) -> None:
    import kills

    found = kills.run(tmp_path, 4, 1, model=str(sort_model))
    assert found["wrong"] == []
    assert sum(found["kills"].values()) == 4 and any(
        k.startswith("learner") for k in found["kills"]
    ), found
