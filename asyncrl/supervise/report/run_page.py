"""The report of a run: a self-contained HTML page with plots, the ledger and numbers as JSON."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write, jsonl, page_kit, process_log, rundir, trace
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import (
    ListBlock,
    PagePlot,
    PlotBlock,
    PlotLine,
    SamplesBlock,
    TableBlock,
    TextBlock,
)
from asyncrl.supervise import summary as summaries
from asyncrl.supervise.report import plots, token_samples
from asyncrl.supervise.report.run_view import RunView
from asyncrl.supervise.report.series import Series

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
SAMPLES_SHOWN = 16  # number of first and newest samples whose tokens a report colors
SAMPLE_BYTES = 500_000  # most bytes of them in a report


def build_plots(series: Series, steps: Series, summary: JsonObject) -> list[PagePlot]:
    """Build the plots of a report: those of `asyncrl watch`, and the histogram of lags.

    steps: the metrics of optimizer_steps.jsonl.
    """
    overview, staleness, learner = (
        plots.build_plots(page, {"": series}, points=POINTS)
        for page in ("overview", "staleness", "learner")
    )
    of_steps = plots.build_step_plots({"": steps}, points=POINTS)
    counts = summary["lag_histogram"]
    shares = [n / max(sum(counts.values()), 1) for n in counts.values()]
    lags = PagePlot(
        "Lag of trained tokens",
        "share of tokens",
        [PlotLine("", [int(lag) for lag in counts], shares)],
        "lag, in versions",
        "bars",
    )
    return [*overview, lags, *staleness, *learner, *of_steps]


def plot_timeline(spans: Mapping[str, Sequence[trace.TraceSpan]]) -> tuple[PagePlot, float]:
    """Plot a few seconds from the middle of the run, one lane per process; return its length."""
    plot = PagePlot("", "", [], "seconds", "spans", y_names=list(spans))
    all_spans = [span for lane in spans.values() for span in lane]
    if not all_spans:
        return plot, 0.0
    trains = [x for x in spans.get("learner", []) if x.name == "train"]
    shown_s = TIMELINE_S
    if trains:
        shown_s = max(shown_s, STEPS_SHOWN * statistics.median(x.end - x.start for x in trains))
    starts = sorted(x.start for x in trains or all_spans)
    start = starts[len(starts) // 2]
    kinds = {x.name for x in all_spans}
    for name in [*(kind for kind in KINDS if kind in kinds), *sorted(kinds - set(KINDS))]:
        visible = [
            (max(x.start - start, 0.0), number, min(x.end - start, shown_s))
            for number, lane in enumerate(spans.values())
            for x in lane
            if x.name == name and x.end > start and x.start < start + shown_s
        ]
        if visible:
            begin, lanes, end = (list(column) for column in zip(*visible, strict=True))
            color = KINDS.get(name, OTHER_KIND)
            plot.lines.append(PlotLine(name, begin, lanes, until=end, color=color))
    return plot, shown_s


def describe_unfinished(config: Config, run_dir: Path, summary: JsonObject) -> list[str]:
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
    view = RunView.open(run_dir)
    summary = summaries.read(view.config, run_dir)
    if not view.series.rows:
        raise ConfigError(
            f"{run_dir}: nothing to report yet, no batch has been trained; `asyncrl doctor "
            f"{run_dir}` shows its state"
        )
    lanes, seconds = plot_timeline(trace.read_sized_spans(run_dir))
    samples = jsonl.read(run_dir / "samples.jsonl")
    commit, command = (
        path.read_text(errors="replace", encoding="utf-8").strip() if path.is_file() else "unknown"
        for path in (run_dir / "commit", run_dir / "command")
    )
    blocks = [
        ListBlock(
            describe_unfinished(view.config, run_dir, summary), id="unfinished", style="warn"
        ),
        *view.list_overview(summary),
        PlotBlock(build_plots(view.series, view.read_optimizer_steps(), summary)),
        PlotBlock(
            [lanes], heading=f"Timeline: {seconds:.3g} s from the middle of the run", style="wide"
        ),
        PlotBlock(
            plots.build_plots("ledger", {"": view.series}, points=POINTS),
            heading="Ledger: where every generated token ended",
            style="wide",
        ),
        *view.list_ledger(summary),
        TableBlock(
            ("prompt and completion", "batch", "reward", "lag", "versions"),
            [
                (
                    f"{sample['prompt']}{sample['text']}",
                    *(str(sample.get(key, "")) for key in ("batch", "reward", "lag")),
                    " ".join(f"{v[0]} [{v[1]}, {v[2]})" for v in sample.get("versions", [])),
                )
                for sample in [*samples[:4], *samples[-8:]]
            ],
            heading="Some samples",
            style="code",
        ),
        select_samples(view.samples),
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


def select_samples(store: token_samples.SampleStore) -> SamplesBlock:
    """Select the first and the newest rows of token_samples.jsonl with the values of their colors.

    Together they have at most SAMPLE_BYTES, so there are fewer long ones."""
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
