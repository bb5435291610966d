"""The page of a sweep.

It has heat maps, speed against reward, curves, and every cell.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison_analysis import KL_BATCHES, format_findings
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


def format_cells(result: dict[str, Any]) -> list[list[str]]:
    """Return the table of cells as text."""
    return [format_cell(cell) for cell in result["cells"]]


def format_cell(cell: Cell) -> list[str]:
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


def name_cell(cell: Cell) -> str:
    return f"{cell['correction']}, limit {cell['limit']}"


# ---- heat maps -----------------------------------------------------------------------------------


def choose_color(value: float, low: float, high: float) -> str:
    """Return a background from red (low) over yellow to green (high)."""
    if not math.isfinite(value):
        return "#f3f4f6"
    share = min(1.0, max(0.0, (value - low) / max(high - low, 1e-9)))
    return f"hsl({120 * share:.0f} 65% 72%)"


def make_heat_map(
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

    def make_cell(correction: str, limit: str) -> TableCell:
        cell = cells.get((correction, limit))
        if cell is None:
            return TableCell("")
        color = choose_color(value(cell), low, high)
        return TableCell(f"{value(cell):.2f}", below(cell), color)

    rows = [
        [correction, *(make_cell(correction, limit) for limit in result["limits"])]
        for correction in result["corrections"]
    ]
    head = ["", *(f"{name_axis(result)} {limit}" for limit in result["limits"])]
    return TableBlock(head, rows, heading=heading, style="map", note=note)


def name_axis(result: dict[str, Any]) -> str:
    return "injected lag" if result["injected"] else "limit"


def make_reward_map(result: dict[str, Any]) -> TableBlock:
    """Build the map of final reward, difference from sync and unstable runs."""

    def describe_cell(cell: Cell) -> str:
        against = cell["difference"]
        low, high = against["interval"]
        warning = f" \u26a0{cell['unstable']}/{cell['seeds']}" if cell["unstable"] else ""
        texts = [format_number(value, "+.2f") for value in (against["mean"], low, high)]
        return f"{texts[0]} [{texts[1]}, {texts[2]}]{warning}"

    best = max([cell["final"] for cell in result["cells"]] + [result["sync"]["final"]])
    sync = f"{result['sync']['final']:.3f} over {result['sync']['seeds']} seed(s)"
    return make_heat_map(
        result,
        lambda cell: float(cell["final"]),
        describe_cell,
        0.0,
        best,
        heading="Final reward, mean over seeds",
        note="Below it: difference from the synchronous run of the unchanged config "
        f"({sync}), with its 95 % interval over seeds, paired by seed. \u26a0 unstable "
        "runs of all; a run that stopped early keeps its last reward.",
    )


def make_ess_map(result: dict[str, Any]) -> TableBlock:
    """Build the map of the lowest ESS and the largest KL from behavior to target."""
    return make_heat_map(
        result,
        lambda cell: float(cell["ess"]),
        lambda cell: f"KL up to {format_number(cell['kl'], '.2g')}",
        0.0,
        1.0,
        heading="Effective sample size of the raw ratios target / behavior: lowest mean over 10 "
        "steps, worst seed",
    )


# ---- plots ---------------------------------------------------------------------------------------


def plot_frontier(result: dict[str, Any]) -> PlotBlock:
    """Plot final reward against speed, with the best of each limit labeled.

    The block is empty if no speed was measured.
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
        (result["speed"][limit], accuracy, f"{name_axis(result)} {limit}")
        for limit, accuracy in top.items()
        if accuracy is not None
    ]
    plot = PagePlot("", "final reward", lines, "speed against limit 0", "points", notes=notes)
    return PlotBlock(
        [plot] if timed else [],
        heading="Frontier: speed against reward",
        style="wide",
        note="Speed of a limit against limit 0, in decode steps of a short run at natural lag, "
        "with an update as long as the generation of one batch (learner and generators equally "
        "fast); it leaves out the cost of the correction.",
    )


def plot_curves(result: dict[str, Any]) -> list[PagePlot]:
    """Plot the reward over training: one plot a limit, one line a correction."""
    plots = []
    for limit in result["limits"]:
        lines = []
        for cell in result["cells"]:
            if cell["limit"] == limit:
                points = average_curves(cell["curves"])
                color = list(result["corrections"]).index(cell["correction"])
                xs, ys = ([point[i] for point in points] for i in (0, 1))
                lines.append(PlotLine(cell["correction"], xs, ys, color=color))
        plots.append(PagePlot(f"{name_axis(result)} {limit}", "mean reward", lines, "version"))
    return plots


