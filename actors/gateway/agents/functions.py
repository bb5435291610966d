"""Run agent functions: `python -m actors.gateway.agents.functions FD PARENT`.

The process calls agent.function, or an environment.  Coroutines share one event loop, so that a
client made in the agent's module serves all sessions.  A plain function runs in a thread for each
session, because it mostly waits for the model.  To stop a session, its coroutine is cancelled; a
plain function cannot be stopped, and the gateway kills this process if it does not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from actors.gateway.agents.session_messages import (
    AgentLog,
    AgentSetup,
    SessionAccess,
    SessionOrders,
    SessionResult,
    parse_outcome,
    send,
)
from actors.gateway.hubs import self_playing
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function
from asyncrl.contract.printable import describe_exception
from asyncrl.transport import worker_pool
from asyncrl.transport.worker_pool import read_frame

MOST_THREADS = 1024  # for blocking calls of coroutines (asyncio.to_thread)

Outcome = tuple[Any, BaseException | None]  # of a function: its value, or its exception


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

    def begin(self, number: int, awaitable: Awaitable[Any]) -> Future[Outcome]:
        """Begin a session's awaitable in the loop, from another thread.

        The outcome is its value or its exception: SystemExit too, CancelledError after `stop`.
        """

        async def catch() -> Outcome:
            task = asyncio.current_task()
            assert task is not None
            self.tasks[number] = task
            try:
                return await awaitable, None
            except BaseException as error:  # SystemExit raised here would end the loop
                return None, error
            finally:
                del self.tasks[number]

        return asyncio.run_coroutine_threadsafe(catch(), self.loop)

    def stop(self, number: int) -> None:
        """Cancel a session that is a coroutine."""

        def cancel() -> None:
            if task := self.tasks.get(number):
                task.cancel()

        self.loop.call_soon_threadsafe(cancel)


class SessionRunner:
    """The sessions of this process, each run and reported to the gateway."""

    def __init__(self, function: Callable[..., Any], log: AgentLog, wire: socket.socket) -> None:
        self.function = function
        self.log = log
        self.wire = wire
        self.loop = SharedLoop()
        self.writing = threading.Lock()

    def begin(self, seat: SessionAccess) -> None:
        """Begin a session; any exception of the function fails only this session."""
        began = time.monotonic()
        if inspect.iscoroutinefunction(self.function):
            future = self.loop.begin(seat.number, self.play(seat))
            future.add_done_callback(lambda ended: self.report(seat, began, *ended.result()))
            return
        arguments = (seat, began)
        threading.Thread(target=self.call, args=arguments, name=seat.name, daemon=True).start()

    async def play(self, seat: SessionAccess) -> Any:
        """Await a coroutine function, whose call itself may raise a TypeError."""
        return await self.function(seat.prompt, seat)

    def call(self, seat: SessionAccess, began: float) -> None:
        """Call a plain function, which may return an awaitable, in the session's thread."""
        outcome: Outcome
        try:
            value = self.function(seat.prompt, seat)
            outcome = value, None
            if inspect.isawaitable(value):
                outcome = self.loop.begin(seat.number, value).result()
        except BaseException as error:
            outcome = None, error
        self.report(seat, began, *outcome)

    def report(
        self, seat: SessionAccess, began: float, value: Any, error: BaseException | None
    ) -> None:
        """Send a session's result: the function's value, or the reason of its failure."""
        if error is not None:
            reason = describe_exception(error)
            head = f"session {seat.name} {reason} after {time.monotonic() - began:.1f} s"
            trace = "".join(traceback.format_exception(error))
            self.log.write(head, trace.encode("utf-8", "replace"))
            result = SessionResult(seat.number, "failed", why=reason)
        elif isinstance(value, SessionResult):
            result = value
        else:
            result = parse_outcome(seat.number, value)
        with self.writing:
            send(self.wire, result)


def serve(wire: socket.socket) -> None:
    """Run sessions until the other side closes the socket."""
    stream = wire.makefile("rb")
    setup = msgspec.msgpack.decode(read_frame(stream) or b"", type=AgentSetup)
    agent = setup.agent
    try:
        function = (
            self_playing.load(agent.env, agent.args).play
            if agent.env
            else import_function(agent.function, "agent.function")
        )
    except ConfigError as error:
        send(wire, SessionResult(-1, "broken", why=str(error)))
        return
    send(wire, SessionResult(-1, "ready"))
    runner = SessionRunner(function, AgentLog(Path(setup.log)), wire)
    decode = msgspec.msgpack.Decoder(SessionOrders).decode
    while (payload := read_frame(stream)) is not None:
        orders = decode(payload)
        for seat in orders.seats:
            runner.begin(seat)
        for number in orders.stop:
            runner.loop.stop(number)


if __name__ == "__main__":
    worker_pool.run(serve)
