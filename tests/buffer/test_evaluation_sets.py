import itertools
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from store_kit import make, sample, train, write

from asyncrl.contract.blobs import images
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import EVAL_BASE, MAX_FRAME_BYTES, Prompt, SamplingSettings, Ticket
from asyncrl.records.pass_at_k import (
    compute_set_metrics,
    compute_share_interval,
    estimate_pass_at_k,
)
from buffer import checks, service
from buffer.evaluation import SET_TICKETS, EvaluationPlan, Evaluations, EvaluationSet
from buffer.store import Store

HARD = EvaluationSet(
    "hard", 2, 2, every=2, samples=3, greedy=True, temperature=0.7, passing=0.5, counts=(1, 3)
)


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_passed_sample(samples: int) -> None:
    for passed, count in itertools.product(range(samples + 1), range(1, samples + 1)):
        outcomes = [True] * passed + [False] * (samples - passed)
        subsets = list(itertools.combinations(outcomes, count))
        got = estimate_pass_at_k(samples, passed, count)
        assert got == (pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12))


def test_pass_at_k_is_unbiased() -> None:
    """Its expectation over the binomial number of passed samples is 1 - (1 - p)^k, exactly."""
    for samples, count, share in itertools.product((4, 8), (1, 3, 4), (0.0, 0.1, 0.5, 0.9, 1.0)):
        expected = math.fsum(
            math.comb(samples, passed)
            * share**passed
            * (1 - share) ** (samples - passed)
            * estimate_pass_at_k(samples, passed, count)
            for passed in range(samples + 1)
        )
        assert expected == pytest.approx(1 - (1 - share) ** count, abs=1e-12)


@pytest.mark.parametrize(("samples", "count"), [(2, 3), (3, 0)])
def test_pass_at_k_needs_k_samples(samples: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{count} needs at least {count} samples"):
        estimate_pass_at_k(samples, 0, count)


@pytest.mark.parametrize(("prompts", "samples", "count"), [(30, 1, 1), (30, 8, 1), (60, 8, 4)])
def test_the_interval_is_right_as_often_as_it_says(prompts: int, samples: int, count: int) -> None:
    """Prompts of different difficulty, drawn anew: 95 % of the intervals, up to chance."""
    random = np.random.default_rng(0)
    held = 0
    truth = float(np.mean(1 - (1 - random.beta(0.6, 0.8, 1_000_000)) ** count))
    for _ in range(600):
        passed = random.binomial(samples, random.beta(0.6, 0.8, prompts))
        shares = [estimate_pass_at_k(samples, int(one), count) for one in passed]
        low, high = compute_share_interval(shares, prompts * samples)
        assert 0 <= low <= math.fsum(shares) / prompts <= high <= 1
        held += low <= truth <= high
    assert 0.92 < held / 600 < 0.985


def test_the_interval_has_a_width_at_its_ends_and_for_equal_shares() -> None:
    for share in (0.0, 0.5, 1.0):
        low, high = compute_share_interval([share] * 10, 40)
        assert high - low > 0.1 and low <= share <= high
    wide, narrow = (compute_share_interval([0.5] * 10, most) for most in (10, 1000))
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


def test_metrics_of_a_set() -> None:
    rewards = {0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0]}
    found = compute_set_metrics("x", rewards, [1.0, 0.0], [3, 5, 2, 2, 8], 1.0, (1, 2))
    low, high = compute_share_interval([0.5, 1.0, 0.0], 5)
    assert found == {
        "eval/x": pytest.approx(3 / 5),
        "eval/x_n": 3,
        "eval/x_length": 4.0,
        "eval/x_greedy": 0.5,
        "eval/x_pass_at_1": 0.5,
        "eval/x_pass_at_1_low": low,
        "eval/x_pass_at_1_high": high,
        # the third prompt has one sample only
        "eval/x_pass_at_2": 1.0,
        "eval/x_pass_at_2_low": compute_share_interval([1.0, 1.0], 5)[0],
        "eval/x_pass_at_2_high": 1.0,
    }


def test_a_config_becomes_the_evaluations_and_the_largest_message() -> None:
    hard = {"samples": 3, "greedy": True, "temperature": 0.7, "passing": 0.5, "counts": (1, 3)}
    entry = SimpleNamespace(name="hard", prompts=8, every=2, **hard)
    asked = {"every": 4, "prompts": 5, "ood_prompts": 2, "temperature": 0.5, "ood_every": 3}
    config: Any = SimpleNamespace(
        evaluation=SimpleNamespace(**asked, final_prompts=9, sets=[entry]),
        seed=11,
        support_bytes=4,
        wires=SimpleNamespace(frame_bytes=1000),
        generator=SimpleNamespace(context=64),
        serves_agents=False,
    )
    sizes = {"heldout": 6, "ood": None, "hard": 3}
    task: Any = SimpleNamespace(size=sizes.get, prompt=lambda *given: given)
    made = service.make_evaluations(config, task)
    sets = (EvaluationSet("hard", 2, prompts=3, every=2, **hard),)  # no more than the task has
    assert made.plan == EvaluationPlan(**asked, final_prompts=6, sets=sets)
    assert made.prompt is not None and made.prompt("ood", 4) == ("ood", 4, 11)
    most = service.MORE_BYTES + 2000 + 64 * (service.ANSWER_BYTES + 4)
    assert service.compute_max_message_bytes(config) == most
    config.serves_agents = True
    assert service.compute_max_message_bytes(config) == most + images.MOST_SESSION_BYTES
    config.generator.context = 1 << 40
    assert service.compute_max_message_bytes(config) == MAX_FRAME_BYTES


