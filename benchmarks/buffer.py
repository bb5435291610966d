"""The buffer over its real socket and in its own process, against the plainest rival: a
`multiprocessing.Queue` of pickled samples.

    OMP_NUM_THREADS=1 python benchmarks/buffer.py [--quick] [--json]

Proves: the buffer is no bottleneck.  One process plays generator and learner: tickets, deliveries,
asks, commits and checkpoints of 32 x 8 samples of 24 tokens, as fast as the buffer answers, in the
three durability modes by turns.  Goals: ten times the samples a second of the demo (about 256 in
0.4 s); a batch costs the buffer at most 10 ms of CPU time in a run of any length (the last third of
the batches against the first says whether it grows)."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from lib import rounds

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport.sockets import PeerSocket

HERE = Path(__file__).resolve().parent
GROUPS = 32
SIZE = 8
TOKENS = 24
LAG = 2
EVERY = 20
KEPT = 2


def trajectory(t: m.Ticket, sample: int, label: Label) -> m.Trajectory:
    tokens = np.arange(TOKENS, dtype="<i4").tobytes()
    return m.Trajectory(
        t.ticket,
        sample,
        t.attempt,
        tokens[:48],
        tokens,
        tokens,
        b"\1" * TOKENS,
        [m.Span(label, "", 0, TOKENS, label)],
        1.0,
        {},
        "stop",
        1.0,
        text="0123456789" * 2,
        prompt_text="sort 123=",
        segments=[("model", 0, TOKENS)],
    )


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Buffer:
    """A buffer process, and a peer that plays generator and learner."""

    def __init__(self, work: Path, mode: str, steps: int) -> None:
        sets = [
            f"runs={str(work)!r}",
            f"durability.mode={mode!r}",
            f"learner.steps={steps}",
            f"staleness.max_lag={LAG}",
            "evaluation.every=0",
            f"learner.groups={GROUPS}",
            f"learner.group_size={SIZE}",
            "evaluation.final_prompts=1",
            "evaluation.ood_prompts=0",
        ]
        config = load.load(HERE.parent / "configs" / "demo.toml", sets)
        self.dir = work / mode
        rundir.ensure(config, load.dump(config), self.dir)
        argv = [
            sys.executable,
            "-m",
            "asyncrl.cli",
            "buffer",
            str(self.dir / "config.toml"),
            "--run-dir",
            str(self.dir),
        ]
        self.process = subprocess.Popen(
            argv,
            cwd=HERE.parent,
            stderr=(work / f"{mode}.log").open("w"),
            env=os.environ | {"PYTHONPATH": str(HERE.parent)},
        )
        self.run = rundir.run_id(self.dir)
        self.steps = steps
        self.socket = PeerSocket(rundir.buffer_address(config, self.dir))
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def wait(self, kind: type[Any]) -> Any:
        while (reply := self.socket.recv(30)) is not None:
            if isinstance(reply, kind):
                return reply
        sys.exit(f"the buffer did not answer with {kind.__name__}; its log is {self.dir}.log")

    def begin(self) -> None:
        source = m.WeightsSource(1, "here", "", "")
        self.socket.send(
            m.LearnerHello(m.PROTOCOL, self.run, 1, Label(1, 0), None, "d", 0, 0, LAG, source, [])
        )
        self.wait(m.Welcome)
        self.socket.send(
            m.GeneratorHello(m.PROTOCOL, self.run, "generator-0", 1, 256, "here", os.getpid())
        )
        self.number = self.sequence = 0
        self.label = Label(1, 0)
        self.serve()  # evaluation of version 0, and the first batch

    def serve(self) -> None:
        """Tickets for a batch, and their answers in frames of 32."""
        left = GROUPS * SIZE if self.number < self.steps else 0
        while left > 0:
            self.sequence += 1
            self.socket.send(m.Want("generator-0", 1, self.sequence, 64, self.label))
            tickets = self.wait(m.Tickets).tickets
            made = [
                trajectory(t, s, t.exact_version or t.min_version)
                for t in tickets
                for s in t.samples
            ]
            left -= sum(len(t.samples) for t in tickets if t.kind == "train")
            for at in range(0, len(made), 32):
                self.socket.send(m.Deliver("generator-0", 1, at, made[at : at + 32]))
                self.wait(m.Acks)

    def batches(self, count: int) -> None:
        """`count` batches: answers, ask, commit, and a checkpoint now and then."""
        for _ in range(count):
            began = time.perf_counter()
            cpu = cpu_of(self.process.pid)
            self.serve()
            self.socket.send(m.Ask(1, self.number))
            batch = self.wait(m.Batch)
            assert len(batch.samples) == GROUPS * SIZE
            self.number += 1
            self.label = Label(1, self.number)
            self.socket.send(
                m.Commit(1, batch.number, self.label, f"d{self.number}", {"reward/mean": 1.0})
            )
            self.wait(m.Committed)
            if self.number % EVERY == 0:
                self.socket.send(m.Checkpointed(1, max(0, self.number - EVERY * (KEPT - 1))))
            self.wall.append(time.perf_counter() - began)
            self.cpu.append(cpu_of(self.process.pid) - cpu)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.socket.close()
        rundir.clean(self.dir)


def consume(inbox: Any, back: Any) -> None:
    while (batch := inbox.get()) is not None:
        back.put(len(batch))


class Queue:
    """The rival: frames of samples through a multiprocessing.Queue to a process that counts them.
    It promises nothing.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.inbox = context.Queue()
        self.back = context.Queue()
        self.process = context.Process(target=consume, args=(self.inbox, self.back), daemon=True)
        self.process.start()

    def batches(self, count: int) -> None:
        ticket = m.Ticket(
            0, 1, "train", m.Prompt(0, "p"), list(range(SIZE)), m.Sampling(), Label(1, 0), None, 0
        )
        for _ in range(count):
            made = [trajectory(ticket, s, Label(1, 0)) for _ in range(GROUPS) for s in range(SIZE)]
            for at in range(0, len(made), 32):
                self.inbox.put(made[at : at + 32])
            for _ in range(0, len(made), 32):
                self.back.get()

    def end(self) -> None:
        self.inbox.put(None)
        self.process.join()


