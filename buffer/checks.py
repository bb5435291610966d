"""Checks of messages: each function raises BadMessage for an invalid one.

They run before anything in the store is changed.  They check names and counts, which index the
store, versions, and the contents of samples: a sample whose arrays do not fit together would crash
the learner that trains on it, and in a durable run every learner after it.  Each refusal has a
reason, a key of REFUSALS, under which it is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import MOST_IMAGES, ImageShape, check_blobs
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import (
    DISPOSITIONS,
    EVAL_BASE,
    BatchRequest,
    CheckpointNotice,
    Commit,
    Delivery,
    FromPeer,
    LearnerGoodbye,
    LearnerHello,
    LearnerProgress,
    LeaseRenewal,
    RoutingShape,
    TicketRequest,
    TrainingSequence,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.outcomes import MOST_PARTS, MOST_ROWS, NAME_LENGTH, REASON_LENGTH
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BUFFER
from asyncrl.transport import arrays
from buffer.groups import Grant, StoreSettings
from buffer.ledger import Key, Ledger
from buffer.state import StoreState

TEXT_LENGTH = 1000
TEXT_PER_TOKEN = 128  # characters: the longest tokens are runs of spaces
TEXT_MORE = 1 << 16  # further characters, for the template around a prompt
NAMES = MOST_PARTS  # limit of the parts of a reward and of the numbers of a generator
ROWS = 1 << 16  # longest list in one message
TICKET_END = 1 << 48
NO_BLOBS: Mapping[str, bytes] = {}
MOST_REQUESTED = 1 << 30  # samples: a generator in lockstep requests all samples


def require(is_valid: bool, text: str, reason: str = "message") -> None:
    """Raise BadMessage with this text and reason unless `is_valid`."""
    if not is_valid:
        raise BadMessage(text, reason)


def has_state(message: FromPeer) -> bool:
    """Whether the sender has weights, tickets or a batch, which only a buffer can have given it."""
    if isinstance(message, TicketRequest):
        return message.holding is not None
    if isinstance(message, LeaseRenewal):
        return bool(message.progress or message.judging or message.written)
    if isinstance(message, Delivery):
        return bool(message.samples)
    welcomed = BatchRequest | CheckpointNotice | Commit | LearnerGoodbye | LearnerProgress
    return isinstance(message, welcomed)


def check_producer(name: str) -> None:
    """Check a generator's name, which appears in logs and in the live view."""
    require(
        0 < len(name) <= NAME_LENGTH and name.isprintable(),
        f"a generator's name is printable and has 1 to {NAME_LENGTH} characters, not {name[:40]!r}",
    )


def check_delivery(
    store: StoreState,
    samples: Sequence[Trajectory],
    vocabulary: int,
    routing: RoutingShape | None = None,
    images: ImageShape | None = None,
    blobs: Mapping[str, bytes] = NO_BLOBS,
) -> tuple[Sequence[Trajectory], dict[Key, BadMessage]]:
    """Check the samples of a delivery; return the samples to accept and the errors of refused ones.

    A sample with an invalid outcome (its reward, its parts, a text) is refused alone and accepted
    as failed. Outcomes come from a reward function, an environment or an agent; the sender works.
    An invalid ticket, version or array means that the sender itself is broken: that raises
    BadMessage, before anything is changed.

    vocabulary: number of tokens of the model; 0 before the first learner's hello.
    routing: the routers whose experts each sample must have; None: no router.
    images: how the model reads images; None: it reads only text.
    blobs: the images of the delivery, digest -> blob."""
    check_images(blobs)
    try:
        _check_fully(store, samples, vocabulary, routing, images, blobs)
    except BadMessage:
        pass
    else:
        return samples, {}
    checked, refused = [], {}
    for sample in samples:
        try:
            _check_fully(store, [sample], vocabulary, routing, images, blobs)
        except BadMessage as error:
            sample = outcomes.make_failed_sample(sample, "data", str(error))
            _check_fully(store, [sample], vocabulary, routing, images, blobs)
            sample = outcomes.make_failed_sample(sample, "refused", str(error))
            refused[sample.ticket, sample.sample, sample.attempt] = error
        checked.append(sample)
    return checked, refused


