"""Strict parser of the bodies that the model server accepts.  Pure.

Options that would change an answer and are not followed are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from actors.gateway.chat import normalised
from actors.gateway.endpoint.requests import bad, parse_ids, parse_stops
from actors.gateway.sessions import TOO_LONG, CallRefused
from asyncrl.contract.messages import Prompt

MOST_LIKELY = 20  # tokens a position whose log-probabilities a client may ask for
MOST_COMPLETIONS = 1024  # of one request
DEFAULT_TOKENS = 16  # of a completion; OpenAI's default
# options without effect here, from clients that always send them
QUIET = ("user", "store", "metadata", "stream_options", "best_of")
# options whose default changes nothing: key -> that value
NEUTRAL: dict[str, Any] = {
    "stream": False,
    "suffix": None,
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
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    count: Annotated[int, Meta(ge=1)] | None = msgspec.field(name="n", default=None)
    seed: int | None = None
    stop: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | None = None


@dataclass(frozen=True)
class CompletionOrder:
    """The completions that a request asks for.

    prompts: int32 [P] each.
    max_new_tokens: of each completion; 0: only the prompt is scored.
    temperature: 0 is greedy.
    count: completions of each prompt.
    seed: None: another one for each request.
    most_likely: None: no log-probabilities are asked for; else how many of the most likely tokens.
    """

    prompts: list[np.ndarray]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    count: int
    seed: int | None
    stop: tuple[str, ...]
    echo: bool
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
    """Parse a body.  Raises CallRefused with what is wrong.

    name: the model that is served. encode: tokenizes a prompt.
    """
    given = read_body(body)
    if given.model not in (None, name):
        raise CallRefused(
            404,
            "model_not_found",
            f"no model {given.model!r}: this server has {name!r}",
            "model",
        )
    most_likely = _most_likely(given, chat=chat)
    if most_likely is not None and most_likely > vocabulary:
        raise bad("logprobs", f"{most_likely}: the model has {vocabulary} tokens")
    if chat:
        if given.prompt is not None or given.echo:
            key = "echo" if given.echo else "prompt"
            raise bad(key, "belongs to /v1/completions", "unsupported_parameter")
        prompts = [encode(Prompt(0, "", messages=_turns(given.messages)))]
    else:
        prompts = _prompts(given.prompt, vocabulary, encode)
    tokens = given.max_completion_tokens
    tokens = given.max_tokens if tokens is None else tokens
    order = CompletionOrder(
        prompts=prompts,
        max_new_tokens=_default_tokens(prompts, context, chat=chat) if tokens is None else tokens,
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=given.top_k or 0,
        count=given.count or 1,
        seed=given.seed,
        stop=parse_stops(given.stop),
        echo=bool(given.echo),
        most_likely=most_likely,
    )
    check_order(order, context)
    return order


def read_body(body: bytes) -> CompletionBody:
    """Decode a body.  Raises CallRefused for JSON of another form, and for an option not served."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CallRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CallRefused(400, "invalid_json", "the body is not a JSON object")
    known = {field.encode_name for field in msgspec.structs.fields(CompletionBody)}
    for key, value in list(raw.items()):
        if key in known:
            continue
        if key not in QUIET and value is not None and value != NEUTRAL.get(key):
            raise bad(key, f"{value!r:.80} is not served; leave it out", "unsupported_parameter")
        del raw[key]
    try:
        return msgspec.convert(raw, CompletionBody)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise bad(place.rstrip("`"), message) from error


def check_order(order: CompletionOrder, context: int) -> None:
    """Raise CallRefused for an order that the engine cannot fill."""
    if not order.max_new_tokens and not (order.echo and order.most_likely is not None):
        raise bad("max_tokens", "0 needs echo = true and logprobs, to score the prompt")
    if len(order.prompts) * order.count > MOST_COMPLETIONS:
        raise bad("n", f"asks for more than {MOST_COMPLETIONS} completions in one request")
    longest = max(map(len, order.prompts))
    if longest + order.max_new_tokens > context:
        raise CallRefused(
            400,
            TOO_LONG,
            f"the prompt has {longest} tokens and max_tokens is {order.max_new_tokens}, and "
            f"--context = {context} is for both: shorten the prompt, or serve with a larger one",
            "prompt",
        )


def _most_likely(given: CompletionBody, *, chat: bool) -> int | None:
    """Return how many of the most likely tokens are asked for; None: no log-probabilities."""
    if not chat:
        if given.top_logprobs is not None:
            raise bad("top_logprobs", "belongs to /v1/chat/completions; give logprobs a number")
        return None if given.logprobs is None or given.logprobs is False else int(given.logprobs)
    if given.logprobs not in (None, True, False):
        raise bad("logprobs", "give true or false, and top_logprobs a number")
    return (given.top_logprobs or 0) if given.logprobs else None


def _default_tokens(prompts: list[np.ndarray], context: int, *, chat: bool) -> int:
    """A chat's answer may fill the context; a completion has OpenAI's default."""
    room = max(1, context - max(map(len, prompts)))
    return room if chat else min(room, DEFAULT_TOKENS)


def _turns(messages: Any) -> list[dict[str, str]]:
    """Read chat turns of text.  Raises CallRefused."""
    turns = normalised(messages)
    for number, turn in enumerate(turns):
        if not isinstance(turn.get("content"), str) or turn.get("tool_calls"):
            raise CallRefused(
                400, "invalid_value", f"messages[{number}]: give `content` as text", "messages"
            )
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _prompts(
    given: Any, vocabulary: int, encode: Callable[[Prompt], np.ndarray]
) -> list[np.ndarray]:
    """Read one prompt or several, each text or token ids.  Raises CallRefused."""
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    prompts = []
    for one in given if several else [given]:
        if isinstance(one, str):
            ids = encode(Prompt(0, one))
            if not len(ids):
                raise bad("prompt", "is empty; give at least one token")
        else:
            ids = parse_ids("prompt", one, vocabulary)
        prompts.append(ids)
    return prompts
