"""Exact mode: operators whose result for a token depends on neither its neighbours nor the shape of
the batch (fp32, CPU).

The engine decodes one token of many answers at a time, the learner whole answers at once; libraries
pick other kernels, and other orders of summation, for other shapes.  Here both sides call the same
functions on the same fused weights, with tokens padded to a multiple of `ROWS` (one matrix kernel;
no scalar tail in a vectorised loop), keys at the column of their position, the key axis padded to a
multiple of `KEYS`, their values summed `BLOCK` at a time, at least `QUERIES` query rows, and at
least `COLUMNS` columns of logits.
Whether that is enough on a machine is what `asyncrl.supervise.exact_check` finds out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

ROWS = 16
KEYS = 16
BLOCK = 128  # MKL sums over 193 to 383 keys in two halves, so in another order for another width
QUERIES = 4
COLUMNS = 16
MASKED = -1e30


def up(n: int, to: int) -> int:
    """n rounded up to a multiple of `to`, at least `to`."""
    return max(to, -(-n // to) * to)


def pad_rows(x: torch.Tensor, to: int = ROWS) -> torch.Tensor:
    """x [n, ...] with rows of zeros below, up to a multiple of `to`."""
    extra = up(len(x), to) - len(x)
    return x if not extra else torch.cat([x, x.new_zeros(extra, *x.shape[1:])])


def times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w [n, out], w [in, out] with columns of zeros beside it where it has fewer than COLUMNS.

    For a narrower matrix (the head of a tiny vocabulary) a library may take another kernel, and
    another order of summation, for other n."""
    out = w.shape[1]
    return (
        x @ w
        if out >= COLUMNS
        else (x @ torch.cat([w, w.new_zeros(len(w), COLUMNS - out)], 1))[:, :out]
    )


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        r = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        n: torch.Tensor = x * r
        ctx.save_for_backward(n, r)
        return n

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        n, r = ctx.saved_tensors
        g = grads[0]
        return (g - n * (g * n).mean(-1, keepdim=True)) * r, None


def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square on the last axis."""
    return _Unit.apply(x, eps)  # type: ignore[no-any-return, no-untyped-call]


def fuse_layer(lay: Any, i: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of layer i as they are multiplied, [in, out]; norm weights are folded into the
    matrix that follows them.
    """
    p = f"model.layers.{i}."
    norm1 = weights[p + "input_layernorm.weight"]
    norm2 = weights[p + "post_attention_layernorm.weight"]
    qkv = torch.cat([weights[f"{p}self_attn.{n}_proj.weight"] for n in "qkv"]) * norm1
    out = {
        "qkv": qkv.T,
        "o": weights[p + "self_attn.o_proj.weight"].T,
        "down": weights[p + "mlp.down_proj.weight"].T,
    }
    out["up"] = (
        torch.cat([weights[p + "mlp.gate_proj.weight"], weights[p + "mlp.up_proj.weight"]]) * norm2
    ).T
    if p + "self_attn.q_proj.bias" in weights:
        out["b"] = torch.cat([weights[f"{p}self_attn.{n}_proj.bias"] for n in "qkv"])
    if p + "self_attn.q_norm.weight" in weights:
        q = weights[p + "self_attn.q_norm.weight"]
        k = weights[p + "self_attn.k_norm.weight"]
        out["norm"] = torch.cat(
            [(q * lay.head_dim**-0.5).expand(lay.heads, -1), k.expand(lay.kv_heads, -1)]
        )
    return out


def fuse_top(weights: Mapping[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    """embed [V, H] and head [H, V], the last norm folded in."""
    embed = weights["model.embed_tokens.weight"]
    head = embed if tied else weights["lm_head.weight"]
    return {"embed": embed, "head": (head * weights["model.norm.weight"]).T}


def project(
    lay: Any, w: Mapping[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """q (scaled), k, v [n, heads, d] of one layer for the residual stream x [n, H]; cos, sin [n, 1,
    d]; n a multiple of ROWS.
    """
    h = unit(x, lay.eps)
    y = torch.addmm(w["b"], h, w["qkv"]) if "b" in w else h @ w["qkv"]
    y = y.view(len(x), lay.heads + 2 * lay.kv_heads, lay.head_dim)
    both = lay.heads + lay.kv_heads
    qk = y[:, :both].contiguous()
    v = y[:, both:]
    if "norm" in w:
        qk = unit(qk, lay.eps) * w["norm"]
    half = lay.head_dim // 2
    qk = qk * cos + torch.cat((-qk[..., half:], qk[..., :half]), -1) * sin
    q = qk[:, : lay.heads]
    k = qk[:, lay.heads :]
    return (q if "norm" in w else q * lay.head_dim**-0.5), k, v


def finish(
    lay: Any, w: Mapping[str, torch.Tensor], x: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """The rest of a layer: output projection and MLP.  n a multiple of ROWS."""
    x = x + attended @ w["o"]
    gate, up_ = (unit(x, lay.eps) @ w["up"]).chunk(2, -1)
    return x + (F.silu(gate.contiguous()) * up_) @ w["down"]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """q [B, h_kv, rows, d] (scaled, rows a multiple of QUERIES) over k, v [B * h_kv, W, d] (W a
    multiple of KEYS, column = position).

    bias: additive, broadcasts to [B, h_kv, rows, W].  Returns [B, h_kv, rows, d].
    """
    b, groups, rows, d = q.shape
    scores = torch.bmm(q.reshape(b * groups, rows, d), k.transpose(1, 2)).view(b, groups, rows, -1)
    p = torch.softmax(scores + bias, -1).view(b * groups, rows, -1)
    out = torch.bmm(p[..., :BLOCK], v[:, :BLOCK])
    for at in range(BLOCK, p.shape[-1], BLOCK):
        out = torch.baddbmm(out, p[..., at : at + BLOCK], v[:, at : at + BLOCK])
    return out.view(b, groups, rows, d)
