"""Attention over packed tokens: rows are padded for it alone, forward and backward.

Prompts attend to themselves; answers to their prompt and to themselves.  Long rows are cut into
runs of queries, each over the keys that its last one sees: of a row's scores, which the mask would
take half of, little more than that half is made and kept.  The backward pass is written by hand in
the forward's layout: what autograd makes of the same forward, copy for copy, takes several times as
long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.models import exact_operators

UNCUT = {"cpu": 64}  # queries of a row that are not cut
UNCUT_ELSEWHERE = 256  # a cut is a handful of calls, which a GPU feels
MOST_CUTS = 32  # of a row


@dataclass(frozen=True)
class QueryBlock:
    """Queries `first` to `end` of every row, which see the first `columns` keys at most."""

    first: int
    end: int
    columns: int


@dataclass(frozen=True)
class AttentionTable:
    """B rows of Q queries over K keys.  rows [B, Q] and keys [B, K] index the packed tokens
    (padding: index 0); bias [B, Q, K] is added to the scores; flat: where the rows' tokens, which
    lie beside each other among the packed ones, are in [B * Q]; before: no row's query q sees a key
    behind column before + q."""

    rows: torch.Tensor
    keys: torch.Tensor
    bias: torch.Tensor
    flat: torch.Tensor
    before: int


@dataclass(frozen=True)
class PackingPlan:
    """How samples are packed.  Tokens: unique prompts first, then each response without its last
    token, in the order of `answers`.

    ids, positions [n]; prompts: each over itself; answers: of similar length in each table, over
    their prompt and themselves; owners: of each of these tables, the prompt [B] of each row;
    starts: of each, the column [B] of a row's first own key, behind its prompt, which is padded to
    the longest of all but in exact mode; picks [N] the token whose state predicts each response
    token; targets, sample [N]: those tokens, and the sample of each."""

    ids: torch.Tensor
    positions: torch.Tensor
    prompts: AttentionTable
    answers: list[AttentionTable]
    owners: list[torch.Tensor]
    starts: list[torch.Tensor]
    picks: torch.Tensor
    targets: torch.Tensor
    sample: torch.Tensor


@dataclass(frozen=True)
class AttentionSide:
    """B rows of Q queries over K keys, of h heads and h_kv of keys and values.  Tables of flat
    places, head by head:

    queries [B * h * Q] and keys [B * h_kv * K] among the packed tokens' heads (padding: somewhere);
    back, each packed query's place in [B, h, Q]; bias [B, 1, Q, K]; cuts: the last sees all
    keys."""

    shape: tuple[int, int, int]
    queries: torch.Tensor
    keys: torch.Tensor
    back: torch.Tensor
    bias: torch.Tensor
    cuts: list[QueryBlock]

    @classmethod
    def from_table(cls, table: AttentionTable, heads: int, kv_heads: int) -> AttentionSide:
        width = table.rows.shape[1]
        columns = table.keys.shape[1]
        return cls(
            (len(table.rows), width, columns),
            _indices_by_head(table.rows, heads),
            _indices_by_head(table.keys, kv_heads),
            _indices_by_position(table.flat, width, heads),
            table.bias[:, None],
            cut_queries(width, columns, table.before, table.keys.device.type),
        )


@dataclass(frozen=True)
class AttentionRows:
    """All calls of a layer's attention.  owners: of each of `answers`, the prompt [B] of each row;
    prompt_keys: each packed token's place in [G, h_kv, Pmax]; answer_keys: of each of `answers`,
    its tokens' places in [B, h_kv, K]; exact: by the operators of exact mode, where queries come
    scaled."""

    prompts: AttentionSide
    answers: list[AttentionSide]
    owners: list[torch.Tensor]
    prompt_keys: torch.Tensor
    answer_keys: list[torch.Tensor]
    exact: bool

    @classmethod
    def from_plan(
        cls, plan: PackingPlan, heads: int, kv_heads: int, exact: bool = False
    ) -> AttentionRows:
        answer_keys = []
        for table, start in zip(plan.answers, plan.starts, strict=True):
            longest, columns = table.rows.shape[1], table.keys.shape[1]
            row = table.flat // max(longest, 1)
            places = table.flat + row * (columns - longest) + start[row]
            answer_keys.append(_indices_by_position(places, columns, kv_heads))
        return cls(
            AttentionSide.from_table(plan.prompts, heads, kv_heads),
            [AttentionSide.from_table(table, heads, kv_heads) for table in plan.answers],
            plan.owners,
            _indices_by_position(plan.prompts.flat, plan.prompts.rows.shape[1], kv_heads),
            answer_keys,
            exact,
        )


def cut_queries(
    width: int, columns: int, before: int, device: str, most: int = 0
) -> list[QueryBlock]:
    """How rows of `width` queries over `columns` keys are cut: see `AttentionTable` for before.
    All ends
    but the last and all numbers of keys are multiples that exact mode wants.  most: queries of a
    cut at most, however many cuts that takes, but not fewer than such a multiple; 0: no limit."""
    uncut = UNCUT.get(device, UNCUT_ELSEWHERE)
    if width <= uncut and not 0 < most < width:
        return [QueryBlock(0, width, columns)]
    many = min(MOST_CUTS, -(-width // uncut))
    step = exact_operators.round_up(-(-width // many), exact_operators.KEYS)
    if most:
        step = min(
            step, exact_operators.round_up(most - exact_operators.KEYS + 1, exact_operators.KEYS)
        )
    out = []
    for first in range(0, width, step):
        end = min(first + step, width)
        seen = columns
        if end < width:
            padded = exact_operators.round_up(before + end, exact_operators.KEYS)
            seen = min(padded, columns)
        out.append(QueryBlock(first, end, seen))
    return out


def _indices_by_head(table: torch.Tensor, heads: int) -> torch.Tensor:
    """Places [B * heads * width] among rows of one head each, of packed tokens `table` [B,
    width]."""
    head = torch.arange(heads, device=table.device)[None, :, None]
    return (table[:, None] * heads + head).flatten()


def _indices_by_position(flat: torch.Tensor, width: int, heads: int) -> torch.Tensor:
    """Places [n * heads] in [B, heads, width] of the entries `flat` [n] of [B, width], a packed
    token's heads beside each other."""
    row, column = flat // max(width, 1), flat % max(width, 1)
    head = torch.arange(heads, device=flat.device)
    return ((row[:, None] * heads + head) * width + column[:, None]).flatten()


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: AttentionRows,
) -> torch.Tensor:
    """q [n, h, d], k, v [n, h_kv, d] of packed tokens, prompts first; returns [n, h * d]."""
    out: torch.Tensor = _Attention.apply(q, k, v, rows)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: AttentionRows
    ) -> torch.Tensor:
        dim = q.shape[2]
        by_head = q.reshape(-1, dim), k.reshape(-1, dim), v.reshape(-1, dim)
        ctx.rows, ctx.scale = rows, 1.0 if rows.exact else dim**-0.5
        kept: list[torch.Tensor] = []  # of each side in turn: its queries, keys, values, shares
        out = []
        for side in (rows.prompts, *rows.answers):
            attended, saved = _forward(side, *by_head, scale=None if rows.exact else ctx.scale)
            out.append(attended)
            kept += saved
        ctx.save_for_backward(*kept)
        return _pad_rows(torch.cat(out), len(q), q.shape[1])

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        rows: AttentionRows = ctx.rows
        kept = ctx.saved_tensors
        dim = kept[0].shape[2]
        sides = [rows.prompts, *rows.answers]
        lengths = [len(side.back) for side in sides]
        grad = torch.split(grads[0].reshape(-1, dim)[: sum(lengths)], lengths)
        found = []
        at = 0
        for side, of_side in zip(sides, grad, strict=True):
            end = at + 3 + len(side.cuts)
            found.append(_backward(side, of_side, kept[at:end], ctx.scale))
            at = end
        queries = torch.cat([of_queries for of_queries, _, _ in found])
        keys = _sum_key_gradients(rows, [of_keys for _, of_keys, _ in found])
        values = _sum_key_gradients(rows, [of_values for _, _, of_values in found])
        n = len(grads[0])
        heads = grads[0].shape[1] // dim
        kv_heads = heads * len(keys) // len(queries)
        return (
            _pad_rows(queries, n, heads).view(n, heads, dim),
            _pad_rows(keys, n, kv_heads).view(n, kv_heads, dim),
            _pad_rows(values, n, kv_heads).view(n, kv_heads, dim),
            None,
        )


