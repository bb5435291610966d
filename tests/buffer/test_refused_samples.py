"""A sample whose outcome cannot be is failed alone: its sender goes on, the ledger closes, and a
sender that keeps doing it ends."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hostile_messages_kit import honest_hello
from journal_kit import open_recorded, state
from refused_samples_kit import (
    Bench,
    bench,  # noqa: F401  # noqa: F401
    sample,
)
from store_kit import hello, make
from store_kit import sample as stored_sample
from vision_kit import picture

from actors.delivery import Outbox
from actors.reward_worker import check_or_explain
from asyncrl.config.tree import WiresConfig
from asyncrl.contract import messages as m
from asyncrl.contract import outcomes
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import BadMessage, DamagedDataError
from asyncrl.contract.messages import LearnerHello, MixturePosition
from asyncrl.contract.routed_experts import RoutedExperts
from asyncrl.contract.versions import Label
from asyncrl.tasks import get_task
from asyncrl.transport import message_checks
from buffer import checks, groups, journal
from buffer import service as module
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore, list_segments
from buffer.ledger import sum_tokens
from buffer.service import open_store
from buffer.store import Store

NAN = float("nan")
HALF = "has \\ud800, half of a character: UTF-8 cannot encode it"
BAD: list[dict[str, Any]] = [
    {"reward": 1e19},
    {"reward": NAN},
    {"reward_parts": {f"p{i}": 0.0 for i in range(300)}},
    {"reward_parts": {"x" * 300: 0.0}},
    {"reward_parts": {"a": -1e19}},
    {"failed": m.RewardFailure("data", "x" * 100_000)},
    {"failed": m.RewardFailure("refused", "evades the budget")},
    {"text": "x" * (1 << 23)},
    {"group_key": "x" * 201},
    {"token_rewards": np.float32([0.0, np.inf]).tobytes()},
]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": NAN}, "reward is nan, not a finite number"),
        (
            {"reward": -2e15},
            "reward is -2e+15, more than 1e+15 in magnitude, which overflows the learner's "
            "float32: scale it down",
        ),
        (
            {"reward_parts": {"a": 2e15}},
            "a is 2e+15, more than 1e+15 in magnitude, which overflows the learner's float32: "
            "scale it down",
        ),
        ({"reward_parts": {"a\n": NAN}}, "a\\n is nan, not a finite number"),
        (
            {"reward_parts": dict.fromkeys(map(str, range(257)), 0.0)},
            "a reward has 257 parts; at most 256 are allowed",
        ),
        (
            {"reward_parts": {"x" * 201: 0.0}},
            f"the name of a part has 201 characters, '{'x' * 40}...'; at most 200 are allowed",
        ),
        ({"reward_parts": {"\ud800": 0.0}}, f"the name of a part {HALF}"),
        (
            {"failed": m.RewardFailure("data", "x" * 65537)},
            f"the reason has 65537 characters, '{'x' * 40}...'; at most 65536 are allowed",
        ),
        ({"failed": m.RewardFailure("data", "\ud800")}, f"the reason {HALF}"),
        ({"text": "a\ud800"}, f"the text of the completion {HALF}"),
        ({"prompt_text": "\ud800"}, f"the text of the prompt {HALF}"),
        ({"group_key": "\ud800"}, f"the key of the group {HALF}"),
        (
            {"group_key": "x" * 201},
            f"the key of the group has 201 characters, '{'x' * 40}...'; at most 200 are allowed",
        ),
    ],
)
def test_an_outcome_is_refused_with_its_reason(change: dict[str, Any], said: str) -> None:
    parts = {"x" * 200: -1e15} | dict.fromkeys(map(str, range(255)), 0.0)
    good = m.Trajectory(0, 0, 1, b"", b"", b"", b"", [], 1e15, parts, "stop", 1.0, "x" * 200)
    good.failed = m.RewardFailure("data", "x" * 65_536)
    outcomes.check_sample(good)
    with pytest.raises(BadMessage) as refused:
        outcomes.check_sample(msgspec.structs.replace(good, **change))
    assert str(refused.value) == said


def test_a_failed_sample_keeps_its_tokens_and_drops_its_outcome() -> None:
    row = m.TrainingSequence(b"", b"2", b"3", b"4", [], segments=[("model", 0, 1)])
    row = msgspec.structs.replace(row, token_rewards=b"5", images=["0" * 32])
    kept = m.Trajectory(7, 1, 2, b"1", b"2", b"3", b"4", [], 0.0, {}, "stop", 0.5)
    kept.generated_at = 3.0
    kept.rows = [m.TrainingSequence(b"", b"2", b"3", b"4", [])]
    outcome: dict[str, Any] = {"text": "a", "prompt_text": "b", "group_key": "c"}
    outcome |= {"reward": 2.0, "reward_parts": {"d": 1.0}, "rows": [row]}
    outcome |= {x: getattr(row, x) for x in ("segments", "token_rewards", "images")}
    failed = outcomes.make_failed_sample(
        msgspec.structs.replace(kept, **outcome), "data", "no\nreward"
    )
    kept.failed = m.RewardFailure("data", "no\\nreward")
    assert failed == kept
    for temperature, at in ((NAN, NAN), (0.0, float("inf")), (float("inf"), NAN)):
        broken = msgspec.structs.replace(kept, temperature=temperature, generated_at=at)
        failed = outcomes.make_failed_sample(broken, "data", "no")
        assert (failed.temperature, failed.generated_at) == (1.0, 0.0)


@pytest.mark.parametrize("mode", ["memory", "process"])
def test_an_impossible_sample_fails_alone(mode: str, bench: Callable[..., Bench]) -> None:
    at = bench(f"durability.mode='{mode}'")
    service, tickets, failed = at.service, at.tickets(40), 0
    for change, ticket in zip(BAD, tickets, strict=False):
        reply = at.deliver(sample(ticket, 0), sample(ticket, 1, **change))
        assert isinstance(reply, m.DeliveryAcks), reply
        assert [what for *_, what in reply.acks] == ["accepted", "failed"]
        failed += 1
        assert service.refused.total() == failed
        # a copy of the message hears the same, and counts nothing
        again = at.deliver(sample(ticket, 0), sample(ticket, 1, **change), again=True)
        assert isinstance(again, m.DeliveryAcks) and again.acks == reply.acks
        assert service.refused.total() == failed
        lines = service.store.sum_ledger()
        assert (lines["failed"]["tokens"], lines["failed"]["samples"]) == (2 * failed, failed)
        assert sum_tokens(lines) == service.store.count_generated_tokens() == 4 * failed
        # and the sample is due again
        assert 1 in service.store.alive[ticket.ticket].list_missing()
    assert failed == len(BAD)
    if mode == "process":  # what was taken is what the journal folds to
        service.store.flush_journal()  # type: ignore[attr-defined]
        folded = open_store(at.config, at.dir, get_task(at.config.task))
        try:
            assert folded.sum_ledger() == service.store.sum_ledger()
        finally:
            folded.journal.close()  # type: ignore[attr-defined]


def test_a_sender_of_nothing_else_ends_and_good_samples_make_up_for_bad_ones(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_REFUSED", 3)
    at = bench("durability.mode='memory'")
    tickets = iter(at.tickets(60))
    for _ in range(3):  # as many good ones as bad ones: for ever
        ticket = next(tickets)
        reply = at.deliver(sample(ticket, 0, reward=NAN), sample(ticket, 1))
        assert isinstance(reply, m.DeliveryAcks)
    for _ in range(3):
        assert isinstance(at.deliver(sample(next(tickets), 0, reward=NAN)), m.DeliveryAcks)
    before = at.service.store.sum_ledger()
    reply = at.deliver(sample(next(tickets), 0, reward=NAN))
    assert isinstance(reply, m.Refusal)
    assert "generator-0 delivered 4 more unusable samples than good ones" in reply.reason
    assert "reward is nan" in reply.reason and at.service.store.sum_ledger() == before


def test_broken_arrays_still_end_their_sender(bench: Callable[..., Bench]) -> None:
    at = bench("durability.mode='memory'")
    (ticket, *_) = at.tickets(8)
    reply = at.deliver(sample(ticket, 0), sample(ticket, 1, tokens=b"\0" * 7, reward=NAN))
    assert isinstance(reply, m.Refusal) and "7 bytes of tokens" in reply.reason
    assert not any(line["tokens"] for line in at.service.store.sum_ledger().values())


def test_an_older_learner_keeps_the_vocabulary_check(bench: Callable[..., Bench]) -> None:
    at = bench("durability.mode='memory'")
    newer = msgspec.structs.replace(
        honest_hello(at.service.run, vocabulary=50), epoch=2, label=Label(2, 0)
    )
    at.service.handle(b"l", newer)
    at.replies.clear()
    at.service.handle(b"o", honest_hello(at.service.run))  # of epoch 1, and says no vocabulary
    assert at.replies == [m.FencedReply(1, 2)] and at.service.model.vocabulary == 50
    (ticket, *_) = at.tickets(8)
    reply = at.deliver(sample(ticket, 0, tokens=b"\4\0\0\0\x32\0\0\0"))
    assert isinstance(reply, m.Refusal) and "of a model with 50 tokens" in reply.reason


def test_a_replaying_learner_needs_every_tokens_experts(bench: Callable[..., Bench]) -> None:
    """Those of the model's routers: a generator that sends others, or none, is broken."""
    at = bench("durability.mode='memory'")
    hello = honest_hello(at.service.run, vocabulary=50)
    at.service.handle(b"l", msgspec.structs.replace(hello, routing=m.RoutingShape(1, 8, 2)))
    first, second, third, *_ = at.tickets(30)
    good = RoutedExperts(np.array([[[3, 4]], [[8, 8]]], np.uint16), 8)
    assert isinstance(at.deliver(sample(first, 0, routed=good.encode())), m.DeliveryAcks)
    nothing = [m.VersionSpan(first.min_version, "", 0, 0, first.min_version)]
    failed = sample(first, 1, tokens=b"", behavior_logprobs=b"", mask=b"", spans=nothing)
    failed.prompt_tokens = b""
    failed.failed = m.RewardFailure("data", "no prompt")
    assert isinstance(at.deliver(failed), m.DeliveryAcks)
    of_nine = RoutedExperts(np.array([[[3, 4]], [[9, 9]]], np.uint16), 9)
    for ticket, routed, said in (
        (second, b"", "it has no experts, and the learner replays them"),
        (third, of_nine.encode(), "2 of 9 experts; the model has 1 layers"),
    ):
        reply = at.deliver(sample(ticket, 0, routed=routed))
        assert isinstance(reply, m.Refusal) and said in reply.reason
    assert at.service.store.sum_ledger()["failed"]["samples"] == 1
    assert at.service.refused == {"shape": 2}


