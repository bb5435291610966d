"""The page of a comparison, and its numbers as JSON.

It has overlaid curves with bands, each arm's settings, and the verdicts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.tree import Config
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison import CellResult
from asyncrl.experiments.compare.comparison_analysis import KL_BATCHES, mean, signs_told
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.health_checks import interval
from asyncrl.records.page_kit import COLOURS

HEAD = (
    "arm",
    "start",
    "end",
    "each seed",
    "OOD start",
    "OOD end",
    "KL to ref",
    "area",
    "seconds of RL",
    "seconds to target",
    "tokens trained",
    "trained tok/s",
    "mean lag",
    "max lag",
    "ESS",
    "unstable",
    "processes",
)


class Setting(NamedTuple):
    """An arm, its requested settings, and its config's differences from the first arm."""

    arm: str
    title: str
    differs: str


def clean(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_number(value: float | None, form: str) -> str:
    """Format a number in a table; "-" if it is missing."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


# ---- curves --------------------------------------------------------------------------------------

Points = Callable[[CellResult], list[tuple[float, float]]]


class CurvePlot(NamedTuple):
    """One plot of the page."""

    title: str
    unit: str
    points: Points


def _metric(name: str) -> Points:
    """Select a metric's points from the rows that have it."""
    return lambda cell: [(float(row["step"]), float(row[name])) for row in cell.rows if name in row]


CURVES = (
    CurvePlot(
        "Accuracy on held-out prompts",
        "accuracy",
        lambda cell: list(zip(cell.steps, cell.accuracy, strict=True)),
    ),
    CurvePlot(
        "Accuracy on out-of-distribution prompts", "accuracy", lambda cell: sorted(cell.ood.items())
    ),
    CurvePlot("KL from target to reference", "nats a token (k3)", _metric("kl/target_ref_k3")),
    CurvePlot("Lag of trained tokens", "versions, mean", _metric("lag/mean")),
    CurvePlot("Effective sample size of the raw ratios", "share", _metric("is/target_ess")),
    CurvePlot("KL from behavior to target", "nats a token (k3)", _metric("kl/behavior_target_k3")),
    CurvePlot("Entropy", "nats a token", _metric("policy/entropy")),
    CurvePlot("Gradient norm", "before clipping", _metric("optim/grad_norm")),
    CurvePlot("Answer length", "tokens", _metric("answer/length")),
    CurvePlot("Reward of the training batch", "mean", _metric("reward/mean")),
)


def curves(
    title: str,
    unit: str,
    arms: Sequence[str],
    cells: Sequence[CellResult],
    points: Points,
) -> Any:
    """Plot the mean over seeds of each arm, in a band from the lowest to the highest."""
    import plotly.graph_objects as go

    figure = go.Figure()
    seeds = {cell.seed for cell in cells}
    for number, name in enumerate(arms):
        by_step: dict[float, list[float]] = {}
        for cell in cells:
            if cell.arm == name:
                for step, value in points(cell):
                    by_step.setdefault(step, []).append(value)
        steps = sorted(by_step)
        color = COLOURS[number % len(COLOURS)]
        if len(seeds) > 1 and steps:
            figure.add_scatter(
                x=[*steps, *steps[::-1]],
                y=[
                    *(max(by_step[step]) for step in steps),
                    *(min(by_step[step]) for step in steps[::-1]),
                ],
                fill="toself",
                fillcolor=color,
                opacity=0.15,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
            )
        figure.add_scatter(
            x=steps,
            y=[mean(by_step[step]) for step in steps],
            name=name,
            mode="lines",
            line={"color": color},
        )
    figure.update_layout(
        title={"text": title, "font": {"size": 14}, "y": 0.97},
        height=330,
        margin={"l": 55, "r": 15, "t": 62, "b": 40},
        template="plotly_white",
        legend={"orientation": "h", "y": 1.0, "x": 0, "xanchor": "left", "yanchor": "bottom"},
    )
    figure.update_xaxes(title="version")
    figure.update_yaxes(title=unit, rangemode="tozero")
    return figure


def bands(result: dict[str, Any], config: Config) -> str:
    """Describe the lines and bands of the curves, and the interval of one accuracy."""
    seeds = len(result["seeds"])
    lines = (
        f"Lines: mean over {seeds} seeds; bands: from the lowest to the highest seed, no interval."
        if seeds > 1
        else "Lines: one seed."
    )

    def within(size: int) -> str:
        return f"+-{interval(0.5, size, 0.0, 1.0):.3f} at most (n = {size:,} held-out prompts)"

    return (
        f"{lines} 95 % interval of one seed's accuracy, over prompts: "
        f"{within(config.evaluation.final_prompts)} at both ends, "
        f"{within(config.evaluation.prompts)} between."
    )


# ---- tables and lists ----------------------------------------------------------------------------


def arm_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the table of arms as text."""
    return [arm_row(name, arm) for name, arm in result["arms"].items()]


def arm_row(name: str, arm: dict[str, Any]) -> list[str]:
    """Format one arm in the columns of HEAD."""

    def timed(key: str, form: str) -> str:
        """Put a warm run's times in brackets, as they differ from a real run's."""
        return (
            f"({format_number(arm[key], form)})" if arm["warm"] else format_number(arm[key], form)
        )

    return [
        name,
        format_number(arm["heldout_start"], ".3f"),
        format_number(arm["heldout_end"], ".3f"),
        " ".join(f"{accuracy:.3f}" for accuracy in arm["each"]),
        format_number(arm["ood_start"], ".3f"),
        format_number(arm["ood_end"], ".3f"),
        format_number(arm["kl_ref"], ".3g"),
        format_number(arm["area"], ".3f"),
        timed("wall_s", ".1f"),
        timed("seconds_to_target", ".1f"),
        format_number(arm["tokens"], ",.0f"),
        timed("tokens_per_s", ",.0f"),
        format_number(arm["lag"], ".2f"),
        str(arm["lag_max"]),
        format_number(arm["ess"], ".3f"),
        f"{arm['unstable']} of {len(arm['each'])}",
        "warm" if arm["warm"] else "real",
    ]


def list_problems(cells: Sequence[CellResult], result: dict[str, Any]) -> list[str]:
    """List each run's problems, then the likely cause of each arm's."""
    runs = [
        f"{cell.arm}, seed {cell.seed}: {problem}" for cell in cells for problem in cell.trouble
    ]
    return runs + [
        f"{name}: likely cause: {arm['cause']}"
        for name, arm in result["arms"].items()
        if arm["cause"]
    ]


def samples(result: dict[str, Any]) -> str:
    """Describe which arms trained the first arm's samples, and how far others differ."""
    same = "; ".join(
        f"{name} {sum(runs)} of {len(runs)} seeds" for name, runs in result["same_data"].items()
    )
    return same + "".join(
        f"; {name}, seed {seed}: {difference}"
        for name, runs in result["data_apart"].items()
        for seed, difference in zip(result["seeds"], runs, strict=True)
        if difference
    )


# ---- files ---------------------------------------------------------------------------------------


def write(
    directory: Path,
    name: str,
    cells: Sequence[CellResult],
    result: dict[str, Any],
    settings: Sequence[Setting],
    config: Config,
) -> Path:
    """Write DIR/report.html, comparison.json and the TensorBoard view of all arms."""
    arms = list(result["arms"])
    blob = json.dumps(clean(result))
    page = page_kit.render(
        "compare.html",
        name=name,
        bands=bands(result, config),
        seeds=len(result["seeds"]),
        steps=config.learner.steps,
        groups=config.learner.groups,
        size=config.learner.group_size,
        settings=settings,
        data=samples(result),
        verdicts=[judged["text"] for judged in result["verdicts"]],
        trade=result["trade"],
        head=HEAD,
        table=arm_rows(result),
        trouble=list_problems(cells, result),
        signs=[
            line
            for name, arm in result["arms"].items()
            for line in signs_told(name, arm["signs"], len(arm["each"]))
        ],
        plots=[
            page_kit.plot(curves(curve.title, curve.unit, arms, cells, curve.points))
            for curve in CURVES
        ],
        rules=verdict.StabilityBounds(),
        kl_batches=KL_BATCHES,
        library=page_kit.library(),
        blob=page_kit.embedded(blob),
    )
    for path, text in ((directory / "report.html", page), (directory / "comparison.json", blob)):
        atomic_write.write(path, text)
    settings_by_arm = {setting.arm: f"{setting.title}; {setting.differs}" for setting in settings}
    write_tensorboard(directory / "tensorboard", cells, settings_by_arm)
    return directory / "report.html"


BOARD = (
    "lag/mean",
    "is/target_ess",
    "kl/behavior_target_k3",
    "kl/target_ref_k3",
    "policy/entropy",
    "reward/mean",
)


def write_tensorboard(
    directory: Path, cells: Sequence[CellResult], settings: Mapping[str, str]
) -> None:
    """Write all arms side by side, with the hyperparameters view."""
    import shutil

    from tensorboardX import SummaryWriter

    shutil.rmtree(directory, ignore_errors=True)
    for cell in cells:
        with SummaryWriter(str(directory / f"{cell.arm}-seed{cell.seed}")) as writer:
            for step, accuracy in zip(cell.steps, cell.accuracy, strict=True):
                writer.add_scalar("eval/heldout", accuracy, int(step))
            for step, accuracy in sorted(cell.ood.items()):
                writer.add_scalar("eval/ood", accuracy, int(step))
            for row in cell.rows:
                for name in BOARD:
                    if name in row:
                        writer.add_scalar(name, row[name], int(row["step"]))
            writer.add_hparams(
                {"arm": cell.arm, "seed": cell.seed, "settings": settings[cell.arm]},
                {"final/heldout": cell.final},
                name=".",
            )
