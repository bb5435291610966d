"""Compare every method of `sweep` and `compare` at an injected lag of 16 and beyond.

    # all of it, within ten hours; the same command resumes an interrupted study
    python benchmarks/studies/high_lag.py --out runs/high --workers 2 --budget-minutes 600
    # only write the result of the finished runs
    python benchmarks/studies/high_lag.py --out runs/high --table
    # an engine that differs from the learner; another directory, as names of runs are the same
    python benchmarks/studies/high_lag.py --out runs/high_fp8 --quantize fp8
    # the best methods again, with enough seeds to separate them
    python benchmarks/studies/high_lag.py --out runs/high_best \
        --methods ppo,tis,vespo,oapl,dis,gac --lags 16,64,0,8,32 --seeds 10
    # a quick test; writes no result
    python benchmarks/studies/high_lag.py --out runs/high --quick

The comparison is only fair if each method has a good learning rate.  For each task and number of
updates, a method gets the best of the same factors (--rates) of the task's rate.  It is chosen by
one run for each factor at --tune-at versions of lag (more runs: --tune-seeds), with a seed that
the comparison does not use, by the mean accuracy.  --clips adds bounds of the ratio to choose
from, for the methods of CLIPPED.  A single factor is used untuned, and the result says so.  The
same runs give the mean accuracy at the rate where a batch moves the policy by --kl nats a token at
that lag, so that methods can be compared at equal movement.

Then every method runs at its rate at every lag and seed, with 1 and with 4 updates a batch.
Differences are against PPO on the behavior policy at the same lag, paired by seed; Holm's
correction runs over all lags and methods of a task and number of updates.  `tis` with 4 updates
is decoupled PPO with the updates that its clip is for.  At lag 0 and one update, methods of the
same mathematics must agree except for noise; the result gives the size of that noise.

An injected lag k is the full lag from batch k on: of 150 batches at lag 64, the first 64 have
less.  Runs use the real store, admission, engine and learner in warm processes."""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import results_file, studies

from asyncrl.config import load, methods
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.experiments.compare import analysis, grid, verdict
from asyncrl.experiments.compare.arms import CORRECTIONS
from asyncrl.experiments.compare.warm_pool import CellStore
from asyncrl.records.page_kit import clean
from asyncrl.supervise.preflight import say

BASE = "ppo"
TASKS = {"rle-5e-4": ("rle", 5e-4), "rle-1e-3": ("rle", 1e-3), "sort-2e-4": ("demo", 2e-4)}
BESIDE = (BASE, "tis", "seq_tis", "icepop", "mis", "reshape", "k3")
# first what was published for high lag, so that an early end leaves what is asked for most
FIRST = (BASE, "tis", "vespo", "oapl", "vcpo", "m2po-published", "dis", "gac", "gepo", "asymre")
ARMS = {
    name: CORRECTIONS[name][1]
    for name in dict.fromkeys(
        (
            *FIRST,
            *BESIDE,
            *(name for name, x in methods.METHODS.items() if x.stale),
            "tis-version",
            "ppo-ewma",
        )
    )
}
# what GMPO has beside its ratio, with PPO's
ARMS["ppo-grpo"] = [
    *ARMS[BASE],
    *(
        f"{key}={value}"
        for key, value in methods.METHODS["gmpo"].keys.items()
        if key.startswith(("advantage.", "loss.reduction"))
    ),
]
# score centering (arXiv 2609.20807) and the same without it
CENTER = ["loss.surrogate=reinforce", "loss.center=exact", "weights.slots=80"]
# decoupled PPO around each proximal policy but the behavior policy's, which is `ppo`: with `tis`
# and `interpolate`, the other three
ARMS["interpolate"] = [*ARMS["tis"], "correction.proximal=interpolate"]
ARMS["tis-version"] = [*ARMS["tis-version"], "weights.slots=80"]
ARMS |= {
    "none": ["loss.surrogate=gpg", "correction.proximal=behavior"],
    "center": [*CENTER, "correction.proximal=behavior"],
    "center-top": [*CENTER, "loss.center=top", "correction.proximal=behavior"],
    "center-tis": [*CENTER, "correction.proximal=recompute", "correction.level=token"],
    # Muon for matrices (arXiv 2606.30634), and a rate divided by 1 + lag (arXiv 2607.01083)
    "muon": [*ARMS[BASE], "learner.optimizer=muon"],
    "rate-by-lag": [*ARMS[BASE], "learner.lr_lag=inverse"],
    "muon-rate-by-lag": [*ARMS[BASE], "learner.optimizer=muon", "learner.lr_lag=inverse"],
}
# at pi = mu and before a batch's second update these have the gradient of PPO with their advantage
# and reduction
ALIKE = (BASE, "vespo", "dis", "m2po-published", "minpro", "gmpo", "bapo", "opsm", "dppo-kl")
CLIPPED = (BASE, "tis", "interpolate", "tis-version", "ppo-ewma")  # with one bound of the ratio
TUNING_SEED = 1000
EVALUATION = [
    "evaluation.every=15",
    "evaluation.prompts=128",
    "evaluation.final_prompts=512",
    "evaluation.ood_prompts=0",
    "record.kl_moved=8",
]


