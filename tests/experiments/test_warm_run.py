"""A run in one warm process: the same data whatever the lag, the lag that the limit allows, the
same bits again."""

from pathlib import Path

import pytest
from models_kit import model_fixture
from process_kit import RUN_SEED
from warm_run_kit import SMALL

from asyncrl.config import load
from asyncrl.experiments import serial

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
