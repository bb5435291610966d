"""Sessions of several calls: random forests against a reference by token; limits, retries, end."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.gateway.call_tree import (
    CallNode,
    chain_digest,
    compute_text_digest,
    encode_identity,
    join_text,
)
from actors.gateway.refusals import CallRefused, build_too_long_error
from actors.gateway.sessions import NEVER, Session, SessionLimits, SessionOutcome
from asyncrl.contract.messages import (
    Prompt,
    SamplingSettings,
    Ticket,
    TrainingSequence,
    VersionSpan,
)
from asyncrl.contract.versions import Label

FREE = SessionLimits(max_calls=0, rows=0, parallel=0, deadline_s=0.0)
SAMPLING = SamplingSettings(max_new_tokens=9)
TICKET = Ticket(7, 3, "train", Prompt(0, "2+2="), [0, 1], SAMPLING, Label(1, 0), None, 5)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


WORDLESS: Any = SimpleNamespace(
    require_text=lambda ids: None,
    find_stop=lambda ids, stop: None,
    decode_visible=lambda ids, stop: "",
)


def session(limits: SessionLimits = FREE, **more: object) -> Session:
    return Session(TICKET, 1, 3, limits, **({"composer": WORDLESS} | more))


def answer(
    made: Session,
    call: CallNode,
    tokens: np.ndarray,
    number: int = 0,
    finish: str = "stop",
    **more: object,
) -> CallNode | None:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) - 10 * call.number
    spans = [VersionSpan(Label(1, number), f"d{number}", 0, len(tokens), Label(1, number))]
    return made.on_result(call, tokens, logprobs, spans, finish, **more)


class Drawn:
    """The reference's view of a call: nothing but the ids it saw and drew."""

    def __init__(
        self, number: int, path: list[Drawn], prompt: tuple[int, ...], aside: bool
    ) -> None:
        self.number, self.prompt, self.aside = number, prompt, aside
        self.path = [*path, self]
        self.tokens: tuple[int, ...] = ()

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.tokens


def reference_rows(
    calls: list[Drawn],
) -> list[tuple[tuple[int, ...], dict[int, tuple[int, float]]]]:
    """(ids of the leaf, place -> (token, logprob) of what that row trains), by paths alone: a call
    counts in the first path that holds it, paths in the order of their calls' numbers."""
    paths = [tuple(c for c in call.path if not c.aside) for call in calls if not call.aside]
    leaves = [p for p in paths if not any(q[: len(p)] == p and len(q) > len(p) for q in paths)]
    rows = []
    counted: set[int] = set()
    for path in sorted(leaves, key=lambda path: [call.number for call in path]):
        own = [call for call in path if call.number not in counted]
        counted.update(call.number for call in own)
        trained = {
            len(call.prompt) + at: (token, -1.0 - at - 10 * call.number)
            for call in own
            for at, token in enumerate(call.tokens)
        }
        rows.append((own[0].number, path[-1].whole, trained))
    return [(whole, trained) for _, whole, trained in sorted(rows, key=lambda row: row[0])]


def opened(row: TrainingSequence) -> tuple[tuple[int, ...], dict[int, tuple[int, float]]]:
    prompt = np.frombuffer(row.prompt_tokens, "<i4")
    tokens = np.frombuffer(row.tokens, "<i4")
    logprobs = np.frombuffer(row.behavior_logprobs, "<f4")
    mask = np.frombuffer(row.mask, np.uint8)
    covered = [at for span in row.spans for at in range(span.start, span.end)]
    assert covered == np.flatnonzero(mask).tolist() and mask[0] == 1 and mask[-1] == 1
    assert [edge for _, *edge in row.segments] == [
        [run[0], run[-1] + 1]
        for _, group in itertools.groupby(
            range(len(mask)),
            key=lambda at: next(i for i, (_, a, b) in enumerate(row.segments) if a <= at < b),
        )
        for run in [list(group)]
    ]
    for kind, start, end in row.segments:
        assert mask[start:end].all() == (kind == "model") == mask[start:end].any()
    assert not logprobs[mask == 0].any()
    trained = {
        len(prompt) + int(at): (int(tokens[at]), float(logprobs[at])) for at in np.flatnonzero(mask)
    }
    return tuple(prompt.tolist()) + tuple(tokens.tolist()), trained


