"""Attention over packed tokens: prompts attend to themselves, responses to their prompt too.

Long rows use flash attention, which stores no probabilities. All others are padded into rows here,
and only here. Their backward pass is written by hand in the layout of the forward pass: autograd's,
with its copies, takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, bmm, cat

from asyncrl.models import exact_operators

aten: Any = torch.ops.aten
cpu_flash = aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
UNCUT = {"cpu": 64}  # prompts behind a prefix of up to so many tokens are one block
UNCUT_ELSEWHERE = 256  # larger on a GPU, where each block costs several kernel launches
MOST_CUTS = 32  # blocks of a row, where they fit into SCORES
ROWS_UP_TO = 64  # tokens of a row on a CPU; longer ones use flash attention


class FlashCall(NamedTuple):
    """The sequences of one flash call, the same number of queries' and keys' ones."""

    queries: Tensor  # int32 [S + 1], where each one begins, then the end
    keys: Tensor  # int32 [S + 1]
    longest_query: int  # tokens
    longest_key: int
    causal: bool


@dataclass(frozen=True)
class PackedSequences:
    """The calls of flash attention over packed tokens, of which none is padded or copied.

    The responses of a prompt follow each other, so that their queries are one sequence.
    """

    own: FlashCall  # each prompt and each response over itself
    over_prompts: FlashCall | None  # all responses of a prompt over it; None: all have one token
    prompt_tokens: int


@dataclass(frozen=True)
class AttentionSide:
    """B rows of Q queries over K keys, of h query heads and h_kv key heads."""

    shape: tuple[int, int, int]  # B, Q, K
    queries: Tensor  # [B * h * Q], among the packed tokens' heads; padding: any
    keys: Tensor  # [B * h_kv * K], among the packed tokens' heads; padding: any
    back: Tensor  # [n * h], each packed query's index in [B, h, Q]
    bias: Tensor  # [B or 1, 1, Q, K], added to the scores
    key_back: Tensor  # [n * h_kv], each packed key's index in [B, h_kv, K]
    owner: Tensor | None  # [B], the prompt of each response; None: a side of prompts

    @classmethod
    def build(
        cls,
        tables: Sequence[Tensor],
        positions: Sequence[Tensor],
        heads: tuple[int, int],
        owner: Tensor | None = None,
    ) -> AttentionSide:
        """Build the side of rows whose queries see the keys up to their own position.

        tables: of queries [B, Q] and keys [B, K] among the packed tokens, padding: 0; and of the
            packed tokens in [B * Q] and [B * K]
        positions: of queries [B or 1, Q] and of keys [B or 1, K] in their sequences
        heads: h and h_kv
        """
        rows, keys, flat, key_flat = tables
        of_queries, of_keys = positions
        visible = of_keys[:, None, None] <= of_queries[:, None, :, None]
        return cls(
            (len(rows), rows.shape[1], keys.shape[1]),
            _index_by_head(rows, heads[0]),
            _index_by_head(keys, heads[1]),
            _index_by_position(flat, rows.shape[1], heads[0]),
            torch.where(visible, 0.0, exact_operators.MASKED),
            key_back=_index_by_position(key_flat, keys.shape[1], heads[1]),
            owner=owner,
        )


@dataclass(frozen=True)
class AttentionRows:
    """All attention calls of a layer over padded rows."""

    # prompts over themselves, then responses of similar length over their prompt and themselves
    sides: list[AttentionSide]
    exact: bool  # use the operators of exact mode, where queries are already scaled


@dataclass(frozen=True)
class PackingPlan:
    """The packing of a micro-batch.

    The n packed tokens are the unique prompts, then each response without its last token, in the
    order `order`. N is the number of response tokens.
    """

    ids: Tensor  # [n]
    positions: Tensor  # [n]
    attention: AttentionRows | PackedSequences
    picks: Tensor  # [N], packed token whose state predicts each response token
    targets: Tensor  # [N], response tokens
    sample: Tensor  # [N], sample of each response token
    first: list[int]  # a sample of each unique prompt
    order: list[int]  # the samples in the order of their responses


def cut_queries(width: int, most: int, device: str) -> list[slice]:
    """Cut rows of `width` queries into blocks, which begin at multiples of `exact_operators.KEYS`.

    most: queries in a block, rounded down to such a multiple (at least one).
    """
    uncut = UNCUT.get(device, UNCUT_ELSEWHERE)
    if width <= min(uncut, most):
        return [slice(0, width)]
    even = -(-width // min(MOST_CUTS, -(-width // uncut)))
    step = min(
        exact_operators.round_up(count, exact_operators.KEYS)
        for count in (even, most - exact_operators.KEYS + 1)
    )
    return [slice(start, min(start + step, width)) for start in range(0, width, step)]


def _index_by_head(table: Tensor, heads: int) -> Tensor:
    """Index [B * heads * width] of the heads of packed tokens `table` [B, width], head by head."""
    head = torch.arange(heads, device=table.device)[None, :, None]
    return (table[:, None] * heads + head).flatten()


def _index_by_position(flat: Tensor, width: int, heads: int) -> Tensor:
    """Index [n * heads] in [B, heads, width] of the entries `flat` [n] of [B, width].

    The heads of a packed token are consecutive.
    """
    row, column = flat // max(width, 1), flat % max(width, 1)
    head = torch.arange(heads, device=flat.device)
    return ((row[:, None] * heads + head) * width + column[:, None]).flatten()


def has_gpu_kernel(like: Tensor, head_dim: int) -> bool:
    """Return whether torch's flash kernel computes with tensors like this one on its GPU."""
    is_fitting = like.dtype == torch.bfloat16 and head_dim in range(8, 257, 8)
    has_cuda = like.device.type != "cpu" and is_fitting
    return has_cuda and torch.cuda.get_device_capability(like.device) >= (8, 0)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, rows: AttentionRows | PackedSequences) -> Tensor:
    """Attention of packed tokens, prompts first, differentiable.

    q: [n, h, d]
    k, v: [n, h_kv, d]
    Returns [n, h * d].
    """
    function: Any = _FlashAttention if isinstance(rows, PackedSequences) else _Attention
    attended: Tensor = function.apply(q, k, v, rows)
    return attended


