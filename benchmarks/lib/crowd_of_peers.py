"""Generators without engines, and a learner, as peers of a real buffer.

Each is a state machine with a real connection.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import zmq

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport.sockets import make_head
from lib import results_file
from lib.rounds import cpu_of

GROUPS = 32
SIZE = 8
TOKENS = 64
STEPS = 1 << 20  # of the run: more than anybody sees
KEPT = 4  # batches behind the last one that a checkpoint still needs
RENEW_S = 0.5  # between two renewals of a generator, that writes or waits
PATIENCE_S = 600.0
MAX_SOCKETS = 8192


def a_config(mode: str, lag: int, tokens: int = 0) -> Config:
    """The configuration of a run whose answers have so many tokens; 0: TOKENS."""
    tokens = tokens or TOKENS
    sets = [
        f"durability.mode={mode!r}",
        f"learner.steps={STEPS}",
        f"staleness.max_lag={lag}",
        "staleness.wait=0",  # the limit is filled
        f"learner.groups={GROUPS}",
        f"learner.group_size={SIZE}",
        "evaluation.every=0",
        "evaluation.final_prompts=1",
        "evaluation.ood_prompts=0",
        f"generator.max_new_tokens={tokens}",
        f"generator.context={4 * tokens}",
        "wires.lease_s=100000",
    ]
    return load.load(results_file.ROOT / "configs" / "demo.toml", sets)


def trajectory(ticket: m.Ticket, sample: int, label: Label, tokens: int) -> m.Trajectory:
    return m.Trajectory(
        ticket=ticket.ticket,
        sample=sample,
        attempt=ticket.attempt,
        prompt_tokens=b"\1\0\0\0" * 16,
        tokens=b"\2\0\0\0" * tokens,
        behavior_logprobs=b"\0\0\0\xbf" * tokens,
        mask=b"\1" * tokens,
        spans=[m.VersionSpan(label, "", 0, tokens, label)],
        reward=float(sample % 2),
        reward_parts={},
        finish="stop",
        temperature=1.0,
    )


class Peers:
    """The state of all peers, and their next messages.

    A generator asks for eight samples, delivers each group in one frame, and asks again; the
    learner asks for a batch, commits it, and releases old ones.
    say: sends a peer's message to the buffer.  tokens: of an answer; 0: TOKENS."""

    def __init__(
        self, run: str, lag: int, say: Callable[[str, Any], None], tokens: int = 0
    ) -> None:
        self.run = run
        self.lag = lag
        self.say = say
        self.tokens = tokens or TOKENS
        self.label = Label(1, 0)
        self.number = 0  # batches trained
        self.trajectories = 0  # of them
        self.written: dict[str, int] = {}  # groups, by generator
        self.sequence: dict[str, int] = {}

    def begin(self, names: list[str]) -> None:
        self.say("learner", self.hello())
        for name in names:
            greeting = m.GeneratorHello(m.PROTOCOL, self.run, name, 1, SIZE, host="here", pid=0)
            self.say(name, greeting)
            self.want(name)
        self.say("learner", m.BatchRequest(1, 0))

    def hello(self) -> m.LearnerHello:
        return m.LearnerHello(
            protocol=m.PROTOCOL,
            run=self.run,
            epoch=1,
            label=self.label,
            parent=None,
            digest="d0",
            next_ticket=0,
            origin=0,
            max_lag=self.lag,
            source=m.WeightsSource(1, "here", "", ""),
            ring=[],
        )

    def want(self, name: str) -> None:
        self.sequence[name] = self.sequence.get(name, 0) + 1
        self.say(name, m.TicketRequest(name, 1, self.sequence[name], SIZE, self.label))

    def renew(self, name: str) -> None:
        self.say(name, m.LeaseRenewal(name, 1, [], {"generator/busy_s": 1.0}, None))

    def deliver(self, name: str, tickets: list[m.Ticket]) -> None:
        """Deliver the granted samples, and ask for more."""
        for ticket in tickets:
            label = ticket.exact_version or ticket.min_version
            made = [trajectory(ticket, sample, label, self.tokens) for sample in ticket.samples]
            self.say(name, m.Delivery(name, 1, 1, made))
        self.written[name] = self.written.get(name, 0) + 1
        self.want(name)

    def train(self, batch: m.Batch) -> None:
        self.trajectories += len(batch.samples)
        self.number += 1
        self.label = Label(1, self.number)
        values = {"reward/mean": 0.5}
        self.say("learner", m.Commit(1, batch.number, self.label, f"d{self.number}", values))
        if self.number > KEPT:
            self.say("learner", m.CheckpointNotice(1, self.number - KEPT))
        self.say("learner", m.BatchRequest(1, self.number))


class Measured(NamedTuple):
    """The measurements of one period of work."""

    per_s: float  # trajectories trained
    cpu_us: float  # of the buffer, a trajectory
    ticket_ms: list[float]  # from each request to its tickets


