"""The state of a server's models, from its files, for `asyncrl doctor`."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.records import health_checks, jsonl, metrics
from asyncrl.tinker.model_records import ModelRecord

RULES = (
    health_checks.growing_mismatch,
    health_checks.engine_mismatch,
    health_checks.truncated_sampling,
)
ADVICE = "sample for training at temperature 1, with top_p = 1 and without top_k"
CONFIG = "tinker.toml"
MODEL = "model.json"


def is_tinker_directory(path: Path) -> bool:
    """Return whether `path` is the directory of a server, or of one of its models."""
    return (path / CONFIG).exists() or (path / MODEL).exists()


def is_running(folder: Path) -> bool:
    """Return whether a server has the directory open."""
    with contextlib.suppress(OSError), (folder / ".tinker.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def examine(path: Path) -> dict[str, Any]:
    """Describe a server or one of its models.  Raises ConfigError."""
    one = (path / MODEL).exists()
    folders = [path] if one else sorted(note.parent for note in path.glob(f"*/{MODEL}"))
    server = path.resolve().parent if one else path
    if not (server / CONFIG).exists():
        raise ConfigError(f"{path}: no directory of asyncrl tinker (it has no {CONFIG})")
    return {"running": is_running(server), "models": [_model(folder) for folder in folders]}


def _model(folder: Path) -> dict[str, Any]:
    record = msgspec.json.decode((folder / MODEL).read_bytes(), type=ModelRecord)
    lags: Counter[int] = Counter()
    unknown = 0
    rows = jsonl.read(folder / "trained.jsonl")
    for row in rows:
        lags.update({int(lag): tokens for lag, tokens in row["lags"].items()})
        unknown += row["unknown"]
    ledger = folder / "ledger.json"
    total = sum(lags.values())
    return {
        "model": record.model,
        "version": rows[-1]["batch"] + 1 if rows else record.version,
        "lag_mean": sum(lag * tokens for lag, tokens in lags.items()) / max(total, 1),
        "lag_max": max(lags, default=0),
        "trained_tokens": total + unknown,
        "unknown_tokens": unknown,
        "ledger": json.loads(ledger.read_text(encoding="utf-8")) if ledger.exists() else {},
        "findings": _findings(folder),
    }


def _findings(folder: Path) -> list[str]:
    """Return what the health checks find in a model's metrics.

    Only those that compare sampler and training apply: rewards are the client's."""
    rows = metrics.read(folder)
    about = health_checks.RunFacts(load.load(folder / "config.toml"))
    found = [rule(rows, about) for rule in RULES]
    return [f"{finding.said}; {ADVICE}" for finding in found if finding is not None]


def lines(seen: dict[str, Any]) -> list[str]:
    """Describe the state for a reader."""
    text = ["the server is running" if seen["running"] else "the server is not running"]
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
