"""What the HTML pages of runs, comparisons, sweeps, simulations and the laboratory have in common.

Each page is one file without outside links: a template of asyncrl/records/templates filled by
jinja2, with plotly's figures and its library inside."""

from __future__ import annotations

import json
from typing import Any

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed")
# Where a page has more lines than that.
MORE_COLOURS = (*COLOURS, "#0891b2", "#be185d", "#4d7c0f", "#78350f", "#475569")


def render(template: str, **values: Any) -> str:
    """The page of `template`, escaped but for what is Markup; `library` is plotly's where a page
    has figures.  A lone surrogate, as JSON files may hold it, is shown as its escape: no file
    can hold it.
    """
    import jinja2

    loader = jinja2.PackageLoader("asyncrl.records", "templates")
    page = jinja2.Environment(autoescape=True, loader=loader).get_template(template)
    return page.render(**values).encode("utf-8", "backslashreplace").decode()


def plot(figure: Any) -> Any:
    """A plotly figure as Markup; the page must hold `library()`."""
    import plotly.io
    from markupsafe import Markup

    return Markup(
        plotly.io.to_html(
            figure,
            include_plotlyjs=False,
            full_html=False,
            config={"displaylogo": False, "displayModeBar": False},
        )
    )


def library() -> Any:
    """Plotly's own script, as Markup."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    return Markup(f"<script>{get_plotlyjs()}</script>")


def embedded(value: Any) -> Any:
    """JSON as Markup for a <script type="application/json">: a text that it holds cannot end the
    element.
    """
    from markupsafe import Markup

    text = value if isinstance(value, str) else json.dumps(value)
    return Markup(text.replace("</", "<\\/"))
