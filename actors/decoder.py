"""Decoding kernels of the embedded engine for Llama-like models.

Fused weights, a cache of shared columns, a cache of prefixes that outlive their rows, and sampling.
The cache holds [rows, kv heads, columns, d]. The first columns are for prompts. In the rest every
row writes the same column at each step (`StepColumns` chooses it), so that a write is one slice and
a version is one number per column.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, cat

from asyncrl.contract.messages import RoutingShape
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.models import exact_operators
from asyncrl.models.packed_attention import cut_queries, has_gpu_kernel
from asyncrl.models.packed_forward import ModelLayout, find_kept_tokens, renormalize
from asyncrl.models.policy import LazyWeights

aten: Any = torch.ops.aten
MASKED = -1e30
BLOCK = 64  # steps between two searches for free columns; granularity of attention's columns
SCORES = 1 << 24  # attention scores in memory while prompts are encoded: 64 MiB, plus copies
KEPT_BLOCK = 8  # tokens whose keys and values are kept, found and evicted together
BlockName = tuple[int, bytes]  # number of the block before it or -1, its tokens int32
KeysAndValues = tuple[Tensor, Tensor]
RoutedLayers = list[Tensor] | None  # receives the experts of each sparse layer; None: not recorded


class FusedWeights:
    """The weights in the layout that decoding needs; exact: for the operators of exact mode.

    Norm weights are folded into the matrix that follows them, and the columns of queries and keys
    are interleaved (`exact_operators.interleave_halves`). turns: the rotary factors of each
    position, complex [positions, d / 2].
    """

    def __init__(self, lay: ModelLayout, positions: int, *, exact: bool = False) -> None:
        self.lay, hf = lay, lay.hf
        self.exact = exact
        # attention reads each row's own keys alone, by torch's kernel
        self.flash = not exact and reads_own_keys(lay, hf.model.embed_tokens.weight)
        self.layers = len(hf.model.layers)
        self.dtype = hf.model.embed_tokens.weight.dtype
        self.tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
        self.device = hf.model.embed_tokens.weight.device
        self.positions = positions
        self.operators = exact_operators.EXACT if exact else exact_operators.PLAIN
        self.turns = lay.compute_turns(torch.arange(positions, device=self.device))
        self.per_layer: list[dict[str, Tensor]] = [{} for _ in range(self.layers)]
        self.top: dict[str, Tensor] = {}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Fuse `weights` (transformers' parameter names, on any device) into place."""
        lay = self.lay
        weights = LazyWeights(weights, lambda _, weight: weight.to(self.device))
        for i, store in enumerate(self.per_layer):
            fused = exact_operators.fuse_layer(lay, i, weights)
            _copy_into(store, exact_operators.interleave_halves(lay, fused), self.dtype)
        _copy_into(self.top, exact_operators.fuse_top(weights, self.tied), self.dtype)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Compute logits fp32 [n, V] from residuals x [n, H]."""
        padded = exact_operators.pad_rows(x, self.operators.rows)
        states = self.operators.normalize(padded, self.lay.eps)
        return self.operators.multiply(states, self.top["head"])[: len(x)].float()

    @property
    def vocabulary(self) -> int:
        return int(self.top["head"].shape[1])


def _copy_into(store: dict[str, Tensor], weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Copy weights into existing buffers in the engine's precision.

    Reusing the buffers avoids touching new memory at each load.
    """
    for name, tensor in weights.items():
        if name in store:
            store[name].copy_(tensor)
        else:
            store[name] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


class ColumnCache:
    """Keys and values of all rows, and an additive bias [rows, 1, columns].

    The bias hides the columns that a row may not see.
    """

    def __init__(
        self, lay: ModelLayout, layers: int, rows: int, columns: int, like: Tensor
    ) -> None:
        shape = layers, rows, lay.kv_heads, columns, lay.head_dim
        self.stored = self.k, self.v = like.new_zeros(shape), like.new_zeros(shape)
        self.bias = like.new_full((rows, 1, columns), MASKED, dtype=torch.float32)


