"""`asyncrl simulate --plot`: throughput, idle shares and lag against the staleness limit, on one self-contained page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.report import COLOURS

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>asyncrl simulate: {{ name }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #1f2937 }
 h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } .sub { color: #6b7280 }
 .grid { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem } table { border-collapse: collapse }
 td, th { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb } pre { white-space: pre-wrap }
</style>{{ library }}</head><body>
<h1>{{ name }}</h1><div class="sub">simulated, no model; times: {{ source }}</div>
<ul>{% for s in sentences %}<li>{{ s }}</li>{% endfor %}</ul>
<div class="grid">{% for plot in plots %}<div>{{ plot }}</div>{% endfor %}</div>
<h2>Numbers</h2><table><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for x in row %}<td>{{ x }}</td>{% endfor %}</tr>{% endfor %}</table>
<h2>Configuration</h2><pre>{{ config }}</pre>
<script type="application/json" id="simulation">{{ data }}</script>
</body></html>"""

HEAD = ("generators", "limit", "tokens/s", "s a step", "generators idle", "learner idle", "mean lag", "max lag", "tickets in flight", "tokens lost")


def row(o: dict[str, Any]) -> tuple[str, ...]:
    lost = sum(o["losses"].values()) / max(o["generated"], 1)
    return (f"{o['generators']:,}", f"{o['max_lag']}", f"{o['tokens_per_s']:,.0f}", f"{o['step_s']:.3g}", f"{o['idle_generator']:.1%}",
            f"{o['idle_learner']:.1%}", f"{o['lag_mean']:.2f}", f"{o['lag_max']}", f"{o['tickets_mean']:.1f}", f"{lost:.1%}")  # fmt: skip


def _figures(points: Sequence[dict[str, Any]]) -> list[Any]:
    import plotly.graph_objects as go

    counts = sorted({p["generators"] for p in points})

    def figure(title: str, unit: str, series: Sequence[tuple[str, str, str]]) -> Any:
        f = go.Figure()
        for i, n in enumerate(counts):
            mine = [p for p in points if p["generators"] == n]
            for key, label, dash in series:
                name = ", ".join(x for x in (label or ("" if len(counts) > 1 else unit), f"{n:,} generator{'s' * (n > 1)}" if len(counts) > 1 else "") if x)
                f.add_scatter(x=[f"{p['max_lag']}" for p in mine], y=[p[key] for p in mine], name=name, mode="lines+markers",
                              line={"dash": dash, "color": COLOURS[i % len(COLOURS)]})  # fmt: skip
        f.update_layout(title={"text": title, "font": {"size": 14}, "y": 0.97}, height=380, margin={"l": 60, "r": 9, "t": 95, "b": 40}, template="plotly_white",
                        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"}, showlegend=True)  # fmt: skip
        f.update_yaxes(title=unit, rangemode="tozero")
        f.update_xaxes(title="staleness.max_lag", type="category")
        return f

    return [
        figure("Throughput against limit", "trained tokens/s", [("tokens_per_s", "", "solid")]),
        figure("Idle share against limit", "share", [("idle_generator", "generators", "solid"), ("idle_learner", "learner", "dot")]),
        figure("Lag against limit", "versions", [("lag_mean", "mean", "solid"), ("lag_max", "largest", "dot")]),
        figure("Tickets in flight", "groups", [("tickets_mean", "mean", "solid"), ("tickets_max", "most", "dot")]),
    ]


def write(path: Path, name: str, source: str, points: Sequence[dict[str, Any]], sentences: Sequence[str], config: str) -> Path:
    """Write the page, by rename."""
    import jinja2
    import plotly.io as pio
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    plots = [Markup(pio.to_html(f, include_plotlyjs=False, full_html=False, config={"displaylogo": False, "displayModeBar": False})) for f in _figures(points)]
    page = jinja2.Environment(autoescape=True).from_string(PAGE).render(
        name=name, source=source, sentences=sentences, plots=plots, head=HEAD, rows=[row(p) for p in points], config=config,
        library=Markup(f"<script>{get_plotlyjs()}</script>"), data=Markup(json.dumps(points).replace("</", "<\\/")),
    )  # fmt: skip
    part = path.with_name(path.name + ".part")
    part.write_text(page)
    os.replace(part, path)
    return path
