"""How long each process takes before it works, in CPU seconds, against another commit of this
repository.

    python benchmarks/startup.py [--quick] [--json] [--beside WHAT] [--against COMMIT]

By turns: every part is started from this tree and from a worktree of COMMIT, in an order that
changes, and ratios within a round are judged.  CPU seconds are user and system time of the process
and its threads: to its end for commands and for a whole run (with all its children), to the moment
that it is ready for the parts.  Ready: the buffer answers; the generator (tokenizer, engine) and
the learner (model, optimizer, weights in the ring) have sent their hello to a buffer's socket held
here.  The run is of two synchronous steps with a ready model, and its weights must come out the
same, bitwise.  --quick: one round, goals not judged."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib import rounds
from lib.results_file import ROOT

from asyncrl.contract import messages
from asyncrl.records import rundir
from asyncrl.supervise import live
from asyncrl.transport import sockets

AGAINST = "588263e"  # the last commit whose processes imported transformers
READY_S = 120.0
TICK = os.sysconf("SC_CLK_TCK")
SETS = (
    "learner.steps=2",
    "staleness.max_lag=0",
    "evaluation.prompts=32",
    "evaluation.final_prompts=32",
    "evaluation.ood_prompts=0",
)
# What is measured, and the most that it may cost of what it cost at AGAINST.
GOALS = {
    "asyncrl --help": 1.05,
    "config show": 1.05,
    "buffer ready": 1.05,
    "generator ready": 0.5,
    "learner ready": 0.5,
    "run of two steps": 0.6,
}


def cpu_of(pid: int) -> float:
    """User and system seconds of a living process, all threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / TICK


def spawn(tree: Path, *argv: str, out: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "asyncrl.cli", *argv],
        cwd=tree,
        env=env,
        stdout=out,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def whole(tree: Path, *argv: str) -> tuple[float, float, str]:
    """CPU seconds with all children, wall seconds and output of a command."""
    with tempfile.TemporaryFile("w+") as out:
        began = time.perf_counter()
        process = spawn(tree, *argv, out=out)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    assert process.returncode == 0, (argv, process.returncode, text[-1000:])
    return used.ru_utime + used.ru_stime, wall, text


class Case:
    """A model, and run directories to start parts in."""

    def __init__(self, work: Path) -> None:
        from asyncrl.models.policy import build_model
        from asyncrl.tasks.synthetic import TASKS

        self.work = work
        self.count = 0
        build_model(work / "model", TASKS["sort"]().symbols)
        self.sets = [f"model.path={str(work / 'model')!r}", *SETS]

    def ready(self, tree: Path, part: str) -> tuple[float, float]:
        """CPU and wall seconds until a part is ready; it is killed then."""
        self.count += 1
        run_dir = self.work / f"run{self.count}"
        address = f"ipc://{self.work}/socket{self.count}"
        server = None if part == "buffer" else sockets.BufferSocket(address)
        sets = [x for s in (*self.sets, f"wires.address={address!r}") for x in ("--set", s)]
        began = time.perf_counter()
        process = spawn(tree, part, "configs/demo.toml", "--run-dir", str(run_dir), *sets)
        try:
            while process.poll() is None and time.perf_counter() - began < READY_S:
                if server is None:
                    found = live.ask(address, "", 0.02) is not None
                else:
                    got = server.recv(0.02)
                    found = got is not None and isinstance(
                        got[1], messages.GeneratorHello | messages.LearnerHello
                    )
                if found:
                    return cpu_of(process.pid), time.perf_counter() - began
            raise SystemExit(f"{part} of {tree} was not ready: exit {process.poll()}")
        finally:
            process.kill()
            process.wait()
            if server is not None:
                server.close()
            if (run_dir / "run_id").exists():
                rundir.clean(run_dir)

    def run(self, tree: Path, digests: set[str]) -> tuple[float, float]:
        self.count += 1
        sets = [*self.sets, f"runs={str(self.work)!r}", f"name='run{self.count}'"]
        cpu, wall, out = whole(
            tree, "run", "configs/demo.toml", "--json", *[x for s in sets for x in ("--set", s)]
        )
        digests.add(json.loads(out.splitlines()[-1])["weights_digest"])
        return cpu, wall


def measure(trees: dict[str, Path], n: int) -> tuple[dict[str, rounds.Times], set[str]]:
    """figure -> tree -> (wall, CPU) of each round; and the digests of the runs' weights."""
    digests: set[str] = set()
    with tempfile.TemporaryDirectory() as work:
        case = Case(Path(work))
        figures: dict[str, Callable[[Path], tuple[float, float]]] = {
            "asyncrl --help": lambda t: whole(t, "--help")[:2],
            "config show": lambda t: whole(t, "config", "show", "configs/demo.toml")[:2],
            "buffer ready": lambda t: case.ready(t, "buffer"),
            "generator ready": lambda t: case.ready(t, "generator"),
            "learner ready": lambda t: case.ready(t, "learner"),
            "run of two steps": lambda t: case.run(t, digests),
        }
        out: dict[str, rounds.Times] = {f: {name: [] for name in trees} for f in figures}
        # the first is not counted: it compiles modules and fills the file cache
        for r in range(-1, n):
            for figure, take in figures.items():
                for name in list(trees) if r % 2 == 0 else reversed(list(trees)):
                    cpu, wall = take(trees[name])
                    if r >= 0:
                        out[figure][name].append((wall, cpu))
    return out, digests


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--against", default=AGAINST, help="commit to compare with")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as work:
        other = Path(work) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(other), args.against], check=True)
        try:
            found, digests = measure({"now": ROOT, "before": other}, 1 if args.quick else 5)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    goals = []
    table = {}
    for figure, times in found.items():
        ratios = {
            k: statistics.median(
                a[i] / b[i] for a, b in zip(times["now"], times["before"], strict=True)
            )
            for i, k in enumerate(("wall", "cpu"))
        }
        row = {
            f"{k}_{which}_s": round(rounds.median(times, which, i), 3)
            for i, k in enumerate(("wall", "cpu"))
            for which in ("now", "before")
        }
        table[figure] = row | {"wall_ratio": round(ratios["wall"], 3)}
        goals.append(
            rounds.goal(
                f"{figure}: CPU seconds, now / before",
                ratios["cpu"],
                GOALS[figure],
                at_least=False,
                **row,
            )
        )
    goals.append(rounds.goal("digests of the run's weights", len(digests), 1, at_least=False))
    rounds.report(
        "startup",
        goals,
        {
            "what": "CPU seconds until each process works",
            "against": args.against,
            "figures": table,
            "digests": sorted(digests),
            "rounds": 1 if args.quick else 5,
        },
        args,
    )


if __name__ == "__main__":
    main()
