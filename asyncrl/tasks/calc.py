"""The smallest task that needs an agent: sums, and a calculator for one operation at a time.

```
37*8+45=   asked
?37*8      called       296=   the calculator
?296+45    called       341=
#341       answered
```

`CalcTask` is the task (its prompts, its warm start), `Calculator` the environment that plays it."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

from asyncrl.contract.messages import Prompt
from asyncrl.tasks.synthetic import FIXED, SyntheticTask, _split_of

END = "<eos>"  # between a call and the calculator's reply
TURNS = 6
LONGEST = 12  # tokens of a turn, its end included
CALL = re.compile(r"\?(\d{1,4})([*+-])(\d{1,4})")
ERROR = "e="


def calculated(text: str) -> str:
    """Return the calculator's reply to a call, or ERROR for an invalid one.

    >>> calculated("?37*8"), calculated("?37*"), calculated("37*8")
    ('296=', 'e=', 'e=')
    """
    found = CALL.fullmatch(text)
    if found is None:
        return ERROR
    left, right = int(found[1]), int(found[3])
    result = {"*": left * right, "+": left + right, "-": left - right}[found[2]]
    return f"{result}=" if 0 <= result < 10_000 else ERROR


class CalcTask(SyntheticTask):
    """`37*8+45=`: two digits times one, plus or minus two; out of distribution: times 12 to 19."""

    name = "calc"
    symbols = "0123456789*+-=?#e"
    steps = 600
    turns = TURNS
    longest = LONGEST

    def environment(self) -> Calculator:
        return Calculator()

    def draw(self, rng: random.Random, split: str) -> str:
        left = rng.randint(12, 99)
        factor = rng.randint(12, 19) if split == "ood" else rng.randint(3, 9)
        sign = rng.choice("+-")
        return f"{left}*{factor}{sign}{rng.randint(10, 99 if sign == '+' else 35)}"

    def parts(self, problem: str) -> tuple[str, str]:
        """Return (the first call, the rest of the problem)."""
        at = max(problem.find("+"), problem.find("-"))
        return f"?{problem[:at]}", problem[at:]

    def solve(self, problem: str) -> str:
        first, rest = self.parts(problem)
        return "#" + calculated(f"?{calculated(first)[:-1]}{rest}")[:-1]

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        if split == "train":
            return super().prompt(split, index, seed)
        fixed = _problems(split)
        index %= len(fixed)
        return Prompt(index, fixed[index] + "=", self.solve(fixed[index]), split=split)

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(_problems(split))

    # ---- warm start ------------------------------------------------------------------------------

    def demonstrations(self, number: int, seed: int) -> list[tuple[str, str]]:
        """Return turns as (text before, completion), with mistakes added on purpose."""
        rng = random.Random(f"{self.name}:demo:{seed}")
        out: list[tuple[str, str]] = []
        while len(out) < number:
            out += self._session(self._problem("train", rng), rng)
        return out[:number]

    def _session(self, problem: str, rng: random.Random) -> list[tuple[str, str]]:
        first, rest = self.parts(problem)
        turns: list[tuple[str, str]] = []
        before = problem + "="
        right = [first, f"?{calculated(first)[:-1]}{rest}", self.solve(problem)]
        at = 0
        while len(turns) < TURNS:
            written = self._spoiled(right[at], right[2], rng)
            turns.append((before, written))
            if written.startswith("#"):
                break
            says = calculated(written)
            before += written + END + says
            if written == right[at]:
                at += 1
            elif says != ERROR:  # the result of another sum is mistaken for the right one
                guess = f"#{says[:-1]}"
                turns.append((before, guess))
                break
        return turns

    def _spoiled(self, turn: str, answer: str, rng: random.Random) -> str:
        luck = rng.random()
        if turn.startswith("#"):
            return self._slip(turn, rng) if luck < 0.08 else turn
        if luck < 0.20:  # a guess in the place of a call
            return f"#{max(0, int(answer[1:]) + rng.randint(-30, 30))}"
        if luck < 0.28:  # an invalid call
            return rng.choice([turn[1:], turn[: rng.randrange(2, len(turn) - 1)], turn + "+"])
        return self._slip(turn, rng) if luck < 0.34 else turn

    def _slip(self, turn: str, rng: random.Random) -> str:
        """Change one digit."""
        at = rng.choice([i for i, c in enumerate(turn) if c.isdigit()])
        return turn[:at] + rng.choice([d for d in "123456789" if d != turn[at]]) + turn[at + 1 :]


@cache
def _problems(split: str) -> list[str]:
    task = CalcTask()
    rng = random.Random(f"{task.name}:{split}")
    found = dict[str, None]()
    while len(found) < FIXED:
        problem = task.draw(rng, split)
        if _split_of(f"{task.name}:{problem}") == split:
            found[problem] = None
    return list(found)


class Calculator:
    """The environment, with gymnasium's methods; the prompt is the question.

    The reward is 1 for the right answer and 0 for another.  After TURNS completions without an
    answer the episode is truncated."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.prompt: Prompt = options["prompt"]
        self.turns = 0
        return self.prompt.text, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        if text.startswith("#"):
            return "", float(text == self.prompt.answer), True, False, {}
        return calculated(text), 0.0, False, self.turns >= TURNS, {}
