"""The store by hand: one rule of the protocol per test, with a clock that the test moves."""

from typing import Any

import msgspec
import pytest
import torch
from store_kit import hello, judged, make, prompt, sample, stale, total, train, write

from asyncrl.algorithms import advantages
from asyncrl.contract.errors import AsyncrlError, BadMessage
from asyncrl.contract.messages import EVAL_BASE, Prompt, SamplingSettings, Ticket, Trajectory
from asyncrl.contract.versions import Label
from buffer.batches import BatchWait
from buffer.evaluation import EvaluationPlan, Evaluations
from buffer.groups import StoreSettings
from buffer.state import StoreSnapshot
from buffer.store import EQUAL, Store


def test_tickets_go_out_while_the_limit_leaves_room() -> None:
    for k, batch in ((0, 2), (1, 2), (3, 1)):
        store = make(k, batch)
        assert [t.ticket for t in store.grant("g", 1, 99, 0.0)] == list(range((k + 1) * batch))
        assert not store.grant("g", 1, 99, 0.0)
    assert len(make(8, steps=2).grant("g", 1, 9, 0.0)) == 2, "two batches are left to train"


def test_a_commit_frees_room_and_a_lease_does_not() -> None:
    store = make(0)
    (t,) = store.grant("g", 1, 9, 0.0)
    write(store, t)
    assert store.ask(1, 0)[0] and not store.grant("g", 1, 9, 0.0)
    store.commit(0, Label(1, 1), "d1")
    (t,) = store.grant("g", 1, 9, 0.0)
    assert (t.ticket, t.min_version) == (1, Label(1, 1))


def test_only_groups_with_a_lease_get_a_new_one_in_a_later_process() -> None:
    store = make(3, 1, 1, lease_s=10.0)
    delivered, _ = store.grant("g", 1, 2, 0.0)
    write(store, delivered)
    store.renew_all_leases(500.0)
    ends = [group.lease and group.lease.expires for group in store.alive.values()]
    assert ends == [None, 510.0] and store.expire(509.0) == 0 and store.expire(511.0) == 1


def test_a_lease_that_ends_goes_out_again_with_the_next_attempt() -> None:
    store = make(0, 1, 2, lease_s=10.0)
    (t,) = store.grant("a", 1, 9, 0.0)
    store.deliver(sample(t, 0), 1.0)
    store.renew("a", 1, [(0, t.attempt, 7)], 5.0)
    store.renew("a", 1, [(0, t.attempt, 7)], 9.0)  # no progress: the lease does not move
    assert store.expire(14.9) == 0 and store.expire(15.1) == 1
    (again,) = store.grant("b", 1, 9, 15.1)
    assert (again.ticket, again.samples, again.attempt) == (0, [1], t.attempt + 1)
    assert store.deliver(sample(again, 1), 16.0) == "accepted"
    assert store.deliver(sample(t, 1, length=5), 16.0) == "duplicate"  # the slow one, after all
    assert store.deliver(sample(t, 1, length=5), 16.0) == "duplicate"  # told again, counted once
    assert total(store) == 4 + 4 + 5


def test_batches_come_in_ticket_order_and_wait_for_the_oldest() -> None:
    store = make(1, 2)
    a, b, c, _ = store.grant("g", 1, 9, 0.0)
    write(store, c)
    write(store, b)
    groups, why = store.ask(1, 0)
    assert not groups and why == ("ticket 0: 1 samples at g", "g", 0)
    write(store, a)
    assert [g.ticket for g in store.ask(1, 0)[0]] == [0, 1]


def test_a_leased_batch_comes_again_the_same_and_late_asks_are_ignored() -> None:
    store = make(1, 1)
    a, b = store.grant("g", 1, 9, 0.0)
    write(store, a)
    write(store, b)
    assert [g.ticket for g in store.ask(1, 0)[0]] == [g.ticket for g in store.ask(1, 0)[0]] == [0]
    assert store.ask(1, 2) == ([], BatchWait("batch 1 to be composed"))
    train(store, 0)
    assert store.ask(1, 0) == ([], None) and store.commit(0, Label(1, 1), "d1") is False
    store.ask(1, 1)
    write(store, store.grant("g", 1, 9, 0.0)[0])
    # the commit before it is on its way
    assert store.ask(1, 2)[0] and store.commit(2, Label(1, 3), "d3") is None


