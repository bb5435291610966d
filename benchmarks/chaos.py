"""Inject faults at chosen points of real runs, and check what became of every sample.

The runs have six processes under the product's supervisor; messages are lost, doubled and late.

    python benchmarks/chaos.py [--quick] [--json] [--seed N] [--disable MECHANISM]
        [--topology tickets|sessions] [--durability memory|process|disk]
        [--faults N] [--minutes M] [--learner real] [--kinds K,K] [--points P,P] [--actions A,A]
        [--patience SECONDS]

Supervisor, buffer, learner, generators and reward processes are forked from one warm process, so
that a fault costs no imports.  --topology sessions: a gateway runs a tool task, whose calls the
generators answer.  Where a durability mode ends the run with the buffer, the run is resumed.

The seed determines one to three faults at a time: the victim, the point of its work where it is
held, and the fault (lib/chaos/board.py).  If a victim does not reach its point in time, it is
killed where it is.  A full disk, the end of the supervisor and a flipped byte of the journal end
the run, which is resumed.

The update of the fake learner is one number; everything else is real (--learner real: PPO in
torch). --disable switches a mechanism off; the checker (lib/chaos/checker.py) must then find an
error, and exit code 0 means that it did."""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import errno
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib import results_file
from lib.chaos import board as b
from lib.chaos import checker, forks, points
from lib.chaos.faults import Fault, Wanted

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.importing import end_with_parent
from asyncrl.records import rundir

RECOVER_S = 60.0  # a fault that has not been recovered from by then never is (--patience)
EACH = 40  # faults a run
SLOW_S = 10.0  # a recovery that takes longer wants an explanation: its run is kept
_SUBREAPER = 36
OF_TOPOLOGY = {
    "tickets": ["generators=2", "reward.workers=1"],
    "sessions": [
        "generators=2",
        "task.name='calc'",
        "agent.env='asyncrl.tasks.calc:Calculator'",
        "agent.workers=1",
        "agent.max_calls=3",
        "agent.max_tokens=36",
    ],
}


def symbols(topology: str) -> str:
    from asyncrl.tasks.calc import CalcTask
    from asyncrl.tasks.synthetic import TASKS

    return CalcTask.symbols if topology == "sessions" else TASKS["sort"]().symbols


def warm(model: Path, topology: str = "tickets") -> None:
    """Import what the parts import, and make a small model.  No backward pass: autograd's threads
    do not survive a fork.
    """
    import torch

    from asyncrl.models import policy
    from asyncrl.models.tokenizer import load_tokenizer
    from asyncrl.records import metrics

    for name in (
        "actors.engine_embedded",
        "actors.gateway.environment_worker",
        "actors.gateway.environment_sessions",
        "actors.generator",
        "actors.reward_worker",
        "asyncrl.cli.processes",
        "asyncrl.supervise.run",
        "asyncrl.supervise.cleanup",
        "buffer.service",
        "learner.loop",
    ):
        importlib.import_module(name)
    torch.set_num_threads(1)
    policy.build_model(model, symbols(topology), hidden=16, kv_heads=2, seed=1)
    policy.load_policy(model)
    load_tokenizer(model)
    metrics.import_protocol()


