"""Check the contents of a server's messages on behalf of their receivers.

Receivers are learner, generator, gateway and live view.

`check` raises BadMessage for impossible contents before the receiver acts on them. A batch with
inconsistent arrays would otherwise end the learner in its step, a call beyond the context its
generator in the engine. The receiver itself checks whether a message is for this process and of
this epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncrl.contract import messages as m
from asyncrl.contract.blobs.images import MOST_IMAGES, ImageShape, by_digest, check_blobs
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.versions import Label
from asyncrl.transport.ring import Rows

LIST = 1 << 20  # entries of a list in one message
TEXT = 1 << 16  # characters of informative text
PATH = 4096
COUNT = 1 << 60
WEIGHTS_BYTES = 1 << 46
PROBE_BYTES = 1 << 20
# dtypes of weights and their bytes per number
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int8": 1}
DTYPES |= {"int16": 2, "int32": 4, "int64": 8, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


def require(ok: bool, reason: str) -> None:
    if not ok:
        raise BadMessage(reason)


def check(
    message: object,
    *,
    vocabulary: int = 0,
    routing: m.RoutingShape | None = None,
    images: ImageShape | None = None,
) -> None:
    """Check a message.

    vocabulary: tokens of the reader's model; 0: unknown.
    routing: the routers whose experts samples must carry; None: none must.
    images: how the reader's model reads images; None: it reads only text.

    Raises BadMessage.
    """
    if isinstance(message, m.Batch):
        _batch(message, vocabulary, routing, images)
    elif isinstance(message, m.TicketGrant):
        _tickets(message)
        _announcement(message.announcement)
    elif isinstance(message, m.DeliveryAcks):
        require(0 <= message.credit < COUNT, f"a credit of {message.credit} bytes")
        _announcement(message.announcement)
    elif isinstance(message, m.HeartbeatReply):
        _announcement(message.announcement)
    elif isinstance(message, m.CallAssignments):  # each of its calls: `call`
        require(len(message.calls) <= LIST, f"{len(message.calls)} calls")
        _images(message.images, "calls")
        _announcement(message.announcement)
    elif isinstance(message, m.Welcome):
        require(
            0 <= message.checkpointed < COUNT,
            f"a checkpointed version of {message.checkpointed}",
        )
    elif isinstance(message, m.CommitReply):
        _labels(message.keep, "weights to keep")
    elif isinstance(message, m.RunStatus):
        _status(message)
    elif isinstance(message, m.Refusal):
        require(len(message.reason) <= TEXT, f"a refusal of {len(message.reason)} characters")
        require(0 <= message.exit_code < 256, f"an exit code of {message.exit_code}")


def _labels(labels: Sequence[Label], what: str) -> None:
    require(len(labels) <= LIST, f"{len(labels)} {what}")
    for label in labels:
        require(0 <= label.epoch < COUNT and 0 <= label.number < COUNT, f"{what}: {label}")


def _announcement(announcement: m.PolicyAnnouncement | None) -> None:
    if announcement is None:
        return
    _labels([announcement.label], "an announcement")
    source = announcement.source
    texts = (announcement.digest, source.host, source.directory, source.address)
    require(
        all(len(text) <= PATH and "\0" not in text for text in texts) and 0 <= source.epoch < COUNT,
        f"weights {announcement.label} in epoch {source.epoch}, at {source.address[:80]!r} or in "
        f"{source.directory[:80]!r}",
    )


def _sampling(given: m.SamplingSettings, what: str) -> None:
    require(
        0 < given.temperature < math.inf  # false for NaN too
        and 0 < given.top_p <= 1
        and 0 <= given.top_k < 1 << 31
        and 1 <= given.max_new_tokens < 1 << 31,
        f"{what}: {given}",
    )


def _tickets(message: m.TicketGrant) -> None:
    require(len(message.tickets) <= LIST, f"{len(message.tickets)} tickets")
    for ticket in message.tickets:
        what = f"ticket {ticket.ticket}, attempt {ticket.attempt}"
        require(0 <= ticket.ticket < COUNT and 1 <= ticket.attempt < COUNT, what)
        require(
            0 < len(ticket.samples) <= LIST
            and min(ticket.samples) >= 0
            and len(set(ticket.samples)) == len(ticket.samples),
            f"{what}: samples {ticket.samples[:8]}",
        )
        _sampling(ticket.sampling, what)
        require(
            len(ticket.prompt.images) <= MOST_IMAGES, f"{what}: {len(ticket.prompt.images)} images"
        )
        _images(by_digest(ticket.prompt.images), what)
        exact = ticket.exact_version
        _labels([ticket.min_version, *([] if exact is None else [exact])], f"{what}: versions")
        require(
            exact is None or exact.epoch <= ticket.min_version.epoch, f"{what}: exactly {exact}"
        )


def call(call: m.GenerationCall, vocabulary: int, context: int) -> None:
    """Check one call, for a generator whose engine holds `context` tokens per row.

    An invalid call is answered by a failure; the other calls of its message run. Raises BadMessage.
    """
    what = f"call {call.id} of ticket {call.ticket}"
    _sampling(call.sampling, what)
    length = len(call.prompt) // 4
    require(bool(length) and len(call.prompt) == 4 * length, f"{what}: {len(call.prompt)} bytes")
    require(
        call.max_new_tokens >= 1 and (not context or length + call.max_new_tokens <= context),
        f"{what}: {call.max_new_tokens} tokens behind {length}, in a context of {context}",
    )
    exact = call.exact_version
    _labels([call.min_version, *([] if exact is None else [exact])], f"{what}: versions")
    require(
        0 <= call.sample < COUNT and 0 <= call.stream < 1 << 64,
        f"{what}: sample {call.sample}, stream {call.stream}",
    )
    require(
        len(call.grammar) <= m.MOST_GRAMMAR,
        f"{what}: a grammar of {len(call.grammar)} characters",
    )
    ids = memoryview(call.prompt).cast("i")
    require(
        min(ids) >= 0 and (not vocabulary or max(ids) < vocabulary),
        f"{what}: tokens from {min(ids)} to {max(ids)}, of a model with {vocabulary}",
    )


def call_images(
    call: m.GenerationCall, blobs: Mapping[str, bytes], images: ImageShape | None
) -> None:
    """Check that a call has the images of its image tokens, in the generator.

    blobs: digest -> blob, of all calls of the message.  images: how the model reads images."""
    ids = memoryview(call.prompt).cast("i").tolist()
    tokens = 0 if images is None else ids.count(images.token)
    length = 0 if images is None else images.length
    require(
        tokens == length * len(call.images) and (images is not None or not call.images),
        f"call {call.id}: {tokens} image tokens for {len(call.images)} images",
    )
    require(blobs.keys() >= set(call.images), f"call {call.id}: an image is not in the message")


def check_call_result(
    message: m.CallResult,
    call: m.GenerationCall,
    vocabulary: int = 0,
    routing: m.RoutingShape | None = None,
    images: ImageShape | None = None,
) -> None:
    """Check a generator's result against its call, in the gateway."""
    what = f"call {call.id}"
    length = len(message.tokens) // 4
    require(
        len(message.failed) <= TEXT and not (length and message.failed),
        f"{what}: {length} tokens, and a failure of {len(message.failed)} characters",
    )
    require(
        len(message.tokens) == len(message.logprobs) == 4 * length,
        f"{what}: {len(message.tokens)} bytes of tokens, {len(message.logprobs)} of logprobs",
    )
    require(
        length <= call.max_new_tokens and 0 <= message.lost <= call.max_new_tokens,
        f"{what}: {length} tokens and {message.lost} lost; it may have {call.max_new_tokens}",
    )
    edges = [0] + [span.end for span in message.spans]
    require(
        edges[:-1] == [span.start for span in message.spans]
        and edges[-1] == length
        and edges == sorted(set(edges)),
        f"{what}: its spans are not its {length} tokens in order",
    )
    _labels([label for x in message.spans for label in (x.label, x.kv)], f"{what}: versions")
    require(
        all(x.label.epoch == call.min_version.epoch for x in message.spans)
        or call.exact_version is not None,
        f"{what}: tokens of another epoch than {call.min_version.epoch}",
    )
    require(
        length > 0 or not (message.support or message.routed),
        f"{what}: a support or experts without tokens",
    )
    if length:
        from asyncrl.transport import arrays

        sequence = m.TrainingSequence(
            call.prompt,
            message.tokens,
            message.logprobs,
            b"\1" * length,
            message.spans,
            support=message.support,
            routed=message.routed,
            images=call.images,
        )
        arrays.numbers_of(sequence, what, vocabulary, routing, images)


