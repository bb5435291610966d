"""What a message may say: each function raises BadMessage for what cannot be, before anything of
the store is changed.

They look at names and counts, which index the store, at the versions, and at what an answer holds:
one whose arrays do not fit together would end the learner that trains on it, and in a durable run
every learner after it.  Each refusal has a reason, a key of REFUSALS, by which it is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.contract import outcomes
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import (
    DISPOSITIONS,
    EVAL_BASE,
    LearnerHello,
    LeaseRenewal,
    TicketRequest,
    TrainingSequence,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.outcomes import MOST_PARTS, NAME_LENGTH, REASON_LENGTH
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BUFFER
from asyncrl.transport import arrays
from buffer.groups import Grant, StoreSettings
from buffer.ledger import Key, Ledger

if TYPE_CHECKING:
    from buffer.store import Store

TEXT_LENGTH = 1000
TEXT_PER_TOKEN = 128  # characters: the longest tokens are runs of spaces
TEXT_MORE = 1 << 16  # characters on top, of prompts that a template wraps
NAMES = MOST_PARTS  # parts of a reward, numbers of a generator
ROWS = 1 << 16  # of a list in one message
TICKET_END = 1 << 48
MOST_ROWS = 4096  # of a session
WANTED = 1 << 30  # samples, which is how a generator in lockstep asks for all there are


def require(ok: bool, what: str, reason: str = "message") -> None:
    if not ok:
        raise BadMessage(what, reason)


def producer(name: str) -> None:
    """A generator's name: it stands in logs and in the live view."""
    require(
        0 < len(name) <= NAME_LENGTH and name.isprintable(),
        f"a generator's name is printable and has 1 to {NAME_LENGTH} characters, not {name[:40]!r}",
    )


def check_delivery(
    store: Store, samples: Sequence[Trajectory], vocabulary: int
) -> tuple[Sequence[Trajectory], dict[Key, BadMessage]]:
    """Check a message of answers; return them as they are to be taken, and why some are refused.

    A sample is refused alone, and taken as failed, when only its outcome cannot be: its reward, its
    parts, a text.  These come from a reward function, an environment or an agent, and the process
    that sends them is sound.  Raises BadMessage, before anything is changed, for a sample whose
    ticket, versions or arrays cannot be: the process that sends these is not.

    vocabulary: 0 while no learner has said it."""
    try:
        _delivered(store, samples, vocabulary)
    except BadMessage:
        pass
    else:
        return samples, {}
    taken, refused = [], {}
    for answer in samples:
        try:
            _delivered(store, [answer], vocabulary)
        except BadMessage as error:
            answer = outcomes.failed_sample(answer, "data", str(error))
            _delivered(store, [answer], vocabulary)
            answer = outcomes.failed_sample(answer, "refused", str(error))
            refused[answer.ticket, answer.sample, answer.attempt] = error
        taken.append(answer)
    return taken, refused


def _delivered(store: Store, samples: Sequence[Trajectory], vocabulary: int) -> None:
    """All that a message of answers must be: `sample`, `versions` and `answers` of each.

    Nearly all are `are_plain_samples`, which looks at the same in one pass; whenever one is not,
    the functions
    that know why, and every case there is, look at all of them."""
    if are_plain_samples(store, samples):
        arrays.numbers(samples, vocabulary)
        return
    for answer in samples:
        sample(store, answer)
        versions(store, answer)
    answers(samples, vocabulary, store.settings)


