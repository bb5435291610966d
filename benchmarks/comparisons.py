"""Run `asyncrl compare` as a user does: its default comparison.

    python benchmarks/comparisons.py [--cores 0,1] [--quick] [--json] [--out DIR]

It is `asyncrl compare configs/demo.toml`, four arms and three seeds, from no model to the report,
in ten minutes on two cores.  The result contains the whole comparison; its page is stored with it.
--quick: few steps and one seed, which proves nothing.  benchmarks/demo_seeds.py --slow compares
both loops with slow rewards."""

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
QUICK = (
    "learner.steps=4",
    "evaluation.every=2",
    "evaluation.prompts=32",
    "evaluation.final_prompts=32",
    "evaluation.ood_prompts=0",
)


def run(out: Path, cores: set[int], quick: bool) -> dict[str, Any]:
    """Make the comparison from nothing in OUT/default: {"seconds", "cpu_seconds", "found"}."""
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / preflight.MARKER).touch()  # a warm start may build a model there
    sets = [f"model.path={str(model)!r}", *(QUICK if quick else ())]
    argv = [
        sys.executable,
        "-m",
        "asyncrl.cli",
        "compare",
        "configs/demo.toml",
        "--out",
        str(out / "default"),
        "--json",
        *(word for item in sets for word in ("--set", item)),
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
        sys.exit(f"asyncrl compare ended with {done.returncode}")
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {
        "seconds": time.monotonic() - began,
        "cpu_seconds": cpu,
        "command": " ".join(["asyncrl", *argv[3:]]).replace(str(out), "OUT"),
        "found": json.loads(done.stdout.strip().splitlines()[-1]),
    }


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument(
        "--cores",
        default="",
        help="numbers of the cores to use; without it the two that are least busy",
    )
    p.add_argument("--out", type=Path, help="keep the comparison here, which must not exist")
    args = p.parse_args()
    cores = {int(x) for x in args.cores.split(",")} if args.cores else set(rounds.idle_cores(2))
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary) / "out"
        out.mkdir(parents=True)
        made = run(out, cores, args.quick)
        goal = rounds.goal(
            "default: minutes, with the warm start",
            made["seconds"] / 60,
            MINUTES,
            at_least=False,
            cpu_minutes=round(made["cpu_seconds"] / 60, 1),
        )
        result = {
            "what": "the whole comparison under `found`",
            "cores": len(cores),
            "parts": {"default": made},
        }
        path = rounds.report("comparisons_default", [goal], result, args)
        if path:
            keep(out / "default" / "report.html", path.with_suffix(".html"))


if __name__ == "__main__":
    main()
