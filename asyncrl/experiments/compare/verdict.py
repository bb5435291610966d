"""Decide whether one arm is better than another: statistics, paired by seed.

There are two sources of uncertainty, kept apart.

- Other prompts: the runs are fixed and only the finite evaluation set is uncertain. The interval is
  normal, from the largest variances of rewards in [0, 1]. Other rewards have no such interval.
- Other seeds: new runs may differ. The interval is a paired t interval over seeds, because a plain
  bootstrap of 3 to 8 seeds is too narrow.

Several arms are corrected by Holm (1979).
"""

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

from asyncrl.records.jsonl import JsonObject

LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 1000  # of a design
EQUAL = 1e-12  # differences up to this are rounding


@dataclass
class PairedDifference:
    """The difference of an arm from the base over paired seeds.

    p, low, high: over other seeds, nan with one seed.
    prompt_low, prompt_high: over other prompts.
    adjusted: p with Holm's correction.
    holm_low, holm_high: over other seeds, at the level of Holm's step: without 0 exactly where
        `adjusted` is below LEVEL.
    """

    mean: float
    sd: float
    seeds: int
    p: float = nan
    low: float = nan
    high: float = nan
    prompt_low: float = nan
    prompt_high: float = nan
    adjusted: float = nan
    holm_low: float = nan
    holm_high: float = nan

    @property
    def is_different(self) -> bool:
        return self.adjusted < LEVEL

    def choose_word(self) -> str:
        if not self.is_different:
            return "no difference visible"
        return "better" if self.mean > 0 else "worse"

    def as_json(self) -> JsonObject:
        """Return what the JSON of a comparison and of a sweep has of a difference."""
        return {
            "mean": self.mean,
            "sd": self.sd,
            "interval": [self.low, self.high],
            "interval_holm": [self.holm_low, self.holm_high],  # the verdict's
            "p": self.adjusted,  # with Holm's correction
            "verdict": self.choose_word() if self.seeds > 1 else "no verdict",
            "interval_other_prompts": [self.prompt_low, self.prompt_high],
            # the difference that as many seeds show with 80 % power
            "detectable": find_detectable(self.sd, self.seeds),
        }


def compare_arms(
    values: Mapping[Any, Mapping[int, float]], base: Any, prompts: int = 0, least: int = 1
) -> dict[Any, PairedDifference]:
    """Compare each arm with `base` over the seeds that both have, with Holm's correction.

    values: arm -> seed -> value.
    least: seeds in common, without which an arm has no difference.
    """
    differences = {}
    for arm, by_seed in values.items():
        pairs = [(x, values[base][seed]) for seed, x in by_seed.items() if seed in values[base]]
        if arm != base and len(pairs) >= least:
            mine, theirs = zip(*pairs, strict=True)
            differences[arm] = compare_pairs(mine, theirs, prompts)
    adjust_by_holm(differences)
    return differences


def compare_pairs(
    arm: Sequence[float], base: Sequence[float], prompts: int = 0
) -> PairedDifference:
    """Compare two arms by seed.

    arm, base: one value a seed, in the same order.
    prompts: n of each mean reward; 0 for no prompt interval.

    Means of rewards that are 0 or 1 are multiples of 1 / n, so a smaller standard deviation over
    seeds cannot be measured and is raised to 1 / n. Without n, and for means outside [0, 1],
    identical nonzero differences get the p value of the sign test, 2^(1 - seeds), and no interval.
    """
    from scipy import stats  # costs a second of CPU, too much for a command that only refuses

    differences = [value - reference for value, reference in zip(arm, base, strict=True)]
    if not all(0 <= value <= 1 for value in (*arm, *base)):
        prompts = 0  # a judge's grades have another range, so their variance is unknown
    seeds, mean = len(differences), statistics.fmean(differences)
    result = PairedDifference(mean, nan, seeds)
    if seeds > 1:
        sd = statistics.stdev(differences)
        result.sd = max(sd, 1 / prompts) if mean and prompts else sd
        if result.sd >= EQUAL:
            error = result.sd / math.sqrt(seeds)
            result.p = float(2 * stats.t.sf(abs(mean) / error, seeds - 1))
            result.low, result.high = map(
                float, stats.t.interval(1 - LEVEL, seeds - 1, mean, error)
            )
        elif abs(mean) > EQUAL:
            result.p = 2.0 ** (1 - seeds)
        else:
            result.p, result.low, result.high = 1.0, mean, mean
    if prompts:
        # Conservative: both arms have the same prompts, whose positive covariance is left out.
        variances = sum(a * (1 - a) + b * (1 - b) for a, b in zip(arm, base, strict=True))
        error = math.sqrt(variances / prompts) / seeds
        half = float(stats.norm.ppf(1 - LEVEL / 2)) * error
        result.prompt_low, result.prompt_high = mean - half, mean + half
    return result


