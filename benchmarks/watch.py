"""Measure the page of `asyncrl watch`: how fast a long run opens, and what an update costs.

    OMP_NUM_THREADS=1 python benchmarks/watch.py [--quick] [--json]

A made run has 100,000 batches, or 1,000, with 60 metrics each, and evaluations.  Opens: seconds
from nothing to the answers of the overview and the staleness page.  Update: CPU seconds of the
answers that the page asks for after a new batch, as a share of a core.  It asks every REFRESH_S
seconds, and less often where an update takes long (SPARE).  The summary, which is composed anew
so seldom that it costs COMPOSE_SHARE, is added.  Only the server's work is measured; a browser
draws on the reader's machine.  --quick: one round, 5,000 batches, goals not judged."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import msgspec
from lib import rounds

from asyncrl.config import load
from asyncrl.records.metrics import METRICS
from asyncrl.supervise.report.run_view import COMPOSE_SHARE
from asyncrl.viewer.app import WatchApp

REFRESH_S, SPARE, SLOWEST_S = 2.0, 250, 15.0  # as static/watch.js polls
METRICS_A_ROW = 60
GOALS = {"opens": 2.0, "update": 0.01}


def row(step: int) -> str:
    """Return one line of metrics.jsonl."""
    names = [name for name in METRICS if not name.startswith("eval/")][:METRICS_A_ROW]
    values = {name: (step * 7919 % 1000) / 1000 + i for i, name in enumerate(names)}
    if step % 10 == 0:
        values |= {"eval/heldout": 0.5, "eval/heldout_n": 1024.0}
    return json.dumps({"step": step, "t": step * 0.3, **values}) + "\n"


def make_run(path: Path, batches: int) -> None:
    """Write a run directory with the metrics of `batches` batches."""
    path.mkdir(parents=True)
    config = load.build({"model": {"path": "m"}, "task": {"name": "sort"}})
    (path / "config.toml").write_text(load.dump(config))
    (path / "run_id").write_text("made")
    (path / "metrics.jsonl").write_text("".join(map(row, range(batches))))


def answer(app: WatchApp, *pages: str) -> None:
    """Compute and encode what the page asks for."""
    msgspec.json.encode(app.list_runs({}))
    for page in pages:
        msgspec.json.encode(app.draw_plots({"page": page}))
    msgspec.json.encode(app.render("list_overview", {}))


def measure(batches: int, updates: int = 20) -> dict[str, float]:
    """Return seconds to open, and the share of a core for updates at every REFRESH_S seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        make_run(path, batches)
        began = time.perf_counter()
        app = WatchApp([path])
        answer(app, "overview", "staleness")
        opened = time.perf_counter() - began
        while not app.list_runs({})[0]["summed_up"]:  # once, beside the answers, as on a real page
            app.render("list_overview", {})
            time.sleep(0.1)
        spent = 0.0
        for number in range(updates):
            with (path / "metrics.jsonl").open("a") as file:
                file.write(row(batches + number))
                file.flush()
                os.fsync(file.fileno())
            before = time.process_time()
            answer(app, "overview")
            spent += time.process_time() - before
        each_s = spent / updates
        pause_s = min(max(REFRESH_S, SPARE * each_s), SLOWEST_S)
        return {"opens": opened, "update": each_s / pause_s + COMPOSE_SHARE}


def main() -> None:
    args = rounds.parser(__doc__).parse_args()
    sizes = [5_000] if args.quick else [1_000, 100_000]
    measured = {n: [measure(n) for _ in range(1 if args.quick else 5)] for n in sizes}
    goals = [
        rounds.figure(
            f"{name}, {batches:,} batches: {'seconds' if name == 'opens' else 'share of a core'}",
            [one[name] for one in found],
            most,
            at_least=False,
        )
        for batches, found in measured.items()
        for name, most in GOALS.items()
    ]
    rounds.report("watch", goals, {"what": "the page of asyncrl watch"}, args)


if __name__ == "__main__":
    main()
