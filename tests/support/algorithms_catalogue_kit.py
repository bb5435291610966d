"""Helpers of the algorithms_catalogue tests that other test files use."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from algorithms_kit import D

from asyncrl.algorithms.settings import Reshape


def vec(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=D)


def repaired(**keys: Any) -> Any:
    return msgspec.convert({"mode": "constant", "gamma": 0.5, **keys}, Reshape)
