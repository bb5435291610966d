"""The buffer's pure rules by hand: room, places, injected lags, the tree's lags, the ledger."""

import math
import random
from collections import Counter

import msgspec
import pytest

from asyncrl.contract import admission, versions
from asyncrl.contract.errors import ProtocolError
from asyncrl.contract.messages import (
    DISPOSITIONS,
    RewardFailure,
    TrainingSequence,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.versions import Label, PolicyTree
from buffer.ledger import Ledger, LedgerSums, read_bins, sum_tokens


def test_room_is_one_batch_more_than_the_limit_or_what_the_bytes_allow() -> None:
    limit = admission.limit_groups
    assert [limit(k, 4) for k in (0, 1, 5)] == [4, 8, 24]
    assert limit(math.inf, 4) == limit(math.inf, 4, 9, 10) == math.inf
    assert limit(math.inf, 4, 10, 10) == limit(math.inf, 4, 11, 10) == 0
    assert limit(2, 4, 10**12, 1) == 12  # with a limit the bytes do not matter
    assert limit(math.inf, 4, (1 << 30) - 1) == math.inf and limit(math.inf, 4, 1 << 30) == 0


def test_a_group_trains_as_many_batches_on_as_full_ones_stand_before_it() -> None:
    assert [admission.plan_batch(7, place, 3) for place in range(7)] == [7, 7, 7, 8, 8, 8, 9]


def test_injected_lags_are_drawn_with_their_probabilities() -> None:
    """A constant is itself; a list need not sum to 1; the same ticket always draws the same."""
    assert admission.choose_injected_lag(3, 1, 5) == 3
    each = [admission.choose_injected_lag([2.0, 0.0, 1.0, 5.0], 4, t) for t in range(4000)]
    assert each == [admission.choose_injected_lag([2.0, 0.0, 1.0, 5.0], 4, t) for t in range(4000)]
    assert each != [admission.choose_injected_lag([2.0, 0.0, 1.0, 5.0], 5, t) for t in range(4000)]
    counts = Counter(each)
    assert set(counts) == {0, 2, 3}
    for lag, share in ((0, 0.25), (2, 0.125), (3, 0.625)):
        deviation = math.sqrt(share * (1 - share) / 4000)
        assert counts[lag] / 4000 == pytest.approx(share, abs=5 * deviation)
    assert {admission.choose_injected_lag([0.0, 1.0], 0, t) for t in range(50)} == {1}
    assert {admission.choose_injected_lag([1.0], 0, t) for t in range(50)} == {0}


def test_a_samples_lag_is_that_of_its_oldest_token() -> None:
    tree = PolicyTree()
    for n in range(5):
        tree.register(Label(1, n), Label(1, n - 1) if n else None, f"d{n}")
    spans = [
        VersionSpan(Label(1, 3), "", 0, 4, Label(1, 3)),
        VersionSpan(Label(1, 1), "", 4, 6, Label(1, 1)),
        VersionSpan(Label(1, 4), "", 6, 9, Label(1, 4)),
    ]
    lags = admission.compute_span_lags(tree, spans, Label(1, 4), 6)
    assert lags == [(0, 4, 3), (4, 6, 5), (6, 9, 2)] and admission.compute_sample_lag(lags) == 5
    assert admission.compute_sample_lag([]) == 0


def branched() -> PolicyTree:
    """Epoch 1 made 0 to 3; epoch 2 went on from number 1 with other updates, 2 and 3."""
    tree = PolicyTree()
    for n in range(4):
        tree.register(Label(1, n), Label(1, n - 1) if n else None, f"a{n}")
    tree.register(Label(2, 1), Label(1, 0), "a1")
    for n in (2, 3):
        tree.register(Label(2, n), Label(2, n - 1), f"b{n}")
    return tree


def test_the_spans_of_a_session_have_positions_in_the_sample() -> None:
    label = Label(1, 0)

    def row(length: int) -> TrainingSequence:
        span = VersionSpan(label, "d", 1, length, label)
        return TrainingSequence(b"", b"", b"", b"\1" * length, [span])

    first = row(2)
    sample = Trajectory(0, 0, 1, b"", b"", b"", first.mask, first.spans, 0.0, {}, "stop", 1.0)
    assert sample.list_spans() == first.spans
    sample.rows = [row(3), row(4), row(5)]
    ends = [(1, 2), (3, 5), (6, 9), (10, 14)]
    assert sample.list_spans() == [VersionSpan(label, "d", *at, label) for at in ends]


def test_the_lag_counts_updates_on_both_branches() -> None:
    tree, ours = branched(), Label(2, 3)
    assert [tree.compute_lag(Label(1, n), ours, 3) for n in range(4)] == [3, 2, 1 + 2, 2 + 2]
    assert [tree.compute_lag(Label(2, n), ours, 3) for n in (1, 2, 3)] == [2, 1, 0]
    assert tree.compute_lag(Label(2, 2), ours, 7) == 5
    assert tree.compute_lag(Label(1, 3), ours, 5) == 2 + 4
    assert tree.compute_lag(Label(2, 3), Label(1, 3), 3) == 4  # and the other way round
    with pytest.raises(KeyError):
        tree.compute_lag(Label(3, 0), ours, 3)


def test_policies_without_a_common_root_are_all_their_depths_apart() -> None:
    tree = PolicyTree()
    tree.register(Label(1, 5), None, "x")
    tree.register(Label(2, 3), Label(2, 2), "y")  # its parent is unknown: a root of depth 3
    tree.register(Label(2, 4), Label(2, 3), "z")
    assert tree.compute_lag(Label(1, 5), Label(2, 4), 4) == 5 + 4
    assert tree.compute_lag(Label(2, 4), Label(1, 5), 6) == 4 + 6
    assert tree.compute_lag(Label(2, 3), Label(2, 4), 4) == 1
    fork = PolicyTree()  # at a root of a depth, whose label goes
    for label in (Label(1, 5), Label(1, 6), Label(2, 6)):
        fork.register(label, Label(1, 5), str(label))
    fork.prune(6, [])
    assert fork.compute_lag(Label(1, 6), Label(2, 6), 6) == 2 and len(fork) == 2


def test_labels_name_policies_and_never_two() -> None:
    tree = branched()
    assert Label(1, 2) in tree and Label(2, 0) not in tree and tree.get_digest(Label(2, 1)) == "a1"
    got = sorted(tree._policies)
    assert got == (
        [Label(1, 0), Label(1, 1), Label(1, 2), Label(1, 3), Label(2, 1), Label(2, 2), Label(2, 3)]
    )
    tree.register(Label(1, 2), Label(1, 1), "a2")
    with pytest.raises(
        ProtocolError, match=r"two different weights have the version 1\.2: a2 and other"
    ):
        tree.register(Label(1, 2), Label(1, 1), "other")
    tree.add_alias(Label(9, 2), Label(1, 2))
    assert tree.compute_lag(Label(9, 2), Label(1, 2), 2) == 0
    assert tree.get_digest(Label(9, 2)) == "a2"
    # same parent and digest: the same node whatever the label; the same digest elsewhere is another
    tree.register(Label(3, 2), Label(1, 1), "a2")
    tree.register(Label(4, 3), Label(1, 1), "a3")
    assert tree.compute_lag(Label(3, 2), Label(1, 2), 2) == 0
    assert tree.compute_lag(Label(4, 3), Label(1, 3), 3) > 0
    assert str(Label(2, 7)) == "2.7" and Label(2, 0) > Label(1, 99)
    plain = PolicyTree()  # tuples off the wire do as well
    plain.register((1, 0), None, "d")  # type: ignore[arg-type]
    plain.register((1, 1), (1, 0), "e")  # type: ignore[arg-type]
    assert plain.compute_lag((1, 0), (1, 1), 1) == 1  # type: ignore[arg-type]


def test_a_line_sums_tokens_and_answers_by_length() -> None:
    line = LedgerSums()
    for length, faded in ((1, 0.0), (2, 0.5), (3, 0.0), (4, 0.25), (5, 0.0), (8, 0.0), (9, 1.0)):
        line.add(length, 1, length, 0.5, faded)
    assert line.by_length == {1: 1, 2: 2, 4: 7, 8: 13, 16: 9}
    assert line.faded == {2: 0.5, 4: 0.25, 16: 1.0}
    assert (line.tokens, line.samples, line.length_sum, line.reward_sum) == (32, 7, 32.0, 3.5)
    line.add(10)  # tokens of no answer: no bin, no mean
    line.add(0, 1, 6.0, 1.0)  # an answer whose tokens stand in another line
    assert line.tokens == 42 and line.samples == 8 and sum(line.by_length.values()) == 32
    d = line.as_dict()
    assert (d["mean_length"], d["mean_reward"], d["upto_4"], d["faded_upto_16"]) == (
        38 / 8,
        4.5 / 8,
        7,
        1.0,
    )
    got = LedgerSums().as_dict()
    assert got == {"tokens": 0, "samples": 0, "mean_length": 0.0, "mean_reward": 0.0}
    one = LedgerSums()
    one.add(3, 1, 0, 1.0)
    assert one.by_length == {1: 3}  # a length of 0 is in the first bin


def test_merged_lines_are_the_line_of_all() -> None:
    whole, a, b = LedgerSums(), LedgerSums(), LedgerSums()
    for i in range(1, 12):
        for line in (whole, a if i % 3 else b):
            line.add(i, 1, i, 0.25 * i, 0.5 * (i % 2))
    assert a != whole
    a.merge(b)
    assert a == whole


def test_a_ledger_adds_merges_and_comes_back_from_its_totals() -> None:
    one, two = Ledger(), Ledger()
    assert list(one.lines) == list(DISPOSITIONS)
    one.lines["trained"].add(5, 1, 5.0, 2.0, 0.5)
    two.lines["trained"].add(3, 1, 3.0, 1.0)
    two.lines[DISPOSITIONS[-1]].add(7)
    copy = one.copy()
    one.merge(two)
    assert one.lines["trained"] == LedgerSums(8, 2, 8.0, 3.0, {8: 5, 4: 3}, {8: 0.5})
    assert copy.lines["trained"].tokens == 5
    totals = one.compute_totals()
    back = Ledger.restore(totals)
    assert back.compute_totals() == totals and back.lines == one.lines and sum_tokens(totals) == 15
    assert sum_tokens({"trained": {"tokens": 4.0}, "failed": {"tokens": 3.0}}) == 7
    assert read_bins(totals["trained"], "upto_") == {4: 3, 8: 5}
    assert read_bins(totals["trained"], "faded_upto_") == {8: 0.5}
    assert Ledger.restore(
        {"trained": {"tokens": 2.0, "samples": 1.0, "mean_length": 2.0, "mean_reward": 0.5}}
    ).lines["trained"] == LedgerSums(2, 1, 2.0, 0.5)


def test_a_failure_travels_as_its_kind_and_words_and_recordings_without_any_are_read() -> None:
    one = Trajectory(0, 0, 1, b"", b"", b"", b"", [], 0.0, {}, "stop", 1.0)
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(one))
    at = Trajectory.__struct_fields__.index("failed")
    assert raw[at] == "" and msgspec.convert(raw, Trajectory) == one
    # a recording from before sessions ends there
    assert msgspec.convert(raw[: at + 1], Trajectory) == one
    failed = msgspec.structs.replace(one, failed=RewardFailure("machinery", "it died"))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(failed), type=Trajectory)
    assert again == failed and again.failed and str(again.failed) == "machinery: it died"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([*raw[:at], ["weather", "rain"], *raw[at + 1 :]], Trajectory)