@pytest.mark.parametrize("seed", range(300))
def test_random_forests_train_each_drawn_token_once_behind_the_ids_it_saw(seed: int) -> None:
    chance = random.Random(seed)
    made = session()
    calls: list[Drawn] = []
    waiting: list[tuple[CallNode, Drawn]] = []

    def draw() -> None:
        call, known = waiting.pop(chance.randrange(len(waiting)))
        known.tokens = tuple(chance.choices((1, 2, 3), k=chance.randrange(0, 5)))
        node = answer(made, call, ids(*known.tokens), number=chance.randrange(3))
        assert (node is None) == (not known.tokens)
        if known.tokens:
            calls.append(known)
            assert tuple(node.build_token_ids().tolist()) == known.whole

    for _ in range(chance.randrange(1, 20)):
        # two tokens and short tails: prompts meet by chance, too
        before = chance.choice(calls).whole if calls and chance.random() < 0.8 else (0,)
        prompt = before + tuple(chance.choices((1, 2, 3), k=chance.randrange(0, 3)))
        aside = chance.random() < 0.2
        # the longest, of these one that is aside as this is or not, of these the newest placed
        parent = max(
            (c for c in calls if prompt[: len(c.whole)] == c.whole),
            key=lambda c: (len(c.whole), c.aside == aside, c.number),
            default=None,
        )
        call = made.place(ids=ids(*prompt), now=0.0, aside=aside)
        assert call.prompt_ids.tolist() == list(prompt)
        assert call.build_token_ids().dtype == np.int32, "before its answer, too"
        above = call.parent
        assert (above.number if above else None) == (parent.number if parent else None)
        path = parent.path if parent else []
        waiting.append((call, Drawn(call.number, path, prompt, call.aside)))
        while waiting and chance.random() < 0.7:
            draw()
    while waiting:
        draw()
    assert [opened(row) for row in made.build_training_rows()] == reference_rows(calls)
    assert made.aside == sum(len(c.tokens) for c in calls if c.aside)
    assert made.tokens == sum(len(c.tokens) for c in calls)
    assert made.tree.count_rows() == len(made.build_training_rows())


def test_versions_and_keys_of_a_row_stay_with_their_tokens() -> None:
    made = session()
    first = made.place(ids=ids(4, 5), now=0.0)
    spans = [
        VersionSpan(Label(1, 0), "a", 0, 1, Label(1, 0)),
        VersionSpan(Label(1, 2), "b", 1, 3, Label(1, 0)),
    ]
    made.on_result(first, ids(6, 7, 8), np.zeros(3, np.float32), spans, "stop")
    answer(made, made.place(ids=ids(4, 5, 6, 7, 8, 9, 9), now=0.0), ids(1), number=3)
    (row,) = made.build_training_rows()
    assert row.spans == [*spans, VersionSpan(Label(1, 3), "d3", 5, 6, Label(1, 3))]
    assert row.segments == [("model", 0, 3), ("context", 3, 5), ("model", 5, 6)]


def test_forks_are_counted_by_cause() -> None:
    made = session()
    for prompt in ((1,), (2,), (1, 5), (1, 5, 6), (1, 5, 7)):
        answer(made, made.place(ids=ids(*prompt), now=0.0), ids(5))
    # (1, 5) goes on from the first call, (1, 5, 7) branches from it too
    assert made.tree.forks == {"ids": 1, "branch": 2} and len(made.build_training_rows()) == 4


def test_a_call_by_text_begins_a_sequence_or_goes_on_behind_an_answer() -> None:
    made = session(
        composer=SimpleNamespace(
            **vars(WORDLESS),
            encode=lambda text, begins=False: np.array([int(begins), len(text)]),
            encode_suffix=lambda node, suffix: np.array([len(suffix)]),
            cut_sampled=lambda node, text: text[3:] if text.startswith("abc") else None,
            find_images=lambda text, ids: (),
        )
    )
    first = made.draft(text="ab")()
    assert (first.parent, first.tail.tolist(), first.fork_cause) == (None, [1, 2], "text")
    call = made.accept(first, now=0.0)
    node = made.on_result(call, np.array([5]), np.zeros(1), [], "stop")
    assert node is not None and (node.text_length, node.chain) == (2, b"")
    assert call.prompt_ids.dtype == node.ids.dtype == np.int32 and node.logprobs.dtype == np.float32
    assert made.place(ids=np.array([7, 8]), now=0.0).prompt_ids.dtype == np.int32
    later = made.draft(text="abcde")()
    assert (later.parent, later.tail.tolist(), later.fork_cause) == (node, [2], "branch")
    other = made.draft(text="x")()
    assert (other.parent, other.tail.tolist(), other.text_length) == (None, [1, 1], 1)


