"""Is one arm better than another, or is it noise?  Paired by seed; pure numbers in, numbers and
sentences out.

Two questions, kept apart.  "These seeds, other prompts": the runs are as they are, and only the
finite evaluation set is uncertain (a normal interval from binomial variances).  "Other seeds":
would the difference be there in runs that nobody has made (a paired t interval over seeds; a plain
bootstrap of 3 to 8 seeds is too narrow).  Several arms: Holm's correction (1979)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVEL = 0.05
POWER = 0.8
EQUAL = 1e-12  # what rounding leaves of a difference


@dataclass
class PairedDifference:
    """arm minus base over S paired seeds.  p, low, high: other seeds (nan with one seed);
    prompt_low, prompt_high: other prompts.
    """

    mean: float
    sd: float
    seeds: int
    p: float
    low: float
    high: float
    prompt_low: float = math.nan
    prompt_high: float = math.nan
    adjusted: float = math.nan

    @property
    def is_different(self) -> bool:
        return self.adjusted < LEVEL

    def verdict_word(self) -> str:
        if not self.is_different:
            return "no difference visible"
        return "better" if self.mean > 0 else "worse"


def paired(arm: Sequence[float], base: Sequence[float], prompts: int = 0) -> PairedDifference:
    """arm, base: one value a seed, in the same order.  prompts: n of each accuracy; 0: no prompt
    interval.

    Accuracies come in steps of 1 / n, so a spread over seeds below that is not known and counts as
    that.  Without n, differences that are all the same get what the sign test makes of them, p =
    2^(1 - seeds), and no interval."""
    from scipy import stats  # a second of CPU: not for a command that only refuses

    each = [mine - other for mine, other in zip(arm, base, strict=True)]
    seeds = len(each)
    mean = sum(each) / seeds
    sd = math.sqrt(sum((x - mean) ** 2 for x in each) / (seeds - 1)) if seeds > 1 else math.nan
    out = PairedDifference(mean, sd, seeds, p=math.nan, low=math.nan, high=math.nan)
    if seeds > 1 and mean and prompts:
        out.sd = max(sd, 1 / prompts)
    if seeds > 1 and out.sd < EQUAL:
        if abs(mean) > EQUAL:
            out.p = 2.0 ** (1 - seeds)
        else:
            out.p = 1.0
            out.low = out.high = mean
    elif seeds > 1:
        error = out.sd / math.sqrt(seeds)
        half = float(stats.t.ppf(1 - LEVEL / 2, seeds - 1)) * out.sd / math.sqrt(seeds)
        out.p = float(2 * stats.t.sf(abs(mean) / error, seeds - 1))
        out.low = mean - half
        out.high = mean + half
    if prompts:
        # Both arms answer the same prompts, so this is wide rather than narrow: their covariance,
        # which is positive, is left out.
        variances = sum(a * (1 - a) + b * (1 - b) for a, b in zip(arm, base, strict=True))
        half = float(stats.norm.ppf(1 - LEVEL / 2)) * (math.sqrt(variances / prompts) / seeds)
        out.prompt_low = mean - half
        out.prompt_high = mean + half
    return out


def holm(found: Mapping[Any, PairedDifference]) -> None:
    """Fill in `adjusted` of each difference: Holm's step-down over those whose p is known."""
    known = sorted(
        (difference for difference in found.values() if not math.isnan(difference.p)),
        key=lambda difference: difference.p,
    )
    worst = 0.0
    for before, difference in enumerate(known):
        worst = max(worst, min(1.0, (len(known) - before) * difference.p))
        difference.adjusted = worst


def power(effect: float, sd: float, seeds: int, level: float = LEVEL) -> float:
    """Chance that a paired t-test over `seeds` finds a true difference of `effect` with standard
    deviation `sd` of the differences.
    """
    if seeds < 2 or sd <= 0:
        return math.nan if seeds < 2 else 1.0
    from scipy import special, stats

    shift = effect / sd * math.sqrt(seeds)
    edge = float(stats.t.ppf(1 - level / 2, seeds - 1))
    spread, weight = _spreads(seeds - 1)
    beyond = special.ndtr(shift - edge * spread) + special.ndtr(-shift - edge * spread)
    return float((weight * beyond).sum())


@functools.cache
def _spreads(freedom: int) -> tuple[Any, Any]:
    """Estimates of a standard deviation of 1 with so many degrees of freedom, and their weights.

    A mean of normal tails over these is a noncentral t's tail; scipy's own loses its digits far
    out, where two seeds lead.
    """
    import numpy as np
    from scipy import stats

    nodes, weight = np.polynomial.legendre.leggauss(400)
    return np.sqrt(stats.chi2.ppf((nodes + 1) / 2, freedom) / freedom), weight / 2


def detectable(sd: float, seeds: int, level: float = LEVEL) -> float:
    """The smallest difference that `seeds` pairs show with 80 % power."""
    if seeds < 2 or not sd > 0:
        return math.nan
    low = 0.0
    high = 100 * sd
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, sd, seeds, level) < POWER else (low, middle)
    return high


def seeds_needed(effect: float, sd: float, most: int = 1000, level: float = LEVEL) -> int | None:
    """Pairs that show `effect` with 80 % power; None: more than `most`."""
    if not sd > 0:
        return 2
    if power(effect, sd, most, level) < POWER:
        return None
    low, high = 1, most  # power grows with the seeds: those of `low` are too few
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power(effect, sd, middle, level) < POWER else (low, middle)
    return high


