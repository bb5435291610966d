"""The metrics on each page, and the plots of one or several runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from asyncrl.contract.toml_writer import read_table
from asyncrl.records.health_checks import Rows
from asyncrl.records.metrics import METRICS
from asyncrl.records.page_kit import PagePlot, PlotLine
from asyncrl.supervise.live import label_set
from asyncrl.supervise.report.series import POINTS, Axis, Column, Series

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
        meanings = {name: METRICS[name].meaning for name in plot.series if name in METRICS}
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
    if not len(line.ys) == len(other.ys) > 0:
        return False
    points, other_points = (
        np.array([either.xs, either.ys], dtype=np.float64) for either in (line, other)
    )
    return np.allclose(points, other_points, rtol=1e-6, atol=1e-12)


def plot_lag_over_time(rows: Rows) -> PagePlot:
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
