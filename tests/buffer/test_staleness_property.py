"""The staleness bound and the ledger over random schedules of the real store and admission; each
condition is needed."""

import multiprocessing
import os
from collections import Counter

import pytest
from schedules import Broken, World

from asyncrl.contract.errors import ProtocolError

pytestmark = pytest.mark.slow

SCHEDULES = 1_000
CHUNK = 250


def chunk(first: int) -> Counter[str]:
    """Runs CHUNK schedules; returns tokens by ledger line, summed, and how often the limit was
    reached."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        world = World(seed)
        try:
            world.run()
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        seen.update({line: int(x["tokens"]) for line, x in world.store.sum_ledger().items()})
        seen["at the limit"] += world.at_limit
    return seen


def test_no_token_past_the_limit_no_deadlock_and_a_ledger_that_sums() -> None:
    with multiprocessing.get_context("fork").Pool(min(2, os.cpu_count() or 1)) as pool:
        seen = sum(pool.imap_unordered(chunk, range(0, SCHEDULES, CHUNK)), Counter())
    # the schedules do what they are for: each fault leaves its line, and the bound is tight
    for line in (
        "trained",
        "filtered",
        "duplicate",
        "orphaned",
        "lost_with_process",
        "at the limit",
    ):
        assert seen[line] > 300, seen


@pytest.mark.parametrize("on_exceed", ["drop", "mask", "downweight"])
def test_completion_order_keeps_its_own_promise_and_the_ledger(on_exceed: str) -> None:
    for seed in range(80):
        World(seed, on_exceed=on_exceed).run()


@pytest.mark.parametrize("on_exceed", ["drop", "mask", "downweight"])
def test_freshest_first_keeps_the_same_promise(on_exceed: str) -> None:
    for seed in range(60):
        World(seed, on_exceed=on_exceed, order="freshest").run()


def test_free_running_ends_and_sums() -> None:
    for seed in range(60):
        World(seed, limits=(float("inf"),), order="freshest" if seed % 3 == 0 else "auto").run()


ORDERS = [
    {"on_exceed": "pace", "order": "auto"},
    {"on_exceed": "drop"},
    {"on_exceed": "mask"},
    {"on_exceed": "mask", "order": "freshest"},
]


def test_a_run_resumed_at_another_limit_or_order_keeps_the_bound_and_never_stands_still() -> None:
    """What another order, or no limit, has composed stays composed, and comes first: places count
    it."""
    for seed in range(100):
        try:
            World(
                seed, limits=(float("inf"), 2, 1, 0), variants=ORDERS[:1] if seed % 2 else ORDERS
            ).run()
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e


AUTO = {"limits": (1, 2, 3, 4), "ess_floor": 0.5, "steps": 14}


def test_a_limit_that_sets_itself_keeps_what_each_ticket_announced() -> None:
    """Up, down, over lives of the learner with other bounds: no token past the limit of its ticket
    (schedules.World reckons it), none past the bound, no standing still."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        world = World(seed, **AUTO)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update({str(limit) for limit in world.announced.values()})
        seen["moves"] += world.moves
        seen["at the limit"] += world.at_limit
    assert all(seen[f"{limit}"] > 30 for limit in (1, 2, 3)), seen
    assert seen["moves"] > 200 and seen["at the limit"] > 1000, seen


def test_room_by_the_bound_breaks_what_a_ticket_announced() -> None:
    for seed in range(400):
        try:
            World(seed, frozenset(["announced_room"]), **AUTO).run()
        except (Broken, ProtocolError) as error:
            assert "versions late" in str(error), f"seed {seed}: {error}"
            return
    raise AssertionError("tickets go out by the bound, and nothing breaks")


@pytest.mark.parametrize(
    ("off", "what"),
    [
        ("ticket_order", "versions late"),  # completion order overtakes
        # a ticket goes out during a lease, and trains a version too late
        ("count_leased", "versions late"),
        ("min_version", "versions late"),  # a new ticket is written by old weights
        ("reissue_paced", "versions late"),  # after a roll-back, a group far back starts too early
        ("filter_leaves", "nothing moves"),  # a filtered group keeps its place for good
    ],
)
def test_each_condition_is_needed(off: str, what: str) -> None:
    """With one condition switched off, the same schedules break the bound (or the run stands
    still)."""
    for seed in range(3000):
        try:
            World(seed, frozenset([off])).run()
        except (Broken, ProtocolError) as e:
            assert what in str(e), f"seed {seed}: {e}"
            return
    raise AssertionError(f"{off} switched off, and nothing breaks")
