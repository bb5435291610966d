"""Checks of messages: each function raises BadMessage for an invalid one.

They run before anything in the store is changed.  They check names and counts, which index the
store, versions, and the contents of samples: a sample whose arrays do not fit together would crash
the learner that trains on it, and in a durable run every learner after it.  Each refusal has a
reason, a key of REFUSALS, under which it is counted.
"""

import contextlib
from collections.abc import Sequence

from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import MOST_IMAGES, Blobs, check_blobs
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import (
    DISPOSITIONS,
    EVAL_BASE,
    AttemptTokens,
    Delivery,
    FromPeer,
    IntPair,
    LearnerHello,
    LearnerMessage,
    LearnerProgress,
    LeaseRenewal,
    ModelShape,
    SampleKey,
    TicketRequest,
    Trajectory,
)
from asyncrl.contract.outcomes import MOST_PARTS, MOST_ROWS, NAME_LENGTH
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BUFFER
from asyncrl.transport import arrays
from asyncrl.transport.arrays import cite
from asyncrl.transport.message_checks import require
from buffer.groups import Grant, StoreSettings
from buffer.ledger import Ledger
from buffer.state import StoreState

TEXT_LENGTH = 1000  # of a wait
TEXT_PER_TOKEN = 128  # characters: the longest tokens are runs of spaces
TEXT_MORE = 1 << 16  # further characters, for the template around a prompt
ROWS = 1 << 16  # tokens of a sample, if the context is unknown
NO_BLOBS: Blobs = {}
# the messages of a learner after its hello
FROM_WELCOMED = LearnerMessage | LearnerProgress


def has_state(message: FromPeer) -> bool:
    """Whether the sender has weights, tickets or a batch, which only a buffer can have given it."""
    if isinstance(message, TicketRequest):
        return message.holding is not None
    if isinstance(message, LeaseRenewal):
        return bool(message.progress or message.judging or message.written)
    if isinstance(message, Delivery):
        return bool(message.samples)
    return isinstance(message, FROM_WELCOMED)


def check_delivery(
    store: StoreState,
    samples: Sequence[Trajectory],
    model: ModelShape,
    blobs: Blobs = NO_BLOBS,
) -> tuple[Sequence[Trajectory], dict[SampleKey, BadMessage]]:
    """Check the samples of a delivery; return the samples to accept and the errors of refused ones.

    A sample with an invalid outcome (its reward, its parts, a text) is refused alone and accepted
    as failed. Outcomes come from a reward function, an environment or an agent; the sender works.
    An invalid ticket, version or array means that the sender itself is broken: that raises
    BadMessage, before anything is changed.

    model: unknown before the first learner's hello.
    blobs: the images of the delivery, digest -> blob."""

    def check_fully(samples: Sequence[Trajectory]) -> None:
        for sample in samples:
            check_images_known(store, sample, blobs)
            check_sample(store, sample)
            check_versions(store, sample)
        check_samples(samples, model, store.settings)

    check_images(blobs)
    with contextlib.suppress(BadMessage):
        check_fully(samples)
        return samples, {}
    checked, refused = [], {}
    for sample in samples:
        try:
            check_fully([sample])
        except BadMessage as error:
            sample = outcomes.make_failed_sample(sample, "data", str(error))
            check_fully([sample])
            sample = outcomes.make_failed_sample(sample, "refused", str(error))
            refused[sample.key] = error
        checked.append(sample)
    return checked, refused


def check_images(blobs: Blobs) -> None:
    """Check the images of a delivery: their digests, and that they can be decoded."""
    if not blobs:
        return
    require(len(blobs) <= MOST_IMAGES * MOST_PARTS, f"{len(blobs)} images in one message")
    from asyncrl.models import pictures  # imports numpy

    try:
        check_blobs(blobs)
        for blob in blobs.values():
            pictures.decode_pixels(blob)
    except ValueError as error:
        raise BadMessage(str(error), "image") from error


def check_images_known(store: StoreState, sample: Trajectory, blobs: Blobs) -> None:
    """Check that the images of a training sample are in the delivery or in the group."""
    if sample.failed or sample.ticket >= EVAL_BASE or not (names := sample.all_images):
        return
    group = store.find_group(sample.ticket)
    if group is not None and (missing := names - blobs.keys() - group.images.keys()):
        raise BadMessage(
            f"{cite(sample)}: its image {min(missing)[:40]} is neither in the delivery nor "
            "in its prompt",
            "image",
        )


