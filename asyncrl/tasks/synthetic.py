"""Tasks with generated problems.

Seven small tasks for a CPU: sort, rle, grid, cancel, dedup, rlehack and rlenarrow; the last two
need a KL penalty. Two tasks in words, sort_names and first_name, and the generators of
reasoning-gym, for a pretrained model."""

import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

import xxhash

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers, Prompt

Demonstrations = list[tuple[str, str]]  # (text before, completion)
FIXED = 2048  # problems in a held-out or out-of-distribution set
_FIXED: dict[tuple[str, str], list[str]] = {}  # (task, split) -> its problems


def assign_split(canonical: str) -> str:
    """Return the split of a problem: half are for training, a quarter for each fixed set."""
    return ("train", "train", "heldout", "ood")[xxhash.xxh3_64_intdigest(canonical.encode()) % 4]


class EndlessTask:
    """The base of tasks with an endless training stream and `fixed` prompts in another split.

    Without a reward of its own, the environment of such a task gives it."""

    name = ""
    fixed = FIXED

    def size(self, split: str) -> int | None:
        return None if split == "train" else self.fixed

    def reward(self, prompt: Prompt, text: str) -> float | Numbers:
        raise ValueError(f"task.name = {self.name} has no reward: the environment gives it")


class SyntheticTask:
    """A task with generated problems.

    `draw(rng, split)` samples a problem text, of at least 16,000 different ones, and
    `solve(problem)` returns the right answer."""

    name = ""
    symbols = ""
    fixed = FIXED
    steps = 550  # of the warm start
    spoiled = 0.55  # share of demonstrations whose answer is wrong or cut short

    def draw(self, rng: Random, split: str) -> str:
        raise AssertionError  # pragma: no cover - each task has its own

    def solve(self, problem: str) -> str:
        raise AssertionError  # pragma: no cover

    def make_mistake(self, chance: float, problem: str, answer: str, rng: Random) -> str:
        """Return a wrong answer below some `chance`, uniform in [0, 1], else ""."""
        return ""

    def spoil(self, problem: str, answer: str, rng: Random) -> str:
        """Return the answer of a demonstration: wrong, cut short or right."""
        chance = rng.random()
        if mistake := self.make_mistake(chance, problem, answer, rng):
            return mistake
        return answer[: rng.randrange(1, len(answer))] if chance < self.spoiled else answer

    def format_text(self, problem: str) -> str:
        """Return the text of a problem's prompt."""
        return problem + "="

    def draw_images(self, problem: str) -> list[bytes]:
        """Return the blobs of a problem's images."""
        return []

    def canonicalize(self, problem: str) -> str:
        """Return the canonical form of a problem, which equal problems share."""
        return problem

    def is_in_split(self, problem: str, split: str) -> bool:
        return assign_split(f"{self.name}:{self.canonicalize(problem)}") == split

    def _draw_problem(self, split: str, rng: Random) -> str:
        while not self.is_in_split(problem := self.draw(rng, split), split):
            pass
        return problem

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        if split == "train":
            problem = self._draw_problem(
                "train",
                Random(xxhash.xxh3_64_intdigest(f"{self.name}:{seed}:{index}".encode())),
            )
        else:
            fixed = self.build_fixed_problems(split)
            index %= len(fixed)
            problem = fixed[index]
        return Prompt(
            index,
            self.format_text(problem),
            self.solve(problem),
            split=split,
            images=self.draw_images(problem),
        )

    def build_fixed_problems(self, split: str) -> list[str]:
        """Return the distinct problems of a fixed split."""
        if (self.name, split) in _FIXED:
            return _FIXED[self.name, split]
        problems = dict[str, str]()
        tries = 0
        rng = Random(f"{self.name}:{split}")
        while len(problems) < self.fixed and tries < 40 * self.fixed:
            problem = self._draw_problem(split, rng)
            problems.setdefault(self.canonicalize(problem), problem)
            tries += 1
        return _FIXED.setdefault((self.name, split), list(problems.values()))

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(self.build_fixed_problems(split))

    def reward(self, prompt: Prompt, text: str) -> float | Numbers:
        return float(text == prompt.answer)

    def make_demonstrations(self, number: int, seed: int) -> Demonstrations:
        """Return `number` pairs (prompt, answer) for the warm start, with deliberate mistakes."""
        solved = self.solve_demonstrations(number, seed)
        return [(self.format_text(problem), answer) for problem, answer in solved]

    def solve_demonstrations(self, number: int, seed: int) -> Demonstrations:
        """Return the problem and the answer of each pair of `make_demonstrations`."""
        rng = Random(f"{self.name}:demo:{seed}")
        pairs = []
        for _ in range(number):
            problem = self._draw_warm_problem(rng)
            pairs.append((problem, self.spoil(problem, self.solve(problem), rng)))
        return pairs

    def _draw_warm_problem(self, rng: Random) -> str:
        """Sample a problem for the warm start."""
        return self._draw_problem("train", rng)


