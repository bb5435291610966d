"""vLLM's servers as the generator's engine: faults by servers that are played, and a real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import uvicorn
from engine_kit import expected, request
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from vllm_kit import flat

from actors import engine_serve
from actors.engine import Completion
from actors.engine_serve import ServeEngine, make_engine
from asyncrl.config import load as config_load
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable, ProtocolError
from asyncrl.contract.versions import Label
from asyncrl.models import policy


class Played:
    """A server that answers each prompt with its tokens, and does what a test plants."""

    def __init__(self, probe: list[float]) -> None:
        self.probe = probe
        self.vllm = "0.32.0"
        self.status: dict[str, int] = {}  # path -> status of its answers
        self.version = "default"
        self.label = ""  # the version that it claims for tokens, if not its own
        self.cut = 0  # answers to break off in the middle
        self.raw = 0.0  # log-probability of a certain token
        self.is_paused = False
        self.finish = "stop"  # why its answers end
        self.error: dict[str, str] = {}  # amid an answer
        self.gate = asyncio.Event()  # answers wait for it in the middle
        self.gate.set()
        self.asked: list[str] = []
        self.left = 0  # clients that went away
        paths = (
            "/health /version /is_paused /inference/v1/generate /init_weight_transfer_engine "
            "/pause /start_weight_update /update_weights /finish_weight_update /resume "
            "/collective_rpc"
        )
        app = Starlette(
            routes=[Route(path, self.answer, methods=["GET", "POST"]) for path in paths.split()]
        )
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    async def answer(self, asked: Request) -> Response:
        path = asked.url.path
        body = json.loads(await asked.body() or b"{}")
        self.asked.append(path)
        if status := self.status.get(path, 0):
            return JSONResponse({"error": {"message": f"no {path}"}}, status)
        if path == "/version":
            return JSONResponse({"version": self.vllm})
        if path == "/is_paused":
            return JSONResponse({"is_paused": self.is_paused})
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        if path == "/update_weights":
            assert Path(body["update_info"]["path"]).stat().st_size
        if not path.endswith("generate"):
            return JSONResponse({})
        if not body.get("stream"):
            scores = [None, *({"3": {"logprob": x}} for x in self.probe)]
            part = {"token_ids": [3], "logprobs": {"content": [{"logprob": self.raw}]}}
            return JSONResponse({"choices": [part], "prompt_logprobs": scores})
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> Any:
        tokens = [*body["token_ids"], 1]
        middle = len(tokens) // 2
        started_with = self.label or self.version
        for part in (tokens[:middle], tokens[middle:]):
            choice = {
                "token_ids": part,
                "logprobs": {"content": [{"logprob": -float(token)} for token in part]},
                "weight_versions": None,
            }
            if part[-1] == 1:
                version = self.label or self.version
                choice["finish_reason"] = self.finish
                choice["weight_versions"] = [
                    {"version": started_with, "start": 0, "end": middle},
                    {"version": version, "start": middle, "end": len(tokens)},
                ]
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if self.error:
                yield f"data: {json.dumps({'error': self.error})}\n\n"
                return
            if self.cut:
                self.cut -= 1
                return
            try:
                while not self.gate.is_set():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.left += 1
                raise
        yield "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, policy.PolicyModel]:
    path = tmp_path_factory.mktemp("serve")
    return path, policy.build_model(path, "abcdefgh", heads=2, kv_heads=1)


@pytest.fixture
def played(
    model: tuple[Path, policy.PolicyModel], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Played]]:
    monkeypatch.setattr(engine_serve, "CONNECT_S", 0.0)
    monkeypatch.setattr(engine_serve, "RETRY_S", 0.05)
    probe = policy.compute_probe_logprobs(model[1]).tolist()
    servers = []

    def start() -> Played:
        servers.append(Played(probe))
        return servers[-1]

    yield start
    for server in servers:
        server.gate.set()
        server.server.should_exit = True


def engine(path: Path, *servers: Played, **more: Any) -> ServeEngine:
    settings = {
        "engine": "vllm-serve",
        "servers": [server.url for server in servers],
        "slots": 8,
        "context": 64,
        "max_new_tokens": 40,
    }
    return make_engine(
        config_load.convert(
            {
                "model": {"path": str(path)},
                "task": {"name": "sort"},
                "generators": 1,
                "generator": settings | more,
                "weights": {"in_flight": "recompute_kv"},
            },
            "c.toml",
        )
    )


def give(e: ServeEngine, model: policy.PolicyModel, number: int) -> None:
    probe = policy.compute_probe_logprobs(model).astype("<f4").tobytes()
    e.load(flat(model), Label(1, number), f"d{number}", probe)


def finish(e: ServeEngine) -> list[Completion]:
    answers: list[Completion] = []
    while e.active:
        answers += e.step()
    return answers


def test_requests_of_a_broken_server_go_to_another_until_it_is_back(
    model: tuple[Path, policy.PolicyModel],
    played: Callable[[], Played],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whether an answer breaks off, is refused, or is of weights that the server was not given.
    What a broken answer had counts as sampled."""
    path, policy_model = model
    one, two = played(), played()
    e = engine(path, one, two)
    try:
        give(e, policy_model, 0)
        for plant, value, tokens in (
            ("cut", 1, 4),
            ("error", {"message": "the engine core is dead"}, 4),
            ("status", {"/inference/v1/generate": 500}, 2),
            ("label", "1.9.other", 6),
            ("finish", "abort", 4),
        ):
            usual = getattr(one, plant)
            setattr(one, plant, value)
            two.gate.clear()
            e.add([request(t, 0, [4 + t, 5, 6]) for t in range(2)])
            while not capfd.readouterr().err.count("is lost, its requests wait for another"):
                e.step()
            while max(e.count_tokens().values()) < tokens:
                e.step()
            lost = e.count_tokens()
            setattr(one, plant, usual)
            two.gate.set()
            answers = finish(e)
            assert sorted(a.tokens.tolist() for a in answers) == [[4, 5, 6, 1], [5, 5, 6, 1]]
            for a in answers:
                assert a.logprobs.tolist() == [-float(token) for token in a.tokens]
                assert [s.label for s in a.spans] == [Label(1, 0)] * 2
            assert max(lost.values()) == tokens
            while "is back" not in capfd.readouterr().err:
                time.sleep(0.01)
            assert one.version == "1.0.d0"
    finally:
        e.close()


