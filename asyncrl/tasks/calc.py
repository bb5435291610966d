"""The smallest task that needs an agent: sums, and a calculator for one operation at a time.

```
37*8+45=   prompt
?37*8      call         296=   the calculator's reply
?296+45    call         341=
#341       answer
```

`CalcTask` has the prompts and the warm start, `Calculator` is the environment."""

from __future__ import annotations

import re
from random import Random

from asyncrl.contract.messages import Prompt
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks.synthetic import Demonstrations, PlayedTask, SyntheticTask

END = "<eos>"  # between a call and the calculator's reply
TURNS = 6
CALL = re.compile(r"\?(\d{1,4})([*+-])(\d{1,4})")
ERROR = "e="


def calculate(text: str) -> str:
    """Return the calculator's reply to a call, or ERROR for an invalid one.

    >>> calculate("?37*8"), calculate("?37*"), calculate("37*8")
    ('296=', 'e=', 'e=')
    """
    call = CALL.fullmatch(text)
    if call is None:
        return ERROR
    left, right = int(call[1]), int(call[3])
    result = {"*": left * right, "+": left + right, "-": left - right}[call[2]]
    return f"{result}=" if 0 <= result < 10_000 else ERROR


class CalcTask(PlayedTask):
    """`37*8+45=`: two digits times one digit, plus or minus two digits.

    Out of distribution, the factor is 12 to 19."""

    name = "calc"
    symbols = "0123456789*+-=?#e"
    steps = 600
    reward = SyntheticTask.reward

    def draw(self, rng: Random, split: str) -> str:
        left = rng.randint(12, 99)
        factor = rng.randint(12, 19) if split == "ood" else rng.randint(3, 9)
        sign = rng.choice("+-")
        return f"{left}*{factor}{sign}{rng.randint(10, 99 if sign == '+' else 35)}"

    def split_problem(self, problem: str) -> tuple[str, str]:
        """Return the first call and the rest of the problem."""
        sign_index = max(problem.find("+"), problem.find("-"))
        return f"?{problem[:sign_index]}", problem[sign_index:]

    def solve(self, problem: str) -> str:
        call, rest = self.split_problem(problem)
        return "#" + calculate(f"?{calculate(call)[:-1]}{rest}")[:-1]

    # ---- warm start ------------------------------------------------------------------------------

    def _demonstrate_session(self, rng: Random) -> Demonstrations:
        problem = self._draw_problem("train", rng)
        call, rest = self.split_problem(problem)
        turns: Demonstrations = []
        text = problem + "="
        solution = [call, f"?{calculate(call)[:-1]}{rest}", self.solve(problem)]
        solved = 0
        while len(turns) < TURNS:
            completion = self._spoil_turn(solution[solved], solution[2], rng)
            turns.append((text, completion))
            if completion.startswith("#"):
                break
            reply = calculate(completion)
            text += completion + END + reply
            if completion == solution[solved]:
                solved += 1
            elif reply != ERROR:  # take the result of the wrong sum for the answer
                guess = f"#{reply[:-1]}"
                turns.append((text, guess))
                break
        return turns

    def _spoil_turn(self, turn: str, answer: str, rng: Random) -> str:
        chance = rng.random()
        if turn.startswith("#"):
            return self._change_digit(turn, rng) if chance < 0.08 else turn
        if chance < 0.20:  # a guess instead of a call
            return f"#{max(0, int(answer[1:]) + rng.randint(-30, 30))}"
        if chance < 0.28:  # an invalid call
            return rng.choice([turn[1:], turn[: rng.randrange(2, len(turn) - 1)], turn + "+"])
        return self._change_digit(turn, rng) if chance < 0.34 else turn

    def _change_digit(self, turn: str, rng: Random) -> str:
        """Change one digit."""
        index = rng.choice([i for i, c in enumerate(turn) if c.isdigit()])
        digit = rng.choice([d for d in "123456789" if d != turn[index]])
        return turn[:index] + digit + turn[index + 1 :]


class Calculator:
    """The environment, with gymnasium's methods; the prompt is the question.

    The reward is 1 for the right answer, otherwise 0.  After TURNS completions without an answer,
    the episode is truncated."""

    def reset(self, *, seed: int, options: JsonObject) -> tuple[str, JsonObject]:
        self.prompt: Prompt = options["prompt"]
        self.turns = 0
        return self.prompt.text, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, JsonObject]:
        self.turns += 1
        if text.startswith("#"):
            return "", float(text == self.prompt.answer), True, False, {}
        return calculate(text), 0.0, False, self.turns >= TURNS, {}
