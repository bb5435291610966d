"""The generator process: turn tickets into trajectories with the newest weights.

One pass of the loop reads replies, loads the weights that the schedule asks for, starts samples,
decodes a few steps, collects rewards and delivers. It never waits while a row is live. An idle
generator waits for the buffer and reports the reason. `actors.turn` holds the steps from ticket to
trajectory. This module adds what a process needs: messages, unavailable weights, leases and waits.
"""

from __future__ import annotations

import math
import os
import signal
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
    GeneratorTurn,
    PromptTooLong,
    failed_trajectory,
    trajectory,
)
from actors.weights_receiver import PulledWeights, WeightsReceiver
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.contract.waits import ProcessWait
from asyncrl.models.devices import bind
from asyncrl.records import buffer_leadership
from asyncrl.records.rundir import current_buffer_address, note_longest_prompt
from asyncrl.records.trace import Tracer
from asyncrl.transport import chunks
from asyncrl.transport.sockets import SessionPeer, wait

# upper bound for one decode call: a slow engine makes fewer steps a call, because leases are
# renewed and rewards delivered between calls
CALL_S = 2.0
# with rewards outstanding and nothing to decode: a longer sleep leaves the core to the rewards
REWARD_POLL_S = 0.002


class LoadedWeights(NamedTuple):
    """The weights in the engine."""

    label: Label
    digest: str


class MissingWeights(NamedTuple):
    """An unavailable source of weights, and since when (CLOCK_MONOTONIC seconds)."""

    source: m.WeightsSource
    since: float


@dataclass
class GeneratorUsage:
    """Tokens, swaps and seconds of this generator, summed since its start."""

    tokens: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    swap_s: float = 0.0
    swaps: float = 0.0
    reward_idle_s: float = 0.0  # the part of idle_s that waited for rewards

    def metrics(self) -> dict[str, float]:
        return {f"generator/{name}": value for name, value in asdict(self).items()}


