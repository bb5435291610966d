from __future__ import annotations

from typing import Any

import torch
from algorithms_catalogue_kit import answers
from algorithms_kit import D, config
from surrogate_kit import step_batch

from asyncrl.algorithms import surrogates
from asyncrl.algorithms.batch import LossBatch

MU = torch.tensor([0.5, 0.8, 0.4, 0.5, 0.4, 0.4], dtype=D)


W = torch.tensor([1.2, 0.5, 1.5, 0.8, 2.0, 0.25], dtype=D)


SEQ = torch.tensor([0, 0, 0, 1, 1, 1])


GROUP = torch.tensor([0, 0])


EVERY = torch.ones(6, dtype=torch.bool)


SIGN = torch.tensor([1, 1, 1, -1, -1, -1], dtype=D)


LP = (MU * W).log()


ANSWER = "seq-mean-token-mean"


def example() -> LossBatch:
    return answers([3, 3], [1, 0], behavior=MU.log(), proximal=MU.log())


X = LP - MU.log()


def trust(name: str, adv: torch.Tensor = SIGN, **keys: Any) -> surrogates.SurrogateTerm:
    """A surrogate on the example's tokens with these advantages [N]."""
    c = config(loss={"surrogate": name, **keys}, correction={"proximal": "behavior"})
    whole = step_batch(MU.log(), adv, EVERY, SEQ, GROUP, LP)
    prepass = surrogates.PREPASS.get(name, lambda *_: {})(whole, c.loss)
    tokens = surrogates.SurrogateTokens(X, adv, LP, MU.log(), EVERY, SEQ, 2, prepass=prepass)
    return surrogates.SURROGATES[name](tokens, c.loss)


def vcpo(**more: Any) -> dict[str, Any]:
    return {
        "loss": {"surrogate": "reinforce", "reduction": ANSWER},
        "correction": {"level": "sequence", "bound": "truncate", "hi": 8.0},
        **more,
    }
