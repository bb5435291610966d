"""Translate Anthropic's /v1/messages to a chat completion and back.  Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from actors.gateway.call_tree import Message
from actors.gateway.refusals import build_refusal, take
from asyncrl.records.jsonl import JsonObject

Options = Mapping[str, Any]

# keys that are translated to others, or have no effect on an answer
QUIET = ("system", "stop_sequences", "tool_choice", "thinking", "output_config")


def to_chat(body: Options) -> JsonObject:
    """Translate a request to one for a chat completion.  Raises CallRefused."""
    request = {key: value for key, value in body.items() if key not in QUIET}
    messages: list[Message] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": _join_blocks("system", system)})
    messages_in_body = body.get("messages")
    if not isinstance(messages_in_body, list) or not messages_in_body:
        raise build_refusal("messages", "give a list of at least one message")
    for index, message in enumerate(messages_in_body):
        messages += _convert_message(f"messages[{index}]", message)
    request["messages"] = messages
    request["max_tokens"] = body.get("max_tokens")
    request["stop"] = body.get("stop_sequences")
    if isinstance(body.get("thinking"), dict) and body["thinking"].get("type") != "disabled":
        request["thinking"] = body["thinking"]  # listed among the ignored options
    if isinstance(request.get("metadata"), dict):
        request["metadata"] = {k: v for k, v in request["metadata"].items() if k == "asyncrl"}
    choice = body.get("tool_choice")
    if choice is not None:
        kind = choice.get("type") if isinstance(choice, dict) else None
        if not isinstance(kind, str):
            raise build_refusal("tool_choice", "give an object with a type")
        request["tool_choice"] = kind if kind in ("auto", "none") else choice
    for key, value in take(body, "output_config", dict).items():
        request[f"output_config.{key}"] = value
    converted = convert_tools(body, "custom", "input_schema")
    for tool in converted["tools"]:
        tool["function"].setdefault("parameters", {})
    return request | converted


def convert_tools(body: Options, own: str, schema: str) -> JsonObject:
    """Convert the tools of a request.

    Tools of another type than `own` run at the provider: they are ignored and listed.

    schema: the key of a tool's parameters
    """
    converted: JsonObject = {"tools": []}
    for index, tool in enumerate(take(body, "tools", list)):
        kind = tool.get("type", own) if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise build_refusal(f"tools[{index}]", "give an object with a type")
        if kind != own:
            converted[f"tools.{kind}"] = True
            continue
        keys = {"name": "name", "description": "description", "parameters": schema}
        function = {name: tool[key] for name, key in keys.items() if key in tool}
        converted["tools"].append({"type": "function", "function": function})
    return converted


def _join_blocks(location: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise build_refusal(location, "give text, or a list of text blocks")
    for block in content:
        if not isinstance(block, dict) or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            raise build_refusal(location, f"a block of type {kind!r}: only text is supported")
    return "".join(block["text"] for block in content)


def _convert_message(location: str, message: Any) -> Iterator[Message]:
    """Convert a message: an answer with calls, or tool results and the user's text."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise build_refusal(location, "give an object with the role user or assistant")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise build_refusal(location, "content: give text, or a list of blocks")
    text: list[Any] = []
    calls = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input", {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _join_blocks(location, block.get("content") or "")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind not in ("thinking", "redacted_thinking"):  # restored with the sampled answer
            text.append(block)
    joined = _join_blocks(location, text)
    if role == "assistant":
        yield {"role": role, "content": joined, **({"tool_calls": calls} if calls else {})}
    elif text:
        yield {"role": role, "content": joined}


def build_response(
    message: Message, finish: str, usage: Mapping[str, int], head: Options, stop: str
) -> JsonObject:
    """Build the body of a response.

    head: id and model
    stop: the stop string that ended the answer, or ""
    """
    blocks: list[JsonObject] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": head["id"],
        "type": "message",
        "role": "assistant",
        "model": head["model"],
        "content": blocks,
        "stop_reason": "stop_sequence" if stop else reasons.get(finish, "end_turn"),
        "stop_sequence": stop or None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def split_events(body: Options) -> list[JsonObject]:
    """Split a response into the events of a stream."""
    start = {**body, "content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = {**body["usage"], "output_tokens": 0}
    blocks: list[JsonObject] = []
    for index, block in enumerate(body["content"]):
        kind = block["type"]
        if kind == "tool_use":
            empty: JsonObject = {**block, "input": {}}
            text = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            empty = {**block, kind: ""}
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        blocks += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ending = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    return [
        {"type": "message_start", "message": start},
        *blocks,
        {"type": "message_delta", "delta": ending, "usage": body["usage"]},
        {"type": "message_stop"},
    ]
