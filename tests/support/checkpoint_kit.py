from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load
from asyncrl.models.policy import build_model
from learner.step import LearnerCore

EXTRA: dict[str, Any] = {
    "next_ticket": 6,
    "ledger": {"trained": {"tokens": 5.0}},
    "trained_above": [8],
    "parent": [1, 0],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "m"
    build_model(path, "abcdefgh", hidden=32, layers=1)
    return path


def core(model_dir: Path) -> LearnerCore:
    raw = {
        "model": {"path": str(model_dir), "device": "cpu"},
        "task": {"name": "sort"},
        "learner": {"lr": 0.01, "steps": 100},
    }
    return LearnerCore(load.build(raw), model_dir)
