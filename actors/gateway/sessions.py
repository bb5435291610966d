"""A session: one sample that takes several calls, from its ticket to its reward.

```
 place_* --> CallNode --(an engine samples)--> on_result       build_training_rows
 register_request, on_connection_closed: recognize a client's retries

 open --> limited (grace_s) --+
 open ------------------------+--> judging --> ended: scored or failed
```

Pure: the clock and the composer of prompts, a `ChatFormat`, are arguments, and no method waits.
All methods are called from one thread.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import xxhash
from msgspec import structs
from numpy import ndarray

from actors.gateway.call_tree import (
    CallNode,
    CallTree,
    Message,
    MessageMatch,
    Messages,
    Tools,
    build_rows,
    compute_text_digest,
)
from actors.gateway.chat import ChatFormat
from actors.gateway.refusals import TOO_LONG, CallRefused, build_too_long_error
from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import MOST_IMAGES, MOST_SESSION_BYTES, Blobs
from asyncrl.contract.messages import (
    IntPair,
    Numbers,
    SampleKey,
    Ticket,
    TrainingSequence,
    VersionSpan,
)
from asyncrl.contract.printable import escape_line
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport

NEVER = math.inf
Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class SessionLimits:
    """The limits of a session ([agent] and generator.context); 0: none."""

    context: int = 0  # tokens of a prompt and its answer
    max_calls: int = 32
    max_tokens: int = 0  # sampled in a session
    rows: int = 16  # training sequences
    parallel: int = 16  # calls of one session at once
    deadline_s: float = 600.0
    idle_s: float = 0.0  # without a call, an answer or a heartbeat, for an external harness
    grace_s: float = 30.0  # from a limit to the reward
    linger_s: float = 60.0  # how long a call goes on after its client disconnected
    # end: a call that would begin a second training sequence ends the session
    fork: Literal["row", "end"] = "row"


@dataclass(eq=False)
class HarnessRequest:
    """One request of the harness with its retries, over one or more connections."""

    body: bytes  # digest
    key: str  # Idempotency-Key, "" for none
    call: CallNode | None = None
    connections: int = 1
    lost: bool = False  # its connection closed before the answer was written
    answer: bytes | None = None
    refused: CallRefused | None = None  # why there is none
    placed: asyncio.Event = field(default_factory=asyncio.Event)  # set when the call is, or refused


@dataclass
class Refusals:
    """The refused calls of a session, which its agent may not have reported.

    >>> refusals = Refusals()
    >>> refusals.add(CallRefused(400, "invalid_value", "stop: give a text")); str(refusals)
    '1 of its calls was refused, the last one with invalid_value: stop: give a text'
    """

    count: int = 0
    code: str = ""  # of the last one
    why: str = ""

    def add(self, refused: CallRefused) -> None:
        """Count a refused call."""
        self.count += 1
        self.code = refused.code
        self.why = escape_line(str(refused))

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        were = "was" if self.count == 1 else "were"
        return (
            f"{self.count} of its calls {were} refused, the last one with {self.code}: {self.why}"
        )


@dataclass(frozen=True)
class SessionOutcome:
    """The end of a session: its reward, or the reason of its failure."""

    reward: float
    parts: Numbers
    failed: str = ""


@dataclass(eq=False)
class Session:
    """One attempt at one sample.

    own_prompt: int32 [P], the ticket's prompt as encoded for a sample without an agent
    opened: the clock's time at its beginning
    """

    ticket: Ticket
    sample: int
    attempt: int
    limits: SessionLimits
    composer: ChatFormat
    own_prompt: ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    opened: float = 0.0
    seed: int = 0  # for its environment or agent
    part: str = ""  # of the mixture that its ticket belongs to; "": the run's agent
    first: bool = True  # no earlier attempt at the sample has begun

    def __post_init__(self) -> None:
        self.number = 0  # at the gateway
        self.generator = ""  # that sampled its last call
        self.submitted = False  # to the config's reward
        # how it is played in this process, and what that waits for
        self.play: Generator[str, Any, None]
        self.waits_for = ""
        # when an agent in another process was asked to stop, and when that process is killed
        self.stop_at = self.kill_at = NEVER
        self.last: CallNode | None = None  # the policy's newest answered call
        self.name = f"{self.ticket.ticket}.{self.sample}.{self.attempt}"
        self.api_key = secrets.token_urlsafe(32)  # of the session's URL
        self.turn = asyncio.Lock()  # held by the one call whose prompt is being composed
        self.tree = CallTree()
        self.images: dict[str, bytes] = {}  # digest -> blob, of its calls
        self.open_calls: dict[int, CallNode] = {}
        self.requests: list[HarnessRequest] = []
        self.cuts: list[CallNode] = []  # to be cancelled in the engine, by the gateway
        self.state: Literal["open", "judging", "ended"] = "open"
        self.outcome: SessionOutcome | None = None
        self.limit = ""  # the key of [agent] that ended the calls
        self.limited_at = NEVER
        self.calls = 0
        self.composing = 0  # further ones, whose prompts are being composed
        self.refusals = Refusals()
        self.tokens = 0  # sampled, with the excluded ones
        self.aside = 0  # of these, excluded from training
        self.reported = 0  # tokens in the newest report to the buffer
        self.adopted: list[IntPair] = []  # (earlier attempt, tokens sampled under it)
        self.call_at = self.active_at = self.opened  # last call or answer; last of those or a beat
        self.judging_at = self.opened
        self.shortened = False  # the policy's newest answer was cut by a limit of the run
        self._prompt_counts = Counter[bytes]()  # digest of prompt ids -> calls with them
        self.score: tuple[float, Numbers, dict[int, float]] | None = None

    # ---- calls -----------------------------------------------------------------------------------

    def place(
        self,
        *,
        now: float,
        max_new_tokens: int = 0,
        stop: Sequence[str] = (),
        images: Blobs = MappingProxyType({}),
        **prompt: Any,
    ) -> CallNode:
        """Place a call at once; prompt: arguments of `draft`, the others are those of `accept`.

        Raises CallRefused and the composer's errors.  The session is unchanged then.
        """
        self.check_may_call(now)
        call = self.draft(**prompt)()
        return self.accept(call, now=now, max_new_tokens=max_new_tokens, stop=stop, images=images)

    def draft(
        self,
        messages: Messages = (),
        tools: Tools = (),
        *,
        text: str | None = None,
        ids: ndarray | None = None,
        aside: bool = False,
    ) -> Callable[[], CallNode]:
        """Find the call that a call continues: by its messages, a text without template, or ids.

        ids: int32 [P], P >= 1.  It continues the call with the longest ids that they begin with.

        Returns the function that composes its prompt by the template and the tokenizer.  It takes
        long for a long prompt, and may run in another thread.  Until `accept`, no other call of the
        session may be drafted.  Raises CallRefused, and ValueError as `join_text` does.
        """
        if ids is not None:
            ids = np.ascontiguousarray(ids, np.int32)
            parent = self.tree.find_ids(ids, aside)
            tail = ids if parent is None else ids[len(parent.build_token_ids()) :]
            self.composer.require_text(tail)
            cause = "ids" if parent is None else "branch"
            return partial(CallNode, -1, parent, tail, aside, fork_cause=cause)
        if text is not None:
            answered = (node for node in self.tree.nodes if node.is_answered and not node.chain)
            texts = [node for node in answered if node.text_digest]
            texts.sort(key=lambda node: (-node.text_length, -node.number))
            return partial(self._compose_text, texts, text, aside)
        match = self.tree.find(messages, aside)
        return partial(self._compose, match, messages, tools, aside)

    def _compose(
        self, match: MessageMatch, messages: Messages, tools: Tools, aside: bool
    ) -> CallNode:
        for index, parent in match.candidates:
            ours = match.map_own_answers((index, parent))
            restored = restore_own_answers(messages, ours)
            text = self.composer.write(restored, tools)
            tail = self.composer.follow(parent, restored, index, text)
            if tail is not None:
                call = self._make_call(parent, tail, text, aside)
                break
        else:
            ours = match.map_own_answers(next(iter(match.candidates), None))
            text = self.composer.write(restore_own_answers(messages, ours), tools)
            call = self._make_call(None, self.composer.encode(text), text, aside)
        call.fork_cause = find_row_start_reason(match, call.parent, tools)
        call.chains, call.chain, call.ours = match.chains, match.chains[-1], ours
        call.tools = tools
        return call

    def _compose_text(self, texts: Sequence[CallNode], text: str, aside: bool) -> CallNode:
        for node in texts:
            if (suffix := self.composer.cut_sampled(node, text)) is not None:
                tail = self.composer.encode_suffix(node, suffix)
                return self._make_call(node, tail, text, aside, "branch")
        tail = self.composer.encode(text, begins=True)
        return self._make_call(None, tail, text, aside, "text")

    def _make_call(
        self, parent: CallNode | None, tail: ndarray, text: str, aside: bool, cause: str = ""
    ) -> CallNode:
        return CallNode(
            -1,
            parent,
            tail,
            aside,
            fork_cause=cause,
            text_length=len(text),
            text_digest=compute_text_digest(text),
            images=self.composer.find_images(text, tail),
        )

    def accept(
        self,
        node: CallNode,
        *,
        now: float,
        max_new_tokens: int = 0,
        stop: Sequence[str] = (),
        images: Blobs = MappingProxyType({}),
    ) -> CallNode:
        """Add a drafted call, whose prompt is composed.

        max_new_tokens: the client's limit, or 0 for the run's
        images: digest -> blob of the request's images

        Raises CallRefused, also when the session has ended since the call was drafted.
        """
        self.check_may_call(now)
        node.number = self.tree.placed
        node.tail = np.ascontiguousarray(node.tail, np.int32)
        # the images that are new to the session, whose number and bytes are limited
        new_images = {name: images[name] for name in node.images if name in images}
        if unknown := set(node.images) - new_images.keys() - self.images.keys():
            raise CallRefused(
                400, "invalid_image", f"a text names the unknown image {min(unknown)}", "messages"
            )
        size = sum(map(len, (self.images | new_images).values()))
        if len(node.list_images()) > MOST_IMAGES or size > MOST_SESSION_BYTES:
            raise CallRefused(
                400,
                "too_many_images",
                f"session {self.name} would have {len(node.list_images())} images in a prompt and "
                f"{size} bytes of images; at most {MOST_IMAGES} and {MOST_SESSION_BYTES} are "
                "served",
                "messages",
            )
        self._limit_call(node, max_new_tokens, stop, now)
        self.images |= new_images
        self.tree.add(node)
        self.open_calls[node.number] = node
        self.calls += 1
        self.call_at = self.active_at = now
        return node

    def check_may_call(self, now: float) -> None:
        """Raise CallRefused if no further call may begin."""
        self.tick(now)
        if self.state != "open":
            raise self._build_end_error()
        if self.limit:
            raise self._build_limit_error()
        limits = self.limits
        at_once = len(self.open_calls) + self.composing
        if limits.parallel and at_once >= limits.parallel:
            raise CallRefused(
                429,
                "parallel_calls",
                f"session {self.name} has {at_once} calls at once, agent.parallel = "
                f"{limits.parallel}: wait for one of them",
            )
        if limits.max_calls and self.calls >= limits.max_calls:
            raise self._reach_limit("max_calls", now)
        if limits.max_tokens and self.tokens >= limits.max_tokens:
            raise self._reach_limit("max_tokens", now)

    def _limit_call(
        self, node: CallNode, requested_tokens: int, stop: Sequence[str], now: float
    ) -> None:
        """Set the limits and the random stream of a call.  Raises CallRefused."""
        limits = self.limits
        prompt = node.prompt_ids
        if not len(prompt):
            raise CallRefused(400, "empty_prompt", "the prompt has no token: send some text")
        limit = self.ticket.sampling.max_new_tokens
        if limits.context:
            # this does not end the session: an agent may shorten its history and go on
            if len(prompt) >= limits.context:
                raise build_too_long_error(f"the prompt has {len(prompt)}", limits.context)
            limit = min(limit, limits.context - len(prompt))
        if limits.max_tokens:
            promised = sum(call.max_new_tokens for call in self.open_calls.values())
            remaining = limits.max_tokens - self.tokens - promised
            if remaining < 1:
                raise CallRefused(
                    429,
                    "parallel_calls",
                    f"the open calls of session {self.name} may use up agent.max_tokens = "
                    f"{limits.max_tokens}: wait for one of them",
                )
            limit = min(limit, remaining)
        row_count = self.tree.count_rows()
        if self.tree.count_rows(node) > row_count > 0:
            if limits.fork == "end":
                raise self._reach_limit("fork", now)
            if limits.rows and row_count >= limits.rows:
                raise self._reach_limit("rows", now)
            self.tree.forks[node.fork_cause] += 1
        node.stop = tuple(stop)
        digest = xxhash.xxh3_128_digest(prompt.tobytes())
        node.run_bound = not 0 < requested_tokens < limit
        node.max_new_tokens = limit if node.run_bound else requested_tokens
        # the stream of a sample without an agent for the first call with the ticket's own prompt;
        # otherwise one by the prompt and the number of earlier calls with it, so that it does not
        # depend on the order of other calls
        earlier = self._prompt_counts[digest]
        if earlier or not np.array_equal(prompt, self.own_prompt):
            counted = prompt.tobytes() + earlier.to_bytes(4, "little")
            node.stream_key = xxhash.xxh3_64_intdigest(counted) or 1
        self._prompt_counts[digest] += 1

    def restore_call(self, node: CallNode) -> None:
        """Put back an answered call of an earlier process."""
        self.tree.nodes.append(node)
        self._prompt_counts[xxhash.xxh3_128_digest(node.prompt_ids.tobytes())] += 1

    def on_result(
        self,
        call: CallNode,
        ids: ndarray,
        logprobs: ndarray,
        spans: Sequence[VersionSpan],
        finish: Finish,
        *,
        past: int = 0,
        now: float = 0.0,
        support: SampledSupport | None = None,
        routed: RoutedExperts | None = None,
    ) -> CallNode | None:
        """Record the tokens that the engine sampled for a call; return the call.

        ids: int32 [T]
        logprobs: float32 [T]
        spans: of weight versions, over [0, T): see `message_checks.check_call_result`
        past: further tokens that were sampled and not sent
        support: of the T tokens
        routed: of the P + T - 1 tokens that the model read

        Tokens after the one that completes a stop string are excluded.  None when T = 0.
        """
        del self.open_calls[call.number]
        if call.stop:
            length = self.composer.find_stop(ids, call.stop)
            if length is not None:
                past += len(ids) - length
                ids, logprobs, finish = ids[:length], logprobs[:length], "stop"
                support = None if support is None else support.take_first(length)
                spans = [
                    structs.replace(span, end=min(span.end, length))
                    for span in spans
                    if span.start < length
                ]
        self.tokens += len(ids) + past
        self.aside += past + (len(ids) if call.aside else 0)
        self.call_at = self.active_at = max(now, self.active_at)
        if not len(ids):
            self.tree.nodes.remove(call)
            return None
        call.ids = np.ascontiguousarray(ids, np.int32)
        call.logprobs = np.ascontiguousarray(logprobs, np.float32)
        call.spans = list(spans)
        call.support = support
        if routed is not None:
            end = len(call.prompt_ids) + len(ids) - 1
            call.routed = replace(routed, ids=routed.ids[end - call.own_reads : end])
        call.finish = finish
        if not call.aside:
            self.shortened = finish == "length" and (call.run_bound or call.cut)
        if call.chain:
            name = f"{self.name}-{call.number}"
            self.tree.set_answer(call, self.composer.read(call.ids, call.stop, name))
        else:  # placed by text or ids: nothing is parsed
            text = self.composer.decode_visible(call.ids, call.stop)
            call.answer = {"role": "assistant", "content": text}
        return call

    # ---- requests and their retries --------------------------------------------------------------

    def on_refused(self, refused: CallRefused) -> None:
        """Count a refused request; a prompt beyond the context shortens the session."""
        self.refusals.add(refused)
        self.shortened = self.shortened or refused.code == TOO_LONG

    def register_request(
        self, body: bytes, *, retry: bool = False, key: str = ""
    ) -> HarnessRequest:
        """Find the earlier request that this one repeats, or add a new one.

        body: a digest of the path and the body
        retry: the client marked it as a retry
        key: the client's idempotency key, or ""

        Without a mark or a key, a request with an equal body is a new one (an agent that votes),
        unless the connection of the earlier one closed before it was answered.
        """
        equal = [request for request in self.requests if request.body == body]
        repeated = next((request for request in equal if key and request.key == key), None)
        if repeated is None and not key:
            repeated = next((request for request in equal if request.lost), None)
            if repeated is None and retry:
                unanswered = [request for request in equal if request.answer is None]
                repeated = next(iter(unanswered), equal[-1] if equal else None)
        if repeated is None:
            self.requests.append(HarnessRequest(body, key))
            return self.requests[-1]
        repeated.connections += 1
        repeated.lost = False
        if repeated.call is not None:
            repeated.call.alone_since = NEVER
        return repeated

    def forget(self, request: HarnessRequest) -> None:
        """Forget a request that began no call, so that the same again is a new one."""
        if request in self.requests:
            self.requests.remove(request)

    def on_connection_closed(
        self, request: HarnessRequest, now: float, *, sent: bool = False
    ) -> None:
        """Record that one of the request's connections closed; sent: the whole answer was sent."""
        request.connections -= 1
        if request.connections <= 0 and not sent:
            request.lost = True
            if request.call is not None:
                request.call.alone_since = now

    # ---- limits and the clock --------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Apply the limits of time: linger_s, deadline_s, grace_s and idle_s."""
        for call in list(self.open_calls.values()):
            if now >= call.alone_since + self.limits.linger_s:
                self._cancel_call(call)
        limit, time = self.next_deadline()
        if self.state != "open" or now < time:
            return
        if self.limit:
            self.fail(f"agent.{self.limit} was reached and no reward came")
        elif limit == "agent.idle_s":
            self.fail(f"no call and no beat for agent.idle_s = {self.limits.idle_s:g} s")
        else:
            self.limit, self.limited_at = "deadline_s", now
            self._cut_all()

    def next_deadline(self) -> tuple[str, float]:
        """Return the limit that ends the session next, and its time; ("", NEVER): none."""
        if self.limit:  # the grace period begins with the limit, or the last answer after it
            end = max(self.limited_at, self.call_at) + self.limits.grace_s
            return f"the time to score it after agent.{self.limit}", (
                NEVER if self.open_calls else end
            )
        time, key = self._compute_deadline(), "agent.deadline_s"
        idle_end = self.active_at + self.limits.idle_s
        if self.limits.idle_s and not self.open_calls and idle_end < time:
            time, key = idle_end, "agent.idle_s"
        return (key, time) if time < NEVER else ("", NEVER)

    def _compute_deadline(self) -> float:
        return self.opened + (self.limits.deadline_s or NEVER)

    def _reach_limit(self, limit: str, now: float) -> CallRefused:
        self.limit, self.limited_at = limit, now
        return self._build_limit_error()

    def _build_limit_error(self) -> CallRefused:
        return CallRefused(
            400,
            "session_limit",
            f"session {self.name} has reached agent.{self.limit}: send its reward within "
            f"{self.limits.grace_s:g} s",
        )

    def _build_end_error(self) -> CallRefused:
        return CallRefused(410, "session_ended", f"session {self.name} has ended")

    def _cancel_call(self, call: CallNode) -> None:
        if not call.cut:
            call.cut = True
            self.cuts.append(call)

    def _cut_all(self) -> None:
        for call in list(self.open_calls.values()):
            self._cancel_call(call)

    # ---- the end ---------------------------------------------------------------------------------

    def set_reward(
        self,
        value: float,
        parts: Mapping[str, float] = {},
        calls: Mapping[int, float] = {},
        *,
        now: float,
    ) -> None:
        """Score and end the session; an equal score has no effect the second time.

        value: the sample's whole reward
        parts: named parts of it, for metrics
        calls: call number -> its share.  Token-level estimators get a share at the call's last
            token, and the remainder at the session's last token.

        Raises CallRefused.
        """
        self.tick(now)
        score = (float(value), dict(parts), dict(calls))
        if self.score is not None:
            if score == self.score:
                return
            raise CallRefused(
                422, "reward_differs", f"session {self.name} has the reward {self.score[0]:g}"
            )
        if self.state != "open":
            raise self._build_end_error()
        _check_reward(*score)
        trained = {node.number for node in self.tree.nodes if not node.aside}
        for number in calls:
            if number not in trained:
                raise CallRefused(
                    422, "no_such_call", f"calls: {self.name} has no trained call {number}", "calls"
                )
        self.score = score
        self.outcome = SessionOutcome(score[0], score[1])
        self.state = "ended"
        self._cut_all()

    def judge(self, now: float) -> None:
        """End the calls and wait for the config's reward; no effect the second time.

        Raises CallRefused when the session has failed.
        """
        self.tick(now)
        if self.state == "open":
            self.state, self.judging_at = "judging", now
            self._cut_all()
        elif self.state == "ended" and (self.outcome is None or self.outcome.failed):
            raise self._build_end_error()

    def on_judged(self, outcome: SessionOutcome) -> None:
        """End the session with the outcome of the config's reward."""
        if self.state == "judging":
            self.state, self.outcome = "ended", outcome

    def fail(self, reason: str) -> None:
        """End the session without a reward; `reason` is logged."""
        if self.state != "ended":
            self.state, self.outcome = "ended", SessionOutcome(0.0, {}, reason)
            self._cut_all()

    @property
    def key(self) -> SampleKey:
        """(ticket, sample, attempt)."""
        return self.ticket.ticket, self.sample, self.attempt

    @property
    def ticket_key(self) -> IntPair:
        """(ticket, attempt)."""
        return self.ticket.ticket, self.attempt

    @property
    def is_complete(self) -> bool:
        """Whether the session has ended and no call is open, so that it is final."""
        return self.state == "ended" and not self.open_calls

    def resume_under(self, ticket: Ticket) -> None:
        """Continue the session under a new attempt at its sample.

        Its tokens so far stay counted with the earlier attempt.  The gateway submits open calls
        again, to be sampled with the new ticket's weights.
        """
        self.adopted.append((self.attempt, self.current_attempt_tokens))
        self.ticket, self.attempt = ticket, ticket.attempt

    @property
    def current_attempt_tokens(self) -> int:
        """Tokens sampled under the current attempt."""
        return self.tokens - sum(tokens for _, tokens in self.adopted)

    # ---- results ---------------------------------------------------------------------------------

    @property
    def finish(self) -> Finish:
        """The finish reason; length: a limit of the run ended it, or cut the last answer."""
        return "length" if self.limit or self.shortened else "stop"

    def build_training_rows(self) -> tuple[TrainingSequence, ...]:
        """Build the training sequences, in the order of their first own calls."""
        shares = dict(self.score[2]) if self.score is not None else {}
        trained = [n for n in self.tree.nodes if n.is_answered and not n.aside]
        if shares and trained:
            assert self.outcome is not None
            last_number = max(node.number for node in trained)
            remainder = self.outcome.reward - math.fsum(shares.values())
            if remainder or last_number in shares:
                shares[last_number] = shares.get(last_number, 0.0) + remainder
        return build_rows(self.tree.nodes, shares)

    def describe(self, now: float) -> dict[str, Any]:
        """Describe the session's state as JSON: counts, versions, seconds left."""
        labels = {span.label for node in self.tree.nodes if node.is_answered for span in node.spans}
        return {
            "session": self.name,
            "state": self.state,
            "calls": self.calls,
            "open_calls": len(self.open_calls),
            "tokens": self.tokens,
            "aside": self.aside,
            "rows": self.tree.count_rows(),
            "forks": dict(self.tree.forks),
            "versions": [str(label) for label in sorted(labels)],
            "refused": self.refusals.count,
            "refusal": {"code": self.refusals.code, "message": self.refusals.why}
            if self.refusals
            else None,
            "limit": self.limit,
            "left_s": max(0.0, round(self._compute_deadline() - now, 1))
            if self.limits.deadline_s
            else None,
        }


