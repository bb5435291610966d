"""Models, ledger and samplers of `asyncrl tinker` over time, with the unmodified client."""

import asyncio
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tinker
from tinker import types
from tinker_kit import draw, policy_datum, prompt, tuned_datum, write_config
from tinker_local_kit import ADAM, KEY, LocalServer, sampler_of, scored, step

from asyncrl.contract.errors import ConfigError
from asyncrl.contract.toml_writer import fill
from asyncrl.records import jsonl, metrics
from asyncrl.supervise import tinker_status as status
from asyncrl.tinker import app, settings, wire
from asyncrl.tinker import server as tinker_server
from asyncrl.tinker.model_records import TrainingCall, find_saved
from asyncrl.tinker.models import ServedModel

TUNED = [tuned_datum([5, 6, 7, 8, 1]), tuned_datum([9, 10, 1])]
Start = Callable[..., LocalServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LocalServer] = []

    def begin(*sets: str, remembered: int = 0) -> LocalServer:
        if started:
            started[-1].stop()
        started.append(LocalServer(tmp_path, *sets, remembered=remembered))
        return started[-1]

    yield begin
    started[-1].stop()


def ledger_of(server: LocalServer) -> dict[str, int]:
    [model] = status.examine(server.folder)["models"]
    ledger: dict[str, int] = model["ledger"]
    parts = ("never_trained", "trained_once", "trained_again")
    assert ledger["sampled"] == sum(ledger[part] for part in parts)
    return {part: ledger[part] for part in parts}


def test_bounded_records_close_the_ledger_after_a_restart(start: Start) -> None:
    """Of all sequences the totals are known, of the newest ones which were trained how often."""
    server = start(remembered=4)
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        first = draw(sampler_of(client), 4)
        for _ in range(5):  # trained again and again: ids beyond the bound, no new sequence
            step(client, [policy_datum(sequence) for sequence in first[:2]])
        for _ in range(3):
            later = draw(sampler_of(client), 3)
            step(client, [policy_datum(sequence) for sequence in later[:2]])
        expected = {"never_trained": 5, "trained_once": 6, "trained_again": 2}
        assert ledger_of(server) == expected
        last = policy_datum(later[2])
    [folder] = (path.parent for path in server.folder.glob("*/model.json"))
    sessions = server.server.sessions
    rows = jsonl.read(folder / "trained.jsonl")
    assert [row["batch"] for row in rows] == [*range(8)]
    lengths = [len(sequence.tokens) for sequence in first[:2]]
    assert metrics.read(folder)[0]["answer/length"] == sum(lengths) / 2
    assert sum(len(row["sequences"]) for row in rows) <= 8
    while server.server.ledger.is_long:  # it is rewritten within LEDGER_S
        assert server.thread.is_alive()
    assert len(jsonl.read(server.folder / "sequences.jsonl")) <= 1 + 8
    for _ in range(2):  # the second time from a file of the first
        server = start(remembered=4)
        assert server.server.sessions == sessions
        assert [row["batch"] for row in jsonl.read(folder / "trained.jsonl")] == [*range(8)]
        assert [row["step"] for row in metrics.read(folder)] == [*range(8)]
    with server.client() as service:
        state = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        assert state.model_id != client.model_id
        service_again = server.server.models[client.model_id]
        assert server.server.ledger.sum_totals(client.model_id) | {"sampled_tokens": 0} == {
            "sampled": 13,
            "sampled_tokens": 0,
            **expected,
        }
        assert service_again.version == 8
        assert step(state, [last])["lag_unknown_share"] == 1.0  # another model's sequence
    totals = server.server.ledger.sum_totals(client.model_id)
    assert (totals["never_trained"], totals["trained_once"]) == (4, 7)


