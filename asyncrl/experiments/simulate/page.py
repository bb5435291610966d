"""The tables of `asyncrl simulate`, and its page of plots against the staleness limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.experiments.simulate.what_if import Outcome
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import (
    ListBlock,
    PagePlot,
    PlotBlock,
    PlotLine,
    TableBlock,
    TextBlock,
)

HEAD: tuple[str, ...] = (
    "generators",
    "limit",
    "tokens/s",
    "s a step",
    "generators idle",
    "learner idle",
)
HEAD += ("mean lag", "max lag", "tickets in flight", "tokens lost")
TREATMENT_HEAD: tuple[str, ...] = (
    "treatment",
    "tokens/s",
    "learner idle",
    "dropped",
    "masked",
    "downweighted",
)
TREATMENT_HEAD += ("cut", "lag", "p95", "max")
# each plot: title, unit, and its lines as (key, label, number of the dash pattern)
PLOTS = (
    ("Throughput against limit", "trained tokens/s", (("tokens_per_s", "", 0),)),
    (
        "Idle share against limit",
        "share",
        (("idle_generator", "generators", 0), ("idle_learner", "learner", 2)),
    ),
    (
        "Lag against limit",
        "versions",
        (("lag_mean", "mean", 0), ("lag_max", "largest", 2)),
    ),
    (
        "Tickets in flight",
        "groups",
        (("tickets_mean", "mean", 0), ("tickets_max", "most", 2)),
    ),
)


def format_outcome(outcome: Outcome) -> tuple[str, ...]:
    """Format an outcome in the columns of HEAD."""
    lost_share = sum(outcome["losses"].values()) / max(outcome["generated"], 1)
    return (
        f"{outcome['generators']:,}",
        f"{outcome['max_lag']}",
        f"{outcome['tokens_per_s']:,.0f}",
        f"{outcome['step_s']:.3g}",
        f"{outcome['idle_generator']:.1%}",
        f"{outcome['idle_learner']:.1%}",
        f"{outcome['lag_mean']:.2f}",
        f"{outcome['lag_max']}",
        f"{outcome['tickets_mean']:.1f}",
        f"{lost_share:.1%}",
    )


def make_outcome_table(outcomes: Sequence[Outcome], heading: str = "") -> TableBlock:
    return TableBlock(
        HEAD, [format_outcome(outcome) for outcome in outcomes], heading=heading, text_columns=0
    )


def make_treatment_table(outcomes: Sequence[Outcome]) -> TableBlock:
    return TableBlock(
        TREATMENT_HEAD, [format_treatment(outcome) for outcome in outcomes], text_columns=0
    )


def format_treatment(row: Outcome) -> tuple[str, ...]:
    """Format a treatment in the columns of TREATMENT_HEAD."""
    deadline = f" {row['deadline_s']:.3g} s" if row["name"] == "deadline" else ""
    shares = ("learner_idle", "dropped", "masked", "downweighted", "cut")
    return (
        row["name"] + deadline,
        f"{row['tokens_per_s']:,.0f}",
        *(f"{row[share]:.1%}" for share in shares),
        f"{row['lag_mean']:.2f}",
        f"{row['lag_p95']:g}",
        f"{row['lag_max']}",
    )


def _plot(
    points: Sequence[Outcome], title: str, unit: str, lines: Sequence[tuple[str, str, int]]
) -> PagePlot:
    """Plot one line for each key and number of generators."""
    counts = sorted({point["generators"] for point in points})
    limits = list(dict.fromkeys(f"{point['max_lag']}" for point in points))
    plot = PagePlot(title, unit, [], "staleness.max_lag", x_names=limits)
    for color, count in enumerate(counts):
        selected = [point for point in points if point["generators"] == count]
        label_suffix = f"{count:,} generator{'s' * (count > 1)}" if len(counts) > 1 else ""
        for key, label, dash in lines:
            plot.lines.append(
                PlotLine(
                    ", ".join(filter(None, (label, label_suffix))) or unit,
                    [limits.index(f"{point['max_lag']}") for point in selected],
                    [point[key] for point in selected],
                    color=color,
                    dash=dash,
                )
            )
    return plot


def write(
    path: Path,
    name: str,
    source: str,
    points: Sequence[Outcome],
    sentences: Sequence[str],
    config: str,
) -> None:
    """Write the page atomically. source: of the times; config: as TOML."""
    blocks = [
        ListBlock(sentences),
        PlotBlock([_plot(points, *plot) for plot in PLOTS]),
        make_outcome_table(points, "Numbers"),
        TextBlock(config, heading="Configuration", style="pre"),
    ]
    page = page_kit.render(
        name, f"simulated, no model; times: {source}", blocks, {"simulation": points}
    )
    atomic_write.write(path, page)
