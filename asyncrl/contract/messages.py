"""Every struct on every wire, each headed by who makes it and who reads it.

Arrays travel as raw little-endian bytes: token ids int32, logprobs float32, masks uint8.  Every
message on the control socket is one frame of msgpack, a tagged union (`FromPeer` towards the
buffer, behind a frame that names protocol and run, `FromBuffer` back); decoding is typed. Requests
are repeated until they are answered and are idempotent."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BlockingSession, OpenSession, ProcessWait

PROTOCOL = 3
# ticket numbers from here on are of evaluations: the same prompt has the same random stream at
# every version
EVAL_BASE = 1 << 40
MAX_FRAME_BYTES = 256 * 1024 * 1024  # a larger frame is refused: nothing here needs it

# where a generated token ends: the lines of the ledger
LedgerLine = Literal[
    "trained",
    "skipped",
    "rejected",
    "masked_stale",
    "dropped_stale",
    "abandoned",
    "filtered",
    "duplicate",
    "orphaned",
    "fatal",
    "lost_with_process",
    "left_over",
    "failed",
    "set_aside",
]
DISPOSITIONS: tuple[LedgerLine, ...] = get_args(LedgerLine)
# of these, the lines of tokens that were written for nothing: they reached no batch, or counted for
# nothing in it by their age; what the loss left out is no loss of the buffer's, and what an agent
# asked not to be trained (set_aside) was written for the agent
LOST = tuple(
    line
    for line in DISPOSITIONS
    if line not in ("trained", "skipped", "rejected", "left_over", "set_aside")
)
# what has become of a sample so far: "accepted" until its batch is trained; an answer to an
# evaluation ticket has no line
Disposition = LedgerLine | Literal["accepted", "evaluated"]


class Prompt(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Made by asyncrl.tasks; read by generators (text, tokenised there) and reward functions
    (answer, meta).
    """

    id: int
    text: str
    answer: str = ""
    # chat turns; when given, the tokenizer's chat template replaces `text`
    messages: list[dict[str, str]] = []
    meta: dict[str, str] = {}
    split: str = "train"


class SamplingSettings(msgspec.Struct, frozen=True, array_like=True):
    """Made by the buffer from the config; read by the engine.  logprobs are those of exactly this
    distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    max_new_tokens: int = 64
    # sample 0 of the group is the likeliest answer, a baseline and not trained on (remax)
    greedy: bool = False

    def top_k_of(self, sample: int) -> int:
        """top_k of that sample."""
        return 1 if self.greedy and sample == 0 else self.top_k


# gc=False: stored by the thousand, and no cycle can go through them
class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of an answer: drawn by `label` (weights `digest`), on keys and values
    written since `kv`.

    `kv` is the oldest label whose weights computed any of the keys and values that the span
    attended to."""

    label: Label
    digest: str
    start: int
    end: int
    kv: Label


class RewardFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a sample has no reward.  Made by the generator; counted by kind in the buffer, each
    against a budget of its own.

    kind: data, the answer; machinery, the process that judged it; refused, what was said of it
    could not be, which the buffer alone finds, and bounds for each sender."""

    kind: Literal["data", "machinery", "refused"]
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


def count_ones(mask: bytes) -> int:
    """How many bytes are 1.  Mostly all are, and a comparison of 16,000 takes a hundredth of what
    counting them does.
    """
    return len(mask) if mask == b"\1" * len(mask) else mask.count(1)


class TrainingSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A root-to-leaf path of a session's calls, as the learner runs it forward: made by a gateway
    (actors/gateway/call_tree.py).  P tokens before the row's first own token, T from it on.

    A token that several rows share was drawn once: it has mask 1 and a span in the first of them,
    mask 0 and none in the others; so have tokens that no call drew (tools, other turns)."""

    prompt_tokens: bytes  # int32 [P]
    tokens: bytes  # int32 [T]: drawn ones exactly as sampled, and what stood between the calls
    behavior_logprobs: bytes  # float32 [T], 0 where mask is 0
    # uint8 [T]: 1 where the token was drawn here and is trained in this row
    mask: bytes
    spans: list[VersionSpan]  # cover exactly the tokens of mask 1, in order
    segments: list[tuple[str, int, int]] = []  # ("model" or "context", start, end) of [0, T)
    # float32 [T] when calls have rewards of their own, NaN where there is none; else empty
    token_rewards: bytes = b""


