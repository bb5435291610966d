"""The report of a run: a self-contained HTML page with plots, the ledger and numbers as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, jsonl, metrics, page_kit, process_log, rundir, trace
from asyncrl.records.page_kit import (
    CardBlock,
    ListBlock,
    ListItem,
    PagePlot,
    PlotBlock,
    PlotLine,
    SamplesBlock,
    TableBlock,
    TextBlock,
)
from asyncrl.supervise.live import build_task_rows, describe_limit_change, describe_window
from asyncrl.supervise.report import plots, step_plots, token_samples
from asyncrl.supervise.report.advice import Advice, list_advice
from asyncrl.supervise.report.series import Series
from asyncrl.supervise.summary import compose, measure_certainty

TIMELINE_S = 3.0  # length of the timeline, which shows at least STEPS_SHOWN steps
STEPS_SHOWN = 4
POINTS = 600  # most points of a line: a report stays below 2 MB
# Colors of the timeline by number in plot.js; a kind of work has the same color on every page.
KINDS = {
    "decode": 0,
    "prefill": 4,
    "weights": 1,
    "reward": 5,
    "train": 8,
    "publish": 2,
    "checkpoint": 9,
}
OTHER_KIND = 3
LEDGER = ("line", "tokens", "share", "samples", "mean length", "mean reward")
SAMPLES_SHOWN = 16  # number of first and newest samples whose tokens a report colors
SAMPLE_BYTES = 500_000  # most bytes of them in a report
MOVES = 8  # number of newest changes of the limit that are described; the plot has all


def list_early_stops(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the KL of each batch that early stopping ended before its last step.

    >>> stops = [(0, 0.0), (1, 0.03), (1, 0.01), (2, 0.05)]
    >>> list_early_stops([{"optim/early_stops": n, "optim/stop_kl": kl} for n, kl in stops])
    [0.03, 0.05]
    """
    counts = [row for row in rows if "optim/early_stops" in row]
    previous = [0.0, *(row["optim/early_stops"] for row in counts)]
    return [
        float(row.get("optim/stop_kl", 0.0))
        for row, earlier in zip(counts, previous, strict=False)
        if row["optim/early_stops"] > earlier
    ]


def _plot_histogram(counts: dict[str, int]) -> PagePlot:
    total = max(sum(counts.values()), 1)
    shares = PlotLine("", [int(lag) for lag in counts], [n / total for n in counts.values()])
    return PagePlot(
        "Lag of trained tokens", "share of tokens", [shares], "lag, in versions", "bars"
    )


def build_plots(series: Series, steps: Series, summary: dict[str, Any]) -> list[PagePlot]:
    """Build the plots of a report: those of `asyncrl watch`, and the histogram of lags.

    steps: the metrics of optimizer_steps.jsonl.
    """
    overview, staleness, learner = (
        plots.build_plots(page, {"": series}, points=POINTS)
        for page in ("overview", "staleness", "learner")
    )
    of_steps = step_plots.build_plots({"": steps}, points=POINTS)
    return [*overview, _plot_histogram(summary["lag_histogram"]), *staleness, *learner, *of_steps]