def test_unknown_weights_are_refused_with_both_names() -> None:
    store = make()
    (t, *_) = store.grant("g", 1, 9, 0.0)
    with pytest.raises(BadMessage, match=r"weights 1\.7 .*known are 1\.0"):
        store.deliver(sample(t, 0, (Label(1, 7), 3)), 0.0)
    with pytest.raises(BadMessage, match="digest other at the generator and d0 at the learner"):
        store.deliver(sample(t, digest="other"), 0.0)


def test_lag_is_the_oldest_token_and_splits_at_delivery() -> None:
    store = make(2)
    a, b, c = store.grant("g", 1, 9, 0.0)
    train(store, 0, a)
    # delivered at 1: one version in flight
    store.deliver(sample(b, 0, (Label(1, 0), 2), (Label(1, 1), 3)), 0.0)
    train(store, 1)
    write(store, c)  # all by version 0, delivered at 2
    assert store.ask(1, 2)[0]
    batch = store.make_batch(2)
    assert (batch.lags, batch.in_flight, batch.token_lags) == ([2], [2], [[(0, 4, 2)]])
    store = make(2)
    a, b, c = store.grant("g", 1, 9, 0.0)
    for t in (a, b, c):
        write(store, t)
    train(store, 0)
    assert store.ask(1, 1)[0]
    batch = store.make_batch(1)
    assert (batch.lags, batch.in_flight) == ([1], [0])


def test_a_group_without_spread_leaves_and_frees_its_place() -> None:
    store = make(0, 1, 2, filter_no_spread=True)
    (t,) = store.grant("g", 1, 2, 0.0)
    assert write(store, t) == ["accepted", "accepted"]
    (t,) = store.grant("g", 1, 2, 0.0)
    assert t.ticket == 1 and not store.grant("g", 1, 2, 0.0)
    assert store.sum_ledger()["filtered"] == {
        "tokens": 8,
        "samples": 2,
        "mean_length": 4.0,
        "mean_reward": 1.0,
        "upto_4": 8,
    }
    store.deliver(sample(t, 0, reward=0.0), 0.0)
    store.deliver(sample(t, 1, reward=1.0), 0.0)
    assert [g.ticket for g in store.ask(1, 0)[0]] == [1]


@pytest.mark.parametrize(
    ("other", "what"), [(0.7 * (1 + 5e-7), "filtered"), (0.7 * (1 + 2e-6), "left_over")]
)
def test_rewards_apart_by_rounding_are_no_spread_for_the_filter(other: float, what: str) -> None:
    store = make(0, 1, 2, filter_no_spread=True)
    (t,) = store.grant("g", 1, 2, 0.0)
    store.deliver(sample(t, 0, reward=0.7), 0.0)
    store.deliver(sample(t, 1, reward=other), 0.0)
    assert {name for name, line in store.sum_ledger().items() if line["tokens"]} == {what}
    both = torch.tensor([0.7, other], dtype=torch.float64)
    got = bool(advantages.find_zero_variance(both, torch.zeros(2, dtype=torch.long)).all())
    assert got == (what == "filtered") and EQUAL == advantages.EQUAL


def test_a_group_in_a_composed_batch_is_never_filtered() -> None:
    store = make(1, 1, 2, filter_no_spread=True)
    a, b = store.grant("g", 1, 4, 0.0)
    for t in (a, b):
        store.deliver(sample(t, 0, reward=0.0), 0.0)
        store.deliver(sample(t, 1, reward=1.0), 0.0)
    train(store, 0)
    assert store.ask(1, 1)[0] and hello(store, 2, 1, k=0, origin=1, digest="d1")
    # version 0 wrote ticket 1, the limit is 0 now: both samples are orphans
    assert store.ask(2, 1)[0] == []
    (t,) = store.grant("g", 2, 2, 0.0)
    assert write(store, t) == ["accepted", "accepted"]  # without spread this time
    assert [g.ticket for g in store.ask(2, 1)[0]] == [1]


