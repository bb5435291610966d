"""Verifiable tasks: prompts, rewards, held-out and out-of-distribution splits.  Imports no torch.

Training prompts are an endless stream, a function of (seed, index).  Held-out and
out-of-distribution prompts are fixed sets.  A hash of a problem's canonical form assigns it to one
split, so the splits are disjoint by construction."""

from __future__ import annotations

from typing import Any, Protocol

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import arena, calc, file, guess_task, names, nim, reasoning, synthetic
from asyncrl.tasks.mixing.mixture import MixtureTask
from asyncrl.tasks.pictures import count


class Task(Protocol):
    """Interface of a task.

    `reward` may return a number, or a dict of named parts that contains `reward`."""

    name: str

    def prompt(self, split: str, index: int, seed: int) -> Prompt: ...

    def size(self, split: str) -> int | None: ...

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]: ...


OTHERS: dict[str, type[Task]] = {
    **{
        kind.name: kind
        for kind in (
            calc.CalcTask,
            count.CountTask,
            guess_task.GuessTask,
            arena.SeedPrompts,
            nim.NimTask,
        )
    },
    **names.TASKS,
}
FILE_TASKS: dict[str, type[file.FileTask]] = {
    kind.name: kind for kind in (file.FileTask, file.EnvironmentPrompts)
}
NAMES = (
    *synthetic.TASKS,
    *OTHERS,
    *FILE_TASKS,
    f"{reasoning.PREFIX}GENERATOR",
    MixtureTask.name,
)


def get_task(config: Any) -> Task:
    """Return the task that `config`, the section `task`, names.

    Raises ConfigError for an unknown name, with the valid ones."""
    if config.name == MixtureTask.name:
        return MixtureTask(config, get_task)
    if config.name in FILE_TASKS:
        kind = FILE_TASKS[config.name]
        return kind(config.prompts, config.heldout, config.ood, config.columns)
    if config.name.startswith(reasoning.PREFIX):
        return reasoning.ReasoningGymTask(config.name, config.options)
    if config.name in OTHERS:
        made: Task = OTHERS[config.name]()
        return made
    if config.name in synthetic.TASKS:
        return synthetic.TASKS[config.name]()
    raise ConfigError(f"task.name = {config.name}: choose one of {', '.join(NAMES)}")
