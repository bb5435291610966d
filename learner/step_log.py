"""RUN/optimizer_steps.jsonl: one row an optimizer step, in the order in which they were made."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.records import atomic_write, jsonl

NAME = "optimizer_steps.jsonl"


class StepLog:
    """Appends the optimizer steps of each batch before its commit leaves, so that a committed
    batch has all its rows.

    Raises AsyncrlError when the file cannot be written."""

    def __init__(self, run_dir: Path, number: int) -> None:
        """Keep the rows of batches below `number`, the next one: a resumed learner trains the
        others again.  The file is always a new one, as a learner that this one replaces may
        still have the old one open."""
        path = run_dir / NAME
        kept = [row for row in jsonl.read(path) if row.get("step", number) < number]
        try:
            atomic_write.write(path, "".join(json.dumps(row) + "\n" for row in kept), sync=True)
        except OSError as error:
            raise jsonl.full(path, error) from error
        self.file = jsonl.Appender(path)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self.file.write(row)

    def sync(self) -> None:
        """Rows so far survive a power cut: a checkpoint after them counts on it."""
        os.fsync(self.file.fd)

    def close(self) -> None:
        self.file.close()