def are_plain_samples(store: Store, samples: Sequence[Trajectory]) -> bool:
    """Is each a single answer of the usual kind, to a group that is here, which `sample`,
    `versions` and `answers` would take, the numbers in its arrays apart?  False says nothing.
    """
    limits = store.settings
    most, context = limits.sampling.max_new_tokens, limits.context or math.inf
    text_most = TEXT_PER_TOKEN * (limits.context or ROWS) + TEXT_MORE
    alive, retained = store.alive, store.retained
    if limits.session_tokens:
        return False
    registered: set[tuple[Label, str, Label]] = set()
    for answer in samples:
        group = alive.get(answer.ticket) or retained.get(answer.ticket)
        if (
            group is None  # with it, ticket and attempt are known to be granted
            or answer.attempt not in group.attempts
            or answer.ticket >= EVAL_BASE
            or not 0 <= answer.sample < limits.group
            or answer.adopted
            or answer.rows
            or answer.aside
            or answer.calls
            or answer.failed
        ):
            return False
        length, size, prompt = len(answer.mask), len(answer.tokens), len(answer.prompt_tokens)
        if not (
            0 < length <= most
            and size == 4 * length == len(answer.behavior_logprobs)
            and not prompt % 4
            and length + prompt // 4 <= context
            and len(answer.token_rewards) in (0, size)
            and len(answer.text) <= text_most
            and len(answer.prompt_text) <= text_most
            and len(answer.group_key) <= NAME_LENGTH
            and _plain_numbers(answer)
            and _plain_segments(answer.segments, length)
        ):
            return False
        grant = group.grants.get(answer.attempt)  # journals of older versions do not tell
        at = 0
        for span in answer.spans:
            label = span.label
            if (
                span.start != at
                or span.end <= at
                or not (grant is None or is_granted(grant, label))
            ):
                return False
            at = span.end
            weights = (label, span.digest, span.kv)
            if weights not in registered:
                if not _is_known_version(store, span):
                    return False
                registered.add(weights)
        if at != length:
            return False
    return True


def _plain_numbers(answer: Trajectory) -> bool:
    """What `arrays.scalars` demands, and the names of the parts (`_texts`)."""
    if not (
        -arrays.REWARD <= answer.reward <= arrays.REWARD  # false for NaN too
        and 0 < answer.temperature < math.inf
        and -math.inf < answer.generated_at < math.inf
        and len(answer.reward_parts) <= NAMES
    ):
        return False
    for part, value in answer.reward_parts.items():
        if len(part) > NAME_LENGTH or not -arrays.REWARD <= value <= arrays.REWARD:
            return False
    return True


def _plain_segments(segments: list[tuple[str, int, int]], length: int) -> bool:
    """Those of an answer lie in its tokens (`_texts`)."""
    for kind, start, end in segments:
        if not 0 <= start <= end <= length or len(kind) > NAME_LENGTH:
            return False
    return len(segments) <= length + 1


def _is_known_version(store: Store, span: VersionSpan) -> bool:
    """What `_registered` demands."""
    label = span.label
    return (
        label in store.tree
        and (not span.digest or span.digest == store.tree.digest(label))
        and (span.kv == label or (span.kv.epoch >= 0 <= span.kv.number and span.kv <= label))
    )


def sample(store: Store, answer: Trajectory) -> None:
    """An answer: to a ticket and an attempt that were granted, by weights that a learner
    registered.
    """
    for span in answer.all_spans():
        _registered(store, answer, span)
    if not 1 <= answer.attempt <= store.attempts:
        raise BadMessage(
            f"ticket {answer.ticket}: attempt {answer.attempt} was never granted; the last one is "
            f"{store.attempts}",
            "ticket",
        )
    if answer.ticket >= EVAL_BASE:
        out = store.evaluations.out.get(answer.attempt)
        if answer.sample != 0 or (out is not None and out.job.ticket != answer.ticket):
            raise BadMessage(
                f"attempt {answer.attempt} is not of evaluation ticket {answer.ticket}, sample "
                f"{answer.sample}",
                "ticket",
            )
        return
    if not 0 <= answer.sample < store.settings.group:
        raise BadMessage(
            f"ticket {answer.ticket}: sample {answer.sample} of a group of {store.settings.group}",
            "ticket",
        )
    if not 0 <= answer.ticket < store.cursor:
        raise BadMessage(
            f"ticket {answer.ticket} was never granted; the next one is {store.cursor}", "ticket"
        )
    _check_adopted_attempts(answer)
    group = store.alive.get(answer.ticket) or store.retained.get(answer.ticket)
    for attempt in (answer.attempt, *(attempt for attempt, _ in answer.adopted)):
        if group is not None and attempt not in group.attempts:
            raise BadMessage(
                f"ticket {answer.ticket}: attempt {attempt} is not one of its attempts", "ticket"
            )


