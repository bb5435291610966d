"""Messages between processes.  Each docstring names the sender and the reader.

Arrays travel as raw little-endian bytes: token ids int32, logprobs float32, masks uint8.  Every
message on the control socket is one msgpack frame, decoded as a tagged union: `FromPeer` to the
buffer, after a frame that names protocol and run, and `FromBuffer` back. Senders repeat a request
until it is answered; requests are idempotent."""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from asyncrl.contract.blobs.images import ImageShape, to_data_url
from asyncrl.contract.versions import Count, Label
from asyncrl.contract.waits import BlockingSession, NonNegative, OpenSession, ProcessWait, Text

PROTOCOL = 3
JsonObject = dict[str, Any]
IntPair = tuple[int, int]
SampleKey = tuple[int, int, int]  # (ticket, sample, attempt)
AttemptTokens = tuple[int, int, int]  # (ticket, attempt, tokens so far)
LagRun = tuple[int, int, int]  # (start, end, lag)
Numbers = dict[str, float]  # by name
LedgerTotals = dict[str, Numbers]  # line -> name of a count -> its value
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # columns of a prompt for its chat template
TemplateColumns = tuple[list[JsonObject] | None, JsonObject | None]  # their values
# Ticket numbers from here on belong to evaluations. They depend on the prompt alone, so that a
# prompt has the same random stream at every version.
EVAL_BASE = 1 << 40
MOST_GRAMMAR = 1 << 16  # characters
MAX_FRAME_BYTES = 256 * 1024 * 1024  # a larger frame is refused: no message needs it

# Ranges of fields: a message with another value does not decode.
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 60)]
Vocabulary = Annotated[int, Meta(ge=0, lt=1 << 31)]  # tokens of a model
TicketNumber = Annotated[int, Meta(ge=0, lt=1 << 48)]
PathText = Annotated[str, Meta(max_length=4096, pattern=r"^[^\0]*$")]
NumberName = Annotated[str, Meta(max_length=200)]
FEW = Meta(max_length=256)
MANY = Meta(max_length=1 << 16)
MOST = Meta(max_length=1 << 20)

# the lines of the ledger: the possible fates of a generated token
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
# Lines of wasted tokens: they reached no batch, or had no weight in it because of their age. Tokens
# that the loss left out are not wasted by the buffer, and those that an agent asked to exclude from
# training (set_aside) served the agent.
LOST = tuple(
    line
    for line in DISPOSITIONS
    if line not in ("trained", "skipped", "rejected", "left_over", "set_aside")
)
# the current fate of a sample: "accepted" until its batch is trained; completions of evaluation
# tickets have no line in the ledger
Disposition = LedgerLine | Literal["accepted", "evaluated"]


class Prompt(Struct, frozen=True, array_like=True):
    """A prompt. Made by asyncrl.tasks.

    Generators read `text`; reward functions read `answer` and `meta`."""

    id: int
    text: str
    answer: str = ""
    # chat turns; when given, the tokenizer's chat template replaces `text`, and reads the columns
    # `tools` and `chat_template_kwargs` of `meta`
    messages: list[JsonObject] = []
    meta: dict[str, str] = {}
    split: str = "train"
    task: str = ""  # of a mixture: the title of its part, which gives the reward
    # blobs (asyncrl/contract/blobs/images.py), in the order of their markers
    images: list[bytes] = []

    def describe_task(self) -> JsonObject:
        """Describe the prompt to an agent: without its answer."""
        return {
            "id": self.id,
            "text": self.text,
            "messages": self.messages,
            "meta": self.meta,
            "split": self.split,
            "images": self.image_urls,
        }

    @property
    def is_continued(self) -> bool:
        """Whether a completion continues the last turn, which is an assistant's."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def template_arguments(self) -> JsonObject:
        """The further arguments of the chat template: `tools` and those of the prompt.

        Raises ValueError for columns of another form."""
        if not self.messages:
            return {}
        try:
            values = [json.loads(self.meta.get(name) or "null") for name in TEMPLATE_COLUMNS]
            tools, arguments = msgspec.convert(values, TemplateColumns)
        except ValueError as error:
            raise ValueError(
                "for the chat template, `tools` must be a list of tools and `chat_template_kwargs` "
                "an object; rename a column that is something else"
            ) from error
        return {"tools": tools, **(arguments or {})}

    def join_answer(self, text: str) -> list[JsonObject]:
        """Return the chat with a completion, as its last turn or as the end of it."""
        turns = self.messages or [{"role": "user", "content": self.text}]
        if not self.is_continued:
            return [*turns, {"role": "assistant", "content": text}]
        return [*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + text}]

    @property
    def image_urls(self) -> list[str]:
        """The images as data: URLs, the form that OpenAI's API accepts."""
        return [to_data_url(blob) for blob in self.images]


