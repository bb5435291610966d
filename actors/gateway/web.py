"""The HTTP endpoint: model APIs for each session, and routes to lease and end them.

One event loop owns all sessions.  Each call runs as a task that outlives its connection: the answer
is kept, and a client's retry gets it.  No other module imports uvicorn.

    POST /asyncrl/v1/sessions                 leases a sample (the run's key)
    POST /s/ID/reward, /end, /beat; GET /s/ID (the session's key, as all below)
    POST /s/ID/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
    POST /s/ID/inference/v1/generate; GET /s/ID/v1/models"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import uvicorn
import xxhash
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from actors.gateway import replies
from actors.gateway.call_tree import CallNode
from actors.gateway.chat import ChatFormat
from actors.gateway.recovery.session_journal import SessionFile
from actors.gateway.requests import (
    PREFIX,
    Kind,
    ParsedRequest,
    RequestPolicy,
    decoded,
    parse_request,
)
from actors.gateway.sessions import TOO_LONG, CallRefused, HarnessRequest, Session, SessionCall
from asyncrl.contract import outcomes
from asyncrl.contract.errors import ConfigError

LARGEST_BODY = 8 * 1024 * 1024  # bytes of a call
LARGEST_REPORT = 1024 * 1024  # bytes of a lease, a reward, an end or a beat
LARGEST_HEAD = 64 * 1024  # bytes outside bodies (heads, trailers, chunk sizes) between two bodies
HEAD_S = 30.0  # for a request's head to arrive, from its connection or its first byte
CONNECTIONS = 4096
INLINE_BYTES = 1 << 15  # larger bodies are parsed in a thread; for smaller ones it costs more
THREADS = 4  # that compose prompts
BODY_S = 60.0  # for a body to arrive
KEEP_ALIVE_S = 10.0  # between two comments in a stream without news
LONGEST_WAIT_S = 60.0  # for a lease
LEASE_CHARACTERS = 256

# of ASGI
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Result = TypeVar("Result")


class HttpRequest:
    """A request whose head has arrived.  session, model: names in its path."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive
        self.path: str = scope["path"]
        self.session = ""
        self.model = ""

    @property
    def connection(self) -> BoundedConnection:
        """The connection that carries it."""
        connection: BoundedConnection = self.scope["asyncrl.connection"]
        return connection

    def header(self, name: bytes, default: str = "") -> str:
        """The first header of that name, which is in lower case."""
        for key, value in self.scope["headers"]:
            if key == name:
                text: str = value.decode("latin-1")
                return text
        return default

    @property
    def base_url(self) -> str:
        """The endpoint's URL as its client used it."""
        host, port = self.scope["server"]
        return f"{self.scope['scheme']}://{self.header(b'host') or f'{host}:{port}'}/"


class ClientDisconnected(Exception):
    """The connection closed before the body was read, so nothing was begun."""


class WholeResponse:
    """A response whose body is complete from the start."""

    def __init__(
        self, status: int = 200, content: Any = None, more: Mapping[str, str] = {}
    ) -> None:
        self.status = status
        self.body = b"" if content is None else json.dumps(content, allow_nan=False).encode()
        self.headers = [(name.encode(), _ascii(value)) for name, value in more.items()]
        if content is not None:
            self.headers.append((b"content-type", b"application/json"))
        if status != 204:
            self.headers.append((b"content-length", str(len(self.body)).encode()))

    async def write(self, request: HttpRequest, send: Send) -> None:
        if request.scope["method"] != "HEAD":
            request.connection.hold()
        await send(_head(self.status, self.headers))
        await send(_body_part(self.body, more=False))


Served = Callable[[HttpRequest], Awaitable["WholeResponse | CallReply"]]


@dataclass(eq=False)
class OpenedSession:
    """A session as the endpoint serves it.

    task: the sample without its answer, for the harness
    """

    session: Session
    chat: ChatFormat
    key: str  # 256 random bits
    task: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    first: bool = True  # no earlier attempt at this sample may have acted
    composing: asyncio.Lock = field(default_factory=asyncio.Lock)  # locked by one call at a time
    file: SessionFile | None = None  # from which a restarted gateway restores it


