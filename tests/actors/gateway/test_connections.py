"""Single connections of the HTTP server, without a network and with a clock that stands still:
deadlines and sizes of heads."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncrl.transport import http_server
from asyncrl.transport.http_server import ListenAddress


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
        assert isinstance(scope["asyncrl.connection"], http_server.BoundedConnection)
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
        return None if connection.timer is None else connection.timer.when()

    connection, wire = connect()
    first = connection.timer
    assert first is not None and deadline() == 130.0 and not connection.in_head
    connection.data_received(b"GET / HTTP/1.1\r\n")
    assert first.cancelled() and deadline() == 130.0 and connection.in_head
    second = connection.timer
    connection.data_received(b"host: x\r\n")
    assert connection.timer is second, "more of the same head has no more time"
    connection.data_received(b"\r\n")
    assert second is not None and second.cancelled() and deadline() is None
    assert (connection.in_head, connection.head_bytes) == (False, 0)
    loop.run_until_complete(asyncio.sleep(0))
    assert wire.events == ["HTTP/1.1 204 No Content\r\n\r\n"], "head and body are one packet"
    assert deadline() is None, "between two requests the connection may rest"
    connection.data_received(b"GET / HTTP/1.1\r\n")
    late = connection.timer
    assert late is not None
    late._run()
    assert wire.events[1:] == ["aborted"]
    connection.connection_lost(ConnectionResetError())
    assert late.cancelled() and connection.timer is None and wire.events[1:] == ["aborted"]
    other, closing = connect()
    other.connection_lost(None)
    assert closing.events == ["closed"] and other.is_closed and other.timer is None


def test_a_head_has_64_kib(connect: Connect, loop: asyncio.AbstractEventLoop) -> None:
    head = b"POST / HTTP/1.1\r\ncontent-length: 200000\r\n"
    connection, wire = connect()
    connection.data_received(head)
    assert connection.head_bytes == len(head)
    for size, events in (
        (64 * 1024 - len(head), []),
        (1, [http_server.HEAD_TOO_LARGE.decode(), "closed"]),
    ):
        for _ in range(size):
            connection.data_received(b"a")
        assert wire.events == events
    connection, wire = connect()
    connection.data_received(head + b"\r\n")
    connection.data_received(b"a" * 199_999)
    assert (connection.head_bytes, wire.events) == (0, []), "a body is no head"
    connection.data_received(b"a")
    assert (connection.head_bytes, connection.is_closed) == (0, False)
    connection.data_received(b"GET / HTTP/1.1\r\n")
    connection.data_received(b"a" * (64 * 1024))
    assert wire.events == ["aborted"], "the answer to the first request was due"
    connection.connection_lost(None)
    loop.run_until_complete(asyncio.sleep(0))


def test_a_refused_bodys_rest_has_time(connect: Connect, loop: asyncio.AbstractEventLoop) -> None:
    """This application answers before it has read a body."""
    for rest, events in ((b"bc", []), (b"b", ["aborted"])):
        connection, wire = connect()
        connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\na")
        assert connection.timer is None
        loop.run_until_complete(asyncio.sleep(0))
        timer = connection.timer
        assert timer is not None and timer.when() == 160.0
        connection.data_received(rest)
        assert timer.cancelled() == (not events)
        if events:
            timer._run()
        assert wire.events[1:] == events
        connection.connection_lost(None)


def test_a_key_finds_a_place_unless_all_are_busy(
    connect: Connect, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS", 6)  # one of them for new connections
    receiving, unread, polling, idle, busy = made = [connect() for _ in range(5)]
    for connection, _ in (unread, polling, busy):
        connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    receiving[0].data_received(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n1")
    unread[0].flow.write_paused = polling[0].is_polling = True
    assert all(connection.authorize() for connection, _ in [*made, receiving, busy])
    for place in (idle, unread, polling, receiving):
        assert not place[1].is_closing()
        new, _ = connect()
        assert new.authorize() and new.authorize() and place[1].is_closing()
        place[0].connection_lost(None)
        new.data_received(b"GET / HTTP/1.1\r\n\r\n")
    late, wire = connect()
    assert not (late.authorize() or wire.is_closing() or busy[1].is_closing())
    loop.run_until_complete(asyncio.sleep(0))
