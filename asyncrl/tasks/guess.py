"""GuessTheNumber in few characters, for a tiny model: the environment of configs/guess.toml."""

from __future__ import annotations

from asyncrl.tasks.arena import ASKED, ArenaGame, games

games()  # with the module: importing it takes longer than a first step may


class GuessGame(ArenaGame):
    """GuessTheNumber-v0 in few characters.  It pays for a hit alone: the game itself pays for being
    near to whoever breaks its rules twice, which is what a policy would learn.
    """

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