def test_a_resumed_learner_gets_its_batches_again_and_orphans_are_written_anew() -> None:
    store = make(1)
    for n in range(3):
        for t in store.grant("g", 1, 9, 0.0):
            store.deliver(sample(t, 0, (Label(1, n), 4)), 0.0)
        train(store, n)
    # batches 0, 1, 2 hold tickets 0, 1, 2, written by versions 0, 0, 1; ticket 3 by version 2.
    # Resume at 1, k = 0.
    assert hello(store, 2, 1, k=0, origin=1, digest="d1")
    assert store.committed == 1 and store.policy == Label(2, 1)
    groups, why = store.ask(2, 1)
    # ticket 1 is one version old; the limit is 0 now
    assert not groups and "to be granted again" in why.reason and why.process == "buffer"
    (t,) = store.grant("g", 2, 9, 0.0)
    assert (t.ticket, t.min_version) == (1, Label(2, 1))
    train(store, 1, t)
    assert store.ask(2, 2)[0] == []  # batch 2 is ticket 2 again, one version old as well
    (t,) = store.grant("g", 2, 9, 0.0)
    assert (t.ticket, t.min_version) == (2, Label(2, 2))
    train(store, 2, t)
    assert [
        store.sum_ledger()[line]["tokens"] for line in ("trained", "orphaned", "left_over")
    ] == [12, 8, 4]
    assert total(store) == 24


def test_lag_across_a_branch_counts_both_sides() -> None:
    store = make(4)
    for n in range(2):
        store.deliver(sample(store.grant("g", 1, 1, 0.0)[0], 0, (Label(1, n), 4)), 0.0)
        train(store, n)
    late = store.grant("g", 1, 1, 0.0)[0]
    store.deliver(sample(late), 0.0)  # by (1, 2)
    assert hello(store, 2, 1, k=4, origin=1, digest="d1")
    assert store.ask(2, 1)[0]
    # ticket 1, written by (1, 1), which is the policy resumed from
    assert store.make_batch(1).lags == [0]
    assert store.commit(1, Label(2, 2), "another update")
    assert store.ask(2, 2)[0]
    # one version back on the dead branch, one forward on ours
    assert store.make_batch(2).lags == [2]


def test_old_learners_and_those_behind_what_is_retired_are_fenced() -> None:
    store = make(1)
    for n in range(2):
        train(store, n, store.grant("g", 1, 1, 0.0)[0])
    store.retire_batches(2)
    assert not hello(store, 2, 1, origin=1)  # version 1 is retired
    # epoch 1 has asked since: it was not resumed from its directory
    assert not hello(store, 2, 2, origin=0)
    assert hello(store, 2, 2, origin=1) and hello(store, 2, 2, origin=1)
    assert not hello(store, 1, 2, origin=1)


def test_storage_is_freed_behind_the_oldest_checkpoint() -> None:
    store = make(1)
    for n in range(3):
        t = store.grant("g", 1, 1, 0.0)[0]
        train(store, n, t)
    before = total(store)
    assert len(store.retained) == 3
    store.retire_batches(2)
    assert len(store.retained) == 1 and store.base == 2 and total(store) == before == 12
    # a late copy of what a kept batch holds
    assert store.deliver(sample(t), 0.0) == "accepted" and total(store) == before
    got = store.deliver(Trajectory(0, 0, 1, b"", b"", b"", b"", [], 0.0, {}, "stop", 1.0), 0.0)
    assert got == "trained"


def test_completion_order_carries_what_was_trained_above_the_cursor() -> None:
    store = make(2, on_exceed="mask")
    _, b, _ = store.grant("g", 1, 9, 0.0)
    write(store, b)
    groups, _ = store.ask(1, 0)
    batch = store.make_batch(0)
    assert ([g.ticket for g in groups], batch.next_ticket, batch.trained_above) == ([1], 0, [1])
    fresh = Store(StoreSettings(1, 1, 9, SamplingSettings(), on_exceed="mask"), prompt)
    assert hello(fresh, 2, 1, k=2, origin=1, next_ticket=0, trained_above=[1])
    assert [t.ticket for t in fresh.grant("g", 1, 9, 0.0)] == [0, 2, 3]


