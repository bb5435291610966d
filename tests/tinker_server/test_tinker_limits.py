"""The lag limit, killed processes and bad requests, on real servers with the unmodified client."""

import dataclasses
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from click.testing import CliRunner
from process_kit import ROOT, RUN_SEED
from run_kit import wait_until
from safetensors.torch import load_file
from tinker import types
from tinker_kit import (
    ServerProcess,
    draw,
    output_logprobs,
    policy_datum,
    prompt,
    tuned_datum,
    write_config,
)

from asyncrl.cli import main
from asyncrl.models import adapter_files

pytestmark = pytest.mark.slow
ADAM = types.AdamParams(learning_rate=1e-3)
MUTANTS = int(os.environ.get("ASYNCRL_TINKER_MUTANTS", "200"))  # of requests

SETS = (
    "staleness.max_lag=1",
    "staleness.on_exceed=pace",
    "staleness.unknown=refuse",
    "server.body_mib=1",
    "training.checkpoint_every=2",
)


class RestartedServer:
    def __init__(self, folder: Path) -> None:
        self.config = write_config(folder)
        self.now = ServerProcess(self.config, *SETS)

    def restart(self) -> None:
        self.now = ServerProcess(self.config, *SETS, f"server.port={self.now.port}")


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartedServer]:
    holder = RestartedServer(tmp_path_factory.mktemp("tinker"))
    yield holder
    holder.now.stop()


@pytest.fixture
def server(restarted: RestartedServer) -> ServerProcess:
    return restarted.now


@pytest.fixture(scope="module")
def service(restarted: RestartedServer) -> Iterator[tinker.ServiceClient]:
    with restarted.now.client() as client:
        yield client


def new_model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=1).result()


def sampled_sequences(client: tinker.TrainingClient, count: int) -> list[types.SampledSequence]:
    return draw(client.save_weights_and_get_sampling_client().result(), count)


def doctor(server: ServerProcess, client: tinker.TrainingClient) -> dict[str, Any]:
    folder = server.folder / client.model_id.replace(":", "-")
    seen = json.loads(CliRunner().invoke(main, ["doctor", str(folder), "--json"]).output)
    assert seen["running"]
    [model] = seen["models"]
    return model


def test_old_tokens_cannot_be_hidden(server: ServerProcess, service: tinker.ServiceClient) -> None:
    """Each of these trained tokens of lag 2 under a limit of 1."""
    client = new_model(service)
    old = policy_datum(sampled_sequences(client, 1)[0], spans=True)
    for _ in range(2):
        client.forward_backward([tuned_datum([5, 6, 7, 1])], "cross_entropy")
        client.optim_step(ADAM).result()
    fresh = sampled_sequences(client, 2)
    before, length = len(prompt().to_ints()) - 1, old.model_input.length
    answer = length - before
    first = types.PromptProvenanceSpan(sequence_id=fresh[0].sequence_id, length=before)

    def named(*spans: tuple[types.SampledSequence, int, int]) -> types.Datum:
        rest = [
            types.SampledProvenanceSpan(sequence_id=x.sequence_id, offset=offset, length=count)
            for x, offset, count in spans
        ]
        return old.with_provenance(old.model_input_spans, [first, *rest])

    claims = types.PromptProvenanceSpan(sequence_id=fresh[0].sequence_id, length=length)
    attempts = [
        (old, "a lag of 2, and staleness.max_lag = 1"),
        (old.with_provenance(old.model_input_spans, [claims]), f"datum 0, position {before}: "),
        (named((fresh[0], 0, answer - 1), (fresh[1], 0, 1)), f"datum 0, position {before}"),
    ]
    own = policy_datum(fresh[0], spans=True)
    shifted = (
        dataclasses.replace(first, length=before + 1),
        types.SampledProvenanceSpan(
            sequence_id=fresh[0].sequence_id, length=own.model_input.length - before - 1
        ),
    )
    off_by_one = own.with_provenance(own.model_input_spans, list(shifted))
    attempts.append((off_by_one, f"datum 0, position {before + 1}: .* whose "))
    for datum, message in attempts:
        refused = client.forward_backward([datum], "importance_sampling")
        step = client.optim_step(ADAM)
        with pytest.raises(tinker.RequestFailedError, match=message):
            refused.result()
        with pytest.raises(tinker.RequestFailedError, match="the step was not made"):
            step.result()
    client.forward_backward([own], "importance_sampling")
    assert client.optim_step(ADAM).result().metrics["lag_max"] == 0
    seen = doctor(server, client)
    assert (seen["version"], seen["trained_tokens"]) == (3, len(fresh[0].tokens))
    assert seen["supervised_tokens"] == seen["ledger"]["supervised_tokens"] == 6


