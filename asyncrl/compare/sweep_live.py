"""What a sweep says while it runs: a table that redraws on a terminal, a line for each finished run elsewhere.  Both on stderr."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from asyncrl.compare.frontier import curve
from asyncrl.compare.sweep import SYNC, Sweep, label


class Progress:
    """Use as a context; `tell` is the callback of `Sweep.run` and may be called from several threads."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.lock = sweep, threading.Lock()
        self.now: dict[str, str] = {}  # run -> where it is
        self.ends: dict[str, list[float]] = {}  # arm -> last accuracies of its finished runs
        self.gone: dict[str, int] = {}  # arm -> runs given up
        self.began, self.made = time.monotonic(), 0
        self.total = len(sweep.plan.arms) * len(sweep.seeds) + len(sweep.plan.probes)
        self.live: Any = None
        for arm in sweep.plan.arms:
            for seed in sweep.seeds:
                if sweep.cells.path(name := sweep.name(arm, seed)).exists():
                    self._end(arm, sweep.cells.read(name))
        self.before = sum(map(len, self.ends.values())) + sum(sweep.cells.path(f"probe-limit{label(x)}").exists() for x in sweep.plan.probes)

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.live = Live(get_renderable=self.table, console=Console(stderr=True), refresh_per_second=2)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def _end(self, arm: str, record: dict[str, Any]) -> None:
        self.ends.setdefault(arm, []).append(curve(record, 0)[1][-1])
        self.gone[arm] = self.gone.get(arm, 0) + bool(record["abandoned"] or record.get("failed"))

    def tell(self, name: str, event: dict[str, Any]) -> None:
        """`name`: ARM-seedN or probe-limitK."""
        with self.lock:
            arm = name.rpartition("-seed")[0]
            if "done" not in event:
                self.now[name] = f"step {event['step']}: {event['accuracy']:.3f}"
                return
            self.now.pop(name, None)
            self.made += 1
            record = self.sweep.cells.read(name)
            said = "speed probe"
            if arm:
                self._end(arm, record)
                gave = record["abandoned"] or record.get("failed", "")
                said = f"accuracy {self.ends[arm][-1]:.3f}" + (f", given up at step {record['steps']}: {gave}" if gave else "")
            if self.live is None:
                print(f"{name}: {said} ({self.state()})", file=sys.stderr, flush=True)

    def state(self) -> str:
        left = self.total - self.before - self.made
        return f"{self.total - left} of {self.total}, about {(time.monotonic() - self.began) / max(self.made, 1) * left / 60:.0f} min to go"

    def table(self) -> Any:
        from rich.table import Table

        with self.lock:
            p = self.sweep.plan
            table = Table("correction", *(f"{'lag' if p.injected else 'limit'} {label(x)}" for x in p.limits),
                          title=f"{self.sweep.directory.name}: {self.state()}", caption=f"sync: {self.text(SYNC)}")  # fmt: skip
            for n in p.corrections:
                table.add_row(n, *(self.text(p.cell[n, x]) for x in p.limits))
            return table

    def text(self, arm: str) -> str:
        ends = self.ends.get(arm, [])
        done = f"{sum(ends) / len(ends):.3f} ({len(ends)})" + (f" !{self.gone[arm]}" if self.gone[arm] else "") if ends else ""
        running = [x for n, x in self.now.items() if n.rpartition("-seed")[0] == arm]
        return " ".join([*([done] if done else []), *running]) or "-"