class Cell(NamedTuple):
    """One run but for its seed."""

    task: str
    method: str
    updates: int
    lag: int
    factor: float
    clip: float = 0.0  # loss.eps_low and eps_high; 0: the method's

    def name(self, seed: int) -> str:
        clip = f"-c{self.clip:g}" if self.clip else ""
        return (
            f"{self.task}-{self.method}-u{self.updates}-lag{self.lag}-x{self.factor:g}{clip}"
            f"-seed{seed}"
        )


class Plan:
    """The cells to run, in order, and the arms that a config refuses."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(f"{args.out}-quick") if args.quick else args.out
        self.cells = CellStore(self.out)
        self.refused: dict[str, str] = {}
        self.deadline = time.monotonic() + 60 * args.budget_minutes

    def config(self, cell: Cell, seed: int) -> Config:
        """Raises ConfigError."""
        source, rate = TASKS[cell.task]
        starts = self.args.warm_starts
        model = f"{source}-{seed % starts}" if starts > 1 else source
        sets = [
            *EVALUATION,
            f'model.path="{self.out}/models/{model}"',
            f"learner.steps={self.args.steps}",
            f"learner.groups={self.args.groups}",
            f"learner.minibatches={cell.updates}",
            f"learner.lr={rate * cell.factor:g}",
            f"seed={seed}",
            f"generator.quantize={self.args.quantize}",
            *(studies.QUICK if self.args.quick else []),
            *grid.list_limit_sets(cell.lag, True),
        ]
        bound = f"{cell.clip:g}"
        clip = [f"loss.eps_low={bound}", f"loss.eps_high={bound}"] if cell.clip else []
        path = results_file.ROOT / "configs" / f"{source}.toml"
        return load.load(path, [*sets, *ARMS[cell.method], *clip])

    def add(self, cells: Iterable[Cell], seed: int) -> None:
        """Cells that are to be there; what no config allows is noted and left out."""
        for cell in cells:
            try:
                config = self.config(cell, seed)
            except ConfigError as error:
                self.refused[f"{cell.method}, {cell.updates} updates, lag {cell.lag}"] = str(error)
                continue
            self.cells.add(cell.name(seed), config, seed)

    def record(self, cell: Cell, seed: int) -> dict[str, Any] | None:
        name = cell.name(seed)
        return self.cells.read(name) if self.cells.get_path(name).exists() else None

    def in_time(self) -> bool:
        return time.monotonic() < self.deadline

    def run(self) -> None:
        """Make what is missing of what was added, as long as there is time."""
        if self.args.table:
            return
        for name in self.cells.list_missing():
            if not self.in_time():
                return
            studies.prepare(self.cells.configs[name])
        self.cells.run(self.args.workers, self.tell, may_start=self.in_time)

    def tell(self, name: str, event: dict[str, object]) -> None:
        if "done" in event:
            record = self.cells.read(name)
            say(
                f"{name}: {record['accuracy'][1][-1]:.3f}, {record['wall_s']:.0f} s"
                f"{', given up' if record['abandoned'] else ''} {record.get('failed', '')}"
            )

    # ---- rates ------------------------------------------------------------------------------

    @property
    def tuning_seeds(self) -> range:
        return range(TUNING_SEED, TUNING_SEED + self.args.tune_seeds)

    def tuning(self, task: str, method: str, updates: int) -> list[Cell]:
        at = self.args.tune_at
        clips = self.args.clips if method in CLIPPED else [0.0]
        return [Cell(task, method, updates, at, x, clip) for x in self.args.rates for clip in clips]

    def chosen(self, task: str, method: str, updates: int) -> tuple[float, float] | None:
        """The chosen factor of the task's rate, and clip; None: the runs are not all there."""
        tried = self.tuning(task, method, updates)
        if len(tried) == 1:
            return tried[0].factor, tried[0].clip
        found = self.tuned(task, method, updates)
        if len(found) < len(tried):
            return None
        best = max(found, key=lambda row: (row["height"], -row["factor"]))
        return best["factor"], best["clip"]

    def tuned(self, task: str, method: str, updates: int) -> list[dict[str, float]]:
        """Means of the runs that choose a rate, one row a factor that has all its seeds."""
        out = []
        for cell in self.tuning(task, method, updates):
            runs = [self.record(cell, seed) for seed in self.tuning_seeds]
            if all(runs):
                means = [tuned_facts(record, self.args.steps) for record in runs if record]
                row = {key: statistics.fmean(each[key] for each in means) for key in means[0]}
                out.append({"factor": cell.factor, "clip": cell.clip} | row)
        return out

    def screen(self, task: str, updates: int, lag: int) -> list[Cell]:
        """One lag's cells, of the methods whose rate is known."""
        chosen = {m: self.chosen(task, m, updates) for m in self.args.methods}
        return [Cell(task, m, updates, lag, *x) for m, x in chosen.items() if x is not None]


