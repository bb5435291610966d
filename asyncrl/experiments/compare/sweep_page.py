"""The page of a sweep.

It has heat maps, speed against accuracy, curves, and every cell.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison_analysis import KL_BATCHES, signs_told
from asyncrl.experiments.compare.page import clean, format_number
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import (
    Block,
    ListBlock,
    PagePlot,
    PlotBlock,
    PlotLine,
    TableBlock,
    TableCell,
    TextBlock,
)
from asyncrl.supervise.report.run_page import build_length_ledger

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
    *,
    heading: str,
    note: str = "",
) -> TableBlock:
    """Build a table with colored cells: corrections down, limits across.

    below: returns the small text under the value.
    """
    cells = {(cell["correction"], cell["limit"]): cell for cell in result["cells"]}

    def map_cell(correction: str, limit: str) -> TableCell:
        cell = cells.get((correction, limit))
        if cell is None:
            return TableCell("")
        color = shade_color(value(cell), low, high)
        return TableCell(f"{value(cell):.2f}", below(cell), color)

    rows = [
        [correction, *(map_cell(correction, limit) for limit in result["limits"])]
        for correction in result["corrections"]
    ]
    head = ["", *(f"{axis_name(result)} {limit}" for limit in result["limits"])]
    return TableBlock(head, rows, heading=heading, style="map", note=note)


def axis_name(result: dict[str, Any]) -> str:
    return "injected lag" if result["injected"] else "limit"


def accuracy_map(result: dict[str, Any]) -> TableBlock:
    """Build the map of final accuracy, difference from sync and unstable runs."""

    def cell_note(cell: Cell) -> str:
        against = cell["difference"]
        low, high = against["interval"]
        bad = f" \u26a0{cell['unstable']}/{cell['seeds']}" if cell["unstable"] else ""
        texts = [format_number(value, "+.2f") for value in (against["mean"], low, high)]
        return f"{texts[0]} [{texts[1]}, {texts[2]}]{bad}"

    best = max([cell["final"] for cell in result["cells"]] + [result["sync"]["final"]])
    sync = f"{result['sync']['final']:.3f} over {result['sync']['seeds']} seed(s)"
    return heat(
        result,
        lambda cell: float(cell["final"]),
        cell_note,
        0.0,
        best,
        heading="Accuracy at the end, mean over seeds",
        note=f"Below it: difference from the synchronous run of the config as it is ({sync}), with "
        "its 95 % interval over seeds, paired by seed. \u26a0 unstable runs of all; a run that was "
        "given up keeps its last accuracy.",
    )


def ess_map(result: dict[str, Any]) -> TableBlock:
    """Build the map of the lowest ESS and the largest KL from behavior to target."""
    return heat(
        result,
        lambda cell: float(cell["ess"]),
        lambda cell: f"KL up to {format_number(cell['kl'], '.2g')}",
        0.0,
        1.0,
        heading="Effective sample size of the raw ratios target / behavior: lowest mean over 10 "
        "steps, worst seed",
    )


# ---- plots ---------------------------------------------------------------------------------------


def frontier(result: dict[str, Any]) -> PlotBlock:
    """Plot final accuracy against speed, with the best of each limit labeled.

    Without plots if no speed was measured.
    """
    timed = [cell for cell in result["cells"] if math.isfinite(cell["speed"])]
    lines = [
        PlotLine(
            correction,
            [cell["speed"] for cell in timed if cell["correction"] == correction],
            [cell["final"] for cell in timed if cell["correction"] == correction],
        )
        for correction in result["corrections"]
    ]
    top = {
        limit: max((cell["final"] for cell in timed if cell["limit"] == limit), default=None)
        for limit in result["limits"]
    }
    notes = [
        (result["speed"][limit], accuracy, f"{axis_name(result)} {limit}")
        for limit, accuracy in top.items()
        if accuracy is not None
    ]
    plot = PagePlot(
        "", "accuracy at the end", lines, "speed against limit 0", "points", notes=notes
    )
    return PlotBlock(
        [plot] if timed else [],
        heading="Frontier: speed against accuracy",
        style="wide",
        note="Speed of a limit against limit 0, in decode steps of a short run at natural lag, "
        "with an update as long as the writing of one batch (learner and generators equally fast); "
        "the correction's own cost is not in it.",
    )


def curves(result: dict[str, Any]) -> list[PagePlot]:
    """Plot accuracy over training: one plot a limit, one line a correction."""
    plots = []
    for limit in result["limits"]:
        lines = []
        for cell in result["cells"]:
            if cell["limit"] == limit:
                points = mean_curve(cell["curves"])
                color = list(result["corrections"]).index(cell["correction"])
                across, up = ([point[i] for point in points] for i in (0, 1))
                lines.append(PlotLine(cell["correction"], across, up, color=color))
        plots.append(PagePlot(f"{axis_name(result)} {limit}", "accuracy", lines, "version"))
    return plots


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> list[tuple[float, float]]:
    """Return the mean over seeds at each step that any seed has.

    A seed that stopped early keeps its last accuracy.
    """
    every = sorted({step for steps, _ in curves for step in steps})

    def value_at(steps: list[float], values: list[float], wanted: float) -> float:
        backwards = zip(reversed(steps), reversed(values), strict=True)
        return next((value for step, value in backwards if step <= wanted), values[0])

    return [(step, sum(value_at(*curve, step) for curve in curves) / len(curves)) for step in every]


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


def page_blocks(result: dict[str, Any], corrections: Sequence[tuple[str, str, str]]) -> list[Block]:
    """Return the parts of the page, in their order."""
    suggestion, sync = result["suggestion"], result["sync"]
    suggested = [suggestion["reason"] + ".", suggestion.get("set"), f"rule: {suggestion['rule']}"]
    missing = [
        f"{result['missing']} runs of this grid are not made yet; empty cells are missing, not "
        "zero."
    ]
    signs = [
        line
        for cell in result["cells"]
        for line in signs_told(cell_name(cell), cell["signs"], cell["seeds"])
    ]
    losses = [
        TableBlock(head, rows, heading=f"What the staleness rule took: {cell_name(cell)}")
        for cell in result["cells"]
        if loses_tokens(cell)
        for head, *rows in [build_length_ledger(cell)]
    ]
    return [
        TextBlock(
            "\n".join(line for line in suggested if line),
            heading=headline(suggestion),
            id="suggestion",
            style="box",
        ),
        ListBlock(missing if result["missing"] else [], style="bad"),
        accuracy_map(result),
        ess_map(result),
        frontier(result),
        PlotBlock(curves(result), heading="Accuracy over training, by limit"),
        TableBlock(
            ("", "is", "differs from the config by"),
            corrections,
            heading="Corrections",
            id="corrections",
            words=3,
        ),
        TableBlock(HEAD, cell_rows(result), heading="Cells", id="cells"),
        *losses,
        ListBlock(signs, heading="Signs", id="signs"),
        ListBlock(list_problems(result), heading="Unstable", style="bad"),
        TextBlock(
            "OOD end: accuracy on out-of-distribution prompts after the last batch, over the runs "
            f"that got there (the synchronous run: {format_number(sync['ood_end'], '.3f')}). KL to "
            "ref: KL(target || reference), k3, nats a token, mean over a run's last "
            f"{KL_BATCHES} batches, without its first, which precedes any update (the synchronous "
            f"run: {format_number(sync['kl_ref'], '.3g')}). "
            "KL max: behavior to target. Unstable by these rules: "
            f"{verdict.StabilityBounds()}. Collapsed runs are given up at that point. p: paired t "
            "over seeds, Holm's correction over all cells.",
            style="soft",
        ),
    ]


def write(
    directory: Path,
    name: str,
    result: dict[str, Any],
    corrections: Sequence[tuple[str, str, str]],
    subtitle: str,
) -> Path:
    """Write DIR/report.html and DIR/result.json and return the page's path."""
    blob = json.dumps(clean(result))
    page = page_kit.render(name, subtitle, page_blocks(result, corrections), {"sweep": blob})
    for path, text in ((directory / "report.html", page), (directory / "result.json", blob)):
        atomic_write.write(path, text)
    return directory / "report.html"
