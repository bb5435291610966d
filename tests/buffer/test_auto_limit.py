"""A limit that sets itself: the rule by hand, what a ticket is told, what survives a restart, and
that real runs move it."""

import itertools
import math
from pathlib import Path

import msgspec
import pytest
from service_kit import Run, answers, ask, join, want
from simulate_kit import BARE
from simulate_kit import run as simulated
from warm_run_kit import SMALL

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.admission import (
    AVERAGED,
    CLEAR,
    IDLE,
    AdaptiveLimit,
    LimitEvidence,
    next_limit,
    read_evidence,
)
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import (
    LearnerHello,
    Prompt,
    SamplingSettings,
    Trajectory,
    VersionSpan,
    WeightsSource,
)
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial
from asyncrl.experiments.simulate.times import change
from asyncrl.models.policy import build_model
from asyncrl.records import metrics
from asyncrl.supervise import live
from asyncrl.supervise.report import run_view
from buffer.groups import StoreSettings
from buffer.state import StoreSnapshot
from buffer.store import Store

FLOOR = 0.5
MOST = 16
STARVED = LimitEvidence(0.95, math.inf, 0.3)
AUTO = "staleness.max_lag={auto='ess',floor=0.5,most=4}"


def after(limit: AdaptiveLimit, *batches: LimitEvidence, most: int = MOST) -> AdaptiveLimit:
    for batch in batches:
        limit = next_limit(limit, batch, FLOOR, most)
    return limit


def test_it_rises_by_one_when_the_learner_has_waited_and_rests_as_long_as_the_limit() -> None:
    start = AdaptiveLimit(now=4)
    assert after(start, *[STARVED] * (AVERAGED - 1)).now == 4, "not by two batches"
    risen = after(start, *[STARVED] * AVERAGED)
    assert risen == AdaptiveLimit(5, 5, (), 4, pytest.approx(0.95), pytest.approx(0.3))
    rested = after(risen, *[STARVED] * 5)
    assert (rested.now, rested.settling, rested.seen) == (5, 0, ())
    assert after(rested, *[STARVED] * AVERAGED).now == 6
    assert after(AdaptiveLimit(now=MOST), *[STARVED] * 9).now == MOST


def test_it_falls_to_the_lag_that_holds_and_rests_until_the_old_tickets_are_through() -> None:
    start = AdaptiveLimit(now=9)
    stale = LimitEvidence(0.4, 4.0, 0.9)
    fallen = after(start, *[stale] * AVERAGED)
    assert fallen == AdaptiveLimit(4, 9, (), 9, pytest.approx(0.4), pytest.approx(0.9))
    # the lag that holds in the best of the batches, and at least one less
    assert after(start, stale, stale, LimitEvidence(0.4, 6.0, 0.0)).now == 6
    assert after(start, *[LimitEvidence(0.4, math.inf, 0.0)] * AVERAGED).now == 8
    assert after(start, *[LimitEvidence(0.4, 0.0, 0.0)] * AVERAGED).now == 1
    assert after(AdaptiveLimit(now=1), *[LimitEvidence(0.1, 0.0, 0.9)] * 9).now == 1, (
        "never synchronous"
    )


def test_it_stays_between_the_floor_and_what_a_rise_needs_and_judges_the_last_batches() -> None:
    clear = FLOOR + CLEAR * (1 - FLOOR)
    assert after(AdaptiveLimit(now=3), *[LimitEvidence(clear, math.inf, 0.9)] * AVERAGED).now == 4
    assert after(AdaptiveLimit(now=3), *[LimitEvidence(clear - 1e-6, math.inf, 0.9)] * 9).now == 3
    assert after(AdaptiveLimit(now=3), *[LimitEvidence(FLOOR, 0.0, 0.0)] * 9).now == 3
    assert after(AdaptiveLimit(now=3), *[LimitEvidence(0.95, math.inf, 0.99 * IDLE)] * 9).now == 3
    calm = LimitEvidence(0.95, math.inf, 0.0)
    kept = after(AdaptiveLimit(now=3), *[calm] * 50)
    assert kept.seen == (calm,) * AVERAGED
    # (0.95 + 0.2 + 0.2) / 3 < 0.5, and the first of the three holds at any lag
    assert after(kept, *[LimitEvidence(0.2, 1.0, 0.0)] * 2).now == 2


def test_what_a_commit_says() -> None:
    by_lag = {f"by_lag/ess_{b}": x for b, x in (("0", 1.0), ("1", 0.9), ("3to4", 0.6))}
    told = {"is/ess": 0.8, "time/learner_idle_share": 0.2, **by_lag}
    assert read_evidence(told, 0.5) == LimitEvidence(0.8, math.inf, 0.2)
    assert read_evidence(told | {"by_lag/ess_5to8": 0.49}, 0.5) == LimitEvidence(0.8, 4.0, 0.2)
    assert read_evidence(told, 0.7) == LimitEvidence(0.8, 2.0, 0.2)
    assert read_evidence({"is/ess": 0.8, "by_lag/ess_0": 0.1}, 0.5) == LimitEvidence(0.8, 0.0, 0.0)
    assert read_evidence({}, 0.5) is None and read_evidence({"is/ess": math.nan}, 0.5) is None


