"""Methods published for old samples: each on one example by hand, where it must equal another, and
in the real loss; and the best-known methods by their papers' formulas; and their edges.  float64.

The example: one group of two answers of three tokens, rewards 1 and 0, A = +1 and -1."""

import itertools
import math
import re
import sys
from typing import Any

import pytest
import torch
from advantage_kit import advantage, by_token
from algorithms_catalogue_kit import answers, vec
from algorithms_kit import D, batch, config, convert, gradient, parse_refusals, theta
from surrogate_kit import step_batch, term

from asyncrl.algorithms import advantages, correction, kl, ratios, settings, surrogates
from asyncrl.algorithms import loss as sl
from asyncrl.algorithms.batch import LossBatch
from asyncrl.config import bundled_configs, load
from asyncrl.config.tree import Config, LoraConfig
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.compare import arms, grid
from asyncrl.models import adapters

MU = torch.tensor([0.5, 0.8, 0.4, 0.5, 0.4, 0.4], dtype=D)
W = torch.tensor([1.2, 0.5, 1.5, 0.8, 2.0, 0.25], dtype=D)
SEQ = torch.tensor([0, 0, 0, 1, 1, 1])
GROUP = torch.tensor([0, 0])
EVERY = torch.ones(6, dtype=torch.bool)
SIGN = torch.tensor([1, 1, 1, -1, -1, -1], dtype=D)
LP = (MU * W).log()
ANSWER = "seq-mean-token-mean"
X = LP - MU.log()


def example() -> LossBatch:
    return answers([3, 3], [1, 0], behavior=MU.log(), proximal=MU.log())


def trust(name: str, adv: torch.Tensor = SIGN, **keys: Any) -> surrogates.SurrogateTerm:
    """A surrogate on the example's tokens with these advantages [N]."""
    c = config(loss={"surrogate": name, **keys}, correction={"proximal": "behavior"})
    whole = step_batch(MU.log(), adv, EVERY, SEQ, GROUP, LP)
    prepass = surrogates.PREPASS.get(name, lambda *_: {})(whole, c.loss)
    tokens = surrogates.SurrogateTokens(X, adv, LP, MU.log(), EVERY, SEQ, 2, prepass=prepass)
    return surrogates.SURROGATES[name](tokens, c.loss)


def vcpo(**more: Any) -> dict[str, Any]:
    return {
        "loss": {"surrogate": "reinforce", "reduction": ANSWER},
        "correction": {"level": "sequence", "bound": "truncate", "hi": 8.0},
        **more,
    }


def coefficient(name: str, **loss: Any) -> list[float]:
    return trust(name, **loss).coefficient.tolist()


BY_HAND: list[tuple[str, dict[str, Any], list[float]]] = [
    ("vespo", {}, [1.093386] * 3 + [-0.212487] * 3),
    ("band", {}, [1.2, 0, 1.5, -0.8, -2, 0]),
    (
        "band",
        {"band_lo": math.exp(-0.5), "band_hi": math.exp(0.5), "pull": 0.1},
        [1.163536, 0.138629, 1.418907, -0.755371, -0.138629, 0.277259],
    ),
    ("gepo", {}, [1.062479] * 3 + [-0.643551] * 3),
    ("bapo", {"bapo_share": 0.515}, [1.2, 0.5, 0, -0.8, -2, 0]),
    ("minpro", {}, [1.2, 0.8, 0.8, -0.8, -1.28, -0.8]),
    ("gmpo", {}, [0.963732, 0.963732, 0, -1.023609, -1.023609, 0]),
]


@pytest.mark.parametrize(("name", "keys", "expected"), BY_HAND)
def test_the_learners_loss_has_them_for_its_gradient(
    name: str, keys: dict[str, Any], expected: list[float]
) -> None:
    c = config(
        advantage={"name": "rloo"},
        loss={"surrogate": name, "reduction": ANSWER, **keys},
        correction={"proximal": "behavior"},
    )
    got = gradient(example(), c, LP.clone().requires_grad_(True))[1]
    assert (-6 * got).tolist() == pytest.approx(expected, abs=1e-6)


def test_oapl_by_hand() -> None:
    """beta1 = 1, beta2 = 1/2; the same advantage in `dro`."""
    adv = advantage("oapl", vec(1, 0), GROUP, beta=1.0)
    assert (vec(1, 0) - adv).tolist() == pytest.approx([0.620115] * 2, abs=1e-6)
    c = config(
        "advantage.name=oapl advantage.beta=1.0 loss.surrogate=oapl loss.oapl_beta=0.5 "
        "loss.reduction=seq-mean-token-sum correction.proximal=behavior"
    )
    lp = LP.clone().requires_grad_(True)
    _, got, sums = gradient(example(), c, lp)
    assert (-2 * got).tolist() == pytest.approx([0.432566] * 3 + [-0.161969] * 3, abs=1e-6)
    exact = (0.5 * ratios.sum_by_sample(lp - MU.log(), SEQ, 2) - adv).square().mean()
    assert torch.allclose(torch.autograd.grad(exact, lp)[0], got)
    assert float(sums["loss/policy"]) == pytest.approx(float(exact.detach()))
    each = term("dro", LP - MU.log(), adv[SEQ], LP, dro_beta=0.5).coefficient
    assert each.tolist() == pytest.approx(
        [0.288725, 0.726459, 0.177153, -0.508543, -0.966688, 0.073033], abs=1e-6
    )


def test_a_soft_value_lies_between_the_mean_and_the_largest() -> None:
    r, g = vec(1, 0, 0.5, 2, 2), torch.tensor([0, 0, 0, 1, 1])
    mean = advantage("oapl", r, g, beta=math.inf)
    assert torch.allclose(r - mean, vec(0.5, 0.5, 0.5, 2, 2))
    assert torch.allclose(mean, advantage("dr_grpo", r, g))
    assert (r - advantage("oapl", r, g, beta=0.0)).tolist() == [1, 1, 1, 2, 2]
    # far below the rewards, where e^(r / beta) would overflow
    got = r - advantage("oapl", r, g, beta=1e-6)
    assert got.tolist() == (pytest.approx([1, 1, 1, 2, 2], abs=1e-4))
    assert advantage("oapl", r, g, beta=0.3)[3:].tolist() == [0, 0]