class StepColumns:
    """The allocation of the column that every row writes at a decode step.

    It is the lowest column in which no live row has keys. Attention then covers as many columns as
    the longest live responses need, instead of `count`, the length of the longest permitted
    response.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.clear()

    def clear(self) -> None:
        """Reset: no row is live and steps begin at 0."""
        self.last_steps = np.full(self.count, -1)  # the last step at each column
        self.column_at = np.zeros(self.count, np.int64)  # the column of a step, at step % count
        self.free_columns: list[int] = []  # descending
        self.high = 0  # columns from here on are empty

    def grow(self, count: int) -> None:
        """Append columns up to `count`."""
        self.last_steps = np.pad(self.last_steps, (0, count - self.count), constant_values=-1)
        self.count = count
        self.column_at = np.zeros(count, np.int64)
        order = self.last_steps.argsort()  # of two steps with one index the later one is live
        used_columns = order[self.last_steps[order] >= 0]
        self.column_at[self.last_steps[used_columns] % count] = used_columns
        self.free_columns = []

    def allocate(self, step: int, oldest: Callable[[], int]) -> int:
        """Return a column for `step`.

        oldest(): the first step of the oldest live row, fewer than `count` steps ago.
        """
        if not self.free_columns or step % BLOCK == 0:
            live = self.last_steps >= oldest()
            self.free_columns = np.flatnonzero(~live)[::-1].tolist()
            self.high = int(np.flatnonzero(live).max(initial=-1)) + 1
        column = self.free_columns.pop()
        self.last_steps[column] = step
        self.column_at[step % self.count] = column
        self.high = max(self.high, column + 1)
        return column

    def list_columns(self, first_step: int, end: int) -> ndarray:
        """Return the columns [end - first] of the steps first..end-1 of a live row."""
        columns: ndarray = self.column_at[np.arange(first_step, end) % self.count]
        return columns


class PrefixCache:
    """Keys and values of earlier rows, from position 0, under the loaded weights.

    A block of KEPT_BLOCK tokens is found by its predecessor block and its own tokens, so that
    sequences share a common prefix. Blocks of a sequence are marked as used from the last to the
    first, so that the successors of a block are always evicted before the block itself.

    tokens: the most tokens kept; memory is allocated as needed. like: the keys of a `ColumnCache`.
    routing: the shape of the experts that are kept beside the keys; None: none are.
    """

    def __init__(self, tokens: int, like: Tensor, routing: RoutingShape | None = None) -> None:
        self.max_blocks = tokens // KEPT_BLOCK  # blocks
        self.routed = None if routing is None else RoutedExperts.make_unrecorded(0, routing).ids
        layers, _, heads, _, dim = like.shape
        self.k = like.new_zeros((layers, heads, 0, dim))
        self.v = self.k.clone()
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        # (predecessor's number or -1, tokens int32) -> number, least recently used first
        self.blocks: OrderedDict[BlockName, int] = OrderedDict()
        self.free_blocks = list(range(self.k.shape[2] // KEPT_BLOCK))

    @property
    def tokens(self) -> int:
        return len(self.blocks) * KEPT_BLOCK

    def find(self, tokens: ndarray) -> list[int]:
        """Return the numbers of the kept blocks that `tokens` [L] begin with.

        These blocks count as used now.
        """
        return [self.blocks[name] for name in self._find_path(_split_blocks(tokens))]

    def store(
        self,
        tokens: ndarray,
        keys: Tensor,
        values: Tensor,
        columns: ndarray,
        routed: ndarray | None = None,
    ) -> None:
        """Keep the whole blocks of `tokens` [L] that are not kept yet.

        Args:
            tokens: int [L].
            keys, values: [layers, kv heads, C, d].
            columns: int [L], the column of each token among the C.
            routed: uint16 [L, layers, k], its experts; None: `routing` is None.
        """
        blocks = _split_blocks(tokens)[: self.max_blocks]
        path = self._find_path(blocks)
        kept_count = len(path)
        if kept_count == len(blocks):
            return
        previous = self.blocks[path[-1]] if path else -1
        numbers = []
        for block in blocks[kept_count:]:
            # a caller asks for at most `max_blocks` blocks minus the kept ones of its path, which
            # were used last: only blocks of other sequences are evicted
            allocated = self.k.shape[2] // KEPT_BLOCK
            if not self.free_blocks and allocated < self.max_blocks:
                added = min(max(allocated, 32), self.max_blocks - allocated)
                pad = (0, 0, 0, added * KEPT_BLOCK)
                self.k, self.v = (F.pad(tensor, pad) for tensor in (self.k, self.v))
                if self.routed is not None:
                    rows = (0, added * KEPT_BLOCK)
                    self.routed = np.pad(self.routed, (rows, (0, 0), (0, 0)))
                self.free_blocks = list(range(allocated, allocated + added))
            free = self.free_blocks
            number = free.pop() if free else self.blocks.popitem(last=False)[1]
            self.blocks[previous, block] = number
            path.append((previous, block))
            numbers.append(number)
            previous = number
        self._mark_used(path)
        start, end = kept_count * KEPT_BLOCK, len(blocks) * KEPT_BLOCK
        source = torch.from_numpy(columns[start:end]).to(keys.device)
        target_columns = self.list_columns(numbers)
        target = torch.from_numpy(target_columns).to(keys.device)
        if self.routed is not None:
            assert routed is not None
            self.routed[target_columns] = routed[start:end]
        self.k.index_copy_(2, target, keys.index_select(2, source))
        self.v.index_copy_(2, target, values.index_select(2, source))

    @staticmethod
    def list_columns(numbers: Sequence[int]) -> ndarray:
        """Return the columns of these blocks in k and v: int64 [blocks x KEPT_BLOCK]."""
        first = np.array(numbers, np.int64) * KEPT_BLOCK
        columns: ndarray = (first[:, None] + np.arange(KEPT_BLOCK)).flatten()
        return columns

    def _find_path(self, blocks: Sequence[bytes]) -> list[BlockName]:
        path: list[BlockName] = []
        previous = -1
        for block in blocks:
            number = self.blocks.get((previous, block))
            if number is None:
                break
            path.append((previous, block))
            previous = number
        self._mark_used(path)
        return path

    def _mark_used(self, path: Sequence[BlockName]) -> None:
        for name in reversed(path):
            self.blocks.move_to_end(name)


def _split_blocks(tokens: ndarray) -> list[bytes]:
    """Split `tokens` [L] into whole blocks, as bytes."""
    data = tokens.astype("<i4").tobytes()
    width = 4 * KEPT_BLOCK
    return [data[start : start + width] for start in range(0, len(data) - width + 1, width)]


class PrefilledPrefix(NamedTuple):
    """Keys and values that `encode` continues from.

    Args:
        k, v: [layers, B, kv heads, M, d].
        lengths: int [B], how many of the M columns row b has.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor


