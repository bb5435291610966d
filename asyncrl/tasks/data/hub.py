"""Data sets of the hub, downloaded before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from asyncrl.config.tree import Config
from asyncrl.models import fetch
from asyncrl.tasks.data.row_objects import KEYS


def fetch_data_sets(config: Config, report: Callable[[str], None]) -> Config:
    """Replace every `hf://datasets/...` in `config` by the path of its files.

    Each data set is downloaded once unless the hub's cache has it, so that all processes and a
    resumed run read the same files.  Raises ConfigError."""
    local: dict[str, str] = {}

    def locate(source: str) -> str:
        if not source.startswith(fetch.DATA_SETS):
            return source
        if source not in local:
            report(f"fetching {source}")
            local[source] = fetch.download_data_set(source)
        return local[source]

    def locate_in(task: Any) -> Any:
        return replace(task, **{key: locate(getattr(task, key)) for key in KEYS})

    task = locate_in(config.task)
    task = replace(task, mixture=[locate_in(part) for part in task.mixture])
    sets = [replace(chosen, file=locate(chosen.file)) for chosen in config.evaluation.sets]
    evaluation = replace(config.evaluation, sets=sets)
    return replace(config, task=task, evaluation=evaluation) if local else config