def hello(epoch: int, number: int = 0, bound: float = 8.0, limit: int = 0) -> LearnerHello:
    source = WeightsSource(epoch, "", "", "")
    label = Label(epoch, number)
    return LearnerHello(
        1, "", epoch, label, None, str(number), 0, epoch - 1, bound, source, [], limit=limit
    )


def new_store(floor: float = FLOOR) -> Store:
    settings = StoreSettings(1, 1, 99, SamplingSettings(), ess_floor=floor)
    return Store(settings, lambda number: Prompt(number, ""))


def test_tickets_announce_the_limit_of_their_grant_and_room_follows_it() -> None:
    store = new_store()
    store.follow_learner(hello(1))
    assert [t.limit for t in store.grant("g", 1, 99, 0.0)] == [1, 1]
    store.limit = AdaptiveLimit(3)
    assert [t.limit for t in store.grant("g", 1, 99, 0.0)] == [3, 3]
    assert [g.grants[n + 1].limit for n, g in enumerate(store.alive.values())] == [1, 1, 3, 3]
    store.limit = AdaptiveLimit(1)
    assert store.grant("g", 1, 99, 0.0) == []
    constant = new_store(0.0)
    constant.follow_learner(hello(1, bound=2.0))
    assert [t.limit for t in constant.grant("g", 1, 99, 0.0)] == [2, 2, 2]
    assert {x.limit for g in constant.alive.values() for x in g.grants.values()} == {math.inf}


def test_the_limit_outlives_learners_buffers_and_snapshots() -> None:
    store = new_store()
    store.follow_learner(hello(1, limit=5))
    assert store.limit == AdaptiveLimit(5, 5), "a new buffer takes the checkpoint's"
    store.limit = AdaptiveLimit(6, 2, (STARVED,), 5, 0.9, 0.2)
    again = new_store()
    packed = msgspec.msgpack.encode(store.snapshot())
    again.restore(msgspec.msgpack.decode(packed, type=StoreSnapshot))
    assert again.limit == store.limit
    again.follow_learner(hello(2, limit=3))
    assert again.limit == AdaptiveLimit(6, 6, (), 5, 0.9, 0.2), "this buffer knows better"
    again.follow_learner(hello(3, bound=4.0))
    assert again.limit.now == 4


@pytest.mark.parametrize(("first", "trains"), [(1, False), (2, True)])
def test_an_adopted_session_keeps_to_the_limit_of_its_first_grant(first: int, trains: bool) -> None:
    """Two updates behind after a learner's restart: a later grant that allows three does not excuse
    them, and what its own grant allowed is trained."""
    store = new_store()
    store.follow_learner(hello(1))
    store.limit = AdaptiveLimit(first)
    assert [(t.attempt, t.limit) for t in store.grant("g", 1, 2, 0.0)] == [(1, first), (2, first)]
    span = VersionSpan(Label(1, 0), "", 0, 4, Label(1, 0))
    session = Trajectory(0, 0, 1, b"", bytes(16), b"", b"", [span], 0.0, {}, "stop", 1.0)
    assert store.deliver(session, 0.0) == "accepted"
    assert store.ask(1, 0)[0] and store.commit(0, Label(1, 1), "one way") is True
    store.limit = AdaptiveLimit(3)
    # the next life made the first update in another way: (1, 1) is two updates from it
    other = msgspec.structs.replace(hello(2, 1), parent=Label(1, 0), digest="another")
    assert store.follow_learner(other) and store.limit.now == 3
    (again, *_) = store.grant("g", 1, 2, 0.0)
    assert (again.ticket, again.limit) == (1, 3)
    went_on = msgspec.structs.replace(
        session,
        ticket=1,
        attempt=again.attempt,
        adopted=[(2, 2)],
        spans=[
            VersionSpan(Label(1, 1), "", 0, 2, Label(1, 1)),
            VersionSpan(Label(2, 1), "", 2, 4, Label(2, 1)),
        ],
    )
    assert store.deliver(went_on, 0.0) == "accepted"
    groups, lack = store.ask(2, 1)
    if trains:
        assert [group.ticket for group in groups] == [1]
        assert store.make_batch(1).token_lags == [[(0, 2, 2), (2, 4, 0)]]
    else:
        assert groups == [] and "1 samples" in str(lack)
        assert store.sum_ledger()["orphaned"]["tokens"] == 4