class Run:
    """One run, its supervisor and what that one starts."""

    def __init__(
        self,
        work: Path,
        model: Path,
        steps: int,
        seed: int,
        off: str,
        *,
        real: bool,
        patience_s: float,
        topology: str = "tickets",
        durability: str = "",
    ) -> None:
        self.patience_s = patience_s
        choice = random.Random(f"shape {seed}")
        self.groups = choice.choice((2, 2, 4))
        self.size = choice.choice((2, 4))
        self.limit = choice.choice((1, 1, 1, 0, 2))
        drawn = choice.choice(("process", "process", "disk"))
        mode = "memory" if off == "cursor" else durability or drawn
        if off == "ticket_order":
            self.groups, self.size, self.limit = 4, 4, 1
        sets = [
            f"model.path={str(model)!r}",
            f"learner.steps={steps}",
            f"learner.groups={self.groups}",
            f"learner.group_size={self.size}",
            f"staleness.max_lag={self.limit}",
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
            "reward.machinery_budget=1.0",
            # what stands still for so long was not asked to
            f"watchdog.floor_s={max(60.0, patience_s)}",
            f"reward.deadline_s={max(10.0, patience_s / 6)}",
            "watchdog.restarts=1000000",
            "wires.lease_s=3",
            "wires.retry_s=0.3",
            *OF_TOPOLOGY[topology],
        ]
        self.config = load.load(results_file.ROOT / "configs" / "demo.toml", sets)
        self.dir = work / f"run_{seed}"
        self.notes = self.dir / "chaos"
        self.steps = steps
        self.memory = mode == "memory"
        rundir.prepare(load.dump(self.config), self.dir)
        self.notes.mkdir()
        self.board = b.Board()
        self.hook = points.Hook(
            self.board, self.notes, off, 0.0 if off == "cursor" else 0.03, real=real
        )
        self.pid = 0
        self.over = False
        self.resumed = 0
        self.disk_full = False  # it has been, for one of its processes
        self.flip_next = False
        self.flipped: tuple[Path, int, bytes] | None = None
        self.noticed = self.unnoticed = 0

    def spawn(self) -> None:
        """The supervisor, as `asyncrl run` and `asyncrl run --resume` start it."""
        from asyncrl.supervise import run as supervised
        from asyncrl.supervise.hosts import ProcessLauncher

        tied = end_with_parent()

        def life() -> int:
            os.setsid()
            tied()
            log = os.open(self.notes / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            forks.begin(self.board, "supervisor")
            self.hook("supervisor")
            forks.install(self.board, self.notes, self.config, self.hook)
            os.environ["NO_COLOR"] = "1"
            try:
                watcher = supervised.HealthWatcher(
                    self.dir, supervised.say, supervised.collect_facts(self.config)
                )
                return supervised.supervise(self.config, self.dir, watcher, ProcessLauncher())
            except AsyncrlError as error:
                print(f"ended with {error.exit_code}: {error}", file=sys.stderr, flush=True)
                return error.exit_code

        self.pid = forks.fork(life)

    def look(self) -> None:
        """Reap; start the supervisor again if it was killed, or the run has ended for a reason that
        a user mends and resumes.  Raises RuntimeError for an end that no fault asked for.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self.pid:
                self.died(os.waitstatus_to_exitcode(status))

    def died(self, code: int) -> None:
        self.pid = 0
        if code == 0:
            self.over = True
            return
        log = "\n".join((self.notes / "log").read_text().splitlines()[-40:])
        # a disk stays full for a process until its end
        full = code == 1 and self.disk_full and os.strerror(errno.EFBIG) in log
        asked = code == -signal.SIGKILL or full or (self.memory and code == 3)
        # 2: what is left of the one before holds the directory for a moment
        if not asked and code != 2 and not (code == 5 and self.flipped):
            raise RuntimeError(f"the run ended with {code}: {log[-3500:]}")
        self.all_gone()
        if self.flipped is not None:
            b.mend(self.flipped)
            self.flipped = None
            self.noticed += code == 5
        elif code == -signal.SIGKILL and self.flip_next:
            self.flip_next = False
            segments = sorted((self.dir / "journal").glob("*.log"))
            if segments:
                self.flipped = b.flip(segments[-1], random.Random(self.resumed))
        self.resumed += 1
        self.spawn()

    def all_gone(self) -> None:
        """The children of a dead supervisor die with it, in the kernel's own time."""
        until = time.perf_counter() + self.patience_s
        for role in b.ROLES:
            pid = self.board.number(role, b.PID)
            while pid and role != "supervisor" and alive(pid):
                if time.perf_counter() > until:
                    raise RuntimeError(f"{role} outlives its supervisor")
                os.waitpid(pid, os.WNOHANG) if is_child(pid) else time.sleep(0.001)

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        self.all_gone()


def own_errors(log: Path) -> str:
    """The first line of a log by which a process ended that no fault ended."""
    lines = log.read_text().splitlines()
    return next(
        (x for x in lines if x.startswith(("TypeError", "AttributeError", "NameError"))), ""
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_child(pid: int) -> bool:
    try:
        return not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) or True
    except ChildProcessError:
        return False


def draw(run: Run, wanted: Wanted, off: str, choice: random.Random) -> list[Fault]:
    """One to three faults of different victims; of a supervisor, or a full disk, one alone."""
    # without a sync, what is lost is lost when a buffer dies behind its words
    if off in ("sync", "cursor"):
        wanted = Wanted(("buffer",), ("idle",), ("kill",))
    choices = wanted.choices()
    kinds = sorted({kind for kind, _, _ in choices})
    found: list[Fault] = []
    for _ in range(choice.randint(1, 3)):
        kind = choice.choice(kinds)
        drawn = choice.choice([x for x in choices if x[0] == kind])
        alone = drawn[0] == "supervisor" or drawn[2] == "disk"
        if found and (alone or any(x.kind == kind for x in found)):
            continue
        found.append(Fault(run.board, drawn, choice))
        run.disk_full |= drawn[2] == "disk"
        run.flip_next = drawn[0] == "supervisor" and drawn[2] == "flip"
        if drawn[1] == "mid-start":  # something must be started
            with contextlib.suppress(ProcessLookupError):  # of another fault, a moment ago
                pid = run.board.number(f"generator-{choice.randrange(2)}", b.PID)
                os.kill(pid, signal.SIGKILL)
        if alone:
            break
    return found


def commit(run: Run, wanted: Wanted, off: str, choice: random.Random) -> list[Fault]:
    """Some faults at once, to their end; those that came about."""
    faults = draw(run, wanted, off, choice)
    until = time.perf_counter() + run.patience_s
    while any(fault.state not in ("over", "none") for fault in faults):
        run.look()
        for fault in faults:
            if run.over:
                fault.give_up()
            else:
                fault.turn()
        if time.perf_counter() > until:
            left = [f"{x.name} ({x.role}, {x.state})" for x in faults if x.state != "over"]
            raise RuntimeError(f"not recovered from in {run.patience_s:.0f} s: {', '.join(left)}")
        time.sleep(0.002)
    if run.flipped is not None:  # it went on: the byte was of no consequence
        run.flipped = None
        run.unnoticed += 1
    return over(faults)


def over(faults: list[Fault]) -> list[Fault]:
    """Those that came about, each with what befell others at the same time."""
    done = [fault for fault in faults if fault.state == "over"]
    for fault in done:
        fault.beside = [other.name for other in done if other is not fault]
    return done


def slow(each: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Of a run's faults, those that took long to recover from, to be found again."""
    return [row | {"seed": seed} for row in each if row["seconds"] > SLOW_S]


def chaos(
    work: Path,
    model: Path,
    faults: int,
    seed: int,
    off: str = "",
    wanted: Wanted = Wanted(),
    *,
    real: bool = False,
    patience_s: float = RECOVER_S,
    durability: str = "",
) -> dict[str, Any]:
    """One run with about `faults` faults; what the checker found, and how it recovered."""
    choice = random.Random(seed)
    steps = 8 + 3 * faults
    more: Any = {"topology": wanted.topology, "durability": durability}
    run = Run(work, model, steps, seed, off, real=real, patience_s=patience_s, **more)
    done: list[Fault] = []
    error = ""
    began = time.perf_counter()
    try:
        run.spawn()
        while not run.over:
            reached = run.board.number("learner", b.WORK) + choice.randint(0, 1)
            if len(done) >= faults:
                reached = 1 << 60
            until = time.perf_counter() + 5 * patience_s
            while not run.over and run.board.number("learner", b.WORK) < max(1, reached):
                run.look()
                if time.perf_counter() > until:
                    raise RuntimeError("the run stands still")
                time.sleep(0.002)
            if not run.over:
                done += commit(run, wanted, off, choice)
    except RuntimeError as problem:
        error = f"seed {seed}: {problem}"
    finally:
        run.end()
        rundir.clean(run.dir)
    found: dict[str, Any] = {"faults": len(done), "recovered": len(done), "error": error}
    limits = (run.steps, run.groups, run.size, run.limit)
    if not error and (broken := own_errors(run.notes / "log")):
        found["error"] = f"seed {seed}: a hook or the product has a defect: {broken}"
    try:
        if not error:
            found |= checker.check(checker.read(run.dir), *limits, memory=run.memory)
    except (OSError, ValueError) as problem:
        found["error"] = f"seed {seed}: what it left cannot be read: {problem}"
    found |= {
        "seed": seed,
        "each": [fault.row() for fault in done],
        "messages": {
            name: sum(run.board.number(role, offset) for role in b.ROLES)
            for name, offset in (("lost", b.LOST), ("doubled", b.DOUBLED), ("held", b.HELD))
        },
        "resumed": run.resumed,
        "flips_refused": run.noticed,
        "flips_without_consequence": run.unnoticed,
        "seconds": round(time.perf_counter() - began, 1),
    }
    found["slow"] = slow(found["each"], seed)
    wrong = found["error"] or any(found.get(name) for name in WRONG)
    if (wrong or found["slow"]) and not off:
        kept = Path(tempfile.mkdtemp(prefix=f"chaos_{seed}_"))  # to look at what went wrong
        shutil.move(run.dir, kept)
        found["kept"] = str(kept)
    shutil.rmtree(run.dir, ignore_errors=True)
    return found


WRONG = ("lost", "duplicated", "over_limit", "miscounted", "foreign")


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs together: faults by victim, by state, by action, and how they were recovered."""
    each = [row for one in runs for row in one["each"]]
    what = collections.Counter(row["what"] for row in each)
    kinds = collections.Counter(row["kind"] for row in each)
    seconds = {kind: [x["seconds"] for x in each if x["kind"] == kind] for kind in kinds}
    numbers = (
        "faults",
        "recovered",
        *WRONG,
        "trained",
        "replaced",
        "set_aside",
        "resumed",
        "flips_refused",
        "flips_without_consequence",
    )
    spent = sum(one["seconds"] for one in runs)
    return {name: sum(one.get(name, 0) for one in runs) for name in numbers} | {
        "victims": dict(sorted(kinds.items())),
        "what": dict(sorted(what.items())),
        "messages": {
            name: sum(one["messages"][name] for one in runs) for name in ("lost", "doubled", "held")
        },
        "recovery_median_s": round(statistics.median(row["seconds"] for row in each), 3)
        if each
        else None,
        "recovery_s": {
            kind: {
                "median": round(statistics.median(values), 3),
                "p95": round(sorted(values)[int(0.95 * len(values))], 3),
                "max": round(max(values), 3),
            }
            for kind, values in sorted(seconds.items())
        },
        "faults_per_minute": round(60 * len(each) / max(spent, 1e-9), 1),
        "seconds": round(spent, 1),
        "errors": [one["error"] for one in runs if one["error"]],
        "slow": [row for one in runs for row in one["slow"]],
        "runs": len(runs),
    }


def effective(runs: list[dict[str, Any]], start_s: float) -> dict[str, Any]:
    """Share of an hour in which a run goes on, under so many kills of its processes an hour, all
    victims alike often: by what a kill cost here in the mean, from the kill to the next batch.

    It counts a run as standing still meanwhile, which it is not as a rule.  start_s: imports and
    the model's load, which forks are spared: without and with."""
    seconds = [row["seconds"] for one in runs for row in one["each"] if row["killed"]]
    if not seconds:
        return {}
    cost = statistics.mean(seconds)
    return {
        "a_kill_costs_s": round(cost, 3),
        "start_s": round(start_s, 3),
        "without_start": {n: round(1 - n * cost / 3600, 5) for n in (0, 10, 60)},
        "with_start": {n: round(1 - n * (cost + start_s) / 3600, 5) for n in (0, 10, 60)},
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true")
    made.add_argument("--json", action="store_true")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--faults", type=int, default=5000, help=f"in all, {EACH} a run")
    made.add_argument("--minutes", type=float, default=1e9, help="no run begins after these")
    # the epoch fence needs two learners at once: tests/supervise/test_chaos_off.py
    mechanisms = [name for name in points.MECHANISMS if name != "epoch_fence"]
    made.add_argument("--disable", default="", choices=["", *mechanisms])
    made.add_argument("--learner", default="fake", choices=["fake", "real"])
    made.add_argument("--topology", default="tickets", choices=list(b.TOPOLOGIES))
    made.add_argument("--durability", default="", choices=["", "memory", "process", "disk"])
    for name in ("kinds", "points", "actions"):
        made.add_argument(f"--{name}", default="", help="of these alone, with commas between")
    made.add_argument("--patience", type=float, default=RECOVER_S, help="seconds for a recovery")
    made.add_argument("--name", default="chaos", help="of the result's file")
    return made


def main() -> None:
    args = parser().parse_args()
    kinds, points, actions = (
        tuple(word for word in text.split(",") if word)
        for text in (args.kinds, args.points, args.actions)
    )
    wanted = Wanted(kinds, points, actions, args.topology)
    if not wanted.choices():
        parser().error("there is no such fault")
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # orphans are reaped here
    each, many = (10, 1) if args.quick else (EACH, max(1, args.faults // EACH))
    runs: list[dict[str, Any]] = []
    measured = results_file.commit()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        warm(model, args.topology)
        start_s = time.monotonic() - began
        for number in itertools.count():
            # a run may end before its faults came about, while this process stood still
            few = sum(one["faults"] for one in runs) < each * many
            again = few and len(runs) < 2 * many + 8 and not any(one["error"] for one in runs)
            if len(runs) >= many and not again:
                break
            if time.monotonic() - began > 60 * args.minutes:
                break
            seed = args.seed + number
            real = args.learner == "real"
            more: Any = {"real": real, "patience_s": args.patience}
            more["durability"] = args.durability
            runs.append(chaos(Path(work), model, each, seed, args.disable, wanted, **more))
            brief = {k: v for k, v in runs[-1].items() if k != "each"}
            print(json.dumps(brief), file=sys.stderr, flush=True)
    found = summed(runs) | {"effective_training_time": effective(runs, start_s)}
    wrong = any(found[name] for name in WRONG)
    found["met"] = wrong if args.disable else not wrong and not found["errors"]
    if not args.quick and not args.disable:
        said = {"what_it_is": __doc__, "learner": args.learner, "first_seed": args.seed}
        said |= {"topology": args.topology, "durability": args.durability or "process or disk"}
        found["file"] = results_file.write(args.name, said | found, measured).name
    print(json.dumps(found) if args.json else "\n".join(f"{k:18} {v}" for k, v in found.items()))
    sys.exit(0 if found["met"] else 1)


if __name__ == "__main__":
    main()
