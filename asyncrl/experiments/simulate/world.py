"""The simulated world: a clock, and the buffer process around the real store."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING, Any

from asyncrl.contract.admission import LimitEvidence
from asyncrl.contract.messages import LearnerHello, Prompt, Ticket, Trajectory, WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.experiments.simulate.times import TimeModel
from buffer import batches
from buffer.evaluation import Evaluations
from buffer.groups import Group, StoreSettings
from buffer.store import Store

if TYPE_CHECKING:
    from asyncrl.experiments.simulate.simulated_processes import (
        SimulatedGenerator,
        SimulatedLearner,
    )

EPOCH = 1
SOURCE = WeightsSource(EPOCH, "", "", "")
NO_PROMPT = Prompt(0, "")


class EventClock:
    """Events by time; those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()

    def schedule(self, when: float, do: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._count), do, args))

    def run(self) -> bool:
        """Until it is stopped: True; False when nothing is left to happen."""
        while self._heap and not self.stopped:
            self.now, _, do, args = heapq.heappop(self._heap)
            do(*args)
        return self.stopped


class FastStore(Store):
    """The store, without its walk over the living groups where none can be due again: nothing
    failed, dropped or was lost.

    `disturbed` is set by whoever gives it cause; tests compare it with the plain store.
    """

    disturbed = False

    def _positions(self) -> Iterator[tuple[int, Group]]:
        if self.disturbed and self.settings.on_exceed != "drop":
            self.disturbed = any(self._due(group) for group in self.alive.values())
        return super()._positions() if self.disturbed else iter(())

    @staticmethod
    def _due(group: Group) -> bool:
        """Is something of the group to be written again, now or when its lease ends without it?"""
        return not group.complete and (
            group.lease is None
            or len(group.lease.todo) < sum(store is None for store in group.samples)
        )


