"""The loss: equalities of its forms, small numbers by hand, hostile tensors, any split of the
batch.  float64 throughout."""

import math
from typing import Any

import pytest
import torch
from advantage_kit import by_token
from algorithms_catalogue_kit import answers, repaired, vec, yes
from algorithms_kit import D, batch, config, convert, gradient, parse_refusals, theta
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import advantages, correction, surrogates
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.advantages import compute_advantage
from asyncrl.algorithms.batch import LossBatch
from asyncrl.algorithms.settings import ON_BEHAVIOR
from asyncrl.config import presets, rules
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError


def test_decoupled_ppo_with_prox_on_behaviour_is_ppo() -> None:
    b = batch()
    b.proximal = b.behavior.clone()
    lp = theta(b)
    a = gradient(b, config(loss={"surrogate": "decoupled_ppo"}), lp)
    p = gradient(b, config(loss={"surrogate": "ppo"}, correction={"proximal": "behavior"}), lp)
    assert torch.allclose(a[0], p[0]) and torch.allclose(a[1], p[1]) and float(p[1].abs().max()) > 0


def test_reshape_with_gamma_one_is_vanilla_on_behaviour() -> None:
    b = batch()
    b.proximal = b.behavior.clone()
    lp = theta(b)
    reshape = "correction.proximal=behavior loss.surrogate=reshape reshape.mode=constant "
    one = config(reshape + "reshape.gamma=1.0")
    vanilla = config("correction.proximal=behavior loss.surrogate=vanilla")
    assert torch.allclose(gradient(b, one, lp)[1], gradient(b, vanilla, lp)[1])
    zero = config(reshape + "reshape.gamma=0.0 reshape.form=box_cox")  # weighted log-likelihood
    adv = advantages.compute_rloo(b.rewards, b.groups)[b.seq]
    exact = -torch.where(b.mask, adv, 0.0) / b.mask.sum()
    assert torch.allclose(gradient(b, zero, lp)[1], exact)


def test_reductions_by_hand() -> None:
    counted, seq = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])
    by = {h: sl.compute_factors(counted, seq, 3, h, 10.0).tolist() for h in sl.REDUCTIONS}
    assert by["token-mean"] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert by["seq-mean-token-sum"] == pytest.approx([0.5, 0.5, 0, 0.5])
    assert by["seq-mean-token-mean"] == pytest.approx([0.25, 0.25, 0, 0.5])
    assert by["seq-mean-token-sum-norm"] == pytest.approx([0.05, 0.05, 0, 0.05])


VARIANTS = [
    "",
    "correction.level=sequence correction.self_normalize=true loss.reduction=seq-mean-token-mean",
    "correction.preset=mis correction.level=token correction.bound=truncate correction.hi=2.0 "
    "correction.reject=ratio correction.reject_over=mean correction.reject_lo=0.7 "
    "correction.reject_hi=1.4 correction.denominator=after correction.self_normalize=true",
    "correction.level=none correction.m2=0.04",
    "loss.surrogate=gspo",
    "loss.surrogate=reshape correction.proximal=behavior",
    "loss.surrogate=kl_cov loss.cov_share=0.1",
    "kl.loss.coefficient=0.1 kl.loss.estimator=k3 kl.loss.off_policy=prefix",
    "kl.reward.coefficient=0.1 kl.reward.estimator=k1",
    "staleness.max_lag=2 staleness.on_exceed=downweight advantage.name=grpo",
    *(
        f"loss.surrogate={name} correction.proximal=behavior"
        for name in ("vespo", "oapl", "band", "gepo", "bapo", "minpro", "gmpo", "ipo")
    ),
    "correction.proximal=behavior correction.reject=k1 correction.reject_over=mean "
    "correction.reject_hi=0.1 correction.reject_when=negative correction.reject_at=target",
    "correction.proximal=behavior correction.m2=0.04 loss.surrogate=vanilla",
    "correction.bound=none correction.reject=kb correction.reject_hi=0.1 correction.reject2=tv "
    "correction.reject2_over=max correction.reject2_hi=0.3",
]


