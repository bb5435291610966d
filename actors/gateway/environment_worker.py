"""One process of environments: `python -m actors.gateway.environment_worker FD PARENT`, started by
environment_pool.py; it ends with its parent or its socket.

Frames as those of reward processes: four bytes of length and msgpack.  In: Setup, then lists of Op.
Out: Happened("ready" or "broken"), then one for each Op that is no "end", in their order: the
parent knows from what is unanswered which session a process was busy with when it hangs or dies.
"""

from __future__ import annotations

import inspect
import math
import socket
import sys
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from actors.reward_worker import BoundedOutput, _read, describe_exception, first_line
from asyncrl.config.agents import RANDOM, SELF
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.tasks import arena, games
from asyncrl.transport import child
from asyncrl.transport.child import frame

JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array"}
LONGEST = 1 << 20  # characters of what an environment says at once

Observation = str | list[dict[str, Any]]


class EnvironmentSetup(msgspec.Struct, frozen=True):
    """Once: what agent.env and agent.tools name, and whoever plays the other side of a game."""

    env: str
    tools: list[str]
    opponents: list[str] = []


class EnvironmentOperation(msgspec.Struct, frozen=True, array_like=True):
    """What a session's environment is to do.  message: the answer as a chat message, for tools."""

    session: int
    kind: Literal["reset", "step", "end"]
    text: str = ""
    message: dict[str, Any] | None = None
    prompt: Prompt | None = None
    seed: int = 0
    attempt: int = 1
    first: bool = True
    opponent: str = ""  # one of Setup's


class EnvironmentEvent(msgspec.Struct, frozen=True, array_like=True):
    """What came of it.  failed: the environment raised, or returned what cannot be used; lost: its
    process ended while it was at another session's step.

    asked: 0, obs is for the policy's side; else for its opponent's, in the game of that number,
    from 1, of those that were begun.  told: (what it was told, its move) of the opponent, where it
    is none of ours."""

    session: int
    kind: Literal["ready", "broken", "ok", "failed", "lost"]
    obs: Observation = ""
    reward: float = 0.0
    ended: bool = False  # terminated or truncated
    truncated: bool = False
    judge: bool = False  # the config's reward is asked
    parts: dict[str, float] = {}
    tools: list[dict[str, Any]] = []
    why: str = ""
    asked: int = 0
    told: list[tuple[str, str]] = []


def resolve(path: str, players: int = 1) -> Any:
    """`module:name`, `file.py:name` or `textarena:GAME`, one for so many players.  Raises whatever
    importing it raises.
    """
    module, _, name = path.rpartition(":")
    if module == "textarena":
        return arena.find_game(name, players)
    return getattr(importing.module(module), name)


def opponent(path: str) -> games.Opponent | None:
    """Who plays the other side; None: the policy.  Raises ConfigError where it cannot be had."""
    if path == SELF:
        return None
    if path == RANDOM:
        return games.random_move
    try:
        return games.text_opponent(resolve(path))
    except BaseException as error:
        raise ConfigError(
            f"the opponent {path}: importing it {describe_exception(error)}; write "
            "module:function or "
            "file.py:function"
        ) from error