OWN_WAIT = m.ProcessWait("generator-0", "x" * 1000, "buffer", 1.0)
OPEN = m.OpenSession(1, 0, "1.0.1", "p", 0, "engine", "w", 1.0, 1.0)


@pytest.mark.parametrize(
    ("wait", "session", "why"),
    [
        ({}, {}, ""),
        ({"on": "generator-0-rewards"}, {}, ""),
        (
            {"who": "generator-1"},
            {},
            "generator-0 reports a wait of 'generator-1' for 'buffer'; it may report only its own",
        ),
        (
            {"on": "learner"},
            {},
            "generator-0 reports a wait of 'generator-0' for 'learner'; it may report only its own",
        ),
        ({"what": "x" * 1001}, {}, "generator-0: a wait's text has at most 1000 characters"),
        *(
            ({}, {name: "\x1b[2J"}, "generator-0: the texts of a session must be printable")
            for name in ("name", "task", "what", "limit")
        ),
    ],
)
def test_a_generator_reports_waits_of_its_own_in_printable_words(
    wait: dict[str, Any], session: dict[str, Any], why: str
) -> None:
    sessions = [OPEN, msgspec.structs.replace(OPEN, **session)]
    renewal = m.LeaseRenewal("generator-0", 1, [], {}, OWN_WAIT._replace(**wait), sessions=sessions)
    if not why:
        checks.check_renewal(renewal)
        return
    with pytest.raises(BadMessage) as error:
        checks.check_renewal(renewal)
    assert str(error.value) == why and error.value.reason == ("text" if session else "message")


