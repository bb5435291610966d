"""Validate the arrays and numbers of samples, in the buffer and in the learner.

Each function raises BadMessage; its reason is a key of REFUSALS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncrl.contract import outcomes
from asyncrl.contract.blobs.images import ImageShape, is_digest
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.messages import ModelShape, RoutingShape, TrainingSequence, Trajectory
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.sampled_support import SampledSupport

Row = Trajectory | TrainingSequence

LOGPROB_ABOVE_0 = 1e-3  # rounding of a probability of 1
LEAST_LOGPROB = -1e4  # no sampled token is less likely
REWARD = 1e18  # so that its square fits float32


def cite(sample: Trajectory) -> str:
    """Name a sample for an error message."""
    return f"ticket {sample.ticket}, sample {sample.sample}"


def check_scalars(sample: Trajectory) -> None:
    """Check the outcome, and that temperature and time are finite and in range."""
    try:
        outcomes.check_sample(sample)
    except BadMessage as error:
        raise BadMessage(f"{cite(sample)}: {error}", error.reason) from error
    if not 0 < sample.temperature < math.inf:
        raise BadMessage(f"{cite(sample)}: its temperature is {sample.temperature}", "number")
    if not math.isfinite(sample.generated_at):
        raise BadMessage(f"{cite(sample)}: it was sampled at {sample.generated_at}", "number")


def check_row(row: Row, name: str) -> None:
    """Check that a sequence's arrays have one length, with ordered spans inside.

    name: of the sequence, for the error message."""
    length = len(row.mask)
    sizes = {len(row.tokens), len(row.behavior_logprobs), 4 * length}
    if (
        len(sizes) > 1
        or len(row.prompt_tokens) % 4
        or len(row.token_rewards) not in (0, 4 * length)
    ):
        raise BadMessage(
            f"{name}: {len(row.tokens)} bytes of tokens, {len(row.behavior_logprobs)} of "
            f"behavior_logprobs and {len(row.token_rewards)} of token_rewards for {length} mask "
            f"bytes, {len(row.prompt_tokens)} of its prompt",
            "shape",
        )
    end = 0
    for span in row.spans:
        if not end <= span.start <= span.end <= length:
            raise BadMessage(f"{name}: its spans are not in order in its {length} tokens", "shape")
        end = span.end


def check_numbers(samples: Sequence[Trajectory], model: ModelShape) -> None:
    """Check the numbers in all arrays of these samples, whose lengths agree.

    All samples are checked together: for a single short sample, most of the time would be the start
    of numpy's loops.
    """
    rows = [(row, sample) for sample in samples for row in sample.list_rows()]
    try:
        _check_arrays([row for row, _ in rows], "", model.vocabulary)
    except BadMessage:
        for row, sample in rows:
            _check_arrays([row], cite(sample), model.vocabulary)
    for row, sample in rows:
        _check_columns(row, cite(sample), model)
        reads_images = model.images is not None or (row.images and model.vocabulary)
        if reads_images and not sample.failed:
            check_image_tokens(row, cite(sample), model.images)


def check_sequence_numbers(row: TrainingSequence, name: str, model: ModelShape) -> None:
    """Check the numbers of one sequence; `name` is its name in the error message."""
    _check_arrays([row], name, model.vocabulary)
    _check_columns(row, name, model)
    if model.images is not None or row.images:
        check_image_tokens(row, name, model.images)


def _check_columns(row: Row, name: str, model: ModelShape) -> None:
    if row.support:
        check_support(row, name, model.vocabulary)
    if row.routed or (model.routing is not None and row.tokens):
        check_routed(row, name, model.routing)


def check_image_tokens(row: Row, name: str, images: ImageShape | None) -> None:
    """Check that a sequence has the tokens of its images, and that none was sampled."""
    if images is None:
        raise BadMessage(f"{name}: it has {len(row.images)} images, of a model of text", "image")
    token, length = images
    ids = np.frombuffer(row.tokens, "<i4")
    count = int((ids == token).sum() + (np.frombuffer(row.prompt_tokens, "<i4") == token).sum())
    if count != length * len(row.images):
        raise BadMessage(
            f"{name}: it has {count} image tokens and {len(row.images)} images, each of {length} "
            "tokens",
            "image",
        )
    if ((ids == token) & (np.frombuffer(row.mask, np.uint8) > 0)).any():
        raise BadMessage(f"{name}: an image token was sampled", "image")
    if not all(map(is_digest, row.images)):
        raise BadMessage(f"{name}: a digest of an image has another form", "image")


def check_routed(row: Row, name: str, routing: RoutingShape | None) -> None:
    """Check that each token that the model read has experts of the model's routers."""
    if not row.routed:
        raise BadMessage(f"{name}: it has no experts, and the learner replays them", "shape")
    tokens = (len(row.prompt_tokens) + len(row.tokens)) // 4 - 1
    try:
        shape = RoutedExperts.decode(row.routed, tokens).shape
    except ValueError as error:
        raise BadMessage(f"{name}: the experts of its tokens: {error}", "shape") from error
    if routing is not None and shape != routing:
        raise BadMessage(
            f"{name}: the experts of its tokens are of {shape}; the model has "
            f"{RoutingShape(*routing)}",
            "shape",
        )


def check_support(row: Row, name: str, vocabulary: int) -> None:
    """Check that the kept tokens of each position include the sampled token."""
    try:
        support = SampledSupport.decode(row.support, len(row.mask))
    except ValueError as error:
        raise BadMessage(f"{name}: the support of its sampling: {error}", "shape") from error
    if vocabulary and support.vocabulary > vocabulary:
        raise BadMessage(
            f"{name}: the support of its sampling is of {support.vocabulary} tokens, of a model "
            f"with {vocabulary}",
            "token",
        )
    is_sampled = np.frombuffer(row.mask, np.uint8) > 0
    is_outside = is_sampled & ~support.contains(np.frombuffer(row.tokens, "<i4"))
    if is_outside.any():
        raise BadMessage(
            f"{name}: the token at position {int(is_outside.argmax())} is not among those that "
            "top-p and top-k kept there",
            "token",
        )


def _check_arrays(rows: Sequence[Row], name: str, vocabulary: int) -> None:
    """Raise BadMessage for the first invalid kind of array of these sequences, if any."""

    def join(field: str, dtype: str) -> np.ndarray:
        return np.frombuffer(b"".join([getattr(row, field) for row in rows]), dtype)

    if (join("mask", "u1") > 1).any():
        raise BadMessage(f"{name}: its mask has other bytes than 0 and 1", "shape")
    logprobs = join("behavior_logprobs", "<f4")
    # a comparison with NaN is false
    if not LEAST_LOGPROB <= logprobs.min(initial=0) <= logprobs.max(initial=0) <= LOGPROB_ABOVE_0:
        raise BadMessage(f"{name}: a behavior_logprob is above 0 or not finite", "number")
    for field in ("prompt_tokens", "tokens"):
        ids = join(field, "<u4")
        # a negative id, read as unsigned, is above the end
        if ids.max(initial=0) >= (vocabulary or 1 << 31):
            ids = ids.view("<i4")
            raise BadMessage(
                f"{name}: {field} from {ids.min()} to {ids.max()}, of a model with "
                f"{vocabulary} tokens",
                "token",
            )
    if (np.abs(join("token_rewards", "<f4")) > REWARD).any():
        raise BadMessage(f"{name}: a token reward is not finite (NaN: none was given)", "number")
