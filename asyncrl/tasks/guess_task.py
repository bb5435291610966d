"""The prompts and the warm start of GuessTheNumber in few characters (guess.py).

```
1-20:   the question
10      a guess       <    the number is lower
5       a guess       >    the number is higher
7       a guess            right: reward 1
```
"""

import random

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.arena import ASKED
from asyncrl.tasks.calc import END
from asyncrl.tasks.synthetic import Demonstrations, PlayedTask

FAIREST = 5  # number of guesses that suffice for 20 numbers


class GuessTask(PlayedTask):
    """Guess a number from 1 to 20; halving the interval needs at most FAIREST guesses."""

    name = "guess"
    symbols = "0123456789-:<>!"
    steps = 500
    question = ASKED

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(index, self.question, split=split)

    def _demonstrate_session(self, rng: random.Random) -> Demonstrations:
        """Return the turns as (text before, guess).

        Seven of ten guesses fit the replies, the others are random, so that RL has something to
        learn."""
        secret = rng.randint(1, 20)
        low, high = 1, 20
        text = self.question
        tried: set[int] = set()
        turns: Demonstrations = []
        while len(turns) < FAIREST:
            fits = rng.random() < 0.7
            guess = rng.randint(low, high) if fits else rng.randint(1, 20)
            turns.append((text, str(guess)))
            if guess == secret:
                break
            reply = "!" if guess in tried else "<" if guess > secret else ">"
            tried.add(guess)
            text += f"{guess}{END}{reply}"
            if guess > secret:
                high = min(high, guess - 1)
            else:
                low = max(low, guess + 1)
        return turns
