"""The value head's parts by themselves: its beginning, a step of it, what it refuses to load."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from critic_kit import batch, core, gae, model_dir

from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.models.policy import build_model
from learner import critic as critic_module
from learner.batch import pack

__all__ = ["model_dir"]


def head(c: Any) -> torch.Tensor:
    return c.critic.head.weight.detach()  # type: ignore[no-any-return]


def test_a_head_begins_small_by_the_runs_seed_and_without_a_bias(model_dir: Path) -> None:
    a, b, other = gae(model_dir, seed=3), gae(model_dir, seed=3), gae(model_dir, seed=4)
    want = torch.empty(1, 32).normal_(0.0, 1 / 33, generator=torch.Generator().manual_seed(3))
    assert torch.equal(head(a), want) and torch.equal(head(a), head(b))
    assert not torch.equal(head(a), head(other)) and a.critic is not None
    assert a.critic.head.bias.tolist() == [0.0] and a.critic.head.weight.dtype == torch.float32
    zero = gae(model_dir, {"init": "zeros"})
    assert float(head(zero).abs().max()) == 0 and zero.critic is not None
    assert zero.critic.head.bias.tolist() == [0.0]
    own, shared = gae(model_dir), gae(model_dir, {"trunk": "shared"})
    assert own.critic is not None and shared.critic is not None and shared.critic.trunk is None
    assert own.critic.trunk is not None and len(shared.critic.trainer.parameters) == 2
    assert len(own.critic.trainer.parameters) == 2 + len(list(own.model.hf.parameters()))
    assert own.critic.trunk.exact == own.model.exact


def test_a_random_trunk_has_the_models_own_spread_and_plain_norms(model_dir: Path) -> None:
    c = gae(model_dir, {"init": "random"}, seed=2)
    assert c.critic is not None and c.critic.trunk is not None
    spread = float(c.critic.trunk.hf.config.initializer_range)
    matrices = [p.detach().flatten() for p in c.critic.trunk.hf.parameters() if p.dim() > 1]
    every = torch.cat(matrices)
    assert float(every.std()) == pytest.approx(spread, rel=0.03)
    assert abs(float(every.mean())) < 4 * spread / math.sqrt(len(every))
    for name, p in c.critic.trunk.hf.named_parameters():
        if p.dim() == 1:
            assert set(p.tolist()) == ({1.0} if "norm" in name else {0.0}), name


class Odd(torch.nn.Module):
    """Parameters of every kind by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.plain = torch.nn.Linear(4, 3)
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(9.0)


def test_biases_are_drawn_as_zero_also_those_of_norms() -> None:
    from types import SimpleNamespace

    odd = Odd()
    odd.config = SimpleNamespace()  # type: ignore[assignment]  # says no spread: 0.02
    # type: ignore[arg-type]
    critic_module._initialize_weights(SimpleNamespace(hf=odd), torch.Generator().manual_seed(1))
    assert odd.norm.weight.tolist() == [1.0] * 4 and odd.norm.bias.tolist() == [0.0] * 4
    assert odd.plain.bias.tolist() == [0.0] * 3
    assert torch.equal(
        odd.plain.weight, torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * 0.02
    )


def stepped(c: Any, rate: float, gradient: float = 3.0) -> tuple[float, torch.Tensor]:
    """One step, the same gradient on every parameter: (what it says, how far the head moved)."""
    before = head(c).clone()
    for p in c.critic.trainer.parameters:
        p.grad = torch.full_like(p, gradient)
    return c.critic.trainer.apply(rate), head(c) - before


def test_a_step_takes_its_rate_and_is_clipped(model_dir: Path) -> None:
    c = gae(model_dir, {"trunk": "shared"})
    norm, moved = stepped(c, 0.1)
    assert norm == pytest.approx(3 * math.sqrt(33))
    assert torch.allclose(moved, torch.full((1, 32), -0.3))
    norm, moved = stepped(gae(model_dir, {"trunk": "shared"}, learner={"clip_norm": 1.0}), 0.1)
    assert norm == pytest.approx(3 * math.sqrt(33))
    assert torch.allclose(moved, torch.full((1, 32), -0.1 / math.sqrt(33)), atol=1e-6)
    bad, moved = stepped(gae(model_dir, {"trunk": "shared"}), 0.1, math.inf)
    assert not math.isfinite(bad) and float(moved.abs().max()) == 0 and c.critic is not None
    c.critic.trainer.drop_gradient()
    assert all(p.grad is None for p in c.critic.trainer.parameters)


@pytest.mark.parametrize(("own", "rates"), [(0.0, (0.2, 0.15)), (0.02, (0.02, 0.015))])
def test_the_learner_gives_it_the_policys_rate_or_its_share_of_its_own(
    model_dir: Path, own: float, rates: tuple[float, float]
) -> None:
    learner = {"schedule": "linear", "steps": 4, "lr": 0.2}
    c = gae(model_dir, {"trunk": "shared", "lr": own}, learner=learner)
    assert c.critic is not None
    seen: list[float] = []
    real = c.critic.trainer.apply

    def apply(rate: float) -> float:
        seen.append(rate)
        return real(rate)

    c.critic.trainer.apply = apply  # type: ignore[method-assign, assignment]
    first = c.train(batch(0))
    second = c.train(batch(1))
    assert seen == pytest.approx(rates)
    assert first["value/grad_norm"] > 0 and second["value/mean"] != first["value/mean"]