class Trajectory(msgspec.Struct, array_like=True, gc=False):
    """One sample.  Made by a generator or a gateway; stored by the buffer; read by the learner.  P
    prompt, T response tokens.

    A single answer is one row, the fields here.  A session's further rows are in `rows`: `all_rows`
    has every one, and a place "in the sample" counts their T in that order."""

    ticket: int
    sample: int
    attempt: int
    prompt_tokens: bytes  # int32 [P]
    tokens: bytes  # int32 [T], exactly as sampled, the stop token included
    behavior_logprobs: bytes  # float32 [T], of the distribution sampled from
    mask: bytes  # uint8 [T]: 1 where the token is trained on
    spans: list[VersionSpan]
    reward: float
    reward_parts: dict[str, float]
    finish: Literal["stop", "length"]
    temperature: float
    group_key: str = ""
    text: str = ""  # only for the few that are shown in samples.jsonl
    prompt_text: str = ""
    # (kind, start, end): "model", "tool", ... in response tokens
    segments: list[tuple[str, int, int]] = []
    token_rewards: bytes = b""  # float32 [T] when the reward function gives them, else empty
    generated_at: float = 0.0  # CLOCK_MONOTONIC seconds, when the last token was drawn
    # a failed sample is never trained on; "" is no failure (and what recordings hold)
    failed: RewardFailure | Literal[""] = ""
    rows: list[TrainingSequence] = []  # of a session: those after the first
    aside: int = 0  # tokens that were drawn and are never trained (ledger: set_aside)
    calls: int = 0  # of a session: generations it asked for; 0: a single answer
    # of a session that went on under a new attempt: (earlier attempt, tokens drawn under it)
    adopted: list[tuple[int, int]] = []

    @property
    def tokens_by_attempt(self) -> list[tuple[int, int]]:
        """(attempt, tokens drawn under it, those set aside included), its own first."""
        if not self.adopted:
            return [(self.attempt, self.length + self.aside)]
        earlier = sum(tokens for _, tokens in self.adopted)
        return [(self.attempt, self.length + self.aside - earlier), *self.adopted]

    @property
    def length(self) -> int:
        """Tokens drawn to be trained: of mask 1, over all rows; without a mask (simulated) all."""
        own = count_ones(self.mask) if self.mask else len(self.tokens) // 4
        return own + sum(count_ones(row.mask) for row in self.rows) if self.rows else own

    @property
    def token_count(self) -> int:
        """Tokens T of all rows, whoever wrote them."""
        return (len(self.tokens) + sum(len(row.tokens) for row in self.rows)) // 4

    def all_rows(self) -> list[TrainingSequence]:
        """Every row, the first from the fields here."""
        first = TrainingSequence(
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            behavior_logprobs=self.behavior_logprobs,
            mask=self.mask,
            spans=self.spans,
            segments=self.segments,
            token_rewards=self.token_rewards,
        )
        return [first, *self.rows]

    def all_spans(self) -> list[VersionSpan]:
        """The spans of every row, by places in the sample."""
        if not self.rows:
            return self.spans
        out = list(self.spans)
        begin = len(self.mask)
        for row in self.rows:
            out += [
                VersionSpan(span.label, span.digest, begin + span.start, begin + span.end, span.kv)
                for span in row.spans
            ]
            begin += len(row.mask)
        return out


# ---- generator to buffer -------------------------------------------------------------------------


class GeneratorHello(msgspec.Struct, frozen=True, tag="gen_hello"):
    """A generator says who it is; repeated now and then.  One session holds a name
    (buffer/sessions.py says which); what others hold ends with them.
    """

    protocol: int
    run: str
    producer: str  # stable name, "generator-0"
    # of this process alone; the buffer orders sessions by when it hears of them, never by this
    # number
    session: int
    slots: int
    host: str  # names the machine: weights come over shared memory when it is the learner's
    pid: int


