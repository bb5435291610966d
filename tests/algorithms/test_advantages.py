"""Rewards to advantages where it can go wrong: equal rewards, cut answers, rewards per token,
baselines, KL charges, remax.  By hand, float64."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from advantage_kit import advantage, by_token
from algorithms_catalogue_kit import answers, vec, yes
from algorithms_kit import D, config

from asyncrl.algorithms import advantages as adv
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.advantages import compute_advantage
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.settings import RlooAdvantage
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Batch, SamplingSettings
from asyncrl.experiments import serial
from asyncrl.models.policy import build_model, load_policy
from learner.batch import pack
from learner.step import LearnerCore


def prepared(
    b: LossBatch, *, baseline: float = 0.0, new_tokens: int = 8, **sections: Any
) -> sl.PreparedBatch:
    c = config(generator={"max_new_tokens": new_tokens, "context": 64}, **sections)
    return sl.prepare(b, c, baseline=baseline)


def got(b: LossBatch, **keys: Any) -> list[float]:
    return prepared(b, **keys).advantage.tolist()


INEXACT = [0.7, 0.1, 1 / 3, -0.3, 1e-3, 0.0, 1.0, 12345.678]


@pytest.mark.parametrize("value", INEXACT)
@pytest.mark.parametrize("ulps", [0, 1])
def test_rewards_that_are_equal_to_rounding_teach_exactly_nothing(value: float, ulps: int) -> None:
    """In float32, where the mean of eight times 0.7 is not 0.7; also an ulp off."""
    r = torch.full((24,), value)
    for _ in range(ulps):
        r[::3] = torch.nextafter(r[::3], torch.tensor(torch.inf)) if value else 0.0
    groups, zero = torch.arange(24) // 8, torch.zeros(24)
    lengths = torch.arange(24) % 5 + 1
    assert bool(adv.find_zero_variance(r, groups).all())
    for a in (
        adv.compute_rloo(r, groups),
        advantage("grpo", r, groups),
        advantage("grpo", r, groups, ddof=0, eps=0.0),
        *(advantage(name, r, groups, lengths=lengths) for name in ("dr_grpo", "gpg", "opo")),
        adv.whiten(r),
        adv.scale_to_unit(r),
        adv.subtract_baseline(r, torch.full_like(r, value)),
        adv.subtract_baseline(r, value),
    ):
        assert torch.equal(a, zero), a
    every = torch.ones(24, dtype=torch.bool)
    assert torch.equal(
        by_token("grpo", r, every, torch.arange(24), groups, steps=every, eps=0.0)[0], zero
    )
    assert torch.equal(adv.whiten_masked(r, every), zero)


@pytest.mark.parametrize(
    "name", ["rloo", "grpo", "dr_grpo", "gpg", "opo", "reinforce", "reinforce_pp"]
)
@pytest.mark.parametrize("rewards", ["raw", "whiten", "unit"])
def test_equal_rewards_are_nothing_through_the_whole_pre_pass(name: str, rewards: str) -> None:
    """float32, as in the learner.  A second group's spread makes the batch's scaling real."""
    for equal in (0.7, 0.1):
        b = answers([1, 3, 2] * 2, [equal] * 3 + [0.0, 1.0, 0.3], groups=[0, 0, 0, 1, 1, 1])
        b.rewards, b.behavior = b.rewards.float(), b.behavior.float()
        if name in ("reinforce", "reinforce_pp"):  # one baseline for the batch
            b = answers([1, 3, 2] * 2, [equal] * 6)
            b.rewards, b.behavior = b.rewards.float(), b.behavior.float()
        a = prepared(b, advantage={"name": name, "rewards": rewards}).advantage
        assert torch.equal(a[:6], torch.zeros(6)), a
        assert name in ("reinforce", "reinforce_pp") or float(a[6:].abs().max()) > 0.1


def test_a_spread_of_more_than_a_millionth_is_one() -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    r = vec(1, 1 - 1.1e-6, 1, 1 - 0.9e-6, -1, -1 + 1.1e-6, 0, 1e-30)
    values = adv.find_zero_variance(r, groups)
    assert values.tolist() == [False, False, True, True, False, False, False, False]
    values = adv.find_zero_variance(vec(-1, -1 + 0.9e-6, -1e-6, 1e-6), groups[:4])
    assert values.tolist() == [True, True, False, False]
    apart = adv.center_by_group(r, groups)
    assert apart[:2].tolist() == pytest.approx([0.55e-6, -0.55e-6])
    assert apart[2:4].tolist() == [0, 0]
    assert advantage("grpo", r, groups, eps=0.0)[:4].tolist() == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5), 0, 0]
    )
    assert adv.whiten(vec(1e6, 1e6 - 1.1)).tolist() == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(0.5)]
    )
    assert adv.scale_to_unit(vec(1, 1 - 1.1e-6)).tolist() == [1, 0]
    assert adv.scale_to_unit(vec(1, 1 - 0.9e-6)).tolist() == [0, 0]
    assert adv.whiten(vec(1, 1 - 0.9e-6)).tolist() == [0, 0]
    assert adv.whiten(vec(3.0)).tolist() == [0]
    assert adv.subtract_baseline(vec(1, 1), 1 - 1.1e-6).tolist() == pytest.approx([1.1e-6] * 2)
    assert adv.subtract_baseline(vec(1, 1), 1 - 0.9e-6).tolist() == [0, 0]
    assert adv.subtract_baseline(vec(1e-6, -2), vec(1, -2)).tolist() == pytest.approx([1e-6 - 1, 0])


def test_not_a_number_stays_one_and_is_seen() -> None:
    r, groups = vec(math.nan, 1, 1, 1), torch.tensor([0, 0, 1, 1])
    assert adv.find_zero_variance(r, groups).tolist() == [False, False, True, True]
    assert bool(advantage("grpo", r, groups)[:2].isnan().all())
    assert advantage("grpo", r, groups)[2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"truncated": "keep"}, [0.5, 2.0]),
        ({"truncated": "penalty", "truncation_penalty": 0.25}, [0.5, 1.75]),
        ({"truncated": "zero"}, [0.5, 0.0]),
        ({"truncated": "fixed", "truncation_penalty": 0.25}, [0.5, -0.25]),
        ({"truncated": "mask"}, [0.5, 0.0]),
        ({"truncated": "soft", "truncation_penalty": 1.0, "truncation_ramp": 4}, [0.25, 1.0]),
        ({"truncated": "soft", "truncation_penalty": 1.0, "truncation_ramp": 2}, [0.5, 1.0]),
    ],
)
def test_what_a_cut_answer_gets(how: dict[str, Any], wanted: list[float]) -> None:
    """Of 5 tokens and of 8, the limit; the second was cut.  `soft`: 1 of 4 tokens, and all."""
    p = prepared(
        answers([5, 8], [0.5, 2.0], cut=[1]),
        advantage={"name": "reinforce", "baseline": "none", **how},
    )
    assert p.advantage.tolist() == pytest.approx([wanted[0]] * 5 + [wanted[1]] * 8)
    assert p.metrics["reward/mean"] == 1.25 and p.metrics["answer/truncated_share"] == 0.5
    used = sum(wanted) / 2 if how["truncated"] != "mask" else 1.25
    assert p.metrics["reward/used_mean"] == pytest.approx(used)


def beside(*, cut: list[bool], lengths: list[int]) -> LossBatch:
    """Two answers with rewards 1 and 0, whose greedy answers got 1 and 0.5."""
    return answers(
        [2, 2],
        [1.0, 0.0],
        greedy=vec(1, 0.5),
        greedy_truncated=torch.tensor(cut),
        greedy_lengths=torch.tensor(lengths),
    )


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, [0, -0.5]),
        ({"truncated": "penalty", "truncation_penalty": 0.25}, [0.25, -0.5]),
        ({"truncated": "zero"}, [1, -0.5]),
        ({"truncated": "fixed", "truncation_penalty": 0.25}, [1.25, -0.5]),
        ({"truncated": "soft", "truncation_penalty": 1.0, "truncation_ramp": 4}, [1, -0.25]),
        ({"rewards": "unit"}, [0, -0.5]),
        # over 1, 0, 1, 1/2: mean 5/8, squares 0.6875
        ({"rewards": "whiten"}, [0, -0.5 / (math.sqrt(0.6875 / 3))]),
    ],
)
def test_the_greedy_baseline_of_remax(how: dict[str, Any], wanted: list[float]) -> None:
    """The first greedy answer was cut at 8 tokens; the second one's 5 are 1 of 4 on the ramp."""
    a = got(beside(cut=[True, False], lengths=[8, 5]), advantage={"name": "remax", **how})
    assert a == pytest.approx([wanted[0]] * 2 + [wanted[1]] * 2, abs=1e-7)


