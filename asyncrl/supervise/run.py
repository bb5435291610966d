"""`asyncrl run`: checks, warm start, supervised processes, live view, summary and report.

The supervisor watches, restarts and ends the processes of one run. A `ProcessLauncher`
(`asyncrl.supervise.hosts`) starts them, on this machine or on others; the rules are the same for
all launchers.  Ctrl-C reaches only the supervisor, which ends the processes in order: learner,
gateway, generators, buffer.  Each writes RUN/logs/attempt_N/PROCESS.log."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import layers, load, rules
from asyncrl.config.tree import Config, explain_changed_steps
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError, NothingToDo, ProcessLost
from asyncrl.contract.messages import Numbers, RunStatus
from asyncrl.contract.printable import Say, describe_exit
from asyncrl.contract.waits import ProgressWatchdog, find_blocking_process
from asyncrl.records import (
    atomic_write,
    health_checks,
    jsonl,
    metrics,
    process_log,
    rundir,
    stream,
    trace,
)
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import format_number
from asyncrl.supervise import doctor, live, scaling
from asyncrl.supervise.hosts import ProcessHandle, ProcessLauncher, ProcessSpec, find_last_words
from asyncrl.supervise.preflight import localize, preflight, say
from asyncrl.supervise.report import run_view
from asyncrl.supervise.report.advice import CHECKS
from asyncrl.supervise.summary import collect_facts, find_task_signs
from asyncrl.supervise.summary import write as write_summary
from asyncrl.tasks.evaluation_sets import check_prompt_files

# if the run is overdue, a process that has sent nothing for this long is the cause
SILENT_S = 5.0
LATE_S = 5.0  # time for a generator to exit after buffer and learner have ended
# time for a process to exit before it is killed; longer if watchdog.floor_s > USUAL_FLOOR_S
END_S = 30.0
USUAL_FLOOR_S = 60.0
FIXED_ON_RESUME = (
    "seed",
    "model.path",
    "model.dtype",
    "task",
    "learner.groups",
    "learner.group_size",
    "durability",
)


@dataclass(eq=False)
class SupervisedProcess:
    name: str
    argv: list[str]
    threads: int
    restartable: bool
    process: ProcessHandle = field(init=False)  # from `Supervisor.spawn` on
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
        for name in names:
            self.spawn(self.build_child(name))
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
        """Start a new child, or a child that has ended again."""
        child.log = self.logs / f"{child.name}.log"
        is_new = child not in self.children
        if not is_new:
            child.process.close()
        child.process = self.launcher.start(
            ProcessSpec(child.name, child.argv, child.threads, child.log)
        )
        self.children += [child] if is_new else []
        child.code = None
        child.held_up = False
        self.connected.discard(child.name)
        child.memory_kills = process_log.read_memory_kills()

    # ---- watching --------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Check the children once; return whether all have ended without an error.

        Raises ProcessLost or another AsyncrlError if the run cannot continue."""
        for child in list(self.children):
            if child.code is not None:
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
            self.spawn(child)
        for child in sorted(generators_running, key=lambda c: int(c.name.rpartition("-")[2]))[
            generators:
        ]:
            child.leaving = time.monotonic()
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
        for child in self.children:
            has_connected = child.name in self.connected
            patience = self.end_s if child.name == "learner" and has_connected else LATE_S
            if child.code is None and seconds > patience:
                child.process.kill()
                child.code = 0
                doing = "ending" if has_connected else "starting"
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
        running = {c.name: c for c in self.children if c.code is None}
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
                child
                for child in self.children
                if child.name.startswith(prefix) and child.process.poll() is None
            ]
            for child in children:
                child.process.signal(signal.SIGTERM if gently else signal.SIGKILL)
            patience = (
                max(self.end_s, self.watchdog.deadline) if prefix == "learner" else self.end_s
            )
            deadline = time.monotonic() + patience
            for child in children:
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
            child.process.close()


# ---- the command --------------------------------------------------------------------------------


