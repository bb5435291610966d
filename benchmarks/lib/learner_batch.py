"""The batch and the config that learner benchmarks share."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch, Trajectory

GROUPS = 32
SIZE = 8
PROMPT = 12
MOST = 56
MEAN = 24


def batch() -> Batch:
    """Answers of 4 to 56 tokens, 24 in the mean; a run's batch of `sort` has 20 to 30 and is cut at
    56.
    """
    r = np.random.default_rng(0)
    samples = []
    for t in range(GROUPS):
        prompt = r.integers(3, 23, PROMPT).astype("<i4").tobytes()
        for s in range(SIZE):
            n = int(np.clip(r.gamma(4.0, MEAN / 4.0), 4, MOST))
            tokens = r.integers(3, 23, n).astype("<i4")
            lp = (-3.1 + 0.1 * r.standard_normal(n)).astype("<f4")
            samples.append(
                Trajectory(
                    t,
                    s,
                    1,
                    prompt,
                    tokens.tobytes(),
                    lp.tobytes(),
                    bytes([1] * n),
                    [],
                    float(r.random() < 0.4),
                    {},
                    "stop",
                    1.0,
                )
            )
    return Batch(
        1,
        0,
        samples,
        [1] * len(samples),
        [0] * len(samples),
        [[(0, s.length, 1)] for s in samples],
        {},
        GROUPS,
        {},
    )


def config(path: Path) -> Config:
    raw = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"name": "sort"},
        "learner": {"steps": 10**6, "lr": 0.0},
        "correction": {"proximal": "behavior"},
        "loss": {"surrogate": "ppo"},
    }
    return msgspec.convert(raw, Config)
