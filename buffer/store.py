"""The versioned buffer without sockets or wall clock: the fold of what peers said.
docs/protocol.md states the rules.

```
cursor --grant--> alive group --samples--> complete --ask--> composed
                    ^   |                     ^                 | commit
                    +---+                     |                 v
         lease ends: missing                  +---hello---- retained --checkpointed--> retired
         samples are due again         rolls `committed` back
```
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from asyncrl.contract import admission
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import (
    EVAL_BASE,
    Announcement,
    Batch,
    Disposition,
    Failure,
    LearnerHello,
    LedgerLine,
    Prompt,
    Ticket,
    Trajectory,
    WeightsSource,
)
from asyncrl.contract.versions import Label, PolicyTree
from buffer import batches, checks
from buffer.evaluation import Evaluations
from buffer.groups import MAX_DROPS, Group, Lease, Settings, Stored, size
from buffer.ledger import Ledger, tokens_of
from buffer.state import Snapshot

# rewards that differ by this share of the larger one are equal, as in
# asyncrl/algorithms/advantages.py (which needs torch)
EQUAL = 1e-6
REMEMBERED = 200_000  # final dispositions of gone groups kept for late copies
SESSIONS = 1000  # of generators, whose counts may still grow
STRAYS = 20_000  # attempts of gone groups that may still report or deliver
VERSIONS = 10_000  # behind the oldest checkpoint kept: an answer that spans more is refused
Key = tuple[int, int, int]


class Store:
    """One run's groups, tickets, compositions, versions and ledger."""

    def __init__(
        self,
        settings: Settings,
        prompt: Callable[[int], Prompt],
        evaluations: Evaluations | None = None,
    ) -> None:
        self.s = settings
        self.prompt = prompt
        self.tree = PolicyTree()
        self.epoch = self.active = 0
        self.max_lag = math.inf
        self.cursor = self.attempts = self.committed = self.base = 0
        self.policy: Label | None = None
        self.source: WeightsSource | None = None
        self.alive: dict[int, Group] = {}  # in ticket order
        self.retained: dict[int, Group] = {}  # committed, needed by a checkpoint kept
        self.comps: list[list[int]] = []  # tickets of batch base, base + 1, ...
        self.composed: set[int] = set()
        # batches that the learner of this epoch has been given: they stay as they were judged then
        self.leased: set[int] = set()
        self.past = Ledger()
        # totals that a learner's checkpoint brought from a buffer that is gone (`memory`)
        self.carried = Ledger()
        # the lines of `retained`, summed; None: to be summed again (see `_lines_kept`)
        self._kept: Ledger | None = None
        self.gone: OrderedDict[Key, Disposition] = OrderedDict()
        # (ticket, attempt) of gone groups -> [reported, delivered]
        self.strays: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        # tickets at or above the cursor that a checkpoint had trained already (completion order)
        self.skip: set[int] = set()
        # counts what `ask` changed: the journal records an ask only when it did something
        self.changes = 0
        self.evaluations = evaluations or Evaluations()
        self.completions = self.failed_samples = self.failed_machinery = self.stored_bytes = 0
        self.failures: dict[str, int] = {}
        # (producer, session) -> tokens that it says it has drawn
        self.drawn: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.drawn_before = 0  # of sessions long gone
        self.finished = False

    # ---- kept over a restart ---------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The whole state.  It shares what it holds with the store: encode it at once."""
        return Snapshot(
            settings=self.s,
            epoch=self.epoch,
            active=self.active,
            cursor=self.cursor,
            attempts=self.attempts,
            committed=self.committed,
            base=self.base,
            completions=self.completions,
            failed_samples=self.failed_samples,
            failed_machinery=self.failed_machinery,
            stored_bytes=self.stored_bytes,
            drawn_before=self.drawn_before,
            finished=self.finished,
            max_lag=self.max_lag,
            policy=self.policy,
            source=self.source,
            alive=list(self.alive.values()),
            retained=list(self.retained.values()),
            comps=self.comps,
            leased=sorted(self.leased),
            past=self.past,
            carried=self.carried,
            gone=list(self.gone.items()),
            strays=list(self.strays.items()),
            skip=sorted(self.skip),
            failures=self.failures,
            drawn=list(self.drawn.items()),
            tree=self.tree.snapshot(),
            evaluations=self.evaluations.snapshot(),
        )

    def restore(self, state: Snapshot) -> None:
        """Become the store that `state` was taken of; its prompts stay this one's."""
        self.s = state.settings
        self.epoch = state.epoch
        self.active = state.active
        self.cursor = state.cursor
        self.attempts = state.attempts
        self.committed = state.committed
        self.base = state.base
        self.completions = state.completions
        self.failed_samples = state.failed_samples
        self.failed_machinery = state.failed_machinery
        self.stored_bytes = state.stored_bytes
        self.drawn_before = state.drawn_before
        self.finished = state.finished
        self.max_lag = state.max_lag
        self.policy = state.policy
        self.source = state.source
        self.alive = {group.ticket: group for group in state.alive}
        self.retained = {group.ticket: group for group in state.retained}
        self.comps = state.comps
        self.composed = {ticket for comp in state.comps for ticket in comp}
        self.leased = set(state.leased)
        self.past = state.past
        self.carried = state.carried
        self._kept = None
        self.gone = OrderedDict(state.gone)
        self.strays = OrderedDict(state.strays)
        self.skip = set(state.skip)
        self.failures = state.failures
        self.drawn = OrderedDict(state.drawn)
        self.tree.restore(state.tree)
        self.evaluations.restore(state.evaluations)

    def leases_anew(self, now: float) -> None:
        """The clock of the life before says nothing: every lease runs its full time from now."""
        for g in self.alive.values():
            if g.lease is not None:
                g.lease.expires = now + self.s.lease_s
        self.evaluations.leases_anew(now + self.s.lease_s)

    # ---- the rules, each of them needed: tests override them one by one --------------------------

    @property
    def in_order(self) -> bool:
        """Do batches take groups in ticket order?"""
        return self.s.in_order

    def in_room(self, place: int, room: float) -> bool:
        """May a group with so many before it be granted again?"""
        return place < room

    def places_taken(self) -> int:
        """How many groups stand before a new one: the leased batches' too, until their commit."""
        return len(self.alive)

    def to_train(self) -> int:
        """How many groups alive will be trained, if nothing befalls them."""
        return len(self.alive)

    def to_compose(self) -> list[Group]:
        """Groups that no batch has yet, in ticket order."""
        return [g for g in self.alive.values() if g.ticket not in self.composed]

    def least_version(self, policy: Label) -> Label:
        """The oldest version that may write a ticket granted now, at `policy`."""
        return policy

    def disposition(self, g: Group, t: Trajectory) -> Disposition | None:
        """What became of the sample when it was delivered before; None: it is new."""
        return g.finals.get((t.sample, t.attempt))

    def without_spread(self, g: Group) -> None:
        """A complete group teaches nothing."""
        self.leave(g, "filtered")

    # ---- tickets ---------------------------------------------------------------------------------

    def announcement(self) -> Announcement | None:
        if self.policy is None or self.source is None:
            return None
        return Announcement(self.policy, self.tree.digest(self.policy), self.source)

    def grant(self, producer: str, session: int, samples: int, now: float) -> list[Ticket]:
        """Tickets for at most about `samples` free engine slots; evaluation first."""
        out: list[Ticket] = []
        if self.policy is None or self.finished:
            return out
        while samples > 0 and self.evaluations.queue:
            self.attempts += 1
            ticket = self.evaluations.grant(
                self.attempts,
                self.s,
                producer=producer,
                session=session,
                expires=now + self.s.lease_s,
            )
            out.append(ticket)
            samples -= 1
        while samples > 0:
            granted = self._grant_one(producer, session, now)
            if granted is None:
                break
            out.append(granted)
            samples -= len(granted.samples)
        return out

    def _line(self) -> Iterator[tuple[int, Group]]:
        """(place, group) of those alive: how many train before it.

        Composed batches come first, as they train: under `pace` they are the first in ticket order
        too, unless another order or no limit composed them, in a life before.  The rest follows in
        ticket order."""
        first = (self.alive[t] for comp in self.comps[self.committed - self.base :] for t in comp)
        return enumerate(
            itertools.chain(
                first, (g for g in self.alive.values() if g.ticket not in self.composed)
            )
        )

    def _grant_one(self, producer: str, session: int, now: float) -> Ticket | None:
        room = admission.room(self.max_lag, self.s.batch, self.stored_bytes, self.s.byte_limit)
        for place, g in self._line():
            if not self.in_room(place, room):
                break
            if g.lease is None and not g.complete:
                return self._lease(g, place, producer, session, now)
        enough = self.committed + self.to_train() // self.s.batch >= self.s.steps
        if self.places_taken() >= room or enough:
            return None
        self._skip_trained()
        group = Group(self.cursor, [None] * self.s.group)
        ticket = self._lease(group, len(self.alive), producer, session, now)
        if ticket is not None:
            self.alive[self.cursor] = group
            self.cursor += 1
        return ticket

    def _lease(
        self, g: Group, place: int, producer: str, session: int, now: float
    ) -> Ticket | None:
        assert self.policy is not None
        exact = None
        if self.s.inject is not None:
            planned = admission.planned_batch(self.committed, place, self.s.batch)
            wanted = planned - admission.injected_lag(self.s.inject, self.s.seed, g.ticket)
            if wanted > self.committed:
                return None
            exact = next(
                (
                    x
                    for n in range(max(wanted, 0), self.committed + 1)
                    if (x := Label(self.epoch, n)) in self.tree
                ),
                None,
            )
        self.attempts += 1
        todo = g.missing()
        g.lease = Lease(
            self.attempts, producer, session, now + self.s.lease_s, set(todo), self.policy
        )
        g.attempts[self.attempts] = [0, 0, 0]
        return Ticket(
            ticket=g.ticket,
            attempt=self.attempts,
            kind="train",
            prompt=self.prompt(g.ticket),
            samples=todo,
            sampling=self.s.sampling,
            min_version=self.least_version(self.policy),
            exact_version=exact,
            seed=self.s.seed,
        )

    def renew(
        self,
        producer: str,
        session: int,
        progress: list[tuple[int, int, int]],
        now: float,
        judging: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Decode progress: a lease whose tokens grew lasts longer, and with it those of the same
        generator that wait for a row.

        judging: written tickets that wait for their rewards; their leases last longer too, as each
        call ends by its deadline. Raises BadMessage for counts that no attempt can have."""
        checks.progress(self, progress)
        for ticket, attempt in judging:
            if ticket >= EVAL_BASE:
                self.evaluations.renew(ticket, attempt, now + self.s.lease_s)
            elif (
                (g := self.alive.get(ticket)) is not None
                and g.lease is not None
                and g.lease.attempt == attempt
            ):
                g.lease.expires = now + self.s.lease_s
        moved = False
        queued = []
        for ticket, attempt, tokens in progress:
            if ticket >= EVAL_BASE:
                self.evaluations.renew(ticket, attempt, now + self.s.lease_s)
                moved = moved or tokens > 0
            elif (
                g := self.alive.get(ticket) or self.retained.get(ticket)
            ) is not None and attempt in g.attempts:
                count = g.attempts[attempt]
                if tokens > count[0]:
                    count[0], moved = tokens, True
                    self._touched(ticket)
                    if g.lease is not None and g.lease.attempt == attempt:
                        g.lease.expires = now + self.s.lease_s
                elif tokens == 0 and g.lease is not None and g.lease.attempt == attempt:
                    queued.append(g.lease)
            elif (ticket, attempt) in self.strays:
                self._stray(ticket, attempt, max(tokens, self.strays[ticket, attempt][0]), 0)
        for lease in queued if moved else ():
            lease.expires = now + self.s.lease_s

    def told(self, producer: str, session: int, drawn: int) -> None:
        """A session's own count of the tokens that it has told of; counts only grow."""
        key = producer, session
        self.drawn[key] = max(drawn, self.drawn.get(key, 0))
        self.drawn.move_to_end(key)
        if len(self.drawn) > SESSIONS:
            self.drawn_before += self.drawn.popitem(last=False)[1]

    def generated(self) -> int:
        """Tokens drawn for training, as the generators count them, the dead ones up to their last
        word; what the ledger's lines must sum to.
        """
        return tokens_of(self.carried.totals()) + self.drawn_before + sum(self.drawn.values())

    def _stray(self, ticket: int, attempt: int, reported: int, delivered: int) -> None:
        """A gone group's attempt reports or delivers: its tokens that were counted as lost are
        counted again.
        """
        count = self.strays.get((ticket, attempt))
        if count is not None:
            before, count[1] = max(0, count[0] - count[1]), count[1] + delivered
            count[0] = max(count[1], reported)
            self.past.add("lost_with_process", max(0, count[0] - count[1]) - before)

    def expire(self, now: float) -> int:
        """End the leases that ran out; returns how many."""
        late = [g for g in self.alive.values() if g.lease is not None and g.lease.expires < now]
        for g in late:
            self._end_lease(g)
        return len(late) + self.evaluations.expire(now)

    def end_sessions(self, producer: str, session: int) -> None:
        """A producer's new session: its older leases end."""
        for g in self.alive.values():
            if g.lease is not None and g.lease.producer == producer and g.lease.session != session:
                self._end_lease(g)
        self.evaluations.end_sessions(producer, session)

    def _end_lease(self, g: Group) -> None:
        if g.lease is not None:
            g.attempts[g.lease.attempt][2] = 1
            g.lease = None

    # ---- samples ---------------------------------------------------------------------------------

    def deliver(self, t: Trajectory, now: float) -> Disposition:
        """Take one sample; returns its disposition.  Raises BadMessage for one that no ticket asked
        for, or of weights that no learner registered.
        """
        checks.sample(self, t)
        if t.ticket >= EVAL_BASE:
            return self.evaluations.deliver(t)
        key = (t.ticket, t.sample, t.attempt)
        g = self.alive.get(t.ticket) or self.retained.get(t.ticket)
        if g is None:
            if key not in self.gone:
                self.past.add("duplicate", t.length, 1, t.length, t.reward)
                self._stray(
                    t.ticket, t.attempt, self.strays.get((t.ticket, t.attempt), [0])[0], t.length
                )
                self._remember(key, "duplicate")
            return self.gone[key]
        if (known := self.disposition(g, t)) is not None:
            return known
        return self._accept(g, t)

    def _accept(self, g: Group, t: Trajectory) -> Disposition:
        what: Disposition
        self._touched(g.ticket)
        count = g.attempts.setdefault(t.attempt, [0, 0, 1])
        count[1] += t.length
        count[0] = max(count[0], count[1])
        if g.lease is not None and g.lease.attempt == t.attempt:
            g.lease.todo.discard(t.sample)
        if t.failed:
            what = "failed"
            self._fail(g, t, t.failed)
        elif g.samples[t.sample] is not None:
            what = "duplicate"
            g.other.append(("duplicate", t.length, t.reward))
        else:
            what = "accepted"
            assert self.policy is not None
            lag = admission.sample_lag(
                admission.span_lags(self.tree, t.spans, self.policy, self.committed)
            )
            g.samples[t.sample] = Stored(t, lag)
            self.stored_bytes += size(t)
        g.finals[t.sample, t.attempt] = what
        if g.lease is not None and not g.lease.todo:
            self._end_lease(g)
        if what == "accepted" and g.complete:
            self._completed(g)
        if g.failures >= MAX_DROPS and g.ticket in self.alive and g.ticket not in self.composed:
            self.leave(g, "abandoned")
        return what

    def _fail(self, g: Group, t: Trajectory, failure: Failure) -> None:
        g.failures += 1
        g.other.append(("failed", t.length, 0.0))
        kind = failure.kind
        self.failures[kind] = self.failures.get(kind, 0) + 1
        if kind == "machinery":
            self.failed_machinery += 1
            failed = self.failed_machinery
            key = "reward.machinery_budget"
            budget = self.s.machinery_budget
        else:
            self.failed_samples += 1
            failed = self.failed_samples
            key = "reward.error_budget"
            budget = self.s.error_budget
        if failed > budget * self.s.batch * self.s.group:
            raise AsyncrlError(
                f"{failed} samples failed since the last batch, more than {key} allows "
                f"({budget:g} of {self.s.batch * self.s.group}); the last one: ticket {g.ticket}, "
                f"{failure}"
            )

    def _completed(self, g: Group) -> None:
        self._end_lease(g)
        self.completions += 1
        g.completed = self.completions
        rewards = [s.trajectory.reward for s in g.stored()]
        equal = math.isclose(min(rewards), max(rewards), rel_tol=EQUAL)
        if (
            self.s.filter_no_spread
            and equal
            and self.s.group > 1
            and g.ticket not in self.composed
            and g.ticket in self.alive
        ):
            self.without_spread(g)

    def leave(self, g: Group, what: LedgerLine) -> None:
        """A group leaves the stream: filtered, abandoned, or of a branch that is not followed."""
        if self.s.inject is not None and what == "abandoned":
            self._succeed(g)
        self.alive.pop(g.ticket, None)
        self._end_lease(g)
        for s in g.stored():
            g.other.append((what, s.trajectory.length, s.trajectory.reward))
            g.finals[s.trajectory.sample, s.trajectory.attempt] = what
        self.stored_bytes -= g.free()
        g.samples = [None] * self.s.group
        self._retire(g, trained=False)

    def _succeed(self, g: Group) -> None:
        """Under injection the place decides the lag: a new group stands where `g` stood, so that
        those behind keep their batches.
        """
        self._skip_trained()
        new = Group(self.cursor, [None] * self.s.group, stands=g.place)
        self.alive = {
            x.ticket: x for y in self.alive.values() for x in ((y, new) if y is g else (y,))
        }
        self.cursor += 1

    def _skip_trained(self) -> None:
        while self.cursor in self.skip:
            self.skip.discard(self.cursor)
            self.cursor += 1

    def _retire(self, g: Group, *, trained: bool) -> None:
        """Fold a group's lines into the past; late copies of its samples still find their
        disposition.
        """
        g.fold(self.past, trained=trained)
        for (sample, attempt), what in g.finals.items():
            self._remember((g.ticket, sample, attempt), "trained" if what == "accepted" else what)
        for attempt, (reported, delivered, _) in g.attempts.items():
            self.strays[g.ticket, attempt] = [reported, delivered]
        while len(self.strays) > STRAYS:
            self.strays.popitem(last=False)

    def _remember(self, key: Key, what: Disposition) -> None:
        self.gone[key] = what
        if len(self.gone) > REMEMBERED:
            self.gone.popitem(last=False)

    # ---- the learner -----------------------------------------------------------------------------

    def hello(self, h: LearnerHello) -> bool:
        """Follow a learner; False: it is fenced.  Raises BadMessage for a hello that contradicts
        itself.
        """
        checks.hello(h)
        if h.epoch == self.epoch:
            return True
        if h.epoch < self.epoch or h.label.number < self.base or h.origin < self.active:
            return False
        for label, digest in sorted(h.ring):
            was = Label(h.origin, label.number)
            if was in self.tree and self.tree.digest(was) == digest:
                self.tree.alias(label, was)
            else:
                before = Label(label.epoch, label.number - 1)
                self.tree.register(label, before if before in self.tree else None, digest)
        parent = h.parent if h.parent is not None and h.parent in self.tree else None
        before = Label(h.epoch, h.label.number - 1)
        self.tree.register(
            h.label,
            parent if parent is not None else (before if before in self.tree else None),
            h.digest,
        )
        self.epoch = h.epoch
        self.max_lag = h.max_lag
        self.source = h.source
        for g in self.alive.values():
            self._end_lease(g)
        self._follow(h)
        self.policy = h.label
        self.evaluations.restart(h.label, self.s.steps)
        return True

    def _follow(self, h: LearnerHello) -> None:
        """Move `committed` to the learner's number, down or up; a new (`memory`) buffer takes its
        cursor and totals.
        """
        number = h.label.number
        self._kept = None
        self.leased = set()
        if number > self.base + len(self.comps):
            self._follow_beyond(h)
        for n, comp in enumerate(self.comps, self.base):
            for t in comp:
                if n < number and t in self.alive:
                    self.retained[t] = self.alive.pop(t)
                if n >= number and t in self.retained:
                    self.alive[t] = self.retained.pop(t)
                    for s in self.alive[t].stored():
                        s.skipped = s.rejected = 0  # it is trained again, perhaps otherwise
        self.alive = dict(sorted(self.alive.items(), key=lambda x: x[1].place))
        self.committed = number

    def _follow_beyond(self, h: LearnerHello) -> None:
        """The learner has trained what this buffer never composed: what of it is alive here, since
        an older checkpoint, is not trained again.
        """
        for g in self.retained.values():
            self._retire(g, trained=True)
            self.stored_bytes -= g.free()
        above = set(h.trained_above)
        for g in [g for t, g in self.alive.items() if t < h.next_ticket or t in above]:
            self.leave(g, "orphaned")
        self.base = h.label.number
        self.comps = []
        self.composed = set()
        self.retained = {}
        self.cursor = max(self.cursor, h.next_ticket)
        self.skip = {t for t in above if t >= self.cursor}
        if h.ledger:
            self.carried = Ledger.restore(h.ledger)

    def ask(self, epoch: int, number: int) -> tuple[list[Group], batches.Lack | None]:
        """(the groups of batch `number`, None), or ([], what it waits for); ([], None) for a late
        copy of a request: it is trained.  Composes it when it is asked for the first time.

        Raises BadMessage for a batch past the last one.
        """
        checks.ask(self, number)
        if number < self.committed:
            return [], None
        at = number - self.base
        if at > len(self.comps):
            return [], batches.Lack(f"batch {number - 1} to be composed")
        if at == len(self.comps):
            picked, why = batches.pick(self, number)
            if not picked:
                return [], why
            self.comps.append([g.ticket for g in picked])
            self.composed.update(g.ticket for g in picked)
            self.changes += 1
        groups = [self.alive[t] for t in self.comps[at]]
        self.changes += self.active != epoch
        self.active = epoch
        # the learner may be training on it already: judged once, it comes again the same
        if number in self.leased:
            return groups, None
        batches.judge(self, groups, number)
        late = next((g for g in groups if not g.complete), None)
        if late is not None:
            return [], batches.why(late)
        self.leased.add(number)
        self.changes += 1
        for g in groups:
            for s in g.stored():
                s.runs = batches.runs_of(self, s, number)
        return groups, None

    def batch(self, groups: list[Group], epoch: int, number: int) -> Batch:
        """The message for composed, complete groups."""
        return batches.message(self, groups, epoch, number)

    def commit(
        self, number: int, label: Label, digest: str, unused: Sequence[tuple[int, int]] = ()
    ) -> bool | None:
        """Batch `number` is trained: True; False: told before; None: an earlier commit is still on
        its way.

        unused: per sample of the batch, in its order, tokens that were skipped and rejected; empty:
        none. Raises BadMessage for a batch that nobody can have been given."""
        checks.commit(self, number, label, unused)
        if number != self.committed:
            return None if number > self.committed else False
        self.tree.register(label, self.policy, digest)
        kept = self._lines_kept()
        self.leased.discard(number)
        of_batch = [s for t in self.comps[number - self.base] for s in self.alive[t].stored()]
        for s, (skipped, rejected) in zip(
            of_batch, unused or [(0, 0)] * len(of_batch), strict=True
        ):
            left = s.trajectory.length - s.masked
            s.skipped = min(skipped, left)
            s.rejected = min(rejected, left - s.skipped)
        for t in self.comps[number - self.base]:
            g = self.retained[t] = self.alive.pop(t)
            g.fold(kept, trained=True)
            for s in g.stored():
                s.runs = None
        self.committed = number + 1
        self.policy = label
        self.failed_samples = 0
        self.failed_machinery = 0
        self.evaluations.committed(label, self.s.steps)
        if len(self.tree) > 2 * VERSIONS:
            self._prune()
        return True

    def _prune(self) -> None:
        """Forget versions far behind, of which nothing is stored and no answer is being written any
        more.
        """
        groups = itertools.chain(self.alive.values(), self.retained.values())
        used = {span.label for g in groups for s in g.stored() for span in s.trajectory.spans}
        self.tree.prune(
            self.base - VERSIONS,
            used | {g.lease.granted for g in self.alive.values() if g.lease is not None},
        )

    def checkpointed(self, oldest: int) -> None:
        """Retire what lies behind the oldest checkpoint kept."""
        before = self.base
        while self.base < min(oldest, self.committed) and self.comps:
            for t in self.comps.pop(0):
                self.composed.discard(t)
                if (g := self.retained.pop(t, None)) is not None:
                    self._retire(g, trained=True)
                    self.stored_bytes -= g.free()
            self.base = self.base + 1
            self._kept = None
        if self.base != before:
            self.evaluations.forget(self.base)

    def finish(self) -> None:
        """The run is over: no more tickets."""
        self.finished = True

    def keep(self) -> list[Label]:
        """Versions that the ring must hold: those that tickets, out or to come, name exactly."""
        out = set(self.evaluations.labels())
        if self.s.inject is not None:
            most = self.s.inject if isinstance(self.s.inject, int) else len(self.s.inject) - 1
            out |= {
                Label(self.epoch, n)
                for n in range(max(0, self.committed - most), self.committed + 1)
            }
        return sorted(out)

    # ---- the ledger ------------------------------------------------------------------------------

    def ledger(self) -> dict[str, dict[str, float]]:
        """Totals of every generated token known to the buffer, each in one line."""
        return self.folded().totals()

    def folded(self) -> Ledger:
        """What is final, with what may still change, as it stands now."""
        out = self.carried.copy()
        out.merge(self.past)
        out.merge(self._lines_kept())
        for g in self.alive.values():
            g.fold(out, trained=False)
        return out

    def checkpoint_ledger(self, trained: set[int]) -> dict[str, dict[str, float]]:
        """Totals should a new (`memory`) buffer go on from here: what is stored and not yet trained
        is lost with this one.

        trained: tickets of all that is committed, and of what will be then.
        """
        out = self.carried.copy()
        out.merge(self.past)
        out.merge(self._lines_kept())
        for g in self.alive.values():
            g.fold(out, trained=g.ticket in trained, rest="lost_with_process")
        return out.totals()

    def _lines_kept(self) -> Ledger:
        """The lines of `retained`: some thousand samples, asked for at every batch and changed by a
        commit at most.
        """
        if self._kept is None:
            self._kept = Ledger()
            for g in self.retained.values():
                g.fold(self._kept, trained=True)
        return self._kept

    def _touched(self, ticket: int) -> None:
        """A group's lines change."""
        if ticket in self.retained:
            self._kept = None
