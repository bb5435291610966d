"""Measure the cost of exact mode for generation and training, by turns, on one core.

    OMP_NUM_THREADS=1 python benchmarks/exact.py [--quick] [--json] [--sizes 84k 332k 2.6M]

Proves: generation at 0.85 of the plain engine or more, a learner's step at 0.9 or more.  The same
weights, prompts and lengths (the longest three times the mean, ten completions a slot); a step
is that of benchmarks/learner.py, 32 prompts with 8 completions.  For every size the learner also
recomputes the logprobs: with exact mode none may differ, without it some should."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import A_SLOT, GROUP, MOST, PROMPT, SIZES, lengths
from lib import rounds
from lib.learner_batch import batch, config

from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from learner.step import LearnerCore

WAYS = {"plain": False, "exact": True}


def generation(
    model: policy.PolicyModel, slots: int, fixed: bool, lens: np.ndarray, prompts: np.ndarray
) -> Any:
    engine = EmbeddedEngine(
        model, slots=slots, context=PROMPT + MOST, max_new_tokens=MOST, fixed=fixed
    )
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    requests = [
        CompletionRequest(
            (i // GROUP, i % GROUP, 1), prompts[i], i // GROUP, int(n), 1.0, 1.0, 0, (), 7
        )
        for i, n in enumerate(lens)
    ]

    def run() -> list[Completion]:
        engine.add(requests)
        out: list[Completion] = []
        while engine.active:
            out += engine.step()
        return out

    return run


def differing(model: policy.PolicyModel, answers: list[Completion], fixed: bool) -> float:
    """Share of tokens whose logprob the learner computes to other bits than the engine."""
    model.exact = fixed
    part = answers[:512]
    with torch.no_grad():
        out = model.logprobs(
            [a.prompt for a in part],
            [a.tokens for a in part],
            torch.ones(len(part)),
            groups=[a.key[0] for a in part],
        )
    engine = torch.from_numpy(np.concatenate([a.logprobs for a in part]))
    return float((engine != out.logprobs).double().mean())


def measure(
    name: str, n_rounds: int, work: Path, *, quick: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    shape, slots = SIZES[name]
    path = work / name
    model = policy.build_model(path, "0123456789abcdefghij", **shape)  # type: ignore[arg-type]
    r = np.random.default_rng(0)
    n = slots * (3 if quick else A_SLOT)
    prompts = np.repeat(r.integers(3, 23, (n // GROUP, PROMPT)), GROUP, 0).astype(np.int32)
    lens = lengths(n, 3, r)
    write = {way: generation(model, slots, fixed, lens, prompts) for way, fixed in WAYS.items()}
    wrong = {way: differing(model, write[way](), fixed) for way, fixed in WAYS.items()}
    cores = {way: LearnerCore(config(path), path) for way in WAYS}
    for way, fixed in WAYS.items():
        cores[way].model.exact = fixed
    b = batch()
    times = rounds.interleave(
        {f"write {w}": write[w] for w in WAYS}
        | {f"train {w}": lambda c=cores[w]: c.train(b) for w in WAYS},
        n_rounds,
    )
    goals = []
    for what, aim in (("write", 0.85), ("train", 0.9)):
        wall, cpu = (rounds.speedup(times, f"{what} exact", f"{what} plain", i) for i in (0, 1))
        goals.append(
            rounds.goal(
                f"{name}: {what}, exact / plain", wall, aim, at_least=True, by_cpu=round(cpu, 3)
            )
        )
    goals.append(
        rounds.goal(
            f"{name}: tokens that differ, exact",
            wrong["exact"],
            0.0,
            at_least=False,
            plain=round(wrong["plain"], 3),
        )
    )
    tokens = {"write": int(lens.sum()), "train": sum(s.length for s in b.samples)}
    rates = {k: round(tokens[k.split()[0]] / rounds.median(times, k)) for k in times}
    return goals, {
        "parameters": sum(p.numel() for p in model.hf.parameters()),
        "slots": slots,
        "tokens": tokens,
        "tokens_per_s": rates,
        "times": times,
    }


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    p.add_argument("--rounds", type=int, default=7)
    args = p.parse_args()
    torch.set_num_threads(1)
    rounds.one_core()
    goals = []
    details = {}
    with tempfile.TemporaryDirectory() as work:
        for name in args.sizes[:1] if args.quick else args.sizes:
            found, details[name] = measure(
                name, 3 if args.quick else args.rounds, Path(work), quick=args.quick
            )
            goals += found
    rounds.report(
        "exact",
        goals,
        {"what": "exact mode against plain, one core, by turns", "runs": details},
        args,
    )


if __name__ == "__main__":
    main()
