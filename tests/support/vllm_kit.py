from pathlib import Path
from typing import Any

import torch

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.models import policy


def flat(model: policy.PolicyModel) -> dict[str, torch.Tensor]:
    """A model's weights as a generator pulls them: one buffer, and tensors that view it."""
    layout = policy.build_manifest(model)
    buffer = bytearray(policy.count_flat_bytes(layout))
    policy.write_flat(model, memoryview(buffer))
    return policy.read_flat(memoryview(buffer), layout)


def vllm_config(path: Path, sessions: bool = False, **generator: Any) -> Config:
    """A run's config for vLLM on a CPU: by default 8 rows of 64 tokens, with keys recomputed."""
    in_flight = generator.pop("in_flight", "recompute_kv")
    raw = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"name": "sort"},
        "weights": {"in_flight": in_flight},
        "generator": {"engine": "vllm", "slots": 8, "context": 64, "max_new_tokens": 12}
        | generator,
    }
    return load.build(raw | ({"agent": {"env": "x:y"}} if sessions else {}))
