"""Decode and encode the messages of the Tinker API with the classes of the package `tinker`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pydantic
import tinker.types as sdk
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from actors.engine import CompletionRequest
from asyncrl.contract.errors import ConfigError
from asyncrl.tinker.messages import (
    NOT_SAMPLED,
    Datum,
    SampleCall,
    SampleResult,
    ScoreResult,
    WeightsVersion,
)
from asyncrl.tinker.sequences import ProvenanceSpan
from asyncrl.tinker.settings import REFUSAL, UNPUBLISHED

PROTOBUF = "application/x-protobuf"
TYPES: dict[int, Any] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
LARGEST = float(np.finfo(np.float32).max)
# parameters of AdamW with their ranges [lowest, end), in which float32 can represent them
ADAM_RANGES = (
    ("learning_rate", 0.0, LARGEST),
    ("beta1", 0.0, 1.0),
    ("beta2", 0.0, 1.0),
    ("eps", 1e-30, LARGEST),
    ("weight_decay", 0.0, LARGEST),
    ("grad_clip_norm", -LARGEST, LARGEST),
)
MOST_LIKELY = 32  # largest topk_prompt_logprobs
COLDEST, HOTTEST = 1e-6, 1e6  # temperatures at which logits stay finite numbers of float32
MOST_SEQUENCES = 1024  # largest num_samples
UNSERVED = "topk_sample_logprobs prompt_alt_tokens_k target_prompt_logprobs prompt_logprobs_last_n"
JSON_BYTES = 1 << 22  # of a JSON body, which has the tokens of one prompt at most
MOST_VALUES = 4096  # of a JSON body, besides whole numbers
INLINE_BYTES = 1 << 14  # of a body that is decoded on the event loop
_Request = TypeVar("_Request", bound=pydantic.BaseModel)
_Decoded = TypeVar("_Decoded")
_thread = ThreadPoolExecutor(1)  # one body at a time, as it takes many times its bytes of memory


async def decode(parse: Callable[..., _Decoded], *values: Any) -> _Decoded:
    """Apply a function of this module to values, the last of which is a body.

    A large one is decoded in a thread: other requests go on."""
    if len(values[-1]) <= INLINE_BYTES:
        return parse(*values)
    return await asyncio.get_running_loop().run_in_executor(_thread, parse, *values)


class LossCall(NamedTuple):
    """The arguments of `ServedModels.forward_backward` after the model.

    loss: what is computed; the client may have named another (`TinkerLosses`).
    options: its loss_fn_config.
    """

    data: list[Datum]
    loss: str
    options: dict[str, float | str]
    forward_only: bool


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.  Raises ConfigError.

    Whole numbers of more than 64 bits are refused here, because the values are written to files and
    sent to other processes.  So are many other values: pydantic takes long to refuse them."""
    if len(body) > JSON_BYTES:
        raise ConfigError(f"the body: {len(body)} bytes of JSON, more than {JSON_BYTES}")
    try:
        values = msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not a JSON object: {error}") from error
    nested: list[Any] = [values]
    others = 0
    for entry in nested:
        for value in entry.values() if isinstance(entry, dict) else entry:
            if type(value) is int:
                if not -(2**63) <= value < 2**63:
                    raise ConfigError("the body: a whole number has more than 64 bits")
                continue
            if (others := others + 1) > MOST_VALUES:
                raise ConfigError(f"the body: over {MOST_VALUES} values that are no whole numbers")
            if isinstance(value, dict | list):
                nested.append(value)
    return values


def parse_json(message_type: type[_Request], body: bytes) -> _Request:
    """Decode a JSON request.  Raises ConfigError.

    Unknown fields with an empty value are dropped: a newer client sends them with their
    defaults."""
    values = parse_object(body)
    fields = set(message_type.model_fields) | {"adam_params", "optimizer_params"}
    for name in [name for name in values if name not in fields]:
        if values[name]:
            raise ConfigError(f"{name}: {message_type.__name__} has no such field here")
        del values[name]
    try:
        return message_type.model_validate(values, strict=True)  # refuses "nan" as a number
    except pydantic.ValidationError as error:
        if error.error_count() > 100:  # to describe them would take long
            raise ConfigError(f"{message_type.__name__}: {error.error_count()} errors") from None
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        text = f"{message_type.__name__}: {field} = {problem['input']!r:.50}: {problem['msg']}"
        raise ConfigError(text) from error


