"""Attention over packed tokens, which are padded into rows only here.

Prompts attend to themselves; responses attend to their prompt and to themselves. Long rows are
cut into blocks of queries, each over the keys that its last query sees. A causal mask excludes
half of a row's scores; with the cuts little more than the other half is computed and stored. The
backward pass is written by hand in the layout of the forward pass: autograd's, with its copies,
takes several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, bmm, cat

from asyncrl.models import exact_operators

UNCUT = {"cpu": 64}  # rows of up to so many queries are not cut
UNCUT_ELSEWHERE = 256  # larger on a GPU, where each cut costs several kernel launches
MOST_CUTS = 32  # blocks of a row


@dataclass(frozen=True)
class QueryBlock:
    """Queries `first` to `end` of every row, which see at most the first `columns` keys."""

    first: int
    end: int
    columns: int


@dataclass(frozen=True)
class AttentionTable:
    """B rows of Q queries over K keys."""

    rows: Tensor  # [B, Q], index of each query among the packed tokens; padding: 0
    keys: Tensor  # [B, K], index of each key among the packed tokens; padding: 0
    bias: Tensor  # [B, Q, K], added to the scores
    flat: Tensor  # [n], positions in [B * Q] of the rows' tokens, which are packed in order
    query_offset: int  # query q of a row sees no key after column query_offset + q


@dataclass(frozen=True)
class PackingPlan:
    """The packing of a micro-batch.

    The n packed tokens are the unique prompts, then each response without its last token, in the
    order of `answers`. N is the number of response tokens.
    """

    ids: Tensor  # [n]
    positions: Tensor  # [n]
    prompts: AttentionTable  # each prompt over itself
    answers: list[AttentionTable]  # responses of similar length, over their prompt and themselves
    owners: list[Tensor]  # of each table, the prompt [B] of each row
    # of each table, the column [B] of a row's first own key, after its prompt; prompts are padded
    # to the longest one, except in exact mode
    starts: list[Tensor]
    picks: Tensor  # [N], packed token whose state predicts each response token
    targets: Tensor  # [N], response tokens
    sample: Tensor  # [N], sample of each response token
    first: list[int]  # a sample of each unique prompt
    order: list[int]  # the samples in the order of their responses


@dataclass(frozen=True)
class AttentionSide:
    """An `AttentionTable` with flat indices for h query heads and h_kv key heads."""

    shape: tuple[int, int, int]  # B, Q, K
    queries: Tensor  # [B * h * Q], among the packed tokens' heads; padding: any
    keys: Tensor  # [B * h_kv * K], among the packed tokens' heads; padding: any
    back: Tensor  # [n * h], each packed query's index in [B, h, Q]
    bias: Tensor  # [B, 1, Q, K]
    cuts: list[QueryBlock]  # the last one sees all keys

    @classmethod
    def from_table(cls, table: AttentionTable, heads: int, kv_heads: int) -> AttentionSide:
        width = table.rows.shape[1]
        columns = table.keys.shape[1]
        return cls(
            (len(table.rows), width, columns),
            _index_by_head(table.rows, heads),
            _index_by_head(table.keys, kv_heads),
            _index_by_position(table.flat, width, heads),
            table.bias[:, None],
            cut_queries(width, columns, table.query_offset, table.keys.device.type),
        )


@dataclass(frozen=True)
class AttentionRows:
    """All attention calls of a layer."""

    prompts: AttentionSide
    answers: list[AttentionSide]
    owners: list[Tensor]  # of each of `answers`, the prompt [B] of each row
    prompt_keys: Tensor  # index of each packed prompt token's heads in [G, h_kv, Pmax]
    answer_keys: list[Tensor]  # of each of `answers`, its tokens' indices in [B, h_kv, K]
    exact: bool  # use the operators of exact mode, where queries are already scaled

    @classmethod
    def from_plan(
        cls, plan: PackingPlan, heads: int, kv_heads: int, exact: bool = False
    ) -> AttentionRows:
        answer_keys = []
        for table, start in zip(plan.answers, plan.starts, strict=True):
            longest, columns = table.rows.shape[1], table.keys.shape[1]
            row = table.flat // max(longest, 1)
            places = table.flat + row * (columns - longest) + start[row]
            answer_keys.append(_index_by_position(places, columns, kv_heads))
        return cls(
            AttentionSide.from_table(plan.prompts, heads, kv_heads),
            [AttentionSide.from_table(table, heads, kv_heads) for table in plan.answers],
            plan.owners,
            _index_by_position(plan.prompts.flat, plan.prompts.rows.shape[1], kv_heads),
            answer_keys,
            exact,
        )


def cut_queries(
    width: int, columns: int, query_offset: int, device: str, max_queries: int = 0
) -> list[QueryBlock]:
    """Cut rows of `width` queries over `columns` keys into blocks.

    All ends but the last, and all numbers of keys, are multiples of `exact_operators.KEYS`.
    query_offset: see `AttentionTable`.
    max_queries: largest number of queries in a block, rounded down to such a multiple (at least
        one), with any number of blocks; 0: no limit.
    """
    uncut = UNCUT.get(device, UNCUT_ELSEWHERE)
    if width <= uncut and not 0 < max_queries < width:
        return [QueryBlock(0, width, columns)]
    block_count = min(MOST_CUTS, -(-width // uncut))
    step = exact_operators.round_up(-(-width // block_count), exact_operators.KEYS)
    if max_queries:
        step = min(
            step,
            exact_operators.round_up(max_queries - exact_operators.KEYS + 1, exact_operators.KEYS),
        )
    blocks = []
    for start in range(0, width, step):
        end = min(start + step, width)
        visible = columns
        if end < width:
            padded = exact_operators.round_up(query_offset + end, exact_operators.KEYS)
            visible = min(padded, columns)
        blocks.append(QueryBlock(start, end, visible))
    return blocks


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


def attend_packed(q: Tensor, k: Tensor, v: Tensor, rows: AttentionRows) -> Tensor:
    """Attention of packed tokens, prompts first, differentiable.

    q: [n, h, d]
    k, v: [n, h_kv, d]
    Returns [n, h * d].
    """
    attended: Tensor = _Attention.apply(q, k, v, rows)  # type: ignore[no-untyped-call]
    return attended


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: AttentionRows) -> Tensor:
        dim = q.shape[2]
        by_head = q.reshape(-1, dim), k.reshape(-1, dim), v.reshape(-1, dim)
        ctx.rows, ctx.scale = rows, 1.0 if rows.exact else dim**-0.5
        saved: list[Tensor] = []  # of each side: queries, keys, values, shares of each block
        parts = []
        for side in (rows.prompts, *rows.answers):
            attended, side_saved = _attend_side(
                side, *by_head, scale=None if rows.exact else ctx.scale
            )
            parts.append(attended)
            saved += side_saved
        ctx.save_for_backward(*saved)
        return _pad_rows(cat(parts), len(q), q.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows: AttentionRows = ctx.rows
        saved = ctx.saved_tensors
        dim = saved[0].shape[2]
        sides = [rows.prompts, *rows.answers]
        lengths = [len(side.back) for side in sides]
        grad = torch.split(grads[0].reshape(-1, dim)[: sum(lengths)], lengths)
        gradients = []
        start = 0
        for side, of_side in zip(sides, grad, strict=True):
            end = start + 3 + len(side.cuts)
            gradients.append(_backpropagate_side(side, of_side, saved[start:end], ctx.scale))
            start = end
        queries = cat([of_queries for of_queries, _, _ in gradients])
        keys = _sum_key_gradients(rows, [of_keys for _, of_keys, _ in gradients])
        values = _sum_key_gradients(rows, [of_values for _, _, of_values in gradients])
        n = len(grads[0])
        heads = grads[0].shape[1] // dim
        kv_heads = heads * len(keys) // len(queries)
        return (
            _pad_rows(queries, n, heads).view(n, heads, dim),
            _pad_rows(keys, n, kv_heads).view(n, kv_heads, dim),
            _pad_rows(values, n, kv_heads).view(n, kv_heads, dim),
            None,
        )


def _pad_rows(x: Tensor, n: int, heads: int) -> Tensor:
    """Reshape x [m * heads, d] to [n, heads * d], n >= m, with zeros in the rows after m.

    Exact mode pads the packed tokens.
    """
    if extra := n * heads - len(x):
        x = cat([x, x.new_zeros(extra, x.shape[1])])
    return x.view(n, -1)


def _attend_side(
    side: AttentionSide, q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the attended [n * h, d] of the packed queries, and tensors for the backward pass.

    Query heads that share a key head are handled as further queries of it.
    scale: of the queries; None in exact mode, where they are already scaled.
    """
    columns = side.shape[2]
    dim = q.shape[1]
    groups = len(side.keys) // max(columns, 1)
    queries = q.index_select(0, side.queries).view(groups, -1, dim)
    keys = k.index_select(0, side.keys).view(groups, columns, dim)
    values = v.index_select(0, side.keys).view(groups, columns, dim)
    saved = [queries, keys, values]
    if scale is not None:
        queries.mul_(scale)
    multiply = exact_operators.sum_weighted_values if scale is None else bmm
    parts = []
    for cut in side.cuts:
        # attention probabilities [B * h_kv, queries, keys] of a block
        block = _select_block_queries(queries, side, cut)
        scores = bmm(block, keys[:, : cut.columns].transpose(1, 2)).float()
        bias = side.bias[:, :, cut.first : cut.end, : cut.columns]
        scores.view(len(bias), -1, *bias.shape[2:]).add_(bias)
        shares = torch.softmax(scores, -1).to(queries.dtype)
        parts.append(multiply(shares, values[:, : cut.columns]))
        saved.append(shares)
    return _join_blocks(parts, side).index_select(0, side.back), saved


