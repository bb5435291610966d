"""The catalogue, entry by entry: every surrogate in the real loss, stop-gradients, repairs and
stops, diagnostics by hand.  float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from advantage_kit import by_token
from algorithms_catalogue_kit import answers, repaired, vec, yes
from algorithms_kit import batch, config, convert, gradient, parse_refusals, parse_settings, theta

from asyncrl.algorithms import advantages, surrogates
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.advantages import compute_advantage
from asyncrl.algorithms.batch import LossBatch
from asyncrl.config import presets, rules
from asyncrl.contract.errors import ConfigError


def surrogate(name: str) -> tuple[LossBatch, Any]:
    b = batch(5)
    own = {"proximal": "behavior"} if name in surrogates.ON_BEHAVIOR else {}
    if own:
        b.proximal = b.behavior.clone()
    picked = {"kl_cov": {"cov_share": 0.2}, "clip_cov": {"cov_share": 0.2, "cov_lo": -1.0}}
    picked["function"] = {"function": "own_methods:half"}
    return b, config(loss={"surrogate": name, **picked.get(name, {})}, correction=own)


@pytest.mark.parametrize("name", surrogates.SURROGATES)
def test_every_surrogate_is_the_same_for_any_split(name: str) -> None:
    b, c = surrogate(name)
    lp = theta(b)
    loss, grad, _ = gradient(b, c, lp)
    other, g, _ = gradient(b, c, lp, [[i] for i in range(12)])
    assert torch.allclose(other, loss)
    assert torch.allclose(g, grad, atol=1e-12) and float(grad.abs().max()) > 0
    assert torch.equal(grad[~b.mask], torch.zeros_like(grad[~b.mask]))


@pytest.mark.parametrize("name", surrogates.SURROGATES)
def test_the_policy_term_is_linear_in_the_logprobs(name: str) -> None:
    """All but lp is detached: the gradient carries no gradient of its own, and one micro-batch's
    says nothing of another."""
    b, c = surrogate(name)
    lp = theta(b)
    prep = sl.prepare(b, c)
    step = sl.begin_step(prep, torch.arange(12), lp.detach())
    loss, _ = sl.compute_micro_loss(prep, step, torch.arange(len(b.seq)), lp)
    slope = torch.autograd.grad(loss, lp, create_graph=True)[0]
    assert not slope.requires_grad
    got = float(loss.detach())
    assert got == (pytest.approx(float((slope * torch.where(b.mask, lp.detach(), 0.0)).sum())))
    assert not prep.advantage.requires_grad and not step.factor.requires_grad


def test_decoupled_ppo_by_hand() -> None:
    """One answer of three tokens, A = +1/2 each; rho = 3, 1, 1 truncated at 2; r = 1.1, 1.5 (cut),
    0.5 (open for A > 0)."""
    rho, r = vec(3, 1, 1), vec(1.1, 1.5, 0.5)
    prox = torch.cat([vec(-1, -1, -1) + rho.log(), vec(-1)])
    b = answers([3, 1], [1, 0], groups=[0, 1], mask=yes(1, 1, 1, 0), proximal=prox)
    lp = torch.cat([prox[:3] + r.log(), vec(-1)]).requires_grad_(True)
    c = config(advantage={"name": "reinforce", "baseline": "batch"}, correction={"preset": "tis"})
    _, grad, sums = gradient(b, c, lp)
    assert grad.tolist() == pytest.approx([-2 * 1.1 * 0.5 / 3, 0, -0.5 * 0.5 / 3, 0])
    assert float(sums["loss/policy"]) == pytest.approx(-(2 * 1.1 + 1.2 + 0.5) * 0.5 / 3)


def test_gamma_zero_in_the_power_form_has_no_gradient() -> None:
    t = surrogates.compute_reshape(vec(0.4, -0.4), vec(1, -1), vec(0, 0), repaired())
    assert t.coefficient.tolist() == [0, 0] and t.objective.tolist() == [1, -1]


def three(**keys: Any) -> list[float]:
    """Advantages [6] of three answers of one group: 1, 2 and 3 tokens, rewards 1, 0, 2."""
    b = answers([1, 2, 3], [1, 0, 2])
    settings = {"name": "reinforce", "baseline": "none", **keys.pop("advantage", {})}
    return compute_advantage(b, b.mask, config(advantage=settings, **keys), 0.0, 0.0)[0].tolist()


def test_scaled_and_absent_rewards_by_hand() -> None:
    assert three() == [1, 0, 0, 2, 2, 2]
    assert three(advantage={"rewards": "unit"}) == [0.5, 0, 0, 1, 1, 1]
    assert three(advantage={"rewards": "whiten"}) == pytest.approx([0, -1, -1, 1, 1, 1])
    assert three(loss={"surrogate": "sft"}) == [1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_discount_has_the_precision_of_the_rewards(dtype: torch.dtype) -> None:
    """0.9 in float32 is 0.89999998, which shows in float64."""
    rewards = torch.tensor([0.0, 1.0], dtype=dtype)
    values, seq = torch.zeros(2, dtype=dtype), torch.tensor([0, 0])
    every = torch.ones(2, dtype=torch.bool)
    adv, _ = by_token("gae", rewards, every, seq, values=values, gamma=0.9, lam=0.9)
    square = torch.tensor(0.9 * 0.9, dtype=dtype)
    assert adv.dtype == dtype and torch.equal(adv, torch.stack([square, torch.ones_like(square)]))
    exact = torch.tensor(0.9, dtype=dtype)
    assert torch.equal(advantages._sum_masked_suffix(rewards, every, seq, 0.9)[0], exact)


def half(
    log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, correction: Any
) -> torch.Tensor:
    return torch.full_like(log_rho, 0.5)


def by_mask(
    log_rho: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, n: int, correction: Any
) -> torch.Tensor:
    return mask.float() * 0.25 + 0.25 * (seq < n)


def test_a_function_of_ones_own_takes_the_place_of_the_weights() -> None:
    b = batch(8)
    lp = theta(b)
    mine = gradient(b, config(correction={"function": "test_algorithms_catalogue:half"}), lp)[1]
    assert torch.allclose(mine, 0.5 * gradient(b, config(correction={"level": "none"}), lp)[1])
    assert float(mine.abs().max()) > 0
    # it is told of the mask, of whose answer each token is, and of how many there are
    told = gradient(b, config(correction={"function": "test_algorithms_catalogue:by_mask"}), lp)[1]
    assert torch.allclose(told, mine)
    with pytest.raises(ConfigError, match="has no attribute 'third'"):
        gradient(b, config(correction={"function": "test_algorithms_catalogue:third"}), lp)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_accepted_and_gives_a_gradient(name: str) -> None:
    c = convert(f"correction.preset={name}")
    assert all(getattr(c.correction, k) == x for k, x in presets.PRESETS[name].items())
    b = batch(7, spread=0.02)
    assert float(gradient(b, c, theta(b, spread=0.1))[1].abs().max()) > 0


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ("loss.surrogate=pppo", "vanilla"),
        ("correction.proximal=recompute correction.level=word", "geometric"),
        ("advantage.name=gea", "rloo"),
        ("kl.loss.coefficient=0.1 kl.loss.estimator=k4", "low_var_kl"),
        ("kl.reward.coefficient=0.1 kl.reward.estimator=k4", "low_var_kl"),
        ("kl.reward.coefficient=0.1 kl.reward.at=prox", "behavior"),
        ("loss.reduction=mean", "token-mean"),
        ("correction.preset=tiss", "icepop"),
        ("stop.kl_max=0.1 stop.action=halt", "slow"),
    ],
)
def test_an_unknown_name_in_a_config_lists_the_valid_ones(settings: str, known: str) -> None:
    key = settings.split()[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key}.*choose one of .*{known}"):
        convert(settings)


def test_the_prepass_reads_any_object_with_the_sections() -> None:
    c = config()
    plain = SimpleNamespace(
        **{
            k: getattr(c, k)
            for k in ("staleness", "advantage", "correction", "loss", "kl", "learner", "generator")
            + ("reshape", "stop", "value", "seed")
        }
    )
    b = batch(9)
    assert torch.equal(gradient(b, plain, theta(b))[1], gradient(b, c, theta(b))[1])


WARNED = parse_refusals("""
kl.loss.coefficient=0.1 kl.loss.estimator=k1
    pushes away from the data
