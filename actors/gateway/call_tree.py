r"""The tree of a session's calls, and the training sequences that are made of it.

```
 node 0 --- node 1 --- node 4        sequence 0: 0, 1, 4
       \--- node 2                   sequence 1: 0 (mask 0), 2
 node 3 --- node 5                   sequence 2: 3, 5
```

A node is a call: its prompt and the sampled ids.  Its prompt begins with the prompt and the sampled
ids of its parent (`token_ids`), id by id, since decoding and encoding them again may give other
ids.  Messages only serve to find the parent, by chained digests; the session's own answers among
them are replaced by the sampled ones.

A training sequence ("row" in names) follows first children from a node to a leaf.  So each sampled
token is trained in exactly one sequence, the first that holds it.  Pure."""

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
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport

Message = dict[str, Any]
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class CallNode:
    """One call.

    tail: int32, the prompt after the parent's `token_ids` (for a root, all of it)
    ids: int32 [T], T >= 1, the sampled ids, or None until the call is answered
    logprobs: float32 [T]
    """

    number: int  # in the order in which calls were placed
    parent: CallNode | None
    tail: np.ndarray
    aside: bool = False  # excluded from training
    stop: tuple[str, ...] = ()
    ids: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    spans: list[VersionSpan] = field(default_factory=list)
    support: SampledSupport | None = None  # of the T tokens; None: nothing was truncated
    # of the tokens that the call read and its parent did not; None: not recorded
    routed: RoutedExperts | None = None
    finish: Literal["stop", "length"] = "stop"
    # the messages of its prompt: their digest, the session's own answers among them, the tools
    chain: bytes = b""
    ours: dict[int, CallNode] = field(default_factory=dict)  # message index -> the call it answers
    tools: Sequence[Any] = ()
    # the text of its prompt: characters, digest
    text_length: int = 0
    text_digest: bytes = b""
    images: list[str] = field(default_factory=list)  # the digests of its tail's images
    answer: Message | None = None  # the parsed answer, as the template takes it
    written: tuple[int, bytes, str] | None = None  # chat.py: length, digest and closing of the turn

    def prompt(self) -> np.ndarray:
        """The ids of the whole prompt, int32 [P]."""
        parts = [self.tail]
        node = self.parent
        while node is not None:
            assert node.ids is not None  # only an answered call is continued
            parts += [node.ids, node.tail]
            node = node.parent
        return np.concatenate(parts[::-1])

    def token_ids(self) -> np.ndarray:
        """The prompt and the sampled ids, int32 [P + T]."""
        assert self.ids is not None
        return np.concatenate([self.prompt(), self.ids])

    def all_images(self) -> list[str]:
        """The digests of the images of the whole prompt."""
        parts = [self.images]
        node = self.parent
        while node is not None:
            parts.append(node.images)
            node = node.parent
        return [name for part in parts[::-1] for name in part]

    @property
    def own_reads(self) -> int:
        """Tokens that the call read and its parent did not.

        These are its tail and its sampled ids, the last one excluded, and the parent's last one.
        """
        assert self.ids is not None
        return len(self.tail) + len(self.ids) - (self.parent is None)

    def set_routed(self, routed: RoutedExperts | None) -> None:
        """Keep the experts of its own reads; routed: of the P + T - 1 or more tokens it read."""
        if routed is not None:
            assert self.ids is not None
            end = len(self.prompt()) + len(self.ids) - 1
            routed = routed.part(end - self.own_reads, end)
        self.routed = routed

    def all_routed(self) -> RoutedExperts | None:
        """The experts of all P + T - 1 tokens, each as the first call that read it used them."""
        parts = []
        node: CallNode | None = self
        while node is not None:
            if node.routed is None:
                return None
            parts.append(node.routed)
            node = node.parent
        return RoutedExperts.join(parts[::-1])


# ---- messages ------------------------------------------------------------------------------------


def plain_text(content: Any) -> str:
    """Join the text of a message's content; None is "".

    Raises ValueError for a part that is not text.
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
            raise ValueError(f"a content part of type {kind!r}: only text is supported")
        texts.append(text)
    return "".join(texts)


def canonical_arguments(given: Any) -> str:
    """Write a tool call's arguments as canonical JSON; text that is not JSON is kept."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return str(given)
    return json.dumps(given, sort_keys=True, separators=(",", ":"))


def canonical(message: Message) -> bytes:
    """Encode a message's identity.

    White space around an assistant's text is ignored, since some clients strip it.
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
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON may hold
        return json.dumps(parts).encode()


def chained(before: bytes, message: Message) -> bytes:
    """Chain the digest of a conversation's beginning with its last message."""
    return xxhash.xxh3_128_digest(before + xxhash.xxh3_128_digest(canonical(message)))


def text_digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


@dataclass
class MessageMatch:
    """The earlier calls that a request's messages match.

    chains: [n + 1], the digest before each message and after the last
    candidates: (i, a node whose answer is message i), the deepest first, of these the nodes of the
        wanted kind, of these the newest
    known: number of leading messages that an earlier request held
    """

    chains: list[bytes]
    candidates: list[tuple[int, CallNode]]
    known: int

    def own_answers(self) -> dict[int, CallNode]:
        """The session's own answers among the messages, by the best candidate."""
        if not self.candidates:
            return {}
        index, node = self.candidates[0]
        return {**node.ours, index: node}


# ---- the tree ------------------------------------------------------------------------------------


