"""The ledger, in which every generated token ends in exactly one line.

Also compact tables of the samples and attempts of removed groups, for late copies of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple, get_args

import numpy as np

from asyncrl.contract.messages import (
    DISPOSITIONS,
    Disposition,
    IntPair,
    LedgerLine,
    LedgerTotals,
    Numbers,
)


@dataclass
class LedgerSums:
    """Sums over the samples of one ledger line, from which its means follow."""

    tokens: int = 0
    samples: int = 0
    length_sum: float = 0.0
    reward_sum: float = 0.0
    # tokens by length of their sample: upper bound 1, 2, 4, 8, ... -> tokens
    by_length: dict[int, int] = field(default_factory=dict)
    # the same for the weight that `downweight` removed: tokens times (1 - weight)
    faded: dict[int, float] = field(default_factory=dict)

    def add(
        self,
        tokens: int,
        samples: int = 0,
        length: float = 0.0,
        reward: float = 0.0,
        faded: float = 0.0,
    ) -> None:
        """Add `tokens` of `samples` samples with these sums of length and reward."""
        if samples and tokens:
            upto = 1 << max(0, int(length) - 1).bit_length()
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
            if faded:
                self.faded[upto] = self.faded.get(upto, 0.0) + faded
        self.tokens += tokens
        self.samples += samples
        self.length_sum += length
        self.reward_sum += reward

    def add_whole(self, tokens: int, reward: float) -> None:
        """Add a sample with all its tokens; faster than `add`, for hundreds of samples a batch."""
        if tokens:
            upto = 1 << (tokens - 1).bit_length()
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
        self.tokens += tokens
        self.samples += 1
        self.length_sum += tokens
        self.reward_sum += reward

    def merge(self, other: LedgerSums) -> None:
        """Add the sums of `other`."""
        self.tokens += other.tokens
        self.samples += other.samples
        self.length_sum += other.length_sum
        self.reward_sum += other.reward_sum
        for upto, tokens in other.by_length.items():
            self.by_length[upto] = self.by_length.get(upto, 0) + tokens
        for upto, faded in other.faded.items():
            self.faded[upto] = self.faded.get(upto, 0.0) + faded

    def as_dict(self) -> Numbers:
        """Return the totals and means as in checkpoints, status messages and the summary."""
        samples = max(self.samples, 1)
        means = {
            "tokens": self.tokens,
            "samples": self.samples,
            "mean_length": self.length_sum / samples,
            "mean_reward": self.reward_sum / samples,
        }
        return (
            means
            | {f"upto_{k}": v for k, v in sorted(self.by_length.items())}
            | {f"faded_upto_{k}": v for k, v in sorted(self.faded.items())}
        )


@dataclass
class Ledger:
    """Totals of final dispositions. `Store.ledger` adds those that may still change."""

    lines: dict[str, LedgerSums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Add lines that a snapshot of an older version lacks."""
        self.lines = {name: self.lines.get(name) or LedgerSums() for name in DISPOSITIONS}

    def copy(self) -> Ledger:
        """Return an independent copy."""
        ledger = Ledger()
        ledger.merge(self)
        return ledger

    def add(
        self,
        line: LedgerLine,
        tokens: int,
        samples: int = 0,
        length: float = 0.0,
        reward: float = 0.0,
        faded: float = 0.0,
    ) -> None:
        """Add to one line; see `LedgerSums.add`."""
        self.lines[line].add(tokens, samples, length, reward, faded)

    def merge(self, other: Ledger) -> None:
        """Add the lines of `other`."""
        for name, line in other.lines.items():
            self.lines[name].merge(line)

    def compute_totals(self) -> LedgerTotals:
        """Compute the totals and means of each line, by its name."""
        return {name: line.as_dict() for name, line in self.lines.items()}

    @classmethod
    def restore(cls, totals: LedgerTotals) -> Ledger:
        """Make a ledger from the `totals` of a checkpoint (`memory` durability).

        Raises KeyError, ValueError or OverflowError if they are not those of a ledger."""
        ledger = cls()
        for name, line in totals.items():
            samples = line["samples"]
            ledger.lines[name] = LedgerSums(
                int(line["tokens"]),
                int(samples),
                line["mean_length"] * samples,
                line["mean_reward"] * samples,
                {k: int(x) for k, x in read_bins(line, "upto_").items()},
                read_bins(line, "faded_upto_"),
            )
        return ledger


