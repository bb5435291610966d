from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.models.policy import build_model

FAMILIES = [
    ("qwen3", 4, True),
    ("qwen3", 2, False),
    ("llama", 2, True),
    ("qwen2", 4, False),
    ("mistral", 2, True),
]


def model_fixture(symbols: str, layers: int) -> Any:
    """A fixture: the directory of a small untrained model, made once a module."""

    @pytest.fixture(scope="module")
    def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("model") / "m"
        build_model(path, symbols, hidden=32, layers=layers)
        return path

    return model_dir


def sample_batch(vocab: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    r = np.random.default_rng(seed)
    prompts = [r.integers(3, vocab, n).astype(np.int32) for n in (5, 1, 7)]
    owner = [0, 0, 1, 2, 0, 2]
    responses = [r.integers(1, vocab, n).astype(np.int32) for n in (4, 1, 9, 2, 6, 1)]
    return [prompts[i] for i in owner], responses, owner