def test_asymre_by_hand() -> None:
    got = advantage("asymre", vec(1, 0), GROUP, shift=-0.1)
    assert got.tolist() == (pytest.approx([0.6, -0.4]))
    r, g = vec(1, 0, 0.5, 2, 2), torch.tensor([0, 0, 0, 1, 1])
    adv = advantage("asymre", r, g, shift=-0.1)
    assert ratios.sum_by_sample(adv, g, 2).tolist() == pytest.approx([0.3, 0.2])
    assert torch.equal(advantage("asymre", r, g, shift=0.0), advantage("dr_grpo", r, g))


ON_POLICY = [
    *((name, {}) for name in ("vespo", "band", "bapo", "minpro", "gmpo", "topr")),
    ("band", {"pull": 0.3}),
]


@pytest.mark.parametrize(("name", "keys"), ON_POLICY)
def test_on_policy_the_coefficient_is_the_advantage(name: str, keys: dict[str, Any]) -> None:
    b = batch(3)
    b.proximal = b.behavior.clone()
    lp = b.behavior.clone().requires_grad_(True)
    c = config(loss={"surrogate": name, **keys}, correction={"proximal": "behavior"})
    plain = config(loss={"surrogate": "gpg"}, correction={"proximal": "behavior"})
    assert torch.allclose(gradient(b, c, lp)[1], gradient(b, plain, lp)[1], rtol=1e-12)


def test_the_limits_of_vespo() -> None:
    """(k, l) = (1, 0) is the answer's importance weight, (0, 0) none."""
    x = torch.linspace(-3, 3, 25, dtype=D)
    adv = torch.where(torch.arange(25) % 2 == 0, 1.5, -0.5).to(D)

    def vespo(x: torch.Tensor, adv: torch.Tensor, *keys: float) -> torch.Tensor:
        names = ("vespo_k_pos", "vespo_l_pos", "vespo_k_neg", "vespo_l_neg")
        return term("vespo", x, adv, **dict(zip(names, keys, strict=False))).coefficient

    assert torch.allclose(vespo(x, adv, 1, 0, 1, 0), x.exp() * adv)
    assert torch.allclose(vespo(x, adv, 0, 0, 0, 0), adv)
    for k, m, most in ((2.0, 3.0, 1.208), (3.0, 2.0, 1.242)):
        grid = torch.linspace(-4, 4, 8001, dtype=D)
        phi = vespo(grid, torch.ones(8001, dtype=D), k, m)
        assert float(phi.max()) == pytest.approx(most, abs=1e-3)
        assert float(grid[phi.argmax()].exp()) == pytest.approx(k / m, rel=1e-3)
    # far away: nothing, and finite
    assert vespo(vec(900, -900), vec(1, -1)).abs().max() < 1e-20


def test_the_prefix_minimum_starts_anew_with_each_answer_and_skips_what_is_masked() -> None:
    x, seq = vec(0.3, -1, 2, 0.5, -3, 0.1), torch.tensor([7, 7, 7, 7, 2, 2])
    mask = torch.tensor([True, False, True, True, True, True])
    given = surrogates.SurrogateTokens(x, torch.ones_like(x), x, x, mask, seq, 8)
    wide = settings.MinproLoss(eps_low=1.0, eps_high=99.0)
    got = surrogates.SURROGATES["minpro"](given, wide).coefficient.log()[mask].tolist()
    assert got == pytest.approx([0.3, 2.3, 0.8, -3, -2.9])
    long = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=D)
    rows = torch.arange(5000) // 50
    expected = long.view(100, 50).cummin(1).values.flatten()
    assert torch.allclose(ratios.compute_running_min(long, rows), expected, atol=1e-9)


def test_bapos_bounds_move_until_positive_tokens_have_their_share() -> None:
    adv, mu = SIGN, MU.log()

    def bounds(share: float, mask: torch.Tensor = EVERY) -> list[float]:
        found = surrogates.PREPASS["bapo"](
            step_batch(mu, adv, mask, SEQ, GROUP, LP), settings.BapoLoss(bapo_share=share)
        )
        return [round(float(found[x]), 6) for x in ("lo", "hi")]

    def share(lo: float, hi: float) -> float:
        clipped = torch.minimum(W * adv, W.clamp(lo, hi) * adv) * MU
        return float(clipped[adv > 0].sum() / clipped.abs().sum())

    assert share(0.6, 1.2) == pytest.approx(0.506849, abs=1e-6)
    assert share(0.6, 1.35) == pytest.approx(0.516779, abs=1e-6)
    assert bounds(0.4) == [0.6, 1.2] and bounds(0.515) == [0.6, 1.35]
    assert bounds(1.0) == [0.9, 3.0]  # out of reach: the last bounds
    needed = share(0.62, 3.0)
    assert needed < share(0.6, 3.0)  # a higher lower bound gives negative tokens more
    assert bounds(0.9, ~EVERY) == [0.6, 1.2]


