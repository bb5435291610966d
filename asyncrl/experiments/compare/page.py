"""The pages of a comparison and of a sweep, and their numbers as JSON.

A comparison has overlaid curves with bands, each arm's settings, and the verdicts. A sweep has heat
maps, speed against reward, curves, and every cell.
"""

import bisect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from asyncrl.config.tree import Config
from asyncrl.contract.toml_writer import read_table
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.analysis import KL_BATCHES, Summary
from asyncrl.experiments.compare.arms import ArmDescription
from asyncrl.experiments.compare.grid import CellResult
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.health_checks import compute_half_interval
from asyncrl.records.metrics import average
from asyncrl.records.page_kit import (
    Block,
    ListBlock,
    PagePlot,
    PlotBlock,
    PlotLine,
    TableBlock,
    TableCell,
    TextBlock,
    clean,
    format_number,
)
from asyncrl.supervise.report.run_view import build_length_ledger

Columns = dict[str, tuple[str, str]]  # heading -> key of a summary, format of its number

ARM_COLUMNS, CELL_COLUMNS, CURVES, COMPARED, SWEPT, TEXTS = read_table(__file__).values()
NOT_ON_BOARD = {"optim/grad_norm", "answer/length"}
TIMES = ("seconds of RL", "seconds to target", "trained tok/s")
HEAD, SWEEP_HEAD = tuple(ARM_COLUMNS), tuple(CELL_COLUMNS)


# ---- tables and lists ----------------------------------------------------------------------------


def format_interval(interval: Sequence[float], form: str) -> str:
    low, high = (format_number(value, form) for value in interval)
    return f"[{low}, {high}]"


def format_row(columns: Columns, summary: Summary) -> list[str]:
    """Format a summary in columns; its texts stay as they are."""
    values = summary | {
        "each": " ".join(f"{accuracy:.3f}" for accuracy in summary["each"]),
        "unstable": f"{summary['unstable']} of {summary['seeds']}",
    }
    cells = ((values[key], form) for key, form in columns.values())
    return [
        value if isinstance(value, str) else format_number(value, form) for value, form in cells
    ]


def format_arms(result: Summary) -> list[list[str]]:
    """Return the table of a comparison's arms as text.

    A warm run's times are in brackets, because they differ from a real run's.
    """
    rows = []
    for name, arm in result["arms"].items():
        processes = "warm" if arm["warm"] else "real"
        row = format_row(ARM_COLUMNS, arm | {"arm": name, "processes": processes})
        rows.append(
            [
                f"({text})" if arm["warm"] and heading in TIMES else text
                for heading, text in zip(HEAD, row, strict=True)
            ]
        )
    return rows


def format_cells(result: Summary) -> list[list[str]]:
    """Return the table of a sweep's cells as text."""
    rows = []
    for cell in result["cells"]:
        against = cell["difference"]
        interval = {"interval": format_interval(against["interval"], "+.3f")}
        rows.append(format_row(CELL_COLUMNS, cell | against | interval))
    return rows


def list_signs(summaries: Iterable[tuple[str, Summary]]) -> ListBlock:
    """Return a line for each health finding of an arm or cell, with one of its messages."""
    signs = [
        f"{name}: {sign} in {len(messages)} of {summary['seeds']} runs: {messages[0]}"
        for name, summary in summaries
        for sign, messages in summary["signs"].items()
    ]
    return ListBlock(signs, heading="Signs", id="signs")


def name_cell(cell: Summary) -> str:
    return f"{cell['correction']}, limit {cell['limit']}"


# ---- curves --------------------------------------------------------------------------------------


def list_points(cell: CellResult, name: str) -> list[tuple[float, float]]:
    """Return (step, value) of a metric, in the order of the run."""
    if name == "eval/heldout" and cell.steps:
        return list(zip(cell.steps, cell.accuracy, strict=True))
    if name == "eval/ood" and cell.ood:
        return sorted(cell.ood.items())
    return [(float(row["step"]), float(row[name])) for row in cell.rows if name in row]


def plot_curves(
    name: str, curves: Mapping[str, Sequence[Iterable[tuple[float, float]]]]
) -> PagePlot:
    """Plot the mean of each arm's runs, in a band from the lowest to the highest.

    curves: arm -> (step, value) of each of its runs.
    """
    title, unit = CURVES[name]
    plot = PagePlot(title, unit, [], "version")
    several = max(map(len, curves.values())) > 1
    for arm, runs in curves.items():
        by_step: dict[float, list[float]] = {}
        for step, value in itertools.chain(*runs):
            by_step.setdefault(step, []).append(value)
        steps = sorted(by_step)
        line = PlotLine(arm, steps, [average(by_step[step]) for step in steps])
        if several:
            line.low = [min(by_step[step]) for step in steps]
            line.high = [max(by_step[step]) for step in steps]
        plot.lines.append(line)
    return plot


