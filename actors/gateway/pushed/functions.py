"""A process that calls agent.function: `python -m actors.gateway.pushed.functions FD PARENT`.

Every session is a thread: what it waits for is the model.  A function that is to stop cannot be
made to; when it goes on, the gateway ends this process."""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from actors.gateway.pushed.log import Log
from actors.gateway.pushed.seats import Asked, Left, Seat, Setup, outcome, send
from actors.reward_worker import Bounded, _read, said
from asyncrl.contract import importing
from asyncrl.transport import child


def resolve(path: str) -> Callable[..., Any]:
    """`module:function` or `file.py:function`.  Raises whatever importing it raises."""
    module, _, name = path.rpartition(":")
    found = getattr(importing.module(module), name)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return found  # type: ignore[no-any-return]


def play(function: Callable[..., Any], seat: Seat, log: Log) -> Left:
    """One session.  Whatever the function raises, an exit included, fails its session alone."""
    began = time.monotonic()
    try:
        value = function(seat.prompt, seat)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return outcome(seat.number, value)
    except BaseException as error:
        head = f"session {seat.name} {said(error)} after {time.monotonic() - began:.1f} s"
        log.write(head, traceback.format_exc().encode("utf-8", "replace"))
        return Left(seat.number, "failed", why=said(error))


async def _awaited(value: Any) -> Any:
    return await value


def serve(wire: socket.socket) -> None:
    """Play until the other side closes."""
    stream = wire.makefile("rb")
    setup = msgspec.msgpack.decode(_read(stream) or b"", type=Setup)
    try:
        function = resolve(setup.function)
    except BaseException as error:
        why = f"agent.function = {setup.function}: importing it {said(error)}"
        send(wire, Left(-1, "broken", why=f"{why}; write module:function or file.py:function"))
        return
    send(wire, Left(-1, "ready"))
    log = Log(Path(setup.log))
    writing = threading.Lock()

    def one(seat: Seat) -> None:
        left = play(function, seat, log)
        with writing:
            send(wire, left)

    decode = msgspec.msgpack.Decoder(Asked).decode
    while (payload := _read(stream)) is not None:
        for seat in decode(payload).seats:
            threading.Thread(target=one, args=(seat,), name=seat.name, daemon=True).start()


if __name__ == "__main__":
    child.run(int(sys.argv[1]), int(sys.argv[2]), serve, Bounded)
