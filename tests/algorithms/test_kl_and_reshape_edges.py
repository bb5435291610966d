"""KL terms, gamma and the stops by hand: values, slopes, truncation, discounts, and the constants a
configuration leaves out.  float64."""

import dataclasses
import json
import math
from typing import Any

import msgspec
import pytest
import torch
from algorithms_catalogue_kit import k3, repaired, vec
from process_kit import ROOT

from asyncrl.algorithms import kl, loss, reshape, settings, surrogates
from asyncrl.algorithms.batch import LossBatch
from asyncrl.contract.errors import ConfigError

D = torch.float64
SEQ = torch.tensor([0, 0, 1])
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
    assert kl.estimate_k1(x).tolist() == x.tolist()
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
    """beta (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon): target 6, horizon 10000."""
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
    assert s.base.dtype == D and s.share == 1
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
    assert spent.compute_next_share(0.02) == 0 and spent.compute_next_share(0.03) == 0
    assert spent.step_kl is None


IDS = torch.tensor([0, 0, 0, 2, 2])  # sample 1 has no token
