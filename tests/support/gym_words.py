"""An environment of gymnasium whose actions and observations are text, and one of numbers."""

from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text


class Count(gymnasium.Env[str, str]):
    """Count upwards from a number that the seed chooses."""

    action_space = Text(8, min_length=0)
    observation_space = Text(8, min_length=0)

    def __init__(self, rounds: int = 3) -> None:
        self.rounds = rounds

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(10, 20))
        self.left = self.rounds
        return str(self.at), {"parts": "of another kind"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.at += 1
        self.left -= 1
        right = action == str(self.at)
        return str(self.at), float(right), not right, self.left == 0, {}


class Numbers(Count):
    observation_space = Discrete(3)


gymnasium.register("Count-v0", "gym_words:Count")
gymnasium.register("Numbers-v0", "gym_words:Numbers")
