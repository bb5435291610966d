"""Watch, restart and end the processes of one run.

A `ProcessLauncher` (`asyncrl.supervise.hosts`) starts them, on this machine or on others; the rules
are the same for all launchers.  Ctrl-C reaches only the supervisor, which ends the processes in
order: learner, gateway, generators, buffer.  Each writes RUN/logs/attempt_N/PROCESS.log."""

import contextlib
import itertools
import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import NothingToDo, ProcessLost
from asyncrl.contract.messages import RunStatus
from asyncrl.contract.printable import Say, describe_exit
from asyncrl.contract.waits import ProgressWatchdog, find_blocking_process
from asyncrl.records import atomic_write, process_log
from asyncrl.supervise import scaling
from asyncrl.supervise.hosts import ProcessHandle, ProcessLauncher, ProcessSpec, find_last_words

# if the run is overdue, a process that has sent nothing for this long is the cause
SILENT_S = 5.0
SCALE_POLL_S = 0.25  # seconds between two checks for a request of `asyncrl scale`
LATE_S = 5.0  # time for a generator to exit after buffer and learner have ended
# time for a process to exit before it is killed; longer if watchdog.floor_s > USUAL_FLOOR_S
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
    code: int | None = None  # exit code, 0 if the exit was harmless; None while it runs
    ended_at: float = 0.0  # when its exit was detected
    held_up: bool = False  # killed because it held up the run
    memory_kills: list[str | int] = field(default_factory=list)  # on its machine, at its start
    leaving: float = 0.0  # when `asyncrl scale` ended it; 0: not ended


