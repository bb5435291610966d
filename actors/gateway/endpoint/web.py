"""The routes of the endpoint: model APIs for each session, leases, rewards, ends.

One event loop owns all sessions.  Each call runs as a task that outlives its connection.  Its
answer is kept for a client's retry.

    POST /asyncrl/v1/sessions                 leases a sample (the run's key)
    POST /s/ID/reward, /end, /beat            (the session's key, as all below)
    GET  /s/ID, /s/ID/v1/models
    POST /s/ID/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
    POST /s/ID/inference/v1/generate

Starlette finds the route and turns errors into responses.  That takes about 30 us of CPU time a
request, of the 440 or more of a call (docs/log/agents.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.gateway.call_tree import CallNode
from actors.gateway.endpoint import replies
from actors.gateway.endpoint.requests import PREFIX, Kind, ParsedRequest, decode_body, parse_request
from actors.gateway.refusals import CallRefused, build_too_long_error
from actors.gateway.sessions import HarnessRequest, Session
from asyncrl.contract import outcomes
from asyncrl.transport import http_server
from asyncrl.transport.http_server import HttpServer, ListenAddress, authorize

if TYPE_CHECKING:
    from actors.gateway.session_api import SessionApi

LARGEST_BODY = 8 * 1024 * 1024  # bytes of a call
LARGEST_REPORT = 1024 * 1024  # bytes of a lease, a reward, an end or a beat
INLINE_BYTES = 1 << 15  # larger bodies are parsed in a thread; for smaller ones it costs more
THREADS = 4  # that compose prompts
KEEP_ALIVE_S = 10.0  # between two comments in an idle stream
LONGEST_WAIT_S = 60.0  # for a lease
BODY_CODES = {408: "body_late", 413: "body_too_large", 429: "too_many_bodies"}
# the key of the prompt in a body without `messages`
PROMPT_PARAMS: Mapping[Kind, str] = {"text": "prompt", "ids": "token_ids", "responses": "input"}

Result = TypeVar("Result")


class LeaseBody(msgspec.Struct, forbid_unknown_fields=True):
    """An order of a session; a new `lease` for each, an equal one gets the same session."""

    lease: Annotated[str, Meta(min_length=1, max_length=256)]
    wait_s: float = 0.0


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """A session's reward, its parts, and the shares of calls by their ids."""

    reward: float
    parts: dict[str, float] | None = None
    calls: dict[str, float] | None = None


class EndBody(msgspec.Struct, forbid_unknown_fields=True):
    """The end of a session: for the config's reward, or failed."""

    score: bool = False
    failed: Annotated[str, Meta(min_length=1)] | None = None


RouteFunction = Callable[[Request], Awaitable[Any]]  # returns an ASGI application: the response


