"""KL terms, gamma and the stops by hand: values, slopes, truncation, discounts, and the constants a
configuration leaves out.  float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithms_catalogue_kit import k3, repaired, vec, yes
from surrogate_kit import covariance, term

from asyncrl.algorithms import diagnostics, kl, loss, ratios, reshape, surrogates
from asyncrl.algorithms.surrogates import DUAL, HIGH, LOW, choose_highest, sample_by_covariance
from asyncrl.contract.errors import ConfigError

D = torch.float64
SEQ = torch.tensor([0, 0, 1])
LP, REF, MU = vec(-1.0, -2.0, -0.5), vec(-1.4, -1.7, -1.5), vec(-1.2, -2.5, -0.25)


def sloped(make: Any) -> tuple[list[float], list[float]]:
    """(values, slope of their sum by token) of a function of the log-probabilities."""
    lp = LP.clone().requires_grad_(True)
    out = make(lp)
    return out.detach().tolist(), torch.autograd.grad(out.sum(), lp)[0].tolist()


def test_estimators_by_hand() -> None:
    x = vec(0.4, -0.3, 1.0)
    assert kl.estimate_k1(x).tolist() == x.tolist()
    assert kl.estimate_k2(x).tolist() == pytest.approx([0.08, 0.045, 0.5])
    assert kl.estimate_k3(x).tolist() == pytest.approx([k3(0.4), k3(-0.3), k3(1.0)])
    assert kl.estimate_forward_k3(x).tolist() == pytest.approx(
        [-v * math.exp(-v) - math.exp(-v) + 1 for v in (0.4, -0.3, 1.0)]
    )
    assert kl.estimate_low_var_kl(vec(-5, 30, 1)).tolist() == pytest.approx([10, 10, k3(1)])
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
    values, slope = sloped(
        lambda lp: kl.compute_term(
            lp, REF, MU, SEQ, off_policy="prefix", discount=discount, truncate=truncate
        )
    )
    assert values == pytest.approx(value)
    assert slope == pytest.approx([w[0] * x[0] + discount * value[1], w[1] * x[1], w[2] * x[2]])
    assert kl.compute_prefix_weights(LP, MU, SEQ, truncate).tolist() == pytest.approx(w)


@pytest.mark.parametrize(("discount", "truncate"), [(1.0, math.inf), (0.5, 1.1)])
def test_the_exact_steps_form_by_hand(discount: float, truncate: float) -> None:
    """The weight of a state is that of the tokens before it: 1, e^0.2 | 1."""
    w = [1.0, min(math.exp(0.2), truncate), 1.0]
    each = vec(0.3, 0.6, 0.9)
    lp, step = LP.clone().requires_grad_(True), each.clone().requires_grad_(True)
    out = kl.compute_term(
        lp,
        REF,
        MU,
        SEQ,
        off_policy="prefix_full",
        discount=discount,
        truncate=truncate,
        step_kl=step,
    )
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


def test_errors_of_forms() -> None:
    with pytest.raises(
        ConfigError,
        match=r"off_policy = prefix_full .needs the exact KL of each step .*"
        r": choose one of none, ratio, prefix$",
    ):
        kl.compute_term(LP, REF, MU, SEQ, off_policy="prefix_full")


def test_the_controller_of_the_paper() -> None:
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon), with a target of 6 and a horizon of
    10000."""
    for measured, error in ((6.6, 0.1), (99, 0.2), (5.4, -0.1), (-9, -0.2)):
        controller = kl.KLController(2.0, "adaptive", 6.0, 1000)
        assert controller.update(measured, 100) == pytest.approx(2 * (1 + error * 0.1))
    c = kl.KLController(1.0, "adaptive")
    assert c.update(6.6, 1000) == pytest.approx(1.01) == c.beta
    for unknown in (math.nan, math.inf, -math.inf):
        assert c.update(unknown, 1000) == c.beta == pytest.approx(1.01)
    assert c.update(5.4, 1000) == pytest.approx(1.01 * 0.99)
    assert kl.KLController(1.0).update(99, 10**6) == 1.0


