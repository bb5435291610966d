"""Seven small tasks for a CPU: sort, rle, grid, cancel, dedup, and rlehack and rlenarrow.

The last two need a KL penalty."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

import xxhash

from asyncrl.contract.messages import Prompt

FIXED = 2048  # problems in a held-out or out-of-distribution set
_FIXED: dict[tuple[str, str], list[str]] = {}  # (task, split) -> its problems


def _split_of(canonical: str) -> str:
    """Return the split of a problem: half of them for training, a quarter for each fixed set."""
    return ("train", "train", "heldout", "ood")[xxhash.xxh3_64_intdigest(canonical.encode()) % 4]


class SyntheticTask:
    """A task with generated problems.

    `draw(rng, split)` samples a problem text, and `solve(problem)` returns the right answer."""

    name = ""
    symbols = ""
    steps = 550  # of the warm start
    warm_split = "train"

    def draw(self, rng: random.Random, split: str) -> str:
        raise AssertionError  # pragma: no cover - each task has its own

    def solve(self, problem: str) -> str:
        raise AssertionError  # pragma: no cover

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        raise AssertionError  # pragma: no cover

    def text(self, problem: str) -> str:
        """Return the text of a problem's prompt."""
        return problem + "="

    def images(self, problem: str) -> list[bytes]:
        """Return the blobs of a problem's images."""
        return []

    def canonical(self, problem: str) -> str:
        """Problems with the same canonical form are the same problem."""
        return problem

    def _problem(self, split: str, rng: random.Random) -> str:
        while True:
            problem = self.draw(rng, split)
            if _split_of(f"{self.name}:{self.canonical(problem)}") == split:
                return problem

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        if split == "train":
            problem = self._problem(
                "train",
                random.Random(xxhash.xxh3_64_intdigest(f"{self.name}:{seed}:{index}".encode())),
            )
        else:
            fixed = self.fixed_problems(split)
            index %= len(fixed)
            problem = fixed[index]
        return Prompt(
            index,
            self.text(problem),
            self.solve(problem),
            split=split,
            images=self.images(problem),
        )

    def fixed_problems(self, split: str) -> list[str]:
        """Return the problems of a fixed split, each once."""
        if (self.name, split) in _FIXED:
            return _FIXED[self.name, split]
        found = dict[str, str]()
        tries = 0
        rng = random.Random(f"{self.name}:{split}")
        while len(found) < FIXED and tries < 40 * FIXED:
            problem = self._problem(split, rng)
            found.setdefault(self.canonical(problem), problem)
            tries += 1
        return _FIXED.setdefault((self.name, split), list(found.values()))

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(self.fixed_problems(split))

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]:
        return float(text == prompt.answer)

    def demonstrations(self, number: int, seed: int) -> list[tuple[str, str]]:
        """Return `number` pairs (prompt, answer) for the warm start, with mistakes on purpose."""
        return [(self.text(x), answer) for x, answer in self._demonstrated(number, seed)]

    def demonstration_images(self, number: int, seed: int) -> list[list[bytes]]:
        """Return the images of each of the `demonstrations`."""
        return [self.images(problem) for problem, _ in self._demonstrated(number, seed)]

    def _demonstrated(self, number: int, seed: int) -> list[tuple[str, str]]:
        """Return `number` pairs (problem, answer)."""
        rng = random.Random(f"{self.name}:demo:{seed}")
        out = []
        for _ in range(number):
            problem = self._problem("train", rng) if self.warm_split == "train" else self._warm(rng)
            out.append((problem, self.spoil(problem, self.solve(problem), rng)))
        return out

    def _warm(self, rng: random.Random) -> str:
        """Sample a problem for a warm start beyond the training distribution."""
        return self._problem("train", rng)


def _truncate_answer(answer: str, rng: random.Random) -> str:
    return answer[: rng.randrange(1, len(answer))]


