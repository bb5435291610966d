"""One reward process: `python -m actors.reward_worker FD`, started by actors/rewards.py; one call at a time until the pipe closes.

Frames are msgpack, never pickle.  In: Setup, then Call after Call.  Out: Reply("ready" or "broken"), then one Reply a Call.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec

from asyncrl import importing
from asyncrl.config import Task
from asyncrl.errors import ConfigError
from asyncrl.messages import Prompt
from asyncrl.tasks import get_task

Judged = tuple[float, dict[str, float], list[float] | None]
FRAME_BYTES = 64 * 1024 * 1024  # a larger frame is a broken worker


class Setup(msgspec.Struct, frozen=True):
    """Runner to worker, once: the function (module:function, or "" for the task's own) and the task."""

    path: str
    task: Task


class Call(msgspec.Struct, frozen=True):
    """Runner to worker: judge this answer; tokens: its ids, the stop token included."""

    prompt: Prompt
    text: str
    tokens: list[int]


class Reply(msgspec.Struct, frozen=True):
    """Worker to runner."""

    kind: Literal["ready", "broken", "ok", "failed"]
    why: str = ""
    reward: float = 0.0
    parts: dict[str, float] = {}
    token_rewards: list[float] | None = None


def checked(value: Any, tokens: int) -> Judged:
    """(reward, parts, token rewards) of what a reward function returned for an answer of `tokens` tokens; nan for a token given None.

    Raises ValueError that says what is wrong: no number, not finite, no `reward` in a dict, another count of token rewards.
    """
    parts: dict[str, float] = {}
    per_token = None
    if isinstance(value, dict):
        value = dict(value)
        per_token = value.pop("token_rewards", None)
        if "reward" not in value:
            raise ValueError(f"a dict without `reward`: {sorted(map(str, value))}")
        parts = {str(k): number(v, str(k)) for k, v in value.items()}
        value = value["reward"]
    if per_token is not None:
        per_token = per_token.tolist() if hasattr(per_token, "tolist") else per_token
        if not isinstance(per_token, list | tuple) or len(per_token) != tokens:
            raise ValueError(f"token_rewards must be a list of {tokens} numbers, one a token")
        per_token = [math.nan if x is None else number(x, "token_rewards") for x in per_token]  # nan: nothing was said of this token
    return number(value, "reward"), parts, per_token


def number(x: Any, name: str) -> float:
    """A finite float, also from a bool or a numpy number; ValueError otherwise."""
    if not (isinstance(x, bool | int | float) or hasattr(x, "__float__")):
        raise ValueError(f"{name} is a {type(x).__name__}, not a number")
    y = float(x)
    if not math.isfinite(y):
        raise ValueError(f"{name} is {y}, not a finite number")
    return y


def resolve(path: str) -> Callable[..., Any]:
    """`module:function`, looked up from the working directory too.  Raises ConfigError."""
    module, _, name = path.partition(":")
    importing.here_last()
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as e:
        raise ConfigError(f"reward.function = {path}: {type(e).__name__}: {e}; write module:function, importable from here") from e
    if not callable(found):
        raise ConfigError(f"reward.function = {path}: is not a function")
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], prompt: Prompt, text: str, tokens: list[int]) -> Judged:
    """Call a reward function, with `tokens` where it has such a parameter, awaiting it when it is async, and check what it returns."""
    value = function(prompt, text, tokens=tokens) if _takes_tokens(function) else function(prompt, text)
    return checked(asyncio.run(_await(value)) if inspect.isawaitable(value) else value, len(tokens))


@functools.cache
def _takes_tokens(function: Callable[..., Any]) -> bool:
    try:
        return "tokens" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


async def _await(x: Any) -> Any:
    return await x


def serve(pipe: Connection) -> None:
    """Answer calls until the other side closes."""

    def send(reply: Reply) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(reply))

    setup = msgspec.msgpack.decode(pipe.recv_bytes(FRAME_BYTES), type=Setup)
    try:
        function = resolve(setup.path) if setup.path else get_task(setup.task).reward
    except ConfigError as e:
        send(Reply("broken", str(e)))
        return
    send(Reply("ready"))
    while True:
        try:
            frame = pipe.recv_bytes(FRAME_BYTES)
        except (EOFError, OSError):
            return
        job = msgspec.msgpack.decode(frame, type=Call)
        try:
            send(Reply("ok", "", *call(function, job.prompt, job.text, job.tokens)))
        except Exception as e:
            send(Reply("failed", f"{type(e).__name__}: {e}"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))
