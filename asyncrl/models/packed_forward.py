"""The packed forward pass for Llama-like models, the learner's fast path.

It covers Llama, Qwen2, Qwen3, Mistral, Qwen3-MoE and Mixtral. A prompt that a group shares is
encoded once. All tokens go packed through the linear layers; only attention pads them into rows.
The parameters are those of the transformers model, so gradients accumulate there. A test compares
values and gradients with the plain path.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, float32, from_numpy, log_softmax
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from asyncrl.contract.messages import RoutingShape
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.models import exact_operators, expert_layers, packed_attention
from asyncrl.models.packed_attention import (
    AttentionRows,
    AttentionSide,
    FlashCall,
    PackedSequences,
    PackingPlan,
)

FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"}
SPARSE = {"qwen3_moe", "mixtral"}
LOGIT_CHUNK = 1 << 24  # logits in memory at a time (64 MB in fp32)
# attention scores of padding (rows x queries x keys) that cost as much as one more table. The calls
# of a table cost more where each one starts a kernel on another device
WORTH_A_TABLE = {"cpu": 1 << 13}
WORTH_A_TABLE_ELSEWHERE = 1 << 20
HIDDEN = 1 << 40  # the position of padding, behind all queries
# of a module whose parameters are divided among ranks: gathers them, and calls as a forward pass
# (learner/distributed/fsdp_backend.py)
GATHERED_CALL = "gathered_call"


def copy_to(device: torch.device, x: Tensor) -> Tensor:
    """Copy x to a device; from pinned memory, so that the host does not wait for a GPU's work."""
    is_pinned = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if is_pinned else x).to(device, non_blocking=is_pinned)


def _to_device(x: ndarray, device: torch.device, dtype: type = np.int64) -> Tensor:
    return copy_to(device, from_numpy(np.ascontiguousarray(x, dtype=dtype)))


@dataclass
class ForwardInput:
    """B rows to score, each a prompt and a response.

    prompts: int32 arrays.
    responses: int32 arrays, none empty.
    temperature: [B].
    groups: keys; rows with the same key have the same prompt, which is encoded once.
    supports: the tokens that the engine kept at each position, over which the log-probabilities are
        then normalized; the entropy is that over the whole vocabulary.
    targets: int64 [N], the tokens to score at the responses' positions instead of them.
    routed: the experts to use for each token but the last; None: the model's own.
    images: the blobs of the image tokens; None: they have none.
    """

    prompts: Sequence[ndarray]
    responses: Sequence[ndarray]
    temperature: Tensor
    groups: Sequence[int] | None = None
    want_entropy: bool = False
    want_hidden: bool = False
    supports: Sequence[SampledSupport | None] | None = None
    targets: Tensor | None = None
    routed: Sequence[RoutedExperts | None] | None = None
    images: Sequence[Sequence[bytes]] | None = None

    def build_support(self, device: torch.device) -> SupportTable | None:
        """Return the table of the supports, or None where nothing was truncated."""
        supports = self.supports
        if supports is None or not any(s is not None and s.sizes.any() for s in supports):
            return None
        return SupportTable(supports, [len(r) for r in self.responses], device)

    def locate(self, plan: PackingPlan) -> tuple[Tensor, Tensor]:
        """Return the inverse temperature and the token to score of each response position [N]."""
        device = plan.ids.device
        scale = (1.0 / copy_to(device, self.temperature).float())[plan.sample]
        return scale, plan.targets if self.targets is None else copy_to(device, self.targets)

    def take(self, part: slice) -> ForwardInput:
        """Return the rows `part`, which may end beyond the last row."""
        start = sum(map(len, self.responses[: part.start]))
        positions = slice(start, start + sum(map(len, self.responses[part])))
        columns = dict.fromkeys(
            ("prompts", "responses", "temperature", "supports", "routed", "images"), part
        ) | {"targets": positions}
        values = {name: getattr(self, name) for name in columns}
        return replace(self, **{n: x[columns[n]] for n, x in values.items() if x is not None})


