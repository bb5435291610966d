"""What the learner's step measures and stops: the cosine of gradients, their norms by answer, rates
by the effective sample size; and what a batch's updates moved, past which no step moves any."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from algorithms_catalogue_kit import answers, vec, yes
from algorithms_kit import config
from learner_step_kit import ANCHORS, GROUPS, SIZE, batch, core, model_dir, weights

from asyncrl.algorithms import kl
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.ratios import sum_by_sample
from asyncrl.config import load, methods
from asyncrl.models.policy import build_model
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
    made = {"loss": {"surrogate": "reinforce"}, "correction": {"level": "sequence"}}
    learner = core(model_dir, advantage={"name": "opob"}, **made)
    packed = pack(batch())
    packed.mask[:2] = False
    learner._add_gradient_norms(packed)
    found = packed.squared_norms
    parameters = list(learner.model.hf.parameters())
    assert all(p.grad is None for p in parameters)
    for answer in (0, 4, 17):
        for p in parameters:
            p.grad = None
        out = learner._run(learner.model, packed, [answer])
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


@pytest.mark.parametrize("name", [name for name, x in methods.METHODS.items() if x.stale])
def test_every_method_trains(model_dir: Path, name: str) -> None:
    """As `sweep` and `compare` set it: two steps on a batch, finite, and not nothing."""
    text = (
        f"method={name} model.warm_start=false model.device=cpu learner.groups={GROUPS} "
        f"learner.group_size={SIZE} learner.epochs=2 learner.micro_batch_tokens=40"
    )
    sets = [f"model.path={str(model_dir)!r}", *text.split()]
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
    lengths = np.array([sample.length for sample in other.samples])
    expected = ((1 - np.repeat(means, SIZE)) * lengths).sum() / lengths.sum()
    for one in (learner, again):
        row = one.train(other)
        assert row["advantage/mean"] == pytest.approx(expected)
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


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda a: a["correction"]["proximal"])
@pytest.mark.parametrize("against", ["start", "behavior"])
@pytest.mark.parametrize(
    "layout",
    [{"epochs": 3}, {"minibatches": 3}, {"epochs": 2, "minibatches": 2, "micro_batch_tokens": 40}],
    ids=str,
)
def test_at_learning_rate_zero_nothing_ever_stops(
    model_dir: Path, anchor: dict[str, Any], against: str, layout: dict[str, Any]
) -> None:
    """The batch arrives far from the policy (0.05 nats a token), as stale batches do."""
    for action in ("skip", "slow"):
        stop = {"kl_max": 1e-6, "against": against, "action": action}
        c = core(model_dir, learner={"lr": 0.0, **layout}, stop=stop, **anchor)
        metrics = c.train(batch())
        assert metrics["optim/steps"] == layout.get("epochs", 1) * layout.get("minibatches", 1)
        assert metrics["optim/early_stops"] == 0
        # rounding alone, on any processor; the limit is 1e-6
        assert metrics["optim/stop_kl"] < 2e-7 and metrics.get("optim/lr_scale", 1.0) > 0.8
        assert metrics["kl/behavior_target_k3"] > 0.01


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda a: a["correction"]["proximal"])
@pytest.mark.parametrize("against", ["start", "behavior"])
@pytest.mark.parametrize("layout", [{"epochs": 2}, {"minibatches": 2}], ids=str)
def test_what_is_measured_by_hand(
    model_dir: Path, anchor: dict[str, Any], against: str, layout: dict[str, Any]
) -> None:
    """Before the second step: its own tokens, at the policy that the first step left."""
    packed, everyone = pack(batch()), range(GROUPS * SIZE)
    c = core(model_dir, learner=layout, stop={"kl_max": 1e9, "against": against}, **anchor)
    start = c._forward(c.model, packed, everyone).double()
    second = (c._choose_minibatches(packed, 0) + c._choose_minibatches(packed, 1))[1]
    seen: list[torch.Tensor] = []
    real = c.backend.apply

    def step(*args: Any) -> Any:
        found = real(*args)
        seen.append(c._forward(c.model, packed, everyone).double())
        return found

    c.backend.apply = step  # type: ignore[method-assign]
    said = c.train(batch())["optim/stop_kl"]
    part, mu = packed.find_token_positions(second), packed.behavior.double()
    now, start, mu = seen[0][part], start[part], mu[part]
    if against == "start":
        weight, x = (start - mu).exp().clamp(max=2.0), now - start
        exact = float((weight * (x.exp() - 1 - x)).sum() / weight.sum())
    else:
        x, y = now - mu, start - mu
        exact = max(0.0, float(((x.exp() - 1 - x) - (y.exp() - 1 - y)).mean()))
    assert said == pytest.approx(exact, rel=1e-3, abs=1e-7)
    assert exact > 1e-6 or against == "behavior"


def test_the_statistic_by_hand() -> None:
    """Tokens: start / mu = 4 (counts 2), 1/2, 1; theta / start = 2, 1/2, 9; the third is masked."""
    mu = vec(-2, -2, -2)
    start = mu + vec(4, 0.5, 1).log()
    more = {"behavior": mu, "mask": yes(1, 1, 0), "proximal": start, "start": start}
    b = answers([2, 1], [1, 0], **more)
    lp, part = start + vec(2, 0.5, 9).log(), torch.arange(3)

    def statistic(**stop: Any) -> list[float]:
        c = config(learner={"epochs": 2}, stop={"kl_max": 0.1, **stop})
        return [float(x) for x in sl.sum_update_kl(sl.prepare(b, c), part, lp)]

    assert statistic() == pytest.approx([2 * (1 - math.log(2)) + 0.5 * (math.log(2) - 0.5), 2.5])
    k = lambda r: r - 1 - math.log(r)  # noqa: E731
    assert statistic(against="behavior") == pytest.approx([k(8) + k(0.25) - k(4) - k(0.5), 2])


def test_the_rule_of_epochs_ends_between_passes(model_dir: Path) -> None:
    """By the KL of the whole batch: the first pass is whole, as with one epoch, bitwise."""
    layout: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "minibatches": 3}
    stop = {"kl_max": 1e-12, "every": "epoch"}
    one = core(model_dir, learner=layout)
    packed = pack(batch())
    start = one._forward(one.model, packed, range(packed.count))
    one.train(batch())
    c = core(model_dir, learner={**layout, "epochs": 3}, stop=stop)
    metrics = c.train(batch())
    assert (metrics["optim/steps"], metrics["optim/early_stops"]) == (3, 1)
    assert torch.equal(weights(one), weights(c))
    now = one._forward(one.model, packed, range(packed.count))
    weight, x = (start - packed.behavior).exp().clamp(max=2.0), (now - start).double()
    whole = float((weight * (x.exp() - 1 - x)).sum() / weight.sum())
    assert metrics["optim/stop_kl"] == pytest.approx(whole, rel=1e-3)
    by_step = core(model_dir, learner={**layout, "epochs": 3}, stop=stop | {"every": "step"})
    assert by_step.train(batch())["optim/steps"] == 1
    wide = core(model_dir, learner={**layout, "epochs": 3}, stop=stop | {"kl_max": 1e9})
    assert wide.train(batch())["optim/steps"] == 9


def test_a_batch_below_the_ess_floor_is_left_out(model_dir: Path) -> None:
    """Neither weights nor Adam's moments move, in the first step too; it is counted, and its
    metrics are all there."""
    adam: dict[str, Any] = {"optimizer": "adamw", "epochs": 2, "weight_decay": 0.1}
    c = core(model_dir, learner=adam, stop={"ess_min": 1.0})
    before = weights(c)
    metrics = c.train(batch())
    assert torch.equal(weights(c), before) and not c.backend.optimizer.state
    assert metrics["optim/early_stops"] == 1 and metrics["optim/steps"] == 0
    assert metrics["optim/grad_norm"] == 0 and metrics["optim/skipped"] == 0
    assert metrics["optim/lr_scale"] == 0 and metrics["optim/stop_ess"] < 1
    plain = core(model_dir, learner=adam | {"epochs": 1}).train(batch())
    for name in ("loss/policy", "is/ess", "kl/behavior_start_k3"):
        assert metrics[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-7)
    assert all(p.grad is None for p in c.model.hf.parameters())
    low = core(model_dir, learner=adam, stop={"ess_min": metrics["optim/stop_ess"] - 0.01})
    assert low.train(batch())["optim/steps"] >= 1


@pytest.mark.parametrize("stop", [{"kl_max": 1e-9, "action": "slow"}, {"kl_max": 1e-12}])
def test_a_step_beyond_the_budget_is_not_made(model_dir: Path, stop: dict[str, Any]) -> None:
    """The first step is whole, the second has no room: as one epoch, bitwise, moments included."""
    adam: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01}
    one = core(model_dir, learner=adam)
    three = core(model_dir, learner={**adam, "epochs": 3}, stop=stop)
    one.train(batch())
    metrics = three.train(batch())
    assert metrics["optim/early_stops"] == 1 and metrics["optim/steps"] == 1
    assert "action" in stop or metrics["optim/stop_kl"] > stop["kl_max"]
    assert all(p.grad is None for p in three.model.hf.parameters())
    assert torch.equal(weights(one), weights(three))
    moments = [
        [each.backend.optimizer.state[p]["exp_avg"] for p in each.model.hf.parameters()]
        for each in (one, three)
    ]
    assert all(map(torch.equal, *moments))


def test_a_budget_slows_before_it_stops(model_dir: Path) -> None:
    """The share of the learning rate is `KLBudget`'s of the KL measured from the start."""
    free = core(model_dir, learner={"epochs": 3}, stop={"kl_max": 1e9})
    limit = free.train(batch())["optim/stop_kl"]  # after two steps
    c = core(model_dir, learner={"epochs": 3}, stop={"kl_max": limit, "action": "slow"})
    seen: list[float] = []
    real = sl.KLBudget.compute_next_share

    def next_(self: sl.KLBudget, k: float) -> float:
        seen.append(k)
        return real(self, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sl.KLBudget, "compute_next_share", next_)
        metrics = c.train(batch())
    assert seen[0] == pytest.approx(0, abs=1e-9) and seen[2] > seen[1] > limit / 10
    budget = sl.KLBudget(limit)
    assert metrics["optim/lr_scale"] == [budget.compute_next_share(k) for k in seen][-1]
    assert metrics["optim/lr_scale"] < 0.9