class SamplingSettings(Struct, frozen=True, array_like=True):
    """The sampling distribution. Made by the buffer from the config; read by the engine.

    Recorded logprobs are those of exactly this distribution."""

    temperature: Annotated[float, Meta(gt=0, le=sys.float_info.max)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Vocabulary = 0  # 0: all
    max_new_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] = 64
    # sample 0 of the group is sampled greedily: a baseline that is not trained on (remax)
    greedy: bool = False

    def get_top_k(self, sample: int) -> int:
        """Return top_k of sample number `sample` in its group."""
        return 1 if self.greedy and sample == 0 else self.top_k


# gc=False: thousands are stored, and they cannot be part of a reference cycle
class VersionSpan(Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) of a completion, sampled by version `label` with weights `digest`.

    `kv` is the oldest label whose weights computed any of the keys and values that the span
    attended to."""

    label: Label
    digest: str
    start: int
    end: int
    kv: Label


class RoutingShape(NamedTuple):
    """The routers of a model: their number, the experts of each, and the experts of a token."""

    layers: Positive
    experts: Annotated[int, Meta(ge=1, lt=1 << 16)]
    chosen: Positive

    def __str__(self) -> str:
        return f"{self.layers} layers with {self.chosen} of {self.experts} experts"


class ModelShape(NamedTuple):
    """The properties of a model that the arrays of its samples must fit.

    vocabulary: number of tokens; 0: unknown.
    routing: the routers whose experts each sample must have; None: no router, or unknown.
    images: how the model reads images; None: it reads only text, or unknown."""

    vocabulary: int = 0
    routing: RoutingShape | None = None
    images: ImageShape | None = None


UNKNOWN_MODEL = ModelShape()


class RewardFailure(Struct, frozen=True, array_like=True):
    """The reason why a sample has no reward. Made by the generator; counted by the buffer.

    kind, each with its own budget:
    - data: the completion caused it.
    - machinery: the process that computes rewards failed.
    - refused: the buffer found an impossible outcome; it limits these for each sender."""

    kind: Literal["data", "machinery", "refused"]
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


def count_ones(mask: bytes) -> int:
    """Count the bytes that are 1.

    Usually all are: comparing 16,000 bytes takes a hundredth of the time of counting them."""
    return len(mask) if mask == b"\1" * len(mask) else mask.count(1)


class TrainingSequence(Struct, frozen=True, array_like=True, gc=False):
    """A root-to-leaf path of a session's calls, for one forward pass of the learner.

    Made by a gateway (actors/gateway/call_tree.py). P tokens precede the first trained token of the
    sequence; T tokens follow.  A token that several sequences share was sampled once: it has mask 1
    and a span in the first of them, mask 0 and no span in the others. Tokens that were not sampled
    (tools, other turns) also have mask 0 and no span."""

    prompt_tokens: bytes  # int32 [P]
    tokens: bytes  # int32 [T]: the sampled tokens unchanged, and the tokens between the calls
    behavior_logprobs: bytes  # float32 [T], 0 where mask is 0
    # uint8 [T]: 1 where the token was sampled and is trained in this sequence
    mask: bytes
    spans: list[VersionSpan]  # cover exactly the tokens of mask 1, in order
    segments: list[tuple[str, int, int]] = []  # ("model" or "context", start, end) of [0, T)
    # float32 [T] when calls have their own rewards, NaN where there is none; else empty
    token_rewards: bytes = b""
    # the tokens that top-p, top-k and a grammar left at each of the T positions
    # (`SampledSupport.encode`); empty: nothing was truncated, or the engine does not record it
    support: bytes = b""
    # the experts of the P + T - 1 tokens that the model read (`RoutedExperts.encode`); empty: a
    # dense model, or the engine does not record them
    routed: bytes = b""
    # the digests of its images, in the order of their tokens; the blobs are in the message of the
    # sequence, or in the buffer's prompt
    images: list[str] = []


class Trajectory(Struct, array_like=True, gc=False):
    """One sample, made by a generator or a gateway, stored by the buffer, read by the learner.

    P prompt tokens, T response tokens.  A single completion is one training sequence, in the fields
    here. A session's further sequences are in `rows`; `list_rows` returns all of them. A position
    "in the sample" counts their T tokens in that order."""

    ticket: int
    sample: int
    attempt: int
    prompt_tokens: bytes  # int32 [P]
    tokens: bytes  # int32 [T], exactly as sampled, the stop token included
    behavior_logprobs: bytes  # float32 [T], of the distribution sampled from
    mask: bytes  # uint8 [T]: 1 where the token is trained on
    spans: list[VersionSpan]
    reward: float
    reward_parts: Numbers
    finish: Literal["stop", "length"]
    temperature: float
    group_key: str = ""
    text: str = ""  # only for the few that are shown in samples.jsonl
    prompt_text: str = ""
    # (kind, start, end): "model", "tool", ... in response tokens
    segments: list[tuple[str, int, int]] = []
    token_rewards: bytes = b""  # float32 [T] when the reward function gives them, else empty
    generated_at: float = 0.0  # CLOCK_MONOTONIC seconds, when the last token was sampled
    # a failed sample is never trained on; "" means no failure (also the value in recordings)
    failed: RewardFailure | Literal[""] = ""
    rows: list[TrainingSequence] = []  # a session's sequences after the first
    aside: Count = 0  # tokens that were sampled and are never trained (ledger: set_aside)
    calls: Count = 0  # generations that a session requested; 0: a single completion
    # a session resumed under a new attempt: (earlier attempt, tokens sampled under it)
    adopted: list[IntPair] = []
    support: bytes = b""  # as in `TrainingSequence`
    routed: bytes = b""  # as in `TrainingSequence`
    images: list[str] = []  # as in `TrainingSequence`

    @property
    def key(self) -> SampleKey:
        """(ticket, sample, attempt)."""
        return self.ticket, self.sample, self.attempt

    @property
    def tokens_by_attempt(self) -> list[IntPair]:
        """(attempt, tokens sampled under it, excluded tokens included), the own attempt first."""
        if not self.adopted:
            return [(self.attempt, self.length + self.aside)]
        earlier = sum(tokens for _, tokens in self.adopted)
        return [(self.attempt, self.length + self.aside - earlier), *self.adopted]

    @property
    def all_images(self) -> set[str]:
        """The digests of the images of all sequences."""
        return set(self.images) | {name for row in self.rows for name in row.images}

    @property
    def length(self) -> int:
        """The number of tokens to train on: those of mask 1 in all sequences.

        Without a mask (simulated runs) all tokens count."""
        length = count_ones(self.mask) if self.mask else len(self.tokens) // 4
        return length + sum(count_ones(row.mask) for row in self.rows)

    @property
    def token_count(self) -> int:
        """The number of tokens T of all sequences, sampled or not."""
        return (len(self.tokens) + sum(len(row.tokens) for row in self.rows)) // 4

    def list_rows(self) -> list[Trajectory | TrainingSequence]:
        """List the structs with arrays: this one and a session's further sequences.

        The first one's methods and properties count all of them; use its fields alone."""
        return [self, *self.rows]

    def list_spans(self) -> list[VersionSpan]:
        """List the spans of all sequences, with positions in the sample."""
        if not self.rows:
            return self.spans
        spans = list(self.spans)
        offset = len(self.mask)
        for row in self.rows:
            spans += [
                VersionSpan(
                    span.label, span.digest, offset + span.start, offset + span.end, span.kv
                )
                for span in row.spans
            ]
            offset += len(row.mask)
        return spans


