"""Table of all metrics with units and meanings, and the writer of metrics.jsonl and TensorBoard."""

import math
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.contract.errors import REFUSALS, AsyncrlError
from asyncrl.contract.messages import DISPOSITIONS, Numbers
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.records import health_checks, jsonl
from asyncrl.records.append_log import name_full_disk
from asyncrl.records.jsonl import JsonObject


class MetricInfo(NamedTuple):
    unit: str
    meaning: str


Table = dict[str, MetricInfo]
METRICS: Table
METRICS, BY_LAG, PATTERNS, FOR_MANY, SECTIONS, FIRST_LOOK, PAGE = msgspec.convert(
    [*read_table(__file__).values()],
    tuple[Table, Table, Table, Table, dict[str, list[str]], Table, dict[str, str]],
)
METRICS |= {
    f"ledger/{_line}": MetricInfo("tokens", f"tokens that have ended in the ledger line {_line}")
    for _line in DISPOSITIONS
} | {
    f"refused/{_reason}": MetricInfo("count", f"refused so far: {_meaning}")
    for _reason, _meaning in REFUSALS.items()
}
BUCKETS = ("0", "1", "2", "3to4", "5to8", "9plus")
for _b in BUCKETS:
    for _kind, (_unit, _meaning) in BY_LAG.items():
        METRICS[f"by_lag/{_kind}_{_b}"] = MetricInfo(_unit, f"{_meaning} at lag {_b}")
    METRICS[f"by_age/mismatch_k3_{_b}"] = MetricInfo(
        "nats/token",
        f"`split/mismatch_k3` of tokens whose oldest keys and values are {_b} versions older than "
        "the weights that sampled them",
    )


def is_known_metric(name: str) -> bool:
    return name in METRICS or any(re.fullmatch(pattern, name) for pattern in PATTERNS)


def format_markdown() -> str:
    """Format the page of metrics."""
    first = [(name, x.format_map(vars(health_checks)), y) for name, (x, y) in FIRST_LOOK.items()]
    values = {
        "lags": ", ".join(BUCKETS),
        "lines": ", ".join(DISPOSITIONS),
        "kinds": ", ".join(f"{x} ({meaning.rstrip(',')})" for x, (_, meaning) in BY_LAG.items()),
    }
    rows = {x: y for x, y in METRICS.items() if not x.startswith(("by_", "ledger/"))}
    rows |= {x: y._replace(meaning=y.meaning.format(**values)) for x, y in FOR_MANY.items()}
    for pattern, entry in PATTERNS.items():
        name = re.sub(r"\[a-z\]\[a-z0-9-\]\*|\.\+", "NAME", pattern)
        rows[name.replace(r"\d+", "K").replace("(low|high)", "low, high")] = entry
    return fill(PAGE["text"], first=first, sections=SECTIONS, rows=rows)


# ---- the event file of TensorBoard ---------------------------------------------------------------


def import_protocol() -> tuple[Any, Any, Any]:
    """Import tensorboardX's writer of records, its events and its summaries.

    Does not import torch unless it is loaded already: that would cost the buffer 200 MB and
    seconds."""
    absent = "torch" not in sys.modules
    if absent:
        # `import torch` raises ImportError, which tensorboardX expects
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import RecordWriter
        from tensorboardX.proto import event_pb2, summary_pb2
    finally:
        if absent:
            del sys.modules["torch"]
    return RecordWriter, event_pb2, summary_pb2


