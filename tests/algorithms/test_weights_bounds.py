"""Correction, KL terms, gamma and the stops by hand and by their edges: every bound, band, veto and
threshold on both of its sides, slopes, and what lies behind the mask.  float64."""

import dataclasses
import json
import math
import typing
from typing import Any

import msgspec
import pytest
import torch
from algorithms_catalogue_kit import answers, k3, repaired, vec, yes
from algorithms_kit import D, batch, config, convert, gradient, theta
from process_kit import ROOT
from surrogate_kit import term

from asyncrl.algorithms import (
    advantages,
    correction,
    kl,
    loss,
    ratios,
    reshape,
    settings,
    surrogates,
)
from asyncrl.algorithms.batch import LossBatch
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function

INF = math.inf


def section(**keys: Any) -> Any:
    """A `correction` of tokens without a bound, and what else is given."""
    return settings.RecomputedCorrection(**{"bound": "none", **keys})


def choices(struct: Any, key: str) -> set[str]:
    """The words that the configuration accepts for a key, or the tags that choose a struct."""
    if key == struct.__struct_config__.tag_field:
        return {below.__struct_config__.tag for below in settings.list_variants(struct)}
    return set(typing.get_args(typing.get_type_hints(struct)[key]))


ESTIMATORS = [x for n in kl.ESTIMATORS for x in (n, n + "+")]
NAMED = [
    (correction.LEVELS, settings.RecomputedCorrection, "level"),
    (correction.BOUNDS, settings.RecomputedCorrection, "bound"),
    (correction.STATISTICS, settings.Correction, "reject"),
    (correction.OVER, settings.Correction, "reject_over"),
    (correction.VETO, settings.Correction, "veto"),
    (surrogates.SURROGATES, settings.Loss, "surrogate"),
    (loss.REDUCTIONS, settings.Loss, "reduction"),
    (reshape.MODES, settings.Reshape, "mode"),
    (surrogates.FORMS, settings.Reshape, "form"),
    (reshape.BUDGETS, settings.Reshape, "budget"),
    (kl.OFF_POLICY, settings.KLLoss, "off_policy"),
    ({**advantages.BY_ANSWER, **advantages.BY_TOKEN}, settings.Advantage, "name"),
    (advantages.BASELINES, settings.ReinforceAdvantage, "baseline"),
    (advantages.SCALES, settings.Advantage, "rewards"),
    *((ESTIMATORS, part, "estimator") for part in (settings.KLLoss, settings.KLReward)),
    (ESTIMATORS, settings.Reshape, "kl_estimator"),
]


@pytest.mark.parametrize(
    ("names", "struct", "key"), NAMED, ids=[f"{s.__name__}.{k}" for _, s, k in NAMED]
)
def test_an_error_offers_what_the_configuration_takes(names: Any, struct: Any, key: str) -> None:
    assert set(names) == choices(struct, key) and len(names) == len(set(names))


def test_lists_of_names_hold_names() -> None:
    assert set(settings.ON_BEHAVIOR) <= set(surrogates.SURROGATES)
    assert set(settings.BY_GROUP) <= {*advantages.BY_ANSWER, *advantages.BY_TOKEN}
    assert set(surrogates.NEED_CURRENT) | set(surrogates.PREPASS) <= set(surrogates.SURROGATES)
    assert set(kl.PREFIX_FORMS) <= set(kl.OFF_POLICY)


def test_levels_look_at_the_mask_alone_and_clamp_what_they_exponentiate() -> None:
    """Answers of log-ratios (0.5, 0.1, masked 9) and (-30); the product of the second is cut at
    e^-20, e^20 the other way."""
    x, m, seq = vec(0.5, 0.1, 9.0, -30.0), yes(1, 1, 0, 1), torch.tensor([0, 0, 0, 1])
    cut = math.exp(-20)
    got = correction.compute_weights(x, m, seq, 2, "token")
    assert got.tolist() == (pytest.approx([math.exp(0.5), math.exp(0.1), 1, cut]))
    got = correction.compute_weights(x, m, seq, 2, "sequence")
    assert got.tolist() == (pytest.approx([math.exp(0.6)] * 3 + [cut]))
    got = correction.compute_weights(x, m, seq, 2, "geometric")
    assert got.tolist() == (pytest.approx([math.exp(0.3)] * 3 + [cut]))
    assert correction.compute_weights(x, m, seq, 2, "none").tolist() == [1, 1, 1, 1]


