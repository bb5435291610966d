"""What generator.quantize costs and changes: swaps, products and the mismatch by format.

    OMP_NUM_THREADS=1 python benchmarks/low_precision.py MODEL [--quick] [--json]

MODEL is the directory of a model of the packed forward, for example `models/sort` after `asyncrl
run demo`. Measured by turns, five rounds: CPU seconds of `load` with the weights as they arrive and
rounded to int8 and fp8; of one linear layer of 1024 x 1024 with 8 inputs in float32, by torch's
int8 product, and in float32 from int8 or fp8 codes that are cast at each product. Then k3 between
the engine and the learner at equal weights, with and without `learner.shared_rounding`.

Goal: a swap with rounding takes at most 3 times the CPU time of one without."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lib import results_file

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy
from asyncrl.models.weight_rounding import quantize_rows, share_rounding

WAYS = ("none", "int8", "fp8")
GOAL = 3.0  # CPU time of a swap with rounding, in swaps without
INPUTS, WIDTH = 8, 1024


def by_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each, one call a round, after one call that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for counted in range(rounds + 1):
        for name, call in ways.items():
            began = time.process_time()
            call()
            if counted:
                seconds[name].append(time.process_time() - began)
    return seconds


def products() -> dict[str, Callable[[], Any]]:
    """Return the ways to multiply with one linear layer."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, generator=source)
    inputs = torch.randn(INPUTS, WIDTH, generator=source)
    whole, _ = quantize_rows(weight, "int8")
    small, _ = quantize_rows(weight, "fp8")
    codes, _ = quantize_rows(inputs, "int8")
    return {
        "float32": lambda: inputs @ weight.T,
        "int8 product": lambda: torch._int_mm(codes, whole.T),
        "int8 cast at each product": lambda: inputs @ whole.float().T,
        "fp8 cast at each product": lambda: inputs @ small.float().T,
    }


def mismatch(path: str, way: str, tokens: int) -> dict[str, float]:
    """k3 of the learner without and with the engine's rounding, nats a token."""
    model = policy.load_policy(path, "float32", "cpu")
    engine = EmbeddedEngine(
        model, slots=64, context=tokens + 16, max_new_tokens=tokens, quantize=way
    )
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    prompt = np.arange(5, 13, dtype=np.int32)
    engine.add(
        CompletionRequest((0, s, 1), prompt, 0, tokens, 1.0, 1.0, 0, stop=(), seed=3)
        for s in range(64)
    )
    found = []
    while engine.active:
        found += engine.step(8)
    recorded = torch.from_numpy(np.concatenate([a.logprobs for a in found]))
    k3 = {}
    for name in ("alone", "shared"):
        if name == "shared" and way != "none":
            share_rounding(model, way)
        with torch.no_grad():
            learner = model.logprobs(
                [a.prompt for a in found],
                [a.tokens for a in found],
                torch.ones(len(found)),
                groups=[0] * len(found),
            ).logprobs
        ratio = (learner - recorded).double()
        k3[name] = float((ratio.exp() - 1 - ratio).mean())
    return k3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of a model, for example models/sort")
    parser.add_argument("--quick", action="store_true", help="one round: shows that it works")
    parser.add_argument("--json", action="store_true", help="write a result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    rounds = 1 if args.quick else 5
    model = policy.load_policy(args.model, "float32", "cpu")
    weights = dict(policy.list_named_weights(model))
    engines = {
        way: EmbeddedEngine(model, slots=1, context=32, max_new_tokens=8, quantize=way)
        for way in WAYS
    }
    swaps = by_turns(
        {
            way: lambda engine=engine: engine.load(weights, Label(1, 0), "d")
            for way, engine in engines.items()
        },
        rounds,
    )
    layer = by_turns(products(), rounds)
    medians = {way: statistics.median(seconds) for way, seconds in swaps.items()}
    ratios = {way: medians[way] / medians["none"] for way in WAYS[1:]}
    result = {
        "parameters": sum(p.numel() for p in model.hf.parameters()),
        "swap_cpu_s": swaps,
        "product_cpu_s": layer,
        "swap_ratio": ratios,
        "k3": {way: mismatch(args.model, way, 8 if args.quick else 32) for way in WAYS},
        "goal": f"a swap with rounding takes at most {GOAL:g} times the CPU time of one without",
        "met": max(ratios.values()) <= GOAL,
    }
    for way, ratio in ratios.items():
        print(f"swap with {way}: {ratio:.2f} times one without (goal: at most {GOAL:g})")
    for name, seconds in layer.items():
        print(f"{name}: {1e6 * statistics.median(seconds):.0f} us of CPU")
    for way, k3 in result["k3"].items():
        print(f"k3, {way}: {k3['alone']:.2e}, with shared rounding {k3['shared']:.2e}")
    if args.json and not args.quick:
        print(results_file.write("low_precision", result))
    elif args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
