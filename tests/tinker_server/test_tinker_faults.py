"""One client's mistake stays that client's: bad numbers, crashed processes, a full disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker_kit import draw, output_logprobs, prompt, tuned_datum
from tinker_local_kit import LocalServer

from asyncrl.tinker.links import WorkerExited
from asyncrl.tinker.messages import CallFailure, SampleCall, SampleResult
from asyncrl.tinker.workers.sampler import NOT_FINITE, Sampler

ADAM = types.AdamParams(learning_rate=1e-2)
TUNED = [tuned_datum([5, 6, 7, 8, 1])]


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


def scored(client: tinker.TrainingClient) -> np.ndarray:
    return output_logprobs(client.forward(TUNED, "cross_entropy").result())


# ---- sampling ------------------------------------------------------------------------------------


@pytest.fixture
def sampler(server: LocalServer) -> Sampler:
    """The sampling process with weights "bad" that are not finite."""
    server.sampler.versions["bad"] = {
        name: torch.full_like(weight, float("nan")) for name, weight in server.sampler.base.items()
    }
    return server.sampler


def sample_call(weights: str = "", **more: Any) -> SampleCall:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": [], "texts": []}
    return SampleCall(
        weights=weights,
        version=0,
        prompt=np.arange(5, 25, dtype="<i4").tobytes(),
        **{"count": 3, "max_tokens": 20, "seed": 7, "ticket": 0} | values | more,
    )


def sample(sampler: Sampler, *calls: SampleCall) -> list[SampleResult | CallFailure]:
    """Sample all at the same time."""
    results: dict[int, SampleResult | CallFailure] = {}
    sampler.reply = results.__setitem__
    for number, call in enumerate(calls):
        sampler.add(number, call)
    while len(results) < len(calls):
        sampler.work()
    return [results[number] for number in range(len(calls))]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}])
def test_weights_that_are_not_finite_fail_their_own_requests(
    sampler: Sampler, more: dict[str, Any]
) -> None:
    """Keys and values that are not finite must not reach the requests after it either."""
    [before] = sample(sampler, sample_call(**more))
    assert isinstance(before, SampleResult)
    assert sample(sampler, sample_call("bad", **more), sample_call(**more)) == [
        CallFailure(NOT_FINITE),
        before,
    ]
    assert sample(sampler, sample_call(**more)) == [before]


def test_a_canceled_request_leaves_nothing_that_is_not_finite(sampler: Sampler) -> None:
    [before] = sample(sampler, sample_call())
    sampler.add(7, sample_call("bad"))
    sampler.work()
    sampler.cancel(7)
    assert sample(sampler, sample_call()) == [before]


def test_an_engine_that_fails_repeats_its_requests_one_by_one(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = [sample(sampler, sample_call(seed=seed))[0] for seed in (1, 2)]
    engine = type(sampler.engine)
    decode = engine._decode

    def fail(self: Any) -> Any:
        if any(row is not None and row.request.seed == 666 for row in self.rows):
            raise RuntimeError("an index is out of bounds")
        return decode(self)

    monkeypatch.setattr(engine, "_decode", fail)
    calls = [sample_call(seed=seed) for seed in (1, 666, 2)]
    first, failed, second = sample(sampler, *calls)
    assert [first, second] == alone
    assert failed == CallFailure("RuntimeError: an index is out of bounds", "server", spoiled=True)
    assert "Traceback" in capfd.readouterr().err


def test_weights_that_cannot_be_read_fail_their_own_requests(
    sampler: Sampler, tmp_path: Path
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "adapter_config.json").write_text("[[[")
    failed, good = sample(sampler, sample_call(str(tmp_path / "damaged")), sample_call())
    assert isinstance(failed, CallFailure) and isinstance(good, SampleResult)


# ---- processes that crash ------------------------------------------------------------------------


def crash_on(link: Any, matches: Callable[[Any], bool]) -> list[Any]:
    """Let the process of a link crash on requests; return the list of those."""
    act, crashes = link.act, []

    def crash(number: int, request: Any) -> Any:
        if matches(request):
            crashes.append(request)
            raise WorkerExited("the process ended", crashed=True, oldest=True)
        return act(number, request)

    link.act = crash
    return crashes


def test_a_call_on_which_the_training_process_crashes_is_not_repeated(
    server: LocalServer, service: tinker.ServiceClient
) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    step(client)
    before = scored(client)
    crashes = crash_on(server.training, lambda request: getattr(request, "learning_rate", 0) == 7.0)
    with pytest.raises(tinker.RequestFailedError, match="the process ended"):
        step(client, types.AdamParams(learning_rate=7.0))
    assert len(crashes) == 1
    assert np.array_equal(scored(client), before)
    assert server.server.models[client.model_id].version == 1


def test_a_request_on_which_the_sampling_process_crashes_twice_is_not_repeated(
    server: LocalServer, service: tinker.ServiceClient
) -> None:
    """All requests of the first crash are suspects; they are then sampled one by one."""
    link = server.server.samplers.link
    crashes = crash_on(link, lambda request: request.seed == 666)
    sampler = service.create_sampling_client(base_model="tiny").result()
    futures = [
        sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=2, seed=seed)).future()
        for seed in (1, 666, 2)
    ]
    with pytest.raises(tinker.RequestFailedError, match="the process ended"):
        futures[1].result(60)
    assert [len(futures[index].result(60).sequences) for index in (0, 2)] == [1, 1]
    assert len(crashes) == 2
    assert not server.server.samplers.suspects
    assert draw(sampler, 1)


# ---- optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"eps": 0.0}, "eps = 0: must be at least 1e-30"),
        ({"eps": 1e-300}, "eps = 1e-300: must be at least 1e-30"),
        ({"beta1": 1.0}, "beta1 = 1: must be at least 0 and below 1"),
        ({"beta2": 2.0}, "beta2 = 2: must be at least 0 and below 1"),
        ({"beta2": -1.0}, "beta2 = -1: must be at least 0 and below 1"),
        ({"learning_rate": -1.0}, "learning_rate = -1: must be at least 0"),
        ({"learning_rate": 1e300}, "learning_rate = 1e\\+300: must be at least 0"),
        ({"weight_decay": 1e300}, "weight_decay = 1e\\+300: must be at least 0"),
        ({"learning_rate": 1e38, "weight_decay": 1e38}, "not finite: it was undone"),
    ],
)
def test_numbers_of_adamw_that_ruin_weights_are_refused(
    server: LocalServer, service: tinker.ServiceClient, numbers: dict[str, float], message: str
) -> None:
    """The refused step changes nothing, and its gradient does not reach the next one."""
    clients = [
        service.create_lora_training_client("tiny", rank=2, seed=1).result() for _ in range(2)
    ]
    for client in clients:
        step(client)
    with pytest.raises(tinker.RequestFailedError, match=message):
        step(clients[0], types.AdamParams(**{"learning_rate": 1e-2} | numbers))
    for client in clients:
        step(client)
    assert np.array_equal(*map(scored, clients))
    assert [server.server.models[client.model_id].version for client in clients] == [2, 2]
