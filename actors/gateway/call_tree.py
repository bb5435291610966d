r"""The calls of one session as a forest: which call continues which, and the rows that are trained.

```
 node 0 --- node 1 --- node 4        row 0: 0, 1, 4
       \--- node 2                   row 1: 0 (mask 0), 2
 node 3 --- node 5                   row 2: 3, 5
```

A node is a call that drew: its prompt and the drawn ids.  Its prompt begins with all that its
parent's prompt and draw held (`token_ids`), id by id: nothing is decoded and encoded again.
Messages
only find the parent, by digests chained over them; what of them is ours is put back as it was
drawn.  A row goes from a node along first children to a leaf, so each drawn token is trained in
exactly one row, the first that holds it.  Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from asyncrl.contract.messages import TrainingSequence, VersionSpan

Message = dict[str, Any]
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class CallNode:
    """One call.  tail int32: its prompt behind `token_ids` of the parent; a root's whole prompt.

    Placed, `ids` is None; drawn, it holds int32 [T], T >= 1, and logprobs float32 [T] of them.
    """

    number: int  # in the order in which calls were placed
    parent: CallNode | None
    tail: np.ndarray
    aside: bool = False  # drawn and never trained
    stop: tuple[str, ...] = ()
    ids: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    finish: Literal["stop", "length"] = "stop"
    # what it was placed by: the chain up to its last message, the answers of ours among them (index
    # of the message -> node), the tools
    chain: bytes = b""
    ours: dict[int, CallNode] = field(default_factory=dict)
    tools: Sequence[Any] = ()
    # the text of its prompt: characters, digest; and what the template makes of the answer
    text_length: int = 0
    text_digest: bytes = b""
    answer: Message | None = None
    written: tuple[int, bytes, str] | None = None  # chat.py: length, digest and closing of the turn

    def prompt(self) -> np.ndarray:
        """int32 [P], all that the call was given."""
        parts = [self.tail]
        node = self.parent
        while node is not None:
            assert node.ids is not None  # only a drawn call is continued
            parts += [node.ids, node.tail]
            node = node.parent
        return np.concatenate(parts[::-1])

    def token_ids(self) -> np.ndarray:
        """int32 [P + T], prompt and drawn ids."""
        assert self.ids is not None
        return np.concatenate([self.prompt(), self.ids])


# ---- messages ------------------------------------------------------------------------------------


def plain_text(content: Any) -> str:
    """The text of a message's content: None is "", parts are joined.  Raises ValueError for a part
    that is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is {type(content).__name__}; give text, or a list of text parts")
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"a content part of type {kind!r}: only text is known here")
        texts.append(text)
    return "".join(texts)


