"""Questions about a simulated run, all answered with the seeds of the base.

They ask for the effect of another limit, more generators, a faster weight sync or another treatment
of late samples.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate import fit
from asyncrl.experiments.simulate.simulation import Simulation, SimulationOutcome
from asyncrl.experiments.simulate.times import TimeModel
from asyncrl.records import rundir
from asyncrl.supervise.report import advice

replace = msgspec.structs.replace
NOTHING = 0.02  # a smaller change of throughput is reported as none
BUSY = 0.1  # a side limits the run if it is idle for less than this and half the other's share
BUFFER_BUSY = 0.2  # the same for the buffer, whose work comes in bursts
WIDE = 0.2  # a smaller range of the mean lag is not reported
DRIFT = 0.05  # assumed error of the learner's speed

Outcome = dict[str, Any]  # SimulationOutcome averaged over seeds
# simulates a config once per seed: `simulate_seeds` with its times, seeds and evaluation given
SimulateSeeds = Callable[..., list[SimulationOutcome]]
TREATMENTS: dict[str, Literal["pace", "drop", "mask", "downweight"]] = {
    "wait": "pace",
    "mask": "mask",
    "downweight": "downweight",
    "drop": "drop",
    "deadline": "pace",  # of sessions
}


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question.

    ratio, least, largest: throughput over the base, paired by seed.
    lag_range: of questions about the limit, the mean lag if the learner is DRIFT faster or slower.
    If neither side waits, the lag accumulates the difference of their speeds, so a small error
    changes it.
    """

    question: str
    ratio: float
    least: float
    largest: float
    sentence: str
    outcome: Outcome
    lag_range: tuple[float, float] | None = None


def change_limit(config: Config, limit: float) -> Config:
    """Return the config with another `staleness.max_lag`.

    Raises ConfigError if `limit` is invalid or below the injected lag.
    """
    if not (limit == math.inf or (limit >= 0 and limit == int(limit))):
        raise ConfigError(
            f"--limit {limit:g}: a staleness limit is a whole number of at least 0, or inf"
        )
    inject = config.staleness.inject
    if inject is not None and limit < (inject if isinstance(inject, int) else len(inject) - 1):
        raise ConfigError(
            f"--limit {limit:g}: below staleness.inject = {inject}; lower the injected lag, or "
            "keep the limit"
        )
    return replace(config, staleness=replace(config.staleness, max_lag=float(limit)))


def simulate_seeds(
    config: Config,
    times: TimeModel,
    seeds: int,
    *,
    evaluate: bool = True,
    scale: Mapping[str, float] | None = None,
) -> list[SimulationOutcome]:
    """Simulate `config` with its seed and the next ones. scale: factors of the times by name."""
    return [
        Simulation(config, times, seed, evaluate=evaluate, scale=scale).run()
        for seed in range(config.seed, config.seed + seeds)
    ]


def average_outcomes(outcomes: Sequence[SimulationOutcome]) -> Outcome:
    """Average each number over the seeds; take the largest lag_max and tickets_max."""
    count = len(outcomes)
    averages: Outcome = {}
    for name in SimulationOutcome.__struct_fields__:
        values = [getattr(outcome, name) for outcome in outcomes]
        if name in ("lag_max", "tickets_max"):
            averages[name] = max(values)
        elif name in ("lag_histogram", "losses"):
            keys = sorted({key for value in values for key in value})
            averages[name] = {str(k): sum(v.get(k, 0) for v in values) / count for k in keys}
        elif name in ("max_lag", "generators", "steps"):
            averages[name] = "inf" if values[0] == math.inf else int(values[0])
        else:
            averages[name] = sum(values) / count
    return averages


