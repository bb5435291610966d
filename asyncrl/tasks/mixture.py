"""Several tasks as one: every prompt names its task, which computes its reward."""

import itertools
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from asyncrl.config.tree import MixedTaskConfig, TaskConfig, interpolate_weight
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers, Prompt
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks.file import FileTask
from asyncrl.tasks.pictures.count import CountTask
from asyncrl.tasks.synthetic import Demonstrations


def compute_weights(parts: Mapping[str, MixedTaskConfig], batch: float) -> Numbers:
    """Return the nonzero weights of the parts at a batch."""
    weights = {name: interpolate_weight(part.weight, batch) for name, part in parts.items()}
    return {name: weight for name, weight in weights.items() if weight > 0}


def choose_task(credit: Numbers, weights: Mapping[str, float]) -> str:
    """Choose the next task and update `credit`, the groups that each task is short of.

    This is smooth weighted round robin: every call adds its share to each task's credit, and the
    task with the most credit is chosen and charged one group. Each prefix has the shares of the
    weights, to within about one group per task.

    >>> credit = {}
    >>> "".join(choose_task(credit, {"a": 2.0, "b": 1.0}) for _ in range(9))
    'abaabaaba'
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        credit[name] = credit.get(name, 0.0) + weight / total
    next_task = max(weights, key=credit.__getitem__)
    credit[next_task] -= 1.0
    return next_task


def resolve_part_task(part: MixedTaskConfig) -> TaskConfig:
    """Return the section `task` of a run with only this part."""
    values = {
        name: getattr(part, name) for name in TaskConfig.__struct_fields__ if name != "mixture"
    }
    return TaskConfig(**values)


class MixtureTask:
    """The tasks of `task.mixture`, by their titles.

    The buffer samples training prompts with `build_prompt`, by the tasks trained so far. `prompt`
    returns the stream of the first weights, to show prompts. Fixed splits alternate between the
    tasks until one has no prompts left. Raises ConfigError that names the part."""

    name = "mixture"

    def __init__(self, config: TaskConfig, make: Any) -> None:
        self.parts = {part.title: part for part in config.mixture}
        self.tasks: JsonObject = {}
        for title, part in self.parts.items():
            try:
                self.tasks[title] = make(resolve_part_task(part))
            except ConfigError as error:
                raise ConfigError(f"task.mixture: {title}: {error}") from error
        self._credit: Numbers = {}
        self._stream: list[tuple[str, int]] = []  # (task, index) by the first weights
        self._fixed = cache(self._order_fixed)

    def count_prompts(self, title: str) -> int | None:
        """Return the number of training prompts of a task; None: generated without repetition."""
        task = self.tasks[title]
        return len(task.sets["train"]) if isinstance(task, FileTask) else None

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        if split != "train":
            order = self._fixed(split)
            return self.build_prompt(split, *order[index % len(order)], seed)
        weights = compute_weights(self.parts, 0)
        while len(self._stream) <= index:
            title = choose_task(self._credit, weights)
            self._stream.append((title, sum(other == title for other, _ in self._stream)))
        return self.build_prompt(split, *self._stream[index], seed)

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(self._fixed(split))

    def reward(self, prompt: Prompt, text: str) -> float | Numbers:
        reward: float | Numbers = self.tasks[prompt.task].reward(prompt, text)
        return reward

    def build_prompt(self, split: str, title: str, index: int, seed: int) -> Prompt:
        """Return a prompt of one task."""
        prompt: Prompt = self.tasks[title].prompt(split, index, seed)
        return msgspec.structs.replace(prompt, task=title)

    def _order_fixed(self, split: str) -> list[tuple[str, int]]:
        rounds = itertools.zip_longest(
            *(
                [(title, index) for index in range(task.size(split) or 0)]
                for title, task in self.tasks.items()
            )
        )
        return [pick for same_round in rounds for pick in same_round if pick is not None]

    # ---- the warm start of a tiny model ----------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of warm-start steps of all tasks."""
        return sum(task.steps for task in self.tasks.values())

    @property
    def symbols(self) -> str:
        """The characters of all tasks."""
        return "".join(sorted(set().union(*(task.symbols for task in self.tasks.values()))))

    def make_demonstrations(self, number: int, seed: int) -> Demonstrations:
        """Return `number` pairs (prompt, answer), alternating between the tasks.

        Raises ConfigError for a task with images."""
        with_images = [name for name, task in self.tasks.items() if isinstance(task, CountTask)]
        if with_images:
            raise ConfigError(
                f"model.warm_start: cannot build a tiny model for a mixture with the images of "
                f"{with_images[0]}; set model.path to your own LLaVA model"
            )
        count = -(-number // len(self.tasks))
        pairs = [task.make_demonstrations(count, seed) for task in self.tasks.values()]
        return [pair for same_round in zip(*pairs, strict=True) for pair in same_round][:number]
