"""Kills and stops at chosen points of a real run of four processes, with messages lost, doubled and
late; then a checker of its own counts what became of every sample.

    python benchmarks/chaos.py [--quick] [--json] [--seed N] [--faults N] [--disable MECHANISM]

Buffer, learner and two generators are forked from one warm process, so that recovery is measured
without imports.  The next victim, what happens to it (SIGKILL, or SIGSTOP and SIGCONT) and at which
point of its work (POINTS in lib/chaos_points.py) are drawn by the seed; a point that does not come
in time is given up, and the victim killed where it is.  --disable: switch a mechanism off, after
which the checker (lib/chaos_checker.py) must find something; exit code 0 then means that it did."""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from lib import chaos_checker, chaos_points, results_file

from asyncrl.config import load
from asyncrl.records import rundir

GROUPS = 4
SIZE = 4
LIMIT = 1
AWAIT_S = 5.0
END_S = 300.0
GENERATORS = 2
ROLES = ["buffer", "learner", *(f"generator-{n}" for n in range(GENERATORS))]


def warm(model: Path) -> None:
    """Import what the parts import, and make a small model.  No backward pass: autograd's threads
    do not survive a fork.
    """
    import torch

    from asyncrl.config.tree import Task
    from asyncrl.models import policy
    from asyncrl.models.tokenizer import load_tokenizer
    from asyncrl.records.metrics import _summary_writer
    from asyncrl.tasks import get_task

    for name in ("actors.generator", "buffer.service", "learner.loop"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    policy.build_model(model, get_task(Task(name="sort")).symbols, hidden=32, kv_heads=2, seed=1)
    policy.load_policy(model)
    load_tokenizer(model)
    _summary_writer()


class Run:
    """One run and its processes."""

    def __init__(self, work: Path, model: Path, steps: int, seed: int, off: str) -> None:
        mode = "memory" if off == "cursor" else "process"
        sets = [
            f"model.path={str(model)!r}",
            f"learner.steps={steps}",
            f"learner.groups={GROUPS}",
            f"learner.group_size={SIZE}",
            f"generators={GENERATORS}",
            f"staleness.max_lag={LIMIT}",
            f"durability.mode={mode!r}",
            f"seed={seed}",
            "learner.checkpoint_every=2",
            "generator.max_new_tokens=12",
            "generator.slots=16",
            "evaluation.every=0",
            "evaluation.prompts=2",
            "evaluation.final_prompts=2",
            "evaluation.ood_prompts=0",
            "record.samples_every=0",
            "record.split_every=0",
            "record.reference_kl_every=0",
            "wires.lease_s=3",
            "wires.retry_s=0.3",
        ]
        self.config = load.load(results_file.ROOT / "configs" / "demo.toml", sets)
        self.dir = work / f"run_{seed}"
        self.notes = self.dir / "chaos"
        self.off = off
        self.steps = steps
        self.memory = mode == "memory"
        rundir.prepare(self.config, load.dump(self.config), self.dir)
        self.notes.mkdir()
        self.orders = chaos_points.Orders(ROLES)
        self.pids: dict[str, int] = {}
        self.ended: dict[str, int] = {}  # of those that ended well
        self.deaths = 0

    def spawn(self, role: str) -> None:
        pid = os.fork()
        if pid:
            self.pids[role] = pid
            return
        code = 1
        try:
            log = os.open(self.dir / "logs" / f"{role}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            hook = chaos_points.HOOKS[role.split("-")[0]]
            hook(role, self.orders, self.notes, self.off, 0.0 if self.memory else 0.03)
            self.live(role)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def live(self, role: str) -> None:
        if role == "buffer":
            from buffer.service import main as buffer

            buffer(self.config, self.dir)
        elif role == "learner":
            from learner.loop import main as learner

            learner(self.config, self.dir)
        else:
            from actors.generator import main as generator

            generator(self.config, self.dir, int(role.removeprefix("generator-")))

    def look(self) -> None:
        """Start again whoever was killed.  Raises RuntimeError for one that failed by itself."""
        for role, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            del self.pids[role]
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL:
                self.deaths += 1
                if self.memory and role == "buffer":
                    self.end()  # `memory`: its death ends every process
                    for other in ROLES:
                        self.spawn(other)
                    return
                self.spawn(role)
            elif code:
                log = (self.dir / "logs" / f"{role}.log").read_text()
                raise RuntimeError(f"{role} ended with {code}: {log[-1500:]}")
            else:
                self.ended[role] = pid

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = {}

    def batches(self) -> int:
        """Batches trained so far, those repeated, too: it grows while the run goes on."""
        path = self.notes / "learner.jsonl"
        return path.read_bytes().count(b'{"trained"') if path.exists() else 0


class Fault:
    """One fault, from the order to the first batch after it."""

    def __init__(self, run: Run, choice: random.Random) -> None:
        kind = choice.choice(("buffer",) if run.memory else tuple(chaos_points.POINTS))
        names = [role for role in ROLES if role.startswith(kind)]
        self.role = choice.choice(names)
        self.point = choice.choice(chaos_points.POINTS[kind])
        self.action = chaos_points.KILL
        if not run.memory and choice.random() < 0.3:
            self.action = chaos_points.STOP
        if run.off == "sync":  # what is lost then is lost when a buffer dies behind its words
            self.role, self.point, self.action = "buffer", "idle", chaos_points.KILL
        self.stop_s = choice.uniform(0.1, 1.0)
        self.run = run

    def commit(self) -> str:
        """Make it happen; returns what it was, "" when the run ended before."""
        run = self.run
        pid = run.pids.get(self.role)
        if pid is None:
            return ""
        run.orders.give(self.role, self.point, self.action)
        until = time.monotonic() + AWAIT_S
        deaths = run.deaths
        while time.monotonic() < until and self.role in run.pids:
            run.look()
            if run.deaths > deaths:
                return f"{self.role.split('-')[0]}: killed {self.point}"
            if run.orders.stopped(self.role):
                time.sleep(self.stop_s)
                os.kill(pid, signal.SIGCONT)
                return f"{self.role.split('-')[0]}: stopped {self.point}"
            time.sleep(0.002)
        if not run.orders.take_back(self.role) or self.role not in run.pids:
            return ""
        os.kill(run.pids[self.role], signal.SIGKILL)
        return f"{self.role.split('-')[0]}: killed anywhere"


def chaos(work: Path, model: Path, faults: int, seed: int, off: str = "") -> dict[str, Any]:
    """One run with `faults` faults; what the checker found, and how it recovered."""
    choice = random.Random(seed)
    run = Run(work, model, 8 + 3 * faults, seed, off)
    done: collections.Counter[str] = collections.Counter()
    took: list[float] = []
    error = ""
    began = time.monotonic()
    try:
        for role in ROLES:
            run.spawn(role)
        for _ in range(faults):
            reached = run.batches() + choice.randint(1, 2)
            while run.batches() < reached and "buffer" not in run.ended:
                run.look()
                within(began, run)
                time.sleep(0.005)
            what = Fault(run, choice).commit()
            if not what:
                break
            done[what] += 1
            at = time.monotonic()
            known = run.batches()
            while run.batches() == known and "buffer" not in run.ended:
                run.look()
                within(began, run)
                time.sleep(0.005)
            took.append(time.monotonic() - at)
        while run.pids:
            run.look()
            within(began, run)
            time.sleep(0.01)
    except RuntimeError as problem:
        error = str(problem)
    finally:
        run.end()
        rundir.clean(run.dir)
    found: dict[str, Any] = {"faults": sum(done.values()), "recovered": len(took), "error": error}
    if not error:
        history = chaos_checker.read(run.dir, set(run.ended.values()))
        found |= chaos_checker.check(history, run.steps, GROUPS, SIZE, LIMIT, memory=run.memory)
    found |= {
        "what": dict(done),
        "recovery_median_s": round(statistics.median(took), 3) if took else None,
        "recovery_max_s": round(max(took), 3) if took else None,
        "seconds": round(time.monotonic() - began, 1),
    }
    shutil.rmtree(run.dir, ignore_errors=True)
    return found


def within(began: float, run: Run) -> None:
    if time.monotonic() - began > END_S:
        raise RuntimeError(f"{sorted(run.pids)} did not end within {END_S:.0f} s")


WRONG = ("lost", "duplicated", "over_limit", "miscounted", "foreign")


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    what: collections.Counter[str] = collections.Counter()
    for one in runs:
        what.update(one["what"])
    numbers = ("faults", "recovered", *WRONG, "trained")
    medians = [one["recovery_median_s"] for one in runs if one["recovery_median_s"] is not None]
    return {name: sum(one.get(name, 0) for one in runs) for name in numbers} | {
        "what": dict(sorted(what.items())),
        "recovery_median_s": statistics.median(medians) if medians else None,
        "errors": [one["error"] for one in runs if one["error"]],
        "runs": len(runs),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--quick", action="store_true")
    p.add_argument("--json", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--faults", type=int, default=1000, help="in all, 25 a run")
    p.add_argument("--disable", default="", choices=["", *chaos_points.MECHANISMS])
    args = p.parse_args()
    each, many = (8, 1) if args.quick else (25, max(1, args.faults // 25))
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        warm(model)
        runs = []
        for number in range(many):
            runs.append(chaos(Path(work), model, each, args.seed + number, args.disable))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    found = summed(runs)
    wrong = any(found[name] for name in WRONG)
    found["met"] = wrong if args.disable else not wrong and not found["errors"]
    if not args.quick and not args.disable:
        found["file"] = results_file.write("chaos", {"what": __doc__, **found}).name
    print(json.dumps(found) if args.json else "\n".join(f"{k:18} {v}" for k, v in found.items()))
    sys.exit(0 if found["met"] else 1)


if __name__ == "__main__":
    main()