def serving(message: m.ServingReport) -> None:
    """Check a generator's report about itself, in the gateway."""
    require(
        0 < len(message.producer) <= 200 and message.producer.isprintable(),
        f"a generator's name is printable and has 1 to 200 characters, not "
        f"{message.producer[:40]!r}",
    )
    require(
        0 <= message.slots <= LIST and len(message.held) <= LIST and 0 <= message.heard < COUNT,
        f"{message.producer} has {message.slots} slots and holds {len(message.held)} calls",
    )


def _batch(
    message: m.Batch,
    vocabulary: int,
    routing: m.RoutingShape | None,
    images: ImageShape | None,
) -> None:
    from asyncrl.transport import arrays  # imports numpy, which a live view does not need

    what = f"batch {message.number}"
    require(0 <= message.number < COUNT and 0 <= message.next_ticket < COUNT, what)
    counts = {len(message.lags), len(message.in_flight), len(message.token_lags)}
    require(
        counts == {len(message.samples)} and bool(message.samples),
        f"{what}: {len(message.samples)} samples with {len(message.lags)} lags, "
        f"{len(message.in_flight)} in flight, {len(message.token_lags)} by token",
    )
    groups: dict[int, list[int]] = {}
    for sample in message.samples:
        groups.setdefault(sample.ticket, []).append(sample.sample)
    require(
        all(sorted(numbers) == list(range(len(numbers))) for numbers in groups.values()),
        f"{what}: groups with missing or duplicate samples",
    )
    lagged = zip(message.samples, message.lags, message.in_flight, message.token_lags, strict=True)
    for sample, lag, flown, runs in lagged:
        which = f"{what}: {arrays.name(sample)}"
        require(0 <= flown <= lag < COUNT, f"{which}: a lag of {lag}, {flown} of it in flight")
        for row in arrays.array_parts(sample):
            arrays.check_row(row, which)
        arrays.scalars(sample)
        token_count = sample.token_count
        for start, end, run_lag in runs:
            require(
                0 <= start <= end <= token_count and 0 <= run_lag <= lag,
                f"{which}: lag {run_lag} from {start} to {end}, "
                f"of {token_count} tokens with lag {lag}",
            )
    arrays.numbers(message.samples, vocabulary, routing, images)
    _images(message.images, what)
    lost = set[str]().union(*(x.all_images for x in message.samples)) - message.images.keys()
    require(not lost, f"{what}: {len(lost)} images of its samples are not in it")
    require(
        set(message.ledger) <= set(m.DISPOSITIONS)
        and all(math.isfinite(x) for line in message.ledger.values() for x in line.values()),
        f"{what}: its ledger has unknown lines or infinite counts",
    )


