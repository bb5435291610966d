"""Correction by its edges: every bound, band, veto and threshold on both of its sides, and what
lies behind the mask.  float64."""

import math
import typing
from typing import Any

import pytest
import torch
from algorithms_catalogue_kit import answers, repaired, vec, yes
from algorithms_kit import D, batch, config, convert, gradient, theta
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
from asyncrl.algorithms import correction as weights
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms import settings as cf
from asyncrl.algorithms.advantages import _compute_sample_ratios
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function

INF = math.inf


def section(**keys: Any) -> Any:
    """A `correction` of tokens without a bound, and what else is given."""
    return cf.RecomputedCorrection(**{"bound": "none", **keys})


def choices(struct: Any, key: str) -> set[str]:
    """The words that the configuration accepts for a key, or the tags that choose a struct."""
    if key == struct.__struct_config__.tag_field:
        return {below.__struct_config__.tag for below in cf.list_variants(struct)}
    return set(typing.get_args(typing.get_type_hints(struct)[key]))


NAMED = [
    (weights.LEVELS, cf.RecomputedCorrection, "level"),
    (weights.BOUNDS, cf.RecomputedCorrection, "bound"),
    (weights.STATISTICS, cf.Correction, "reject"),
    (weights.OVER, cf.Correction, "reject_over"),
    (weights.VETO, cf.Correction, "veto"),
    (surrogates.SURROGATES, cf.Loss, "surrogate"),
    (loss.REDUCTIONS, cf.Loss, "reduction"),
    (reshape.MODES, cf.Reshape, "mode"),
    (surrogates.FORMS, cf.Reshape, "form"),
    (reshape.BUDGETS, cf.Reshape, "budget"),
    (kl.OFF_POLICY, cf.KLLoss, "off_policy"),
    ({**advantages.BY_ANSWER, **advantages.BY_TOKEN}, cf.Advantage, "name"),
    (advantages.BASELINES, cf.ReinforceAdvantage, "baseline"),
    (advantages.SCALES, cf.Advantage, "rewards"),
    *[
        ([x for n in kl.ESTIMATORS for x in (n, n + "+")], part, key)
        for part, key in (
            (cf.KLLoss, "estimator"),
            (cf.KLReward, "estimator"),
            (cf.Reshape, "kl_estimator"),
        )
    ],
]


@pytest.mark.parametrize(
    ("names", "struct", "key"), NAMED, ids=[f"{s.__name__}.{k}" for _, s, k in NAMED]
)
def test_an_error_offers_what_the_configuration_takes(names: Any, struct: Any, key: str) -> None:
    assert set(names) == choices(struct, key) and len(names) == len(set(names))


def test_the_settings_read_words_from_the_source_as_python_does() -> None:
    """Dicts and tuples of texts, without importing the module; what is none is no table."""
    assert cf.read_names("surrogates", "SURROGATES") == tuple(surrogates.SURROGATES)
    assert cf.ON_BEHAVIOR == surrogates.ON_BEHAVIOR and cf.BY_GROUP == advantages.BY_GROUP
    assert set(surrogates.NEED_CURRENT) | set(surrogates.PREPASS) <= set(surrogates.SURROGATES)
    assert set(kl.PREFIX_FORMS) <= set(kl.OFF_POLICY)
    for module, table in (("surrogates", "NOTHING"), ("ratios", "CLAMP"), ("surrogates", "OPEN")):
        with pytest.raises(KeyError, match=table):
            cf.read_names(module, table)


def test_levels_look_at_the_mask_alone_and_clamp_what_they_exponentiate() -> None:
    """Answers of log-ratios (0.5, 0.1, masked 9) and (-30); the product of the second is cut at
    e^-20, e^20 the other way."""
    x, m, seq = vec(0.5, 0.1, 9.0, -30.0), yes(1, 1, 0, 1), torch.tensor([0, 0, 0, 1])
    cut = math.exp(-20)
    got = weights.compute_weights(x, m, seq, 2, "token")
    assert got.tolist() == (pytest.approx([math.exp(0.5), math.exp(0.1), 1, cut]))
    got = weights.compute_weights(x, m, seq, 2, "sequence")
    assert got.tolist() == (pytest.approx([math.exp(0.6)] * 3 + [cut]))
    got = weights.compute_weights(x, m, seq, 2, "geometric")
    assert got.tolist() == (pytest.approx([math.exp(0.3)] * 3 + [cut]))
    assert weights.compute_weights(x, m, seq, 2, "none").tolist() == [1, 1, 1, 1]


