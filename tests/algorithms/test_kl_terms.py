"""KL in the reward and in the loss: each with its own coefficient, estimator and reference, alone
and at once; and their config."""

from pathlib import Path
from typing import Any

import pytest
import torch
from algorithms_kit import batch as drawn
from algorithms_kit import config, gradient, theta
from learner_step_kit import GROUPS, SIZE, batch, core, weights

from asyncrl.algorithms import loss as sl
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.models.policy import build_model
from learner import step as learner_step
from learner.batch import pack
from learner.step import LearnerCore

GONE = [
    (
        "coefficient = 0.1",
        "was replaced; write kl.reward.coefficient (KL in the reward) or kl.loss",
    ),
    ('placement = "loss"', "was replaced; write kl.reward.coefficient or kl.loss.coefficient: one"),
    ('estimator = "k3"', "was replaced; write kl.reward.estimator or kl.loss.estimator"),
    ('controller = "adaptive"', "is called kl.reward.controller here; write that"),
]


def written(tmp_path: Path, more: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text('model.path = "m"\ntask.name = "sort"\n' + more)
    return path


@pytest.mark.parametrize(("line", "said"), GONE, ids=[x[0] for x in GONE])
def test_the_keys_of_before_name_those_of_now(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        load.load(written(tmp_path, f"[kl]\n{line}\n"))
    assert str(e.value).startswith(f"{tmp_path / 'c.toml'}:4: kl.{line.split()[0]}: {said}")
    with pytest.raises(ConfigError, match=r"beta: was replaced; write kl\.loss\.coefficient"):
        load.load(written(tmp_path, ""), ["learner.beta=0.1"])
    with pytest.raises(ConfigError, match=r"kl_coef: was replaced; write kl\.reward\.coefficient"):
        load.load(written(tmp_path, ""), ["kl_coef=0.1"])


def terms(c: Config) -> tuple[float, str, float, str]:
    reward, loss = c.kl.reward, c.kl.loss
    return reward.coefficient, reward.estimator, loss.coefficient, loss.estimator


def test_defaults_and_presets(tmp_path: Path) -> None:
    def of(more: str) -> tuple[float, str, float, str]:
        return terms(load.load(written(tmp_path, more)))

    assert of("") == (0, "k1", 0, "k3") and of('kl.preset = "grpo"\n') == (0, "k1", 0.04, "k3")
    assert of('kl.preset = "dr_grpo"\n') == (0, "k1", 0, "k3")
    assert of('kl.preset = "rloo"\n') == (0.05, "k1", 0, "k3")
    grpo = '[kl]\npreset = "grpo"\n'  # what is given stays; both at once
    assert of(f"{grpo}[kl.loss]\ncoefficient = 0.5\n") == (0, "k1", 0.5, "k3")
    assert of(f"{grpo}[kl.reward]\ncoefficient = 0.5\n") == (0.5, "k1", 0.04, "k3")


def test_a_preset_on_the_command_line_replaces_the_files_terms(tmp_path: Path) -> None:
    """A resolved file gives every key; a preset's give way, those of the command line do not."""
    reward = 'coefficient = 0.5\nestimator = "k2"\ncontroller = "adaptive"\ntarget = 3.0\n'
    loss = 'coefficient = 0.3\nestimator = "abs"\n'
    path = written(tmp_path, f"[kl.reward]\n{reward}[kl.loss]\n{loss}")
    path.write_text(load.dump(load.load(path)))
    assert terms(load.load(path)) == (0.5, "k2", 0.3, "abs")
    assert terms(load.load(path, ["kl.preset=grpo"])) == (0, "k1", 0.04, "k3")
    assert terms(load.load(path, ["kl.preset=dr_grpo"])) == (0, "k1", 0, "k3")
    got = terms(load.load(path, ["kl.preset=rloo", "kl.loss.coefficient=0.7"]))
    assert got == (0.05, "k1", 0.7, "k3")
    assert load.load(path, ["kl.preset=rloo"]).kl.reward.target == 3.0
    noted: list[str] = []
    assert load.load(path, ["kl.preset=grpo"], noted.append).kl.reward.target == 6.0
    target = "dropped kl.reward.target: acts only where kl.reward.coefficient is set, and it is 0.0"
    assert target in noted


def test_both_at_once_are_the_sum_of_each_alone() -> None:
    """The reward's acts through the advantages, linear in it with rloo; the loss's is added:
    nothing of one is in the other."""
    b = drawn(7)
    b.start = b.proximal
    lp = theta(b)
    reward, loss = {"coefficient": 0.2, "estimator": "k1"}, {"coefficient": 0.3, "estimator": "k2"}
    none, one, other, both = (
        gradient(b, config(kl=k), lp)
        for k in ({}, {"reward": reward}, {"loss": loss}, {"reward": reward, "loss": loss})
    )
    assert torch.allclose(both[1] - none[1], (one[1] - none[1]) + (other[1] - none[1]), atol=1e-12)
    assert min(float((x[1] - none[1]).abs().max()) for x in (one, other)) > 1e-3
    assert "loss/kl" in both[2] and "loss/kl" not in one[2]
    pull = torch.where(b.mask, 0.3 * (lp - b.reference).detach(), 0.0) / b.mask.sum()
    assert torch.allclose(other[1] - none[1], pull)


def test_each_is_towards_its_own_reference() -> None:
    b = drawn(7)
    b.start = b.proximal
    lp = theta(b)
    kl = {"reward": {"coefficient": 0.2}, "loss": {"coefficient": 0.3, "estimator": "k2"}}
    far = b.reference - 1.0
    same = gradient(b, config(kl=kl), lp)[1]
    b.reward_reference = far
    apart = gradient(b, config(kl=kl), lp)[1]
    b.reference, b.reward_reference = far, None
    both_far = gradient(b, config(kl=kl), lp)[1]
    b.reference, b.reward_reference = far + 1.0, far
    more = torch.where(b.mask, 0.3, 0.0).to(lp.dtype) / b.mask.sum()
    assert torch.allclose(both_far - apart, more), "k2 pulls by a nat more"
    assert float((apart - same).abs().max()) > 1e-3, "longer answers are charged more"
    p = sl.prepare(b, config(kl=kl))
    total = float(torch.where(b.mask, b.start - far, 0.0).sum())
    assert p.metrics["kl/answer"] == pytest.approx(total / len(set(b.seq[b.mask].tolist())))
    b.start, b.proximal = None, b.behavior
    said = r"kl\.reward\.coefficient: the batch has no log-probabilities"
    with pytest.raises(ConfigError, match=said):
        sl.prepare(b, config("kl.reward.coefficient=0.2 correction.proximal=behavior"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kl")
    for n, name in enumerate("mab"):
        build_model(root / name, "abcdefgh", hidden=32, layers=1, seed=n)
    return {name: root / name for name in "mab"}


BYPASS = {"correction": {"proximal": "behavior"}, "loss": {"surrogate": "ppo"}}


def learner(models: dict[str, Path], *, reference: str = "", **sections: Any) -> LearnerCore:
    return core(models["m"], reference=models[reference] if reference else None, **sections)


def kl(models: dict[str, Path], reward: str | None, loss: str | None) -> dict[str, Any]:
    """Terms towards models of these names; "" for model.reference, None for no term."""
    out: dict[str, Any] = {}
    for key, name in (("reward", reward), ("loss", loss)):
        if name is not None:
            out[key] = {"coefficient": 0.2} | ({"reference": str(models[name])} if name else {})
    return out


@pytest.mark.parametrize(
    ("reward", "loss", "reference", "loaded"),
    [
        (None, None, "", []),
        (None, None, "a", []),
        ("", None, "", ["m"]),
        (None, "", "a", ["a"]),
        ("", "", "a", ["a"]),
        ("b", "", "a", ["a", "b"]),
        ("a", "", "a", ["a"]),
        ("a", "b", "", ["b", "a"]),
        ("m", "", "", ["m"]),
    ],
)
def test_a_reference_is_in_memory_once(
    models: dict[str, Path],
    reward: Any,
    loss: Any,
    reference: str,
    loaded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    real = learner_step.load_learner_policy
    spy = lambda path, *a, **k: (seen.append(Path(path).name), real(path, *a, **k))[1]  # noqa: E731
    monkeypatch.setattr(learner_step, "load_learner_policy", spy)
    c = learner(models, reference=reference, kl=kl(models, reward, loss))
    assert seen == ["m", *loaded] and (c.reward_reference is None) == (reward is None)
    assert (c.reference is None) == (reward is None and loss is None)
    assert c.reference is None or not any(p.requires_grad for p in c.reference.hf.parameters())


def test_two_references_in_one_run(models: dict[str, Path]) -> None:
    """The metrics are of the loss's reference, the charge of its own.  Start is not mu."""
    c = learner(models, kl=kl(models, "a", "b"), **BYPASS)
    packed, everyone = pack(batch()), range(GROUPS * SIZE)
    a = learner(models, kl=kl(models, "a", None)).reference
    b = learner(models, kl=kl(models, None, "b")).reference
    assert a is not None and b is not None
    start, to_a, to_b = (c._forward(m, packed, everyone).double() for m in (c.model, a, b))
    m = c.train(batch())
    assert m["kl/answer"] == pytest.approx(float((start - to_a).sum()) / (GROUPS * SIZE), rel=1e-4)
    assert m["kl/target_ref_k1"] == pytest.approx(float((start - to_b).mean()), rel=1e-4)
    assert m["kl/beta"] == 0.2 and m["kl/loss_beta"] == 0.2
    assert m["kl/gradient_share"] > 1e-3 and m["kl/reward_gradient_share"] > 1e-3
    same = learner(models, kl=kl(models, "b", "b"), **BYPASS)
    expected = float((start - to_b).sum()) / (GROUPS * SIZE)
    assert same.train(batch())["kl/answer"] == pytest.approx(expected, rel=1e-4)
    assert not torch.equal(weights(c), weights(same))


@pytest.mark.parametrize(("at", "forwards"), [("start", 2), ("behavior", 1)])
def test_what_the_start_costs_under_a_bypass(
    models: dict[str, Path], at: str, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward of the policy beside the reference's; none where the recorded one will do."""
    alone = {"kl_moved": 0, "split_every": 0}  # which have passes of their own
    c = learner(models, kl={"reward": {"coefficient": 0.2, "at": at}}, **BYPASS, record=alone)
    seen: list[Any] = []
    real = c._forward
    monkeypatch.setattr(c, "_forward", lambda model, *a: (seen.append(model), real(model, *a))[1])
    packed = pack(batch())
    by = packed.behavior
    if at == "start":
        by = real(c.model, packed, range(GROUPS * SIZE))
    own = learner(models)  # the reference is the initial model
    x = by.double() - own._forward(own.model, packed, range(GROUPS * SIZE)).double()
    m = c.train(batch())
    assert len(seen) == forwards and c.reference in seen
    assert m["kl/answer"] == pytest.approx(float(x.sum()) / (GROUPS * SIZE), rel=1e-3, abs=1e-5)
