"""actors/turn.py: the records of a completion with its reward, and of a refused prompt."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from generator_kit import ROOT, Engine, announcement, ticket

from actors.delivery import estimate_size
from actors.engine import Completion
from actors.rewards import RewardResult
from actors.schedule import LeasedTicket, TicketSchedule
from actors.turn import (
    EVERYTHING,
    GeneratorTurn,
    PromptTooLong,
    ScoredResponse,
    build_failed_trajectory,
    build_trajectory,
    count_samples_to_request,
)
from asyncrl.config import load
from asyncrl.contract.errors import NotFiniteError, ProtocolError
from asyncrl.contract.messages import (
    RewardFailure,
    SamplingSettings,
    Ticket,
    TrainingSequence,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.versions import Label
from asyncrl.models.tokenizer import load_tokenizer

AT = Label(1, 2)
SPECIAL = np.array([0, 7, 1])  # the padding token, a character, the end
SPANS = [VersionSpan(AT, "d", 0, 3, AT)]


def written(logprobs: list[float]) -> ScoredResponse:
    prompt, tokens = np.array([5, 6]), np.array([7, 8, 1], np.int32)  # a prompt's may be int64
    scores = np.array(logprobs, np.float32)
    made = Completion((4, 1, 9), prompt, tokens, scores, SPANS, "length", support=None)
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
    assert made.prompt_text == "31=" and made.images == [] and made.support == made.routed == b""
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


def test_the_text_has_special_tokens_but_no_stop_token(small_model: Path) -> None:
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


def row(prompt: int, tokens: int, spans: int, **more: bytes) -> TrainingSequence:
    parts = [VersionSpan(AT, "0123456789abcdef", 9 * n, 9 * n + 9, AT) for n in range(spans)]
    arrays = (b"\1\0\0\0" * prompt, b"\2\0\0\0" * tokens, b"\3\3\3\3" * tokens)
    return TrainingSequence(*arrays, b"\1" * tokens, parts, **more)


@pytest.mark.parametrize("more", [{}, {"token_rewards": 900 * b"r", "support": 800 * b"s"}])
@pytest.mark.parametrize("others", [[], [(200, 300, 2), (700, 10, 1)]])
def test_a_samples_size_is_that_of_its_message(
    others: list[tuple[int, int, int]], more: dict[str, bytes]
) -> None:
    first = row(150, 400, 3, **more)
    sample = Trajectory(
        *(4, 1, 9, first.prompt_tokens, first.tokens, first.behavior_logprobs, first.mask),
        first.spans,
        reward=1.0,
        reward_parts={"form": 0.5},
        finish="stop",
        temperature=1.0,
        text="x" * 120,
        rows=[row(*other, **more) for other in others],
        **more,
    )
    assert estimate_size(sample) == pytest.approx(len(msgspec.msgpack.encode(sample)), rel=0.05)
    names = msgspec.structs.replace(sample, images=["f" * 32] * 50)
    assert estimate_size(names) == pytest.approx(len(msgspec.msgpack.encode(names)), rel=0.05)


V1, V2, V3 = (Label(1, number) for number in (1, 2, 3))


def schedule(*tickets: Ticket, drain_first: bool = False, lockstep: bool = False) -> TicketSchedule:
    made = TicketSchedule(drain_first=drain_first, lockstep=lockstep)
    made.add_tickets(tickets)
    return made


def exact(number: int, attempt: int, label: Label, samples: int = 1) -> Ticket:
    """An evaluation ticket of one version."""
    return msgspec.structs.replace(
        ticket(number, attempt, label.epoch, samples), kind="eval", exact_version=label
    )


def numbers(started: Sequence[tuple[LeasedTicket, int]]) -> list[tuple[int, int]]:
    return [(leased.ticket.ticket, sample) for leased, sample in started]


def test_a_ticket_is_taken_once_and_lost_ones_are_refused() -> None:
    made = schedule(ticket(1, 3, 1))
    assert made.add_tickets([ticket(1, 3, 1), ticket(2, 2, 1), ticket(3, 4, 1)]) == [
        ticket(3, 4, 1)
    ]
    assert list(made.held) == [(1, 3), (3, 4)] and made.newest_attempt == 4
    made.refuse_up_to(6)
    made.refuse_up_to(5)
    assert made.add_tickets([ticket(4, 6, 1)]) == [] and made.newest_attempt == 6
    assert len(made.add_tickets([ticket(5, 7, 1), ticket(6, 7, 1)])) == 2, "of one grant"


def test_samples_start_with_weights_of_their_epoch_that_are_new_enough() -> None:
    leased = LeasedTicket(msgspec.structs.replace(ticket(1, 1, 1), min_version=V2), [0])
    found = [leased.is_ready(x) for x in (None, V1, V2, V3, Label(2, 9))]
    assert found == [False, False, True, True, False]
    leased = LeasedTicket(exact(1, 1, V2), [0])
    assert [leased.is_ready(x) for x in (None, V1, V2, V3)] == [False, False, True, False]


def test_evaluation_starts_first_then_tickets_by_number() -> None:
    made = schedule(ticket(5, 1, 1), ticket(2, 2, 1), exact(9, 3, V1, samples=2))
    assert numbers(made.admit(V1, 4)) == [(9, 0), (9, 1), (2, 0), (2, 1)]
    assert made.count_waiting() == 2 and made.count_live() == 4
    assert numbers(made.admit(V1, 0)) == [] and numbers(made.admit(None, 9)) == []
    assert numbers(made.admit(V1, 9)) == [(5, 0), (5, 1)]


def test_in_lockstep_no_training_sample_starts_while_an_evaluation_is_held() -> None:
    made = schedule(ticket(1, 1, 1, 1), exact(9, 2, V1), lockstep=True)
    assert numbers(made.admit(V1, 9)) == [(9, 0)]
    assert numbers(made.admit(V1, 9)) == [], "it is still being written"
    made.finish_sample((9, 0, 2), 5)
    assert numbers(made.admit(V1, 9)) == [(1, 0)]


def test_the_newest_announcement_counts() -> None:
    made = schedule()
    assert made.announce(announcement(1, 2)) and not made.announce(announcement(1, 1))
    assert not made.announce(announcement(1, 2)) and not made.announce(None)
    assert made.next_version(V1) == V2 and made.next_version(V2) is None
    assert made.next_version(None) == V2 and made.next_version(V3) is None, "never backwards"
    assert made.announce(announcement(2, 0)) and made.next_version(V3) == Label(2, 0)
    assert schedule().next_version(None) is None, "nothing is announced"


def test_a_sample_of_one_version_keeps_the_weights_until_it_ends() -> None:
    made = schedule(exact(1, 1, V1), ticket(2, 2, 1, 1))
    made.announce(announcement(1, 2))
    assert made.next_version(V2) == V1, "for an evaluation it goes back"
    assert numbers(made.admit(V1, 9)) == [(1, 0), (2, 0)] and made.is_pinned()
    assert made.next_version(V1) is None
    made.finish_sample((1, 0, 1), 3)
    assert not made.is_pinned() and made.next_version(V1) == V2


def test_weights_go_back_only_when_nothing_is_written() -> None:
    made = schedule(ticket(2, 1, 1, 2))
    made.announce(announcement(1, 2))
    assert len(made.admit(V2, 1)) == 1
    made.add_tickets([exact(3, 2, V1), exact(4, 3, V2)])
    assert made.next_version(V2) is None
    assert numbers(made.admit(V2, 9)) == [(4, 0)], "the engine drains of all others"
    for key in ((2, 0, 1), (4, 0, 3)):
        made.finish_sample(key, 3)
    assert made.next_version(V2) == V1


def test_between_groups_new_weights_wait_for_the_samples_in_the_engine() -> None:
    made = schedule(ticket(1, 1, 1, 3), drain_first=True)
    made.announce(announcement(1, 1))
    assert numbers(made.admit(V1, 1) + made.admit(V1, 1)) == [(1, 0), (1, 1)]
    made.announce(announcement(1, 2))
    assert made.next_version(V1) is None and numbers(made.admit(V1, 9)) == []
    made.finish_sample((1, 0, 1), 3)
    made.finish_sample((1, 1, 1), 3)
    assert made.next_version(V1) == V2
    freely = schedule(ticket(1, 1, 1, 2))
    freely.announce(announcement(1, 2))
    assert len(freely.admit(V1, 1)) == 1 and freely.next_version(V1) == V2
    assert numbers(freely.admit(V1, 9)) == [(1, 1)], "in flight nothing waits"


def test_a_newer_epoch_drops_the_tickets_of_the_older_one() -> None:
    made = schedule(ticket(1, 1, 1), ticket(2, 2, 2))
    assert made.find_outdated() == []
    made.announce(announcement(2, 0))
    (old,) = made.find_outdated()
    assert old.ticket.ticket == 1 and old.epoch == 1
    made.admit(V1, 9)
    assert made.drop(old) == [(1, 0, 1), (1, 1, 1)] and list(made.held) == [(2, 2)]
    made.finish_sample((1, 0, 1), 3)  # of a ticket that is gone


def test_progress_counts_the_tokens_of_finished_and_of_live_samples() -> None:
    made = schedule(ticket(1, 4, 1, 3), ticket(2, 5, 1, 1))
    made.admit(V1, 9)
    made.finish_sample((1, 0, 4), 5)
    made.finish_sample((1, 1, 4), 7)
    live = {(1, 2, 4): 3, (2, 0, 5): 2, (8, 0, 9): 1}
    turn: Any = SimpleNamespace(schedule=made, engine=SimpleNamespace(count_tokens=lambda: live))
    assert sorted(GeneratorTurn.list_progress(turn)) == [(1, 4, 15), (2, 5, 2)]
    made.finish_sample((1, 2, 4), 3)
    live.clear()
    assert GeneratorTurn.list_progress(turn) == [(2, 5, 0)], "a finished ticket is forgotten"


def test_as_many_samples_are_asked_for_as_rows_are_free() -> None:
    made = schedule(ticket(1, 1, 1, 3))
    assert count_samples_to_request(made, 10, 4, False) == 3
    assert count_samples_to_request(made, 10, 4, True) == 3
    empty = schedule(lockstep=True)
    assert count_samples_to_request(empty, 10, 0, False) == EVERYTHING
    assert count_samples_to_request(empty, 10, 1, False) == 0
    assert count_samples_to_request(empty, 10, 0, True) == 0
    made.lockstep = True
    assert count_samples_to_request(made, 10, 0, False) == 0
