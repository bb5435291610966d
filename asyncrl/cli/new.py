"""`asyncrl new`: a project of one's own, from the files in templates/new."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from asyncrl.cli import result
from asyncrl.contract.errors import ConfigError

TEMPLATE = Path(__file__).parent / "templates" / "new"
FILES = ("config.toml", "reward.py", "prompts.jsonl", "heldout.jsonl", "README.md")


def write(directory: Path) -> list[Path]:
    """The project's files, written.  Raises ConfigError where something is in the way."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: choose a folder that is new or empty")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: choose a folder that is new or empty")
    directory.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(TEMPLATE / name, directory / name)) for name in FILES]


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="the last line of stdout is one JSON object")
def new(directory: Path, as_json: bool) -> None:
    """Write a project of your own into DIR: config, reward function, prompts, the commands."""
    files = write(directory)
    if as_json:
        result.print_result({"directory": str(directory), "files": [str(file) for file in files]})
        return
    for file in files:
        print(file)
    print(f"train: asyncrl run {directory / 'config.toml'}")
