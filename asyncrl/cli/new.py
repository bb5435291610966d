"""`asyncrl new`: a project of one's own, from the files in templates/new."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from asyncrl.cli import result
from asyncrl.contract.errors import ConfigError

TEMPLATE = Path(__file__).parent / "templates" / "new"
FILES = ("config.toml", "reward.py", "prompts.jsonl", "heldout.jsonl", "README.md")
AGENT_FILES = ("config.toml", "agent.py", "prompts.jsonl", "heldout.jsonl", "README.md")
# what a language model needs otherwise than the tiny one: line of the template -> line
FOR_LANGUAGE_MODELS = {
    "slots = 256        #": "slots = 16           #",
    "max_new_tokens = 4 #": "max_new_tokens = 128 #",
    "context = 16       #": "context = 1024       #",
    "groups = 32    #": "groups = 8     #",
    "lr = 5e-4      # for a tiny model; 1e-6 is usual for a large one": "lr = 1e-6",
    "max_tokens = 16                   #": "max_tokens = 256                  #",
}


def starting_point(model: str) -> str:
    """`model.path` for what was given as --model.  Raises ConfigError for a directory without a
    model.
    """
    from asyncrl.models.fetch import HUB

    if model.startswith(HUB):
        return model
    path = Path(model).absolute()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: no model directory (it has no config.json); give one, or "
            "hf://ORG/NAME for a model of the hub"
        )
    return str(path)


def config_text(*, agent: bool, model: str) -> str:
    """The template's config with an agent in place of the reward, and with the model that is
    given.
    """
    before, _, rest = (TEMPLATE / "config.toml").read_text(encoding="utf-8").partition("[reward]\n")
    reward, gap, rest = rest.partition("\n\n")
    if agent:
        section = (TEMPLATE / "agent.toml").read_text(encoding="utf-8").rstrip()
    else:
        section = f"[reward]\n{reward}"
    text = before + section + gap + rest
    if not model:
        return text
    head, _, rest = text.partition("[model]\n")
    _, gap, rest = rest.partition("\n\n")
    text = f"{head}[model]\npath = {json.dumps(model)}{gap}{rest}"
    for line, other in FOR_LANGUAGE_MODELS.items():
        text = text.replace(line, other)
    return text


def write(directory: Path, *, agent: bool = False, model: str = "") -> list[Path]:
    """The project's files, written.  Raises ConfigError where something is in the way, and for a
    `model` that is none.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: choose a folder that is new or empty")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty: choose a folder that is new or empty")
    text = config_text(agent=agent, model=starting_point(model) if model else "")
    directory.mkdir(parents=True, exist_ok=True)
    files = AGENT_FILES if agent else FILES
    for name in files:
        source = "AGENT.md" if agent and name == "README.md" else name
        shutil.copyfile(TEMPLATE / source, directory / name)
    (directory / "config.toml").write_text(text, encoding="utf-8")
    return [directory / name for name in files]


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--agent", is_flag=True, help="a sample is played by an agent of yours, over HTTP")
@click.option(
    "--model",
    default="",
    metavar="hf://ORG/NAME|DIR",
    help="the model to begin with; without it, a tiny one is built for the prompts",
)
@click.option("--json", "as_json", is_flag=True, help="the last line of stdout is one JSON object")
def new(directory: Path, agent: bool, model: str, as_json: bool) -> None:
    """Write a project of your own into DIR: config, reward function, prompts, the commands."""
    files = write(directory, agent=agent, model=model)
    if as_json:
        result.print_result({"directory": str(directory), "files": [str(file) for file in files]})
        return
    for file in files:
        print(file)
    print(f"train: asyncrl run {directory / 'config.toml'}")