def test_bounds_hold_at_their_edges() -> None:
    w = vec(0.4, 0.5, 1.0, 2.0, 2.1)
    assert correction.BOUNDS["truncate"](w, 0.5, 2.0).tolist() == [0.4, 0.5, 1, 2, 2]
    assert correction.BOUNDS["clip"](w, 0.5, 2.0).tolist() == [0.5, 0.5, 1, 2, 2]
    assert correction.BOUNDS["mask"](w, 0.5, 2.0).tolist() == [0, 0.5, 1, 2, 0]
    assert correction.BOUNDS["none"](w, 0.5, 2.0).tolist() == w.tolist()


@pytest.mark.parametrize(
    ("level", "lo", "hi"),
    [("token", 0.5, 2), ("sequence", 0.5, 2), ("geometric", 0.99, 1.01), ("none", 0, INF)],
)
def test_absent_bounds_are_the_levels_own(level: str, lo: float, hi: float) -> None:
    """One answer of one token, so that every level's weight is the ratio itself (none: 1)."""
    one, seq = yes(1), torch.tensor([0])

    def weight(ratio: float, **keys: Any) -> float:
        c = section(level=level, bound="clip", **keys)
        return float(correction.correct(vec(ratio).log(), vec(-1), one, seq, 1, c).weight)

    if level == "none":
        assert weight(0.001) == weight(1000) == 1
        return
    assert weight(0.001) == pytest.approx(lo) and weight(1000) == pytest.approx(hi)
    assert weight(1.0) == pytest.approx(1.0) and weight(0.001, lo=0.25) == pytest.approx(0.25)
    assert weight(1000, hi=5.0) == pytest.approx(5)
    assert weight(0.001, lo=0.0) == pytest.approx(0.001)


def test_the_mean_weight_is_over_what_the_level_counts() -> None:
    """Tokens in the mask; or answers that have any, the third has none."""
    w, m, seq = vec(2, 2, 9, 0.5, 7), yes(1, 1, 0, 1, 0), torch.tensor([0, 0, 0, 1, 2])
    assert float(correction.compute_mean_weight(w, m, seq, 3, "token")) == pytest.approx(4.5 / 3)
    for level in ("sequence", "geometric", "none"):
        got = float(correction.compute_mean_weight(w, m, seq, 3, level))
        assert got == (pytest.approx((2 + 0.5) / 2))
    assert float(correction.compute_mean_weight(w * 0, m, seq, 3, "token")) == 1
    assert float(correction.compute_mean_weight(w, m & False, seq, 3, "sequence")) == 1


def test_self_normalised_weights_of_what_is_kept_have_mean_one() -> None:
    x, seq = vec(0.3, -0.2, 0.1, 0.6, 3.0), torch.tensor([0, 0, 1, 1, 2])
    m = yes(1, 1, 1, 0, 1)
    c = section(self_normalize=True, reject="ratio")  # band [1/2, 2] a token: the last goes
    got = correction.correct(x, x, m, seq, 3, c)
    keep = yes(1, 1, 1, 0, 0)
    raw = torch.where(keep, x.exp(), 0.0)
    assert torch.allclose(got.weight[:3], (raw / (raw.sum() / 3))[:3]) and float(got.weight[4]) == 0
    assert float(got.weight[keep].mean()) == pytest.approx(1)
    again = correction.correct(x[:2], x[:2], m[:2], seq[:2], 3, c, vec(4)[0])
    assert torch.allclose(again.weight, x[:2].exp() / 4)  # a part of a batch takes the batch's mean


def test_the_normalized_mis_by_hand() -> None:
    """Samples of ratios (2.5, 0.4), (1.2, 1.2), (1, 1) and (1, 1); the mean ratio rejects the
    second, a token of probability 1e-7 the fourth; one token is cut at 2."""
    rho, seq = vec(2.5, 0.4, 1.2, 1.2, 1, 1, 1, 1), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    proximal = vec(0.5, 0.5, 0.5, 0.5, 2e-6, 0.5, 1e-7, 0.5).log()
    c = convert("correction.preset=mis_normalized").correction
    got = correction.correct(rho.log(), proximal, yes(*[1] * 8), seq, 4, c)
    mean = (2 + 0.4 + 1 + 1) / 4
    want = [2 / mean, 0.4 / mean, 0, 0, 1 / mean, 1 / mean, 0, 0]
    assert got.weight.tolist() == pytest.approx(want)
    assert got.vetoed.tolist() == [False] * 6 + [True] * 2