def test_the_running_mean_is_of_rewards_as_they_were_used() -> None:
    b = answers([1, 1], [1.0, 3.0], cut=[1], start=vec(-0.5, -1), reference=vec(-1, -1))
    how = {"name": "reinforce", "baseline": "ema"}
    how |= {"truncated": "penalty", "truncation_penalty": 0.5}
    p = prepared(b, baseline=1.5, advantage=how, kl={"reward": {"coefficient": 0.2}})
    assert p.advantage.tolist() == pytest.approx([1 - 0.1 - 1.5, 2.5 - 1.5])
    assert p.metrics["reward/used_mean"] == pytest.approx((0.9 + 2.5) / 2)
    assert p.metrics["reward/mean"] == 2


def test_process_supervision_by_hand() -> None:
    """Steps: rewards, and each answer's end.  Rewards 1, 0 | 3: mean 4/3, deviation sqrt(7/3)."""
    s = math.sqrt(7 / 3)
    b = answers([3, 2], [1.0, 3.0], token_rewards=vec(1, 0, 0, 0, 3))
    how = {"name": "grpo", "eps": 0.0}
    values = got(b, advantage=how)
    assert values == (pytest.approx([-5 / 3 / s, -4 / 3 / s, -4 / 3 / s, 5 / 3 / s, 5 / 3 / s]))
    # the function said 0 of the second token, and nothing of the third
    b.steps = torch.tensor([True, True, False, False, True])
    assert got(b, advantage=how) == pytest.approx([-5 / 3 / s, -4 / 3 / s, 0, 5 / 3 / s, 5 / 3 / s])
    assert got(b, advantage={"name": "grpo", "eps": 0.5, "ddof": 0})[4] == pytest.approx(
        5 / 3 / (math.sqrt(14 / 9) + 0.5)
    )
    r, mask, groups = vec(1, 1, 2, 5), yes(0, 0, 1, 1), torch.tensor([0, 0, 3, 3])
    few = by_token("grpo", r, mask, torch.arange(4), groups, eps=0.0)[0]  # fewer steps than groups
    assert few.tolist() == pytest.approx([0, 0, -math.sqrt(0.5), math.sqrt(0.5)])


