"""benchmarks/studies/kl_placement.py: its arms, also with lag, and a run that ends in a table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_rivals_kit import program

from asyncrl.contract.errors import ConfigError


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return program("kl_placement", monkeypatch)


def options(out: Path, **more: Any) -> SimpleNamespace:
    plain = {"quick": False, "groups": 4, "steps": 3, "seeds": 2, "task": "rlehack", "lag": 0}
    rest = {"lr": "", "betas": "0.1", "places": "all", "distillation": ""}
    return SimpleNamespace(**(plain | rest | {"out": out} | more))


def test_every_place_is_a_term_of_its_own_and_late_ones_differ_by_one_key(
    bench: Any, tmp_path: Path
) -> None:
    study = bench.plan(options(tmp_path, lag=4, lr="5e-4", places="all,late"))
    assert len(study.arms) == 1 + 6 + 2
    configs = {arm: study.cells.configs[names[0]] for arm, names in study.arms.items()}
    for arm, config in configs.items():
        assert (config.staleness.inject, config.learner.lr) == (4, 5e-4), arm
        where = arm.partition(",")[0].split()[-1]
        on = [config.kl.reward.coefficient, config.kl.loss.coefficient]
        assert on == {"KL": [0, 0], "reward": [0.1, 0], "loss": [0, 0.1]}[where], arm
    assert configs["k2 in reward, 0.1"].kl.reward.estimator == "k2"
    assert configs["k1 in reward, 0.1"].kl.reward.at == "start"
    assert configs["k1 at mu in reward, 0.1"].kl.reward.at == "behavior"
    assert configs["k3 in loss, 0.1"].kl.loss.off_policy == "none"
    late = configs["k3 prefix in loss, 0.1"].kl.loss
    assert (late.estimator, late.off_policy) == ("k3", "prefix")
    assert "lr5e-4" in study.arms["no KL"][0], "runs of another rate are other cells"


def test_an_unknown_place_is_named_with_those_there_are(bench: Any) -> None:
    assert bench.places_of("late,k1 in loss") == [*bench.LATE, "k1 in loss"]
    with pytest.raises(ConfigError, match="k4 in loss: unknown; choose of all, late, k1 in reward"):
        bench.places_of("k1 in loss,k4 in loss")
