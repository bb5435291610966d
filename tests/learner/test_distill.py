"""On-policy distillation: a teacher's reverse KL on the student's own answers, with the task's
reward or without it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_step_kit import GROUPS, SIZE, batch, core, model_dir, weights
from trajectory_kit import trajectory

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Batch
from asyncrl.models import model_check
from asyncrl.models.policy import PolicyModel, build_model, export, load_policy
from learner.step import LearnerCore

__all__ = ["model_dir"]

PROMPT = np.array([3, 4, 5], np.int32)
LENGTH = 6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Far from the student: other weights, larger ones, and a wider trunk."""
    path = tmp_path_factory.mktemp("teacher")
    model = build_model(path / "raw", "abcdefgh", hidden=48, layers=2, seed=9)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.mul_(3.0)
    export(model, path / "m")
    return path / "m"


def distilling(student: Path, teacher: Path, **sections: Any) -> LearnerCore:
    settings = load.convert({"kl": {"preset": "distill"}, **BARE}, "-").kl
    raw = {"coefficient": settings.loss.coefficient, "off_policy": settings.loss.off_policy}
    raw |= {"discount": settings.loss.discount, "truncate": settings.loss.truncate}
    return core(
        student,
        kl={"loss": raw | {"reference": str(teacher)}},
        learner={"optimizer": "adamw", "lr": 1e-2} | sections.pop("learner", {}),
        **sections,
    )


BARE = {"model": {"path": "m"}, "task": {"name": "sort"}}


@torch.no_grad()
def own_answers(learner: LearnerCore, number: int) -> Batch:
    """A batch that the student writes itself, each answer LENGTH tokens."""
    draw = torch.Generator().manual_seed(number)
    hf = learner.model.hf
    samples = []
    ids = torch.from_numpy(PROMPT).long().expand(GROUPS * SIZE, -1)
    logs = []
    for _ in range(LENGTH):
        log = hf(ids).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(log.exp(), 1, generator=draw)
        logs.append(log.gather(1, token)[:, 0])
        ids = torch.cat([ids, token], 1)
    for place in range(GROUPS * SIZE):
        tokens = ids[place, len(PROMPT) :].numpy()
        logprobs = torch.stack(logs)[:, place].numpy()
        reward = float((tokens == 3).mean())
        key = place // SIZE, place % SIZE, 0
        fields = {"reward": reward, "finish": "length"}
        samples.append(trajectory(key, PROMPT, tokens, logprobs, **fields))
    runs = [[(0, LENGTH, 0)] for _ in samples]
    return Batch(1, number, samples, [0] * len(samples), [0] * len(samples), runs, {}, GROUPS, {})


@torch.no_grad()
def kl_to(student: PolicyModel, teacher: PolicyModel) -> float:
    """KL(student || teacher) of the next token, mean over the student's own states: exact."""
    draw = torch.Generator().manual_seed(99)
    ids = torch.from_numpy(PROMPT).long().expand(64, -1)
    total = 0.0
    for _ in range(LENGTH):
        log, theirs = (m.hf(ids).logits[:, -1].log_softmax(-1) for m in (student, teacher))
        total += float((log.exp() * (log - theirs)).sum(-1).mean())
        ids = torch.cat([ids, torch.multinomial(log.exp(), 1, generator=draw)], 1)
    return total / LENGTH


def test_the_kl_to_a_teacher_falls_without_the_tasks_reward(model_dir: Path, teacher: Path) -> None:
    learner = distilling(model_dir, teacher, loss={"coefficient": 0.0})
    theirs = load_policy(teacher, device="cpu")
    before = kl_to(learner.model, theirs)
    found = [learner.train(own_answers(learner, number)) for number in range(30)]
    after = kl_to(learner.model, theirs)
    assert before > 0.3 and after < 0.4 * before, (before, after)
    assert found[-1]["loss/kl"] < 0.5 * found[0]["loss/kl"]
    assert all(math.isfinite(value) for row in found for value in row.values())
    # its gradient goes past the logprobs: a share of 0 would be reported as `kl_without_effect`
    assert all("kl/gradient_share" not in row for row in found)


def test_a_reward_counts_unless_it_is_left_out(model_dir: Path, teacher: Path) -> None:
    def after(coefficient: float, reward: float | None) -> torch.Tensor:
        learner = distilling(
            model_dir,
            teacher,
            loss={"coefficient": coefficient},
            learner={"optimizer": "sgd", "lr": 0.1},
        )
        given = batch(0)
        for sample in given.samples:
            sample.reward = sample.reward if reward is None else reward
        learner.train(given)
        return weights(learner)

    start = weights(distilling(model_dir, teacher))
    assert torch.equal(after(0.0, None), after(0.0, 1.0))
    assert not torch.equal(after(0.0, 1.0), start)
    assert not torch.equal(after(1.0, None), after(0.0, None))
    # rewards without a spread leave the teacher alone
    torch.testing.assert_close(after(1.0, 1.0), after(0.0, None))


def test_the_surrogate_counts_its_coefficient(model_dir: Path) -> None:
    """Plain gradient steps: twice the coefficient is twice the way."""
    moved = []
    for coefficient in (1.0, 0.5):
        learner = core(model_dir, loss={"coefficient": coefficient})
        start = weights(learner)
        found = learner.train(batch(0))
        moved.append((weights(learner) - start, found["loss/policy"]))
    torch.testing.assert_close(moved[0][0], 2 * moved[1][0], atol=1e-6, rtol=1e-4)
    assert moved[0][1] == pytest.approx(2 * moved[1][1])


def test_the_preset_and_what_it_needs() -> None:
    raw = {"kl": {"preset": "distill"}, "loss": {"coefficient": 0.0}, **BARE}
    raw |= {"model": {"path": "m", "reference": "t"}}
    found = load.convert(raw, "-")
    assert (found.kl.loss.coefficient, found.kl.loss.off_policy) == (1.0, "prefix_full")
    assert (found.kl.loss.discount, found.kl.loss.truncate) == (0.0, 2.0)
    assert found.kl.reward.coefficient == 0
    with pytest.raises(ConfigError, match=r"loss.coefficient: 0 leaves nothing to learn from"):
        load.convert({"loss": {"coefficient": 0.0}, **BARE}, "-")


def test_a_teacher_of_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    build_model(tmp_path / "t", "abc", hidden=32)
    for key in ("model.reference", "kl.loss.reference", "kl.reward.reference"):
        section = key.rpartition(".")[0]
        on = () if section == "model" else (f"{section}.coefficient=1.0",)
        config = load.load("demo", (f"model.path='{model_dir}'", f"{key}='{tmp_path / 't'}'", *on))
        with pytest.raises(ConfigError, match=f"{key}: .* has a vocabulary of 6, model.path of 11"):
            model_check.check(config)