def test_a_commit_moves_it_and_the_metrics_say_why(tmp_path: Path) -> None:
    """The buffer's service: batches for which the learner has waited, then one far too stale."""
    run = Run(tmp_path, AUTO, "staleness.wait=0", "learner.steps=9")
    try:
        generator, learner = join(run, max_lag=4.0)
        held: dict[int, m.Ticket] = {}
        rows = []
        for number in range(6):
            for ticket in ask(generator, want(number + 1, 99), m.TicketGrant).tickets:
                held[ticket.ticket] = ticket
            ask(generator, answers(held[number]), m.DeliveryAcks)
            batch = ask(learner, m.BatchRequest(1, number), m.Batch)
            told = {"is/ess": 0.9, "time/learner_idle_share": 0.25}
            commit = m.Commit(1, number, Label(1, number + 1), f"d{number + 1}", told)
            ask(learner, commit, m.CommitReply)
            status = ask(generator, m.StatusRequest(), m.RunStatus)
            rows.append(
                (batch.limit, status.metrics["limit/now"], live.describe("limit", status.metrics))
            )
        # it rests for one batch after the hello, then three decide
        assert [now for _, now, _ in rows] == [1, 1, 1, 2, 2, 2]
        assert [asked for asked, _, _ in rows] == [1, 1, 1, 1, 2, 2] and rows[2][2] == "limit 1"
        assert rows[5][2] == "limit 2 (was 1: ESS 0.90, learner idle 25%)"
        assert [held[n].limit for n in range(8)] == [1, 1, 1, 1, 1, 2, 2, 2]
    finally:
        run.end()
    written = [row for row in metrics.read(run.dir) if "limit/before" in row]
    assert [(row["step"], row["limit/now"], row["limit/before"]) for row in written] == [(3, 2, 1)]
    got = run_view.describe_limit_moves(written)
    assert got == "limit from step 3 on 2 (was 1: ESS 0.90, learner idle 25%)"
    many = run_view.describe_limit_moves(written * (run_view.MOVES + 2))
    assert many.startswith("limit 2 earlier moves, then from step 3")
    assert many.count(";") == run_view.MOVES - 1


def test_a_run_in_one_process_moves_it_within_what_was_announced(tmp_path: Path) -> None:
    build_model(tmp_path / "model", "0123456789=:,#", hidden=32, layers=1)
    sets = [f"model.path='{tmp_path / 'model'}'", *SMALL, "learner.steps=14"]
    auto = serial.run_serial(load.load("configs/demo.toml", [*sets, AUTO]), 3)
    limits = [row["limit/now"] for row in auto["curve"]]
    assert limits[0] == 1 and max(limits) > 1 and max(limits) <= 4
    moved = [row for row in auto["curve"] if "limit/before" in row]
    assert len(moved) == sum(a != b for a, b in itertools.pairwise([1.0, *limits]))
    assert all(row["limit/idle"] > IDLE for row in moved if row["limit/now"] > row["limit/before"])
    assert max(map(int, auto["lag_histogram"])) <= max(limits)
    constant = serial.run_serial(load.load("configs/demo.toml", [*sets, "staleness.max_lag=1"]), 3)
    assert "limit/now" not in constant["curve"][0]
    assert auto["clock"] < constant["clock"], "the learner waits less"


def test_the_simulation_moves_it_by_idle_time_and_the_ratios_that_it_is_given() -> None:
    slow = change(BARE, train=0.64, reward="pareto(0.1, 1.2, 4)")
    auto = "staleness.max_lag={auto='ess',floor=0.5,most=8}"
    sets = ["learner.steps=80", "reward.workers=32"]
    free, low = (simulated(change(slow, ess=ess), auto, *sets) for ess in (1.0, 0.55))
    one = simulated(slow, "staleness.max_lag=1", *sets)
    assert free.limit_mean > low.limit_mean >= 1 == one.limit_mean
    assert free.lag_max <= 8 == free.max_lag and free.idle_learner < one.idle_learner
    assert free.seconds < one.seconds


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["staleness.inject=2"], "needs staleness.on_exceed = pace and no injected lag"),
        (["staleness.on_exceed='mask'"], "needs staleness.on_exceed = pace and no injected lag"),
        (["staleness.max_lag={auto='ess',floor=1.0}"], "staleness.max_lag"),
        (["staleness.max_lag={auto='ess',flor=0.4}"], "staleness.max_lag"),
        (["staleness.max_lag=-1"], "staleness.max_lag"),
        (["staleness.max_lag=2.5"], "must be a whole number or inf"),
    ],
)
def test_what_it_cannot_be(sets: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load.load("configs/demo.toml", [AUTO, *sets])


def test_a_config_that_has_it_is_written_and_read_again(tmp_path: Path) -> None:
    config = load.load("configs/demo.toml", ["staleness.max_lag={auto='ess',floor=0.4}"])
    assert (config.staleness.limit, config.staleness.ess_floor) == (16.0, 0.4)
    path = tmp_path / "c.toml"
    path.write_text(load.dump(config))
    assert load.load(path) == config
    plain = load.load(path, ["staleness.max_lag=3"])
    assert (plain.staleness.limit, plain.staleness.ess_floor) == (3.0, 0.0)
