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
from collections.abc import Callable, Iterator, Sequence, Set

from asyncrl.contract import admission
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import (
    EVAL_BASE,
    Batch,
    Disposition,
    LearnerHello,
    LedgerLine,
    PolicyAnnouncement,
    Prompt,
    RewardFailure,
    Ticket,
    Trajectory,
    WeightsSource,
)
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label, PolicyTree
from buffer import batches, checks
from buffer.evaluation import Evaluations
from buffer.groups import MAX_DROPS, Grant, Group, Lease, LeaseTable, StoredSample, StoreSettings
from buffer.ledger import Key, Ledger, SampleFates, StrayAttempt, StrayAttempts, total_tokens
from buffer.state import StoreSnapshot

# rewards that differ by this share of the larger one are equal, as in
# asyncrl/algorithms/advantages.py (which needs torch)
EQUAL = 1e-6
REMEMBERED = 200_000  # final dispositions of gone groups kept for late copies
SESSIONS = 8192  # of generators, whose counts may still grow: more than may hold a name
LEASE_GAPS = 3.0  # silences between two renewals, the longest of late, that a lease lasts
MOST_LEASES = 10.0  # times `lease_s` that this makes of it at most
STRAYS = 20_000  # attempts of gone groups that may still report or deliver
VERSIONS = 10_000  # behind the oldest checkpoint kept: an answer that spans more is refused
# what the end of a learner's life counts against the batch that it was given last: two that ended
# by themselves are enough to set it aside, four that may have been killed for what they did
# (memory, no progress), sixteen killed by somebody else
ENDS = {"ended": 0.0, "outside": 0.25, "killed": 1.0, "": 1.0, "crashed": 2.0}
ENOUGH = 4.0


