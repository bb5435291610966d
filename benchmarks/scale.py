"""Measure the buffer with 1, 10, 100 and 1,000 generators.

    OMP_NUM_THREADS=1 python benchmarks/scale.py [--quick] [--json] [--parts sockets waiting share]

sockets   the real buffer process; each generator and the learner has its own connection, and is
          complete except for the engine (lib/crowd_of_peers.py).  Each asks for eight samples,
          delivers a group, asks again, renews twice a second, and asks again after
          `wires.retry_s`.  Flat out under limit 2, so that most wait where there are many:
          trajectories a second, the buffer's CPU a trajectory, its memory a generator.  At a pace,
          2,000 trajectories a second of all together, with room for all of them: how long a
          generator waits for its tickets.
waiting   the service with store, journal and metrics in this process, its socket a list, in the
          three durability modes: generators that wait cost the others nothing.  In `disk` replies
          wait for the disk's sync, as in the service; the CPU of the syncing thread counts.  The
          cost of a renewal is measured too.
share     the buffer's CPU for a trajectory of 1,024 tokens, flat out over sockets, over the CPU
          that the embedded engine needs to sample one: the demo's model and slots, all of them
          full, without delivery and reward, so that the share of a real generator is smaller.

Goals: with 1,000 generators a trajectory takes at most 1.5 times the CPU that it takes with 10,
in the first two parts, and every mode; the share is at most 1 % with 10, 100 and 1,000."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib import rounds
from lib.crowd_of_peers import GROUPS, SIZE, TOKENS, Crowd, Measured, Peers, a_config

from actors.engine import CompletionRequest
from actors.engine_embedded import EmbeddedEngine
from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.models import memory, policy
from asyncrl.records import rundir
from buffer.service import OUTGOING, SYNC_POLL_S, BufferService

MANY = (1, 10, 100, 1000)
FEW = 10  # generators that the goal compares the most with
LAG = 2
# the limit under which 1,000 generators may all write, while what is written waits for the slowest:
# 1,000 groups out, and those of the two seconds by which one in a thousand is later than most
ROOM = 80
PACE = 2000.0  # trajectories/s
TELLS = 8  # groups between two renewals of a generator that waits in a list
LONG = 1024  # tokens of a trajectory whose share is measured
PROMPT = 16  # of its tokens
SHARE = 1.0  # percent: the buffer's CPU over the engine's
SLOTS = 256  # configs/demo.toml
MESSAGES = 16  # that the service finds on its socket in a pass of its loop


class Loop:
    """A service, so many generators and a learner, in turn."""

    def __init__(self, work: Path, mode: str, many: int) -> None:
        config = a_config(mode, LAG)
        self.dir = work / f"{mode}-{many}"
        rundir.ensure(load.dump(config), self.dir)
        self.service = BufferService(config, self.dir)
        self.service.socket.send = self.hear  # type: ignore[method-assign]
        self.inbox: deque[tuple[bytes, Any]] = deque()
        self.heard: deque[tuple[bytes, Any]] = deque()
        self.peers = Peers(self.service.run, LAG, self.say)
        self.peers.begin([f"generator-{index}" for index in range(many)])

    def say(self, name: str, message: Any) -> None:
        self.inbox.append((name.encode(), message))

    def hear(self, peer: bytes, message: Any) -> None:
        self.heard.append((peer, message))

    def answer(self, peer: bytes, message: Any) -> None:
        """Let a generator or the learner react to a reply."""
        name = peer.decode()
        if isinstance(message, m.TicketGrant) and message.tickets:
            self.peers.deliver(name, message.tickets)
            if self.peers.written[name] % TELLS == 0:
                self.peers.renew(name)
        elif isinstance(message, m.Batch):
            self.peers.train(message)

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
        goal = self.peers.number + count
        before = self.peers.trajectories
        spent = 0.0
        while self.peers.number < goal:
            spent += self.one_pass()
        return 1e6 * spent / (self.peers.trajectories - before)

    def renewals(self, count: int) -> float:
        """CPU microseconds of a renewal, of generators in turn."""
        names = list(self.service.generators)
        began = time.process_time()
        for index in range(count):
            name = names[index % len(names)]
            self.service.handle(
                name.encode(), m.LeaseRenewal(name, 1, [], {"generator/busy_s": 1.0}, None)
            )
            if index % MESSAGES == 0:
                self.service.answer()
                self.service.flush()
        spent = time.process_time() - began
        while self.heard:  # in `disk` others' replies were waiting for the sync
            self.answer(*self.heard.popleft())
        return 1e6 * spent / count

    def end(self) -> None:
        self.service.close()
        rundir.clean(self.dir)


Judged = tuple[list[dict[str, Any]], dict[str, Any]]


def grows(what: str, us: dict[int, float]) -> dict[str, Any]:
    """The goal of one line: CPU a trajectory of many over that of few."""
    few, most = FEW if max(us) > FEW else min(us), max(us)
    ratio = us[most] / us[few]
    name = f"{what}: CPU a trajectory, {most} generators over {few}"
    return rounds.goal(name, round(ratio, 2), 1.5, at_least=False, us=list(us.values()))


def waiting(work: Path, n_rounds: int, per: int, modes: tuple[str, ...]) -> Judged:
    loops = {(mode, many): Loop(work, mode, many) for mode in modes for many in MANY}
    for loop in loops.values():
        loop.batches(4)
    cost: dict[tuple[str, int], list[float]] = {key: [] for key in loops}
    renewal: dict[tuple[str, int], list[float]] = {key: [] for key in loops}

    def one(key: tuple[str, int]) -> None:
        cost[key].append(loops[key].batches(per))
        renewal[key].append(loops[key].renewals(500))

    names = {f"{mode}, {many}": (mode, many) for mode, many in loops}
    times = rounds.interleave({name: lambda k=key: one(k) for name, key in names.items()}, n_rounds)
    for loop in loops.values():
        loop.end()
    median = {key: round(statistics.median(values), 1) for key, values in cost.items()}
    goals = [grows(mode, {many: median[mode, many] for many in MANY}) for mode in modes]
    return goals, {
        "us_a_renewal": {
            name: round(statistics.median(renewal[key]), 1) for name, key in names.items()
        },
        "every_round_us": {name: cost[key] for name, key in names.items()},
        "times": times,
    }


def quantile(values: list[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(share * len(values)))], 2)


def over_sockets(
    work: Path, many: int, lag: int, batches: int, pace: float, tokens: int = TOKENS
) -> tuple[Measured, int]:
    """One life of a buffer: some batches unmeasured, then those that count; its memory after."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        crowd = Crowd(Path(folder), "process", lag, many, pace, tokens)
        try:
            crowd.batches(max(4, 2 * many // GROUPS))  # everybody has had a turn
            return crowd.batches(batches), crowd.memory()
        finally:
            crowd.end()


def sockets(work: Path, n_rounds: int, per: int, many: tuple[int, ...]) -> Judged:
    flat: dict[int, list[tuple[Measured, int]]] = {n: [] for n in many}
    paced: dict[int, list[Measured]] = {n: [] for n in many}

    def one(n: int) -> None:
        flat[n].append(over_sockets(work, n, LAG, per, 0.0))
        paced[n].append(over_sockets(work, n, ROOM, per, PACE)[0])

    times = rounds.interleave({f"{n} generators": lambda n=n: one(n) for n in many}, n_rounds)
    table = []
    for n in many:
        middle = {
            "per_s": statistics.median(x.per_s for x, _ in flat[n]),
            "cpu_us": statistics.median(x.cpu_us for x, _ in flat[n]),
            "memory_mb": statistics.median(uss for _, uss in flat[n]) / 1e6,
            "cpu_us_at_a_pace": statistics.median(x.cpu_us for x in paced[n]),
        }
        waited = sorted(ms for x in paced[n] for ms in x.ticket_ms)
        table.append(
            {"generators": n}
            | {key: round(value, 1) for key, value in middle.items()}
            | {
                f"ticket_ms_{name}": quantile(waited, q)
                for name, q in (("p50", 0.5), ("p99", 0.99))
            }
        )
    few, most = table[0], table[-1]
    each = (most["memory_mb"] - few["memory_mb"]) / (most["generators"] - few["generators"])
    return [grows("sockets", {row["generators"]: row["cpu_us"] for row in table})], {
        "over_sockets": table,
        "kb_a_generator": round(1e3 * each, 1),
        "pace_trajectories_per_s": PACE,
        "socket_times": times,
    }


class Sampler:
    """The demo's engine with all its slots in use."""

    def __init__(self, work: Path, slots: int, tokens: int) -> None:
        torch.set_num_threads(1)
        memory.keep_freed()
        self.model = policy.build_model(
            work / "model", "0123456789abcdefghij", max_positions=PROMPT + tokens + 1
        )
        self.slots = slots
        self.tokens = tokens
        self.engine = EmbeddedEngine(
            self.model, slots=slots, context=PROMPT + tokens, max_new_tokens=tokens
        )
        self.engine.load(dict(policy.list_named_weights(self.model)), Label(1, 0), "d")
        self.prompt = np.random.default_rng(7).integers(3, 20, PROMPT).astype(np.int32)
        self.round = 0

    def sample(self) -> float:
        """A full set of trajectories, none ended early; CPU microseconds of one."""
        began = time.process_time()
        self.round += 1
        self.engine.add(
            CompletionRequest(
                (self.round, at, 1), self.prompt, (0, 0), self.tokens, 1.0, 1.0, 0, stop=(), seed=7
            )
            for at in range(self.slots)
        )
        made = 0
        while self.engine.active:
            made += sum(answer.tokens.size for answer in self.engine.step())
        if made != self.slots * self.tokens:
            raise RuntimeError(f"the engine sampled {made} tokens, not {self.slots * self.tokens}")
        return 1e6 * (time.process_time() - began) / self.slots


def share(work: Path, n_rounds: int, per: int, many: tuple[int, ...], slots: int = SLOTS) -> Judged:
    """The buffer's CPU of a long trajectory over its generator's, in percent."""
    sampler = Sampler(work, slots, LONG)

    def one_round(_: int) -> dict[str, float]:
        row = {"engine": sampler.sample()}
        return row | {str(n): over_sockets(work, n, LAG, per, 0.0, LONG)[0].cpu_us for n in many}

    counted = rounds.quiet(n_rounds, one_round)
    goals = [
        rounds.figure(
            f"CPU of the buffer over the engine's, {LONG} tokens, {n} generators, %",
            [100 * row[str(n)] / row["engine"] for row in counted],
            SHARE,
            at_least=False,
        )
        for n in many
    ]
    return goals, {"us_a_long_trajectory": counted}


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--batches", type=int, default=40, help="in a round")
    p.add_argument("--parts", nargs="+", choices=("sockets", "waiting", "share"))
    args = p.parse_args()
    parts = args.parts or ("sockets", "waiting", "share")
    n_rounds, per = (1, 6) if args.quick else (args.rounds, args.batches)
    goals: list[dict[str, Any]] = []
    details: dict[str, Any] = {"what": f"{GROUPS} x {SIZE} samples of {TOKENS} tokens a batch"}
    with tempfile.TemporaryDirectory() as work:
        if "sockets" in parts:
            found, more = sockets(Path(work), n_rounds, per, (1, 10) if args.quick else MANY)
            goals += found
            details |= more
        if "waiting" in parts:
            modes = ("memory",) if args.quick else ("memory", "process", "disk")
            found, more = waiting(Path(work), n_rounds, per, modes)
            goals += found
            details |= more
        if "share" in parts:
            found, more = (
                share(Path(work), n_rounds, per, (10,), 8)
                if args.quick
                else share(Path(work), n_rounds, per, (10, 100, 1000))
            )
            goals += found
            details |= more
    named = "scale" if len(parts) == 3 else "scale_" + "_".join(parts)
    rounds.report(named, goals, details, args)


if __name__ == "__main__":
    main()