def read_bins(line: Numbers, prefix: str) -> dict[int, float]:
    """Read {upper bound of the samples' length: value} from one line of `compute_totals`.

    >>> read_bins({"tokens": 9, "upto_8": 6, "upto_16": 3, "faded_upto_16": 1.5}, "upto_")
    {8: 6, 16: 3}
    """
    return {int(k.removeprefix(prefix)): x for k, x in line.items() if k.startswith(prefix)}


def sum_tokens(totals: LedgerTotals, names: Iterable[str] = DISPOSITIONS) -> int:
    """Sum the tokens of the lines `names` of `compute_totals`."""
    return sum(int(totals[name]["tokens"]) for name in names if name in totals)


# ---- samples and attempts of removed groups ------------------------------------------------------

ROWS = 4096  # dropped rows whose memory is freed at once
CODES: tuple[Disposition, ...] = (*DISPOSITIONS, *get_args(get_args(Disposition)[1]))
Key = tuple[int, int, int]  # ticket, sample, attempt
CODE_OF: dict[str, int] = {disposition: code for code, disposition in enumerate(CODES)}


class RowTable:
    """Rows of integers in order of arrival, found by their first number, a ticket.

    A row needs only the bytes of its numbers; a dictionary's entry would need ten times as much.

    form: struct format of the other numbers."""

    def __init__(self, form: str) -> None:
        self.form = Struct(form)
        self.tickets = array("q")  # the first number of each row
        self.packed = bytearray()  # the other numbers
        self.first = 0  # rows before it are dropped

    def __len__(self) -> int:
        return len(self.tickets) - self.first

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self[position] for position in range(self.first, len(self.tickets)))

    def __getitem__(self, position: int) -> tuple[int, ...]:
        others = self.form.unpack_from(self.packed, position * self.form.size)
        return self.tickets[position], *others

    def __setitem__(self, position: int, row: tuple[int, ...]) -> None:
        self.form.pack_into(self.packed, position * self.form.size, *row[1:])

    def append(self, row: tuple[int, ...]) -> None:
        """Append a row as the newest one."""
        self.tickets.append(row[0])
        self.packed += self.form.pack(*row[1:])

    def drop(self) -> None:
        """Drop the oldest row."""
        self.first += 1
        if self.first == ROWS:
            del self.tickets[: self.first], self.packed[: self.first * self.form.size]
            self.first = 0

    def find(self, ticket: int) -> list[int]:
        """Find the positions of a ticket's rows, the newest first."""
        found = np.flatnonzero(np.frombuffer(self.tickets, np.int64)[self.first :] == ticket)
        return [self.first + position for position in found[::-1].tolist()]


class SampleRun(NamedTuple):
    """Consecutive samples of a group with the same attempt and the same disposition."""

    ticket: int
    attempt: int
    first: int
    size: int
    code: int  # of their disposition, an index of CODES

    def iterate_keys(self) -> Iterator[Key]:
        """Yield the (ticket, sample, attempt) of each sample."""
        for sample in range(self.first, self.first + self.size):
            yield self.ticket, sample, self.attempt


class KeyedRows(ABC):
    """A table with keys and values, equal to one with the same items in the same order."""

    @abstractmethod
    def items(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over (key, value), the oldest first."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and list(self.items()) == list(other.items())

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.items())


