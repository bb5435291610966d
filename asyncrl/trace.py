"""A timeline of what each process does: one lane a process, opened by any viewer of Chrome traces (Perfetto)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_EVENTS = 20_000  # about 1.5 MB a process


class Tracer:
    """Spans of one process, to RUN/trace/PROCESS.jsonl; after MOST_EVENTS it only counts."""

    def __init__(self, run_dir: Path, process: str) -> None:
        directory = run_dir / "trace"
        directory.mkdir(parents=True, exist_ok=True)
        self.file = (directory / f"{process}.jsonl").open("a", buffering=1 << 16)
        self.left = MOST_EVENTS

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            if self.left > 0:
                self.left -= 1
                self.file.write(f'["{name}",{began:.6f},{time.monotonic():.6f}]\n')

    def close(self) -> None:
        self.file.close()


def read(run_dir: Path) -> dict[str, list[tuple[str, float, float]]]:
    """process -> (name, start, end) in CLOCK_MONOTONIC seconds; a last line cut by a crash is left out."""
    out = {}
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        lines = path.read_text().splitlines()
        out[path.stem] = [tuple(json.loads(line)) for line in lines if line.endswith("]")]
    return out


def merge(run_dir: Path) -> Path:
    """Write RUN/trace.json in Chrome's format from what the processes left."""
    events: list[dict[str, object]] = []
    for pid, (process, spans) in enumerate(read(run_dir).items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
        events += [{"name": n, "ph": "X", "pid": pid, "tid": 0, "ts": a * 1e6, "dur": (b - a) * 1e6} for n, a, b in spans]
    path = run_dir / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path
