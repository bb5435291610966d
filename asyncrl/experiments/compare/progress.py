"""What a sweep or a comparison says: while it runs a table that redraws, off a terminal a line for
each finished run, on stderr; at its end a table.
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
    """Use as a context; `on_event` is the callback of the runs and may be called from several
    threads.
    """

    def __init__(self, total: int) -> None:
        self.lock = threading.Lock()
        self.began = time.monotonic()
        # runs; of them finished earlier, finished by now
        self.total = total
        self.before = 0
        self.made = 0
        self.now: dict[str, str] = {}  # run -> where it is
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
                "same command goes on from here",
                file=sys.stderr,
            )

    def on_event(self, name: str, event: dict[str, Any]) -> None:
        """`name`: of the run; `event`: {"step", "accuracy"} along the way, {"done": True} at its
        end.
        """
        with self.lock:
            if "done" not in event:
                self.now[name] = f"step {event['step']}: {event['accuracy']:.3f}"
                return
            self.now.pop(name, None)
            self.made += 1
            said = self.finish_run(name)
            if self.live is None:
                print(f"{name}: {said} ({self.state()})", file=sys.stderr, flush=True)

    def state(self) -> str:
        left = self.total - self.before - self.made
        seconds = (time.monotonic() - self.began) / max(self.made, 1) * left
        ahead = f", about {seconds / 60:.0f} min to go" if self.made and left else ""
        return f"{self.total - left} of {self.total}{ahead}"

    @abstractmethod
    def finish_run(self, name: str) -> str:
        """Take note of a finished run; what is said of it."""

    @abstractmethod
    def table(self) -> Any:
        """What the terminal shows."""


class SweepProgress(ExperimentProgress):
    """Corrections x limits; a run is ARM-seedN or probe-limitK."""

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(len(sweep.plan.arms) * len(sweep.seeds) + len(sweep.plan.probes))
        self.sweep = sweep
        self.ends: dict[str, list[float]] = {}  # arm -> last accuracies of its finished runs
        self.gone: dict[str, int] = {}  # arm -> runs given up
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
        gave = record["abandoned"] or record.get("failed", "")
        return f"accuracy {self.ends[arm][-1]:.3f}" + (
            f", given up at step {record['steps']}: {gave}" if gave else ""
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
    """Arms x seeds; a run is ARM-seedN, and those in processes of their own are looked at in their
    run directory.
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
    """A finished run in a few characters."""
    return f"{cell.final:.3f}{' !' if cell.trouble else ''}, {cell.summary['wall_s']:.0f} s"


def run_state(rows: list[dict[str, Any]]) -> str:
    """Where a run in processes of its own is, by its metrics."""
    if not rows:
        return "-"
    known = [r["eval/heldout"] for r in rows if "eval/heldout" in r]
    return f"step {max(r['step'] for r in rows)}" + (f": {known[-1]:.3f}" if known else "")


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], shown: dict[str, str], title: str
) -> None:
    """The columns of a page's table that fit a terminal, on stdout.  shown: their names in `head`
    and here; the first one is never cut.
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
    for column, name in enumerate(shown.values()):
        table.add_column(name, no_wrap=column == 0, justify="left" if column == 0 else "right")
    for row in rows:
        table.add_row(*(row[head.index(h)] for h in shown))
    Console().print(table)


def print_beside(
    head: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[str], more: Sequence[str]
) -> None:
    """A second table, of what is not the accuracy that was trained for: columns `names`, and those
    of `more` that any row has.
    """
    known = [h for h in more if any(row[head.index(h)] != "-" for row in rows)]
    if known:
        title = (
            "OOD: out-of-distribution accuracy; KL to ref: target to reference, k3, nats a "
            "token, at the end"
        )
        print_table(head, rows, {h: h for h in (*names, *known)}, title)
