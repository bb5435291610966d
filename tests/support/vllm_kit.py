"""Helpers of the vllm tests that other test files use."""

from __future__ import annotations

import torch

from asyncrl.models import policy


def flat(model: policy.PolicyModel) -> dict[str, torch.Tensor]:
    """A model's weights as a generator pulls them: one buffer, and tensors that view it."""
    layout = policy.build_manifest(model)
    buffer = bytearray(policy.count_flat_bytes(layout))
    policy.write_flat(model, memoryview(buffer))
    return policy.read_flat(memoryview(buffer), layout)