def prepared(seed: int, variant: str) -> tuple[LossBatch, Config]:
    b, c = batch(seed), config(variant)
    if c.correction.proximal == "behavior":
        b.proximal = b.behavior.clone()
    return b, c


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_split_into_micro_batches_is_the_whole(variant: str) -> None:
    b, c = prepared(2, variant)
    lp = theta(b)
    loss, grad, sums = gradient(b, c, lp)
    for parts in ([[0, 5], [1, 2, 3, 4, 6], [7, 8, 9], [10, 11]], [[i] for i in range(12)]):
        other, g, s = gradient(b, c, lp, parts)
        assert torch.allclose(other, loss) and torch.allclose(g, grad, atol=1e-12)
        a, z = sl.finish(sums), sl.finish(s)
        assert a.keys() == z.keys()
        assert all(a[k] == pytest.approx(z[k], rel=1e-9, abs=1e-12) for k in a)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_lies_behind_the_mask_changes_nothing(variant: str) -> None:
    b, c = prepared(3, variant)
    lp = theta(b)
    _, grad, sums = gradient(b, c, lp)
    dirty, c = prepared(3, variant)
    bad = torch.tensor([math.nan, math.inf, -math.inf, 1e4], dtype=D)
    out = ~dirty.mask
    fill = bad.repeat(len(out))[: int(out.sum())]
    for name in ("behavior", "proximal", "reference"):
        getattr(dirty, name)[out] = fill
    spoiled = lp.detach().clone()
    spoiled[out] = fill.flip(0)
    _, g, s = gradient(dirty, c, spoiled.requires_grad_(True))
    assert torch.allclose(g[dirty.mask], grad[b.mask])
    assert torch.equal(g[out], torch.zeros_like(g[out]))
    a, z = sl.finish(sums), sl.finish(s)
    assert all(z[k] == pytest.approx(a[k]) for k in a), {
        k: (a[k], z[k]) for k in a if z[k] != pytest.approx(a[k])
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_log_ratios_stay_finite(variant: str, size: float) -> None:
    b, c = prepared(4, variant)
    lp = (theta(b).detach() + size * (torch.arange(len(b.seq)) % 3 == 0)).requires_grad_(True)
    loss, grad, sums = gradient(b, c, lp)
    assert bool(loss.isfinite()) and bool(grad.isfinite().all())
    assert all(math.isfinite(v) for v in sl.finish(sums).values())


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), variant=st.sampled_from(VARIANTS[:6]))
def test_the_order_of_the_answers_changes_nothing(seed: int, variant: str) -> None:
    b, c = prepared(seed, variant)
    if not b.mask.any():
        return
    lp = theta(b, seed + 1)
    loss, grad, _ = gradient(b, c, lp)
    order = torch.randperm(len(b.rewards), generator=torch.Generator().manual_seed(seed))
    at = torch.cat([torch.nonzero(b.seq == i)[:, 0] for i in order])
    lengths = torch.bincount(b.seq, minlength=len(b.rewards))[order]
    moved = LossBatch(
        torch.repeat_interleave(torch.arange(len(order)), lengths),
        **{name: getattr(b, name)[at] for name in ("behavior", "mask", "token_lag", "reference")},
        **{name: getattr(b, name)[order] for name in ("rewards", "groups", "truncated")},
        proximal=b.proximal[at],
    )
    other, g, _ = gradient(moved, c, lp.detach()[at].requires_grad_(True))
    assert torch.allclose(other, loss) and torch.allclose(g, grad[at], atol=1e-12)


def test_an_empty_mask_gives_zero() -> None:
    b = batch()
    b.mask[:] = False
    loss, grad, sums = gradient(b, config(), theta(b))
    assert float(loss) == 0 and float(grad.abs().max()) == 0
    assert all(math.isfinite(v) for v in sl.finish(sums).values())


def test_float16_logprobs_do_not_overflow() -> None:
    b = batch()
    for name in ("behavior", "proximal", "reference", "rewards"):
        setattr(b, name, getattr(b, name).half().float())
    lp = (b.proximal.half() + 5).requires_grad_(True)
    prep = sl.prepare(b, config())
    loss, _ = sl.compute_micro_loss(
        prep, sl.begin_step(prep, torch.arange(12)), torch.arange(len(b.seq)), lp.float()
    )
    assert bool(loss.isfinite())


