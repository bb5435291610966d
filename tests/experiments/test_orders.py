"""`staleness.order`, and answers that come late on purpose (`staleness.delay`)."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from process_kit import ROOT, RUN_SEED
from store_kit import make, train, write

from actors.turn import DelayQueue, compute_delay_steps
from asyncrl.config import load
from asyncrl.contract import admission
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial


def test_freshest_with_drop_sends_again_what_it_passed_over_for_too_long() -> None:
    store = make(1, on_exceed="drop", order="freshest")
    a, b = store.grant("g", 1, 9, 0.0)
    train(store, 0, a)
    (c,) = store.grant("g", 1, 9, 0.0)
    write(store, b)  # of version 0
    write(store, c)  # of version 1, served first
    train(store, 1)
    # b would train two versions late
    assert not store.ask(1, 2)[0] and store.sum_ledger()["dropped_stale"]["tokens"] == 4
    again, _ = store.grant("g", 1, 9, 0.0)
    assert again.ticket == b.ticket and again.min_version == Label(1, 2)


EXACT = ("exact=true", "weights.in_flight=recompute_kv")
REFUSED = [
    ("order=completion", "lets slow completions past the limit, and on_exceed = pace prevents"),
    ("order=freshest", "lets slow completions past the limit"),
    ("order=freshest on_exceed=mask max_lag=0", "that is synchronous (staleness.max_lag = 0) can"),
    ("order=ticket on_exceed=drop", "so on_exceed = drop never acts"),
    ("order=ticket max_lag=inf", "waits for the oldest completion, even if"),
    ("order=freshest max_lag=inf inject=2", "in another batch than lag injection planned"),
    ("order=oldest", "choose one of auto, ticket, completion, freshest"),
    ("delay=-1.0", "staleness.delay"),
    ("order=freshest on_exceed=drop exact", "that is exact can only be repeated with order = tick"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_orders_that_would_break_a_promise_are_refused(words: str, said: str) -> None:
    sets = [f"staleness.{word}" for word in words.split() if "=" in word]
    with pytest.raises(ConfigError) as e:
        load.load(ROOT / "configs" / "demo.toml", [*sets, *(EXACT if "exact" in words else ())])
    assert said in str(e.value) and "\n" not in str(e.value)
    load.load(ROOT / "configs" / "demo.toml", ["staleness.order=ticket", *EXACT])


def test_the_delay_of_a_ticket_is_seeded_and_has_a_long_tail() -> None:
    each = sorted(admission.sample_delay(2.0, 7, t) for t in range(4000))
    assert (
        each
        == sorted(admission.sample_delay(2.0, 7, t) for t in range(4000))
        != sorted(admission.sample_delay(2.0, 8, t) for t in range(4000))
    )
    # Lomax, shape 1.5: P(X > x) = (1 + x)^-1.5, so the median is 2^(2/3) - 1 = 0.587 scales and P(X
    # > 20) = 21^-1.5 = 0.0104
    assert each[2000] == pytest.approx(2 * 0.587, rel=0.1) and each[-1] == 40.0
    assert 0.006 < sum(x == 40.0 for x in each) / 4000 < 0.016
    assert admission.sample_delay(0.0, 7, 3) == 0.0


def test_answers_of_a_ticket_are_late_together_or_each_by_itself() -> None:
    (ticket,) = make(1).grant("g", 1, 1, 0.0)
    ticket = msgspec.structs.replace(ticket, ticket=5, seed=7)
    both = ticket, msgspec.structs.replace(ticket, kind="eval")

    def steps(*sets: str) -> list[list[float]]:
        config = load.load(ROOT / "configs" / "demo.toml", ["staleness.delay=2", *sets])
        return [[compute_delay_steps(config, t, sample, 10) for sample in range(3)] for t in both]

    together, evaluated = steps()
    assert together == [10 * admission.sample_delay(2.0, 7, 5)] * 3 and evaluated == [0.0] * 3
    apart, evaluated = steps("staleness.delay_of=answer")
    assert apart == [10 * admission.sample_delay(2.0, 7, 5, s) for s in range(3)]
    assert len(set(apart)) == 3 and evaluated == [0.0] * 3
    # of ticket 5, sample 1, and not of ticket 51
    assert admission.sample_delay(2.0, 7, 5, 1) != admission.sample_delay(2.0, 7, 51)


def test_late_answers_come_back_by_their_time() -> None:
    late = DelayQueue()
    assert late.next_due == float("inf") and late.pop_due(1e9) == []
    for until, what in ((3.0, "b"), (1.0, "a"), (3.0, "c"), (9.0, "d")):
        late.hold(until, what)
    assert late.next_due == 1.0 and late.pop_due(0.5) == []
    assert late.pop_due(3.0) == ["a", "b", "c"] and late.next_due == 9.0


SMALL_TEXT = (
    "generator.max_new_tokens=56 generator.slots=32 learner.steps=8 learner.groups=4 "
    "learner.group_size=4 evaluation.every=0 evaluation.prompts=8 evaluation.final_prompts=8 "
    "evaluation.ood_prompts=0 staleness.max_lag=2"
)
SMALL = SMALL_TEXT.split()


@pytest.fixture(scope="module")
def late_runs(sort_model: Path) -> dict[str, dict[str, Any]]:
    def run(*sets: str) -> dict[str, Any]:
        words = [f"model.path='{sort_model}'", *SMALL, *sets]
        return serial.run_serial(load.load(ROOT / "configs" / "demo.toml", words), 3 + RUN_SEED)

    late, masked = "staleness.delay=1", "staleness.on_exceed=mask"
    names = ("completion", "freshest", "freshest again")
    orders = {f"mask {name}": f"staleness.order={name.split()[0]}" for name in names}
    return {name: run(late, masked, order) for name, order in orders.items()} | {
        "prompt": run(),
        "pace": run(late),
        "drop": run(late, "staleness.on_exceed=drop"),
    }


def test_ticket_order_waits_for_late_answers(
    late_runs: dict[str, dict[str, Any]],
) -> None:
    prompt, late = late_runs["prompt"], late_runs["pace"]
    assert late["clock"] > prompt["clock"] and late["trained_ids"] == prompt["trained_ids"]
    assert max(map(int, late["lag_histogram"])) <= 2
    assert late["ledger_lines"]["trained"]["tokens"] == sum(
        x["tokens"] for x in late["ledger_lines"].values()
    )


def test_other_orders_train_other_samples_and_count_by_length_those_they_lose(
    late_runs: dict[str, dict[str, Any]],
) -> None:
    pace, drop, first, fresh = (
        late_runs[x] for x in ("pace", "drop", "mask completion", "mask freshest")
    )
    for r, line in ((drop, "dropped_stale"), (first, "masked_stale"), (fresh, "masked_stale")):
        assert r["steps"] == 8 and r["trained_ids"] != pace["trained_ids"]
        assert max(map(int, r["lag_histogram"])) <= 2, "past the limit nothing is trained"
        lost = r["ledger_lines"][line]
        assert lost["tokens"] > 0
        assert sum(v for k, v in lost.items() if k.startswith("upto_")) == lost["tokens"]
    assert fresh["trained_ids"] != first["trained_ids"]


def test_a_late_run_repeats_bitwise(late_runs: dict[str, dict[str, Any]]) -> None:
    a, b = late_runs["mask freshest"], late_runs["mask freshest again"]
    assert a["weights_digest"] == b["weights_digest"] and a["ledger_lines"] == b["ledger_lines"]
    assert a["clock"] == b["clock"]


def test_every_evaluation_along_the_way_is_in_the_record(sort_model: Path) -> None:
    sets = [f"model.path='{sort_model}'", *SMALL, "evaluation.every=2", "learner.lr=1e-3"]
    record = serial.run_serial(load.load(ROOT / "configs" / "demo.toml", sets), 3 + RUN_SEED)
    steps, accuracy = record["accuracy"]
    assert steps == [0.0, 2.0, 4.0, 6.0, 8.0] and len(accuracy) == 5
    rewards = record["evals"]["heldout"]
    assert accuracy == pytest.approx([sum(x) / len(x) for x in rewards.values()])
