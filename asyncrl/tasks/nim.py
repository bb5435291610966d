"""Nim, the smallest two-player game: three heaps of up to three stones; the last stone wins.

```
312:   told    heaps a, b and c
b1     moved   one stone of heap b
102:   told    after the opponent's c1 and a2
```

A move that is none loses.  `NimGame` is the game, `NimTask` its prompts (the heaps at the
beginning)
and its warm start, `best_move` who never errs."""

from __future__ import annotations

import random
from typing import Any

from asyncrl.config.agents import RANDOM
from asyncrl.contract.messages import Prompt
from asyncrl.tasks.calc import END
from asyncrl.tasks.games import GameMatch, random_move
from asyncrl.tasks.synthetic import FIXED, SyntheticTask

HEAPS = "abc"
MOST = 3  # stones of a heap


def legal_moves(heaps: list[int]) -> list[str]:
    """List every legal move.

    >>> legal_moves([2, 0, 1])
    ['a1', 'a2', 'c1']
    """
    return [f"{n}{k}" for n, heap in zip(HEAPS, heaps, strict=True) for k in range(1, heap + 1)]


def apply_move(heaps: list[int], move: str) -> list[int]:
    """Return the heaps after a legal move."""
    out = list(heaps)
    out[HEAPS.index(move[0])] -= int(move[1])
    return out


def best_move(text: str) -> str:
    """Return a winning move, which leaves heaps whose exclusive or is 0, if there is one.

    Otherwise one stone of the first heap that has any.  text: ends with the player's observation.

    >>> best_move("230:"), best_move("012:"), best_move("312:")
    ('b1', 'c1', 'a1')
    """
    heaps = [int(stones) for stones in text[-len(HEAPS) - 1 : -1]]
    moves = legal_moves(heaps)
    for move in moves:
        left = apply_move(heaps, move)
        if not left[0] ^ left[1] ^ left[2]:
            return move
    return moves[0]


class NimGame:
    """Nim as a TwoPlayerGame; player 0 begins."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> None:
        self.heaps = [int(stones) for stones in options["prompt"].text[:-1]]
        self.player = 0

    def turn(self) -> tuple[int, str]:
        return self.player, f"{''.join(map(str, self.heaps))}:"

    def play(self, text: str) -> tuple[float, float] | None:
        player, self.player = self.player, 1 - self.player
        if text in legal_moves(self.heaps):
            self.heaps = apply_move(self.heaps, text)
            if any(self.heaps):
                return None
            winner = player
        else:
            winner = 1 - player
        return float(winner == 0), float(winner == 1)

    def moves(self) -> list[str]:
        return legal_moves(self.heaps)


class NimTask(SyntheticTask):
    """Prompts and warm start of Nim.

    A prompt is the initial heaps.  All splits share its 27 prompts and differ in the opponent's
    random moves."""

    name = "nim"
    symbols = "0123abc:"
    steps = 200
    turns = 6  # of one player
    longest = 4  # tokens of a move, its end included

    def environment(self) -> GameMatch:
        """Return a match against random moves."""
        return GameMatch(NimGame(), RANDOM, random_move)

    def prompt(self, split: str, index: int, seed: int) -> Prompt:
        rng = random.Random(f"{self.name}:{split}:{seed if split == 'train' else 0}:{index}")
        heaps = "".join(str(rng.randint(1, MOST)) for _ in HEAPS)
        return Prompt(index, f"{heaps}:", split=split)

    def size(self, split: str) -> int | None:
        return None if split == "train" else FIXED

    def reward(self, prompt: Prompt, text: str) -> float:
        raise ValueError("task.name = nim has no reward of its own: the environment pays")

    def demonstrations(self, number: int, seed: int) -> list[tuple[str, str]]:
        """Return random turns as (text before, move).

        One move of ten is illegal, so that something is left to learn."""
        rng = random.Random(f"{self.name}:demo:{seed}")
        out: list[tuple[str, str]] = []
        while len(out) < number:
            out += self._session(rng)
        return out[:number]

    def _session(self, rng: random.Random) -> list[tuple[str, str]]:
        heaps = [rng.randint(1, MOST) for _ in HEAPS]
        if rng.random() < 0.5:  # the opponent begins
            heaps = apply_move(heaps, rng.choice(legal_moves(heaps)))
        before = ""
        turns: list[tuple[str, str]] = []
        while any(heaps):
            before += f"{''.join(map(str, heaps))}:"
            moves = legal_moves(heaps)
            if rng.random() < 0.1:
                every = [*legal_moves([MOST] * len(HEAPS)), HEAPS[0]]
                turns.append((before, rng.choice([move for move in every if move not in moves])))
                break
            turns.append((before, rng.choice(moves)))
            heaps = apply_move(heaps, turns[-1][1])
            before += turns[-1][1] + END
            if any(heaps):
                heaps = apply_move(heaps, rng.choice(legal_moves(heaps)))
        return turns


# their names in configs of older runs
Nim = NimGame
best = best_move
