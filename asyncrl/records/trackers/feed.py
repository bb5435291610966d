"""Read metrics.jsonl as it grows and send its rows to one tracker: a program.

    python -m asyncrl.records.trackers.feed RUN_DIR NAME

It ends when its stdin closes: then it sends the rest, and takes END_S seconds at most.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.contract.toml_writer import flatten
from asyncrl.records import atomic_write
from asyncrl.records.trackers.adapters import TRACKERS, Tracker

POLL_S = 1.0
END_S = 60  # for the rest of the rows and the tracker's own end


def new_rows(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole row from `offset` on, with the offset behind it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                row = json.loads(line)
                yield {"step": int(row["step"]), **row}, offset
            except (ValueError, KeyError, TypeError):
                continue  # a damaged row


def send(tracker: Tracker, path: Path, offset: int) -> int:
    """Send the rows from `offset` on; returns the offset behind them."""
    for row, behind in new_rows(path, offset):
        numbers = {
            name: float(value)
            for name, value in row.items()
            if name not in ("step", "t") and isinstance(value, int | float)
        }
        tracker.log(row["step"], numbers | {"time/run": float(row.get("t", 0.0))})
        offset = behind
    return offset


def end_at_once(*_: Any) -> None:
    """End this process and those that the tracker started."""
    print(f"the tracker did not end within {END_S} s", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


def main(run_dir: Path, name: str) -> None:
    state = run_dir / "trackers" / f"{name}.json"
    state.parent.mkdir(exist_ok=True)
    signal.signal(signal.SIGALRM, end_at_once)
    with (state.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier buffer's may still send its rest
        known = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
        with (run_dir / "config.toml").open("rb") as file:
            settings = flatten(tomllib.load(file))
        tracker = TRACKERS[name](run_dir, settings, known.get("id", ""))
        offset, ended = known.get("offset", 0), False
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])
            if ended:
                signal.alarm(END_S)
            behind = send(tracker, run_dir / "metrics.jsonl", offset)
            if behind != offset:
                offset = behind
                atomic_write.write(state, json.dumps({"id": tracker.id, "offset": offset}))
        tracker.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