def describe_bands(result: Summary, config: Config) -> str:
    """Describe the lines and bands of the curves, and the interval of one held-out reward."""
    seeds = len(result["seeds"])
    lines = (
        f"Lines: mean over {seeds} seeds; bands: from the lowest to the highest seed, no interval."
        if seeds > 1
        else "Lines: one seed."
    )
    at_ends, between = (
        f"+-{compute_half_interval(0.5, size, 0.0, 1.0):.3f} at most (n = {size:,} held-out "
        "prompts)"
        for size in (config.evaluation.final_prompts, config.evaluation.prompts)
    )
    return (
        f"{lines} 95 % interval of one seed's held-out reward in [0, 1], over prompts: {at_ends} "
        f"at both ends, {between} between."
    )


# ---- the page of a comparison --------------------------------------------------------------------


def describe_samples(result: Summary) -> str:
    """Name the arms that trained the first arm's samples, and describe the others' differences."""
    same = "; ".join(
        f"{name} {sum(runs)} of {len(runs)} seeds" for name, runs in result["same_data"].items()
    )
    return same + "".join(
        f"; {name}, seed {seed}: {difference}"
        for name, runs in result["data_apart"].items()
        for seed, difference in zip(result["seeds"], runs, strict=True)
        if difference
    )


def list_blocks(
    cells: Sequence[CellResult], result: Summary, settings: Sequence[ArmDescription], config: Config
) -> list[Block]:
    """Return the parts of a comparison's page, in their order."""
    arms = result["arms"]
    problems = [
        f"{cell.arm}, seed {cell.seed}: {problem}" for cell in cells for problem in cell.trouble
    ]
    causes = [f"{name}: likely cause: {arm['cause']}" for name, arm in arms.items() if arm["cause"]]
    against = f"compared with {settings[0][0]}"
    return [
        TableBlock(
            ("arm", "is", against), settings, heading="Differences", id="settings", text_columns=3
        ),
        ListBlock([v["text"] for v in result["verdicts"]], heading="Verdict", id="verdicts"),
        ListBlock(result["trade"]),
        TableBlock(HEAD, format_arms(result), heading="Arms, mean over seeds", id="arms"),
        list_signs(arms.items()),
        ListBlock([*problems, *causes], heading="Unstable runs", style="bad"),
        TextBlock(describe_bands(result, config), heading="Curves", id="bands", style="soft"),
        PlotBlock(
            [
                plot_curves(
                    name,
                    {arm: [list_points(x, name) for x in cells if x.arm == arm] for arm in arms},
                )
                for name in CURVES
            ]
        ),
        TextBlock(
            TEXTS["comparison"].format(KL_BATCHES, verdict.STABILITY, describe_samples(result)),
            heading="How to read this",
        ),
    ]


# ---- the page of a sweep -------------------------------------------------------------------------


def make_heat_map(
    result: Summary,
    key: str,
    below: Callable[[Summary], str],
    high: float,
    *,
    heading: str,
    note: str = "",
) -> TableBlock:
    """Build a table with colored cells: corrections down, limits across.

    key: of the value in a cell. below: returns the small text under it. The background goes from
    red (0) over yellow to green (high).
    """
    head = ["", *(f"{name_axis(result)} {limit}" for limit in result["limits"])]
    rows: dict[str, list[str | TableCell]] = {
        name: [name, *(TableCell("") for _ in result["limits"])] for name in result["corrections"]
    }
    for cell in result["cells"]:
        value = float(cell[key])
        column = 1 + result["limits"].index(cell["limit"])
        hue = 120 * min(1.0, max(0.0, value / max(high, 1e-9)))
        color = f"hsl({hue:.0f} 65% 72%)" if math.isfinite(value) else "#f3f4f6"
        rows[cell["correction"]][column] = TableCell(f"{value:.2f}", below(cell), color)
    return TableBlock(head, list(rows.values()), heading=heading, style="map", note=note)


def name_axis(result: Summary) -> str:
    return "injected lag" if result["injected"] else "limit"