kl.loss.coefficient=0.1 kl.loss.estimator=k1 staleness.max_lag=0
    no expected gradient on policy
kl.reward.coefficient=0.1 kl.reward.estimator=k3
    known to collapse
kl.loss.coefficient=0.1 kl.loss.estimator=k3 kl.loss.off_policy=ratio
    only on the behavior policy's states
kl.loss.coefficient=0.1 kl.loss.estimator=k3 kl.loss.off_policy=prefix correction.reject=ratio
    by token removes tokens
kl.reward.coefficient=0.1 kl.reward.at=behavior
    more than half wrong off policy; use start
correction.level=sequence
    mean weight, an effective learning rate, drifts
loss.surrogate=reshape correction.proximal=behavior
    the KL grows without bound
advantage.name=dr_grpo
    length bias
""")


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ("correction.proximal=recompute", True),
        ("correction.preset=tis loss.surrogate=decoupled_ppo", True),
        ("correction.preset=tis learner.minibatches=2", False),
        ("correction.preset=tis learner.epochs=2", False),
        ("correction.preset=tis staleness.max_lag=0", False),
        ("correction.preset=tis loss.surrogate=vanilla", False),
        ("", False),
    ],
)
def test_a_clip_that_cannot_act_is_warned_of(settings: str, warned: bool) -> None:
    """The ratio to a proximal policy that is the policy itself is 1 in the only step of a batch."""
    assert any("is always 1" in line for line in rules.find_warnings(convert(settings))) == warned


@pytest.mark.parametrize(("settings", "said"), WARNED, ids=[w[1][:24] for w in WARNED])
def test_what_a_run_is_told_once(settings: str, said: str) -> None:
    assert any(said in line for line in rules.find_warnings(config(**parse_settings(settings))))
    assert not any(said in line for line in rules.find_warnings(config()))
