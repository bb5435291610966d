"""The result of `asyncrl simulate`: its JSON, its text, and a page of plots against the limit."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import read_table
from asyncrl.experiments.simulate import times, what_if
from asyncrl.experiments.simulate.fit import fit
from asyncrl.experiments.simulate.times import TimeModel
from asyncrl.experiments.simulate.what_if import Outcome
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import ListBlock, PagePlot, PlotBlock, PlotLine, TableBlock, TextBlock

LIMITS = (0, 1, 2, 4, 8, 16)  # of --plot
MOST_GENERATORS = 10_000
OUTCOME_COLUMNS, TREATMENT_COLUMNS, PLOTS = read_table(__file__).values()


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
        time_model, source = fit(from_run)[0], f"fitted to {from_run}"
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
        config = what_if.replace(config, learner=what_if.replace(config.learner, steps=steps))
    counts = parse_counts(generators) if generators else [config.generators]
    _check_questions(config, added_generators, syncs, plot)
    if deadline is not None and not treatments:
        raise ConfigError("--deadline: belongs to --treatments")
    if treatments:
        what_if.check_treatments(config, deadline)
    run = functools.partial(
        what_if.simulate_seeds, times=time_model, seeds=seeds, evaluate=evaluate
    )
    base = run(config)
    limit, inject = config.staleness.limit, config.staleness.inject
    if not (limits or added_generators or syncs or treatments):
        limits = [] if inject is not None or limit == math.inf else [2 * limit or 1]
        added_generators, syncs = [1], [2.0]
    answers = what_if.answer_questions(config, run, base, limits, added_generators, syncs)
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
        result["treatments"] = what_if.compare_treatments(config, run, deadline)
    if generators or plot is not None:
        axis = [limit]
        if plot is not None and inject is None:
            axis = sorted({*map(float, LIMITS), *map(float, limits), limit})
        outcomes = {(config.generators, limit): average}
        for asked_limit, answer in zip(limits, answers, strict=False):
            outcomes[config.generators, float(asked_limit)] = answer.outcome
        result["sweep"] = what_if.sweep(config, run, axis, counts, outcomes)
    if plot is not None:
        sentences = [f"As configured, {result['limited_by']}.", *(a.sentence for a in answers)]
        write_page(plot, name, source, result["sweep"], sentences, load.dump(config))
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


def make_table(
    columns: Mapping[str, str], outcomes: Sequence[Outcome], heading: str = ""
) -> TableBlock:
    """Make a table of outcomes or treatments. columns: head -> format of an outcome."""
    rows = []
    for outcome in outcomes:
        row = dict(outcome)
        if "name" in row:
            row["label"] = row["name"]
            if row["name"] == "deadline":
                row["label"] += f" {row['deadline_s']:.3g} s"
        else:
            row["lost"] = sum(row["losses"].values()) / max(row["generated"], 1)
        rows.append([column.format(**row) for column in columns.values()])
    return TableBlock(tuple(columns), rows, heading=heading, text_columns=0)


def format_result(result: dict[str, Any]) -> str:
    """Format the result for a reader."""
    base = result["base"]
    limit, mean, sampled = base["max_lag"], base["limit_mean"], max(base["generated"], 1)
    if limit not in ("inf", mean):  # an automatic one
        limit = f"{mean:.2f} on average, at most {limit}"
    histogram = [f"{lag}: {share:.1%}" for lag, share in base["lag_histogram"].items()]
    losses = [f"{reason} {tokens / sampled:.2%}" for reason, tokens in base["losses"].items()]
    lines = [
        f"times: {result['times']}",
        "{steps} steps, {generators:,} generator(s), limit {limit}: {step_s:.3g} s a step, "
        "{tokens_per_s:,.0f} tokens/s trained",
        "idle: generators {idle_generator:.1%}, learner {idle_learner:.1%}; {limited_by}",
        "lag: mean {lag_mean:.2f} ({lag_in_flight:.2f} in flight, {lag_in_queue:.2f} in queue; "
        "closed form, samples in flight / batch: {lag_closed_form:.2f}), p95 {lag_p95:g}, max "
        "{lag_max}: {histogram}",
        "tickets in flight: mean {tickets_mean:.1f}, most {tickets_max}; groups alive at a commit: "
        "{alive_mean:.1f}",
        "tokens lost: {lost}",
    ]
    values = base | {
        "limit": limit,
        "limited_by": result["limited_by"],
        "histogram": ", ".join(histogram),
        "lost": ", ".join(losses) or "none",
    }
    lines[1:] = [line.format(**values) for line in lines[1:]]
    lines += [answer["sentence"] for answer in result["answers"]]
    if "sweep" in result:
        lines.append(make_table(OUTCOME_COLUMNS, result["sweep"]).as_text())
    if "treatments" in result:
        lines.append(make_table(TREATMENT_COLUMNS, result["treatments"]).as_text())
    page = f"; page: {result['page']}" if "page" in result else ""
    lines.append(f"simulated with {result['seeds']} seed(s), {base['took_s']:.1f} s each{page}")
    return "\n".join(lines)


def write_page(
    path: Path,
    name: str,
    source: str,
    points: Sequence[Outcome],
    sentences: Sequence[str],
    config: str,
) -> None:
    """Write the page atomically. source: of the times; config: as TOML."""
    counts = sorted({point["generators"] for point in points})
    limits = list(dict.fromkeys(f"{point['max_lag']}" for point in points))
    plots = []
    for title, (unit, lines) in PLOTS.items():
        plot = PagePlot(title, unit, [], "staleness.max_lag", x_names=limits)
        plots.append(plot)
        for color, count in enumerate(counts):
            selected = [point for point in points if point["generators"] == count]
            suffix = f"{count:,} generator{'s' * (count > 1)}" if len(counts) > 1 else ""
            xs = [limits.index(f"{point['max_lag']}") for point in selected]
            for key, label, dash in lines:
                label = ", ".join(filter(None, (label, suffix))) or unit
                ys = [point[key] for point in selected]
                plot.lines.append(PlotLine(label, xs, ys, color=color, dash=dash))
    blocks = [
        ListBlock(sentences),
        PlotBlock(plots),
        make_table(OUTCOME_COLUMNS, points, "Numbers"),
        TextBlock(config, heading="Configuration", style="pre"),
    ]
    subtitle = f"simulated, no model; times: {source}"
    atomic_write.write(path, page_kit.render(name, subtitle, blocks, {"simulation": points}))
