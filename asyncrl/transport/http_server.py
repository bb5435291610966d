"""The HTTP server of every command that serves HTTP: uvicorn, with limits (docs/http.md).

No other module imports uvicorn.  An application checks keys by `authorize`, and reads bodies by
`open_body`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from asyncrl.contract.errors import ConfigError
from asyncrl.transport.connection_guard import raise_descriptor_limit
from asyncrl.transport.sockets import is_loopback

LARGEST_HEAD = 64 * 1024  # bytes outside bodies (heads, trailers, chunk sizes) between two bodies
HEAD_S = 30.0  # for a request's head to arrive, from its connection or its first byte
BODY_S = 60.0  # for a body to arrive, also one that is not read
BODY_BYTES = 512 * 1024 * 1024  # of all bodies that are received or parsed at the same time
CONNECTIONS = 4096
HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True)
class ListenAddress:
    """The address to listen at, and the encryption of connections.

    further_ports: tried in this order if the port is taken.
    port_name: the user's name of the port, for messages.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certificate: str | Path = ""
    private_key: str | Path = ""
    behind_proxy: bool = False
    port_name: str = "agent.port"
    further_ports: Sequence[int] = ()

    def require_encryption(self) -> None:
        """Raise ConfigError if keys would be sent unencrypted over a network."""
        prefix = self.port_name.removesuffix("port")
        if bool(self.certificate) != bool(self.private_key):
            raise ConfigError(f"{prefix}certificate and its private key: give both or none")
        if not is_loopback(self.host) and not self.certificate and not self.behind_proxy:
            proxy = ", or agent.behind_proxy = true" if prefix == "agent." else ""
            raise ConfigError(
                f"{prefix}host: {self.host} is open to the network; give {prefix}certificate and "
                f"its private key{proxy}, or use 127.0.0.1"
            )

    def listen(self) -> socket.socket:
        """Return a listening socket.  Raises ConfigError if no port can be used."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        for port in (self.port, *self.further_ports):
            # asyncio sets TCP_NODELAY only if the protocol is given; without it, a response in two
            # parts waits up to 40 ms for the client's acknowledgement of the first
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.host, port))
                listener.listen()
                return listener
            except OSError as error:
                listener.close()
                problem = error
        raise ConfigError(
            f"{self.port_name}: {self.host}:{port}: {problem.strerror}; choose another host or port"
        ) from problem


class CoalescingTransport:
    """A transport that sends the two writes after `hold` as one packet.

    uvicorn writes the head of a response and its body as two packets.  One packet takes 102 instead
    of 125 us of CPU time a small request (docs/log/agents.md), and clients do not wait for the
    second one.
    """

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


def authorize(request: Request, key: str, *sent: str) -> bool:
    """Return whether a request carries the key, compared in constant time.

    If it does, its connection is kept, unless those with a key are too many.

    key: "" admits every request.
    sent: what the request carries elsewhere than in `Authorization: Bearer` and `X-API-Key`.
    Raises HTTPException 429 while every connection with a key is busy.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    sent += (request.headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else "")
    if key and not any(hmac.compare_digest(x.strip().encode(), key.encode()) for x in sent):
        return False
    connection = request.scope.get("asyncrl.connection")
    if connection is not None and not connection.authorize():
        wait = {"retry-after": "1", "connection": "close"}
        raise HTTPException(429, "all connections of the server are busy: try again", wait)
    return True


class BodyMemory:
    """The number of bytes of this process's open bodies."""

    used = 0


@contextlib.asynccontextmanager
async def open_body(request: Request, limit: int, limit_name: str = "") -> AsyncIterator[bytes]:
    """Read a body of at most `limit` bytes; it is open until the block ends.

    Starlette's own limit (`max_body_size`) answers with plain text, which clients cannot parse.

    limit_name: the user's name of the limit, for messages.
    Raises HTTPException: 413, 408 after BODY_S, 429 beyond BODY_BYTES of all open bodies.
    """
    size = 0

    def check(new: int) -> None:
        if size + new > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes{limit_name}")
        if BodyMemory.used + new > max(BODY_BYTES, limit):
            wait = {"retry-after": "1"}
            raise HTTPException(429, "too many bodies are being received: try again", wait)

    try:
        body = bytearray()
        check(int(request.headers.get("content-length", 0)))
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    check(len(part))
                    BodyMemory.used += len(part)
                    size += len(part)
                    body += part
        except TimeoutError as error:
            close = {"connection": "close"}
            raise HTTPException(408, f"the body took over {BODY_S:g} s", close) from error
        whole = bytes(body)
        del body
        yield whole
    finally:
        BodyMemory.used -= size


