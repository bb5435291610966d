from __future__ import annotations

import numpy as np

FAMILIES = [
    ("qwen3", 4, True),
    ("qwen3", 2, False),
    ("llama", 2, True),
    ("qwen2", 4, False),
    ("mistral", 2, True),
]


def sample_batch(vocab: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    r = np.random.default_rng(seed)
    prompts = [r.integers(3, vocab, n).astype(np.int32) for n in (5, 1, 7)]
    owner = [0, 0, 1, 2, 0, 2]
    responses = [r.integers(1, vocab, n).astype(np.int32) for n in (4, 1, 9, 2, 6, 1)]
    return [prompts[i] for i in owner], responses, owner
