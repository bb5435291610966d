"""Strict parser of the endpoint's request bodies, for all its model APIs.  Pure.

The run determines the distribution of an answer:

- options that only end an answer earlier are followed
- a client's sampling options are ignored and named, or refused
- a forced format or tool is ignored and named, refused, or becomes the answer's grammar
- options under which the policy cannot be trained are refused
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from actors.gateway.call_tree import Message
from actors.gateway.chat import normalize_messages
from actors.gateway.endpoint import anthropic, forms, image_parts, responses
from actors.gateway.refusals import CallRefused, build_refusal
from asyncrl.contract.messages import SamplingSettings

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
    """The run's treatment of a request's options: the config's section [agent]."""

    model: str = "policy"  # the model name of trained calls
    # calls for another name are excluded from training, trained, or answered with 404
    other_models: Literal["aside", "train", "refuse"] = "aside"
    sampling: Literal["ignore", "refuse"] = "ignore"  # a client's temperature, top_p, top_k, seed
    vocabulary: int = 0  # upper bound of token ids; 0: not known
    # a format or tool that the answer must have
    forced: Literal["ignore", "refuse", "constrain"] = "ignore"
    parser: str = "hermes"  # that reads tool calls from an answer
    stops: frozenset[int] = frozenset()  # token ids that end an answer in this run
    images: bool = False  # whether the model reads images


@dataclass(frozen=True)
class ParsedRequest:
    """A request, parsed."""

    kind: Kind
    model: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    text: str = ""
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
    images: Mapping[str, bytes] = field(default_factory=dict)


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


def decode_body(body: bytes) -> dict[str, Any]:
    """Decode a body as a JSON object.  Raises CallRefused."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CallRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CallRefused(400, "invalid_json", "the body is not a JSON object")
    return value


def parse_request(
    kind: Kind, body: Mapping[str, Any], policy: RequestPolicy, run: SamplingSettings
) -> ParsedRequest:
    """Parse a body of an API.  Raises CallRefused."""
    images: dict[str, bytes] = {}
    if policy.images:
        body, images = image_parts.take_images(body)
    options = {**body}
    if kind == "messages":
        options = anthropic.to_chat(body)
    elif kind == "responses":
        options = responses.to_chat(body)
    elif kind == "ids":
        inner = body.get("sampling_params", {})
        if not isinstance(inner, dict):
            raise build_refusal("sampling_params", "give an object")
        options = {**inner, **body}
    ignored = _check_options(options, policy, run)
    stream_options = options.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise build_refusal("stream_options", "give an object")
    stream = _parse_flag(options, "stream")
    usage = _parse_flag(stream_options, "include_usage")
    if stream and kind == "ids":
        raise build_refusal("stream", "the token route does not stream", "unsupported_parameter")
    model = options.get("model", policy.model)
    if not isinstance(model, str):
        raise build_refusal("model", "give its name as text")
    if model != policy.model and policy.other_models == "refuse":
        raise CallRefused(
            404,
            "model_not_found",
            f"there is no model {model!r}: use {policy.model!r} (agent.other_models = refuse)",
            "model",
        )
    prompt = _parse_prompt(kind, options, policy)
    grammar = ""
    if policy.forced == "constrain":
        grammar = forms.build_grammar(options, prompt.get("tools", ()), policy.parser)
        if grammar:
            ignored = tuple(name for name in ignored if name != forms.PARALLEL)
    return ParsedRequest(
        kind=kind,
        model=model,
        **prompt,
        grammar=grammar,
        max_new_tokens=_parse_max_tokens(options),
        stop=parse_stops(options.get("stop")),
        aside=(model != policy.model and policy.other_models == "aside") or _parse_aside(options),
        stream=stream,
        usage=usage,
        logprobs=_parse_logprobs(kind, options),
        token_ids=_parse_flag(options, "return_token_ids"),
        ignored=ignored,
        images=images,
    )


def _check_options(
    options: Mapping[str, Any], policy: RequestPolicy, run: SamplingSettings
) -> tuple[str, ...]:
    """List the ignored options.  Raises CallRefused for a refused one."""
    ignored = []
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
    return tuple(ignored)


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
    if policy.forced == "constrain":
        if name.startswith(GUIDED):
            raise build_refusal(
                name, "is not served: give structured_outputs", "unsupported_parameter"
            )
        return False
    if policy.forced == "refuse":
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
    if policy.sampling == "refuse":
        value_of_run = f", {run_values[name]:g}" if name in run_values else ""
        raise build_refusal(
            name,
            f"{value!r:.80} is not the run's{value_of_run} (agent.sampling = refuse): omit it",
            "unsupported_parameter",
        )
    return True


def _parse_prompt(kind: Kind, options: Mapping[str, Any], policy: RequestPolicy) -> dict[str, Any]:
    if kind not in ("text", "ids"):
        return {
            "messages": normalize_messages(options.get("messages")),
            "tools": _parse_tools(options),
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


def _parse_tools(options: Mapping[str, Any]) -> list[Any]:
    tools = options.get("tools") or []
    if not isinstance(tools, list):
        raise build_refusal("tools", "give a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise build_refusal("tools", f"tools[{index}]: give a function with a name")
    return [] if options.get("tool_choice") == "none" else tools


def _parse_max_tokens(options: Mapping[str, Any]) -> int:
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


def _parse_aside(options: Mapping[str, Any]) -> bool:
    metadata = options.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise build_refusal("metadata", "give an object")
    mark = (metadata or {}).get("asyncrl")
    if mark not in (None, "aside"):
        raise build_refusal("metadata", f'asyncrl = {mark!r:.80}: the only valid value is "aside"')
    return mark == "aside"


def _parse_flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    if value not in (None, True, False):
        raise build_refusal(name, f"{value!r:.80} is neither true nor false")
    return bool(value)


def _parse_logprobs(kind: Kind, options: Mapping[str, Any]) -> bool:
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