def _check_adopted_attempts(answer: Trajectory) -> None:
    """The earlier attempts of a session that went on: earlier ones, each once, and no more tokens
    than the session has.
    """
    attempts = [*(attempt for attempt, _ in answer.adopted), answer.attempt]
    rising = all(earlier < later for earlier, later in itertools.pairwise(attempts))
    if not rising or any(tokens < 0 for _, tokens in answer.tokens_by_attempt):
        raise BadMessage(
            f"ticket {answer.ticket}, attempt {answer.attempt}: it says that it went on from "
            f"{answer.adopted[:8]}, with {answer.length + answer.aside} tokens in all",
            "ticket",
        )


def _registered(store: Store, answer: Trajectory, span: VersionSpan) -> None:
    """The weights of a span are those that a learner has announced under this name; its keys and
    values are no newer.
    """
    label = span.label
    if label not in store.tree:
        raise BadMessage(
            f"ticket {answer.ticket}: weights {label} (digest {span.digest[:40]}) wrote tokens, "
            f"but no learner has announced them; known are up to {store.policy}: stop the "
            "generator that runs other weights",
            "version",
        )
    if span.digest and span.digest != (ours := store.tree.digest(label)):
        raise BadMessage(
            f"ticket {answer.ticket}: weights {label} have digest {span.digest[:40]} at the "
            f"generator and {ours} at the learner",
            "version",
        )
    if span.kv != label and not (span.kv.epoch >= 0 and span.kv.number >= 0 and span.kv <= label):
        raise BadMessage(
            f"ticket {answer.ticket}: weights {label} wrote tokens on keys and values of {span.kv}",
            "version",
        )


def versions(store: Store, answer: Trajectory) -> None:
    """The versions of an answer keep to its ticket, whose attempt `sample` knows: exactly the one
    that it names, or from its minimum on in its epoch.  Those of an adopted session keep to one of
    its attempts each.

    What is older evades the limit, and what a later epoch drew was never granted."""
    if answer.ticket >= EVAL_BASE:
        group = None
        out = store.evaluations.out.get(answer.attempt)
        grant = None if out is None else Grant(out.job.label, exact=True)
    else:
        group = store.alive.get(answer.ticket) or store.retained.get(answer.ticket)
        # journals of older versions do not tell
        grant = None if group is None else group.grants.get(answer.attempt)
    if grant is None:
        return
    least = grant.label
    earlier = [
        each
        for attempt, _ in answer.adopted
        if group is not None and (each := group.grants.get(attempt)) is not None
    ]
    for span in answer.all_spans():
        label = span.label
        if not any(is_granted(each, label) for each in (grant, *earlier)):
            raise BadMessage(
                f"ticket {answer.ticket}, attempt {answer.attempt}: weights {label} wrote tokens, "
                f"its ticket asked for {'exactly ' if grant.exact else ''}{least}"
                f"{'' if grant.exact else ' or newer of its epoch'}",
                "limit",
            )


def is_granted(grant: Grant, label: Label) -> bool:
    """May this version write under the grant?"""
    least = grant.label
    newer = label.epoch == least.epoch and label.number >= least.number
    return label == least or (newer and not grant.exact)


def answers(samples: Sequence[Trajectory], vocabulary: int, settings: StoreSettings) -> None:
    """The answers of a message by themselves: arrays of one length, numbers where numbers are
    meant, tokens that the model has, no more than the config allows.

    vocabulary: 0 while no learner has said it."""
    for answer in samples:
        if settings.session_tokens:
            _session(answer, settings)
        else:
            _single(answer)
            _lengths(answer, settings)
            _spans(answer)
        arrays.scalars(answer)
        _texts(answer, settings)
    arrays.numbers(samples, vocabulary)


def _single(answer: Trajectory) -> None:
    if answer.rows or answer.aside or answer.calls or answer.adopted:
        raise BadMessage(
            f"{arrays.name(answer)}: {len(answer.rows) + 1} rows of {answer.calls} calls, and the "
            "run has no [agent]",
            "shape",
        )


