"""Strict parser of the bodies that the model server accepts.  Pure.

Options that would change a completion and are not served are refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from actors.gateway.chat import normalize_messages
from actors.gateway.endpoint.requests import decode_body, parse_ids, parse_stops
from actors.gateway.refusals import TOO_LONG, CallRefused, build_refusal
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
    temperature: Annotated[float, Meta(ge=0)] = 1.0  # 0 is greedy
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    count: Annotated[int, Meta(ge=1)] = msgspec.field(name="n", default=1)  # of each prompt
    seed: int | None = None
    stop: Any = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | None = None


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
        reason = "belongs to /v1/chat/completions; give logprobs a number"
        raise build_refusal("top_logprobs", reason)
    elif fields.logprobs is not None and fields.logprobs is not False:
        most_likely = int(fields.logprobs)
    if most_likely is not None and most_likely > vocabulary:
        raise build_refusal("logprobs", f"{most_likely}: the model has {vocabulary} tokens")
    if chat:
        if fields.prompt is not None or fields.echo:
            key = "echo" if fields.echo else "prompt"
            raise build_refusal(key, "belongs to /v1/completions", "unsupported_parameter")
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
    if tokens is None:  # a chat's response may fill the context
        room = max(1, context - max(map(len, prompts)))
        tokens = room if chat else min(room, DEFAULT_TOKENS)
    stop = parse_stops(fields.stop)
    if not tokens and not (fields.echo and most_likely is not None):
        raise build_refusal("max_tokens", "0 needs echo = true and logprobs, to score the prompt")
    longest = max(map(len, prompts))
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
    field_names = {field.encode_name for field in msgspec.structs.fields(CompletionBody)}
    for key, value in list(raw.items()):
        if key in field_names and value is not None:
            continue
        if key not in QUIET and value is not None and value != NEUTRAL.get(key):
            raise build_refusal(
                key, f"{value!r:.80} is not served; leave it out", "unsupported_parameter"
            )
        del raw[key]
    try:
        return msgspec.convert(raw, CompletionBody)
    except msgspec.ValidationError as error:
        message, _, key_path = str(error).partition(" - at `$.")
        raise build_refusal(key_path.rstrip("`"), message) from error
