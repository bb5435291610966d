"""Rules that a run rarely meets: renewals, strays, rings, rollbacks, orders, memory."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from store_kit import hello, make, prompt, sample, train, write

from asyncrl.config import load
from asyncrl.contract.errors import BadMessage, ProtocolError
from asyncrl.contract.messages import LearnerHello, SamplingSettings, Ticket, WeightsSource
from asyncrl.contract.versions import Label
from buffer import checks
from buffer import state as state_module
from buffer import store as store_module
from buffer.batches import BatchWait, compute_announced_limits, judge
from buffer.evaluation import EVAL_BASE, EvaluationPlan, Evaluations
from buffer.groups import Grant, Group, StoredSample, StoreSettings, make_store_settings
from buffer.store import Store


def evaluations(every: int = 2) -> Evaluations:
    return Evaluations(EvaluationPlan(every, 2, 2), lambda split, i: prompt(i))


def test_an_evaluation_costs_one_slot_and_comes_first() -> None:
    store = make(1, 4, 2, evaluations=evaluations())
    tickets = store.grant("g", 7, 5, 0.0)
    # 1 + 1 + 2 + 2: the last goes over the free slots
    assert [t.ticket >= EVAL_BASE for t in tickets] == [True, True, False, False]
    assert [t.attempt for t in tickets] == [1, 2, 3, 4] and store.attempts == 4
    assert [t.ticket for t in tickets[2:]] == [0, 1]
    assert all(t.samples == [0, 1] for t in tickets[2:])
    assert [store.alive[n].lease.session for n in (0, 1)] == [7, 7]  # type: ignore[union-attr]
    assert store.grant("g", 7, 0, 0.0) == []


def test_nothing_is_granted_after_the_end_or_before_a_learner() -> None:
    store = Store(StoreSettings(1, 1, 9, SamplingSettings()), prompt)
    assert store.grant("g", 1, 9, 0.0) == [] and store.make_announcement() is None
    assert hello(store, 1, 0)
    announced = store.make_announcement()
    assert announced is not None and announced.label == Label(1, 0)
    assert announced.digest == "d0" and announced.source.epoch == 1
    store.finish()
    assert store.grant("g", 1, 9, 0.0) == [] and store.finished


def test_a_ticket_carries_its_version_and_the_settings() -> None:
    store = make(1, 1, 2, seed=11)
    (t,) = store.grant("g", 1, 2, 0.0)
    assert t == Ticket(
        0, 1, "train", prompt(0), [0, 1], SamplingSettings(), Label(1, 0), None, 11, 1
    )
    lease = store.alive[0].lease
    assert lease is not None
    got = (lease.attempt, lease.producer, lease.session, lease.expires, lease.todo, lease.granted)
    assert got == (1, "g", 1, 20.0, {0, 1}, (1, 0))


@pytest.mark.parametrize("many", [40, 400])
def test_with_many_out_no_step_looks_at_all(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(2 * many, 2, 2, many)
    tickets = [store.grant("g", 1, 2, 0.0)[0] for _ in range(many)]
    looked: list[int] = []
    complete = Group.is_complete.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Group, "is_complete", property(lambda g: looked.append(g.ticket) or complete(g))
    )
    monkeypatch.setattr(
        Store,
        "iterate_uncomposed_groups",
        lambda s: (looked.append(g.ticket) or g for g in s.alive.values()),
    )
    assert store.grant("g", 1, 2, 0.0)
    for ticket in tickets[5:25]:
        assert write(store, ticket) == ["accepted", "accepted"]
        assert store.ask(1, 0) == ([], BatchWait("ticket 0: 2 samples at g", "g", 0))
        assert store.grant("g", 1, 2, 0.0)
    assert len(looked) < 20 * 10  # the same for 40 and for 400
    # what is missing again is found all the same, before anything new
    store.end_sessions("g", 2)
    assert [t.ticket for t in store.grant("h", 1, 4, 0.0)] == [0, 1]


def test_a_config_becomes_the_stores_settings() -> None:
    plain, replace = load.load("demo", []), msgspec.structs.replace
    of_sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "max_new_tokens": 6}
    of_staleness: dict[str, Any] = {"on_exceed": "mask", "order": "freshest", "inject": 2}
    of_staleness |= {"half_life": 3.0, "ess_floor": 0.25}
    budgets = {"error_budget": 0.5, "machinery_budget": 0.75}
    config = replace(
        plain,
        learner=replace(plain.learner, groups=3, group_size=5, steps=7),
        generator=replace(plain.generator, **of_sampling, context=8),
        advantage=SimpleNamespace(name="remax", no_spread="filter"),
        staleness=SimpleNamespace(**of_staleness, wait_target=0.125),
        wires=replace(plain.wires, lease_s=9.0),
        reward=replace(plain.reward, **budgets),
        agent=replace(plain.agent, serve=True, max_tokens=99),
        evaluation=replace(plain.evaluation, generators=2),
        **{"seed": 11, "generators": 4},
    )
    assert make_store_settings(config) == StoreSettings(
        *(3, 5, 7, SamplingSettings(**of_sampling, greedy=True)),
        **{"seed": 11, "filter_no_spread": True, "lease_s": 9.0, "context": 8, "wait": 0.125},
        **{"session_tokens": 99, "evaluators": ["generator-2", "generator-3"]},
        **of_staleness | budgets,
    )
    settings = make_store_settings(plain)
    assert not settings.session_tokens and not settings.evaluators and not settings.sampling.greedy
    assert settings.batch_samples == plain.learner.groups * plain.learner.group_size


def expires(store: Store, ticket: int) -> float:
    lease = store.alive[ticket].lease
    assert lease is not None
    return lease.expires


def test_a_lease_is_renewed_by_new_tokens_and_with_it_those_that_wait_for_a_row() -> None:
    store = make(3, 1, 1)
    a, b, c = store.grant("g", 1, 3, 0.0)
    store.renew("g", 1, [(a.ticket, a.attempt, 0), (b.ticket, b.attempt, 0)], 5.0)
    assert expires(store, 0) == expires(store, 1) == 20  # nothing moved: nothing is renewed
    store.renew("g", 1, [(a.ticket, a.attempt, 3), (b.ticket, b.attempt, 0)], 6.0)
    # the third was not spoken of
    assert expires(store, 0) == expires(store, 1) == 26 and expires(store, 2) == 20
    store.renew("g", 1, [(a.ticket, a.attempt, 3), (b.ticket, b.attempt, 0)], 7.0)
    assert expires(store, 0) == expires(store, 1) == 26  # the same count is no progress
    store.renew("g", 1, [(c.ticket, c.attempt, 1)], 8.0)
    assert expires(store, 0) == 26 and expires(store, 2) == 28 and store.expire(26.0) == 0
    assert store.expire(26.5) == 2 and store.alive[0].lease is None
    assert store.alive[2].lease is not None


def test_an_attempt_that_is_over_renews_nobodys_lease_but_its_tokens_count() -> None:
    store = make(1, 1, 1)
    (a,) = store.grant("g", 1, 1, 0.0)
    store.expire(21.0)
    (b,) = store.grant("h", 1, 1, 30.0)
    store.renew("g", 1, [(a.ticket, a.attempt, 4)], 31.0)
    assert expires(store, 0) == 50
    store.renew("g", 1, [(a.ticket, a.attempt, 0), (b.ticket, b.attempt, 0)], 32.0)
    assert expires(store, 0) == 50 and store.sum_ledger()["lost_with_process"]["tokens"] == 4


def test_an_evaluation_at_work_is_renewed_and_counts_as_movement() -> None:
    store = make(1, 4, 1, evaluations=evaluations())
    e, f, a = store.grant("g", 1, 3, 0.0)
    store.renew("g", 1, [(e.ticket, e.attempt, 0), (a.ticket, a.attempt, 0)], 5.0)
    assert expires(store, 0) == 20
    store.renew("g", 1, [(e.ticket, e.attempt, 2), (a.ticket, a.attempt, 0)], 6.0)
    assert expires(store, 0) == 26
    # the other evaluation alone: 5 + 20 is over for none, 0 + 20 for it
    assert store.expire(25.5) == 1
    again = store.grant("g", 1, 1, 26.0)
    assert [t.ticket for t in again] == [f.ticket] and again[0].attempt > a.attempt


def test_an_evaluation_that_waits_for_its_reward_is_renewed_too() -> None:
    store = make(1, 4, 1, evaluations=evaluations())
    e, f, _ = store.grant("g", 1, 3, 0.0)
    store.renew("g", 1, [], 6.0, [(e.ticket, e.attempt)])
    assert store.expire(25.5) == 2  # the other evaluation and the group
    assert [t.ticket for t in store.grant("g", 1, 1, 26.0)] == [f.ticket]
    assert store.expire(26.5) == 1


def test_a_new_session_ends_the_leases_of_its_own_name_alone() -> None:
    store = make(2, 1, 1, evaluations=evaluations())
    store.grant("g", 1, 3, 0.0)  # two evaluations and a group
    store.grant("h", 1, 1, 0.0)
    store.end_sessions("g", 1)
    assert store.alive[0].lease is not None
    store.end_sessions("g", 2)
    assert store.alive[0].lease is None and store.alive[1].lease is not None
    assert [t.ticket >= EVAL_BASE for t in store.grant("g", 2, 3, 0.0)] == [True, True, False]


def test_a_stray_attempt_of_a_gone_group_is_lost_once_and_found_again() -> None:
    """It had reported 3 tokens; it reports 5, then delivers 4, then a copy comes: lost 3, 5, 1, and
    the copy is a duplicate once."""
    store = make(1, 1, 1)
    (a,) = store.grant("g", 1, 1, 0.0)
    store.renew("g", 1, [(0, a.attempt, 3)], 1.0)
    store.expire(30.0)
    (b,) = store.grant("h", 1, 1, 30.0)
    train(store, 0, b)
    store.retire_batches(1)
    assert store.retained == {} and store.sum_ledger()["lost_with_process"]["tokens"] == 3
    store.renew("g", 1, [(0, a.attempt, 5)], 31.0)
    store.renew("g", 1, [(0, a.attempt, 2)], 31.0)  # an older report: no less than before
    assert store.sum_ledger()["lost_with_process"]["tokens"] == 5
    assert store.deliver(sample(a, 0), 32.0) == "duplicate"
    line = store.sum_ledger()["duplicate"]
    assert store.sum_ledger()["lost_with_process"]["tokens"] == 1
    got = (line["tokens"], line["samples"], line["mean_length"], line["mean_reward"])
    assert got == (4, 1, 4, 1) and store.deliver(sample(a, 0), 33.0) == "duplicate"
    assert store.sum_ledger()["duplicate"]["tokens"] == 4
    # a late copy hears what became of the sample
    assert store.deliver(sample(b, 0), 33.0) == "trained"


def test_a_second_answer_for_a_sample_is_a_duplicate_and_a_copy_hears_the_same() -> None:
    store = make(1, 1, 2)
    (a,) = store.grant("g", 1, 2, 0.0)
    store.expire(30.0)
    (b,) = store.grant("h", 1, 2, 30.0)
    assert store.deliver(sample(a, 0), 31.0) == "accepted"
    assert store.deliver(sample(b, 0, reward=3.0), 31.0) == "duplicate"
    assert store.deliver(sample(a, 0), 32.0) == "accepted"
    assert store.deliver(sample(b, 0), 32.0) == "duplicate"
    lines = store.sum_ledger()
    assert (
        lines["duplicate"]["tokens"],
        lines["duplicate"]["mean_reward"],
        lines["left_over"]["tokens"],
    ) == (4, 3.0, 4)
    lease = store.alive[0].lease
    assert lease is not None and lease.todo == {1}


def test_what_is_remembered_of_gone_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (state_module.REMEMBERED, state_module.STRAYS) == (200_000, 20_000)
    monkeypatch.setattr(state_module, "REMEMBERED", 3)
    monkeypatch.setattr(state_module, "STRAYS", 2)
    store = make(9, 1, 1, 99)
    tickets = store.grant("g", 1, 6, 0.0)
    for n, t in enumerate(tickets):
        train(store, n, t)
        store.retire_batches(n + 1)
    assert list(store.gone) == [(n, 0, tickets[n].attempt) for n in (3, 4, 5)]
    assert list(store.strays) == [(n, tickets[n].attempt) for n in (4, 5)]
    assert store.deliver(sample(tickets[5], 0), 1.0) == "trained"
    assert store.deliver(sample(tickets[0], 0), 1.0) == "duplicate"


def test_the_third_failure_abandons_a_group_that_nobody_composed() -> None:
    store = make(1, 1, 2, error_budget=99.0)
    for n in (1, 2, 3):
        (t,) = store.grant("g", 1, 1, 0.0)
        assert t.ticket == 0
        if n == 1:
            assert store.deliver(sample(t, 1, reward=0.5), 0.0) == "accepted"
        assert store.deliver(sample(t, 0, failed="data: no"), 0.0) == "failed"
        assert (0 in store.alive) == (n < 3)
    lines = store.sum_ledger()
    got = (lines["failed"]["tokens"], lines["failed"]["samples"], lines["failed"]["mean_reward"])
    assert got == (12, 3, 0)
    assert (lines["abandoned"]["tokens"], lines["abandoned"]["mean_reward"]) == (4, 0.5)
    assert store.stored_bytes == 0
    assert store.failures == {"data": 3} and store.deliver(sample(t, 1), 0.0) == "duplicate"
    assert store.grant("g", 1, 1, 0.0)[0].ticket == 1


@pytest.mark.parametrize("kind", ["data", "machinery"])
def test_a_commit_gives_each_kind_of_failure_its_whole_budget_again(kind: str) -> None:
    store = make(0, 1, 2, error_budget=1.0, machinery_budget=1.0)
    for number in range(2):  # twice what the budget holds, and a batch between
        (failing,) = store.grant("g", 1, 4, 0.0)
        for n in (0, 1):
            assert store.deliver(sample(failing, n, failed=f"{kind}: x"), 0.0) == "failed"
        (again,) = store.grant("g", 1, 4, 1.0)
        assert again.ticket == failing.ticket == number
        train(store, number, again)
        assert store.failed_samples == store.failed_machinery == 0
    assert store.failures == {kind: 4}


def resumed(
    store: Store, epoch: int, number: int, ring: list[tuple[Label, str]], **more: Any
) -> bool:
    return hello(store, epoch, number, ring=ring, **{"k": 2, "origin": 1, **more})


def test_a_ring_of_a_resumed_learner_names_the_same_policies() -> None:
    """Weights held for injection are those of the life before where the digest says so; others are
    branches of their own."""
    store = make(4, 1, 1)
    for n, t in enumerate(store.grant("g", 1, 4, 0.0)):
        train(store, n, t)
    assert resumed(store, 2, 3, [(Label(2, 1), "d1"), (Label(2, 2), "else")], k=7)
    tree = store.tree
    assert tree.compute_lag(Label(2, 1), Label(1, 1), 1) == 0
    assert tree.get_digest(Label(2, 1)) == "d1"
    # a child of the version before it
    assert tree.get_digest(Label(2, 2)) == "else"
    assert tree.compute_lag(Label(2, 2), Label(2, 1), 1) == 1
    assert tree.compute_lag(Label(2, 2), Label(1, 2), 2) == 2
    got = tree.compute_lag(Label(2, 3), Label(1, 3), 3)
    assert got == 0  # its parent is the one that the hello names
    assert (store.epoch, store.max_lag, store.committed, store.policy) == (2, 7, 3, Label(2, 3))
    assert store.source is not None and store.source.epoch == 2
    # the same again; an older one is fenced
    assert resumed(store, 2, 3, []) and not resumed(store, 1, 3, [])


def test_a_hello_whose_parent_nobody_knows_hangs_on_its_own_ring() -> None:
    store = Store(StoreSettings(1, 1, 9, SamplingSettings()), prompt)
    assert resumed(store, 2, 3, [(Label(2, 1), "r1"), (Label(2, 2), "r2")], digest="r3")
    assert [store.tree.compute_lag(Label(2, n), Label(2, 3), 3) for n in (1, 2, 3)] == [2, 1, 0]
    assert store.base == store.committed == 3


def test_a_rollback_gives_the_same_batches_and_ends_the_leases() -> None:
    store = make(4, 1, 1)
    tickets = store.grant("g", 1, 5, 0.0)
    for n in range(3):
        train(store, n, tickets[n])
    assert sorted(store.retained) == [0, 1, 2] and list(store.alive) == [3, 4]
    assert store.alive[3].lease is not None and resumed(store, 2, 1, [])
    assert list(store.alive) == [1, 2, 3, 4] and sorted(store.retained) == [0]
    assert store.committed == 1 and store.alive[3].lease is None
    groups, _ = store.ask(2, 1)
    assert [g.ticket for g in groups] == [1] and store.active == 2
    # it has not seen what the learner of epoch 2 was given
    assert not resumed(store, 3, 1, [], origin=1)
    assert store.ask(2, 0) == ([], None) and store.commit(0, Label(2, 1), "x") is False


def test_evaluations_start_over_with_a_resumed_learner() -> None:
    store = make(4, 1, 1, steps=3, evaluations=evaluations(every=1))
    first = store.grant("g", 1, 2, 0.0)
    assert all(t.ticket >= EVAL_BASE for t in first)
    assert store.list_pinned_versions() == [Label(1, 0)] and store.leases.count() == 2
    assert resumed(store, 2, 0, [], origin=0) and store.leases.count() == 0
    again = store.grant("g", 1, 2, 0.0)
    assert [t.exact_version for t in again] == [Label(2, 0)] * 2
    assert store.list_pinned_versions() == [Label(2, 0)]
    store.deliver(sample(again[0], 0), 0.0)
    assert store.deliver(sample(first[1], 0, (Label(1, 0), 4)), 0.0) == "duplicate"


def test_an_ask_says_what_it_waits_for() -> None:
    store = make(2, 2, 2)
    assert store.ask(1, 1) == ([], BatchWait("batch 0 to be composed"))
    reason = "2 more groups: no generator has their tickets yet"
    assert store.ask(1, 0) == ([], BatchWait(reason, "generators"))
    a, b = store.grant("gen", 1, 4, 0.0)
    write(store, a)
    assert store.ask(1, 0) == ([], BatchWait("ticket 1: 2 samples at gen", "gen", 1))
    store.deliver(sample(b, 1), 0.0)
    assert store.ask(1, 0) == ([], BatchWait("ticket 1: 1 samples at gen", "gen", 1))
    store.expire(100.0)
    assert store.ask(1, 0) == ([], BatchWait("ticket 1: 1 samples to be granted again"))
    before = store.changes
    (c,) = store.grant("gen", 1, 1, 0.0)
    write(store, c)
    groups, why = store.ask(1, 0)
    assert [g.ticket for g in groups] == [0, 1] and why is None and store.changes > before
    done = store.changes
    assert store.ask(1, 0)[0] == groups and store.changes == done  # asked again: nothing happened
    late = make(math.inf, 3, 1)
    write(late, late.grant("g", 1, 1, 0.0)[0])
    late.grant("h", 1, 1, 0.0)
    assert late.ask(1, 0) == ([], BatchWait("2 more groups: 1 at h", "h"))
    late.grant("i", 1, 1, 0.0)
    assert late.ask(1, 0) == ([], BatchWait("2 more groups: 1 at h, 1 at i", "h"))


def test_the_freshest_answers_train_first() -> None:
    """Two versions on, the groups of version 0 are two behind, one has a token of version 1;
    completion decides among equals."""
    store = make(9, 1, 1, 9, on_exceed="mask", order="freshest")
    t = store.grant("g", 1, 5, 0.0)
    for n in (0, 1):
        train(store, n, t[n])
    store.deliver(sample(t[2], 0, (Label(1, 0), 4)), 0.0)
    store.deliver(sample(t[3], 0, (Label(1, 2), 4)), 0.0)
    store.deliver(sample(t[4], 0, (Label(1, 2), 2), (Label(1, 1), 2)), 0.0)
    order = []
    for n in (2, 3, 4):
        (g,) = store.ask(1, n)[0]
        order.append(g.ticket)
        store.commit(n, Label(1, n + 1), f"d{n + 1}")
    assert order == [3, 4, 2]
    plain = make(9, 1, 1, 9, on_exceed="mask")
    t = plain.grant("g", 1, 3, 0.0)
    for i in (2, 0, 1):
        write(plain, t[i])
    assert [plain.ask(1, 0)[0][0].ticket] == [2]


def test_a_batch_says_what_it_holds_and_what_a_new_buffer_must_know() -> None:
    store = make(9, 2, 1, 9, on_exceed="mask")
    t = store.grant("g", 1, 6, 0.0)
    for i in (0, 3):
        write(store, t[i])
    train(store, 0)
    store.deliver(sample(t[2], 0, (Label(1, 0), 3), (Label(1, 1), 1), length=4, reward=2.0), 0.0)
    write(store, t[5])
    assert store.ask(1, 1)[0]
    batch = store.make_batch(1)
    assert (batch.epoch, batch.number, [s.ticket for s in batch.samples]) == (1, 1, [2, 5])
    assert batch.lags == [1, 1] and batch.token_lags == [[(0, 3, 1), (3, 4, 0)], [(0, 4, 1)]]
    assert batch.in_flight == [1, 1] and batch.next_ticket == 1 and batch.trained_above == [2, 3, 5]
    assert {*store.comps[0]} == {0, 3} and batch.ledger["trained"]["tokens"] == 16
    assert batch.ledger["trained"]["mean_reward"] == (1 + 1 + 2 + 1) / 4


def test_masked_and_faded_tokens_are_what_is_past_the_limit() -> None:
    for how, want in (("mask", (3, 0.0)), ("downweight", (0, 3 * 0.5 + 2 * (1 - math.sqrt(0.5))))):
        store = make(9, 1, 1, 9, on_exceed=how, half_life=2.0)
        t = store.grant("g", 1, 4, 0.0)
        for n in (1, 2, 3):
            train(store, n - 1, t[n])
        store.max_lag = 1 if how == "downweight" else 2
        # lags 3, 2, 1
        store.deliver(sample(t[0], 0, (Label(1, 0), 3), (Label(1, 1), 2), (Label(1, 2), 1)), 0.0)
        (g,) = store.ask(1, 3)[0]
        (s,) = g.list_stored_samples()
        assert (s.masked, pytest.approx(s.faded)) == want and store.commit(3, Label(1, 4), "d4")
        g.samples.insert(0, None)  # one that is to be generated again
        assert judge(store, [g], 3) == [[(0, 3, 3), (3, 5, 2), (5, 6, 1)]]
        g.samples.pop(0)
        lines = store.sum_ledger()
        assert lines["trained"]["tokens"] == 12 + 6 - want[0]
        assert lines["masked_stale"]["tokens"] == want[0]
        assert lines["trained"].get("faded_upto_8", 0.0) == pytest.approx(want[1])


def test_versions_that_tickets_may_name_are_kept() -> None:
    store = make(3, 1, 1, inject=2)
    for n in range(4):
        (t,) = store.grant("g", 1, 1, 0.0)
        assert t.exact_version == Label(1, max(0, n - 2))
        train(store, n, t)
    assert store.list_pinned_versions() == [Label(1, 2), Label(1, 3), Label(1, 4)]
    assert make(3, 1, 1, inject=[0.5, 0.5]).list_pinned_versions() == [Label(1, 0)]
    assert make().list_pinned_versions() == []
    drawn = make(3, 1, 1, inject=[0.25, 0.25, 0.5])
    for n in range(4):
        (t,) = drawn.grant("g", 1, 1, 0.0)
        train(drawn, n, t)
    assert drawn.list_pinned_versions() == [Label(1, 2), Label(1, 3), Label(1, 4)]


def test_bytes_are_counted_while_a_sample_is_stored() -> None:
    """11 bytes a token (id, log-probability, mask and what goes with them) for a prompt of none."""
    store = make(4, 1, 2)
    a, b = store.grant("g", 1, 4, 0.0)
    store.deliver(sample(a, 0), 0.0)
    assert store.stored_bytes == 44
    store.deliver(sample(a, 1, length=8), 0.0)
    assert store.stored_bytes == 44 + 88
    train(store, 0)
    assert store.stored_bytes == 132
    store.retire_batches(5)  # no further than what is committed
    assert store.stored_bytes == 0 and store.base == 1
    store.deliver(sample(b, 0), 0.0)
    store.remove_group(store.alive[1], "filtered")
    assert store.stored_bytes == 0 and store.sum_ledger()["filtered"]["tokens"] == 4
    assert 1 not in store.alive


def test_bytes_of_what_is_dropped_or_orphaned_are_free_again() -> None:
    store = make(9, 1, 1, 9, on_exceed="drop")
    t = store.grant("g", 1, 4, 0.0)
    train(store, 0, t[2])
    for i in (0, 1):
        store.deliver(sample(t[i], 0, length=8), 0.0)
    assert store.stored_bytes == 44 + 88 + 88
    store.max_lag = 0
    # both are of version 0, at number 1
    assert store.ask(1, 1)[0] == [] and store.stored_bytes == 44
    paced = make(2, 1, 1, 9)
    t = paced.grant("g", 1, 3, 0.0)
    for n in (0, 1):
        train(paced, n, t[n])
    paced.deliver(sample(t[2], 0, length=8), 0.0)  # of version 0 of the first life
    assert paced.stored_bytes == 44 + 44 + 88 and resumed(paced, 2, 2, [], k=1)
    assert paced.ask(2, 2) == ([], BatchWait("ticket 2: 1 samples to be granted again"))
    assert paced.stored_bytes == 88 and paced.completions == 3
    for unused, why in (
        ([(0, 0)] * 3, "has 1 samples; its commit has counts of unused tokens for 3"),
        ([(0, 0)], "is committed but was never complete: ticket 2 lacks samples"),
    ):
        with pytest.raises(BadMessage, match=f"^batch 2 {why}$"):
            checks.check_commit(paced, 2, Label(2, 3), unused)
    assert paced.sum_ledger()["orphaned"]["tokens"] == 8


def test_the_ledger_of_a_checkpoint_calls_lost_what_it_would_lose() -> None:
    store = make(4, 1, 1)
    a, b, c = store.grant("g", 1, 3, 0.0)
    train(store, 0, a)
    write(store, b)
    store.renew("g", 1, [(c.ticket, c.attempt, 3)], 1.0)
    assert store.sum_ledger()["left_over"]["tokens"] == 7
    assert store.sum_ledger()["trained"]["tokens"] == 4
    kept = store.make_ledger({0, 1}, "lost_with_process").compute_totals()
    assert (
        kept["trained"]["tokens"],
        kept["lost_with_process"]["tokens"],
        kept["left_over"]["tokens"],
    ) == (8, 3, 0)
    kept = store.make_ledger({0}, "lost_with_process").compute_totals()
    assert (
        kept["trained"]["tokens"],
        kept["lost_with_process"]["tokens"],
        kept["left_over"]["tokens"],
    ) == (4, 7, 0)


def test_a_sample_past_the_limit_in_its_own_epoch_is_a_bug_and_is_called_one() -> None:
    store = make(9, 1, 1, 9)
    t = store.grant("g", 1, 3, 0.0)
    for n in (0, 1):
        train(store, n, t[n])
    store.deliver(sample(t[2], 0, (Label(1, 0), 4)), 0.0)
    store.max_lag = 1
    with pytest.raises(ProtocolError) as e:
        store.ask(1, 2)
    assert str(e.value) == (
        "ticket 2, sample 0 would train 2 versions late in batch 2, past the limit 1: this is "
        "a bug in asyncrl; keep the run directory and report it"
    )


def test_a_learner_that_is_further_on_than_the_buffer_has_trained_what_lies_here() -> None:
    """Two batches are committed and one is composed; the learner comes with number 5, next ticket 3
    and ticket 4 trained above it."""
    store = make(9, 1, 1, 9)
    t = store.grant("g", 1, 6, 0.0)
    for n in (0, 1):
        train(store, n, t[n])
    for n in (2, 3, 4):
        write(store, t[n])
    label, source = Label(2, 5), WeightsSource(2, "h", "", "")
    totals = {"trained": {"tokens": 100.0, "samples": 10.0, "mean_length": 10, "mean_reward": 0.5}}
    assert store.follow_learner(
        LearnerHello(
            1, "run", 2, label, None, "d5", 3, 1, 9, source, [], ledger=totals, trained_above=[4, 7]
        )
    )
    values = (store.base, store.committed, store.comps, store.composed, store.retained)
    assert values == (5, 5, [], set(), {}) and list(store.alive) == [3, 5] and store.cursor == 6
    assert store.skip == {7} and store.stored_bytes == 44
    lines = store.sum_ledger()
    assert lines["trained"]["tokens"] == 100 + 8 and lines["orphaned"]["tokens"] == 8
    assert lines["left_over"]["tokens"] == 4 and store.deliver(sample(t[1], 0), 1.0) == "trained"
    assert [x.ticket for x in store.grant("g", 1, 3, 1.0)] == [5, 6, 8] and store.skip == set()


def test_versions_far_behind_and_unnamed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two behind the oldest checkpoint are kept; further back only what a stored answer was written
    by and what a ticket that is out was granted at."""
    monkeypatch.setattr(store_module, "VERSIONS", 2)
    store = make(math.inf, 1, 2, 99)
    for n in range(12):
        if n in (1, 4):
            (waits,) = store.grant("g", 1, 1, 0.0)  # out for good
            if n == 1:
                store.deliver(sample(waits, 0), 0.0)  # half of it written, by version 1
                store.end_sessions("g", 2)
                (waits,) = store.grant("g", 2, 1, 0.0)
                assert waits.samples == [1]
        (t,) = store.grant("g", 2, 1, 0.0)
        train(store, n, t)
        store.retire_batches(n + 1)
    labels = sorted(store.tree._policies)
    assert labels[:2] == [Label(1, 1), Label(1, 4)] and labels[-1] == Label(1, 12)
    assert all(x.number >= 12 - 2 * 2 - 1 for x in labels[2:]) and len(labels) <= 2 * 2 + 2
    assert store.tree.compute_lag(Label(1, 1), Label(1, 12), 12) == 11
    assert store.tree.compute_lag(Label(1, 4), Label(1, 12), 12) == 8


