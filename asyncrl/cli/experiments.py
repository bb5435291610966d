"""`asyncrl compare`, `sweep`, `figure`, `replay`, `diff`, `simulate`, `diagnose` and `lab`.

asyncrl/experiments implements them."""

import csv
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncrl.cli import result
from asyncrl.cli.base import command, emit, make_command, make_group, print_progress
from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.records import atomic_write, page_kit, rundir


@command
def compare(
    source: str,
    sets: tuple[str, ...],
    arm_texts: tuple[str, ...],
    seeds: int,
    out: Path | None,
    jobs: int,
    real: bool,
    dry_run: bool,
) -> None:
    """Train CONFIG under several settings and compare them."""
    from asyncrl.experiments.compare import analysis, arms, grid, page
    from asyncrl.supervise.preflight import localize_sets, preflight

    base = load.load_to_train(source, sets)
    sets = tuple(sets if dry_run else localize_sets(base, sets))
    chosen_arms = [arms.parse_arm(text) for text in arm_texts] or grid.make_default_arms(base)
    if dry_run:
        configs = grid.resolve(source, sets, chosen_arms)
        warm = set() if real else grid.find_warm_arms(configs)
        for name, config in configs.items():
            differs = arms.find_changes(base, config)
            print(
                f"{name}: {arms.format_differences(differs) if differs else 'as configured'} "
                f"({'a warm process' if name in warm else 'real processes'})"
            )
        print_progress(f"would start {len(chosen_arms) * seeds} runs")
        return
    directory = out or Path(base.runs) / f"compare-{base.name or Path(source).stem}"
    comparison = grid.Comparison(
        directory, source, sets, chosen_arms, seeds, print_progress, real=real
    )
    for config in comparison.configs.values():
        preflight(config)
    print_progress(grid.describe_power(len(chosen_arms), seeds))
    with grid.GridProgress(comparison) as progress:
        comparison.run(jobs, progress.on_event, abandon=False)
    cells = [comparison.read(arm, seed) for arm in comparison.configs for seed in comparison.seeds]
    found = analysis.analyze(cells, comparison.configs)
    settings = comparison.describe()
    html = page.write(directory, directory.name, cells, found, settings, base)
    if result.as_json:
        return result.put_result(page_kit.clean(found))
    page.print_comparison(found, f"{directory.name}: {seeds} seed(s)", settings)
    print_progress(f"report: {html}")


@command
def sweep(
    source: str,
    sets: tuple[str, ...],
    limits: str,
    correction_texts: tuple[str, ...],
    inject: bool,
    seeds: int,
    workers: int,
    margin: float,
    out: Path | None,
    no_abandon: bool,
    dry_run: bool,
) -> None:
    """Train every staleness limit with every correction.

    Shows the cost of stale samples, and suggests a limit.
    """
    from asyncrl.experiments.compare import analysis, arms, grid, page
    from asyncrl.supervise.preflight import localize_sets, preflight

    if not dry_run:
        sets = tuple(localize_sets(load.load(source, sets), sets))
    corrections = [
        arms.parse_arm(text, "--correction") for text in correction_texts or ("configured", "none")
    ]
    plan = grid.SweepPlan(
        source,
        sets,
        corrections,
        grid.parse_limits(limits, inject),
        injected=inject,
    )
    descriptions = plan.describe()
    if dry_run:
        for name, title, differs in descriptions:
            print(f"{name}: {title} (differs from the config by {differs})")
        for (name, limit), arm in plan.cell.items():
            print(f"{name}, limit {limit:g}: {arm}")
        print_progress(
            f"would start {len(plan.arms) * seeds} runs, and {len(plan.probes)} short ones to "
            "measure the speed of each limit"
        )
        return
    base = load.load_to_train(source, sets)
    directory = out or Path(base.runs) / f"sweep-{base.name or Path(source).stem}"
    runs = grid.Sweep(directory, plan, seeds, print_progress)
    highest = [plan.cell[arm.name, plan.limits[-1]] for arm in corrections]
    for arm in dict.fromkeys([grid.SYNC, *highest]):
        preflight(plan.arms[arm])
    print_progress(grid.describe_power(len(plan.arms), seeds))
    with grid.GridProgress(runs) as progress:
        runs.run(workers, progress.on_event, abandon=not no_abandon)
    found = analysis.analyze_sweep(runs, margin)
    shape = f"{base.learner.steps} steps of {base.learner.groups} x {base.learner.group_size}"
    lag = f"{'injected' if inject else 'natural'} lag, {seeds} seed(s), {shape}"
    html = page.write_sweep(directory, directory.name, found, descriptions, lag)
    if result.as_json:
        return result.put_result(page_kit.clean(found))
    rows = page.format_cells(found)
    page.print_table(page.SWEEP_HEAD, rows, page.SWEPT, f"{directory.name}: {seeds} seed(s)")
    print(found["suggestion"]["reason"])
    if found["suggestion"]["set"]:
        print(found["suggestion"]["set"])
    print_progress(f"report: {html}")


