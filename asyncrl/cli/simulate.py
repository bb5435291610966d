"""`asyncrl simulate`: the command's options; asyncrl/experiments/simulate implements it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from asyncrl.cli.base import PATH, command, count_option, options


@command(
    "asyncrl simulate demo",
    "asyncrl simulate demo --from runs/R --limit 4 --more 2",
    "asyncrl simulate demo --time 'reward=pareto(0.2,2.5,4)' --treatments",
)
@options()
@click.option("--from", "from_run", type=PATH, help="take the times from this run directory")
@click.option("--times", "file", type=PATH, help="take times from this TOML file")
@click.option(
    "--time",
    "single_times",
    multiple=True,
    metavar="KEY=VALUE",
    help="set one time, such as swap=0.5 or reward=pareto(0.2,2.5,4); repeatable",
)
@click.option(
    "--limit",
    "limits",
    type=float,
    multiple=True,
    metavar="K",
    help="predict the effect of a staleness limit of K; repeatable",
)
@click.option(
    "--more",
    "added_generators",
    type=int,
    multiple=True,
    metavar="N",
    help="predict the effect of N more generators; repeatable",
)
@click.option(
    "--sync",
    "syncs",
    type=float,
    multiple=True,
    metavar="X",
    help="predict the effect of weight syncs X times as fast; repeatable",
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
    help="compare the cost of treatments of late samples: wait, mask, downweight, drop, and a "
    "deadline for sessions",
)
@click.option(
    "--deadline",
    type=float,
    metavar="S",
    help="deadline of --treatments in seconds  [default: a tenth of the sessions exceed it]",
)
@count_option("--seeds", 3, "simulated runs to average")
@click.option("--steps", type=click.IntRange(1), help="batches  [default: the config's]")
@click.option("--no-evaluation", is_flag=True, help="simulate without held-out evaluation")
@click.option(
    "--plot",
    type=PATH,
    metavar="FILE.html",
    help="plot throughput, idle shares and lag against the limit",
)
def simulate(
    source: str,
    sets: tuple[str, ...],
    as_json: bool,
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
    from asyncrl.config import load
    from asyncrl.records import rundir

    config = load.load_to_train(source, sets)  # before the imports of torch below
    if from_run is not None:
        rundir.require_run(from_run)
    from asyncrl.experiments.simulate import what_if

    time_model, origin = what_if.collect_times(from_run, file, single_times)
    outcome = what_if.simulate(
        config,
        time_model,
        origin,
        name=f"simulate {source}",
        evaluate=not no_evaluation,
        **questions,
    )
    print(json.dumps(outcome) if as_json else what_if.format_result(outcome))
