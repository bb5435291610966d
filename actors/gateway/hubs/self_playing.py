"""Environments that call the policy themselves, through the session's endpoint."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from actors.gateway.agents.session_messages import SessionAccess, SessionResult
from actors.gateway.hubs import Split
from actors.reward_worker import describe_exception, get_first_line
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt


class SelfPlayingEnvironment(Protocol):
    """An environment of a hub, loaded once in a process."""

    async def play(self, prompt: Prompt, session: SessionAccess) -> SessionResult:
        """Play a session of a prompt and score it.  Raises the environment's errors."""

    def iterate_rows(self, split: Split) -> Iterator[dict[str, Any]]:
        """Yield the prompts of one of its data sets, in order, as rows of a prompt file.

        A row has `messages`, `answer` and `dataset`, the split; its number is its Prompt.id.
        Yields nothing if the environment has no such data set.  Raises ConfigError for a prompt
        that is not text.
        """


def load(env: str, args: Mapping[str, Any]) -> SelfPlayingEnvironment:
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
        loaded: SelfPlayingEnvironment = importlib.import_module(adapter).load(name, args)
    except ConfigError as error:
        raise ConfigError(f"agent.env = {env}: {error}") from error
    except BaseException as error:
        reason = f"{describe_cause(error)}{suggest_fix(error, version)}"
        raise ConfigError(f"agent.env = {env}: {reason}") from error
    return loaded


def find_adapter(verifiers: ModuleType) -> str:
    """Find the module that plays environments of the installed verifiers; "": none."""
    if hasattr(verifiers, "load_environment"):
        return "actors.gateway.hubs.verifiers_v0"
    if any(
        module.name == "v1" for module in pkgutil.iter_modules(getattr(verifiers, "__path__", []))
    ):
        return "actors.gateway.hubs.verifiers_v1"
    return ""


def describe_cause(error: BaseException) -> str:
    """Describe an exception by its first cause: hubs wrap an environment's errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"loading it {describe_exception(error)}"


def suggest_fix(error: BaseException, version: str) -> str:
    """Suggest a fix for the likely causes of an environment that cannot be loaded.

    version: of verifiers; 0.1 and 0.4 do not load each other's environments
    """
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if isinstance(causes[-1], ModuleNotFoundError):
        return "; install its package into agent.python, or run where its module lies"
    if isinstance(causes[-1], TypeError) and "argument" in str(causes[-1]):
        return "; see [agent.args]"
    if isinstance(causes[-1], AttributeError):
        return f"; agent.python has verifiers {version}: is it the environment's version?"
    return ""


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