def test_versions_trained_since_the_checkpoint_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "VERSIONS", 2)
    store = make(math.inf, 1, 2, 99)
    waits: Ticket | None = None
    for n in range(14):
        if n == 1:
            (waits,) = store.grant("g", 1, 1, 0.0)
            store.deliver(sample(waits, 0), 0.0)
        if n == 10 and waits is not None:
            store.deliver(sample(waits, 1), 0.0)
        (t,) = store.grant("g", 1, 1, 0.0)
        train(store, n, t)
        if n < 10 or n == 12:
            store.retire_batches(n + 1)
        assert (Label(1, 1) in store.tree) == (n < 13), n
        assert (waits is not None and waits.ticket in store.retained) == (10 <= n < 12), n


def test_a_late_samples_tokens_that_were_set_aside_are_counted_once() -> None:
    store = make(1, 1, 1)
    (a,) = store.grant("g", 1, 1, 0.0)
    store.expire(30.0)
    (b,) = store.grant("h", 1, 1, 30.0)
    train(store, 0, b)
    store.retire_batches(1)
    late = sample(a, 0)
    late.aside = 1
    assert store.deliver(late, 31.0) == "duplicate"
    line = store.sum_ledger()["set_aside"]
    assert (line["samples"], line["tokens"]) == (1, 1)


