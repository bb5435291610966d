"""Bodies of requests and replies as they are, without a server.

tests/data/refused_requests.jsonl has a refused body in each line and its whole error, and
tests/data/replies.jsonl what is sent for an answer, byte by byte.  After a change that means other
texts: `python tests/actors/gateway/test_request_parsing.py`, and read what git says of it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_kit import build_policy

from actors.gateway.call_tree import CallNode, canonicalize_arguments
from actors.gateway.endpoint import replies, requests
from actors.gateway.endpoint.requests import PREFIX, ParsedRequest, decode_body, parse_request
from actors.gateway.endpoint.requests import REFUSED as REFUSED_OPTIONS
from actors.gateway.refusals import CallRefused
from asyncrl.contract.messages import SamplingSettings, VersionSpan
from asyncrl.contract.versions import Label

DATA = Path(__file__).resolve().parents[2] / "data"
REFUSED = DATA / "refused_requests.jsonl"
REPLIES = DATA / "replies.jsonl"
RUN = SamplingSettings(max_new_tokens=9, temperature=1.0, top_p=0.5, top_k=7)
GO = [{"role": "user", "content": "go"}]
PLAIN = {"messages": GO}
TOOL = {"type": "function", "function": {"name": "add"}}


def refusal(kind: Any, body: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(CallRefused) as refused:
        parse_request(kind, body, build_policy(**policy), RUN)
    error = refused.value
    parts = {"status": error.status, "code": error.code, "param": error.param}
    return {**parts, "message": str(error)}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def request_of(line: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    return line["kind"], line["body"], line["policy"]


@pytest.mark.parametrize("line", lines(REFUSED), ids=lambda line: f"{line['kind']}-{line['param']}")
def test_a_refused_request_is_told_what_is_wrong(line: dict[str, Any]) -> None:
    assert refusal(*request_of(line)) == {
        key: line[key] for key in ("status", "code", "param", "message")
    }


ONE = "a call has one answer: repeat the request, each one is sampled independently"
OTHER = "the answers would come from another distribution than the one that is trained"
TEXT = "only text is supported"
TURN = "an answer begins a turn; use /v1/completions to continue a text"
KEPT = "only the sampled token's log-probability is kept"
# every option that the policy cannot follow: values without an effect, others, and why not
OPTIONS_REFUSED: dict[str, tuple[list[Any], list[Any], str]] = {
    "n": ([1], [0, 2, True], ONE),
    "best_of": ([0, 1], [2, False], ONE),
    "use_beam_search": ([False], [True, 0], ONE),
    "logit_bias": ([{}], [{"1": 2}], OTHER),
    "frequency_penalty": ([0, 0.0], [1, False], OTHER),
    "presence_penalty": ([0], [1], OTHER),
    "repetition_penalty": ([1, 1.0], [0, True], OTHER),
    "length_penalty": ([1], [0], OTHER),
    "min_p": ([0], [0.5], OTHER),
    "min_tokens": ([0], [1], OTHER),
    "ignore_eos": ([False], [True], OTHER),
    "bad_words": ([[]], [["x"]], OTHER),
    "allowed_token_ids": ([[]], [[1]], OTHER),
    "logits_processors": ([[]], [["x"]], OTHER),
    "thinking_token_budget": ([0], [1], OTHER),
    "functions": ([[]], [[1]], "give `tools`"),
    "function_call": (["auto", "none"], ["f"], "give `tool_choice`"),
    "echo": ([False], [True], "the prompt is not repeated"),
    "suffix": ([""], ["x"], "text is only continued at its end"),
    "top_logprobs": ([0], [1, False], KEPT),
    "prompt_logprobs": ([0], [1], "a prompt is not scored"),
    "logprob_token_ids": ([[]], [[1]], KEPT),
    "include_stop_str_in_output": ([False], [True], "the text ends before the stop string"),
    "truncate_prompt_tokens": ([0], [1], "shorten the history yourself"),
    "continue_final_message": ([False], [True], TURN),
    "add_generation_prompt": ([True], [False, 1], "an answer begins a turn"),
    "chat_template": ([""], ["x"], "the template is the run's"),
    "chat_template_kwargs": ([{}], [{"a": 1}], "the template is the run's"),
    "documents": ([[]], ["x"], "put them into a message"),
    "audio": ([{}], [{"a": 1}], TEXT),
    "content_parts": ([[]], ["x"], TEXT),
    "features": ([[]], ["x"], TEXT),
    "modalities": ([["text"]], [["audio"], []], TEXT),
    "web_search_options": ([{}], [{"a": 1}], "give the search as a tool"),
}


def test_every_option_that_the_policy_cannot_follow_is_listed() -> None:
    assert OPTIONS_REFUSED.keys() == REFUSED_OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS_REFUSED)
def test_an_option_with_an_effect_that_the_policy_lacks_is_refused(name: str) -> None:
    neutral, others, why = OPTIONS_REFUSED[name]
    for value in (None, *neutral):
        assert parsed("chat", {"messages": GO, name: value}) == PLAIN, value
    for value in others:
        found = refusal("chat", {"messages": GO, name: value}, {})
        message = f"{name}: {value!r} is not served: {why}"
        kind = {"status": 400, "code": "unsupported_parameter", "param": name}
        assert found == kind | {"message": message}


def test_forms_without_an_effect_are_served_in_silence() -> None:
    text = {"type": "text"}
    for name, values in {
        "response_format": [text],
        "structured_outputs": [{}],
        "output_format": [{}],
        "tool_choice": ["auto", "none"],
        "guided_json": [{}],
    }.items():
        for value in values:
            assert parsed("chat", {"messages": GO, name: value}, forced="refuse") == PLAIN
        other = {"type": "json"}
        assert parsed("chat", {"messages": GO, name: other})["ignored"] == (name,)
        found = refusal("chat", {"messages": GO, name: other}, {"forced": "refuse"})
        assert (found["code"], found["param"]) == ("unsupported_parameter", name)
        assert "agent.forced = refuse" in found["message"]
    assert parsed("responses", {"input": "go", "text": {"format": text}}) == PLAIN
    assert parsed("messages", {"messages": GO, "output_config": {"format": {}}}) == PLAIN


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b"\xff", b'"x"', b"[" * 100_000])
def test_bytes_that_are_no_object_are_refused(body: bytes) -> None:
    with pytest.raises(CallRefused) as refused:
        decode_body(body)
    error = refused.value
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)
    head, _, why = str(error).partition(": ")
    if body in (b"[]", b'"x"'):
        assert (head, why) == ("the body is not a JSON object", "")
    else:
        assert head == "the body is not JSON" and why
    assert decode_body(b'{"a": 1}') == {"a": 1}


def test_ids_of_calls_and_defaults_of_requests() -> None:
    prefix = {"chat": "chatcmpl-", "text": "cmpl-", "ids": "cmpl-"}
    assert prefix | {"messages": "msg_", "responses": "resp_"} == PREFIX
    defaults = {"ids": None, "max_new_tokens": 0, "stop": (), "ignored": (), "images": {}}
    flags = dict.fromkeys(("aside", "stream", "usage", "logprobs", "token_ids"), False)
    texts = {"messages": [], "tools": [], "text": None, "grammar": ""}
    made = {"kind": "chat", "model": "m", **texts, **flags, **defaults}
    assert asdict(ParsedRequest("chat", "m")) == made
    limited = refusal("text", {"prompt": [9]}, {"vocabulary": 9})
    assert limited["message"] == "prompt: give token ids in [0, 9)"


def test_a_long_grammar_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"forced": "constrain"}
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 900]}}}
    bodies = {
        "response_format": {"response_format": schema},
        "structured_outputs": {"structured_outputs": {"choice": ["x" * 900]}},
        "tools": {"tools": [{"function": {"name": "n" * 900}}], "tool_choice": "required"},
    }
    for key, body in bodies.items():
        monkeypatch.setattr(requests, "MOST_GRAMMAR", 1 << 16)
        request = {"messages": GO, **body}
        grammar = parse_request("chat", request, build_policy(**policy), RUN).grammar
        monkeypatch.setattr(requests, "MOST_GRAMMAR", len(grammar))
        assert parse_request("chat", request, build_policy(**policy), RUN).grammar == grammar
        monkeypatch.setattr(requests, "MOST_GRAMMAR", len(grammar) - 1)
        found = refusal("chat", request, policy)
        assert found["param"] == key and found["message"] == (
            f"{key}: its grammar has {len(grammar)} characters, {len(grammar) - 1} at most: "
            "shorten it"
        )


def parsed(kind: Any, body: dict[str, Any], **policy: Any) -> dict[str, Any]:
    """The fields of a parsed request that are not their defaults."""
    found = asdict(parse_request(kind, body, build_policy(**policy), RUN))
    plain = asdict(ParsedRequest(kind, "policy"))
    if found["ids"] is not None:
        assert found["ids"].dtype == np.int32
        found["ids"] = found["ids"].tolist()
    return {key: value for key, value in found.items() if value != plain[key]}


def test_a_plain_request_of_each_api() -> None:
    assert parsed("chat", {"messages": GO}) == PLAIN
    assert parsed("text", {"prompt": "a"}) == {"text": "a"}
    assert parsed("text", {"prompt": ["a"]}) == {"text": "a"}
    assert parsed("text", {"prompt": [[1, 2]]}) == {"ids": [1, 2]}
    assert parsed("text", {"prompt": [7]}) == {"ids": [7]}
    assert parsed("ids", {"token_ids": [0, 8]}, vocabulary=9) == {"ids": [0, 8]}
    assert parsed("ids", {"token_ids": [(1 << 31) - 1]}) == {"ids": [(1 << 31) - 1]}
    assert parsed("messages", {"messages": GO, "tools": {}}) == PLAIN
    plain = {"user": "me", "store": False, "stop_token_ids": [], "seed": None}
    assert parsed("chat", {"messages": GO, **plain}) == PLAIN
    assert parsed("responses", {"input": "go"}) == PLAIN


def test_the_options_of_a_chat_that_are_followed() -> None:
    body = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, "b"]}, *GO],
        "model": "other",
        "tools": [TOOL],
        "max_tokens": 5,
        "max_completion_tokens": 4,
        "stop": ["a" * 256] * 16,
        "stream_options": {"include_usage": True},
        **dict.fromkeys(("stream", "logprobs", "return_token_ids"), True),
    }
    assert parsed("chat", body) == {
        "model": "other",
        "messages": [{"role": "system", "content": "ab"}, *GO],
        "tools": [TOOL],
        "max_new_tokens": 4,
        "stop": ("a" * 256,) * 16,
        **dict.fromkeys(("aside", "stream", "usage", "logprobs", "token_ids"), True),
    }
    assert "aside" not in parsed("chat", body, other_models="train")
    short = parsed("chat", {"messages": GO, "max_tokens": 5, "stop": "x"})
    assert short == {**PLAIN, "max_new_tokens": 5, "stop": ("x",)}
    assert parsed("chat", {"messages": GO, "tools": [TOOL], "tool_choice": "none"}) == PLAIN
    aside = {"messages": GO, "metadata": {"asyncrl": "aside", "other": 1}}
    assert parsed("chat", aside) == {"messages": GO, "aside": True}
    assert parsed("chat", {"messages": GO, "metadata": {}}) == PLAIN


def test_what_is_ignored_is_named_in_its_order() -> None:
    body = {
        "messages": GO,
        "top_p": 0.5,
        "temperature": 0.3,
        "seed": 0,
        "top_k": None,
        "response_format": {"type": "json_object"},
        "tool_choice": "required",
        "guided_json": {},
        "guided_regex": "a",
        "nonsense": 1,
        "stop_token_ids": [2],
    }
    expected = ("temperature", "seed", "response_format", "tool_choice", "guided_regex", "nonsense")
    assert parsed("chat", body, stops=frozenset([2, 3]))["ignored"] == expected
    same = {"messages": GO, "temperature": 1, "top_p": 0.5, "top_k": 7}
    assert parsed("chat", same, sampling="refuse") == PLAIN
    inner = {"token_ids": [1], "sampling_params": {"max_tokens": 3, "logprobs": 0}, "max_tokens": 4}
    assert parsed("ids", inner) == {"ids": [1], "max_new_tokens": 4, "logprobs": True}
    assert parsed("text", {"prompt": "a", "logprobs": False}) == {"text": "a"}
    free = {"parallel_tool_calls": False, "tools": [TOOL], "messages": GO}
    assert parsed("chat", free)["ignored"] == ("parallel_tool_calls",)
    assert parsed("chat", {**free, "tool_choice": "required"})["tools"] == [TOOL]
    assert "ignored" not in parsed("chat", {**free, "tool_choice": "required"}, forced="constrain")


def test_a_conversation_of_responses_becomes_a_chat() -> None:
    function = {"name": "add", "arguments": "{}"}
    described, sub = {"name": "add", "description": "d", "parameters": {"a": 1}}, {"name": "sub"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call", "call_id": "c2", "name": "sub"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "function_call", "call_id": "c3", **function},
    ]
    body = {
        "input": items,
        "instructions": "be brief",
        "max_output_tokens": 7,
        "tools": [{"type": "web_search"}, *({"type": "function", **x} for x in (described, sub))],
        **{"tool_choice": "auto", "truncation": "disabled", "previous_response_id": None},
        **{"include": ["x"], "temperature": 0.5},
    }

    def call(number: int, name: str = "add") -> dict[str, Any]:
        made = {"name": name, "arguments": {}}
        return {"id": f"c{number}", "type": "function", "function": made}

    assert parsed("responses", body) == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "so", "tool_calls": [call(1), call(2, "sub")]},
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
            {"role": "assistant", "content": "", "tool_calls": [call(3)]},
        ],
        "max_new_tokens": 7,
        "tools": [{"type": "function", "function": x} for x in (described, sub)],
        "ignored": ("temperature", "tools.web_search"),
    }
    assert "tools" not in parsed("responses", {**body, "tool_choice": "none"})


def test_a_conversation_of_messages_becomes_a_chat() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "t2", "name": "sub"},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
        {"type": "tool_result", "tool_use_id": "t2"},
        {"type": "text", "text": "go "},
        {"type": "text", "text": "on"},
    ]
    body = {
        "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        "messages": [
            {"role": "system", "content": "now"},
            *GO,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": results},
            {"role": "assistant", "content": []},
            {"role": "user", "content": results[:1]},
        ],
        "max_tokens": 7,
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled"},
        "metadata": {"asyncrl": "aside", "user_id": "me"},
        "tools": [
            {"name": "add", "description": "d", "input_schema": {"a": 1}},
            {"type": "web_search_1", "name": "web"},
            {"type": "custom", "name": "sub"},
        ],
        "tool_choice": {"type": "auto"},
    }

    def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
        made = {"name": name, "arguments": arguments}
        return {"id": f"t{number}", "type": "function", "function": made}

    calls = [call(1, "add", {"a": 1}), call(2, "sub", {})]
    described = {"name": "add", "description": "d", "parameters": {"a": 1}}
    assert parsed("messages", body) == {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "system", "content": "now"},
            *GO,
            {"role": "assistant", "content": "so", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t1", "content": "4"},
            {"role": "tool", "tool_call_id": "t2", "content": ""},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": ""},
            {"role": "tool", "tool_call_id": "t1", "content": "4"},
        ],
        "max_new_tokens": 7,
        "stop": ("x",),
        "aside": True,
        "tools": [
            {"type": "function", "function": described},
            {"type": "function", "function": {"name": "sub", "parameters": {}}},
        ],
        "ignored": ("thinking", "tools.web_search_1"),
    }
    plain = {"messages": GO, "thinking": {"type": "disabled"}, "tool_choice": {"type": "none"}}
    assert parsed("messages", plain) == PLAIN
    forced = {"messages": GO, "tool_choice": {"type": "any"}, "output_config": {"effort": "low"}}
    assert parsed("messages", forced)["ignored"] == ("tool_choice", "output_config.effort")
    (system, *_) = parsed("messages", {"messages": GO, "system": "s"})["messages"]
    assert system == {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"b": 1, "a": [1, 2]}, '{"a":[1,2],"b":1}'),
        ('{ "b": 1, "a": "x" }', '{"a":"x","b":1}'),
        ("not JSON", "not JSON"),
        (None, "null"),
    ],
)
def test_arguments_of_calls_are_compared_in_one_spelling(given: Any, expected: str) -> None:
    assert canonicalize_arguments(given) == expected


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
ANSWERS: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"role": "assistant", "content": "so"}, "stop"),
    "cut": ({"role": "assistant", "content": ""}, "length"),
    "thought": ({"role": "assistant", "content": "so", "reasoning_content": "hm"}, "stop"),
    "calls": (
        {"role": "assistant", "content": "", "reasoning_content": "hm"}
        | {"tool_calls": [CALL, {**CALL, "id": "c2"}]},
        "stop",
    ),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "token_ids": True},
    {"stream": True},
    {"stream": True, "usage": True, "logprobs": True, "token_ids": True},
    {"stop": ("zz", "b")},
]


def reply(kind: Any, name: str, options: dict[str, Any]) -> str:
    message, finish = ANSWERS[name]
    first = CallNode(0, None, np.array([1, 2], np.int32), ids=np.array([3], np.int32))
    node = CallNode(
        1,
        first,
        np.array([4], np.int32),
        ids=np.array([0, 1, 2], np.int32),
        logprobs=np.array([-0.5, -1.0, -0.25], np.float32),
        spans=[
            VersionSpan(Label(1, 4), "d", 0, 2, Label(1, 3)),
            VersionSpan(Label(1, 5), "e", 2, 3, Label(1, 3)),
        ],
        finish=finish,
        answer=message,
    )
    wanted = ParsedRequest(kind, "policy", **{**options, "stop": tuple(options.get("stop", ()))})
    texts = ["a", "bc", "é"]
    decoded = replies.build_answer(
        wanted, node, "id_7", lambda ids: "".join(texts[i] for i in ids), 1_700_000_000
    )
    return decoded.decode()


def every_reply() -> list[dict[str, Any]]:
    return [
        {"kind": kind, "answer": name, "options": options, "sent": reply(kind, name, options)}
        for kind in ("chat", "text", "ids", "messages", "responses")
        for name in ANSWERS
        for options in OPTIONS
        if not (kind == "ids" and options.get("stream"))
        and not (kind in ("messages", "responses") and options.get("logprobs"))
    ]


@pytest.mark.parametrize(
    "line", lines(REPLIES), ids=lambda line: f"{line['kind']}-{line['answer']}"
)
def test_a_reply_byte_by_byte(line: dict[str, Any]) -> None:
    assert reply(line["kind"], line["answer"], line["options"]) == line["sent"]


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [
        (400, "invalid_request_error", {"x-should-retry": "false"}),
        (401, "authentication_error", {"x-should-retry": "false"}),
        (404, "not_found_error", {"x-should-retry": "false"}),
        (408, "invalid_request_error", {}),
        (429, "rate_limit_error", {"retry-after": "1"}),
        (499, "invalid_request_error", {"x-should-retry": "false"}),
        (500, "server_error", {}),
        (503, "server_error", {"retry-after": "1"}),
    ],
)
def test_a_refusal_says_if_to_ask_again(status: int, kind: str, headers: dict[str, str]) -> None:
    body = {"error": {"message": "why", "type": kind, "param": "p", "code": "c"}}
    assert replies.build_error(CallRefused(status, "c", "why", "p")) == (body, headers)


def write() -> None:
    refused = [line | refusal(*request_of(line)) for line in lines(REFUSED)]
    for path, found in ((REFUSED, refused), (REPLIES, every_reply())):
        path.write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in found))


if __name__ == "__main__":
    write()
