"""The self-test of exact mode: check that engine and learner agree bitwise on this machine.

The engine generates completions, the learner recomputes their logprobs, and the bits are compared.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.config.tree import Config
from asyncrl.contract.blobs.images import encode_png
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import exact_operators, expert_layers, policy
from asyncrl.models.policy import PolicyModel
from asyncrl.records.page_kit import TableBlock


@dataclass
class ExactCheckRow:
    """A row of the table: an operator and the comparison of its two results."""

    operator: str
    cases: int
    values: int
    differ: int  # number of values that differ
    largest: float  # largest absolute difference


def _compare(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> ExactCheckRow:
    differ = 0
    largest = 0.0
    for first, second in pairs:
        differ += int((first != second).sum())
        largest = max(largest, float((first - second).abs().max()))
    return ExactCheckRow(
        name, len(pairs), sum(first.numel() for first, _ in pairs), differ, largest
    )


def check_generation(
    model: PolicyModel,
    *,
    slots: int = 24,
    longest: int = 24,
    context: int = 64,
    threads: tuple[int, int] = (1, 1),
    seed: int = 0,
    micro: int = 7,
) -> ExactCheckRow:
    """Compare the embedded engine's logprobs with packed forwards of `micro` samples.

    For a model with images, compare the general engine with the plain path.  Completions enter and
    leave the engine's batch at different steps.  threads: of the engine and of the learner.  Raises
    ConfigError for a model that exact mode does not cover."""
    from actors.engine import CompletionRequest, Engine
    from actors.engine_embedded import EmbeddedEngine
    from actors.engine_generic import GenericEngine

    _require_covered(model)
    previous_threads = torch.get_num_threads()
    previous_exact = model.exact, model.exact_length
    try:
        torch.set_num_threads(threads[0])
        engine_class: Any = GenericEngine if model.fast is None else EmbeddedEngine
        engine: Engine = engine_class(
            model, slots=slots, context=context, max_new_tokens=longest, fixed=True
        )
        engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "check")
        random = np.random.default_rng(seed)
        prompts = [
            _sample_prompt(model, random, int(n), number)
            for number, n in enumerate(random.integers(1, context - longest, 10))
        ]
        requests = [
            CompletionRequest(
                (t, s, 1),
                p,
                t,
                int(random.integers(1, longest + 1)),
                temperature=(1.0, 0.7, 1.3)[t % 3],
                top_p=(1.0, 0.8, 1.0, 0.9)[s],
                top_k=(0, 0, 20, 5)[s],
                stop=(1,),
                seed=seed,
                images=images,
            )
            for t, (p, images) in enumerate(prompts)
            for s in range(4)
        ]
        completions = []
        for first in range(0, len(requests), 5):
            engine.add(requests[first : first + 5])
            completions += engine.step(2)
        while engine.active:
            completions += engine.step(3)
        torch.set_num_threads(threads[1])
        model.exact, model.exact_length = True, context
        temperature = {q.key: q.temperature for q in requests}
        pairs = []
        for first in range(0, len(completions), micro):
            batch = completions[first : first + micro]
            scale = torch.tensor([temperature[a.key] for a in batch])
            with torch.no_grad():
                recomputed = model.logprobs(
                    [a.prompt for a in batch],
                    [a.tokens for a in batch],
                    scale,
                    groups=[a.key[0] for a in batch],
                    want_entropy=first % 2 == 0,
                    supports=[a.support for a in batch],
                    images=[prompts[a.key[0]][1] for a in batch],
                )
            pairs.append(
                (torch.from_numpy(np.concatenate([a.logprobs for a in batch])), recomputed.logprobs)
            )
        return _compare("engine = learner", pairs)
    finally:
        torch.set_num_threads(previous_threads)
        model.exact, model.exact_length = previous_exact


def _require_covered(model: PolicyModel) -> None:
    """Raise ConfigError for a model that exact mode does not cover."""
    if model.fast is None and model.vision is None:
        raise ConfigError(
            f"exact: models of type {model.hf.config.model_type} only run through transformers, "
            "which exact mode does not cover; set exact = false"
        )


def _sample_prompt(
    model: PolicyModel, random: np.random.Generator, length: int, number: int
) -> tuple[np.ndarray, tuple[bytes, ...]]:
    """Return a prompt of random tokens, int32 [P], and its images.

    With a model that reads images, every second prompt that is long enough starts with one."""
    vocab = model.hf.config.get_text_config().vocab_size
    ids = random.integers(0, vocab, length).astype(np.int32)
    if model.vision is None:
        return ids, ()
    token, size = model.vision.shape
    ids[ids == token] = (token + 1) % vocab
    if number % 2 or length < size:
        return ids, ()
    ids[:size] = token
    return ids, (encode_png(8, 8, random.bytes(3 * 8 * 8)),)


Operator = tuple[str, Tensor, Callable[[Tensor], Tensor]]
SHAPES = (16, 32, 48, 256, 1024)  # rows of a decode step and of packed micro-batches
POSITIONS = 64  # most query positions of attention that are checked


def check_operators(
    model: PolicyModel, threads: tuple[int, int] = (1, 1), context: int = 512
) -> list[ExactCheckRow]:
    """Compare each operator on 16 rows alone and among 32 to 1024 rows.

    Attention is compared between decoding and a full forward, over up to `context` keys.  A model
    without a packed forward has no such operators.  Raises ConfigError for a model that exact mode
    does not cover."""
    _require_covered(model)
    lay = model.fast
    if lay is None:
        return []
    weights = {n: p.detach().float().cpu() for n, p in model.hf.named_parameters()}
    fused = {k: v.contiguous() for k, v in exact_operators.fuse_layer(lay, 0, weights).items()}
    head = exact_operators.fuse_top(weights, "lm_head.weight" not in weights)["head"].contiguous()
    source = torch.Generator().manual_seed(0)
    big = torch.randn(max(SHAPES), fused["qkv"].shape[0], generator=source)
    heads = torch.randn(max(SHAPES), fused["o"].shape[0], generator=source)
    logits = torch.randn(max(SHAPES), head.shape[1], generator=source) * 3
    table: list[Operator] = [
        ("norm", big, lambda x: exact_operators.normalize(x, lay.eps)),
        ("qkv", big, lambda x: x @ fused["qkv"]),
        ("output", heads, lambda x: x @ fused["o"]),
        *_list_feed_forward(lay, fused, big, source),
        ("head", big, lambda x: exact_operators.multiply(x, head)),
        ("log-softmax", logits, lambda x: torch.log_softmax(x, -1)),
    ]
    previous_threads = torch.get_num_threads()
    rows = []
    try:
        for name, inputs, operator in table:
            torch.set_num_threads(threads[0])
            alone = operator(inputs[:16].clone())
            torch.set_num_threads(threads[1])
            pairs = []
            for count in SHAPES[1:]:
                for at in (0, 5, count - 16):
                    moved = [inputs[16 : 16 + at], inputs[:16], inputs[16 + at : count]]
                    pairs.append((alone, operator(torch.cat(moved))[at : at + 16]))
            rows.append(_compare(name, pairs))
        rows.append(_check_attention(lay, threads, source, context))
    finally:
        torch.set_num_threads(previous_threads)
    return rows


def _list_feed_forward(
    lay: Any, fused: dict[str, Tensor], big: Tensor, source: torch.Generator
) -> list[Operator]:
    """Return the operators after attention: those of an MLP, or router and experts."""
    if "router" in fused:
        weights = expert_layers.ExpertWeights(fused["router"], fused["up"], fused["down"])

        def apply_experts(states: Tensor) -> Tensor:
            logits = exact_operators.multiply(states, weights.router)
            rows = exact_operators.ROWS
            return expert_layers.apply(states, weights, lay.experts, logits=logits, rows=rows)

        return [
            ("router", big, lambda x: exact_operators.multiply(x, weights.router)),
            ("experts", big, apply_experts),
        ]
    inner = torch.randn(max(SHAPES), fused["down"].shape[0], generator=source)
    return [
        ("gate, up", big, lambda x: x @ fused["up"]),
        ("silu", inner, F.silu),
        ("down", inner, lambda x: x @ fused["down"]),
    ]


def _check_attention(
    lay: Any, threads: tuple[int, int], source: torch.Generator, context: int
) -> ExactCheckRow:
    """Compare attention of one query, as in decoding, with that of many queries at once.

    The queries are at up to POSITIONS positions of a sequence of `context` tokens."""
    share = lay.heads // lay.kv_heads
    width = exact_operators.round_up(context, exact_operators.KEYS)
    positions = torch.linspace(0, width - 1, min(POSITIONS, width)).long()
    queries, keys, values = (
        torch.randn(lay.kv_heads, n, lay.head_dim, generator=source)
        for n in (share * len(positions), width, width)
    )
    bias = torch.zeros(len(positions), width)
    bias.masked_fill_(torch.arange(width) > positions[:, None], exact_operators.MASKED)
    torch.set_num_threads(threads[1])
    full = exact_operators.attend(queries[None], keys, values, bias.repeat(share, 1)).view(
        lay.kv_heads, share, len(positions), lay.head_dim
    )
    torch.set_num_threads(threads[0])
    pairs = []
    for number, position in enumerate(positions.tolist()):
        visible = exact_operators.round_up(position + 1, exact_operators.KEYS)
        query = queries.view(1, lay.kv_heads, share, len(positions), -1)[:, :, :, number]
        decoded = exact_operators.attend(
            query, keys[:, :visible], values[:, :visible], bias[number, :visible]
        )
        pairs.append((decoded.view(lay.kv_heads, share, -1), full[:, :, number]))
    return _compare("attention", pairs)


def check(config: Config) -> list[ExactCheckRow]:
    """Run the self-test with a config's model, lengths and threads.

    Raises ConfigError on a device other than the CPU, or for a model that exact mode does not
    cover."""
    model = policy.load_policy(Path(config.model.path), config.model.dtype, config.model.device)
    generator = config.generator
    threads = (config.generator.threads, config.learner.threads)
    if model.device.type != "cpu":
        raise ConfigError(
            f"exact: only holds for fp32 on a CPU, and model.device = {config.model.device} is "
            f"{model.device}; set model.device = cpu"
        )
    longest = min(generator.max_new_tokens, 48)
    context = min(generator.context, longest + 64)
    rows = check_operators(model, threads, context=generator.context)
    return rows + [
        check_generation(
            model,
            slots=min(generator.slots, 64),
            longest=longest,
            context=context,
            threads=threads,
            micro=n,
            seed=n,
        )
        for n in (1, 5, 16)
    ]


def describe_failure(rows: Sequence[ExactCheckRow]) -> str:
    """Describe the rows that differ, or return "" if all agree."""
    return ", ".join(
        f"{r.operator} ({r.differ} of {r.values} values differ, by up to {r.largest:.1e})"
        for r in [r for r in rows if r.differ]
    )


def format_table(rows: Sequence[ExactCheckRow]) -> str:
    """Format the rows as a text table."""
    cells = [
        [
            *(row.operator, f"{row.cases}", f"{row.values}", f"{row.differ}"),
            f"{row.largest:.1e}" if row.differ else "bitwise equal",
        ]
        for row in rows
    ]
    return TableBlock(("operator", "cases", "values", "differ", "largest"), cells).as_text()


def check_small_models() -> list[ExactCheckRow]:
    """Run the self-test without a config, on small models of several shapes."""
    by_name: dict[str, ExactCheckRow] = {}
    for family, kv, tied in (
        ("qwen3", 4, True),
        ("qwen3", 2, False),
        ("llama", 1, True),
        ("qwen2", 2, False),
        ("qwen3_moe", 2, True),
    ):
        with tempfile.TemporaryDirectory() as directory:
            model = policy.build_model(
                directory, "abcdefgh", family=family, kv_heads=kv, tied=tied, seed=3
            )
        name = f"{family} 4/{kv} {'tied' if tied else 'untied'}"
        for row in (*check_operators(model), replace(check_generation(model), operator=name)):
            if previous := by_name.get(row.operator):  # of another model
                row.cases += previous.cases
                row.values += previous.values
                row.differ += previous.differ
                row.largest = max(row.largest, previous.largest)
            by_name[row.operator] = row
    return list(by_name.values())