def _check_fully(
    store: StoreState,
    samples: Sequence[Trajectory],
    vocabulary: int,
    routing: RoutingShape | None,
    images: ImageShape | None,
    blobs: Mapping[str, bytes],
) -> None:
    """Apply `check_sample`, `check_versions`, `check_images_known` and `check_samples` to all.

    `are_plain_samples` checks the same in one fast pass and accepts nearly all deliveries. If it
    does not, the complete functions check every sample and report the error."""
    check_images_known(store, samples, blobs)
    if are_plain_samples(store, samples):
        arrays.check_numbers(samples, vocabulary, routing, images)
        return
    for sample in samples:
        check_sample(store, sample)
        check_versions(store, sample)
    check_samples(samples, vocabulary, store.settings, routing, images)


def check_images(blobs: Mapping[str, bytes]) -> None:
    """Check the images of a delivery: their digests, and that they can be decoded."""
    if not blobs:
        return
    require(len(blobs) <= MOST_IMAGES * NAMES, f"{len(blobs)} images in one message")
    from asyncrl.models.vision import pictures  # imports numpy

    try:
        check_blobs(blobs)
        for blob in blobs.values():
            pictures.decode_pixels(blob)
    except ValueError as error:
        raise BadMessage(str(error), "image") from error


def check_images_known(
    store: StoreState, samples: Sequence[Trajectory], blobs: Mapping[str, bytes]
) -> None:
    """Check that the images of training samples are in the delivery or in the group."""
    for sample in samples:
        if sample.failed or sample.ticket >= EVAL_BASE or not sample.all_images:
            continue
        group = store.alive.get(sample.ticket) or store.retained.get(sample.ticket)
        if group is None:
            continue
        if missing := sample.all_images - blobs.keys() - group.images.keys():
            raise BadMessage(
                f"{arrays.cite(sample)}: its image {min(missing)[:40]} is neither in the delivery "
                "nor in its prompt",
                "image",
            )


def are_plain_samples(store: StoreState, samples: Sequence[Trajectory]) -> bool:
    """Whether the other checks would accept all samples, and all are ordinary completions.

    The other checks are `check_sample`, `check_versions` and `check_samples` without the numbers in
    the arrays.  False does not mean that a sample is invalid."""
    limits = store.settings
    most_tokens, context = limits.sampling.max_new_tokens, limits.context or math.inf
    most_text = TEXT_PER_TOKEN * (limits.context or ROWS) + TEXT_MORE
    alive, retained = store.alive, store.retained
    if limits.session_tokens:
        return False
    registered: set[tuple[Label, str, Label]] = set()
    for sample in samples:
        group = alive.get(sample.ticket) or retained.get(sample.ticket)
        if (
            group is None  # a group that exists proves that its tickets and attempts were granted
            or sample.attempt not in group.attempts
            or sample.ticket >= EVAL_BASE
            or not 0 <= sample.sample < limits.group
            or sample.adopted
            or sample.rows
            or sample.aside
            or sample.calls
            or sample.failed
        ):
            return False
        length, size, prompt = len(sample.mask), len(sample.tokens), len(sample.prompt_tokens)
        if not (
            0 < length <= most_tokens
            and size == 4 * length == len(sample.behavior_logprobs)
            and not prompt % 4
            and length + prompt // 4 <= context
            and len(sample.token_rewards) in (0, size)
            and len(sample.text) <= most_text
            and len(sample.prompt_text) <= most_text
            and len(sample.group_key) <= NAME_LENGTH
            and _has_plain_numbers(sample)
            and _has_plain_segments(sample.segments, length)
        ):
            return False
        grant = group.grants.get(sample.attempt)  # None in journals of older versions
        end = 0
        for span in sample.spans:
            label = span.label
            if (
                span.start != end
                or span.end <= end
                or not (grant is None or is_granted(grant, label))
            ):
                return False
            end = span.end
            weights = (label, span.digest, span.kv)
            if weights not in registered:
                if not _is_known_version(store, span):
                    return False
                registered.add(weights)
        if end != length:
            return False
    return True


