"""Compare the buffer, as a process with its real socket, with a queue and with a bare store.

The queue is a `multiprocessing.Queue` that carries pickled samples, the simplest rival.  The bare
store is a process that decodes the same frames with msgspec, keeps the samples in a list, encodes
batches and replies over zmq: what any store in Python has to do.  It checks nothing, has no
tickets, no limit, no ledger and no metrics, and loses everything with its process.

    OMP_NUM_THREADS=1 python benchmarks/buffer.py [--quick] [--json]

Proves: the buffer does not limit a run.  One process acts as generator and learner: tickets for
64 samples at a time, frames of 32 samples under two versions that do not wait for each other's
acknowledgement, a renewal and a learner's message each batch, a status request of the live view
every fifth batch, batch requests, commits with the metrics of a real step, checkpoints.  Every
sample is validated as in a run: ids against the vocabulary, log-probabilities, spans.  Batches of
32 x 8 samples of 24 tokens, as fast as the buffer replies, in the three durability modes by
turns.

Goals: a batch costs the buffer at most 5 times the CPU time, of all its threads, that it costs the
bare store in the same rounds, in a run of any length (the last third of the batches counts); 12,000
samples a second in `memory`, 6,400 in `disk`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
from lib import rounds
from lib.answers import PROMPT, VOCABULARY, answer

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import rundir
from asyncrl.transport.sockets import PeerSocket

HERE = Path(__file__).resolve().parent
GROUPS = 32
SIZE = 8
TOKENS = 24
MOST_TOKENS, CONTEXT = 56, 64  # of configs/demo.toml
FRAME = 32
LAG = 2
EVERY = 20
KEPT = 2
AHEAD = 2  # batches written before they are asked for: lag 2, as the limit has it
LOOKS = 5  # batches between two looks of a live view
PATIENCE_S = 600.0  # for an answer of the buffer, whose start may be slow
STATS = {f"generator/{name}": 1.0 for name in ("tokens", "busy_s", "idle_s", "swap_s")}
TO_LEARNER = (m.Welcome, m.Batch, m.CommitReply, m.RunStatus)
BARE_CPU_GOAL = 5.0  # CPU of a batch over the bare store's
GOALS = {"memory": 12_000, "process": 6_400, "disk": 6_400}


def metrics_of_a_step(work: Path) -> dict[str, float]:
    """The metrics that a learner commits with a batch, from one real step."""
    import torch
    from lib.learner_batch import batch, config

    from asyncrl.models.policy import build_model
    from learner.step import LearnerCore

    torch.set_num_threads(1)
    build_model(work / "model", "0123456789abcdefghij")
    return LearnerCore(config(work / "model"), work / "model").train(batch())


class Buffer:
    """A buffer process, and a peer that acts as generator and learner: frames of at most
    `wires.frame_bytes`, and no more bytes without acknowledgement than `wires.credit_bytes`.

    tokens: of an answer; every: batches between checkpoints, which let the buffer forget; name: of
    the run; curve_dir: keys, then each role speaks with its own."""

    def __init__(
        self,
        work: Path,
        mode: str,
        steps: int,
        values: dict[str, float],
        *,
        tokens: int = TOKENS,
        groups: int = GROUPS,
        every: int = EVERY,
        name: str = "",
        address: str = "",
        curve_dir: str = "",
    ) -> None:
        sets = [
            f"runs={str(work)!r}",
            f"durability.mode={mode!r}",
            f"learner.steps={steps}",
            f"staleness.max_lag={LAG}",
            "staleness.wait=0",  # the limit is filled
            "evaluation.every=0",
            f"learner.groups={groups}",
            f"learner.group_size={SIZE}",
            f"generator.max_new_tokens={max(tokens, MOST_TOKENS)}",
            f"generator.context={max(tokens + PROMPT, CONTEXT)}",
            f"wires.address={address!r}",
            f"wires.curve_dir={curve_dir!r}",
            "wires.lease_s=3600.0",  # tickets are held while others have their turns
            "evaluation.final_prompts=1",
            "evaluation.ood_prompts=0",
        ]
        config = load.load(HERE.parent / "configs" / "demo.toml", sets)
        name = name or mode
        self.dir = work / name
        rundir.ensure(load.dump(config), self.dir)
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
            stderr=(work / f"{name}.log").open("w"),
            env=os.environ | {"PYTHONPATH": str(HERE.parent)},
        )
        self.run = rundir.read_run_id(self.dir)
        self.steps = steps
        self.values = values
        self.tokens = tokens
        self.groups = groups
        self.every = every
        bytes_each = 9 * tokens + 4 * PROMPT + 400
        self.frame = max(1, min(FRAME, config.wires.frame_bytes // bytes_each))
        self.window = max(1, config.wires.credit_bytes // (self.frame * bytes_each))
        where = rundir.get_buffer_address(config, self.dir)
        self.socket = PeerSocket(where, curve_dir, "generator-0", run=self.run)
        # without keys the sender is not checked: one connection acts as both
        self.learner = (
            PeerSocket(where, curve_dir, "learner", run=self.run) if curve_dir else self.socket
        )
        self.batch: m.Batch | None = None  # the last one
        self.taken = 0  # samples of all batches
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.out: list[m.Ticket] = []  # being written

    def wait(self, kind: Any) -> Any:
        socket = self.learner if kind in TO_LEARNER else self.socket
        while (reply := socket.recv(PATIENCE_S)) is not None:
            if isinstance(reply, kind):
                return reply
        sys.exit(f"the buffer did not answer with {kind}; its log is {self.dir}.log")

    def begin(self) -> None:
        source = m.WeightsSource(1, "here", "", "")
        self.learner.send(
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
        left = self.groups * SIZE if self.number + AHEAD < self.steps else 0
        while left > 0:
            self.sequence += 1
            most = min(64, left)
            self.socket.send(m.TicketRequest("generator-0", 1, self.sequence, most, self.label))
            tickets = self.wait(m.TicketGrant).tickets
            self.out += tickets
            left -= sum(len(ticket.samples) for ticket in tickets if ticket.kind == "train")

    def hand_over(self) -> None:
        """Their answers in frames; the acknowledgements come behind."""
        made = []
        for ticket in self.out:
            first = ticket.exact_version or ticket.min_version
            last = ticket.exact_version or self.label
            made += [answer(ticket, sample, first, last, self.tokens) for sample in ticket.samples]
            self.drawn += self.tokens * len(ticket.samples) * (ticket.kind == "train")
        self.out = []
        unanswered = 0
        for at in range(0, len(made), self.frame):
            if unanswered == self.window:
                self.wait(m.DeliveryAcks)
                unanswered -= 1
            frame = made[at : at + self.frame]
            self.socket.send(m.Delivery("generator-0", 1, at, frame, self.drawn))
            unanswered += 1
        for _ in range(unanswered):
            self.wait(m.DeliveryAcks)

    def batches(self, count: int) -> None:
        """`count` batches: answers, ask, commit, and a checkpoint now and then."""
        for _ in range(count):
            began = time.perf_counter()
            cpu = rounds.cpu_of(self.process.pid)
            self.learner.send(m.BatchRequest(1, self.number))
            self.batch = batch = self.wait(m.Batch)
            assert len(batch.samples) == self.groups * SIZE
            self.taken += len(batch.samples)
            self.socket.send(m.LeaseRenewal("generator-0", 1, [], STATS, None, drawn=self.drawn))
            self.learner.send(m.LearnerProgress("learner", None, {}, os.getpid(), 1))
            self.number += 1
            self.label = Label(1, self.number)
            self.learner.send(m.Commit(1, batch.number, self.label, f"d{self.number}", self.values))
            self.wait(m.CommitReply)
            self.hand_over()
            self.take()
            if self.number % self.every == 0:
                kept = max(0, self.number - self.every * (KEPT - 1))
                self.learner.send(m.CheckpointNotice(1, kept))
            if self.number % LOOKS == 0:
                self.learner.send(m.StatusRequest())
                self.wait(m.RunStatus)
            self.wall.append(time.perf_counter() - began)
            self.cpu.append(rounds.cpu_of(self.process.pid) - cpu)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.socket.close()
        if self.learner is not self.socket:
            self.learner.close()
        rundir.clean(self.dir)


def frames() -> list[list[m.Trajectory]]:
    """A batch's samples in frames."""
    zero = Label(1, 0)
    samples = list(range(SIZE))
    ticket = m.Ticket(0, 1, "train", m.Prompt(0, "p"), samples, m.SamplingSettings(), zero, None, 0)
    made = [answer(ticket, sample, zero, zero, TOKENS) for _ in range(GROUPS) for sample in samples]
    return [made[at : at + FRAME] for at in range(0, len(made), FRAME)]


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
        for _ in range(count):
            made = frames()
            for frame in made:
                self.inbox.put(frame)
            for _ in made:
                self.back.get()

    def end(self) -> None:
        self.inbox.put(None)
        self.process.join()


