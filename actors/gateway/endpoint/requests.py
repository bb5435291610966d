"""Strict parser of the endpoint's request bodies, for all its model APIs.  Pure.

The run determines the distribution of an answer:

- options that only end an answer earlier are followed
- a client's sampling options are ignored and named, or refused
- a forced format or tool is ignored and named, refused, or becomes the answer's grammar
- options under which the policy cannot be trained are refused
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from actors.gateway.call_tree import Message, Tools
from actors.gateway.chat import make_mark, normalize_messages
from actors.gateway.endpoint import anthropic, responses
from actors.gateway.refusals import CallRefused, build_refusal, take
from asyncrl.config.agents import AgentConfig
from asyncrl.contract.blobs.images import Blobs, digest
from asyncrl.contract.messages import MOST_GRAMMAR, SamplingSettings
from asyncrl.models import pictures
from asyncrl.records.jsonl import JsonObject

ImageBlobs = dict[str, bytes]  # digest -> blob
Options = Mapping[str, Any]  # of a request: its body, or that of a chat completion


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


def build_grammar(options: Options, tools: Tools, parser: str) -> str:
    """Build the grammar that a request's answer must follow (`agent.forced = "constrain"`).

    It is in llguidance's form of Lark; a generator decodes under it
    (actors/decoding/constraints.py). Tool calls have the form that `agent.parser = "hermes"` reads:

        <tool_call>
        {"name": "add", "arguments": {"a": 1}}
        </tool_call>

    Returns "" for any text.

    Args:
        options: a request, as a chat completion.
        tools: those in the prompt.
        parser: `agent.parser`, which reads tool calls from an answer.

    Raises CallRefused for a form that cannot become a grammar.
    """
    # the expression of the demanded text; "": any text
    demands = [
        expression
        for key in FORMATS
        if options.get(key) and (expression := _build_format(key, options[key]))
    ]
    if options.get(STRUCTURED):
        demands.append(_build_structured(options[STRUCTURED]))
    if len(demands) > 1:
        raise build_refusal(STRUCTURED, "the answer has another format already: give one")
    answer = "".join(demands)
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
    if kind in ("regex", "choice"):
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


def _select_forced_tools(options: Options, tools: Tools) -> Tools | None:
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


def _build_call_rules(tools: Tools, *, several: bool) -> list[str]:
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


# ---- images --------------------------------------------------------------------------------------

INVALID = "invalid_image"  # the code of refusals
# keys of a body that hold items, and of an item or a part that hold parts
PARTS = ("messages", "input", "content", "output")


def _replace_images(location: str, item: Any, blobs: ImageBlobs) -> Any:
    """Replace the images in the parts of a body or an item, at any depth."""
    if not isinstance(item, dict):
        return item
    converted = dict(item)
    for key in PARTS:
        if isinstance(item.get(key), list):
            converted[key] = [
                _replace_image(f"{location}.{key}[{index}]".lstrip("."), part, blobs)
                for index, part in enumerate(item[key])
            ]
    return converted


def _replace_image(location: str, part: Any, blobs: ImageBlobs) -> Any:
    """Return a part, or the text part that stands for its image.

    ```
    chat        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    responses   {"type": "input_image", "image_url": "data:image/png;base64,..."}
    messages    {"type": "image", "source": {"type": "base64", "media_type": "image/png", ...}}
    ```

    Only data: URLs are read: the gateway never opens an address that a request names.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("image_url", "input_image", "image"):
        return _replace_images(location, part, blobs)
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        url: Any = f"data:{source.get('media_type')};base64,{source.get('data')}"
    else:
        url = source.get("url") if isinstance(source, dict) else part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise build_refusal(
            location, "give the image as a data: URL (data:image/png;base64,...)", INVALID
        )
    if not url.startswith("data:"):
        raise build_refusal(
            location,
            f"{url:.80} is not fetched: send the image itself, as data:image/png;base64,...",
            INVALID,
        )
    try:
        blob = pictures.build_blob(pictures.decode_data_url(url))
    except ValueError as error:
        raise build_refusal(location, f"the image cannot be read: {error}", INVALID) from error
    name = digest(blob)
    blobs[name] = blob
    return {"type": "text", "text": make_mark(name)}


# ---- requests ------------------------------------------------------------------------------------

Kind = Literal["chat", "text", "ids", "messages", "responses"]
PREFIX: dict[Kind, str] = {  # the prefix of a call's id
    "chat": "chatcmpl-",
    "text": "cmpl-",
    "ids": "cmpl-",
    "messages": "msg_",
    "responses": "resp_",
}
MOST_STOPS = 16
STOP_CHARACTERS = 256