def test_a_prompt_that_is_too_long_cuts_the_sample_and_another_refusal_does_not() -> None:
    for build, finish in (
        (lambda: build_too_long_error("the prompt has 9", 4), "length"),
        (lambda: CallRefused(400, "chat_template", "no"), "stop"),
    ):

        def refuse(text: str, *, begins: bool, build: Any = build) -> np.ndarray:
            raise build()

        made = session(composer=SimpleNamespace(encode=refuse))
        with pytest.raises(CallRefused) as caught:
            made.draft(text="x")()
        made.on_refused(caught.value)
        assert made.finish == finish


def test_a_session_describes_itself() -> None:
    made = session(replace(FREE, deadline_s=100.0), opened=10.0)
    answer(made, made.place(ids=ids(1), now=11.0), ids(5, 6), number=2)
    answer(made, made.place(ids=ids(2), now=11.0, aside=True), ids(7))
    made.place(ids=ids(1, 5, 6, 7), now=11.0)
    described = {
        **{"session": "7.1.3", "state": "open", "calls": 3, "open_calls": 1, "tokens": 3},
        **{"aside": 1, "rows": 1, "forks": {}, "versions": ["1.0", "1.2"], "limit": ""},
        **{"refused": 0, "refusal": None, "left_s": 69.9},
    }
    assert made.describe(40.06) == described and made.describe(999.0)["left_s"] == 0.0
    for _ in range(2):
        made.on_refused(CallRefused(400, "invalid_value", "stop:\ngive a text"))
    refusal = {"code": "invalid_value", "message": "stop:\\ngive a text"}
    assert made.describe(40.06) == described | {"refused": 2, "refusal": refusal}
    assert str(made.refusals) == (
        "2 of its calls were refused, the last one with invalid_value: stop:\\ngive a text"
    )
    assert session().describe(0.0)["left_s"] is None


def test_streams_depend_on_the_prompt_and_its_repetition_alone() -> None:
    def keys(order: list[tuple[int, ...]]) -> list[int]:
        made = session(own_prompt=ids(1, 2))
        return [made.place(ids=ids(*prompt), now=0.0).stream_key for prompt in order]

    own, other = (1, 2), (1, 3)
    assert keys([own])[0] == 0
    some = keys([own, other, own, other, other])
    assert len(set(some)) == 5 and all(0 <= key < 1 << 64 for key in some)
    assert keys([other, other, own, other, own]) == [some[1], some[3], some[0], some[4], some[2]]


def refused(made: Session, prompt: np.ndarray, now: float = 0.0) -> CallRefused:
    with pytest.raises(CallRefused) as caught:
        made.place(ids=prompt, now=now)
    return caught.value


@pytest.mark.parametrize(
    "limits, limit",
    [
        (replace(FREE, max_calls=2), "max_calls"),
        (replace(FREE, max_tokens=4), "max_tokens"),
        (replace(FREE, rows=2), "rows"),
        (replace(FREE, fork="end"), "fork"),
    ],
)
def test_a_limit_ends_the_calls_before_the_reward(limits: SessionLimits, limit: str) -> None:
    made = session(limits)
    answer(made, made.place(ids=ids(1), now=0.0), ids(5, 5))
    if limit != "fork":
        answer(made, made.place(ids=ids(2), now=1.0), ids(5, 5))
    said = refused(made, ids(3), now=10.0)
    assert (said.status, said.code) == (400, "session_limit")
    assert str(said) == f"session 7.1.3 has reached agent.{limit}: send its reward within 30 s"
    # nothing gets in any more, not even what would open no row
    assert refused(made, ids(1, 5, 5), now=11.0).code == "session_limit"
    assert made.next_deadline() == (f"the time to score it after agent.{limit}", 40.0)
    made.tick(39.9)
    assert made.state == "open"
    made.set_reward(0.5, now=39.9)
    assert made.is_complete and made.finish == "length" and made.outcome == SessionOutcome(0.5, {})