def _has_plain_numbers(sample: Trajectory) -> bool:
    """Whether `arrays.check_scalars` and `_check_texts` accept the numbers and the part names."""
    if not (
        -arrays.REWARD <= sample.reward <= arrays.REWARD  # false for NaN too
        and 0 < sample.temperature < math.inf
        and -math.inf < sample.generated_at < math.inf
        and len(sample.reward_parts) <= NAMES
    ):
        return False
    for part, value in sample.reward_parts.items():
        if len(part) > NAME_LENGTH or not -arrays.REWARD <= value <= arrays.REWARD:
            return False
    return True


def _has_plain_segments(segments: list[tuple[str, int, int]], length: int) -> bool:
    """Whether the segments lie within the tokens, as `_check_texts` requires."""
    for kind, start, end in segments:
        if not 0 <= start <= end <= length or len(kind) > NAME_LENGTH:
            return False
    return len(segments) <= length + 1


def _is_known_version(store: StoreState, span: VersionSpan) -> bool:
    """Whether `_check_registered` accepts the span."""
    label = span.label
    return (
        label in store.tree
        and (not span.digest or span.digest == store.tree.get_digest(label))
        and (span.kv == label or (span.kv.epoch >= 0 <= span.kv.number and span.kv <= label))
    )


def check_sample(store: StoreState, sample: Trajectory) -> None:
    """Check that ticket and attempt were granted and a learner announced the weights."""
    for span in sample.list_spans():
        _check_registered(store, sample, span)
    if not 1 <= sample.attempt <= store.attempts:
        raise BadMessage(
            f"ticket {sample.ticket}: attempt {sample.attempt} was never granted; the last one is "
            f"{store.attempts}",
            "ticket",
        )
    if sample.ticket >= EVAL_BASE:
        leased = store.evaluations.leased_jobs.get(sample.attempt)
        is_possible = 0 <= sample.sample < store.evaluations.plan.most_samples
        granted = None if leased is None else (leased.job.ticket, leased.job.sample)
        if not is_possible or granted not in (None, (sample.ticket, sample.sample)):
            raise BadMessage(
                f"attempt {sample.attempt} does not belong to evaluation ticket {sample.ticket}, "
                f"sample {sample.sample}",
                "ticket",
            )
        return
    if not 0 <= sample.sample < store.settings.group:
        raise BadMessage(
            f"ticket {sample.ticket}: sample {sample.sample}, but its group has "
            f"{store.settings.group} samples, numbered from 0",
            "ticket",
        )
    if not 0 <= sample.ticket < store.cursor:
        raise BadMessage(
            f"ticket {sample.ticket} was never granted; the next one is {store.cursor}", "ticket"
        )
    _check_adopted_attempts(sample)
    group = store.alive.get(sample.ticket) or store.retained.get(sample.ticket)
    for attempt in (sample.attempt, *(attempt for attempt, _ in sample.adopted)):
        if group is not None and attempt not in group.attempts:
            raise BadMessage(
                f"ticket {sample.ticket}: attempt {attempt} is not one of its attempts", "ticket"
            )


def _check_adopted_attempts(sample: Trajectory) -> None:
    """Check the earlier attempts of a resumed session.

    They must precede its attempt, appear once each, and have no more tokens than the session."""
    attempts = [*(attempt for attempt, _ in sample.adopted), sample.attempt]
    is_ascending = all(earlier < later for earlier, later in itertools.pairwise(attempts))
    if not is_ascending or any(tokens < 0 for _, tokens in sample.tokens_by_attempt):
        raise BadMessage(
            f"ticket {sample.ticket}, attempt {sample.attempt}: it claims to continue the attempts "
            f"{sample.adopted[:8]} (attempt, tokens), but has {sample.length + sample.aside} "
            "tokens in all",
            "ticket",
        )


def _check_registered(store: StoreState, sample: Trajectory, span: VersionSpan) -> None:
    """Check that a learner announced the span's weights, and its keys and values are not newer."""
    label = span.label
    if label not in store.tree:
        raise BadMessage(
            f"ticket {sample.ticket}: tokens were sampled with weights {label} (digest "
            f"{span.digest[:40]}), but no learner has announced them; the newest known are "
            f"{store.policy}: stop the generator that runs other weights",
            "version",
        )
    if span.digest and span.digest != (learner_digest := store.tree.get_digest(label)):
        raise BadMessage(
            f"ticket {sample.ticket}: weights {label} have digest {span.digest[:40]} at the "
            f"generator and {learner_digest} at the learner",
            "version",
        )
    if span.kv != label and not (span.kv.epoch >= 0 and span.kv.number >= 0 and span.kv <= label):
        raise BadMessage(
            f"ticket {sample.ticket}: weights {label} sampled tokens on keys and values of "
            f"{span.kv}, which is not an earlier version",
            "version",
        )


