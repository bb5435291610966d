"""A bounded log of the run directory whose rows belong to batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.records import jsonl

MIB = 2**20


class BatchLog:
    """An append-only file of JSON lines, at most `limit_mib` large.

    A batch's rows are written before its commit is sent, so that a committed batch has all of them.
    """

    def __init__(
        self, path: Path, number: int, *, batch_key: str, limit_mib: int, limit_name: str
    ) -> None:
        """Keep the rows of batches below `number`, the next one; later batches train again.

        The file is always a new one, because a replaced learner may still have the old one open.
        Raises AsyncrlError when the file cannot be written.

        Args:
            batch_key: the key of a row that holds the number of its batch.
            limit_name: config key of the limit, for the message when it is reached.
        """
        self.path = path
        self.limit_mib, self.limit_name = limit_mib, limit_name
        self.full = False
        rows = [row for row in jsonl.read(path) if row.get(batch_key, number) < number]
        lines = jsonl.encode(rows)
        self.file = jsonl.JsonlAppender(path)
        self.file.replace(lines, sync=True)
        self.written = len(lines)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append `rows` until the file has reached its bound, which is reported once."""
        for row in rows:
            row_bytes = len(json.dumps(row)) + 1
            if not self.full and self.written + row_bytes > self.limit_mib * MIB:
                self.full = True
                print(
                    f"learner: {self.path} has reached {self.limit_name} = {self.limit_mib}: later "
                    "rows are not logged",
                    file=sys.stderr,
                )
            if self.full:
                return
            self.file.write(row)
            self.written += row_bytes

    def sync(self) -> None:
        """Make the rows so far survive a power cut, which a later checkpoint relies on."""
        self.file.sync()

    def close(self) -> None:
        self.file.close()