class CallTree:
    """The nodes of one session."""

    def __init__(self) -> None:
        self.nodes: list[CallNode] = []
        self.placed = 0  # calls ever placed, which is the next one's number
        self.answers: dict[bytes, list[CallNode]] = {}  # chain after the answer -> nodes
        self.seen: set[bytes] = set()  # chains of all requests
        self.forks: Counter[str] = Counter()  # cause -> sequences beyond the first

    def find(self, messages: Sequence[Message], aside: bool = False) -> MessageMatch:
        """Find the calls that the messages may continue.

        aside: prefer excluded calls among equal ones, or trained ones.  The two sides of a game may
            have equal messages, and each must continue its own.

        Raises ValueError as `plain_text` does.
        """
        chains = [b""]
        for message in messages:
            chains.append(chained(chains[-1], message))
        candidates = [
            (index, node)
            for index in reversed(range(len(messages)))
            for preferred in (True, False)
            for node in reversed(self.answers.get(chains[index + 1], ()))
            if (node.aside == aside) is preferred
        ]
        known = 0
        while known < len(messages) and chains[known + 1] in self.seen:
            known += 1
        return MessageMatch(chains, candidates, known)

    def find_ids(self, ids: np.ndarray, aside: bool = False) -> CallNode | None:
        """Find the node with the longest `token_ids` that `ids` begin with.

        Of equal ones it is one with the given `aside`, of these the newest.
        """
        best: tuple[tuple[int, bool], CallNode] | None = None
        for node in self.nodes:
            if node.ids is None:
                continue
            own_ids = node.token_ids()
            length = len(own_ids)
            rank = (length, node.aside == aside)
            if best is not None and rank < best[0]:
                continue
            if length <= len(ids) and np.array_equal(own_ids, ids[:length]):
                best = (rank, node)
        return best[1] if best else None

    def texts(self) -> list[CallNode]:
        """The answered calls that were placed by text without a template."""
        return [
            node
            for node in self.nodes
            if node.ids is not None and node.text_digest and not node.chain
        ]

    def starts_row(self, new: CallNode) -> bool:
        """Whether a call that is not among the nodes yet would begin a training sequence."""
        if new.aside:
            return False
        above = trained_above(new.parent)
        return above is None or any(
            trained_above(node.parent) is above for node in self.nodes if not node.aside
        )

    def rows_begun(self) -> int:
        """The number of training sequences, with those of open calls."""
        return sum(1 for _ in row_starts(self.nodes))

    def add(self, node: CallNode, chains: Sequence[bytes] = ()) -> None:
        """Add a placed call and the chains of its messages."""
        self.nodes.append(node)
        self.placed += 1
        self.seen.update(chains[1:])

    def set_answer(self, node: CallNode, answer: Message) -> None:
        """Set the parsed answer of a call; requests that contain it continue the node."""
        node.answer = answer
        chain = chained(node.chain, answer)
        self.answers.setdefault(chain, []).append(node)
        self.seen.add(chain)

    def remove(self, node: CallNode) -> None:
        """Remove a call that has no token."""
        self.nodes.remove(node)


def trained_above(node: CallNode | None) -> CallNode | None:
    """Find the nearest trained node among a node and its ancestors."""
    while node is not None and node.aside:
        node = node.parent
    return node


def row_starts(nodes: Sequence[CallNode]) -> Iterator[CallNode]:
    """Yield the nodes that begin a training sequence, in call order.

    These are trained roots, and all trained children of a node but the first.
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
    """Build the training sequences, in the order of their first own calls.

    rewards: call number -> the call's share of the reward
    """
    answered = [node for node in nodes if node.ids is not None]
    follower: dict[CallNode, CallNode] = {}
    for node in sorted(answered, key=lambda node: node.number):
        if not node.aside and (above := trained_above(node.parent)) is not None:
            follower.setdefault(above, node)
    return tuple(_make_row(start, follower, rewards) for start in row_starts(answered))


def _make_row(
    start: CallNode, follower: Mapping[CallNode, CallNode], shares: Mapping[int, float]
) -> TrainingSequence:
    """Build the training sequence that begins at `start` and follows first children."""
    own = [start]
    while (following := follower.get(own[-1])) is not None:
        own.append(following)
    prompt = start.prompt()
    tokens = own[-1].token_ids()[len(prompt) :]
    logprobs = np.zeros(len(tokens), np.float32)
    mask = np.zeros(len(tokens), np.uint8)
    rewards = np.full(len(tokens), np.nan, np.float32)  # NaN: no reward at this token
    spans: list[VersionSpan] = []
    segments: list[tuple[str, int, int]] = []
    supports: list[SampledSupport] = []
    end = 0
    for node in own:
        assert node.ids is not None and node.logprobs is not None
        first = len(node.prompt()) - len(prompt)
        if first > end:
            segments.append(("context", end, first))
        supports += [
            SampledSupport.untruncated(first - end),
            node.support or SampledSupport.untruncated(len(node.ids)),
        ]
        end = first + len(node.ids)
        segments.append(("model", first, end))
        logprobs[first:end] = node.logprobs
        mask[first:end] = 1
        rewards[end - 1] = shares.get(node.number, np.nan)
        spans += [
            VersionSpan(span.label, span.digest, first + span.start, first + span.end, span.kv)
            for span in node.spans
        ]
    routed = own[-1].all_routed()
    return TrainingSequence(
        prompt_tokens=np.ascontiguousarray(prompt, "<i4").tobytes(),
        tokens=np.ascontiguousarray(tokens, "<i4").tobytes(),
        behavior_logprobs=logprobs.astype("<f4").tobytes(),
        mask=mask.tobytes(),
        spans=spans,
        segments=segments,
        token_rewards=rewards.astype("<f4").tobytes() if shares else b"",
        support=SampledSupport.join(supports).encode(),
        routed=b"" if routed is None else routed.encode(),
        images=own[-1].all_images(),
    )
