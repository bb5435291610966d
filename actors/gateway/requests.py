"""What a request of the endpoint asks for: bodies of /v1/chat/completions, /v1/completions, the
token route, /v1/messages and /v1/responses, read strictly.  Pure.

The distribution is the run's.  What only ends an answer earlier is followed.  A client's own
temperature and a forced format or tool are ignored by name, or refused.  What the policy cannot be
trained under is refused, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from actors.gateway import anthropic, responses
from actors.gateway.call_tree import Message
from actors.gateway.chat import normalised
from actors.gateway.sessions import CallRefused
from asyncrl.contract.messages import SamplingSettings

Kind = Literal["chat", "text", "ids", "messages", "responses"]
PREFIX: dict[Kind, str] = {  # of a call's id
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
    """The run's ways with what clients ask for: the config's section [agent]."""

    model: str = "policy"  # the name under which calls are trained
    # calls for another name: drawn and never trained; trained; or 404
    other_models: Literal["aside", "train", "refuse"] = "aside"
    sampling: Literal["ignore", "refuse"] = "ignore"  # a client's temperature, top_p, top_k, seed
    vocabulary: int = 0  # ids of the token route lie below; 0: not known
    forced: Literal["ignore", "refuse"] = "ignore"  # a format or a tool that the answer must have
    stops: frozenset[int] = frozenset()  # token ids that end an answer in this run


@dataclass(frozen=True)
class ParsedRequest:
    """One request, read."""

    kind: Kind
    model: str
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    text: str = ""
    ids: np.ndarray | None = None  # int32 [P]
    max_new_tokens: int = 0  # 0: as many as the run allows
    stop: tuple[str, ...] = ()
    aside: bool = False
    stream: bool = False
    usage: bool = False  # in the stream too
    logprobs: bool = False
    token_ids: bool = False
    ignored: tuple[str, ...] = ()


def _empty(value: Any) -> bool:
    return not value


def _is(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == each and type(value) is not bool for each in allowed)


def _false(value: Any) -> bool:
    return value is False


# what the policy cannot follow: key -> (values that ask for nothing, why not)
ONE = "one answer a call: ask again for another, every equal request is a draw of its own"
OTHER = "the run's policy would be another one than it is trained as"
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_is(1), ONE),
    "best_of": (_is(0, 1), ONE),
    "use_beam_search": (_false, ONE),
    "logit_bias": (_empty, OTHER),
    "frequency_penalty": (_is(0), OTHER),
    "presence_penalty": (_is(0), OTHER),
    "repetition_penalty": (_is(1), OTHER),
    "length_penalty": (_is(1), OTHER),
    "min_p": (_is(0), OTHER),
    "min_tokens": (_is(0), OTHER),
    "ignore_eos": (_false, OTHER),
    "bad_words": (_empty, OTHER),
    "allowed_token_ids": (_empty, OTHER),
    "logits_processors": (_empty, OTHER),
    "thinking_token_budget": (_empty, OTHER),
    "functions": (_empty, "give `tools`"),
    "function_call": (_is("auto", "none"), "give `tool_choice`"),
    "echo": (_false, "the prompt is yours already"),
    "suffix": (_empty, "nothing is written before a text"),
    "top_logprobs": (_is(0), "only the drawn token's log-probability is kept"),
    "prompt_logprobs": (_is(0), "a prompt is not scored"),
    "logprob_token_ids": (_empty, "only the drawn token's log-probability is kept"),
    "include_stop_str_in_output": (_false, "the text ends before the stop string"),
    "truncate_prompt_tokens": (_empty, "shorten the history yourself"),
    "continue_final_message": (
        _false,
        "an answer begins a turn; /v1/completions goes on in a text",
    ),
    "add_generation_prompt": (lambda value: value is True, "an answer begins a turn"),
    "chat_template": (_empty, "the template is the run's"),
    "chat_template_kwargs": (_empty, "the template is the run's"),
    "documents": (_empty, "put them into a message"),
    "audio": (_empty, "only text is known here"),
    "content_parts": (_empty, "only text is known here"),
    "features": (_empty, "only text is known here"),
    "modalities": (lambda value: value == ["text"], "only text is known here"),
    "web_search_options": (_empty, "give the search as a tool"),
}
# a format or a tool that the answer must have -> values that force nothing
FORCED: dict[str, Callable[[Any], bool]] = {
    "response_format": lambda value: value == {"type": "text"},
    "structured_outputs": _empty,
    "text.format": lambda value: value == {"type": "text"},
    "output_format": _empty,
    "output_config.format": _empty,
    "tool_choice": _is("auto", "none"),
}
GUIDED = "guided_"
# a client's own: ignored and named, or refused
SAMPLING = ("temperature", "top_p", "top_k", "seed")
# what the answer is without: no word is said
QUIET = {
    *("model", "messages", "prompt", "token_ids", "sampling_params", "tools"),
    *("max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "logprobs"),
    *("return_token_ids", "metadata", "user", "store", "request_id"),
    *("skip_special_tokens", "detokenize", "output_mode"),
}


def bad(param: str, why: str, code: str = "invalid_value") -> CallRefused:
    return CallRefused(400, code, f"{param}: {why}", param)


def decoded(body: bytes) -> dict[str, Any]:
    """A body as an object.  Raises CallRefused."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CallRefused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CallRefused(400, "invalid_json", "the body is not a JSON object")
    return found


