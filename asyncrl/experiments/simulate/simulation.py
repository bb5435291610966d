"""Discrete-event simulation of a run: the parts of a run, with times in place of the model.

Store, admission, evaluations, the queue of requests and the generator's schedule are the real ones.
The loops around them follow buffer/service.py (`Simulation.handle`), learner/loop.py
(`Simulation.learn`) and actors/generator.py (`SimulatedGenerator.work`). A loop is a Python
generator that yields the time at which it continues, or None if a message wakes it.
"""

from __future__ import annotations

import functools
import gc
import heapq
import itertools
import math
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

from actors.delivery import LINGER_S
from actors.schedule import Key, TicketSchedule
from actors.turn import DECODE_STEPS, IDLE_POLL_S, count_samples_to_request
from asyncrl.config.tree import Config
from asyncrl.contract.admission import LimitEvidence, TicketQueue, divides_batches
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.freshness import BatchMeter
from asyncrl.contract.messages import (
    EVAL_BASE,
    LOST,
    RENEW_S,
    LearnerHello,
    Prompt,
    RewardFailure,
    Ticket,
    Trajectory,
    VersionSpan,
)
from asyncrl.contract.versions import Label
from asyncrl.experiments.simulate.times import (
    DISTRIBUTIONS,
    TimeModel,
    make_sampler,
    make_sequence_sampler,
)
from asyncrl.tasks.evaluation_sets import build_task
from buffer.evaluation import Evaluations
from buffer.groups import make_store_settings
from buffer.ledger import sum_tokens
from buffer.service import make_evaluations
from buffer.store import Store
from buffer.training_log import count_trained_lags, mean, quantile
from learner.cores import scale_step

EPOCH = 1
NO_PROMPT = Prompt(0, "")
PARTS = 8  # of an update, each of which is slowed down by what runs at its start
Handler = Callable[..., object]
Loop = Generator[float | None, None, None]
Outcome = dict[str, Any]  # of one simulated run (`make_outcome`), or averaged over seeds


@functools.cache
def make_tokens(length: int) -> bytes:
    """Return the ids of so many tokens; samples of one length share them."""
    return bytes(4 * length)


