"""The conversion of messages to token ids, and of sampled ids to a message.

The prompt of a request that continues a call consists of that call's ids, as sampled, and the
encoding of the text after the call's answer.  Sampled ids are never decoded and encoded again,
which may change them.  The end of the answer in the request's text is found in three ways, in this
order:

1. The text begins with the call's prompt text and the sampled text.  The rest follows.
2. The text begins with the template's rendering of the call's messages and its answer, for example
   with another spelling of a tool call.  The rest follows, after the template's end of a turn.
3. With `history = "keep"`, for templates that strip thinking from earlier turns: the answer is
   rendered as a mark, and the text after the mark follows.

Otherwise the request gets a new prompt.
"""

from __future__ import annotations

import bisect
import copy
import json
import os
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal

import numpy as np
import xxhash
from numpy import ndarray

from actors.gateway.call_tree import (
    CallNode,
    Message,
    Messages,
    Tools,
    compute_text_digest,
    join_text,
)
from actors.gateway.refusals import CallRefused, build_refusal, build_too_long_error
from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import MARKER, ImageShape
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import import_function
from asyncrl.models import image_tokens
from asyncrl.models.image_tokens import split_image_parts
from asyncrl.models.tokenizer import encode_text, takes_parts

# characters encoded at once, for each token of generator.context: if the beginning of a text is too
# long, the text is
AT_ONCE = 8
CUT_TOKENS = 64  # tokens that the beginning of a text may have more alone than in the whole text
INVALID = "invalid_messages"  # the code of refusals
# of an image in a text: private characters with its digest.  Messages are compared, rendered by
# the template and continued as text, so that a call continues an earlier one only if the images are
# the same
IMAGE_MARK = re.compile("\ue002([0-9a-f]{32})\ue003")
MARK = "\ue000answer\ue001"  # of private characters, which occur in no history
Parser = Callable[[str], Message]


