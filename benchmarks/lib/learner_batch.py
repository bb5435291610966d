"""The batch and the config that learner benchmarks share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.messages import Batch, Trajectory

GROUPS = 32
SIZE = 8
PROMPT = 12
MOST = 56
MEAN = 24


def batch(
    groups: int = GROUPS, size: int = SIZE, prompt_tokens: int = PROMPT, vocabulary: int = 23
) -> Batch:
    """Answers of 4 to 56 tokens, 24 in the mean; a run's batch of `sort` has 20 to 30 and is cut at
    56.
    """
    r = np.random.default_rng(0)
    samples = []
    for t in range(groups):
        prompt = r.integers(3, vocabulary, prompt_tokens).astype("<i4").tobytes()
        for s in range(size):
            n = int(np.clip(r.gamma(4.0, MEAN / 4.0), 4, MOST))
            tokens = r.integers(3, vocabulary, n).astype("<i4")
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
        groups,
        {},
    )


def config(path: Path, **sections: dict[str, object]) -> Config:
    """sections: in the place of these."""
    raw = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"name": "sort"},
        "learner": {"steps": 10**6, "lr": 0.0},
        "correction": {"proximal": "behavior"},
        "loss": {"surrogate": "ppo"},
    }
    return load.build(raw | sections)