REFUSED = parse_refusals("""
loss.surrogate=vespo correction.proximal=recompute
    set correction.proximal = behavior
loss.vespo_k_pos=4.0
    loss.vespo_k_pos: belongs to loss.surrogate = vespo
loss.oapl_beta=0.1
    loss.oapl_beta: belongs to loss.surrogate = oapl
loss.bapo_share=0.1
    loss.bapo_share: belongs to loss.surrogate = bapo
advantage.beta=1.0
    advantage.beta: belongs to advantage.name = oapl
advantage.shift=0.0
    advantage.shift: belongs to advantage.name = asymre
loss.surrogate=band loss.band_lo=2.0 loss.band_hi=1.0 correction.proximal=behavior
    loss.band_lo: 2 is not below loss.band_hi = 1
loss.surrogate=vespo loss.eps_low=0.1 correction.proximal=behavior
    loss.eps_low: belongs to loss.surrogate = ppo
correction.reject_when=negative
    correction.reject_when: acts only where correction.reject
correction.reject_at=target
    correction.reject_at: acts only where correction.reject
correction.reject2=k1
    correction.reject2: acts only where correction.reject is
correction.reject=tv
    correction.reject_hi: reject = tv has no default bound
correction.reject=ratio correction.reject2=kb
    correction.reject2_hi: reject2 = kb has no default bound
correction.reject=tv correction.reject_hi=-1.0
    tv is never negative, so -1 would reject everything
correction.reject=ratio correction.reject2=ratio correction.reject2_lo=3.0
correction.reject2_hi=2.0
    correction.reject2_lo: 3 is above correction.reject2_hi = 2
correction.reject=k1 correction.reject_over=mean correction.reject_when=negative
correction.reject_at=target correction.reject_hi=1.0 correction.denominator=after
    after is not known before the step with reject_at = target
correction.reject=k1 correction.reject_over=mean correction.reject_when=negative
correction.reject_at=target correction.reject_hi=1.0 correction.self_normalize=true
correction.proximal=recompute
    not known before the step with reject_at = target
correction.proximal=behavior correction.reject=kb correction.reject_hi=1.0
    correction.reject: acts on pi_prox / mu
stop.ess_on_policy=0.5
    stop.ess_on_policy: acts only where stop.lr_by_ess
learner.cosine_max=0.5
    learner.cosine_max: belongs to
learner.gradient_cosine=log learner.backend=deepspeed
    learner.gradient_cosine: reads whole gradients
advantage.name=opob learner.backend=deepspeed
    advantage.name: opob reads whole gradients
loss.surrogate=gspo loss.ratio=sequence
    loss.ratio: belongs to
loss.dppo_divergence=kl
    loss.dppo_divergence: belongs to
loss.dppo_high=0.1
    loss.dppo_high: belongs to loss.surrogate = dppo or ipo
loss.pull=0.1
    loss.pull: belongs to loss.surrogate = ipo or band
advantage.std=batch
    advantage.std: belongs to advantage.name = grpo
advantage.k=2
    advantage.k: belongs to advantage.name = pass_at_k
advantage.name=pass_at_k advantage.k=99
    advantage.k: the best of 99 completions
advantage.name=pass_at_k advantage.k=1
    advantage.k: the best of 1 completions
advantage.part_weights.a=1.0
    part_weights: belongs to advantage.name
advantage.name=gdpo advantage.rewards=unit
    advantage.rewards: shapes the rewards, and advantage.name = gdpo
advantage.name=reinforce advantage.baseline=prompt advantage.truncated=zero
    advantage.truncated: shapes the rewards, and advantage.baseline = prompt
advantage.name=reinforce advantage.baseline=prompt kl.reward.coefficient=0.1
    kl.reward.coefficient: shapes the rewards
advantage.name=otb learner.backend=deepspeed
    advantage.name: otb reads the model's hidden states
""")


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_settings_that_cannot_work_are_refused(settings: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(settings)


@pytest.mark.parametrize("name", arms.CORRECTIONS)
def test_a_method_is_an_arm_by_its_name(name: str) -> None:
    arm = arms.parse_arm(name)
    assert arm.sets == arms.CORRECTIONS[name][1]
    other, plain = arms.Arm("other", ["learner.lr=0.1"]), arms.Arm("plain", [])
    sets = ["weights.slots=8"]  # max_lag + 2 is what the sampling version needs
    found = grid.resolve("configs/rle.toml", sets, [other, arm])
    same = grid.resolve("configs/rle.toml", sets, [other, plain])["plain"]
    assert (found[name] == same) == (name in ("configured", "ppo"))


def test_every_shipped_config_takes_the_default_arms() -> None:
    """Sessions and filtered groups have no injected lag: `compare` leaves that arm out."""
    for name in bundled_configs.list_names():
        source = load.load(name)
        found = grid.resolve(name, [], grid.make_default_arms(source))
        refused = source.agent.uses_sessions or source.advantage.no_spread == "filter"
        injected = [] if refused else ["injected"]
        assert list(found) == ["sync", "async", "async-uncorrected", *injected]


def test_binary_kl_by_hand() -> None:
    by_hand = [0.020411, 0.381909, 0.081093, 0.020411, 0.381909, 0.311239]
    kb = correction.compute_statistic("kb", "token", X, EVERY, SEQ, 2, log_mu=MU.log())
    assert kb.tolist() == pytest.approx(by_hand, abs=1e-6)
    kept = correction.build_rejection_mask(
        "kb", "token", None, 0.3, X, EVERY, SEQ, 2, log_mu=MU.log()
    )
    assert kept.tolist() == [True, False, True, True, False, False]
    mean = correction.compute_statistic("kb_mu", "mean", X, EVERY, SEQ, 2, log_mu=MU.log())
    assert mean.tolist() == pytest.approx([0.145433] * 3 + [0.237853] * 3, abs=1e-6)
    # a rare token may move by orders of magnitude, a probable one may not
    rare = ratios.compute_binary_kl(vec(1e-3).log(), vec(1e-6).log())
    probable = ratios.compute_binary_kl(vec(0.999).log(), vec(0.9).log())
    assert float(rare) < 0.01 < 0.09 < float(probable)
    for dtype in (torch.float32, D):
        edge = torch.tensor([0.0, -1e4], dtype=dtype)
        assert bool(ratios.compute_binary_kl(edge, edge.flip(0)).isfinite().all())


def test_total_variation_and_chi_square_by_hand() -> None:
    tv = correction.compute_statistic("tv", "token", X, EVERY, SEQ, 2, log_mu=MU.log())
    assert tv.tolist() == pytest.approx([0.1, 0.4, 0.2, 0.1, 0.4, 0.3])
    tv = correction.compute_statistic("tv", "max", X, EVERY, SEQ, 2, log_mu=MU.log())
    assert tv.tolist() == pytest.approx([0.4] * 6)
    chi2 = correction.compute_statistic("chi2", "mean", X, EVERY, SEQ, 2)
    first, second = (1.44 + 0.25 + 2.25) / 3 - 1, (0.64 + 4 + 0.0625) / 3 - 1
    assert chi2.tolist() == pytest.approx([first] * 3 + [second] * 3)


OPSM = "reject=k1 reject_over=mean reject_when=negative reject_at=target"
PLAIN_RATIO = [1.2, 0.5, 1.5, -0.8, -2, -0.25]


def dropping(keys: str) -> Config:
    """Vanilla with these keys of `correction`."""
    sections = f"loss.surrogate=vanilla loss.reduction={ANSWER} correction.proximal=behavior"
    return config(" ".join([sections, *(f"correction.{key}" for key in keys.split())]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (f"{OPSM} reject_hi=0.1", [1.2, 0.5, 1.5, 0, 0, 0]),
        (f"{OPSM} reject_hi=0.5", PLAIN_RATIO),
        (f"{OPSM} reject_hi=0.01", [1.2, 0.5, 1.5, 0, 0, 0]),  # A > 0 stays at any bound
        (f"{OPSM} reject_hi=0.01 reject_when=always", [0] * 6),
        ("m2=0.04", [1.2, 0.5, 0, 0, -2, 0]),
        ("m2=9.0", PLAIN_RATIO),
        ("reject=kb_mu reject_over=mean reject_at=target reject_hi=0.2", [1.2, 0.5, 1.5, 0, 0, 0]),
        ("reject=kb reject_at=target reject_hi=0.3", [1.2, 0, 1.5, -0.8, 0, 0]),
        (
            "reject=tv reject_at=target reject_hi=0.35 reject2=ratio reject2_hi=1.4",
            [1.2, 0, 0, -0.8, 0, 0],
        ),
    ],
)
@pytest.mark.parametrize("parts", [None, [[0], [1]]])
def test_what_is_dropped_at_the_policy_as_it_is(
    keys: str, expected: list[float], parts: Any
) -> None:
    """Rejected tokens have no weight left; those of M2PO are masked, not rejected."""
    lp = LP.clone().requires_grad_(True)
    _, slopes, sums = gradient(example(), dropping(keys), lp, parts)
    assert (-6 * slopes).tolist() == pytest.approx(expected)
    name = "is/masked_share" if "m2" in keys else "is/rejected_share"
    shown, share = sl.finish(sums), expected.count(0) / 6
    assert shown[name] == pytest.approx(share) == shown["is/zero_share"]
    assert shown["is/mean_weight"] == pytest.approx(1 - share)


def test_at_the_anchor_the_same_statistics_leave_the_anchor_alone() -> None:
    """theta = 2 prox: the weight is prox / mu, and rejection looks at prox."""
    b = example()
    b.proximal = LP.clone()
    lp = (LP + math.log(2.0)).requires_grad_(True)
    for keys, expected in (
        ("reject=kb reject_hi=0.3", [2.4, 0, 3, -1.6, 0, 0]),
        ("reject=tv reject_hi=0.35", [2.4, 0, 3, -1.6, 0, -0.5]),
        ("reject=chi2 reject_over=mean reject_hi=0.4", [2.4, 1, 3, 0, 0, 0]),
        (f"{OPSM} reject_at=proximal reject_hi=0.1", [2.4, 1, 3, 0, 0, 0]),
    ):
        c = dropping(f"proximal=recompute level=token bound=none {keys}")
        assert (-6 * gradient(b, c, lp)[1]).tolist() == pytest.approx(expected)


def test_a_mask_of_m2po_is_of_the_whole_batch_and_of_the_step() -> None:
    """Only tokens that move with their advantage; any split is the same; answers of another
    optimizer step do not count."""
    gone = correction.find_m2_exclusions(X, SIGN, EVERY, 0.04)
    assert gone.tolist() == [False, False, True, True, False, True]
    assert not correction.find_m2_exclusions(X * 0, SIGN, EVERY, 0.04).any()
    b = batch(7, spread=0.0)
    b.proximal = b.behavior.clone()
    lp = theta(b)
    c = config("loss.surrogate=vanilla correction.proximal=behavior correction.m2=0.04")
    assert torch.allclose(gradient(b, c, lp)[1], gradient(b, c, lp, [[i] for i in range(12)])[1])
    inside, adv = b.mask & (b.seq < 4), advantages.compute_rloo(b.rewards, b.groups)[b.seq]
    gone = correction.find_m2_exclusions((lp - b.behavior).detach(), adv, inside, 0.04)
    got = gradient(b, c, lp, samples=list(range(4)))[1]
    assert torch.equal(got == 0, gone | ~inside) and int(gone.sum()) > 0
    prep = sl.prepare(b, c)
    assert sl.needs_current(prep)


def test_an_optimal_baseline_by_hand() -> None:
    r, w = vec(1, 0), vec(0.9, 0.4)
    for squared, b, expected in (
        (vec(2, 1), 0.910112, [0.080899, -0.364045]),
        (vec(1.36, 2.42), 0.739925, [0.234068, -0.295970]),  # by the logits
        (vec(3, 3), 0.835052, None),  # by the length
        (vec(5, 5) / vec(0.81, 0.16), 0.5, [0.45, -0.2]),  # equal W g: the group's mean
    ):
        found = r - advantage("opob", r, GROUP, weights=w, squared_norms=squared) / 2
        assert found.tolist() == pytest.approx([b] * 2, abs=1e-6)
        if expected:
            assert (w * (r - found)).tolist() == pytest.approx(expected, abs=1e-6)
    half = advantage("opob", r, GROUP, weights=w, squared_norms=vec(2, 1))  # the deviation is 1/2
    assert (half * w).tolist() == pytest.approx([0.080899 * 2, -0.364045 * 2], abs=1e-6)
    got = advantage("opob", vec(1, 1), GROUP, weights=w, squared_norms=vec(2, 1))
    assert got.tolist() == [0, 0]
    got = advantage("opob", r, GROUP, weights=w, squared_norms=vec(0, 0))
    assert got.tolist() == [1, -1]  # the mean


def test_the_baseline_in_the_loss_takes_whole_ratios_of_the_start() -> None:
    b = example()
    b.start = LP.clone()
    lp = LP.clone().requires_grad_(True)
    b.squared_norms = vec(3, 3)
    got = gradient(b, config(**vcpo(advantage={"name": "opob"})), lp)[1]
    expected = [0.9 * (1 - 0.835052) * 2] * 3 + [-0.4 * 0.835052 * 2] * 3
    assert (-6 * got).tolist() == pytest.approx(expected, abs=1e-5)
    b.squared_norms = vec(2, 1)
    got = gradient(b, config(**vcpo(advantage={"name": "opob"})), lp)[1]
    assert (-6 * got).tolist() == pytest.approx([0.161798] * 3 + [-0.72809] * 3, abs=1e-5)
    b.squared_norms = None
    with pytest.raises(ConfigError, match="needs the learner's start and"):
        gradient(b, config(**vcpo(advantage={"name": "opob"})), lp)
    assert sl.needs_start_first(config("advantage.name=opob"))
    far = batch(14)  # stays finite
    far.start, far.squared_norms = far.behavior + 1e4, torch.ones(12, dtype=D)
    got = gradient(far, config(**vcpo(advantage={"name": "opob"})), theta(far))[1]
    assert bool(got.isfinite().all())


def test_the_rate_follows_the_ess_of_whole_answers() -> None:
    """Any split of the batch, whatever the weights are bounded to; masked tokens do not count."""
    b = example()
    for how, scale in (("sqrt", 0.933346), ("linear", 0.871134), ("off", 1.0)):
        c = config(**vcpo(stop={"lr_by_ess": how}))
        for parts in (None, [[0], [1]]):
            prep = sl.prepare(b, c)
            step = sl.begin_step(prep, torch.arange(2))
            sums: dict[str, torch.Tensor] = {}
            for p in parts or [[0, 1]]:
                at = torch.nonzero(torch.isin(SEQ, torch.tensor(p)))[:, 0]
                sl.add_sums(sums, sl.compute_micro_loss(prep, step, at, LP[at])[1])
            got = sl.compute_learning_rate_share(prep, step, sums)
            assert got == (pytest.approx(scale, abs=1e-6))
            if how != "off":
                assert prep.metrics["optim/answer_ess"] == pytest.approx(0.871134, abs=1e-6)
                assert prep.metrics["optim/lr_scale"] == pytest.approx(scale, abs=1e-6)
            # never more than the whole rate
            high = {"ess/answers": torch.tensor([10.0, 10.0, 9.0])}
            if how != "off":
                assert sl.compute_learning_rate_share(prep, step, high) == 1
    # an answer without a token in the loss is none
    mask = torch.tensor([True] * 3 + [False] * 3)
    assert sl.sum_sample_weights(X, mask, SEQ, 2).tolist() == pytest.approx([1, 0.9, 0.81])
    # on policy the rate is whole
    assert sl.sum_sample_weights(X * 0, EVERY, SEQ, 2).tolist() == [2, 2, 2]


def test_ipo_drops_what_moved_far_on_either_side_and_pulls_the_rest() -> None:
    """pi - mu is .1 -.4 .2 | -.1 .4 -.3."""
    assert coefficient("ipo", dppo_threshold=0.25) == pytest.approx([1.2, 0, 1.5, -0.8, 0, 0])
    high = coefficient("ipo", dppo_threshold=0.25, dppo_high=0.15)
    assert high == pytest.approx([1.2, 0, 0, -0.8, 0, 0])
    pulled = coefficient("ipo", dppo_threshold=0.25, pull=0.1)
    assert pulled == pytest.approx(
        [a - 0.2 * math.log(w) for a, w in zip([1.2, 0, 1.5, -0.8, 0, 0], W.tolist(), strict=True)]
    )


def test_dppo_with_two_thresholds_and_by_binary_kl() -> None:
    """KL(mu || pi): .0204 .3347 .0811 | .0201 .3819 .2380, as it moved."""

    def kept(**keys: Any) -> list[float]:
        return coefficient("dppo", **keys)

    # against A: never cut
    assert kept(dppo_threshold=0.05) == pytest.approx([0, 0.5, 0, 0, -2, 0])
    assert kept(dppo_threshold=0.05, dppo_high=0.15) == pytest.approx([1.2, 0.5, 0, 0, -2, 0])
    assert kept(dppo_threshold=0.2, dppo_high=0.05) == pytest.approx([0, 0.5, 0, -0.8, -2, 0])
    kl = correction.compute_statistic("kb_mu", "token", X, EVERY, SEQ, 2, log_mu=MU.log()).tolist()
    for threshold in (0.05, 0.15, 0.3):
        gone = [v > threshold and sign * x > 0 for v, sign, x in zip(kl, SIGN, X, strict=True)]
        expected = [0 if cut else a for cut, a in zip(gone, PLAIN_RATIO, strict=True)]
        assert kept(dppo_divergence="kl", dppo_threshold=threshold) == pytest.approx(expected)
    assert kl[2] == pytest.approx(0.4 * math.log(0.4 / 0.6) + 0.6 * math.log(0.6 / 0.4))


def test_ppo_and_sapo_on_whole_answers() -> None:
    wide = {"eps_low": 0.05, "eps_high": 0.05}
    assert coefficient("ppo", ratio="sequence", **wide) == pytest.approx([0.9] * 3 + [0] * 3)
    geometric = [0.965489] * 3 + [-0.736806] * 3
    free = {"eps_low": 9.0, "eps_high": 9.0}
    assert coefficient("ppo", ratio="geometric", **free) == pytest.approx(geometric, abs=1e-6)
    narrow = {"eps_low": 0.3, "eps_high": 0.01}
    assert coefficient("ppo", ratio="geometric", **narrow) == coefficient("gspo", **narrow)
    for level, r in (("sequence", 0.9), ("geometric", 0.965489)):
        gate = 1 / (1 + math.exp(1 - r))
        got = coefficient("sapo", ratio=level)[0]
        assert got == pytest.approx(4 * gate * (1 - gate) * r, abs=1e-6)
    assert coefficient("ppo", ratio="token") != coefficient("ppo", ratio="sequence")


def test_maxrl_by_hand() -> None:
    """Of n successes in G answers, each gets G / n - 1, the others -1."""
    r, g = vec(1, 0, 0, 0, 0, 0, 1, 1), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    assert advantage("maxrl", r, g).tolist() == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0])
    # below 0 there is no pass rate
    assert advantage("maxrl", vec(-1, -3), GROUP).tolist() == [0, 0]


