"""What the learner carries from batch to batch, and the anchor it makes: the running baseline, the adaptive coefficient, the interpolation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_learner_step import GROUPS, SIZE, batch, core, model_dir, weights

from learner.batch import pack

__all__ = ["model_dir"]


def test_the_baseline_is_the_running_mean_of_the_rewards_and_is_subtracted(model_dir: Path) -> None:
    """The first batch sets it, then decay b + (1 - decay) mean; a batch at the baseline itself moves nothing."""
    c = core(model_dir, advantage={"name": "reinforce", "baseline": "ema", "ema_decay": 0.75})
    c.train(batch(0, reward=0.5))
    assert c.state.baseline == pytest.approx(0.5)
    before = weights(c)
    c.train(batch(1, seed=1, reward=0.5))
    assert torch.equal(weights(c), before) and c.state.baseline == pytest.approx(0.5)
    c.train(batch(2, seed=2, reward=0.9))
    assert c.state.baseline == pytest.approx(0.75 * 0.5 + 0.25 * 0.9) and not torch.equal(weights(c), before)


def test_an_adaptive_coefficient_falls_by_a_bounded_step_while_the_policy_is_the_reference(model_dir: Path) -> None:
    """KL 0 is below any target: beta (1 - 0.2 samples / horizon), in every batch that leaves the policy where it is."""
    kl = {"coefficient": 0.1, "estimator": "k2", "controller": "adaptive", "target": 6.0, "horizon": 1000}
    c = core(model_dir, learner={"lr": 0.0}, kl={"reward": kl})
    for n in range(3):
        c.train(batch(n, seed=n))
        assert c.state.beta == pytest.approx(0.1 * (1 - 0.2 * GROUPS * SIZE / 1000) ** (n + 1))
    fixed = core(model_dir, learner={"lr": 0.0}, kl={"reward": {**kl, "controller": "fixed"}})
    fixed.train(batch())
    assert fixed.state.beta == 0.1


def test_the_interpolated_anchor_leans_on_the_behaviour_policy_the_fresher_a_token_is(model_dir: Path) -> None:
    """1 / (lag + 1) of mu's log-probability, the rest the learner's own: mu itself at lag 0."""
    c = core(model_dir, correction={"proximal": "interpolate"})
    packed = pack(batch())
    c._anchor(packed, range(len(packed.responses)))
    loss, own = packed.loss, c._forward(c.model, packed, range(len(packed.responses)))
    assert loss.anchor is not None and set(loss.token_lag.tolist()) == {0, 1, 2, 3}
    share = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4])[loss.token_lag]
    assert torch.allclose(loss.anchor, share * loss.behavior + (1 - share) * own) and not torch.allclose(own, loss.behavior)
    assert torch.equal(loss.anchor[loss.token_lag == 0], loss.behavior[loss.token_lag == 0])


def test_the_learning_rate_follows_its_schedule_and_its_warmup(model_dir: Path) -> None:
    """Of ten steps: linear to 0 and a half cosine; warm-up of three steps: 1/4, 2/4, 3/4, 1 of it."""

    def share(n: int, **learner: object) -> float:
        c.config = core(model_dir, learner={"steps": 10, **learner}).config
        c.state.number = n
        return c._schedule()

    c = core(model_dir)
    assert [share(n, schedule="linear") for n in (0, 5, 9)] == pytest.approx([1, 0.5, 0.1])
    assert [share(n, schedule="cosine") for n in (0, 5, 10)] == pytest.approx([1, 0.5, 0])
    assert [share(n, schedule="constant", warmup_steps=3) for n in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert share(1, schedule="linear", warmup_steps=3) == pytest.approx(0.5 * 0.9)
    assert c._rate() == pytest.approx(0.1 * 0.5 * 0.9)
