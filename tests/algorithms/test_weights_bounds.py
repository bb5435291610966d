"""Correction by its edges: every bound, band, veto and threshold on both of its sides, and what
lies behind the mask.  float64."""

from __future__ import annotations

import math
import typing
from typing import Any

import pytest
import torch
from algorithms_catalogue_kit import vec, yes
from algorithms_kit import convert

from asyncrl.algorithms import advantages, kl, reductions, reshape, surrogates
from asyncrl.algorithms import correction as weights
from asyncrl.algorithms import settings as cf
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function

D = torch.float64
INF = math.inf


def section(**keys: Any) -> Any:
    """A `correction` of tokens without a bound, and what else is given."""
    return cf.RecomputedCorrection(**{"bound": "none", **keys})


def choices(struct: Any, key: str) -> set[str]:
    """The words that the configuration accepts for a key, or the tags that choose a struct."""
    if key == struct.__struct_config__.tag_field:
        return {below.__struct_config__.tag for below in cf.list_variants(struct)}
    kind = typing.get_type_hints(struct)[key]
    return set(typing.get_args(kind))


NAMED = [
    (weights.LEVELS, cf.RecomputedCorrection, "level"),
    (weights.BOUNDS, cf.RecomputedCorrection, "bound"),
    (weights.STATISTICS, cf.Correction, "reject"),
    (weights.OVER, cf.Correction, "reject_over"),
    (weights.VETO, cf.Correction, "veto"),
    (surrogates.SURROGATES, cf.Loss, "surrogate"),
    (reductions.REDUCTIONS, cf.Loss, "reduction"),
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
def test_the_words_an_error_offers_are_those_the_configuration_takes(
    names: Any, struct: Any, key: str
) -> None:
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
    assert weights.apply_bound(w, "truncate", 0.5, 2.0).tolist() == [0.4, 0.5, 1, 2, 2]
    assert weights.apply_bound(w, "clip", 0.5, 2.0).tolist() == [0.5, 0.5, 1, 2, 2]
    assert weights.apply_bound(w, "mask", 0.5, 2.0).tolist() == [0, 0.5, 1, 2, 0]
    assert weights.apply_bound(w, "none", 0.5, 2.0).tolist() == w.tolist()


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
    assert weight(0.001) == pytest.approx(lo)
    assert weight(1000) == pytest.approx(hi)
    assert weight(1.0) == pytest.approx(1.0)
    assert weight(0.001, lo=0.25) == pytest.approx(0.25)
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


def test_effective_sample_size_is_over_the_mask() -> None:
    w = vec(1, 1, 2, 50)
    got = float(weights.compute_effective_sample_size(w, yes(1, 1, 1, 0)))
    assert got == (pytest.approx(16 / 18))
    assert float(weights.compute_effective_sample_size(w, yes(0, 0, 0, 0))) == 1
    assert float(weights.compute_effective_sample_size(w[:0])) == 1
    assert float(weights.compute_effective_sample_size(vec(3, 3))) == pytest.approx(1)


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
    assert not stays(1.0, reject_lo=1.1)
    assert not stays(1.0, reject_hi=0.9)
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
            other = weights.find_vetoed(kind, 0.5, rho, prox, m, seq, 2).tolist()
            assert other[:2] == [True, True]
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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: weights.compute_weights(vec(0), yes(1), torch.tensor([0]), 1, "word"),
            "correction.level = word: choose one of none, token, sequence, geometric",
        ),
        (
            lambda: weights.apply_bound(vec(0), "cut", 0, 1),
            "correction.bound = cut: choose one of none, truncate, clip, mask",
        ),
        (
            lambda: weights.compute_statistic("k4", "token", vec(0), yes(1), torch.tensor([0]), 1),
            "correction.reject = k4: choose one of none, ratio, k1, k2, k3",
        ),
        (
            lambda: weights.compute_statistic("k1", "min", vec(0), yes(1), torch.tensor([0]), 1),
            "correction.reject_over = min: choose one of token, sum, mean, max",
        ),
        (
            lambda: weights.find_vetoed("all", None, vec(0), vec(0), yes(1), torch.tensor([0]), 1),
            "correction.veto = all: choose one of none, probability, ratio",
        ),
        (
            lambda: reductions.compute_factors(yes(1), torch.tensor([0]), 1, "mean"),
            "loss.reduction = mean: choose one of token-mean, seq-mean-token-sum, ",
        ),
        (
            lambda: kl.estimate("k4", vec(0)),
            "kl.loss.estimator, kl.reward.estimator = k4: choose one of k1, k2, k3, abs, "
            "low_var_kl, k1+, ",
        ),
    ],
)
def test_an_unknown_word_names_its_key_and_the_known_ones(call: Any, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        call()
    assert str(e.value).startswith(said)