HALF = "\ud800"


@pytest.mark.parametrize(
    "change",
    [
        {"reward_parts": {HALF: 1.0}},
        {"text": HALF},
        {"reward": NAN},
        {"failed": m.RewardFailure("data", "x" * 65_537)},
    ],
)
def test_what_cannot_be_encoded_or_accepted_is_sent_as_failed(change: dict[str, Any]) -> None:
    """The others of its frame, and the process that sends it, are unharmed."""
    ticket = m.Ticket(
        1, 1, "train", m.Prompt(1, "p"), [0, 1], m.SamplingSettings(), Label(1, 0), None, 0
    )
    box = Outbox(WiresConfig(), "generator-0", 7)
    good, bad = sample(ticket, 0), sample(ticket, 1, **change)
    box.add(good)
    box.add(bad)
    (frame,) = box.take_frames(0.0, flush=True)
    kept, failed = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=m.Delivery).samples
    assert kept == good and failed.failed and failed.failed.kind == "data"
    assert failed.failed.why.startswith("it cannot be delivered: ") and failed.tokens == bad.tokens
    assert failed.failed.why.isprintable() and len(failed.failed.why) <= 303 and frame.drawn == 4


@pytest.mark.parametrize(
    "value, why",
    [
        (
            {"reward": 1.0, **{f"p{i}": 0.0 for i in range(300)}},
            "301 parts; at most 256 are allowed",
        ),
        ({"reward": 1.0, HALF: 0.0}, "half of a character"),
        ({"reward": 1.0, "\x1b[2J": "no"}, "x1b[2J is a str, not a number"),
    ],
)
def test_a_reward_function_is_checked_for_the_same(value: Any, why: str) -> None:
    found = check_or_explain(value, 1)
    assert isinstance(found, str) and why in found and found.isprintable()