@dataclass
class ForwardOutput:
    """The result of a forward pass, packed over response tokens in sample order."""

    logprobs: Tensor  # [N]
    entropy: Tensor | None = None  # [N], nats
    hidden: Tensor | None = None  # [N, H]
    # of the packed forward: the inverse temperature [N], and the supports
    scale: Tensor | None = None
    support: SupportTable | None = None


class WholeModel:
    """A model that one process has; `TensorGroup` is one that several ranks divide."""

    rows = 0  # most tokens of the vocabulary on a rank; 0: all

    def enter(self, states: Tensor) -> Tensor:
        """Return states that are equal on all ranks; their gradient is the sum over the ranks."""
        return states

    def leave(self, states: Tensor) -> Tensor:
        """Return the sum over the ranks; its gradient is equal on all of them."""
        return states

    def locate(self, ids: Tensor, table: Tensor) -> tuple[Tensor, Any]:
        """Return the rows of tokens in this part's `table`, and which tokens it has."""
        return ids, True

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings [n, H] of tokens [n]."""
        return F.embedding(ids, table)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Normalize the logits [n, V] of this part over the whole vocabulary."""
        return log_softmax(logits, -1)


WHOLE = WholeModel()


@dataclass
class ModelLayout:
    """A Llama-like transformers model with the constants of its layers."""

    hf: Any
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    experts: expert_layers.ExpertSettings | None = None  # None: no layer has experts
    part: WholeModel = WHOLE  # of a rank, to which `heads` and `kv_heads` belong

    @classmethod
    def from_model(cls, hf: Any) -> ModelLayout | None:
        """Return the layout of `hf`, or None for a model that needs the plain path.

        Such a model has another family, a sliding window, dynamic RoPE, or experts of odd widths.
        """
        c = hf.config
        if c.model_type not in FAMILIES or c.hidden_act != "silu":
            return None
        if getattr(c, "sliding_window", None) and (
            c.model_type in ("mistral", "mixtral") or getattr(c, "use_sliding_window", False)
        ):
            return None
        if getattr(hf.model.rotary_emb, "rope_type", "default") not in (
            "default",
            "llama3",
            "linear",
        ):
            return None
        experts = expert_layers.read_settings(c)
        if experts is None and c.model_type in SPARSE:
            return None
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        heads = c.num_attention_heads, c.num_key_value_heads
        return cls(hf, *heads, dim, c.rms_norm_eps, experts)

    @property
    def routing(self) -> RoutingShape | None:
        """The shape of the ids of routed experts; None: no layer has experts."""
        if self.experts is None:
            return None
        layers = sum(map(expert_layers.is_sparse, self.hf.model.layers))
        return RoutingShape(layers, self.experts.number, self.experts.chosen)

    def compute_rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [n, 1, head_dim] at integer positions [n]."""
        with torch.no_grad():
            cos, sin = self.hf.model.rotary_emb(
                self.hf.model.embed_tokens.weight[:1], positions[None]
            )
        return cos[0, :, None], sin[0, :, None]

    def compute_turns(self, positions: Tensor) -> Tensor:
        """Return the rotary factors of `exact_operators.rotate` at positions [n]."""
        half = self.head_dim // 2
        parts = (table[:, 0, :half].float() for table in self.compute_rope(positions))
        return torch.complex(*(part.contiguous() for part in parts))


class _RMSNorm(Function):
    """x / rms(x) * w over the last axis in fp32; three passes fewer backward than by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        xf = x.float()
        r = torch.rsqrt(
            torch.linalg.vector_norm(xf, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps)
        )
        n = xf * r
        ctx.save_for_backward(n, r, w)
        return (n.to(x.dtype) * w).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        n, r, w = ctx.saved_tensors
        g = grads[0].float()
        gn = g * n
        gw = gn.reshape(-1, n.shape[-1]).sum(0)
        mean = (gn @ w.float()).div_(-n.shape[-1])[..., None]  # of -g w n
        gx = torch.addcmul(g * w.float(), n, mean).mul_(r)
        return gx.to(grads[0].dtype), gw.to(w.dtype), None


