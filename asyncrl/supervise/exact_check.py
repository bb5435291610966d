"""Does exact mode hold on this machine?  The engine writes answers, the learner computes their
logprobs again, and bits are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import exact_operators, policy
from asyncrl.models.policy import PolicyModel


@dataclass
class ExactCheckRow:
    """One line of the table: cases compared, values that differ, the largest difference."""

    operator: str
    cases: int
    values: int
    differ: int
    largest: float

    @property
    def ok(self) -> bool:
        return self.differ == 0


def _compare(name: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> ExactCheckRow:
    differ = 0
    largest = 0.0
    for one, other in pairs:
        differ += int((one != other).sum())
        largest = max(largest, float((one - other).abs().max()))
    return ExactCheckRow(name, len(pairs), sum(one.numel() for one, _ in pairs), differ, largest)


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
    """Answers of the embedded engine, entering and leaving its batch, against packed forwards of
    `micro` samples.

    threads: of the engine and of the learner.  Raises ConfigError for a model that only the plain
    path can run."""
    from actors.engine import CompletionRequest
    from actors.engine_embedded import EmbeddedEngine

    if model.fast is None:
        raise ConfigError(
            f"exact: models of type {model.hf.config.model_type} run by transformers alone, which "
            "exact mode does not cover; set exact = false"
        )
    before = torch.get_num_threads()
    was = model.exact
    try:
        torch.set_num_threads(threads[0])
        engine = EmbeddedEngine(
            model, slots=slots, context=context, max_new_tokens=longest, fixed=True
        )
        engine.load(dict(policy.named_weights(model)), Label(1, 0), "check")
        draw = np.random.default_rng(seed)
        vocab = model.hf.config.vocab_size
        prompts = [
            draw.integers(0, vocab, n).astype(np.int32)
            for n in draw.integers(1, context - longest, 10)
        ]
        requests = [
            CompletionRequest(
                (t, s, 1),
                p,
                t,
                int(draw.integers(1, longest + 1)),
                temperature=(1.0, 0.7, 1.3)[t % 3],
                top_p=1.0,
                top_k=0,
                stop=(1,),
                seed=seed,
            )
            for t, p in enumerate(prompts)
            for s in range(4)
        ]
        answers = []
        for at in range(0, len(requests), 5):
            engine.add(requests[at : at + 5])
            answers += engine.step(2)
        while engine.active:
            answers += engine.step(3)
        torch.set_num_threads(threads[1])
        model.exact = True
        temperature = {q.key: q.temperature for q in requests}
        pairs = []
        for at in range(0, len(answers), micro):
            part = answers[at : at + micro]
            scale = torch.tensor([temperature[a.key] for a in part])
            with torch.no_grad():
                out = model.logprobs(
                    [a.prompt for a in part],
                    [a.tokens for a in part],
                    scale,
                    groups=[a.key[0] for a in part],
                    want_entropy=at % 2 == 0,
                )
            pairs.append(
                (torch.from_numpy(np.concatenate([a.logprobs for a in part])), out.logprobs)
            )
        return _compare("engine = learner", pairs)
    finally:
        torch.set_num_threads(before)
        model.exact = was


SHAPES = (16, 32, 48, 256, 1024)  # rows: of a decode step, and of packed micro-batches
POSITIONS = 64  # that the check of attention looks at, at most


def operators(
    model: PolicyModel, threads: tuple[int, int] = (1, 1), seed: int = 0, context: int = 512
) -> list[ExactCheckRow]:
    """Each operator on the same 16 rows alone and among 32 to 1024 others (attention: decoded and
    in a full forward, over up to `context` keys).
    """
    lay = model.fast
    if lay is None:
        raise ConfigError(
            f"exact: models of type {model.hf.config.model_type} run by transformers alone, which "
            "exact mode does not cover; set exact = false"
        )
    weights = {n: p.detach().float().cpu() for n, p in model.hf.named_parameters()}
    fused = {k: v.contiguous() for k, v in exact_operators.fuse_layer(lay, 0, weights).items()}
    head = exact_operators.fuse_top(weights, "lm_head.weight" not in weights)["head"].contiguous()
    source = torch.Generator().manual_seed(seed)
    big = torch.randn(max(SHAPES), fused["qkv"].shape[0], generator=source)
    inner = torch.randn(max(SHAPES), fused["down"].shape[0], generator=source)
    heads = torch.randn(max(SHAPES), fused["o"].shape[0], generator=source)
    logits = torch.randn(max(SHAPES), head.shape[1], generator=source) * 3
    table: list[tuple[str, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("norm", big, lambda x: exact_operators.unit(x, lay.eps)),
        ("qkv", big, lambda x: x @ fused["qkv"]),
        ("output", heads, lambda x: x @ fused["o"]),
        ("gate, up", big, lambda x: x @ fused["up"]),
        ("silu", inner, F.silu),
        ("down", inner, lambda x: x @ fused["down"]),
        ("head", big, lambda x: exact_operators.times(x, head)),
        ("log-softmax", logits, lambda x: torch.log_softmax(x, -1)),
    ]
    before = torch.get_num_threads()
    out = []
    try:
        for name, inputs, operator in table:
            torch.set_num_threads(threads[0])
            alone = operator(inputs[:16].clone())
            torch.set_num_threads(threads[1])
            out.append(
                _compare(
                    name,
                    [
                        (
                            alone,
                            operator(
                                torch.cat([inputs[16 : 16 + i], inputs[:16], inputs[16 + i : n]])
                            )[i : i + 16],
                        )
                        for n in SHAPES[1:]
                        for i in (0, 5, n - 16)
                    ],
                )
            )
        out.append(_attention(lay, threads, source, context))
    finally:
        torch.set_num_threads(before)
    return out


def _attention(
    lay: Any, threads: tuple[int, int], source: torch.Generator, context: int
) -> ExactCheckRow:
    """One query over its keys, padded as in decoding, against queries at up to POSITIONS positions
    of a sequence of `context` at once.
    """
    share = lay.heads // lay.kv_heads
    width = exact_operators.round_up(context, exact_operators.KEYS)
    at = torch.linspace(0, width - 1, min(POSITIONS, width)).long()
    queries, keys, values = (
        torch.randn(lay.kv_heads, n, lay.head_dim, generator=source)
        for n in (share * len(at), width, width)
    )
    bias = torch.zeros(len(at), width)
    bias.masked_fill_(torch.arange(width) > at[:, None], exact_operators.MASKED)
    torch.set_num_threads(threads[1])
    full = exact_operators.attend(queries[None], keys, values, bias.repeat(share, 1)).view(
        lay.kv_heads, share, len(at), lay.head_dim
    )
    torch.set_num_threads(threads[0])
    pairs = []
    space = exact_operators.one_query_space(lay, 1, queries)
    keys, values = (
        t.view(space.shape[1], -1, width, lay.head_dim).transpose(1, 2).flatten(2)
        for t in (keys, values)
    )
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as the engine's cache has them
    for number, position in enumerate(at.tolist()):
        seen = exact_operators.round_up(position + 1, exact_operators.KEYS)
        one = queries.view(1, lay.heads, len(at), -1)[:, :, number]
        found = exact_operators.attend_one(
            one, keys[:, :seen], values[:, :seen], bias[number, :seen], space
        )
        pairs.append((found.view(lay.kv_heads, share, -1), full[:, :, number]))
    return _compare("attention", pairs)


def check(config: Config) -> list[ExactCheckRow]:
    """The whole self-test for a config's own model, lengths and threads."""
    model = policy.load_policy(Path(config.model.path), config.model.dtype, config.model.device)
    generator = config.generator
    threads = (config.generator.threads, config.learner.threads)
    if model.device.type != "cpu":
        raise ConfigError(
            f"exact: holds for fp32 on a CPU only, and model.device = {config.model.device} is "
            f"{model.device}; set model.device = cpu"
        )
    longest = min(generator.max_new_tokens, 48)
    context = min(generator.context, longest + 64)
    rows = operators(model, threads, context=generator.context)
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