def test_a_lease_lasts_while_its_answers_are_judged() -> None:
    """Written answers grow no more; their rewards have deadlines of their own."""
    store = make(3, 2, 2, lease_s=10.0)
    judged, silent = store.grant("a", 1, 4, 0.0)
    store.renew("a", 1, [(0, judged.attempt, 8), (1, silent.attempt, 8)], 1.0)
    store.renew("a", 1, [(1, silent.attempt, 8)], 9.0, [(0, judged.attempt), (7, 99)])
    assert store.expire(11.5) == 1, "only the one of which nothing is said, nor grows"
    (again,) = store.grant("b", 1, 1, 11.5)
    assert again.ticket == 1
    store.renew("a", 1, [], 12.0, [(1, silent.attempt)])
    assert store.alive[1].lease is not None and store.alive[1].lease.expires == 21.5, (
        "the old attempt holds no lease any more"
    )
    assert [store.deliver(sample(judged, i), 18.0) for i in range(2)] == ["accepted", "accepted"]
    assert store.expire(19.1) == 0 and store.sum_ledger()["lost_with_process"]["tokens"] == 8


def test_a_generator_that_judges_does_not_renew_what_it_should_write() -> None:
    store = make(3, 2, 1, lease_s=10.0)
    judged, unbegun = store.grant("a", 1, 2, 0.0)
    store.renew("a", 1, [(1, unbegun.attempt, 0)], 9.0, [(0, judged.attempt)])  # a hung engine
    assert store.expire(11.0) == 1 and store.alive[0].lease is not None
    assert store.alive[1].lease is None


def test_failed_samples_are_written_again_within_the_budget_of_their_kind() -> None:
    """Half of 4 samples may fail by data, a quarter by machinery; a batch begins both anew."""
    for kind, allowed, key in (
        ("data: nan", 2, "error_budget"),
        ("machinery: died", 1, "machinery_budget"),
    ):
        store = make(0, 1, 4, error_budget=0.5, machinery_budget=0.25)
        other = "machinery: died" if kind.startswith("data") else "data: nan"
        (t,) = store.grant("g", 1, 9, 0.0)
        # the other kind leaves this one's budget whole
        assert store.deliver(sample(t, 0, failed=other), 0.0) == "failed"
        for s in (1, 2, 3):
            store.deliver(sample(t, s), 0.0)
        (t,) = store.grant("g", 1, 9, 0.0)
        assert t.samples == [0]
        train(store, 0, t)
        (t,) = store.grant("g", 1, 9, 0.0)
        for s in range(allowed):
            assert store.deliver(sample(t, s, failed=kind), 0.0) == "failed"
        with pytest.raises(
            AsyncrlError,
            match=rf"{allowed + 1} samples failed .*reward.{key} allows .* of 4.*{kind}",
        ):
            store.deliver(sample(t, allowed, failed=kind), 0.0)
        assert store.failures == {kind.partition(":")[0]: allowed + 1, other.partition(":")[0]: 1}


def test_drop_sends_a_stale_group_again_and_abandons_it_the_third_time() -> None:
    store, (a, _) = stale("drop")
    attempts = [a.attempt]
    write(store, a)
    for drops in (1, 2, 3):
        assert store.ask(1, 2)[0] == [] and (drops == 3 or store.alive[0].drops == drops)
        if drops < 3:
            (again,) = store.grant("g", 1, 1, 0.0)
            assert again.ticket == 0
            attempts.append(again.attempt)
            # still too old, as an answer that is always late
            store.deliver(sample(again, 0, (Label(1, 0), 4)), 0.0)
    assert 0 not in store.alive and attempts == sorted(set(attempts))
    assert store.sum_ledger()["dropped_stale"]["tokens"] == 8
    assert store.sum_ledger()["abandoned"]["tokens"] == 4
    assert store.sum_ledger()["abandoned"]["upto_4"] == 4


