"""The state of a run for `asyncrl doctor RUN_DIR`: from its buffer, else from its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import REFUSALS
from asyncrl.contract.messages import RunStatus
from asyncrl.contract.printable import escape_line
from asyncrl.contract.waits import ProgressWatchdog
from asyncrl.records import health_checks, metrics, process_log, rundir
from asyncrl.supervise import live
from asyncrl.supervise.report.advice import first_lines

SHOWN = ("reward/mean", "eval/heldout", "lag/mean", "optim/grad_norm")


def deadline_s(config: Config, run_dir: Path) -> float:
    """Seconds without a commit after which this run's next step is overdue."""
    settings = config.watchdog
    watchdog = ProgressWatchdog(settings.multiple, settings.floor_s, settings.startup_s)
    for count, seconds in enumerate(
        [r["t"] for r in metrics.read(run_dir) if "reward/mean" in r], 1
    ):
        watchdog.observe(count, count, seconds)
    return watchdog.deadline


def last_line(path: Path) -> str:
    """The last line of a log that is not empty; "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = [
                x.strip() for x in file.read().decode(errors="replace").splitlines() if x.strip()
            ]
    except OSError:
        return ""
    return escape_line(lines[-1]) if lines else ""


def processes(config: Config, run_dir: Path) -> list[dict[str, Any]]:
    """Describe every process that the run has, had or should have.

    One dict each: does it run, how did it end, and the last line of its log."""
    newest = process_log.latest_events(run_dir)
    logs = sorted(
        (run_dir / "logs").glob("attempt_*"),
        key=lambda p: int(p.name.removeprefix("attempt_") or 0),
    )
    names = ["buffer", "learner", *(f"generator-{i}" for i in range(config.generators))]
    names += ["gateway-0"] if config.uses_sessions else []
    names += sorted(
        {*newest, *(["supervisor"] if process_log.is_alive(run_dir, "supervisor") else [])}
        - {*names}
    )
    described = []
    for name in names:
        row = newest.get(name)
        running = process_log.is_alive(run_dir, name)
        if running:
            pid = (
                (run_dir / (".run.lock" if name == "supervisor" else f".{name}.alive"))
                .read_text(encoding="utf-8")
                .strip()
            )
            state = f"{name} is running (process {pid})"
        else:
            state = f"{name} has not been started" if row is None else process_log.end_of(row)
        log = logs[-1] / f"{name}.log" if logs else None
        known = (
            log is not None and log.exists() and (row is None or row.get("supervised") is not False)
        )
        described.append(
            {
                "name": name,
                "alive": running,
                "known": row is not None,
                "said": state,
                "code": None if running or row is None else row.get("code"),
                "log": str(log) if known else "",
                "last_line": last_line(log) if known and log is not None else "",
            }
        )
    return described


def checkpoint(run_dir: Path) -> dict[str, Any] | None:
    """Version and path of the newest checkpoint, which is not read; None without one."""
    paths = [
        p
        for p in (run_dir / "checkpoints").glob("epoch_*/number_*")
        if p.parent.suffix == "" and p.name[7:].isdigit()
    ]
    newest = max(paths, key=lambda p: (int(p.parent.name[6:]), int(p.name[7:])), default=None)
    return None if newest is None else {"version": int(newest.name[7:]), "path": str(newest)}


def examine_run(config: Config, run_dir: Path, status: RunStatus | None) -> dict[str, Any]:
    """Collect the run's state, as `asyncrl doctor --json` prints it.

    advice: what limited its speed, whether staleness hurt, which health checks fired.
    running: at least one of its processes runs.  ended: all its steps are done."""
    rows = [r for r in metrics.read(run_dir) if "reward/mean" in r]
    every = processes(config, run_dir)
    committed = (
        status.committed
        if status is not None
        else max((int(r["step"]) for r in rows), default=-1) + 1
    )
    path = run_dir / "metrics.jsonl"
    ended = status is None and rundir.is_finished(run_dir, config.learner.steps)
    return {
        "advice": [line.as_line() for line in first_lines(config, run_dir, ended=ended)],
        "running": status is not None or any(p["alive"] for p in every),
        "ended": ended,
        "committed": committed,
        "steps": config.learner.steps,
        "deadline_s": deadline_s(config, run_dir),
        "processes": every,
        "waits": [wait._asdict() for wait in status.waits] if status is not None else [],
        "held_up": msgspec.to_builtins(status.held_up) if status is not None else None,
        "rewards": live.rewards(status.metrics) if status is not None else "",
        "link": live.describe_slow_link(
            status.metrics if status is not None else link_metrics(rows)
        ),
        "refused": health_checks.refusals(
            status.metrics if status is not None else rows[-1] if rows else {}
        ),
        "set_aside": sorted(str(path) for path in (run_dir / "set_aside").glob("*.jsonl")),
        "checkpoint": checkpoint(run_dir),
        "last_metrics": {n: rows[-1][n] for n in SHOWN if n in rows[-1]} if rows else {},
        "silent_s": time.time() - path.stat().st_mtime if rows else None,
    }


def link_metrics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest row with metrics of the generators' links, which not every step has.

    >>> link_metrics([{"step": 1, "link/ack_s": 2.0}, {"step": 2}])["step"]
    1
    """
    return next((row for row in reversed(rows) if any(n.startswith("link/") for n in row)), {})


