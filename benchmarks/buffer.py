"""The buffer over its real socket and in its own process, against the plainest rival: a
`multiprocessing.Queue` of pickled samples.

    OMP_NUM_THREADS=1 python benchmarks/buffer.py [--quick] [--json]

Proves: the buffer is no bottleneck.  One process plays generator and learner as they are: tickets
for 64 samples at a time, frames of 32 answers by weights of two versions that do not wait for each
other's acknowledgement, a renewal and a word of the learner a batch, every fifth batch a look of
the live view, asks, commits with the metrics of a real learner's step, checkpoints.  Every answer
is validated as in a run: ids against the vocabulary, log-probabilities, spans.  Batches of 32 x 8
samples of 24 tokens, as fast as the buffer answers, in the three durability modes by turns.

Goals: a batch costs the buffer at most 10 ms of CPU time in a run of any length (the last third of
the batches against the first says whether it grows), all its threads counted; 12,000 samples a
second in `memory`, 6,400 in `disk`."""

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
FRAME = 32
LAG = 2
EVERY = 20
KEPT = 2
AHEAD = 2  # batches written before they are asked for: lag 2, as the limit has it
LOOKS = 5  # batches between two looks of a live view
VOCABULARY = 23
RANDOM = np.random.default_rng(0)
PROMPT_IDS = RANDOM.integers(3, VOCABULARY, 12).astype("<i4").tobytes()
IDS = RANDOM.integers(3, VOCABULARY, TOKENS).astype("<i4").tobytes()
LOGPROBS = (-3.0 + 0.5 * RANDOM.standard_normal(TOKENS)).clip(max=-0.01).astype("<f4").tobytes()
STATS = {f"generator/{name}": 1.0 for name in ("tokens", "busy_s", "idle_s", "swap_s")}
GOALS = {"memory": 12_000, "process": 6_400, "disk": 6_400}


def trajectory(ticket: m.Ticket, sample: int, first: Label, last: Label) -> m.Trajectory:
    """An answer; its second half by `last`, where that is another version."""
    spans = [m.Span(first, "", 0, TOKENS, first)]
    if last != first:
        spans = [m.Span(first, "", 0, 12, first), m.Span(last, "", 12, TOKENS, first)]
    return m.Trajectory(
        ticket.ticket,
        sample,
        ticket.attempt,
        PROMPT_IDS,
        IDS,
        LOGPROBS,
        b"\1" * TOKENS,
        spans,
        float(sample % 2),
        {"exact": float(sample % 2)},
        "stop",
        1.0,
        text="0123456789" * 2,
        prompt_text="sort 123=",
        segments=[("model", 0, TOKENS)],
    )


def metrics_of_a_step(work: Path) -> dict[str, float]:
    """What a learner says of a batch: one step of a real one."""
    import torch
    from lib.learner_batch import batch, config

    from asyncrl.models.policy import build_model
    from learner.step import LearnerCore

    torch.set_num_threads(1)
    build_model(work / "model", "0123456789abcdefghij")
    return LearnerCore(config(work / "model"), work / "model").train(batch())


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, by the nanosecond and of every thread that lives."""
    return 1e-9 * sum(
        int((task / "schedstat").read_text().split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


class Buffer:
    """A buffer process, and a peer that plays generator and learner."""

    def __init__(self, work: Path, mode: str, steps: int, values: dict[str, float]) -> None:
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
        self.values = values
        self.socket = PeerSocket(rundir.buffer_address(config, self.dir), run=self.run)
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.out: list[m.Ticket] = []  # being written

    def wait(self, kind: Any) -> Any:
        while (reply := self.socket.recv(30)) is not None:
            if isinstance(reply, kind):
                return reply
        sys.exit(f"the buffer did not answer with {kind}; its log is {self.dir}.log")

    def begin(self) -> None:
        source = m.WeightsSource(1, "here", "", "")
        self.socket.send(
            m.LearnerHello(
                m.PROTOCOL,
                self.run,
                1,
                Label(1, 0),
                None,
                "d",
                0,
                0,
                LAG,
                source,
                [],
                vocabulary=VOCABULARY,
            )
        )
        self.wait(m.Welcome)
        self.socket.send(
            m.GeneratorHello(m.PROTOCOL, self.run, "generator-0", 1, 256, "here", os.getpid())
        )
        self.number = self.sequence = self.drawn = 0
        self.label = Label(1, 0)
        for _ in range(AHEAD):  # and the evaluation of version 0
            self.take()
            self.hand_over()
        self.take()

    def take(self) -> None:
        """Tickets for a batch: they are written while the learner makes another version."""
        left = GROUPS * SIZE if self.number + AHEAD < self.steps else 0
        while left > 0:
            self.sequence += 1
            self.socket.send(m.Want("generator-0", 1, self.sequence, 64, self.label))
            tickets = self.wait(m.Tickets).tickets
            self.out += tickets
            left -= sum(len(ticket.samples) for ticket in tickets if ticket.kind == "train")

    def hand_over(self) -> None:
        """Their answers in frames; the acknowledgements come behind."""
        made = []
        for ticket in self.out:
            first = ticket.exact_version or ticket.min_version
            last = ticket.exact_version or self.label
            made += [trajectory(ticket, sample, first, last) for sample in ticket.samples]
            self.drawn += TOKENS * len(ticket.samples) * (ticket.kind == "train")
        self.out = []
        for at in range(0, len(made), FRAME):
            self.socket.send(m.Deliver("generator-0", 1, at, made[at : at + FRAME], self.drawn))
        for _ in range(0, len(made), FRAME):
            self.wait(m.Acks)

    def batches(self, count: int) -> None:
        """`count` batches: answers, ask, commit, and a checkpoint now and then."""
        for _ in range(count):
            began = time.perf_counter()
            cpu = cpu_of(self.process.pid)
            self.socket.send(m.Ask(1, self.number))
            batch = self.wait(m.Batch)
            assert len(batch.samples) == GROUPS * SIZE
            self.socket.send(m.Renew("generator-0", 1, [], STATS, None, drawn=self.drawn))
            self.socket.send(m.Progress("learner", None, {}, os.getpid(), 1))
            self.number += 1
            self.label = Label(1, self.number)
            self.socket.send(m.Commit(1, batch.number, self.label, f"d{self.number}", self.values))
            self.wait(m.Committed)
            self.hand_over()
            self.take()
            if self.number % EVERY == 0:
                self.socket.send(m.Checkpointed(1, max(0, self.number - EVERY * (KEPT - 1))))
            if self.number % LOOKS == 0:
                self.socket.send(m.Watch())
                self.wait(m.Status)
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
            zero = Label(1, 0)
            made = [
                trajectory(ticket, sample, zero, zero)
                for _ in range(GROUPS)
                for sample in range(SIZE)
            ]
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
        most = (rounds.TRIES * n_rounds + 1) * per + AHEAD
        values = metrics_of_a_step(Path(work))
        modes = {mode: Buffer(Path(work), mode, most, values) for mode in GOALS}
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
            GOALS[k],
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
            "metrics_of_a_step": len(values),
            "samples_per_s": rates,
            "cpu": cpu,
            "times": times,
        },
        args,
    )


if __name__ == "__main__":
    main()
