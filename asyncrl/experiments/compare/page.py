"""The page of a comparison: overlaid curves with bands, what each arm was, the verdicts, and the
numbers as JSON for programs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.tree import Config
from asyncrl.experiments.compare import verdict
from asyncrl.experiments.compare.comparison import KL_BATCHES, Cell, mean, signs_told
from asyncrl.records import atomic_write, page_kit
from asyncrl.records.page_kit import COLOURS
from asyncrl.records.signs import interval

HEAD = (
    "arm",
    "start",
    "end",
    "each seed",
    "OOD start",
    "OOD end",
    "KL to ref",
    "area",
    "seconds of RL",
    "seconds to target",
    "tokens trained",
    "trained tok/s",
    "mean lag",
    "max lag",
    "ESS",
    "unstable",
    "processes",
)


def clean(x: Any) -> Any:
    """The same with None for what is not a finite number: JSON knows no NaN."""
    if isinstance(x, dict):
        return {k: clean(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [clean(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def curves(
    title: str,
    unit: str,
    arms: Sequence[str],
    cells: Sequence[Cell],
    points: Callable[[Cell], list[tuple[float, float]]],
) -> Any:
    """One line an arm, the mean over seeds at each step, in a band from the lowest to the highest
    seed.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, name in enumerate(arms):
        at: dict[float, list[float]] = {}
        for c in cells:
            if c.arm == name:
                for x, y in points(c):
                    at.setdefault(x, []).append(y)
        xs = sorted(at)
        colour = COLOURS[i % len(COLOURS)]
        if len({c.seed for c in cells}) > 1 and xs:
            figure.add_scatter(
                x=[*xs, *xs[::-1]],
                y=[*(max(at[x]) for x in xs), *(min(at[x]) for x in xs[::-1])],
                fill="toself",
                fillcolor=colour,
                opacity=0.15,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
            )
        figure.add_scatter(
            x=xs, y=[mean(at[x]) for x in xs], name=name, mode="lines", line={"color": colour}
        )
    figure.update_layout(
        title={"text": title, "font": {"size": 14}, "y": 0.97},
        height=330,
        margin={"l": 55, "r": 15, "t": 62, "b": 40},
        template="plotly_white",
        legend={"orientation": "h", "y": 1.0, "x": 0, "xanchor": "left", "yanchor": "bottom"},
    )
    figure.update_xaxes(title="version")
    figure.update_yaxes(title=unit, rangemode="tozero")
    return figure


def _metric(name: str) -> Callable[[Cell], list[tuple[float, float]]]:
    return lambda c: [(float(r["step"]), float(r[name])) for r in c.rows if name in r]


def bands(found: dict[str, Any], config: Config) -> str:
    """What lines and bands of the curves are, and how sure one point of accuracy is."""
    n = len(found["seeds"])
    lines = (
        f"Lines: mean over {n} seeds; bands: from the lowest to the highest seed, no interval."
        if n > 1
        else "Lines: one seed."
    )
    e = config.evaluation

    def within(size: int) -> str:
        return f"+-{interval(0.5, size, 0.0, 1.0):.3f} at most (n = {size:,} held-out prompts)"

    return (
        f"{lines} 95 % interval of one seed's accuracy, over prompts: "
        f"{within(e.final_prompts)} at both ends, {within(e.prompts)} between."
    )


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table of arms, as text."""

    def show(x: float | None, form: str) -> str:
        return "-" if x is None or not math.isfinite(x) else format(x, form)

    def timed(a: dict[str, Any], key: str, form: str) -> str:
        """A warm run's times are not those of a real one."""
        return f"({show(a[key], form)})" if a["warm"] else show(a[key], form)

    return [
        [
            n,
            show(a["heldout_start"], ".3f"),
            show(a["heldout_end"], ".3f"),
            " ".join(f"{x:.3f}" for x in a["each"]),
            show(a["ood_start"], ".3f"),
            show(a["ood_end"], ".3f"),
            show(a["kl_ref"], ".3g"),
            show(a["area"], ".3f"),
            timed(a, "wall_s", ".1f"),
            timed(a, "seconds_to_target", ".1f"),
            show(a["tokens"], ",.0f"),
            timed(a, "tokens_per_s", ",.0f"),
            show(a["lag"], ".2f"),
            str(a["lag_max"]),
            show(a["ess"], ".3f"),
            f"{a['unstable']} of {len(a['each'])}",
            "warm" if a["warm"] else "real",
        ]
        for n, a in found["arms"].items()
    ]