# ---- generator to buffer -------------------------------------------------------------------------


class GeneratorHello(Struct, frozen=True, tag="gen_hello"):
    """The identity of a generator; repeated from time to time.

    One session holds a name; buffer/sessions.py chooses it. The leases of the other sessions end.
    """

    protocol: int
    run: str
    producer: str  # stable name, "generator-0"
    # unique to this process; the buffer orders sessions by the arrival of their first message,
    # never by this number
    session: int
    slots: int
    host: str  # the machine's name: on the learner's machine, weights come over shared memory
    pid: int


class ProducerMessage(Struct, frozen=True):
    """The sender of a message: a session of a generator or gateway, as its hello names it."""

    producer: str
    session: int


class TicketRequest(ProducerMessage, frozen=True, tag="want"):
    """A generator's request for tickets for its free engine slots.

    The buffer replies by `TicketGrant` as soon as it may grant a ticket. A request replaces the
    earlier one."""

    sequence: int
    samples: Annotated[int, Meta(ge=0, le=1 << 30)]
    holding: Label | None  # newest weights loaded


class Delivery(ProducerMessage, frozen=True, tag="deliver"):
    """Finished samples, several in a frame; repeated until each one is acknowledged."""

    sequence: int
    samples: list[Trajectory]
    drawn: Count = 0  # as in `LeaseRenewal`, these samples included
    # digest -> blob of images that sessions received; images of tickets' prompts are left out
    images: dict[str, bytes] = {}


