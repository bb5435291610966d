"""Compare the embedded engine with transformers' `generate` and a plain decode loop, on one core.

`generate` runs with eager and sdpa attention, dynamic and static cache.

    OMP_NUM_THREADS=1 python benchmarks/engine.py [--quick] [--json] [--sizes 84k 332k 2.6M]

Proves: with completions of very different length (the longest three times the mean, ten or more a
slot) at least twice the speed of `generate`; at equal lengths a static batch is not faster
(within 10 %).  Lengths are fixed and the same for all: the engine ends a row by its limit,
`generate` by a stopping criterion for each row, so that it also stops as early as possible.  The
rival is the best `generate` for that size of model and those lengths: over both attention
implementations, both caches and several batch sizes, by a short run of each; then both run by
turns.  All sample at temperature 1 from the same random weights, with the same malloc."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import rounds
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy

SIZES: dict[str, tuple[dict[str, int], int]] = {  # build_model's arguments, slots
    "84k": ({"hidden": 64, "layers": 2, "heads": 4}, 256),
    "332k": ({"hidden": 128, "layers": 2, "heads": 4}, 256),
    "2.6M": ({"hidden": 256, "layers": 4, "heads": 8}, 64),
}
PROMPT = 12
MOST = 48
GROUP = 8
A_SLOT = 10


class Lengths(StoppingCriteria):  # type: ignore[misc]
    """Row i is done after its own number of tokens."""

    def __init__(self, lengths: torch.Tensor, prompt: int) -> None:
        self.lengths = lengths
        self.prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        done: torch.Tensor = (input_ids.shape[1] - self.prompt) >= self.lengths
        return done


def lengths(n: int, spread: int, r: np.random.Generator, most: int = MOST) -> np.ndarray:
    """n answer lengths whose longest is `most` and `spread` times the mean."""
    if spread == 1:
        return np.full(n, most)
    mean = most / spread
    out = np.clip(r.exponential(mean, n).round(), 1, most).astype(int)
    out[:: n // 16] = most
    # one token here and there, until the mean is exact
    while (excess := round(out.sum() - mean * n)) != 0:
        some = r.choice(
            np.flatnonzero((out > 1) & (out < most) if excess > 0 else out < most),
            min(abs(excess), n // 8),
            replace=False,
        )
        out[some] -= np.sign(excess)
    return out


def by_engine(
    model: policy.PolicyModel, slots: int, prompts: torch.Tensor, lens: np.ndarray
) -> Any:
    most = int(lens.max())
    context = prompts.shape[1] + most
    engine = EmbeddedEngine(model, slots=slots, context=context, max_new_tokens=most)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    rows = prompts.numpy().astype(np.int32)
    requests = [
        CompletionRequest(
            (i // GROUP, i % GROUP, 1), rows[i], i // GROUP, int(n), 1.0, 1.0, 0, (), 7
        )
        for i, n in enumerate(lens)
    ]

    def run() -> int:
        engine.add(requests)
        tokens = 0
        while engine.active:
            tokens += sum(len(a.tokens) for a in engine.step())
        assert tokens == lens.sum()
        return tokens

    return run


def by_generate(
    model: policy.PolicyModel, batch: int, prompts: torch.Tensor, lens: np.ndarray, cache: str
) -> Any:
    model.hf.generation_config.eos_token_id = None
    how: dict[str, Any] = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": int(lens.max()),
        "pad_token_id": 0,
    }
    how |= {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}

    @torch.inference_mode()
    def run() -> None:
        for at in range(0, len(lens), batch):
            piece = slice(at, at + batch)
            stop = Lengths(torch.from_numpy(lens[piece]), prompts.shape[1])
            model.hf.generate(
                prompts[piece],
                attention_mask=torch.ones_like(prompts[piece]),
                stopping_criteria=StoppingCriteriaList([stop]),
                **how,
            )

    return run


def by_loop(model: policy.PolicyModel, batch: int, prompts: torch.Tensor, lens: np.ndarray) -> Any:
    """A plain static batch: transformers' forward with its cache, and nothing else."""

    @torch.inference_mode()
    def run() -> None:
        for at in range(0, len(lens), batch):
            out = model.hf(prompts[at : at + batch], use_cache=True, logits_to_keep=1)
            for n in range(int(lens[at : at + batch].max())):
                logs = out.logits[:, -1].float().log_softmax(-1)
                token = torch.multinomial(logs.exp(), 1)
                logs.gather(1, token)
                if n + 1 < lens[at : at + batch].max():
                    out = model.hf(token, past_key_values=out.past_key_values, use_cache=True)

    return run


