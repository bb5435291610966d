"""Two-player games as environments: the policy plays one side, `agent.opponent` the other.

A game between the players 0 and 1 has these methods in one session:

```
reset(*, seed, options)   start a game; options are those of an environment
turn()                    the player to move and its observation, once before each move
play(text)                make that player's move; at the end the rewards of players 0 and 1
moves()                   the list of legal moves, for a random opponent
parts(player)             optional: named numbers for the metrics
```

The game decides the reward of an invalid move; an exception fails the session.

```
 step(response) --> the game --> the policy's turn: the next observation
                      ^    \\--> turn of a random opponent or a function: its move -----+
                      |    \\--> turn of "self": an observation, the policy's response -|
                      +----------------------------------------------------------------+
```

All samples of a group play the same side of one game, because they are compared; the parity of the
seed chooses the side.  Each session has its own state of Python's global generator
(SeededRandom)."""

import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from asyncrl.config.agents import RANDOM
from asyncrl.contract.errors import ConfigError
from asyncrl.records.jsonl import JsonObject

NEEDS = ("reset", "turn", "play")  # methods of every game
DEALT = 100  # most games in a row that may end before the policy's first turn

Opponent = Callable[[Any, str], Any]


class OpponentMove(NamedTuple):
    """A move of the opponent and the observation before it."""

    observation: str
    move: str


class SeededRandom:
    """A separate state of Python's global random generator that is active inside `with`."""

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


def choose_random_move(game: Any, _text: str) -> str:
    """Choose the move of agent.opponent = "random".  Raises ValueError if there are none."""
    moves = list(game.moves())
    if not moves:
        raise ValueError("the game lists no legal moves; set agent.opponent to module:function")
    return str(random.choice(moves))


def make_text_opponent(function: Callable[[str], Any]) -> Opponent:
    """Wrap a function that receives all observations and moves of its side as an opponent."""
    return lambda _game, text: function(text)


def check(factory: Any, name: str, opponents: Sequence[str]) -> None:
    """Check that the class of agent.env has the methods that its opponents need.

    A function that creates the environment is not checked.  Raises ConfigError."""
    if not isinstance(factory, type):
        return
    if not opponents:
        if hasattr(factory, "turn") and not hasattr(factory, "step"):
            raise ConfigError(
                f"agent.env = {name} is a two-player game: set agent.opponent, which plays the "
                "other side"
            )
        return
    needs = (*NEEDS, "moves") if RANDOM in opponents else NEEDS
    missing = [method for method in needs if not hasattr(factory, method)]
    if missing:
        raise ConfigError(
            f"agent.env = {name} has no {missing[0]}: with an opponent it must be a two-player "
            f"game with {', '.join(needs)}; leave agent.opponent out for a single player"
        )


class GameMatch:
    """A game with its opponent (None: "self"), as an environment with gymnasium's methods.

    A game that ends before the policy's first turn trains nothing, so another one starts.

    asked: 0 if it is the policy's turn, otherwise the number of the game in which it is the
        opponent's turn.
    opponent_moves: the opponent's moves in the last reset or step."""

    def __init__(self, game: Any, name: str, opponent: Opponent | None) -> None:
        self.game = game
        self.name = name
        self.opponent = opponent
        self.asked = self.games_started = 0
        self.opponent_moves: list[OpponentMove] = []

    def reset(self, *, seed: int, options: JsonObject) -> tuple[str, JsonObject]:
        """Start a session.  Raises the game's errors, and RuntimeError for the opponent's."""
        self.seed, self.options = seed, options
        self.side = seed % 2
        self.has_started = False  # the policy has had a turn
        self.random = SeededRandom(seed)
        self.opponent_moves = []
        with self.random:
            self._start_game()
            observation, _ = self._advance(None)
        return observation, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, JsonObject]:
        """Play the response of the side whose turn it is.  Raises like `reset`."""
        self.opponent_moves = []
        with self.random:
            observation, rewards = self._advance(self.game.play(text))
            if rewards is None:
                return observation, 0.0, False, False, {}
            parts = self.game.parts(self.side) if hasattr(self.game, "parts") else {}
        own_reward, opponent_reward = float(rewards[self.side]), float(rewards[1 - self.side])
        parts = {"won": float(own_reward > opponent_reward), **parts}
        return "", own_reward, True, False, {"parts": parts}

    def close(self) -> None:
        if hasattr(self.game, "close"):
            self.game.close()

    def _start_game(self) -> None:
        """Start the session's game, or another one after a game without a turn of the policy."""
        if self.games_started == DEALT:
            raise RuntimeError(f"{DEALT} games in a row ended before the policy's first turn")
        self.opponent_history: list[str] = []  # the opponent's observations and moves
        self.game.reset(seed=self.seed + 2 * self.games_started, options=self.options)
        self.games_started += 1

    def _advance(self, rewards: Sequence[float] | None) -> tuple[str, Sequence[float] | None]:
        """Advance from a move to the next turn of the policy (or of "self").

        Return its observation and None, or "" and the rewards at the end of the game.

        rewards: the rewards after the move; None: the game continues."""
        while True:
            if rewards is not None:
                if self.has_started:
                    return "", rewards
                self._start_game()
            player, observation = self.game.turn()
            if player not in (0, 1):
                raise ValueError(
                    f"the game returned player {player}: a two-player game has players 0 and 1"
                )
            self.asked = 0 if player == self.side else self.games_started
            self.has_started = self.has_started or not self.asked
            if not self.asked or self.opponent is None:
                return observation, None
            rewards = self.game.play(self._play_opponent(observation))

    def _play_opponent(self, observation: str) -> str:
        """Return the opponent's move.  Raises RuntimeError if it raises or returns no text."""
        assert self.opponent is not None
        self.opponent_history.append(observation)
        try:
            move = self.opponent(self.game, "\n".join(self.opponent_history))
        except Exception as error:
            raise RuntimeError(
                f"the opponent {self.name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(move, str):
            raise RuntimeError(
                f"the opponent {self.name} returned {type(move).__name__}, not the text of a move"
            )
        self.opponent_history.append(move)
        self.opponent_moves.append(OpponentMove(observation, move))
        return move
