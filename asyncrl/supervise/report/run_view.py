"""One run, from the files of its directory, the blocks in which pages show it, and report.html."""

import contextlib
import json
import math
import statistics
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.printable import escape_line
from asyncrl.contract.toml_writer import flatten, read_table
from asyncrl.records import atomic_write, jsonl, metrics, page_kit, process_log, rundir, trace
from asyncrl.records.health_checks import Finding, Rows, match_rules
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import (
    Block,
    CardBlock,
    ListBlock,
    ListItem,
    PagePlot,
    PlotBlock,
    PlotLine,
    SamplesBlock,
    TableBlock,
    TextBlock,
    format_number,
)
from asyncrl.supervise import doctor, live
from asyncrl.supervise import summary as summaries
from asyncrl.supervise.hosts import TAIL_BYTES, read_last_lines
from asyncrl.supervise.report import advice, plots
from asyncrl.supervise.report.plots import Series
from asyncrl.supervise.report.token_samples import FILE, SHADES, SampleStore

TableRow = tuple[str, ...]
TABLES: dict[str, dict[str, Any]] = read_table(__file__)
HEADS: dict[str, TableRow] = TABLES["heads"]
ENDS = ("start", "end")
MOVES = 8  # number of newest changes of the limit that are described; the plot has all
COMPOSE_S = 5.0  # a summary of a run in progress is composed at most this often
# keys that the blocks read
SUMMARY_KEYS = {"heldout_start", "heldout_end", "ood_end", "wall_s", "steps", "lag", "speed"}
SUMMARY_KEYS |= {"ledger", "ledger_lines"}
COMPOSE_SHARE = 0.005  # share of a core that composing it costs at most

TIMELINE_S = 3.0  # length of the timeline, which shows at least STEPS_SHOWN steps
STEPS_SHOWN = 4
POINTS = 600  # most points of a line: a report stays below 2 MB
KINDS: dict[str, int] = TABLES["kinds"]
OTHER_KIND = 3
FADED = "faded"  # the column of what `downweight` took from the trained tokens
SAMPLES_SHOWN = 16  # number of first and newest samples whose tokens a report colors
SAMPLE_BYTES = 500_000  # most bytes of them in a report


