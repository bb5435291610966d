"""The page of a sweep: heat maps, the frontier of speed and stability, curves, every cell; a small
file without scripts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison import KL_BATCHES, signs_told
from asyncrl.experiments.compare.page import clean
from asyncrl.records import atomic_write, page_kit
from asyncrl.supervise.run_page import by_length

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


def show(x: float | None, form: str) -> str:
    return "-" if x is None or not math.isfinite(x) else format(x, form)


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table of cells, as text."""
    return [
        [
            c["correction"],
            c["limit"],
            str(c["seeds"]),
            show(c["final"], ".3f"),
            " ".join(f"{x:.3f}" for x in c["each"]),
            show(c["difference"]["mean"], "+.3f"),
            f"[{show(c['difference']['interval'][0], '+.3f')}, "
            f"{show(c['difference']['interval'][1], '+.3f')}]",
            show(c["difference"]["p"], ".3f"),
            show(c["ood_end"], ".3f"),
            show(c["kl_ref"], ".3g"),
            show(c["area"], ".3f"),
            show(c["ess"], ".2f"),
            show(c["kl"], ".3f"),
            show(c["lag"], ".2f"),
            show(c["lost"], ".1%"),
            f"{c['unstable']} of {c['seeds']}",
            show(c["speed"], ".2f"),
        ]
        for c in found["cells"]
    ]


def _shade(x: float, low: float, high: float) -> str:
    """Background from red (low) over yellow to green (high)."""
    if not math.isfinite(x):
        return "#f3f4f6"
    share = min(1.0, max(0.0, (x - low) / max(high - low, 1e-9)))
    return f"hsl({120 * share:.0f} 65% 72%)"


def heat(
    found: dict[str, Any],
    value: Callable[[dict[str, Any]], float],
    below: Callable[[dict[str, Any]], str],
    low: float,
    high: float,
) -> str:
    """Corrections down, limits across, as a table with coloured cells."""
    at = {(c["correction"], c["limit"]): c for c in found["cells"]}
    what = "injected lag" if found["injected"] else "limit"
    out = [
        "<table "
        f"class='map'><tr><th></th>{''.join(f'<th>{what} {x}</th>' for x in found['limits'])}</tr>"
    ]
    for n in found["corrections"]:
        out.append(f"<tr><th style='text-align:left'>{escape(n)}</th>")
        for x in found["limits"]:
            c = at.get((n, x))
            out.append(
                "<td></td>"
                if c is None
                else "<td "
                f"style='background:{_shade(value(c), low, high)}'>{value(c):.2f}"
                f"<small>{below(c)}</small></td>"
            )
        out.append("</tr>")
    return "".join(out) + "</table>"