apply_rms_norm: Callable[[Tensor, Tensor, float], Tensor] = _RMSNorm.apply


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """Rotate x [n, heads, d] by the angles of cos and sin [n, 1, d], whose halves are equal.

    sign: -1: backwards.
    """
    half = x.shape[-1] // 2
    product = x * cos
    s = sin[..., half:]
    product[..., :half].addcmul_(x[..., half:], s, value=-sign)
    product[..., half:].addcmul_(x[..., :half], s, value=sign)
    return product


class _Rotate(Function):
    """`rotate` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, sin, -1), None, None


apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = _Rotate.apply


# ---- truncated sampling, shared by engine and learner, which then agree bitwise ------------------


def find_kept_tokens(logs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return bool [n, V]: tokens left by top-k, then by top-p.

    Top-p keeps the smallest set of tokens of at least that mass.

    Args:
        logs: [n, V], log-probabilities.
        top_p: [n]; 1: all.
        top_k: int64 [n]; 0: all.
    """
    ordered, index = logs.sort(-1, descending=True)
    rank = torch.arange(logs.shape[1], device=logs.device)
    excluded = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    share = ordered.masked_fill(excluded, -torch.inf).softmax(-1)
    excluded |= (share.cumsum(-1) - share) >= top_p[:, None]
    excluded[:, 0] = False
    # rounding of the sum must not truncate where nothing is to be truncated
    excluded &= ((top_p < 1) | (top_k > 0))[:, None]
    return torch.zeros_like(excluded).scatter_(1, index, ~excluded)


def renormalize(logs: Tensor, mask: Tensor) -> Tensor:
    """Return log-probabilities over the kept tokens, [n, V]; -inf elsewhere.

    A row that keeps all its tokens stays bitwise as it is.

    Args:
        logs: [n, V], log-probabilities over the whole vocabulary.
        mask: bool [n, V].
    """
    cut = log_softmax(logs.masked_fill(~mask, -torch.inf), -1)
    return torch.where(mask.all(-1, keepdim=True), logs, cut)


class SupportTable:
    """The supports of packed tokens on a device, read chunk by chunk.

    Args:
        supports: of each training sequence, in the order of its tokens; None: nothing was
            truncated.
        lengths: its number of tokens.
        device: where the logits are.
    """

    def __init__(
        self,
        supports: Sequence[SampledSupport | None],
        lengths: Sequence[int],
        device: torch.device,
    ) -> None:
        joined = SampledSupport.join(
            SampledSupport.make_untruncated(length) if support is None else support
            for support, length in zip(supports, lengths, strict=True)
        )
        self.offsets = np.concatenate([[0], np.cumsum(joined.sizes)])
        position = np.repeat(np.arange(len(joined.sizes)), joined.sizes)
        self.position, self.ids = (_to_device(x, device) for x in (position, joined.ids))
        self.truncated = _to_device(joined.sizes > 0, device, np.bool_)

    def renormalize(self, logs: Tensor, start: int) -> Tensor:
        """`renormalize` of logs [n, V], the positions from `start` on.

        Positions beyond the last one, with which exact mode pads, keep all.
        """
        start, end = (min(at, len(self.offsets) - 1) for at in (start, start + len(logs)))
        mask = torch.ones_like(logs, dtype=torch.bool)
        mask[: end - start] = ~self.truncated[start:end, None]
        at = slice(int(self.offsets[start]), int(self.offsets[end]))
        mask[self.position[at] - start, self.ids[at]] = True
        return renormalize(logs, mask)


# ---- log-probabilities ---------------------------------------------------------------------------


