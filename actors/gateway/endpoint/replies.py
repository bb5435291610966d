"""Bodies of the endpoint's responses: answers, streams and errors.  Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actors.gateway.call_tree import CallNode, Message
from actors.gateway.endpoint import anthropic, responses
from actors.gateway.endpoint.requests import ParsedRequest
from actors.gateway.sessions import CallRefused

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
AGAIN = (408, 429)  # statuses below 500 that a client should retry
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Text = Callable[[Sequence[int]], str]  # of token ids


def error(refused: CallRefused) -> tuple[dict[str, Any], dict[str, str]]:
    """Build the body and headers of a refusal, with a hint whether to retry."""
    status = refused.status
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {
        "message": str(refused),
        "type": kind,
        "param": refused.param,
        "code": refused.code,
    }
    if status not in AGAIN and status < 500:
        return {"error": body}, {"x-should-retry": "false"}
    return {"error": body}, {"retry-after": "1"} if status in (429, 503) else {}


def answer(wanted: ParsedRequest, node: CallNode, name: str, text: Text, when: int) -> bytes:
    """Build the body of an answered call, complete or as a stream.

    node: the call
    name: its id in the answer
    text: decodes token ids
    when: the time in the answer, in seconds since 1970
    """
    if wanted.kind == "ids":
        return _encode(_tokens(wanted, node, name))
    if wanted.kind in ("messages", "responses"):
        return _translated(wanted, node, name, when, text)
    body = _chat(wanted, node, text) if wanted.kind == "chat" else _text(wanted, node, text)
    head = _head(wanted, name, when, chunk=wanted.stream)
    usage = _usage(node)
    if not wanted.stream:
        return _encode(
            {
                **head,
                "choices": [body],
                "usage": usage,
            }
        )
    parts = [{**head, "choices": [choice]} for choice in _chunked(wanted, body)]
    if wanted.usage:
        parts.append(
            {
                **head,
                "choices": [],
                "usage": usage,
            }
        )
    return b"".join(b"data: " + _encode(part) + b"\n\n" for part in parts) + DONE


def _translated(wanted: ParsedRequest, node: CallNode, name: str, when: int, text: Text) -> bytes:
    """Do the same for /v1/messages and /v1/responses."""
    choice = _chat(wanted, node, text)
    completion = (choice["message"], choice["finish_reason"], _usage(node))
    head = {
        "id": name,
        "model": wanted.model,
        "created": when,
    }
    if wanted.kind == "messages":
        body = anthropic.answer(*completion, head, _stopped(wanted, node, text))
        return anthropic.sse(anthropic.events(body)) if wanted.stream else _encode(body)
    body = responses.answer(*completion, head)
    return anthropic.sse(responses.events(body)) if wanted.stream else _encode(body)


def _stopped(wanted: ParsedRequest, node: CallNode, text: Text) -> str:
    """Find the stop string that ended the answer; "" if none did."""
    assert node.ids is not None
    sampled = text([int(token) for token in node.ids])
    return next((stop for stop in wanted.stop if stop in sampled), "")


def _encode(body: Any) -> bytes:
    return msgspec.json.encode(body)


def _head(wanted: ParsedRequest, name: str, when: int, *, chunk: bool) -> dict[str, Any]:
    chat = wanted.kind == "chat"
    kind = "chat.completion" + ".chunk" * chunk if chat else "text_completion"
    return {
        "id": name,
        "object": kind,
        "created": when,
        "model": wanted.model,
    }


def _usage(node: CallNode) -> dict[str, int]:
    assert node.ids is not None
    prompt, completion = len(node.prompt()), len(node.ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def message_for_client(answer: Message) -> Message:
    """Convert an answer to the form of OpenAI's API, where arguments are text."""
    message = {
        "role": "assistant",
        "content": answer["content"],
        "refusal": None,
    }
    if "reasoning_content" in answer:
        message["reasoning_content"] = answer["reasoning_content"]
    if calls := answer.get("tool_calls"):
        message["content"] = answer["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call)}}
            for call in calls
        ]
    return message


def _arguments(call: Message) -> str:
    given = call["function"]["arguments"]
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _chat(wanted: ParsedRequest, node: CallNode, text: Text) -> dict[str, Any]:
    assert node.answer is not None and node.ids is not None and node.logprobs is not None
    message = message_for_client(node.answer)
    finish: str = node.finish
    if finish == "stop" and message.get("tool_calls"):
        finish = "tool_calls"
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": finish,
    }
    if wanted.logprobs:
        tokens = [text([int(token)]) for token in node.ids]
        choice["logprobs"] = {
            "content": [
                {
                    "token": token,
                    "logprob": float(logprob),
                    "bytes": list(token.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
                for token, logprob in zip(tokens, node.logprobs, strict=True)
            ],
            "refusal": None,
        }
    return {**choice, **_ids(wanted, node)}


def _text(wanted: ParsedRequest, node: CallNode, text: Text) -> dict[str, Any]:
    assert node.ids is not None and node.logprobs is not None
    assert node.answer is not None
    choice: dict[str, Any] = {
        "index": 0,
        "text": node.answer["content"],
        "logprobs": None,
        "finish_reason": node.finish,
    }
    if wanted.logprobs:
        tokens = [text([int(token)]) for token in node.ids]
        choice["logprobs"] = {
            "tokens": tokens,
            "token_logprobs": [float(logprob) for logprob in node.logprobs],
            "top_logprobs": None,
            "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))],
        }
    return {**choice, **_ids(wanted, node)}


def _ids(wanted: ParsedRequest, node: CallNode) -> dict[str, Any]:
    if not wanted.token_ids:
        return {}
    assert node.ids is not None
    return {"token_ids": node.ids.tolist(), "prompt_token_ids": node.prompt().tolist()}


def _tokens(wanted: ParsedRequest, node: CallNode, name: str) -> dict[str, Any]:
    assert node.ids is not None and node.logprobs is not None
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": node.finish,
        "token_ids": node.ids.tolist(),
        "logprobs": None,
        "weight_versions": [
            {
                "version": str(span.label),
                "start": span.start,
                "end": span.end,
            }
            for span in node.spans
        ],
    }
    if wanted.logprobs:
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
        "prompt_token_ids": node.prompt().tolist() if wanted.token_ids else None,
        "usage": _usage(node),
    }


def _chunked(wanted: ParsedRequest, choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a finished answer into the choices of a stream."""
    extra: dict[str, Any] = {
        key: choice[key] for key in ("token_ids", "prompt_token_ids") if key in choice
    }
    last: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": choice["finish_reason"],
    }
    if wanted.kind == "text":
        complete: dict[str, Any] = {
            "index": 0,
            "text": choice["text"],
            "logprobs": choice["logprobs"],
        }
        return [
            {
                **complete,
                "finish_reason": None,
                **extra,
            },
            {**last, "text": ""},
        ]
    message = choice["message"]
    delta: dict[str, Any] = {"content": message["content"]}
    if "reasoning_content" in message:
        delta["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    unfinished: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": None,
    }
    return [
        {
            **unfinished,
            "delta": {
                "role": "assistant",
                "content": "",
                "refusal": None,
            },
        },
        {
            **unfinished,
            "delta": delta,
            "logprobs": choice["logprobs"],
            **extra,
        },
        {**last, "delta": {}},
    ]
