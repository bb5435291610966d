"""The buffer's loop over its real socket, with a generator and a learner played by hand."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from journal_kit import state
from process_kit import until
from service_kit import Run, answers, ask, greet, join, wait, want

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.sampled_support import SampledSupport
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BlockingSession, OpenSession, ProcessWait
from asyncrl.records import rundir
from asyncrl.tasks import get_task
from asyncrl.transport import sockets
from asyncrl.transport.sockets import PeerSocket
from buffer import service as module
from buffer import sessions, training_log
from buffer.service import compute_max_message_bytes, open_store
from buffer.sessions import PeerState


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # the players here may stand still for long
    monkeypatch.setattr(module, "LINGER_S", 600.0)
    monkeypatch.setattr(module, "SESSIONS_S", 600.0)
    runs: list[Run] = []

    def make(*sets: str) -> Run:
        runs.append(Run(tmp_path, *sets))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def test_a_run_from_hello_to_its_end(begin: Any) -> None:
    run = begin()
    generator, learner = run.peer(), run.peer()
    generator.send(want(1))
    assert ask(learner, m.JoinRequest("generator-7"), m.JoinReply).weights == ""
    assert ask(learner, run.hello(1), m.Welcome) == m.Welcome(1, 0)
    for name, given in (("", 1000), ("generator-7", 7), ("", 1001)):
        joined = ask(learner, m.JoinRequest(name), m.JoinReply)
        reply = m.JoinReply(
            run.id, f"generator-{given}", load.dump(run.service.config), "tcp://here:1"
        )
        assert joined == reply
    evaluated, number = 0, 0
    while number < 2:
        # the first answers the want that came before the learner
        reply = wait(generator, m.TicketGrant)
        assert reply.announcement.label == (1, number)
        for t in reply.tickets:
            acks = ask(generator, answers(t), m.DeliveryAcks)
            evaluated += t.kind == "eval"
            assert {a[3] for a in acks.acks} == (
                {"evaluated"} if t.kind == "eval" else {"accepted"}
            )
            if t.kind == "train":
                batch = ask(learner, m.BatchRequest(1, number), m.Batch)
                assert [(s.ticket, s.sample) for s in batch.samples] == [(number, 0), (number, 1)]
                assert (batch.lags, batch.limit, batch.window) == ([0, 0], 0, 0.0)
                number += 1
                name = ("mismatch/k3_at_lag_0", "mismatch/k3_one_version")[number - 1]
                metrics = {"reward/mean": 0.5, name: number / 4}
                commit = m.Commit(1, number - 1, Label(1, number), f"d{number}", metrics)
                assert ask(learner, commit, m.CommitReply).number == number - 1
                assert run.service.make_summary()["mismatch_k3_max"] == number / 4
        generator.send(want(2 + number))
    learner.send(m.LearnerGoodbye(1, 2))
    (t,) = wait(generator, m.TicketGrant).tickets
    # the last evaluation comes before the goodbye's answer
    assert t.kind == "eval" and t.exact_version == (1, 2)
    ask(generator, answers(t), m.DeliveryAcks)
    assert wait(learner, m.RunFinished) == m.RunFinished(1)
    for _ in range(2):  # and is given once
        came, status = until_status(learner)
        assert not came and status.finished
    generator.send(want(9))
    while not wait(generator, m.TicketGrant).finished:
        pass
    run.thread.join(600)
    summary = run.service.make_summary()
    line = {"tokens": 0, "samples": 0, "mean_length": 0.0, "mean_reward": 0.0}
    lines = dict.fromkeys(run.service.store.sum_ledger(), line)
    line = {"tokens": 8, "samples": 4, "mean_length": 2.0, "mean_reward": 0.5, "upto_2": 8}
    assert summary.pop("wall_s") > 0
    assert summary == {
        "steps": 2,
        "trajectories": 4,
        "tokens": 8,
        **dict.fromkeys(("heldout_start", "heldout_end"), 0.0),
        **dict.fromkeys(("ood_start", "ood_end")),
        "lag": {"mean": 0.0, "p95": 0, "max": 0},
        "ledger": dict.fromkeys(("generated", *lines), 0) | {"trained": 8},
        "ledger_lines": lines | {"trained": line},
        "ledger_by_task": {},
        "trained_ids": "9395f92776edcea6",
        "failures": {},
        "lag_histogram": {"0": 8},
        "mismatch_k3_max": 0.5,
        "refused": {},
        "finished": True,
        "error": "",
    }
    assert evaluated == 1
    rows = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "eval/heldout" in row] == [0, 2]


def training_tickets(generator: PeerSocket, count: int) -> list[m.Ticket]:
    """The tickets of the first groups; evaluations before them are answered."""
    found: list[m.Ticket] = []
    while len(found) < count:
        for t in ask(generator, want(1 + len(found)), m.TicketGrant).tickets:
            if t.kind == "train":
                found.append(t)
            else:
                ask(generator, answers(t), m.DeliveryAcks)
    return found


def until_status(peer: PeerSocket) -> tuple[list[Any], m.RunStatus]:
    """What else comes before the answer to a Watch, and that."""
    peer.send(m.StatusRequest())
    came: list[Any] = []
    while not isinstance(reply := peer.recv(600), m.RunStatus):
        came.append(reply)
    return came, reply


def test_a_commit_that_is_told_again_is_answered_again_and_counted_once(begin: Any) -> None:
    """A lost answer holds up no learner; one that runs ahead is not answered."""
    run = begin("learner.steps=3")
    generator, learner = join(run)
    number, wants = 0, itertools.count(1)
    while number < 2:
        for t in ask(generator, want(next(wants)), m.TicketGrant).tickets:
            ask(generator, answers(t), m.DeliveryAcks)
            if t.kind == "train":
                ask(learner, m.BatchRequest(1, number), m.Batch)
                commits = [
                    m.Commit(1, n, Label(1, n + 1), f"d{n + 1}", {"time/step": 1.0 + n})
                    for n in range(number + 1)
                ]
                for commit in (commits[-1], commits[-1], *commits):
                    learner.send(commit)
                came, status = until_status(learner)
                number += 1
                told = [c.number for c in came if isinstance(c, m.CommitReply)]
                assert told == [number - 1] * 2 + list(range(number))
                assert status.committed == number and status.progress >= number
                assert status.metrics["time/step"] == number
    rows = (run.dir / "metrics.jsonl").read_text().splitlines()
    assert sum('"time/step"' in row for row in rows) == 2, "one row a batch"


@pytest.mark.parametrize(
    ("mode", "todo"),
    [("memory", r"continue with `asyncrl run --resume .*run`"), ("process", "start a new run")],
)
def test_damaged_newer_checkpoints_are_said_with_remedy(begin: Any, mode: str, todo: str) -> None:
    run = begin(f"durability.mode={mode!r}")
    ask(run.peer(), run.hello(1, number=5), m.Welcome)
    assert ask(run.peer(), run.hello(3, number=4, origin=1), m.Refusal).exit_code == 5
    said = ask(run.peer(), run.hello(2, number=3, origin=1), m.Refusal).reason
    assert re.search(r"version 3, .* no groups before version 5: .*" + todo, said)
    assert ask(run.peer(), run.hello(1, number=3), m.Welcome).epoch == 1  # itself, once more
    assert ask(run.peer(), run.hello(4, number=5, origin=1), m.Welcome).epoch == 4


def test_a_learner_that_has_steps_to_make_takes_an_end_back(begin: Any) -> None:
    run = begin("learner.steps=5")
    service = run.service
    ask(run.peer(), run.hello(1, number=3), m.Welcome)
    service.ended_before = True  # nobody is waited for
    service.ended_at = time.monotonic()
    service.store.finished = True
    assert ask(run.peer(), run.hello(2, number=3, origin=1), m.Welcome).epoch == 2
    assert not service.store.finished and service.ended_at == 0.0 and not service.ended_before
    assert not service.make_status().finished


def test_strangers_and_old_learners_are_told_so(begin: Any) -> None:
    run = begin()
    peer = run.peer()
    assert run.id in ask(peer, run.hello(1, run="another"), m.Refusal).reason
    assert "protocol" in ask(peer, run.hello(1, protocol=99), m.Refusal).reason
    assert run.id in ask(peer, greet("another", "generator-0", 1), m.Refusal).reason
    assert ask(peer, run.hello(2), m.Welcome).epoch == 2
    old = run.peer()
    assert ask(old, run.hello(1), m.FencedReply) == m.FencedReply(1, 2)
    assert (
        ask(old, m.BatchRequest(1, 0), m.FencedReply)
        == ask(old, m.Commit(1, 0, Label(1, 1), "x", {}), m.FencedReply)
        == m.FencedReply(1, 2)
    )


def test_status_says_who_waits_for_whom(begin: Any) -> None:
    run = begin("evaluation.final_prompts=1")
    generator, learner, viewer = join(run, 3)
    while not any(t.kind == "train" for t in ask(generator, want(1), m.TicketGrant).tickets):
        pass
    learner.send(m.BatchRequest(1, 0))
    while not (status := ask(viewer, m.StatusRequest(), m.RunStatus)).waits:
        pass
    assert status.waits[0][:3] == ("learner", "ticket 0: 2 samples at generator-0", "generator-0")
    assert set(status.peers) == {"learner", "generator-0"} and min(status.peers.values()) >= 0
    assert (status.run, status.committed, status.steps, status.epoch) == (run.id, 0, 2, 1)
    assert (status.finished, status.error, status.held_up) == (False, "", None)


def test_the_session_that_a_learner_waits_for_is_named(begin: Any) -> None:
    """Of the batch's oldest ticket, while the learner has nothing to do; with the limit that would
    not wait, by the steps that were made."""
    run = begin("evaluation.final_prompts=1", "learner.steps=3")
    gateway, learner, viewer = join(run, 3)

    def told(t: m.Ticket, **stats: float) -> None:
        one = OpenSession(t.ticket, 1, "0.1.1", "prompt 5 'ab='", 6, "agent", "x", 21.0, 30.0)
        other = msgspec.structs.replace(one, ticket=t.ticket + 1, name="1.0.2")
        named = {key.replace("session_", "session/", 1): value for key, value in stats.items()}
        renewal = m.LeaseRenewal("generator-0", 1, [], named, None, sessions=[other, one])
        ask(gateway, renewal, m.HeartbeatReply)

    def waits(what: str) -> None:
        waiting = ProcessWait("learner", what, "buffer", 3.0) if what else None
        ask(learner, m.LearnerProgress("learner", waiting, {}, 1, 1), m.HeartbeatReply)

    def held_up() -> BlockingSession | None:
        return ask(viewer, m.StatusRequest(), m.RunStatus).held_up  # type: ignore[no-any-return]

    (first,) = training_tickets(gateway, 1)
    ask(gateway, answers(first), m.DeliveryAcks)
    ask(learner, m.BatchRequest(1, 0), m.Batch)
    numbers = {"time/step": 20.0, "time/learner_idle_share": 0.5}
    ask(learner, m.Commit(1, 0, Label(1, 1), "d1", numbers), m.CommitReply)
    (second,) = training_tickets(gateway, 1)
    learner.send(m.BatchRequest(1, 1))
    told(second)
    while not ask(viewer, m.StatusRequest(), m.RunStatus).waits:
        pass
    assert held_up() is None  # it asks ahead, and has work
    waits("batch 1")
    held = held_up()
    assert held is not None
    assert (held.session.name, held.producer, held.step_s) == ("0.1.1", "generator-0", 10.0)
    assert held.max_lag == 3  # open for 30 s
    told(second, session_p95_s=41.0)
    # an announcement of the commit may come before the reply
    while (held := held_up()) is not None and not held.usual_s:
        pass
    assert held is not None and (held.usual_s, held.max_lag) == (41.0, 5)
    ask(gateway, answers(second), m.DeliveryAcks)
    wait(learner, m.Batch)
    assert held_up() is None


def test_reward_processes_in_the_metrics_and_among_the_waits(begin: Any) -> None:
    """Sums since the last step, over generators; the state now; who waits for its own rewards."""
    run = begin("learner.steps=3", "staleness.max_lag=2")
    generator, learner, viewer = join(run, 3, max_lag=2.0)
    tickets = training_tickets(generator, 3)

    def step(number: int, **stats: float) -> dict[str, float]:
        stats |= {"judge_requests": 10.0 + number, "judge_stolen": 1.0}
        named = {k.replace("_", "/", 1): v for k, v in stats.items()}
        waiting = ProcessWait("generator-0", m.REWARDS_WAITED_FOR, "generator-0-rewards", 3.5)
        renewal = m.LeaseRenewal("generator-0", 1, [], named, waiting)
        ask(generator, renewal, m.HeartbeatReply)
        ask(generator, answers(tickets[number]), m.DeliveryAcks)
        ask(learner, m.BatchRequest(1, number), m.Batch)
        label = Label(1, number + 1)
        commit = m.Commit(1, number, label, f"d{number + 1}", {"reward/mean": 0.5})
        ask(learner, commit, m.CommitReply)
        status = ask(viewer, m.StatusRequest(), m.RunStatus)
        assert waiting in status.waits
        return dict(status.metrics)

    assert "reward/queue" not in step(0, generator_busy_s=1.0, generator_idle_s=1.0), (
        "nobody has reward processes"
    )
    sums = {
        "generator_busy_s": 2.0,
        "generator_idle_s": 4.0,
        "generator_reward_idle_s": 1.0,
        "generator_swap_s": 0.5,
        "reward_judged": 10,
        "reward_waited_s": 5.0,
        "reward_called_s": 1.0,
        "reward_batches": 4,
        "reward_failed_batches": 3,
    }
    got = step(1, **sums, reward_queue=7, reward_workers=2)
    names = [f"reward/{name}" for name in ("queue", "workers", "wait_s", "call_s")]
    assert [got[name] for name in names] == [7, 2, 0.5, 0.1]
    assert got["reward/failed_batch_share"] == 0.75
    assert got["judge/requests"] == 11 and "judge/stolen" not in got
    store = run.service.store
    leases = sum(group.lease is not None for group in store.alive.values())
    assert (got["time/swap"], got["time/generators"], got["buffer/leases"]) == (0.5, 4.0, leases)
    assert (got["buffer/groups"], got["buffer/bytes"]) == (len(store.alive), store.stored_bytes)
    assert got["time/reward_wait_share"] == 0.25 and got["time/generator_idle_share"] == 0.75
    later = sums | {
        "generator_busy_s": 3.0,
        "reward_judged": 12,
        "reward_waited_s": 5.5,
        "reward_called_s": 1.5,
    }
    got = step(2, **later, reward_queue=0, reward_workers=3)
    assert [got[name] for name in names] == [0, 3, 0.25, 0.25]
    assert got["time/reward_wait_share"] == 0.0
    assert run.service.meter.rewards["generator-0"][:3] == (12, 5.5, 1.5)


def test_samples_are_progress_up_to_a_batch_of_them(begin: Any) -> None:
    """A slow step is no stand-still; a learner that never commits is, whatever is delivered."""
    run = begin("learner.steps=3", "staleness.max_lag=2")
    generator, learner, viewer = join(run, 3, max_lag=2.0)
    tickets = training_tickets(generator, 3)

    def progress() -> int:
        return int(ask(viewer, m.StatusRequest(), m.RunStatus).progress)

    def deliver(t: m.Ticket, sample: int) -> None:
        delivery = m.Delivery("generator-0", 1, 1, [answers(t).samples[sample]])
        ask(generator, delivery, m.DeliveryAcks)

    seen = [progress()]
    for t, sample in ((tickets[0], 0), (tickets[1], 0), (tickets[1], 1)):
        deliver(t, sample)
        seen.append(progress())
    assert [b - a for a, b in itertools.pairwise(seen)] == [1, 1, 0], "a batch of two"
    deliver(tickets[0], 1)
    ask(learner, m.BatchRequest(1, 0), m.Batch)
    ask(learner, m.Commit(1, 0, Label(1, 1), "d1", {"reward/mean": 0.5}), m.CommitReply)
    before = progress()
    deliver(tickets[2], 0)
    assert before == seen[-1] + 1 and progress() == before + 1


def test_under_disk_no_reply_precedes_the_disk(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real, held = threading.Event(), os.fdatasync, threading.Event()
    run = begin("durability.mode='disk'")

    def slow(fd: int) -> None:
        held.set()
        assert go.wait(600)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    learner = run.peer()
    learner.send(run.hello(1))
    # the hello is taken, and on its way to the disk
    until(lambda: held.is_set() and run.service.outgoing)
    assert run.service.store.epoch == 1
    assert run.service.store.journal.durable < run.service.store.journal.appended
    go.set()
    assert wait(learner, m.Welcome) == m.Welcome(1, 0)


def test_a_forgetful_buffer_ends_older_peers(begin: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Its tickets and samples are lost with it: one line says what to do, to all of them."""
    first = begin()
    generator, learner = first.peer(), first.peer()
    ask(learner, first.hello(1), m.Welcome)
    *_, ticket = ask(generator, want(1), m.TicketGrant).tickets
    first.end()
    second = begin()
    generator, learner, idle = second.peer(), second.peer(), second.peer()
    held = msgspec.structs.replace(want(2), producer="generator-1", holding=Label(1, 0))
    refusals = [
        ask(peer, message, m.Refusal)
        for peer, message in (
            (learner, m.BatchRequest(1, 0)),
            (learner, m.LearnerProgress("learner", None, {}, 0, 1)),
            (generator, answers(ticket)),
            (generator, m.LeaseRenewal("generator-0", 1, [(0, 1, 1)], {}, None)),
            (idle, held),
        )
    ]
    assert {refusal.exit_code for refusal in refusals} == {3}
    (reason,) = {refusal.reason for refusal in refusals}
    assert "start learner and generators again" in reason and str(second.dir) in reason
    assert capfd.readouterr().err.count(reason) == 1 and not second.service.refused
    # the next incarnations are served
    ask(learner, second.hello(2), m.Welcome)
    assert ask(generator, want(3), m.TicketGrant).tickets