def parse_loss_request(body: bytes) -> pb.ForwardBackwardRequest:
    """Decode the protobuf of a forward_backward call.  Raises ConfigError."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ConfigError(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


def parse_loss_call(message: pb.ForwardBackwardRequest, substitute: str = "") -> LossCall:
    """Convert a forward_backward call.  Raises ConfigError for options that are not served.

    substitute: the loss that takes the place of stable_reinforce, or ""."""
    if message.loss_fn == UNPUBLISHED and not substitute:
        raise ConfigError(REFUSAL)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return LossCall(
        [_parse_datum(f"datum {index}", datum) for index, datum in enumerate(message.data)],
        substitute if message.loss_fn == UNPUBLISHED else message.loss_fn,
        config,
        message.forward_only,
    )


def parse_spans(message: pb.Datum) -> list[ProvenanceSpan]:
    """Return the provenance spans of a datum."""
    return [
        ProvenanceSpan(arm.sequence_id, arm.offset, arm.length, sampled)
        for span in message.loss_fn_input_spans
        for sampled in [span.HasField("sampled_tokens")]
        for arm in [span.sampled_tokens if sampled else span.prompt_tokens]
    ]


def _parse_datum(where: str, message: pb.Datum) -> Datum:
    tokens = []
    for chunk in message.model_input:
        chunk_type = chunk.WhichOneof("chunk")
        if chunk_type != "encoded_text":
            raise ConfigError(
                f"{where}: model_input has {chunk_type or 'an empty chunk'}; only text is served"
            )
        tokens.append(_parse_array(chunk.encoded_text.tokens, "<i4", f"{where}: model_input"))
    ids = np.concatenate([np.zeros(0, "<i4"), *tokens])
    fields = {}
    for name, value in message.loss_fn_inputs.items():
        field = f"{where}: loss_fn_inputs.{name}"
        if value.dtype not in TYPES:
            raise ConfigError(f"{field}: its data type {value.dtype} is not served")
        if value.WhichOneof("encoding") == "sparse_csr" or len(value.shape) > 1:
            raise ConfigError(f"{field}: only dense tensors of one dimension are served")
        fields[name] = _parse_array(value.dense, TYPES[value.dtype], field)
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
    target_ids = targets.astype("<i4")
    if (wrong := np.flatnonzero(target_ids != targets)).size:
        raise ConfigError(
            f"{where}: loss_fn_inputs.target_tokens has {targets[wrong[0]]:g} at position "
            f"{wrong[0]}, which is no token id"
        )
    floats = {name: values.astype("<f4") for name, values in fields.items()}
    return Datum(ids, target_ids, floats, np.full(len(ids), NOT_SAMPLED, "<i4"))


def _parse_array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ConfigError(f"{where}: {len(data)} bytes are not a whole number of values")
    return np.frombuffer(data, dtype)


def parse_step(body: bytes) -> tuple[Any, ...]:
    """Decode an optim_step call: the arguments of `TrainedModel.step`.  Raises ConfigError."""
    params = parse_json(sdk.OptimStepRequest, body).optim_params
    if not isinstance(params, sdk.AdamParams):
        raise ConfigError(f"optimizer_params.type = {params.type}: only AdamW is served")
    for name, lowest, end in ADAM_RANGES:
        if not lowest <= (value := getattr(params, name)) < end:
            raise ConfigError(f"{name} = {value:g}: must be at least {lowest:g} and below {end:g}")
    return (
        params.learning_rate,
        (params.beta1, params.beta2),
        params.eps,
        params.weight_decay,
        max(0.0, params.grad_clip_norm),
    )


def parse_sample_request(
    request: sdk.SampleRequest,
    version: WeightsVersion,
    *,
    stop_tokens: Sequence[int],
    limit: int,
    default: int,
    vocabulary: int,
    seed: int,
    ticket: int,
) -> SampleCall:
    """Convert an asample call.

    Args:
        version: the sampler's weights.
        stop_tokens: the model's own stop tokens.
        limit: length of prompt and sequence together.
        default: length of a sequence whose request sets none.
        vocabulary: number of tokens.
        seed, ticket: select the random stream, so that a repeated call samples the same.

    Raises ConfigError for a request that is not served or does not fit."""
    for name in UNSERVED.split():
        if getattr(request, name, None):
            raise ConfigError(f"{name}: is not served")
    ids: list[int] = []
    for chunk in request.prompt.chunks:
        tokens = getattr(chunk, "tokens", None)
        if tokens is None:
            raise ConfigError(f"prompt: {type(chunk).__name__} is not served, only text")
        ids += tokens
    params = request.sampling_params
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
    longest = limit - len(ids)
    length = default if params.max_tokens is None else params.max_tokens
    if length < 1:
        raise ConfigError(f"max_tokens = {length}: must be at least 1")
    if longest < 1 or (params.max_tokens is not None and length > longest):
        raise ConfigError(
            f"a prompt of {len(ids)} and max_tokens = {length} do not fit sampling.context = "
            f"{limit} of the server"
        )
    if not 0 < params.top_p <= 1:
        raise ConfigError(f"top_p = {params.top_p:g}: must be above 0 and at most 1")
    if params.temperature != 0 and not COLDEST <= params.temperature <= HOTTEST:
        raise ConfigError(
            f"temperature = {params.temperature:g}: must be 0, for the most likely token, or from "
            f"{COLDEST:g} to {HOTTEST:g}"
        )
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    token_ids = [text for text in stops if isinstance(text, int)]
    is_endless = params.stop is not None and not stops
    ends = [] if is_endless else dict.fromkeys([*stop_tokens, *token_ids])
    greedy = params.temperature == 0
    return SampleCall(
        version,
        CompletionRequest(
            key=(ticket, 0, 0),
            prompt=np.array(ids, "<i4"),
            group=0,
            max_new_tokens=min(length, longest),
            temperature=1.0 if greedy else params.temperature,
            top_p=params.top_p,
            top_k=1 if greedy else max(0, params.top_k),
            stop=tuple(ends) or (-1,),
            seed=seed,
        ),
        request.num_samples,
        [text for text in stops if isinstance(text, str) and text],
        bool(request.prompt_logprobs),
        request.topk_prompt_logprobs,
    )


def encode_samples(result: SampleResult) -> bytes:
    """Encode the result of an asample call."""
    message = pb.SampleResponse()
    for sequence in result.sequences:
        encoded = message.sequences.add()
        encoded.stop_reason = pb.STOP_REASON_STOP if sequence.stop else pb.STOP_REASON_LENGTH
        encoded.tokens = sequence.tokens
        encoded.logprobs = sequence.logprobs
    message.prompt_logprobs = result.prompt_logprobs
    if result.topk_ids:
        message.topk_prompt_logprobs.CopyFrom(
            pb.TopkLogprobs(
                token_ids=result.topk_ids,
                logprobs=result.topk_logprobs,
                k=len(result.topk_ids) // len(result.prompt_logprobs),
                length=len(result.prompt_logprobs) // 4,
            )
        )
    return bytes(message.SerializeToString())


def encode_scores(result: ScoreResult, loss: str = "", requested: str = "") -> bytes:
    """Encode the result of a forward_backward call.

    A metric says so if `loss` was computed and the client requested another."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn")
    message.metrics["loss:sum"] = result.loss
    if loss != requested:
        message.metrics[f"{requested}_computed_as_{loss}:max"] = 1.0
    record = message.loss_fn_outputs.add()
    rows = [row.tobytes() for row in result.logprobs]
    record.num_datums = len(rows)
    tensor = record.fields["logprobs"]
    tensor.data = b"".join(rows)
    tensor.offsets = np.cumsum([0, *map(len, rows)], dtype="<i8").tobytes()
    tensor.dtype = pb.DTYPE_FLOAT32
    return bytes(message.SerializeToString())