def plot_timeline(spans: dict[str, list[tuple[str, float, float]]]) -> tuple[PagePlot, float]:
    """Plot a few seconds from the middle of the run, one lane per process; return its length."""
    plot = PagePlot("", "", [], "seconds", "spans", y_names=list(spans))
    all_spans = [span for lane in spans.values() for span in lane]
    if not all_spans:
        return plot, 0.0
    trains = [x for x in spans.get("learner", []) if x[0] == "train"]
    shown_s = TIMELINE_S
    if trains:
        shown_s = max(shown_s, STEPS_SHOWN * statistics.median(e - s for _, s, e in trains))
    starts = sorted(s for _, s, _ in trains or all_spans)
    start = starts[len(starts) // 2]
    kinds = {kind for kind, _, _ in all_spans}
    for name in [*(kind for kind in KINDS if kind in kinds), *sorted(kinds - set(KINDS))]:
        visible = [
            (max(begin - start, 0.0), number, min(end - start, shown_s))
            for number, lane in enumerate(spans.values())
            for kind, begin, end in lane
            if kind == name and end > start and begin < start + shown_s
        ]
        if visible:
            begin, lanes, end = (list(column) for column in zip(*visible, strict=True))
            color = KINDS.get(name, OTHER_KIND)
            plot.lines.append(PlotLine(name, begin, lanes, until=end, color=color))
    return plot, shown_s


def _build_cards(
    summary: dict[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """Return (label, value, id, note below the value) of each card."""
    evals = {
        split: [f"+-{half:.3f} (n = {n:,})" for n, half in measure_certainty(rows, split)] or [""]
        for split in ("heldout", "ood")
    }

    def format_share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    idle = summary["speed"]["idle_share"]
    window = next(filter(None, map(describe_window, reversed(rows))), "")
    stops = list_early_stops(rows)
    stops_card = (
        "batches stopped early",
        f"{len(stops)} of {summary['steps']}",
        "early-stops",
        f"at a median KL of {statistics.median(stops):.2g}" if stops else "",
    )
    return [
        (
            "held-out at the start",
            format_share(summary["heldout_start"]),
            "heldout-start",
            evals["heldout"][0],
        ),
        (
            "held-out at the end",
            format_share(summary["heldout_end"]),
            "heldout-end",
            evals["heldout"][-1],
        ),
        (
            "out of distribution: start / end",
            f"{format_share(summary.get('ood_start'))} / {format_share(summary['ood_end'])}",
            "ood-end",
            evals["ood"][-1],
        ),
        ("RL took", f"{summary['wall_s']:.0f} s", "wall", ""),
        ("steps", str(summary["steps"]), "steps", ""),
        (
            "mean lag of the run",
            f"{summary['lag']['mean']:.2f}",
            "lag-mean",
            f"at the end: {window}" if window else "",
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
            "idle in the run: generators / learner",
            f"{idle['generator']:.0%} / {idle['learner']:.0%}",
            "idle",
            "",
        ),
        *([stops_card] if stops else []),
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
    earlier = f"{len(moves) - MOVES} earlier moves, then " if len(moves) > MOVES else ""
    return f"limit {earlier}{'; '.join(moves[-MOVES:])}" if moves else ""


def _build_ledger(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    total = max(summary["ledger"]["generated"], 1)
    rows: list[tuple[str, ...]] = [
        ("generated", f"{summary['ledger']['generated']:,}", "", "", "", "")
    ]
    for name, line in summary["ledger_lines"].items():
        has_samples = line["samples"] > 0
        rows.append(
            (
                name,
                f"{line['tokens']:,.0f}",
                f"{line['tokens'] / total:.2%}",
                f"{line['samples']:,.0f}",
                f"{line['mean_length']:.1f}" if has_samples else "-",
                f"{line['mean_reward']:.3f}" if has_samples else "-",
            )
        )
    return rows


TASKS = ("task", "share", "reward", "lag", "ESS", "removed groups", "held-out")


def build_task_ledger(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, then a row per task of a mixture with its tokens in each ledger line."""
    tables: dict[str, dict[str, Any]] = summary.get("ledger_by_task", {})
    line_names = [
        line
        for line in next(iter(tables.values()), {})
        if any(table[line]["tokens"] for table in tables.values())
    ]
    rows: list[tuple[str, ...]] = [("task", "tokens", *line_names)]
    for title, table in tables.items():
        total = sum(line["tokens"] for line in table.values())
        shares = (f"{table[line]['tokens'] / max(total, 1):.2%}" for line in line_names)
        rows.append((title, f"{total:,.0f}", *shares))
    return rows


def _build_task_blocks(
    summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[TableBlock]:
    head, *by_task = build_task_ledger(summary)
    if not by_task:
        return []
    latest = {name: value for row in rows for name, value in row.items()}
    return [
        TableBlock(TASKS, build_task_rows(latest), heading="Tasks, at the last step", id="tasks"),
        TableBlock(head, by_task, heading="Ledger by task", id="ledger-by-task"),
    ]


def build_length_ledger(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, then a row per range of completion lengths.

    A row has the number of tokens and their share in each non-empty ledger line.
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
    columns = {n: line for n, line in lines.items() if line} | ({"faded": faded} if faded else {})
    rows: list[tuple[str, ...]] = [("completion length", "tokens", *columns)]
    for bound in sorted({k for line in lines.values() for k in line}):
        total = sum(line.get(bound, 0) for line in lines.values())
        rows.append(
            (
                f"{bound // 2 + 1} to {bound}" if bound > 1 else "1",
                f"{total:,.0f}",
                *(f"{line.get(bound, 0) / max(total, 1):.2%}" for line in columns.values()),
            )
        )
    return rows


def _read_text(path: Path) -> str:
    return (
        path.read_text(errors="replace", encoding="utf-8").strip() if path.is_file() else "unknown"
    )


def describe_unfinished(config: Config, run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """Describe how an unfinished run ended; [] for a finished run."""
    if summary["steps"] >= config.learner.steps and not summary.get("partial"):
        return []
    notes = [
        f"Not finished: {summary['steps']} of {config.learner.steps} steps.",
        *(process_log.describe_end(row) for row in process_log.list_failed_ends(run_dir)),
    ]
    return notes + ([summary["partial"]] if summary.get("partial") else [])


def write(run_dir: Path) -> Path:
    """Write RUN/report.html, also of a live or failed run, and return its path.

    Raises ConfigError if the directory is not a run, or the run has not trained a batch."""
    rundir.require_run(run_dir)
    config = load.load(run_dir / "config.toml")
    rows = metrics.read(run_dir)
    summary = jsonl.read_object(run_dir / "summary.json") or compose(config, run_dir)
    if not rows:
        raise ConfigError(
            f"{run_dir}: nothing to report yet, no batch has been trained; `asyncrl doctor "
            f"{run_dir}` shows its state"
        )

    lanes, seconds = plot_timeline(trace.read(run_dir))
    samples = jsonl.read(run_dir / "samples.jsonl")
    commit, command = (_read_text(run_dir / name) for name in ("commit", "command"))
    series = Series(run_dir / "metrics.jsonl")
    steps = Series(run_dir / metrics.OPTIMIZER_STEPS)
    series.refresh()
    steps.refresh()
    lines = list_advice(
        config,
        run_dir,
        ended=rundir.is_finished(run_dir, config.learner.steps),
        series=series,
        signs=summary.get("signs", []),
    )
    length_head, *by_length = build_length_ledger(summary)
    blocks = [
        ListBlock(describe_unfinished(config, run_dir, summary), id="unfinished", style="warn"),
        ListBlock([_format_item(line) for line in lines if line.about != "health"], id="advice"),
        ListBlock(
            [_format_item(line) for line in lines if line.about == "health"],
            id="signs",
            style="warn",
        ),
        CardBlock(_build_cards(summary, rows)),
        PlotBlock(build_plots(series, steps, summary)),
        PlotBlock(
            [lanes], heading=f"Timeline: {seconds:.3g} s from the middle of the run", style="wide"
        ),
        PlotBlock(
            plots.build_plots("ledger", {"": series}, points=POINTS),
            heading="Ledger: where every generated token ended",
            style="wide",
        ),
        TableBlock(LEDGER, _build_ledger(summary)),
        *_build_task_blocks(summary, rows),
        TableBlock(
            length_head,
            by_length,
            heading="By completion length: what the staleness rule took",
            id="by-length",
        ),
        TableBlock(
            ("prompt and completion", "batch", "reward", "lag", "versions"),
            [_format_sample(sample) for sample in [*samples[:4], *samples[-8:]]],
            heading="Some samples",
            style="code",
        ),
        select_samples(run_dir),
        TextBlock(
            (run_dir / "config.toml").read_text(encoding="utf-8"),
            heading="Configuration",
            style="pre",
        ),
    ]
    page = page_kit.render(
        run_dir.name, f"commit {commit[:12]} · {command}", blocks, {"summary": summary}
    )
    atomic_write.write(run_dir / "report.html", page)
    return run_dir / "report.html"


def select_samples(run_dir: Path) -> SamplesBlock:
    """Select the first and the newest rows of token_samples.jsonl with the values of their colors.

    Together they have at most SAMPLE_BYTES, so there are fewer long ones."""
    store = token_samples.SampleStore(run_dir / token_samples.FILE)
    store.refresh()
    count = len(store.heads)
    # from both ends inwards
    order = sorted(range(count), key=lambda number: min(number, count - 1 - number))
    selected, size = [], 0
    for number in order[:SAMPLES_SHOWN]:
        row = store.read_row(number)
        fields = ("prompt", "images", "pieces", "shades")
        row["sequences"] = [
            {field: sequence[field] for field in fields if field in sequence}
            for sequence in row["sequences"]
        ]
        size += len(json.dumps(row))
        if size > SAMPLE_BYTES:
            break
        selected.append(row)
    return SamplesBlock(
        sorted(selected, key=lambda row: int(row["number"])),
        token_samples.SHADES,
        heading="Tokens of some samples",
        id="token-samples",
    )


def _format_item(line: Advice) -> ListItem:
    return ListItem(f". To try: {line.try_this}" if line.try_this else "", bold=line.said)


def _format_sample(sample: Mapping[str, Any]) -> tuple[str, ...]:
    versions = " ".join(f"{v[0]} [{v[1]}, {v[2]})" for v in sample.get("versions", []))
    return (
        f"{sample['prompt']}{sample['text']}",
        *(str(sample.get(key, "")) for key in ("batch", "reward", "lag")),
        versions,
    )
