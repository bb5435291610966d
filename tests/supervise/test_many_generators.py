"""A thousand generators that wait cost a trajectory no more than ten: counts of work, no times."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_messages_kit import honest_hello
from lib import crowd_of_peers
from lib.crowd_of_peers import GROUPS, SIZE, Crowd
from msgspec.structs import replace
from process_kit import ROOT, load_program
from service_kit import SMALL, CountedDict, answers, greet
from store_kit import hello, make, train, write

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from buffer.groups import Group
from buffer.service import BufferService
from buffer.sessions import NAMES
from buffer.store import SESSIONS, Store

BATCH = GROUPS * SIZE


class Counted(Store):
    looked = 0

    def iterate_uncomposed_groups(self) -> Iterator[Group]:
        for group in super().iterate_uncomposed_groups():
            self.looked += 1
            yield group


def test_grants_that_find_nothing_look_at_no_group() -> None:
    source = make(3, 8, 2)
    store = Counted(source.settings, source.prompt)
    assert hello(store, 1, 0, k=3)
    (tickets,) = [store.grant("g", 1, 999, 0.0)]
    assert len(tickets) == 32 and not store.grant("g", 1, 9, 0.0)
    before = store.looked
    for _ in range(1000):
        assert not store.grant("g", 1, 9, 0.0)
    assert store.looked == before
    # what is due again is found all the same: by a lost lease, by a failure, after a roll-back
    store.expire(1e9)
    assert [t.ticket for t in store.grant("h", 1, 999, 0.0)] == list(range(32))
    write(store, store_ticket(store, 0), failed="data: no")
    assert [t.ticket for t in store.grant("h", 1, 999, 0.0)] == [0]
    for ticket in range(8):
        write(store, store_ticket(store, ticket))
    train(store, 0)
    assert [t.ticket for t in store.grant("h", 1, 999, 0.0)] == list(range(32, 40))
    assert hello(store, 2, 0, origin=1, k=3)
    assert [t.ticket for t in store.grant("h", 2, 999, 0.0)] == list(range(8, 32))


def store_ticket(store: Store, ticket: int) -> m.Ticket:
    group = store.alive[ticket]
    assert group.lease is not None
    lease, prompt, sampling = group.lease, store.prompt(ticket), store.settings.sampling
    todo = sorted(lease.todo)
    return m.Ticket(ticket, lease.attempt, "train", prompt, todo, sampling, lease.granted, None, 0)


def test_sessions_that_may_hold_a_name_are_all_counted_by_themselves() -> None:
    """One that is forgotten and tells again would be counted twice."""
    store = make()
    for _ in range(2):
        for number in range(NAMES):
            store.report_tokens(f"generator-{number}", 1, 5)
    assert store.count_generated_tokens() == 5 * NAMES and SESSIONS > NAMES


@pytest.mark.parametrize(
    ("slots", "groups"),
    [
        ([1 << 30], [8]),  # alone: all that it requests
        ([16, 16], [4, 4]),
        ([1 << 30, 1 << 30], [4, 4]),
        ([24, 8], [6, 2]),  # in proportion to their free slots
        ([6, 8], [3, 4]),  # there is enough for both
        ([16, 16, 16], [3, 3, 2]),  # shares are rounded up
    ],
)
def test_a_batch_is_divided_among_the_generators_that_wait(
    tmp_path: Path, slots: list[int], groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for the only batch that the limit admits.  The last one is for evaluations only: its
    free slots do not count, and it gets more tickets than a share of a batch."""
    many = len(slots) + 1
    sets = [*SMALL, "learner.groups=8", f"generators={many}", "evaluation.generators=1"]
    sets.append("evaluation.final_prompts=64")
    config = load.load(ROOT / "configs" / "demo.toml", sets)
    rundir.ensure("", tmp_path / "run")
    made = BufferService(config, tmp_path / "run")
    sent: dict[bytes, m.TicketGrant] = {}

    def send(peer: bytes, message: Any) -> None:
        if isinstance(message, m.TicketGrant) and message.tickets:
            assert peer not in sent
            sent[peer] = message

    made.send = send  # type: ignore[method-assign]
    for number, samples in enumerate([*slots, 64]):
        name = f"generator-{number}"
        made.handle(name.encode(), greet(made.run, name, 1))
        made.handle(name.encode(), m.TicketRequest(name, 1, 1, samples, None))
    made.handle(b"l", honest_hello(made.run))
    made.store.max_lag = 0
    free: list[float] = []
    monkeypatch.setattr(made.meter, "on_free", lambda slots, *_: free.append(slots))
    made.answer()
    assert free == [0], "no generator waits any more"
    evaluations = sent.pop(f"generator-{many - 1}".encode())
    assert [ticket.kind for ticket in evaluations.tickets] == ["eval"] * 64
    assert [len(grant.tickets) for grant in sent.values()] == groups
    assert list(sent) == [f"generator-{number}".encode() for number in range(many - 1)]
    assert {ticket.kind for grant in sent.values() for ticket in grant.tickets} == {"train"}
    assert made.close() == ""
    rundir.clean(tmp_path / "run")