def test_weights_arrive_amid_answers_and_nothing_of_an_ended_one_is_left(
    model: tuple[Path, policy.PolicyModel], played: Callable[[], Played]
) -> None:
    """Ended one by one, or all with the engine: asyncio complains of a task that is forgotten amid
    its work."""
    path, policy_model = model
    one = played()
    e = engine(path, one)
    try:
        give(e, policy_model, 0)
        one.gate.clear()
        e.add([request(t, 0, [4, 5, 6]) for t in range(3)])
        while sum(e.count_tokens().values()) < 6:
            e.step()
        assert e.abort([(1, 0, 1)]) == {(1, 0, 1): 2}
        while not one.left:
            time.sleep(0.01)
        give(e, policy_model, 1)
        one.gate.set()
        for a in finish(e):
            assert [(s.label.number, s.start, s.end, s.kv.number) for s in a.spans] == [
                (0, 0, 2, 0),
                (1, 2, 4, 1),
            ]
        update = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
        swaps = [path for path in one.asked if path != "/inference/v1/generate"][-5:]
        assert swaps == [*update, "/resume"]
        one.gate.clear()
        e.add([request(t, 0, [4, 5, 6]) for t in range(3)])
        while sum(e.count_tokens().values()) < 6:
            e.step()
    finally:
        e.close()
    assert e.loop.is_closed() and not asyncio.all_tasks(e.loop)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ({"vllm": "0.31.1"}, "is vLLM 0.31.1; asyncrl needs 0.32.0"),
        ({"raw": -2.0}, "start it with --logprobs-mode processed_logprobs"),
        ({"status": {"/version": 404}}, "is no vLLM server that takes weights"),
        (
            {"status": {"/init_weight_transfer_engine": 404}},
            "start it with: VLLM_SERVER_DEV_MODE=1 .*--weight-transfer-config",
        ),
        ({"status": {"/update_weights": 500}}, "cannot take the weights of model.path"),
        ({"probe": [-9.0] * 64}, "does not compute with the weights it was given"),
        ({"status": {"/inference/v1/generate": 422}}, "refuses a request"),
        ({"status": {"/health": 503}}, "no vLLM server answers at .* start it with: "),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(
    plant: dict[str, Any],
    said: str,
    model: tuple[Path, policy.PolicyModel],
    played: Callable[[], Played],
) -> None:
    path, policy_model = model
    server = played()
    for name, value in plant.items():
        setattr(server, name, value[: len(server.probe)] if name == "probe" else value)
    kinds = (ConfigError, ProtocolError, AsyncrlError)
    with pytest.raises(kinds, match=said):
        give(engine(path, server), policy_model, 0)


