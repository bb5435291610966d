"""The cells of a grid, in warm workers: processes that keep imports and engine between runs.

DIR/cells/NAME.toml is a cell's complete config, which `asyncrl run` accepts too.
DIR/cells/NAME.json is its record, written when the cell finishes, so an interrupted grid continues
cell by cell. A real cell is a run of `asyncrl run` in DIR/runs/NAME.

A worker is `python -m asyncrl.experiments.compare.warm_pool DIR [--abandon]`. It reads names from
stdin, one a line, and writes events to stdout, one JSON object a line.
"""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import importing
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.importing import end_with_parent
from asyncrl.contract.printable import describe_exit
from asyncrl.experiments import process_run
from asyncrl.experiments.compare.verdict import find_collapse
from asyncrl.records import atomic_write, jsonl
from asyncrl.records.jsonl import JsonObject
from asyncrl.supervise.hosts import find_last_words, read_last_lines

# (cell, {"step", "accuracy"} while it runs or {"done": True})
EventCallback = Callable[[str, JsonObject], None]


@dataclass
class CellStore:
    """The cells of one directory. real: those that do not run in warm workers."""

    directory: Path
    configs: dict[str, Config] = field(default_factory=dict)
    real: set[str] = field(default_factory=set)

    def add(self, name: str, config: Config, seed: int, *, real: bool = False) -> None:
        """Add a cell. Raises ConfigError if it exists with other settings."""
        seeded = msgspec.structs.replace(config, seed=seed)
        path = self.get_path(name).with_suffix(".toml")
        if path.exists() and load.load(path) != seeded:
            raise ConfigError(
                f"{path} holds a run with other settings; choose another directory with --out"
            )
        self.configs[name] = seeded
        if real or process_run.needs_own_process(config):
            self.real.add(name)

    def get_path(self, name: str) -> Path:
        return self.directory / "cells" / f"{name}.json"

    def get_run_dir(self, name: str) -> Path:
        return self.directory / "runs" / name

    def read(self, name: str) -> JsonObject:
        path = self.get_path(name)
        with jsonl.name_damaged(f"{path} (delete it, and the run is read or made again)"):
            return dict(json.loads(path.read_bytes()))

    def is_finished(self, name: str) -> bool:
        return self.get_path(name).exists()

    def list_missing(self) -> list[str]:
        return [name for name in self.configs if not self.is_finished(name)]

    def run(
        self,
        workers: int,
        on_event: EventCallback,
        *,
        jobs: int = 0,
        abandon: bool = True,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run the missing cells in the order of `add`, the real ones last.

        jobs: real cells at a time; 0: as many as `workers`. No cell starts once `may_start` returns
        False. Raises AsyncrlError if a run fails; the finished cells are kept.
        """
        if not may_start():
            return
        (self.directory / "cells").mkdir(parents=True, exist_ok=True)
        for name, config in self.configs.items():
            if not self.get_path(name).with_suffix(".toml").exists():
                atomic_write.write(self.get_path(name).with_suffix(".toml"), load.dump(config))
        missing = self.list_missing()
        queue = deque(name for name in missing if name not in self.real)

        def feed(process: Popen[str], log: Path) -> None:
            """Give one worker a cell after the other, until the queue is empty."""
            with process:
                while queue and may_start():
                    try:
                        name = queue.popleft()
                    except IndexError:
                        return
                    if failed := self._run_cell(name, process, log, on_event):
                        queue.clear()
                        raise AsyncrlError(
                            f"run {name}: {failed}; the same command continues from here"
                        )

        # forked by this thread: their end is tied to its own
        started = [self._start_worker(n, abandon) for n in range(min(workers, len(queue)))]
        with ThreadPoolExecutor(workers) as team:
            feeds = [team.submit(feed, *worker) for worker in started]
            try:
                wait(feeds)
            except BaseException:
                queue.clear()
                for process, _ in started:
                    process.kill()
                raise
        for done in feeds:
            done.result()

        def run_real(name: str) -> None:
            """Make a cell's run, or continue it from its last checkpoint, and write its record."""
            if not may_start():
                return
            path, run_dir, config = self.get_path(name), self.get_run_dir(name), self.configs[name]
            log = self.directory / "logs" / f"{name}.log"
            source = str(path.with_suffix(".toml"))
            process_run.complete(run_dir, source, [], config.learner.steps, log)
            atomic_write.write(path, json.dumps(process_run.read_record(run_dir, config)))
            on_event(name, {"done": True})

        with ThreadPoolExecutor(jobs or workers) as team:
            list(team.map(run_real, filter(self.real.__contains__, missing)))

    def _start_worker(self, number: int, abandon: bool) -> tuple[Popen[str], Path]:
        """Start a worker process, which exits with this one; return it and its log."""
        log = self.directory / "logs" / f"worker_{number}.log"
        log.parent.mkdir(exist_ok=True)
        argv = importing.make_command(
            "asyncrl.experiments.compare.warm_pool",
            str(self.directory),
            *(["--abandon"] if abandon else []),
        )
        with log.open("w", encoding="utf-8") as log_file:
            return Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                preexec_fn=end_with_parent(),
            ), log

    @staticmethod
    def _run_cell(name: str, process: Popen[str], log: Path, on_event: EventCallback) -> str:
        """Run a cell in a worker and return its error; empty if it is done."""
        assert process.stdin is not None and process.stdout is not None
        # a worker that has exited reads nothing; its stdout ends below
        with suppress(BrokenPipeError):
            os.write(process.stdin.fileno(), f"{name}\n".encode())
        for line in process.stdout:
            event = json.loads(line)
            if "error" in event:
                return str(event["error"])
            on_event(name, event)
            if "done" in event:
                return ""
        ending = describe_exit(process.wait())
        last_words = find_last_words(read_last_lines(log, 100))
        return f"its process ended ({ending}) {last_words} (log: {log})"


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
            record = serial.run_serial(config, config.seed, watch)
        except AsyncrlError as error:
            send_event(error=str(error))
            continue
        atomic_write.write(path.with_suffix(".json"), json.dumps(record))
        send_event(done=True)


if __name__ == "__main__":
    run_cells(Path(sys.argv[1]), "--abandon" in sys.argv[2:])
