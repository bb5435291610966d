"""Draw the figures of README and docs, docs/img/*.svg, from result files.

    python benchmarks/figures.py                 draw all figures
    python benchmarks/figures.py --run RUN_DIR   first store a finished run of the demo as a result

tests/project/test_docs.py draws them again and compares."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lib import results_file
from matplotlib import rc_context
from matplotlib.figure import Figure

from asyncrl.experiments.figure.figure_drawing import SETTINGS
from asyncrl.records import metrics

IMAGES = results_file.ROOT / "docs" / "img"
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
    "gmpo": ("GMPO", "#16a34a", (54.0, 0.281)),
    "vespo": ("VESPO", "#9333ea", (45.0, 0.231)),
    "seq_tis": ("whole answers' weights, cut", "#d97706", (14.0, 0.285)),
    "ppo": ("PPO on mu", "#2563eb", (24.0, 0.313)),
}

HACK = "2026-11-21_fd72967_4core_kl_placement_rlehack_lag0.json"
HACK_ARMS = {
    "no KL": ("no KL", "#dc2626", "#fecaca", (40.0, 0.2)),
    "k3 in reward, 0.1": ("k3 in the reward", "#d97706", "#fde68a", (15.5, 0.31)),
    "k1 in reward, 0.1": ("k1 in the reward", "#2563eb", "#bfdbfe", (36.0, 0.66)),
}


class NamedLine(NamedTuple):
    """A line of a figure: (x, y) points in a color, with its name beside it.

    named_at: where the name begins; None: without a name.
    """

    name: str
    color: str
    points: list[tuple[float, float]]
    named_at: tuple[float, float] | None = None


def draw(title: str, lines: Sequence[NamedLine], across: str, up: str) -> str:
    """An SVG on a white ground, so that it reads on a dark page; y starts at 0."""
    with rc_context({**SETTINGS, "font.size": 9}):
        figure = Figure(figsize=(7.0, 3.25), layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            axes.plot(*zip(*line.points, strict=True), color=line.color, lw=1.5)
            if line.named_at is not None:
                axes.annotate(line.name, line.named_at, color=line.color)
        top = 1.12 * max(y for line in lines for _, y in line.points)
        axes.set(xlabel=across, ylabel=up, ylim=(0, top), xmargin=0.02)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
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
        points = sorted((float(c["limit"]), c["final"]) for c in cells if c["correction"] == arm)
        lines.append(NamedLine(name, color, points, named_at))
    title = "task rle, five seeds: what lag costs, by correction"
    return draw(title, lines, "injected lag, versions", "held-out accuracy")


def high(result: dict[str, Any]) -> str:
    """Share of wrong answers, mean of the run, against injected lag, each method at its own rate,
    mean of the seeds.
    """
    by_lag = result["tasks"][GRID_TASK]["1"]["by_lag"]
    lines = []
    for arm, (name, color, named_at) in HIGH_ARMS.items():
        wrong = sorted((float(lag), 1 - row[arm]["area"]) for lag, row in by_lag.items())
        lines.append(NamedLine(name, color, wrong, named_at))
    title = "task rle, each method at its own rate"
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


def keep(run_dir: Path) -> Path:
    """The curve of a finished run as a result file, under the commit that made it."""
    rows = metrics.read(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    made_by = subprocess.run(
        ["git", "rev-parse", "--short", (run_dir / "commit").read_text().strip()],
        cwd=results_file.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    result = {
        "what": "one run of configs/demo.toml",
        "wall_s": summary["wall_s"],
        "mean_lag": summary["lag"]["mean"],
        "lag_histogram": summary["lag_histogram"],
        "heldout": [[r["step"], r["eval/heldout"]] for r in rows if "eval/heldout" in r],
        "reward": [[r["step"], r["reward/mean"]] for r in rows if "reward/mean" in r],
    }
    return results_file.write("demo_run", result, made_by)


def demo_result() -> dict[str, Any]:
    newest = sorted((results_file.ROOT / "benchmarks" / "results").glob("*_demo_run.json"))[-1]
    return json.loads(newest.read_text())


def drawn() -> dict[str, str]:
    """Name of the image -> its SVG."""
    results = results_file.ROOT / "benchmarks" / "results"
    grid, many, wrong = (json.loads((results / file).read_text()) for file in (GRID, HIGH, HACK))
    return {
        "demo.svg": demo(demo_result()),
        "lag.svg": lag(grid),
        "high_lag.svg": high(many),
        "reward_hacking.svg": hack(wrong),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a finished run of configs/demo.toml")
    args = parser.parse_args()
    if args.run:
        print(keep(args.run), file=sys.stderr)
    IMAGES.mkdir(exist_ok=True)
    for name, text in drawn().items():
        (IMAGES / name).write_text(text)
        print(IMAGES / name)


if __name__ == "__main__":
    main()
