"""Grammars of the answers to a request (`agent.forced = "constrain"`).  Pure.

A format or a tool choice becomes a grammar in llguidance's form of Lark, under which a generator
decodes the answer (actors/decoding/constraints.py).  Tool calls have the form that
`agent.parser = "hermes"` reads:

    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from actors.gateway.refusals import build_refusal
from asyncrl.contract.messages import MOST_GRAMMAR

# a format of the answer, in chat completions, responses and Anthropic's messages
FORMATS = ("response_format", "text.format", "output_format", "output_config.format")
STRUCTURED = "structured_outputs"  # as vLLM's server takes it
# bounded, so that a model cannot continue with white space for ever; llguidance repeats a
# `whitespace_pattern`, whatever it is
WHITE_SPACE = {
    "whitespace_flexible": False,
    "item_separator": r",[ \t\n]{0,8}",
    "key_separator": r":[ \t\n]{0,8}",
}
HEAD = "%llguidance {}\n"
CALL_END = json.dumps("}\n</tool_call>")
PARALLEL = "parallel_tool_calls"


def build_grammar(options: Mapping[str, Any], tools: Sequence[Any], parser: str) -> str:
    """Build the grammar that a request's answer must follow; "": any text.

    Args:
        options: a request, as a chat completion.
        tools: those in the prompt.
        parser: `agent.parser`, which reads tool calls from an answer.

    Raises CallRefused for a form that cannot become a grammar.
    """
    answer = _build_answer_rule(options)
    forced = _select_forced_tools(options, tools)
    if forced is None and not answer:
        return ""
    callable_tools = tools if forced is None else forced
    if callable_tools and parser != "hermes" and (forced or parser != "none"):
        raise build_refusal(
            "tool_choice" if forced else "tools",
            f"tool calls can be decoded under a grammar with agent.parser = hermes, not {parser}",
        )
    rules = [f"answer: {answer}"] if answer and forced is None else []
    starts = ["answer"] if rules else []
    if callable_tools and parser == "hermes":
        choice = options.get("tool_choice")
        disabled = isinstance(choice, dict) and choice.get("disable_parallel_tool_use")
        several = options.get(PARALLEL) is not False and not disabled
        rules += _build_call_rules(callable_tools, several=several)
        starts.insert(0, "calls")
    grammar = "\n".join([f"{HEAD}start: {' | '.join(starts)}", *rules])
    if len(grammar) > MOST_GRAMMAR:
        param = next((key for key in (*FORMATS, STRUCTURED) if options.get(key)), "tools")
        raise build_refusal(
            param, f"its grammar has {len(grammar)} characters, {MOST_GRAMMAR} at most: shorten it"
        )
    return grammar


# ---- the form of a text --------------------------------------------------------------------------


def _build_answer_rule(options: Mapping[str, Any]) -> str:
    """Build the expression of the demanded text; "": any text."""
    demands = [
        expression
        for key in FORMATS
        if options.get(key) and (expression := _build_format(key, options[key]))
    ]
    if options.get(STRUCTURED):
        demands.append(_build_structured(options[STRUCTURED]))
    if len(demands) > 1:
        raise build_refusal(STRUCTURED, "the answer has another format already: give one")
    return "".join(demands)


def _build_format(key: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return _build_json(key, {"type": "object"})
    if kind != "json_schema":
        raise build_refusal(key, f"{value!r:.80}: its type is text, json_object or json_schema")
    inner = value.get("json_schema", value)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise build_refusal(key, "give the schema of json_schema")
    return _build_json(key, schema)


def _build_structured(value: Any) -> str:
    kinds = {"json", "regex", "choice"}
    if (
        not isinstance(value, dict)
        or len(kinds_given := {k for k in value if value[k] is not None}) != 1
    ):
        raise build_refusal(STRUCTURED, f"{value!r:.80}: give an object with json, regex or choice")
    (kind,) = kinds_given
    form = value[kind]
    if kind == "json":
        try:
            return _build_json(STRUCTURED, json.loads(form) if isinstance(form, str) else form)
        except ValueError as error:
            raise build_refusal(STRUCTURED, f"its json is not JSON: {error}") from error
    if kind == "regex" and isinstance(form, str):
        from llguidance import regex_to_lark

        return _require_valid(STRUCTURED, f"/{regex_to_lark(form)}/")
    if (
        kind == "choice"
        and isinstance(form, list)
        and form
        and all(isinstance(text, str) and text for text in form)
    ):
        return _require_valid(STRUCTURED, " | ".join(map(_quote, form)))
    if kind in kinds:
        raise build_refusal(STRUCTURED, f"{kind}: {form!r:.80}: give a text or, for choice, texts")
    raise build_refusal(
        STRUCTURED, f"{kind} is not served: give json, regex or choice", "unsupported_parameter"
    )


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _build_json(param: str, schema: Any) -> str:
    """Build the expression of JSON text by a schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise build_refusal(param, f"a schema is an object, not {schema!r:.80}")
    # without spaces at its ends, a line of the grammar
    text = json.dumps({**schema, "x-guidance": WHITE_SPACE}, ensure_ascii=False)
    return _require_valid(param, f"%json {text}")


def _require_valid(param: str, expression: str) -> str:
    if problem := _find_problem(expression):
        raise build_refusal(param, problem)
    return expression


@functools.lru_cache(256)
def _find_problem(expression: str) -> str:
    """Return llguidance's reason to refuse an expression; "": it is valid."""
    from llguidance import LLMatcher

    error = str(LLMatcher.validate_grammar(f"{HEAD}start: {expression}"))
    if not error or error.startswith("WARNING"):
        return ""
    reason = re.split(r"\n +\d+ \| ", error)[0]  # the grammar's lines follow
    reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", reason)
    return " ".join(reason.split())


# ---- tool calls ----------------------------------------------------------------------------------


def _select_forced_tools(options: Mapping[str, Any], tools: Sequence[Any]) -> Sequence[Any] | None:
    """Select the tools of which the answer must call one; None: it need not."""
    choice = options.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("required", "any"):
        forced = list(tools)
    elif kind in ("function", "tool") and isinstance(choice, dict):
        inner = choice.get("function", choice)
        name = inner.get("name") if isinstance(inner, dict) else None
        forced = [tool for tool in tools if tool["function"]["name"] == name]
    else:
        raise build_refusal("tool_choice", f"{choice!r:.80} is not served", "unsupported_parameter")
    if not forced:
        raise build_refusal("tool_choice", f"{choice!r:.80}: no such tool is in `tools`")
    return forced


def _build_call_rules(tools: Sequence[Any], *, several: bool) -> list[str]:
    """Build the rules of a text of one call, or of several."""
    calls, arguments = [], []
    for number, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict):
            raise build_refusal(
                f"tools[{number}]", f"its parameters are an object, not {schema!r:.80}"
            )
        begin = f'<tool_call>\n{{"name": {_quote(function["name"])}, "arguments": '
        calls.append(f"{_quote(begin)} arguments_{number} {CALL_END}")
        form = _build_json(f"tools[{number}]", {"type": "object", **schema})
        arguments.append(f"arguments_{number}: {form}")
    repetition = ' ("\\n" call)*' if several else ""
    return [f"calls: call{repetition}", f"call: {' | '.join(calls)}", *arguments]
