"""The buffer's loop over its real socket, with a generator and a learner played by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from asyncrl import config_load, rundir
from asyncrl import messages as m
from asyncrl.errors import ProtocolError
from asyncrl.versions import Label
from asyncrl.wires import PeerSocket
from buffer.service import Service

SMALL = ("learner.steps=2", "learner.groups=1", "learner.group_size=2", "staleness.max_lag=0", "evaluation.every=0", "evaluation.final_prompts=1",
         "evaluation.ood_prompts=0", "wires.lease_s=30")  # fmt: skip


class Run:
    """A service in a thread, and what ended it."""

    def __init__(self, tmp_path: Path, *sets: str) -> None:
        self.config = config_load.load(ROOT / "configs" / "demo.toml", [*SMALL, *sets])
        self.dir = tmp_path / "run"
        rundir.ensure(self.config, "", self.dir)
        self.id, self.error, self.peers = rundir.run_id(self.dir), None, []  # type: ignore[var-annotated]
        self.service = Service(self.config, self.dir)
        self.thread = threading.Thread(target=self._loop)
        self.thread.start()

    def _loop(self) -> None:
        try:
            self.service.loop()
        except Exception as e:
            self.error = e

    def peer(self) -> PeerSocket:
        self.peers.append(PeerSocket(rundir.buffer_address(self.config, self.dir)))
        return self.peers[-1]

    def end(self) -> None:
        if self.service.stop:
            return
        self.service.stop = True
        self.thread.join(20)
        self.service.close()
        for p in self.peers:
            p.close()
        rundir.clean(self.dir)

    def hello(self, epoch: int, number: int = 0, origin: int = 0, run: str = "", protocol: int = m.PROTOCOL) -> m.LearnerHello:
        source = m.WeightsSource(epoch, "here", "", "")
        return m.LearnerHello(protocol, run or self.id, epoch, Label(epoch, number), None, f"d{number}", 0, origin, 0, source, [])


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(*sets: str) -> Run:
        runs.append(Run(tmp_path, *sets))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def ask(peer: PeerSocket, message: m.FromPeer, kind: type[Any]) -> Any:
    """Send, and wait for the next reply of a kind."""
    peer.send(message)
    return wait(peer, kind)


def wait(peer: PeerSocket, kind: type[Any]) -> Any:
    while (reply := peer.recv(20)) is not None:
        if isinstance(reply, kind):
            return reply
    raise AssertionError(f"no {kind.__name__} came")


def want(n: int, samples: int = 4) -> m.Want:
    return m.Want("generator-0", 1, n, samples, None)


def answers(t: m.Ticket, digest: str = "") -> m.Deliver:
    label = t.exact_version or t.min_version
    return m.Deliver("generator-0", 1, 1, [
        m.Trajectory(t.ticket, s, t.attempt, b"", b"\0" * 8, b"\0" * 8, b"\1\1", [m.Span(label, digest, 0, 2, label)], float(s), {}, "stop", 1.0)
        for s in t.samples
    ])  # fmt: skip


def test_a_run_from_hello_to_its_end(begin: Any) -> None:
    run = begin()
    generator, learner = run.peer(), run.peer()
    generator.send(want(1))
    assert ask(learner, run.hello(1), m.Welcome) == m.Welcome(1, 0)
    evaluated, number = 0, 0
    while number < 2:
        reply = wait(generator, m.Tickets)  # the first answers the want that came before the learner
        assert reply.announcement.label == (1, number)
        for t in reply.tickets:
            acks = ask(generator, answers(t), m.Acks)
            evaluated += t.kind == "eval"
            assert {a[3] for a in acks.acks} == ({"evaluated"} if t.kind == "eval" else {"accepted"})
            if t.kind == "train":
                batch = ask(learner, m.Ask(1, number), m.Batch)
                assert [(s.ticket, s.sample) for s in batch.samples] == [(number, 0), (number, 1)] and batch.lags == [0, 0]
                number += 1
                assert ask(learner, m.Commit(1, number - 1, Label(1, number), f"d{number}", {"reward/mean": 0.5}), m.Committed).number == number - 1
        generator.send(want(2 + number))
    learner.send(m.Goodbye(1, 2))
    (t,) = wait(generator, m.Tickets).tickets
    assert t.kind == "eval" and t.exact_version == (1, 2)  # the last evaluation comes before the goodbye's answer
    ask(generator, answers(t), m.Acks)
    assert wait(learner, m.Finished) == m.Finished(1)
    generator.send(want(9))
    while not wait(generator, m.Tickets).finished:
        pass
    run.thread.join(20)
    summary = run.service.summary()
    assert (summary["steps"], summary["trajectories"], summary["tokens"], summary["finished"]) == (2, 4, 8, True)
    assert summary["lag"] == {"mean": 0.0, "p95": 0, "max": 0} and summary["heldout_end"] == 0.0 and evaluated == 1


def test_strangers_and_old_learners_are_told_so(begin: Any) -> None:
    run = begin()
    peer = run.peer()
    assert run.id in ask(peer, run.hello(1, run="another"), m.Refused).reason
    assert "protocol" in ask(peer, run.hello(1, protocol=99), m.Refused).reason
    assert ask(peer, run.hello(2), m.Welcome).epoch == 2
    old = run.peer()
    assert ask(old, run.hello(1), m.FencedOff) == m.FencedOff(1, 2)
    assert ask(old, m.Ask(1, 0), m.FencedOff) == ask(old, m.Commit(1, 0, Label(1, 1), "x", {}), m.FencedOff) == m.FencedOff(1, 2)


def test_other_weights_stop_the_run_and_both_names_are_told(begin: Any) -> None:
    run = begin("evaluation.final_prompts=1")
    generator, learner = run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    t = ask(generator, want(1), m.Tickets).tickets[0]
    generator.send(answers(t, digest="stale"))
    run.thread.join(20)
    assert isinstance(run.error, ProtocolError) and run.error.exit_code == 1
    assert "digest stale" in str(run.error) and "d0" in str(run.error)


def test_status_says_who_waits_for_whom(begin: Any) -> None:
    run = begin("evaluation.final_prompts=1")
    generator, learner, viewer = run.peer(), run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    while not any(t.kind == "train" for t in ask(generator, want(1), m.Tickets).tickets):
        pass
    learner.send(m.Ask(1, 0))
    while not (status := ask(viewer, m.Watch(), m.Status)).waits:
        pass
    assert status.waits[0][:3] == ("learner", "ticket 0: 2 samples at generator-0", "generator-0")


def test_under_disk_no_reply_leaves_before_the_disk_has_it(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real, held = threading.Event(), os.fdatasync, threading.Event()
    run = begin("durability.mode='disk'")

    def slow(fd: int) -> None:
        held.set()
        assert go.wait(20)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    learner = run.peer()
    learner.send(run.hello(1))
    assert held.wait(20) and run.service.store.epoch == 1  # the hello is taken, and on its way to the disk
    assert run.service.store.journal.durable < run.service.store.journal.appended and run.service.outgoing
    go.set()
    assert wait(learner, m.Welcome) == m.Welcome(1, 0)


def test_what_a_dead_generator_had_asked_for_is_granted_to_nobody(begin: Any) -> None:
    """Killed while it waited for tickets: its next life says hello, and gets them; nothing is out under the old session until a lease ends."""
    run = begin()
    dead, reborn, learner = run.peer(), run.peer(), run.peer()
    dead.send(want(1))
    ask(dead, m.Watch(), m.Status)  # the want has been read
    reborn.send(m.GeneratorHello(m.PROTOCOL, run.id, "generator-0", 2, 4, "here", 1))
    ask(reborn, m.Watch(), m.Status)
    ask(learner, run.hello(1), m.Welcome)  # from here on there are tickets to grant
    got = ask(reborn, m.Want("generator-0", 2, 1, 4, None), m.Tickets)
    assert got.session == 2 and {t.kind for t in got.tickets} == {"train", "eval"}
    assert dead.recv(0.1) is None


def first_ticket(run: Run, generator: PeerSocket, session: int = 1) -> m.Ticket:
    """The first training ticket; what of evaluation comes with it is answered."""
    number = 0
    while True:
        number += 1
        for t in ask(generator, m.Want("generator-0", session, number, 4, None), m.Tickets).tickets:
            if t.kind == "train":
                return t  # type: ignore[no-any-return]
            ask(generator, answers(t), m.Acks)


@pytest.mark.parametrize("mode", ["memory", "process"])
def test_a_generator_that_leaves_gives_its_leases_back_at_once(begin: Any, mode: str) -> None:
    """`wires.lease_s` is ten minutes: nothing of this comes by time."""
    run = begin("wires.lease_s=600", f"durability.mode={mode!r}")
    leaver, other, learner = run.peer(), run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    leaver.send(m.GeneratorHello(m.PROTOCOL, run.id, "generator-0", 1, 4, "here", 1))
    held = first_ticket(run, leaver)
    assert ask(leaver, m.Renew("generator-0", 1, [(held.ticket, held.attempt, 5)], {}, ""), m.Heard).epoch == 1
    leaver.send(m.Leaving("generator-0", 1))
    ask(leaver, m.Watch(), m.Status)  # the buffer has read it
    again = ask(other, m.Want("generator-1", 1, 1, 4, None), m.Tickets).tickets[0]
    assert (again.ticket, again.samples) == (held.ticket, held.samples) and again.attempt > held.attempt
    status = ask(other, m.Watch(), m.Status)
    assert "generator-0" not in status.peers and status.ledger["lost_with_process"]["tokens"] == 5


def test_the_last_word_of_a_session_that_was_replaced_takes_nothing_from_the_new_one(begin: Any) -> None:
    run = begin("wires.lease_s=600")
    older, newer, other, learner = run.peer(), run.peer(), run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    newer.send(m.GeneratorHello(m.PROTOCOL, run.id, "generator-0", 2, 4, "here", 1))
    first_ticket(run, newer, session=2)
    older.send(m.Leaving("generator-0", 1))
    assert "generator-0" in ask(older, m.Watch(), m.Status).peers
    other.send(m.Want("generator-1", 1, 1, 4, None))
    ask(other, m.Watch(), m.Status)
    assert run.service.store.alive[0].lease.producer == "generator-0"


def test_after_a_restart_weights_are_announced_once_their_learner_is_heard(begin: Any) -> None:
    """The journal names the ring of a learner that may be dead; who followed it would wait for files that are gone."""
    run = begin("durability.mode='process'")
    ask(run.peer(), run.hello(1), m.Welcome)
    run.end()
    run = begin("durability.mode='process'")
    generator, learner = run.peer(), run.peer()
    got = ask(generator, want(1), m.Tickets)
    assert got.announcement is None and run.service.store.policy == (1, 0)
    generator.send(want(2))
    ask(generator, m.Watch(), m.Status)
    ask(learner, m.Progress("learner", "", {}, 1, 1), m.Heard)  # the same life goes on: only the buffer was away
    assert wait(generator, m.Tickets).announcement.label == (1, 0)
