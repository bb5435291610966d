"""Compare limits, late samples, KV caches and methods at the natural lag of two equally fast sides.

    # an adaptive limit against constants, three tasks
    python benchmarks/studies/natural_lag.py limits --out runs/natural
    # groups against single samples, where one sample of a group is late
    python benchmarks/studies/natural_lag.py groups --out runs/natural
    # samples that continue under new weights: KV cache kept, recomputed, or no continuation
    python benchmarks/studies/natural_lag.py swaps --out runs/natural
    # methods that hold at injected lag, each at the rate that high_lag.py chose
    python benchmarks/studies/natural_lag.py methods --out runs/natural \
        --tasks rle-5e-4 sort-2e-4
    # only write the result of the finished runs
    python benchmarks/studies/natural_lag.py limits --out runs/natural --table

Runs use the real store, admission, engine and learner in warm processes.  Time is counted in
decode steps, so that no number depends on the machine: an update takes as long as the generation
of a batch, and samples are late by `staleness.delay` (long tails, the same in all arms).

A step of an arm that waits less is shorter, so arms are compared **at equal time**: T is the end
of the first run of a task to finish.  Each run's accuracy at T is interpolated between its
evaluations, by the time at which the evaluated version was committed.  `height` is the mean
accuracy up to T.  Differences are from the first arm, paired by seed, with Holm's correction over
a task's arms.  The same command resumes an interrupted study run by run."""

from __future__ import annotations

import json
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import results_file, studies

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError
from asyncrl.experiments.compare import analysis, grid, verdict
from asyncrl.experiments.compare.arms import CORRECTIONS
from asyncrl.experiments.compare.warm_pool import CellStore
from asyncrl.records.page_kit import clean
from asyncrl.supervise.preflight import say

TASKS = {"rle-5e-4": ("rle", 5e-4), "sort-3e-4": ("demo", 3e-4), "cancel-3e-4": ("cancel", 3e-4)}
# at the rate that benchmarks/studies/high_lag.py names for a method, of this one
AT_RATES = {"rle-5e-4": ("rle", 5e-4), "sort-2e-4": ("demo", 2e-4)}
METHODS = {
    "ppo": {"rle-5e-4": 0.25, "sort-2e-4": 0.5},
    "vespo": {"rle-5e-4": 0.25, "sort-2e-4": 1.0},
    "gmpo": {"rle-5e-4": 0.5, "sort-2e-4": 0.5},
    "m2po-published": {"rle-5e-4": 0.25, "sort-2e-4": 0.25},
}
LATE = "staleness.delay=1.0"


def auto(floor: float) -> str:
    return f"staleness.max_lag={{auto='ess',floor={floor:g},most=16}}"


GROUPS = ["advantage.name=rloo"]
SINGLES = ["learner.group_size=1", "advantage.name=reinforce"]
NO_WAIT = ["staleness.on_exceed=drop", "staleness.order=completion"]
ANSWERS_LATE = [LATE, "staleness.delay_of=answer", "staleness.max_lag=4"]
# part -> arm -> --set items; the first arm is what the others are compared with
PARTS: dict[str, dict[str, list[str]]] = {
    "limits": {
        "4": [LATE, "staleness.max_lag=4"],
        **{str(n): [LATE, f"staleness.max_lag={n}"] for n in (1, 2, 8, 16)},
        **{f"auto, floor {floor:g}": [LATE, auto(floor)] for floor in (0.5, 0.9)},
    },
    "groups": {
        "groups": [*ANSWERS_LATE, *GROUPS],
        "singles, batch": [*ANSWERS_LATE, *SINGLES, "advantage.baseline=batch"],
        "singles, ema": [*ANSWERS_LATE, *SINGLES, "advantage.baseline=ema"],
        "groups, no wait": [*ANSWERS_LATE, *GROUPS, *NO_WAIT],
        "singles, batch, no wait": [
            *ANSWERS_LATE,
            *SINGLES,
            "advantage.baseline=batch",
            *NO_WAIT,
        ],
    },
    "swaps": {
        f"{limit}, {kind}": [LATE, f"staleness.max_lag={limit}", f"weights.in_flight={kind}"]
        for limit in (4, 16)
        for kind in ("keep_kv", "recompute_kv", "between_groups")
    },
    "methods": {name: [LATE, "staleness.max_lag=16", *CORRECTIONS[name][1]] for name in METHODS},
}