@pytest.mark.parametrize(
    ("cores", "host", "groups"),
    [
        (2, "here", [8, 8]),  # three threads: what divided batches cost, the learner would lose
        (3, "here", [4, 4]),
        (2, "elsewhere", [4, 4]),  # the learner has its machine to itself
    ],
)
def test_batches_are_divided_where_that_takes_no_core_from_the_learner(
    tmp_path: Path, cores: int, host: str, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    sets = [*SMALL, "learner.groups=8", "generators=2"]
    config = load.load(ROOT / "configs" / "demo.toml", sets)
    rundir.ensure("", tmp_path / "run")
    made = BufferService(config, tmp_path / "run")
    sent: list[m.TicketGrant] = []
    made.send = lambda _, message: sent.append(message)  # type: ignore[method-assign]
    for number in range(2):
        name = f"generator-{number}"
        made.handle(name.encode(), replace(greet(made.run, name, 1), host=host))
        made.handle(name.encode(), m.TicketRequest(name, 1, 1, 16, None))
    made.handle(b"l", honest_hello(made.run))
    made.store.max_lag = 1
    made.answer()
    grants = [message.tickets for message in sent if isinstance(message, m.TicketGrant)]
    assert [sum(ticket.kind == "train" for ticket in grant) for grant in grants] == groups
    assert made.close() == ""
    rundir.clean(tmp_path / "run")


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Any]:
    config = load.load(ROOT / "configs" / "demo.toml", [*SMALL, "learner.steps=9"])
    rundir.ensure("", tmp_path / "run")
    made = BufferService(config, tmp_path / "run")
    sent: list[tuple[bytes, Any]] = []
    made.send = lambda peer, message: sent.append((peer, message))  # type: ignore[method-assign]

    def wait(many: int) -> tuple[BufferService, list[tuple[bytes, Any]]]:
        made.handle(b"l", honest_hello(made.run))
        made.store.max_lag = 0
        for number in range(many):
            name = f"generator-{number}"
            made.handle(name.encode(), greet(made.run, name, 1))
            made.handle(name.encode(), m.TicketRequest(name, 1, 1, 4, Label(1, 0)))
        return made, sent

    yield wait
    assert made.close() == ""
    rundir.clean(tmp_path / "run")


def test_one_question_to_the_store_serves_all_that_wait(waiting: Any) -> None:
    made, sent = waiting(500)
    calls = []
    grant = made.store.grant

    def counted(*args: Any) -> list[m.Ticket]:
        calls.append(args[0])
        return grant(*args)

    made.store.grant = counted
    made.answer()
    first = [(peer, x) for peer, x in sent if isinstance(x, m.TicketGrant)]
    # who asked first: shares of a sample are an evaluation and a group, and nothing is left
    assert [peer for peer, _ in first] == [b"generator-0", b"generator-1"]
    assert [[t.kind for t in given.tickets] for _, given in first] == [["eval"], ["train"]]
    assert calls == ["generator-0", "generator-1", "generator-2"]
    for _ in range(50):
        made.answer()
    assert len(calls) == 53
    # a new version: its room goes to the next in line, some more are told, none of them twice
    sent.clear()
    for ticket in (ticket for _, given in first for ticket in given.tickets):
        made.handle(b"generator-0", answers(ticket))
    made.handle(b"l", m.BatchRequest(1, 0))
    made.answer()
    made.handle(b"l", m.Commit(1, 0, Label(1, 1), "d1", {}))
    for _ in range(5):
        made.answer()
    told = [(peer, x) for peer, x in sent if isinstance(x, m.TicketGrant)]
    assert told[0][0] == b"generator-2" and told[0][1].tickets
    assert [peer for peer, _ in told[1:]] == [f"generator-{n}".encode() for n in range(3, 3 + 64)]
    assert not any(x.tickets for _, x in told[1:])
    assert all(x.announcement.label == (1, 1) for _, x in told)
    # who asks later with older weights is told at once, once
    sent.clear()
    made.handle(b"generator-499", m.TicketRequest("generator-499", 1, 2, 4, Label(1, 0)))
    made.answer()
    made.answer()
    assert [peer for peer, x in sent if isinstance(x, m.TicketGrant)] == [b"generator-499"]


def test_a_message_looks_only_at_the_first_generator_that_waits(waiting: Any) -> None:
    made, _ = waiting(500)
    made.answer()
    queue = made.ticket_requests
    queue.waiting = CountedDict(queue.waiting)
    made.generators = CountedDict(made.generators)
    for _ in range(50):
        made.answer()
    assert queue.waiting.looked == 50 and made.generators.looked == 0


