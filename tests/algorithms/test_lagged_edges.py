"""Edges of the methods published for old samples: bounds met exactly, ratios beyond the clamp,
advantages of any size, what is dropped from a mask, and the words of their errors.  float64."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
import torch
from advantage_kit import advantage
from algorithms_catalogue_kit import vec
from algorithms_kit import D, batch, config, gradient, theta
from lagged_methods_kit import GROUP, LP, MU, SEQ, SIGN, X, example, trust, vcpo
from surrogate_kit import term

from asyncrl.algorithms import correction, kl, ratios, settings, stopping, surrogates
from asyncrl.algorithms import loss as sl
from asyncrl.config.tree import LoraConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.models import adapters

FULL = "seq-mean-token-mean"


def apply(
    name: str, log_w: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, **keys: Any
) -> surrogates.SurrogateTerm:
    """A surrogate on samples of a token each, or of two where there are four."""
    c = config(loss={"surrogate": name, **keys}, correction={"proximal": "behavior"})
    seq = torch.arange(len(log_w)) // (len(log_w) // 2)
    tokens = surrogates.SurrogateTokens(log_w, adv, lp, lp - log_w, log_w == log_w, seq, 2)
    tokens.prepass = {"lo": vec(0.5)[0], "hi": vec(2)[0], "group_q": log_w * 0}
    return surrogates.SURROGATES[name](tokens, c.loss)


LINEAR: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("ppo", "gspo", "dppo", "sapo", "vespo", "band", "gepo")),
    *((name, {}) for name in ("bapo", "minpro", "gmpo", "ipo")),
    ("dppo", {"dppo_divergence": "kl", "dppo_threshold": 0.05}),
]


@pytest.mark.parametrize(("name", "keys"), LINEAR)
def test_three_times_the_advantage_is_three_times_all_and_none_is_none(
    name: str, keys: dict[str, Any]
) -> None:
    one, three, none = (trust(name, SIGN * size, **keys) for size in (1.0, 3.0, 0.0))
    assert torch.allclose(three.coefficient, 3 * one.coefficient)
    assert torch.allclose(three.objective, 3 * one.objective)
    half = trust(name, SIGN * 0.5, **keys)
    assert torch.allclose(half.coefficient, 0.5 * one.coefficient)
    assert float(one.objective.abs().max()) > 0
    assert none.coefficient.tolist() == [0] * 6 and none.objective.tolist() == [0] * 6


HALF_AND_TWO = vec(0.5, 2, 0.5, 2).log()  # exact in either direction
BOTH = vec(1, 1, -1, -1)


def test_a_bound_that_is_met_exactly() -> None:
    """band is open; the others cut beyond their bounds only."""
    assert HALF_AND_TWO.exp().tolist() == [0.5, 2, 0.5, 2]
    lp = vec(0.25, 1, 0.25, 1).log()
    found = apply("band", HALF_AND_TWO, BOTH, lp, band_lo=0.5, band_hi=2.0)
    assert found.coefficient.tolist() == [0] * 4
    assert found.clipped.tolist() == [surrogates.LOW, surrogates.HIGH] * 2
    whole = vec(0.5, 2, -0.5, -2)
    # pi - mu is -0.25, 0.25
    prob = vec(0.25, 0.5, 0.25, 0.5).log()
    for kept in (
        apply("ipo", HALF_AND_TWO, BOTH, prob, dppo_threshold=0.25),
        apply("dppo", HALF_AND_TWO, BOTH, prob, dppo_threshold=0.25),
        apply("ppo", HALF_AND_TWO, BOTH, lp, eps_low=0.5, eps_high=1.0),
        apply("cispo", HALF_AND_TWO, BOTH, lp, eps_low=0.5, eps_high=1.0),
        apply("bapo", HALF_AND_TWO, BOTH, lp),
    ):
        assert kept.coefficient.tolist() == whole.tolist()
        assert kept.clipped.tolist() == [surrogates.OPEN] * 4
    found = apply("gmpo", vec(0.25, 0, 0, -0.5), BOTH, lp, eps_low=0.5, eps_high=0.25)
    assert found.clipped.tolist() == [surrogates.OPEN] * 4
    for s, found_s in ((math.exp(0.125), 0), (math.exp(-0.25), 2)):
        assert abs(float(found.coefficient[found_s])) == pytest.approx(s)


def test_a_statistic_that_meets_its_bounds_is_kept_and_an_advantage_of_0_is_not_negative() -> None:
    one = vec(0.5, 1, 2).log()
    seq = torch.tensor([0, 1, 2])
    every = torch.ones(3, dtype=torch.bool)

    def kept(lo: float | None, hi: float | None) -> list[bool]:
        return correction.build_rejection_mask(
            "ratio", "token", lo, hi, one, every, seq, 3
        ).tolist()

    assert kept(0.5, 2.0) == [True] * 3 and kept(None, None) == [True] * 3
    assert kept(0.51, 1.99) == [False, True, False]
    got = correction.build_rejection_mask("k2", "token", None, 0.0, one, every, seq, 3)
    assert got.tolist() == [0, 1, 0]
    keys = {"reject": "k2", "reject_hi": 0.01, "reject_when": "negative"}
    c = config(correction=keys).correction
    lp = vec(-1, -1, -1)
    found = correction.find_unrejected(one, lp, every, seq, 3, c=c, adv=vec(0, -1, -1e-9))
    assert found.tolist() == [True, True, False]
    # what does not move along its advantage pushes nowhere
    got = correction.find_m2_exclusions(vec(0, 3, -3), vec(1, 1, 1), every, 0.1)
    assert got.tolist() == [0, 1, 0]


def test_far_ratios_count_as_the_clamp() -> None:
    far, seq, every = vec(900, -900), torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    edge = vec(20, -20)
    for name, of_edge in (
        ("k1", -edge),
        ("k2", edge.square() / 2),
        ("k3", torch.expm1(edge) - edge),
        ("chi2", torch.expm1(2 * edge)),
        ("ratio", edge.exp()),
    ):
        assert torch.allclose(
            correction.compute_statistic(name, "token", far, every, seq, 2), of_edge
        )
    whole = term("vespo", far, vec(1, 1), vespo_k_pos=1.0, vespo_l_pos=0.0)
    assert torch.allclose(whole.coefficient, edge.exp())
    assert torch.allclose(apply("gepo", far, vec(1, 1), far).coefficient, edge.exp())
    for name in ("gmpo", "gspo"):
        found = apply(name, far, vec(-1, 1), far, eps_low=9e9, eps_high=9e9)
        assert torch.allclose(found.coefficient, edge.exp() * vec(-1, 1))
    for level in ("sequence", "geometric"):
        c = config(loss={"surrogate": "ppo", "ratio": level, "eps_low": 1e9, "eps_high": 1e9})
        given = surrogates.SurrogateTokens(far, vec(-1, 1), far, far, every, seq, 2)
        assert torch.allclose(
            surrogates.SURROGATES["ppo"](given, c.loss).coefficient, edge.exp() * vec(-1, 1)
        )
    # the least and the most of exp alone, where the other would not show
    _, total, square = stopping.sum_sample_weights(far[1:], every[1:], seq[:1], 1).tolist()
    assert (total, square) == (pytest.approx(math.exp(-20)), pytest.approx(math.exp(-40)))


def test_tokens_outside_the_mask_change_no_answers_ratio() -> None:
    mask = torch.tensor([True, False, True, True, True, False])
    log_w = torch.where(mask, X, 7.0)
    first, second = 1.2 * 1.5, 0.8 * 2
    found = stopping.sum_sample_weights(log_w, mask, SEQ, 2).tolist()
    assert found == pytest.approx([2, first + second, first**2 + second**2])
    given = surrogates.SurrogateTokens(log_w, SIGN, LP, MU.log(), mask, SEQ, 2)
    oapl = settings.OaplLoss(oapl_beta=0.5)
    apart = [0.5 * math.log(first) - 1, 0.5 * math.log(second) + 1]
    value = surrogates.SURROGATES["oapl"](given, oapl)
    assert value.coefficient.tolist() == pytest.approx([-apart[0]] * 3 + [-apart[1]] * 3)
    mean = [-(apart[0] ** 2) / 2] * 3 + [-(apart[1] ** 2) / 2] * 3
    assert value.objective.tolist() == pytest.approx(mean)
    one = surrogates.SURROGATES["vespo"](given, settings.VespoLoss()).coefficient[mask].tolist()
    w = torch.tensor([first, second], dtype=D).log()[SEQ[mask]]
    assert one == pytest.approx(term("vespo", w, SIGN[mask]).coefficient.tolist())
    c = config(loss={"surrogate": "ppo", "ratio": "sequence", "eps_low": 9.0, "eps_high": 9.0})
    got = surrogates.SURROGATES["ppo"](given, c.loss).coefficient
    assert got.tolist() == pytest.approx([first] * 3 + [-second] * 3)


def test_an_answer_with_nothing_in_the_loss_has_no_oapl_and_no_weight() -> None:
    b = example()
    b.mask = torch.zeros(6, dtype=torch.bool)
    c = config(**vcpo(stop={"lr_by_ess": "linear"}))
    prep = sl.prepare(b, c)
    step = sl.begin_step(prep, torch.arange(2))
    _, sums = sl.compute_micro_loss(prep, step, torch.arange(6), LP)
    assert sl.compute_learning_rate_share(prep, step, sums) == 1.0
    assert prep.metrics["optim/answer_ess"] == 1.0


def test_the_share_of_a_stop_and_of_the_ess_multiply() -> None:
    c = config(**vcpo(stop={"lr_by_ess": "linear", "ess_on_policy": 0.9}))
    prep = sl.prepare(example(), c)
    step = sl.begin_step(prep, torch.arange(2))
    step.lr_scale = 0.25
    _, sums = sl.compute_micro_loss(prep, step, torch.arange(6), LP)
    w = vec(0.9, 0.4)
    ess = float(w.sum() ** 2 / (2 * w.square().sum()))
    assert sl.compute_learning_rate_share(prep, step, sums) == pytest.approx(0.25 * ess / 0.9)
    assert prep.metrics["optim/lr_scale"] == pytest.approx(0.25 * ess / 0.9)


def test_types_and_degrees_of_freedom() -> None:
    r, w = torch.tensor([1.0, 0.0]), torch.tensor([0.9, 0.4])
    assert advantage("opob", r, GROUP, weights=w, squared_norms=w).dtype == torch.float32
    assert advantage("pass_at_k", r, GROUP).dtype == torch.float32
    parts = torch.stack([vec(1, 0, 0, 3), vec(1, 3, 5, 1)], 1)
    groups = torch.tensor([0, 0, 1, 1])
    for ddof, eps in ((0, 0.0), (1, 0.5), (0, 0.5)):
        each = []
        for part in parts.unbind(1):
            rows = part.view(2, 2)
            std = rows.std(1, correction=ddof, keepdim=True)
            each.append(((rows - rows.mean(1, keepdim=True)) / (std + eps)).flatten())
        total = each[0] + 2 * each[1]
        expected = (total - total.mean()) / total.std()
        named = {"parts": parts, "part_names": ("a", "b"), "part_weights": {"b": 2}}
        got = advantage("gdpo", vec(0, 0, 0, 0), groups, **named, ddof=ddof, eps=eps)
        assert got.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        r = vec(1, 0, 0.5, 3)
        got = advantage("grpo", r, groups, std="batch", ddof=ddof, eps=eps)
        half = vec(0.5, -0.5, -1.25, 1.25) / (r.std(correction=ddof) + eps)
        assert got.tolist() == pytest.approx(half.tolist())
    with pytest.raises(ConfigError):
        advantage("grpo", vec(1, 2), GROUP, std="batch", ddof=2)


BY_NAME: list[dict[str, Any]] = [
    {"name": "pass_at_k", "k": 2},
    {"name": "pass_at_k"},
    {"name": "maxrl"},
    {"name": "oapl", "beta": 0.3},
    {"name": "asymre", "shift": -0.2},
    {"name": "grpo", "std": "batch", "ddof": 0, "eps": 0.1},
    {"name": "grpo", "ddof": 0, "eps": 0.1},
]


@pytest.mark.parametrize("keys", BY_NAME)
def test_the_config_names_an_advantage_with_its_keys(keys: dict[str, Any]) -> None:
    b = batch(21)
    lp = theta(b)
    got = gradient(b, config(advantage=keys), lp)[1]
    b.rewards = advantage(rewards=b.rewards, groups=b.groups, **keys)
    plain = config(advantage={"name": "reinforce", "baseline": "none"})
    assert torch.allclose(got, gradient(b, plain, lp)[1]) and float(got.abs().max()) > 0


def test_small_weights_and_means_of_0() -> None:
    assert advantage("maxrl", vec(1, -1), GROUP).tolist() == [0, 0]
    small = {"weights": vec(0.009, 0.004), "squared_norms": vec(2, 1)}
    got = vec(1, 0) - advantage("opob", vec(1, 0), GROUP, **small) / 2
    assert got.tolist() == pytest.approx([0.910112] * 2, abs=1e-6)
    edge = ratios.compute_running_min(vec(-ratios.FAR, ratios.FAR), torch.tensor([0, 1]))
    assert edge.tolist() == [-ratios.FAR, ratios.FAR]


def test_the_kl_of_the_loss_is_of_what_is_kept_and_prefix_fulls_value_is_its_own() -> None:
    b = example()
    b.reference = MU.log() - 0.1
    c = config(
        loss={"surrogate": "vanilla", "reduction": FULL},
        correction={
            "proximal": "behavior",
            "reject": "kb",
            "reject_at": "target",
            "reject_hi": 0.3,
        },
        kl={"loss": {"coefficient": 1.0, "estimator": "k2"}},
    )
    sums = gradient(b, c, LP.clone().requires_grad_(True))[2]
    by_hand = sum((math.log(w) + 0.1) ** 2 / 2 / 6 for w in (1.2, 1.5, 0.8))
    assert float(sums["loss/kl"]) == pytest.approx(by_hand)
    exact = vec(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    found = kl.compute_term(LP, LP, MU.log(), SEQ, off_policy="prefix_full", step_kl=exact)
    before = vec(1, 1.2, 0.6, 1, 0.8, 1.6)
    assert torch.allclose(found, before * exact)


def test_adapters_without_peft_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    words = re.escape("lora.rank: needs peft: pip install 'asyncrl[lora]'")
    with pytest.raises(ConfigError, match=words):
        adapters.attach(None, LoraConfig(rank=1), 0)  # type: ignore[arg-type]
