"""A correction function that ends its learner on one batch, for test_set_aside.py."""

import os
from pathlib import Path
from typing import Any

import torch

VARIABLE = "DEADLY_MARK"
CALL = 4  # the batch of this call of the first life


def weight(log_rho: torch.Tensor, mask: Any, seq: torch.Tensor, n: int, correction: Any) -> Any:
    """No weights; a batch is known again by the lengths of its answers."""
    mark = Path(os.environ[VARIABLE])
    key = str(torch.bincount(seq).tolist())
    seen = mark.read_text().splitlines() if mark.exists() else []
    if len(seen) < CALL:
        with mark.open("a") as file:
            file.write(key + "\n")
        seen.append(key)
    if len(seen) == CALL and key == seen[-1]:
        os._exit(66)
    return torch.ones_like(log_rho)