class TicketRequest(msgspec.Struct, frozen=True, tag="want"):
    """Free engine slots: answered by Tickets at once or as soon as some may be granted.  Replaces
    an earlier Want.
    """

    producer: str
    session: int
    sequence: int
    samples: int
    holding: Label | None  # newest weights loaded; informs the view


class Delivery(msgspec.Struct, frozen=True, tag="deliver"):
    """Finished samples, several in a frame; repeated until each is acknowledged."""

    producer: str
    session: int
    sequence: int
    samples: list[Trajectory]
    drawn: int = 0  # as in Renew, these samples included


# what a generator waits for that has nothing else to do
REWARDS_WAITED_FOR = "the rewards of its answers"


SESSION_P95 = "session/p95_s"  # of a gateway's numbers: within which 95 % of its sessions end


class LeaseRenewal(msgspec.Struct, frozen=True, tag="renew"):
    """Decode progress: renews leases whose token count grew or whose answers are being judged, and
    carries the generator's own numbers.
    """

    producer: str
    session: int
    progress: list[tuple[int, int, int]]  # (ticket, attempt, tokens so far over its samples)
    stats: dict[str, float]
    waiting: ProcessWait | None  # None: it has work
    # (ticket, attempt) that are written and wait for their rewards, which have deadlines of their
    # own
    judging: list[tuple[int, int]] = []
    # tokens for training that this session has told of so far, by its own count: of each attempt
    # what it reported or delivered
    drawn: int = 0
    sessions: list[OpenSession] = []  # of a gateway: one of each of its oldest tickets
    # (ticket, attempt) that are written and not acknowledged, the rest of what it holds
    written: list[tuple[int, int]] = []
    # up to this attempt it takes no ticket any more: what was granted to it and is not named here
    # never came, and is due again; 0: it does not say
    taken: int = 0


class GeneratorGoodbye(msgspec.Struct, frozen=True, tag="leaving"):
    """The last word of a generator that ends: its leases end now.  Sent once; should it be lost,
    they end by time.
    """

    producer: str
    session: int


class JoinRequest(msgspec.Struct, frozen=True, tag="join"):
    """A machine that knows the address and has a key asks what it needs to be a generator of the
    run; answered by Joined.
    """

    producer: str  # the name it wants; "": that of its key, or without keys any free one


# ---- buffer to generator -------------------------------------------------------------------------


class WeightsSource(msgspec.Struct, frozen=True):
    """Where the learner of one epoch keeps its ring.  Made by the learner, handed on by the
    buffer.
    """

    epoch: int
    host: str
    directory: str  # the ring's mapped files, for readers on the same host
    address: str  # tcp address of the chunk server, "" when there is none