@pytest.mark.parametrize("k", [2, 3, 4, 5, 0])
def test_what_an_answer_adds_to_the_best_of_k(k: int) -> None:
    rewards = vec(0.3, 1, 0.3, 0, 0.7)
    many = k or 5
    expected = []
    for i, own in enumerate(rewards.tolist()):
        others = [x for j, x in enumerate(rewards.tolist()) if j != i]
        best = [max(drawn) for drawn in itertools.combinations(others, many - 1)]
        expected.append(sum(max(own, x) - x for x in best) / len(best))
    both, groups = torch.cat([rewards, vec(2, 0)]), torch.tensor([0] * 5 + [1] * 2)
    got = advantage("pass_at_k", both[:5], groups[:5], k=k)
    assert got.tolist() == pytest.approx(expected)
    if k in (0, 2):  # each group by itself
        got = advantage("pass_at_k", both, groups, k=k)
        assert got.tolist() == pytest.approx([*expected, 2, 0])
    else:
        with pytest.raises(ConfigError, match="needs 2 or more, and groups of as many"):
            advantage("pass_at_k", both, groups, k=k)


def test_a_deviation_of_the_batch_spares_groups_of_little_spread() -> None:
    r, g = vec(1, 0, 0.5, 0.49), torch.tensor([0, 0, 1, 1])
    deviation = float(r.std())
    got = advantage("grpo", r, g, std="batch", eps=0.0)
    assert got.tolist() == pytest.approx([x / deviation for x in (0.5, -0.5, 0.005, -0.005)])
    b = batch(9)
    got = gradient(b, config(advantage={"name": "grpo", "std": "batch"}), theta(b))[1]
    assert not torch.allclose(got, gradient(b, config(advantage={"name": "grpo"}), theta(b))[1])
    with pytest.raises(ConfigError, match="more than 1 samples in a batch"):
        advantage("grpo", vec(1), torch.tensor([0]), std="batch")


