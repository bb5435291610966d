"""Validate the arrays and numbers of samples, in the buffer and in the learner.

Each function raises BadMessage; its reason is a key of REFUSALS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncrl.contract.blobs.images import ImageShape, is_digest
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import RoutingShape, TrainingSequence, Trajectory
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport

LOGPROB_ABOVE_0 = 1e-3  # rounding of a probability of 1
LEAST_LOGPROB = -1e4  # no sampled token is less likely
VERSIONS = 1 << 60  # so that differences fit int64
REWARD = 1e18  # so that its square fits float32


def name(answer: Trajectory) -> str:
    return f"ticket {answer.ticket}, sample {answer.sample}"


def array_parts(answer: Trajectory) -> Sequence[Trajectory | TrainingSequence]:
    """Return everything with arrays: the sample and a session's further sequences."""
    return [answer, *answer.rows]


def scalars(answer: Trajectory) -> None:
    """Check that reward, its parts, temperature and time are finite and in range."""
    if not -REWARD <= answer.reward <= REWARD:  # false for NaN too
        raise BadMessage(f"{name(answer)}: its reward is {answer.reward}", "number")
    if not 0 < answer.temperature < math.inf:
        raise BadMessage(f"{name(answer)}: its temperature is {answer.temperature}", "number")
    if not math.isfinite(answer.generated_at):
        raise BadMessage(f"{name(answer)}: it was sampled at {answer.generated_at}", "number")
    for part, value in answer.reward_parts.items():
        if not -REWARD <= value <= REWARD:
            raise BadMessage(f"{name(answer)}: its reward part {part[:40]!r} is {value}", "number")


def check_row(row: Trajectory | TrainingSequence, which: str) -> None:
    """Check that a sequence's arrays have one length, with ordered spans inside."""
    length = len(row.mask)
    sizes = {len(row.tokens), len(row.behavior_logprobs), 4 * length}
    if (
        len(sizes) > 1
        or len(row.prompt_tokens) % 4
        or len(row.token_rewards) not in (0, 4 * length)
    ):
        raise BadMessage(
            f"{which}: {len(row.tokens)} bytes of tokens, {len(row.behavior_logprobs)} of "
            f"behavior_logprobs and {len(row.token_rewards)} of token_rewards for {length} mask "
            f"bytes, {len(row.prompt_tokens)} of its prompt",
            "shape",
        )
    end = 0
    for span in row.spans:
        if not end <= span.start <= span.end <= length:
            raise BadMessage(f"{which}: its spans are not in order in its {length} tokens", "shape")
        if not all(0 <= x < VERSIONS for x in (*span.label, *span.kv)):
            raise BadMessage(f"{which}: weights {span.label} on keys of {span.kv}", "version")
        end = span.end


def numbers(
    samples: Sequence[Trajectory],
    vocabulary: int,
    routing: RoutingShape | None = None,
    images: ImageShape | None = None,
) -> None:
    """Check the numbers in all arrays of these samples, whose lengths agree.

    routing: the routers whose experts every sample must carry; None: none must.
    images: how the model reads images; None: it reads only text.

    They are checked together: for a short sample, most of the time would be the start of numpy's
    loops.
    """
    if not _sound([row for answer in samples for row in array_parts(answer)], vocabulary):
        for answer in samples:
            for row in array_parts(answer):
                _which_array(row, name(answer), vocabulary)
    for answer in samples:
        for row in array_parts(answer):
            if row.support:
                check_support(row, name(answer), vocabulary)
            if row.routed or (routing is not None and row.tokens):
                check_routed(row, name(answer), routing)
            if (images is not None or (row.images and vocabulary)) and not answer.failed:
                check_image_tokens(row, name(answer), images)


def numbers_of(
    row: TrainingSequence,
    which: str,
    vocabulary: int,
    routing: RoutingShape | None = None,
    images: ImageShape | None = None,
) -> None:
    """Check the numbers of one sequence; routing, images: see `numbers`."""
    if not _sound([row], vocabulary):
        _which_array(row, which, vocabulary)
    if row.support:
        check_support(row, which, vocabulary)
    if row.routed or routing is not None:
        check_routed(row, which, routing)
    if images is not None or row.images:
        check_image_tokens(row, which, images)