class Crowd:
    """So many generators and a learner, each with a connection of its own, and a buffer in its own
    process.

    pace: trajectories/s of all generators together, as if engines wrote them; 0: as fast as the
    buffer takes them.  tokens: of an answer; 0: TOKENS."""

    def __init__(
        self, work: Path, mode: str, lag: int, many: int, pace: float = 0.0, tokens: int = 0
    ) -> None:
        config = a_config(mode, lag, tokens)
        self.dir = work / f"{mode}-{lag}-{many}"
        rundir.ensure(load.dump(config), self.dir)
        words = [str(self.dir / "config.toml"), "--run-dir", str(self.dir)]
        with self.dir.with_suffix(".log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.cli", "buffer", *words],
                cwd=results_file.ROOT,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(results_file.ROOT)},
            )
        self.names = [f"generator-{index}" for index in range(many)]
        self.think_s = many * SIZE / pace if pace else 0.0
        self.retry_s = config.wires.retry_s
        self.random = random.Random(many)
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.poller = select.epoll()  # zmq's own looks at every socket each time
        self.sockets: dict[str, Any] = {}
        self.owners: dict[int, str] = {}  # by the descriptor that zmq tells of news with
        self.ready: set[str] = set()
        run = rundir.read_run_id(self.dir)
        self.head = make_head(run)
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(m.FromBuffer).decode
        for name in ("learner", *self.names):
            self.connect(name, rundir.get_buffer_address(config, self.dir))
        self.peers = Peers(run, lag, self.say, tokens)
        self.asked: dict[str, tuple[float, float]] = {}  # since when, and last
        self.writing: list[tuple[float, int, str, list[m.Ticket]]] = []  # until when
        self.count = 0
        self.latencies: list[float] = []
        self.turn = 0.0  # whose renewal is next, and how much of it is due
        self.looked = time.monotonic()
        self.peers.begin(self.names)

    def connect(self, name: str, address: str) -> None:
        socket = self.sockets[name] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        descriptor = int(socket.getsockopt(zmq.FD))
        self.owners[descriptor] = name
        self.poller.register(descriptor, select.EPOLLIN)

    def say(self, name: str, message: Any) -> None:
        if isinstance(message, m.TicketRequest):
            now = time.monotonic()
            self.asked[name] = (now, now)
        socket = self.sockets[name]
        socket.send_multipart([self.head, self.encode(message)])
        if socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # sending may have taken the news of it
            self.ready.add(name)

    def one_pass(self) -> None:
        """All that has come, and what is due."""
        until = self.writing[0][0] - time.monotonic() if self.writing else 0.1
        timeout = 0.0 if self.ready else min(0.1, max(0.0, until))
        news = {self.owners[descriptor] for descriptor, _ in self.poller.poll(timeout)}
        news, self.ready = news | self.ready, set()
        for name in sorted(news):
            self.drain(name)
        now = time.monotonic()
        while self.writing and self.writing[0][0] <= now:
            _, _, name, tickets = heapq.heappop(self.writing)
            self.peers.deliver(name, tickets)
        self.turn += (now - self.looked) / RENEW_S * len(self.names)
        self.looked = now
        for _ in range(int(self.turn)):
            self.count += 1
            self.renew(self.names[self.count % len(self.names)], now)
        self.turn %= 1

    def drain(self, name: str) -> None:
        socket = self.sockets[name]
        while True:
            try:
                reply = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.heard(name, self.decode(reply))

    def renew(self, name: str, now: float) -> None:
        """A renewal; a question that has long not been answered comes again."""
        self.peers.renew(name)
        if name in self.asked and now - self.asked[name][1] > self.retry_s:
            first, _ = self.asked[name]
            self.peers.want(name)
            self.asked[name] = (first, now)

    def heard(self, name: str, message: Any) -> None:
        if isinstance(message, m.TicketGrant) and message.tickets:
            now = time.monotonic()
            if (asked := self.asked.pop(name, None)) is not None:
                self.latencies.append(1e3 * (now - asked[0]))
            if not self.think_s:
                return self.peers.deliver(name, message.tickets)
            self.count += 1
            due = now + self.think_s * self.random.uniform(0.5, 1.5)
            heapq.heappush(self.writing, (due, self.count, name, message.tickets))
        elif isinstance(message, m.Batch):
            self.peers.train(message)
        elif isinstance(message, m.Refusal):
            sys.exit(f"the buffer refuses {name}: {message}; its log is {self.dir}.log")
        return None

    def batches(self, count: int) -> Measured:
        """So many batches more."""
        goal = self.peers.number + count
        before, cpu, began = self.peers.trajectories, cpu_of(self.process.pid), time.monotonic()
        self.latencies = []
        while self.peers.number < goal:
            self.one_pass()
            if time.monotonic() - began > PATIENCE_S:
                sys.exit(f"no batch in {PATIENCE_S:.0f} s; the buffer's log is {self.dir}.log")
        done = self.peers.trajectories - before
        spent = cpu_of(self.process.pid) - cpu
        return Measured(
            done / (time.monotonic() - began), 1e6 * spent / done, sorted(self.latencies)
        )

    def memory(self) -> int:
        """Bytes that the buffer alone holds."""
        return int(psutil.Process(self.process.pid).memory_full_info().uss)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        for socket in self.sockets.values():
            socket.close()
        self.poller.close()
        self.context.term()
        rundir.clean(self.dir)
