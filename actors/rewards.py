"""Rewards: a task's own in place, anybody else's in processes of their own, under a deadline.

A reward function is `def reward(prompt: Prompt, text: str) -> float | dict`, given as `module:function`; it may be async, and one
with a parameter `tokens` is given the answer's token ids too, the stop token included.  A
dict names the parts; `reward` among them counts, `token_rewards` may be a list of one number a token (None: of this token nothing is
said), which `advantage.name` = gae, reinforce_pp and grpo (process supervision) train on in its place.  What raises, returns
something else or hangs is a failed sample ("data: why"; "machinery: why" when its process died), counted, never a reward of 0.
"""

from __future__ import annotations

import ctypes
import math
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from actors.reward_worker import FRAME_BYTES, Call, Reply, Setup, call
from asyncrl import importing
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.messages import Prompt

Key = tuple[int, int, int]
Result = tuple[Key, float, dict[str, float], list[float] | None, str]
GRACE_S = 60.0  # the first import may be slow; a call's deadline starts when the process is ready
START_TRIES = 3  # processes in a row that end before they are ready: the function's module cannot be imported here
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: SIGKILL when the generator ends, also while the reward function hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Process:
    """A reward process and the call it works on.  `deadline` is that of its import or of the call; inf when it is free."""

    def __init__(self, setup: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            argv = importing.command("actors.reward_worker", str(theirs.fileno()))
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        self.pipe = Connection(ours.detach())
        self.key: Key | None = None
        self.began = 0.0  # of the call
        self.ready, self.deadline = False, time.monotonic() + GRACE_S
        self.send(setup)

    def send(self, frame: bytes) -> None:
        """A dead worker is noticed when it is next read from."""
        try:
            self.pipe.send_bytes(frame)
        except OSError:
            pass

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class RewardRunner:
    """Submit answers, poll results.  Results may come in any order; each submitted key comes back exactly once.

    In place when `reward.workers` is 0 and no `reward.function` is given; otherwise in `reward.workers` (at least 1) processes.
    """

    def __init__(self, config: Config, task: Any) -> None:
        self.path, self.deadline_s = config.reward.function, config.reward.deadline_s
        self.task = task
        self.setup = msgspec.msgpack.encode(Setup(self.path, config.task))
        self.done: list[Result] = []
        self.queue: deque[tuple[Key, Call]] = deque()
        self.processes = [_Process(self.setup) for _ in range(config.reward.workers or (1 if self.path else 0))]
        self.hangs = self.unborn = 0
        self.timed: Callable[[str, float, float], None] | None = None  # told of each call to a process: name, began, ended

    def submit(self, key: Key, prompt: Prompt, text: str, tokens: Any) -> None:
        """Judge `text`, whose token ids are `tokens`, the stop token included."""
        if self.processes:
            self.queue.append((key, Call(prompt, text, [int(x) for x in tokens])))
            return
        try:
            self.done.append((key, *call(self.task.reward, prompt, text, [int(x) for x in tokens]), ""))
        except Exception as e:
            self._fail(key, f"data: the reward raised {type(e).__name__}: {e}")

    def poll(self) -> list[Result]:
        """What is done by now: (key, reward, parts, token rewards, "" or why it failed).  Raises ConfigError when no process can start."""
        if self.processes:
            self._receive()
            self._watch()
            self._send()
        out, self.done = self.done, []
        return out

    def close(self) -> None:
        """End the processes."""
        for p in self.processes:
            p.end()
        self.processes = []

    def _fail(self, key: Key, why: str) -> None:
        self.done.append((key, 0.0, {}, None, why))

    def _send(self) -> None:
        for p in self.processes:
            if p.ready and p.key is None and self.queue:
                p.key, job = self.queue.popleft()
                p.began = time.monotonic()
                p.deadline = p.began + self.deadline_s
                p.send(msgspec.msgpack.encode(job))

    def _receive(self) -> None:
        by_pipe = {p.pipe: p for p in self.processes}
        for pipe in wait(list(by_pipe), timeout=0):
            p = by_pipe[pipe]  # type: ignore[index]
            try:
                reply = msgspec.msgpack.decode(p.pipe.recv_bytes(FRAME_BYTES), type=Reply)
            except (EOFError, OSError):
                self._replace(p, f"machinery: the reward process ended ({p.process.wait()})")
                continue
            self._on_reply(p, reply)

    def _on_reply(self, p: _Process, reply: Reply) -> None:
        if reply.kind == "broken":
            raise ConfigError(reply.why)
        if p.key is not None and self.timed is not None:
            self.timed("reward", p.began, time.monotonic())
        if reply.kind == "ready":
            p.ready, self.unborn = True, 0
        elif p.key is not None and reply.kind == "ok":
            self.done.append((p.key, reply.reward, reply.parts, reply.token_rewards, ""))
        elif p.key is not None:
            self._fail(p.key, f"data: the reward raised {reply.why}")
        p.key, p.deadline = None, math.inf

    def _watch(self) -> None:
        for p in list(self.processes):
            if time.monotonic() > p.deadline:
                self.hangs += 1
                self._replace(p, f"data: the reward hung for more than {self.deadline_s:g} s (reward.deadline_s)")

    def _replace(self, p: _Process, why: str) -> None:
        if p.key is not None:
            self._fail(p.key, why)
        self.unborn += not p.ready
        p.end()
        if self.unborn >= START_TRIES:
            raise ConfigError(f"reward.function = {self.path}: {self.unborn} processes ended or hung while importing it; try `python -c 'import "
                              f"{self.path.partition(':')[0]}'`")  # fmt: skip
        self.processes[self.processes.index(p)] = _Process(self.setup)
