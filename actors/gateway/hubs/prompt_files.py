"""The prompts of an environment's own data sets, as files that the task reads."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from asyncrl.config.agents import AgentConfig
from asyncrl.config.tree import Config, TaskSource
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.tasks.data.row_objects import FOLDER, write_content

ROWS = "env"  # task.name

Task = TypeVar("Task", bound=TaskSource)


def write_prompt_files(config: Config) -> Config:
    """Write the rows of the environment's data sets, and set the task's files to them.

    The files are task.prompts and task.heldout. They are named by their content, so that a resumed
    run has the rows with which it began. A task that has files already, or has no rows of an
    environment, stays unchanged. Raises ConfigError.
    """
    folder = Path(config.runs) / FOLDER
    if config.task.name == ROWS and not config.task.prompts:
        task = write_task_files(config.task, config.agent, folder)
        return replace(config, task=task)
    agents = config.agents
    parts = [
        write_task_files(part, agents.get(part.title, config.agent), folder)
        if part.name == ROWS and not part.prompts
        else part
        for part in config.task.mixture
    ]
    if parts == config.task.mixture:
        return config
    task = replace(config.task, mixture=parts)
    return replace(config, task=task)


def write_task_files(task: Task, agent: AgentConfig, folder: Path) -> Task:
    """Set the files of a task, or part of a mixture, to its environment's rows."""
    with tempfile.TemporaryDirectory() as temporary:
        counts = examine(agent, Path(temporary))
        if not counts.get("train"):
            raise ConfigError(f"agent.env = {agent.env}: it has no training data set")
        files = {
            split: write_content((Path(temporary) / f"{split}.jsonl").read_text("utf-8"), folder)
            for split, count in counts.items()
            if count
        }
    heldout = task.heldout or files.get("eval", "")
    return replace(task, prompts=files["train"], heldout=heldout)


def examine(agent: AgentConfig, folder: Path) -> dict[str, Any]:
    """Run the program `examine` in agent.python; return the rows of each split.

    Raises ConfigError with the environment's error.
    """
    arguments = (agent.env, json.dumps(agent.args), str(folder))
    argv = importing.make_command("actors.gateway.hubs.examine", *arguments, python=agent.python)
    try:
        process = subprocess.run(
            argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise ConfigError(
            f"agent.python: {agent.python} cannot be started: {error.strerror}; give the path of a "
            "Python of 3.11 or newer"
        ) from error
    try:
        counts: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        reason = escape_line(lines[-1] if lines else f"exit code {process.returncode}")
        raise ConfigError(f"agent.env = {agent.env}: its process ended: {reason}") from None
    if error_text := counts.pop("error", ""):
        raise ConfigError(error_text)
    return counts
