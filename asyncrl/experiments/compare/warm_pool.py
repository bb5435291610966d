"""Warm workers: processes that keep imports and engine loaded from run to run.

DIR/cells/NAME.toml is a cell's complete config, which `asyncrl run` accepts too.
DIR/cells/NAME.json is its record, written when the cell finishes, so an interrupted grid continues
cell by cell.

A worker is `python -m asyncrl.experiments.compare.warm_pool DIR [--abandon]`. It reads names from
stdin, one a line, and writes events to stdout, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.parent import end_with_parent
from asyncrl.contract.printable import describe_exit
from asyncrl.experiments import process_run
from asyncrl.experiments.compare.verdict import find_collapse
from asyncrl.experiments.one_process import needs_own_process
from asyncrl.records import atomic_write

# (cell, {"step", "accuracy"} while it runs or {"done": True})
EventCallback = Callable[[str, dict[str, Any]], None]


@dataclass
class CellStore:
    """The cells of one directory.

    Raises ConfigError if one exists with other settings.
    """

    directory: Path
    configs: dict[str, Config] = field(default_factory=dict)

    def add(self, name: str, config: Config, seed: int) -> None:
        seeded = msgspec.structs.replace(config, seed=seed)
        path = self.get_path(name).with_suffix(".toml")
        if path.exists() and load.load(path) != seeded:
            raise ConfigError(
                f"{path} holds a run with other settings; choose another directory with --out"
            )
        self.configs[name] = seeded

    def get_path(self, name: str) -> Path:
        return self.directory / "cells" / f"{name}.json"

    def read(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.get_path(name).read_bytes()))

    def list_missing(self) -> list[str]:
        return [n for n in self.configs if not self.get_path(n).exists()]

    def run(
        self,
        workers: int,
        on_event: EventCallback,
        *,
        abandon: bool = True,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run the missing cells in the order of `add`.

        No cell starts once `may_start` returns False. Raises AsyncrlError if a run fails; the
        finished cells are kept.
        """
        if not may_start():
            return
        (self.directory / "cells").mkdir(parents=True, exist_ok=True)
        for name, config in self.configs.items():
            if not self.get_path(name).with_suffix(".toml").exists():
                atomic_write.write(self.get_path(name).with_suffix(".toml"), load.dump(config))
        queue = deque(self.list_missing())
        team = [
            WarmWorker(self.directory, n, queue, on_event, abandon, may_start=may_start)
            for n in range(min(workers, len(queue)))
        ]
        try:
            for worker in team:
                worker.thread.start()
            for worker in team:
                while worker.thread.is_alive():
                    worker.thread.join(
                        0.2
                    )  # only a wait with a timeout can be interrupted by Ctrl-C
        except BaseException:
            queue.clear()
            for worker in team:
                worker.process.kill()
            raise
        if failed := [worker.failed for worker in team if worker.failed]:
            raise AsyncrlError(f"{failed[0]}; the same command continues from here")


class WarmWorker:
    """One worker process and the thread that feeds it.

    The process exits with this one.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        queue: deque[str],
        on_event: EventCallback,
        abandon: bool,
        *,
        may_start: Callable[[], bool],
    ) -> None:
        self.queue = queue
        self.may_start = may_start
        self.on_event = on_event
        self.failed = ""
        self.log = directory / "logs" / f"worker_{number}.log"
        self.log.parent.mkdir(exist_ok=True)
        argv = importing.make_command(
            "asyncrl.experiments.compare.warm_pool",
            str(directory),
            *(["--abandon"] if abandon else []),
        )
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                preexec_fn=end_with_parent(),
            )
        self.thread = threading.Thread(target=self._feed, daemon=True)

    def _feed(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        while self.queue and not self.failed and self.may_start():
            try:
                name = self.queue.popleft()
            except IndexError:
                break
            try:
                self.process.stdin.write(name + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass  # the worker has exited; its stdout ends below
            is_done = False
            while not is_done and not self.failed:
                line = self.process.stdout.readline()
                if not line:
                    last_lines = [
                        x for x in self.log.read_text(encoding="utf-8").splitlines() if x.strip()
                    ][-1:]
                    self.failed = (
                        f"run {name}: its process ended ({describe_exit(self.process.wait())}) "
                        f"{' '.join(last_lines)} (log: {self.log})"
                    )
                    break
                event = json.loads(line)
                self.failed = f"run {name}: {event['error']}" if "error" in event else ""
                is_done = "done" in event
                if not self.failed:
                    self.on_event(name, event)
        if self.failed:
            self.queue.clear()
        self.process.stdin.close()
        self.process.wait()


def run_cells(directory: Path, abandon: bool) -> None:
    """Run cells by name until stdin ends, in this process or as processes of a run."""
    with importing.pause_collection():
        from asyncrl.experiments import serial

    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries and reward functions print to the log

    def send_event(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    for line in sys.stdin:
        path = directory / "cells" / f"{line.strip()}.toml"
        config = load.load(path)

        def watch(steps: list[float], rewards: list[float]) -> str:
            send_event(step=int(steps[-1]), accuracy=rewards[-1])
            return find_collapse(rewards) if abandon else ""

        try:
            if needs_own_process(config):
                run_dir = directory / "runs" / path.stem
                log = directory / "logs" / f"{path.stem}.log"
                process_run.complete(run_dir, str(path), [], config.learner.steps, log)
                record = process_run.read_record(run_dir, config)
            else:
                record = serial.run_serial(config, config.seed, watch)
        except AsyncrlError as error:
            send_event(error=str(error))
            continue
        atomic_write.write(path.with_suffix(".json"), json.dumps(record))
        send_event(done=True)


if __name__ == "__main__":
    run_cells(Path(sys.argv[1]), "--abandon" in sys.argv[2:])
