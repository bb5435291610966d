"""The routes of the endpoint: model APIs for each session, leases, rewards, ends.

One event loop owns all sessions.  Each call runs as a task that outlives its connection: the answer
is kept, and a client's retry gets it.

    POST /asyncrl/v1/sessions                 leases a sample (the run's key)
    POST /s/ID/reward, /end, /beat            (the session's key, as all below)
    GET  /s/ID, /s/ID/v1/models
    POST /s/ID/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
    POST /s/ID/inference/v1/generate

Starlette finds the route and turns errors into responses, for about 30 us of CPU time a request of
the 440 or more that a call takes (docs/log/agents.md)."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import xxhash
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from actors.gateway.call_tree import CallNode
from actors.gateway.chat import ChatFormat
from actors.gateway.endpoint import replies
from actors.gateway.endpoint.requests import (
    PREFIX,
    Kind,
    ParsedRequest,
    RequestPolicy,
    decoded,
    parse_request,
)
from actors.gateway.endpoint.server import (
    BoundedConnection,
    HttpServer,
    ListenAddress,
    connection_of,
)
from actors.gateway.recovery.session_journal import SessionFile
from actors.gateway.sessions import (
    TOO_LONG,
    CallRefused,
    HarnessRequest,
    Session,
    SessionCall,
    too_long,
)
from asyncrl.contract import outcomes

LARGEST_BODY = 8 * 1024 * 1024  # bytes of a call
LARGEST_REPORT = 1024 * 1024  # bytes of a lease, a reward, an end or a beat
INLINE_BYTES = 1 << 15  # larger bodies are parsed in a thread; for smaller ones it costs more
THREADS = 4  # that compose prompts
BODY_S = 60.0  # for a body to arrive
KEEP_ALIVE_S = 10.0  # between two comments in a stream without news
LONGEST_WAIT_S = 60.0  # for a lease
LEASE_CHARACTERS = 256

Result = TypeVar("Result")
RouteFunction = Callable[[Request], Awaitable[Any]]  # returns an ASGI application: the response


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

    request_policy: RequestPolicy
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
        """Begin a session, or find that of an equal lease; None without a sample in time."""

    async def draw(self, session: Session, call: SessionCall) -> CallNode | None:
        """Have the call sampled and recorded in the session; None when it has no token.

        Raises CallRefused.
        """

    def on_change(self, session: Session) -> None:
        """Act on a session that has calls to cancel, has ended, or needs the run's reward."""


