"""Injected lag x correction x seeds: which corrections collapse, and at what lag.

    python benchmarks/lag_grid.py --out runs/grid                    # everything: three tasks, lags 0 to 16, 5 seeds
    python benchmarks/lag_grid.py --out runs/grid --only rle-5e-4 --seeds 3 --lags 0,4,8
    python benchmarks/lag_grid.py --out runs/grid --table            # write the result of what is finished, run nothing

Each run goes through the real store, admission, engine and learner in a warm process; interrupted, the same command goes on run by run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import results_file

sys.path.insert(0, str(results_file.ROOT))

from asyncrl.compare import sweep
from asyncrl.run import preflight, say

TASKS = {"rle-5e-4": ("rle", "5e-4"), "rle-1e-3": ("rle", "1e-3"), "sort-2e-4": ("demo", "2e-4")}
CORRECTIONS = ("none", "ppo", "tis", "mis", "reshape", "reshape-stop", "k3")
EVALUATION = ("evaluation.every=10", "evaluation.prompts=128", "evaluation.final_prompts=512", "evaluation.ood_prompts=0")


def make(task: str, args: argparse.Namespace) -> sweep.Sweep:
    """The sweep of one task and learning rate, in OUT/TASK."""
    name, lr = TASKS[task]
    sets = [f"learner.lr={lr}", f"learner.steps={args.steps}", *EVALUATION]
    limits = sweep.parse_limits(args.lags, True)
    what = sweep.plan(str(results_file.ROOT / "configs" / f"{name}.toml"), sets, [(n, sweep.CORRECTIONS[n][1]) for n in CORRECTIONS], limits, injected=True)
    return sweep.Sweep(args.out / task, what, args.seeds, say)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="directory of the runs")
    p.add_argument("--only", action="append", choices=list(TASKS), help="one task and learning rate; repeatable")
    p.add_argument("--lags", default="0,1,2,4,8,16")
    p.add_argument("--first", default="", help="lags that get all their seeds before the others start, in this order")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--table", action="store_true", help="run nothing; write the result of what is finished")
    p.add_argument("--beside", default="", help="what else ran on the machine, for the record")
    args = p.parse_args()
    began = time.monotonic()
    for task in args.only or list(TASKS):
        s = make(task, args)
        if not args.table:
            preflight(s.plan.arms[sweep.SYNC])

            def tell(name: str, event: dict[str, object], task: str = task, s: sweep.Sweep = s) -> None:
                if "done" in event:
                    r = s.cells.read(name)
                    said = {"task": task, "run": name, "minutes": round((time.monotonic() - began) / 60, 1), "wall_s": round(r["wall_s"], 1)}
                    print(json.dumps(said | {"end": r["accuracy"][1][-1:], "abandoned": r["abandoned"], "failed": r.get("failed", "")}), flush=True)

            s.run(args.workers, tell, first=[float(x) for x in args.first.split(",") if x])


if __name__ == "__main__":
    main()
