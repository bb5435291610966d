"""Counting shapes in a picture, a task with images: how many red, green or blue ones are there?

```
<image>g=   3       the prompt's picture has three green shapes among others
```

A picture has 3 x 3 cells of 6 pixels, each empty or with a square or a disc in one of three colors.
A problem is the color that is asked for and a letter for each cell: `.` is empty, `r` a red disc,
`R` a red square."""

from __future__ import annotations

import random
from functools import cache

from asyncrl.contract.blobs import images
from asyncrl.tasks.synthetic import SyntheticTask

CELLS = 3  # on a side
CELL = 6  # pixels on a side of a cell
SIDE = CELLS * CELL
COLORS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 220)}
RIGHT = 0.5  # share of the demonstrations that count right
BACKGROUND = (128, 128, 128)
DISC = ("......", "..##..", ".####.", ".####.", "..##..", "......")
SQUARE = ("......", ".####.", ".####.", ".####.", ".####.", "......")


class CountTask(SyntheticTask):
    """`<image>g=` -> `3`; the out-of-distribution pictures have more shapes of other colors."""

    name = "count"
    symbols = "rgb=0123456789"
    steps = 200

    def draw(self, rng: random.Random, split: str) -> str:
        asked = rng.choice("rgb")
        wanted = rng.randint(1, 4)
        others = rng.randint(4, 5) if split == "ood" else rng.randint(0, 3)
        cells = [asked] * wanted + rng.choices("rgb".replace(asked, ""), k=others)
        cells = [rng.choice((cell, cell.upper())) for cell in cells]
        cells += ["."] * (CELLS * CELLS - len(cells))
        rng.shuffle(cells)
        return asked + "".join(cells)

    def solve(self, problem: str) -> str:
        return str(problem[1:].lower().count(problem[0]))

    def text(self, problem: str) -> str:
        return f"{images.MARKER}{problem[0]}="

    def images(self, problem: str) -> list[bytes]:
        return [picture(problem[1:])]

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        """Miscount by one in half of the cases."""
        return answer if rng.random() < RIGHT else str(int(answer) + rng.choice((-1, 1)))


@cache
def _cell_rows(letter: str) -> list[bytes]:
    """Return the rows of a cell, RGB bytes."""
    shape = SQUARE if letter.isupper() else DISC
    color = COLORS.get(letter.lower(), BACKGROUND)
    return [b"".join(bytes(color if dot == "#" else BACKGROUND) for dot in row) for row in shape]


def picture(cells: str) -> bytes:
    """Return the blob of the picture of a problem's cells, a letter each."""
    rows = [
        b"".join(_cell_rows(letter)[row] for letter in cells[first : first + CELLS])
        for first in range(0, len(cells), CELLS)
        for row in range(CELL)
    ]
    return images.encode_png(SIDE, SIDE, b"".join(rows))