def test_the_adaptive_coefficient_is_the_controllers(model_dir: Path, tmp_path: Path) -> None:
    """Nats an answer on both sides; a batch's metrics say the coefficient that trained it."""
    build_model(tmp_path / "ref", "abcdefgh", hidden=32, layers=2, seed=5)
    how = {"coefficient": 0.5, "controller": "adaptive", "target": 1e-4, "horizon": 100}
    c = core(model_dir, reference=tmp_path / "ref", kl={"reward": how})
    packed, everyone = pack(batch()), range(GROUPS * SIZE)
    assert c.reference is not None
    x = (c._forward(c.model, packed, everyone) - c._forward(c.reference, packed, everyone)).double()
    an_answer = float(x.sum()) / (GROUPS * SIZE)
    first = c.train(batch())
    assert first["kl/beta"] == 0.5
    assert first["kl/answer"] == pytest.approx(an_answer, rel=1e-3, abs=1e-6)
    assert abs(an_answer) > 1e-3
    wanted = kl.adapt_beta(0.5, an_answer, GROUPS * SIZE, c.config.kl.reward)
    assert c.state.beta == pytest.approx(wanted)
    assert abs(wanted / 0.5 - 1) == pytest.approx(0.2 * GROUPS * SIZE / 100)
    assert c.train(batch(1))["kl/beta"] == pytest.approx(wanted)
    assert c.state.beta != pytest.approx(wanted)
    fixed = core(model_dir, reference=tmp_path / "ref", kl={"reward": {"coefficient": 0.5}})
    fixed.train(batch())
    assert fixed.state.beta == 0.5