class HealthWatcher:
    """Report each health check that fires once, during the run.

    It reads metrics.jsonl again whenever the run has grown by a quarter, so that all readings
    together cost as much as five readings at the end."""

    def __init__(self, run_dir: Path, say: Say, facts: health_checks.RunFacts) -> None:
        self.run_dir = run_dir
        self.say = say
        self.facts = facts
        self.reported: set[str] = set()
        self.has_batch = False
        self.next = health_checks.LEAST
        self.latest: Numbers = {}  # newest value of each mismatch metric
        # the newest values at the last checks
        self.measured: deque[Numbers] = deque(maxlen=health_checks.WINDOW + 1)

    def report(self, findings: Sequence[health_checks.Finding], step: int) -> None:
        for sign in findings:
            if sign.name not in self.reported:
                self.reported.add(sign.name)
                self.say(f"note: {sign.as_line()}")
                jsonl.note(self.run_dir / CHECKS, {"step": step, **sign._asdict()})

    def check(self, committed: int, latest: Mapping[str, float] = {}) -> None:
        """Apply the rules after `committed` batches.

        latest: the newest value of each metric, from any batch; it shows a mismatch between engine
        and learner from the first batch on."""
        findings = health_checks.match_rules("latest", latest)
        if refused := health_checks.check_refused_messages([latest]):
            findings.append(refused)
        self.report(findings, committed)
        if not self.has_batch and "reward/mean" in latest:
            self.has_batch = True
            if finding := health_checks.check_constant_rewards([latest], least=1):
                self.say(f"note: {finding.as_line()}")  # the check of more batches may report too
        mismatch = {n: latest[n] for n in health_checks.MISMATCHES if n in latest}
        changed = dict(mismatch.items() - self.latest.items())
        self.latest |= changed
        if changed:
            ratios = {n: latest[n] for n in ("is/chi2", "is/ratio_max") if n in latest}
            self.measured.append(changed | ratios)
            checks = health_checks.check_engine_mismatch, health_checks.check_truncated_sampling
            results = [check(self.measured, self.facts) for check in checks]
            self.report([*filter(None, results)], committed)
        if committed >= self.next:
            self.next = max(committed + 1, committed * 5 // 4)
            rows = metrics.read(self.run_dir)
            self.report(health_checks.apply_rules(rows, self.facts), committed)


def resolve_resume(run_dir: Path, sets: Sequence[str]) -> Config:
    """Load the config of a run to resume with `sets` applied, and store it in the run directory.

    Raises ConfigError for keys and prompts that may not change, and NothingToDo if the run is
    finished."""
    rundir.require_run(run_dir)
    rundir.refuse_if_in_use(run_dir)  # before any file of that run is written
    stored = load.load(run_dir / "config.toml")
    config = load.load(run_dir / "config.toml", sets)
    for item in sets:
        key = layers.key_of(item)
        if layers.is_inside(key, FIXED_ON_RESUME):
            raise ConfigError(
                f"--set {item}: {key} cannot change when a run is resumed; start a new run"
            )
    checkpoint = doctor.find_checkpoint(run_dir)
    steps_made = checkpoint["version"] if checkpoint else 0
    if config.learner.steps < steps_made:
        raise ConfigError(
            f"--resume {run_dir}: it has made {steps_made} steps, and learner.steps = "
            f"{config.learner.steps} is fewer; give --set learner.steps=N above {steps_made}"
        )
    if jsonl.read_object(run_dir / "summary.json").get("steps", -1) >= config.learner.steps:
        raise NothingToDo(
            f"{run_dir} has made all its {config.learner.steps} steps; to train on, give --set "
            "learner.steps=N with a larger N"
        )
    check_prompt_files(config, run_dir)
    if config.staleness.limit != stored.staleness.limit:
        with (run_dir / "limits").open("a", encoding="utf-8") as file:
            file.write(f"{stored.staleness.limit:g}\n")
    if change := explain_changed_steps(config.learner, stored.learner.steps, steps_made):
        say(f"note: learner.{change}")
    if config != stored:
        atomic_write.write(run_dir / "config.toml", load.dump(config), sync=True)
    return config


def build_removed_error(run_dir: Path) -> AsyncrlError:
    return AsyncrlError(
        f"{run_dir} was removed or moved during the run, which has ended; if it was moved, its "
        "files are in the new place"
    )


def supervise(
    config: Config, run_dir: Path, watcher: HealthWatcher, launcher: ProcessLauncher
) -> int:
    """Run all processes to their end; return 0, or 130 after an interrupt.

    Raises the error that ended the run."""
    lock = rundir.RunLock(run_dir)
    directories = rundir.list_outside_directories(run_dir)
    process_log.append_event(run_dir, "supervisor", os.getpid(), "began")
    supervisor = Supervisor(config, run_dir, say, launcher)
    sweeper = subprocess.Popen(
        importing.make_command("asyncrl.supervise.cleanup", str(run_dir)),
        stdin=subprocess.PIPE,
        start_new_session=True,
    )

    def interrupt(number: int, _frame: Any) -> None:
        supervisor.interrupts += 1
        say(
            "stopping: the learner finishes its batch and writes a checkpoint; interrupt again to "
            "stop at once"
            if supervisor.interrupts == 1
            else "stopping now"
        )

    def observe(status: RunStatus) -> None:
        supervisor.observe(status)
        if not (run_dir / "config.toml").exists():
            raise build_removed_error(run_dir)
        watcher.check(status.committed, status.metrics)

    previous = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        launcher.prepare()
        supervisor.start()
        live.follow(
            rundir.get_buffer_address(config, run_dir),
            config.wires.curve_dir,
            lambda: supervisor.poll() or supervisor.interrupts > 0,
            observe,
        )
        supervisor.end(gently=supervisor.interrupts < 2)
        return 130 if supervisor.interrupts else 0
    except (AsyncrlError, OSError) as error:
        # a removed directory causes a different error in each process
        if not (run_dir / "config.toml").exists():
            raise build_removed_error(run_dir) from error
        raise
    finally:
        supervisor.end(gently=False)
        for number, handler in previous.items():
            signal.signal(number, handler)
        rundir.remove(directories)
        lock.close()
        sweeper.communicate()


def format_interval(summary: Mapping[str, Any]) -> str:
    """Format half of the 95 % interval of the last held-out reward; "" without one."""
    certainty = summary.get("certainty", {}).get("heldout")
    return f" +-{certainty['half']:.3f} (n = {certainty['n']:,})" if certainty else ""


def run(
    config: Config, run_dir: Path, *, resume: bool, on: str = "local"
) -> tuple[int, JsonObject]:
    """Carry out `asyncrl run`; return the exit code and the summary.

    on: the hosts of the processes: `local` (this machine) or `ray[://ADDRESS]`."""
    if on == "local":
        return run_with_launcher(config, run_dir, ProcessLauncher(), resume=resume)
    from asyncrl.supervise.hosts import on_ray

    run_dir = run_dir.resolve()
    config = on_ray.adapt_config(config)
    with on_ray.place_on_cluster(config, run_dir, on, say) as (config, launcher):
        return run_with_launcher(config, run_dir, launcher, resume=resume)


def run_with_launcher(
    config: Config, run_dir: Path, launcher: ProcessLauncher, *, resume: bool
) -> tuple[int, JsonObject]:
    """Carry out `run` with processes that `launcher` starts."""
    for warning in rules.find_warnings(config):
        say(f"note: {warning}")
    config = localize(config)
    preflight(config)
    watcher = HealthWatcher(run_dir, say, collect_facts(config))
    if not resume:
        rundir.prepare(load.dump(config), run_dir)
        check_prompt_files(config, run_dir)
    watcher.report(find_task_signs(config), 0)
    say(
        f"run {run_dir}: {config.generators} generator(s), {config.learner.steps} steps of "
        f"{config.learner.groups} x {config.learner.group_size}"
    )
    started_at = time.monotonic()
    if resume and rundir.is_finished(run_dir, config.learner.steps):
        say("all its steps are done; writing the missing summary")
        return 0, conclude(config, run_dir, 0, started_at)

    def record_end(code: int, why: str = "") -> None:
        process_log.append_event(run_dir, "supervisor", os.getpid(), "ended", code=code, why=why)

    try:
        code = supervise(config, run_dir, watcher, launcher)
    except BaseException as error:
        kind = "" if isinstance(error, AsyncrlError) else f"{type(error).__name__}: "
        record_end(getattr(error, "exit_code", 1), f"{kind}{error}")
        report_failure(run_dir)
        raise
    record_end(code)
    if code and not (run_dir / "buffer_summary.json").exists():
        trace.merge(run_dir)
        say(f"stopped at once, without a summary; continue with: asyncrl run --resume {run_dir}")
        return code, {}
    return code, conclude(config, run_dir, code, started_at, watcher)


def conclude(
    config: Config,
    run_dir: Path,
    code: int,
    started_at: float | None = None,
    watcher: HealthWatcher | None = None,
) -> JsonObject:
    """Write timeline, summary and report of a run whose buffer has ended; print the next command.

    code: 0 if all steps are done.  started_at: time.monotonic() at the start of the run, if this
    process started it.  watcher: skips findings that were already reported.  Return the summary."""
    trace.merge(run_dir)
    summary = write_summary(config, run_dir)
    (watcher or HealthWatcher(run_dir, say, collect_facts(config))).report(
        [health_checks.Finding(**s) for s in summary["signs"]], summary["steps"]
    )
    page = f"report: {run_view.write_report(run_dir)}"
    total = "" if started_at is None else f" ({time.monotonic() - started_at:.0f} s in all)"
    say(
        f"{run_dir}: held-out {format_number(summary['heldout_start'], '.3f')} -> "
        f"{format_number(summary['heldout_end'], '.3f')}{format_interval(summary)} in "
        f"{summary['wall_s']:.0f} s of RL{total}, mean lag {summary['lag']['mean']:.2f}"
    )
    if config.record.stream:
        say(
            f"recording: {stream.measure_size(run_dir) / stream.MIB:.1f} MiB of at most "
            f"{config.record.stream_mib} MiB; replay it with: asyncrl replay {run_dir}"
        )
    say(page if code == 0 else f"continue with: asyncrl run --resume {run_dir}")
    return summary


def report_failure(run_dir: Path) -> None:
    """Write timeline and report of a failed run from the existing data.

    Errors are only printed, because the caller raises the error that ended the run."""
    if not run_dir.is_dir():
        return
    try:
        trace.merge(run_dir)
        if metrics.read(run_dir):
            say(f"report up to the error: {run_view.write_report(run_dir)}")
    except Exception as error:
        say(
            f"the report could not be written ({type(error).__name__}: {error}); try again with "
            f"`asyncrl report {run_dir}`"
        )


def conclude_unsupervised(incarnation: process_log.ProcessIncarnation) -> None:
    """Conclude a run without a supervisor, in the last of its processes to exit.

    The run's lock ensures that only one process does so."""
    run_dir = incarnation.run_dir
    try:
        lock = rundir.RunLock(run_dir)
    except ConfigError:
        return  # a supervisor or another process concludes it
    try:
        if not (run_dir / "buffer_summary.json").exists():
            # the buffer was killed, or it ran on another machine
            return
        if not (run_dir / "summary.json").exists():
            config = load.load(run_dir / "config.toml")
            conclude(config, run_dir, 0 if rundir.is_finished(run_dir, config.learner.steps) else 1)
        rundir.clean(run_dir)
    except (AsyncrlError, OSError) as error:
        say(
            f"the run's summary and report could not be written: {error}; try again with "
            f"`asyncrl report {run_dir}`"
        )
    finally:
        lock.close()