class EventFile:
    """Writer of RUN/tensorboard, one event per row, with numbers and histograms.

    tensorboardX defines the messages and frames the records.  Its SummaryWriter is not used: it
    passes every event through a process queue to a thread, a sixth of the buffer's cost of a batch.

    An event that cannot be written is dropped, with one message: metrics.jsonl has all values.
    Without tensorboardX every event is dropped.

    Raises AsyncrlError if the file cannot be created."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.failed = False
        try:
            record_writer, self.events, self.summaries = import_protocol()
        except ImportError as error:
            self._give_up(error)
            return
        host, now = socket.gethostname(), time.time()
        # two incarnations in the same second need different files
        name = f"events.out.tfevents.{now:.6f}.{host}.{os.getpid()}"
        with name_full_disk(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self.records = record_writer(str(directory / name))
            self._write(self.events.Event(wall_time=now, file_version="brain.Event:2"))

    def add(
        self, step: int, values: Mapping[str, float], counts: Mapping[str, Counter[float]]
    ) -> None:
        """Add one event: a number per name, and histograms as counts of whole numbers."""
        if self.failed:
            return
        Value = self.summaries.Summary.Value
        rows = [Value(tag=name, simple_value=value) for name, value in values.items()]
        rows += [Value(tag=name, histo=self._build_histogram(c)) for name, c in counts.items() if c]
        self.add_event(step, summary=self.summaries.Summary(value=rows))

    def add_event(self, step: int, **content: Any) -> None:
        try:
            self._write(self.events.Event(wall_time=time.time(), step=step, **content))
        except OSError as error:
            self._give_up(error)

    def _write(self, event: Any) -> None:
        """Write to the kernel without waiting for the disk.  Raises OSError."""
        self.records.write(event.SerializeToString())
        self.records._writer.flush()  # its own `flush` waits for the disk

    def _build_histogram(self, count: Counter[float]) -> Any:
        """Make a bucket for each whole number in the range, and an empty one before them."""
        least, most = int(min(count) // 1), int(max(count) // 1)
        buckets = [0.0] * (most - least + 2)
        for value, times in count.items():
            buckets[int(value // 1) - least + 1] += times
        return self.summaries.HistogramProto(
            min=min(count),
            max=max(count),
            num=sum(count.values()),
            sum=sum(value * times for value, times in count.items()),
            sum_squares=sum(value * value * times for value, times in count.items()),
            bucket_limit=[least - 0.5 + index for index in range(len(buckets))],
            bucket=buckets,
        )

    def _give_up(self, error: OSError | ImportError) -> None:
        self.failed = True
        reason = error.strerror if isinstance(error, OSError) else None
        print(
            f"note: {self.directory} can no longer be written: {reason or error}", file=sys.stderr
        )

    def close(self) -> None:
        if not self.failed:
            try:
                self.records.close()
            except OSError as error:
                self._give_up(error)


# ---- metrics.jsonl -------------------------------------------------------------------------------


class MetricsWriter:
    """RUN/metrics.jsonl, one row per call, and RUN/tensorboard.

    Raises AsyncrlError for a name that the table lacks, and when metrics.jsonl cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.not_finite: set[str] = set()  # names that were reported
        self.run_dir = run_dir
        self.newest = -1  # step of training
        self.evaluations: set[tuple[int, str]] = set()  # (version, names)
        self.file = jsonl.JsonlAppender(run_dir / "metrics.jsonl")
        self.board = EventFile(run_dir / "tensorboard")
        if rows := read(run_dir):
            trained = [row["step"] for row in rows if not name_evaluation(row)]
            self._start_session(1 + max(trained, default=-1), rows)

    def write(
        self,
        step: int,
        values: Numbers,
        seconds: float = 0.0,
        histograms: dict[str, list[float]] | None = None,
    ) -> None:
        """Write one row.

        step: the version.  seconds: the RunClock's.  histograms: of whole numbers.  Values that are
        not finite are left out, because JSON has none, and reported once per name."""
        if unknown := [n for n in values if not is_known_metric(n)]:
            raise AsyncrlError(f"metrics not in asyncrl/records/metrics.toml: {', '.join(unknown)}")
        if not_finite := {n for n, x in values.items() if not math.isfinite(x)}:
            values = {n: x for n, x in values.items() if n not in not_finite}
            if new := sorted(not_finite - self.not_finite):
                note = f"step {step}: not finite, left out of the metrics: {', '.join(new)}"
                print(note, file=sys.stderr)
                self.not_finite |= not_finite
        row: JsonObject = {"step": step, "t": round(seconds, 4)} | values
        counts = {name: Counter(numbers) for name, numbers in (histograms or {}).items()}
        texts = {name: {f"{x:g}": n for x, n in count.items()} for name, count in counts.items()}
        evaluation = name_evaluation(values)
        repeats = (step, evaluation) in self.evaluations or (not evaluation and step <= self.newest)
        self.file.write(row | texts)
        if repeats:  # by a learner that was restarted from a checkpoint
            self._start_session(step, read(self.run_dir))
            return
        self.board.add(step, values, counts)
        if evaluation:
            self.evaluations.add((step, evaluation))
        else:
            self.newest = step

    def _start_session(self, step: int, rows: list[JsonObject]) -> None:
        """Make TensorBoard drop its events from `step` on; add those of `rows` from there again.

        rows: all valid ones."""
        self.newest, self.evaluations = -1, set()
        if not self.board.failed:
            log = self.board.events.SessionLog
            self.board.add_event(step, session_log=log(status=log.START))
        for row in rows:
            if evaluation := name_evaluation(row):
                self.evaluations.add((row["step"], evaluation))
            else:
                self.newest = row["step"]
            if row["step"] >= step:
                counts = {
                    name: Counter({float(text): count for text, count in value.items()})
                    for name, value in row.items()
                    if isinstance(value, dict)
                }
                self.board.add(row["step"], select_numbers(row), counts)

    def close(self) -> None:
        self.file.close()
        self.board.close()


