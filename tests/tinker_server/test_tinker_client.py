"""The unmodified client of the Tinker API against `asyncrl tinker`, a real server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker_kit import (
    PROMPT,
    ServerProcess,
    created,
    draw,
    output_logprobs,
    policy_datum,
    prompt,
    tuned_datum,
    write_config,
)
from tinker_reference_kit import learners_gradient

from asyncrl.config.tree import LoraConfig
from asyncrl.models.policy import load_policy
from asyncrl.tinker.messages import LoadModel
from asyncrl.tinker.workers.trainer import TrainedModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(write_config(tmp_path_factory.mktemp("tinker")))
    yield process
    process.stop()


@pytest.fixture(scope="module")
def service(server: ServerProcess) -> Iterator[tinker.ServiceClient]:
    with server.client() as client:
        yield client


@pytest.fixture
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return created(service.create_lora_training_client("tiny", rank=4))


def test_losses_train_and_the_lag_is_known(trained: tinker.TrainingClient) -> None:
    sampler = created(trained.save_weights_and_get_sampling_client())
    sequences = draw(sampler)
    assert len({sequence.sequence_id for sequence in sequences}) == 2
    losses = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    for lag, loss in enumerate(losses):
        data = [policy_datum(sequence, spans=lag % 2 == 0) for sequence in sequences]
        scored = trained.forward_backward(data, loss)
        stepped = trained.optim_step(types.AdamParams(learning_rate=1e-3))
        if not lag:  # the weights that sampled: the same log-probabilities
            own = output_logprobs(scored.result())[len(PROMPT) - 1 :]
            assert np.allclose(own, sequences[0].logprobs, atol=1e-5)
        metrics = stepped.result().metrics
        assert metrics is not None
        assert (metrics["lag_mean"], metrics["lag_unknown_share"]) == (lag, 0.0)
        assert metrics["optim_grad_norm"] > 0 or loss == "gspo"  # every sequence may be clipped


def test_a_custom_loss_has_the_learners_gradient(
    server: ServerProcess, trained: tinker.TrainingClient
) -> None:
    """Adam's first moment is the gradient where beta1 is 0; the state of a model has it."""
    sequences = draw(created(trained.save_weights_and_get_sampling_client()), 3)
    advantages = [1.0, -0.5, 2.0]
    data = [
        policy_datum(sequence, advantage, spans=True)
        for sequence, advantage in zip(sequences, advantages, strict=True)
    ]
    trained.forward_backward(data, "importance_sampling")
    trained.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    before = trained.save_state("before").result().path

    def clipped(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros(())
        for datum, lp in zip(data, logprobs, strict=True):
            behavior, adv = (
                torch.tensor(datum.loss_fn_inputs[name].data) for name in ("logprobs", "advantages")
            )
            ratio = torch.where(adv != 0, lp - behavior, 0.0).exp()
            total = total - torch.minimum(ratio * adv, ratio.clamp(0.7, 1.1) * adv).sum()
        return total, {"custom_loss": float(total.detach())}

    scored = trained.forward_backward_custom(data, clipped)
    stepped = trained.optim_step(types.AdamParams(learning_rate=0.0, beta1=0.0))
    assert scored.result().metrics["custom_loss"] != 0
    assert stepped.result().metrics["lag_max"] == 1  # the spans come with the client's weights
    after = trained.save_state("after").result().path
    saved = {path: server.saved(path) for path in (before, after)}
    moments = torch.load(saved[after] / "state.pt", weights_only=True)["optimizer"]["state"]
    ours = torch.cat([moments[place]["exp_avg"].flatten() for place in sorted(moments)])
    base = load_policy(server.folder.parent / "tiny", "float32", "cpu")
    lora = LoraConfig(rank=4, alpha=32.0)
    model = TrainedModel(base, LoadModel("m", rank=4, seed=0, path=str(saved[before])), lora)
    rows = [(list(sequence.tokens), list(sequence.logprobs)) for sequence in sequences]
    theirs = learners_gradient(
        model, PROMPT, rows, advantages, surrogate="ppo", eps_low=0.3, eps_high=0.1
    )
    assert float(theirs.abs().max()) > 1e-3
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


def test_supervised_training_lowers_the_loss(trained: tinker.TrainingClient) -> None:
    data = [tuned_datum([5, 6, 7, 8, 1]), tuned_datum([9, 10, 1])]
    first = trained.forward_backward(data, "cross_entropy")
    trained.optim_step(types.AdamParams(learning_rate=1e-2))
    second = trained.forward(data, "cross_entropy").result()
    before, after = first.result().metrics["loss:sum"], second.metrics["loss:sum"]
    assert after < before
    assert before == pytest.approx(
        -sum(float(output_logprobs(first.result(), place).sum()) for place in (0, 1)), rel=1e-5
    )


def test_prompt_logprobs_equal_the_training_forward(trained: tinker.TrainingClient) -> None:
    sampler = created(trained.save_weights_and_get_sampling_client())
    scored = sampler.compute_logprobs(prompt()).result()
    forward = trained.forward([tuned_datum(PROMPT)], "cross_entropy").result()
    assert scored[0] is None
    most = types.SamplingParams(max_tokens=1)
    likely = sampler.sample(prompt(), 1, most, topk_prompt_logprobs=25).result()
    rows = likely.topk_prompt_logprobs
    assert rows is not None and not rows[0]
    for token, logprob, row in zip(PROMPT[1:], scored[1:], rows[1:], strict=True):
        values = dict(row)
        assert len(values) == 25 and values.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    assert np.allclose(scored[1:], output_logprobs(forward), atol=1e-5)


def test_sampling_follows_its_parameters(service: tinker.ServiceClient) -> None:
    sampler = created(service.create_sampling_client(base_model="tiny"))
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
    seeded = types.SamplingParams(max_tokens=6, seed=3)
    for params in (greedy, seeded):
        first, again = (sampler.sample(prompt(), 1, params).result().sequences for _ in range(2))
        assert list(first[0].tokens) == list(again[0].tokens)
    tokens = list(sampler.sample(prompt(), 1, seeded).result().sequences[0].tokens)
    cut = types.SamplingParams(max_tokens=6, seed=3, stop=[tokens[2]])
    [stopped] = sampler.sample(prompt(), 1, cut).result().sequences
    assert list(stopped.tokens) == tokens[: tokens.index(tokens[2]) + 1]
    assert stopped.stop_reason == "stop"


def test_a_saved_state_continues_in_a_new_model(
    server: ServerProcess, service: tinker.ServiceClient, trained: tinker.TrainingClient
) -> None:
    data = [tuned_datum([5, 6, 7, 8, 1])]
    trained.forward_backward(data, "cross_entropy")
    trained.optim_step(types.AdamParams(learning_rate=1e-2))
    path = trained.save_state("half").result().path
    later = created(service.create_training_client_from_state_with_optimizer(path))
    results = []
    for client in (trained, later):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2))
        results.append(output_logprobs(client.forward(data, "cross_entropy").result()))
    assert np.array_equal(*results)
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(trained.model_id).result()
    assert [checkpoint.tinker_path for checkpoint in listed.checkpoints] == [path]


