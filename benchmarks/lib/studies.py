"""Run studies: arms, cells (one per seed and warm start), facts, paired differences, table, result.

A study names its arms (`--set` items) in blocks: every arm of a block gets all its seeds before
the next block starts, so that finished runs can be paired.  Runs use the real store, engine and
learner in warm processes (asyncrl/experiments/compare/warm_pool.py); the same command resumes an
interrupted study run by run.  Each seed has its own warm start.  Accuracies are exact, from
samples of the run's own generator."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.grid import SYNC, Sweep
from asyncrl.experiments.compare.warm_pool import CellStore
from asyncrl.records.page_kit import clean
from asyncrl.supervise.preflight import MARKER, preflight, say
from lib import results_file, rounds

Arms = Mapping[str, Sequence[str]]  # name -> --set items
EVALUATION = [
    "evaluation.every=10",
    "evaluation.prompts=128",
    "evaluation.final_prompts=512",
    "evaluation.ood_prompts=256",
]
QUICK = [
    "learner.groups=4",
    "learner.group_size=4",
    "evaluation.final_prompts=16",
    "evaluation.prompts=16",
    "evaluation.ood_prompts=16",
]
MEANS = {  # of a curve's last ten batches, where a run has them -> a fact
    "reward_end": "reward/mean",
    "entropy_end": "policy/entropy",
    "kl_ref_end": "kl/target_ref_k3",
    "kl_share_end": "kl/gradient_share",
    "kl_reward_share_end": "kl/reward_gradient_share",
}
WHOLE = {  # of the whole curve
    "kl_mu_mean": "kl/behavior_target_k3",
    "mismatch_mean": "mismatch/k3_at_lag_0",
    "ess_mean": "is/ess",
    "target_ess_mean": "is/target_ess",
    "weight_mean": "is/mean_weight",
    "rejected_mean": "is/rejected_answers",
    "zero_mean": "is/zero_share",
    "clip_mean": "clip/share",
    "length_mean": "answer/length",
    "steps_mean": "optim/steps",
    "gamma_mean": "reshape/gamma",
    "lr_scale_mean": "optim/lr_scale",
}


def parser(
    doc: str | None, out: str, *, seeds: int = 3, steps: int = 50, groups: int = 32
) -> argparse.ArgumentParser:
    """The options that every study has."""
    p = rounds.parser(doc)
    p.add_argument("--out", type=Path, default=Path(out), help="directory of the runs")
    p.add_argument("--seeds", type=int, default=seeds)
    p.add_argument("--steps", type=int, default=steps)
    p.add_argument("--groups", type=int, default=groups, help="of 8 answers, in a batch")
    p.add_argument("--workers", type=int, default=1)
    p.add_argument(
        "--table", action="store_true", help="the result of what is finished; run nothing"
    )
    p.add_argument("--made-at", default="", help="commit of the runs, where it is not this one")
    return p


def put_first(sweep: Sweep, limits: Sequence[float]) -> None:
    """Let these limits have all their seeds before the others start, after the synchronous arm."""
    at = {arm: limit for (_, limit), arm in sweep.plan.cell.items() if limit in limits}
    last = len(limits)
    rank = {arm: limits.index(at[arm]) if arm in at else last for arm in sweep.configs} | {SYNC: 0}
    sweep.order.sort(key=lambda run: rank[run[0]])


def prepare(config: Config) -> None:
    """Make the model of a study's cell if it is not there, in the folder that the study names."""
    path = Path(config.model.path)
    path.mkdir(parents=True, exist_ok=True)
    (path / MARKER).touch()  # a warm start may build a model there
    preflight(config)


