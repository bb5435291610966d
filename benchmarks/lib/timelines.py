"""Pictures of a run's own timeline: who worked when, with which version, on which batch.

They are drawn from the spans in RUN/trace (asyncrl/records/trace.py) and RUN/trained.jsonl.  A
result file keeps an excerpt of them."""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

BATCHES = 7  # of the excerpt
# one color a version, so that neighbors differ
COLORS = ("#2563eb", "#d97706", "#16a34a", "#9333ea", "#dc2626", "#0891b2")
# the stages of a batch -> their colors
STAGES = {
    "samples begin": "#93c5fd",
    "generated, waiting": "#fde68a",
    "trained, at its mean lag": "#1d4ed8",
}


def excerpt(run_dir: Path, batch_size: int, evaluated: int) -> dict[str, Any]:
    """Return the spans around the middle of a run, in seconds from the first of them.

    A decode span has the version of the weights that the generator held.  `begun` gives, for each
    batch, the times at which its first and its last sample began: samples begin in the order of
    their tickets, after the `evaluated` samples of the evaluation at the start.  `queue` gives, at
    the start of each decode call, how many samples of the run had begun and ended.

    Raises SystemExit if samples began that were neither for training nor for the evaluations at
    the start and the end."""
    learner, generator = (_spans(run_dir, process) for process in ("learner", "generator-0"))
    published = [span[2] for span in learner if span[0] == "publish"]
    loaded = [span[2] for span in generator if span[0] == "weights"]
    prefills = [span for span in generator if span[0] == "prefill"]
    counts = list(accumulate(int(span[3]) for span in prefills))
    if counts[-1] != len(published) * batch_size + 2 * evaluated:
        raise SystemExit(
            f"{run_dir}: {counts[-1]} samples began, not those of {len(published)} batches and two "
            "evaluations; run it with one generator and evaluation.every = 0"
        )
    trained = [json.loads(line) for line in (run_dir / "trained.jsonl").open()]
    train = [span for span in learner if span[0] == "train"]
    first = len(published) // 2
    batches = range(first, first + BATCHES)
    start, end = train[first - 3][1], train[batches[-1]][2]

    def shifted(*times: float) -> list[float]:
        return [round(at - start, 4) for at in times]

    def begun(sample: int) -> float:
        return float(prefills[bisect_right(counts, evaluated + sample)][1])

    def begun_by(at: float) -> int:
        return counts[bisect_right(prefills, at, key=lambda span: float(span[1])) - 1] - evaluated

    decodes = [
        span for span in generator if span[0] == "decode" and start < span[2] and span[1] < end
    ]
    return {
        "decode": [
            [
                *shifted(*span[1:3]),
                bisect_right(published, loaded[bisect_right(loaded, span[1]) - 1]),
            ]
            for span in decodes
        ],
        "queue": {
            "batch_size": batch_size,
            "samples": [
                [*shifted(span[1]), (count := begun_by(span[1])), count - int(span[3])]
                for span in decodes
            ],
        },
        "train": {
            str(batch): shifted(*train[batch][1:3]) for batch in range(first - 3, batches.stop)
        },
        "published": {
            str(version): shifted(at)[0]
            for version, at in enumerate(published, 1)
            if start <= at <= end
        },
        "begun": {
            str(batch): shifted(begun(batch * batch_size), begun((batch + 1) * batch_size - 1))
            for batch in batches
        },
        "lags": {str(batch): trained[batch]["lags"] for batch in batches},
    }


def _spans(run_dir: Path, process: str) -> list[list[Any]]:
    return [json.loads(line) for line in (run_dir / "trace" / f"{process}.jsonl").open()]


def color_of(version: int) -> str:
    return COLORS[version % len(COLORS)]


def mark_versions(axes: Axes, published: dict[str, float], rows: list[str]) -> None:
    """Draw a line at each new version, and name the rows, from above."""
    for version, at in published.items():
        axes.axvline(at, color="#6b7280", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"v{version}",
            (at, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            color=color_of(int(version)),
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def draw_span(axes: Axes, row: int, span: list[float], color: str, text: str = "") -> None:
    begin, end = span
    axes.broken_barh([(begin, end - begin)], (row - 0.35, 0.7), color=color)
    if text:
        axes.text((begin + end) / 2, row, text, color="white", ha="center", va="center")


def draw_timeline(axes: Axes, part: dict[str, Any]) -> None:
    """Draw generator and learner side by side, colored by the version that each works with."""
    for begin, end, version in part["decode"]:
        draw_span(axes, 0, [begin, end], color_of(version))
    for batch, span in part["train"].items():
        draw_span(axes, 1, span, color_of(int(batch)), batch)
    mark_versions(axes, part["published"], ["generator", "learner,\nbatch"])


def draw_batches(axes: Axes, part: dict[str, Any]) -> None:
    """Draw the life of each batch: its samples begin, they wait, it is trained."""
    for row, (batch, (first, last)) in enumerate(part["begun"].items()):
        begin, end = part["train"][batch]
        lags = {int(lag): count for lag, count in part["lags"][batch].items()}
        mean = sum(lag * count for lag, count in lags.items()) / sum(lags.values())
        spans = ([first, last], [last, begin], [begin, end])
        for span, color, text in zip(spans, STAGES.values(), ("", "", f"{mean:.1f}"), strict=True):
            draw_span(axes, row, span, color, text)
    mark_versions(axes, part["published"], [f"batch {batch}" for batch in part["begun"]])
    for stage, color in STAGES.items():
        axes.plot([], [], color=color, linewidth=6, label=stage)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)
