"""benchmarks/studies/trust_regions.py: its arms, and the rate that reaches an equal KL."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from process_kit import ROOT

from asyncrl.config import load
from asyncrl.experiments.compare import grid


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks" / "studies")])
    import trust_regions

    return trust_regions


@pytest.mark.parametrize("power", [0.8, 1.5, 2.0, 3.0])
def test_a_few_runs_find_the_rate_that_moves_the_target(power: float, program: Any) -> None:
    """KL = 500 rate^power, whatever the power: secant steps on the logarithms are exact from the
    second run on."""
    tried = [(2e-4, 500 * 2e-4**power)]
    while abs(tried[-1][1] / (goal := 3e-7) - 1) > 0.05:
        rate = program.next_rate(tried, goal)
        tried.append((rate, 500 * rate**power))
    assert len(tried) <= 3


def test_each_arm_is_a_config_of_its_own_at_every_lag_and_ppo_at_lag_0_is_the_base(
    program: Any,
) -> None:
    sets = ["learner.minibatches=4", "learner.lr=0.0002"]
    arms = [(n, [*items, "learner.lr=0.0002"]) for n, (_, items) in program.ARMS.items()]
    p = grid.make_plan(str(ROOT / "configs" / "rle.toml"), sets, arms, [0.0, 4.0], injected=True)
    assert len({load.dump(c) for c in p.arms.values()}) == len(p.arms) == 2 * len(arms)
    assert p.cell["ppo", 0.0] == grid.SYNC
    assert p.arms["dppo-limit4"].correction.proximal == "behavior"
    assert p.arms["reshape-D-limit4"].stop.action == "slow"
    assert p.arms["gspo-limit4"].loss.reduction == "seq-mean-token-mean"


def test_what_a_run_moved_leaves_its_start_out(program: Any) -> None:
    curve = [{"version": n, "kl/moved": float(n)} for n in range(1, 9)] + [{"version": 9}]
    assert program.moved({"curve": curve}) == pytest.approx((4 + 5 + 6 + 7 + 8) / 5)
    assert program.moved({"curve": curve}, 5) == pytest.approx(4.5)