class PolicyAnnouncement(msgspec.Struct, frozen=True):
    """The last durable commit or hello; rides on every reply to a generator."""

    label: Label
    digest: str
    source: WeightsSource

    @property
    def announcement_key(self) -> Label:
        """Announcements may arrive out of order: the greater key is the newer one."""
        return Label(*self.label)


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One group to write.  Made by the buffer, which owns the prompt cursor."""

    ticket: int
    attempt: int
    kind: Literal["train", "eval"]
    prompt: Prompt
    samples: list[int]
    sampling: SamplingSettings
    min_version: Label
    # evaluation and lag injection: the whole answer with exactly these weights
    exact_version: Label | None
    seed: int  # of the random stream: (seed, ticket, sample, position)
    limit: float = math.inf  # the staleness limit announced for it, in versions


class TicketGrant(msgspec.Struct, frozen=True, tag="tickets"):
    session: int
    sequence: int
    tickets: list[Ticket]
    announcement: PolicyAnnouncement | None
    finished: bool = False  # the run is over: the generator ends


class DeliveryAcks(msgspec.Struct, frozen=True, tag="acks"):
    """What became of each delivered sample, and the bytes the generator may have unacknowledged."""

    session: int
    acks: list[tuple[int, int, int, Disposition]]  # (ticket, sample, attempt, disposition)
    credit: int
    announcement: PolicyAnnouncement | None


class JoinReply(msgspec.Struct, frozen=True, tag="joined"):
    """All that a generator elsewhere begins with; the files come from the chunk server."""

    run: str
    producer: str
    config: str  # TOML
    weights: str  # address of the chunk server, "" while no learner has said it


class UnknownSession(msgspec.Struct, frozen=True, tag="unknown"):
    """A session wants tickets that has not said hello to this life of the buffer: it says hello,
    and is given them.
    """

    producer: str
    session: int


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    """The peer must stop: it speaks another protocol, belongs to another run, or said what cannot
    be.  The run goes on without it.
    """

    reason: str
    exit_code: int = 4


# ---- gateway and generators ----------------------------------------------------------------------


class GenerationCall(msgspec.Struct, frozen=True, array_like=True):
    """One generation that a session asks for.  Made by a gateway; drawn by one generator, by
    another one if that dies: with the same random stream.
    """

    id: int  # unique in the gateway's life
    ticket: int
    sample: int
    kind: Literal["train", "eval"]
    prompt: bytes  # int32 [P], P >= 1
    max_new_tokens: int
    sampling: SamplingSettings
    # every call of a session is admitted at or above the ticket's, however late it comes
    min_version: Label
    exact_version: Label | None
    seed: int
    # 0: the stream of a plain answer to the ticket, (seed, ticket, sample); else beside it
    stream: int = 0


class CallAssignments(msgspec.Struct, frozen=True, tag="calls"):
    """To one generator: calls to draw, calls to end, and the weights to follow."""

    session: int  # of the generator
    sequence: int
    calls: list[GenerationCall]
    cut: list[int]
    announcement: PolicyAnnouncement | None


class ServingReport(msgspec.Struct, frozen=True, tag="serving"):
    """A generator draws calls; said again now and then.  held: those that it has; heard: the
    highest `CallAssignments.sequence` it has seen.  A call that was sent up to there, and is
    neither held
    nor answered, is sent again.
    """

    protocol: int
    run: str
    producer: str
    session: int
    slots: int
    held: list[int]
    heard: int


class CallResult(msgspec.Struct, frozen=True, tag="called"):
    """A call's answer.  lost: tokens that were drawn of a call that was cut, of which nothing
    remains; failed: why the generator cannot draw it, with no token then.
    """

    id: int
    tokens: bytes  # int32 [T], the stop token included
    logprobs: bytes  # float32 [T]
    spans: list[VersionSpan]
    finish: Literal["stop", "length"]
    lost: int = 0
    failed: str = ""


# ---- learner and buffer --------------------------------------------------------------------------


class LearnerHello(msgspec.Struct, frozen=True, tag="learner_hello"):
    protocol: int
    run: str
    epoch: int
    label: Label
    parent: Label | None  # label of the parent policy under the origin epoch, None at the start
    digest: str
    next_ticket: int
    origin: int  # epoch of the directory it resumed from; 0 at the start
    max_lag: float
    source: WeightsSource
    ring: list[tuple[Label, str]]  # (label, digest) of older weights held for injection
    ledger: dict[str, dict[str, float]] = {}  # totals at the checkpoint (`memory` durability)
    trained_above: list[int] = []  # completion order: tickets trained above next_ticket
    pid: int = 0
    vocabulary: int = 0  # tokens of the model; 0: not said
    # how the learner's life before this one ended: well or told to; by a signal from outside; by
    # one that its work may have brought about; by itself; "": nobody knows
    before: Literal["", "ended", "outside", "killed", "crashed"] = ""
    limit: int = 0  # where the limit sets itself: the one at the checkpoint; 0: none


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    epoch: int
    checkpointed: int


class FencedReply(msgspec.Struct, frozen=True, tag="fenced"):
    epoch: int
    by: int


class BatchRequest(msgspec.Struct, frozen=True, tag="ask"):
    epoch: int
    number: int


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Made by the buffer at the lease; `lags` are whole-sample lags in the batch, in the order of
    `samples`.
    """

    epoch: int
    number: int
    samples: list[Trajectory]  # groups are contiguous
    lags: list[int]
    in_flight: list[int]  # the part of each lag up to delivery; the rest is in_queue
    token_lags: list[list[tuple[int, int, int]]]  # per sample: (start, end, lag) runs
    stats: dict[str, float]  # the buffer's and the generators' numbers for the metrics of this step
    next_ticket: int
    ledger: dict[str, dict[str, float]]  # totals, for the checkpoint
    trained_above: list[int] = []
    limit: int = 0  # where the limit sets itself: the one for tickets then; 0: it is constant


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Batch `number` is trained and the new policy lies in the ring."""

    epoch: int
    number: int
    label: Label
    digest: str
    metrics: dict[str, float]
    # per sample of the batch: tokens (in no optimizer step that was made, rejected or vetoed in
    # all); []: none
    unused: list[tuple[int, int]] = []


class CommitReply(msgspec.Struct, frozen=True, tag="committed"):
    epoch: int
    number: int
    keep: list[Label]  # weights that pending evaluation tickets still name: the ring keeps them


class CheckpointNotice(msgspec.Struct, frozen=True, tag="checkpointed"):
    epoch: int
    oldest: int


class LearnerGoodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The learner has trained its last batch; answered by Finished once its evaluation is in (or by
    FencedOff).
    """

    epoch: int
    number: int