def test_without_a_limit_bytes_bound_what_is_alive() -> None:
    store = make(float("inf"), 1, 1, 1000, byte_limit=40)
    tickets = store.grant("g", 1, 50, 0.0)
    assert len(tickets) == 50
    for t in tickets[::-1][:2]:
        write(store, t)  # 4 tokens are 44 bytes
    assert not store.grant("g", 1, 1, 0.0) and [g.ticket for g in store.ask(1, 0)[0]] == [49]
    store.commit(0, Label(1, 1), "d1")
    store.retire_batches(1)
    train(store, 1)
    store.retire_batches(2)
    assert store.stored_bytes == 0 and store.grant("g", 1, 1, 0.0)


@pytest.mark.parametrize("inject", [0, 1, 2, [0.5, 0.0, 0.5]])
def test_injected_lag_is_exact_after_the_first_batches(inject: int | list[float]) -> None:
    store = make(2, 2, 1, 12, inject=inject)
    seen: list[int] = []
    for n in range(10):
        while tickets := store.grant("g", 1, 1, 0.0):
            assert tickets[0].exact_version is not None
            assert tickets[0].exact_version in store.list_pinned_versions()
            write(store, tickets[0])
        groups, why = store.ask(1, n)
        assert groups, why
        lags = store.make_batch(n).lags
        seen += lags if n >= 2 else []
        assert all(lag <= n for lag in lags)
        store.commit(n, Label(1, n + 1), f"d{n + 1}")
    assert set(seen) == ({inject} if isinstance(inject, int) else {0, 2})


def test_an_abandoned_group_leaves_its_place_to_another_and_the_injected_lag_stays_exact() -> None:
    store = make(2, 2, 1, 12, inject=2, error_budget=9.0)
    seen: list[int] = []
    failing, trained = {5, 9, 14}, []
    late: list[Ticket] = []
    for n in range(10):
        for t in late:  # those behind it are out or written when a group fails for good
            store.deliver(sample(t, 0, failed="data: no"), 0.0)
        late = []
        while tickets := store.grant("g", 1, 99, 0.0):
            for t in tickets:
                first = t.ticket in failing and store.alive[t.ticket].failures == 0
                if first:
                    late.append(t)
                else:
                    store.deliver(
                        sample(t, 0, failed="data: no" if t.ticket in failing else ""), 0.0
                    )
        groups, why = store.ask(1, n)
        assert groups, why
        batch = store.make_batch(n)
        seen += batch.lags if n >= 2 else []
        trained += [g.ticket for g in groups]
        store.commit(n, Label(1, n + 1), f"d{n + 1}")
    assert set(seen) == {2} and store.sum_ledger()["failed"]["samples"] == 9
    assert not failing & set(trained) and len(set(trained)) == 20
    # rolled back: the batches are the same, in the same order
    assert hello(store, 2, 8, k=2, origin=1, digest="d8")
    assert [[g.ticket for g in store.ask(2, n)[0]] or store.comps[n] for n in (8, 9)] == [
        trained[16:18],
        trained[18:20],
    ]


def test_a_resume_at_a_finite_limit_writes_the_orphans_of_what_was_composed_without_one() -> None:
    store = make(float("inf"), steps=6)
    tickets = store.grant("g", 1, 6, 0.0)
    write(store, tickets[3])  # the others are slow
    train(store, 0)
    write(store, tickets[5])
    assert store.ask(1, 1)[0]  # batch 1 is ticket 5, prefetched
    assert hello(store, 2, 1, k=0, origin=1, digest="d1")
    assert store.ask(2, 1)[0] == []  # written at lag 1, the limit is 0 now
    (again,) = store.grant("g", 1, 6, 1.0)
    assert again.ticket == 5
    write(store, again)
    for n in range(1, 6):
        train(store, n)
        for t in store.grant("g", 1, 6, 1.0):
            write(store, t)
    assert store.committed == 6


