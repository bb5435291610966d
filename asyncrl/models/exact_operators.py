"""Exact mode: operators whose result for a token depends on neither its neighbours nor the shape of
the batch (fp32, CPU).

The engine decodes one token of many answers at a time, the learner whole answers at once; libraries
pick other kernels, and other orders of summation, for other shapes.  Here both sides call the same
functions on the same fused weights, with tokens padded to a multiple of `ROWS` (one matrix kernel;
no scalar tail in a vectorised loop), keys at the column of their position, the key axis padded to a
multiple of `KEYS`, their values summed `BLOCK` at a time, at least `QUERIES` query rows, and at
least `COLUMNS` columns of logits.

Attention alone has two forms: the engine has one query a head (`attend_one`), and would have to pad
it to `QUERIES` rows; heads take these rows together instead, each among the others' zeros, which
change no bit of a sum that is made in order.
Whether that is enough on a machine is what `asyncrl.supervise.exact_check` finds out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

ROWS = 16
KEYS = 16
BLOCK = 128  # MKL sums over 193 to 383 keys in two halves, so in another order for another width
QUERIES = 4
COLUMNS = 16
MASKED = -1e30
TINY = 8  # columns of a head up to which a library may take another kernel for it alone


def round_up(n: int, to: int) -> int:
    """n rounded up to a multiple of `to`, at least `to`."""
    return max(to, -(-n // to) * to)


def pad_rows(x: torch.Tensor, to: int = ROWS) -> torch.Tensor:
    """x [n, ...] with rows of zeros below, up to a multiple of `to`."""
    extra = round_up(len(x), to) - len(x)
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


@cache
def _scalar(x: float) -> torch.Tensor:
    return torch.tensor(x)


class _ExactNormalization(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
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
    return _ExactNormalization.apply(x, eps)  # type: ignore[no-any-return, no-untyped-call]


class _ExactRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(turns)
        return _apply_rotation(x, turns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply_rotation(grads[0].contiguous(), ctx.saved_tensors[0].conj()), None


def _apply_rotation(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


def rotate_pairs(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [n, heads, d], whose columns are in pairs (`interleave_halves`), by
    the complex
    numbers turns [n, d / 2]."""
    return _ExactRotation.apply(x, turns)  # type: ignore[no-any-return, no-untyped-call]


def interleave_halves(lay: Any, fused: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `fuse_layer` gives, with the two halves that rotary embedding turns against each other
    side by side in every head of queries and keys, so that a turn is one product of complex
    numbers; their scores do not know the order of the columns."""
    device = fused["qkv"].device
    order = torch.arange(lay.head_dim, device=device).view(2, -1).T.flatten()
    turning = lay.heads + lay.kv_heads
    place = torch.arange((turning + lay.kv_heads) * lay.head_dim, device=device)
    place = place.view(-1, lay.head_dim)
    place[:turning] = place[:turning, order]
    place = place.flatten()
    out = dict(fused) | {"qkv": fused["qkv"].T.index_select(0, place).T}
    if "b" in fused:
        out["b"] = fused["b"].index_select(0, place)
    if "norm" in fused:
        out["norm"] = fused["norm"].index_select(1, order)
    return out


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
    lay: Any, w: Mapping[str, torch.Tensor], x: torch.Tensor, turns: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """q (scaled), k, v [n, heads, d] of one layer, w `interleave_halves`, for the residual stream
    x [n, H];
    turns: complex [n, d / 2]; n a multiple of ROWS.
    """
    h = unit(x, lay.eps)
    y = torch.addmm(w["b"], h, w["qkv"]) if "b" in w else h @ w["qkv"]
    y = y.view(len(x), lay.heads + 2 * lay.kv_heads, lay.head_dim)
    both = lay.heads + lay.kv_heads
    qk = y[:, :both]
    v = y[:, both:]
    if "norm" in w:
        qk = unit(qk, lay.eps) * w["norm"]
    qk = rotate_pairs(qk, turns)
    q = qk[:, : lay.heads]
    k = qk[:, lay.heads :]
    return (q if "norm" in w else q * lay.head_dim**-0.5), k, v


def finish(
    lay: Any, w: Mapping[str, torch.Tensor], x: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """The rest of a layer: output projection and MLP.  n a multiple of ROWS."""
    x = torch.addmm(x, attended, w["o"])
    gate, up_ = (unit(x, lay.eps) @ w["up"]).chunk(2, -1)
    inner = F.silu(gate.contiguous())
    inner = inner * up_ if inner.requires_grad else inner.mul_(up_)
    return torch.addmm(x, inner, w["down"])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """q [B, h_kv, rows, d] (scaled, rows a multiple of QUERIES) over k, v [B * h_kv, W, d] (W a
    multiple of KEYS, column = position).

    bias: additive, broadcasts to [B, h_kv, rows, the last columns]; the others are seen by all.
    Returns [B, h_kv, rows, d].
    """
    b, groups, rows, d = q.shape
    scores = torch.bmm(q.reshape(b * groups, rows, d), k.transpose(1, 2))
    scores.view(b, groups, rows, -1)[..., -bias.shape[-1] :].add_(bias)
    return weighted_values(torch.softmax(scores, -1), v).view(b, groups, rows, d)


def weighted_values(shares: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Sums of v [N, W, d] by shares [N, rows, W], as `attend` makes them: [N, rows, d]."""
    out = torch.bmm(shares[..., :BLOCK], v[:, :BLOCK])
    for at in range(BLOCK, shares.shape[-1], BLOCK):
        out = torch.baddbmm(out, shares[..., at : at + BLOCK], v[:, at : at + BLOCK])
    return out


def heads_per_product(lay: Any) -> int:
    """How many heads of keys lie side by side in the engine's cache, so that their queries take the
    rows of one product: as many as fit into those that the queries of one would be padded to.

    Sums are over `BLOCK` columns at most, as those of values are."""
    share = lay.heads // lay.kv_heads
    most = (
        min(round_up(share, QUERIES) // share, BLOCK // lay.head_dim) if lay.head_dim > TINY else 1
    )
    return max(g for g in range(1, max(1, most) + 1) if lay.kv_heads % g == 0)


def one_query_space(lay: Any, n: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros for `attend_one` over n tokens: [n, groups of heads, rows, columns of a group]."""
    g = heads_per_product(lay)
    rows = round_up(g * (lay.heads // lay.kv_heads), QUERIES)
    return like.new_zeros(n, lay.kv_heads // g, rows, g * lay.head_dim)


def attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, space: torch.Tensor
) -> torch.Tensor:
    """`attend` where each token is the one query of its keys: q [n, heads, d] (scaled) over k, v
    [n * groups, W, g * d], g heads side by side; bias broadcasts to [n, groups, rows, W].

    space: `one_query_space`, whose places for queries are written anew.  Returns [n, heads * d]."""
    n, heads, d = q.shape
    groups, wide = space.shape[1], space.shape[3]
    g = wide // d
    share = heads // (groups * g)
    _select_own_columns(space, g, share).copy_(
        q.view(n, groups, g, share, d).permute(0, 1, 3, 4, 2)
    )
    out = attend(space, k, v, bias)
    return _select_own_columns(out, g, share).permute(0, 1, 4, 2, 3).reshape(n, heads * d)


def _select_own_columns(x: torch.Tensor, g: int, share: int) -> torch.Tensor:
    """Of x [n, groups, rows, g * d], each head's rows in its own columns: [n, groups, share, d,
    g]."""
    n, groups, _, wide = x.shape
    return x[:, :, : g * share].view(n, groups, g, share, g, wide // g).diagonal(0, 2, 4)
