"""A plot as SVG text, without a library: a page of a sweep is a small file without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# room around the axes, pixels
LEFT = 48
RIGHT = 12
ABOVE = 26
UNDER = 36


class PlotLine(NamedTuple):
    """joined: a line through the points, in this order; otherwise the points alone."""

    name: str
    colour: str
    points: list[tuple[float, float]]
    joined: bool


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most `most`: multiples of 1, 2, 2.5 or 5 times a power of
    ten.

    >>> ticks(0, 0.81), ticks(0, 1.08)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    >>> ticks(-3, 130)
    [0.0, 25.0, 50.0, 75.0, 100.0, 125.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(
        factor * power
        for factor in (1, 2, 2.5, 5, 10, 20)
        if math.floor(high / (factor * power)) - math.ceil(low / (factor * power)) < most
    )
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


class PlotAxes(NamedTuple):
    """Where values lie on a picture of width x height pixels."""

    width: int
    height: int
    low: float
    high: float  # low and high of what runs across
    top: float  # upwards from 0 to here

    def x_position(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (self.width - LEFT - RIGHT)

    def y_position(self, value: float) -> float:
        return self.height - UNDER - value / self.top * (self.height - UNDER - ABOVE)

    def draw_axes(self) -> list[str]:
        """Numbers below, numbers at the left with a line across for each."""
        below = [
            f"<text x='{self.x_position(value):.1f}' y='{self.height - 20}' "
            f"text-anchor='middle'>{value:g}</text>"
            for value in ticks(self.low, self.high)
        ]
        beside = [
            f"<text x='43' y='{self.y_position(value) + 4:.1f}' text-anchor='end'>{value:g}</text>"
            f"<line x1='{LEFT}' x2='{self.width - RIGHT}' y1='{self.y_position(value):.1f}' "
            f"y2='{self.y_position(value):.1f}' stroke='#e5e7eb'/>"
            for value in ticks(0.0, self.top)
        ]
        return below + beside


def axes(lines: Sequence[PlotLine], width: int, height: int) -> PlotAxes:
    """From the data; upwards from 0.  Points alone get room at both sides, for their labels."""
    across = [value for _, _, points, _ in lines for value, _ in points] or [0.0, 1.0]
    up = [value for _, _, points, _ in lines for _, value in points] or [1.0]
    low = min(across)
    high = max(max(across), low + 1e-9)
    if not lines or not lines[0][3]:
        low, high = low - 0.06 * (high - low) - 0.01, high + 0.12 * (high - low) + 0.01
    return PlotAxes(width, height, low, high, max([*up, 1e-9]) * 1.08)


def draw_line(line: PlotLine, scale: PlotAxes) -> list[str]:
    """One line, or its points."""
    name, colour, points, joined = line
    at = [(scale.x_position(value), scale.y_position(height)) for value, height in points]
    title = f"<title>{escape(name)}</title>"
    if joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        return [
            f"<polyline fill='none' stroke='{colour}' stroke-width='1.8' points='{path}'>"
            f"{title}</polyline>"
        ]
    return [
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='{colour}'>{title}</circle>" for x, y in at
    ]


def svg(
    title: str,
    lines: Sequence[PlotLine],
    x_name: str,
    y_name: str,
    *,
    width: int = 560,
    height: int = 260,
    labels: Sequence[tuple[float, float, str]] = (),
) -> str:
    """A plot with axes from the data; y from 0.  labels: texts beside points."""
    scale = axes(lines, width, height)
    out = [
        f"<svg viewBox='0 0 {width} {height}' width='100%' role='img'><text x='{LEFT}' y='15' "
        f"style='font-weight:600'>{escape(title)}</text>"
    ]
    out += scale.draw_axes()
    out.append(
        f"<text x='{width / 2}' y='{height - 5}' text-anchor='middle'>{escape(x_name)}</text><text "
        f"x='{LEFT}' y='29'>{escape(y_name)}</text>"
    )
    for line in lines:
        out += draw_line(line, scale)
    for across, up, text in labels:
        out.append(
            f"<text x='{scale.x_position(across) + 7:.1f}' y='{scale.y_position(up) + 4:.1f}'>"
            f"{escape(text)}</text>"
        )
    return "".join(out) + "</svg>"
