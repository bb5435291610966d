"""One simulated run, and what comes out of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError
from asyncrl.contract.messages import LOST
from asyncrl.experiments.simulate.simulated_processes import (
    SimulatedGenerator,
    SimulatedLearner,
    draws,
)
from asyncrl.experiments.simulate.times import TimeModel
from asyncrl.experiments.simulate.world import EventClock, SimulatedBuffer
from asyncrl.tasks import get_task
from buffer.evaluation import Evaluations
from buffer.groups import settings
from buffer.ledger import total_tokens
from buffer.service import evaluations
from buffer.training_log import mean, quantile

FEW = 64  # generators


class SimulationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one simulated run came to.  Times in simulated seconds, lag in versions, shares in [0,
    1].
    """

    max_lag: float
    limit_mean: float  # of new tickets, over the commits: less where the limit sets itself
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
    waited_share: float  # of the run's seconds: the learner without a batch
    lag_mean: float
    lag_p95: int
    lag_max: int
    lag_in_flight: float  # mean over samples: until delivery
    lag_in_queue: float  # and from there to training
    lag_histogram: dict[int, float]  # lag -> share of the trained tokens
    tickets_mean: float  # groups that generators hold, over time
    tickets_max: int
    alive_mean: float  # groups outstanding, stored or leased
    faded_share: float  # of the trained tokens: what on_exceed = downweight takes from their weight
    sample_p90_s: float  # seconds from a sample's start to its last token: a tenth take longer
    cut_share: float  # of the samples: ended by agent.deadline_s
    losses: dict[str, int]  # reason -> tokens, without those trained and those left at the end
    generated: int
    left_over: int
    took_s: float  # real seconds of the simulation


