"""The generator process: tickets in, trajectories out, with the newest announced weights.

One pass of the loop: read replies, load the weights that the schedule wants, start samples, decode
a few steps, collect rewards, deliver.  It never waits while a row is live; with none, it waits for
the buffer, and says for what.  The steps from ticket to trajectory are those of `actors.turn`; here
is what a process adds: messages, weights that may be gone, leases, waits."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from actors.delay import decode_steps
from actors.delivery import Outbox
from actors.engine import Completion, Engine, engine_for
from actors.gateway.generator_calls import CallPeer, CallTurn
from actors.turn import (
    DECODE_STEPS,
    IDLE_POLL_S,
    RENEW_S,
    GeneratorTurn,
    PromptTooLong,
    failed_trajectory,
    trajectory,
)
from actors.weights_receiver import PulledWeights, WeightsReceiver
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, NothingToDo, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import BUFFER, ProcessWait, WaitLog
from asyncrl.models.devices import bind
from asyncrl.records import buffer_leadership
from asyncrl.records.rundir import current_buffer_address, is_finished, note_longest_prompt, run_id
from asyncrl.records.trace import Tracer
from asyncrl.transport import chunks
from asyncrl.transport.sockets import PeerSocket, wait

# seconds for DECODE_STEPS: a slow engine makes fewer, as leases are renewed and rewards delivered
# between two calls
CALL_S = 2.0
GREET_S = 5.0
ENDED_S = 2.0  # of the buffer's silence, before it is looked up whether the run has ended
# nothing to decode, rewards outstanding: the core may be the one that computes them
REWARD_POLL_S = 0.002


class LoadedWeights(NamedTuple):
    """The weights in the engine."""

    label: Label
    digest: str


class MissingWeights(NamedTuple):
    """Where weights were announced and are not, and since when (CLOCK_MONOTONIC seconds)."""

    source: m.WeightsSource
    since: float


@dataclass
class GeneratorUsage:
    """What this generator has made, and what its time went into: sums since its start."""

    tokens: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    swap_s: float = 0.0
    swaps: float = 0.0
    reward_idle_s: float = 0.0  # of the idle seconds, those in which rewards were waited for

    def metrics(self) -> dict[str, float]:
        return {f"generator/{name}": value for name, value in asdict(self).items()}


class Generator:
    """One generator.  `loop` returns when the run is finished or it was told to end."""

    def __init__(self, config: Config, run_dir: Path, index: int, engine: Engine) -> None:
        self.config = config
        self.run_dir = run_dir
        self.producer = f"generator-{index}"
        self.session = time.time_ns()
        self.run = run_id(run_dir)
        self.lockstep = config.staleness.limit == 0 and config.generators == 1
        self.calls: CallPeer | None = None  # what it draws when samples are sessions
        self.turn: GeneratorTurn
        if config.agent.uses_sessions:
            self.lockstep = False
            self.turn = turn = CallTurn(config, engine)
            self.calls = CallPeer(turn, run_dir, self.producer, self.session)
        else:
            self.turn = GeneratorTurn(config, engine, lockstep=self.lockstep, run_dir=run_dir)
        self.engine = engine
        self.schedule = self.turn.schedule
        self.rewards = self.turn.rewards
        self.judged = self.turn.judged
        self.tracer = Tracer(run_dir, self.producer)
        self.reward_tracer = (
            Tracer(run_dir, f"{self.producer}-rewards") if self.rewards.pool is not None else None
        )
        if self.reward_tracer is not None:
            self.rewards.timed = self.reward_tracer.add
        self.outbox = Outbox(config.wires, self.producer, self.session)
        self.weights = WeightsReceiver(config, self.producer)
        self.socket = PeerSocket(
            current_buffer_address(config, run_dir),
            config.wires.curve_dir,
            self.producer,
            run=self.run,
        )
        self.socket.find = self.describe_buffer_address
        self.loaded: LoadedWeights | None = None
        self.longest_prompt = 0
        self.steps = DECODE_STEPS  # of the next decode call
        self.want_sequence = 0
        self.want_sent = 0.0
        self.read_until = time.monotonic()  # the end of the last `read`
        self.lacking = False  # weights are to be loaded, and not to be had now
        self.gone: MissingWeights | None = None
        limits = config.wires.connect_s, config.watchdog.startup_s
        self.patience_s = math.inf if os.environ.get("ASYNCRL_SUPERVISED") else max(limits)
        self.asked = 0
        self.ending = self.over = False  # told to end; told that the run is over
        # when the first of the requests that nothing has answered yet was sent; 0: none
        self.unanswered = 0.0
        self.ever_heard = False
        self.renewed = self.greeted = 0.0
        self.spent = GeneratorUsage()
        self.idle_since = time.monotonic()
        self.waiting_for = "the buffer's first answer"
        self.waiting_since = time.monotonic()
        self.wait_log = WaitLog(min(10.0, config.watchdog.floor_s / 2))

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self) -> None:
        self.greet()
        while True:
            self.read()
            if self.ending or self.over:
                break
            self.swap()
            self.admit()
            self.decode()
            self.collect()
            self.deliver()
            self.renew()  # first: what is held here is not granted again
            self.want()
        if not self.over:
            self.shut_down()
        elif self.loaded is None:
            raise NothingToDo(
                f"the run in {self.run_dir} has ended, all its {self.config.learner.steps} steps "
                f"are made: {self.producer} came too late"
            )

    def request(self, message: m.FromPeer) -> None:
        """Send what the buffer answers, each in its own time: silence counts from here."""
        self.unanswered = self.unanswered or time.monotonic()
        self.socket.send(message)

    def greet(self) -> None:
        """Say who this is; again and again, as a buffer that was started anew does not know."""
        hello = m.GeneratorHello(
            protocol=m.PROTOCOL,
            run=self.run,
            producer=self.producer,
            session=self.session,
            slots=self.engine.slots,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self.request(hello)
        self.greeted = time.monotonic()

    def read(self) -> None:
        """Handle what has arrived; with nothing to do, wait a little for more."""
        timeout = 0.0 if self.engine.active else REWARD_POLL_S if self.judged else IDLE_POLL_S
        unread = (self.read_until, time.monotonic())
        if self.calls is not None:
            wait([self.socket, self.calls.socket], [], timeout)
            timeout = 0.0
            self.calls.read()
        while (reply := self.socket.recv(timeout)) is not None:
            timeout = 0.0
            self.unanswered = 0.0
            self.ever_heard = True
            if isinstance(reply, m.TicketGrant):
                self.on_tickets(reply)
            elif isinstance(reply, m.DeliveryAcks) and reply.session == self.session:
                self.outbox.on_acks(reply, time.monotonic(), unread)
                self.schedule.announce(reply.announcement)
            elif isinstance(reply, m.HeartbeatReply):
                self.schedule.announce(reply.announcement)
                if self.calls is None:
                    self.schedule.refuse_up_to(reply.attempts)
            elif isinstance(reply, m.UnknownSession) and reply.session == self.session:
                self.greet()
            elif isinstance(reply, m.Refusal):
                error = AsyncrlError(reply.reason)
                error.exit_code = reply.exit_code
                raise error
        self.read_until = time.monotonic()
        silent = time.monotonic() - self.unanswered if self.unanswered else 0.0
        if self.socket.find_moved_buffer(silent):
            self.unanswered = silent = 0.0
            self.asked = 0
            self.greet()
        if silent > ENDED_S and is_finished(self.run_dir, self.config.learner.steps):
            # the buffer has gone without telling this one: it decoded, or was still starting
            self.over = True
            return
        if silent > self.config.wires.connect_s:
            raise PeerUnreachable(
                f"the buffer at {self.socket.address} has not answered for {silent:.0f} s "
                "(wires.connect_s); "
                "start it with `asyncrl buffer`, or set wires.address"
            )

    def describe_buffer_address(self) -> str:
        """Where the buffer is, by what others know: the run directory where it is shared, else the
        learner, who gives the weights.
        """
        said = self.schedule.announced
        shared = buffer_leadership.directory(self.run_dir).exists()
        if shared or said is None or not said.source.address or self.weights.local(said.source):
            return current_buffer_address(self.config, self.run_dir)
        return chunks.buffer_of(self.config, said.source, self.producer)

    def on_tickets(self, reply: m.TicketGrant) -> None:
        if reply.session != self.session:
            return
        self.schedule.announce(reply.announcement)
        if reply.sequence == self.want_sequence:
            self.asked = 0
        self.turn.accept_tickets(reply.tickets)
        self.over = self.over or reply.finished

    def swap(self) -> None:
        """End what an older epoch left; load the version that the schedule wants, between two
        decode steps.
        """
        for held in self.schedule.outdated():
            self.engine.abort(self.schedule.drop(held))
            if self.calls is not None:
                self.calls.turn.drop_call(held.ticket.ticket)
        goal = self.schedule.next_version(self.loaded.label if self.loaded else None)
        said = self.schedule.announced
        self.lacking = said is None
        if said is None and self.ever_heard:
            self.wait("the learner: no weights have been announced yet")
        if goal is None or said is None:
            return
        began = time.monotonic()
        with self.tracer.span("weights"):
            got = self.pull(said, goal)
            # its slot was reused or is being written: the next announcement, or a retry, brings one
            if got is None:
                self.lacking = True
                if self.gone is None:
                    self.wait(f"weights {goal}")
                time.sleep(0.001 if self.gone is None or self.engine.active else IDLE_POLL_S)
                return
            tensors, digest, probe = got
            self.engine.load(tensors, goal, digest, probe)
        self.loaded = LoadedWeights(goal, digest)
        self.spent.swap_s += time.monotonic() - began
        self.spent.swaps += 1

    def pull(self, said: m.PolicyAnnouncement, goal: Label) -> PulledWeights | None:
        """Weights `goal` from where they were announced to be; None: not now.

        That place may be gone because its learner has died, and the next one needs its time to
        start; the buffer will then announce another.  Raises PeerUnreachable when the place stays
        gone for longer than any start takes; under a supervisor, whose watchdog judges, never."""
        try:
            got = self.weights.pull(said.source, goal, said.digest if goal == said.label else None)
        except (PeerUnreachable, FileNotFoundError) as error:
            if self.gone is None or self.gone.source != said.source:
                self.gone = MissingWeights(said.source, time.monotonic())
            gone_s = time.monotonic() - self.gone.since
            if gone_s > self.patience_s:
                raise PeerUnreachable(
                    f"weights {goal} have been gone for {gone_s:.0f} s: {error}; is the learner "
                    "running?"
                ) from error
            self.wait(
                f"weights {goal}, which are gone ({error}); the learner's next life brings others"
            )
            return None
        self.gone = None
        return got

    def admit(self) -> None:
        if self.loaded is None or self.engine.slots <= self.engine.active:
            return
        requests, refused = self.turn.requests(self.loaded.label)
        for sample in refused:
            self.fail(sample)
        if requests:
            with self.tracer.span("prefill", len(requests)):
                longest = max(len(request.prompt) for request in requests)
                if longest > self.longest_prompt:
                    self.longest_prompt = longest
                    note_longest_prompt(self.run_dir, self.producer, longest)
                self.engine.add(requests)

    def decode(self) -> None:
        now = time.monotonic()
        if not self.engine.active:
            self.spent.idle_s += now - self.idle_since
            if self.rewards.waiting:
                self.spent.reward_idle_s += now - self.idle_since
            self.idle_since = now
            return
        rows = self.engine.active
        made_before = self.engine.steps_made
        began = time.monotonic()
        answers = self.engine.step(self.steps)
        ended = time.monotonic()
        self.tracer.add("decode", began, ended, rows, self.engine.steps_made - made_before)
        took = ended - now
        if not self.lockstep:  # where the moments at which rows are filled must not hang on time
            self.steps = (
                max(1, min(DECODE_STEPS, int(self.steps * CALL_S / took)))
                if took > CALL_S
                else min(DECODE_STEPS, self.steps + 1)
            )
        for answer in answers:
            self.spent.tokens += len(answer.tokens)
            self.finished(answer)
        self.spent.busy_s += time.monotonic() - self.idle_since
        self.idle_since = time.monotonic()
        self.wait("")

    def finished(self, answer: Completion) -> None:
        written = self.turn.finished(answer)
        if written is None:
            return
        steps = decode_steps(self.config, written.ticket, answer.key[1], len(answer.tokens))
        step_s = self.spent.busy_s / max(self.engine.steps_made, 1)
        self.turn.late.hold(time.monotonic() + steps * step_s, answer.key)

    def fail(self, refused: PromptTooLong) -> None:
        """A sample that cannot be written: delivered as failed."""
        assert self.loaded is not None
        self.schedule.finish_sample(refused.key, 0)
        self.outbox.add(failed_trajectory(refused, *self.loaded))

    def collect(self) -> None:
        for written in self.turn.due(time.monotonic()):
            self.turn.submit(written)
        for written, result in self.turn.results():
            if result.failed and self.config.reward.on_error == "stop":
                raise AsyncrlError(
                    f"the reward function failed on prompt {written.ticket.prompt.id}: "
                    f"{result.failed} (reward.on_error = stop)"
                )
            self.outbox.add(trajectory(written, result))

    def deliver(self) -> None:
        if self.calls is not None:
            self.calls.send_report(time.monotonic(), self.engine.slots)
        for frame in self.outbox.frames(time.monotonic(), flush=not self.engine.active):
            self.socket.send(frame)

    def wait(self, what: str) -> None:
        """What it waits for from now on; "" when it has work."""
        if what != self.waiting_for:
            self.waiting_for = what
            self.waiting_since = time.monotonic()

    def waiting(self, now: float) -> ProcessWait | None:
        """What it waits for, as the others are told; None when it has work."""
        if not self.waiting_for:
            return None
        on = f"{self.producer}-rewards" if self.waiting_for == m.REWARDS_WAITED_FOR else BUFFER
        return ProcessWait(self.producer, self.waiting_for, on, now - self.waiting_since)

    def want(self) -> None:
        """Ask for samples (`actors.turn` says how many); one request at a time, repeated when
        unanswered.
        """
        now = time.monotonic()
        if self.calls is not None:
            self.follow(now)
            return
        free = self.turn.samples_to_request(unsent=bool(self.outbox.fresh))
        if self.outbox.is_full:
            self.wait("credit: the buffer has not acknowledged what was delivered")
            return
        due = free > self.asked or (self.asked and now - self.want_sent > self.config.wires.retry_s)
        if free > 0 and due:
            self.want_sequence += 1
            self.want_sent = now
            self.asked = free
            holding = self.loaded.label if self.loaded else None
            self.socket.send(
                m.TicketRequest(self.producer, self.session, self.want_sequence, free, holding)
            )
        if (
            not self.engine.active
            and not self.judged
            and not self.schedule.waiting()
            and not self.lacking
        ):
            self.wait("a ticket: the staleness limit leaves no room, or all tickets are out")
        elif not self.engine.active and self.rewards.waiting:
            self.wait(m.REWARDS_WAITED_FOR)

    def follow(self, now: float) -> None:
        """With calls to draw: ask for no sample, to be told of new weights and of the run's end."""
        if now - self.want_sent > self.config.wires.retry_s:
            self.want_sequence += 1
            self.want_sent = now
            holding = self.loaded.label if self.loaded else None
            self.socket.send(
                m.TicketRequest(self.producer, self.session, self.want_sequence, 0, holding)
            )
        if not self.engine.active and not self.schedule.waiting() and not self.lacking:
            self.wait("a call: sessions are with their environments, or there are none")

    def judging(self) -> list[tuple[int, int]]:
        """(ticket, attempt) of what is written and waits only for its rewards: nothing of it is in
        the engine or to come.
        """
        if not self.rewards.is_working:
            return []
        return sorted({(t, a) for t, _, a in self.judged if (t, a) not in self.schedule.held})

    def unacknowledged(self) -> list[tuple[int, int]]:
        """(ticket, attempt) of all that is written and not acknowledged."""
        return sorted({(t, a) for t, _, a in self.judged} | self.outbox.tickets())

    def renew(self) -> None:
        now = time.monotonic()
        if now - self.renewed < RENEW_S:
            return
        self.renewed = now
        if now - self.greeted > GREET_S:
            self.greet()
        waiting = self.waiting(now)
        buffer = f"the buffer at {self.socket.address}"
        for line in self.wait_log.lines([waiting._replace(on=buffer)] if waiting else []):
            print(line, file=sys.stderr, flush=True)
        progress = self.turn.progress()
        self.request(
            m.LeaseRenewal(
                producer=self.producer,
                session=self.session,
                progress=progress,
                stats=self.spent.metrics()
                | self.rewards.numbers()
                | self.weights.numbers()
                | self.outbox.numbers()
                | self.engine.numbers(),
                waiting=waiting,
                judging=self.judging(),
                drawn=self.outbox.drawn.on_report(progress),
                written=self.unacknowledged(),
                # calls are numbered otherwise
                taken=self.schedule.newest_attempt if self.calls is None else 0,
            )
        )

    def shut_down(self) -> None:
        """Told to end: what is finished goes out, and how much was drawn of the rest, which is
        lost.
        """
        for frame in self.outbox.frames(time.monotonic(), flush=True):
            self.socket.send(frame)
        self.renewed = 0.0
        self.renew()

    def close(self) -> None:
        """Whatever ended it: the buffer hears that its leases are free, unless there is no buffer
        any more.
        """
        self.rewards.close()
        self.tracer.close()
        if self.reward_tracer is not None:
            self.reward_tracer.close()
        self.weights.close()
        if self.calls is not None:
            self.calls.close()
        if not self.over:
            self.socket.send(m.GeneratorGoodbye(self.producer, self.session))
        self.socket.close()


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run generator `index` of the run in `run_dir` until the run is finished, or SIGTERM asks for
    its end (False).
    """
    bind(config.generator.gpus, index, "generator.gpus")
    engine = engine_for(config)
    generator = Generator(config, run_dir, index, engine)

    def stop(_number: int, _frame: object) -> None:
        generator.ending = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ.get("ASYNCRL_SUPERVISED") else stop)
    try:
        generator.loop()
    finally:
        generator.close()
    print(
        f"{generator.producer}: ended after {generator.spent.tokens:.0f} tokens",
        file=sys.stderr,
    )
    return generator.over