def parse_request(
    kind: Kind, body: Mapping[str, Any], manners: RequestPolicy, run: SamplingSettings
) -> ParsedRequest:
    """What a body asks for.  Raises CallRefused."""
    options = {**body}
    if kind == "messages":
        options = anthropic.to_chat(body)
    elif kind == "responses":
        options = responses.to_chat(body)
    elif kind == "ids":
        inner = body.get("sampling_params", {})
        if not isinstance(inner, dict):
            raise bad("sampling_params", "give an object")
        options = {**inner, **body}
    ignored = _check_options(options, manners, run)
    stream, usage = _stream(options)
    if stream and kind == "ids":
        raise bad("stream", "the token route answers at once", "unsupported_parameter")
    model = options.get("model", manners.model)
    if not isinstance(model, str):
        raise bad("model", "give its name")
    if model != manners.model and manners.other_models == "refuse":
        raise CallRefused(
            404,
            "model_not_found",
            f"there is no model {model!r}; this run's is {manners.model!r} (agent.other_models)",
            "model",
        )
    return ParsedRequest(
        kind=kind,
        model=model,
        **_prompt(kind, options, manners),
        max_new_tokens=_max_tokens(options),
        stop=_stop(options.get("stop")),
        aside=(model != manners.model and manners.other_models == "aside") or _aside(options),
        stream=stream,
        usage=usage,
        logprobs=_logprobs(kind, options),
        token_ids=_flag(options, "return_token_ids"),
        ignored=ignored,
    )


def _check_options(
    options: Mapping[str, Any], manners: RequestPolicy, run: SamplingSettings
) -> tuple[str, ...]:
    """Names of what is ignored.  Raises CallRefused for what is refused."""
    ignored = []
    for name, value in options.items():
        if value is None or name in QUIET:
            continue
        if name in REFUSED:
            harmless, why = REFUSED[name]
            if not harmless(value):
                raise bad(name, f"{value!r:.80} is not served: {why}", "unsupported_parameter")
        elif name == "stop_token_ids":
            _check_stop_ids(value, manners)
        elif name in FORCED or name.startswith(GUIDED):
            if _forces(name, value, manners):
                ignored.append(name)
        elif name not in SAMPLING or _samples_otherwise(name, value, manners, run):
            ignored.append(name)
    return tuple(ignored)


def _check_stop_ids(given: Any, manners: RequestPolicy) -> None:
    """Raises CallRefused for an id that does not end an answer in this run anyway."""
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise bad("stop_token_ids", "give a list of token ids")
    if foreign := sorted({*given} - manners.stops):
        raise bad(
            "stop_token_ids",
            f"{foreign!r:.80} do not end an answer in this run, whose stop ids are "
            f"{sorted(manners.stops)}: leave them out, or add their text to generator.stop",
            "unsupported_parameter",
        )