def decode(
    w: FusedWeights,
    cache: ColumnCache,
    tokens: Tensor,
    positions: Tensor,
    end: int,
    *,
    column: int | None = None,
    routed: RoutedLayers = None,
) -> Tensor:
    """Run m tokens a row at once, and write their keys and values into the cache.

    In exact mode the logits have the same bits as one token at a time.

    Args:
        tokens: [n, m], a row's last token and its draft.
        positions: [n, m], ascending by 1; only rows that are not live have columns that the cache
            lacks.
        end: no live row reads a column from here on.
        column: that all rows write, for m = 1; None: each row those of its positions.
        routed: the experts of each sparse layer, int64 [n * m, k], are appended to it; in exact
            mode they have rows of padding after these.

    Returns logits fp32 [n * m, V].
    """
    n, m = tokens.shape
    pad = functools.partial(exact_operators.pad_rows, rows=w.operators.rows)
    columns = cache.bias.shape[2]
    width = min(exact_operators.round_up(end, exact_operators.KEYS if w.exact else 1), columns)
    place: tuple[Any, ...]
    attend_own: Callable[[Tensor, int], Tensor] | None = None
    if column is None:
        positions = positions.clamp(max=columns - 1)
        attend_own = _plan_own_keys(cache, positions) if w.flash else None
        visible = torch.arange(width, device=tokens.device) <= positions[..., None]
        bias = torch.where(visible, 0.0, MASKED)
        rows = torch.arange(n, device=tokens.device)
        place = rows.repeat_interleave(m), slice(None), positions.flatten()
    else:
        cache.bias[:n, :, column] = 0.0
        bias = cache.bias[:n, :, :width]
        place = slice(n), slice(None), column
    turns = w.turns.index_select(0, pad(positions.flatten().clamp(max=w.positions - 1)))
    x = w.top["embed"].index_select(0, pad(tokens.flatten()))
    for i in range(w.layers):
        layer = w.lay, w.per_layer[i]
        q, k, v = exact_operators.project(*layer, x, turns, w.operators)
        for stored, new in ((cache.k, k), (cache.v, v)):
            stored[i, *place] = new[: n * m]
        if attend_own is not None:
            attended = attend_own(q, i)
        else:
            keys, values = (t[i, :n, :, :width].flatten(0, 1) for t in (cache.k, cache.v))
            attended = _attend_causally(q[: n * m], keys, values, bias, exact=w.exact)
        x = exact_operators.finish(*layer, x, pad(attended), None, routed, w.operators)
    return w.compute_logits(x)[: n * m]