def test_a_restart_continues_after_a_loss(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the calls that its predecessor accepted, and the results of those before."""
    monkeypatch.setattr(app, "POLL_S", 0.05)
    server = start()
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        [sequence] = draw(sampler_of(client), 1)  # call 1 saves the sampler's weights
        client.forward_backward([policy_datum(sequence)], "ppo").result()
        client.forward_backward(TUNED, "cross_entropy").result()
    server.stop()
    name, log = client.model_id, server.server.models[client.model_id].log
    body = json.dumps({"model_id": name, "adam_params": {}}).encode()
    for number in (4, 6):
        log.write(number, "call", TrainingCall(number, "optim_step", body))
    server = start()
    model = server.server.models[name]
    assert model.last_request == model.record.time
    http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY})

    def result(number: int) -> httpx.Response:
        return http.post("/retrieve_future", json={"request_id": f"{name}:call:{number}"})

    while (stepped := result(4)).status_code == 408:
        continue
    length = len(sequence.tokens)
    shown = stepped.json()["metrics"]
    assert (shown["lag_max"], shown["lag_unknown_share"]) == (0, 0)
    assert result(1).json()["sampling_session_id"] == f"{name}:v0:1"
    assert (result(2).headers["content-type"], result(7).status_code) == (wire.PROTOBUF, 410)
    assert result(6).json()["queue_state_reason"] == f"waits for seq_id 5 of {name}"
    assert ledger_of(server) == {"never_trained": 0, "trained_once": 1, "trained_again": 0}
    [row] = metrics.read(model.folder)
    assert (row["step"], row["answer/length"], model.supervised) == (0, length, 6)
    model = start().server.models[name]  # the rows of the step are read
    assert (model.supervised, model.listed, model.recorded) == (6, 1, 4)
    assert (model.version, model.waits_for) == (1, f"waits for seq_id 5 of {name}")


def test_pace_counts_lagging_sequences(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as max_lag + 1 steps of the last step's size train."""
    server = start("staleness.max_lag=1", "staleness.on_exceed=pace")
    pace, samplers = server.server.pace, server.server.samplers
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        sampler = sampler_of(client)
        record = samplers.find(sampler._sampling_session_id)
        early = draw(sampler, 3)
        idle = ServedModel.is_idle
        monkeypatch.setattr(ServedModel, "is_idle", False)
        assert pace(record, 99) == "", "no step has shown yet how many it trains"
        monkeypatch.setattr(ServedModel, "is_idle", idle)
        step(client, [policy_datum(sequence) for sequence in early[:2]])
        draw(sampler_of(client), 2)
    monkeypatch.setattr(ServedModel, "is_idle", False)
    assert [pace(record, count) for count in (0, 1)] == ["", ""]
    assert pace(record, 2) == (
        f"3 sequences of {client.model_id} wait to be trained: with staleness.max_lag = 1 and 2 "
        "sequences a step, more would be too old"
    )
    for other in ({"model": ""}, {"model": f"{client.model_id}@7"}):
        assert pace(msgspec.structs.replace(record, **other), 99) == ""
    model = server.server.models[client.model_id]
    samplers.in_flight[client.model_id] = 7
    assert pace(record, 1).startswith("10 sequences of")
    model.version = 2  # the early one is beyond the limit, and is not trained any more
    assert pace(record, 1).startswith("9 sequences of")
    monkeypatch.setattr(ServedModel, "is_idle", True)
    assert pace(record, 99) == "", "its client trains once it has its samples"


def test_a_state_loaded_into_its_model_begins_a_branch(start: Start) -> None:
    server = start()
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        begin = client.save_state("begin").result().path
        before = scored(client)
        early = draw(sampler_of(client), 1)[0]
        step(client, TUNED, "cross_entropy")
        late_sampler = sampler_of(client)
        late = draw(late_sampler, 1)[0]
        client.load_state(begin).result()
        log = server.server.models[client.model_id].log
        [(number, version)] = log.list_checkpoints()
        assert version == 0 and number == server.server.models[client.model_id].branch > 0
        assert np.array_equal(scored(client), before)
        step(client, [policy_datum(early)], "importance_sampling")
        fresh = sampler_of(client)  # version 1 again, of other weights
        again = draw(fresh, 1)[0]
        data = [policy_datum(sequence) for sequence in (early, late, again)]
        lengths = [len(sequence.tokens) for sequence in (early, late, again)]
        metrics = step(client, data, "importance_sampling")
        assert metrics["lag_max"] == 1.0
        assert metrics["lag_unknown_share"] == pytest.approx(lengths[1] / sum(lengths))
        assert ledger_of(server) == {"never_trained": 0, "trained_once": 2, "trained_again": 1}
        own = fresh.compute_logprobs(prompt()).result()[1:]
        assert own != late_sampler.compute_logprobs(prompt()).result()[1:]
        after = scored(client)
    server = start()  # the loaded state may be gone: the branch has its own checkpoint
    model = server.server.models[client.model_id]
    assert (model.version, model.branch > 0) == (2, True)
    assert model.ancestry.parents == {client.model_id: 0}
    with server.client() as service:
        loaded = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        assert not np.array_equal(scored(loaded), after)


def test_a_killed_training_process_masks_the_same_tokens(start: Start) -> None:
    """The lag and the limit of a repeated call are those of its own time."""
    server = start("staleness.max_lag=1", "staleness.on_exceed=mask")
    results = []
    with server.client() as service:
        for killed in (False, True):
            client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
            params = types.SamplingParams(max_tokens=5, seed=7)
            drawn = sampler_of(client).sample(prompt(), 4, params).result().sequences
            data = [policy_datum(sequence) for sequence in drawn]
            step(client, data[:2], "importance_sampling")
            step(client, data[2:], "importance_sampling")  # lag 1, and 2 after the next step
            client.forward_backward(TUNED, "cross_entropy").result()
            model = server.server.models[client.model_id]
            if killed:
                server.training.exits = {1}
                model.config = settings.read(server.config_path, ("staleness.max_lag=0",))
            client.optim_step(ADAM).result()
            model.config = server.config
            assert step(client, data, "importance_sampling").get("lag_max") is None
            results.append(scored(client))
    assert np.array_equal(*results)


def stability_sampler(client: tinker.TrainingClient) -> tinker.SamplingClient:
    return client.save_weights_and_get_sampling_client(record_stability_info=True).result()


def test_stable_reinforce_is_refused_before_anything_is_sampled(start: Start) -> None:
    server = start()
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        text = r"loss_fn=ppo, or name a loss .* \[losses\] stable_reinforce = .ppo."
        with pytest.raises(tinker.BadRequestError, match=text):
            draw(stability_sampler(client), 1)
        assert server.server.ledger.sampled_total == 0
        data = [policy_datum(draw(sampler_of(client), 1)[0], spans=True)]
        with pytest.raises(tinker.RequestFailedError, match=text):
            client.forward_backward(data, "stable_reinforce").result()
        with pytest.raises(tinker.RequestFailedError, match="the step was not made"):
            client.optim_step(ADAM).result()


def test_a_named_loss_replaces_the_other(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """The same gradient, and every answer says so."""
    server = start("losses.stable_reinforce=ppo")
    results = []
    with server.client() as service:
        for loss in ("ppo", "stable_reinforce"):
            client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
            params = types.SamplingParams(max_tokens=5, seed=7)
            drawn = stability_sampler(client).sample(prompt(), 2, params).result().sequences
            data = [policy_datum(sequence, spans=True) for sequence in drawn]
            for _ in range(2):  # the ratios of the second step are clipped
                done = client.forward_backward(data, loss).result()
                server.training.exits = {1}  # the call is repeated from disk
                assert client.optim_step(ADAM).result().metrics["lag_unknown_share"] == 0
                substituted = done.metrics.get("stable_reinforce_computed_as_ppo:max")
                assert substituted == (1.0 if loss == "stable_reinforce" else None)
            results.append(scored(client))
            rest = service.create_rest_client()
            run = rest.get_training_run(client.model_id).result()
            assert run.user_metadata is not None
            assert run.user_metadata["losses.stable_reinforce"] == "ppo"
    assert np.array_equal(*results)
    with pytest.raises(ConfigError, match=r"belongs to a server with another \[losses\]"):
        start("losses.stable_reinforce=cispo")
    start("losses.stable_reinforce=ppo")


def test_supervised_data_can_be_forbidden(start: Start) -> None:
    server = start("staleness.supervised=refuse")
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        assert len(scored(client)) == 4  # only computed
        [sequence] = draw(sampler_of(client), 1)
        client.forward_backward(TUNED, "cross_entropy")
        client.forward_backward([policy_datum(sequence)], "ppo")  # does not hide the refused one
        with pytest.raises(tinker.RequestFailedError, match=r"staleness\.supervised = refuse"):
            client.optim_step(ADAM).result()
        assert step(client, [policy_datum(sequence)])["lag_max"] == 0
        assert step(client, [policy_datum(sequence, spans=True)])["lag_max"] == 1
        seeded = types.SamplingParams(max_tokens=5, seed=3)
        sampler = sampler_of(client)
        for _ in range(2):  # equal sequences, in two calls of one step: each is trained
            [sequence] = sampler.sample(prompt(), 1, seeded).result().sequences
            client.forward_backward([policy_datum(sequence)], "ppo").result()
        client.optim_step(ADAM).result()
        assert ledger_of(server) == {"never_trained": 0, "trained_once": 2, "trained_again": 1}


def test_masked_lags_do_not_hide_tokens_of_unknown_lag(start: Start) -> None:
    """The same datum has tokens above the limit, which are masked, and unknown ones."""
    server = start("staleness.max_lag=0", "staleness.on_exceed=mask", "staleness.unknown=refuse")
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        [old] = draw(sampler_of(client), 1)
        step(client, TUNED, "cross_entropy")
        known = policy_datum(old)
        step(client, [known])
        turns = {
            name: np.concatenate([known.loss_fn_inputs[name].to_numpy(), last])
            for name, last in (
                ("target_tokens", np.array([0, 5])),
                ("logprobs", np.array([0, -0.25], np.float32)),
                ("advantages", np.array([0, 1], np.float32)),
            )
        }
        text = types.EncodedTextChunk(tokens=[5, 6])
        both = types.Datum(model_input=known.model_input.append(text), loss_fn_inputs=turns)
        with pytest.raises(tinker.RequestFailedError, match="so their lag is unknown"):
            client.forward_backward([both], "ppo").result()


def test_old_versions_of_weights_and_their_samplers_are_forgotten(start: Start) -> None:
    server = start("weights.slots=2", remembered=2)
    samplers = server.server.samplers
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2).result()
        base = service.create_sampling_client(base_model="tiny").result()
        opened = []
        for _ in range(3):
            opened.append(sampler_of(client))
            step(client, TUNED, "cross_entropy")
        assert draw(base, 1) and len(samplers.samplers) == 4
        with pytest.raises(tinker.RequestFailedError, match=r"keeps weights\.slots = 2 versions"):
            draw(opened[0], 1)
        opened.append(sampler_of(client))
        assert len(samplers.samplers) == len(jsonl.read(server.folder / "samplers.jsonl")) == 2
        assert draw(base, 1) and draw(opened[3], 1)
        with pytest.raises(tinker.BadRequestError, match="no such sampler among the 2 used last"):
            draw(opened[2], 1)
        [folder] = (path.parent for path in server.folder.glob("*/model.json"))
        assert len([*(folder / "versions").iterdir()]) == 4  # two versions and their notes
    assert len(start(remembered=2).server.samplers.samplers) == 2


def test_a_task_that_fails_ends_the_server(start: Start) -> None:
    server = start()
    for is_cancelled, error in ((True, None), (False, OSError("full")), (False, OSError("then"))):
        task: Any = SimpleNamespace(
            cancelled=lambda answer=is_cancelled: answer, exception=lambda answer=error: answer
        )
        server.server._end_with(task)
        assert is_cancelled == (server.server.failure is None)
    server.thread.join(600)
    assert not server.thread.is_alive() and str(server.server.failure) == "full"


@pytest.mark.parametrize("is_deleted", [False, True])
def test_changed_weights_fail_a_request_that_waited(start: Start, is_deleted: bool) -> None:
    """The newer weights would be recorded as the older version."""
    server = start()
    samplers = server.server.samplers
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        path = client.save_state("a").result().path
        old = service.create_sampling_client(model_path=path).result()
        pace, samplers.pace = samplers.pace, lambda record, count: "held by the test"
        held = old.sample(prompt(), 1, types.SamplingParams(max_tokens=2)).future()
        while not any(promise.waits_for for promise in [*samplers.promises.values()]):
            assert not held.done()
        step(client, TUNED, "cross_entropy")
        if is_deleted:
            service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
        else:
            client.save_state("a", overwrite=True).result()
        samplers.pace = pace
        client.save_state("b").result()  # after each call, requests that wait are tried
        with pytest.raises(tinker.RequestFailedError, match="deleted or replaced: the") as gone:
            held.result(60)
        assert gone.value.category == types.RequestErrorCategory.User
        assert server.server.ledger.sampled_total == 0
        wrong = "no such weights" if is_deleted else "were saved again: create a new sampling"
        with pytest.raises(tinker.BadRequestError, match=wrong):
            draw(old, 1)
        if not is_deleted:
            new = service.create_sampling_client(model_path=path).result()
            own = new.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8, 1])).result()
            assert np.allclose(own[1:], scored(client), atol=1e-5)