def test_flash_reinforce_by_hand() -> None:
    """Single answers: the baseline is the batch's, taken before anything is dropped."""
    b = example()
    b.groups = torch.tensor([0, 1])
    c = config(
        "learner.group_size=1 advantage.name=reinforce advantage.baseline=batch "
        f"loss.surrogate=vanilla loss.reduction={ANSWER} correction.proximal=behavior "
        "correction.reject=kb_mu correction.reject_over=mean correction.reject_at=target "
        "correction.reject_hi=0.2"
    )
    got = gradient(b, c, LP.clone().requires_grad_(True))[1]
    assert (-6 * got).tolist() == pytest.approx([0.6, 0.25, 0.75, 0, 0, 0])


def test_gdpo_by_hand() -> None:
    """Two parts of very different size count the same; each part by its own group."""
    parts = torch.stack([vec(1, 0, 0, 0), vec(100, 300, 500, 100)], 1)
    groups = torch.tensor([0, 0, 1, 1])
    half = math.sqrt(0.5)
    first = [half - half, -half + half, 0 + half, 0 - half]
    named = {"parts": parts, "part_names": ("a", "b")}
    got = advantage("gdpo", vec(0, 0, 0, 0), groups, **named, eps=0.0)
    assert got.tolist() == pytest.approx(advantages.whiten(vec(*first)).tolist())
    got = advantage("gdpo", vec(0, 0, 0, 0), groups, **named, part_weights={"b": 0}, eps=0.0)
    assert got.tolist() == pytest.approx(advantages.whiten(vec(half, -half, 0, 0)).tolist())


