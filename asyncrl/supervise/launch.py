"""Watch, restart and end the processes of one run.

A `ProcessLauncher` (`asyncrl.supervise.hosts`) starts them, on this machine or on others; the rules
are the same for all launchers.  Ctrl-C reaches only the supervisor, which ends the processes in
order: learner, gateway, generators, buffer.  Each writes RUN/logs/attempt_N/PROCESS.log."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import NothingToDo, ProcessLost
from asyncrl.contract.messages import RunStatus
from asyncrl.contract.printable import describe_exit
from asyncrl.contract.waits import ProgressWatchdog, blocking_process
from asyncrl.records import process_log, rundir
from asyncrl.supervise import scaling
from asyncrl.supervise.hosts import ProcessHandle, ProcessLauncher, ProcessSpec
from asyncrl.supervise.hosts.local import LocalLauncher

# when the run is overdue, a process that has sent nothing for this long is the cause
SILENT_S = 5.0
SCALE_POLL_S = 0.25  # between two checks for a request of `asyncrl scale`
LATE_S = 5.0  # a generator has this long to end by itself after buffer and learner have ended
# a process asked to end is killed after this long; more where watchdog.floor_s > USUAL_FLOOR_S
END_S = 30.0
USUAL_FLOOR_S = 60.0


@dataclass
class SupervisedProcess:
    name: str
    argv: list[str]
    threads: int
    restartable: bool
    process: ProcessHandle | None = None
    log: Path = Path()
    restarts: int = 0
    code: int | None = None  # exit code, 0 when the exit did no harm; None while it runs
    ended_at: float = 0.0  # when its exit was seen
    held_up: bool = False  # killed because it held the run up
    memory_kills: list[str | int] = field(default_factory=list)  # of its machine, at its start
    leaving: float = 0.0  # when it was asked to leave a run that goes on; 0: it was not

    @property
    def number(self) -> int:
        """A generator's number."""
        return int(self.name.rpartition("-")[2])


