"""The task of a run with its own evaluation sets (`evaluation.sets`).

The prompts of a set have its name as their split, which selects their reward."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.config.tree import (
    Config,
    JudgeConfig,
    RewardConfig,
    RewardModelConfig,
    TaskConfig,
)
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers, Prompt
from asyncrl.records import atomic_write
from asyncrl.records.jsonl import read_object
from asyncrl.tasks import Task, get_task
from asyncrl.tasks.data.rows import find_files
from asyncrl.tasks.file import read_prompts
from asyncrl.tasks.mixture import resolve_part_task


class TaskWithSets:
    """A task whose splits are those of the run's task and the names of the sets.

    A file is read at the first request for its prompts, so a generator on another machine does not
    need it. Raises ConfigError for a set whose task does not exist; `size` and `prompt` raise it
    for a file."""

    def __init__(self, config: Config) -> None:
        self.task: Task = get_task(config.task)
        self.name = self.task.name
        self.columns: Mapping[Any, str] = config.task.columns
        self.sets = {
            evaluation_set.name: evaluation_set for evaluation_set in config.evaluation.sets
        }
        self.files: dict[str, list[Prompt]] = {}
        self.tasks: dict[str, Task] = {}
        for name, evaluation_set in self.sets.items():
            if evaluation_set.task:
                try:
                    self.tasks[name] = get_task(
                        TaskConfig(name=evaluation_set.task, options=evaluation_set.options)
                    )
                except ConfigError as error:
                    raise ConfigError(f"evaluation.sets: {name}: {error}") from error

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Return a prompt of a split or a set."""
        if split not in self.sets:
            return self.task.prompt(split, index, seed)
        if self.sets[split].file:
            return self._read_file(split)[index]
        prompt = self._find_task(split).prompt(self.sets[split].split, index, seed)
        return replace(prompt, split=split)

    def size(self, split: str) -> int | None:
        """Return the number of prompts; None for an endless split."""
        if split not in self.sets:
            return self.task.size(split)
        if self.sets[split].file:
            return len(self._read_file(split))
        return self._find_task(split).size(self.sets[split].split)

    def reward(self, prompt: Prompt, text: str) -> float | Numbers:
        """Return the reward of the prompt's own task."""
        return self._find_task(prompt.split).reward(prompt, text)

    def _read_file(self, name: str) -> list[Prompt]:
        if name not in self.files:
            try:
                self.files[name] = read_prompts(self.sets[name].file, name, self.columns)
            except ConfigError as error:
                raise ConfigError(f"evaluation.sets: {name}: {error}") from error
        return self.files[name]

    def _find_task(self, split: str) -> Task:
        return self.tasks.get(split, self.task)


def check_prompt_files(config: Config, run_dir: Path) -> None:
    """Record the digests of a run's prompt files at its start.

    Raises ConfigError if a file has changed since: the run would go on in the middle of an order of
    other prompts."""
    tasks = [config.task, *config.task.mixture]
    paths = [path for task in tasks for path in (task.prompts, task.heldout, task.ood)]
    record = run_dir / "prompts.json"
    digests = read_object(record)
    for path in filter(None, [*paths, *(chosen.file for chosen in config.evaluation.sets)]):
        content = b"".join(file.read_bytes() for file in find_files(path) or ())
        digest = hashlib.sha256(content).hexdigest()
        if digests.setdefault(path, digest) != digest:
            raise ConfigError(
                f"{path}: has changed since the run began (SHA-256 {digests[path][:12]}, now "
                f"{digest[:12]}): restore it, or start a new run; without {record} the run "
                "continues in the middle of the new order"
            )
    atomic_write.write(record, json.dumps(digests))


def build_task(config: Config) -> Any:
    """Build the task of a run, with its evaluation sets if it has any.  Raises ConfigError."""
    return TaskWithSets(config) if config.evaluation.sets else get_task(config.task)


def resolve_reward_configs(config: Config) -> dict[str, Config]:
    """Return the configs of evaluation sets and parts of a mixture with their own reward.

    The key is the split or the task of their prompts; the names differ."""
    parts = {
        part.title: replace(
            config,
            task=resolve_part_task(part),
            reward=_replace_reward(config, part.reward, part.judge, part.reward_model),
        )
        for part in config.task.mixture
        if part.has_own_reward
    }
    for chosen in (entry for entry in config.evaluation.sets if entry.task or entry.reward):
        task = TaskConfig(name=chosen.task, options=chosen.options) if chosen.task else config.task
        reward = _replace_reward(config, chosen.reward)
        parts[chosen.name] = replace(config, task=task, reward=reward)
    return parts


def resolve_part_config(config: Config, title: str) -> Config:
    """Return the config of a run with only one part of a mixture.

    Raises ConfigError for a part that the mixture does not have."""
    parts = {part.title: part for part in config.task.mixture}
    if title not in parts:
        labels = ", ".join(parts) or "none: the config has no mixture"
        raise ConfigError(f"--part {title or 'LABEL'}: name a part of the mixture: {labels}")
    part = parts[title]
    return replace(
        config,
        task=resolve_part_task(part),
        agent=config.agents.get(title, config.agent),
        reward=resolve_reward_configs(config).get(title, config).reward,
    )


def _replace_reward(
    config: Config,
    function: str,
    judge: JudgeConfig = JudgeConfig(),
    model: RewardModelConfig = RewardModelConfig(),
) -> RewardConfig:
    return replace(
        config.reward, function=function, functions=[], weights=[], judge=judge, model=model
    )