def _session(answer: Trajectory, settings: StoreSettings) -> None:
    """A session: rows of arrays of one length, whose spans are the tokens of their masks.  A failed
    one may be empty.
    """
    check_token_count(answer.aside)
    check_token_count(answer.calls)
    if answer.failed and not answer.mask and not answer.rows:
        _lengths(answer, settings)
        return
    most = settings.session_tokens
    if len(answer.rows) >= MOST_ROWS or not 0 < answer.length <= most:
        raise BadMessage(
            f"{arrays.name(answer)}: {len(answer.rows) + 1} rows with {answer.length} tokens to be "
            f"trained; a session has some and may have {most} (agent.max_tokens)",
            "length",
        )
    for number, row in enumerate(arrays.array_parts(answer)):
        which = f"{arrays.name(answer)}, row {number}"
        length = len(row.mask)
        prompt = len(row.prompt_tokens)
        sizes = {len(row.tokens), len(row.behavior_logprobs), 4 * length}
        if len(sizes) > 1 or not length or prompt % 4 or len(row.token_rewards) % (4 * length):
            raise BadMessage(
                f"{which}: {len(row.tokens)} bytes of tokens and {len(row.behavior_logprobs)} of "
                f"behavior_logprobs for {length} mask bytes, {prompt} of its prompt; 4 bytes each, "
                "one or more",
                "shape",
            )
        if settings.context and length + prompt // 4 > settings.context:
            raise BadMessage(
                f"{which}: {length + prompt // 4} tokens; generator.context is {settings.context}",
                "length",
            )
        _covered(row, which)


def _covered(row: Trajectory | TrainingSequence, which: str) -> None:
    """The spans of a row are in order, and exactly its tokens of mask 1."""
    at = 0
    for span in row.spans:
        if not at <= span.start < span.end <= len(row.mask):
            break
        if row.mask.count(1, span.start, span.end) != span.end - span.start:
            break
        at = span.end
    else:
        inside = all(0 <= start <= end <= len(row.mask) for _, start, end in row.segments)
        if inside and sum(x.end - x.start for x in row.spans) == row.mask.count(1):
            return
    raise BadMessage(
        f"{which}: its spans are not its {row.mask.count(1)} tokens of mask 1 in order", "shape"
    )


