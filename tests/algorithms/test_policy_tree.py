"""The tree of versions, pruned: lags of what stays do not change, and a long run's memory does not
grow."""

from __future__ import annotations

import random

import pytest
import store_kit as ts

from asyncrl.contract import versions
from asyncrl.contract.versions import Label, PolicyTree
from buffer import store as module


def grown(r: random.Random) -> tuple[PolicyTree, list[Label]]:
    """A tree of some lives, each from a version of the life before; the last life's labels, by
    number."""
    tree, line = PolicyTree(), [Label(1, 0)]
    tree.register(line[0], None, "d0")
    for epoch in range(1, r.randint(2, 6)):
        if epoch > 1:
            line = line[: r.randint(1, len(line))]
            start = Label(epoch, len(line) - 1)
            tree.register(start, line[-2] if len(line) > 1 else None, tree.get_digest(line[-1]))
            line[-1] = start
        for _ in range(r.randint(1, 12)):
            label = Label(epoch, len(line))
            tree.register(
                label, line[-1], f"d{epoch}.{len(line)}" if r.random() < 0.5 else f"d{len(line)}"
            )
            line.append(label)
    return tree, line


def test_pruning_changes_no_lag() -> None:
    for seed in range(500):
        r = random.Random(seed)
        tree, line = grown(r)
        below = r.randint(0, len(line) - 1)
        keep = r.sample(tree.list_labels(), r.randint(0, 3))
        stays = [x for x in tree.list_labels() if x.number >= below or x in keep]
        policies = [x for x in line if x.number >= below]
        before = {(x, p): tree.compute_lag(x, p, p.number + 1) for x in stays for p in policies}
        digests = {x: tree.get_digest(x) for x in stays}
        size = len(tree._parent)
        tree.prune(below, keep)
        assert tree.list_labels() == stays and {x: tree.get_digest(x) for x in stays} == digests
        assert {
            (x, p): tree.compute_lag(x, p, p.number + 1) for x in stays for p in policies
        } == before, seed
        assert len(tree._parent) <= min(size, 2 * len(stays))
        new = Label(99, line[-1].number + 1)
        tree.register(new, line[-1], "new")
        assert all(tree.compute_lag(x, new, new.number) == before[x, line[-1]] for x in stays)


def test_what_is_remembered_of_lags_follows_the_labels_and_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "KNOWN", 8)
    tree = PolicyTree()
    for number in range(6):
        tree.register(Label(1, number), Label(1, number - 1) if number else None, f"d{number}")
    newest = Label(1, 5)
    for _ in range(2):
        assert [tree.compute_lag(Label(1, n), newest, 6) for n in range(6)] == [6, 5, 4, 3, 2, 1]
        assert [tree.compute_lag(Label(1, n), Label(1, 4), 4) for n in range(5)] == [4, 3, 2, 1, 0]
        assert len(tree._cached_lags) <= 8
    tree.add_alias(Label(2, 0), Label(1, 0))
    assert tree.compute_lag(Label(2, 0), newest, 5) == 5
    tree.add_alias(Label(2, 0), Label(1, 3))
    assert tree.compute_lag(Label(2, 0), newest, 5) == 2
    tree.prune(3, [])
    with pytest.raises(KeyError):
        tree.compute_lag(Label(1, 0), newest, 5)
    other = PolicyTree()
    other.register(Label(1, 5), None, "x")
    other.register(Label(1, 4), Label(1, 5), "y")
    tree.compute_lag(Label(1, 4), newest, 5)
    tree.restore(other.snapshot())
    assert (
        tree.compute_lag(Label(1, 4), newest, 5) == other.compute_lag(Label(1, 4), newest, 5) != 1
    )


def test_equal_weights_without_a_known_parent_are_told_apart_by_their_number() -> None:
    """A learning rate of 0, and a buffer that was started anew: a version is as old as its number
    says."""
    tree = PolicyTree()
    tree.register(Label(1, 0), None, "same")
    tree.register(Label(2, 3), None, "same")
    assert tree.compute_lag(Label(2, 3), Label(2, 3), 3) == 0
    tree.prune(0, [])
    tree.register(Label(3, 3), None, "same")
    assert tree.compute_lag(Label(2, 3), Label(3, 3), 3) == 0
    assert tree.compute_lag(Label(2, 3), Label(3, 3), 4) == 1


def test_a_long_run_forgets_what_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSIONS", 20)
    store = ts.make(float("inf"), steps=1000)
    slow, *_ = store.grant("slow", 1, 1, 0.0)  # a group that waits from the first version on
    for n in range(300):
        t = store.grant("g", 1, 1, 0.0)[0]
        ts.write(store, t)
        ts.train(store, n)
        store.retire_batches(n)
        assert len(store.tree) <= 2 * 20 + 2
    assert Label(1, 0) in store.tree and Label(1, 5) not in store.tree
    ts.write(store, slow)  # by version 0: its lease kept it
    groups, _ = store.ask(1, 300)
    assert [g.ticket for g in groups] == [0] and store.make_batch(groups, 1, 300).lags == [300]
