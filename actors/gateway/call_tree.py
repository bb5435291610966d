r"""The tree of a session's calls, and the training sequences that are made of it.

```
 node 0 --- node 1 --- node 4        sequence 0: 0, 1, 4
       \--- node 2                   sequence 1: 0 (mask 0), 2
 node 3 --- node 5                   sequence 2: 3, 5
```

A node is a call: its prompt and the sampled ids.  Its prompt begins with the prompt and the sampled
ids of its parent (`build_token_ids`), id by id, because decoding and encoding them again may give
other ids.  Messages only serve to find the parent, by chained digests.  The session's own answers
among them are replaced by the sampled ones.

A training sequence ("row" in names) follows first children from a node to a leaf.  So each sampled
token is trained in exactly one sequence, the first that holds it.  Pure.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from numpy import ndarray

from asyncrl.contract.messages import TrainingSequence, VersionSpan
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport

Message = dict[str, Any]
Messages = Sequence[Message]
Tools = Sequence[Any]  # as a request describes them
ANY = b"any"  # in place of the chain before an answer: wherever the answer stands
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class CallNode:
    """One call: a generation, and its place in the tree.

    tail: int32, the prompt after the parent's `build_token_ids` (for a root, all of it)
    ids: int32 [T], the sampled ids: T = 0 until the call is answered
    logprobs: float32 [T]
    """

    number: int  # in the order in which calls were placed
    parent: CallNode | None
    tail: ndarray
    aside: bool = False  # excluded from training
    stop: tuple[str, ...] = ()
    ids: ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    spans: list[VersionSpan] = field(default_factory=list)
    support: SampledSupport | None = None  # of the T tokens; None: nothing was truncated
    # of the tokens that the call read and its parent did not; None: not recorded
    routed: RoutedExperts | None = None
    finish: Literal["stop", "length"] = "stop"
    # the messages of its prompt: their digest, the session's own answers among them, the tools
    chain: bytes = b""
    chains: Sequence[bytes] = ()  # the digest before each message, until it is added to the tree
    ours: dict[int, CallNode] = field(default_factory=dict)  # message index -> the call it answers
    tools: Tools = ()
    # the text of its prompt: characters, digest
    text_length: int = 0
    text_digest: bytes = b""
    images: list[str] = field(default_factory=list)  # the digests of its tail's images
    answer: Message | None = None  # the parsed answer, as the template takes it
    # chat.py: length, digest and closing of the turn
    rendered_turn: tuple[int, bytes, str] | None = None
    # until it is answered
    request: int = 0  # its id at the generators; 0: they do not have it
    waiter: Any = None  # the asyncio.Future of a call over HTTP
    fork_cause: str = ""  # the cause to count if it begins a training sequence
    stream_key: int = 0  # its random stream; 0 is the stream of a sample without an agent
    max_new_tokens: int = 0
    run_bound: bool = False  # max_new_tokens comes from the run or the session, not from the client
    grammar: str = ""  # that its answer is decoded under; "": none
    alone_since: float = math.inf  # when the last connection that waited for its answer closed
    cut: bool = False  # is being cancelled

    @property
    def path(self) -> list[CallNode]:
        """The nodes from the root to this one."""
        node: CallNode | None = self
        nodes = []
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def prompt_ids(self) -> ndarray:
        """The ids of the whole prompt, int32 [P]."""
        earlier = (ids for node in self.path[:-1] for ids in (node.tail, node.ids))
        return np.concatenate([*earlier, self.tail])

    def build_token_ids(self) -> ndarray:
        """Return the prompt and the sampled ids, int32 [P + T]."""
        return np.concatenate([self.prompt_ids, self.ids])

    @property
    def is_answered(self) -> bool:
        return len(self.ids) > 0

    def list_images(self) -> list[str]:
        """Return the digests of the images of the whole prompt."""
        return [name for node in self.path for name in node.images]

    @property
    def own_reads(self) -> int:
        """Tokens that the call read and its parent did not.

        These are its tail and its sampled ids, the last one excluded, and the parent's last one.
        """
        return len(self.tail) + len(self.ids) - (self.parent is None)


# ---- messages ------------------------------------------------------------------------------------


def join_text(content: Any) -> str:
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


def canonicalize_arguments(arguments: Any) -> str:
    """Write a tool call's arguments as canonical JSON; text that is not JSON is kept."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return str(arguments)
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def encode_identity(message: Message) -> bytes:
    """Encode a message's identity.

    White space around an assistant's text is ignored, because some clients strip it.
    """
    text = join_text(message.get("content"))
    if message.get("role") == "assistant":
        text = text.strip()
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = canonicalize_arguments(function.get("arguments", ""))
        calls.append([call.get("id"), function.get("name"), arguments])
    identity = [message.get("role"), text, calls, message.get("tool_call_id")]
    try:
        return _encode(identity)
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON may hold
        return json.dumps(identity).encode()


