"""Metrics of a run as columns, read incrementally while the run goes on."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

Axis = Literal["step", "time", "tokens"]
AXES: tuple[Axis, ...] = ("step", "time", "tokens")
POINTS = 1200  # most points of a line that is sent to a page
_decoder = msgspec.json.Decoder(dict[str, Any])


class Column:
    """Values of one metric with the numbers of their rows, in arrays that grow by doubling."""

    def __init__(self) -> None:
        self.count = 0
        self._rows = np.empty(64, np.int64)
        self._values = np.empty(64, np.float64)

    def append(self, row: int, value: float) -> None:
        """Add the value of a row."""
        if self.count == len(self._rows):
            self._rows = np.resize(self._rows, 2 * self.count)
            self._values = np.resize(self._values, 2 * self.count)
        self._rows[self.count] = row
        self._values[self.count] = value
        self.count += 1

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the rows, int64 [count]."""
        return self._rows[: self.count]

    @property
    def values(self) -> np.ndarray:
        """Values, float64 [count]."""
        return self._values[: self.count]


@dataclass
class Series:
    """metrics.jsonl of one run. `refresh` reads what was appended since the last call.

    A file that was replaced or has shrunk (a resumed run drops the rows of batches that it trains
    again) is read from its start.
    """

    path: Path
    columns: dict[str, Column] = field(default_factory=dict)
    axes: dict[Axis, Column] = field(default_factory=lambda: {axis: Column() for axis in AXES})
    damaged: int = 0  # lines that were left out
    _offset: int = 0
    _inode: int = 0

    def refresh(self) -> bool:
        """Read new rows; return whether there were any. A missing file is an empty one."""
        try:
            file = self.path.open("rb")
        except OSError:
            return self._forget()
        with file:
            status = os.fstat(file.fileno())
            changed = False
            if status.st_ino != self._inode or status.st_size < self._offset:
                changed = self._forget()
                self._inode = status.st_ino
            file.seek(self._offset)
            data = file.read(status.st_size - self._offset)
        end = data.rfind(b"\n") + 1  # a line that is still being written waits
        self._offset += end
        for line in data[:end].splitlines():
            self._add(line)
        return changed or end > 0

    @property
    def rows(self) -> int:
        """Rows read so far."""
        return self.axes["step"].count

    def _forget(self) -> bool:
        had = self.rows > 0
        self.columns.clear()
        self.axes = {axis: Column() for axis in AXES}
        self._offset = self.damaged = self._inode = 0
        return had

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            row = _decoder.decode(line)
            step, seconds = int(row.pop("step")), float(row.pop("t", 0.0))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            self.damaged += 1
            return
        number = self.rows
        tokens = self.axes["tokens"]
        before = float(tokens.values[-1]) if number else 0.0
        rate, took = (
            row.get(name, 0.0) for name in ("throughput/learner_tokens_per_s", "time/step")
        )
        trained = float(rate) * float(took) if _is_number(rate) and _is_number(took) else 0.0
        tokens.append(number, before + trained)
        self.axes["step"].append(number, step)
        self.axes["time"].append(number, seconds)
        for name, value in row.items():
            if _is_number(value):
                self.columns.setdefault(name, Column()).append(number, float(value))

    @property
    def names(self) -> list[str]:
        """Names of all metrics that were read, sorted."""
        return sorted(self.columns)

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric, None where there is none."""
        values = self.values(name)
        return float(values[-1]) if len(values) else None

    def values(self, name: str) -> np.ndarray:
        """Return all values of a metric, float64 [n]."""
        column = self.columns.get(name)
        return np.zeros(0) if column is None else column.values

    def line(
        self, name: str, axis: Axis = "step", smooth: float = 0.0, points: int = POINTS
    ) -> tuple[list[float], list[float]]:
        """Return (x, y) of a metric, with at most `points` points.

        Args:
            axis: the x axis: batches, seconds of the run, or trained tokens.
            smooth: weight of the past in an exponential moving average, 0 to 0.99.
        """
        column = self.columns.get(name)
        if column is None:
            return [], []
        across = self.axes[axis].values[column.rows]
        kept_x, kept_y = downsample(across, smoothed(column.values, smooth), points)
        return kept_x.tolist(), kept_y.tolist()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def smoothed(values: np.ndarray, share: float) -> np.ndarray:
    """Return the exponential moving average of values [n], corrected for its start.

    >>> smoothed(np.array([1.0, 1.0, 3.0]), 0.0).tolist()
    [1.0, 1.0, 3.0]
    >>> smoothed(np.array([1.0, 1.0, 1.0]), 0.9).round(6).tolist()
    [1.0, 1.0, 1.0]
    """
    if share <= 0 or len(values) < 2:
        return values
    from scipy.signal import lfilter

    weights = lfilter([1 - share], [1, -share], np.ones_like(values))
    means: np.ndarray = lfilter([1 - share], [1, -share], values) / weights
    return means


def downsample(
    across: np.ndarray, values: np.ndarray, points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a line to at most `points` points that keep its extremes.

    Each bucket of neighbors keeps its smallest and its largest value, in their order, so that a
    spike of one step stays visible.

    Args:
        across: float64 [n], the x axis.
        values: float64 [n].

    >>> steps = np.arange(1000.0)
    >>> kept, values = downsample(steps, np.where(steps == 500, 9.0, 1.0), 100)
    >>> len(kept) <= 100, float(values.max())
    (True, 9.0)
    """
    if len(across) <= points:
        return across, values
    size = -(-len(across) // max(points // 2, 1))
    whole = len(across) // size * size
    buckets = values[:whole].reshape(-1, size)
    first = np.arange(0, whole, size)
    ends = np.stack([first + buckets.argmin(1), first + buckets.argmax(1)])
    last = [len(across) - 1] if whole < len(across) else []
    chosen = np.unique(np.concatenate([ends.ravel(), np.asarray(last, np.int64)]))
    return across[chosen], values[chosen]
