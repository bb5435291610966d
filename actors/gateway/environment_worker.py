"""Run environments: `python -m actors.gateway.environment_worker FD PARENT`.

environment_pool.py starts it, and it ends with its parent or its socket.  Frames are those of
reward processes: four bytes of length and msgpack.

    in:   EnvironmentSetup, then lists of EnvironmentOperation
    out:  EnvironmentEvent "ready" or "broken", then one for each operation but "end", in order

The order tells the parent which session a process was busy with when it hangs or exits.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec import Struct

from actors.gateway.hubs import stepped, tools
from actors.gateway.hubs.tools import LONGEST, ToolLoop
from actors.reward_worker import check_number
from asyncrl.config.agents import RANDOM, SELF, AgentConfig
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.messages import Numbers, Prompt
from asyncrl.contract.printable import describe_exception
from asyncrl.records.jsonl import JsonObject
from asyncrl.tasks import arena, games
from asyncrl.transport import worker_pool
from asyncrl.transport.worker_pool import frame, read_frame

Observation = str | list[JsonObject]


class EnvironmentSetup(Struct, frozen=True):
    """The first message; judged: the config names a reward."""

    agent: AgentConfig
    judged: bool = False


class EnvironmentOperation(Struct, frozen=True, array_like=True):
    """An operation of a session's environment.

    kind: "score" ends a session of tools that a limit has cut, if they pay
    text: the answer, for a step
    message: the answer as a chat message, for tools
    """

    session: int
    kind: Literal["reset", "step", "score", "end"]
    text: str = ""
    message: JsonObject | None = None
    prompt: Prompt | None = None
    seed: int = 0
    attempt: int = 1
    first: bool = True
    opponent: str = ""  # one of the agent's


class EnvironmentEvent(Struct, frozen=True, array_like=True):
    """The result of an operation.

    kind: "failed" if the environment raised or returned an invalid value, "lost" if its process
        ended during another session's step
    asked: the player with the turn: 0 for the policy; 1, 2, ... for the opponent in the session's
        game of that number
    told: (observation, move) of an opponent that the policy does not play
    pays: the tools score the session themselves, also one that a limit has cut
    """

    session: int
    kind: Literal["ready", "broken", "ok", "failed", "lost"]
    obs: Observation = ""
    reward: float = 0.0
    ended: bool = False  # terminated or truncated
    truncated: bool = False
    judge: bool = False  # the config's reward scores the session
    parts: Numbers = {}
    tools: list[JsonObject] = []
    why: str = ""
    asked: int = 0
    told: list[tuple[str, str]] = []
    pays: bool = False


def resolve(path: str, players: int = 1, args: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Import `module:name`, `file.py:name`, `textarena:GAME` or `HUB:NAME`.

    players: of a textarena game
    args: agent.args

    Raises the import's error.
    """
    hub, _, name_in_hub = path.partition(":")
    if hub in stepped.FINDERS:
        return stepped.find(hub, name_in_hub, args)
    module, _, name = path.rpartition(":")
    if module == "textarena":
        return arena.find_game(name, players)
    factory = getattr(importing.import_module(module), name)
    return partial(factory, **args) if args else factory


def resolve_opponent(path: str) -> games.Opponent | None:
    """Find the opponent in a game; None: the policy itself.  Raises ConfigError."""
    if path == SELF:
        return None
    if path == RANDOM:
        return games.choose_random_move
    try:
        return games.make_text_opponent(resolve(path))
    except BaseException as error:
        raise ConfigError(
            f"the opponent {path}: importing it {describe_exception(error)}; write module:function "
            "or file.py:function"
        ) from error


# ---- environments --------------------------------------------------------------------------------


def check_observation(obs: Any) -> Observation:
    """Check that an observation is text or chat messages, and cut text at LONGEST.

    Raises ValueError.
    """
    if isinstance(obs, str):
        return obs[:LONGEST]
    if isinstance(obs, list) and obs and all(isinstance(x, dict) and "role" in x for x in obs):
        return obs
    raise ValueError(f"an observation must be text or a list of messages, not {type(obs).__name__}")


