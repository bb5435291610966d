"""Generators of reasoning-gym as tasks: `task.name = "reasoning_gym:chain_sum"`.

`task.options` holds the generator's settings.  Its items are a function of (seed, number).  A hash
of the question assigns a problem to one split, and the generator's own judge computes the
reward."""

import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks.synthetic import EndlessTask, assign_split

PREFIX = "reasoning_gym:"
TRIES = 64  # items tried to find one of a split; a generator with few problems may have none
WORLD = 1 << 40  # item numbers of each split
PLACES = {"train": 0, "heldout": 1, "ood": 2}


class ReasoningGymTask(EndlessTask):
    """The task of one generator.

    Raises ConfigError for a missing package, an unknown generator or settings that it refuses."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        try:
            gym = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise ConfigError(
                f"task.name = {name}: {error}; pip install 'asyncrl[reasoning]'"
            ) from error
        self.name = name
        try:
            self.items = gym.create_dataset(
                name.removeprefix(PREFIX), **{**options, "seed": 0, "size": len(PLACES) * WORLD}
            )
        except Exception as error:  # its settings are checked by assertions
            problem = " ".join(str(error).split()) or "refused"
            raise ConfigError(
                f"task.name = {name}, task.options = {dict(options)}: {problem}"
            ) from (error)
        self.item = lru_cache(maxsize=4096)(self.items.__getitem__)

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        """Return the first of TRIES items that is in this split, or the last one."""
        fixed = split != "train"
        run = 0 if fixed else seed % (WORLD >> 32)
        first = (
            PLACES[split] * WORLD + (run << 32) + (index % self.fixed if fixed else index) * TRIES
        )
        for number in range(first, first + TRIES):
            item = self.item(number)
            if assign_split(f"{self.name}:{item['question']}") == split:
                break
        meta = {"item": str(number)}
        return Prompt(index, item["question"], str(item["answer"]), [], meta, split)

    def reward(self, prompt: Prompt, text: str) -> float:
        """Return the score of the generator's own judge, from 0 to 1; 0 for what it cannot read."""
        item = self.item(int(prompt.meta["item"]))
        try:
            return float(self.items.score_answer(answer=text.strip(), entry=item))
        except ValueError:  # prime_factorization, for a text that does not have numbers
            return 0.0
