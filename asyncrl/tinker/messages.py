"""Messages between the server process and its training and sampling processes.

A call is the name of a method with its arguments. Its reply is the result of the method.

    training  load              creates a model, or loads a state
              forward_backward  adds the gradient of a loss, returns a ScoreResult
              step              makes an optimizer step, returns its metrics
              drop_gradient     forgets the gradient since the last step
              save              writes the weights, with or without the optimizer
    sampling  add               samples the sequences of a SampleCall, returns a SampleResult
              cancel            drops the call of the same number without a reply

The methods are those of `ServedModels`, `TrainedModel` and `Sampler`. A call that fails has a
CallFailure as its reply. Calls and replies are MessagePack, with the kind beside each object.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct, msgpack
from numpy import ndarray

from actors.engine import CompletionRequest
from asyncrl.contract.errors import AsyncrlError, ConfigError

ErrorCategory = Literal["user", "server"]
UNKNOWN = -1  # lag of a sampled token whose sequence is unknown
NOT_SAMPLED = -2  # lag of a token that is not trained, such as a prompt's
FREE_BYTES = 1 << 30  # of the disk, which weights that a client names leave free
LABEL = "asyncrl_label"  # file beside saved weights
SUPERVISED = -3  # lag of a token that cross_entropy trains and no sequence contains


# directory, branch and version of weights: a client may save later ones in the same directory
WeightsVersion = tuple[str, str, int]
BASE: WeightsVersion = ("", "", 0)


class Datum(Struct, frozen=True):
    """One sequence of a forward_backward call, with n positions.

    tokens: int32 [n], the input.
    targets: int32 [n], the token to score at each position.
    fields: name -> float32 [n]: weights, logprobs, advantages, mask.
    lags: int32 [n], versions; UNKNOWN, NOT_SAMPLED or SUPERVISED.
    """

    tokens: ndarray
    targets: ndarray
    fields: dict[str, ndarray]
    lags: ndarray

    def encode(self, start: int, stop: int) -> bytes:
        """Return the content of the positions [start, stop), as a sequence has it.

        It is their int32 targets and then their float32 log-probabilities. Raises KeyError for a
        datum without log-probabilities."""
        piece = slice(start, stop)
        return self.targets[piece].tobytes() + self.fields["logprobs"][piece].tobytes()


class SampleCall(Struct, frozen=True):
    """Sample sequences after one prompt.

    version: of the weights.
    first: the request of the first sequence, but for key and group; those of the others differ in
        the sample of their random stream, so a repeated call returns the same sequences.
    count: of the sequences.
    texts: texts that end a sequence; its last token is the one that completes the text.
    prompt_topk: number of most likely tokens to score at each position of the prompt.
    """

    version: WeightsVersion
    first: CompletionRequest
    count: int
    texts: list[str]
    prompt_logprobs: bool = False
    prompt_topk: int = 0


class ScoreResult(Struct, frozen=True):
    """Result of `forward_backward`.

    logprobs: float32 [n] for each datum, of its targets, in the order of the call.
    loss: the sum over all tokens.
    """

    logprobs: list[ndarray]
    loss: float


class SequenceResult(Struct, frozen=True):
    """A sampled sequence of T tokens.

    tokens: int32 [T], with the token that ended it.
    logprobs: float32 [T], under the distribution that they were sampled from.
    """

    tokens: bytes
    logprobs: bytes
    stop: bool  # False: cut at max_tokens


class SampleResult(Struct, frozen=True):
    """Result of a SampleCall; prompt_logprobs: float32 [P], NaN at the first token.

    topk_ids, topk_logprobs: int32 and float32 [P, prompt_topk].
    """

    sequences: list[SequenceResult]
    prompt_logprobs: bytes = b""
    topk_ids: bytes = b""
    topk_logprobs: bytes = b""


@dataclass
class CallFailure(Exception):
    """A call failed.  The worker replies with it, and the server's call raises it.

    spoiled: the model in the training process is in an unknown state and must be restored; without
        it, the call changed nothing.
    """

    error: str
    category: ErrorCategory = "user"
    spoiled: bool = False

    def __str__(self) -> str:
        return self.error


KINDS = (Datum, SampleCall, ScoreResult, SampleResult, CallFailure, Path)
LENGTH_BYTES = 8  # before each frame


def encode_frame(*values: Any) -> bytes:
    """Encode a call or a reply; its length comes first."""
    payload = ENCODER.encode([_name_kinds(value) for value in values])
    return len(payload).to_bytes(LENGTH_BYTES) + payload


def decode_frame(payload: bytes) -> list[Any]:
    """Decode what comes behind the length.  Raises DecodeError if it is cut."""
    return list(msgpack.decode(payload, ext_hook=_decode_kind))


def _name_kinds(value: Any) -> Any:
    for code, kind in enumerate(KINDS):
        if isinstance(value, kind):
            return msgpack.Ext(code, ENCODER.encode(value))
    if isinstance(value, list | tuple):
        return [_name_kinds(part) for part in value]
    return {key: _name_kinds(part) for key, part in value.items()} if type(value) is dict else value


def _decode_kind(code: int, data: memoryview) -> Any:
    return msgpack.decode(data, type=KINDS[code], dec_hook=_decode_other)


def _encode_other(value: Any) -> Any:
    return (value.tobytes(), value.dtype.str) if isinstance(value, ndarray) else str(value)


def _decode_other(kind: type, value: Any) -> Any:
    if kind is ndarray:
        return np.frombuffer(*value).copy()  # torch asks for an array that can be written
    return Path(value) if kind is Path else value


ENCODER = msgpack.Encoder(enc_hook=_encode_other)


def describe_failure(error: Exception) -> CallFailure:
    """Turn what a call raised into its result, so that it costs no other call.

    An unexpected error also goes to the log of the process, with its traceback."""
    if isinstance(error, CallFailure):
        return error
    if isinstance(error, AsyncrlError):
        return CallFailure(str(error), "user" if isinstance(error, ConfigError) else "server")
    traceback.print_exception(error)
    return CallFailure(f"{type(error).__name__}: {error}", "server", spoiled=True)