def _lengths(answer: Trajectory, settings: StoreSettings) -> None:
    """A failed answer may be empty: what cannot be begun has no tokens."""
    length = len(answer.mask)
    size = len(answer.tokens)
    prompt = len(answer.prompt_tokens)
    if size != 4 * length or prompt % 4 or not (length or answer.failed):
        raise BadMessage(
            f"{arrays.name(answer)}: {size} bytes of tokens for {length} mask bytes, {prompt} of "
            "its prompt; int32, one or more",
            "shape",
        )
    if len(answer.behavior_logprobs) != size:
        raise BadMessage(
            f"{arrays.name(answer)}: {len(answer.behavior_logprobs)} bytes of behavior_logprobs "
            f"for {length} tokens; float32 each",
            "shape",
        )
    if answer.token_rewards and len(answer.token_rewards) != size:
        raise BadMessage(
            f"{arrays.name(answer)}: {len(answer.token_rewards)} bytes of token_rewards for "
            f"{length} tokens; float32, or none",
            "shape",
        )
    most = settings.sampling.max_new_tokens
    if length > most or (settings.context and length + prompt // 4 > settings.context):
        raise BadMessage(
            f"{arrays.name(answer)}: {length} tokens behind a prompt of {prompt // 4}; generator."
            f"max_new_tokens is {most}, generator.context {settings.context}",
            "length",
        )


def _spans(answer: Trajectory) -> None:
    """They tile the answer: no token is without a version, none has two."""
    at = 0
    for span in answer.spans:
        if span.start != at or span.end <= at:
            break
        at = span.end
    else:
        if at == len(answer.mask):
            return
    empty = len(answer.spans) == 1 and (answer.spans[0].start, answer.spans[0].end) == (0, 0)
    if answer.failed and not answer.mask and empty:
        return
    raise BadMessage(
        f"{arrays.name(answer)}: its spans are not its {len(answer.mask)} tokens in order", "shape"
    )


def _texts(answer: Trajectory, settings: StoreSettings) -> None:
    """What is only shown, or names something: of bounded length."""
    context = settings.context or ROWS
    if max(len(answer.text), len(answer.prompt_text)) > TEXT_PER_TOKEN * context + TEXT_MORE:
        raise BadMessage(
            f"{arrays.name(answer)}: texts of {len(answer.text)} and {len(answer.prompt_text)} "
            f"characters, of at most {context} tokens",
            "text",
        )
    parts = answer.reward_parts
    if len(parts) > NAMES or any(len(name) > NAME_LENGTH for name in parts):
        raise BadMessage(
            f"{arrays.name(answer)}: {len(parts)} parts of its reward, or a name of over "
            f"{NAME_LENGTH} characters; up to {NAMES}",
            "text",
        )
    if len(answer.group_key) > NAME_LENGTH or (
        answer.failed and len(answer.failed.why) > REASON_LENGTH
    ):
        raise BadMessage(f"{arrays.name(answer)}: a text without end", "text")
    if answer.failed and answer.failed.kind == "refused":
        raise BadMessage(f"{arrays.name(answer)}: it says that the buffer refused it", "text")
    length = len(answer.mask)
    if len(answer.segments) > length + 1 or not all(
        0 <= start <= end <= length and len(kind) <= NAME_LENGTH
        for kind, start, end in answer.segments
    ):
        raise BadMessage(
            f"{arrays.name(answer)}: its segments are not of its {length} tokens", "shape"
        )


def progress(store: Store, rows: list[tuple[int, int, int]]) -> None:
    """(ticket, attempt, tokens so far): no attempt has more tokens than its samples may have."""
    require(len(rows) <= ROWS, f"{len(rows)} tickets in one message; up to {ROWS}", "text")
    most = store.settings.group * store.settings.most_tokens
    for ticket, attempt, tokens in rows:
        if not 0 <= tokens <= most:
            raise BadMessage(
                f"ticket {ticket}, attempt {attempt}: {tokens} tokens so far, of at most {most}"
            )


def want(message: TicketRequest) -> None:
    require(
        0 <= message.samples <= WANTED,
        f"{message.producer[:40]!r} asks for {message.samples} samples",
    )


def renew(message: LeaseRenewal) -> None:
    """A generator's own numbers and its wait: finite, not negative, and its own."""
    require(
        len(message.stats) <= NAMES and len(message.judging) + len(message.written) <= ROWS,
        f"{message.producer} tells {len(message.stats)} numbers and "
        f"{len(message.judging) + len(message.written)} tickets",
        "text",
    )
    for name, value in message.stats.items():
        if not (0 <= value < math.inf and len(name) <= NAME_LENGTH):
            raise BadMessage(f"{message.producer}: {name[:40]!r} is {value}")
    check_token_count(message.drawn)
    sessions(message)
    wait = message.waiting
    if wait is None:
        return
    require(
        wait.who == message.producer and (wait.on == BUFFER or wait.is_internal),
        f"{message.producer} tells of the wait of {wait.who[:40]!r} for {wait.on[:40]!r}",
    )
    require(
        len(wait.what) <= TEXT_LENGTH and len(wait.on) <= TEXT_LENGTH,
        f"{message.producer}: a wait's text has up to {TEXT_LENGTH} characters, not "
        f"{len(wait.what)} and {len(wait.on)}",
    )
    require(
        math.isfinite(wait.seconds) and wait.seconds >= 0,
        f"{message.producer}: a wait of {wait.seconds} s, for {wait.what[:40]!r}",
    )


def sessions(message: LeaseRenewal) -> None:
    """A few open sessions: words of a line, numbers that are some."""
    require(
        len(message.sessions) <= NAMES,
        f"{message.producer} tells of {len(message.sessions)} sessions, more than {NAMES}",
    )
    for one in message.sessions:
        words = (one.name, one.task, one.what, one.limit)
        require(
            all(len(word) <= TEXT_LENGTH and word.isprintable() for word in words),
            f"{message.producer}: a session's words are printable, up to {TEXT_LENGTH} characters",
            "text",
        )
        numbers = (one.turn, one.seconds, one.open_s, one.ends_s)
        require(
            all(0 <= number < math.inf for number in numbers),
            f"{message.producer}: session {one.name[:40]!r} tells {numbers}",
        )


def check_token_count(tokens: int) -> None:
    require(0 <= tokens < 1 << 60, f"{tokens} tokens cannot have been drawn")


def hello(message: LearnerHello) -> None:
    """A learner's names are of its own epoch, its ring lies behind it, its totals are a ledger."""
    who = f"the learner of epoch {message.epoch}"
    require(
        message.epoch >= 1 and message.label.epoch == message.epoch and message.label.number >= 0,
        f"{who} says that it is at version {message.label}",
    )
    require(
        0 <= message.origin <= message.epoch,
        f"{who} says that it resumed from epoch {message.origin}",
    )
    require(message.max_lag >= 0, f"{who} has the limit {message.max_lag}")
    require(message.limit >= 0, f"{who} says that its limit stood at {message.limit}")
    require(
        0 <= message.vocabulary < 1 << 31, f"{who} has a model with {message.vocabulary} tokens"
    )
    require(
        0 <= message.next_ticket < TICKET_END
        and all(0 <= ticket < TICKET_END for ticket in message.trained_above),
        f"{who} goes on at ticket {message.next_ticket}",
    )
    behind = all(
        label.epoch == message.epoch and 0 <= label.number < message.label.number
        for label, _ in message.ring
    )
    require(
        behind,
        f"{who} at version {message.label} holds weights that are not of its past: "
        f"{', '.join(str(x) for x, _ in message.ring[:8])}",
    )
    try:
        require(
            set(message.ledger) <= set(DISPOSITIONS),
            f"{who} has a ledger with other lines than {', '.join(DISPOSITIONS)}",
        )
        Ledger.restore(message.ledger)
    except (KeyError, ValueError, OverflowError) as error:
        raise BadMessage(
            f"{who} has a ledger that does not read: {type(error).__name__} {error}"
        ) from error


def ask(store: Store, number: int) -> None:
    require(
        number < store.settings.steps,
        f"batch {number} is asked for; the last one of {store.settings.steps} is "
        f"{store.settings.steps - 1} "
        "(learner.steps)",
    )


def commit(store: Store, number: int, label: Label, unused: Sequence[tuple[int, int]] = ()) -> None:
    """A batch that is told to be trained: it is composed and complete, and its update has the name
    that follows.
    """
    require(
        label == (store.epoch, number + 1),
        f"the commit of batch {number} in epoch {store.epoch} makes version "
        f"{store.epoch}.{number + 1}, not {label}",
    )
    if number < store.committed:
        return
    at = number - store.base
    require(
        at < len(store.comps),
        f"batch {number} is committed and was not composed: known are batches up to "
        f"{store.base + len(store.comps) - 1}",
    )
    missing = [t for t in store.comps[at] if t not in store.alive or not store.alive[t].complete]
    samples = len(store.comps[at]) * store.settings.group
    fits = len(unused) in (0, samples) and all(
        0 <= x < 1 << 60 for counts in unused for x in counts
    )
    require(
        fits,
        f"batch {number} has {samples} samples; its commit counts unused tokens of {len(unused)}, "
        "or counts that cannot be",
    )
    require(
        not missing,
        f"batch {number} is committed and was never complete: ticket "
        f"{missing[0] if missing else ''} lacks samples",
    )


def goodbye(store: Store, number: int) -> None:
    """A learner that leaves has trained all there is."""
    done = f"{store.committed} of {store.settings.steps} batches are committed (learner.steps)"
    require(
        store.committed >= store.settings.steps, f"the learner leaves at version {number}; {done}"
    )
