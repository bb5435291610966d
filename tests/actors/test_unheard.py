"""Tickets whose reply nobody heard: the buffer died, or a connection broke, between the grant and
its reply.  The generator says what it has, and the rest is due again without waiting for a lease to
end."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile_messages_kit import greeting, honest_hello
from journal_kit import recorded, state
from process_kit import ROOT
from service_kit import SMALL
from store_kit import hello, make, write

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.records import rundir
from buffer.evaluation import EvaluationPlan, Evaluations
from buffer.service import BufferService


def test_what_a_session_neither_has_nor_will_take_is_due_again() -> None:
    one = Evaluations(EvaluationPlan(0, 1, 1, 0, 1.0), lambda split, index: m.Prompt(index, split))
    store = make(k=3, evaluations=one)
    evaluated, first, second = store.grant("g", 1, 3, 0.0)
    (others,) = store.grant("h", 1, 1, 0.0)
    (later,) = store.grant("g", 1, 1, 0.0)
    up_to = second.attempt
    assert store.leases.find_unnamed_attempts("g", 1, 0, set()) == []  # it does not say
    assert store.leases.find_unnamed_attempts("g", 2, up_to, set()) == []  # another session's
    named = {first.attempt, evaluated.attempt}
    lost = store.leases.find_unnamed_attempts("g", 1, up_to, named)
    assert lost == [(second.ticket, second.attempt)]  # the later one may still be on its way
    lost = store.leases.find_unnamed_attempts("g", 1, up_to, {first.attempt})
    store.free_leases(lost)
    store.free_leases(lost)  # said twice, freed once
    again = store.grant("h", 1, 9, 0.0)
    assert [(t.kind, t.ticket) for t in again] == [
        ("eval", evaluated.ticket),
        ("train", second.ticket),
    ]
    assert min(t.attempt for t in again) > later.attempt
    # both are the other's now, whatever the first one says
    assert store.leases.find_unnamed_attempts("g", 1, later.attempt, named | {later.attempt}) == []
    store.free_leases(lost)
    held = {t.ticket: t.attempt for t in (first, again[1], others, later)}
    leases = [group.lease for group in store.alive.values()]
    assert [lease.attempt for lease in leases if lease] == [held[t] for t in sorted(held)]
    assert write(store, again[1]) == ["accepted"] and write(store, second) == ["duplicate"]
    found = store.leases.find_unnamed_attempts(
        "h", 1, again[1].attempt, {others.attempt, again[0].attempt}
    )
    assert found == []


def test_what_was_freed_is_free_in_the_buffers_next_life(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    assert hello(store, 1, 0, k=3)
    granted = store.grant("g", 1, 9, 0.0)
    lost = store.leases.find_unnamed_attempts("g", 1, granted[-1].attempt, {granted[-1].attempt})
    assert len(lost) == len(granted) - 1 > 1
    store.free_leases(lost)
    store.flush_journal()
    again = recorded(tmp_path)
    assert state(again) == state(store) and again.leases == store.leases
    due = {t.ticket for t in again.grant("h", 1, 99, 0.0)}
    assert {ticket for ticket, _ in lost} <= due and granted[-1].ticket not in due


def test_a_message_that_names_too_many_tickets_is_refused() -> None:
    for count in (1 << 16, (1 << 16) + 1):
        one = m.LeaseRenewal("g", 1, [], {}, None, judging=[(0, 0)] * count)
        data = msgspec.msgpack.encode(one)
        if count == 1 << 16:
            assert msgspec.msgpack.decode(data, type=m.LeaseRenewal) == one
            continue
        with pytest.raises(msgspec.ValidationError, match=r"length <= 65536 - at `\$\.judging`"):
            msgspec.msgpack.decode(data, type=m.LeaseRenewal)


class Life:
    """A life of the buffer, its socket played by hand."""

    def __init__(self, run_dir: Path) -> None:
        config = load.load(ROOT / "configs" / "demo.toml", [*SMALL, "durability.mode='process'"])
        rundir.ensure("", run_dir)
        self.service = BufferService(config, run_dir)
        self.sent: list[Any] = []
        self.service.socket.send = lambda peer, message: self.sent.append(message)

    def hear(self, *messages: Any) -> list[Any]:
        """What is answered to these."""
        self.sent.clear()
        for message in messages:
            self.service.handle(b"g", message)
        self.service.answer()
        self.service.flush()
        return list(self.sent)


def renewal(taken: int, *held: m.Ticket, **more: Any) -> m.LeaseRenewal:
    progress = [(ticket.ticket, ticket.attempt, 0) for ticket in held]
    return m.LeaseRenewal("generator-0", 7, progress, {}, None, taken=taken, **more)


def tickets(sent: list[Any]) -> list[m.Ticket]:
    return [ticket for said in sent if isinstance(said, m.TicketGrant) for ticket in said.tickets]


def test_a_ticket_whose_grant_dies_with_the_buffer_goes_out_again_at_once(tmp_path: Path) -> None:
    """Killed after the grant was written, before its reply was heard: the next life learns from two
    renewals that nobody has the ticket; no clock is looked at."""
    life = Life(tmp_path / "run")
    hi = greeting(life.service)
    ask = m.TicketRequest("generator-0", 7, 1, 8, None)
    lost = tickets(life.hear(honest_hello(life.service.run), hi, ask))
    assert [ticket.kind for ticket in lost] == ["eval", "train", "train"]
    life.service.close()
    life = Life(tmp_path / "run")
    assert not tickets(life.hear(honest_hello(life.service.run), hi, ask)), "the leases stand"
    *_, heard = life.hear(renewal(0))
    assert isinstance(heard, m.HeartbeatReply) and heard.attempts == 3
    again = tickets(life.hear(renewal(heard.attempts)))
    assert [(t.ticket, t.samples) for t in again] == [(t.ticket, t.samples) for t in lost]
    assert [t.attempt for t in again] == [4, 5, 6]
    # the new reply may be on its way, then they are held, then they wait to be acknowledged
    names = [(t.ticket, t.attempt) for t in again]
    for said in (
        renewal(heard.attempts),
        renewal(6, *again),
        renewal(6, again[0], judging=names[1:]),
        renewal(6, judging=names[:1], written=names[1:]),
    ):
        assert not tickets(life.hear(ask, said)) and life.service.store.attempts == 6
    life.service.close()
    rundir.clean(tmp_path / "run")
