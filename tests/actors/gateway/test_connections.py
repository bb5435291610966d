"""Single connections of the HTTP server, without a network and with a clock that stands still:
deadlines and sizes of heads, room for those with a key, waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.gateway.endpoint import server as http_server
from actors.gateway.endpoint.server import ListenAddress


class Wire(asyncio.Transport):
    """What a connection does to its transport."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 80), "peername": ("127.0.0.1", 7)})
        self.events: list[str] = []

    def write(self, data: Any) -> None:
        self.events.append(bytes(data).decode())

    def abort(self) -> None:
        self.events.append("aborted")

    def close(self) -> None:
        self.events.append("closed")

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return bool({"aborted", "closed"} & {*self.events})


Connect = Callable[[], tuple[http_server.BoundedConnection, Wire]]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    monkeypatch.setattr(made, "time", lambda: 100.0)
    yield made
    made.close()


@pytest.fixture
def connect(loop: asyncio.AbstractEventLoop) -> Connect:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert http_server.get_connection(scope) is scope["asyncrl.connection"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = http_server.HttpServer(app, ListenAddress())
    server.socket.close()
    config, state = server.server.config, server.server.server_state

    def make() -> tuple[http_server.BoundedConnection, Wire]:
        connection, wire = http_server.BoundedConnection(config, state, {}, loop), Wire()
        connection.connection_made(wire)
        return connection, wire

    return make


def test_a_head_has_thirty_seconds(connect: Connect, loop: asyncio.AbstractEventLoop) -> None:
    """From its connection, and from the first byte of each further one."""

    def deadline() -> float | None:
        return None if connection.head_timer is None else connection.head_timer.when()

    connection, wire = connect()
    first = connection.head_timer
    assert first is not None and deadline() == 130.0 and not connection.in_head
    connection.data_received(b"GET / HTTP/1.1\r\n")
    assert first.cancelled() and deadline() == 130.0 and connection.in_head
    second = connection.head_timer
    connection.data_received(b"host: x\r\n")
    assert connection.head_timer is second, "more of the same head has no more time"
    connection.data_received(b"\r\n")
    assert second is not None and second.cancelled() and deadline() is None
    assert (connection.in_head, connection.head_bytes) == (False, 0)
    loop.run_until_complete(asyncio.sleep(0))
    assert wire.events == ["HTTP/1.1 204 No Content\r\n\r\n"], "head and body are one packet"
    assert deadline() is None, "between two requests the connection may rest"
    connection.data_received(b"GET / HTTP/1.1\r\n")
    late = connection.head_timer
    assert late is not None
    late._run()
    assert wire.events[1:] == ["aborted"]
    connection.connection_lost(ConnectionResetError())
    assert late.cancelled() and connection.head_timer is None and wire.events[1:] == ["aborted"]
    other, closing = connect()
    other.connection_lost(None)
    assert closing.events == ["closed"] and other.is_closed and other.head_timer is None


def test_a_head_has_64_kib(connect: Connect, loop: asyncio.AbstractEventLoop) -> None:
    for more, events in ((0, []), (1, ["aborted"])):
        connection, wire = connect()
        connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 200000\r\n")
        assert connection.head_bytes == 0
        connection.data_received(b"x: ")
        connection.data_received(b"a" * (64 * 1024 - 3 + more))
        assert wire.events == events
    connection, wire = connect()
    connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 200000\r\n\r\n")
    connection.data_received(b"a" * 199_999)
    assert (connection.head_bytes, wire.events) == (0, []), "a body is no head"
    connection.data_received(b"a")
    assert (connection.head_bytes, connection.is_closed) == (0, False)
    loop.run_until_complete(asyncio.sleep(0))


def test_too_many_connections_close_the_oldest_without_a_key(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS", 2)
    (first, kept), (second, oldest) = connect(), connect()
    assert list(first.unauthorized) == [first, second]
    first.authorize()
    third, newest = connect()
    assert (kept.events, oldest.events, newest.events) == ([], ["aborted"], [])
    assert second.is_closed and list(third.unauthorized) == [third] and third.head_timer is not None
    second.connection_lost(None)
    assert [first, third] == sorted(third.connections, key=[first, third].index)
    third.authorize()
    fourth, refused = connect()
    assert refused.events == ["aborted"] and fourth.head_timer is None and not fourth.unauthorized
    assert (kept.events, newest.events) == ([], [])
    assert first.head_timer is not None and third.head_timer is not None


def test_a_wait_ends_with_its_task_its_connection_or_its_time(
    connect: Connect, loop: asyncio.AbstractEventLoop
) -> None:
    async def wait(how: str) -> list[float]:
        connection, _ = connect()
        release = asyncio.Event()

        async def work() -> None:
            await release.wait()

        task = asyncio.create_task(work())
        waiter = asyncio.create_task(connection.wait_for(task, 5.0 if how == "time" else None))
        await asyncio.sleep(0)
        timers = [handle.when() for handle in loop._scheduled]  # type: ignore[attr-defined]
        assert not waiter.done() and len(connection.close_callbacks) == 1
        if how == "task":
            release.set()
        elif how == "closed":
            connection.connection_lost(None)
        else:
            max(loop._scheduled, key=lambda handle: handle is not connection.head_timer)._run()  # type: ignore[attr-defined]
        await waiter
        assert not connection.close_callbacks and task.done() == (how == "task")
        assert {handle for handle in loop._scheduled if not handle.cancelled()} <= {
            connection.head_timer
        }  # type: ignore[attr-defined]
        if how == "closed":
            await connection.wait_for(task, None)
        release.set()
        await task
        await connection.wait_for(task, None)
        connection.connection_lost(None)
        return timers

    for how, timers in (("task", [130.0]), ("closed", [130.0]), ("time", [105.0, 130.0])):
        assert sorted(loop.run_until_complete(wait(how))) == timers