def tasks_of(part: str) -> dict[str, tuple[str, float]]:
    return AT_RATES if part == "methods" else TASKS


def rate_of(part: str, task: str, arm: str) -> float:
    rate = tasks_of(part)[task][1]
    return rate * METHODS[arm][task] if part == "methods" else rate


class Plan:
    """The runs of one part."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.out = Path(f"{args.out}-quick") if args.quick else args.out
        self.cells = CellStore(self.out)
        self.arms = PARTS[args.part]
        for seed in range(args.seeds):
            for task in args.tasks:
                for arm in self.arms:
                    self.add(task, arm, seed)

    def name(self, task: str, arm: str, seed: int) -> str:
        return f"{self.args.part}-{task}-{re.sub('[ ,]+', '_', arm)}-seed{seed}"

    def add(self, task: str, arm: str, seed: int) -> None:
        args, items = self.args, self.arms[arm]
        source = tasks_of(args.part)[task][0]
        groups = args.groups * (8 if "learner.group_size=1" in items else 1)
        sets = [
            f'model.path="{self.out}/models/{source}"',
            f"learner.steps={args.steps}",
            f"learner.groups={groups}",
            f"learner.lr={rate_of(args.part, task, arm):g}",
            f"evaluation.every={max(1, args.steps // 12)}",
            f"evaluation.prompts={16 if args.quick else 256}",
            f"evaluation.final_prompts={16 if args.quick else 512}",
            "evaluation.ood_prompts=0",
            f"seed={seed}",
            *items,
        ]
        path = results_file.ROOT / "configs" / f"{source}.toml"
        self.cells.add(self.name(task, arm, seed), load.load(path, sets), seed)

    def run(self) -> None:
        if self.args.table:
            return
        for name in self.cells.list_missing():
            studies.prepare(self.cells.configs[name])  # the warm start, once a task
        self.cells.run(self.args.workers, self.tell)

    def tell(self, name: str, event: dict[str, object]) -> None:
        if "done" in event:
            record = self.cells.read(name)
            end, clock = record["accuracy"][1][-1], record["clock"]
            say(f"{name}: {end:.3f} after {clock} decode steps, {record['wall_s']:.0f} s")

    def records(self, task: str) -> dict[str, dict[int, dict[str, Any]]]:
        """arm -> seed -> record, of the seeds that every arm has."""
        found = {
            arm: {
                seed: self.cells.read(self.name(task, arm, seed))
                for seed in range(self.args.seeds)
                if self.cells.get_path(self.name(task, arm, seed)).exists()
            }
            for arm in self.arms
        }
        whole = set.intersection(*(set(runs) for runs in found.values()))
        return {arm: {seed: runs[seed] for seed in sorted(whole)} for arm, runs in found.items()}


# ---- what it comes to ---------------------------------------------------------------------------


def line(record: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Decode steps at which each evaluated version was committed, and its accuracy; a run that was
    given up keeps its last.
    """
    committed = {0: 0.0} | {int(row["version"]): row["clock"] for row in rows_of(record)}
    rewards = {int(step): each for step, each in record["evals"]["heldout"].items()}
    accuracy = [statistics.fmean(rewards[step]) for step in sorted(rewards)]
    return [committed[step] for step in sorted(rewards)], accuracy