def height(record: dict[str, Any], steps: int) -> float:
    """Mean height of a run's accuracy over its steps; one that was given up keeps its last."""
    return verdict.compute_area(*analysis.complete_curve(record, steps))


def tuned_facts(record: dict[str, Any], steps: int) -> dict[str, float]:
    """Of one run that helps to choose a rate."""
    moved = verdict.list_values(record["curve"], "kl/moved")
    return {
        "height": height(record, steps),
        "final": analysis.complete_curve(record, steps)[1][-1],
        "kl_moved": statistics.fmean(moved) if moved else math.nan,
    }


def at_movement(rows: Sequence[Mapping[str, float]], kl: float) -> float:
    """Height at the rate whose batches move the policy by `kl` nats a token, on the line over
    log KL between two rates; NaN: no two rates have it between them.
    """
    known = sorted((r["kl_moved"], r["height"]) for r in rows if r["kl_moved"] > 0)
    for (low, left), (high, right) in itertools.pairwise(known):
        if low <= kl <= high:
            share = math.log(kl / low) / math.log(high / low) if high > low else 0.0
            return left + share * (right - left)
    return math.nan


def make(plan: Plan) -> None:
    """Rates, then the screen: seed by seed, so that what is there can be paired."""
    args = plan.args
    for updates, task in itertools.product(args.updates, args.tasks):
        if len(args.rates) > 1:
            for method in args.methods:
                for seed in plan.tuning_seeds:
                    plan.add(plan.tuning(task, method, updates), seed)
            plan.run()
        for seed in range(args.seeds):
            for lag in args.lags:
                plan.add(plan.screen(task, updates, lag), seed)
        plan.run()


# ---- what it comes to ---------------------------------------------------------------------------


