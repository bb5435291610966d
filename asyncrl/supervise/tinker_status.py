"""The state of a server of the Tinker API, from its files, for `asyncrl doctor` and `watch`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import health_checks, jsonl, metrics, process_log
from asyncrl.supervise.doctor import last_line

RULES = (
    health_checks.growing_mismatch,
    health_checks.engine_mismatch,
    health_checks.truncated_sampling,
)
ADVICE = "sample for training at temperature 1, with top_p = 1 and without top_k"
CONFIG = "tinker.toml"
MODEL = "model.json"
LEDGER = "ledger.json"
SERVER = "server"
PROCESSES = (SERVER, "training", "sampling")


def is_server(path: Path) -> bool:
    """Return whether `path` is the directory of a server."""
    return (path / CONFIG).exists()


def is_model(path: Path) -> bool:
    """Return whether `path` is the directory of one of a server's models."""
    return (path / MODEL).exists()


def is_running(folder: Path) -> bool:
    """Return whether a server has the directory open."""
    return process_log.is_alive(folder, SERVER)


class LagTotals(NamedTuple):
    """The lags of a model's trained tokens; lags: {lag: tokens}."""

    lags: Counter[int]
    unknown: int
    steps: int

    @property
    def known_tokens(self) -> int:
        return sum(self.lags.values())

    @property
    def mean(self) -> float:
        return sum(lag * tokens for lag, tokens in self.lags.items()) / max(self.known_tokens, 1)


def lag_totals(model: Path) -> LagTotals:
    """Add up the lags of a model's optimizer steps."""
    lags: Counter[int] = Counter()
    unknown = 0
    rows = jsonl.read(model / "trained.jsonl")
    for row in rows:
        lags.update({int(lag): tokens for lag, tokens in row["lags"].items()})
        unknown += row["unknown"]
    return LagTotals(lags, unknown, rows[-1]["batch"] + 1 if rows else 0)


def model_record(model: Path) -> dict[str, Any]:
    """Return what a model was created from.  Raises ConfigError."""
    try:
        return dict(json.loads((model / MODEL).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model / MODEL}: {error}") from None


def read_ledger(model: Path) -> dict[str, int]:
    """Return how often a model's sequences were trained; {} before the first one."""
    try:
        return dict(json.loads((model / LEDGER).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def processes(server: Path) -> list[dict[str, Any]]:
    """Describe the processes of a server, as `doctor.processes` does those of a run."""
    running = is_running(server)
    newest = process_log.latest_events(server)
    described = []
    for name in PROCESSES:
        row = newest.get(name)
        # a server sees how its workers end, and none outlives it
        alive = running and row is not None and row["event"] == "began"
        if row is None:
            state = f"{name} has not been started"
        else:
            ended = process_log.end_of(row)
            state = f"{name} is running (process {row['pid']})" if alive else ended
        log = server / "logs" / f"{name}.log"
        described.append(
            {
                "name": name,
                "alive": alive,
                "known": row is not None,
                "said": state,
                "code": None if alive or row is None else row.get("code"),
                "log": str(log) if log.exists() else "",
                "last_line": last_line(log),
            }
        )
    return described


def examine(path: Path) -> dict[str, Any]:
    """Describe a server or one of its models.  Raises ConfigError."""
    one = (path / MODEL).exists()
    folders = [path] if one else sorted(note.parent for note in path.glob(f"*/{MODEL}"))
    server = path.resolve().parent if one else path
    if not is_server(server):
        raise ConfigError(f"{path}: no directory of asyncrl tinker (it has no {CONFIG})")
    address = server / "url"
    running = is_running(server)
    return {
        "running": running,
        "url": address.read_text(encoding="utf-8").strip() if running and address.exists() else "",
        "processes": processes(server),
        "models": [_model(folder) for folder in folders],
    }


def _model(folder: Path) -> dict[str, Any]:
    record = model_record(folder)
    totals = lag_totals(folder)
    return {
        "model": record["model"],
        "version": totals.steps or record.get("version", 0),
        "lag_mean": totals.mean,
        "lag_max": max(totals.lags, default=0),
        "trained_tokens": totals.known_tokens + totals.unknown,
        "unknown_tokens": totals.unknown,
        "ledger": read_ledger(folder),
        "findings": [f"{finding.said}; {ADVICE}" for finding in findings(folder)],
    }


def findings(model: Path) -> list[health_checks.HealthFinding]:
    """Return what the health checks find in a model's metrics.

    Only those that compare sampler and training apply: rewards are the client's."""
    rows = metrics.read(model)
    about = health_checks.RunFacts(load.load(model / "config.toml"))
    results = [rule(rows, about) for rule in RULES]
    return [finding for finding in results if finding is not None]


def lines(seen: dict[str, Any]) -> list[str]:
    """Describe the state for a reader."""
    where = f" at {seen['url']}" if seen["url"] else ""
    text = [f"the server is running{where}" if seen["running"] else "the server is not running"]
    for process in seen["processes"]:
        last = f"; last line of its log: {process['last_line']}" if process["last_line"] else ""
        text.append(f"  {process['said']}{last}")
    if not seen["models"]:
        text.append("no model yet: a training client creates one")
    for model in seen["models"]:
        text.append(
            f"{model['model']}: version {model['version']}, lag mean {model['lag_mean']:.3g} and "
            f"max {model['lag_max']} of {model['trained_tokens']} trained tokens, "
            f"{model['unknown_tokens']} of unknown lag"
        )
        if model["ledger"]:
            text.append(
                "  sequences: {sampled} sampled = {never_trained} never trained + {trained_once} "
                "once + {trained_again} more often".format(**model["ledger"])
            )
        text += [f"  health check: {finding}" for finding in model["findings"]]
    return text
