"""Resident memory of generator, learner and buffer over ten minutes of the demo.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--quick] [--json] [--beside WHAT] [--minutes 10]

Proves: the median of the last quarter is at most 2 % above that of the second quarter, for each
process.  The limit on the buffer is looser (10 %): it remembers what became of the last 200,000
samples, so that a late copy is known, and takes a while to fill."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from lib import rounds
from lib.results_file import ROOT

EVERY_S = 2.0
MOST = {"generator": 1.02, "learner": 1.02, "buffer": 1.10}


def watch(minutes: float) -> tuple[dict[str, list[float]], int]:
    """MiB of each process every two seconds, from the first batch on; and the batches trained."""
    with tempfile.TemporaryDirectory() as work:
        sets = [
            f"runs={work!r}",
            f"model.path={str(Path(work) / 'model')!r}",
            "name='long'",
            "learner.steps=1000000",
            "learner.lr=1e-5",
        ]
        argv = [
            sys.executable,
            "-m",
            "asyncrl.cli",
            "run",
            "configs/demo.toml",
            "--json",
            *[x for s in sets for x in ("--set", s)],
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        run = subprocess.Popen(
            argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        metrics = Path(work) / "long" / "metrics.jsonl"
        while not (metrics.exists() and '"reward/mean"' in metrics.read_text()):
            if run.poll() is not None:
                sys.exit(f"the run ended with {run.returncode} before its first batch")
            time.sleep(0.5)
        seen: dict[str, list[float]] = {name: [] for name in MOST}
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until and run.poll() is None:
            for child in psutil.Process(run.pid).children():
                words = child.cmdline()
                for name in set(MOST) & set(words):
                    seen[name].append(child.memory_info().rss / 2**20)
            time.sleep(EVERY_S)
        ended = run.poll()
        run.terminate()
        run.wait(120)
        if ended is not None:
            sys.exit(f"the run ended with {ended} before its time")
        return seen, sum('"reward/mean"' in line for line in metrics.read_text().splitlines())


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--minutes", type=float, default=10.0)
    args = p.parse_args()
    seen, batches = watch(0.5 if args.quick else args.minutes)
    goals = []
    for name, mib in seen.items():
        n = len(mib)
        early = statistics.median(mib[n // 4 : n // 2])
        late = statistics.median(mib[3 * n // 4 :])
        goals.append(
            rounds.goal(
                f"{name}: memory, last quarter / second",
                late / early,
                MOST[name],
                at_least=False,
                mib=round(late, 1),
            )
        )
    result = {
        "what": f"resident memory over {args.minutes:g} minutes of the demo",
        "batches": batches,
        "mib": {k: [round(x, 1) for x in v] for k, v in seen.items()},
    }
    rounds.report("memory", goals, result, args)


if __name__ == "__main__":
    main()
