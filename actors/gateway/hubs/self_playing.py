"""Environments that call the policy themselves, through the session's endpoint.

An environment of a hub, loaded once in a process, has

    async def play(prompt: Prompt, session: SessionAccess) -> SessionResult
        Play a session of a prompt and score it.  Raises the environment's errors.
    def iterate_rows(split: Split) -> Iterator[dict[str, Any]]
        Yield the prompts of one of its data sets, in order, as rows of a prompt file: `messages`,
        `answer` and `dataset`, the split; a row's number is its Prompt.id.  Yield nothing if it has
        no such data set.  Raise ConfigError for a prompt that is not text.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.printable import describe_exception, get_first_line


def load(env: str, args: Mapping[str, Any]) -> Any:
    """Load the environment of agent.env = HUB:NAME.

    Its module may also be in the working directory.  Raises ConfigError for a missing package, with
    the command that installs it, and for any error of its loading.
    """
    name = env.partition(":")[2]
    importing.append_working_directory()
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(
            f"agent.env = {env}: {get_first_line(str(error))}; install verifiers and the "
            "environment into a Python, and name it by agent.python"
        ) from error
    version = getattr(verifiers, "__version__", "")
    adapter = find_adapter(verifiers)
    if not adapter:
        raise ConfigError(
            f"agent.env = {env}: verifiers {version} has neither load_environment(NAME) nor the "
            "module verifiers.v1; install verifiers 0.1 or 0.4"
        )
    try:
        return importlib.import_module(adapter).load(name, args)
    except ConfigError as error:
        raise ConfigError(f"agent.env = {env}: {error}") from error
    except BaseException as error:
        reason = describe_failure(error, version)
        raise ConfigError(f"agent.env = {env}: {reason}") from error


def find_adapter(verifiers: ModuleType) -> str:
    """Find the module that plays environments of the installed verifiers; "": none."""
    if hasattr(verifiers, "load_environment"):
        return "actors.gateway.hubs.verifiers_v0"
    if any(
        module.name == "v1" for module in pkgutil.iter_modules(getattr(verifiers, "__path__", []))
    ):
        return "actors.gateway.hubs.verifiers_v1"
    return ""


def describe_failure(error: BaseException, version: str) -> str:
    """Describe a failed load by its first cause, which hubs wrap, and suggest a fix.

    version: of verifiers; 0.1 and 0.4 do not load each other's environments
    """
    while error.__cause__ is not None:
        error = error.__cause__
    fix = ""
    if isinstance(error, ModuleNotFoundError):
        fix = "; install its package into agent.python, or run where its module lies"
    elif isinstance(error, TypeError) and "argument" in str(error):
        fix = "; see [agent.args]"
    elif isinstance(error, AttributeError):
        fix = f"; agent.python has verifiers {version}: is it the environment's version?"
    return f"loading it {describe_exception(error)}{fix}"


# ---- for the adapters ----------------------------------------------------------------------------


def build_text_messages(prompt: Any, location: str) -> list[dict[str, str]]:
    """Return a prompt's chat messages with only role and content.

    Raises ConfigError for content that is not text.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{"role": str(turn["role"]), "content": turn["content"]} for turn in turns]
    if not all(isinstance(turn["content"], str) for turn in messages):
        raise ConfigError(f"{location}: its prompt has content that is not text")
    return messages


def check_row(prompt: Prompt, messages: Sequence[Mapping[str, str]], loader: str) -> None:
    """Raise ValueError if a prompt's row has changed since the run began.

    loader: the name of the function that samples the rows, for the error
    """
    if messages != prompt.messages:
        raise ValueError(
            f"row {prompt.id} of its data set differs from that of another process: give {loader} "
            "a fixed seed ([agent.args])"
        )
