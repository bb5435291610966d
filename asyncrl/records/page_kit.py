"""The blocks of every page: text, lists, tables, cards and plots.

Runs, comparisons, sweeps, simulations and replays write one file without external links.
`page/page.html` lays out its blocks, `page/page.css` styles them, `page/plot.js` draws the plots
and `page/samples.js` colors the tokens of samples. `asyncrl watch` serves the same style sheet and
scripts, so a plot looks the same everywhere.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

FILES = Path(__file__).parent / "page"
# an axis with names has its points at 0, 1, 2, ...
Numbers = Sequence[float | None]


class PlotLine(msgspec.Struct, omit_defaults=True, rename={"xs": "x", "ys": "y"}):
    """A line of a plot, or its points, bars, area or spans.

    xs, ys: float [n]; of spans: their beginnings and the numbers of their lanes.
    low, high: float [n], a band around ys.
    until: float [n], ends of spans.
    color, dash: numbers of a color and a dash pattern; -1: by the line's place in the plot.
    run, metric: where the values come from, on the pages of `asyncrl watch`.
    """

    label: str
    xs: Numbers
    ys: Numbers
    low: Numbers = ()
    high: Numbers = ()
    until: Numbers = ()
    color: int = -1
    dash: int = -1
    run: str = ""
    metric: str = ""


class PagePlot(msgspec.Struct, omit_defaults=True):
    """A plot as `plot.js` draws it.

    unit, across: names of the y axis and of the x axis.
    log: the logarithmic axes: "", "x", "y" or "xy".
    x_names, y_names: names in place of the numbers of an axis.
    top: the upper end of the y axis; 0: that of the values.
    notes: (x, y, text) beside a point.
    metrics: name -> meaning of the metrics drawn.
    """

    title: str
    unit: str
    lines: list[PlotLine]
    across: str = "step"
    kind: Literal["lines", "points", "bars", "areas", "spans"] = "lines"
    log: str = ""
    x_names: Sequence[str] = ()
    y_names: Sequence[str] = ()
    top: float = 0.0
    notes: Sequence[tuple[float, float, str]] = ()
    metrics: Mapping[str, str] = {}


@dataclass
class Block:
    """A part of a page.

    id: id of its element. style: class of page.css. note: small text below it.
    """

    kind: ClassVar[str]
    _: KW_ONLY
    heading: str = ""
    id: str = ""
    style: str = ""
    note: str = ""


@dataclass
class TextBlock(Block):
    """A paragraph; style `pre` keeps its line breaks."""

    kind = "text"
    text: str


@dataclass
class ListItem:
    """An item of a list: a bold beginning, and text that follows. style: a class of page.css."""

    text: str
    bold: str = ""
    style: str = ""


@dataclass
class ListBlock(Block):
    """A list; it is not shown without items."""

    kind = "list"
    items: Iterable[str | ListItem]

    def __post_init__(self) -> None:
        self.items = [ListItem(i) if isinstance(i, str) else i for i in self.items]


@dataclass
class TableCell:
    """A cell with small text below its own and a CSS background."""

    text: str
    below: str = ""
    background: str = ""


@dataclass
class TableBlock(Block):
    """A table. text_columns: columns from the left that hold text; the others hold numbers."""

    kind = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str | TableCell]]
    text_columns: int = 1

    def as_text(self) -> str:
        """Return the table for a terminal, with its heading, columns aligned."""
        rows = [[str(cell) for cell in row] for row in (self.head, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if number < self.text_columns else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([self.heading, *lines] if self.heading else lines)


@dataclass
class CardBlock(Block):
    """Cards, each (label, value, id of the value, note below it)."""

    kind = "cards"
    cards: Sequence[tuple[str, str, str, str]]


@dataclass
class PlotBlock(Block):
    """Plots in a grid; style `wide`: one below the other."""

    kind = "plots"
    plots: Sequence[PagePlot]


@dataclass
class SamplesBlock(Block):
    """Samples whose tokens are colored, as `samples.js` shows them; it is not shown without rows.

    rows: of token_samples.jsonl, each training sequence with prompt, pieces and shades (name ->
    value of each token). shades: name -> meaning of what a token's color can show.
    """

    kind = "samples"
    rows: Sequence[Mapping[str, Any]]
    shades: Mapping[str, str]


def render(title: str, subtitle: str, blocks: Sequence[Block], data: Mapping[str, Any]) -> str:
    """Return a page. Every text is escaped.

    data: id -> value of a script element with JSON. A lone surrogate, which JSON may hold and UTF-8
    cannot, is shown as its escape.
    """
    from markupsafe import Markup

    files = {path.name: path.read_text(encoding="utf-8") for path in FILES.iterdir()}
    plots = [plot for block in blocks if isinstance(block, PlotBlock) for plot in block.plots]
    samples = [block for block in blocks if isinstance(block, SamplesBlock) and block.rows]
    script = files["plot.js"] + (files["samples.js"] if samples else "")
    values = dict(data)
    values |= {f"{x.id}-rows": {"rows": x.rows, "shades": x.shades} for x in samples}
    return fill(
        "page.html",
        title=title,
        subtitle=subtitle,
        blocks=blocks,
        plots=embed_json(msgspec.json.encode(plots).decode()),
        data={id_: embed_json(value) for id_, value in values.items()},
        css=Markup(files["page.css"]),
        script=Markup(script),
    )


def clean(value: Any, form: str = "") -> Any:
    """Replace numbers that are not finite by None, because JSON has no NaN.

    form: a format by which the others are rounded.
    """
    if isinstance(value, dict):
        return {str(key): clean(inner, form) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clean(inner, form) for inner in value]
    if not isinstance(value, float):
        return value
    return float(format(value, form)) if math.isfinite(value) else None


def format_number(value: float | None, form: str) -> str:
    """Format a number in a table; "-" if it is missing."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def fill(name: str, **values: Any) -> str:
    """Return a template as HTML, such as `blocks.html`, of blocks without plots and samples.

    Every text is escaped.
    """
    text: str = _get_template(name).render(values)
    return text.encode("utf-8", "backslashreplace").decode()


@functools.cache
def _get_template(name: str) -> Any:
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(FILES), autoescape=True)
    return environment.get_template(name)


def embed_json(value: Any) -> Any:
    """Return JSON as Markup for a <script type="application/json">.

    Every `<` is escaped: `</script` would end the element, and `<!--<script` would keep the page's
    own `</script>` from ending it."""
    from markupsafe import Markup

    text = value if isinstance(value, str) else json.dumps(value)
    return Markup(text.replace("<", "\\u003c"))
