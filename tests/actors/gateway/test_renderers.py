"""The token route with its real client, `renderers` as verifiers uses it: the renderer of Qwen3
writes the prompt and reads the answer, the next turn is bridged, no id is encoded twice."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from gateway_kit import CHATML, Served, tokenizer
from gateway_web_kit import opened  # noqa: F401
from renderers import create_renderer
from renderers.client import OverlongPromptError, generate
from renderers.configs import DefaultRendererConfig, Qwen3RendererConfig

from actors.gateway.sessions import Session, SessionLimits

MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>"]
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
CALL = ["<tool_call>", *'\n{"name": "add", "arguments": {"a": 1}}\n', "</tool_call>"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    tokens = tokenizer(CHATML)
    tokens.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokens.add_tokens(MARKS)
    made = Served(tokens=tokens)
    yield made
    made.close()


@pytest.fixture()
def served(shared: Served) -> Iterator[Served]:
    yield shared
    shared.service.limits = SessionLimits(max_calls=0, rows=0)
    shared.service.say = lambda call: f"answer {call.number}"


def asked(served: Served, opened: Session, config: Any, **more: Any) -> dict[str, Any]:
    """One call, by a client with the session's URL and key and nothing else."""

    async def ask() -> dict[str, Any]:
        base = f"{served.url}/s/{opened.name}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=opened.api_key) as client:
            renderer = create_renderer(served.service.tokenizer, config)
            messages: Any = [{"role": "user", "content": "go"}]
            return await generate(
                client=client, renderer=renderer, messages=messages, model="policy", **more
            )

    return asyncio.run(ask())


def test_a_tool_call_and_a_bridged_turn_are_one_row(served: Served, opened: Session) -> None:
    served.service.say = lambda call: [*"so ", *CALL] if not call.number else "three"
    tools: Any = [TOOL]
    first = asked(served, opened, Qwen3RendererConfig(), tools=tools)
    nodes = opened.tree.nodes
    assert first["prompt_ids"] == nodes[0].prompt_ids.tolist()
    assert first["completion_ids"] == nodes[0].ids.tolist()
    np.testing.assert_array_equal(np.float32(first["completion_logprobs"]), nodes[0].logprobs)
    (call,) = first["tool_calls"]
    assert (call.name, call.arguments, first["finish_reason"]) == ("add", {"a": 1}, "tool_calls")
    assert first["request_id"] == f"cmpl-{opened.name}-0"
    assert first["usage"]["completion_tokens"] == len(first["completion_ids"])
    said: Any = [{"role": "tool", "content": "3", "name": "add"}]
    renderer = create_renderer(served.service.tokenizer, Qwen3RendererConfig())
    bridged = renderer.bridge_to_next_turn(
        first["prompt_ids"], first["completion_ids"], said, tools=tools
    )
    assert bridged is not None
    more = {"prompt_ids": bridged.token_ids, "prompt_attribution": bridged, "tools": tools}
    second = asked(served, opened, Qwen3RendererConfig(), **more)
    assert second["content"] == "three" and second["finish_reason"] == "stop"
    assert len(opened.build_training_rows()) == 1 and opened.tree.forks == {}
    assert opened.aside == 0


def test_the_client_knows_the_context_before_it_asks(served: Served) -> None:
    served.service.limits = SessionLimits(max_calls=0, rows=0, context=10)
    opened = served.do(served.service.open)
    with pytest.raises(OverlongPromptError, match="exceeds maximum context length \\(10\\)"):
        asked(served, opened, Qwen3RendererConfig())
    assert opened.calls == 0


def test_stop_ids_of_another_model_are_refused_by_name(served: Served, opened: Session) -> None:
    """A renderer whose answers end elsewhere would wait for a token that ends none here."""
    made = asked(served, opened, DefaultRendererConfig())  # of the two stop ids, one
    assert made["finish_reason"] == "stop"
    tokens = served.service.tokenizer
    foreign = tokens.convert_tokens_to_ids("<|eot_id|>")
    tokens.eos_token = "<|eot_id|>"
    try:
        with pytest.raises(openai.BadRequestError) as caught:
            asked(served, opened, DefaultRendererConfig())
    finally:
        tokens.eos_token = "<|endoftext|>"
    error = caught.value
    assert error.param == "stop_token_ids" and f"[{foreign}] do not end" in error.message
    assert "generator.stop" in error.message and opened.calls == 1


def test_sampling_of_its_own_is_ignored_and_prompt_ids_come_back(
    served: Served, opened: Session
) -> None:
    params = {"temperature": 0.3, "max_tokens": 3, "return_token_ids": True}
    more = {"sampling_params": params, "cache_salt": "a", "priority": 1}
    made = asked(served, opened, Qwen3RendererConfig(), **more)
    node = opened.tree.nodes[0]
    assert made["prompt_ids"] == node.prompt_ids.tolist() and made["finish_reason"] == "length"
    assert len(made["completion_ids"]) == 3 and made["sampling_mask"] is None