class Generator(SessionPeer):
    """One generator process. `loop` returns at the run's end or after SIGTERM."""

    def __init__(self, config: Config, run_dir: Path, index: int, engine: Engine) -> None:
        self.producer = f"generator-{index}"
        self.session = time.time_ns()
        self.lockstep = config.staleness.limit == 0 and config.generators == 1
        self.calls: CallPeer | None = None  # the gateway's calls, when samples are sessions
        self.turn: GeneratorTurn
        if config.uses_sessions:
            self.lockstep = False
            self.turn = turn = CallTurn(config, engine)
            self.calls = CallPeer(config, turn, run_dir, self.producer, self.session)
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
        self.weights = WeightsReceiver(config, self.producer)
        super().__init__(config, run_dir, self.producer, self.session, engine.slots)
        self.outbox = Outbox(config.wires, self.producer, self.session)
        self.loaded: LoadedWeights | None = None
        self.longest_prompt = 0
        self.steps = DECODE_STEPS  # of the next decode call
        self.read_until = time.monotonic()  # the end of the last `read`
        self.unread = (self.read_until, self.read_until)  # see `Outbox.on_acks`
        self.lacking = False  # weights are wanted and unavailable now
        self.gone: MissingWeights | None = None
        limits = config.wires.connect_s, config.watchdog.startup_s
        self.patience_s = math.inf if os.environ.get("ASYNCRL_SUPERVISED") else max(limits)
        self.spent = GeneratorUsage()
        self.idle_since = time.monotonic()

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
            self.renew()  # before `want`: the buffer does not grant again what is reported as held
            self.want()
        if not self.over:
            self.shut_down()
        elif self.loaded is None:
            raise self.error_after_end(self.producer)

    def read(self) -> None:
        """Handle the messages that have arrived. When idle, wait a little for more."""
        timeout = 0.0 if self.engine.active else REWARD_POLL_S if self.judged else IDLE_POLL_S
        self.unread = (self.read_until, time.monotonic())
        if self.calls is not None:
            wait([self.socket, self.calls.socket], [], timeout)
            timeout = 0.0
            self.calls.read()
        self.read_replies(timeout)
        self.read_until = time.monotonic()

    def on_acks(self, reply: m.DeliveryAcks) -> None:
        self.outbox.on_acks(reply, time.monotonic(), self.unread)

    def announce(self, announcement: m.PolicyAnnouncement | None) -> None:
        self.schedule.announce(announcement)

    def accept_tickets(self, tickets: list[m.Ticket]) -> None:
        self.turn.accept_tickets(tickets)

    def on_attempts(self, attempts: int) -> None:
        if self.calls is None:
            self.schedule.refuse_up_to(attempts)

    def find_buffer_address(self) -> str:
        """Look up where the buffer listens now.

        A shared run directory holds its address. Without one, the learner that serves the weights
        gives it.
        """
        announcement = self.schedule.announced
        shared = buffer_leadership.directory(self.run_dir).exists()
        if (
            shared
            or announcement is None
            or not announcement.source.address
            or self.weights.local(announcement.source)
        ):
            return current_buffer_address(self.config, self.run_dir)
        return chunks.buffer_of(self.config, announcement.source, self.producer)

    def swap(self) -> None:
        """Abort samples of an older epoch, then load the version the schedule asks for.

        Runs between two decode steps.
        """
        for leased in self.schedule.outdated():
            self.engine.abort(self.schedule.drop(leased))
            if self.calls is not None:
                self.calls.turn.drop_call(leased.ticket.ticket)
        goal = self.schedule.next_version(self.loaded.label if self.loaded else None)
        announcement = self.schedule.announced
        self.lacking = announcement is None
        if announcement is None and self.ever_heard:
            self.waits_for("the learner: no weights have been announced yet")
        if goal is None or announcement is None:
            return
        began = time.monotonic()
        with self.tracer.span("weights"):
            pulled = self.pull(announcement, goal)
            # its slot was reused or is being written: the next announcement or a retry succeeds
            if pulled is None:
                self.lacking = True
                if self.gone is None:
                    self.waits_for(f"weights {goal}")
                time.sleep(0.001 if self.gone is None or self.engine.active else IDLE_POLL_S)
                return
            tensors, digest, probe = pulled
            self.engine.load(tensors, goal, digest, probe)
        self.loaded = LoadedWeights(goal, digest)
        self.spent.swap_s += time.monotonic() - began
        self.spent.swaps += 1

    def pull(self, announcement: m.PolicyAnnouncement, goal: Label) -> PulledWeights | None:
        """Copy weights `goal` from their source; None while they are unavailable.

        The source may be unreachable because its learner exited and the next one is still starting;
        the buffer then announces another source. Raises PeerUnreachable when the source stays
        unreachable for longer than any start takes, but never under a supervisor, whose watchdog
        decides.
        """
        try:
            pulled = self.weights.pull(
                announcement.source,
                goal,
                announcement.digest if goal == announcement.label else None,
            )
        except (PeerUnreachable, FileNotFoundError) as error:
            if self.gone is None or self.gone.source != announcement.source:
                self.gone = MissingWeights(announcement.source, time.monotonic())
            gone_s = time.monotonic() - self.gone.since
            if gone_s > self.patience_s:
                raise PeerUnreachable(
                    f"weights {goal} have been unavailable for {gone_s:.0f} s: {error}; is the "
                    "learner running?"
                ) from error
            self.waits_for(
                f"weights {goal}, which are unavailable ({error}); the learner's next incarnation "
                "announces others"
            )
            return None
        self.gone = None
        return pulled

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
        row_count = self.engine.active
        made_before = self.engine.steps_made
        began = time.monotonic()
        completions = self.engine.step(self.steps)
        ended = time.monotonic()
        self.tracer.add("decode", began, ended, row_count, self.engine.steps_made - made_before)
        took = ended - now
        if not self.lockstep:  # lockstep repeats bitwise, so no count may depend on time
            self.steps = (
                max(1, min(DECODE_STEPS, int(self.steps * CALL_S / took)))
                if took > CALL_S
                else min(DECODE_STEPS, self.steps + 1)
            )
        for completion in completions:
            self.spent.tokens += len(completion.tokens)
            self.finished(completion)
        self.spent.busy_s += time.monotonic() - self.idle_since
        self.idle_since = time.monotonic()
        self.waits_for("")

    def finished(self, completion: Completion) -> None:
        response = self.turn.finished(completion)
        if response is None:
            return
        steps = decode_steps(
            self.config, response.ticket, completion.key[1], len(completion.tokens)
        )
        step_s = self.spent.busy_s / max(self.engine.steps_made, 1)
        self.turn.late.hold(time.monotonic() + steps * step_s, completion.key)

    def fail(self, refused: PromptTooLong) -> None:
        """Deliver a sample that cannot be generated as failed."""
        assert self.loaded is not None
        self.schedule.finish_sample(refused.key, 0)
        self.outbox.add(failed_trajectory(refused, *self.loaded))

    def collect(self) -> None:
        for response in self.turn.due(time.monotonic()):
            self.turn.submit(response)
        for response, result in self.turn.results():
            if result.failed and self.config.reward.on_error == "stop":
                raise AsyncrlError(
                    f"the reward function failed on prompt {response.ticket.prompt.id}: "
                    f"{result.failed} (reward.on_error = stop)"
                )
            self.outbox.add(trajectory(response, result))

    def deliver(self) -> None:
        if self.calls is not None:
            self.calls.send_report(time.monotonic(), self.engine.slots)
        for frame in self.outbox.frames(time.monotonic(), flush=not self.engine.active):
            self.socket.send(frame)

    def current_wait(self, now: float) -> ProcessWait | None:
        wait = super().current_wait(now)
        if wait is not None and wait.what == m.REWARDS_WAITED_FOR:
            return wait._replace(on=f"{self.producer}-rewards")
        return wait

    def want(self) -> None:
        """Request tickets for as many samples as `actors.turn` says.

        One request at a time, repeated when unanswered.
        """
        if self.calls is not None:
            self.follow()
            return
        free = self.turn.samples_to_request(unsent=bool(self.outbox.fresh))
        if self.outbox.is_full:
            self.waits_for("credit: the buffer has not acknowledged what was delivered")
            return
        self.request_tickets(free, self.loaded.label if self.loaded else None)
        if (
            not self.engine.active
            and not self.judged
            and not self.schedule.waiting()
            and not self.lacking
        ):
            self.waits_for("a ticket: the staleness limit leaves no room, or all tickets are out")
        elif not self.engine.active and self.rewards.waiting:
            self.waits_for(m.REWARDS_WAITED_FOR)

    def follow(self) -> None:
        """Request announcements and the run's end, no samples: the gateway assigns calls."""
        if time.monotonic() - self.want_sent > self.config.wires.retry_s:
            self.send_ticket_request(0, self.loaded.label if self.loaded else None)
        if not self.engine.active and not self.schedule.waiting() and not self.lacking:
            self.waits_for("a call: sessions are with their environments, or there are none")

    def judging(self) -> list[tuple[int, int]]:
        """List the fully generated (ticket, attempt) pairs that wait only for rewards."""
        if not self.rewards.is_working:
            return []
        return sorted({(t, a) for t, _, a in self.judged if (t, a) not in self.schedule.held})

    def unacknowledged(self) -> list[tuple[int, int]]:
        """List the (ticket, attempt) pairs with generated and unacknowledged samples."""
        return sorted({(t, a) for t, _, a in self.judged} | self.outbox.tickets())

    def renewal(self, wait: ProcessWait | None) -> m.LeaseRenewal:
        progress = self.turn.progress()
        return m.LeaseRenewal(
            producer=self.producer,
            session=self.session,
            progress=progress,
            stats=self.spent.metrics()
            | self.rewards.numbers()
            | self.weights.numbers()
            | self.outbox.numbers()
            | self.engine.numbers(),
            waiting=wait,
            judging=self.judging(),
            drawn=self.outbox.drawn.on_report(progress),
            written=self.unacknowledged(),
            # calls have their own numbers
            taken=self.schedule.newest_attempt if self.calls is None else 0,
        )

    def shut_down(self) -> None:
        """After SIGTERM: send finished samples and report unfinished ones as lost."""
        for frame in self.outbox.frames(time.monotonic(), flush=True):
            self.socket.send(frame)
        self.renewed = 0.0
        self.renew()

    def close(self) -> None:
        """Release all resources and, unless the run is over, the buffer's leases."""
        self.rewards.close()
        self.tracer.close()
        if self.reward_tracer is not None:
            self.reward_tracer.close()
        self.weights.close()
        if self.calls is not None:
            self.calls.close()
        self.leave()


def main(config: Config, run_dir: Path, index: int) -> bool:
    """Run generator `index` of the run in `run_dir`.

    Returns True when the run is finished, False when SIGTERM ended this process.
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
