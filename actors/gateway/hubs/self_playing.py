"""Environments that call the policy themselves, through the session's endpoint."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
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
    try:
        load_environment = verifiers.load_environment
    except AttributeError as error:
        raise ConfigError(
            f"agent.env = {env}: verifiers {getattr(verifiers, '__version__', '')} has no "
            "load_environment(NAME); install verifiers 0.1"
        ) from error
    from actors.gateway.hubs import verifiers_v0

    try:
        return verifiers_v0.VerifiersEnvironment(load_environment(name, **args))
    except ConfigError as error:
        raise ConfigError(f"agent.env = {env}: {error}") from error
    except BaseException as error:
        raise ConfigError(f"agent.env = {env}: {describe_cause(error)}{hint(error)}") from error


def describe_cause(error: BaseException) -> str:
    """Describe an exception by its first cause: hubs wrap the errors of an environment."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"loading it {describe_exception(error)}"


def hint(error: BaseException) -> str:
    """Say what to do about the likely causes of an environment that cannot be loaded."""
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    if isinstance(causes[-1], ModuleNotFoundError):
        return "; install its package into agent.python, or run where its module lies"
    if isinstance(causes[-1], TypeError) and "argument" in str(causes[-1]):
        return "; see [agent.args]"
    return ""
