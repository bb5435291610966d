"""Rewards: a task's own in place, anybody else's in processes of their own, under a deadline.

A reward function is `def reward(prompt: Prompt, text: str) -> float | dict`, given as `module:function`; it may be async.  A
dict names the parts; `reward` among them counts, `token_rewards` may be a list of one number a token.  What raises, returns
something else or hangs is a failed sample, counted, and never a reward of 0.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import multiprocessing as mp
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.messages import Prompt

Key = tuple[int, int, int]
Result = tuple[Key, float, dict[str, float], list[float] | None, str]
GRACE_S = 60.0  # a worker's first import may be slow; its deadline starts when it is ready


def checked(value: Any, tokens: int) -> tuple[float, dict[str, float], list[float] | None]:
    """(reward, parts, token rewards) of what a reward function returned.  Raises ValueError that says what is wrong."""
    parts: dict[str, float] = {}
    per_token = None
    if isinstance(value, dict):
        value = dict(value)
        per_token = value.pop("token_rewards", None)
        if "reward" not in value:
            raise ValueError(f"a dict without `reward`: {sorted(value)}")
        parts = {str(k): number(v, str(k)) for k, v in value.items()}
        value = value["reward"]
    if per_token is not None:
        if not isinstance(per_token, list) or len(per_token) != tokens:
            raise ValueError(f"token_rewards must be a list of {tokens} numbers")
        per_token = [number(x, "token_rewards") for x in per_token]
    return number(value, "reward"), parts, per_token


def number(x: Any, name: str) -> float:
    if isinstance(x, bool | int | float) or hasattr(x, "__float__"):
        y = float(x)
        if math.isfinite(y):
            return y
        raise ValueError(f"{name} is {y}")
    raise ValueError(f"{name} is a {type(x).__name__}, not a number")


def resolve(path: str) -> Callable[..., Any]:
    """`module:function`, looked up from the working directory too.  Raises ConfigError."""
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as e:
        raise ConfigError(f"reward.function = {path}: {type(e).__name__}: {e}; write module:function, importable from here") from e
    if not callable(found):
        raise ConfigError(f"reward.function = {path}: is not a function")
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], prompt: Prompt, text: str, tokens: int) -> tuple[float, dict[str, float], list[float] | None]:
    value = function(prompt, text)
    if inspect.isawaitable(value):
        value = asyncio.run(_await(value))
    return checked(value, tokens)


async def _await(x: Any) -> Any:
    return await x


def _worker(pipe: Connection, path: str) -> None:
    """A reward process: one call at a time, until the pipe closes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        function = resolve(path)
        pipe.send(("ready", ""))
    except ConfigError as e:
        pipe.send(("broken", str(e)))
        return
    while True:
        try:
            prompt, text, tokens = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send(("ok", call(function, msgspec.convert(prompt, Prompt), text, tokens)))
        except Exception as e:
            pipe.send(("failed", f"{type(e).__name__}: {e}"))


class _Process:
    def __init__(self, path: str) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_worker, args=(theirs, path), daemon=True)
        self.process.start()
        theirs.close()
        self.key: Key | None = None
        self.ready, self.deadline = False, time.monotonic() + GRACE_S

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class RewardRunner:
    """Submit answers, poll results.  Results may come in any order; each submitted key comes back exactly once."""

    def __init__(self, config: Config, task: Any) -> None:
        self.path, self.deadline_s = config.reward.function, config.reward.deadline_s
        self.task = task
        self.done: list[Result] = []
        self.queue: deque[tuple[Key, Prompt, str, int]] = deque()
        workers = config.reward.workers or (1 if self.path else 0)
        self.processes = [_Process(self.path) for _ in range(workers)] if self.path else []
        self.hangs = 0

    def submit(self, key: Key, prompt: Prompt, text: str, tokens: Any) -> None:
        if self.processes and prompt.id >= 0:
            self.queue.append((key, prompt, text, len(tokens)))
            return
        try:
            self.done.append((key, *call(self.task.reward, prompt, text, len(tokens)), ""))
        except Exception as e:
            self.done.append((key, 0.0, {}, None, f"data: the reward raised {type(e).__name__}: {e}"))

    def poll(self) -> list[Result]:
        if self.processes:
            self._receive()
            self._watch()
            self._send()
        out, self.done = self.done, []
        return out

    def _send(self) -> None:
        for p in self.processes:
            if p.ready and p.key is None and self.queue:
                key, prompt, text, tokens = self.queue.popleft()
                p.key, p.deadline = key, time.monotonic() + self.deadline_s
                p.pipe.send((msgspec.to_builtins(prompt), text, tokens))

    def _receive(self) -> None:
        by_pipe = {p.pipe: p for p in self.processes}
        for pipe in wait(list(by_pipe), timeout=0):
            p = by_pipe[pipe]  # type: ignore[index]
            try:
                kind, value = p.pipe.recv()
            except (EOFError, OSError):
                self._replace(p, "machinery: the reward process died")
                continue
            if kind == "broken":
                raise ConfigError(str(value))
            if kind == "ready":
                p.ready, p.deadline = True, math.inf
                continue
            assert p.key is not None
            self.done.append((p.key, *value, "") if kind == "ok" else (p.key, 0.0, {}, None, f"data: the reward raised {value}"))
            p.key, p.deadline = None, math.inf

    def _watch(self) -> None:
        for p in list(self.processes):
            if time.monotonic() > p.deadline:
                self.hangs += 1
                self._replace(p, f"data: the reward hung for more than {self.deadline_s:g} s (reward.deadline_s)")

    def _replace(self, p: _Process, why: str) -> None:
        if p.key is not None:
            self.done.append((p.key, 0.0, {}, None, why))
        p.end()
        self.processes[self.processes.index(p)] = _Process(self.path)

    def close(self) -> None:
        for p in self.processes:
            p.end()
        self.processes = []