class SimulatedBuffer:
    """buffer/service.py without sockets: one message at a time, then whatever it made possible."""

    def __init__(
        self,
        clock: EventClock,
        times: TimeModel,
        settings: StoreSettings,
        evaluations: Evaluations,
        *,
        quick: bool = True,
    ) -> None:
        self.clock = clock
        self.times = times
        self.free = self.worked = 0.0  # when it is free again; seconds of work so far
        evaluations.prompt = (
            (lambda split, i: NO_PROMPT) if evaluations.prompt is not None else None
        )
        self.store: Store = (FastStore if quick else Store)(
            settings, lambda i: NO_PROMPT, evaluations
        )
        self.interrupt(settings.on_exceed == "drop")
        self.learner: SimulatedLearner
        # name -> (generator, samples, sequence)
        self.wants: dict[str, tuple[SimulatedGenerator, int, int]] = {}
        self.awake: dict[str, SimulatedGenerator] = {}
        self.asks: deque[int] = deque()
        self.late: Group | None = None  # the group that the oldest ask waits for (ticket order)
        self.enough = 0  # completions that it waits for (completion order)
        self.goodbye = False
        self.announced_at = 0.0
        self.first_ticket: float | None = None
        self.out = self.most_out = 0  # tickets in flight: groups that generators hold
        self.out_since = self.out_seconds = 0.0  # and their integral over time
        self.lags: dict[int, dict[int, int]] = {}  # batch -> trained tokens by lag
        self.limits: list[float] = []  # of new tickets, after each commit
        # batch -> mean lag of its samples in flight, in queue
        self.splits: dict[int, tuple[float, float]] = {}

    def interrupt(self, really: bool = True) -> None:
        if really and isinstance(self.store, FastStore):
            self.store.disturbed = True

    def send(self, handler: Callable[..., None], *args: Any, work: float = 0.0) -> None:
        """A message to the buffer: it is handled after the wire and after those before it."""
        self.free = max(self.clock.now + self.times.wire, self.free) + work
        self.worked += work
        self.clock.schedule(self.free, self._handle, handler, args)

    def _handle(self, handler: Callable[..., None], args: tuple[Any, ...]) -> None:
        handler(*args)
        self.answer()

    # ---- messages --------------------------------------------------------------------------------

    def on_hello(self, max_lag: float) -> None:
        self.store.hello(
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
                source=SOURCE,
                ring=[],
            )
        )

    def on_want(self, generator: SimulatedGenerator, samples: int, sequence: int) -> None:
        self.wants[generator.name] = (generator, samples, sequence)

    def on_deliver(self, generator: SimulatedGenerator, samples: list[Trajectory]) -> None:
        now = self.clock.now
        groups = {
            sample.ticket: group
            for sample in samples
            if (group := self.store.alive.get(sample.ticket)) is not None
        }
        before = sum(group.lease is not None for group in groups.values())
        for sample in samples:
            if self.store.deliver(sample, now) == "failed":
                self.interrupt()
        self.hold(sum(group.lease is not None for group in groups.values()) - before)
        self._announce(generator)

    def hold(self, more: int) -> None:
        """So many tickets more, or fewer, are in flight."""
        self.out_seconds += self.out * (self.clock.now - self.out_since)
        self.out = self.out + more
        self.out_since = self.clock.now
        self.most_out = max(self.most_out, self.out)

    def on_session(self, generator: SimulatedGenerator, session: int) -> None:
        """A generator that was lost is back: its older leases end."""
        self.store.end_sessions(generator.name, session)
        self.hold(sum(group.lease is not None for group in self.store.alive.values()) - self.out)
        self.wants.pop(generator.name, None)
        self.interrupt()

    def on_lost(self, progress: list[tuple[int, int, int]], generator: SimulatedGenerator) -> None:
        """The last that was heard of a lost generator's answers."""
        self.store.renew(generator.name, generator.session, progress, self.clock.now)

    def on_ask(self, number: int) -> None:
        self.asks.append(number)

    def on_commit(self, number: int, idle: float) -> None:
        seen = self._limit_evidence(number, idle) if self.store.settings.ess_floor else None
        self.store.commit(number, Label(EPOCH, number + 1), str(number + 1), seen=seen)
        self.limits.append(self.store.current_limit())
        self.announced_at = self.clock.now
        self.learner.at_commit()
        for generator in list(self.awake.values()):
            if generator.name in self.wants:
                self._announce(generator)

    def _limit_evidence(self, number: int, idle: float) -> LimitEvidence:
        """What moves a limit that sets itself: no token has a ratio here, so the ESS at lag k is
        `times.ess` to the k-th power.
        """
        counts = self.lags[number]
        floor = self.store.settings.ess_floor
        ess = sum(n * self.times.ess**lag for lag, n in counts.items()) / sum(counts.values())
        below = [lag for lag in counts if self.times.ess**lag < floor]
        return LimitEvidence(ess, min(below) - 1 if below else inf, idle)

    def on_checkpointed(self, oldest: int) -> None:
        self.store.checkpointed(oldest)

    def on_goodbye(self) -> None:
        self.goodbye = True

    # ---- answers ---------------------------------------------------------------------------------

    def _announce(self, generator: SimulatedGenerator) -> None:
        """The announcement that rides on a reply; a sleeping generator's swap is reckoned when it
        wakes (Generator.catch_up).
        """
        if not generator.sleeping and generator.told != self.store.policy:
            generator.told = self.store.policy
            self.clock.schedule(
                self.clock.now + self.times.wire,
                generator.on_announcement,
                generator.session,
                self.store.announcement(),
            )

    def answer(self) -> None:
        while self.asks and self._lease(self.asks[0]):
            self.asks.popleft()
        self._grant()
        if self.goodbye and not self.store.evaluations.pending:
            self.clock.stopped = True

    def _lease(self, number: int) -> bool:
        """Batch `number` to the learner, if it is complete."""
        if (
            self.late is not None
            and not self.late.complete
            and self.late.ticket in self.store.alive
        ) or self.store.completions < self.enough:
            return False
        groups, _ = self.store.ask(EPOCH, number)
        self.late, self.enough = (None, 0) if groups else self._what_is_missing()
        if not groups:
            return False
        self._count(number, groups)
        tokens = sum(
            store.trajectory.length for group in groups for store in group.stored_samples()
        )
        self.clock.schedule(
            self.clock.now + self.learner.draws.batch(), self.learner.on_batch, number, tokens
        )
        return True

    def _what_is_missing(self) -> tuple[Group | None, int]:
        """What makes it worth asking again: the oldest incomplete group (ticket order), or so many
        completions (completion order).
        """
        store = self.store
        line = (group for group in store.alive.values() if group.ticket not in store.composed)
        if store.uses_ticket_order and store.max_lag != float("inf"):
            return next(
                (
                    group
                    for group in itertools.islice(line, store.settings.batch)
                    if not group.complete
                ),
                None,
            ), 0
        if store.settings.on_exceed == "drop":
            return None, 0
        return None, store.completions + store.settings.batch - sum(
            group.complete for group in line
        )

    def _count(self, number: int, groups: list[Group]) -> None:
        """Trained tokens by lag, as buffer/training_log.py counts them, and the split of the
        lag."""
        limit = self.store.max_lag if self.store.settings.on_exceed == "mask" else float("inf")
        counts: dict[int, int] = {}
        flight = queue = count = 0
        for store in (store for group in groups for store in group.stored_samples()):
            worst = 0
            for start, end, lag in batches.lag_runs(self.store, store, number):
                worst = max(worst, lag)
                if lag <= limit:
                    counts[lag] = counts.get(lag, 0) + end - start
            early = min(store.in_flight, worst)
            flight = flight + early
            queue = queue + worst - early
            count = count + 1
        self.lags[number], self.splits[number] = (
            counts,
            (flight / max(count, 1), queue / max(count, 1)),
        )

    def _grant(self) -> None:
        """Tickets for those that want some, who asked first first; when one gets none, the others
        get none either.
        """
        while self.wants:
            name, (generator, samples, sequence) = next(iter(self.wants.items()))
            tickets: list[Ticket] = self.store.grant(
                name, generator.session, samples, self.clock.now
            )
            if not tickets:
                return
            if self.first_ticket is None and any(sample.kind == "train" for sample in tickets):
                self.first_ticket = self.clock.now
            self.hold(sum(sample.kind == "train" for sample in tickets))
            del self.wants[name]
            generator.told = self.store.policy
            self.clock.schedule(
                self.clock.now + self.times.wire,
                generator.on_grant,
                generator.session,
                sequence,
                tickets,
                self.store.announcement(),
            )