def test_a_generator_may_ask_for_as_many_samples_as_are_possible() -> None:
    def over_a_wire(samples: int) -> m.TicketRequest:
        data = msgspec.msgpack.encode(m.TicketRequest("generator-0", 1, 1, samples, None))
        return msgspec.msgpack.decode(data, type=m.TicketRequest)

    for samples in (0, 1 << 30):
        assert over_a_wire(samples).samples == samples
    for samples in (-1, (1 << 30) + 1):
        with pytest.raises(msgspec.ValidationError, match=r"at `\$\.samples`"):
            over_a_wire(samples)


LINE = {"tokens": 4.0, "samples": 2.0, "mean_length": 2.0, "mean_reward": 0.5, "upto_8": 4.0}
PLACE = MixturePosition({"a": 0.5}, {"a": 0}, [("a", -1)], {"a": 0}, {"a": {"trained": LINE}})


def said(**more: Any) -> LearnerHello:
    return msgspec.structs.replace(honest_hello("run"), **more)


def look(**more: Any) -> None:
    """As the buffer does with what comes over a wire."""
    data = msgspec.msgpack.encode(said(**more))
    checks.check_hello(msgspec.msgpack.decode(data, type=LearnerHello))


def placed(**more: Any) -> dict[str, Any]:
    return {"mixture": msgspec.structs.replace(PLACE, **more)}


