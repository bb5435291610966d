"""The unmodified client of the Tinker API against `asyncrl tinker`, a real server."""

import runpy
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from process_kit import ROOT
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
    sequences = draw(created(trained.save_weights_and_get_sampling_client()))
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


def test_a_prompt_is_scored_and_parameters_followed(trained: tinker.TrainingClient) -> None:
    sampler = created(trained.save_weights_and_get_sampling_client())
    forward = trained.forward([tuned_datum(PROMPT)], "cross_entropy").result()
    scored = sampler.compute_logprobs(prompt()).result()
    assert scored[0] is None and np.allclose(scored[1:], output_logprobs(forward), atol=1e-5)
    seeded = types.SamplingParams(max_tokens=6, seed=3)
    reply = sampler.sample(prompt(), 1, seeded, topk_prompt_logprobs=25).result()
    rows, [first] = reply.topk_prompt_logprobs, reply.sequences
    assert rows is not None and not rows[0]
    for token, logprob, row in zip(PROMPT[1:], scored[1:], rows[1:], strict=True):
        assert len(row) == 25 and dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    cut = types.SamplingParams(max_tokens=6, seed=3, stop=[first.tokens[2]])
    [stopped] = sampler.sample(prompt(), 1, cut).result().sequences
    assert stopped.tokens == first.tokens[: first.tokens.index(first.tokens[2]) + 1]
    assert stopped.stop_reason == "stop"


def test_a_custom_loss_has_the_gradient_of_the_servers_own(trained: tinker.TrainingClient) -> None:
    """Of ppo, which is the learner's (test_tinker_losses.py)."""
    sequences = draw(created(trained.save_weights_and_get_sampling_client()), 3)
    data = [
        policy_datum(sequence, advantage, spans=True)
        for sequence, advantage in zip(sequences, [1.0, -0.5, 2.0], strict=True)
    ]
    trained.forward_backward(data, "importance_sampling")
    trained.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    before = trained.save_state("before").result().path

    adapter = runpy.run_path(str(ROOT / "docs" / "adapters" / "tinker_loss.py"))
    norms, after = [], []
    for custom in (True, False):
        trained.load_state(before).result()
        if custom:
            done = trained.forward_backward_custom(data, adapter["method_loss"]).result()
            assert done.metrics["is/ess"] > 0
        else:
            bounds = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
            trained.forward_backward(data, "ppo", bounds).result()
        adam = types.AdamParams(learning_rate=1e-2, eps=1.0)  # a step that follows the gradient
        metrics = trained.optim_step(adam).result().metrics
        assert metrics["lag_max"] == 1  # the spans come with the client's weights
        norms.append(metrics["optim_grad_norm"])
        after.append(output_logprobs(trained.forward(data, "ppo").result()))
    assert norms[0] > 1e-3 and norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert np.allclose(*after, rtol=1e-6, atol=1e-6)


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
