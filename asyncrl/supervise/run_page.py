"""The report of a run: one self-contained HTML page with plots, the ledger, and numbers as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, jsonl, metrics, page_kit, process_log, trace
from asyncrl.records.metrics import BUCKETS
from asyncrl.supervise.live import describe_limit_change, describe_window
from asyncrl.supervise.summary import certainty, compose, spread

TIMELINE_S = 3.0  # length of the timeline, which shows at least STEPS_SHOWN steps
STEPS_SHOWN = 4
# Colors of the timeline: the same for a kind of work on every page.
KINDS = {
    "decode": "#2563eb",
    "prefill": "#7c3aed",
    "weights": "#d97706",
    "reward": "#0891b2",
    "train": "#dc2626",
    "publish": "#059669",
    "checkpoint": "#6b7280",
}
OTHER_KIND = "#111827"
Points = list[tuple[float, float]]
MOVES = 8  # newest changes of the limit that are described; the plot has all of them


class MetricPlot(NamedTuple):
    """A plot of metrics over the run."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]  # (metric, label) of each line
    axis: str = "step"  # or "t": seconds of RL
    moving: bool = False  # omit the plot when all values are equal: the feature is off


ACCURACY = MetricPlot(
    "Accuracy",
    "mean reward",
    (
        ("eval/heldout", "held-out"),
        ("reward/mean", "training batch"),
        ("eval/ood", "out of distribution"),
    ),
)
# Below the accuracy and the lags, in this order.
LINES = (
    MetricPlot(
        "Lag over time",
        "versions",
        (
            ("lag/mean", "mean"),
            ("lag/max", "max"),
            ("lag/in_flight", "in flight"),
            ("lag/in_queue", "in queue"),
            ("limit/now", "limit of new tickets"),
            ("window/now", "window of new tickets"),
        ),
    ),
    MetricPlot(
        "KL: behavior policy, learner's start, target policy",
        "nats a token (k3)",
        (
            ("kl/behavior_start_k3", "behavior to start"),
            ("kl/behavior_target_k3", "behavior to target"),
            ("kl/moved", "update of one batch"),
            ("mismatch/k3_one_version", "mismatch at equal weights"),
            ("mismatch/k3_at_lag_0", "mismatch at lag 0"),
            ("kl/target_ref_k3", "target to reference"),
        ),
    ),
    MetricPlot(
        "Log ratio to the behavior policy, in three parts",
        "nats a token (k3)",
        (
            ("split/mismatch_k3", "engine mismatch"),
            ("split/staleness_k3", "staleness"),
            ("split/update_k3", "update"),
        ),
    ),
    MetricPlot(
        "Effective sample size",
        "share",
        (
            ("is/ess", "at the learner's start"),
            ("is/weight_ess", "of the loss's weights"),
            ("is/target_ess", "under the target policy"),
            ("is/mean_weight", "mean weight"),
            ("clip/share", "clipped"),
        ),
    ),
    MetricPlot(
        "Effective sample size by lag",
        "share, at the learner's start",
        tuple((f"by_lag/ess_{bucket}", f"lag {bucket}") for bucket in BUCKETS),
    ),
    MetricPlot(
        "KL of the behavior policy to the learner's start by lag",
        "nats a token (k3)",
        tuple((f"by_lag/k3_{bucket}", f"lag {bucket}") for bucket in BUCKETS),
    ),
    MetricPlot(
        "Last KL that early stopping measured in a batch",
        "nats a token",
        (("optim/stop_kl", "KL"),),
        moving=True,
    ),
    MetricPlot(
        "Reshape",
        "gamma; nats^2",
        (
            ("reshape/gamma", "mean gamma"),
            ("reshape/gamma_base", "gamma_base"),
            ("reshape/sigma2", "sigma2, variance of log w"),
        ),
    ),
    MetricPlot(
        "Learning-rate scale",
        "share of learner.lr",
        (("optim/lr_scale", "of the batch's last step"),),
        moving=True,
    ),
    MetricPlot(
        "Entropy",
        "nats a token",
        (
            ("policy/entropy", "target policy"),
            ("policy/behavior_nll", "behavior policy's NLL of its samples"),
        ),
    ),
    MetricPlot(
        "Completion length",
        "tokens",
        (
            ("answer/length", "training"),
            ("eval/heldout_length", "held-out"),
        ),
    ),
    MetricPlot(
        "Gradient norm",
        "before clipping",
        (("optim/grad_norm", "gradient norm"),),
    ),
    MetricPlot(
        "Throughput",
        "tokens a second",
        (
            ("throughput/generator_tokens_per_s", "generators"),
            ("throughput/learner_tokens_per_s", "learner"),
        ),
        axis="t",
    ),
    MetricPlot(
        "Idle share",
        "of each side's time",
        (
            ("time/generator_idle_share", "generators"),
            ("time/reward_wait_share", "generators, for rewards"),
            ("time/learner_idle_share", "learner"),
        ),
        axis="t",
    ),
)
# Only with a judge.
JUDGE = MetricPlot(
    "Judge, so far",
    "count",
    (
        ("judge/requests", "requests"),
        ("judge/replies", "replies"),
        ("judge/retries", "sent again"),
        ("judge/throttled", "throttled (429)"),
        ("judge/cached", "from the cache"),
    ),
    axis="t",
)


