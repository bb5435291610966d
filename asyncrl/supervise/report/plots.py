"""Metrics of a run as columns, read while it goes on; the plots of one or several runs."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy import ndarray

from asyncrl.contract.messages import Numbers
from asyncrl.contract.toml_writer import read_table
from asyncrl.records import health_checks, jsonl, metrics
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import PagePlot, PlotLine
from asyncrl.supervise.live import label_set

Axis = Literal["step", "time", "tokens", "batch"]  # batch: with the place of a step in it
AXES: tuple[Axis, ...] = ("step", "time", "tokens")
TRAINED = "reward/mean"  # in every row of a batch, in no row of an evaluation
POINTS = 1200  # most points of a line that is sent to a page
NUMBER = (int, float)  # faster in a loop than int | float


@dataclass
class Column:
    """Values of one metric with the numbers of their rows."""

    rows: ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64 [n]
    values: ndarray = field(default_factory=lambda: np.zeros(0))  # float64 [n]

    def extend(self, rows: ndarray, values: ndarray) -> None:
        """Add values [n] with the numbers of their rows [n]."""
        self.rows = np.concatenate([self.rows, rows])
        self.values = np.concatenate([self.values, values])


@dataclass
class Series:
    """metrics.jsonl of a run; `refresh` reads the rows that were appended since the last call.

    A file that was replaced or has shrunk is read from its start, as is a file whose steps go back:
    a resumed run repeats some batches, and only the last row of a step counts.
    """

    path: Path
    columns: dict[str, Column] = field(default_factory=dict)
    axes: dict[Axis, Column] = field(default_factory=lambda: {axis: Column() for axis in AXES})
    _newest: int = -1  # step of training

    def __post_init__(self) -> None:
        self.file = jsonl.GrowingFile(self.path)

    def refresh(self) -> None:
        """Read new rows. A missing file counts as empty."""
        rows = self.file.read_rows()
        if self.file.begins:
            self._forget()
        trained = [self._newest, *(row["step"] for row in rows if TRAINED in row)]
        if any(next_step <= step for step, next_step in itertools.pairwise(trained)):
            self._forget()
            rows = metrics.select_valid_rows(jsonl.read(self.path))
        self._newest = max(trained)
        if rows:
            self._add(rows)

    @property
    def rows(self) -> int:
        """The number of rows read so far."""
        return len(self.axes["step"].rows)

    def _forget(self) -> None:
        self.columns.clear()
        self.axes = {axis: Column() for axis in AXES}
        self._newest = -1

    def _add(self, rows: list[JsonObject]) -> None:
        """Append rows column by column."""
        numbers = self.rows + np.arange(len(rows))
        rate, seconds, time, step = (
            np.nan_to_num(_read_column(rows, name))
            for name in ("throughput/learner_tokens_per_s", "time/step", "t", "step")
        )
        tokens = np.concatenate([self.axes["tokens"].values[-1:], rate * seconds])
        for axis, values in zip(AXES, (step, time, np.cumsum(tokens)[-len(rows) :]), strict=True):
            self.axes[axis].extend(numbers, values)
        for recorded_name in sorted({name for row in rows for name in row} - {"t", "step"}):
            values = _read_column(rows, recorded_name)
            finite = np.isfinite(values)
            if finite.any():
                name = metrics.OLD_NAMES.get(recorded_name, recorded_name)
                self.columns.setdefault(name, Column()).extend(numbers[finite], values[finite])

    def get_column(self, name: str) -> Column:
        """Return a metric with the numbers of its rows, or an empty column."""
        return self.columns.get(name, Column())

    def get_latest(self, name: str) -> float | None:
        """Return the newest value of a metric, or None."""
        values = self.get_values(name)
        return float(values[-1]) if len(values) else None

    def get_values(self, name: str) -> ndarray:
        """Return all values of a metric, float64 [n]."""
        return self.get_column(name).values

    def align(self, name: str, missing: float = math.nan) -> ndarray:
        """Return a metric's value in each row, float64 [rows]; `missing` in rows without it."""
        column, dense = self.get_column(name), np.full(self.rows, missing)
        dense[column.rows] = column.values
        return dense

    def read_latest(self) -> Numbers:
        """Return the newest value of each metric."""
        return {name: float(column.values[-1]) for name, column in self.columns.items()}

    def select_rows(self, name: str) -> list[Numbers]:
        """Return the rows that have a metric: their steps and their metrics of its family."""
        column = self.get_column(name)
        family = [x for x in self.columns if x.partition("/")[0] == name.partition("/")[0]]
        table = {"step": self.axes["step"].values} | {x: self.align(x) for x in family}
        rows = zip(*(values[column.rows].tolist() for values in table.values()), strict=True)
        return [
            {x: value for x, value in zip(table, row, strict=True) if not math.isnan(value)}
            for row in rows
        ]

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
        column = self.get_column(name)
        across = self.axes[axis].values[column.rows]
        kept_x, kept_y = downsample(across, smooth_values(column.values, smooth), points)
        return kept_x.tolist(), kept_y.tolist()


