"""What `asyncrl simulate` does, once its options are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.experiments.simulate import page, questions, times
from asyncrl.experiments.simulate import treatments as late
from asyncrl.experiments.simulate.fit import fit
from asyncrl.experiments.simulate.times import TimeModel

LIMITS = (0, 1, 2, 4, 8, 16)  # of --plot
MOST_GENERATORS = 10_000


def numbers(words: str, what: str, least: int, most: int) -> list[int]:
    """`1,10,100` as numbers.  Raises ConfigError."""
    try:
        found = [int(x) for x in words.split(",")]
    except ValueError:
        found = []
    if not found or not all(least <= x <= most for x in found):
        raise ConfigError(
            f"{what} {words}: write whole numbers from {least} to {most}, with commas between them"
        )
    return found


def times_for(
    from_run: Path | None, file: Path | None, words: Sequence[str]
) -> tuple[TimeModel, str]:
    """The times, and in words where they are from: defaults, then a run, then a file, then single
    ones.
    """
    found = TimeModel()
    source = "defaults, those of configs/demo.toml on one 2.5 GHz core a process"
    if from_run is not None:
        found = fit(from_run)[0]
        source = f"fitted to {from_run}"
    if file is not None:
        found = times.load(file, found)
        source = f"{file}" + (f" on those of {from_run}" if from_run else "")
    if words:
        found = times.parse(found, words)
        source = f"{source}; {', '.join(words)}"
    return found, source


def simulate(
    config: Config,
    known: TimeModel,
    source: str,
    *,
    name: str,
    limits: Sequence[float],
    more: Sequence[int],
    syncs: Sequence[float],
    generators: str,
    treatments: bool,
    deadline: float | None,
    seeds: int,
    steps: int | None,
    evaluate: bool,
    plot: Path | None,
) -> dict[str, Any]:
    """Everything that the command shows, as one object."""
    if config.staleness.delay:
        raise ConfigError(
            "staleness.delay: is not simulated; leave it out, and give the tail by --time "
            "reward=pareto(LEAST,EXPONENT,MOST)"
        )
    if steps is not None:
        config = questions.with_steps(config, steps)
    _check_syncs(syncs)
    if deadline is not None and not treatments:
        raise ConfigError("--deadline: belongs to --treatments")
    if treatments:
        late.refuse(config)
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no directory {plot.parent}")
    counts = (
        numbers(generators, "--generators", 1, MOST_GENERATORS)
        if generators
        else [config.generators]
    )
    _check_more(config.generators, more)
    base = questions.simulate_seeds(config, known, seeds, evaluate=evaluate)
    if not (limits or more or syncs or treatments):
        limit = config.staleness.limit
        inject = config.staleness.inject
        limits = [] if inject is not None or limit == math.inf else [2 * limit or 1]
        more = [1]
        syncs = [2.0]
    answers = questions.answers(config, known, base, limits, more, syncs, evaluate=evaluate)
    shown = questions.average_outcomes(base)
    out: dict[str, Any] = {
        "tokens_per_s": shown["tokens_per_s"],
        "idle_share": {"generator": shown["idle_generator"], "learner": shown["idle_learner"]},
        "lag": {k: shown[f"lag_{k}"] for k in ("mean", "p95", "max")},
        "base": shown,
        "seeds": seeds,
        "times": source,
        "limited_by": questions.limiting_side(shown),
        "answers": [msgspec.structs.asdict(a) for a in answers],
    }
    if treatments:
        rows = late.compare(config, known, seeds, deadline, evaluate=evaluate)
        out["treatments"] = [msgspec.structs.asdict(row) for row in rows]
    if generators or plot is not None:
        now = config.staleness.limit
        line = (
            sorted({*map(float, LIMITS), *map(float, limits), now})
            if plot is not None and config.staleness.inject is None
            else [now]
        )
        done = {(config.generators, now): shown} | {
            (config.generators, float(k)): a.outcome for k, a in zip(limits, answers, strict=False)
        }
        out["sweep"] = questions.sweep(config, known, line, counts, seeds, done, evaluate=evaluate)
    if plot is not None:
        sentences = [f"As configured, {out['limited_by']}.", *(a.sentence for a in answers)]
        out["page"] = str(
            page.write(plot, name, source, out["sweep"], sentences, load.dump(config))
        )
    return out


def _check_syncs(syncs: Sequence[float]) -> None:
    for factor in syncs:
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigError(f"--sync {factor:g}: how many times as fast; a number above 0")


def _check_more(generators: int, more: Sequence[int]) -> None:
    for added in more:
        if not 1 <= generators + added <= MOST_GENERATORS:
            raise ConfigError(
                f"--more {added}: {generators + added} generators; write one that leaves 1 to "
                f"{MOST_GENERATORS}"
            )


def limit_text(base: dict[str, Any]) -> str:
    """The limit; where it set itself, its mean and its bound."""
    mean = base["limit_mean"]
    if base["max_lag"] in ("inf", mean):
        return str(base["max_lag"])
    return f"{mean:.2f} on average, at most {base['max_lag']}"


def format_outcome(out: dict[str, Any]) -> str:
    """The same for a reader."""
    base = out["base"]
    lines = [
        f"times: {out['times']}",
        f"{base['steps']} steps, {base['generators']:,} generator(s), limit {limit_text(base)}: "
        f"{base['step_s']:.3g} s a step, {base['tokens_per_s']:,.0f} tokens/s trained",
        f"idle: generators {base['idle_generator']:.1%}, learner {base['idle_learner']:.1%}; "
        f"{out['limited_by']}",
        f"lag: mean {base['lag_mean']:.2f} ({base['lag_in_flight']:.2f} in flight, "
        f"{base['lag_in_queue']:.2f} in queue), p95 {base['lag_p95']:g}, max {base['lag_max']}: "
        + ", ".join(f"{k}: {v:.1%}" for k, v in base["lag_histogram"].items()),
        f"tickets in flight: mean {base['tickets_mean']:.1f}, most {base['tickets_max']}; groups "
        f"alive at a commit: {base['alive_mean']:.1f}",
        "tokens lost: "
        + (
            ", ".join(f"{k} {v / max(base['generated'], 1):.2%}" for k, v in base["losses"].items())
            or "none"
        ),
    ]
    lines += [a["sentence"] for a in out["answers"]]
    if "sweep" in out:
        rows = [page.HEAD, *(page.outcome_row(o) for o in out["sweep"])]
        widths = [max(len(r[i]) for r in rows) for i in range(len(page.HEAD))]
        lines += ["  ".join(x.rjust(w) for x, w in zip(r, widths, strict=True)) for r in rows]
    if "treatments" in out:
        lines += late.table([late.Treatment(**row) for row in out["treatments"]])
    took = base["took_s"]
    lines.append(
        f"simulated with {out['seeds']} seed(s), {took:.1f} s each"
        + (f"; page: {out['page']}" if "page" in out else "")
    )
    return "\n".join(lines)
