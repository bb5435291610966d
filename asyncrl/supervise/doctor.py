"""The state of a run for `asyncrl doctor RUN_DIR`, from its buffer or its files."""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from asyncrl.config.tree import Config
from asyncrl.contract.errors import REFUSALS
from asyncrl.contract.messages import RunStatus
from asyncrl.contract.printable import LONGEST_LINE, escape_line
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.contract.waits import ProgressWatchdog
from asyncrl.records import health_checks, metrics, process_log, rundir
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise import live
from asyncrl.supervise.hosts import find_last_words, read_last_lines
from asyncrl.supervise.report.advice import list_advice

STATE: str = read_table(__file__)["state"]
SHOWN = ("reward/mean", "eval/heldout", "lag/mean", "optim/grad_norm")


def describe_process(name: str, event: JsonObject, pid: object, log: Path | None) -> JsonObject:
    """Describe whether a process runs, how it ended, and the last line of its log.

    event: its latest, or {}. pid: its process id, or None if it does not run. log: None without
    one."""
    if pid is not None:
        state = f"{name} is running (process {pid})"
    else:
        state = process_log.describe_end(event) if event else f"{name} has not been started"
    has_log = log is not None and log.exists()
    return {
        "name": name,
        "alive": pid is not None,
        "known": bool(event),
        "said": state,
        "code": None if pid is not None else event.get("code"),
        "log": str(log) if has_log else "",
        # the last one that it wrote about itself
        "last_line": escape_line(find_last_words(read_last_lines(log, 100))) if log else "",
    }


def describe_processes(
    config: Config, run_dir: Path, peers: Iterable[str] = ()
) -> list[JsonObject]:
    """Describe every process that the run has, had or should have.

    peers: names that are connected to the buffer, perhaps from another machine."""
    events = process_log.read_latest_events(run_dir)
    logs = [*rundir.list_numbered(run_dir / "logs", r"attempt_(\d+)").values()]
    started = {name for name in (*events, *peers) if name.startswith("generator-")}
    numbered = (f"generator-{i}" for i in range(config.generators + len(started)))
    generators = [*dict.fromkeys((*started, *numbered))][: max(len(started), config.generators)]
    names = ["buffer", "learner", *sorted(generators, key=lambda name: (len(name), name))]
    names += ["gateway-0"] if config.uses_sessions else []
    names += sorted(
        {*events, *(["supervisor"] if process_log.is_alive(run_dir, "supervisor") else [])}
        - {*names}
    )
    described = []
    for name in names:
        event, pid = events.get(name, {}), None
        if process_log.is_alive(run_dir, name):
            pid = process_log.get_lock(run_dir, name).read_text(encoding="utf-8").strip()
        own_log = logs and event.get("supervised") is not False
        process = describe_process(name, event, pid, logs[-1] / f"{name}.log" if own_log else None)
        described.append(process | {"connected": not event and name in peers})
    return described


def find_checkpoint(run_dir: Path) -> JsonObject | None:
    """Return version and path of the newest checkpoint without reading it, or None."""
    epochs = rundir.list_numbered(run_dir / "checkpoints", r"epoch_(\d+)")
    for directory in reversed(epochs.values()):
        for version, path in reversed(rundir.list_numbered(directory, r"number_(\d+)").items()):
            return {"version": version, "path": str(path)}
    return None


def examine_run(config: Config, run_dir: Path, status: RunStatus | None) -> JsonObject:
    """Collect the run's state as `asyncrl doctor --json` prints it.

    advice: what limited the speed, whether staleness hurt, which health checks fired.
    running: at least one of its processes runs.  ended: all its steps are done."""
    rows = [r for r in metrics.read(run_dir) if "reward/mean" in r]
    process_states = describe_processes(config, run_dir, status.peers if status else ())
    # a buffer knows the number of steps from its learner's hello on
    committed = rows[-1]["step"] + 1 if rows else 0
    if status is not None and "learner" in status.peers:
        committed = status.committed
    settings = config.watchdog
    watchdog = ProgressWatchdog(settings.multiple, settings.floor_s, settings.startup_s)
    for count, row in enumerate(rows, 1):
        watchdog.observe(count, count, row["t"])
    path = run_dir / "metrics.jsonl"
    last = rows[-1] if rows else {}
    # not every step measures links
    newest = next((row for row in reversed(rows) if any(n.startswith("link/") for n in row)), {})
    ended = status is None and rundir.is_finished(run_dir, config.learner.steps)
    return {
        "advice": [
            finding.said + finding.remedy
            for findings in list_advice(config, run_dir, ended=ended)
            for finding in findings
        ],
        "running": status is not None or any(p["alive"] for p in process_states),
        "ended": ended,
        "committed": committed,
        "steps": config.learner.steps,
        "deadline_s": watchdog.deadline,
        "processes": process_states,
        "waits": [wait._asdict() for wait in status.waits] if status else [],
        "held_up": msgspec.to_builtins(status.held_up) if status else None,
        "rewards": live.describe("rewards", status.metrics) if status else "",
        "link": live.describe("link", status.metrics if status else newest),
        "refused": health_checks.count_refusals(status.metrics if status else last),
        "set_aside": sorted(str(path) for path in (run_dir / "set_aside").glob("*.jsonl")),
        "checkpoint": find_checkpoint(run_dir),
        "last_metrics": {n: last[n] for n in SHOWN if n in last},
        "silent_s": time.time() - path.stat().st_mtime if rows else None,
    }


def list_missing(state: JsonObject) -> list[str]:
    """List the stopped processes that the run needs; [] if a supervisor restarts them."""
    running = {p["name"] for p in state["processes"] if p["alive"] or p["connected"]}
    has_generator = any(n.startswith("generator") for n in running)  # any generator will do
    stopped = [
        p["name"]
        for p in state["processes"]
        if p["name"] not in running
        and (p["name"] in ("buffer", "learner", "gateway-0") or not has_generator)
    ]
    return [] if "supervisor" in running or state["ended"] else stopped


def format_state(config: Config, run_dir: Path, status: RunStatus | None, state: JsonObject) -> str:
    """Format the state as text.  status: that of a buffer that replies."""
    line = ""
    if status is not None:
        line = live.format_status(replace(status, committed=state["committed"]))
    text = fill(
        STATE,
        **state,
        alive={p["name"] for p in state["processes"] if p["alive"]},
        missing=list_missing(state),
        run_dir=run_dir,
        status=status,
        line=line,
        watchdog=config.watchdog,
        reasons=REFUSALS,
        escape=escape_line,
        longest=LONGEST_LINE,
    )
    return text.strip("\n")