def test_inflight_samplers_follow_the_newest_weights(start: Start) -> None:
    """A sequence is sampled whole from one version, with which it is recorded."""
    server = start("staleness.max_lag=0")
    text = types.ModelInput.from_ints([5, 6, 7, 8, 1])
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        frozen = sampler_of(client)
        before = frozen.compute_logprobs(text).result()
        followers = []
        for _ in range(3):
            step(client, TUNED, "cross_entropy")
            followers.append(client.save_weights_and_get_sampling_client(kind="inflight").result())
            for sampler in followers:
                own = sampler.compute_logprobs(text).result()
                assert np.allclose(own[1:], scored(client), atol=1e-5)
        assert frozen.compute_logprobs(text).result() == before
        data = [policy_datum(draw(sampler, 1)[0]) for sampler in followers]
        assert step(client, data)["lag_max"] == 0
    newest = server.server.samplers.inflight
    assert start().server.samplers.inflight == newest and newest[client.model_id].version == 3


def test_doctor_finds_samples_of_another_distribution(start: Start) -> None:
    """Log-probabilities at temperature 0.5 are not those that training computes."""
    server = start()
    with server.client() as service:
        for temperature, expected in ((1.0, 0), (0.5, 1)):
            client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
            params = types.SamplingParams(max_tokens=5, temperature=temperature, seed=1)
            for _ in range(2):
                result = sampler_of(client).sample(prompt(), 4, params).result()
                step(client, [policy_datum(sequence) for sequence in result.sequences])
            seen = status.examine(server.folder / client.model_id.replace(":", "-"))
            assert len(seen["models"][0]["findings"]) == expected
    lines = fill(status.STATE, **seen).splitlines()
    [line] = [line for line in lines if "health check" in line]
    assert "engine and learner differ at equal weights" in line and "temperature 1" in line