ATTENTION = ("sdpa", "eager")
WAYS = [(attention, cache) for attention in ATTENTION for cache in ("dynamic", "static")]


def search(made: dict[str, Any]) -> str:
    """The name of the fastest by one run each, in CPU time (one thread)."""
    took = {}
    for name, run in made.items():
        began = time.process_time()
        run()
        took[name] = time.process_time() - began
    return min(took, key=lambda name: took[name])


def rivals(
    models: dict[str, policy.PolicyModel],
    batches: list[int],
    prompts: torch.Tensor,
    lens: np.ndarray,
    few: int,
) -> dict[str, Any]:
    """The best of `generate` and, beside it, the best plain loop, found on the first `few` answers;
    name -> a run over all.
    """
    whole = len(lens)

    def generate(n: int) -> dict[str, Any]:
        return {
            f"generate, {attention}, {cache} cache, {batch} rows": by_generate(
                models[attention], batch, prompts[:n], lens[:n], cache
            )
            for attention, cache in WAYS
            for batch in batches
        }

    def loops(n: int) -> dict[str, Any]:
        return {
            f"plain loop, {attention}, {batch} rows": by_loop(
                models[attention], batch, prompts[:n], lens[:n]
            )
            for attention in models
            for batch in batches
        }

    found = {}
    for ways in (generate, loops):
        name = search(ways(min(few, whole)))
        found[name] = ways(whole)[name]
    return found


def measure(
    name: str, spread: int, n_rounds: int, work: str, *, quick: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    shape, slots = SIZES[name]
    place = Path(work) / name
    model = policy.build_model(place, "0123456789abcdefghij", **shape)  # type: ignore[arg-type]
    r = np.random.default_rng(0)
    n = slots * (3 if quick or spread == 1 else A_SLOT)
    prompts = torch.from_numpy(np.repeat(r.integers(3, 23, (n // GROUP, PROMPT)), GROUP, 0))
    lens = lengths(n, spread, r)
    models = {attention: with_attention(Path(work) / name, attention) for attention in ATTENTION}
    found = rivals(models, [256] if quick else [64, 256, 512], prompts, lens, 256 if quick else 512)
    rival = next(iter(found))  # of generate
    times = rounds.interleave({"engine": by_engine(model, slots, prompts, lens)} | found, n_rounds)
    tokens = int(lens.sum())
    rates = {k: round(tokens / rounds.median(times, k)) for k in times}
    what = {
        "parameters": sum(p.numel() for p in model.hf.parameters()),
        "slots": slots,
        "answers": n,
        "tokens": tokens,
        "tokens_per_s": rates,
        "tokens_per_cpu_s": {k: round(tokens / rounds.median(times, k, 1)) for k in times},
        "times": times,
    }
    if spread == 1:
        rival = max(found, key=lambda k: rates[k])  # the plain loop too
    goal = rounds.figure(
        f"{name}, spread {spread}: engine / generate"
        if spread > 1
        else f"{name}, equal lengths: engine / static batch",
        rounds.speedups(times, "engine", rival),
        2.0 if spread > 1 else 0.9,
        at_least=True,
        by_cpu=round(rounds.speedup(times, "engine", rival, 1), 3),
        engine=rates["engine"],
        rival=rival,
    )
    return [goal], what


def with_attention(path: Path, attention: str, dtype: str = "float32") -> policy.PolicyModel:
    hf = AutoModelForCausalLM.from_pretrained(
        str(path), attn_implementation=attention, dtype=getattr(torch, dtype)
    )
    return policy.PolicyModel(hf.eval(), str(path))


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    p.add_argument("--rounds", type=int, default=5)
    args = p.parse_args()
    torch.set_num_threads(1)
    rounds.one_core()
    memory.keep_freed()  # as a generator does: generate has it too
    goals = []
    details = {}
    with tempfile.TemporaryDirectory() as work:
        for name in args.sizes[:1] if args.quick else args.sizes:
            for spread in (3, 1):
                found, details[f"{name} spread {spread}"] = measure(
                    name, spread, 2 if args.quick else args.rounds, work, quick=args.quick
                )
                goals += found
    rounds.report(
        "_".join(["engine", *(args.sizes if len(args.sizes) < len(SIZES) else [])]),
        goals,
        {"what": "engine against generate, one core, wall time by turns", "runs": details},
        args,
    )


if __name__ == "__main__":
    main()
