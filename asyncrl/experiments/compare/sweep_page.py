"""The page of a sweep: a small HTML file without scripts.

It has heat maps, speed against accuracy, curves, and every cell.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison_analysis import KL_BATCHES, signs_told
from asyncrl.experiments.compare.page import clean, format_number
from asyncrl.experiments.compare.svg import PlotLine, svg
from asyncrl.records import atomic_write, page_kit
from asyncrl.supervise.run_page import ledger_by_length

HEAD = (
    "correction",
    "limit",
    "seeds",
    "end",
    "each seed",
    "vs sync",
    "interval",
    "p",
    "OOD end",
    "KL to ref",
    "area",
    "ESS",
    "KL max",
    "mean lag",
    "lost",
    "unstable",
    "speed",
)


Cell = dict[str, Any]  # of sweep_analysis: one correction at one limit, over its seeds


def cell_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the table of cells as text."""
    return [cell_row(cell) for cell in result["cells"]]


def cell_row(cell: Cell) -> list[str]:
    """Format one cell in the columns of HEAD."""
    against = cell["difference"]
    low, high = against["interval"]
    return [
        cell["correction"],
        cell["limit"],
        str(cell["seeds"]),
        format_number(cell["final"], ".3f"),
        " ".join(f"{accuracy:.3f}" for accuracy in cell["each"]),
        format_number(against["mean"], "+.3f"),
        f"[{format_number(low, '+.3f')}, {format_number(high, '+.3f')}]",
        format_number(against["p"], ".3f"),
        format_number(cell["ood_end"], ".3f"),
        format_number(cell["kl_ref"], ".3g"),
        format_number(cell["area"], ".3f"),
        format_number(cell["ess"], ".2f"),
        format_number(cell["kl"], ".3f"),
        format_number(cell["lag"], ".2f"),
        format_number(cell["lost"], ".1%"),
        f"{cell['unstable']} of {cell['seeds']}",
        format_number(cell["speed"], ".2f"),
    ]


def cell_name(cell: Cell) -> str:
    return f"{cell['correction']}, limit {cell['limit']}"


# ---- heat maps -----------------------------------------------------------------------------------


def shade_color(value: float, low: float, high: float) -> str:
    """Return a background from red (low) over yellow to green (high)."""
    if not math.isfinite(value):
        return "#f3f4f6"
    share = min(1.0, max(0.0, (value - low) / max(high - low, 1e-9)))
    return f"hsl({120 * share:.0f} 65% 72%)"


def heat(
    result: dict[str, Any],
    value: Callable[[Cell], float],
    below: Callable[[Cell], str],
    low: float,
    high: float,
) -> str:
    """Build a table with colored cells: corrections down, limits across.

    below: returns the small text under the value.
    """
    cells = {(cell["correction"], cell["limit"]): cell for cell in result["cells"]}
    axis = "injected lag" if result["injected"] else "limit"
    heads = "".join(f"<th>{axis} {limit}</th>" for limit in result["limits"])
    parts = [f"<table class='map'><tr><th></th>{heads}</tr>"]
    for correction in result["corrections"]:
        parts.append(f"<tr><th style='text-align:left'>{escape(correction)}</th>")
        for limit in result["limits"]:
            cell = cells.get((correction, limit))
            if cell is None:
                parts.append("<td></td>")
                continue
            color = shade_color(value(cell), low, high)
            parts.append(
                f"<td style='background:{color}'>{value(cell):.2f}<small>{below(cell)}</small></td>"
            )
        parts.append("</tr>")
    return "".join(parts) + "</table>"


def accuracy_map(result: dict[str, Any]) -> str:
    """Build the map of final accuracy, difference from sync and unstable runs."""

    def cell_note(cell: Cell) -> str:
        against = cell["difference"]
        low, high = against["interval"]
        bad = f" &#9888;{cell['unstable']}/{cell['seeds']}" if cell["unstable"] else ""
        texts = [format_number(value, "+.2f") for value in (against["mean"], low, high)]
        return f"{texts[0]} [{texts[1]}, {texts[2]}]{bad}"

    best = max([cell["final"] for cell in result["cells"]] + [result["sync"]["final"]])
    return heat(result, lambda cell: float(cell["final"]), cell_note, 0.0, best)


def ess_map(result: dict[str, Any]) -> str:
    """Build the map of the lowest ESS and the largest KL from behavior to target."""
    return heat(
        result,
        lambda cell: float(cell["ess"]),
        lambda cell: f"KL up to {format_number(cell['kl'], '.2g')}",
        0.0,
        1.0,
    )


# ---- plots ---------------------------------------------------------------------------------------


def assign_colors(result: dict[str, Any]) -> dict[str, str]:
    """Assign each correction its color in every plot."""
    return {
        name: page_kit.MORE_COLOURS[number % len(page_kit.MORE_COLOURS)]
        for number, name in enumerate(result["corrections"])
    }


