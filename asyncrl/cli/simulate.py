"""`asyncrl simulate`: the command; simulating.py has what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from asyncrl.cli.base import PATH, options


@click.command()
@options()
@click.option("--from", "from_run", type=PATH, help="take the times from this run directory")
@click.option("--times", "file", type=PATH, help="take times from this TOML file")
@click.option(
    "--time",
    "words",
    multiple=True,
    metavar="KEY=VALUE",
    help="one time, as in swap=0.5 or reward=pareto(0.2,2.5,4); repeatable",
)
@click.option(
    "--limit",
    "limits",
    type=float,
    multiple=True,
    metavar="K",
    help="what would this limit give? repeatable",
)
@click.option(
    "--more",
    type=int,
    multiple=True,
    metavar="N",
    help="what would N more generators give? repeatable",
)
@click.option(
    "--sync",
    "syncs",
    type=float,
    multiple=True,
    metavar="X",
    help="what would a weight sync X times as fast give? repeatable",
)
@click.option(
    "--generators",
    default="",
    metavar="N,N,...",
    help="simulate with each of these numbers of generators, 1 to 10000",
)
@click.option(
    "--treatments",
    is_flag=True,
    help="what each treatment of late samples costs: wait, mask, downweight, drop, and of "
    "sessions a deadline",
)
@click.option(
    "--deadline",
    type=float,
    metavar="S",
    help="seconds of --treatments' deadline; a tenth of the sessions pass it when absent",
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(1), help="batches; the config's when absent")
@click.option("--no-evaluation", is_flag=True, help="leave out held-out evaluation")
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.html",
    help="throughput, idle shares and lag against the limit",
)
def simulate(
    source: str,
    sets: tuple[str, ...],
    as_json: bool,
    from_run: Path | None,
    file: Path | None,
    words: tuple[str, ...],
    no_evaluation: bool,
    **given: Any,
) -> None:
    """Simulate CONFIG without a model: throughput, idle shares, lag; and what another limit,
    generator or weight sync would give.
    """
    from asyncrl.cli import simulating
    from asyncrl.config import load

    known, where = simulating.times_for(from_run, file, words)
    out = simulating.simulate(
        load.load(source, sets),
        known,
        where,
        name=f"simulate {source}",
        evaluate=not no_evaluation,
        **given,
    )
    print(json.dumps(out) if as_json else simulating.format_outcome(out))