def check_image_tokens(
    row: Trajectory | TrainingSequence, which: str, images: ImageShape | None
) -> None:
    """Check that a sequence has the tokens of its images, and that none was sampled."""
    if images is None:
        raise BadMessage(f"{which}: it has {len(row.images)} images, of a model of text", "image")
    token, length = images
    ids = np.frombuffer(row.tokens, "<i4")
    count = int((ids == token).sum() + (np.frombuffer(row.prompt_tokens, "<i4") == token).sum())
    if count != length * len(row.images):
        raise BadMessage(
            f"{which}: it has {count} image tokens and {len(row.images)} images, each of {length} "
            "tokens",
            "image",
        )
    if ((ids == token) & (np.frombuffer(row.mask, np.uint8) > 0)).any():
        raise BadMessage(f"{which}: an image token was sampled", "image")
    if not all(map(is_digest, row.images)):
        raise BadMessage(f"{which}: a digest of an image has another form", "image")


def check_routed(
    row: Trajectory | TrainingSequence, which: str, routing: RoutingShape | None
) -> None:
    """Check that each token that the model read has experts of the model's routers."""
    if not row.routed:
        raise BadMessage(f"{which}: it has no experts, and the learner replays them", "shape")
    tokens = (len(row.prompt_tokens) + len(row.tokens)) // 4 - 1
    try:
        shape = RoutedExperts.decode(row.routed, tokens).shape
    except ValueError as error:
        raise BadMessage(f"{which}: the experts of its tokens: {error}", "shape") from error
    if routing is not None and shape != routing:
        raise BadMessage(
            f"{which}: the experts of its tokens are of {shape}; the model has "
            f"{RoutingShape(*routing)}",
            "shape",
        )


def check_support(row: Trajectory | TrainingSequence, which: str, vocabulary: int) -> None:
    """Check that the kept tokens of each position include the token that was sampled from them."""
    try:
        support = SampledSupport.decode(row.support, len(row.mask))
    except ValueError as error:
        raise BadMessage(f"{which}: the support of its sampling: {error}", "shape") from error
    if vocabulary and support.vocabulary > vocabulary:
        raise BadMessage(
            f"{which}: the support of its sampling is of {support.vocabulary} tokens, of a model "
            f"with {vocabulary}",
            "token",
        )
    sampled = np.frombuffer(row.mask, np.uint8) > 0
    outside = sampled & ~support.contains(np.frombuffer(row.tokens, "<i4"))
    if outside.any():
        raise BadMessage(
            f"{which}: the token at position {int(outside.argmax())} is not among those that top-p "
            "and top-k kept there",
            "token",
        )


def _sound(samples: Sequence[Trajectory | TrainingSequence], vocabulary: int) -> bool:
    """Whether the numbers in all arrays of these samples are valid."""
    if masks := b"".join([answer.mask for answer in samples]):
        logprobs = np.frombuffer(b"".join([x.behavior_logprobs for x in samples]), "<f4")
        # either is false where one is NaN
        in_range = logprobs.max() <= LOGPROB_ABOVE_0 and logprobs.min() >= LEAST_LOGPROB
        if not in_range or np.frombuffer(masks, np.uint8).max() > 1:
            return False
    least = vocabulary or 1 << 31  # below 0 is above it, as unsigned
    for ids in (
        b"".join([answer.tokens for answer in samples]),
        b"".join([answer.prompt_tokens for answer in samples]),
    ):
        if ids and np.frombuffer(ids, "<u4").max() >= least:
            return False
    if given := b"".join([answer.token_rewards for answer in samples]):
        return bool((np.abs(np.frombuffer(given, "<f4")) > REWARD).sum() == 0)
    return True


def _which_array(answer: Trajectory | TrainingSequence, which: str, vocabulary: int) -> None:
    """Raise the error for the first invalid array of this sample, if there is one."""
    if answer.mask.strip(b"\0\1"):
        raise BadMessage(f"{which}: its mask holds other bytes than 0 and 1", "shape")
    logprobs = np.frombuffer(answer.behavior_logprobs, "<f4")
    if not ((logprobs <= LOGPROB_ABOVE_0) & (logprobs >= LEAST_LOGPROB)).all():
        raise BadMessage(f"{which}: a behavior_logprob is above 0 or not finite", "number")
    for field, raw in (("prompt_tokens", answer.prompt_tokens), ("tokens", answer.tokens)):
        ids = np.frombuffer(raw, "<i4")
        if len(ids) and (ids.min() < 0 or (vocabulary and ids.max() >= vocabulary)):
            raise BadMessage(
                f"{which}: {field} from {ids.min()} to {ids.max()}, of a model with "
                f"{vocabulary} tokens",
                "token",
            )
    if (np.abs(np.frombuffer(answer.token_rewards, "<f4")) > REWARD).any():
        raise BadMessage(f"{which}: a token reward is not finite (NaN: none was given)", "number")
