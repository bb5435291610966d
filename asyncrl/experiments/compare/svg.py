"""Plots as SVG text, so that the page of a sweep is a small file without scripts."""

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
    """One line or set of points.

    joined: draw a line through the points in their order, otherwise the points alone.
    """

    name: str
    color: str
    points: list[tuple[float, float]]
    joined: bool


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers from low to high.

    They are multiples of 1, 2, 2.5 or 5 times a power of ten.

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
    """The scale of a picture of width x height pixels."""

    width: int
    height: int
    low: float
    high: float  # low and high of the x axis
    top: float  # the y axis runs from 0 to here

    def x_position(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (self.width - LEFT - RIGHT)

    def y_position(self, value: float) -> float:
        return self.height - UNDER - value / self.top * (self.height - UNDER - ABOVE)

    def draw_axes(self) -> list[str]:
        """Draw numbers below, and numbers at the left with a grid line each."""
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
    """Return axes that fit the data, from 0 upwards.

    Points without a line get room at both sides for their labels.
    """
    x_values = [value for _, _, points, _ in lines for value, _ in points] or [0.0, 1.0]
    y_values = [value for _, _, points, _ in lines for _, value in points] or [1.0]
    low = min(x_values)
    high = max(max(x_values), low + 1e-9)
    if not lines or not lines[0][3]:
        low, high = low - 0.06 * (high - low) - 0.01, high + 0.12 * (high - low) + 0.01
    return PlotAxes(width, height, low, high, max([*y_values, 1e-9]) * 1.08)


def draw_line(line: PlotLine, scale: PlotAxes) -> list[str]:
    """Draw one line or its points."""
    name, color, points, joined = line
    positions = [(scale.x_position(value), scale.y_position(height)) for value, height in points]
    title = f"<title>{escape(name)}</title>"
    if joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
        return [
            f"<polyline fill='none' stroke='{color}' stroke-width='1.8' points='{path}'>"
            f"{title}</polyline>"
        ]
    return [
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='{color}'>{title}</circle>"
        for x, y in positions
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
    """Draw a plot with axes that fit the data; y starts at 0.

    labels: texts beside points.
    """
    scale = axes(lines, width, height)
    parts = [
        f"<svg viewBox='0 0 {width} {height}' width='100%' role='img'><text x='{LEFT}' y='15' "
        f"style='font-weight:600'>{escape(title)}</text>"
    ]
    parts += scale.draw_axes()
    parts.append(
        f"<text x='{width / 2}' y='{height - 5}' text-anchor='middle'>{escape(x_name)}</text><text "
        f"x='{LEFT}' y='29'>{escape(y_name)}</text>"
    )
    for line in lines:
        parts += draw_line(line, scale)
    for label_x, label_y, text in labels:
        across, up = scale.x_position(label_x) + 7, scale.y_position(label_y) + 4
        parts.append(f"<text x='{across:.1f}' y='{up:.1f}'>{escape(text)}</text>")
    return "".join(parts) + "</svg>"