def _select_block_queries(x: Tensor, side: AttentionSide, cut: QueryBlock) -> Tensor:
    """Select a block's queries from x [B * h_kv, queries, d].

    The queries of heads that share a key head are stored head after head.
    """
    if len(side.cuts) == 1:
        return x
    groups, _, dim = x.shape
    by_head = x.view(groups, -1, side.shape[1], dim)
    return by_head[:, :, cut.first : cut.end].reshape(groups, -1, dim)


def _join_blocks(parts: list[Tensor], side: AttentionSide) -> Tensor:
    """Join blocks [B * h_kv, queries, d] into [B * h * Q, d]; inverts `_select_block_queries`."""
    groups, _, dim = parts[0].shape
    if len(parts) > 1:
        by_head = [
            part.view(groups, -1, cut.end - cut.first, dim)
            for part, cut in zip(parts, side.cuts, strict=True)
        ]
        return cat(by_head, 2).view(-1, dim)
    return parts[0].view(-1, dim)


def _backpropagate_side(
    side: AttentionSide, grad: Tensor, saved: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the packed queries [n * h, d], and of keys and values [B * h_kv, K, d].

    The latter are in the rows' layout. Padded queries have no gradient, and add none to keys.
    grad: [n * h, d]
    """
    queries, keys, values, *blocks = saved
    dim = queries.shape[2]
    padded = torch.zeros_like(queries)
    padded.view(-1, dim).index_copy_(0, side.back, grad)
    of_queries: list[Tensor] = []
    of_keys = of_values = torch.empty(0)
    for cut, shares in zip(reversed(side.cuts), reversed(blocks), strict=True):
        block_grad = _select_block_queries(padded, side, cut)
        block_queries = _select_block_queries(queries, side, cut)
        to_values = bmm(shares.transpose(1, 2), block_grad)
        of_shares = bmm(block_grad, values[:, : cut.columns].transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
        of_queries.insert(0, bmm(of_scores, keys[:, : cut.columns]))
        to_keys = bmm(of_scores.transpose(1, 2), block_queries)
        if len(of_queries) == 1:
            of_keys, of_values = to_keys, to_values  # the last block has all columns
        else:
            of_keys[:, : cut.columns] += to_keys
            of_values[:, : cut.columns] += to_values
    packed = _join_blocks(of_queries, side).index_select(0, side.back).mul_(scale)
    return packed, of_keys, of_values


def _sum_key_gradients(rows: AttentionRows, sides: list[Tensor]) -> Tensor:
    """Gradient [n * h_kv, d] of the packed keys (or values) from those of each side's rows.

    A prompt's gradient includes the sum over its responses.
    """
    prompts, *answers = sides
    count, _, width = rows.prompts.shape
    dim = prompts.shape[2]
    of_prompts = prompts.view(count, -1, width, dim)
    for owner, grad in zip(rows.owners, answers, strict=True):
        # after a shorter prompt the columns hold the response's own keys; the sum of these columns
        # belongs to padding and is not read
        shared = grad.view(len(owner), -1, grad.shape[1], dim)[:, :, :width]
        of_prompts[:, :, : shared.shape[2]].index_add_(0, owner, shared)
    places = [rows.prompt_keys, *rows.answer_keys]
    return cat(
        [
            grad.view(-1, dim).index_select(0, place)
            for grad, place in zip([prompts, *answers], places, strict=True)
        ]
    )
