"""Measure the CPU time of a step by process, against a synchronous loop in one process.

    OMP_NUM_THREADS=1 python benchmarks/cpu_by_process.py [--quick] [--json] [--model DIR]
        [--against CHECKOUT]

Proves, on `sort` with 32 x 8 completions and the demo's lengths: all processes of a run together
take at most 0.80 of the CPU time of the strong loop (benchmarks/lib/strong_loop.py, one thread).
By turns, in an order that changes; ratios within a round are judged, by the token, because both
sample their own answers.  The learning rate is 0.  CPU time is user and system time in /proc with
ended threads and children, from the SKIP-th trained batch to the last one: starts and the end are
left out.  Other work on the machine changes it less than wall time.  --against: another checkout
of this repository, measured in the same rounds."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from lib import rounds, strong_loop
from lib.contenders import BATCH, ROOT, SKIP, SMALL, STILL, env

from asyncrl.config.tree import TaskConfig
from asyncrl.tasks import get_task

PARTS = ("learner", "generator", "buffer")  # as in command lines; the rest is the supervisor's
WAIT_S = 0.02
Times = dict[str, float]


def sum_times(root: psutil.Process) -> Counter[str]:
    """Return the CPU seconds so far of a run's processes, by part."""
    seconds: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        try:
            words = process.cmdline()
            part = next((name for name in PARTS if name in words), "supervisor")
            seconds[part] += sum(process.cpu_times()[:4])
        except psutil.Error:
            continue  # it has ended: its time is its parent's
    return seconds


def read_rows(path: Path) -> list[float]:
    """Return the tokens of each trained batch so far."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["answer/length"] * BATCH for row in rows if "reward/mean" in row]


def measure_run(tree: Path, work: Path, name: str, model: Path, steps: int) -> Times:
    """Return the CPU seconds of a step by part, of all, and those of all by the token."""
    sets = [*SMALL, STILL, f"runs={str(work)!r}", f"name={name!r}", f"model.path={str(model)!r}"]
    argv = [sys.executable, "-m", "asyncrl.cli", "run", str(tree / "configs" / "demo.toml")]
    argv += [x for s in [*sets, f"learner.steps={steps}"] for x in ("--set", s)]
    with (work / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=work, env=env(1) | {"PYTHONPATH": str(tree)}, stdout=log, stderr=log
        )
    root = psutil.Process(process.pid)
    marks: list[tuple[int, Counter[str]]] = []
    for wanted in (SKIP, steps - 2):  # the generators end with the last batches
        while len(rows := read_rows(work / name / "metrics.jsonl")) < wanted:
            if process.poll() is not None:
                sys.exit(f"the run has ended:\n{(work / f'{name}.log').read_text()[-2000:]}")
            time.sleep(WAIT_S)
        marks.append((len(rows), sum_times(root)))
    process.wait()
    (first, before), (last, after) = marks
    tokens = sum(rows[first:last])
    each = {part: (after[part] - before[part]) / (last - first) for part in after}
    total = sum(each.values())
    return each | {"all": total, "token": total * (last - first) / tokens}


def measure_loop(model: Path, steps: int, seed: int) -> Times:
    """Return the CPU seconds of a step of the strong loop, without its start."""
    task = get_task(TaskConfig(name="sort"))
    seconds = []
    for count in (0, steps):
        began = time.process_time()
        out = strong_loop.train(str(model), task, count, lr=0.0, seed=seed)
        seconds.append(time.process_time() - began)
    total = seconds[1] - seconds[0]
    return {"all": total / steps, "token": total / sum(out["tokens"])}


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--model", default="models/sort", help="a warm-started model directory")
    p.add_argument("--against", default="", help="another checkout, measured too")
    args = p.parse_args()
    model = Path(args.model).resolve()
    torch.set_num_threads(1)
    steps = SKIP + (8 if args.quick else 40)
    trees = {"asyncrl": ROOT} | ({"against": Path(args.against).resolve()} if args.against else {})

    def one_round(number: int) -> dict[str, Times]:
        with tempfile.TemporaryDirectory() as folder:
            order = [*trees, "loop"]
            row = {}
            for name in order if number % 2 == 0 else reversed(order):
                row[name] = (
                    measure_loop(model, steps, number)
                    if name == "loop"
                    else measure_run(trees[name], Path(folder), name, model, steps)
                )
            print(json.dumps(row), file=sys.stderr)
            return row

    rows = rounds.quiet(1 if args.quick else 5, one_round)
    ratios = [row["asyncrl"]["token"] / row["loop"]["token"] for row in rows]
    goals = [rounds.figure("CPU time of a run over the strong loop's", ratios, 0.8, at_least=False)]
    table = {
        name: {
            part: round(1e3 * statistics.median(row[name][part] for row in rows), 3)
            for part in rows[0][name]
        }
        for name in rows[0]
    }
    if not args.json:
        for name, parts in table.items():
            print(f"{name}: " + ", ".join(f"{part} {ms} ms" for part, ms in parts.items()))
    rounds.report(
        "cpu_by_process", goals, {"milliseconds": table, "rounds": rows, "steps": steps}, args
    )


if __name__ == "__main__":
    main()
