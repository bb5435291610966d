"""The state of a Tinker API server from its files, for `asyncrl doctor` and `watch`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import health_checks, jsonl, metrics, process_log
from asyncrl.supervise.doctor import read_last_line

RULES = (
    health_checks.check_growing_mismatch,
    health_checks.check_engine_mismatch,
    health_checks.check_truncated_sampling,
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
    """Return whether a server runs in the directory."""
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


def sum_lags(model: Path) -> LagTotals:
    """Add up the lags of a model's optimizer steps."""
    lags: Counter[int] = Counter()
    unknown = 0
    rows = jsonl.read(model / "trained.jsonl")
    for row in rows:
        lags.update({int(lag): tokens for lag, tokens in row["lags"].items()})
        unknown += row["unknown"]
    return LagTotals(lags, unknown, rows[-1]["batch"] + 1 if rows else 0)


def read_model_record(model: Path) -> dict[str, Any]:
    """Read the record of a model's creation.  Raises ConfigError."""
    try:
        return dict(json.loads((model / MODEL).read_bytes()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model / MODEL}: {error}") from None


def read_ledger(model: Path) -> dict[str, int]:
    """Read how often a model's sequences were trained; {} before the first sequence."""
    return jsonl.read_object(model / LEDGER)


def describe_processes(server: Path) -> list[dict[str, Any]]:
    """Describe the processes of a server like `doctor.describe_processes`."""
    server_runs = is_running(server)
    events = process_log.read_latest_events(server)
    described = []
    for name in PROCESSES:
        event = events.get(name)
        # a server records how its workers end, and they do not outlive it
        process_runs = server_runs and event is not None and event["event"] == "began"
        if event is None:
            state = f"{name} has not been started"
        else:
            end_text = process_log.describe_end(event)
            state = f"{name} is running (process {event['pid']})" if process_runs else end_text
        log = server / "logs" / f"{name}.log"
        described.append(
            {
                "name": name,
                "alive": process_runs,
                "known": event is not None,
                "said": state,
                "code": None if process_runs or event is None else event.get("code"),
                "log": str(log) if log.exists() else "",
                "last_line": read_last_line(log),
            }
        )
    return described


def examine(path: Path) -> dict[str, Any]:
    """Describe a server or one of its models.  Raises ConfigError."""
    is_one_model = (path / MODEL).exists()
    folders = [path] if is_one_model else sorted(note.parent for note in path.glob(f"*/{MODEL}"))
    server = path.resolve().parent if is_one_model else path
    if not is_server(server):
        raise ConfigError(f"{path}: not a directory of asyncrl tinker (it has no {CONFIG})")
    address = server / "url"
    server_runs = is_running(server)
    return {
        "running": server_runs,
        "url": address.read_text(encoding="utf-8").strip()
        if server_runs and address.exists()
        else "",
        "processes": describe_processes(server),
        "models": [_describe_model(folder) for folder in folders],
    }


def _describe_model(folder: Path) -> dict[str, Any]:
    record = read_model_record(folder)
    totals = sum_lags(folder)
    ledger = read_ledger(folder)
    return {
        "model": record["model"],
        "version": totals.steps or record.get("version", 0),
        "lag_mean": totals.mean,
        "lag_max": max(totals.lags, default=0),
        "trained_tokens": totals.known_tokens + totals.unknown,
        "unknown_tokens": totals.unknown,
        "supervised_tokens": ledger.get("supervised_tokens", 0),
        "ledger": ledger,
        "findings": [f"{finding.said}; {ADVICE}" for finding in run_health_checks(folder)],
    }


def run_health_checks(model: Path) -> list[health_checks.HealthFinding]:
    """Apply the health checks to a model's metrics.

    Only checks that compare sampling and training apply, because only the client has rewards."""
    rows = metrics.read(model)
    about = health_checks.RunFacts(load.load(model / "config.toml"))
    results = [rule(rows, about) for rule in RULES]
    return [finding for finding in results if finding is not None]


def format_lines(state: dict[str, Any]) -> list[str]:
    """Describe the state as lines of text."""
    address = f" at {state['url']}" if state["url"] else ""
    lines = [f"the server is running{address}" if state["running"] else "the server is not running"]
    for process in state["processes"]:
        last_line = (
            f"; last line of its log: {process['last_line']}" if process["last_line"] else ""
        )
        lines.append(f"  {process['said']}{last_line}")
    if not state["models"]:
        lines.append("no model yet: a training client creates one")
    for model in state["models"]:
        supervised = model["supervised_tokens"]
        lines.append(
            f"{model['model']}: version {model['version']}, lag mean {model['lag_mean']:.3g} and "
            f"max {model['lag_max']} of {model['trained_tokens']} trained tokens, "
            f"{model['unknown_tokens']} of unknown lag"
            + (f", and {supervised} supervised tokens" if supervised else "")
        )
        if model["ledger"]:
            lines.append(
                "  sequences: {sampled} sampled = {never_trained} never trained + {trained_once} "
                "once + {trained_again} more often".format(**model["ledger"])
            )
        lines += [f"  health check: {finding}" for finding in model["findings"]]
    return lines
