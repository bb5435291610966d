"""Random schedules over the real store: generators, a learner and faults, with a synthetic clock.

What is checked is reckoned here a second time, from the histories alone: lags from tuples of
updates, tokens by counting."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from weakened import weakened

from asyncrl.contract.admission import LimitEvidence
from asyncrl.contract.freshness import BatchTiming
from asyncrl.contract.messages import (
    Batch,
    LearnerHello,
    Prompt,
    SamplingSettings,
    Ticket,
    Trajectory,
    VersionSpan,
    WeightsSource,
)
from asyncrl.contract.versions import Label
from buffer.groups import StoreSettings
from buffer.store import Store

LEASE_S = 10.0
PROMPTS = [Prompt(i, "") for i in range(4096)]
TOKENS = [b"\0" * 4 * n for n in range(256)]


class Broken(AssertionError):
    """An invariant does not hold."""


def need(ok: bool, what: str) -> None:
    if not ok:
        raise Broken(what)


def far(token: tuple[str, ...], train: tuple[str, ...]) -> int:
    """Updates between two policies, given as their histories."""
    common = 0
    while common < min(len(token), len(train)) and token[common] == train[common]:
        common += 1
    return len(token) - common + len(train) - common


def plain(settings: StoreSettings) -> Store:
    return Store(settings, PROMPTS.__getitem__)


@dataclass
class Row:
    """One sample of a held ticket: its (label, tokens) runs so far; slow ones are worked on when
    there is nothing else, mostly."""

    ticket: Ticket
    sample: int
    slow: bool
    runs: list[tuple[Label, int]] = field(default_factory=list)


@dataclass
class Generator:
    name: str
    slots: int
    session: int = 1
    weights: Label | None = None
    rows: list[Row] = field(default_factory=list)


@dataclass
class Learner:
    epoch: int
    k: float
    history: tuple[str, ...]
    label: Label
    queue: list[Batch] = field(default_factory=list)
    commits: list[tuple[int, Label, str]] = field(default_factory=list)  # published, not yet told

    @property
    def number(self) -> int:
        return len(self.history)


class World:
    """One schedule.  `run` ends when all is trained; raises Broken, or the store's error."""

    def __init__(
        self,
        seed: int,
        off: frozenset[str] = frozenset(),
        make: Callable[[StoreSettings], Store] = plain,
        **more: Any,
    ) -> None:
        r = self.r = random.Random(seed)
        self.limits = more.pop("limits", None) or r.choice(
            ((0,), (1,), (2,), (1, 0), (2, 0), (0, 2))
        )
        # settings that a resumed run may have instead
        self.variants: list[dict[str, Any]] = more.pop("variants", [])
        filters = r.random() < 0.4 and "inject" not in more
        self.settings = StoreSettings(
            r.choice((1, 1, 2, 3)),
            r.choice((1, 2)),
            more.pop("steps", r.randint(3, 6)),
            SamplingSettings(),
            lease_s=LEASE_S,
            filter_no_spread=filters,
            **more,
        )
        self.off = off
        self.store = (
            weakened(off)(self.settings, PROMPTS.__getitem__) if off else make(self.settings)
        )
        # an update computed again from the same samples has the same digest
        self.exact = r.random() < 0.5
        self.prefetch, self.keep, self.now = r.randint(0, 1), r.randint(1, 2), 0.0
        self.faults = r.randint(0, 4)
        self.slow_share, self.late_share = r.choice((0.0, 0.1, 0.3)), r.choice((0.0, 0.3, 0.8))
        self.generators = [Generator(f"g{i}", r.randint(1, 4)) for i in range(r.randint(1, 3))]
        self.net: list[Trajectory] = []
        # (ticket, attempt) -> [tokens reported, delivered]
        self.counts: dict[tuple[int, int], list[int]] = {}
        self.delivered: set[tuple[int, int, int]] = set()
        self.histories: dict[Label, tuple[str, ...]] = {}
        self.leased: dict[int, list[tuple[int, int]]] = {}
        # per batch of the surviving history: (keys, tokens, masked)
        self.trained: list[tuple[set[tuple[int, int]], int, int]] = []
        self.epochs = self.at_limit = self.moves = 0
        self.announced: dict[tuple[int, int], float] = {}  # (ticket, attempt) -> its limit
        self.more_faults: list[Callable[[], bool]] = []
        self.learner = self.start((), Label(0, 0))
        self.checkpoints = [((), self.learner.label)]

    # ---- the learner -----------------------------------------------------------------------------

    def start(self, history: tuple[str, ...], origin: Label) -> Learner:
        self.epochs += 1
        if self.variants:  # all processes end and begin again with another config
            self.settings = replace(self.settings, **self.r.choice(self.variants))
            self.store.settings = self.settings
        label = Label(self.epochs, len(history))
        k = float(self.r.choice(self.limits))
        parent = Label(origin.epoch, origin.number - 1) if origin.number else None
        source = WeightsSource(self.epochs, "", "", "")
        digest = "/".join(history)
        hello = LearnerHello(
            1, "", self.epochs, label, parent, digest, 0, origin.epoch, k, source, []
        )
        need(
            self.store.follow_learner(hello),
            "a learner that resumed from the newest directory was fenced",
        )
        self.histories[label] = history
        self.trained = self.trained[: len(history)]
        return Learner(self.epochs, k, history, label)

    def ask(self) -> bool:
        x = self.learner
        number = x.number + len(x.queue)
        # a request that is repeated: the learner may be training on the answer to the first
        if x.queue and self.r.random() < 0.1:
            was = self.r.choice(x.queue)
            groups, why = self.store.ask(x.epoch, was.number)
            need(bool(groups), f"batch {was.number}, handed out before, waits for {why}")
            again = self.store.make_batch(was.number)
            need(
                (again.lags, again.token_lags, again.samples)
                == (was.lags, was.token_lags, was.samples),
                f"batch {was.number} came again with other lags",
            )
        if len(x.queue) > self.prefetch or number >= self.settings.steps:
            return False
        before = len(self.store.comps), self.store.changes
        groups, _ = self.store.ask(x.epoch, number)
        if not groups:
            return before != (len(self.store.comps), self.store.changes)
        x.queue.append(self.store.make_batch(number))
        tickets = [(s.ticket, s.sample) for s in x.queue[-1].samples]
        need(
            self.leased.setdefault(number, tickets) == tickets,
            f"batch {number} came again as {tickets}, not {self.leased[number]}",
        )
        return True

    def train(self) -> bool:
        x = self.learner
        if not x.queue:
            return False
        batch = x.queue.pop(0)
        need(batch.number == x.number, "batches out of order")
        keys = {(s.ticket, s.sample) for s in batch.samples}
        need(len(keys) == self.settings.batch * self.settings.group, "an incomplete batch")
        for s, lag, runs in zip(batch.samples, batch.lags, batch.token_lags, strict=True):
            spans = s.list_spans()
            mine = [far(self.histories[p.label], x.history) for p in spans]
            hard = self.settings.on_exceed in ("pace", "drop")
            need(
                max(mine) <= x.k or not hard,
                f"ticket {s.ticket} trained {max(mine)} versions late, limit {x.k:g}",
            )
            limits = self.promised(s)
            for far_off, limit in zip(mine, limits, strict=True):
                need(
                    far_off <= limit or not (hard and self.settings.ess_floor),
                    f"ticket {s.ticket} trained {far_off} versions late, announced {limit:g}",
                )
            self.at_limit += any(a == min(x.k, b) > 0 for a, b in zip(mine, limits, strict=True))
            need(
                max(mine) <= lag and all(b >= a for a, (_, _, b) in zip(mine, runs, strict=True)),
                f"ticket {s.ticket} has lag {mine}, reckoned {runs}",
            )
            need(
                lag == max(mine) or spans[0].label.epoch < x.epoch,
                "a lag within one epoch is exact",
            )
        done = set().union(*(y[0] for y in self.trained)) if self.trained else set()
        need(not keys & done, "a sample trained twice in one history")
        masked = sum(
            e - b
            for runs in batch.token_lags
            for b, e, lag in runs
            if self.settings.on_exceed == "mask" and lag > x.k
        )
        self.trained.append((keys, sum(s.length for s in batch.samples) - masked, masked))
        x.history += (
            f"{x.number}:{'' if self.exact else x.epoch}:"
            f"{sorted((s.ticket, s.sample, s.attempt) for s in batch.samples)}",
        )
        x.label = Label(x.epoch, x.number)
        self.histories[x.label] = x.history
        x.commits.append((batch.number, x.label, "/".join(x.history)))
        return True

    def promised(self, sample: Trajectory) -> list[float]:
        """The limit that was announced for the tokens of each span."""
        return [self.announced[sample.ticket, sample.attempt]] * len(sample.list_spans())

    def commit(self) -> bool:
        if not self.learner.commits:
            return False
        before = self.store.limit
        # of no floor: a constant limit draws nothing, and keeps its schedules
        seen = self.seen() if self.settings.ess_floor else None
        need(
            self.store.commit(
                *self.learner.commits.pop(0), evidence=seen, timing=self.timing(), now=self.now
            )
            is True,
            "a commit in order was not taken",
        )
        self.moves += self.store.limit.now != before.now
        return True

    def seen(self) -> LimitEvidence:
        """Ratios and idle times that move the limit up and down."""
        r = self.r
        return LimitEvidence(
            r.choice((0.2, 0.9, 0.9)), r.choice((0, 1, math.inf)), r.choice((0.0, 0.3))
        )

    def timing(self) -> BatchTiming | None:
        """Times that move the window; without one nothing is drawn, and schedules stay."""
        if not self.settings.wait:
            return None
        r = self.r
        latency = r.choice((0.0, 0.5, 2.5, 9.0, math.nan))
        return BatchTiming(1.0, r.choice((0.0, 0.6)), latency, math.nan, r.random())

    def checkpoint(self) -> bool:
        x = self.learner
        if x.commits or x.number <= len(self.checkpoints[-1][0]):
            return False
        self.checkpoints = [*self.checkpoints, (x.history, x.label)][-self.keep :]
        self.store.retire_batches(len(self.checkpoints[0][0]))
        return True

    def kill_learner(self) -> bool:
        """It starts again from its newest checkpoint, or from the one before, with another limit
        perhaps."""
        if len(self.checkpoints) > 1 and self.r.random() < 0.5:
            self.checkpoints.pop()
        history, label = self.checkpoints[-1]
        origin = Label(self.learner.epoch, label.number)
        self.learner = self.start(history, origin)
        return True

    # ---- generators ------------------------------------------------------------------------------

    def want(self) -> bool:
        free = [g for g in self.generators if g.slots > len(g.rows)]
        if not free:
            return False
        g = self.r.choice(free)
        tickets = self.store.grant(g.name, g.session, g.slots - len(g.rows), self.now)
        for t in tickets:
            g.rows += [Row(t, s, self.r.random() < self.slow_share) for s in t.samples]
            self.counts[t.ticket, t.attempt] = [0, 0]
            self.announced[t.ticket, t.attempt] = t.limit
        return bool(tickets)

    def pick_up(self) -> bool:
        said = self.store.policy
        behind = [g for g in self.generators if g.weights != said]
        if said is None or not behind:
            return False
        g = self.r.choice(behind)
        g.rows = [x for x in g.rows if x.ticket.min_version.epoch >= said.epoch]
        g.weights = said
        return True

    def write(self) -> bool:
        """A few tokens of one sample; its end, sometimes."""
        ready = [(g, x) for g in self.generators for x in g.rows if self.may_write(g, x)]
        if not ready:
            return False
        fast = [y for y in ready if not y[1].slow]
        g, x = self.r.choice(fast if fast and self.r.random() < 0.95 else ready)
        label = x.ticket.exact_version or g.weights
        assert label is not None
        n = self.r.randint(1, 3)
        if x.runs and x.runs[-1][0] == label:
            x.runs[-1] = (label, x.runs[-1][1] + n)
        else:
            x.runs.append((label, n))
        if self.r.random() < 0.5:
            self.report(g, x.ticket)
        if self.r.random() < 0.4:
            g.rows.remove(x)
            self.net.append(self.answer(x))
        return True

    def may_write(self, g: Generator, x: Row) -> bool:
        """Only with weights of the ticket's epoch, a first token at or above its minimum."""
        least = x.ticket.exact_version or x.ticket.min_version
        enough = bool(x.runs) or "min_version" in self.off
        return (
            g.weights is not None
            and g.weights.epoch == least.epoch
            and (enough or g.weights >= least)
        )

    def report(self, g: Generator, t: Ticket) -> None:
        count = self.counts[t.ticket, t.attempt]
        live = sum(
            n
            for x in g.rows
            if (x.ticket.ticket, x.ticket.attempt) == (t.ticket, t.attempt)
            for _, n in x.runs
        )
        unsent = sum(
            y.length
            for y in self.net
            if (y.ticket, y.attempt) == (t.ticket, t.attempt)
            and (y.ticket, y.sample, y.attempt) not in self.delivered
        )
        count[0] = max(count[0], live + count[1] + unsent)
        self.store.renew(
            g.name, g.session, [(t.ticket, t.attempt, live + count[1] + unsent)], self.now
        )

    def answer(self, x: Row) -> Trajectory:
        spans, at = [], 0
        for label, n in x.runs:
            spans.append(VersionSpan(label, "", at, at + n, label))
            at += n
        same = x.ticket.ticket % 3 == 1  # every third group has no reward spread
        reward = 0.0 if same else float(x.sample)
        return Trajectory(
            x.ticket.ticket,
            x.sample,
            x.ticket.attempt,
            b"",
            TOKENS[at],
            b"",
            b"",
            spans,
            reward,
            {},
            "stop",
            1.0,
        )

    def deliver(self) -> bool:
        if not self.net:
            return False
        t = self.net.pop(self.r.randrange(len(self.net)))
        key = (t.ticket, t.sample, t.attempt)
        self.store.deliver(t, self.now)
        if key not in self.delivered:
            self.delivered.add(key)
            self.counts[t.ticket, t.attempt][1] += t.length
        if self.r.random() < 0.1 * self.late_share:
            self.net.append(t)
        return True

    def kill_generator(self) -> bool:
        g = self.r.choice(self.generators)
        g.session += 1
        g.rows, g.weights = [], None
        if self.r.random() < 0.5:
            # what was on its way is lost, also that of others whose sessions end with it
            self.net = []
            for other in self.generators:
                other.session, other.rows = other.session + 1, []
                self.store.end_sessions(other.name, other.session)
        self.store.end_sessions(g.name, g.session)
        return True

    def stall(self) -> bool:
        """All leases run out under generators that go on writing."""
        self.now += 2 * LEASE_S
        return self.store.expire(self.now) > 0

    # ---- the schedule ----------------------------------------------------------------------------

    def check(self) -> None:
        lines = self.store.make_ledger().lines
        written = sum(map(max, self.counts.values()))
        held = sum(line.tokens for line in lines.values())
        if held != written:
            raise Broken(f"the ledger holds {held} tokens, {written} were written: {lines}")
        done = self.trained[: self.store.committed]
        need(
            lines["trained"].tokens == sum(y[1] for y in done),
            "the trained line is not what was trained",
        )
        need(
            lines["masked_stale"].tokens == sum(y[2] for y in done),
            "the masked line is not what was masked",
        )

    def run(self, most: int = 40_000) -> int:
        """Random actions to the end; returns how many.  Faults come out of a budget."""
        calm: list[Callable[[], bool]] = [
            self.want,
            self.pick_up,
            self.write,
            self.deliver,
            self.ask,
            self.train,
            self.commit,
            self.checkpoint,
        ]
        weights = {a: self.r.choice((1, 1, 3)) for a in calm}
        faults = [self.kill_learner, self.kill_generator, self.stall, *self.more_faults]
        # actions that can do nothing until another one moves something
        idle: set[Callable[[], bool]] = set()
        for n in range(most):
            if self.store.committed == self.settings.steps and not self.learner.commits:
                return n
            self.now += 0.01
            able = [a for a in calm if a not in idle]
            need(bool(able), f"nothing moves at batch {self.store.committed}")
            if self.faults and self.r.random() < 0.04:
                self.faults -= 1
                action = self.r.choice(faults)
            else:
                action = self.r.choices(able, [weights[a] for a in able])[0]
            if action():
                idle.clear()
                self.check()
            elif action in calm:
                idle.add(action)
        need(math.isinf(most), f"no end after {most} actions")
        return most