# waits of a generator or gateway without other work; the buffer adds the cause of the last two
REWARDS_WAITED_FOR = "the rewards of its samples"
TICKET_WAITED_FOR = "a ticket"
CALL_WAITED_FOR = "a call of a session"
SESSION_P95 = "session/p95_s"  # a gateway's number: 95 % of its sessions end within this time
RENEW_S = 0.5  # seconds between two renewals of a generator's leases


class LeaseRenewal(ProducerMessage, frozen=True, tag="renew"):
    """The decode progress and the numbers of a generator, which renew its leases.

    A lease is renewed when its token count grew or its completions wait for their rewards."""

    # (ticket, attempt, tokens so far over its samples)
    progress: Annotated[list[tuple[int, int, Count]], MANY]
    stats: Annotated[dict[NumberName, NonNegative], FEW]
    waiting: ProcessWait | None  # None: it has work
    # (ticket, attempt) that are generated and wait for their rewards, which have their own
    # deadlines
    judging: Annotated[list[IntPair], MANY] = []
    # training tokens that this session has reported or delivered so far, summed over its attempts
    drawn: Count = 0
    # of a gateway: one for each of its oldest tickets
    sessions: Annotated[list[OpenSession], FEW] = []
    # the other (ticket, attempt) that it holds: generated, but not acknowledged
    written: Annotated[list[IntPair], MANY] = []
    # Attempts <= `taken` that are not listed were lost in transit; the buffer grants them again.
    # 0 means unknown.
    taken: int = 0


class GeneratorGoodbye(ProducerMessage, frozen=True, tag="leaving"):
    """The last message of a generator: its leases end now.

    It is sent once; if it is lost, the leases expire."""


class JoinRequest(Struct, frozen=True, tag="join"):
    """The request of another machine to join the run; the buffer replies by `JoinReply`."""

    # the requested name; "": the name of its key, or any free name without keys
    producer: str


# ---- buffer to generator -------------------------------------------------------------------------


class WeightsSource(Struct, frozen=True):
    """The location of a learner's ring of weights. Made by the learner, forwarded by the buffer."""

    epoch: Count
    host: PathText
    directory: PathText  # the ring's mapped files, for readers on the same host
    address: PathText  # tcp address of the chunk server; "": it has none


