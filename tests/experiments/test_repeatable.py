"""Exact mode repeats bitwise, whoever wrote the answers; and lag 0 is the plain loop."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_exact_loop
import pytest
import torch
from models_kit import model_fixture
from process_kit import RUN_SEED
from safetensors.torch import load_file
from shared_reward import reward
from warm_run_kit import SMALL

from asyncrl.config import load
from asyncrl.config.tree import TaskConfig
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial
from asyncrl.experiments.replay.diff import MACHINE
from asyncrl.tasks import get_task
from buffer.evaluation import EvaluationRound, EvaluationSet

STEPS, GROUPS, SIZE, MOST, LR = 6, 4, 4, 12, 3e-3  # as conftest.SMALL has them
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
        values = {k: v for k, v in row.items() if not k.startswith(MACHINE) and k != "t"}
        later.setdefault((row["step"], "reward/mean" in row), {}).update(values)
    return [later[key] for key in sorted(later)]


@pytest.fixture(scope="module")
def synchronous(run: Run) -> dict[str, Any]:
    return run("sync1", "staleness.max_lag=0")


def test_limit_zero_is_the_plain_loop(synchronous: dict[str, Any], small_model: Path) -> None:
    weights, told = plain_exact_loop.train(
        small_model,
        lambda i: SORT.prompt("train", i, RUN_SEED),
        reward,
        steps=STEPS,
        groups=GROUPS,
        size=SIZE,
        most=MOST,
        lr=LR,
        seed=RUN_SEED,
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
    assert len({t["reward/mean"] for t in told}) == STEPS
    assert synchronous["lag"]["max"] == 0


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


def test_a_constant_lag_is_that_lag_and_other_training(
    injected: dict[str, Any], synchronous: dict[str, Any]
) -> None:
    by_step = [
        r["lag/max"]
        for r in sorted(injected["rows"], key=lambda r: r["step"])
        if "reward/mean" in r
    ]
    assert by_step == [0, 1, 2, 2, 2, 2]
    assert injected["digest"] != synchronous["digest"]


def test_an_evaluation_does_not_hang_on_the_order_of_arrival() -> None:
    rewards = [0.1, 0.7, 0.3, 0.2, 1e16, -1e16]
    plan = EvaluationSet("heldout", 0, 6)
    means = set()
    for order in itertools.permutations(range(6)):
        arrived = [rewards[place] for place in order]
        evaluation = EvaluationRound(
            Label(1, 0), "heldout", 6, arrived, [1] * 6, places=list(order)
        )
        means.add(evaluation.compute_metrics(plan)["eval/heldout"])
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
    def run(*sets: str) -> dict[str, object]:
        return serial.run_serial(
            load.load("configs/demo.toml", [f"model.path='{model}'", *SMALL, *sets]), 3 + RUN_SEED
        )

    sync, natural, late = (
        run("staleness.max_lag=0"),
        run("staleness.max_lag=2"),
        run("staleness.max_lag=8", "staleness.inject=8"),
    )
    assert set(sync["lag_histogram"]) == {"0"}  # type: ignore[call-overload]
    # the engine goes on as far as the limit lets it
    assert set(natural["lag_histogram"]) == {"0", "1", "2"}
    # lag 8 of 4 batches: as old as there is
    assert set(late["lag_histogram"]) == {"0", "1", "2", "3"}
    assert sync["trained_ids"] == natural["trained_ids"] == late["trained_ids"]
    again = run("staleness.max_lag=2")
    assert again["weights_digest"] == natural["weights_digest"] != sync["weights_digest"]
    assert again["evals"] == natural["evals"]
    last = str(natural["steps"])
    rewards = natural["evals"]["heldout"][last]  # type: ignore[index]
    metrics = natural["evaluation_metrics"]["eval/heldout"]  # type: ignore[index]
    assert set(metrics) == set(natural["evals"]["heldout"])  # type: ignore[index]
    assert metrics[last] == pytest.approx(sum(rewards) / len(rewards))