class Simulation:
    """A run of `config` with `times`.  `quick=False` walks the store as the service does
    (tests).
    """

    def __init__(
        self,
        config: Config,
        times: TimeModel,
        seed: int = 0,
        *,
        evaluate: bool = True,
        quick: bool = True,
    ) -> None:
        self.config = config
        self.clock = EventClock()
        self.draws = drawn = draws(
            times, config, seed, lambda: self.learner.number / config.learner.steps
        )
        made = evaluations(config, get_task(config.task)) if evaluate else Evaluations()
        store_settings = without_lease_deadlines(settings(config))
        self.buffer = SimulatedBuffer(self.clock, times, store_settings, made, quick=quick)
        self.learner = SimulatedLearner(self.clock, self.buffer, config, drawn, self.on_commit)
        self.buffer.learner = self.learner
        self.generators = [
            SimulatedGenerator(index, self.clock, self.buffer, config, drawn)
            for index in range(config.generators)
        ]
        self.alive: list[int] = []
        self.idle_shares: list[float] = []
        self.counted = [(0.0, 0.0)] * len(self.generators)
        self.last_commit = self.busy = 0.0

    def run(self) -> SimulationOutcome:
        """Raises AsyncrlError when the run comes to a stand, which the rules of the store exclude,
        or past a failure budget.
        """
        began = time.perf_counter()
        self.learner.hello()
        for generator in self.generators:
            generator.want()
        collects = gc.isenabled()
        # with a million small objects alive, the search for cycles is two fifths of the time
        gc.disable()
        try:
            ended = self.clock.run()
        finally:
            if collects:
                gc.enable()
        if not ended:
            raise AsyncrlError(
                f"the simulated run stands still at batch {self.learner.number} of "
                f"{self.config.learner.steps}: a bug of ours; please report it"
            )
        return self.make_outcome(time.perf_counter() - began)

    def on_commit(self) -> None:
        """Numbers at a commit, as the buffer's metrics have them: of few generators by their last
        Renew, of many by their sum.
        """
        now = self.clock.now
        before = self.last_commit
        self.last_commit = now
        self.alive.append(len(self.buffer.store.alive))
        busy = idle = 0.0
        if len(self.generators) > FEW:
            busy, self.busy = self.draws.busy - self.busy, self.draws.busy
            idle = max(0.0, len(self.generators) * (now - before) - busy)
        for index, generator in enumerate(self.generators if len(self.generators) <= FEW else ()):
            busy_now, idle_now = generator.reported_times()
            was = self.counted[index]
            busy = busy + max(0.0, busy_now - was[0])
            idle = idle + max(0.0, idle_now - was[1])
            self.counted[index] = (max(busy_now, was[0]), max(idle_now, was[1]))
        if busy + idle > 0:
            self.idle_shares.append(idle / (busy + idle))

    def make_outcome(self, took: float) -> SimulationOutcome:
        buffer = self.buffer
        config = self.config
        counts: dict[int, int] = {}
        for row in buffer.lags.values():
            for lag, amount in row.items():
                counts[lag] = counts.get(lag, 0) + amount
        tokens = sum(counts.values())
        lasted = self.draws.lasted
        seconds = self.last_commit - (buffer.first_ticket or 0.0)
        steps = len(buffer.lags)
        ledger = buffer.store.ledger()
        samples = steps * config.learner.groups * config.learner.group_size
        return SimulationOutcome(
            max_lag=config.staleness.limit,
            limit_mean=average(buffer.limits),
            generators=config.generators,
            steps=steps,
            seconds=seconds,
            step_s=seconds / max(steps, 1),
            tokens=tokens,
            tokens_per_s=tokens / max(seconds, 1e-9),
            samples_per_s=samples / max(seconds, 1e-9),
            idle_generator=average(self.idle_shares),
            idle_learner=average(self.learner.shares),
            idle_buffer=max(0.0, 1 - buffer.worked / max(self.clock.now, 1e-9)),
            waited_share=self.learner.idle / max(self.learner.idle + self.learner.busy, 1e-9),
            lag_mean=mean(counts),
            lag_p95=quantile(counts, 0.95),
            lag_max=max(counts, default=0),
            lag_in_flight=average([x for x, _ in buffer.splits.values()]),
            lag_in_queue=average([x for _, x in buffer.splits.values()]),
            lag_histogram={k: amount / max(tokens, 1) for k, amount in sorted(counts.items())},
            tickets_mean=(
                buffer.out_seconds + buffer.out * max(0.0, self.last_commit - buffer.out_since)
            )
            / max(seconds, 1e-9),
            tickets_max=buffer.most_out,
            alive_mean=average(self.alive),
            faded_share=downweighted_tokens(counts, config) / max(tokens, 1),
            sample_p90_s=sorted(lasted)[int(0.9 * len(lasted))] if lasted else 0.0,
            cut_share=self.draws.cut / max(len(lasted), 1),
            losses={k: int(ledger[k]["tokens"]) for k in LOST if ledger[k]["tokens"]},
            generated=total_tokens(ledger),
            left_over=int(ledger["left_over"]["tokens"]),
            took_s=took,
        )


def downweighted_tokens(counts: Mapping[int, int], config: Config) -> float:
    """Tokens times what on_exceed = downweight takes from their weight; counts: tokens by lag."""
    staleness = config.staleness
    if staleness.on_exceed != "downweight":
        return 0.0
    total = 0.0
    for lag, tokens in counts.items():
        total += tokens * (1 - 0.5 ** (max(0.0, lag - staleness.limit) / staleness.half_life))
    return total


def without_lease_deadlines(store: Any) -> Any:
    """The store's settings with leases that only a lost generator ends (Generator.lose): nothing
    here renews them.
    """
    store.lease_s = float("inf")
    return store


def average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def simulate(
    config: Config, times: TimeModel, seed: int = 0, *, evaluate: bool = True
) -> SimulationOutcome:
    """One simulated run.  Raises ConfigError for what it does not simulate."""
    if times.failed and config.reward.on_error == "stop":
        raise ConfigError(
            "--time failed=...: with reward.on_error = stop the first failed reward ends the run; "
            "set it to drop"
        )
    return Simulation(config, times, seed, evaluate=evaluate).run()