def count_logit_rows(head: Tensor, model_part: WholeModel = WHOLE) -> int:
    """Return the number of tokens whose logits are in memory at a time; head: [V, H].

    Each time, the whole head is read. On a GPU, the four float32 tensors of that size take 1 / 32
    of its memory, or as much as 1,024 tokens need.
    """
    width = model_part.rows or len(head)
    if head.device.type == "cpu":
        return max(1, LOGIT_CHUNK // width)
    total = torch.cuda.get_device_properties(head.device).total_memory
    return max(1024, total // (32 * 4 * 4 * width))


def _compute_logs(
    part: slice,
    hidden: Tensor,
    head: Tensor,
    scale: Tensor,
    support: SupportTable | None = None,
    model_part: WholeModel = WHOLE,
) -> Tensor:
    """Log-probabilities [n, V] of the positions `part` in float32, over their support."""
    logits = exact_operators.multiply(hidden[part], head.T).float()
    logs = model_part.log_softmax(logits.mul_(scale[part, None]))
    return logs if support is None else support.renormalize(logs, part.start)


def _compute_by_chunk(count: int, step: int, compute: Callable[[slice], Tensor]) -> Tensor:
    """Compute a value of each of `count` positions, `step` at a time."""
    return torch.cat([compute(slice(at, at + step)) for at in range(0, count, step)])


def _backpropagate_logits(
    hidden: Tensor, weight: Tensor, step: int, compute: Callable[[slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of states [n, H] and head [V, H], `step` positions at a time.

    compute: the gradient [m, V] of the logits of some positions.
    """
    gh = torch.empty_like(hidden)
    gw = torch.zeros_like(weight)
    for at in range(0, len(hidden), step):
        s = slice(at, at + step)
        d = compute(s).to(hidden.dtype)
        gh[s] = d @ weight
        gw += d.T @ hidden[s]
    return gh, gw


class _PickedLogprobs(Function):
    """Log-probability and entropy of given tokens, computed in chunks.

    Neither forward nor backward holds the logits of all tokens at once. With a support,
    log-probabilities are those over the kept tokens of each position; the entropy stays that over
    the whole vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        want_entropy: bool,
        support: SupportTable | None,
        model_part: WholeModel = WHOLE,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        step = exact_operators.round_up(count_logit_rows(weight, model_part), exact_operators.ROWS)
        targets, ctx.here = model_part.locate(targets, weight)
        ctx.compute = partial(_compute_logs, model_part=model_part)
        lp = hidden.new_empty(n, dtype=float32)
        ent = hidden.new_zeros(n, dtype=float32)
        saved_logs = []
        for at in range(0, n, step):
            s = slice(at, at + step)
            logs = ctx.compute(s, hidden, weight, scale)
            picked = logs if support is None else support.renormalize(logs, at)
            lp[s] = picked.gather(1, targets[s, None])[:, 0]
            if want_entropy:
                ent[s] = -logs.exp().mul_(logs).sum(-1)
            saved_logs = [logs] if n <= step else []
        ctx.want_entropy = want_entropy
        ctx.step = step
        ctx.support = support
        ctx.save_for_backward(hidden, weight, targets, scale, ent, *saved_logs)
        return model_part.leave(lp * ctx.here), model_part.leave(ent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, scale, ent, *saved_logs = ctx.saved_tensors
        of_target = grads[0] * ctx.here

        def compute(s: slice) -> Tensor:
            logs = saved_logs[0] if saved_logs else ctx.compute(s, hidden, weight, scale)
            p = logs.exp()
            supported = p if ctx.support is None else ctx.support.renormalize(logs, s.start).exp()
            d = supported * -grads[0][s, None]
            d.scatter_add_(1, targets[s, None], of_target[s, None])
            if ctx.want_entropy:
                d -= (logs + ent[s, None]).mul_(p).mul_(grads[1][s, None])
            slope: Tensor = d.mul_(scale[s, None])
            return slope

        return *_backpropagate_logits(hidden, weight, ctx.step, compute), *[None] * 5


pick_logprobs: Callable[..., tuple[Tensor, Tensor]] = _PickedLogprobs.apply


# log-probabilities [n, V] of the policy and of another -> a value of each state [n], and its
# gradient by the policy's logits [n, V]
VocabularyTerm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _VocabularySum(Function):
    """A term of two policies' distributions at each state, computed in chunks.

    The other policy gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *tensors: Tensor) -> Tensor:
        ctx.step = count_logit_rows(tensors[1])
        ctx.compute = compute
        ctx.save_for_backward(*tensors)
        return _compute_by_chunk(len(tensors[0]), ctx.step, lambda s: compute(s, *tensors)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, _, _, scale = ctx.saved_tensors

        def compute(s: slice) -> Tensor:
            slope: Tensor = ctx.compute(s, *ctx.saved_tensors)[1]
            gradient: Tensor = slope * (grads[0][s] * scale[s])[:, None]
            return gradient

        gradients = _backpropagate_logits(hidden, weight, ctx.step, compute)
        return None, *gradients, None, None, None


def compute_vocabulary_term(
    term: VocabularyTerm,
    lay: ModelLayout,
    hidden: Tensor,
    other: tuple[Tensor, Tensor],
    scale: Tensor,
    support: SupportTable | None = None,
) -> Tensor:
    """Return `term` of the trained policy and another one at each state [N], with gradient.

    hidden: [N, H], states of the trained model
    other: states [N, H] and head [V, H] of the other one
    scale, support: of the N positions, as in `ForwardOutput`; both policies are normalized over the
        kept tokens
    """

    def compute(part: slice, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        own, own_head, others, other_head, _ = tensors
        logs = _compute_logs(part, own, own_head, scale, support)
        return term(logs, _compute_logs(part, others, other_head, scale, support))

    head = lay.hf.get_output_embeddings().weight
    return _VocabularySum.apply(  # type: ignore[no-any-return, no-untyped-call]
        compute, hidden, head, *(tensor.detach() for tensor in other), scale
    )


@torch.no_grad()
def compute_squared_probabilities(
    lay: ModelLayout, hidden: Tensor, scale: Tensor, support: SupportTable | None
) -> Tensor:
    """sum_v p_v^2 of the next token at each state [N].

    hidden: [N, H]
    scale, support: of the N positions, as in `ForwardOutput`
    """
    weight = lay.hf.get_output_embeddings().weight

    def compute(chunk: slice) -> Tensor:
        logs = _compute_logs(chunk, hidden, weight, scale, support, lay.part)
        return logs.exp().square().sum(-1)

    rows = count_logit_rows(weight, lay.part)
    return lay.part.leave(_compute_by_chunk(len(hidden), rows, compute))


def _index_rows(lengths: ndarray, start: int, multiple: int) -> tuple[ndarray, ndarray, ndarray]:
    """Index consecutive segments of `lengths` [B], the first of which begins at `start`.

    Returns the padded index table [B, W], its validity [B, W], and the flat positions of its valid
    entries. W is the longest length, rounded up to a multiple of `multiple`.
    """
    width = exact_operators.round_up(int(lengths.max(initial=0)), multiple)
    begin = start + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    valid = np.arange(width)[None] < lengths[:, None]
    table = np.where(valid, begin[:, None] + np.arange(width)[None], 0)
    return table, valid, np.flatnonzero(valid)


def _group_by_length(lengths: ndarray, prompt: int, worth: int) -> list[ndarray]:
    """Group the indices of `lengths` into runs of similar length.

    Sorted by length, a run is cut in half for as long as that saves more than `worth` attention
    scores. A row of n queries has n (prompt + n) scores.
    """
    order = np.argsort(lengths, kind="stable")
    groups = []
    runs = [(0, len(order))]
    while runs:
        start, end = runs.pop()
        middle = (start + end) // 2
        longest, median = (int(lengths[order[max(start, at - 1)]]) for at in (end, middle))
        if (middle - start) * (longest * (prompt + longest) - median * (prompt + median)) > worth:
            runs += [(middle, end), (start, middle)]
        else:
            groups.append(order[start:end])
    return groups


def plan_packing(
    rows: ForwardInput,
    lay: ModelLayout,
    like: Tensor,
    fixed: bool = False,
) -> PackingPlan:
    """Plan the packing of one micro-batch.

    like: a tensor with the device and type of the states.
    fixed: for exact mode, padded and with keys at the column of their position.
    """
    prompts, responses = rows.prompts, rows.responses
    device = like.device
    names = range(len(prompts)) if rows.groups is None else rows.groups
    first_sample: dict[int, int] = {}  # prompt -> the first sample with it
    for sample, name in enumerate(names):
        first_sample.setdefault(name, sample)
    index_of_prompt = {name: at for at, name in enumerate(first_sample)}
    unique = [prompts[sample] for sample in first_sample.values()]
    owner = np.array([index_of_prompt[name] for name in names])
    plen = np.array([len(p) for p in unique])
    rlen = np.array([len(r) for r in responses])
    inner = rlen - 1
    lengths = owner, plen, inner
    flash = None if fixed else _plan_sequences(lengths, lay, like)
    attention, order = flash or _plan_rows(lengths, lay, device, fixed)
    begin = np.empty_like(inner)  # of each response, among the packed tokens
    begin[order] = plen.sum() + np.cumsum(inner[order]) - inner[order]
    ids = np.concatenate([*unique, *[responses[sample][:-1] for sample in order]])
    starts = np.concatenate([np.zeros_like(plen), plen[owner[order]]])
    lengths = np.concatenate([plen, inner[order]])
    pos = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(len(ids))
    if fixed:
        padding = exact_operators.round_up(len(ids), exact_operators.ROWS) - len(ids)
        ids, pos = (np.pad(array, (0, padding)) for array in (ids, pos))
    within = np.arange(int(rlen.sum())) - np.repeat(np.cumsum(rlen) - rlen, rlen)
    last_prompt_token = np.repeat(np.cumsum(plen)[owner] - 1, rlen)
    to_device = partial(_to_device, device=device)
    return PackingPlan(
        ids=to_device(ids),
        positions=to_device(pos),
        attention=attention,
        picks=to_device(
            np.where(within == 0, last_prompt_token, np.repeat(begin, rlen) + within - 1)
        ),
        targets=to_device(np.concatenate(responses)),
        sample=to_device(np.repeat(np.arange(len(responses)), rlen)),
        first=list(first_sample.values()),
        order=order.tolist(),
    )


def _plan_sequences(
    lengths: tuple[ndarray, ndarray, ndarray], lay: ModelLayout, like: Tensor
) -> tuple[AttentionRows | PackedSequences, ndarray] | None:
    """Plan flash attention as `_plan_rows` does; None where rows are padded instead."""
    owner, plen, inner = lengths
    is_long = max(plen.max(), inner.max()) > packed_attention.ROWS_UP_TO
    on_cpu = like.device.type == "cpu"
    if not (is_long if on_cpu else packed_attention.has_gpu_kernel(like, lay.head_dim)):
        return None

    def build(queries: ndarray, keys: ndarray, *, causal: bool) -> FlashCall:
        begin, key_begin = (
            _to_device(np.pad(x.cumsum(), (1, 0)), like.device, np.int32) for x in (queries, keys)
        )
        return FlashCall(begin, key_begin, int(queries.max()), int(keys.max()), causal)

    order = np.argsort(owner, kind="stable")
    own = np.concatenate([plen, inner[order]])
    behind = np.bincount(owner, inner).astype(np.int64)
    over_prompts = build(behind, plen, causal=False) if behind.any() else None
    return PackedSequences(build(own, own, causal=True), over_prompts, int(plen.sum())), order


def _plan_rows(
    lengths: tuple[ndarray, ndarray, ndarray],
    lay: ModelLayout,
    device: torch.device,
    fixed: bool,
) -> tuple[AttentionRows, ndarray]:
    """Plan attention over padded rows; also return the order of the responses.

    lengths: of each response, its prompt's index; of each prompt and response, its packed tokens
    """
    owner, plen, inner = lengths
    ptab, pval, pflat = _index_rows(plen, 0, exact_operators.KEYS if fixed else 1)
    width = ptab.shape[1]
    worth = WORTH_A_TABLE.get(device.type, WORTH_A_TABLE_ELSEWHERE)
    groups = _group_by_length(inner, width, worth)
    ends = np.cumsum(plen)
    begin = int(ends[-1])  # of the next group's first response, among the packed tokens
    to_device = partial(_to_device, device=device)

    def build(
        tables: Sequence[ndarray], positions: Sequence[ndarray], owner: ndarray | None = None
    ) -> AttentionSide:
        indices, at = ([to_device(x) for x in arrays] for arrays in (tables, positions))
        prompt = None if owner is None else to_device(owner)
        return AttentionSide.build(indices, at, (lay.heads, lay.kv_heads), prompt)

    sides = [build((ptab, ptab, pflat, pflat), (np.arange(width)[None],) * 2)]
    for group in groups:
        of_row, own = owner[group], inner[group]
        before = plen[of_row]  # tokens of each row's prompt
        rows, _, flat = _index_rows(own, begin, exact_operators.QUERIES if fixed else 1)
        of_queries = before[:, None] + np.arange(rows.shape[1])
        if fixed:  # the key of position p is in column p
            columns = exact_operators.round_up(int((before + own).max()), exact_operators.KEYS)
            of_keys, first, starts = np.arange(columns)[None], before[:, None], before
            own_begin = begin + np.cumsum(own) - own
            of_prompt = (ends[of_row] - before)[:, None] + of_keys
            of_answer = (own_begin - before)[:, None] + of_keys
            keys = np.where(of_keys < first, of_prompt, of_answer)
            keys = np.where(of_keys < first + own[:, None], keys, 0)
        else:  # a row's keys are the padded columns of its prompt, then its own
            keys = np.concatenate([ptab[of_row], rows], 1)
            of_prompt = np.where(pval[of_row], np.arange(width), HIDDEN)
            of_keys = np.concatenate([of_prompt, of_queries], 1)
            starts = np.full_like(before, width)
        row = flat // max(rows.shape[1], 1)
        places = flat + row * (keys.shape[1] - rows.shape[1]) + starts[row]
        sides.append(build((rows, keys, flat, places), (of_queries, of_keys), of_row))
        begin += int(own.sum())
    return AttentionRows(sides, exact=fixed), np.concatenate(groups)


def apply_block(
    lay: ModelLayout,
    i: int,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: AttentionRows | PackedSequences,
    replayed: Tensor | None = None,
) -> Tensor:
    """Apply layer i to packed tokens x [n, H].

    replayed: int64 [n, k], see `expert_layers.route`
    """
    layer = lay.hf.model.layers[i]
    att = layer.self_attn
    mlp = layer.mlp
    h = lay.part.enter(apply_rms_norm(x, layer.input_layernorm.weight, lay.eps))
    heads = (-1, lay.head_dim)
    q = att.q_proj(h).view(len(h), *heads)
    k = att.k_proj(h).view(len(h), *heads)
    v = att.v_proj(h).view(len(h), *heads)
    if hasattr(att, "q_norm"):
        q = apply_rms_norm(q, lay.part.enter(att.q_norm.weight), lay.eps)
        k = apply_rms_norm(k, lay.part.enter(att.k_norm.weight), lay.eps)
    q = apply_rotary(q, cos, sin)
    k = apply_rotary(k, cos, sin)
    x = x + lay.part.leave(att.o_proj(packed_attention.attend_packed(q, k, v, rows)))
    h = lay.part.enter(apply_rms_norm(x, layer.post_attention_layernorm.weight, lay.eps))
    if lay.experts is not None and expert_layers.is_sparse(layer):
        weights = expert_layers.ExpertWeights(
            mlp.gate.weight.T,
            mlp.experts.gate_up_proj.transpose(1, 2),
            mlp.experts.down_proj.transpose(1, 2),
        )
        return x + expert_layers.apply(h, weights, lay.experts, replayed)
    return x + lay.part.leave(mlp.down_proj(F.silu(mlp.gate_proj(h)) * mlp.up_proj(h)))


def compute_logprobs(
    lay: ModelLayout, rows: ForwardInput, fixed: bool = False, recompute: bool = False
) -> ForwardOutput:
    """See `PolicyModel.logprobs`.

    fixed: use the operators of exact mode. recompute: recompute each layer in the backward pass
    (Chen et al. 2016, arXiv:1604.06174), which changes no bit.
    """
    run_layer: Callable[..., Any] = operator.call
    if recompute and torch.is_grad_enabled():  # keeps only a layer's arguments
        run_layer = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    call: Callable[..., Any] = getattr(lay.hf, GATHERED_CALL, operator.call)
    lp, ent, hidden, *inputs = call(_compute_packed_logprobs, lay, rows, run_layer, fixed)
    return ForwardOutput(
        lp, ent if rows.want_entropy else None, hidden if rows.want_hidden else None, *inputs
    )


def _compute_packed_logprobs(
    lay: ModelLayout, rows: ForwardInput, run_layer: Callable[..., Tensor], fixed: bool
) -> tuple[Any, ...]:
    """Return the fields of `ForwardOutput`; FSDP2 finds the tensors of a tuple.

    fixed: with the operators that the engine uses in exact mode.
    """
    model = lay.hf.model
    head = lay.hf.get_output_embeddings().weight
    pl = plan_packing(rows, lay, head, fixed)
    x = lay.part.embed(pl.ids, model.embed_tokens.weight)
    if fixed:
        parameters = dict(lay.hf.named_parameters())
        turns = lay.compute_turns(pl.positions)
        block = partial(_apply_fixed_block, weights=parameters, turns=turns)
    else:
        cos, sin = lay.compute_rope(pl.positions)
        block = partial(apply_block, cos=cos.to(x.dtype), sin=sin.to(x.dtype))
    for i, ids in enumerate(_list_replayed(lay, pl, rows)):
        kwargs = {"rows": pl.attention, "replayed": ids}
        call = getattr(model.layers[i], GATHERED_CALL, operator.call)
        x = call(run_layer, block, lay, i, x, **kwargs)
    scale, scored = rows.locate(pl)
    support = rows.build_support(head.device)
    if fixed:
        parts = scale, scored, x.index_select(0, pl.picks)
        scale, scored, picked = map(exact_operators.pad_rows, parts)
        hidden = exact_operators.normalize(picked, lay.eps)
        head = (head * model.norm.weight).T.contiguous().T
    else:
        hidden = apply_rms_norm(x, model.norm.weight, lay.eps).index_select(0, pl.picks)
    inputs = lay.part.enter(hidden), head, scored, scale
    lp, ent = pick_logprobs(*inputs, rows.want_entropy, support, lay.part)
    if fixed:
        lp, ent, hidden, scale = (table[: len(pl.picks)] for table in (lp, ent, hidden, scale))
        hidden = hidden * model.norm.weight
    return lp, ent, hidden, scale, support


def _list_replayed(lay: ModelLayout, pl: PackingPlan, rows: ForwardInput) -> list[Tensor | None]:
    """Return the recorded ids [n, k] of each layer; None: the layer's own routing."""
    layers, shape, routed = lay.hf.model.layers, lay.routing, rows.routed
    if shape is None or routed is None or not any(recorded is not None for recorded in routed):
        return [None] * len(layers)
    lengths = [(len(p), len(r)) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    table = RoutedExperts.make_unrecorded(len(pl.ids), shape).ids
    start = 0
    segments = [(sample, 0, lengths[sample][0]) for sample in pl.first]
    segments += [(sample, lengths[sample][0], sum(lengths[sample]) - 1) for sample in pl.order]
    for sample, begin, end in segments:
        if (recorded := routed[sample]) is not None:
            table[start : start + end - begin] = recorded.ids[begin:end]
        start += end - begin
    by_layer = iter(expert_layers.divide_by_layer(table, pl.ids.device))
    return [next(by_layer) if expert_layers.is_sparse(layer) else None for layer in layers]


def _apply_fixed_block(
    lay: ModelLayout,
    i: int,
    x: Tensor,
    weights: Mapping[str, Tensor],
    turns: Tensor,
    rows: AttentionRows | PackedSequences,
    replayed: Tensor | None = None,
) -> Tensor:
    """Apply layer i to packed tokens x [n, H] with the operators of exact mode."""
    fused = exact_operators.interleave_halves(lay, exact_operators.fuse_layer(lay, i, weights))
    w = {name: t.contiguous() for name, t in fused.items()}
    q, k, v = exact_operators.project(lay, w, x, turns)
    attended = packed_attention.attend_packed(q, k, v, rows)
    return exact_operators.finish(lay, w, x, attended, replayed)
