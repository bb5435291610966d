"""Call agent.function, or an environment: `python -m actors.gateway.agents.functions FD PARENT`.

Each session runs in its own thread, since it mostly waits for the model.  Coroutines share one
event loop, so that a client made in the agent's module serves all sessions.  To stop a session, its
coroutine is cancelled; a plain function cannot be stopped, and the gateway kills this process if it
goes on."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from actors.gateway.agents.agent_log import AgentLog
from actors.gateway.agents.session_messages import (
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
    parse_outcome,
    send,
)
from actors.gateway.hubs import self_playing
from actors.reward_worker import describe_exception
from asyncrl.contract import importing
from asyncrl.contract.errors import ConfigError
from asyncrl.transport import worker_pool
from asyncrl.transport.worker_pool import read_frame

MOST_THREADS = 1024  # for blocking calls of coroutines (asyncio.to_thread)


class SharedLoop:
    """The event loop of all coroutines of this process, in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "agent"))
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        threading.Thread(target=self._run, name="agents", daemon=True).start()

    def _run(self) -> None:
        while True:
            # SystemExit in an agent's task ends run_forever; the awaiting code gets it as well
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def result(self, number: int, awaitable: Awaitable[Any]) -> Any:
        """Run a session's awaitable in the loop and wait for its result, in another thread.

        Raises what it raises, SystemExit too, and CancelledError after `stop`.
        """

        async def catch() -> tuple[Any, BaseException | None]:
            task = asyncio.current_task()
            assert task is not None
            self.tasks[number] = task
            try:
                return await awaitable, None
            except BaseException as error:  # SystemExit raised here would end the loop
                return None, error
            finally:
                del self.tasks[number]

        value, error = asyncio.run_coroutine_threadsafe(catch(), self.loop).result()
        if error is not None:
            raise error
        return value

    def stop(self, number: int) -> None:
        """Cancel a session that is a coroutine."""

        def cancel() -> None:
            if task := self.tasks.get(number):
                task.cancel()

        self.loop.call_soon_threadsafe(cancel)


def resolve(path: str) -> Callable[..., Any]:
    """Import `module:function` or `file.py:function`.  Raises what the import raises."""
    module, _, name = path.rpartition(":")
    function = getattr(importing.module(module), name)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function  # type: ignore[no-any-return]


def load_player(setup: AgentSetup) -> Callable[..., Any]:
    """Import what plays the sessions.  Raises ConfigError."""
    if setup.env:
        return self_playing.load(setup.env, setup.args).play
    try:
        return resolve(setup.function)
    except BaseException as error:
        raise ConfigError(
            f"agent.function = {setup.function}: importing it {describe_exception(error)}; write "
            "module:function or file.py:function"
        ) from error


def run_session(
    function: Callable[..., Any], seat: SessionAccess, log: AgentLog, loop: SharedLoop
) -> SessionResult:
    """Run one session; any exception of the function fails only this session."""
    began = time.monotonic()
    try:
        value = function(seat.prompt, seat)
        if inspect.isawaitable(value):
            value = loop.result(seat.number, value)
        return value if isinstance(value, SessionResult) else parse_outcome(seat.number, value)
    except BaseException as error:
        why = describe_exception(error)
        head = f"session {seat.name} {why} after {time.monotonic() - began:.1f} s"
        log.write(head, traceback.format_exc().encode("utf-8", "replace"))
        return SessionResult(seat.number, "failed", why=why)


def serve(wire: socket.socket) -> None:
    """Run sessions until the other side closes the socket."""
    stream = wire.makefile("rb")
    setup = msgspec.msgpack.decode(read_frame(stream) or b"", type=AgentSetup)
    try:
        function = load_player(setup)
    except ConfigError as error:
        send(wire, SessionResult(-1, "broken", why=str(error)))
        return
    send(wire, SessionResult(-1, "ready"))
    log = AgentLog(Path(setup.log))
    loop = SharedLoop()
    writing = threading.Lock()

    def run_and_reply(seat: SessionAccess) -> None:
        result = run_session(function, seat, log, loop)
        with writing:
            send(wire, result)

    decode = msgspec.msgpack.Decoder(SessionOrders).decode
    while (payload := read_frame(stream)) is not None:
        orders = decode(payload)
        for seat in orders.seats:
            threading.Thread(
                target=run_and_reply, args=(seat,), name=seat.name, daemon=True
            ).start()
        for number in orders.stop:
            loop.stop(number)


if __name__ == "__main__":
    worker_pool.run(serve)