def step_twice(client: tinker.TrainingClient, data: list[types.Datum]) -> np.ndarray:
    for _ in range(2):
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(ADAM).result()
    return output_logprobs(client.forward(data, "cross_entropy").result())


@pytest.mark.parametrize("victim", ["server", "training"])
def test_a_killed_process_loses_and_repeats_nothing(
    restarted: RestartedServer, service: tinker.ServiceClient, victim: str
) -> None:
    data = [tuned_datum([5, 6, 7, 8, 1]), tuned_datum([9, 10, 1])]
    unharmed = step_twice(new_model(service), data)
    client = new_model(service)  # the same seed: the same weights at each step
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(ADAM).result()
    scored = client.forward_backward(data, "cross_entropy").result()
    if victim == "server":
        restarted.now.kill()
        stepped = client.optim_step(ADAM)  # sent while there is no server
        restarted.restart()
    else:
        os.kill(worker(restarted.now, victim), signal.SIGKILL)
        stepped = client.optim_step(ADAM)
    assert stepped.result().metrics["optim_grad_norm"] > 0
    after = output_logprobs(client.forward(data, "cross_entropy").result())
    assert np.array_equal(after, unharmed) and not np.array_equal(after, output_logprobs(scored))
    folder = restarted.now.folder / client.model_id.replace(":", "-")
    rows = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows] == [0, 1]  # each step once


def test_killed_samplers_answer_once(server: ServerProcess, service: tinker.ServiceClient) -> None:
    """One request is being sampled, the other is not yet read when the process is killed."""
    client = new_model(service)
    sampler = client.save_weights_and_get_sampling_client().result()
    pid = worker(server, "sampling")
    before = cpu_ticks(pid)
    long = sampler.sample(prompt(), 128, types.SamplingParams(max_tokens=120)).future()
    wait_until(lambda: cpu_ticks(pid) > before + 5, server.process)
    os.kill(pid, signal.SIGSTOP)
    short = sampler.sample(prompt(), 2, types.SamplingParams(max_tokens=4)).future()
    os.kill(pid, signal.SIGKILL)
    sampled = [*long.result(60).sequences, *short.result(60).sequences]
    assert worker(server, "sampling") != pid
    assert all(len(x.tokens) == len(x.logprobs) > 0 for x in sampled)
    ids = [sequence.sequence_id for sequence in sampled]
    assert len(set(ids)) == len(ids) == 130
    rows = [json.loads(x) for x in (server.folder / "sequences.jsonl").read_text().splitlines()]
    mine = Counter(row["id"] for row in rows if row["model"] == client.model_id)
    assert mine == dict.fromkeys(ids, 1)
    client.forward_backward([policy_datum(sequence, spans=True) for sequence in sampled], "ppo")
    assert client.optim_step(ADAM).result().metrics["lag_unknown_share"] == 0
    ledger = doctor(server, client)["ledger"]
    assert (ledger["sampled"], ledger["trained_once"], ledger["never_trained"]) == (130, 130, 0)