def test_gamma_base_and_the_kl_of_the_batch() -> None:
    """Log-ratios 1, -1, 3 (one more behind the mask): variance 4; k3 = e^x - 1 - x."""
    s = reshape.compute_statistics(vec(1, -1, 3, 99), torch.tensor([True, True, True, False]))
    assert float(s.sigma2) == pytest.approx(4)
    assert float(s.base) == pytest.approx(math.sqrt(-math.log(0.3) / 4), rel=1e-12)
    assert s.base.dtype == D
    assert s.share == 1
    assert float(s.kl) == pytest.approx(sum(math.exp(x) - 1 - x for x in (1, -1, 3)) / 3)
    assert float(reshape.compute_statistics(vec(0.1, -0.1), torch.tensor([True, True])).base) == 1
    one = reshape.compute_statistics(vec(2.0), torch.tensor([True]))
    assert (float(one.sigma2), float(one.base)) == (0, 1)
    assert float(
        reshape.compute_statistics(vec(1, -1, 3), torch.ones(3, dtype=torch.bool), 0.5).base
    ) == pytest.approx(math.sqrt(-math.log(0.5) / 4))


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_gamma_of_a_token_by_hand() -> None:
    x, a, base = 0.4, 1.5, 0.6
    want = base + (sigma(-2 * x) - base) * sigma(a * x / 0.5)
    s = reshape.ReshapeStatistics(vec(4)[0], vec(base)[0], vec(0.2)[0])
    v31 = reshape.compute_gamma(
        vec(x, x), vec(a, -a), s, repaired(mode="v3.1", tau=0.5, temperature=2.0)
    )
    assert v31.tolist() == pytest.approx(
        [want, base + (sigma(-2 * x) - base) * sigma(-a * x / 0.5)]
    )
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
        slope = (near.objective - t.objective) / 1e-7
        assert torch.allclose(slope, t.coefficient, atol=1e-5)
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
    t = surrogates.compute_reshape(
        x, a, vec(0, 0), repaired(form="box_cox")
    )  # the limit: log w, gradient 1
    assert t.objective.tolist() == pytest.approx([3 * math.log(2), math.log(2)])
    assert t.coefficient.tolist() == [3, -1]
    t = surrogates.compute_reshape(x, a, vec(1e-5, 1e-5), repaired(form="box_cox"))
    assert t.objective.tolist() == pytest.approx([3 * math.log(2), math.log(2)], rel=1e-4)
    # both push away
    slow = surrogates.compute_reshape(
        x, a, g, repaired(form="box_cox", budget="tokens"), share=0.25
    )
    assert slow.coefficient.tolist() == pytest.approx([0.75 * r2, -0.25 * rh])
    assert slow.objective.tolist() == pytest.approx([1.5 * (r2 - 1), -0.5 * (rh - 1)])
    back = surrogates.compute_reshape(
        x, -a, g, repaired(form="box_cox", budget="tokens"), share=0.25
    )
    assert back.coefficient.tolist() == pytest.approx([-3 * r2, rh])
    third = surrogates.compute_reshape(
        x, a, g, repaired(form="box_cox", budget="tokens"), share=1 / 3
    )
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
    wide = surrogates.compute_reshape(
        vec(4).log(), vec(1), vec(1), repaired(clip=0.2, weight_max=3.0)
    )
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
    assert spent.compute_next_share(0.02) == 0
    assert spent.compute_next_share(0.03) == 0
    assert spent.step_kl is None


IDS = torch.tensor([0, 0, 0, 2, 2])  # sample 1 has no token


