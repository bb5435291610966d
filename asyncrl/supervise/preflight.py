"""What can be known of a run before anything starts: each check is a function of this module.

`preflight` makes them one after the other, builds the tiny model of a warm start, and raises what
the first failed one says.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import ConfigError
from asyncrl.models import devices, fetch

FIRST_PROMPTS = 64  # of the endless training stream that are encoded
MOST_PROMPTS = 2000  # of a fixed split
MARKER = ".warm_start"  # a file of this name in the folder at `model.path` allows a warm start
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def say(text: str) -> None:
    """A line for the user, on stderr."""
    print(text, file=sys.stderr, flush=True)


class Subject:
    """A config under check, with what several checks look at."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def path(self) -> Path:
        return Path(self.config.model.path)

    @cached_property
    def task(self) -> Any:
        """The task.  Raises ConfigError."""
        from asyncrl.tasks import get_task

        return get_task(self.config.task)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of a model that passed its check.  Raises ConfigError."""
        from asyncrl.models import model_check

        return model_check.check(self.config)


def located(config: Config, report: Callable[[str], None] = say) -> Config:
    """The config with the directory of `model.path` in place of a name of the hub, which is
    downloaded unless the hub's cache has it.  Raises ConfigError.
    """
    if not config.model.path.startswith(fetch.HUB):
        return config
    report(f"fetching {config.model.path}")
    path = str(fetch.from_hub(config.model.path))
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def located_sets(config: Config, sets: Sequence[str]) -> Sequence[str]:
    """`sets` such that they give what `located` would make of `config`, for runs that are started
    by their words.
    """
    found = located(config)
    return sets if found is config else [*sets, f"model.path={json.dumps(found.model.path)}"]


def engine_installed(subject: Subject) -> None:
    """The engine's packages."""
    from asyncrl.models.installed import missing

    engine = subject.config.generator.engine
    if why := missing(engine):
        raise ConfigError(f"generator.engine = {engine}: {why}")


def devices_present(subject: Subject) -> None:
    """The GPUs that the config names."""
    if why := devices.missing(subject.config):
        raise ConfigError(why)


def is_own_models_folder(config: Config) -> bool:
    """Whether a warm start may build a tiny model at `model.path`: where a folder `model` of a
    project is, in the folder `models` of a project, or where a file `.warm_start` allows it.

    A project is the working directory, the folder that `runs` is in, or a folder with a config that
    is no run directory.  Anywhere else, `model.path` is more likely the misspelled place of a real
    model, and a toy trained in its stead would look like a result.
    """
    path = Path(config.model.path).absolute()
    if (path / MARKER).exists():
        return True
    project = path.parent.parent if path.parent.name == "models" else path.parent
    if path.parent.name != "models" and not path.name.startswith("model"):
        return False
    runs = Path(config.runs).absolute()
    if project in (Path.cwd(), runs, runs.parent):
        return True
    return any(project.glob("*.toml")) and not (project / "logs").exists()


def no_model_at(config: Config) -> str:
    """Why there is no model at `model.path`, and what to do."""
    path = config.model.path
    if why := fetch.not_fetched(path):
        return f"model.path: {why}"
    folder, _, name = path.partition("/")
    if HUB_NAME.fullmatch(path) and folder != "models" and not Path(folder).exists():
        return (
            f"model.path: {path} is not a directory; `asyncrl model get hf://{path} models/{name}` "
            f'makes one of the hub\'s model, model.path = "hf://{path}" fetches it at the start'
        )
    remedy = "model.warm_start = true builds a tiny one for the task"
    if config.model.warm_start:
        remedy = (
            "model.warm_start builds one in a project's folder model or models alone: write "
            f'"models/{Path(path).name}", or make {Path(path) / MARKER} to mean this place'
        )
    return f"model.path: {path} is no model directory (it has no config.json); {remedy}"


def model_built(subject: Subject) -> None:
    """A model at `model.path`; the tiny one of a warm start is built."""
    config = subject.config
    if (subject.path / "config.json").is_file():
        return
    if not config.model.warm_start or not is_own_models_folder(config):
        raise ConfigError(no_model_at(config))
    from asyncrl.tasks.warm_start import warm_start

    say(f"building and warm-starting a tiny model for `{config.task.name}` in {subject.path}")
    done = warm_start(config, subject.path)
    say(f"warm start: {done['steps']} steps in {done['seconds']} s, loss {done['loss']:.3f}")


def prompts_fit(subject: Subject) -> None:
    """The prompts under the tokenizer: none empty, none longer than the context leaves room."""
    from asyncrl.models.tokenizer import encode_prompt
    from asyncrl.tasks.file import FileTask

    config = subject.config
    task = subject.task
    room = config.generator.context - config.generator.max_new_tokens
    for split in ("train", "heldout", "ood"):
        size = len(task.sets[split]) if isinstance(task, FileTask) else task.size(split)
        for number in range(FIRST_PROMPTS if size is None else min(size, MOST_PROMPTS)):
            prompt = task.prompt(split, number, config.seed)
            length = len(encode_prompt(subject.tokenizer, prompt))
            if not length:
                raise ConfigError(
                    f"task: {split} prompt {prompt.id} has no token under the tokenizer in "
                    f"{subject.path}: it is empty, or of other symbols"
                )
            if length > room:
                raise ConfigError(
                    f"generator.context: {split} prompt {prompt.id} has {length} tokens; context "
                    f"{config.generator.context} less "
                    f"max_new_tokens {config.generator.max_new_tokens} leaves {room}"
                )


def reward_imports(subject: Subject) -> None:
    """The reward function, or what judges, in a process of its own."""
    from actors.rewards import check

    config = subject.config
    if config.reward.function and ":" not in config.reward.function:
        raise ConfigError(f"reward.function: {config.reward.function} is not module:function")
    if config.reward.apart:
        check(config)


def exact_agrees(subject: Subject) -> None:
    """The self-test of exact mode."""
    from asyncrl.supervise import exact_check

    config = subject.config
    if not config.exact:
        return
    wrong = exact_check.failure(exact_check.check(config))
    if wrong and config.exact is True:
        raise ConfigError(
            f'exact: {wrong}; `asyncrl doctor --exact CONFIG` shows the table, exact = "try" '
            "goes on"
        )
    say(
        f'exact: {wrong}; going on, as exact = "try" asks'
        if wrong
        else "exact: engine and learner agree bitwise in the self-test"
    )


def preflight(config: Config) -> None:
    """Every check of `config`, in order.  Raises what the first failed one says: ConfigError."""
    subject = Subject(config)
    engine_installed(subject)
    devices_present(subject)
    subject.task  # noqa: B018
    model_built(subject)
    prompts_fit(subject)
    reward_imports(subject)
    exact_agrees(subject)
