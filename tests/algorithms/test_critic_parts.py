"""The value head's parts by themselves: its beginning, a step of it, what it refuses to load; and
rewards per token, from the reward function to the learner's step and a run."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from critic_kit import batch, core, gae, model_dir
from learner_step_kit import weights
from shared_reward import digit

from actors import rewards
from actors.reward_worker import RewardFunction, call
from asyncrl.algorithms import loss
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.contract.messages import Batch, Prompt
from asyncrl.experiments import serial
from asyncrl.models.policy import build_model
from learner import critic as critic_module
from learner.batch import pack
from learner.step import LearnerCore

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


def rewarded(*, every: int = 1) -> Batch:
    """1 on the first token where it is below 8, 1/2 on the last one; only every `every`-th answer
    has rewards per token."""
    b = batch()
    for i, s in enumerate(b.samples):
        if i % every == 0:
            given = np.zeros(s.length, "<f4")
            given[0] += s.reward
            given[-1] += 0.5
            s.token_rewards = given.tobytes()
    return b


def advantages_of(c: LearnerCore, b: Batch, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """[N], as the learner's own step prepared them."""
    seen: list[loss.PreparedBatch] = []
    real = loss.prepare

    def prepare(*args: Any, **keys: Any) -> loss.PreparedBatch:
        seen.append(real(*args, **keys))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(loss, "prepare", prepare)
        c.train(b)
    return seen[0].advantage


def to_go(b: Batch) -> np.ndarray:
    """Sum of each answer's rewards from every token on; its one reward where it has no others."""
    out = []
    for s in b.samples:
        if s.token_rewards:
            given = np.frombuffer(s.token_rewards, "<f4")
        else:
            given = np.eye(s.length, dtype="<f4")[-1] * s.reward
        out.append(given[::-1].cumsum()[::-1])
    return np.concatenate(out)