@dataclass(frozen=True)
class RequestPolicy:
    """The run's treatment of a request's options."""

    agent: AgentConfig
    vocabulary: int = 0  # upper bound of token ids; 0: not known
    stops: frozenset[int] = frozenset()  # token ids that end an answer in this run
    images: bool = False  # whether the model reads images


@dataclass(frozen=True)
class ParsedRequest:
    """A request, parsed."""

    kind: Kind
    model: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    text: str | None = None
    ids: np.ndarray | None = None  # int32 [P]
    max_new_tokens: int = 0  # 0: as many as the run allows
    stop: tuple[str, ...] = ()
    aside: bool = False  # excluded from training
    stream: bool = False
    usage: bool = False  # token counts at the end of the stream
    logprobs: bool = False
    token_ids: bool = False
    grammar: str = ""  # that the answer is decoded under; "": none
    ignored: tuple[str, ...] = ()
    # digest -> blob, of the marks in messages
    images: Blobs = field(default_factory=dict)


REFUSED, FORCED = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
).values()


def _has_no_effect(value: Any, neutral: list[Any]) -> bool:
    """Whether a value is one of `neutral`; of an empty list, whether it is empty."""
    if not neutral:
        return not value
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


GUIDED = "guided_"
# a client's sampling options: ignored and named, or refused
SAMPLING = ("temperature", "top_p", "top_k", "seed")
# options that are parsed elsewhere, or ignored without being named
QUIET = {
    *("model", "messages", "prompt", "token_ids", "sampling_params", "tools"),
    *("max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "logprobs"),
    *("return_token_ids", "metadata", "user", "store", "request_id"),
    *("skip_special_tokens", "detokenize", "output_mode"),
}


def decode_body(body: bytes, decode: Callable[[bytes], Any] = msgspec.json.decode) -> JsonObject:
    """Decode a body as a JSON object.  Raises CallRefused."""
    try:
        value = decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CallRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CallRefused(400, "invalid_json", "the body is not a JSON object")
    return value


def parse_request(
    kind: Kind, body: Options, policy: RequestPolicy, run: SamplingSettings
) -> ParsedRequest:
    """Parse a body of an API.  Raises CallRefused."""
    agent = policy.agent
    images: ImageBlobs = {}
    if policy.images:
        # each image becomes a text part with its digest, so that messages are compared as text
        body = _replace_images("", body, images)
    options = {**body}
    if kind == "messages":
        options = anthropic.to_chat(body)
    elif kind == "responses":
        options = responses.to_chat(body)
    elif kind == "ids":
        options = {**take(body, "sampling_params", dict), **body}
    # options that change nothing here are named in the response, and others refused
    ignored: list[str] = []
    for name, value in options.items():
        if value is None or name in QUIET:
            continue
        if name in REFUSED:
            neutral, reason = REFUSED[name]
            if not _has_no_effect(value, neutral):
                raise build_refusal(
                    name, f"{value!r:.80} is not served: {reason}", "unsupported_parameter"
                )
        elif name == "stop_token_ids":
            if not isinstance(value, list) or not all(type(token) is int for token in value):
                raise build_refusal("stop_token_ids", "give a list of token ids")
            if unknown_ids := sorted({*value} - policy.stops):
                raise build_refusal(
                    "stop_token_ids",
                    f"{unknown_ids!r:.80} do not end an answer in this run, whose stop ids are "
                    f"{sorted(policy.stops)}: omit them, or add their text to generator.stop",
                    "unsupported_parameter",
                )
        elif name in FORCED or name.startswith(GUIDED):
            if _forces(name, value, policy):
                ignored.append(name)
        elif name not in SAMPLING or _samples_otherwise(name, value, policy, run):
            ignored.append(name)
    stream = _parse_flag(options, "stream")
    usage = _parse_flag(take(options, "stream_options", dict), "include_usage")
    if stream and kind == "ids":
        raise build_refusal("stream", "the token route does not stream", "unsupported_parameter")
    model = options.get("model", agent.model)
    if not isinstance(model, str):
        raise build_refusal("model", "give its name as text")
    if model != agent.model and agent.other_models == "refuse":
        raise CallRefused(
            404,
            "model_not_found",
            f"there is no model {model!r}: use {agent.model!r} (agent.other_models = refuse)",
            "model",
        )
    mark = take(options, "metadata", dict).get("asyncrl")
    if mark not in (None, "aside"):
        raise build_refusal("metadata", f'asyncrl = {mark!r:.80}: the only valid value is "aside"')
    prompt = _parse_prompt(kind, options, policy)
    grammar = ""
    if agent.forced == "constrain":
        grammar = build_grammar(options, prompt.get("tools", ()), agent.parser)
        if grammar:
            ignored = [name for name in ignored if name != PARALLEL]
    return ParsedRequest(
        kind=kind,
        model=model,
        **prompt,
        grammar=grammar,
        max_new_tokens=_parse_max_tokens(options),
        stop=parse_stops(options.get("stop")),
        aside=(model != agent.model and agent.other_models == "aside") or mark == "aside",
        stream=stream,
        usage=usage,
        logprobs=_parse_logprobs(kind, options),
        token_ids=_parse_flag(options, "return_token_ids"),
        ignored=tuple(ignored),
        images=images,
    )


def _forces(name: str, value: Any, policy: RequestPolicy) -> bool:
    """Whether a value forces the answer's form, without effect.  Raises CallRefused."""
    if _has_no_effect(value, FORCED.get(name, [])):
        return False
    if (
        name in FORCED
        and not isinstance(value, dict)
        and not (name == "tool_choice" and isinstance(value, str))
    ):
        raise build_refusal(name, f"{value!r:.80}: give an object")
    if policy.agent.forced == "constrain":
        if name.startswith(GUIDED):
            raise build_refusal(
                name, "is not served: give structured_outputs", "unsupported_parameter"
            )
        return False
    if policy.agent.forced == "refuse":
        raise build_refusal(
            name,
            f"{value!r:.80} is not served, as an answer's form cannot be forced (agent.forced = "
            "refuse): ask for it in the prompt, and check it in the reward",
            "unsupported_parameter",
        )
    return True


def _samples_otherwise(name: str, value: Any, policy: RequestPolicy, run: SamplingSettings) -> bool:
    """Whether a sampling option differs from the run's.  Raises CallRefused."""
    run_values = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
    if name in run_values and value == run_values[name]:
        return False
    if policy.agent.sampling == "refuse":
        value_of_run = f", {run_values[name]:g}" if name in run_values else ""
        raise build_refusal(
            name,
            f"{value!r:.80} is not the run's{value_of_run} (agent.sampling = refuse): omit it",
            "unsupported_parameter",
        )
    return True


def _parse_prompt(kind: Kind, options: Options, policy: RequestPolicy) -> JsonObject:
    if kind not in ("text", "ids"):
        messages, tools = normalize_messages(options.get("messages")), take(options, "tools", list)
        for index, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise build_refusal("tools", f"tools[{index}]: give a function with a name")
        return {
            "messages": messages,
            "tools": [] if options.get("tool_choice") == "none" else tools,
        }
    if kind == "text":
        prompt = options.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return {"text": prompt}
        if prompt and isinstance(prompt, list) and isinstance(prompt[0], str | list):
            raise build_refusal("prompt", "give one prompt a call", "unsupported_parameter")
        return {"ids": parse_ids("prompt", prompt, policy.vocabulary)}
    return {"ids": parse_ids("token_ids", options.get("token_ids"), policy.vocabulary)}


def parse_ids(param: str, value: Any, vocabulary: int) -> np.ndarray:
    """Read token ids below `vocabulary` (0: any), int32 [P].  Raises CallRefused."""
    limit = vocabulary or (1 << 31)
    if not isinstance(value, list) or not value:
        kind = "text or a list of token ids" if param == "prompt" else "a list of token ids"
        raise build_refusal(param, f"give {kind}")
    if not all(type(token) is int and 0 <= token < limit for token in value):
        raise build_refusal(param, f"give token ids in [0, {limit})")
    return np.array(value, np.int32)


def _parse_max_tokens(options: Options) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = options.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise build_refusal(name, f"{value!r:.80} is not a positive number of tokens")
        return value
    return 0


def parse_stops(value: Any) -> tuple[str, ...]:
    """Read the texts that end an answer.  Raises CallRefused."""
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise build_refusal("stop", "give a text, or a list of texts")
    if len(stops) > MOST_STOPS or any(len(text) > STOP_CHARACTERS for text in stops):
        raise build_refusal(
            "stop", f"give at most {MOST_STOPS} texts of {STOP_CHARACTERS} characters"
        )
    return tuple(stops)


def _parse_flag(options: Options, name: str) -> bool:
    value = options.get(name)
    if value not in (None, True, False):
        raise build_refusal(name, f"{value!r:.80} is neither true nor false")
    return bool(value)


def _parse_logprobs(kind: Kind, options: Options) -> bool:
    value = options.get("logprobs")
    if kind not in ("text", "ids"):
        return _parse_flag(options, "logprobs")
    if value is None or value is False:
        return False
    if value is not True and value not in (0, 1):
        reason = "only the sampled token's log-probability is kept: ask for 1"
        raise build_refusal(
            "logprobs", f"{value!r:.80} is not served: {reason}", "unsupported_parameter"
        )
    return True
