"""What another limit, more generators or a faster weight sync would give: simulated with the same
seeds, said in a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate.outcome import SimulationOutcome, simulate
from asyncrl.experiments.simulate.times import TimeModel, change, scale_distribution

NOTHING = 0.02  # a change of throughput below this is called none
BUSY = 0.1  # idle share below which a side is what limits, if it is less than half the other's
BUFFER_BUSY = 0.2  # the same for the buffer, whose work comes in bursts
WIDE = 0.2  # a range of the mean lag below this is not worth a word
DRIFT = 0.05  # two sides of nearly the same speed: how far the learner's may be off


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One question: `ratio` is the throughput against the base, seed by seed: mean, least, largest.

    lag_range: the mean lag if the learner is DRIFT faster or slower than its times say, of
    questions about the limit.  Where neither side is held up the lag adds up the difference of
    their speeds, and a small one moves it."""

    question: str
    ratio: float
    least: float
    largest: float
    sentence: str
    outcome: dict[str, Any]
    lag_range: tuple[float, float] | None = None


def with_limit(config: Config, limit: float) -> Config:
    """The config with another `staleness.max_lag`.  Raises ConfigError where injected lag would
    pass it.
    """
    if not (limit == math.inf or (limit >= 0 and limit == int(limit))):
        raise ConfigError(
            f"--limit {limit:g}: a staleness limit is a whole number of at least 0, or inf"
        )
    inject = config.staleness.inject
    if inject is not None and limit < (inject if isinstance(inject, int) else len(inject) - 1):
        raise ConfigError(
            f"--limit {limit:g}: below staleness.inject = {inject}; inject less, or leave the limit"
        )
    return msgspec.structs.replace(
        config, staleness=msgspec.structs.replace(config.staleness, max_lag=float(limit))
    )


def with_generators(config: Config, count: int) -> Config:
    return msgspec.structs.replace(config, generators=count)


def with_steps(config: Config, count: int) -> Config:
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, steps=count)
    )


def with_sync(times: TimeModel, factor: float) -> TimeModel:
    """Publishing and swapping `factor` times as fast."""
    return change(
        times,
        publish=scale_distribution(times.publish, 1 / factor),
        swap=scale_distribution(times.swap, 1 / factor),
    )


def with_learner(times: TimeModel, factor: float) -> TimeModel:
    """Training `factor` times as long."""
    return change(times, train=scale_distribution(times.train, factor))


def simulate_seeds(
    config: Config, times: TimeModel, seeds: int, *, evaluate: bool = True
) -> list[SimulationOutcome]:
    return [simulate(config, times, config.seed + i, evaluate=evaluate) for i in range(seeds)]


def average_outcomes(outcomes: Sequence[SimulationOutcome]) -> dict[str, Any]:
    """The mean of each number over the seeds; lag_max and tickets_max: the largest."""
    count = len(outcomes)
    out: dict[str, Any] = {}
    for name in SimulationOutcome.__struct_fields__:
        values = [getattr(o, name) for o in outcomes]
        if name in ("lag_max", "tickets_max"):
            out[name] = max(values)
        elif name in ("lag_histogram", "losses"):
            keys = sorted({limit for v in values for limit in v})
            out[name] = {str(limit): sum(v.get(limit, 0) for v in values) / count for limit in keys}
        elif name in ("max_lag", "generators", "steps"):
            out[name] = "inf" if values[0] == math.inf else int(values[0])
        else:
            out[name] = sum(values) / count
    return out


def limiting_side(outcome: dict[str, Any]) -> str:
    """Which side holds the run up, in words."""
    idle = outcome["idle_generator"]
    learner = outcome["idle_learner"]
    if max(idle, learner) < BUSY:
        return f"both sides are busy (generators idle {idle:.0%}, learner {learner:.0%})"
    if learner < BUSY and learner < idle / 2:
        return f"the learner limits it (idle {learner:.0%}; the generators {idle:.0%})"
    if idle < BUSY and idle < learner / 2:
        return f"the generators limit it (idle {idle:.0%}; the learner {learner:.0%})"
    if outcome["idle_buffer"] < BUFFER_BUSY:
        return (
            f"the buffer limits it (idle {outcome['idle_buffer']:.0%}; the generators {idle:.0%}, "
            f"the learner {learner:.0%})"
        )
    return f"both sides wait for each other (generators idle {idle:.0%}, learner {learner:.0%})"


