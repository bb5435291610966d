"""Compare the embedded engine with transformers on prompts of 8k to 32k tokens.

    OMP_NUM_THREADS=1 python benchmarks/long_prompts.py [--quick] [--json]

transformers computes its forward pass with sdpa attention, a dynamic cache and the logits of the
last token alone, and then decodes one token at a time: a plain loop without `generate`.  Both run
by turns on one thread, with the same random weights, and are compared by the CPU time of the
process.

Prefill: the time until the first token is sampled.  Goal: at most that of transformers.  Decode:
further tokens behind the prompt, whose time is that of a run with them less that of one without.
Goal: at least 0.9 of transformers' speed behind the same prompt.  Memory: the growth of the peak
resident memory per token of the prompt at the longest prompt over that at the shortest, each in a
process of its own.  Goal: at most 1.2, which is linear."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import rounds
from transformers import AutoModelForCausalLM

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy

SYMBOLS = "abcdefghijklmnopqrst"
SIZES: dict[str, dict[str, Any]] = {
    "84k": {"hidden": 64, "layers": 2, "heads": 4},
    "2.6M": {"hidden": 256, "layers": 4, "heads": 8},
}
LENGTHS = {"84k": (8192, 16384, 32768), "2.6M": (8192,)}
MORE = 64  # tokens decoded behind the prompt


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(7).integers(3, 3 + len(SYMBOLS), length).astype(np.int32)


def by_engine(model: policy.PolicyModel, prompt: np.ndarray, tokens: int) -> Callable[[], None]:
    """Sample `tokens` tokens behind a prompt."""
    engine = EmbeddedEngine(model, slots=1, context=len(prompt) + tokens, max_new_tokens=tokens)
    weights = dict(policy.list_named_weights(model))

    def run() -> None:
        engine.load(weights, Label(1, 0), "d")
        engine.add([CompletionRequest((0, 0, 1), prompt, 0, tokens, 1.0, 1.0, 0, (), 7)])
        while engine.active:
            engine.step()

    return run


def by_transformers(model: torch.nn.Module, prompt: np.ndarray, tokens: int) -> Callable[[], None]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]

    @torch.inference_mode()
    def run() -> None:
        out = model(ids, use_cache=True, logits_to_keep=1)
        for number in range(tokens):
            logs = out.logits[:, -1].float().log_softmax(-1)
            token = torch.multinomial(logs.exp(), 1)
            if number + 1 < tokens:
                out = model(token, past_key_values=out.past_key_values, use_cache=True)

    return run


def decode_speedups(times: rounds.Times) -> list[float]:
    """Of each round, transformers' time for the further tokens over the engine's."""
    each = []
    for engine, engine_more, rival, rival_more in zip(
        *(times[name] for name in ("engine", "engine, more", "rival", "rival, more")), strict=True
    ):
        each.append((rival_more[1] - rival[1]) / max(engine_more[1] - engine[1], 1e-9))
    return each


def grown(length: int) -> float:
    """Return the bytes per token by which a prompt raises the peak memory of a new process."""
    argv = [sys.executable, __file__, "--memory-of", str(length)]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def measure_memory(length: int) -> float:
    with tempfile.TemporaryDirectory() as path:
        model = policy.build_model(
            Path(path), SYMBOLS, max_positions=LENGTHS["84k"][-1] + MORE, **SIZES["84k"]
        )
        by_engine(model, prompt_of(64), 2)()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = kib("VmRSS")
        by_engine(model, prompt_of(length), 2)()
        return 1024 * (kib("VmHWM") - before) / length


def kib(what: str) -> int:
    """Return a line of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{what}:")))


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--memory-of", type=int, default=0, help="print bytes a token, and no more")
    args = p.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    if args.memory_of:
        print(measure_memory(args.memory_of))
        return
    goals, details = [], {}
    for size, shape in SIZES.items():
        lengths = (1024,) if args.quick else LENGTHS[size]
        with tempfile.TemporaryDirectory() as path:
            model = policy.build_model(
                Path(path), SYMBOLS, max_positions=max(lengths) + MORE, **shape
            )
            rival = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
            for length in lengths:
                prompt = prompt_of(length)
                times = rounds.interleave(
                    {
                        "engine": by_engine(model, prompt, 1),
                        "rival": by_transformers(rival, prompt, 1),
                        "engine, more": by_engine(model, prompt, 1 + MORE),
                        "rival, more": by_transformers(rival, prompt, 1 + MORE),
                    },
                    2 if args.quick else 5,
                )
                name = f"{size}, {length} tokens"
                goals += [
                    rounds.figure(
                        f"prefill, {name}: time over transformers'",
                        rounds.speedups(times, "rival", "engine", 1),
                        1.0,
                        at_least=False,
                    ),
                    rounds.figure(
                        f"decode behind it, {name}: speed over transformers'",
                        decode_speedups(times),
                        0.9,
                        at_least=True,
                    ),
                ]
                details[name] = times
    shortest, longest = LENGTHS["84k"][0], LENGTHS["84k"][-1]
    by_token = {str(length): grown(length) for length in (shortest, longest)}
    growth = by_token[str(longest)] / by_token[str(shortest)]
    goals.append(rounds.goal("memory a token, longest over shortest", growth, 1.2, at_least=False))
    rounds.report("long_prompts", goals, details | {"bytes_a_token": by_token}, args)


if __name__ == "__main__":
    main()
