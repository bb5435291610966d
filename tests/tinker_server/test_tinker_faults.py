"""One client's mistake stays that client's: bad numbers, crashed processes, a full disk."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker_local_kit import ADAM, KEY, TUNED, LocalServer, scored

from asyncrl.records import jsonl, metrics
from asyncrl.records.jsonl import JsonlAppender
from asyncrl.records.metrics import MetricsWriter
from asyncrl.tinker import app, models, wire
from asyncrl.tinker.links import WorkerExited
from asyncrl.tinker.messages import FREE_BYTES
from asyncrl.tinker.model_records import CallLog
from asyncrl.tinker.models import ServedModel

PROTOBUF = {"content-type": wire.PROTOBUF}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    local = LocalServer(tmp_path)
    yield local
    local.stop()


@pytest.fixture
def service(server: LocalServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as client:
        yield client


def step(client: tinker.TrainingClient, adam: types.AdamParams = ADAM) -> Any:
    client.forward_backward(TUNED, "cross_entropy")
    return client.optim_step(adam).result()


def crash_on(link: Any, matches: Callable[..., bool]) -> list[Any]:
    """Let the process of a link crash on calls; return the list of those."""
    act, crashes = link.act, []

    def crash(number: int, *call: Any, **options: Any) -> Any:
        if matches(*call):
            crashes.append(call)
            raise WorkerExited("the process ended", crashed=True, oldest=True)
        return act(number, *call, **options)

    link.act = crash
    return crashes


def test_a_call_on_which_the_training_process_crashes_is_not_repeated(
    server: LocalServer, service: tinker.ServiceClient
) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    step(client)
    before = scored(client)
    crashes = crash_on(
        server.training, lambda method, id, rate=0.0, *_: (method, rate) == ("step", 7.0)
    )
    with pytest.raises(tinker.RequestFailedError, match="the process ended") as failed:
        step(client, types.AdamParams(learning_rate=7.0))
    assert failed.value.category == types.RequestErrorCategory.Server and len(crashes) == 1
    assert np.array_equal(scored(client), before)
    assert server.server.models[client.model_id].version == 1


def test_a_step_that_ruins_the_weights_is_undone(
    server: LocalServer, service: tinker.ServiceClient
) -> None:
    """The refused step changes nothing, and its gradient does not reach the next one."""
    clients = [
        service.create_lora_training_client("tiny", rank=2, seed=1).result() for _ in range(2)
    ]
    for client in clients:
        step(client)
    with pytest.raises(tinker.RequestFailedError, match="not finite: it was undone"):
        step(clients[0], types.AdamParams(learning_rate=1e38, weight_decay=1e38))
    for client in clients:
        step(client)
    assert np.array_equal(scored(clients[0]), scored(clients[1]))
    assert [server.server.models[client.model_id].version for client in clients] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_models_begun_from_saved_weights_are_restored(tmp_path: Path, is_damaged: bool) -> None:
    """At a start of the server and of the training process, from the model's own checkpoint.

    Without that, a model must not go on with other weights."""
    server = LocalServer(tmp_path)
    with server.client() as service:
        first = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        step(first)
        path = first.save_state("w").result().path
        begun = service.create_training_client_from_state_with_optimizer(path).result()
        loaded = service.create_lora_training_client("tiny", rank=2, seed=3).result()
        loaded.load_state(path).result()
        expected = [scored(client) for client in (first, begun, loaded)]
        for client in (begun, loaded) if is_damaged else ():
            [checkpoint] = server.server.models[client.model_id].log.checkpoints.iterdir()
            shutil.rmtree(checkpoint)
        tinker.RestClient(base_url=server.url, api_key=KEY).delete_checkpoint(
            first.model_id, "weights/w"
        ).result()
    server.stop()
    server = LocalServer(tmp_path)
    http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY})
    loss = build_loss(server, first)
    loss.forward_only = True
    try:
        for client, before in zip((first, begun, loaded), expected, strict=True):
            model = server.server.models[client.model_id]
            assert (model.version, model.record.model) == (1, client.model_id)
            loss.model_id, loss.seq_id = client.model_id, model.next
            reply = call(http, "forward", loss.SerializeToString())
            if client is not first and is_damaged:
                assert "the newest checkpoint of its weights is gone" in reply.json()["error"]
            else:
                assert before.tobytes() in reply.content
                assert [*model.log.checkpoints.iterdir()] or client is first
    finally:
        server.stop()


def test_saved_weights_leave_room_for_the_steps_of_others(
    server: LocalServer, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = (service.create_lora_training_client("tiny", rank=2).result() for _ in range(2))
    disk = SimpleNamespace(free=FREE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(tinker.RequestFailedError, match=r"w: not saved: .* delete saved w"):
            save("w").result()
    step(other)
    other.save_weights_and_get_sampling_client().result()
    disk.free //= 2
    with pytest.raises(tinker.RequestFailedError, match="less than 512 MiB of the disk free"):
        client.save_weights_and_get_sampling_client().result()
    step(other)
    disk.free //= 2
    body = {"model_id": client.model_id, "seq_id": 4, "adam_params": {}}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}) as http:
        reply = http.post("/optim_step", json=body)
        assert reply.status_code == 503 and "is full: delete saved" in reply.json()["error"]
        disk.free = 2 * FREE_BYTES
        assert "error" not in call(http, "optim_step", body).json()
        body["seq_id"] = 5
        content = json.dumps(body)
        for left, code in ((FREE_BYTES // 4 - 1, 503), (FREE_BYTES // 4, 200)):
            disk.free = left + len(content)
            assert http.post("/optim_step", content=content).status_code == code
        disk.free = 2 * FREE_BYTES
    assert other.save_state("w").result().path


def test_calls_of_one_model_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint covers them, except those of a gradient, which are then refused."""
    monkeypatch.setattr(models, "CALL_BYTES", 2_000)
    server = LocalServer(tmp_path)
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        log = server.server.models[client.model_id].log
        step(client)
        loss = build_loss(server, client)
        for _ in range(30):
            expected = scored(client)
            assert log.measure() < 6_000
        assert {version for _, version in log.list_checkpoints()} == {1}
        with pytest.raises(tinker.RequestFailedError, match="which is too much: call optim_step"):
            for _ in range(30):
                client.forward_backward(TUNED, "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="the step was not made"):
            client.optim_step(ADAM).result()
        for _ in range(2):  # the second one when the files of the first are pruned
            assert np.array_equal(scored(client), expected)
        assert log.measure() < 6_000
        step(client)
        expected = scored(client)
        server.training.kill()
        server.training.generation += 1
        assert np.array_equal(scored(client), expected)
        with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}) as http:
            reply: dict[str, Any] = {}
            while "which is too much" not in reply.get("error", ""):
                loss.seq_id = server.server.models[client.model_id].next
                refused = loss.SerializeToString()
                result = call(http, "forward_backward", refused)
                reply = {} if result.headers["content-type"] == wire.PROTOBUF else result.json()
            # its body was not kept: a repeated request is the same call all the same
            assert call(http, "forward_backward", refused).json() == reply
            kept = log.read_call(loss.seq_id)
            assert kept is not None and kept.body == b""
    server.stop()


