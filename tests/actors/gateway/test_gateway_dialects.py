"""/v1/messages and /v1/responses with the clients of their makers: the same core, other words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from gateway_kit import Served
from gateway_web_kit import client, post

from actors.gateway.call_tree import chain_digest
from actors.gateway.chat import parse_hermes
from actors.gateway.endpoint import responses
from actors.gateway.endpoint.anthropic import build_response, split_events, to_chat
from actors.gateway.endpoint.requests import parse_ids
from actors.gateway.endpoint.web import OpenedSession
from actors.gateway.refusals import CallRefused

CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
BOTH = f"<think>hm</think>so {CALL}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    made = Served(parser=parse_hermes)
    yield made
    made.close()


@pytest.fixture(scope="module")
def refusing() -> Iterator[Served]:
    made = Served(parser=parse_hermes, forced="refuse")
    yield made
    made.close()


@pytest.fixture
def served(shared: Served) -> Served:
    shared.service.say = lambda call: BOTH if not call.number else f"answer {call.number}"
    return shared


def claude(served: Served) -> tuple[anthropic.Anthropic, OpenedSession]:
    opened = served.do(served.service.open)
    base = f"{served.url}/s/{opened.session.name}"
    return anthropic.Anthropic(base_url=base, api_key=opened.key), opened


CHAT_TOOL = {"type": "function", "function": {"name": "add"}}
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
ASK: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 150,
    "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
    "tools": [TOOL],
}


def test_messages_with_tools_go_on_in_one_row(served: Served) -> None:
    talk, opened = claude(served)
    said: list[Any] = [{"role": "user", "content": "go"}]
    first = talk.messages.create(messages=said, **ASK)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    # type: ignore[union-attr]
    assert first.content[1].text == "so" and first.content[2].input == {"a": 1, "b": 2}
    assert first.stop_reason == "tool_use" and first.id == f"msg_{opened.session.name}-0"
    assert first.usage.output_tokens == len(BOTH) + 1 and first.usage.input_tokens > 0
    # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "3"}
    more = {"role": "user", "content": [result, {"type": "text", "text": "and?"}]}
    second = talk.messages.create(
        messages=[*said, {"role": "assistant", "content": first.content}, more], **ASK
    )
    # type: ignore[union-attr]
    assert second.content[0].text == "answer 1" and second.stop_reason == "end_turn"
    assert len(opened.session.build_training_rows()) == 1 and opened.session.forks == {}
    text = served.service.tokenizer.decode(opened.session.tree.nodes[1].build_prompt())
    assert f"{BOTH}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\nand?" in text
    assert text.startswith("<|im_start|>system\nbe<|im_end|>")


def test_a_stream_of_messages_adds_up(served: Served) -> None:
    talk, _ = claude(served)
    with talk.messages.stream(messages=[{"role": "user", "content": "go"}], **ASK) as stream:
        whole = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    # type: ignore[union-attr]
    assert whole.content[0].thinking == "hm" and whole.content[2].input == {"a": 1, "b": 2}
    assert whole.stop_reason == "tool_use" and whole.usage.output_tokens == len(BOTH) + 1


def test_a_streamed_chat_keeps_thinking_and_calls_apart(served: Served) -> None:
    talk, _ = client(served)
    asked: Any = {"messages": [{"role": "user", "content": "go"}], "tools": [CHAT_TOOL]}
    chunks = list(talk.chat.completions.create(model="policy", stream=True, **asked))
    first, whole, last = (chunk.choices[0] for chunk in chunks)
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    delta = whole.delta.model_dump()
    assert (delta["reasoning_content"], delta["content"]) == ("hm", "so")
    (call,) = delta["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "add")
    assert [choice.finish_reason for choice in (first, whole, last)] == [None, None, "tool_calls"]
    served.service.say = lambda call: "plain"
    chunks = list(talk.chat.completions.create(model="policy", stream=True, **asked))
    plain = chunks[1].choices[0].delta.model_dump()
    assert plain["content"] == "plain" and "reasoning_content" not in plain


def test_the_events_of_a_stream_have_anthropics_names() -> None:
    usage = {"input_tokens": 3, "output_tokens": 5}
    blocks = [{"type": "text", "text": "so"}, {"type": "tool_use", "id": "c", "input": {"a": 1}}]
    body = {"id": "m", "type": "message", "content": blocks, "usage": usage}
    ended = {"stop_reason": "tool_use", "stop_sequence": None}
    start, *middle, delta, stop = split_events(body | ended)
    first = {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    assert start == {"type": "message_start", "message": body | ended | first}
    assert [(event["type"], event["index"]) for event in middle] == [
        (f"content_block_{part}", n) for n in (0, 1) for part in ("start", "delta", "stop")
    ]
    assert middle[0]["content_block"] == {"type": "text", "text": ""}
    assert middle[1]["delta"] == {"type": "text_delta", "text": "so"}
    assert middle[3]["content_block"] == {"type": "tool_use", "id": "c", "input": {}}
    assert middle[4]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1}'}
    assert delta == {"type": "message_delta", "delta": ended, "usage": usage}
    assert stop == {"type": "message_stop"}


def test_a_conversation_of_messages_becomes_a_chat() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "hm"}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "3"}],
    }
    given = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2"}]},
    ]
    chat = to_chat(
        {
            "system": "first",
            "messages": given,
            "max_tokens": 9,
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u", "asyncrl": {"k": 1}},
            "thinking": {"type": "disabled"},
            "tool_choice": {"type": "auto"},
            "output_config": {"effort": "low"},
            "temperature": 0.5,
        }
    )
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert chat["messages"] == [
        {"role": "system", "content": "first"},
        {"role": "system", "content": "be"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
    ]
    expected = {"max_tokens": 9, "stop": ["x"], "metadata": {"asyncrl": {"k": 1}}}
    expected |= {"tool_choice": "auto", "output_config.effort": "low", "temperature": 0.5}
    assert {key: chat[key] for key in expected} == expected and chat["tools"] == []
    assert "thinking" not in chat and "output_config" not in chat
    asked = {"messages": given[:2], "thinking": {"type": "enabled"}, "tool_choice": {"type": "any"}}
    chat = to_chat(asked)
    assert chat["thinking"] == {"type": "enabled"} and chat["tool_choice"] == {"type": "any"}


def test_an_answer_is_a_message_of_blocks() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    said = {"content": "", "reasoning_content": "hm"}
    said |= {"tool_calls": [{"id": "c1", "function": function}]}
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    head = {"id": "m1", "model": "policy"}
    assert build_response(said, "tool_calls", usage, head, "") == {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 5},
    }
    for finish, stop, reason in (
        ("length", "", "max_tokens"),
        ("stop", "", "end_turn"),
        ("stop", "x", "stop_sequence"),
    ):
        found = build_response({"content": None}, finish, usage, head, stop)
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop or None)
        assert found["content"] == [{"type": "text", "text": ""}]


def test_tools_of_messages_become_functions() -> None:
    schema = {"type": "object"}
    given = [
        {"name": "add", "description": "adds", "input_schema": schema},
        {"name": "bare", "type": "custom"},
        {"name": "web_search", "type": "web_search_1"},
    ]
    chat = to_chat(
        {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}], "tools": given}
    )
    functions = [tool["function"] for tool in chat["tools"]]
    assert functions == [
        {"name": "add", "description": "adds", "parameters": schema},
        {"name": "bare", "parameters": {}},
    ]
    assert {tool["type"] for tool in chat["tools"]} == {"function"}
    assert chat["tools.web_search_1"] is True, "named, as it is ignored"


def test_how_messages_end(served: Served) -> None:
    talk, _ = claude(served)
    served.service.say = lambda call: "one two three"
    said: list[Any] = [{"role": "user", "content": "go"}]
    cut = talk.messages.create(model="policy", max_tokens=3, messages=said)
    # type: ignore[union-attr]
    assert cut.stop_reason == "max_tokens" and cut.content[0].text == "one"
    stopped = talk.messages.create(
        model="policy", max_tokens=99, messages=said, stop_sequences=[" two"]
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == " two"
    counted = talk.messages.count_tokens(model="policy", messages=said)
    assert counted.input_tokens == cut.usage.input_tokens


@pytest.mark.parametrize(
    "more, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{}]}, "tools"),
        ({"output_config": "json"}, "output_config"),
        ({"tools": {}}, None),
    ],
)
def test_messages_that_are_refused(more: dict[str, Any], param: str | None, served: Served) -> None:
    _, opened = claude(served)
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
    said = post(served, opened, "/v1/messages", {**body, **more})
    if param is None:
        assert said.status_code == 200
        return
    assert said.status_code == 400 and said.json()["type"] == "error"
    assert said.json()["error"]["param"] == param and opened.session.calls == 0


def test_what_a_provider_runs_is_left_out_by_name(served: Served) -> None:
    _, opened = claude(served)
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
    more = {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "metadata": {"user_id": "me"},
    }
    said = post(served, opened, "/v1/messages", {**body, **more})
    assert said.headers["x-asyncrl-ignored"] == "thinking, tools.web_search_20250305"
    body = {"model": "policy", "input": "go", "tools": [{"type": "web_search"}], "store": False}
    said = post(served, opened, "/v1/responses", body)
    assert said.headers["x-asyncrl-ignored"] == "tools.web_search"


ANY_JSON = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    "route, name, more",
    [
        ("messages", "tool_choice", {"tool_choice": {"type": "any"}}),
        ("messages", "tool_choice", {"tool_choice": {"type": "tool", "name": "add"}}),
        ("messages", "output_format", {"output_format": ANY_JSON}),
        ("messages", "output_config.format", {"output_config": {"format": ANY_JSON}}),
        ("responses", "tool_choice", {"tool_choice": "required"}),
        ("responses", "tool_choice", {"tool_choice": {"type": "function", "name": "add"}}),
        ("responses", "text.format", {"text": {"format": ANY_JSON}}),
    ],
)
def test_a_forced_answer_is_ignored_by_name_or_refused(
    route: str, name: str, more: dict[str, Any], served: Served, refusing: Served
) -> None:
    """The same prompt as without it, tools and all."""
    go: dict[str, Any] = {"model": "policy"}
    if route == "messages":
        go |= {"max_tokens": 150, "tools": [TOOL], "messages": [{"role": "user", "content": "go"}]}
    else:
        go |= {"input": "go", "tools": [FUNCTION]}
    _, opened = claude(served)
    for body in (go, go | more):
        said = post(served, opened, f"/v1/{route}", body)
        assert said.status_code == 200
        assert said.headers.get("x-asyncrl-ignored") == (name if body != go else None)
    plain, forced = opened.session.tree.nodes
    assert (
        plain.build_prompt().tolist() == forced.build_prompt().tolist()
        and plain.tools == forced.tools
    )
    _, opened = claude(refusing)
    said = post(refusing, opened, f"/v1/{route}", go | more)
    assert said.status_code == 400 and said.json()["error"]["param"] == name
    assert opened.session.calls == 0
    unforced = {"text": {"format": {"type": "text"}}} if route == "responses" else {}
    assert post(refusing, opened, f"/v1/{route}", go | unforced).status_code == 200


def test_errors_of_messages_reach_their_client(served: Served) -> None:
    talk, _ = claude(served)
    with pytest.raises(anthropic.AuthenticationError):
        talk.with_options(api_key="other").messages.create(messages=[], **ASK)
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        talk.messages.create(messages=[], **ASK)


FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object"},
    "strict": False,
}


def test_responses_with_tools_go_on_in_one_row(served: Served) -> None:
    talk, opened = client(served)
    said: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    # type: ignore[list-item]
    first = talk.responses.create(model="policy", instructions="be", input=said, tools=[FUNCTION])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[2]
    assert first.output_text == "so" and call.type == "function_call" and call.name == "add"
    assert json.loads(call.arguments) == {"a": 1, "b": 2} and first.status == "completed"
    assert first.usage and first.usage.output_tokens == len(BOTH) + 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    said += [item.to_dict() for item in first.output]
    said.append(result)
    # type: ignore[list-item]
    second = talk.responses.create(model="policy", instructions="be", input=said, tools=[FUNCTION])
    assert second.output_text == "answer 1" and second.id == f"resp_{opened.session.name}-1"
    assert len(opened.session.build_training_rows()) == 1 and opened.session.forks == {}
    # its id is good for a reward
    body = {"reward": 1.0, "calls": {second.id: 0.5}}
    assert post(served, opened, "/reward", body).status_code == 200


def test_a_stream_of_responses_adds_up(served: Served) -> None:
    talk, _ = client(served)
    with talk.responses.stream(model="policy", input="go") as stream:
        events = list(stream)
        whole = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "so"
    text = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(text) == "so"
    assert [x.text for x in events if x.type == "response.output_text.done"] == ["so"]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_that_was_cut_says_so(served: Served) -> None:
    talk, _ = client(served)
    served.service.say = lambda call: "one two three"
    cut = talk.responses.create(model="policy", input="go", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.output_text == "one"
    assert cut.incomplete_details and cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    "more, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": 3}, "text"),
        ({"tools": [3]}, "tools"),
        ({"tools": 3}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ],
)
def test_responses_that_are_refused(more: dict[str, Any], param: str, served: Served) -> None:
    talk, opened = client(served)
    with pytest.raises(openai.BadRequestError) as caught:
        talk.responses.create(model="policy", input="go", extra_body=more)
    assert caught.value.param == param and opened.session.calls == 0


def test_an_answers_items_are_one_message_and_thinking_is_none_of_it() -> None:
    items = [
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]
    made = responses.to_chat({"input": items})["messages"]
    assert [message["role"] for message in made] == ["assistant", "tool", "assistant"]
    calls = [{"id": each, "function": {"name": "f", "arguments": {}}} for each in "12"]
    ours = {"role": "assistant", "content": "so", "tool_calls": calls}
    assert chain_digest(b"", made[0]) == chain_digest(b"", ours)
    with pytest.raises(CallRefused):
        responses.to_chat({"input": ["x"]})


def test_an_answer_is_a_response_of_items() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    said = {"content": "so", "reasoning_content": "hm"}
    said |= {"tool_calls": [{"id": "c1", "function": function}]}
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    head = {"id": "resp_7", "model": "policy", "created": 9}
    body = responses.build_response(said, "stop", usage, head)
    thought, text, call = body.pop("output")
    assert thought == {
        "id": "rs_7",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    part = {"type": "output_text", "text": "so", "annotations": [], "logprobs": []}
    assert text == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    assert call == {
        "id": "fc_7_0",
        "type": "function_call",
        "status": "completed",
        "call_id": "c1",
        "name": "add",
        "arguments": '{"a": 1}',
    }
    assert body == {
        "id": "resp_7",
        "object": "response",
        "created_at": 9,
        "status": "completed",
        "incomplete_details": None,
        "error": None,
        "model": "policy",
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 8,
        },
    }
    cut = responses.build_response({"content": None}, "length", usage, head)
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert cut["output"][0]["content"][0]["text"] == ""
    kinds = [event["type"] for event in responses.split_events(body | {"output": [thought, call]})]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    cut_events = responses.split_events(cut)
    assert [event["sequence_number"] for event in cut_events] == list(range(len(cut_events)))
    first, *_, added, last_part, done, last = cut_events
    assert first["response"]["status"] == "in_progress" and first["response"]["output"] == []
    assert first["response"]["usage"] is None and last == {
        "type": "response.incomplete",
        "response": cut,
        "sequence_number": len(cut_events) - 1,
    }
    assert done["item"] == cut["output"][0] and last_part["part"]["type"] == "output_text"
    assert added["logprobs"] == [] and added["item_id"] == "msg_7" and added["content_index"] == 0


@pytest.mark.parametrize(
    ("param", "given", "why"),
    [
        ("prompt", [], "prompt: give text or a list of token ids"),
        ("prompt", None, "prompt: give text or a list of token ids"),
        ("token_ids", "text", "token_ids: give a list of token ids"),
        ("token_ids", [], "token_ids: give a list of token ids"),
        ("token_ids", [1, 9], "token_ids: give token ids in [0, 9)"),
        ("token_ids", [-1], "token_ids: give token ids in [0, 9)"),
        ("token_ids", [True], "token_ids: give token ids in [0, 9)"),
    ],
)
def test_token_ids_that_are_none_are_refused(param: str, given: Any, why: str) -> None:
    with pytest.raises(CallRefused) as refused:
        parse_ids(param, given, 9)
    assert str(refused.value) == why and refused.value.param == param
    assert parse_ids(param, [0, 8], 9).tolist() == [0, 8]
    assert parse_ids(param, [(1 << 31) - 1], 0).dtype == "int32"
