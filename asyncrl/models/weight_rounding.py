"""Weights rounded to int8 or fp8, in the engine and in the learner's forward pass.

Every row (output channel) of a linear layer has its own scale, so that its largest weight is the
largest number of the format. Embeddings, output head, norms, biases and activations keep their
data type. Both sides call `round_rows` on the same published numbers and get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.config.tree import Config
from asyncrl.models.policy import LazyWeights, PolicyModel, load_policy

# storage type and largest number of each format
FORMATS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def quantize_rows(weight: Tensor, number_format: str) -> tuple[Tensor, Tensor]:
    """Return the codes [out, in] in the format's storage type, and float32 scales [out, 1].

    Args:
        weight: [out, in].
        number_format: a key of `FORMATS`.
    """
    storage, largest = FORMATS[number_format]
    exact = weight.float()
    scales = exact.abs().amax(-1, keepdim=True).div_(largest)
    scales.clamp_(min=torch.finfo(torch.float32).tiny)  # a row of zeros
    codes = exact.div(scales).clamp_(-largest, largest)
    if storage == torch.int8:
        codes.round_()  # a cast alone would cut the fraction off
    return codes.to(storage), scales


def round_rows(weight: Tensor, number_format: str) -> Tensor:
    """Cast each row to the format and back.

    >>> round_rows(torch.tensor([[127.0, 1.4, -0.6]]), "int8").tolist()
    [[127.0, 1.0, -1.0]]
    >>> round_rows(torch.tensor([[448.0, 17.0, -1.07]]), "fp8").tolist()
    [[448.0, 16.0, -1.125]]
    """
    codes, scales = quantize_rows(weight, number_format)
    return codes.float().mul_(scales).to(weight.dtype)


def list_linear_layers(hf: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yield (name, module) of the linear layers, without the output head."""
    head = hf.get_output_embeddings()
    for name, module in hf.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            yield name, module


class WeightRounder:
    """Rounds the linear layers of a model's weights, given by name.

    Args:
        hf: the model whose layers the names belong to.
        number_format: a key of `FORMATS`.
    """

    def __init__(self, hf: Any, number_format: str) -> None:
        self.number_format = number_format
        self.names = frozenset(f"{name}.weight" for name, _ in list_linear_layers(hf))

    def __call__(self, weights: Mapping[str, Tensor]) -> LazyWeights:
        return LazyWeights(
            weights,
            lambda name, x: round_rows(x, self.number_format) if name in self.names else x,
        )


class _StraightThrough(torch.autograd.Function):
    """`round_rows`, whose gradient is that of the identity (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, number_format: str) -> Tensor:
        return round_rows(weight, number_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def share_rounding(model: PolicyModel, number_format: str) -> PolicyModel:
    """Let the linear layers of `model` multiply with rounded weights; returns `model`.

    The parameters keep their precision: they get the gradient at the rounded weights.
    """

    def forward(module: torch.nn.Linear, inputs: Tensor) -> Tensor:
        round_weight: Any = _StraightThrough.apply
        return F.linear(inputs, round_weight(module.weight, number_format), module.bias)

    for _, module in list_linear_layers(model.hf):
        module.forward = partial(forward, module)  # type: ignore[method-assign]
    return model


def load_learner_policy(
    path: str | Path, config: Config, *, device: str = "", with_modules: bool = False
) -> PolicyModel:
    """Load a policy of the learner, with the engine's rounding if `learner.shared_rounding`.

    device: instead of `model.device`.
    with_modules: see `load_policy`.
    """
    model = load_policy(
        path, config.model.dtype, device or config.model.device, with_modules=with_modules
    )
    if config.learner.shared_rounding:
        share_rounding(model, config.generator.quantize)
    return model
