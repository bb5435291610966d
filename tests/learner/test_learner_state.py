"""What the learner carries from batch to batch, and the anchor it makes: the running baseline, the
adaptive coefficient, the interpolation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from learner_step_kit import batch, core, model_dir, weights
from transformers import get_scheduler

from asyncrl.config import load
from asyncrl.config.sft import SftTraining
from asyncrl.config.tree import LearnerConfig, compute_learning_rate_share
from asyncrl.contract.errors import AsyncrlError, ConfigError, DamagedDataError, NotFiniteError
from asyncrl.experiments import serial
from asyncrl.models.policy import build_model, copy_flat_bytes, load_weights, read_flat
from asyncrl.models.weight_rounding import load_learner_policy
from learner import checkpoint, step
from learner.batch import pack

__all__ = ["model_dir"]


def test_the_coefficient_of_now_and_not_of_the_configuration_is_charged(
    model_dir: Path, tmp_path: Path
) -> None:
    """Resumed at 0 the run is the run without the term; at twice the coefficient the charge is
    twice as large."""
    build_model(tmp_path / "ref", "abcdefgh", hidden=32, layers=2, seed=5)
    kl = {"reward": {"coefficient": 0.1, "reference": str(tmp_path / "ref")}}
    plain = core(model_dir)
    none = core(model_dir, kl=kl)
    once = core(model_dir, kl=kl)
    twice = core(model_dir, kl=kl)
    none.state.beta, twice.state.beta = 0.0, 0.2
    without, at_zero = plain.train(batch()), none.train(batch())
    assert torch.equal(weights(plain), weights(none))
    assert "kl/answer" not in at_zero
    assert at_zero["reward/used_mean"] == without["reward/mean"]
    a, b = once.train(batch()), twice.train(batch())
    assert b["kl/reward_gradient_share"] == pytest.approx(2 * a["kl/reward_gradient_share"])
    assert (a["kl/beta"], b["kl/beta"]) == (0.1, 0.2)
    assert (
        b["reward/mean"] - b["reward/used_mean"]
        == pytest.approx(2 * (a["reward/mean"] - a["reward/used_mean"]), rel=1e-3)
        != 0
    )


def test_other_ranks_are_told_of_the_batch_before_anything_else(model_dir: Path) -> None:
    c, told = core(model_dir), []
    c.backend.broadcast = lambda *what: told.append(what)
    b = batch(4)
    c.train(b)
    assert told == [("train", b)]


def test_exact_runs_end_at_the_first_difference(model_dir: Path) -> None:
    """The behaviour policy here is nobody's: at lag 0 it differs by its largest log ratio."""
    c = core(model_dir)
    c.config = msgspec.structs.replace(c.config, exact=True)
    packed = pack(batch())
    off = (
        (c._forward(c.model, packed, range(len(packed.responses))) - packed.behavior)
        .abs()[packed.token_lag == 0]
        .max()
    )
    with pytest.raises(AsyncrlError) as e:
        c.train(batch(3))
    assert str(e.value) == (
        f"exact: engine and learner differ at lag 0 in batch 3 by {float(off):.1e} nats; see "
        '`asyncrl doctor --exact`, or exact = "try"'
    )