def test_sums_means_and_maxima_of_answers_with_a_mask_and_an_empty_one() -> None:
    x, m = vec(1, -2, 40, 3, 5), yes(1, 1, 0, 1, 1)
    assert ratios.sum_by_sample(x, IDS, 3).tolist() == [39, 0, 8]
    assert ratios.average_by_sample(x, m, IDS, 3).tolist() == [-0.5, 0, 4]
    assert ratios.find_sample_max(x, m, IDS, 3).tolist() == [1, -math.inf, 5]
    assert ratios.find_sample_max(vec(-3, -2, 9, -1, -4), m, IDS, 3).tolist() == [
        -2,
        -math.inf,
        -1,
    ]
    assert float(ratios.average_masked(x, m)) == pytest.approx(7 / 4)
    assert float(ratios.average_masked(x, m & False)) == 0
    assert float(ratios.average_masked(vec(1, math.nan), yes(1, 0))) == 1
    assert float(ratios.average_masked(vec(6, 1), yes(1, 0))) == 6


def test_rows_and_back() -> None:
    rows = ratios.PaddedRows(IDS)
    m = rows.pad(vec(1, 2, 3, 4, 5))
    assert m.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert rows.pack(m).tolist() == [1, 2, 3, 4, 5]
    assert rows.shape == (2, 3)
    assert ratios.PaddedRows(IDS[:0]).shape == (0, 0)
    assert ratios.PaddedRows(torch.tensor([4])).shape == (1, 1)


def test_running_sums_and_discounted_suffixes_stay_in_their_answer() -> None:
    x = vec(1, 2, 3, 4, 5)
    assert ratios.compute_running_sum(x, IDS).tolist() == [1, 3, 6, 4, 9]
    assert ratios.sum_discounted_suffix(x, IDS, 0.5).tolist() == [1 + 1 + 0.75, 3.5, 3, 6.5, 5]
    assert ratios.sum_discounted_suffix(x, IDS, vec(0, 1, 9, 2, 9)).tolist() == [1, 5, 3, 14, 5]
    assert ratios.sum_discounted_suffix(x[:0], IDS[:0], 0.5).tolist() == []


def test_the_value_loss_is_half_a_square_and_clipped_only_when_asked() -> None:
    v, r = vec(3.0, 0.0, 1.0, 2.0, 4.0).requires_grad_(True), vec(1.0, 2.0, 1.0, 0.0, 6.0)
    old = vec(1.0, 1.0, 3.0, 4.0, 1.0)
    for more in ((), (old,), (None, 0.5)):
        assert loss.compute_value_loss(v, r, *more).tolist() == [2.0, 2.0, 0.0, 2.0, 2.0]
    # within 0.5 of the old value: 1.5, 0.5, 2.5, 3.5, 1.5; the larger square of the two counts
    got = loss.compute_value_loss(v, r, old, 0.5)
    assert got.tolist() == pytest.approx([2.0, 2.0, 0.5 * 1.5**2, 0.5 * 3.5**2, 0.5 * 4.5**2])
    assert torch.autograd.grad(got.sum(), v)[0].tolist() == [2.0, -2.0, 0.0, 0.0, 0.0]


def test_explained_variance_by_hand() -> None:
    """Of returns 1, 3, 5 (variance 4): errors 1, 1, 1 leave none of it, errors 1, 0, -1 leave 1 of
    4; a mask of one says nothing."""
    explain, r, m = diagnostics.compute_explained_variance, vec(1, 3, 5, 99), yes(1, 1, 1, 0)
    for values, want in ((vec(0, 2, 4, 0), 1), (vec(0, 3, 6, 0), 0.75), (vec(3, 3, 3, 0), 0)):
        assert float(explain(values, r, m)) == pytest.approx(want)
    assert explain(r, r, yes(1, 0, 0, 0)).tolist() == 0.0
    # two are enough
    assert float(explain(vec(0, 3), vec(1, 3), yes(1, 1))) == pytest.approx(1 - 0.5 / 2)
    # returns without variance
    assert math.isfinite(float(explain(vec(1, 2), vec(1, 1), yes(1, 1))))


@pytest.mark.parametrize("how", loss.REDUCTIONS)
def test_reductions_of_nothing_and_of_answers_that_have_nothing(how: str) -> None:
    seq = torch.tensor([0, 0, 1])
    assert loss.compute_factors(yes(0, 0, 0), seq, 2, how).tolist() == [0, 0, 0]
    by_size = {"token-mean": 0.5, "seq-mean-token-mean": 0.5, "seq-mean-token-sum-norm": 0.25}
    got = loss.compute_factors(yes(1, 1, 0), seq, 2, how, 4.0)  # one answer has a token
    assert got.tolist() == [by_size.get(how, 1.0)] * 2 + [0]