def test_a_kl_charge_makes_no_step() -> None:
    """0.1 a token, taken off the step that it belongs to: 1 - 0.1, 0 - 0.2 | 3 - 0.2; what follows
    the last step is the last step's."""
    many = {"start": torch.full((5,), -0.5, dtype=D), "reference": torch.full((5,), -1.0, dtype=D)}
    b = answers([3, 2], [1.0, 3.0], token_rewards=vec(1, 0, 0, 0, 3), **many)
    r = np.array([0.9, -0.2, 2.8])
    z = (r - r.mean()) / r.std(ddof=1)
    how = {"advantage": {"name": "grpo", "eps": 0.0}, "kl": {"reward": {"coefficient": 0.2}}}
    assert got(b, **how) == pytest.approx([z[0] + z[1], z[1], z[1], z[2], z[2]])
    b.steps = torch.tensor([True, False, False, False, True])
    r = np.array([0.7, 2.8])
    z = (r - r.mean()) / r.std(ddof=1)
    assert got(b, **how) == pytest.approx([z[0], 0, 0, z[1], z[1]])


@pytest.mark.parametrize("kl", [{}, {"reward": {"coefficient": 0.2}}])
def test_one_step_an_answer_is_the_outcome_form(kl: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    lengths, rewards = [3, 1, 4, 2, 5, 2], [1.0, 0.0, 0.0, 0.3, 0.0, 1.0]
    logs = {k: -torch.rand(sum(lengths), generator=g, dtype=D) for k in ("start", "reference")}
    b = answers(lengths, rewards, groups=[0, 0, 0, 1, 1, 1], **logs)
    whole = got(b, advantage={"name": "grpo"}, kl=kl)
    b.token_rewards = adv.place_on_last_token(b.rewards, b.mask, b.seq)
    assert got(b, advantage={"name": "grpo"}, kl=kl) == pytest.approx(whole)
    assert max(map(abs, whole)) > 0.5


HALF, DEVIATION = math.sqrt(0.5), math.sqrt(0.03125)


def gae(b: LossBatch, **more: Any) -> list[float]:
    """With values 0 and lambda 1 the advantage is the sum of rewards from each token on."""
    b.values = torch.zeros(len(b.seq), dtype=D)
    return got(b, advantage={"name": "gae", "lam": 1.0, **more})


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, [0.75, 0.25, 1.0, 0.75]),
        ({"rewards": "unit"}, [0, -2, 1, 0]),
        ({"truncated": "penalty", "truncation_penalty": 0.5}, [0.75, 0.25, 0.5, 0.25]),
        ({"truncated": "zero"}, [0.75, 0.25, 0, 0]),
        ({"truncated": "fixed", "truncation_penalty": 0.5}, [0.75, 0.25, -0.5, -0.5]),
        ({"truncated": "fixed", "truncation_penalty": 0.25, "rewards": "unit"}, [1, 0.5, 0, 0]),
        ({"rewards": "whiten"}, [-HALF, -HALF - 0.5 / DEVIATION, HALF, HALF - 0.25 / DEVIATION]),
    ],
)
def test_token_rewards_total_to_the_answers(how: dict[str, Any], wanted: list[float]) -> None:
    """0.5, 0.25 | 0.25, 0.75, the second cut: totals 0.75 and 1; scaling multiplies each token's,
    and its shift comes with the last."""
    b = answers([2, 2], [9.0, 9.0], cut=[1], token_rewards=vec(0.5, 0.25, 0.25, 0.75))
    assert gae(b, **how) == pytest.approx(wanted, abs=1e-6)


