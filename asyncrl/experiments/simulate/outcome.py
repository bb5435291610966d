"""One simulated run and its results."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import LOST
from asyncrl.experiments.simulate.simulated_processes import (
    SimulatedGenerator,
    SimulatedLearner,
    TimeSampler,
)
from asyncrl.experiments.simulate.times import TimeModel
from asyncrl.experiments.simulate.world import EventClock, SimulatedBuffer
from asyncrl.tasks.evaluation_sets import build_task
from buffer.evaluation import Evaluations
from buffer.groups import make_store_settings
from buffer.ledger import sum_tokens
from buffer.service import make_evaluations
from buffer.training_log import mean, quantile


class SimulationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one simulated run.

    Times are simulated seconds, lags are versions, shares lie in [0, 1].
    """

    max_lag: float
    limit_mean: float  # admission window, over the commits: max_lag if it is always filled
    generators: int
    steps: int
    seconds: float  # first ticket to last commit
    step_s: float
    tokens: int  # trained
    tokens_per_s: float  # trained, per second
    samples_per_s: float
    idle_generator: float
    idle_learner: float
    idle_buffer: float
    waited_share: float  # the same as idle_learner
    lag_mean: float
    lag_p95: int
    lag_max: int
    # closed form of the mean lag: samples that wait for their training, over those of a batch
    lag_closed_form: float
    lag_in_flight: float  # mean over samples: until delivery
    lag_in_queue: float  # and from there to training
    lag_histogram: dict[int, float]  # lag -> share of the trained tokens
    tickets_mean: float  # groups that generators hold, over time
    tickets_max: int
    alive_mean: float  # groups outstanding, stored or leased
    faded_share: float  # of the trained tokens: removed by the staleness weight
    sample_p90_s: float  # seconds from a sample's start to its last token: a tenth take longer
    cut_share: float  # of the samples: ended by agent.deadline_s
    losses: dict[str, int]  # reason -> tokens, without those trained and those left at the end
    generated: int
    left_over: int
    took_s: float  # real seconds of the simulation