OPTIMIZER_STEPS = "optimizer_steps.jsonl"  # of a run: a row for each optimizer step
# names of metrics in the runs of earlier versions -> their present names
OLD_NAMES = {"adv/mean": "advantage/mean", "adv/abs_max": "advantage/abs_max"}


def read(run_dir: Path) -> list[JsonObject]:
    """Read the rows of metrics.jsonl that no later row replaces, in order.

    Damaged lines are left out.  Renamed metrics have their present names."""
    return select_valid_rows(jsonl.read(run_dir / "metrics.jsonl"))


def select_numbers(row: Mapping[str, Any]) -> Numbers:
    """Return the numbers of a row, without its place in the run and its histograms."""
    return {
        name: value
        for name, value in row.items()
        if name not in ("step", "t") and isinstance(value, int | float)
    }


def name_evaluation(row: Mapping[str, Any]) -> str:
    """Name the metrics of an evaluation's row; "" for a row of training."""
    names = row.keys() - {"step", "t"}
    return ",".join(sorted(names)) if all(name.startswith("eval/") for name in names) else ""


def select_valid_rows(lines: Iterable[JsonObject]) -> list[JsonObject]:
    """Leave out the rows that later ones replace.

    After a resume the later row of a step wins.  A training row of step s replaces the earlier
    training rows from s on and the evaluations of versions above s, which belong to the abandoned
    branch.  An evaluation replaces an earlier one of the same version and split."""
    # (step, "" for training or the names of an evaluation)
    valid: dict[tuple[int, str], JsonObject] = {}
    newest = -1  # step of training
    for line in lines:
        row = {OLD_NAMES.get(name, name): value for name, value in line.items()}
        step = row.get("step")
        if not isinstance(step, int):
            continue
        evaluation = name_evaluation(row)
        if not evaluation:
            for key in (
                [k for k in valid if k[0] > step or k == (step, "")] if step <= newest else ()
            ):
                del valid[key]
            newest = step
        valid.pop((step, evaluation), None)
        valid[step, evaluation] = row
    return list(valid.values())


def average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def average_known(values: Iterable[float]) -> float:
    """Return the mean of the values that are not nan; nan without any."""
    return average([value for value in values if not math.isnan(value)])


def compute_idle_shares(rows: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return each side's idle share: its idle time over all its time, both summed over `rows`.

    rows: of metrics.jsonl; those of repeated steps also took time.  Older rows lack the generators'
        time and count by the time of the step."""
    shares = {}
    for side, time_name in (("generator", "time/generators"), ("learner", "time/step")):
        name = f"time/{side}_idle_share"
        timed = [
            (row[name], row.get(time_name, row.get("time/step", 1.0)))
            for row in rows
            if name in row
        ]
        total = sum(seconds for _, seconds in timed)
        shares[side] = sum(share * seconds for share, seconds in timed) / max(total, 1e-9)
    return shares


class RunClock:
    """Seconds of a run's work since the first ticket, without pauses between incarnations."""

    def __init__(self, run_dir: Path) -> None:
        """Continue from the last row of metrics.jsonl in a resumed run."""
        self.earlier_s = max((float(r.get("t", 0.0)) for r in read(run_dir)), default=0.0)
        self.started_at = 0.0  # in this incarnation; 0: not yet

    def start(self, now: float) -> None:
        """Start the clock at `now` (time.monotonic()); only the first call counts."""
        self.started_at = self.started_at or now

    def seconds_at(self, now: float) -> float:
        return self.earlier_s + (max(0.0, now - self.started_at) if self.started_at else 0.0)
