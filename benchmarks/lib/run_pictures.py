"""Pictures of a run over time: its samples as a queue, and its ledger.

A result file keeps an excerpt of a run's own records, and a picture is drawn from it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from asyncrl.records import metrics

# what became of tokens -> its name and color; lines without tokens are not drawn
LEDGER = {
    "trained": ("trained", "#2563eb"),
    "left_over": ("not ended yet", "#d1d5db"),
    "filtered": ("filtered: all rewards of the group were equal", "#16a34a"),
    "dropped_stale": ("dropped: beyond the limit", "#d97706"),
    "abandoned": ("abandoned with its group", "#9333ea"),
    "lost_with_process": ("lost with a killed generator", "#dc2626"),
}


# ---- the queue of samples ------------------------------------------------------------------------


def draw_queue(axes: Axes, part: dict[str, Any]) -> None:
    """Draw the samples of the run as a queue: in batches, against time, below the limit.

    part: an excerpt of timelines.py, with the `limit` of its run.
    """
    queue, limit = part["queue"], part["limit"]
    at, begun, ended = (np.array(x, float) for x in zip(*queue["samples"], strict=True))
    train = {int(batch): span for batch, span in part["train"].items()}
    seconds = np.unique(np.concatenate([at, *([*span] for span in train.values())]))
    seconds = seconds[(seconds >= at[0]) & (seconds <= at[-1])]
    row = np.searchsorted(at, seconds, side="right") - 1
    begun, ended = begun[row] / queue["batch_size"], ended[row] / queue["batch_size"]
    starts, ends = (sorted(span[i] for span in train.values()) for i in (0, 1))
    first = min(train)
    trained = first + np.searchsorted(ends, seconds, side="right").astype(float)
    taken = first + np.searchsorted(starts, seconds, side="right").astype(float)
    top = trained + limit + 1
    bands = (
        ("room for tickets", begun, top, "#e5e7eb"),
        ("being sampled", ended, begun, "#16a34a"),
        ("sampled, waits", taken, ended, "#fde68a"),
        ("in training", trained, taken, "#60a5fa"),
        ("trained", np.full(len(seconds), trained[0] - 1), trained, "#1d4ed8"),
    )
    for name, low, high, color in bands:
        high = np.maximum(low, high)
        axes.fill_between(seconds, low, high, step="post", color=color, lw=0, label=name)
    axes.step(
        seconds, top, where="post", color="#dc2626", lw=1.5, label="limit: no ticket from here on"
    )
    axes.set(xlabel="seconds", ylabel="place in the queue, batches", xmargin=0)
    axes.set_ylim(trained[0] - 1, top[-1] + 0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False, fontsize=8)


# ---- the ledger ----------------------------------------------------------------------------------


def ledger_excerpt(run_dir: Path) -> dict[str, Any]:
    """Return the tokens in each line of the ledger after each batch: `seconds`, and `lines`."""
    rows = [row for row in metrics.read(run_dir) if "ledger/trained" in row]
    return {
        "seconds": [round(row["t"], 3) for row in rows],
        "lines": {
            line: tokens
            for line in metrics.DISPOSITIONS
            if any(tokens := [int(row.get(f"ledger/{line}", 0)) for row in rows])
        },
    }


def draw_ledger(axes: Axes, part: dict[str, Any]) -> None:
    """Draw the tokens of a run by what became of them, one band on the other."""
    lines = [line for line in LEDGER if line in part["lines"]]
    unknown = set(part["lines"]) - set(LEDGER)
    if unknown:
        raise SystemExit(f"the picture has no color for {sorted(unknown)}")
    thousands = [np.array(part["lines"][line]) / 1000 for line in lines]
    names, colors = zip(*(LEDGER[line] for line in lines), strict=True)
    total = sum(tokens[-1] for tokens in thousands)
    ends = [f"{n} ({y[-1] / total:.1%})" for n, y in zip(names, thousands, strict=True)]
    seconds = [0.0, *part["seconds"]]
    bands = [np.concatenate([[0.0], tokens]) for tokens in thousands]
    axes.stackplot(seconds, bands, colors=colors, labels=ends, lw=0)
    axes.set(xlabel="seconds", ylabel="tokens, thousands", xmargin=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False, fontsize=8, reverse=True)
