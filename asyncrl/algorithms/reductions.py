"""Aggregate: the factor of each token, with global denominators, so that micro-batches and ranks
add up to one big batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.algorithms.ratios import choose_function, seq_sum


def token_mean(tokens: torch.Tensor, samples: torch.Tensor, length: float) -> torch.Tensor:
    """1/T (DAPO, arXiv 2503.14476)."""
    return torch.ones_like(tokens) / tokens.sum().clamp(min=1)


def token_sum(tokens: torch.Tensor, samples: torch.Tensor, length: float) -> torch.Tensor:
    """1/S."""
    return torch.ones_like(tokens) / samples


def sample_mean(tokens: torch.Tensor, samples: torch.Tensor, length: float) -> torch.Tensor:
    """1/(S T_i) (GRPO)."""
    return torch.ones_like(tokens) / (samples * tokens.clamp(min=1))


def token_sum_norm(tokens: torch.Tensor, samples: torch.Tensor, length: float) -> torch.Tensor:
    """1/(S length) (Dr. GRPO, arXiv 2503.20783)."""
    return torch.ones_like(tokens) / (samples * length)


# loss.reduction -> the factor [S] of each sample's tokens: of T_i [S], the mask's tokens of each
# sample (T their sum), S, the samples that have any, and a constant length
REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": token_sum,
    "seq-mean-token-mean": sample_mean,
    "seq-mean-token-sum-norm": token_sum_norm,
}


def factors(
    counted: torch.Tensor, seq: torch.Tensor, n: int, how: str, length: float = 1.0
) -> torch.Tensor:
    """Factor [N] of each token in the mask `counted` bool [N], 0 elsewhere, by `how`, a name of
    REDUCTIONS; the loss is sum(factor * per-token loss).  Raises ConfigError for another name."""
    tokens = seq_sum(counted.to(torch.float64), seq, n)
    samples = (tokens > 0).sum().clamp(min=1)
    by_sample = choose_function("loss.reduction", REDUCTIONS, how)(tokens, samples, length)
    return torch.where(counted, by_sample[seq], 0.0)
