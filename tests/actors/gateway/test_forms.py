"""The grammar of an answer that a request demands, in every model API; what cannot be one is
refused with its reason."""

import functools
import importlib.util
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from gateway_kit import CHATML, Served
from gateway_kit import tokenizer as chat_tokenizer
from process_kit import ROOT

from actors.decoding.constraints import GrammarCompiler
from actors.gateway.call_tree import CallNode
from actors.gateway.endpoint.requests import Kind, RequestPolicy, parse_request
from actors.gateway.refusals import CallRefused
from asyncrl.config import load
from asyncrl.config.agents import AgentConfig
from asyncrl.contract import importing
from asyncrl.contract.messages import MOST_GRAMMAR, Prompt, SamplingSettings
from asyncrl.models import installed

GO = [{"role": "user", "content": "go"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {"x": [null, 1.5]}}\n</tool_call>'
OBJECT = {"type": "json_object"}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
INPUT = {
    "chat": {"messages": GO},
    "text": {"prompt": "go"},
    "ids": {"token_ids": [1]},
    "messages": {"messages": GO, "max_tokens": 9},
    "responses": {"input": "go"},
}
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE_TOOLS = [{"name": "add", "input_schema": SCHEMA}, {"name": "stop"}]


def grammar(kind: Kind, parser: str = "hermes", **more: Any) -> str:
    policy = RequestPolicy(AgentConfig(forced="constrain", parser=parser))
    sampling = SamplingSettings(max_new_tokens=9)
    parsed = parse_request(kind, {"model": "policy", **INPUT[kind], **more}, policy, sampling)
    assert not parsed.ignored or not parsed.grammar
    return parsed.grammar


@functools.cache
def compiler() -> GrammarCompiler:
    made = chat_tokenizer(CHATML)
    return GrammarCompiler(made, "", (made.eos_token_id,))


def accepts(form: str, text: str) -> bool:
    """Whether a text can be written under a grammar, and may end there."""
    begun = compiler().begin(form)
    size = len(compiler().tokenizer)
    for token in compiler().tokenizer.convert_tokens_to_ids(list(text)):
        if not begun.compute_allowed(size)[token]:
            return False
        begun.advance(token)
    return bool(begun.compute_allowed(size)[compiler().stops[0]])


SPACED = '{"a":\n  7}'
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
FLAT_REQUIRED = {"tools": FLAT_TOOLS, "tool_choice": "required"}


def choose(tools: list[dict[str, Any]], **choice: Any) -> dict[str, Any]:
    return {"tools": tools, "tool_choice": choice}


FORMS: list[tuple[Kind, dict[str, Any], list[str], list[str]]] = [
    ("chat", {"response_format": OBJECT}, ['{"b": [1, "x"]}', "{}"], ["[]", "3", " {}"]),
    ("chat", {"response_format": BY_SCHEMA}, ['{"a":3}', SPACED], ['{"a":12}', "{}", ADD]),
    ("text", {"response_format": BY_SCHEMA}, ['{"a": 3}'], ["go"]),
    ("ids", {"response_format": OBJECT}, ["{}"], ["go"]),
    ("responses", {"text": {"format": FLAT}}, ['{"a": 3}'], ['{"b": 3}']),
    ("messages", {"output_format": FLAT}, ['{"a": 3}'], ['{"b": 3}']),
    ("messages", {"output_config": {"format": FLAT}}, ['{"a": 3}'], ['{"b": 3}']),
    ("chat", {"structured_outputs": {"json": SCHEMA}}, ['{"a": 3}'], ["go"]),
    ("chat", {"structured_outputs": {"json": '{"type": "null"}'}}, ["null"], ["go"]),
    ("text", {"structured_outputs": {"regex": "a/b+|\\d{2}"}}, ["a/bb", "12"], ["a/", "1"]),
    ("text", {"structured_outputs": {"choice": ["yes", '"no"']}}, ["yes", '"no"'], ["no", ""]),
    # tools beside a format: a call, or the format
    ("chat", {"tools": TOOLS, "response_format": BY_SCHEMA}, [ADD, STOP, '{"a": 3}'], ["go"]),
    (
        "chat",
        {"tools": TOOLS, "tool_choice": "none", "response_format": BY_SCHEMA},
        ['{"a": 3}'],
        [ADD],
    ),
    ("chat", {"tools": TOOLS, "parser": "none", "response_format": BY_SCHEMA}, ['{"a": 3}'], [ADD]),
    # a call that is required
    (
        "chat",
        REQUIRED,
        [ADD, STOP, f"{ADD}\n{STOP}"],
        ["go", "{}", ADD + STOP, STOP.replace("stop", "add"), ADD.replace("1", "10")],
    ),
    ("chat", {**REQUIRED, "parallel_tool_calls": False}, [ADD], [f"{ADD}\n{STOP}"]),
    ("chat", choose(TOOLS, type="function", function={"name": "add"}), [ADD], [STOP]),
    ("responses", FLAT_REQUIRED, [ADD], ["go"]),
    ("responses", choose(FLAT_TOOLS, type="function", name="stop"), [STOP], [ADD]),
    ("messages", choose(CLAUDE_TOOLS, type="any"), [ADD, STOP], ["go"]),
    (
        "messages",
        choose(CLAUDE_TOOLS, type="tool", name="add", disable_parallel_tool_use=True),
        [ADD],
        [STOP, f"{ADD}\n{ADD}"],
    ),
    # a required call decides over a format
    ("chat", {**REQUIRED, "response_format": BY_SCHEMA}, [ADD], ['{"a": 3}']),
]


@pytest.mark.parametrize("kind, body, good, bad", FORMS)
def test_a_demand_becomes_a_grammar(
    kind: Kind, body: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    form = grammar(kind, **body)
    assert [text for text in good if not accepts(form, text)] == []
    assert [text for text in bad if accepts(form, text)] == []


def test_white_space_of_json_is_bounded() -> None:
    form = grammar("chat", response_format=OBJECT)
    assert accepts(form, '{"a": 1,\n  "b": [1,2]}')
    assert not accepts(form, '{"a":' + " " * 9 + "1}") and not accepts(form, "{ }")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
    ],
)
def test_what_demands_nothing_has_no_grammar(body: dict[str, Any]) -> None:
    assert grammar("chat", **body) == ""