def test_masks_of_whole_answers_by_hand() -> None:
    """Geometric means of 1, 1.009, 1.011 and 0.989: the first two stay, without a weight. The
    largest log(r)^2 / 2 of the first is 0.24."""
    rho, seq = vec(2, 0.5, 1.009, 1.009, 1.011, 1.011, 0.989, 0.989), torch.arange(8) // 2
    for keys, want in (("geo_mask", [1, 1, 0, 0]), ("trm correction.reject_hi=0.2", [0, 1, 1, 1])):
        c = convert(f"correction.preset={keys}").correction
        got = correction.correct(rho.log(), rho.log() - 1, yes(*[1] * 8), seq, 4, c)
        assert got.weight[::2].tolist() == got.weight[1::2].tolist() == want


def test_statistics_of_a_token_and_of_its_answer() -> None:
    """An answer of log-ratios (0.4, -0.2, masked 5) and one of (1.0)."""
    x, m, seq = vec(0.4, -0.2, 5.0, 1.0), yes(1, 1, 0, 1), torch.tensor([0, 0, 0, 1])
    forms = {
        "ratio": lambda t: t,
        "k1": lambda t: -t,
        "k2": lambda t: t * t / 2,
        "k3": lambda t: math.exp(t) - 1 - t,
    }
    for name, f in forms.items():
        a, b, one = f(0.4), f(-0.2), f(1.0)
        g = math.exp if name == "ratio" else (lambda v: v)
        got = correction.compute_statistic(name, "token", x, m, seq, 2)
        assert got.tolist() == (pytest.approx([g(a), g(b), g(0.0), g(one)]))
        for over, value in (("sum", a + b), ("mean", (a + b) / 2), ("max", max(a, b))):
            assert correction.compute_statistic(name, over, x, m, seq, 2).tolist() == pytest.approx(
                [g(value)] * 3 + [g(one)]
            ), (name, over)


@pytest.mark.parametrize(
    ("over", "lo", "hi"), [("token", 0.5, 2), ("sum", 0.5, 2), ("mean", 0.99, 1.01), ("max", 0, 2)]
)
def test_the_ratios_band_by_what_it_is_taken_over(over: str, lo: float, hi: float) -> None:
    def stays(ratio: float, **keys: Any) -> bool:
        x, c = vec(ratio).log(), section(reject="ratio", reject_over=over, **keys)
        return bool(correction.correct(x, x, yes(1), torch.tensor([0]), 1, c).kept)

    assert stays(hi * 0.999) and not stays(hi * 1.001) and stays(1.0)
    if lo:
        assert stays(lo * 1.001) and not stays(lo * 0.999)
    else:
        assert stays(1e-8)
    assert not stays(1.0, reject_lo=1.1) and not stays(1.0, reject_hi=0.9)
    assert stays(3.0, reject_hi=3.1)


def test_bands_hold_at_their_edges_and_k_has_no_lower_one() -> None:
    one, seq = yes(1, 1, 1), torch.tensor([0, 1, 2])
    x = vec(-0.5, 0.0, 0.5)  # k1 = 0.5, 0, -0.5
    for lo, hi, kept in (
        (None, 0.5, [True, True, True]),
        (None, 0.25, [False, True, True]),
        (0.0, 0.25, [False, True, False]),
        (-0.5, 0.5, [True, True, True]),
    ):
        got = correction.build_rejection_mask("k1", "token", lo, hi, x, one, seq, 3)
        assert got.tolist() == kept, (lo, hi)
    got = correction.build_rejection_mask("none", "token", None, None, x * 100, one, seq, 3)
    assert got.tolist() == [True, True, True]
    for name in ("k1", "k2", "k3"):
        said = f"correction.reject_hi: reject = {name} has no default bound; give one"
        with pytest.raises(ConfigError, match=said):
            correction.build_rejection_mask(name, "token", 0.1, None, x, one, seq, 3)