def test_a_fresh_buffer_that_followed_an_older_checkpoint_trains_nothing_twice() -> None:
    first = make(1)
    batch = []
    for n in range(3):
        write(first, first.grant("g", 1, 1, 0.0)[0])
        assert first.ask(1, n)[0]
        batch.append(first.make_batch(n))
        first.commit(n, Label(1, n + 1), f"d{n + 1}")
    fresh = Store(StoreSettings(1, 1, 9, SamplingSettings()), prompt)
    at = {
        n: {
            "next_ticket": batch[n - 1].next_ticket,
            "ledger": batch[n - 1].ledger,
            "trained_above": batch[n - 1].trained_above,
        }
        for n in (1, 3)
    }
    assert hello(fresh, 2, 1, origin=1, **at[1])
    old = fresh.grant("g", 1, 9, 0.0)
    assert [t.ticket for t in old] == [1, 2]
    write(fresh, old[0])
    fresh.renew("g", 1, [(2, old[1].attempt, 3)], 0.0)
    assert hello(fresh, 3, 3, origin=1, **at[3])
    assert [t.ticket for t in fresh.grant("g", 2, 9, 0.0)] == [3, 4]
    lines = fresh.sum_ledger()
    assert {n: x["tokens"] for n, x in lines.items() if x["tokens"]} == {
        "trained": 12,
        "orphaned": 4,
        "lost_with_process": 3,
    }
    assert fresh.deliver(sample(old[1], length=5), 0.0) == "duplicate"
    assert fresh.sum_ledger()["lost_with_process"]["tokens"] == 0


def test_a_masked_batch_that_is_asked_for_again_stays_as_it_was_handed_out() -> None:
    """After a roll-back the distance to the dead branch may shrink with a commit: what was masked
    stays masked, as the learner trained it."""
    store = make(9, 1, 1, 9, on_exceed="mask")
    tickets = store.grant("g", 1, 4, 0.0)
    train(store, 0, tickets[0])
    train(store, 1, tickets[1])
    store.deliver(sample(tickets[2], 0, (Label(1, 2), 4)), 0.0)
    assert hello(store, 2, 1, k=1, origin=1, digest="d1")
    for n in (1, 2):
        groups, why = store.ask(2, n)
        assert groups, why
    batch = store.make_batch(2)
    assert batch.token_lags == [[(0, 4, 2)]]  # by 1.2, whose update is not known to come again
    assert store.commit(1, Label(2, 2), "d2")  # it does: the same digest, the same policy
    assert store.ask(2, 2)[0] and store.make_batch(2).token_lags == batch.token_lags
    assert store.commit(2, Label(2, 3), "d3") and store.sum_ledger()["masked_stale"]["tokens"] == 4


def test_what_no_step_used_has_lines_of_its_own_and_a_roll_back_takes_them_back() -> None:
    store = make(2, 1, 2, 9)
    for n in range(2):
        write(store, store.grant("g", 1, 2, 0.0)[0], length=6)
        assert store.ask(1, n)[0]
    # sample 0 in no optimizer step, two tokens of sample 1 rejected in all
    assert store.commit(0, Label(1, 1), "d1", [(6, 0), (0, 2)])
    assert store.commit(1, Label(1, 2), "d2", [])

    def lines() -> dict[str, tuple[float, float]]:
        return {
            n: (x["tokens"], x["samples"]) for n, x in store.sum_ledger().items() if x["tokens"]
        }

    assert lines() == {"trained": (4 + 12, 3), "skipped": (6, 1), "rejected": (2, 1)}
    assert total(store) == 24 and store.sum_ledger()["skipped"]["upto_8"] == 6
    assert hello(store, 2, 0, k=2, origin=1) and lines() == {"left_over": (24, 4)}
    # more than it has: all of it
    assert store.ask(2, 0)[0] and store.commit(0, Label(2, 1), "other", [(0, 0), (99, 99)])
    assert lines() == {"trained": (6, 1), "skipped": (6, 1), "left_over": (12, 2)}
    store.retire_batches(1)
    assert lines() == {"trained": (6, 1), "skipped": (6, 1), "left_over": (12, 2)}
    assert total(store) == 24 and store.ask(2, 1)[0]
    for wrong in ([(1, 0)], [(0, 0)] * 3):
        with pytest.raises(BadMessage, match="counts of unused tokens for"):
            store.commit(1, Label(2, 2), "x", wrong)
    assert store.commit(1, Label(2, 2), "x")