def write(
    directory: Path,
    name: str,
    cells: Sequence[Cell],
    found: dict[str, Any],
    settings: Sequence[tuple[str, str]],
    config: Config,
) -> Path:
    """DIR/report.html, comparison.json and the TensorBoard view of all arms."""

    arms = list(found["arms"])
    figures = [
        curves(
            "Accuracy on held-out prompts",
            "accuracy",
            arms,
            cells,
            lambda c: list(zip(c.steps, c.accuracy, strict=True)),
        ),
        curves(
            "Accuracy on out-of-distribution prompts",
            "accuracy",
            arms,
            cells,
            lambda c: sorted(c.ood.items()),
        ),
        curves(
            "KL from target to reference",
            "nats a token (k3)",
            arms,
            cells,
            _metric("kl/target_ref_k3"),
        ),
        curves("Lag of trained tokens", "versions, mean", arms, cells, _metric("lag/mean")),
        curves(
            "Effective sample size of the raw ratios",
            "share",
            arms,
            cells,
            _metric("is/target_ess"),
        ),
        curves(
            "KL from behaviour to target",
            "nats a token (k3)",
            arms,
            cells,
            _metric("kl/behavior_target_k3"),
        ),
        curves("Entropy", "nats a token", arms, cells, _metric("policy/entropy")),
        curves("Gradient norm", "before clipping", arms, cells, _metric("optim/grad_norm")),
        curves("Answer length", "tokens", arms, cells, _metric("answer/length")),
        curves("Reward of the training batch", "mean", arms, cells, _metric("reward/mean")),
    ]
    plots = [page_kit.plot(f) for f in figures]
    blob = json.dumps(clean(found))
    trouble = [f"{c.arm}, seed {c.seed}: {x}" for c in cells for x in c.trouble]
    trouble += [f"{n}: likely cause: {a['cause']}" for n, a in found["arms"].items() if a["cause"]]
    same = "; ".join(f"{n} {sum(x)} of {len(x)} seeds" for n, x in found["same_data"].items())
    same += "".join(
        f"; {n}, seed {seed}: {x}"
        for n, each in found["data_apart"].items()
        for seed, x in zip(found["seeds"], each, strict=True)
        if x
    )
    page = page_kit.render(
        "compare.html",
        name=name,
        bands=bands(found, config),
        seeds=len(found["seeds"]),
        steps=config.learner.steps,
        groups=config.learner.groups,
        size=config.learner.group_size,
        settings=settings,
        data=same,
        verdicts=[v["text"] for v in found["verdicts"]],
        trade=found["trade"],
        head=HEAD,
        table=rows(found),
        trouble=trouble,
        signs=[
            x for n, a in found["arms"].items() for x in signs_told(n, a["signs"], len(a["each"]))
        ],
        plots=plots,
        rules=verdict.Bounds(),
        kl_batches=KL_BATCHES,
        library=page_kit.library(),
        blob=page_kit.embedded(blob),
    )
    for path, text in ((directory / "report.html", page), (directory / "comparison.json", blob)):
        atomic_write.write(path, text)
    _board(directory / "tensorboard", cells, settings)
    return directory / "report.html"


def _board(directory: Path, cells: Sequence[Cell], settings: Sequence[tuple[str, str]]) -> None:
    """All arms side by side, with the hyperparameters view."""
    import shutil

    from tensorboardX import SummaryWriter

    shutil.rmtree(directory, ignore_errors=True)
    told = dict(settings)
    for c in cells:
        with SummaryWriter(str(directory / f"{c.arm}-seed{c.seed}")) as board:
            for x, y in zip(c.steps, c.accuracy, strict=True):
                board.add_scalar("eval/heldout", y, int(x))
            for x, y in sorted(c.ood.items()):
                board.add_scalar("eval/ood", y, int(x))
            for r in c.rows:
                for name in (
                    "lag/mean",
                    "is/target_ess",
                    "kl/behavior_target_k3",
                    "kl/target_ref_k3",
                    "policy/entropy",
                    "reward/mean",
                ):
                    if name in r:
                        board.add_scalar(name, r[name], int(r["step"]))
            board.add_hparams(
                {"arm": c.arm, "seed": c.seed, "settings": told[c.arm]},
                {"final/heldout": c.final},
                name=".",
            )