def test_a_veto_takes_the_answer_at_its_threshold_and_looks_behind_no_mask() -> None:
    seq, m = torch.tensor([0, 0, 1, 1]), yes(1, 1, 1, 0)
    ok, none = vec(-1, -1, -1, -1), vec(0, 0, 0, 0)
    for kind, limit in (("probability", 1e-6), ("ratio", 1e-4)):
        for value, goes in ((limit * 1.01, False), (limit * 0.99, True)):
            # the last is behind the mask
            low = torch.tensor([math.log(value), -1, -1, -50], dtype=D)
            rho, prox = (none, low) if kind == "probability" else (low, ok)
            values = correction.find_vetoed(kind, None, rho, prox, m, seq, 2)
            assert values.tolist() == [goes, goes, False, False]
            assert correction.find_vetoed(kind, 0.5, rho, prox, m, seq, 2).tolist()[:2] == [
                True,
                True,
            ]
    assert correction.find_vetoed("none", None, ok * 99, ok * 99, m, seq, 2).tolist() == [False] * 4
    x = vec(-20, 0.1, 0.2, 0.3)
    got = correction.correct(x, ok, yes(1, 1, 1, 1), seq, 2, section(veto="ratio"))
    assert got.vetoed.tolist() == [True, True, False, False]
    assert got.kept.tolist() == [False, False, True, True]
    assert got.weight.tolist() == pytest.approx([0, 0, math.exp(0.2), math.exp(0.3)])
    assert correction.correct(
        x, ok, yes(1, 1, 1, 1), seq, 2, section(veto="ratio", veto_below=1e-10)
    ).kept.all()


def test_m2po_keeps_the_largest_set_whose_second_moment_fits() -> None:
    """Against the definition: drop from the largest on until the mean square of the rest is at most
    the limit; ties go together."""
    g = torch.Generator().manual_seed(3)
    for _ in range(30):
        x = torch.randn(12, generator=g, dtype=D) * 0.4
        x[4] = -x[7]  # equal sizes
        m = torch.rand(12, generator=g) < 0.8
        sizes = sorted(x[m].abs().tolist())
        moments = [sum(s * s for s in sizes[:k]) / max(k, 1) for k in range(len(sizes) + 1)]
        keep = max(k for k, moment in enumerate(moments) if moment <= 0.04)
        assert float(correction.find_m2_threshold(x, m, 0.04)) == [*sizes, INF][keep]
    # at the limit itself nothing goes
    assert float(correction.find_m2_threshold(vec(0.2, 0.2), yes(1, 1), 0.2**2)) == INF
    assert float(correction.find_m2_threshold(vec(), yes(), 0.04)) == INF
    assert float(correction.find_m2_threshold(vec(9), yes(0), 0.04)) == INF
    # 0.04: the paper's
    assert float(correction.find_m2_threshold(vec(0.19, 0.21), yes(1, 1))) == pytest.approx(0.21)


def as_given(
    log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, correction: Any
) -> torch.Tensor:
    return log_rho


def test_a_function_is_given_what_it_may_exponentiate_and_its_weights_are_not_bounded() -> None:
    x, one, seq = vec(30, -30, 0.5).requires_grad_(True), yes(1, 1, 1), torch.tensor([0, 1, 2])
    c = section(function="test_weights_bounds:as_given", bound="mask", lo=0.1, hi=0.2)
    got = correction.correct(x, x.detach(), one, seq, 3, c)
    assert got.weight.tolist() == [20, -20, 0.5] and not got.weight.requires_grad and got.kept.all()


def test_a_function_that_cannot_be_had_says_which_half_is_missing() -> None:
    for path, problem in {
        "no_such_module_here:f": "raised ModuleNotFoundError: No module named",
        "math:nothing": "raised AttributeError: module 'math' has no attribute 'nothing'",
        "math:pi": "raised TypeError: pi is not a function; write module:function or file.py:",
    }.items():
        with pytest.raises(ConfigError, match=f"key = {path}: importing it {problem}"):
            import_function(path, "key")
    assert import_function("math:sqrt", "correction.function") is math.sqrt


def test_unknown_estimators_are_named_with_the_known_ones() -> None:
    said = "kl.reward.estimator = k4: choose one of k1, k2, k3, abs, low_var_kl, k1"
    with pytest.raises(ConfigError, match=said):
        kl.estimate("k4", vec(0))
    said = "off_policy = prefix_full .needs the exact KL .*: choose one of none, ratio, prefix$"
    with pytest.raises(ConfigError, match=said):
        kl.compute_term(LP, REF, MU, SEQ, off_policy="prefix_full")


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
def test_kl_in_the_loss_pulls_however_far_the_policy_is(name: str, slopes: list[float]) -> None:
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
    assert float(term[0].detach()) == 0 and float(term[1].detach()) > 0
    assert bool(slope.isfinite().all()) and float(slope[1]) != 0


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
    c = config(
        f"correction.level={level} correction.bound=none loss.surrogate={surrogate} "
        "advantage.name=reinforce advantage.baseline=none"
    )
    grad = gradient(b, c, lp)[1]
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
    """Through the loss, as the learner takes it: past the budget no token pushes further."""
    b = batch(6)
    b.proximal = b.behavior.clone()
    c = config(
        "loss.surrogate=reshape correction.proximal=behavior learner.epochs=2 "
        "reshape.form=box_cox reshape.mode=constant reshape.gamma=0.5 reshape.budget=tokens "
        "reshape.kl_budget=1e-6"
    )
    prep = loss.prepare(b, c)
    everyone = torch.arange(len(b.rewards))
    loss.begin_step(prep, everyone, b.behavior)
    lp = theta(b)
    step = loss.begin_step(prep, everyone, lp.detach())
    total, _ = loss.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
    push = -torch.autograd.grad(total, lp)[0] * (lp.detach() - b.behavior)
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
    shaped = advantages.shape_rewards(b, b.mask, config("advantage.name=opob"), 0.0)
    torch.testing.assert_close(shaped.weights, (0.25 * counts).exp())