def test_bounds_hold_at_their_edges() -> None:
    w = vec(0.4, 0.5, 1.0, 2.0, 2.1)
    assert weights.BOUNDS["truncate"](w, 0.5, 2.0).tolist() == [0.4, 0.5, 1, 2, 2]
    assert weights.BOUNDS["clip"](w, 0.5, 2.0).tolist() == [0.5, 0.5, 1, 2, 2]
    assert weights.BOUNDS["mask"](w, 0.5, 2.0).tolist() == [0, 0.5, 1, 2, 0]
    assert weights.BOUNDS["none"](w, 0.5, 2.0).tolist() == w.tolist()


@pytest.mark.parametrize(
    ("level", "lo", "hi"),
    [("token", 0.5, 2), ("sequence", 0.5, 2), ("geometric", 0.99, 1.01), ("none", 0, INF)],
)
def test_absent_bounds_are_the_levels_own(level: str, lo: float, hi: float) -> None:
    """One answer of one token, so that every level's weight is the ratio itself (none: 1)."""
    one, seq = yes(1), torch.tensor([0])

    def weight(ratio: float, **keys: Any) -> float:
        return float(
            weights.correct(
                vec(ratio).log(), vec(-1), one, seq, 1, section(level=level, bound="clip", **keys)
            ).weight
        )

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
    assert float(weights.compute_mean_weight(w, m, seq, 3, "token")) == pytest.approx(4.5 / 3)
    for level in ("sequence", "geometric", "none"):
        got = float(weights.compute_mean_weight(w, m, seq, 3, level))
        assert got == (pytest.approx((2 + 0.5) / 2))
    assert float(weights.compute_mean_weight(w * 0, m, seq, 3, "token")) == 1
    assert float(weights.compute_mean_weight(w, m & False, seq, 3, "sequence")) == 1


def test_self_normalised_weights_of_what_is_kept_have_mean_one() -> None:
    x, seq = vec(0.3, -0.2, 0.1, 0.6, 3.0), torch.tensor([0, 0, 1, 1, 2])
    m = yes(1, 1, 1, 0, 1)
    c = section(self_normalize=True, reject="ratio")  # band [1/2, 2] a token: the last goes
    got = weights.correct(x, x, m, seq, 3, c)
    keep = yes(1, 1, 1, 0, 0)
    raw = torch.where(keep, x.exp(), 0.0)
    assert torch.allclose(got.weight[:3], (raw / (raw.sum() / 3))[:3]) and float(got.weight[4]) == 0
    assert float(got.weight[keep].mean()) == pytest.approx(1)
    again = weights.correct(
        x[:2],
        x[:2],
        m[:2],
        seq[:2],
        3,
        c,
        weights.WeightStatistics(mean=torch.tensor(4.0, dtype=D)),
    )
    assert torch.allclose(again.weight, x[:2].exp() / 4)  # a part of a batch takes the batch's mean


def test_the_normalized_mis_by_hand() -> None:
    """Samples of ratios (2.5, 0.4), (1.2, 1.2), (1, 1) and (1, 1); the mean ratio rejects the
    second, a token of probability 1e-7 the fourth; one token is cut at 2."""
    rho, seq = vec(2.5, 0.4, 1.2, 1.2, 1, 1, 1, 1), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    proximal = vec(0.5, 0.5, 0.5, 0.5, 2e-6, 0.5, 1e-7, 0.5).log()
    c = convert("correction.preset=mis_normalized").correction
    got = weights.correct(rho.log(), proximal, yes(*[1] * 8), seq, 4, c)
    mean = (2 + 0.4 + 1 + 1) / 4
    want = [2 / mean, 0.4 / mean, 0, 0, 1 / mean, 1 / mean, 0, 0]
    assert got.weight.tolist() == pytest.approx(want)
    assert got.vetoed.tolist() == [False] * 6 + [True] * 2


def test_the_geometric_mask_by_hand() -> None:
    """Geometric means of 1, 1.009, 1.011 and 0.989: the first two stay, without a weight."""
    rho, seq = vec(2, 0.5, 1.009, 1.009, 1.011, 1.011, 0.989, 0.989), torch.arange(8) // 2
    c = convert("correction.preset=geo_mask").correction
    got = weights.correct(rho.log(), rho.log() - 1, yes(*[1] * 8), seq, 4, c)
    assert got.weight.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


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
        got = weights.compute_statistic(name, "token", x, m, seq, 2)
        assert got.tolist() == (pytest.approx([g(a), g(b), g(0.0), g(one)]))
        for over, value in (("sum", a + b), ("mean", (a + b) / 2), ("max", max(a, b))):
            assert weights.compute_statistic(name, over, x, m, seq, 2).tolist() == pytest.approx(
                [g(value)] * 3 + [g(one)]
            ), (name, over)


