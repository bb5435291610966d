"""Attention over packed tokens: rows are padded for it alone, forward and backward.

Prompts attend to themselves; answers to their prompt and to themselves.  The backward pass is
written by hand in the forward's layout: what autograd makes of the same forward, copy for copy,
takes several times as long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Plan:
    """How samples are packed.  Tokens: unique prompts first, then each response without its last
    token.

    ids, positions [n]; prompt_rows [G, Pmax] and response_rows [B, R] index the packed tokens
    (padding: index 0), keys [B, Pmax + R]; bias_* are additive attention masks; picks [N] the token
    whose state predicts each response token."""

    ids: torch.Tensor
    positions: torch.Tensor
    prompt_rows: torch.Tensor
    prompt_bias: torch.Tensor
    prompt_flat: torch.Tensor  # where the packed prompt tokens lie in [G * Pmax]
    response_rows: torch.Tensor
    keys: torch.Tensor
    response_bias: torch.Tensor
    response_flat: torch.Tensor
    picks: torch.Tensor
    targets: torch.Tensor
    sample: torch.Tensor  # [N] sample of each response token
    owner: torch.Tensor  # [B] the prompt of each sample


@dataclass(frozen=True)
class Side:
    """B rows of Q queries over K keys, of h heads and h_kv of keys and values.  Tables of flat
    places, head by head:

    queries [B * h * Q] and keys [B * h_kv * K] among the packed tokens' heads (padding: somewhere);
    back, each packed query's place in [B, h, Q]; bias [B, 1, Q, K]."""

    shape: tuple[int, int, int]
    queries: torch.Tensor
    keys: torch.Tensor
    back: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(
        cls,
        rows: torch.Tensor,
        keys: torch.Tensor,
        flat: torch.Tensor,
        bias: torch.Tensor,
        heads: tuple[int, int],
    ) -> Side:
        """rows [B, Q], keys [B, K], bias [B, Q, K]; flat: the packed queries' places in [B * Q]."""
        many, kv_many = heads
        return cls(
            (len(rows), rows.shape[1], keys.shape[1]),
            _by_head(rows, many),
            _by_head(keys, kv_many),
            _places(flat, rows.shape[1], many),
            bias[:, None],
        )


@dataclass(frozen=True)
class Rows:
    """Both calls of a layer's attention.  owner [B]: the prompt of each answer; prompt_keys and
    answer_keys: each packed token's place in [G, h_kv, Pmax] and in [B, h_kv, Pmax + R]."""

    prompts: Side
    answers: Side
    owner: torch.Tensor
    prompt_keys: torch.Tensor
    answer_keys: torch.Tensor

    @classmethod
    def of(cls, plan: Plan, heads: int, kv_heads: int) -> Rows:
        both = heads, kv_heads
        width = plan.prompt_rows.shape[1]
        longest = plan.response_rows.shape[1]
        row = plan.response_flat // max(longest, 1)
        return cls(
            Side.of(plan.prompt_rows, plan.prompt_rows, plan.prompt_flat, plan.prompt_bias, both),
            Side.of(plan.response_rows, plan.keys, plan.response_flat, plan.response_bias, both),
            plan.owner,
            _places(plan.prompt_flat, width, kv_heads),
            # behind the prompt's columns of each row so far
            _places(plan.response_flat + (row + 1) * width, width + longest, kv_heads),
        )


def _by_head(table: torch.Tensor, heads: int) -> torch.Tensor:
    """Places [B * heads * width] among rows of one head each, of packed tokens `table` [B,
    width]."""
    head = torch.arange(heads, device=table.device)[None, :, None]
    return (table[:, None] * heads + head).flatten()


