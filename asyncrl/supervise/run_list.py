"""The runs of a folder, a row each: what `asyncrl ls` prints."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.records import metrics, process_log, rundir
from asyncrl.supervise import summary


def list_runs(directory: Path) -> list[dict[str, Any]]:
    """A row for each run directory in `directory`, oldest first.

    Raises ConfigError where there is none."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; give the one that `runs` names in the config"
        )
    configs = [path for path in directory.glob("*/config.toml") if _is_run(path.parent)]
    if not configs:
        alone = _is_run(directory) and (directory / "config.toml").is_file()
        raise ConfigError(
            f"{directory} is a run itself; give the directory that it is in"
            if alone
            else f"{directory}: no run directory is in it"
        )
    return [describe_run(path.parent) for path in sorted(configs, key=_started)]


def _is_run(run_dir: Path) -> bool:
    return (run_dir / "run_id").is_file()


def _started(config: Path) -> tuple[float, str]:
    return (config.parent / "run_id").stat().st_mtime, config.parent.name


def describe_run(run_dir: Path) -> dict[str, Any]:
    """A run's state, steps, newest held-out accuracy and mean lag, as far as it came.

    state: `running`, `finished`, `stopped` or `unreadable`; None where a value is not there yet.
    """
    row: dict[str, Any] = {"run": escape_line(run_dir.name), "state": "unreadable"}
    row |= dict.fromkeys(("steps", "of", "accuracy", "lag"))
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        wanted = int(config["learner"]["steps"])
        left = summary.left_behind(run_dir)
        accuracy = [r["eval/heldout"] for r in metrics.read(run_dir) if "eval/heldout" in r]
        steps, lag = left["steps"], left["lag"]["mean"]
    except (OSError, ValueError, KeyError, TypeError):
        return row
    if process_log.is_alive(run_dir, "supervisor"):
        state = "running"
    else:
        state = "finished" if rundir.is_finished(run_dir, wanted) else "stopped"
    return row | {
        "state": state,
        "steps": steps,
        "of": wanted,
        "accuracy": accuracy[-1] if accuracy else None,
        "lag": lag if steps else None,
    }
