"""Every struct on every wire, each headed by who makes it and who reads it.

Arrays travel as raw little-endian bytes: token ids int32, logprobs float32, masks uint8.  Every
message on the control socket is one frame of msgpack, a tagged union (`FromPeer` towards the
buffer, `FromBuffer` back); decoding is typed. Requests are repeated until they are answered and are
idempotent."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from asyncrl.contract.versions import Label
from asyncrl.contract.waits import Wait

PROTOCOL = 2
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
    "lost_with_process",
    "left_over",
    "failed",
]
DISPOSITIONS: tuple[LedgerLine, ...] = get_args(LedgerLine)
# of these, the lines of tokens that were written for nothing: they reached no batch, or counted for
# nothing in it by their age; what the loss left out is no loss of the buffer's
LOST = tuple(
    line for line in DISPOSITIONS if line not in ("trained", "skipped", "rejected", "left_over")
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


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Made by the buffer from the config; read by the engine.  logprobs are those of exactly this
    distribution.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    max_new_tokens: int = 64
    # sample 0 of the group is the likeliest answer, a baseline and not trained on (remax)
    greedy: bool = False

    def kept(self, sample: int) -> int:
        """top_k of that sample."""
        return 1 if self.greedy and sample == 0 else self.top_k


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of an answer: drawn by `label` (weights `digest`), on keys and values
    written since `kv`.

    `kv` is the oldest label whose weights computed any of the keys and values that the span
    attended to."""

    label: Label
    digest: str
    start: int
    end: int
    kv: Label


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a sample has no reward.  Made by the generator; counted by kind in the buffer, each
    against a budget of its own.
    """

    kind: Literal["data", "machinery"]  # the answer, or the process that judged it
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


class Row(msgspec.Struct, array_like=True):
    """One path through a sample of several calls, as the learner runs it forward: made by the
    gateway (actors/gateway/forest.py), read by the learner.  P tokens before the row's first own
    token, T from it on.
    """

    prompt_tokens: bytes  # int32 [P]
    tokens: bytes  # int32 [T]: drawn ones exactly as sampled, and what stood between the calls
    behavior_logprobs: bytes  # float32 [T], 0 where mask is 0
    # uint8 [T]: 1 where the token was drawn here and is trained in this row
    mask: bytes
    spans: list[Span]  # cover exactly the tokens of mask 1, in order
    segments: list[tuple[str, int, int]] = []  # ("model" or "context", start, end) of [0, T)
    # float32 [T] when calls have rewards of their own, NaN where there is none; else empty
    token_rewards: bytes = b""


class Trajectory(msgspec.Struct, array_like=True):
    """One sample.  Made by a generator; stored by the buffer; read by the learner.  P prompt, T
    response tokens.
    """

    ticket: int
    sample: int
    attempt: int
    prompt_tokens: bytes  # int32 [P]
    tokens: bytes  # int32 [T], exactly as sampled, the stop token included
    behavior_logprobs: bytes  # float32 [T], of the distribution sampled from
    mask: bytes  # uint8 [T]: 1 where the token is trained on
    spans: list[Span]
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
    failed: Failure | Literal[""] = ""

    @property
    def length(self) -> int:
        return len(self.tokens) // 4


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


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Free engine slots: answered by Tickets at once or as soon as some may be granted.  Replaces
    an earlier Want.
    """

    producer: str
    session: int
    sequence: int
    samples: int
    holding: Label | None  # newest weights loaded; informs the view


class Deliver(msgspec.Struct, frozen=True, tag="deliver"):
    """Finished samples, several in a frame; repeated until each is acknowledged."""

    producer: str
    session: int
    sequence: int
    samples: list[Trajectory]
    drawn: int = 0  # as in Renew, these samples included