Line = tuple[str, str, list[tuple[float, float]], bool]  # name, colour, points, joined by a line


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most `most`: multiples of 1, 2, 2.5 or 5 times a power of
    ten.

    >>> ticks(0, 0.81), ticks(0, 1.08)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    >>> ticks(-3, 130)
    [0.0, 25.0, 50.0, 75.0, 100.0, 125.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(
        s * power
        for s in (1, 2, 2.5, 5, 10, 20)
        if math.floor(high / (s * power)) - math.ceil(low / (s * power)) < most
    )
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def svg(
    title: str,
    lines: Sequence[Line],
    x_name: str,
    y_name: str,
    *,
    width: int = 560,
    height: int = 260,
    labels: Sequence[tuple[float, float, str]] = (),
) -> str:
    """A plot with axes from the data; y from 0."""
    xs = [x for *_, p, _ in lines for x, _ in p] or [0.0, 1.0]
    ys = [y for *_, p, _ in lines for _, y in p] or [1.0]
    x0 = min(xs)
    x1 = max(max(xs), min(xs) + 1e-9)
    y1 = max([*ys, 1e-9]) * 1.08
    if not lines or not lines[0][3]:
        x0, x1 = x0 - 0.06 * (x1 - x0) - 0.01, x1 + 0.12 * (x1 - x0) + 0.01

    def px(x: float, y: float) -> tuple[float, float]:
        return 48 + (x - x0) / (x1 - x0) * (width - 60), height - 36 - y / y1 * (height - 62)

    out = [
        f"<svg viewBox='0 0 {width} {height}' width='100%' role='img'><text x='48' y='15' "
        f"style='font-weight:600'>{escape(title)}</text>"
    ]
    for x in ticks(x0, x1):
        out.append(
            f"<text x='{px(x, 0)[0]:.1f}' y='{height - 20}' text-anchor='middle'>{x:g}</text>"
        )
    for y in ticks(0.0, y1):
        at_y = px(x0, y)[1]
        out.append(
            f"<text x='43' y='{at_y + 4:.1f}' text-anchor='end'>{y:g}</text>"
            f"<line x1='48' x2='{width - 12}' y1='{at_y:.1f}' y2='{at_y:.1f}' stroke='#e5e7eb'/>"
        )
    out.append(
        f"<text x='{width / 2}' y='{height - 5}' text-anchor='middle'>{escape(x_name)}</text><text "
        f"x='48' y='29'>{escape(y_name)}</text>"
    )
    for name, colour, points, joined in lines:
        at = [px(*p) for p in points]
        if joined:
            out.append(
                f"<polyline fill='none' stroke='{colour}' stroke-width='1.8' "
                f"points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in at)}'>"
                f"<title>{escape(name)}</title></polyline>"
            )
        else:
            out += [
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' "
                f"fill='{colour}'><title>{escape(name)}</title></circle>"
                for x, y in at
            ]
    for x, y, text in labels:
        a = px(x, y)
        out.append(f"<text x='{a[0] + 7:.1f}' y='{a[1] + 4:.1f}'>{escape(text)}</text>")
    return "".join(out) + "</svg>"


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> list[tuple[float, float]]:
    """Mean over seeds at each step that any of them has; one that was given up keeps its last
    accuracy.
    """
    steps = sorted({x for xs, _ in curves for x in xs})

    def at(xs: list[float], ys: list[float], x: float) -> float:
        return next((y for a, y in zip(reversed(xs), reversed(ys), strict=True) if a <= x), ys[0])

    return [(x, sum(at(*c, x) for c in curves) / len(curves)) for x in steps]


def takes(c: dict[str, Any]) -> bool:
    """Did the cell's staleness rule cost tokens, or make them count less?"""
    lines = c["ledger_lines"]
    return any(n in lines for n in ("masked_stale", "dropped_stale", "abandoned")) or any(
        "faded" in k for x in lines.values() for k in x
    )


def write(
    directory: Path,
    name: str,
    found: dict[str, Any],
    corrections: Sequence[tuple[str, str]],
    subtitle: str,
) -> Path:
    """DIR/report.html and DIR/result.json.  Returns the page's path."""
    from markupsafe import Markup

    colour = {
        n: page_kit.MORE_COLOURS[i % len(page_kit.MORE_COLOURS)]
        for i, n in enumerate(found["corrections"])
    }

    def under(c: dict[str, Any]) -> str:
        d = c["difference"]
        bad = f" &#9888;{c['unstable']}/{c['seeds']}" if c["unstable"] else ""
        return (
            f"{show(d['mean'], '+.2f')} [{show(d['interval'][0], '+.2f')}, "
            f"{show(d['interval'][1], '+.2f')}]{bad}"
        )

    best = max([c["final"] for c in found["cells"]] + [found["sync"]["final"]])
    points: list[Line] = [
        (
            f"{c['correction']}, limit {c['limit']}",
            colour[c["correction"]],
            [(c["speed"], c["final"])],
            False,
        )
        for c in found["cells"]
        if math.isfinite(c["speed"])
    ]
    top = {
        x: max(
            (c["final"] for c in found["cells"] if c["limit"] == x and math.isfinite(c["speed"])),
            default=None,
        )
        for x in found["limits"]
    }
    tags = [(found["speed"][x], y, f"limit {x}") for x, y in top.items() if y is not None]
    graphs = [
        svg(
            f"{'injected lag' if found['injected'] else 'limit'} {x}",
            [
                (c["correction"], colour[c["correction"]], mean_curve(c["curves"]), True)
                for c in found["cells"]
                if c["limit"] == x
            ],
            "version",
            "accuracy",
        )
        for x in found["limits"]
    ]
    s = found["suggestion"]
    headline = (
        "No suggestion"
        if s["limit"] is None
        else f"Suggested: staleness.max_lag = {s['limit']}"
        + (f" with {s['correction']}" if s.get("correction") else "")
    )
    trouble = [
        f"{c['correction']}, limit {c['limit']}: {c['unstable']} of {c['seeds']}: "
        f"{', '.join(c['trouble'])}" + (f"; likely cause: {c['cause']}" if c["cause"] else "")
        for c in found["cells"]
        if c["unstable"]
    ]
    blob = json.dumps(clean(found))
    sync = found["sync"]
    page = page_kit.render(
        "sweep.html",
        name=name,
        subtitle=subtitle,
        suggestion=s,
        headline=headline,
        missing=found["missing"],
        head=HEAD,
        table=rows(found),
        trouble=trouble,
        signs=[
            x
            for c in found["cells"]
            for x in signs_told(f"{c['correction']}, limit {c['limit']}", c["signs"], c["seeds"])
        ],
        rules=verdict.Bounds(),
        kl_batches=KL_BATCHES,
        far=show(found["sync"]["ood_end"], ".3f"),
        kl=show(found["sync"]["kl_ref"], ".3g"),
        losses=[
            (f"{c['correction']}, limit {c['limit']}", by_length(c))
            for c in found["cells"]
            if takes(c)
        ],
        sync=f"{sync['final']:.3f} over {sync['seeds']} seed(s)",
        corrections=corrections,
        curves=[Markup(g) for g in graphs],
        accuracy=Markup(heat(found, lambda c: float(c["final"]), under, 0.0, best)),
        ess=Markup(
            heat(
                found,
                lambda c: float(c["ess"]),
                lambda c: f"KL up to {show(c['kl'], '.2g')}",
                0.0,
                1.0,
            )
        ),
        frontier=Markup(
            svg(
                "",
                points,
                "speed against limit 0",
                "accuracy at the end",
                width=900,
                height=320,
                labels=tags,
            )
        )
        if points
        else "",
        key=Markup(
            "".join(
                f"<span><b style='color:{c}'>&#9632;</b> {escape(n)}</span>"
                for n, c in colour.items()
            )
        ),
        blob=page_kit.embedded(blob),
    )
    for path, text in ((directory / "report.html", page), (directory / "result.json", blob)):
        atomic_write.write(path, text)
    return directory / "report.html"
