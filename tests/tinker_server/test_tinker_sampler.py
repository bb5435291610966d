"""Requests to sample, without a server: the engine of their process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker.types as sdk
import torch
from tinker_kit import SYMBOLS

from asyncrl.models.policy import build_model, load_policy
from asyncrl.tinker import wire
from asyncrl.tinker.messages import BASE, CallFailure, SampleCall, SampleResult
from asyncrl.tinker.settings import TinkerConfig, TinkerModel, TinkerSampling
from asyncrl.tinker.workers.sampler import KEPT, NO_LOGPROB, NOT_FINITE, STEPS, Sampler

PROMPT = np.arange(5, 25, dtype="<i4")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TinkerConfig:
    path = tmp_path_factory.mktemp("tinker") / "tiny"
    build_model(path, SYMBOLS, hidden=32, layers=1, heads=2, max_positions=64)
    return TinkerConfig(
        model=TinkerModel(path=str(path)), sampling=TinkerSampling(slots=16, context=64)
    )


@pytest.fixture
def sampler(config: TinkerConfig) -> Sampler:
    """With the weights "bad", which are not finite."""
    made = Sampler(config, lambda number, result: None)
    made.versions["bad", "", 0] = {
        name: torch.full_like(weight, float("nan")) for name, weight in made.base.items()
    }
    return made


def sample_call(
    path: str = "", version: int = 0, count: int = 3, ticket: int = 0, **more: Any
) -> SampleCall:
    """The call that a request becomes; without `stop` and `texts` nothing ends its sequences."""
    scores = {name: more.pop(name) for name in [*more] if "prompt_" in name}
    prompt = sdk.ModelInput.from_ints(more.pop("prompt", PROMPT).tolist())
    values = {"max_tokens": 20, "seed": 7, "stop": more.pop("texts", [])} | more
    params = sdk.SamplingParams(**values)
    return wire.parse_sample_request(
        sdk.SampleRequest(prompt=prompt, num_samples=count, sampling_params=params, **scores),
        (path, "", version),
        **{"stop_tokens": (), "limit": 999, "default": 1, "vocabulary": 99},
        seed=values["seed"],
        ticket=ticket,
    )


def sample(sampler: Sampler, *calls: SampleCall) -> list[Any]:
    results: dict[int, SampleResult | CallFailure] = {}
    sampler.reply = results.__setitem__
    for number, call in enumerate(calls):
        sampler.add(number, call)
    while len(results) < len(calls):
        sampler.work()
    assert not sampler.is_busy
    return [results[number] for number in range(len(calls))]


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [np.frombuffer(one.tokens, "<i4").tolist() for one in result.sequences]


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}])
def test_weights_not_finite_fail_their_requests(sampler: Sampler, more: dict[str, Any]) -> None:
    """Keys and values that are not finite must not reach the requests after it either."""
    [before] = sample(sampler, sample_call(**more))
    assert isinstance(before, SampleResult)
    assert [(len(one.tokens), one.stop) for one in before.sequences] == [(80, False)] * 3
    first = int.from_bytes(before.sequences[0].tokens[:4], "little")
    [ended] = sample(sampler, sample_call(stop=[first], **more))
    assert isinstance(ended, SampleResult) and ended.sequences[0].stop
    assert sample(sampler, sample_call("bad", **more), sample_call(**more)) == [
        CallFailure(NOT_FINITE),
        before,
    ]
    assert "weights have diverged, or the temperature is too small" in NOT_FINITE
    assert sample(sampler, sample_call(**more)) == [before]


def test_requests_are_sampled_together_until_they_are_canceled(sampler: Sampler) -> None:
    [expected] = map(tokens_of, sample(sampler, sample_call(max_tokens=40)))
    results: dict[int, Any] = {}
    sampler.reply = results.__setitem__
    sampler.add(0, sample_call(max_tokens=40))
    sampler.work()
    for number, weights in ((1, "bad"), (2, ""), (3, "")):
        sampler.add(number, sample_call(weights, seed=number))
    sampler.add(4, sample_call(prompt=np.zeros(64, "<i4")))
    sampler.work()
    assert (set(sampler.jobs), [job.number for job in sampler.waiting]) == ({0}, [1, 2, 3, 4])
    sampler.waiting.rotate(-1)
    waits = sampler.waiting.pop()
    sampler.work()
    sampler.waiting.append(waits)
    assert (set(sampler.jobs), sampler.loaded) == ({0, 2, 3}, BASE)
    assert "64" in results.pop(4).error and not results
    for number in (1, 2, 9):  # waits, is sampled, unknown
        sampler.cancel(number)
    assert (set(sampler.jobs), len(sampler.waiting), sampler.is_spoiled) == ({0, 3}, 0, False)
    assert {key[0] for key in sampler.engine.count_tokens()} == {0, 3}
    sampler.is_spoiled = True  # by a sequence that has ended
    sampler.cancel(3)
    sampler.add(5, sample_call(max_tokens=40))
    sampler.work()
    assert sampler.is_spoiled and (set(sampler.jobs), len(sampler.waiting)) == ({0}, 1)
    while sampler.is_busy:
        sampler.work()
    assert set(results) == {0, 5} and not sampler.is_spoiled
    assert tokens_of(results[0]) == tokens_of(results[5]) == expected
    sampler.add(6, sample_call("bad"))
    sampler.work()
    sampler.cancel(6)  # after STEPS of its tokens
    assert sampler.is_spoiled and STEPS < 20
    assert tokens_of(sample(sampler, sample_call(max_tokens=40))[0]) == expected


def test_a_request_sets_how_its_tokens_are_sampled(config: TinkerConfig, sampler: Sampler) -> None:
    [drawn] = sample(sampler, sample_call())
    assert (drawn.prompt_logprobs, drawn.topk_ids, drawn.topk_logprobs) == (b"", b"", b"")
    many, same, other, seeded, greedy, one, cold, short = sample(
        sampler,
        sample_call(count=40),
        sample_call(),
        sample_call(ticket=1),
        sample_call(seed=8),
        sample_call(temperature=0.0),
        sample_call(top_k=1, temperature=0.5),
        sample_call(temperature=1e-3),
        sample_call(prompt=PROMPT[:7]),
    )
    assert tokens_of(same) == tokens_of(drawn) == tokens_of(many)[:3]
    assert {len(tokens) for tokens in tokens_of(many)} == {20}, "no token ends it"
    assert {1} < {token for tokens in tokens_of(many) for token in tokens}
    assert len({str(tokens_of(result)) for result in (drawn, other, seeded, greedy)}) == 4
    assert tokens_of(greedy) == tokens_of(one) == tokens_of(cold)
    [alone] = sample(sampler, sample_call(prompt=PROMPT[:7]))
    assert tokens_of(short) == tokens_of(alone) != tokens_of(drawn)
    assert not np.frombuffer(greedy.sequences[0].logprobs, "<f4").any()
    policy = load_policy(config.model.path, "float32", "cpu")
    tokens = np.array(tokens_of(drawn)[0], np.int32)
    theirs = policy.logprobs([PROMPT], [tokens], torch.ones(1)).logprobs.detach()
    assert np.allclose(np.frombuffer(drawn.sequences[0].logprobs, "<f4"), theirs, atol=1e-5)


def test_a_prompt_is_scored_with_likeliest_tokens(config: TinkerConfig, sampler: Sampler) -> None:
    plain, likely = sample(
        sampler,
        sample_call(prompt_logprobs=True),
        sample_call(topk_prompt_logprobs=3, max_tokens=1),
    )
    policy = load_policy(config.model.path, "float32", "cpu")
    own = policy.logprobs([PROMPT[:1]], [PROMPT[1:]], torch.ones(1)).logprobs.detach()
    for result in (plain, likely):
        scores = np.frombuffer(result.prompt_logprobs, "<f4")
        assert np.isnan(scores[0]) and np.allclose(scores[1:], own, atol=1e-5)
    assert (plain.topk_ids, plain.topk_logprobs) == (b"", b"")
    ids = np.frombuffer(likely.topk_ids, "<i4").reshape(len(PROMPT), 3)
    values = np.frombuffer(likely.topk_logprobs, "<f4").reshape(len(PROMPT), 3)
    assert (ids[0].tolist(), values[0].tolist()) == ([0] * 3, [NO_LOGPROB] * 3)
    assert NO_LOGPROB == -99999.0, "which clients take for an empty cell"
    for place in range(1, len(PROMPT)):
        asked = [np.append(PROMPT[1:place], token).astype(np.int32) for token in ids[place]]
        scored = policy.logprobs([PROMPT[:1]] * 3, asked, torch.ones(3)).logprobs.detach()
        assert np.allclose(scored.view(3, place)[:, -1], values[place], atol=1e-5)


def test_a_stop_text_ends_a_sequence_with_the_token_that_completes_it(sampler: Sampler) -> None:
    [whole] = sample(sampler, sample_call(count=1))
    [ids] = tokens_of(whole)
    decoded = [sampler.tokenizer.decode(ids[:count]) for count in range(21)]
    for first, end in ((0, 1), (9, 11), (18, 20)):
        text = decoded[end].removeprefix(decoded[first])
        count = next(count for count in range(21) if text in decoded[count])
        [cut] = sample(sampler, sample_call(count=1, texts=["\t", text]))
        assert (tokens_of(cut), cut.sequences[0].stop) == ([ids[:count]], True)
        assert cut.sequences[0].logprobs == whole.sequences[0].logprobs[: 4 * count]
    assert sample(sampler, sample_call(count=1, texts=["\t"])) == [whole]


def test_a_few_versions_of_weights_stay_in_memory(config: TinkerConfig, sampler: Sampler) -> None:
    path = str(Path(config.model.path))
    [base] = sample(sampler, sample_call())
    del sampler.versions["bad", "", 0]
    for version in range(KEPT + 2):
        assert sample(sampler, sample_call(path, version=version)) == [base]
    assert list(sampler.versions) == [BASE, *((path, "", version) for version in range(2, 6))]
    weights = {name: torch.zeros_like(weight) for name, weight in sampler.base.items()}
    sampler.versions[path, "", 5] = weights | {list(weights)[-1]: torch.zeros(2, 3, 4)}
    results = sample(sampler, sample_call(), sample_call(path, version=5), sample_call())
    assert isinstance(results[1], CallFailure), "some weights are loaded by then"
    assert tokens_of(results[0]) == tokens_of(results[2]) == tokens_of(base)