def check_versions(store: StoreState, sample: Trajectory) -> None:
    """Check the versions of a sample against its ticket; call `sample` first.

    Each must be exactly the version that the ticket names, or its minimum or newer in the same
    epoch.  In a resumed session each span must fit one of the session's attempts.  An older version
    would evade the staleness limit, and a later epoch's version was never granted."""
    if sample.ticket >= EVAL_BASE:
        group = None
        leased = store.evaluations.leased_jobs.get(sample.attempt)
        grant = None if leased is None else Grant(leased.job.label, exact=True)
    else:
        group = store.alive.get(sample.ticket) or store.retained.get(sample.ticket)
        # None in journals of older versions
        grant = None if group is None else group.grants.get(sample.attempt)
    if grant is None:
        return
    earlier_grants = [
        earlier
        for attempt, _ in sample.adopted
        if group is not None and (earlier := group.grants.get(attempt)) is not None
    ]
    for span in sample.list_spans():
        label = span.label
        if not any(is_granted(permitted, label) for permitted in (grant, *earlier_grants)):
            raise BadMessage(
                f"ticket {sample.ticket}, attempt {sample.attempt}: tokens were sampled with "
                f"weights {label}, but its ticket asked for {'exactly ' if grant.exact else ''}"
                f"{grant.label}{'' if grant.exact else ' or newer of its epoch'}",
                "limit",
            )


def is_granted(grant: Grant, label: Label) -> bool:
    """Whether this version may sample under the grant."""
    if grant.exact:
        return label == grant.label
    return label.epoch == grant.label.epoch and label.number >= grant.label.number


def check_samples(
    samples: Sequence[Trajectory],
    vocabulary: int,
    settings: StoreSettings,
    routing: RoutingShape | None = None,
    images: ImageShape | None = None,
) -> None:
    """Check samples by themselves: lengths of arrays, finite numbers, token ids, config limits.

    vocabulary, routing, images: see `check_delivery`."""
    for sample in samples:
        if settings.session_tokens:
            _check_session(sample, settings)
        else:
            _check_single(sample)
            _check_lengths(sample, settings)
            _check_spans(sample)
        arrays.check_scalars(sample)
        _check_texts(sample, settings)
    arrays.check_numbers(samples, vocabulary, routing, images)


def _check_single(sample: Trajectory) -> None:
    if sample.rows or sample.aside or sample.calls or sample.adopted:
        raise BadMessage(
            f"{arrays.cite(sample)}: it is a session ({len(sample.rows) + 1} training sequences of "
            f"{sample.calls} calls), but the run has no [agent]",
            "shape",
        )


def _check_session(sample: Trajectory, settings: StoreSettings) -> None:
    """Check a session: arrays of one length per training sequence, spans that match its mask.

    A failed session may be empty."""
    check_token_count(sample.aside)
    check_token_count(sample.calls)
    if sample.failed and not sample.mask and not sample.rows:
        _check_lengths(sample, settings)
        return
    most_tokens = settings.session_tokens
    if len(sample.rows) >= MOST_ROWS or not 0 < sample.length <= most_tokens:
        raise BadMessage(
            f"{arrays.cite(sample)}: {len(sample.rows) + 1} training sequences with "
            f"{sample.length} tokens to train; a session has 1 to {most_tokens} of these tokens "
            f"(agent.max_tokens) in at most {MOST_ROWS} sequences",
            "length",
        )
    for number, row in enumerate(arrays.list_sequences(sample)):
        sequence_name = f"{arrays.cite(sample)}, training sequence {number}"
        length = len(row.mask)
        prompt = len(row.prompt_tokens)
        sizes = {len(row.tokens), len(row.behavior_logprobs), 4 * length}
        if len(sizes) > 1 or not length or prompt % 4 or len(row.token_rewards) % (4 * length):
            raise BadMessage(
                f"{sequence_name}: {len(row.tokens)} bytes of tokens and "
                f"{len(row.behavior_logprobs)} of behavior_logprobs for {length} mask bytes, "
                f"{prompt} of its prompt; each token "
                "takes 4 bytes, and there is at least one",
                "shape",
            )
        if settings.context and length + prompt // 4 > settings.context:
            raise BadMessage(
                f"{sequence_name}: {length + prompt // 4} tokens; generator.context is "
                f"{settings.context}",
                "length",
            )
        _check_cover(row, sequence_name)


