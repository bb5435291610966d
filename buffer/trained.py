"""What was trained, batch by batch: sample ids and lags.  A roll-back takes its batches out again; a resumed run goes on with it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from asyncrl import jsonl
from asyncrl.messages import Batch, Trajectory


@dataclass
class Row:
    """One batch: how many samples, a digest of their ids, trained tokens by lag, tickets in runs [first, last] (none in older files)."""

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
    for t in sorted(set(tickets)):
        if out and t == out[-1][1] + 1:
            out[-1][1] = t
        else:
            out.append([t, t])
    return out


def read(path: Path) -> dict[int, Row]:
    """number -> batch of the surviving history in a `trained.jsonl`; empty when there is none."""
    rows: dict[int, Row] = {}
    for row in jsonl.read(path):
        try:
            _take(rows, row)
        except (KeyError, TypeError, ValueError, AttributeError):
            print(f"note: {path}: a row that is none of a batch is left out: {str(row)[:80]}", file=sys.stderr, flush=True)
    return rows


def _take(rows: dict[int, Row], row: dict[str, Any]) -> None:
    if "from" in row:
        for n in [n for n in rows if n >= row["from"]]:
            del rows[n]
    else:
        lags = {int(k): int(v) for k, v in row["lags"].items()}
        rows[int(row["batch"])] = Row(int(row["samples"]), str(row["ids"]), lags, [list(r) for r in row.get("tickets", ())])


class Trained:
    """The batches of the surviving history, kept in `trained.jsonl`: the last row of a batch counts."""

    def __init__(self, path: Path) -> None:
        self.file = jsonl.Appender(path)
        self.rows = read(path)

    def _write(self, row: dict[str, Any]) -> None:
        _take(self.rows, row)
        self.file.write(row)

    def roll_back(self, number: int) -> None:
        """Batches from `number` on are trained again."""
        if any(n >= number for n in self.rows):
            self._write({"from": number})

    def add(self, batch: Batch, limit: float) -> dict[int, int]:
        """A committed batch; tokens past `limit` were masked.  Returns its trained tokens by lag."""
        counts: dict[int, int] = {}
        for sample in batch.token_lags:
            for start, end, lag in sample:
                if lag <= limit:
                    counts[lag] = counts.get(lag, 0) + end - start
        tickets = runs(s.ticket for s in batch.samples)
        self._write({"batch": batch.number, "samples": len(batch.samples), "ids": digest(batch.samples), "lags": counts, "tickets": tickets})
        return counts

    def lags(self) -> dict[int, int]:
        """Trained tokens by lag, over all batches."""
        out: dict[int, int] = {}
        for row in self.rows.values():
            for lag, n in row.lags.items():
                out[lag] = out.get(lag, 0) + n
        return out

    def ids(self) -> str:
        """One digest of all sample ids in the order in which they were trained."""
        return xxhash.xxh3_64_hexdigest("".join(self.rows[n].ids for n in sorted(self.rows)).encode())

    def close(self) -> None:
        self.file.close()


def mean(counts: dict[int, int]) -> float:
    return sum(k * n for k, n in counts.items()) / max(sum(counts.values()), 1)


def quantile(counts: dict[int, int], q: float) -> int:
    """The smallest key at or below which a share `q` of the counts lies."""
    total, seen = sum(counts.values()), 0
    for k in sorted(counts):
        seen += counts[k]
        if seen >= q * total:
            return k
    return 0