class ChatFormat:
    """The template, tokenizer and parser of a run.

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
        self.keeps_history = history == "keep"
        self.context = context
        self.ends = {int(token): self.decode_text([int(token)]) for token in stop}
        self.when = when
        self.image_shape: ImageShape | None = getattr(tokenizer, "image_shape", None)

    def with_date(self, when: datetime) -> ChatFormat:
        """Copy the format for a session that began at `when`."""
        dated = copy.copy(self)
        dated.when = when
        return dated

    # ---- to ids ----------------------------------------------------------------------------------

    def encode(self, text: str, *, begins: bool = False) -> ndarray:
        """Encode a text as int32 [P].

        begins: whether a prompt without a template begins with it, which then gets the tokens that
            the tokenizer begins a text with.

        Raises CallRefused for an unpaired surrogate, which a tool call's arguments may hold, and
        for a text longer than the context.  The time of that check depends on the context, not on
        the text.
        """
        try:
            outcomes.check_text(text, "the prompt")
        except ValueError as error:
            raise CallRefused(400, "invalid_text", str(error), "messages") from error
        if self.image_shape is not None:
            text = replace_marks(text)
        at_once = AT_ONCE * self.context
        while self.context and len(text) > at_once:
            count = len(self.tokenizer.encode(text[:at_once], add_special_tokens=False))
            if count > self.context + CUT_TOKENS:
                raise build_too_long_error(
                    f"the prompt has over {count - CUT_TOKENS}", self.context
                )
            at_once *= 2
        ids = (
            encode_text(self.tokenizer, text)
            if begins
            else self.tokenizer.encode(text, add_special_tokens=False)
        )
        if self.image_shape is not None:
            return image_tokens.expand(ids, self.image_shape)
        return np.asarray(ids, dtype=np.int32)

    def find_images(self, text: str, tail: ndarray) -> list[str]:
        """Return the digests of the images of `tail`, the end of the prompt `text`."""
        if self.image_shape is None:
            return []
        digests = find_digests(text)
        image_count = image_tokens.count(tail, self.image_shape) // self.image_shape.length
        return digests[len(digests) - image_count :]

    def require_text(self, ids: ndarray) -> None:
        """Raise CallRefused for ids with image tokens."""
        if self.image_shape is not None and image_tokens.count(ids, self.image_shape):
            raise CallRefused(
                400,
                "invalid_image",
                "the token ids hold image tokens: send the image as a data: URL in the content of "
                "a message",
            )

    def follow(
        self, node: CallNode, messages: Messages, answer_at: int, text: str
    ) -> ndarray | None:
        """Encode the rest of `text` after the node's answer, as int32.

        `text` is rendered from `messages`, and the answer is message `answer_at`.  None when the
        text does not begin with the node's turn.  Raises CallRefused.
        """
        suffix = self.cut_sampled(node, text)
        if suffix is not None and self._ended_by_token(node):
            ends = (end for end in self.ends.values() if suffix.startswith(end))
            end = next(ends, None)
            suffix = None if end is None else suffix[len(end) :]
        if suffix is None:
            suffix = self._find_after_turn(node, messages[: answer_at + 1], text)
        if suffix is None and self.keeps_history:
            suffix = self._find_after_mark(node, messages, answer_at)
        return None if suffix is None else self.encode_suffix(node, suffix)

    def write(self, messages: Messages, tools: Tools, *, answering: bool = True) -> str:
        """Render messages, if `answering` up to where the next answer begins.

        If the template takes parts, images get their marks afterwards.  Raises CallRefused.
        """
        if self.image_shape is None or not takes_parts(self.tokenizer):
            return self._render(messages, tools, answering=answering)
        turns = []
        digests: list[str] = []
        for message in messages:
            content = join_text(message.get("content"))
            digests += find_digests(content)
            turns.append({**message, "content": split_image_parts(replace_marks(content))})
        text = restore_marks(self._render(turns, tools, answering=answering), digests)
        if text is None:
            raise CallRefused(
                400,
                "chat_template",
                f"the model's chat template does not write the {len(digests)} images of these "
                "messages",
            )
        return text

    def _render(self, messages: Messages, tools: Tools, *, answering: bool) -> str:
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
        return compute_text_digest(text[: node.text_length]) == node.text_digest

    def _ended_by_token(self, node: CallNode) -> bool:
        return int(node.ids[-1]) in self.ends

    def cut_sampled(self, node: CallNode, text: str) -> str | None:
        """Find the text after the sampled text: way 1 of the module's docstring."""
        sampled = self.decode_visible(node.ids, node.stop)
        continues = text.startswith(sampled, node.text_length)
        if not continues or not self._begins_with_prompt(node, text):
            return None
        return text[node.text_length + len(sampled) :]

    def _find_after_turn(self, node: CallNode, messages: Messages, text: str) -> str | None:
        """Find the text after the rendered answer: way 2.  messages: up to the answer."""
        if node.rendered_turn is None:
            turn = self.write(messages, node.tools, answering=False)
            node.rendered_turn = (
                len(turn),
                compute_text_digest(turn),
                self._find_closing(node, messages, turn),
            )
        length, digest, closing = node.rendered_turn
        if compute_text_digest(text[:length]) != digest:
            return None
        return closing + text[length:]

    def _find_closing(self, node: CallNode, messages: Messages, turn: str) -> str:
        """Find the text with which the template closes an answer's turn.

        It begins at the last end token, or after it when the model sampled an end token.
        """
        start = node.text_length
        if not self._begins_with_prompt(node, turn):
            earlier = self.write(messages[:-1], node.tools)
            start = len(os.path.commonprefix([earlier, turn]))  # noqa: RUF071 - of characters
        tail = turn[start:]
        ends = [
            (pos, mark) for mark in self.ends.values() if mark and (pos := tail.rfind(mark)) >= 0
        ]
        if ends:
            position, mark = max(ends)
            return tail[position + len(mark) :] if self._ended_by_token(node) else tail[position:]
        # without an end token, the closing follows the text, which a template may have stripped
        content = join_text(messages[-1].get("content"))
        for text in (content, content.strip()):
            if (position := tail.rfind(text)) >= 0:
                return tail[position + len(text) :]
        return ""

    def _find_after_mark(self, node: CallNode, messages: Messages, answer_at: int) -> str | None:
        """Find the text after the answer by rendering a mark in its place: way 3."""
        marked = [*messages]
        marked[answer_at] = {"role": "assistant", "content": MARK}
        text = self.write(marked, node.tools)
        position = text.rfind(MARK)
        if position < 0:
            return None
        suffix = text[position + len(MARK) :]
        if self._ended_by_token(node):
            for end in self.ends.values():
                skipped, separator, suffix_after_end = suffix.partition(end)
                if end and separator and not skipped.strip():
                    return suffix_after_end
        return suffix

    def encode_suffix(self, node: CallNode, suffix: str) -> ndarray:
        """Encode `suffix`, after the sampled end token if there is one.

        A tokenizer may encode a text differently at the beginning and after a token.
        """
        last_id = int(node.ids[-1])
        if end := self.ends.get(last_id):
            ids = self.encode(end + suffix)
            if len(ids) and ids[0] == last_id:
                return ids[1:]
        return self.encode(suffix)

    # ---- to a message ----------------------------------------------------------------------------

    def read(self, ids: ndarray, stop: Sequence[str], name: str) -> Message:
        """Parse sampled ids int32 [T] into a message, in the template's form."""
        text = self.decode_visible(ids, stop)
        try:
            message = {**self.parser(text), "role": "assistant"}
            calls = [
                {**call, "type": "function", "id": make_call_id(name, index)}
                for index, call in enumerate(message.pop("tool_calls", ()))
            ]
            for call in calls:  # JSON that a template and a client can read
                if not isinstance(call["function"]["name"], str):
                    raise TypeError("a function's name must be text")
                json.dumps(call["function"]["arguments"])
        except Exception:  # an answer that the parser cannot read is text
            return {"role": "assistant", "content": text}
        return {**message, "tool_calls": calls} if calls else message

    def decode_visible(self, ids: ndarray, stop: Sequence[str] = ()) -> str:
        """Decode sampled ids, up to the end token or a stop string."""
        tokens = [int(token) for token in ids]
        if tokens and tokens[-1] in self.ends:
            tokens.pop()
        text = self.decode_text(tokens)
        positions = [text.find(string) for string in stop if string and string in text]
        return text[: min(positions)] if positions else text

    def find_stop(self, ids: ndarray, stop: Sequence[str]) -> int | None:
        """Count the leading ids of int32 [T] that complete a stop string, if any."""

        def contains_stop(count: int) -> bool:
            text = self.decode_text(ids[:count].tolist())
            return any(string in text for string in stop if string)

        if not contains_stop(len(ids)):
            return None
        return bisect.bisect_left(range(len(ids)), True, key=contains_stop)

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def make_call_id(name: str, index: int) -> str:
    """Make a tool call's id of nine letters and digits, as some templates require."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    number = xxhash.xxh3_64_intdigest(f"{name}/{index}".encode())
    return "".join(digits[number // 36**position % 36] for position in range(9))


# ---- messages of a request -----------------------------------------------------------------------


def normalize_messages(messages: Any) -> list[Message]:
    """Convert a request's messages to the form that templates take.

    Text parts are joined, None becomes "", a tool call's arguments become an object.  Raises
    CallRefused.
    """
    if not isinstance(messages, list) or not messages:
        raise build_refusal("messages", "give a list of at least one message", INVALID)
    converted = []
    for index, message in enumerate(messages):
        location = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise build_refusal(location, "give an object with `role` and `content`", INVALID)
        message = {**message, "content": read_text(location, message.get("content"), INVALID)}
        if message["role"] == "developer":
            message["role"] = "system"
        try:
            calls = [_parse_arguments(call) for call in message.pop("tool_calls", None) or ()]
        except (TypeError, KeyError, AttributeError) as error:
            reason = "give a list of objects with `id` and `function`"
            raise build_refusal(f"{location}.tool_calls", reason, INVALID) from error
        converted.append({**message, "tool_calls": calls} if calls else message)
    return converted


def read_text(location: str, content: Any, code: str = "invalid_value") -> str:
    """Join the text of a message's content.  Raises CallRefused, which names `location`."""
    try:
        return join_text(content)
    except ValueError as error:
        raise build_refusal(location, str(error), code) from error


