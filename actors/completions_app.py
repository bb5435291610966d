"""`asyncrl serve`: a model directory behind OpenAI's completions API, without a run.

    GET  /health
    GET  /v1/models, /v1/models/NAME
    POST /v1/completions, /v1/chat/completions

Starlette finds the route and turns errors into responses. The engine's thread computes. Options
that would change a completion and are not served are refused, never ignored."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.engine import (
    Completion,
    CompletionRequest,
    Engine,
    Key,
    PromptScores,
    build_engine,
    load_model,
)
from actors.gateway.chat import normalize_messages
from actors.gateway.endpoint.replies import build_columns, count_usage, describe_token
from actors.gateway.endpoint.requests import decode_body, parse_ids, parse_stops
from actors.gateway.endpoint.web import HANDLERS, LARGEST_BODY, list_models, open_body
from actors.gateway.refusals import TOO_LONG, CallRefused, build_refusal
from asyncrl.config import load, rules
from asyncrl.config.layers import describe_values
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import Prompt
from asyncrl.contract.versions import Label
from asyncrl.models import model_check
from asyncrl.models.policy import load_policy
from asyncrl.models.tokenizer import collect_stop_tokens, encode_prompt, read_vocabulary_size
from asyncrl.records.jsonl import JsonObject
from asyncrl.transport.http_server import HttpServer, ListenAddress, authorize

MOST_COMPLETIONS = 1024  # of one request
MostLikely = Annotated[int, Meta(ge=0, le=20)]  # tokens a position with log-probabilities
NonNegative = Annotated[int, Meta(ge=0)]
# options without effect here, from clients that always send them
QUIET = ("user", "store", "metadata", "stream_options", "best_of")
# options whose default changes nothing: key -> that value
NEUTRAL: JsonObject = {
    "stream": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "tools": [],
    "response_format": {"type": "text"},
}


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/completions and, with `messages`, of /v1/chat/completions."""

    model: str | None = None
    prompt: Any = None
    messages: Any = None
    max_tokens: NonNegative | None = None
    max_completion_tokens: NonNegative | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0  # 0 is greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    count: Annotated[int, Meta(ge=1)] = msgspec.field(name="n", default=1)  # of each prompt
    seed: int | None = None
    stop: Any = None
    echo: bool = False
    logprobs: MostLikely | bool | None = None
    top_logprobs: MostLikely | None = None


@dataclass(frozen=True)
class CompletionOrder:
    """The completions of one request.

    prompts: int32 [P] each.
    max_new_tokens: of each completion; 0: only the prompt is scored.
    most_likely: how many of the most likely tokens to name; None: no log-probabilities.
    """

    body: CompletionBody
    prompts: list[np.ndarray]
    max_new_tokens: int
    stop: tuple[str, ...]
    most_likely: int | None


def parse_order(
    body: bytes,
    *,
    chat: bool,
    name: str,
    context: int,
    vocabulary: int,
    encode: Callable[[Prompt], np.ndarray],
) -> CompletionOrder:
    """Parse a body.  Raises CallRefused, which names the defect.

    name: the model that is served. encode: tokenizes a prompt.
    """
    fields = read_body(body)
    if fields.model not in (None, name):
        raise CallRefused(
            404, "model_not_found", f"no model {fields.model!r}: this server has {name!r}", "model"
        )
    most_likely: int | None = None  # None: no log-probabilities
    if chat:
        if fields.logprobs not in (None, True, False):
            raise build_refusal("logprobs", "give true or false, and top_logprobs a number")
        most_likely = (fields.top_logprobs or 0) if fields.logprobs else None
    elif fields.top_logprobs is not None:
        raise build_refusal(
            "top_logprobs", "belongs to /v1/chat/completions; give logprobs a number"
        )
    elif fields.logprobs is not None and fields.logprobs is not False:
        most_likely = int(fields.logprobs)
    if most_likely is not None and most_likely > vocabulary:
        raise build_refusal("logprobs", f"{most_likely}: the model has {vocabulary} tokens")
    if chat:
        if fields.prompt is not None or fields.echo:
            raise build_refusal(
                "echo" if fields.echo else "prompt",
                "belongs to /v1/completions",
                "unsupported_parameter",
            )
        prompts = [encode(Prompt(0, "", messages=normalize_messages(fields.messages)))]
    else:
        several = fields.prompt  # one prompt or several, each text or token ids
        is_list = isinstance(several, list) and several and isinstance(several[0], str | list)
        prompts = []
        for prompt in several if is_list else [several]:
            if isinstance(prompt, str):
                prompts.append(encode(Prompt(0, prompt)))
                if not len(prompts[-1]):
                    raise build_refusal("prompt", "is empty; give at least one token")
            else:
                prompts.append(parse_ids("prompt", prompt, vocabulary))
    tokens = fields.max_completion_tokens
    tokens = fields.max_tokens if tokens is None else tokens
    longest = max(map(len, prompts))
    if tokens is None:  # a chat's response may fill the context
        room = max(1, context - longest)
        tokens = room if chat else min(room, 16)  # OpenAI's default
    stop = parse_stops(fields.stop)
    if not tokens and not (fields.echo and most_likely is not None):
        raise build_refusal("max_tokens", "0 needs echo = true and logprobs, to score the prompt")
    if len(prompts) * fields.count > MOST_COMPLETIONS:
        raise build_refusal(
            "n", f"asks for more than {MOST_COMPLETIONS} completions in one request"
        )
    if longest + tokens > context:
        raise CallRefused(
            400,
            TOO_LONG,
            f"the prompt has {longest} tokens and max_tokens is {tokens}, and "
            f"--context = {context} is for both: shorten the prompt, or serve with a larger one",
            "prompt",
        )
    return CompletionOrder(fields, prompts, tokens, stop, most_likely)