class PolicyAnnouncement(Struct, frozen=True):
    """The newest durable version; part of every reply to a generator.

    Announcements may arrive out of order: that of the greatest label is the newest."""

    label: Label
    digest: PathText
    source: WeightsSource


class Ticket(Struct, frozen=True, array_like=True):
    """The order to generate one group. Made by the buffer, which owns the prompt cursor."""

    ticket: Count
    attempt: Positive
    kind: Literal["train", "eval"]
    prompt: Prompt
    samples: Annotated[list[Count], Meta(min_length=1), MOST]
    sampling: SamplingSettings
    min_version: Label
    # evaluation and lag injection: sample the whole completion with exactly these weights
    exact_version: Label | None
    seed: int  # of the random stream: (seed, ticket, sample, position)
    limit: float = math.inf  # its staleness limit, in versions


class TicketGrant(Struct, frozen=True, tag="tickets"):
    """The tickets granted to a generator; the reply to `TicketRequest`.

    A grant without tickets announces a version or the end of the run."""

    session: int
    sequence: int
    tickets: Annotated[list[Ticket], MOST]
    announcement: PolicyAnnouncement | None
    finished: bool = False  # the run is over: the generator exits


class DeliveryAcks(Struct, frozen=True, tag="acks"):
    """The disposition of each delivered sample."""

    session: int
    acks: list[tuple[int, int, int, Disposition]]  # (ticket, sample, attempt, disposition)
    credit: Count  # bytes that the generator may have unacknowledged
    announcement: PolicyAnnouncement | None


class JoinReply(Struct, frozen=True, tag="joined"):
    """The start parameters of a generator on another machine.

    Its files come from the chunk server."""

    run: str
    producer: str
    config: str  # TOML
    weights: str  # address of the chunk server, "" before the first learner's hello


class UnknownSession(ProducerMessage, frozen=True, tag="unknown"):
    """A session requested tickets before its hello to this buffer process.

    The generator sends its hello, and the buffer then grants the tickets."""


class Refusal(Struct, frozen=True, tag="refused"):
    """The order to a peer to stop; the run continues without it.

    The peer has another protocol, belongs to another run, or sent an invalid message."""

    reason: Text
    exit_code: Annotated[int, Meta(ge=0, lt=256)] = 4


# ---- gateway and generators ----------------------------------------------------------------------


class GenerationCall(Struct, frozen=True, array_like=True):
    """A generation that a session requests. Made by a gateway; sampled by a generator.

    If that generator dies, another one samples the call again with the same random stream."""

    id: int  # unique within the gateway process
    ticket: int
    sample: Count
    kind: Literal["train", "eval"]
    prompt: bytes  # int32 [P], P >= 1
    max_new_tokens: int
    sampling: SamplingSettings
    # at least the ticket's for every call of a session, however late the call comes
    min_version: Label
    exact_version: Label | None
    seed: int
    # 0: the random stream of a plain completion of the ticket, (seed, ticket, sample); else another
    stream: Annotated[int, Meta(ge=0)] = 0
    # that it is decoded under, in llguidance's form of Lark; "": any tokens
    grammar: Annotated[str, Meta(max_length=MOST_GRAMMAR)] = ""
    images: list[str] = []  # digests, in the order of the image tokens


class CallAssignments(Struct, frozen=True, tag="calls"):
    """The gateway's order to a generator: calls to sample or cancel, and weights to follow."""

    session: int  # of the generator
    sequence: int
    calls: Annotated[list[GenerationCall], MOST]
    cut: list[int]
    announcement: PolicyAnnouncement | None
    images: dict[str, bytes] = {}  # digest -> blob, each image of the calls once


class ServingReport(Struct, frozen=True, tag="serving"):
    """A generator's report to the gateway; repeated from time to time.

    held: ids of the calls that it has.
    heard: the highest `CallAssignments.sequence` that it has received. The gateway sends a call
        again that it assigned up to there and that is neither in `held` nor answered."""

    protocol: int
    run: str
    producer: str
    session: int
    slots: Annotated[int, Meta(ge=0, le=1 << 20)]
    held: Annotated[list[int], MOST]
    heard: Count


