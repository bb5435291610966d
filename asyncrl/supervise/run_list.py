"""List the runs of a folder, one row each, for `asyncrl ls`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.records import metrics, process_log, rundir
from asyncrl.supervise import summary


def list_runs(directory: Path) -> list[dict[str, Any]]:
    """Describe each run directory in `directory`, oldest first.

    Raises ConfigError if it has none."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; give the one that the config names as `runs`"
        )
    configs = [path for path in directory.glob("*/config.toml") if _is_run(path.parent)]
    if not configs:
        is_run = _is_run(directory) and (directory / "config.toml").is_file()
        raise ConfigError(
            f"{directory} is a run itself; give the directory that it is in"
            if is_run
            else f"{directory} contains no run directory"
        )
    return [describe_run(path.parent) for path in sorted(configs, key=_sort_key)]


def _is_run(run_dir: Path) -> bool:
    return (run_dir / "run_id").is_file()


def _sort_key(config: Path) -> tuple[float, str]:
    return (config.parent / "run_id").stat().st_mtime, config.parent.name


def describe_run(run_dir: Path) -> dict[str, Any]:
    """Read a run's state, steps, newest mean reward on held-out prompts and mean lag.

    accuracy: that reward, an accuracy where rewards are 0 or 1.
    state: `running`, `finished`, `stopped` or `unreadable`.
    A value that does not exist yet is None."""
    row: dict[str, Any] = {"run": escape_line(run_dir.name), "state": "unreadable"}
    row |= dict.fromkeys(("steps", "of", "accuracy", "lag"))
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        planned = int(config["learner"]["steps"])
        buffer_summary = summary.read_buffer_summary(run_dir)
        accuracy = [r["eval/heldout"] for r in metrics.read(run_dir) if "eval/heldout" in r]
        steps, lag = buffer_summary["steps"], buffer_summary["lag"]["mean"]
    except (OSError, ValueError, KeyError, TypeError):
        return row
    if process_log.list_alive(run_dir):
        state = "running"
    else:
        state = "finished" if rundir.is_finished(run_dir, planned) else "stopped"
    return row | {
        "state": state,
        "steps": steps,
        "of": planned,
        "accuracy": accuracy[-1] if accuracy else None,
        "lag": lag if steps else None,
    }