def chain_digest(previous: bytes, message: Message) -> bytes:
    """Chain the digest of a conversation's beginning with its last message."""
    return xxhash.xxh3_128_digest(previous + xxhash.xxh3_128_digest(encode_identity(message)))


def compute_text_digest(text: str) -> bytes:
    """Compute the digest of a text, which may hold unpaired surrogates."""
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


@dataclass
class MessageMatch:
    """The earlier calls that a request's messages match.

    chains: [n + 1], the digest before each message and after the last
    candidates: (i, a node with message i as its answer), the deepest first, of these the nodes of
        the preferred kind, of these the newest
    known_count: number of leading messages that an earlier request held
    answers: message index -> the call with this answer, also after messages that were changed
    """

    chains: list[bytes]
    candidates: list[tuple[int, CallNode]]
    known_count: int
    answers: dict[int, CallNode]

    def map_own_answers(self, candidate: tuple[int, CallNode] | None) -> dict[int, CallNode]:
        """Map message indices to the session's own answers, as a candidate continues them."""
        if candidate is None:
            return self.answers
        index, node = candidate
        later = {place: other for place, other in self.answers.items() if place > index}
        return {**node.ours, index: node, **later}


# ---- the tree ------------------------------------------------------------------------------------


class CallTree:
    """The nodes of one session."""

    def __init__(self) -> None:
        self.nodes: list[CallNode] = []
        self.placed = 0  # calls ever placed, which is the next one's number
        self.nodes_by_answer: dict[bytes, list[CallNode]] = {}  # chain after the answer -> nodes
        self.known_chains: set[bytes] = set()  # chains of all requests
        self.written: set[bytes] = set()  # assistant messages that the agent wrote itself
        self.forks: Counter[str] = Counter()  # cause -> sequences beyond the first

    def find(self, messages: Messages, aside: bool = False) -> MessageMatch:
        """Find the calls that the messages may continue.

        aside: whether to prefer excluded calls among equal ones.  The two sides of a game may have
            equal messages, and each must continue its own.

        Raises ValueError as `join_text` does.
        """
        chains = [b""]
        for message in messages:
            chains.append(chain_digest(chains[-1], message))
        candidates = [
            (index, node)
            for index in reversed(range(len(messages)))
            for preferred in (True, False)
            for node in reversed(self.nodes_by_answer.get(chains[index + 1], ()))
            if (node.aside == aside) is preferred
        ]
        known_count = 0
        while known_count < len(messages) and chains[known_count + 1] in self.known_chains:
            known_count += 1
        # the session's own answers by their messages alone, in the order of the calls: of calls
        # with equal answers, each is the first after the answer before it, else the newest; a
        # message that the agent wrote before the policy did, such as an example, is not an answer
        answers: dict[int, CallNode] = {}
        last = -1
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            key = chain_digest(ANY, message)
            if key not in self.nodes_by_answer:
                self.written.add(key)
            nodes = [node for node in self.nodes_by_answer.get(key, ()) if node.aside == aside]
            if nodes and key not in self.written:
                node = next((node for node in nodes if node.number > last), nodes[-1])
                answers[index] = node
                last = node.number
        return MessageMatch(chains, candidates, known_count, answers)

    def find_ids(self, ids: ndarray, aside: bool = False) -> CallNode | None:
        """Find the node with the longest token ids that `ids` begin with.

        Among nodes of equal length, one with an equal `aside` is preferred, and then the newest.
        """
        beginnings = [
            (len(own_ids), node.aside == aside, node.number, node)
            for node in self.nodes
            if node.is_answered
            if np.array_equal(own_ids := node.build_token_ids(), ids[: len(own_ids)])
        ]
        return max(beginnings)[-1] if beginnings else None

    def count_rows(self, new_node: CallNode | None = None) -> int:
        """Count the training sequences, with those of open calls, and of one that is not added."""
        return len(find_rows([*self.nodes, new_node] if new_node else self.nodes))

    def add(self, node: CallNode) -> None:
        """Add a placed call and the chains of its messages."""
        self.nodes.append(node)
        self.placed += 1
        self.known_chains.update(node.chains[1:])
        node.chains = ()

    def set_answer(self, node: CallNode, answer: Message) -> None:
        """Set the parsed answer of a call; requests that contain it continue the node."""
        node.answer = answer
        chain = chain_digest(node.chain, answer)
        for key in (chain, chain_digest(ANY, answer)):
            self.nodes_by_answer.setdefault(key, []).append(node)
        self.known_chains.add(chain)