class CallResult(Struct, frozen=True, tag="called"):
    """The result of a call. Made by a generator; read by the gateway.

    lost: number of lost tokens, sampled for a call that was canceled.
    failed: the reason why the generator cannot sample it; it then has no tokens."""

    id: int
    tokens: bytes  # int32 [T], the stop token included
    logprobs: bytes  # float32 [T]
    spans: list[VersionSpan]
    finish: Literal["stop", "length"]
    lost: Count = 0
    failed: Text = ""
    support: bytes = b""  # as in `TrainingSequence`
    routed: bytes = b""  # as in `TrainingSequence`, with P tokens of the call's prompt


# ---- learner and buffer --------------------------------------------------------------------------


class MixturePosition(Struct, frozen=True):
    """The position in a mixture of tasks at a checkpoint, by task (buffer/mixer.py).

    credit: groups that the task is owed.
    indices: index of the next prompt.
    due: (task, index) of prompts to draw first; index -1: a new one.
    removed: removed groups so far.
    ledgers: the ledger's totals."""

    credit: dict[str, Finite]
    indices: dict[str, Count]
    due: list[tuple[str, Annotated[int, Meta(ge=-1)]]]
    removed: dict[str, Count]
    ledgers: dict[str, LedgerTotals]


class LearnerHello(Struct, frozen=True, tag="learner_hello"):
    """The identity of a learner process and the checkpoint that it continues.

    The buffer replies by `Welcome`, `FencedReply` or `Refusal`."""

    protocol: int
    run: str
    epoch: Positive
    label: Label
    parent: Label | None  # label of the parent policy under the origin epoch, None at the start
    digest: str
    next_ticket: TicketNumber
    origin: Count  # epoch of the directory it resumed from; 0 at the start
    max_lag: Annotated[float, Meta(ge=0)]
    source: WeightsSource
    ring: list[tuple[Label, str]]  # (label, digest) of older weights kept for injection
    ledger: LedgerTotals = {}  # totals at the checkpoint (`memory` durability)
    # completion order: tickets trained above next_ticket
    trained_above: list[TicketNumber] = []
    pid: int = 0
    vocabulary: Vocabulary = 0  # tokens of the model; 0: unknown
    # how the learner's previous process ended: regularly ("ended"), by a signal from outside, by a
    # signal that its own work may have caused ("killed"), by itself ("crashed"), or unknown ("")
    before: Literal["", "ended", "outside", "killed", "crashed"] = ""
    limit: Count = 0  # adaptive limit at the checkpoint; 0: the limit is constant
    # the routers whose recorded experts it replays; None: it replays none
    routing: RoutingShape | None = None
    window: float = 0.0  # admission window at the checkpoint, in batches; 0: unknown
    mixture: MixturePosition | None = None  # position in a mixture at the checkpoint
    images: ImageShape | None = None  # how the model reads images; None: it reads only text

    @classmethod
    def make_first(cls, label: Label, digest: str, max_lag: float) -> LearnerHello:
        """Make the hello of a learner that begins a run in the same process as the store."""
        return cls(
            protocol=PROTOCOL,
            run="",
            epoch=label.epoch,
            label=label,
            parent=None,
            digest=digest,
            next_ticket=0,
            origin=0,
            max_lag=max_lag,
            source=WeightsSource(label.epoch, "", "", ""),
            ring=[],
        )


class EpochMessage(Struct, frozen=True):
    """A message of the buffer and the learner of an epoch."""

    epoch: int


class LearnerMessage(EpochMessage, frozen=True):
    """A message of a learner after its hello."""


class Welcome(EpochMessage, frozen=True, tag="welcome"):
    """The buffer follows the learner of this epoch."""

    checkpointed: Count  # number of the oldest batch in the buffer


class FencedReply(EpochMessage, frozen=True, tag="fenced"):
    """The buffer does not follow this learner, because it follows the epoch `by`."""

    by: int


