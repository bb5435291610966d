"""Pictures of runs over time: samples as a queue, the ledger, accuracy.

A result file keeps an excerpt of a run's own records, and a picture is drawn from it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from scipy import stats

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

# rows of `demo_seeds` -> their name and color
ACCURACY = {"seeds": ("asynchronous", "#2563eb"), "synchronous": ("synchronous", "#d97706")}


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


# ---- accuracy against time -----------------------------------------------------------------------


def accuracy_curve(run_dir: Path) -> list[list[float]]:
    """Return the second and the held-out accuracy of each evaluation of a run.

    The second is that at which the batch that made the evaluated version was trained.
    """
    rows = metrics.read(run_dir)
    at = {row["step"]: row["t"] for row in rows if "reward/mean" in row}
    return [
        [round(at[row["step"] - 1], 3) if row["step"] else 0.0, row["eval/heldout"]]
        for row in rows
        if "eval/heldout" in row
    ]


def draw_accuracy(axes: Axes, result: dict[str, Any]) -> None:
    """Draw both arms of `demo_seeds`: the mean over the seeds, and its interval of 95 %."""
    for key, (name, color) in ACCURACY.items():
        curves = [row["curve"] for row in result[key]]
        seconds = np.linspace(0, min(curve[-1][0] for curve in curves), 200)
        each = [np.interp(seconds, *zip(*curve, strict=True)) for curve in curves]
        mean = np.mean(each, axis=0)
        half = stats.t.ppf(0.975, len(each) - 1) * stats.sem(each, axis=0)
        axes.fill_between(seconds, mean - half, mean + half, color=color, alpha=0.2, lw=0)
        axes.plot(seconds, mean, color=color, lw=1.8, label=f"{name}, {len(each)} seeds")
    axes.set(xlabel="seconds of RL", ylabel="held-out accuracy", xmargin=0.02)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