def check_sample(store: StoreState, sample: Trajectory) -> None:
    """Check that ticket and attempt were granted and a learner announced the weights."""
    for span in sample.list_spans():
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
        if span.kv > label:
            raise BadMessage(
                f"ticket {sample.ticket}: weights {label} sampled tokens on keys and values of "
                f"{span.kv}, which is not an earlier version",
                "version",
            )
    if not 1 <= sample.attempt <= store.attempts:
        raise BadMessage(
            f"ticket {sample.ticket}: attempt {sample.attempt} was never granted; the last one is "
            f"{store.attempts}",
            "ticket",
        )
    if sample.ticket >= EVAL_BASE:
        leased = store.evaluations.leased_jobs.get(sample.attempt)
        counts = (len(plan.numbers) for plan in store.evaluations.plan.sets)
        is_possible = 0 <= sample.sample < max([1, *counts])
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
    # the earlier attempts of a resumed session
    attempts = [*(attempt for attempt, _ in sample.adopted), sample.attempt]
    if sample.adopted and (
        attempts != sorted(set(attempts))
        or any(tokens < 0 for _, tokens in sample.tokens_by_attempt)
    ):
        raise BadMessage(
            f"ticket {sample.ticket}, attempt {sample.attempt}: it claims to continue the attempts "
            f"{sample.adopted[:8]} (attempt, tokens), but has {sample.length + sample.aside} "
            "tokens in all",
            "ticket",
        )
    group = store.find_group(sample.ticket)
    for attempt in attempts:
        if group is not None and attempt not in group.attempts:
            raise BadMessage(
                f"ticket {sample.ticket}: attempt {attempt} is not one of its attempts", "ticket"
            )


def check_versions(store: StoreState, sample: Trajectory) -> None:
    """Check the versions of a sample against its ticket; call `sample` first.

    Each must be exactly the version that the ticket names, or its minimum or newer in the same
    epoch.  In a resumed session each span must fit one of the session's attempts.  An older version
    would evade the staleness limit, and a later epoch's version was never granted."""
    if sample.ticket >= EVAL_BASE:
        leased = store.evaluations.leased_jobs.get(sample.attempt)
        grants = {} if leased is None else {sample.attempt: Grant(leased.job.label, exact=True)}
    else:
        group = store.find_group(sample.ticket)
        grants = {} if group is None else group.grants
    grant = grants.get(sample.attempt)
    if grant is None:  # of a group that is gone, or in a journal of an older version
        return
    earlier = [grants[attempt] for attempt, _ in sample.adopted if attempt in grants]
    for span in sample.list_spans():
        label = span.label
        if not grant.permits(label) and not any(other.permits(label) for other in earlier):
            raise BadMessage(
                f"ticket {sample.ticket}, attempt {sample.attempt}: tokens were sampled with "
                f"weights {label}, but its ticket asked for {'exactly ' if grant.exact else ''}"
                f"{grant.label}{'' if grant.exact else ' or newer of its epoch'}",
                "limit",
            )


def check_samples(
    samples: Sequence[Trajectory], model: ModelShape, settings: StoreSettings
) -> None:
    """Check samples by themselves: lengths of arrays, finite numbers, token ids, config limits."""
    most_characters = TEXT_PER_TOKEN * (settings.context or ROWS) + TEXT_MORE
    for sample in samples:
        name = cite(sample)
        # the lengths of its arrays; its spans give each token one version, and only a failed sample
        # may be empty
        is_session = bool(settings.session_tokens)
        if not is_session and (sample.rows or sample.aside or sample.calls or sample.adopted):
            raise BadMessage(
                f"{name}: it is a session ({len(sample.rows) + 1} training sequences of "
                f"{sample.calls} calls), but the run has no [agent]",
                "shape",
            )
        is_empty = not sample.mask and not sample.rows
        length = sample.length if is_session else len(sample.mask)
        if len(sample.rows) >= MOST_ROWS or not (
            0 < length <= settings.most_tokens or (is_empty and sample.failed)
        ):
            key = "agent.max_tokens" if is_session else "generator.max_new_tokens"
            raise BadMessage(
                f"{name}: {len(sample.rows) + 1} training sequences with {length} tokens to train; "
                f"a sample has 1 to {settings.most_tokens} of these tokens ({key}) in at most "
                f"{MOST_ROWS} sequences",
                "length",
            )
        for number, row in enumerate(sample.list_rows()):
            row_name = f"{name}, training sequence {number}" if is_session else name
            arrays.check_row(row, row_name)
            size, prompt = len(row.mask), len(row.prompt_tokens) // 4
            if (settings.context and size + prompt > settings.context) or not (size or is_empty):
                raise BadMessage(
                    f"{row_name}: {size} tokens after a prompt of {prompt}; generator.context is "
                    f"{settings.context}, and there is at least one",
                    "length",
                )
            # of a completion every token has a version, of a session those of mask 1
            mask = row.mask if is_session else b"\1" * size
            covered = sum(mask.count(1, span.start, span.end) for span in row.spans)
            lengths = [span.end - span.start for span in row.spans]
            if not is_empty and (
                min(lengths, default=1) < 1 or not covered == sum(lengths) == mask.count(1)
            ):
                raise BadMessage(
                    f"{row_name}: its spans do not cover its {mask.count(1)} tokens of mask 1 in "
                    "order",
                    "shape",
                )
            if len(row.segments) > size + 1 or not all(
                0 <= start <= end <= size and len(kind) <= NAME_LENGTH
                for kind, start, end in row.segments
            ):
                raise BadMessage(
                    f"{row_name}: its segments do not lie within its {size} tokens", "shape"
                )
        arrays.check_scalars(sample)
        if max(len(sample.text), len(sample.prompt_text)) > most_characters:
            raise BadMessage(
                f"{name}: texts of {len(sample.text)} and {len(sample.prompt_text)} characters are "
                f"too long for at most {settings.context or ROWS} tokens",
                "text",
            )
        if sample.failed and sample.failed.kind == "refused":
            raise BadMessage(
                f"{name}: its failure has the kind `refused`, which only the buffer may set", "text"
            )
    arrays.check_numbers(samples, model)