class Simulation:
    """A run of `config` with `times`: the clock, the buffer around the real store, the learner.

    scale: factors of the times by name.
    threads: of the learner, instead of those that `times` have. 0: the same.
    Raises ConfigError for settings that are not simulated.
    """

    now = 0.0
    is_over = False  # all steps are committed and evaluated
    # the buffer
    free_at = worked = 0.0  # time at which it is free; seconds of work so far
    committed_at = handled_at = 0.0
    # the learner
    number = 0  # of the batch in training
    training = False
    trained_s = 0.0
    # results
    first_ticket: float | None = None
    alive_seconds = ticket_seconds = 0.0  # groups outstanding or leased, over time
    most_tickets = 0
    cut = 0  # samples that agent.deadline_s ended

    def __init__(
        self,
        config: Config,
        times: TimeModel,
        seed: int = 0,
        *,
        evaluate: bool = True,
        scale: Mapping[str, float] | None = None,
        threads: int = 0,
    ) -> None:
        if times.failed and config.reward.on_error == "stop":
            raise ConfigError(
                "--time failed=...: with reward.on_error = stop the first failed reward ends the "
                "run; set it to drop"
            )
        if len(config.agents) > 1:
            raise ConfigError(
                "task.mixture: parts with agents of their own are not simulated; simulate each "
                "part with its [agent] alone"
            )
        # cores in use while the learner trains; work of several threads is divided, not added
        self.trainers = scale_step(config.learner.threads) / scale_step(
            threads or config.learner.threads
        )
        self.config, self.times = config, times
        self.scale = {"train": 1 / self.trainers} | dict(scale or {})
        self.events: list[tuple[float, int, Handler, Any]] = []
        self.count = itertools.count()
        self.rng = random.Random(seed)
        self.samplers = {
            name: make_sampler(
                getattr(times, name), self.rng, name, lambda: self.number / config.learner.steps
            )
            for name in DISTRIBUTIONS
        }
        self.sample_length = _make_length_sampler(times, config, self.rng)
        settings = make_store_settings(config)
        settings.lease_s = inf  # leases are not renewed
        evaluations = Evaluations()
        if evaluate:
            evaluations = make_evaluations(config, build_task(config))
            evaluations.prompt = lambda split, index: NO_PROMPT
        self.store = Store(settings, lambda index: NO_PROMPT, evaluations)
        # requests: the generator, and the number of its request
        self.requests = TicketQueue[tuple[SimulatedGenerator, int]](settings.evaluators)
        self.awake: dict[str, SimulatedGenerator] = {}
        self.asks: deque[int] = deque()
        self.meter = BatchMeter()
        self.batches: dict[int, int] = {}  # number -> tokens, of batches at the learner
        # the generators' seconds of work: at the first ticket, the last commit
        self.busy_seconds: list[float] = []
        self.lags: dict[int, dict[int, int]] = {}  # batch -> trained tokens by lag
        # of each batch: mean lag of its samples in flight, in queue
        self.flights: list[float] = []
        self.queues: list[float] = []
        # after each commit: the limit of new tickets, groups outstanding
        self.limits: list[float] = []
        self.outstanding: list[float] = []
        self.sample_seconds: list[float] = []  # from each sample's start to its end
        self.generators = [
            SimulatedGenerator(self, f"generator-{index}") for index in range(config.generators)
        ]
        self.capacity = sum(generator.most_open for generator in self.generators)
        learner, cores = config.learner, times.cores
        threads = learner.thread_count + config.generators * config.generator.threads
        divides = cores is None or divides_batches(config.staleness.limit, threads, int(cores))
        self.divided_batch = settings.batch_samples if divides else inf
        self.learner = self.learn()

    # ---- the clock -------------------------------------------------------------------------------

    def schedule(self, when: float, handler: Handler, *args: Any) -> None:
        """Call `handler` at the time `when`; simultaneous calls keep their order."""
        heapq.heappush(self.events, (when, next(self.count), handler, args))

    def resume(self, loop: Loop) -> None:
        """Continue a loop."""
        if (when := next(loop, None)) is not None:
            self.schedule(when, self.resume, loop)

    def sample_time(self, name: str) -> float:
        """Sample the time `name` of the time model."""
        return self.samplers[name]() * self.scale.get(name, 1.0)

    def compute_slowdown(self) -> float:
        """Return the factor on the time of a decode call or a part of an update that starts now."""
        busy = self.training * self.trainers + len(self.awake)
        if self.times.cores is None:
            return self.times.beside if self.training and self.awake else 1.0
        return max(1.0, busy / self.times.cores) * (self.times.beside if busy > 1 else 1.0)

    # ---- the buffer ------------------------------------------------------------------------------

    def send(self, handler: Handler, *args: Any, work: float = 0.0) -> None:
        """Send the buffer a message, handled after the wire time and earlier messages."""
        self.free_at = max(self.now + self.times.wire, self.free_at) + work
        self.worked += work
        self.schedule(self.free_at, self.handle, handler, *args)

    def handle(self, handler: Handler = lambda: None, *args: Any) -> None:
        """Handle a message, then reply as far as the store allows."""
        store, steps = self.store, self.config.learner.steps
        if store.committed < steps:
            elapsed = self.now - self.handled_at
            self.alive_seconds += len(store.alive) * elapsed
            self.ticket_seconds += self.count_tickets() * elapsed
        self.handled_at = self.now
        handler(*args)
        while self.asks and self.lease(self.asks[0]):
            self.asks.popleft()
        self.requests.serve(self.divided_batch, self.grant)
        self.meter.on_free(self.requests.free, self.capacity, self.now)
        self.most_tickets = max(self.most_tickets, self.count_tickets())
        self.is_over = store.committed == steps and not store.evaluations.rounds

    def count_tickets(self) -> int:
        """Count the training tickets that generators hold."""
        return self.store.leases.count() - len(self.store.evaluations.leased_jobs)

    def on_delivery(self, generator: SimulatedGenerator, samples: list[Trajectory]) -> None:
        tickets = {sample.ticket for sample in samples} & self.store.alive.keys()
        for sample in samples:
            self.store.deliver(sample, self.now)
        self.meter.on_complete(filter(self.store.is_complete, tickets), self.now)
        self.announce(generator)

    def on_commit(self, number: int, idle: float) -> None:
        store, now = self.store, self.now
        evidence = None
        if floor := store.settings.ess_floor:  # tokens have no ratios here
            ess = {lag: self.times.ess**lag for lag in self.lags[number]}
            mean_ess = sum(n * ess[lag] for lag, n in self.lags[number].items())
            mean_ess /= sum(self.lags[number].values())
            unsafe = min((lag for lag in ess if ess[lag] < floor), default=inf)
            evidence = LimitEvidence(mean_ess, unsafe - 1, idle)
        timing = self.meter.on_commit(store.comps[number - store.base], idle, now)
        label = Label(EPOCH, number + 1)
        store.commit(number, label, str(number + 1), evidence=evidence, timing=timing, now=now)
        if (opens := store.next_opening(now)) < inf:
            self.schedule(opens, self.handle)
        self.committed_at = now
        self.limits.append(store.current_window())
        self.outstanding.append(len(store.alive))
        if store.committed == self.config.learner.steps:
            self.record_busy_seconds()
        for generator in self.awake.values():
            if store.settings.wait or generator.name in self.requests.waiting:
                self.announce(generator)

    def announce(self, generator: SimulatedGenerator) -> None:
        """Send the announcement that is part of a reply; it wakes no generator."""
        arrival, announcement = self.now + self.times.wire, self.store.make_announcement()
        self.schedule(arrival, generator.schedule.announce, announcement)

    def lease(self, number: int) -> bool:
        """Send batch `number` to the learner if it is complete."""
        store = self.store
        if not store.ask(EPOCH, number)[0]:
            return False
        batch = store.make_batch(number)
        self.lags[number] = count_trained_lags(batch, store.mask_limit)
        samples = max(len(batch.samples), 1)
        flight = sum(batch.in_flight) / samples
        self.flights.append(flight)
        self.queues.append(sum(batch.lags) / samples - flight)
        tokens = sum(sample.length for sample in batch.samples)
        self.schedule(self.now + self.sample_time("batch"), self.on_batch, number, tokens)
        return True

    def grant(self, name: str, samples: int, request: tuple[SimulatedGenerator, int]) -> bool:
        """Grant tickets to a waiting generator; see `BufferService.grant`."""
        generator, sequence = request
        tickets = self.store.grant(name, 1, samples, self.now)
        if not tickets:
            return False
        training = [ticket.ticket for ticket in tickets if ticket.kind == "train"]
        self.meter.on_grant(training, self.now)
        if self.first_ticket is None and training:
            self.first_ticket = self.now
            self.record_busy_seconds()
        self.announce(generator)
        self.schedule(self.now + self.times.wire, generator.on_grant, sequence, tickets)
        return True

    # ---- the learner -----------------------------------------------------------------------------

    def on_batch(self, number: int, tokens: int) -> None:
        self.batches[number] = tokens
        if not self.training:
            self.resume(self.learner)

    def learn(self) -> Loop:
        """Ask, train, publish, commit, and checkpoint when due."""
        settings, times = self.config.learner, self.times
        began, saved = 0.0, deque([0], settings.keep_checkpoints)
        while self.number < settings.steps:
            if not self.number or not settings.prefetch:
                self.send(self.asks.append, self.number)
            has_waited = self.number not in self.batches
            if has_waited:
                yield None
            self.training = True
            if not has_waited:
                yield self.now + self.sample_time("ready")
            start, tokens = self.now, self.batches.pop(self.number)
            if settings.prefetch and self.number + 1 < settings.steps:
                self.send(self.asks.append, self.number + 1)
            scale = tokens / times.train_tokens if times.train_tokens else 1.0
            part = self.sample_time("train") * scale / PARTS
            for _ in range(PARTS):
                yield self.now + part * self.compute_slowdown()
            yield self.now + self.sample_time("publish")
            seconds = self.now - start
            self.trained_s += seconds
            idle = max(0.0, 1 - seconds / max(self.now - began, 1e-9))
            began = self.now
            self.number += 1
            self.send(self.on_commit, self.number - 1, idle, work=self.sample_time("commit"))
            pause = 0.0
            if self.number % settings.checkpoint_every == 0 or self.number == settings.steps:
                pause = self.sample_time("checkpoint")
                saved.append(self.number)
            yield self.now + pause
            self.training = False
            if pause:
                self.send(self.store.retire_batches, saved[0])

    # ---- the results -----------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run to the end.

        Raises AsyncrlError past a failure budget, or if no part can make progress, which would
        break the store's rules.
        """
        start = time.perf_counter()
        hello = LearnerHello.make_first(Label(EPOCH, 0), "0", self.config.staleness.limit)
        self.send(self.store.follow_learner, hello)
        self.resume(self.learner)
        for generator in self.generators:
            generator.request_tickets()
        collects = gc.isenabled()
        # the garbage collector would take two fifths of the time: a million small objects are alive
        gc.disable()
        try:
            while self.events and not self.is_over:
                self.now, _, handler, args = heapq.heappop(self.events)
                handler(*args)
        finally:
            if collects:
                gc.enable()
        if not self.is_over:
            raise AsyncrlError(
                f"the simulated run makes no progress at batch {self.number} of "
                f"{self.config.learner.steps}; this is a bug in asyncrl, please report it"
            )
        return self.make_outcome(time.perf_counter() - start)

    def record_busy_seconds(self) -> None:
        self.busy_seconds.append(sum(generator.busy for generator in self.generators))

    def make_outcome(self, took_s: float) -> Outcome:
        """Return the results: simulated seconds, lags in versions, shares in [0, 1]."""
        learner, staleness = self.config.learner, self.config.staleness
        counts = sum(map(Counter[int], self.lags.values()), Counter[int]())
        tokens, steps = sum(counts.values()), len(self.lags)
        durations = sorted(self.sample_seconds)
        # as in the summary of a run: of the time from the first ticket to the last commit
        seconds = max(self.committed_at - (self.first_ticket or 0.0), 1e-9)
        busy_before, busy = self.busy_seconds
        idle_learner = max(0.0, 1 - self.trained_s / seconds)
        waiting = max(0.0, self.alive_seconds - learner.groups * self.trained_s) / seconds
        ledger = self.store.sum_ledger()
        faded = sum(x for size, x in ledger["trained"].items() if size.startswith("faded_"))
        return {
            "max_lag": staleness.limit,
            # admission window, over the commits: max_lag if it is always filled
            "limit_mean": fmean(self.limits),
            "generators": self.config.generators,
            "steps": steps,
            "seconds": seconds,  # first ticket to last commit
            "step_s": seconds / max(steps, 1),
            "tokens": tokens,  # trained
            "tokens_per_s": tokens / seconds,  # trained, per second
            "samples_per_s": steps * learner.groups * learner.group_size / seconds,
            "idle_generator": 1 - (busy - busy_before) / (seconds * len(self.generators)),
            "idle_learner": idle_learner,
            "idle_buffer": max(0.0, 1 - self.worked / max(self.now, 1e-9)),
            "waited_share": idle_learner,
            "lag_mean": mean(counts),
            "lag_p95": quantile(counts, 0.95),
            "lag_max": max(counts, default=0),
            # mean lag by Little's law: samples that wait for their training, over those of a batch
            "lag_closed_form": waiting / learner.groups,
            "lag_in_flight": fmean(self.flights),  # until delivery
            "lag_in_queue": fmean(self.queues),  # from there to training
            # lag -> share of the trained tokens
            "lag_histogram": {lag: count / max(tokens, 1) for lag, count in sorted(counts.items())},
            "tickets_mean": self.ticket_seconds / seconds,  # groups that generators hold, over time
            "tickets_max": self.most_tickets,
            "alive_mean": fmean(self.outstanding),  # groups outstanding
            # of the trained tokens: removed by the staleness weight
            "faded_share": faded / max(tokens, 1),
            # seconds from a sample's start to its last token: a tenth take longer
            "sample_p90_s": durations[int(0.9 * len(durations))] if durations else 0.0,
            "cut_share": self.cut / max(len(durations), 1),  # of the samples
            # reason -> tokens, without those trained and those left at the end
            "losses": {k: int(ledger[k]["tokens"]) for k in LOST if ledger[k]["tokens"]},
            "generated": sum_tokens(ledger),
            "left_over": int(ledger["left_over"]["tokens"]),
            "took_s": took_s,  # real seconds of the simulation
        }


def _make_length_sampler(
    times: TimeModel, config: Config, rng: random.Random
) -> Callable[[int, int], int]:
    """Return a function that samples the tokens of a call of (ticket, sample).

    Recorded groups are sampled as groups, because completions of one prompt have similar lengths.
    They are sampled along the run, because lengths change.
    """
    limit = config.generator.max_new_tokens
    if times.group_lengths is None:
        spec = f"uniform({limit / 2}, {limit})" if times.lengths is None else times.lengths
        sample_length = make_sampler(spec, rng, "lengths")
        return lambda ticket, sample: max(1, min(limit, round(sample_length())))
    tickets = config.learner.steps * config.learner.groups
    groups: dict[int, list[int]] = {}  # of training tickets; the newest gives the stage
    sample_group = make_sequence_sampler(
        times.group_lengths, rng, lambda: next(reversed(groups), 0) / tickets
    )

    def sample_group_length(ticket: int, sample: int) -> int:
        if ticket >= EVAL_BASE:
            return min(limit, rng.choice(sample_group()))
        if ticket not in groups:
            groups[ticket] = []
            groups[ticket] = sample_group()
        group = groups[ticket]
        return min(limit, group[sample] if sample < len(group) else rng.choice(group))

    return sample_group_length


@dataclass(slots=True)
class SimulatedSample:
    """A sample in progress.

    calls: calls to come, including the running one.
    born: engine step of its first token, as if its calls had followed each other.
    length: its tokens at the end of the running or last call.
    spans: of its tokens up to the last call's end or load of weights.
    """

    key: Key
    began: float
    calls: int
    spans: list[VersionSpan]
    born: int = 0
    length: int = 0

    @property
    def end(self) -> int:
        """The engine step at which the running call ends."""
        return self.born + self.length

    def extend(self, step: int, label: Label | None) -> None:
        """Add the tokens up to engine step `step`, sampled by `label`."""
        start, end = self.spans[-1].end if self.spans else 0, min(self.length, step - self.born)
        if end > start:
            assert label is not None
            self.spans.append(VersionSpan(label, "", start, end, label))


class SimulatedGenerator:
    """One generator. `sleeping`: its engine is empty and it waits for a message."""

    busy = renewed = 0.0
    sequence = 0
    scored = (0.0, 0.0, 0.0)  # samples, seconds until the result, seconds of calls

    def __init__(self, run: Simulation, name: str) -> None:
        self.run, self.name, self.times, self.config = run, name, run.times, run.config
        self.slots = self.most_open = self.config.generator.slots  # samples open at once
        self.session_s = self.session_tokens = self.session_calls = inf
        agent = self.config.agent
        if agent.uses_sessions:
            self.most_open = math.ceil(agent.sessions / self.config.generators)
            self.session_s, self.session_tokens = agent.deadline_s, agent.max_tokens
            self.session_calls = agent.max_calls or inf
        single = self.config.generators == 1 and not agent.uses_sessions
        lockstep = self.config.staleness.limit == 0 and single
        reward = self.config.reward
        uses_processes = reward.uses_reward_processes
        if reward.workers == "auto":  # one for each core of this machine
            self.workers = len(os.sched_getaffinity(0)) * uses_processes
        else:
            self.workers = reward.workers or int(uses_processes)
        drain = self.config.weights.in_flight == "between_groups"
        self.schedule = TicketSchedule(drain_first=drain, lockstep=lockstep)
        self.sleeping = True
        self.loaded: Label | None = None
        self.running: list[SimulatedSample] = []  # those with a row of the engine
        self.open = self.engine_clock = self.asked = 0
        self.returned: deque[SimulatedSample] = deque()  # sessions that wait for a free slot
        self.free = [0.0] * self.workers  # time at which each reward process is idle
        self.unscored = 0  # samples at the reward processes
        self.fresh: list[Trajectory] = []
        self.fresh_since = 0.0
        self.loop = self.work()
        run.resume(self.loop)

    # ---- messages --------------------------------------------------------------------------------

    def on_grant(self, sequence: int, tickets: list[Ticket]) -> None:
        if sequence == self.sequence:
            self.asked = 0
        self.schedule.add_tickets(tickets)
        self.wake()

    def wake(self) -> None:
        if self.sleeping:
            self.run.resume(self.loop)

    # ---- the loop --------------------------------------------------------------------------------

    def work(self) -> Loop:
        """Swap, start samples, decode, deliver and request, or sleep."""
        run, times, schedule = self.run, self.times, self.schedule
        while True:
            began = end = run.now
            waiting = schedule.sort_waiting() if self.open < self.most_open else []
            if not (
                self.running
                or self.returned
                or schedule.next_version(self.loaded) is not None
                or any(leased.is_ready(self.loaded) for leased in waiting)
            ):
                self.sleeping = True
                run.awake.pop(self.name, None)
                yield None
                self.sleeping = False
                run.awake[self.name] = self
                self.catch_up()
                # without rewards to wait for it polls its socket: the last poll counts as work
                polled = 0.0 if self.unscored or self.fresh else (run.now - began) % IDLE_POLL_S
                began, end = run.now - polled, run.now
            if (goal := schedule.next_version(self.loaded)) is not None:
                for sample in self.running:
                    sample.extend(self.engine_clock, self.loaded)
                self.loaded = goal
                end += run.sample_time("swap")
            continued = len(self.running)
            if self.loaded is not None:
                self.admit()
            rows = len(self.running)
            finished: list[SimulatedSample] = []
            if rows:
                longest = max(sample.end for sample in self.running) - self.engine_clock
                steps = min(DECODE_STEPS, longest)
                self.engine_clock += steps
                finished = [x for x in self.running if x.end <= self.engine_clock]
                self.running = [x for x in self.running if x.end > self.engine_clock]
                seconds = steps * (times.step + times.row * rows)
                seconds += times.admit * (rows - continued)
                seconds *= run.compute_slowdown() * run.sample_time("noise")
                end += seconds + times.look + times.finish * len(finished)
            yield end
            if rows:
                self.busy += end - began
            for sample in finished:
                self.on_call_end(sample)
            if self.fresh:
                self.deliver()
            self.request_tickets()
            if self.workers and end - self.renewed >= RENEW_S:
                self.renewed = end
                run.meter.on_rewards(self.name, self.scored, self.workers, end)

    def catch_up(self) -> None:
        """Load the newest version if there was time to load it while this generator slept."""
        policy, run = self.run.store.policy, self.run
        if (
            policy is not None
            and (self.loaded is None or policy > self.loaded)
            and run.committed_at + self.times.wire + run.sample_time("swap") < run.now
        ):
            self.loaded = policy

    def admit(self) -> None:
        """Start calls while there is room."""
        while self.returned and len(self.running) < self.slots:
            self.start_call(self.returned.popleft())
        room = min(self.slots - len(self.running), self.most_open - self.open)
        for leased, index in self.schedule.admit(self.loaded, room) if room > 0 else ():
            calls = round(min(self.session_calls, max(1.0, self.run.sample_time("calls"))))
            key = leased.ticket.ticket, index, leased.ticket.attempt
            self.open += 1
            self.start_call(SimulatedSample(key, self.run.now, calls, []))

    def start_call(self, sample: SimulatedSample) -> None:
        """Give a call of the sample a row of the engine."""
        tokens = sample.length + self.run.sample_length(*sample.key[:2])
        sample.born = self.engine_clock - sample.length
        sample.length = int(min(self.session_tokens, tokens))
        self.running.append(sample)

    def on_call_end(self, sample: SimulatedSample) -> None:
        """Continue the session with a tool, or end it.

        At its deadline a session ends with its finished calls; a running call may finish.
        """
        sample.extend(self.engine_clock, self.loaded)
        sample.calls -= 1
        now = self.run.now
        end = sample.began + self.session_s
        if sample.calls and sample.length < self.session_tokens and now < end:
            returns_at = now + self.run.sample_time("tool")
            handler, in_time = self.on_tool_return, returns_at < end
            self.run.schedule(min(returns_at, end), handler, sample, in_time)
        else:
            self.finish(sample, cut=bool(sample.calls) and now >= end)

    def on_tool_return(self, sample: SimulatedSample, in_time: bool) -> None:
        if in_time:
            self.returned.append(sample)
        else:
            self.finish(sample, cut=True)
        self.wake()

    def finish(self, sample: SimulatedSample, *, cut: bool) -> None:
        """End the sample, and score it in the first idle reward process."""
        run, length, key = self.run, sample.length, sample.key
        self.open -= 1
        run.sample_seconds.append(run.now - sample.began)
        run.cut += cut
        self.schedule.finish_sample(key, length)
        failed = self.times.failed and run.rng.random() < self.times.failed
        equal = key[0] % 1000 < 1000 * self.times.no_spread
        trajectory = Trajectory(
            *key,
            prompt_tokens=b"",
            tokens=make_tokens(length),
            behavior_logprobs=b"",
            mask=b"",
            spans=sample.spans,
            reward=0.0 if equal else float(key[1] % 2),
            reward_parts={},
            finish="stop",
            temperature=1.0,
            failed=RewardFailure("data", "simulated") if failed else "",
        )
        if not self.workers:
            self.fresh.append(trajectory)
            return
        seconds = run.sample_time("reward")
        if seconds > self.config.reward.deadline_s:
            seconds = self.config.reward.deadline_s
            trajectory.failed = RewardFailure("data", "the reward hung")
        end = max(run.now, self.free[0]) + seconds
        heapq.heapreplace(self.free, end)
        self.unscored += 1
        run.schedule(end, self.on_score, trajectory, end - run.now, seconds)

    def on_score(self, trajectory: Trajectory, waited_s: float, call_s: float) -> None:
        self.unscored -= 1
        self.fresh.append(trajectory)
        count, total_s, calls_s = self.scored
        self.scored = count + 1, total_s + waited_s, calls_s + call_s
        self.wake()

    def deliver(self) -> None:
        now = self.run.now
        self.fresh_since = self.fresh_since or now
        if not self.running or now - self.fresh_since > LINGER_S:
            work = self.times.buffer * len(self.fresh)
            self.run.send(self.run.on_delivery, self, self.fresh, work=work)
            self.fresh = []
            self.fresh_since = 0.0

    def request_tickets(self) -> None:
        unfinished = bool(self.unscored or self.fresh)
        free = count_samples_to_request(self.schedule, self.most_open, self.open, unfinished)
        if free > self.asked:
            self.sequence += 1
            self.asked = free
            self.run.send(self.run.requests.add, self.name, free, (self, self.sequence))
