"""The output of a lab experiment.

It has tables on the terminal and on a page, a JSON file and a verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import ListBlock, ListItem, PagePlot, PlotBlock, PlotLine, TableBlock

Lines = dict[str, tuple[Sequence[float], Sequence[float]]]  # xs and ys by name


@dataclass
class LabClaim:
    """A sentence of the verdict, and whether this prior claim holds."""

    text: str
    holds: bool

    @property
    def as_line(self) -> str:
        return ("holds: " if self.holds else "DOES NOT HOLD: ") + self.text

    @property
    def style(self) -> str:
        return "good" if self.holds else "bad"


@dataclass
class LabFindings:
    """The result of one experiment and its presentation."""

    name: str
    setting: str
    result: dict[str, Any]
    claims: list[LabClaim]
    tables: list[TableBlock]
    figures: list[PagePlot] = field(default_factory=list)

    def as_text(self) -> str:
        return "\n\n".join(
            [
                self.setting,
                *(t.as_text() for t in self.tables),
                "Verdict\n" + "\n".join("  " + c.as_line for c in self.claims),
            ]
        )

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = convert_value(
            self.result | {"verdict": [{"text": c.text, "holds": c.holds} for c in self.claims]}
        )
        return values


def convert_value(x: Any) -> Any:
    """Convert to JSON types: numbers of 6 digits, None if not finite."""
    if isinstance(x, dict):
        return {str(k): convert_value(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [convert_value(v) for v in x]
    return (float(f"{x:.6g}") if math.isfinite(x) else None) if isinstance(x, float) else x


def format_number(x: float) -> str:
    """Format with three digits; rounding errors of a float64 sum become "0 (1e-9)"."""
    return "0 (1e-9)" if abs(x) < 1e-9 else f"{x:.3g}"


def make_table(
    heading: str, head: Sequence[str], rows: Mapping[str, Iterable[float | str]]
) -> TableBlock:
    """Build a table with one row a name. Numbers are formatted by `format_number`."""
    cells = [
        [name, *(x if isinstance(x, str) else format_number(x) for x in values)]
        for name, values in rows.items()
    ]
    return TableBlock(head, cells, heading=heading)


def plot_lines(title: str, lines: Lines, across: str, unit: str, *, log: str = "") -> PagePlot:
    """Plot one line a name. log: the logarithmic axes, as "xy"."""
    plot_lines = [PlotLine(name, xs, ys) for name, (xs, ys) in lines.items()]
    return PagePlot(title, unit, plot_lines, across, log=log)


def write(directory: Path, findings: LabFindings) -> tuple[Path, Path]:
    """Write DIR/NAME.html and DIR/NAME.json and return both paths."""
    directory.mkdir(parents=True, exist_ok=True)
    blob = json.dumps(findings.as_json())
    blocks = [
        ListBlock(
            [ListItem(claim.as_line, style=claim.style) for claim in findings.claims],
            heading="Verdict",
            id="verdict",
        ),
        *([PlotBlock(findings.figures)] if findings.figures else []),
        *findings.tables,
    ]
    page = page_kit.render(f"lab {findings.name}", findings.setting, blocks, {"result": blob})
    paths = directory / f"{findings.name}.html", directory / f"{findings.name}.json"
    for path, text in zip(paths, (page, blob), strict=True):
        atomic_write.write(path, text)
    return paths
