"""Each setting of the loss does what its description says, by the amount that follows from it:
gradients against formulas, not against runs."""

import math
from typing import Any

import pytest
import torch
from algorithms_catalogue_kit import answers, repaired, vec
from algorithms_kit import D, batch, config, gradient, theta
from surrogate_kit import covariance, term

from asyncrl.algorithms import advantages, surrogates
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.batch import LossBatch

EVERYWHERE = {"correction": {"level": "none"}}  # weight 1 on every token


def hidden(b: LossBatch, keep: torch.Tensor) -> LossBatch:
    """The same batch whose loss mask itself leaves out what `keep` does not hold."""
    b.mask = b.mask & keep
    return b


def test_masked_tokens_leave_the_loss_and_its_denominator() -> None:
    """on_exceed = mask is the loss of the batch whose mask ends at the limit, inclusive."""
    b = batch(11)
    lp = theta(b)
    got = gradient(b, config(staleness={"max_lag": 2, "on_exceed": "mask"}), lp)[1]
    want = gradient(hidden(batch(11), b.token_lag <= 2), config(), lp)[1]
    assert torch.allclose(got, want) and float(got[b.mask & (b.token_lag == 2)].abs().max()) > 0
    assert not torch.allclose(got, gradient(b, config(), lp)[1])


def test_downweight_halves_a_token_for_each_half_life_above_the_limit() -> None:
    b = batch(11)
    b.token_lag = torch.arange(len(b.seq)) % 7
    lp = theta(b)
    c = config("staleness.max_lag=2 staleness.on_exceed=downweight staleness.half_life=2.0")
    got = gradient(b, c, lp)[1]
    factor = vec(1, 1, 1, math.sqrt(0.5), 0.5, 0.5 * math.sqrt(0.5), 0.25)[b.token_lag]
    plain = gradient(b, config(), lp)[1]
    assert torch.allclose(got, plain * factor) and float(plain[b.token_lag == 6].abs().max()) > 0


def test_truncated_answers_leave_the_loss_and_its_denominator() -> None:
    b = batch(12)
    b.truncated = torch.arange(len(b.rewards)) % 3 == 0
    lp = theta(b)
    got = gradient(b, config(advantage={"truncated": "mask"}), lp)[1]
    assert torch.allclose(got, gradient(hidden(batch(12), ~b.truncated[b.seq]), config(), lp)[1])
    assert torch.equal(got[b.truncated[b.seq]], torch.zeros_like(got[b.truncated[b.seq]]))
    assert float(got.abs().max()) > 0


def with_terms(
    b: LossBatch, c: Any, lp: torch.Tensor, **more: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    prep = sl.prepare(b, c)
    step = sl.begin_step(prep, torch.arange(len(b.rewards)), lp.detach())
    return sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp, **more)


def test_the_entropy_bonus_lowers_the_loss_by_its_coefficient() -> None:
    b = batch(13)
    lp, entropy = theta(b), torch.rand(len(b.seq), dtype=D, requires_grad=True)
    loss, sums = with_terms(b, config(loss={"entropy": 0.3}), lp, entropy=entropy)
    slope = torch.autograd.grad(loss, entropy, retain_graph=True)[0]
    assert torch.allclose(slope, -0.3 * b.mask.to(D) / b.mask.sum())
    assert float(sums["loss/entropy"]) == pytest.approx(float(entropy.detach()[b.mask].mean()))
    bare, none = with_terms(b, config(), lp, entropy=entropy)
    assert "loss/entropy" not in none
    assert "loss/entropy" not in with_terms(b, config(loss={"entropy": 0.3}), lp)[1]
    got = float((bare - loss).detach())
    assert got == (pytest.approx(0.3 * float(entropy.detach()[b.mask].mean())))


def scaled(c: Any, kl: float) -> sl.StepPlan:
    """A step whose policy gives every token e^x times its probability at the start, x such that the
    stop's estimate of their KL is `kl`."""
    b = batch(15)
    b.mask[:] = True
    b.proximal = b.start = b.behavior.clone()
    low, high = 0.0, 3.0
    for _ in range(80):  # r - 1 - log r = kl, by halving
        x = (low + high) / 2
        low, high = (x, high) if math.expm1(x) - x < kl else (low, x)
    return sl.begin_step(sl.prepare(b, c), torch.arange(len(b.rewards)), b.behavior + x)