def rows_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of committed batches: a run that was given up may leave one that was only trained."""
    return [row for row in record["curve"] if "clock" in row]


def at(record: Mapping[str, Any], time: float) -> tuple[float, float]:
    """Accuracy at `time`, and the mean height of the line up to it."""
    when, accuracy = line(record)
    end = float(np.interp(time, when, accuracy))
    inside = [(t, a) for t, a in zip(when, accuracy, strict=True) if t < time]
    times, heights = zip(*inside, (time, end), strict=True)
    return end, verdict.compute_area(list(times), list(heights))


def last(record: Mapping[str, Any]) -> float:
    """When the run ended by itself; inf: it was given up."""
    return np.inf if record["abandoned"] else line(record)[0][-1]


def facts(runs: Mapping[int, dict[str, Any]], time: float) -> dict[str, Any]:
    """One arm over its seeds."""
    each = [at(record, time) for record in runs.values()]
    many = list(runs.values())
    rows = [[row for row in rows_of(record) if row["clock"] <= time] for record in many]
    out = {
        "seeds": sorted(runs),
        "each": [end for end, _ in each],
        "final": statistics.fmean(end for end, _ in each),
        "heights": [height for _, height in each],
        "height": statistics.fmean(height for _, height in each),
        "batches": statistics.fmean(len(r) for r in rows),
        "lag": statistics.fmean(row["lag/mean"] for r in rows for row in r),
        "lag_largest": max(int(lag) for record in many for lag in record["lag_histogram"]),
        "ess": statistics.fmean(row["is/ess"] for r in rows for row in r),
        "given_up": sum(bool(record["abandoned"]) for record in many),
        "unstable": sum(bool(grid.list_instabilities(record)) for record in many),
        "lost": statistics.fmean(analysis.compute_lost_share(record) for record in many),
    }
    if any("limit/now" in row for row in rows[0]):
        out["limit"] = [[row["limit/now"] for row in r][::10] for r in rows]
    return out


def analyse(plan: Plan) -> dict[str, Any]:
    """task -> T, and arm -> facts with the difference from the first arm."""
    out: dict[str, Any] = {}
    for task in plan.args.tasks:
        records = plan.records(task)
        if not all(records.values()):
            continue
        time = min(last(record) for runs in records.values() for record in runs.values())
        arms = {arm: facts(runs, time) for arm, runs in records.items()}
        for measure in ("each", "heights"):
            values = {
                arm: dict(zip(about["seeds"], about[measure], strict=True))
                for arm, about in arms.items()
            }
            found = verdict.compare_arms(values, next(iter(plan.arms)))
            for arm, difference in found.items():
                name = "final" if measure == "each" else "height"
                arms[arm].setdefault("against_first", {})[name] = studies.shown(difference)
        out[task] = {"decode_steps": time, "arms": arms}
    return out


def table(found: Mapping[str, Any]) -> list[str]:
    """A table a task."""
    out = []
    for task, about in found.items():
        seeds = len(next(iter(about["arms"].values()))["seeds"])
        out += ["", f"{task}, at {about['decode_steps']:.0f} decode steps, {seeds} seeds:", ""]
        out += [f"{'arm':26}{'end':>7}{'height':>8}{'batches':>9}{'lag':>7}{'ESS':>6}{'lost':>6}"]
        for arm, x in about["arms"].items():
            numbers = f"{x['final']:7.3f}{x['height']:8.3f}{x['batches']:9.0f}{x['lag']:7.2f}"
            rest = f"{x['ess']:6.2f}{x['lost']:6.2f}{' !' if x['unstable'] else '  '}"
            mine = x.get("against_first", {})
            out.append(
                f"{arm:26}{numbers}{rest} {studies.tell(mine.get('final'))}"
                f"  height {studies.tell(mine.get('height'))}".rstrip()
            )
    return out


def finish(plan: Plan, found: Mapping[str, Any]) -> None:
    args = plan.args
    print("\n".join(table(found)), file=sys.stderr if args.json else sys.stdout)
    setting = ("tasks", "seeds", "steps", "groups")
    result = clean(
        {
            "beside": args.beside,
            "runs_made_at": args.made_at or results_file.commit(),
            "setting": {key: getattr(args, key) for key in setting},
            "sets": plan.arms,
            "rates": METHODS if args.part == "methods" else {},
            "missing": len(plan.cells.list_missing()),
            "tasks": found,
        }
    )
    if not args.quick:
        path = results_file.write(f"natural_lag_{args.part}", result, args.made_at)
        # numbers of a list on one line
        path.write_text(re.sub(r"\n\s+(?=[-\d.\]n])", " ", path.read_text()))
        say(str(path))
    if args.json:
        print(json.dumps(result))


def options(words: Sequence[str] | None) -> Namespace:
    p = studies.parser(__doc__, "runs/natural_lag", seeds=5, steps=96, groups=16)
    p.add_argument("part", choices=list(PARTS))
    p.add_argument("--tasks", nargs="+", default=[], help="of the part's; none: all of them")
    args = p.parse_args(words)
    known = list(tasks_of(args.part))
    if wrong := [task for task in args.tasks if task not in known]:
        p.error(f"--tasks {wrong[0]}: not a task of {args.part}; choose of {', '.join(known)}")
    args.tasks = args.tasks or known
    if args.quick:
        args.seeds, args.steps, args.groups = 2, 4, 4
    return args


def main(words: Sequence[str] | None = None) -> None:
    plan = Plan(options(words))
    plan.run()
    finish(plan, analyse(plan))


if __name__ == "__main__":
    try:
        main()
    except AsyncrlError as error:
        sys.exit(f"error: {error}")
