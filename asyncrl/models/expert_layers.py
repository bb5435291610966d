"""The sparse layers of the packed forward and of the embedded engine.

A router gives each token the k experts with the largest probabilities; the layer's output is the
sum of their outputs, weighted by these probabilities. Tokens are sorted by expert, so that each
expert is one matrix product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8  # a width of the experts is a multiple of it: torch's grouped product needs 16 bytes


class ExpertSettings(NamedTuple):
    """How the routers of a model choose.

    normalize: the probabilities of the chosen experts are divided by their sum.
    """

    number: int
    chosen: int
    normalize: bool


class ExpertWeights(NamedTuple):
    """The weights of one sparse layer with E experts.

    router: [H, E]
    up: [E, H, 2 I], gate and up projection side by side
    down: [E, I, H]
    """

    router: Tensor
    up: Tensor
    down: Tensor


def read_settings(config: Any) -> ExpertSettings | None:
    """Return how the routers of a Qwen3-MoE or Mixtral choose; None for another model.

    Returns None too for experts of widths that torch's grouped product does not support.
    """
    if config.model_type == "mixtral":
        count, width, normalize = config.num_local_experts, config.intermediate_size, True
    elif config.model_type == "qwen3_moe":
        count, width = config.num_experts, config.moe_intermediate_size
        normalize = bool(config.norm_topk_prob)
    else:
        return None
    if width % ALIGNED or config.hidden_size % ALIGNED:
        return None
    return ExpertSettings(int(count), int(config.num_experts_per_tok), normalize)


def is_sparse(layer: Any) -> bool:
    """Return whether a transformers layer has experts."""
    return hasattr(layer.mlp, "experts")


def route(
    logits: Tensor, settings: ExpertSettings, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token; return their shares fp32 [n, k] and ids [n, k].

    logits: [n, E] of the router
    replayed: int64 [n, k], experts to use instead; E: the router's own choice. Their shares are
        this router's probabilities, so that it gets a gradient either way.
    """
    probabilities = torch.softmax(logits.float(), -1)
    shares, ids = torch.topk(probabilities, settings.chosen, -1)
    if replayed is not None:
        ids = torch.where(replayed < settings.number, replayed, ids)
        shares = probabilities.gather(1, ids)
    if settings.normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, ids


def apply(
    states: Tensor,
    weights: ExpertWeights,
    settings: ExpertSettings,
    replayed: Tensor | None = None,
    recorded: list[Tensor] | None = None,
    logits: Tensor | None = None,
    rows: int = 1,
) -> Tensor:
    """Compute a sparse layer's output for normed states [n, H].

    replayed: see `route`
    recorded: the ids used [n, k] are appended to it
    logits: [n, E] of the router, if the caller computed them
    rows: each expert's tokens are padded to a multiple of it
    """
    scores = states @ weights.router if logits is None else logits
    shares, ids = route(scores, settings, replayed)
    if recorded is not None:
        recorded.append(ids)
    # sort the choices [n, k] by expert
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(weights.up))
    padded = (counts + rows - 1) // rows * rows
    ends = padded.cumsum(0)  # of each expert's rows
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    expert = flat.index_select(0, order)
    row = torch.arange(len(flat), device=flat.device) + shift.index_select(0, expert)
    size = len(flat) if rows == 1 else int(ends[-1])
    source = torch.zeros(size, dtype=torch.long, device=flat.device)  # token of each sorted row
    source[row] = order // ids.shape[1]
    slots = torch.empty_like(flat)  # sorted row of each choice
    slots[order] = row
    offs = ends.to(torch.int32)
    inner = F.grouped_mm(states.index_select(0, source), weights.up, offs=offs)
    gate, up = inner.chunk(2, -1)
    output = F.grouped_mm(F.silu(gate.contiguous()) * up, weights.down, offs=offs)
    # the weighted sum of the outputs of each token's experts
    by_choice = output.index_select(0, slots).view(*ids.shape, -1).float()
    total = by_choice[:, 0] * shares[:, :1]
    for choice in range(1, ids.shape[1]):
        total = total + by_choice[:, choice] * shares[:, choice : choice + 1]
    return total.to(states.dtype)


def divide_by_layer(ids: np.ndarray, device: torch.device) -> Tensor:
    """Return ids [n, layers, k] of tokens as int64 [layers, n, k] on a device."""
    return torch.from_numpy(np.ascontiguousarray(ids.transpose(1, 0, 2), np.int64)).to(device)