def check_progress(store: StoreState, rows: list[AttemptTokens]) -> None:
    """Check (ticket, attempt, tokens so far) against the most tokens that an attempt may have."""
    most_tokens = store.settings.group * store.settings.most_tokens
    for ticket, attempt, tokens in rows:
        if tokens > most_tokens:
            raise BadMessage(
                f"ticket {ticket}, attempt {attempt}: {tokens} tokens so far; at most "
                f"{most_tokens} are possible"
            )


def check_renewal(message: LeaseRenewal) -> None:
    """Check that a wait is the sender's own, and that its sessions' texts are printable."""
    if (wait := message.waiting) is not None:
        require(
            wait.who == message.producer and (wait.on == BUFFER or wait.is_internal),
            f"{message.producer} reports a wait of {wait.who[:40]!r} for {wait.on[:40]!r}; it may "
            "report only its own",
        )
        require(
            max(len(wait.what), len(wait.on)) <= TEXT_LENGTH,
            f"{message.producer}: a wait's text has at most {TEXT_LENGTH} characters",
        )
    for session in message.sessions:
        texts = (session.name, session.task, session.what, session.limit)
        require(
            all(map(str.isprintable, texts)),
            f"{message.producer}: the texts of a session must be printable",
            "text",
        )


def check_hello(message: LearnerHello) -> None:
    """Check a learner's hello: labels of its epoch, a ring of earlier versions, a valid ledger."""
    learner = f"the learner of epoch {message.epoch}"
    require(message.label.epoch == message.epoch, f"{learner} cannot be at version {message.label}")
    require(
        message.origin <= message.epoch,
        f"{learner} cannot have resumed from epoch {message.origin}",
    )
    if message.routing is not None:
        require(
            message.routing.chosen <= message.routing.experts,
            f"{learner} cannot have a model of {message.routing}",
        )
    if message.images is not None:
        token, length = message.images
        require(
            token < (message.vocabulary or 1 << 31) and length < ROWS,
            f"{learner} cannot have a model that reads an image as {message.images}",
        )
    ring_is_older = all(
        label.epoch == message.epoch and label.number < message.label.number
        for label, _ in message.ring
    )
    require(
        ring_is_older,
        f"{learner} at version {message.label} has weights in its ring that are not earlier "
        f"versions of its epoch: {', '.join(str(label) for label, _ in message.ring[:8])}",
    )
    mixture = message.mixture
    for ledger in (message.ledger, *(mixture.ledgers.values() if mixture else ())):
        require(
            set(ledger) <= set(DISPOSITIONS),
            f"{learner} has a ledger with other lines than {', '.join(DISPOSITIONS)}",
        )
        try:
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
    store: StoreState, number: int, label: Label, unused: Sequence[IntPair] = ()
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
        len(unused) in (0, samples),
        f"batch {number} has {samples} samples; its commit has counts of unused tokens for "
        f"{len(unused)}",
    )
    require(
        not incomplete,
        f"batch {number} is committed but was never complete: ticket "
        f"{incomplete[0] if incomplete else ''} lacks samples",
    )