def test_gdpo_in_the_loss_takes_the_rewards_parts_by_name() -> None:
    b = batch(11)
    g = torch.Generator().manual_seed(2)
    b.parts = torch.rand(12, 2, generator=g, dtype=D)
    b.part_names = ("form", "truth")
    lp = theta(b)
    got = gradient(b, config(advantage={"name": "gdpo", "part_weights": {"form": 0.0}}), lp)[1]
    adv = advantages.whiten(advantage("grpo", b.parts[:, 1], b.groups))
    c = config(advantage={"name": "reinforce", "baseline": "none"})
    b.rewards = adv
    assert torch.allclose(got, gradient(b, c, lp)[1])
    with pytest.raises(ConfigError, match="no part frm; the reward has form, truth"):
        gradient(b, config(advantage={"name": "gdpo", "part_weights": {"frm": 1.0}}), lp)
    b.parts = None
    with pytest.raises(ConfigError, match="needs the same named parts"):
        gradient(b, config(advantage={"name": "gdpo"}), lp)


def test_otb_by_hand() -> None:
    """Answers of 3 and 2 tokens in the mask; at the third place one goes on alone."""
    seq, groups = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0])
    mask = torch.tensor([True, False, True, True, True, True])
    energy = vec(1, 99, 2, 1, 3, 1)
    rewards = vec(0, 99, 0, 1, 0, 0)  # whose returns are 1, -, 1, 1 and 0, 0

    def otb(energy: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return by_token("otb", rewards, mask, seq, groups, energy=energy)[0]

    got = otb(energy, groups)
    first, second = 1 / (1 + 3), 3 / (3 + 4)
    assert got.tolist() == pytest.approx([1 - first, 0, 1 - second, 0, -first, -second])
    assert otb(energy * 0 + 1, groups)[mask].tolist() == pytest.approx([0.5, 0.5, 0, -0.5, -0.5])
    assert otb(energy, torch.tensor([0, 1])).tolist() == [0] * 6
    b = batch(12)
    b.energy = torch.rand(len(b.seq), generator=torch.Generator().manual_seed(3), dtype=D)
    lp = theta(b)
    c = config("advantage.name=otb loss.surrogate=gpg correction.proximal=behavior")
    b.proximal = b.behavior.clone()
    earned = advantages.place_on_last_token(b.rewards, b.mask, b.seq)
    adv = by_token("otb", earned, b.mask, b.seq, b.groups, energy=b.energy)[0]
    whole = gradient(b, c, lp)[1]
    assert torch.allclose(whole, torch.where(b.mask, -adv, 0.0) / b.mask.sum())
    assert torch.allclose(whole, gradient(b, c, lp, [[i] for i in range(12)])[1])
    b.energy = None
    with pytest.raises(ConfigError, match="otb needs each token's energy"):
        gradient(b, c, lp)


def test_a_baseline_of_each_prompt() -> None:
    b = batch(13)
    lp = theta(b)
    known = torch.full((12,), 0.4, dtype=D)
    known[4:8] = math.nan
    b.baselines = known
    got = gradient(b, config(advantage={"name": "reinforce", "baseline": "prompt"}), lp)[1]
    shaped = b.rewards - torch.where(known.isnan(), b.rewards.mean(), known)
    b.rewards = shaped
    plain = config(advantage={"name": "reinforce", "baseline": "none"})
    assert torch.allclose(got, gradient(b, plain, lp)[1])
    b.baselines = None
    with pytest.raises(ConfigError, match="needs the prompts' running means"):
        gradient(b, config(advantage={"name": "reinforce", "baseline": "prompt"}), lp)


LOW, HIGH = surrogates.LOW, surrogates.HIGH
CUTS: list[tuple[str, dict[str, Any], list[int]]] = [
    ("vespo", {}, [0] * 6),
    ("band", {}, [0, LOW, 0, 0, 0, LOW]),
    ("band", {"band_hi": 1.4}, [0, LOW, HIGH, 0, HIGH, LOW]),
    ("ipo", {"dppo_threshold": 0.25}, [0, LOW, 0, 0, HIGH, LOW]),
    ("minpro", {"eps_low": 0.21}, [0, LOW, LOW, 0, HIGH, LOW]),
    ("gmpo", {}, [0, 0, HIGH, 0, 0, LOW]),
    ("bapo", {"bapo_share": 0.515}, [0, 0, HIGH, 0, 0, LOW]),
]


@pytest.mark.parametrize(("name", "keys", "expected"), CUTS)
def test_which_bound_cut_is_told(name: str, keys: dict[str, Any], expected: list[int]) -> None:
    found = trust(name, **keys).clipped
    assert found.tolist() == expected and found.dtype == torch.int8


def test_the_objectives_value() -> None:
    """Of a detached weight: the coefficient times log pi_theta; of a ratio: it times A, bounded."""
    for name in ("vespo", "minpro"):
        assert torch.allclose(trust(name).objective, vec(*coefficient(name)) * LP)
    inside = vec(1.2, 0, 1.5, -0.8, -2, 0)
    assert torch.allclose(trust("band").objective, inside * LP)
    assert torch.allclose(trust("band", pull=0.1).objective, inside * LP - 0.1 * X.square())
    inside = vec(1.2, 0, 1.5, -0.8, 0, 0)
    moved = trust("ipo", dppo_threshold=0.25, pull=0.1)
    assert torch.allclose(moved.objective, inside - 0.1 * X.square())
    whole = [0.963732] * 3 + [-1.023609] * 3
    assert trust("gmpo").objective.tolist() == pytest.approx(whole, abs=1e-6)
    assert trust("gepo").objective.tolist() == pytest.approx(coefficient("gepo"))
    bounded = [1.2, 0.5, 1.35, -0.8, -2, -0.6]
    assert trust("bapo", bapo_share=0.515).objective.tolist() == pytest.approx(bounded)


def test_an_answer_without_a_token_in_the_loss_is_not_of_its_group() -> None:
    mask = torch.tensor([True, True, True, False, False, False])

    def group_q(mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        whole = step_batch(MU.log(), SIGN, mask, SEQ, groups)
        return surrogates.PREPASS["gepo"](whole, settings.GepoLoss())["group_q"]

    assert group_q(mask, GROUP).exp()[:3].tolist() == pytest.approx([0.542884] * 3, abs=1e-6)
    assert group_q(EVERY, GROUP).exp().tolist() == pytest.approx([0.493326] * 6, abs=1e-6)
    apart = group_q(EVERY, torch.tensor([0, 1]))
    assert apart.exp().tolist() == pytest.approx([0.542884] * 3 + [0.430887] * 3, abs=1e-6)


def test_bapos_bounds_are_of_the_optimizer_step() -> None:
    """Answers of another step of the batch do not move them."""
    b = example()
    b.groups = torch.tensor([0, 1])
    c = config(
        "advantage.name=reinforce advantage.baseline=batch loss.surrogate=bapo "
        "loss.bapo_share=0.515 correction.proximal=behavior"
    )
    prep = sl.prepare(b, c)
    found = [sl.begin_step(prep, torch.tensor(o), LP).prepass for o in ([0, 1], [0], [1])]
    bounds = [[round(float(each[key]), 6) for key in ("lo", "hi")] for each in found]
    # positive answers alone have every share, negative ones none
    assert bounds == [[0.6, 1.35], [0.6, 1.2], [0.9, 3.0]]


def published_loss(name: str, b: LossBatch, lp: torch.Tensor) -> torch.Tensor:
    """Return the loss of a paper, written sample by sample; its gradient is autograd's."""
    assert b.reference is not None
    rewards = [float(x) for x in b.rewards]
    samples = [torch.nonzero(b.seq == i)[:, 0] for i in range(len(rewards))]
    kl_to_reference = (lp - b.reference).detach()
    if name == "rloo":  # k1 of the completion in its reward
        rewards = [
            r - 0.05 * float(kl_to_reference[at].sum())
            for r, at in zip(rewards, samples, strict=True)
        ]
    if name == "reinforce_pp":  # k1 of each token, returns to go, whitened over all tokens
        token_rewards = -0.01 * kl_to_reference
        for r, at in zip(rewards, samples, strict=True):
            token_rewards[at[-1]] += r
        returns = torch.cat([token_rewards[at].flip(0).cumsum(0).flip(0) for at in samples])
        whitened = (returns - returns.mean()) / returns.std()
    terms = []
    for i, at in enumerate(samples):
        group = [r for r, g in zip(rewards, b.groups, strict=True) if g == b.groups[i]]
        advantage = rewards[i] - (sum(group) / len(group))
        if name in ("grpo", "dapo", "gspo", "sapo", "cispo"):
            advantage /= float(torch.tensor(group, dtype=D).std()) + 1e-4
        if name == "rloo":
            advantage = rewards[i] - (sum(group) - rewards[i]) / (len(group) - 1)
        if name == "reinforce":  # the first batch's mean is the baseline
            advantage = rewards[i] - sum(rewards) / len(rewards)
        a = torch.full((len(at),), advantage, dtype=D)
        log_ratio = lp[at] - b.behavior[at]
        if name == "reinforce_pp":
            a = whitened[at]
        if name == "gspo":
            log_ratio = log_ratio.mean().expand(len(at))
        if name == "rloo":
            log_ratio, a = log_ratio.sum()[None], a[:1]
        low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28)}.get(name, (0.2, 0.2))
        r = log_ratio.exp()
        term = torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
        if name == "cispo":
            term = r.detach().clamp(max=1.2) * a * lp[at]
        if name == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            term = torch.sigmoid(tau * (r - 1)) * 4 / tau * a
        if name == "reinforce":
            term = a * lp[at]
        if name == "grpo":
            x = b.reference[at] - lp[at]
            term = term - 0.04 * (x.exp() - x - 1)
        terms.append(term)
    count, tokens = len(terms), len(lp)
    if name in ("grpo", "gspo", "sapo"):
        return -torch.stack([term.mean() for term in terms]).sum() / count
    if name in ("rloo", "reinforce"):
        return -torch.cat(terms).sum() / count
    return -torch.cat(terms).sum() / (count * 64 if name == "dr_grpo" else tokens)


