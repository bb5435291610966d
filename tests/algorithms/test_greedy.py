"""A greedy generator, a reader that does not read, a learner that asks for all or for nothing, a
disk that does not come back: what each may make the buffer hold is counted, and the others are
answered."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hostile_messages_kit import greeting, honest_hello
from process_kit import ROOT, until
from service_kit import SMALL, answers

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport import sockets
from asyncrl.transport.sockets import BufferSocket
from buffer import service as module
from buffer.service import BufferService

WAIT_MS = 2000


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Any]:
    made: list[BufferService] = []

    def begin(*sets: str) -> BufferService:
        config = load.load(ROOT / "configs" / "demo.toml", [*SMALL, *sets])
        rundir.ensure("", tmp_path / "run")
        made.append(BufferService(config, tmp_path / "run"))
        return made[-1]

    yield begin
    for service in made:
        service.close()
    rundir.clean(tmp_path / "run")


class Flood:
    """A socket with another message of one peer whenever it is asked; the service is stopped after
    `most`, and `sent` keeps what it says, each with the number of messages taken in before."""

    def __init__(self, service: BufferService, message: Any, most: int) -> None:
        self.service, self.message, self.most = service, message, most
        self.taken = 0
        self.sent: list[tuple[int, bytes, Any]] = []
        self.own, service.socket = service.socket, self  # type: ignore[assignment]

    def recv(self, timeout: float) -> Any:
        self.taken += 1
        self.service.stop = self.taken >= self.most
        return b"greedy", self.message

    def send(self, peer: bytes, message: Any) -> None:
        self.sent.append((self.taken, peer, message))

    def close(self) -> None:
        self.own.close()


def test_who_sends_without_end_holds_up_nobody(begun: Any) -> None:
    service = begun()
    service.handle(b"learner", honest_hello(service.run))
    service.handle(b"honest", greeting(service))
    service.handle(b"honest", m.TicketRequest("generator-0", 7, 1, 8, None))
    flood = Flood(service, m.StatusRequest(), 3 * module.PASS)
    service.loop()
    granted = [at for at, peer, what in flood.sent if isinstance(what, m.TicketGrant)]
    assert granted and granted[0] <= module.PASS + 1


def test_replies_for_the_disk_are_bounded(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OUTGOING", 1000)
    service = begun("durability.mode='disk'")
    # a disk that does not come back
    monkeypatch.setattr(service.store, "flush_journal", lambda: None)
    service.handle(b"learner", honest_hello(service.run))
    flood = Flood(service, m.StatusRequest(), 10**6)
    passes = iter(range(50))
    answer = service.answer

    def answered() -> None:
        answer()
        service.stop = next(passes, None) is None

    monkeypatch.setattr(service, "answer", answered)
    service.loop()
    assert 1000 <= len(service.outgoing) <= 1000 + module.PASS + 10
    assert flood.taken <= 1000 + module.PASS + 10


def test_wants_and_asks_without_end_are_kept_once(begun: Any) -> None:
    service = begun("learner.steps=5000")
    for number in range(3000):  # before any learner is there, nobody can be told of weights
        service.handle(b"g", m.TicketRequest("generator-0", 7, number, 8, None))
        service.handle(b"g", greeting(service))
    assert len(service.to_notify) == len(service.ticket_requests.waiting) == 1
    service.handle(b"learner", honest_hello(service.run))
    for number in range(1, 3000):
        service.handle(b"learner", m.BatchRequest(1, number))
    assert len(service.batch_requests) == 16 and [*service.batch_requests][-1] == 2999


def test_a_learner_that_stops_asking_ends_the_granting(begun: Any) -> None:
    """Room for max_lag + 1 batches is filled, and no more is granted, however often it is asked."""
    service = begun("staleness.max_lag=2", "learner.steps=500")
    service.handle(b"learner", honest_hello(service.run))
    service.store.max_lag = 2.0
    service.handle(b"g", greeting(service))
    heard: list[Any] = []
    service.socket.send = lambda peer, message: heard.append(message)
    room = 3 * service.store.settings.batch
    for number in range(20 * room):
        service.handle(b"g", m.TicketRequest("generator-0", 7, number, 8, None))
        service.answer()
        for said in heard:
            for ticket in said.tickets if isinstance(said, m.TicketGrant) else ():
                service.handle(b"g", msgspec.structs.replace(answers(ticket), session=7))
        heard.clear()
    assert service.store.cursor == room and len(service.store.alive) <= room
    assert service.refused.total() == 0 and service.store.policy == Label(1, 0)


def dealer(address: str, **options: int) -> Any:
    made = zmq.Context.instance().socket(zmq.DEALER)
    for name, value in ({"LINGER": 0, "RCVBUF": 1 << 16, "SNDBUF": 1 << 16} | options).items():
        made.setsockopt(getattr(zmq, name), value)
    made.connect(address)
    return made


def test_a_greedy_senders_messages_stay_at_its_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand that it would send while nobody reads, some are taken off its hands."""
    size = 1 << 18
    monkeypatch.setattr(sockets, "UNREAD_BYTES", 32 * size)
    buffer = BufferSocket("tcp://127.0.0.1:*", most=size)
    greedy = dealer(buffer.address, SNDHWM=1)
    sent = 0
    while sent < 1000 and greedy.poll(WAIT_MS, zmq.POLLOUT):
        greedy.send(bytes(size))
        sent += 1
    honest = dealer(buffer.address)  # and another's come through
    honest.send_multipart([sockets.make_head(""), msgspec.msgpack.encode(m.StatusRequest())])
    until(lambda: isinstance((buffer.recv(0.1) or (b"", None))[1], m.StatusRequest))
    for each in (greedy, honest, buffer):
        each.close()
    assert sent < 200


def test_replies_to_who_does_not_read_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HIGH_WATER", 20)
    buffer = BufferSocket("tcp://127.0.0.1:*")
    buffer.socket.setsockopt(zmq.SNDBUF, 1 << 16)
    silent = dealer(buffer.address, RCVHWM=1)
    silent.send_multipart([sockets.make_head(""), msgspec.msgpack.encode(m.StatusRequest())])
    got = until(lambda: buffer.recv(0.1))
    said = m.Refusal("x" * (1 << 16))
    for _ in range(2000):
        buffer.send(got[0], said)
    read = 0
    # what was queued comes, however late; behind it nothing more
    while silent.poll(WAIT_MS if read >= 20 else 300 * WAIT_MS):
        silent.recv()
        read += 1
    silent.close()
    buffer.close()
    assert 20 <= read < 400


def test_stored_objects_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept up to a checkpoint is as many, and looking at them took a tenth of its time."""
    config = load.load(ROOT / "configs" / "demo.toml", [*SMALL])
    rundir.ensure("", tmp_path / "run")
    looked: list[Any] = []

    def loop(service: BufferService) -> None:
        gc.collect()
        gc.callbacks.append(look)
        kept = [[number] for number in range(100_000)]
        gc.callbacks.remove(look)
        assert len(kept) == 100_000

    def look(phase: str, info: dict[str, int]) -> None:
        looked.append((phase, info["generation"]))

    monkeypatch.setattr(BufferService, "loop", loop)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    before = gc.get_threshold()
    try:
        assert module.main(config, tmp_path / "run") is False and not looked
    finally:
        gc.set_threshold(*before)
        rundir.clean(tmp_path / "run")