def find_trained_ancestor(node: CallNode | None) -> CallNode | None:
    """Find the nearest trained node among a node and its ancestors."""
    while node is not None and node.aside:
        node = node.parent
    return node


def find_rows(nodes: Sequence[CallNode]) -> list[list[CallNode]]:
    """Split the trained nodes into training sequences, in the order of their first nodes.

    A node continues the sequence that ends with its nearest trained ancestor.  Trained roots begin
    one, and so do all trained children of a node but the first.
    """
    rows = []
    rows_by_end: dict[CallNode | None, list[CallNode]] = {}
    for node in sorted(nodes, key=lambda node: node.number):
        if not node.aside:
            row = rows_by_end.pop(find_trained_ancestor(node.parent), [])
            if not row:
                rows.append(row)
            row.append(node)
            rows_by_end[node] = row
    return rows


def build_rows(
    nodes: Sequence[CallNode], rewards: Mapping[int, float] = {}
) -> tuple[TrainingSequence, ...]:
    """Build the training sequences, in the order of their first own calls.

    rewards: call number -> the call's share of the reward
    """
    rows = find_rows([node for node in nodes if node.is_answered])
    return tuple(_make_row(path, rewards) for path in rows)


def _make_row(path: Sequence[CallNode], shares: Mapping[int, float]) -> TrainingSequence:
    """Build a training sequence of its calls."""
    prompt = path[0].prompt_ids
    tokens = path[-1].build_token_ids()[len(prompt) :]
    logprobs = np.zeros(len(tokens), np.float32)
    mask = np.zeros(len(tokens), np.uint8)
    rewards = np.full(len(tokens), np.nan, np.float32)  # NaN: no reward at this token
    spans: list[VersionSpan] = []
    segments: list[tuple[str, int, int]] = []
    supports: list[SampledSupport] = []
    end = 0
    for node in path:
        start = len(node.prompt_ids) - len(prompt)
        if start > end:
            segments.append(("context", end, start))
        supports += [
            SampledSupport.make_untruncated(start - end),
            node.support or SampledSupport.make_untruncated(len(node.ids)),
        ]
        end = start + len(node.ids)
        segments.append(("model", start, end))
        logprobs[start:end] = node.logprobs
        mask[start:end] = 1
        rewards[end - 1] = shares.get(node.number, np.nan)
        spans += [
            VersionSpan(span.label, span.digest, start + span.start, start + span.end, span.kv)
            for span in node.spans
        ]
    # each token has the experts of the first call that read it
    pieces = [node.routed for node in path[-1].path if node.routed is not None]
    routed = RoutedExperts.join(pieces) if len(pieces) == len(path[-1].path) else None
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
        images=path[-1].list_images(),
    )
