"""The limits of the HTTP server at the doors of the agents' endpoint, of `asyncrl watch` and of
`asyncrl tinker`, and the bound of the requests to sample that a client of the last one may have."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
from gateway_kit import Served
from process_kit import until
from tinker import types
from tinker_kit import prompt
from tinker_local_kit import KEY, LocalServer

from asyncrl.transport import http_server
from asyncrl.transport.http_server import HttpServer, ListenAddress
from asyncrl.viewer.app import COOKIE, LARGEST_BODY, WatchApp

WAIT_S = 600.0
DOORS = ("endpoint", "watch", "tinker")


class Door(NamedTuple):
    """A server, the lines of a request with its key, and the largest body of that request."""

    server: HttpServer
    line: str
    key: str
    limit: int

    def head(self, length: int = 0, *, key: bool = True) -> bytes:
        lines = [self.line, "host: 127.0.0.1", *([self.key] if key else [])]
        return "\r\n".join([*lines, f"content-length: {length}", "\r\n"]).encode()

    @contextmanager
    def connect(self, sent: bytes = b"") -> Iterator[socket.socket]:
        address = self.server.socket.getsockname()
        with socket.create_connection(address, WAIT_S) as connection:
            connection.sendall(sent)
            yield connection

    def ask(self, sent: bytes) -> bytes:
        with self.connect(sent) as connection:
            return connection.recv(65536)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(65536) == b""
    except ConnectionResetError:
        return True


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    server = LocalServer(tmp_path_factory.mktemp("tinker"), "server.body_mib=1", "seed=5")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def doors(
    local: LocalServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Door]]:
    served = Served()
    opened = served.do(served.service.open)
    app = WatchApp([tmp_path_factory.mktemp("runs")], "secret", expected=True)
    page = HttpServer(app.build_application(), ListenAddress())
    asyncio.run_coroutine_threadsafe(page.start(), served.loop).result(WAIT_S)
    beat, key = f"POST /s/{opened.name}/beat HTTP/1.1", f"authorization: Bearer {opened.api_key}"
    yield {
        "endpoint": Door(served.endpoint, beat, key, 1024 * 1024),
        "watch": Door(page, "GET /api/runs HTTP/1.1", f"cookie: {COOKIE}=secret", LARGEST_BODY),
        "tinker": Door(local.web, "POST /api/v1/telemetry HTTP/1.1", f"x-api-key: {KEY}", 1 << 20),
    }
    asyncio.run_coroutine_threadsafe(page.stop(), served.loop).result(WAIT_S)
    served.close()


@pytest.fixture(params=DOORS)
def door(doors: dict[str, Door], request: pytest.FixtureRequest) -> Door:
    return doors[request.param]


def test_heads_and_bodies_have_size_and_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    assert door.ask(door.head()).startswith(b"HTTP/1.1 200 ")
    assert door.ask(door.head(key=False))[9:12] in (b"401", b"403")
    assert door.ask(door.head().replace(b"host: 127.0.0.1\r\n", b"")).startswith(b"HTTP/1.1 200 ")
    with door.connect(door.head().replace(door.line.split()[0].encode(), b"HEAD", 1)) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 ")
        connection.sendall(door.head())
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 "), "it was kept"
    assert door.ask(door.head(door.limit + 1)).startswith(b"HTTP/1.1 413 "), "none of it was sent"
    chunked = door.head().replace(b"content-length: 0", b"transfer-encoding: chunked")
    large = b"%x\r\n" % (door.limit + 1) + b" " * (door.limit + 1)
    assert door.ask(chunked + large).startswith(b"HTTP/1.1 413 ")
    with monkeypatch.context() as patch:
        patch.setattr(http_server, "LARGEST_HEAD", 1000)
        begin = door.head()[:-2] + b"x-more: "
        for size, status in ((1000, b"200"), (1001, b"431")):  # in one piece, to the last byte
            assert door.ask(begin.ljust(size - 4, b"a") + b"\r\n\r\n")[9:12] == status
        with door.connect(begin.ljust(1000, b"a")) as connection:
            connection.sendall(b"a" * 100)
            assert connection.recv(65536).startswith(b"HTTP/1.1 431 ") and is_closed(connection)
    with monkeypatch.context() as patch:
        patch.setattr(http_server, "BODY_S", 0.05)
        with door.connect(door.head(9) + b"{") as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 408 ") and is_closed(connection)
    with monkeypatch.context() as patch:
        patch.setattr(http_server, "HEAD_S", 0.05)
        for sent in (b"", door.head()[:-2]):
            with door.connect(sent) as connection:
                assert is_closed(connection)


def test_unkeyed_connections_keep_out_no_keyed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS", 4)
    connections = door.server.server.server_state.connections
    with ExitStack() as stack:
        known = stack.enter_context(door.connect(door.head()))
        assert known.recv(65536).startswith(b"HTTP/1.1 200 ")
        address = door.server.socket.getsockname()
        sent = (b"", door.head()[:-2], door.head(key=False), door.head(9, key=False))
        strangers = [socket.create_connection(address, WAIT_S) for _ in range(12)]
        for index, stranger in enumerate(strangers):
            try:
                stranger.sendall(sent[index % 4])
            except ConnectionError:
                continue
        until(lambda: len(connections) <= 4)
        assert is_closed(strangers[0]) and door.ask(door.head()).startswith(b"HTTP/1.1 200 ")
        known.sendall(door.head())
        assert known.recv(65536).startswith(b"HTTP/1.1 200 ")
        for stranger in strangers:
            stranger.close()
        until(lambda: len(connections) == 1)
        keyed = [known, *(stack.enter_context(door.connect(door.head())) for _ in range(2))]
        assert all(each.recv(65536).startswith(b"HTTP/1.1 200 ") for each in keyed[1:])
        with door.connect() as stranger, door.connect():
            assert is_closed(stranger), "it takes the place of none with a key"
        for _ in range(4):  # each takes the place of the one that was used least recently
            for each in keyed:
                each.sendall(door.head())
                assert each.recv(65536).startswith(b"HTTP/1.1 200 ")
            keyed.append(stack.enter_context(door.connect(door.head())))
            assert keyed[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
            assert is_closed(keyed.pop(0))
    until(lambda: not connections)


def test_bodies_of_all_connections_are_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client repeats the request after the seconds of Retry-After."""
    monkeypatch.setattr(http_server, "BODY_BYTES", door.limit)
    body = b"{" + b" " * (door.limit - 20) + b"}"
    with door.connect(door.head(len(body)) + body[:-1]) as slow:
        until(lambda: http_server.BodyMemory.used == len(body) - 1)
        answer = door.ask(door.head(100) + b"{" + b" " * 98 + b"}")
        assert answer.startswith(b"HTTP/1.1 429 ") and b"\r\nretry-after: 1\r\n" in answer
        slow.sendall(body[-1:])
        assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert door.ask(door.head(100) + b"{" + b" " * 98 + b"}").startswith(b"HTTP/1.1 200 ")
    assert http_server.BodyMemory.used == 0