def _check_cover(row: Trajectory | TrainingSequence, name: str) -> None:
    """Check that the spans of a sequence are in order and cover exactly its tokens of mask 1."""
    previous_end = 0
    for span in row.spans:
        if not previous_end <= span.start < span.end <= len(row.mask):
            break
        if row.mask.count(1, span.start, span.end) != span.end - span.start:
            break
        previous_end = span.end
    else:
        is_inside = all(0 <= start <= end <= len(row.mask) for _, start, end in row.segments)
        covered = sum(span.end - span.start for span in row.spans)
        if is_inside and covered == row.mask.count(1):
            return
    raise BadMessage(
        f"{name}: its spans do not cover its {row.mask.count(1)} tokens of mask 1 in order",
        "shape",
    )


def _check_lengths(sample: Trajectory, settings: StoreSettings) -> None:
    """Check the lengths of a completion's arrays; only a failed completion may be empty."""
    length = len(sample.mask)
    size = len(sample.tokens)
    prompt = len(sample.prompt_tokens)
    if size != 4 * length or prompt % 4 or not (length or sample.failed):
        raise BadMessage(
            f"{arrays.cite(sample)}: {size} bytes of tokens for {length} mask bytes, {prompt} of "
            "its prompt; tokens are int32, and there is at least one",
            "shape",
        )
    if len(sample.behavior_logprobs) != size:
        raise BadMessage(
            f"{arrays.cite(sample)}: {len(sample.behavior_logprobs)} bytes of behavior_logprobs "
            f"for {length} tokens; float32 each",
            "shape",
        )
    if sample.token_rewards and len(sample.token_rewards) != size:
        raise BadMessage(
            f"{arrays.cite(sample)}: {len(sample.token_rewards)} bytes of token_rewards for "
            f"{length} tokens; float32, or none",
            "shape",
        )
    most_tokens = settings.sampling.max_new_tokens
    if length > most_tokens or (settings.context and length + prompt // 4 > settings.context):
        raise BadMessage(
            f"{arrays.cite(sample)}: {length} tokens after a prompt of {prompt // 4}; "
            f"generator.max_new_tokens is {most_tokens}, generator.context {settings.context}",
            "length",
        )


def _check_spans(sample: Trajectory) -> None:
    """Check that the spans give each token of a completion exactly one version."""
    previous_end = 0
    for span in sample.spans:
        if span.start != previous_end or span.end <= previous_end:
            break
        previous_end = span.end
    else:
        if previous_end == len(sample.mask):
            return
    is_empty = len(sample.spans) == 1 and (sample.spans[0].start, sample.spans[0].end) == (0, 0)
    if sample.failed and not sample.mask and is_empty:
        return
    raise BadMessage(
        f"{arrays.cite(sample)}: its spans do not cover its {len(sample.mask)} tokens in order",
        "shape",
    )


def _check_texts(sample: Trajectory, settings: StoreSettings) -> None:
    """Check the lengths of texts and names, and that the segments lie within the tokens."""
    context = settings.context or ROWS
    if max(len(sample.text), len(sample.prompt_text)) > TEXT_PER_TOKEN * context + TEXT_MORE:
        raise BadMessage(
            f"{arrays.cite(sample)}: texts of {len(sample.text)} and {len(sample.prompt_text)} "
            f"characters are too long for at most {context} tokens",
            "text",
        )
    parts = sample.reward_parts
    if len(parts) > NAMES or any(len(name) > NAME_LENGTH for name in parts):
        raise BadMessage(
            f"{arrays.cite(sample)}: its reward has {len(parts)} parts (at most {NAMES} are "
            f"allowed), or the name of one has more than {NAME_LENGTH} characters",
            "text",
        )
    if len(sample.group_key) > NAME_LENGTH or (
        sample.failed and len(sample.failed.why) > REASON_LENGTH
    ):
        raise BadMessage(
            f"{arrays.cite(sample)}: its group_key or the reason of its failure is too long",
            "text",
        )
    if sample.failed and sample.failed.kind == "refused":
        raise BadMessage(
            f"{arrays.cite(sample)}: its failure has the kind `refused`, which only the buffer may "
            "set",
            "text",
        )
    length = len(sample.mask)
    if len(sample.segments) > length + 1 or not all(
        0 <= start <= end <= length and len(kind) <= NAME_LENGTH
        for kind, start, end in sample.segments
    ):
        raise BadMessage(
            f"{arrays.cite(sample)}: its segments do not lie within its {length} tokens",
            "shape",
        )


def check_progress(store: StoreState, rows: list[tuple[int, int, int]]) -> None:
    """Check (ticket, attempt, tokens so far) against the most tokens that an attempt may have."""
    require(len(rows) <= ROWS, f"{len(rows)} tickets in one message; at most {ROWS}", "text")
    most_tokens = store.settings.group * store.settings.most_tokens
    for ticket, attempt, tokens in rows:
        if not 0 <= tokens <= most_tokens:
            raise BadMessage(
                f"ticket {ticket}, attempt {attempt}: {tokens} tokens so far; at most "
                f"{most_tokens} are possible"
            )


def check_ticket_request(message: TicketRequest) -> None:
    """Check the number of requested samples."""
    require(
        0 <= message.samples <= MOST_REQUESTED,
        f"{message.producer[:40]!r} asks for {message.samples} samples; 0 to {MOST_REQUESTED} are "
        "possible",
    )


def check_renewal(message: LeaseRenewal) -> None:
    """Check a generator's numbers and its wait: finite, not negative, and of itself."""
    require(
        len(message.stats) <= NAMES and len(message.judging) + len(message.written) <= ROWS,
        f"{message.producer} sends {len(message.stats)} numbers (at most {NAMES}) and "
        f"{len(message.judging) + len(message.written)} tickets (at most {ROWS})",
        "text",
    )
    for name, value in message.stats.items():
        if not (0 <= value < math.inf and len(name) <= NAME_LENGTH):
            raise BadMessage(f"{message.producer}: {name[:40]!r} is {value}")
    check_token_count(message.drawn)
    check_sessions(message)
    wait = message.waiting
    if wait is None:
        return
    require(
        wait.who == message.producer and (wait.on == BUFFER or wait.is_internal),
        f"{message.producer} reports a wait of {wait.who[:40]!r} for {wait.on[:40]!r}; it may "
        "report only its own",
    )
    require(
        len(wait.what) <= TEXT_LENGTH and len(wait.on) <= TEXT_LENGTH,
        f"{message.producer}: a wait's text has at most {TEXT_LENGTH} characters, not "
        f"{len(wait.what)} and {len(wait.on)}",
    )
    require(
        math.isfinite(wait.seconds) and wait.seconds >= 0,
        f"{message.producer}: a wait of {wait.seconds} s for {wait.what[:40]!r}",
    )


def check_sessions(message: LeaseRenewal) -> None:
    """Check the open sessions of a renewal: their number, printable texts, finite numbers."""
    require(
        len(message.sessions) <= NAMES,
        f"{message.producer} reports {len(message.sessions)} sessions; at most {NAMES} are allowed",
    )
    for session in message.sessions:
        texts = (session.name, session.task, session.what, session.limit)
        require(
            all(len(text) <= TEXT_LENGTH and text.isprintable() for text in texts),
            f"{message.producer}: a session's texts are printable and have at most {TEXT_LENGTH} "
            "characters",
            "text",
        )
        numbers = (session.turn, session.seconds, session.open_s, session.ends_s)
        require(
            all(0 <= number < math.inf for number in numbers),
            f"{message.producer}: session {session.name[:40]!r} has the numbers {numbers}; they "
            "must be finite and not negative",
        )


def check_token_count(tokens: int) -> None:
    """Check a count of tokens."""
    require(0 <= tokens < 1 << 60, f"{tokens} tokens cannot have been sampled")


def check_hello(message: LearnerHello) -> None:
    """Check a learner's hello: labels of its epoch, a ring of earlier versions, a valid ledger."""
    learner = f"the learner of epoch {message.epoch}"
    require(
        message.epoch >= 1 and message.label.epoch == message.epoch and message.label.number >= 0,
        f"{learner} cannot be at version {message.label}",
    )
    require(
        0 <= message.origin <= message.epoch,
        f"{learner} cannot have resumed from epoch {message.origin}",
    )
    require(message.max_lag >= 0, f"{learner} cannot have the limit {message.max_lag}")
    require(message.limit >= 0, f"{learner} cannot have the adaptive limit {message.limit}")
    require(
        0 <= message.vocabulary < 1 << 31,
        f"{learner} cannot have a model with {message.vocabulary} tokens",
    )
    if message.routing is not None:
        layers, experts, per_token = message.routing
        require(
            layers > 0 and 0 < per_token <= experts < 1 << 16,
            f"{learner} cannot have a model of {message.routing}",
        )
    if message.images is not None:
        token, length = message.images
        require(
            0 <= token < (message.vocabulary or 1 << 31) and 0 < length < ROWS,
            f"{learner} cannot have a model that reads an image as {message.images}",
        )
    require(
        0 <= message.next_ticket < TICKET_END
        and all(0 <= ticket < TICKET_END for ticket in message.trained_above),
        f"{learner} cannot continue at ticket {message.next_ticket}",
    )
    ring_is_older = all(
        label.epoch == message.epoch and 0 <= label.number < message.label.number
        for label, _ in message.ring
    )
    require(
        ring_is_older,
        f"{learner} at version {message.label} has weights in its ring that are not earlier "
        f"versions of its epoch: {', '.join(str(label) for label, _ in message.ring[:8])}",
    )
    mixture = message.mixture
    if mixture is not None:
        require(
            all(map(math.isfinite, mixture.credit.values()))
            and all(index >= 0 for index in mixture.indices.values())
            and all(index >= -1 for _, index in mixture.due)
            and all(count >= 0 for count in mixture.removed.values()),
            f"{learner} has an invalid position in its mixture of tasks",
        )
    try:
        for ledger in (message.ledger, *(mixture.ledgers.values() if mixture else ())):
            require(
                set(ledger) <= set(DISPOSITIONS),
                f"{learner} has a ledger with other lines than {', '.join(DISPOSITIONS)}",
            )
            Ledger.restore(ledger)
    except (KeyError, ValueError, OverflowError) as error:
        raise BadMessage(
            f"{learner} has an invalid ledger: {type(error).__name__} {error}"
        ) from error


def check_batch_request(store: StoreState, number: int) -> None:
    """Check that the run has batch `number`."""
    require(
        number < store.settings.steps,
        f"batch {number} was requested; the last of {store.settings.steps} batches is "
        f"{store.settings.steps - 1} (learner.steps)",
    )


def check_commit(
    store: StoreState, number: int, label: Label, unused: Sequence[tuple[int, int]] = ()
) -> None:
    """Check a commit: the batch is composed and complete, and the new label is the next one."""
    require(
        label == (store.epoch, number + 1),
        f"the commit of batch {number} in epoch {store.epoch} makes version "
        f"{store.epoch}.{number + 1}, not {label}",
    )
    if number < store.committed:
        return
    position = number - store.base
    require(
        position < len(store.comps),
        f"batch {number} is committed but was not composed; the last composed batch is "
        f"{store.base + len(store.comps) - 1}",
    )
    tickets = store.comps[position]
    incomplete = [
        ticket
        for ticket in tickets
        if ticket not in store.alive or not store.alive[ticket].is_complete
    ]
    samples = len(tickets) * store.settings.group
    require(
        len(unused) in (0, samples)
        and all(0 <= tokens < 1 << 60 for counts in unused for tokens in counts),
        f"batch {number} has {samples} samples; its commit has counts of unused tokens for "
        f"{len(unused)}, or impossible counts",
    )
    require(
        not incomplete,
        f"batch {number} is committed but was never complete: ticket "
        f"{incomplete[0] if incomplete else ''} lacks samples",
    )


def check_goodbye(store: StoreState, number: int) -> None:
    """Check that a learner which leaves has trained all batches."""
    require(
        store.committed >= store.settings.steps,
        f"the learner leaves at version {number}, but only {store.committed} of "
        f"{store.settings.steps} batches are committed (learner.steps)",
    )
