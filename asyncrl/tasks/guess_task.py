"""The prompts and the warm start of GuessTheNumber in few characters (guess.py):

```
1-20:   the question
10      a guess       <    the number is lower
5       a guess       >    higher
7       a guess            and a hit: 1
```
"""

from __future__ import annotations

import random
from typing import Any

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.arena import ASKED
from asyncrl.tasks.calc import END
from asyncrl.tasks.synthetic import FIXED, SyntheticTask

FAIREST = 5  # guesses that suffice for 20 numbers


class GuessTask(SyntheticTask):
    """Guess a number from 1 to 20. Halving the interval needs at most FAIREST guesses."""

    name = "guess"
    symbols = "0123456789-:<>!"
    steps = 500
    asked = ASKED
    turns = FAIREST
    longest = 4  # tokens of a guess, its end included

    def environment(self) -> Any:
        from asyncrl.tasks.guess import GuessGame  # imports textarena

        return GuessGame()

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(index, self.asked, split=split)

    def size(self, split: str) -> int | None:
        return None if split == "train" else FIXED

    def reward(self, prompt: Prompt, text: str) -> float:
        raise ValueError("task.name = guess has no reward of its own: the environment pays")

    def demonstrations(self, number: int, seed: int) -> list[tuple[str, str]]:
        """One turn each: (all before it, the guess).  Seven of ten guesses fit what was said,
        the others are any number: something is left to learn.
        """
        rng = random.Random(f"{self.name}:demo:{seed}")
        out: list[tuple[str, str]] = []
        while len(out) < number:
            out += self._session(rng)
        return out[:number]

    def _session(self, rng: random.Random) -> list[tuple[str, str]]:
        number = rng.randint(1, 20)
        low, high = 1, 20
        before = self.asked
        tried: set[int] = set()
        turns: list[tuple[str, str]] = []
        while len(turns) < FAIREST:
            fits = rng.random() < 0.7
            guess = rng.randint(low, high) if fits else rng.randint(1, 20)
            turns.append((before, str(guess)))
            if guess == number:
                break
            says = "!" if guess in tried else "<" if guess > number else ">"
            tried.add(guess)
            before += f"{guess}{END}{says}"
            if guess > number:
                high = min(high, guess - 1)
            else:
                low = max(low, guess + 1)
        return turns
