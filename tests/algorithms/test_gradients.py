"""What the learner measures of gradients: their cosine from step to step, their norms by answer,
and a learning rate by the effective sample size."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithms_catalogue_kit import vec
from learner_step_kit import GROUPS, SIZE, batch, core, model_dir, weights

from asyncrl.algorithms.ratios import sum_by_sample
from asyncrl.config import load, methods
from learner import checkpoint
from learner.batch import pack
from learner.gradients import GradientAlignment
from learner.step import LearnerCore

__all__ = ["model_dir"]


def looked(most: float | None, *gradients: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(cosine, gradient) of the last of `gradients`, each cut into tensors of one number."""
    alignment = GradientAlignment(most, torch.clone)
    for gradient in gradients:
        parts = list(gradient.clone().split(1))
        cosine = float(alignment.measure(parts))
        alignment.remember()
    return cosine, torch.cat(parts)


def test_a_cosine_and_its_projection_by_hand() -> None:
    first, second = vec(1, 0), vec(0.9, 0.3)
    cosine, same = looked(None, first, second)
    assert cosine == pytest.approx(0.948683, abs=1e-6) and same.tolist() == [0.9, 0.3]
    assert looked(0.0, first, second)[1].tolist() == pytest.approx([0, 0.3], abs=1e-6)
    # a bound of 0.3: along the first no more than 0.3 of the whole length
    assert looked(0.3, first, second)[1].tolist() == pytest.approx([0.094346, 0.3], abs=1e-6)
    # what is within the bound, or goes back, stays
    for bound, gradient in ((0.99, second), (0.0, vec(-0.9, 0.3))):
        assert looked(bound, first, gradient)[1].tolist() == gradient.tolist()
    # the length of the one before is nothing to it
    assert looked(0.0, vec(64, 0), second)[1].tolist() == pytest.approx([0, 0.3], abs=1e-6)
    assert math.isnan(looked(0.0, first)[0])
    # the one before is what it was before its own projection
    assert looked(0.0, first, vec(1, 1), vec(0, 1))[0] == pytest.approx(math.sqrt(0.5))


def test_a_gradient_of_no_step_is_not_the_one_before() -> None:
    alignment = GradientAlignment(None, torch.clone)
    alignment.measure([vec(1, 0)])
    assert math.isnan(float(alignment.measure([vec(1, 1)])))
    alignment.remember()
    assert float(alignment.measure([vec(1, 1)])) == pytest.approx(1)


def plain_gradients(learner: LearnerCore, count: int) -> list[torch.Tensor]:
    """Of SGD at rate 1 without clipping: what a batch takes from the weights."""
    out = []
    for number in range(count):
        before = weights(learner)
        learner.train(batch(number, seed=number))
        out.append(before - weights(learner))
    return out


def test_the_learner_measures_the_cosine_and_changes_nothing(model_dir: Path) -> None:
    keys = {"lr": 0.01}
    plain, measured = (core(model_dir, learner=keys | m) for m in ({}, {"gradient_cosine": "log"}))
    rows = [measured.train(batch(n, seed=n)) for n in range(3)]
    before = plain_gradients(plain, 3)
    assert torch.equal(weights(plain), weights(measured)) and "optim/gradient_cosine" not in rows[0]
    for n in (1, 2):
        cosine = torch.cosine_similarity(before[n], before[n - 1], dim=0)
        assert rows[n]["optim/gradient_cosine"] == pytest.approx(float(cosine), abs=0.01)
        assert rows[n]["optim/gradient_cosine_max"] == rows[n]["optim/gradient_cosine"]
    row = core(model_dir, learner=keys | {"gradient_cosine": "log", "epochs": 3}).train(batch())
    assert row["optim/gradient_cosine"] < row["optim/gradient_cosine_max"] <= 1


def test_the_learner_projects_along_the_gradient_before(model_dir: Path) -> None:
    keys = {"lr": 0.01, "gradient_cosine": "project", "cosine_max": 0.05, "epochs": 2}
    learner = core(model_dir, learner=keys)
    taken: list[torch.Tensor] = []
    step = learner.backend.optimizer.step

    def spy() -> None:
        taken.append(torch.cat([p.grad.flatten().clone() for p in learner.model.hf.parameters()]))
        step()

    learner.backend.optimizer.step = spy  # type: ignore[method-assign, assignment]
    row = learner.train(batch())
    assert row["optim/gradient_cosine"] > 0.5  # two epochs on the same answers
    cosine = torch.cosine_similarity(taken[0].double(), taken[1].double(), dim=0)
    assert float(cosine) == pytest.approx(0.05, abs=0.005)


