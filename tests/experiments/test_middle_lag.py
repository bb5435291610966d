"""benchmarks/studies/middle_lag.py: its arms, the choice of a rate, and its differences."""

from __future__ import annotations

from typing import Any

import pytest
from bench_rivals_kit import program

from asyncrl.config import load


class Runs:
    """Finished runs of a study: arm -> seed -> facts."""

    def __init__(self, runs: dict[str, list[float]]) -> None:
        self.arms = {arm: dict.fromkeys(range(len(found))) for arm, found in runs.items()}
        self.runs = runs

    def found(self, arm: str) -> dict[int, dict[str, float]]:
        values = [value for value in self.runs.get(arm, []) if value >= 0]
        return {seed: {"area": value, "end": value} for seed, value in enumerate(values)}


@pytest.fixture
def middle(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("middle_lag", monkeypatch)


def test_an_arm_has_its_lag_rate_and_method(middle: Any) -> None:
    for method, surrogate in (("none", "vanilla"), ("ppo", "ppo"), ("vespo", "vespo")):
        config = load.load("configs/rle.toml", middle.arm(8, method, 0.25))
        assert config.staleness.inject == config.staleness.max_lag == 8
        assert config.learner.lr == 1.25e-4 and config.loss.surrogate == surrogate
    assert min(middle.factors_of("none")) < min(middle.factors_of("ppo"))


def test_a_rate_is_chosen_by_mean_accuracy_of_whole_sets_of_seeds(middle: Any) -> None:
    runs = Runs(
        {
            "lag8 ppo x2": [0.9, -1.0],  # one run is missing
            "lag8 ppo x1": [0.4, 0.6],
            "lag8 ppo x0.5": [0.7, 0.5],
            "lag8 ppo x0.25": [0.6, 0.6],
        }
    )
    means = middle.tuned(runs, 8, "ppo")
    assert means == pytest.approx({1.0: 0.5, 0.5: 0.6, 0.25: 0.6})
    assert middle.choose({1.0: 0.5, 0.5: 0.6, 0.25: 0.6}) == 0.25


def test_differences_are_from_ppo_at_the_same_lag(middle: Any) -> None:
    runs = Runs(
        {
            "lag8 ppo": [0.5, 0.6, 0.7],
            "lag8 gmpo": [0.6, 0.7, 0.81],
            "lag12 ppo": [0.2, 0.3, 0.4],
            "lag12 gmpo": [0.1, 0.2, 0.29],
        }
    )
    found = middle.differences(runs, [8, 12])
    assert set(found) == {"end", "area"} and set(found["end"]) == {"lag8 gmpo", "lag12 gmpo"}
    assert found["end"]["lag8 gmpo"]["difference"] > 0 > found["end"]["lag12 gmpo"]["difference"]
    first = min(found["end"].values(), key=lambda d: d["p"])
    assert first["p_holm"] == pytest.approx(min(1.0, 2 * first["p"]))  # Holm over both lags