class Simulation:
    """A run of `config` with `times`.

    scale: factors of the times by name.
    """

    def __init__(
        self,
        config: Config,
        times: TimeModel,
        seed: int = 0,
        *,
        evaluate: bool = True,
        scale: Mapping[str, float] | None = None,
    ) -> None:
        self.config = config
        self.clock = EventClock()
        self.draws = TimeSampler(
            times, config, seed, lambda: self.learner.number / config.learner.steps, scale or {}
        )
        planned = make_evaluations(config, build_task(config)) if evaluate else Evaluations()
        store_settings = make_store_settings(config)
        store_settings.lease_s = math.inf  # leases are not renewed; only a lost generator ends them
        self.buffer = SimulatedBuffer(self.clock, times, store_settings, planned)
        self.learner = SimulatedLearner(self.clock, self.buffer, config, self.draws, self.on_commit)
        self.buffer.learner = self.learner
        self.generators = [
            SimulatedGenerator(index, self.clock, self.buffer, config, self.draws)
            for index in range(config.generators)
        ]
        self.buffer.capacity = sum(generator.most_open for generator in self.generators)
        self.buffer.threads = config.learner.ranks * config.learner.threads
        self.buffer.threads += config.generators * config.generator.threads
        self.alive: list[int] = []
        self.times: list[tuple[float, float]] = []
        self.buffer.on_first_ticket = self.record_times
        self.last_commit = 0.0

    def run(self) -> SimulationOutcome:
        """Run to the end.

        Raises AsyncrlError past a failure budget, or if no part can make progress, which would
        break the store's rules.
        """
        start = time.perf_counter()
        self.learner.register()
        for generator in self.generators:
            generator.request_tickets()
        collects = gc.isenabled()
        # the garbage collector would take two fifths of the time: a million small objects are alive
        gc.disable()
        try:
            is_complete = self.clock.run()
        finally:
            if collects:
                gc.enable()
        if not is_complete:
            raise AsyncrlError(
                f"the simulated run makes no progress at batch {self.learner.number} of "
                f"{self.config.learner.steps}; this is a bug in asyncrl, please report it"
            )
        return self.make_outcome(time.perf_counter() - start)

    def on_commit(self) -> None:
        """Record the time, and at the last commit the generators' times."""
        self.last_commit = self.clock.now
        self.alive.append(len(self.buffer.store.alive))
        if self.buffer.store.committed == self.config.learner.steps:
            self.record_times()

    def record_times(self) -> None:
        """Record the generators' busy and idle seconds: at the first ticket, the last commit."""
        times = [generator.measure_times() for generator in self.generators]
        self.times.append((sum(busy for busy, _ in times), sum(idle for _, idle in times)))

    def make_outcome(self, took_s: float) -> SimulationOutcome:
        buffer, learner = self.buffer, self.learner
        counts: Counter[int] = Counter()
        for row in buffer.lags.values():
            counts.update(row)
        tokens = sum(counts.values())
        durations = sorted(self.draws.sample_seconds)
        seconds = self.last_commit - (buffer.first_ticket or 0.0)
        steps = len(buffer.lags)
        ledger = buffer.store.sum_ledger()
        # as in the summary of a run: of the time from the first ticket to the last commit
        (busy_before, idle_before), (busy, idle) = self.times
        busy, idle = busy - busy_before, idle - idle_before
        idle_learner = max(0.0, 1 - learner.busy / max(seconds, 1e-9))
        samples = steps * self.config.learner.groups * self.config.learner.group_size
        held_since = max(0.0, self.last_commit - buffer.tickets_since)
        return SimulationOutcome(
            max_lag=self.config.staleness.limit,
            limit_mean=average(buffer.limits),
            generators=self.config.generators,
            steps=steps,
            seconds=seconds,
            step_s=seconds / max(steps, 1),
            tokens=tokens,
            tokens_per_s=tokens / max(seconds, 1e-9),
            samples_per_s=samples / max(seconds, 1e-9),
            idle_generator=idle / max(busy + idle, 1e-9),
            idle_learner=idle_learner,
            idle_buffer=max(0.0, 1 - buffer.worked / max(self.clock.now, 1e-9)),
            waited_share=idle_learner,
            lag_mean=mean(counts),
            lag_p95=quantile(counts, 0.95),
            lag_max=max(counts, default=0),
            lag_closed_form=self.average_waiting_groups(seconds) / self.config.learner.groups,
            lag_in_flight=average([flight for flight, _ in buffer.splits.values()]),
            lag_in_queue=average([queue for _, queue in buffer.splits.values()]),
            lag_histogram={lag: count / max(tokens, 1) for lag, count in sorted(counts.items())},
            tickets_mean=(buffer.ticket_seconds + buffer.tickets * held_since) / max(seconds, 1e-9),
            tickets_max=buffer.most_tickets,
            alive_mean=average(self.alive),
            faded_share=count_downweighted_tokens(counts, self.config) / max(tokens, 1),
            sample_p90_s=durations[int(0.9 * len(durations))] if durations else 0.0,
            cut_share=self.draws.cut / max(len(durations), 1),
            losses={k: int(ledger[k]["tokens"]) for k in LOST if ledger[k]["tokens"]},
            generated=sum_tokens(ledger),
            left_over=int(ledger["left_over"]["tokens"]),
            took_s=took_s,
        )

    def average_waiting_groups(self, seconds: float) -> float:
        """Return the mean over time of the granted groups that are not in training."""
        outstanding = self.buffer.alive_seconds
        training = self.config.learner.groups * self.learner.busy
        return max(0.0, outstanding - training) / max(seconds, 1e-9)


def count_downweighted_tokens(counts: Mapping[int, int], config: Config) -> float:
    """Return the tokens that the staleness weight removes; counts: tokens by lag."""
    staleness = config.staleness
    if staleness.on_exceed != "downweight":
        return 0.0
    excess = {lag: max(0.0, lag - staleness.limit) / staleness.half_life for lag in counts}
    return sum((tokens * (1.0 - 0.5 ** excess[lag]) for lag, tokens in counts.items()), 0.0)


def average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def simulate(
    config: Config,
    times: TimeModel,
    seed: int = 0,
    *,
    evaluate: bool = True,
    scale: Mapping[str, float] | None = None,
) -> SimulationOutcome:
    """Simulate one run. Raises ConfigError for settings that are not simulated."""
    if times.failed and config.reward.on_error == "stop":
        raise ConfigError(
            "--time failed=...: with reward.on_error = stop the first failed reward ends the run; "
            "set it to drop"
        )
    if len(config.agents) > 1:
        raise ConfigError(
            "task.mixture: parts with agents of their own are not simulated; simulate each part "
            "with its [agent] alone"
        )
    return Simulation(config, times, seed, evaluate=evaluate, scale=scale).run()
