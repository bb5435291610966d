"""A training that has diverged is told from other failures by the type of its error, whatever the
words."""

from collections.abc import Callable
from typing import Any

import pytest
from learner_step_kit import model_dir

from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, NotFiniteError
from asyncrl.experiments import serial

__all__ = ["model_dir"]  # a fixture


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
