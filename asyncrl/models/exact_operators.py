"""Operators of exact mode: a token's result does not depend on the rest of the batch (fp32, CPU).

The engine decodes one token of many samples at a time, the learner computes whole samples at once,
and libraries choose other kernels, with other orders of summation, for other shapes. In exact mode
both sides call the same functions on the same fused weights:

- tokens are padded to a multiple of `ROWS`: one matrix kernel, no scalar tail in a vectorized loop;
- keys are in the column of their position, and the key axis is padded to a multiple of `KEYS`;
- values are summed `BLOCK` at a time;
- there are at least `QUERIES` query rows and `COLUMNS` columns of logits.

`asyncrl.supervise.exact_check` tests whether this is enough on a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, cat

from asyncrl.models import expert_layers

Weights = Mapping[str, Tensor]
ROWS = 16
KEYS = 16
BLOCK = 128  # MKL sums over 193 to 383 keys in two halves, in an order that depends on the width
QUERIES = 4
COLUMNS = 16
MASKED = -1e30


def round_up(n: int, multiple: int) -> int:
    """Round n up to a multiple of `multiple`, at least `multiple`."""
    return max(multiple, -(-n // multiple) * multiple)


def pad_rows(x: Tensor, rows: int = ROWS) -> Tensor:
    """Append rows of zeros to x [n, ...], up to a multiple of `rows`."""
    padding = round_up(len(x), rows) - len(x)
    return x if not padding else cat([x, x.new_zeros(padding, *x.shape[1:])])


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [n, in] @ w [in, out], with w padded to at least COLUMNS columns.

    For a narrower matrix (the head of a tiny vocabulary) a library may choose another kernel, with
    another order of summation, for other n.
    """
    width = w.shape[1]
    if width >= COLUMNS:
        return x @ w
    return (x @ cat([w, w.new_zeros(len(w), COLUMNS - width)], 1))[:, :width]


@cache
def _make_scalar(x: float, device: torch.device) -> Tensor:
    return torch.tensor(x, device=device)


def divide_by_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Divide x by its root mean square over the last axis; also return the reciprocal of that."""
    xf = x.float()
    norm = torch.linalg.vector_norm(xf, dim=-1, keepdim=True)
    scalar = _make_scalar(eps, x.device)
    r = torch.addcmul(scalar, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (xf * r).to(x.dtype), r


class _ExactNormalization(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        n, r = divide_by_rms(x, eps)
        ctx.save_for_backward(n, r)
        return n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        n, r = ctx.saved_tensors
        g = grads[0]
        return (g - n * (g * n).mean(-1, keepdim=True)) * r, None


# x divided by its root mean square over the last axis
normalize: Callable[[Tensor, float], Tensor] = _ExactNormalization.apply


class _ExactRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        return apply_rotation(x, turns)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return apply_rotation(grads[0].contiguous(), ctx.saved_tensors[0].conj()), None


def apply_rotation(x: Tensor, turns: Tensor) -> Tensor:
    """Turn x [n, heads, d], whose columns are in pairs (see `interleave_halves`)."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)


# `apply_rotation` with a gradient
rotate: Callable[[Tensor, Tensor], Tensor] = _ExactRotation.apply


class Operators(NamedTuple):
    """The operators of a forward pass that exact mode has of its own.

    rows: tokens are padded to a multiple of it.
    """

    normalize: Callable[[Tensor, float], Tensor]
    rotate: Callable[[Tensor, Any], Tensor]
    multiply: Callable[[Tensor, Tensor], Tensor]
    rows: int


EXACT = Operators(normalize, rotate, multiply, ROWS)
# without gradient, in any precision
PLAIN = Operators(lambda x, eps: divide_by_rms(x, eps)[0], apply_rotation, torch.matmul, 1)


def interleave_halves(lay: Any, fused: Weights) -> dict[str, Tensor]:
    """Reorder the columns of `fuse_layer` for rotation by one complex product.

    In each head of queries and keys, columns that rotary embedding combines become neighbors.
    Scores do not depend on the order of the columns.
    """
    device = fused["qkv"].device
    order = torch.arange(lay.head_dim, device=device).view(2, -1).T.flatten()
    rotated = lay.heads + lay.kv_heads
    columns = torch.arange((rotated + lay.kv_heads) * lay.head_dim, device=device)
    columns = columns.view(-1, lay.head_dim)
    columns[:rotated] = columns[:rotated, order]
    columns = columns.flatten()
    reordered = dict(fused) | {"qkv": fused["qkv"].T.index_select(0, columns).T}
    if "b" in fused:
        reordered["b"] = fused["b"].index_select(0, columns)
    if "norm" in fused:
        reordered["norm"] = fused["norm"].index_select(1, order)
    return reordered


