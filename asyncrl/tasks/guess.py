"""GuessTheNumber in few characters, for a tiny model: the environment of configs/guess.toml."""

from asyncrl.tasks.arena import ASKED, ArenaGame, import_textarena

import_textarena()  # with this module: the import takes longer than the limit of a first step


class GuessGame(ArenaGame):
    """GuessTheNumber-v0 in few characters, with a reward only for the right number.

    The game also rewards a close guess after two broken rules, so a policy would learn to break
    the rules."""

    def __init__(self) -> None:
        super().__init__("GuessTheNumber-v0")
        self.has_started = False

    def format_action(self, text: str) -> str:
        return f"[{text}]" if text.isdecimal() else text

    def format_observation(self, messages: list[str]) -> str:
        if not self.has_started:
            self.has_started = True
            return ASKED
        message = messages[-1] if messages else ""
        return "<" if "is lower" in message else ">" if "is higher" in message else "!"

    def shape_reward(self, reward: float) -> float:
        return float(reward == 1.0)


Guess = GuessGame  # the name in configs of older runs
