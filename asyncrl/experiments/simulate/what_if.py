"""Questions about a simulated run, all answered with the seeds of the base, as text and a page.

They ask for the effect of another limit, more generators, a faster weight sync or another treatment
of late samples.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from asyncrl.config import load, rules
from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import fill, read_table
from asyncrl.experiments.diagnose import RunLog
from asyncrl.experiments.simulate import times
from asyncrl.experiments.simulate.simulation import Outcome, Simulation
from asyncrl.experiments.simulate.times import TimeModel, fit, fit_log
from asyncrl.records import atomic_write, page_kit, rundir
from asyncrl.records.health_checks import match_rules
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import ListBlock, PagePlot, PlotBlock, PlotLine, TableBlock, TextBlock
from asyncrl.supervise.report import advice

replace = msgspec.structs.replace
DRIFT = 0.05  # assumed error of the learner's speed
LIMITS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)  # of --plot
MOST_GENERATORS = 10_000
TREATMENTS, OUTCOME_COLUMNS, TREATMENT_COLUMNS, PLOTS, TEXTS = read_table(__file__).values()

# simulates a config once per seed: `simulate_seeds` with its times, seeds and evaluation given
SimulateSeeds = Callable[..., list[Outcome]]


def collect_times(
    from_run: Path | RunLog | None, file: Path | None, single_times: Sequence[str], config: Config
) -> tuple[list[TimeModel], str]:
    """Return the times by seed, and a description of their source.

    Later sources win: defaults, a run, a file, single times.
    """

    def override(time_model: TimeModel) -> TimeModel:
        return times.parse(times.load(file, time_model) if file else time_model, single_times)

    models = [TimeModel()]
    source = "defaults, those of configs/demo.toml on one 2.5 GHz core a process"
    if isinstance(from_run, RunLog):
        train = override(models[0])  # with `train` alone it has no tokens
        update_s = train.train if train.train_tokens is None else None
        models, source = fit_log(from_run, config, update_s)
    elif from_run is not None:
        models, source = [fit(from_run)], f"fitted to {from_run}"
    if file is not None:
        source = f"{file}" + (f" on those of {source}" if from_run else "")
    return [*map(override, models)], "; ".join([source, ", ".join(single_times)]).rstrip("; ")


def simulate_seeds(
    config: Config,
    times: TimeModel | Sequence[TimeModel],
    seeds: int,
    *,
    evaluate: bool = True,
    **changes: Any,
) -> list[Outcome]:
    """Simulate `config` with its seed and the next ones. changes: see `Simulation`.

    times: one for all seeds, or several in turn.
    """
    models = [times] if isinstance(times, TimeModel) else times
    return [
        Simulation(
            config, models[i % len(models)], config.seed + i, evaluate=evaluate, **changes
        ).run()
        for i in range(seeds)
    ]


def average_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Average each number over the seeds; take the largest lag_max and tickets_max."""
    averages: Outcome = {}
    for name, first in outcomes[0].items():
        values = [outcome[name] for outcome in outcomes]
        if name in ("lag_max", "tickets_max"):
            averages[name] = max(values)
        elif isinstance(first, dict):
            keys = sorted({key for value in values for key in value})
            averages[name] = {str(key): fmean([x.get(key, 0) for x in values]) for key in keys}
        elif name in ("max_lag", "generators", "steps"):
            averages[name] = "inf" if first == inf else int(first)
        else:
            averages[name] = fmean(values)
    return averages


def describe_limiting_side(outcome: Outcome) -> str:
    """Describe the side that limits the run."""
    idle, learner = outcome["idle_generator"], outcome["idle_learner"]
    excess = {"learner_excess": learner - idle / 2, "generator_excess": idle - learner / 2}
    return match_rules("limiting_side", outcome | excess)[0].said


# ---- questions -----------------------------------------------------------------------------------


def change_limit(config: Config, limit: float) -> Config:
    """Return the config with another `staleness.max_lag`.

    Raises ConfigError if `limit` is invalid or below the injected lag.
    """
    if not (limit == inf or (limit >= 0 and limit == int(limit))):
        raise ConfigError(
            f"--limit {limit:g}: a staleness limit is a whole number of at least 0, or inf"
        )
    if limit < config.staleness.most_injected:
        raise ConfigError(
            f"--limit {limit:g}: below staleness.inject = {config.staleness.inject}; lower the "
            "injected lag, or keep the limit"
        )
    return replace(config, staleness=replace(config.staleness, max_lag=float(limit)))


