"""vLLM's servers as the generator's engine: faults by servers that are played, and a real one."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import psutil
import pytest
import torch
from engine_kit import expected, request
from lib.chaos import vllm_servers
from played_vllm import PlayedVllm
from starlette.applications import Starlette
from starlette.testclient import TestClient
from vllm_kit import flat, vllm_config

from actors import engine_serve
from actors.engine import Completion
from actors.engine_serve import GENERATE, ServeEngine, make_engine
from actors.engine_vllm import UPDATE, count_cache_bytes
from actors.vllm_transfer import UpdateRoute
from asyncrl.config import load as config_load
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable, ProtocolError
from asyncrl.contract.messages import VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.records import rundir

Model = tuple[Path, policy.PolicyModel]
Play = Callable[[], PlayedVllm]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("serve")
    return path, policy.build_model(path, "abcdefgh", heads=2, kv_heads=1)


@pytest.fixture
def played(model: Model, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(engine_serve, "CONNECT_S", 0.0)
    monkeypatch.setattr(engine_serve, "RETRY_S", 0.05)
    probe = policy.compute_probe_logprobs(model[1]).tolist()
    return lambda: PlayedVllm(probe)


def engine(path: Path, *servers: PlayedVllm, **more: Any) -> ServeEngine:
    for server in servers:
        server.start()
    settings = {"servers": [server.url for server in servers], "max_new_tokens": 40} | more
    return make_engine(vllm_config(path, engine="vllm-serve", **settings))


def give(e: ServeEngine, model: policy.PolicyModel, number: int) -> None:
    probe = policy.compute_probe_logprobs(model).astype("<f4").tobytes()
    e.load(flat(model), Label(1, number), f"d{number}", probe)


def finish(e: ServeEngine) -> list[Completion]:
    answers: list[Completion] = []
    while e.active:
        answers += e.step()
    return answers


def test_requests_of_a_broken_server_go_to_another_until_it_is_back(
    model: Model,
    played: Play,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether an answer breaks off, is refused, or is of weights that the server was not given.
    What a broken answer had counts as sampled."""
    path, policy_model = model
    one, two = played(), played()
    monkeypatch.setattr(engine_serve.rundir, "SHM", tmp_path)
    e = engine(path, one, two)
    assert Path(e.folder.name).parent == tmp_path and e.steps_made == 0
    try:
        give(e, policy_model, 0)
        for plant, value, tokens, why in (
            ("cut", 1, 4, "an answer of 2 tokens was cut off"),
            ("error", {"message": "x"}, 4, "an answer was ended: {'error': {'message': 'x'}}"),
            ("status", {GENERATE: 500}, 2, f"{GENERATE} answered 500: {{"),
            ("label", "1.9.other", 6, "it sampled with weights that it was not given: [Span("),
            ("finish", "abort", 4, "an answer was ended: abort"),
        ):
            usual = getattr(one, plant)
            setattr(one, plant, value)
            two.gate.clear()
            e.add([request(t, 0, [4 + t, 5, 6]) for t in range(2)])
            said = ""
            while "is lost, its requests wait for another" not in said:
                e.step()
                said += capfd.readouterr().err
            assert f"or for its return: ServerLost: {why}" in said
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
            assert max(lost.values()) == tokens and e.steps_made > 1
            while "is back" not in capfd.readouterr().err:
                e.step()
            assert one.version == "1.0.d0"
        one.finish = two.finish = "length"
        e.add([request(0, 0, [4, 5, 6])])
        assert [a.tokens.tolist() for a in finish(e)] == [[4, 5, 6, 1]]
        one.status, two.label = {UPDATE: 500}, "1.9.other"  # of a process in its place
        give(e, policy_model, 1)
        give(e, policy_model, 2)
        said = capfd.readouterr().err
        assert f"Lost: {UPDATE} answered 500" in said and "Lost: it has the weights 1.9.oth" in said
    finally:
        e.close()


