"""The admission window: the controller on planted times, what it admits, that it never passes the
limit, and what survives a restart; in the store, the service, one process and the simulation."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from journal_kit import open_recorded
from schedules import Broken, World
from service_kit import Run, answers, ask, join, wait, want
from simulate_kit import BARE, config, simulate
from store_kit import hello, make, write
from warm_run_kit import SMALL

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.freshness import (
    FIRST,
    KEPT,
    LITTLE,
    SHIFT,
    SPARED,
    AdmissionWindow,
    BatchMeter,
    BatchTiming,
    count_open_batches,
    find_smallest_window,
    next_window,
    replay_step,
    select_recent,
)
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial
from asyncrl.experiments.simulate import times
from asyncrl.models.policy import build_model
from asyncrl.supervise import live
from buffer.journal import RecordedStore
from buffer.state import StoreSnapshot

SHARE = 0.02
MOST = 8.0


def after(
    window: AdmissionWindow, latencies: list[float], work: float = 1.0, busy: float = 0.0
) -> AdmissionWindow:
    """The window after batches with these latencies, for which the learner waited if it had to."""
    for latency in latencies:
        late = max(0.0, latency - window.size * work)
        timing = BatchTiming(work + late, late, latency, math.nan, busy)
        window = next_window(window, timing, SHARE, MOST, now=0.0)
    return window


@pytest.mark.parametrize(
    ("latency", "size"), [(0.0, 1.0), (0.9, 1.0), (1.5, 1.5), (2.5, 2.5), (99.0, 8.0)]
)
def test_the_window_is_latency_over_the_learners_work(latency: float, size: float) -> None:
    assert after(AdmissionWindow(), [latency] * KEPT).size == pytest.approx(size, abs=0.13)


def test_the_tail_of_the_latency_counts() -> None:
    calm = after(AdmissionWindow(), [1.0] * KEPT)
    tailed = after(AdmissionWindow(), [1.0, 1.0, 1.0, 2.5] * (KEPT // 4))
    assert calm.size == 1.0 and 1.5 < tailed.size < 2.6
    assert tailed.lower >= tailed.size, "less waiting takes a larger window"


def test_it_follows_within_a_few_batches_when_generators_end_join_or_rewards_slow_down() -> None:
    steady = after(AdmissionWindow(), [0.9] * KEPT)
    ended = after(steady, [3.0] * (SHIFT + 1))
    assert steady.size == 1.0 and ended.size == pytest.approx(3.0, abs=0.13)
    joined = after(after(ended, [3.0] * KEPT), [0.9] * SHIFT)
    assert len(joined.timings) == SHIFT, "the earlier times are forgotten"
    assert 1.0 < joined.size < ended.size, "it narrows by a tenth at a commit"
    assert after(joined, [0.9] * 12).size == 1.0
    assert after(after(AdmissionWindow(), [3.0] * KEPT), [3.0] * (SHIFT + 12), work=3.0).size == 1.0


def test_one_late_batch_is_no_change() -> None:
    steady = after(AdmissionWindow(), [1.4] * KEPT)
    assert abs(after(steady, [4.0]).size - steady.size) <= 1.0
    assert len(after(steady, [4.0]).timings) == KEPT


@pytest.mark.parametrize("earlier", [SHIFT - 1, SHIFT, SHIFT + 1])
def test_a_change_needs_as_many_batches_before_it_as_after_it(earlier: int) -> None:
    slow, fast = (BatchTiming(1.0, 0.0, latency, math.nan, 0.0) for latency in (9.0, 1.0))
    for before, last in ((slow, fast), (fast, slow)):
        timings = [*[before] * earlier, *[last] * SHIFT]
        assert select_recent(timings) == (timings if earlier < SHIFT else timings[-SHIFT:])


def test_an_outage_says_nothing_about_the_latency() -> None:
    steady = after(AdmissionWindow(), [1.4] * KEPT)
    lost = next_window(steady, BatchTiming(1.0, 0.0, math.nan, math.nan, 0.0), SHARE, MOST, now=7.0)
    assert lost == msgspec.structs.replace(steady, opens=7.0)


def test_it_keeps_busy_generators_busy_and_no_more() -> None:
    """Generators that need 4 s for a batch of 1 s of training, each batch 5 s after its grant."""
    works, latencies = [1.0] * KEPT, [5.0] * KEPT
    steps = [replay_step(works, latencies, 4.0, size) for size in (1.0, 2.0, 8.0)]
    assert steps == sorted(steps, reverse=True) and steps[-1] == pytest.approx(4.0)
    window = AdmissionWindow(8.0)
    for _ in range(2 * KEPT):
        window = next_window(window, BatchTiming(4.0, 3.0, 5.0, 0.0, 1.0), SHARE, MOST, now=0.0)
    assert window.size < 1.6, "a larger one would only make samples older"
    assert window.wait == pytest.approx(3.0 / 4.0), "the learner's share of waiting"


@pytest.mark.parametrize(("latency", "load"), [(3.0, 0.0), (1.7, 0.0), (5.0, 4.0), (9.0, 1.5)])
@pytest.mark.parametrize("measured", [0.0, 0.08, 0.5])
def test_the_smallest_window_for_the_target(latency: float, load: float, measured: float) -> None:
    """The target is SPARED of the share where the generators are slower.  It shrinks by the ratio
    of target to wait where more waiting was measured than the replay predicts."""
    share, work = 0.2, 1.0
    slower = max(work, load)
    step = slower / (1 - measured)
    target = share * SPARED if load > work else share
    target = target * target / measured if measured > target else target

    for last in (latency, 100.0 * slower):  # a late one: no window waits that little
        latencies = [*[latency] * (KEPT - 1), last]

        def replay(window: float, latencies: list[float] = latencies) -> float:
            return replay_step([work] * KEPT, latencies, load, window)

        timings = [BatchTiming(step, step - work, x, math.nan, load / step) for x in latencies]
        window = find_smallest_window(timings, share, 32.0)
        longest = max(slower / (1 - target), replay(32.0) / (1 - LITTLE * target))
        assert replay(window) <= longest + 1e-9
        assert window == 1.0 or replay(window - 1 / 8) > longest
        in_ms = [
            BatchTiming(1000 * step, 1000 * (step - work), 1000 * x, math.nan, load / step)
            for x in latencies
        ]
        assert find_smallest_window(in_ms, share, 32.0) == window


def test_the_part_of_a_batch_opens_between_two_commits() -> None:
    assert msgspec.to_builtins(BatchTiming(1.0, 2.0, 3.0, 4.0, 5.0)) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert msgspec.to_builtins(AdmissionWindow()) == [2.0, 0.0, (), 0.0, 2.0]
    window = msgspec.structs.replace(after(AdmissionWindow(), [1.5] * KEPT), opens=0.0)
    timing = BatchTiming(1.0, 0.0, 1.5, math.nan, 0.2)
    moved = next_window(window, timing, SHARE, MOST, now=100.0)
    assert moved.size == 1.5 and moved.opens == pytest.approx(100.5)
    assert count_open_batches(moved, 100.4) == 1 and count_open_batches(moved, 100.6) == 2


def test_the_meter_measures_latency_waits_and_load() -> None:
    meter = BatchMeter()
    meter.on_grant([0, 1, 2], 0.0)
    meter.on_complete([0, 1], 1.0)
    assert meter.on_commit([0, 1], 0.5, 2.0) is None, "the first step has no beginning"
    meter.on_free(6.0, 8.0, 2.0)
    meter.on_grant([3], 2.5)
    meter.on_complete([2, 3], 4.0)
    meter.on_free(0.0, 8.0, 4.0)
    timing = meter.on_commit([2, 3], 0.5, 7.0)
    # the learner waits 2.5 of its 5 s, from 2.0 to 4.5: half a second after the last sample
    assert timing == BatchTiming(5.0, 2.5, 4.0, 0.5, 1 - 6 * 2 / (8 * 5))
    meter.on_grant([4, 5], 7.0)
    meter.on_grant([5], 8.0)
    meter.on_complete([4, 5], 9.0)
    lost = meter.on_commit([4, 5], 0.0, 10.0)
    assert lost is not None and math.isnan(lost.latency), "it was granted twice"
    meter.on_grant([6], 5.0)
    meter.on_complete([6], 9.0)
    early = meter.on_commit([6], 0.5, 12.0)
    assert early is not None and early.wait == 0.0, "the batch was there before the learner was"
    assert not meter.tickets


def test_the_queue_for_full_reward_processes_is_no_latency() -> None:
    meter = BatchMeter()
    meter.on_commit([0], 0.0, 0.0)
    meter.on_rewards("g", (0.0, 0.0, 0.0), 2.0, 0.0)
    meter.on_rewards("g", (10.0, 50.0, 19.0), 2.0, 10.0)  # 1.9 s of calls, 3.1 s of queue
    meter.on_grant([1], 1.0)
    meter.on_complete([1], 9.0)
    full = meter.on_commit([1], 0.9, 10.0)
    assert full is not None and (full.busy, full.latency) == pytest.approx((0.95, 8.0 - 3.1))
    meter.on_rewards("g", (11.0, 52.0, 20.0), 2.0, 20.0)
    meter.on_grant([2], 11.0)
    meter.on_complete([2], 19.0)
    idle = meter.on_commit([2], 0.9, 20.0)
    assert idle is not None and idle.latency == 8.0


def test_the_store_grants_by_the_window_and_the_time() -> None:
    store = make(k=4, wait=SHARE, steps=20)
    assert len(store.grant("g", 1, 99, 0.0)) == FIRST + 1
    store.window = AdmissionWindow(2.5, opens=7.0)
    assert store.grant("g", 1, 99, 6.0) == [] and store.next_opening(6.0) == 7.0
    assert len(store.grant("g", 1, 99, 7.0)) == 1 and store.next_opening(7.0) == math.inf
    store.window = AdmissionWindow(99.0)
    assert [t.limit for t in store.grant("g", 1, 99, 7.0)] == [4], "the limit holds"
    assert store.current_window() == 4
    filled = make(k=4, steps=20)
    filled.window = AdmissionWindow(1.0, opens=9.0)
    assert len(filled.grant("g", 1, 99, 0.0)) == 5 and filled.next_opening(0.0) == math.inf


def test_grants_never_pass_the_limit_whatever_the_window_does() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        world = World(seed, limits=(1, 2, 3, 4), wait=0.1, steps=12)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen["at the limit"] += world.at_limit
        seen[f"{min(3, math.ceil(world.store.window.size))}"] += 1
    assert all(seen[f"{size}"] > 5 for size in (1, 2, 3)) and seen["at the limit"] > 200, seen


def test_a_window_past_the_limit_would_break_it() -> None:
    """The property can fail: with room for two more batches than the limit, a token is too late."""

    class Wide(World):
        def commit(self) -> bool:
            done = super().commit()
            self.store.count_admitted_batches = lambda now: self.store.max_lag + 2  # type: ignore[method-assign]
            return done

    for seed in range(400):
        try:
            Wide(seed, limits=(1, 2), wait=0.1, steps=12).run()
        except (Broken, Exception) as error:
            assert "versions late" in str(error), f"seed {seed}: {error}"
            return
    raise AssertionError("nothing breaks")


def test_the_window_outlives_buffers_and_learners(tmp_path: Path) -> None:
    settings = make(k=8, wait=SHARE, steps=20).settings

    def opened(now: float) -> RecordedStore:
        return open_recorded(tmp_path, settings, now=now)

    store = opened(0.0)
    hello(store, 1, 0, k=8)
    for number in range(4):
        for ticket in store.grant("g", 1, 99, float(number)):
            write(store, ticket)
        assert store.ask(1, number)[0]
        timing = BatchTiming(1.0, 0.5, 3.4, 0.0, 0.2)
        label = Label(1, number + 1)
        assert store.commit(number, label, f"d{number + 1}", timing=timing, now=number + 1.0)
    assert store.window.size > FIRST and store.window.opens > 4.0
    store.flush_journal()
    store.journal.close()
    again = opened(100.0)
    assert again.window == msgspec.structs.replace(store.window, opens=100.0), "another clock"
    again.leased, again.skip = {300, 9, 2}, {70, 1}
    packed = msgspec.msgpack.encode(again.snapshot())
    copy = make(k=8, wait=SHARE)
    copy.restore(msgspec.msgpack.decode(packed, type=StoreSnapshot))
    assert copy.window == again.window and (copy.leased, copy.skip) == ({2, 9, 300}, {1, 70})
    assert again.ask(1, 4)[0] and again.make_batch(4).window == store.window.size
    again.journal.close()
    # a new buffer in memory takes the window from the learner's checkpoint, within the limit
    new = make(k=8, wait=SHARE)
    new.epoch = 0
    hello(new, 2, 0, k=3, window=5.5)
    assert new.window.size == 3.0


def test_the_service_moves_it_and_tells_busy_generators_of_new_versions(tmp_path: Path) -> None:
    run = Run(tmp_path, "staleness.max_lag=4", "learner.steps=9")
    try:
        generator, learner = join(run, max_lag=4.0)
        held: dict[int, m.Ticket] = {}
        for number in range(3):
            grant = ask(generator, want(number + 1, 99), m.TicketGrant)
            held |= {ticket.ticket: ticket for ticket in grant.tickets}
            assert len(held) >= number + FIRST + 1 or number
            ask(generator, answers(held[number]), m.DeliveryAcks)
            batch = ask(learner, m.BatchRequest(1, number), m.Batch)
            assert batch.window == (FIRST if number < 2 else run.service.store.window.size)
            told = {"time/learner_idle_share": 0.25}
            commit = m.Commit(1, number, Label(1, number + 1), f"d{number + 1}", told)
            ask(learner, commit, m.CommitReply)
            share = ask(learner, m.StatusRequest(), m.RunStatus).metrics["window/wait"]
            assert share == 0.0 or number, "nothing was measured"
            # it has tickets and asks for none: the news comes by itself
            news = wait(generator, m.HeartbeatReply)
            assert news.announcement is not None and news.attempts == 0
            assert news.announcement.label == Label(1, number + 1)
        values = ask(generator, m.StatusRequest(), m.RunStatus).metrics
        window = run.service.store.window
        assert values["window/now"] == min(window.size, 4.0) and len(window.timings) == 2
        assert values["window/wait"] == pytest.approx(window.wait)
        assert live.describe("window", values).startswith("window ")
    finally:
        run.end()


def simulated(known: times.TimeModel, *sets: str) -> Any:
    return simulate(config("learner.steps=80", *sets), known)


def test_simulated_the_lag_does_not_grow_with_the_limit_and_the_speed_stays() -> None:
    """Two generators, an answer of 0.4 to 0.64 s, 0.5 s of training."""
    known = times.change(BARE, lengths="uniform(40, 64)", train=0.5)
    sets = ("generators=2", "generator.slots=32")
    filled = simulated(known, *sets, "staleness.max_lag=8")
    assert filled.lag_mean > 6
    for limit in (4, 8):
        fresh = simulated(known, *sets, f"staleness.max_lag={limit}", "staleness.wait='auto'")
        assert fresh.lag_mean <= 2.0 and fresh.lag_max <= limit
        assert fresh.tokens_per_s >= 0.98 * filled.tokens_per_s and fresh.limit_mean < 2.0


def test_simulated_slow_rewards_keep_their_speed_with_less_lag() -> None:
    known = times.change(BARE, reward="pareto(0.2,2.5,4)")
    sets = ("reward.workers=8", "staleness.max_lag=16", "generator.slots=64")
    filled = simulated(known, *sets)
    fresh = simulated(known, *sets, "staleness.wait='auto'")
    assert fresh.lag_mean < 0.7 * filled.lag_mean
    assert fresh.tokens_per_s > 0.95 * filled.tokens_per_s


def test_a_run_in_one_process_has_it_on_request_and_repeats(tmp_path: Path) -> None:
    build_model(tmp_path / "model", "0123456789=:,#", hidden=32, layers=1)
    sets = [f"model.path='{tmp_path / 'model'}'", *SMALL, "learner.steps=6", "staleness.max_lag=4"]

    def run(wait: str) -> dict[str, object]:
        return dict(
            serial.run_serial(load.load("configs/demo.toml", [*sets, f"staleness.wait={wait}"]), 3)
        )

    filled, usual, fresh, again = (run(wait) for wait in ("0", "'auto'", "0.3", "0.3"))
    assert usual["weights_digest"] == filled["weights_digest"], "a comparison fills the limit"
    assert fresh["weights_digest"] == again["weights_digest"]
    assert fresh["curve"][-1]["window/now"] < 4  # type: ignore[index]
    assert max(map(int, fresh["lag_histogram"])) < max(map(int, filled["lag_histogram"]))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "sets",
    [["staleness.inject=2"], ["staleness.on_exceed='mask'"], ["staleness.max_lag=0"]]
    + [["staleness.max_lag=inf"]],
)
def test_where_it_cannot_act_auto_is_off_and_a_number_is_refused(sets: list[str]) -> None:
    assert load.load("configs/demo.toml", sets).staleness.wait_target == 0
    assert load.load("configs/demo.toml", [*sets, "staleness.wait=0"]).staleness.wait_target == 0
    with pytest.raises(ConfigError, match=r"staleness.wait: needs staleness.on_exceed = pace"):
        load.load("configs/demo.toml", [*sets, "staleness.wait=0.1"])


def test_it_is_on_by_default() -> None:
    staleness = load.load("configs/demo.toml").staleness
    assert (staleness.wait, staleness.wait_target) == ("auto", SHARE)
    auto = load.load("configs/demo.toml", ["staleness.max_lag={auto='ess'}"]).staleness
    assert auto.wait_target == SHARE and auto.limit == 16


def test_a_limit_that_sets_itself_stays_the_bound_of_the_window() -> None:
    store = make(k=8, wait=SHARE, ess_floor=0.5, steps=20)
    assert store.limit.now == 1 and store.window.size == FIRST
    assert len(store.grant("g", 1, 99, 0.0)) == 2 and store.current_window() == 1
