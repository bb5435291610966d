"""`asyncrl new`: write a new project from the files in templates/new."""

import json
import shutil
from pathlib import Path

from asyncrl.cli import result
from asyncrl.cli.base import command
from asyncrl.contract.errors import ConfigError

TEMPLATE = Path(__file__).parent / "templates" / "new"
FILES = ("config.toml", "prompts.jsonl", "heldout.jsonl", "README.md")  # of every project
# line of the template -> line for a language model
FOR_LANGUAGE_MODELS = {
    "slots = 256        #": "slots = 16           #",
    "max_new_tokens = 4 #": "max_new_tokens = 128 #",
    "context = 16       #": "context = 1024       #",
    "groups = 32    #": "groups = 8     #",
    "lr = 5e-4      # for a tiny model; 1e-6 is usual for a large one": "lr = 1e-6",
    "max_tokens = 16                   #": "max_tokens = 256                  #",
}


def build_config(*, agent: bool, model: str) -> str:
    """Return the template's config with the given model, and with an agent or a reward."""
    head, _, tail = (TEMPLATE / "config.toml").read_text(encoding="utf-8").partition("[reward]\n")
    reward, gap, tail = tail.partition("\n\n")
    if agent:
        section = (TEMPLATE / "agent.toml").read_text(encoding="utf-8").rstrip()
    else:
        section = f"[reward]\n{reward}"
    text = head + section + gap + tail
    if not model:
        return text
    start, _, tail = text.partition("[model]\n")
    _, gap, tail = tail.partition("\n\n")
    text = f"{start}[model]\npath = {json.dumps(model)}{gap}{tail}"
    for line, replacement in FOR_LANGUAGE_MODELS.items():
        text = text.replace(line, replacement)
    return text


def write(directory: Path, *, agent: bool = False, model: str = "") -> list[Path]:
    """Write the project's files and return their paths.

    Raises ConfigError if the folder is not empty, or `model` is not a model."""
    from asyncrl.models import fetch

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
def new(directory: Path, agent: bool, model: str, as_json: bool) -> None:
    """Write a new project into DIR.

    It has a config, a reward function, prompts and a README.
    """
    files = write(directory, agent=agent, model=model)
    if as_json:
        result.print_result({"directory": str(directory), "files": [str(file) for file in files]})
        return
    for file in files:
        print(file)
    print(f"train: asyncrl run {directory / 'config.toml'}")