def read_body(body: bytes) -> CompletionBody:
    """Decode a body.

    Raises CallRefused for JSON of another form, and for an option that is not served.
    """
    raw = decode_body(body)
    types = {field.encode_name: field.type for field in msgspec.structs.fields(CompletionBody)}
    for key, value in list(raw.items()):
        if key in types and value is not None:
            continue
        if key not in QUIET and value is not None and value != NEUTRAL.get(key):
            raise build_refusal(
                key, f"{value!r:.80} is not served; leave it out", "unsupported_parameter"
            )
        del raw[key]
    try:
        return msgspec.convert(raw, CompletionBody)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`")
        raise build_refusal(key, f"{raw[key]!r:.80}: give {describe_values(types[key])}") from error


MOST_CONTEXT = 4096  # without --context
STEPS = 8  # decode steps between two checks for new work


class EngineThread:
    """An engine in a thread of its own, which many requests share.

    Only this thread touches the engine. Other threads queue work and get a future. Requests that
    arrive while others are being decoded join them at the next step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.executor = ThreadPoolExecutor(1, "engine")
        self.futures: dict[Key, Future[Completion]] = {}
        self.is_stepping = False  # whether the next decode steps are queued
        self.error: object = None  # that has ended it, or "closed"

    async def complete(self, request: CompletionRequest) -> Completion:
        """Generate a completion; its key must differ from those of open requests."""
        future: Future[Completion] = Future()
        # a closed connection cancels what it waits for: the thread's result must find it open
        future.set_running_or_notify_cancel()

        def add() -> None:
            self.engine.add([request])
            self.futures[request.key] = future
            self._queue_steps()

        await asyncio.wrap_future(self._submit(add))
        return await asyncio.wrap_future(future)

    async def score(self, prompts: Sequence[np.ndarray], most_likely: int) -> list[PromptScores]:
        """Score token sequences; see `Engine.score`."""
        return await asyncio.wrap_future(self._submit(self.engine.score, prompts, most_likely))

    def cancel(self, keys: Sequence[Key]) -> None:
        """Abort completions, for example of a closed connection."""

        def abort() -> None:
            self.engine.abort(keys)
            for key in keys:
                if future := self.futures.pop(key, None):
                    future.set_exception(CancelledError())

        self._submit(abort)

    def close(self) -> None:
        """End the thread. Open requests fail."""
        self.error = self.error or "closed"
        self.executor.shutdown()
        self._end(self.error)

    def _end(self, error: object) -> None:
        self.error = error
        while self.futures:
            self.futures.popitem()[1].set_exception(self._build_end_error())

    def _build_end_error(self) -> AsyncrlError:
        return AsyncrlError(f"the engine has ended: {self.error}")

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue work of the thread.  An error that is not of this work alone ends the engine."""

        def run() -> Any:
            if self.error is not None:
                raise self._build_end_error()
            try:
                return work(*arguments)
            except AsyncrlError:
                raise
            except BaseException as error:
                self._end(error)
                raise

        if self.error is not None:
            raise self._build_end_error()
        return self.executor.submit(run)

    def _queue_steps(self) -> None:
        if self.engine.active and not self.is_stepping:
            self.is_stepping = True
            self._submit(self._step)

    def _step(self) -> None:
        self.is_stepping = False
        for completion in self.engine.step(STEPS) if self.engine.active else []:
            self.futures.pop(completion.key).set_result(completion)
        self._queue_steps()


class CompletionsApp:
    """The routes of a served model: `app` is the ASGI application.

    It loads the model and starts its engine.  Raises ConfigError for a directory without a model.

    name: of the model in requests and responses. key: that a client must send; "": none.
    """

    def __init__(self, config: Config, name: str, key: str) -> None:
        path = config.model.path
        self.tokenizer = model_check.check(config)
        engine = build_engine(config)
        load_model(engine, load_policy(path, config.model.dtype, config.model.device), Label(1, 0))
        self.engine = EngineThread(engine)
        self.name = name
        self.key = key
        self.context = config.generator.context
        self.vocabulary = read_vocabulary_size(path)
        self.stops = collect_stop_tokens(self.tokenizer, config)
        self.numbers = itertools.count()  # of the prompts, so that no two requests share a key
        self.app = Starlette(
            routes=[
                Route("/v1/completions", partial(self._answer, chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._answer, chat=True), methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}", self._list_models),
                Route("/health", Response(), methods=["GET"]),
            ],
            exception_handlers=HANDLERS,
        )

    # ---- routes ----------------------------------------------------------------------------------

    async def _list_models(self, request: Request) -> Response:
        self._authorize(request)
        return list_models(request, self.name, self.context)

    def _authorize(self, request: Request) -> None:
        if not authorize(request, self.key):
            raise CallRefused(
                401,
                "invalid_api_key",
                "this server needs the key that it printed at its start: set OPENAI_API_KEY",
            )

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        self._authorize(request)
        async with open_body(request, LARGEST_BODY) as body:
            order = await asyncio.to_thread(
                parse_order,
                body,
                chat=chat,
                name=self.name,
                context=self.context,
                vocabulary=self.vocabulary,
                encode=self._encode,
            )
        try:
            samples = await self._generate(order)
            scores: list[PromptScores | None] = [None] * len(samples)
            if order.most_likely is not None:  # prompts and completions are scored together
                sequences = [np.concatenate([sample.prompt, sample.tokens]) for sample in samples]
                scores = [*await self.engine.score(sequences, max(1, order.most_likely))]
        except AsyncrlError as error:
            raise CallRefused(500, "engine", str(error)) from error
        choices = [
            self._build_choice(order, sample, scores[index], index, chat=chat)
            for index, sample in enumerate(samples)
        ]
        tokens = sum(len(sample.tokens) for sample in samples)
        return Response(
            msgspec.json.encode(
                {
                    "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(8)}",
                    "object": "chat.completion" if chat else "text_completion",
                    "created": int(time.time()),
                    "model": self.name,
                    "choices": choices,
                    "usage": count_usage(sum(map(len, order.prompts)), tokens),
                }
            ),
            media_type="application/json",
        )

    def _encode(self, prompt: Prompt) -> np.ndarray:
        try:
            return encode_prompt(self.tokenizer, prompt)
        except AsyncrlError as error:
            raise CallRefused(400, "invalid_value", str(error), "messages") from error

    # ---- the engine ------------------------------------------------------------------------------

    async def _generate(self, order: CompletionOrder) -> list[Completion]:
        """Generate the completions, prompt by prompt; without tokens if max_tokens is 0.

        With a seed, sample i of a prompt has the same random stream in every request.
        """
        body = order.body
        requests = [
            CompletionRequest(
                key=(number, sample, 1),
                prompt=prompt,
                group=number,
                max_new_tokens=max(1, order.max_new_tokens),
                temperature=body.temperature or 1.0,
                top_p=body.top_p,
                top_k=body.top_k if body.temperature else 1,  # a temperature of 0 is greedy
                stop=self.stops,
                seed=secrets.randbits(63) if body.seed is None else body.seed,
                drawn_for=(0, sample),
            )
            for prompt, number in zip(order.prompts, self.numbers, strict=False)
            for sample in range(body.count)
        ]
        if not order.max_new_tokens:
            no_tokens = np.empty(0, np.int32), np.empty(0, np.float32)
            return [
                Completion(request.key, request.prompt, *no_tokens, [], "length", support=None)
                for request in requests
            ]
        try:
            return await asyncio.gather(*map(self.engine.complete, requests))
        except BaseException:  # the connection has closed, or a request is refused
            self.engine.cancel([request.key for request in requests])
            raise

    # ---- responses -------------------------------------------------------------------------------

    def _decode_text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _build_choice(
        self,
        order: CompletionOrder,
        sample: Completion,
        scores: PromptScores | None,
        index: int,
        *,
        chat: bool,
    ) -> JsonObject:
        """Build one choice, which ends before a stop text."""
        prompt, tokens = sample.prompt.tolist(), sample.tokens.tolist()
        text = str(
            self.tokenizer.decode(
                [token for token in tokens if token not in self.stops], skip_special_tokens=True
            )
        )
        end = min(
            (position for stop in order.stop if (position := text.find(stop)) >= 0), default=-1
        )
        if end >= 0:
            text = text[:end]
            counts = (
                count
                for count in range(len(tokens))
                if len(self._decode_text(tokens[:count])) >= end
            )
            tokens = tokens[: next(counts, len(tokens))]
        finish = "stop" if end >= 0 else sample.finish
        rows = None
        if scores is not None:
            ids = [*prompt, *tokens]
            rows = self._describe_tokens(ids, scores, order.most_likely or 0)
            rows = rows if order.body.echo else rows[len(prompt) :]
        if chat:
            return {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None if rows is None else {"content": rows, "refusal": None},
                "finish_reason": finish,
            }
        columns: JsonObject | None = None
        if rows is not None:
            names = [row["token"] for row in rows]
            # of two tokens with the same text the more likely one is named
            likely = [
                {entry["token"]: entry["logprob"] for entry in reversed(row["top_logprobs"])}
                if "top_logprobs" in row
                else None
                for row in rows
            ]
            logprobs = [row["logprob"] for row in rows]
            columns = build_columns(names, logprobs, likely if order.most_likely else None)
        return {
            "index": index,
            "text": self._decode_text(prompt) + text if order.body.echo else text,
            "logprobs": columns,
            "finish_reason": finish,
        }

    def _describe_tokens(
        self, ids: Sequence[int], scores: PromptScores, most_likely: int
    ) -> list[JsonObject]:
        """Describe each token as chat completions do.

        The first token of a prompt has no log-probability.
        """
        texts = [self._decode_text([token]) for token in ids]
        rows = [describe_token(texts[0], None)]
        for position, text in enumerate(texts[1:]):
            likely = zip(
                scores.top_ids[position, :most_likely].tolist(),
                scores.top_logprobs[position, :most_likely].tolist(),
                strict=True,
            )
            rows.append(
                describe_token(text, float(scores.logprobs[position]))
                | {
                    "top_logprobs": [
                        describe_token(self._decode_text([token]), value) for token, value in likely
                    ]
                }
            )
        return rows


# ---- the server ----------------------------------------------------------------------------------


def build_config(
    path: str, *, context: int, slots: int, dtype: str, device: str, threads: int
) -> Config:
    """Build the config of an engine for a model directory.  Raises ConfigError.

    context: 0 means that of the model, at most MOST_CONTEXT. threads: 0 means all cores.
    """
    raw = model_check.read_settings(Path(path), "MODEL")
    max_positions = model_check.find_max_positions(raw) or max(context, MOST_CONTEXT)
    if context > max_positions:
        raise ConfigError(f"--context {context}: the model in {path} has {max_positions} positions")
    config = load.build(
        {
            "model": {"path": path, "dtype": dtype, "device": device},
            "task": {"name": "none"},
            "generator": {
                "slots": slots,
                "context": context or min(max_positions, MOST_CONTEXT),
                "threads": threads or len(os.sched_getaffinity(0)),
            },
        }
    )
    for problem in rules.check(config):
        if problem.startswith("model."):  # a run's other rules do not bind a server
            raise ConfigError(problem)
    return config


def serve(app: CompletionsApp, bind: ListenAddress, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    announce: called with the URL when requests are accepted. Raises ConfigError for an address that
    cannot be used.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        asyncio.run(HttpServer(app.app, bind).serve(announce))
    app.engine.close()
