"""Plots of each optimizer step from optimizer_steps.jsonl, if batches have several steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncrl.records.metrics import METRICS
from asyncrl.records.page_kit import PagePlot, PlotLine
from asyncrl.supervise.report.plots import MetricPlot
from asyncrl.supervise.report.series import POINTS, Series, downsample

PLOTS = (
    MetricPlot(
        "Each optimizer step: KL before it",
        "nats a token (k3)",
        (
            ("kl/behavior_target_k3", "behavior to target"),
            ("kl/start_target_k3", "batch's start to target"),
        ),
    ),
    MetricPlot(
        "Each optimizer step: ratio to the behavior policy",
        "target / behavior",
        (("is/target_ratio", "mean"), ("is/target_ratio_max", "largest")),
    ),
    MetricPlot(
        "Each optimizer step: gradient norm",
        "before clipping",
        (("optim/grad_norm", "gradient norm"),),
    ),
    MetricPlot(
        "Each optimizer step: reshape",
        "gamma; nats^2",
        (
            ("reshape/gamma", "mean gamma"),
            ("reshape/gamma_base", "gamma_base"),
            ("reshape/sigma2", "sigma2, variance of log w"),
        ),
    ),
    MetricPlot(
        "Each optimizer step: C = A log w and its gate",
        "nats; share",
        (("reshape/c", "mean C"), ("reshape/p_correct", "mean P_correct")),
    ),
)


def build_plots(runs: Mapping[str, Series], points: int = POINTS) -> list[PagePlot]:
    """Build the plots of optimizer steps, or [] if no batch had two.

    With one step per batch, the plots of metrics.jsonl show the same.

    Args:
        runs: name -> the run's optimizer_steps.jsonl.
    """
    several = {run: series for run, series in runs.items() if series.get_values("update").any()}
    figures = []
    for plot in PLOTS:
        lines = [
            PlotLine(label, *_trace_line(series, name, points), run=run, metric=name)
            for run, series in several.items()
            for name, label in plot.series
            if name in series.columns
        ]
        if lines:
            meanings = {name: METRICS[name].meaning for name, _ in plot.series}
            figures.append(PagePlot(plot.title, plot.unit, lines, "batch", metrics=meanings))
    return figures


def _trace_line(series: Series, name: str, points: int) -> tuple[list[float], list[float]]:
    """Return (x, y) of a metric; the steps of batch n lie evenly in [n, n + 1)."""
    batch = series.axes["step"].values
    _, batch_index, counts = np.unique(batch, return_inverse=True, return_counts=True)
    update = np.zeros(len(batch))
    update[series.columns["update"].rows] = series.get_values("update")
    column = series.columns[name]
    across = (batch + update / counts[batch_index])[column.rows]
    kept_x, kept_y = downsample(across, column.values, points)
    return kept_x.tolist(), kept_y.tolist()