def test_masked_tokens_are_masked_before_they_are_skipped() -> None:
    store, (a, _) = stale("mask", k=1)
    store.deliver(sample(a, 0, (Label(1, 0), 3), (Label(1, 1), 2), (Label(1, 2), 1)), 0.0)
    assert store.ask(1, 2)[0] and store.commit(2, Label(1, 3), "d3", [(6, 0)])
    assert store.sum_ledger()["masked_stale"]["tokens"] == 3
    assert store.sum_ledger()["skipped"]["tokens"] == 3


def test_evaluations_start_with_the_run_every_n_versions_and_at_its_end() -> None:
    store = make(0, steps=3, evaluations=evaluations(2, 2, 3, 1, 0.7))
    seen: dict[int, list[str]] = {}
    for n in range(4):
        while tickets := store.grant("g", 1, 1, 0.0):
            (t,) = tickets
            if t.kind == "train":
                write(store, t)
            else:
                assert t.exact_version == Label(1, n) and t.ticket >= EVAL_BASE
                assert t.sampling.temperature == 0.7
                seen.setdefault(n, []).append(t.prompt.split)
                assert judged(store, t, float(t.prompt.id)) == "evaluated"
        if n < 3:
            train(store, n)
    assert {n: sorted(x) for n, x in seen.items()} == {
        0: ["heldout"] * 3 + ["ood"],
        2: ["heldout"] * 2,
        3: ["heldout"] * 3 + ["ood"],
    }
    assert store.evaluations.results["heldout", 0] == {
        "eval/heldout": 1.0,
        "eval/heldout_n": 3,
        "eval/heldout_length": 4.0,
    }
    assert store.evaluations.results["ood", 3]["eval/ood_n"] == 1
    assert not store.evaluations.rounds
    # evaluation has no line in the training ledger
    assert store.sum_ledger()["trained"]["tokens"] == 12 == total(store)


def evaluations(*plan: Any, **more: Any) -> Evaluations:
    return Evaluations(
        EvaluationPlan(*plan, **more), lambda split, i: Prompt(i, split, split=split)
    )


def started(evaluations: Evaluations, number: int, steps: int) -> dict[str, int]:
    """Split -> prompts of the rounds that a version begins."""
    evaluations.rounds = []
    evaluations.on_commit(Label(1, number), steps)
    return {r.split: r.size for r in evaluations.rounds}


def test_out_of_distribution_prompts_have_versions_of_their_own() -> None:
    few = evaluations(4, 9, 9, 3, 1.0, ood_every=4)
    assert started(few, 4, 7) == {"heldout": 9, "ood": 3}, "never more than there are"
    assert started(evaluations(1, 2, 5, 0, 1.0, ood_every=1), 1, 7) == {"heldout": 2}


def test_lost_and_failed_evaluation_tickets_go_out_again() -> None:
    store = make(0, lease_s=1.0, evaluations=evaluations(0, 2, 2, 0, 1.0))
    (t, *_) = store.grant("g", 1, 1, 0.0)
    assert store.expire(2.0) == 1 and store.list_pinned_versions() == [Label(1, 0)]
    (again, *_) = store.grant("g", 1, 1, 2.0)
    assert (again.ticket, again.attempt) == (t.ticket, t.attempt + 1)
    assert judged(store, t, 1.0) == "duplicate"
    for _ in range(6):  # three failures of each
        assert store.evaluations.rounds
        assert store.deliver(sample(again, 0, failed="data: no"), 0.0) == "evaluated"
        again = next(iter(store.grant("g", 1, 1, 2.0)), again)
    assert not store.evaluations.rounds
    assert store.evaluations.results["heldout", 0]["eval/heldout_n"] == 0