ADD_TOOL = {"type": "function"}
LISTED = {"function": {"name": "f", "parameters": [1]}}
NEGATED = {"function": {"name": "f", "parameters": {"not": {}}}}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": value}}


# other bodies: tests/data/refused_requests.jsonl
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": schema({"type": "no"})}, "response_format", "Invalid type: no"),
    (
        {"response_format": schema({"type": "array", "uniqueItems": True})},
        "response_format",
        'Unimplemented keys: ["uniqueItems"]',
    ),
    (
        {"response_format": schema({"type": "string", "pattern": "(?=a)b"})},
        "response_format",
        "error: look-around, including look-ahead and look-behind, is not supported",
    ),
    (
        {"response_format": schema({"enum": ["x" * MOST_GRAMMAR]})},
        "response_format",
        f"{MOST_GRAMMAR} at most",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "its json is not JSON"),
    (
        {"tools": TOOLS, "response_format": OBJECT, "parser": "m:parse"},
        "tools",
        "agent.parser = hermes, not m:parse",
    ),
    ({"tools": [ADD_TOOL | LISTED], "tool_choice": "required"}, "tools", "tools[0]: its parameter"),
    ({"tools": [ADD_TOOL | NEGATED], "tool_choice": "required"}, "tools", "Unimplemented keys"),
]


@pytest.mark.parametrize("body, param, said", REFUSED)
def test_what_has_no_grammar_is_refused(body: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(CallRefused) as caught:
        grammar("chat", **body)
    refused = caught.value
    assert (refused.status, refused.param) == (400, param)
    assert said in str(refused) and "\n" not in str(refused)


def test_openais_client_gets_the_reason_and_the_call_its_grammar() -> None:
    served = Served(forced="constrain")
    opened = served.do(served.service.open)
    asked: list[str] = []
    served.service.say = lambda call: asked.append(call.grammar) or '{"a": 3}'
    talk = openai.OpenAI(
        base_url=f"{served.url}/s/{opened.name}/v1", api_key=opened.api_key, max_retries=0
    )
    with pytest.raises(openai.BadRequestError, match="Invalid type: no") as caught:
        talk.chat.completions.create(
            model="policy", messages=GO, response_format=schema({"type": "no"})
        )
    assert caught.value.param == "response_format" and opened.calls == 0
    for more in ({}, {"response_format": BY_SCHEMA}):
        said = talk.chat.completions.with_raw_response.create(model="policy", messages=GO, **more)
        assert "x-asyncrl-ignored" not in said.headers
    assert asked == ["", grammar("chat", response_format=BY_SCHEMA)]
    served.close()


def test_the_shipped_agent_demands_calls_and_results() -> None:
    """Of configs/calc_form.toml."""
    served = Served(forced="constrain")
    opened = served.do(served.service.open)
    asked: list[str] = []

    def say(call: CallNode) -> str:
        asked.append(call.grammar)
        return "?2+2" if len(asked) == 1 else "#4"

    served.service.say = say
    agent = importing.import_module(str(ROOT / "configs" / "examples" / "calc_agent.py"))
    url = f"{served.url}/s/{opened.name}/v1"
    session = SimpleNamespace(base_url=url, api_key=opened.api_key)
    assert agent.play_in_form(Prompt(0, "2+2=", answer="#4"), session) == 1.0
    assert len(asked) == 2 and asked[0] == asked[1]
    assert accepts(asked[0], "?37*8") and accepts(asked[0], "#341")
    assert not any(accepts(asked[0], text) for text in ("37*8", "?37*", "#", "?1+1#2"))
    served.close()


def test_a_missing_library_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load.load("calc_form")
    assert installed.find_missing_package(config) == "" and config.support_bytes > 1 << 15
    present = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llguidance" else present(name)
    )
    assert installed.find_missing_package(config).startswith(
        "agent.forced: constrain: needs llguidance, w"
    )
