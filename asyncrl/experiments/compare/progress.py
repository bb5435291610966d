"""The terminal output of a sweep or a comparison.

It is a redrawn table on a terminal, otherwise one line on stderr for each finished run, and a table
at the end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from asyncrl.experiments.compare.grid import CellResult, Comparison, Sweep
from asyncrl.experiments.compare.verdict import average
from asyncrl.records.page_kit import TableBlock


class GridProgress:
    """Progress of the runs of a grid, as a context manager.

    `on_event` is the callback of the runs and may be called from several threads.
    """

    def __init__(self, grid: Comparison | Sweep) -> None:
        self.lock = threading.Lock()
        self.started_at = time.monotonic()
        self.grid = grid
        self.finished_before = 0  # by an earlier command
        self.finished_now = 0  # by this command
        self.running: dict[str, str] = {}  # run -> its state
        self.ends: dict[str, CellResult] = {}  # finished runs
        self.live: Any = None
        for name in filter(grid.is_finished, grid.names):
            self.finished_before += 1
            self._read_end(name)

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
                f"interrupted with {self.finished_before + self.finished_now} of "
                f"{len(self.grid.names)} runs finished; the same command continues from here",
                file=sys.stderr,
            )

    def _read_end(self, name: str) -> CellResult | None:
        """Read a finished run; None for a speed probe."""
        arm, _, seed = name.rpartition("-seed")
        if arm:
            self.ends[name] = self.grid.read(arm, int(seed))
        return self.ends.get(name)

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
            cell = self._read_end(name)
            outcome = "speed probe"
            if cell is not None:
                outcome = f"reward {cell.final:.3f} in {cell.summary['wall_s']:.0f} s"
                if cell.stopped:
                    outcome += f", stopped early at step {cell.summary['steps']}: {cell.stopped}"
                else:
                    outcome += "".join(f", {problem}" for problem in cell.trouble)
            if self.live is None:
                print(f"{name}: {outcome} ({self.describe_state()})", file=sys.stderr, flush=True)

    def describe_state(self) -> str:
        total = len(self.grid.names)
        remaining = total - self.finished_before - self.finished_now
        seconds = (time.monotonic() - self.started_at) / max(self.finished_now, 1) * remaining
        time_left = (
            f", about {seconds / 60:.0f} min to go" if self.finished_now and remaining else ""
        )
        return f"{total - remaining} of {total}{time_left}"

    def make_table(self) -> Any:
        """Return the table for the terminal."""
        from rich.table import Table

        with self.lock:
            head, rows = self.grid.make_table()
            title = f"{self.grid.directory.name}: {self.describe_state()}"
            table = Table(*head, title=title, caption="held-out reward; ! unstable")
            for name, columns in rows.items():
                table.add_row(name, *map(self.format_cell, columns))
            return table

    def format_cell(self, names: Sequence[str]) -> str:
        """Format the finished runs of a cell by their means, then the state of the others."""
        ends = [self.ends[name] for name in names if name in self.ends]
        texts = [
            self.running.get(name) or self.grid.describe_running(name)
            for name in names
            if name not in self.ends
        ]
        if ends:
            unstable = sum(bool(cell.trouble) for cell in ends)
            count = f" ({len(ends)})" if len(names) > 1 else ""
            mark = f" !{unstable if count else ''}" if unstable else ""
            seconds = average([cell.summary["wall_s"] for cell in ends])
            reward = average([cell.final for cell in ends])
            texts.insert(0, f"{reward:.3f}{count}{mark}, {seconds:.0f} s")
        return " ".join(filter(None, texts)) or "-"


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], names: dict[str, str], title: str
) -> None:
    """Print the columns of a page's table that fit a terminal.

    names: name in `head` -> name in the terminal.
    """
    chosen = [[row[head.index(name)] for name in names] for row in rows]
    print(TableBlock([*names.values()], chosen, heading=f"{title}\n").as_text() + "\n")


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
