"""The terminal output of a sweep or a comparison.

It is a redrawn table on a terminal, otherwise one line on stderr for each finished run, and a table
at the end.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from asyncrl.experiments.compare.comparison import Comparison
from asyncrl.experiments.compare.sweep import SYNC, Sweep, format_limit
from asyncrl.experiments.compare.sweep_analysis import complete_curve
from asyncrl.records import metrics


class ExperimentProgress(ABC):
    """Progress of many runs, as a context manager.

    `on_event` is the callback of the runs and may be called from several threads.
    """

    def __init__(self, total: int) -> None:
        self.lock = threading.Lock()
        self.started_at = time.monotonic()
        self.total = total  # runs
        self.finished_before = 0  # by an earlier command
        self.finished_now = 0  # by this command
        self.running: dict[str, str] = {}  # run -> its state
        self.live: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(
                get_renderable=self.make_table, console=Console(stderr=True), refresh_per_second=2
            )
            self.live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
        if kind is KeyboardInterrupt:
            print(
                f"interrupted with {self.finished_before + self.finished_now} of {self.total} runs "
                "finished; the same command continues from here",
                file=sys.stderr,
            )

    def on_event(self, name: str, event: dict[str, Any]) -> None:
        """Record a run's event.

        name: the run.
        event: {"step", "accuracy"} while it runs, {"done": True} at its end.
        """
        with self.lock:
            if "done" not in event:
                self.running[name] = f"step {event['step']}: {event['accuracy']:.3f}"
                return
            self.running.pop(name, None)
            self.finished_now += 1
            outcome = self.finish_run(name)
            if self.live is None:
                print(f"{name}: {outcome} ({self.describe_state()})", file=sys.stderr, flush=True)

    def describe_state(self) -> str:
        remaining = self.total - self.finished_before - self.finished_now
        seconds = (time.monotonic() - self.started_at) / max(self.finished_now, 1) * remaining
        time_left = (
            f", about {seconds / 60:.0f} min to go" if self.finished_now and remaining else ""
        )
        return f"{self.total - remaining} of {self.total}{time_left}"

    @abstractmethod
    def finish_run(self, name: str) -> str:
        """Record a finished run and describe it."""

    @abstractmethod
    def make_table(self) -> Any:
        """Return the table for the terminal."""


class SweepProgress(ExperimentProgress):
    """Progress by correction and limit; a run is ARM-seedN or probe-limitK."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(len(sweep.plan.arms) * len(sweep.seeds) + len(sweep.plan.probes))
        self.sweep = sweep
        self.ends: dict[str, list[float]] = {}  # arm -> last rewards of its finished runs
        self.stopped: dict[str, int] = {}  # arm -> runs that failed or were stopped early
        for arm in sweep.plan.arms:
            for seed in sweep.seeds:
                if sweep.cells.get_path(name := sweep.name_run(arm, seed)).exists():
                    self._record_end(arm, sweep.cells.read(name))
        self.finished_before = sum(map(len, self.ends.values())) + sum(
            sweep.cells.get_path(f"probe-limit{format_limit(x)}").exists()
            for x in sweep.plan.probes
        )

    def _record_end(self, arm: str, record: dict[str, Any]) -> None:
        self.ends.setdefault(arm, []).append(complete_curve(record, 0)[1][-1])
        self.stopped[arm] = self.stopped.get(arm, 0) + bool(
            record["abandoned"] or record.get("failed")
        )

    def finish_run(self, name: str) -> str:
        record = self.sweep.cells.read(name)
        arm = name.rpartition("-seed")[0]
        if not arm:
            return "speed probe"
        self._record_end(arm, record)
        stop_reason = record["abandoned"] or record.get("failed", "")
        return f"reward {self.ends[arm][-1]:.3f}" + (
            f", stopped early at step {record['steps']}: {stop_reason}" if stop_reason else ""
        )

    def make_table(self) -> Any:
        from rich.table import Table

        with self.lock:
            plan = self.sweep.plan
            table = Table(
                "correction",
                *(f"{'lag' if plan.injected else 'limit'} {format_limit(x)}" for x in plan.limits),
                title=f"{self.sweep.directory.name}: {self.describe_state()}",
                caption=f"sync: {self.format_cell(SYNC)}",
            )
            for name in plan.corrections:
                table.add_row(name, *(self.format_cell(plan.cell[name, x]) for x in plan.limits))
            return table

    def format_cell(self, arm: str) -> str:
        ends = self.ends.get(arm, [])
        finished = (
            f"{sum(ends) / len(ends):.3f} ({len(ends)})"
            + (f" !{self.stopped[arm]}" if self.stopped[arm] else "")
            if ends
            else ""
        )
        running = [x for n, x in self.running.items() if n.rpartition("-seed")[0] == arm]
        return " ".join([*([finished] if finished else []), *running]) or "-"