def _pad_rows(x: torch.Tensor, n: int, heads: int) -> torch.Tensor:
    """x [m * heads, d] as [n, heads * d], n >= m, with rows of zeros below: exact mode pads the
    packed tokens."""
    if extra := n * heads - len(x):
        x = torch.cat([x, x.new_zeros(extra, x.shape[1])])
    return x.view(n, -1)


def _forward(
    side: AttentionSide,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attended [n * h, d] of the packed queries, and what the backward pass needs.  Heads that
    share their keys are more queries of them.  scale: None where exact mode has scaled them."""
    columns = side.shape[2]
    dim = q.shape[1]
    groups = len(side.keys) // max(columns, 1)
    queries = q.index_select(0, side.queries).view(groups, -1, dim)
    keys = k.index_select(0, side.keys).view(groups, columns, dim)
    values = v.index_select(0, side.keys).view(groups, columns, dim)
    kept = [queries, keys, values]
    if scale is not None:
        queries.mul_(scale)
    out = []
    for cut in side.cuts:
        shares = _shares(side, cut, queries, keys)
        taken = values[:, : cut.columns]
        summed = exact_operators.weighted_values if scale is None else torch.bmm
        out.append(summed(shares, taken))
        kept.append(shares)
    return _uncut(out, side).index_select(0, side.back), kept


def _shares(
    side: AttentionSide, cut: QueryBlock, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """What each query of the cut takes of each key: [B * h_kv, queries, keys]."""
    some = _queries_of_block(queries, side, cut)
    seen = keys[:, : cut.columns]
    scores = torch.bmm(some, seen.transpose(1, 2)).float()
    bias = side.bias[:, :, cut.first : cut.end, : cut.columns]
    scores.view(len(bias), -1, *bias.shape[2:]).add_(bias)
    return torch.softmax(scores, -1).to(queries.dtype)


def _queries_of_block(x: torch.Tensor, side: AttentionSide, cut: QueryBlock) -> torch.Tensor:
    """The cut's queries of x [B * h_kv, queries, d], where the queries of heads that share keys lie
    head after head."""
    if len(side.cuts) == 1:
        return x
    groups, _, dim = x.shape
    by_head = x.view(groups, -1, side.shape[1], dim)
    return by_head[:, :, cut.first : cut.end].reshape(groups, -1, dim)


def _uncut(parts: list[torch.Tensor], side: AttentionSide) -> torch.Tensor:
    """[B * h * Q, d] of the cuts' [B * h_kv, queries, d]: undoes `_queries_of_block`."""
    groups, _, dim = parts[0].shape
    if len(parts) > 1:
        by_head = [
            part.view(groups, -1, cut.end - cut.first, dim)
            for part, cut in zip(parts, side.cuts, strict=True)
        ]
        return torch.cat(by_head, 2).view(-1, dim)
    return parts[0].view(-1, dim)


def _backward(
    side: AttentionSide, grad: torch.Tensor, kept: tuple[torch.Tensor, ...], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the packed queries [n * h, d], and of keys and values [B * h_kv, K, d] in the
    rows' layout; grad [n * h, d].  A padded query has none, so nothing reaches its keys."""
    queries, keys, values, *each = kept
    dim = queries.shape[2]
    padded = torch.zeros_like(queries)
    padded.view(-1, dim).index_copy_(0, side.back, grad)
    of_queries: list[torch.Tensor] = []
    of_keys = of_values = torch.empty(0)
    for cut, shares in zip(reversed(side.cuts), reversed(each), strict=True):
        given = _queries_of_block(padded, side, cut)
        some = _queries_of_block(queries, side, cut)
        to_values = torch.bmm(shares.transpose(1, 2), given)
        of_shares = torch.bmm(given, values[:, : cut.columns].transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
        seen = keys[:, : cut.columns]
        of_queries.insert(0, torch.bmm(of_scores, seen))
        to_keys = torch.bmm(of_scores.transpose(1, 2), some)
        if len(of_queries) == 1:
            of_keys, of_values = to_keys, to_values  # of all columns
        else:
            of_keys[:, : cut.columns] += to_keys
            of_values[:, : cut.columns] += to_values
    packed = _uncut(of_queries, side).index_select(0, side.back).mul_(scale)
    return packed, of_keys, of_values


def _sum_key_gradients(rows: AttentionRows, sides: list[torch.Tensor]) -> torch.Tensor:
    """Gradient [n * h_kv, d] of the packed keys (or values), from those of the prompts' side and
    of the answers': a prompt's are the sum over its answers."""
    prompts, *answers = sides
    count, _, width = rows.prompts.shape
    dim = prompts.shape[2]
    of_prompts = prompts.view(count, -1, width, dim)
    for owner, grad in zip(rows.owners, answers, strict=True):
        # behind a shorter prompt come an answer's own keys: their columns are nobody's there
        by_row = grad.view(len(owner), -1, grad.shape[1], dim)
        shared = by_row[:, :, :width]
        of_prompts[:, :, : shared.shape[2]].index_add_(0, owner, shared)
    places = [rows.prompt_keys, *rows.answer_keys]
    return torch.cat(
        [
            grad.view(-1, dim).index_select(0, at)
            for grad, at in zip([prompts, *answers], places, strict=True)
        ]
    )
