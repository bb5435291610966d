"""The HTTP server: uvicorn, with limits on connections and the heads of requests.

No other module imports uvicorn.  The application limits bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from asyncrl.contract.errors import ConfigError

LARGEST_HEAD = 64 * 1024  # bytes outside bodies (heads, trailers, chunk sizes) between two bodies
HEAD_S = 30.0  # for a request's head to arrive, from its connection or its first byte
CONNECTIONS = 4096


@dataclass(frozen=True)
class ListenAddress:
    """The address to listen at, and the encryption of connections.

    port_name: the user's name of the port, for messages.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certificate: str = ""
    private_key: str = ""
    behind_proxy: bool = False
    port_name: str = "agent.port"

    def require_encryption(self) -> None:
        """Raise ConfigError if keys would be sent unencrypted over a network."""
        if bool(self.certificate) != bool(self.private_key):
            raise ConfigError("agent.certificate and agent.private_key: give both or none")
        try:
            is_local = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            is_local = False
        if not is_local and not self.certificate and not self.behind_proxy:
            raise ConfigError(
                f"agent.host: {self.host} is open to the network; give agent.certificate and "
                "agent.private_key, or agent.behind_proxy = true, or use 127.0.0.1"
            )


class CoalescedResponses:
    """ASGI middleware that sends a response's head with the first part of its body.

    uvicorn writes them as two packets.  One packet takes 102 instead of 125 us of CPU time a small
    request (docs/log/agents.md), and clients do not wait for the second one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_together(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["method"] != "HEAD":
                get_connection(scope).hold()
            await send(message)

        await self.app(scope, receive, send_together)


class CoalescingTransport:
    """A transport that sends the two writes after `hold` as one packet."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self.inner = inner
        self.held: bytes | None = None  # None: writes pass; b"": the next one is held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def hold(self) -> None:
        """Hold the next write back until the one after it."""
        self.held = self.held or b""

    def write(self, data: bytes) -> None:
        if self.held == b"":
            self.held = data
            return
        if self.held:
            data, self.held = self.held + data, None
        self.inner.write(data)

    def close(self) -> None:
        if self.held:
            self.inner.write(self.held)
        self.held = None
        self.inner.close()


def get_connection(scope: Scope) -> BoundedConnection:
    """Find the connection that carries a request."""
    connection: BoundedConnection = scope["asyncrl.connection"]
    return connection


class BoundedConnection(HttpToolsProtocol):
    """A connection that limits requests' heads and the number of connections.

    uvicorn's protocol buffers a head without limit.  When there are too many connections, it
    refuses new ones, with or without a key.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.head_bytes = 0  # bytes received since the last part of a body
        self.in_head = False
        self.head_timer: asyncio.TimerHandle | None = None
        self.lost = False
        # connections that have not shown a valid key yet, the oldest first
        self.unauthorized: dict[BoundedConnection, None] = vars(self.server_state).setdefault(
            "unauthorized", {}
        )
        self.unauthorized[self] = None
        self.close_callbacks: set[Callable[[], None]] = set()  # called when the connection closes
        self.coalescing = CoalescingTransport(transport)
        super().connection_made(self.coalescing)  # type: ignore[arg-type]
        if len(self.connections) > count_allowed_connections():
            # only connections without a key are closed to make room
            next(iter(self.unauthorized)).abort()
            if self.is_closed:
                return
        self.head_timer = self.loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self.lost = True
        self.unauthorized.pop(self, None)
        super().connection_lost(exc)
        for notify in list(self.close_callbacks):
            notify()

    def abort(self) -> None:
        """Close the connection at once."""
        self.unauthorized.pop(self, None)
        self.transport.abort()

    def authorize(self) -> None:
        """Keep the connection, which has shown a valid key, when there are too many."""
        self.unauthorized.pop(self, None)

    @property
    def is_closed(self) -> bool:
        """Whether the connection has closed or is closing."""
        return self.lost or self.transport.is_closing()

    def hold(self) -> None:
        """Send the next write together with the one after it."""
        self.coalescing.hold()

    async def wait_for(self, task: asyncio.Task[None], timeout: float | None) -> None:
        """Wait until the task is done or the connection closes, at most `timeout` seconds."""
        if self.is_closed or task.done():
            return
        news: asyncio.Future[None] = self.loop.create_future()

        def notify(_task: Any = None) -> None:
            if not news.done():
                news.set_result(None)

        timer = None if timeout is None else self.loop.call_later(timeout, notify)
        task.add_done_callback(notify)
        self.close_callbacks.add(notify)
        try:
            await news
        finally:
            self.close_callbacks.discard(notify)
            task.remove_done_callback(notify)
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.head_bytes += len(data)
        super().data_received(data)
        if self.head_bytes > LARGEST_HEAD:
            self.transport.abort()
        elif self.in_head and self.head_timer is None:  # the head is incomplete
            self.head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def on_message_begin(self) -> None:
        self.head_bytes = 0
        super().on_message_begin()
        self.scope["asyncrl.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._cancel_head_timer()
        self.in_head = True

    def on_headers_complete(self) -> None:
        self._cancel_head_timer()
        self.in_head = False
        self.head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.head_bytes = 0
        super().on_message_complete()

    def _cancel_head_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None


def count_allowed_connections() -> int:
    """Return the limit of open connections: at most half of the file descriptors."""
    return min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class QuietServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """An HTTP server for an ASGI application, in the running event loop."""

    def __init__(self, app: ASGIApp, bind: ListenAddress) -> None:
        bind.require_encryption()
        self.bind = bind
        family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only if the protocol is given; without it, a response in two
        # parts waits up to 40 ms for the client's acknowledgement of the first
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((bind.host, bind.port))
        except OSError as error:
            self.socket.close()
            raise ConfigError(
                f"{bind.port_name}: {bind.host}:{bind.port}: {error.strerror}"
            ) from error
        self.task: asyncio.Task[None] | None = None
        self.server = QuietServer(
            uvicorn.Config(
                CoalescedResponses(app),
                http=BoundedConnection,
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=bind.behind_proxy,
                ssl_certfile=bind.certificate or None,
                ssl_keyfile=bind.private_key or None,
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def url(self) -> str:
        """URL for a harness on this machine."""
        host, port = self.socket.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' if self.bind.certificate else ''}://{host}:{port}"

    async def start(self) -> None:
        """Start the server; return once it accepts connections."""
        self.task = asyncio.create_task(self.server.serve([self.socket]))
        while not self.server.started and not self.task.done():
            await asyncio.sleep(0.01)
        if self.task.done():
            self.task.result()

    async def stop(self) -> None:
        """Close all connections."""
        self.server.should_exit = True
        if self.task is not None:
            await self.task
        self.socket.close()