class _FlashAttention(torch.autograd.Function):
    """Attention that stores no probabilities: its memory is linear in the number of tokens.

    A response's attention over its prompt and that over itself are two calls, which the sums of
    their exponentials join. With the joint sums, the backward pass of each call gives its share of
    the gradients.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: PackedSequences) -> Tensor:
        attended, logsumexp = _attend_flash(q, k, v, rows.own)
        start = rows.prompt_tokens
        if rows.over_prompts is not None:
            other, to_prompt = _attend_flash(q[start:], k[:start], v[:start], rows.over_prompts)
            total = torch.logaddexp(logsumexp[:, start:], to_prompt)
            own_share, prompt_share = (
                (part - total).exp().T[..., None] for part in (logsumexp[:, start:], to_prompt)
            )
            attended[start:] = attended[start:] * own_share + other * prompt_share
            logsumexp[:, start:] = total
        ctx.rows = rows
        ctx.save_for_backward(q, k, v, attended, logsumexp)
        return attended.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, attended, logsumexp = ctx.saved_tensors
        rows: PackedSequences = ctx.rows
        start = rows.prompt_tokens
        grad = grads[0].reshape(q.shape)
        to_q, to_k, to_v = _backpropagate_flash(grad, q, k, v, attended, logsumexp, call=rows.own)
        if rows.over_prompts is not None:
            tensors = grad[start:], q[start:], k[:start], v[:start], attended[start:]
            sums = logsumexp[:, start:].contiguous()
            more = _backpropagate_flash(*tensors, sums, call=rows.over_prompts)
            to_q[start:] += more[0]
            to_k[:start] += more[1]
            to_v[:start] += more[2]
        return to_q, to_k, to_v, None


def _attend_flash(q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
    """Return the attended [n, h, d], and the logarithm of each sum of exponentials, fp32 [h, n]."""
    if q.device.type != "cpu":
        bounds = *call[:4], 0.0, call.causal, False
        attended, logsumexp, *_ = aten._flash_attention_forward(q, k, v, *bounds)
        return attended, logsumexp
    attended, logsumexp = torch.empty_like(q), q.new_empty(q.shape[1::-1], dtype=torch.float32)
    views = [
        _view_by_key_head(x, k.shape[1], len(logsumexp) // k.shape[1]) for x in (q, k, v, attended)
    ]
    sums = logsumexp.view(*views[0].shape[:3])
    for queries, keys in _list_sequences(call):
        views[3][:, :, queries], sums[:, :, queries] = cpu_flash(
            views[0][:, :, queries], views[1][:, :, keys], views[2][:, :, keys], 0.0, call.causal
        )
    return attended, logsumexp


def _backpropagate_flash(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Tensor,
    logsumexp: Tensor,
    *,
    call: FlashCall,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v by the keys of a call.

    attended, logsumexp: over all keys that the queries see, also those of other calls.
    """
    tensors = grad, q, k, v, attended
    if q.device.type != "cpu":
        unused = q.new_empty(2, dtype=torch.uint64)  # the state of dropout's random numbers
        bounds = *call[:4], 0.0, call.causal
        gradients: tuple[Tensor, ...] = aten._flash_attention_backward(
            *tensors, logsumexp, *bounds, unused, unused
        )
        return gradients
    results = [torch.zeros_like(x) for x in (q, k, v)]
    of_queries, of_keys, of_values = (_view_by_key_head(x, k.shape[1]) for x in results)
    views = [_view_by_key_head(x, k.shape[1], len(logsumexp) // k.shape[1]) for x in tensors]
    sums = logsumexp.view(*views[0].shape[:3])
    for queries, keys in _list_sequences(call):
        parts = [
            view[:, :, part]
            for view, part in zip(views, (queries, queries, keys, keys, queries), strict=True)
        ]
        of_queries[:, :, queries], to_keys, to_values = cpu_flash_backward(
            *parts, sums[:, :, queries], 0.0, call.causal
        )
        of_keys[:, :, keys] = to_keys.sum(1, keepdim=True)
        of_values[:, :, keys] = to_values.sum(1, keepdim=True)
    return tuple(results)


def _view_by_key_head(x: Tensor, kv_heads: int, repeats: int = 1) -> Tensor:
    """View x [n, heads, d] as [h_kv, heads / h_kv, n, d]; repeats: of keys, without a copy."""
    by_head = x.view(len(x), kv_heads, -1, x.shape[2]).permute(1, 2, 0, 3)
    return by_head.expand(-1, max(repeats, by_head.shape[1]), -1, -1)


def _list_sequences(call: FlashCall) -> list[tuple[slice, slice]]:
    """Return the queries and keys of each sequence that has queries."""
    bounds = zip(pairwise(call.queries.tolist()), pairwise(call.keys.tolist()), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in bounds if queries[0] < queries[1]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: AttentionRows) -> Tensor:
        dim = q.shape[2]
        by_head = q.reshape(-1, dim), k.reshape(-1, dim), v.reshape(-1, dim)
        ctx.rows, ctx.scale = rows, 1.0 if rows.exact else dim**-0.5
        ctx.shapes = q.shape, k.shape, v.shape
        saved: list[Tensor] = []  # of each side: queries, keys, values, shares
        parts = []
        for side in rows.sides:
            columns = side.shape[2]
            groups = len(side.keys) // max(columns, 1)
            # query heads that share a key head are handled as further queries of it
            queries = by_head[0].index_select(0, side.queries).view(groups, -1, dim)
            keys, values = (
                x.index_select(0, side.keys).view(groups, columns, dim) for x in by_head[1:]
            )
            if not rows.exact:  # there queries are already scaled
                queries.mul_(ctx.scale)
            scores = bmm(queries, keys.transpose(1, 2)).float()
            scores.view(side.shape[0], -1, *side.shape[1:]).add_(side.bias)
            shares = torch.softmax(scores, -1).to(queries.dtype)  # [B * h_kv, queries, keys]
            multiply = exact_operators.sum_weighted_values if rows.exact else bmm
            parts.append(multiply(shares, values).view(-1, dim).index_select(0, side.back))
            saved += [queries, keys, values, shares]
        ctx.save_for_backward(*saved)
        return _pad_rows(cat(parts), len(q), q.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows: AttentionRows = ctx.rows
        saved = ctx.saved_tensors
        dim = saved[0].shape[2]
        lengths = [len(side.back) for side in rows.sides]
        grad = torch.split(grads[0].reshape(-1, dim)[: sum(lengths)], lengths)
        to_q, to_k, to_v = [], [], []  # of keys and values in the layout of the rows
        for at, (side, of_side) in enumerate(zip(rows.sides, grad, strict=True)):
            queries, keys, values, shares = saved[4 * at : 4 * at + 4]
            # padded queries have no gradient, and add none to keys
            padded = torch.zeros_like(queries)
            padded.view(-1, dim).index_copy_(0, side.back, of_side)
            to_v.append(bmm(shares.transpose(1, 2), padded))
            of_shares = bmm(padded, values.transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
            of_queries = bmm(of_scores, keys).view(-1, dim).index_select(0, side.back)
            to_q.append(of_queries.mul_(ctx.scale))
            to_k.append(bmm(of_scores.transpose(1, 2), queries))
        gradients = cat(to_q), _sum_key_gradients(rows, to_k), _sum_key_gradients(rows, to_v)
        pairs = zip(gradients, ctx.shapes, strict=True)
        q, k, v = (_pad_rows(x, *shape[:2]).view(shape) for x, shape in pairs)
        return q, k, v, None


def _pad_rows(x: Tensor, n: int, heads: int) -> Tensor:
    """Reshape x [m * heads, d] to [n, heads * d], n >= m, with zeros in the rows after m.

    Exact mode pads the packed tokens.
    """
    if extra := n * heads - len(x):
        x = cat([x, x.new_zeros(extra, x.shape[1])])
    return x.view(n, -1)


def _sum_key_gradients(rows: AttentionRows, sides: list[Tensor]) -> Tensor:
    """Gradient [n * h_kv, d] of the packed keys (or values) from those of each side's rows.

    A prompt's gradient includes the sum over its responses.
    """
    count, _, width = rows.sides[0].shape
    dim = sides[0].shape[2]
    of_prompts = sides[0].view(count, -1, width, dim)
    for side, grad in zip(rows.sides, sides, strict=True):
        if side.owner is not None:
            # after a shorter prompt the columns hold the response's own keys; the sum of these
            # columns belongs to padding and is not read
            shared = grad.view(len(side.owner), -1, grad.shape[1], dim)[:, :, :width]
            of_prompts[:, :, : shared.shape[2]].index_add_(0, side.owner, shared)
    pairs = zip(sides, rows.sides, strict=True)
    return cat([grad.view(-1, dim).index_select(0, side.key_back) for grad, side in pairs])
