"""Run a grid of injected lag, correction and seed, to see which corrections collapse at what lag.

    # everything: three tasks, lags 0 to 16, five seeds
    python benchmarks/studies/lag_grid.py --out runs/grid
    python benchmarks/studies/lag_grid.py --out runs/grid --only rle-5e-4 --seeds 3 --lags 0,4,8
    # five finished cells again, as real processes; kept for the result
    python benchmarks/studies/lag_grid.py --out runs/grid --check 5
    # only write the result of the finished runs
    python benchmarks/studies/lag_grid.py --out runs/grid --table
    # a quick test with two lags, three batches, one seed; writes no result
    python benchmarks/studies/lag_grid.py --out runs/grid --quick

Decoupled PPO's clip bounds the movement of a batch's own updates: with one update it does
nothing, and `tis` and `mis` are only their weights.  So there are also arms with UPDATES updates
a batch (`tis-4`, `mis-4`, with `none-4` and `ppo-4`), at half the rate: a batch then moves the
policy one to two times as far as one update (noise adds up as a root, a direction as a sum).
Tables and pages give each arm's updates.  Each run uses the real store, admission, engine and
learner in a warm process.  The same command resumes an interrupted study run by run."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for lib

from lib import results_file, studies

from asyncrl.experiments.compare import grid
from asyncrl.experiments.compare.analysis import analyze_sweep
from asyncrl.experiments.compare.arms import CORRECTIONS, Arm
from asyncrl.experiments.compare.page import write_sweep
from asyncrl.records import metrics
from asyncrl.records.page_kit import clean
from asyncrl.supervise.preflight import preflight, say

TASKS = {"rle-5e-4": ("rle", "5e-4"), "rle-1e-3": ("rle", "1e-3"), "sort-2e-4": ("demo", "2e-4")}
ONE = ("none", "ppo", "tis", "mis", "reshape", "reshape-stop", "k3")
SEVERAL = ("none", "ppo", "tis", "mis")  # with several updates a batch as well
# updates a batch of those, and their rate beside the task's
UPDATES = 4
SLOWER = 0.5
QUICK = (
    "learner.groups=8",
    "learner.group_size=4",
    "evaluation.prompts=16",
    "evaluation.final_prompts=16",
)
EVALUATION = (
    "evaluation.every=10",
    "evaluation.prompts=128",
    "evaluation.final_prompts=512",
    "evaluation.ood_prompts=0",
)


def corrections(lr: str) -> dict[str, list[str]]:
    """Arm -> --set items, at the task's learning rate."""
    more = [f"learner.minibatches={UPDATES}", f"learner.lr={SLOWER * float(lr):g}"]
    return {n: CORRECTIONS[n][1] for n in ONE} | {
        f"{n}-{UPDATES}": [*CORRECTIONS[n][1], *more] for n in SEVERAL
    }


def updates(what: grid.SweepPlan) -> dict[str, int]:
    """Arm -> optimizer steps a batch."""
    configs = {n: what.arms[arm].learner for (n, _), arm in what.cell.items()}
    return {n: c.minibatches * c.epochs for n, c in configs.items()}


def titles(made: dict[str, int]) -> dict[str, str]:
    """The page's description of each arm."""
    what = {n: CORRECTIONS[n.removesuffix(f"-{UPDATES}")][0] for n in made}
    return {
        n: f"{what[n]}; {count} update{'s' if count > 1 else ''} a batch"
        + (f" at {SLOWER:g} of the rate" if n.endswith(f"-{UPDATES}") else "")
        for n, count in made.items()
    }


def make(task: str, args: argparse.Namespace) -> grid.Sweep:
    """The sweep of one task and learning rate, in OUT/TASK."""
    name, lr = TASKS[task]
    sets = [
        f"learner.lr={lr}",
        f"learner.steps={args.steps}",
        *EVALUATION,
        *(QUICK if args.quick else []),
    ]
    limits = grid.parse_limits(args.lags, True)
    what = grid.SweepPlan(
        str(results_file.ROOT / "configs" / f"{name}.toml"),
        sets,
        [Arm(*named) for named in corrections(lr).items()],
        limits,
        injected=True,
    )
    return grid.Sweep(args.out / task, what, args.seeds, say)


def table(found: dict[str, Any], made: dict[str, int]) -> list[str]:
    """Corrections down, lags across: mean accuracy, difference from sync with its interval, !
    unstable runs.  made: arm -> updates a batch.
    """
    at = {(c["correction"], c["limit"]): c for c in found["cells"]}
    out = [
        "|lag|updates a batch|" + "|".join(found["limits"]) + "|",
        "|---" * (len(found["limits"]) + 2) + "|",
    ]
    for n in found["corrections"]:
        row = []
        for x in found["limits"]:
            c = at.get((n, x))
            if c is None:
                row.append("")
                continue
            low, high = c["difference"]["interval"]
            bad = f" !{c['unstable']}/{c['seeds']}" if c["unstable"] else ""
            row.append(
                f"{c['final']:.2f} [{low:+.2f}, {high:+.2f}]{bad}"
                + ("" if c["seeds"] == len(found["seeds"]) else f" (n={c['seeds']})")
            )
        out.append(f"|`{n}`|{made[n]}|" + "|".join(row) + "|")
    return out