def _read_column(rows: list[JsonObject], name: str) -> ndarray:
    """Return a metric's value in each row, float64 [rows]; nan if it is not a finite number."""
    cells = [row.get(name) for row in rows]
    values = np.array([x if isinstance(x, NUMBER) else math.nan for x in cells], np.float64)
    values[np.isinf(values)] = math.nan
    return values


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


# ---- plots ---------------------------------------------------------------------------------------

AXIS_NAMES = {
    "step": "step",
    "time": "seconds of RL",
    "tokens": "trained tokens",
    "batch": "batch",
}


class MetricPlot(msgspec.Struct, frozen=True, eq=False):
    """A plot of metrics over the run, as plots.toml has it.

    series: metric -> label of its line.  moving: omit it when all values are equal."""

    title: str
    series: dict[str, str]
    unit: str = ""
    moving: bool = False
    stacked: bool = False


PAGES: dict[str, list[MetricPlot]] = read_table(__file__, dict[str, list[MetricPlot]])
STEP_PLOTS = PAGES.pop("optimizer_steps")
TASK_PLOTS = PAGES.pop("tasks")


def build_task_plots(names: Iterable[str]) -> list[MetricPlot]:
    """Build the plots of a mixture's tasks, with one line per task; [] without a mixture."""
    task_metrics = [name for name in dict.fromkeys(names) if name.startswith("task/")]
    plots = []
    for plot in TASK_PLOTS:
        (ending,) = plot.series
        lines = {
            name: name.removeprefix("task/").removesuffix(ending)
            for name in task_metrics
            if name.endswith(ending)
        }
        plots += [msgspec.structs.replace(plot, series=lines)] if lines else []
    return plots


def build_plots(
    page: str,
    runs: Mapping[str, Series],
    axis: Axis = "step",
    smooth: float = 0.0,
    points: int = POINTS,
) -> list[PagePlot]:
    """Build the plots of a page, without empty ones."""
    shown_plots = PAGES[page]
    if page == "overview":
        names = [name for series in runs.values() for name in series.columns]
        # mean reward, greedy reward and pass@k of each
        sets = {name: label for name in sorted(set(names)) if (label := label_set(name)[1])}
        added_plots = [MetricPlot("Evaluation sets", sets, "reward, share")]
        added_plots += build_task_plots(names)
        shown_plots = [*shown_plots[:1], *added_plots, *shown_plots[1:]]
    return draw(shown_plots, runs, axis, smooth, points)


def draw(
    shown_plots: Sequence[MetricPlot],
    runs: Mapping[str, Series],
    axis: Axis,
    smooth: float,
    points: int,
) -> list[PagePlot]:
    """Draw plots, without empty ones; the band of an evaluation is its 95 % interval."""
    figures = []
    for plot in shown_plots:
        lines = []
        for run, series in runs.items():
            plot_lines = [
                _fill_line(
                    PlotLine(label, (), (), run=run, metric=name), series, axis, smooth, points
                )
                for name, label in plot.series.items()
            ]
            areas = [line for line in plot_lines if line.xs] if plot.stacked else []
            if areas:
                # counts at the points of the longest line, so that they can be stacked
                grid = np.array(max((line.xs for line in areas), key=len), dtype=np.float64)
                for line in areas:
                    across, values = np.array([line.xs, line.ys], dtype=np.float64)
                    line.xs = grid.tolist()
                    line.ys = np.interp(grid, across, values, left=0.0).tolist()
                title = f"{plot.title}: {run}" if len(runs) > 1 else plot.title
                figures.append(PagePlot(title, plot.unit, areas, AXIS_NAMES[axis], "areas"))
            lines += _merge_equal(plot_lines)
        if not lines or plot.stacked:
            continue
        if plot.moving and all(len(set(line.ys)) < 2 for line in lines):
            continue
        meanings = {
            name: metrics.METRICS[name].meaning for name in plot.series if name in metrics.METRICS
        }
        figures.append(PagePlot(plot.title, plot.unit, lines, AXIS_NAMES[axis], metrics=meanings))
        if plot is PAGES["overview"][0] and all(
            series.find_reward_range() == (0, 1) for series in runs.values()
        ):
            figures[-1].top = 1.02
    return figures


