"""Scores of given sequences: each engine against transformers, the learner and its own samples."""

from pathlib import Path

import numpy as np
import pytest
import torch
from any_model_kit import directory
from engine_kit import engine, request, run

import actors.engine
from actors import decoder
from actors.engine import PromptScores
from actors.engine_embedded import EmbeddedEngine, make_engine
from actors.engine_generic import GenericEngine
from asyncrl.config import load
from asyncrl.contract.errors import ConfigError
from asyncrl.contract.versions import Label
from asyncrl.models import policy

PROMPTS = [
    [3, 4, 5, 6, 7, 8, 3],
    [5],
    [4, 4, 9, 3],
    [*range(3, 11), *range(9, 3, -1), *range(3, 9)],
]


def arrays(prompts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(prompt, np.int32) for prompt in prompts]


def check(model: policy.PolicyModel, scores: list[PromptScores], most_likely: int) -> None:
    """Compare with one plain forward of transformers a prompt."""
    assert len(scores) == len(PROMPTS)
    for prompt, found in zip(PROMPTS, scores, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logs = torch.log_softmax(model.hf(input_ids=ids).logits[0, :-1].float(), -1)
        want = logs.gather(1, ids[0, 1:, None])[:, 0]
        best, best_ids = logs.topk(most_likely)
        assert found.logprobs.shape == (len(prompt) - 1,)
        torch.testing.assert_close(torch.from_numpy(found.logprobs), want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(torch.from_numpy(found.top_logprobs), best, atol=2e-5, rtol=1e-4)
        assert found.top_ids.dtype == np.int32 and found.top_ids.tolist() == best_ids.tolist()


@pytest.mark.parametrize(
    "family,kv,tied", [("qwen3", 2, True), ("llama", 4, False), ("qwen2", 2, True)]
)
@pytest.mark.parametrize("fixed", [False, True])
def test_scores_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kv: int, tied: bool, fixed: bool
) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", family=family, kv_heads=kv, tied=tied, seed=3)
    scored = engine(model, fixed=fixed)
    check(model, scored.score(arrays(PROMPTS), 3), 3)
    sizes: list[int] = []
    of_states = scored.weights.compute_logits

    def count(states: torch.Tensor) -> torch.Tensor:
        sizes.append(len(states))
        return of_states(states)

    # blocks of a few queries, and of 16 tokens' logits
    monkeypatch.setattr(decoder, "SCORES", 64)
    monkeypatch.setattr(actors.engine, "SCORED", 64)
    monkeypatch.setattr(scored.weights, "compute_logits", count)
    check(model, scored.score(arrays(PROMPTS)), 1)
    assert sorted(sizes) == [0, 3, 3, 6, 16]
    assert scored.score([]) == []


def test_a_model_without_packed_forward_is_scored(tmp_path: Path) -> None:
    path = directory(tmp_path, "gpt2", "abcdefgh")
    scored = GenericEngine(policy.load_policy(path, "float32", "cpu"), slots=4, context=64)
    model = policy.load_policy(path, "float32", "cpu")
    scored.load(dict(policy.list_named_weights(model)), Label(1, 0), "d")
    check(model, scored.score(arrays(PROMPTS), 3), 3)


def test_the_engine_of_a_config_is_that_of_its_model(tmp_path: Path) -> None:
    path = directory(tmp_path, "gpt2", "abcdefgh")
    keys = {"slots": 3, "context": 48, "max_new_tokens": 7}
    raw = {"model": {"path": str(path)}, "task": {"name": "sort"}, "generator": keys}
    made = make_engine(load.build(raw))
    assert type(made) is GenericEngine and made.slots == 3
    raw["model"] = {"path": str(tmp_path / "tokenizer")}
    packed = make_engine(load.build(raw))
    assert type(packed) is EmbeddedEngine and packed.slots == 3
    for key, value in (("mantissa_bits", 7), ("quantize", "int8"), ("speculate", 2)):
        raw |= {"model": {"path": str(path)}, "generator": keys | {key: value}}
        with pytest.raises(ConfigError, match=rf"generator\.{key}: needs a model of the packed"):
            make_engine(load.build(raw))


def test_scores_of_sampled_tokens_are_their_logprobs_and_the_learners(tmp_path: Path) -> None:
    """In exact mode bit by bit; and scoring leaves the rows alone that are being sampled."""
    model = policy.build_model(tmp_path, "abcdefgh", seed=3)
    model.exact = True
    requests = [request(t, s, [3 + t] * (1 + t), 12) for t in range(3) for s in range(2)]
    alone = run(engine(model, fixed=True), requests)
    beside = engine(model, fixed=True)
    beside.add(requests)
    answers = beside.step(4)
    beside.score(arrays(PROMPTS))
    while beside.active:
        answers += beside.step(4)
    assert len(answers) == len(requests)
    scores = beside.score([np.concatenate([a.prompt, a.tokens]) for a in answers])
    for answer, found in zip(answers, scores, strict=True):
        assert answer.tokens.tolist() == alone[answer.key].tokens.tolist()
        assert found.logprobs[len(answer.prompt) - 1 :].tolist() == answer.logprobs.tolist()
        with torch.no_grad():
            learned = model.logprobs([answer.prompt], [answer.tokens], torch.ones(1)).logprobs
        assert learned.tolist() == answer.logprobs.tolist()


def test_scores_follow_the_loaded_weights_and_the_context(tmp_path: Path) -> None:
    model = policy.build_model(tmp_path, "abcdefgh", seed=3)
    scored = engine(model)
    before = scored.score(arrays(PROMPTS))
    with torch.no_grad():
        model.hf.lm_head.weight.mul_(2)
    scored.load(dict(policy.list_named_weights(model)), Label(1, 1), "d1")
    after = scored.score(arrays(PROMPTS))
    assert not np.allclose(before[0].logprobs, after[0].logprobs)
    check(model, after, 1)
    with pytest.raises(ConfigError, match=r"a prompt of 65 tokens .* generator.context = 64"):
        scored.score([np.full(65, 3, np.int32)])