def test_a_restored_learner_knows_the_gradient_before(model_dir: Path, tmp_path: Path) -> None:
    keys = {"gradient_cosine": "project", "lr": 0.01}
    whole, first, second = (core(model_dir, learner=keys) for _ in range(3))
    for learner in (whole, first):
        learner.train(batch(0, seed=0))
    checkpoint.save(tmp_path, first, {}, 2)
    path = checkpoint.find_newest_checkpoint(tmp_path)
    assert path is not None
    checkpoint.restore(second, path)
    rows = [learner.train(batch(1, seed=1)) for learner in (whole, second)]
    assert rows[0]["optim/gradient_cosine"] == rows[1]["optim/gradient_cosine"]
    assert torch.equal(weights(whole), weights(second))


def test_norms_of_answers_are_those_of_their_gradients(model_dir: Path) -> None:
    """Against one backward pass by hand of three answers; tokens outside the mask do not count."""
    learner = core(
        model_dir,
        advantage={"name": "opob"},
        loss={"surrogate": "reinforce"},
        correction={"level": "sequence"},
    )
    packed = pack(batch())
    packed.mask[:2] = False
    learner._add_gradient_norms(packed)
    found = packed.squared_norms
    parameters = list(learner.model.hf.parameters())
    assert all(p.grad is None for p in parameters)
    for answer in (0, 4, 17):
        for p in parameters:
            p.grad = None
        out = learner._run(learner.model, packed, [answer], entropy=False)
        out.logprobs[packed.mask[packed.find_token_positions([answer])]].sum().backward()
        exact = sum(float(p.grad.double().square().sum()) for p in parameters)
        assert float(found[answer]) == pytest.approx(exact, rel=1e-4)


def test_energies_are_gradient_norms_of_the_softmax(model_dir: Path) -> None:
    learner = core(model_dir, advantage={"name": "otb"})
    packed = pack(batch())
    packed.temperature[:] = 0.7
    packed.mask[3] = False
    learner._add_gradient_norms(packed)
    found = sum_by_sample(torch.where(packed.mask, packed.energy, 0.0), packed.seq, packed.count)
    for answer in (0, 5):
        prompt, response = packed.prompts[answer], packed.responses[answer]
        ids = torch.tensor([*prompt.tolist(), *response.tolist()])[None]
        with torch.no_grad():
            logits = learner.model.hf(ids).logits[0, len(prompt) - 1 : -1]
        logits = logits.double().requires_grad_(True)
        lp = (logits / 0.7).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        lp[packed.mask[packed.find_token_positions([answer])]].sum().backward()
        # with respect to what the softmax is taken of: at temperature T, T times as much
        exact = float((logits.grad * 0.7).square().sum())
        assert float(found[answer]) == pytest.approx(exact, rel=1e-4)


def test_a_learner_trains_with_the_optimal_baseline(model_dir: Path) -> None:
    made: Any = {
        "advantage": {"name": "opob"},
        "loss": {"surrogate": "reinforce", "reduction": "seq-mean-token-mean"},
        "correction": {"level": "sequence", "bound": "truncate", "hi": 8.0},
        "stop": {"lr_by_ess": "sqrt"},
    }
    learner = core(model_dir, learner={"lr": 0.1}, **made)
    before = weights(learner)
    row = learner.train(batch())
    assert 0 < row["optim/answer_ess"] < 1
    assert row["optim/lr_scale"] == pytest.approx(math.sqrt(row["optim/answer_ess"]))
    assert row["optim/lr"] == 0.1  # the batch's, as scheduled
    whole = core(model_dir, learner={"lr": 0.1}, **made | {"stop": {}})
    whole.train(batch())
    step = (before - weights(learner)).norm() / (before - weights(whole)).norm()
    assert float(step) == pytest.approx(row["optim/lr_scale"], rel=1e-3)
    again = learner.train(batch(1, seed=1))
    assert again["optim/lr"] == 0.1  # nothing of the first batch's scale is left
    rate = learner.backend.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(0.1 * again["optim/lr_scale"])