@pytest.mark.parametrize("every", [1, 3])
def test_they_reach_gradients(model_dir: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gae with V = 0 and lambda 1: the rewards to go; reinforce_pp: these, whitened; grpo: the
    normalised steps to go."""
    b = rewarded(every=every)
    wanted = to_go(b)
    gae = core(model_dir, advantage={"name": "gae", "lam": 1.0}, value={"init": "zeros"})
    for s in b.samples:
        s.finish = "stop"
    assert np.allclose(advantages_of(gae, b, monkeypatch), wanted, atol=1e-6)
    pp = core(model_dir, advantage={"name": "reinforce_pp"})
    assert np.allclose(
        advantages_of(pp, b, monkeypatch), (wanted - wanted.mean()) / wanted.std(ddof=1), atol=1e-5
    )
    steps = [(i // 4, at, r) for i, s in enumerate(b.samples) for at, r in by_step(s)]
    values: dict[int, list[float]] = {}
    for group, _, r in steps:
        values.setdefault(group, []).append(r)
    out = []
    for i, s in enumerate(b.samples):
        mean, std = np.mean(values[i // 4]), np.std(values[i // 4], ddof=1)
        given = np.zeros(s.length)
        for at, r in by_step(s):
            given[at] = (r - mean) / (std + 1e-4) if std > 1e-6 else 0.0
        out.append(given[::-1].cumsum()[::-1])
    grpo = core(model_dir, advantage={"name": "grpo"})
    assert np.allclose(advantages_of(grpo, b, monkeypatch), np.concatenate(out), atol=1e-4)
    moved = weights(grpo)
    scalar = core(model_dir, advantage={"name": "grpo"})
    scalar.train(batch())
    assert not torch.equal(moved, weights(scalar)), "the gradient is another"


def by_step(s: Any) -> list[tuple[int, float]]:
    if not s.token_rewards:
        return [(s.length - 1, s.reward)]
    given = np.frombuffer(s.token_rewards, "<f4")
    return [(t, float(r)) for t, r in enumerate(given) if r != 0 or t == s.length - 1]


def test_what_uses_none_is_said_once(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = core(model_dir, advantage={"name": "rloo"})
    plain = core(model_dir, advantage={"name": "rloo"})
    for n in range(2):
        b = rewarded()
        c.train(Batch(1, n, b.samples, [0] * 16, [0] * 16, b.token_lags, {}, 4, {}))
    said = capsys.readouterr().err
    assert said.count("uses one reward per sample") == 1
    assert (
        "learner: advantage.name = rloo uses one reward per sample, so the reward function's "
        "token_rewards are not trained on; reinforce_pp, gae, grpo, otb, function use them\n"
    ) in said
    plain.train(batch())
    plain.train(Batch(1, 1, batch().samples, [0] * 16, [0] * 16, batch().token_lags, {}, 4, {}))
    assert torch.equal(weights(c), weights(plain))
    core(model_dir, advantage={"name": "grpo"}).train(rewarded())
    assert not capsys.readouterr().err


def first_of_two(prompt: Prompt, text: str, tokens: list[int]) -> dict[str, Any]:
    """1 for the first token, nothing of the others; the answer's own reward is its length."""
    return {"reward": float(len(tokens)), "token_rewards": [1.0, *[None] * (len(tokens) - 1)]}


async def later(prompt: Prompt, text: str, *, tokens: list[int]) -> float:
    return float(sum(tokens))


def test_a_function_with_a_parameter_for_them_is_given_the_token_ids() -> None:
    p = Prompt(0, "x")
    reward, parts, per_token = call(first_of_two, p, "ab", [5, 6, 7])
    assert reward == 3 and parts == {"reward": 3} and per_token is not None
    assert per_token[0] == 1.0 and all(x != x for x in per_token[1:]) and len(per_token) == 3
    assert call(later, p, "ab", [5, 6]) == (11.0, {}, None)
    assert call(lambda prompt, text: len(text), p, "ab", [5, 6, 7]) == (2.0, {}, None)
    assert (
        not RewardFunction(min).takes_tokens and RewardFunction(digit).takes_tokens
    )  # a callable without a signature


def test_in_a_run_with_prompts_and_a_reward_of_ones_own(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through reward function, buffer and engine, in one process."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "{n}:{n + 1}=", "answer": "{n}"}}\n' for n in range(9))
    )
    seen: list[Batch] = []
    train = LearnerCore.train
    monkeypatch.setattr(LearnerCore, "train", lambda c, b: (seen.append(b), train(c, b))[1])
    text = (
        "reward.function='shared_reward:digit' reward.workers=0 advantage.name=grpo "
        "learner.steps=2 learner.groups=2 learner.group_size=4 generator.slots=8 "
        "generator.max_new_tokens=6 evaluation.every=0 evaluation.prompts=1 "
        "evaluation.final_prompts=1 evaluation.ood_prompts=0 staleness.max_lag=0 task.name=file "
        "reward.deadline_s=3600.0"
    )
    sets = (
        f"model.path='{model_dir}'",
        f"task.prompts='{tmp_path / 'prompts.jsonl'}'",
        *text.split(),
    )
    found = serial.run_serial(load.load("configs/demo.toml", sets), 3)
    assert "failed" not in found and len(seen) == 2
    for s in (s for b in seen for s in b.samples):
        given = np.frombuffer(s.token_rewards, "<f4")
        assert len(given) == s.length and np.isnan(given[1:]).all()
        assert given[0] == np.frombuffer(s.tokens, "<i4")[0] % 2


@pytest.mark.parametrize(("deadline_s", "wanted"), [(1.0, 60.0), (600.0, 600.0)])
def test_a_functions_import_has_a_calls_time_or_a_minute(deadline_s: float, wanted: float) -> None:
    sets = ("reward.function='shared_reward:digit'", f"reward.deadline_s={deadline_s}")
    pool = rewards._RewardPool(load.load("configs/demo.toml", sets))
    try:
        (worker,) = pool.workers
        assert pool.compute_deadline(worker) == worker.since + wanted
        worker.ready = True
        assert pool.compute_deadline(worker) == np.inf  # it has nothing to do
    finally:
        pool.end()