@pytest.mark.parametrize(
    "name",
    ["grpo", "dapo", "dr_grpo", "gspo", "sapo", "cispo", "rloo", "reinforce", "reinforce_pp"],
)
def test_a_well_known_method_has_the_gradient_of_its_paper(name: str) -> None:
    """`remax` needs greedy completions: tests/algorithms/test_advantages.py."""
    b = batch(seed=3, groups=4, size=4, proximal=False)
    b.mask[:] = True
    b.truncated[:] = False
    lp = theta(b)
    b.proximal, b.start = b.behavior, lp.detach().clone()
    tree: dict[str, Any] = {"model": {"path": "m"}, "task": {"name": "sort"}, "method": name}
    c = load.build(tree)
    prep = sl.prepare(b, c, baseline=float(b.rewards.mean()))
    step = sl.begin_step(prep, torch.arange(len(b.rewards)), lp.detach())
    loss, _ = sl.compute_micro_loss(prep, step, torch.arange(len(lp)), lp)
    (got,) = torch.autograd.grad(loss, lp)
    (expected,) = torch.autograd.grad(published_loss(name, b, lp), lp)
    assert got.abs().max() > 1e-4 and torch.allclose(got, expected, rtol=1e-6, atol=1e-9)


def apply(
    name: str, log_w: torch.Tensor, adv: torch.Tensor, lp: torch.Tensor, **keys: Any
) -> surrogates.SurrogateTerm:
    """A surrogate on samples of a token each, or of two where there are four."""
    return term(name, log_w, adv, lp, seq=torch.arange(len(log_w)) // (len(log_w) // 2), **keys)


LINEAR: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("ppo", "gspo", "dppo", "sapo", "vespo", "band", "gepo")),
    *((name, {}) for name in ("bapo", "minpro", "gmpo", "ipo")),
    ("dppo", {"dppo_divergence": "kl", "dppo_threshold": 0.05}),
]


