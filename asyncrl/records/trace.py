"""A timeline of what each process does: one lane a process, opened by any viewer of Chrome traces
(Perfetto).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

MOST_EVENTS = 20_000  # about 1.5 MB a process


class TraceSpan(NamedTuple):
    """A span of a process's timeline.  start, end: CLOCK_MONOTONIC seconds; size: what the work was
    done on (rows of a decode call, tokens of a batch); steps: decode steps of a decode call.
    """

    name: str
    start: float
    end: float
    size: int | None = None
    steps: int | None = None


class Tracer:
    """Spans of one process, to RUN/trace/PROCESS.jsonl; after MOST_EVENTS it only counts.

    On a full disk the rest of the spans is left out: a timeline must not end the run, nor hide what
    does."""

    def __init__(self, run_dir: Path, process: str) -> None:
        directory = run_dir / "trace"
        directory.mkdir(parents=True, exist_ok=True)
        self.file = (directory / f"{process}.jsonl").open("a", buffering=1 << 16, encoding="utf-8")
        self.left = MOST_EVENTS

    @contextmanager
    def span(self, name: str, size: int | None = None) -> Iterator[None]:
        """`size`: what the work was done on (answers, tokens); `asyncrl simulate` fits its times by
        it.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, began, time.monotonic(), size)

    def add(
        self,
        name: str,
        began: float,
        ended: float,
        size: int | None = None,
        steps: int | None = None,
    ) -> None:
        """A span that was timed elsewhere; `steps` goes with a `size`."""
        if self.left > 0:
            self.left -= 1
            numbers = "".join(f",{n}" for n in (size, steps) if n is not None)
            try:
                self.file.write(f'["{name}",{began:.6f},{ended:.6f}{numbers}]\n')
            except OSError:
                self.left = 0

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()


def read_sized_spans(run_dir: Path) -> dict[str, list[TraceSpan]]:
    """process -> its spans; a last line cut by a crash is left out."""
    out: dict[str, list[TraceSpan]] = {}
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        rows = [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.endswith("]")
        ]
        out[path.stem] = [TraceSpan(*row) for row in rows]
    return out


def read(run_dir: Path) -> dict[str, list[tuple[str, float, float]]]:
    """The same without sizes: (name, start, end)."""
    return {process: [s[:3] for s in spans] for process, spans in read_sized_spans(run_dir).items()}


def merge(run_dir: Path) -> Path:
    """Write RUN/trace.json in Chrome's format from what the processes left; on a full disk there is
    none.
    """
    events: list[dict[str, object]] = []
    for pid, (process, spans) in enumerate(read(run_dir).items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
        events += [
            {"name": n, "ph": "X", "pid": pid, "tid": 0, "ts": a * 1e6, "dur": (b - a) * 1e6}
            for n, a, b in spans
        ]
    path = run_dir / "trace.json"
    try:
        path.write_text(
            json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8"
        )
    except OSError:  # it is written when a run has ended, by whatever: that is what is to be told
        path.unlink(missing_ok=True)
    return path