def check(s: grid.Sweep, n: int) -> None:
    """Run n finished cells, of different lags and corrections, as real processes; what agrees goes
    to OUT/TASK/checked.json.
    """
    cells = [
        x
        for x in s.plan.arms
        if x != grid.SYNC and s.cells.get_path(s.name_run(x, s.seeds[0])).exists()
    ]
    chosen = [grid.SYNC, *[cells[(2 * i + 1) * len(cells) // (2 * n - 2)] for i in range(n - 1)]]
    path = s.directory / "checked.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    for arm in dict.fromkeys(chosen):
        name = s.name_run(arm, s.seeds[0])
        if not s.cells.get_path(name).exists() or name in [r["run"] for r in rows]:
            continue
        record = s.cells.read(name)
        run_dir = s.directory / "real" / name
        shutil.rmtree(run_dir, ignore_errors=True)
        argv = [
            sys.executable,
            "-m",
            "asyncrl.cli",
            "run",
            str(s.cells.get_path(name).with_suffix(".toml")),
            "--json",
        ]
        argv += [
            x for k, v in (("runs", run_dir.parent), ("name", name)) for x in ("--set", f"{k}={v}")
        ]
        done = subprocess.run(
            argv,
            cwd=results_file.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        real = json.loads(done.stdout.strip().splitlines()[-1])
        points = {
            r["step"]: r["eval/heldout"] for r in metrics.read(run_dir) if "eval/heldout" in r
        }
        both = [
            (points[int(x)], y)
            for x, y in zip(*record["accuracy"], strict=True)
            if int(x) in points
        ]
        # the real run of a cell that was given up goes on: what came before is compared
        whole = not record["abandoned"]
        rows.append(
            {
                "run": name,
                "steps": record["steps"],
                "given_up": record["abandoned"],
                "evaluations": len(both),
                "accuracy_end": both[-1],
                "accuracy_largest_gap": max(abs(x - y) for x, y in both),
                "real_accuracy_end": real["heldout_end"],
                "same_weights": whole and real["weights_digest"] == record["weights_digest"],
                "same_lag_histogram": whole and real["lag_histogram"] == record["lag_histogram"],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        path.write_text(json.dumps(rows, indent=1))


def write(made: dict[str, grid.Sweep], args: argparse.Namespace) -> None:
    """One result file, one page a task beside it, and the tables on stdout.  Tasks without a
    finished synchronous run are left out.
    """
    all_found = {}
    for task, s in made.items():
        if not s.cells.get_path(s.name_run(grid.SYNC, s.seeds[0])).exists():
            continue
        found = analyze_sweep(s)
        made_by = updates(s.plan)
        all_found[task] = found | {"updates": made_by}
        subtitle = (
            f"{task}: injected lag, {args.steps} steps of 32 x 8, {len(s.seeds)} seeds, "
            "one warm start; evaluations of 128 prompts, at the ends of 512"
        )
        told = s.plan.describe(titles(made_by))
        page = write_sweep(s.directory, f"Injected lag, {task}", found, told, subtitle)
        if (checked := s.directory / "checked.json").exists():
            all_found[task]["checked_against_real_processes"] = json.loads(checked.read_text())
        print(
            f"\n{task}: sync {found['sync']['final']:.3f}; {found['missing']} runs missing\n"
            + "\n".join(table(found, made_by))
        )
        print(
            "suggested: "
            + "\n".join(str(found["suggestion"][key]) for key in ("reason", "set", "by_correction"))
        )
        args.pages.append((task, page))
    if args.quick:
        return
    result = {
        "beside": args.beside,
        "runs_made_at": args.made_at or results_file.commit(),
        "steps": args.steps,
        "tasks": clean(all_found),
    }
    path = results_file.write("lag_grid", result)
    # numbers of a list on one line
    path.write_text(re.sub(r"\n\s+(?=[-\d.\]n])", " ", path.read_text()))
    for task, page in args.pages:
        shutil.copy(page, path.with_name(f"{path.stem}_{task}.html"))
    print(path, file=sys.stderr)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, required=True, help="directory of the runs")
    p.add_argument(
        "--only",
        action="append",
        choices=list(TASKS),
        help="one task and learning rate; repeatable",
    )
    p.add_argument("--lags", default="0,1,2,4,8,16")
    p.add_argument(
        "--first",
        default="",
        help="lags that get all their seeds before the others start, in this order",
    )
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument(
        "--table", action="store_true", help="run nothing; write the result of what is finished"
    )
    p.add_argument(
        "--check",
        type=int,
        default=0,
        metavar="N",
        help="run nothing new, but N finished cells again as real processes",
    )
    p.add_argument("--beside", default="", help="what else ran on the machine, for the record")
    p.add_argument(
        "--made-at",
        default="",
        help="with --table: the commit that made the runs, if it is not this one",
    )
    p.add_argument(
        "--quick",
        action="store_true",
        help="two lags, three batches, one seed of the first task: does it work?",
    )
    args = p.parse_args()
    if args.quick:
        args.lags, args.steps, args.seeds, args.only = "0,2", 3, 1, args.only or [next(iter(TASKS))]
    args.pages = []
    made = {}
    began = time.monotonic()
    for task in args.only or list(TASKS):
        s = made[task] = make(task, args)
        if args.check:
            check(s, args.check)
        elif not args.table:
            preflight(s.plan.arms[grid.SYNC])

            def tell(
                name: str, event: dict[str, object], task: str = task, s: grid.Sweep = s
            ) -> None:
                if "done" in event:
                    r = s.cells.read(name)
                    said = {
                        "task": task,
                        "run": name,
                        "minutes": round((time.monotonic() - began) / 60, 1),
                        "wall_s": round(r["wall_s"], 1),
                    }
                    print(
                        json.dumps(
                            said
                            | {
                                "end": r["accuracy"][1][-1:],
                                "abandoned": r["abandoned"],
                                "failed": r.get("failed", ""),
                            }
                        ),
                        flush=True,
                    )

            studies.put_first(s, [float(x) for x in args.first.split(",") if x])
            s.run(args.workers, tell)
    if not args.check:
        write(made, args)


if __name__ == "__main__":
    main()