@dataclass
class RunView:
    """A run directory and the data read from it so far.

    home: the directory of its processes, settings and logs.
    """

    no_samples: ClassVar[str] = (
        "This run has logged no samples yet: it logs some of every record.samples_every-th batch "
        "(record.token_samples)."
    )

    id: str
    path: Path
    series: Series = field(init=False)
    samples: SampleStore = field(init=False)
    steps: Series = field(init=False)  # of optimizer_steps.jsonl, read on demand
    problem: str = ""  # why its files cannot be read
    _summary: JsonObject = field(default_factory=dict)
    _next_summary: float = 0.0

    def __post_init__(self) -> None:
        self.home = self.path
        self.series = Series(self.path / "metrics.jsonl")
        self.samples = SampleStore(self.path / FILE)
        self.steps = Series(self.path / metrics.OPTIMIZER_STEPS)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a run directory.  Raises ConfigError if its files cannot be read."""
        view = cls(path.name, path)
        view.refresh()
        if view.problem:
            raise ConfigError(view.problem)
        return view

    def refresh(self) -> None:
        """Read what the run has written since the last call; `problem` says why it could not."""
        self.problem = ""
        try:
            with jsonl.name_damaged(self.path):
                self.series.refresh()
                self.samples.refresh()
        except ConfigError as error:
            self.problem = str(error)

    @property
    def config(self) -> Config:
        """The run's settings, read again when the file has changed. Raises ConfigError."""
        path = self.path / "config.toml"
        try:
            status = path.stat()
        except OSError:
            raise ConfigError(
                f"{self.path}: the run directory was removed, or has no config.toml"
            ) from None
        return _load_version(path, status.st_mtime_ns, status.st_size)

    def read_summary(self) -> JsonObject:
        """Return the run's summary object; {} until it exists.

        A thread composes that of a run in progress, at most every COMPOSE_S seconds, and one that
        lacks keys.
        """
        summary = jsonl.read_object(self.path / "summary.json")
        if summary.keys() >= SUMMARY_KEYS:
            return summary
        if time.monotonic() >= self._next_summary:
            self._next_summary = math.inf
            # in a thread, because a long run takes seconds
            threading.Thread(target=self._compose, name="summary", daemon=True).start()
        return self._summary

    def _compose(self) -> None:
        start = time.monotonic()
        try:
            has_rows = (self.path / "metrics.jsonl").exists()
            self._summary = summaries.compose(self.config, self.path) if has_rows else {}
        except (OSError, ValueError, KeyError, TypeError, AsyncrlError):
            self._summary = {}
        end = time.monotonic()
        self._next_summary = end + max(COMPOSE_S, (end - start) / COMPOSE_SHARE)

    def describe_state(self) -> JsonObject:
        """Return the run's row of the list: state, steps, newest held-out reward, mean lag."""
        problem, state, step, planned = self.problem, "unreadable", 0, 0
        try:
            with jsonl.name_damaged(self.path):
                progress, step, planned = self.read_progress()
            state = state if problem else progress
        except (AsyncrlError, OSError) as error:
            problem = str(error)
        rows = self.series.rows
        return {
            "id": self.id,
            "path": str(self.path),
            "state": state,
            "problem": problem,
            "step": self.count_steps() or step,
            "steps": planned,
            "seconds": float(self.series.axes["time"].values[-1]) if rows else 0.0,
            "accuracy": self.series.get_latest("eval/heldout"),
            "reward": self.series.get_latest("reward/mean"),
            "lag": self.series.get_latest("lag/mean"),
            "rows": rows,
            "samples": len(self.samples.heads),
            "summed_up": bool(self._summary),
            "damaged": self.series.file.damaged + self.samples.damaged,
        }

    def read_progress(self) -> tuple[str, int, int]:
        """Return state, steps if the metrics have none, and planned steps."""
        planned = self.config.learner.steps
        return describe_state(self.path, planned), 0, planned

    def count_steps(self) -> int:
        """Count trained batches, whose rows are numbered from 0."""
        trained = self.series.get_column("reward/mean").rows
        return int(self.series.axes["step"].values[trained[-1]]) + 1 if len(trained) else 0

    def list_overview(self, summary: JsonObject) -> list[Block]:
        """Return advice, waits, the health checks that fired, and the main figures."""
        advice, fired = self.list_advice(summary.get("signs", []))
        latest = self.series.read_latest()
        waits = (live.describe("rewards", latest), live.describe("link", latest))
        return [
            ListBlock([*map(format_item, advice), *filter(None, waits)], id="advice"),
            ListBlock(map(format_item, fired), id="signs", style="warn"),
            CardBlock(build_cards(self.series, summary)),
        ]

    def list_advice(self, signs: Rows) -> tuple[list[Finding], list[Finding]]:
        """Return the first lines of the page: advice, and the health checks that fired."""
        config, ended = None, False
        with contextlib.suppress(AsyncrlError, OSError):
            config = self.config
            ended = rundir.is_finished(self.path, config.learner.steps)
        return advice.list_advice(config, self.path, ended=ended, series=self.series, signs=signs)

    def list_ledger(self, summary: JsonObject) -> list[Block]:
        """Return the ledger: tokens by their end, by task and by length, and failures."""
        if not summary:
            return []
        latest, lines = self.series.read_latest(), summary["ledger_lines"]
        tasks = {
            title: {name: line["tokens"] for name, line in part.items()}
            for title, part in summary.get("ledger_by_task", {}).items()
        }
        tables: list[tuple[list[TableRow], str, str]] = [
            ([HEADS["ledger"], *_build_ledger(summary)], "", "ledger"),
            ([HEADS["tasks"], *live.build_task_rows(latest)], "Tasks, at the last step", "tasks"),
            (_build_shares("task", lines, tasks), "Ledger by task", "ledger-by-task"),
            (
                build_length_ledger(lines),
                "By completion length: what the staleness rule took",
                "by-length",
            ),
            (
                [
                    ("failure", "samples"),
                    *((name, f"{count:,}") for name, count in summary.get("failures", {}).items()),
                ],
                "Failed samples",
                "failures",
            ),
        ]
        return [
            TableBlock(head, rows, heading=heading, id=id_)
            for (head, *rows), heading, id_ in tables
            if rows
        ]

    def describe_processes(self) -> list[JsonObject]:
        return doctor.describe_processes(self.config, self.path)

    def list_processes(self) -> list[JsonObject]:
        """Return every process: state, last end, restarts, host, memory, last line of its log."""
        events = process_log.read_events(self.home)
        rows = self.describe_processes()
        for row in rows:
            name = row["name"], "began"
            starts = [event for event in events if (event["name"], event["event"]) == name]
            newest = starts[-1] if starts else {}
            row["restarts"] = max(len(starts) - 1, 0)
            row["host"], row["pid"] = newest.get("host", ""), newest.get("pid")
            row["memory_mb"] = measure_resident_mb(row["pid"]) if row["alive"] else None
        return rows

    def read_optimizer_steps(self) -> Series:
        """Return optimizer_steps.jsonl as columns, up to its newest row."""
        self.steps.refresh()
        return self.steps

    def read_settings(self) -> JsonObject:
        """Return the run's settings as {dotted key: value}."""
        return read_settings(self.home / "config.toml")

    def list_changed_settings(self) -> list[str]:
        """List the keys whose values are not the defaults."""
        config = load.build({"model": {"path": ""}, "task": {"name": "sort"}})
        defaults = flatten(tomllib.loads(load.dump(config)))
        settings = self.read_settings()
        return [key for key, value in settings.items() if defaults.get(key) != value]

    def list_logs(self) -> list[str]:
        """Return the names of the log files: a server's own, then the newest attempt first."""
        files = [*(self.home / "logs").rglob("*.log"), *self.home.glob("*.log")]
        root = self.home.resolve()  # a link out of the directory would show another file
        inside = [path for path in files if path.resolve().is_relative_to(root) and path.is_file()]
        names = (str(path.relative_to(self.home)) for path in inside)
        return sorted(names, key=lambda name: (name.endswith("server.log"), name), reverse=True)

    def read_log_tail(self, name: str) -> str:
        """Return the end of a log file, escaped line by line.

        Raises ConfigError for a file that is not one of `list_logs`.
        """
        if name not in self.list_logs():
            raise ConfigError(f"{name}: no log file of {self.home}")
        return "\n".join(read_last_lines(self.home / name, TAIL_BYTES, 2000))


