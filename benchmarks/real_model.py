"""Compare engine, learner, weight swap and runs of a model with 135 million parameters with rivals.

The rivals are transformers and a synchronous run.

    asyncrl model get smollm2 models/smollm2
    OMP_NUM_THREADS=1 python benchmarks/real_model.py models/smollm2 [--json] [--parts engine ...]
    OMP_NUM_THREADS=1 python benchmarks/real_model.py --quick        of a tiny random model

Proves, by turns, medians of five rounds:
- engine   completions, the longest three times the mean: at least 1.3 times the tokens a second of
           transformers' `generate`, each in the faster of float32 and bfloat16; `generate`
           with eager and sdpa attention, dynamic and static cache, three batch sizes; one core
- learner  a step at least as fast as the same step by transformers' modules, both sorted by length,
           in float32; the rival gets the best of several micro-batches and both attentions; one
           core; the two gradients agree
- swap     publish and pick up, checksums apart, take at most 2 memcpys of the weights
- run      a step of `configs/smollm2_sort.toml` at most 1/1.3 of the same run's with `max_lag = 0`;
           each gets its fastest way, the synchronous one of one core, both cores for each phase, a
           core for each side; the asynchronous one of a core for each side, two threads for the
           learner, two for each; by the token, at rate 0
Settings are chosen before the rounds by the CPU time of one run of each, for `run` by its step
time.  `generate`'s rows are chosen for its best attention, type and cache.  Each part writes one
result.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import weights
from engine import ATTENTION, by_engine, by_generate, lengths, search, with_attention
from lib import rounds
from lib.contenders import STILL, asyncrl
from lib.learner_batch import batch, config
from lib.plain_step import Plain
from lib.real_answers import tiny
from loop import fastest

from asyncrl.config.tree import TaskConfig
from asyncrl.models import memory, policy
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer
from asyncrl.tasks import get_task
from learner.step import LearnerCore

GROUP = 8  # answers of a prompt
SPREAD = 3
DTYPES = ("float32", "bfloat16")
CACHES = ("dynamic", "static")
CONFIG = "configs/smollm2_sort.toml"
SAMPLES = 64  # of that config's batch
PARTS = ("engine", "learner", "swap", "run")


class Size(NamedTuple):
    """How much is measured."""

    slots: int  # of the engine
    answers: int
    prompt: int  # tokens
    most: int  # tokens of the longest answer
    few: int  # answers by which the best way is found
    batches: tuple[int, ...]  # of generate
    groups: int  # of the learner's batch
    rows: tuple[int, ...]  # of the plain step's micro-batches
    steps: int  # of a run
    skip: int  # of them, until the pipeline is full
    sets: tuple[str, ...]  # of a run, beside the config's


WHOLE = Size(32, 320, 40, 96, 64, (16, 32, 64), 8, (8, 16, 64), 10, 3, ())
QUICK = Size(
    slots=8,
    answers=160,
    prompt=12,
    most=12,
    few=16,
    batches=(8, 16),
    groups=4,
    rows=(8, 16),
    steps=6,
    skip=1,
    sets=("generator.context=1000",),
)
Found = tuple[list[dict[str, Any]], dict[str, Any]]
Ways = dict[str, tuple[list[int], tuple[str, ...]]]  # name -> cores, and --set items


def asked(path: Path, size: Size) -> torch.Tensor:
    """int64 [answers, prompt]: the ends of prompts of the task, of one length (the shortest one's,
    `prompt` at most), so that no rival computes padding; GROUP rows each.
    """
    task, tokenizer = get_task(TaskConfig(name="sort_names")), load_tokenizer(path)
    many = size.answers // GROUP
    rows = [encode_prompt(tokenizer, task.prompt("train", i, 0)) for i in range(many)]
    ends = np.stack([row[-min(size.prompt, *map(len, rows)) :] for row in rows])
    return torch.from_numpy(np.repeat(ends, GROUP, 0).astype(np.int64))


def engine(path: Path, size: Size, n_rounds: int) -> Found:
    prompts = asked(path, size)
    lens = lengths(size.answers, SPREAD, np.random.default_rng(0), size.most)
    models = {(a, d): with_attention(path, a, d) for a in ATTENTION for d in DTYPES}
    mine = {d: policy.load_policy(path, d, "cpu") for d in DTYPES}
    few, whole = slice(size.few), slice(None)

    def ours(dtype: str, part: slice) -> Callable[[], Any]:
        return by_engine(mine[dtype], size.slots, prompts[part], lens[part])

    def theirs(way: tuple[str, str], rows: int, cache: str, part: slice) -> Callable[[], Any]:
        return by_generate(models[way], rows, prompts[part], lens[part], cache)

    def named(rows: int, kinds: list[tuple[tuple[str, str], str]]) -> dict[str, Any]:
        return {
            f"generate, {', '.join(way)}, {cache} cache, {rows} rows": (way, rows, cache)
            for way, cache in kinds
        }

    embedded = {f"engine, {dtype}": partial(ours, dtype) for dtype in DTYPES}
    us = search({name: made(few) for name, made in embedded.items()})
    middle, *others = sorted(size.batches, key=lambda rows: rows != size.batches[-2])
    tried = named(middle, [(way, cache) for way in models for cache in CACHES])
    way, _, cache = tried[search({n: theirs(*x, part=few) for n, x in tried.items()})]
    best = named(middle, [(way, cache)])
    for rows in others:
        best |= named(rows, [(way, cache)])
    rival = search({name: theirs(*x, part=few) for name, x in best.items()})
    generate = {
        name: partial(theirs, way, rows, cache) for name, (way, rows, cache) in best.items()
    }
    tried |= best
    times = rounds.interleave({us: embedded[us](whole), rival: generate[rival](whole)}, n_rounds)
    tokens = int(lens.sum())
    rates = {name: round(tokens / rounds.median(times, name)) for name in times}
    goal = rounds.figure(
        "engine / generate, answers of spread 3",
        rounds.speedups(times, us, rival),
        1.3,
        at_least=True,
        by_cpu=round(rounds.speedup(times, us, rival, 1), 3),
        ours=us,
        rival=rival,
        tokens_per_s=rates,
    )
    return [goal], {"tokens": tokens, "slots": size.slots, "tried": list(tried), "times": times}


def learner(path: Path, size: Size, n_rounds: int) -> Found:
    words = policy.load_text_config(path).vocab_size
    b = batch(size.groups, GROUP, size.prompt, words)
    # as the shipped config has it: no second model, no diagnostics by other passes
    settings = config(
        path,
        learner={"steps": 10**6, "lr": 0.0, "micro_batch_tokens": 2048},
        record={"reference_kl_every": 0, "split_every": 0},
    )
    ways = {f"plain step, {n} rows, {a}": (n, a) for a in ATTENTION for n in size.rows}
    # one at a time: each has a model, a gradient and two moments
    took = {name: search_one(Plain(path, *way), b) for name, way in ways.items()}
    rival = min(took, key=lambda name: took[name])
    core = LearnerCore(settings, path)
    plain = Plain(path, *ways[rival])
    times = rounds.interleave(
        {"ours": lambda: core.train(b), rival: lambda: plain.train(b)}, n_rounds
    )
    mine, other = (gradient(hf) for hf in (core.model.hf, plain.hf))
    error = float((mine - other).norm() / other.norm())
    tokens = sum(s.length for s in b.samples)
    goals = [
        rounds.figure(
            "learner's step, ours / transformers' modules",
            rounds.speedups(times, "ours", rival),
            1.0,
            at_least=True,
            by_cpu=round(rounds.speedup(times, "ours", rival, 1), 3),
            rival=rival,
        ),
        rounds.goal("learner: gradient, relative difference", error, 1e-3, at_least=False),
    ]
    return goals, {"tokens": tokens, "rivals_cpu_s": took, "times": times}


def search_one(plain: Plain, b: Any) -> float:
    """CPU seconds of a step after a first one."""
    import time

    plain.train(b)
    began = time.process_time()
    plain.train(b)
    return time.process_time() - began


def gradient(hf: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in hf.parameters()])


def swap(path: Path, size: Size, n_rounds: int) -> Found:
    model = policy.load_policy(path, "float32", "cpu")
    with tempfile.TemporaryDirectory() as work:
        return weights.measure("swap", model, 1, n_rounds, Path(work))


def run(path: Path, size: Size, n_rounds: int, cores: list[int]) -> Found:
    with tempfile.TemporaryDirectory() as tmp:
        work = Path(tmp)

        def one(name: str, on: list[int], seed: int, *sets: str) -> dict[str, float]:
            words = (f"seed={seed}", STILL, *size.sets, *sets)
            how: dict[str, Any] = {"config": CONFIG, "skip": size.skip, "samples": SAMPLES}
            return asyncrl(work, f"{name}-{seed}", path, on, size.steps, *words, **how)

        still = "staleness.max_lag=0"
        single = ("generator.threads=1", "learner.threads=1")
        learners = ("generator.threads=1", "learner.threads=2")
        both = ("generator.threads=2", "learner.threads=2")
        synchronous: Ways = {
            "one core": (cores[:1], (still, *single)),
            "both cores for each phase": (cores, (still, *both)),
            "a core for each side": (cores, (still, *single)),
        }
        asynchronous: Ways = {
            "a core for each side": (cores, single),
            "two threads for the learner": (cores, learners),
            "two threads for each": (cores, both),
        }

        def best(kind: str, ways: Ways) -> tuple[dict[str, Any], list[int], tuple[str, ...]]:
            tried = {
                name: partial(one, f"{kind}_{name.replace(' ', '_')}", on, 10**6, *sets)
                for name, (on, sets) in ways.items()
            }
            found = fastest(kind, tried)
            return found, *ways[found["name"]]

        slow, slow_on, slow_sets = best("synchronous", synchronous)
        quick, quick_on, quick_sets = best("asynchronous", asynchronous)

        def one_round(number: int) -> dict[str, dict[str, float]]:
            kinds = {
                "sync": lambda: one("sync", slow_on, number, *slow_sets),
                "async": lambda: one("async", quick_on, number, *quick_sets),
            }
            return {k: kinds[k]() for k in (list(kinds) if number % 2 == 0 else reversed(kinds))}

        rows = rounds.quiet(n_rounds, one_round)
    goal = rounds.figure(
        "synchronous / asynchronous step, by the token",
        [row["sync"]["token"] / row["async"]["token"] for row in rows],
        1.3,
        at_least=True,
        way=slow["name"],
        ours=quick["name"],
    )
    return [goal], {"synchronous": slow, "asynchronous": quick, "rounds": rows}


def main(words: list[str] | None = None) -> None:
    p = rounds.parser(__doc__)
    p.add_argument("model", type=Path, nargs="?", help="its directory; with --quick a tiny one")
    p.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    p.add_argument("--rounds", type=int, default=5)
    args = p.parse_args(words)
    if not args.model and not args.quick:
        p.error("name the model's directory")
    size, n_rounds = (QUICK, 1) if args.quick else (WHOLE, args.rounds)
    cores = rounds.idle_cores(2)
    torch.set_num_threads(1)
    memory.keep_freed()  # as generator and learner do: all have it
    what = {"what": "a real model, by turns", "model": str(args.model or "tiny")}
    with tempfile.TemporaryDirectory() as work:
        path = Path(tiny(Path(work) / "model")) if args.quick else args.model.resolve()
        parts: dict[str, Callable[[], Found]] = {
            "run": lambda: run(path, size, n_rounds, cores),  # first: it wants both cores
            "engine": lambda: engine(path, size, n_rounds),
            "learner": lambda: learner(path, size, n_rounds),
            "swap": lambda: swap(path, size, n_rounds),
        }
        for part, measure in parts.items():
            if part in args.parts:
                if part != "run":
                    os.sched_setaffinity(0, cores[:1])
                rounds.MADE.clear()
                goals, found = measure()
                rounds.report(f"real_model_{part}", goals, what | {part: found}, args)


if __name__ == "__main__":
    main()