def _check_reward(value: float, parts: Mapping[str, float], calls: Mapping[int, float]) -> None:
    """Raise CallRefused for values that a reward function may not return either."""
    param = "reward"
    try:
        outcomes.check_number(value, "reward")
        param = "parts"
        outcomes.check_parts(parts)
        param = "calls"
        for number, share in calls.items():
            outcomes.check_number(share, f"the share of call {number}")
        remainder = value - math.fsum(calls.values())
        outcomes.check_number(remainder, "what the shares leave of the reward")
    except ValueError as error:
        raise CallRefused(422, "invalid_reward", str(error), param) from error


@dataclass(eq=False)
class SessionPlayer:
    """One player in a session's environment, with its history.

    game: 0 for the policy; 1, 2, ... for the opponent in the session's game of that number; its
        calls are excluded from training
    history: messages, for a chat template
    last_node: its newest answered call
    """

    templated: bool
    game: int = 0
    history: list[Message] = field(default_factory=list)
    last_node: CallNode | None = None

    def place_observation(
        self, session: Session, obs: str | list[Message], tools: Tools, now: float
    ) -> CallNode:
        """Place the call that answers an observation.

        Without a template the prompt is the ids so far and the observation's.  Raises CallRefused.
        """
        if self.templated:
            new_messages = [{"role": "user", "content": obs}] if isinstance(obs, str) else obs
            self.history = [*self.history, *new_messages]
            return session.place(messages=self.history, tools=tools, now=now, aside=self.game > 0)
        text = obs if isinstance(obs, str) else "".join(str(x.get("content", "")) for x in obs)
        ids = session.composer.encode(text, begins=self.last_node is None)
        if self.last_node is not None:
            ids = np.concatenate([self.last_node.build_token_ids(), ids])
        return session.place(ids=ids, now=now, aside=self.game > 0)

    def on_answer(self, node: CallNode) -> None:
        """Append an answer to the player's history."""
        self.last_node = node
        if self.templated:
            assert node.answer is not None
            self.history = [*self.history, node.answer]


def restore_own_answers(messages: Messages, ours: Mapping[int, CallNode]) -> list[Message]:
    """Replace the session's own answers in `messages` by the sampled ones."""
    return [
        (ours[index].answer or message) if index in ours else message
        for index, message in enumerate(messages)
    ]


def find_row_start_reason(match: MessageMatch, parent: CallNode | None, tools: Tools) -> str:
    """Name the cause to count if a call by messages begins a training sequence."""
    if match.candidates:
        deepest = match.candidates[0][1]
        if deepest is parent:
            return "branch"
        return "template" if list(deepest.tools) == list(tools) else "tools"
    count = len(match.chains) - 1
    return "again" if match.known_count == count else f"message {match.known_count}"