BYPASS = {"correction": {"proximal": "behavior"}}


def test_slow_takes_the_share_of_a_step_that_fits_and_stops_at_the_budget() -> None:
    """1 - sqrt(K / budget) before the first step has shown what one adds."""
    c = config(stop={"kl_max": 0.04, "action": "slow"}, **BYPASS)
    assert scaled(c, 0.0).lr_scale == pytest.approx(1.0)
    step = scaled(c, 0.01)
    assert step.lr_scale == pytest.approx(0.5) and step.metrics["optim/lr_scale"] == step.lr_scale
    assert scaled(c, 0.05).lr_scale == 0
    # skip is judged after the step, also where something else stops before it
    assert scaled(config(stop={"kl_max": 0.04}, **BYPASS), 0.05).lr_scale == 1
    assert scaled(config(stop={"kl_max": 0.04, "ess_min": 0.01}, **BYPASS), 0.05).lr_scale == 1


def test_a_small_effective_sample_size_stops_the_batch() -> None:
    """Weights 1 on n - 1 tokens and e on one: ESS = (n - 1 + e)^2 / (n (n - 1 + e^2))."""
    b = batch(15)
    b.mask[:] = True
    b.proximal = b.behavior.clone()
    n = len(b.seq)
    now = b.behavior.clone()
    now[3] += 3.0
    w = math.exp(3.0)
    ess = (n - 1 + w) ** 2 / (n * (n - 1 + w * w))
    for least, scale in ((ess - 0.01, 1.0), (ess + 0.01, 0.0)):
        prep = sl.prepare(b, config(stop={"ess_min": least}, **BYPASS))
        step = sl.begin_step(prep, torch.arange(len(b.rewards)), now)
        assert step.lr_scale == scale and step.metrics["optim/stop_ess"] == pytest.approx(ess)


def two_groups(name: str, **keys: Any) -> torch.Tensor:
    """Advantages of two groups of two answers: 1, 2 | 1, 2 tokens, rewards 3, 1 | 7, 5."""
    more = {"values": keys.pop("values", None), "bootstrap": vec(0, 0, 0, 0)}
    b = answers([1, 2, 1, 2], [3, 1, 7, 5], groups=[0, 0, 1, 1], **more)
    c = config(advantage={"name": name, **keys})
    return advantages.compute_advantage(b, b.mask, c, 0.0, 0.0)[0]


def test_gae_can_be_whitened_and_cut_after_k_residuals() -> None:
    """gamma = lam = 1, V = 0.5: residuals r - 0.5 for one token, 0 and r - 0.5 for two."""
    v = vec(*[0.5] * 6)
    whole = vec(2.5, 0.5, 0.5, 6.5, 4.5, 4.5)
    assert torch.allclose(two_groups("gae", lam=1.0, values=v), whole)
    first = two_groups("gae", lam=1.0, values=v, k_step=1)
    assert torch.allclose(first, vec(2.5, 0, 0.5, 6.5, 0, 4.5))
    assert torch.allclose(two_groups("gae", lam=1.0, values=v, k_step=2), whole)
    # the second residual counts half: 0 + 0.5 (r - 0.5)
    half = vec(2.5, 0.25, 0.5, 6.5, 2.25, 4.5)
    assert torch.allclose(two_groups("gae", lam=0.5, values=v, k_step=2), half)
    got = two_groups("gae", lam=1.0, values=v, whiten=True)
    assert torch.allclose(got, (whole - whole.mean()) / whole.std())
    # rloo of 3, 1 | 7, 5; std over answers 4 / sqrt 3
    a = vec(2, -2, 2, -2)[torch.tensor([0, 1, 1, 2, 3, 3])]
    assert torch.allclose(two_groups("rloo", whiten=True), a / (4 / math.sqrt(3)))


def test_reshapes_weight_is_bounded_in_value_and_gradient() -> None:
    x, adv, g = vec(16, 16, 0.25).log(), vec(1, -1, 1), vec(0.5, 0.5, 0.5)  # w^gamma = 4, 4, 1/2
    t = surrogates.compute_reshape(x, adv, g, repaired(weight_max=3.0))
    assert t.coefficient.tolist() == pytest.approx([1.5, -1.5, 0.25])
    assert t.objective.tolist() == pytest.approx([3, -3, 0.5])
    free = surrogates.compute_reshape(x, adv, g, repaired())
    assert free.coefficient.tolist() == pytest.approx([2, -2, 0.25])
    box = surrogates.compute_reshape(x, adv, g, repaired(weight_max=3.0, form="box_cox"))
    # (w^g - 1) / g
    assert box.coefficient.tolist() == pytest.approx([3, -3, 0.5])
    assert box.objective.tolist() == pytest.approx([6, -6, -1])


