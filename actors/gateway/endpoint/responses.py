"""Translate OpenAI's /v1/responses to a chat completion and back.  Pure.

Nothing is stored for a later request: each one must hold the whole input, as agents send it with
`store` off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.gateway.call_tree import Message
from actors.gateway.chat import read_text
from actors.gateway.endpoint.anthropic import convert_tools
from actors.gateway.refusals import build_refusal, take
from asyncrl.records.jsonl import JsonObject

TAKEN = ("input", "instructions", "tools", "max_output_tokens", "text", "tool_choice", "messages")
STATE = ("background", "conversation", "previous_response_id", "prompt")
QUIET = ("include", "truncation", *STATE)  # keys that have no effect on an answer


def to_chat(body: Mapping[str, Any]) -> JsonObject:
    """Translate a request to one for a chat completion.  Raises CallRefused."""
    for name in STATE:
        if body.get(name):
            reason = "nothing is stored between requests: send the whole input"
            raise build_refusal(name, reason, "unsupported_parameter")
    if body.get("truncation") not in (None, "disabled"):
        raise build_refusal("truncation", "shorten the input yourself", "unsupported_parameter")
    request = {key: value for key, value in body.items() if key not in (*TAKEN, *QUIET)}
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise build_refusal("input", "give text, or a list of at least one item")
    for index, item in enumerate(items):
        location = f"input[{index}]"
        # the text and the calls of an answer are separate items that become one message
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and isinstance(item.get("role"), str):
            content = read_text(location, item.get("content"))
            messages.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1] = {
                **messages[-1],
                "tool_calls": [*messages[-1].get("tool_calls", ()), call],
            }
        elif kind == "function_call_output":
            result = read_text(location, item.get("output"))
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": result}
            )
        elif kind != "reasoning":  # restored with the sampled answer
            raise build_refusal(location, f"an item of type {kind!r} is not supported")
    request["messages"] = messages
    request["max_tokens"] = body.get("max_output_tokens")
    request["text.format"] = take(body, "text", dict).get("format")
    request["tool_choice"] = body.get("tool_choice")
    return request | convert_tools(body, "function", "parameters")


def build_response(
    message: Message, finish: str, usage: Mapping[str, int], head: Mapping[str, Any]
) -> JsonObject:
    """Build the body of a response.  head: id, model and created."""
    name = head["id"].partition("_")[2]
    output: list[JsonObject] = []
    if thought := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thought}
        output.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [part]})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        text = message["content"] or ""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        output.append(
            {
                "id": f"msg_{name}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for index, call in enumerate(calls):
        output.append(
            {
                "id": f"fc_{name}_{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    cut = finish == "length"
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": head["model"],
        "output": output,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def split_events(body: Mapping[str, Any]) -> list[JsonObject]:
    """Split a response into the events of a stream."""
    unfinished = {**body, "status": "in_progress", "output": [], "incomplete_details": None}
    unfinished["usage"] = None
    events: list[JsonObject] = [
        {"type": "response.created", "response": unfinished},
        {"type": "response.in_progress", "response": unfinished},
    ]
    for index, item in enumerate(body["output"]):
        location = {"output_index": index, "item_id": item["id"]}
        empty = {
            **item,
            "status": "in_progress",
            **({"arguments": ""} if item["type"] == "function_call" else {"content": []}),
        }
        events.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        if item["type"] == "function_call":
            text, name = item["arguments"], item["name"]
            kind = "response.function_call_arguments"
            events += [
                {"type": f"{kind}.delta", **location, "delta": text},
                {"type": f"{kind}.done", **location, "arguments": text, "name": name},
            ]
        else:
            location["content_index"] = 0
            part = item["content"][0]  # the only one of a message or a thought
            kind, text = f"response.{part['type']}", part["text"]
            logprobs: JsonObject = {"logprobs": []} if part["type"] == "output_text" else {}
            added = {**part, "text": ""}
            events += [
                {"type": "response.content_part.added", **location, "part": added},
                {"type": f"{kind}.delta", **location, "delta": text, **logprobs},
                {"type": f"{kind}.done", **location, "text": text, **logprobs},
                {"type": "response.content_part.done", **location, "part": part},
            ]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{body['status']}", "response": body})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]
