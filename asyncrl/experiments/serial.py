"""One run of an arm in one process: the same Store, EmbeddedEngine, Schedule and LearnerCore as
`asyncrl run`, by turns.

    grant --> engine: a few decode steps --> deliver --> ask --> train --> (the update's time in
    decode steps) --> commit

Time is counted in decode steps, so a run repeats whatever the machine does: while an update "runs"
(`update_steps`), the engine goes on writing with the older weights, as far as the staleness limit
lets it.  That is the natural lag of two sides of that speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

from actors.delay import Late, decode_steps
from actors.engine import Answer, Engine, Request
from actors.engine_embedded import make_engine
from actors.generator import trajectory
from actors.rewards import RewardRunner
from actors.schedule import Schedule
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, ConfigError, NotFinite
from asyncrl.contract.messages import EVAL_BASE, LearnerHello, Ticket, WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.experiments.one_process import cold
from asyncrl.models.policy import named_weights, weights_digest
from asyncrl.models.tokenizer import encode_prompt, load_tokenizer, stop_tokens
from asyncrl.tasks import get_task
from buffer import trained
from buffer.evaluation import OOD_BASE
from buffer.service import evaluations, settings
from buffer.store import Store
from learner.step import LearnerCore

# decode steps between two looks at the buffer
EPOCH = 1
SLICE = 4
KEPT = (
    "reward/mean",
    "is/ess",
    "is/target_ess",
    "is/mean_weight",
    "is/weight_ess",
    "kl/behavior_start_k3",
    "kl/behavior_target_k3",
    "optim/grad_norm",
    "policy/entropy",
    "answer/truncated_share",
    "clip/share",
    "optim/early_stops",
    "kl/target_ref_k1",
    "kl/target_ref_k3",
    "kl/gradient_share",
    "kl/reward_gradient_share",
    "mismatch/k3_at_lag_0",
    "is/zero_share",
    "is/rejected_answers",
    "optim/steps",
    "optim/lr_scale",
    "optim/stop_kl",
    "reshape/gamma",
    "kl/moved",
)
Watch = Callable[[list[float], list[float]], str]
_engines: dict[str, Engine] = {}  # a warm process keeps its engine from run to run


def update_steps(config: Config) -> int:
    """Decode steps that an update takes when learner and generators are equally fast: those in
    which the engine writes one batch.
    """
    samples = config.learner.groups * config.learner.group_size
    return max(
        1,
        round(
            samples * config.generator.max_new_tokens * 0.75 / min(config.generator.slots, samples)
        ),
    )


def _engine(config: Config) -> Engine:
    key = repr((config.model, config.generator, config.weights.in_flight))
    if key not in _engines:
        _engines[key] = make_engine(config)
    engine = _engines[key]
    engine.abort(list(engine.progress()))
    return engine


class Run:
    """One arm, one seed, from the initial weights to the last evaluation.

    watch: called after every evaluation on held-out prompts with the steps and accuracies so far; a
    reason that it returns ends the run."""

    def __init__(self, config: Config, watch: Watch | None = None) -> None:
        if why := cold(config):
            raise ConfigError(why)
        self.config = config
        self.watch = watch
        self.abandoned = ""
        self.task = get_task(config.task)
        self.tokenizer = load_tokenizer(config.model.path)
        self.store = Store(
            settings(config),
            lambda i: self.task.prompt("train", i, config.seed),
            evaluations(config, self.task),
        )
        self.core = LearnerCore(config, config.model.path)
        self.engine, self.rewards = _engine(config), RewardRunner(config, self.task)
        synchronous = config.staleness.max_lag == 0
        self.schedule = Schedule(
            drain_first=config.weights.in_flight == "between_groups", lockstep=synchronous
        )
        self.stops = stop_tokens(self.tokenizer, config)
        self.loaded: Label | None = None
        self.ring: dict[Label, tuple[dict[str, torch.Tensor], str]] = {}
        self.prompts: dict[int, np.ndarray] = {}
        self.clock = 0
        self.busy_until = -1
        self.update = update_steps(config)
        self.pending: tuple[int, Label, str] | None = None
        self.tokens = 0
        self.decoding = 0.0
        self.learning = 0.0
        self.began = 0.0
        self.curve: list[dict[str, float]] = []
        self.evals: dict[tuple[str, int], dict[int, float]] = {}
        self.lags: dict[int, int] = {}
        self.batches: list[dict[str, Any]] = []  # what was trained
        self.late: Late[tuple[Ticket, Answer]] = Late()

    def publish(self) -> tuple[Label, str]:
        label = Label(EPOCH, self.core.state.number)
        digest = weights_digest(self.core.model)
        self.ring[label] = (
            {k: v.detach().clone() for k, v in named_weights(self.core.model)},
            digest,
        )
        return label, digest

    def generate(self) -> None:
        """Tickets, weights, and a few decode steps; what ended is delivered."""
        held = self.schedule.held
        free = self.engine.slots - self.engine.active - self.schedule.waiting()
        if self.schedule.lockstep:
            free = 0 if held or self.late.next < math.inf else 1 << 30
        self.schedule.announce(self.store.announcement())
        if free > 0:
            for t in self.schedule.take(self.store.grant("one", 1, free, 0.0)):
                self.prompts[t.ticket] = encode_prompt(self.tokenizer, t.prompt)
        goal = self.schedule.wanted(self.loaded)
        if goal is not None:
            weights, digest = self.ring[goal]
            self.engine.load(weights, goal, digest)
            self.loaded = goal
        requests = []
        for h, sample in self.schedule.admit(self.loaded, self.engine.slots - self.engine.active):
            t = h.ticket
            prompt = self.prompts[h.ticket.ticket]
            s = t.sampling
            most = min(t.sampling.max_new_tokens, self.config.generator.context - len(prompt))
            key = (t.ticket, sample, t.attempt)
            requests.append(
                Request(
                    key,
                    prompt,
                    t.ticket,
                    most,
                    s.temperature,
                    s.top_p,
                    s.kept(sample),
                    self.stops,
                    t.seed,
                )
            )
        self.engine.add(requests)
        began = time.monotonic()
        for answer in self.engine.step(SLICE) if self.engine.active else []:
            ticket = held[answer.key[0], answer.key[2]].ticket
            self.schedule.done(answer.key, len(answer.tokens))
            self.tokens += len(answer.tokens)
            self.late.hold(
                self.clock + SLICE + decode_steps(self.config, ticket, len(answer.tokens)),
                (ticket, answer),
            )
        for ticket, answer in self.late.due(self.clock + SLICE):
            text = self.tokenizer.decode(
                [int(x) for x in answer.tokens if int(x) not in self.stops],
                skip_special_tokens=True,
            )
            self.rewards.submit(answer.key, ticket.prompt, text, answer.tokens)
            for _, reward, parts, token_rewards, failed in self._rewards():
                self.deliver(
                    trajectory(ticket, answer, text, float(reward), parts, token_rewards, failed)
                )
        self.decoding += time.monotonic() - began

    def _rewards(self) -> list[Any]:
        """The reward of the answer just handed in; workers are waited for."""
        while not (got := list(self.rewards.poll())):
            time.sleep(0.001)
        return got

    def deliver(self, t: Any) -> None:
        if t.failed:
            raise AsyncrlError(
                f"the reward function failed on ticket {t.ticket}: {t.failed}; a comparison needs "
                "every reward"
            )
        if t.ticket >= EVAL_BASE:
            split, base = ("ood", OOD_BASE) if t.ticket >= OOD_BASE else ("heldout", EVAL_BASE)
            self.evals.setdefault((split, t.spans[0].label.number), {})[t.ticket - base] = t.reward
        self.store.deliver(t, 0.0)

    def learn(self) -> bool:
        """End an update whose time is over, begin one whose batch is ready.  False: nothing
        moved.
        """
        if self.pending is not None:
            if self.clock < self.busy_until:
                return False
            number, label, digest = self.pending
            self.pending = None
            self.store.commit(number, label, digest, self.core.unused)
            self.store.checkpointed(number + 1)
            keep = {*self.store.keep(), label, self.loaded}
            self.ring = {k: v for k, v in self.ring.items() if k in keep}
            return True
        number = self.core.state.number
        groups = self.store.ask(EPOCH, number)[0] if number < self.config.learner.steps else []
        if not groups:
            return False
        batch = self.store.batch(groups, EPOCH, number)
        self.batches.append(
            {
                "ids": trained.digest(batch.samples),
                "tickets": trained.runs(s.ticket for s in batch.samples),
            }
        )
        counted: dict[int, int] = {}
        for runs in batch.token_lags:
            for start, end, lag in runs:
                counted[lag] = counted.get(lag, 0) + end - start
        audit(number, batch.samples, counted)
        if self.config.staleness.on_exceed == "mask":  # what lies past the limit is not trained
            counted = {lag: n for lag, n in counted.items() if lag <= self.config.staleness.max_lag}
        for lag, n in counted.items():
            self.lags[lag] = self.lags.get(lag, 0) + n
        began = time.monotonic()
        metrics = self.core.train(batch)
        self.learning += time.monotonic() - began
        row = {
            "version": number + 1,
            "t": time.monotonic() - self.began,
            "lag/mean": trained.mean(counted),
            "answer/length": sum(s.length for s in batch.samples) / len(batch.samples),
        }
        self.curve.append(row | {k: metrics[k] for k in KEPT if k in metrics})
        self.pending = (number, *self.publish())
        self.busy_until = self.clock + self.update
        return True

    def go(self) -> dict[str, Any]:
        """The whole run; returns its record.  Raises AsyncrlError when nothing can move."""
        self.began = time.monotonic()
        label, digest = self.publish()
        limit = self.config.staleness.max_lag
        self.store.hello(
            LearnerHello(
                1, "", EPOCH, label, None, digest, 0, 0, limit, WeightsSource(EPOCH, "", "", ""), []
            )
        )
        try:
            while (
                self.store.committed < self.config.learner.steps or self.store.evaluations.pending
            ):
                self.generate()
                active = bool(self.engine.active)
                self.clock += SLICE if active else 0
                while self.learn():
                    pass
                if not active and not self.engine.active:
                    self.clock = max(self.clock, self.idle_until())
                if self.store.evaluations.fresh and self.looked():
                    break
        finally:
            self.rewards.close()
        return self.record(time.monotonic() - self.began)

    def idle_until(self) -> int:
        """With nothing to decode: the time at which the update ends or an answer held back is due,
        whichever comes first; 0: neither.
        """
        ends = [float(self.busy_until)] if self.pending is not None else []
        # `generate` looks one slice ahead
        ends += [self.late.next - SLICE] if self.late.next < math.inf else []
        return math.ceil(min(ends, default=0))

    def evaluated(self, split: str) -> tuple[list[float], list[float]]:
        """Steps and accuracies of the finished evaluations of `heldout` or `ood`."""
        found = {
            n: x[f"eval/{split}"]
            for (of, n), x in self.store.evaluations.results.items()
            if of == split
        }
        return [float(n) for n in sorted(found)], [found[n] for n in sorted(found)]

    def looked(self) -> bool:
        """After an evaluation: does `watch` end the run here?"""
        fresh = self.store.evaluations.fresh
        self.store.evaluations.fresh = []
        if self.watch is not None and any("eval/heldout" in x for _, x in fresh):
            self.abandoned = self.watch(*self.evaluated("heldout"))
        return bool(self.abandoned)

    def record(self, wall: float) -> dict[str, Any]:
        steps, accuracy = self.evaluated("heldout")
        evals = {
            split: {
                str(n): [by[i] for i in sorted(by)]
                for (s, n), by in sorted(self.evals.items())
                if s == split
            }
            for split in ("heldout", "ood")
        }
        return {
            "seed": self.config.seed,
            "steps": self.store.committed,
            "tokens": self.tokens,
            "wall_s": wall,
            "decode_s": self.decoding,
            "learn_s": self.learning,
            "clock": self.clock,
            "weights_digest": weights_digest(self.core.model),
            "batches": self.batches,
            "trained_ids": xxhash.xxh3_64_hexdigest(
                "".join(b["ids"] for b in self.batches).encode()
            ),
            "lag_histogram": {str(k): v for k, v in sorted(self.lags.items())},
            "curve": self.curve,
            "evals": evals,
            "accuracy": [steps, accuracy],
            "ood": list(self.evaluated("ood")),
            "abandoned": self.abandoned,
            "ledger_lines": self.store.ledger(),
        }


def audit(number: int, samples: list[Any], counted: dict[int, int]) -> None:
    """Count the lag of batch `number` again, from the versions in its spans alone.  Raises
    AsyncrlError when the buffer's count differs.
    """
    again: dict[int, int] = {}
    for s in samples:
        for span in s.spans:
            lag = number - span.label.number
            again[lag] = again.get(lag, 0) + span.end - span.start
    if again != counted:
        raise AsyncrlError(
            f"batch {number}: the buffer counted tokens by lag {counted}, its spans say {again}: a "
            "bug of ours; please report it"
        )


def one(config: Config, seed: int, watch: Watch | None = None) -> dict[str, Any]:
    """Run `config` with `seed`.  An update that stays not finite ends the run and is recorded as a
    failure, not raised.
    """
    import msgspec

    whole = msgspec.structs.replace(config, seed=seed)
    run = Run(whole, watch)
    try:
        return run.go()
    except NotFinite as error:
        return run.record(0.0) | {"failed": str(error)}