class BatchRequest(LearnerMessage, frozen=True, tag="ask"):
    """A learner's request for a batch; the buffer replies by `Batch`."""

    number: int


class Batch(EpochMessage, frozen=True, tag="batch"):
    """A batch. Made by the buffer; read by the learner.

    Lists have one entry for each of `samples`, in their order."""

    number: Count
    samples: list[Trajectory]  # groups are contiguous
    lags: list[int]  # of the whole sample, in this batch
    in_flight: list[int]  # the part of each lag up to delivery; the rest is in_queue
    token_lags: list[list[LagRun]]  # per sample: (start, end, lag) runs
    stats: Numbers  # numbers of buffer and generators for the metrics of this step
    next_ticket: Count
    ledger: LedgerTotals  # totals, for the checkpoint
    trained_above: list[int] = []
    limit: int = 0  # adaptive limit: its value for new tickets; 0: the limit is constant
    window: float = 0.0  # admission window in batches; 0: the limit is always filled
    tasks: list[str] = []  # of a mixture: the task of each sample
    mixture: MixturePosition | None = None  # for the checkpoint
    images: dict[str, bytes] = {}  # digest -> blob, each image of the samples once


class Commit(LearnerMessage, frozen=True, tag="commit"):
    """Batch `number` is trained and the new policy is in the ring. Sent by the learner."""

    number: int
    label: Label
    digest: str
    metrics: Numbers
    # per sample of the batch: (tokens without an optimizer step, tokens rejected or vetoed in every
    # step); []: all are zero
    unused: list[tuple[Count, Count]] = []


class CommitReply(EpochMessage, frozen=True, tag="committed"):
    """The buffer has recorded the commit."""

    number: int
    # weights that the ring must keep: tickets name them exactly
    keep: Annotated[list[Label], MOST]


class CheckpointNotice(LearnerMessage, frozen=True, tag="checkpointed"):
    """The learner has written a checkpoint: the buffer may drop batches before the oldest one."""

    oldest: int  # batch number of the oldest checkpoint


class LearnerGoodbye(LearnerMessage, frozen=True, tag="goodbye"):
    """The learner has trained its last batch.

    The buffer replies by `RunFinished` once the evaluations are complete, or by `FencedReply`."""

    number: int


class RunFinished(EpochMessage, frozen=True, tag="finished"):
    """The run is complete: the learner exits."""


# ---- any process and buffer ----------------------------------------------------------------------


class LearnerProgress(Struct, frozen=True, tag="progress"):
    """The learner's state: its wait and its numbers. Sent repeatedly."""

    who: str
    waiting: ProcessWait | None  # None: it has work
    stats: Numbers
    pid: int = 0
    epoch: int = 0


class HeartbeatReply(EpochMessage, frozen=True, tag="heard"):
    """The buffer's reply to `LearnerProgress` and `LeaseRenewal`: the buffer is alive.

    The next batch or ticket may take long. The reply contains the announcement because a generator
    that is busy with the tickets of a dead learner requests no further tickets, and must still
    follow the new learner's weights."""

    announcement: PolicyAnnouncement | None = None
    # granted so far: the generator treats a ticket up to this attempt that has not arrived as lost
    attempts: int = 0
    cause: str = ""  # why the generator has no ticket or call; "": it does not wait for one


class StatusRequest(Struct, frozen=True, tag="watch"):
    """A request of the live view or `asyncrl doctor` for the state of the run."""

    stop: str = ""  # "drain": finish the batch, write a checkpoint, exit


class RunStatus(Struct, frozen=True, tag="status"):
    """The state of the run. Made by the buffer; read by the live view, doctor and tests."""

    run: str
    committed: Count
    steps: Count
    epoch: int
    metrics: Annotated[Numbers, MOST]  # newest value of every metric
    ledger: LedgerTotals
    waits: Annotated[list[ProcessWait], MOST]
    peers: Annotated[Numbers, MOST]  # name: seconds since its last message
    finished: bool
    error: str = ""
    # the watchdog's measure: commits, evaluation completions, and between two commits the samples
    # of at most one batch
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
