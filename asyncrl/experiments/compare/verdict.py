"""Is one arm better than another, or is it noise?  Paired by seed; pure numbers in, numbers and
sentences out.

Two questions, kept apart.  "These seeds, other prompts": the runs are as they are, and only the
finite evaluation set is uncertain (a normal interval from binomial variances).  "Other seeds":
would the difference be there in runs that nobody has made (a paired t interval over seeds; a plain
bootstrap of 3 to 8 seeds is too narrow).  Several arms: Holm's correction (1979)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.05
POWER = 0.8
EQUAL = 1e-12  # what rounding leaves of a difference


@dataclass
class Difference:
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
    def different(self) -> bool:
        return self.adjusted < LEVEL

    def word(self) -> str:
        if not self.different:
            return "no difference visible"
        return "better" if self.mean > 0 else "worse"


def paired(arm: Sequence[float], base: Sequence[float], prompts: int = 0) -> Difference:
    """arm, base: one value a seed, in the same order.  prompts: n of each accuracy; 0: no prompt
    interval.

    Accuracies come in steps of 1 / n, so a spread over seeds below that is not known and counts as
    that.  Without n, differences that are all the same get what the sign test makes of them, p =
    2^(1 - seeds), and no interval."""
    from scipy import stats  # a second of CPU: not for a command that only refuses

    d = [a - b for a, b in zip(arm, base, strict=True)]
    n = len(d)
    mean = sum(d) / len(d)
    sd = math.sqrt(sum((x - mean) ** 2 for x in d) / (n - 1)) if n > 1 else math.nan
    p = math.nan
    low = math.nan
    high = math.nan
    if n > 1 and mean and prompts:
        sd = max(sd, 1 / prompts)
    if n > 1 and sd < EQUAL:
        p, low, high = (
            (2.0 ** (1 - n), math.nan, math.nan) if abs(mean) > EQUAL else (1.0, mean, mean)
        )
    elif n > 1:
        half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * sd / math.sqrt(n)
        p = float(2 * stats.t.sf(abs(mean) / (sd / math.sqrt(n)), n - 1))
        low = mean - half
        high = mean + half
    out = Difference(mean, sd, n, p, low, high)
    if prompts:
        # Both arms answer the same prompts, so this is wide rather than narrow: their covariance,
        # which is positive, is left out.
        se = (
            math.sqrt(
                sum(a * (1 - a) + b * (1 - b) for a, b in zip(arm, base, strict=True)) / prompts
            )
            / n
        )
        half = float(stats.norm.ppf(1 - LEVEL / 2)) * se
        out.prompt_low = mean - half
        out.prompt_high = mean + half
    return out


def holm(found: Mapping[str, Difference]) -> None:
    """Fill in `adjusted` of each difference: Holm's step-down over those whose p is known."""
    known = sorted((d for d in found.values() if not math.isnan(d.p)), key=lambda d: d.p)
    worst = 0.0
    for i, d in enumerate(known):
        worst = max(worst, min(1.0, (len(known) - i) * d.p))
        d.adjusted = worst


def power(effect: float, sd: float, seeds: int, level: float = LEVEL) -> float:
    """Chance that a paired t-test over `seeds` finds a true difference of `effect` with standard
    deviation `sd` of the differences.
    """
    if seeds < 2 or sd <= 0:
        return math.nan if seeds < 2 else 1.0
    from scipy import stats

    shift = effect / sd * math.sqrt(seeds)
    edge = float(stats.t.ppf(1 - level / 2, seeds - 1))
    return float(stats.nct.sf(edge, seeds - 1, shift) + stats.nct.cdf(-edge, seeds - 1, shift))


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
    return (
        next((n for n in range(2, most + 1) if power(abs(effect), sd, n, level) >= POWER), None)
        if effect
        else None
    )


def verdict(name: str, base: str, d: Difference, what: str) -> str:
    """One sentence a reader can rely on."""
    if d.seeds < 2:
        return (
            f"{name} against {base}: {what} {d.mean:+.3f} with one seed: no verdict is "
            "possible; use --seeds 3 or more"
        )
    inside = f"{what} {d.mean:+.3f}, 95 % interval over seeds [{d.low:+.3f}, {d.high:+.3f}]"
    if d.different:
        return (
            f"{name} is {'better' if d.mean > 0 else 'worse'} than {base}: {inside}, p = "
            f"{d.adjusted:.3f} after Holm"
        )
    need = seeds_needed(d.mean, d.sd)
    more = (
        f"about {need} seeds would show a difference of this size"
        if need
        else "no practical number of seeds would show one this small"
    )
    return f"{name} against {base}: no difference visible at {d.seeds} seeds ({inside}); {more}"


# ---- stability of one run ------------------------------------------------------------------------


@dataclass
class Bounds:
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


def stability(
    accuracy: Sequence[float], rows: Sequence[Mapping[str, float]], b: Bounds | None = None
) -> list[str]:
    """What is wrong with a run's course, by rule; empty: stable.  accuracy: held-out, by
    evaluation; rows: metrics by step.
    """
    b = b or Bounds()
    out = []
    best = 0.0
    below = 0
    for x in accuracy:
        best = max(best, x)
        below = below + 1 if x < best / 2 else 0
        if below == b.evaluations:
            out.append(
                f"collapse: accuracy below half its best ({best:.2f}) for {b.evaluations} "
                "evaluations"
            )
            break
    kls = [r["kl/behavior_target_k3"] for r in rows if "kl/behavior_target_k3" in r]
    if sum(x > b.kl for x in kls) >= b.batches or not all(map(math.isfinite, kls)):
        out.append(
            f"divergence: KL(behaviour, target) above {b.kl:g} nats a token in "
            f"{sum(not x <= b.kl for x in kls)} batches, up to {max(kls):.2f}"
        )
    norms = [r["optim/grad_norm"] for r in rows if "optim/grad_norm" in r]
    if len(norms) >= 10:
        start = sorted(norms[: max(5, len(norms) // 10)])
        middle = start[len(start) // 2]
        over = sum(x > b.gradient * max(middle, 1e-12) for x in norms)
        if over >= b.batches:
            out.append(
                f"divergence: gradient norm more than {b.gradient:g} times its start "
                f"({middle:.2g}) in {over} batches, up to {max(norms):.2g}"
            )
    entropy = [r["policy/entropy"] for r in rows if "policy/entropy" in r]
    if entropy and min(entropy[-5:]) < b.entropy * entropy[0]:
        out.append(f"entropy collapse: {entropy[-1]:.3f} of {entropy[0]:.3f} nats a token")
    swings = [abs(y - x) for x, y in itertools.pairwise(accuracy)]
    turns = sum(
        (y - x) * (z - y) < 0 for x, y, z in zip(accuracy, accuracy[1:], accuracy[2:], strict=False)
    )
    if sum(s > b.swing for s in swings) >= 3 and turns >= 3:
        out.append(
            f"oscillation: {sum(s > b.swing for s in swings)} swings of more than {b.swing:g}"
        )
    cut = [r["answer/truncated_share"] for r in rows if "answer/truncated_share" in r]
    if len(cut) >= 3 and min(cut[-3:]) > b.truncated:
        out.append(f"length explosion: {cut[-1]:.0%} of the answers are cut at max_new_tokens")
    return out


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """Mean height of the curve (trapezoids), so that it reads like an accuracy."""
    if len(steps) < 2 or steps[-1] == steps[0]:
        return values[-1] if values else math.nan
    total = sum(
        (b - a) * (y + z) / 2
        for a, b, y, z in zip(steps, steps[1:], values, values[1:], strict=False)
    )
    return total / (steps[-1] - steps[0])