def test_rewards_on_skipped_tokens_are_owed_to_the_trained_one_before() -> None:
    """Tokens trained, skipped, trained, skipped | trained; rewards 1, 2, 3, 4 | 5.  Those before
    the first trained token are nobody's."""
    b = answers([3, 1], [1.0, 2.0], token_rewards=vec(5, 1, 2, 3))
    b.mask = torch.tensor([False, True, True, False])
    assert gae(b) == [0, 3, 2, 0]
    found = prepared(b, advantage={"name": "gae", "lam": 1.0}).metrics["reward/used_mean"]
    assert found == (8 + 3) / 2
    b = answers([4, 1], [9.0, 9.0], token_rewards=vec(1, 2, 3, 4, 5))
    b.mask = torch.tensor([True, False, True, False, True])
    assert gae(b) == [10, 0, 7, 0, 5]


def test_a_step_that_ends_on_a_skipped_token_ends_on_the_trained_one_before() -> None:
    """Steps of 2, 4 | 6, all said on skipped tokens or behind them: mean 4, deviation 2."""
    b = answers([5, 1], [9.0, 9.0], token_rewards=vec(0, 2, 0, 0, 4, 6))
    b.mask = torch.tensor([True, False, True, True, False, True])
    wanted = [-1, 0, 0, 0, 0, 1]
    assert got(b, advantage={"name": "grpo", "eps": 0.0}) == pytest.approx(wanted)
    b.steps = torch.tensor([False, True, False, False, True, True])
    assert got(b, advantage={"name": "grpo", "eps": 0.0}) == pytest.approx(wanted)
    # the 4 belongs to the step before, the last one told: 6 | 6
    b.steps = torch.tensor([False, True, False, False, False, True])
    assert got(b, advantage={"name": "grpo", "eps": 0.0}) == [0] * 6


def test_a_batch_without_a_token_in_the_loss_has_no_kl() -> None:
    b = answers([1, 1], [1.0, 0.0], start=vec(-1, -1), reference=vec(-2, -2))
    b.mask[:] = False
    assert prepared(b, kl={"reward": {"coefficient": 0.2}}).metrics["kl/answer"] == 0


@pytest.mark.parametrize(
    ("group_baseline", "raw"), [(False, [3, 2, 5, 7, 3]), (True, [-1, -2, 1, 2, -2])]
)
def test_reinforce_pp_takes_the_groups_mean_total_off(group_baseline: bool, raw: Any) -> None:
    """Totals 3, 5 | 7, 3."""
    b = answers([2, 1, 1, 1], [9.0] * 4, groups=[0, 0, 1, 1], token_rewards=vec(1, 2, 5, 7, 3))
    found = got(b, advantage={"name": "reinforce_pp", "group_baseline": group_baseline})
    assert found == pytest.approx(((np.array(raw) - np.mean(raw)) / np.std(raw, ddof=1)).tolist())


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "reinforce", "opo", "gpg"])
def test_the_others_take_one_reward_an_answer(name: str) -> None:
    b = answers([2, 2], [1.0, 0.0])
    plain = got(b, advantage={"name": name})
    b.token_rewards = vec(0, 9, 7, 0)
    assert got(b, advantage={"name": name}) == plain and max(plain) > 0