class WebApp:
    """The routes of the endpoint: `app` is the ASGI application."""

    def __init__(self, service: SessionService) -> None:
        self.service = service
        self.placing: dict[HarnessRequest, asyncio.Task[None]] = {}
        self.drawing: dict[HarnessRequest, asyncio.Task[None]] = {}
        self.threads = ThreadPoolExecutor(THREADS, "prompts")
        self.errors: dict[HarnessRequest, CallRefused] = {}
        session, call = self._session_route, self._call_route
        # tried in this order: the frequent ones first
        posts = {
            "/s/{session}/v1/chat/completions": call("chat"),
            "/s/{session}/v1/responses": call("responses"),
            "/s/{session}/v1/messages": call("messages"),
            "/s/{session}/v1/completions": call("text"),
            "/s/{session}/inference/v1/generate": call("ids"),
            "/asyncrl/v1/sessions": self._lease,
            "/s/{session}/reward": session(self._reward),
            "/s/{session}/end": session(self._end),
            "/s/{session}/beat": session(self._beat),
            "/s/{session}/v1/messages/count_tokens": session(self._count, LARGEST_BODY),
        }
        gets = {
            "/s/{session}": session(self._describe_session),
            "/s/{session}/v1/models": session(self._models),
            "/s/{session}/v1/models/{model:path}": session(self._models),
        }
        routes = [Route(path, route, methods=["POST"]) for path, route in posts.items()]
        routes += [Route(path, route, methods=["GET"]) for path, route in gets.items()]
        self.app = Starlette(
            routes=routes,
            exception_handlers=HANDLERS,
        )
        self.app.router.redirect_slashes = False

    # ---- authorization ---------------------------------------------------------------------------

    def _authorized_session(self, request: Request) -> OpenedSession:
        """Find the session of the path and check the key.  Raises CallRefused."""
        opened = self.service.find(request.path_params["session"])
        if opened is None or not has_key(request, opened.key):
            raise CallRefused(
                401,
                "invalid_api_key",
                "this session's URL and key do not match: use OPENAI_BASE_URL and OPENAI_API_KEY "
                "of the same lease",
            )
        connection_of(request.scope).authorize()
        return opened

    def _session_route(
        self,
        serve: Callable[[Request, OpenedSession, bytes], Awaitable[Response]],
        most: int = LARGEST_REPORT,
    ) -> RouteFunction:
        """Make a route of a session, which needs its key; most: bytes of a body."""

        async def route(request: Request) -> Response:
            opened = self._authorized_session(request)
            return await serve(request, opened, await read_body(request, most))

        return route

    # ---- sessions --------------------------------------------------------------------------------

    async def _lease(self, request: Request) -> Response:
        if not has_key(request, self.service.run_key):
            raise CallRefused(401, "invalid_api_key", "the key is not the one in RUN/agent.key")
        connection_of(request.scope).authorize()
        given = _json(await read_body(request, LARGEST_REPORT))
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
            return Response(status_code=204)
        session = opened.session
        return JSONResponse(
            {
                "session": session.name,
                "base_url": f"{request.base_url}s/{session.name}/v1",
                "api_key": opened.key,
                "task": dict(opened.task),
                "seed": opened.seed,
                "attempt": session.attempt,
                "first": opened.first,
                "deadline_s": session.limits.deadline_s,
                "model": self.service.request_policy.model,
            }
        )

    def _running(self) -> None:
        """Raise CallRefused when the run is over or this process ends."""
        if self.service.is_over:
            raise CallRefused(410, "run_over", "the run is over")
        if self.service.is_ending:
            raise CallRefused(503, "ending", "the gateway is ending: come again")

    async def _reward(self, request: Request, opened: OpenedSession, body: bytes) -> Response:
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

    async def _end(self, request: Request, opened: OpenedSession, body: bytes) -> Response:
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
            session.fail(failed)
        elif given.get("score") is True:
            session.judge(self.service.current_time())
        else:
            raise CallRefused(400, "invalid_value", 'give {"score": true} or {"failed": "why"}')
        self.service.on_change(session)
        return self._state(session)

    async def _beat(self, request: Request, opened: OpenedSession, body: bytes) -> Response:
        opened.session.beat(self.service.current_time())
        return self._state(opened.session)

    async def _describe_session(
        self, request: Request, opened: OpenedSession, body: bytes
    ) -> Response:
        return self._state(opened.session)

    def _state(self, session: Session) -> Response:
        return JSONResponse(session.describe(self.service.current_time()))

    # ---- calls -----------------------------------------------------------------------------------

    async def _models(self, request: Request, opened: OpenedSession, body: bytes) -> Response:
        name = self.service.request_policy.model
        model = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "asyncrl",
            "max_model_len": opened.session.limits.context or None,
        }
        if wanted := request.path_params.get("model"):
            if wanted != name:
                raise CallRefused(404, "model_not_found", f"there is no model {wanted!r}", "model")
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    async def _count(self, request: Request, opened: OpenedSession, body: bytes) -> Response:
        """Count the tokens of a prompt without a call."""
        parsed = await self._read_call("messages", opened, body)
        chat = opened.chat

        def count() -> int:
            return len(chat.encode(chat.write(parsed.messages, parsed.tools)))

        return JSONResponse({"input_tokens": await self._run_in_thread(len(body), count)})

    def _call_route(self, kind: Kind) -> RouteFunction:
        async def route(request: Request) -> CallReply:
            opened = self._authorized_session(request)
            try:
                body = await read_body(request, LARGEST_BODY)
                parsed = await self._read_call(kind, opened, body)
                harness_request = await self._request(request, opened, parsed, body)
            except CallRefused as refused:
                opened.session.refusals.add(refused)
                raise
            return CallReply(self, opened, harness_request, parsed)

        return route

    async def _read_call(self, kind: Kind, opened: OpenedSession, body: bytes) -> ParsedRequest:
        """Parse the body of a call.  Raises CallRefused."""
        session, request_policy = opened.session, self.service.request_policy
        context = session.limits.context

        def read() -> ParsedRequest:
            options = decoded(body)
            for name in ("messages", "input", "prompt", "token_ids"):
                given = options.get(name)
                if context and isinstance(given, list) and len(given) > context:
                    found = f"{name} has {len(given)} entries of a token or more"
                    raise too_long(found, context, name)
            return parse_request(kind, options, request_policy, session.ticket.sampling)

        try:
            return await self._run_in_thread(len(body), read)
        except CallRefused as refused:
            session.shortened = session.shortened or refused.code == TOO_LONG
            raise

    async def _run_in_thread(self, size: int, work: Callable[[], Result]) -> Result:
        """Run `work` on a body of `size` bytes, in a thread if the body is large."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def _request(
        self, request: Request, opened: OpenedSession, parsed: ParsedRequest, body: bytes
    ) -> HarnessRequest:
        """Begin a call, or join the one that this request repeats.  Raises CallRefused."""
        session = opened.session
        digest = xxhash.xxh3_128_digest(request.scope["path"].encode() + b"\n" + body)
        repeats = _parse_count(request.headers.get("x-stainless-retry-count", "0")) or 0
        key = request.headers.get("idempotency-key", "")
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
            made.call.grammar = parsed.grammar
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
        return session.accept(
            composed, now=self.service.current_time(), images=parsed.images, **common
        )

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
    """The answer to a call on one connection, complete or as a stream.

    It replaces StreamingResponse, because a retry needs to know whether the whole answer was sent.
    It also saves the task that watches for a disconnect: 2 instead of 75 us of CPU time a response
    (docs/log/agents.md).
    """

    def __init__(
        self, web: WebApp, opened: OpenedSession, made: HarnessRequest, parsed: ParsedRequest
    ) -> None:
        self.web = web
        self.session = opened.session
        self.file = opened.file
        self.made = made
        self.parsed = parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = False
        try:
            sent = await self._send(connection_of(scope), send)
        finally:
            if sent:
                self.session.on_response_sent(self.made)
                if self.file is not None:
                    self.file.append_sent(self.made)
            else:
                self.session.closed(self.made, self.web.service.current_time())
                self.web.service.on_change(self.session)
            if self.made.connections <= 0:
                self.web.errors.pop(self.made, None)

    async def _send(self, connection: BoundedConnection, send: Send) -> bool:
        """Send the answer; False when the connection closed before its end."""
        stream = self.parsed.stream
        if stream:
            headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
            await self._send_head(send, 200, headers)
            await send(_body_part(replies.KEEP_ALIVE))
        while (task := self.web.drawing.get(self.made)) is not None:
            await connection.wait_for(task, KEEP_ALIVE_S if stream else None)
            if connection.closed:
                return False
            if stream and not task.done():
                await send(_body_part(replies.KEEP_ALIVE))
        if connection.closed:
            return False
        answer, status, headers = self.made.answer, 200, dict[str, str]()
        if answer is None:
            refused = self.web.errors[self.made]
            body, headers = replies.error(refused)
            event = b""
            if self.parsed.kind == "messages":  # Anthropic's clients expect both
                body["type"], event = "error", b"event: error\n"
            answer, status = json.dumps(body).encode(), refused.status
            if stream:
                answer = event + b"data: " + answer + b"\n\n"
        if stream:
            connection.hold()  # the last part goes out with the end of the stream
        else:
            headers |= {"content-type": "application/json", "content-length": str(len(answer))}
            await self._send_head(send, status, headers)
        await send(_body_part(answer))
        if connection.closed:
            return False
        await send(_body_part(b"", more=False))
        return True

    async def _send_head(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        if self.parsed.ignored:
            headers = {**headers, "x-asyncrl-ignored": ", ".join(self.parsed.ignored)}
        raw = [(name.encode(), _ascii(value)) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


def _body_part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _ascii(text: str) -> bytes:
    """Encode a header's value, which may hold a client's text."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:1000].encode()