@dataclass
class Supervisor:
    """The processes of a run.  `say` prints a line for the user, `launcher` starts processes."""

    config: Config
    run_dir: Path
    say: Say
    launcher: ProcessLauncher = field(default_factory=ProcessLauncher)
    children: list[SupervisedProcess] = field(default_factory=list)
    interrupts: int = 0
    alone_since: float = 0.0
    status: RunStatus | None = None
    status_time: float = 0.0
    progress_check: float = 0.0
    scale_check: float = 0.0
    scale_id: str = ""  # id of the last request that was answered
    connected: set[str] = field(default_factory=set)  # children that the buffer has heard of

    def __post_init__(self) -> None:
        settings = self.config.watchdog
        self.watchdog = ProgressWatchdog(settings.multiple, settings.floor_s, settings.startup_s)

    @property
    def end_s(self) -> float:
        """Seconds that a process has to exit.

        With a longer watchdog.floor_s than usual, the last step may also be longer."""
        return END_S * max(1.0, self.config.watchdog.floor_s / USUAL_FLOOR_S)

    def start(self) -> None:
        attempt = 1 + sum(1 for _ in (self.run_dir / "logs").glob("attempt_*"))
        self.logs = self.run_dir / "logs" / f"attempt_{attempt}"
        self.logs.mkdir(parents=True)
        scaling.forget(self.run_dir)
        names = ["buffer", "learner"]
        names += [f"generator-{number}" for number in range(self.config.generators)]
        names += ["gateway-0"] if self.config.uses_sessions else []
        self.children = [self.build_child(name) for name in names]
        for child in self.children:
            self.spawn(child)
        self.status_time = time.monotonic()
        self.watchdog.restart(self.status_time)

    def build_child(self, name: str) -> SupervisedProcess:
        """Return a process of the run with its command line."""
        config, (kind, _, number) = self.config, name.partition("-")
        argv = importing.make_command("asyncrl.cli", kind, str(self.run_dir / "config.toml"))
        argv += ["--run-dir", str(self.run_dir), *(["--index", number] if number else [])]
        threads = {"learner": config.learner.threads, "generator": config.generator.threads}
        restartable = kind != "buffer" or config.durability.mode != "memory"
        return SupervisedProcess(name, argv, threads.get(kind, 1), restartable)

    def spawn(self, child: SupervisedProcess) -> None:
        child.log = self.logs / f"{child.name}.log"
        if child.process is not None:
            child.process.close()
        child.process = self.launcher.start(
            ProcessSpec(child.name, child.argv, child.threads, child.log)
        )
        child.code = None
        child.held_up = False
        self.connected.discard(child.name)
        child.memory_kills = process_log.read_memory_kills()

    # ---- watching --------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Check the children once; return whether all have ended without an error.

        Raises ProcessLost or another AsyncrlError if the run cannot continue."""
        for child in list(self.children):
            if child.process is None or child.code is not None:
                continue
            code = child.process.poll()
            if child.leaving and code is not None:
                child.process.close()
                self.children.remove(child)
                self.say(f"{child.name} has left")
            elif child.leaving:
                if time.monotonic() - child.leaving > self.end_s:
                    child.process.kill()
            elif code is not None:
                child.code, child.ended_at = code, time.monotonic()
                if code != 0 and not self.interrupts:
                    self.handle_failure(child, code)
        self.check_progress()
        self.scale()
        self.restart_workers()
        if all(c.code == 0 for c in self.children):
            return True
        if self.is_ended and not self.interrupts:
            self.alone_since = self.alone_since or time.monotonic()
            self.end_remaining(time.monotonic() - self.alone_since)
        return False

    def restart_workers(self) -> None:
        """Restart workers that ended with the run if the run then resumed from an earlier step.

        That happens if buffer and learner are lost after the last step and restart before it."""
        if self.status is None or self.status.finished or self.is_ended or self.interrupts:
            return
        for child in self.children:
            is_worker = child.name.startswith(("generator-", "gateway-"))
            if is_worker and child.code == 0 and self.status_time > child.ended_at + LATE_S:
                self.say(f"the run resumed from an earlier step: starting {child.name} again")
                self.spawn(child)

    # ---- another number of generators ------------------------------------------------------------

    def scale(self) -> None:
        """Carry out a new request of `asyncrl scale` and reply to it."""
        now = time.monotonic()
        if now - self.scale_check < SCALE_POLL_S:
            return
        self.scale_check = now
        request = scaling.read_request(self.run_dir)
        if request is None or request.id == self.scale_id:
            return
        self.scale_id = request.id
        error = self.resize(request.generators)
        self.say(f"scale: {error or f'{request.generators} generator(s)'}")
        reply = {"id": request.id, "generators": request.generators, "error": error}
        with contextlib.suppress(OSError):  # `asyncrl scale` then times out
            atomic_write.write(self.run_dir / "scale.done", json.dumps(reply))

    def resize(self, generators: int) -> str:
        """Start or end generators until `generators` run; the highest numbers end first.

        Return the reason for a refusal, or "" on success."""
        if self.is_ended or self.interrupts:
            return "the run is ending"
        if (slots := self.launcher.count_slots()) is not None and generators > slots:
            return f"the cluster has room for {slots} generators (placement.generator.count)"
        if self.config.generator.engine == "vllm-serve" and generators > 1:
            return "one generator serves all servers of generator.engine = vllm-serve"
        generators_running = [
            c for c in self.children if c.name.startswith("generator-") and not c.leaving
        ]
        # includes generators that joined or are leaving
        used_names = {c.name for c in self.children} | set(self.status.peers if self.status else ())
        names = (f"generator-{number}" for number in itertools.count())
        free = (name for name in names if name not in used_names)
        added = [self.build_child(next(free)) for _ in range(generators - len(generators_running))]
        curve_dir = self.config.wires.curve_dir
        keyless = [c.name for c in added if curve_dir and not (Path(curve_dir) / c.name).is_dir()]
        if keyless:
            return (
                f"no key for {', '.join(keyless)}: make more with `asyncrl keys {curve_dir} "
                "--generators N`; the buffer reads them when it starts"
            )
        for child in added:
            self.children.append(child)
            self.spawn(child)
        for child in sorted(generators_running, key=lambda c: int(c.name.rpartition("-")[2]))[
            generators:
        ]:
            child.leaving = time.monotonic()
            if child.process is not None:
                child.process.signal(signal.SIGTERM)
        return ""

    @property
    def is_ended(self) -> bool:
        """Whether the buffer has ended without an error.

        Then every step is done and evaluated, and the learner has exported the model."""
        return any(c.name == "buffer" and c.code == 0 for c in self.children)

    def end_remaining(self, seconds: float) -> None:
        """Kill processes that still run `seconds` after the buffer's end.

        The learner has `end_s` to close.  A process that started too late to receive a request to
        end has LATE_S, because it has no work."""
        peers = self.status.peers if self.status is not None else {}
        for child in self.children:
            patience = self.end_s if child.name == "learner" and child.name in peers else LATE_S
            if child.code is None and child.process is not None and seconds > patience:
                child.process.kill()
                child.code = 0
                doing = "ending" if {child.name} & (self.connected | peers.keys()) else "starting"
                self.say(f"{child.name} was still {doing} when the run had ended")

    def observe(self, status: RunStatus) -> None:
        """Store the buffer's newest status and pass its progress to the watchdog."""
        self.status = status
        self.connected |= status.peers.keys()
        self.status_time = time.monotonic()
        self.watchdog.observe(status.progress, status.committed, self.status_time, status.epoch)

    def check_progress(self) -> None:
        """Kill the process that holds up an overdue run; `handle_failure` restarts it.

        Raises ProcessLost if no process is the cause."""
        now = time.monotonic()
        was_suspended = now - self.progress_check > SILENT_S
        self.progress_check = now
        # the supervisor itself was suspended (Ctrl-Z) or starved: restart all timers
        if was_suspended:
            self.status_time = now
            self.watchdog.restart(now)
        running = {c.name: c for c in self.children if c.process is not None and c.code is None}
        if (
            self.interrupts
            or "buffer" not in running
            or not (overdue := self.watchdog.explain_overdue(now))
        ):
            return
        waits = self.status.waits if self.status else []
        detail = (
            "; ".join(f"{name} waits {age:.0f} s for {goal}" for name, goal, _, age in waits)
            or "no process reports a wait"
        )
        if (blocking := self.status.held_up if self.status else None) is not None:
            if blocking.session.is_bounded and now - self.status_time < SILENT_S:
                # no process is the cause, and the session has its own deadline
                self.watchdog.since = now
                return
            detail += f"; {blocking.describe()}"
        name = find_blocking_process(
            [n for n in running if n != "buffer"],
            waits,
            self.status.peers if self.status else {},
            now - self.status_time,
            min(self.watchdog.deadline / 2, SILENT_S),
        )
        if not name:
            raise ProcessLost(
                f"the run stands still: {overdue}; {detail}; logs: {self.logs} (deadline: "
                "watchdog.multiple, watchdog.floor_s)"
            )
        self.say(f"the run stands still: {overdue}; {detail}; killing {name}, which holds it up")
        child = running[name]
        assert child.process is not None
        child.held_up = True
        child.process.kill()
        self.watchdog.restart(now)

    def handle_failure(self, child: SupervisedProcess, code: int) -> None:
        """Handle a child that ended with an error.

        It is ignored at the run's end and restarted after a crash.  Raises the child's own error
        if it refused its input, and ProcessLost if it cannot be restarted."""
        if self.is_ended or (code == NothingToDo.exit_code and child.name != "buffer"):
            child.code = 0  # the run is over, by its own report or by the buffer's
            self.say(f"{child.name} ended ({describe_exit(code)}) after the end of the run")
            return
        assert child.process is not None
        refusal = child.process.read_refusal()
        last_lines = child.process.tail(20)
        cause = self.explain_kill(child, code)
        if refusal is None:
            process_log.append_event(
                self.run_dir,
                child.name,
                child.process.pid,
                "died",
                code=code,
                why=(cause.strip(" ()") or find_last_words(last_lines))[:500],
                **({"held_up": True} if child.held_up else {}),
            )
        exit_text = describe_exit(code) + cause
        if refusal is not None:  # a restart would fail in the same way
            self.say(f"{child.name} ended the run ({exit_text}); its log: {child.log}")
            raise refusal
        self.say(f"{child.name} exited: {exit_text}; its log: {child.log}")
        for line in last_lines:
            self.say(f"    {line}")
        if not child.restartable or child.restarts >= self.config.watchdog.restarts:
            raise ProcessLost(
                f"{child.name} exited ({exit_text}) and cannot be started again; log: {child.log}"
            )
        child.restarts += 1
        self.say(
            f"starting {child.name} again ({child.restarts} of {self.config.watchdog.restarts})"
        )
        self.spawn(child)

    def explain_kill(self, child: SupervisedProcess, code: int) -> str:
        """Return in brackets whether the out-of-memory killer sent a SIGKILL; "" otherwise."""
        if code not in (-signal.SIGKILL, process_log.RANK_LOST) or child.held_up:
            return ""
        kills_before, kills_now = child.memory_kills, process_log.read_memory_kills()
        if kills_before and kills_before == kills_now:
            return ""
        reason = "out of memory"
        if not kills_before or not kills_now:
            reason = "perhaps out of memory; this machine does not report it"
        longest = self.run_dir / f".{child.name}.longest"
        with contextlib.suppress(OSError, ValueError):
            tokens = int(longest.read_text(encoding="utf-8"))
            reason += (
                f"; its longest prompt had {tokens} tokens: set generator.context or "
                "generator.slots lower"
            )
        return f" ({reason})"

    # ---- the end ---------------------------------------------------------------------------------

    def end(self, *, gently: bool) -> None:
        """End all processes in order: learner, gateway, generators, buffer.

        gently: send SIGTERM; the learner then finishes its batch and writes a checkpoint, for which
        it has as much time as for any step."""
        for prefix in ("learner", "gateway", "generator", "buffer"):
            children = [
                (child, child.process)
                for child in self.children
                if child.name.startswith(prefix)
                and child.process is not None
                and child.process.poll() is None
            ]
            for _, process in children:
                process.signal(signal.SIGTERM if gently else signal.SIGKILL)
            patience = (
                max(self.end_s, self.watchdog.deadline) if prefix == "learner" else self.end_s
            )
            deadline = time.monotonic() + patience
            for child, process in children:
                while (code := process.poll()) is None:
                    if self.interrupts > 1 or time.monotonic() > deadline:
                        process.kill()
                    time.sleep(0.02)
                child.code = code
                if code < 0:
                    process_log.append_event(
                        self.run_dir,
                        child.name,
                        process.pid,
                        "died",
                        code=code,
                        why="by its supervisor, which ends the run",
                        asked=True,
                    )
        for child in self.children:
            if child.process is not None:
                child.process.close()
