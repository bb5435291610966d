"""benchmarks/studies/reshape_collapse.py: its arms, and the summary of the log of steps."""

from __future__ import annotations

from typing import Any

import pytest
from bench_rivals_kit import program

from asyncrl.config import load


@pytest.fixture
def collapse(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("reshape_collapse", monkeypatch)


def test_each_arm_is_what_its_name_says(collapse: Any) -> None:
    config = {
        arm: load.load("configs/rle.toml", ["learner.epochs=16", *items])
        for arm, items in collapse.arms("").items()
    }
    assert [c.loss.surrogate for c in config.values()] == ["ppo", "vanilla", *["reshape"] * 7]
    assert {arm for arm, c in config.items() if c.stop.kl_max} == {"A", "D on the rate"}
    assert {arm for arm, c in config.items() if c.stop.action == "slow"} == {"D on the rate"}
    assert {arm for arm, c in config.items() if c.reshape.budget == "tokens"} == {"D"}
    assert list(collapse.arms("clip,D")) == ["clip", "D"]
    assert {arm for arm, c in config.items() if c.reshape.kl_penalty} == {"C"}
    clips = {arm: (c.reshape.clip, c.reshape.clip_on) for arm, c in config.items()}
    assert clips["B"] == (0.2, "w") and clips["B on w^gamma"] == (0.2, "w_gamma")
    assert clips["v3.1"][0] == 0


def test_a_log_of_steps_becomes_means_by_step_and_by_batch(collapse: Any) -> None:
    rows = [
        {"step": batch, "update": i, "optim/grad_norm": 10.0 * batch + i}
        | ({"reshape/sigma2": 1.0} if batch else {})
        for batch, count in enumerate((2, 3))
        for i in range(count)
    ]
    assert collapse.summarize_steps(rows) == {
        "by_update": {"grad_norm": [5.0, 6.0, 12.0]},
        "by_batch": {"grad_norm": [0.5, 11.0]},
    }
