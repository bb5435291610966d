"""The prompts of an environment's own data sets, as files that the task reads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.records import atomic_write

FOLDER = ".prompts"  # in the folder of all runs
ROWS = "env"  # task.name


def with_prompt_files(config: Config) -> Config:
    """Set task.prompts and task.heldout to files with the rows of the environment's data sets.

    The files are named by their content, so that a resumed run has the rows with which it began.
    A config whose task has files already, or has no rows of an environment, is returned as it is.
    Raises ConfigError."""
    if config.task.name != ROWS or config.task.prompts:
        return config
    with tempfile.TemporaryDirectory() as temporary:
        counts = examine(config, Path(temporary))
        if not counts.get("train"):
            raise ConfigError(f"agent.env = {config.agent.env}: it has no training data set")
        kept = {
            split: keep(Path(temporary) / f"{split}.jsonl", Path(config.runs) / FOLDER)
            for split, count in counts.items()
            if count
        }
    task = msgspec.structs.replace(
        config.task, prompts=kept["train"], heldout=config.task.heldout or kept.get("eval", "")
    )
    return msgspec.structs.replace(config, task=task)


def examine(config: Config, folder: Path) -> dict[str, Any]:
    """Run the program `examine` in agent.python; return the rows of each split.

    Raises ConfigError with the environment's own error."""
    agent = config.agent
    words = (agent.env, json.dumps(agent.args), str(folder))
    argv = importing.command("actors.gateway.hubs.examine", *words, python=agent.python)
    try:
        ended = subprocess.run(
            argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise ConfigError(
            f"agent.python: {agent.python} cannot be started: {error.strerror}; give the path of a "
            "Python of 3.11 or newer"
        ) from error
    try:
        found: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        reason = escape_line(lines[-1] if lines else f"exit code {ended.returncode}")
        raise ConfigError(f"agent.env = {agent.env}: its process ended: {reason}") from None
    if why := found.pop("error", ""):
        raise ConfigError(why)
    return found


def keep(file: Path, folder: Path) -> str:
    """Copy a file into `folder` under the name of its content; return the new path."""
    content = file.read_text(encoding="utf-8")
    kept = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.jsonl"
    if not kept.exists():
        atomic_write.directory(folder, 0o700)
        with atomic_write.replacing(kept, part=kept.with_suffix(f".{os.getpid()}")) as part:
            part.write_text(content, encoding="utf-8")
    return str(kept)