def test_all_weights_train_and_samplers_follow_them(start: Start) -> None:
    server = start("lora.rank=0", "seed=3")
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        base = service.create_sampling_client(base_model="tiny").result()
        text = types.ModelInput.from_ints([5, 6, 7, 8, 1])
        [folder] = (path.parent for path in server.folder.glob("*/model.json"))
        for number in range(2):
            own = sampler_of(client).compute_logprobs(text).result()[1:]
            assert np.allclose(own, scored(client), atol=1e-5)
            untouched = base.compute_logprobs(text).result()[1:]
            assert np.allclose(own, untouched, atol=1e-5) == (number == 0)
            step(client, TUNED, "cross_entropy")
        path = client.save_weights_for_sampler("kept").result().path
        named = service.create_sampling_client(model_path=path).result()
        assert np.allclose(named.compute_logprobs(text).result()[1:], scored(client), atol=1e-5)
        assert (folder / "sampler_weights" / "kept" / "model.safetensors").exists()
        weights = server.trainer.models[client.model_id].trainer.parameters
        assert sum(weight.numel() for weight in weights) == sum(
            weight.numel() for weight in server.trainer.base.hf.parameters()
        )


def test_calls_wait_their_turn_and_are_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "POLL_S", 0.05)
    server = start()
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2).result()
    http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY})

    def ask(number: int) -> httpx.Response:
        body = {"model_id": client.model_id, "seq_id": number}
        return http.post("/optim_step", json=body | {"adam_params": {"learning_rate": 0.0}})

    def step_call(number: int) -> dict[str, Any]:
        answer: dict[str, Any] = ask(number).json()
        return answer

    def result(promise: dict[str, Any]) -> httpx.Response:
        return http.post("/retrieve_future", json={"request_id": promise["request_id"]})

    early = step_call(2)
    waiting = result(early)
    assert waiting.status_code == 408
    assert waiting.json() == {
        "type": "try_again",
        "queue_state": "paused_capacity",
        "queue_state_reason": f"waits for seq_id 1 of {client.model_id}",
    }
    # one waiting call is this client's share of the disk; another client has room beside it
    shares = server.server.shares
    shares.total = 2 * shares.used.total()
    full = ask(3)
    assert full.status_code == 429 and full.headers["retry-after"] == "1"
    session = client.model_id.partition(":")[0]
    assert full.json()["error"] == f"too many training calls of {session} wait"
    assert shares.is_free("another", shares.total // 2)
    step_call(1)  # the one that the others wait for is always accepted
    while result(early).status_code == 408:  # each waits a moment for it
        continue
    assert step_call(2) == early and result(early).json()["type"] == "optim_step"
    assert server.server.models[client.model_id].version == 2
    shares.total *= 100
    later = [step_call(number) for number in range(9, 2, -1)]  # more than it keeps in memory
    while result(later[0]).status_code == 408:
        continue
    assert server.server.models[client.model_id].version == 9 and not shares.used.total()


def test_a_model_whose_creation_failed_has_no_weights(start: Start) -> None:
    """It must not go on with those of the base model."""
    server = start()
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=2).result()
        path = client.save_state("w").result().path
        shutil.rmtree(find_saved(server.folder, path)[0])
        with pytest.raises(tinker.RequestFailedError, match="the adapter in"):
            service.create_training_client_from_state(path).result()
    [model] = [model for model in server.server.models.values() if model.record.source]
    http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY})
    body = {"model_id": model.record.model, "seq_id": 1, "adam_params": {}}
    promise = http.post("/optim_step", json=body).json()
    reply = http.post("/retrieve_future", json={"request_id": promise["request_id"]}).json()
    assert reply["error"].startswith(f"{model.record.model} was not created: the adapter in ")


