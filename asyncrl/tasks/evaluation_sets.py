"""The task of a run with its own evaluation sets (`evaluation.sets`).

The prompts of a set have its name as their split, by which their reward is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.config.scorers import JudgeConfig, RewardModelConfig
from asyncrl.config.tree import Config, EvaluationSetConfig, RewardConfig, TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import Task, get_task
from asyncrl.tasks.file import read_prompts
from asyncrl.tasks.mixing.mixture import config_of_part


class TaskWithSets:
    """A task whose splits are those of the run's task, and each set by its name.

    Files are read when a prompt is asked for: a generator on another machine needs none. Raises
    ConfigError for a set whose task does not exist; `size` and `prompt` raise it for a file."""

    def __init__(self, config: Config) -> None:
        self.task: Any = get_task(config.task)
        self.name: str = self.task.name
        self.columns: Mapping[Any, str] = config.task.columns
        self.sets = {one.name: one for one in config.evaluation.sets}
        self.files: dict[str, list[Prompt]] = {}
        self.tasks: dict[str, Task] = {}
        for name, one in self.sets.items():
            if one.task:
                try:
                    self.tasks[name] = get_task(TaskConfig(name=one.task, options=one.options))
                except ConfigError as error:
                    raise ConfigError(f"evaluation.sets: {name}: {error}") from error

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Return a prompt of a split or a set."""
        if split not in self.sets:
            prompt: Prompt = self.task.prompt(split, index, seed)
            return prompt
        if self.sets[split].file:
            return self._file(split)[index]
        prompt = self._source(split).prompt(self.sets[split].split, index, seed)
        return msgspec.structs.replace(prompt, split=split)

    def size(self, split: str) -> int | None:
        """Return the number of prompts; None for an endless split."""
        if split not in self.sets:
            size: int | None = self.task.size(split)
            return size
        if self.sets[split].file:
            return len(self._file(split))
        return self._source(split).size(self.sets[split].split)

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]:
        """Return the reward of the prompt's own task."""
        return self._source(prompt.split).reward(prompt, text)

    def _file(self, name: str) -> list[Prompt]:
        if name not in self.files:
            try:
                self.files[name] = read_prompts(self.sets[name].file, name, self.columns)
            except ConfigError as error:
                raise ConfigError(f"evaluation.sets: {name}: {error}") from error
        return self.files[name]

    def _source(self, split: str) -> Task:
        source: Task = self.tasks.get(split, self.task)
        return source


def task_of(config: Config) -> Any:
    """Return the task of a run, with its sets if it has any.  Raises ConfigError."""
    return TaskWithSets(config) if config.evaluation.sets else get_task(config.task)


def configs_of_rewards(config: Config) -> dict[str, Config]:
    """Return the configs of what has a reward of its own, by the split or the task of its prompts.

    These are evaluation sets and parts of a mixture, whose names differ."""
    parts = {
        part.title: msgspec.structs.replace(
            config,
            task=config_of_part(part),
            reward=_of_function(config, part.reward, part.judge, part.reward_model),
        )
        for part in config.task.mixture
        if part.has_own_reward
    }
    own = (one for one in config.evaluation.sets if scored_by_itself(one))
    return parts | {one.name: config_of_set(config, one) for one in own}


def config_of_part_alone(config: Config, title: str) -> Config:
    """Return the config of a run with one part of a mixture.

    Raises ConfigError for a part that the mixture lacks."""
    parts = {part.title: part for part in config.task.mixture}
    if title not in parts:
        labels = ", ".join(parts) or "none: the config has no mixture"
        raise ConfigError(f"--part {title or 'LABEL'}: name a part of the mixture: {labels}")
    part = parts[title]
    return msgspec.structs.replace(
        config,
        task=config_of_part(part),
        agent=config.agents.get(title, config.agent),
        reward=configs_of_rewards(config).get(title, config).reward,
    )


def _of_function(
    config: Config,
    function: str,
    judge: JudgeConfig = JudgeConfig(),
    model: RewardModelConfig = RewardModelConfig(),
) -> RewardConfig:
    return msgspec.structs.replace(config.reward, function=function, judge=judge, model=model)


def scored_by_itself(one: EvaluationSetConfig) -> bool:
    """Whether a set has another reward than the run."""
    return bool(one.task or one.reward)


def config_of_set(config: Config, one: EvaluationSetConfig) -> Config:
    """Return a config whose task and reward are those of a set that is scored by itself."""
    replace = msgspec.structs.replace
    reward = _of_function(config, one.reward)
    if one.task:
        return replace(config, task=TaskConfig(name=one.task, options=one.options), reward=reward)
    return replace(config, reward=reward)
