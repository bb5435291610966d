"""Orders of training, and runs that repeat bit by bit."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import plain_exact_loop
import pytest
import torch
from models_kit import model_fixture
from process_kit import ROOT, RUN_SEED
from safetensors.torch import load_file
from shared_reward import reward
from store_kit import make, train, write
from warm_run_kit import SMALL

from actors.turn import GeneratorTurn, compute_delay_steps
from asyncrl.config import load
from asyncrl.config.tree import TaskConfig
from asyncrl.contract import admission
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial
from asyncrl.experiments.replay import diff
from asyncrl.tasks import get_task
from buffer.evaluation import EvaluationRound, EvaluationSet


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
    # they come back by their time
    config = load.load(ROOT / "configs" / "demo.toml")
    late: Any = SimpleNamespace(delayed=[], config=config, unscored={(x, 0): x for x in "abcd"})
    late.finish = lambda completion: SimpleNamespace(ticket=ticket)
    assert GeneratorTurn.pop_due(late, 1e9) == []
    for until, what in ((3.0, "b"), (1.0, "a"), (3.0, "c"), (9.0, "d")):
        GeneratorTurn.hold(late, SimpleNamespace(key=(what, 0), tokens=[1]), until)
    assert GeneratorTurn.pop_due(late, 0.5) == []
    assert GeneratorTurn.pop_due(late, 3.0) == ["a", "b", "c"]
    assert late.delayed == [(9.0, ("d", 0))]


ORDERED_TEXT = (
    "generator.max_new_tokens=56 generator.slots=32 learner.steps=8 learner.groups=4 "
    "learner.group_size=4 evaluation.every=0 evaluation.prompts=8 evaluation.final_prompts=8 "
    "evaluation.ood_prompts=0 staleness.max_lag=2"
)
ORDERED = ORDERED_TEXT.split()


@pytest.fixture(scope="module")
def late_runs(sort_model: Path) -> dict[str, dict[str, Any]]:
    def run(*sets: str) -> dict[str, Any]:
        words = [f"model.path='{sort_model}'", *ORDERED, *sets]
        return serial.run_serial(load.load(ROOT / "configs" / "demo.toml", words), 3 + RUN_SEED)

    late, masked = "staleness.delay=1", "staleness.on_exceed=mask"
    names = ("completion", "freshest", "freshest again")
    orders = {f"mask {name}": f"staleness.order={name.split()[0]}" for name in names}
    return {name: run(late, masked, order) for name, order in orders.items()} | {
        "prompt": run(),
        "pace": run(late),
        "drop": run(late, "staleness.on_exceed=drop"),
    }


def test_ticket_order_waits_for_late_answers(late_runs: dict[str, dict[str, Any]]) -> None:
    prompt, late = late_runs["prompt"], late_runs["pace"]
    assert late["clock"] > prompt["clock"] and late["trained_ids"] == prompt["trained_ids"]
    assert max(map(int, late["lag_histogram"])) <= 2
    assert late["ledger_lines"]["trained"]["tokens"] == sum(
        x["tokens"] for x in late["ledger_lines"].values()
    )


def test_other_orders_train_others_and_count_losses(late_runs: dict[str, dict[str, Any]]) -> None:
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


STEPS = 6
SORT = get_task(TaskConfig(name="sort"))
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(forked: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(NAME, "key=value", ..., die={...})`: a real run in exact mode."""
    base = tmp_path_factory.mktemp("repeatable")
    return lambda name, *sets, **more: forked(base / name, "exact=true", *sets, **more)


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What a run computed, step by step: no times, no loads."""
    # a resumed learner makes some steps again: the later row counts; evaluations of a step end in
    # any order
    later: dict[tuple[int, bool], dict[str, float]] = {}
    for row in rows:
        values = {
            k: v for k, v in row.items() if not k.startswith(tuple(diff.MACHINE)) and k != "t"
        }
        later.setdefault((row["step"], "reward/mean" in row), {}).update(values)
    return [later[key] for key in sorted(later)]


@pytest.fixture(scope="module")
def synchronous(run: Run) -> dict[str, Any]:
    return run("sync1", "staleness.max_lag=0")


def test_limit_zero_is_the_plain_loop(synchronous: dict[str, Any], small_model: Path) -> None:
    sizes = {"steps": STEPS, "groups": 4, "size": 4, "most": 12}  # as conftest.SMALL has them
    prompt = lambda i: SORT.prompt("train", i, RUN_SEED)  # noqa: E731
    weights, told = plain_exact_loop.train(
        small_model, prompt, reward, **sizes, lr=3e-3, seed=RUN_SEED
    )
    trained = load_file(synchronous["run_dir"] / "model" / "model.safetensors")
    before = load_file(small_model / "model.safetensors")
    assert weights.keys() == trained.keys()
    for name, w in weights.items():
        assert torch.equal(w, trained[name]), name
        assert not torch.equal(w, before[name]), name
    rows = [r for r in synchronous["rows"] if "reward/mean" in r]
    assert [r["reward/mean"] for r in rows] == pytest.approx(
        [t["reward/mean"] for t in told], abs=1e-6
    )
    # rewards that never differ would show nothing
    assert len({t["reward/mean"] for t in told}) == STEPS and synchronous["lag"]["max"] == 0


def test_answers_that_come_late_change_no_bit(run: Run, synchronous: dict[str, Any]) -> None:
    late = run("late", "staleness.max_lag=0", "staleness.delay=3")
    assert late["digest"] == synchronous["digest"] and late["lag"] == synchronous["lag"]
    for a, b in zip(numbers(synchronous["rows"]), numbers(late["rows"]), strict=True):
        assert a == b


# A run takes at least 17 engine steps (930 tokens, 7 rows, 8 tokens a step): of generators that all
# die at their fourth, one gets there.
SLOW = {"generator-1": 0.02}
OTHERS = [
    (0, 2, {"die": {"generator-0": 4, "generator-1": 4}}),
    (0, 3, {"slow": SLOW}),
    (2, 2, {"die": {"learner": 4}}),
    (2, 3, {"slow": SLOW, "die": {f"generator-{number}": 4 for number in range(3)}}),
]


@pytest.mark.parametrize(
    ("lag", "generators", "more"), OTHERS, ids=[f"lag-{o[0]}-generators-{o[1]}" for o in OTHERS]
)
def test_the_same_bits_whoever_writes(
    lag: int, generators: int, more: dict[str, Any], run: Run, request: pytest.FixtureRequest
) -> None:
    one = request.getfixturevalue("synchronous" if lag == 0 else "injected")
    limit = [f"staleness.max_lag={lag}", *([f"staleness.inject={lag}"] if lag else [])]
    other = run(f"lag{lag}x{generators}", *limit, f"generators={generators}", **more)
    assert bool(other["deaths"]) == bool(more.get("die"))
    assert set(other["deaths"]) <= set(more.get("die", {})) and other["digest"] == one["digest"]
    assert other["lag"] == one["lag"]
    for a, b in zip(numbers(one["rows"]), numbers(other["rows"]), strict=True):
        assert a == b


@pytest.fixture(scope="module")
def injected(run: Run) -> dict[str, Any]:
    return run("inject1", "staleness.max_lag=2", "staleness.inject=2")


def test_a_lag_changes_the_training(injected: dict[str, Any], synchronous: dict[str, Any]) -> None:
    rows = sorted(injected["rows"], key=lambda row: row["step"])
    by_step = [row["lag/max"] for row in rows if "reward/mean" in row]
    assert by_step == [0, 1, 2, 2, 2, 2] and injected["digest"] != synchronous["digest"]


def test_an_evaluation_does_not_hang_on_the_order_of_arrival() -> None:
    rewards = [0.1, 0.7, 0.3, 0.2, 1e16, -1e16]
    plan = EvaluationSet("heldout", 0, 6)
    means = set()
    for order in itertools.permutations(range(6)):
        arrived = [rewards[place] for place in order]
        made = EvaluationRound(Label(1, 0), "heldout", 6, arrived, [1] * 6, places=list(order))
        means.add(made.compute_metrics(plan, lambda _, i: Prompt(i, ""))["eval/heldout"])
    assert means == {1.3 / 6}


@pytest.mark.parametrize("proximal", ["version", "ema"])
def test_earlier_weights_as_proximal_policies_repeat(proximal: str, run: Run) -> None:
    """The engine's bits are the learner's under the same weights: pi_v / mu is 1 at every lag. An
    average of the learner's weights continues from its checkpoint."""
    words = ("staleness.max_lag=2", "staleness.inject=2", "weights.in_flight='recompute_kv'")
    words += (f"correction.proximal={proximal!r}", "loss.surrogate='decoupled_ppo'")
    one = run(f"{proximal}1", *words)
    rows = [r for r in one["rows"] if "reward/mean" in r]
    assert max(r["lag/max"] for r in rows) == 2 and min(r["is/ess"] for r in rows) < 1
    weights = {(r["is/mean_weight"], r["is/weight_ess"], r.get("is/fallback_share")) for r in rows}
    assert (weights == {(1.0, 1.0, 0.0)}) == (proximal == "version")
    killed = run(f"{proximal}2", *words, die={"learner": 4})
    assert killed["deaths"] and killed["digest"] == one["digest"]
    for a, b in zip(numbers(one["rows"]), numbers(killed["rows"]), strict=True):
        assert a == b