def test_no_reward_after_a_limit_fails_the_session() -> None:
    made = session(replace(FREE, deadline_s=100.0))
    call = made.place(ids=ids(1), now=0.0)
    made.tick(99.9)
    assert not made.cuts and made.next_deadline() == ("agent.deadline_s", 100.0)
    made.tick(100.0)
    assert made.cuts == [call] and made.state == "open"
    answer(made, call, ids(3), finish="length", now=101.0)
    made.tick(130.9)
    assert made.state == "open"
    made.tick(131.0)
    assert made.is_complete
    why = "agent.deadline_s was reached and no reward came"
    assert made.outcome == SessionOutcome(0.0, {}, why)
    said = refused(made, ids(1), now=132.0)
    assert (said.status, str(said)) == (410, "session 7.1.3 has ended")


def test_a_long_context_is_refused_and_ends_nothing() -> None:
    made = session(replace(FREE, context=4))
    answer(made, made.place(ids=ids(1, 2), now=0.0), ids(5, 5), finish="length")
    said = refused(made, ids(1, 2, 5, 5))
    assert (said.status, said.code, said.param) == (400, "context_length_exceeded", "messages")
    made.shortened = False
    made.on_refused(said)
    assert (made.calls, made.finish, made.refusals.count) == (1, "length", 1)
    call = made.place(ids=ids(9, 9), now=0.0)
    assert call.max_new_tokens == 2 and call.run_bound
    answer(made, call, ids(5))
    assert made.finish == "stop"


def test_how_long_an_answer_may_be_and_whose_limit_that_is() -> None:
    made = session(replace(FREE, context=20, max_tokens=12))
    mine = made.place(ids=ids(1), now=0.0, max_new_tokens=3)
    assert (mine.max_new_tokens, mine.run_bound) == (3, False)
    answer(made, mine, ids(5, 5, 5), finish="length")
    assert made.finish == "stop"  # the client asked for no more
    runs = made.place(ids=ids(2), now=0.0, max_new_tokens=30)
    assert (runs.max_new_tokens, runs.run_bound) == (9, True)  # the ticket's max_new_tokens
    answer(made, runs, ids(5, 5, 5, 5), finish="length")
    assert made.finish == "length"
    assert made.place(ids=ids(3), now=0.0).max_new_tokens == 5  # of max_tokens


def test_calls_at_once_are_bounded_and_that_ends_nothing() -> None:
    made = session(replace(FREE, parallel=2))
    calls = [made.place(ids=ids(1), now=0.0) for _ in range(2)]
    said = refused(made, ids(1))
    assert (said.status, said.code) == (429, "parallel_calls")
    why = "session 7.1.3 has 2 calls at once, agent.parallel = 2: wait for one of them"
    assert str(said) == why
    answer(made, calls[0], ids(5))
    made.place(ids=ids(1), now=0.0)
    # they never draw more than the session may
    made = session(replace(FREE, max_tokens=12))
    first = made.place(ids=ids(1), now=0.0)
    assert (first.max_new_tokens, made.place(ids=ids(1), now=0.0).max_new_tokens) == (9, 3)
    said = refused(made, ids(1))
    assert (said.status, said.code) == (429, "parallel_calls")
    assert not made.limit and str(said) == (
        "the open calls of session 7.1.3 may use up agent.max_tokens = 12: wait for one of them"
    )
    answer(made, first, ids(5))
    assert made.place(ids=ids(1), now=0.0).max_new_tokens == 8


def test_an_idle_harness_is_gone_one_that_beats_or_waits_is_not() -> None:
    made = session(replace(FREE, idle_s=10.0))
    made.active_at = 5.0
    call = made.place(ids=ids(1), now=14.0)
    made.tick(100.0)
    assert made.state == "open" and made.next_deadline() == ("", NEVER)  # it waits for us
    answer(made, call, ids(5), now=100.0)
    made.tick(109.0)
    assert made.state == "open" and made.next_deadline() == ("agent.idle_s", 110.0)
    made.tick(110.0)
    assert made.outcome == SessionOutcome(0.0, {}, "no call and no beat for agent.idle_s = 10 s")


def test_equal_bodies_are_draws_of_their_own_and_a_retry_joins() -> None:
    made = session()
    votes = [made.register_request(b"same") for _ in range(3)]
    assert len(set(map(id, votes))) == 3
    for vote in votes:
        vote.call = made.place(ids=ids(1), now=0.0)
    made.on_connection_closed(votes[1], now=1.0)
    assert made.register_request(b"same", retry=True) is votes[1]
    assert votes[1].call.alone_since == NEVER and votes[1].connections == 1
    assert made.register_request(b"other", retry=True) not in votes  # nothing known: a new draw
    # without the word: only one whose connection is gone is joined
    made.on_connection_closed(votes[2], now=1.0)
    assert made.register_request(b"same") is votes[2]
    assert made.register_request(b"same") not in votes


