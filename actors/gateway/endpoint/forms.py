"""Grammars of the answers that a request demands (`agent.forced = "constrain"`).  Pure.

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

from actors.gateway.sessions import CallRefused
from asyncrl.contract.messages import MOST_GRAMMAR

# a format of the answer, in chat completions, responses and Anthropic's messages
FORMATS = ("response_format", "text.format", "output_format", "output_config.format")
STRUCTURED = "structured_outputs"  # as vLLM's server takes it
# bounded, so that a model cannot go on with white space for ever
WHITE_SPACE = {"whitespace_pattern": r"[ \t\n]{0,8}"}
HEAD = "%llguidance {}\n"
CALL_END = json.dumps("}\n</tool_call>")
PARALLEL = "parallel_tool_calls"


def grammar_of(options: Mapping[str, Any], tools: Sequence[Any], parser: str) -> str:
    """Return the grammar that a request's answer must follow; "" if it may be any text.

    Args:
        options: a request, as a chat completion.
        tools: those that the model is shown.
        parser: `agent.parser`, which reads tool calls from an answer.

    Raises CallRefused for a form that cannot be decoded under."""
    answer = _answer(options)
    forced = _forced_tools(options, tools)
    if forced is None and not answer:
        return ""
    called = tools if forced is None else forced
    if called and parser != "hermes" and (forced or parser != "none"):
        raise _bad(
            "tool_choice" if forced else "tools",
            f"tool calls can be decoded under a grammar with agent.parser = hermes, not {parser}",
        )
    rules = [f"answer: {answer}"] if answer and forced is None else []
    starts = ["answer"] if rules else []
    if called and parser == "hermes":
        rules += _call_rules(called, several=_may_call_several(options))
        starts.insert(0, "calls")
    grammar = "\n".join([f"{HEAD}start: {' | '.join(starts)}", *rules])
    if len(grammar) > MOST_GRAMMAR:
        where = next((key for key in (*FORMATS, STRUCTURED) if options.get(key)), "tools")
        raise _bad(
            where, f"its grammar has {len(grammar)} characters, {MOST_GRAMMAR} at most: shorten it"
        )
    return grammar


def _bad(param: str, why: str, code: str = "invalid_value") -> CallRefused:
    return CallRefused(400, code, f"{param}: {why}", param.partition("[")[0])


# ---- the form of a text --------------------------------------------------------------------------


def _answer(options: Mapping[str, Any]) -> str:
    """Return the expression of the demanded text; "" if it may be any."""
    demands = [
        expression
        for key in FORMATS
        if options.get(key) and (expression := _format(key, options[key]))
    ]
    if options.get(STRUCTURED):
        demands.append(_structured(options[STRUCTURED]))
    if len(demands) > 1:
        raise _bad(STRUCTURED, "the answer has another format already: give one")
    return "".join(demands)


def _format(key: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return _json(key, {"type": "object"})
    if kind != "json_schema":
        raise _bad(key, f"{value!r:.80}: its type is text, json_object or json_schema")
    within = value.get("json_schema", value)
    schema = within.get("schema") if isinstance(within, dict) else None
    if schema is None:
        raise _bad(key, "give the schema of json_schema")
    return _json(key, schema)


def _structured(value: Any) -> str:
    kinds = {"json", "regex", "choice"}
    if not isinstance(value, dict) or len(given := {k for k in value if value[k] is not None}) != 1:
        raise _bad(STRUCTURED, f"{value!r:.80}: give an object with json, regex or choice")
    (kind,) = given
    form = value[kind]
    if kind == "json":
        try:
            return _json(STRUCTURED, json.loads(form) if isinstance(form, str) else form)
        except ValueError as error:
            raise _bad(STRUCTURED, f"its json is not JSON: {error}") from error
    if kind == "regex" and isinstance(form, str):
        from llguidance import regex_to_lark

        return _require_valid(STRUCTURED, f"/{regex_to_lark(form)}/")
    if kind == "choice" and isinstance(form, list) and form and all(map(_is_text, form)):
        return _require_valid(STRUCTURED, " | ".join(map(_quoted, form)))
    if kind in kinds:
        raise _bad(STRUCTURED, f"{kind}: {form!r:.80}: give a text or, for choice, texts")
    raise _bad(
        STRUCTURED,
        f"{kind} is not served: give json, regex or choice",
        "unsupported_parameter",
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(param: str, schema: Any) -> str:
    """Return the expression of JSON text by a schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _bad(param, f"a schema is an object, not {schema!r:.80}")
    # without spaces at its ends, a line of the grammar
    text = json.dumps({**schema, "x-guidance": WHITE_SPACE}, ensure_ascii=False)
    return _require_valid(param, f"%json {text}")


def _require_valid(param: str, expression: str) -> str:
    if problem := _problem(expression):
        raise _bad(param, problem)
    return expression


@functools.lru_cache(256)
def _problem(expression: str) -> str:
    """Say why llguidance cannot decode under an expression; "" if it can."""
    from llguidance import LLMatcher

    error = str(LLMatcher.validate_grammar(f"{HEAD}start: {expression}"))
    if not error or error.startswith("WARNING"):
        return ""
    reason = re.split(r"\n +\d+ \| ", error)[0]  # the grammar's lines follow
    reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", reason)
    return " ".join(reason.split())


# ---- tool calls ----------------------------------------------------------------------------------


def _forced_tools(options: Mapping[str, Any], tools: Sequence[Any]) -> Sequence[Any] | None:
    """Return the tools of which the answer must call one; None: it need not."""
    choice = options.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("required", "any"):
        found = list(tools)
    elif kind in ("function", "tool") and isinstance(choice, dict):
        within = choice.get("function", choice)
        name = within.get("name") if isinstance(within, dict) else None
        found = [tool for tool in tools if tool["function"]["name"] == name]
    else:
        raise _bad("tool_choice", f"{choice!r:.80} is not served", "unsupported_parameter")
    if not found:
        raise _bad("tool_choice", f"{choice!r:.80}: no such tool is in `tools`")
    return found


def _may_call_several(options: Mapping[str, Any]) -> bool:
    choice = options.get("tool_choice")
    disabled = isinstance(choice, dict) and choice.get("disable_parallel_tool_use")
    return options.get(PARALLEL) is not False and not disabled


def _call_rules(tools: Sequence[Any], *, several: bool) -> list[str]:
    """Return the rules of a text of one call, or of several."""
    calls, arguments = [], []
    for number, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict):
            raise _bad(f"tools[{number}]", f"its parameters are an object, not {schema!r:.80}")
        begin = f'<tool_call>\n{{"name": {_quoted(function["name"])}, "arguments": '
        calls.append(f"{_quoted(begin)} arguments_{number} {CALL_END}")
        form = _json(f"tools[{number}]", {"type": "object", **schema})
        arguments.append(f"arguments_{number}: {form}")
    more = ' ("\\n" call)*' if several else ""
    return [f"calls: call{more}", f"call: {' | '.join(calls)}", *arguments]
