"""`asyncrl simulate`: the command's options; asyncrl/experiments/simulate implements it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.cli.base import command, option_table, options


@command(
    "asyncrl simulate demo",
    "asyncrl simulate demo --from runs/R --limit 4 --more 2",
    "asyncrl simulate demo --time 'reward=pareto(0.2,2.5,4)' --treatments",
)
@options()
@option_table("simulate")
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