def test_tokens_outside_the_loss_are_not_charged() -> None:
    """The first token is 9 versions old under a limit of 4: its 5 nats do not count anywhere."""
    b = answers([2, 1], [1.0, 1.0], start=vec(4, -0.5, -1), reference=vec(-1, -1, -1))
    b.token_lag = torch.tensor([9, 0, 0])
    how = {
        "advantage": {"name": "reinforce", "baseline": "none"},
        "kl": {"reward": {"coefficient": 0.2}},
        "staleness": {"max_lag": 4, "on_exceed": "mask"},
    }
    p = prepared(b, **how)
    assert p.advantage.tolist() == pytest.approx([0, 0.9, 1])
    assert p.metrics["kl/answer"] == pytest.approx(0.25)
    assert p.metrics["reward/used_mean"] == pytest.approx(0.95)
    b.token_lag = torch.tensor([0, 0, 9])  # an answer without a token in the loss is none
    assert prepared(b, **how).metrics["kl/answer"] == pytest.approx(5.5)
    assert "kl/answer" not in prepared(b, **{**how, "kl": {}}).metrics


def test_a_charge_is_not_clamped_and_never_infinite() -> None:
    start, reference = vec(-1, -1, -math.inf, -1), vec(-41, -math.inf, -math.inf, -1)
    b = answers([1, 1, 1, 1], [0.0] * 4, start=start, reference=reference)
    how = {"name": "reinforce", "baseline": "none"}
    a = got(b, advantage=how, kl={"reward": {"coefficient": 0.5}})
    assert a == pytest.approx([-20, -500, 0, 0])


def test_a_section_of_its_own_needs_no_penalty_key() -> None:
    """What a caller leaves out of a section has the section's own defaults."""
    c = config()
    bare = RlooAdvantage(whiten=False)
    plain = SimpleNamespace(
        **{k: getattr(c, k) for k in ("staleness", "loss", "kl", "generator")}, advantage=bare
    )
    b = answers([1, 1], [1.0, 0.0])
    assert compute_advantage(b, b.mask, plain, 0.0, 0.0)[0].tolist() == [1, -1]


GROUPS = torch.tensor([0, 0, 0, 2, 2])  # of three and of two; group 1 is empty
REWARDS = vec(1, 2, 6, 4, 8)


def test_group_means_and_baselines_of_groups_of_several_sizes() -> None:
    assert adv.average_by_group(REWARDS, GROUPS).tolist() == [3, 3, 3, 6, 6]
    assert advantage("dr_grpo", REWARDS, GROUPS).tolist() == [-2, -1, 3, -2, 2]
    values = adv.compute_rloo(REWARDS, GROUPS)
    assert values.tolist() == (pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5, 4 - 8, 8 - 4]))
    std0, std1 = math.sqrt(14 / 3), math.sqrt(7)
    assert advantage("grpo", REWARDS, GROUPS, ddof=0, eps=0.0)[:3].tolist() == pytest.approx(
        [-2 / std0, -1 / std0, 3 / std0]
    )
    assert advantage("grpo", REWARDS, GROUPS, eps=0.0).tolist() == pytest.approx(
        [-2 / std1, -1 / std1, 3 / std1, -1 / math.sqrt(2), 1 / math.sqrt(2)]
    )
    assert advantage("grpo", REWARDS, GROUPS, eps=0.5)[:3].tolist() == pytest.approx(
        [-2 / (std1 + 0.5), -1 / (std1 + 0.5), 3 / (std1 + 0.5)]
    )
    # eps 1e-4, ddof 1 by default
    values = float(advantage("grpo", vec(0, 1e-3), torch.tensor([0, 0]))[1])
    assert values == (pytest.approx(5e-4 / (math.sqrt(5e-7) + 1e-4)))
    with pytest.raises(
        ConfigError,
        match=r"ddof = 1 needs at least 2 samples of each prompt: raise learner\.group_size",
    ):
        advantage("grpo", vec(1, 2, 3), torch.tensor([0, 0, 1]))
    got = advantage("grpo", vec(1, 2, 3), torch.tensor([0, 0, 1]), ddof=0, eps=0.0)
    assert got.tolist() == [-1, 1, 0]
    with pytest.raises(ConfigError, match=r"rloo needs at least 2 samples .* learner.group_size"):
        advantage("rloo", vec(1, 2, 3), torch.tensor([0, 0, 1]))
    assert adv.compute_rloo(vec(1, 3), torch.tensor([0, 0])).tolist() == [-2, 2]


