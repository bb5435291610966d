"""Messages to token ids, and drawn ids to a message.

A prompt is composed once.  A request that continues a call is that call's ids, as drawn, and the
encoding of what its text has behind the call's answer: nothing that was drawn is decoded and
encoded again.  Where the answer ends in the request's text is found in three ways, in this order:

1. the text begins with the call's own prompt text and the drawn text: the rest follows;
2. it begins with what the template writes of the call's messages and its answer (another spelling
   of a tool call, say): the rest follows, behind what the template closes a turn with;
3. `history = "keep"`: it does neither, as the template strips thinking from earlier turns: the
   answer is written as a mark, and the rest is what follows the mark.

Otherwise the request is a prompt of its own."""

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
from actors.gateway.sessions import CallRefused
from asyncrl.contract import outcomes
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.importing import module

# characters for each token of generator.context that are encoded at once: of a longer text first
# its beginning, which may be too long already
AT_ONCE = 8
CUT_TOKENS = 64  # that the beginning of a text may have more than it has within the whole
MARK = "\ue000answer\ue001"  # private characters, which no history holds
Parser = Callable[[str], Message]


class ChatFormat:
    """The template, tokenizer and parser of a run; a `sessions.Composer`.

    stop: ids that end an answer; context: tokens of a prompt and its answer, 0 for no limit; when:
    what the template is told of the time (frozen: a session that lives past midnight has one
    date)."""

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

    def with_date(self, when: datetime) -> ChatFormat:
        """The same for a session that began then."""
        made = ChatFormat.__new__(ChatFormat)
        made.__dict__.update(self.__dict__, when=when)
        return made

    # ---- to ids ----------------------------------------------------------------------------------

    def write(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The text of a request, up to where its answer begins.  Raises CallRefused."""
        return self._write(messages, tools, answering=True)

    def encode(self, text: str) -> np.ndarray:
        """int32 [P]; no token is added to those that `decode_text` names.

        Raises CallRefused for half of a character, which arguments of a tool call may hold, as they
        are JSON within JSON; and for a text that is longer than the context, at a cost that grows
        with the context and not with the text."""
        try:
            outcomes.check_text(text, "the prompt")
        except ValueError as error:
            raise CallRefused(400, "invalid_text", str(error), "messages") from error
        at_once = AT_ONCE * self.context
        while self.context and len(text) > at_once:
            count = len(self.tokenizer.encode(text[:at_once], add_special_tokens=False))
            if count > self.context + CUT_TOKENS:
                raise CallRefused(
                    400,
                    "context_length_exceeded",
                    f"the prompt has over {count - CUT_TOKENS} tokens, and generator.context = "
                    f"{self.context} is for prompt and answer: shorten the history",
                    "messages",
                )
            at_once *= 2
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(ids, dtype=np.int32)

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
        """The same without a template: `decode_text` begins with the call's text and its answer."""
        if not self._begins_with_prompt(node, text):
            return None
        drawn = self._drawn_text(node)
        if not text.startswith(drawn, node.text_length):
            return None
        return self._continued(node, text[node.text_length + len(drawn) :])

    def _write(self, messages: Sequence[Message], tools: Sequence[Any], *, answering: bool) -> str:
        told = {} if self.when is None else {"strftime_now": self.when.strftime}
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=answering,
                **told,
            )
        except Exception as error:  # whatever a template raises: it is a program of its own
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise CallRefused(
                400, "chat_template", f"the model's chat template fails on these messages: {why}"
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
        """1. above, for an answer of text alone."""
        drawn = self._drawn_text(node)
        if not self._begins_with_prompt(node, text) or not text.startswith(drawn, node.text_length):
            return None
        rest = text[node.text_length + len(drawn) :]
        if not self._ended_by_token(node):
            return rest
        return next((rest[len(end) :] for end in self.ends.values() if rest.startswith(end)), None)

    def _behind_turn(self, node: CallNode, messages: Sequence[Message], text: str) -> str | None:
        """2. above.  messages: up to the answer."""
        if node.written is None:
            turn = self._write(messages, node.tools, answering=False)
            node.written = (len(turn), text_digest(turn), self._closing(node, messages, turn))
        length, digest, closing = node.written
        if len(text) < length or text_digest(text[:length]) != digest:
            return None
        return closing + text[length:]

    def _closing(self, node: CallNode, messages: Sequence[Message], turn: str) -> str:
        """What the template writes behind an answer that it has written: from its last end token
        on, which is there already when the model drew one.
        """
        start = node.text_length
        if not self._begins_with_prompt(node, turn):
            start = common(self._write(messages[:-1], node.tools, answering=True), turn)
        tail = turn[start:]
        found = [(at, end) for end in self.ends.values() if end and (at := tail.rfind(end)) >= 0]
        if found:
            at, end = max(found)
            return tail[at + len(end) :] if self._ended_by_token(node) else tail[at:]
        # no end token in it: what follows the text, which a template may have stripped
        content = plain_text(messages[-1].get("content"))
        for written in (content, content.strip()):
            if (at := tail.rfind(written)) >= 0:
                return tail[at + len(written) :]
        return ""

    def _behind_mark(
        self, node: CallNode, messages: Sequence[Message], answer_at: int
    ) -> str | None:
        """3. above."""
        marked = [*messages]
        marked[answer_at] = {"role": "assistant", "content": MARK}
        text = self._write(marked, node.tools, answering=True)
        at = text.rfind(MARK)
        if at < 0:
            return None
        rest = text[at + len(MARK) :]
        if self._ended_by_token(node):
            for end in self.ends.values():
                before, found, after = rest.partition(end)
                if end and found and not before.strip():
                    return after
        return rest

    def _continued(self, node: CallNode, rest: str) -> np.ndarray:
        """`rest` as ids, encoded behind the end token that was drawn, if any: a tokenizer may write
        the beginning of a text in another way than what follows a token.
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
        """The answer that ids int32 [T] are, as the template is given it."""
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
        except Exception:  # a parser's fault, or an answer it does not know: never an error
            return {"role": "assistant", "content": text}
        return {**message, "tool_calls": calls} if calls else message

    def visible_text(self, ids: np.ndarray, stop: Sequence[str] = ()) -> str:
        """The text of drawn ids, up to the end token or a stop string."""
        tokens = [int(token) for token in ids]
        if tokens and tokens[-1] in self.ends:
            tokens.pop()
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        found = [at for each in stop if each and (at := text.find(each)) >= 0]
        return text[: min(found)] if found else text

    def find_stop(self, ids: np.ndarray, stop: Sequence[str]) -> int | None:
        """How many of ids int32 [T] it takes to complete a stop string; None: none is in them."""

        def contains_stop(count: int) -> bool:
            text = self.tokenizer.decode(ids[:count].tolist(), skip_special_tokens=True)
            return any(each in text for each in stop if each)

        if not contains_stop(len(ids)):
            return None
        return bisect.bisect_left(range(len(ids)), True, key=contains_stop)

    def _drawn_text(self, node: CallNode) -> str:
        assert node.ids is not None
        return self.visible_text(node.ids, node.stop)

    def decode_text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def common(one: str, other: str) -> int:
    """Characters that both begin with."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def _check_tool_calls(calls: Sequence[Message]) -> None:
    """Raises for a tool call that clients could not read."""
    for call in calls:
        if not isinstance(call["function"]["name"], str):
            raise TypeError("a function's name is text")
        json.dumps(call["function"]["arguments"])


def call_id(name: str, place: int) -> str:
    """Nine letters and digits, as the strictest template wants them."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    number = xxhash.xxh3_64_intdigest(f"{name}/{place}".encode())
    return "".join(digits[number // 36**at % 36] for at in range(9))


# ---- what a request holds ------------------------------------------------------------------------


def normalised(messages: Any) -> list[Message]:
    """The messages of a request as templates take them: text joined, None as "", a tool call's
    arguments as an object.  Raises CallRefused.
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
    made = {**message, "content": content}
    if message["role"] == "developer":
        made["role"] = "system"
    if not message.get("tool_calls"):
        made.pop("tool_calls", None)
        return made
    try:
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in message["tool_calls"]
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise _bad(
            f"messages[{place}].tool_calls: give a list of objects with `id` and `function`"
        ) from error
    return made


def _arguments(function: Mapping[str, Any]) -> Any:
    given = function.get("arguments", {})
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except ValueError:
            return given
        return found if isinstance(found, dict) else given
    return given


def _bad(why: str) -> CallRefused:
    return CallRefused(400, "invalid_messages", why, "messages")


# ---- parsers -------------------------------------------------------------------------------------


def parse_plain_text(text: str) -> Message:
    """agent.parser = "none": an answer is its text.

    >>> parse_plain_text("<tool_call>{}</tool_call>")
    {'content': '<tool_call>{}</tool_call>'}
    """
    return {"content": text}


HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def hermes(text: str) -> Message:
    """agent.parser = "hermes": calls as objects between <tool_call> tags (Qwen, Hermes), thinking
    up to </think>.  What is no call stays text.

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
    kept = []
    end = 0
    for found in HERMES_CALL.finditer(text):
        if (function := _hermes_call(found[1])) is None:
            continue
        calls.append(
            {
                "id": "",
                "type": "function",
                "function": function,
            }
        )
        kept.append(text[end : found.start()])
        end = found.end()
    message["content"] = text
    if calls:
        message["content"] = "".join([*kept, text[end:]]).strip()
        message["tool_calls"] = calls
    return message


def _hermes_call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return {"name": found["name"], "arguments": arguments} if isinstance(arguments, dict) else None


PARSERS: dict[str, Parser] = {"none": parse_plain_text, "hermes": hermes}


def parser_for(name: str) -> Parser:
    """The parser that agent.parser names: `hermes`, `none` or `module:function`, which is given an
    answer's text and returns a message: content, and tool_calls or reasoning_content if there are.

    Raises ConfigError."""
    if name in PARSERS:
        return PARSERS[name]
    where, colon, function = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"agent.parser: {name!r} is none of {', '.join(PARSERS)}, module:function"
        )
    try:
        made = getattr(module(where), function)
    except Exception as error:  # whatever importing it raises
        raise ConfigError(f"agent.parser: {name}: {type(error).__name__}: {error}") from error
    if not callable(made):
        raise ConfigError(f"agent.parser: {name} is no function")
    return made  # type: ignore[no-any-return]