def test_a_retry_gets_the_stored_bytes_and_a_refused_request_is_forgotten() -> None:
    made = session()
    first = made.register_request(b"same")
    first.call = made.place(ids=ids(1), now=0.0)
    first.answer = b"bytes"
    made.on_connection_closed(first, now=1.0, sent=True)
    assert made.register_request(b"same", retry=True) is first
    made.on_connection_closed(first, now=1.0, sent=True)
    assert made.register_request(b"same") is not first  # asked again, not repeated
    keyed = made.register_request(b"same", key="k1")
    assert made.register_request(b"same", key="k2") is not keyed
    assert made.register_request(b"same", key="k1") is keyed
    assert made.register_request(b"else", key="k1") is not keyed
    first = made.register_request(b"other")
    made.forget(first)
    assert made.register_request(b"other", retry=True) is not first


def test_a_call_whose_client_is_gone_lingers_is_cut_and_its_node_stays() -> None:
    made = session()
    request = made.register_request(b"same")
    call = request.call = made.place(ids=ids(1), now=0.0)
    made.on_connection_closed(request, now=4.0)
    assert made.register_request(b"same", retry=True) is request
    made.tick(1000.0)
    assert not made.cuts  # it came back
    made.on_connection_closed(request, now=5.0)
    made.tick(64.9)
    assert not made.cuts
    made.tick(65.0)
    made.tick(66.0)
    assert made.cuts == [call]
    answer(made, call, ids(5, 6), finish="length", now=66.0)
    assert len(made.build_training_rows()) == 1
    made.set_reward(1.0, now=67.0)
    assert made.finish == "length"


def test_a_reward_is_said_once_and_may_be_repeated() -> None:
    made = session()
    answer(made, made.place(ids=ids(1), now=0.0), ids(5))
    made.set_reward(1.0, {"style": 0.5}, now=1.0)
    made.set_reward(1.0, {"style": 0.5}, now=2.0)
    for value, parts in ((0.0, {"style": 0.5}), (1.0, {})):
        with pytest.raises(CallRefused) as caught:
            made.set_reward(value, parts, now=3.0)
        assert caught.value.status == 422
    assert made.outcome == SessionOutcome(1.0, {"style": 0.5})
    assert refused(made, ids(1)).status == 410


@pytest.mark.parametrize(
    "said",
    [
        *((value, {}, {}) for value in (math.nan, math.inf)),
        (0.0, {"a": math.nan}, {}),
        *((0.0, {}, shares) for shares in ({0: math.nan}, {1: 1.0}, {7: 1.0})),  # 1: an aside
    ],
)
def test_a_reward_that_is_none_is_refused_and_the_session_stays_open(said: tuple) -> None:
    made = session()
    answer(made, made.place(ids=ids(1), now=0.0), ids(5))
    answer(made, made.place(ids=ids(1), now=0.0, aside=True), ids(5))
    with pytest.raises(CallRefused) as caught:
        made.set_reward(*said, now=0.0)
    assert caught.value.status == 422 and made.state == "open"
    made.set_reward(0.0, now=0.0)


def test_what_shares_leave_of_a_reward_is_the_last_trained_calls_never_an_excluded_ones() -> None:
    made = session()
    answer(made, made.place(ids=ids(1), now=0.0), ids(5))
    answer(made, made.place(ids=ids(1, 5, 2), now=0.0), ids(6))
    answer(made, made.place(ids=ids(1, 5, 2, 6, 3), now=0.0, aside=True), ids(7))
    made.set_reward(1.0, calls={0: 0.25}, now=0.0)
    (row,) = made.build_training_rows()
    given = np.frombuffer(row.token_rewards, "<f4")
    drawn = np.frombuffer(row.mask, np.uint8) == 1
    # of tokens 5 and 6; the tool's 2 stands between them
    np.testing.assert_array_equal(given[drawn], np.array([0.25, 0.75], np.float32))
    assert np.isnan(given[~drawn]).all() and np.nansum(given) == 1.0


def test_calls_that_still_draw_are_cut_and_waited_for() -> None:
    made = session()
    answer(made, made.place(ids=ids(1), now=0.0), ids(5))
    late = made.place(ids=ids(2), now=0.0)
    made.set_reward(1.0, now=0.0)
    assert made.cuts == [late] and not made.is_complete
    answer(made, late, ids(6, 6), finish="length")
    # what is drawn is trained, read or not
    assert made.is_complete and len(made.build_training_rows()) == 2


