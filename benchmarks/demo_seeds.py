"""Run the demo from its warm start for several seeds, and report final held-out accuracy.

    python benchmarks/demo_seeds.py [--quick] [--json] [--seeds N] [--set key=value ...]

Proves: accuracy from 0.30-0.45 to at least 0.80 (n = 1024, temperature 1, final weights) in under
two minutes of RL, for every seed.  --quick: one seed and 20 steps, which shows that the program
works and proves nothing."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import results_file


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--quick", action="store_true")
    p.add_argument("--json", action="store_true")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--set", dest="sets", action="append", default=[])
    args = p.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for seed in range(1 if args.quick else args.seeds):
            sets = [
                f"seed={seed}",
                f"model.path={str(Path(work) / f'model{seed}')!r}",
                f"runs={work!r}",
                f"name='seed{seed}'",
                *args.sets,
            ]
            sets += ["learner.steps=20", "evaluation.every=20"] if args.quick else []
            argv = [
                sys.executable,
                "-m",
                "asyncrl.cli",
                "run",
                "configs/demo.toml",
                "--json",
                *[x for s in sets for x in ("--set", s)],
            ]
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
                sys.exit(f"seed {seed} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            s = json.loads(done.stdout.strip().splitlines()[-1])
            row = {
                k: s[k]
                for k in (
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
            }
            rows.append({"seed": seed, "whole_s": time.monotonic() - began} | row)
            print(
                f"seed {seed}: {row['heldout_start']:.3f} -> {row['heldout_end']:.3f} in "
                f"{row['wall_s']:.0f} s of RL, "
                f"{rows[-1]['whole_s']:.0f} s with warm start, mean lag {row['lag']['mean']:.2f}",
                file=sys.stderr,
            )
    met = all(
        0.30 <= r["heldout_start"] <= 0.45 and r["heldout_end"] >= 0.80 and r["wall_s"] < 120
        for r in rows
    )
    result = {
        "seeds": rows,
        "goal": "0.30-0.45 -> at least 0.80 in under 120 s, every seed",
        "met": met,
        "sets": args.sets,
    }
    if not args.quick:
        print(results_file.write("demo_seeds", result), file=sys.stderr)
    print(json.dumps(result) if args.json else f"{'met' if met else 'NOT met'}: {result['goal']}")


if __name__ == "__main__":
    main()
