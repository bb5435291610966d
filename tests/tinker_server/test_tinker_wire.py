"""Messages and files of the Tinker server, without a server: the calls on disk, saved weights, and
what a request's body may hold."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tinker.types as sdk
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.contract.errors import ConfigError
from asyncrl.tinker import model_records, wire
from asyncrl.tinker.messages import SampleResult, ScoreResult, SequenceResult
from asyncrl.tinker.model_records import CallLog, TrainingCall, TrainingOutcome, find_saved


def refusal(function: Any, *values: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as error:
        function(*values, **named)
    return str(error.value)


def test_calls_and_outcomes_are_read_as_written(tmp_path: Path) -> None:
    assert TrainingOutcome() == TrainingOutcome(
        *(b"", False, "", "user", 0, 0, {}, {}, [], b"", None, {}, {})
    )
    log = CallLog(tmp_path / "new" / "model")
    assert CallLog(tmp_path / "new" / "model").list_numbers("call") == []
    call, outcome = TrainingCall(12, "optim_step", b"{}"), TrainingOutcome(b"r", version=3)
    log.write(12, "call", call)
    log.write(7, "outcome", outcome)
    assert log.read_call(12) == call and log.read_outcome(7) == outcome
    assert log.read_call(7) is None and log.read_outcome(12) is None
    assert (log.list_numbers("call"), log.list_numbers("outcome")) == ([12], [7])
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert names == ["new/model/calls/000000007.outcome", "new/model/calls/000000012.call"]
    path = log.locate_checkpoint(12, 3)
    assert path == tmp_path / "new" / "model" / "checkpoints" / "000000012-3"


def test_the_last_two_checkpoints_and_what_they_do_not_cover_stay(tmp_path: Path) -> None:
    log = CallLog(tmp_path)

    def begin(*checkpoints: tuple[int, int]) -> None:
        for number in range(8):
            log.write(number, "call", TrainingCall(number, "optim_step", b""))
            log.write(number, "outcome", TrainingOutcome())
        for number, version in checkpoints:
            log.locate_checkpoint(number, version).mkdir()

    every = list(range(8))
    begin()
    log.prune()
    assert (log.list_numbers("call"), log.list_numbers("outcome")) == (every, every)
    begin((1, 1))
    log.prune()
    assert (log.list_numbers("call"), log.list_numbers("outcome")) == ([0, *range(2, 8)], every)
    begin((3, 1))  # outcomes that the one before covers go with the second checkpoint
    log.prune()
    assert log.list_numbers("call") == [0, *range(4, 8)]
    assert log.list_numbers("outcome") == [0, *range(2, 8)]
    begin((5, 10), (5, 9))
    (tmp_path / "checkpoints" / "5-new").mkdir()
    (tmp_path / "checkpoints" / "new-5").mkdir()
    assert log.list_checkpoints() == [(1, 1), (3, 1), (5, 9), (5, 10)]
    assert log.prune() == log.measure() == sum(path.stat().st_size for path in log.calls.iterdir())
    assert log.list_checkpoints() == [(5, 9), (5, 10)]
    assert (log.list_numbers("call"), log.list_numbers("outcome")) == ([0, 6, 7], [0, 6, 7])


def test_saved_weights_are_found_by_their_path(tmp_path: Path) -> None:
    saved = model_records.SavedWeights("s:train:0@7", 2, 3, {"a": 1}, 4.0)
    folder = tmp_path / "s-train-0" / "weights"
    folder.mkdir(parents=True)
    (folder / "a.1.json").write_bytes(msgspec.json.encode(saved))
    path = "tinker://s:train:0/weights/a.1"
    assert find_saved(tmp_path, path) == (folder / "a.1", saved) and saved.call < 0
    assert find_saved(tmp_path, path, "weights") == (folder / "a.1", saved)
    other = "tinker://s:train:0/sampler_weights/a.1"
    assert refusal(find_saved, tmp_path, other, "weights") == (
        f"{other} has no optimizer: training can continue only from tinker://MODEL/weights/"
    )
    assert refusal(find_saved, tmp_path, other) == f"{other}: this server has no such weights"
    for bad in (f"{path}/x", f"{path} ", "tinker://s/weights/.a", "tinker://s/other/a", "a"):
        assert refusal(find_saved, tmp_path, bad) == (
            f"{bad} is not a path of saved weights: tinker://MODEL/weights/NAME"
        )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[]", "is not a JSON object: Expected `object`, got `array`"),
        (b"{", "is not a JSON object: Input data was truncated"),
        (b'{"a": NaN}', "is not a JSON object: JSON is malformed: invalid character (byte 6)"),
        (b'{"a": 1e999}', "is not a JSON object: Number out of range"),
        (b'{"a": 9223372036854775808}', ": a whole number has more than 64 bits"),
        (b'{"a": [{"b": [0, -9223372036854775809]}]}', ": a whole number has more than 64 bits"),
        (b'{"a": "\\ud800"}', "is not a JSON object: "),
        (b"\xff", "is not a JSON object: "),
        (b'{"a": "\xff"}', "is not a JSON object: 'utf-8' codec can't decode byte 0xff"),
        (b'{"a":' + b"[" * 5000, "is not a JSON object: maximum recursion depth"),
        (b"{}" + b" " * (4 << 20), ": 4194306 bytes of JSON, more than 4194304"),
        (b'{"a": [' + b'"",' * 4095 + b"{}]}", ": over 4096 values that are no whole numbers"),
        (b'{"a": {"b": [' + b"[],1," * 4096 + b"1]}}", ": over 4096 values that are no whole"),
    ],
)
def test_bodies_that_are_no_object_are_refused(body: bytes, why: str) -> None:
    assert refusal(wire.parse_object, body).removeprefix("the body").strip().startswith(why)


def test_bodies_of_the_largest_numbers_are_read() -> None:
    body = b'{"a": 9223372036854775807, "b": -9223372036854775808, "c": 1.5, "d": "\\u00e9"}'
    assert wire.parse_object(body) == {"a": 2**63 - 1, "b": -(2**63), "c": 1.5, "d": "é"}
    assert wire.parse_object(b"") == {} == wire.parse_object(b"{}" + b" " * ((4 << 20) - 2))
    others = {"a": [None] * 4094 + [1], "b": True}
    assert wire.parse_object(json.dumps(others).encode()) == others


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"eps": 0.0}, "eps = 0: must be at least 1e-30"),
        ({"eps": 1e-300}, "eps = 1e-300: must be at least 1e-30"),
        ({"beta1": 1.0}, "beta1 = 1: must be at least 0 and below 1"),
        ({"beta2": 1.0}, "beta2 = 1: must be at least 0 and below 1"),
        ({"beta2": -0.5}, "beta2 = -0.5: must be at least 0 and below 1"),
        ({"learning_rate": -0.5}, "learning_rate = -0.5: must be at least 0"),
        ({"learning_rate": LARGEST}, "learning_rate = 3.40282e+38: must be at least 0"),
        ({"weight_decay": 1e300}, "weight_decay = 1e+300: must be at least 0"),
        ({"weight_decay": -0.5}, "weight_decay = -0.5: must be at least 0"),
        ({"grad_clip_norm": 1e300}, "grad_clip_norm = 1e+300: must be at least -3.40282e+38"),
        ({"type": "muon"}, "optimizer_params.type = muon: only AdamW is served"),
    ],
)
def test_adamw_numbers_that_ruin_weights_are_refused(numbers: dict[str, Any], message: str) -> None:
    values = {"model_id": "m", "seq_id": 1, "adam_params": numbers}
    assert message in refusal(wire.parse_step, json.dumps(values).encode())


def test_a_step_takes_the_numbers_of_its_call() -> None:
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay")
    for numbers, norm, clipped in (
        ((0.0, 0.0, 0.0, 1e-30, 0.0), -LARGEST, 0.0),
        ((3e38, 0.5, 0.75, 0.125, 3e38), 0.5, 0.5),
    ):
        adam = dict(zip(names, numbers, strict=True)) | {"grad_clip_norm": norm}
        body = json.dumps({"model_id": "x", "seq_id": 1, "adam_params": adam}).encode()
        rate, beta1, beta2, *others = numbers
        assert wire.parse_step(body) == (rate, (beta1, beta2), *others, clipped)


def sample_call(prompt: list[int], **more: Any) -> Any:
    """The call of a request for samples, to a model of 50 tokens that reads 16."""
    params = {name: more.pop(name) for name in set(more) & set(sdk.SamplingParams.model_fields)}
    request = sdk.SampleRequest(
        prompt=sdk.ModelInput.from_ints(prompt),
        sampling_params=sdk.SamplingParams(**params),
        **more,
    )
    return wire.parse_sample_request(
        request,
        ("", "", 0),
        **{"stop_tokens": (1, 2), "limit": 16, "default": 9, "vocabulary": 50},
        **{"seed": 3, "ticket": 4},
    )


def test_a_request_for_samples_is_converted_whole() -> None:
    call = sample_call([3, 49])
    assert (call.version, call.count, call.texts, call.prompt_logprobs, call.prompt_topk) == (
        *(("", "", 0), 1, [], False, 0),
    )
    first = dataclasses.asdict(call.first)
    wanted = {"key": (4, 0, 0), "max_new_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    wanted |= {"stop": (1, 2), "seed": 3}
    assert {name: first[name] for name in wanted} == wanted and first["prompt"].tolist() == [3, 49]
    call = sample_call(
        [3], num_samples=4, prompt_logprobs=True, topk_prompt_logprobs=32,
        max_tokens=15, temperature=0.0, top_p=0.5, top_k=7, stop=[7, 1, 7],
    )  # fmt: skip
    assert (call.count, call.texts, call.prompt_logprobs, call.prompt_topk) == (4, [], True, 32)
    first = dataclasses.asdict(call.first)
    wanted = {"max_new_tokens": 15, "temperature": 1.0, "top_p": 0.5, "top_k": 1, "stop": (1, 2, 7)}
    assert {name: first[name] for name in wanted} == wanted, "0 is greedy"
    assert sample_call([3], temperature=0.5, top_k=7).first.top_k == 7
    assert sample_call([3] * 10).first.max_new_tokens == 6, "what is left of the context"
    assert sample_call([3], stop="x").texts == ["x"]
    assert sample_call([3], stop=[]).first.stop == (-1,), "no token ends it"


TOO_LONG = "a prompt of {} and max_tokens = {} do not fit sampling.context = 16 of the server"


@pytest.mark.parametrize(
    ("prompt", "more", "why"),
    [
        ([], {}, "prompt: is empty"),
        ([50], {}, "prompt: has a token outside the vocabulary of 50"),
        ([-1], {}, "prompt: has a token outside the vocabulary of 50"),
        ([3], {"topk_prompt_logprobs": 33}, "topk_prompt_logprobs: must be from 0 to 32"),
        ([3], {"topk_prompt_logprobs": -1}, "topk_prompt_logprobs: must be from 0 to 32"),
        ([3], {"num_samples": 0}, "num_samples: 0 must be from 1 to 1024 in one request"),
        ([3], {"num_samples": 1025}, "num_samples: 1025 must be from 1 to 1024 in one request"),
        ([3], {"max_tokens": 0}, "max_tokens = 0: must be at least 1"),
        ([3], {"max_tokens": 16}, TOO_LONG.format(1, 16)),
        ([3] * 16, {}, TOO_LONG.format(16, 9)),
        *(
            ([3], {name: 1}, f"{name}: is not served")
            for name in ("topk_sample_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n")
        ),
        ([3], {"top_p": 0.0}, "top_p = 0: must be above 0 and at most 1"),
        *(
            (
                [3],
                {"temperature": temperature},
                f"temperature = {temperature:g}: must be 0, for the most likely token, or from "
                "1e-06 to 1e+06",
            )
            for temperature in (math.nan, 1e-40, 1e-300, -1.0, math.inf)
        ),
    ],
)
def test_samples_that_cannot_be_had(prompt: list[int], more: dict[str, Any], why: str) -> None:
    assert refusal(sample_call, prompt, **more) == why


def tensor(values: list[float], dtype: str = "<f4", code: int = 0, **more: Any) -> pb.Tensor:
    dense = np.array(values, dtype).tobytes()
    return pb.Tensor(dtype=code or pb.DTYPE_FLOAT32, dense=dense, shape=[len(values)], **more)


def loss_request(**fields: pb.Tensor | None) -> pb.ForwardBackwardRequest:
    """One datum of two tokens, each in its own chunk."""
    inputs = {"target_tokens": tensor([6, 7], "<i8", pb.DTYPE_INT64)} | fields
    datum = pb.Datum(loss_fn_inputs={name: x for name, x in inputs.items() if x is not None})
    for token in (5, 6):
        datum.model_input.add().encoded_text.tokens = np.array([token], "<i4").tobytes()
    return pb.ForwardBackwardRequest(data=[datum])


@pytest.mark.parametrize(
    ("dtype", "code", "token"),
    [
        ("<i8", pb.DTYPE_INT64, 2**32 + 3),
        ("<f4", pb.DTYPE_FLOAT32, 3.7),
        ("<i8", pb.DTYPE_INT64, -(2**31) - 1),
    ],
)
def test_a_target_that_is_no_token_id_is_refused(dtype: str, code: int, token: float) -> None:
    """4294967299 would train token 3."""
    message = loss_request(target_tokens=tensor([5, token], dtype, code))
    refused = refusal(wire.parse_loss_call, message)
    assert refused.startswith("datum 0: loss_fn_inputs.target_tokens has ")
    assert refused.endswith(" at position 1, which is no token id")


def test_options_of_a_loss_are_numbers_and_texts() -> None:
    message = pb.ForwardBackwardRequest(loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    message.loss_fn_config_v2["method"].text = "dapo"
    message.loss_fn_config_v2["loss.eps_high"].number = 0.25
    call = wire.parse_loss_call(message)
    assert call.options == {"clip_low_threshold": 0.5, "method": "dapo", "loss.eps_high": 0.25}
    assert (call.loss, call.forward_only) == ("ppo", False)


def test_a_datum_is_decoded_whole() -> None:
    ones = tensor([1, 1], "<i4", pb.DTYPE_INT32)
    message = loss_request(weights=tensor([0.5, -1]), mask=ones)
    [found] = wire.parse_loss_call(message).data
    columns = {"tokens": found.tokens, "targets": found.targets, "lags": found.lags}
    rows = {name: (x.dtype.str, x.tolist()) for name, x in (columns | found.fields).items()}
    assert rows == {
        **{"tokens": ("<i4", [5, 6]), "targets": ("<i4", [6, 7]), "lags": ("<i4", [-2, -2])},
        **{"weights": ("<f4", [0.5, -1]), "mask": ("<f4", [1, 1])},
    }
    del message.data[0].model_input[:]
    assert refusal(wire.parse_loss_call, message) == "datum 0: model_input is empty"


DENSE = "weights: only dense tensors of one dimension are served"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"target_tokens": None}, "target_tokens is missing"),
        ({"weights": tensor([1, 1], code=99)}, "weights: its data type 99 is not served"),
        ({"weights": tensor([1, 1, 1])}, "weights has 3 values for 2 tokens"),
        ({"weights": tensor([1, math.nan])}, "weights has a value that is not finite"),
        (
            {"weights": tensor([1, 1, 1], "<i1")},
            "weights: 3 bytes are not a whole number of values",
        ),
        ({"weights": pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=bytes(8), shape=[1, 2])}, DENSE),
        ({"weights": pb.Tensor(dtype=pb.DTYPE_FLOAT32, sparse_csr={})}, DENSE),
    ],
)
def test_fields_of_a_datum_are_checked(fields: dict[str, Any], why: str) -> None:
    message = loss_request(**fields)
    assert refusal(wire.parse_loss_call, message) == f"datum 0: loss_fn_inputs.{why}"
    message.data[0].model_input.add()
    assert "model_input has an empty chunk; only" in refusal(wire.parse_loss_call, message)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"seq_id": True}, "seq_id"),
        ({"sampling_params": {"temperature": "nan"}}, "temperature"),
        ({"prompt": {"chunks": [{"tokens": [3.0]}]}}, "tokens"),
        ({"prompt": {"chunks": [{"tokens": ["3"] * 101}]}}, " errors"),
    ],
)
def test_a_value_of_another_type_is_refused(values: dict[str, Any], field: str) -> None:
    given = {"sampling_params": {}, "prompt": {"chunks": [{"tokens": [3]}]}} | values
    assert field in refusal(wire.parse_json, sdk.SampleRequest, json.dumps(given).encode())


def test_the_result_of_a_loss_has_all_logprobs_in_one_tensor() -> None:
    rows = [np.array(row, "<f4") for row in ([-1.0, -2.0], [-3.0])]
    message = pb.ForwardBackwardOutput()
    message.ParseFromString(wire.encode_scores(ScoreResult(logprobs=rows, loss=1.5)))
    assert message.loss_fn_output_type == "TorchLossReturn"
    assert dict(message.metrics) == {"loss:sum": 1.5}
    (record,) = message.loss_fn_outputs
    field = record.fields["logprobs"]
    assert (record.num_datums, field.dtype) == (2, pb.DTYPE_FLOAT32)
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(field.data, "<f4").tolist() == [-1.0, -2.0, -3.0]


def test_the_result_of_a_request_to_sample_has_the_most_likely_tokens() -> None:
    def pack(*values: float, dtype: str = "<f4") -> bytes:
        return np.array(values, dtype).tobytes()

    sequences = [SequenceResult(pack(5, dtype="<i4"), pack(-1.0), i) for i in (True, False)]
    result = SampleResult(
        sequences, pack(np.nan, -2), pack(0, 0, 3, 4, dtype="<i4"), pack(0, 0, -1, -3)
    )
    message = pb.SampleResponse.FromString(wire.encode_samples(result))
    assert [(x.tokens, x.logprobs) for x in message.sequences] == [
        (pack(5, dtype="<i4"), pack(-1.0))
    ] * 2
    ends = [pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH]
    assert [sequence.stop_reason for sequence in message.sequences] == ends
    top = message.topk_prompt_logprobs
    assert (top.k, top.length, message.prompt_logprobs) == (2, 2, result.prompt_logprobs)
    assert (top.token_ids, top.logprobs) == (result.topk_ids, result.topk_logprobs)
