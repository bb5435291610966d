"""A run in one warm process: the same data whatever the lag, the lag that the limit allows, the
same bits again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from process_kit import RUN_SEED
from warm_run_kit import SMALL

from asyncrl.config import load
from asyncrl.experiments import serial
from asyncrl.models.policy import build_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "model"
    build_model(path, "0123456789=:,#", hidden=32, layers=1)
    return path


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
    assert set(natural["lag_histogram"]) == {"0", "1", "2"}, (
        "the engine goes on as far as the limit lets it"
    )  # type: ignore[call-overload]
    assert set(late["lag_histogram"]) == {"0", "1", "2", "3"}, (
        "lag 8 of 4 batches: as old as there is"
    )  # type: ignore[call-overload]
    assert sync["trained_ids"] == natural["trained_ids"] == late["trained_ids"]
    again = run("staleness.max_lag=2")
    assert again["weights_digest"] == natural["weights_digest"] != sync["weights_digest"]
    assert again["evals"] == natural["evals"]
    last = str(natural["steps"])
    rewards = natural["evals"]["heldout"][last]  # type: ignore[index]
    metrics = natural["evaluation_metrics"]["eval/heldout"]  # type: ignore[index]
    assert set(metrics) == set(natural["evals"]["heldout"])  # type: ignore[index]
    assert metrics[last] == pytest.approx(sum(rewards) / len(rewards))


def test_what_each_rule_at_the_limit_takes_by_answer_length(sort_model: Path) -> None:
    """With more answers in the engine than a batch takes, some of them outlive the limit of 1."""

    def run(rule: str) -> dict[str, Any]:
        sets = [
            f"model.path='{sort_model}'",
            *SMALL,
            "generator.max_new_tokens=56",
            "generator.slots=48",
            "learner.steps=6",
            f"staleness.on_exceed={rule}",
            "staleness.max_lag=1",
        ]
        return serial.run_serial(load.load("configs/demo.toml", sets), 3 + RUN_SEED)

    pace, drop, mask, fade = (run(x) for x in ("pace", "drop", "mask", "downweight"))
    assert pace["ledger_lines"]["trained"]["tokens"] == sum(
        x["tokens"] for x in pace["ledger_lines"].values()
    ), "pacing loses nothing"
    assert max(map(int, pace["lag_histogram"])) <= 1
    assert max(map(int, drop["lag_histogram"])) <= 1
    assert max(map(int, mask["lag_histogram"])) <= 1
    gone = drop["ledger_lines"]["dropped_stale"]
    assert gone["tokens"] > 0
    assert sum(x for k, x in gone.items() if k.startswith("upto_")) == gone["tokens"]
    assert mask["ledger_lines"]["masked_stale"]["tokens"] > 0
    assert sum(mask["lag_histogram"].values()) == mask["ledger_lines"]["trained"]["tokens"]
    assert sum(x for k, x in fade["ledger_lines"]["trained"].items() if k.startswith("faded_")) > 0
    assert "2" in fade["lag_histogram"]