def fuse_layer(lay: Any, i: int, weights: Weights) -> dict[str, Tensor]:
    """Return the matrices [in, out] of layer i, with norm weights folded into the next matrix.

    A sparse layer has a router, and `up` and `down` of all its experts [E, in, out].
    """
    p = f"model.layers.{i}."
    norm1 = weights[p + "input_layernorm.weight"]
    norm2 = weights[p + "post_attention_layernorm.weight"]
    qkv = cat([weights[f"{p}self_attn.{n}_proj.weight"] for n in "qkv"]) * norm1
    fused = {"qkv": qkv.T, "o": weights[p + "self_attn.o_proj.weight"].T}
    if p + "mlp.gate.weight" in weights:
        fused["router"] = (weights[p + "mlp.gate.weight"] * norm2).T
        fused["up"] = (weights[p + "mlp.experts.gate_up_proj"] * norm2).transpose(1, 2)
        fused["down"] = weights[p + "mlp.experts.down_proj"].transpose(1, 2)
    else:
        gate, up = (weights[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up"))
        fused["up"] = (cat([gate, up]) * norm2).T
        fused["down"] = weights[p + "mlp.down_proj.weight"].T
    if p + "self_attn.q_proj.bias" in weights:
        fused["b"] = cat([weights[f"{p}self_attn.{n}_proj.bias"] for n in "qkv"])
    if p + "self_attn.q_norm.weight" in weights:
        q = weights[p + "self_attn.q_norm.weight"]
        k = weights[p + "self_attn.k_norm.weight"]
        fused["norm"] = cat(
            [(q * lay.head_dim**-0.5).expand(lay.heads, -1), k.expand(lay.kv_heads, -1)]
        )
    return fused


def fuse_top(weights: Weights, tied: bool) -> dict[str, Tensor]:
    """Return embed [V, H] and head [H, V], with the last norm folded into the head."""
    embed = weights["model.embed_tokens.weight"]
    head = embed if tied else weights["lm_head.weight"]
    return {"embed": embed, "head": (head * weights["model.norm.weight"]).T}


def project(
    lay: Any,
    w: Weights,
    x: Tensor,
    turns: Any,
    operators: Operators = EXACT,
) -> tuple[Tensor, ...]:
    """Return q (scaled), k and v [n, heads, d] of one layer.

    w: the layer's `interleave_halves`
    x: [n, H], the residual stream; n is a multiple of ROWS
    turns: complex [n, d / 2]
    """
    h = operators.normalize(x, lay.eps)
    y = torch.addmm(w["b"], h, w["qkv"]) if "b" in w else h @ w["qkv"]
    y = y.view(len(x), lay.heads + 2 * lay.kv_heads, lay.head_dim)
    rotated_heads = lay.heads + lay.kv_heads
    qk = y[:, :rotated_heads]
    v = y[:, rotated_heads:]
    if "norm" in w:
        qk = operators.normalize(qk, lay.eps) * w["norm"]
    qk = operators.rotate(qk, turns)
    q = qk[:, : lay.heads]
    return (q if "norm" in w else q * lay.head_dim**-0.5), qk[:, lay.heads :], v


def finish(
    lay: Any,
    w: Weights,
    x: Tensor,
    attended: Tensor,
    replayed: Tensor | None = None,
    recorded: list[Tensor] | None = None,
    operators: Operators = EXACT,
) -> Tensor:
    """Apply the rest of a layer: output projection and MLP or experts.

    x, attended: [n, H]; n is a multiple of the operators' rows
    replayed, recorded: see `expert_layers.apply`
    """
    x = torch.addmm(x, attended, w["o"])
    h = operators.normalize(x, lay.eps)
    rows = operators.rows
    if "router" in w:
        weights = expert_layers.ExpertWeights(w["router"], w["up"], w["down"])
        logits = operators.multiply(h, weights.router)
        inputs = h, weights, lay.experts, replayed, recorded
        return x + expert_layers.apply(*inputs, logits=logits, rows=rows)
    gate, up = (h @ w["up"]).chunk(2, -1)
    inner = F.silu(gate.contiguous() if rows > 1 else gate)
    inner = inner * up if inner.requires_grad else inner.mul_(up)
    return torch.addmm(x, inner, w["down"])


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of q over k and v.

    q: [B, h_kv, rows, d], scaled
    k, v: [B * h_kv, W, d], column = position; W is a multiple of KEYS
    bias: added to the scores of the last columns, broadcasts to [B, h_kv, rows, columns]
    Returns [B, h_kv, rows, d].
    """
    b, groups, rows, d = q.shape
    queries = F.pad(q, (0, 0, 0, -rows % QUERIES)).reshape(b * groups, -1, d)
    scores = torch.bmm(queries, k.transpose(1, 2))
    scores.view(b, groups, -1, k.shape[1])[:, :, :rows, -bias.shape[-1] :].add_(bias)
    attended = sum_weighted_values(torch.softmax(scores, -1), v)
    return attended.view(b, groups, -1, d)[:, :, :rows]


def sum_weighted_values(shares: Tensor, v: Tensor) -> Tensor:
    """Sum v weighted by shares, BLOCK columns at a time.

    shares: [N, rows, W]
    v: [N, W, d]
    Returns [N, rows, d].
    """
    total = torch.bmm(shares[..., :BLOCK], v[:, :BLOCK])
    for start in range(BLOCK, shares.shape[-1], BLOCK):
        block = slice(start, start + BLOCK)
        total = torch.baddbmm(total, shares[..., block], v[:, block])
    return total