@pytest.mark.parametrize(("name", "keys"), LINEAR)
def test_three_times_the_advantage_is_three_times_all(name: str, keys: dict[str, Any]) -> None:
    one, three, none = (trust(name, SIGN * size, **keys) for size in (1.0, 3.0, 0.0))
    assert torch.allclose(three.coefficient, 3 * one.coefficient)
    assert torch.allclose(three.objective, 3 * one.objective)
    assert torch.allclose(trust(name, SIGN * 0.5, **keys).coefficient, 0.5 * one.coefficient)
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
        found = term("ppo", far, vec(-1, 1), ratio=level, eps_low=1e9, eps_high=1e9)
        assert torch.allclose(found.coefficient, edge.exp() * vec(-1, 1))
    # the least and the most of exp alone, where the other would not show
    _, total, square = sl.sum_sample_weights(far[1:], every[1:], seq[:1], 1).tolist()
    assert (total, square) == (pytest.approx(math.exp(-20)), pytest.approx(math.exp(-40)))


def test_tokens_outside_the_mask_change_no_answers_ratio() -> None:
    mask = torch.tensor([True, False, True, True, True, False])
    log_w = torch.where(mask, X, 7.0)
    first, second = 1.2 * 1.5, 0.8 * 2
    found = sl.sum_sample_weights(log_w, mask, SEQ, 2).tolist()
    assert found == pytest.approx([2, first + second, first**2 + second**2])
    given = log_w, SIGN, LP, mask, SEQ
    apart = [0.5 * math.log(first) - 1, 0.5 * math.log(second) + 1]
    value = term("oapl", *given, oapl_beta=0.5)
    assert value.coefficient.tolist() == pytest.approx([-apart[0]] * 3 + [-apart[1]] * 3)
    mean = [-(apart[0] ** 2) / 2] * 3 + [-(apart[1] ** 2) / 2] * 3
    assert value.objective.tolist() == pytest.approx(mean)
    one = term("vespo", *given).coefficient[mask].tolist()
    w = torch.tensor([first, second], dtype=D).log()[SEQ[mask]]
    assert one == pytest.approx(term("vespo", w, SIGN[mask]).coefficient.tolist())
    got = term("ppo", *given, ratio="sequence", eps_low=9.0, eps_high=9.0).coefficient
    assert got.tolist() == pytest.approx([first] * 3 + [-second] * 3)


@pytest.mark.parametrize("empty", [True, False])
def test_the_share_of_a_stop_and_of_the_ess_multiply(empty: bool) -> None:
    """Answers with nothing in the loss have no weight: their share is whole."""
    b = example()
    b.mask[:] = not empty
    prep = sl.prepare(b, config(**vcpo(stop={"lr_by_ess": "linear", "ess_on_policy": 0.9})))
    step = sl.begin_step(prep, torch.arange(2))
    step.lr_scale = 0.25
    _, sums = sl.compute_micro_loss(prep, step, torch.arange(6), LP)
    ess = 1.0 if empty else 1.3**2 / (2 * (0.9**2 + 0.4**2))
    share = 0.25 * min(ess / 0.9, 1.0)
    assert sl.compute_learning_rate_share(prep, step, sums) == pytest.approx(share)
    assert prep.metrics["optim/answer_ess"] == pytest.approx(ess)
    assert prep.metrics["optim/lr_scale"] == pytest.approx(share)


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
        f"loss.surrogate=vanilla loss.reduction={ANSWER} correction.proximal=behavior "
        "correction.reject=kb correction.reject_at=target correction.reject_hi=0.3 "
        "kl.loss.coefficient=1.0 kl.loss.estimator=k2"
    )
    sums = gradient(b, c, LP.clone().requires_grad_(True))[2]
    by_hand = sum((math.log(w) + 0.1) ** 2 / 2 / 6 for w in (1.2, 1.5, 0.8))
    assert float(sums["loss/kl"]) == pytest.approx(by_hand)
    exact = vec(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    found = kl.compute_term(LP, LP, MU.log(), SEQ, off_policy="prefix_full", step_kl=exact)
    assert torch.allclose(found, vec(1, 1.2, 0.6, 1, 0.8, 1.6) * exact)


def test_adapters_without_peft_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    words = re.escape("lora.rank: needs peft: pip install 'asyncrl[lora]'")
    with pytest.raises(ConfigError, match=words):
        adapters.attach(None, LoraConfig(rank=1), 0)  # type: ignore[arg-type]