@dataclass
class Supervisor:
    """The processes of a run.  `say` prints a line for the user, `maker` starts processes."""

    config: Config
    run_dir: Path
    say: Callable[[str], None]
    maker: ProcessLauncher = field(default_factory=LocalLauncher)
    children: list[SupervisedProcess] = field(default_factory=list)
    interrupts: int = 0
    alone_since: float = 0.0
    status: RunStatus | None = None
    heard: float = 0.0
    looked: float = 0.0
    scale_looked: float = 0.0
    scaled: str = ""  # id of the last request that was answered

    def __post_init__(self) -> None:
        settings = self.config.watchdog
        self.watchdog = ProgressWatchdog(settings.multiple, settings.floor_s, settings.startup_s)

    @property
    def end_s(self) -> float:
        """Seconds that a process has to end by itself.

        Where watchdog.floor_s allows longer steps than usual, the last step may be long too."""
        return END_S * max(1.0, self.config.watchdog.floor_s / USUAL_FLOOR_S)

    def start(self) -> None:
        attempt = 1 + sum(1 for _ in (self.run_dir / "logs").glob("attempt_*"))
        self.logs = self.run_dir / "logs" / f"attempt_{attempt}"
        self.logs.mkdir(parents=True)
        scaling.forget(self.run_dir)
        config = self.config
        self.children = [
            SupervisedProcess("buffer", self.argv("buffer"), 1, config.durability.mode != "memory"),
            SupervisedProcess("learner", self.argv("learner"), config.learner.threads, True),
        ]
        self.children += [self.generator(number) for number in range(config.generators)]
        if config.uses_sessions:
            self.children.append(SupervisedProcess("gateway-0", self.argv("gateway", 0), 1, True))
        for child in self.children:
            self.spawn(child)
        self.heard = time.monotonic()
        self.watchdog.restart(self.heard)

    def argv(self, part: str, number: int | None = None) -> list[str]:
        """The command line of one process of the run."""
        where = [str(self.run_dir / "config.toml"), "--run-dir", str(self.run_dir)]
        index = [] if number is None else ["--index", str(number)]
        return [*importing.command("asyncrl.cli"), part, *where, *index]

    def generator(self, number: int) -> SupervisedProcess:
        name = f"generator-{number}"
        return SupervisedProcess(
            name, self.argv("generator", number), self.config.generator.threads, True
        )

    def spawn(self, child: SupervisedProcess) -> None:
        child.log = self.logs / f"{child.name}.log"
        if child.process is not None:
            child.process.close()
        child.process = self.maker.start(
            ProcessSpec(child.name, child.argv, child.threads, child.log)
        )
        child.code = None
        child.held_up = False
        child.memory_kills = process_log.memory_kills()

    # ---- watching --------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Check the children once; True when all have ended without an error.

        Raises ProcessLost or another AsyncrlError when the run cannot go on."""
        for child in list(self.children):
            if child.process is None or child.code is not None:
                continue
            code = child.process.poll()
            if child.leaving:
                self.finish_scale_down(child, code)
            elif code is not None:
                child.code, child.ended_at = code, time.monotonic()
                if code != 0 and not self.interrupts:
                    self.on_failure(child, code)
        self.check_progress()
        self.scale()
        self.bring_back()
        if all(c.code == 0 for c in self.children):
            return True
        if self.is_ended and not self.interrupts:
            self.alone_since = self.alone_since or time.monotonic()
            self.end_remaining(time.monotonic() - self.alone_since)
        return False

    def bring_back(self) -> None:
        """Restart workers that ended with the run, if the run then resumed from an earlier step.

        That happens when buffer and learner are lost after the last step and restart before it."""
        if self.status is None or self.status.finished or self.is_ended or self.interrupts:
            return
        for child in self.children:
            works = child.name.startswith(("generator-", "gateway-"))
            if works and child.code == 0 and self.heard > child.ended_at + LATE_S:
                self.say(f"the run resumed from an earlier step: starting {child.name} again")
                self.spawn(child)

    # ---- another number of generators ------------------------------------------------------------

    def scale(self) -> None:
        """Carry out a new request of `asyncrl scale` and answer it."""
        now = time.monotonic()
        if now - self.scale_looked < SCALE_POLL_S:
            return
        self.scale_looked = now
        request = scaling.read_request(self.run_dir)
        if request is None or request.id == self.scaled:
            return
        self.scaled = request.id
        error = self.resize(request.generators)
        self.say(f"scale: {error or f'{request.generators} generator(s)'}")
        scaling.answer(self.run_dir, request, request.generators, error)

    def resize(self, generators: int) -> str:
        """Start or end generators until `generators` run; the highest numbers end first.

        Returns the reason for a refusal, "" when it is done."""
        if self.is_ended or self.interrupts:
            return "the run is ending"
        if (room := self.maker.free_slots()) is not None and generators > room:
            return f"the cluster has room for {room} generators (placement.generator.count)"
        mine = [c for c in self.children if c.name.startswith("generator-") and not c.leaving]
        # also names of generators that joined by themselves or are leaving
        used_names = {c.name for c in self.children} | set(self.status.peers if self.status else ())
        free = (n for n in itertools.count() if f"generator-{n}" not in used_names)
        new = [self.generator(next(free)) for _ in range(generators - len(mine))]
        curve_dir = self.config.wires.curve_dir
        keyless = [c.name for c in new if curve_dir and not (Path(curve_dir) / c.name).is_dir()]
        if keyless:
            return (
                f"no key for {', '.join(keyless)}: make more with `asyncrl keys {curve_dir} "
                "--generators N`; the buffer reads them when it starts"
            )
        for child in new:
            self.children.append(child)
            self.spawn(child)
        for child in sorted(mine, key=lambda c: c.number)[generators:]:
            child.leaving = time.monotonic()
            if child.process is not None:
                child.process.signal(signal.SIGTERM)
        return ""

    def finish_scale_down(self, child: SupervisedProcess, code: int | None) -> None:
        """Remove a generator that was asked to leave; kill it once it takes longer than `end_s`."""
        assert child.process is not None
        if code is not None:
            child.process.close()
            self.children.remove(child)
            self.say(f"{child.name} has left")
        elif time.monotonic() - child.leaving > self.end_s:
            child.process.kill()

    @property
    def is_ended(self) -> bool:
        """Whether the buffer has ended without an error.

        Every step is then done and evaluated, and the learner has exported the model."""
        return any(c.name == "buffer" and c.code == 0 for c in self.children)

    def end_remaining(self, seconds: float) -> None:
        """Kill what still runs `seconds` after the buffer's end.

        The learner has `end_s` to close.  A process that started too late to be asked to end has
        LATE_S: it has no work."""
        peers = self.status.peers if self.status is not None else {}
        for child in self.children:
            patience = self.end_s if child.name == "learner" and child.name in peers else LATE_S
            if child.code is None and child.process is not None and seconds > patience:
                child.process.kill()
                child.code = 0
                doing = "ending" if patience == self.end_s else "starting"
                self.say(f"{child.name} was still {doing} when the run had ended")

    def observe(self, status: RunStatus) -> None:
        """Take the buffer's newest status, and pass its progress to the watchdog."""
        self.status = status
        self.heard = time.monotonic()
        self.watchdog.observe(status.progress, status.committed, self.heard)

    def check_progress(self) -> None:
        """Kill the process that holds up an overdue run; `on_failure` restarts it.

        Raises ProcessLost when no process is the cause."""
        now = time.monotonic()
        asleep = now - self.looked > SILENT_S
        self.looked = now
        # the supervisor itself was suspended (Ctrl-Z) or starved: restart all timers
        if asleep:
            self.heard = now
            self.watchdog.restart(now)
        alive = {c.name: c for c in self.children if c.process is not None and c.code is None}
        if self.interrupts or "buffer" not in alive or not (overdue := self.watchdog.overdue(now)):
            return
        waits = self.status.waits if self.status else []
        detail = (
            "; ".join(f"{name} waits {age:.0f} s for {goal}" for name, goal, _, age in waits)
            or "no process reports a wait"
        )
        if (blocking := self.status.held_up if self.status else None) is not None:
            if blocking.session.bounded and now - self.heard < SILENT_S:
                # no process is the cause, and the session has a deadline of its own
                self.watchdog.reset_deadline(now)
                return
            detail += f"; {blocking.describe()}"
        patience = min(self.watchdog.deadline / 2, SILENT_S)
        name = blocking_process(
            [n for n in alive if n != "buffer"],
            waits,
            self.status.peers if self.status else {},
            now - self.heard,
            patience,
        )
        if not name:
            raise ProcessLost(
                f"the run stands still: {overdue}; {detail}; logs: {self.logs} (the deadline: "
                "watchdog.multiple, watchdog.floor_s)"
            )
        self.say(f"the run stands still: {overdue}; {detail}; killing {name}, which holds it up")
        child = alive[name]
        assert child.process is not None
        child.held_up = True
        child.process.kill()
        self.watchdog.restart(now)

    def on_failure(self, child: SupervisedProcess, code: int) -> None:
        """Handle a child that ended with an error.

        It is ignored at the run's end and restarted after a crash.  Raises the child's own error
        if it refused its input, and ProcessLost when it cannot be restarted."""
        if self.is_ended or (code == NothingToDo.exit_code and child.name != "buffer"):
            child.code = 0  # the run is over, by its own report or by the buffer's
            self.say(f"{child.name} ended ({describe_exit(code)}) after the end of the run")
            return
        assert child.process is not None
        refused = child.process.read_refusal()
        last = child.process.tail(20)
        if refused is None:
            process_log.append_event(
                self.run_dir,
                child.name,
                child.process.pid,
                "died",
                code=code,
                why=(self.cause(child, code).strip(" ()") or (last or [""])[-1])[:500],
                **({"held_up": True} if child.held_up else {}),
            )
        died = describe_exit(code) + self.cause(child, code)
        if refused is not None:  # a restart would fail in the same way
            self.say(f"{child.name} ended the run ({died}); its log: {child.log}")
            raise refused
        self.say(f"{child.name} died: {died}; its log: {child.log}")
        for line in last:
            self.say(f"    {line}")
        if not child.restartable or child.restarts >= self.config.watchdog.restarts:
            raise ProcessLost(
                f"{child.name} died ({died}) and cannot be started again; log: {child.log}"
            )
        child.restarts += 1
        self.say(
            f"starting {child.name} again ({child.restarts} of {self.config.watchdog.restarts})"
        )
        self.spawn(child)

    def cause(self, child: SupervisedProcess, code: int) -> str:
        """In brackets: whether a SIGKILL came from the out-of-memory killer; "" for other exits."""
        if code not in (-signal.SIGKILL, process_log.RANK_LOST) or child.held_up:
            return ""
        kills_before, kills_now = child.memory_kills, process_log.memory_kills()
        if kills_before and kills_before == kills_now:
            return ""
        cause = "out of memory"
        if not kills_before or not kills_now:
            cause = "perhaps out of memory; this machine does not report it"
        if tokens := rundir.longest_prompt(self.run_dir, child.name):
            cause += (
                f"; its longest prompt had {tokens} tokens: set generator.context or "
                "generator.slots lower"
            )
        return f" ({cause})"

    # ---- the end ---------------------------------------------------------------------------------

    def end(self, *, gently: bool) -> None:
        """End all processes in order: learner, gateway, generators, buffer.

        gently: by SIGTERM; the learner then finishes its batch and writes a checkpoint, and has as
        long for that as for any step."""
        for kind in ("learner", "gateway", "generator", "buffer"):
            mine = [
                child
                for child in self.children
                if child.name.startswith(kind)
                and child.process is not None
                and child.process.poll() is None
            ]
            for child in mine:
                assert child.process is not None
                child.process.signal(signal.SIGTERM if gently else signal.SIGKILL)
            patience = max(self.end_s, self.watchdog.deadline) if kind == "learner" else self.end_s
            deadline = time.monotonic() + patience
            for child in mine:
                assert child.process is not None
                while (code := child.process.poll()) is None:
                    if self.interrupts > 1 or time.monotonic() > deadline:
                        child.process.kill()
                    time.sleep(0.02)
                child.code = code
                if code < 0:
                    process_log.append_event(
                        self.run_dir,
                        child.name,
                        child.process.pid,
                        "died",
                        code=code,
                        why="by its supervisor, which ends the run",
                        asked=True,
                    )
        for child in self.children:
            if child.process is not None:
                child.process.close()
