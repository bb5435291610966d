"""Metrics of a run as columns, read incrementally while the run goes on."""

import contextlib
import itertools
import math
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy import ndarray

from asyncrl.contract.messages import Numbers
from asyncrl.records import health_checks, jsonl, metrics
from asyncrl.records.jsonl import JsonObject

Axis = Literal["step", "time", "tokens", "batch"]  # batch: with the place of a step in it
AXES: tuple[Axis, ...] = ("step", "time", "tokens")
TRAINED = "reward/mean"  # in every row of a batch, in no row of an evaluation
POINTS = 1200  # most points of a line that is sent to a page
_decoder = msgspec.json.Decoder(JsonObject)


class Column:
    """Values of one metric with the numbers of their rows, in arrays that grow by doubling."""

    def __init__(self) -> None:
        self.count = 0
        self._rows = np.empty(64, np.int64)
        self._values = np.empty(64, np.float64)

    def extend(self, rows: ndarray, values: ndarray) -> None:
        """Add values [n] with the numbers of their rows [n]."""
        count = self.count + len(values)
        if count > len(self._rows):
            self._rows = np.resize(self._rows, 2 * count)
            self._values = np.resize(self._values, 2 * count)
        self._rows[self.count : count] = rows
        self._values[self.count : count] = values
        self.count = count

    @property
    def rows(self) -> ndarray:
        """Numbers of the rows, int64 [count]."""
        return self._rows[: self.count]

    @property
    def values(self) -> ndarray:
        """Values, float64 [count]."""
        return self._values[: self.count]