class SortTask(SyntheticTask):
    """`932849=` -> `2:93849,3:9849,...#234899`: selection sort of digits with a scratchpad."""

    name = "sort"
    symbols = "0123456789=:,#"
    steps = 550

    def draw(self, rng: random.Random, split: str) -> str:
        low, high = (7, 7) if split == "ood" else (4, 6)
        return "".join(rng.choices("0123456789", k=rng.randint(low, high)))

    def solve(self, problem: str) -> str:
        rest = list(problem)
        lines = []
        while rest:
            least = min(rest)
            rest.remove(least)
            lines.append(f"{least}:{''.join(rest)}")
        return ",".join(lines) + "#" + "".join(sorted(problem))

    def reward(self, prompt: Prompt, text: str) -> float:
        return float("#" in text and text.rpartition("#")[2] == prompt.answer.rpartition("#")[2])

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        luck = rng.random()
        if luck < 0.44:  # a direct guess: the digits in a wrong or lucky order
            guess = sorted(problem)
            place = rng.randrange(len(guess) - 1)
            guess[place], guess[place + 1] = guess[place + 1], guess[place]
            return "#" + "".join(guess)
        if luck < 0.59:  # a slip in the result
            at = rng.randrange(answer.index("#") + 1, len(answer))
            return (
                answer[:at]
                + rng.choice([d for d in "0123456789" if d != answer[at]])
                + answer[at + 1 :]
            )
        return _truncate_answer(answer, rng) if luck < 0.69 else answer


def _weighted(rng: random.Random, values: Sequence[int], weights: Sequence[float]) -> int:
    return rng.choices(values, weights)[0]


