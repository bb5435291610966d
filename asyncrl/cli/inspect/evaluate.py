"""`asyncrl eval`: score a model directory on the held-out sets of a config, without a run."""

from __future__ import annotations

import click

from asyncrl.cli import result
from asyncrl.cli.base import (
    command,
    config_argument,
    json_option,
    option_table,
    print_progress,
    set_option,
)


@command(
    "asyncrl eval runs/R/model demo",
    "asyncrl eval models/smollm2 config.toml --only heldout --prompts 200 --json",
)
@click.argument("model")
@config_argument()
@set_option("override a config key; repeatable")
@option_table("eval")
@json_option
def eval(  # the name of the command
    model: str,
    source: str,
    sets: tuple[str, ...],
    only: tuple[str, ...],
    prompts: int | None,
    as_json: bool,
) -> None:
    """Score a model directory on the held-out sets of CONFIG.

    MODEL is an exported or a Hugging Face directory, or hf://ORG/NAME. Task, rewards, sampling and
    engine are those of CONFIG; its own model is not read.
    """
    from asyncrl.config import load
    from asyncrl.models import fetch

    path = fetch.locate_model(model, "MODEL")
    load.load(source, sets)  # before the imports of torch below
    from asyncrl.experiments import model_evaluation

    progress = model_evaluation.EvaluationProgress(print_progress)
    evaluation = model_evaluation.evaluate(path, source, sets, only, prompts, progress)
    if as_json:
        result.print_result(evaluation)
    else:
        print(model_evaluation.format_evaluation(evaluation))