def list_maps(result: Summary) -> list[Block]:
    """Build the maps of final reward, and of the lowest ESS."""

    def describe_cell(cell: Summary) -> str:
        against = cell["difference"]
        warning = f" \u26a0{cell['unstable']}/{cell['seeds']}" if cell["unstable"] else ""
        interval = format_interval(against["interval"], "+.2f")
        return f"{format_number(against['mean'], '+.2f')} {interval}{warning}"

    sync = result["sync"]
    return [
        make_heat_map(
            result,
            "final",
            describe_cell,
            max(cell["final"] for cell in [*result["cells"], sync]),
            heading="Final reward, mean over seeds",
            note=TEXTS["final"].format(sync["final"], sync["seeds"]),
        ),
        make_heat_map(
            result,
            "ess",
            lambda cell: f"KL up to {format_number(cell['kl'], '.2g')}",
            1.0,
            heading="Effective sample size of the raw ratios target / behavior: lowest mean over "
            "10 steps, worst seed",
        ),
    ]


def plot_frontier(result: Summary) -> PlotBlock:
    """Plot final reward against speed, with the best of each limit labeled.

    The block is empty if no speed was measured.
    """
    timed = [cell for cell in result["cells"] if math.isfinite(cell["speed"])]
    lines = [
        PlotLine(
            correction,
            [cell["speed"] for cell in timed if cell["correction"] == correction],
            [cell["final"] for cell in timed if cell["correction"] == correction],
        )
        for correction in result["corrections"]
    ]
    notes = [
        (result["speed"][limit], max(ends), f"{name_axis(result)} {limit}")
        for limit in result["limits"]
        if (ends := [cell["final"] for cell in timed if cell["limit"] == limit])
    ]
    plot = PagePlot("", "final reward", lines, "speed against limit 0", "points", notes=notes)
    return PlotBlock(
        [plot] if timed else [],
        heading="Frontier: speed against reward",
        style="wide",
        note=TEXTS["frontier"],
    )


def plot_limits(result: Summary) -> list[PagePlot]:
    """Plot the reward over training: one plot a limit, one line a correction.

    A line is the mean over seeds. A seed that stopped early keeps its last reward.
    """
    plots = {
        limit: PagePlot(f"{name_axis(result)} {limit}", "mean reward", [], "version")
        for limit in result["limits"]
    }
    for cell in result["cells"]:
        curves = cell["curves"]
        xs = sorted({step for steps, _ in curves for step in steps})
        ys = [
            average([values[max(bisect.bisect(steps, step) - 1, 0)] for steps, values in curves])
            for step in xs
        ]
        color = list(result["corrections"]).index(cell["correction"])
        plots[cell["limit"]].lines.append(PlotLine(cell["correction"], xs, ys, color=color))
    return list(plots.values())


def format_headline(suggestion: Summary) -> str:
    if suggestion["limit"] is None:
        return "No suggestion"
    return f"Suggested: staleness.max_lag = {suggestion['limit']}" + (
        f" with {suggestion['correction']}" if suggestion.get("correction") else ""
    )


def list_sweep_blocks(result: Summary, corrections: Sequence[ArmDescription]) -> list[Block]:
    """Return the parts of a sweep's page, in their order."""
    suggestion, sync = result["suggestion"], result["sync"]
    suggested = [suggestion["reason"] + ".", suggestion.get("set"), f"rule: {suggestion['rule']}"]
    missing = [
        f"{result['missing']} runs of this grid are still to be made; their cells are empty."
    ]
    problems = [
        f"{name_cell(cell)}: {cell['unstable']} of {cell['seeds']}: {', '.join(cell['trouble'])}"
        + (f"; likely cause: {cell['cause']}" if cell["cause"] else "")
        for cell in result["cells"]
        if cell["unstable"]
    ]
    losses = [
        TableBlock(head, rows, heading=f"Losses by the staleness rule: {name_cell(cell)}")
        for cell in result["cells"]
        # the staleness rule dropped, masked or downweighted tokens of the cell
        if {"masked_stale", "dropped_stale", "abandoned"} & cell["ledger_lines"].keys()
        or any("faded" in size for line in cell["ledger_lines"].values() for size in line)
        for head, *rows in [build_length_ledger(cell)]
    ]
    return [
        TextBlock(
            "\n".join(line for line in suggested if line),
            heading=format_headline(suggestion),
            id="suggestion",
            style="box",
        ),
        ListBlock(missing if result["missing"] else [], style="bad"),
        *list_maps(result),
        plot_frontier(result),
        PlotBlock(plot_limits(result), heading="Reward over training, by limit"),
        TableBlock(
            ("", "is", "differences from the config"),
            corrections,
            heading="Corrections",
            id="corrections",
            text_columns=3,
        ),
        TableBlock(SWEEP_HEAD, format_cells(result), heading="Cells", id="cells"),
        *losses,
        list_signs((name_cell(cell), cell) for cell in result["cells"]),
        ListBlock(problems, heading="Unstable", style="bad"),
        TextBlock(
            TEXTS["sweep"].format(
                format_number(sync["ood_end"], ".3f"),
                KL_BATCHES,
                format_number(sync["kl_ref"], ".3g"),
                verdict.STABILITY,
            ),
            style="soft",
        ),
    ]