def adjust_by_holm(differences: Mapping[Any, PairedDifference]) -> None:
    """Fill in `adjusted` and its interval by Holm's step-down procedure, where p is known."""
    from scipy import stats

    ordered = sorted(
        (difference for difference in differences.values() if not math.isnan(difference.p)),
        key=lambda difference: difference.p,
    )
    worst = 0.0
    for rank, difference in enumerate(ordered):
        worst = max(worst, (len(ordered) - rank) * difference.p)
        difference.adjusted = min(1.0, worst)
        half = (difference.high - difference.low) / 2
        if half > 0:
            level = LEVEL * difference.p / worst if worst else LEVEL / (len(ordered) - rank)
            single, corrected = stats.t.ppf([1 - LEVEL / 2, 1 - level / 2], difference.seeds - 1)
            half *= float(corrected / single)
        difference.holm_low, difference.holm_high = difference.mean - half, difference.mean + half


def compute_power(effect: float, sd: float, seeds: int, level: float = LEVEL) -> float:
    """Return the power of a paired t-test over `seeds` pairs.

    effect: the true difference.
    sd: standard deviation of the differences.
    """
    if seeds < 2 or sd <= 0:
        return nan if seeds < 2 else 1.0
    from scipy import special, stats

    shift = effect / sd * math.sqrt(seeds)
    critical = float(stats.t.ppf(1 - level / 2, seeds - 1))
    spread, weight = _list_spreads(seeds - 1)
    beyond = special.ndtr(shift - critical * spread) + special.ndtr(-shift - critical * spread)
    return float((weight * beyond).sum())


@functools.cache
def _list_spreads(freedom: int) -> tuple[Any, Any]:
    """Return estimates of a standard deviation of 1, and their quadrature weights.

    The mean of normal tails over these is the tail of a noncentral t distribution. scipy's loses
    precision in the far tails, which two seeds need.
    """
    import numpy as np
    from scipy import stats

    nodes, weight = np.polynomial.legendre.leggauss(400)
    return np.sqrt(stats.chi2.ppf((nodes + 1) / 2, freedom) / freedom), weight / 2


def find_detectable(sd: float, seeds: int, level: float = LEVEL) -> float:
    """Return the smallest difference that `seeds` pairs show with 80 % power."""
    if seeds < 2 or not sd > 0:
        return nan
    low, high = 0.0, 100 * sd
    for _ in range(60):
        middle = (low + high) / 2
        if compute_power(middle, sd, seeds, level) < POWER:
            low = middle
        else:
            high = middle
    return high


def count_needed_seeds(effect: float, sd: float, level: float = LEVEL) -> int | None:
    """Return the number of pairs that show `effect` with 80 % power; None if above MOST_SEEDS."""
    if not sd > 0:
        return 2
    counts = range(2, MOST_SEEDS + 1)  # power grows with the seeds
    index = bisect.bisect_left(counts, POWER, key=lambda n: compute_power(effect, sd, n, level))
    return counts[index] if index < len(counts) else None


def state_verdict(name: str, base: str, difference: PairedDifference, measure: str) -> str:
    """Describe a difference in one sentence."""
    if difference.seeds < 2:
        return (
            f"{name} against {base}: {measure} {difference.mean:+.3f} with one seed: no verdict is "
            "possible; use --seeds 3 or more"
        )
    interval = f"[{difference.low:+.3f}, {difference.high:+.3f}]"
    measured = f"{measure} {difference.mean:+.3f}, 95 % interval over seeds {interval}"
    if difference.is_different:
        return (
            f"{name} is {difference.choose_word()} than {base}: {measured}, "
            f"p = {difference.adjusted:.3f} with Holm's correction"
        )
    needed = count_needed_seeds(difference.mean, difference.sd)
    advice = "no practical number of seeds would show so small a difference"
    if needed:
        advice = f"about {needed} seeds would show a difference of this size"
    return (
        f"{name} against {base}: no difference visible at {difference.seeds} seeds ({measured}); "
        f"{advice}"
    )


