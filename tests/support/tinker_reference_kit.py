"""The gradient of the learner's own loss, to compare with that of a server of the Tinker API."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.algorithms import loss as step_loss
from asyncrl.algorithms.batch import LossBatch
from asyncrl.config import load
from asyncrl.tinker.workers.trainer import TrainedModel

RAW = {"model": {"path": "x"}, "task": {"name": "client"}, "advantage": {"name": "rloo"}}


def learners_gradient(
    model: TrainedModel,
    prompt: Sequence[int],
    sequences: Sequence[tuple[Sequence[int], Sequence[float]]],
    advantages: Sequence[float],
    **loss: object,
) -> torch.Tensor:
    """The gradient of a sum over the tokens of (tokens, log-probabilities), with keys of [loss]."""
    config = load.build(RAW | {"loss": {"reduction": "token-mean", **loss}})
    tokens = [np.array(ids, np.int32) for ids, _ in sequences]
    lengths = torch.tensor([len(ids) for ids in tokens])
    seq = torch.repeat_interleave(torch.arange(len(tokens)), lengths)
    model.drop_gradient()
    lp = model.policy.logprobs(
        [np.array(prompt, np.int32)] * len(tokens), tokens, torch.ones(len(tokens))
    ).logprobs
    now = lp.detach().clone()
    behavior = torch.tensor([value for _, row in sequences for value in row])
    batch = LossBatch(
        seq=seq,
        behavior=behavior,
        mask=torch.ones_like(seq, dtype=torch.bool),
        token_lag=torch.ones_like(seq),
        rewards=torch.zeros(len(tokens)),
        groups=torch.zeros(len(tokens), dtype=torch.int64),
        truncated=torch.zeros(len(tokens), dtype=torch.bool),
        start=now,
        proximal=behavior,
    )
    prep = step_loss.prepare(batch, config, advantages=torch.tensor(advantages)[seq])
    step = step_loss.begin_step(prep, torch.arange(len(tokens)), now)
    value, _ = step_loss.compute_micro_loss(prep, step, torch.arange(len(seq)), lp)
    (value * len(seq)).backward()
    return torch.cat([weight.grad.flatten() for weight in model.trainer.parameters])