def test_weights_carry_no_gradient() -> None:
    x = torch.randn(5, dtype=D, requires_grad=True)
    m, seq = torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 1])
    for level in correction.LEVELS:
        assert not correction.compute_weights(x, m, seq, 2, level).requires_grad


ALONE = ("dr_grpo", "opo", "gpg", "grpo", "rloo", "oapl", "gdpo")  # with one sample a prompt
REFUSED = [
    (f"advantage.name={name} learner.group_size=1", f"1 sample a prompt leaves {name} nothing to")
    for name in ALONE
] + parse_refusals("""
correction.proximal=recompute correction.level=none correction.self_normalize=true
    self_normalize: acts only where correction.level is set, and it is "none"
correction.proximal=behavior correction.reject=ratio
    acts on pi_prox / mu
correction.proximal=behavior correction.preset=tis
    makes every weight 1
loss.surrogate=topr correction.proximal=recompute
    takes its ratio against the behavior policy
loss.surrogate=reinforce
    uses the importance weights of correction.level
kl.loss.coefficient=0.1 kl.loss.off_policy=prefix kl.loss.estimator=k2
    kl.loss.estimator: off_policy = prefix is built on k3, not k2
kl.reward.coefficient=0.0 kl.reward.controller=adaptive
    controller: acts only where kl.reward.coefficient is set, and it is 0.0
kl.reward.coefficient=0.1 kl.reward.target=0.0 kl.reward.controller=adaptive
    kl.reward.target: the adaptive controller needs
correction.proximal=recompute correction.lo=3.0 correction.hi=2.0 correction.bound=clip
    is above correction.hi
reshape.clip=0.2
    reshape.clip: belongs to loss.surrogate = reshape, not to ppo
loss.dual_clip=0.5
    must be above 1
advantage.truncated=soft advantage.truncation_penalty=1.0 advantage.truncation_ramp=9999
    soft needs 1 to
advantage.truncated=soft
    truncation_penalty: with 0, advantage.truncated = soft has no effect
advantage.truncated=penalty
    truncation_penalty: with 0, advantage.truncated = penalty has no effect
advantage.truncated=fixed
    or advantage.truncated = zero
advantage.name=reinforce advantage.baseline=ema advantage.rewards=whiten
    makes it 0 in each batch; use none or batch
advantage.name=reinforce_pp advantage.group_baseline=true learner.group_size=1
    reinforce_pp with advantage.group_baseline nothing
advantage.name=reinforce advantage.no_spread=filter learner.group_size=1
    would leave nothing to train on
loss.surrogate=cispo loss.cispo_absolute=true
    loss.eps_high: absent; with cispo_absolute it is the largest ratio
loss.surrogate=cispo loss.cispo_absolute=true loss.eps_high=0.28
    loss.eps_high: 0.28; with cispo_absolute
loss.surrogate=ppo loss.cispo_absolute=true
    belongs to loss.surrogate = cispo, not to ppo
loss.surrogate=sft kl.reward.coefficient=0.1
    takes no advantage, so KL in the reward would do nothing
loss.surrogate=sft advantage.name=grpo
    advantage.name: grpo has no effect under loss.surrogate = sft
loss.surrogate=sft advantage.rewards=whiten
    advantage.rewards: whiten has no effect under loss.surrogate = sft
loss.surrogate=sft advantage.truncated=zero
    advantage.truncated: zero has no effect under loss.surrogate = sft
loss.surrogate=reshape correction.proximal=behavior learner.epochs=2 reshape.form=box_cox
reshape.budget=global
    in the box_cox form gamma = 0 still has a gradient
stop.ess_min=0.5
    nothing to stop
generator.mantissa_bits=3 exact=true weights.in_flight=recompute_kv
    rounds the generator's weights
generator.quantize=fp8 exact=true weights.in_flight=recompute_kv
    exact: generator.quantize rounds weights
generator.quantize=fp8 generator.mantissa_bits=3
    generator.mantissa_bits: 3 would round the weights that generator.quantize = fp8 rounds
learner.shared_rounding=true
    acts only where generator.quantize is set
generator.quantize=fp8 learner.shared_rounding=true learner.backend=deepspeed
    learner.shared_rounding: needs learner.backend = torch
generator.quantize=fp8 learner.shared_rounding=true lora.rank=2
    rounds the sum of base and adapter, which the learner never forms
generator.quantize=fp8 generator.engine=vllm
    generator.quantize: belongs to generator.engine = embedded
generator.speculate=4 generator.engine=vllm
    generator.speculate: belongs to generator.engine = embedded
generator.mantissa_bits=3 generator.engine=vllm
    belongs to generator.engine = embedded
learner.replay_routing=true generator.engine=vllm
    learner.replay_routing: needs generator.engine = embedded; vLLM does not record
learner.replay_routing=true learner.backend=deepspeed learner.zero_stage=3
learner.gradient_checkpointing=true
    learner.replay_routing: with learner.zero_stage = 3 the backward pass
model.path=m model.warm_start_experts=4
    model.warm_start_experts: needs model.warm_start = true
""")


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=[r[1][-40:] for r in REFUSED])
def test_combinations_that_cannot_work_are_refused_when_read(settings: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(settings)


ACCEPTED = [
    "advantage.truncated=zero",
    "advantage.truncated=fixed advantage.truncation_penalty=0.1",
    "advantage.name=reinforce advantage.baseline=ema advantage.rewards=unit",
    "advantage.name=reinforce advantage.baseline=batch advantage.rewards=whiten",
    "advantage.name=reinforce learner.group_size=1",
    "advantage.name=reinforce_pp learner.group_size=1",
    "advantage.name=dr_grpo advantage.no_spread=filter learner.group_size=2",
    "loss.surrogate=sft learner.group_size=1",
    "loss.surrogate=sft advantage.truncated=mask advantage.no_spread=filter",
    "loss.surrogate=cispo loss.cispo_absolute=true loss.eps_high=1.0",
    "loss.surrogate=reshape correction.proximal=behavior learner.epochs=2 reshape.form=box_cox "
    "reshape.budget=tokens",
    "loss.surrogate=reshape correction.proximal=behavior learner.epochs=2 reshape.budget=global",
]


@pytest.mark.parametrize("settings", ACCEPTED)
def test_their_neighbours_are_accepted(settings: str) -> None:
    convert(settings)


def surrogate(name: str) -> tuple[LossBatch, Any]:
    b = batch(5)
    own = {"proximal": "behavior"} if name in ON_BEHAVIOR else {}
    if own:
        b.proximal = b.behavior.clone()
    picked = {"kl_cov": {"cov_share": 0.2}, "clip_cov": {"cov_share": 0.2, "cov_lo": -1.0}}
    picked["function"] = {"function": "own_methods:half"}
    return b, config(loss={"surrogate": name, **picked.get(name, {})}, correction=own)


@pytest.mark.parametrize("name", surrogates.SURROGATES)
def test_every_surrogate_is_linear_and_the_same_for_any_split(name: str) -> None:
    """All but lp is detached: the gradient carries no gradient of its own, and one micro-batch's
    says nothing of another."""
    b, c = surrogate(name)
    lp = theta(b)
    whole, grad, _ = gradient(b, c, lp)
    other, g, _ = gradient(b, c, lp, [[i] for i in range(12)])
    assert torch.allclose(other, whole)
    assert torch.allclose(g, grad, atol=1e-12) and float(grad.abs().max()) > 0
    assert torch.equal(grad[~b.mask], torch.zeros_like(grad[~b.mask]))
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
    mine = gradient(b, config(correction={"function": "test_algorithms:half"}), lp)[1]
    assert torch.allclose(mine, 0.5 * gradient(b, config(correction={"level": "none"}), lp)[1])
    assert float(mine.abs().max()) > 0
    # it is told of the mask, of whose answer each token is, and of how many there are
    told = gradient(b, config(correction={"function": "test_algorithms:by_mask"}), lp)[1]
    assert torch.allclose(told, mine)
    with pytest.raises(ConfigError, match="has no attribute 'third'"):
        gradient(b, config(correction={"function": "test_algorithms:third"}), lp)


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
    assert any(said in line for line in rules.find_warnings(config(settings)))
    for silent in ("", "advantage.name=dr_grpo loss.surrogate=vespo"):
        assert not any(said in line for line in rules.find_warnings(config(silent)))