HONEST: list[dict[str, Any]] = [
    {},
    {
        "epoch": 3,
        "label": Label(3, 9),
        "origin": 3,
        "ring": [(Label(3, 0), "a"), (Label(3, 8), "b")],
    },
    {"max_lag": 0.0, "limit": 0, "vocabulary": (1 << 31) - 1},
    {"routing": (1, 8, 8)},
    {"routing": (1, (1 << 16) - 1, 1)},
    {"next_ticket": (1 << 48) - 1, "trained_above": [0, (1 << 48) - 1]},
    {"ledger": {"trained": LINE}},
    {"ledger": dict.fromkeys(m.DISPOSITIONS, LINE)},
    {"mixture": PLACE},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"epoch": 0, "label": Label(0, 0)}, "at `$.epoch`"),
    ({"label": Label(2, 0)}, "cannot be at version"),
    ({"label": Label(1, -1)}, "at `$.label[1]`"),
    ({"origin": -1}, "at `$.origin`"),
    ({"origin": 2}, "cannot have resumed from epoch 2"),
    ({"max_lag": -0.5}, "at `$.max_lag`"),
    ({"max_lag": math.nan}, "at `$.max_lag`"),
    ({"limit": -1}, "at `$.limit`"),
    ({"vocabulary": -1}, "at `$.vocabulary`"),
    ({"vocabulary": 1 << 31}, "at `$.vocabulary`"),
    ({"routing": (0, 8, 2)}, "at `$.routing[0]`"),
    ({"routing": (1, 8, 0)}, "at `$.routing[2]`"),
    ({"routing": (1, 8, 9)}, "cannot have a model of"),
    ({"routing": (1, 1 << 16, 2)}, "at `$.routing[1]`"),
    ({"next_ticket": -1}, "at `$.next_ticket`"),
    ({"next_ticket": 1 << 48}, "at `$.next_ticket`"),
    ({"trained_above": [3, -1]}, "at `$.trained_above[1]`"),
    ({"trained_above": [3, 1 << 48]}, "at `$.trained_above[1]`"),
    ({"ring": [(Label(1, 0), "a")]}, "not earlier versions of its epoch: 1.0"),
    ({"label": Label(1, 3), "ring": [(Label(2, 1), "a")]}, "not earlier versions"),
    ({"label": Label(1, 3), "ring": [(Label(1, -1), "a")]}, "at `$.ring[0][0][1]`"),
    (placed(credit={"a": math.inf}), "at `$.mixture.credit[...]`"),
    (placed(indices={"a": -1}), "at `$.mixture.indices[...]`"),
    (placed(due=[("a", -2)]), "at `$.mixture.due[0][1]`"),
    (placed(removed={"a": -1}), "at `$.mixture.removed[...]`"),
    (placed(ledgers={"a": {"lost": LINE}}), "a ledger with other lines than"),
    ({"ledger": {"lost": LINE}}, "a ledger with other lines than"),
    ({"ledger": {"trained": {"tokens": 1.0}}}, "an invalid ledger: KeyError 'samples'"),
    ({"ledger": {"trained": LINE | {"tokens": math.inf}}}, "an invalid ledger: OverflowError"),
    ({"ledger": {"trained": LINE | {"upto_x": 1.0}}}, "an invalid ledger: ValueError"),
]


@pytest.mark.parametrize("more", HONEST)
def test_what_a_learner_may_say(more: dict[str, Any]) -> None:
    look(**more)


@pytest.mark.parametrize(("more", "why"), REFUSED)
def test_what_no_learner_can_be(more: dict[str, Any], why: str) -> None:
    with pytest.raises((BadMessage, msgspec.ValidationError)) as refused:
        look(**more)
    message = str(refused.value)
    assert message.startswith(("the learner of epoch ", "Expected ")) and why in message
    assert "BadMessage" not in message


SHAPE = images.ImageShape(40, 2)
BLOBS = [picture(n) for n in range(4)]
NAMES = [images.digest(blob) for blob in BLOBS]


def shown(index: int) -> m.Prompt:
    """The prompt of a ticket, which has a picture of its own."""
    return m.Prompt(index, "<image>g=", images=[BLOBS[index]])


