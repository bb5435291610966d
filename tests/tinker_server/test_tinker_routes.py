"""Routes of the Tinker API on a server in this process, by plain HTTP and by the client."""

import asyncio
import errno
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import tinker
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient
from tinker import types
from tinker_kit import draw, prompt
from tinker_local_kit import KEY, TUNED, LocalServer

from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write
from asyncrl.tinker import app, samplers, wire
from asyncrl.tinker.links import WorkerExited
from asyncrl.tinker.messages import CallFailure
from asyncrl.tinker.model_records import CallLog, build_folder_name
from asyncrl.tinker.sequences import SequenceLedger
from asyncrl.transport.connection_guard import raise_descriptor_limit


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    local = LocalServer(tmp_path_factory.mktemp("tinker"), "server.body_mib=1", "restarts=1")
    yield local
    local.stop()


@pytest.fixture(scope="module")
def service(server: LocalServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as client:
        yield client


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}) as client:
        yield client


def error(reply: httpx.Response, code: int) -> str:
    assert reply.status_code == code, reply.text
    return str(reply.json()["error"])


def step_call(http: httpx.Client, model: str, number: int) -> dict[str, Any]:
    body = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 0.0}}
    reply: dict[str, Any] = http.post("/optim_step", json=body).json()
    return reply