class CompareProgress(ExperimentProgress):
    """Progress by arm and seed; a run is ARM-seedN.

    The state of real runs is read from their run directories.
    """

    def __init__(self, comparison: Comparison) -> None:
        super().__init__(len(comparison.configs) * len(comparison.seeds))
        self.comparison = comparison
        self.ends = {
            (n, s): comparison.read(n, s)
            for n in comparison.configs
            for s in comparison.seeds
            if comparison.is_finished(n, s)
        }
        self.finished_before = len(self.ends)

    def finish_run(self, name: str) -> str:
        arm, _, seed = name.rpartition("-seed")
        cell = self.ends[arm, int(seed)] = self.comparison.read(arm, int(seed))
        return f"reward {cell.final:.3f} in {cell.summary['wall_s']:.0f} s" + "".join(
            f", {x}" for x in cell.trouble
        )

    def make_table(self) -> Any:
        from rich.table import Table

        with self.lock:
            comparison = self.comparison
            title = f"{comparison.directory.name}: {self.describe_state()}"
            caption = "held-out reward; ! unstable"
            table = Table(
                "arm", *(f"seed {s}" for s in comparison.seeds), title=title, caption=caption
            )
            for name in comparison.configs:
                table.add_row(name, *(self.format_cell(name, s) for s in comparison.seeds))
            return table

    def format_cell(self, arm: str, seed: int) -> str:
        if (cell := self.ends.get((arm, seed))) is not None:
            return f"{cell.final:.3f}{' !' if cell.trouble else ''}, {cell.summary['wall_s']:.0f} s"
        if arm not in self.comparison.warm:
            return describe_run(metrics.read(self.comparison.get_run_dir(arm, seed)))
        return self.running.get(f"{arm}-seed{seed}", "-")


def describe_run(rows: list[dict[str, Any]]) -> str:
    """Describe the state of a real run, from its metrics."""
    if not rows:
        return "-"
    accuracies = [r["eval/heldout"] for r in rows if "eval/heldout" in r]
    return f"step {max(r['step'] for r in rows)}" + (
        f": {accuracies[-1]:.3f}" if accuracies else ""
    )


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], names: dict[str, str], title: str
) -> None:
    """Print the columns of a page's table that fit a terminal.

    names: name in `head` -> name in the terminal; the first column is never cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for column, name in enumerate(names.values()):
        table.add_column(name, no_wrap=column == 0, justify="left" if column == 0 else "right")
    for row in rows:
        table.add_row(*(row[head.index(h)] for h in names))
    Console().print(table)


def print_other_measures(
    head: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[str], extra: Sequence[str]
) -> None:
    """Print a second table with measures other than the held-out reward.

    Its columns are `names`, and those of `extra` that any row has.
    """
    measured = [h for h in extra if any(row[head.index(h)] != "-" for row in rows)]
    if measured:
        title = (
            "OOD: out-of-distribution reward; KL to ref: target to reference, k3, nats a "
            "token, at the end"
        )
        print_table(head, rows, {h: h for h in (*names, *measured)}, title)