def test_the_threads_on_the_learners_machine_follow_who_is_there(waiting: Any) -> None:
    made, _ = waiting(0)
    counts = [made.count_local_threads()]
    for number, host in enumerate(("here", "here", "elsewhere", "here")):
        name = f"generator-{number}"
        made.handle(b"g", m.TicketRequest(name, 1, 1, 4, None))  # before its hello
        assert made.count_local_threads() == counts[-1]
        made.handle(b"g", replace(greet(made.run, name, 1), host=host))
        counts.append(made.count_local_threads())
    assert counts == [1, 2, 3, 3, 4]
    made.handle(b"g", m.GeneratorGoodbye("generator-0", 1))
    assert made.count_local_threads() == 3
    source = m.WeightsSource(2, "elsewhere", "", "")
    made.handle(b"l", replace(honest_hello(made.run), epoch=2, label=Label(2, 0), source=source))
    assert made.count_local_threads() == 2
    made.remove_generator("generator-2")
    assert made.count_local_threads() == 1


def test_who_wants_no_sample_is_told_of_versions_and_end_alone(waiting: Any) -> None:
    made, sent = waiting(0)
    for name in ("drawing", "writing"):
        made.handle(name.encode(), greet(made.run, name, 1))
        made.handle(name.encode(), m.TicketRequest(name, 1, 1, 0 if name == "drawing" else 4, None))
    made.answer()
    made.answer()
    granted = {peer: x for peer, x in sent if isinstance(x, m.TicketGrant) and x.tickets}
    assert list(granted) == [b"writing"]
    told = [x for peer, x in sent if isinstance(x, m.TicketGrant) and peer == b"drawing"]
    assert [(x.tickets, x.finished) for x in told] == [([], False)]
    assert told[0].announcement.label == (1, 0)
    sent.clear()
    made.store.finish()
    made.answer()
    assert [x.finished for peer, x in sent if peer == b"drawing"] == [True]
    assert "drawing" not in made.generators
    made.handle(b"drawing", m.TicketRequest("drawing", 1, 2, -1, None))
    assert made.store  # a number below nothing is refused, as any broken message


def test_only_generators_that_told_something_are_counted_at_a_commit(waiting: Any) -> None:
    made, _ = waiting(20)
    made.clock.start(0.5)
    stats = {"generator/tokens": 100.0, "generator/busy_s": 3.0, "generator/idle_s": 1.0}
    made.handle(b"generator-3", m.LeaseRenewal("generator-3", 1, [], stats, None))
    made.handle(b"generator-4", m.LeaseRenewal("generator-4", 1, [], stats, None))
    assert made.compute_generator_metrics(1.0)["time/generator_idle_share"] == 0.25
    assert made.compute_generator_metrics(2.0) == {}


@pytest.fixture(scope="module")
def bench() -> Any:
    return load_program(ROOT / "benchmarks" / "scale.py")


@pytest.mark.parametrize("pace", [0.0, 1000.0])
def test_a_crowd_over_real_sockets_trains_every_answer(
    pace: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = 4 if pace else 0
    # a limit of 0: one batch is all there is room for, and of 40 generators some must wait
    crowd = Crowd(tmp_path, "process", lag, 40, pace)
    monkeypatch.setattr(crowd, "retry_s", 0.0)  # questions come again with each renewal
    monkeypatch.setattr(crowd_of_peers, "RENEW_S", 0.05)
    try:
        first = crowd.batches(2)
        second = crowd.batches(3)
        assert crowd.memory() > 1e6
    finally:
        crowd.end()
    assert crowd.process.poll() is not None
    assert crowd.peers.trajectories == 5 * BATCH == crowd.peers.number * BATCH
    assert sum(crowd.peers.written.values()) >= 5 * GROUPS  # beside them the evaluation's
    # who asks again before others have come takes their turn: on a quick machine not all have one
    assert 10 < len(crowd.peers.written) <= 40
    assert max(crowd.peers.sequence.values()) > max(crowd.peers.written.values()) + 1
    for each in (first, second):
        assert each.per_s > 0 and each.cpu_us > 0
        assert each.ticket_ms == sorted(each.ticket_ms) and each.ticket_ms[0] > 0


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_the_service_alone(bench: Any, mode: str, tmp_path: Path) -> None:
    loop = bench.Loop(tmp_path, mode, 120)
    assert loop.batches(4) > 0 and loop.renewals(130) > 0 and loop.peers.trajectories == 4 * BATCH
    assert not loop.heard and loop.batches(2) > 0 and loop.peers.trajectories == 6 * BATCH
    loop.end()


def test_a_crowd_delivers_as_many_tokens_as_it_is_told(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, "process", 0, 2, 0.0, 24)
    try:
        crowd.batches(2)
        rows = (crowd.dir / "trained.jsonl").read_text().splitlines()
    finally:
        crowd.end()
    tokens = [sum(row["lags"].values()) for row in map(json.loads, rows) if "lags" in row]
    assert tokens and set(tokens) == {24 * BATCH}
