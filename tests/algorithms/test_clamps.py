"""What is exponentiated is clamped, nothing else; whole answers are clamped after their sum.
Repairs, masks and draws that did nothing.  float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithms_catalogue_kit import answers, repaired, vec
from algorithms_kit import D, batch, config, gradient, theta
from surrogate_kit import term

from asyncrl.algorithms import correction, kl, ratios, settings, surrogates
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.advantages import _compute_sample_ratios

INF = math.inf


def test_differences_are_finite_and_pass_their_gradient_where_they_are_one() -> None:
    a = vec(3, -INF, -INF, math.nan, 0, 1e5).requires_grad_(True)
    x = ratios.subtract(a, vec(1, -INF, 0, 0, -INF, 0))
    assert x.tolist() == [2, 0, -1000, 0, 1000, 1e5]
    assert torch.autograd.grad(x.sum(), a)[0].tolist() == [1, 0, 0, 0, 0, 1]
    got = ratios.compute_log_ratio(a.detach(), torch.zeros(6, dtype=D))
    assert got.tolist() == [3, -20, -20, 0, 0, 20]


@pytest.mark.parametrize(
    ("name", "slopes"),
    [
        ("k1", [1, 1, 1]),
        ("k2", [30, -30, 1]),
        ("abs", [1, -1, 1]),
        ("k3", [1, 0, 1 - math.exp(-1)]),
        ("low_var_kl", [0, 0, 1 - math.exp(-1)]),
        ("k3+", [30, -30, 1]),
    ],
)
def test_kl_in_the_loss_pulls_however_far_the_policy_has_gone(
    name: str, slopes: list[float]
) -> None:
    """At log-ratios of 30, -30 and 1; only what would overflow, exp(30), is cut."""
    lp = vec(-1, -31, -1).requires_grad_(True)
    term = kl.compute_term(
        lp, vec(-31, -1, -2), lp.detach(), torch.zeros(3, dtype=torch.long), estimator=name
    )
    assert torch.autograd.grad(term.sum(), lp)[0].tolist() == pytest.approx(slopes)
    assert kl.estimate_k3(vec(30, -30)).tolist() == pytest.approx([29, math.exp(20) - 21])
    got = kl.estimate_forward_k3(vec(-30))
    assert got.tolist() == (pytest.approx([20 * math.exp(20) - math.exp(20) + 1]))


@pytest.mark.parametrize(
    "how",
    [{"estimator": e} for e in ("k1", "k2", "k3", "abs", "low_var_kl", "k3+")]
    + [{"estimator": "k3", "off_policy": "ratio"}, {"estimator": "k3", "off_policy": "prefix"}],
    ids=str,
)
def test_a_token_that_is_impossible_to_both_costs_nothing(how: dict[str, Any]) -> None:
    lp = vec(-INF, -1).requires_grad_(True)
    term = kl.compute_term(
        lp, vec(-INF, -2), vec(-INF, -1), torch.zeros(2, dtype=torch.long), **how
    )
    slope = torch.autograd.grad(term.sum(), lp)[0]
    assert float(term[0].detach()) == 0
    assert float(term[1].detach()) > 0
    assert bool(slope.isfinite().all())
    assert float(slope[1]) != 0


@pytest.mark.parametrize("far", [False, True])
def test_repair_c_adds_the_gradient_of_the_penalty(far: bool) -> None:
    b = batch(6)
    b.proximal = b.behavior.clone()
    lp = (b.behavior + 25).requires_grad_(True) if far else theta(b)
    run = {"loss": {"surrogate": "reshape"}, "correction": {"proximal": "behavior"}}
    plain = gradient(b, config(**run), lp)[1]
    more = gradient(b, config(**run, reshape={"kl_penalty": 0.3, "kl_estimator": "k2"}), lp)[1]
    pull = torch.where(b.mask, 0.3 * (lp - b.behavior).detach(), 0.0) / b.mask.sum()
    assert torch.allclose(more - plain, pull)


SEQ, EVERY = torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
FAR = vec(-30, 25, 26)  # of one answer: e^-5, in the mean e^-2.5


def test_a_whole_answers_ratio_is_clamped_after_its_sum() -> None:
    def w(level: str) -> list[float]:
        return correction.compute_weights(FAR, EVERY, SEQ, 2, level).log().tolist()

    assert w("token") == pytest.approx([-20, 20, 20])
    assert w("sequence") == pytest.approx([-5, -5, 20])
    assert w("geometric") == pytest.approx([-2.5, -2.5, 20])

    def s(name: str, over: str) -> list[float]:
        return correction.compute_statistic(name, over, FAR, EVERY, SEQ, 2).log().tolist()

    assert s("ratio", "sum") == pytest.approx([-5, -5, 20])
    assert s("ratio", "mean") == pytest.approx([-2.5, -2.5, 20])
    assert s("ratio", "token") == pytest.approx([-20, 20, 20])
    assert s("ratio", "max") == pytest.approx([20, 20, 20])
    got = correction.compute_statistic("k1", "token", FAR, EVERY, SEQ, 2)
    assert got.tolist() == [20, -20, -20]
    values = kl.compute_prefix_weights(FAR, torch.zeros(3, dtype=D), SEQ).log()
    assert values.tolist() == pytest.approx([-20, -5, 20])


@pytest.mark.parametrize(
    ("level", "surrogate", "factor"),
    [
        ("sequence", "vanilla", math.exp(-5)),
        ("geometric", "vanilla", math.exp(-2.5)),
        ("sequence", "reinforce", math.exp(-5)),
    ],
)
def test_the_loss_hands_whole_log_ratios_on(level: str, surrogate: str, factor: float) -> None:
    """start / mu of one answer is (-30, +25), the policy still its start: every coefficient is the
    answer's weight times A / 3."""
    mu = vec(-1, -26, -1)
    start = mu + vec(-30, 25, 0)
    b = answers([2, 1], [1, 0], behavior=mu, proximal=start, start=start)
    lp = start.clone().requires_grad_(True)
    sections = {
        "correction": {"level": level, "bound": "none"},
        "loss": {"surrogate": surrogate},
        "advantage": {"name": "reinforce", "baseline": "none"},
    }
    grad = gradient(b, config(**sections), lp)[1]
    assert grad.tolist() == pytest.approx([-factor / 3, -factor / 3, 0], rel=1e-9)