def facts(records: Mapping[int, dict[str, Any]], steps: int) -> dict[str, Any]:
    """One cell over its seeds."""
    runs = [records[seed] for seed in sorted(records)]
    ends = [analysis.complete_curve(r, steps)[1][-1] for r in runs]
    heights = [height(r, steps) for r in runs]
    out = {
        "seeds": sorted(records),
        "each": ends,
        "final": statistics.fmean(ends),
        "heights": heights,
        "area": statistics.fmean(heights),
        "ess": min(analysis.find_lowest_ess(r["curve"]) for r in runs),
        "given_up": sum(bool(r["abandoned"]) for r in runs),
        "trouble": sorted({x.split(":")[0] for r in runs for x in grid.list_instabilities(r)}),
        "unstable": sum(bool(grid.list_instabilities(r)) for r in runs),
    }
    for name, key in (("kl_behavior", "kl/behavior_target_k3"), ("kl_moved", "kl/moved")):
        each = [x for r in runs for x in verdict.list_values(r["curve"], key)]
        out[name] = statistics.fmean(each) if each else math.nan
    return out


def against(
    cells: Mapping[tuple[int, str], dict[str, Any]], prompts: int, measure: str = "each"
) -> dict[tuple[int, str], verdict.PairedDifference]:
    """(lag, method) -> difference of `measure` from BASE's at the same lag over the seeds of both;
    Holm over all of them.
    """
    out = {}
    for (lag, method), mine in cells.items():
        if method == BASE or (lag, BASE) not in cells:
            continue
        base = cells[lag, BASE]
        theirs = dict(zip(base["seeds"], base[measure], strict=True))
        both = [
            (value, theirs[seed])
            for seed, value in zip(mine["seeds"], mine[measure], strict=True)
            if seed in theirs
        ]
        if both:
            out[lag, method] = verdict.compare_pairs(
                [a for a, _ in both], [b for _, b in both], prompts=prompts
            )
    verdict.adjust_by_holm(out)
    return out


def noise(cells: Mapping[tuple[int, str], dict[str, Any]], alike: Sequence[Sequence[str]]) -> Any:
    """Between methods of the same mathematics at lag 0: the largest difference of two runs of one
    seed, and the mean one; None: no two are there.
    """
    apart = []
    for names in alike:
        there = [cells[0, n] for n in names if (0, n) in cells]
        for one, other in itertools.combinations(there, 2):
            theirs = dict(zip(other["seeds"], other["each"], strict=True))
            apart += [
                abs(value - theirs[seed])
                for seed, value in zip(one["seeds"], one["each"], strict=True)
                if seed in theirs
            ]
    if not apart:
        return None
    return {
        "methods": [list(names) for names in alike],
        "pairs": len(apart),
        "mean": statistics.fmean(apart),
        "largest": max(apart),
    }


def same(plan: Plan, task: str) -> list[list[str]]:
    """The methods of ALIKE by advantage, reduction and rate."""
    groups: dict[Any, list[str]] = {}
    for method in (m for m in plan.args.methods if m in ALIKE):
        chosen = plan.chosen(task, method, 1)
        if chosen is None:
            continue
        try:
            config = plan.config(Cell(task, method, 1, 0, *chosen), 0)
        except ConfigError:
            continue
        key = (repr(config.advantage), config.loss.reduction, config.learner.lr)
        groups.setdefault(key, []).append(method)
    return [names for names in groups.values() if len(names) > 1]


