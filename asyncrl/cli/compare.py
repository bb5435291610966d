"""`asyncrl compare`, `asyncrl sweep` and `asyncrl figure`: many runs, their tables and figures."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncrl.cli import result
from asyncrl.cli.base import (
    PATH,
    command,
    count_option,
    dry_run_option,
    emit,
    json_option,
    options,
    out_option,
    print_progress,
)

if TYPE_CHECKING:
    from asyncrl.config.tree import Config
    from asyncrl.experiments.compare.page import Setting
    from asyncrl.experiments.compare.sweep import SweepPlan

# column of the page's table -> its heading in a terminal, which has less room
COMPARED = {
    "arm": "arm",
    "end": "end",
    "area": "area",
    "seconds of RL": "seconds",
    "trained tok/s": "tok/s",
    "mean lag": "lag",
    "ESS": "ESS",
    "unstable": "unstable",
    "processes": "",
}
SWEPT = (
    "correction",
    "limit",
    "end",
    "vs sync",
    "interval",
    "ESS",
    "unstable",
    "speed",
)


@command(
    "asyncrl compare demo --seeds 5",
    "asyncrl compare demo --arm base: --arm tight:staleness.max_lag=1",
)
@options()
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME:KEY=VALUE,...",
    help="an arm; the first is the one that the others are compared with; repeatable",
)
@count_option("--seeds", 3, "seeds of each arm, counted from the config's")
@out_option("directory of the comparison; an unfinished comparison there is continued")
@count_option("--jobs", 1, "real runs at the same time; more than one disturbs the timings")
@click.option(
    "--real", is_flag=True, help="start new processes for every run, even if a warm one could do it"
)
@dry_run_option("the arms and the number of runs")
def compare(
    source: str,
    sets: tuple[str, ...],
    as_json: bool,
    arms: tuple[str, ...],
    seeds: int,
    out: Path | None,
    jobs: int,
    real: bool,
    dry_run: bool,
) -> None:
    """Train CONFIG under several settings and compare them."""
    from asyncrl.config import load
    from asyncrl.experiments.compare import arms as arming
    from asyncrl.experiments.compare import comparison as comparing
    from asyncrl.experiments.compare import comparison_analysis, page
    from asyncrl.experiments.compare.progress import CompareProgress
    from asyncrl.supervise.preflight import localize_sets, preflight

    base = load.load_to_train(source, sets)
    sets = tuple(sets if dry_run else localize_sets(base, sets))
    chosen = [arming.parse_arm(words) for words in arms] or comparing.default_arms(base)
    if dry_run:
        configs = comparing.resolve(source, sets, chosen)
        print_arms(base, configs, set() if real else comparing.warm_arms(configs))
        print(f"would start {len(chosen) * seeds} runs", file=sys.stderr)
        return
    where = out or Path(base.runs) / f"compare-{base.name or Path(source).stem}"
    comparison = comparing.Comparison(where, source, sets, chosen, seeds, print_progress, real=real)
    for config in comparison.configs.values():
        preflight(config)
    with CompareProgress(comparison) as progress:
        cells = comparison.run(jobs, progress.on_event)
    found = comparison_analysis.analyze(cells, comparison.configs)
    differs = arming.from_first(comparison.configs)
    settings = [
        page.Setting(
            arm.name,
            f"the same as {arm.same_as}" if arm.same_as else arm.title,
            arming.words(differs[arm.name]) if arm.name in differs else "",
        )
        for arm in comparison.arms
    ]
    html = page.write(where, where.name, cells, found, settings, base)
    if as_json:
        result.print_result(page.clean(found))
        return
    print_comparison(found, f"{where.name}: {seeds} seed(s)", settings)
    print_progress(f"report: {html}")


def print_arms(base: Config, configs: Mapping[str, Config], warm: set[str]) -> None:
    """Print for --dry-run what each arm changes and whether it needs real processes."""
    from asyncrl.experiments.compare.arms import from_first, words

    for name, config in configs.items():
        differs = from_first({"": base, name: config})[name]
        print(
            f"{name}: {words(differs) if differs else 'as configured'} "
            f"({'a warm process' if name in warm else 'real processes'})"
        )


def print_comparison(found: dict[str, Any], title: str, settings: Sequence[Setting]) -> None:
    """Print the table, the differences, the verdicts and what faster arms lose."""
    from asyncrl.experiments.compare import page
    from asyncrl.experiments.compare.progress import print_beside, print_table

    start = next(iter(found["arms"].values()))["heldout_start"]
    rows = page.arm_rows(found)
    print_table(page.HEAD, rows, COMPARED, f"{title}, held-out reward from {start:.3f}")
    print_beside(page.HEAD, rows, ("arm",), ("OOD start", "OOD end", "KL to ref"))
    first, *others = settings
    print(f"{first.arm}: {first.title}")
    for setting in others:
        print(f"{setting.arm}, compared with {first.arm}: {setting.differs}")
    for verdict in found["verdicts"]:
        print(verdict["text"])
    for sentence in found["trade"]:
        print(sentence)


@command(
    "asyncrl sweep demo",
    "asyncrl sweep demo --limits 1,4,16 --correction tis --correction none",
)
@options()
@click.option(
    "--limits",
    default="1,2,4,8",
    show_default=True,
    help="staleness limits (with --inject: lags), separated by commas",
)
@click.option(
    "--correction",
    "chosen",
    multiple=True,
    metavar="NAME or NAME:KEY=VALUE,...",
    help="a correction; repeatable  [default: configured, none]",
)
@click.option(
    "--inject",
    is_flag=True,
    help="inject each limit as a constant lag, instead of the lag that the processes produce",
)
@count_option("--seeds", 3, "seeds of each cell, counted from the config's")
@count_option("--workers", 1, "runs at the same time: warm processes, one core each")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.05,
    show_default=True,
    help="accuracy that a suggested limit may lose: its whole interval lies above minus this",
)
@out_option("directory of the sweep; an unfinished sweep there is continued")
@click.option("--no-abandon", is_flag=True, help="also train collapsed runs to their end")
@dry_run_option("the cells and the number of runs")
def sweep(
    source: str,
    sets: tuple[str, ...],
    as_json: bool,
    limits: str,
    chosen: tuple[str, ...],
    inject: bool,
    seeds: int,
    workers: int,
    margin: float,
    out: Path | None,
    no_abandon: bool,
    dry_run: bool,
) -> None:
    """Train every staleness limit with every correction.

    Shows how stale samples may be, and ends with a suggested limit.
    """
    from asyncrl.config import load
    from asyncrl.experiments.compare import page, sweep_page
    from asyncrl.experiments.compare import sweep as sweeping
    from asyncrl.experiments.compare.comparison import design
    from asyncrl.experiments.compare.progress import SweepProgress
    from asyncrl.experiments.compare.sweep_analysis import analyze
    from asyncrl.supervise.preflight import localize_sets, preflight

    if not dry_run:
        sets = tuple(localize_sets(load.load(source, sets), sets))
    corrections = [sweeping.parse_correction(words) for words in chosen or ("configured", "none")]
    plan = sweeping.plan(
        source,
        sets,
        [(arm.name, arm.sets) for arm in corrections],
        sweeping.parse_limits(limits, inject),
        injected=inject,
    )
    told = swept_corrections(plan, {arm.name: arm.title for arm in corrections})
    if dry_run:
        print_cells(plan, told, seeds)
        return
    base = load.load_to_train(source, sets)
    where = out or Path(base.runs) / f"sweep-{base.name or Path(source).stem}"
    made = sweeping.Sweep(where, plan, seeds, print_progress)
    longest = [plan.cell[arm.name, plan.limits[-1]] for arm in corrections]
    for arm in dict.fromkeys([sweeping.SYNC, *longest]):
        preflight(plan.arms[arm])
    print_progress(design(len(plan.arms), seeds))
    with SweepProgress(made) as progress:
        made.run(workers, progress.on_event, abandon=not no_abandon)
    found = analyze(made, margin)
    shape = f"{base.learner.steps} steps of {base.learner.groups} x {base.learner.group_size}"
    lag = f"{'injected' if inject else 'natural'} lag, {seeds} seed(s), {shape}"
    html = sweep_page.write(where, where.name, found, told, lag)
    if as_json:
        result.print_result(page.clean(found))
        return
    print_sweep(found, f"{where.name}: {seeds} seed(s)")
    print_progress(f"report: {html}")


def swept_corrections(plan: SweepPlan, titles: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return name, title and differences from the plain config of each correction."""
    from asyncrl.experiments.compare.arms import from_first, words
    from asyncrl.experiments.compare.sweep import SWEPT_KEYS, SYNC

    out = []
    for name, title in titles.items():
        made = plan.arms[plan.cell[name, plan.limits[-1]]]
        differs = from_first({"": plan.arms[SYNC], name: made})[name]
        kept = {key: pair for key, pair in differs.items() if key not in SWEPT_KEYS}
        out.append((name, title, words(kept)))
    return out