class PlayedTask(EndlessTask, SyntheticTask):
    """A task that is played turn by turn in an environment, which gives the reward."""

    def _demonstrate_session(self, rng: Random) -> Demonstrations:
        """Return the turns of a session as (text before, completion)."""
        raise AssertionError  # pragma: no cover

    def make_demonstrations(self, number: int, seed: int) -> Demonstrations:
        """Return turns as (text before, completion), with deliberate mistakes."""
        rng = Random(f"{self.name}:demo:{seed}")
        turns: Demonstrations = []
        while len(turns) < number:
            turns += self._demonstrate_session(rng)
        return turns[:number]


class ScratchpadTask(SyntheticTask):
    """A task whose answer has steps before `#`, which the reward does not read."""

    def reward(self, prompt: Prompt, text: str) -> float:
        return float("#" in text and text.rpartition("#")[2] == prompt.answer.rpartition("#")[2])


class SortTask(ScratchpadTask):
    """`932849=` -> `2:93849,3:9849,...#234899`: selection sort of digits with a scratchpad."""

    name = "sort"
    symbols = "0123456789=:,#"
    spoiled = 0.69

    def draw(self, rng: Random, split: str) -> str:
        low, high = (7, 7) if split == "ood" else (4, 6)
        return "".join(rng.choices("0123456789", k=rng.randint(low, high)))

    def solve(self, problem: str) -> str:
        remaining = list(problem)
        steps = []
        while remaining:
            smallest = min(remaining)
            remaining.remove(smallest)
            steps.append(f"{smallest}:{''.join(remaining)}")
        return ",".join(steps) + "#" + "".join(sorted(problem))

    def make_mistake(self, chance: float, problem: str, answer: str, rng: Random) -> str:
        if chance < 0.44:  # a direct guess: the sorted digits with two neighbors exchanged
            guess = sorted(problem)
            index = rng.randrange(len(guess) - 1)
            guess[index], guess[index + 1] = guess[index + 1], guess[index]
            return "#" + "".join(guess)
        if chance < 0.59:  # a wrong digit in the result
            index = rng.randrange(answer.index("#") + 1, len(answer))
            return (
                answer[:index]
                + rng.choice([d for d in "0123456789" if d != answer[index]])
                + answer[index + 1 :]
            )
        return ""


