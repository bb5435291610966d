import math
from typing import Any

import msgspec
import torch
from algorithms_kit import D

from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.settings import Reshape


def vec(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=D)


def answers(
    lengths: list[int],
    rewards: list[float],
    *,
    groups: list[int] | None = None,
    cut: list[int] = [],  # noqa: B006
    **more: Any,
) -> LossBatch:
    """Answers of these lengths, of one group; `cut`: the truncated ones.  `more`: any field."""
    n, total = len(lengths), sum(lengths)
    given = {
        "behavior": torch.full((total,), -1.0, dtype=D),
        "mask": torch.ones(total, dtype=torch.bool),
        "token_lag": torch.zeros(total, dtype=torch.long),
    }
    return LossBatch(
        seq=torch.repeat_interleave(torch.arange(n), torch.tensor(lengths)),
        rewards=vec(*rewards),
        groups=torch.tensor(groups or [0] * n),
        truncated=torch.tensor([i in cut for i in range(n)]),
        **given | more,
    )


def yes(*x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.bool)


def k3(x: float) -> float:
    """Of x = log p - log q on samples of p."""
    return math.exp(-x) - 1 + x


def repaired(**keys: Any) -> Any:
    return msgspec.convert({"mode": "constant", "gamma": 0.5, **keys}, Reshape)
