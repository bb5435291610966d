from pathlib import Path
from typing import Any

import learner_step_kit
import numpy as np
from models_kit import model_fixture
from trajectory_kit import trajectory

from asyncrl.contract.messages import Batch
from learner.step import LearnerCore

GROUPS, SIZE = 4, 4


model_dir = model_fixture("0123456789=:,#", layers=1)


def batch(number: int = 0) -> Batch:
    """The reward says whether the first token is below 8, so that a critic can know it from the
    second state on; every fifth is cut."""
    r = np.random.default_rng(0)
    samples = []
    for i in range(GROUPS * SIZE):
        n = int(r.integers(2, 10))
        prompt = np.random.default_rng(i // SIZE).integers(3, 13, 4)
        tokens = r.integers(3, 13, n)
        lp = -2.8 + 0.3 * r.standard_normal(n)
        fields = {"reward": float(tokens[0] < 8), "finish": "length" if i % 5 == 0 else "stop"}
        samples.append(trajectory((i // SIZE, i % SIZE, 0), prompt, tokens, lp, **fields))
    return Batch(
        1,
        number,
        samples,
        [0] * len(samples),
        [0] * len(samples),
        [[(0, s.length, 0)] for s in samples],
        {},
        GROUPS,
        {},
    )


def core(model_dir: Path, **sections: Any) -> LearnerCore:
    sections["learner"] = {"groups": GROUPS, "group_size": SIZE} | sections.get("learner", {})
    sections["correction"] = {"proximal": "behavior"} | sections.get("correction", {})
    return learner_step_kit.core(model_dir, **sections)


def gae(
    model_dir: Path, value: dict[str, Any] | None = None, lam: float = 0.95, **sections: Any
) -> LearnerCore:
    return core(model_dir, advantage={"name": "gae", "lam": lam}, value=value or {}, **sections)
