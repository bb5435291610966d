"""Equal arms are seldom called different, planted differences as often as theory says."""

import math
import random

import pytest

from asyncrl.experiments.compare import verdict as cs
from asyncrl.experiments.compare.grid import describe_power

REPEATS = 200


def arms(r: random.Random, seeds: int, effect: float, sd: float) -> tuple[list[float], list[float]]:
    """Two arms whose seeds share a common part, so that pairing matters."""
    common = [r.gauss(0.8, 0.05) for _ in range(seeds)]
    noise = sd / math.sqrt(2)
    return [c + effect + r.gauss(0, noise) for c in common], [c + r.gauss(0, noise) for c in common]


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_equal_arms_are_called_different_in_at_most_a_tenth(seeds: int) -> None:
    r, called = random.Random(seeds), 0
    for _ in range(REPEATS):
        _, base = arms(r, seeds, 0.0, 0.02)
        found = {n: cs.compare_pairs(arms(r, seeds, 0.0, 0.02)[0], base) for n in "abc"}
        cs.adjust_by_holm(found)
        called += any(d.is_different for d in found.values())
    assert called <= REPEATS / 10


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_planted_differences_are_found_as_often_as_theory_says(seeds: int) -> None:
    """Two standard errors of the mean difference."""
    r, sd, called = random.Random(seeds), 0.02, 0
    effect = 2 * sd / math.sqrt(seeds)
    for _ in range(1000):
        d = cs.compare_pairs(*arms(r, seeds, effect, sd))
        cs.adjust_by_holm({"x": d})
        called += d.is_different
    expected = cs.compute_power(effect, sd, seeds)
    assert abs(called / 1000 - expected) < 4 * math.sqrt(expected * (1 - expected) / 1000)


def test_intervals_cover_as_often_as_they_say() -> None:
    r, inside = random.Random(0), 0
    for _ in range(1000):
        d = cs.compare_pairs(*arms(r, 4, 0.03, 0.02))
        inside += d.low <= 0.03 <= d.high
    assert 0.93 <= inside / 1000 <= 0.97
    # those over prompts: two fixed policies of true accuracy .8 and .75, each on 512 of its own
    r, inside = random.Random(0), 0
    for _ in range(500):
        a, b = ([sum(r.random() < p for _ in range(512)) / 512 for _ in "ab"] for p in (0.8, 0.75))
        d = cs.compare_pairs(a, b, prompts=512)
        inside += d.prompt_low <= 0.05 <= d.prompt_high
    assert 0.92 <= inside / 500 <= 0.98


def test_paired_t_and_holm_by_hand() -> None:
    """Differences .1, .2, .3: mean .2, sd .1, t = 3.4641 with 2 degrees of freedom."""
    d = cs.compare_pairs([0.6, 0.8, 1.0], [0.5, 0.6, 0.7])
    assert d.mean == pytest.approx(0.2) and d.sd == pytest.approx(0.1)
    assert d.p == pytest.approx(0.0742, abs=1e-4)
    assert (d.low, d.high) == (pytest.approx(-0.0484, abs=1e-4), pytest.approx(0.4484, abs=1e-4))
    values = {"a": 0.01, "b": 0.04, "c": 0.03}
    found = {n: cs.PairedDifference(0.1, 0.1, 3, p, 0, 0) for n, p in values.items()}
    cs.adjust_by_holm(found)
    assert [round(found[n].adjusted, 3) for n in "abc"] == [0.03, 0.06, 0.06]


def test_differences_that_are_all_the_same_are_no_certainty() -> None:
    """Two seeds that both gained four of 64 prompts: a spread of one prompt, t = .0625 / (1/64 /
    sqrt 2) = 5.66 with 1 degree of freedom."""
    d = cs.compare_pairs([0.5, 0.75], [0.4375, 0.6875], prompts=64)
    assert d.p == pytest.approx(0.1114, abs=1e-4) and d.low < 0 < d.high
    d = cs.compare_pairs([0.5, 0.7, 0.9], [0.4, 0.6, 0.8])
    assert d.p == 0.25 and math.isnan(d.low)
    twin = cs.compare_pairs([0.5, 0.7], [0.5, 0.7], prompts=64)
    assert (twin.p, twin.low, twin.high) == (1.0, 0.0, 0.0)