model = model_fixture("0123456789=:,#", layers=1)


def test_arms_see_the_same_data_at_their_own_lag_and_repeat_bitwise(model: Path) -> None:
    def run(*sets: str) -> dict[str, Any]:
        return serial.run_serial(
            load.load("configs/demo.toml", [f"model.path='{model}'", *SMALL, *sets]), 3 + RUN_SEED
        )

    sync, natural, late = (
        run("staleness.max_lag=0"),
        run("staleness.max_lag=2"),
        run("staleness.max_lag=8", "staleness.inject=8"),
    )
    assert set(sync["lag_histogram"]) == {"0"}
    # the engine goes on as far as the limit lets it
    assert set(natural["lag_histogram"]) == {"0", "1", "2"}
    # lag 8 of 4 batches: as old as there is
    assert set(late["lag_histogram"]) == {"0", "1", "2", "3"}
    assert sync["trained_ids"] == natural["trained_ids"] == late["trained_ids"]
    again = run("staleness.max_lag=2")
    assert again["weights_digest"] == natural["weights_digest"] != sync["weights_digest"]
    assert again["evals"] == natural["evals"]
    evaluated = natural["evals"]["heldout"]
    means = [sum(rewards) / len(rewards) for rewards in evaluated.values()]
    assert natural["accuracy"] == [[0.0, 2.0, 4.0], pytest.approx(means)]
    assert [*natural["evaluation_metrics"]["eval/heldout"]] == [*evaluated] == ["0", "2", "4"]
