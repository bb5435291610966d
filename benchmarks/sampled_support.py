"""Bytes and CPU time a token of the support that top-p and top-k leave, in engine and learner.

    asyncrl model get smollm2 models/smollm2
    OMP_NUM_THREADS=1 python benchmarks/sampled_support.py models/smollm2 [--quick] [--json]

Measures the tiny model of the demo's task and the given model: completions with top_p = 0.8, with
top_k = 20 and with the whole distribution; the engine with and without the record, and the
learner's forward and backward pass with and without the renormalization. Times are those of the
process; ways are taken by turns, and the least of each counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import results_file

from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.tasks.synthetic import SortTask

WAYS = {"whole": (1.0, 0), "top_p 0.8": (0.8, 0), "top_k 20": (1.0, 20)}
ROWS = 16
PROMPT = "Once upon a time there was a small village near the sea, and"


def complete(
    model: policy.PolicyModel,
    way: tuple[float, int],
    length: int,
    record: bool,
) -> tuple[float, list[Completion]]:
    """CPU seconds of sampling ROWS completions, and the completions."""
    engine = EmbeddedEngine(model, slots=ROWS, context=length + 80, max_new_tokens=length)
    if not record:
        engine.record_kept = lambda masks, made: None  # type: ignore[method-assign]
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    ids = load_tokenizer(model.tokenizer_dir).encode(PROMPT)
    prompt = np.array(ids or range(5, 13), np.int32)
    engine.add(
        CompletionRequest((0, s, 1), prompt, 0, length, 1.0, *way, stop=(), seed=3)
        for s in range(ROWS)
    )
    began = time.process_time()
    found: list[Completion] = []
    while engine.active:
        found += engine.step(8)
    return time.process_time() - began, found


def learn(model: policy.PolicyModel, found: list[Completion], support: bool) -> float:
    """CPU seconds of a forward and backward pass over the completions."""
    supports = [a.support for a in found] if support else None
    began = time.process_time()
    out = model.logprobs(
        [a.prompt for a in found],
        [a.tokens for a in found],
        torch.ones(len(found)),
        groups=[0] * len(found),
        supports=supports,
    )
    out.logprobs.sum().backward()
    seconds = time.process_time() - began
    model.hf.zero_grad()
    return seconds


def least(times: int, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The least seconds of each, taken by turns."""
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(times):
        for name, run in ways.items():
            seen[name].append(run())
    return {name: min(seconds) for name, seconds in seen.items()}


def measure(model: policy.PolicyModel, length: int, times: int) -> dict[str, Any]:
    """Figures by way: bytes and kept tokens, and CPU microseconds a token."""
    out: dict[str, Any] = {}
    for name, way in WAYS.items():
        found = complete(model, way, length, True)[1]
        tokens = sum(len(a.tokens) for a in found)
        supports = [a.support for a in found if a.support is not None]
        kept = np.concatenate([s.sizes for s in supports]) if supports else np.zeros(1)
        ways: dict[str, Callable[[], float]] = {
            "engine": lambda way=way: complete(model, way, length, True)[0],
            "engine, no record": lambda way=way: complete(model, way, length, False)[0],
            "learner": lambda found=found: learn(model, found, True),
            "learner, no support": lambda found=found: learn(model, found, False),
        }
        out[name] = {
            "bytes": sum(len(a.support_bytes) for a in found) / tokens,
            "kept_mean": float(kept.mean()),
            "kept_max": int(kept.max()),
            "us": {k: 1e6 * s / tokens for k, s in least(times, ways).items()},
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of a model, for example SmolLM2")
    parser.add_argument("--quick", action="store_true", help="short completions, one turn")
    parser.add_argument("--json", action="store_true", help="write a result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    result = {}
    with tempfile.TemporaryDirectory() as made:
        policy.build_model(made, SortTask.symbols, kv_heads=2)
        for name, path in (("demo", made), (Path(args.model).name, args.model)):
            model = policy.load_policy(path, "float32", "cpu")
            length = 16 if args.quick else 48
            found = measure(model, length, 1 if args.quick else 3)
            result[name] = {"vocabulary": int(model.hf.config.vocab_size), "ways": found}
            for way, row in found.items():
                times = ", ".join(f"{k} {us:.0f}" for k, us in row["us"].items())
                print(
                    f"{name}, {way}: {row['bytes']:.1f} bytes a token, {row['kept_mean']:.1f} "
                    f"tokens kept (most {row['kept_max']}); us a token: {times}"
                )
    if args.json:
        print(results_file.write("sampled_support", result))
    else:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