class SessionService(Protocol):
    """The sessions behind the endpoint (`session_api.SessionApi`)."""

    manners: RequestPolicy
    run_key: str

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that nothing is leased or sampled any more."""

    @property
    def is_ending(self) -> bool:
        """Whether this process ends; clients are asked to come again."""

    def current_time(self) -> float:
        """The clock of the sessions, in seconds."""

    def find(self, name: str) -> OpenedSession | None:
        """Find a session by its name; recently ended ones are found too."""

    async def lease(self, lease: str, wait_s: float) -> OpenedSession | None:
        """Begin a session, or find the one of an equal lease; None if wait_s brings no sample."""

    async def draw(self, session: Session, call: SessionCall) -> CallNode | None:
        """Have the call sampled and passed to `session.on_result`; None when it has no token.

        Raises CallRefused.
        """

    def on_change(self, session: Session) -> None:
        """Act on a session that has calls to cancel, has ended, or needs the run's reward."""


@dataclass(frozen=True)
class ListenAddress:
    """The address to listen at, with the files for TLS unless a proxy in front provides it."""

    host: str = "127.0.0.1"
    port: int = 0
    certificate: str = ""
    private_key: str = ""
    behind_proxy: bool = False

    def check(self) -> None:
        """Raise ConfigError for an address that would send keys unencrypted over a network."""
        if bool(self.certificate) != bool(self.private_key):
            raise ConfigError("agent.certificate and agent.private_key: give both or none")
        try:
            local = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            local = False
        if not local and not self.certificate and not self.behind_proxy:
            raise ConfigError(
                f"agent.host: {self.host} is open to the network; give agent.certificate and "
                "agent.private_key, or agent.behind_proxy = true, or use 127.0.0.1"
            )