def test_a_killed_process_is_given_the_model_anew(start: Start) -> None:
    """Between a gradient and its step, and while a step is made: as without it."""
    server = start("training.checkpoint_every=2", "restarts=1")
    results = []
    with server.client() as service:
        for exits in (set(), {4}, {7}):
            client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
            server.training.exits = set(exits)
            norms = [step(client, TUNED, "cross_entropy")["optim_grad_norm"] for _ in range(4)]
            results.append((norms, scored(client).tolist()))
            log = server.server.models[client.model_id].log
            assert log.list_checkpoints() == [(4, 2), (8, 4)]
            assert log.list_numbers("call") == [0, 9]  # those that the last one lacks
            assert log.list_numbers("outcome") == [0, 5, 6, 7, 8, 9]
        assert server.training.generation == 3 and results[0] == results[1] == results[2]
        server.training.exits = {1, 2, 3, 4}  # more than it may be started again
        with pytest.raises(tinker.RequestFailedError, match="the process ended"):
            client.optim_step(ADAM).result(timeout=20)


def test_a_server_of_adapters_needs_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is built and before a client waits for an adapter."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = settings.read(str(write_config(tmp_path)))
    with pytest.raises(ConfigError, match=r"lora\.rank = 8: needs peft: pip install 'asyncrl\[tin"):
        tinker_server.serve(config, "server")
    assert not (tmp_path / "server").exists()


def test_a_client_that_ends_amid_a_request_is_no_error(start: Start) -> None:
    """A recipe that fails closes its connections: the server's output stays readable."""
    server = start()
    scope = {
        **{"type": "http", "method": "POST", "path": "/api/v1/asample", "raw_path": b""},
        **{"query_string": b"", "headers": [(b"x-api-key", KEY.encode())]},
    }
    answers: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answers.append(message)

    asyncio.run(server.server.starlette()(scope, receive, send))
    assert answers[0]["status"] == 499
