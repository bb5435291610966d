"""The tables of `asyncrl simulate`, and its page of plots against the staleness limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.experiments.simulate.what_if import Outcome
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import COLOURS

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
# of each plot: title, unit, and its lines as (key, label, dash)
PLOTS = (
    ("Throughput against limit", "trained tokens/s", (("tokens_per_s", "", "solid"),)),
    (
        "Idle share against limit",
        "share",
        (("idle_generator", "generators", "solid"), ("idle_learner", "learner", "dot")),
    ),
    (
        "Lag against limit",
        "versions",
        (("lag_mean", "mean", "solid"), ("lag_max", "largest", "dot")),
    ),
    (
        "Tickets in flight",
        "groups",
        (("tickets_mean", "mean", "solid"), ("tickets_max", "most", "dot")),
    ),
)


def outcome_row(outcome: Outcome) -> tuple[str, ...]:
    """Format an outcome in the columns of HEAD."""
    lost = sum(outcome["losses"].values()) / max(outcome["generated"], 1)
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
        f"{lost:.1%}",
    )


def treatment_row(row: Outcome) -> tuple[str, ...]:
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


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows]


def _figure(
    points: Sequence[Outcome], title: str, unit: str, lines: Sequence[tuple[str, str, str]]
) -> Any:
    """Plot one line for each key and number of generators."""
    import plotly.graph_objects as go

    counts = sorted({point["generators"] for point in points})
    figure = go.Figure()
    for index, count in enumerate(counts):
        mine = [point for point in points if point["generators"] == count]
        several = f"{count:,} generator{'s' * (count > 1)}" if len(counts) > 1 else ""
        for key, label, dash in lines:
            figure.add_scatter(
                x=[f"{point['max_lag']}" for point in mine],
                y=[point[key] for point in mine],
                name=", ".join(filter(None, (label, several))) or unit,
                mode="lines+markers",
                line={"dash": dash, "color": COLOURS[index % len(COLOURS)]},
            )
    figure.update_layout(
        title={"text": title, "font": {"size": 14}, "y": 0.97},
        height=380,
        margin={"l": 60, "r": 9, "t": 95, "b": 40},
        template="plotly_white",
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        showlegend=True,
    )
    figure.update_yaxes(title=unit, rangemode="tozero")
    figure.update_xaxes(title="staleness.max_lag", type="category")
    return figure


def write(
    path: Path,
    name: str,
    source: str,
    points: Sequence[Outcome],
    sentences: Sequence[str],
    config: str,
) -> None:
    """Write the page, by rename. source: of the times; config: as TOML."""
    page = page_kit.render(
        "simulate.html",
        name=name,
        source=source,
        sentences=sentences,
        plots=[page_kit.plot(_figure(points, *plot)) for plot in PLOTS],
        head=HEAD,
        rows=[outcome_row(point) for point in points],
        config=config,
        library=page_kit.library(),
        data=page_kit.embedded(points),
    )
    atomic_write.write(path, page)