@pytest.mark.parametrize(
    ("over", "lo", "hi"), [("token", 0.5, 2), ("sum", 0.5, 2), ("mean", 0.99, 1.01), ("max", 0, 2)]
)
def test_the_ratios_band_by_what_it_is_taken_over(over: str, lo: float, hi: float) -> None:
    def stays(ratio: float, **keys: Any) -> bool:
        x = vec(ratio).log()
        return bool(
            weights.correct(
                x,
                x,
                yes(1),
                torch.tensor([0]),
                1,
                section(reject="ratio", reject_over=over, **keys),
            ).kept
        )

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
        got = weights.build_rejection_mask("k1", "token", lo, hi, x, one, seq, 3)
        assert got.tolist() == kept, (lo, hi)
    got = weights.build_rejection_mask("none", "token", None, None, x * 100, one, seq, 3)
    assert got.tolist() == [True, True, True]
    for name in ("k1", "k2", "k3"):
        with pytest.raises(
            ConfigError,
            match=f"correction.reject_hi: reject = {name} has no default bound; give one",
        ):
            weights.build_rejection_mask(name, "token", 0.1, None, x, one, seq, 3)


def test_a_veto_takes_the_answer_at_its_threshold_and_looks_behind_no_mask() -> None:
    seq, m = torch.tensor([0, 0, 1, 1]), yes(1, 1, 1, 0)
    ok, none = vec(-1, -1, -1, -1), vec(0, 0, 0, 0)
    for kind, limit in (("probability", 1e-6), ("ratio", 1e-4)):
        for value, goes in ((limit * 1.01, False), (limit * 0.99, True)):
            # the last is behind the mask
            low = torch.tensor([math.log(value), -1, -1, -50], dtype=D)
            rho, prox = (none, low) if kind == "probability" else (low, ok)
            values = weights.find_vetoed(kind, None, rho, prox, m, seq, 2)
            assert values.tolist() == [goes, goes, False, False]
            assert weights.find_vetoed(kind, 0.5, rho, prox, m, seq, 2).tolist()[:2] == [True, True]
    assert weights.find_vetoed("none", None, ok * 99, ok * 99, m, seq, 2).tolist() == [False] * 4
    x = vec(-20, 0.1, 0.2, 0.3)
    got = weights.correct(x, ok, yes(1, 1, 1, 1), seq, 2, section(veto="ratio"))
    assert got.vetoed.tolist() == [True, True, False, False]
    assert got.kept.tolist() == [False, False, True, True]
    assert got.weight.tolist() == pytest.approx([0, 0, math.exp(0.2), math.exp(0.3)])
    assert weights.correct(
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
        keep = max(
            (
                k
                for k in range(len(sizes) + 1)
                if k == 0 or sum(s * s for s in sizes[:k]) / k <= 0.04
            ),
            default=0,
        )
        limit = float(weights.find_m2_threshold(x, m, 0.04))
        if keep == len(sizes):
            assert limit == INF
        else:
            assert limit == sizes[keep]
    # at the limit itself nothing goes
    assert float(weights.find_m2_threshold(vec(0.2, 0.2), yes(1, 1), 0.2**2)) == INF
    assert float(weights.find_m2_threshold(vec(), yes(), 0.04)) == INF
    assert float(weights.find_m2_threshold(vec(9), yes(0), 0.04)) == INF
    # 0.04: the paper's
    assert float(weights.find_m2_threshold(vec(0.19, 0.21), yes(1, 1))) == pytest.approx(0.21)


def as_given(
    log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, correction: Any
) -> torch.Tensor:
    return log_rho


def test_a_function_is_given_what_it_may_exponentiate_and_its_weights_are_not_bounded() -> None:
    x, one, seq = vec(30, -30, 0.5).requires_grad_(True), yes(1, 1, 1), torch.tensor([0, 1, 2])
    got = weights.correct(
        x,
        x.detach(),
        one,
        seq,
        3,
        section(function="test_weights_bounds:as_given", bound="mask", lo=0.1, hi=0.2),
    )
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


def test_an_unknown_estimator_is_named_with_the_known_ones() -> None:
    said = "kl.reward.estimator = k4: choose one of k1, k2, k3, abs, low_var_kl, k1"
    with pytest.raises(ConfigError, match=said):
        kl.estimate("k4", vec(0))


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
    """Through the loss, as the learner takes it: past the budget no token pushes further."""
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