def test_the_bootstrap_is_of_cut_answers_whatever_the_parts(model_dir: Path) -> None:
    c, packed = gae(model_dir), pack(batch())
    assert c.critic is not None
    whole = c.critic.compute_start_values(packed, [(list(range(16)), True)])
    for parts in (
        [[i] for i in range(16)],
        [[5, 0, 3], [1, 2], [15, 14, 13, 12, 4], [6, 7, 8, 9, 10, 11]],
    ):
        values, bootstrap = c.critic.compute_start_values(packed, [(part, True) for part in parts])
        assert torch.allclose(values, whole[0], atol=1e-5)
        assert torch.allclose(bootstrap, whole[1], atol=1e-5)
    shared = gae(model_dir, {"trunk": "shared"})
    assert shared.critic is not None
    values, _ = shared.critic.compute_start_values(packed, [(list(range(16)), True)])
    with torch.no_grad():
        out = shared.model.logprobs(
            packed.prompts,
            packed.responses,
            packed.temperature,
            groups=packed.group_of,
            want_hidden=True,
        )
        assert torch.allclose(
            values, shared.critic.compute_values(packed, list(range(16)), out.hidden), atol=1e-5
        )


@pytest.mark.parametrize("name", critic_module.HEADS)
def test_a_reward_models_head_has_any_name(model_dir: Path, tmp_path: Path, name: str) -> None:
    rm = tmp_path / "rm"
    build_model(rm, "0123456789=:,#", hidden=32, layers=1, seed=7)
    file = rm / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    score = torch.arange(32.0)[None]
    safetensors.torch.save_file(tensors | {name: score}, file, {"format": "pt"})
    assert torch.equal(head(gae(model_dir, {"init": "reward_model", "path": str(rm)})), score)
    safetensors.torch.save_file(tensors | {name: torch.ones(2, 32)}, file, {"format": "pt"})
    with pytest.raises(ConfigError) as e:
        gae(model_dir, {"init": "reward_model", "path": str(rm)})
    got = str(e.value)
    assert got == f"value.path: {file} has {name} [2, 32]; one number a state needs [1, 32]"
    file.unlink()
    with pytest.raises((ConfigError, OSError)):
        gae(model_dir, {"init": "reward_model", "path": str(rm)})
    assert critic_module.HEADS == ("score.weight", "v_head.weight", "value_head.weight")


def test_a_model_without_a_head_is_named_with_the_way_out(model_dir: Path) -> None:
    with pytest.raises(ConfigError) as e:
        gae(model_dir, {"init": "reward_model", "path": str(model_dir)})
    assert str(e.value) == (
        f"value.path: {model_dir} has no reward head (none of score.weight, v_head.weight, "
        "value_head.weight in its *.safetensors); "
        "use value.init = policy"
    )


def test_a_trunk_of_another_width_brings_a_head_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    build_model(wide, "0123456789=:,#", hidden=64, layers=1, seed=7)
    c = gae(model_dir, {"path": str(wide), "init": "policy"})
    assert head(c).shape == (1, 64) and c.critic is not None
    assert c.critic.trunk is not None and c.critic.trunk.hidden_size == 64
    assert np.isfinite(c.train(batch())["value/mean"])


def test_state_comes_back_and_another_kind_is_refused(model_dir: Path) -> None:
    own = gae(model_dir, learner={"optimizer": "adamw"})
    shared = gae(model_dir, {"trunk": "shared"})
    own.train(batch())
    assert own.critic is not None and shared.critic is not None
    state = own.critic.get_state()
    assert set(state) == {"head", "trunk", "optimizer"} and shared.critic.get_state()["trunk"] == {}
    fresh = gae(model_dir, learner={"optimizer": "adamw"})
    assert fresh.critic is not None
    fresh.critic.load_state(state, Path("there"))
    for a, b in zip(own.critic.trainer.parameters, fresh.critic.trainer.parameters, strict=True):
        assert torch.equal(a, b)
    assert (
        fresh.critic.trainer.optimizer.state_dict()["state"].keys()
        == own.critic.trainer.optimizer.state_dict()["state"].keys()
        != {}.keys()
    )
    for other, made, trunk in (
        (shared, state, "shared"),
        (fresh, shared.critic.get_state(), "own"),
        (fresh, None, "own"),
        (fresh, {}, "own"),
    ):
        with pytest.raises(
            DamagedDataError,
            match=f"checkpoint there has no value head with value.trunk = {trunk}: resume it "
            "with the settings it was made with",
        ):
            other.critic.load_state(made, Path("there"))  # type: ignore[union-attr]
    assert core(model_dir).critic is None
