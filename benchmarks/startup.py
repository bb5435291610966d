"""Measure the startup of each process in CPU seconds, against the imports that it avoids.

    OMP_NUM_THREADS=1 python benchmarks/startup.py [--quick] [--json]

By turns, in an order that changes; ratios within a round are judged.  The rival is the imports
of a process built on transformers: `import torch`, and transformers' classes for a model and its
tokenizer.  CPU seconds are user and system time of the process and its threads: to
its end for commands, to the moment that it is ready for the parts.  Ready: the buffer answers;
the generator (tokenizer, engine) and the learner (model, optimizer, weights in the ring) have
sent their hello to a buffer's socket held here.  --quick: one round, goals not judged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lib import rounds
from lib.results_file import ROOT

from asyncrl.config import load
from asyncrl.contract import messages
from asyncrl.records import rundir
from asyncrl.supervise import live
from asyncrl.transport import sockets

CLI = ("-m", "asyncrl.cli")
CONFIG = ROOT / "configs" / "demo.toml"
READY_S = 120.0
TICK = os.sysconf("SC_CLK_TCK")
SETS = ("learner.steps=2", "staleness.max_lag=0")
RIVAL = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer"
FLOOR = "import torch"
# The most that each may cost of what RIVAL costs.
GOALS = {
    "asyncrl --help": 0.1,
    "config show": 0.1,
    "buffer ready": 0.2,
    "generator ready": 0.5,
    "learner ready": 0.5,
}


def cpu_of(pid: int) -> float:
    """User and system seconds of a living process, all threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / TICK


def spawn(*argv: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, *argv],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def whole(*argv: str) -> tuple[float, float]:
    """Wall and CPU seconds of a process of this Python, to its end."""
    began = time.perf_counter()
    process = spawn(*argv)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(argv)} ended with {process.returncode}")
    return wall, used.ru_utime + used.ru_stime


class Case:
    """A model, and run directories to start parts in."""

    def __init__(self, work: Path) -> None:
        from asyncrl.models.policy import build_model
        from asyncrl.tasks.synthetic import TASKS

        self.work = work
        self.count = 0
        build_model(work / "model", TASKS["sort"]().symbols)
        self.sets = [f"model.path={str(work / 'model')!r}", *SETS]

    def ready(self, part: str) -> tuple[float, float]:
        """Wall and CPU seconds until a part is ready; it is killed then."""
        self.count += 1
        run_dir = self.work / f"run{self.count}"
        address = f"ipc://{self.work}/socket{self.count}"
        sets = [*self.sets, f"wires.address={address!r}"]
        server = None
        if part != "buffer":  # its run is in every message
            config = load.load(CONFIG, sets)
            rundir.ensure(load.dump(config), run_dir)
            server = sockets.BufferSocket(address, run=rundir.read_run_id(run_dir))
        words = [word for each in sets for word in ("--set", each)]
        began = time.perf_counter()
        process = spawn(*CLI, part, str(CONFIG), "--run-dir", str(run_dir), *words)
        try:
            while process.poll() is None and time.perf_counter() - began < READY_S:
                if server is None:
                    found = live.request_status(address, "", 0.02) is not None
                else:
                    got = server.recv(0.02)
                    found = got is not None and isinstance(
                        got[1], messages.GeneratorHello | messages.LearnerHello
                    )
                if found:
                    return time.perf_counter() - began, cpu_of(process.pid)
            raise SystemExit(f"{part} was not ready: exit {process.poll()}")
        finally:
            process.kill()
            process.wait()
            if server is not None:
                server.close()
            if (run_dir / "run_id").exists():
                rundir.clean(run_dir)


def measure(count: int) -> rounds.Times:
    """Return process -> (wall, CPU) seconds of each round; the rival and its floor among them."""
    with tempfile.TemporaryDirectory() as work:
        case = Case(Path(work))
        started: dict[str, Callable[[], tuple[float, float]]] = {
            "rival": lambda: whole("-c", RIVAL),
            "import torch": lambda: whole("-c", FLOOR),
            "asyncrl --help": lambda: whole(*CLI, "--help"),
            "config show": lambda: whole(*CLI, "config", "show", str(CONFIG)),
            "buffer ready": lambda: case.ready("buffer"),
            "generator ready": lambda: case.ready("generator"),
            "learner ready": lambda: case.ready("learner"),
        }
        for start in started.values() if count > 1 else ():
            start()  # compiles modules, fills the file cache

        def one_round(number: int) -> dict[str, tuple[float, float]]:
            order = list(started) if number % 2 == 0 else list(reversed(started))
            return {name: started[name]() for name in order}

        rows = rounds.quiet(count, one_round)
    return {name: [row[name] for row in rows] for name in started}


def main() -> None:
    args = rounds.parser(__doc__).parse_args()
    times = measure(1 if args.quick else 5)
    table = {
        name: {
            "wall_s": round(rounds.median(times, name, 0), 3),
            "cpu_s": round(rounds.median(times, name, 1), 3),
        }
        for name in times
    }
    goals = [
        rounds.figure(
            f"{name}: CPU seconds, of the rival's",
            [ours[1] / rival[1] for ours, rival in zip(times[name], times["rival"], strict=True)],
            most,
            at_least=False,
            **table[name],
        )
        for name, most in GOALS.items()
    ]
    what = "CPU seconds until each process works, against the imports that it leaves out"
    rounds.report("startup", goals, {"what": what, "rival": RIVAL, "started": table}, args)


if __name__ == "__main__":
    main()
