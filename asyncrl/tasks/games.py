"""Two-player games as environments: the policy plays one side, `agent.opponent` the other.

```
 step(answer) --> the game --> the policy's turn: the next observation
                    ^    \\--> the opponent's: random, a function: its move --+
                    |    \\--> "self": an observation, answered by the policy |
                    +---------------------------------------------------------+
```

A group plays one side of one game, because its samples are compared; the parity of the seed chooses
the side.  Each session has its own state of Python's global generator (SeededRandom)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from asyncrl.config.agents import RANDOM
from asyncrl.contract.errors import ConfigError

NEEDS = ("reset", "turn", "play")
DEALT = 100  # games in a row that may end before the policy's first turn


class TwoPlayerGame(Protocol):
    """Interface of a game between the players 0 and 1, in one session.

    The game decides what a broken rule costs; an exception fails the session.  For random moves it
    also needs `moves()`, the texts that may be played now.  Optional: `parts(player)`, named
    numbers for the metrics."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> Any:
        """Begin a game; options are those of an environment."""

    def turn(self) -> tuple[int, str]:
        """Return the player to move and its observation; called once before each move."""

    def play(self, text: str) -> Sequence[float] | None:
        """Make that player's move; return the rewards of 0 and 1 if it ended the game."""


Opponent = Callable[[Any, str], Any]


class OpponentMove(NamedTuple):
    """A move of the opponent in the environment, and the observation before it."""

    told: str
    move: str


class SeededRandom:
    """A separate state of Python's global random generator, active inside `with`."""

    def __init__(self, seed: int) -> None:
        outer = random.getstate()
        random.seed(seed)
        self.state = random.getstate()
        random.setstate(outer)

    def __enter__(self) -> None:
        self.outer = random.getstate()
        random.setstate(self.state)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.state = random.getstate()
        random.setstate(self.outer)


def random_move(game: Any, _text: str) -> str:
    """Play agent.opponent = "random".  Raises ValueError if the game names no move."""
    moves = list(game.moves())
    if not moves:
        raise ValueError("the game names no move to choose from; give module:function")
    return str(random.choice(moves))


def text_opponent(function: Callable[[str], Any]) -> Opponent:
    """Make the opponent of a function, which reads all observations and moves of its side."""
    return lambda _game, text: function(text)


def check(kind: Any, name: str, opponents: Sequence[str]) -> None:
    """Check that the class of agent.env has the methods that its opponents need.

    A function that makes the environment is not checked.  Raises ConfigError."""
    if not isinstance(kind, type):
        return
    if not opponents:
        if hasattr(kind, "turn") and not hasattr(kind, "step"):
            raise ConfigError(
                f"agent.env = {name} is a game of two: who plays the other side?  Give "
                "agent.opponent"
            )
        return
    needs = (*NEEDS, "moves") if RANDOM in opponents else NEEDS
    missing = [each for each in needs if not hasattr(kind, each)]
    if missing:
        raise ConfigError(
            f"agent.env = {name} has no {missing[0]}: with an opponent it is a game of two, which "
            f"has {', '.join(needs)}; leave agent.opponent out for one of a single player"
        )


class GameMatch:
    """A game with its opponent (None: "self"), as an environment with gymnasium's methods.

    A game that ends before the policy's first turn trains nothing, so another is begun.

    asked: 0 if the policy is to answer, otherwise the number of the game in which the opponent is.
    told: the opponent's moves in the last reset or step."""

    def __init__(self, game: Any, name: str, opponent: Opponent | None) -> None:
        self.game = game
        self.name = name
        self.opponent = opponent
        self.asked = self.dealt = 0
        self.told: list[OpponentMove] = []

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Begin a session.  Raises the game's errors, and RuntimeError for the opponent's."""
        self.seed, self.options = seed, options
        self.side = seed % 2
        self.begun = False  # the policy has had a turn
        self.luck = SeededRandom(seed)
        self.told = []
        with self.luck:
            self._start_game()
            said, _ = self._advance(None)
        return said, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the answer of the side that was asked.  Raises as `reset`."""
        self.told = []
        with self.luck:
            said, paid = self._advance(self.game.play(text))
            if paid is None:
                return said, 0.0, False, False, {}
            parts = self.game.parts(self.side) if hasattr(self.game, "parts") else {}
        own, other = float(paid[self.side]), float(paid[1 - self.side])
        return "", own, True, False, {"parts": {"won": float(own > other), **parts}}

    def close(self) -> None:
        if hasattr(self.game, "close"):
            self.game.close()

    def _start_game(self) -> None:
        """Begin the session's game, or another one after a game without a turn of the policy."""
        if self.dealt == DEALT:
            raise RuntimeError(f"{DEALT} games in a row ended before the policy's first turn")
        self.heard: list[str] = []  # the opponent's observations and moves
        self.game.reset(seed=self.seed + 2 * self.dealt, options=self.options)
        self.dealt += 1

    def _advance(self, paid: Sequence[float] | None) -> tuple[str, Sequence[float] | None]:
        """Advance from a move to the next answer of the policy (or of "self").

        Returns its observation and None, or "" and the rewards at the end of the game.  paid: the
        rewards after the move; None: the game continues."""
        while True:
            if paid is not None:
                if self.begun:
                    return "", paid
                self._start_game()
            player, said = self.game.turn()
            if player not in (0, 1):
                raise ValueError(f"it is the turn of player {player}: a game of two has 0 and 1")
            self.asked = 0 if player == self.side else self.dealt
            self.begun = self.begun or not self.asked
            if not self.asked or self.opponent is None:
                return said, None
            paid = self.game.play(self._opponent_move(said))

    def _opponent_move(self, said: str) -> str:
        """Return the opponent's move.  Raises RuntimeError if it raises or returns no text."""
        assert self.opponent is not None
        self.heard.append(said)
        try:
            move = self.opponent(self.game, "\n".join(self.heard))
        except Exception as error:
            raise RuntimeError(
                f"the opponent {self.name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(move, str):
            raise RuntimeError(
                f"the opponent {self.name} gave {type(move).__name__}, not the text of a move"
            )
        self.heard.append(move)
        self.told.append(OpponentMove(said, move))
        return move