def _figure(title: str, unit: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 14}, "y": 0.97},
        height=325,
        margin={"l": 55, "r": 15, "t": 77, "b": 40},
        template="plotly_white",
        legend={"orientation": "h", "y": 1.0, "x": 0, "xanchor": "left", "yanchor": "bottom"},
        colorway=page_kit.COLOURS,
    )
    figure.update_yaxes(
        title=unit,
        rangemode="tozero",
    )
    return figure


def _lines(rows: list[dict[str, Any]], lines: MetricPlot) -> Any:
    figure = _figure(lines.title, lines.unit)
    for label, points in _curves(rows, lines):
        figure.add_scatter(
            x=[p[0] for p in points],
            y=[p[1] for p in points],
            name=label,
            mode="lines" if len(points) > 1 else "markers",  # a line of one point is not drawn
        )
    figure.update_xaxes(title="version" if lines.axis == "step" else "seconds of RL")
    return figure


def _curves(rows: Sequence[Mapping[str, Any]], lines: MetricPlot) -> list[tuple[str, Points]]:
    """Return (label, points) of each line that the run has.

    Equal curves become one line with both labels, such as start and target with one update a
    batch."""
    curves: list[tuple[str, Points]] = []
    for name, label in lines.series:
        points = [(float(r[lines.axis]), float(r[name])) for r in rows if name in r]
        twin = next(
            (i for i, (_, other) in enumerate(curves) if _are_equal_curves(points, other)), None
        )
        if twin is not None:
            curves[twin] = (f"{curves[twin][0]} = {label}", points)
        elif points:
            curves.append((label, points))
    return curves


def _are_equal_curves(one: Points, other: Points) -> bool:
    """Whether two curves are equal up to rounding."""
    return len(one) == len(other) > 0 and all(
        a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-6, abs_tol=1e-12)
        for a, b in zip(one, other, strict=True)
    )


def _has_data(rows: Sequence[Mapping[str, Any]], lines: MetricPlot) -> bool:
    """Whether the run has data for a plot; features that are off have no empty plot."""
    values = [row[name] for name, _ in lines.series for row in rows if name in row]
    return len(set(values)) > 1 if lines.moving else bool(values)


