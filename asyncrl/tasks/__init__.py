"""Verifiable tasks: prompts, rewards, held-out and out-of-distribution splits.  Imports no torch.

Training prompts are an endless stream, a function of (seed, index).  Held-out and
out-of-distribution prompts are fixed sets.  A hash of a problem's canonical form assigns the
problem to one split, so the splits are disjoint by construction."""

from typing import Any, Protocol

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers, Prompt
from asyncrl.tasks import arena, calc, file, guess_task, nim, synthetic
from asyncrl.tasks.mixture import MixtureTask
from asyncrl.tasks.pictures import count


class Task(Protocol):
    """Interface of a task.

    `reward` may return a number, or a dict of named parts that contains `reward`."""

    name: str

    def prompt(self, split: str, index: int, seed: int) -> Prompt: ...

    def size(self, split: str) -> int | None: ...

    def reward(self, prompt: Prompt, text: str) -> float | Numbers: ...


BUILT_IN: dict[str, type[Task]] = {
    **synthetic.TASKS,
    **{
        task_class.name: task_class
        for task_class in (
            calc.CalcTask,
            count.CountTask,
            guess_task.GuessTask,
            arena.SeedPrompts,
            nim.NimTask,
            synthetic.SortNamesTask,
            synthetic.FirstNameTask,
        )
    },
}
FILE_TASKS: dict[str, type[file.FileTask]] = {
    task_class.name: task_class for task_class in (file.FileTask, file.EnvironmentPrompts)
}
NAMES = (*BUILT_IN, *FILE_TASKS, f"{synthetic.PREFIX}GENERATOR", MixtureTask.name)


def get_task(config: Any) -> Task:
    """Build the task of `config`, the section `task`.

    Raises ConfigError, with the valid names, for an unknown name."""
    if config.name == MixtureTask.name:
        return MixtureTask(config, get_task)
    if config.name in FILE_TASKS:
        task_class = FILE_TASKS[config.name]
        return task_class(config.prompts, config.heldout, config.ood, config.columns)
    if config.name.startswith(synthetic.PREFIX):
        return synthetic.ReasoningGymTask(config.name, config.options)
    if config.name in BUILT_IN:
        return BUILT_IN[config.name]()
    raise ConfigError(f"task.name = {config.name}: choose one of {', '.join(NAMES)}")
