"""Shared parts of the HTML pages of runs, comparisons, sweeps, simulations and the lab.

Each page is one file without external links: a template in asyncrl/records/templates filled by
jinja2, with plotly's figures and its library embedded."""

from __future__ import annotations

import json
from typing import Any

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed")
# for pages with more lines
MORE_COLOURS = (*COLOURS, "#0891b2", "#be185d", "#4d7c0f", "#78350f", "#475569")


def render(template: str, **values: Any) -> str:
    """Fill `template`, and escape every value that is not Markup.

    `library` is plotly's script on pages with figures.  A lone surrogate, which JSON may hold and
    UTF-8 cannot, is shown as its escape."""
    import jinja2

    loader = jinja2.PackageLoader("asyncrl.records", "templates")
    page = jinja2.Environment(autoescape=True, loader=loader).get_template(template)
    return page.render(**values).encode("utf-8", "backslashreplace").decode()


def plot(figure: Any) -> Any:
    """Return a plotly figure as Markup; the page must contain `library()`."""
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
    """Return plotly's script as Markup."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    return Markup(f"<script>{get_plotlyjs()}</script>")


def embedded(value: Any) -> Any:
    """Return JSON as Markup for a <script type="application/json">.

    No `<` is left in it: `</script` would end the element, and `<!--<script` would keep the page's
    own `</script>` from ending it."""
    from markupsafe import Markup

    text = value if isinstance(value, str) else json.dumps(value)
    return Markup(text.replace("<", "\\u003c"))