def _name(session: Session, number: int, kind: Kind) -> str:
    """The id of a call in its answer."""
    return f"{PREFIX[kind]}{session.name}-{number}"


def has_key(request: Request, key: str) -> bool:
    """Whether the request carries the key, compared in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    return hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())


async def read_body(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes within BODY_S.  Raises CallRefused.

    Starlette's own limit (`max_body_size`) answers with plain text, which clients cannot parse.
    """
    length = _parse_count(request.headers.get("content-length", "0"))
    if length is not None and length > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError as error:
        raise CallRefused(408, "body_late", f"the body took over {BODY_S:g} s") from error
    return bytes(body)


def _too_large(most: int) -> CallRefused:
    return CallRefused(413, "body_too_large", f"the body has more than {most} bytes")


def _json(body: bytes) -> dict[str, Any]:
    """Parse a small body as a JSON object.

    Its values may be NaN, which their readers refuse.  Raises CallRefused, also for unpaired
    surrogates, which no message to the buffer can hold.
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


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, CallRefused)
    body, headers = replies.error(error)
    if "/v1/messages" in request.scope["path"]:
        body["type"] = "error"  # which Anthropic's clients expect
    return JSONResponse(body, error.status, headers)


async def _refuse_route(request: Request, error: Exception) -> Response:
    route = f"{request.method} {request.scope['path']:.200}"
    message = f"there is no {route}: see docs/http.md for the routes"
    return await refuse(request, CallRefused(404, "no_such_route", message))


async def _fail(request: Request, error: Exception) -> Response:
    reason = f"the gateway failed: {type(error).__name__}: {error}"
    return await refuse(request, CallRefused(500, "gateway", reason))


async def _ignore(request: Request, error: Exception) -> Response:
    """Send nothing that arrives: the connection closed before the body was read."""
    return Response()


HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    CallRefused: refuse,
    HTTPException: _refuse_route,
    ClientDisconnect: _ignore,
    Exception: _fail,  # which raises the error again, for the log
}


class Endpoint(HttpServer):
    """The server of the endpoint."""

    def __init__(self, service: SessionService, bind: ListenAddress) -> None:
        self.web = WebApp(service)
        super().__init__(self.web.app, bind)

    async def stop(self) -> None:
        """Close all connections and cancel the open calls."""
        await super().stop()
        for task in [*self.web.placing.values(), *self.web.drawing.values()]:
            task.cancel()
        self.web.threads.shutdown(wait=False, cancel_futures=True)
