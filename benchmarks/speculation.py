"""Tokens a second and accepted drafts with generator.speculate, by batch size; and the same bits?

    OMP_NUM_THREADS=1 python benchmarks/speculation.py MODEL [--quick] [--json]

MODEL is the directory of a model of the task `sort`, for example `models/sort` after `asyncrl run
demo`: its completions are a scratchpad that repeats the prompt, up to 56 tokens long. For each
number of slots the same groups of 8 are completed with and without drafts, by turns, five rounds;
a full batch is refilled and ends in a tail of the longest completions. Times are CPU seconds of
the process on one thread. Then 1,000 completions in exact mode, with a swap of the weights in each
run of 40: each must have the bits of a plain engine that gets its new weights at the same token.

Goal: at least 1.2 times the tokens a CPU second at 1, 2 and 4 slots, and no answer with another
bit."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from lib import results_file

from actors.decoding.drafts import DraftPolicy
from actors.engine import Completion, CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy
from asyncrl.models.tokenizer import load_tokenizer
from asyncrl.tasks.synthetic import SortTask

SLOTS = (1, 2, 4, 8, 16, 64)
MOST = 4  # tokens of a draft
SAMPLES, LONGEST = 8, 56
EOS = 1
GOAL, GOAL_SLOTS = 1.2, 4
BATCH = 40  # completions between two swaps


def requests(model: policy.PolicyModel, groups: int, first: int = 0) -> list[CompletionRequest]:
    tokenizer, task = load_tokenizer(model.tokenizer_dir), SortTask()
    out = []
    for ticket in range(first, first + groups):
        prompt = np.array(tokenizer.encode(task.prompt("train", ticket, 0).text), np.int32)
        out += [
            CompletionRequest((ticket, s, 1), prompt, ticket, LONGEST, 1.0, 1.0, 0, (EOS,), seed=3)
            for s in range(SAMPLES)
        ]
    return out


def make_engine(model: policy.PolicyModel, slots: int, **how: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(model, slots=slots, context=96, max_new_tokens=LONGEST, **how)
    engine.load(dict(policy.list_named_weights(model)), Label(1, 0), "d0")
    return engine


def complete(engine: EmbeddedEngine, asked: list[CompletionRequest]) -> dict[Any, Completion]:
    engine.add(asked)
    found: list[Completion] = []
    while engine.active:
        found += engine.step(8)
    return {a.key: a for a in found}


def speed(model: policy.PolicyModel, slots: int, groups: int, rounds: int) -> dict[str, Any]:
    """Tokens a CPU second of each way, and what became of the drafts."""
    asked = requests(model, groups)
    ways = {
        "plain": make_engine(model, slots),
        "always": make_engine(model, slots, drafts=DraftPolicy(MOST, slots)),
        "auto": make_engine(model, slots, drafts=DraftPolicy(MOST, "auto")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for counted in range(rounds + 1):
        for name, engine in ways.items():
            began = time.process_time()
            found = complete(engine, asked)
            if counted:
                seconds[name].append(time.process_time() - began)
            tokens[name] = [found[r.key].tokens.tolist() for r in asked]
    count = sum(map(len, tokens["plain"]))
    rates = {name: count / statistics.median(each) for name, each in seconds.items()}
    drafts = ways["always"]
    return {
        "tokens": count,
        "cpu_s": seconds,
        "tokens_per_cpu_s": rates,
        "ratio": {name: rates[name] / rates["plain"] for name in ("always", "auto")},
        "accepted": drafts.accepted / max(drafts.proposed, 1),
        "steps_saved": 1 - drafts.steps_made / ways["plain"].steps_made,
        "step_s": dict(ways["auto"].drafts.seconds) if ways["auto"].drafts is not None else {},
        "other_tokens": sum(a != b for a, b in zip(tokens["plain"], tokens["always"], strict=True)),
    }


def changed_weights(model: policy.PolicyModel) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    return {
        name: weight + 0.02 * weight.std() * torch.randn(weight.shape, generator=source)
        for name, weight in policy.list_named_weights(model)
    }


def other_bits(model: policy.PolicyModel, count: int) -> tuple[int, int]:
    """Completions in exact mode across a swap, and how many differ from those without drafts."""
    old, new = dict(policy.list_named_weights(model)), changed_weights(model)
    compared = different = 0
    how = {"fixed": True, "in_flight": "recompute_kv"}
    drafting = make_engine(model, BATCH, drafts=DraftPolicy(MOST, BATCH), **how)
    plain = make_engine(model, BATCH, **how)
    for first in range(0, count // SAMPLES, BATCH // SAMPLES):
        asked = requests(model, BATCH // SAMPLES, first)
        drafting.load(old, Label(1, 0), "d0")
        drafting.add(asked)
        found = drafting.step(4)
        drafting.load(new, Label(1, 1), "d1")
        while drafting.active:
            found += drafting.step(8)
        by_end: dict[int, list[Completion]] = {}
        for a in found:
            by_end.setdefault(a.spans[0].end, []).append(a)
        for end, group in by_end.items():
            plain.load(old, Label(1, 0), "d0")
            keys = {a.key for a in group}
            plain.add(r for r in asked if r.key in keys)
            wanted = plain.step(end)
            plain.load(new, Label(1, 1), "d1")
            while plain.active:
                wanted += plain.step(8)
            expected = {a.key: a for a in wanted}
            for a in group:
                other = expected[a.key]
                same = (
                    np.array_equal(a.tokens, other.tokens)
                    and np.array_equal(a.logprobs, other.logprobs)
                    and a.spans == other.spans
                )
                compared, different = compared + 1, different + (not same)
    return compared, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of a model of the task sort")
    parser.add_argument("--quick", action="store_true", help="few completions, one round")
    parser.add_argument("--json", action="store_true", help="write a result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed()
    model = policy.load_policy(args.model, "float32", "cpu")
    rows = {}
    for slots in SLOTS[:2] if args.quick else SLOTS:
        groups = 1 if args.quick else max(2, slots // 4)
        rows[slots] = row = speed(model, slots, groups, 1 if args.quick else 5)
        print(
            f"{slots} slots: {row['tokens_per_cpu_s']['plain']:.0f} tokens a CPU second, "
            f"{row['ratio']['always']:.2f} times with drafts, {row['ratio']['auto']:.2f} with "
            f"auto; {row['accepted']:.0%} of the draft tokens accepted, {row['steps_saved']:.0%} "
            "of the steps saved"
        )
    compared, different = other_bits(model, BATCH if args.quick else 1000)
    print(f"exact mode, across a swap: {different} of {compared} completions with another bit")
    met = not different and all(
        row["ratio"]["always"] >= GOAL for slots, row in rows.items() if slots <= GOAL_SLOTS
    )
    result = {
        "rows": rows,
        "exact": {"compared": compared, "different": different},
        "goal": f"{GOAL:g} times the tokens a CPU second at up to {GOAL_SLOTS} slots, same bits",
        "met": met,
    }
    if args.json and not args.quick:
        print(results_file.write("speculation", result))
    elif args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