def ask(
    question: str,
    instead: str,
    base: Sequence[SimulationOutcome],
    other: Sequence[SimulationOutcome],
    ends: Sequence[SimulationOutcome] = (),
) -> WhatIfAnswer:
    """The answer to `question`, paired by seed; `instead` names what the base has; `ends`: the same
    with a faster and a slower learner.
    """
    ratios = [o.tokens_per_s / max(b.tokens_per_s, 1e-9) for b, o in zip(base, other, strict=True)]
    mean = sum(ratios) / len(ratios)
    was = average_outcomes(base)
    now = average_outcomes(other)
    spread = f" (seeds {min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    if abs(mean - 1) < NOTHING:
        head = (
            f"{question} instead of {instead}: no throughput to speak of, {mean:.2f} times{spread}"
        )
    else:
        speeds = f"{now['tokens_per_s']:,.0f} tokens/s instead of {was['tokens_per_s']:,.0f}"
        head = f"{question} instead of {instead}: {mean:.2f} times the throughput{spread}, {speeds}"
    head = head[0].upper() + head[1:]
    lags = [now["lag_mean"], *(o.lag_mean for o in ends)]
    wide = (
        f" ({min(lags):.2f} to {max(lags):.2f} if the learner's speed is {DRIFT:.0%} off)"
        if max(lags) - min(lags) > WIDE
        else ""
    )
    tail = (
        f"mean lag {now['lag_mean']:.2f}{wide} instead of {was['lag_mean']:.2f}; then "
        f"{limiting_side(now)}."
    )
    return WhatIfAnswer(
        question=question,
        ratio=mean,
        least=min(ratios),
        largest=max(ratios),
        sentence=f"{head}; {tail}",
        outcome=now,
        lag_range=(min(lags), max(lags)) if ends else None,
    )


def answers(
    config: Config,
    times: TimeModel,
    base: Sequence[SimulationOutcome],
    limits: Sequence[float],
    more: Sequence[int],
    syncs: Sequence[float],
    *,
    evaluate: bool = True,
) -> list[WhatIfAnswer]:
    """Each question in turn, simulated with the seeds of `base`."""
    count = len(base)
    now = config.staleness.limit
    out = []
    for limit in limits:
        other = with_limit(config, limit)
        ends = [
            simulate(other, with_learner(times, found), config.seed, evaluate=evaluate)
            for found in (1 - DRIFT, 1 + DRIFT)
        ]
        out.append(
            ask(
                f"a limit of {limit:g}",
                f"{now:g}",
                base,
                simulate_seeds(other, times, count, evaluate=evaluate),
                ends,
            )
        )
    for number in more:
        changed = with_generators(config, config.generators + number)
        out.append(
            ask(
                f"{config.generators + number} generators",
                f"{config.generators}",
                base,
                simulate_seeds(changed, times, count, evaluate=evaluate),
            )
        )
    for found in syncs:
        what = f"a weight sync {found:g} times as fast"
        out.append(
            ask(
                what,
                "this one",
                base,
                simulate_seeds(config, with_sync(times, found), count, evaluate=evaluate),
            )
        )
    return out


def sweep(
    config: Config,
    times: TimeModel,
    limits: Sequence[float],
    generators: Sequence[int],
    seeds: int,
    done: Mapping[tuple[int, float], dict[str, Any]],
    *,
    evaluate: bool = True,
) -> list[dict[str, Any]]:
    """Every limit with every number of generators, with the same seeds as the questions; done:
    those that were simulated already.
    """

    def simulate_point(generators: int, limit: float) -> dict[str, Any]:
        return done.get((generators, limit)) or average_outcomes(
            simulate_seeds(
                with_limit(with_generators(config, generators), limit),
                times,
                seeds,
                evaluate=evaluate,
            )
        )

    return [simulate_point(g, limit) for g in generators for limit in limits]