# what a generator waits for that has nothing else to do
REWARDS_WAITED_FOR = "the rewards of its answers"


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Decode progress: renews leases whose token count grew or whose answers are being judged, and
    carries the generator's own numbers.
    """

    producer: str
    session: int
    progress: list[tuple[int, int, int]]  # (ticket, attempt, tokens so far over its samples)
    stats: dict[str, float]
    waiting: Wait | None  # None: it has work
    # (ticket, attempt) that are written and wait for their rewards, which have deadlines of their
    # own
    judging: list[tuple[int, int]] = []
    # tokens for training that this session has told of so far, by its own count: of each attempt
    # what it reported or delivered
    drawn: int = 0


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The last word of a generator that ends: its leases end now.  Sent once; should it be lost,
    they end by time.
    """

    producer: str
    session: int


# ---- buffer to generator -------------------------------------------------------------------------


class WeightsSource(msgspec.Struct, frozen=True):
    """Where the learner of one epoch keeps its ring.  Made by the learner, handed on by the
    buffer.
    """

    epoch: int
    host: str
    directory: str  # the ring's mapped files, for readers on the same host
    address: str  # tcp address of the chunk server, "" when there is none


class Announcement(msgspec.Struct, frozen=True):
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
    sampling: Sampling
    min_version: Label
    # evaluation and lag injection: the whole answer with exactly these weights
    exact_version: Label | None
    seed: int  # of the random stream: (seed, ticket, sample, position)


class Tickets(msgspec.Struct, frozen=True, tag="tickets"):
    session: int
    sequence: int
    tickets: list[Ticket]
    announcement: Announcement | None
    finished: bool = False  # the run is over: the generator ends


class Acks(msgspec.Struct, frozen=True, tag="acks"):
    """What became of each delivered sample, and the bytes the generator may have unacknowledged."""

    session: int
    acks: list[tuple[int, int, int, Disposition]]  # (ticket, sample, attempt, disposition)
    credit: int
    announcement: Announcement | None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The peer must stop: it speaks another protocol, belongs to another run, or said what cannot
    be.  The run goes on without it.
    """

    reason: str
    exit_code: int = 4


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


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    epoch: int
    checkpointed: int


class FencedOff(msgspec.Struct, frozen=True, tag="fenced"):
    epoch: int
    by: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
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


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    epoch: int
    number: int
    keep: list[Label]  # weights that pending evaluation tickets still name: the ring keeps them


class Checkpointed(msgspec.Struct, frozen=True, tag="checkpointed"):
    epoch: int
    oldest: int


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The learner has trained its last batch; answered by Finished once its evaluation is in (or by
    FencedOff).
    """

    epoch: int
    number: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    epoch: int


# ---- anyone and buffer ---------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The learner's state while it works: what it does or waits for, since when."""

    who: str
    waiting: Wait | None  # None: it has work
    stats: dict[str, float]
    pid: int = 0
    epoch: int = 0


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """The buffer's answer to Progress and Renew: it lives, however long the batch or the next
    ticket takes.

    A generator whose hands are full of a dead learner's tickets asks for no others: it hears here
    of the weights to follow."""

    epoch: int
    announcement: Announcement | None = None


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """The live view and `asyncrl doctor` ask for the state of the run."""

    stop: str = ""  # "drain": finish the batch, checkpoint, end


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Made by the buffer; read by the live view, doctor and tests."""

    run: str
    committed: int
    steps: int
    epoch: int
    metrics: dict[str, float]  # newest value of every metric
    ledger: dict[str, dict[str, float]]
    waits: list[Wait]
    peers: dict[str, float]  # name: seconds since it was heard of
    finished: bool
    error: str = ""
    # commits, evaluation answers, samples up to a batch between two commits: what the watchdog
    # looks at
    progress: int = 0


FromPeer = (
    GeneratorHello
    | Want
    | Deliver
    | Renew
    | Leaving
    | LearnerHello
    | Ask
    | Commit
    | Checkpointed
    | Goodbye
    | Progress
    | Watch
)
FromBuffer = (
    Tickets | Acks | Refused | Welcome | FencedOff | Batch | Committed | Finished | Heard | Status
)
