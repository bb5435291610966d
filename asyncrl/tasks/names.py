"""Names in alphabetical order: tasks in words, for a pretrained model.

```
Laura, Ben -> Ben, Laura        sort_names: two names
First of Noah, Clara, Ian:      first_name: one of three
```

A prompt is plain text after three solved problems, which show the format to a model of any family.
An answer ends with its line (`generator.stop = ["\\n"]`).  Held-out problems are sets of names that
never appear together in training.  Out-of-distribution problems have names that never appear in
training."""

from functools import cache
from random import Random

import xxhash

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.synthetic import EndlessTask, assign_split

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


class NamesTask(EndlessTask):
    """A task on `count` different names.

    The same names in another order are the same problem."""

    name = ""
    count = 0
    fixed = 192

    def format_question(self, names: list[str]) -> str:
        raise AssertionError  # pragma: no cover - each task has its own

    def solve(self, names: list[str]) -> str:
        raise AssertionError  # pragma: no cover

    def draw(self, rng: Random, split: str) -> list[str]:
        """Sample the names of a problem of this split."""
        while True:
            names = rng.sample(NEVER_SHOWN if split == "ood" else SHOWN, self.count)
            if split == "ood" or self.find_split(names) == split:
                return names

    def find_split(self, names: list[str]) -> str:
        """Return the split of a problem; a quarter of the problems is held out."""
        split = assign_split(f"{self.name}:{','.join(sorted(names))}")
        return "heldout" if split == "heldout" else "train"

    def solve_examples(self) -> str:
        """Return the solved problems of a prompt, which belong to the training split."""
        rng = Random(f"{self.name}:above")
        problems = [self.draw(rng, "train") for _ in range(3)]
        return "".join(f"{self.format_question(names)} {self.solve(names)}\n" for names in problems)

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        if split == "train":
            key = xxhash.xxh3_64_intdigest(f"{self.name}:{seed}:{index}".encode())
            names = self.draw(Random(key), split)
        else:
            index %= self.fixed
            names = list(_draw_fixed_problems(self.name, split)[index])
        return Prompt(
            index,
            self.solve_examples() + self.format_question(names),
            self.solve(names),
            split=split,
        )

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text.strip() == prompt.answer)


class SortNamesTask(NamesTask):
    name = "sort_names"
    count = 2

    def format_question(self, names: list[str]) -> str:
        return f"{', '.join(names)} ->"

    def solve(self, names: list[str]) -> str:
        return ", ".join(sorted(names))


class FirstNameTask(NamesTask):
    name = "first_name"
    count = 3

    def format_question(self, names: list[str]) -> str:
        return f"First in the alphabet of {', '.join(names)}:"

    def solve(self, names: list[str]) -> str:
        return min(names)


TASKS: dict[str, type[NamesTask]] = {kind.name: kind for kind in (SortNamesTask, FirstNameTask)}


@cache
def _draw_fixed_problems(name: str, split: str) -> list[tuple[str, ...]]:
    """Return the distinct problems of a fixed split."""
    task = TASKS[name]()
    rng = Random(f"{name}:{split}")
    problems: dict[tuple[str, ...], list[str]] = {}
    while len(problems) < task.fixed:
        names = task.draw(rng, split)
        problems.setdefault(tuple(sorted(names)), names)
    return [tuple(names) for names in problems.values()]
