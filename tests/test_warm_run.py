"""A run in one warm process: the same data whatever the lag, the lag that the limit allows, the same bits again."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config_load
from asyncrl.compare import runner
from asyncrl.models import build_model

# An untrained model is never right: the entropy term is what moves its weights.
SMALL = ("learner.steps=4", "learner.groups=4", "learner.group_size=4", "generator.slots=16", "generator.max_new_tokens=12", "evaluation.every=2",
         "evaluation.prompts=8", "evaluation.final_prompts=8", "evaluation.ood_prompts=0", "loss.entropy=0.1")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "model"
    build_model(path, "0123456789=:,#", hidden=32, layers=1)
    return path


def test_arms_see_the_same_data_at_their_own_lag_and_repeat_bitwise(model: Path) -> None:
    def run(*sets: str) -> dict[str, object]:
        return runner.one(config_load.load("configs/demo.toml", [f"model.path='{model}'", *SMALL, *sets]), 3)

    sync, natural, late = run("staleness.max_lag=0"), run("staleness.max_lag=2"), run("staleness.max_lag=8", "staleness.inject=8")
    assert set(sync["lag_histogram"]) == {"0"}  # type: ignore[call-overload]
    assert set(natural["lag_histogram"]) == {"0", "1", "2"}, "the engine goes on as far as the limit lets it"  # type: ignore[call-overload]
    assert set(late["lag_histogram"]) == {"0", "1", "2", "3"}, "lag 8 of 4 batches: as old as there is"  # type: ignore[call-overload]
    assert sync["trained_ids"] == natural["trained_ids"] == late["trained_ids"]
    again = run("staleness.max_lag=2")
    assert again["weights_digest"] == natural["weights_digest"] != sync["weights_digest"]
    assert again["evals"] == natural["evals"]
