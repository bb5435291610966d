"""What was trained, batch by batch: sample ids and lags.  A roll-back takes its batches out again;
a resumed run goes on with it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.contract.messages import Batch, Trajectory
from asyncrl.records import jsonl


@dataclass
class TrainedBatch:
    """One batch: how many samples, a digest of their ids, trained tokens by lag, tickets in runs
    [first, last] (none in older files).
    """

    samples: int
    ids: str
    lags: dict[int, int]
    tickets: list[list[int]] = field(default_factory=list)


def digest(samples: Sequence[Trajectory]) -> str:
    """Of the ids of a batch's samples, in their order."""
    return xxhash.xxh3_64_hexdigest(";".join(f"{s.ticket}.{s.sample}" for s in samples).encode())


def runs(tickets: Iterable[int]) -> list[list[int]]:
    """Ascending runs [first, last] without repetition.

    >>> runs([3, 1, 2, 2, 7])
    [[1, 3], [7, 7]]
    """
    out: list[list[int]] = []
    for ticket in sorted(set(tickets)):
        if out and ticket == out[-1][1] + 1:
            out[-1][1] = ticket
        else:
            out.append([ticket, ticket])
    return out


def read(path: Path) -> dict[int, TrainedBatch]:
    """number -> batch of the surviving history in a `trained.jsonl`; empty when there is none."""
    rows: dict[int, TrainedBatch] = {}
    for row in jsonl.read(path):
        try:
            _apply_row(rows, row)
        except (KeyError, TypeError, ValueError, AttributeError):
            print(
                f"note: {path}: a row that is none of a batch is left out: {str(row)[:80]}",
                file=sys.stderr,
                flush=True,
            )
    return rows


def _apply_row(rows: dict[int, TrainedBatch], row: dict[str, Any]) -> None:
    if "from" in row:
        for number in [number for number in rows if number >= row["from"]]:
            del rows[number]
    else:
        lags = {int(lag): int(v) for lag, v in row["lags"].items()}
        rows[int(row["batch"])] = TrainedBatch(
            int(row["samples"]), str(row["ids"]), lags, [list(r) for r in row.get("tickets", ())]
        )


class TrainingLog:
    """The batches of the surviving history, kept in `trained.jsonl`: the last row of a batch
    counts.

    `leased.jsonl` beside it has a row of each that this learner was handed: one whose checkpoint
    lies behind a batch has trained it, also where the commit was not heard, and its row is made up
    for at the hello.  Rows that no learner can take back any more are summed."""

    def __init__(self, path: Path) -> None:
        self.file = jsonl.JsonlAppender(path)
        self.rows = read(path)
        self.summed = 0  # rows below this number are in the sums
        self.summed_samples = 0
        self.summed_lags = Counter[int]()
        self.summed_ids = xxhash.xxh3_64()
        self.lent_file = jsonl.JsonlAppender(path.with_name("leased.jsonl"))
        # handed out, and not in `rows` yet
        self.lent = {
            number: row for number, row in self._read_leases().items() if not self.has_batch(number)
        }

    def _read_leases(self) -> dict[int, dict[str, Any]]:
        """A row that is not whole is as if the batch had not been handed out."""
        found: dict[int, dict[str, Any]] = {}
        for row in jsonl.read(self.lent_file.path):
            try:
                _apply_row({}, row)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            found[int(row["batch"])] = row
        return found

    def _write(self, row: dict[str, Any]) -> None:
        _apply_row(self.rows, row)
        self.file.write(row)

    def has_batch(self, number: int) -> bool:
        return number < self.summed or number in self.rows

    def record_lease(self, batch: Batch, limit: float) -> None:
        """A batch is handed out; tokens past `limit` are masked."""
        row = self.lent[batch.number] = _make_row(batch, limit)
        self.lent_file.write(row)

    def begin_at(self, number: int) -> None:
        """A learner begins at `number`: batches from there on are trained again, those before it
        were trained, whether their commit was heard or not.
        """
        if any(which >= number for which in self.rows):
            self._write({"from": number})
        for which in sorted(self.lent):
            if which < number and not self.has_batch(which):
                self._write(self.lent[which])
        self.lent = {}
        self.lent_file.clear()

    def add(self, batch: Batch, limit: float) -> dict[int, int]:
        """A trained batch; tokens past `limit` were masked.  Returns its trained tokens by lag."""
        lent = batch.number in self.lent
        self._write(self.lent.pop(batch.number) if lent else _make_row(batch, limit))
        return self.rows[batch.number].lags

    def fold_below(self, below: int) -> None:
        """No learner begins below this number any more: these rows are only summed from now on."""
        for number in sorted(number for number in self.rows if number < below):
            row = self.rows.pop(number)
            self.summed_samples += row.samples
            self.summed_lags.update(row.lags)
            self.summed_ids.update(row.ids.encode())
        self.summed = max(self.summed, below)

    def samples(self) -> int:
        """Samples of all batches."""
        return self.summed_samples + sum(r.samples for r in self.rows.values())

    def lags(self) -> dict[int, int]:
        """Trained tokens by lag, over all batches."""
        out = self.summed_lags.copy()
        for row in self.rows.values():
            out.update(row.lags)
        return dict(out)

    def ids(self) -> str:
        """One digest of all sample ids in the order in which they were trained."""
        out = self.summed_ids.copy()
        out.update("".join(self.rows[number].ids for number in sorted(self.rows)).encode())
        return out.hexdigest()

    def close(self) -> None:
        self.file.close()
        self.lent_file.close()


def _make_row(batch: Batch, limit: float) -> dict[str, Any]:
    counts: dict[int, int] = {}
    for sample in batch.token_lags:
        for start, end, lag in sample:
            if lag <= limit:
                counts[lag] = counts.get(lag, 0) + end - start
    tickets = runs(s.ticket for s in batch.samples)
    return {
        "batch": batch.number,
        "samples": len(batch.samples),
        "ids": digest(batch.samples),
        "lags": counts,
        "tickets": tickets,
    }


def mean(counts: dict[int, int]) -> float:
    return sum(lag * tokens for lag, tokens in counts.items()) / max(sum(counts.values()), 1)


def quantile(counts: dict[int, int], share: float) -> int:
    """The smallest key at or below which a share `q` of the counts lies."""
    total = sum(counts.values())
    seen = 0
    for lag in sorted(counts):
        seen += counts[lag]
        if seen >= share * total:
            return lag
    return 0
