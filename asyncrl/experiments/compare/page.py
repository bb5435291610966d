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
from asyncrl.experiments.compare.comparison_analysis import KL_BATCHES, average, format_findings
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.health_checks import compute_half_interval
from asyncrl.records.page_kit import (
    Block,
    ListBlock,
    PagePlot,
    PlotBlock,
    PlotLine,
    TableBlock,
    TextBlock,
)

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


def select_points(name: str) -> Points:
    """Select a metric's points from the rows that have it."""
    return lambda cell: [(float(row["step"]), float(row[name])) for row in cell.rows if name in row]


# (metric, title, unit)
METRIC_CURVES = (
    ("reward/mean", "Reward of the training batch", "mean"),
    ("lag/mean", "Lag of trained tokens", "versions, mean"),
    ("is/target_ess", "Effective sample size of the raw ratios", "share"),
    ("kl/behavior_target_k3", "KL from behavior to target", "nats a token (k3)"),
    ("kl/target_ref_k3", "KL from target to reference", "nats a token (k3)"),
    ("policy/entropy", "Entropy", "nats a token"),
    ("optim/grad_norm", "Gradient norm", "before clipping"),
    ("answer/length", "Completion length", "tokens"),
)
CURVES = (
    CurvePlot(
        "Held-out reward",
        "mean reward",
        lambda cell: list(zip(cell.steps, cell.accuracy, strict=True)),
    ),
    CurvePlot("Out-of-distribution reward", "mean reward", lambda cell: sorted(cell.ood.items())),
    *(CurvePlot(title, unit, select_points(name)) for name, title, unit in METRIC_CURVES),
)


def plot_curves(
    title: str, unit: str, arms: Sequence[str], cells: Sequence[CellResult], points: Points
) -> PagePlot:
    """Plot the mean over seeds of each arm, in a band from the lowest to the highest."""
    plot = PagePlot(title, unit, [], "version")
    several = len({cell.seed for cell in cells}) > 1
    for name in arms:
        by_step: dict[float, list[float]] = {}
        for cell in cells:
            if cell.arm == name:
                for step, value in points(cell):
                    by_step.setdefault(step, []).append(value)
        steps = sorted(by_step)
        line = PlotLine(name, steps, [average(by_step[step]) for step in steps])
        if several:
            line.low = [min(by_step[step]) for step in steps]
            line.high = [max(by_step[step]) for step in steps]
        plot.lines.append(line)
    return plot


def describe_bands(result: dict[str, Any], config: Config) -> str:
    """Describe the lines and bands of the curves, and the interval of one held-out reward."""
    seeds = len(result["seeds"])
    lines = (
        f"Lines: mean over {seeds} seeds; bands: from the lowest to the highest seed, no interval."
        if seeds > 1
        else "Lines: one seed."
    )

    def format_interval(size: int) -> str:
        half = compute_half_interval(0.5, size, 0.0, 1.0)
        return f"+-{half:.3f} at most (n = {size:,} held-out prompts)"

    return (
        f"{lines} 95 % interval of one seed's held-out reward in [0, 1], over prompts: "
        f"{format_interval(config.evaluation.final_prompts)} at both ends, "
        f"{format_interval(config.evaluation.prompts)} between."
    )


# ---- tables and lists ----------------------------------------------------------------------------


def format_arms(result: dict[str, Any]) -> list[list[str]]:
    """Return the table of arms as text."""
    return [format_arm(name, arm) for name, arm in result["arms"].items()]


def format_arm(name: str, arm: dict[str, Any]) -> list[str]:
    """Format one arm in the columns of HEAD."""

    def format_time(key: str, form: str) -> str:
        """Put a warm run's times in brackets, because they differ from a real run's."""
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
        format_time("wall_s", ".1f"),
        format_time("seconds_to_target", ".1f"),
        format_number(arm["tokens"], ",.0f"),
        format_time("tokens_per_s", ",.0f"),
        format_number(arm["lag"], ".2f"),
        str(arm["lag_max"]),
        format_number(arm["ess"], ".3f"),
        f"{arm['unstable']} of {len(arm['each'])}",
        "warm" if arm["warm"] else "real",
    ]


def list_problems(cells: Sequence[CellResult], result: dict[str, Any]) -> list[str]:
    """List each run's problems, then each arm's likely cause."""
    runs = [
        f"{cell.arm}, seed {cell.seed}: {problem}" for cell in cells for problem in cell.trouble
    ]
    return runs + [
        f"{name}: likely cause: {arm['cause']}"
        for name, arm in result["arms"].items()
        if arm["cause"]
    ]


def describe_samples(result: dict[str, Any]) -> str:
    """Name the arms that trained the first arm's samples, and describe the others' differences."""
    same = "; ".join(
        f"{name} {sum(runs)} of {len(runs)} seeds" for name, runs in result["same_data"].items()
    )
    return same + "".join(
        f"; {name}, seed {seed}: {difference}"
        for name, runs in result["data_apart"].items()
        for seed, difference in zip(result["seeds"], runs, strict=True)
        if difference
    )


def list_blocks(
    cells: Sequence[CellResult],
    result: dict[str, Any],
    settings: Sequence[Setting],
    config: Config,
) -> list[Block]:
    """Return the parts of the page, in their order."""
    arms = list(result["arms"])
    signs = [
        line
        for name, arm in result["arms"].items()
        for line in format_findings(name, arm["signs"], len(arm["each"]))
    ]
    against = f"compared with {settings[0].arm}"
    return [
        TableBlock(
            ("arm", "is", against), settings, heading="Differences", id="settings", text_columns=3
        ),
        ListBlock([v["text"] for v in result["verdicts"]], heading="Verdict", id="verdicts"),
        ListBlock(result["trade"]),
        TableBlock(HEAD, format_arms(result), heading="Arms, mean over seeds", id="arms"),
        ListBlock(signs, heading="Signs", id="signs"),
        ListBlock(list_problems(cells, result), heading="Unstable runs", style="bad"),
        TextBlock(describe_bands(result, config), heading="Curves", id="bands", style="soft"),
        PlotBlock(
            [plot_curves(curve.title, curve.unit, arms, cells, curve.points) for curve in CURVES]
        ),
        TextBlock(
            "Verdicts are paired by seed (t intervals, Holm's correction over the arms) and hold "
            "for other seeds; the JSON has the interval for other prompts alone. Warm runs take "
            "turns in one process: they train as a real run does, but their seconds differ and "
            "are in brackets. OOD: mean reward on out-of-distribution prompts. KL to ref: "
            f"KL(target || reference), k3, nats a token, mean over the last {KL_BATCHES} batches, "
            "without the first of a run, which precedes any update. The target is nine tenths of "
            "the first arm's final reward; its time is the mean over the runs that reach "
            "it. A run counts as unstable by these rules: "
            f"{verdict.StabilityBounds()}. Arms on the same data: {describe_samples(result)}.",
            heading="How to read this",
        ),
    ]


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
    blob = json.dumps(clean(result))
    steps = f"{config.learner.steps} steps of {config.learner.groups} x {config.learner.group_size}"
    page = page_kit.render(
        name,
        f"{len(result['seeds'])} seed(s), {steps}; the others are compared with the first arm",
        list_blocks(cells, result, settings, config),
        {"comparison": blob},
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
