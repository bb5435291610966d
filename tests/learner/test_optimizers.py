"""Muon for the matrices, and the learning rate that falls with the lag."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from learner_step_kit import batch, core, model_dir, weights

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from learner import checkpoint
from learner.step import make_backend

__all__ = ["model_dir"]

MUON: dict[str, Any] = {"optimizer": "muon", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5}


def test_muon_steps_the_layers_matrices_and_adamw_the_rest(model_dir: Path) -> None:
    """By torch's two optimizers on the same gradients."""
    c = core(model_dir, learner=MUON)
    own = dict(c.model.hf.named_parameters())
    copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in own.items()}
    by_muon = [name for name, p in own.items() if name.endswith("_proj.weight")]
    assert len(by_muon) == 14  # seven a layer
    others = [copies[name] for name in own if name not in by_muon]
    betas = (c.config.learner.beta1, c.config.learner.beta2)
    optimizers = (
        torch.optim.Muon(
            [copies[name] for name in by_muon],
            lr=0.01,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, betas=betas, fused=True),
    )
    for number in range(3):
        taken: dict[str, torch.Tensor] = {}
        clip = c.backend.clip

        def keep(parameters: Any, taken: Any = taken, clip: Any = clip) -> torch.Tensor:
            norm = clip(parameters)
            taken.update({name: p.grad.clone() for name, p in own.items() if p.grad is not None})
            return norm

        c.backend.clip = keep
        c.train(batch(number, seed=number))
        c.backend.clip = clip
        for name, gradient in taken.items():
            copies[name].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.data, copies[name].data, rtol=0, atol=0)


def test_muon_resumes_bitwise_and_clipping_keeps_its_step(model_dir: Path, tmp_path: Path) -> None:
    made = core(model_dir, learner=MUON)
    smaller = core(model_dir, learner=MUON | {"clip_norm": 0.005})
    before = {name: p.detach().clone() for name, p in made.model.hf.named_parameters()}
    for number in range(2):
        made.train(batch(number, seed=number))
    smaller.train(batch(0, seed=0))
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (dict(smaller.model.hf.named_parameters())[name].detach() - before[name]).norm()
    # an orthogonal step of 0.2 sqrt(longest side) times the rate a side
    rows, columns = before[name].shape
    assert float(moved) == pytest.approx(
        0.01 * 0.2 * max(rows, columns) ** 0.5 * min(rows, columns) ** 0.5, rel=0.3
    )
    checkpoint.save(tmp_path, made, {}, 3)
    made.train(batch(2, seed=2))
    again = core(model_dir, learner=MUON)
    checkpoint.restore(again, tmp_path / "number_2")
    again.train(batch(2, seed=2))
    assert torch.equal(weights(made), weights(again))


@pytest.mark.parametrize("written", ["adamw", "muon", "sgd"])
def test_an_optimizer_refuses_anothers_state(written: str, model_dir: Path, tmp_path: Path) -> None:
    made = core(model_dir, learner={"optimizer": written})
    made.train(batch(0, seed=0))
    checkpoint.save(tmp_path, made, {}, 3)
    for optimizer in ("adamw", "muon", "sgd"):
        c = core(model_dir, learner={"optimizer": optimizer})
        if optimizer == written:
            checkpoint.restore(c, tmp_path / "number_1")
            assert torch.equal(weights(c), weights(made))
            continue
        with pytest.raises(ConfigError, match=f"that {written} left in .*; resume with {written}"):
            checkpoint.restore(c, tmp_path / "number_1")


@pytest.mark.parametrize("form", ["off", "inverse"])
def test_the_rate_falls_with_the_lag_of_the_batch(form: str, model_dir: Path) -> None:
    c = core(model_dir, learner={"lr_lag": form})
    data = batch(0, seed=1)
    lengths = [sample.length for sample in data.samples]
    # the first half of each completion is of lag 0, the second of lag 3
    lags = [[(0, n // 2, 0), (n // 2, n, 3)] for n in lengths]
    metrics = c.train(msgspec.structs.replace(data, token_lags=lags))
    mean = sum(3 * (n - n // 2) for n in lengths) / sum(lengths)
    rate = 0.1 / (1 + mean) if form == "inverse" else 0.1
    assert metrics["optim/lr"] == pytest.approx(rate, rel=1e-12)


def test_a_learner_of_several_processes_has_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    from learner.distributed import ranks

    monkeypatch.setattr(ranks, "ReplicatedBackend", lambda *given: given)
    config: Any = SimpleNamespace(learner=SimpleNamespace(backend="torch", process_count=2))
    assert make_backend(config, "model") == (config, "model")  # type: ignore[arg-type, comparison-overlap]


def test_muon_needs_whole_matrices() -> None:
    with pytest.raises(ConfigError, match=r"muon steps whole matrices, .* not fsdp2"):
        load.load("configs/fsdp2.toml", ["learner.optimizer=muon"])