def store_with_set(*, steps: int = 2, **more: Any) -> Store:
    def prompt(split: str, index: int) -> Prompt:
        return Prompt(index, split, split=split)

    evaluations = Evaluations(EvaluationPlan(0, 1, 1, 0, sets=(HARD,)), prompt)
    return make(2, steps=steps, evaluations=evaluations, **more)


def score(store: Store, ticket: Ticket, reward: float) -> str:
    return store.deliver(sample(ticket, ticket.samples[0], reward=reward), 0.0)


def granted(store: Store, producer: str = "g", samples: int = 99) -> list[Ticket]:
    return store.grant(producer, 1, samples, 0.0)


def test_a_set_has_samples_of_its_own_and_a_greedy_one() -> None:
    store = store_with_set()
    tickets = [t for t in granted(store) if t.kind == "eval"]
    assert [t.prompt.split for t in tickets] == ["heldout"] + ["hard"] * 8
    first = tickets[1:5]
    assert [t.samples for t in first] == [[0], [1], [2], [3]]
    assert {t.ticket for t in first} == {EVAL_BASE + 2 * SET_TICKETS}
    assert tickets[5].ticket == EVAL_BASE + 2 * SET_TICKETS + 1
    warm = SamplingSettings(0.7, 1.0, 0, 64)
    assert [t.sampling for t in first] == [warm] * 3 + [SamplingSettings(1.0, 1.0, 1, 64)]
    rewards = [[0.5, 0.0, 1.0, 1.0], [0.0, 0.4, 0.2, 0.0]]
    for ticket in tickets[1:]:
        index, (number,) = ticket.prompt.id, ticket.samples
        with pytest.raises(BadMessage, match="does not belong to evaluation ticket"):
            checks.check_sample(store, sample(ticket, (number + 1) % 4))
        checks.check_sample(store, sample(ticket, number))
        assert score(store, ticket, rewards[index][number]) == "evaluated"
    found = store.evaluations.results["hard", 0]
    assert found["eval/hard"] == pytest.approx(2.1 / 6) and found["eval/hard_n"] == 2
    assert found["eval/hard_greedy"] == 0.5
    assert found["eval/hard_pass_at_1"] == pytest.approx((2 / 3 + 0) / 2)
    assert found["eval/hard_pass_at_3"] == 0.5
    assert store.evaluations.rounds  # heldout has not arrived


def test_samples_of_a_set_never_enter_the_ledger_and_a_snapshot_keeps_them() -> None:
    store = store_with_set()
    tickets = granted(store)
    evaluated = [t for t in tickets if t.kind == "eval"]
    for ticket in evaluated[:5]:
        score(store, ticket, 1.0)
    other = store_with_set()
    written = msgspec.msgpack.encode(store.snapshot())
    other.restore(msgspec.msgpack.decode(written, type=type(store.snapshot())))
    for ticket in evaluated[5:]:
        score(store, ticket, 0.0)
        score(other, ticket, 0.0)
    assert other.evaluations.results == store.evaluations.results
    assert store.evaluations.results["hard", 0]["eval/hard"] == 0.5
    for ticket in tickets:
        if ticket.kind == "train":
            write(store, ticket)
    train(store, 0)
    ledger = store.sum_ledger()
    assert ledger["trained"]["samples"] == 1
    got = sum(line["tokens"] for line in ledger.values())
    assert got == (sum(4 for ticket in tickets if ticket.kind == "train"))


def test_a_set_is_evaluated_at_versions_of_its_own() -> None:
    plan = EvaluationPlan(4, 2, 5, 3, ood_every=3, sets=(HARD,))
    assert [plan.list_due(number, 6) for number in range(7)] == [
        [("heldout", 5), ("ood", 3), ("hard", 2)],
        [],
        [("hard", 2)],
        [("ood", 2)],
        [("heldout", 2), ("hard", 2)],
        [],
        [("heldout", 5), ("ood", 3), ("hard", 2)],
    ]


def test_reserved_generators_get_evaluations_alone_and_the_others_none() -> None:
    store = store_with_set(evaluators=["generator-1"])
    training = granted(store, "generator-0", 2)
    assert training and {t.kind for t in training} == {"train"}
    evaluated = granted(store, "generator-1")
    assert len(evaluated) == 9 and {t.kind for t in evaluated} == {"eval"}
    assert granted(store, "generator-1") == []