@lru_cache(1000)
def _load_version(path: Path, changed_ns: int, size: int) -> Config:
    return load.load(path)


def read_settings(path: Path) -> JsonObject:
    """Return the settings in a file as {dotted key: value}.  Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return flatten(tomllib.load(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def measure_resident_mb(pid: int | None) -> float | None:
    """Return the resident memory of a process of this machine in MiB, or None if there is none."""
    if pid is None:
        return None
    import psutil

    try:
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    except psutil.Error:
        return None


def describe_state(run_dir: Path, planned: int) -> str:
    """Return `running`, `finished` (of `planned` steps) or `stopped`."""
    if process_log.list_alive(run_dir):
        return "running"
    return "finished" if rundir.is_finished(run_dir, planned) else "stopped"


def list_differences(runs: list[RunView]) -> list[JsonObject]:
    """Return the settings in which the runs differ, as {key, values by run}."""
    settings = {run.id: run.read_settings() for run in runs}
    keys = sorted({key for values in settings.values() for key in values})
    return [
        {"key": key, "values": {name: values.get(key) for name, values in settings.items()}}
        for key in keys
        if len({repr(values.get(key)) for values in settings.values()}) > 1
    ]


# ---- the blocks of a run -------------------------------------------------------------------------


def format_item(finding: Finding) -> ListItem:
    return ListItem(finding.remedy, bold=finding.said)


def list_early_stops(rows: Rows) -> list[float]:
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


def build_cards(series: Series, summary: JsonObject) -> list[tuple[str, str, str, str]]:
    """Return (label, value, id, note below the value) of each card; none without a summary."""
    if not summary:
        return []
    latest = series.read_latest()
    evals = {
        split: [
            f"+-{half:.3f} (n = {n:,.0f})" for n, half in series.list_intervals(f"eval/{split}")
        ]
        or [""]
        for split in ("heldout", "ood")
    }

    window = live.describe("window", latest)
    stops = list_early_stops(
        series.select_rows("optim/early_stops") if latest.get("optim/early_stops") else []
    )
    notes = {
        "heldout-start": evals["heldout"][0],
        "heldout-end": evals["heldout"][-1],
        "ood-end": evals["ood"][-1],
        "lag-mean": f"at the end: {window}" if window else "",
        "lag-max": describe_limit_moves(series.select_rows("limit/before")),
        "early-stops": f"at a median KL of {statistics.median(stops):.2g}" if stops else "",
    }
    rewards = {f"{split}_{end}": summary.get(f"{split}_{end}") for split in evals for end in ENDS}
    rewards["reward"] = latest.get("reward/mean")
    values = summary | {name: format_number(x, ".3f") for name, x in rewards.items()}
    values["stops"] = len(stops)
    return [
        (label, form.format_map(values), id_, notes.get(id_, ""))
        for id_, (label, form) in TABLES["cards"].items()
        if stops or id_ != "early-stops"
    ]


def describe_limit_moves(rows: Rows) -> str:
    """Describe the last changes of an adaptive lag limit and their reasons; "" without any.

    >>> row = {"step": 9, "limit/now": 2.0, "limit/before": 1.0, "limit/ess": 0.9}
    >>> describe_limit_moves([{"step": 8}, row | {"limit/idle": 0.25}])
    'limit from step 9 on 2 (was 1: ESS 0.90, learner idle 25%)'
    """
    moves = [finding.said for row in rows for finding in match_rules("limit_move", row)]
    earlier = f"{len(moves) - MOVES} earlier moves, then " if len(moves) > MOVES else ""
    return f"limit {earlier}{'; '.join(moves[-MOVES:])}" if moves else ""


def _build_ledger(summary: JsonObject) -> list[TableRow]:
    total = max(summary["ledger"]["generated"], 1)
    rows: list[TableRow] = [("generated", f"{summary['ledger']['generated']:,}", "", "", "", "")]
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


def _build_shares(
    name: str, lines: Iterable[str], table: Mapping[str, Mapping[str, float]]
) -> list[TableRow]:
    """Return a header, then a row per title with its tokens and their share in each ledger line.

    table: title -> tokens by line; `lines` without tokens are left out."""
    columns = [x for x in (*lines, FADED) if any(tokens.get(x) for tokens in table.values())]
    rows: list[TableRow] = [(name, "tokens", *columns)]
    for title, tokens in table.items():
        total = sum(n for line, n in tokens.items() if line != FADED)
        shares = (f"{tokens.get(line, 0) / max(total, 1):.2%}" for line in columns)
        rows.append((title, f"{total:,.0f}", *shares))
    return rows


def build_length_ledger(lines: Mapping[str, Mapping[str, float]]) -> list[TableRow]:
    """Return a header, then a row per range of completion lengths.

    `faded` is the loss of trained tokens to `downweight`: tokens times (1 - weight)."""
    table: dict[int, dict[str, float]] = {}
    for name, line in lines.items():
        for key, tokens in line.items():
            prefix, found, bound = key.rpartition("upto_")
            if found:
                table.setdefault(int(bound), {})[FADED if prefix else name] = tokens
    titles = {x: f"{x // 2 + 1} to {x}" if x > 2 else f"{x}" for x in sorted(table)}
    titled = {title: table[bound] for bound, title in titles.items()}
    return _build_shares("completion length", lines, titled)


# ---- report.html: a self-contained page with plots, the ledger and numbers as JSON ---------------


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
    start = statistics.median_high(x.start for x in trains or all_spans)
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


def write_report(run_dir: Path) -> Path:
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


def select_samples(store: SampleStore) -> SamplesBlock:
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
        SHADES,
        heading="Tokens of some samples",
        id="token-samples",
    )


# ---- the runs of a folder ------------------------------------------------------------------------


def list_runs(directory: Path) -> list[JsonObject]:
    """Describe each run directory in `directory`, oldest first.

    Raises ConfigError if it has none."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; give the one that the config names as `runs`"
        )
    configs = [x for x in directory.glob("*/config.toml") if (x.parent / "run_id").is_file()]
    if not configs:
        is_run = (directory / "run_id").is_file() and (directory / "config.toml").is_file()
        raise ConfigError(
            f"{directory} is a run itself; give the directory that it is in"
            if is_run
            else f"{directory} contains no run directory"
        )

    def begun_at(config: Path) -> tuple[float, str]:
        return (config.parent / "run_id").stat().st_mtime, config.parent.name

    return [describe_run(path.parent) for path in sorted(configs, key=begun_at)]


def describe_run(run_dir: Path) -> JsonObject:
    """Read a run's state, steps, newest mean reward on held-out prompts and mean lag.

    accuracy: that reward, an accuracy where rewards are 0 or 1.
    state: `running`, `finished`, `stopped` or `unreadable`.
    A value that does not exist yet is None."""
    row: JsonObject = {"run": escape_line(run_dir.name), "state": "unreadable"}
    row |= dict.fromkeys(("steps", "of", "accuracy", "lag"))
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
        planned = int(config["learner"]["steps"])
        buffer_summary = summaries.read_buffer_summary(run_dir)
        accuracy = summaries.find_evaluation(metrics.read(run_dir), "heldout", "end")
        steps, lag = buffer_summary["steps"], buffer_summary["lag"]["mean"]
    except (OSError, ValueError, KeyError, TypeError):
        return row
    return row | {
        "state": describe_state(run_dir, planned),
        "steps": steps,
        "of": planned,
        "accuracy": accuracy,
        "lag": lag if steps else None,
    }
