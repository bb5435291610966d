"""Several tasks as one: every prompt knows its task, which gives its reward."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import msgspec

from asyncrl.config.tree import MixedTaskConfig, TaskConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks.file import FileTask
from asyncrl.tasks.mixing.shares import next_task, weights_at
from asyncrl.tasks.pictures.count import CountTask


def config_of_part(part: MixedTaskConfig) -> TaskConfig:
    """Return the section `task` of a run with this part alone."""
    shared = {
        name: getattr(part, name) for name in TaskConfig.__struct_fields__ if name != "mixture"
    }
    return TaskConfig(**shared)


class MixtureTask:
    """The tasks of `task.mixture`, by their titles.

    The buffer draws training prompts itself (`draw`), by what was trained. `prompt` gives the
    stream of the first weights, for a look at the prompts. Fixed splits take turns: each task has
    the same number of prompts until one has no more. Raises ConfigError, which names the part."""

    name = "mixture"

    def __init__(self, config: TaskConfig, make: Any) -> None:
        self.parts = {part.title: part for part in config.mixture}
        self.tasks: dict[str, Any] = {}
        for title, part in self.parts.items():
            try:
                self.tasks[title] = make(config_of_part(part))
            except ConfigError as error:
                raise ConfigError(f"task.mixture: {title}: {error}") from error
        self._credit: dict[str, float] = {}
        self._stream: list[tuple[str, int]] = []  # (task, index) of the first weights' draws
        self._fixed = cache(self._fixed_order)

    def draw(self, title: str, index: int, seed: int) -> Prompt:
        """Return a training prompt of one task."""
        return self._prompt_of("train", title, index, seed)

    def length(self, title: str) -> int | None:
        """Training prompts of a task; None: they are generated and never repeat."""
        task = self.tasks[title]
        return len(task.sets["train"]) if isinstance(task, FileTask) else None

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        if split != "train":
            order = self._fixed(split)
            return self._prompt_of(split, *order[index % len(order)], seed)
        weights = weights_at(self.parts, 0)
        while len(self._stream) <= index:
            title = next_task(self._credit, weights)
            self._stream.append((title, sum(known == title for known, _ in self._stream)))
        return self._prompt_of(split, *self._stream[index], seed)

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(self._fixed(split))

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]:
        reward: float | dict[str, float] = self.tasks[prompt.task].reward(prompt, text)
        return reward

    def _prompt_of(self, split: str, title: str, index: int, seed: int) -> Prompt:
        prompt: Prompt = self.tasks[title].prompt(split, index, seed)
        return msgspec.structs.replace(prompt, task=title)

    def _fixed_order(self, split: str) -> list[tuple[str, int]]:
        rounds = itertools.zip_longest(
            *(
                [(title, index) for index in range(task.size(split) or 0)]
                for title, task in self.tasks.items()
            )
        )
        return [each for turn in rounds for each in turn if each is not None]

    # ---- the warm start of a tiny model ----------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps of a warm start: those of all tasks."""
        return sum(task.steps for task in self.tasks.values())

    @property
    def symbols(self) -> str:
        """Every character of the tasks."""
        return "".join(sorted(set().union(*(task.symbols for task in self.tasks.values()))))

    def demonstrations(self, number: int, seed: int) -> list[tuple[str, str]]:
        """Return `number` pairs (prompt, answer), of each task in turn.

        Raises ConfigError for a task with images."""
        seeing = [name for name, task in self.tasks.items() if isinstance(task, CountTask)]
        if seeing:
            raise ConfigError(
                f"model.warm_start: cannot build a tiny model for a mixture with the images of "
                f"{seeing[0]}; point model.path at a LLaVA of your own"
            )
        each = -(-number // len(self.tasks))
        of_tasks = [task.demonstrations(each, seed) for task in self.tasks.values()]
        return [pair for turn in zip(*of_tasks, strict=True) for pair in turn][:number]


def mixture_of(task: Any) -> MixtureTask | None:
    """Return the mixture in a run's task, which may have evaluation sets around it."""
    inner = getattr(task, "task", task)
    return inner if isinstance(inner, MixtureTask) else None
