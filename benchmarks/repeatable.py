"""Check that exact mode repeats bitwise with one to three generators, also when some are killed.

    python benchmarks/repeatable.py [--quick] [--json] [--steps 16]

Proves: synchronous, and at a constant injected lag of 2, real runs of the demo's task have the
same final weights and the same metrics at every step with 1, 2 and 3 generators, when generators
are killed by SIGKILL in the middle, when the learner is, and after a stop and resume.  The same
runs without exact mode show whether the comparison can fail: they should differ."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib import results_file, rounds

from asyncrl.experiments.replay import diff
from asyncrl.records import metrics

SMALL = (
    "learner.groups=16",
    "learner.group_size=8",
    "learner.checkpoint_every=4",
    "evaluation.every=8",
    "evaluation.prompts=64",
    "evaluation.final_prompts=128",
    "evaluation.ood_prompts=32",
    "generator.slots=100",
    "wires.lease_s=11.0",
)
LAGS = {
    "synchronous": ("staleness.max_lag=0",),
    "lag 2": ("staleness.max_lag=2", "staleness.inject=2"),
}
# generators, who is killed after 3, 6, ... batches
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 generator": (1, ()),
    "2 generators": (2, ()),
    "3 generators": (3, ()),
    "2 generators, 3 killed": (2, ("generator",) * 3),
    "3 generators, learner and 2 killed": (3, ("generator", "learner", "generator")),
}


def parts(pid: int) -> list[tuple[str, int]]:
    """(kind, pid) of the parts that a supervisor has started."""
    out = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid
            ):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                out += [
                    (kind, int(entry.name)) for kind in ("generator", "learner") if kind in words
                ]
        except OSError:
            continue
    return out


def steps_done(run_dir: Path) -> int:
    return max((int(r["step"]) + 1 for r in metrics.read(run_dir) if "reward/mean" in r), default=0)


def run(
    base: Path, model: Path, name: str, sets: Sequence[str], victims: Sequence[str]
) -> tuple[Path, int]:
    """One run to its end; (its directory, processes killed in it)."""
    argv = [sys.executable, "-m", "asyncrl.cli", "run", "configs/demo.toml", "--json"]
    argv += [
        x
        for s in (
            f"model.path={str(model)!r}",
            f"runs={str(base)!r}",
            f"name={name!r}",
            *SMALL,
            *sets,
        )
        for x in ("--set", s)
    ]
    run_dir = base / name
    killed = 0
    due = list(victims)
    with (base / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            argv,
            cwd=results_file.ROOT,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        while process.poll() is None:
            time.sleep(0.05)
            if (
                due
                and run_dir.is_dir()
                and steps_done(run_dir) >= 3 * (len(victims) - len(due) + 1)
            ):
                found = sorted(pid for kind, pid in parts(process.pid) if kind == due[0])
                if found:
                    os.kill(found[killed % len(found)], signal.SIGKILL)
                    killed += 1
                    due.pop(0)
    if process.returncode:
        raise SystemExit(
            f"{name} ended with {process.returncode}: {(base / f'{name}.log').read_text()[-2000:]}"
        )
    return run_dir, killed


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--steps", type=int, default=16)
    p.add_argument(
        "--model", type=Path, help="a warm-started model for the task `sort`; made when absent"
    )
    args = p.parse_args()
    goals: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        base = Path(work)
        steps = f"learner.steps={6 if args.quick else args.steps}"
        model = args.model or base / "models" / "sort"
        for lag, limit in list(LAGS.items())[: 1 if args.quick else None]:
            first: Path | None = None
            for case, (generators, victims) in list(CASES.items())[: 2 if args.quick else None]:
                name = f"{lag} {case}".replace(" ", "-").replace(",", "")
                run_dir, killed = run(
                    base,
                    model,
                    name,
                    ["exact=true", steps, f"generators={generators}", *limit],
                    victims,
                )
                first = first or run_dir
                found = diff.diff(first, run_dir)
                details[f"{lag}, {case}"] = {
                    "killed": killed,
                    "weights_digest": found["weights_digests"][1],
                    "equal": found["equal"],
                }
                print(
                    f"{lag}, {case}: "
                    f"{'bitwise equal' if found['equal'] else diff.format_diff(found)}, "
                    f"{killed} killed",
                    file=sys.stderr,
                )
                goals.append(
                    rounds.goal(
                        f"{lag}, {case}: bitwise equal to the first",
                        float(found["equal"]),
                        1.0,
                        at_least=True,
                        killed=killed,
                    )
                )
            plain = [
                run(
                    base,
                    model,
                    f"{lag}-plain-{n}".replace(" ", "-"),
                    [steps, f"generators={n}", *limit],
                    (),
                )[0]
                for n in (1, 2)
            ]
            details[f"{lag}, without exact mode, 1 against 2 generators"] = {
                "equal": diff.diff(*plain)["equal"]
            }
    rounds.report(
        "repeatable",
        goals,
        {
            "what": "final weights and metrics of real runs in exact mode, against the first "
            "of each kind",
            "runs": details,
        },
        args,
    )
    print(json.dumps(details, indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
