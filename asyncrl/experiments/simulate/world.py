"""The simulated world: a clock, and the buffer process around the real store."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from actors.schedule import TicketSchedule
from asyncrl.contract.admission import LimitEvidence, TicketQueue, divides_batches, share_batch
from asyncrl.contract.freshness.meter import BatchMeter
from asyncrl.contract.messages import (
    LearnerHello,
    PolicyAnnouncement,
    Prompt,
    Ticket,
    Trajectory,
    WeightsSource,
)
from asyncrl.contract.versions import Label
from asyncrl.experiments.simulate.times import TimeModel
from buffer import batches
from buffer.evaluation import Evaluations
from buffer.groups import Group, StoreSettings
from buffer.store import Store

EPOCH = 1
NO_PROMPT = Prompt(0, "")


class EventClock:
    """Events by time; simultaneous ones in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()

    def schedule(self, when: float, handler: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._count), handler, args))

    def run(self) -> bool:
        """Run until stopped; return False if the events run out first."""
        while self._heap and not self.stopped:
            self.now, _, handler, args = heapq.heappop(self._heap)
            handler(*args)
        return self.stopped


class TimeSource(Protocol):
    def sample_time(self, name: str) -> float: ...


class GeneratorClient(Protocol):
    """A generator as the simulated buffer uses it."""

    name: str
    session: int
    sleeping: bool
    announced: Label | None
    schedule: TicketSchedule

    def schedule_call(self, when: float, handler: Callable[..., object], *args: Any) -> None: ...

    def on_grant(
        self, sequence: int, tickets: list[Ticket], announcement: PolicyAnnouncement
    ) -> None: ...


class LearnerClient(Protocol):
    """The learner as the simulated buffer uses it."""

    training: bool

    @property
    def draws(self) -> TimeSource: ...

    def at_commit(self) -> None: ...

    def on_batch(self, number: int, tokens: int) -> None: ...