def test_models_of_several_clients_do_not_touch_each_other(service: tinker.ServiceClient) -> None:
    clients = [created(service.create_lora_training_client("tiny", rank=rank)) for rank in (2, 8)]
    data = [tuned_datum([5, 6, 7, 8, 1])]
    before = output_logprobs(clients[1].forward(data, "cross_entropy").result())
    clients[0].forward_backward(data, "cross_entropy")
    clients[0].optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert np.array_equal(
        before, output_logprobs(clients[1].forward(data, "cross_entropy").result())
    )


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("stable_reinforce", {}, "its definition is not published.* loss_fn=ppo, or name a loss"),
        ("ppo", {"clip_lower": 0.8}, "loss_fn_config.clip_lower: ppo has no such option"),
    ],
)
def test_a_refused_loss_makes_no_step(
    trained: tinker.TrainingClient, loss: types.LossFnType, config: dict[str, float], message: str
) -> None:
    data = [tuned_datum([5, 6, 7, 8, 1])]
    refused = trained.forward_backward(data, loss, config)
    stepped = trained.optim_step(types.AdamParams(learning_rate=1.0))
    with pytest.raises(tinker.RequestFailedError, match=message):
        refused.result()
    with pytest.raises(tinker.RequestFailedError, match="the step was not made"):
        stepped.result()
    assert trained.forward_backward(data, "cross_entropy").result().metrics