def seen(ticket: m.Ticket, number: int, *names: str, **more: Any) -> m.Trajectory:
    """A sample with the image tokens of SHAPE for these images."""
    made = stored_sample(ticket, number)
    prompt = np.array([SHAPE.token] * SHAPE.length * len(names) + [3], "<i4").tobytes()
    changes = {"prompt_tokens": prompt, "images": list(names)} | more
    return msgspec.structs.replace(made, **changes)


def store_of(steps: int = 4, group: int = 2) -> Store:
    made = Store(StoreSettings(1, group, steps, m.SamplingSettings()), shown)
    assert hello(made, 1, 0, k=9)
    return made


def test_a_digest_is_32_hexadecimal_digits() -> None:
    assert all(images.is_digest(name) for name in NAMES)
    assert images.is_digest("0123456789abcdef" * 2)
    for name in ("", NAMES[0][1:], NAMES[0] + "0", "X" * 32, "A" * 32, NAMES[0][:-1] + "g"):
        assert not images.is_digest(name)


def test_a_group_has_its_image_once_and_counts_its_bytes() -> None:
    store = store_of()
    (ticket, other) = store.grant("g", 1, 4, 0.0)
    assert ticket.prompt.images == [BLOBS[0]] and store.stored_bytes == sum(map(len, BLOBS[:2]))
    for number in range(2):
        store.deliver(seen(ticket, number, NAMES[0]), 0.0)
    of_samples = store.alive[0].count_sample_bytes()
    assert store.stored_bytes == of_samples + len(BLOBS[0]) + len(BLOBS[1])
    assert store.ask(1, 0)[0]
    batch = store.make_batch(0)
    assert batch.images == {NAMES[0]: BLOBS[0]} and len(batch.samples) == 2
    # on the wire: the blob once, and a digest in each sample
    assert msgspec.msgpack.encode(batch).count(BLOBS[0]) == 1
    delivered = Outbox(WiresConfig(), "g", 1)
    for one in batch.samples:
        delivered.add(one)
    (frame,) = delivered.take_frames(1.0, flush=True)
    assert frame.images == {} and len(msgspec.msgpack.encode(frame)) < 600
    assert store.commit(0, Label(1, 1), "d1")
    assert store.stored_bytes == of_samples + len(BLOBS[0]) + len(BLOBS[1])  # a learner may repeat
    store.retire_batches(1)
    assert store.stored_bytes == len(BLOBS[1])
    store.remove_group(store.alive[other.ticket], "abandoned")
    assert store.stored_bytes == 0


def test_images_of_sessions_come_with_the_delivery_and_are_kept_once() -> None:
    store = store_of()
    (ticket, _) = store.grant("g", 1, 4, 0.0)
    blobs = {NAMES[2]: BLOBS[2], NAMES[3]: BLOBS[3]}
    before = store.stored_bytes
    store.accept_samples([seen(ticket, 0, NAMES[2])], images=blobs)
    store.accept_samples([seen(ticket, 0, NAMES[2])], images=blobs)  # a copy
    store.accept_samples([seen(ticket, 1, NAMES[2], NAMES[0])], images=blobs)
    assert set(store.alive[0].images) == {NAMES[0], NAMES[2]}  # and not what no sample names
    assert store.stored_bytes == before + store.alive[0].count_sample_bytes() + len(BLOBS[2])
    assert store.ask(1, 0)[0]
    assert set(store.make_batch(0).images) == {NAMES[0], NAMES[2]}


