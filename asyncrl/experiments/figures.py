"""Figures for a paper, of runs, comparisons and sweeps, made with matplotlib.

The figure is plotted from points, and the CSV file holds the same ones. The colors are those of
Okabe and Ito (2008), which color-blind readers can distinguish. Markers and line styles differ too,
so the figure also prints without color.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import read_table
from asyncrl.models.installed import build_install_command
from asyncrl.records import metrics
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise import summary
from buffer import training_log

HELDOUT, OOD = "eval/heldout", "eval/ood"
STEP, LAG = "step", "lag"
LIMIT = ", limit "  # in the name of a series, between correction and limit
OKABE_ITO, MARKERS, STYLES, FORMATS, LABELS, DATES, SETTINGS = read_table(__file__).values()


class FigurePoint(NamedTuple):
    """One value of one run.

    position: step, or the measured mean lag in versions.
    place: the points of several seeds at the same place are averaged.
    """

    series: str
    place: str
    seed: int
    position: float
    value: float


class FigureLine(NamedTuple):
    """A series: means over its seeds, and the band from the lowest to the highest seed.

    counts: seeds behind each mean; a run that ended early has no later values.
    """

    name: str
    counts: list[int]
    positions: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def read_points(paths: Sequence[Path], metric: str, across: str) -> list[FigurePoint]:
    """Return all points of these directories.

    across: STEP for every measurement, LAG for the last one of each run.

    Raises ConfigError for a directory without a run, comparison or sweep, and if no run measured
    the metric.
    """
    points: list[FigurePoint] = []
    names = Counter(path.name for path in paths)
    for path in paths:
        for series, limit, seed, source in _list_runs(path):
            curve, lag = _read_curve(source, metric)
            name = f"{series}{LIMIT}{limit}" if across == STEP and limit else series
            if len(paths) > 1:  # they may hold series of the same name
                folder = path.name if names[path.name] == 1 else str(path)
                name = folder if name == path.name else f"{folder}: {name}"
            if across == STEP:
                points += [FigurePoint(name, f"{x:g}", seed, x, y) for x, y in curve]
            elif curve:
                points.append(FigurePoint(name, limit or name, seed, lag, curve[-1][1]))
    if not points:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: no finished run measured {metric}; `asyncrl config "
            "metrics` lists the names"
        )
    return points


def _list_runs(path: Path) -> Iterator[tuple[str, str, int, Path]]:
    """Yield series, limit and seed of each run, and its directory or its cell.

    A sweep has a series for each correction and limit; over lags, the limits of a correction form
    one series.
    """
    if (path / "sweep.json").is_file():
        if not (path / "result.json").is_file():
            raise ConfigError(f"{path}: the sweep has no result.json yet; wait for its end")
        result = json.loads((path / "result.json").read_bytes())
        cells = [(cell["correction"], cell["limit"], cell["arm"]) for cell in result["cells"]]
        if all(arm != "sync" for _, _, arm in cells):
            cells.insert(0, ("sync", "0", "sync"))
        for (correction, limit, arm), seed in itertools.product(cells, result["seeds"]):
            if (file := path / "cells" / f"{arm}-seed{seed}.json").is_file():
                yield correction, limit, seed, file
    elif (path / "compare.json").is_file():
        finished = {cell.stem: cell for cell in path.glob("cells/*.json")}
        finished |= {file.parent.name: file.parent for file in path.glob("runs/*/summary.json")}
        for arm in json.loads((path / "compare.json").read_bytes())["arms"]:
            for name, source in sorted(finished.items()):
                number = name.removeprefix(f"{arm}-seed")
                if number != name and number.isdigit():  # otherwise of another arm
                    yield arm, "", int(number), source
    elif (path / "config.toml").is_file() and (path / "run_id").is_file():
        yield path.name, "", 0, path
    else:
        raise ConfigError(
            f"{path} holds no run, comparison or sweep; give a directory of `asyncrl run`, "
            "`compare` or `sweep`"
        )


def _read_curve(source: Path, metric: str) -> tuple[list[tuple[float, float]], float]:
    """Return the finite values of a metric with their steps, and the mean lag of a run.

    source: a run directory, or the record of a run in a warm process.
    """
    pairs: Iterable[tuple[Any, Any]]
    if source.is_dir():
        pairs = [(row["step"], row.get(metric)) for row in metrics.read(source)]
        lag = float(summary.read_buffer_summary(source)["lag"]["mean"])
    else:
        record: JsonObject = json.loads(source.read_bytes())
        pairs = [(row["version"] - 1, row.get(metric)) for row in record["curve"]]
        if key := {HELDOUT: "accuracy", OOD: "ood"}.get(metric):
            pairs = zip(*(record.get(key) or ([], [])), strict=True)
        lag = training_log.mean({int(lag): n for lag, n in record["lag_histogram"].items()})
    return sorted(
        {
            float(step): float(value)
            for step, value in pairs
            if isinstance(value, int | float) and math.isfinite(value)
        }.items()
    ), lag


def make_lines(points: Sequence[FigurePoint]) -> list[FigureLine]:
    """Group points into series in their order, averaged over seeds place by place.

    >>> make_lines([FigurePoint("a", "1", 0, 1.0, 0.2), FigurePoint("a", "1", 1, 1.0, 0.4)])[0].low
    [0.2]
    """
    series: dict[str, dict[str, list[FigurePoint]]] = {}
    for point in points:
        series.setdefault(point.series, {}).setdefault(point.place, []).append(point)
    lines = []
    for name, places in series.items():
        groups = sorted(places.values(), key=_average_position)
        values = [[point.value for point in group] for group in groups]
        lines.append(
            FigureLine(
                name,
                [*map(len, values)],
                [*map(_average_position, groups)],
                [*map(fmean, values)],
                [*map(min, values)],
                [*map(max, values)],
            )
        )
    return lines


def _average_position(group: Sequence[FigurePoint]) -> float:
    return fmean(point.position for point in group)


def make_caption(lines: Sequence[FigureLine], across: str) -> str:
    """Describe lines and bands, and the number of runs behind them."""
    counts = sorted({count for line in lines for count in line.counts})
    axis = "; x: measured mean lag of the trained tokens" if across == LAG else ""
    shape = "band or bar" if across == LAG else "band"
    if counts[-1] == 1:
        return f"One run each (n = 1 seed), no band{axis}."
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean over seeds (n = {number}); {shape}: lowest to highest seed{axis}."


def draw(lines: Sequence[FigureLine], metric: str, across: str, path: Path) -> None:
    """Write the figure to `path`, in the format of its ending.

    Raises ConfigError for another ending, and if matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"-o {path}: give a name that ends in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a figure needs matplotlib: {build_install_command('figures')}; --csv works without it"
        ) from error
    with rc_context(SETTINGS):
        figure = Figure(figsize=(5.5, 3.8), layout="constrained")
        axes = figure.add_subplot()
        # a color for each method, a line style for each of its limits
        split_names = [line.name.partition(LIMIT) for line in lines]
        methods = list(dict.fromkeys(method for method, _, _ in split_names))
        limits = list(dict.fromkeys(limit for _, _, limit in split_names))
        for line, (method, _, limit) in zip(lines, split_names, strict=True):
            number = methods.index(method)
            color = OKABE_ITO[number % len(OKABE_ITO)]
            style = STYLES[(limits.index(limit) if len(limits) > 1 else number) % len(STYLES)]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(
                line.positions, line.mean, style, color=color, marker=marker, ms=4, label=line.name
            )
            if max(line.counts) > 1 and len(line.positions) > 1:
                axes.fill_between(
                    line.positions, line.low, line.high, color=color, alpha=0.18, lw=0
                )
            elif max(line.counts) > 1:
                axes.vlines(line.positions, line.low, line.high, color=color, lw=1.5)
        axes.set_xlabel(LABELS[across])
        axes.set_ylabel("held-out reward" if metric == HELDOUT else metric)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        columns = min(3, len(lines))
        figure.legend(loc="outside upper center", ncols=columns, frameon=False, fontsize=8)
        figure.supxlabel(make_caption(lines, across), fontsize=7)
        date = DATES.get(path.suffix)
        figure.savefig(path, dpi=200, metadata={date: None} if date else None)
