"""Run the demo from its warm start for several seeds, as shipped and synchronous.

    python benchmarks/demo_seeds.py [--quick] [--json] [--seeds N] [--set key=value ...]
                                    [--real models/smollm2] [--slow]

Proves: accuracy from 0.30-0.45 to at least 0.80 (n = 1024, temperature 1, final weights) in under
two minutes of RL, for every seed. Each seed's synchronous run (staleness.max_lag = 0, two
generators) starts from the same model, and every second seed has it first. Reported is the ratio of
their times to TARGET held-out accuracy, on the line between evaluations, with a t interval of 95 %
over the logarithms of the seeds' ratios. An evaluation counts at the second at which the batch was
trained that made its version. --real: configs/smollm2_sort.toml with this model instead, to
REAL_TARGET; each arm has the threads with which it is fastest (benchmarks/real_model.py --parts
run). --slow: the demo with rewards of 0.2 s and more (Pareto tail to 4 s) in 32 processes, batches
of 8 x 8 and a limit of 4, to SLOW_TARGET; synchronous has one generator, as two that share the
processes were slower. --quick: one seed and few steps, which shows
that the program works and proves nothing."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lib import results_file, run_pictures
from scipy import stats

# synchronous as it is fastest on two cores (benchmarks/loop.py --parts speed)
ARMS = {"async": [], "sync": ["staleness.max_lag=0", "generators=2"]}
TARGET = 0.8
DEMO = ["evaluation.every=10"]
REAL_TARGET = 0.5
REAL_GOAL = 1.35
REAL = [
    "learner.steps=40",
    "learner.threads=2",
    "evaluation.every=5",
    "evaluation.prompts=128",
    "evaluation.final_prompts=128",
    "evaluation.ood_prompts=0",
]
REAL_ARMS = {"async": [], "sync": ["staleness.max_lag=0", "generator.threads=2"]}
SLOW_TARGET = 0.55
SLOW_GOAL = 2.5
SLOW = [
    "reward.function=benchmarks.lib.slow_reward:waiting",
    "learner.groups=8",
    "generator.slots=64",
    "learner.steps=60",
    "evaluation.every=10",
    # evaluations wait for the same reward processes, and are no part of what is compared
    "evaluation.prompts=128",
    "evaluation.final_prompts=256",
    "evaluation.ood_prompts=0",
    "reward.workers=32",
]
SLOW_ARMS = {"async": ["staleness.max_lag=4"], "sync": ["staleness.max_lag=0"]}
FACTS = (
    "heldout_start",
    "heldout_end",
    "ood_end",
    "wall_s",
    "steps",
    "tokens",
    "lag",
    "speed",
    "weights_digest",
)


def run(
    work: str, seed: int, arm: str, sets: Sequence[str], config: str = "configs/demo.toml"
) -> dict[str, Any]:
    """Make one run and return its facts and its curve; the first of a seed makes the model."""
    given = [
        f"seed={seed}",
        f"model.path={str(Path(work) / f'model{seed}')!r}",
        f"runs={work!r}",
        f"name='{arm}{seed}'",
        *sets,
    ]
    words = [x for s in given for x in ("--set", s)]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", config, "--json", *words]
    began = time.monotonic()
    done = subprocess.run(
        argv,
        cwd=results_file.ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(results_file.ROOT)},
    )
    if done.returncode:
        sys.exit(f"{arm}, seed {seed}, ended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    row = {"seed": seed, "whole_s": time.monotonic() - began} | {k: summary[k] for k in FACTS}
    row["curve"] = run_pictures.accuracy_curve(Path(summary["run_dir"]))
    print(
        f"{arm}, seed {seed}: {row['heldout_start']:.3f} -> {row['heldout_end']:.3f} in "
        f"{row['wall_s']:.0f} s of RL, {row['whole_s']:.0f} s in all, mean lag "
        f"{row['lag']['mean']:.2f}",
        file=sys.stderr,
    )
    return row


def seconds_to(curve: Sequence[Sequence[float]], target: float) -> float:
    """Return the second at which a curve first reaches an accuracy; inf: never.

    >>> seconds_to([[0.0, 0.5], [10.0, 0.7], [20.0, 0.9]], 0.75)
    12.5
    """
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= target:
            return before + (after - before) * max(target - low, 0.0) / max(high - low, 1e-9)
    return math.inf


def equal_accuracy(rows: dict[str, list[dict[str, Any]]], target: float = TARGET) -> dict[str, Any]:
    """Return how many times as fast the asynchronous runs reach `target`, with its interval."""
    seconds = {arm: [seconds_to(row["curve"], target) for row in of] for arm, of in rows.items()}
    logs = [
        math.log(sync / asynchronous)
        for sync, asynchronous in zip(seconds["sync"], seconds["async"], strict=True)
        if math.isfinite(sync) and math.isfinite(asynchronous)
    ]
    found: dict[str, Any] = {"target": target, "seconds": seconds, "seeds": len(logs)}
    if len(logs) > 1:
        found["ratio"] = [math.exp(x) for x in mean_interval(logs)]
    return found


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its t interval of 95 %."""
    low, high = stats.t.interval(0.95, len(values) - 1, fmean(values), stats.sem(values))
    return fmean(values), float(low), float(high)