class SampleFates(KeyedRows):
    """(ticket, sample, attempt) -> disposition, of the last `limit` samples.

    >>> gone = SampleFates(3)
    >>> gone.add_all(7, {(0, 9): "accepted", (1, 9): "accepted", (1, 8): "duplicate"})
    >>> gone.get((7, 1, 9)), gone.get((7, 1, 8)), gone.get((7, 2, 9)), len(gone.rows)
    ('accepted', 'duplicate', None, 3)
    >>> gone.add((8, 0, 10), "filtered"); list(gone)
    [(7, 1, 8), (7, 1, 9), (8, 0, 10)]
    """

    def __init__(self, limit: int, items: Iterable[tuple[Key, Disposition]] = ()) -> None:
        self.limit = limit
        self.samples = 0
        self.rows = RowTable("=qiib")
        finals: dict[IntPair, Disposition] = {}
        previous = -1, -1, -1
        for key, disposition in items:
            ticket, sample, attempt = key
            if ticket != previous[0] or key <= previous:
                self.add_all(previous[0], finals)
                finals = {}
            finals[sample, attempt] = disposition
            previous = key
        self.add_all(previous[0], finals)

    def items(self) -> Iterator[tuple[Key, Disposition]]:
        """Iterate over ((ticket, sample, attempt), disposition), the oldest first."""
        for row in self.rows:
            run = SampleRun(*row)
            for key in run.iterate_keys():
                yield key, CODES[run.code]

    def get(self, key: Key) -> Disposition | None:
        """Return the newest disposition of this sample, or None."""
        for position in self.rows.find(key[0]):
            run = SampleRun(*self.rows[position])
            if key in run.iterate_keys():
                return CODES[run.code]
        return None

    def add(self, key: Key, disposition: Disposition) -> None:
        """Add one sample as the newest."""
        ticket, sample, attempt = key
        self.add_all(ticket, {(sample, attempt): disposition})

    def add_all(self, ticket: int, finals: Mapping[IntPair, Disposition]) -> None:
        """Add samples of one ticket, as (sample, attempt) -> disposition."""
        run_attempt = -1
        run_disposition = ""
        first = end = 0
        for (sample, attempt), disposition in sorted(finals.items()):
            if sample != end or attempt != run_attempt or disposition != run_disposition:
                self._append(ticket, run_attempt, first, end, run_disposition)
                run_attempt = attempt
                run_disposition = disposition
                first = sample
            end = sample + 1
        self._append(ticket, run_attempt, first, end, run_disposition)
        while self.samples > self.limit:
            self._forget(self.samples - self.limit)

    def _append(self, ticket: int, attempt: int, first: int, end: int, disposition: str) -> None:
        if disposition:
            size = end - first
            code = CODE_OF[disposition]
            self.rows.append((ticket, attempt, first, size, code))
            self.samples += size

    def _forget(self, count: int) -> None:
        """Forget at most `count` of the oldest samples, all from the oldest row."""
        oldest = self.rows.first
        run = SampleRun(*self.rows[oldest])
        if run.size > count:
            self.rows[oldest] = run._replace(first=run.first + count, size=run.size - count)
            self.samples -= count
        else:
            self.rows.drop()
            self.samples -= run.size


class StrayAttempt(NamedTuple):
    """An attempt of a removed group, with the tokens that were reported and delivered for it."""

    ticket: int
    attempt: int
    reported: int
    delivered: int


class StrayAttempts(KeyedRows):
    """(ticket, attempt) -> StrayAttempt, of the last `limit` attempts.

    >>> strays = StrayAttempts(2)
    >>> for ticket in (4, 5, 6): strays.add(StrayAttempt(ticket, 10 + ticket, 8, 3))
    >>> strays.get(4, 14), strays.get(6, 16)
    (None, StrayAttempt(ticket=6, attempt=16, reported=8, delivered=3))
    """

    def __init__(self, limit: int, items: Iterable[tuple[IntPair, Iterable[int]]] = ()) -> None:
        self.limit = limit
        self.rows = RowTable("=qqq")
        for key, counts in items:
            self.add(StrayAttempt(*key, *counts))

    def items(self) -> Iterator[tuple[IntPair, list[int]]]:
        """Iterate over ((ticket, attempt), [reported, delivered]), the oldest first."""
        for row in self.rows:
            stray = StrayAttempt(*row)
            key = stray.ticket, stray.attempt
            yield key, [stray.reported, stray.delivered]

    def add(self, stray: StrayAttempt) -> None:
        """Add an attempt as the newest; drop the oldest beyond `limit`."""
        self.rows.append(stray)
        while len(self.rows) > self.limit:
            self.rows.drop()

    def get(self, ticket: int, attempt: int) -> StrayAttempt | None:
        """Return this attempt, or None."""
        for position in self.rows.find(ticket):
            stray = StrayAttempt(*self.rows[position])
            if stray.attempt == attempt:
                return stray
        return None

    def update(self, stray: StrayAttempt) -> None:
        """Replace the counts of an attempt that `get` has returned."""
        for position in self.rows.find(stray.ticket):
            if self.rows[position][1] == stray.attempt:
                self.rows[position] = stray
                return
