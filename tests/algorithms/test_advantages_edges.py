"""Advantages at their edges: groups of several sizes, discounts, skipped tokens, answers without a
token, the small constants.  float64."""

from __future__ import annotations

import math

import pytest
import torch
from advantage_kit import advantage, by_token
from algorithms_catalogue_kit import vec, yes

from asyncrl.algorithms import advantages as adv
from asyncrl.contract.errors import ConfigError

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
        match=r"ddof = 1 needs more than 1 samples of each prompt: raise learner\.group_size",
    ):
        advantage("grpo", vec(1, 2, 3), torch.tensor([0, 0, 1]))
    got = advantage("grpo", vec(1, 2, 3), torch.tensor([0, 0, 1]), ddof=0, eps=0.0)
    assert got.tolist() == [-1, 1, 0]
    with pytest.raises(ConfigError, match=r"rloo needs at least two samples .* learner.group_size"):
        adv.compute_rloo(vec(1, 2, 3), torch.tensor([0, 0, 1]))
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
    """r + gamma V' - V: the next value of the first token is the third's, 1.5; the answers end in
    10 and 0."""
    g = 0.5
    delta = [1 + g * 1.5 - 0.5, 0, 2 + g * 10 - 1.5, 0 + g * 3 - 2, 4 + g * 0 - 3]

    def gae(**keys: float) -> tuple[torch.Tensor, torch.Tensor]:
        return by_token("gae", R, MASK, SEQ, values=V, bootstrap=vec(10, 0), **keys)

    assert gae(gamma=g, lam=0.0)[0].tolist() == pytest.approx(delta)
    got = gae(lam=0.0)[0]
    assert got.tolist() == (pytest.approx([1 + 1.5 - 0.5, 0, 2 + 10 - 1.5, 3 - 2, 1]))
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
    got = adv.whiten(x, eps=0.5)
    assert got.tolist() == (pytest.approx([-2 / (std + 0.5), -1 / (std + 0.5), 3 / (std + 0.5)]))
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


def test_the_ramp_before_the_limit() -> None:
    got = adv.compute_overlong_penalty(torch.tensor([0, 6, 8, 9, 10, 15]), 10, 4)
    assert got.tolist() == pytest.approx([0, 0, 0.5, 0.75, 1, 1])
    assert adv.compute_overlong_penalty(torch.tensor([9, 10]), 10, 0).tolist() == [0, 0]
    assert adv.compute_overlong_penalty(torch.tensor([9, 10]), 10, 1).tolist() == [0, 1]
