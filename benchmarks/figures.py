"""Draw the figures of README and docs, docs/img/*.svg, from result files.

    python benchmarks/figures.py                 draw all figures
    python benchmarks/figures.py --run RUN_DIR   first store a finished run of the demo as a result
    python benchmarks/figures.py --timeline RUN_DIR
                        first store the timeline of a demo run with evaluation.every = 0
    python benchmarks/figures.py --queue RUN_DIR
                        first store the same of one with staleness.wait = 0 as well
    python benchmarks/figures.py --ledger RUN_DIR
                        first store the ledger of a run that loses tokens

tests/project/test_docs.py draws them again and compares."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from lib import results_file, run_pictures, timelines
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from asyncrl.config import load
from asyncrl.experiments.figures import SETTINGS
from asyncrl.records import metrics

IMAGES = results_file.ROOT / "docs" / "img"
RESULTS = results_file.ROOT / "benchmarks" / "results"
SPEED = "2026-11-27_e4736b19_2core_loop_speed.json"
GRID = "2026-11-21_3ff3b71_4core_lag_grid.json"
GRID_TASK = "rle-5e-4"
# of each arm: name, color, and where the name stands
ARMS = {
    "ppo": ("PPO on the behavior policy", "#2563eb", (8.5, 0.66)),
    "tis": ("truncated weights (tis)", "#d97706", (4.6, 0.28)),
    "none": ("no correction", "#dc2626", (9.0, 0.02)),
}

HIGH = "2026-11-23_fef789a_2core_high_lag_all_lags.json"
HIGH_ARMS = {
    "gmpo": ("GMPO", "#16a34a", (48.0, 0.277)),
    "vespo": ("VESPO", "#9333ea", (45.0, 0.225)),
    "seq_tis": ("whole answers' weights, cut", "#d97706", (18.0, 0.205)),
    "ppo": ("PPO on mu", "#2563eb", (45.0, 0.316)),
}

HACK = "2026-11-21_fd72967_4core_kl_placement_rlehack_lag0.json"
HACK_ARMS = {
    "no KL": ("no KL", "#dc2626", "#fecaca", (40.0, 0.2)),
    "k3 in reward, 0.1": ("k3 in the reward", "#d97706", "#fde68a", (15.5, 0.31)),
    "k1 in reward, 0.1": ("k1 in the reward", "#2563eb", "#bfdbfe", (36.0, 0.66)),
}

MIDDLE = "2026-11-26_b9e4f0a2_2core_middle_lag.json"
MIDDLE_ARMS = {  # from the top
    "gmpo": "GMPO",
    "vespo": "VESPO",
    "seq_tis": "weights of whole answers, cut",
    "k3": "PPO, 0.1 of k3 in the loss",
    "none": "no correction",
}

DIRECTION = "2026-11-26_b40b33da_2core_kl_direction.json"
COLLAPSE = "2026-11-25_5a468ff_2core_reshape_collapse.json"
# of each arm of the right panel: color, and where the name stands
COLLAPSE_ARMS = {
    "no clip": ("#dc2626", (8.6, 0.62)),
    "v3.1": ("#9333ea", (11.4, 0.28)),
    "B": ("#d97706", (14.6, 0.18)),
    "clip": ("#2563eb", (12.0, 0.085)),
    "C": ("#16a34a", (13.0, 0.0085)),
}


class NamedLine(NamedTuple):
    """A line of a figure: (x, y) points in a color, with its name beside it.

    named_at: where the name begins; None: without a name.
    seeds: of each point, what each seed gave; drawn as the 95 % interval of their mean.
    """

    name: str
    color: str
    points: list[tuple[float, float]]
    named_at: tuple[float, float] | None = None
    seeds: list[list[float]] | None = None


def draw(title: str, lines: Sequence[NamedLine], across: str, up: str) -> str:
    """An SVG on a white ground, so that it reads on a dark page; y starts at 0."""
    with rc_context({**SETTINGS, "font.size": 9}):
        figure = Figure(figsize=(7.0, 3.25), layout="constrained")
        axes = figure.add_subplot()
        ends = [0.0]
        widest = max(x for line in lines for x, _ in line.points)
        for number, line in enumerate(lines):
            axes.plot(*zip(*line.points, strict=True), color=line.color, lw=1.5)
            if line.seeds is not None:
                half = [half_interval(values) for values in line.seeds]
                beside = 0.006 * widest * (number - (len(lines) - 1) / 2)
                x, y = zip(*((x + beside, y) for x, y in line.points), strict=True)
                axes.errorbar(x, y, half, fmt="none", color=line.color, capsize=2, lw=1)
                ends += [high + low for high, low in zip(y, half, strict=True)]
            if line.named_at is not None:
                axes.annotate(line.name, line.named_at, color=line.color)
        top = 1.12 * max(y for line in lines for _, y in line.points)
        top = max(top, 1.02 * min(max(ends), 1.0))
        axes.set(xlabel=across, ylabel=up, ylim=(0, top), xmargin=0.02)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        return as_svg(figure)


def half_interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of a mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


def ratios(result: dict[str, Any]) -> str:
    """The ratios of a result file: median as a dot, lowest and highest round as a line, goal."""
    rows = [row for row in result["goals"] if row["figure"].startswith("step, ")]
    with rc_context({**SETTINGS, "font.size": 9}):
        figure = Figure(figsize=(7.0, 0.45 * len(rows) + 0.9), layout="constrained")
        axes = figure.add_subplot()
        for at, row in enumerate(rows):
            goal = float(row["goal"].removeprefix("<= "))
            color = "#16a34a" if row["met"] else "#dc2626"
            axes.plot(row["spread"], [at, at], color=color, lw=2)
            axes.plot(row["value"], at, "o", color=color)
            axes.plot(goal, at, marker="|", color="#6b7280", markersize=14)
            text = f"{row['value']:.2f}, goal {goal:g}"
            axes.annotate(text, (1.77, at), va="center", annotation_clip=False)
        axes.axvline(1, color="#6b7280", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), [row["figure"].removeprefix("step, ") for row in rows])
        axes.set(xlim=(0, 1.75), ylim=(len(rows) - 0.5, -0.5), xlabel="time of a step, ratio")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title("Median of five rounds, lowest and highest, and the goal", loc="left")
        return as_svg(figure)


def as_svg(figure: Figure) -> str:
    """The figure as text, without what differs from machine to machine."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def demo(result: dict[str, Any]) -> str:
    """A run of the demo: training reward of each batch, accuracy on held-out prompts."""
    start, end = result["heldout"][0][1], result["heldout"][-1][1]
    title = (
        f"held-out accuracy {start:.2f} to {end:.2f} in {result['wall_s']:.0f} s of RL, "
        f"mean lag {result['mean_lag']:.2f} versions"
    )
    measured = dict(result["heldout"])
    middle = [*measured][len(measured) // 2]
    reward = NamedLine(
        "training reward", "#6b7280", result["reward"], (middle, measured[middle] + 0.14)
    )
    heldout = NamedLine(
        "held-out accuracy", "#2563eb", result["heldout"], (middle, measured[middle] - 0.12)
    )
    return draw(title, [reward, heldout], "batch", "share")


def lag(result: dict[str, Any]) -> str:
    """Accuracy at the end against injected lag, a line a correction, mean of the seeds."""
    cells = result["tasks"][GRID_TASK]["cells"]
    lines = []
    for arm, (name, color, named_at) in ARMS.items():
        of_arm = sorted(
            (c for c in cells if c["correction"] == arm), key=lambda c: float(c["limit"])
        )
        points = [(float(c["limit"]), c["final"]) for c in of_arm]
        lines.append(NamedLine(name, color, points, named_at, [c["each"] for c in of_arm]))
    title = "task rle, five seeds and their 95 % interval: what lag costs, by correction"
    return draw(title, lines, "injected lag, versions", "held-out accuracy")


def high(result: dict[str, Any]) -> str:
    """Share of wrong answers, mean of the run, against injected lag, each method at its own rate,
    mean of the seeds and its interval.
    """
    by_lag = result["tasks"][GRID_TASK]["1"]["by_lag"]
    lines = []
    for arm, (name, color, named_at) in HIGH_ARMS.items():
        rows = sorted((float(lag), row[arm]) for lag, row in by_lag.items())
        wrong = [(lag, 1 - row["area"]) for lag, row in rows]
        lines.append(NamedLine(name, color, wrong, named_at, [row["heights"] for _, row in rows]))
    counts = [len(seeds) for line in lines for seeds in line.seeds or []]
    title = (
        f"task rle, each method at its own rate, {min(counts)} to {max(counts)} seeds and their "
        "95 % interval"
    )
    return draw(title, lines, "injected lag, versions", "held-out answers, wrong, mean of the run")


def hack(result: dict[str, Any]) -> str:
    """True accuracy on a task whose training checker is wrong, by KL term: the mean of the seeds,
    and each seed in a pale line.
    """
    seeds, means = [], []
    for arm, (name, color, pale, named_at) in HACK_ARMS.items():
        runs = result["arms"][arm]["each"]
        curves = [list(zip(run["steps"], run["accuracy"], strict=True)) for run in runs]
        seeds += [NamedLine("", pale, curve) for curve in curves]
        points = [(at[0][0], fmean(y for _, y in at)) for at in zip(*curves, strict=True)]
        means.append(NamedLine(name, color, points, named_at))
    title = "task rlehack: the checker of the training reward is wrong"
    return draw(title, [*seeds, *means], "batch", "true held-out accuracy")


ENDS = (("end", "#2563eb", "after the last batch"), ("area", "#d97706", "mean of the run"))


def draw_differences(
    axes: Axes,
    rows: Sequence[tuple[str, dict[str, Any]]],
    measures: Sequence[tuple[str, str, str]] = ENDS,
) -> None:
    """Draw differences with their intervals, a line a row.

    rows: name and measure -> {"difference", "interval"}, from the top. measures: name, color and
    label of each.
    """
    for number, (measure, color, name) in enumerate(measures):
        shift = 0.15 * (len(measures) - 1 - 2 * number)
        found = [by_measure[measure] for _, by_measure in rows]
        means = [x["difference"] for x in found]
        reach = [
            [mean - x["interval"][0] for mean, x in zip(means, found, strict=True)],
            [x["interval"][1] - mean for mean, x in zip(means, found, strict=True)],
        ]
        heights = [shift - row for row in range(len(rows))]
        axes.errorbar(means, heights, xerr=reach, fmt="o", ms=4, color=color, label=name)
    axes.axvline(0, color="#6b7280", lw=1)
    axes.set_yticks([-row for row in range(len(rows))], [name for name, _ in rows])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def differences_figure(
    rows: Sequence[tuple[str, dict[str, Any]]],
    title: str,
    height: float,
    measures: Sequence[tuple[str, str, str]] = ENDS,
    **labels: str,
) -> str:
    """Draw `draw_differences` alone, `height` inches high; labels: of the axes."""
    with rc_context({**SETTINGS, "font.size": 9}):
        figure = Figure(figsize=(7.0, height), layout="constrained")
        axes = figure.subplots()
        draw_differences(axes, rows, measures)
        axes.set(**labels)
        axes.set_title(title, loc="left", fontsize=9)
        axes.legend(frameon=False, loc="upper left", fontsize=8)
        return as_svg(figure)


def middle(result: dict[str, Any]) -> str:
    """Accuracy at lag 8 less that of PPO, each method at a rate of its own."""
    found, seeds = result["against_ppo"], result["setting"]["seeds"]
    rows = [
        (name, {measure: found[measure][f"lag8 {arm}"] for measure in ("end", "area")})
        for arm, name in MIDDLE_ARMS.items()
    ]
    return differences_figure(
        rows,
        f"task rle, each method at its own rate, {seeds} seeds and their 95 % interval",
        2.6,
        xlabel="held-out accuracy at lag 8 less that of PPO on the behavior policy",
    )


def direction(result: dict[str, Any]) -> str:
    """Forward less reverse KL, by coefficient and reference."""
    rows = []
    for beta in result["setting"]["betas"].split(","):
        for reference, name in (("own", "its warm start"), ("other", "another one")):
            pairs = result["arms"][f"forward, {beta}, {reference}"]["pairs"]
            rows.append((f"{beta}, {name}", pairs[f"reverse, {beta}, {reference}"]))
    measures = (
        ("end", "#2563eb", "accuracy"),
        ("pass_at_16", "#d97706", "pass@16"),
        ("entropy_end", "#16a34a", "entropy, nats a token"),
    )
    return differences_figure(
        rows,
        f"task rlehack, synchronous, {result['setting']['seeds']} seeds and their 95 % interval",
        2.8,
        measures,
        xlabel="forward less reverse KL",
        ylabel="coefficient, reference",
    )


def collapse(result: dict[str, Any]) -> str:
    """IS-reshape and its repairs at 16 epochs: accuracy less that of clip, and KL by step."""
    arms = [arm for arm in result["arms"] if arm != "clip"]
    with rc_context({**SETTINGS, "font.size": 9}):
        figure = Figure(figsize=(7.0, 3.25), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_differences(left, [(arm, result["arms"][arm]["against_base"]) for arm in arms])
        left.set(xlabel="held-out accuracy less that of clip")
        left.legend(frameon=False, loc="upper left", fontsize=8)
        left.set_ylim(0.5 - len(arms), 1.8)
        for arm, (color, named_at) in COLLAPSE_ARMS.items():
            runs = [run["by_update"]["kl"][1:] for run in result["steps_log"][arm].values()]
            seeds = len(runs)
            means = [fmean(at) for at in zip(*runs, strict=True)]
            half = [
                float(stats.t.ppf(0.975, seeds - 1) * stats.sem(at))
                for at in zip(*runs, strict=True)
            ]
            steps = range(2, 2 + len(means))
            low = [max(y - h, 1e-4) for y, h in zip(means, half, strict=True)]
            high = [y + h for y, h in zip(means, half, strict=True)]
            right.plot(steps, means, color=color, lw=1.5)
            right.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
            right.annotate(arm, named_at, color=color)
        right.set(yscale="log", ylim=(2e-3, 2), xlabel="optimizer step in its batch")
        right.set_xticks(range(2, 17, 2))
        right.set_title("KL(mu || theta), nats a token", loc="left", fontsize=9)
        right.spines[["top", "right"]].set_visible(False)
        right.grid(alpha=0.3)
        return as_svg(figure)


def keep(run_dir: Path) -> Path:
    """The curve of a finished run as a result file, under the commit that made it."""
    rows = metrics.read(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    result = {
        "what": "one run of configs/demo.toml",
        "wall_s": summary["wall_s"],
        "mean_lag": summary["lag"]["mean"],
        "lag_histogram": summary["lag_histogram"],
        "heldout": [[r["step"], r["eval/heldout"]] for r in rows if "eval/heldout" in r],
        "reward": [[r["step"], r["reward/mean"]] for r in rows if "reward/mean" in r],
    }
    return results_file.write("demo_run", result, commit_of(run_dir))


def keep_timeline(run_dir: Path, name: str) -> Path:
    """The spans around the middle of a run as a result file, under the commit that made it."""
    config = load.load(str(run_dir / "config.toml"), [])
    size = config.learner.groups * config.learner.group_size
    evaluated = config.evaluation.final_prompts + config.evaluation.ood_prompts
    result = {
        "what": "the timeline of a run of configs/demo.toml with evaluation.every = 0",
        "limit": int(config.staleness.limit),
        "wait": config.staleness.wait,
        **timelines.excerpt(run_dir, size, evaluated),
    }
    return results_file.write(name, result, commit_of(run_dir))


def keep_ledger(run_dir: Path) -> Path:
    """The tokens of a run by what became of them, under the commit that made it."""
    config = load.load(str(run_dir / "config.toml"), [])
    late = config.staleness
    result = {
        "what": "the ledger of a run of the demo after each batch; its generator was killed once",
        "settings": {
            "staleness.max_lag": late.max_lag,
            "staleness.on_exceed": late.on_exceed,
            "staleness.order": late.order,
            "staleness.delay": late.delay,
            "advantage.no_spread": config.advantage.no_spread,
        },
        **run_pictures.ledger_excerpt(run_dir),
    }
    return results_file.write("ledger_over_time", result, commit_of(run_dir))


def commit_of(run_dir: Path) -> str:
    """The short name of the commit that made a run."""
    return subprocess.run(
        ["git", "rev-parse", "--short", (run_dir / "commit").read_text().strip()],
        cwd=results_file.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def newest(name: str) -> dict[str, Any]:
    """The newest result of a name."""
    files = sorted(RESULTS.glob(f"*_{name}.json"))
    return json.loads(files[-1].read_text())


def demo_result() -> dict[str, Any]:
    return newest("demo_run")


def draw_run(
    title: str,
    height: float,
    part: dict[str, Any],
    add: Callable[[Axes, dict[str, Any]], None],
    pad: float = 6,
) -> str:
    """An SVG of a run over time, `height` inches high; pad: points below its title."""
    with rc_context({**SETTINGS, "font.size": 9}):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        axes = figure.add_subplot()
        add(axes, part)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=pad)
        return as_svg(figure)


def drawn() -> dict[str, str]:
    """Name of the image -> its SVG."""
    timeline, queue = newest("demo_timeline"), newest("demo_queue")
    grid, many, wrong = (json.loads((RESULTS / file).read_text()) for file in (GRID, HIGH, HACK))
    return {
        "demo.svg": demo(demo_result()),
        "ratios.svg": ratios(json.loads((RESULTS / SPEED).read_text())),
        "timeline.svg": draw_run(
            "A run of the demo: each color is a version of the weights",
            1.9,
            timeline,
            timelines.draw_timeline,
            pad=20,
        ),
        "batches.svg": draw_run(
            f"The life of seven batches at staleness.max_lag = {timeline['limit']}",
            3.4,
            timeline,
            timelines.draw_batches,
            pad=20,
        ),
        "queue.svg": draw_run(
            f"Samples of a run at staleness.max_lag = {queue['limit']}, as a queue",
            3.8,
            queue,
            run_pictures.draw_queue,
        ),
        "ledger.svg": draw_run(
            "Generated tokens of a run, by what became of them",
            3.2,
            newest("ledger_over_time"),
            run_pictures.draw_ledger,
        ),
        "accuracy.svg": draw_run(
            "The demo: held-out accuracy against time, mean of the seeds and 95 % interval",
            3.2,
            newest("demo_seeds"),
            run_pictures.draw_accuracy,
        ),
        "lag.svg": lag(grid),
        "high_lag.svg": high(many),
        "middle_lag.svg": middle(json.loads((RESULTS / MIDDLE).read_text())),
        "kl_direction.svg": direction(json.loads((RESULTS / DIRECTION).read_text())),
        "reward_hacking.svg": hack(wrong),
        "reshape_collapse.svg": collapse(json.loads((RESULTS / COLLAPSE).read_text())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a finished run of configs/demo.toml")
    parser.add_argument("--timeline", type=Path, help="one evaluated at its start and end alone")
    parser.add_argument("--queue", type=Path, help="one that uses all of its room, too")
    parser.add_argument("--ledger", type=Path, help="a finished run that loses tokens")
    args = parser.parse_args()
    if args.run:
        print(keep(args.run), file=sys.stderr)
    if args.timeline:
        print(keep_timeline(args.timeline, "demo_timeline"), file=sys.stderr)
    if args.queue:
        print(keep_timeline(args.queue, "demo_queue"), file=sys.stderr)
    if args.ledger:
        print(keep_ledger(args.ledger), file=sys.stderr)
    IMAGES.mkdir(exist_ok=True)
    for name, text in drawn().items():
        (IMAGES / name).write_text(text)
        print(IMAGES / name)


if __name__ == "__main__":
    main()
