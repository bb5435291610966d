"""`asyncrl simulate --plot`: throughput, idle shares and lag against the staleness limit, on one
self-contained page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import COLOURS

HEAD = (
    "generators",
    "limit",
    "tokens/s",
    "s a step",
    "generators idle",
    "learner idle",
    "mean lag",
    "max lag",
    "tickets in flight",
    "tokens lost",
)


def outcome_row(outcome: dict[str, Any]) -> tuple[str, ...]:
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


def _figures(points: Sequence[dict[str, Any]]) -> list[Any]:
    import plotly.graph_objects as go

    counts = sorted({p["generators"] for p in points})

    def figure(title: str, unit: str, series: Sequence[tuple[str, str, str]]) -> Any:
        figure = go.Figure()
        for index, count in enumerate(counts):
            mine = [p for p in points if p["generators"] == count]
            for key, label, dash in series:
                name = ", ".join(
                    x
                    for x in (
                        label or ("" if len(counts) > 1 else unit),
                        f"{count:,} generator{'s' * (count > 1)}" if len(counts) > 1 else "",
                    )
                    if x
                )
                figure.add_scatter(
                    x=[f"{p['max_lag']}" for p in mine],
                    y=[p[key] for p in mine],
                    name=name,
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

    return [
        figure("Throughput against limit", "trained tokens/s", [("tokens_per_s", "", "solid")]),
        figure(
            "Idle share against limit",
            "share",
            [("idle_generator", "generators", "solid"), ("idle_learner", "learner", "dot")],
        ),
        figure(
            "Lag against limit",
            "versions",
            [("lag_mean", "mean", "solid"), ("lag_max", "largest", "dot")],
        ),
        figure(
            "Tickets in flight",
            "groups",
            [("tickets_mean", "mean", "solid"), ("tickets_max", "most", "dot")],
        ),
    ]


def write(
    path: Path,
    name: str,
    source: str,
    points: Sequence[dict[str, Any]],
    sentences: Sequence[str],
    config: str,
) -> Path:
    """Write the page, by rename."""

    plots = [page_kit.plot(figure) for figure in _figures(points)]
    page = page_kit.render(
        "simulate.html",
        name=name,
        source=source,
        sentences=sentences,
        plots=plots,
        head=HEAD,
        rows=[outcome_row(p) for p in points],
        config=config,
        library=page_kit.library(),
        data=page_kit.embedded(points),
    )
    atomic_write.write(path, page)
    return path
