"""The messages of the Tinker API, decoded and encoded by the classes of the package `tinker`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pydantic
import tinker.types as sdk
from google.protobuf.message import DecodeError, Message
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.contract.errors import ConfigError
from asyncrl.tinker.messages import NOT_SAMPLED, Datum, SampleCall, SampleResult, ScoreResult
from asyncrl.tinker.sequences import ProvenanceSpan

PROTOBUF = "application/x-protobuf"
TYPES: dict[int, Any] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
MOST_LIKELY = 32  # largest topk_prompt_logprobs
MOST_SEQUENCES = 1024  # largest num_samples
_Request = TypeVar("_Request", bound=pydantic.BaseModel)


class LossCall(NamedTuple):
    """A decoded forward_backward call; spans: of each datum, or None."""

    data: list[Datum]
    spans: list[list[ProvenanceSpan] | None]
    loss: str
    config: dict[str, float | str]
    forward_only: bool


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.  Raises ConfigError.

    Numbers that are not finite or beyond 64 bits, and text that is not Unicode, are refused here:
    the result goes to files and to other processes."""
    try:
        raw = json.loads(
            body.decode() or "{}",
            parse_int=_whole_number,
            parse_float=_finite_number,
            parse_constant=_finite_number,
        )
        if b"\\u" in body:
            json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("the body must be a JSON object")
    return raw


def _whole_number(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(f"{text[:20]} has more than 64 bits")
    return number


def _finite_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not finite")
    return number


def parse_json(kind: type[_Request], body: bytes) -> _Request:
    """Decode a JSON request.  Raises ConfigError.

    Fields that this version of the package does not know are dropped where they are empty: a newer
    client sends them with their defaults."""
    raw = parse_object(body)
    known = set(kind.model_fields) | {"adam_params", "optimizer_params"}
    for name in [name for name in raw if name not in known]:
        if raw[name]:
            raise ConfigError(f"{name}: {kind.__name__} has no such field here")
        del raw[name]
    try:
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{kind.__name__}: {where}: {first['msg']}") from error


def parse_loss_request(body: bytes) -> pb.ForwardBackwardRequest:
    """Decode the protobuf of a forward_backward call.  Raises ConfigError."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ConfigError(f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def loss_call(message: pb.ForwardBackwardRequest) -> LossCall:
    """Convert a forward_backward call.  Raises ConfigError for what is not served."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return LossCall(
        [_datum(place, row) for place, row in enumerate(message.data)],
        [_spans(row) for row in message.data],
        message.loss_fn,
        config,
        message.forward_only,
    )


def _datum(place: int, row: pb.Datum) -> Datum:
    where = f"datum {place}"
    tokens = []
    for chunk in row.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ConfigError(
                f"{where}: model_input has {kind or 'an empty chunk'}; text is served"
            )
        tokens.append(_array(chunk.encoded_text.tokens, "<i4", f"{where}: model_input"))
    ids = np.concatenate(tokens) if tokens else np.zeros(0, "<i4")
    fields = {
        name: _tensor(value, f"{where}: loss_fn_inputs.{name}")
        for name, value in row.loss_fn_inputs.items()
    }
    targets = fields.pop("target_tokens", None)
    if targets is None:
        raise ConfigError(f"{where}: loss_fn_inputs.target_tokens is missing")
    if not len(ids):
        raise ConfigError(f"{where}: model_input is empty")
    for name, values in {"target_tokens": targets, **fields}.items():
        if len(values) != len(ids):
            raise ConfigError(
                f"{where}: loss_fn_inputs.{name} has {len(values)} values for {len(ids)} tokens"
            )
        if not np.isfinite(values).all():
            raise ConfigError(f"{where}: loss_fn_inputs.{name} has a value that is not finite")
    return Datum(
        ids.tobytes(),
        targets.astype("<i4").tobytes(),
        {name: values.astype("<f4").tobytes() for name, values in fields.items()},
        np.full(len(ids), NOT_SAMPLED, "<i4").tobytes(),
    )


def _array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ConfigError(f"{where}: {len(data)} bytes are not a whole number of values")
    return np.frombuffer(data, dtype)


def _tensor(value: pb.Tensor, where: str) -> np.ndarray:
    """Return a dense tensor of one dimension."""
    if value.dtype not in TYPES:
        raise ConfigError(f"{where}: its data type {value.dtype} is not served")
    if value.WhichOneof("encoding") == "sparse_csr" or len(value.shape) > 1:
        raise ConfigError(f"{where}: only dense tensors of one dimension are served")
    return _array(value.dense, TYPES[value.dtype], where)