def _places(flat: torch.Tensor, width: int, heads: int) -> torch.Tensor:
    """Places [n * heads] in [B, heads, width] of the entries `flat` [n] of [B, width], a packed
    token's heads beside each other."""
    row, column = flat // max(width, 1), flat % max(width, 1)
    head = torch.arange(heads, device=flat.device)
    return ((row[:, None] * heads + head) * width + column[:, None]).flatten()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> torch.Tensor:
    """q [n, h, d], k, v [n, h_kv, d] of packed tokens, prompts first; returns [n, h * d]."""
    out: torch.Tensor = _Attention.apply(q, k, v, rows)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        dim = q.shape[2]
        by_head = q.reshape(-1, dim), k.reshape(-1, dim), v.reshape(-1, dim)
        ctx.rows, ctx.scale = rows, dim**-0.5
        kept: list[torch.Tensor] = []
        out = []
        for side in (rows.prompts, rows.answers):
            attended, saved = _forward(side, *by_head, scale=ctx.scale)
            out.append(attended)
            kept += saved
        ctx.save_for_backward(*kept)
        return torch.cat(out).view(len(q), -1)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        rows: Rows = ctx.rows
        kept = ctx.saved_tensors
        dim = kept[0].shape[2]
        grad = grads[0].reshape(-1, dim)
        cut = len(rows.prompts.back)
        of_prompts = _backward(rows.prompts, grad[:cut], kept[:4], ctx.scale)
        of_answers = _backward(rows.answers, grad[cut:], kept[4:], ctx.scale)
        queries = torch.cat([of_prompts[0], of_answers[0]])
        keys, values = (
            _of_keys(rows, prompt, answer)
            for prompt, answer in zip(of_prompts[1:], of_answers[1:], strict=True)
        )
        tokens = len(grads[0])
        return (
            queries.view(tokens, -1, dim),
            keys.view(tokens, -1, dim),
            values.view(tokens, -1, dim),
            None,
        )


def _forward(
    side: Side, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attended [n * h, d] of the packed queries, and what the backward pass needs.  Heads that
    share their keys are more queries of them."""
    count, width, columns = side.shape
    dim = q.shape[1]
    groups = len(side.keys) // max(columns, 1)
    queries = q.index_select(0, side.queries).view(groups, -1, dim)
    keys = k.index_select(0, side.keys).view(groups, columns, dim)
    values = v.index_select(0, side.keys).view(groups, columns, dim)
    scores = torch.bmm(queries.mul_(scale), keys.transpose(1, 2)).float()
    scores.view(count, -1, width, columns).add_(side.bias)
    shares = torch.softmax(scores, -1).to(q.dtype)
    out = torch.bmm(shares, values).view(-1, dim).index_select(0, side.back)
    return out, [queries, keys, values, shares]


def _backward(
    side: Side, grad: torch.Tensor, kept: tuple[torch.Tensor, ...], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the packed queries [n * h, d], and of keys and values [B * h_kv, K, d] in the
    rows' layout; grad [n * h, d].  A padded query has none, so nothing reaches its keys."""
    queries, keys, values, shares = kept
    dim = queries.shape[2]
    padded = torch.zeros_like(queries)
    padded.view(-1, dim).index_copy_(0, side.back, grad)
    of_values = torch.bmm(shares.transpose(1, 2), padded)
    of_shares = torch.bmm(padded, values.transpose(1, 2))
    of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)
    of_queries = torch.bmm(of_scores, keys).view(-1, dim).index_select(0, side.back).mul_(scale)
    return of_queries, torch.bmm(of_scores.transpose(1, 2), queries), of_values


def _of_keys(rows: Rows, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Gradient [n * h_kv, d] of the packed keys (or values), from those of both sides: a prompt's
    are the sum over its answers."""
    count, width, _ = rows.prompts.shape
    dim = prompts.shape[2]
    shared = answers.view(len(rows.owner), -1, answers.shape[1], dim)[:, :, :width]
    of_prompts = prompts.view(count, -1).index_add_(
        0, rows.owner, shared.reshape(len(rows.owner), -1)
    )
    return torch.cat(
        [
            of_prompts.view(-1, dim).index_select(0, rows.prompt_keys),
            answers.view(-1, dim).index_select(0, rows.answer_keys),
        ]
    )
