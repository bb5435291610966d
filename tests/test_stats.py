"""The statistics of comparisons: against tables, against theory, and calibrated on simulated comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.compare import stats


@pytest.mark.parametrize(("q", "df", "x"), [(0.975, 1, 12.7062), (0.975, 4, 2.77645), (0.95, 2, 2.91999), (0.975, 30, 2.04227), (0.995, 9, 3.24984)])
def test_quantiles_of_t_are_those_of_the_tables(q: float, df: int, x: float) -> None:
    assert stats.t_quantile(q, df) == pytest.approx(x, rel=1e-5)
    assert stats.t_cdf(x, df) == pytest.approx(q, abs=1e-6)
    assert stats.t_cdf(-x, df) == pytest.approx(1 - q, abs=1e-6)


def test_paired_t_by_hand() -> None:
    # differences 1, 2, 3: mean 2, sd 1, t = 2 sqrt(3) = 3.4641 with 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 0.0742
    got = stats.paired_t([2, 4, 6], [1, 2, 3])
    assert (got.n, got.difference, got.sd) == (3, 2.0, 1.0)
    assert got.p == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-8)
    assert got.interval == pytest.approx((2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), rel=1e-5)
    with pytest.raises(ValueError, match="two lists of one length"):
        stats.paired_t([1.0], [1.0])


def test_equal_lists_are_not_different_and_a_constant_shift_is() -> None:
    assert stats.paired_t([0.5, 0.6], [0.5, 0.6]).p == 1.0
    assert stats.paired_t([1.5, 2.5], [1.0, 2.0]).p == 0.0


def test_holm_by_hand() -> None:
    # sorted .01 .02 .04 times 3 2 1 = .03 .04 .04; never decreasing
    assert stats.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert stats.holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_equal_arms_are_called_different_in_at_most_ten_percent_of_200(seeds: int) -> None:
    """Three arms against one, Holm over the three, 200 comparisons of equal arms whose seeds differ far more than the arms."""
    r, wrong = np.random.default_rng(seeds), 0
    for _ in range(200):
        common = r.normal(0.8, 0.05, seeds)
        arms = common + r.normal(0, 0.02, (4, seeds))
        wrong += min(stats.holm([stats.paired_t(a, arms[0]).p for a in arms[1:]])) < 0.05
    assert wrong <= 20


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_a_planted_difference_is_found_as_often_as_theory_says(seeds: int) -> None:
    """Two standard errors of the mean difference: effect 2 / sqrt(n) standard deviations.  2000 repeats: 4 sd are 0.045."""
    r, found, critical = np.random.default_rng(seeds), 0, stats.t_quantile(0.975, seeds - 1)
    for _ in range(2000):
        d = r.normal(2 / math.sqrt(seeds), 1, seeds)
        error = d.std(ddof=1) / math.sqrt(seeds)
        found += abs(d.mean()) / error > critical
    assert found / 2000 == pytest.approx(stats.power(2 / math.sqrt(seeds), seeds), abs=0.045)


def test_power_at_no_effect_is_the_level_and_grows() -> None:
    assert stats.power(0.0, 5) == pytest.approx(0.05, abs=1e-4)
    assert stats.power(0.5, 5) < stats.power(1.0, 5) < stats.power(1.0, 10) < 1
    assert stats.power(0.5, 34) == pytest.approx(0.808, abs=0.003)  # the textbook's 34 pairs for a medium effect
    assert stats.seeds_needed(0.5, 1.0) in (33, 34)
    assert stats.visible(1.0, 34) == pytest.approx(0.495, abs=0.01)
    assert stats.seeds_needed(0.0, 1.0) is None


def test_interval_over_prompts_keeps_prompts_whole_across_seeds() -> None:
    """Were prompts of different seeds drawn apart, the interval would shrink by sqrt(seeds)."""
    r = np.random.default_rng(0)
    one = r.normal(0, 1, 400)
    lo, hi = stats.other_prompts(np.tile(one, (4, 1)), np.zeros((4, 400)))
    assert hi - lo == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.12)


def test_area_by_hand() -> None:
    assert stats.area([(0, 0.0), (10, 1.0), (20, 1.0)]) == pytest.approx(0.75)
    assert stats.area([(3, 0.4)]) == 0.4
