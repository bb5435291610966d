"""The report of a run: one self-contained HTML page with plots, the ledger, and numbers as JSON."""

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
from asyncrl.supervise.live import describe_limit_change, describe_window, task_rows
from asyncrl.supervise.report import plots, step_plots, token_samples
from asyncrl.supervise.report.advice import Advice, first_lines
from asyncrl.supervise.report.series import Series
from asyncrl.supervise.summary import certainty, compose

TIMELINE_S = 3.0  # length of the timeline, which shows at least STEPS_SHOWN steps
STEPS_SHOWN = 4
POINTS = 600  # most points of a line: a report stays below 2 MB
# Colors of the timeline by their number in plot.js: the same for a kind of work on every page.
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
SAMPLES_SHOWN = 16  # the first and the newest samples whose tokens a report colors
SAMPLE_BYTES = 500_000  # most that they take of a report
MOVES = 8  # newest changes of the limit that are described; the plot has all of them


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


def _histogram(counts: dict[str, int]) -> PagePlot:
    total = max(sum(counts.values()), 1)
    shares = PlotLine("", [int(lag) for lag in counts], [n / total for n in counts.values()])
    return PagePlot(
        "Lag of trained tokens", "share of tokens", [shares], "lag, in versions", "bars"
    )


def run_plots(series: Series, steps: Series, summary: dict[str, Any]) -> list[PagePlot]:
    """Return the plots of a report: those of `asyncrl watch`, and the histogram of lags.

    steps: of optimizer_steps.jsonl.
    """
    overview, staleness, learner = (
        plots.figures(page, {"": series}, points=POINTS)
        for page in ("overview", "staleness", "learner")
    )
    of_steps = step_plots.figures({"": steps}, points=POINTS)
    return [*overview, _histogram(summary["lag_histogram"]), *staleness, *learner, *of_steps]


def timeline(spans: dict[str, list[tuple[str, float, float]]]) -> tuple[PagePlot, float]:
    """Plot a few seconds from the middle of the run, one lane per process; returns its length."""
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
        shown = [
            (max(began - start, 0.0), number, min(ended - start, shown_s))
            for number, lane in enumerate(spans.values())
            for kind, began, ended in lane
            if kind == name and ended > start and began < start + shown_s
        ]
        if shown:
            began, lanes, ended = (list(column) for column in zip(*shown, strict=True))
            color = KINDS.get(name, OTHER_KIND)
            plot.lines.append(PlotLine(name, began, lanes, until=ended, color=color))
    return plot, shown_s


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


TASKS = ("task", "share", "reward", "lag", "ESS", "removed groups", "held-out")


def ledger_by_task(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, then a row per task of a mixture: its tokens and where they ended."""
    tables: dict[str, dict[str, Any]] = summary.get("ledger_by_task", {})
    used = [
        line
        for line in next(iter(tables.values()), {})
        if any(table[line]["tokens"] for table in tables.values())
    ]
    rows: list[tuple[str, ...]] = [("task", "tokens", *used)]
    for title, table in tables.items():
        total = sum(line["tokens"] for line in table.values())
        shares = (f"{table[line]['tokens'] / max(total, 1):.2%}" for line in used)
        rows.append((title, f"{total:,.0f}", *shares))
    return rows


def _task_blocks(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[TableBlock]:
    head, *by_task = ledger_by_task(summary)
    if not by_task:
        return []
    latest = {name: value for row in rows for name, value in row.items()}
    return [
        TableBlock(TASKS, task_rows(latest), heading="Tasks, at the last step", id="tasks"),
        TableBlock(head, by_task, heading="Ledger by task", id="ledger-by-task"),
    ]


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

    Raises ConfigError if the directory holds no run, or the run has not trained a batch."""

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

    lanes, seconds = timeline(trace.read(run_dir))
    samples = jsonl.read(run_dir / "samples.jsonl")
    commit, command = (_text(run_dir / name) for name in ("commit", "command"))
    series = Series(run_dir / "metrics.jsonl")
    steps = Series(run_dir / metrics.OPTIMIZER_STEPS)
    series.refresh()
    steps.refresh()
    lines = first_lines(
        config,
        run_dir,
        ended=rundir.is_finished(run_dir, config.learner.steps),
        series=series,
        signs=summary.get("signs", []),
    )
    length_head, *by_length = ledger_by_length(summary)
    blocks = [
        ListBlock(unfinished_notes(config, run_dir, summary), id="unfinished", style="warn"),
        ListBlock([_item(line) for line in lines if line.about != "health"], id="advice"),
        ListBlock(
            [_item(line) for line in lines if line.about == "health"], id="signs", style="warn"
        ),
        CardBlock(_cards(summary, rows)),
        PlotBlock(run_plots(series, steps, summary)),
        PlotBlock(
            [lanes], heading=f"Timeline: {seconds:.3g} s from the middle of the run", style="wide"
        ),
        PlotBlock(
            plots.figures("ledger", {"": series}, points=POINTS),
            heading="Ledger: where every generated token ended",
            style="wide",
        ),
        TableBlock(LEDGER, _ledger(summary)),
        *_task_blocks(summary, rows),
        TableBlock(
            length_head,
            by_length,
            heading="By completion length: what the staleness rule took",
            id="by-length",
        ),
        TableBlock(
            ("prompt and completion", "batch", "reward", "lag", "versions"),
            [_sample_row(sample) for sample in [*samples[:4], *samples[-8:]]],
            heading="Some samples",
            style="code",
        ),
        colored_samples(run_dir),
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


def colored_samples(run_dir: Path) -> SamplesBlock:
    """Show the first and the newest rows of token_samples.jsonl with what their colors show.

    Together they take at most SAMPLE_BYTES: of long ones there are fewer."""
    store = token_samples.SampleStore(run_dir / token_samples.FILE)
    store.refresh()
    count = len(store.heads)
    # from both ends inwards
    wanted = sorted(range(count), key=lambda number: min(number, count - 1 - number))
    found, size = [], 0
    for number in wanted[:SAMPLES_SHOWN]:
        row = store.row(number)
        parts = ("prompt", "images", "pieces", "shades")
        row["sequences"] = [
            {part: one[part] for part in parts if part in one} for one in row["sequences"]
        ]
        size += len(json.dumps(row))
        if size > SAMPLE_BYTES:
            break
        found.append(row)
    return SamplesBlock(
        sorted(found, key=lambda row: int(row["number"])),
        token_samples.SHADES,
        heading="Tokens of some samples",
        id="token-samples",
    )


def _item(line: Advice) -> ListItem:
    return ListItem(f". To try: {line.try_this}" if line.try_this else "", bold=line.said)


def _sample_row(sample: Mapping[str, Any]) -> tuple[str, ...]:
    versions = " ".join(f"{v[0]} [{v[1]}, {v[2]})" for v in sample.get("versions", []))
    return (
        f"{sample['prompt']}{sample['text']}",
        *(str(sample.get(key, "")) for key in ("batch", "reward", "lag")),
        versions,
    )