class Study:
    """The cells of one directory, by arm.  source: name of a config in configs/; prefix: of the
    cells' names.
    """

    def __init__(
        self, args: argparse.Namespace, source: str, prefix: str, common: Sequence[str]
    ) -> None:
        self.args = args
        self.source = results_file.ROOT / "configs" / f"{source}.toml"
        self.prefix = prefix
        self.out = Path(f"{args.out}-quick") if args.quick else args.out
        self.task = load.load(self.source).task.name
        self.common, self.cells = (
            [f"learner.groups={args.groups}", *common, *(QUICK if args.quick else [])],
            CellStore(self.out),
        )
        self.arms: dict[str, dict[int, str]] = {}  # arm -> seed -> cell

    def block(self, arms: Arms, seeds: int | None = None, first: int = 0) -> None:
        """Add arms, with seeds from `first` on; every arm of a seed comes before the next seed."""
        count = 1 if self.args.quick else seeds or self.args.seeds
        for seed in range(first, first + count):
            for arm, sets in arms.items():
                items = [
                    *self.common,
                    f'model.path="{self.out}/models/{self.task}-{seed}"',
                    f"seed={seed}",
                    *sets,
                ]
                slug = arm.replace(", ", "-").replace(" ", "_")
                self.arms.setdefault(arm, {})[seed] = name = f"{self.prefix}-{slug}-seed{seed}"
                self.cells.add(name, load.load(self.source, items), seed)

    def warm_starts(self, names: Sequence[str]) -> None:
        """Make the models of these cells that are not there.  It takes one thread: beside other
        work two spin on each other.
        """
        from asyncrl.tasks.warm_start import warm_start

        for name in names:
            config = self.cells.configs[name]
            if not (Path(config.model.path) / "config.json").exists():
                say(
                    f"warm start {config.model.path}: "
                    f"{warm_start(config, config.model.path, threads=1)}"
                )
                preflight(config)

    def run(self) -> None:
        """Make what is missing; the models first."""
        self.warm_starts(self.cells.list_missing())
        began = time.monotonic()

        def tell(name: str, event: dict[str, object]) -> None:
            if "done" in event:
                r = self.cells.read(name)
                ends = (
                    f"{r['accuracy'][1][0]:.3f} -> {r['accuracy'][1][-1]:.3f}"
                    if r["accuracy"][1]
                    else "no evaluation"
                )
                say(
                    f"{(time.monotonic() - began) / 60:6.1f} min  {name}: {ends}, "
                    f"{r['wall_s']:.0f} s {r.get('failed', '')}"
                )

        self.cells.run(self.args.workers, tell, abandon=False)

    def found(self, arm: str) -> dict[int, dict[str, Any]]:
        """seed -> facts of the finished runs of an arm."""
        return {
            seed: facts(self.cells.read(n))
            for seed, n in self.arms.get(arm, {}).items()
            if self.cells.get_path(n).exists()
        }


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """The summary of one run."""
    rows, (steps, accuracy), ood = (
        record["curve"],
        record["accuracy"],
        record["evals"].get("ood", {}),
    )
    norms = [r["optim/grad_norm"] for r in rows] or [0.0]
    out = {
        "accuracy": accuracy,
        "steps": steps,
        "start": accuracy[0],
        "end": accuracy[-1],
        "best": max(accuracy),
        "area": verdict.compute_area(steps, accuracy),
        "ood": statistics.fmean(ood[last]) if (last := str(int(steps[-1]))) in ood else None,
        "swing": statistics.fmean(abs(a - b) for a, b in pairwise(accuracy)),
        "grad_norm_mean": statistics.fmean(norms),
        "grad_norm_cv": statistics.pstdev(norms) / max(statistics.fmean(norms), 1e-12),
        "grad_norm_max": max(norms),
        "collapsed": accuracy[-1] < accuracy[0] / 2,
        "failed": record.get("failed", ""),
        "trouble": verdict.list_instabilities(accuracy, rows),
        "kl_mu_max": max((r["kl/behavior_target_k3"] for r in rows), default=0.0),
        "weights_digest": record["weights_digest"],
    }
    if rows and "kl/target_ref_k3" in rows[-1]:
        out["kl_ref_last"] = rows[-1]["kl/target_ref_k3"]
    out["unstable"] = bool(out["trouble"] or out["failed"])
    for name, key in MEANS.items():
        if values := [r[key] for r in rows[-10:] if key in r]:
            out[name] = statistics.fmean(values)
    for name, key in WHOLE.items():
        if values := [r[key] for r in rows if key in r]:
            out[name] = statistics.fmean(values)
    return out


def compare(
    arms: Mapping[str, Mapping[int, Mapping[str, Any]]], base: str, what: str
) -> dict[str, verdict.PairedDifference]:
    """Every arm's `what` less that of `base`, paired by seed over the seeds that both have (two or
    more), with Holm's correction.
    """
    values = {
        arm: {seed: facts[what] for seed, facts in runs.items() if facts.get(what) is not None}
        for arm, runs in {base: {}, **arms}.items()
    }
    return verdict.compare_arms(values, base, least=2)