def test_holms_interval_is_without_zero_where_its_verdict_is_a_difference() -> None:
    r = random.Random(5)
    visible = [0, 0]  # without and with a difference by itself, of those that are none by Holm
    for _ in range(200):
        found = {
            arm: cs.compare_pairs([r.gauss(0.1, 0.1) for _ in range(4)], [0.0] * 4)
            for arm in range(5)
        }
        cs.adjust_by_holm(found)
        for d in found.values():
            assert d.is_different == (not d.holm_low <= 0 <= d.holm_high)
            assert d.holm_low - 1e-12 <= d.low < d.high <= d.holm_high + 1e-12
            visible[not d.low <= 0 <= d.high] += not d.is_different
    assert min(visible) > 0
    alone = {"a": cs.compare_pairs([0.5, 0.7, 0.8], [0.4, 0.5, 0.5])}
    cs.adjust_by_holm(alone)
    assert alone["a"].holm_low == pytest.approx(alone["a"].low)


def test_power_and_what_it_is_for() -> None:
    assert cs.compute_power(cs.find_detectable(0.02, 5), 0.02, 5) == pytest.approx(0.8, abs=1e-3)
    need = cs.count_needed_seeds(0.02, 0.02)
    assert need is not None
    assert cs.compute_power(0.02, 0.02, need) >= 0.8 > cs.compute_power(0.02, 0.02, need - 1)
    one_seed = cs.compare_pairs([0.5], [0.4])
    assert "no verdict is possible" in cs.state_verdict("a", "b", one_seed, "accuracy")
    said = describe_power(9, 2)
    assert "9 arms x 2 seeds: this design detects no difference" in said
    assert "--seeds 6 finds 0.05" in said
    need = cs.count_needed_seeds(0.05, 0.02, level=cs.LEVEL / 8)
    assert need == 6 and cs.find_detectable(0.02, need, cs.LEVEL / 8) <= 0.05
    assert "of 3.3 standard deviations" in describe_power(2, 3)
    assert "that is 0.065 in" in describe_power(2, 3)


def test_the_power_of_two_seeds_is_that_of_simulated_ones() -> None:
    """Far out, where scipy's noncentral t loses its digits: half of what is needed was named."""
    r = random.Random(3)
    for arms, effect in ((2, 11.5), (4, 34.6)):
        level = cs.LEVEL / (arms - 1)
        edge = {2: 12.706, 4: 38.188}[arms]
        found = 0
        for _ in range(20_000):
            one, two = effect + r.gauss(0, 1), effect + r.gauss(0, 1)
            found += abs(one + two) / 2 > edge * abs(one - two) / 2
        assert cs.compute_power(effect, 1.0, 2, level) == pytest.approx(found / 20_000, abs=0.012)
        assert cs.find_detectable(1.0, 2, level) == pytest.approx(effect, rel=0.01)


def test_stability_by_rule() -> None:
    kl, norm, entropy, cut = (
        *("kl/behavior_target_k3", "optim/grad_norm"),
        *("policy/entropy", "answer/truncated_share"),
    )
    row = {kl: 0.01, norm: 1.0, entropy: 0.5, cut: 0.0}
    flat = [row] * 30
    wide, steep = row | {kl: 2.0}, row | {norm: 50.0}

    def find(*rows: dict[str, float]) -> list[str]:
        return cs.list_instabilities([0.4], rows)

    assert cs.list_instabilities([0.4, 0.6, 0.8], flat) == []
    assert "collapse" in cs.list_instabilities([0.4, 0.8, 0.3, 0.2], flat)[0]
    assert cs.list_instabilities([0.4, 0.8, 0.3, 0.7], flat) == []
    assert "oscillation" in cs.list_instabilities([0.4, 0.7, 0.4, 0.7, 0.4], flat)[0]
    assert find(*flat, wide, wide) == find(*flat, steep, steep) == []
    assert "KL" in find(*flat, wide, wide, wide)[0] and "KL" in find(*flat, row | {kl: math.nan})[0]
    assert "in 3 batches, up to 50" in find(*flat, steep, *flat, steep, steep)[0]
    assert "entropy" in find(*flat, row | {entropy: 0.01})[0]
    assert "length" in find(*flat, *[row | {cut: 0.9}] * 3)[0]
    assert cs.compute_area([0, 10, 20], [0.0, 1.0, 1.0]) == pytest.approx(0.75)


@pytest.mark.parametrize("outside", [7.0, -0.5])
def test_rewards_outside_0_to_1_have_an_interval_over_seeds_alone(outside: float) -> None:
    arm, base = [outside, 0.4, 0.6], [0.5, 0.3, 0.4]
    found = cs.compare_pairs(arm, base, prompts=100)
    assert str(found) == str(cs.compare_pairs(arm, base)) and found.low < found.mean < found.high
    assert math.isnan(found.prompt_low) and math.isnan(found.prompt_high)