def missing(seen: dict[str, Any]) -> list[str]:
    """Names of the stopped processes that the run needs; [] where a supervisor restarts them."""
    alive = {p["name"] for p in seen["processes"] if p["alive"]}
    enough = any(n.startswith("generator") for n in alive)  # any generator will do
    needed = [
        p["name"]
        for p in seen["processes"]
        if not p["alive"] and (p["name"] in ("buffer", "learner", "gateway-0") or not enough)
    ]
    return [] if "supervisor" in alive or seen["ended"] else needed


def advice(config: Config, run_dir: Path, seen: dict[str, Any]) -> str:
    """Advise on the next step, in one line."""
    alive = {p["name"] for p in seen["processes"] if p["alive"]}
    config_path = run_dir / "config.toml"
    lost = missing(seen)
    if seen["ended"]:
        return (
            f"the run has ended: {run_dir / 'report.html'}, {run_dir / 'model'}; train on with "
            f"`asyncrl run --resume {run_dir} --set learner.steps=N`"
        )
    if "supervisor" in alive:
        return (
            "a supervisor is running: it restarts processes that fail, and ends the run when that "
            "does not help"
        )
    if alive and lost:
        start = [
            f"asyncrl {n.partition('-')[0]} {config_path} --run-dir {run_dir}"
            + (f" --index {n[10:]}" if n[10:] else "")
            for n in lost
        ]
        return "the run waits for a process that is not running; start it: " + "; ".join(start)
    if alive:
        return "all processes are running: the run is starting, or one of them hangs"
    return (
        f"no process of it is running; `asyncrl run --resume {run_dir}` continues from the last "
        f"checkpoint, `asyncrl report {run_dir}` shows the run up to now"
    )


def describe_refusals(seen: dict[str, Any]) -> list[str]:
    """List what the buffer refused: messages, one line per reason, and excluded batches.

    >>> seen = {"refused": {"number": 2, "token": 1}, "set_aside": ["R/set_aside/batch_3.jsonl"]}
    >>> print(*describe_refusals(seen), sep="\\n")
    refused: 2 samples with an impossible reward, part, log-probability or temperature
    refused: 1 samples with tokens that the model does not have
    excluded, as the learner repeatedly failed on it: R/set_aside/batch_3.jsonl
    """
    return [f"refused: {count} {REFUSALS[reason]}" for reason, count in seen["refused"].items()] + [
        f"excluded, as the learner repeatedly failed on it: {path}" for path in seen["set_aside"]
    ]


def lines(config: Config, run_dir: Path, seen: dict[str, Any]) -> list[str]:
    """Describe a run whose buffer does not answer, for a reader."""
    text = [
        *seen["advice"],
        f"step {seen['committed']}/{seen['steps']}"
        + "".join(f"  {n} {x:.3g}" for n, x in seen["last_metrics"].items()),
    ]
    if seen["silent_s"] is not None and not seen["ended"]:
        text[-1] += f"  (the last one {seen['silent_s']:.0f} s ago)"
    for process in seen["processes"]:
        text.append(process["said"])
        error = process["last_line"].removeprefix("error: ")
        if error and not seen["ended"] and not any(error in line for line in text):
            text.append(f"    {process['log']}: {process['last_line']}")
    if seen["checkpoint"] is not None and not seen["ended"]:
        text.append(
            f"newest checkpoint: version {seen['checkpoint']['version']}, "
            f"{seen['checkpoint']['path']}"
        )
    link = [seen["link"]] if seen["link"] else []
    return [*text, *link, *describe_refusals(seen), advice(config, run_dir, seen)]