def test_cispos_upper_bound_is_relative_unless_it_is_said_to_be_absolute() -> None:
    b = batch(16, spread=0.0)
    b.proximal = b.behavior.clone()
    lp = (b.behavior + math.log(4.0)).requires_grad_(True)
    adv = advantages.compute_rloo(b.rewards, b.groups)[b.seq]
    part = -torch.where(b.mask, adv, 0.0) / b.mask.sum()
    absolute = {"eps_high": 1.5, "cispo_absolute": True}
    for keys, bound in (({"eps_high": 1.5}, 2.5), (absolute, 1.5), ({}, 1.2)):
        c = config(loss={"surrogate": "cispo", **keys}, **EVERYWHERE)
        assert torch.allclose(gradient(b, c, lp)[1], bound * part)


SURROGATES: list[tuple[str, dict[str, Any]]] = [
    ("sapo", {"sapo_tau_pos": 2.0}),
    ("sapo", {"sapo_tau_neg": 3.0}),
    ("sapo", {}),
    ("dppo", {"dppo_threshold": 0.01}),
    ("dppo", {}),
    ("dro", {"dro_beta": 0.7}),
    ("dro", {}),
    ("topr", {}),
    ("vanilla", {}),
    ("gpg", {}),
    ("ppo", {"dual_clip": 1.1, "eps_high": 9.0}),
    ("decoupled_ppo", {"eps_low": 0.05, "eps_high": 0.3}),
    ("gspo", {}),
    ("gspo", {"eps_low": 0.2, "eps_high": 0.1}),
    ("kl_cov", {"cov_share": 0.3, "cov_coefficient": 0.4}),
    ("clip_cov", {"cov_share": 0.3, "cov_lo": -1.0, "cov_hi": 1.0, "eps_high": 0.3}),
]


@pytest.mark.parametrize(
    ("name", "keys"), SURROGATES, ids=[f"{n}-{'-'.join(k)}" for n, k in SURROGATES]
)
def test_each_surrogate_is_given_its_own_settings(name: str, keys: dict[str, Any]) -> None:
    b = batch(18)
    lp = theta(b)
    adv = advantages.compute_rloo(b.rewards, b.groups)[b.seq]
    cov = covariance(lp.detach(), adv, b.mask)
    chosen = None
    if name == "kl_cov":
        chosen = surrogates.choose_highest(cov, b.mask, 0.3)
    elif name == "clip_cov":
        chosen = surrogates.sample_by_covariance(cov, b.mask, 0.3, -1.0, 1.0, 0)
    trust = term(name, lp.detach() - b.proximal, adv, lp.detach(), b.mask, b.seq, chosen, **keys)
    got = gradient(b, config(loss={"surrogate": name, **keys}, **EVERYWHERE), lp)
    expected = torch.where(b.mask, -trust.coefficient, 0.0) / b.mask.sum()
    assert torch.allclose(got[1], expected, rtol=1e-9)
    assert float(got[2]["loss/policy"]) == pytest.approx(-float(trust.objective[b.mask].mean()))
    shown = sl.finish(got[2])
    for side in ("low", "high", "dual"):
        cut = (trust.clipped == getattr(surrogates, side.upper()))[b.mask]
        assert shown[f"clip/{side}"] == pytest.approx(float(cut.double().mean()))


def test_a_veto_by_probability_looks_at_the_anchor_and_not_at_the_ratio() -> None:
    b = batch(19)
    b.mask[:] = True
    low = torch.tensor([True, *(b.seq[1:] != b.seq[:-1]).tolist()]) & (b.seq % 3 == 0)
    b.proximal = torch.where(low, -20.0, b.behavior)
    b.behavior = torch.where(low, -20.0, b.behavior)
    lp = b.proximal.clone().requires_grad_(True)
    got = gradient(b, config(correction={"veto": "probability"}), lp)[1]
    adv = advantages.compute_rloo(b.rewards, b.groups)[b.seq]
    assert torch.allclose(got, torch.where(b.seq % 3 == 0, 0.0, -adv) / len(b.seq))