def build_loss(server: LocalServer, client: tinker.TrainingClient) -> pb.ForwardBackwardRequest:
    first = server.server.models[client.model_id].log.read_call(1)
    assert first is not None
    return pb.ForwardBackwardRequest.FromString(first.body)


def call(http: httpx.Client, route: str, body: bytes | dict[str, Any]) -> httpx.Response:
    if isinstance(body, dict):
        promise = http.post(f"/{route}", json=body)
    else:
        promise = http.post(f"/{route}", content=body, headers=PROTOBUF)
    assert promise.status_code == 200, promise.text
    while True:
        asked = {"request_id": promise.json()["request_id"]}
        reply = http.post("/retrieve_future", json=asked, timeout=600)
        if reply.status_code != 408:
            return reply


def test_a_save_that_a_killed_server_did_not_answer_is_made_again(
    server: LocalServer, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights and their record are on disk, the result is not."""
    client = service.create_lora_training_client("tiny", rank=2).result()
    model = server.server.models[client.model_id]
    perform = model._perform

    async def perform_twice(*promised: Any) -> Any:
        await perform(*promised)
        return await perform(*promised)

    monkeypatch.setattr(model, "_perform", perform_twice)
    assert client.save_state("a").result().path == f"tinker://{client.model_id}/weights/a"
    assert client.save_weights_for_sampler("a").result().path.endswith("/sampler_weights/a")
    monkeypatch.undo()
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(tinker.RequestFailedError, match="weights a exist already: choose an"):
            save("a").result()
    (model.folder / "weights" / "half").mkdir()  # written by a process that was killed
    assert client.save_state("half").result().path.endswith("/weights/half")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "skipped"),
    [
        (CallLog, "write", 0),  # the outcome of the loss
        (CallLog, "write", 1),  # of the step
        (MetricsWriter, "write", 0),
        (JsonlAppender, "write", 1),  # the row of trained.jsonl, after that of metrics.jsonl
        (ServedModel, "write_ledger", 0),
    ],
)
def test_a_server_that_cannot_write_ends_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, skipped: int
) -> None:
    """It must not go on with a step that is made and not counted."""
    monkeypatch.setattr(app, "LEDGER_S", 600.0)  # files are written for the step alone
    server = LocalServer(tmp_path)
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        step(client)
    write, calls = getattr(owner, method), []

    def fail_once(self: Any, *values: Any, **named: Any) -> Any:
        if "call" in values:  # arrives: CallLog's other kind
            return write(self, *values, **named)
        calls.append(self)
        if len(calls) == skipped + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *values, **named)

    monkeypatch.setattr(owner, method, fail_once)
    loss = build_loss(server, client)
    loss.seq_id = 3
    adam = {"model_id": client.model_id, "seq_id": 4, "adam_params": {}}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}) as http:
        http.post("/optim_step", json=adam)
        http.post("/forward_backward", content=loss.SerializeToString(), headers=PROTOBUF)
    server.thread.join(600)
    assert not server.thread.is_alive() and isinstance(server.server.failure, OSError)
    monkeypatch.undo()
    server = LocalServer(tmp_path)
    model = server.server.models[client.model_id]
    http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY})
    try:
        for number in (5, 6):  # calls 1 to 4 are made by then
            body = {"model_id": client.model_id, "seq_id": number, "adam_params": {}}
            assert "error" not in call(http, "optim_step", body).json()
        rows = jsonl.read(model.folder / "trained.jsonl")
        assert [(row["batch"], row["call"]) for row in rows] == [(0, 2), (1, 4), (2, 5), (3, 6)]
        assert [row["step"] for row in metrics.read(model.folder)] == [0, 1, 2, 3]
        trained = server.trainer.models[client.model_id]
        steps = {int(state["step"]) for state in trained.trainer.optimizer.state.values()}
        assert (model.version, steps) == (4, {2})  # steps without a gradient change no moment
    finally:
        server.stop()
