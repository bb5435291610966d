"""A worker of warm_pool.py.

Start it with `python -m asyncrl.experiments.compare.warm_worker DIR [--abandon]`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.importing import pause_collection
from asyncrl.experiments import process_run
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.one_process import needs_own_process
from asyncrl.records import atomic_write


def main(directory: Path, abandon: bool) -> None:
    """Run cells by name until stdin ends, in this process or as processes of a run."""
    with pause_collection():
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
            return verdict.find_collapse(rewards, verdict.StabilityBounds()) if abandon else ""

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
    main(Path(sys.argv[1]), "--abandon" in sys.argv[2:])
