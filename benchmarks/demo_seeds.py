"""Run the demo from its warm start for several seeds, as shipped and synchronous.

    python benchmarks/demo_seeds.py [--quick] [--json] [--seeds N] [--set key=value ...]

Proves: accuracy from 0.30-0.45 to at least 0.80 (n = 1024, temperature 1, final weights) in under
two minutes of RL, for every seed.  Each seed's synchronous run (staleness.max_lag = 0) starts from
the same model, and every second seed has it first.  Reported is the ratio of their times to TARGET
held-out accuracy, on the line between evaluations, with a t interval of 95 % over the logarithms
of the seeds' ratios.  An evaluation counts at the second at which the batch was trained that made
its version.  --quick: one seed and 20 steps, which shows that the program works and proves
nothing."""

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

TARGET = 0.8
ARMS = {"async": [], "sync": ["staleness.max_lag=0"]}
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


def run(work: str, seed: int, arm: str, sets: Sequence[str]) -> dict[str, Any]:
    """Make one run and return its facts and its curve; the first of a seed makes the model."""
    given = [
        f"seed={seed}",
        f"model.path={str(Path(work) / f'model{seed}')!r}",
        f"runs={work!r}",
        f"name='{arm}{seed}'",
        "evaluation.every=10",
        *ARMS[arm],
        *sets,
    ]
    words = [x for s in given for x in ("--set", s)]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/demo.toml", "--json", *words]
    began = time.monotonic()
    done = subprocess.run(
        argv,
        cwd=results_file.ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
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


def equal_accuracy(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return how many times as fast the asynchronous runs reach TARGET, with its interval."""
    seconds = {arm: [seconds_to(row["curve"], TARGET) for row in of] for arm, of in rows.items()}
    logs = [
        math.log(sync / asynchronous)
        for sync, asynchronous in zip(seconds["sync"], seconds["async"], strict=True)
        if math.isfinite(sync) and math.isfinite(asynchronous)
    ]
    found: dict[str, Any] = {"target": TARGET, "seconds": seconds, "seeds": len(logs)}
    if len(logs) > 1:
        low, high = stats.t.interval(0.95, len(logs) - 1, fmean(logs), stats.sem(logs))
        found["ratio"] = [math.exp(x) for x in (fmean(logs), low, high)]
    return found


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true")
    p.add_argument("--json", action="store_true")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--set", dest="sets", action="append", default=[])
    args = p.parse_args()
    sets = [*args.sets, *(["learner.steps=20"] if args.quick else [])]
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as work:
        for seed in range(1 if args.quick else args.seeds):
            for arm in ARMS if seed % 2 == 0 else reversed(ARMS):
                rows[arm].append(run(work, seed, arm, sets))
    met = all(
        0.30 <= r["heldout_start"] <= 0.45 and r["heldout_end"] >= 0.80 and r["wall_s"] < 120
        for r in rows["async"]
    )
    result = {
        "seeds": rows["async"],
        "synchronous": rows["sync"],
        "equal_accuracy": equal_accuracy(rows),
        "goal": "0.30-0.45 -> at least 0.80 in under 120 s, every seed",
        "met": met,
        "sets": args.sets,
        "load_at_end": list(os.getloadavg()),
    }
    if not args.quick:
        print(results_file.write("demo_seeds", result), file=sys.stderr)
    if "ratio" in result["equal_accuracy"]:
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*result["equal_accuracy"]["ratio"])
        print(f"to {TARGET} held-out: {ratio} times as fast as synchronous", file=sys.stderr)
    print(json.dumps(result) if args.json else f"{'met' if met else 'NOT met'}: {result['goal']}")


if __name__ == "__main__":
    main()