def test_each_span_has_the_largest_limit_of_a_grant_that_permits_it() -> None:
    store = make(9, 1, 1, 9)
    (t,) = store.grant("g", 1, 1, 0.0)
    group = store.alive[t.ticket]
    made = sample(t, 0, (Label(1, 0), 2), (Label(1, 2), 1), (Label(2, 0), 1))

    def limits(most: float = 9.0, adopted: tuple[int, ...] = ()) -> list[float]:
        store.max_lag = most
        made.adopted = [(attempt, 1) for attempt in adopted]
        return compute_announced_limits(store, group, StoredSample(made, 0))

    made.attempt = 5
    group.grants = {4: Grant(Label(1, 0), False, 3.0)}
    assert limits() == [9.0] * 3, "no grant of its own"
    group.grants[5] = Grant(Label(1, 0), False, 4.0)
    assert limits() == [4.0] * 3 and limits(2.0) == [2.0] * 3
    # of two grants each permits its own versions
    group.grants[4] = Grant(Label(1, 2), False, 6.0)
    assert limits(adopted=(4,)) == [4.0, 6.0, 9.0] and limits(5.0, (4,)) == [4.0, 5.0, 5.0]
    group.grants[4] = Grant(Label(1, 2), True, 6.0)
    assert limits(adopted=(4,)) == [4.0, 6.0, 9.0]
    assert limits(adopted=(3,)) == [4.0] * 3, "the other grant is forgotten: one limit for all"
    group.grants[5] = Grant(Label(1, 0), False)
    assert limits() == [9.0] * 3
    group.grants.clear()
    assert limits(adopted=(4,)) == [9.0] * 3