def grown(r: random.Random) -> tuple[PolicyTree, list[Label]]:
    """A tree of some lives, each from a version of the one before; the last one's labels."""
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
        keep = r.sample(sorted(tree._policies), r.randint(0, 3))
        stays = [x for x in sorted(tree._policies) if x.number >= below or x in keep]
        policies = [x for x in line if x.number >= below]
        before = {(x, p): tree.compute_lag(x, p, p.number + 1) for x in stays for p in policies}
        digests = {x: tree.get_digest(x) for x in stays}
        size = len(tree._parent)
        tree.prune(below, keep)
        assert sorted(tree._policies) == stays and {x: tree.get_digest(x) for x in stays} == digests
        assert {
            (x, p): tree.compute_lag(x, p, p.number + 1) for x in stays for p in policies
        } == before, seed
        assert len(tree._parent) <= min(size, 2 * len(stays))
        new = Label(99, line[-1].number + 1)
        tree.register(new, line[-1], "new")
        assert all(tree.compute_lag(x, new, new.number) == before[x, line[-1]] for x in stays)


def test_remembered_lags_follow_the_labels_and_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A learning rate of 0, and a buffer started anew: a version is as old as its number says."""
    tree = PolicyTree()
    tree.register(Label(1, 0), None, "same")
    tree.register(Label(2, 3), None, "same")
    assert tree.compute_lag(Label(2, 3), Label(2, 3), 3) == 0
    tree.prune(0, [])
    tree.register(Label(3, 3), None, "same")
    assert tree.compute_lag(Label(2, 3), Label(3, 3), 3) == 0
    assert tree.compute_lag(Label(2, 3), Label(3, 3), 4) == 1