LP, REF, MU = vec(-1.0, -2.0, -0.5), vec(-1.4, -1.7, -1.5), vec(-1.2, -2.5, -0.25)


def sloped(make: Any) -> tuple[list[float], list[float]]:
    """(values, slope of their sum by token) of a function of the log-probabilities."""
    lp = LP.clone().requires_grad_(True)
    out = make(lp)
    return out.detach().tolist(), torch.autograd.grad(out.sum(), lp)[0].tolist()


def test_what_is_not_given_has_the_published_default() -> None:
    named = [x for x in vars(settings).values() if isinstance(x, type)]
    sections = [x for x in named if issubclass(x, settings.Section) and x is not settings.Section]
    _, found = msgspec.json.schema_components(sections)
    published = json.loads((ROOT / "configs" / "schema.json").read_text())["$defs"]
    assert len(found.keys() & published.keys()) > 50
    for name in found.keys() & published.keys():
        for key, made in found[name]["properties"].items():
            described = published[name]["properties"][key]
            assert made | {"description": ""} == described | {"description": ""}, (name, key)
    absent = {field.default for field in dataclasses.fields(LossBatch)}
    assert absent == {dataclasses.MISSING, None, ()}


def test_estimators_by_hand() -> None:
    x = vec(0.4, -0.3, 1.0)
    assert kl.estimate("k1", x).tolist() == x.tolist()
    assert kl.estimate_k2(x).tolist() == pytest.approx([0.08, 0.045, 0.5])
    assert kl.estimate_k3(x).tolist() == pytest.approx([k3(0.4), k3(-0.3), k3(1.0)])
    assert kl.estimate_forward_k3(x).tolist() == pytest.approx(
        [-v * math.exp(-v) - math.exp(-v) + 1 for v in (0.4, -0.3, 1.0)]
    )
    assert kl.estimate("low_var_kl", vec(-5, 30, 1)).tolist() == pytest.approx([10, 10, k3(1)])
    assert kl.estimate_k3(vec(-25)).tolist() == pytest.approx([math.exp(20) - 21])
    for name in kl.ESTIMATORS:
        values, slope = sloped(lambda lp, name=name: kl.estimate(name + "+", lp - REF))
        assert values == pytest.approx(kl.estimate(name, LP - REF).tolist())
        assert slope == pytest.approx((LP - REF).tolist())


def test_the_ratio_form_passes_its_gradient_through_the_ratio_too() -> None:
    values, slope = sloped(
        lambda lp: kl.compute_term(lp, REF, MU, SEQ, estimator="k2", off_policy="ratio")
    )
    w, x = (LP - MU).exp(), LP - REF
    assert values == pytest.approx((w * x.square() / 2).tolist())
    assert slope == pytest.approx((w * (x.square() / 2 + x)).tolist())
    plain = sloped(lambda lp: kl.compute_term(lp, REF, MU, SEQ))  # k3 where nothing is said
    assert plain[0] == pytest.approx([k3(float(v)) for v in x])
    assert plain[1] == pytest.approx([1 - math.exp(-float(v)) for v in x])