def analyse(plan: Plan) -> dict[str, Any]:
    """task -> updates -> lag -> method -> facts, with the difference from BASE."""
    args = plan.args
    out: dict[str, Any] = {}
    for task, updates in itertools.product(args.tasks, args.updates):
        cells = {}
        for lag in args.lags:
            for cell in plan.screen(task, updates, lag):
                records = {s: plan.record(cell, s) for s in range(args.seeds)}
                found = {s: r for s, r in records.items() if r is not None}
                if found:
                    cells[lag, cell.method] = facts(found, args.steps) | {
                        "factor": cell.factor,
                        "clip": cell.clip,
                    }
        if not cells:
            continue
        for key, d in against(cells, 16 if args.quick else 512).items():
            cells[key]["against"] = {
                "difference": d.mean,
                "interval": [d.low, d.high],
                "interval_other_prompts": [d.prompt_low, d.prompt_high],
                "p_holm": d.adjusted,
                "seeds": d.seeds,
                "word": d.choose_word() if d.seeds > 1 else "no verdict",
                "detectable": verdict.find_detectable(d.sd, d.seeds),
            }
        for key, d in against(cells, 0, "heights").items():
            cells[key]["height_against"] = studies.shown(d)
        by_lag: dict[str, dict[str, Any]] = {}
        for (lag, method), about in cells.items():
            by_lag.setdefault(str(lag), {})[method] = about
        out.setdefault(task, {})[str(updates)] = {
            "by_lag": by_lag,
            "noise": noise(cells, same(plan, task)) if updates == 1 else None,
            "rates": rates(plan, task, updates),
        }
    return out


def rates(plan: Plan, task: str, updates: int) -> dict[str, Any]:
    """method -> what each factor came to, and its height at equal movement."""
    if len(plan.args.rates) * len(plan.args.clips) < 2:
        return {}
    tried = {m: plan.tuned(task, m, updates) for m in plan.args.methods}
    return {
        method: {
            "tried": rows,
            "height_at_equal_kl": at_movement(
                [row for row in rows if row["clip"] == plan.args.clips[0]], plan.args.kl
            )
            if len(plan.args.rates) > 1
            else None,
        }
        for method, rows in tried.items()
    }


def table(found: Mapping[str, Any]) -> list[str]:
    """Methods down, lags across: mean accuracy (seeds), the difference from BASE with its interval,
    ! unstable runs.
    """
    out = []
    for task, by_updates in found.items():
        for updates, about in by_updates.items():
            by_lag = about["by_lag"]
            names = list(dict.fromkeys(m for row in by_lag.values() for m in row))
            out += ["", f"{task}, {updates} update(s) a batch:", ""]
            out += ["|lag|rate x|" + "|".join(by_lag) + "|", "|---" * (len(by_lag) + 2) + "|"]
            for name in names:
                factor = next(row[name]["factor"] for row in by_lag.values() if name in row)
                row = "|".join(shown(by_lag[lag].get(name)) for lag in by_lag)
                out.append(f"|`{name}`|{factor:g}|{row}|")
    return out


def shown(about: Mapping[str, Any] | None) -> str:
    if about is None:
        return ""
    text = f"{about['final']:.2f} (n={len(about['seeds'])})"
    if (d := about.get("against")) and d["seeds"] > 1:
        text += f" {d['difference']:+.2f} [{d['interval'][0]:+.2f}, {d['interval'][1]:+.2f}]"
    return text + (f" !{about['unstable']}" if about["unstable"] else "")


def verdicts(found: Mapping[str, Any]) -> list[str]:
    """A sentence a lag: what beats BASE, or that nothing does and what would have been seen."""
    out = []
    for task, by_updates in found.items():
        for updates, about in by_updates.items():
            for lag, row in about["by_lag"].items():
                out.append(f"{task}, {updates} update(s), lag {lag}: {judged(row)}")
            if n := about["noise"]:
                out.append(
                    f"{task}, lag 0, the same mathematics: {n['mean']:.3f} apart on average, "
                    f"{n['largest']:.3f} at most ({n['pairs']} pairs)"
                )
    return out


def judged(row: Mapping[str, Mapping[str, Any]]) -> str:
    if BASE not in row:
        return f"no run of {BASE} to compare with"
    known = {m: a["against"] for m, a in row.items() if "against" in a}
    paired = {m: d for m, d in known.items() if d["seeds"] > 1}
    base = f"{BASE} {row[BASE]['final']:.3f}"
    best = max(row, key=lambda m: row[m]["final"])
    if not paired:
        return f"{base}, highest {best} {row[best]['final']:.3f}; one seed: no verdict is possible"
    better = [m for m, d in paired.items() if d["word"] == "better"]
    worse = [m for m, d in paired.items() if d["word"] == "worse"]
    tail = f"; worse: {', '.join(worse)}" if worse else ""
    if better:
        each = ", ".join(f"{m} {paired[m]['difference']:+.3f}" for m in better)
        return f"{base}; better: {each}{tail}"
    least = [d["detectable"] for d in paired.values() if not math.isnan(d["detectable"])]
    power = (
        f" (of {statistics.median(least):.2f} and less a difference would often go unseen, before "
        "Holm)"
        if least
        else ""
    )
    return f"nothing is visibly better than {base}{power}; highest {best}{tail}"


