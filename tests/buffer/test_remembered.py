"""What the buffer remembers of groups that are gone is packed, and no less than a dictionary."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer import ledger
from buffer.ledger import SampleFates, StrayAttempt, StrayAttempts

WHATS = ("accepted", "trained", "duplicate", "failed", "evaluated")
SMALL = st.integers(0, 6)


@given(
    st.lists(
        st.tuples(
            SMALL, st.dictionaries(st.tuples(SMALL, SMALL), st.sampled_from(WHATS), max_size=6)
        ),
        max_size=40,
    ),
    st.integers(1, 30),
)
def test_gone_samples_are_what_the_last_of_them_became(
    groups: list[tuple[int, dict[tuple[int, int], Any]]], limit: int
) -> None:
    """Of the last `limit` that were added, in their order, by group in that of samples."""
    added = [
        ((ticket, sample, attempt), what)
        for ticket, finals in groups
        for (sample, attempt), what in sorted(finals.items())
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "ROWS", 4)
        gone = SampleFates(limit)
        for ticket, finals in groups:
            gone.add_all(ticket, finals)
        kept = added[-limit:]
        assert list(gone.items()) == kept and list(gone) == [key for key, _ in kept]
        assert gone.samples == len(kept)
        again = SampleFates(limit, gone.items())
        assert again == gone and (len(kept) < 2 or SampleFates(limit, kept[1:]) != gone)
    for ticket in range(8):
        for sample in range(8):
            for attempt in range(8):
                key = ticket, sample, attempt
                assert gone.get(key) == dict(kept).get(key) == again.get(key)


@given(st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL), max_size=40), st.integers(1, 30))
def test_stray_attempts_are_the_last_of_them(
    rows: list[tuple[int, int, int, int]], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "ROWS", 4)
        strays = StrayAttempts(limit)
        for row in rows:
            strays.add(StrayAttempt(*row))
    model = {row[:2]: row for row in rows[-limit:]}
    assert list(strays) == [row[:2] for row in rows[-limit:]]
    assert list(strays.items()) == [(row[:2], list(row[2:])) for row in rows[-limit:]]
    assert StrayAttempts(limit, strays.items()) == strays
    for ticket in range(8):
        for attempt in range(8):
            known = model.get((ticket, attempt))
            assert strays.get(ticket, attempt) == known
            other = StrayAttempt(ticket, attempt, 70, 60)
            strays.update(other)
            assert strays.get(ticket, attempt) == (None if known is None else other)


def test_a_group_that_one_attempt_wrote_takes_one_row() -> None:
    gone = SampleFates(100)
    gone.add_all(5, {(s, 12): "trained" for s in (2, 0, 1, 3)})
    assert list(gone.rows) == [(5, 12, 0, 4, ledger.CODE_OF["trained"])]
    gone.add_all(6, {(0, 13): "trained", (1, 14): "trained", (1, 13): "failed", (3, 14): "trained"})
    assert len(gone.rows) == 5
    assert len(SampleFates(100, gone.items()).rows) == 5


def test_a_sample_takes_a_few_bytes() -> None:
    """A group of 4 in a dictionary took about 900 bytes."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        gone, strays = SampleFates(200_000), StrayAttempts(20_000)
        for ticket in range(4000):
            gone.add_all(ticket, {(s, ticket + 9): "trained" for s in range(4)})
            strays.add(StrayAttempt(ticket, ticket + 9, 50, 50))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 4000 < 100
    assert gone.get((3999, 3, 4008)) == "trained" and strays.get(17, 26) == (17, 26, 50, 50)
    model: OrderedDict[Any, Any] = OrderedDict(gone.items())
    assert len(model) == 16_000


def test_a_row_is_forgotten_sample_by_sample() -> None:
    gone = SampleFates(3)
    gone.add_all(4, {(s, 8): "trained" for s in range(2, 5)})
    gone.add((9, 0, 10), "filtered")
    assert list(gone) == [(4, 3, 8), (4, 4, 8), (9, 0, 10)]
    assert [gone.get((4, s, 8)) for s in range(6)] == [None] * 3 + ["trained"] * 2 + [None]
    gone.add_all(11, {(s, 12): "failed" for s in range(3)})
    assert list(gone) == [(11, 0, 12), (11, 1, 12), (11, 2, 12)] and gone.samples == 3


def test_a_sample_told_twice_comes_back_twice() -> None:
    twice: list[Any] = [((5, 1, 6), "failed"), ((5, 1, 6), "duplicate"), ((5, 0, 6), "failed")]
    gone = SampleFates(9, twice)
    assert list(gone.items()) == twice and gone.samples == 3
    assert gone.get((5, 1, 6)) == "duplicate"
