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
    usage = count_usage(len(node.prompt_ids), len(node.ids))
    if parsed.kind == "ids":
        return _encode(_build_tokens_body(parsed, node, name) | {"usage": usage})
    choice = _build_choice(parsed, node, decode)
    kind = "text_completion"
    if parsed.kind == "chat":
        kind = "chat.completion" + ".chunk" * parsed.stream
    head = {"id": name, "object": kind, "created": created, "model": parsed.model}
    if parsed.kind in ("messages", "responses"):
        completion = (choice["message"], choice["finish_reason"], usage, head)
        if parsed.kind == "messages":
            sampled = decode(node.ids.tolist())
            stop = next((stop for stop in parsed.stop if stop in sampled), "")
            body = anthropic.build_response(*completion, stop)
            split = anthropic.split_events
        else:
            body = responses.build_response(*completion)
            split = responses.split_events
        if not parsed.stream:
            return _encode(body)
        return b"".join(
            f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
            for event in split(body)
        )
    choice |= _build_versions(node)
    if parsed.token_ids:
        choice["token_ids"] = node.ids.tolist()
        choice["prompt_token_ids"] = node.prompt_ids.tolist()
    if not parsed.stream:
        return _encode({**head, "choices": [choice], "usage": usage})
    chunks = [{**head, "choices": [part]} for part in _split_choice(choice)]
    if parsed.usage:
        chunks.append({**head, "choices": [], "usage": usage})
    return b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks) + DONE


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


def _build_choice(parsed: ParsedRequest, node: CallNode, decode: Text) -> JsonObject:
    """Build the choice of a text completion, or of a chat completion in the form of OpenAI."""
    answer, finish = node.answer, str(node.finish)
    assert answer is not None
    logprobs: JsonObject | None = None
    tokens = [decode([token]) for token in node.ids.tolist()] if parsed.logprobs else []
    if parsed.kind == "text":
        if parsed.logprobs:
            logprobs = build_columns(tokens, node.logprobs.tolist())
        content: JsonObject = {"text": answer["content"]}
    else:
        message: Message = {"role": "assistant", "content": answer["content"], "refusal": None}
        content = {"message": message}
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
            finish = "tool_calls" if finish == "stop" else finish
        if parsed.logprobs:
            pairs = zip(tokens, node.logprobs.tolist(), strict=True)
            described = [describe_token(*pair) | {"top_logprobs": []} for pair in pairs]
            logprobs = {"content": described, "refusal": None}
    return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}


def build_columns(tokens: list[str], logprobs: list[Any], likely: Any = None) -> JsonObject:
    """Build the log-probabilities of a text completion, likely: the most likely tokens."""
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": likely,
        "text_offset": [sum(map(len, tokens[:index])) for index in range(len(tokens))],
    }


def _build_tokens_body(parsed: ParsedRequest, node: CallNode, name: str) -> JsonObject:
    tokens = node.ids.tolist()
    content = [
        # as vLLM writes it
        {"token": f"token_id:{token}", "token_id": token, "logprob": value, "top_logprobs": []}
        for token, value in zip(tokens, node.logprobs.tolist(), strict=True)
    ]
    choice: JsonObject = {
        "index": 0,
        "finish_reason": node.finish,
        "token_ids": tokens,
        "logprobs": {"content": content} if parsed.logprobs else None,
    }
    return {
        "request_id": name,
        "choices": [choice | _build_versions(node)],
        "prompt_token_ids": node.prompt_ids.tolist() if parsed.token_ids else None,
    }


def _split_choice(choice: JsonObject) -> list[JsonObject]:
    """Split a finished answer into the choices of a stream."""
    beginning = {"index": 0, "logprobs": None, "finish_reason": None}
    ending = {**beginning, "finish_reason": choice["finish_reason"]}
    ending["weight_versions"] = choice["weight_versions"]
    names = ("token_ids", "prompt_token_ids")
    ids: JsonObject = {name: choice[name] for name in names if name in choice}
    if "text" in choice:
        complete = {name: choice[name] for name in ("index", "text", "logprobs")}
        return [{**complete, "finish_reason": None, **ids}, {**ending, "text": ""}]
    delta = dict(choice["message"])
    del delta["role"], delta["refusal"]
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
        ]
    return [
        {**beginning, "delta": {"role": "assistant", "content": "", "refusal": None}},
        {**beginning, "logprobs": choice["logprobs"], "delta": delta, **ids},
        {**ending, "delta": {}},
    ]