class EnvironmentHost:
    """The environments of this process, one for each of its sessions."""

    def __init__(self, setup: EnvironmentSetup) -> None:
        agent = setup.agent
        opponents = sorted({agent.choose_opponent("train"), agent.choose_opponent("eval")} - {""})
        players = 2 if opponents else 1
        self.make_environment = resolve(agent.env, players, agent.args) if agent.env else None
        games.check(self.make_environment, agent.env, opponents)
        self.opponents = {path: resolve_opponent(path) for path in opponents}
        imported_tools = [(path, resolve(path)) for path in agent.tools]
        self.make_tools = tools.load(imported_tools, agent.args, judged=setup.judged)
        self.sessions: dict[int, Any] = {}

    def apply(self, op: EnvironmentOperation) -> EnvironmentEvent | None:
        """Apply an operation.

        An exception of an environment, SystemExit too, fails only its own session.
        """
        try:
            if op.kind == "end":
                env = self.sessions.pop(op.session, None)
                if hasattr(env, "close"):
                    env.close()
                return None
            run = self._run_environment if self.make_environment else self._run_tools
            return EnvironmentEvent(op.session, "ok", **run(op))
        except BaseException as error:
            self.sessions.pop(op.session, None)
            reason = f"the environment {describe_exception(error)} in {op.kind}"
            return EnvironmentEvent(op.session, "failed", why=reason) if op.kind != "end" else None

    def _run_tools(self, op: EnvironmentOperation) -> JsonObject:
        """Begin with the prompt, and run tools until an answer calls none of them."""
        if op.kind == "reset":
            assert op.prompt is not None
            loop: ToolLoop = self.make_tools()
            self.sessions[op.session] = loop
            obs = check_observation(loop.reset(op.prompt))
            return {"obs": obs, "tools": loop.schemas, "pays": loop.pays}
        loop = self.sessions[op.session]
        if op.kind == "step" and (messages := loop.run_calls(op.message or {})):
            return {"obs": messages}
        if not loop.pays:
            return {"ended": True, "judge": True}
        reward = check_number(loop.compute_reward(), "the reward of get_reward")
        return {"reward": reward, "ended": True, "truncated": op.kind == "score"}

    def _run_environment(self, op: EnvironmentOperation) -> JsonObject:
        result: JsonObject
        if op.kind == "reset":
            assert self.make_environment is not None
            env = self.make_environment()
            if op.opponent:
                env = games.GameMatch(env, op.opponent, self.opponents[op.opponent])
            self.sessions[op.session] = env
            options = {"prompt": op.prompt, "attempt": op.attempt, "first": op.first}
            obs, info = env.reset(seed=op.seed, options=options)
            tools = list((info or {}).get("tools", []))
            result = {"obs": check_observation(obs), "tools": tools}
        else:
            env = self.sessions[op.session]
            obs, reward, terminated, truncated, info = env.step(op.text)
            parts = ((info or {}).get("parts") or {}).items()
            ended = bool(terminated or truncated)
            result = {
                "parts": {str(name): check_number(value, str(name)) for name, value in parts},
                "obs": "" if ended else check_observation(obs),
                "reward": check_number(reward, "the reward"),
                "ended": ended,
                "truncated": bool(truncated),
            }
        if isinstance(env, games.GameMatch):
            result |= {"asked": env.asked, "told": list(env.opponent_moves)}
        return result


def serve(wire: socket.socket) -> None:
    """Apply operations until the other side closes the socket."""
    stream = wire.makefile("rb")

    def send(event: EnvironmentEvent) -> None:
        try:
            payload = msgspec.msgpack.encode(event)
        except Exception as error:  # an observation with objects that msgpack cannot encode
            reason = f"the environment's result cannot be sent: {describe_exception(error)}"
            payload = msgspec.msgpack.encode(EnvironmentEvent(event.session, "failed", why=reason))
        wire.sendall(frame(payload))

    setup = msgspec.msgpack.decode(read_frame(stream) or b"", type=EnvironmentSetup)
    try:
        environments = EnvironmentHost(setup)
    except BaseException as error:
        source = setup.agent.source_name
        why = (
            f"{source}: importing it {describe_exception(error)}; write module:name or file.py:name"
        )
        why = str(error) if isinstance(error, ConfigError) else why
        send(EnvironmentEvent(-1, "broken", why=why))
        return
    send(EnvironmentEvent(-1, "ready"))
    decode = msgspec.msgpack.Decoder(list[EnvironmentOperation]).decode
    while (payload := read_frame(stream)) is not None:
        for op in decode(payload):
            if (event := environments.apply(op)) is not None:
                send(event)


if __name__ == "__main__":
    worker_pool.run(serve)
