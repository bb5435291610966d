"""A timeline of a run with one lane per process, for viewers of Chrome traces (Perfetto)."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

MOST_EVENTS = 20_000  # about 1.5 MB a process


class TraceSpan(NamedTuple):
    """A span of a process's timeline.

    start, end: CLOCK_MONOTONIC seconds.
    size: amount of work (completions of a decode call, tokens of a batch); 0: none.
    steps: decode steps of a decode call."""

    name: str
    start: float
    end: float
    size: int = 0
    steps: int = 0


class Tracer:
    """Writer of one process's spans to RUN/trace/PROCESS.jsonl, MOST_EVENTS at most.

    On a full disk the remaining spans are dropped: a timeline must neither end the run nor hide
    the cause of its end."""

    def __init__(self, run_dir: Path, process: str) -> None:
        directory = run_dir / "trace"
        directory.mkdir(parents=True, exist_ok=True)
        self.file = (directory / f"{process}.jsonl").open("a", buffering=1 << 16, encoding="utf-8")
        self.events_left = MOST_EVENTS

    @contextmanager
    def time_span(self, name: str, size: int | None = None) -> Iterator[None]:
        """Time a block; size: its completions or tokens, to which `asyncrl simulate` fits times."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic(), size)

    def add(
        self, name: str, start: float, end: float, size: int | None = None, steps: int | None = None
    ) -> None:
        """Add a span that was timed elsewhere; `steps` requires `size`."""
        if self.events_left > 0:
            self.events_left -= 1
            numbers = "".join(f",{n}" for n in (size, steps) if n is not None)
            try:
                self.file.write(f'["{name}",{start:.6f},{end:.6f}{numbers}]\n')
            except OSError:
                self.events_left = 0

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()


def read_sized_spans(run_dir: Path) -> dict[str, list[TraceSpan]]:
    """Return process -> spans, without an incomplete last line."""
    spans: dict[str, list[TraceSpan]] = {}
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        rows = [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.endswith("]")
        ]
        spans[path.stem] = [TraceSpan(*row) for row in rows]
    return spans


def merge(run_dir: Path) -> Path:
    """Write RUN/trace.json in Chrome's format from the spans of all processes.

    On a full disk there is no such file."""
    events: list[dict[str, object]] = []
    for pid, (process, spans) in enumerate(read_sized_spans(run_dir).items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
        events += [
            {"name": n, "ph": "X", "pid": pid, "tid": 0, "ts": a * 1e6, "dur": (b - a) * 1e6}
            for n, a, b, *_ in spans
        ]
    path = run_dir / "trace.json"
    try:
        path.write_text(
            json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8"
        )
    except OSError:  # an error here must not replace the reason for which the run ended
        path.unlink(missing_ok=True)
    return path