def answer(
    question: str,
    instead: str,
    base: Sequence[Outcome],
    changed: Sequence[Outcome],
    drifted: Sequence[Outcome] = (),
) -> JsonObject:
    """Compare `changed` with `base`, paired by seed.

    instead: the setting of the base.
    drifted: `changed` with a learner that is DRIFT faster and slower. If neither side waits, the
        lag accumulates the difference of their speeds, so a small error changes it (`lag_range`).
    """
    before, after = average_outcomes(base), average_outcomes(changed)

    def compare(name: str) -> list[float]:
        pairs = zip(changed, base, strict=True)
        return [new[name] / max(old[name], 1e-9) for new, old in pairs]

    ratios, steps = compare("tokens_per_s"), compare("step_s")
    lags = [outcome["lag_mean"] for outcome in (after, *drifted)]
    result = {
        "question": question,
        "ratio": fmean(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "step_ratio": fmean(steps),
        "step_least": min(steps),
        "step_largest": max(steps),
        "outcome": after,
        "lag_range": (min(lags), max(lags)) if drifted else None,
    }
    sentence = fill(
        TEXTS["answer"],
        **result,
        instead=instead,
        seeds=len(ratios),
        before=before,
        drift=DRIFT,
        limited_by=describe_limiting_side(after),
    )
    return result | {"sentence": sentence.strip()}


def ask(config: Config, kind: str, value: Any) -> tuple[str, object, Config, JsonObject]:
    """Return a question, the present setting, the changed config and keywords of its simulation."""
    learner, generator = config.learner, config.generator
    match kind:
        case "limits":
            limit = f"{config.staleness.limit:g}"
            return f"a limit of {value:g}", limit, change_limit(config, value), {}
        case "added_generators":
            count = config.generators + value
            changed = replace(config, generators=count)
            return f"{count} generators", config.generators, changed, {}
        case "syncs":
            scale = {"publish": 1 / value, "swap": 1 / value}
            question = f"a weight sync {value:g} times as fast"
            return question, "the present one", config, {"scale": scale}
        case "threads":
            return f"{value} learner threads", learner.threads, config, {"threads": value}
        case "groups":
            changed = replace(config, learner=replace(learner, groups=value))
            return f"{value} groups a batch", learner.groups, changed, {}
    changed = replace(config, generator=replace(generator, max_new_tokens=value))
    return f"at most {value} tokens a completion", generator.max_new_tokens, changed, {}


def answer_questions(
    config: Config,
    run: SimulateSeeds,
    base: Sequence[Outcome],
    questions: Mapping[str, Sequence[float]],
) -> list[JsonObject]:
    """Answer questions by kind, and all together if there are several kinds.

    base: the outcomes of `config`.
    """
    answers = []
    asked = [(kind, value) for kind, values in questions.items() for value in values]
    for kind, value in asked:
        question, instead, changed, how = ask(config, kind, value)
        drifts: list[Outcome] = []
        if kind == "limits":
            drifts = [run(changed, seeds=1, scale={"train": 1 + x})[0] for x in (-DRIFT, DRIFT)]
        answers.append(answer(question, f"{instead}", base, run(changed, **how), drifts))
    if len(asked) == len({kind for kind, _ in asked}) > 1:
        together, keywords = config, JsonObject()
        for kind, value in asked:
            _, _, together, how = ask(together, kind, value)
            keywords |= how
        question = " and ".join(answer["question"] for answer in answers)
        answers.append(answer(question, "the present settings", base, run(together, **keywords)))
    return answers


def predict(run_dir: Path) -> dict[str, str]:
    """Return rule of advice -> predicted effect of a higher limit or one more generator.

    Empty for a run without such advice, or without a trace to fit times to.
    """
    config = load.load(run_dir / "config.toml")
    is_finished = rundir.is_finished(run_dir, config.learner.steps)
    questions: dict[str, JsonObject] = {
        "learner_waits": {"added_generators": [1]},
        "both_wait": {"limits": [config.staleness.limit + 1]},
    }
    predictions = {}
    for finding in advice.list_advice(config, run_dir, ended=is_finished)[0]:
        if question := questions.get(finding.name):
            with contextlib.suppress(ConfigError):
                run = functools.partial(simulate_seeds, times=fit(run_dir), seeds=1, evaluate=False)
                (prediction,) = answer_questions(config, run, run(config), question)
                predictions[finding.name] = prediction["sentence"].rstrip(".")
    return predictions


# ---- treatments of late samples ------------------------------------------------------------------


def compare_treatments(
    config: Config, simulate: SimulateSeeds, deadline_s: float | None = None
) -> list[Outcome]:
    """Simulate every treatment of late samples, and for sessions `wait` with a deadline.

    deadline_s: by default the time that a tenth of the sessions exceed under `wait`.
    """
    rows: list[Outcome] = []
    agent = config.agent
    for name, on_exceed in TREATMENTS.items():
        if name == "deadline":
            if not agent.uses_sessions:
                break
            agent = replace(agent, deadline_s=deadline_s or rows[0]["sample_p90_s"])
        staleness = replace(config.staleness, on_exceed=on_exceed, wait=0.0)
        outcome = average_outcomes(simulate(replace(config, agent=agent, staleness=staleness)))
        deadline = agent.deadline_s if agent.uses_sessions else None
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


# ---- the command ---------------------------------------------------------------------------------


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


def simulate(
    config: Config,
    time_models: Sequence[TimeModel],
    source: str,
    *,
    name: str,
    generators: str = "",
    treatments: bool = False,
    deadline: float | None = None,
    seeds: int,
    steps: int | None = None,
    evaluate: bool,
    plot: Path | None = None,
    **questions: Sequence[float],
) -> JsonObject:
    """Return the result of the command, as the object of `--json`. source: of the times.

    questions: see `ask`.
    """
    if steps is not None:
        config = replace(config, learner=replace(config.learner, steps=steps))
    counts = parse_counts(generators) if generators else [config.generators]
    limit, inject = config.staleness.limit, config.staleness.inject
    for extra in questions.get("added_generators", ()):
        if not 1 <= config.generators + extra <= MOST_GENERATORS:
            raise ConfigError(
                f"--more {extra}: {config.generators + extra} generators; give a number that "
                f"leaves 1 to {MOST_GENERATORS}"
            )
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: the directory {plot.parent} does not exist")
    for table in ("simulations", "treatments") if treatments else ("simulations",):
        for problem in rules.apply_table(table, config):
            raise ConfigError(problem)
    if deadline is not None and not treatments:
        raise ConfigError("--deadline: belongs to --treatments")
    if deadline is not None and not config.agent.uses_sessions:
        raise ConfigError("--deadline: belongs to sessions, and the config has no [agent]")
    run = functools.partial(simulate_seeds, times=time_models, seeds=seeds, evaluate=evaluate)
    base = run(config)
    if not (any(questions.values()) or treatments):
        limits = [] if inject is not None or limit == inf else [2 * limit or 1]
        threads = [2 * config.learner.threads]
        defaults: JsonObject = {"added_generators": [1], "syncs": [2.0], "threads": threads}
        questions = {"limits": limits, **defaults}
    answers = answer_questions(config, run, base, questions)
    average = average_outcomes(base)
    result: JsonObject = {
        "tokens_per_s": average["tokens_per_s"],
        "idle_share": {side: average[f"idle_{side}"] for side in ("generator", "learner")},
        "lag": {key: average[f"lag_{key}"] for key in ("mean", "p95", "max", "closed_form")},
        "base": average,
        "seeds": seeds,
        "times": source,
        "limited_by": describe_limiting_side(average),
        "answers": answers,
    }
    if treatments:
        result["treatments"] = compare_treatments(config, run, deadline)
    if generators or plot is not None:
        axis = [limit]
        if plot is not None and inject is None:
            axis = sorted({*LIMITS, *questions.get("limits", ()), limit})
        result["sweep"] = [
            average_outcomes(run(change_limit(replace(config, generators=count), at)))
            for count, at in itertools.product(counts, axis)
        ]
    if plot is not None:
        write_page(plot, name, result, load.dump(config))
        result["page"] = str(plot)
    return result


def make_table(
    columns: Mapping[str, str], outcomes: Sequence[Outcome], heading: str = ""
) -> TableBlock:
    """Make a table of outcomes or treatments. columns: head -> format of an outcome."""
    rows = []
    for outcome in outcomes:
        label, losses = outcome.get("name", ""), outcome.get("losses", {})
        if label == "deadline":
            label += f" {outcome['deadline_s']:.3g} s"
        lost = sum(losses.values()) / max(outcome.get("generated", 0), 1)
        row = outcome | {"label": label, "lost": lost}
        rows.append([column.format(**row) for column in columns.values()])
    return TableBlock(tuple(columns), rows, heading=heading, text_columns=0)


def format_result(result: JsonObject) -> str:
    """Format the result for a reader."""
    tables = [
        make_table(columns, result[name]).as_text()
        for name, columns in (("sweep", OUTCOME_COLUMNS), ("treatments", TREATMENT_COLUMNS))
        if name in result
    ]
    return fill(TEXTS["result"], **result, tables=tables).rstrip()


def write_page(path: Path, name: str, result: JsonObject, config: str) -> None:
    """Write the page of a result atomically. config: as TOML."""
    points = result["sweep"]
    counts = sorted({point["generators"] for point in points})
    limits = list(dict.fromkeys(f"{point['max_lag']}" for point in points))
    plots = []
    for title, (unit, lines) in PLOTS.items():
        plot = PagePlot(title, unit, [], "staleness.max_lag", x_names=limits)
        plots.append(plot)
        for (color, count), (key, label, dash) in itertools.product(enumerate(counts), lines):
            suffix = f"{count:,} generator{'s' * (count > 1)}" if len(counts) > 1 else ""
            label = ", ".join(filter(None, (label, suffix))) or unit
            ys = [point[key] for point in points if point["generators"] == count]
            plot.lines.append(PlotLine(label, [*range(len(ys))], ys, color=color, dash=dash))
    sentences = [answer["sentence"] for answer in result["answers"]]
    blocks = [
        ListBlock([f"As configured, {result['limited_by']}.", *sentences]),
        PlotBlock(plots),
        make_table(OUTCOME_COLUMNS, points, "Numbers"),
        TextBlock(config, heading="Configuration", style="pre"),
    ]
    subtitle = f"simulated, no model; times: {result['times']}"
    atomic_write.write(path, page_kit.render(name, subtitle, blocks, {"simulation": points}))