def one_evaluation(lease_s: float = 10.0) -> Store:
    return make(3, lease_s=lease_s, evaluations=evaluations(0, 2, 2, 0, 1.0))


@pytest.mark.parametrize("sign", ["delivers", "renews"])
def test_a_slow_generator_keeps_its_evaluations_until_another_has_them(sign: str) -> None:
    """Its first prefill took longer than the lease: nothing that it wrote is a duplicate."""
    store = one_evaluation()
    first, second = store.grant("slow", 1, 2, 0.0)
    assert store.expire(30.0) == 2 and store.expire(31.0) == 0, "each lapses once"
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(store.snapshot()), type=StoreSnapshot)
    store = one_evaluation()
    store.restore(state)
    if sign == "renews":
        store.renew("slow", 1, [(t.ticket, t.attempt, 3) for t in (first, second)], 31.0)
        assert [t.kind for t in store.grant("other", 1, 1, 31.0)] == ["train"]
        assert store.expire(40.9) == 0 and store.expire(41.1) == 3, "the other's ticket too"
    assert judged(store, first, 1.0) == "evaluated"
    (again, *_) = store.grant("other", 1, 1, 42.0)
    assert again.ticket == second.ticket and again.attempt > second.attempt
    assert judged(store, second, 1.0) == "duplicate", "another has it by now"
    assert judged(store, again, 1.0) == "evaluated"
    assert store.evaluations.results["heldout", 0]["eval/heldout_n"] == 2


def test_what_is_freed_after_it_lapsed_is_due_once() -> None:
    store = one_evaluation()
    first, second = store.grant("slow", 1, 2, 0.0)
    store.expire(30.0)
    store.free_leases([(first.ticket, first.attempt)])
    store.end_sessions("slow", 2)
    granted = store.grant("other", 1, 3, 31.0)
    assert [t.ticket for t in granted if t.kind == "eval"] == [second.ticket, first.ticket]
    assert judged(store, first, 1.0) == "duplicate"


def test_leases_follow_the_measured_silence_of_a_generator() -> None:
    store = one_evaluation()
    first, second = store.grant("slow", 1, 2, 0.0)
    named = [(t.ticket, t.attempt, 1) for t in (first, second)]
    store.renew("slow", 1, named, 9.0, gap=9.0)
    assert store.expire(9.0 + 26.9) == 0 and store.expire(9.0 + 27.1) == 2, "three silences"
    store.renew("slow", 1, named, 40.0, gap=1e6)
    assert store.expire(40.0 + 99.0) == 0 and store.expire(40.0 + 101.0) == 2, "ten leases at most"
    store.renew("slow", 1, named, 200.0, gap=8.0)
    (train,) = store.grant("slow", 1, 1, 200.0)
    store.grant("quick", 1, 1, 200.0)
    assert train.kind == "train" and store.expire(211.0) == 1, "the quick one's alone"
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(store.snapshot()), type=StoreSnapshot)
    store.restore(state)
    assert store.get_lease_s("slow") == 24.0 and store.get_lease_s("quick") == 10.0
    store.renew("slow", 1, named, 212.0, gap=1.0)
    assert store.get_lease_s("slow") == 10.0


def test_evaluations_of_a_dead_branch_are_made_again() -> None:
    store = make(0, steps=6, evaluations=evaluations(1, 1, 1, 0, 1.0))

    def advance(to: int) -> list[int]:
        judged_at = []
        while True:
            while tickets := store.grant("g", 1, 1, 0.0):
                (t,) = tickets
                if t.kind == "train":
                    write(store, t)
                else:
                    judged(store, t, 1.0)
                    judged_at.append(t.exact_version.number if t.exact_version else -1)
            if store.committed == to:
                return judged_at
            train(store, store.committed)

    assert advance(4) == [0, 1, 2, 3, 4] and hello(store, 2, 2, k=0, origin=1, digest="d2")
    assert sorted(n for _, n in store.evaluations.results) == [0, 1, 2] and advance(5) == [3, 4, 5]
    store.retire_batches(4)
    # no learner begins behind 4 any more
    assert sorted(n for _, n in store.evaluations.results) == [0, 4, 5]
