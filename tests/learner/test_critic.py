"""The value head of gae in the learner's own step: what it starts as, that it learns, that it is
cut, saved and restored like the policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from critic_kit import (
    GROUPS,
    SIZE,
    batch,
    core,
    gae,
    model_dir,  # noqa: F401
)
from learner_step_kit import weights

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.experiments import serial
from asyncrl.models.policy import build_model
from learner import checkpoint
from learner.batch import pack
from learner.step import LearnerCore


def critic_weights(c: LearnerCore) -> torch.Tensor:
    assert c.critic is not None
    return torch.cat([p.detach().flatten().clone() for p in c.critic.trainer.parameters])


def test_a_head_of_zeros_and_lambda_one_is_reinforce_without_a_baseline(model_dir: Path) -> None:
    """A = return - 0 at every token.  A trunk of its own leaves the policy's gradient alone; a
    shared one adds nothing while its head is 0."""
    plain = core(model_dir, advantage={"name": "reinforce", "baseline": "none"})
    plain.train(batch())
    for trunk in ("own", "shared"):
        c = gae(model_dir, {"init": "zeros", "trunk": trunk}, lam=1.0)
        before = critic_weights(c)
        metrics = c.train(batch())
        assert torch.allclose(weights(c), weights(plain), atol=1e-7)
        assert metrics["value/mean"] == 0.0 and metrics["loss/value"] > 0
        assert metrics["value/grad_norm"] > 0 and not torch.equal(critic_weights(c), before)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_it_learns_to_say_the_reward(model_dir: Path, trunk: str) -> None:
    c = gae(
        model_dir,
        {"trunk": trunk, "coefficient": 1.0, "lr": 0.02},
        learner={"optimizer": "adamw", "lr": 0.003, "clip_norm": 1.0},
    )
    explained = [c.train(batch(n))["value/explained_variance"] for n in range(60)]
    assert explained[0] < 0.3 and explained[-1] > 0.6, (explained[0], explained[-1])


@pytest.mark.parametrize(
    "value", [{"trunk": "own"}, {"trunk": "shared"}, {"trunk": "own", "clip": 0.05}], ids=str
)
def test_micro_batches_change_no_policy_or_critic(model_dir: Path, value: dict[str, Any]) -> None:
    found = []
    for tokens in (100_000, 30, 1):
        c = gae(model_dir, value, learner={"micro_batch_tokens": tokens, "epochs": 2})
        before = critic_weights(c)
        metrics = c.train(batch())
        found.append((weights(c), critic_weights(c) - before, metrics["loss/value"]))
    for policy, moved, loss in found[1:]:
        assert torch.allclose(policy, found[0][0], atol=1e-6)
        assert torch.allclose(moved, found[0][1], atol=1e-6)
        assert loss == pytest.approx(found[0][2], rel=1e-4)
    assert float(found[0][1].norm()) > 1e-4


def test_values_begin_before_the_first_token_and_a_cut_answer_has_one_more(model_dir: Path) -> None:
    """The bootstrap is V after the last token: that of the answer written one token further,
    whichever that token is."""
    c, b = gae(model_dir), batch()
    packed = pack(b)
    assert c.critic is not None
    values, bootstrap = c.critic.compute_start_values(packed, [(list(range(GROUPS * SIZE)), True)])
    assert torch.allclose(
        values, c.critic.compute_values(packed, range(GROUPS * SIZE), None).detach(), atol=1e-6
    )
    for i, s in enumerate(b.samples):
        if s.finish == "stop":
            assert float(bootstrap[i]) == 0.0
            continue
        for further in (3, 9):
            longer = np.append(packed.responses[i], np.int32(further))
            hidden = c.critic._compute_states(c.critic.trunk, packed, [i], responses=[longer])
            got = float(c.critic._apply_head(hidden)[-1].detach())
            assert got == (pytest.approx(float(bootstrap[i]), abs=1e-6))
    assert int((bootstrap != 0).sum()) == 4


def test_initialisations(model_dir: Path, tmp_path: Path) -> None:
    rm = tmp_path / "rm"
    build_model(rm, "0123456789=:,#", hidden=32, layers=1, seed=7)
    file = rm / "model.safetensors"
    tensors = safetensors.torch.load_file(file) | {"score.weight": torch.full((1, 32), 0.25)}
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    trunks = {}
    for init, path in (("policy", ""), ("zeros", ""), ("random", ""), ("reward_model", str(rm))):
        c = gae(model_dir, {"init": init} | ({"path": path} if path else {}))
        assert c.critic is not None and c.critic.trunk is not None
        trunks[init] = torch.cat([p.detach().flatten() for p in c.critic.trunk.hf.parameters()])
    assert torch.equal(trunks["policy"], weights(core(model_dir)))
    assert torch.equal(trunks["zeros"], trunks["policy"])
    assert not torch.equal(trunks["random"], trunks["policy"])
    assert not torch.equal(trunks["reward_model"], trunks["policy"])
    same = gae(model_dir, {"init": "random"})
    assert same.critic is not None and torch.equal(
        torch.cat([p.detach().flatten() for p in same.critic.trunk.hf.parameters()]),
        trunks["random"],
    )


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_checkpoint_holds_it(model_dir: Path, tmp_path: Path, trunk: str) -> None:
    first = gae(model_dir, {"trunk": trunk}, learner={"optimizer": "adamw"})
    first.train(batch())
    checkpoint.save(tmp_path, first, {}, 2)
    second = gae(model_dir, {"trunk": trunk}, learner={"optimizer": "adamw"})
    checkpoint.restore(second, tmp_path / "number_1")
    assert first.train(batch(1)) == second.train(batch(1))
    assert torch.equal(weights(first), weights(second))
    assert torch.equal(critic_weights(first), critic_weights(second))
    elsewhere = {"trunk": "shared" if trunk == "own" else "own"}
    other = gae(model_dir, elsewhere, learner={"optimizer": "adamw"})
    with pytest.raises(DamagedDataError, match="has no value head"):
        checkpoint.restore(other, tmp_path / "number_1")


@pytest.mark.parametrize(
    "sets, said",
    [
        (
            ["learner.backend=deepspeed", "learner.ranks=2"],
            "the value head of gae needs learner.backend = torch or fsdp2, not deepspeed",
        ),
        (["value.trunk=shared", "value.init=random"], "value.init: random brings its own trunk"),
        (["value.init=reward_model"], "value.path: value.init = reward_model needs the directory"),
        (
            ["value.trunk=shared", "value.path=x"],
            "value.path: belongs to value.trunk = own, not to shared",
        ),
        (["value.trunk=shared", "value.coefficient=0.0"], "value.coefficient: 0 leaves"),
        (
            ["advantage.name=rloo", "value.clip=0.2"],
            "value.clip: belongs to advantage.name = gae, not to rloo",
        ),
        (["loss.surrogate=sft"], "advantage.name: gae has no effect"),
    ],
)
def test_what_cannot_work_is_refused_when_the_config_is_read(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load.load("configs/demo.toml", ["advantage.name=gae", *sets])


def test_a_real_run_with_a_value_head_repeats_bitwise(model_dir: Path) -> None:
    words = f"model.path='{model_dir}' advantage.name=gae learner.steps=3 learner.groups=4 "
    words += "learner.group_size=2 generator.slots=8 generator.max_new_tokens=8 evaluation.every=0 "
    words += "evaluation.final_prompts=4 evaluation.ood_prompts=0 loss.entropy=0.1 "
    config = load.load("configs/demo.toml", [*words.split(), "staleness.max_lag=1"])
    first, again = serial.run_serial(config, 3), serial.run_serial(config, 3)
    assert first["weights_digest"] == again["weights_digest"] and "failed" not in first
    assert first["steps"] == 3