def finish(plan: Plan, found: dict[str, Any]) -> None:
    args = plan.args
    said = verdicts(found)
    print("\n".join([*table(found), "", *said]), file=sys.stderr if args.json else sys.stdout)
    result = clean(
        {
            "beside": args.beside,
            "runs_made_at": args.made_at or results_file.commit(),
            "setting": {
                key: getattr(args, key)
                for key in (
                    "tasks",
                    "methods",
                    "lags",
                    "updates",
                    "rates",
                    "clips",
                    "warm_starts",
                    "tune_at",
                    "tune_seeds",
                    "quantize",
                    "kl",
                    "seeds",
                    "steps",
                    "groups",
                )
            },
            "missing": len(plan.cells.list_missing()),
            "refused": plan.refused,
            "verdict": said,
            "tasks": found,
        }
    )
    if not args.quick:
        path = results_file.write("high_lag", result, args.made_at)
        # numbers of a list on one line
        path.write_text(re.sub(r"\n\s+(?=[-\d.\]n])", " ", path.read_text()))
        say(str(path))
    if args.json:
        import json

        print(json.dumps(result))


def options() -> argparse.Namespace:
    p = studies.parser(__doc__, "runs/high_lag", seeds=3, steps=150)
    p.add_argument("--tasks", default=",".join(TASKS))
    p.add_argument("--methods", default=",".join(ARMS))
    p.add_argument("--lags", default="16,64,0,4", help="in the order they are made")
    p.add_argument("--updates", default="1,4", help="optimizer steps a batch")
    p.add_argument(
        "--rates", default="1,0.5,0.25", help="factors of the task's rate to choose from"
    )
    p.add_argument(
        "--clips",
        default="0",
        help="loss.eps_low and eps_high to choose from with the rate; 0: the method's own",
    )
    p.add_argument(
        "--quantize", default="none", help="int8, fp8: the engine's weights, not the learner's"
    )
    p.add_argument("--warm-starts", type=int, default=1, help="models, taken by turns of the seeds")
    p.add_argument("--tune-at", type=int, default=16, help="lag of the runs that choose")
    p.add_argument("--tune-seeds", type=int, default=1, help="runs a rate that choose")
    p.add_argument(
        "--kl", type=float, default=0.0089, help="nats a token by a batch, of equal movement"
    )
    p.add_argument(
        "--budget-minutes", type=float, default=math.inf, help="no run is started after that"
    )
    args = p.parse_args()
    if args.quick:
        args.tasks, args.methods, args.lags = "rle-5e-4", f"{BASE},dis", "2,0"
        args.rates, args.updates, args.tune_at = "1,2", "1", 2
        args.seeds, args.steps = 2, 3
    args.tasks, args.methods = args.tasks.split(","), args.methods.split(",")
    args.lags = [int(x) for x in args.lags.split(",")]
    args.updates = [int(x) for x in args.updates.split(",")]
    args.rates = [float(x) for x in args.rates.split(",")]
    args.clips = [float(x) for x in args.clips.split(",")]
    for key, known in (("tasks", TASKS), ("methods", ARMS)):
        if wrong := [x for x in getattr(args, key) if x not in known]:
            raise ConfigError(f"--{key} {wrong[0]}: unknown; choose of {', '.join(known)}")
    return args


def main() -> None:
    plan = Plan(options())
    make(plan)
    finish(plan, analyse(plan))


if __name__ == "__main__":
    try:
        main()
    except AsyncrlError as error:
        sys.exit(f"error: {error}")
