"""The buffer's CPU a trajectory with 10, 100 and 1,000 generators.

    OMP_NUM_THREADS=1 python benchmarks/scale.py [--quick] [--json]

Proves: generators that wait cost the others nothing.  The real service with the real store, journal
and metrics; only its socket is a list, as connections are zmq's business.  Each generator asks for
eight samples, delivers a group in a frame of its own, asks again, and tells of its work once for
every eight groups that it wrote; the limit leaves room for 96 groups, so that with many generators
most of them wait.  One learner asks, commits, and retires.  In `disk` replies wait for the disk's
sync, as in the service's own loop; the CPU of the thread that syncs counts.  Beside it stands what
a renewal costs: every generator sends two a second, whether it works or waits.

Goal: in every mode, 1,000 generators take at most 1.5 times the CPU a trajectory of 10."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from lib import rounds

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from buffer.service import OUTGOING, SYNC_POLL_S, Service

HERE = Path(__file__).resolve().parent
MANY = (10, 100, 1000)
GROUPS = 32
SIZE = 8
TOKENS = 64
LAG = 2
KEPT = 4  # batches behind the last one that a checkpoint still needs
TELLS = 8  # groups between two renewals of a generator
MESSAGES = 16  # that the service finds on its socket in a pass of its loop
STEPS = 1 << 20


def trajectory(ticket: m.Ticket, sample: int, label: Label) -> m.Trajectory:
    return m.Trajectory(
        ticket=ticket.ticket,
        sample=sample,
        attempt=ticket.attempt,
        prompt_tokens=b"\1\0\0\0" * 16,
        tokens=b"\2\0\0\0" * TOKENS,
        behavior_logprobs=b"\0\0\0\xbf" * TOKENS,
        mask=b"\1" * TOKENS,
        spans=[m.Span(label, "", 0, TOKENS, label)],
        reward=float(sample % 2),
        reward_parts={},
        finish="stop",
        temperature=1.0,
    )


class Loop:
    """A service, so many generators and a learner, in turn."""

    def __init__(self, work: Path, mode: str, many: int) -> None:
        sets = [
            f"durability.mode={mode!r}",
            f"learner.steps={STEPS}",
            f"staleness.max_lag={LAG}",
            f"learner.groups={GROUPS}",
            f"learner.group_size={SIZE}",
            "evaluation.every=0",
            "evaluation.final_prompts=1",
            "evaluation.ood_prompts=0",
            f"generator.max_new_tokens={TOKENS}",
            f"generator.context={4 * TOKENS}",
            "wires.lease_s=100000",
        ]
        config = load.load(HERE.parent / "configs" / "demo.toml", sets)
        self.dir = work / f"{mode}-{many}"
        rundir.ensure(config, load.dump(config), self.dir)
        self.service = Service(config, self.dir)
        self.service.socket.send = self.hear  # type: ignore[method-assign]
        self.inbox: deque[tuple[bytes, Any]] = deque()
        self.heard: deque[tuple[bytes, Any]] = deque()
        self.written: dict[str, int] = {}
        self.trajectories = 0
        self.label = Label(1, 0)
        self.number = 0
        self.say("learner", self.hello())
        for index in range(many):
            self.say(f"generator-{index}", self.greeting(f"generator-{index}"))
            self.say(f"generator-{index}", self.want(f"generator-{index}"))
        self.say("learner", m.Ask(1, 0))

    def hello(self) -> m.LearnerHello:
        return m.LearnerHello(
            protocol=m.PROTOCOL,
            run=self.service.run,
            epoch=1,
            label=self.label,
            parent=None,
            digest="d0",
            next_ticket=0,
            origin=0,
            max_lag=LAG,
            source=m.WeightsSource(1, "here", "", ""),
            ring=[],
        )

    def greeting(self, name: str) -> m.GeneratorHello:
        return m.GeneratorHello(m.PROTOCOL, self.service.run, name, 1, SIZE, host="here", pid=0)

    def want(self, name: str) -> m.Want:
        return m.Want(name, 1, 1, SIZE, self.label)

    def renew(self, name: str) -> m.Renew:
        return m.Renew(name, 1, [], {"generator/busy_s": 1.0}, None)

    def say(self, name: str, message: Any) -> None:
        self.inbox.append((name.encode(), message))

    def hear(self, peer: bytes, message: Any) -> None:
        self.heard.append((peer, message))

    def answer(self, peer: bytes, message: Any) -> None:
        """What a generator or the learner does with a reply."""
        name = peer.decode()
        if isinstance(message, m.Tickets) and message.tickets:
            for ticket in message.tickets:
                label = ticket.exact_version or ticket.min_version
                made = [trajectory(ticket, sample, label) for sample in ticket.samples]
                self.say(name, m.Deliver(name, 1, 1, made))
            self.written[name] = self.written.get(name, 0) + 1
            if self.written[name] % TELLS == 0:
                self.say(name, self.renew(name))
            self.say(name, self.want(name))
        elif isinstance(message, m.Batch):
            self.trajectories += len(message.samples)
            self.number += 1
            self.label = Label(1, self.number)
            values = {"reward/mean": 0.5}
            commit = m.Commit(1, message.number, self.label, f"d{self.number}", values)
            self.say("learner", commit)
            if self.number > KEPT:
                self.say("learner", m.Checkpointed(1, self.number - KEPT))
            self.say("learner", m.Ask(1, self.number))

    def one_pass(self) -> float:
        """The service's loop once, over the next messages; its CPU seconds."""
        held = len(self.service.outgoing) >= OUTGOING  # by the disk: nothing more is taken in
        count = 0 if held else min(MESSAGES, len(self.inbox))
        batch = [self.inbox.popleft() for _ in range(count)]
        began = time.process_time()
        if not batch and self.service.outgoing:
            time.sleep(SYNC_POLL_S)
        for peer, message in batch:
            self.service.handle(peer, message)
        self.service.answer()
        self.service.flush()
        spent = time.process_time() - began
        while self.heard:
            self.answer(*self.heard.popleft())
        return spent

    def batches(self, count: int) -> float:
        """CPU microseconds of the service a trajectory, over so many batches."""
        goal = self.number + count
        before = self.trajectories
        spent = 0.0
        while self.number < goal:
            spent += self.one_pass()
        return 1e6 * spent / (self.trajectories - before)

    def renewals(self, count: int) -> float:
        """CPU microseconds of a renewal, of generators in turn."""
        names = list(self.service.generators)
        began = time.process_time()
        for index in range(count):
            name = names[index % len(names)]
            self.service.handle(
                name.encode(), m.Renew(name, 1, [], {"generator/busy_s": 1.0}, None)
            )
            if index % MESSAGES == 0:
                self.service.answer()
                self.service.flush()
        spent = time.process_time() - began
        self.heard.clear()
        return 1e6 * spent / count

    def end(self) -> None:
        self.service.close()
        rundir.clean(self.dir)


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--batches", type=int, default=40, help="in a round")
    args = p.parse_args()
    n_rounds, per = (2, 6) if args.quick else (args.rounds, args.batches)
    modes = ("memory",) if args.quick else ("memory", "process", "disk")
    with tempfile.TemporaryDirectory() as work:
        loops = {f"{mode}, {many}": Loop(Path(work), mode, many) for mode in modes for many in MANY}
        for loop in loops.values():
            loop.batches(4)
        cost: dict[str, list[float]] = {name: [] for name in loops}
        renewal: dict[str, list[float]] = {name: [] for name in loops}

        def one(name: str) -> None:
            cost[name].append(loops[name].batches(per))
            renewal[name].append(loops[name].renewals(500))

        times = rounds.interleave({name: lambda name=name: one(name) for name in loops}, n_rounds)
        for loop in loops.values():
            loop.end()
    median = {name: round(statistics.median(values), 1) for name, values in cost.items()}
    goals = []
    for mode in modes:
        few, most = median[f"{mode}, {MANY[0]}"], median[f"{mode}, {MANY[-1]}"]
        goals.append(
            rounds.goal(
                f"{mode}: CPU a trajectory, {MANY[-1]} generators over {MANY[0]}",
                round(most / few, 2),
                1.5,
                at_least=False,
                us=[median[f"{mode}, {many}"] for many in MANY],
            )
        )
    rounds.report(
        "scale",
        goals,
        {
            "what": f"the buffer's service, {GROUPS} x {SIZE} samples of {TOKENS} tokens a batch",
            "us_a_trajectory": median,
            "us_a_renewal": {
                name: round(statistics.median(values), 1) for name, values in renewal.items()
            },
            "every_round_us": cost,
            "times": times,
        },
        args,
    )


if __name__ == "__main__":
    main()