def test_the_exact_kl_of_each_step_needs_both_models_packed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another kind has no packed forward: the policy's own, or the reference's."""
    kl = {"loss": {"coefficient": 0.1, "off_policy": "prefix_full"}}
    for without in (0, 1):
        loaded = []

        def load(
            *args: object, without: int = without, loaded: list[object] = loaded, **more: object
        ) -> object:
            model = load_learner_policy(*args, **more)
            if len(loaded) == without:
                model.fast = None
            loaded.append(model)
            return model

        monkeypatch.setattr(step, "load_learner_policy", load)
        with pytest.raises(ConfigError) as e:
            core(model_dir, kl=kl)
        assert str(e.value) == (
            "kl.loss.off_policy: prefix_full needs a model of the packed forward (Llama, Qwen2, "
            "Qwen3, Mistral, Qwen3-MoE, Mixtral), "
            "also as its reference; use prefix"
        )
        loaded.clear()
        # the others do without it
        core(model_dir, kl={"loss": {"coefficient": 0.1, "off_policy": "prefix"}})


def test_the_interpolated_anchor_leans_on_the_behaviour_policy_the_fresher_a_token_is(
    model_dir: Path,
) -> None:
    """1 / (lag + 1) of mu's log-probability, the rest the learner's own: mu itself at lag 0."""
    c = core(model_dir, correction={"proximal": "interpolate"})
    data = batch()
    packed = pack(data)
    c._set_proximal(data, packed)
    loss, own = packed, c._forward(c.model, packed)
    assert loss.proximal is not None and set(loss.token_lag.tolist()) == {0, 1, 2, 3}
    share = torch.tensor([1, 1 / 2, 1 / 3, 1 / 4])[loss.token_lag]
    assert torch.allclose(loss.proximal, share * loss.behavior + (1 - share) * own)
    assert not torch.allclose(own, loss.behavior)
    assert torch.equal(loss.proximal[loss.token_lag == 0], loss.behavior[loss.token_lag == 0])


@pytest.mark.parametrize("rank", [0, 4])
def test_an_average_of_the_versions_is_the_proximal_policy(
    rank: int, model_dir: Path, tmp_path: Path
) -> None:
    """By hand; a checkpoint continues it, of adapters too, and one without it is refused."""
    correction = {"proximal": "ema", "ema_half_life": 0.5}
    c, again, by_hand = (core(model_dir, correction=correction, lora={"rank": rank}) for _ in "123")
    versions = [copy_flat_bytes(c.model)]
    for n in range(2):
        c.train(batch(n, seed=n))
        versions.append(copy_flat_bytes(c.model))
    rows = [read_flat(memoryview(flat), c.layout) for flat in versions]
    mean = {name: sum(x[name] * 4.0**k for k, x in enumerate(rows)) / 21 for name in rows[0]}
    load_weights(by_hand.model, mean)
    packed = pack(batch())
    c._set_proximal(batch(), packed)
    expected = by_hand._forward(by_hand.model, packed)
    assert packed.proximal is not None and torch.allclose(packed.proximal, expected, atol=1e-6)
    assert copy_flat_bytes(c.model) == versions[-1]
    assert not torch.allclose(c._forward(c.model, packed), expected, atol=1e-4)
    checkpoint.save(tmp_path, c, {}, 1)
    checkpoint.restore(again, tmp_path / "number_2")
    assert again.train(batch(2)) == c.train(batch(2))
    assert again.average is not None and c.average is not None
    assert all(map(torch.equal, again.average.values, c.average.values))
    (tmp_path / "number_2" / "average_0.pt").unlink()
    with pytest.raises(DamagedDataError, match="has no average of these weights"):
        checkpoint.restore(again, tmp_path / "number_2")


def transformers_rates(name: str, warmup: int, steps: int, **keys: float) -> list[float]:
    """Return the learning rates of transformers' scheduler at a rate of 0.3, also past the end."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = get_scheduler(name, optimizer, warmup, steps, dict(keys))
    rates = []
    for _ in range(steps + 3):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 2, 5, 6, 9])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_schedule_is_that_of_transformers_to_the_last_bit(name: str, warmup: int) -> None:
    """Also past the end, and in supervised training, where `lr_end` is their min_lr_rate."""
    keys: dict[str, Any] = {"schedule": name, "warmup_steps": warmup, "lr": 0.3}
    theirs = "constant_with_warmup" if name == "constant" else name
    for steps in (1, 6, 7, 23):
        learner = LearnerConfig(steps=steps, **keys)
        for settings in (learner, SftTraining(steps=steps, lr_end=0.0, **keys)):
            ours = [0.3 * compute_learning_rate_share(settings, n) for n in range(steps + 3)]
            assert ours == transformers_rates(theirs, warmup, steps), steps
    settings = SftTraining(steps=23, lr_end=0.2, **keys)
    ours = [0.3 * compute_learning_rate_share(settings, n) for n in range(26)]
    assert max(ours) == 0.3, "the rate of the config is reached"
    if name == "cosine":
        assert ours == transformers_rates("cosine_with_min_lr", warmup, 23, min_lr_rate=0.2)
    assert ours[23] == pytest.approx(0.3 if name == "constant" else 0.2 * 0.3)


def test_the_learner_trains_each_batch_at_its_rate(model_dir: Path) -> None:
    learner = {"steps": 6, "schedule": "linear", "warmup_steps": 2, "lr": 0.3}
    c = core(model_dir, learner=learner)
    rates = [c.train(batch(n, seed=n))["optim/lr"] for n in range(3)]
    assert rates == transformers_rates("linear", 2, 6)[:3] == [0.0, 0.15, 0.3]


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