def describe_limiting_side(outcome: Outcome) -> str:
    """Describe the side that limits the run."""
    idle = outcome["idle_generator"]
    learner = outcome["idle_learner"]
    both = f"(generators idle {idle:.0%}, learner {learner:.0%})"
    if max(idle, learner) < BUSY:
        return f"both sides are busy {both}"
    if learner < BUSY and learner < idle / 2:
        return f"the learner limits it (idle {learner:.0%}; the generators {idle:.0%})"
    if idle < BUSY and idle < learner / 2:
        return f"the generators limit it (idle {idle:.0%}; the learner {learner:.0%})"
    if outcome["idle_buffer"] < BUFFER_BUSY:
        return (
            f"the buffer limits it (idle {outcome['idle_buffer']:.0%}; the generators {idle:.0%}, "
            f"the learner {learner:.0%})"
        )
    return f"both sides wait for each other {both}"


def answer(
    question: str,
    instead: str,
    base: Sequence[SimulationOutcome],
    changed: Sequence[SimulationOutcome],
    drifted: Sequence[SimulationOutcome] = (),
) -> WhatIfAnswer:
    """Compare `changed` with `base`, paired by seed.

    instead: the setting of the base.
    drifted: `changed` with a faster and a slower learner.
    """
    ratios = [
        o.tokens_per_s / max(b.tokens_per_s, 1e-9) for b, o in zip(base, changed, strict=True)
    ]
    ratio, least, largest = sum(ratios) / len(ratios), min(ratios), max(ratios)
    before, after = average_outcomes(base), average_outcomes(changed)
    spread = f" (seeds {least:.2f} to {largest:.2f})" if len(ratios) > 1 else ""
    if abs(ratio - 1) < NOTHING:
        gain = f"about the same throughput, {ratio:.2f} times{spread}"
    else:
        gain = (
            f"{ratio:.2f} times the throughput{spread}, {after['tokens_per_s']:,.0f} tokens/s "
            f"instead of {before['tokens_per_s']:,.0f}"
        )
    lags = [after["lag_mean"], *(outcome.lag_mean for outcome in drifted)]
    low, high = min(lags), max(lags)
    uncertainty = f" ({low:.2f} to {high:.2f} if the learner's speed is {DRIFT:.0%} off)"
    return WhatIfAnswer(
        question=question,
        ratio=ratio,
        least=least,
        largest=largest,
        sentence=f"{question[0].upper()}{question[1:]} instead of {instead}: {gain}; mean lag "
        f"{after['lag_mean']:.2f}{uncertainty if high - low > WIDE else ''} instead of "
        f"{before['lag_mean']:.2f}; then {describe_limiting_side(after)}.",
        outcome=after,
        lag_range=(low, high) if drifted else None,
    )


def answer_questions(
    config: Config,
    run: SimulateSeeds,
    base: Sequence[SimulationOutcome],
    limits: Sequence[float],
    added_generators: Sequence[int],
    syncs: Sequence[float],
) -> list[WhatIfAnswer]:
    """Answer each question. base: the outcomes of `config`."""
    answers = []
    for limit in limits:
        changed = change_limit(config, limit)
        drifted = [
            outcome
            for factor in (1 - DRIFT, 1 + DRIFT)
            for outcome in run(changed, seeds=1, scale={"train": factor})
        ]
        instead = f"{config.staleness.limit:g}"
        answers.append(answer(f"a limit of {limit:g}", instead, base, run(changed), drifted))
    for extra in added_generators:
        count = config.generators + extra
        outcomes = run(replace(config, generators=count))
        answers.append(answer(f"{count} generators", f"{config.generators}", base, outcomes))
    for factor in syncs:
        outcomes = run(config, scale={"publish": 1 / factor, "swap": 1 / factor})
        question = f"a weight sync {factor:g} times as fast"
        answers.append(answer(question, "the present one", base, outcomes))
    return answers


