"""A game of two players as an environment of one: the policy plays one side, its opponent the other
(`agent.opponent`).

```
 step(answer) --> the game --> the policy's turn: the next observation
                    ^    \\--> the opponent's: random, a function: its move --+
                    |    \\--> "self": an observation for whoever draws it    |
                    +---------------------------------------------------------+
```

A group plays one side of one game, as its samples are compared; which one says the parity of the
seed.  All that anybody draws from Python's global generator is the session's own (Luck)."""

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
    """A game of the players 0 and 1, one session's.  What a broken rule costs is the game's affair;
    what it raises fails the session.  A game that random moves are made in has also `moves`, the
    texts that may be played now; `parts(player)`, a number a name for the metrics, may be there.
    """

    def reset(self, *, seed: int, options: dict[str, Any]) -> Any:
        """Begin; options as an environment is given them."""

    def turn(self) -> tuple[int, str]:
        """Whose turn it is, and what that player is told, once before each move."""

    def play(self, text: str) -> Sequence[float] | None:
        """That player's move; the rewards of 0 and 1 when it was the last one."""


Opponent = Callable[[Any, str], Any]


class OpponentMove(NamedTuple):
    """A move that the opponent made in the environment, and what it was told before."""

    told: str
    move: str


class SeededRandom:
    """A state of Python's global generator: `with` it, one's own draws change nobody else's."""

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
    """agent.opponent = "random".  Raises ValueError where the game names no move."""
    moves = list(game.moves())
    if not moves:
        raise ValueError("the game names no move to choose from; give module:function")
    return str(random.choice(moves))


def text_opponent(function: Callable[[str], Any]) -> Opponent:
    """agent.opponent = "module:function": it reads all that its side has heard and said."""
    return lambda _game, text: function(text)


def check(kind: Any, name: str, opponents: Sequence[str]) -> None:
    """Whether the class of agent.env is what its opponents need.  Raises ConfigError.  What is no
    class, a function that makes one, is believed.
    """
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
    """A game and the opponent, None for "self": by gymnasium's signature, an environment of the
    policy.  `asked`: 0, the policy is to answer; else its opponent, in that game of those that were
    begun (a game that ends before the policy's first turn has nothing to train: another is begun).
    `told`: the moves that the opponent made in the last reset or step.
    """

    def __init__(self, game: Any, name: str, opponent: Opponent | None) -> None:
        self.game = game
        self.name = name
        self.opponent = opponent
        self.asked = self.dealt = 0
        self.told: list[OpponentMove] = []

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Raises what the game raises, and RuntimeError for the opponent's faults."""
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
        """The answer of whoever was asked.  Raises as `reset`."""
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
        """Begin a game: the session's, or another in the place of one without a turn of the
        policy's.
        """
        if self.dealt == DEALT:
            raise RuntimeError(f"{DEALT} games in a row ended before the policy's first turn")
        self.heard: list[str] = []  # what the opponent was told and said
        self.game.reset(seed=self.seed + 2 * self.dealt, options=self.options)
        self.dealt += 1

    def _advance(self, paid: Sequence[float] | None) -> tuple[str, Sequence[float] | None]:
        """From a move to whoever is to answer next, and what that player is told; or, with "", the
        rewards of a game that is over.  paid: what the move brought, None: the game goes on.
        """
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
        """The opponent's.  Raises RuntimeError where it raises or gives no text."""
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