def test_weights_arrive_amid_answers_and_nothing_of_an_ended_one_is_left(
    model: Model, played: Play
) -> None:
    """Ended one by one, or all with the engine: asyncio complains of a task forgotten amid work."""
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
        assert one.asked.count(UPDATE) == 2
        path = str(e.newest.path)
        assert Path(e.folder.name).parent == rundir.SHM or not rundir.SHM.is_dir()
        sampling = {"max_tokens": 20, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": ANY}
        more = {"stop_token_ids": [1], "logprobs": 0, "ignore_eos": True, "detokenize": False}
        probe = {"max_tokens": 1, "logprobs": 0, "detokenize": False}
        update, salt = {"path": path, "version": "1.1.d1"}, f"{e.folder.name[-8:]}-1.0.d0"
        sampled = {"token_ids": [4, 5, 6], "cache_salt": salt, "stream": True}
        assert one.bodies == {
            **{("GET", name, False): {} for name in ("/health", "/version")},
            ("POST", UPDATE, False): update | {"clear_cache": True},
            ("POST", GENERATE, True): sampled | {"sampling_params": sampling | more},
            ("POST", GENERATE, False): {
                "token_ids": e.ids,
                "sampling_params": probe | {"temperature": 0.0, "prompt_logprobs": 0},
            },
        }
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
        ({"status": {UPDATE: 404}}, "take the weights of model.path = .*; start it with: .*Route"),
        ({"probe": [-9.0] * 64}, "does not compute with the weights it was given"),
        ({"status": {GENERATE: 422}}, "refuses a request"),
        ({"status": {"/health": 503}}, "no vLLM server answers at .* start it with: "),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(
    plant: dict[str, Any], said: str, model: Model, played: Play
) -> None:
    path, policy_model = model
    server = played()
    for name, value in plant.items():
        setattr(server, name, value[: len(server.probe)] if name == "probe" else value)
    kinds = (ConfigError, ProtocolError, AsyncrlError)
    with pytest.raises(kinds, match=said):
        give(engine(path, server), policy_model, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_route_of_an_update_pauses_and_goes_on(fails: bool) -> None:
    """A server whose load fails goes on too, and its client loses it."""
    done: list[Any] = []

    async def act(*what: Any, args: Any = ()) -> None:
        done.append([*what, *args])
        if fails and args:
            raise OSError("no such file")

    engine = SimpleNamespace(collective_rpc=act, update_weight_version=act)
    engine.engine_core = SimpleNamespace(pause_scheduler_async=act)
    engine.resume_generation = lambda: act("resume")
    app = Starlette()
    app.state.engine_client = engine
    app.add_middleware(UpdateRoute)
    client = TestClient(app, raise_server_exceptions=False)
    assert client.get("/health").status_code == 404 and not done
    update = {"path": "p", "version": "1.2.d", "clear_cache": True}
    assert client.post(UPDATE, json=update).status_code == (500 if fails else 200)
    load = [["keep", True], ["asyncrl_load_file", "p"], ["1.2.d"], ["resume"]]
    assert done == load + [["resume"]] * fails


def test_a_server_that_keeps_ending_is_given_up() -> None:
    server = engine_serve.Server("http://a", ["sh", "-c", "echo out of memory; exit 3"])
    for _ in range(4):
        server.start()
        assert server.process is not None and server.process.wait(60)
    with pytest.raises(PeerUnreachable, match=r"http://a ended: out of memory \| exit code 3"):
        server.start()


def test_the_command_of_one_of_two_servers(model: Model) -> None:
    keys = ["generator.engine=vllm-serve", "generator.slots=5", "seed=7"]
    keys += ["generator.own_servers=2", "generator.context=96"]
    config = config_load.load("demo", [f"model.path='{model[0]}'", "model.device='cpu'", *keys])
    shape = engine_serve.load_text_config(model[0])
    parallel = msgspec.structs.replace(config.generator, tensor_parallel=2)
    for settings in (parallel, config.generator):  # the model's one head is on both GPUs
        config = msgspec.structs.replace(config, generator=settings)
        words = engine_serve.build_command(config, "127.0.0.1", 9)
        cache = words.index("--kv-cache-memory-bytes") + 1
        assert int(words.pop(cache)) == count_cache_bytes(config, shape, 3)
    assert " ".join(words[3:]) == (
        f"--model {model[0]} --skip-tokenizer-init --dtype float32 --seed 7 --max-model-len 96 "
        "--max-num-seqs 4 --block-size 32 --kv-cache-memory-bytes --gpu-memory-utilization 0.05 "
        "--logprobs-mode processed_logprobs --max-logprobs 1 --generation-config vllm "
        "--disable-log-stats --enforce-eager --host 127.0.0.1 --port 9 --tensor-parallel-size 1 "
        "--stream-interval 16 --enable-scale-out "
        "--worker-extension-cls actors.vllm_transfer.FileExtension "
        "--middleware actors.vllm_transfer.UpdateRoute"
    )


def test_servers_of_our_own_have_their_own_gpus(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"own_servers": 2, "tensor_parallel": 2, "gpus": [4, 5, 6]}
    config = vllm_config(model[0], engine="vllm-serve", **more)
    monkeypatch.setattr(engine_serve, "explain_missing", lambda name: "")
    made = engine_serve.make_own_server(config, 0)
    assert made.settings["CUDA_VISIBLE_DEVICES"] == "4,5"
    port = int(made.url.removeprefix("http://127.0.0.1:"))
    assert made.command == engine_serve.build_command(config, "127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"generator.gpus: server 1 of 2 has no 2 GPU\(s\)"):
        engine_serve.make_own_server(config, 1)
    monkeypatch.setattr(engine_serve, "explain_missing", lambda name: f"no {name}")
    with pytest.raises(ConfigError, match=r"^generator.own_servers: no vllm$"):
        engine_serve.make_own_server(config, 0)


@pytest.mark.slow
def test_no_answer_is_lost_twice_or_mislabelled_over_thirty_kills(tmp_path: Path) -> None:
    """The program that benchmarks/kills.py runs with 300.  It finds planted faults."""
    found = vllm_servers.run(tmp_path, 30, 0)
    assert found["wrong"] == [] and found["kills"] == 30 <= found["answers"] / 2
    weights = vllm_servers.PlayedWeights(tmp_path / "again")
    right = completion([4, 5], [4, 5, 1], 3)
    assert weights.judge(right) == ""
    assert "another prompt" in weights.judge(replace(right, tokens=np.array([4, 1], np.int32)))
    assert "not of version 2" in weights.judge(completion([4, 5], [4, 5, 1], 3, named=2))


def completion(prompt: list[int], tokens: list[int], number: int, named: int = 0) -> Completion:
    """An answer of a played server with weights `number`, said to be of `named`."""
    ids = np.array(tokens, np.int32)
    label = Label(1, named or number)
    logprobs, spans = -ids - number / 8, [VersionSpan(label, "", 0, len(tokens), label)]
    given = np.array(prompt, np.int32), ids, logprobs.astype(np.float32), spans
    return Completion((0, 0, 1), *given, "stop", support=None)


@pytest.mark.slow
def test_a_real_server_samples_from_each_version_and_ends_whole(
    model: Model, monkeypatch: pytest.MonkeyPatch
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