@command
def figure(
    directories: tuple[Path, ...],
    out: Path | None,
    table: Path | None,
    metric: str,
    across: str,
) -> None:
    """Plot runs, comparisons or sweeps.

    Shows means over seeds with bands, and n in the caption.
    """
    from asyncrl.experiments import figures

    if out is None and table is None:
        raise ConfigError("figure: give -o FILE.pdf (or .svg, .png), --csv FILE.csv, or both")
    points = figures.read_points(list(dict.fromkeys(directories)), metric, across)
    lines = figures.make_lines(points)
    if out is not None:
        figures.draw(lines, metric, across, out)
    if table is not None:
        with table.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["series", "seed", "mean_lag" if across == "lag" else "step", metric])
            rows.writerows(
                (point.series, point.seed, point.position, point.value) for point in points
            )
    emit(
        {
            "files": [str(path) for path in (out, table) if path is not None],
            "caption": figures.make_caption(lines, across),
            "series": [line.name for line in lines],
            "points": len(points),
        }
    )


@command
def replay(run_dir: Path, sets: tuple[str, ...], **choice: Any) -> None:
    """Train again on the recorded stream of RUN_DIR, offline.

    Shows the difference, for example with another loss, correction, KL penalty or early stop.
    """
    rundir.require_run(run_dir)  # before the imports of torch below
    from asyncrl.experiments.replay import replay as replaying
    from asyncrl.supervise.preflight import say

    outcome = replaying.replay(run_dir, sets, say, **choice)
    emit(page_kit.clean(outcome), replaying.format_replay(outcome))
    say(f"report: {Path(outcome['replay_dir']) / 'report.html'}")
    sys.exit(1 if outcome["reproduced"] is False else 0)


@command
def diff(run_a: Path, run_b: Path, html: Path | None) -> None:
    """Compare two runs.

    Shows settings, the first step that differs, and by how much.  Exit code 0 if they are bitwise
    equal, otherwise 1.
    """
    from asyncrl.experiments.replay import diff as differ

    comparison = differ.diff(run_a, run_b)
    if html is not None:
        differ.write(comparison, html)
    emit(comparison, differ.format_diff(comparison))
    sys.exit(0 if comparison["equal"] else 1)


@command
def simulate(
    source: str,
    sets: tuple[str, ...],
    from_run: Path | None,
    file: Path | None,
    single_times: tuple[str, ...],
    no_evaluation: bool,
    **questions: Any,
) -> None:
    """Simulate a run of CONFIG without a model.

    Shows throughput, idle shares and lag, and predicts the effect of another limit, more generators
    or a faster weight sync.
    """
    if from_run is not None and not from_run.exists():
        raise ConfigError(f"--from {from_run}: does not exist; give a run directory or a log")
    log = None
    if from_run is not None and not (from_run / "config.toml").is_file():
        from asyncrl.experiments import diagnose as diagnosis
        from asyncrl.experiments.simulate import times

        log = diagnosis.read(from_run)
        sets = (*times.list_settings(log), *sets)
    config = load.load_to_train(source, sets)  # before the imports of torch below
    from asyncrl.experiments.simulate import what_if

    time_models, origin = what_if.collect_times(log or from_run, file, single_times, config)
    outcome = what_if.simulate(
        config,
        time_models,
        origin,
        name=f"simulate {source}",
        evaluate=log is None and not no_evaluation,
        **questions,
    )
    emit(outcome, what_if.format_result(outcome))


@command
def diagnose(path: Path, framework: str, html: Path | None) -> None:
    """Say what another framework's log shows, and what to change.

    PATH is a log file of verl, TRL, prime-rl, NeMo-RL, the Tinker cookbook, SkyRL, slime, AReaL or
    ART, or the directory of a run. It reads numbers and predicts nothing.
    """
    from asyncrl.experiments import diagnose as diagnosis

    log = diagnosis.read(path, framework)
    found = diagnosis.diagnose(log)
    if html is not None:
        diagnosis.write_page(html, log, found)
        print_progress(f"page: {html}")
    emit(found, diagnosis.format_result(found))


def run_experiment(name: str, out: Path, **settings: Any) -> None:
    """Measure, print and write the findings.  Raises AsyncrlError if a claim does not hold."""
    experiment = import_module(f"asyncrl.experiments.lab.{name}")
    findings = experiment.present_findings(experiment.measure(**settings, say=print_progress))
    print(findings.as_text(), file=sys.stderr if result.as_json else sys.stdout)
    out.mkdir(parents=True, exist_ok=True)
    numbers = findings.as_json()
    atomic_write.write(out / f"{name}.json", json.dumps(numbers))
    print_progress(f"numbers: {out / name}.json")
    result.put_result(numbers)
    if refuted := [text for text, holds in findings.claims if not holds]:
        raise AsyncrlError(f"lab {name}: {len(refuted)} claim(s) do not hold: {refuted[0]}")


lab = make_group(
    "lab",
    [make_command(x, partial(run_experiment, x)) for x in ("bias", "corrections", "reshape")],
)
