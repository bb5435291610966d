"""A task with images: count the red, green or blue shapes in a picture.

```
<image>g=   3       the prompt's picture has three green shapes among others
```

A picture has 3 x 3 cells of 6 pixels, each empty or with a square or a disc in one of three colors.
A problem is the color to count and a letter for each cell: `.` is empty, `r` a red disc, `R` a red
square."""

import random
from functools import cache

from asyncrl.contract.blobs import images
from asyncrl.tasks.synthetic import SyntheticTask

CELLS = 3  # per side of a picture
CELL = 6  # pixels per side of a cell
SIDE = CELLS * CELL
COLORS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 220)}
RIGHT = 0.5  # share of correct demonstrations
BACKGROUND = (128, 128, 128)
DISC = ("......", "..##..", ".####.", ".####.", "..##..", "......")
SQUARE = ("......", ".####.", ".####.", ".####.", ".####.", "......")


class CountTask(SyntheticTask):
    """`<image>g=` -> `3`; out-of-distribution pictures have more shapes of other colors."""

    name = "count"
    symbols = "rgb=0123456789"
    steps = 200

    def draw(self, rng: random.Random, split: str) -> str:
        color = rng.choice("rgb")
        count = rng.randint(1, 4)
        other_count = rng.randint(4, 5) if split == "ood" else rng.randint(0, 3)
        cells = [color] * count + rng.choices("rgb".replace(color, ""), k=other_count)
        cells = [rng.choice((cell, cell.upper())) for cell in cells]
        cells += ["."] * (CELLS * CELLS - len(cells))
        rng.shuffle(cells)
        return color + "".join(cells)

    def solve(self, problem: str) -> str:
        return str(problem[1:].lower().count(problem[0]))

    def format_text(self, problem: str) -> str:
        return f"{images.MARKER}{problem[0]}="

    def draw_images(self, problem: str) -> list[bytes]:
        cells = problem[1:]  # a letter each
        rows = [
            b"".join(_draw_cell(letter)[row] for letter in cells[first : first + CELLS])
            for first in range(0, len(cells), CELLS)
            for row in range(CELL)
        ]
        return [images.encode_png(SIDE, SIDE, b"".join(rows))]

    def spoil(self, problem: str, answer: str, rng: random.Random) -> str:
        """Miscount by one in half of the cases."""
        return answer if rng.random() < RIGHT else str(int(answer) + rng.choice((-1, 1)))


@cache
def _draw_cell(letter: str) -> list[bytes]:
    """Return the rows of a cell as RGB bytes."""
    shape = SQUARE if letter.isupper() else DISC
    color = COLORS.get(letter.lower(), BACKGROUND)
    return [b"".join(bytes(color if dot == "#" else BACKGROUND) for dot in line) for line in shape]
