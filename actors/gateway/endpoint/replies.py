"""Bodies of the endpoint's responses: answers, streams and errors.  Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actors.gateway.call_tree import CallNode, Message
from actors.gateway.endpoint import anthropic, responses
from actors.gateway.endpoint.requests import ParsedRequest
from actors.gateway.refusals import CallRefused
from asyncrl.records.jsonl import JsonObject

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRIED_STATUSES = (408, 429)  # statuses below 500 that a client should retry
_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Text = Callable[[Sequence[int]], str]  # of token ids


def build_error(refused: CallRefused) -> tuple[JsonObject, dict[str, str]]:
    """Build the body and headers of a refusal; the headers say whether to retry."""
    status = refused.status
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}
    if status not in RETRIED_STATUSES and status < 500:
        return {"error": body}, {"x-should-retry": "false"}
    return {"error": body}, {"retry-after": "1"} if status in (429, 503) else {}


def build_answer(
    parsed: ParsedRequest, node: CallNode, name: str, decode: Text, created: int
) -> bytes:
    """Build the body of an answered call, complete or as a stream.

    node: the call
    name: its id in the answer
    decode: decodes token ids
    created: the time in the answer, in seconds since 1970
    """
    if parsed.kind == "ids":
        return _encode(_build_tokens_body(parsed, node, name))
    if parsed.kind in ("messages", "responses"):
        return _build_translated(parsed, node, name, created, decode)
    if parsed.kind == "chat":
        body = _build_chat_choice(parsed, node, decode)
        kind = "chat.completion" + ".chunk" * parsed.stream
    else:
        body = _build_text_choice(parsed, node, decode)
        kind = "text_completion"
    body |= _build_versions(node)
    if parsed.token_ids:
        body["token_ids"] = node.ids.tolist()
        body["prompt_token_ids"] = node.prompt_ids.tolist()
    head = {"id": name, "object": kind, "created": created, "model": parsed.model}
    usage = count_usage(len(node.prompt_ids), len(node.ids))
    if not parsed.stream:
        return _encode({**head, "choices": [body], "usage": usage})
    chunks = [{**head, "choices": [choice]} for choice in _split_choice(parsed, body)]
    if parsed.usage:
        chunks.append({**head, "choices": [], "usage": usage})
    return b"".join(b"data: " + _encode(part) + b"\n\n" for part in chunks) + DONE


def _build_translated(
    parsed: ParsedRequest, node: CallNode, name: str, created: int, decode: Text
) -> bytes:
    """Do the same as `build_answer` for /v1/messages and /v1/responses."""
    choice = _build_chat_choice(parsed, node, decode)
    completion = (
        choice["message"],
        choice["finish_reason"],
        count_usage(len(node.prompt_ids), len(node.ids)),
    )
    head = {"id": name, "model": parsed.model, "created": created}
    if parsed.kind == "messages":
        sampled = decode([int(token) for token in node.ids])
        stop = next((stop for stop in parsed.stop if stop in sampled), "")
        body = anthropic.build_response(*completion, head, stop)
        split = anthropic.split_events
    else:
        body = responses.build_response(*completion, head)
        split = responses.split_events
    if not parsed.stream:
        return _encode(body)
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        for event in split(body)
    )


def _build_versions(node: CallNode) -> JsonObject:
    """Build the field of SGLang and vLLM that names the weights of each span of tokens."""
    spans = ((str(span.label), span.start, span.end) for span in node.spans)
    keys = ("version", "start", "end")
    return {"weight_versions": [dict(zip(keys, span, strict=True)) for span in spans]}


def count_usage(prompt: int, completion: int) -> dict[str, int]:
    """Describe the numbers of tokens of prompts and completions."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def describe_token(text: str, logprob: float | None) -> JsonObject:
    """Describe a sampled token as chat completions do."""
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _build_chat_choice(parsed: ParsedRequest, node: CallNode, decode: Text) -> JsonObject:
    answer = node.answer
    assert answer is not None
    # in the form of OpenAI's API, where arguments are text
    message: Message = {"role": "assistant", "content": answer["content"], "refusal": None}
    if "reasoning_content" in answer:
        message["reasoning_content"] = answer["reasoning_content"]
    if calls := answer.get("tool_calls"):
        message["content"] = answer["content"] or None
        message["tool_calls"] = []
        for call in calls:
            function = dict(call["function"])
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            message["tool_calls"].append({**call, "function": function})
    finish: str = node.finish
    if finish == "stop" and message.get("tool_calls"):
        finish = "tool_calls"
    choice: JsonObject = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    if parsed.logprobs:
        tokens = [decode([int(token)]) for token in node.ids]
        choice["logprobs"] = {
            "content": [
                describe_token(token, float(logprob)) | {"top_logprobs": []}
                for token, logprob in zip(tokens, node.logprobs, strict=True)
            ],
            "refusal": None,
        }
    return choice


def _build_text_choice(parsed: ParsedRequest, node: CallNode, decode: Text) -> JsonObject:
    assert node.answer is not None
    choice: JsonObject = {
        "index": 0,
        "text": node.answer["content"],
        "logprobs": None,
        "finish_reason": node.finish,
    }
    if parsed.logprobs:
        tokens = [decode([int(token)]) for token in node.ids]
        choice["logprobs"] = build_columns(tokens, node.logprobs.tolist())
    return choice


def build_columns(tokens: list[str], logprobs: list[Any], likely: Any = None) -> JsonObject:
    """Build the log-probabilities of a text completion, likely: the most likely tokens."""
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": likely,
        "text_offset": [sum(map(len, tokens[:index])) for index in range(len(tokens))],
    }


def _build_tokens_body(parsed: ParsedRequest, node: CallNode, name: str) -> JsonObject:
    choice: JsonObject = {
        "index": 0,
        "finish_reason": node.finish,
        "token_ids": node.ids.tolist(),
        "logprobs": None,
        **_build_versions(node),
    }
    if parsed.logprobs:
        choice["logprobs"] = {
            "content": [
                {
                    "token": f"token_id:{int(token)}",  # as vLLM writes it
                    "token_id": int(token),
                    "logprob": float(logprob),
                    "top_logprobs": [],
                }
                for token, logprob in zip(node.ids, node.logprobs, strict=True)
            ]
        }
    return {
        "request_id": name,
        "choices": [choice],
        "prompt_token_ids": node.prompt_ids.tolist() if parsed.token_ids else None,
        "usage": count_usage(len(node.prompt_ids), len(node.ids)),
    }


def _split_choice(parsed: ParsedRequest, choice: JsonObject) -> list[JsonObject]:
    """Split a finished answer into the choices of a stream."""
    extra: JsonObject = {
        key: choice[key] for key in ("token_ids", "prompt_token_ids") if key in choice
    }
    last_choice: JsonObject = {
        "index": 0,
        "logprobs": None,
        "finish_reason": choice["finish_reason"],
        "weight_versions": choice["weight_versions"],
    }
    if parsed.kind == "text":
        complete: JsonObject = {"index": 0, "text": choice["text"], "logprobs": choice["logprobs"]}
        return [{**complete, "finish_reason": None, **extra}, {**last_choice, "text": ""}]
    message = choice["message"]
    delta: JsonObject = {"content": message["content"]}
    if "reasoning_content" in message:
        delta["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    unfinished: JsonObject = {"index": 0, "logprobs": None, "finish_reason": None}
    return [
        {**unfinished, "delta": {"role": "assistant", "content": "", "refusal": None}},
        {**unfinished, "delta": delta, "logprobs": choice["logprobs"], **extra},
        {**last_choice, "delta": {}},
    ]