def test_a_result_is_waited_for_in_one_request(
    http: httpx.Client, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request for a result is answered when the result is there, not before."""
    client = service.create_lora_training_client("tiny", rank=2).result()
    early = step_call(http, client.model_id, 2)
    waiting = threading.Event()
    wait = app._wait

    def noted(*waited: Any) -> Any:
        waiting.set()
        return wait(*waited)

    monkeypatch.setattr(app, "_wait", noted)
    monkeypatch.setattr(app, "POLL_S", 600.0)
    with ThreadPoolExecutor(1) as pool:
        asked = {"request_id": early["request_id"]}
        result = pool.submit(http.post, "/retrieve_future", json=asked, timeout=600)
        assert waiting.wait(600) and not result.done()
        step_call(http, client.model_id, 1)
        reply = result.result(600)
    assert (reply.status_code, reply.json()["type"]) == (200, "optim_step")


def test_every_route_wants_the_key(server: LocalServer, http: httpx.Client) -> None:
    for given in (None, "", "tml-other", KEY + "x", "\xfc"):
        headers = {} if given is None else {"X-API-Key": given.encode("latin-1")}
        for method, path in (
            *(("POST", "asample"), ("POST", "forward_backward"), ("POST", "create_session")),
            *(("GET", "healthz"), ("GET", "training_runs"), ("POST", "client/config")),
            ("DELETE", "training_runs/m/checkpoints/weights/x"),
        ):
            reply = httpx.request(method, f"{server.url}/api/v1/{path}", headers=headers)
            assert error(reply, 401) == (
                "X-API-Key is not this server's key: set TINKER_API_KEY to the content of its file "
                "api_key"
            )
    assert http.get("/healthz").json() == {"status": "ok"}
    reply = http.post("/session_heartbeat", json={"session_id": "s-1"})
    assert reply.json() == {"type": "session_heartbeat"}


def test_bodies_are_checked(http: httpx.Client) -> None:
    plain = {"content-type": "application/json"}
    protobuf = {"content-type": "application/x-protobuf"}
    reply = http.post("/asample", content=b"", headers={"content-encoding": "zstd"})
    assert "Content-Encoding: zstd is not served" in error(reply, 415)
    reply = http.post("/forward_backward", content=b"{}", headers=plain)
    assert "update the client" in error(reply, 415)
    full = b"{" + b" " * (2**20 - 2) + b"}"
    assert http.post("/telemetry", content=full).status_code == 200
    assert "more than 1048576 bytes (server.body_mib)" in error(
        http.post("/telemetry", content=full + b" "), 413
    )
    for content in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x00"):
        reply = http.post("/forward_backward", content=content, headers=protobuf)
        assert "not a ForwardBackwardRequest" in error(reply, 400)
    reply = http.post("/forward", content=b"", headers=protobuf)
    assert "no such model" in error(reply, 400)
    assert "the body" in error(http.post("/optim_step", content=b"[1]", headers=plain), 400)
    step = {"model_id": "s-0:train:0", "seq_id": 1, "adam_params": {"learning_rate": 0.0}}
    for wrong in ({"seq_id": True}, {"model_id": ["s-0"]}, {"seq_id": None}):
        reply = http.post("/optim_step", json=step | wrong)
        assert "model_id, a text, and seq_id, a whole number" in error(reply, 400)
    assert http.post("/nowhere", content=b"").status_code == 404
    assert http.get("/asample").status_code == 405


def test_calls_are_numbered(http: httpx.Client, service: tinker.ServiceClient) -> None:
    model = service.create_lora_training_client("tiny", rank=2).result().model_id
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.0}}
    for number, message in ((0, "numbered from 1"), (10_002, "far ahead of the next one, 1")):
        assert message in error(http.post("/optim_step", json=step | {"seq_id": number}), 400)
    assert http.post("/optim_step", json=step | {"seq_id": 10_001}).status_code == 200
    failures = [OSError(errno.ENOSPC, "No space left on device")]

    def fail_once(self: CallLog, *entry: Any) -> None:
        if failures:
            raise failures.pop()
        write(self, *entry)

    write = CallLog.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallLog, "write", fail_once)
        assert "No space left" in error(http.post("/optim_step", json=step), 503)
        for _ in range(2):  # repeated: the same call
            promise = http.post("/optim_step", json=step).json()
    result = http.post("/retrieve_future", json={"request_id": promise["request_id"]})
    assert result.json()["type"] == "optim_step"
    other = http.post("/optim_step", json=step | {"adam_params": {"learning_rate": 1.0}})
    assert "seq_id 1" in error(other, 400) and "was another call" in error(other, 400)
    for name in (f"{model}:call:first", "lost:sample:1"):
        reply = http.post("/retrieve_future", json={"request_id": name})
        assert "is not known here any more" in error(reply, 410)


def test_an_unexpected_error_costs_its_own_call(
    http: httpx.Client, service: tinker.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    model = service.create_lora_training_client("tiny", rank=2).result().model_id
    results = []
    for number in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            if number == 1:
                patch.setattr(wire, "parse_step", lambda *_: [].pop())
            promise = step_call(http, model, number)
            reply = http.post("/retrieve_future", json={"request_id": promise["request_id"]})
            results.append(reply.json())
    assert results[0] == {"error": "IndexError('pop from empty list')", "category": "server"}
    assert results[1]["type"] == "optim_step"
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.getMessage() == f"{model}, call 1, optim_step"


def test_what_clients_read_of_server_models_and_samplers(
    server: LocalServer, http: httpx.Client, service: tinker.ServiceClient
) -> None:
    assert [(link.role, link.config_path, link.log) for link in server.links] == [
        (role, server.folder / "tinker.toml", server.folder / "logs" / f"{role}.log")
        for role in ("training", "sampling")
    ]
    [shown] = http.get("/get_server_capabilities").json()["supported_models"]
    assert shown["model_name"] == server.config.model.path
    got = (shown["max_context_length"], shown["trainable"], shown["sampleable"])
    assert got == (128, True, True)
    client = service.create_lora_training_client("tiny", rank=3, user_metadata={"a": "b"}).result()
    assert service.create_lora_training_client("tiny", rank=1).result().get_info().is_lora
    sampler = client.save_weights_for_sampler("kept").result().path
    state = client.save_state("state").result().path
    rest = service.create_rest_client()
    assert rest.get_training_run(client.model_id).result().user_metadata == {"a": "b"}
    for path in (f"training_runs/{client.model_id}x", "samplers/none"):
        assert "this server has no" in error(http.get(f"/{path}"), 404)
    named = service.create_sampling_client(model_path=sampler).result()
    seeded = types.SamplingParams(max_tokens=5, seed=3)
    trained = service.create_sampling_client(model_path=state).result()
    results = [client.sample(prompt(), 1, seeded).result() for client in (named, trained)]
    assert len({str(result.sequences[0].tokens) for result in results}) == 1
    known = http.get(f"/samplers/{named._sampling_session_id}").json()
    assert (known["base_model"], known["model_path"]) == (server.config.model.path, sampler)
    joined = [
        http.post("/join_sampling_session", json={"sampling_session_id": known["sampler_id"]})
        for _ in range(2)
    ]
    assert [reply.json()["client_counter"] for reply in joined] == [1, 2]
    asked = {"session_id": known["sampler_id"].partition(":")[0], "sampling_session_seq_id": 77}
    for other, code in ((sampler, 200), (sampler, 200), (state, 400)):
        reply = http.post("/create_sampling_session", json=asked | {"model_path": other})
        assert reply.status_code == code, reply.text
    assert "sampling_session_seq_id 77" in reply.json()["error"]
    fork = service.create_training_client_from_state(state).result()
    models = server.server.models
    assert models[fork.model_id].record.version == models[client.model_id].version
    rest.delete_checkpoint(client.model_id, "weights/state").result()
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [sampler]
    assert not models[client.model_id].folder.joinpath("weights", "state").exists()
    with pytest.raises(tinker.BadRequestError, match="state"):
        service.create_training_client_from_state(state).result()


def test_replies_have_all_fields_of_the_api(
    server: LocalServer, http: httpx.Client, service: tinker.ServiceClient
) -> None:
    """This client reads only some of them."""
    client = service.create_lora_training_client("tiny", rank=2).result()
    name, path = client.model_id, server.config.model.path
    state = client.save_state("w").result().path
    sampler = client.save_weights_for_sampler("v").result().path
    client.load_state(state).result()
    step_call(http, name, 4)
    asked = [{"request_id": f"{name}:call:{number}"} for number in range(5)]
    assert [http.post("/retrieve_future", json=body).json() for body in asked] == [
        {"type": "create_model", "model_id": name},
        {"type": "save_weights", "path": state},
        {"type": "save_weights_for_sampler", "path": sampler},
        {"type": "load_weights", "path": state, "model_id": name},
        {"type": "optim_step", "metrics": {"optim_grad_norm": 0.0, "optim_lr": 0.0}},
    ]
    model = server.server.models[name]
    model.last_request = 60.0
    saved = []
    for kind, seconds, shown in (("weights/w", 1.0, 1), ("sampler_weights/v", 0.0, 0)):
        note = model.folder / f"{kind}.json"
        note.write_text(json.dumps(json.loads(note.read_text()) | {"time": seconds}))
        files = [file for file in (model.folder / kind).rglob("*") if file.is_file()]
        saved.append(
            {
                "checkpoint_id": kind,
                "checkpoint_type": "sampler" if shown == 0 else "training",
                "time": f"1970-01-01T00:00:0{shown}Z",
                "tinker_path": f"tinker://{name}/{kind}",
                "size_bytes": sum(file.stat().st_size for file in files),
            }
        )
    assert http.get(f"/training_runs/{name}/checkpoints").json() == {"checkpoints": saved}
    about = {"base_model": path, "is_lora": True, "lora_rank": 2}
    assert http.post("/weights_info", json={"tinker_path": state}).json() == about
    run = about | {
        "training_run_id": name,
        "model_owner": "local",
        "last_request_time": "1970-01-01T00:01:00Z",
        "last_checkpoint": saved[0],
        "last_sampler_checkpoint": saved[1],
        "user_metadata": None,
    }
    assert http.get(f"/training_runs/{name}").json() == run
    runs = http.get("/training_runs").json()
    assert run in runs["training_runs"]
    count = len(server.server.models)
    assert runs["cursor"] == {"offset": 0, "limit": count, "total_count": count}
    names = {"arch": "causal_lm", "model_name": path, "tokenizer_id": str(server.server.path)}
    assert http.post("/get_info", json={"model_id": name, "type": "get_info"}).json() == {
        **{"type": "get_info", "model_data": names, "model_id": name, "model_name": path},
        **{"is_lora": True, "lora_rank": 2},
    }


LARGE = b" " * wire.INLINE_BYTES + b"{}"
PROTOBUF = {"content-type": wire.PROTOBUF}


@pytest.mark.parametrize(
    ("owner", "name", "ask"),
    [
        (app, "find_saved", lambda http, client: http.get("/training_runs")),
        (wire, "parse_object", lambda http, client: http.post("/get_info", content=LARGE)),
        (
            *(wire, "parse_loss_request"),
            lambda http, client: http.post("/forward", content=LARGE, headers=PROTOBUF),
        ),
        (
            *(SequenceLedger, "resolve"),
            lambda http, client: client.forward(TUNED * 300, "cross_entropy").result(),
        ),
        (CallLog, "write", lambda http, client: client.save_state("v").result()),
        (
            *(CallLog, "prune"),
            lambda http, client: client.load_state(
                f"tinker://{client.model_id}/weights/w"
            ).result(),
        ),
        (
            *(atomic_write, "remove"),
            lambda http, client: http.delete(
                f"/training_runs/{client.model_id}/checkpoints/weights/w"
            ),
        ),
    ],
)
def test_slow_work_for_one_client_stops_no_other(
    http: httpx.Client,
    service: tinker.ServiceClient,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    ask: Callable[[httpx.Client, tinker.TrainingClient], object],
) -> None:
    """Large bodies and losses, and the files of models."""
    client = service.create_lora_training_client("tiny", rank=2).result()
    client.save_state("w").result()
    work, began, goes_on = getattr(owner, name), threading.Event(), threading.Event()

    def wait(*values: Any, **named: Any) -> Any:
        began.set()
        assert goes_on.wait(60)
        return work(*values, **named)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(owner, name, wait)
        asked = pool.submit(ask, http, client)
        assert began.wait(60)
        monkeypatch.undo()
        try:
            assert httpx.get(f"{http.base_url}healthz", headers=http.headers, timeout=30).is_success
        finally:
            goes_on.set()
        asked.result()


def test_clients_are_told_their_transport(server: LocalServer) -> None:
    known = server.config
    try:
        for name, is_rust in (("rust", True), ("python", False)):
            address = msgspec.structs.replace(known.server, client_transport=name)
            server.server.config = msgspec.structs.replace(known, server=address)
            routes = TestClient(server.server.starlette(), headers={"x-api-key": KEY})
            told = routes.post("/api/v1/client/config", json={"sdk_version": "0"}).json()
            assert told == {"use_pyqwest_transport": is_rust}
    finally:
        server.server.config = known
    assert known.server.client_transport == "python"


def test_models_that_cannot_be_created(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
    session = http.post("/create_session", json=new).json()["session_id"]
    good = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    # the folder of a model whose server was killed before it was described
    (server.folder / build_folder_name(f"{session}:train:0")).mkdir()
    full = {"train_mlp": True, "train_attn": True, "train_unembed": True}
    for more, message in (
        ({"session_id": "s-0"}, "session_id = s-0: this server has no such session"),
        ({"base_model": "small"}, "base_model = small: this server has"),
        ({"lora_config": {"rank": 9} | full}, r"rank = 9: the server's largest is lora.rank = 8"),
        ({"lora_config": {"rank": 0} | full}, "rank = 0"),
        ({"lora_config": {"rank": 4} | full | {"train_mlp": False}}, "train_mlp and train_attn"),
        ({"lora_config": {"rank": 4} | full | {"train_attn": False}}, "train_mlp and train_attn"),
        ({"optimizer_config": {"type": "muon"}}, "optimizer_config"),
        ({"user_metadata": {"note": "x" * 2**16}}, "user_metadata: 65548 bytes of JSON, more than"),
        ({"surprise": 1}, "surprise: CreateModelRequest has no such field here"),
        ({"model_seq_id": "x"}, "model_seq_id = 'x': Input should be a valid integer"),
    ):
        assert message in error(http.post("/create_model", json=good | more), 400)
    places = server.server.places
    assert places.total == min(1000, raise_descriptor_limit() // 16)
    [(other, count)] = places.used.most_common(1)
    with monkeypatch.context() as patch:
        patch.setattr(places, "total", len(server.server.models))
        reply = error(http.post("/create_model", json=good), 400)
        left = f"as many as all sessions leave free of {places.total}: it gets no more"
        assert reply == f"{session} has 0 models, {left}"
        patch.setattr(places, "total", places.total + count)  # free: another session finds a place
        hers = good | {"session_id": other, "model_seq_id": 99}
        reply = error(http.post("/create_model", json=hers), 400)
        assert reply.startswith(f"{other} has {count} models, as many as")
        promise = http.post("/create_model", json=good | {"surprise": None, "tags": []}).json()
    assert promise["model_id"] == f"{session}:train:0"
    more = {"model_seq_id": 1, "lora_config": {"rank": 4, "seed": 9} | full}
    http.post("/create_model", json=good | more).raise_for_status()
    records = [server.server.models[f"{session}:train:{number}"].record for number in (0, 1)]
    assert [(record.rank, record.seed) for record in records] == [(8, server.config.seed), (4, 9)]


def test_weights_are_saved_once_by_name(http: httpx.Client, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client("tiny", rank=2).result()
    client.save_state("a").result()
    with pytest.raises(tinker.RequestFailedError, match="weights a exist already"):
        client.save_state("a").result()
    letters, ending = "must be a name of letters", r"not end in \.json or \.part"
    bad = [*((name, letters) for name in ("../up", ".hidden", "a/b", "x" * 129))]
    for name, why in [*bad, ("a.json", ending), ("a.part", ending)]:
        for save in (client.save_state, client.save_weights_for_sampler):
            with pytest.raises(tinker.RequestFailedError, match=why):
                save(name).result()
    client.save_weights_for_sampler("x" * 128).result()
    other = service.create_lora_training_client("tiny", rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="has rank 2, the model has 4"):
        other.load_state(f"tinker://{client.model_id}/weights/a").result()


def test_a_request_to_sample_that_waits_is_canceled(
    server: LocalServer,
    service: tinker.ServiceClient,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samplers = server.server.samplers
    sampler = service.create_sampling_client(base_model="tiny").result()
    pace = samplers.pace
    samplers.pace = lambda record, count: "held by the test"
    try:
        promised = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=2)).future()
        name = f"{sampler._sampling_session_id}:sample:0"
        while not (name in samplers.promises and samplers.promises[name].waits_for):
            assert not promised.done()
        assert samplers.in_flight[""] == 0, "it has not begun"
        assert http.post("/cancel_future", json={"request_id": name}).status_code == 204
        with pytest.raises(tinker.RequestFailedError, match="the request was canceled") as failed:
            promised.result(60)
        assert failed.value.category == types.RequestErrorCategory.User
    finally:
        samplers.pace = pace
    assert http.post("/cancel_future", json={"request_id": "none"}).status_code == 204
    assert draw(sampler, 1)
    # requests without a number are different ones, and each one's bytes are given back
    unnumbered = {
        "sampling_session_id": sampler._sampling_session_id,
        "prompt": prompt().model_dump(),
    }
    unnumbered |= {"sampling_params": {"max_tokens": 2}, "num_samples": 3}
    body, tickets = json.dumps(unnumbered | {"topk_prompt_logprobs": 2}), list[int]()
    act = samplers.link.act

    def note(number: int, method: str, job: Any) -> Any:
        tickets.append(job.first.key[0])
        return act(number, method, job)

    with monkeypatch.context() as patch:
        patch.setattr(samplers.link, "act", note)
        names = {http.post("/asample", content=body).json()["request_id"] for _ in range(3)}
        for name in names:
            http.post("/retrieve_future", json={"request_id": name}).raise_for_status()
    assert len(names) == 3 and names <= samplers.promises.keys()
    assert sorted(tickets) == [*range(samplers.ticket - 2, samplers.ticket + 1)]
    tokens = len(prompt().to_ints())
    size = len(body) + 4096 + 3 * (256 + 8 * 2) + 2 * 2 * 4 * tokens
    assert {samplers.promises[name].size for name in names} == {size}
    assert samplers.shares.used.total() == sum(x.size for x in samplers.promises.values())


def test_room_for_requests_to_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    service: Any = object.__new__(samplers.SamplerService)
    service.shares, service.promises = samplers.SessionShares(100), {}

    def submit(name: str, size: int, *, is_done: bool = False, is_retrieved: bool = False) -> None:
        service._make_room(name[0], size)
        future, owner = SimpleNamespace(done=lambda: is_done), SimpleNamespace(session=name[0])
        promise = SimpleNamespace(future=future, is_retrieved=is_retrieved, sampler=owner)
        service.promises[name] = promise
        promise.size = size

    with pytest.raises(ConfigError, match="lower num_samples or max_tokens"):
        submit("a0", 51)
    submit("a1", 10, is_done=True)  # its client has not fetched it
    submit("a2", 10, is_retrieved=True)  # canceled, but still being sampled
    submit("a3", 20, is_done=True, is_retrieved=True)
    submit("b1", 30)  # half of what is free
    assert len(service.promises) == 4 and service.shares.used == {"a": 40, "b": 30}
    submit("b2", 10)
    assert [*service.promises] == ["a1", "a2", "b1", "b2"], "what a client has is forgotten"
    with pytest.raises(HTTPException, match="too many requests to sample of b wait") as refused:
        submit("b3", 10)
    assert (refused.value.status_code, refused.value.headers) == (429, {"retry-after": "1"})
    assert service.shares.used == {"a": 20, "b": 40}
    service.promises["a2"].future.done = lambda: True
    monkeypatch.setattr(samplers, "KEPT", 4)
    submit("c1", 1)
    assert [*service.promises] == ["a1", "b1", "b2", "c1"], "no more are kept than need be"
    submit("c2", 1)
    assert len(service.promises) == 5, "a result that nobody has is kept"


def test_sessions_take_turns_at_the_sampling_process() -> None:
    """A session has few sequences there, so that another's request is soon sampled."""
    service: Any = object.__new__(samplers.SamplerService)
    service.config, service.turns = SimpleNamespace(sampling=SimpleNamespace(slots=2)), {}
    begun: list[str] = []

    async def call(job: Any, promise: Any) -> str:
        begun.append(promise.name)
        await promise.ends.wait()
        return f"{promise.name} is sampled"

    async def ask_all() -> None:
        ends = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1", "c1", "c2")}
        asked = {}
        for name, count in zip(ends, (3, 3, 3, 3, 8, 100, 1), strict=True):
            owner = SimpleNamespace(session=name[0])
            promise = SimpleNamespace(name=name, ends=ends[name], sampler=owner)
            asked[name] = service._take_turn(SimpleNamespace(count=count), promise)
        tasks = {name: asyncio.create_task(work) for name, work in asked.items()}
        for freed, expected in (
            ("", ["a1", "a2", "b1", "c1"]),  # of 8 places, 2 are too few for a3
            ("a3", []),
            ("a1", ["a4"]),
            ("c1", ["c2"]),  # with all places of its session
        ):
            if freed == "a3":
                tasks[freed].cancel()
            elif freed:
                ends[freed].set()
                assert await tasks[freed] == f"{freed} is sampled"
            for _ in range(20):
                await asyncio.sleep(0)
            assert begun == expected
            begun.clear()

    service._call_sampler = call
    asyncio.run(ask_all())
    assert samplers.TURN == 4


def test_a_new_sampler_samples_the_same(server: LocalServer, service: tinker.ServiceClient) -> None:
    link = server.server.samplers.link
    sampler = service.create_sampling_client(base_model="tiny").result()
    seeded = types.SamplingParams(max_tokens=6, seed=3)
    first = sampler.sample(prompt(), 2, seeded).result().sequences
    known = server.server.ledger.sampled_total
    link.exits = {1}
    again = sampler.sample(prompt(), 2, seeded).result().sequences
    assert [list(x.tokens) for x in first] == [list(x.tokens) for x in again]
    assert server.server.ledger.sampled_total == known + 2
    work, crashes = link.act, []

    def crash(number: int, method: str, asked: Any) -> Any:
        if asked.count == 1:
            return work(number, method, asked)
        crashes.append(number)
        raise WorkerExited("the process ended", crashed=True)

    link.exits = {1, 2}
    for act, category in (
        (work, "Server"),
        (lambda *_: CallFailure("the process ended"), "User"),
        (lambda *_: CallFailure("the process ended", "server"), "Server"),
        (crash, "Server"),
    ):
        link.act = act
        with pytest.raises(tinker.RequestFailedError, match="the process ended") as failed:
            sampler.sample(prompt(), 2, seeded).result()
        assert failed.value.category == types.RequestErrorCategory[category]
    assert server.server.ledger.sampled_total == known + 2
    assert len(set(crashes)) == len(crashes) == 2, "it is sampled alone once"
    assert draw(sampler, 1) and not server.server.samplers.suspects