def test_an_outbox_sends_each_image_once_a_frame_until_it_is_acknowledged() -> None:
    (ticket, _) = store_of().grant("g", 1, 4, 0.0)
    box = Outbox(WiresConfig(), "gateway-0", 1)
    blobs = {NAMES[2]: BLOBS[2]}
    for number in range(2):
        box.add(seen(ticket, number, NAMES[2], NAMES[0]), blobs)
    (frame,) = box.take_frames(1.0, flush=True)
    assert frame.images == blobs and len(frame.samples) == 2
    full = box.unacked_bytes
    assert full > 2 * len(BLOBS[2])
    (again,) = box.take_frames(1.0 + WiresConfig().retry_s + 1, flush=True)
    assert again.images == blobs
    box.add(seen(ticket, 2, NAMES[2]), blobs)
    assert len([*box.take_frames(99.0, flush=True)]) == 1 and box.unacked_bytes > full
    box.frame_bytes = full
    assert [len(frame.samples) for frame in box.take_frames(999.0, flush=False)] == [2, 1]
    acks: list[Any] = [(ticket.ticket, n, ticket.attempt, "accepted") for n in range(3)]
    box.on_acks(m.DeliveryAcks(1, acks, 1 << 20, None), 9.0)
    assert box.unacked_bytes == 0 and box.images == {}


def opened(path: Path, prompt: Callable[[int], m.Prompt] = shown) -> RecordedStore:
    return open_recorded(path, StoreSettings(1, 2, 4, m.SamplingSettings()), prompt=prompt)


def test_the_journal_keeps_images_whatever_becomes_of_their_files(tmp_path: Path) -> None:
    """Grants, deliveries of three kinds and a snapshot; the prompts' files have changed since."""
    store = opened(tmp_path)
    hello(store, 1, 0, k=9)
    (first, second) = store.grant("g", 1, 4, 0.0)
    one, two = seen(first, 0, NAMES[0]), seen(first, 1, NAMES[2])
    frame = m.Delivery("g", 1, 1, [two], 4, {NAMES[2]: BLOBS[2]})
    store.accept_samples([one])
    store.accept_samples([two], msgspec.msgpack.encode(frame), frame.images)
    store.accept_samples([seen(second, 0, NAMES[3])], images={NAMES[3]: BLOBS[3]})
    assert store.ask(1, 0)[0]
    before = store.make_batch(0)
    store.journal.close()

    def changed(index: int) -> m.Prompt:
        return m.Prompt(index, "<image>g=", images=[picture(99)])

    for _ in range(2):  # from records, then from a snapshot
        again = opened(tmp_path, changed)
        assert again.alive[1].images == {NAMES[1]: BLOBS[1], NAMES[3]: BLOBS[3]}
        assert again.stored_bytes == store.stored_bytes
        assert again.ask(1, 0)[0]
        assert again.make_batch(0).images == before.images
        assert before.images == {NAMES[0]: BLOBS[0], NAMES[2]: BLOBS[2]}
        again.journal.close()
    same = opened(tmp_path)
    assert state(same).alive[0].images == store.alive[0].images
    same.journal.close()


def test_a_damaged_blob_in_the_journal_is_reported(tmp_path: Path) -> None:
    store = opened(tmp_path)
    hello(store, 1, 0, k=9)
    store.grant("g", 1, 4, 0.0)
    store.journal.write()
    path = list_segments(tmp_path)[-1]
    at = path.read_bytes().index(BLOBS[0]) + 100
    store.report_tokens("g", 1, 5)
    store.journal.close()
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(DamagedDataError, match="is damaged at byte"):
        opened(tmp_path)


def test_older_records_have_no_images() -> None:
    decode = journal._decode
    store = make(9)
    (ticket,) = store.grant("g", 1, 1, 0.0)
    plain = stored_sample(ticket)
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    older = msgspec.msgpack.encode
    assert decode(older(["grant", "g", 1, 1, 0.0, 1])).images == {}  # type: ignore[union-attr]
    assert decode(older(["frame", [raw[:-1]]])).images == {}  # type: ignore[union-attr]
    assert decode(older(["deliver", raw[:-1]])).trajectory == plain  # type: ignore[union-attr]
    group = msgspec.msgpack.decode(older(store.alive[0]))
    assert group.pop("images") == {}
    assert msgspec.msgpack.decode(older(group), type=groups.Group).images == {}


