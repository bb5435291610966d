"""What a step of the loss needs, remembers and adds up: forwards asked for, denominators, chosen
tokens, terms, numbers; and the learner's parts."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithms_catalogue_kit import answers, vec, yes
from algorithms_kit import D, batch, config, gradient, theta
from learner_step_kit import GROUPS, SIZE, core, model_dir
from learner_step_kit import batch as learner_batch
from surrogate_kit import covariance

from asyncrl.algorithms import loss as sl
from asyncrl.algorithms import ratios, reshape, surrogates
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.settings import RecomputedCorrection
from asyncrl.contract.errors import ConfigError
from learner.batch import pack

__all__ = ["model_dir"]
OFF = {"correction": {"level": "none"}}
BYPASS = {"correction": {"proximal": "behavior"}}


def begun(
    b: LossBatch, c: Any, current: torch.Tensor | None = None, samples: list[int] | None = None
) -> tuple[sl.PreparedBatch, sl.StepPlan]:
    prep = sl.prepare(b, c)
    chosen = range(len(b.rewards)) if samples is None else samples
    return prep, sl.begin_step(prep, torch.tensor([*chosen]), current)


def test_an_anchor_is_made_first_where_one_pass_is_not_enough() -> None:
    assert not sl.needs_proximal_first(config())
    for more in ("learner.epochs=2", "learner.minibatches=2"):
        assert sl.needs_proximal_first(config(more)), more
    for more in ("correction.self_normalize=true", "correction.denominator=after"):
        assert sl.needs_proximal_first(config(more)), more
    once, plain = SimpleNamespace(epochs=1, minibatches=1), RecomputedCorrection()
    assert not sl.needs_proximal_first(SimpleNamespace(learner=once, correction=plain))


def test_the_start_is_measured_first_for_kl_in_the_reward_and_for_stops_in_parts() -> None:
    reward, stop = "kl.reward.coefficient=0.1", "stop.kl_max=0.1"
    for needed in (reward, f"{stop} learner.minibatches=2", f"{stop} learner.backend=deepspeed"):
        assert sl.needs_start_first(config(needed)), needed
    for other in ("", stop, "kl.loss.coefficient=0.1", "learner.minibatches=2"):
        assert not sl.needs_start_first(config(other)), other
    assert not sl.needs_start_first(config(f"{reward} kl.reward.at=behavior"))


@pytest.mark.parametrize(
    "more",
    [
        "loss.surrogate=reshape",
        "loss.surrogate=kl_cov",
        "loss.surrogate=clip_cov",
        "stop.kl_max=0.1 stop.action=slow",
        "stop.ess_min=0.1",
        "loss.surrogate=reinforce correction.self_normalize=true correction.proximal=recompute",
    ],
)
def test_whole_batches_need_their_logprobs_unless_they_are_the_start(more: str) -> None:
    b = batch(1)
    b.start = None
    if "reshape" in more:
        b.proximal = b.behavior.clone()
    if "recompute" in more:  # of a recomputed one nothing is known before the step
        b.proximal = None
    c = config(f"correction.proximal=behavior {more}")
    prep = sl.prepare(b, c)
    assert sl.needs_current(prep)
    b.start = b.behavior.clone()
    prep = sl.prepare(b, c)
    assert not sl.needs_current(prep)  # before the first step the policy is the start
    sl.begin_step(prep, torch.arange(12))
    assert sl.needs_current(prep) and not sl.needs_current(sl.prepare(batch(1), config()))
    assert not sl.needs_current(sl.prepare(batch(1), config(loss={"surrogate": "reinforce"})))
    assert not sl.needs_current(sl.prepare(batch(1), config(stop={"kl_max": 0.1})))


def test_the_first_steps_pass_is_the_start_and_later_ones_are_the_latest() -> None:
    b = batch(2, proximal=False)
    first, second = theta(b, 1).detach(), theta(b, 2).detach()
    prep, step = begun(b, config(**OFF))
    assert not prep.known.any() and not prep.passed.any()
    half, rest = torch.nonzero(b.seq < 6)[:, 0], torch.nonzero(b.seq >= 6)[:, 0]
    sl.compute_micro_loss(prep, step, half, first[half])
    assert torch.equal(prep.known, b.seq < 6) and torch.equal(prep.start[half], first[half])
    assert torch.equal(prep.passed, b.seq < 6)
    # a second pass of the same step is not another start
    sl.compute_micro_loss(prep, step, half, second[half])
    assert torch.equal(prep.start[half], first[half])
    assert torch.equal(prep.latest[half], second[half])
    step = sl.begin_step(prep, torch.arange(12))
    sl.compute_micro_loss(prep, step, rest, second[rest])
    assert torch.equal(prep.known, b.seq < 6) and prep.passed.all()
    assert torch.equal(prep.latest, second) and prep.steps == 2
    b.start = first
    given = sl.prepare(b, config(**BYPASS))
    assert given.known.all() and torch.equal(given.start, first)
    assert given.start is not first and torch.equal(given.latest, first)
    shown, _ = begun(batch(2, proximal=False), config(**OFF), first)
    assert shown.known.all() and torch.equal(shown.start, first)


def test_a_step_divides_by_its_own_samples() -> None:
    b = batch(4)
    _, step = begun(b, config(), samples=[0, 5, 7])
    mine = b.mask & torch.isin(b.seq, torch.tensor([0, 5, 7]))
    assert torch.equal(step.factor, mine.to(D) / mine.sum())


def test_rejected_tokens_leave_the_denominator_when_it_is_said_so() -> None:
    b = batch(5, spread=0.8)
    reject = {"reject": "ratio", "reject_over": "token"}
    keep = b.mask & ((b.proximal - b.behavior).abs() <= math.log(2))
    assert 0 < int(keep.sum()) < int(b.mask.sum())
    for how, counted in (("before", b.mask), ("after", keep)):
        _, step = begun(b, config(correction={**reject, "denominator": how}))
        assert torch.equal(step.factor, counted.to(D) / counted.sum())


def test_the_constant_of_dr_grpo_is_the_longest_answer_or_what_is_said() -> None:
    b = batch(6)
    text = "generator.max_new_tokens=40 generator.context=99 loss.reduction=seq-mean-token-sum-norm"
    for more, length in (("", 40), (" loss.norm_length=7", 7)):
        c = config(text + more)
        some = int((ratios.sum_by_sample(b.mask.double(), b.seq, 12) > 0).sum())
        assert torch.allclose(begun(b, c)[1].factor, b.mask.to(D) / (some * length))


def test_covariances_choose_their_tokens_of_the_whole_batch() -> None:
    b = batch(7)
    now = theta(b).detach()
    prep, step = begun(b, config(loss={"surrogate": "kl_cov", "cov_share": 0.2}), now)
    cov, chosen = covariance(now, prep.advantage, prep.valid), step.prepass["chosen"]
    assert torch.equal(chosen, surrogates.choose_highest(cov, prep.valid, 0.2)) and chosen.any()
    how = {"surrogate": "clip_cov", "cov_share": 0.2, "cov_lo": -1.0, "cov_hi": 1.0}
    prep, step = begun(b, config(loss=how, seed=5), now)
    later = sl.begin_step(prep, torch.arange(12), now)
    other = sl.begin_step(sl.prepare(b, config(loss=how, seed=5), number=3), torch.arange(12), now)
    first = 5 * 1_000_003 * 1009
    for made, seed in ((step, first), (later, first + 1), (other, first + 3 * 1009)):
        chosen = surrogates.sample_by_covariance(cov, prep.valid, 0.2, -1.0, 1.0, seed)
        assert torch.equal(made.prepass["chosen"], chosen)


def test_reshape_is_told_the_statistics_of_pi_over_mu() -> None:
    b = batch(8)
    b.proximal = b.behavior.clone()
    now = theta(b).detach()
    how = "loss.surrogate=reshape correction.proximal=behavior"
    bound = "reshape.rho_min=0.9 reshape.budget=tokens reshape.kl_budget=0.5"
    _, step = begun(b, config(f"{how} {bound}"), now)
    want = reshape.compute_statistics(now - b.behavior, b.mask, 0.9)
    assert step.reshape is not None and float(step.reshape.base) == float(want.base) < 1
    share = 1 - math.sqrt(float(want.kl) / 0.5)
    assert step.reshape.share == pytest.approx(share) and 0 < share < 1
    shown = {"gamma_base": float(want.base), "sigma2": float(want.sigma2), "share": share}
    assert step.metrics == pytest.approx({f"reshape/{name}": x for name, x in shown.items()})
    _, free = begun(b, config(how), now)
    assert free.reshape is not None and free.reshape.share == 1 and free.lr_scale == 1


def test_reshapes_own_sums_are_their_definitions() -> None:
    b = batch(8)
    b.proximal = b.behavior.clone()
    lp = theta(b)
    how = "loss.surrogate=reshape correction.proximal=behavior"
    bound = "reshape.mode=constant reshape.gamma=0.5 reshape.budget=tokens reshape.kl_budget=0.5"
    c = config(f"{how} {bound}")
    prep, step = begun(b, c, lp.detach())
    _, sums = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
    assert step.reshape is not None
    x, a = ((column[b.mask]).numpy() for column in (lp.detach() - b.behavior, prep.advantage))
    away, back = x * a > 0, x * a < 0
    g = 0.5 * np.where(away, step.reshape.share, 1.0)
    w = np.exp(x * g)
    want = [len(x), g.sum(), np.exp(x).sum(), w.sum(), (w * a).sum(), ((w * a) ** 2).sum()]
    want += [g[away].sum(), away.sum(), g[back].sum(), back.sum(), (x * a).sum()]
    assert sums["reshape"].tolist() == pytest.approx(want)
    c = config(f"{how} reshape.tau=0.5")
    prep, step = begun(b, c, lp.detach())
    _, sums = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
    gate = 1 / (1 + np.exp(-x * a / 0.5))
    assert sums["reshape"].tolist()[10:] == pytest.approx([want[-1], gate.sum()])


def test_reinforce_weighs_by_the_policy_as_it_is_now() -> None:
    """Truncated pi_theta / mu times A grad lp, whatever the anchor; self-normalised over the whole
    batch, not a part of it."""
    b = batch(9)
    lp = theta(b)
    adv = sl.prepare(batch(9), config()).advantage
    rho = (lp.detach() - b.behavior).exp().clamp(max=2.0)
    plain = gradient(b, config(loss={"surrogate": "reinforce"}), lp)
    assert torch.allclose(plain[1], torch.where(b.mask, -rho * adv, 0.0) / b.mask.sum())
    value = torch.where(b.mask, rho * adv * lp.detach(), 0.0).sum() / b.mask.sum()
    assert float(plain[2]["loss/policy"]) == pytest.approx(-float(value))
    c = config(loss={"surrogate": "reinforce"}, correction={"self_normalize": True})
    mean = rho[b.mask].mean()
    expected = torch.where(b.mask, -rho / mean * adv, 0.0) / b.mask.sum()
    for parts in (None, [[0, 1, 2], list(range(3, 12))]):
        assert torch.allclose(gradient(b, c, lp, parts)[1], expected)


def test_the_terms_of_a_micro_batch_are_its_share_and_its_numbers() -> None:
    b = batch(10)
    lp = theta(b)
    prep, step = begun(b, config(kl={"loss": {"coefficient": 0.3, "estimator": "k2"}}, **OFF))
    loss, sums = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
    x = (lp.detach() - b.reference)[b.mask]
    n = int(b.mask.sum())
    assert float(sums["loss/kl"]) == pytest.approx(float((x.square() / 2).mean()))
    assert float(sums["sq/kl"]) == pytest.approx(float((0.3 * x / n).square().sum()))
    r = (lp.detach() - b.proximal).exp()
    adv = prep.advantage
    open_ = b.mask & ~((adv > 0) & (r > 1.2)) & ~((adv < 0) & (r < 0.8))
    assert float(sums["sq/policy"]) == pytest.approx(float((r * adv / n)[open_].square().sum()))
    assert not any(t.requires_grad for t in sums.values())
    bare, _ = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp.detach())
    # a pass without a gradient says the same
    assert float(bare) == pytest.approx(float(loss.detach()))
    plain, more = sl.compute_micro_loss(*begun(b, config(**OFF)), torch.arange(len(b.seq)), lp)
    assert float((loss - plain).detach()) == pytest.approx(0.3 * float(sums["loss/kl"]))
    assert "loss/kl" not in more and "sq/kl" not in more


def test_reshapes_penalty_is_weighed_and_named() -> None:
    b = batch(10)
    b.proximal = b.behavior.clone()
    lp = theta(b)
    how = "loss.surrogate=reshape correction.proximal=behavior"
    penalized = config(f"{how} reshape.kl_penalty=0.3 reshape.kl_estimator=k1")
    sums, none = (
        sl.compute_micro_loss(*begun(b, c, lp.detach()), torch.arange(len(b.seq)), lp)[1]
        for c in (penalized, config(how))
    )
    mean = float((lp.detach() - b.behavior)[b.mask].mean())
    assert float(sums["loss/kl_penalty"]) == pytest.approx(mean)
    assert "loss/kl_penalty" not in none


def test_a_clipped_value_loss_takes_the_old_values() -> None:
    b = batch(10)
    b.values = torch.randn(len(b.seq), generator=torch.Generator().manual_seed(2), dtype=D)
    b.bootstrap = torch.zeros(12, dtype=D)
    now = (b.values + 0.7).requires_grad_(True)
    c = config(advantage={"name": "gae", "lam": 1.0}, value={"coefficient": 0.5, "clip": 0.2})
    prep, step = begun(b, c)
    loss, sums = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), theta(b), None, now)
    want = sl.compute_value_loss(now.detach(), b.rewards[b.seq], b.values, 0.2)[b.mask].mean()
    assert float(sums["loss/value"]) == pytest.approx(float(want)) and prep.returns is not None
    bare, _ = sl.compute_micro_loss(*begun(b, c), torch.arange(len(b.seq)), theta(b))
    assert float((loss - bare).detach()) == pytest.approx(0.5 * float(want))


def three(**keys: Any) -> tuple[torch.Tensor, Any, dict[str, float]]:
    """Two groups of two answers (1, 2 | 1, 2 tokens; rewards 3, 1 | 5, 5; the last cut); the third
    token is behind the mask."""
    more = {"start": vec(-0.5, -1, -9, -2, -1, -1.5), "reference": vec(*[-1.0] * 6)}
    more |= {"mask": yes(1, 1, 0, 1, 1, 1)} | keys.pop("more", {})
    b = answers([1, 2, 1, 2], [3, 1, 5, 5], groups=[0, 0, 1, 1], cut=[3], **more)
    prep = sl.prepare(b, config(**keys), beta=keys.get("beta"))
    return prep.advantage, prep, prep.metrics


def test_numbers_of_a_batch_by_hand() -> None:
    adv, _, m = three()
    assert adv.tolist() == [2, -2, 0, 0, 0, 0]
    assert [m[f"reward/{x}"] for x in ("mean", "min", "max", "used_mean")] == [3.5, 1, 5, 3.5]
    assert m["reward/std"] == pytest.approx(math.sqrt(11 / 3))
    assert m["advantage/std"] == pytest.approx(math.sqrt(8 / 3))
    assert m["reward/no_spread_share"] == 0.5 and m["answer/truncated_share"] == 0.25
    assert m["answer/masked_share"] == pytest.approx(1 / 6) and m["advantage/mean"] == 0
    assert m["advantage/abs_max"] == 2 and "reward/greedy" not in m
    assert "kl/answer" not in m and "kl/reward_gradient_share" not in m and "value/mean" not in m
    _, _, masked = three(advantage={"truncated": "mask"})
    assert masked["answer/masked_share"] == 0.5
    b = batch(0)
    b.mask[:] = False
    empty = sl.prepare(b, config()).metrics
    assert empty["advantage/mean"] == 0 == empty["advantage/abs_max"]
    assert empty["answer/masked_share"] == 1
    one = config("advantage.name=reinforce advantage.baseline=none")
    assert sl.prepare(answers([2], [2]), one).metrics["reward/std"] == 0


def test_kl_in_the_reward_is_charged_to_the_answer_and_said() -> None:
    """log pi / pi_ref of the start: 0.5 | 0 (masked -8) | -1 | 0, -0.5, of which the coefficient
    0.4 takes its share before the baseline."""
    adv, _, m = three(kl={"reward": {"coefficient": 0.4}})
    r = [3 - 0.2, 1, 5 + 0.4, 5 + 0.2]
    a = [r[0] - r[1], r[1] - r[0], r[2] - r[3], r[3] - r[2]]
    assert adv.tolist() == pytest.approx([a[0], a[1], 0, a[2], a[3], a[3]])
    assert m["kl/answer"] == pytest.approx((0.5 + 0 - 1 - 0.5) / 4)
    assert m["reward/used_mean"] == pytest.approx(sum(r) / 4)
    own = [a[0] - 2, a[1] + 2, a[2], a[3], a[3]]
    assert m["kl/reward_gradient_share"] == pytest.approx(math.hypot(*own) / math.sqrt(8))
    reference = {"reward_reference": vec(*[-2.0] * 6)}
    _, _, other = three(kl={"reward": {"coefficient": 0.4}}, more=reference)
    assert other["kl/answer"] == pytest.approx((1.5 + 1 + 0 + 1 + 0.5) / 4)
    _, _, mu = three(kl={"reward": {"coefficient": 0.4, "at": "behavior"}})
    assert mu["kl/answer"] == 0
    b = batch(0)
    b.reference = None
    said = r"kl\.reward\.coefficient: .* no log-probabilities of the learner's start or of the ref"
    with pytest.raises(ConfigError, match=said):
        sl.prepare(b, config("kl.reward.coefficient=0.4"))


def test_values_are_judged_over_the_mask() -> None:
    v, gae = vec(1, 2, 99, 3, 4, 5), {"name": "gae", "lam": 1.0}
    adv, prep, m = three(advantage=gae, more={"values": v, "bootstrap": vec(7, 7, 7, 2)})
    returns = vec(3, 1, 5, 7, 7)  # the last answer was cut: 5 + 2
    at = [0, 1, 3, 4, 5]
    assert prep.returns is not None and prep.returns[at].tolist() == returns.tolist()
    assert adv[at].tolist() == (returns - v[at]).tolist()
    explained = float(1 - (returns - v[at]).var() / returns.var())
    assert m["value/mean"] == 3 and m["value/explained_variance"] == pytest.approx(explained)
    _, bare, _ = three(advantage=gae, more={"values": v})
    # no bootstrap: it ended
    assert bare.returns is not None and bare.returns[at].tolist() == [3, 1, 5, 5, 5]
    said = r"advantage\.name = gae needs values .LossBatch\.values.: a value head"
    with pytest.raises(ConfigError, match=said):
        three(advantage={"name": "gae"})
    with pytest.raises(ConfigError, match="remax needs the reward of a greedy"):
        sl.prepare(batch(0), config(advantage={"name": "remax"}))


def test_minibatches_deal_whole_groups_evenly_by_seed_batch_and_epoch(model_dir: Path) -> None:
    c, packed = core(model_dir, learner={"minibatches": 4}, seed=3), pack(learner_batch())
    c.state.number = 2
    source = torch.Generator().manual_seed((3 * 1_000_003 + 2) * 1009 + 1)
    order = torch.randperm(GROUPS, generator=source).tolist()
    part_of = [order.index(group) * 4 // GROUPS for group in packed.group_of]
    want = [[i for i, part in enumerate(part_of) if part == p] for p in range(4)]
    assert c._choose_minibatches(packed, 1) == want
    assert [len(p) // SIZE for p in want] == [2, 1, 2, 1]
    assert core(model_dir)._choose_minibatches(packed, 1) == [list(range(GROUPS * SIZE))]


def test_the_stop_sees_a_quotient_that_is_never_negative(model_dir: Path) -> None:
    c = core(model_dir, stop={"kl_max": 0.1})
    for total, weight, kl in ((3.0, 4.0, 0.75), (-3.0, 4.0, 0), (0.0, 0.0, 0)):
        assert c._compute_stop_kl(torch.tensor(total), torch.tensor(weight)) == kl
    assert core(model_dir)._compute_stop_kl(torch.tensor(3.0), torch.tensor(4.0)) == 0


def test_a_batch_says_what_its_optimizer_did(model_dir: Path) -> None:
    learner = {"epochs": 2, "minibatches": 2, "lr": 0.5, "schedule": "linear", "steps": 4}
    c = core(model_dir, learner=learner, kl={"loss": {"coefficient": 0.2}})
    norms: list[float] = []
    real = c.backend.apply

    def step(rate: float, loss: torch.Tensor | None = None) -> float:
        norms.append(real(rate, loss))
        return norms[-1]

    c.backend.apply = step
    m = c.train(learner_batch(1))
    names = ("lr", "steps", "early_stops", "skipped", "stop_kl")
    assert [m[f"optim/{name}"] for name in names] == [0.5, 4, 0, 0, 0.0]
    assert m["optim/grad_norm"] == pytest.approx(sum(norms) / 4) and len(norms) == 4
    assert m["kl/loss_beta"] == 0.2 and m["kl/beta"] == 0.0
    assert c.state.number == 2 and c.train(learner_batch(2))["optim/lr"] == 0.25