@pytest.mark.parametrize(
    ("discount", "truncate"),
    [(1.0, math.inf), (0.5, math.inf), (0.0, math.inf), (1.0, 1.5), (0.5, 1.5)],
)
def test_the_prefix_form_by_hand(discount: float, truncate: float) -> None:
    """W_1 = e^0.2, W_2 = e^0.7 | W_1 = e^-0.25; a token is pulled by its own k1 and by the
    discounted k3 of what follows it."""
    w = [min(math.exp(v), truncate) for v in (0.2, 0.7, -0.25)]
    x = [0.4, -0.3, 1.0]
    value = [a * k3(b) for a, b in zip(w, x, strict=True)]
    how = {"off_policy": "prefix", "discount": discount, "truncate": truncate}
    values, slope = sloped(lambda lp: kl.compute_term(lp, REF, MU, SEQ, **how))
    assert values == pytest.approx(value)
    assert slope == pytest.approx([w[0] * x[0] + discount * value[1], w[1] * x[1], w[2] * x[2]])
    assert kl.compute_prefix_weights(LP, MU, SEQ, truncate).tolist() == pytest.approx(w)


@pytest.mark.parametrize(("discount", "truncate"), [(1.0, math.inf), (0.5, 1.1)])
def test_the_exact_steps_form_by_hand(discount: float, truncate: float) -> None:
    """The weight of a state is that of the tokens before it: 1, e^0.2 | 1."""
    w = [1.0, min(math.exp(0.2), truncate), 1.0]
    each = vec(0.3, 0.6, 0.9)
    lp, step = LP.clone().requires_grad_(True), each.clone().requires_grad_(True)
    how = {"off_policy": "prefix_full", "discount": discount, "truncate": truncate}
    out = kl.compute_term(lp, REF, MU, SEQ, step_kl=step, **how)
    by_lp, by_step = torch.autograd.grad(out.sum(), (lp, step))
    assert out.tolist() == pytest.approx([w[0] * 0.3, w[1] * 0.6, w[2] * 0.9])
    assert by_step.tolist() == pytest.approx(w)
    assert by_lp.tolist() == pytest.approx([discount * w[1] * 0.6, 0, 0])


def test_the_sum_before_a_token_is_cut_and_not_its_parts() -> None:
    # sums 30 and -15
    far = kl.compute_prefix_weights(vec(0, 0), vec(-30, 45), torch.tensor([0, 0]))
    assert far.tolist() == pytest.approx([math.exp(20), math.exp(-15)])
    zeros = vec(0, 0, 0)
    p = kl.KLInputs(zeros, zeros, vec(-30, 5, 0), zeros.long(), step_kl=vec(1, 1, 1))
    assert kl.OFF_POLICY["prefix_full"](p).tolist() == pytest.approx([1, *[math.exp(20)] * 2])


