"""The shaping relay, a process that makes the link slow.

    python relay.py '{"ports": [[5555, "10.0.0.1", 5555]], "delay_s": 0.02, "rate": 12.5e6, ...}'

It listens on 127.0.0.1, connects to the other side, and forwards all bytes.  Each direction is
one line of `rate` bytes/s for all connections together, and bytes that leave it arrive `delay_s`
later.  After each `cut_bytes` from the far side, the connection that carried the last of them is
reset at both ends.  TCP ends at both sides of the relay: its windows do not see the delay.

The forwarded bytes are written to `counts`, a JSON file, ten times a second while they grow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import Any

import msgspec

PIECE = 16384  # bytes read at once
QUEUE_S = 0.005  # of the line's time may wait before it; what is more stays with its sender
COUNTS_S = 0.1
RESET = pack("ii", 1, 0)  # of SO_LINGER: nothing is waited for at the end


class Shape(msgspec.Struct, frozen=True):
    """A link.  0: no delay, no limit, no cuts."""

    delay_s: float = 0.0  # one way
    rate: float = 0.0  # bytes/s, each way
    cut_bytes: float = 0.0  # from the far side, between two cuts


class Order(msgspec.Struct, frozen=True):
    """The arguments of a relay; ports: (local port, remote host, remote port) of each link."""

    ports: list[tuple[int, str, int]]
    shape: Shape
    counts: str


class Line:
    """One direction: when a piece that is ready now will have arrived.

    >>> line = Line(Shape(delay_s=1.0, rate=10.0))
    >>> line.arrival(100, now=5.0), line.arrival(20, now=5.0), line.arrival(10, now=30.0)
    (16.0, 18.0, 32.0)
    >>> line.ahead(30.5)
    0.5
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.free = 0.0  # CLOCK_MONOTONIC seconds: when what was taken has left
        self.bytes = 0

    def arrival(self, size: int, now: float) -> float:
        self.bytes += size
        rate = self.shape.rate
        self.free = max(now, self.free) + (size / rate if rate else 0.0)
        return self.free + self.shape.delay_s

    def ahead(self, now: float) -> float:
        """Seconds of work that the line has before it."""
        return max(0.0, self.free - now)


class Relay:
    """All connections of a link."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.up, self.down = Line(order.shape), Line(order.shape)
        self.connections = self.cuts = 0

    def counts(self) -> dict[str, int]:
        return {
            "down": self.down.bytes,
            "up": self.up.bytes,
            "cuts": self.cuts,
            "connections": self.connections,
        }

    def due_for_cut(self) -> bool:
        every = self.order.shape.cut_bytes
        return bool(every) and self.down.bytes >= (self.cuts + 1) * every

    async def carry(
        self, line: Line, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        """Hand on what `source` says until it ends.  Raises ConnectionAbortedError for a cut."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            while True:
                at, piece = await under_way.get()
                if (wait := at - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                if not piece:
                    return target.write_eof()
                target.write(piece)
                await target.drain()

        arriving = asyncio.create_task(arrive())
        try:
            while piece := await source.read(PIECE):
                under_way.put_nowait((line.arrival(len(piece), time.monotonic()), piece))
                if line is self.down and self.due_for_cut():
                    self.cuts += 1
                    raise ConnectionAbortedError
                while (ahead := line.ahead(time.monotonic())) > QUEUE_S:
                    await asyncio.sleep(ahead - QUEUE_S)
            under_way.put_nowait((time.monotonic() + line.shape.delay_s, b""))
            await arriving
        finally:
            arriving.cancel()

    async def connection(
        self,
        there: tuple[str, int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """One connection, from its beginning to its end at either side."""
        self.connections += 1
        writers = [writer]
        ways: list[asyncio.Task[None]] = []
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*there)
            writers.append(far_writer)
            ways = [
                asyncio.create_task(self.carry(self.up, reader, far_writer)),
                asyncio.create_task(self.carry(self.down, far_reader, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        if ways and all(way.done() and way.exception() is None for way in ways):
            for each in writers:
                each.close()
            return
        for way in ways:
            way.cancel()
        for each in writers:
            socket = each.get_extra_info("socket")
            socket.setsockopt(SOL_SOCKET, SO_LINGER, RESET)
            each.transport.abort()

    async def serve(self) -> None:
        servers = [
            await asyncio.start_server(
                lambda reader, writer, there=(host, port): self.connection(there, reader, writer),
                "127.0.0.1",
                here,
            )
            for here, host, port in self.order.ports
        ]
        before: dict[str, int] = {}
        # with its parent it ends, however that ended
        parent = os.getppid()
        while servers and os.getppid() == parent:
            if (now := self.counts()) != before:
                before = now
                part = Path(self.order.counts + ".part")
                part.write_text(json.dumps(now))
                part.replace(self.order.counts)
            await asyncio.sleep(COUNTS_S)


def main() -> None:
    order: Any = msgspec.json.decode(sys.argv[1], type=Order)
    asyncio.run(Relay(order).serve())


if __name__ == "__main__":
    main()
