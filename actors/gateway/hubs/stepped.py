"""Environments of hubs with gymnasium's reset and step on text."""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.config.agents import GEM, GYMNASIUM, OPENENV
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.printable import describe_exception
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks.games import SeededRandom

PACKAGES = {GEM: "gem-llm", GYMNASIUM: "gymnasium", OPENENV: "openenv-core"}
SCHEMA_S = 30.0  # for an OpenEnv server to answer
# fields of OpenEnv's actions and observations without their content
OWN_FIELDS = frozenset({"metadata", "done", "reward"})

Step = tuple[Any, float, bool, bool, JsonObject]
Arguments = Mapping[str, Any]
Reset = Callable[[], Any]


def find(hub: str, name: str, args: Arguments) -> Reset:
    """Return a function that makes the environment of a session.

    It makes one at once, so that a wrong name or argument fails here and not in every session.
    Raises ConfigError, also for a missing package, with the command that installs it.
    """
    source = f"agent.env = {hub}:{name}"
    importing.append_working_directory()
    try:
        return FINDERS[hub](name, args)
    except ImportError as error:
        raise ConfigError(
            f"{source}: {error}; install {PACKAGES[hub]} into the Python of agent.python"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{source}: making it {describe_exception(error)}") from error


# ---- gem -----------------------------------------------------------------------------------------


class SteppedEnvironment:
    """An environment of gem or gymnasium. Its info does not hold reward parts or tools."""

    def __init__(self, make: Reset) -> None:
        self.environment = make()

    def reset(self, *, seed: int, options: JsonObject) -> tuple[Any, JsonObject]:
        observation, _ = self.environment.reset(seed=seed)
        return observation, {}

    def step(self, text: str) -> Step:
        observation, reward, terminated, truncated, _ = self.environment.step(text)
        return observation, reward, terminated, truncated, {}


class GemEnvironment(SteppedEnvironment):
    """An environment of gem.

    It samples from Python's global generator, so each session keeps its own state of it.
    """

    def reset(self, *, seed: int, options: JsonObject) -> tuple[Any, JsonObject]:
        self.random = SeededRandom(seed)
        with self.random:
            return super().reset(seed=seed, options=options)

    def step(self, text: str) -> Step:
        with self.random:
            return super().step(text)


def find_gem(name: str, args: Arguments) -> Reset:
    """Return a function that makes gem.make(NAME, **args)."""
    make = partial(GemEnvironment, partial(importlib.import_module("gem").make, name, **args))
    make()
    return make


# ---- gymnasium -----------------------------------------------------------------------------------


class GymnasiumEnvironment(SteppedEnvironment):
    """An environment of gymnasium."""

    def close(self) -> None:
        self.environment.close()


def find_gymnasium(name: str, args: Arguments) -> Reset:
    """Return a function that makes gymnasium.make(NAME, **args).

    Raises ConfigError unless its actions and observations are text.
    """
    gymnasium = importlib.import_module("gymnasium")
    make = partial(GymnasiumEnvironment, partial(gymnasium.make, name, **args))
    environment = make().environment
    for kind in ("action", "observation"):
        space = getattr(environment, f"{kind}_space")
        if not isinstance(space, gymnasium.spaces.Text):
            raise ConfigError(
                f"its {kind}s are {type(space).__name__} and not Text: write a class that turns "
                "them into text, and name it as agent.env = file.py:Class"
            )
    environment.close()
    return make


# ---- OpenEnv -------------------------------------------------------------------------------------


class OpenEnvSession:
    """A session of an OpenEnv server, on its own connection.

    action, observation: the fields that hold the policy's text and the environment's
    """

    def __init__(self, connect: Reset, action: str, observation: str) -> None:
        client = connect()
        self.client = client.sync() if hasattr(client, "sync") else client  # async since 0.3
        self.close = self.client.close
        self.action = action
        self.observation = observation

    def reset(self, *, seed: int, options: JsonObject) -> tuple[Any, JsonObject]:
        return self.client.reset(seed=seed).observation[self.observation], {}

    def step(self, text: str) -> Step:
        result = self.client.step({self.action: text})
        observation = result.observation[self.observation]
        return observation, float(result.reward or 0.0), result.done, False, {}


def find_openenv(url: str, args: Arguments) -> Reset:
    """Return a function that opens a session at the server of this URL.

    args: `action` and `observation` name the fields with the text, if the server's schema has
        several; the rest goes to GenericEnvClient

    Raises ConfigError.
    """
    client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
    client_args = dict(args)
    base = url.rstrip("/")
    with urllib.request.urlopen(f"{base}/schema", timeout=SCHEMA_S) as response:
        schema = json.load(response)
    fields = [
        choose_text_field(kind, schema[kind]["properties"], client_args.pop(kind, ""))
        for kind in ("action", "observation")
    ]
    return partial(OpenEnvSession, partial(client, base_url=base, **client_args), *fields)


def choose_text_field(kind: str, properties: Arguments, given: str) -> str:
    """Choose the field of an action or observation that holds its text.

    given: its name from agent.args; "": the only field with text

    Raises ConfigError.
    """
    texts: Sequence[str] = [
        name
        for name, field in properties.items()
        if name not in OWN_FIELDS and field.get("type") == "string"
    ]
    if given in texts or (not given and len(texts) == 1):
        return given or texts[0]
    raise ConfigError(
        f"its {kind} has the text fields {', '.join(texts) or '(none)'}: name one by {kind} in "
        "[agent.args]"
    )


FINDERS: dict[str, Callable[[str, Arguments], Reset]] = {
    GEM: find_gem,
    GYMNASIUM: find_gymnasium,
    OPENENV: find_openenv,
}