# ---- stability of one run ------------------------------------------------------------------------


# the bounds beyond which a run counts as unstable; every report lists them
EVALUATIONS = 2  # in a row
BATCHES = 3  # past one of the next two bounds; clipping absorbs a single spike
KL_LIMIT = 0.5  # nats a token, behavior to target policy
GRADIENT_LIMIT = 20.0  # times the median of the first tenth
ENTROPY_LIMIT = 0.05  # share of its value at the start
SWING = 0.15  # change of the held-out reward between neighboring evaluations
TRUNCATED = 0.5  # share of completions cut at the limit
STABILITY = (
    f"held-out reward below half its best for {EVALUATIONS} evaluations; KL above {KL_LIMIT:g} "
    f"nats a token or gradient norm above {GRADIENT_LIMIT:g} times its start in {BATCHES} batches; "
    f"entropy below {ENTROPY_LIMIT:.0%} of its start; three swings above {SWING:g}; more than "
    f"{TRUNCATED:.0%} of completions cut; loss not finite"
)


def list_values(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return a metric's values in the rows that have it."""
    return [row[name] for row in rows if name in row]


def list_instabilities(rewards: Sequence[float], rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the rules of stability that a run breaks; empty if it is stable.

    rewards: held-out, by evaluation.
    rows: metrics by step.
    """
    entropy, cut, kls = (
        list_values(rows, name)
        for name in ("policy/entropy", "answer/truncated_share", "kl/behavior_target_k3")
    )
    problems = [
        find_collapse(rewards),
        f"divergence: KL(behavior, target) above {KL_LIMIT:g} nats a token in "
        f"{sum(not kl <= KL_LIMIT for kl in kls)} batches, up to {max(kls):.2f}"
        if sum(kl > KL_LIMIT for kl in kls) >= BATCHES or not all(map(math.isfinite, kls))
        else "",
        find_gradient_explosion(list_values(rows, "optim/grad_norm")),
        f"entropy collapse: {entropy[-1]:.3f} of {entropy[0]:.3f} nats a token"
        if entropy and min(entropy[-5:]) < ENTROPY_LIMIT * entropy[0]
        else "",
        find_oscillation(rewards),
        f"length explosion: {cut[-1]:.0%} of the completions are cut at max_new_tokens"
        if len(cut) > 2 and min(cut[-3:]) > TRUNCATED
        else "",
    ]
    return [problem for problem in problems if problem]


def find_collapse(rewards: Sequence[float]) -> str:
    best = 0.0
    below = 0
    for value in rewards:
        best = max(best, value)
        below = below + 1 if value < best / 2 else 0
        if below == EVALUATIONS:
            return (
                f"collapse: held-out reward below half its best ({best:.2f}) for "
                f"{EVALUATIONS} evaluations"
            )
    return ""


def find_gradient_explosion(norms: Sequence[float]) -> str:
    if len(norms) < 10:
        return ""
    start = sorted(norms[: max(5, len(norms) // 10)])
    middle = start[len(start) // 2]
    over = sum(norm > GRADIENT_LIMIT * max(middle, 1e-12) for norm in norms)
    if over < BATCHES:
        return ""
    return (
        f"divergence: gradient norm more than {GRADIENT_LIMIT:g} times its start "
        f"({middle:.2g}) in {over} batches, up to {max(norms):.2g}"
    )


def find_oscillation(rewards: Sequence[float]) -> str:
    wide = sum(abs(reward - previous) > SWING for previous, reward in itertools.pairwise(rewards))
    turns = sum(
        (y - x) * (z - y) < 0 for x, y, z in zip(rewards, rewards[1:], rewards[2:], strict=False)
    )
    if wide < 3 or turns < 3:
        return ""
    return f"oscillation: {wide} swings of more than {SWING:g}"


def compute_area(steps: Sequence[float], values: Sequence[float]) -> float:
    """Return the mean of a curve over its steps (trapezoids), in the unit of its values."""
    if len(steps) < 2 or steps[-1] == steps[0]:
        return values[-1] if values else nan
    total = sum(
        (b - a) * (y + z) / 2
        for a, b, y, z in zip(steps, steps[1:], values, values[1:], strict=False)
    )
    return total / (steps[-1] - steps[0])