def predict(run_dir: Path) -> dict[str, str]:
    """Return rule of advice -> predicted effect of a higher limit or one more generator.

    Empty for a run without such advice, or without a trace to fit times to.
    """
    config = load.load(run_dir / "config.toml")
    is_finished = rundir.is_finished(run_dir, config.learner.steps)
    findings, _ = advice.list_advice(config, run_dir, ended=is_finished)
    rules = {finding.name for finding in findings}
    limits: dict[str, list[float]] = {
        "learner_waits": [],
        "both_wait": [config.staleness.limit + 1],
    }
    predictions = {}
    for rule in rules & limits.keys():
        try:
            times, config = fit.fit(run_dir)
            run = functools.partial(simulate_seeds, times=times, seeds=1, evaluate=False)
            more = [] if limits[rule] else [1]
            (prediction,) = answer_questions(config, run, run(config), limits[rule], more, [])
        except ConfigError:
            continue
        predictions[rule] = prediction.sentence.rstrip(".")
    return predictions


def sweep(
    config: Config,
    run: SimulateSeeds,
    limits: Sequence[float],
    generators: Sequence[int],
    known_outcomes: Mapping[tuple[int, float], Outcome],
) -> list[Outcome]:
    """Simulate every limit with every number of generators; reuse the known outcomes."""
    return [
        known_outcomes.get((count, limit))
        or average_outcomes(run(change_limit(replace(config, generators=count), limit)))
        for count, limit in itertools.product(generators, limits)
    ]


# ---- treatments of late samples ------------------------------------------------------------------


def check_treatments(config: Config, deadline_s: float | None = None) -> None:
    """Raise ConfigError if a treatment is impossible."""
    staleness = config.staleness
    if staleness.ess_floor or math.isinf(staleness.limit):
        raise ConfigError("--treatments: needs a fixed limit: set staleness.max_lag to a number")
    if staleness.inject is not None:
        raise ConfigError(
            "--treatments: injected lag never exceeds its limit: leave out staleness.inject"
        )
    if staleness.order != "auto":
        raise ConfigError("--treatments: each treatment sets its order: leave out staleness.order")
    if deadline_s is not None and not config.agent.uses_sessions:
        raise ConfigError("--deadline: belongs to sessions, and the config has no [agent]")
    if deadline_s is not None and not (0 < deadline_s < math.inf):
        raise ConfigError(f"--deadline {deadline_s:g}: give seconds above 0")


def compare_treatments(
    config: Config, simulate: SimulateSeeds, deadline_s: float | None = None
) -> list[Outcome]:
    """Simulate every treatment of late samples, and for sessions `wait` with a deadline.

    deadline_s: by default the time that a tenth of the sessions exceed under `wait`.
    Raises ConfigError.
    """
    check_treatments(config, deadline_s)
    rows: list[Outcome] = []
    for name, on_exceed in TREATMENTS.items():
        if name == "deadline":
            if not config.agent.uses_sessions:
                break
            limit = rows[0]["sample_p90_s"] if deadline_s is None else deadline_s
            config = replace(config, agent=replace(config.agent, deadline_s=limit))
        staleness = replace(config.staleness, on_exceed=on_exceed, wait=0.0)
        outcome = average_outcomes(simulate(replace(config, staleness=staleness)))
        deadline = config.agent.deadline_s if config.agent.uses_sessions else None
        rows.append({"name": name, "deadline_s": deadline} | summarize_treatment(outcome))
    return rows


def summarize_treatment(outcome: Outcome) -> Outcome:
    """Return the costs of a treatment, as shares in [0, 1].

    - learner_idle: of the run's seconds
    - dropped, masked: of the sampled tokens
    - downweighted: of the trained tokens' weight
    - cut: of the samples
    """
    losses, sampled = outcome["losses"], max(outcome["generated"], 1)
    dropped = losses.get("dropped_stale", 0) + losses.get("abandoned", 0)
    copied = ("tokens_per_s", "lag_mean", "lag_p95", "lag_max", "sample_p90_s")
    return {name: outcome[name] for name in copied} | {
        "learner_idle": outcome["idle_learner"],
        "dropped": dropped / sampled,
        "masked": losses.get("masked_stale", 0) / sampled,
        "downweighted": outcome["faded_share"],
        "cut": outcome["cut_share"],
    }