def canonical_arguments(given: Any) -> str:
    """A tool call's arguments in one spelling; text that is no JSON as it is."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return str(given)
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def canonical(message: Message) -> bytes:
    """What identifies a message.  An assistant's text counts without the white space around it,
    which clients strip.
    """
    text = plain_text(message.get("content"))
    if message.get("role") == "assistant":
        text = text.strip()
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = canonical_arguments(function.get("arguments", ""))
        calls.append([call.get("id"), function.get("name"), arguments])
    parts = [message.get("role"), text, calls, message.get("tool_call_id")]
    try:
        return _encode(parts)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may hold
        return json.dumps(parts).encode()


def chained(before: bytes, message: Message) -> bytes:
    """The digest of a conversation that ends with `message`; before: of what stood before it."""
    return xxhash.xxh3_128_digest(before + xxhash.xxh3_128_digest(canonical(message)))


def text_digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


@dataclass
class MessageMatch:
    """What of a request's messages is known: chains [n + 1], the digest before each message and
    after the last; `candidates`: nodes whose answer is message i, deepest first, then newest (of
    the kind asked for)."""

    chains: list[bytes]
    candidates: list[tuple[int, CallNode]]
    known: int  # leading messages that some earlier request held

    def own_answers(self) -> dict[int, CallNode]:
        """Our answers among the messages, by the best candidate."""
        if not self.candidates:
            return {}
        index, node = self.candidates[0]
        return {**node.ours, index: node}


# ---- the forest ----------------------------------------------------------------------------------


class CallTree:
    """The nodes of one session, and where a call belongs among them."""

    def __init__(self) -> None:
        self.nodes: list[CallNode] = []
        self.placed = 0  # calls ever placed: the next one's number
        self.answers: dict[bytes, list[CallNode]] = {}  # chain after the answer -> nodes
        self.seen: set[bytes] = set()
        self.forks: Counter[str] = Counter()

    def find(self, messages: Sequence[Message], aside: bool = False) -> MessageMatch:
        """Look the messages up; nothing is changed.  Raises ValueError as `plain_text`.

        aside: of equal answers those come first that are aside, or not, as this says: the two sides
        of a game may be told and say the same, and each goes on behind its own."""
        chains = [b""]
        for message in messages:
            chains.append(chained(chains[-1], message))
        candidates = [
            (index, node)
            for index in reversed(range(len(messages)))
            for alike in (True, False)
            for node in reversed(self.answers.get(chains[index + 1], ()))
            if (node.aside == aside) is alike
        ]
        known = 0
        while known < len(messages) and chains[known + 1] in self.seen:
            known += 1
        return MessageMatch(chains, candidates, known)

    def find_ids(self, ids: np.ndarray, aside: bool = False) -> CallNode | None:
        """The node of the longest `token_ids` that `ids` begin with, of those one that is aside or
        not
        as is asked for, of those the newest; None: none does.
        """
        best: tuple[tuple[int, bool], CallNode] | None = None
        for node in self.nodes:
            if node.ids is None:
                continue
            whole = node.token_ids()
            length = len(whole)
            rank = (length, node.aside == aside)
            if best is not None and rank < best[0]:
                continue
            if length <= len(ids) and np.array_equal(whole, ids[:length]):
                best = (rank, node)
        return best[1] if best else None

    def texts(self) -> list[CallNode]:
        """Drawn calls that were placed by text alone."""
        return [
            node
            for node in self.nodes
            if node.ids is not None and node.text_digest and not node.chain
        ]

    def starts_row(self, new: CallNode) -> bool:
        """Whether a call that is not among the nodes yet would begin a row."""
        if new.aside:
            return False
        above = trained_above(new.parent)
        return above is None or any(
            trained_above(node.parent) is above for node in self.nodes if not node.aside
        )

    def rows_begun(self) -> int:
        """Rows, with those of calls that still draw."""
        return sum(1 for _ in row_starts(self.nodes))

    def add(self, node: CallNode, chains: Sequence[bytes] = ()) -> None:
        """A placed call; its messages become known."""
        self.nodes.append(node)
        self.placed += 1
        self.seen.update(chains[1:])

    def set_answer(self, node: CallNode, answer: Message) -> None:
        """The drawn call's answer as the template is given it; requests that hold it continue the
        node.
        """
        node.answer = answer
        chain = chained(node.chain, answer)
        self.answers.setdefault(chain, []).append(node)
        self.seen.add(chain)

    def remove(self, node: CallNode) -> None:
        """A call that drew nothing leaves no node."""
        self.nodes.remove(node)


def trained_above(node: CallNode | None) -> CallNode | None:
    """The node itself or its nearest ancestor that is trained."""
    while node is not None and node.aside:
        node = node.parent
    return node


def row_starts(nodes: Sequence[CallNode]) -> Iterator[CallNode]:
    """The nodes that begin a row, in call order: trained roots, and every trained child of a node
    but the first.
    """
    continued: set[CallNode] = set()
    for node in sorted(nodes, key=lambda node: node.number):
        if node.aside:
            continue
        above = trained_above(node.parent)
        if above is None or above in continued:
            yield node
        else:
            continued.add(above)


def rows_of(
    nodes: Sequence[CallNode], rewards: Mapping[int, float] = {}
) -> tuple[TrainingSequence, ...]:
    """The rows of drawn nodes, in the order of their first own calls; rewards: call -> its own."""
    drawn = [node for node in nodes if node.ids is not None]
    follower: dict[CallNode, CallNode] = {}
    for node in sorted(drawn, key=lambda node: node.number):
        if not node.aside and (above := trained_above(node.parent)) is not None:
            follower.setdefault(above, node)
    return tuple(_make_row(start, follower, rewards) for start in row_starts(drawn))


def _make_row(
    start: CallNode, follower: Mapping[CallNode, CallNode], shares: Mapping[int, float]
) -> TrainingSequence:
    """The row that begins at `start` and goes on along first children; shares: rewards of calls."""
    own = [start]
    while (following := follower.get(own[-1])) is not None:
        own.append(following)
    prompt = start.prompt()
    whole = own[-1].token_ids()
    tokens = whole[len(prompt) :]
    logprobs = np.zeros(len(tokens), np.float32)
    mask = np.zeros(len(tokens), np.uint8)
    rewards = np.full(len(tokens), np.nan, np.float32)  # no number but where a call has one
    spans: list[VersionSpan] = []
    segments: list[tuple[str, int, int]] = []
    end = 0
    for node in own:
        assert node.ids is not None and node.logprobs is not None
        first = len(node.prompt()) - len(prompt)
        if first > end:
            segments.append(("context", end, first))
        end = first + len(node.ids)
        segments.append(("model", first, end))
        logprobs[first:end] = node.logprobs
        mask[first:end] = 1
        rewards[end - 1] = shares.get(node.number, np.nan)
        spans += [
            VersionSpan(span.label, span.digest, first + span.start, first + span.end, span.kv)
            for span in node.spans
        ]
    return TrainingSequence(
        prompt_tokens=np.ascontiguousarray(prompt, "<i4").tobytes(),
        tokens=np.ascontiguousarray(tokens, "<i4").tobytes(),
        behavior_logprobs=logprobs.astype("<f4").tobytes(),
        mask=mask.tobytes(),
        spans=spans,
        segments=segments,
        token_rewards=rewards.astype("<f4").tobytes() if shares else b"",
    )