def test_the_controller_of_the_paper() -> None:
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): target 6, horizon 10000."""
    for measured, error in ((6.6, 0.1), (99, 0.2), (5.4, -0.1), (-9, -0.2)):
        terms = settings.KLReward(controller="adaptive", target=6.0, horizon=1000)
        found = kl.adapt_beta(2.0, measured, 100, terms)
        assert found == pytest.approx(2 * (1 + error * 0.1))
    terms = settings.KLReward(controller="adaptive")
    assert kl.adapt_beta(1.0, 6.6, 1000, terms) == pytest.approx(1.01)
    for unknown in (math.nan, math.inf, -math.inf):
        assert kl.adapt_beta(1.01, unknown, 1000, terms) == 1.01
    assert kl.adapt_beta(1.0, 99, 10**6, settings.KLReward()) == 1.0


def test_gamma_base_and_the_kl_of_the_batch() -> None:
    """Log-ratios 1, -1, 3 (one more behind the mask): variance 4; k3 = e^x - 1 - x."""
    s = reshape.compute_statistics(vec(1, -1, 3, 99), torch.tensor([True, True, True, False]))
    assert float(s.sigma2) == pytest.approx(4)
    assert float(s.base) == pytest.approx(math.sqrt(-math.log(0.3) / 4), rel=1e-12)
    assert s.base.dtype == D and s.share == 1
    assert float(s.kl) == pytest.approx(sum(math.exp(x) - 1 - x for x in (1, -1, 3)) / 3)
    assert float(reshape.compute_statistics(vec(0.1, -0.1), torch.tensor([True, True])).base) == 1
    one = reshape.compute_statistics(vec(2.0), torch.tensor([True]))
    assert (float(one.sigma2), float(one.base)) == (0, 1)
    half = reshape.compute_statistics(vec(1, -1, 3), torch.ones(3, dtype=torch.bool), 0.5)
    assert float(half.base) == pytest.approx(math.sqrt(-math.log(0.5) / 4))


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_gamma_of_a_token_by_hand() -> None:
    x, a, base = 0.4, 1.5, 0.6
    want = base + (sigma(-2 * x) - base) * sigma(a * x / 0.5)
    s = reshape.ReshapeStatistics(vec(4)[0], vec(base)[0], vec(0.2)[0])
    c = repaired(mode="v3.1", tau=0.5, temperature=2.0)
    v31 = reshape.compute_gamma(vec(x, x), vec(a, -a), s, c)
    other = base + (sigma(-2 * x) - base) * sigma(-a * x / 0.5)
    assert v31.tolist() == pytest.approx([want, other])
    low = reshape.compute_gamma(vec(9), vec(9), s, repaired(mode="v3.1", gamma_min=0.05))
    assert low.tolist() == [0.05]
    got = reshape.compute_gamma(vec(1, 2), vec(1, 1), s, repaired(mode="base"))
    assert got.tolist() == [base, base]
    values = reshape.compute_gamma(vec(1), vec(1), s, repaired(mode="base", gamma_min=0.7))
    assert values.tolist() == [0.7]
    got = reshape.compute_gamma(vec(1, 2), vec(1, 1), s, repaired(gamma=0.3))
    assert got.tolist() == [0.3, 0.3]


def test_repair_d_by_tokens_and_globally() -> None:
    s = reshape.ReshapeStatistics(vec(4)[0], vec(0.6)[0], vec(0.2)[0], share=0.25)
    x, a = vec(0.3, -0.3, 0.3, -0.3, 0.0), vec(1, 1, -1, -1, 1)

    def gamma(**keys: Any) -> list[float]:
        return reshape.compute_gamma(x, a, s, repaired(**keys)).tolist()

    assert gamma(budget="tokens") == pytest.approx([0.125, 0.5, 0.5, 0.125, 0.5])
    assert gamma(budget="tokens", form="box_cox") == pytest.approx([0.5] * 5)
    # sqrt(0.05 / 0.2), below the base
    assert gamma(budget="global", kl_budget=0.05) == pytest.approx([0.5] * 5)
    # sqrt(1/2) is above it
    assert gamma(budget="global", kl_budget=0.1) == pytest.approx([0.6] * 5)
    s.share = 0.0
    assert gamma(budget="tokens") == pytest.approx([0, 0.5, 0.5, 0, 0.5])
    s.base, s.kl = vec(2)[0], vec(0.01)[0]
    # at most 1
    assert gamma(budget="global", kl_budget=0.05) == [1] * 5


@pytest.mark.parametrize("clip_on", ["w", "w_gamma"])
@pytest.mark.parametrize("form", ["power", "box_cox"])
def test_repair_b_has_the_objective_of_the_bound(form: str, clip_on: str) -> None:
    """The objective's slope in log w is the coefficient everywhere, as without the clip."""
    c = repaired(form=form, clip=0.2, clip_on=clip_on, weight_max=3.0)
    x = torch.linspace(-1.5, 1.5, 61, dtype=D)
    for sign in (1.0, -1.0):
        a, g = torch.full_like(x, sign), torch.full_like(x, 0.5)
        t, near = (surrogates.compute_reshape(x + e, a, g, c) for e in (0.0, 1e-7))
        bounds = vec(0.8, 1.2) ** (1 if clip_on == "w_gamma" else 0.5)
        assert (t.clipped != 0).any()
        assert torch.allclose((near.objective - t.objective) / 1e-7, t.coefficient, atol=1e-5)
        at_bound = bounds[1 if sign > 0 else 0]
        value = at_bound if form == "power" else (at_bound - 1) / 0.5
        assert torch.allclose(t.objective[t.clipped != 0], sign * value)