def _spans(row: pb.Datum) -> list[ProvenanceSpan] | None:
    if not row.loss_fn_input_spans:
        return None
    spans = []
    for span in row.loss_fn_input_spans:
        sampled = span.HasField("sampled_tokens")
        arm = span.sampled_tokens if sampled else span.prompt_tokens
        spans.append(ProvenanceSpan(arm.sequence_id, arm.offset, arm.length, sampled))
    return spans


def sample_request(
    request: sdk.SampleRequest,
    *,
    ends: Sequence[int],
    limit: int,
    default: int,
    vocabulary: int,
) -> SampleCall:
    """Convert an asample call; the caller fills in weights, version, seed and ticket.

    ends: the model's own stop tokens.  limit: of prompt and sequence together.
    default: length of a sequence whose request names none.  Raises ConfigError."""
    for name in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
        if getattr(request, name, 0):
            raise ConfigError(f"{name}: is not served")
    for name in ("target_prompt_logprobs", "prompt_logprobs_last_n", "record_stability_info"):
        if getattr(request, name, None):
            raise ConfigError(f"{name}: is not served")
    ids: list[int] = []
    for chunk in request.prompt.chunks:
        tokens = getattr(chunk, "tokens", None)
        if tokens is None:
            raise ConfigError(f"prompt: {type(chunk).__name__} is not served, only text")
        ids += tokens
    given = request.sampling_params
    if not ids:
        raise ConfigError("prompt: is empty")
    if not 0 <= request.topk_prompt_logprobs <= MOST_LIKELY:
        raise ConfigError(f"topk_prompt_logprobs: must be from 0 to {MOST_LIKELY}")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ConfigError(f"prompt: has a token outside the vocabulary of {vocabulary}")
    if not 1 <= request.num_samples <= MOST_SEQUENCES:
        raise ConfigError(
            f"num_samples: {request.num_samples} must be from 1 to {MOST_SEQUENCES} in one request"
        )
    most = limit - len(ids)
    wanted = default if given.max_tokens is None else given.max_tokens
    if most < 1 or wanted < 1 or (given.max_tokens is not None and wanted > most):
        raise ConfigError(
            f"a prompt of {len(ids)} and max_tokens = {wanted} do not fit sampling.context = "
            f"{limit} of the server"
        )
    if given.temperature < 0 or not 0 < given.top_p <= 1:
        raise ConfigError(
            f"temperature = {given.temperature:g} must not be negative, and top_p = "
            f"{given.top_p:g} must be above 0 and at most 1"
        )
    stop = [given.stop] if isinstance(given.stop, str) else list(given.stop or ())
    tokens = [text for text in stop if isinstance(text, int)]
    return SampleCall(
        weights="",
        version=0,
        prompt=np.array(ids, "<i4").tobytes(),
        count=request.num_samples,
        max_tokens=min(wanted, most),
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=0,
        ticket=0,
        stop=[] if given.stop is not None and not stop else [*dict.fromkeys([*ends, *tokens])],
        texts=[text for text in stop if isinstance(text, str) and text],
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_topk=request.topk_prompt_logprobs,
    )


def sample_reply(result: SampleResult) -> bytes:
    """Encode the result of an asample call."""
    message = pb.SampleResponse()
    for sequence in result.sequences:
        row = message.sequences.add()
        row.stop_reason = pb.STOP_REASON_STOP if sequence.stop else pb.STOP_REASON_LENGTH
        row.tokens = sequence.tokens
        row.logprobs = sequence.logprobs
    message.prompt_logprobs = result.prompt_logprobs
    if result.topk_ids:
        positions = len(result.prompt_logprobs) // 4
        message.topk_prompt_logprobs.CopyFrom(
            pb.TopkLogprobs(
                token_ids=result.topk_ids,
                logprobs=result.topk_logprobs,
                k=len(result.topk_ids) // (4 * positions),
                length=positions,
            )
        )
    return _serialize(message)


def loss_reply(result: ScoreResult) -> bytes:
    """Encode the result of a forward_backward call."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn")
    message.metrics["loss:sum"] = result.loss
    record = message.loss_fn_outputs.add()
    record.num_datums = len(result.logprobs)
    offsets = np.zeros(len(result.logprobs) + 1, "<i8")
    np.cumsum([len(row) for row in result.logprobs], out=offsets[1:])
    record.fields["logprobs"].CopyFrom(
        pb.BatchedTensor(
            data=b"".join(result.logprobs), offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32
        )
    )
    return _serialize(message)


def _serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def json_reply(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode()