def main() -> None:
    p = rounds.parser(__doc__)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--batches", type=int, default=10, help="in a round")
    args = p.parse_args()
    n_rounds, per = (2, 5) if args.quick else (args.rounds, args.batches)
    with tempfile.TemporaryDirectory() as work:
        modes = {
            mode: Buffer(Path(work), mode, (n_rounds + 2) * per)
            for mode in ("memory", "process", "disk")
        }
        for b in modes.values():
            b.begin()
        rival = Queue()
        times = rounds.interleave(
            {k: lambda b=b: b.batches(per) for k, b in modes.items()}
            | {"queue": lambda: rival.batches(per)},
            n_rounds,
        )
        for b in [*modes.values(), rival]:
            b.end()
    rates = {k: round(per * GROUPS * SIZE / rounds.median(times, k)) for k in times}
    third = max(1, n_rounds * per // 3)
    cpu = {
        k: {
            "first_ms": 1e3 * sum(b.cpu[per : per + third]) / third,
            "last_ms": 1e3 * sum(b.cpu[-third:]) / third,
        }
        for k, b in modes.items()
    }
    goals = [
        rounds.goal(
            f"{k}: samples/s over the socket",
            rates[k],
            6400,
            at_least=True,
            of_queue=round(rates[k] / rates["queue"], 3),
        )
        for k in modes
    ]
    goals += [
        rounds.goal(
            f"{k}: CPU ms of a batch, last third",
            v["last_ms"],
            10,
            at_least=False,
            first_third=round(v["first_ms"], 1),
        )
        for k, v in cpu.items()
    ]
    rounds.report(
        "buffer",
        goals,
        {
            "what": "buffer process, 32 x 8 samples of 24 tokens a batch",
            "samples_per_s": rates,
            "cpu": cpu,
            "times": times,
        },
        args,
    )


if __name__ == "__main__":
    main()
