"""The log of trained batches: digests of sample ids, and lags.

A rollback removes its batches again; a resumed run continues the log."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from asyncrl.contract.messages import Batch, Trajectory
from asyncrl.records import jsonl
from asyncrl.records.jsonl import JsonObject

TokensByLag = dict[int, int]


class TrainedBatch(msgspec.Struct, frozen=True):
    """A trained batch, as its row in the log."""

    batch: int  # its number
    samples: int  # number of samples
    ids: str  # digest of their ids
    lags: TokensByLag  # lag -> trained tokens
    tickets: list[list[int]] = []  # runs [first, last]; not in older files


def digest(samples: Sequence[Trajectory]) -> str:
    """Digest the ids of a batch's samples, in their order."""
    return xxhash.xxh3_64_hexdigest(";".join(f"{s.ticket}.{s.sample}" for s in samples).encode())


def find_runs(tickets: Iterable[int]) -> list[list[int]]:
    """Find the ascending runs [first, last] of consecutive tickets, without duplicates.

    >>> find_runs([3, 1, 2, 2, 7])
    [[1, 3], [7, 7]]
    """
    runs: list[list[int]] = []
    for ticket in sorted(set(tickets)):
        if runs and ticket == runs[-1][1] + 1:
            runs[-1][1] = ticket
        else:
            runs.append([ticket, ticket])
    return runs


def read(path: Path) -> dict[int, TrainedBatch]:
    """Read {number: batch} of the surviving history; empty if the file does not exist."""
    rows: dict[int, TrainedBatch] = {}
    for row in jsonl.read(path):
        try:
            _apply_row(rows, row)
        except (TypeError, ValueError):
            print(
                f"note: {path}: left out a row that does not describe a batch: {str(row)[:80]}",
                file=sys.stderr,
            )
    return rows


def _apply_row(rows: dict[int, TrainedBatch], row: JsonObject) -> None:
    """Add a row's batch to `rows`, or apply its rollback.

    Raises TypeError or ValueError for a row of another form."""
    if "from" in row:
        for number in [number for number in rows if number >= row["from"]]:
            del rows[number]
    else:
        batch = msgspec.convert(row, TrainedBatch, strict=False)
        rows[batch.batch] = batch


class TrainingLog:
    """The batches of the surviving history, in `trained.jsonl`; the last row of a batch counts.

    `leased.jsonl` beside it has a row for each batch that this learner has received. If a later
    learner resumes from a checkpoint after such a batch, the batch was trained although its commit
    never arrived, and its row is added at the hello.  Rows that a rollback can no longer remove are
    only summed."""

    def __init__(self, path: Path) -> None:
        self.file = jsonl.JsonlAppender(path)
        self.rows = read(path)
        self.summed = 0  # rows of batches below this number are in the sums
        self.summed_samples = 0
        self.summed_lags = Counter[int]()
        self.summed_ids = xxhash.xxh3_64()
        self.lease_file = jsonl.JsonlAppender(path.with_name("leased.jsonl"))
        # batches that the learner has received and that are not in `rows` yet
        leases = read(self.lease_file.path)
        self.leases = {number: row for number, row in leases.items() if not self.has_batch(number)}

    def _write(self, row: TrainedBatch) -> None:
        self.rows[row.batch] = row
        self.file.write(msgspec.to_builtins(row))

    def has_batch(self, number: int) -> bool:
        """Whether the log has batch `number`."""
        return number < self.summed or number in self.rows

    def record_lease(self, batch: Batch, limit: float) -> None:
        """Record a batch that is sent to the learner; tokens of a lag past `limit` are masked."""
        row = self.leases[batch.number] = _make_row(batch, limit)
        self.lease_file.write(msgspec.to_builtins(row))

    def begin_at(self, number: int) -> None:
        """Follow a learner that begins at batch `number`.

        Batches from there on will be trained again. Batches before it were trained, even if their
        commits never arrived."""
        if any(batch >= number for batch in self.rows):
            _apply_row(self.rows, {"from": number})
            self.file.write({"from": number})
        for batch in sorted(self.leases):
            if batch < number and not self.has_batch(batch):
                self._write(self.leases[batch])
        self.leases = {}
        self.lease_file.clear()

    def add(self, batch: Batch, limit: float) -> TokensByLag:
        """Add a trained batch, with tokens of a lag past `limit` masked; return {lag: tokens}."""
        leased = self.leases.pop(batch.number, None)
        self._write(leased or _make_row(batch, limit))
        return self.rows[batch.number].lags

    def fold_below(self, below: int) -> None:
        """Move the rows below this number, to which no learner can roll back, into the sums."""
        for number in sorted(number for number in self.rows if number < below):
            row = self.rows.pop(number)
            self.summed_samples += row.samples
            self.summed_lags.update(row.lags)
            self.summed_ids.update(row.ids.encode())
        self.summed = max(self.summed, below)

    def summarize(self) -> tuple[int, TokensByLag, str]:
        """Return what was trained: the samples, the tokens by lag, and a digest of the sample ids.

        The ids are digested in the order in which they were trained."""
        samples, lags, ids = self.summed_samples, self.summed_lags.copy(), self.summed_ids.copy()
        for _, row in sorted(self.rows.items()):
            samples += row.samples
            lags.update(row.lags)
            ids.update(row.ids.encode())
        return samples, dict(lags), ids.hexdigest()

    def close(self) -> None:
        """Close both files."""
        self.file.close()
        self.lease_file.close()


def count_trained_lags(batch: Batch, limit: float) -> TokensByLag:
    """Count the tokens of a batch by lag, without those past `limit`."""
    counts: TokensByLag = {}
    for runs in batch.token_lags:
        for start, end, lag in runs:
            if lag <= limit:
                counts[lag] = counts.get(lag, 0) + end - start
    return counts


def _make_row(batch: Batch, limit: float) -> TrainedBatch:
    return TrainedBatch(
        batch.number,
        len(batch.samples),
        digest(batch.samples),
        count_trained_lags(batch, limit),
        find_runs(sample.ticket for sample in batch.samples),
    )


def describe_lags(counts: TokensByLag) -> JsonObject:
    """Return the tokens of a summary, their lag, and its histogram."""
    return {
        "tokens": sum(counts.values()),
        "lag": {"mean": mean(counts), "p95": quantile(counts, 0.95), "max": max(counts, default=0)},
        "lag_histogram": {str(lag): tokens for lag, tokens in sorted(counts.items())},
    }


def mean(counts: TokensByLag) -> float:
    """Return the mean lag of {lag: tokens}; 0 if it is empty."""
    return sum(lag * tokens for lag, tokens in counts.items()) / max(sum(counts.values()), 1)


def quantile(counts: TokensByLag, share: float) -> int:
    """Return the smallest lag with at least a share `share` of the tokens at or below it."""
    total = sum(counts.values())
    cumulative = 0
    for lag in sorted(counts):
        cumulative += counts[lag]
        if cumulative >= share * total:
            return lag
    return 0
