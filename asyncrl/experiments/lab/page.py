"""The output of a lab experiment.

Tables on the terminal, a page with plots, a JSON file and a verdict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import COLOURS

Lines = dict[str, tuple[Sequence[float], Sequence[float]]]  # xs and ys by name


@dataclass
class LabClaim:
    """A sentence of the verdict.

    holds: whether a prior claim holds; None for a finding without a prior claim.
    """

    text: str
    holds: bool | None = None

    @property
    def as_line(self) -> str:
        return {True: "holds: ", False: "DOES NOT HOLD: ", None: "found: "}[self.holds] + self.text

    @property
    def style(self) -> str:
        return {True: "good", False: "bad", None: ""}[self.holds]


@dataclass
class ResultTable:
    title: str
    head: Sequence[str]
    rows: list[list[str]]

    def as_text(self) -> str:
        """Align the columns, the first one to the left."""
        every = [list(self.head), *self.rows]
        width = [max(len(r[i]) for r in every) for i in range(len(self.head))]
        lines = [
            "  ".join(
                x.ljust(w) if i == 0 else x.rjust(w)
                for i, (x, w) in enumerate(zip(r, width, strict=True))
            )
            for r in every
        ]
        return "\n".join([self.title, *lines])


@dataclass
class LabFindings:
    """The result of one experiment and its presentation. figures: plotly figures."""

    name: str
    setting: str
    result: dict[str, Any]
    claims: list[LabClaim]
    tables: list[ResultTable]
    figures: list[Any] = field(default_factory=list)

    def as_text(self) -> str:
        return "\n\n".join(
            [
                self.setting,
                *(t.as_text() for t in self.tables),
                "Verdict\n" + "\n".join("  " + c.as_line for c in self.claims),
            ]
        )

    def json(self) -> dict[str, Any]:
        values: dict[str, Any] = as_json_value(
            self.result | {"verdict": [{"text": c.text, "holds": c.holds} for c in self.claims]}
        )
        return values


def as_json_value(x: Any) -> Any:
    """Convert to JSON types: numbers of 6 digits, None if not finite."""
    if isinstance(x, dict):
        return {str(k): as_json_value(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [as_json_value(v) for v in x]
    return (float(f"{x:.6g}") if math.isfinite(x) else None) if isinstance(x, float) else x


def format_number(x: float) -> str:
    """Format with three digits; rounding errors of a float64 sum become "0 (1e-9)"."""
    return "0 (1e-9)" if abs(x) < 1e-9 else f"{x:.3g}"


def curves(
    title: str,
    lines: Lines,
    x: str,
    y: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> Any:
    """Plot one line a name."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        dash = ("solid", "dash", "dot")[i // len(COLOURS) % 3]
        figure.add_scatter(
            x=list(xs),
            y=list(ys),
            name=name,
            mode="lines+markers",
            marker={"size": 4},
            line={"color": COLOURS[i % len(COLOURS)], "dash": dash},
        )
    figure.update_layout(
        title={"text": title, "font": {"size": 14}},
        height=400,
        margin={"l": 60, "r": 15, "t": 45, "b": 40},
        template="plotly_white",
        legend={"font": {"size": 10}},
    )
    figure.update_xaxes(
        title=x, **(log_axis([v for xs, _ in lines.values() for v in xs]) if log_x else {})
    )
    figure.update_yaxes(
        title=y, **(log_axis([v for _, ys in lines.values() for v in ys]) if log_y else {})
    )
    return figure


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis with round numbers written out.

    Ticks are powers of ten, and 2 and 5 times them if there would be few.

    >>> log_axis([0.003, 30.0])["ticktext"], log_axis([4.0, 60.0])["ticktext"]
    (['0.001', '0.01', '0.1', '1', '10', '100'], ['1', '2', '5', '10', '20', '50', '100'])
    """
    positive = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = math.ceil(math.log10(max(positive)))
    steps = (1,) if high - low > 3 else (1, 2, 5)
    ticks = [float(f"{s}e{e}") for e in range(low, high + 1) for s in steps if e < high or s == 1]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{v:g}" for v in ticks]}


def dots(title: str, names: Sequence[str], panels: Mapping[str, Sequence[float]]) -> Any:
    """Plot one row a name and one column of logarithmic dots a panel.

    Many points that may overlap stay readable.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes=True, horizontal_spacing=0.03)
    for i, (label, values) in enumerate(panels.items(), 1):
        figure.add_scatter(
            x=list(values),
            y=list(names),
            mode="markers",
            marker={"size": 8, "color": COLOURS[i - 1]},
            showlegend=False,
            row=1,
            col=i,
        )
        figure.update_xaxes(title=label, row=1, col=i, **log_axis(values))
    figure.update_yaxes(autorange="reversed", dtick=1, automargin=True)
    figure.update_layout(
        title={"text": title, "font": {"size": 14}},
        height=110 + 20 * len(names),
        margin={"l": 10, "r": 15, "t": 45, "b": 40},
        template="plotly_white",
    )
    return figure


def write(directory: Path, findings: LabFindings) -> tuple[Path, Path]:
    """Write DIR/NAME.html and DIR/NAME.json and return both paths."""

    directory.mkdir(parents=True, exist_ok=True)
    blob = json.dumps(findings.json())
    plots = [page_kit.plot(f) for f in findings.figures]
    page = page_kit.render(
        "lab.html",
        name=findings.name,
        setting=findings.setting,
        claims=findings.claims,
        plots=plots,
        tables=findings.tables,
        library=page_kit.library(),
        blob=page_kit.embedded(blob),
    )
    paths = directory / f"{findings.name}.html", directory / f"{findings.name}.json"
    for path, text in zip(paths, (page, blob), strict=True):
        atomic_write.write(path, text)
    return paths
