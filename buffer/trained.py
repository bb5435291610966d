"""What was trained, batch by batch: sample ids and lags.  A roll-back takes its batches out again; a resumed run goes on with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.messages import Batch


@dataclass
class Row:
    """One batch: how many samples, a digest of their ids, trained tokens by lag."""

    samples: int
    ids: str
    lags: dict[int, int]


class Trained:
    """The batches of the surviving history, kept in `trained.jsonl`: the last row of a batch counts."""

    def __init__(self, path: Path) -> None:
        self.rows: dict[int, Row] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    self._take(json.loads(line))
        self.file = path.open("a", buffering=1)

    def _take(self, row: dict[str, object]) -> None:
        if "from" in row:
            self.rows = {n: r for n, r in self.rows.items() if n < int(str(row["from"]))}
        else:
            lags = {int(k): int(v) for k, v in dict(row["lags"]).items()}  # type: ignore[call-overload]
            self.rows[int(str(row["batch"]))] = Row(int(str(row["samples"])), str(row["ids"]), lags)

    def _write(self, row: dict[str, object]) -> None:
        self._take(row)
        self.file.write(json.dumps(row) + "\n")

    def roll_back(self, number: int) -> None:
        """Batches from `number` on are trained again."""
        if any(n >= number for n in self.rows):
            self._write({"from": number})

    def add(self, batch: Batch, limit: float) -> dict[int, int]:
        """A committed batch; tokens past `limit` were masked.  Returns its trained tokens by lag."""
        counts: dict[int, int] = {}
        for runs in batch.token_lags:
            for start, end, lag in runs:
                if lag <= limit:
                    counts[lag] = counts.get(lag, 0) + end - start
        ids = xxhash.xxh3_64_hexdigest(";".join(f"{s.ticket}.{s.sample}" for s in batch.samples).encode())
        self._write({"batch": batch.number, "samples": len(batch.samples), "ids": ids, "lags": counts})
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
