"""Token factors with global denominators: micro-batches and ranks add up to one batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.algorithms.ratios import choose_function, sum_by_sample

# loss.reduction -> the divisor of each sample's tokens. Its arguments are T_i [B], the tokens of
# the mask in each sample (T is their sum), S, the number of samples with any, and a fixed length
REDUCTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    # T (DAPO, arXiv 2503.14476)
    "token-mean": lambda tokens, samples, length: tokens.sum().clamp(min=1),
    # S
    "seq-mean-token-sum": lambda tokens, samples, length: samples,
    # S T_i (GRPO)
    "seq-mean-token-mean": lambda tokens, samples, length: samples * tokens.clamp(min=1),
    # S length (Dr. GRPO, arXiv 2503.20783)
    "seq-mean-token-sum-norm": lambda tokens, samples, length: samples * length,
}


def compute_factors(
    mask: Tensor, seq: Tensor, n: int, reduction: str, length: float = 1.0
) -> Tensor:
    """Return the factor [N] of each token of `mask` bool [N], 0 elsewhere.

    The loss is sum(factor * per-token loss). `reduction` is a name of REDUCTIONS. Raises
    ConfigError for an unknown name.
    """
    tokens = sum_by_sample(mask.to(torch.float64), seq, n)
    samples = (tokens > 0).sum().clamp(min=1)
    divisor = choose_function("loss.reduction", REDUCTIONS, reduction)(tokens, samples, length)
    return torch.where(mask, (torch.ones_like(tokens) / divisor)[seq], 0.0)
