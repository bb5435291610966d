"""The complete training loop in one process: the first module to read.

```
  +--> ask ---> swap ---> start ---> decode ---> deliver --+   the generator's side
  |                                                        |
  +-- commit <--- (the update's time) <--- train <---------+   the learner's side
```

`asyncrl run` spreads this loop over many processes. The same four parts do the work in both:

- `Store` (buffer/store.py) grants tickets within the staleness limit, keeps the samples, composes
  batches and accounts for every token. Its process is buffer/service.py.
- `GeneratorTurn` (actors/turn.py) turns tickets into engine requests and completions into
  trajectories. Its process is actors/generator.py.
- `LearnerCore` (learner/step.py) trains on a batch. Its process is learner/loop.py.
- A dict holds the published weights here. Processes share them in memory
  (asyncrl/transport/ring.py).

The processes add the parts that can fail between them: sockets, leases, crashes and timeouts.

Time is counted in decode steps, so a run repeats bitwise on any machine. An update takes
`update_steps` of them. Meanwhile the engine continues with the older weights as far as the
staleness limit allows, which gives the natural lag of a learner and generators of that relative
speed.

`asyncrl compare` and `asyncrl sweep` call `run_serial`. serial_record.py beside this file collects
the results.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from actors.engine import Engine, build_engine
from actors.turn import GeneratorTurn, build_trajectory
from asyncrl.config.tree import Config
from asyncrl.contract import admission
from asyncrl.contract.errors import AsyncrlError, ConfigError, NotFiniteError
from asyncrl.contract.freshness import BatchMeter
from asyncrl.contract.messages import LearnerHello, Numbers
from asyncrl.contract.versions import Label
from asyncrl.experiments.process_run import needs_own_process
from asyncrl.experiments.serial_record import RunRecord, SerialRecord, describe_evaluations
from asyncrl.models import policy
from buffer.groups import make_store_settings
from buffer.mixer import make_mixer
from buffer.numbers import compute_limit_metrics
from buffer.service import make_evaluations
from buffer.store import Store
from learner.step import LearnerCore

EPOCH = 1  # the learner never restarts here
SLICE = 4  # decode steps between two calls of the buffer
Watch = Callable[[list[float], list[float]], str]


class PendingUpdate(NamedTuple):
    """A trained batch whose weights are published; its commit is due at `ends`."""

    number: int  # of the batch
    label: Label
    digest: str
    ends: int  # in decode steps
    metrics: Numbers


class SerialRun:
    """One run of a config, from the initial weights to the last evaluation.

    `watch` is called after every evaluation on held-out prompts with the steps and mean rewards so
    far. If it returns a reason, the run stops early.
    """

    def __init__(self, config: Config, watch: Watch | None = None) -> None:
        if reason := needs_own_process(config):
            raise ConfigError(reason)
        self.config = config
        self.watch = watch
        self.core = LearnerCore(config, config.model.path)
        self.turn = GeneratorTurn(config, get_engine(config), lockstep=config.staleness.limit == 0)
        task = self.turn.task
        store_settings = make_store_settings(config)
        if config.staleness.wait == "auto":
            store_settings.wait = 0.0  # a comparison needs a known lag
        self.meter = BatchMeter()
        self.store = Store(
            store_settings,
            lambda index: task.prompt("train", index, config.seed),
            make_evaluations(config, task),
            make_mixer(config, task),
        )
        self.store.evaluations.on_result = self.on_evaluation
        self.ring: dict[Label, tuple[bytearray, str]] = {}  # flat weights and their digest
        if config.reads_versions:
            self.core.measure.read_weights = self.read_weights
        self.loaded: Label | None = None  # the version in the engine
        self.clock = 0  # decode steps
        self.ended = 0  # decode step at which the last update ended
        self.update: PendingUpdate | None = None  # the running one
        # decode steps of an update: the time in which the engine generates one batch, so that
        # learner and generators are equally fast
        samples = config.learner.groups * config.learner.group_size
        slots = min(config.generator.slots, samples)
        self.update_steps = max(1, round(samples * config.generator.max_new_tokens * 0.75 / slots))
        self.numbers = SerialRecord()

    def run(self) -> RunRecord:
        """Run to the end and return the record.

        Raises AsyncrlError if no part can make progress.
        """
        self.numbers.began = time.monotonic()
        label, digest = self.publish()
        # register the learner and its initial weights with the store (learner/loop.py)
        limit = self.config.staleness.limit
        self.store.follow_learner(LearnerHello.make_first(label, digest, limit))
        try:
            while self.store.committed < self.config.learner.steps or self.store.evaluations.rounds:
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
                    # to the update's end, a delayed sample that is due (`deliver` looks one slice
                    # ahead) or the window's opening
                    due_times = [
                        self.store.next_opening(self.clock),
                        *(due - SLICE for due, _ in self.turn.delayed[:1]),
                        math.inf if self.update is None else self.update.ends,
                    ]
                    if min(due_times) < math.inf:
                        self.clock = max(self.clock, math.ceil(min(due_times)))
                if self.numbers.abandoned:
                    break
        finally:
            self.turn.rewards.close()
        return self.make_record(time.monotonic() - self.numbers.began)

    def on_evaluation(self, number: int, values: Numbers) -> None:
        """Record the result at version `number`: the store keeps only the first and the newest."""
        for name, value in values.items():
            self.numbers.finished.setdefault(name, {})[number] = value
        if self.watch is not None and "eval/heldout" in values:
            accuracy = describe_evaluations(self.numbers.finished)["accuracy"]
            self.numbers.abandoned = self.watch(*accuracy)

    # ---- the generator's side: actors/generator.py has a method of the same name for each --------

    def ask(self) -> None:
        """Request tickets for free engine rows (`want`; buffer/service.py grants them)."""
        samples = self.turn.count_samples_to_request()
        self.turn.schedule.announce(self.store.make_announcement())
        if samples > 0:
            tickets = self.store.grant("one", 1, samples, self.clock)
            self.meter.on_grant((t.ticket for t in tickets if t.kind == "train"), self.clock)
            self.turn.accept_tickets(tickets)
        free = max(0, self.turn.count_samples_to_request())
        self.meter.on_free(free, self.config.generator.slots, self.clock)

    def swap(self) -> None:
        """Load the version that the schedule requires, between two decode steps."""
        goal = self.turn.schedule.next_version(self.loaded)
        if goal is not None:
            flat, digest = self.ring[goal]
            tensors = policy.read_flat(memoryview(flat), self.core.layout)
            self.turn.engine.load(tensors, goal, digest)
            self.loaded = goal

    def start(self) -> None:
        """Start samples whose weights are loaded, as far as the engine has room (`admit`)."""
        requests, refused = self.turn.build_requests(self.loaded)
        for sample in refused:
            raise ConfigError(
                f"ticket {sample.ticket.ticket}: {sample.failure.why}; a comparison needs it"
            )
        self.turn.engine.add(requests)

    def decode(self) -> None:
        """Run a few engine steps and queue the finished samples (`decode`, `finished`)."""
        for completion in self.turn.engine.step(SLICE) if self.turn.engine.active else []:
            self.numbers.tokens += len(completion.tokens)
            self.turn.hold(completion, self.clock + SLICE)

    def deliver(self) -> None:
        """Score the due samples and deliver their trajectories (`collect`, `deliver`)."""
        for finished in self.turn.pop_due(self.clock + SLICE):
            self.turn.submit(finished)
            while not (results := self.turn.poll_results()):
                time.sleep(0.001)
            for judged, result in results:
                if result.failed:
                    raise AsyncrlError(
                        f"the reward function failed on ticket {judged.ticket.ticket}: "
                        f"{result.failed}; a comparison needs every reward"
                    )
                sample = build_trajectory(judged, result)
                self.numbers.record_answer(sample)
                self.store.deliver(sample, self.clock)
                if self.store.is_complete(sample.ticket):
                    self.meter.on_complete([sample.ticket], self.clock)

    # ---- the learner's side: learner/loop.py -----------------------------------------------------

    def train(self) -> bool:
        """Start an update if none is running and a batch is ready."""
        number = self.core.state.number
        if self.update is not None or number == self.config.learner.steps:
            return False
        groups, _ = self.store.ask(EPOCH, number)
        if not groups:
            return False
        batch = self.store.make_batch(number)
        self.numbers.record_lease(batch, self.store.mask_limit)
        metrics = self.core.train(batch)
        self.numbers.record_training(batch, metrics, self.core.updates)
        # the learner's wait as a share of its step, both in decode steps
        idle = self.clock - self.ended
        length = self.update_steps
        update_metrics = metrics | {"time/learner_idle_share": idle / (idle + length)}
        self.update = PendingUpdate(number, *self.publish(), self.clock + length, update_metrics)
        return True

    def publish(self) -> tuple[Label, str]:
        """Publish the learner's weights as a new version."""
        label = Label(EPOCH, self.core.state.number)
        flat = policy.copy_flat_bytes(self.core.model)
        digest = policy.compute_digest(flat)
        self.ring[label] = flat, digest
        return label, digest

    def read_weights(self, label: Label, _digest: str) -> bytearray:
        """Return the flat weights of version `label`; empty when they are no longer held."""
        return self.ring[label][0] if label in self.ring else bytearray()

    def commit(self) -> bool:
        """Commit a finished update: its version counts, and the limit admits new tickets."""
        if self.update is None or self.clock < self.update.ends:
            return False
        number, label, digest, self.ended, metrics = self.update
        self.update = None
        previous_limit = self.store.limit
        evidence = admission.read_evidence(metrics, self.config.staleness.ess_floor)
        tickets = self.store.comps[number - self.store.base]
        timing = self.meter.on_commit(tickets, metrics["time/learner_idle_share"], self.ended)
        self.store.commit(
            number,
            label,
            digest,
            self.core.unused,
            evidence=evidence,
            timing=timing,
            now=float(self.ended),
        )
        moves = compute_limit_metrics(self.store, previous_limit)
        moves |= self.store.mixer.compute_metrics(number + 1)
        self.numbers.curve[-1].update(moves, clock=self.ended)
        self.store.retire_batches(number + 1)
        needed = {*self.store.list_pinned_versions(), label, self.loaded}
        if self.core.measure.read_weights is not None:
            needed |= {Label(EPOCH, label.number - lag) for lag in range(self.config.weights.slots)}
        self.ring = {name: weights for name, weights in self.ring.items() if name in needed}
        return True

    def make_record(self, wall_s: float) -> RunRecord:
        digest = policy.compute_weights_digest(self.core.model)
        return self.numbers.make_run_record(
            self.config.seed, self.store, digest, self.clock, wall_s
        )


_engines: dict[str, Engine] = {}  # a warm process reuses its engine for later runs


def get_engine(config: Config) -> Engine:
    """Return an empty engine for `config`.

    Later runs of this process with the same engine settings reuse it.
    """
    other_settings = (config.weights.in_flight, config.exact, config.lora, config.uses_sessions)
    key = repr((config.model, config.generator, *other_settings))  # read by `make_engine`
    if key not in _engines:
        _engines[key] = build_engine(config)
    engine = _engines[key]
    engine.abort(list(engine.count_tokens()))
    return engine


def run_serial(config: Config, seed: int, watch: Watch | None = None) -> RunRecord:
    """Run `config` with `seed` and return its record.

    An update that stays non-finite ends the run; the record then has the reason in `failed`.
    """
    run = SerialRun(msgspec.structs.replace(config, seed=seed), watch)
    try:
        return run.run()
    except NotFiniteError as error:
        return {**run.make_record(0.0), "failed": str(error)}