def test_the_wait_for_a_ticket_has_its_cause(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin("learner.steps=3")
    generator, learner, viewer = run.peer(), run.peer(), run.peer()

    def find_cause(what: str = m.TICKET_WAITED_FOR) -> str:
        waiting = ProcessWait("generator-0", what, "buffer", 3.5)
        renewal = m.LeaseRenewal("generator-0", 1, [], {}, waiting)
        generator.send(renewal)
        while (reply := wait(generator, m.HeartbeatReply)).attempts < run.service.store.attempts:
            pass  # a reply that only announces a version
        cause: str = reply.cause
        shown = ask(viewer, m.StatusRequest(), m.RunStatus).waits[-1]
        assert (shown.who, shown.seconds) == ("generator-0", 3.5)
        assert shown.what == (f"{what}: {cause}" if cause else what)
        return cause

    assert (
        find_cause() == find_cause(m.CALL_WAITED_FOR) == "no learner has connected to this buffer"
    )
    assert not find_cause(m.REWARDS_WAITED_FOR)
    ask(learner, run.hello(1), m.Welcome)
    tickets = ask(generator, want(1), m.TicketGrant).tickets
    (ticket,) = (ticket for ticket in tickets if ticket.kind == "train")
    assert find_cause() == "the learner has not requested batch 0 yet"
    learner.send(m.BatchRequest(1, 0))
    while "requested" in ask(viewer, m.StatusRequest(), m.RunStatus).waits[-1].what:
        pass
    assert find_cause() == "the learner waits for ticket 0: 2 samples at generator-0"
    ask(generator, answers(ticket), m.DeliveryAcks)
    wait(learner, m.Batch)
    assert find_cause() == "no room before the learner has trained batch 0"
    run.service.learner = None  # as in a buffer that was started again, before the next hello
    learner.send(m.BatchRequest(1, 0))
    while "no learner" in ask(viewer, m.StatusRequest(), m.RunStatus).waits[-1].what:
        pass
    assert find_cause() == "no room before the learner has trained batch 0"
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    assert find_cause() == "the learner has been silent for 0 s; it trains batch 0"
    gone = msgspec.structs.replace(
        run.hello(2, origin=1),
        pid=ended_process(),
        source=m.WeightsSource(2, socket.gethostname(), "", ""),
    )
    ask(learner, gone, m.Welcome)
    assert find_cause() == "the learner has ended"


def ended_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_process_is_gone_once_it_has_ended_even_if_nobody_has_reaped_it() -> None:
    def gone(pid: int, host: str = socket.gethostname()) -> bool:
        return module.has_process_ended(pid, host)

    assert gone(ended_process()) and not gone(ended_process(), "another")
    assert not gone(os.getpid()) and not gone(0) and not gone(-1)
    waiting = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert not gone(waiting.pid)
    waiting.kill()
    os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert gone(waiting.pid)
    waiting.communicate()


def greeting(run: Run, session: int, pid: int, name: str = "generator-0") -> m.GeneratorHello:
    return m.GeneratorHello(m.PROTOCOL, run.id, name, session, 4, socket.gethostname(), pid)


def test_what_a_dead_generator_had_asked_for_is_granted_to_nobody(begin: Any) -> None:
    """Killed while it waited for tickets: its next life says hello, and gets them; nothing is out
    under the old session until a lease ends."""
    run = begin()
    dead, reborn, learner = run.peer(), run.peer(), run.peer()
    dead.send(greeting(run, 1, ended_process()))
    dead.send(want(1))
    ask(dead, m.StatusRequest(), m.RunStatus)  # the want has been read
    reborn.send(greeting(run, 2, os.getpid()))
    ask(reborn, m.StatusRequest(), m.RunStatus)
    ask(learner, run.hello(1), m.Welcome)  # from here on there are tickets to grant
    got = ask(reborn, m.TicketRequest("generator-0", 2, 1, 4, None), m.TicketGrant)
    assert got.session == 2 and {t.kind for t in got.tickets} == {"train", "eval"}
    assert dead.recv(0.1) is None


def first_ticket(run: Run, generator: PeerSocket, session: int = 1) -> m.Ticket:
    """The first training ticket; what of evaluation comes with it is answered."""
    number = 0
    while True:
        number += 1
        for t in ask(
            generator, m.TicketRequest("generator-0", session, number, 4, None), m.TicketGrant
        ).tickets:
            if t.kind == "train":
                return t  # type: ignore[no-any-return]
            ask(generator, answers(t), m.DeliveryAcks)


@pytest.mark.parametrize("mode", ["memory", "process"])
def test_a_generator_that_leaves_gives_its_leases_back_at_once(begin: Any, mode: str) -> None:
    run = begin(f"durability.mode={mode!r}")
    leaver, other, learner = run.peer(), run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    leaver.send(m.GeneratorHello(m.PROTOCOL, run.id, "generator-0", 1, 4, "here", 1))
    held = first_ticket(run, leaver)
    got = ask(
        leaver,
        m.LeaseRenewal("generator-0", 1, [(held.ticket, held.attempt, 5)], {}, None),
        m.HeartbeatReply,
    ).epoch
    assert got == 1
    leaver.send(m.GeneratorGoodbye("generator-0", 1))
    ask(leaver, m.StatusRequest(), m.RunStatus)  # the buffer has read it
    again = ask(other, m.TicketRequest("generator-1", 1, 1, 4, None), m.TicketGrant).tickets[0]
    assert (again.ticket, again.samples) == (held.ticket, held.samples)
    assert again.attempt > held.attempt
    status = ask(other, m.StatusRequest(), m.RunStatus)
    assert "generator-0" not in status.peers and status.ledger["lost_with_process"]["tokens"] == 5


def test_a_replaced_sessions_last_word_takes_nothing_from_the_new_one(begin: Any) -> None:
    run = begin()
    older, newer, other, learner = run.peer(), run.peer(), run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    newer.send(m.GeneratorHello(m.PROTOCOL, run.id, "generator-0", 2, 4, "here", 1))
    first_ticket(run, newer, session=2)
    older.send(m.GeneratorGoodbye("generator-0", 1))
    assert "generator-0" in ask(older, m.StatusRequest(), m.RunStatus).peers
    other.send(m.TicketRequest("generator-1", 1, 1, 4, None))
    ask(other, m.StatusRequest(), m.RunStatus)
    assert run.service.store.alive[0].lease.producer == "generator-0"


def test_after_a_restart_weights_are_announced_once_their_learner_is_heard(begin: Any) -> None:
    """The journal names the ring of a dead learner: waiting for its files is in vain."""
    run = begin("durability.mode='process'")
    ask(run.peer(), run.hello(1), m.Welcome)
    run.end()
    run = begin("durability.mode='process'")
    generator, learner = run.peer(), run.peer()
    got = ask(generator, want(1), m.TicketGrant)
    assert got.announcement is None and run.service.store.policy == (1, 0)
    renew = m.LeaseRenewal("generator-0", 1, [], {}, None)
    assert ask(generator, renew, m.HeartbeatReply).announcement is None
    generator.send(want(2))
    ask(generator, m.StatusRequest(), m.RunStatus)
    # the same life goes on: only the buffer was away
    ask(learner, m.LearnerProgress("learner", None, {}, 1, 1), m.HeartbeatReply)
    assert wait(generator, m.TicketGrant).announcement.label == (1, 0)
    assert ask(generator, renew, m.HeartbeatReply).announcement.label == (1, 0)


def test_two_generators_of_one_name(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first is heard of, whatever their numbers; once the first's
    process is gone, the next one has its leases."""
    monkeypatch.setattr(sessions, "MARGIN_S", 0.0)
    run = begin()
    first, second, third, learner = run.peer(), run.peer(), run.peer(), run.peer()
    ask(learner, run.hello(1), m.Welcome)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first.send(greeting(run, 50, process.pid))
    held = ask(first, m.TicketRequest("generator-0", 50, 1, 9, None), m.TicketGrant).tickets
    assert {t.kind for t in held} == {"train", "eval"}
    second.send(greeting(run, 60, os.getpid()))
    ask(second, m.StatusRequest(), m.RunStatus)
    for _ in range(2):
        first.send(m.LeaseRenewal("generator-0", 50, [], {}, None))
        ask(first, m.StatusRequest(), m.RunStatus)
    refused = ask(second, m.TicketRequest("generator-0", 60, 1, 9, None), m.Refusal)
    assert refused.exit_code == 2
    assert f"process {process.pid} on {socket.gethostname()}" in refused.reason
    assert "--index" in refused.reason
    process.communicate(b"\n")
    third.send(greeting(run, 3, os.getpid()))  # as after a clock that was set back
    again = ask(third, m.TicketRequest("generator-0", 3, 1, 9, None), m.TicketGrant).tickets
    # the leases were given back
    assert {(t.ticket, t.kind) for t in again} == {(t.ticket, t.kind) for t in held}
    late = m.Delivery(
        "generator-0", 50, 1, answers(next(t for t in held if t.kind == "train")).samples, drawn=7
    )
    # what it had finished is taken, and its tokens count
    assert ask(first, late, m.DeliveryAcks).acks
    drawn = run.service.store.drawn
    assert drawn["generator-0", 50] == 7
    first.send(m.LeaseRenewal("generator-0", 50, [], {}, None, drawn=9))
    ask(first, m.StatusRequest(), m.RunStatus)
    assert drawn["generator-0", 50] == 9 and run.service.sessions.names["generator-0"].token == 3
    reason = ask(first, m.TicketRequest("generator-0", 50, 2, 9, None), m.Refusal).reason
    assert re.search("taken over the name .*, because this one was silent: end one", reason)


def handed_out(
    run: Run, generator: PeerSocket, learner: PeerSocket, numbers: tuple[int, ...]
) -> list[m.Batch]:
    batches, sequence = [], 0
    generator.send(greet(run.id, "generator-0", 1))
    for n in numbers:
        learner.send(m.BatchRequest(1, n))
        while len(batches) == n:
            assert sequence < 200, "no batch came"
            sequence += 1
            generator.send(want(sequence, 9))
            reply = generator.recv(0.3)
            while reply is not None:
                for t in reply.tickets if isinstance(reply, m.TicketGrant) else ():
                    generator.send(answers(t))
                reply = generator.recv(0.05)
            if isinstance(got := learner.recv(0.3), m.Batch):
                batches.append(got)
    return batches


def test_a_batch_that_an_earlier_buffer_handed_out_is_committed(begin: Any) -> None:
    words = ("learner.steps=3", "durability.mode='process'")
    run = begin(*words)
    generator, learner = join(run)
    (batch,) = handed_out(run, generator, learner, (0,))
    run.end()
    run = begin(*words)
    commit = m.Commit(1, 0, Label(1, 1), "d1", {"reward/mean": 0.5})
    assert ask(run.peer(), commit, m.CommitReply).number == 0
    (row,) = training_log.read(run.dir / "trained.jsonl").values()
    assert (row.samples, row.ids) == (2, training_log.digest(batch.samples))


@pytest.mark.parametrize("mode", ["memory", "process", "process, rows lost"])
@pytest.mark.parametrize("killed", ["learner", "both"])
def test_a_lost_commit_trains_from_a_checkpoint(begin: Any, mode: str, killed: str) -> None:
    """The learner trains batches 0 and 1, writes the checkpoint of version 2, and is killed before
    the buffer has heard of either."""
    words = ("learner.steps=3", f"durability.mode='{mode.partition(',')[0]}'")
    run = begin(*words)
    generator, learner = join(run, max_lag=3)
    batches = handed_out(run, generator, learner, (0, 1))
    if killed == "both":
        run.end()
        if "lost" in mode:  # a power cut: what is not in the journal is gone
            (run.dir / "leased.jsonl").unlink()
        run = begin(*words)
        learner = run.peer()
    hello = msgspec.structs.replace(
        run.hello(2, 2, origin=1),
        next_ticket=batches[1].next_ticket,
        ledger=batches[1].ledger,
        parent=Label(1, 1),
    )
    ask(learner, hello, m.Welcome)
    rows = training_log.read(run.dir / "trained.jsonl")
    assert {n: (r.samples, r.tickets, r.ids) for n, r in rows.items()} == {
        b.number: (2, [[b.number] * 2], training_log.digest(b.samples)) for b in batches
    }
    summary = run.service.make_summary()
    assert (summary["trajectories"], summary["tokens"], summary["steps"]) == (4, 8, 2)
    assert summary["ledger"]["trained"] == 8
    ask(learner, run.hello(3, 1 if killed == "learner" else 2, origin=1), m.Welcome)
    # and a roll-back takes it out again
    assert len(training_log.read(run.dir / "trained.jsonl")) == (1 if killed == "learner" else 2)


def test_a_process_of_another_machine_is_not_looked_up_here(begin: Any) -> None:
    """Its number may be anybody's on this one: only its silence says that it is gone."""
    run = begin()
    first, second = run.peer(), run.peer()
    first.send(msgspec.structs.replace(greeting(run, 1, ended_process()), host="elsewhere"))
    ask(first, m.StatusRequest(), m.RunStatus)
    second.send(greeting(run, 2, os.getpid()))
    ask(second, m.StatusRequest(), m.RunStatus)
    assert run.service.sessions.names["generator-0"].token == 1


BAD_FRAMES = {
    "empty": b"",
    "no message": b"\xc1\xc1",
    "another type": msgspec.msgpack.encode({"type": "trajectory"}),
    "bad UTF-8": b"\x82\xa4type\xa5watch\xa4stop\xa3\xff\xfe\xfd",
    "nesting without end": b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "a size that no memory holds": b"\x82\xa4type\xa5watch\xa4stop\xdb\xff\xff\xff\xff",
}


def test_a_frame_that_does_not_decode_costs_its_sender(begin: Any) -> None:
    run = begin()
    stranger, learner = run.peer(), run.peer()
    good = msgspec.msgpack.encode(m.StatusRequest())
    for frame in BAD_FRAMES.values():
        stranger.socket.send_multipart([stranger.head, frame])
        refused = wait(stranger, m.Refusal)
        assert refused.exit_code == 4 and re.search(
            r"protocol: \w+Error: (?!.None)", refused.reason
        )
    for frames in ([stranger.head], [stranger.head, good, b""], [stranger.head] + [good] * 50):
        stranger.socket.send_multipart(frames)
        assert wait(stranger, m.Refusal).exit_code == 4
    assert run.service.refused == {"frame": len(BAD_FRAMES) + 3}
    assert run.service.make_summary()["refused"] == {"frame": len(BAD_FRAMES) + 3}
    assert ask(learner, run.hello(1), m.Welcome) == m.Welcome(1, 0)


def test_messages_of_another_run_or_protocol_are_refused_unread(begin: Any) -> None:
    """Each kind, also those that carry no run of their own: a generator that is left over from an
    earlier run at the same address changes nothing."""
    run = begin()
    generator, _ = join(run)
    tickets = ask(generator, want(1, 9), m.TicketGrant).tickets
    before = state(run.service.store)
    address = rundir.get_buffer_address(run.config, run.dir)
    kinds = [*map(answers, tickets), want(2, 9), m.LeaseRenewal("generator-0", 1, [], {}, None)]
    kinds += [
        m.GeneratorGoodbye("generator-0", 1),
        m.BatchRequest(1, 0),
        m.CheckpointNotice(1, 9),
        run.hello(2),
    ]
    for head, said in (
        (sockets.make_head("another"), f"belongs to run {run.id}, this process to run another"),
        (
            sockets.make_head(run.id, m.PROTOCOL - 1),
            f"speaks protocol {m.PROTOCOL}, this process 2",
        ),
        (sockets.make_head(""), f"belongs to run {run.id}, this process to run (none)"),
        (b"\xff" * 300, "its first frame names no run"),
    ):
        stray = PeerSocket(address)
        run.peers.append(stray)
        for message in kinds:
            stray.socket.send_multipart([head, msgspec.msgpack.encode(message)])
            assert said in wait(stray, m.Refusal).reason
    assert run.service.refused == {"stranger": 4 * len(kinds)}
    assert state(run.service.store) == before
    run.service.config = Mock(uses_sessions=True, wires=Mock(gateway_address=""))
    assert ask(generator, m.JoinRequest(""), m.Refusal) == m.Refusal(
        "agent: its gateway serves only its own machine, so that none can join: start the run with "
        "wires.gateway_address = tcp://HOST:PORT",
        2,
    )
    watcher = PeerSocket(address)  # who watches need not know the run, and is told it
    run.peers.append(watcher)
    assert ask(watcher, m.StatusRequest(), m.RunStatus).run == run.id
    counts = ask(watcher, m.StatusRequest(), m.RunStatus).metrics
    assert counts["refused/stranger"] == 4 * len(kinds)


def test_frames_of_a_message_are_bounded_together(begin: Any) -> None:
    run = begin("wires.frame_bytes=65536", "generator.context=128")
    most = compute_max_message_bytes(run.config)
    assert most < 20 * 2**20 and run.service.socket.most == most
    stranger, learner = run.peer(), run.peer()
    stranger.socket.send_multipart([stranger.head, *[bytes(most // 2)] * 3])
    assert f"more than {most} bytes" in wait(stranger, m.Refusal).reason
    assert run.service.refused == {"frame": 1}
    assert ask(learner, run.hello(1), m.Welcome) == m.Welcome(1, 0)


def test_a_completion_whose_support_is_large_is_taken(begin: Any) -> None:
    """Top-p may keep most of a large vocabulary where the model is unsure: a bitmap a token."""
    tokens = 500
    run = begin(
        "generator.top_p=0.9",
        "wires.frame_bytes=65536",
        f"generator.max_new_tokens={tokens}",
        "generator.context=512",
        "evaluation.every=0",
    )
    generator, _ = join(run)
    generator.send(greet(run.id, "generator-0", 1))
    (ticket, *_) = ask(generator, want(1), m.TicketGrant).tickets
    kept = SampledSupport.from_lists([np.arange(20_000)] * tokens, 151_936)
    (sample, *_) = answers(ticket).samples
    (span,) = sample.spans
    large = msgspec.structs.replace(
        sample,
        tokens=b"\1\0\0\0" * tokens,
        behavior_logprobs=b"\0\0\0\0" * tokens,
        mask=b"\1" * tokens,
        spans=[msgspec.structs.replace(span, end=tokens)],
        support=kept.encode(),
    )
    assert len(large.support) > 8 * 2**20
    acks = ask(generator, m.Delivery("generator-0", 1, 1, [large]), m.DeliveryAcks).acks
    assert [ack[3] for ack in acks] in (["accepted"], ["evaluated"]) and not run.service.refused


def test_who_has_not_said_hello_gets_no_tickets(begin: Any) -> None:
    run = begin("durability.mode='process'", "staleness.max_lag=1")
    generator, _ = join(run)
    generator.send(want(1, 9))
    assert generator.recv(600) == m.UnknownSession("generator-0", 1)
    assert run.service.store.attempts == 0
    # what was asked for is given as soon as it is known who asks
    assert ask(generator, greet(run.id, "generator-0", 1), m.TicketGrant).sequence == 1
    assert run.service.generators["generator-0"].early is None, "it is queued once"


def bad(run: Run, train: m.Ticket, test: m.Ticket) -> dict[str, m.FromPeer]:
    def deliver(t: m.Ticket, **more: Any) -> m.Delivery:
        return m.Delivery(
            "generator-0", 1, 1, [msgspec.structs.replace(answers(t).samples[0], **more)]
        )

    def renew(
        *progress: tuple[int, int, int], waiting: ProcessWait | None = None, **stats: float
    ) -> m.LeaseRenewal:
        return m.LeaseRenewal("generator-0", 1, list(progress), stats, waiting)

    def wait(
        seconds: float, *, who: str = "generator-0", what: str = "x", on: str = "buffer"
    ) -> m.LeaseRenewal:
        return renew(waiting=ProcessWait(who, what, on, seconds))

    def told(count: int = 1, **more: Any) -> m.LeaseRenewal:
        one = OpenSession(0, 0, "0.0.1", "prompt 0 ''", 1, "agent", "its harness", 1.0, 2.0)
        each = [msgspec.structs.replace(one, **more)] * count
        return msgspec.structs.replace(renew(), sessions=each)

    def hello(**more: Any) -> m.LearnerHello:
        return msgspec.structs.replace(run.hello(2), **more)

    label = Label(1, 1)
    return {
        "sample past the group": deliver(train, sample=2),
        "sample below 0": deliver(train, sample=-1),
        "ticket not granted": deliver(train, ticket=99),
        "ticket below 0": deliver(train, ticket=-1),
        "attempt not granted": deliver(train, attempt=99),
        "attempt of another": deliver(train, attempt=test.attempt),
        "evaluation of another": deliver(test, ticket=test.ticket + 1),
        "evaluation's second sample": deliver(test, sample=1),
        "progress below 0": renew((train.ticket, train.attempt, -1)),
        "progress without end": renew((train.ticket, train.attempt, 2**62)),
        "stats not finite": renew(**{"generator/tokens": float("nan")}),
        "stats below 0": renew(tokens=-1.0),
        "wait not a number": wait(float("nan")),
        "wait not finite": wait(float("inf")),
        "wait below 0": wait(-1.0),
        "wait of another": wait(1.0, who="learner"),
        "wait for another": wait(1.0, on="generator-1"),
        "wait without end": wait(1.0, what="x" * 1001),
        "wait for a long name": wait(1.0, on="generator-0-" + "x" * 1000),
        "a session's number": told(open_s=float("nan")),
        "a session's age": told(seconds=-1.0),
        "a session's screen": told(what="\x1b[2J"),
        "a session without end": told(task="x" * 1001),
        "sessions without end": told(count=257),
        "no name": m.TicketRequest("", 1, 1, 1, None),
        "a name like a screen": m.TicketRequest("\x1b[2J", 1, 1, 1, None),
        "ask past the end": m.BatchRequest(1, 2),
        "commit not composed": m.Commit(1, 0, label, "x", {}),
        "commit far ahead": m.Commit(1, 5, Label(1, 6), "x", {}),
        "commit of another name": m.Commit(1, 0, Label(9, 1), "x", {}),
        "goodbye at 0": m.LearnerGoodbye(1, 2),
        "hello below 0": hello(label=Label(2, -1)),
    }


@pytest.mark.parametrize("mode", ["memory", "process"])
def test_what_cannot_be_is_refused_and_nothing_of_it_stays(begin: Any, mode: str) -> None:
    run = begin(f"durability.mode='{mode}'", "staleness.max_lag=1")
    generator, learner, stranger = join(run, 3)
    tickets = ask(generator, want(1, 9), m.TicketGrant).tickets
    train, test = (next(t for t in tickets if t.kind == kind) for kind in ("train", "eval"))
    before, wrong = state(run.service.store), bad(run, train, test)
    for what, message in wrong.items():
        assert ask(stranger, message, m.Refusal).reason, what
        assert state(run.service.store) == before, what
    assert run.service.refused.total() == len(wrong)
    for t in tickets:
        ask(generator, answers(t), m.DeliveryAcks)
    assert len(ask(learner, m.BatchRequest(1, 0), m.Batch).samples) == 2
    assert (
        "no/metric"
        in ask(stranger, m.Commit(1, 0, Label(1, 1), "x", {"no/metric": 1.0}), m.Refusal).reason
    )
    assert ask(learner, m.Commit(1, 0, Label(1, 1), "d1", {}), m.CommitReply).number == 0
    if mode == "process":
        run.end()
        # the journal folds
        assert state(open_store(run.config, run.dir, get_task(run.config.task))).committed == 1


def test_an_epoch_before_any_hello_is_nobodys(begin: Any) -> None:
    """A commit or goodbye of epoch 0, which is where the store begins."""
    run = begin()
    stranger = run.peer()
    for message in (
        m.BatchRequest(0, 0),
        m.Commit(0, 0, Label(0, 1), "x", {}),
        m.LearnerGoodbye(0, 0),
        m.CheckpointNotice(0, 5),
        m.LearnerProgress("learner", None, {}),
    ):
        stranger.send(message)
    assert ask(stranger, m.StatusRequest(), m.RunStatus).committed == 0
    assert not run.service.batch_requests and not run.service.learner
    assert ask(run.peer(), run.hello(1), m.Welcome).epoch == 1


@pytest.mark.parametrize("exported", [True, False])
def test_a_buffer_folded_after_the_end_waits_for_the_learner_only_if_its_model_is_missing(
    begin: Any, exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model there, only generators are to be told, and the buffer ends; without, a learner
    comes again and says goodbye again."""
    run = begin("durability.mode='process'", "learner.steps=1")
    generator, learner = join(run)
    ask(generator, answers(first_ticket(run, generator)), m.DeliveryAcks)
    ask(learner, m.BatchRequest(1, 0), m.Batch)
    ask(learner, m.Commit(1, 0, Label(1, 1), "d1", {}), m.CommitReply)
    learner.send(m.LearnerGoodbye(1, 1))
    # the last evaluation
    ask(generator, answers(ask(generator, want(9), m.TicketGrant).tickets[0]), m.DeliveryAcks)
    wait(learner, m.RunFinished)
    run.end()
    (run.dir / "weights_digest").write_text("d") if exported else None
    again = begin("durability.mode='process'", "learner.steps=1")
    assert bool(again.service.ended_at) == exported == again.service.store.finished
    generator, learner = again.peer(), again.peer()
    generator.send(m.TicketRequest("generator-0", 2, 1, 4, None))
    while not exported and "generator-0" not in again.service.generators:
        time.sleep(0.001)  # heard before the learner ends the run, or nobody would be left to tell
    if not exported:
        assert ask(learner, again.hello(2, number=1, origin=1), m.Welcome).epoch == 2
        assert ask(learner, m.LearnerGoodbye(2, 1), m.RunFinished).epoch == 2
    while not wait(generator, m.TicketGrant).finished:
        pass
    if exported:  # it cannot know that nobody else is to be told
        monkeypatch.setattr(module, "LINGER_S", 0.0)
    again.thread.join(600)
    assert not again.thread.is_alive() and again.service.make_summary()["finished"]
    assert again.service.make_summary()["heldout_end"] is not None


def test_tokens_a_second_are_over_all_the_time_since_the_last_report(begin: Any) -> None:
    """Steps may be faster than the generators' reports: 300 tokens in 3 s are 100 a second, however
    many steps lay between."""
    service = begin().service
    service.clock.started_at = 100.0
    stats = {"generator/tokens": 300.0, "generator/busy_s": 2.0, "generator/idle_s": 1.0}
    service.generators["g"] = PeerState(stats=stats)
    first = service.compute_generator_metrics(103.0)
    assert first["throughput/generator_tokens_per_s"] == pytest.approx(100.0)
    assert first["time/generator_idle_share"] == pytest.approx(1 / 3)
    assert service.compute_generator_metrics(104.0) == {}
    assert service.compute_generator_metrics(105.5) == {}
    service.generators["g"].stats = {
        "generator/tokens": 700.0,
        "generator/busy_s": 5.0,
        "generator/idle_s": 2.0,
    }
    assert service.compute_generator_metrics(107.0)[
        "throughput/generator_tokens_per_s"
    ] == pytest.approx(100.0)


def test_what_a_generator_did_for_an_earlier_buffer_is_in_no_rate(begin: Any) -> None:
    """Its sums go on when the buffer is killed; before the first ticket they are not of RL."""
    run = begin("learner.steps=3", "staleness.max_lag=2")
    generator, learner = run.peer(), run.peer()

    def report(tokens: float, busy_s: float, idle_s: float) -> None:
        sums = {"tokens": tokens, "busy_s": busy_s, "idle_s": idle_s}
        stats = {f"generator/{name}": value for name, value in sums.items()}
        renewal = m.LeaseRenewal("generator-0", 1, [], stats, None)
        ask(generator, renewal, m.HeartbeatReply)

    report(4e6, 500.0, 100.0)
    assert run.service.compute_generator_metrics(time.monotonic()) == {}, "a commit told again"
    report(5e6, 600.0, 100.0)
    ask(learner, msgspec.structs.replace(run.hello(1), max_lag=2.0), m.Welcome)
    while not run.service.clock.started_at:
        (ticket, *_) = ask(generator, want(1), m.TicketGrant).tickets
        if ticket.kind != "train":
            ask(generator, answers(ticket), m.DeliveryAcks)
    started_at = run.service.clock.started_at
    report(5e6 + 300.0, 602.0, 101.0)
    made = run.service.compute_generator_metrics(started_at + 3.0)
    assert made["throughput/generator_tokens_per_s"] == pytest.approx(100.0)
    assert made["time/generators"] == 3.0
    assert made["time/generator_idle_share"] == pytest.approx(1 / 3)
    # the first report of an older process after the first ticket
    run.service.generators.clear()
    report(7e6, 800.0, 200.0)
    assert run.service.compute_generator_metrics(started_at + 4.0) == {}
    report(7e6 + 50.0, 801.0, 200.0)
    assert run.service.compute_generator_metrics(started_at + 4.0)["time/generators"] == 1.0


def test_reused_keys_are_summed_over_the_generators_that_keep_them(begin: Any) -> None:
    service = begin().service
    service.clock.start(0.5)

    def step(at: float, **stats: dict[str, float]) -> dict[str, float]:
        for name, said in stats.items():
            entry = service.generators.setdefault(name, PeerState())
            entry.stats = {"generator/busy_s": at} | {f"prefix/{e}": v for e, v in said.items()}
        got = service.compute_generator_metrics(at)
        return {name: value for name, value in got.items() if name.startswith("prefix/")}

    assert step(1.0, a={}) == {}
    one = {"hits": 2.0, "reused_tokens": 48.0, "encoded_tokens": 100.0}
    two = {"hits": 3.0, "reused_tokens": 24.0, "encoded_tokens": 7.0}
    values = step(2.0, a=one, b=two)
    assert values == {"prefix/hits": 5, "prefix/reused_tokens": 72, "prefix/encoded_tokens": 107}
    later = step(3.0, a=one, b={name: value + 1 for name, value in two.items()})
    assert set(later.values()) == {1.0}