def test_baselines_that_weigh_or_come_from_elsewhere() -> None:
    got = advantage("opo", REWARDS, GROUPS, lengths=torch.tensor([1, 1, 2, 3, 1]))
    assert got.tolist() == pytest.approx([1 - 3.75, 2 - 3.75, 6 - 3.75, 4 - 5, 8 - 5])
    # answers without a token: a baseline of 0
    none = torch.tensor([0, 0])
    assert advantage("opo", vec(1, 3), none, lengths=none).tolist() == [1, 3]
    assert adv.subtract_baseline(vec(3, 4), vec(1, 6)).tolist() == [2, -2]
    assert adv.subtract_baseline(vec(3, 4), 1.5).tolist() == [1.5, 2.5]
    flat = vec(1, 2, 6, 5, 5)
    # three of five are in groups with a spread
    assert advantage("gpg", flat, GROUPS).tolist() == pytest.approx([-2 * 5 / 3, -5 / 3, 5, 0, 0])
    assert advantage("gpg", vec(5, 5), torch.tensor([0, 0])).tolist() == [0, 0]
    assert adv.find_zero_variance(flat, GROUPS).tolist() == [False, False, False, True, True]


def test_the_last_token_is_that_of_the_mask_and_an_answer_without_one_gets_nothing() -> None:
    seq = torch.tensor([0, 0, 1, 1, 1, 2])
    got = adv.place_on_last_token(vec(5, 7, 9), yes(0, 0, 1, 1, 0, 1), seq)
    assert got.tolist() == [0, 0, 0, 7, 0, 9]
    got = adv.place_on_last_token(vec(5, 7, 9), yes(1, 0, 0, 0, 0, 1), seq)
    assert got.tolist() == [5, 0, 0, 0, 0, 9]


def test_rewards_move_to_the_step_or_the_token_that_earned_them() -> None:
    seq = torch.tensor([0, 0, 0, 0, 1, 1])
    x = vec(1, 2, 4, 8, 16, 32)
    assert adv.sum_by_step(x, yes(0, 1, 0, 1, 1, 0), seq).tolist() == [0, 3, 0, 12, 48, 0]
    # no step in the last answer: what it got is nobody's
    assert adv.sum_by_step(x, yes(0, 1, 0, 0, 0, 0), seq).tolist() == [0, 15, 0, 0, 0, 0]
    assert adv.sum_by_step(x, yes(0, 0, 0, 0, 0, 1), seq).tolist() == [0, 0, 0, 0, 0, 48]
    assert adv.credit_trained_tokens(x, yes(0, 1, 0, 0, 1, 0), seq).tolist() == [0, 14, 0, 0, 48, 0]
    assert adv.credit_trained_tokens(x, yes(0, 0, 0, 1, 0, 1), seq).tolist() == [0, 0, 0, 8, 0, 32]
    one = torch.tensor([0, 0])
    assert (
        adv.sum_by_step(vec(1, 2), yes(0, 0), one).tolist()
        == [0, 0]
        == adv.credit_trained_tokens(vec(1, 2), yes(0, 0), one).tolist()
    )
    assert adv.credit_trained_tokens(x[:0], yes(), seq[:0]).tolist() == []
    assert adv.sum_by_step(x[:0], yes(), seq[:0]).tolist() == []


SEQ = torch.tensor([0, 0, 0, 1, 1])
MASK = yes(1, 0, 1, 1, 1)
R, V = vec(1, 99, 2, 0, 4), vec(0.5, 77, 1.5, 2, 3)