class WebApp:
    """The routes of the endpoint."""

    def __init__(self, service: SessionService) -> None:
        self.service = service
        self.placing: dict[HarnessRequest, asyncio.Task[None]] = {}
        self.drawing: dict[HarnessRequest, asyncio.Task[None]] = {}
        self.threads = ThreadPoolExecutor(THREADS, "prompts")
        self.errors: dict[HarnessRequest, CallRefused] = {}
        served = self._served
        # path after /s/ID/ -> its route
        self.posted: dict[str, Served] = {
            "reward": served(self._reward),
            "end": served(self._end),
            "beat": served(self._beat),
            "v1/chat/completions": self._calls("chat"),
            "v1/completions": self._calls("text"),
            "v1/messages": self._calls("messages"),
            "v1/messages/count_tokens": served(self._count, LARGEST_BODY),
            "v1/responses": self._calls("responses"),
            "inference/v1/generate": self._calls("ids"),
        }
        self.view, self.models = served(self._describe_session), served(self._models)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request.  An unexpected error is answered with 500 and raised again."""
        request = HttpRequest(scope, receive)
        try:
            response = await self._route(request)(request)
        except CallRefused as refused:
            response = _refusal_response(request, refused)
        except ClientDisconnected:
            return
        except Exception as error:
            reason = f"the gateway failed: {type(error).__name__}: {error}"
            failure = CallRefused(500, "gateway", reason)
            await _refusal_response(request, failure).write(request, send)
            raise
        await response.write(request, send)

    def _route(self, request: HttpRequest) -> Served:
        """Find the route of a request.  Raises CallRefused."""
        path, method = request.path, request.scope["method"]
        reads = method in ("GET", "HEAD")
        route: Served | None = None
        if path.startswith("/s/"):
            request.session, _, rest = path[3:].partition("/")
            route = self.posted.get(rest) if method == "POST" else None
            if reads and rest == "v1/models":
                route = self.models
            elif reads and rest.startswith("v1/models/"):
                request.model = rest.removeprefix("v1/models/")
                route = self.models
            elif reads and path == f"/s/{request.session}":
                route = self.view
        elif path == "/asyncrl/v1/sessions" and method == "POST":
            route = self._lease
        if route is None:
            raise CallRefused(
                404,
                "no_such_route",
                f"there is no {method} {path:.200}: see docs/agents.md for the routes",
            )
        return route

    # ---- authorization ---------------------------------------------------------------------------

    def _authorized_session(self, request: HttpRequest) -> OpenedSession:
        """Find the session in the path and check the key against its own.  Raises CallRefused."""
        opened = self.service.find(request.session)
        if opened is None or not _has_key(request, opened.key):
            raise CallRefused(
                401,
                "invalid_api_key",
                "this session's URL and key do not match: use OPENAI_BASE_URL and OPENAI_API_KEY "
                "of the same lease",
            )
        request.connection.welcome()
        return opened

    def _served(
        self,
        serve: Callable[[HttpRequest, OpenedSession, bytes], Awaitable[WholeResponse]],
        most: int = LARGEST_REPORT,
    ) -> Served:
        """Make a route of a session, which needs its key; most: bytes of a body."""

        async def route(request: HttpRequest) -> WholeResponse:
            opened = self._authorized_session(request)
            return await serve(request, opened, await _body(request, most))

        return route

    # ---- sessions --------------------------------------------------------------------------------

    async def _lease(self, request: HttpRequest) -> WholeResponse:
        if not _has_key(request, self.service.run_key):
            raise CallRefused(401, "invalid_api_key", "the key is not the one in RUN/agent.key")
        request.connection.welcome()
        given = _json(await _body(request, LARGEST_REPORT))
        lease = given.get("lease")
        if not isinstance(lease, str) or not 0 < len(lease) <= LEASE_CHARACTERS:
            raise CallRefused(
                400,
                "invalid_value",
                f"lease: give a text of 1 to {LEASE_CHARACTERS} characters, a new one for each "
                "session; an equal one gets the same session",
                "lease",
            )
        wait_s = _parse_number(given.get("wait_s", 0.0), "wait_s")
        self._running()
        opened = await self.service.lease(lease, min(max(wait_s, 0.0), LONGEST_WAIT_S))
        if opened is None:
            self._running()
            return WholeResponse(204)
        session = opened.session
        return WholeResponse(
            content={
                "session": session.name,
                "base_url": f"{request.base_url}s/{session.name}/v1",
                "api_key": opened.key,
                "task": dict(opened.task),
                "seed": opened.seed,
                "attempt": session.attempt,
                "first": opened.first,
                "deadline_s": session.limits.deadline_s,
                "model": self.service.manners.model,
            }
        )

    def _running(self) -> None:
        """Raise CallRefused when the run is over or this process ends."""
        if self.service.is_over:
            raise CallRefused(410, "run_over", "the run is over")
        if self.service.is_ending:
            raise CallRefused(503, "ending", "the gateway is ending: come again")

    async def _reward(
        self, request: HttpRequest, opened: OpenedSession, body: bytes
    ) -> WholeResponse:
        given = _json(body)
        session = opened.session
        value = _parse_number(given.get("reward"), "reward", finite=False)
        parts = _numbers(given.get("parts"), "parts")
        calls: dict[int, float] = {}
        for name, share in _numbers(given.get("calls"), "calls").items():
            number = name.rpartition("-")[2]
            names = {f"{prefix}{session.name}-{number}" for prefix in PREFIX.values()}
            call = _parse_count(number)
            if call is None or name not in {number, *names}:
                raise CallRefused(
                    422, "no_such_call", f"calls: no call has the id {name!r:.80}", "calls"
                )
            if call in calls:
                raise CallRefused(422, "invalid_value", f"calls: {call} has two shares", "calls")
            calls[call] = share
        try:
            session.reward(value, parts, calls, now=self.service.current_time())
        finally:
            self.service.on_change(session)
        return self._state(session)

    async def _end(self, request: HttpRequest, opened: OpenedSession, body: bytes) -> WholeResponse:
        given = _json(body)
        session = opened.session
        failed = given.get("failed")
        if failed is not None:
            if not isinstance(failed, str) or not failed:
                raise CallRefused(400, "invalid_value", "failed: give the reason as text", "failed")
            try:
                outcomes.check_reason(failed)
            except ValueError as error:
                raise CallRefused(422, "invalid_value", f"failed: {error}", "failed") from error
            if session.outcome is not None and not session.outcome.failed:
                raise CallRefused(422, "session_scored", f"session {session.name} has a reward")
            session.fail(failed, self.service.current_time())
        elif given.get("score") is True:
            session.judge(self.service.current_time())
        else:
            raise CallRefused(400, "invalid_value", 'give {"score": true} or {"failed": "why"}')
        self.service.on_change(session)
        return self._state(session)

    async def _beat(
        self, request: HttpRequest, opened: OpenedSession, body: bytes
    ) -> WholeResponse:
        opened.session.beat(self.service.current_time())
        return self._state(opened.session)

    async def _describe_session(
        self, request: HttpRequest, opened: OpenedSession, body: bytes
    ) -> WholeResponse:
        return self._state(opened.session)

    def _state(self, session: Session) -> WholeResponse:
        return WholeResponse(content=session.describe(self.service.current_time()))

    # ---- calls -----------------------------------------------------------------------------------

    async def _models(
        self, request: HttpRequest, opened: OpenedSession, body: bytes
    ) -> WholeResponse:
        name = self.service.manners.model
        model = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "asyncrl",
            "max_model_len": opened.session.limits.context or None,
        }
        if wanted := request.model:
            if wanted != name:
                raise CallRefused(404, "model_not_found", f"there is no model {wanted!r}", "model")
            return WholeResponse(content=model)
        return WholeResponse(content={"object": "list", "data": [model]})

    async def _count(
        self, request: HttpRequest, opened: OpenedSession, body: bytes
    ) -> WholeResponse:
        """Count the tokens of a prompt without a call."""
        parsed = await self._read_call("messages", opened, body)
        chat = opened.chat

        def count() -> int:
            return len(chat.encode(chat.write(parsed.messages, parsed.tools)))

        return WholeResponse(content={"input_tokens": await self._run_in_thread(len(body), count)})

    def _calls(self, kind: Kind) -> Served:
        async def route(request: HttpRequest) -> CallReply:
            opened = self._authorized_session(request)
            try:
                body = await _body(request, LARGEST_BODY)
                parsed = await self._read_call(kind, opened, body)
                harness_request = await self._request(request, opened, parsed, body)
            except CallRefused as refused:
                opened.session.refusals.add(refused)
                raise
            return CallReply(self, opened, harness_request, parsed)

        return route

    async def _read_call(self, kind: Kind, opened: OpenedSession, body: bytes) -> ParsedRequest:
        """Parse the body of a call.  Raises CallRefused."""
        session, manners = opened.session, self.service.manners
        context = session.limits.context

        def read() -> ParsedRequest:
            options = decoded(body)
            for name in ("messages", "input", "prompt", "token_ids"):
                given = options.get(name)
                if context and isinstance(given, list) and len(given) > context:
                    raise CallRefused(
                        400,
                        TOO_LONG,
                        f"{name} has {len(given)} entries of a token or more, and "
                        f"generator.context = {context} is for prompt and answer: shorten the "
                        "history",
                        name,
                    )
            return parse_request(kind, options, manners, session.ticket.sampling)

        try:
            return await self._run_in_thread(len(body), read)
        except CallRefused as refused:
            session.shortened = session.shortened or refused.code == TOO_LONG
            raise

    async def _run_in_thread(self, size: int, work: Callable[[], Result]) -> Result:
        """Run `work` on a body of `size` bytes, in a thread if it would block the loop for long."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def _request(
        self, request: HttpRequest, opened: OpenedSession, parsed: ParsedRequest, body: bytes
    ) -> HarnessRequest:
        """Begin a call, or join the one that this request repeats.  Raises CallRefused."""
        session = opened.session
        digest = xxhash.xxh3_128_digest(request.path.encode() + b"\n" + body)
        repeats = _parse_count(request.header(b"x-stainless-retry-count", "0")) or 0
        key = request.header(b"idempotency-key")
        made = session.request(digest, retry=repeats > 0, key=key)
        if made.call is not None:
            return made
        if made not in self.placing:
            self.placing[made] = asyncio.create_task(self._place(opened, made, parsed, len(body)))
        # retries wait for the same task, and a connection that closes must not cancel it
        await asyncio.shield(self.placing[made])
        return made

    async def _place(
        self, opened: OpenedSession, made: HarnessRequest, parsed: ParsedRequest, size: int
    ) -> None:
        """Compose the call's prompt and begin its sampling.  Raises CallRefused."""
        session = opened.session
        try:
            self._running()
            session.may_call(self.service.current_time())
            made.call = await self._compose(opened, parsed, size)
        except BaseException:
            session.forget(made)
            self.service.on_change(session)
            raise
        finally:
            del self.placing[made]
        self.drawing[made] = asyncio.create_task(self._draw(opened, made, parsed))

    async def _compose(
        self, opened: OpenedSession, parsed: ParsedRequest, size: int
    ) -> SessionCall:
        """Place the call in its session.

        The calls of a session are composed one after another in the order of their requests, as
        each may continue those before it.  Raises CallRefused.
        """
        session = opened.session
        common: dict[str, Any] = {
            "max_new_tokens": parsed.max_new_tokens,
            "stop": parsed.stop,
            "aside": parsed.aside,
        }
        if parsed.ids is not None:
            return session.place_ids(parsed.ids, now=self.service.current_time(), **common)
        session.composing += 1
        try:
            async with opened.composing:
                if parsed.kind == "text":
                    draft = session.draft_text(parsed.text)
                else:
                    draft = session.draft(parsed.messages, parsed.tools, parsed.aside)
                composed = await self._run_in_thread(size, draft)
        finally:
            session.composing -= 1
        # no await since the lock's release: the next call is drafted after this one is accepted
        return session.accept(composed, now=self.service.current_time(), **common)

    async def _draw(
        self, opened: OpenedSession, made: HarnessRequest, parsed: ParsedRequest
    ) -> None:
        """Have the call sampled and keep its answer for all of its connections."""
        session, call = opened.session, made.call
        assert call is not None
        try:
            node = await self.service.draw(session, call)
            if node is None:
                raise CallRefused(
                    410, "session_ended", f"session {session.name} ended before a token was sampled"
                )
            name = _name(session, call.number, parsed.kind)
            made.answer = replies.answer(
                parsed, node, name, opened.chat.decode_text, int(time.time())
            )
            if opened.file is not None:  # before a client gets it
                opened.file.append_answer(session, made)
        except CallRefused as refused:
            self._failed(session, made, refused)
        except Exception as error:
            reason = f"the gateway failed: {type(error).__name__}: {error}"
            self._failed(session, made, CallRefused(500, "gateway", reason))
            raise
        finally:
            self.drawing.pop(made, None)

    def _failed(self, session: Session, made: HarnessRequest, error: CallRefused) -> None:
        """Record that a call has no answer, so that the same request again is a new one."""
        session.forget(made)
        session.refusals.add(error)
        if made.connections > 0:
            self.errors[made] = error


