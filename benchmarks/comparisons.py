"""Run `asyncrl compare` as a user does: its default comparison, and one with slow rewards.

    python benchmarks/comparisons.py [--part default] [--part slow] [--cores 0,1] [--quick] [--json]
    [--out DIR]

default: `asyncrl compare configs/demo.toml`, four arms and three seeds, from no model to the
report, in ten minutes on two cores.  slow: synchronous against a limit of 4 where a reward takes
0.2 s and more (Pareto tail to 4 s) in 32 processes, with batches of 8 x 8.  The result contains
the whole comparison; its page is stored with it.  --quick: few steps and one seed, which proves
nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib import rounds
from lib.kept_pages import keep

from asyncrl.supervise import preflight

ROOT = rounds.results_file.ROOT
MINUTES = 10.0
SLOW = (
    "reward.function=benchmarks.lib.slow_reward:waiting",
    "reward.workers=32",
    "learner.groups=8",
    "generator.slots=64",
    "learner.steps=60",
)
PARTS: dict[str, list[str]] = {
    "default": [],
    "slow": [
        *(x for s in SLOW for x in ("--set", s)),
        "--arm",
        "sync:staleness.max_lag=0",
        "--arm",
        "async:staleness.max_lag=4",
    ],
}
QUICK = (
    "learner.steps=4",
    "evaluation.every=2",
    "evaluation.prompts=32",
    "evaluation.final_prompts=32",
    "evaluation.ood_prompts=0",
)


def run(part: str, out: Path, cores: set[int], quick: bool) -> dict[str, Any]:
    """One comparison from nothing in OUT/PART: {"seconds", "cpu_seconds", "found"}."""
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / preflight.MARKER).touch()  # a warm start may build a model there
    words = [
        *PARTS[part],
        *(
            x
            for s in (f"model.path={str(model)!r}", *(QUICK if quick else ()))
            for x in ("--set", s)
        ),
    ]
    argv = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "compare",
        "configs/demo.toml",
        "--out",
        str(out / part),
        "--json",
        *words,
        *(["--seeds", "1"] if quick else []),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    before = os.times()
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    after = os.times()
    if done.returncode:
        sys.exit(f"{part}: asyncrl compare ended with {done.returncode}")
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {
        "seconds": time.monotonic() - began,
        "cpu_seconds": cpu,
        "command": " ".join(["asyncrl", *argv[3:]]).replace(str(out), "OUT"),
        "found": json.loads(done.stdout.strip().splitlines()[-1]),
    }


def goals(part: str, r: dict[str, Any]) -> list[dict[str, Any]]:
    if part == "default":
        return [
            rounds.goal(
                "default: minutes, with the warm start",
                r["seconds"] / 60,
                MINUTES,
                at_least=False,
                cpu_minutes=round(r["cpu_seconds"] / 60, 1),
            )
        ]
    arms = r["found"]["arms"]
    speed = arms["sync"]["wall_s"] / arms["async"]["wall_s"]
    end = next(v for v in r["found"]["verdicts"] if v["metric"] == "heldout_end")
    return [
        rounds.goal("slow rewards: speed, async / sync", speed, 1.5, at_least=True),
        rounds.goal(
            "slow rewards: async is not visibly worse",
            float(end["verdict"] != "worse"),
            1,
            at_least=True,
            difference=round(end["difference"], 3),
            interval=[round(x, 3) for x in end["interval"] if x is not None],
        ),
    ]


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument(
        "--part", action="append", choices=list(PARTS), help="repeatable; both without it"
    )
    p.add_argument(
        "--cores",
        default="",
        help="numbers of the cores to use; without it the two that are least busy",
    )
    p.add_argument("--out", type=Path, help="keep the comparisons here, which must not exist")
    args = p.parse_args()
    cores = {int(x) for x in args.cores.split(",")} if args.cores else set(rounds.idle_cores(2))
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary) / "out"
        out.mkdir(parents=True)
        parts = args.part or list(PARTS)
        made = {part: run(part, out, cores, args.quick) for part in parts}
        name = "_".join(["comparisons", *(args.part or ())])
        result = {
            "what": "the whole of each comparison under `found`",
            "cores": len(cores),
            "parts": made,
        }
        path = rounds.report(
            name, [g for part in parts for g in goals(part, made[part])], result, args
        )
        for part in parts if path else ():
            one = f"{path.stem}.html" if args.part == [part] else f"{path.stem}_{part}.html"
            keep(out / part / "report.html", path.with_name(one))


if __name__ == "__main__":
    main()
