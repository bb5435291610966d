"""Compare an asynchronous with a synchronous run where rewards take 0.2 s, with a long tail.

    OMP_NUM_THREADS=1 python benchmarks/slow_rewards.py [--quick] [--json] [--workers SYNC ASYNC]
    OMP_NUM_THREADS=1 python benchmarks/slow_rewards.py --find 8 16 32 64

Proves: at least 1.5 times the speed, over 60 steps, each with its best number of reward processes
(`--find` searches for it with short runs of both; the defaults are its result).  A call waits 0.2
s or more, as for a remote judge (Pareto, exponent 2.5, at most 4 s, sampled per call), and uses
no core.  Real runs of three processes and the pool; batches of 4 x 4, learning rate 0, so that
both generate completions of the same lengths; by turns, five rounds."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib import rounds
from lib.results_file import ROOT

from asyncrl.records.metrics import compute_idle_shares

LAGS = {"sync": 0, "async": 4}
SKIP = 4  # steps until the pipeline is full
REWARD = "benchmarks.lib.slow_reward:waiting"


def one(work: Path, name: str, lag: int, workers: int, steps: int, seed: int) -> dict[str, float]:
    """Seconds a step after the first SKIP, and how long learner and rewards waited."""
    sets = [
        f"runs={str(work)!r}",
        f"name={name!r}",
        f"model.path={str(work / 'model')!r}",
        f"learner.steps={steps + SKIP + 1}",
        "learner.lr=0.0",
        "learner.groups=4",
        "learner.group_size=4",
        f"reward.function={REWARD!r}",
        f"reward.workers={workers}",
        f"staleness.max_lag={lag}",
        f"seed={seed}",
        "generator.slots=128",
        "evaluation.every=0",
        "evaluation.prompts=1",
        "evaluation.final_prompts=1",
        "evaluation.ood_prompts=0",
        "learner.checkpoint_every=1000",
        "record.samples_every=0",
    ]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/demo.toml", "--json"]
    argv += [x for s in sets for x in ("--set", s)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = (work / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward/mean" in row]
    out = {"step": (rows[-1]["t"] - rows[SKIP]["t"]) / (len(rows) - 1 - SKIP)}
    out["time/learner_idle_share"] = compute_idle_shares(rows[SKIP:])["learner"]
    for key in ("reward/wait_s", "reward/call_s", "lag/mean"):
        found = [row[key] for row in rows[SKIP:] if key in row]
        out[key] = statistics.median(found) if found else 0.0
    return out


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--workers", type=int, nargs=2, default=[16, 32], metavar=("SYNC", "ASYNC"))
    p.add_argument("--find", type=int, nargs="+", default=[], help="numbers of reward processes")
    args = p.parse_args()
    count, steps = (1, 10) if args.quick else (args.rounds, args.steps)
    with tempfile.TemporaryDirectory() as tmp:
        work = Path(tmp)
        sets = ["runs=" + repr(tmp), f"model.path={str(work / 'model')!r}", "learner.steps=1"]
        first = [sys.executable, "-m", "asyncrl.cli", "run", "configs/demo.toml"]
        first += [x for s in [*sets, "evaluation.final_prompts=1"] for x in ("--set", s)]
        subprocess.run(first, cwd=ROOT, check=True, capture_output=True)  # makes the warm start
        for workers in args.find:
            for kind, lag in LAGS.items():
                found = one(work, f"find_{kind}{workers}", lag, workers, 12, 0)
                print(f"{kind}, {workers} processes: {found['step']:.3f} s a step", file=sys.stderr)
        if args.find:
            return

        def one_round(number: int) -> dict[str, Any]:
            kinds = list(LAGS) if number % 2 == 0 else list(reversed(LAGS))
            workers = dict(zip(LAGS, args.workers, strict=True))
            return {
                kind: one(work, f"{kind}{number}", LAGS[kind], workers[kind], steps, number)
                for kind in kinds
            }

        rows = rounds.quiet(count, one_round)
    ratios = [row["sync"]["step"] / row["async"]["step"] for row in rows]
    ms = {k: round(1e3 * statistics.median(row[k]["step"] for row in rows)) for k in LAGS}
    goal = rounds.figure(
        f"rewards of 0.2 s and a long tail, {steps} steps: synchronous / asynchronous",
        ratios,
        1.5,
        at_least=True,
        ms=ms,
        reward_processes=args.workers,
    )
    what = "rewards of 0.2 s with a long tail, real runs by turns"
    rounds.report("slow_rewards", [goal], {"what": what, "rounds": rows, "steps": steps}, args)


if __name__ == "__main__":
    main()