class CallReply:
    """The answer to a call, complete or as a stream, on one connection."""

    def __init__(
        self, web: WebApp, opened: OpenedSession, made: HarnessRequest, parsed: ParsedRequest
    ) -> None:
        self.web = web
        self.session = opened.session
        self.file = opened.file
        self.made = made
        self.parsed = parsed

    async def write(self, request: HttpRequest, send: Send) -> None:
        written = False
        try:
            written = await self._write(request.connection, send)
        finally:
            now = self.web.service.current_time()
            if written:
                self.session.on_response_sent(self.made)
                if self.file is not None:
                    self.file.append_sent(self.made)
            else:
                self.session.closed(self.made, now)
                self.web.service.on_change(self.session)
            if self.made.connections <= 0:
                self.web.errors.pop(self.made, None)

    async def _write(self, connection: BoundedConnection, send: Send) -> bool:
        """Write the answer; False when the connection closed before its end."""
        if self.parsed.stream:
            connection.hold()
            await self._start_response(
                send, 200, b"text/event-stream", {"cache-control": "no-cache"}
            )
            await send(_body_part(replies.KEEP_ALIVE))
        while (task := self.web.drawing.get(self.made)) is not None:
            await connection.wait_for(task, KEEP_ALIVE_S if self.parsed.stream else None)
            if connection.closed:
                return False
            if self.parsed.stream and not task.done():
                await send(_body_part(replies.KEEP_ALIVE))
        return not connection.closed and await self._finish(connection, send)

    async def _finish(self, connection: BoundedConnection, send: Send) -> bool:
        answer = self.made.answer
        connection.hold()
        if answer is not None:
            if not self.parsed.stream:
                length = {"content-length": str(len(answer))}
                await self._start_response(send, 200, b"application/json", length)
        else:
            refused = self.web.errors[self.made]
            body, headers = replies.error(refused)
            answer = json.dumps(body).encode()
            if self.parsed.stream:
                answer = b"data: " + answer + b"\n\n"
            else:
                headers["content-length"] = str(len(answer))
                await self._start_response(send, refused.status, b"application/json", headers)
        await send(_body_part(answer))
        if connection.closed:
            return False
        await send(_body_part(b"", more=False))
        return True

    async def _start_response(
        self, send: Send, status: int, media: bytes, more: Mapping[str, str]
    ) -> None:
        headers = [(b"content-type", media)]
        if self.parsed.ignored:
            headers.append((b"x-asyncrl-ignored", _ascii(", ".join(self.parsed.ignored))))
        headers += [(name.encode(), _ascii(value)) for name, value in more.items()]
        await send(_head(status, headers))


