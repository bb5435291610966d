"""`asyncrl run`: checks, warm start, supervised processes, live view, summary and report."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import layers, load, rules
from asyncrl.config.tree import Config, explain_changed_steps
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError, NothingToDo
from asyncrl.contract.messages import Numbers, RunStatus
from asyncrl.contract.printable import Say
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
from asyncrl.supervise import doctor, live
from asyncrl.supervise.hosts import ProcessLauncher
from asyncrl.supervise.launch import Supervisor
from asyncrl.supervise.preflight import localize, preflight, say
from asyncrl.supervise.report import run_view
from asyncrl.supervise.report.advice import CHECKS
from asyncrl.supervise.summary import collect_facts, find_task_signs
from asyncrl.supervise.summary import write as write_summary
from asyncrl.tasks.evaluation_sets import check_prompt_files

FIXED_ON_RESUME = (
    "seed",
    "model.path",
    "model.dtype",
    "task",
    "learner.groups",
    "learner.group_size",
    "durability",
)


class HealthWatcher:
    """Report each health check that fires once, during the run.

    It reads metrics.jsonl again whenever the run has grown by a quarter, so that all readings
    together cost as much as five readings at the end."""

    def __init__(
        self, run_dir: Path, say: Say, about: health_checks.RunFacts | None = None
    ) -> None:
        self.run_dir = run_dir
        self.say = say
        self.about = about
        self.reported: set[str] = set()
        self.has_batch = False
        self.next = health_checks.LEAST
        self.latest: Numbers = {}  # newest value of each mismatch metric
        # the new values at each check
        self.measured: list[Mapping[str, float]] = []

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
        changed = {n: x for n, x in mismatch.items() if x != self.latest.get(n)}
        self.latest |= mismatch
        if self.about is not None and changed:
            ratios = {n: latest[n] for n in ("is/chi2", "is/ratio_max") if n in latest}
            self.measured = [*self.measured[-health_checks.WINDOW :], changed | ratios]
            checks = health_checks.check_engine_mismatch, health_checks.check_truncated_sampling
            results = [check(self.measured, self.about) for check in checks]
            self.report([finding for finding in results if finding], committed)
        if committed >= self.next:
            self.next = max(committed + 1, committed * 5 // 4)
            self.report(
                health_checks.apply_rules(metrics.read(self.run_dir), self.about), committed
            )


def resolve_resume(run_dir: Path, sets: Sequence[str]) -> Config:
    """Load the config of a run to resume with `sets` applied, and store it in the run directory.

    Raises ConfigError for keys and prompts that may not change, and NothingToDo if the run is
    finished."""
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"--resume {run_dir}: no run directory (it has no config.toml)")
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