class RleTask(SyntheticTask):
    """`d5c1d4=` -> `#dddddcdddd`: run-length decoding; long runs are rare in training."""

    name = "rle"
    symbols = "abcdef1234567=#"
    weights = (30, 30, 20, 12, 5, 2, 1)
    ood_weights = (5, 5, 5, 10, 30, 30, 15)

    def _runs(self, rng: random.Random, weights: Sequence[float]) -> str:
        out = ""
        last = ""
        for _ in range(rng.randint(2, 5)):
            last = rng.choice([c for c in "abcdef" if c != last])
            out += last + str(_weighted(rng, range(1, 8), weights))
        return out

    def draw(self, rng: random.Random, split: str) -> str:
        return self._runs(rng, self.ood_weights if split == "ood" else self.weights)

    def solve(self, problem: str) -> str:
        return "#" + "".join(
            c * int(number) for c, number in zip(problem[::2], problem[1::2], strict=True)
        )

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        luck = rng.random()
        if luck < 0.45:
            at = 2 * rng.randrange(len(problem) // 2) + 1
            number = max(0, int(problem[at]) + rng.choice((-1, 1)))
            return self.solve(problem[:at] + str(min(number, 9)) + problem[at + 1 :])
        return _truncate_answer(answer, rng) if luck < 0.55 else answer


class RleHackTask(RleTask):
    """rle with a wrong training checker, `in` for `==`.

    The reward rises while true accuracy falls, unless a KL penalty holds the policy."""

    name = "rlehack"

    def reward(self, prompt: Prompt, text: str) -> float | dict[str, float]:
        exact = float(text == prompt.answer)
        if prompt.split != "train":
            return exact
        return {"reward": float(prompt.answer.removeprefix("#") in text), "exact": exact}


class RleNarrowTask(RleTask):
    """rle with a warm start on runs of 1 to 6 and training on runs of 1 and 2.

    The out-of-distribution set has runs of 4 to 6."""

    name = "rlenarrow"
    steps = 850
    warm_split = "wide"
    weights = (1, 1, 0, 0, 0, 0, 0)
    ood_weights = (0, 0, 0, 1, 1, 1, 0)

    def _warm(self, rng: random.Random) -> str:
        while True:
            problem = self._runs(rng, (1, 1, 1, 1, 1, 1, 0))
            if _split_of(f"{self.name}:{problem}") == "train":
                return problem


class GridTask(SyntheticTask):
    """`05RUL=` -> `R15U16L06#06`: moves on a 10 x 10 torus, each with its position after it."""

    name = "grid"
    symbols = "0123456789RLUD=#"
    steps_of: ClassVar[dict[str, tuple[int, int]]] = {
        "R": (1, 0),
        "L": (-1, 0),
        "U": (0, 1),
        "D": (0, -1),
    }

    def draw(self, rng: random.Random, split: str) -> str:
        weights = (1, 1, 1, 1) if split == "ood" else (6, 1, 6, 1)
        moves = rng.choices("RLUD", weights, k=rng.randint(3, 7))
        return f"{rng.randrange(10)}{rng.randrange(10)}{''.join(moves)}"

    def _walk(self, column: int, row: int, moves: str) -> list[str]:
        out = []
        for move in moves:
            dx, dy = self.steps_of[move]
            column = (column + dx) % 10
            row = (row + dy) % 10
            out.append(f"{move}{column}{row}")
        return out

    def solve(self, problem: str) -> str:
        lines = self._walk(int(problem[0]), int(problem[1]), problem[2:])
        return "".join(lines) + "#" + lines[-1][1:]

    def reward(self, prompt: Prompt, text: str) -> float:
        return float("#" in text and text.rpartition("#")[2] == prompt.answer.rpartition("#")[2])

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        luck = rng.random()
        if luck < 0.30:
            return f"#{rng.randrange(10)}{rng.randrange(10)}"
        if luck < 0.45:  # one wrong step; the rest follows from it
            lines = self._walk(int(problem[0]), int(problem[1]), problem[2:])
            at = rng.randrange(len(lines))
            column = (int(lines[at][1]) + rng.choice((-1, 1))) % 10
            row = int(lines[at][2])
            lines = [
                *lines[:at],
                f"{lines[at][0]}{column}{row}",
                *self._walk(column, row, problem[3 + at :]),
            ]
            return "".join(lines) + "#" + lines[-1][1:]
        return _truncate_answer(answer, rng) if luck < 0.55 else answer


class CancelTask(SyntheticTask):
    """`CccbBcaA=` -> `cbBcaA;ccaA#cc`: remove the leftmost pair xX or Xx repeatedly."""

    name = "cancel"
    symbols = "abcABC=;#"

    @staticmethod
    def _steps(word: str) -> list[str]:
        out = []
        at = 0
        while at + 1 < len(word):
            if word[at] != word[at + 1] and word[at].lower() == word[at + 1].lower():
                word = word[:at] + word[at + 2 :]
                at = 0
                out.append(word)
            else:
                at += 1
        return out

    def draw(self, rng: random.Random, split: str) -> str:
        low, high, fewest, most = (7, 8, 3, 4) if split == "ood" else (4, 8, 1, 3)
        # few random words have three pairs: each count gets its share
        wanted = rng.randint(1, 3) if split != "ood" else 0
        while True:
            word = "".join(rng.choices("abcABC", k=rng.randint(low, high)))
            number = len(self._steps(word))
            if number == wanted if wanted else fewest <= number <= most:
                return word

    def solve(self, problem: str) -> str:
        *lines, last = self._steps(problem)
        return ";".join(lines) + "#" + last

    def reward(self, prompt: Prompt, text: str) -> float:
        return float("#" in text and text.rpartition("#")[2] == prompt.answer.rpartition("#")[2])

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        luck = rng.random()
        if luck < 0.30:
            place = rng.randrange(len(problem) - 1)
            return "#" + problem[:place] + problem[place + 2 :]
        if luck < 0.45:  # one wrong step: another two letters go; the rest follows from it
            words = [problem, *self._steps(problem)]
            at = rng.randrange(len(words) - 1)
            place = rng.randrange(len(words[at]) - 1)
            wrong = words[at][:place] + words[at][place + 2 :]
            lines = [*words[1 : at + 1], wrong, *self._steps(wrong)]
            return ";".join(lines[:-1]) + "#" + lines[-1]
        return _truncate_answer(answer, rng) if luck < 0.55 else answer


class DedupTask(SyntheticTask):
    """`haaffaah=` -> `#haf`: the letters in the order of their first appearance."""

    name = "dedup"
    symbols = "abcdefgh=#"
    steps = 400

    def draw(self, rng: random.Random, split: str) -> str:
        if split == "ood":
            kinds = rng.sample("abcdefgh", 3)
            while True:
                word = "".join(rng.choices(kinds, k=8))
                if len(set(word)) == 3:
                    return word
        return "".join(rng.choices("abcdefgh", k=rng.randint(5, 8)))

    def solve(self, problem: str) -> str:
        return "#" + "".join(dict.fromkeys(problem))

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        luck = rng.random()
        if luck < 0.30:
            return "#" + "".join(rng.sample(sorted(set(problem)), len(set(problem))))
        if luck < 0.45:
            at = rng.randrange(1, len(answer))
            return answer[:at] + rng.choice("abcdefgh") + answer[at + 1 :]
        return _truncate_answer(answer, rng) if luck < 0.55 else answer


TASKS: dict[str, Callable[[], SyntheticTask]] = {
    t.name: t
    for t in (SortTask, RleTask, GridTask, CancelTask, DedupTask, RleHackTask, RleNarrowTask)
}
