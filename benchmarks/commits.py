"""The present commit against an earlier one, by turns: did a change of shape cost speed?

    python benchmarks/commits.py --before d99f52d [--rounds 5] [--json]

In every round each of losses.py, learner.py and engine.py runs with --quick in a process of its
own, here and in a worktree of the earlier commit, every other round backwards.  A figure is the
time of our own step or engine, here over there, the median over rounds; its spread over the rounds
stands beside it.  Goal: within 5 %, by CPU time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib import results_file, rounds

ROOT = results_file.ROOT
# figure -> the program and where its JSON has [wall, CPU] seconds of every round of ours
FIGURES = {
    "loss: a step with every diagnostic": ("losses", ("times", "whole")),
    "learner: a step, 84k": ("learner", ("runs", "84k", "times", "ours")),
    "engine: answers of spread 3, 84k": ("engine", ("runs", "84k spread 3", "times", "engine")),
    "engine: answers of equal length, 84k": ("engine", ("runs", "84k spread 1", "times", "engine")),
}
WALL = 0
CPU = 1


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of `commit`, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def measured(root: Path, program: str) -> dict[str, Any]:
    """What `program --quick --json` of the checkout at `root` prints."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{program}.py", "--quick", "--json"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().split("\n")
    if not lines[-1].startswith("{"):
        sys.exit(f"{root}: {program} gave no result: {done.stderr[-500:]}")
    return dict(json.loads(lines[-1]))


def seconds(result: Any, keys: tuple[str, ...], which: int) -> float:
    for key in keys:
        result = result[key]
    return statistics.median(float(times[which]) for times in result)


def main() -> None:
    parser = rounds.parser(__doc__)
    parser.add_argument("--before", required=True, help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    load_before = os.getloadavg()
    ratios: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in FIGURES}
    with checkout(asked.before) as there:
        for number in range(asked.rounds):
            for program in dict.fromkeys(program for program, _ in FIGURES.values()):
                order = (ROOT, there) if number % 2 == 0 else (there, ROOT)
                found = {root: measured(root, program) for root in order}
                for name, (its, keys) in FIGURES.items():
                    if its == program:
                        for what, which in (("wall", WALL), ("cpu", CPU)):
                            ratio = seconds(found[ROOT], keys, which)
                            ratio /= seconds(found[there], keys, which)
                            ratios[name][what].append(round(ratio, 4))
                        said = f"round {number}: {name}: {ratios[name]['cpu'][-1]:.3f} by CPU"
                        print(said, file=sys.stderr)
    goals = [
        rounds.goal(
            f"{name}, here / {asked.before}, CPU",
            statistics.median(each["cpu"]),
            1.05,
            at_least=False,
            spread=[min(each["cpu"]), max(each["cpu"])],
            by_wall=round(statistics.median(each["wall"]), 3),
        )
        for name, each in ratios.items()
    ]
    result = {
        "what": f"the present commit against {asked.before}, by turns",
        "rounds": ratios,
        "load_before": load_before,
        "load_after": os.getloadavg(),
    }
    rounds.report("commits", goals, result, asked)


if __name__ == "__main__":
    main()
