"""Environments that call the policy themselves, through the session's endpoint."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from actors.gateway.agents.session_messages import SessionAccess, SessionResult
from actors.gateway.hubs import Split
from actors.reward_worker import describe_exception, first_line
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt


class SelfPlayingEnvironment(Protocol):
    """An environment of a hub, loaded once in a process."""

    async def play(self, prompt: Prompt, session: SessionAccess) -> SessionResult:
        """Play a session of a prompt and score it.  Raises what the environment raises."""

    def rows(self, split: Split) -> Iterator[dict[str, Any]]:
        """Yield the prompts of one of its data sets, in order, as rows of a prompt file.

        A row has `messages`, `answer` and `dataset`, the split; its number is its Prompt.id.
        Yields nothing where the environment has no such data set.  Raises ConfigError for a prompt
        that is not text."""


def load(env: str, args: Mapping[str, Any]) -> SelfPlayingEnvironment:
    """Load the environment of agent.env = HUB:NAME.

    Its module may also lie in the working directory.  Raises ConfigError for a missing package,
    with the command that installs it, and for all that its loading raises."""
    name = env.partition(":")[2]
    importing.append_working_directory()
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(
            f"agent.env = {env}: {first_line(str(error))}; install verifiers and the environment "
            "into a Python, and name it by agent.python"
        ) from error
    version = getattr(verifiers, "__version__", "")
    adapter = adapter_of(verifiers)
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
        why = f"{describe_cause(error)}{hint(error, version)}"
        raise ConfigError(f"agent.env = {env}: {why}") from error
    return loaded


def adapter_of(verifiers: ModuleType) -> str:
    """The module that plays environments of the installed verifiers, or "" for none."""
    if hasattr(verifiers, "load_environment"):
        return "actors.gateway.hubs.verifiers_v0"
    if any(each.name == "v1" for each in pkgutil.iter_modules(getattr(verifiers, "__path__", []))):
        return "actors.gateway.hubs.verifiers_v1"
    return ""


def describe_cause(error: BaseException) -> str:
    """Describe an exception by its first cause: hubs wrap the errors of an environment."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"loading it {describe_exception(error)}"


def hint(error: BaseException, version: str) -> str:
    """Say what to do about the likely causes of an environment that cannot be loaded.

    version: of verifiers, whose versions 0.1 and 0.4 do not load each other's environments"""
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


def text_messages(prompt: Any, where: str) -> list[dict[str, str]]:
    """Return a prompt's chat messages with only role and content.

    Raises ConfigError for content that is not text."""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{"role": str(turn["role"]), "content": turn["content"]} for turn in turns]
    if not all(isinstance(turn["content"], str) for turn in messages):
        raise ConfigError(f"{where}: its prompt has content that is not text")
    return messages


def check_row(prompt: Prompt, messages: Sequence[Mapping[str, str]], loader: str) -> None:
    """Raise ValueError if the row of a prompt has other messages than when the run began.

    loader: what samples the rows, for the error"""
    if messages != prompt.messages:
        raise ValueError(
            f"row {prompt.id} of its data set differs from that of another process: give {loader} "
            "a fixed seed ([agent.args])"
        )