@dataclass
class Series:
    """metrics.jsonl of a run; `refresh` reads the rows that were appended since the last call.

    A file that was replaced or has shrunk is read from its start, as is a file whose steps go back:
    a resumed run repeats some batches, and only the last row of a step counts.
    """

    path: Path
    columns: dict[str, Column] = field(default_factory=dict)
    axes: dict[Axis, Column] = field(default_factory=lambda: {axis: Column() for axis in AXES})
    damaged: int = 0  # number of skipped lines
    _newest: int = -1  # step of training

    def __post_init__(self) -> None:
        self.file = jsonl.GrowingFile(self.path)

    def refresh(self) -> None:
        """Read new rows. A missing file counts as empty."""
        data = self.file.read_new()
        if self.file.begins:
            self._forget()
        rows = self._decode_lines(data)
        trained = [self._newest, *(row["step"] for row in rows if TRAINED in row)]
        if any(next_step <= step for step, next_step in itertools.pairwise(trained)):
            self._forget()
            rows = metrics.select_valid_rows(jsonl.read(self.path))
        self._newest = max(trained)
        self._add(rows)

    @property
    def rows(self) -> int:
        """The number of rows read so far."""
        return self.axes["step"].count

    def _forget(self) -> None:
        self.columns.clear()
        self.axes = {axis: Column() for axis in AXES}
        self.damaged, self._newest = 0, -1

    def _decode_lines(self, data: bytes) -> list[JsonObject]:
        """Return the rows of complete lines; damaged lines are skipped and counted."""
        rows = []
        for line in filter(bytes.strip, data.splitlines()):
            try:
                row = _decoder.decode(line)
                row["step"], row["t"] = int(row["step"]), float(row.get("t", 0.0))
                rows.append(row)
            except (msgspec.DecodeError, KeyError, TypeError, ValueError):
                self.damaged += 1
        return rows

    def _add(self, rows: list[JsonObject]) -> None:
        """Append rows column by column."""
        if not rows:
            return
        first = self.rows
        columns = _build_columns(rows)
        rate, seconds = (
            _fill_dense(columns.get(name), len(rows))
            for name in ("throughput/learner_tokens_per_s", "time/step")
        )
        numbers = np.arange(first, first + len(rows))
        tokens = self.axes["tokens"]
        tokens_before = float(tokens.values[-1]) if first else 0.0
        tokens.extend(numbers, tokens_before + np.cumsum(rate * seconds))
        self.axes["time"].extend(numbers, _fill_dense(columns.pop("t", None), len(rows)))
        self.axes["step"].extend(numbers, _fill_dense(columns.pop("step", None), len(rows)))
        for recorded_name in sorted(columns):
            positions, values = columns[recorded_name]
            name = metrics.OLD_NAMES.get(recorded_name, recorded_name)
            self.columns.setdefault(name, Column()).extend(first + positions, values)

    def get_latest(self, name: str) -> float | None:
        """Return the newest value of a metric, or None."""
        values = self.get_values(name)
        return float(values[-1]) if len(values) else None

    def get_values(self, name: str) -> ndarray:
        """Return all values of a metric, float64 [n]."""
        column = self.columns.get(name)
        return np.zeros(0) if column is None else column.values

    def align(self, name: str, missing: float = math.nan) -> ndarray:
        """Return a metric's value in each row, float64 [rows]; `missing` in rows without it."""
        column = self.columns.get(name, Column())
        return _fill_dense((column.rows, column.values), self.rows, missing)

    def read_latest(self) -> Numbers:
        """Return the newest value of each metric."""
        return {name: float(column.values[-1]) for name, column in self.columns.items()}

    def select_rows(self, name: str) -> list[Numbers]:
        """Return the rows that have a metric: their steps and their metrics of its family."""
        column = self.columns.get(name, Column())
        steps = self.axes["step"].values[column.rows].tolist()
        rows = {row: {"step": x} for row, x in zip(column.rows.tolist(), steps, strict=True)}
        for other, values in self.columns.items():
            if other.partition("/")[0] == name.partition("/")[0]:
                for row, value in zip(values.rows.tolist(), values.values.tolist(), strict=True):
                    if row in rows:
                        rows[row][other] = value
        return list(rows.values())

    def list_intervals(self, name: str) -> list[tuple[float, float]]:
        """Return (n, half the 95 % interval over prompts) of each evaluation."""
        values, counts = self.get_values(name), self.get_values(f"{name}_n")
        lo, hi = self.find_reward_range()
        return [
            (count, health_checks.compute_half_interval(value, count, lo, hi))
            for value, count in zip(values.tolist(), counts.tolist(), strict=False)
        ]

    def find_reward_range(self) -> tuple[float, float]:
        """Return bounds of the run's rewards, and at least [0, 1]."""
        values = (self.get_values(name) for name in health_checks.REWARDS)
        return health_checks.find_reward_range(itertools.chain(*values))

    def sample_line(
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
        kept_x, kept_y = downsample(across, smooth_values(column.values, smooth), points)
        return kept_x.tolist(), kept_y.tolist()


def _build_columns(rows: list[JsonObject]) -> dict[str, tuple[ndarray, ndarray]]:
    """Return name -> (positions of rows, finite values), both [n], of every number in the rows.

    Rows with the same names become one matrix, which is several times faster than a loop.
    """
    rows_by_names: dict[tuple[str, ...], list[int]] = {}
    for position, row in enumerate(rows):
        rows_by_names.setdefault(tuple(row), []).append(position)
    pieces_of: dict[str, list[tuple[ndarray, ndarray]]] = {}
    for names, members in rows_by_names.items():
        positions = np.array(members)
        for name, values in zip(
            names, _build_matrix(names, [rows[i] for i in members]).T, strict=True
        ):
            finite = np.isfinite(values)
            if finite.any():
                pieces_of.setdefault(name, []).append((positions[finite], values[finite]))
    merged = {}
    for name, pieces in pieces_of.items():
        positions, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
        order = np.argsort(positions, kind="stable") if len(pieces) > 1 else slice(None)
        merged[name] = positions[order], values[order]
    return merged


def _build_matrix(names: tuple[str, ...], rows: list[JsonObject]) -> ndarray:
    """Return the values of rows with the same names, float64 [rows, names]; nan if not a number."""
    numeric = [name for name in names if isinstance(rows[0][name], int | float)]
    matrix = np.full((len(rows), len(names)), math.nan)
    if len(numeric) > 1:
        with contextlib.suppress(TypeError, ValueError):  # a later row has a text or a null
            indices = [names.index(name) for name in numeric]
            matrix[:, indices] = np.array(list(map(itemgetter(*numeric), rows)), dtype=np.float64)
            return matrix
    for column, name in enumerate(names):
        values = (row[name] for row in rows)
        matrix[:, column] = [v if isinstance(v, int | float) else math.nan for v in values]
    return matrix


def _fill_dense(
    column: tuple[ndarray, ndarray] | None, length: int, missing: float = 0.0
) -> ndarray:
    """Return values at their positions, float64 [length]; `missing` elsewhere."""
    dense = np.full(length, missing)
    if column is not None:
        dense[column[0]] = column[1]
    return dense


def smooth_values(values: ndarray, share: float) -> ndarray:
    """Return the exponential moving average of values [n], corrected for its start.

    >>> smooth_values(np.array([1.0, 1.0, 3.0]), 0.0).tolist()
    [1.0, 1.0, 3.0]
    >>> smooth_values(np.array([1.0, 1.0, 1.0]), 0.9).round(6).tolist()
    [1.0, 1.0, 1.0]
    """
    if share <= 0 or len(values) < 2:
        return values
    from scipy.signal import lfilter

    weights = lfilter([1 - share], [1, -share], np.ones_like(values))
    means: ndarray = lfilter([1 - share], [1, -share], values) / weights
    return means


def downsample(across: ndarray, values: ndarray, points: int) -> tuple[ndarray, ndarray]:
    """Reduce a line to at most `points` points that keep its extremes.

    Each bucket of neighbors keeps its smallest and its largest value in their order, so that a
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
    divisible = len(across) // size * size
    buckets = values[:divisible].reshape(-1, size)
    first = np.arange(0, divisible, size)
    extremes = np.stack([first + buckets.argmin(1), first + buckets.argmax(1)])
    remainder = [len(across) - 1] if divisible < len(across) else []
    selected = np.unique(np.concatenate([extremes.ravel(), np.asarray(remainder, np.int64)]))
    return across[selected], values[selected]