def test_the_running_mean_follows_rewards_as_they_were_used(model_dir: Path) -> None:
    how = {"name": "reinforce", "baseline": "ema", "ema_decay": 0.75}
    how |= {"truncated": "fixed", "truncation_penalty": 1.0}
    c, b = core(model_dir, advantage=how), batch()
    for s in b.samples[::3]:
        s.finish = "length"
    used = np.array([-1.0 if s.finish == "length" else s.reward for s in b.samples])
    lengths = np.array([s.length for s in b.samples])
    mean = used.mean()
    first = c.train(b)
    expected = (used * lengths).sum() / lengths.sum()
    assert first["advantage/mean"] == pytest.approx(expected, abs=1e-6)
    assert c.state.baseline == pytest.approx(mean, abs=1e-6)
    b = msgspec.structs.replace(b, number=1)
    for s in b.samples:
        s.finish = "stop"
    second = c.train(b)
    rewards = np.array([s.reward for s in b.samples])
    assert c.state.baseline == pytest.approx(0.75 * mean + 0.25 * rewards.mean(), abs=1e-6)
    assert second["reward/used_mean"] == pytest.approx(rewards.mean(), abs=1e-6)
    expected = ((rewards - mean) * lengths).sum() / lengths.sum()
    assert second["advantage/mean"] == pytest.approx(expected, abs=1e-6)


def test_clip_cov_has_the_batchs_number(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    real = sl.surrogates.sample_by_covariance

    def drawn(*args: Any) -> torch.Tensor:
        seeds.append(args[-1])
        return real(*args)

    monkeypatch.setattr(sl.surrogates, "sample_by_covariance", drawn)
    for _ in range(2):
        c = core(model_dir, learner={"epochs": 2}, loss={"surrogate": "clip_cov", "cov_lo": -9.0})
        c.train(batch(0))
        c.train(batch(1))
    assert len(seeds) == 8 and seeds[:4] == seeds[4:] and len(set(seeds)) == 4