def early_stops(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The KL of each batch that early stopping ended before its last step.

    >>> stops = [(0, 0.0), (1, 0.03), (1, 0.01), (2, 0.05)]
    >>> early_stops([{"optim/early_stops": n, "optim/stop_kl": kl} for n, kl in stops])
    [0.03, 0.05]
    """
    counts = [row for row in rows if "optim/early_stops" in row]
    previous = [0.0, *(row["optim/early_stops"] for row in counts)]
    return [
        float(row.get("optim/stop_kl", 0.0))
        for row, earlier in zip(counts, previous, strict=False)
        if row["optim/early_stops"] > earlier
    ]


def _histogram(counts: dict[str, int]) -> Any:
    figure = _figure("Lag of trained tokens", "share of tokens")
    total = max(sum(counts.values()), 1)
    figure.add_bar(
        x=[int(k) for k in counts],
        y=[n / total for n in counts.values()],
    )
    figure.update_xaxes(
        title="lag, in versions",
        dtick=1,
    )
    return figure


def _plots(rows: list[dict[str, Any]], summary: dict[str, Any]) -> list[Any]:
    accuracy = _lines(rows, ACCURACY)
    for split, label in (("heldout", "held-out"), ("ood", "out of distribution")):
        bars = {
            "type": "data",
            "array": [half for _, half in certainty(rows, split)],
            "thickness": 1,
            "width": 3,
        }
        accuracy.update_traces(mode="lines+markers", error_y=bars, selector={"name": label})
    if spread(rows) == (0.0, 1.0):
        accuracy.update_yaxes(range=[0, 1.02])
    return [
        accuracy,
        _histogram(summary["lag_histogram"]),
        *(_lines(rows, lines) for lines in LINES if _has_data(rows, lines)),
        *([_lines(rows, JUDGE)] if summary.get("judge") else []),
    ]


def _timeline(spans: dict[str, list[tuple[str, float, float]]]) -> tuple[Any, float]:
    """Plot a few seconds from the middle of the run, one lane per process; returns its length."""
    import plotly.graph_objects as go

    figure = go.Figure()
    all_spans = [s for lane in spans.values() for s in lane]
    if not all_spans:
        return figure, 0.0
    trains = [x for x in spans.get("learner", []) if x[0] == "train"]
    shown_s = TIMELINE_S
    if trains:
        shown_s = max(shown_s, STEPS_SHOWN * statistics.median(e - s for _, s, e in trains))
    starts = sorted(s for _, s, _ in trains or all_spans)
    start = starts[len(starts) // 2]
    kinds = {kind for kind, _, _ in all_spans}
    for name in [*(kind for kind in KINDS if kind in kinds), *sorted(kinds - set(KINDS))]:
        base = []
        width = []
        lanes = []
        for process, lane in spans.items():
            for kind, began, ended in lane:
                if kind == name and ended > start and began < start + shown_s:
                    base.append(max(began, start) - start)
                    width.append(min(ended, start + shown_s) - max(began, start))
                    lanes.append(process)
        figure.add_bar(
            x=width,
            base=base,
            y=lanes,
            orientation="h",
            name=name,
            marker={"color": KINDS.get(name, OTHER_KIND), "line": {"width": 0}},
        )
    figure.update_layout(
        barmode="overlay",
        height=120 + 45 * len(spans),
        margin={"l": 100, "r": 15, "t": 45, "b": 40},
        template="plotly_white",
        bargap=0.3,
        legend={"orientation": "h", "y": 1.0, "x": 0, "xanchor": "left", "yanchor": "bottom"},
    )
    figure.update_xaxes(
        title="seconds",
        range=[0, shown_s],
    )
    return figure, shown_s


def _cards(
    summary: dict[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """Return (label, value, id, note below the value) of each card."""
    evals = {
        split: [f"+-{half:.3f} (n = {n:,})" for n, half in certainty(rows, split)] or [""]
        for split in ("heldout", "ood")
    }

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    idle = summary["speed"]["idle_share"]
    stops = early_stops(rows)
    stopped = (
        "batches stopped early",
        f"{len(stops)} of {summary['steps']}",
        "early-stops",
        f"at a median KL of {statistics.median(stops):.2g}" if stops else "",
    )
    return [
        (
            "held-out at the start",
            share(summary["heldout_start"]),
            "heldout-start",
            evals["heldout"][0],
        ),
        ("held-out at the end", share(summary["heldout_end"]), "heldout-end", evals["heldout"][-1]),
        (
            "out of distribution: start / end",
            f"{share(summary.get('ood_start'))} / {share(summary['ood_end'])}",
            "ood-end",
            evals["ood"][-1],
        ),
        ("RL took", f"{summary['wall_s']:.0f} s", "wall", ""),
        ("steps", str(summary["steps"]), "steps", ""),
        (
            "mean lag",
            f"{summary['lag']['mean']:.2f}",
            "lag-mean",
            next(filter(None, map(describe_window, reversed(rows))), ""),
        ),
        (
            "largest lag / limit",
            f"{summary['lag']['max']} / {summary['lag']['limit']}",
            "lag-max",
            describe_limit_moves(rows),
        ),
        ("generated", f"{summary['speed']['generator_tokens_per_s']:,.0f} tok/s", "gen", ""),
        ("trained", f"{summary['speed']['learner_tokens_per_s']:,.0f} tok/s", "learn", ""),
        (
            "idle: generators / learner",
            f"{idle['generator']:.0%} / {idle['learner']:.0%}",
            "idle",
            "",
        ),
        *([stopped] if stops else []),
    ]


def describe_limit_moves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the last changes of an adaptive lag limit and their reasons; "" without any.

    >>> row = {"step": 9, "limit/now": 2.0, "limit/before": 1.0, "limit/ess": 0.9}
    >>> describe_limit_moves([{"step": 8}, row | {"limit/idle": 0.25}])
    'limit from step 9 on 2 (was 1: ESS 0.90, learner idle 25%)'
    """
    moves = [
        f"from step {row['step']} on {row['limit/now']:.0f} ({describe_limit_change(row)})"
        for row in rows
        if "limit/before" in row
    ]
    more = f"{len(moves) - MOVES} earlier moves, then " if len(moves) > MOVES else ""
    return f"limit {more}{'; '.join(moves[-MOVES:])}" if moves else ""


def _ledger(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    total = max(summary["ledger"]["generated"], 1)
    rows: list[tuple[str, ...]] = [
        ("generated", f"{summary['ledger']['generated']:,}", "", "", "", "")
    ]
    for name, line in summary["ledger_lines"].items():
        counted = line["samples"] > 0
        rows.append(
            (
                name,
                f"{line['tokens']:,.0f}",
                f"{line['tokens'] / total:.2%}",
                f"{line['samples']:,.0f}",
                f"{line['mean_length']:.1f}" if counted else "-",
                f"{line['mean_reward']:.3f}" if counted else "-",
            )
        )
    return rows


def ledger_by_length(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, then a row per range of completion lengths.

    A row has the number of tokens, and the share of them in each ledger line that is not empty.
    `faded` is the loss of trained tokens to `downweight`: tokens times (1 - weight)."""
    lines: dict[str, dict[int, float]] = {}
    for name, line in summary["ledger_lines"].items():
        lines[name] = {
            int(k.removeprefix("upto_")): v for k, v in line.items() if k.startswith("upto_")
        }
        lines["faded"] = lines.get("faded", {}) | {
            int(k.removeprefix("faded_upto_")): v
            for k, v in line.items()
            if k.startswith("faded_upto_")
        }
    faded = lines.pop("faded", {})
    shown = {n: line for n, line in lines.items() if line} | ({"faded": faded} if faded else {})
    rows: list[tuple[str, ...]] = [("completion length", "tokens", *shown)]
    for upto in sorted({k for line in lines.values() for k in line}):
        total = sum(line.get(upto, 0) for line in lines.values())
        rows.append(
            (
                f"{upto // 2 + 1} to {upto}" if upto > 1 else "1",
                f"{total:,.0f}",
                *(f"{line.get(upto, 0) / max(total, 1):.2%}" for line in shown.values()),
            )
        )
    return rows


def _text(path: Path) -> str:
    return (
        path.read_text(errors="replace", encoding="utf-8").strip() if path.is_file() else "unknown"
    )


def unfinished_notes(config: Config, run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """State how an unfinished run ended; [] for one that has made all its steps."""
    if summary["steps"] >= config.learner.steps and not summary.get("partial"):
        return []
    notes = [
        f"Not finished: {summary['steps']} of {config.learner.steps} steps.",
        *(process_log.end_of(row) for row in process_log.failed_ends(run_dir)),
    ]
    return notes + ([summary["partial"]] if summary.get("partial") else [])


def write(run_dir: Path) -> Path:
    """Write RUN/report.html by rename, also of a live or failed run, and return its path.

    Raises ConfigError where there is no run, or it has trained no batch."""

    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: no run directory (it has no config.toml)")
    config = load.load(run_dir / "config.toml")
    rows = metrics.read(run_dir)
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = compose(config, run_dir)
    if not rows:
        raise ConfigError(
            f"{run_dir}: nothing to report yet, no batch has been trained; `asyncrl doctor "
            f"{run_dir}` shows its state"
        )

    timeline, seconds = _timeline(trace.read(run_dir))
    samples = jsonl.read(run_dir / "samples.jsonl")
    commit, command = (_text(run_dir / name) for name in ("commit", "command"))
    page = page_kit.render(
        "run.html",
        name=run_dir.name,
        subtitle=f"commit {commit[:12]} · {command}",
        unfinished=unfinished_notes(config, run_dir, summary),
        library=page_kit.library(),
        signs=summary.get("signs", []),
        cards=_cards(summary, rows),
        plots=[page_kit.plot(f) for f in _plots(rows, summary)],
        timeline=page_kit.plot(timeline),
        seconds=f"{seconds:.3g}",
        ledger=_ledger(summary),
        by_length=ledger_by_length(summary),
        samples=[*samples[:4], *samples[-8:]],
        config=(run_dir / "config.toml").read_text(encoding="utf-8"),
        summary_json=page_kit.embedded(summary),
    )
    atomic_write.write(run_dir / "report.html", page)
    return run_dir / "report.html"
