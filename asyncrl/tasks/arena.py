"""textarena's games of one player or two as environments.

`agent.env = "textarena:GuessTheNumber-v0"` chooses any game by its id, with `task.name = "seeds"`:
the game gives the prompts, and a prompt of the task is only a seed.  A two-player game is an
`ArenaDuel`, whose opponent is in games.py.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks.games import SeededRandom
from asyncrl.tasks.synthetic import FIXED

RAW = "-raw"  # a game's own messages, each once: its other forms repeat the history at every turn
ASKED = "1-20:"  # the question of GuessTheNumber in few characters
GAME = -1  # who speaks, where it is the game itself
BRACKETS = re.compile(r"\[[^\[\]]+\]")


def games() -> Any:
    """Import textarena.  Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise ConfigError(
            f"agent.env = textarena:...: {error}; pip install 'asyncrl[arena]'"
        ) from error


def make_game(name: str) -> Any:
    """Make a game by its id, in the form without repeated messages.  Raises ConfigError."""
    try:
        return games().make(name if name.endswith(RAW) else name + RAW)
    except ValueError as error:
        raise ConfigError(f"agent.env = textarena:{name}: {error}") from error


def find_game(name: str, players: int) -> Callable[[], Any]:
    """Return a function that makes a game for `players` players.

    The game is begun once, so that an unknown game, or one for other players, fails here and not in
    every session.  Raises ConfigError."""
    kind = ArenaDuel if players == 2 else ArenaGame
    make_game(name)
    try:
        with SeededRandom(0):
            kind(name).reset(seed=0, options={})
    except Exception as error:
        hint = (
            "agent.opponent is for games of two, and of more none is played here"
            if players == 2
            else "a game of two needs agent.opponent"
        )
        said = " ".join(str(error).split())
        raise ConfigError(
            f"agent.env = textarena:{name} cannot be begun with {players} "
            f"player{'s' * (players > 1)}: {type(error).__name__}: {said}; {hint}"
        ) from error
    return partial(kind, name)


class ArenaGame:
    """A single-player game with gymnasium's methods.

    A turn's observation is the game's messages since the last turn, without the policy's own words.
    The games sample from Python's global generator, so each session keeps its own state of it."""

    def __init__(self, name: str) -> None:
        self.game = make_game(name)

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin a game.  Raises the game's errors, for instance if it needs more players."""
        self.luck = SeededRandom(seed)
        with self.luck:
            self.game.reset(num_players=1, seed=seed)
            return self.take_observation(), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self.luck:
            done, _ = self.game.step(action=self.action(text))
            if not done:
                return self.take_observation(), 0.0, False, False, {}
            rewards, info = self.game.close()
            return (
                "",
                self.shape_reward(float(rewards[0])),
                True,
                False,
                {"parts": invalid_move_part(info, 0)},
            )

    def take_observation(self) -> str:
        """Return the game's messages since the last call."""
        player, messages = self.game.get_observation()
        return self.observation_text(
            [str(text) for sender, text, *_ in messages if sender != player]
        )

    def action(self, text: str) -> str:
        return text

    def observation_text(self, messages: list[str]) -> str:
        return "\n".join(messages)

    def shape_reward(self, reward: float) -> float:
        return reward


class ArenaDuel:
    """A two-player game of textarena as a TwoPlayerGame."""

    def __init__(self, name: str) -> None:
        self.game = make_game(name)

    def reset(self, *, seed: int, options: dict[str, Any]) -> None:
        self.listed: dict[int, list[str]] = {}
        self.game.reset(num_players=2, seed=seed)

    def turn(self) -> tuple[int, str]:
        """Return the player to move and the messages since that player's last turn."""
        player, messages = self.game.get_observation()
        self.player = player
        lines = []
        for sender, text, *_ in messages:
            if sender == GAME:
                lines.append(str(text))
                self.listed[player] = BRACKETS.findall(text) or self.listed.get(player, [])
            elif sender != player:
                lines.append(f"[Player {sender}] {text}")
        return player, "\n".join(lines)

    def play(self, text: str) -> tuple[float, float] | None:
        done, _ = self.game.step(action=text)
        if not done:
            return None
        rewards, self.info = self.game.close()
        return float(rewards[0]), float(rewards[1])

    def moves(self) -> list[str]:
        """Return the last bracketed texts that the player saw; most games name moves so."""
        return self.listed.get(self.player, [])

    def parts(self, player: int) -> dict[str, float]:
        return invalid_move_part(self.info, player)


def invalid_move_part(info: dict[int, Any], player: int) -> dict[str, float]:
    """Return a reward part that says whether the player's broken rules ended the game."""
    return {"invalid": float(bool((info.get(player) or {}).get("invalid_move")))}


class SeedPrompts:
    """Prompts for environments that give their own; each is a number."""

    name = "seeds"

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        return Prompt(index, str(index), split=split)

    def size(self, split: str) -> int | None:
        return None if split == "train" else FIXED

    def reward(self, prompt: Prompt, text: str) -> float:
        raise ValueError("task.name = seeds has no reward of its own: the environment pays")