def test_ppo_marks_the_side_that_cut_and_is_open_at_its_edges() -> None:
    r = vec(0.7, 0.8, 1.0, 1.25, 1.3)
    for sign, marks in ((1, [0, 0, 0, 0, HIGH]), (-1, [LOW, 0, 0, 0, 0])):
        adv = torch.full((5,), float(sign), dtype=D)
        t = term(
            "ppo",
            r.log(),
            adv,
            eps_low=1 - math.exp(math.log(0.8)),
            eps_high=math.exp(math.log(1.25)) - 1,
        )
        assert t.clipped.tolist() == marks and t.clipped.dtype == torch.int8
        open_ = torch.tensor([k == 0 for k in marks])
        assert torch.allclose(t.coefficient, torch.where(open_, sign * r, 0.0))
        bound = r.clamp(0.8, 1.25)
        assert torch.allclose(t.objective, torch.minimum(sign * r, sign * bound))
    zero = term("ppo", vec(2, 0.1).log(), vec(0, 0))
    assert zero.clipped.tolist() == [0, 0]  # without an advantage nothing is cut
    # 0.2 by default
    assert term("ppo", vec(1.21, 0.79).log(), vec(1, -1)).clipped.tolist() == [HIGH, LOW]
    assert term("ppo", vec(1.19, 0.81).log(), vec(1, -1)).clipped.tolist() == [0, 0]


def test_gspo_clips_the_mean_ratio_of_an_answer_by_its_own_range() -> None:
    """Means 0.1 (masked 9) and -0.1: s = e^0.1 and e^-0.1 for all of an answer's tokens; the range
    is 3e-4 below and 4e-4 above."""
    seq, m, x = torch.tensor([0, 0, 0, 1]), yes(1, 1, 0, 1), vec(0.3, -0.1, 9, -0.1)
    up, down = math.exp(0.1), math.exp(-0.1)
    t = term("gspo", x, vec(1, 1, 1, 1), None, m, seq)
    assert t.clipped.tolist() == [HIGH] * 3 + [0]
    assert t.coefficient.tolist() == pytest.approx([0, 0, 0, down])
    assert t.objective.tolist() == pytest.approx([1 + 4e-4] * 3 + [down])
    t = term("gspo", x, vec(-1, -1, -1, -1), None, m, seq)
    assert t.clipped.tolist() == [0, 0, 0, LOW]
    assert t.objective.tolist() == pytest.approx([-up] * 3 + [-(1 - 3e-4)])
    wide = term("gspo", x, vec(1, 1, 1, -1), None, m, seq, eps_low=0.05, eps_high=0.11)
    assert wide.clipped.tolist() == [0, 0, 0, LOW]
    assert wide.coefficient.tolist() == pytest.approx([up, up, up, 0])
    far = term("gspo", vec(30, 30), vec(-1, -1), None, yes(1, 1), torch.tensor([0, 0]))
    assert far.objective.tolist() == pytest.approx([-math.exp(20)] * 2)


def test_the_dual_clip_bounds_only_what_is_pushed_down() -> None:
    """c A for A < 0 where r A would be below it (r > c); between the upper bound and c it is r A
    still."""
    x = vec(1.1, 2.0, 2.9, 4.0, 4.0).log()
    t = term("ppo", x, vec(-1, -1, -1, -1, 1), dual_clip=3.0)
    assert t.clipped.tolist() == [0, 0, 0, DUAL, HIGH]
    assert t.objective.tolist() == pytest.approx([-1.1, -2, -2.9, -3, 1.2])
    assert t.coefficient.tolist() == pytest.approx([-1.1, -2, -2.9, 0, 0])
    assert term("ppo", x, vec(-1, -1, -1, -1, 1)).objective.tolist() == pytest.approx(
        [-1.1, -2, -2.9, -4, 1.2]
    )
    # at the bound itself it is open
    assert term("ppo", vec(0), vec(-1), dual_clip=1.0).clipped.tolist() == [0]
    assert term("ppo", vec(2).log(), vec(-1), dual_clip=1.5).clipped.tolist() == [DUAL]
    assert term("ppo", vec(2).log(), vec(-1), dual_clip=0.5).clipped.tolist() == [DUAL]