def _parse_arguments(call: Message) -> Message:
    """Convert the arguments of a tool call from text to an object, if they are one."""
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}


# ---- images --------------------------------------------------------------------------------------


def make_mark(digest: str) -> str:
    """Return the mark of an image."""
    return f"\ue002{digest}\ue003"


def find_digests(text: str) -> list[str]:
    """Return the digests of the marks in a text, in their order.

    >>> find_digests(make_mark("0" * 32) + "?") == ["0" * 32]
    True
    """
    return IMAGE_MARK.findall(text)


def replace_marks(text: str) -> str:
    """Replace each mark by the marker that the model's tokenizer knows.

    Raises CallRefused for a text that has the marker already.
    """
    if MARKER in text:
        raise CallRefused(
            400,
            "invalid_image",
            f"a text has {MARKER}, which is the model's token of an image: send the image as a "
            "data: URL in the content of a message",
            "messages",
        )
    return IMAGE_MARK.sub(MARKER, text)


def restore_marks(text: str, digests: list[str]) -> str | None:
    """Replace the markers of a rendered text by the marks of `digests`, in order.

    None if their numbers differ.
    """
    pieces = text.split(MARKER)
    if len(pieces) != len(digests) + 1:
        return None
    marks = [*map(make_mark, digests), ""]
    return "".join(piece + mark for piece, mark in zip(pieces, marks, strict=True))


