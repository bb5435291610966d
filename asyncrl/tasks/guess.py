"""GuessTheNumber in few characters, for a tiny model: the environment of configs/guess.toml."""

from __future__ import annotations

from asyncrl.tasks.arena import ASKED, ArenaGame, games

games()  # imported with this module, because the import takes longer than a first step may


class GuessGame(ArenaGame):
    """GuessTheNumber-v0 in few characters, with a reward for a hit only.

    The game itself also rewards a close guess after two broken rules, and a policy would learn to
    break them."""

    def __init__(self) -> None:
        super().__init__("GuessTheNumber-v0")
        self.begun = False

    def action(self, text: str) -> str:
        return f"[{text}]" if text.isdecimal() else text

    def observation_text(self, messages: list[str]) -> str:
        if not self.begun:
            self.begun = True
            return ASKED
        last = messages[-1] if messages else ""
        return "<" if "is lower" in last else ">" if "is higher" in last else "!"

    def shape_reward(self, reward: float) -> float:
        return float(reward == 1.0)


Guess = GuessGame  # its name in configs of older runs
