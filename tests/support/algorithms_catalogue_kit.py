"""Helpers of the algorithms_catalogue tests that other test files use."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from algorithms_kit import D

from asyncrl.algorithms.settings import Reshape


def vec(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=D)


def yes(*x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.bool)


def k3(x: float) -> float:
    """Of x = log p - log q on samples of p."""
    return math.exp(-x) - 1 + x


def repaired(**keys: Any) -> Any:
    return msgspec.convert({"mode": "constant", "gamma": 0.5, **keys}, Reshape)
