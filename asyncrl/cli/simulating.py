"""Implementation of `asyncrl simulate`, after its options are parsed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate import page, times, what_if
from asyncrl.experiments.simulate.fit import fit
from asyncrl.experiments.simulate.times import TimeModel

LIMITS = (0, 1, 2, 4, 8, 16)  # of --plot
MOST_GENERATORS = 10_000


def parse_counts(text: str) -> list[int]:
    """Parse numbers of generators such as `1,10,100`. Raises ConfigError."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= MOST_GENERATORS for count in counts):
        raise ConfigError(
            f"--generators {text}: give whole numbers from 1 to {MOST_GENERATORS}, separated by "
            "commas"
        )
    return counts


def collect_times(
    from_run: Path | None, file: Path | None, single_times: Sequence[str]
) -> tuple[TimeModel, str]:
    """Return the times and a description of their source.

    Later sources win: defaults, a run, a file, single times.
    """
    time_model = TimeModel()
    source = "defaults, those of configs/demo.toml on one 2.5 GHz core a process"
    if from_run is not None:
        time_model = fit(from_run)[0]
        source = f"fitted to {from_run}"
    if file is not None:
        time_model = times.load(file, time_model)
        source = f"{file}" + (f" on those of {from_run}" if from_run else "")
    if single_times:
        time_model = times.parse(time_model, single_times)
        source = f"{source}; {', '.join(single_times)}"
    return time_model, source


def simulate(
    config: Config,
    time_model: TimeModel,
    source: str,
    *,
    name: str,
    limits: Sequence[float],
    added_generators: Sequence[int],
    syncs: Sequence[float],
    generators: str,
    treatments: bool,
    deadline: float | None,
    seeds: int,
    steps: int | None,
    evaluate: bool,
    plot: Path | None,
) -> dict[str, Any]:
    """Return the result of the command, as the object of `--json`."""
    if steps is not None:
        learner = msgspec.structs.replace(config.learner, steps=steps)
        config = msgspec.structs.replace(config, learner=learner)
    counts = parse_counts(generators) if generators else [config.generators]
    _check_questions(config, added_generators, syncs, plot)
    if deadline is not None and not treatments:
        raise ConfigError("--deadline: belongs to --treatments")
    if treatments:
        what_if.check_treatments(config, deadline)
    base = what_if.simulate_seeds(config, time_model, seeds, evaluate=evaluate)
    limit, inject = config.staleness.limit, config.staleness.inject
    if not (limits or added_generators or syncs or treatments):
        limits = [] if inject is not None or limit == math.inf else [2 * limit or 1]
        added_generators, syncs = [1], [2.0]
    answers = what_if.answer_questions(
        config, time_model, base, limits, added_generators, syncs, evaluate=evaluate
    )
    average = what_if.average_outcomes(base)
    result: dict[str, Any] = {
        "tokens_per_s": average["tokens_per_s"],
        "idle_share": {"generator": average["idle_generator"], "learner": average["idle_learner"]},
        "lag": {key: average[f"lag_{key}"] for key in ("mean", "p95", "max", "closed_form")},
        "base": average,
        "seeds": seeds,
        "times": source,
        "limited_by": what_if.describe_limiting_side(average),
        "answers": [msgspec.structs.asdict(answer) for answer in answers],
    }
    if treatments:
        result["treatments"] = what_if.compare_treatments(
            config, time_model, seeds, deadline, evaluate=evaluate
        )
    if generators or plot is not None:
        axis = [limit]
        if plot is not None and inject is None:
            axis = sorted({*map(float, LIMITS), *map(float, limits), limit})
        outcomes = {(config.generators, limit): average}
        for asked_limit, answer in zip(limits, answers, strict=False):
            outcomes[config.generators, float(asked_limit)] = answer.outcome
        result["sweep"] = what_if.sweep(
            config, time_model, axis, counts, seeds, outcomes, evaluate=evaluate
        )
    if plot is not None:
        sentences = [f"As configured, {result['limited_by']}.", *(a.sentence for a in answers)]
        page.write(plot, name, source, result["sweep"], sentences, load.dump(config))
        result["page"] = str(plot)
    return result


def _check_questions(
    config: Config, added_generators: Sequence[int], syncs: Sequence[float], plot: Path | None
) -> None:
    if config.staleness.delay:
        raise ConfigError(
            "staleness.delay: is not simulated; leave it out, and give the tail with --time "
            "reward=pareto(LEAST,EXPONENT,MOST)"
        )
    for factor in syncs:
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigError(f"--sync {factor:g}: is a factor of speed; give a number above 0")
    for count in added_generators:
        if not 1 <= config.generators + count <= MOST_GENERATORS:
            raise ConfigError(
                f"--more {count}: {config.generators + count} generators; give a number that "
                f"leaves 1 to {MOST_GENERATORS}"
            )
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: the directory {plot.parent} does not exist")


def describe_limit(base: dict[str, Any]) -> str:
    """Describe the limit; for an automatic limit, its mean and its bound."""
    mean = base["limit_mean"]
    if base["max_lag"] in ("inf", mean):
        return str(base["max_lag"])
    return f"{mean:.2f} on average, at most {base['max_lag']}"


def format_outcome(result: dict[str, Any]) -> str:
    """Format the result for a reader."""
    base = result["base"]
    sampled = max(base["generated"], 1)
    losses = [f"{reason} {tokens / sampled:.2%}" for reason, tokens in base["losses"].items()]
    lines = [
        f"times: {result['times']}",
        f"{base['steps']} steps, {base['generators']:,} generator(s), limit "
        f"{describe_limit(base)}: {base['step_s']:.3g} s a step, "
        f"{base['tokens_per_s']:,.0f} tokens/s trained",
        f"idle: generators {base['idle_generator']:.1%}, learner {base['idle_learner']:.1%}; "
        f"{result['limited_by']}",
        f"lag: mean {base['lag_mean']:.2f} ({base['lag_in_flight']:.2f} in flight, "
        f"{base['lag_in_queue']:.2f} in queue; closed form, samples in flight / batch: "
        f"{base['lag_closed_form']:.2f}), p95 {base['lag_p95']:g}, max {base['lag_max']}: "
        + ", ".join(f"{lag}: {share:.1%}" for lag, share in base["lag_histogram"].items()),
        f"tickets in flight: mean {base['tickets_mean']:.1f}, most {base['tickets_max']}; groups "
        f"alive at a commit: {base['alive_mean']:.1f}",
        f"tokens lost: {', '.join(losses) or 'none'}",
        *(answer["sentence"] for answer in result["answers"]),
    ]
    if "sweep" in result:
        lines.append(page.make_outcome_table(result["sweep"]).as_text())
    if "treatments" in result:
        lines.append(page.make_treatment_table(result["treatments"]).as_text())
    lines.append(
        f"simulated with {result['seeds']} seed(s), {base['took_s']:.1f} s each"
        + (f"; page: {result['page']}" if "page" in result else "")
    )
    return "\n".join(lines)