def shown(d: verdict.PairedDifference) -> dict[str, Any]:
    return {
        "difference": d.mean,
        "interval": [d.low, d.high],
        "seeds": d.seeds,
        "p": d.p,
        "p_holm": d.adjusted,
    }


def analyse(
    study: Study,
    base: str,
    *,
    measures: Sequence[str] = ("end", "ood"),
    pairs: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """arm -> means over seeds, each run's facts, and differences from `base` in each measure;
    `pairs`: (arm, other) compared as well.

    Holm's correction runs over the arms of one measure, and over the pairs of one measure.
    """
    runs = {arm: study.found(arm) for arm in study.arms}
    runs = {arm: x for arm, x in runs.items() if x}
    out: dict[str, Any] = {}
    for arm, x in runs.items():
        numbers = [
            k
            for k, v in next(iter(x.values())).items()
            if isinstance(v, bool | int | float) and all(e.get(k) is not None for e in x.values())
        ]
        out[arm] = {"seeds": sorted(x)} | {
            k: statistics.fmean(float(e[k]) for e in x.values()) for k in numbers
        }
        out[arm] |= {"missing": len(study.arms[arm]) - len(x), "each": [x[s] for s in sorted(x)]}
    for what in measures:
        for arm, d in compare(runs, base, what).items():
            out[arm].setdefault("against_base", {})[what] = shown(d)
        beside = {
            f"{a} | {b}": compare({a: runs[a], b: runs[b]}, b, what).get(a)
            for a, b in pairs
            if a in runs and b in runs
        }
        known = {k: d for k, d in beside.items() if d is not None}
        verdict.adjust_by_holm(known)
        for key, d in known.items():
            arm, other = key.split(" | ")
            out[arm].setdefault("pairs", {}).setdefault(other, {})[what] = shown(d)
    return out


COLUMNS = {
    "start": "start",
    "end": "exact",
    "ood": "ood",
    "reward_end": "reward",
    "swing": "swing",
    "grad_norm_mean": "|g|",
    "grad_norm_cv": "cv",
}


def tell(d: Mapping[str, Any] | None) -> str:
    if not d:
        return ""
    return (
        f"{d['difference']:+.3f} [{d['interval'][0]:+.3f}, {d['interval'][1]:+.3f}] p "
        f"{d['p_holm']:.3f}"
    )


def table(
    found: Mapping[str, Any], columns: Mapping[str, str] = COLUMNS, measure: str = "end"
) -> list[str]:
    """One line an arm: means over its seeds, runs that collapsed and that are unstable by rule, the
    difference from the base.
    """
    out = [
        f"{'arm':30}{'seeds':>6}"
        + "".join(f"{title:>8}" for title in columns.values())
        + f"{'collapsed':>10}{'unstable':>9}  against the base"
    ]
    for arm, x in found.items():
        n = len(x["seeds"])
        cells = "".join(f"{x[k]:8.3f}" if k in x else f"{'-':>8}" for k in columns)
        out.append(
            f"{arm:30}{n:6}{cells}{x['collapsed'] * n:8.0f}/{n}{x['unstable'] * n:7.0f}/{n}  "
            f"{tell(x.get('against_base', {}).get(measure))}"
        )
    for arm, x in found.items():
        out += [
            f"{arm} against {other}: " + "; ".join(f"{what} {tell(d)}" for what, d in y.items())
            for other, y in x.get("pairs", {}).items()
        ]
    return out


def finish(
    study: Study,
    name: str,
    found: Mapping[str, Any],
    setting: Mapping[str, Any],
    columns: Mapping[str, str] = COLUMNS,
    **more: Any,
) -> None:
    """Print the table and write the result; `setting` and what is missing go with it."""
    args = study.args
    print("\n".join(table(found, columns)), file=sys.stderr if args.json else sys.stdout)
    result = clean(
        {
            "beside": args.beside,
            "runs_made_at": args.made_at or results_file.commit(),
            "setting": {"steps": args.steps, "seeds": args.seeds, "groups": args.groups}
            | dict(setting),
            "common": study.common,
            "missing": study.cells.list_missing(),
            "arms": found,
        }
        | more
    )
    if not args.quick:
        path = results_file.write(name, result)
        # numbers of a list on one line
        path.write_text(re.sub(r"\n\s+(?=[-\d.\]n])", " ", path.read_text()))
        say(str(path))
    if args.json:
        print(json.dumps(result))
