"""Aggregate: the factor of each token, with global denominators, so that micro-batches and ranks
add up to one big batch.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.ratios import seq_sum, unknown

REDUCTIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def factors(
    counted: torch.Tensor, seq: torch.Tensor, n: int, how: str, length: float = 1.0
) -> torch.Tensor:
    """Factor [N] of each token in the mask `counted` bool [N], 0 elsewhere; the loss is sum(factor
    * per-token loss).

    token-mean 1/T (DAPO, arXiv 2503.14476) | seq-mean-token-sum 1/S | seq-mean-token-mean 1/(S T_i)
    (GRPO) | seq-mean-token-sum-norm 1/(S length) (Dr. GRPO, arXiv 2503.20783), with T the mask's
    tokens, T_i a sample's, S the samples that have any.  Raises ConfigError for another name."""
    tokens = seq_sum(counted.to(torch.float64), seq, n)
    samples = (tokens > 0).sum().clamp(min=1)
    one = torch.ones_like(tokens)
    by_name = {
        "token-mean": one / tokens.sum().clamp(min=1),
        "seq-mean-token-sum": one / samples,
        "seq-mean-token-mean": one / (samples * tokens.clamp(min=1)),
        "seq-mean-token-sum-norm": one / (samples * length),
    }
    if how not in by_name:
        raise unknown("loss.reduction", how, REDUCTIONS)
    return torch.where(counted, by_name[how][seq], 0.0)