# ---- parsers -------------------------------------------------------------------------------------


def parse_plain_text(text: str) -> Message:
    """Keep an answer as its text (agent.parser = "none").

    >>> parse_plain_text("<tool_call>{}</tool_call>")
    {'content': '<tool_call>{}</tool_call>'}
    """
    return {"content": text}


HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def parse_hermes(text: str) -> Message:
    """Parse tool calls in <tool_call> tags (agent.parser = "hermes"; Qwen, Hermes).

    Text up to </think> is thinking.  A tag without a valid call stays text.

    >>> call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> message = parse_hermes("hm</think>So: " + call)
    >>> message["reasoning_content"], message["content"], message["tool_calls"][0]["function"]
    ('hm', 'So:', {'name': 'add', 'arguments': {'a': 1}})
    >>> parse_hermes("<tool_call>{oops}</tool_call>")
    {'content': '<tool_call>{oops}</tool_call>'}
    """
    message: Message = {}
    thought, end_tag, visible = text.partition("</think>")
    if end_tag:
        message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
        text = visible.lstrip("\n")
    calls = []
    texts = []
    end = 0
    for match in HERMES_CALL.finditer(text):
        try:
            call = json.loads(match[1])
        except ValueError:
            continue
        arguments = call.get("arguments", {})
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            continue
        function = {"name": call["name"], "arguments": arguments}
        calls.append({"id": "", "type": "function", "function": function})
        texts.append(text[end : match.start()])
        end = match.end()
    message["content"] = text
    if calls:
        message["content"] = "".join([*texts, text[end:]]).strip()
        message["tool_calls"] = calls
    return message


PARSERS: dict[str, Parser] = {"none": parse_plain_text, "hermes": parse_hermes}


def find_parser(name: str) -> Parser:
    """Find the parser that agent.parser names: `hermes`, `none` or `module:function`.

    A parser takes an answer's text and returns a message: content, and optionally tool_calls and
    reasoning_content.  Raises ConfigError.
    """
    if name in PARSERS:
        return PARSERS[name]
    if ":" not in name:
        raise ConfigError(
            f"agent.parser: {name!r} is not one of {', '.join(PARSERS)}, module:function"
        )
    return import_function(name, "agent.parser")