def _attend_causally(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, exact: bool = False
) -> Tensor:
    """Compute attention [n * m, heads * d] of the m queries of each of n rows.

    Args:
        q: [n * m, heads, d], scaled.
        keys, values: [n * kv heads, W, d].
        bias: [n, m, W].
        exact: use the operators of exact mode; W is a multiple of KEYS.
    """
    (n, m, width), (_, heads, dim) = bias.shape, q.shape
    kv_heads = len(keys) // n
    share = heads // kv_heads
    by_key = q.reshape(n, m, kv_heads, share, dim).transpose(1, 2)
    if exact:
        of_queries = bias[:, None, :, None].expand(n, 1, m, share, width)
        attended = exact_operators.attend(
            by_key.reshape(n, kv_heads, m * share, dim),
            keys,
            values,
            of_queries.reshape(n, 1, m * share, width),
        )
    else:
        scores = torch.bmm(by_key.reshape(-1, m * share, dim), keys.transpose(1, 2))
        scores = scores.view(n, kv_heads, m, share, width).float().add_(bias[:, None, :, None])
        p = torch.softmax(scores, -1).to(q.dtype)
        attended = torch.bmm(p.view(-1, m * share, width), values)
    attended = attended.reshape(n, kv_heads, m, share * dim).transpose(1, 2)
    return attended.reshape(n * m, heads * dim)


def _plan_own_keys(cache: ColumnCache, positions: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Return attention [n * m, heads * d] of a step's queries [n * m, heads, d] in a layer.

    torch's flash kernel reads each row's keys up to its last position, and none beside them.

    positions: [n, m], ascending by 1.
    """
    (n, m), (groups, columns, dim) = positions.shape, cache.v.shape[2:]
    begins = torch.arange(n + 1, dtype=torch.int32, device=positions.device)
    bounds = begins * m, begins * (groups * columns), m, columns, 0.0, m > 1, False
    more = {"scale": 1.0, "seqused_k": (positions[:, -1] + 1).int()}
    # the cache as packed tokens, whose heads are `columns` tokens apart
    size, strides = ((n - 1) * groups * columns + columns, groups, dim), (dim, columns * dim, 1)

    def attend(q: Tensor, layer: int) -> Tensor:
        keys, values = (x[layer].as_strided(size, strides) for x in (cache.k, cache.v))
        attended: Tensor = aten._flash_attention_forward(q, keys, values, *bounds, **more)[0]
        return attended.flatten(1)

    return attend


def reads_own_keys(lay: ModelLayout, like: Tensor) -> bool:
    """Return whether torch's flash kernel attends over a small cache as `_attend_causally` does."""
    if not has_gpu_kernel(like, lay.head_dim):
        return False
    cache = ColumnCache(lay, 1, 3, 8, like)
    for scale, stored in enumerate(cache.stored, 2):
        stored.copy_(torch.arange(stored.numel()).view(stored.shape).mul(scale).sin())
    q = torch.arange(3 * lay.heads * lay.head_dim).sin().view(3, lay.heads, -1).to(like)
    positions = torch.tensor([[0], [4], [7]], device=like.device)
    visible = torch.arange(8, device=like.device) <= positions[..., None]
    keys, values = (stored[0].flatten(0, 1) for stored in (cache.k, cache.v))
    expected = _attend_causally(q, keys, values, torch.where(visible, 0.0, MASKED))
    try:
        agrees = torch.allclose(_plan_own_keys(cache, positions)(q, 0), expected, atol=0.1)
    except RuntimeError:  # of a version of torch that refuses such a cache
        agrees = False
    if not agrees:
        print("engine: torch's flash kernel fails its check and is not used", file=sys.stderr)
    return agrees


def count_accepted(sampled: Tensor, drafts: Tensor, stop: Tensor, left: Tensor) -> KeysAndValues:
    """Count the accepted tokens of each row [n] and decide whether it stops [n].

    A row accepts its sampled tokens up to the first one that differs from the draft, that one
    included: the later ones follow a token that was not sampled.

    Args:
        sampled: [n, m].
        drafts: [n, m - 1]; -1: none.
        stop: [n, S], stop tokens; -1: none.
        left: [n], tokens that may still be sampled; 0: the row is not live.
    """
    accepted = (sampled[:, :-1] == drafts).long().cumprod(1).sum(1) + 1
    stops = (sampled[..., None] == stop[:, None]).any(2)
    stop_count = torch.where(stops.any(1), stops.long().argmax(1) + 1, sampled.shape[1] + 1)
    return torch.minimum(torch.minimum(accepted, stop_count), left), stop_count <= torch.minimum(
        accepted, left
    )


# the process's memory pool for graphs: with one for each, every graph would hold its own logits
make_pool = functools.cache(torch.cuda.graph_pool_handle)


def capture(step: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
    """Capture a step as a CUDA graph; return a function that runs it.

    All graphs share one memory pool: they run one after another, and what a step leaves is in
    tensors from outside. Its result is that of the last run. A step that cannot be captured is
    returned as it is, with a message.
    """
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=make_pool(), capture_error_mode="thread_local"):
            result = step()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"engine: a decode step runs without a CUDA graph: {reason}", file=sys.stderr)
        return step

    def replay() -> Tensor | None:
        graph.replay()
        return result

    return replay