def failure(rows: Sequence[ExactCheckRow]) -> str:
    """Empty when every row agrees; else what differs, in words."""
    bad = [r for r in rows if not r.ok]
    return ", ".join(
        f"{r.operator} ({r.differ} of {r.values} values differ, by up to {r.largest:.1e})"
        for r in bad
    )


def table(rows: Sequence[ExactCheckRow]) -> str:
    """The rows for a reader."""
    lines = [f"{'operator':18} {'cases':>6} {'values':>8} {'differ':>7}  largest"]
    return "\n".join(
        lines
        + [
            f"{r.operator:18} {r.cases:6} {r.values:8} {r.differ:7}  "
            f"{'bitwise equal' if r.ok else f'{r.largest:.1e}'}"
            for r in rows
        ]
    )


def small_models() -> list[ExactCheckRow]:
    """The self-test without a config: small models of several shapes, built for it."""
    out: list[ExactCheckRow] = []
    for family, kv, tied in (
        ("qwen3", 4, True),
        ("qwen3", 2, False),
        ("llama", 1, True),
        ("qwen2", 2, False),
    ):
        with tempfile.TemporaryDirectory() as place:
            model = policy.build_model(
                place, "abcdefgh", family=family, kv_heads=kv, tied=tied, seed=3
            )
        name = f"{family} 4/{kv} {'tied' if tied else 'untied'}"
        out = _merge_rows(out, [*operators(model), replace(check_generation(model), operator=name)])
    return out


def _merge_rows(have: list[ExactCheckRow], more: Sequence[ExactCheckRow]) -> list[ExactCheckRow]:
    by_name = {row.operator: row for row in have}
    for row in more:
        if (known := by_name.get(row.operator)) is not None:
            row = ExactCheckRow(
                row.operator,
                known.cases + row.cases,
                known.values + row.values,
                known.differ + row.differ,
                max(known.largest, row.largest),
            )
        by_name[row.operator] = row
    return list(by_name.values())