def _forces(name: str, value: Any, manners: RequestPolicy) -> bool:
    """Whether a value asks for an answer of a certain form.  Raises CallRefused."""
    if FORCED.get(name, _empty)(value):
        return False
    if (
        name in FORCED
        and not isinstance(value, dict)
        and not (name == "tool_choice" and isinstance(value, str))
    ):
        raise bad(name, f"{value!r:.80}: give an object")
    if manners.forced == "refuse":
        raise bad(
            name,
            f"{value!r:.80} is not served, as an answer cannot be forced (agent.forced = refuse): "
            "put it in the prompt, and in the reward",
            "unsupported_parameter",
        )
    return True


def _samples_otherwise(
    name: str, value: Any, manners: RequestPolicy, run: SamplingSettings
) -> bool:
    """Whether a value is another one than the run's.  Raises CallRefused."""
    ours = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
    if name in ours and value == ours[name]:
        return False
    if manners.sampling == "refuse":
        said = f", {ours[name]:g}" if name in ours else " alone"
        raise bad(
            name,
            f"{value!r:.80} is not the run's{said} (agent.sampling = refuse): leave it out",
            "unsupported_parameter",
        )
    return True


def _prompt(kind: Kind, options: Mapping[str, Any], manners: RequestPolicy) -> dict[str, Any]:
    if kind not in ("text", "ids"):
        return {"messages": normalised(options.get("messages")), "tools": _tools(options)}
    if kind == "text":
        prompt = options.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return {"text": prompt}
        if prompt and isinstance(prompt, list) and isinstance(prompt[0], str | list):
            raise bad("prompt", "one prompt a call", "unsupported_parameter")
        return {"ids": _ids("prompt", prompt, manners)}
    return {"ids": _ids("token_ids", options.get("token_ids"), manners)}


def _ids(param: str, given: Any, manners: RequestPolicy) -> np.ndarray:
    most = manners.vocabulary or (1 << 31)
    if not isinstance(given, list) or not given:
        kind = "text or a list of token ids" if param == "prompt" else "a list of token ids"
        raise bad(param, f"give {kind}")
    if not all(type(each) is int and 0 <= each < most for each in given):
        raise bad(param, f"token ids lie in [0, {most})")
    return np.array(given, np.int32)


def _tools(options: Mapping[str, Any]) -> list[Any]:
    tools = options.get("tools") or []
    if not isinstance(tools, list):
        raise bad("tools", "give a list")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad("tools", f"tools[{place}] is no function with a name")
    return [] if options.get("tool_choice") == "none" else tools


def _max_tokens(options: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = options.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise bad(name, f"{value!r:.80} is no number of tokens from 1 on")
        return value
    return 0


def _stop(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise bad("stop", "give a text, or a list of texts")
    if len(stops) > MOST_STOPS or any(len(each) > STOP_CHARACTERS for each in stops):
        raise bad("stop", f"at most {MOST_STOPS} texts of {STOP_CHARACTERS} characters")
    return tuple(stops)


def _aside(options: Mapping[str, Any]) -> bool:
    metadata = options.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise bad("metadata", "give an object")
    said = (metadata or {}).get("asyncrl")
    if said not in (None, "aside"):
        raise bad("metadata", f'asyncrl = {said!r:.80}: the one word known here is "aside"')
    return said == "aside"


def _stream(options: Mapping[str, Any]) -> tuple[bool, bool]:
    more = options.get("stream_options") or {}
    if not isinstance(more, dict):
        raise bad("stream_options", "give an object")
    return _flag(options, "stream"), _flag(more, "include_usage")


def _flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    if value not in (None, True, False):
        raise bad(name, f"{value!r:.80} is neither true nor false")
    return bool(value)


def _logprobs(kind: Kind, options: Mapping[str, Any]) -> bool:
    value = options.get("logprobs")
    if kind not in ("text", "ids"):
        return _flag(options, "logprobs")
    if value is None or value is False:
        return False
    if value is not True and value not in (0, 1):
        why = "only the drawn token's log-probability is kept: ask for 1"
        raise bad("logprobs", f"{value!r:.80} is not served: {why}", "unsupported_parameter")
    return True