@pytest.mark.parametrize(("name", "factor"), [("topr", math.exp(-5)), ("gspo", math.exp(-2.5))])
def test_the_surrogates_of_whole_answers_get_whole_log_ratios(name: str, factor: float) -> None:
    """pi_theta / anchor of one answer is (-30, +25) and A = -1/2."""
    anchor = vec(-1, -26, -1)
    own = {"proximal": "behavior"}
    b = answers([2, 1], [0, 1], behavior=anchor, proximal=anchor)
    lp = (anchor + vec(-30, 25, 0)).requires_grad_(True)
    c = config(
        advantage={"name": "reinforce", "baseline": "batch"},
        loss={"surrogate": name} | ({"eps_low": 1.0, "eps_high": 1.0} if name == "gspo" else {}),
        correction=own,
    )
    assert gradient(b, c, lp)[1].tolist() == pytest.approx(
        [factor / 6, factor / 6, -1 / 6], rel=1e-9
    )


def test_past_its_budget_a_box_cox_batch_only_comes_back() -> None:
    """Through the loss, as the learner takes it: after a step past the budget no token pushes
    further."""
    b = batch(6)
    b.proximal = b.behavior.clone()
    c = config(
        loss={"surrogate": "reshape"},
        correction={"proximal": "behavior"},
        learner={"epochs": 2},
        reshape={
            "form": "box_cox",
            "mode": "constant",
            "gamma": 0.5,
            "budget": "tokens",
            "kl_budget": 1e-6,
        },
    )
    prep = sl.prepare(b, c)
    everyone = torch.arange(len(b.rewards))
    sl.begin_step(prep, everyone, b.behavior)
    lp = theta(b)
    step = sl.begin_step(prep, everyone, lp.detach())
    loss, _ = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
    push = -torch.autograd.grad(loss, lp)[0] * (lp.detach() - b.behavior)
    assert step.reshape is not None and step.reshape.share == 0
    assert float(push.max()) <= 0 and float(push.min()) < -1e-3


def test_a_token_at_its_bound_or_without_an_advantage_is_not_cut() -> None:
    """Clip shares count the tokens whose gradient a bound has stopped, and no others."""
    far = torch.tensor([-3.0, 3.0])
    none, half = torch.zeros(2), torch.tensor([0.5, 0.5]).log()
    every, first = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    tokens = surrogates.SurrogateTokens(far, none, far, far, every, first, 1)
    tokens.prepass = {"lo": torch.tensor(0.5), "hi": torch.tensor(2.0)}
    for found in (
        surrogates.compute_ppo(far, none, dual=3.0),
        term("dppo", far, none, half, dppo_threshold=0.01),
        term("dppo", far, none, half, dppo_threshold=0.01, dppo_divergence="kl"),
        surrogates.SURROGATES["gmpo"](tokens, settings.GmpoLoss()),
        surrogates.SURROGATES["bapo"](tokens, settings.BapoLoss()),
        surrogates.compute_reshape(far, none, torch.full((2,), 0.5), repaired(clip=0.2)),
    ):
        assert found.clipped.tolist() == [0, 0]


def test_masked_tokens_are_no_part_of_the_baselines_weights() -> None:
    b = batch(6)
    b.start = b.behavior + torch.where(b.mask, 0.25, 9.0).to(D)
    counts = torch.zeros(len(b.rewards), dtype=D).index_add_(0, b.seq, b.mask.to(D))
    assert not bool(b.mask.all())
    torch.testing.assert_close(_compute_sample_ratios(b), (0.25 * counts).exp())