class BoundedConnection(HttpToolsProtocol):
    """A connection that limits requests' heads and the number of connections.

    uvicorn's protocol buffers a head without limit.  When there are too many connections, it
    refuses new ones, with or without a key.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.head_bytes = 0  # bytes received since the last part of a body
        self.in_head = False
        self.in_message = False
        self.timer: asyncio.TimerHandle | None = None  # which closes the connection
        # all connections by whether they have shown a valid key: the oldest first, and with a key
        # the one that was used last comes last
        self.known: dict[bool, dict[BoundedConnection, None]] = vars(self.server_state).setdefault(
            "known", {False: {}, True: {}}
        )
        self.known[False][self] = None
        self.is_polling = False  # its response waits for a result, and may be asked for again
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self.coalescing = CoalescingTransport(transport)
        super().connection_made(self.coalescing)  # type: ignore[arg-type]
        if len(self.connections) > count_allowed_connections():
            next(iter(self.known[False])).abort()
            if self.is_closed:
                return
        self.timer = self.loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.closed.set_result(None)
        self._forget()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close this connection to make room."""
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        for connections in self.known.values():
            connections.pop(self, None)

    def authorize(self) -> bool:
        """Count this connection to those with a valid key; return False if it finds no place.

        An eighth of all places stays free for new connections, which then replace an idle one."""
        keyed = self.known[True]
        allowed = count_allowed_connections()
        if self not in keyed and len(keyed) >= allowed - max(1, allowed // 8):
            idle = (each for each in keyed if not (each.in_message or each.is_responding))
            needless = next(idle, None) or next((each for each in keyed if not each.is_busy), None)
            if needless is None:
                return False
            needless.abort()
        self._forget()
        keyed[self] = None
        return True

    @property
    def is_closed(self) -> bool:
        """Whether the connection has closed or is closing."""
        return self.closed.done() or self.transport.is_closing()

    @property
    def is_responding(self) -> bool:
        """Whether a response is due or being sent."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_busy(self) -> bool:
        """Whether the server works on a response, instead of waiting for the client or a result."""
        is_waiting = self.in_message or self.flow.write_paused or self.is_polling
        return self.is_responding and not is_waiting

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, at most LARGEST_HEAD bytes outside bodies.

        The parser gets a head only up to the limit: a longer one would be complete, and its request
        served, before its length is known."""
        while data and not self.is_closed:
            room = LARGEST_HEAD - self.head_bytes
            if room > 0:
                part, data = data[:room], data[room:]
                self.head_bytes += len(part)
                super().data_received(part)
            elif self.in_head and not self.is_responding:
                self.transport.write(HEAD_TOO_LARGE)
                self.transport.close()
            else:  # within another response
                self.transport.abort()
        if self.in_head and self.timer is None and not self.is_closed:  # the head is incomplete
            self.timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["asyncrl.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._cancel_timer()
        self.in_head = self.in_message = True

    def on_headers_complete(self) -> None:
        self._cancel_timer()
        self.in_head = False
        self.head_bytes = 0
        has_body = self.parser.get_method() != b"HEAD" and not self.expect_100_continue
        if has_body and not self.is_responding:
            self.coalescing.hold()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._cancel_timer()
        self.in_message = False
        self.head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.in_message and self.timer is None:  # the rest of the body is dropped
            self.timer = self.loop.call_later(BODY_S, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def count_allowed_connections() -> int:
    """Return the limit of open connections: at most half of the file descriptors."""
    return min(CONNECTIONS, raise_descriptor_limit() // 2)


class QuietServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """An HTTP server for an ASGI application, in the running event loop."""

    def __init__(self, app: ASGIApp, bind: ListenAddress, *, keep_alive_s: int = 5) -> None:
        """Listen; keep_alive_s: for the next request on a connection."""
        self.bind = bind
        self.socket = bind.listen()
        self.task: asyncio.Task[None] | None = None
        self.server = QuietServer(
            uvicorn.Config(
                app,
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
                timeout_keep_alive=keep_alive_s,
            )
        )

    @property
    def url(self) -> str:
        """URL for a client on this machine."""
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

    async def serve(
        self,
        announce: Callable[[str], None],
        work: contextlib.AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        """Serve until SIGINT, SIGTERM or `end`; a signal is raised again at the end.

        announce: called with the URL when connections are accepted.
        work: entered before the first connection, and left after the last one.
        """
        with uvicorn.Server.capture_signals(self.server):
            async with work or contextlib.nullcontext():
                await self.start()
                announce(self.url)
                assert self.task is not None
                await self.task

    def end(self) -> None:
        """End the server soon."""
        self.server.should_exit = True

    async def stop(self) -> None:
        """Close all connections."""
        self.end()
        if self.task is not None:
            await self.task
        self.socket.close()
