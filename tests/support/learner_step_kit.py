from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from models_kit import model_fixture
from trajectory_kit import trajectory

from asyncrl.config import load
from asyncrl.contract.messages import Batch
from learner.step import LearnerCore

GROUPS, SIZE = 6, 3


model_dir = model_fixture("abcdefgh", layers=2)


def batch(number: int = 0, *, seed: int = 0, reward: float | None = None) -> Batch:
    """Answers of 1 to 12 tokens; behaviour log-probabilities near uniform over the ten symbols."""
    r = np.random.default_rng(seed)
    samples = []
    for t in range(GROUPS):
        prompt = r.integers(2, 8, 2 + t % 3)
        for s in range(SIZE):
            n = int(r.integers(1, 13))
            tokens = r.integers(2, 8, n)
            logprobs = -2.3 + 0.3 * r.standard_normal(n)
            value = float(r.random()) if reward is None else reward
            samples.append(trajectory((t, s, 0), prompt, tokens, logprobs, reward=value))
    runs = [[(0, s.length, int(r.integers(0, 4)))] for s in samples]
    return Batch(
        1, number, samples, [x[0][2] for x in runs], [0] * len(samples), runs, {}, GROUPS, {}
    )


ANCHORS: list[dict[str, Any]] = [
    {"correction": {"proximal": "behavior"}, "loss": {"surrogate": "ppo"}},
    {"correction": {"proximal": "interpolate", "preset": "tis"}},
    {"correction": {"proximal": "recompute", "preset": "tis"}},
]


def batch_with_parts(number: int) -> Batch:
    """Completions whose rewards have two parts, as gdpo needs; every fourth one is cut."""
    made = batch(number, seed=number)
    samples = [
        msgspec.structs.replace(
            sample,
            finish="length" if place % 4 == 0 else "stop",
            reward_parts={"length": float(place % 3), "right": sample.reward},
        )
        for place, sample in enumerate(made.samples)
    ]
    return msgspec.structs.replace(made, samples=samples)


def core(
    model_dir: Path, run_dir: Path | None = None, *, reference: Path | None = None, **sections: Any
) -> LearnerCore:
    learner = {
        **{"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.0, "steps": 100, "groups": GROUPS},
        **{"group_size": SIZE},
    } | sections.pop("learner", {})
    sections["correction"] = {"proximal": "recompute"} | sections.get("correction", {})
    model = {"path": str(model_dir), "device": "cpu"} | sections.pop("model", {})
    raw = {
        "model": model | ({"reference": str(reference)} if reference else {}),
        "task": {"name": "sort"},
        "learner": learner,
        **sections,
    }
    return LearnerCore(load.build(raw), model_dir, run_dir)


def weights(c: LearnerCore) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in c.model.hf.parameters()])