def print_cells(plan: SweepPlan, told: Sequence[tuple[str, str, str]], seeds: int) -> None:
    """Print for --dry-run each correction, the arm of every cell and the number of runs."""
    from asyncrl.experiments.compare.sweep import label

    for name, title, differs in told:
        print(f"{name}: {title} (differs from the config by {differs})")
    for (name, limit), arm in plan.cell.items():
        print(f"{name}, limit {label(limit)}: {arm}")
    print(
        f"would start {len(plan.arms) * seeds} runs, and {len(plan.probes)} short ones to measure "
        "the speed of each limit",
        file=sys.stderr,
    )


def print_sweep(found: dict[str, Any], title: str) -> None:
    """Print the table and the suggested limit."""
    from asyncrl.experiments.compare import sweep_page
    from asyncrl.experiments.compare.progress import print_beside, print_table

    rows = sweep_page.cell_rows(found)
    print_table(sweep_page.HEAD, rows, {heading: heading for heading in SWEPT}, title)
    print_beside(sweep_page.HEAD, rows, ("correction", "limit"), ("OOD end", "KL to ref"))
    print(found["suggestion"]["reason"])
    if found["suggestion"]["set"]:
        print(found["suggestion"]["set"])


@command(
    "asyncrl figure runs/compare-demo -o accuracy.pdf",
    "asyncrl figure runs/sweep-demo --x lag --csv points.csv",
)
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=PATH)
@click.option("-o", "--out", type=PATH, metavar="FILE", help="write a figure: .pdf, .svg or .png")
@click.option("--csv", "table", type=PATH, metavar="FILE.csv", help="write its points as a table")
@click.option("--metric", default="eval/heldout", show_default=True, help="metric to plot")
@click.option(
    "--x",
    "across",
    type=click.Choice(["step", "lag"]),
    default="step",
    show_default=True,
    help="x axis; lag: the last value of each run over its measured mean lag",
)
@json_option
def figure(
    directories: tuple[Path, ...],
    out: Path | None,
    table: Path | None,
    metric: str,
    across: str,
    as_json: bool,
) -> None:
    """Plot runs, comparisons or sweeps.

    Shows means over seeds with bands, and n in the caption.
    """
    import csv

    from asyncrl.contract.errors import ConfigError
    from asyncrl.experiments.figure import figure_drawing, figure_points

    if out is None and table is None:
        raise ConfigError("figure: give -o FILE.pdf (or .svg, .png), --csv FILE.csv, or both")
    points = figure_points.read_points(list(dict.fromkeys(directories)), metric, across)
    lines = figure_points.make_lines(points)
    if out is not None:
        figure_drawing.draw(lines, metric, across, out)
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
            "caption": figure_points.caption(lines, across),
            "series": [line.name for line in lines],
            "points": len(points),
        },
        as_json,
    )
