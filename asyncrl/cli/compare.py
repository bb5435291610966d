"""`asyncrl compare`: one config under several settings; `asyncrl sweep`: limits x corrections;
`asyncrl figure`: what they measured, drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncrl.cli import result
from asyncrl.cli.base import PATH, emit, options, print_progress

if TYPE_CHECKING:
    from asyncrl.config.tree import Config
    from asyncrl.experiments.compare.page import Setting
    from asyncrl.experiments.compare.sweep import SweepPlan

# column of the page's table -> its heading in a terminal, where fewer fit
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


@click.command()
@options()
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME:KEY=VALUE,...",
    help="an arm; the first is what the others are compared with; repeatable",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="seeds of each arm, from the config's on",
)
@click.option("--out", type=PATH, help="the comparison's directory; an unfinished one goes on")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="real runs at a time; more than one disturbs the timings",
)
@click.option(
    "--real",
    is_flag=True,
    help="every run as processes of its own, also those that could go in a warm one",
)
@click.option("--dry-run", is_flag=True, help="print the arms and what would run")
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
    """Train CONFIG under several settings, fairly, and say whether they differ."""
    from asyncrl.config import load
    from asyncrl.experiments.compare import arms as arming
    from asyncrl.experiments.compare import comparison as comparing
    from asyncrl.experiments.compare import comparison_analysis, page
    from asyncrl.experiments.compare.progress import CompareProgress
    from asyncrl.supervise.preflight import located_sets, preflight

    base = load.load(source, sets)
    sets = tuple(sets if dry_run else located_sets(base, sets))
    chosen = [arming.parse_arm(words) for words in arms] or comparing.default_arms(base)
    if dry_run:
        configs = comparing.resolve(source, sets, chosen)
        print_arms(base, configs, set() if real else comparing.warm_arms(configs))
        print(f"would make {len(chosen) * seeds} runs", file=sys.stderr)
        return
    where = out or Path(base.runs) / f"compare-{base.name or Path(source).stem}"
    comparison = comparing.Comparison(where, source, sets, chosen, seeds, print_progress, real=real)
    for config in comparison.configs.values():
        preflight(config)
    with CompareProgress(comparison) as progress:
        cells = comparison.run(jobs, progress.on_event)
    found = comparison_analysis.analyse(cells, comparison.configs)
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
    """--dry-run: what each arm changes, and in what processes it would run."""
    from asyncrl.experiments.compare.arms import from_first, words

    for name, config in configs.items():
        differs = from_first({"": base, name: config})[name]
        print(
            f"{name}: {words(differs) if differs else 'as configured'} "
            f"({'a warm process' if name in warm else 'real processes'})"
        )


def print_comparison(found: dict[str, Any], title: str, settings: Sequence[Setting]) -> None:
    """The table, what differs, the verdicts and what faster arms give up."""
    from asyncrl.experiments.compare import page
    from asyncrl.experiments.compare.progress import print_beside, print_table

    start = next(iter(found["arms"].values()))["heldout_start"]
    rows = page.arm_rows(found)
    print_table(page.HEAD, rows, COMPARED, f"{title}, held-out accuracy from {start:.3f}")
    print_beside(page.HEAD, rows, ("arm",), ("OOD start", "OOD end", "KL to ref"))
    first, *others = settings
    print(f"{first.arm}: {first.title}")
    for setting in others:
        print(f"{setting.arm}, otherwise than {first.arm}: {setting.differs}")
    for verdict in found["verdicts"]:
        print(verdict["text"])
    for sentence in found["trade"]:
        print(sentence)


@click.command()
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
    help="repeatable; default: configured, none",
)
@click.option(
    "--inject",
    is_flag=True,
    help="inject each limit as a constant lag; without it the lag is what generators and "
    "learner make of it",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="seeds of each cell, from the config's on",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="warm processes, one core each",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.05,
    show_default=True,
    help="accuracy that a suggested limit may cost: its whole interval is above minus this",
)
@click.option("--out", type=PATH, help="the sweep's directory; an unfinished one goes on")
@click.option("--no-abandon", is_flag=True, help="train collapsed runs to their end too")
@click.option("--dry-run", is_flag=True, help="print the cells and what would run")
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
    """Staleness limits x corrections: how stale may a sample be?  Ends with a limit to paste."""
    from asyncrl.config import load
    from asyncrl.experiments.compare import page, sweep_page
    from asyncrl.experiments.compare import sweep as sweeping
    from asyncrl.experiments.compare.comparison import design
    from asyncrl.experiments.compare.progress import SweepProgress
    from asyncrl.experiments.compare.sweep_analysis import analyse
    from asyncrl.supervise.preflight import located_sets, preflight

    if not dry_run:
        sets = tuple(located_sets(load.load(source, sets), sets))
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
    base = load.load(source, sets)
    where = out or Path(base.runs) / f"sweep-{base.name or Path(source).stem}"
    made = sweeping.Sweep(where, plan, seeds, print_progress)
    longest = [plan.cell[arm.name, plan.limits[-1]] for arm in corrections]
    for arm in dict.fromkeys([sweeping.SYNC, *longest]):
        preflight(plan.arms[arm])
    print_progress(design(len(plan.arms), seeds))
    with SweepProgress(made) as progress:
        made.run(workers, progress.on_event, abandon=not no_abandon)
    found = analyse(made, margin)
    shape = f"{base.learner.steps} steps of {base.learner.groups} x {base.learner.group_size}"
    lag = f"{'injected' if inject else 'natural'} lag, {seeds} seed(s), {shape}"
    html = sweep_page.write(where, where.name, found, told, lag)
    if as_json:
        result.print_result(page.clean(found))
        return
    print_sweep(found, f"{where.name}: {seeds} seed(s)")
    print_progress(f"report: {html}")


def swept_corrections(plan: SweepPlan, titles: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Name, title, and what its resolved configs have otherwise than the config as it is."""
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
    """--dry-run: each correction, the arm of every cell, and how many runs that makes."""
    from asyncrl.experiments.compare.sweep import label

    for name, title, differs in told:
        print(f"{name}: {title} (otherwise than configured: {differs})")
    for (name, limit), arm in plan.cell.items():
        print(f"{name}, limit {label(limit)}: {arm}")
    print(
        f"would make {len(plan.arms) * seeds} runs, and {len(plan.probes)} short ones for the "
        "speed of each limit",
        file=sys.stderr,
    )


