"""A session: one sample that is written by several calls, from its ticket to its reward.  Pure: the
clock is an argument, what writes text as ids is given, and no method waits.

```
 place --> Call --(an engine draws)--> drawn              rows(): what is trained
 request, written, closed: which requests are one and the same, a client's retries
 open --> limited (grace_s) --+
 open ------------------------+--> judging --> ended: scored or failed
```

All methods are called from one thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import xxhash
from msgspec import structs

from actors.gateway.call_tree import CallNode, CallTree, Message, MessageMatch, rows_of, text_digest
from asyncrl.contract import outcomes
from asyncrl.contract.errors import AsyncrlError, ProtocolError
from asyncrl.contract.messages import Ticket, TrainingSequence, VersionSpan
from asyncrl.contract.printable import escape_line

NEVER = math.inf
TOO_LONG = "context_length_exceeded"  # the code of a prompt that is
Finish = Literal["stop", "length"]


class CallRefused(AsyncrlError):
    """A request that is not served.  status: of HTTP; code: what a client may branch on; param: the
    key of the body that is at fault.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True)
class SessionLimits:
    """What a session may use: the config's section [agent], and generator.context.  0: no limit."""

    context: int = 0  # tokens of a prompt and its answer
    max_calls: int = 32
    max_tokens: int = 0  # drawn by a session
    rows: int = 16
    parallel: int = 16  # calls of one session at once
    deadline_s: float = 600.0
    idle_s: float = 0.0  # without a call, an answer or a beat: for a harness that pulls
    grace_s: float = 30.0  # from a limit to the reward
    linger_s: float = 60.0  # a call whose client has gone draws on for so long
    fork: Literal["row", "end"] = "row"  # end: a call that would open a second row ends the session


