"""The door takes answers of the usual kind, and refuses each fault, alone or in the company of
others."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hostile_messages_kit import honest_hello

from asyncrl.contract import messages as m
from asyncrl.contract.errors import BadMessage
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label
from buffer import checks
from buffer.groups import Group, StoredSample, StoreSettings, count_bytes
from buffer.ledger import Ledger
from buffer.store import Store

MODEL = m.ModelShape(5)
ZERO, ONE = Label(1, 0), Label(1, 1)
NAN = math.nan
LONG = 9  # tokens, behind a prompt of one: what max_new_tokens and context allow
replace = msgspec.structs.replace
# what a reward function, an environment or an agent has a hand in
OUTCOME = {"reward", "reward_parts", "failed", "text", "prompt_text", "group_key", "segments"}
OUTCOME |= {"token_rewards", "temperature", "generated_at"}


def store(context: int = LONG + 1, session_tokens: int = 0) -> Store:
    """Group 0 is trained and kept, group 1 is being written, at version 1."""
    sampling = m.SamplingSettings(max_new_tokens=LONG)
    settings = StoreSettings(1, 2, 9, sampling, context=context, session_tokens=session_tokens)
    made = Store(settings, lambda index: m.Prompt(index, "p"))
    assert made.follow_learner(honest_hello("run", vocabulary=MODEL.vocabulary))
    made.grant("g", 1, 2, 0.0)
    for sample in range(2):
        made.deliver(answer(ticket=0, sample=sample, attempt=1, spans=[span(ZERO)]), 0.0)
    assert made.ask(1, 0)[0] and made.commit(0, ONE, "d1")
    made.grant("g", 1, 2, 0.0)
    assert list(made.retained) == [0] and list(made.alive) == [1] and made.attempts == 2
    return made


def span(
    label: Label, start: int = 0, end: int = 2, digest: str = "", **more: Any
) -> m.VersionSpan:
    return m.VersionSpan(label, digest, start, end, more.get("kv", label))


def answer(**more: Any) -> m.Trajectory:
    """Of 2 tokens to ticket 1, by version 1."""
    fields: dict[str, Any] = {
        "ticket": 1,
        "sample": 1,
        "attempt": 2,
        "prompt_tokens": b"\1\0\0\0",
        "tokens": b"\0\0\0\0\4\0\0\0",
        "behavior_logprobs": np.float32([-1, -2]).tobytes(),
        "mask": b"\1\1",
        "spans": [span(ONE, 0, 1, "d1", kv=ZERO), span(ONE, 1, 2)],
        "reward": 1.0,
        "reward_parts": {"exact": 1.0},
        "finish": "stop",
        "temperature": 1.0,
        "segments": [("model", 0, 1), ("model", 1, 2)],
    }
    return m.Trajectory(**fields | more)


def of_length(length: int, **more: Any) -> m.Trajectory:
    arrays = {"tokens": bytes(4 * length), "behavior_logprobs": bytes(4 * length)}
    rest: dict[str, Any] = {"mask": b"\1" * length, "spans": [span(ONE, 0, length)], "segments": []}
    return answer(**arrays | rest | more)


# the edge of each limit
TAKEN = [
    answer(),
    answer(sample=0, token_rewards=np.float32([0.5, NAN]).tobytes()),
    answer(ticket=0, attempt=1, spans=[span(ZERO)]),  # a copy of one that is trained
    of_length(LONG),
    answer(reward=-1e15, reward_parts={"x" * 200: 1e15}, temperature=1e-9, group_key="k" * 200),
    answer(text="x" * (128 * (LONG + 1) + (1 << 16))),
    answer(reward_parts={str(i): 0.0 for i in range(256)}, segments=[("model", 0, 2)] * 3),
]
# a field at a time, each refused by a function that knows why
REFUSED: list[dict[str, Any]] = [
    {"ticket": 2},
    {"attempt": 1},  # of another group
    {"failed": m.RewardFailure("refused", "what the buffer alone says")},
    {"mask": b"\1"},
    {"mask": b"", "tokens": b"", "behavior_logprobs": b"", "spans": [], "segments": []},
    {"tokens": b"\5" + b"\0" * 7},
    {"token_rewards": b"\0" * 4},
    {"text": "x" * (128 * (LONG + 1) + (1 << 16) + 1)},
    {"group_key": "k" * 201},
    {"reward": NAN},
    {"temperature": 0.0},
    {"generated_at": NAN},
    {"reward_parts": {str(i): 0.0 for i in range(257)}},
    {"segments": [("model", 0, 2)] * 4},
    {"spans": [span(ZERO)]},  # older than the ticket
    {"spans": [span(Label(1, 2))]},  # not announced
    {"spans": [span(ONE, 0, 1), span(ONE, 1, 2, "d0")]},
    {"spans": [span(ONE, kv=Label(1, 2))]},
]
LENGTHS = [of_length(LONG + 1, prompt_tokens=b""), of_length(LONG, prompt_tokens=b"\1\0\0\0" * 2)]


def said(look: Callable[[], Any]) -> tuple[str, str]:
    try:
        look()
    except BadMessage as error:
        return str(error), error.reason
    return "", ""


@pytest.mark.parametrize("sample", TAKEN)
def test_the_usual_answer_is_taken(sample: m.Trajectory) -> None:
    at = store()
    samples = [answer(), sample]
    assert checks.check_delivery(at, samples, MODEL) == (samples, {})


@pytest.mark.parametrize(
    "bad", [*(answer(**change) for change in REFUSED), *LENGTHS], ids=lambda bad: ""
)
def test_a_fault_ends_its_sender_or_fails_its_sample(bad: m.Trajectory) -> None:
    """With its message, or alone: then it is taken as failed, and the others as they are."""
    at = store()
    fields = m.Trajectory.__struct_fields__
    changed = {x for x in fields if getattr(bad, x) != getattr(answer(), x)}
    alone = changed <= OUTCOME or not bad.mask  # what has no token has no broken array
    for samples in ([bad], [answer(), bad, answer(sample=0)]):
        try:
            taken, refused = checks.check_delivery(at, samples, MODEL)
        except BadMessage as error:
            assert f"ticket {bad.ticket}" in str(error) and not alone
            continue
        (error,) = refused.values()
        assert f"ticket {bad.ticket}" in str(error) and alone and len(taken) == len(samples)
        said_so = [
            replace(x, failed=m.RewardFailure("data", x.failed.why)) if x.failed else x
            for x in taken
        ]
        assert checks.check_delivery(at, said_so, MODEL) == (said_so, {})
        for sample, was in zip(taken, samples, strict=True):
            failed = m.RewardFailure("refused", escape_line(str(error)))
            assert sample is was if was is not bad else sample.failed == failed
            assert (sample.tokens, sample.mask, sample.spans) == (was.tokens, was.mask, was.spans)


def test_a_groups_line_is_of_the_samples_that_it_has() -> None:
    """It is summed once for a complete group, and again when a sample has come or left."""

    def line(group: Group) -> tuple[int, float, dict[int, int]]:
        into = Ledger()
        group.fold(into, trained=False)
        found = into.lines["left_over"]
        return found.tokens, found.reward_sum, found.by_length

    group = Group(1, [StoredSample(answer(reward=0.5), 0), StoredSample(of_length(4), 0)])
    assert line(group) == line(group) == (6, 1.5, {2: 2, 4: 4})
    group.set_sample(1, None)
    assert line(group) == (2, 0.5, {2: 2})
    group.set_sample(1, StoredSample(of_length(9, mask=b"\1" * 8 + b"\0"), 0))
    assert line(group) == (10, 1.5, {2: 2, 8: 8})
    assert group.count_sample_bytes() == sum(
        count_bytes(stored.trajectory) for stored in group.list_stored_samples()
    )
    group.empty()
    assert line(group) == (0, 0.0, {}) and group.samples == [None, None]
    group.samples = [StoredSample(answer(), 0, rejected=1), StoredSample(answer(), 0)]
    trained = Ledger()
    group.fold(trained, trained=True)
    assert (trained.lines["trained"].tokens, trained.lines["rejected"].tokens) == (3, 1)


def test_what_is_rare_is_taken_too() -> None:
    at = store()
    at.remove_group(at.alive[1], "abandoned")  # the group is gone
    checks.check_delivery(at, [answer()], MODEL)
    # a session's run: its answers are rows of calls
    sessions = store(session_tokens=9)
    one = answer(calls=1)
    assert checks.check_delivery(sessions, [one], MODEL) == ([one], {})
    failed = answer(failed=m.RewardFailure("data", "no"))
    checks.check_delivery(store(), [failed, answer(sample=0)], MODEL)
    # no limit of context: that of tokens is left
    long = of_length(LONG, prompt_tokens=bytes(400))
    checks.check_delivery(store(context=0), [long], MODEL)
    # injected lag: exactly the version that the ticket names
    exact = store()
    exact.alive[1].grants[2] = checks.Grant(ZERO, True)
    assert said(lambda: checks.check_delivery(exact, [answer()], MODEL))[1] == "limit"
