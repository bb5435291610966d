"""Draw the figures of README and docs, docs/img/*.svg, from result files.

    python benchmarks/figures.py                 draw all figures
    python benchmarks/figures.py --run RUN_DIR   first store a finished run of the demo as a result

tests/project/test_docs.py draws them again and compares."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from lib import results_file

from asyncrl.experiments.compare.sweep_page import PlotLine, svg
from asyncrl.records import metrics

IMAGES = results_file.ROOT / "docs" / "img"
GRID = "2026-11-21_3ff3b71_4core_lag_grid.json"
GRID_TASK = "rle-5e-4"
ARMS = {
    "ppo": ("PPO on the behaviour policy", "#2563eb"),
    "tis": ("truncated weights (tis)", "#d97706"),
    "none": ("no correction", "#dc2626"),
}

HIGH = "2026-11-23_fef789a_2core_high_lag_all_lags.json"
HIGH_ARMS = {
    "gmpo": ("GMPO", "#16a34a"),
    "vespo": ("VESPO", "#9333ea"),
    "seq_tis": ("whole answers' weights, cut", "#d97706"),
    "ppo": ("PPO on mu", "#2563eb"),
}

HACK = "2026-11-21_fd72967_4core_kl_placement_rlehack_lag0.json"
HACK_ARMS = {
    "no KL": ("no KL", "#dc2626", "#fecaca"),
    "k3 in reward, 0.1": ("k3 in the reward", "#d97706", "#fde68a"),
    "k1 in reward, 0.1": ("k1 in the reward", "#2563eb", "#bfdbfe"),
}
HACK_AT = ((40.0, 0.2), (15.5, 0.31), (36.0, 0.66))


def framed(plot: str, width: int, height: int) -> str:
    """An SVG of its own: name space, font and a white ground, so that it reads on a dark page."""
    head, rest = plot.split(">", 1)
    head = head.replace("width='100%'", f"width='{width}' height='{height}'")
    return (
        f"{head} xmlns='http://www.w3.org/2000/svg' font-family='sans-serif' font-size='12'>"
        f"<rect width='{width}' height='{height}' fill='white'/>{rest}\n"
    )


def demo(result: dict[str, Any]) -> str:
    """A run of the demo: training reward of each batch, accuracy on held-out prompts."""
    heldout = PlotLine("held-out accuracy", "#2563eb", [tuple(p) for p in result["heldout"]], True)
    reward = PlotLine("training reward", "#9ca3af", [tuple(p) for p in result["reward"]], True)
    start, end = result["heldout"][0][1], result["heldout"][-1][1]
    title = (
        f"held-out accuracy {start:.2f} to {end:.2f} in {result['wall_s']:.0f} s of RL, "
        f"mean lag {result['mean_lag']:.2f} versions"
    )
    steps = [x for x, _ in result["heldout"]]
    middle = steps[len(steps) // 2]
    labels = [
        (middle, dict(heldout[2])[middle] - 0.12, "held-out accuracy"),
        (middle, dict(heldout[2])[middle] + 0.14, "training reward"),
    ]
    return framed(svg(title, [reward, heldout], "batch", "share", labels=labels), 560, 260)


def lag(result: dict[str, Any]) -> str:
    """Accuracy at the end against injected lag, a line a correction, mean of the seeds."""
    cells = result["tasks"][GRID_TASK]["cells"]
    lines: list[PlotLine] = []
    for arm, (name, colour) in ARMS.items():
        points = sorted((float(c["limit"]), c["final"]) for c in cells if c["correction"] == arm)
        lines.append(PlotLine(name, colour, points, True))
    title = "task rle, five seeds: what lag costs, by correction"
    labels = [(x, y, ARMS[arm][0]) for arm, (x, y) in zip(ARMS, AT, strict=True)]
    plot = svg(title, lines, "injected lag, versions", "held-out accuracy", labels=labels)
    return framed(plot, 560, 260)


def high(result: dict[str, Any]) -> str:
    """Share of wrong answers, mean of the run, against injected lag, each method at its own rate,
    mean of the seeds.
    """
    by_lag = result["tasks"][GRID_TASK]["1"]["by_lag"]
    lines: list[PlotLine] = []
    for arm, (name, colour) in HIGH_ARMS.items():
        wrong = sorted((float(lag), 1 - row[arm]["area"]) for lag, row in by_lag.items())
        lines.append(PlotLine(name, colour, wrong, True))
    title = "task rle, each method at its own rate"
    labels = [(x, y, HIGH_ARMS[arm][0]) for arm, (x, y) in zip(HIGH_ARMS, HIGH_AT, strict=True)]
    name = "held-out answers, wrong, mean of the run"
    plot = svg(title, lines, "injected lag, versions", name, labels=labels)
    return framed(plot, 560, 260)


def hack(result: dict[str, Any]) -> str:
    """True accuracy on a task whose training checker is wrong, by KL term: the mean of the seeds,
    and each seed in a pale line.
    """
    seeds: list[PlotLine] = []
    means: list[PlotLine] = []
    for arm, (name, colour, pale) in HACK_ARMS.items():
        runs = result["arms"][arm]["each"]
        curves = [list(zip(run["steps"], run["accuracy"], strict=True)) for run in runs]
        seeds += [PlotLine(f"{name}, one seed", pale, curve, True) for curve in curves]
        points = [(at[0][0], fmean(y for _, y in at)) for at in zip(*curves, strict=True)]
        means.append(PlotLine(name, colour, points, True))
    labels = [(x, y, HACK_ARMS[arm][0]) for arm, (x, y) in zip(HACK_ARMS, HACK_AT, strict=True)]
    title = "task rlehack: the checker of the training reward is wrong"
    plot = svg(title, [*seeds, *means], "batch", "true held-out accuracy", labels=labels)
    return framed(plot, 560, 260)


HIGH_AT = ((54.0, 0.281), (45.0, 0.231), (14.0, 0.285), (24.0, 0.313))
AT = ((8.5, 0.66), (4.6, 0.28), (9.0, 0.02))  # where each line's name stands


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