# ---- files ---------------------------------------------------------------------------------------


def write(
    directory: Path,
    name: str,
    cells: Sequence[CellResult],
    result: Summary,
    settings: Sequence[ArmDescription],
    config: Config,
) -> Path:
    """Write DIR/report.html, comparison.json and the TensorBoard view of all arms."""
    steps = f"{config.learner.steps} steps of {config.learner.groups} x {config.learner.group_size}"
    subtitle = (
        f"{len(result['seeds'])} seed(s), {steps}; the others are compared with the first arm"
    )
    settings_by_arm = {arm: f"{title}; {differs}" for arm, title, differs in settings}
    write_tensorboard(directory / "tensorboard", cells, settings_by_arm)
    blocks = list_blocks(cells, result, settings, config)
    return _write(directory, "comparison", "comparison.json", (name, subtitle), blocks, result)


def write_sweep(
    directory: Path,
    name: str,
    result: Summary,
    corrections: Sequence[ArmDescription],
    subtitle: str,
) -> Path:
    """Write DIR/report.html and DIR/result.json and return the page's path."""
    blocks = list_sweep_blocks(result, corrections)
    return _write(directory, "sweep", "result.json", (name, subtitle), blocks, result)


def _write(
    directory: Path,
    kind: str,
    file: str,
    title: tuple[str, str],
    blocks: Sequence[Block],
    result: Summary,
) -> Path:
    """Write the page, which has the JSON in its element `kind`, and the JSON as `file`."""
    blob = json.dumps(clean(result))
    page = page_kit.render(*title, blocks, {kind: blob})
    atomic_write.write(directory / file, blob)
    atomic_write.write(directory / "report.html", page)
    return directory / "report.html"


def write_tensorboard(
    directory: Path, cells: Sequence[CellResult], settings: Mapping[str, str]
) -> None:
    """Write all arms side by side, with the hyperparameters view."""
    import shutil

    from tensorboardX import SummaryWriter

    shutil.rmtree(directory, ignore_errors=True)
    for cell in cells:
        with SummaryWriter(str(directory / f"{cell.arm}-seed{cell.seed}")) as writer:
            for name in [name for name in CURVES if name not in NOT_ON_BOARD]:
                for step, value in list_points(cell, name):
                    writer.add_scalar(name, value, int(step))
            writer.add_hparams(
                {"arm": cell.arm, "seed": cell.seed, "settings": settings[cell.arm]},
                {"final/heldout": cell.final},
                name=".",
            )


# ---- the terminal --------------------------------------------------------------------------------


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], names: dict[str, str], title: str
) -> None:
    """Print the columns of a page's table that fit a terminal, as far as they were measured.

    names: name in `head` -> name in the terminal.
    """
    columns = {name: [row[head.index(name)] for row in rows] for name in names}
    measured = {name: column for name, column in columns.items() if {*column} != {"-"}}
    cells = [*zip(*measured.values(), strict=True)]
    print(TableBlock([names[x] for x in measured], cells, heading=f"{title}\n").as_text() + "\n")


def print_comparison(analysis: Summary, title: str, settings: Sequence[ArmDescription]) -> None:
    """Print the table, the differences, the verdicts and the losses of faster arms."""
    start = next(iter(analysis["arms"].values()))["heldout_start"]
    rows = format_arms(analysis)
    print_table(HEAD, rows, COMPARED, f"{title}, held-out reward from {start:.3f}")
    first, *others = settings
    print(f"{first[0]}: {first[1]}")
    for name, _, differs in others:
        print(f"{name}, compared with {first[0]}: {differs}")
    for judged in analysis["verdicts"]:
        print(judged["text"])
    for sentence in analysis["trade"]:
        print(sentence)