def print_sweep(found: dict[str, Any], title: str) -> None:
    """The table, and the limit to paste."""
    from asyncrl.experiments.compare import sweep_page
    from asyncrl.experiments.compare.progress import print_beside, print_table

    rows = sweep_page.cell_rows(found)
    print_table(sweep_page.HEAD, rows, {heading: heading for heading in SWEPT}, title)
    print_beside(sweep_page.HEAD, rows, ("correction", "limit"), ("OOD end", "KL to ref"))
    print(found["suggestion"]["reason"])
    if found["suggestion"]["set"]:
        print(found["suggestion"]["set"])


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=PATH)
@click.option("-o", "--out", type=PATH, metavar="FILE", help="a figure: .pdf, .svg or .png")
@click.option("--csv", "table", type=PATH, metavar="FILE.csv", help="its points, a row for each")
@click.option("--metric", default="eval/heldout", help="what is drawn  [eval/heldout]")
@click.option(
    "--x",
    "across",
    type=click.Choice(["step", "lag"]),
    default="step",
    help="lag: the last value of each run over its measured mean lag  [step]",
)
@click.option("--json", "as_json", is_flag=True, help="the last line of stdout is one JSON object")
def figure(
    directories: tuple[Path, ...],
    out: Path | None,
    table: Path | None,
    metric: str,
    across: str,
    as_json: bool,
) -> None:
    """Draw runs, comparisons or sweeps: means over seeds in bands, with n in the caption."""
    import csv

    from asyncrl.contract.errors import ConfigError
    from asyncrl.experiments.figure import figure_drawing, figure_points

    if out is None and table is None:
        raise ConfigError("figure: give -o FILE.pdf (.svg, .png), --csv FILE.csv, or both")
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
