"""Compare the cost a token of engine and learner for growing lengths and batches with arithmetic.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--quick] [--json] [--longest 8192]

Proves: nothing grows but attention.  The cost a token at a length may exceed the cost at 64
tokens by the additional cost of bare attention over that many keys (only the same products and
softmax, on memory of the same layout, for training the fastest of 1, 8 and 32 blocks of queries
over the keys they see), and by a tenth: `no worse than the arithmetic`.  The engine generates 8,
64 and 512 rows of equal length, measured in windows of its steps; the learner trains the same
number of tokens in rows of each length.  84k parameters, one core, by turns."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from lib import rounds
from lib.learner_batch import config

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.messages import Batch, Trajectory
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from learner.step import LearnerCore

PROMPT = 12
START = 64
WINDOW = 32  # steps that are looked at, up to each length
ENGINE = {8: (64, 1024, 8192), 64: (64, 1024), 512: (64, 256)}  # rows -> lengths
WORSE = 1.1
HEADS, DIM, LAYERS = 4, 16, 2


def seconds(run: Callable[[], Any], least: float = 0.05) -> float:
    """Of one call, by as many as fill `least` seconds."""
    run()
    count = 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < least or not count:
        run()
        count += 1
    return spent / count


def decode_attention(cache: torch.Tensor, rows: int, columns: int) -> Callable[[], Any]:
    """Attention of one decode step in every layer, and nothing else."""
    query = torch.randn(rows * HEADS, 1, DIM)

    def run() -> None:
        for layer in range(LAYERS):
            keys, values = (part[layer, :rows, :, :columns] for part in cache)
            shape = (rows * HEADS, columns, DIM)
            scores = torch.bmm(query, keys.reshape(shape).transpose(1, 2))
            torch.bmm(torch.softmax(scores, -1), values.reshape(shape))

    return run


@torch.inference_mode()
def engine_round(model: policy.PolicyModel, rows: int, lengths: list[int]) -> dict[str, float]:
    """Seconds a step up to each length, of the engine and of bare attention."""
    longest = lengths[-1]
    engine = EmbeddedEngine(model, slots=rows, context=PROMPT + longest, max_new_tokens=longest)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    prompt = np.arange(3, 3 + PROMPT, dtype=np.int32)
    engine.add(
        CompletionRequest((row, 0, 1), prompt, row, longest, 1.0, 1.0, 0, (), 7)
        for row in range(rows)
    )
    steps = []
    while engine.active:
        began = time.perf_counter()
        engine.step(1)
        steps.append(time.perf_counter() - began)
    assert len(steps) == longest
    out = {f"{n}": statistics.fmean(steps[n - WINDOW : n - 1]) for n in lengths}
    cache = torch.randn(2, LAYERS, rows, HEADS, PROMPT + longest, DIM)
    for n in lengths:
        out[f"attention {n}"] = seconds(decode_attention(cache, rows, PROMPT + n))
    return out


def learner_batch(length: int, tokens: int) -> Batch:
    """`tokens` tokens in answers of `length`, in groups of one prompt."""
    r = np.random.default_rng(0)
    samples = []
    prompt = r.integers(3, 23, PROMPT).astype("<i4").tobytes()
    for i in range(max(2, tokens // length)):
        logprobs = (-3.1 + 0.1 * r.standard_normal(length)).astype("<f4").tobytes()
        ids = r.integers(3, 23, length).astype("<i4").tobytes()
        samples.append(
            Trajectory(
                0, i, 1, prompt, ids, logprobs, b"\1" * length, [], float(i % 2), {}, "stop", 1.0
            )
        )
    lags = [[(0, length, 1)] for _ in samples]
    ones = [1] * len(samples)
    return Batch(1, 0, samples, ones, [0] * len(samples), lags, {}, 1, {})


def train_attention(rows: int, length: int, runs: int) -> Callable[[], Any]:
    """Attention of the answers in every layer, forward and backward, and nothing else; `runs` of
    queries, each over the keys that its last one sees."""
    keys = PROMPT + length
    q = torch.randn(rows, length, HEADS, DIM, requires_grad=True)
    k = torch.randn(rows, keys, HEADS, DIM, requires_grad=True)
    v = torch.randn(rows, keys, HEADS, DIM, requires_grad=True)
    bias = torch.zeros(rows, length, keys)
    step = -(-length // runs)

    def attended(first: int) -> torch.Tensor:
        end = min(first + step, length)
        seen = PROMPT + end
        queries, keys_of, values = (
            x.transpose(1, 2) for x in (q[:, first:end], k[:, :seen], v[:, :seen])
        )
        some = bias[:, None, first:end, :seen]
        scores = queries @ keys_of.transpose(2, 3) * DIM**-0.5 + some
        return torch.softmax(scores, -1) @ values

    def run() -> None:
        for _ in range(LAYERS):
            for first in range(0, length, step):
                attended(first).sum().backward()

    return run


def learner_round(core: LearnerCore, batches: dict[int, Batch]) -> dict[str, float]:
    """Seconds a step, and of bare attention, for each length."""
    out = {}
    for length, batch in batches.items():

        def step(batch: Batch = batch) -> None:
            core.state.number = 1  # batch 0 has a pass more, of the reference
            core.train(msgspec.structs.replace(batch, number=1))

        rows = len(batch.samples)
        part = min(rows, max(1, 16384 // (PROMPT + length)), 64)
        out[f"{length}"] = seconds(step)
        ways = [seconds(train_attention(part, length, runs)) for runs in (1, 8, 32)]
        out[f"attention {length}"] = min(ways) * rows / part
    return out


def figures(
    name: str, rows: list[dict[str, float]], tokens: dict[int, int]
) -> list[dict[str, Any]]:
    """Of each length: its cost a token over the cost at the start and what attention adds."""
    start = min(tokens)
    goals = []
    for n in sorted(tokens)[1:]:
        each = []
        times = []
        for row in rows:
            now, then = row[f"{n}"] / tokens[n], row[f"{start}"] / tokens[start]
            grown = row[f"attention {n}"] / tokens[n] - row[f"attention {start}"] / tokens[start]
            each.append(now / (then + grown))
            times.append(now / then)
        goals.append(
            rounds.figure(
                f"{name}: a token at {n} / arithmetic",
                each,
                WORSE,
                at_least=False,
                over_start=round(statistics.median(times), 2),
            )
        )
    return goals


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--longest", type=int, default=8192)
    args = p.parse_args()
    torch.set_num_threads(1)
    rounds.one_core()
    longest = min(args.longest, 512) if args.quick else args.longest
    count = 1 if args.quick else args.rounds
    goals = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "m"
        model = policy.build_model(path, "0123456789abcdefghij", max_positions=16384)
        for rows, lengths in ENGINE.items():
            some = sorted({min(n, longest) for n in lengths})
            found = rounds.quiet(
                count, lambda _, rows=rows, some=some: engine_round(model, rows, some)
            )
            goals += figures(f"engine, {rows} rows", found, dict.fromkeys(some, rows))
            details[f"engine {rows}"] = found
        batches = {
            n: learner_batch(n, longest) for n in sorted({START, min(1024, longest), longest})
        }
        core = LearnerCore(config(path), path)
        found = rounds.quiet(count, lambda _: learner_round(core, batches))
        trained = {n: n * len(batch.samples) for n, batch in batches.items()}
        goals += figures("learner", found, trained)
        details["learner"] = found
    what = "cost a token against the start and bare attention, one core"
    rounds.report("growth", goals, {"what": what, "runs": details}, args)


if __name__ == "__main__":
    main()