def test_residuals_skip_what_is_outside_the_mask_and_end_in_the_bootstrap() -> None:
    """r + gamma V' - V: the first token's next value is the third's, 1.5; ends in 10 and 0."""
    g = 0.5
    delta = [1 + g * 1.5 - 0.5, 0, 2 + g * 10 - 1.5, 0 + g * 3 - 2, 4 + g * 0 - 3]

    def gae(**keys: float) -> tuple[torch.Tensor, torch.Tensor]:
        return by_token("gae", R, MASK, SEQ, values=V, bootstrap=vec(10, 0), **keys)

    assert gae(gamma=g, lam=0.0)[0].tolist() == pytest.approx(delta)
    assert gae(lam=0.0)[0].tolist() == (pytest.approx([1 + 1.5 - 0.5, 0, 2 + 10 - 1.5, 3 - 2, 1]))
    d, lam = delta, 0.8
    want = [d[0] + g * lam * d[2], 0, d[2], d[3] + g * lam * d[4], d[4]]
    a, returns = gae(gamma=g, lam=lam)
    assert a.tolist() == pytest.approx(want)
    assert returns.tolist() == pytest.approx(
        [want[0] + 0.5, 0, want[2] + 1.5, want[3] + 2, want[4] + 3]
    )
    a, _ = gae()  # gamma 1, lambda 0.95
    assert float(a[3]) == pytest.approx(1 + 0.95 * 1)
    assert float(a[0]) == pytest.approx(2 + 0.95 * 10.5)


def test_k_residuals_with_discounts_over_the_tokens_of_the_mask() -> None:
    seq, r, v = torch.tensor([0, 0, 0, 0]), vec(1, 50, 2, 3), vec(0, 9, 0, 0)
    m = yes(1, 0, 1, 1)

    def sums(m: torch.Tensor, **keys: float) -> list[float]:
        return by_token("gae", r, m, seq, values=v, **keys)[0].tolist()

    got = sums(m, k_step=2, gamma=0.5, lam=0.5)
    assert got == pytest.approx([1 + 0.25 * 2, 0, 2 + 0.25 * 3, 3])
    got = sums(m, k_step=3, gamma=0.5, lam=0.5)
    assert got == pytest.approx([1 + 0.5 + 3 / 16, 0, 2.75, 3])
    # gamma = lambda = 1: returns
    assert sums(m, k_step=9, lam=1.0) == pytest.approx([6, 0, 5, 3])
    assert sums(m & False, k_step=2) == [0, 0, 0, 0]


def test_returns_to_go_are_whitened_over_the_mask() -> None:
    seq, m = torch.tensor([0, 0, 0, 1]), yes(1, 0, 1, 1)
    raw = vec(1 + 0.5 * 2, 2, 5)
    got = by_token("reinforce_pp", vec(1, 9, 2, 5), m, seq, gamma=0.5)[0]
    assert float(got[1]) == 0 and torch.allclose(got[m], (raw - raw.mean()) / raw.std())
    raw = vec(3, 2, 5)
    assert torch.allclose(
        by_token("reinforce_pp", vec(1, 9, 2, 5), m, seq)[0][m], (raw - raw.mean()) / raw.std()
    )


def test_whitening_takes_its_constant_and_its_population() -> None:
    x = vec(1, 2, 6)
    std = math.sqrt(7)
    assert adv.whiten(x).tolist() == pytest.approx([-2 / std, -1 / std, 3 / std])
    assert adv.whiten(vec(3, 9), reference=x).tolist() == pytest.approx([0, 6 / std])
    assert adv.whiten(vec(3, 9), reference=vec(2, 2)).tolist() == [0, 0]
    assert adv.whiten(vec(3)).tolist() == [0]
    assert adv.whiten(vec(3, 4), reference=vec(1)).tolist() == [0, 0]
    assert adv.whiten(vec(1, 3)).tolist() != [0, 0]
    got = adv.whiten_masked(vec(1, 99, 2, 6), yes(1, 0, 1, 1))
    assert got.tolist() == pytest.approx([-2 / std, 0, -1 / std, 3 / std])
    tiny = vec(0, 1e-8, 2e-8)  # std 1e-8, as large as the constant
    assert adv.whiten(tiny).tolist() == pytest.approx([-0.5, 0, 0.5])
    assert adv.whiten_masked(tiny, yes(1, 1, 1)).tolist() == pytest.approx([-0.5, 0, 0.5])


def test_rewards_in_the_unit_interval() -> None:
    assert adv.scale_to_unit(vec(2, 4, 6)).tolist() == [0, 0.5, 1]
    assert adv.scale_to_unit(vec(5, 8), reference=vec(2, 6)).tolist() == [0.75, 1.5]
    assert adv.scale_to_unit(vec(3, 3)).tolist() == [0, 0]
    assert adv.scale_to_unit(vec(5, 0), vec(2, 2)).tolist() == [0, 0]
    assert adv.scale_to_unit(vec()).tolist() == []