def _images(blobs: Mapping[str, bytes], what: str) -> None:
    """Check images by their digests."""
    try:
        check_blobs(blobs)
    except ValueError as error:
        raise BadMessage(f"{what}: {error}", "image") from error


def _status(message: m.RunStatus) -> None:
    require(
        len(message.metrics) <= LIST
        and len(message.peers) <= LIST
        and len(message.waits) <= LIST
        and 0 <= message.committed < COUNT
        and 0 <= message.steps < COUNT,
        f"{len(message.metrics)} metrics, {len(message.peers)} peers, {len(message.waits)} waits, "
        f"{message.committed} of {message.steps} batches",
    )
    for wait in message.waits:
        require(
            len(wait.who) <= TEXT and len(wait.what) <= TEXT and 0 <= wait.seconds < math.inf,
            f"a wait of {wait.seconds} s",
        )
    if message.held_up is not None:
        session = message.held_up.session
        words = (session.name, session.task, session.what, session.limit, message.held_up.producer)
        require(all(len(word) <= TEXT for word in words), f"words of session {session.name[:40]!r}")


def check_weight_layout(layout: Rows) -> None:
    """Check a layout of weights.

    Names differ, dtypes are known, pieces fit their shapes, do not overlap and have plausible
    sizes.
    """
    require(0 < len(layout) <= LIST, f"a layout of {len(layout)} tensors")
    require(len({row[0] for row in layout}) == len(layout), "a layout that names a tensor twice")
    end = 0
    for name, dtype, shape, offset, size in layout:
        what = f"weights {name[:80]!r}"
        require(dtype in DTYPES, f"{what}: dtype {dtype[:40]!r}; known are {', '.join(DTYPES)}")
        require(len(shape) <= 16 and all(0 <= side <= WEIGHTS_BYTES for side in shape), what)
        require(
            math.prod(shape) * DTYPES[dtype] == size,
            f"{what}: {size} bytes for shape {shape} of {dtype}",
        )
        require(
            end <= offset <= offset + size <= WEIGHTS_BYTES and offset % DTYPES[dtype] == 0,
            f"{what}: bytes {offset} to {offset + size}, behind {end}",
        )
        end = offset + size