def frontier(result: dict[str, Any]) -> str:
    """Plot final accuracy against speed, with the best of each limit labeled.

    Empty if no speed was measured.
    """
    color = assign_colors(result)
    timed = [cell for cell in result["cells"] if math.isfinite(cell["speed"])]
    if not timed:
        return ""
    points = [
        PlotLine(
            cell_name(cell), color[cell["correction"]], [(cell["speed"], cell["final"])], False
        )
        for cell in timed
    ]
    top = {
        limit: max((cell["final"] for cell in timed if cell["limit"] == limit), default=None)
        for limit in result["limits"]
    }
    labels = [
        (result["speed"][limit], accuracy, f"limit {limit}")
        for limit, accuracy in top.items()
        if accuracy is not None
    ]
    return svg(
        "",
        points,
        "speed against limit 0",
        "accuracy at the end",
        width=900,
        height=320,
        labels=labels,
    )


def curves(result: dict[str, Any]) -> list[str]:
    """Plot accuracy over training: one plot a limit, one line a correction."""
    color = assign_colors(result)
    axis = "injected lag" if result["injected"] else "limit"
    return [
        svg(
            f"{axis} {limit}",
            [
                PlotLine(
                    cell["correction"],
                    color[cell["correction"]],
                    mean_curve(cell["curves"]),
                    True,
                )
                for cell in result["cells"]
                if cell["limit"] == limit
            ],
            "version",
            "accuracy",
        )
        for limit in result["limits"]
    ]


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> list[tuple[float, float]]:
    """Return the mean over seeds at each step that any seed has.

    A seed that stopped early keeps its last accuracy.
    """
    every = sorted({step for steps, _ in curves for step in steps})

    def value_at(steps: list[float], values: list[float], wanted: float) -> float:
        backwards = zip(reversed(steps), reversed(values), strict=True)
        return next((value for step, value in backwards if step <= wanted), values[0])

    return [(step, sum(value_at(*curve, step) for curve in curves) / len(curves)) for step in every]


def color_legend(result: dict[str, Any]) -> str:
    """Build the legend of the corrections' colors."""
    return "".join(
        f"<span><b style='color:{color}'>&#9632;</b> {escape(name)}</span>"
        for name, color in assign_colors(result).items()
    )


# ---- sentences -----------------------------------------------------------------------------------


def headline(suggestion: dict[str, Any]) -> str:
    if suggestion["limit"] is None:
        return "No suggestion"
    return f"Suggested: staleness.max_lag = {suggestion['limit']}" + (
        f" with {suggestion['correction']}" if suggestion.get("correction") else ""
    )


def list_problems(result: dict[str, Any]) -> list[str]:
    """List the problems of cells with unstable runs."""
    return [
        f"{cell_name(cell)}: {cell['unstable']} of {cell['seeds']}: {', '.join(cell['trouble'])}"
        + (f"; likely cause: {cell['cause']}" if cell["cause"] else "")
        for cell in result["cells"]
        if cell["unstable"]
    ]


def loses_tokens(cell: Cell) -> bool:
    """Whether the staleness rule dropped, masked or downweighted tokens of the cell."""
    lines = cell["ledger_lines"]
    return any(name in lines for name in ("masked_stale", "dropped_stale", "abandoned")) or any(
        "faded" in size for line in lines.values() for size in line
    )


# ---- the page ------------------------------------------------------------------------------------


def write(
    directory: Path,
    name: str,
    result: dict[str, Any],
    corrections: Sequence[tuple[str, str, str]],
    subtitle: str,
) -> Path:
    """Write DIR/report.html and DIR/result.json and return the page's path."""
    from markupsafe import Markup

    blob = json.dumps(clean(result))
    sync = result["sync"]
    page = page_kit.render(
        "sweep.html",
        name=name,
        subtitle=subtitle,
        suggestion=result["suggestion"],
        headline=headline(result["suggestion"]),
        missing=result["missing"],
        head=HEAD,
        table=cell_rows(result),
        trouble=list_problems(result),
        signs=[
            line
            for cell in result["cells"]
            for line in signs_told(cell_name(cell), cell["signs"], cell["seeds"])
        ],
        rules=verdict.StabilityBounds(),
        kl_batches=KL_BATCHES,
        far=format_number(sync["ood_end"], ".3f"),
        kl=format_number(sync["kl_ref"], ".3g"),
        losses=[
            (cell_name(cell), ledger_by_length(cell))
            for cell in result["cells"]
            if loses_tokens(cell)
        ],
        sync=f"{sync['final']:.3f} over {sync['seeds']} seed(s)",
        corrections=corrections,
        curves=[Markup(plot) for plot in curves(result)],
        accuracy=Markup(accuracy_map(result)),
        ess=Markup(ess_map(result)),
        frontier=Markup(frontier(result)),
        key=Markup(color_legend(result)),
        blob=page_kit.embedded(blob),
    )
    for path, text in ((directory / "report.html", page), (directory / "result.json", blob)):
        atomic_write.write(path, text)
    return directory / "report.html"