def test_only_the_first_sample_of_a_group_is_greedy() -> None:
    s = SamplingSettings(1.0, 1.0, 5, 8, True)
    assert [s.get_top_k(i) for i in range(3)] == [1, 5, 5]
    assert [SamplingSettings().get_top_k(i) for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("exact", ["false", "true"])
def test_in_a_real_run_the_baseline_is_the_likeliest_answer_and_left_out_of_the_loss(
    exact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(tmp_path / "m", "0123456789=:,#", hidden=32, layers=1)
    seen: list[Batch] = []
    mismatch: list[float] = []
    real = LearnerCore.train

    def train(self: LearnerCore, batch: Batch) -> dict[str, float]:
        seen.append(batch)
        row = real(self, batch)
        mismatch.append(row["mismatch/max_at_lag_0"])
        return row

    monkeypatch.setattr(LearnerCore, "train", train)  # looks on; the run's own step does the work
    text = (
        "learner.steps=2 learner.groups=3 learner.group_size=4 generator.slots=12 "
        "generator.max_new_tokens=6 evaluation.every=0 evaluation.final_prompts=4 "
        "evaluation.ood_prompts=0 staleness.max_lag=0"
    )
    small = text.split()
    config = load.load(
        "configs/demo.toml",
        [f"model.path='{tmp_path / 'm'}'", "advantage.name=remax", f"exact={exact}", *small],
    )
    serial.run_serial(config, 3)
    # the others are sampled from the whole distribution beside the greedy one
    assert max(mismatch) < 1e-5 and (exact == "false" or mismatch == [0.0, 0.0])
    first = seen[0]
    model = load_policy(tmp_path / "m", device="cpu")
    for s in first.samples:
        lp = np.frombuffer(s.behavior_logprobs, "<f4")
        if s.sample:
            assert float(lp.max()) < -0.1, "sampled from the whole distribution"
            continue
        assert np.all(lp == 0), "the likeliest token has probability 1 under top_k = 1"
        ids = torch.from_numpy(np.frombuffer(s.prompt_tokens + s.tokens, "<i4").astype(np.int64))
        logits = model.hf(input_ids=ids[None]).logits[0].detach()
        at = len(s.prompt_tokens) // 4 - 1
        assert torch.equal(logits[at : at + len(lp)].argmax(-1), ids[at + 1 :])
    packed = pack(first, greedy=True)
    assert len(packed.responses) == 3 * 3 and packed.greedy is not None
    baseline = {s.ticket: s.reward for s in first.samples if s.sample == 0}
    assert packed.greedy.tolist() == pytest.approx(
        [baseline[s.ticket] for s in first.samples if s.sample]
    )
    assert len(packed.token_lag) == sum(s.length for s in first.samples if s.sample)


def test_advantages_are_rewards_less_the_greedy_ones(tmp_path: Path) -> None:
    """The step equals that of `reinforce` without a baseline on rewards less the greedy reward."""
    from critic_kit import batch, core

    build_model(tmp_path / "m", "0123456789=:,#", hidden=32, layers=1)
    a = core(tmp_path / "m", advantage={"name": "remax"})
    b = core(tmp_path / "m", advantage={"name": "reinforce", "baseline": "none"})
    whole, less = batch(), batch()
    baseline = {s.ticket: s.reward for s in whole.samples if s.sample == 0}
    keep = [i for i, s in enumerate(less.samples) if s.sample]
    for s in less.samples:
        s.reward -= baseline[s.ticket]
    samples, lags = ([x[i] for i in keep] for x in (less.samples, less.token_lags))
    less = Batch(1, 0, samples, [0] * len(keep), [0] * len(keep), lags, {}, 4, {})
    metrics, _ = a.train(whole), b.train(less)
    pairs = list(zip(a.model.hf.parameters(), b.model.hf.parameters(), strict=True))
    assert all(torch.equal(x, y) for x, y in pairs)
    assert metrics["reward/greedy"] == pytest.approx(sum(baseline.values()) / 4)
    assert {0.0, 1.0} == set(baseline.values()), "otherwise the baseline is a constant"


def test_a_baseline_alone_is_refused() -> None:
    sets = ["advantage.name=remax", "learner.group_size=1"]
    with pytest.raises(ConfigError, match="the first sample of a group is remax's greedy baseline"):
        load.load("configs/demo.toml", sets)
