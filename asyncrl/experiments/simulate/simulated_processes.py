"""The simulated sides: a generator (the loop of actors/generator.py around the real schedule) and
the learner (learner/loop.py).
"""

from __future__ import annotations

import heapq
import math
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.delivery import LINGER_S, size
from actors.schedule import Key, TicketSchedule
from actors.turn import (
    DECODE_STEPS,
    IDLE_POLL_S,
    RENEW_S,
    samples_to_ask_for,
    ticket_progress,
)
from asyncrl.config.tree import Config
from asyncrl.contract.messages import (
    EVAL_BASE,
    PolicyAnnouncement,
    RewardFailure,
    Ticket,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.versions import Label
from asyncrl.experiments.simulate.times import Draw, TimeModel, draw, draw_along
from asyncrl.experiments.simulate.world import EventClock, SimulatedBuffer

_TOKENS: dict[int, bytes] = {}


@dataclass
class TimeSampler:
    """The times of one simulation, ready to draw from; shared by all generators."""

    times: TimeModel
    rng: random.Random
    noise: Draw
    length: Callable[[Ticket, int], int]
    reward: Draw
    swap: Draw
    train: Draw
    batch: Draw
    commit: Draw
    publish: Draw
    checkpoint: Draw
    calls: Draw
    tool: Draw
    busy: float = 0.0  # seconds of all generators
    lasted: list[float] = field(default_factory=list)  # seconds from each sample's start to its end
    cut: int = 0  # samples that agent.deadline_s ended


def draws(times: TimeModel, config: Config, seed: int, stage: Draw) -> TimeSampler:
    """`stage`: the share of the batches that are trained."""
    rng = random.Random(seed)

    def draw_from(name: str) -> Draw:
        return draw(getattr(times, name), rng, name, stage)

    return TimeSampler(
        times,
        rng,
        noise=draw_from("noise"),
        length=_lengths(times, config, rng),
        reward=draw_from("reward"),
        swap=draw_from("swap"),
        train=draw_from("train"),
        batch=draw_from("batch"),
        commit=draw_from("commit"),
        publish=draw_from("publish"),
        checkpoint=draw_from("checkpoint"),
        calls=draw_from("calls"),
        tool=draw_from("tool"),
    )


def _lengths(times: TimeModel, config: Config, rng: random.Random) -> Callable[[Ticket, int], int]:
    """Tokens of an answer.  Recorded groups are drawn whole, for the answers to one prompt are
    about equally long, and along the run, as they change.
    """
    most = config.generator.max_new_tokens
    if times.group_lengths is None:
        one = draw(
            times.lengths if times.lengths is not None else f"uniform({most / 2}, {most})",
            rng,
            "lengths",
        )
        return lambda ticket, sample: max(1, min(most, round(one())))
    groups, drawn, whole = (
        times.group_lengths,
        dict[int, list[int]](),
        config.learner.steps * config.learner.groups,
    )
    ticket_now = 0
    at_stage = draw_along(groups, rng, lambda: ticket_now / whole)

    def of_group(ticket: Ticket, sample: int) -> int:
        nonlocal ticket_now
        if ticket.ticket >= EVAL_BASE:
            return min(most, rng.choice(at_stage()))
        group = drawn.get(ticket.ticket)
        if group is None:
            ticket_now = ticket.ticket
            group = drawn[ticket.ticket] = at_stage()
            drawn.pop(ticket.ticket - 100_000, None)
        return min(most, group[sample] if sample < len(group) else rng.choice(group))

    return of_group


@dataclass(slots=True)
class SimulatedSample:
    """A sample being written.  Of its call: `born` in the engine's steps, `length` in tokens,
    `mark` the weights it started with.  Of the session: calls to come, the call under way included,
    when it began, and spans of the calls that have ended.
    """

    ticket: Ticket
    sample: int
    began: float
    calls: int
    born: int = 0
    length: int = 0
    mark: int = 0
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def finished_tokens(self) -> int:
        """Tokens of the calls that have ended."""
        return self.spans[-1].end if self.spans else 0

    @property
    def sample_key(self) -> Key:
        return self.ticket.ticket, self.sample, self.ticket.attempt


def _reward_processes(config: Config) -> int:
    """How many a generator has; "auto" with a function of one's own: as many as this machine has
    cores.
    """
    workers = config.reward.workers
    own = config.reward.uses_reward_processes
    if workers == "auto":
        return len(os.sched_getaffinity(0)) if own else 0
    return workers or int(own)


class SimulatedGenerator:
    """One generator.  `sleeping`: its engine is empty, and it waits for a message."""

    def __init__(
        self,
        index: int,
        clock: EventClock,
        buffer: SimulatedBuffer,
        config: Config,
        shared: TimeSampler,
    ) -> None:
        self.name = f"generator-{index}"
        self.session = 1
        self.clock, self.buffer, self.draws, self.times = clock, buffer, shared, shared.times
        self.slots = config.generator.slots
        agent = config.agent
        # samples open at once: rows of the engine, or sessions, of which the gateway's are shared
        self.most_open = (
            math.ceil(agent.sessions / config.generators) if agent.uses_sessions else self.slots
        )
        self.session_s = agent.deadline_s if agent.uses_sessions else math.inf
        self.session_tokens = agent.max_tokens if agent.uses_sessions else math.inf
        self.session_calls = (
            agent.max_calls if agent.uses_sessions and agent.max_calls else math.inf
        )
        self.frame_bytes = config.wires.frame_bytes
        one = config.generators == 1 and not agent.uses_sessions
        self.lockstep = config.staleness.limit == 0 and one
        self.drain = config.weights.in_flight == "between_groups"
        self.workers = _reward_processes(config)
        self.deadline = config.reward.deadline_s
        self.lease_s = config.wires.lease_s
        self.tokens = self.busy = self.idle = self.swaps = 0.0
        self.said = (0.0, 0.0)  # busy and idle seconds of the last Renew
        self.renewed = self.idle_since = 0.0
        self.sequence = self.called = 0
        self.lost = False
        self.start()
        if self.times.lost_every:
            clock.schedule(shared.rng.expovariate(1 / self.times.lost_every), self.crash)

    def start(self) -> None:
        """Empty hands."""
        self.schedule = TicketSchedule(drain_first=self.drain, lockstep=self.lockstep)
        self.told: Label | None = None
        self.loaded: Label | None = None
        self.engine: dict[int, list[SimulatedSample]] = {}  # step at which they end -> rows
        self.ended: list[SimulatedSample] = []  # in the decode call under way
        self.live = self.engine_clock = 0
        self.open: dict[Key, SimulatedSample] = {}
        self.returned: deque[SimulatedSample] = (
            deque()
        )  # sessions whose next call waits for a free row
        self.marks: list[tuple[int, Label]] = []
        # when each reward process has judged all that it was given
        self.free = [self.clock.now] * self.workers
        # (when it is judged, its number, what)
        self.calls: list[tuple[float, int, Trajectory]] = []
        self.fresh: list[Trajectory] = []
        self.fresh_since = 0.0
        self.asked = 0
        self.sleeping = True
        self.buffer.awake.pop(self.name, None)

    # ---- messages --------------------------------------------------------------------------------

    def on_announcement(self, session: int, said: PolicyAnnouncement) -> None:
        if session == self.session and not self.lost:
            self.schedule.announce(said)

    def on_grant(
        self, session: int, sequence: int, tickets: list[Ticket], said: PolicyAnnouncement
    ) -> None:
        if session != self.session or self.lost:
            return
        if self.sleeping:
            self.catch_up()
        self.schedule.announce(said)
        if sequence == self.sequence:
            self.asked = 0
        self.schedule.add_tickets(tickets)
        if self.sleeping:
            self.wake()

    def catch_up(self) -> None:
        """While it slept it was told of each new version and loaded it, as far as time allowed."""
        store = self.buffer.store
        said_at = self.buffer.announced_at + self.times.wire
        if (
            store.policy is not None
            and (self.loaded is None or store.policy > self.loaded)
            and said_at + self.draws.swap() < self.clock.now
        ):
            self.loaded = self.told = store.policy
            self.marks = [(self.engine_clock, store.policy)]
            self.swaps += 1

    # ---- the loop --------------------------------------------------------------------------------

    def reported_times(self) -> tuple[float, float]:
        """Busy and idle seconds as the buffer knows them: of the last Renew, which comes in sleep
        too.
        """
        if self.sleeping and (times := int((self.clock.now - self.renewed) / RENEW_S)) > 0:
            self.renewed += times * RENEW_S
            self.said = (self.busy, self.idle + max(0.0, self.renewed - self.idle_since))
        return self.said

    def wake(self) -> None:
        """Work came: time asleep was idle, in whole looks at the socket (a look that brings work
        counts as work).
        """
        self.reported_times()
        slept = self.clock.now - self.idle_since
        idle = slept if self.calls else math.floor(slept / IDLE_POLL_S) * IDLE_POLL_S
        self.idle += idle
        self.idle_since += idle
        self.sleeping = False
        self.buffer.awake[self.name] = self
        self.begin()

    def begin(self) -> None:
        """Swap, start samples, decode; `end` comes when that is done."""
        now = self.clock.now + self.swap()
        admitted = self.admit()
        if not self.live:
            self.clock.schedule(now, self.end, self.session, 0, [])
            return
        rows = self.live
        times = self.times
        first = self.engine_clock
        done: list[SimulatedSample] = []
        for step in range(first + 1, first + DECODE_STEPS + 1):
            self.engine_clock = step
            if (ended := self.engine.pop(step, None)) is not None:
                done += ended
                if len(done) == rows:
                    break
        self.live -= len(done)
        self.ended = done
        beside = times.beside if self.buffer.learner.training else 1.0
        seconds = (
            beside
            * self.draws.noise()
            * (
                (self.engine_clock - first) * (times.step + times.row * rows)
                + times.admit * admitted
            )
        )
        self.clock.schedule(
            now + seconds + times.look + times.finish * len(done),
            self.end,
            self.session,
            rows,
            done,
        )

    def swap(self) -> float:
        """Load what the schedule wants; returns the seconds it takes."""
        goal = self.schedule.next_version(self.loaded)
        if goal is None:
            return 0.0
        self.loaded = goal
        if not self.live:
            self.marks.clear()
        self.marks.append((self.engine_clock, goal))
        self.swaps += 1
        return self.draws.swap()

    def admit(self) -> int:
        before = self.live
        if self.loaded is None:
            return 0
        while self.returned and self.live < self.slots:
            row = self.returned.popleft()
            self.enter(row)
        room = min(self.slots - self.live, self.most_open - len(self.open))
        for held, sample in self.schedule.admit(self.loaded, room) if room > 0 else ():
            calls = round(min(self.session_calls, max(1.0, self.draws.calls())))
            row = SimulatedSample(held.ticket, sample, self.clock.now, calls)
            self.open[row.sample_key] = row
            self.enter(row)
        return self.live - before

    def enter(self, row: SimulatedSample) -> None:
        """A row of the engine for a call."""
        left = self.session_tokens - row.finished_tokens
        row.length = int(min(left, self.draws.length(row.ticket, row.sample)))
        row.born, row.mark = self.engine_clock, len(self.marks) - 1
        self.engine.setdefault(self.engine_clock + row.length, []).append(row)
        self.live += 1

    def end(self, session: int, rows: int, done: list[SimulatedSample]) -> None:
        """What came of the decode steps: rewards, deliveries, the next request."""
        if session != self.session or self.lost:
            return
        now = self.clock.now
        self.ended = []
        self.tokens += sum(row.length for row in done)
        if rows:
            self.busy += now - self.idle_since
            self.draws.busy += now - self.idle_since
        else:
            self.idle += now - self.idle_since
        self.idle_since = now
        for row in done:
            self.on_call_end(row)
        self.collect()
        self.deliver()
        self.want()
        if now - self.renewed >= RENEW_S:
            self.renewed, self.said = now, (self.busy, self.idle)
        if self.live or self.schedule.next_version(self.loaded) is not None or self._startable():
            self.begin()
            return
        self.sleeping = True
        self.buffer.awake.pop(self.name, None)
        if self.calls:
            self.clock.schedule(self.calls[0][0], self.on_judged_while_idle, self.session)

    def _startable(self) -> bool:
        if self.returned:
            return True
        room = len(self.open) < self.most_open
        return room and any(h.is_ready(self.loaded) for h in self.schedule.order())

    # ---- sessions --------------------------------------------------------------------------------

    def on_call_end(self, row: SimulatedSample) -> None:
        """A call has ended: the tool's turn, or the session is over.  What reaches its deadline
        ends there, with the calls that it has; a call under way is let end.
        """
        row.spans += self.spans(row)
        row.calls -= 1
        now = self.clock.now
        end = row.began + self.session_s
        if row.calls and row.finished_tokens < self.session_tokens and now < end:
            back = now + self.draws.tool()
            self.clock.schedule(min(back, end), self.on_tool_return, self.session, row, back < end)
            return
        self.finish(row, cut=bool(row.calls) and now >= end)

    def on_tool_return(self, session: int, row: SimulatedSample, in_time: bool) -> None:
        if session != self.session or self.lost:
            return
        if self.sleeping:
            self.catch_up()
        if in_time:
            self.returned.append(row)
        else:
            self.finish(row, cut=True)
        if self.sleeping:
            self.wake()

    def finish(self, row: SimulatedSample, *, cut: bool) -> None:
        """The session is over."""
        del self.open[row.sample_key]
        self.draws.lasted.append(self.clock.now - row.began)
        self.draws.cut += cut
        self.schedule.finish_sample(row.sample_key, row.finished_tokens)
        self.judge(self.trajectory(row))

    def on_judged_while_idle(self, session: int) -> None:
        if session == self.session and self.sleeping and not self.lost:
            self.wake()

    # ---- answers ---------------------------------------------------------------------------------

    def spans(self, row: SimulatedSample) -> list[VersionSpan]:
        """Of the call that has just ended."""
        spans: list[VersionSpan] = []
        first = row.finished_tokens
        for at, label in reversed(self.marks[row.mark :]):
            end = spans[-1].start if spans else first + row.length
            if (start := first + max(at - row.born, 0)) < end:
                spans.append(VersionSpan(label, "", start, end, label))
            if at <= row.born:
                break
        return spans[::-1]

    def trajectory(self, row: SimulatedSample) -> Trajectory:
        length = row.finished_tokens
        tokens = _TOKENS.get(length) or _TOKENS.setdefault(length, bytes(4 * length))
        failed = self.times.failed and self.draws.rng.random() < self.times.failed
        reward = (
            0.0 if row.ticket.ticket % 1000 < 1000 * self.times.no_spread else float(row.sample % 2)
        )
        return Trajectory(
            *row.sample_key,
            prompt_tokens=b"",
            tokens=tokens,
            behavior_logprobs=b"",
            mask=b"",
            spans=row.spans,
            reward=reward,
            reward_parts={},
            finish="stop",
            temperature=1.0,
            failed=RewardFailure("data", "simulated") if failed else "",
        )

    def judge(self, answer: Trajectory) -> None:
        """In the order in which they end, by whichever process is free first: the processes are fed
        whatever the engine does.
        """
        if not self.workers:
            self.fresh.append(answer)
            return
        seconds = self.draws.reward()
        if seconds > self.deadline:
            seconds = self.deadline
            answer.failed = RewardFailure("data", "the reward hung")
        self.called += 1
        done = max(self.clock.now, self.free[0]) + seconds
        heapq.heapreplace(self.free, done)
        heapq.heappush(self.calls, (done, self.called, answer))

    def collect(self) -> None:
        """One look at what the reward processes have done."""
        while self.calls and self.calls[0][0] <= self.clock.now:
            self.fresh.append(heapq.heappop(self.calls)[2])

    def deliver(self) -> None:
        if not self.fresh:
            return
        now = self.clock.now
        self.fresh_since = self.fresh_since or now
        if (
            not self.live
            or now - self.fresh_since > LINGER_S
            or sum(map(size, self.fresh)) >= self.frame_bytes
        ):
            self.buffer.send(
                self.buffer.on_deliver, self, self.fresh, work=self.times.buffer * len(self.fresh)
            )
            self.fresh = []
            self.fresh_since = 0.0

    def want(self) -> None:
        unfinished = bool(self.calls or self.fresh)
        free = samples_to_ask_for(self.schedule, self.most_open, len(self.open), unfinished)
        if free > 0 and free > self.asked:
            self.sequence += 1
            self.asked = free
            self.buffer.send(self.buffer.on_want, self, free, self.sequence)

    # ---- a lost process --------------------------------------------------------------------------

    def crash(self) -> None:
        """The process ends now, with all it held; it comes back with a new session."""
        if not self.lost:
            live = {row.sample_key: row.finished_tokens for row in self.open.values()}
            for row in (row for ended in (*self.engine.values(), self.ended) for row in ended):
                live[row.sample_key] += self.engine_clock - row.born
            self.buffer.send(self.buffer.on_lost, ticket_progress(self.schedule, live), self)
            self.lost = True
            self.buffer.awake.pop(self.name, None)
            if self.times.restart > self.lease_s:  # the buffer does not wait for it
                self.clock.schedule(
                    self.clock.now + self.lease_s,
                    self.buffer.send,
                    self.buffer.on_session,
                    self,
                    self.session + 1,
                )
            self.clock.schedule(self.clock.now + self.times.restart, self.restart)
        self.clock.schedule(
            self.clock.now + self.draws.rng.expovariate(1 / self.times.lost_every), self.crash
        )

    def restart(self) -> None:
        self.lost = False
        self.session += 1
        self.start()
        self.idle += self.clock.now - self.idle_since
        self.idle_since = self.clock.now
        self.buffer.send(self.buffer.on_session, self, self.session)
        self.want()


class SimulatedLearner:
    """The learner's loop: ask, train, publish, commit; now and then a checkpoint."""

    def __init__(
        self,
        clock: EventClock,
        buffer: SimulatedBuffer,
        config: Config,
        shared: TimeSampler,
        at_commit: Callable[[], None],
    ) -> None:
        self.clock, self.buffer, self.draws, self.times, self.settings = (
            clock,
            buffer,
            shared,
            shared.times,
            config.learner,
        )
        self.max_lag = config.staleness.limit
        self.at_commit = at_commit
        self.number = 0
        self.batches: dict[int, int] = {}  # number -> tokens
        self.training = False
        self.mark = self.busy = self.idle = 0.0
        self.saved = [0]
        self.shares: list[float] = []
        self.steps: list[float] = []

    def hello(self) -> None:
        self.buffer.send(self.buffer.on_hello, self.max_lag)
        self.buffer.send(self.buffer.on_ask, 0)

    def on_batch(self, number: int, tokens: int) -> None:
        self.batches[number] = tokens
        self.request_batch()

    def request_batch(self) -> None:
        if self.training or self.number not in self.batches:
            return
        tokens = self.batches.pop(self.number)
        self.training = True
        if self.settings.prefetch and self.number + 1 < self.settings.steps:
            self.buffer.send(self.buffer.on_ask, self.number + 1)
        scale = tokens / self.times.train_tokens if self.times.train_tokens else 1.0
        beside = self.times.beside if self.buffer.awake else 1.0
        seconds = beside * self.draws.train() * scale + self.draws.publish()
        self.clock.schedule(self.clock.now + seconds, self.on_trained, seconds)

    def on_trained(self, seconds: float) -> None:
        now = self.clock.now
        number = self.number
        whole = max(now - self.mark, 1e-9)
        self.shares.append(max(0.0, 1.0 - seconds / whole))
        self.steps.append(whole)
        self.busy = self.busy + seconds
        self.idle = self.idle + whole - seconds
        self.mark = now
        self.number += 1
        idle = self.shares[-1]
        self.buffer.send(self.buffer.on_commit, number, idle, work=self.draws.commit())
        pause = 0.0
        if self.number % self.settings.checkpoint_every == 0 or self.number == self.settings.steps:
            pause = self.draws.checkpoint()
            self.saved = [*self.saved, self.number][-self.settings.keep_checkpoints :]
        self.clock.schedule(now + pause, self.continue_after_commit, pause > 0)

    def continue_after_commit(self, saved: bool) -> None:
        self.training = False
        if saved:
            self.buffer.send(self.buffer.on_checkpointed, self.saved[0])
        if self.number == self.settings.steps:
            self.buffer.send(self.buffer.on_goodbye)
            return
        if not self.settings.prefetch:
            self.buffer.send(self.buffer.on_ask, self.number)
        self.request_batch()
