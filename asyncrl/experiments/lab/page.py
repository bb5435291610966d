"""The output of a lab experiment: tables and a verdict on the terminal, a page and a JSON file."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.records import atomic_write, page_kit
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import ListBlock, ListItem, PagePlot, PlotBlock, TableBlock


@dataclass
class LabFindings:
    """The result of one experiment and its presentation.

    claims: (sentence of the verdict, whether this prior claim holds).
    """

    name: str
    setting: str
    result: JsonObject
    claims: list[tuple[str, bool]]
    tables: list[TableBlock]
    plots: Sequence[PagePlot] = ()

    def list_verdict(self) -> list[ListItem]:
        return [
            ListItem(f"holds: {text}", style="good")
            if holds
            else ListItem(f"DOES NOT HOLD: {text}", style="bad")
            for text, holds in self.claims
        ]

    def as_text(self) -> str:
        verdict = "".join(f"\n  {item.text}" for item in self.list_verdict())
        tables = (table.as_text() for table in self.tables)
        return "\n\n".join([self.setting, *tables, f"Verdict{verdict}"])

    def as_json(self) -> JsonObject:
        verdict = [{"text": text, "holds": holds} for text, holds in self.claims]
        values: JsonObject = page_kit.clean(self.result | {"verdict": verdict}, ".6g")
        return values


def format_cell(x: float | str) -> str:
    """Format with three digits; rounding errors of a float64 sum become "0 (1e-9)", nan "-"."""
    if isinstance(x, str) or math.isnan(x):
        return x if isinstance(x, str) else "-"
    return "0 (1e-9)" if abs(x) < 1e-9 else f"{x:.3g}"


def make_table(heading: str, rows: Mapping[str, Mapping[str, float | str]]) -> TableBlock:
    """Build a table. rows: name -> column -> cell; all rows have the same columns."""
    columns = next(iter(rows.values()))
    cells = [[name, *map(format_cell, row.values())] for name, row in rows.items()]
    head = ["", *(column.replace("_", " ") for column in columns)]
    return TableBlock(head, cells, heading=heading)


def write(directory: Path, findings: LabFindings) -> tuple[Path, Path]:
    """Write DIR/NAME.html and DIR/NAME.json and return both paths."""
    directory.mkdir(parents=True, exist_ok=True)
    blob = json.dumps(findings.as_json())
    blocks = [
        ListBlock(findings.list_verdict(), heading="Verdict", id="verdict"),
        PlotBlock(findings.plots, style="wide"),
        *findings.tables,
    ]
    page = page_kit.render(f"lab {findings.name}", findings.setting, blocks, {"result": blob})
    paths = directory / f"{findings.name}.html", directory / f"{findings.name}.json"
    for path, text in zip(paths, (page, blob), strict=True):
        atomic_write.write(path, text)
    return paths