class WebApp:
    """The routes of the endpoint: `app` is the ASGI application."""

    def __init__(self, service: SessionApi) -> None:
        self.service = service
        self.answering: dict[HarnessRequest, asyncio.Task[None]] = {}
        self.threads = ThreadPoolExecutor(THREADS, "prompts")
        session, call = self._make_session_route, self._make_call_route
        # tried in this order: the frequent ones first
        posts = {
            "/s/{session}/v1/chat/completions": call("chat"),
            "/s/{session}/v1/responses": call("responses"),
            "/s/{session}/v1/messages": call("messages"),
            "/s/{session}/v1/completions": call("text"),
            "/s/{session}/inference/v1/generate": call("ids"),
            "/asyncrl/v1/sessions": self._lease,
            "/s/{session}/reward": session(self._set_reward),
            "/s/{session}/end": session(self._end),
            "/s/{session}/beat": session(self._record_beat),
            "/s/{session}/v1/messages/count_tokens": self._count_tokens,
        }
        gets = {
            "/s/{session}": session(lambda session, body: None),
            "/s/{session}/v1/models": self._list_models,
            "/s/{session}/v1/models/{model:path}": self._list_models,
        }
        routes = [Route(path, route, methods=["POST"]) for path, route in posts.items()]
        routes += [Route(path, route, methods=["GET"]) for path, route in gets.items()]
        self.app = Starlette(routes=routes, exception_handlers=HANDLERS)
        self.app.router.redirect_slashes = False

    # ---- authorization ---------------------------------------------------------------------------

    def _authorize_session(self, request: Request) -> Session:
        """Find the session of the path and check the key.  Raises CallRefused."""
        session = self.service.find(request.path_params["session"])
        if session is None or not authorize(request, session.api_key):
            raise CallRefused(
                401,
                "invalid_api_key",
                "this session's URL and key do not match: use OPENAI_BASE_URL and OPENAI_API_KEY "
                "of the same lease",
            )
        return session

    def _make_session_route(self, change: Callable[[Session, bytes], None]) -> RouteFunction:
        """Make a route that changes a session and describes its state."""

        async def route(request: Request) -> Response:
            session = self._authorize_session(request)
            async with open_body(request, LARGEST_REPORT) as body:
                change(session, body)
            return JSONResponse(session.describe(self.service.current_time()))

        return route

    # ---- sessions --------------------------------------------------------------------------------

    async def _lease(self, request: Request) -> Response:
        if not authorize(request, self.service.run_key):
            raise CallRefused(401, "invalid_api_key", "the key is not the one in RUN/agent.key")
        async with open_body(request, LARGEST_REPORT) as body:
            order = _convert_body(body, LeaseBody, 400)
        self._require_running()
        wait_s = min(max(0.0, order.wait_s), LONGEST_WAIT_S)
        session = await self.service.lease(order.lease, wait_s)
        if session is None:
            self._require_running()
            return Response(status_code=204)
        return JSONResponse(
            {
                "session": session.name,
                "base_url": f"{request.base_url}s/{session.name}/v1",
                "api_key": session.api_key,
                "task": session.ticket.prompt.describe_task(),
                "seed": session.seed,
                "attempt": session.attempt,
                "first": session.first,
                "deadline_s": session.limits.deadline_s,
                "model": self.service.request_policy.agent.model,
            }
        )

    def _require_running(self) -> None:
        """Raise CallRefused when the run is over or this process ends."""
        if self.service.is_over:
            raise CallRefused(410, "run_over", "the run is over")
        if self.service.is_ending:
            raise CallRefused(503, "ending", "the gateway is ending: come again")

    def _set_reward(self, session: Session, body: bytes) -> None:
        score = _convert_body(body, RewardBody, 422)
        calls: dict[int, float] = {}
        for name, share in (score.calls or {}).items():
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
            now = self.service.current_time()
            session.set_reward(score.reward, score.parts or {}, calls, now=now)
        finally:
            self.service.on_change(session)
        _require_call(session)

    def _end(self, session: Session, body: bytes) -> None:
        end = _convert_body(body, EndBody, 400)
        if end.score == (end.failed is not None):
            raise CallRefused(
                400, "invalid_value", 'give either {"score": true} or {"failed": "why"}'
            )
        if end.failed is None:
            session.judge(self.service.current_time())
        else:
            try:
                outcomes.check_text(end.failed, "the reason", outcomes.REASON_LENGTH)
            except ValueError as error:
                raise CallRefused(422, "invalid_value", f"failed: {error}", "failed") from error
            if session.outcome is not None and not session.outcome.failed:
                raise CallRefused(422, "session_scored", f"session {session.name} has a reward")
            session.fail(end.failed)
        self.service.on_change(session)
        if end.failed is None:
            _require_call(session)

    def _record_beat(self, session: Session, body: bytes) -> None:
        session.active_at = max(session.active_at, self.service.current_time())

    # ---- calls -----------------------------------------------------------------------------------

    async def _list_models(self, request: Request) -> Response:
        context = self._authorize_session(request).limits.context
        return list_models(request, self.service.request_policy.agent.model, context)

    async def _count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt without a call."""
        session = self._authorize_session(request)
        chat = session.composer
        async with open_body(request, LARGEST_BODY) as body:
            parsed = await self._read_call("messages", session, body)

            def count() -> int:
                return len(chat.encode(chat.write(parsed.messages, parsed.tools)))

            return JSONResponse({"input_tokens": await self._run_in_thread(len(body), count)})

    def _make_call_route(self, kind: Kind) -> RouteFunction:
        async def route(request: Request) -> ASGIApp:
            """Begin a call, or join the one that this request repeats.  Raises CallRefused."""
            session = self._authorize_session(request)
            headers = request.headers
            try:
                async with open_body(request, LARGEST_BODY) as body:
                    parsed = await self._read_call(kind, session, body)
                    digest = xxhash.xxh3_128_digest(request.scope["path"].encode() + b"\n" + body)
                    repeats = _parse_count(headers.get("x-stainless-retry-count", "0")) or 0
                    harness_request = session.register_request(
                        digest, retry=repeats > 0, key=headers.get("idempotency-key", "")
                    )
                    if harness_request.call is None:
                        if harness_request not in self.answering:
                            answering = self._answer(session, harness_request, parsed, len(body))
                            self.answering[harness_request] = asyncio.create_task(answering)
                        await harness_request.placed.wait()
                if harness_request.call is None:
                    assert harness_request.refused is not None
                    raise harness_request.refused
            except CallRefused as refused:
                session.on_refused(refused)
                raise
            return partial(self._reply, session, harness_request, parsed)

        return route

    async def _read_call(self, kind: Kind, session: Session, body: bytes) -> ParsedRequest:
        """Parse the body of a call.  Raises CallRefused."""
        request_policy = self.service.request_policy
        context = session.limits.context

        def read() -> ParsedRequest:
            options = decode_body(body)
            for name in ("messages", "input", "prompt", "token_ids"):
                entries = options.get(name)
                if context and isinstance(entries, list) and len(entries) > context:
                    detail = f"{name} has {len(entries)} entries of a token or more"
                    raise build_too_long_error(detail, context, name)
            return parse_request(kind, options, request_policy, session.ticket.sampling)

        return await self._run_in_thread(len(body), read)

    async def _run_in_thread(self, size: int, work: Callable[[], Result]) -> Result:
        """Run `work` on a body of `size` bytes, in a thread if the body is large."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def _answer(
        self,
        session: Session,
        harness_request: HarnessRequest,
        parsed: ParsedRequest,
        size: int,
    ) -> None:
        """Place a call, sample it and keep its answer for all of its connections."""
        try:
            call = harness_request.call = await self._place(session, parsed, size)
            harness_request.placed.set()
            node = await self.service.draw(session, call)
            if node is None:
                raise CallRefused(
                    410, "session_ended", f"session {session.name} ended before a token was sampled"
                )
            name = f"{PREFIX[parsed.kind]}{session.name}-{call.number}"
            harness_request.answer = replies.build_answer(
                parsed, node, name, session.composer.decode_text, int(time.time())
            )
            # before it is sent to a client
            self.service.journal.append_answer(session, harness_request)
        except Exception as error:
            refused = harness_request.refused = as_refusal(error)
            if refused.param == "messages":  # a session does not know the API of the request
                refused.param = PROMPT_PARAMS.get(parsed.kind, "messages")
            session.forget(harness_request)  # the same request again is a new one
            if harness_request.call is not None:
                session.on_refused(refused)
            self.service.on_change(session)
            if refused is not error:
                raise
        finally:
            harness_request.placed.set()
            del self.answering[harness_request]

    async def _place(self, session: Session, parsed: ParsedRequest, size: int) -> CallNode:
        """Compose a call's prompt and add the call to its session.

        The calls of a session are composed one after another in the order of their requests,
        because each may continue the earlier ones.  Raises CallRefused.
        """
        now = self.service.current_time
        self._require_running()
        session.check_may_call(now())
        session.composing += 1
        try:
            async with session.turn:
                draft = session.draft(
                    parsed.messages,
                    parsed.tools,
                    text=parsed.text,
                    ids=parsed.ids,
                    aside=parsed.aside,
                )
                composed = await self._run_in_thread(size, draft)
        finally:
            session.composing -= 1
        # no await since the lock's release: the next call is drafted after this is accepted
        call = session.accept(
            composed,
            now=now(),
            max_new_tokens=parsed.max_new_tokens,
            stop=parsed.stop,
            images=parsed.images,
        )
        call.grammar = parsed.grammar
        return call

    async def _reply(
        self,
        session: Session,
        harness_request: HarnessRequest,
        parsed: ParsedRequest,
        scope: Scope,
        _: Receive,
        send: Send,
    ) -> None:
        """Send the answer to a call on one connection, complete or as a stream.

        It replaces StreamingResponse, because a retry needs to know whether the whole answer was
        sent. It also saves the task that watches for a disconnect: 2 instead of 75 us of CPU time a
        response (docs/log/agents.md).
        """
        connection, stream = scope["asyncrl.connection"], parsed.stream

        async def send_head(headers: dict[str, str]) -> None:
            if parsed.ignored:
                names = ", ".join(parsed.ignored)[:1000]
                names = "".join(c if " " <= c <= "~" else "?" for c in names)
                headers["x-asyncrl-ignored"] = names
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})

        async def send_part(body: bytes, *, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

        sent = False
        try:
            if stream:
                head = {"content-type": "text/event-stream", "cache-control": "no-cache"}
                await send_head(head)
                await send_part(replies.KEEP_ALIVE)
            while (task := self.answering.get(harness_request)) is not None:
                await asyncio.wait(
                    (task, connection.closed),
                    timeout=KEEP_ALIVE_S if stream else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if connection.is_closed:
                    return
                if stream and not task.done():
                    await send_part(replies.KEEP_ALIVE)
            if connection.is_closed:
                return
            answer = harness_request.answer
            if answer is None:
                refused = harness_request.refused
                assert refused is not None
                if not stream:
                    raise refused
                body = replies.build_error(refused)[0]
                event = b""
                if parsed.kind == "messages":  # Anthropic's clients expect both
                    body["type"], event = "error", b"event: error\n"
                answer = event + b"data: " + json.dumps(body).encode() + b"\n\n"
            if stream:
                connection.coalescing.hold()  # the last part goes out with the end of the stream
            else:
                length = str(len(answer))
                await send_head({"content-type": "application/json", "content-length": length})
            await send_part(answer)
            if not connection.is_closed:
                await send_part(b"", more_body=False)
                sent = True
        finally:
            session.on_connection_closed(harness_request, self.service.current_time(), sent=sent)
            if not sent:
                self.service.on_change(session)
            else:
                self.service.journal.append_sent(session, harness_request)


def list_models(request: Request, name: str, context: int) -> Response:
    """Describe the only model, in a list unless its own route was requested.

    context: its longest, 0 for any.  Raises CallRefused for another model.
    """
    model = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "asyncrl",
        "max_model_len": context or None,
    }
    requested_model = request.path_params.get("model")
    if not requested_model:
        return JSONResponse({"object": "list", "data": [model]})
    if requested_model != name:
        raise CallRefused(404, "model_not_found", f"there is no model {requested_model!r}", "model")
    return JSONResponse(model)


@contextlib.asynccontextmanager
async def open_body(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Read a body as `http_server.open_body` does.  Raises CallRefused."""
    try:
        async with http_server.open_body(request, limit) as body:
            yield body
    except HTTPException as error:
        status = error.status_code
        raise CallRefused(status, BODY_CODES[status], error.detail) from error


def _convert_body(body: bytes, kind: type[Result], status: int) -> Result:
    """Read a small body, whose numbers may be NaN, which later checks refuse.  Raises CallRefused.

    Unpaired surrogates are refused, because they cannot be sent to the buffer.
    """

    def load(text: bytes) -> Any:
        value = json.loads(text.decode() or "{}")
        json.dumps(value, ensure_ascii=False).encode()
        return value

    try:
        return msgspec.convert(decode_body(body, load), kind)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at ")[0]
        key = re.findall(r"(?:field `|\$\.)([^`.[]{0,80})", str(error))[0]
        raise CallRefused(status, "invalid_value", f"{key}: {reason:.200}", key) from error


def _parse_count(text: str) -> int | None:
    """Parse a non-negative integer of at most 18 ASCII digits; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def _require_call(session: Session) -> None:
    """Raise CallRefused if a session has ended without a call."""
    if not session.calls:
        raise CallRefused(
            422,
            "no_call",
            f"session {session.name} has ended without a call, so its sample has failed: does the "
            "agent use its own base URL?",
        )


def as_refusal(error: Exception) -> CallRefused:
    """Return a refusal as it is; of any other error, that of a server."""
    if isinstance(error, CallRefused):
        return error
    return CallRefused(500, "gateway", f"the gateway failed: {type(error).__name__}: {error}")


async def refuse(request: Request, error: Exception) -> Response:
    """Build the response of a refused request, in the form of its API."""
    if isinstance(error, ClientDisconnect):  # the connection closed before the body was read
        return Response()
    if isinstance(error, HTTPException):
        route = f"{request.method} {request.scope['path']:.200}"
        message = f"there is no {route}: see docs/http.md for the routes"
        error = CallRefused(404, "no_such_route", message)
    refused = as_refusal(error)
    body, headers = replies.build_error(refused)
    if "/v1/messages" in request.scope["path"]:
        body["type"] = "error"  # which Anthropic's clients expect
    return JSONResponse(body, refused.status, headers)


# Starlette raises an Exception again, for the log
HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = dict.fromkeys(
    (CallRefused, HTTPException, ClientDisconnect, Exception), refuse
)


class Endpoint(HttpServer):
    """The server of the endpoint."""

    def __init__(self, service: SessionApi, bind: ListenAddress) -> None:
        self.web = WebApp(service)
        bind.require_encryption()
        super().__init__(self.web.app, bind)

    async def stop(self) -> None:
        """Close all connections and cancel the open calls."""
        await super().stop()
        for task in self.web.answering.values():
            task.cancel()
        self.web.threads.shutdown(wait=False, cancel_futures=True)