def test_samples_without_their_images_are_refused(bench: Callable[..., Bench]) -> None:
    at = bench("task.name='count'", "model.warm_start=true", "generator.context=64")
    service = at.service
    service.handle(b"l", honest_hello(service.run, vocabulary=50, images=SHAPE))
    ticket, other, *_ = at.tickets(8)
    (blob,) = ticket.prompt.images
    name = images.digest(blob)

    def deliver(one: m.Trajectory, **blobs: bytes) -> Any:
        at.replies.clear()
        message = m.Delivery("generator-0", 7, 1, [one], 99, blobs)
        service.socket.payload = msgspec.msgpack.encode(message)
        service.handle(b"g", message)
        return at.replies[-1]

    def label(one: m.Trajectory) -> m.Trajectory:
        spans = [msgspec.structs.replace(span, digest="") for span in one.spans]
        return msgspec.structs.replace(one, spans=spans)

    assert [kind for *_, kind in deliver(label(seen(ticket, 0, name))).acks] == ["accepted"]
    session = deliver(label(seen(ticket, 1, NAMES[0])), **{NAMES[0]: BLOBS[0]})
    assert [kind for *_, kind in session.acks] == ["accepted"]
    damaged = BLOBS[1][:100]
    for one, said in (  # it fails alone, and its sender goes on
        (seen(other, 0, NAMES[1]), "is neither in the delivery nor in its prompt"),
        (seen(other, 0, prompt_tokens=b"\x28\0\0\0"), "1 image tokens and 0 images"),
    ):
        (taken,), errors = checks.check_delivery(service.store, [label(one)], service.model)
        (error,) = errors.values()
        assert said in str(error) and error.reason == "image"
        assert taken.failed and taken.failed.kind == "refused" and not taken.images
    for blobs, said in (
        ({NAMES[1]: damaged}, "that has another one"),
        (images.index_by_digest([damaged]), "a damaged image"),
    ):
        with pytest.raises(BadMessage, match=said) as refused:
            checks.check_delivery(service.store, [label(seen(other, 0))], service.model, blobs)
        assert refused.value.reason == "image"
    failed = label(seen(other, 0, NAMES[1], failed=m.RewardFailure("data", "why")))
    checks.check_delivery(service.store, [failed], service.model)
    with pytest.raises(BadMessage, match="cannot have a model that reads an image as"):
        checks.check_hello(honest_hello("r", vocabulary=50, images=images.ImageShape(50, 2)))


def test_a_learner_checks_the_images_of_its_batch() -> None:
    store = store_of()
    (ticket, _) = store.grant("g", 1, 4, 0.0)
    for number in range(2):
        store.deliver(seen(ticket, number, NAMES[0]), 0.0)
    assert store.ask(1, 0)[0]
    batch = store.make_batch(0)
    message_checks.check(batch, m.ModelShape(50, None, SHAPE))
    for changed, said in (
        ({}, "1 images of its samples are not in it"),
        ({NAMES[0]: BLOBS[1]}, "that has another one"),
    ):
        with pytest.raises(BadMessage, match=said):
            bad = msgspec.structs.replace(batch, images=changed)
            message_checks.check(bad, m.ModelShape(50, None, SHAPE))
    with pytest.raises(BadMessage, match="of a model of text"):
        message_checks.check(batch, m.ModelShape(50))


def test_a_generator_checks_the_images_of_its_tickets() -> None:
    tickets = store_of().grant("g", 1, 2, 0.0)
    message_checks.check(m.TicketGrant(1, 1, tickets, None))
    for blobs, said in (([BLOBS[0][:20]], "not a PNG"), ([BLOBS[0]] * 65, "65 images")):
        prompt = msgspec.structs.replace(tickets[0].prompt, images=blobs)
        bad = msgspec.structs.replace(tickets[0], prompt=prompt)
        with pytest.raises(BadMessage, match=said):
            message_checks.check(m.TicketGrant(1, 1, [bad], None))