def _head(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": headers,
    }


def _body_part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {
        "type": "http.response.body",
        "body": body,
        "more_body": more,
    }


def _ascii(text: str) -> bytes:
    """Encode a header's value, which may hold a client's text."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:1000].encode()


def _name(session: Session, number: int, kind: Kind) -> str:
    """The id of a call in its answer."""
    return f"{PREFIX[kind]}{session.name}-{number}"


def _has_key(request: HttpRequest, key: str) -> bool:
    """Whether the request carries the key, compared in constant time."""
    scheme, _, given = request.header(b"authorization").partition(" ")
    if scheme.lower() != "bearer":
        given = request.header(b"x-api-key")
    return hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())


async def _body(request: HttpRequest, most: int) -> bytes:
    """Read a body of at most `most` bytes, in bounded time.  Raises CallRefused."""
    length = _parse_count(request.header(b"content-length", "0"))
    if length is not None and length > most:
        raise _too_large(most)
    if request.scope.get("asyncrl.whole"):  # it arrived with its head, as small ones do
        return await _read(request, most)
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, most)
    except TimeoutError as error:
        raise CallRefused(408, "body_late", f"the body took over {BODY_S:g} s") from error


def _too_large(most: int) -> CallRefused:
    return CallRefused(413, "body_too_large", f"the body has more than {most} bytes")


async def _read(request: HttpRequest, most: int) -> bytes:
    """Join the parts of the body.  Raises CallRefused over `most`, and ClientDisconnected."""
    parts = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts += message["body"]
        more = message["more_body"]
        if len(parts) > most:
            raise _too_large(most)
    return bytes(parts)


def _json(body: bytes) -> dict[str, Any]:
    """Parse a small body as a JSON object; its values may be NaN, which their readers refuse.

    Raises CallRefused, also for unpaired surrogates, which no message to the buffer can hold.
    """
    try:
        value = json.loads(body.decode() or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CallRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CallRefused(400, "invalid_json", "the body is not a JSON object")
    return value


def _parse_count(text: str) -> int | None:
    """Parse a non-negative integer of at most 18 ASCII digits; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def _parse_number(value: Any, name: str, *, finite: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CallRefused(422, "invalid_value", f"{name}: give a number", name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if finite and not math.isfinite(number):
        raise CallRefused(422, "invalid_value", f"{name}: give a finite number", name)
    return number


def _numbers(given: Any, name: str) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise CallRefused(422, "invalid_value", f"{name}: give an object of numbers", name)
    return {key: _parse_number(value, name, finite=False) for key, value in given.items()}


def _refusal_response(request: HttpRequest, error: CallRefused) -> WholeResponse:
    body, headers = replies.error(error)
    if "/v1/messages" in request.path:
        body["type"] = "error"  # which Anthropic's clients expect
    return WholeResponse(error.status, body, headers)


# ---- the server ----------------------------------------------------------------------------------


class CoalescingTransport:
    """A transport that sends two writes as one packet after `hold`: a response's head and body."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self.inner = inner
        self.held: bytes | None = None  # None: writes pass; b"": the next one is held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def hold(self) -> None:
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


class BoundedConnection(HttpToolsProtocol):
    """A connection that limits the size and time of requests' heads and trailers.

    uvicorn's own protocol buffers a head without limit.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.beside = 0  # bytes received since the last part of a body
        self.in_head = False
        self.late: asyncio.TimerHandle | None = None
        self.lost = False
        # connections that have not shown a valid key yet, the oldest first
        self.strangers: dict[BoundedConnection, None] = vars(self.server_state).setdefault(
            "strangers", {}
        )
        self.strangers[self] = None
        self.waiting: set[Callable[[], None]] = set()  # called when the connection closes
        self.out = CoalescingTransport(transport)
        super().connection_made(self.out)  # type: ignore[arg-type]
        if len(self.connections) > most_connections():
            # only connections without a key are closed to make room
            next(iter(self.strangers)).abort()
            if self.closed:
                return
        self.late = self.loop.call_later(HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check_deadline()
        self.lost = True
        self.strangers.pop(self, None)
        super().connection_lost(exc)
        for notify in list(self.waiting):
            notify()

    def abort(self) -> None:
        self.strangers.pop(self, None)
        self.transport.abort()

    def welcome(self) -> None:
        """Keep the connection when there are too many: it has shown a valid key."""
        self.strangers.pop(self, None)

    @property
    def closed(self) -> bool:
        """Whether the connection has closed or is closing."""
        return self.lost or self.transport.is_closing()

    def hold(self) -> None:
        """Send the next write together with the one after it."""
        self.out.hold()

    async def wait_for(self, task: asyncio.Task[None], timeout: float | None) -> None:
        """Wait until the task is done, the connection closes, or `timeout` seconds have passed."""
        if self.closed or task.done():
            return
        news: asyncio.Future[None] = self.loop.create_future()

        def notify(_task: Any = None) -> None:
            if not news.done():
                news.set_result(None)

        timer = None if timeout is None else self.loop.call_later(timeout, notify)
        task.add_done_callback(notify)
        self.waiting.add(notify)
        try:
            await news
        finally:
            self.waiting.discard(notify)
            task.remove_done_callback(notify)
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.beside += len(data)
        super().data_received(data)
        if self.beside > LARGEST_HEAD:
            self.transport.abort()
        elif self.in_head and self.late is None:  # the head is incomplete
            self.late = self.loop.call_later(HEAD_S, self.transport.abort)

    def on_message_begin(self) -> None:
        self.beside = 0
        super().on_message_begin()
        self.scope["asyncrl.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._check_deadline()
        self.in_head = True

    def on_headers_complete(self) -> None:
        self._check_deadline()
        self.in_head = False
        self.beside = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.beside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.beside = 0
        self.scope["asyncrl.whole"] = True  # type: ignore[typeddict-unknown-key]
        super().on_message_complete()

    def _check_deadline(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None


def most_connections() -> int:
    """The largest number of open connections: at most half of the process's file descriptors."""
    return min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class QuietServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Endpoint:
    """The HTTP server, in the running event loop."""

    def __init__(self, service: SessionService, bind: ListenAddress) -> None:
        bind.check()
        self.bind = bind
        self.web = WebApp(service)
        family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only if the protocol is given; without it, a response in two
        # parts waits up to 40 ms for the client's acknowledgement of the first
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((bind.host, bind.port))
        except OSError as error:
            self.socket.close()
            raise ConfigError(f"agent.port: {bind.host}:{bind.port}: {error.strerror}") from error
        self.task: asyncio.Task[None] | None = None
        self.server = QuietServer(
            uvicorn.Config(
                self.web.app,
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
        """The URL for a harness on this machine."""
        host, port = self.socket.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' if self.bind.certificate else ''}://{host}:{port}"

    async def start(self) -> None:
        self.task = asyncio.create_task(self.server.serve([self.socket]))
        while not self.server.started and not self.task.done():
            await asyncio.sleep(0.01)
        if self.task.done():
            self.task.result()

    async def stop(self) -> None:
        """Close all connections and cancel the open calls."""
        self.server.should_exit = True
        if self.task is not None:
            await self.task
        for task in [*self.web.placing.values(), *self.web.drawing.values()]:
            task.cancel()
        self.web.threads.shutdown(wait=False, cancel_futures=True)
        self.socket.close()
