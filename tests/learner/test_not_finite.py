"""A training that has diverged is told from other failures by the type of its error, whatever the
words.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_step_kit import batch, core, model_dir

from actors.engine import Completion
from actors.rewards import RewardResult
from actors.turn import ScoredResponse, build_trajectory
from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, NotFiniteError, ProtocolError
from asyncrl.contract.messages import Prompt, SamplingSettings, Ticket, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.experiments import serial

__all__ = ["model_dir"]  # a fixture


def test_three_bad_updates_in_a_row_are_not_finite(model_dir: Path) -> None:
    learner = core(model_dir)
    learner.state.bad_in_a_row = 2
    with pytest.raises(NotFiniteError) as error:
        learner.train(batch(7, reward=math.nan))
    assert error.value.exit_code == 1


def run_that_raises(error: Exception) -> Callable[..., Any]:
    class Raising:
        def __init__(self, *_: object) -> None: ...

        def run(self) -> None:
            raise error

        def make_record(self, seconds: float) -> dict[str, Any]:
            return {"seconds": seconds}

    return Raising


def test_an_experiment_records_a_divergence_and_raises_everything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load.load("configs/demo.toml")
    monkeypatch.setattr(serial, "SerialRun", run_that_raises(NotFiniteError("in other words")))
    assert serial.run_serial(config, 1) == {"seconds": 0.0, "failed": "in other words"}
    other = AsyncrlError("a lag that is not finite")
    monkeypatch.setattr(serial, "SerialRun", run_that_raises(other))
    with pytest.raises(AsyncrlError, match="a lag that is not finite"):
        serial.run_serial(config, 1)


def test_a_logprob_that_is_not_finite_is_a_divergence_and_a_breach_of_the_protocol() -> None:
    answer = Completion(
        key=(3, 1),
        prompt=np.zeros(2, "<i4"),
        tokens=np.zeros(1, "<i4"),
        logprobs=np.array([math.nan], "<f4"),
        spans=[VersionSpan(Label(1, 4), "digest", 0, 1, Label(1, 4))],
        finish="stop",
    )
    ticket = Ticket(
        ticket=3,
        attempt=0,
        kind="train",
        prompt=Prompt(0, "ab"),
        samples=[1],
        sampling=SamplingSettings(),
        min_version=Label(1, 4),
        exact_version=None,
        seed=0,
    )
    with pytest.raises(NotFiniteError, match="logprob that is not finite for ticket 3") as error:
        build_trajectory(
            ScoredResponse(ticket, answer, ""), RewardResult(answer.key, 0.0, {}, None, "")
        )
    assert isinstance(error.value, ProtocolError)