def average_curves(
    seed_curves: Sequence[tuple[list[float], list[float]]],
) -> list[tuple[float, float]]:
    """Return the mean over seeds at each step that any seed has.

    A seed that stopped early keeps its last reward.
    """
    all_steps = sorted({step for steps, _ in seed_curves for step in steps})

    def find_value(steps: list[float], values: list[float], at_step: float) -> float:
        backwards = zip(reversed(steps), reversed(values), strict=True)
        return next((value for step, value in backwards if step <= at_step), values[0])

    return [
        (step, sum(find_value(*curve, step) for curve in seed_curves) / len(seed_curves))
        for step in all_steps
    ]


# ---- sentences -----------------------------------------------------------------------------------


def format_headline(suggestion: dict[str, Any]) -> str:
    if suggestion["limit"] is None:
        return "No suggestion"
    return f"Suggested: staleness.max_lag = {suggestion['limit']}" + (
        f" with {suggestion['correction']}" if suggestion.get("correction") else ""
    )


def list_problems(result: dict[str, Any]) -> list[str]:
    """List the problems of cells with unstable runs."""
    return [
        f"{name_cell(cell)}: {cell['unstable']} of {cell['seeds']}: {', '.join(cell['trouble'])}"
        + (f"; likely cause: {cell['cause']}" if cell["cause"] else "")
        for cell in result["cells"]
        if cell["unstable"]
    ]


def loses_tokens(cell: Cell) -> bool:
    """Return whether the staleness rule dropped, masked or downweighted tokens of the cell."""
    lines = cell["ledger_lines"]
    return any(name in lines for name in ("masked_stale", "dropped_stale", "abandoned")) or any(
        "faded" in size for line in lines.values() for size in line
    )


# ---- the page ------------------------------------------------------------------------------------


def list_blocks(result: dict[str, Any], corrections: Sequence[tuple[str, str, str]]) -> list[Block]:
    """Return the parts of the page, in their order."""
    suggestion, sync = result["suggestion"], result["sync"]
    suggested = [suggestion["reason"] + ".", suggestion.get("set"), f"rule: {suggestion['rule']}"]
    missing = [
        f"{result['missing']} runs of this grid are still to be made; their cells are empty."
    ]
    signs = [
        line
        for cell in result["cells"]
        for line in format_findings(name_cell(cell), cell["signs"], cell["seeds"])
    ]
    losses = [
        TableBlock(head, rows, heading=f"Losses by the staleness rule: {name_cell(cell)}")
        for cell in result["cells"]
        if loses_tokens(cell)
        for head, *rows in [build_length_ledger(cell)]
    ]
    return [
        TextBlock(
            "\n".join(line for line in suggested if line),
            heading=format_headline(suggestion),
            id="suggestion",
            style="box",
        ),
        ListBlock(missing if result["missing"] else [], style="bad"),
        make_reward_map(result),
        make_ess_map(result),
        plot_frontier(result),
        PlotBlock(plot_curves(result), heading="Reward over training, by limit"),
        TableBlock(
            ("", "is", "differences from the config"),
            corrections,
            heading="Corrections",
            id="corrections",
            text_columns=3,
        ),
        TableBlock(HEAD, format_cells(result), heading="Cells", id="cells"),
        *losses,
        ListBlock(signs, heading="Signs", id="signs"),
        ListBlock(list_problems(result), heading="Unstable", style="bad"),
        TextBlock(
            "OOD end: mean reward on out-of-distribution prompts after the last batch, over the "
            f"runs that reach it (the synchronous run: {format_number(sync['ood_end'], '.3f')}). "
            "KL to ref: KL(target || reference), k3, nats a token, mean over a run's last "
            f"{KL_BATCHES} batches, without its first, which precedes any update (the synchronous "
            f"run: {format_number(sync['kl_ref'], '.3g')}). "
            "KL max: behavior to target. Unstable by these rules: "
            f"{verdict.StabilityBounds()}. Collapsed runs are stopped early. p: paired t "
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
    page = page_kit.render(name, subtitle, list_blocks(result, corrections), {"sweep": blob})
    for path, text in ((directory / "report.html", page), (directory / "result.json", blob)):
        atomic_write.write(path, text)
    return directory / "report.html"