class SimulatedBuffer:
    """buffer/service.py without sockets: one message at a time, then its consequences."""

    def __init__(
        self,
        clock: EventClock,
        times: TimeModel,
        settings: StoreSettings,
        evaluations: Evaluations,
    ) -> None:
        self.clock = clock
        self.times = times
        self.free = self.worked = 0.0  # time at which it is free; seconds of work so far
        if evaluations.prompt is not None:
            evaluations.prompt = lambda split, index: NO_PROMPT
        self.store = Store(settings, lambda index: NO_PROMPT, evaluations)
        self.learner: LearnerClient
        # requests: the generator, and the number of its request
        self.wants: TicketQueue[tuple[GeneratorClient, int]] = TicketQueue(settings.evaluators)
        self.awake: dict[str, GeneratorClient] = {}
        self.asks: deque[int] = deque()
        # the oldest ask waits for this group (ticket order), or for this number of completions
        self.missing_group: Group | None = None
        self.missing_completions = 0
        self.goodbye = False
        self.announced_at = 0.0
        self.first_ticket: float | None = None
        self.on_first_ticket: Callable[[], object] = lambda: None
        self.meter = BatchMeter()
        self.capacity = 0  # samples that the generators hold at most
        self.threads = 0  # of the learner and the generators
        self.tickets = self.most_tickets = 0  # in flight: groups that generators hold
        self.tickets_since = self.ticket_seconds = 0.0  # and their integral over time
        self.alive_since = self.alive_seconds = 0.0  # the same of groups outstanding or stored
        self.lags: dict[int, dict[int, int]] = {}  # batch -> trained tokens by lag
        self.limits: list[float] = []  # of new tickets, after each commit
        # batch -> mean lag of its samples in flight, in queue
        self.splits: dict[int, tuple[float, float]] = {}

    def send(self, handler: Callable[..., None], *args: Any, work: float = 0.0) -> None:
        """Send the buffer a message, handled after the wire time and earlier messages."""
        self.free = max(self.clock.now + self.times.wire, self.free) + work
        self.worked += work
        self.clock.schedule(self.free, self._handle, handler, args)

    def _handle(self, handler: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.alive_seconds += len(self.store.alive) * (self.clock.now - self.alive_since)
        self.alive_since = self.clock.now
        handler(*args)
        while self.asks and self._lease(self.asks[0]):
            self.asks.popleft()
        self._grant()
        if self.goodbye and not self.store.evaluations.is_pending:
            self.clock.stopped = True

    # ---- messages --------------------------------------------------------------------------------

    def on_hello(self, max_lag: float) -> None:
        self.store.follow_learner(
            LearnerHello(
                protocol=1,
                run="",
                epoch=EPOCH,
                label=Label(EPOCH, 0),
                parent=None,
                digest="0",
                next_ticket=0,
                origin=0,
                max_lag=max_lag,
                source=WeightsSource(EPOCH, "", "", ""),
                ring=[],
            )
        )

    def on_want(self, generator: GeneratorClient, samples: int, sequence: int) -> None:
        self.wants.add(generator.name, samples, (generator, sequence))

    def on_deliver(self, generator: GeneratorClient, samples: list[Trajectory]) -> None:
        tickets = {sample.ticket for sample in samples} & self.store.alive.keys()
        groups = [self.store.alive[ticket] for ticket in tickets]
        leased = sum(group.lease is not None for group in groups)
        for sample in samples:
            self.store.deliver(sample, self.clock.now)
        self.meter.on_complete(filter(self.store.is_complete, tickets), self.clock.now)
        self._count_tickets(sum(group.lease is not None for group in groups) - leased)
        self._announce(generator)

    def _count_tickets(self, change: int) -> None:
        self.ticket_seconds += self.tickets * (self.clock.now - self.tickets_since)
        self.tickets += change
        self.tickets_since = self.clock.now
        self.most_tickets = max(self.most_tickets, self.tickets)

    def on_session(self, generator: GeneratorClient, session: int) -> None:
        """End the older leases of a lost generator that has returned."""
        self.store.end_sessions(generator.name, session)
        leased = sum(group.lease is not None for group in self.store.alive.values())
        self._count_tickets(leased - self.tickets)
        self.wants.remove(generator.name)

    def on_lost(self, progress: list[tuple[int, int, int]], generator: GeneratorClient) -> None:
        """Record the last progress of a lost generator."""
        self.store.renew(generator.name, generator.session, progress, self.clock.now)

    def on_commit(self, number: int, idle: float) -> None:
        evidence = self._estimate_evidence(number, idle) if self.store.settings.ess_floor else None
        now = self.clock.now
        timing = self.meter.on_commit(self.store.comps[number - self.store.base], idle, now)
        self.store.commit(
            number,
            Label(EPOCH, number + 1),
            str(number + 1),
            evidence=evidence,
            timing=timing,
            now=now,
        )
        self.limits.append(self.store.current_window())
        if (opens := self.store.next_opening(now)) < inf:
            self.clock.schedule(opens, self._grant)
        self.announced_at = now
        self.learner.at_commit()
        for generator in list(self.awake.values()):
            if self.store.settings.wait or generator.name in self.wants:
                self._announce(generator)

    def _estimate_evidence(self, number: int, idle: float) -> LimitEvidence:
        """Return the evidence that moves an automatic limit.

        Tokens have no ratios here, so the ESS at lag k is `times.ess` to the k-th power.
        """
        counts = self.lags[number]
        ess = sum(n * self.times.ess**lag for lag, n in counts.items()) / sum(counts.values())
        below = [lag for lag in counts if self.times.ess**lag < self.store.settings.ess_floor]
        return LimitEvidence(ess, min(below) - 1 if below else inf, idle)

    def on_goodbye(self) -> None:
        self.goodbye = True

    # ---- replies ---------------------------------------------------------------------------------

    def _announce(self, generator: GeneratorClient) -> None:
        """Send the announcement that is part of a reply.

        A sleeping generator computes its swap when it wakes (its `catch_up`).
        """
        if not generator.sleeping and generator.announced != self.store.policy:
            generator.announced = self.store.policy
            generator.schedule_call(
                self.clock.now + self.times.wire,
                generator.schedule.announce,
                self.store.make_announcement(),
            )

    def _lease(self, number: int) -> bool:
        """Send batch `number` to the learner if it is complete."""
        group = self.missing_group
        waits = group is not None and not group.is_complete and group.ticket in self.store.alive
        if waits or self.store.completions < self.missing_completions:
            return False
        groups, _ = self.store.ask(EPOCH, number)
        if not groups:
            self.missing_group, self.missing_completions = self._find_missing()
            return False
        self.missing_group, self.missing_completions = None, 0
        self._count_lags(number, groups)
        tokens = sum(s.trajectory.length for group in groups for s in group.list_stored_samples())
        arrival = self.clock.now + self.learner.draws.sample_time("batch")
        self.clock.schedule(arrival, self.learner.on_batch, number, tokens)
        return True

    def _find_missing(self) -> tuple[Group | None, int]:
        """Return the condition for another ask to succeed.

        It is the completion of the oldest incomplete group (ticket order) or a number of
        completions.
        """
        store = self.store
        queue = (group for group in store.alive.values() if group.ticket not in store.composed)
        if store.uses_ticket_order and store.max_lag != inf:
            oldest = itertools.islice(queue, store.settings.batch)
            return next((group for group in oldest if not group.is_complete), None), 0
        if store.settings.on_exceed == "drop":
            return None, 0
        complete = sum(group.is_complete for group in queue)
        return None, store.completions + store.settings.batch - complete

    def _count_lags(self, number: int, groups: list[Group]) -> None:
        """Count trained tokens by lag, as buffer/training_log.py does, and split the lag."""
        limit = self.store.max_lag if self.store.settings.on_exceed == "mask" else inf
        counts: dict[int, int] = {}
        flight = queue = 0
        samples = [sample for group in groups for sample in group.list_stored_samples()]
        for sample in samples:
            worst = 0
            for start, end, lag in batches.compute_lag_runs(self.store, sample, number):
                worst = max(worst, lag)
                if lag <= limit:
                    counts[lag] = counts.get(lag, 0) + end - start
            flight += min(sample.in_flight, worst)
            queue += worst - min(sample.in_flight, worst)
        self.lags[number] = counts
        self.splits[number] = (flight / max(len(samples), 1), queue / max(len(samples), 1))

    def compute_slowdown(self) -> float:
        """Return the factor on the time of a decode call or a part of an update that starts now."""
        training, generating = int(self.learner.training), len(self.awake)
        if self.times.cores is None:
            return self.times.beside if training and generating else 1.0
        busy = training + generating
        return max(1.0, busy / self.times.cores) * (self.times.beside if busy > 1 else 1.0)

    def _grant(self) -> None:
        """Grant shares of a batch in the order of the requests; see `BufferService.grant`."""
        queue = self.wants
        granted: list[str] = []
        divides = self.times.cores is None or divides_batches(
            self.store.max_lag, self.threads, int(self.times.cores)
        )
        for name, samples, (generator, sequence) in queue:
            if divides and name not in queue.evaluators:
                samples = share_batch(samples, queue.shared, self.store.settings.batch_samples)
            tickets = self.store.grant(name, generator.session, samples, self.clock.now)
            if not tickets:
                if queue.evaluators:  # generators are not alike
                    continue
                break
            training = sum(ticket.kind == "train" for ticket in tickets)
            self.meter.on_grant((t.ticket for t in tickets if t.kind == "train"), self.clock.now)
            if self.first_ticket is None and training:
                self.first_ticket = self.clock.now
                self.on_first_ticket()
            self._count_tickets(training)
            granted.append(name)
            generator.announced = self.store.policy
            generator.schedule_call(
                self.clock.now + self.times.wire,
                generator.on_grant,
                sequence,
                tickets,
                self.store.make_announcement(),
            )
        for name in granted:
            queue.remove(name)
        self.meter.on_free(queue.free, self.capacity, self.clock.now)
