"""Nim, the smallest two-player game: three heaps of up to three stones; the last stone wins.

```
312:   observation   heaps a, b and c
b1     move          one stone of heap b
102:   observation   after the opponent's move a2
```

An invalid move loses.  `NimGame` is the game, `NimTask` has its prompts (the initial heaps) and its
warm start, and `best_move` is a perfect opponent."""

import random

from asyncrl.contract.messages import Prompt
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks.calc import END
from asyncrl.tasks.synthetic import Demonstrations, PlayedTask

HEAPS = "abc"
MOST = 3  # most stones of a heap


def list_legal_moves(heaps: list[int]) -> list[str]:
    """List every legal move.

    >>> list_legal_moves([2, 0, 1])
    ['a1', 'a2', 'c1']
    """
    return [f"{n}{k}" for n, heap in zip(HEAPS, heaps, strict=True) for k in range(1, heap + 1)]


def apply_move(heaps: list[int], move: str) -> list[int]:
    """Return the heaps after a legal move."""
    result = list(heaps)
    result[HEAPS.index(move[0])] -= int(move[1])
    return result


def best_move(text: str) -> str:
    """Return a winning move, which leaves heaps whose exclusive or is 0, if one exists.

    Otherwise return one stone of the first heap that has any.  text: ends with the player's
    observation.

    >>> best_move("230:"), best_move("012:"), best_move("312:")
    ('b1', 'c1', 'a1')
    """
    heaps = [int(stones) for stones in text[-len(HEAPS) - 1 : -1]]
    moves = list_legal_moves(heaps)
    for move in moves:
        remaining = apply_move(heaps, move)
        if not remaining[0] ^ remaining[1] ^ remaining[2]:
            return move
    return moves[0]


class NimGame:
    """Nim as a game of games.py; player 0 starts."""

    def reset(self, *, seed: int, options: JsonObject) -> None:
        self.heaps = [int(stones) for stones in options["prompt"].text[:-1]]
        self.player = 0

    def turn(self) -> tuple[int, str]:
        return self.player, f"{''.join(map(str, self.heaps))}:"

    def play(self, text: str) -> tuple[float, float] | None:
        player, self.player = self.player, 1 - self.player
        if text in list_legal_moves(self.heaps):
            self.heaps = apply_move(self.heaps, text)
            if any(self.heaps):
                return None
            winner = player
        else:
            winner = 1 - player
        return float(winner == 0), float(winner == 1)

    def moves(self) -> list[str]:
        return list_legal_moves(self.heaps)


class NimTask(PlayedTask):
    """Prompts and warm start of Nim.

    A prompt is the initial heaps.  All splits share the 27 prompts and differ in the opponent's
    random moves."""

    name = "nim"
    symbols = "0123abc:"
    steps = 200

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        rng = random.Random(f"{self.name}:{split}:{seed if split == 'train' else 0}:{index}")
        heaps = "".join(str(rng.randint(1, MOST)) for _ in HEAPS)
        return Prompt(index, f"{heaps}:", split=split)

    def _demonstrate_session(self, rng: random.Random) -> Demonstrations:
        """Return random turns as (text before, move).

        One of ten moves is illegal, so that RL has something to learn."""
        heaps = [rng.randint(1, MOST) for _ in HEAPS]
        if rng.random() < 0.5:  # the opponent starts
            heaps = apply_move(heaps, rng.choice(list_legal_moves(heaps)))
        text = ""
        turns: Demonstrations = []
        while any(heaps):
            text += f"{''.join(map(str, heaps))}:"
            moves = list_legal_moves(heaps)
            if rng.random() < 0.1:
                all_moves = [*list_legal_moves([MOST] * len(HEAPS)), HEAPS[0]]
                turns.append((text, rng.choice([move for move in all_moves if move not in moves])))
                break
            turns.append((text, rng.choice(moves)))
            heaps = apply_move(heaps, turns[-1][1])
            text += turns[-1][1] + END
            if any(heaps):
                heaps = apply_move(heaps, rng.choice(list_legal_moves(heaps)))
        return turns


# the names in configs of older runs
Nim = NimGame
best = best_move