class RleTask(SyntheticTask):
    """`d5c1d4=` -> `#dddddcdddd`: run-length decoding; long runs are rare in training."""

    name = "rle"
    symbols = "abcdef1234567=#"
    weights = (30, 30, 20, 12, 5, 2, 1)
    ood_weights = (5, 5, 5, 10, 30, 30, 15)

    def _draw_runs(self, rng: Random, weights: Sequence[float]) -> str:
        runs = ""
        letter = ""
        for _ in range(rng.randint(2, 5)):
            letter = rng.choice([c for c in "abcdef" if c != letter])
            runs += letter + str(rng.choices(range(1, 8), weights)[0])
        return runs

    def draw(self, rng: Random, split: str) -> str:
        return self._draw_runs(rng, self.ood_weights if split == "ood" else self.weights)

    def solve(self, problem: str) -> str:
        return "#" + "".join(
            c * int(number) for c, number in zip(problem[::2], problem[1::2], strict=True)
        )

    def make_mistake(self, chance: float, problem: str, answer: str, rng: Random) -> str:
        if chance < 0.45:
            index = 2 * rng.randrange(len(problem) // 2) + 1
            number = max(0, int(problem[index]) + rng.choice((-1, 1)))
            return self.solve(problem[:index] + str(min(number, 9)) + problem[index + 1 :])
        return ""


class RleHackTask(RleTask):
    """rle with a wrong training reward: it checks with `in` instead of `==`.

    The reward rises while the true accuracy falls, unless a KL penalty limits the policy."""

    name = "rlehack"

    def reward(self, prompt: Prompt, text: str) -> float | Numbers:
        exact = float(text == prompt.answer)
        if prompt.split != "train":
            return exact
        return {"reward": float(prompt.answer.removeprefix("#") in text), "exact": exact}


class RleNarrowTask(RleTask):
    """rle with a warm start on runs of 1 to 6 and training on runs of 1 and 2.

    The out-of-distribution set has runs of 4 to 6."""

    name = "rlenarrow"
    steps = 850
    weights = (1, 1, 0, 0, 0, 0, 0)
    ood_weights = (0, 0, 0, 1, 1, 1, 0)

    def _draw_warm_problem(self, rng: Random) -> str:
        while True:
            problem = self._draw_runs(rng, (1, 1, 1, 1, 1, 1, 0))
            if assign_split(f"{self.name}:{problem}") == "train":
                return problem


class GridTask(ScratchpadTask):
    """`05RUL=` -> `R15U16L06#06`: moves on a 10 x 10 torus, each followed by the new position."""

    name = "grid"
    symbols = "0123456789RLUD=#"
    steps_of: ClassVar[dict[str, tuple[int, int]]] = {
        "R": (1, 0),
        "L": (-1, 0),
        "U": (0, 1),
        "D": (0, -1),
    }

    def draw(self, rng: Random, split: str) -> str:
        weights = (1, 1, 1, 1) if split == "ood" else (6, 1, 6, 1)
        moves = rng.choices("RLUD", weights, k=rng.randint(3, 7))
        return f"{rng.randrange(10)}{rng.randrange(10)}{''.join(moves)}"

    def _walk(self, column: int, row: int, moves: str) -> list[str]:
        steps = []
        for move in moves:
            dx, dy = self.steps_of[move]
            column = (column + dx) % 10
            row = (row + dy) % 10
            steps.append(f"{move}{column}{row}")
        return steps

    def solve(self, problem: str) -> str:
        steps = self._walk(int(problem[0]), int(problem[1]), problem[2:])
        return "".join(steps) + "#" + steps[-1][1:]

    def make_mistake(self, chance: float, problem: str, answer: str, rng: Random) -> str:
        if chance < 0.30:
            return f"#{rng.randrange(10)}{rng.randrange(10)}"
        if chance < 0.45:  # one wrong step; the later steps follow from it
            steps = self._walk(int(problem[0]), int(problem[1]), problem[2:])
            index = rng.randrange(len(steps))
            column = (int(steps[index][1]) + rng.choice((-1, 1))) % 10
            row = int(steps[index][2])
            steps = [
                *steps[:index],
                f"{steps[index][0]}{column}{row}",
                *self._walk(column, row, problem[3 + index :]),
            ]
            return "".join(steps) + "#" + steps[-1][1:]
        return ""


class CancelTask(ScratchpadTask):
    """`CccbBcaA=` -> `cbBcaA;ccaA#cc`: remove the leftmost pair xX or Xx repeatedly."""

    name = "cancel"
    symbols = "abcABC=;#"

    @staticmethod
    def _cancel_pairs(word: str) -> list[str]:
        steps = []
        index = 0
        while index + 1 < len(word):
            if word[index] != word[index + 1] and word[index].lower() == word[index + 1].lower():
                word = word[:index] + word[index + 2 :]
                index = 0
                steps.append(word)
            else:
                index += 1
        return steps

    def draw(self, rng: Random, split: str) -> str:
        low, high, fewest, most = (7, 8, 3, 4) if split == "ood" else (4, 8, 1, 3)
        # few random words have three pairs, so the count is sampled first
        count = rng.randint(1, 3) if split != "ood" else 0
        while True:
            word = "".join(rng.choices("abcABC", k=rng.randint(low, high)))
            removed = len(self._cancel_pairs(word))
            if removed == count if count else fewest <= removed <= most:
                return word

    def solve(self, problem: str) -> str:
        *steps, last = self._cancel_pairs(problem)
        return ";".join(steps) + "#" + last

    def make_mistake(self, chance: float, problem: str, answer: str, rng: Random) -> str:
        if chance < 0.30:
            pair_index = rng.randrange(len(problem) - 1)
            return "#" + problem[:pair_index] + problem[pair_index + 2 :]
        if chance < 0.45:  # one step removes two wrong letters; the later steps follow from it
            words = [problem, *self._cancel_pairs(problem)]
            index = rng.randrange(len(words) - 1)
            pair_index = rng.randrange(len(words[index]) - 1)
            wrong = words[index][:pair_index] + words[index][pair_index + 2 :]
            steps = [*words[1 : index + 1], wrong, *self._cancel_pairs(wrong)]
            return ";".join(steps[:-1]) + "#" + steps[-1]
        return ""


class DedupTask(SyntheticTask):
    """`haaffaah=` -> `#haf`: the distinct letters in the order of their first appearance."""

    name = "dedup"
    symbols = "abcdefgh=#"
    steps = 400

    def draw(self, rng: Random, split: str) -> str:
        if split == "ood":
            letters = rng.sample("abcdefgh", 3)
            while True:
                word = "".join(rng.choices(letters, k=8))
                if len(set(word)) == 3:
                    return word
        return "".join(rng.choices("abcdefgh", k=rng.randint(5, 8)))

    def solve(self, problem: str) -> str:
        return "#" + "".join(dict.fromkeys(problem))

    def make_mistake(self, chance: float, problem: str, answer: str, rng: Random) -> str:
        if chance < 0.30:
            return "#" + "".join(rng.sample(sorted(set(problem)), len(set(problem))))
        if chance < 0.45:
            index = rng.randrange(1, len(answer))
            return answer[:index] + rng.choice("abcdefgh") + answer[index + 1 :]
        return ""


TASKS: dict[str, type[SyntheticTask]] = {
    t.name: t
    for t in (SortTask, RleTask, GridTask, CancelTask, DedupTask, RleHackTask, RleNarrowTask)
}
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


class NamesTask(SyntheticTask):
    """A task in words on `count` different names.

    ```
    Laura, Ben -> Ben, Laura        sort_names: two names
    First of Noah, Clara, Ian:      first_name: one of three
    ```

    A prompt is plain text after three solved problems, which show the format to a model of any
    family. An answer ends with its line (`generator.stop = ["\\n"]`). The same names in another
    order are the same problem. A quarter of the problems is held out: sets of names that never
    appear together in training. Out-of-distribution problems have names that never appear in
    training."""

    count = 0
    fixed = 192

    def format_question(self, problem: str) -> str:
        raise AssertionError  # pragma: no cover - each task has its own

    def draw(self, rng: Random, split: str) -> str:
        return ", ".join(rng.sample(NEVER_SHOWN if split == "ood" else SHOWN, self.count))

    def canonicalize(self, problem: str) -> str:
        return ",".join(sorted(problem.split(", ")))

    def is_in_split(self, problem: str, split: str) -> bool:
        is_held_out = super().is_in_split(problem, "heldout")
        return split == "ood" or is_held_out == (split == "heldout")

    def format_text(self, problem: str) -> str:
        rng = Random(f"{self.name}:above")
        solved = [self._draw_problem("train", rng) for _ in range(3)]
        lines = [f"{self.format_question(above)} {self.solve(above)}\n" for above in solved]
        return "".join(lines) + self.format_question(problem)

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(text.strip() == prompt.answer)


class SortNamesTask(NamesTask):
    name = "sort_names"
    count = 2

    def format_question(self, problem: str) -> str:
        return f"{problem} ->"

    def solve(self, problem: str) -> str:
        return ", ".join(sorted(problem.split(", ")))


class FirstNameTask(NamesTask):
    name = "first_name"
    count = 3

    def format_question(self, problem: str) -> str:
        return f"First in the alphabet of {problem}:"

    def solve(self, problem: str) -> str:
        return min(problem.split(", "))


PREFIX = "reasoning_gym:"
TRIES = 64  # items tried to find one of a split; a generator with few problems may have none
WORLD = 1 << 40  # item numbers of each split
PLACES = {"train": 0, "heldout": 1, "ood": 2}


class ReasoningGymTask(EndlessTask):
    """The task of one generator of reasoning-gym: `task.name = "reasoning_gym:chain_sum"`.

    `task.options` holds the generator's settings. Its items are a function of (seed, number). A
    hash of the question assigns a problem to one split, and the generator's own judge computes the
    reward.

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
