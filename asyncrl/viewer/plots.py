"""Which metrics each page draws, and the lines of one or several runs as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.records.health_checks import interval
from asyncrl.records.metrics import METRICS
from asyncrl.supervise import run_page
from asyncrl.supervise.run_page import MetricPlot
from asyncrl.viewer.series import Axis, Series

_BY_TITLE = {plot.title: plot for plot in run_page.LINES}
_LEARNER_TITLES = ("Gradient norm", "Entropy", "Learning-rate scale")
LOSS = MetricPlot(
    "Loss parts",
    "-",
    (
        ("loss/policy", "policy"),
        ("loss/kl", "KL term, before its coefficient"),
        ("loss/value", "value"),
        ("loss/entropy", "entropy"),
    ),
)
REWARD = MetricPlot(
    "Reward",
    "reward",
    (("reward/mean", "batch mean"), ("reward/std", "standard deviation")),
)
NO_SIGNAL = MetricPlot(
    "Samples without a learning signal",
    "share",
    (
        ("reward/no_spread_share", "in zero-variance groups"),
        ("answer/truncated_share", "truncated"),
        ("answer/masked_share", "masked"),
        ("is/rejected_share", "rejected"),
        ("is/zero_share", "weight 0"),
    ),
)
STEP_TIME = MetricPlot(
    "Seconds a batch",
    "s",
    (("time/step", "whole step"), ("time/train", "training"), ("time/publish", "publication")),
)
CLIPPED = MetricPlot(
    "Clipped tokens",
    "share",
    (("clip/low", "lower bound"), ("clip/high", "upper bound"), ("clip/dual", "dual clip")),
)
STOPS = MetricPlot("Early stops", "batches so far", (("optim/early_stops", "stopped early"),))
WAITS = MetricPlot(
    "Rewards in progress",
    "completions",
    (("reward/queue", "waiting for a reward"),),
)
MEMORY = MetricPlot("Memory of the learner", "MiB", (("memory/learner_mb", "resident"),))

OVERVIEW_TITLES = ("Throughput", "Idle share", "Answer length")
PAGES: dict[str, tuple[MetricPlot, ...]] = {
    "overview": (
        run_page.ACCURACY,
        REWARD,
        *(plot for title, plot in _BY_TITLE.items() if title in OVERVIEW_TITLES),
        STEP_TIME,
        NO_SIGNAL,
        WAITS,
    ),
    "staleness": tuple(
        plot
        for title, plot in _BY_TITLE.items()
        if title not in (*OVERVIEW_TITLES, *_LEARNER_TITLES)
    ),
    "learner": (
        LOSS,
        *(plot for title, plot in _BY_TITLE.items() if title in _LEARNER_TITLES),
        CLIPPED,
        STOPS,
        MEMORY,
    ),
}


def figures(
    page: str, runs: Mapping[str, Series], axis: Axis = "step", smooth: float = 0.0
) -> list[dict[str, Any]]:
    """Return the plots of a page as {title, unit, metrics, lines}, without empty ones.

    A line is {run, metric, label, x, y} and, for evaluations, band: half the 95 % interval.
    """
    drawn = []
    for plot in PAGES[page]:
        lines = [
            line
            for run, series in runs.items()
            for name, label in plot.series
            if (line := _line(run, series, name, label, axis, smooth)) is not None
        ]
        if lines and not (plot.moving and all(len(set(line["y"])) < 2 for line in lines)):
            meanings = {name: METRICS[name].meaning for name, _ in plot.series if name in METRICS}
            drawn.append(
                {"title": plot.title, "unit": plot.unit, "metrics": meanings, "lines": lines}
            )
    return drawn


def _line(
    run: str, series: Series, name: str, label: str, axis: Axis, smooth: float
) -> dict[str, Any] | None:
    evaluated = name.startswith("eval/")
    across, values = series.line(name, axis, 0.0 if evaluated else smooth)
    if not across:
        return None
    line: dict[str, Any] = {"run": run, "metric": name, "label": label, "x": across, "y": values}
    if evaluated and f"{name}_n" in series.columns and len(across) == series.columns[name].count:
        low, high = _reward_range(series)
        counts = series.values(f"{name}_n").tolist()
        line["band"] = [interval(v, n, low, high) for v, n in zip(values, counts, strict=False)]
    return line


def _reward_range(series: Series) -> tuple[float, float]:
    seen = [
        float(v)
        for name in ("reward/min", "reward/max", "eval/heldout", "eval/ood")
        for v in series.values(name).tolist()
    ]
    return min([0.0, *seen]), max([1.0, *seen])


def lag_over_time(rows: Sequence[Mapping[str, Any]], buckets: int = 120) -> dict[str, Any]:
    """Return the lag histogram over time from trained.jsonl: {x, lags, share[lag][x]}.

    Batches are averaged over at most `buckets` bins.
    """
    usable = [row for row in rows if isinstance(row.get("lags"), dict)]
    if not usable:
        return {"x": [], "lags": [], "share": []}
    lags = sorted({int(lag) for row in usable for lag in row["lags"]})
    size = -(-len(usable) // buckets)
    batches, share = [], []
    for first in range(0, len(usable), size):
        part = usable[first : first + size]
        total = sum(sum(row["lags"].values()) for row in part) or 1
        batches.append(part[0]["batch"])
        share.append([sum(row["lags"].get(str(lag), 0) for row in part) / total for lag in lags])
    columns = [list(column) for column in zip(*share, strict=True)]
    return {"x": batches, "lags": lags, "share": columns}
