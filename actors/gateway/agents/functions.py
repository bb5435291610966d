"""A process that calls agent.function: `python -m actors.gateway.agents.functions FD PARENT`.

Every session is a thread: what it waits for is the model.  Coroutines run in one event loop for
the whole process: a client made in the agent's module serves all sessions.  A coroutine that is to
stop is cancelled.  A function cannot be stopped: if it goes on, the gateway ends this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import sys
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
from actors.reward_worker import BoundedOutput, _read, describe_exception
from asyncrl.contract import importing
from asyncrl.transport import child

MOST_THREADS = 1024  # in which coroutines wait for what blocks (asyncio.to_thread)


class SharedLoop:
    """The event loop of all coroutines of this process, in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "agent"))
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        threading.Thread(target=self._run, name="agents", daemon=True).start()

    def _run(self) -> None:
        while True:
            # an exit in a task that an agent started: whoever awaits that task is given it
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def result(self, number: int, awaitable: Awaitable[Any]) -> Any:
        """Wait, in another thread, for what a session's awaitable returns.  Raises what it raises,
        an exit included, and CancelledError after `stop`.
        """

        async def catch() -> tuple[Any, BaseException | None]:
            task = asyncio.current_task()
            assert task is not None
            self.tasks[number] = task
            try:
                return await awaitable, None
            except BaseException as error:  # raised here, an exit would end the loop
                return None, error
            finally:
                del self.tasks[number]

        value, error = asyncio.run_coroutine_threadsafe(catch(), self.loop).result()
        if error is not None:
            raise error
        return value

    def stop(self, number: int) -> None:
        """Cancel the session, if it is a coroutine."""

        def cancel() -> None:
            if task := self.tasks.get(number):
                task.cancel()

        self.loop.call_soon_threadsafe(cancel)


def resolve(path: str) -> Callable[..., Any]:
    """`module:function` or `file.py:function`.  Raises whatever importing it raises."""
    module, _, name = path.rpartition(":")
    found = getattr(importing.module(module), name)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return found  # type: ignore[no-any-return]


def run_session(
    function: Callable[..., Any], seat: SessionAccess, log: AgentLog, loop: SharedLoop
) -> SessionResult:
    """One session.  Whatever the function raises, an exit included, fails its session alone."""
    began = time.monotonic()
    try:
        value = function(seat.prompt, seat)
        if inspect.isawaitable(value):
            value = loop.result(seat.number, value)
        return parse_outcome(seat.number, value)
    except BaseException as error:
        why = describe_exception(error)
        head = f"session {seat.name} {why} after {time.monotonic() - began:.1f} s"
        log.write(head, traceback.format_exc().encode("utf-8", "replace"))
        return SessionResult(seat.number, "failed", why=why)


def serve(wire: socket.socket) -> None:
    """Play until the other side closes."""
    stream = wire.makefile("rb")
    setup = msgspec.msgpack.decode(_read(stream) or b"", type=AgentSetup)
    try:
        function = resolve(setup.function)
    except BaseException as error:
        why = f"agent.function = {setup.function}: importing it {describe_exception(error)}"
        send(
            wire,
            SessionResult(-1, "broken", why=f"{why}; write module:function or file.py:function"),
        )
        return
    send(wire, SessionResult(-1, "ready"))
    log = AgentLog(Path(setup.log))
    loop = SharedLoop()
    writing = threading.Lock()

    def run_and_reply(seat: SessionAccess) -> None:
        left = run_session(function, seat, log, loop)
        with writing:
            send(wire, left)

    decode = msgspec.msgpack.Decoder(SessionOrders).decode
    while (payload := _read(stream)) is not None:
        asked = decode(payload)
        for seat in asked.seats:
            threading.Thread(
                target=run_and_reply, args=(seat,), name=seat.name, daemon=True
            ).start()
        for number in asked.stop:
            loop.stop(number)


if __name__ == "__main__":
    child.run(int(sys.argv[1]), int(sys.argv[2]), serve, BoundedOutput)
