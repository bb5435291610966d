"""/v1/messages and /v1/responses with the clients of their makers: the same core, other words."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from gateway_kit import Served
from gateway_web_kit import client, post

from actors.gateway.chat import parse_hermes
from actors.gateway.sessions import Session

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


def claude(served: Served) -> tuple[anthropic.Anthropic, Session]:
    opened = served.do(served.service.open)
    base = f"{served.url}/s/{opened.name}"
    return anthropic.Anthropic(base_url=base, api_key=opened.api_key), opened


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
    assert first.content[1].text == "so" and first.content[2].input == {"a": 1, "b": 2}
    assert first.stop_reason == "tool_use" and first.id == f"msg_{opened.name}-0"
    assert first.usage.output_tokens == len(BOTH) + 1 and first.usage.input_tokens > 0
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "3"}
    more = {"role": "user", "content": [result, {"type": "text", "text": "and?"}]}
    second = talk.messages.create(
        messages=[*said, {"role": "assistant", "content": first.content}, more], **ASK
    )
    assert second.content[0].text == "answer 1" and second.stop_reason == "end_turn"
    assert len(opened.build_training_rows()) == 1 and opened.tree.forks == {}
    text = served.service.tokenizer.decode(opened.tree.nodes[1].prompt_ids)
    assert f"{BOTH}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\nand?" in text
    assert text.startswith("<|im_start|>system\nbe<|im_end|>")
    # a stream of messages adds up
    talk, _ = claude(served)
    with talk.messages.stream(messages=[{"role": "user", "content": "go"}], **ASK) as stream:
        whole = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].thinking == "hm" and whole.content[2].input == {"a": 1, "b": 2}
    assert whole.stop_reason == "tool_use" and whole.usage.output_tokens == len(BOTH) + 1


def test_how_messages_and_responses_end(served: Served) -> None:
    talk, _ = claude(served)
    served.service.say = lambda call: "one two three"
    said: list[Any] = [{"role": "user", "content": "go"}]
    cut = talk.messages.create(model="policy", max_tokens=3, messages=said)
    assert cut.stop_reason == "max_tokens" and cut.content[0].text == "one"
    stopped = talk.messages.create(
        model="policy", max_tokens=99, messages=said, stop_sequences=[" two"]
    )
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == " two"
    counted = talk.messages.count_tokens(model="policy", messages=said)
    assert counted.input_tokens == cut.usage.input_tokens
    response = client(served)[0].responses.create(model="policy", input="go", max_output_tokens=3)
    assert response.status == "incomplete" and response.output_text == "one"
    assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"


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
    plain, forced = opened.tree.nodes
    assert plain.prompt_ids.tolist() == forced.prompt_ids.tolist()
    assert plain.tools == forced.tools
    _, opened = claude(refusing)
    said = post(refusing, opened, f"/v1/{route}", go | more)
    assert said.status_code == 400 and said.json()["error"]["param"] == name
    assert opened.calls == 0
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
    first = talk.responses.create(model="policy", instructions="be", input=said, tools=[FUNCTION])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[2]
    assert first.output_text == "so" and call.type == "function_call" and call.name == "add"
    assert json.loads(call.arguments) == {"a": 1, "b": 2} and first.status == "completed"
    assert first.usage and first.usage.output_tokens == len(BOTH) + 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    said += [item.to_dict() for item in first.output]
    said.append(result)
    second = talk.responses.create(model="policy", instructions="be", input=said, tools=[FUNCTION])
    assert second.output_text == "answer 1" and second.id == f"resp_{opened.name}-1"
    assert len(opened.build_training_rows()) == 1 and opened.tree.forks == {}
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
