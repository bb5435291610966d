from pathlib import Path
from typing import Any

from models_kit import model_fixture

from asyncrl.config import load
from learner.step import LearnerCore

EXTRA: dict[str, Any] = {
    "next_ticket": 6,
    "ledger": {"trained": {"tokens": 5.0}},
    "trained_above": [8],
    "parent": [1, 0],
}


model_dir = model_fixture("abcdefgh", layers=1)


def core(model_dir: Path) -> LearnerCore:
    raw = {
        "model": {"path": str(model_dir), "device": "cpu"},
        "task": {"name": "sort"},
        "learner": {"lr": 0.01, "steps": 100},
    }
    return LearnerCore(load.build(raw), model_dir)
