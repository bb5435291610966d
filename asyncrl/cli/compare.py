"""`asyncrl compare`, `asyncrl sweep` and `asyncrl figure`: many runs, their tables and figures."""

import sys
from pathlib import Path

from asyncrl.cli import result
from asyncrl.cli.base import command, emit, print_progress


@command
def compare(
    source: str,
    sets: tuple[str, ...],
    arms: tuple[str, ...],
    seeds: int,
    out: Path | None,
    jobs: int,
    real: bool,
    dry_run: bool,
) -> None:
    """Train CONFIG under several settings and compare them."""
    from asyncrl.config import load
    from asyncrl.experiments.compare import analysis, grid, page
    from asyncrl.experiments.compare import arms as arming
    from asyncrl.records import page_kit
    from asyncrl.supervise.preflight import localize_sets, preflight

    base = load.load_to_train(source, sets)
    sets = tuple(sets if dry_run else localize_sets(base, sets))
    chosen_arms = [arming.parse_arm(text) for text in arms] or grid.make_default_arms(base)
    if dry_run:
        configs = grid.resolve(source, sets, chosen_arms)
        warm = set() if real else grid.find_warm_arms(configs)
        for name, config in configs.items():
            differs = arming.find_changes(base, config)
            print(
                f"{name}: {arming.format_differences(differs) if differs else 'as configured'} "
                f"({'a warm process' if name in warm else 'real processes'})"
            )
        print(f"would start {len(chosen_arms) * seeds} runs", file=sys.stderr)
        return
    directory = out or Path(base.runs) / f"compare-{base.name or Path(source).stem}"
    comparison = grid.Comparison(
        directory, source, sets, chosen_arms, seeds, print_progress, real=real
    )
    for config in comparison.configs.values():
        preflight(config)
    with grid.GridProgress(comparison) as progress:
        cells = comparison.run(jobs, progress.on_event)
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
    from asyncrl.config import load
    from asyncrl.experiments.compare import analysis, grid, page
    from asyncrl.experiments.compare import arms as arming
    from asyncrl.records import page_kit
    from asyncrl.supervise.preflight import localize_sets, preflight

    if not dry_run:
        sets = tuple(localize_sets(load.load(source, sets), sets))
    corrections = [
        arming.parse_arm(text, "--correction")
        for text in correction_texts or ("configured", "none")
    ]
    plan = grid.make_plan(
        source,
        sets,
        [(arm.name, arm.sets) for arm in corrections],
        grid.parse_limits(limits, inject),
        injected=inject,
    )
    descriptions = plan.describe({arm.name: arm.title for arm in corrections})
    if dry_run:
        for name, title, differs in descriptions:
            print(f"{name}: {title} (differs from the config by {differs})")
        for (name, limit), arm in plan.cell.items():
            print(f"{name}, limit {limit:g}: {arm}")
        print(
            f"would start {len(plan.arms) * seeds} runs, and {len(plan.probes)} short ones to "
            "measure the speed of each limit",
            file=sys.stderr,
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
    import csv

    from asyncrl.contract.errors import ConfigError
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