def test_requests_of_one_client_leave_room_for_another(
    local: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unmodified client waits and repeats what is refused meanwhile."""
    link: Any = local.server.samplers.link
    call, hold, refused = link.call, threading.Event(), threading.Event()
    hold.set()

    async def held(method: str, request: Any) -> Any:
        while request.first.seed == 7 and hold.is_set():
            await asyncio.sleep(0.002)
        return await call(method, request)

    make_room = local.server.samplers._make_room

    def noted(session: str, size: int) -> None:
        try:
            make_room(session, size)
        except Exception:
            refused.set()
            raise

    monkeypatch.setattr(link, "call", held)
    monkeypatch.setattr(local.server.samplers, "_make_room", noted)
    monkeypatch.setattr(local.server.samplers.shares, "total", 60_000)
    params = types.SamplingParams(max_tokens=8, seed=3)
    slow = types.SamplingParams(max_tokens=8, seed=7)
    with local.client() as first, local.client() as second:
        own = second.create_sampling_client(base_model="tiny").result()
        alone = own.sample(prompt(), 2, params).result()
        many = first.create_sampling_client(base_model="tiny").result()
        results = [many.sample(prompt(), 2, slow).future() for _ in range(8)]
        assert refused.wait(WAIT_S)
        beside = own.sample(prompt(), 2, params).result()
        assert [(x.tokens, x.logprobs) for x in beside.sequences] == [
            (x.tokens, x.logprobs) for x in alone.sequences
        ]
        assert not any(result.done() for result in results)
        hold.clear()
        assert all(len(result.result(WAIT_S).sequences) == 2 for result in results)
