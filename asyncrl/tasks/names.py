"""Names in alphabetical order: tasks in words, for a pretrained model.

```
Laura, Ben -> Ben, Laura        sort_names: two names
First of Noah, Clara, Ian:      first_name: one of three
```

A prompt is plain text after three solved problems, so that a model of any family knows the form.
An answer ends with its line (`generator.stop = ["\\n"]`).  Held-out problems are sets of names that
training never shows together.  Out-of-distribution problems have names that it never shows."""

from __future__ import annotations

import random
from functools import cache

import xxhash

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.synthetic import _split_of

FIXED = 192  # problems in a held-out or out-of-distribution set
_SHOWN = (
    "Adam Alice Anna Ben Carl Clara David Diana Emma Eric Fiona Frank George Grace Hannah Henry "
    "Ian Iris Jack Julia Karen Kevin Laura Leo Maria Mark Nina Noah Olga Oscar Paul Paula Quentin "
    "Rachel Robert Sarah Simon Tina Tom Ursula Vera Victor Walter Wendy Xavier Yara Zack Zoe"
)
_NEVER_SHOWN = (
    "Albert Barbara Bruno Cecilia Daniel Edward Felix Gloria Harold Irene James Kate Linda Martin "
    "Nathan Otto Peter Rose Stella Thomas Vincent William Yvonne"
)
SHOWN, NEVER_SHOWN = _SHOWN.split(), _NEVER_SHOWN.split()


class NamesTask:
    """A task on `count` different names; `line` asks and `solve` answers.

    The same names in another order are the same problem."""

    name = ""
    count = 0

    def line(self, names: list[str]) -> str:
        raise AssertionError  # pragma: no cover - each task has its own

    def solve(self, names: list[str]) -> str:
        raise AssertionError  # pragma: no cover

    def draw(self, rng: random.Random, split: str) -> list[str]:
        """Sample the names of a problem of this split."""
        while True:
            drawn = rng.sample(NEVER_SHOWN if split == "ood" else SHOWN, self.count)
            if split == "ood" or self.home(drawn) == split:
                return drawn

    def home(self, names: list[str]) -> str:
        """Return the split of a problem; a quarter of the problems is held out."""
        found = _split_of(f"{self.name}:{','.join(sorted(names))}")
        return "heldout" if found == "heldout" else "train"

    def solved_problems(self) -> str:
        """Return the solved problems, which belong to the training split."""
        rng = random.Random(f"{self.name}:above")
        shown = [self.draw(rng, "train") for _ in range(3)]
        return "".join(f"{self.line(names)} {self.solve(names)}\n" for names in shown)

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        if split == "train":
            key = xxhash.xxh3_64_intdigest(f"{self.name}:{seed}:{index}".encode())
            drawn = self.draw(random.Random(key), split)
        else:
            index %= FIXED
            drawn = list(_fixed(self.name, split)[index])
        return Prompt(
            index, self.solved_problems() + self.line(drawn), self.solve(drawn), split=split
        )

    def size(self, split: str) -> int | None:
        return None if split == "train" else FIXED

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text.strip() == prompt.answer)


class SortNamesTask(NamesTask):
    name = "sort_names"
    count = 2

    def line(self, names: list[str]) -> str:
        return f"{', '.join(names)} ->"

    def solve(self, names: list[str]) -> str:
        return ", ".join(sorted(names))


class FirstNameTask(NamesTask):
    name = "first_name"
    count = 3

    def line(self, names: list[str]) -> str:
        return f"First in the alphabet of {', '.join(names)}:"

    def solve(self, names: list[str]) -> str:
        return min(names)


TASKS: dict[str, type[NamesTask]] = {kind.name: kind for kind in (SortNamesTask, FirstNameTask)}


@cache
def _fixed(name: str, split: str) -> list[tuple[str, ...]]:
    """Return the problems of a fixed split, each once."""
    task = TASKS[name]()
    rng = random.Random(f"{name}:{split}")
    found: dict[tuple[str, ...], list[str]] = {}
    while len(found) < FIXED:
        drawn = task.draw(rng, split)
        found.setdefault(tuple(sorted(drawn)), drawn)
    return [tuple(drawn) for drawn in found.values()]
