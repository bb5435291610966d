"""The terminal output of a sweep or a comparison.

A redrawn table on a terminal, otherwise one line on stderr for each finished run, and a table at
the end.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from asyncrl.experiments.compare.comparison import CellResult, Comparison
from asyncrl.experiments.compare.sweep import SYNC, Sweep, label
from asyncrl.experiments.compare.sweep_analysis import curve
from asyncrl.records import metrics


class ExperimentProgress(ABC):
    """Progress of many runs, as a context manager.

    `on_event` is the callback of the runs and may be called from several threads.
    """

    def __init__(self, total: int) -> None:
        self.lock = threading.Lock()
        self.began = time.monotonic()
        self.total = total  # runs
        self.before = 0  # finished earlier
        self.made = 0  # finished now
        self.now: dict[str, str] = {}  # run -> its state
        self.live: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(
                get_renderable=self.table, console=Console(stderr=True), refresh_per_second=2
            )
            self.live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
        if kind is KeyboardInterrupt:
            print(
                f"interrupted with {self.before + self.made} of {self.total} runs finished; the "
                "same command continues from here",
                file=sys.stderr,
            )

    def on_event(self, name: str, event: dict[str, Any]) -> None:
        """Take in a run's event.

        name: the run.
        event: {"step", "accuracy"} while it runs, {"done": True} at its end.
        """
        with self.lock:
            if "done" not in event:
                self.now[name] = f"step {event['step']}: {event['accuracy']:.3f}"
                return
            self.now.pop(name, None)
            self.made += 1
            outcome = self.finish_run(name)
            if self.live is None:
                print(f"{name}: {outcome} ({self.state()})", file=sys.stderr, flush=True)

    def state(self) -> str:
        remaining = self.total - self.before - self.made
        seconds = (time.monotonic() - self.began) / max(self.made, 1) * remaining
        time_left = f", about {seconds / 60:.0f} min to go" if self.made and remaining else ""
        return f"{self.total - remaining} of {self.total}{time_left}"

    @abstractmethod
    def finish_run(self, name: str) -> str:
        """Record a finished run and describe it."""

    @abstractmethod
    def table(self) -> Any:
        """Return the table for the terminal."""


class SweepProgress(ExperimentProgress):
    """Progress by correction and limit; a run is ARM-seedN or probe-limitK."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(len(sweep.plan.arms) * len(sweep.seeds) + len(sweep.plan.probes))
        self.sweep = sweep
        self.ends: dict[str, list[float]] = {}  # arm -> last accuracies of its finished runs
        self.gone: dict[str, int] = {}  # arm -> runs that failed or were stopped early
        for arm in sweep.plan.arms:
            for seed in sweep.seeds:
                if sweep.cells.path(name := sweep.name(arm, seed)).exists():
                    self._end(arm, sweep.cells.read(name))
        self.before = sum(map(len, self.ends.values())) + sum(
            sweep.cells.path(f"probe-limit{label(x)}").exists() for x in sweep.plan.probes
        )

    def _end(self, arm: str, record: dict[str, Any]) -> None:
        self.ends.setdefault(arm, []).append(curve(record, 0)[1][-1])
        self.gone[arm] = self.gone.get(arm, 0) + bool(record["abandoned"] or record.get("failed"))

    def finish_run(self, name: str) -> str:
        record = self.sweep.cells.read(name)
        arm = name.rpartition("-seed")[0]
        if not arm:
            return "speed probe"
        self._end(arm, record)
        stop_reason = record["abandoned"] or record.get("failed", "")
        return f"accuracy {self.ends[arm][-1]:.3f}" + (
            f", stopped early at step {record['steps']}: {stop_reason}" if stop_reason else ""
        )

    def table(self) -> Any:
        from rich.table import Table

        with self.lock:
            plan = self.sweep.plan
            table = Table(
                "correction",
                *(f"{'lag' if plan.injected else 'limit'} {label(x)}" for x in plan.limits),
                title=f"{self.sweep.directory.name}: {self.state()}",
                caption=f"sync: {self.cell_text(SYNC)}",
            )
            for name in plan.corrections:
                table.add_row(name, *(self.cell_text(plan.cell[name, x]) for x in plan.limits))
            return table

    def cell_text(self, arm: str) -> str:
        ends = self.ends.get(arm, [])
        done = (
            f"{sum(ends) / len(ends):.3f} ({len(ends)})"
            + (f" !{self.gone[arm]}" if self.gone[arm] else "")
            if ends
            else ""
        )
        running = [x for n, x in self.now.items() if n.rpartition("-seed")[0] == arm]
        return " ".join([*([done] if done else []), *running]) or "-"


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
            if comparison.finished(n, s)
        }
        self.before = len(self.ends)

    def finish_run(self, name: str) -> str:
        arm, _, seed = name.rpartition("-seed")
        cell = self.ends[arm, int(seed)] = self.comparison.read(arm, int(seed))
        return f"accuracy {cell.final:.3f} in {cell.summary['wall_s']:.0f} s" + "".join(
            f", {x}" for x in cell.trouble
        )

    def table(self) -> Any:
        from rich.table import Table

        with self.lock:
            comparison = self.comparison
            title = f"{comparison.directory.name}: {self.state()}"
            caption = "accuracy on held-out prompts; ! unstable"
            table = Table(
                "arm", *(f"seed {s}" for s in comparison.seeds), title=title, caption=caption
            )
            for name in comparison.configs:
                table.add_row(name, *(self.cell_text(name, s) for s in comparison.seeds))
            return table

    def cell_text(self, arm: str, seed: int) -> str:
        if (cell := self.ends.get((arm, seed))) is not None:
            return result(cell)
        if arm not in self.comparison.warm:
            return run_state(metrics.read(self.comparison.run_dir(arm, seed)))
        return self.now.get(f"{arm}-seed{seed}", "-")


def result(cell: CellResult) -> str:
    """Format a finished run in a few characters."""
    return f"{cell.final:.3f}{' !' if cell.trouble else ''}, {cell.summary['wall_s']:.0f} s"


def run_state(rows: list[dict[str, Any]]) -> str:
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

    names: their names in `head` -> their names here; the first is never cut.
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


def print_beside(
    head: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[str], more: Sequence[str]
) -> None:
    """Print a second table with measures other than the trained accuracy.

    Its columns are `names`, and those of `more` that any row has.
    """
    known = [h for h in more if any(row[head.index(h)] != "-" for row in rows)]
    if known:
        title = (
            "OOD: out-of-distribution accuracy; KL to ref: target to reference, k3, nats a "
            "token, at the end"
        )
        print_table(head, rows, {h: h for h in (*names, *known)}, title)
