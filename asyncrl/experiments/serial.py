"""The whole system in one process, by turns: what `asyncrl run` does in many, to be read first.

```
  +--> ask ---> swap ---> start ---> decode ---> deliver --+   the generator's side
  |                                                        |
  +-- commit <--- (the update's time) <--- train <---------+   the learner's side
```

Four parts do the work, the very same ones in a run of many processes:

- `Store` (buffer/store.py) grants tickets as far as the staleness limit allows, keeps the answers,
  composes batches and books every token.  Its process is buffer/service.py.
- `GeneratorTurn` (actors/turn.py) makes tickets into requests, the engine's answers into
trajectories.  Its
  process is actors/generator.py.
- `LearnerCore` (learner/step.py) trains on a batch.  Its process is learner/loop.py.
- The ring of published weights, here a dict, is shared memory there (asyncrl/transport/ring.py).

What the processes add is what goes wrong between processes: sockets, leases, deaths, patience.

Time is counted in decode steps, so that a run repeats bitwise whatever the machine does.  While an
update "runs" (`update_steps`), the engine goes on writing with the older weights, as far as the
staleness limit lets it: that is the natural lag of two sides of that speed.

`asyncrl compare` and `asyncrl sweep` make their runs by `run_serial`; what a run leaves is
gathered in
asyncrl/experiments/serial_record.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from actors.delay import decode_steps
from actors.engine import Engine, engine_for
from actors.turn import GeneratorTurn, trajectory
from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract.errors import AsyncrlError, ConfigError, NotFiniteError
from asyncrl.contract.messages import LearnerHello, WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.experiments.one_process import needs_own_process
from asyncrl.experiments.serial_record import RunRecord, SerialRecord
from asyncrl.models.policy import named_weights, weights_digest
from buffer.groups import settings
from buffer.numbers import limit_metrics
from buffer.service import evaluations
from buffer.store import Store
from learner.step import LearnerCore

EPOCH = 1  # the learner's only life
SLICE = 4  # decode steps between two looks at the buffer
Watch = Callable[[list[float], list[float]], str]


class PendingUpdate(NamedTuple):
    """Batch `number` is trained and its weights are published; it is committed at `ends`."""

    number: int
    label: Label
    digest: str
    ends: int  # in decode steps
    metrics: dict[str, float]


class PublishedWeights(NamedTuple):
    """A published version."""

    tensors: dict[str, torch.Tensor]
    digest: str


class SerialRun:
    """One config from the initial weights to the last evaluation.

    watch: called after every evaluation on held-out prompts with the steps and accuracies so far; a
    reason that it returns ends the run."""

    def __init__(self, config: Config, watch: Watch | None = None) -> None:
        if why := needs_own_process(config):
            raise ConfigError(why)
        self.config = config
        self.watch = watch
        self.core = LearnerCore(config, config.model.path)
        self.turn = GeneratorTurn(config, engine_of(config), lockstep=config.staleness.limit == 0)
        task = self.turn.task
        self.store = Store(
            settings(config),
            lambda index: task.prompt("train", index, config.seed),
            evaluations(config, task),
        )
        self.ring: dict[Label, PublishedWeights] = {}
        self.loaded: Label | None = None  # in the engine
        self.clock = 0  # decode steps
        self.ended = 0  # when the last update was over
        self.update: PendingUpdate | None = None  # the one under way
        self.numbers = SerialRecord()

    def run(self) -> RunRecord:
        """The whole run; returns its record.  Raises AsyncrlError when nothing can move."""
        self.numbers.began = time.monotonic()
        self.hello()
        try:
            while self.store.committed < self.config.learner.steps or self.evaluating():
                self.ask()
                self.swap()
                self.start()
                self.decode()
                self.deliver()
                if self.turn.engine.active:
                    self.clock += SLICE
                while self.commit() or self.train():
                    pass
                if not self.turn.engine.active:
                    self.clock = max(self.clock, self.idle_until())
                if self.is_abandoned():
                    break
        finally:
            self.turn.rewards.close()
        return self.record(time.monotonic() - self.numbers.began)

    def hello(self) -> None:
        """The learner presents itself and the weights that it starts from (learner/loop.py)."""
        label, digest = self.publish()
        self.store.hello(
            LearnerHello(
                protocol=1,
                run="",
                epoch=EPOCH,
                label=label,
                parent=None,
                digest=digest,
                next_ticket=0,
                origin=0,
                max_lag=self.config.staleness.limit,
                source=WeightsSource(EPOCH, "", "", ""),
                ring=[],
            )
        )

    # ---- the generator's side: actors/generator.py has a method of the same name for each --------

    def ask(self) -> None:
        """Tickets for the rows that are free (`want`; buffer/service.py grants them)."""
        samples = self.turn.samples_to_request()
        self.turn.schedule.announce(self.store.announcement())
        if samples > 0:
            self.turn.accept_tickets(self.store.grant("one", 1, samples, 0.0))

    def swap(self) -> None:
        """The weights that the schedule wants, between two decode steps."""
        goal = self.turn.schedule.next_version(self.loaded)
        if goal is not None:
            weights = self.ring[goal]
            self.turn.engine.load(weights.tensors, goal, weights.digest)
            self.loaded = goal

    def start(self) -> None:
        """Samples whose weights are loaded, as far as rows are free (`admit`)."""
        requests, refused = self.turn.requests(self.loaded)
        for sample in refused:
            raise ConfigError(
                f"ticket {sample.ticket.ticket}: {sample.why.why}; a comparison needs it"
            )
        self.turn.engine.add(requests)

    def decode(self) -> None:
        """A few steps of the engine; what ended waits for its time (`decode`, `finished`)."""
        began = time.monotonic()
        for answer in self.turn.engine.step(SLICE) if self.turn.engine.active else []:
            written = self.turn.finished(answer)
            assert written is not None, "no ticket is dropped here"
            self.numbers.tokens += len(answer.tokens)
            late = decode_steps(self.config, written.ticket, answer.key[1], len(answer.tokens))
            self.turn.late.hold(self.clock + SLICE + late, answer.key)
        self.numbers.decode_s += time.monotonic() - began

    def deliver(self) -> None:
        """Rewards, and the trajectories to the store (`collect`, `deliver`; buffer/service.py)."""
        began = time.monotonic()
        for written in self.turn.due(self.clock + SLICE):
            self.turn.submit(written)
            while not (results := self.turn.results()):
                time.sleep(0.001)
            for judged, result in results:
                if result.failed:
                    raise AsyncrlError(
                        f"the reward function failed on ticket {judged.ticket.ticket}: "
                        f"{result.failed}; a comparison needs every reward"
                    )
                delivered = trajectory(judged, result)
                self.numbers.answer_delivered(delivered)
                self.store.deliver(delivered, 0.0)
        self.numbers.decode_s += time.monotonic() - began

    # ---- the learner's side: learner/loop.py -----------------------------------------------------

    def train(self) -> bool:
        """Begin an update, if none is under way and a batch is ready."""
        number = self.core.state.number
        if self.update is not None or number == self.config.learner.steps:
            return False
        groups, _ = self.store.ask(EPOCH, number)
        if not groups:
            return False
        batch = self.store.batch(groups, EPOCH, number)
        self.numbers.batch_leased(batch, self.config.staleness)
        began = time.monotonic()
        metrics = self.core.train(batch)
        self.numbers.learn_s += time.monotonic() - began
        self.numbers.batch_trained(batch, metrics)
        # in decode steps, as the time is here: what the learner waited, of the whole step
        waited = self.clock - self.ended
        length = update_steps(self.config)
        told = metrics | {"time/learner_idle_share": waited / (waited + length)}
        self.update = PendingUpdate(number, *self.publish(), self.clock + length, told)
        return True

    def publish(self) -> tuple[Label, str]:
        """The learner's weights into the ring, as a version of their own."""
        label = Label(EPOCH, self.core.state.number)
        digest = weights_digest(self.core.model)
        tensors = {name: w.detach().clone() for name, w in named_weights(self.core.model)}
        self.ring[label] = PublishedWeights(tensors, digest)
        return label, digest

    def commit(self) -> bool:
        """End an update whose time is over: the version counts, and frees room for new tickets."""
        if self.update is None or self.clock < self.update.ends:
            return False
        number, label, digest, self.ended, metrics = self.update
        self.update = None
        before = self.store.limit
        seen = admission.limit_evidence(metrics, self.config.staleness.ess_floor)
        self.store.commit(number, label, digest, self.core.unused, seen)
        self.numbers.curve[-1].update(limit_metrics(self.store, before), clock=self.ended)
        self.store.checkpointed(number + 1)
        keep = {*self.store.pinned_versions(), label, self.loaded}
        self.ring = {name: weights for name, weights in self.ring.items() if name in keep}
        return True

    # ---- when it moves on, and when it ends ------------------------------------------------------

    def idle_until(self) -> int:
        """With nothing to decode: the time at which the update ends or an answer held back is due,
        whichever comes first; 0: neither.
        """
        ends = [float(self.update.ends)] if self.update is not None else []
        # `deliver` looks one slice ahead
        ends += [self.turn.late.next_due - SLICE] if self.turn.late.next_due < math.inf else []
        return math.ceil(min(ends, default=0))

    def evaluating(self) -> bool:
        return bool(self.store.evaluations.pending)

    def is_abandoned(self) -> bool:
        """After an evaluation: does `watch` end the run here?"""
        heldout = self.numbers.take_evaluations(self.store)
        if self.watch is not None and heldout:
            self.numbers.abandoned = self.watch(*self.numbers.accuracy("heldout"))
        return bool(self.numbers.abandoned)

    def record(self, wall_s: float) -> RunRecord:
        digest = weights_digest(self.core.model)
        return self.numbers.as_run_record(self.config.seed, self.store, digest, self.clock, wall_s)


def update_steps(config: Config) -> int:
    """Decode steps that an update takes when learner and generators are equally fast: those in
    which the engine writes one batch.
    """
    samples = config.learner.groups * config.learner.group_size
    rows = min(config.generator.slots, samples)
    return max(1, round(samples * config.generator.max_new_tokens * 0.75 / rows))


_engines: dict[str, Engine] = {}  # a warm process keeps its engine from run to run


def engine_of(config: Config) -> Engine:
    """The engine for `config`, empty."""
    rest = (config.weights.in_flight, config.exact, config.lora, config.agent.uses_sessions)
    key = repr((config.model, config.generator, *rest))  # what `make_engine` reads
    if key not in _engines:
        _engines[key] = engine_for(config)
    engine = _engines[key]
    engine.abort(list(engine.progress()))
    return engine


def run_serial(config: Config, seed: int, watch: Watch | None = None) -> RunRecord:
    """Run `config` with `seed`.  An update that stays not finite ends the run and is recorded as a
    failure, not raised.
    """
    run = SerialRun(msgspec.structs.replace(config, seed=seed), watch)
    try:
        return run.run()
    except NotFiniteError as error:
        return {**run.record(0.0), "failed": str(error)}