def verdict(name: str, base: str, found: PairedDifference, what: str) -> str:
    """One sentence a reader can rely on."""
    if found.seeds < 2:
        return (
            f"{name} against {base}: {what} {found.mean:+.3f} with one seed: no verdict is "
            "possible; use --seeds 3 or more"
        )
    interval = f"[{found.low:+.3f}, {found.high:+.3f}]"
    inside = f"{what} {found.mean:+.3f}, 95 % interval over seeds {interval}"
    if found.is_different:
        return (
            f"{name} is {'better' if found.mean > 0 else 'worse'} than {base}: {inside}, p = "
            f"{found.adjusted:.3f} after Holm"
        )
    need = seeds_needed(found.mean, found.sd)
    more = (
        f"about {need} seeds would show a difference of this size"
        if need
        else "no practical number of seeds would show one this small"
    )
    return f"{name} against {base}: no difference visible at {found.seeds} seeds ({inside}); {more}"


# ---- stability of one run ------------------------------------------------------------------------


@dataclass
class StabilityBounds:
    """When a run counts as unstable; stated in every report."""

    evaluations: int = 2  # in a row
    batches: int = 3  # past one of the next two bounds: a single spike is cut by gradient clipping
    kl: float = 0.5  # nats a token, behaviour to target
    gradient: float = 20.0  # times the median of the first tenth
    entropy: float = 0.05  # of its start
    swing: float = 0.15  # accuracy between neighbouring evaluations
    truncated: float = 0.5  # share of answers cut at the limit

    def __str__(self) -> str:
        return (
            f"accuracy below half its best for {self.evaluations} evaluations; KL above "
            f"{self.kl:g} nats a token or gradient norm above "
            f"{self.gradient:g} times its start in {self.batches} batches; entropy below "
            f"{self.entropy:.0%} of its start; "
            f"three swings above {self.swing:g}; more than {self.truncated:.0%} of answers cut; "
            "loss not finite"
        )


def series(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """A metric where the run wrote it."""
    return [row[name] for row in rows if name in row]


def stability(
    accuracy: Sequence[float],
    rows: Sequence[Mapping[str, float]],
    bounds: StabilityBounds | None = None,
) -> list[str]:
    """What is wrong with a run's course, by rule; empty: stable.  accuracy: held-out, by
    evaluation; rows: metrics by step.
    """
    bounds = bounds or StabilityBounds()
    found = [
        collapse(accuracy, bounds),
        kl_collapsed(series(rows, "kl/behavior_target_k3"), bounds),
        gradient_exploded(series(rows, "optim/grad_norm"), bounds),
        entropy_collapsed(series(rows, "policy/entropy"), bounds),
        accuracy_oscillates(accuracy, bounds),
        cut_off(series(rows, "answer/truncated_share"), bounds),
    ]
    return [said for said in found if said]


def collapse(accuracy: Sequence[float], bounds: StabilityBounds) -> str:
    best = 0.0
    below = 0
    for value in accuracy:
        best = max(best, value)
        below = below + 1 if value < best / 2 else 0
        if below == bounds.evaluations:
            return (
                f"collapse: accuracy below half its best ({best:.2f}) for {bounds.evaluations} "
                "evaluations"
            )
    return ""


def kl_collapsed(kls: Sequence[float], bounds: StabilityBounds) -> str:
    over = sum(kl > bounds.kl for kl in kls)
    if over < bounds.batches and all(map(math.isfinite, kls)):
        return ""
    return (
        f"divergence: KL(behaviour, target) above {bounds.kl:g} nats a token in "
        f"{sum(not kl <= bounds.kl for kl in kls)} batches, up to {max(kls):.2f}"
    )


def gradient_exploded(norms: Sequence[float], bounds: StabilityBounds) -> str:
    if len(norms) < 10:
        return ""
    start = sorted(norms[: max(5, len(norms) // 10)])
    middle = start[len(start) // 2]
    over = sum(norm > bounds.gradient * max(middle, 1e-12) for norm in norms)
    if over < bounds.batches:
        return ""
    return (
        f"divergence: gradient norm more than {bounds.gradient:g} times its start "
        f"({middle:.2g}) in {over} batches, up to {max(norms):.2g}"
    )


def entropy_collapsed(entropy: Sequence[float], bounds: StabilityBounds) -> str:
    if not entropy or not min(entropy[-5:]) < bounds.entropy * entropy[0]:
        return ""
    return f"entropy collapse: {entropy[-1]:.3f} of {entropy[0]:.3f} nats a token"


def accuracy_oscillates(accuracy: Sequence[float], bounds: StabilityBounds) -> str:
    wide = sum(abs(now - before) > bounds.swing for before, now in itertools.pairwise(accuracy))
    turns = sum(
        (y - x) * (z - y) < 0 for x, y, z in zip(accuracy, accuracy[1:], accuracy[2:], strict=False)
    )
    if wide < 3 or turns < 3:
        return ""
    return f"oscillation: {wide} swings of more than {bounds.swing:g}"


def cut_off(shares: Sequence[float], bounds: StabilityBounds) -> str:
    if len(shares) < 3 or not min(shares[-3:]) > bounds.truncated:
        return ""
    return f"length explosion: {shares[-1]:.0%} of the answers are cut at max_new_tokens"


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """Mean height of the curve (trapezoids), so that it reads like an accuracy."""
    if len(steps) < 2 or steps[-1] == steps[0]:
        return values[-1] if values else math.nan
    total = sum(
        (b - a) * (y + z) / 2
        for a, b, y, z in zip(steps, steps[1:], values, values[1:], strict=False)
    )
    return total / (steps[-1] - steps[0])