def compare_ends(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the speed over the same batches and the difference of the final accuracy.

    Each has its interval; {} with a single seed."""
    pairs = list(zip(rows["sync"], rows["async"], strict=True))
    if len(pairs) < 2:
        return {}
    logs = [math.log(sync["wall_s"] / ours["wall_s"]) for sync, ours in pairs]
    ends = [ours["heldout_end"] - sync["heldout_end"] for sync, ours in pairs]
    return {
        "speed": [math.exp(x) for x in mean_interval(logs)],
        "final_accuracy": list(mean_interval(ends)),
    }


def demo_goal(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Judge the demo's promise by its asynchronous runs."""
    met = all(
        0.30 <= r["heldout_start"] <= 0.45 and r["heldout_end"] >= 0.80 and r["wall_s"] < 120
        for r in rows
    )
    return {"goal": "0.30-0.45 -> at least 0.80 in under 120 s, every seed", "met": met}


def speed_goal(equal: dict[str, Any], least: float) -> dict[str, Any]:
    """Judge by the mean ratio of the seeds' times to the target."""
    goal = f"{least} times as fast as synchronous to {equal['target']} held-out"
    return {"goal": goal, "met": equal.get("ratio", [0.0])[0] >= least}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true")
    p.add_argument("--json", action="store_true")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--set", dest="sets", action="append", default=[])
    p.add_argument("--real", metavar="MODEL", help="directory of SmolLM2's weights")
    p.add_argument("--slow", action="store_true", help="with slow rewards")
    args = p.parse_args()
    if args.slow and args.real:
        p.error("give either --slow or --real")
    if args.slow:
        config, arms, target, common = "configs/demo.toml", SLOW_ARMS, SLOW_TARGET, SLOW
    elif args.real:
        config, arms, target = "configs/smollm2_sort.toml", REAL_ARMS, REAL_TARGET
        common = [*REAL, f"model.path={str(Path(args.real).resolve())!r}"]
    else:
        config, arms, target, common = "configs/demo.toml", ARMS, TARGET, DEMO
    few = [f"learner.steps={5 if args.real else 20}"] if args.quick else []
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as work:
        for seed in range(1 if args.quick else args.seeds):
            for arm in arms if seed % 2 == 0 else reversed(arms):
                sets = [*common, *arms[arm], *args.sets, *few]
                rows[arm].append(run(work, seed, arm, sets, config))
    equal = equal_accuracy(rows, target)
    result = {
        "config": config,
        "seeds": rows["async"],
        "synchronous": rows["sync"],
        "equal_accuracy": equal,
        **compare_ends(rows),
        "sets": [*(x for x in common if not x.startswith("model.path=")), *args.sets],
        "load_at_end": list(os.getloadavg()),
    }
    if args.slow or args.real:
        result |= speed_goal(equal, SLOW_GOAL if args.slow else REAL_GOAL)
    else:
        result |= demo_goal(rows["async"])
    if not args.quick:
        name = "slow_seeds" if args.slow else "real_seeds" if args.real else "demo_seeds"
        print(results_file.write(name, result), file=sys.stderr)
    if "ratio" in equal:
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*equal["ratio"])
        print(f"to {target} held-out: {ratio} times as fast as synchronous", file=sys.stderr)
    print(
        json.dumps(result)
        if args.json
        else f"{'met' if result['met'] else 'NOT met'}: {result['goal']}"
    )


if __name__ == "__main__":
    main()
