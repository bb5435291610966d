"""Rewards to advantages where it can go wrong: equal rewards, cut answers, rewards per token,
baselines, KL charges.  By hand, float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from advantage_kit import advantage, by_token
from algorithms_catalogue_kit import answers, vec
from algorithms_kit import D, config

from asyncrl.algorithms import advantages as adv
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.advantages import compute_advantage
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.settings import RlooAdvantage


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
    """In float32, where the mean of eight times 0.7 is not 0.7; and where one was computed another
    way, an ulp off."""
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
    """float32, as the learner gives them.  A second group with a spread makes the batch's scaling a
    real one."""
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
    assert adv.whiten(vec(1, 1 - 1.1e-6), eps=0.0).tolist() == pytest.approx(
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
    ],
)
def test_what_a_cut_answer_gets(how: dict[str, Any], wanted: list[float]) -> None:
    """Of 5 tokens and of 8, the limit; the second was cut.  `soft` looks at lengths: 1 of 4 tokens
    of the ramp, and all."""
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
    how = {
        "advantage": {
            "name": "reinforce",
            "baseline": "ema",
            "truncated": "penalty",
            "truncation_penalty": 0.5,
        },
        "kl": {"reward": {"coefficient": 0.2}},
    }
    p = prepared(b, baseline=1.5, **how)
    assert p.advantage.tolist() == pytest.approx([1 - 0.1 - 1.5, 2.5 - 1.5])
    assert p.metrics["reward/used_mean"] == pytest.approx((0.9 + 2.5) / 2)
    assert p.metrics["reward/mean"] == 2


def test_process_supervision_by_hand() -> None:
    """Steps: what is rewarded, and each answer's end.  Rewards 1, 0 | 3: mean 4/3, deviation
    sqrt(7/3)."""
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
        (
            {"rewards": "whiten"},
            [
                -math.sqrt(0.5),
                -math.sqrt(0.5) - 0.5 / math.sqrt(0.03125),
                math.sqrt(0.5),
                math.sqrt(0.5) - 0.25 / math.sqrt(0.03125),
            ],
        ),
    ],
)
def test_rewards_per_token_are_shaped_so_that_the_answers_total_is(
    how: dict[str, Any], wanted: list[float]
) -> None:
    """0.5, 0.25 | 0.25, 0.75, the second cut: totals 0.75 and 1; scaling multiplies each token's,
    and its shift comes with the last."""
    b = answers([2, 2], [9.0, 9.0], cut=[1], token_rewards=vec(0.5, 0.25, 0.25, 0.75))
    assert gae(b, **how) == pytest.approx(wanted, abs=1e-6)


def test_rewards_before_the_first_trained_token_are_nobodys() -> None:
    b = answers([3, 1], [1.0, 2.0], token_rewards=vec(5, 1, 2, 3))
    b.mask = torch.tensor([False, True, True, False])
    assert gae(b) == [0, 3, 2, 0]
    found = prepared(b, advantage={"name": "gae", "lam": 1.0}).metrics["reward/used_mean"]
    assert found == (8 + 3) / 2


def test_rewards_on_skipped_tokens_are_owed_to_the_trained_one_before() -> None:
    """Tokens trained, skipped, trained, skipped | trained; rewards 1, 2, 3, 4 | 5."""
    b = answers([4, 1], [9.0, 9.0], token_rewards=vec(1, 2, 3, 4, 5))
    b.mask = torch.tensor([True, False, True, False, True])
    assert gae(b) == [10, 0, 7, 0, 5]


def test_a_step_that_ends_on_a_skipped_token_ends_on_the_trained_one_before() -> None:
    """Steps of 2, 4 | 6, all said on skipped tokens or behind them: mean 4, deviation 2; found by
    the rewards, or told."""
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
    """The first token is 9 versions old under a limit of 4: neither its 5 nats count, nor does it
    in nats an answer."""
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
    b = answers(
        [1, 1, 1, 1],
        [0.0] * 4,
        start=vec(-1, -1, -math.inf, -1),
        reference=vec(-41, -math.inf, -math.inf, -1),
    )
    a = got(
        b, advantage={"name": "reinforce", "baseline": "none"}, kl={"reward": {"coefficient": 0.5}}
    )
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
