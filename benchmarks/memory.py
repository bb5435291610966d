"""Measure the memory of generator, learner and buffer from step 100 to step 3,000 of a run.

    OMP_NUM_THREADS=1 python benchmarks/memory.py [--quick] [--json] [--steps 3000]

Proves: each process grows to at most 1.05 of its memory at step 100.  A real run of three
processes has completions of at most 12 tokens in batches of 4 x 4, so that 3,000 steps take
minutes.  The USS is measured (shared pages, such as the ring's, count for no process), as the
median of readings around each of the two steps.  The buffer remembers the last 200,000 samples,
of which 48,000 exist by then."""

from __future__ import annotations

import json
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

EVERY_S = 0.5
BEGIN = 100
MOST = 1.05
WHO = ("generator", "learner", "buffer")


def steps_of(metrics: Path) -> int:
    """Batches trained, from the last whole lines of the file."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 20_000))
        lines = file.read().splitlines()[1:]
    found = 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "reward/mean" in row:
            found = int(row["step"])
    return found


def watch(steps: int, work: str) -> list[tuple[int, dict[str, float]]]:
    """(step, MiB of each process) twice a second until the run has ended."""
    sets = [
        f"runs={work!r}",
        f"model.path={str(Path(work) / 'model')!r}",
        "name='long'",
        f"learner.steps={steps}",
        "learner.lr=1e-6",
        "learner.groups=4",
        "learner.group_size=4",
        "generator.slots=32",
        "generator.max_new_tokens=12",
        "evaluation.every=500",
        "evaluation.prompts=16",
        "evaluation.final_prompts=16",
        "evaluation.ood_prompts=0",
    ]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/demo.toml", "--json"]
    argv += [x for s in sets for x in ("--set", s)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    seen: list[tuple[int, dict[str, float]]] = []
    with (Path(work) / "log").open("w") as log:
        run = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log, env=env)
    metrics = Path(work) / "long" / "metrics.jsonl"
    while run.poll() is None:
        mib = {}
        for child in psutil.Process(run.pid).children():
            try:
                for name in set(WHO) & set(child.cmdline()):
                    mib[name] = child.memory_full_info().uss / 2**20
            except psutil.Error:
                continue  # it has ended
        if len(mib) == len(WHO):
            seen.append((steps_of(metrics), mib))
        time.sleep(EVERY_S)
    if run.returncode:
        sys.exit(f"the run ended with {run.returncode}: {(Path(work) / 'log').read_text()[-2000:]}")
    return seen


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--steps", type=int, default=3000)
    args = p.parse_args()
    steps = 250 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as work:
        began = time.monotonic()
        seen = watch(steps, work)
        minutes = (time.monotonic() - began) / 60
    early = [mib for step, mib in seen if BEGIN <= step <= 1.5 * BEGIN]
    late = [mib for step, mib in seen if step >= steps - 0.5 * BEGIN]
    if not early or not late:
        sys.exit(f"no readings around step {BEGIN} or {steps}: {[s for s, _ in seen][-5:]}")
    goals = []
    for name in WHO:
        first, last = (statistics.median(mib[name] for mib in part) for part in (early, late))
        goals.append(
            rounds.goal(
                f"{name}: memory at step {steps} / at {BEGIN}",
                last / first,
                MOST,
                at_least=False,
                mib=[round(first, 1), round(last, 1)],
            )
        )
    thin = seen[:: max(1, len(seen) // 200)]
    result = {
        "what": f"memory of each process over {steps} steps, USS in MiB",
        "minutes": round(minutes, 1),
        "mib": [[step, {k: round(x, 1) for k, x in mib.items()}] for step, mib in thin],
    }
    rounds.report("memory", goals, result, args)


if __name__ == "__main__":
    main()