class Composer(Protocol):
    """What a session asks of a template, its tokenizer and its parser: chat.py."""

    def write(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """The request's text, up to where the answer begins."""

    def encode(self, text: str) -> np.ndarray:
        """int32 [P] of a whole prompt."""

    def follow(
        self, node: CallNode, messages: Sequence[Message], answer_at: int, text: str
    ) -> np.ndarray | None:
        """int32: what `text`, written of `messages`, has behind the node's answer, which is message
        `answer_at`; None when it does not begin with the node's turn.
        """

    def continue_text(self, node: CallNode, text: str) -> np.ndarray | None:
        """The same for a text without a template."""

    def read(self, ids: np.ndarray, stop: Sequence[str], name: str) -> Message:
        """The assistant's message that drawn ids are; name: unique, for its tool calls' ids."""

    def visible_text(self, ids: np.ndarray, stop: Sequence[str] = ()) -> str:
        """The text of drawn ids, up to an end token or a stop string."""

    def find_stop(self, ids: np.ndarray, stop: Sequence[str]) -> int | None:
        """How many of the drawn ids it takes to complete a stop string; None: none is in them."""


@dataclass(eq=False)
class SessionCall:
    """One generation.  prompt_ids int32 [P]; stream_key: 0 is the ticket's plain stream."""

    number: int
    parent: CallNode | None
    prompt_ids: np.ndarray
    prompt_digest: bytes
    stream_key: int
    max_new_tokens: int
    node: CallNode
    # max_new_tokens is the run's limit or the session's, not one that the client chose
    run_bound: bool
    aside: bool = False
    stop: tuple[str, ...] = ()
    alone_since: float = NEVER  # since when no connection waits for its answer
    cut: bool = False


class Composed(NamedTuple):
    """The prompt of a call, as a template and a tokenizer made it of a request."""

    parent: CallNode | None
    tail: np.ndarray  # int32 [P]: what follows the parent's turn; without a parent, all
    text: str
    why: str  # why it does not simply go on, should it open a row
    found: MessageMatch | None = None  # of a call by messages
    ours: Mapping[int, CallNode] = MappingProxyType({})
    tools: Sequence[Any] = ()


@dataclass(eq=False)
class HarnessRequest:
    """One request of the harness, over as many connections as it takes."""

    body: bytes  # digest
    key: str  # Idempotency-Key, "" for none
    call: SessionCall | None = None
    connections: int = 1
    lost: bool = False  # its connection closed before the answer was written
    answer: bytes | None = None


@dataclass
class Refusals:
    """The calls of a session that were refused: its agent may have kept silent about them.

    >>> refusals = Refusals()
    >>> refusals.add(CallRefused(400, "invalid_value", "stop: give a text")); str(refusals)
    '1 of its calls was refused, the last one with invalid_value: stop: give a text'
    """

    count: int = 0
    code: str = ""  # of the last one
    why: str = ""

    def add(self, refused: CallRefused) -> None:
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
    """How a session ended: a reward, or why there is none."""

    reward: float
    parts: dict[str, float]
    failed: str = ""


@dataclass(eq=False)
class Session:
    """One attempt at one sample.  own_prompt int32 [P]: the ticket's prompt as a plain answer is
    given it; opened: the clock as it begins.
    """

    ticket: Ticket
    sample: int
    attempt: int
    limits: SessionLimits
    composer: Composer | None = None
    own_prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    opened: float = 0.0

    def __post_init__(self) -> None:
        self.name = f"{self.ticket.ticket}.{self.sample}.{self.attempt}"
        self.forest = CallTree()
        self.open_calls: dict[int, SessionCall] = {}
        self.requests: list[HarnessRequest] = []
        self.cuts: list[
            SessionCall
        ] = []  # to be ended in the engine: whoever does it takes them out
        self.state: Literal["open", "judging", "ended"] = "open"
        self.outcome: SessionOutcome | None = None
        self.limit = ""  # which one ended the calls
        self.limited_at = NEVER
        self.calls = 0
        self.composing = 0  # further ones, whose prompts are being composed
        self.refusals = Refusals()
        self.tokens = 0  # drawn, those set aside included
        self.aside = 0  # of these, never trained
        self.reported = 0  # of these, how many the buffer was told of
        self.adopted: list[tuple[int, int]] = []  # (earlier attempt, tokens drawn under it)
        self.call_at = self.heard_at = self.opened  # last call or answer; those or a beat
        self.judging_at = self.opened
        self.shortened = False  # the newest word of the policy was cut by a limit of the run
        self._asked: dict[bytes, int] = {}  # digest of prompt ids -> how often asked
        self.score: tuple[float, dict[str, float], dict[int, float]] | None = None

    # ---- calls -----------------------------------------------------------------------------------

    def place_messages(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        now: float,
        max_new_tokens: int = 0,
        stop: Sequence[str] = (),
        aside: bool = False,
    ) -> SessionCall:
        """A call by messages, its place found and its prompt composed.  Raises CallRefused, and
        what the composer raises; nothing has changed then.

        max_new_tokens: the client's; 0: as many as the run allows."""
        self.may_call(now)
        composed = self.draft(messages, tools, aside)()
        return self.accept(composed, now=now, max_new_tokens=max_new_tokens, stop=stop, aside=aside)

    def draft(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), aside: bool = False
    ) -> Callable[[], Composed]:
        """Find the place of a call by messages; return what composes its prompt, by the template
        and the tokenizer.  That takes long for a long prompt, and may run in another thread: until
        `accept`, no other call of the session may be drafted.  Raises ValueError as `plain_text`.
        """
        found = self.forest.find(messages, aside)
        return partial(self._composed, partial(self._compose, found, messages, tools))

    def draft_text(self, text: str) -> Callable[[], Composed]:
        """The same for a call by text without a template."""
        texts = sorted(self.forest.texts(), key=lambda x: (-x.text_length, -x.number))
        return partial(self._composed, partial(self._compose_text, texts, text))

    def _composed(self, compose: Callable[[], Composed]) -> Composed:
        try:
            return compose()
        except CallRefused as refused:
            self.shortened = self.shortened or refused.code == TOO_LONG
            raise

    def _compose(
        self, found: MessageMatch, messages: Sequence[Message], tools: Sequence[Any]
    ) -> Composed:
        assert self.composer is not None
        for index, node in found.candidates:
            ours = {**node.ours, index: node}
            restored = restore_own_answers(messages, ours)
            text = self.composer.write(restored, tools)
            tail = self.composer.follow(node, restored, index, text)
            if tail is not None:
                why = row_start_reason(found, node, tools)
                return Composed(node, tail, text, why, found=found, ours=ours, tools=tools)
        ours = found.own_answers()
        text = self.composer.write(restore_own_answers(messages, ours), tools)
        tail = self.composer.encode(text)
        why = row_start_reason(found, None, tools)
        return Composed(None, tail, text, why, found=found, ours=ours, tools=tools)

    def _compose_text(self, texts: Sequence[CallNode], text: str) -> Composed:
        assert self.composer is not None
        for node in texts:
            if (tail := self.composer.continue_text(node, text)) is not None:
                return Composed(node, tail, text, "branch")
        return Composed(None, self.composer.encode(text), text, "text")

    def accept(
        self,
        composed: Composed,
        *,
        now: float,
        max_new_tokens: int = 0,
        stop: Sequence[str] = (),
        aside: bool = False,
    ) -> SessionCall:
        """The call whose prompt is composed.  Raises CallRefused, also for what has come about
        since it was drafted: the session may have ended.
        """
        self.may_call(now)
        tail = np.ascontiguousarray(composed.tail, np.int32)
        node = CallNode(self.forest.placed, composed.parent, tail, aside)
        found = composed.found
        if found is not None:
            node.chain, node.ours = found.chains[-1], dict(composed.ours)
            node.tools = composed.tools
        node.text_length, node.text_digest = len(composed.text), text_digest(composed.text)
        call = self._limit_call(node, max_new_tokens, stop, now)
        return self._add_call(call, found, composed.why, now)

    def place_ids(
        self,
        ids: np.ndarray,
        *,
        now: float,
        max_new_tokens: int = 0,
        stop: Sequence[str] = (),
        aside: bool = False,
    ) -> SessionCall:
        """A call by token ids int32 [P], P >= 1: it continues the node whose ids they begin with.
        Raises CallRefused.
        """
        self.may_call(now)
        ids = np.ascontiguousarray(ids, np.int32)
        parent = self.forest.find_ids(ids, aside)
        tail = ids if parent is None else ids[len(parent.token_ids()) :]
        node = CallNode(self.forest.placed, parent, tail, aside)
        call = self._limit_call(node, max_new_tokens, stop, now)
        return self._add_call(call, None, "ids" if parent is None else "branch", now)

    def place_text(
        self,
        text: str,
        *,
        now: float,
        max_new_tokens: int = 0,
        stop: Sequence[str] = (),
        aside: bool = False,
    ) -> SessionCall:
        """A call by text without a template: it continues the node whose text it begins with, the
        longest, of these the newest.  Raises CallRefused.
        """
        self.may_call(now)
        composed = self.draft_text(text)()
        return self.accept(composed, now=now, max_new_tokens=max_new_tokens, stop=stop, aside=aside)

    def may_call(self, now: float) -> None:
        """Raises CallRefused where no further call may begin."""
        self.tick(now)
        if self.state != "open":
            raise CallRefused(410, "session_ended", f"session {self.name} has ended")
        if self.limit:
            raise self._over_error()
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
            raise self._limit_reached("max_calls", now)
        if limits.max_tokens and self.tokens >= limits.max_tokens:
            raise self._limit_reached("max_tokens", now)

    def _limit_call(
        self, node: CallNode, wanted: int, stop: Sequence[str], now: float
    ) -> SessionCall:
        """The node as a call, within the limits.  Raises CallRefused."""
        limits = self.limits
        prompt = node.prompt()
        if not len(prompt):
            raise CallRefused(400, "empty_prompt", "the prompt has no token: send some text")
        most = self.ticket.sampling.max_new_tokens
        if limits.context:
            # an agent may shorten its history and go on: that ends no session
            if len(prompt) >= limits.context:
                self.shortened = True
                raise CallRefused(
                    400,
                    TOO_LONG,
                    f"the prompt has {len(prompt)} tokens, and generator.context = "
                    f"{limits.context} is for prompt and answer: shorten the history",
                    "messages",
                )
            most = min(most, limits.context - len(prompt))
        if limits.max_tokens:
            promised = sum(call.max_new_tokens for call in self.open_calls.values())
            left = limits.max_tokens - self.tokens - promised
            if left < 1:
                raise CallRefused(
                    429,
                    "parallel_calls",
                    f"the open calls of session {self.name} may use up agent.max_tokens = "
                    f"{limits.max_tokens}: wait for one of them",
                )
            most = min(most, left)
        if self.forest.starts_row(node) and (begun := self.forest.rows_begun()):
            if limits.fork == "end":
                raise self._limit_reached("fork", now)
            if limits.rows and begun >= limits.rows:
                raise self._limit_reached("rows", now)
        node.stop = tuple(stop)
        digest = xxhash.xxh3_128_digest(prompt.tobytes())
        run_bound = not 0 < wanted < most
        return SessionCall(
            number=node.number,
            parent=node.parent,
            prompt_ids=prompt,
            stream_key=self._stream_key(prompt, digest),
            prompt_digest=digest,
            max_new_tokens=most if run_bound else wanted,
            node=node,
            run_bound=run_bound,
            aside=node.aside,
            stop=node.stop,
        )

    def _stream_key(self, prompt: np.ndarray, digest: bytes) -> int:
        """0 for the ticket's own prompt, first asked: the stream of a plain answer.  Else 64 bits
        of the prompt and of how often it was asked, whatever else was asked between.
        """
        asked = self._asked.get(digest, 0)
        if not asked and np.array_equal(prompt, self.own_prompt):
            return 0
        return xxhash.xxh3_64_intdigest(prompt.tobytes() + asked.to_bytes(4, "little")) or 1

    def _add_call(
        self, call: SessionCall, found: MessageMatch | None, why: str, now: float
    ) -> SessionCall:
        """Take the call in."""
        if self.forest.starts_row(call.node) and self.forest.rows_begun():
            self.forest.forks[why] += 1
        self.forest.add(call.node, found.chains if found else ())
        self._asked[call.prompt_digest] = self._asked.get(call.prompt_digest, 0) + 1
        self.open_calls[call.number] = call
        self.calls += 1
        self.call_at = self.heard_at = now
        return call

    def restore_call(self, node: CallNode) -> SessionCall:
        """Put back a call that was sampled before this process began; `node` holds its answer."""
        assert node.ids is not None
        prompt = node.prompt()
        digest = xxhash.xxh3_128_digest(prompt.tobytes())
        self.forest.nodes.append(node)
        self._asked[digest] = self._asked.get(digest, 0) + 1
        return SessionCall(
            number=node.number,
            parent=node.parent,
            prompt_ids=prompt,
            prompt_digest=digest,
            stream_key=0,
            max_new_tokens=len(node.ids),
            node=node,
            run_bound=False,
            aside=node.aside,
            stop=node.stop,
        )

    def on_result(
        self,
        call: SessionCall,
        ids: np.ndarray,
        logprobs: np.ndarray,
        spans: Sequence[VersionSpan],
        finish: Finish,
        *,
        past: int = 0,
        now: float = 0.0,
    ) -> CallNode | None:
        """What the engine drew: ids int32 [T], logprobs float32 [T], spans over [0, T).  None for
        no token.  past: tokens that it drew and did not give.  What lies behind the token that
        completes a stop string is set aside.

        Raises ProtocolError for spans that do not cover the tokens, or a call that is not open."""
        if self.open_calls.pop(call.number, None) is not call:
            raise ProtocolError(f"session {self.name}: call {call.number} was answered before")
        edges = [0] + [span.end for span in spans]
        if edges[:-1] != [span.start for span in spans] or edges[-1] != len(ids):
            raise ProtocolError(
                f"session {self.name}: call {call.number} has {len(ids)} tokens, and spans {spans}"
            )
        node = call.node
        if self.composer is not None and call.stop:
            kept = self.composer.find_stop(ids, call.stop)
            if kept is not None:
                past += len(ids) - kept
                ids, logprobs, finish = ids[:kept], logprobs[:kept], "stop"
                spans = [
                    structs.replace(span, end=min(span.end, kept))
                    for span in spans
                    if span.start < kept
                ]
        self.tokens += len(ids) + past
        self.aside += past + (len(ids) if call.aside else 0)
        self.call_at = self.heard_at = max(now, self.heard_at)
        if not len(ids):
            self.forest.remove(node)
            return None
        node.ids = np.ascontiguousarray(ids, np.int32)
        node.logprobs = np.ascontiguousarray(logprobs, np.float32)
        node.spans = list(spans)
        node.finish = finish
        if not call.aside:
            self.shortened = finish == "length" and (call.run_bound or call.cut)
        if self.composer is not None and node.chain:
            name = f"{self.name}-{call.number}"
            self.forest.set_answer(node, self.composer.read(node.ids, call.stop, name))
        elif self.composer is not None:  # placed by text or ids: nothing is parsed
            text = self.composer.visible_text(node.ids, call.stop)
            node.answer = {"role": "assistant", "content": text}
        return node

    # ---- requests and their retries --------------------------------------------------------------

    def request(self, body: bytes, *, retry: bool = False, key: str = "") -> HarnessRequest:
        """The request that came with this body (a digest of path and bytes): an earlier one that it
        repeats, or a new one.

        retry: the client says that it repeats.  Without that word an equal body is a request of its
        own (an agent that votes), unless the connection of one closed before it was answered."""
        same = [each for each in self.requests if each.body == body]
        found = next((each for each in same if key and each.key == key), None)
        if found is None and not key:
            found = next((each for each in same if each.lost), None)
            if found is None and retry:
                unanswered = [each for each in same if each.answer is None]
                found = next(iter(unanswered), same[-1] if same else None)
        if found is None:
            found = HarnessRequest(body, key)
            self.requests.append(found)
            return found
        found.connections += 1
        found.lost = False
        if found.call is not None:
            found.call.alone_since = NEVER
        return found

    def forget(self, request: HarnessRequest) -> None:
        """The request began no call: the same again is a new one."""
        if request in self.requests:
            self.requests.remove(request)

    def on_response_sent(self, request: HarnessRequest) -> None:
        """The answer went out whole on one of its connections."""
        request.connections -= 1

    def closed(self, request: HarnessRequest, now: float) -> None:
        """A connection of it ended before the answer was out."""
        request.connections -= 1
        if request.connections <= 0:
            request.lost = True
            if request.call is not None:
                request.call.alone_since = now

    # ---- limits and the clock --------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """What time alone brings about: calls cut, limits, the end of a session whose agent went
        away.
        """
        for call in list(self.open_calls.values()):
            if now >= call.alone_since + self.limits.linger_s:
                self._cancel_call(call)
        if self.state != "open":
            return
        if now >= self._deadline() and not self.limit:
            self.limit, self.limited_at = "deadline_s", now
            self._cut_all()
        if self.limit:
            if now >= self._grace_over():
                self.fail(f"agent.{self.limit} was reached and no reward came", now)
        elif now >= self._idle_over():
            self.fail(f"no call and no beat for agent.idle_s = {self.limits.idle_s:g} s", now)

    def next_tick(self) -> float:
        """When `tick` next has something to do."""
        times = [
            call.alone_since + self.limits.linger_s
            for call in self.open_calls.values()
            if not call.cut
        ]
        if self.state == "open":
            times.append(self._grace_over() if self.limit else self._deadline())
            times.append(NEVER if self.limit else self._idle_over())
        return min(times, default=NEVER)

    def next_deadline(self) -> tuple[str, float]:
        """Which key ends it if nothing else happens, and when by the clock; ("", NEVER): none."""
        if self.limit:
            return f"the time to score it after agent.{self.limit}", self._grace_over()
        at, name = min((self._deadline(), "agent.deadline_s"), (self._idle_over(), "agent.idle_s"))
        return (name, at) if at < NEVER else ("", NEVER)

    def _deadline(self) -> float:
        return self.opened + (self.limits.deadline_s or NEVER)

    def _idle_over(self) -> float:
        idle = not self.open_calls and self.limits.idle_s
        return self.heard_at + self.limits.idle_s if idle else NEVER

    def _grace_over(self) -> float:
        """From the limit, or from the last answer that was under way as it was reached."""
        if self.open_calls:
            return NEVER
        return max(self.limited_at, self.call_at) + self.limits.grace_s

    def _limit_reached(self, limit: str, now: float) -> CallRefused:
        self.limit, self.limited_at = limit, now
        return self._over_error()

    def _over_error(self) -> CallRefused:
        return CallRefused(
            400,
            "session_limit",
            f"session {self.name} has reached agent.{self.limit}: send its reward within "
            f"{self.limits.grace_s:g} s",
        )

    def _cancel_call(self, call: SessionCall) -> None:
        if not call.cut:
            call.cut = True
            self.cuts.append(call)

    def _cut_all(self) -> None:
        for call in list(self.open_calls.values()):
            self._cancel_call(call)

    def beat(self, now: float) -> None:
        """The harness lives."""
        self.heard_at = max(self.heard_at, now)

    # ---- the end ---------------------------------------------------------------------------------

    def reward(
        self,
        value: float,
        parts: Mapping[str, float] = {},
        calls: Mapping[int, float] = {},
        *,
        now: float,
    ) -> None:
        """Score and end; the same again is no news.  Raises CallRefused.

        value is the sample's whole reward; calls: the share of each call (by number), which
        estimators by token see on its last token, and what remains on the session's last one."""
        self.tick(now)
        said = (float(value), dict(parts), dict(calls))
        if self.score is not None:
            if said == self.score:
                return
            raise CallRefused(
                422, "reward_differs", f"session {self.name} has the reward {self.score[0]:g}"
            )
        if self.state != "open":
            raise CallRefused(410, "session_ended", f"session {self.name} has ended")
        _check_reward(*said)
        trained = {node.number for node in self.forest.nodes if not node.aside}
        for number in calls:
            if number not in trained:
                raise CallRefused(
                    422, "no_such_call", f"calls: {self.name} has no trained call {number}", "calls"
                )
        self.score = said
        self.outcome = SessionOutcome(said[0], said[1])
        self.state = "ended"
        self._cut_all()

    def judge(self, now: float) -> bool:
        """The harness is done and the config's reward judges; True when that is news.  Raises
        CallRefused.
        """
        self.tick(now)
        if self.state == "open":
            self.state, self.judging_at = "judging", now
            self._cut_all()
            return True
        if self.state == "judging" or (self.outcome and not self.outcome.failed):
            return False
        raise CallRefused(410, "session_ended", f"session {self.name} has ended")

    def on_judged(self, outcome: SessionOutcome) -> None:
        """What the config's reward said."""
        if self.state == "judging":
            self.state, self.outcome = "ended", outcome

    def fail(self, why: str, now: float) -> None:
        """No reward will come: the sample is written again, or its group given up."""
        if self.state != "ended":
            self.state, self.outcome = "ended", SessionOutcome(0.0, {}, why)
            self._cut_all()

    @property
    def complete(self) -> bool:
        """Ended, and every draw is in: nothing of it changes any more."""
        return self.state == "ended" and not self.open_calls

    def resume_under(self, ticket: Ticket) -> None:
        """The session goes on under a new attempt at its sample; what it has drawn stays counted
        with the attempt before.  Calls that are under way are not of it: those of an epoch that is
        over are to be drawn again by the new ticket's weights.
        """
        if ticket.ticket != self.ticket.ticket or self.sample not in ticket.samples:
            raise ProtocolError(f"session {self.name} is no sample of ticket {ticket.ticket}")
        self.adopted.append((self.attempt, self.current_attempt_tokens))
        self.ticket, self.attempt = ticket, ticket.attempt

    @property
    def current_attempt_tokens(self) -> int:
        """Tokens drawn under the attempt of now."""
        return self.tokens - sum(tokens for _, tokens in self.adopted)

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def finish(self) -> Finish:
        """length: a limit of the run ended it, or cut the policy's last word."""
        return "length" if self.limit or self.shortened else "stop"

    @property
    def forks(self) -> Mapping[str, int]:
        """Causes of rows beyond the first, counted."""
        return self.forest.forks

    def training_rows(self) -> tuple[TrainingSequence, ...]:
        """What is trained, in the order of each row's first own call."""
        shares = dict(self.score[2]) if self.score is not None else {}
        trained = [n for n in self.forest.nodes if n.ids is not None and not n.aside]
        if shares and trained:
            assert self.outcome is not None
            last = max(node.number for node in trained)
            rest = self.outcome.reward - math.fsum(shares.values())
            if rest or last in shares:
                shares[last] = shares.get(last, 0.0) + rest
        return rows_of(self.forest.nodes, shares)

    def describe(self, now: float) -> dict[str, Any]:
        """The session for whoever asks: counts, versions, seconds left."""
        labels = {
            span.label for node in self.forest.nodes if node.ids is not None for span in node.spans
        }
        return {
            "session": self.name,
            "state": self.state,
            "calls": self.calls,
            "open_calls": len(self.open_calls),
            "tokens": self.tokens,
            "aside": self.aside,
            "rows": self.forest.rows_begun(),
            "forks": dict(self.forks),
            "versions": [str(label) for label in sorted(labels)],
            "refused": self.refusals.count,
            "refusal": {"code": self.refusals.code, "message": self.refusals.why}
            if self.refusals
            else None,
            "limit": self.limit,
            "left_s": max(0.0, round(self._deadline() - now, 1))
            if self.limits.deadline_s
            else None,
        }