def _fill_line(line: PlotLine, series: Series, axis: Axis, smooth: float, points: int) -> PlotLine:
    """Fill in the values of a line; an evaluation is not smoothed and has a band."""
    evaluated = line.metric.startswith("eval/")
    line.xs, line.ys = series.sample_line(line.metric, axis, 0.0 if evaluated else smooth, points)
    halves = [half for _, half in series.list_intervals(line.metric)]
    bounds = [series.get_values(f"{line.metric}_{end}").tolist() for end in ("low", "high")]
    if len(halves) == len(line.ys):
        pairs = list(zip(line.ys, halves, strict=True))
        bounds = [[y - half for y, half in pairs], [y + half for y, half in pairs]]
    if evaluated and all(len(bound) == len(line.ys) for bound in bounds):
        line.low, line.high = bounds
    return line


def _merge_equal(lines: Sequence[PlotLine]) -> list[PlotLine]:
    """Drop empty lines and merge equal lines into one with both labels.

    With one update per batch, proximal and target policy are equal up to rounding."""
    distinct: list[PlotLine] = []
    for line in lines:
        twin = next((other for other in distinct if _are_equal(line, other)), None)
        if twin is not None:
            twin.label = f"{twin.label} = {line.label}"
        elif line.xs:
            distinct.append(line)
    return distinct


def _are_equal(line: PlotLine, other: PlotLine) -> bool:
    points, other_points = (
        np.array([*either.xs, *either.ys], np.float64) for either in (line, other)
    )
    return len(points) == len(other_points) > 0 and np.allclose(
        points, other_points, rtol=1e-6, atol=1e-12
    )


def plot_lag_over_time(rows: health_checks.Rows) -> PagePlot:
    """Plot the lag histogram over time from trained.jsonl as stacked shares of tokens.

    Batches are averaged over at most 120 bins.
    """
    plot = PagePlot("Lag of trained tokens", "share of tokens", [], "batch", "areas")
    usable = [row for row in rows if isinstance(row.get("lags"), dict)]
    if not usable:
        return plot
    lags = sorted({int(lag) for row in usable for lag in row["lags"]})
    size = -(-len(usable) // 120)
    batches, share = [], []
    for first in range(0, len(usable), size):
        bucket = usable[first : first + size]
        total = sum(sum(row["lags"].values()) for row in bucket) or 1
        batches.append(bucket[0]["batch"])
        share.append([sum(row["lags"].get(str(lag), 0) for row in bucket) / total for lag in lags])
    plot.lines = [
        PlotLine(f"lag {lag}", batches, column)
        for lag, column in zip(lags, zip(*share, strict=True), strict=True)
    ]
    return plot


def build_step_plots(runs: Mapping[str, Series], points: int = POINTS) -> list[PagePlot]:
    """Build the plots of optimizer steps, or [] if no batch had two.

    With one step per batch, the plots of metrics.jsonl show the same.  The steps of batch n lie
    evenly in [n, n + 1).

    Args:
        runs: name -> the run's optimizer_steps.jsonl.
    """
    several: dict[str, Series] = {}
    for run, series in runs.items():
        updates = series.align("update", 0.0)
        if updates.any():
            batch, places = series.axes["step"].values, Column()
            _, batch_index, counts = np.unique(batch, return_inverse=True, return_counts=True)
            places.extend(np.arange(len(batch)), batch + updates / counts[batch_index])
            several[run] = replace(series, axes=series.axes | {"batch": places})
    return draw(STEP_PLOTS, several, "batch", 0.0, points)