def encode(
    w: FusedWeights,
    ids: Tensor,
    prefix: PrefilledPrefix | None = None,
    routed: RoutedLayers = None,
    replayed: Tensor | None = None,
) -> list[KeysAndValues]:
    """Compute keys and values [B, kv heads, L, d] of every layer for ids [B, L].

    Rows are padded at the right. They start at position 0 or, with `prefix`, behind its keys. In
    exact mode L is a multiple of `exact_operators.KEYS`.
    The experts of each sparse layer but a last one, int64 [B * L, k], are appended to `routed`.
    replayed: int64 [sparse layers, B * L, k], see `expert_layers.route`.
    """
    layers: list[KeysAndValues] = []
    run_layers(w, ids, prefix, layers, routed, replayed)
    return layers


def run_layers(
    w: FusedWeights,
    ids: Tensor,
    prefix: PrefilledPrefix | None = None,
    layers: list[KeysAndValues] | None = None,
    routed: RoutedLayers = None,
    replayed: Tensor | None = None,
) -> Tensor:
    """Run the layers over ids [B, L], as in `encode`, and return the residuals [B * L, H].

    layers: receives the keys and values of every layer; the rest of the last one is then skipped.
    """
    b, n = ids.shape
    lay = w.lay
    positions = torch.arange(n, device=ids.device).repeat(b)
    known_bias: Tensor | float = 0.0
    past, mask = 0, None
    if prefix is not None:
        past = prefix.k.shape[3]
        positions = (positions.view(b, n) + prefix.lengths[:, None]).flatten()
        positions.clamp_(max=w.positions - 1)  # padding
        columns = torch.arange(past, device=ids.device)
        known_bias = torch.where(columns < prefix.lengths[:, None, None, None], 0.0, MASKED)
    if w.exact or prefix is not None:
        # a block has SCORES attention scores, so that memory grows with n instead of its square
        most_queries = max(1, SCORES // max(1, b * lay.heads * (past + n)))
        blocks = cut_queries(n, most_queries, ids.device.type)
        longest = blocks[0].stop
        bias = torch.full((longest, longest), MASKED, device=ids.device).triu_(1)
        mask = BlockMask(known_bias, blocks, bias)
    turns = w.turns.index_select(0, positions)
    # the experts to replay in each layer; None in dense layers, and in all without `replayed`
    to_replay = iter(() if replayed is None else replayed)
    replay = [next(to_replay, None) if "router" in layer else None for layer in w.per_layer]
    x = w.top["embed"].index_select(0, ids.flatten())
    for i in range(w.layers):
        projected = exact_operators.project(lay, w.per_layer[i], x, turns, w.operators)
        q, k, v = (t.view(b, n, -1, lay.head_dim).transpose(1, 2) for t in projected)
        if layers is not None:
            layers.append((k, v))
            if i + 1 == w.layers:
                return x
        if prefix is not None:
            k, v = cat([prefix.k[i], k], 2), cat([prefix.v[i], v], 2)
        a = _attend(q, k, v, mask, exact=w.exact).transpose(1, 2).reshape(b * n, -1)
        layer = lay, w.per_layer[i]
        x = exact_operators.finish(*layer, x, a, replay[i], routed, w.operators)
    return x


class BlockMask(NamedTuple):
    """The bias of queries by blocks."""

    # [B, 1, 1, M] over the keys of a known prefix: its padding is masked; 0: M = 0
    prefix_bias: Tensor | float
    blocks: Sequence[slice]
    # [m, m], causal, among the tokens of the longest block; a shorter one uses its top left corner
    bias: Tensor


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, *, exact: bool = False
) -> Tensor:
    """Compute causal attention [B, heads, L, d].

    Args:
        q: [B, heads, L, d], scaled.
        k, v: [B, kv heads, M + L, d]; a block attends up to its own last key.
        mask: with the padding of M keys of a prefix; queries are taken a block at a time. None: all
            are by torch's fused kernel, and M = 0.
        exact: use the operators of exact mode; M = 0.
    """
    (b, heads, n, dim), groups = q.shape, k.shape[1]
    past = k.shape[2] - n
    fused = functools.partial(F.scaled_dot_product_attention, scale=1.0, enable_gqa=groups < heads)
    if mask is None:
        return fused(q, k, v, is_causal=True)
    outputs = []
    for block in mask.blocks:
        queries, end = block.stop - block.start, past + block.stop
        of_block = q[:, :, block]
        own = mask.bias[:queries, :queries]
        if exact:
            attended = exact_operators.attend(
                of_block.reshape(b, groups, -1, dim),
                k[:, :, :end].flatten(0, 1),
                v[:, :, :end].flatten(0, 1),
                own.repeat(heads // groups, 1),
            ).reshape(of_block.shape)
        else:
            hidden = q.new_zeros(b, 1, queries, end)
            hidden[..., :past] = mask.prefix_bias
            hidden[..., past + block.start :] = own
            attended = fused(of_block, k[:, :, :end], v[:, :, :end], hidden)
        outputs.append(attended)
    return outputs[0] if len(outputs) == 1 else cat(outputs, 2)


def sample(
    logits: Tensor,
    u: Tensor,
    scale: Tensor | None,
    cut: KeysAndValues | None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample one token a row by inverse CDF.

    Returns tokens [n], their log-probabilities [n] under the sampling distribution, and with `cut`
    or `allowed` the tokens that were kept, bool [n, V].

    Args:
        logits: fp32 [n, V].
        u: [n], uniform in (0, 1].
        scale: [n], 1 / temperature; None: 1.
        cut: (top_p [n], top_k [n]); None: nothing is truncated.
        allowed: bool [n, V], the tokens of which top-p and top-k keep some; None: all.
    """
    logs = torch.log_softmax(logits if scale is None else logits * scale[:, None], -1)
    kept_mask = allowed
    if cut is not None:
        allowed_logs = logs if allowed is None else logs.masked_fill(~allowed, -torch.inf)
        kept_mask = find_kept_tokens(allowed_logs, *cut)
        kept_mask = kept_mask if allowed is None else kept_mask & allowed
    if kept_mask is not None:
        logs = renormalize(logs, kept_mask)
    c = logs.exp().cumsum(-1)
    # below the sum, whatever u rounds to: the first position above it has a probability
    reached = torch.minimum(u[:, None] * c[:, -1:], torch.nextafter(c[:, -1:], c.new_zeros(())))
    # a row that is not finite gets a token whose log-probability is not finite: on a GPU, an index
    # outside the vocabulary would end the process
    tokens = torch.searchsorted(c, reached, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], logs.gather(1, tokens)[:, 0], kept_mask