def _check_reward(value: float, parts: Mapping[str, float], calls: Mapping[int, float]) -> None:
    """Raise CallRefused for what a reward function may not return either."""
    param = "reward"
    try:
        outcomes.check_number(value, "reward")
        param = "parts"
        outcomes.check_parts(parts)
        param = "calls"
        for number, share in calls.items():
            outcomes.check_number(share, f"the share of call {number}")
        rest = value - math.fsum(calls.values())
        outcomes.check_number(rest, "what the shares leave of the reward")
    except ValueError as error:
        raise CallRefused(422, "invalid_reward", str(error), param) from error


@dataclass(eq=False)
class SessionPlayer:
    """One player in a session's environment: what it was told and has said.  game: 0 is the
    policy's side; else its opponent's, in the game of that number, from 1, of those that were
    begun; its draws are set aside.  history: for a chat template.
    """

    templated: bool
    game: int = 0
    history: list[Message] = field(default_factory=list)
    last: CallNode | None = None  # the newest that it drew

    def place_observation(
        self, session: Session, obs: str | list[Message], tools: Sequence[Any], now: float
    ) -> SessionCall:
        """The environment has spoken to it: the call for its answer.  Without a template the ids so
        far go on with the observation's.  Raises as Session.place.
        """
        if self.templated:
            new = [{"role": "user", "content": obs}] if isinstance(obs, str) else obs
            self.history = [*self.history, *new]
            return session.place_messages(
                messages=self.history, tools=tools, now=now, aside=self.game > 0
            )
        assert session.composer is not None
        text = obs if isinstance(obs, str) else "".join(str(x.get("content", "")) for x in obs)
        ids = session.composer.encode(text)
        if self.last is not None:
            ids = np.concatenate([self.last.token_ids(), ids])
        return session.place_ids(ids, now=now, aside=self.game > 0)

    def on_answer(self, node: CallNode) -> None:
        """Its answer."""
        self.last = node
        if self.templated:
            assert node.answer is not None
            self.history = [*self.history, node.answer]


class SessionPlayers:
    """The players in a session's environment; `now` is to answer."""

    def __init__(self, templated: bool) -> None:
        self.policy = self.now = SessionPlayer(templated)
        self.other = SessionPlayer(templated, 1)

    def set_turn(self, game: int) -> None:
        """Whose turn it is, as of Side: in another game the opponent knows nothing of earlier
        ones.
        """
        if game not in (0, self.other.game):
            self.other = SessionPlayer(self.policy.templated, game)
        self.now = self.other if game else self.policy


def restore_own_answers(messages: Sequence[Message], ours: Mapping[int, CallNode]) -> list[Message]:
    """The messages with our own answers as they were drawn."""
    return [
        (ours[index].answer or message) if index in ours else message
        for index, message in enumerate(messages)
    ]


def row_start_reason(found: MessageMatch, parent: CallNode | None, tools: Sequence[Any]) -> str:
    """Why a call by messages does not simply go on, should it open a row."""
    if found.candidates:
        deepest = found.candidates[0][1]
        if deepest is parent:
            return "branch"
        return "template" if list(deepest.tools) == list(tools) else "tools"
    count = len(found.chains) - 1
    return "again" if found.known == count else f"message {found.known}"