def test_cispo_keeps_the_gradient_and_marks_its_bounds() -> None:
    r, adv, lp = vec(0.3, 0.5, 1.0, 1.2, 2.0), vec(1, 1, -1, 1, 2), vec(-1, -2, -3, -4, -5)
    t = term("cispo", r.log(), adv, lp)
    assert t.coefficient.tolist() == pytest.approx([0.3, 0.5, -1, 1.2, 2.4])
    assert t.objective.tolist() == pytest.approx([-0.3, -1.0, 3, -4.8, -12])
    assert t.clipped.tolist()[:3] == [0, 0, 0] and t.clipped.tolist()[4] == HIGH
    low = term("cispo", r.log(), adv, lp, eps_low=0.4999, eps_high=8.0)
    assert low.clipped.tolist() == [LOW, LOW, 0, 0, 0]
    assert float(low.coefficient[0]) == pytest.approx(0.5001)


def test_dppo_is_open_while_the_probability_stays_near() -> None:
    """From 0.5 to 0.75 (+0.25) and to 0.25 (-0.25), each with both signs of A; the threshold
    decides."""
    prob, old, adv = vec(0.75, 0.75, 0.25, 0.25), vec(0.5, 0.5, 0.5, 0.5), vec(1, -1, 1, -1)
    x = (prob / old).log()
    t = term("dppo", x, adv, prob.log(), dppo_threshold=0.2)
    assert t.clipped.tolist() == [HIGH, 0, 0, LOW]
    assert t.coefficient.tolist() == pytest.approx([0, -1.5, 0.5, 0])
    assert t.objective.tolist() == pytest.approx([0, -1.5, 0.5, 0])
    assert term("dppo", x, adv, prob.log(), dppo_threshold=0.3).clipped.tolist() == [0] * 4
    assert term("dppo", x, adv, prob.log()).clipped.tolist() == t.clipped.tolist()  # 0.2 by default
    assert term("dppo", x, adv * 0, prob.log()).clipped.tolist() == [0] * 4


def test_sapo_topr_and_dro_by_hand() -> None:
    s = 1 / (1 + math.exp(-1.0))
    t = term("sapo", vec(2).log(), vec(3))
    assert t.coefficient.tolist() == pytest.approx([4 * s * (1 - s) * 2 * 3])
    assert t.objective.tolist() == pytest.approx([4 * s * 3])
    z = 1 / (1 + math.exp(-1.05))
    t = term("sapo", vec(2).log(), vec(-1))
    assert t.coefficient.tolist() == pytest.approx([-4 * z * (1 - z) * 2])
    assert t.objective.tolist() == pytest.approx([-4 / 1.05 * z], rel=1e-12)
    assert term("sapo", vec(2).log(), vec(0), sapo_tau_neg=2.0).objective.tolist() == [0]
    # topr: answers 0.5 x 0.8 (masked 9) and 2 x 3; only A < 0 is weighted, by at most 1
    seq, m = torch.tensor([0, 0, 0, 1, 1]), yes(1, 1, 0, 1, 1)
    x, lp = vec(0.5, 0.8, 9, 2, 3).log(), vec(-1, -2, -3, -4, -5)
    t = term("topr", x, vec(-1, -1, -1, -1, -1), lp, m, seq)
    assert t.coefficient.tolist() == pytest.approx([-0.4, -0.4, -0.4, -1, -1])
    assert t.objective.tolist() == pytest.approx([0.4, 0.8, 1.2, 4, 5])
    assert term("topr", x, vec(2, 2, 2, 0, 0), lp, m, seq).coefficient.tolist() == [2, 2, 2, 0, 0]
    far = term("topr", vec(0, 0, 0, -30, -30), vec(-1, -1, -1, -1, -1), lp, m, seq)
    assert far.coefficient.tolist()[3:] == pytest.approx([-math.exp(-20)] * 2)
    t = term("dro", vec(0.4), vec(2), vec(-3))
    assert t.coefficient.tolist() == pytest.approx([2 - 0.05 * 0.4])
    assert t.objective.tolist() == pytest.approx([-6 - 0.025 * 0.16])
    assert term(
        "dro", vec(0.4), vec(2), vec(-3), dro_beta=1.0
    ).coefficient.tolist() == pytest.approx([1.6])