def test_a_server_killed_amid_a_request_to_sample_is_asked_anew(
    restarted: RestartedServer, service: tinker.ServiceClient
) -> None:
    client = new_model(service)
    sampler = client.save_weights_and_get_sampling_client().result()
    os.kill(worker(restarted.now, "sampling"), signal.SIGSTOP)
    promised = sampler.sample(prompt(), 2, types.SamplingParams(max_tokens=4)).future()
    key = {"X-API-Key": restarted.now.key}
    asked = {"request_id": f"{sampler._sampling_session_id}:sample:0"}

    def is_waiting() -> bool:
        try:
            url = f"{restarted.now.url}/api/v1/retrieve_future"
            return httpx.post(url, json=asked, headers=key, timeout=1).status_code == 408
        except httpx.ReadTimeout:
            return True

    wait_until(is_waiting, restarted.now.process)
    restarted.now.kill()
    restarted.restart()
    sampled = promised.result(120).sequences
    client.forward_backward([policy_datum(sequence) for sequence in sampled], "ppo")
    assert client.optim_step(ADAM).result().metrics["lag_unknown_share"] == 0
    ledger = doctor(restarted.now, client)["ledger"]
    assert (ledger["sampled"], ledger["trained_once"], ledger["never_trained"]) == (2, 2, 0)


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def worker(server: ServerProcess, role: str) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if (
            parent == server.process.pid
            and "asyncrl.tinker.workers.worker" in words
            and role in words
        ):
            return int(path.name)
    raise AssertionError(f"no {role} process")


def train_curve(server: ServerProcess, service: tinker.ServiceClient) -> list[Any]:
    client, curve = new_model(service), []
    for number in range(3):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, seed=number)
        sampled = sampler.sample(prompt(), 3, params).result().sequences
        data = [policy_datum(x, 1.0 - index, spans=True) for index, x in enumerate(sampled)]
        scored = client.forward_backward(data, "ppo").result()
        curve += [scored.metrics, *(output_logprobs(scored, n).tolist() for n in range(3))]
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    weights = load_file(
        server.saved(client.save_state("end").result().path) / "model" / adapter_files.WEIGHTS
    )
    return [*curve, {name: tensor.tolist() for name, tensor in weights.items()}]


def record_requests(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    bodies: dict[str, bytes] = {}
    send = httpx.AsyncClient.send

    async def record(self: Any, request: httpx.Request, **more: Any) -> httpx.Response:
        route = request.url.path.removeprefix("/api/v1/")
        bodies[route] = request.content
        return await send(self, request, **more)

    with monkeypatch.context() as patch, server.client() as service:
        patch.setattr(httpx.AsyncClient, "send", record)
        client = new_model(service)
        path = client.save_state("a").result().path
        client.save_weights_for_sampler("a").result()
        data = [policy_datum(x, spans=True) for x in sampled_sequences(client, 2)]
        client.forward(data, "ppo").result()
        client.forward_backward(data, "ppo").result()
        client.optim_step(ADAM).result()
        client.get_info()
        draw(service.create_sampling_client(model_path=path).result(), 1)
        service.create_training_client_from_state(path).result()
        service.create_rest_client().get_weights_info_by_tinker_path(path).result()
    return {route: body for route, body in bodies.items() if body}


def test_a_client_that_misbehaves_changes_nothing_for_another(
    server: ServerProcess, service: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, log-probabilities and weights of the other are the same to the bit."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib.chaos.misbehaving_client import MisbehavingClient

    alone = train_curve(server, service)
    pids = [worker(server, role) for role in ("training", "sampling")]
    client = MisbehavingClient(server.url, server.key, record_requests(server, monkeypatch))
    with ThreadPoolExecutor(1) as pool:
        misbehaved = pool.submit(client.misbehave, MUTANTS, RUN_SEED)
        while not misbehaved.done():
            assert train_curve(server, service) == alone
        misbehaved.result()
    assert train_curve(server, service) == alone
    assert pids == [worker(server, role) for role in ("training", "sampling")]
    for log in (server.folder / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text()
    for result in ("forward_backward: done", "save_weights: done", "optim_step: failed"):
        assert client.results[result]
