"""`asyncrl new`: write a new project from the files in templates/new."""

import json
import shutil
from pathlib import Path

from asyncrl.cli.base import command, emit
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import fill
from asyncrl.models import fetch

TEMPLATE = Path(__file__).parent / "templates" / "new"
FILES = ("config.toml", "prompts.jsonl", "heldout.jsonl", "README.md")  # of every project


def build_config(*, agent: bool, model: str) -> str:
    """Return the template's config with the given model, and with an agent or a reward."""
    text = (TEMPLATE / "config.toml").read_text(encoding="utf-8")
    return fill(text, agent=agent, model=model and json.dumps(model))


def write(directory: Path, *, agent: bool = False, model: str = "") -> list[Path]:
    """Write the project's files and return their paths.

    Raises ConfigError if the folder is not empty, or `model` is not a model."""
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: choose a new or empty folder")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: choose a new or empty folder")
    if model and not model.startswith(fetch.HUB):
        fetch.require_directory(model, "--model")
        model = str(Path(model).absolute())
    text = build_config(agent=agent, model=model)
    directory.mkdir(parents=True, exist_ok=True)
    files = ["agent.py" if agent else "reward.py", *FILES]
    for name in files:
        source = "AGENT.md" if agent and name == "README.md" else name
        shutil.copyfile(TEMPLATE / source, directory / name)
    (directory / "config.toml").write_text(text, encoding="utf-8")
    return [directory / name for name in files]


@command
def new(directory: Path, agent: bool, model: str) -> None:
    """Write a new project into DIR.

    It has a config, a reward function, prompts and a README.
    """
    files = [*map(str, write(directory, agent=agent, model=model))]
    text = "\n".join([*files, f"train: asyncrl run {directory / 'config.toml'}"])
    emit({"directory": str(directory), "files": files}, text)
