"""Figures for a paper, made with matplotlib.

The colors are those of Okabe and Ito (2008), which color-blind readers can distinguish. Markers and
line styles differ too, so the figure also prints without color.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.figure.figure_points import (
    HELDOUT,
    LAG,
    LIMIT,
    STEP,
    FigureLine,
    make_caption,
)
from asyncrl.models.installed import build_install_command

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
STYLES = ("-", "--", ":", "-.")
FORMATS = (".pdf", ".svg", ".png")
LABELS = {STEP: "step (versions)", LAG: "measured mean lag (versions)"}
# keep text as text in PDF and SVG, and give the same file for the same points
SETTINGS = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "asyncrl"}
DATES = {".pdf": "CreationDate", ".svg": "Date"}


def draw(lines: Sequence[FigureLine], metric: str, across: str, path: Path) -> None:
    """Write the figure to `path`, in the format of its ending.

    Raises ConfigError for another ending, and if matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"-o {path}: give a name that ends in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a figure needs matplotlib: {build_install_command('figures')}; --csv works without it"
        ) from error
    with rc_context(SETTINGS):
        figure = Figure(figsize=(5.5, 3.8), layout="constrained")
        axes = figure.add_subplot()
        # a color for each method, a line style for each of its limits
        split_names = [line.name.partition(LIMIT) for line in lines]
        methods = list(dict.fromkeys(method for method, _, _ in split_names))
        limits = list(dict.fromkeys(limit for _, _, limit in split_names))
        for line, (method, _, limit) in zip(lines, split_names, strict=True):
            number = methods.index(method)
            color = OKABE_ITO[number % len(OKABE_ITO)]
            style = STYLES[(limits.index(limit) if len(limits) > 1 else number) % len(STYLES)]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(
                line.positions, line.mean, style, color=color, marker=marker, ms=4, label=line.name
            )
            if max(line.counts) > 1 and len(line.positions) > 1:
                axes.fill_between(
                    line.positions, line.low, line.high, color=color, alpha=0.18, lw=0
                )
            elif max(line.counts) > 1:
                axes.vlines(line.positions, line.low, line.high, color=color, lw=1.5)
        axes.set_xlabel(LABELS[across])
        axes.set_ylabel("held-out reward" if metric == HELDOUT else metric)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        columns = min(3, len(lines))
        figure.legend(loc="outside upper center", ncols=columns, frameon=False, fontsize=8)
        figure.supxlabel(make_caption(lines, across), fontsize=7)
        date = DATES.get(path.suffix)
        figure.savefig(path, dpi=200, metadata={date: None} if date else None)
