"""Measure what a mixture costs: a task mixed with itself, beside the task alone.

    OMP_NUM_THREADS=1 python benchmarks/mixing_cost.py [--quick] [--json]

Both train in one process by turns, as a warm run does: the buffer with its draws, metrics and
ledgers by task, engine and learner.  The samples differ, so the CPU seconds of a run are taken for
each generated token.  The alternatives take turns in going first.  --quick: one round of few steps,
goals not judged."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from lib import rounds

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.experiments.serial import run_serial
from asyncrl.models.policy import build_model
from asyncrl.tasks.synthetic import SortTask

ALONE = ("task.name='sort'",)
HALVES = "{name='sort', label='first'}, {name='sort', label='second'}"
MIXED = ("task.name='mixture'", f"task.mixture=[{HALVES}]")
MOST = 1.02  # of the task alone


def seconds_per_token(config: Config, seed: int) -> float:
    """Return the CPU seconds of a run for each token that it generated."""
    began = time.process_time()
    record = run_serial(config, seed)
    return (time.process_time() - began) / record["tokens"]


def main() -> None:
    args = rounds.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        build_model(path, SortTask.symbols)
        sets = (
            f"model.path='{path}'",
            "model.warm_start=false",
            f"learner.steps={2 if args.quick else 10}",
            "evaluation.every=0",
            "evaluation.final_prompts=8",
            "evaluation.ood_prompts=0",
        )
        alone, mixed = (load.load("demo", (*sets, *task)) for task in (ALONE, MIXED))
        run_serial(load.load("demo", (*sets, *ALONE, "learner.steps=1")), 0)  # imports, the engine

        def one_round(number: int) -> float:
            order = (alone, mixed) if number % 2 else (mixed, alone)
            cost = {id(config): seconds_per_token(config, number) for config in order}
            return cost[id(mixed)] / cost[id(alone)]

        ratios = rounds.quiet(1 if args.quick else 11, one_round)
    what = "a mixture of a task with itself, as a multiple of the task alone"
    goals = [rounds.figure(what, ratios, MOST, at_least=False)]
    rounds.report("mixing_cost", goals, {"what": "CPU seconds a token, whole runs"}, args)


if __name__ == "__main__":
    main()
