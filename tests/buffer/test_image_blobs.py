"""Images in the buffer: a group has each blob once, the journal keeps it, and samples whose images
are missing or damaged are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hostile_messages_kit import honest_hello
from journal_kit import open_recorded, state
from process_kit import ROOT
from refused_samples_kit import (
    Bench,
    bench,  # noqa: F401
)
from store_kit import hello, make, sample
from vision_kit import picture

from actors.delivery import Outbox
from asyncrl.config import load
from asyncrl.config.tree import WiresConfig
from asyncrl.contract import messages as m
from asyncrl.contract.blobs import images
from asyncrl.contract.errors import BadMessage, DamagedDataError
from asyncrl.contract.versions import Label
from asyncrl.transport import message_checks
from buffer import checks, groups, journal
from buffer.groups import StoreSettings
from buffer.journal import RecordedStore, list_segments
from buffer.service import compute_max_message_bytes
from buffer.store import Store

SHAPE = images.ImageShape(40, 2)
BLOBS = [picture(n) for n in range(4)]
NAMES = [images.digest(blob) for blob in BLOBS]


def shown(index: int) -> m.Prompt:
    """The prompt of a ticket, which has a picture of its own."""
    return m.Prompt(index, "<image>g=", images=[BLOBS[index]])


def seen(ticket: m.Ticket, number: int, *names: str, **more: Any) -> m.Trajectory:
    """A sample with the image tokens of SHAPE for these images."""
    made = sample(ticket, number)
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
    found, _ = store.ask(1, 0)
    batch = store.make_batch(found, 1, 0)
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
    found, _ = store.ask(1, 0)
    assert set(store.make_batch(found, 1, 0).images) == {NAMES[0], NAMES[2]}


def test_the_buffer_takes_the_largest_session() -> None:
    config = load.load(ROOT / "configs" / "calc_http.toml")
    most = compute_max_message_bytes(config)
    assert most > images.MOST_SESSION_BYTES + config.wires.frame_bytes
    assert compute_max_message_bytes(load.load(ROOT / "configs" / "demo.toml")) < most


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
    found, _ = store.ask(1, 0)
    before = store.make_batch(found, 1, 0)
    store.journal.close()

    def changed(index: int) -> m.Prompt:
        return m.Prompt(index, "<image>g=", images=[picture(99)])

    for _ in range(2):  # from records, then from a snapshot
        again = opened(tmp_path, changed)
        assert again.alive[1].images == {NAMES[1]: BLOBS[1], NAMES[3]: BLOBS[3]}
        assert again.stored_bytes == store.stored_bytes
        found, _ = again.ask(1, 0)
        assert again.make_batch(found, 1, 0).images == before.images
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
    plain = sample(ticket)
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
    found, _ = store.ask(1, 0)
    batch = store.make_batch(found, 1, 0)
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
