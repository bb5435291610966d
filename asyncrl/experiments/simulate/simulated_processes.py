"""The simulated generator and learner.

The generator follows actors/generator.py and has the real schedule. The learner follows
learner/loop.py.
"""

from __future__ import annotations

import heapq
import math
import os
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.delivery import LINGER_S, estimate_size
from actors.schedule import Key, TicketSchedule
from actors.turn import (
    DECODE_STEPS,
    IDLE_POLL_S,
    count_samples_to_request,
    list_ticket_progress,
)
from asyncrl.config.tree import Config
from asyncrl.contract.messages import (
    EVAL_BASE,
    RENEW_S,
    RewardFailure,
    Ticket,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.messages import PolicyAnnouncement as Announcement
from asyncrl.contract.versions import Label
from asyncrl.experiments.simulate.times import (
    DISTRIBUTIONS,
    Draw,
    TimeModel,
    make_sampler,
    make_sequence_sampler,
)
from asyncrl.experiments.simulate.world import EventClock, SimulatedBuffer

_TOKENS: dict[int, bytes] = {}
PARTS = 8  # of an update, each of which is slowed down by what runs at its start


class TimeSampler:
    """The sampled times of one simulation, shared by all its processes.

    stage: returns the completed share of the run.
    scale: factors of the times by name.
    """

    def __init__(
        self, times: TimeModel, config: Config, seed: int, stage: Draw, scale: Mapping[str, float]
    ) -> None:
        self.times = times
        self.scale = scale
        self.rng = random.Random(seed)
        self._draws = {
            n: make_sampler(getattr(times, n), self.rng, n, stage) for n in DISTRIBUTIONS
        }
        self.length = _make_length_sampler(times, config, self.rng)
        self.sample_seconds: list[float] = []  # from each sample's start to its end
        self.cut = 0  # samples that agent.deadline_s ended

    def sample_time(self, name: str) -> float:
        """Sample the time `name` of the time model."""
        return self._draws[name]() * self.scale.get(name, 1.0)


def _make_length_sampler(
    times: TimeModel, config: Config, rng: random.Random
) -> Callable[[Ticket, int], int]:
    """Return a function that samples the tokens of a call.

    Recorded groups are sampled as groups, because completions of one prompt have similar lengths.
    They are sampled along the run, because lengths change.
    """
    limit = config.generator.max_new_tokens
    if times.group_lengths is None:
        spec = f"uniform({limit / 2}, {limit})" if times.lengths is None else times.lengths
        sample_length = make_sampler(spec, rng, "lengths")
        return lambda ticket, sample: max(1, min(limit, round(sample_length())))
    tickets = config.learner.steps * config.learner.groups
    by_ticket: dict[int, list[int]] = {}
    newest = 0
    sample_group = make_sequence_sampler(times.group_lengths, rng, lambda: newest / tickets)

    def sample_group_length(ticket: Ticket, sample: int) -> int:
        nonlocal newest
        if ticket.ticket >= EVAL_BASE:
            return min(limit, rng.choice(sample_group()))
        group = by_ticket.get(ticket.ticket)
        if group is None:
            newest = ticket.ticket
            group = by_ticket[ticket.ticket] = sample_group()
            by_ticket.pop(ticket.ticket - 100_000, None)
        return min(limit, group[sample] if sample < len(group) else rng.choice(group))

    return sample_group_length


@dataclass(slots=True)
class SimulatedSample:
    """A sample in progress.

    calls: calls to come, including the running one.
    born: engine step at which the running call started.
    length: tokens of the running call.
    mark: index of the weights with which it started.
    spans: of the calls that have ended.
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


def _count_reward_processes(config: Config) -> int:
    """Return the reward processes of a generator.

    "auto" with a custom function means one for each core of this machine.
    """
    workers = config.reward.workers
    uses_processes = config.reward.uses_reward_processes
    if workers == "auto":
        return len(os.sched_getaffinity(0)) if uses_processes else 0
    return workers or int(uses_processes)


class SimulatedGenerator:
    """One generator. `sleeping`: its engine is empty and it waits for a message."""

    def __init__(
        self,
        index: int,
        clock: EventClock,
        buffer: SimulatedBuffer,
        config: Config,
        draws: TimeSampler,
    ) -> None:
        self.name = f"generator-{index}"
        self.session = 1
        self.clock, self.buffer, self.draws, self.times = clock, buffer, draws, draws.times
        self.config = config
        self.slots = self.most_open = config.generator.slots  # samples open at once
        self.session_s = self.session_tokens = self.session_calls = math.inf
        agent = config.agent
        if agent.uses_sessions:
            self.most_open = math.ceil(agent.sessions / config.generators)
            self.session_s, self.session_tokens = agent.deadline_s, agent.max_tokens
            self.session_calls = agent.max_calls or math.inf
        single = config.generators == 1 and not agent.uses_sessions
        self.lockstep = config.staleness.limit == 0 and single
        self.workers = _count_reward_processes(config)
        self.busy = self.idle = 0.0
        self.renewed = self.idle_since = 0.0
        self.sequence = self.called = 0
        self.scored = (0.0, 0.0, 0.0)  # samples, seconds until the result, seconds of calls
        self.lost = False
        self.start()
        if self.times.lost_every:
            clock.schedule(draws.rng.expovariate(1 / self.times.lost_every), self.crash)

    def start(self) -> None:
        """Start without any tickets, weights or samples."""
        drain = self.config.weights.in_flight == "between_groups"
        self.schedule = TicketSchedule(drain_first=drain, lockstep=self.lockstep)
        self.announced: Label | None = None
        self.loaded: Label | None = None
        self.engine: dict[int, list[SimulatedSample]] = {}  # step at which calls end -> samples
        self.ended: list[SimulatedSample] = []  # in the running decode call
        self.live = self.engine_clock = 0
        self.open: dict[Key, SimulatedSample] = {}
        self.returned: deque[SimulatedSample] = deque()  # sessions that wait for a free slot
        self.marks: list[tuple[int, Label]] = []  # engine step of each load
        self.free = [self.clock.now] * self.workers  # time at which each reward process is idle
        # (end, number, sample, seconds until it began, seconds) of rewards
        self.calls: list[tuple[float, int, Trajectory, float, float]] = []
        self.fresh: list[Trajectory] = []
        self.fresh_since = 0.0
        self.asked = 0
        self.sleeping = True
        self.buffer.awake.pop(self.name, None)

    def schedule_call(self, when: float, handler: Callable[..., object], *args: Any) -> None:
        """Schedule a call that the loss of this process cancels."""
        self.clock.schedule(when, self._call, self.session, handler, args)

    def _call(self, session: int, handler: Callable[..., object], args: tuple[Any, ...]) -> None:
        if session == self.session and not self.lost:
            handler(*args)

    # ---- messages --------------------------------------------------------------------------------

    def on_grant(self, sequence: int, tickets: list[Ticket], announcement: Announcement) -> None:
        if self.sleeping:
            self.catch_up()
        self.schedule.announce(announcement)
        if sequence == self.sequence:
            self.asked = 0
        self.schedule.add_tickets(tickets)
        if self.sleeping:
            self.wake()

    def catch_up(self) -> None:
        """Load the newest version if there was time to load it while this generator slept."""
        policy = self.buffer.store.policy
        announced_at = self.buffer.announced_at + self.times.wire
        if (
            policy is not None
            and (self.loaded is None or policy > self.loaded)
            and announced_at + self.draws.sample_time("swap") < self.clock.now
        ):
            self.loaded = self.announced = policy
            self.marks = [(self.engine_clock, policy)]

    # ---- the loop --------------------------------------------------------------------------------

    def measure_times(self) -> tuple[float, float]:
        """Return the busy and idle seconds up to now, without those of a running decode call."""
        asleep = self.clock.now - self.idle_since if self.sleeping and not self.lost else 0.0
        return self.busy, self.idle + asleep

    def wake(self) -> None:
        """Start to work.

        Sleep counts as idle in whole polls of the socket; the last poll counts as work.
        """
        # a sleeping generator renews its leases, too
        self.renewed += max(0, int((self.clock.now - self.renewed) / RENEW_S)) * RENEW_S
        slept = self.clock.now - self.idle_since
        idle = slept if self.calls else math.floor(slept / IDLE_POLL_S) * IDLE_POLL_S
        self.idle += idle
        self.idle_since += idle
        self.sleeping = False
        self.buffer.awake[self.name] = self
        self.begin()

    def begin(self) -> None:
        """Swap, start samples and decode; schedule `end` at the end of that."""
        start = self.clock.now + self.swap()
        admitted = self.admit()
        if not self.live:
            self.schedule_call(start, self.end, [])
            return
        rows = self.live
        times = self.times
        first_step = self.engine_clock
        finished: list[SimulatedSample] = []
        while self.engine_clock < first_step + DECODE_STEPS and len(finished) < rows:
            self.engine_clock += 1
            finished += self.engine.pop(self.engine_clock, ())
        self.live -= len(finished)
        self.ended = finished
        slowdown = self.buffer.compute_slowdown()
        work = (self.engine_clock - first_step) * (times.step + times.row * rows)
        seconds = slowdown * self.draws.sample_time("noise") * (work + times.admit * admitted)
        self.schedule_call(
            start + seconds + times.look + times.finish * len(finished), self.end, finished, True
        )

    def swap(self) -> float:
        """Load the version that the schedule requires; return the seconds."""
        goal = self.schedule.next_version(self.loaded)
        if goal is None:
            return 0.0
        self.loaded = goal
        if not self.live:
            self.marks.clear()
        self.marks.append((self.engine_clock, goal))
        return self.draws.sample_time("swap")

    def admit(self) -> int:
        """Start calls while there is room; return their number."""
        live_before = self.live
        if self.loaded is None:
            return 0
        while self.returned and self.live < self.slots:
            self.start_call(self.returned.popleft())
        room = min(self.slots - self.live, self.most_open - len(self.open))
        for leased, index in self.schedule.admit(self.loaded, room) if room > 0 else ():
            calls = round(min(self.session_calls, max(1.0, self.draws.sample_time("calls"))))
            sample = SimulatedSample(leased.ticket, index, self.clock.now, calls)
            self.open[sample.sample_key] = sample
            self.start_call(sample)
        return self.live - live_before

    def start_call(self, sample: SimulatedSample) -> None:
        """Give a call of the sample a row of the engine."""
        remaining = self.session_tokens - sample.finished_tokens
        sample.length = int(min(remaining, self.draws.length(sample.ticket, sample.sample)))
        sample.born, sample.mark = self.engine_clock, len(self.marks) - 1
        self.engine.setdefault(self.engine_clock + sample.length, []).append(sample)
        self.live += 1

    def end(self, finished: list[SimulatedSample], decoded: bool = False) -> None:
        """End a decode call: rewards, deliveries, the next request."""
        now = self.clock.now
        self.ended = []
        if decoded:
            self.busy += now - self.idle_since
        else:
            self.idle += now - self.idle_since
        self.idle_since = now
        for sample in finished:
            self.on_call_end(sample)
        while self.calls and self.calls[0][0] <= now:
            _, _, scored, queued, seconds = heapq.heappop(self.calls)
            self.fresh.append(scored)
            count, waited_s, called_s = self.scored
            self.scored = count + 1, waited_s + queued + seconds, called_s + seconds
        self.deliver()
        self.request_tickets()
        if now - self.renewed >= RENEW_S:
            self.renewed = now
            if self.workers:
                self.buffer.meter.on_rewards(self.name, self.scored, self.workers, now)
        if self.live or self.schedule.next_version(self.loaded) is not None or self._can_start():
            self.begin()
            return
        self.sleeping = True
        self.buffer.awake.pop(self.name, None)
        if self.calls:
            self.schedule_call(self.calls[0][0], self.on_judged_while_idle)

    def _can_start(self) -> bool:
        if self.returned:
            return True
        has_room = len(self.open) < self.most_open
        return has_room and any(
            leased.is_ready(self.loaded) for leased in self.schedule.sort_waiting()
        )

    # ---- sessions --------------------------------------------------------------------------------

    def on_call_end(self, sample: SimulatedSample) -> None:
        """Continue the session with a tool, or end it.

        At its deadline a session ends with its finished calls; a running call may finish.
        """
        sample.spans += self.list_spans(sample)
        sample.calls -= 1
        now = self.clock.now
        end = sample.began + self.session_s
        if sample.calls and sample.finished_tokens < self.session_tokens and now < end:
            returns_at = now + self.draws.sample_time("tool")
            self.schedule_call(min(returns_at, end), self.on_tool_return, sample, returns_at < end)
            return
        self.finish(sample, cut=bool(sample.calls) and now >= end)

    def on_tool_return(self, sample: SimulatedSample, in_time: bool) -> None:
        if self.sleeping:
            self.catch_up()
        if in_time:
            self.returned.append(sample)
        else:
            self.finish(sample, cut=True)
        if self.sleeping:
            self.wake()

    def finish(self, sample: SimulatedSample, *, cut: bool) -> None:
        """End the sample."""
        del self.open[sample.sample_key]
        self.draws.sample_seconds.append(self.clock.now - sample.began)
        self.draws.cut += cut
        self.schedule.finish_sample(sample.sample_key, sample.finished_tokens)
        self.judge(self.make_trajectory(sample))

    def on_judged_while_idle(self) -> None:
        if self.sleeping:
            self.wake()

    # ---- trajectories ----------------------------------------------------------------------------

    def list_spans(self, sample: SimulatedSample) -> list[VersionSpan]:
        """Return the version spans of the call that has just ended."""
        spans: list[VersionSpan] = []
        offset = sample.finished_tokens
        for step, label in reversed(self.marks[sample.mark :]):
            end = spans[-1].start if spans else offset + sample.length
            if (start := offset + max(step - sample.born, 0)) < end:
                spans.append(VersionSpan(label, "", start, end, label))
            if step <= sample.born:
                break
        return spans[::-1]

    def make_trajectory(self, sample: SimulatedSample) -> Trajectory:
        times = self.times
        length = sample.finished_tokens
        tokens = _TOKENS.get(length) or _TOKENS.setdefault(length, bytes(4 * length))
        failed = times.failed and self.draws.rng.random() < times.failed
        equal = sample.ticket.ticket % 1000 < 1000 * times.no_spread
        return Trajectory(
            *sample.sample_key,
            prompt_tokens=b"",
            tokens=tokens,
            behavior_logprobs=b"",
            mask=b"",
            spans=sample.spans,
            reward=0.0 if equal else float(sample.sample % 2),
            reward_parts={},
            finish="stop",
            temperature=1.0,
            failed=RewardFailure("data", "simulated") if failed else "",
        )

    def judge(self, sample: Trajectory) -> None:
        """Score the sample in the first idle reward process."""
        if not self.workers:
            self.fresh.append(sample)
            return
        seconds = self.draws.sample_time("reward")
        deadline = self.config.reward.deadline_s
        if seconds > deadline:
            seconds = deadline
            sample.failed = RewardFailure("data", "the reward hung")
        self.called += 1
        start = max(self.clock.now, self.free[0])
        heapq.heapreplace(self.free, start + seconds)
        heapq.heappush(
            self.calls, (start + seconds, self.called, sample, start - self.clock.now, seconds)
        )

    def deliver(self) -> None:
        if not self.fresh:
            return
        now = self.clock.now
        self.fresh_since = self.fresh_since or now
        full = sum(map(estimate_size, self.fresh)) >= self.config.wires.frame_bytes
        if not self.live or now - self.fresh_since > LINGER_S or full:
            work = self.times.buffer * len(self.fresh)
            self.buffer.send(self.buffer.on_deliver, self, self.fresh, work=work)
            self.fresh = []
            self.fresh_since = 0.0

    def request_tickets(self) -> None:
        unfinished = bool(self.calls or self.fresh)
        free = count_samples_to_request(self.schedule, self.most_open, len(self.open), unfinished)
        if free > 0 and free > self.asked:
            self.sequence += 1
            self.asked = free
            self.buffer.send(self.buffer.on_want, self, free, self.sequence)

    # ---- a lost process --------------------------------------------------------------------------

    def crash(self) -> None:
        """Lose the process with its samples; it returns with a new session."""
        now = self.clock.now
        if not self.lost:
            live = {sample.sample_key: sample.finished_tokens for sample in self.open.values()}
            for sample in (s for ended in (*self.engine.values(), self.ended) for s in ended):
                live[sample.sample_key] += self.engine_clock - sample.born
            self.buffer.send(self.buffer.on_lost, list_ticket_progress(self.schedule, live), self)
            self.lost = True
            self.buffer.awake.pop(self.name, None)
            lease_s = self.config.wires.lease_s
            if self.times.restart > lease_s:  # the buffer ends the leases before
                args = (self.buffer.on_session, self, self.session + 1)
                self.clock.schedule(now + lease_s, self.buffer.send, *args)
            self.clock.schedule(now + self.times.restart, self.restart)
        wait = self.draws.rng.expovariate(1 / self.times.lost_every)
        self.clock.schedule(now + wait, self.crash)

    def restart(self) -> None:
        self.lost = False
        self.session += 1
        self.start()
        self.idle_since = self.clock.now
        self.buffer.send(self.buffer.on_session, self, self.session)
        self.request_tickets()


class SimulatedLearner:
    """The learner's loop: ask, train, publish, commit, and checkpoint when due."""

    def __init__(
        self,
        clock: EventClock,
        buffer: SimulatedBuffer,
        config: Config,
        draws: TimeSampler,
        at_commit: Callable[[], None],
    ) -> None:
        self.clock, self.buffer, self.draws, self.times = clock, buffer, draws, draws.times
        self.settings = config.learner
        self.max_lag = config.staleness.limit
        self.at_commit = at_commit
        self.number = 0
        self.batches: dict[int, int] = {}  # number -> tokens
        self.training = False
        self.step_began = self.busy = 0.0
        self.saved = [0]

    def register(self) -> None:
        self.buffer.send(self.buffer.on_hello, self.max_lag)
        self.ask(0)

    def ask(self, number: int) -> None:
        self.buffer.send(self.buffer.asks.append, number)

    def on_batch(self, number: int, tokens: int) -> None:
        self.batches[number] = tokens
        self.train()

    def train(self, delay: float = 0.0) -> None:
        """Train the next batch, if it has arrived, after `delay` seconds."""
        if self.training or self.number not in self.batches:
            return
        self.training = True
        if delay > 0:
            self.clock.schedule(self.clock.now + delay, self.begin_update)
        else:
            self.begin_update()

    def begin_update(self) -> None:
        tokens = self.batches.pop(self.number)
        if self.settings.prefetch and self.number + 1 < self.settings.steps:
            self.ask(self.number + 1)
        scale = tokens / self.times.train_tokens if self.times.train_tokens else 1.0
        part = self.draws.sample_time("train") * scale / PARTS
        self.train_part(self.clock.now, part, PARTS)

    def train_part(self, start: float, part: float, left: int) -> None:
        """Train the next part of an update, slowed down by what runs at its start.

        start: time at which the update began.
        part: seconds of a part without a slowdown.
        left: parts that are left."""
        now = self.clock.now
        if left:
            end = now + part * self.buffer.compute_slowdown()
            self.clock.schedule(end, self.train_part, start, part, left - 1)
        else:
            end = now + self.draws.sample_time("publish")
            self.clock.schedule(end, self.on_trained, end - start)

    def on_trained(self, seconds: float) -> None:
        now = self.clock.now
        step_s = max(now - self.step_began, 1e-9)
        self.busy += seconds
        self.step_began = now
        number = self.number
        self.number += 1
        work = self.draws.sample_time("commit")
        self.buffer.send(self.buffer.on_commit, number, max(0.0, 1 - seconds / step_s), work=work)
        pause = 0.0
        if self.number % self.settings.checkpoint_every == 0 or self.number == self.settings.steps:
            pause = self.draws.sample_time("checkpoint")
            self.saved = [*self.saved, self.number][-self.settings.keep_checkpoints :]
        self.clock.schedule(now + pause, self.continue_after_commit, pause > 0)

    def continue_after_commit(self, saved: bool) -> None:
        self.training = False
        if saved:
            self.buffer.send(self.buffer.store.retire_batches, self.saved[0])
        if self.number == self.settings.steps:
            self.buffer.send(self.buffer.on_goodbye)
            return
        if not self.settings.prefetch:
            self.ask(self.number)
        self.train(self.draws.sample_time("ready") if self.number in self.batches else 0.0)