@pytest.mark.parametrize("name", methods.FOR_OLD_SAMPLES)
def test_every_method_trains(model_dir: Path, name: str) -> None:
    """As `sweep` and `compare` set it: two steps on a batch, finite, and not nothing."""
    sets = [
        f"method={name}",
        f"model.path={str(model_dir)!r}",
        "model.warm_start=false",
        "model.device=cpu",
        f"learner.groups={GROUPS}",
        f"learner.group_size={SIZE}",
        "learner.epochs=2",
        "learner.micro_batch_tokens=40",
    ]
    learner = LearnerCore(load.load("configs/rle.toml", sets), model_dir)
    before = weights(learner)
    row = learner.train(batch())
    assert row["optim/steps"] == 2 and row["optim/skipped"] == 0
    assert all(math.isfinite(value) for value in row.values())
    assert not torch.equal(before, weights(learner))


def test_a_learner_remembers_each_prompts_rewards(model_dir: Path, tmp_path: Path) -> None:
    """The first batch has no means, so that its own is the baseline; the second the first's; a
    checkpoint keeps them."""
    advantage = {"name": "reinforce", "baseline": "prompt", "ema_decay": 0.75}
    learner = core(model_dir, learner={"lr": 0.0}, advantage=advantage)
    given = batch()
    learner.train(given)
    rewards = [sample.reward for sample in given.samples]
    means = [sum(rewards[i : i + SIZE]) / SIZE for i in range(0, len(rewards), SIZE)]
    assert list(learner.state.prompts.values()) == pytest.approx(means)
    packed = pack(given)
    digests = learner._look_up_prompts(given, packed)
    assert packed.baselines.tolist() == pytest.approx([x for x in means for _ in range(SIZE)])
    assert len(set(digests)) == GROUPS
    checkpoint.save(tmp_path, learner, {}, 2)
    again = core(model_dir, learner={"lr": 0.0}, advantage=advantage)
    path = checkpoint.find_newest_checkpoint(tmp_path)
    assert path is not None
    checkpoint.restore(again, path)
    other = batch(1)  # the same prompts
    for sample in other.samples:
        sample.reward = 1.0
    for one in (learner, again):
        row = one.train(other)
        assert row["advantage/mean"] == pytest.approx(
            sum(
                (1 - mean) * sample.length
                for mean, group in zip(means, range(GROUPS), strict=True)
                for sample in other.samples[group * SIZE : (group + 1) * SIZE]
            )
            / sum(sample.length for sample in other.samples)
        )
        assert list(one.state.prompts.values()) == pytest.approx([0.75 * x + 0.25 for x in means])
    assert not core(model_dir).state.prompts


def test_named_parts_come_with_a_batch_where_every_answer_has_them(model_dir: Path) -> None:
    given = batch()
    assert pack(given).parts is None
    for at, sample in enumerate(given.samples):
        sample.reward_parts = {"truth": float(at % 2), "form": 0.5 * at}
    packed = pack(given)
    assert packed.part_names == ("form", "truth")
    assert packed.parts.tolist() == [[0.5 * at, at % 2] for at in range(GROUPS * SIZE)]
    learner = core(model_dir, advantage={"name": "gdpo"})
    before = weights(learner)
    learner.train(given)
    assert not torch.equal(before, weights(learner))
    del given.samples[3].reward_parts["form"]
    assert pack(given).parts is None


def test_a_gradient_in_bfloat16_is_kept_as_it_was() -> None:
    alignment = GradientAlignment(0.0, torch.clone)
    first, second = (torch.tensor(x, dtype=torch.bfloat16) for x in ([1.0, 0.0], [1.0, 1.0]))
    alignment.measure([first])
    alignment.remember()
    alignment.measure([second])
    alignment.remember()
    assert second.tolist() == [0, 1] and alignment.previous[0].tolist() == [1, 1]


def test_a_step_that_was_dropped_leaves_the_gradient_before(model_dir: Path) -> None:
    learner = core(model_dir, learner={"lr": 0.01, "gradient_cosine": "log"})
    learner.train(batch(0))
    kept = [each.clone() for each in learner.backend.alignment.previous]
    bad = batch(1)
    for sample in bad.samples:
        sample.reward = 1e38 * (1 + sample.sample)
    row = learner.train(bad)
    assert row["optim/skipped"] == 1 and "optim/gradient_cosine" not in row
    after = learner.backend.alignment.previous
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    learner.backend.alignment = None
    assert math.isnan(learner.backend.apply(0.1, torch.tensor(math.nan)))
    part = learner.backend.add_part("head", torch.nn.Linear(1, 1), None)
    assert part.owner is learner.backend, "it clips the parts of several ranks"