def test_a_server_that_keeps_ending_is_given_up() -> None:
    server = engine_serve.Server("http://a", ["sh", "-c", "echo out of memory; exit 3"])
    for _ in range(4):
        server.start()
        assert server.process is not None and server.process.wait(60)
    with pytest.raises(PeerUnreachable, match=r"http://a ended: out of memory \| exit code 3"):
        server.start()


def test_the_command_of_one_of_two_servers(model: tuple[Path, policy.PolicyModel]) -> None:
    keys = [
        "generator.engine=vllm-serve",
        "generator.slots=5",
        "generator.own_servers=2",
        "generator.context=96",
        "seed=7",
    ]
    config = config_load.load("demo", [f"model.path='{model[0]}'", "model.device='cpu'", *keys])
    words = engine_serve.build_command(config, "127.0.0.1", 9)
    cache = words.index("--kv-cache-memory-bytes") + 1
    assert int(words.pop(cache)) == engine_serve.count_cache_bytes(
        config, engine_serve.load_text_config(model[0]), 3
    )
    assert " ".join(words[3:]) == (
        f"--model {model[0]} --host 127.0.0.1 --port 9 --dtype float32 --seed 7 "
        "--tensor-parallel-size 1 --max-model-len 96 --max-num-seqs 4 --block-size 32 "
        "--kv-cache-memory-bytes --gpu-memory-utilization 0.05 "
        "--logprobs-mode processed_logprobs --max-logprobs 1 --stream-interval 8 "
        '--generation-config vllm --weight-transfer-config {"backend": "asyncrl"} '
        "--worker-extension-cls actors.vllm_transfer.FileTransferExtension "
        "--skip-tokenizer-init --enable-scale-out --disable-log-stats --enforce-eager"
    )


@pytest.mark.slow
def test_a_real_server_samples_from_each_version_and_ends_whole(
    model: tuple[Path, policy.PolicyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change amid answers; later tokens are of the new ones, their keys too.  When the
    server is killed, nothing of it stays."""
    path, policy_model = model
    monkeypatch.setattr(engine_serve, "RESTARTS", 0)
    monkeypatch.setattr(engine_serve, "RETRY_S", 0.05)
    build = engine_serve.build_command
    few = ["--max-num-batched-tokens", "64"]  # so that tokens are read again in several steps
    monkeypatch.setattr(engine_serve, "build_command", lambda *given: [*build(*given), *few])
    versions = [policy_model, policy.load_policy(path, "float32", "cpu", with_modules=True)]
    with torch.no_grad():
        for parameter in versions[1].hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    e = engine(path, context=256, max_new_tokens=200)
    [server] = e.servers
    assert server.process is not None
    tree = psutil.Process(server.process.pid).children(recursive=True)
    try:
        give(e, versions[0], 0)
        asked = [
            replace(request(t, 0, [4, 5, 6 + t % 4], 200, temperature=0.7), stop=())
            for t in range(8)
        ]
        answers: list[Completion] = []
        number = 0
        while not any(len({s.label for s in a.spans}) == 2 for a in answers):
            e.add(asked)
            while e.active and sum(e.count_tokens().values()) < 40:
                answers += e.step()
            number += 1
            give(e, versions[number % 2], number)
            answers += finish(e)
        for a in answers:
            by_version = [expected(m, a, asked[a.key[0]]) for m in versions]
            wanted = torch.cat([by_version[s.label.number % 2][s.start : s.end] for s in a.spans])
            assert np.abs(a.logprobs - wanted.numpy()).max() < 1e-4
            assert all(s.kv == s.label for s in a.spans)
        e.add(asked)
        [api] = [p for p in tree if any("api_server" in word for word in p.cmdline()[:4])]
        os.kill(api.pid, signal.SIGKILL)
        with pytest.raises(PeerUnreachable, match=r"ended: .*exit code 137"):
            finish(e)
    finally:
        e.close()
    _, alive = psutil.wait_procs(tree, timeout=600)
    assert not alive
