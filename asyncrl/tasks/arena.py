"""textarena's games of one or two players as environments.

`agent.env = "textarena:GuessTheNumber-v0"` chooses any game by its id, with `task.name = "seeds"`:
the game writes the prompts, and a prompt of the task is only a seed.  A two-player game is an
`ArenaDuel`, whose opponent is in games.py.
"""

import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers, Prompt
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks.games import SeededRandom
from asyncrl.tasks.synthetic import EndlessTask

RAW = "-raw"  # id suffix of the form that does not repeat the history at every turn
ASKED = "1-20:"  # the question of GuessTheNumber in few characters
GAME = -1  # sender of the game's own messages
BRACKETS = re.compile(r"\[[^\[\]]+\]")


def import_textarena() -> Any:
    """Import textarena.  Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise ConfigError(
            f"agent.env = textarena:...: {error}; pip install 'asyncrl[arena]'"
        ) from error


def make_game(name: str) -> Any:
    """Create a game by its id, in the form without repeated messages.  Raises ConfigError."""
    try:
        return import_textarena().make(name if name.endswith(RAW) else name + RAW)
    except ValueError as error:
        raise ConfigError(f"agent.env = textarena:{name}: {error}") from error


def find_game(name: str, players: int) -> Callable[[], Any]:
    """Return a function that creates a game for `players` players.

    The game is started once, so that an unknown game, or one for another number of players, fails
    here and not in every session.  Raises ConfigError."""
    game_class = ArenaDuel if players == 2 else ArenaGame
    make_game(name)
    try:
        with SeededRandom(0):
            game_class(name).reset(seed=0, options={})
    except Exception as error:
        hint = (
            "agent.opponent needs a two-player game; games with more players are not supported"
            if players == 2
            else "a two-player game needs agent.opponent"
        )
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"agent.env = textarena:{name} does not start with {players} "
            f"player{'s' * (players > 1)}: {type(error).__name__}: {problem}; {hint}"
        ) from error
    return partial(game_class, name)


class ArenaGame:
    """A single-player game with gymnasium's methods.

    A turn's observation is the game's messages since the last turn, without the policy's own text.
    The games sample from Python's global generator, so each session has its own state of it."""

    def __init__(self, name: str) -> None:
        self.game = make_game(name)

    def reset(self, *, seed: int, options: JsonObject) -> tuple[str, JsonObject]:
        """Start a game.  Raises the game's errors, for instance if it needs more players."""
        self.random = SeededRandom(seed)
        with self.random:
            self.game.reset(num_players=1, seed=seed)
            return self.take_observation(), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, JsonObject]:
        with self.random:
            done, _ = self.game.step(action=self.format_action(text))
            if not done:
                return self.take_observation(), 0.0, False, False, {}
            rewards, info = self.game.close()
            return (
                "",
                self.shape_reward(float(rewards[0])),
                True,
                False,
                {"parts": report_invalid_move(info, 0)},
            )

    def take_observation(self) -> str:
        """Return the game's messages since the last call."""
        player, messages = self.game.get_observation()
        return self.format_observation(
            [str(text) for sender, text, *_ in messages if sender != player]
        )

    def format_action(self, text: str) -> str:
        return text

    def format_observation(self, messages: list[str]) -> str:
        return "\n".join(messages)

    def shape_reward(self, reward: float) -> float:
        return reward


class ArenaDuel:
    """A two-player game of textarena as a game of games.py."""

    def __init__(self, name: str) -> None:
        self.game = make_game(name)

    def reset(self, *, seed: int, options: JsonObject) -> None:
        self.listed: dict[int, list[str]] = {}
        self.game.reset(num_players=2, seed=seed)

    def turn(self) -> tuple[int, str]:
        """Return the player to move and the messages since that player's last turn."""
        player, messages = self.game.get_observation()
        self.player = player
        texts = []
        for sender, text, *_ in messages:
            if sender == GAME:
                texts.append(str(text))
                self.listed[player] = BRACKETS.findall(text) or self.listed.get(player, [])
            elif sender != player:
                texts.append(f"[Player {sender}] {text}")
        return player, "\n".join(texts)

    def play(self, text: str) -> tuple[float, float] | None:
        done, _ = self.game.step(action=text)
        if not done:
            return None
        rewards, self.info = self.game.close()
        return float(rewards[0]), float(rewards[1])

    def moves(self) -> list[str]:
        """Return the last bracketed texts that the player received; most games list moves so."""
        return self.listed.get(self.player, [])

    def parts(self, player: int) -> Numbers:
        return report_invalid_move(self.info, player)


def report_invalid_move(info: dict[int, Any], player: int) -> Numbers:
    """Return the reward part `invalid`: 1 if the player's invalid move ended the game."""
    return {"invalid": float(bool((info.get(player) or {}).get("invalid_move")))}


class SeedPrompts(EndlessTask):
    """Prompts for environments that write their own; each prompt is a number."""

    name = "seeds"

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(index, str(index), split=split)
