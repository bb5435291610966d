"""Converts messages to token ids, and sampled ids to a message.

The prompt of a request that continues a call consists of that call's ids, as sampled, and the
encoding of the text after the call's answer: sampled ids are never decoded and encoded again, which
may change them.  The end of the answer in the request's text is found in three ways, in this order:

1. The text begins with the call's prompt text and the sampled text.  The rest follows.
2. The text begins with the template's rendering of the call's messages and its answer, for example
   with another spelling of a tool call.  The rest follows, after the template's end of a turn.
3. With `history = "keep"`, for templates that strip thinking from earlier turns: the answer is
   rendered as a mark, and the text after the mark follows.

Otherwise the request gets a new prompt."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import numpy as np
import xxhash

from actors.gateway.call_tree import CallNode, Message, plain_text, text_digest
from actors.gateway.image_marks import digests_in, with_markers, with_marks
from actors.gateway.sessions import CallRefused, too_long
from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import ImageShape
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import module
from asyncrl.models.tokenizer import takes_parts
from asyncrl.models.vision import image_tokens
from asyncrl.models.vision.image_tokens import split_image_parts

# characters encoded at once, for each token of generator.context: a longer text is too long if its
# beginning is
AT_ONCE = 8
CUT_TOKENS = 64  # tokens that the beginning of a text may have more alone than in the whole text
MARK = "\ue000answer\ue001"  # of private characters, which occur in no history
Parser = Callable[[str], Message]


class ChatFormat:
    """The template, tokenizer and parser of a run; a `sessions.Composer`.

    stop: ids that end an answer
    context: limit of tokens of a prompt and its answer; 0: none
    when: the time for the template, fixed for a session so that its date does not change
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[int],
        *,
        parser: Parser | None = None,
        history: Literal["template", "keep"] = "template",
        context: int = 0,
        when: datetime | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.parser = parser or parse_plain_text
        self.keeps = history == "keep"
        self.context = context
        self.ends = {int(token): self.decode_text([int(token)]) for token in stop}
        self.when = when
        self.image_shape: ImageShape | None = getattr(tokenizer, "image_shape", None)

    def with_date(self, when: datetime) -> ChatFormat:
        """Copy the format for a session that began at `when`."""
        copy = ChatFormat.__new__(ChatFormat)
        copy.__dict__.update(self.__dict__, when=when)
        return copy

    # ---- to ids ----------------------------------------------------------------------------------

    def write(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """Render a request, up to where its answer begins.  Raises CallRefused."""
        return self._write(messages, tools, answering=True)

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as int32 [P], without added special tokens.

        Raises CallRefused for an unpaired surrogate, which a tool call's arguments may hold, and
        for a text longer than the context; that check costs time by the context, not by the text.
        """
        try:
            outcomes.check_text(text, "the prompt")
        except ValueError as error:
            raise CallRefused(400, "invalid_text", str(error), "messages") from error
        if self.image_shape is not None:
            text = with_markers(text)
        at_once = AT_ONCE * self.context
        while self.context and len(text) > at_once:
            count = len(self.tokenizer.encode(text[:at_once], add_special_tokens=False))
            if count > self.context + CUT_TOKENS:
                raise too_long(f"the prompt has over {count - CUT_TOKENS}", self.context)
            at_once *= 2
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.image_shape is not None:
            return image_tokens.expand(ids, self.image_shape)
        return np.asarray(ids, dtype=np.int32)

    def images_of(self, text: str, tail: np.ndarray) -> list[str]:
        """See `sessions.Composer.images_of`."""
        if self.image_shape is None:
            return []
        digests = digests_in(text)
        own = image_tokens.count(tail, self.image_shape) // self.image_shape.length
        return digests[len(digests) - own :]

    def require_text(self, ids: np.ndarray) -> None:
        """See `sessions.Composer.require_text`."""
        if self.image_shape is not None and image_tokens.count(ids, self.image_shape):
            raise CallRefused(
                400,
                "invalid_image",
                "the token ids hold image tokens: send the image as a data: URL in the content of "
                "a message",
            )

    def follow(
        self, node: CallNode, messages: Sequence[Message], answer_at: int, text: str
    ) -> np.ndarray | None:
        """See `sessions.Composer.follow`.  Raises CallRefused."""
        rest = self._behind_drawn(node, text)
        if rest is None:
            rest = self._behind_turn(node, messages[: answer_at + 1], text)
        if rest is None and self.keeps:
            rest = self._behind_mark(node, messages, answer_at)
        return None if rest is None else self._continued(node, rest)

    def continue_text(self, node: CallNode, text: str) -> np.ndarray | None:
        """See `sessions.Composer.continue_text`.  Raises CallRefused."""
        if not self._begins_with_prompt(node, text):
            return None
        sampled = self._drawn_text(node)
        if not text.startswith(sampled, node.text_length):
            return None
        return self._continued(node, text[node.text_length + len(sampled) :])

    def _write(self, messages: Sequence[Message], tools: Sequence[Any], *, answering: bool) -> str:
        """Render messages; where the template takes parts, images get their marks afterwards."""
        if self.image_shape is None or not takes_parts(self.tokenizer):
            return self._render(messages, tools, answering=answering)
        turns = []
        digests: list[str] = []
        for message in messages:
            content = plain_text(message.get("content"))
            digests += digests_in(content)
            turns.append({**message, "content": split_image_parts(with_markers(content))})
        text = with_marks(self._render(turns, tools, answering=answering), digests)
        if text is None:
            raise CallRefused(
                400,
                "chat_template",
                f"the model's chat template does not write the {len(digests)} images of these "
                "messages",
            )
        return text

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], *, answering: bool) -> str:
        date = {} if self.when is None else {"strftime_now": self.when.strftime}
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=answering,
                **date,
            )
        except Exception as error:  # a template is a program that may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise CallRefused(
                400, "chat_template", f"the model's chat template fails on these messages: {reason}"
            ) from error
        return str(text)

    def _begins_with_prompt(self, node: CallNode, text: str) -> bool:
        return (
            len(text) >= node.text_length
            and text_digest(text[: node.text_length]) == node.text_digest
        )

    def _ended_by_token(self, node: CallNode) -> bool:
        assert node.ids is not None
        return int(node.ids[-1]) in self.ends

    def _behind_drawn(self, node: CallNode, text: str) -> str | None:
        """Find the text after the sampled answer: way 1 of the module's docstring."""
        sampled = self._drawn_text(node)
        if not self._begins_with_prompt(node, text):
            return None
        if not text.startswith(sampled, node.text_length):
            return None
        rest = text[node.text_length + len(sampled) :]
        if not self._ended_by_token(node):
            return rest
        return next((rest[len(end) :] for end in self.ends.values() if rest.startswith(end)), None)

    def _behind_turn(self, node: CallNode, messages: Sequence[Message], text: str) -> str | None:
        """Find the text after the rendered answer: way 2.  messages: up to the answer."""
        if node.written is None:
            turn = self._write(messages, node.tools, answering=False)
            node.written = (len(turn), text_digest(turn), self._closing(node, messages, turn))
        length, digest, closing = node.written
        if len(text) < length or text_digest(text[:length]) != digest:
            return None
        return closing + text[length:]

    def _closing(self, node: CallNode, messages: Sequence[Message], turn: str) -> str:
        """Find the text with which the template closes an answer's turn.

        It begins at the last end token, or after it when the model sampled an end token.
        """
        start = node.text_length
        if not self._begins_with_prompt(node, turn):
            start = common(self._write(messages[:-1], node.tools, answering=True), turn)
        tail = turn[start:]
        ends = [(pos, end) for end in self.ends.values() if end and (pos := tail.rfind(end)) >= 0]
        if ends:
            position, end = max(ends)
            return tail[position + len(end) :] if self._ended_by_token(node) else tail[position:]
        # without an end token: what follows the text, which a template may have stripped
        content = plain_text(messages[-1].get("content"))
        for text in (content, content.strip()):
            if (position := tail.rfind(text)) >= 0:
                return tail[position + len(text) :]
        return ""

    def _behind_mark(
        self, node: CallNode, messages: Sequence[Message], answer_at: int
    ) -> str | None:
        """Find the text after the answer by rendering a mark in its place: way 3."""
        marked = [*messages]
        marked[answer_at] = {"role": "assistant", "content": MARK}
        text = self._write(marked, node.tools, answering=True)
        position = text.rfind(MARK)
        if position < 0:
            return None
        rest = text[position + len(MARK) :]
        if self._ended_by_token(node):
            for end in self.ends.values():
                before, separator, after = rest.partition(end)
                if end and separator and not before.strip():
                    return after
        return rest

    def _continued(self, node: CallNode, rest: str) -> np.ndarray:
        """Encode `rest`, after the sampled end token if there is one.

        A tokenizer may encode a text differently at the beginning and after a token.
        """
        assert node.ids is not None
        last = int(node.ids[-1])
        if end := self.ends.get(last):
            ids = self.encode(end + rest)
            if len(ids) and ids[0] == last:
                return ids[1:]
        return self.encode(rest)

    # ---- to a message ----------------------------------------------------------------------------

    def read(self, ids: np.ndarray, stop: Sequence[str], name: str) -> Message:
        """Parse sampled ids int32 [T] into a message, in the template's form."""
        text = self.visible_text(ids, stop)
        try:
            message = {**self.parser(text), "role": "assistant"}
            calls = [
                {
                    **call,
                    "type": "function",
                    "id": call_id(name, place),
                }
                for place, call in enumerate(message.pop("tool_calls", ()))
            ]
            _check_tool_calls(calls)
        except Exception:  # an answer that the parser cannot read is text
            return {"role": "assistant", "content": text}
        return {**message, "tool_calls": calls} if calls else message

    def visible_text(self, ids: np.ndarray, stop: Sequence[str] = ()) -> str:
        """Decode sampled ids, up to the end token or a stop string."""
        tokens = [int(token) for token in ids]
        if tokens and tokens[-1] in self.ends:
            tokens.pop()
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        positions = [text.find(string) for string in stop if string and string in text]
        return text[: min(positions)] if positions else text

    def find_stop(self, ids: np.ndarray, stop: Sequence[str]) -> int | None:
        """Count the leading ids of int32 [T] that complete a stop string; None without one."""

        def contains_stop(count: int) -> bool:
            text = self.tokenizer.decode(ids[:count].tolist(), skip_special_tokens=True)
            return any(string in text for string in stop if string)

        if not contains_stop(len(ids)):
            return None
        return bisect.bisect_left(range(len(ids)), True, key=contains_stop)

    def _drawn_text(self, node: CallNode) -> str:
        assert node.ids is not None
        return self.visible_text(node.ids, node.stop)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def common(one: str, other: str) -> int:
    """Count the characters of the common beginning of two texts."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))


def _check_tool_calls(calls: Sequence[Message]) -> None:
    """Raise TypeError, KeyError or ValueError for a tool call that is not valid JSON."""
    for call in calls:
        if not isinstance(call["function"]["name"], str):
            raise TypeError("a function's name must be text")
        json.dumps(call["function"]["arguments"])


def call_id(name: str, place: int) -> str:
    """Make a tool call's id of nine letters and digits, as some templates require."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    number = xxhash.xxh3_64_intdigest(f"{name}/{place}".encode())
    return "".join(digits[number // 36**position % 36] for position in range(9))


# ---- messages of a request -----------------------------------------------------------------------


def normalised(messages: Any) -> list[Message]:
    """Convert a request's messages to the form that templates take.

    Text parts are joined, None becomes "", a tool call's arguments become an object.  Raises
    CallRefused.
    """
    if not isinstance(messages, list) or not messages:
        raise _bad("messages: give a list of at least one message")
    return [_normalised(place, message) for place, message in enumerate(messages)]


def _normalised(place: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _bad(f"messages[{place}]: give an object with `role` and `content`")
    try:
        content = plain_text(message.get("content"))
    except ValueError as error:
        raise _bad(f"messages[{place}]: {error}") from error
    converted = {**message, "content": content}
    if message["role"] == "developer":
        converted["role"] = "system"
    if not message.get("tool_calls"):
        converted.pop("tool_calls", None)
        return converted
    try:
        converted["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in message["tool_calls"]
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise _bad(
            f"messages[{place}].tool_calls: give a list of objects with `id` and `function`"
        ) from error
    return converted


def _arguments(function: Mapping[str, Any]) -> Any:
    given = function.get("arguments", {})
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except ValueError:
            return given
        return value if isinstance(value, dict) else given
    return given


def _bad(why: str) -> CallRefused:
    return CallRefused(400, "invalid_messages", why, "messages")


# ---- parsers -------------------------------------------------------------------------------------


def parse_plain_text(text: str) -> Message:
    """Keep an answer as its text (agent.parser = "none").

    >>> parse_plain_text("<tool_call>{}</tool_call>")
    {'content': '<tool_call>{}</tool_call>'}
    """
    return {"content": text}


HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def hermes(text: str) -> Message:
    """Parse tool calls between <tool_call> tags (agent.parser = "hermes"; Qwen, Hermes).

    Text up to </think> is thinking.  A tag without a valid call stays text.

    >>> made = hermes('hm</think>So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> made["reasoning_content"], made["content"], made["tool_calls"][0]["function"]
    ('hm', 'So:', {'name': 'add', 'arguments': {'a': 1}})
    >>> hermes("<tool_call>{oops}</tool_call>")
    {'content': '<tool_call>{oops}</tool_call>'}
    """
    message: Message = {}
    thought, closed, answer = text.partition("</think>")
    if closed:
        message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
        text = answer.lstrip("\n")
    calls = []
    texts = []
    end = 0
    for match in HERMES_CALL.finditer(text):
        if (function := _hermes_call(match[1])) is None:
            continue
        calls.append(
            {
                "id": "",
                "type": "function",
                "function": function,
            }
        )
        texts.append(text[end : match.start()])
        end = match.end()
    message["content"] = text
    if calls:
        message["content"] = "".join([*texts, text[end:]]).strip()
        message["tool_calls"] = calls
    return message


def _hermes_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return {"name": call["name"], "arguments": arguments} if isinstance(arguments, dict) else None


PARSERS: dict[str, Parser] = {"none": parse_plain_text, "hermes": hermes}


def parser_for(name: str) -> Parser:
    """Find the parser that agent.parser names: `hermes`, `none` or `module:function`.

    A parser takes an answer's text and returns a message: content, and optionally tool_calls and
    reasoning_content.  Raises ConfigError.
    """
    if name in PARSERS:
        return PARSERS[name]
    module_name, colon, function = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"agent.parser: {name!r} is not one of {', '.join(PARSERS)}, module:function"
        )
    try:
        parser = getattr(module(module_name), function)
    except Exception as error:  # an import may raise anything
        raise ConfigError(f"agent.parser: {name}: {type(error).__name__}: {error}") from error
    if not callable(parser):
        raise ConfigError(f"agent.parser: {name} is not a function")
    return parser  # type: ignore[no-any-return]