# ---- tools ---------------------------------------------------------------------------------------


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """What a template is told of a tool: name, first line of its docstring, its parameters."""
    properties = {}
    required = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = JSON_TYPES.get(parameter.annotation, "string")
        properties[name] = {"type": kind}
        if parameter.default is parameter.empty:
            required.append(name)
    about = {
        "name": function.__name__,
        "description": first_line(inspect.getdoc(function) or ""),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return {"type": "function", "function": about}


class ToolLoop:
    """The environment of agent.tools: it calls what an answer calls, until one calls nothing."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        self.tools = {function.__name__: function for function in functions}

    def reset(self, prompt: Prompt) -> list[dict[str, Any]]:
        return list(prompt.messages) or [{"role": "user", "content": prompt.text}]

    def answer(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """A tool's message for each call of this answer; none: it is the last one."""
        out = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            content = self._call_tool(name, call["function"].get("arguments") or {})
            out.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": content})
            if "name" not in out[-1]:
                out[-1]["name"] = name
        return out

    def _call_tool(self, name: str, arguments: Any) -> str:
        """What a tool returned; what it raised is said to the model: it is no failure of ours."""
        if name not in self.tools:
            return f"error: no tool {name!r}; there are {', '.join(self.tools)}"
        try:
            return str(self.tools[name](**arguments))[:LONGEST]
        except Exception as error:
            return f"error: {type(error).__name__}: {first_line(str(error))}"


# ---- environments --------------------------------------------------------------------------------


def check_number(value: Any, what: str) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{what} is {found}, not a finite number")
    return found


def check_observation(obs: Any) -> Observation:
    """Text, or chat messages.  Raises ValueError."""
    if isinstance(obs, str):
        return obs[:LONGEST]
    if isinstance(obs, list) and obs and all(isinstance(x, dict) and "role" in x for x in obs):
        return obs
    raise ValueError(f"an observation is text or a list of messages, not {type(obs).__name__}")


def sides(env: Any) -> tuple[int, list[tuple[str, str]]]:
    """Whose turn it is in a game of two, and what the opponent did."""
    return (env.asked, list(env.told)) if isinstance(env, games.GameMatch) else (0, [])


class EnvironmentHost:
    """The sessions of this process, each with an environment of its own."""

    def __init__(self, setup: EnvironmentSetup) -> None:
        self.made = resolve(setup.env, 2 if setup.opponents else 1) if setup.env else None
        games.check(self.made, setup.env, setup.opponents)
        self.opponents = {path: opponent(path) for path in setup.opponents}
        functions = [resolve(path) for path in setup.tools]
        self.loop = ToolLoop(functions)
        self.schemas = [schema(function) for function in functions]
        self.sessions: dict[int, Any] = {}

    def apply(self, op: EnvironmentOperation) -> EnvironmentEvent | None:
        """Do it.  What an environment raises, an exit included, fails its session alone."""
        try:
            if op.kind == "end":
                env = self.sessions.pop(op.session, None)
                if env is not None and hasattr(env, "close"):
                    env.close()
                return None
            if self.made is None:
                return self._tools(op)
            return self._reset(op) if op.kind == "reset" else self._step(op)
        except BaseException as error:
            self.sessions.pop(op.session, None)
            why = f"the environment {describe_exception(error)} in {op.kind}"
            return EnvironmentEvent(op.session, "failed", why=why) if op.kind != "end" else None

    def _reset(self, op: EnvironmentOperation) -> EnvironmentEvent:
        assert self.made is not None
        env = self.made()
        if op.opponent:
            env = games.GameMatch(env, op.opponent, self.opponents[op.opponent])
        self.sessions[op.session] = env
        options = {"prompt": op.prompt, "attempt": op.attempt, "first": op.first}
        obs, info = env.reset(seed=op.seed, options=options)
        tools = list((info or {}).get("tools", []))
        asked, told = sides(env)
        return EnvironmentEvent(
            op.session, "ok", check_observation(obs), tools=tools, asked=asked, told=told
        )

    def _step(self, op: EnvironmentOperation) -> EnvironmentEvent:
        env = self.sessions[op.session]
        obs, reward, terminated, truncated, info = env.step(op.text)
        parts = {
            str(k): check_number(v, str(k)) for k, v in ((info or {}).get("parts") or {}).items()
        }
        ended = bool(terminated or truncated)
        asked, told = sides(env)
        return EnvironmentEvent(
            op.session,
            "ok",
            obs="" if ended else check_observation(obs),
            reward=check_number(reward, "the reward"),
            ended=ended,
            truncated=bool(truncated),
            parts=parts,
            asked=asked,
            told=told,
        )

    def _tools(self, op: EnvironmentOperation) -> EnvironmentEvent:
        if op.kind == "reset":
            assert op.prompt is not None
            obs = self.loop.reset(op.prompt)
            return EnvironmentEvent(op.session, "ok", obs, tools=self.schemas)
        said_now = self.loop.answer(op.message or {})
        if said_now:
            return EnvironmentEvent(op.session, "ok", said_now)
        return EnvironmentEvent(op.session, "ok", ended=True, judge=True)


def serve(wire: socket.socket) -> None:
    """Answer until the other side closes."""
    stream = wire.makefile("rb")

    def send(what: EnvironmentEvent) -> None:
        try:
            payload = msgspec.msgpack.encode(what)
        except Exception as error:  # an observation of objects that no message can carry
            why = f"what the environment returned cannot be sent: {describe_exception(error)}"
            payload = msgspec.msgpack.encode(EnvironmentEvent(what.session, "failed", why=why))
        wire.sendall(frame(payload))

    setup = msgspec.msgpack.decode(_read(stream) or b"", type=EnvironmentSetup)
    try:
        environments = EnvironmentHost(setup)
    except BaseException as error:
        named = f"agent.env = {setup.env}" if setup.env else f"agent.tools = {setup.tools}"
        why = (
            f"{named}: importing it {describe_exception(error)}; write module:name or file.py:name"
        )
        why = str(error) if isinstance(error, ConfigError) else why
        send(EnvironmentEvent(-1, "broken", why=why))
        return
    send(EnvironmentEvent(-1, "ready"))
    decode = msgspec.msgpack.Decoder(list[EnvironmentOperation]).decode
    while (payload := _read(stream)) is not None:
        for op in decode(payload):
            if (what := environments.apply(op)) is not None:
                send(what)


if __name__ == "__main__":
    child.run(int(sys.argv[1]), int(sys.argv[2]), serve, BoundedOutput)
