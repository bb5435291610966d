"""Measure the effective training time of real runs under kill -9.

It is the share of the wall time in which tokens were trained that stayed trained.

    python benchmarks/effective.py [--quick] [--json] [--runs KILLS_AN_HOUR:MINUTES ...]
                                   [--seed S] [--model DIR]

The figure has this name in the report on Llama 3 (useful training time over elapsed time); ETTR
in "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" is the same:
productive over wall time, without restarts and repeated training.  Here productive time is the
tokens still trained at the end, at the pace of the same run without kills (lib/useful_time.py),
so that it is measured, and not computed from a model of restarts.

Each run is a real `asyncrl run` with torch's learner and a process for each part; imports, model
load and checkpoints of a restart are included.  The buffer keeps a journal (`durability.mode =
"process"`), the learner a checkpoint each 20 batches.  Victims by turns: learner (in a step, in a
checkpoint), generator, buffer, supervisor; after a kill of the supervisor the run is resumed at
once, as a service manager would do.  The cost of a kill by victim and state is averaged over all
runs, and the prediction for each rate is reported with the measurement.  --quick: two kills in a
short run; nothing is written."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import kills
from lib import results_file, useful_time

from asyncrl.config import load
from asyncrl.contract.messages import RunStatus
from asyncrl.records import process_log, rundir
from asyncrl.supervise import live

# victim, state of its work in which it dies
VICTIMS = [
    ("learner", "step"),
    ("generator", "any"),
    ("buffer", "any"),
    ("learner", "checkpoint"),
    ("supervisor", "any"),
]
RUNS = ["0:2", "120:10", "240:5"]  # 20 kills at each rate
PARTS = ("buffer", "learner", "generator")
BACK_S = 1800.0  # deadline for a victim to report again
POLL_S = 0.01
ANSWER_S = 5.0  # of a buffer that is there, on a machine that is busy


class Tail:
    """A thread that sees each row of trained.jsonl when it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = useful_time.History()
        self.seen = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        while not self.over.is_set():
            self.look()
            time.sleep(POLL_S)

    def look(self) -> None:
        """Whole lines only: the rest of one comes later, or never."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.seen)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.seen += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # of a buffer that died in mid-write
                self.history.add(json.loads(line), time.monotonic())

    def close(self) -> None:
        self.over.set()
        self.thread.join()


class Run:
    """One real run, its supervisor in a process of its own."""

    def __init__(self, work: Path, name: str, model: str, seed: int) -> None:
        self.dir = work / name
        self.log = (work / f"{name}.log").open("ab")
        sets = [
            f"runs={str(work)!r}",
            f"name={name!r}",
            f"model.path={model or str(work / 'model')!r}",
            "learner.steps=1000000",
            "learner.groups=8",
            "staleness.max_lag=2",
            "watchdog.restarts=1000000",
            *kills.PATIENT,
            "durability.mode='process'",
            f"seed={seed}",
            "evaluation.every=0",
            "evaluation.prompts=64",
            "evaluation.ood_prompts=0",
        ]
        self.new = ["configs/demo.toml", *[x for one in sets for x in ("--set", one)]]
        self.process = self.spawn(self.new)

    def spawn(self, words: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "asyncrl.cli", "run", *words],
            cwd=results_file.ROOT,
            stdout=self.log,
            stderr=self.log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def look(self) -> None:
        """Resume the run if its directory was still locked by the last supervisor (exit code 2).

        Raises RuntimeError when the run has ended unexpectedly."""
        code = self.process.poll()
        if code == 2 and self.dir.exists():
            self.process = self.spawn(["--resume", str(self.dir)])
        elif code is not None:
            raise RuntimeError(f"the run ended with {code}: {self.log.name}")

    def status(self) -> RunStatus | None:
        if not (self.dir / "config.toml").exists():
            return None
        config = load.load(self.dir / "config.toml")
        return live.request_status(rundir.get_buffer_address(config, self.dir), "", ANSWER_S)

    def pid(self, victim: str) -> int | None:
        if victim == "supervisor":
            return self.process.pid
        return kills.processes(self.process.pid, PARTS).get(victim)

    def strike(self, victim: str, state: str) -> useful_time.Kill:
        """Kill it in that state, or anywhere when it does not come to it in time; wait until it is
        heard of again.  Raises RuntimeError when it never is.
        """
        until = time.monotonic() + kills.AWAIT_S
        while state != "any" and not kills.reached_instant(state, self.dir):
            if time.monotonic() > until:
                state = "any"
        while (pid := self.pid(victim)) is None:
            self.look()
            time.sleep(POLL_S)
        epoch = status.epoch if (status := self.status()) else 0
        os.kill(pid, signal.SIGKILL)
        at = time.monotonic()
        if victim == "supervisor":
            self.process.wait()
            self.process = self.spawn(["--resume", str(self.dir)])
        while (new := self.pid(victim)) in (None, pid):
            self.give_up(at, victim)
        began = time.monotonic()
        assert new is not None
        while not self.heard(victim, began, epoch):
            self.give_up(at, victim)
        back = time.monotonic()
        return useful_time.Kill(victim, state, at, back, back - began)

    def give_up(self, at: float, victim: str) -> None:
        self.look()
        if time.monotonic() - at > BACK_S:
            raise RuntimeError(f"{victim} did not report again; log: {self.log.name}")
        time.sleep(POLL_S)

    def heard(self, victim: str, began: float, epoch: int) -> bool:
        """Has the buffer answered, and heard of the victim's new life?"""
        status = self.status()
        if status is None:
            return False
        if victim in ("learner", "supervisor") and status.epoch <= epoch:
            return False
        wanted = {"generator": ["generator-0"], "supervisor": ["learner", "generator-0"]}
        now = time.monotonic()
        return all(now - status.peers.get(name, now) > began for name in wanted.get(victim, []))

    def end(self) -> None:
        """Kill the run: the time of an orderly end is not measured."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        while any(
            process_log.is_alive(self.dir, name) for name in ("buffer", "learner", "generator-0")
        ):
            time.sleep(POLL_S)  # they die with it, in the kernel's own time
        rundir.clean(self.dir)
        self.log.close()


def one(
    work: Path, model: str, an_hour: float, minutes: float, seed: int, most: int = 1 << 30
) -> dict[str, Any]:
    """A run of so many minutes from its first batch on, with kills at this rate, evenly but for
    chance; `most` of them.  Raises RuntimeError, ValueError."""
    choice = random.Random(f"{an_hour} {seed}")
    load_before = os.getloadavg()
    launched = time.monotonic()
    run = Run(work, f"effective_{an_hour:g}", model, seed)
    tail = Tail(run.dir / "trained.jsonl")
    done: list[useful_time.Kill] = []
    try:
        while len(tail.history.commits) < 3:
            run.look()
            time.sleep(POLL_S)
        begun = time.monotonic()
        each_s = 3600.0 / an_hour if an_hour else float("inf")
        planned = [
            (n + choice.uniform(0.2, 0.8)) * each_s for n in range(int(60 * minutes / each_s))
        ]
        turn = choice.randrange(len(VICTIMS)) if an_hour * minutes < 60 * len(VICTIMS) else 0
        for number, wanted_s in enumerate(planned[:most]):
            while time.monotonic() < begun + wanted_s:
                run.look()
                time.sleep(POLL_S)
            done.append(run.strike(*VICTIMS[(turn + number) % len(VICTIMS)]))
            print(f"{an_hour:g} an hour: {done[-1]}", file=sys.stderr, flush=True)
        # the last window ends with a batch; then the rest of the minutes
        made = len(tail.history.commits)
        while time.monotonic() < begun + 60 * minutes or len(tail.history.commits) < made + 3:
            run.look()
            time.sleep(POLL_S)
    finally:
        run.end()
        tail.close()
    until = max(commit.at for commit in tail.history.commits)
    found = useful_time.measure(tail.history, done, launched, until)
    return {
        "kills_an_hour": an_hour,
        "kills_an_hour_done": round(3600 * len(done) / (until - launched), 1),
        "load_before": load_before,
        "load_after": os.getloadavg(),
    } | found


def beside(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The kills' cost by victim and state, of all the runs, and each rate measured and computed."""
    costs = [row for run in runs for row in run["each_kill"]]
    rates = {
        f"{run['kills_an_hour']:g}": {
            "kills": run["kills"],
            "measured": {
                name: run[name]
                for name in ("effective", "effective_start_included", "effective_starts_apart")
            },
            "from_the_cost_of_one_kill": useful_time.followed(costs, run["kills_an_hour"])
            if costs
            else {},
        }
        for run in runs
    }
    rows = [
        {
            "figure": f"effective training time, {name} kills an hour, {what}",
            "value": rate["measured"][key],
            "goal": "",
            "met": None,
        }
        for name, rate in rates.items()
        for what, key in (
            ("from the first batch on", "effective"),
            ("start included", "effective_start_included"),
        )
    ]
    return {"goals": rows, "one_kill": useful_time.by_victim(costs), "rates": rates}


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true")
    made.add_argument("--json", action="store_true")
    made.add_argument("--runs", nargs="+", default=RUNS, metavar="KILLS_AN_HOUR:MINUTES")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--model", default="", help="a warm-started model; absent: built")
    args = made.parse_args()
    plan = [
        tuple(map(float, words.split(":"))) for words in (["720:0.2"] if args.quick else args.runs)
    ]
    measured = results_file.commit()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        runs = [
            one(Path(work), args.model, rate, minutes, args.seed, 2 if args.quick else 1 << 30)
            for rate, minutes in plan
        ]
    found = {"what_it_is": __doc__} | beside(runs) | {"runs": runs}
    if not args.quick:
        found["file"] = results_file.write("effective", found, measured).name
    print(
        json.dumps(found) if args.json else json.dumps(found["rates"] | found["one_kill"], indent=1)
    )


if __name__ == "__main__":
    main()