class Store:
    """One run's groups, tickets, compositions, versions and ledger."""

    def __init__(
        self,
        settings: StoreSettings,
        prompt: Callable[[int], Prompt],
        evaluations: Evaluations | None = None,
    ) -> None:
        self.settings = settings
        self.prompt = prompt
        self.tree = PolicyTree()
        self.epoch = self.active = 0
        self.max_lag = math.inf  # where the limit sets itself: its hard bound
        self.limit = (
            admission.AdaptiveLimit()
        )  # where it sets itself: the one for tickets from now on
        self.cursor = self.attempts = self.committed = self.base = 0
        self.policy: Label | None = None
        self.source: WeightsSource | None = None
        self.alive: dict[int, Group] = {}  # in ticket order
        self.leases = LeaseTable()  # of `alive`
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
        self.gone = SampleFates(REMEMBERED)
        self.strays = StrayAttempts(STRAYS)
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
        # producer -> seconds of its leases, where it is measured to be slower than `lease_s` allows
        self.patience: dict[str, float] = {}
        # tickets of the batch that the learner's last lives ended on, and what that counts (ENDS)
        self.suspect: tuple[list[int], float] = ([], 0.0)
        self.aside = 0  # batches set aside
        self.finished = False
        # may a group alive lack samples that nobody writes?  False only if `_grants` has looked
        self.lacking = True

    # ---- kept over a restart ---------------------------------------------------------------------

    def snapshot(self) -> StoreSnapshot:
        """The whole state.  It shares what it holds with the store: encode it at once."""
        return StoreSnapshot(
            settings=self.settings,
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
            suspect=self.suspect,
            patience=self.patience,
            aside=self.aside,
            limit=self.limit,
        )

    def restore(self, state: StoreSnapshot) -> None:
        """Become the store that `state` was taken of; its prompts stay this one's."""
        self.settings = state.settings
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
        self.leases = LeaseTable()
        for group in state.alive:
            if (lease := group.lease) is not None:
                self.leases.add(lease.producer, lease.session, lease.attempt, group.ticket)
        self.retained = {group.ticket: group for group in state.retained}
        self.comps = state.comps
        self.composed = {ticket for comp in state.comps for ticket in comp}
        self.leased = set(state.leased)
        self.past = state.past
        self.carried = state.carried
        self._kept = None
        self.gone = SampleFates(REMEMBERED, state.gone)
        self.strays = StrayAttempts(STRAYS, state.strays)
        self.skip = set(state.skip)
        self.failures = state.failures
        self.drawn = OrderedDict(state.drawn)
        self.tree.restore(state.tree)
        self.evaluations.restore(state.evaluations)
        self.lacking = True
        self.suspect = state.suspect
        self.patience = dict(state.patience)
        self.aside = state.aside
        self.limit = state.limit

    def renew_all_leases(self, now: float) -> None:
        """The clock of the life before says nothing: every lease runs its full time from now."""
        for group in self.alive.values():
            if group.lease is not None:
                group.lease.expires = now + self.settings.lease_s
        self.evaluations.renew_all_leases(now + self.settings.lease_s)

    # ---- the rules, each of them needed: tests override them one by one --------------------------

    @property
    def uses_ticket_order(self) -> bool:
        """Do batches take groups in ticket order?"""
        return self.settings.uses_ticket_order

    def has_room(self, place: int, room: float) -> bool:
        """May a group with so many before it be granted again?"""
        return place < room

    def current_limit(self) -> float:
        """The limit of a ticket granted now."""
        return self.limit.now if self.settings.ess_floor else self.max_lag

    def admits_to(self) -> float:
        """The limit that room is reckoned by: the announced one."""
        return self.current_limit()

    def groups_ahead(self) -> int:
        """How many groups stand before a new one: the leased batches' too, until their commit."""
        return len(self.alive)

    def groups_to_train(self) -> int:
        """How many groups alive will be trained, if nothing befalls them."""
        return len(self.alive)

    def uncomposed_groups(self) -> Iterator[Group]:
        """Groups that no batch has yet, in ticket order."""
        return (group for group in self.alive.values() if group.ticket not in self.composed)

    def least_version(self, policy: Label) -> Label:
        """The oldest version that may write a ticket granted now, at `policy`."""
        return policy

    def disposition(self, group: Group, sample: Trajectory) -> Disposition | None:
        """What became of the sample when it was delivered before; None: it is new."""
        return group.finals.get((sample.sample, sample.attempt))

    def may_train(self, sample: Trajectory, lag: float, limit: float) -> bool:
        """Under a hard limit, as the batch is handed out."""
        return lag <= limit

    def on_zero_variance(self, group: Group) -> None:
        """A complete group teaches nothing."""
        self.remove_group(group, "filtered")

    # ---- tickets ---------------------------------------------------------------------------------

    def announcement(self) -> PolicyAnnouncement | None:
        if self.policy is None or self.source is None:
            return None
        return PolicyAnnouncement(self.policy, self.tree.digest(self.policy), self.source)

    def grant(self, producer: str, session: int, samples: int, now: float) -> list[Ticket]:
        """Tickets for at most about `samples` free engine slots; evaluation first."""
        out: list[Ticket] = []
        if self.policy is None or self.finished:
            return out
        while samples > 0 and self.evaluations.queue:
            self.attempts += 1
            ticket = self.evaluations.grant(
                self.attempts,
                self.settings,
                producer=producer,
                session=session,
                expires=now + self.lease_of(producer),
            )
            out.append(ticket)
            samples -= 1
        tickets = self._grants(producer, session, now)
        while samples > 0 and (granted := next(tickets, None)) is not None:
            out.append(granted)
            samples -= len(granted.samples)
        return out

    def _positions(self) -> Iterator[tuple[int, Group]]:
        """(place, group) of those alive: how many train before it.

        Composed batches come first, as they train: under `pace` they are the first in ticket order
        too, unless another order or no limit composed them, in a life before.  The rest follows in
        ticket order."""
        first = (
            self.alive[ticket]
            for comp in self.comps[self.committed - self.base :]
            for ticket in comp
        )
        return enumerate(
            itertools.chain(
                first, (group for group in self.alive.values() if group.ticket not in self.composed)
            )
        )

    def _grants(self, producer: str, session: int, now: float) -> Iterator[Ticket]:
        """Tickets in the order in which they are due: what is missing of groups alive, then new
        ones, as long as there is room.  It ends where lag injection wants a version to come.
        """
        room = admission.group_limit(
            self.admits_to(), self.settings.batch, self.stored_bytes, self.settings.byte_limit
        )
        for place, group in self._positions() if self.lacking else ():
            if not self.has_room(place, room):
                break
            if group.lease is None and not group.complete:
                ticket = self._lease(group, place, producer, session, now)
                if ticket is None:
                    return
                yield ticket
        else:
            # with many that wait, most grants find nothing: they must not look at every group
            self.lacking = False
        while True:
            enough = (
                self.committed + self.groups_to_train() // self.settings.batch
                >= self.settings.steps
            )
            if self.groups_ahead() >= room or enough:
                return
            self._skip_trained()
            new = Group(self.cursor, [None] * self.settings.group)
            ticket = self._lease(new, len(self.alive), producer, session, now)
            if ticket is None:
                return
            self.alive[self.cursor] = new
            self.cursor += 1
            yield ticket

    def _lease(
        self, group: Group, place: int, producer: str, session: int, now: float
    ) -> Ticket | None:
        assert self.policy is not None
        exact = None
        if self.settings.inject is not None:
            planned = admission.planned_batch(self.committed, place, self.settings.batch)
            wanted = planned - admission.injected_lag(
                self.settings.inject, self.settings.seed, group.ticket
            )
            if wanted > self.committed:
                return None
            exact = next(
                (
                    x
                    for number in range(max(wanted, 0), self.committed + 1)
                    if (x := Label(self.epoch, number)) in self.tree
                ),
                None,
            )
        self.attempts += 1
        todo = group.missing()
        least = self.least_version(self.policy)
        group.lease = Lease(
            self.attempts, producer, session, now + self.lease_of(producer), set(todo), self.policy
        )
        self.leases.add(producer, session, self.attempts, group.ticket)
        group.attempts[self.attempts] = [0, 0, 0]
        limit = self.current_limit()
        group.grants[self.attempts] = Grant(
            exact or least, exact is not None, limit if self.settings.ess_floor else math.inf
        )
        return Ticket(
            ticket=group.ticket,
            attempt=self.attempts,
            kind="train",
            prompt=self.prompt(group.ticket),
            samples=todo,
            sampling=self.settings.sampling,
            min_version=least,
            exact_version=exact,
            seed=self.settings.seed,
            limit=limit,
        )

    def lease_of(self, producer: str) -> float:
        """Seconds of a lease of this generator: `lease_s`, or LEASE_GAPS times its longest measured
        silence between two renewals, where that is more.
        """
        return max(self.settings.lease_s, self.patience.get(producer, 0.0))

    def renew(
        self,
        producer: str,
        session: int,
        progress: list[tuple[int, int, int]],
        now: float,
        judging: Sequence[tuple[int, int]] = (),
        gap: float = 0.0,
    ) -> None:
        """Decode progress: a lease whose tokens grew lasts longer, and with it those of the same
        generator that wait for a row.

        judging: written tickets that wait for their rewards; their leases last longer too, as each
        call ends by its deadline. gap: the producer's longest silence between two renewals of late,
        seconds. Raises BadMessage for counts that no attempt can have."""
        checks.progress(self, progress)
        if LEASE_GAPS * gap > self.settings.lease_s:
            self.patience[producer] = min(LEASE_GAPS * gap, MOST_LEASES * self.settings.lease_s)
        else:
            self.patience.pop(producer, None)
        expires = now + self.lease_of(producer)
        for ticket, attempt in judging:
            if ticket >= EVAL_BASE:
                self.evaluations.renew(ticket, attempt, expires)
            elif (
                (group := self.alive.get(ticket)) is not None
                and group.lease is not None
                and group.lease.attempt == attempt
            ):
                group.lease.expires = expires
        moved = False
        queued = []
        for ticket, attempt, tokens in progress:
            if ticket >= EVAL_BASE:
                self.evaluations.renew(ticket, attempt, expires)
                moved = moved or tokens > 0
            elif (
                group := self.alive.get(ticket) or self.retained.get(ticket)
            ) is not None and attempt in group.attempts:
                count = group.attempts[attempt]
                if tokens > count[0]:
                    count[0], moved = tokens, True
                    self._touched(ticket)
                    if group.lease is not None and group.lease.attempt == attempt:
                        group.lease.expires = expires
                elif tokens == 0 and group.lease is not None and group.lease.attempt == attempt:
                    queued.append(group.lease)
            elif (stray := self.strays.get(ticket, attempt)) is not None:
                self._stray(ticket, attempt, max(tokens, stray.reported), 0)
        for lease in queued if moved else ():
            lease.expires = expires

    def report_tokens(self, producer: str, session: int, drawn: int) -> None:
        """A session's own count of the tokens that it has told of; counts only grow."""
        key = producer, session
        self.drawn[key] = max(drawn, self.drawn.get(key, 0))
        self.drawn.move_to_end(key)
        if len(self.drawn) > SESSIONS:
            self.drawn_before += self.drawn.popitem(last=False)[1]

    def generated_tokens(self) -> int:
        """Tokens drawn for training, as the generators count them, the dead ones up to their last
        word; what the ledger's lines must sum to.
        """
        return total_tokens(self.carried.totals()) + self.drawn_before + sum(self.drawn.values())

    def _stray(self, ticket: int, attempt: int, reported: int, delivered: int) -> None:
        """A gone group's attempt reports or delivers: its tokens that were counted as lost are
        counted again.
        """
        stray = self.strays.get(ticket, attempt)
        if stray is not None:
            lost = max(0, stray.reported - stray.delivered)
            delivered += stray.delivered
            reported = max(delivered, reported)
            self.strays.update(StrayAttempt(ticket, attempt, reported, delivered))
            self.past.add("lost_with_process", reported - delivered - lost)

    def expire(self, now: float) -> int:
        """End the leases that ran out; returns how many."""
        late = [
            group
            for group in self.alive.values()
            if group.lease is not None and group.lease.expires < now
        ]
        for group in late:
            self._end_lease(group)
        return len(late) + self.evaluations.expire(now)

    def end_sessions(self, producer: str, session: int) -> None:
        """A producer's new session: its older leases end."""
        for group in self.alive.values():
            if (
                group.lease is not None
                and group.lease.producer == producer
                and group.lease.session != session
            ):
                self._end_lease(group)
        self.evaluations.end_sessions(producer, session)

    def unheld_attempts(
        self, producer: str, session: int, taken: int, named: Set[int]
    ) -> list[tuple[int, int]]:
        """(ticket, attempt) granted to a session that it has not, and will not take: those up to
        `taken`, the attempt up to which it takes none any more, that are not `named`.
        """
        mine = self.leases.unnamed_attempts(producer, session, taken, named)
        return mine + self.evaluations.leases.unnamed_attempts(producer, session, taken, named)

    def free_leases(self, attempts: Sequence[tuple[int, int]]) -> None:
        """End the leases of these (ticket, attempt)."""
        for ticket, attempt in attempts:
            if ticket >= EVAL_BASE:
                self.evaluations.requeue_job(attempt)
            elif (group := self.alive.get(ticket)) is not None and (
                group.lease is not None and group.lease.attempt == attempt
            ):
                self._end_lease(group)

    def _end_lease(self, group: Group) -> None:
        if (lease := group.lease) is not None:
            group.attempts[lease.attempt][2] = 1
            group.lease = None
            self.leases.end(lease.producer, lease.session, lease.attempt)
            self.lacking = self.lacking or not group.complete

    # ---- samples ---------------------------------------------------------------------------------

    def deliver(self, sample: Trajectory, now: float) -> Disposition:
        """Take one sample; returns its disposition.  Raises BadMessage for one that no ticket asked
        for, or of weights that no learner registered.
        """
        checks.sample(self, sample)
        return self.accept_sample(sample)

    def is_delivered(self, key: Key) -> bool:
        """Was (ticket, sample, attempt) delivered before?"""
        ticket, sample, attempt = key
        if ticket >= EVAL_BASE:
            return attempt not in self.evaluations.out
        group = self.alive.get(ticket) or self.retained.get(ticket)
        if group is None:
            return self.gone.get(key) is not None
        return (sample, attempt) in group.finals

    def accept_samples(
        self, samples: Sequence[Trajectory], came: bytes | memoryview = b""
    ) -> list[Disposition]:
        """`accept_sample` of a frame's samples, in their order; came: the `Delivery` that brought
        them, as it
        was encoded, for a store that keeps a record.
        """
        return [self.accept_sample(sample) for sample in samples]

    def accept_sample(self, sample: Trajectory) -> Disposition:
        """`deliver` of a sample that `checks.sample` has passed."""
        if sample.ticket >= EVAL_BASE:
            return self.evaluations.deliver(sample)
        key = sample.ticket, sample.sample, sample.attempt
        group = self.alive.get(sample.ticket) or self.retained.get(sample.ticket)
        if group is None:
            became = self.gone.get(key) or self._late(key, sample)
            return "trained" if became == "accepted" else became
        if (known := self.disposition(group, sample)) is not None:
            return known
        return self._accept(group, sample)

    def _late(self, key: Key, sample: Trajectory) -> Disposition:
        """A sample of a group that is gone, not known or no longer remembered."""
        self.past.add("duplicate", sample.length, 1, sample.length, sample.reward)
        self.past.add("set_aside", sample.aside, int(sample.aside > 0), sample.aside)
        for attempt, tokens in sample.tokens_by_attempt:
            stray = self.strays.get(sample.ticket, attempt)
            if stray is not None:
                self._stray(sample.ticket, attempt, stray.reported, tokens)
        self.gone.add(key, "duplicate")
        return "duplicate"

    def _accept(self, group: Group, sample: Trajectory) -> Disposition:
        what: Disposition
        self._touched(group.ticket)
        for attempt, tokens in sample.tokens_by_attempt:
            count = group.attempts.setdefault(attempt, [0, 0, 1])
            count[1] += tokens
            count[0] = max(count[0], count[1])
        if sample.aside:  # whatever becomes of the sample
            group.other.append(("set_aside", sample.aside, 0.0))
        if group.lease is not None and group.lease.attempt == sample.attempt:
            group.lease.todo.discard(sample.sample)
        if sample.failed:
            what = "failed"
            self._fail(group, sample, sample.failed)
        elif group.samples[sample.sample] is not None:
            what = "duplicate"
            group.other.append(("duplicate", sample.length, sample.reward))
        else:
            what = "accepted"
            assert self.policy is not None
            lag = admission.sample_lag(
                admission.span_lags(self.tree, sample.all_spans(), self.policy, self.committed)
            )
            stored = StoredSample(sample, lag)
            group.set_sample(sample.sample, stored)
            self.stored_bytes += stored.size
        group.finals[sample.sample, sample.attempt] = what
        if group.lease is not None and not group.lease.todo:
            self._end_lease(group)
        if what == "accepted" and group.complete:
            self._on_complete(group)
        if (
            group.failures >= MAX_DROPS
            and group.ticket in self.alive
            and group.ticket not in self.composed
        ):
            self.remove_group(group, "abandoned")
        return what

    def _fail(self, group: Group, sample: Trajectory, failure: RewardFailure) -> None:
        group.failures += 1
        group.other.append(("failed", sample.length, 0.0))
        kind = failure.kind
        self.failures[kind] = self.failures.get(kind, 0) + 1
        if kind == "refused":  # what sends such samples ends: see `Service.count_refused`
            return
        if kind == "machinery":
            self.failed_machinery += 1
            failed = self.failed_machinery
            key = "reward.machinery_budget"
            budget = self.settings.machinery_budget
        else:
            self.failed_samples += 1
            failed = self.failed_samples
            key = "reward.error_budget"
            budget = self.settings.error_budget
        if failed > budget * self.settings.batch * self.settings.group:
            raise AsyncrlError(
                f"{failed} samples failed since the last batch, more than {key} allows "
                f"({budget:g} of {self.settings.batch * self.settings.group}); the last one: "
                f"ticket {group.ticket}, {escape_line(str(failure))}"
            )

    def _on_complete(self, group: Group) -> None:
        self._end_lease(group)
        self.completions += 1
        group.completed = self.completions
        rewards = [stored.trajectory.reward for stored in group.stored_samples()]
        equal = math.isclose(min(rewards), max(rewards), rel_tol=EQUAL)
        if (
            self.settings.filter_no_spread
            and equal
            and self.settings.group > 1
            and group.ticket not in self.composed
            and group.ticket in self.alive
        ):
            self.on_zero_variance(group)

    def remove_group(self, group: Group, what: LedgerLine) -> None:
        """A group leaves the stream: filtered, abandoned, or of a branch that is not followed."""
        if self.settings.inject is not None and what in ("abandoned", "fatal"):
            self._succeed(group)
        self.alive.pop(group.ticket, None)
        self._end_lease(group)
        for stored in group.stored_samples():
            group.other.append((what, stored.length, stored.trajectory.reward))
            group.finals[stored.trajectory.sample, stored.trajectory.attempt] = what
        self.stored_bytes -= group.release_samples()
        group.empty()
        self._retire(group, trained=False)

    def _succeed(self, group: Group) -> None:
        """Under injection the place decides the lag: a new group stands where `g` stood, so that
        those behind keep their batches.
        """
        self._skip_trained()
        new = Group(self.cursor, [None] * self.settings.group, stands=group.position)
        self.alive = {
            x.ticket: x for y in self.alive.values() for x in ((y, new) if y is group else (y,))
        }
        self.cursor += 1
        self.lacking = True

    def _skip_trained(self) -> None:
        while self.cursor in self.skip:
            self.skip.discard(self.cursor)
            self.cursor += 1

    def _retire(self, group: Group, *, trained: bool) -> None:
        """Fold a group's lines into the past; late copies of its samples still find their
        disposition.
        """
        group.fold(self.past, trained=trained)
        self.gone.add_all(group.ticket, group.finals)
        for attempt, (reported, delivered, _) in group.attempts.items():
            self.strays.add(StrayAttempt(group.ticket, attempt, reported, delivered))

    # ---- the learner -----------------------------------------------------------------------------

    def hello(self, hello: LearnerHello) -> bool:
        """Follow a learner; False: it is fenced.  Raises BadMessage for a hello that contradicts
        itself.
        """
        checks.hello(hello)
        if hello.epoch == self.epoch:
            return True
        if hello.epoch < self.epoch or hello.label.number < self.base or hello.origin < self.active:
            return False
        last = self.committed
        self.suspect = self.suspect_batch(hello)
        set_aside = self.suspect[1] >= ENOUGH
        for label, digest in sorted(hello.ring):
            was = Label(hello.origin, label.number)
            if was in self.tree and self.tree.digest(was) == digest:
                self.tree.add_alias(label, was)
            else:
                before = Label(label.epoch, label.number - 1)
                self.tree.register(label, before if before in self.tree else None, digest)
        parent = hello.parent if hello.parent is not None and hello.parent in self.tree else None
        before = Label(hello.epoch, hello.label.number - 1)
        self.tree.register(
            hello.label,
            parent if parent is not None else (before if before in self.tree else None),
            hello.digest,
        )
        # a buffer that has followed nobody yet takes the limit of the learner's checkpoint
        known = (
            self.limit if self.epoch or not hello.limit else admission.AdaptiveLimit(hello.limit)
        )
        self.limit = admission.clamp_limit(known, int(min(hello.max_lag, 1 << 30)))
        self.epoch = hello.epoch
        self.max_lag = hello.max_lag
        self.source = hello.source
        for group in self.alive.values():
            self._end_lease(group)
        self._follow(hello)
        if set_aside:
            self._set_aside(last)
        self.policy = hello.label
        # an end that was said is taken back by a learner that has steps to make
        self.finished = self.finished and hello.label.number >= self.settings.steps
        self.evaluations.restart(hello.label, self.settings.steps)
        return True

    def is_behind(self, hello: LearnerHello) -> bool:
        """Is a learner that `hello` fenced off the newest one, and goes on from a checkpoint that
        is older than everything kept here?  No later life of it can do better.
        """
        newest = hello.epoch > self.epoch and hello.origin >= self.active
        return newest and hello.label.number < self.base

    def suspect_batch(self, hello: LearnerHello) -> tuple[list[int], float]:
        """`suspect` with what the hello of a new life tells of the one before: it ended on the
        batch after its last commit, if that had been handed out.

        A life that ended elsewhere, before its first batch, or behind a checkpoint past that batch,
        says nothing of it."""
        if self.committed not in self.leased or hello.label.number > self.committed:
            return self.suspect
        tickets, count = self.suspect
        batch = self.comps[self.committed - self.base]
        return list(batch), (count if tickets == batch else 0) + ENDS[hello.before]

    def _set_aside(self, number: int) -> None:
        """Batch `number` leaves, with all its groups; the later ones move up, which makes no token
        of theirs older.
        """
        for ticket in self.comps.pop(number - self.base):
            self.composed.discard(ticket)
            self.remove_group(self.alive[ticket], "fatal")
        self.suspect = ([], 0.0)
        self.aside += 1

    def _follow(self, hello: LearnerHello) -> None:
        """Move `committed` to the learner's number, down or up; a new (`memory`) buffer takes its
        cursor and totals.
        """
        number = hello.label.number
        self.lacking = True
        self._kept = None
        self.leased = set()
        if number > self.base + len(self.comps):
            self._follow_beyond(hello)
        for batch, comp in enumerate(self.comps, self.base):
            for ticket in comp:
                if batch < number and ticket in self.alive:
                    self.retained[ticket] = self.alive.pop(ticket)
                if batch >= number and ticket in self.retained:
                    self.alive[ticket] = self.retained.pop(ticket)
                    for stored in self.alive[ticket].stored_samples():
                        stored.skipped = stored.rejected = (
                            0  # it is trained again, perhaps otherwise
                        )
        self.alive = dict(sorted(self.alive.items(), key=lambda x: x[1].position))
        self.committed = number

    def _follow_beyond(self, hello: LearnerHello) -> None:
        """The learner has trained what this buffer never composed: what of it is alive here, since
        an older checkpoint, is not trained again.
        """
        for group in self.retained.values():
            self._retire(group, trained=True)
            self.stored_bytes -= group.release_samples()
        above = set(hello.trained_above)
        for group in [
            group
            for ticket, group in self.alive.items()
            if ticket < hello.next_ticket or ticket in above
        ]:
            self.remove_group(group, "orphaned")
        self.base = hello.label.number
        self.comps = []
        self.composed = set()
        self.retained = {}
        self.cursor = max(self.cursor, hello.next_ticket)
        self.skip = {ticket for ticket in above if ticket >= self.cursor}
        if hello.ledger:
            self.carried = Ledger.restore(hello.ledger)

    def ask(self, epoch: int, number: int) -> tuple[list[Group], batches.BatchWait | None]:
        """(the groups of batch `number`, None), or ([], what it waits for); ([], None) for a late
        copy of a request: it is trained.  Composes it when it is asked for the first time.

        Raises BadMessage for a batch past the last one.
        """
        checks.ask(self, number)
        if number < self.committed:
            return [], None
        at = number - self.base
        if at > len(self.comps):
            return [], batches.BatchWait(f"batch {number - 1} to be composed")
        if at == len(self.comps):
            picked, why = batches.pick_groups(self, number)
            if not picked:
                return [], why
            self.comps.append([group.ticket for group in picked])
            self.composed.update(group.ticket for group in picked)
            self.changes += 1
        groups = [self.alive[ticket] for ticket in self.comps[at]]
        self.changes += self.active != epoch
        self.active = epoch
        # the learner may be training on it already: judged once, it comes again the same
        if number in self.leased:
            return groups, None
        runs = batches.judge(self, groups, number)
        late = next((group for group in groups if not group.complete), None)
        if late is not None:
            return [], batches.explain_wait(late)
        self.leased.add(number)
        self.changes += 1
        each = (stored for group in groups for stored in group.stored_samples())
        for stored, of_it in zip(each, runs, strict=True):
            stored.runs = of_it
        return groups, None

    def batch(self, groups: list[Group], epoch: int, number: int) -> Batch:
        """The message for composed, complete groups."""
        return batches.message(self, groups, epoch, number)

    def commit(
        self,
        number: int,
        label: Label,
        digest: str,
        unused: Sequence[tuple[int, int]] = (),
        seen: admission.LimitEvidence | None = None,
    ) -> bool | None:
        """Batch `number` is trained: True; False: told before; None: an earlier commit is still on
        its way.

        unused: per sample of the batch, in its order, tokens that were skipped and rejected; empty:
        none.  seen: what moves a limit that sets itself; None: nothing.

        Raises BadMessage for a batch that nobody can have been given.
        """
        checks.commit(self, number, label, unused)
        if number != self.committed:
            return None if number > self.committed else False
        self.tree.register(label, self.policy, digest)
        kept = self._lines_kept()
        self.leased.discard(number)
        if self.comps[number - self.base] == self.suspect[0]:
            self.suspect = ([], 0.0)  # it can be trained
        of_batch = [
            stored
            for ticket in self.comps[number - self.base]
            for stored in self.alive[ticket].stored_samples()
        ]
        for stored, (skipped, rejected) in zip(
            of_batch, unused or [(0, 0)] * len(of_batch), strict=True
        ):
            left = stored.length - stored.masked
            stored.skipped = min(skipped, left)
            stored.rejected = min(rejected, left - stored.skipped)
        for ticket in self.comps[number - self.base]:
            group = self.retained[ticket] = self.alive.pop(ticket)
            group.fold(kept, trained=True)
            for stored in group.stored_samples():
                stored.runs = None
        self.committed = number + 1
        self.policy = label
        self.failed_samples = 0
        self.failed_machinery = 0
        if seen is not None and self.settings.ess_floor:
            self.limit = admission.next_limit(
                self.limit, seen, self.settings.ess_floor, int(self.max_lag)
            )
        self.evaluations.on_commit(label, self.settings.steps)
        if len(self.tree) > 2 * VERSIONS:
            self._prune()
        return True

    def _prune(self) -> None:
        """Forget versions far behind, of which nothing is stored and no answer is being written any
        more.
        """
        groups = itertools.chain(self.alive.values(), self.retained.values())
        used = {
            span.label
            for group in groups
            for stored in group.stored_samples()
            for span in stored.trajectory.all_spans()
        }
        self.tree.prune(
            self.base - VERSIONS,
            used
            | {group.lease.granted for group in self.alive.values() if group.lease is not None},
        )

    def checkpointed(self, oldest: int) -> None:
        """Retire what lies behind the oldest checkpoint kept."""
        before = self.base
        while self.base < min(oldest, self.committed) and self.comps:
            for ticket in self.comps.pop(0):
                self.composed.discard(ticket)
                if (group := self.retained.pop(ticket, None)) is not None:
                    self._retire(group, trained=True)
                    self.stored_bytes -= group.release_samples()
            self.base = self.base + 1
            self._kept = None
        if self.base != before:
            self.evaluations.forget(self.base)

    def finish(self) -> None:
        """The run is over: no more tickets."""
        self.finished = True

    def pinned_versions(self) -> list[Label]:
        """Versions that the ring must hold: those that tickets, out or to come, name exactly."""
        out = set(self.evaluations.labels())
        if self.settings.inject is not None:
            most = (
                self.settings.inject
                if isinstance(self.settings.inject, int)
                else len(self.settings.inject) - 1
            )
            out |= {
                Label(self.epoch, number)
                for number in range(max(0, self.committed - most), self.committed + 1)
            }
        return sorted(out)

    # ---- the ledger ------------------------------------------------------------------------------

    def ledger(self) -> dict[str, dict[str, float]]:
        """Totals of every generated token known to the buffer, each in one line."""
        return self.current_ledger().totals()

    def current_ledger(self) -> Ledger:
        """What is final, with what may still change, as it stands now."""
        out = self.carried.copy()
        out.merge(self.past)
        out.merge(self._lines_kept())
        for group in self.alive.values():
            group.fold(out, trained=False)
        return out

    def checkpoint_ledger(self, trained: set[int]) -> dict[str, dict[str, float]]:
        """Totals should a new (`memory`) buffer go on from here: what is stored and not yet trained
        is lost with this one.

        trained: tickets of all that is committed, and of what will be then.
        """
        out = self.carried.copy()
        out.merge(self.past)
        out.merge(self._lines_kept())
        for group in self.alive.values():
            group.fold(out, trained=group.ticket in trained, rest="lost_with_process")
        return out.totals()

    def _lines_kept(self) -> Ledger:
        """The lines of `retained`: some thousand samples, asked for at every batch and changed by a
        commit at most.
        """
        if self._kept is None:
            self._kept = Ledger()
            for group in self.retained.values():
                group.fold(self._kept, trained=True)
        return self._kept

    def _touched(self, ticket: int) -> None:
        """A group's lines change."""
        if ticket in self.retained:
            self._kept = None