class RunFinished(msgspec.Struct, frozen=True, tag="finished"):
    epoch: int


# ---- anyone and buffer ---------------------------------------------------------------------------


class LearnerProgress(msgspec.Struct, frozen=True, tag="progress"):
    """The learner's state while it works: what it does or waits for, since when."""

    who: str
    waiting: ProcessWait | None  # None: it has work
    stats: dict[str, float]
    pid: int = 0
    epoch: int = 0


class HeartbeatReply(msgspec.Struct, frozen=True, tag="heard"):
    """The buffer's answer to Progress and Renew: it lives, however long the batch or the next
    ticket takes.

    A generator whose hands are full of a dead learner's tickets asks for no others: it hears here
    of the weights to follow."""

    epoch: int
    announcement: PolicyAnnouncement | None = None
    # granted so far: a ticket up to here that has not come by now is lost, and not taken later
    attempts: int = 0


class StatusRequest(msgspec.Struct, frozen=True, tag="watch"):
    """The live view and `asyncrl doctor` ask for the state of the run."""

    stop: str = ""  # "drain": finish the batch, checkpoint, end


class RunStatus(msgspec.Struct, frozen=True, tag="status"):
    """Made by the buffer; read by the live view, doctor and tests."""

    run: str
    committed: int
    steps: int
    epoch: int
    metrics: dict[str, float]  # newest value of every metric
    ledger: dict[str, dict[str, float]]
    waits: list[ProcessWait]
    peers: dict[str, float]  # name: seconds since it was heard of
    finished: bool
    error: str = ""
    # commits, evaluation answers, samples up to a batch between two commits: what the watchdog
    # looks at
    progress: int = 0
    held_up: BlockingSession | None = None  # the session that the learner waits for


FromPeer = (
    GeneratorHello
    | TicketRequest
    | Delivery
    | LeaseRenewal
    | GeneratorGoodbye
    | JoinRequest
    | LearnerHello
    | BatchRequest
    | Commit
    | CheckpointNotice
    | LearnerGoodbye
    | LearnerProgress
    | StatusRequest
)
FromBuffer = (
    TicketGrant
    | DeliveryAcks
    | JoinReply
    | UnknownSession
    | Refusal
    | Welcome
    | FencedReply
    | Batch
    | CommitReply
    | RunFinished
    | HeartbeatReply
    | RunStatus
)
FromGenerator = ServingReport | CallResult
FromGateway = CallAssignments | Refusal