def store(address: str) -> None:
    """The bare store's process.  It ends with a message that is neither a delivery nor a batch
    request."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    decode = msgspec.msgpack.Decoder(m.FromPeer).decode
    encode = msgspec.msgpack.Encoder().encode
    kept: list[m.Trajectory] = []
    reply: m.DeliveryAcks | m.Batch
    while True:
        peer, body = socket.recv_multipart()
        message = decode(body)
        if isinstance(message, m.Delivery):
            kept += message.samples
            acks: list[tuple[int, int, int, m.Disposition]] = [
                (x.ticket, x.sample, x.attempt, "accepted") for x in message.samples
            ]
            reply = m.DeliveryAcks(1, acks, 0, None)
        elif isinstance(message, m.BatchRequest):
            batch, kept = kept[: GROUPS * SIZE], kept[GROUPS * SIZE :]
            zeros = [0] * len(batch)
            runs = [[(0, TOKENS, 0)] for _ in batch]
            reply = m.Batch(1, message.number, batch, zeros, zeros, runs, {}, 0, {})
        else:
            return
        socket.send_multipart([peer, encode(reply)])


class BareStore:
    """A bare store's process, and a peer that delivers to it and takes batches from it."""

    def __init__(self, work: Path) -> None:
        address = f"ipc://{work}/bare"
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=store, args=(address,), daemon=True)
        self.process.start()
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.connect(address)
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder(m.FromBuffer).decode
        self.number = 0
        self.cpu: list[float] = []

    def batches(self, count: int) -> None:
        assert self.process.pid is not None
        for _ in range(count):
            before = rounds.cpu_of(self.process.pid)
            made = frames()
            for at, frame in enumerate(made):
                self.socket.send(self.encode(m.Delivery("generator-0", 1, at, frame, 0)))
            self.socket.send(self.encode(m.BatchRequest(1, self.number)))
            for _ in made:
                assert isinstance(self.decode(self.socket.recv()), m.DeliveryAcks)
            batch = self.decode(self.socket.recv())
            if batch.samples != [sample for frame in made for sample in frame]:
                raise RuntimeError(f"the bare store changed the samples of batch {self.number}")
            self.number += 1
            self.cpu.append(rounds.cpu_of(self.process.pid) - before)

    def end(self) -> None:
        self.socket.send(self.encode(m.StatusRequest()))
        self.process.join()
        self.socket.close()


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
        bare = BareStore(Path(work))
        times = rounds.interleave(
            {k: lambda b=b: b.batches(per) for k, b in modes.items()}
            | {"queue": lambda: rival.batches(per), "bare store": lambda: bare.batches(per)},
            n_rounds,
        )
        for mode in modes.values():
            mode.end()
        rival.end()
        bare.end()
    rates = {k: round(per * GROUPS * SIZE / rounds.median(times, k)) for k in times}
    third = max(1, n_rounds * per // 3)
    cpu = {
        k: {
            "first_ms": 1e3 * sum(b.cpu[per : per + third]) / third,
            "last_ms": 1e3 * sum(b.cpu[-third:]) / third,
        }
        for k, b in modes.items()
    }
    bare_ms = 1e3 * statistics.fmean(bare.cpu[per:])
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
            f"{k}: CPU of a batch over the bare store's, last third",
            v["last_ms"] / bare_ms,
            BARE_CPU_GOAL,
            at_least=False,
            first_third=round(v["first_ms"] / bare_ms, 2),
            ms=round(v["last_ms"], 1),
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
            "bare_store_ms": round(bare_ms, 2),
            "times": times,
        },
        args,
    )


if __name__ == "__main__":
    main()