def test_covariances_and_who_is_chosen_by_them() -> None:
    lp, adv, m = vec(-1, -3, 7, -5), vec(2, 0, 50, 1), yes(1, 1, 0, 1)  # means -3 and 1
    cov = covariance(lp, adv, m)
    assert cov.tolist() == pytest.approx([2, 0, 0, 0])
    assert covariance(lp, adv, m & False).tolist() == [0, 0, 0, 0]
    c = vec(5, 1, 9, 3, 2)
    m = yes(1, 1, 0, 1, 1)
    got = choose_highest(c, m, 0.5)
    assert got.tolist() == [True, False, False, True, False]  # 2 of 4
    # at least one
    assert choose_highest(c, m, 0.0).tolist() == [True, False, False, False, False]
    assert choose_highest(c, m, 1.0).tolist() == m.tolist()
    assert not choose_highest(c, m & False, 0.5).any()
    for seed in range(20):
        one = sample_by_covariance(c, m, 0.0, 1.0, 5.0, seed)
        # the bounds themselves are outside
        assert int(one.sum()) == 1 and not bool(one[[0, 1, 2]].any())
        assert sample_by_covariance(c, m, 0.5, 0.0, 9.0, seed).sum() == 2
    assert {
        int(sample_by_covariance(c, m, 0.0, 1.0, 5.0, s).int().argmax()) for s in range(20)
    } == {3, 4}
    assert not sample_by_covariance(c, m, 1.0, 6.0, 7.0, 0).any()
    assert torch.equal(
        sample_by_covariance(c, m, 0.5, 0.0, 9.0, 4), sample_by_covariance(c, m, 0.5, 0.0, 9.0, 4)
    )


def test_kl_cov_and_clip_cov_touch_the_chosen_tokens_alone() -> None:
    x, adv, chosen = vec(0.3, -0.3, 0.5), vec(1, 1, 1), yes(1, 1, 0)
    r = x.exp()
    t = term("kl_cov", x, adv, chosen=chosen, cov_coefficient=0.5)
    assert torch.allclose(t.coefficient, r - vec(0.5, -0.5, 0))
    assert torch.allclose(t.objective, r - vec(0.15, 0.15, 0))
    assert torch.allclose(term("kl_cov", x, adv, chosen=chosen).coefficient, r - vec(1, -1, 0))
    # 1.35 and 1.65 by the clip, the second as chosen
    for sign, chosen, wide, marks in (
        (1, yes(0, 1, 0), {}, [HIGH, HIGH, HIGH]),
        (1, yes(0, 1, 0), {"eps_low": 0.5, "eps_high": 0.5}, [0, HIGH, HIGH]),
        (-1, yes(1, 0, 0), {}, [LOW, 0, LOW]),
        (-1, yes(0, 0, 0), {"eps_low": 0.9}, [0, 0, 0]),
    ):
        held = term("clip_cov", sign * x, sign * adv, chosen=chosen, **wide)
        assert held.clipped.tolist() == marks
    # no objective where it has no gradient
    t = term("clip_cov", vec(0.1, 0.1), vec(1, 1), chosen=yes(1, 0))
    assert t.objective.tolist() == t.coefficient.tolist() == pytest.approx([0, math.exp(0.1)])
    assert t.clipped.tolist() == [HIGH, 0]