def test_the_rewards_of_calls_sit_on_their_last_tokens_and_sum_to_the_whole() -> None:
    made = session()
    for prompt in ((1,), (1, 5, 5), (1, 5, 5, 5, 5), (9,)):
        answer(made, made.place(ids=ids(*prompt), now=0.0), ids(5, 5))
    made.set_reward(1.0, calls={0: 0.25, 2: 0.5}, now=0.0)
    nothing = float("nan")
    want = [[nothing, 0.25, nothing, nothing, nothing, 0.5], [nothing, 0.25]]
    for row, rewards in zip(made.build_training_rows(), want, strict=True):
        np.testing.assert_array_equal(np.frombuffer(row.token_rewards, "<f4"), rewards)
    plain = session()
    answer(plain, plain.place(ids=ids(1), now=0.0), ids(5, 5))
    plain.set_reward(1.0, now=0.0)
    assert plain.build_training_rows()[0].token_rewards == b""


def test_judged_by_the_run_or_failed() -> None:
    made = session()
    answer(made, made.place(ids=ids(1), now=0.0), ids(5))
    for now in (0.0, 1.0):
        made.judge(now=now)
        assert (made.state, made.judging_at) == ("judging", 0.0) and refused(
            made, ids(1)
        ).status == 410
    made.on_judged(SessionOutcome(0.5, {}))
    made.judge(now=2.0)
    assert made.is_complete and made.outcome == SessionOutcome(0.5, {})
    lost = session()
    lost.fail("the agent exited with 1")
    lost.fail("again")
    assert lost.outcome == SessionOutcome(0.0, {}, "the agent exited with 1")
    for speak in (lost.judge, lambda now: lost.set_reward(1.0, now=now)):
        with pytest.raises(CallRefused) as caught:
            speak(now=0.0)
        assert (caught.value.status, caught.value.code) == (410, "session_ended")


def test_an_adopted_session_goes_on_under_the_new_attempt() -> None:
    made = session()
    answer(made, made.place(ids=ids(1), now=0.0), ids(5))
    sampling = SamplingSettings(max_new_tokens=2)
    granted = msgspec.structs.replace(TICKET, attempt=9, samples=[1], sampling=sampling)
    made.resume_under(granted)
    assert (made.key, made.ticket_key, made.name) == ((7, 1, 9), (7, 9), "7.1.3")
    call = made.place(ids=ids(1, 5), now=0.0)
    assert call.max_new_tokens == 2
    answer(made, call, ids(5, 6))
    made.resume_under(msgspec.structs.replace(granted, attempt=11))
    assert made.adopted == [(3, 1), (9, 2)] and made.current_attempt_tokens == 0


def test_messages_are_the_same_in_any_spelling() -> None:
    def call(arguments: object) -> dict:
        function = {"name": "add", "arguments": arguments}
        made = {"id": "c1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [made]}

    same = [
        [{"role": "user", "content": "ab"}, call('{"a": 1, "b": 2}')],
        [
            {"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]},
            {**call({"b": 2, "a": 1}), "content": "", "refusal": None},
        ],
        [
            {"role": "user", "content": "ab", "name": "me"},
            {**call('{"b":2,"a":1}'), "content": " "},
        ],
    ]
    assert len(Counter(chain_digest(chain_digest(b"", one), two) for one, two in same)) == 1
    base = {"role": "user", "content": "ab"}
    for other in ({"content": "ab "}, {"role": "system"}, {"tool_call_id": "c1"}):
        assert encode_identity({**base, **other}) != encode_identity(base)
    assert encode_identity(call("{}")) != encode_identity(call("{"))
    halves = [{"role": "user", "content": half} for half in ("\ud83d", "\ud83e", "?")]
    assert len({encode_identity(each) for each in halves}) == 3  # JSON may hold them, UTF-8 may not
    assert len({compute_text_digest(half["content"]) for half in halves}) == 3
    assert join_text(None) == "" and join_text(["a", {"text": "b"}, {"refusal": "c"}]) == "abc"
    bare = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add"}}]}
    assert encode_identity(bare) == encode_identity(call(""))
    with pytest.raises(ValueError, match="image_url"):
        join_text([{"type": "image_url", "image_url": {"url": ""}}])
