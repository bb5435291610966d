"""actors/turn.py: the records of a completion with its reward, and of a refused prompt."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from generator_kit import ROOT, Engine, ticket

from actors.engine import Completion
from actors.rewards import RewardResult
from actors.turn import (
    GeneratorTurn,
    PromptTooLong,
    ScoredResponse,
    build_failed_trajectory,
    build_trajectory,
)
from asyncrl.config import load
from asyncrl.contract.errors import NotFiniteError, ProtocolError
from asyncrl.contract.messages import RewardFailure, SamplingSettings, VersionSpan
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import load_tokenizer

AT = Label(1, 2)
SPECIAL = np.array([0, 7, 1])  # the padding token, a character, the end
SPANS = [VersionSpan(AT, "d", 0, 3, AT)]


def written(logprobs: list[float]) -> ScoredResponse:
    prompt, tokens = np.array([5, 6]), np.array([7, 8, 1])  # int64, as an engine may give them
    made = Completion((4, 1, 9), prompt, tokens, np.array(logprobs), SPANS, "length", support=None)
    sampling = SamplingSettings(max_new_tokens=12, temperature=0.5)
    return ScoredResponse(msgspec.structs.replace(ticket(4, 9, 1), sampling=sampling), made, "31")


def test_a_trajectory_has_the_tokens_as_sampled_and_the_reward_as_judged() -> None:
    result = RewardResult((4, 1, 9), 1, {"form": 0.5}, [0.25, float("nan"), 1.0], "")
    began = time.monotonic()
    made = build_trajectory(written([-0.5, -0.25, 0.0]), result)
    assert (made.ticket, made.sample, made.attempt) == (4, 1, 9)
    assert np.frombuffer(made.prompt_tokens, "<i4").tolist() == [5, 6]
    assert np.frombuffer(made.tokens, "<i4").tolist() == [7, 8, 1]
    assert np.frombuffer(made.behavior_logprobs, "<f4").tolist() == [-0.5, -0.25, 0.0]
    assert made.mask == b"\1\1\1" and made.segments == [("model", 0, 3)] and made.spans == SPANS
    assert type(made.reward) is float and made.reward == 1.0
    assert made.reward_parts == {"form": 0.5} and made.failed == ""
    rewards = np.frombuffer(made.token_rewards, "<f4").tolist()
    assert rewards[0] == 0.25 and np.isnan(rewards[1]) and rewards[2] == 1.0
    assert (made.finish, made.temperature, made.text) == ("length", 0.5, "31")
    assert made.prompt_text == "31=" and made.images == []
    assert made.support == made.routed == b""
    assert began <= made.generated_at <= time.monotonic()
    failure = RewardFailure("data", "no")
    made = build_trajectory(written([0.0, 0.0, 0.0]), RewardResult((4, 1, 9), 0, {}, None, failure))
    assert made.failed == failure and made.token_rewards == b""


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_names_ticket_sample_and_weights(bad: float) -> None:
    result = RewardResult((4, 1, 9), 0, {}, None, "")
    why = r"not finite for ticket 4, sample 1, with weights 1\.2"
    with pytest.raises(NotFiniteError, match=why) as error:
        build_trajectory(written([-0.5, bad, 0.0]), result)
    assert isinstance(error.value, ProtocolError), "a divergence, and a breach of the protocol"


def test_a_prompt_that_is_too_long_becomes_a_failed_sample_without_tokens() -> None:
    refused = PromptTooLong(ticket(4, 9, 1), (4, 1, 9), RewardFailure("data", "too long"))
    made = build_failed_trajectory(refused, AT, "d")
    assert (made.ticket, made.sample, made.attempt) == (4, 1, 9)
    assert made.tokens == made.prompt_tokens == made.behavior_logprobs == made.mask == b""
    assert made.spans == [VersionSpan(AT, "d", 0, 0, AT)]
    assert (made.reward, made.reward_parts) == (0.0, {})
    assert made.failed == RewardFailure("data", "too long")


def test_all_free_rows_of_the_engine_are_filled(small_model: Path) -> None:
    config = load.load(ROOT / "configs" / "demo.toml", [f"model.path={str(small_model)!r}"])
    engine = Engine()
    turn = GeneratorTurn(config, engine, lockstep=False)
    turn.context = 9
    try:
        turn.accept_tickets([ticket(0, 1, 1, samples=20)])
        first, refused = turn.build_requests(Label(1, 0), 3)
        engine.add(first)
        assert [request.key for request in first] == [(0, n, 1) for n in range(3)]
        more, _ = turn.build_requests(Label(1, 0))
        assert [request.key for request in more] == [(0, n, 1) for n in range(3, 8)]
        prompt = len(first[0].prompt)
        assert {request.max_new_tokens for request in more} == {9 - prompt} and not refused
        assert more[0].stop == turn.stops and more[0].group == 0 and more[0].seed == 0
        turn.context = prompt
        none, refused = turn.build_requests(Label(1, 0), 1)
        why = f"the prompt has {prompt} tokens, generator.context is {prompt}"
        assert none == [] and refused == [
            PromptTooLong(ticket(0, 1, 1, samples=20), (0, 8, 1), RewardFailure("data", why))
        ]
        turn.context = prompt + 1
        ((last,), refused) = turn.build_requests(Label(1, 0), 1)
        assert last.max_new_tokens == 1 and not refused
    finally:
        turn.rewards.close()


def test_the_text_of_a_completion_has_its_special_tokens_but_no_stop_token(
    small_model: Path,
) -> None:
    """The reward function compares it with reference answers, which may hold special tokens."""
    turn = GeneratorTurn.__new__(GeneratorTurn)
    held = SimpleNamespace(
        held={(4, 9): SimpleNamespace(ticket="t")}, finish_sample=lambda *_: None
    )
    turn.schedule, turn.unscored = held, {}
    turn.tokenizer, turn.stops = load_tokenizer(small_model), (1,)
    response = turn.finish(dataclasses.replace(written([0.0] * 3).completion, tokens=SPECIAL))
    assert response is not None and 1 in SPECIAL
    assert response.text == turn.tokenizer.decode([0, 7], skip_special_tokens=False)
    assert response.text != turn.tokenizer.decode([0, 7], skip_special_tokens=True)
