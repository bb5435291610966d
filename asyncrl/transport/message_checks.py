"""Checks of a server's messages in their receivers: learner, generator and gateway.

The types of `contract/messages.py` have the ranges of single fields.  The checks here are of fields
that must fit each other.  They run before the receiver acts on a message: otherwise a batch with
inconsistent arrays would end the learner in its step, and a call beyond the context would end its
generator in the engine.  The receiver itself checks whether a message is for this process and of
this epoch.
"""

from __future__ import annotations

import math

from asyncrl.contract import messages as m
from asyncrl.contract.blobs.images import (
    MOST_IMAGES,
    Blobs,
    ImageShape,
    check_blobs,
    index_by_digest,
)
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.outcomes import NAME_LENGTH
from asyncrl.transport.weight_transport import Rows

LIST = 1 << 20  # entries of a list in one message
WEIGHTS_BYTES = 1 << 46
PROBE_BYTES = 1 << 20
# dtypes of weights and their bytes per number
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int8": 1}
DTYPES |= {"int16": 2, "int32": 4, "int64": 8, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


def require(is_valid: bool, text: str, reason: str = "message") -> None:
    """Raise BadMessage with this text and reason unless `is_valid`."""
    if not is_valid:
        raise BadMessage(text, reason)


def check_producer(name: str) -> None:
    """Check a generator's name, which appears in logs and in the live view. Raises BadMessage."""
    require(
        0 < len(name) <= NAME_LENGTH and name.isprintable(),
        f"a generator's name is printable and has 1 to {NAME_LENGTH} characters, not {name[:40]!r}",
    )


def check(message: object, model: m.ModelShape = m.UNKNOWN_MODEL) -> None:
    """Check a message. model: the reader's. Raises BadMessage."""
    if isinstance(message, m.Batch):
        _check_batch(message, model)
    elif isinstance(message, m.TicketGrant):
        for ticket in message.tickets:
            name = f"ticket {ticket.ticket}, attempt {ticket.attempt}"
            samples, images, exact = ticket.samples, ticket.prompt.images, ticket.exact_version
            require(len(set(samples)) == len(samples), f"{name}: samples {samples[:8]}")
            require(len(images) <= MOST_IMAGES, f"{name}: {len(images)} images")
            _check_images(index_by_digest(images), name)
            is_known = exact is None or exact.epoch <= ticket.min_version.epoch
            require(is_known, f"{name}: exactly {exact}")
    elif isinstance(message, m.CallAssignments):  # each of its calls: `check_call`
        _check_images(message.images, "calls")


def check_call(
    call: m.GenerationCall, vocabulary: int, context: int, blobs: Blobs, images: ImageShape | None
) -> None:
    """Check one call in the generator.

    The generator replies to an invalid call by a failure; the other calls of its message run.

    vocabulary: number of tokens of the model. context: tokens of a row of the engine; 0: unlimited.
    blobs: digest -> blob, of all calls of the message.
    images: how the model reads images; None: it reads only text.
    Raises BadMessage.
    """
    name = f"call {call.id} of ticket {call.ticket}"
    length = len(call.prompt) // 4
    require(bool(length) and len(call.prompt) == 4 * length, f"{name}: {len(call.prompt)} bytes")
    require(
        call.max_new_tokens >= 1 and (not context or length + call.max_new_tokens <= context),
        f"{name}: {call.max_new_tokens} tokens behind {length}, in a context of {context}",
    )
    ids = memoryview(call.prompt).cast("i").tolist()
    require(
        min(ids) >= 0 and (not vocabulary or max(ids) < vocabulary),
        f"{name}: tokens from {min(ids)} to {max(ids)}, of a model with {vocabulary}",
    )
    token, tokens_per_image = images or (-1, 1)
    tokens = ids.count(token)
    require(
        tokens == tokens_per_image * len(call.images),
        f"call {call.id}: {tokens} image tokens for {len(call.images)} images",
    )
    require(blobs.keys() >= set(call.images), f"call {call.id}: an image is not in the message")


def check_call_result(
    message: m.CallResult, call: m.GenerationCall, model: m.ModelShape = m.UNKNOWN_MODEL
) -> None:
    """Check a generator's result against its call, in the gateway. Raises BadMessage."""
    name = f"call {call.id}"
    length = len(message.tokens) // 4
    require(
        not (length and message.failed),
        f"{name}: {length} tokens, and a failure of {len(message.failed)} characters",
    )
    require(
        len(message.tokens) == len(message.logprobs) == 4 * length,
        f"{name}: {len(message.tokens)} bytes of tokens, {len(message.logprobs)} of logprobs",
    )
    require(
        max(length, message.lost) <= call.max_new_tokens,
        f"{name}: {length} tokens and {message.lost} lost; it may have {call.max_new_tokens}",
    )
    edges = [0] + [span.end for span in message.spans]
    require(
        edges[:-1] == [span.start for span in message.spans]
        and edges[-1] == length
        and edges == sorted(set(edges)),
        f"{name}: its spans are not its {length} tokens in order",
    )
    require(
        all(span.label.epoch == call.min_version.epoch for span in message.spans)
        or call.exact_version is not None,
        f"{name}: tokens of another epoch than {call.min_version.epoch}",
    )
    require(
        length > 0 or not (message.support or message.routed),
        f"{name}: a support or experts without tokens",
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
        arrays.check_sequence_numbers(sequence, name, model)


def _check_batch(message: m.Batch, model: m.ModelShape) -> None:
    from asyncrl.transport import arrays  # imports numpy, which a live view does not need

    name = f"batch {message.number}"
    counts = {len(message.lags), len(message.in_flight), len(message.token_lags)}
    require(
        counts == {len(message.samples)} and bool(message.samples),
        f"{name}: {len(message.samples)} samples with {len(message.lags)} lags, "
        f"{len(message.in_flight)} in flight, {len(message.token_lags)} by token",
    )
    groups: dict[int, list[int]] = {}
    for sample in message.samples:
        groups.setdefault(sample.ticket, []).append(sample.sample)
    require(
        all(sorted(numbers) == list(range(len(numbers))) for numbers in groups.values()),
        f"{name}: groups with missing or duplicate samples",
    )
    lagged = zip(message.samples, message.lags, message.in_flight, message.token_lags, strict=True)
    for sample, lag, in_flight, runs in lagged:
        sample_name = f"{name}: {arrays.cite(sample)}"
        require(
            0 <= in_flight <= lag < 1 << 60,
            f"{sample_name}: a lag of {lag}, {in_flight} of it in flight",
        )
        for row in sample.list_rows():
            arrays.check_row(row, sample_name)
        arrays.check_scalars(sample)
        token_count = sample.token_count
        for start, end, run_lag in runs:
            require(
                0 <= start <= end <= token_count and 0 <= run_lag <= lag,
                f"{sample_name}: lag {run_lag} from {start} to {end}, "
                f"of {token_count} tokens with lag {lag}",
            )
    arrays.check_numbers(message.samples, model)
    _check_images(message.images, name)
    digests = set[str]().union(*(sample.all_images for sample in message.samples))
    missing = digests - message.images.keys()
    require(not missing, f"{name}: {len(missing)} images of its samples are not in it")
    require(
        set(message.ledger) <= set(m.DISPOSITIONS)
        and all(
            math.isfinite(value) for line in message.ledger.values() for value in line.values()
        ),
        f"{name}: its ledger has unknown lines or infinite counts",
    )


def _check_images(blobs: Blobs, name: str) -> None:
    """Check images by their digests."""
    try:
        check_blobs(blobs)
    except ValueError as error:
        raise BadMessage(f"{name}: {error}", "image") from error


def check_weight_layout(layout: Rows) -> None:
    """Check a layout of weights. Raises BadMessage.

    Names must differ, dtypes must be known, and pieces must fit their shapes, not overlap and have
    plausible sizes.
    """
    require(0 < len(layout) <= LIST, f"a layout of {len(layout)} tensors")
    require(len({row[0] for row in layout}) == len(layout), "a layout that names a tensor twice")
    end = 0
    for name, dtype, shape, offset, size in layout:
        title = f"weights {name[:80]!r}"
        require(dtype in DTYPES, f"{title}: dtype {dtype[:40]!r}; known are {', '.join(DTYPES)}")
        require(len(shape) <= 16 and all(0 <= side <= WEIGHTS_BYTES for side in shape), title)
        require(
            math.prod(shape) * DTYPES[dtype] == size,
            f"{title}: {size} bytes for shape {shape} of {dtype}",
        )
        require(
            end <= offset <= offset + size <= WEIGHTS_BYTES and offset % DTYPES[dtype] == 0,
            f"{title}: bytes {offset} to {offset + size}, behind {end}",
        )
        end = offset + size