def test_the_two_forms_and_repair_b_by_hand() -> None:
    x, a, g = vec(2, 0.5).log(), vec(3, -1), vec(0.5, 0.5)
    t = surrogates.compute_reshape(x, a, g, repaired())
    r2, rh = math.sqrt(2), math.sqrt(0.5)
    assert t.objective.tolist() == pytest.approx([3 * r2, -rh])
    assert t.coefficient.tolist() == pytest.approx([1.5 * r2, -0.5 * rh])
    assert t.clipped.tolist() == [0, 0]
    t = surrogates.compute_reshape(x, a, g, repaired(form="box_cox"))
    assert t.objective.tolist() == pytest.approx([3 * (r2 - 1) / 0.5, -(rh - 1) / 0.5])
    assert t.coefficient.tolist() == pytest.approx([3 * r2, -rh])
    # the limit: log w, gradient 1
    t = surrogates.compute_reshape(x, a, vec(0, 0), repaired(form="box_cox"))
    assert t.objective.tolist() == pytest.approx([3 * math.log(2), math.log(2)])
    assert t.coefficient.tolist() == [3, -1]
    t = surrogates.compute_reshape(x, a, vec(1e-5, 1e-5), repaired(form="box_cox"))
    assert t.objective.tolist() == pytest.approx([3 * math.log(2), math.log(2)], rel=1e-4)
    # both push away
    c = repaired(form="box_cox", budget="tokens")
    slow = surrogates.compute_reshape(x, a, g, c, share=0.25)
    assert slow.coefficient.tolist() == pytest.approx([0.75 * r2, -0.25 * rh])
    assert slow.objective.tolist() == pytest.approx([1.5 * (r2 - 1), -0.5 * (rh - 1)])
    back = surrogates.compute_reshape(x, -a, g, c, share=0.25)
    assert back.coefficient.tolist() == pytest.approx([-3 * r2, rh])
    third = surrogates.compute_reshape(x, a, g, c, share=1 / 3)
    # in the loss's own precision
    assert third.coefficient.dtype == D
    assert third.coefficient.tolist() == pytest.approx([r2, -rh / 3], rel=1e-12)
    free = surrogates.compute_reshape(x, a, g, repaired(form="box_cox"), share=0.25)
    assert free.coefficient.tolist() == pytest.approx([3 * r2, -rh])
    cut = surrogates.compute_reshape(
        vec(1.25, 1.25, 0.75, 0.75, 1.2, 0.8).log(),
        vec(1, -1, -1, 1, 1, -1),
        vec(*[1] * 6),
        repaired(clip=0.22),
    )
    assert cut.clipped.tolist() == [surrogates.HIGH, 0, surrogates.LOW, 0, 0, 0]
    assert cut.coefficient.tolist() == pytest.approx([0, -1.25, 0, 0.75, 1.2, -0.8])
    assert cut.clipped.dtype == torch.int8
    # w^gamma = 1.1, 1.21: at gamma = 1/2 the bound 1.15 lets w go to 1.15^2
    late = surrogates.compute_reshape(
        vec(1.21, 1.4641).log(), vec(1, 1), vec(0.5, 0.5), repaired(clip=0.15, clip_on="w_gamma")
    )
    assert late.clipped.tolist() == [0, surrogates.HIGH]
    c = repaired(clip=0.2, weight_max=3.0)
    wide = surrogates.compute_reshape(vec(4).log(), vec(1), vec(1), c)
    assert wide.objective.tolist() == pytest.approx([1.2]) and wide.coefficient.tolist() == [0.0]


def test_the_share_of_a_step_that_fits() -> None:
    """sqrt(KL) adds like a distance: of 0.2 (budget 0.04) 0.15 are spent (0.0225); a full step
    takes 0.1 (0.01), or all of it if unknown."""
    assert loss.KLBudget(0.04, 0.01).compute_next_share(0.0225) == pytest.approx(0.5)
    assert loss.KLBudget(0.04).compute_next_share(0.0225) == pytest.approx(0.25)
    assert loss.KLBudget(0.04, 0.01).compute_next_share(0.0) == 1
    assert loss.KLBudget(0.04, 0.01).compute_next_share(0.05) == 0
    assert loss.KLBudget(0.04).compute_next_share(0.04) == 0
    # a step that moves nothing fits
    assert loss.KLBudget(0.04).compute_next_share(-1.0) == 1
    assert loss.KLBudget(0.04, 0.0).compute_next_share(0.0225) == 1
    assert loss.KLBudget(0.0).compute_next_share(0.0) == 0
    assert loss.KLBudget(-1.0, 1.0).compute_next_share(1.0) == 0


def test_a_budget_measures_its_first_step_alone() -> None:
    b = loss.KLBudget(0.09)
    assert b.compute_next_share(0.01) == pytest.approx(1 - 0.1 / 0.3) and b.step_kl is None
    # two thirds of a step moved 0.1
    assert b.compute_next_share(0.04) == pytest.approx(0.1 / 0.15)
    assert b.step_kl == pytest.approx(0.15**2)
    assert b.compute_next_share(0.0625) == pytest.approx(0.05 / 0.15)
    assert b.step_kl == pytest.approx(0.15**2)
    spent = loss.KLBudget(0.01)
    # no step was made: nothing is known of one
    assert spent.compute_next_share(0.02) == 0 and spent.compute_next_share(0.03) == 0
    assert spent.step_kl is None
