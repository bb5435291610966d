"""The versioned buffer as a state machine, without sockets and wall clock.

docs/protocol.md states the rules.

```
cursor --grant--> alive group --samples--> complete --ask--> composed
                    ^   |                     ^                 | commit
                    +---+                     |                 v
         lease ends: missing                  +---hello---- retained --checkpointed--> retired
         samples are due again         rolls `committed` back
```
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from asyncrl.contract import admission
from asyncrl.contract.blobs.images import Blobs, index_by_digest
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.freshness import AdmissionWindow, BatchTiming, next_window
from asyncrl.contract.messages import (
    EVAL_BASE,
    AttemptTokens,
    Batch,
    Disposition,
    IntPair,
    LearnerHello,
    LedgerLine,
    LedgerTotals,
    PolicyAnnouncement,
    Prompt,
    RewardFailure,
    SampleKey,
    Ticket,
    Trajectory,
)
from asyncrl.contract.printable import escape_line
from asyncrl.contract.versions import Label
from buffer import batches, checks, state
from buffer.evaluation import Evaluations
from buffer.groups import MAX_DROPS, Grant, Group, Lease, StoredSample, StoreSettings
from buffer.ledger import Ledger, sum_tokens
from buffer.mixer import TaskMixer
from buffer.state import StoreRules

# Rewards that differ by at most this share of the larger one are equal. This repeats the constant
# of asyncrl/algorithms/advantages.py, which imports torch.
EQUAL = 1e-6
NO_IMAGES: Blobs = {}
SESSIONS = 8192  # generator sessions with a count of their own: more than can hold a name
LEASE_GAPS = 3.0  # a lease lasts this many times the longest recent gap between two renewals ...
MOST_LEASES = 10.0  # ... but at most this many times `lease_s`
VERSIONS = 10_000  # known before the oldest checkpoint: a completion that spans more is refused
# Points against the last batch of a learner process, by how the process ended. ENOUGH of them
# exclude the batch: two crashes, four ends that its work may have caused (memory, no progress), or
# sixteen signals from outside.
ENDS = {"ended": 0.0, "outside": 0.25, "killed": 1.0, "": 1.0, "crashed": 2.0}
ENOUGH = 4.0


def _remember(table: OrderedDict[Any, Any], entries: Mapping[Any, Any], limit: int) -> None:
    """Add the newest entries of a table, and drop its oldest beyond `limit`."""
    table.update(entries)
    while len(table) > limit:
        table.popitem(last=False)


class Store(StoreRules):
    """One run's groups, tickets, compositions, versions and ledger.

    `StoreState` has the attributes that survive a restart. Times are seconds on any clock that the
    caller passes in.

    prompt: makes the prompt of a ticket number; a mixture's prompts come from `mixer`."""

    def __init__(
        self,
        settings: StoreSettings,
        prompt: Callable[[int], Prompt],
        evaluations: Evaluations | None = None,
        mixer: TaskMixer | None = None,
    ) -> None:
        super().__init__(settings, evaluations or Evaluations())
        self.mixer = mixer or self.mixer
        self.prompt = prompt
        # gets each excluded batch before it is removed
        self.on_excluded: Callable[[Batch], object] = lambda batch: None
        self.changes = 0
        self._derive()

    def _derive(self) -> None:
        """Compute what follows from the state."""
        self.leases = self.evaluations.leases  # and those of `alive`
        for group in self.alive.values():
            if (lease := group.lease) is not None:
                self.leases.add(lease.producer, lease.session, lease.attempt, group.ticket)
        self.composed = {ticket for comp in self.comps for ticket in comp}
        # the sum of the lines of `retained`; None: `_sum_retained` must compute it again
        self._retained_sums: Ledger | None = None
        self.lacking = True

    # ---- restarts --------------------------------------------------------------------------------

    def restore(self, snapshot: msgspec.Struct) -> None:
        """Take over the state of a `StoreSnapshot`; the prompts stay those of this store."""
        super().restore(snapshot)
        if missing := {group.task for group in self.alive.values()} - {"", *self.mixer.parts}:
            raise AsyncrlError(
                f"task.mixture: the run has groups of {', '.join(sorted(missing))}, which the "
                "config lacks; keep the part, and set its weight to 0 to stop it"
            )
        self._derive()

    def renew_all_leases(self, now: float) -> None:
        """Let every lease run its full time from `now`: an earlier process had another clock."""
        for group in self.alive.values():
            if group.lease is not None:
                group.lease.expires = now + self.settings.lease_s
        self.window = msgspec.structs.replace(self.window, opens=now)
        self.evaluations.renew_all_leases(now + self.settings.lease_s)

    # ---- tickets ---------------------------------------------------------------------------------

    def make_announcement(self) -> PolicyAnnouncement | None:
        """Make the announcement of the current policy; None before the first learner."""
        if self.policy is None or self.source is None:
            return None
        return PolicyAnnouncement(self.policy, self.tree.get_digest(self.policy), self.source)

    def grant(self, producer: str, session: int, samples: int, now: float) -> list[Ticket]:
        """Grant tickets for about `samples` free engine slots, evaluations first.

        If generators are reserved for evaluations, they get only evaluations, and the other
        generators get none. The last ticket may have more samples than there are slots."""
        granted: list[Ticket] = []
        if self.policy is None or self.finished:
            return granted
        evaluators = self.settings.evaluators
        evaluates = not evaluators or producer in evaluators
        while evaluates and samples > 0 and self.evaluations.queue:
            self.attempts += 1
            ticket = self.evaluations.grant(
                self.attempts,
                self.settings,
                producer=producer,
                session=session,
                expires=now + self.get_lease_s(producer),
            )
            granted.append(ticket)
            samples -= 1
        if producer in evaluators:
            return granted
        tickets = self._grant_tickets(producer, session, now)
        while samples > 0 and (next_ticket := next(tickets, None)) is not None:
            granted.append(next_ticket)
            samples -= len(next_ticket.samples)
        return granted

    def _grant_tickets(self, producer: str, session: int, now: float) -> Iterator[Ticket]:
        """Grant tickets in the order in which they are due.

        Missing samples of alive groups come first, then new groups while there is room.  The
        iterator ends where lag injection needs a future version.

        The position of a group is the number of groups that train before it. Composed batches come
        first, in their order.  Under `pace` they are also the first in ticket order, unless an
        earlier process composed them with another order or without a limit.  The other groups
        follow in ticket order."""
        room = admission.limit_groups(
            self.count_admitted_batches(now),
            self.settings.batch,
            self.stored_bytes,
            self.settings.byte_limit,
        )
        composed_groups = (
            self.alive[ticket]
            for comp in self.comps[self.committed - self.base :]
            for ticket in comp
        )
        groups = itertools.chain(composed_groups, self.iterate_uncomposed_groups())
        for position, group in enumerate(groups) if self.lacking else ():
            if not self.has_room(position, room):
                break
            if group.lease is None and not group.is_complete:
                ticket = self._lease(group, position, producer, session, now)
                if ticket is None:
                    return
                yield ticket
        else:
            # with many waiting generators most grants find nothing: do not search all groups again
            self.lacking = False
        while True:
            if self.count_groups_ahead() >= room or self.is_covered:
                return
            self._skip_trained()
            new_group = self._make_group()
            if new_group is None:
                return
            ticket = self._lease(new_group, len(self.alive), producer, session, now)
            if ticket is None:
                if new_group.task:
                    # it got no group: the next draw is this prompt
                    self.mixer.state.due.insert(0, (new_group.task, new_group.index))
                return
            self.alive[self.cursor] = new_group
            self.cursor += 1
            yield ticket

    def _make_group(self) -> Group | None:
        """Make the next group; None: all tasks of a mixture have run out of prompts.

        Raises AsyncrlError if the remaining groups do not fill a batch."""
        group = Group(self.cursor, [None] * self.settings.group)
        if not self.mixer:
            return group
        batch = admission.plan_batch(self.committed, len(self.alive), self.settings.batch)
        draw = self.mixer.draw(batch)
        if draw is not None:
            group.task, group.index = draw
            return group
        if self.count_groups_to_train() < self.settings.batch:
            raise AsyncrlError(
                f"task.mixture: every task has run out of prompts (passes) before batch {batch}: "
                "raise passes, or set learner.steps to that"
            )
        return None

    def _lease(
        self, group: Group, position: int, producer: str, session: int, now: float
    ) -> Ticket | None:
        """Lease a group's missing samples; None: lag injection needs a version of the future.

        position: number of groups that train before it."""
        assert self.policy is not None
        exact = None
        if self.settings.inject is not None:
            planned = admission.plan_batch(self.committed, position, self.settings.batch)
            wanted = planned - admission.choose_injected_lag(
                self.settings.inject, self.settings.seed, group.ticket
            )
            if wanted > self.committed:
                return None
            labels = (
                Label(self.epoch, number) for number in range(max(wanted, 0), self.committed + 1)
            )
            exact = next((label for label in labels if label in self.tree), None)
        self.attempts += 1
        missing = group.list_missing()
        min_version = self.find_least_version(self.policy)
        expires = now + self.get_lease_s(producer)
        group.lease = Lease(self.attempts, producer, session, expires, set(missing), self.policy)
        self.leases.add(producer, session, self.attempts, group.ticket)
        group.attempts[self.attempts] = [0, 0, 0]
        prompt = (
            self.mixer.prompt(group.task, group.index) if group.task else self.prompt(group.ticket)
        )
        self.stored_bytes += group.add_images(index_by_digest(prompt.images))
        limit = self.current_limit()
        group.grants[self.attempts] = Grant(
            exact or min_version, exact is not None, limit if self.settings.ess_floor else math.inf
        )
        return Ticket(
            ticket=group.ticket,
            attempt=self.attempts,
            kind="train",
            prompt=prompt,
            samples=missing,
            sampling=self.settings.get_sampling(group.task),
            min_version=min_version,
            exact_version=exact,
            seed=self.settings.seed,
            limit=limit,
        )

    def get_lease_s(self, producer: str) -> float:
        """Return the seconds of a lease of this generator.

        They are `lease_s`, or LEASE_GAPS times its longest recent gap between two renewals if that
        is longer, up to MOST_LEASES times `lease_s`."""
        return max(self.settings.lease_s, self.patience.get(producer, 0.0))

    def renew(
        self,
        producer: str,
        session: int,
        progress: list[AttemptTokens],
        now: float,
        judging: Sequence[IntPair] = (),
        gap: float = 0.0,
    ) -> None:
        """Renew leases by decode progress.

        A lease is renewed if its token count grew. Leases of the same message that have no tokens
        yet are queued behind it in the generator and are renewed with it.

        progress: (ticket, attempt, tokens so far).
        judging: (ticket, attempt) that wait for their rewards; they are renewed because each reward
            call has a deadline.
        gap: the producer's longest recent gap between two renewals, in seconds.
        Raises BadMessage for counts that no attempt can have."""
        checks.check_progress(self, progress)
        patience_before = self.patience.get(producer)
        if LEASE_GAPS * gap > self.settings.lease_s:
            self.patience[producer] = min(LEASE_GAPS * gap, MOST_LEASES * self.settings.lease_s)
        else:
            self.patience.pop(producer, None)
        is_change = progress or judging or patience_before != self.patience.get(producer)
        self.changes += bool(is_change)
        expires = now + self.get_lease_s(producer)
        renewed, queued = [*judging], []
        has_progress = False
        for ticket, attempt, tokens in progress:
            group = self.find_group(ticket)
            if ticket >= EVAL_BASE:
                renewed.append((ticket, attempt))
                has_progress = has_progress or tokens > 0
            elif group is not None and attempt in group.attempts:
                counts = group.attempts[attempt]
                if tokens > counts[0]:
                    counts[0] = tokens
                    has_progress = True
                    self._mark_changed(ticket)
                    renewed.append((ticket, attempt))
                elif tokens == 0:
                    queued.append((ticket, attempt))
            elif (stray := self.strays.get((ticket, attempt))) is not None:
                self._correct_stray(stray, tokens, 0)
        for ticket, attempt in renewed + (queued if has_progress else []):
            if ticket >= EVAL_BASE:
                self.evaluations.renew(attempt, expires)
            elif (lease := self._find_lease(ticket, attempt)) is not None:
                lease.expires = expires

    def report_tokens(self, producer: str, session: int, drawn: int) -> None:
        """Record a session's own count of sampled training tokens; counts only grow."""
        key = producer, session
        if drawn <= self.drawn.get(key, 0):
            return
        self.changes += 1
        self.drawn[key] = drawn
        self.drawn.move_to_end(key)
        if len(self.drawn) > SESSIONS:
            self.drawn_before += self.drawn.popitem(last=False)[1]

    def count_generated_tokens(self) -> int:
        """Count the tokens sampled for training, as the generators report them.

        The lines of the ledger must have the same sum. A dead generator counts up to its last
        message."""
        return (
            sum_tokens(self.carried.compute_totals()) + self.drawn_before + sum(self.drawn.values())
        )

    def _correct_stray(self, stray: list[int], reported: int, delivered: int) -> None:
        """Correct the ledger for an attempt of a removed group that reports or delivers late.

        Its tokens were counted as lost.

        reported, delivered: its reported tokens in all, and the newly delivered ones."""
        lost = max(0, stray[0] - stray[1])
        delivered += stray[1]
        reported = max(delivered, reported, stray[0])
        stray[:] = reported, delivered
        self.past.lines["lost_with_process"].add(reported - delivered - lost)

    def expire(self, now: float) -> int:
        """End the expired leases; return their number."""
        expired = [
            group
            for group in self.alive.values()
            if group.lease is not None and group.lease.expires < now
        ]
        for group in expired:
            self._end_lease(group)
        ended = len(expired) + self.evaluations.expire(now)
        self.changes += bool(ended)
        return ended

    def end_sessions(self, producer: str, session: int) -> None:
        """End the leases of a producer's other sessions."""
        self.changes += 1
        for group in self.alive.values():
            if (
                group.lease is not None
                and group.lease.producer == producer
                and group.lease.session != session
            ):
                self._end_lease(group)
        self.evaluations.end_sessions(producer, session)

    def free_leases(self, attempts: Sequence[IntPair]) -> None:
        """End the leases of these (ticket, attempt)."""
        self.changes += 1
        for ticket, attempt in attempts:
            if ticket >= EVAL_BASE:
                self.evaluations.requeue_jobs([attempt])
            elif self._find_lease(ticket, attempt) is not None:
                self._end_lease(self.alive[ticket])

    def _find_lease(self, ticket: int, attempt: int) -> Lease | None:
        """Find the lease of an attempt; None: it has ended."""
        group = self.alive.get(ticket)
        lease = None if group is None else group.lease
        return lease if lease is not None and lease.attempt == attempt else None

    def _end_lease(self, group: Group) -> None:
        if (lease := group.lease) is not None:
            group.attempts[lease.attempt][2] = 1
            group.lease = None
            self.leases.end(lease.producer, lease.session, lease.attempt)
            self.lacking = self.lacking or not group.is_complete

    # ---- samples ---------------------------------------------------------------------------------

    def deliver(self, sample: Trajectory, now: float) -> Disposition:
        """Check and accept one sample; return its disposition.

        Raises BadMessage if no ticket asked for it or no learner registered its weights."""
        checks.check_sample(self, sample)
        return self.accept_samples([sample])[0]

    def is_delivered(self, key: SampleKey) -> bool:
        """Whether (ticket, sample, attempt) was delivered before."""
        ticket, sample, attempt = key
        if ticket >= EVAL_BASE:
            return attempt not in self.evaluations.leased_jobs
        group = self.find_group(ticket)
        if group is None:
            return key in self.gone
        return (sample, attempt) in group.finals

    def is_complete(self, ticket: int) -> bool:
        """Whether a group that is not trained yet has all its samples."""
        group = self.alive.get(ticket)
        return group is not None and group.is_complete

    def accept_samples(
        self,
        samples: Sequence[Trajectory],
        encoded: bytes | memoryview = b"",
        images: Blobs = NO_IMAGES,
    ) -> list[Disposition]:
        """Accept a frame's samples in their order; return their dispositions.

        encoded: the encoded `Delivery` with these samples, for a store that keeps a journal.
        images: the frame's images, digest -> blob."""
        return [self.accept_sample(sample, images) for sample in samples]

    def accept_sample(self, sample: Trajectory, images: Blobs = NO_IMAGES) -> Disposition:
        """Accept a sample that has passed `checks.check_sample`; return its disposition.

        images: see `accept_samples`."""
        if sample.ticket >= EVAL_BASE:
            return self.evaluations.deliver(sample)
        key = sample.key
        group = self.find_group(sample.ticket)
        if group is None:
            if (final := self.gone.get(key)) is not None:
                return "trained" if final == "accepted" else final
            self.past.lines["duplicate"].add(sample.length, 1, sample.length, sample.reward)
            self.past.lines["set_aside"].add(sample.aside, int(sample.aside > 0), sample.aside)
            for attempt, tokens in sample.tokens_by_attempt:
                stray = self.strays.get((sample.ticket, attempt))
                if stray is not None:
                    self._correct_stray(stray, 0, tokens)
            _remember(self.gone, {key: "duplicate"}, state.REMEMBERED)
            return "duplicate"
        if (earlier := self.find_disposition(group, sample)) is not None:
            return earlier
        disposition = self._accept(group, sample)
        if images and disposition == "accepted" and group.ticket in self.alive:
            sample_images = {name: images[name] for name in sample.all_images if name in images}
            self.stored_bytes += group.add_images(sample_images)
        return disposition

    def _accept(self, group: Group, sample: Trajectory) -> Disposition:
        """Accept the first copy of a sample of a group that is still stored."""
        disposition: Disposition
        self._mark_changed(group.ticket)
        for attempt, tokens in sample.tokens_by_attempt:
            counts = group.attempts.setdefault(attempt, [0, 0, 1])
            counts[1] += tokens
            counts[0] = max(counts[0], counts[1])
        if sample.aside:  # independent of the sample's own disposition
            group.other.append(("set_aside", sample.aside, 0.0))
        if group.lease is not None and group.lease.attempt == sample.attempt:
            group.lease.todo.discard(sample.sample)
        if sample.failed:
            disposition = "failed"
            self._fail(group, sample, sample.failed)
        elif group.samples[sample.sample] is not None:
            disposition = "duplicate"
            group.other.append(("duplicate", sample.length, sample.reward))
        else:
            disposition = "accepted"
            assert self.policy is not None
            runs = admission.compute_span_lags(
                self.tree, sample.list_spans(), self.policy, self.committed
            )
            stored = StoredSample(sample, admission.compute_sample_lag(runs))
            group.set_sample(sample.sample, stored)
            self.stored_bytes += stored.size
        group.finals[sample.sample, sample.attempt] = disposition
        if group.lease is not None and not group.lease.todo:
            self._end_lease(group)
        if disposition == "accepted" and group.is_complete:
            self._end_lease(group)
            self.completions += 1
            group.completed = self.completions
            # a group without differences between its rewards has no gradient, and may be filtered
            rewards = [stored.trajectory.reward for stored in group.list_stored_samples()]
            has_equal_rewards = math.isclose(min(rewards), max(rewards), rel_tol=EQUAL)
            if group.task:
                self.mixer.on_complete(group.task, group.index, rewards)
            if (
                self.settings.filter_no_spread
                and has_equal_rewards
                and self.settings.group > 1
                and group.ticket not in self.composed
                and group.ticket in self.alive
            ):
                self.on_zero_variance(group)
            elif group.task:
                self.mixer.state.in_a_row.pop(group.task, None)  # the task is not dry
        if (
            group.failures >= MAX_DROPS
            and group.ticket in self.alive
            and group.ticket not in self.composed
        ):
            self.remove_group(group, "abandoned")
        return disposition

    def _fail(self, group: Group, sample: Trajectory, failure: RewardFailure) -> None:
        """Count a failed sample. Raises AsyncrlError beyond the budget of its kind."""
        group.failures += 1
        group.other.append(("failed", sample.length, 0.0))
        kind = failure.kind
        self.failures[kind] = self.failures.get(kind, 0) + 1
        if kind == "refused":  # limited for each sender: see `BufferService.count_refused`
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
                f"ticket {group.ticket}{f' of task {group.task}' if group.task else ''}, "
                f"{escape_line(str(failure))}"
            )

    def remove_group(self, group: Group, line: LedgerLine) -> None:
        """Remove a group from the stream and count its samples under a ledger line."""
        if self.settings.inject is not None and line in ("abandoned", "fatal"):
            self._skip_trained()
            # A new group takes the position of the removed one. Under lag injection the position
            # decides the lag: the later groups must keep their batches.
            successor = Group(
                self.cursor,
                [None] * self.settings.group,
                stands=group.position,
                task=group.task,
                index=group.index,
            )
            alive: dict[int, Group] = {}
            for other in self.alive.values():
                alive[other.ticket] = other
                if other is group:
                    alive[successor.ticket] = successor
            self.alive = alive
            self.cursor += 1
            self.lacking = True
        elif group.task:
            self.mixer.on_removed(group.task, line)
        self.alive.pop(group.ticket, None)
        self._end_lease(group)
        for stored in group.list_stored_samples():
            group.record_loss(stored, line)
        self._retire(group, trained=False)

    def _skip_trained(self) -> None:
        while self.cursor in self.skip:
            self.skip.discard(self.cursor)
            self.cursor += 1

    def _retire(self, group: Group, *, trained: bool) -> None:
        """Add a group's final lines to `past`; keep its samples' dispositions for late copies.

        trained: whether its samples count as trained; those of a removed group have other lines."""
        self.stored_bytes -= group.count_sample_bytes() + sum(map(len, group.images.values()))
        if not trained:
            group.empty()
            group.images = {}
        group.fold(self.past, trained=trained)
        if group.task:
            group.fold(self.mixer.state.past.setdefault(group.task, Ledger()), trained=trained)
        finals = {(group.ticket, *name): final for name, final in group.finals.items()}
        _remember(self.gone, finals, state.REMEMBERED)
        strays = {(group.ticket, x): counts[:2] for x, counts in group.attempts.items()}
        _remember(self.strays, strays, state.STRAYS)

    # ---- the learner -----------------------------------------------------------------------------

    def follow_learner(self, hello: LearnerHello) -> bool:
        """Follow a learner whose hello was checked; return False if it is fenced off."""
        if hello.epoch == self.epoch:
            return True
        if hello.epoch < self.epoch or hello.label.number < self.base or hello.origin < self.active:
            return False
        suspect_number = self.committed
        tickets, points = self.suspect
        # The learner's previous process ended on the batch after its last commit, unless it had not
        # received that batch, or the checkpoint includes it.
        if suspect_number in self.leased and hello.label.number <= suspect_number:
            batch = self.comps[suspect_number - self.base]
            tickets, points = [*batch], (points if tickets == batch else 0) + ENDS[hello.before]
        is_excluded = points >= ENOUGH
        if is_excluded:
            self.on_excluded(self.make_batch(suspect_number))
        self.changes += 1
        self.suspect = tickets, points
        for label, digest in sorted(hello.ring):
            original = Label(hello.origin, label.number)
            if original in self.tree and self.tree.get_digest(original) == digest:
                self.tree.add_alias(label, original)
            else:
                previous = Label(label.epoch, label.number - 1)
                self.tree.register(label, previous if previous in self.tree else None, digest)
        previous = Label(hello.epoch, hello.label.number - 1)
        parent = None
        if hello.parent is not None and hello.parent in self.tree:
            parent = hello.parent
        elif previous in self.tree:
            parent = previous
        self.tree.register(hello.label, parent, hello.digest)
        # a buffer that has not followed a learner yet takes the limit from the checkpoint
        if not self.epoch and hello.limit:
            self.limit = admission.AdaptiveLimit(hello.limit)
        now = int(max(admission.LEAST, min(self.limit.now, hello.max_lag)))
        self.limit = msgspec.structs.replace(self.limit, now=now, settling=now, seen=())
        if not self.epoch and hello.window:
            self.window = AdmissionWindow(min(hello.window, hello.max_lag))
        self.epoch = hello.epoch
        self.max_lag = hello.max_lag
        self.source = hello.source
        for group in self.alive.values():
            self._end_lease(group)
        self._follow(hello)
        if is_excluded:
            # later batches move up by one, which cannot increase the lag of a token
            for ticket in self.comps.pop(suspect_number - self.base):
                self.composed.discard(ticket)
                self.remove_group(self.alive[ticket], "fatal")
            self.suspect = ([], 0.0)
            self.aside += 1
        self.policy = hello.label
        # a finished run continues if the learner still has steps to make
        self.finished = self.finished and hello.label.number >= self.settings.steps
        self.evaluations.restart(hello.label, self.settings.steps)
        return True

    def _follow(self, hello: LearnerHello) -> None:
        """Move `committed` to the learner's number, down or up.

        A new buffer (`memory`) also takes the cursor and the totals of the checkpoint."""
        number = hello.label.number
        self.lacking = True
        self._retained_sums = None
        self.leased = set()
        if number > self.base + len(self.comps):
            for group in self.retained.values():
                self._retire(group, trained=True)
            # The learner has trained batches that this buffer never composed. Groups of those
            # batches that are still alive here are not trained again.
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
            if self.mixer and hello.mixture is not None:
                self.mixer.restore_position(hello.mixture)
        for batch, comp in enumerate(self.comps, self.base):
            for ticket in comp:
                if batch < number and ticket in self.alive:
                    self.retained[ticket] = self.alive.pop(ticket)
                if batch >= number and ticket in self.retained:
                    self.alive[ticket] = self.retained.pop(ticket)
                    for stored in self.alive[ticket].list_stored_samples():
                        stored.skipped = stored.rejected = 0  # may differ when trained again
        self.alive = dict(sorted(self.alive.items(), key=lambda x: x[1].position))
        self.committed = number

    def ask(self, epoch: int, number: int) -> tuple[list[Group], batches.BatchWait | None]:
        """Return the groups of batch `number` and None, or ([], the reason for waiting).

        The first request composes the batch. A late copy of a request for a trained batch gets
        ([], None).

        Raises BadMessage for a batch past the last one.
        """
        checks.check_batch_request(self, number)
        if number < self.committed:
            return [], None
        position = number - self.base
        if position > len(self.comps):
            return [], batches.BatchWait(f"batch {number - 1} to be composed")
        if position == len(self.comps):
            picked, wait = batches.pick_groups(self, number)
            if not picked:
                return [], wait
            self.comps.append([group.ticket for group in picked])
            self.composed.update(group.ticket for group in picked)
            self.changes += 1
        groups = [self.alive[ticket] for ticket in self.comps[position]]
        self.changes += self.active != epoch
        self.active = epoch
        # the learner may be training on it already: it must get the same batch again
        if number in self.leased:
            return groups, None
        runs = batches.judge(self, groups, number)
        if (wait := batches.explain_wait(groups)) is not None:
            return [], wait
        self.leased.add(number)
        self.changes += 1
        samples = (stored for group in groups for stored in group.list_stored_samples())
        for stored, sample_runs in zip(samples, runs, strict=True):
            stored.runs = sample_runs
        return groups, None

    def make_batch(self, number: int) -> Batch:
        """Make the message for a composed, complete batch."""
        groups = [self.alive.get(x) or self.retained[x] for x in self.comps[number - self.base]]
        samples = [stored for group in groups for stored in group.list_stored_samples()]
        runs_of_samples = [
            batches.compute_lag_runs(self, stored, number) if stored.runs is None else stored.runs
            for stored in samples
        ]
        lags = [admission.compute_sample_lag(runs) for runs in runs_of_samples]
        # the tickets of the composed batches up to this one
        trained = {ticket for comp in self.comps[: number + 1 - self.base] for ticket in comp}
        untrained = [group for group in self.alive.values() if group.ticket not in trained]
        next_ticket = min((group.ticket for group in untrained), default=self.cursor)
        return Batch(
            limit=self.limit.now if self.settings.ess_floor else 0,
            window=self.window.size if self.settings.wait else 0.0,
            epoch=self.epoch,
            number=number,
            samples=[stored.trajectory for stored in samples],
            lags=lags,
            in_flight=[min(x.in_flight, lag) for x, lag in zip(samples, lags, strict=True)],
            token_lags=runs_of_samples,
            stats={},
            tasks=[group.task for group in groups for _ in group.samples] if self.mixer else [],
            images={
                name: group.images[name]
                for group in groups
                for stored in group.list_stored_samples()
                for name in stored.trajectory.all_images
            },
            # for a checkpoint from which a new buffer (`memory`) can continue: samples that are
            # stored but not trained then end with this process
            next_ticket=next_ticket,
            trained_above=[
                ticket
                for ticket in range(next_ticket, self.cursor)
                if ticket not in self.alive or ticket in trained
            ]
            + sorted(self.skip),
            ledger=self.make_ledger(trained, "lost_with_process").compute_totals(),
            mixture=self.mixer.make_position(
                ((group.task, group.index) for group in untrained),
                self.make_task_ledgers(trained, "lost_with_process"),
            ),
        )

    def commit(
        self,
        number: int,
        label: Label,
        digest: str,
        unused: Sequence[IntPair] = (),
        evidence: admission.LimitEvidence | None = None,
        timing: BatchTiming | None = None,
        now: float = 0.0,
    ) -> bool | None:
        """Record that batch `number` is trained and `label` is the new policy.

        Returns True, or False for a repeated commit, or None while an earlier one is missing.

        unused: per sample of the batch, in its order: (skipped, rejected) tokens; empty: none.
        evidence: the evidence that moves an adaptive limit; None: there is none.
        timing: the times of the batch, which move the window; None: unknown.
        Raises BadMessage for a batch that the learner never received.
        """
        checks.check_commit(self, number, label, unused)
        if number != self.committed:
            return None if number > self.committed else False
        self.changes += 1
        self.tree.register(label, self.policy, digest)
        retained_sums = self._sum_retained()
        self.leased.discard(number)
        tickets = self.comps[number - self.base]
        if tickets == self.suspect[0]:
            self.suspect = ([], 0.0)  # it can be trained
        samples = [
            stored for ticket in tickets for stored in self.alive[ticket].list_stored_samples()
        ]
        for stored, (skipped, rejected) in zip(
            samples, unused or [(0, 0)] * len(samples), strict=True
        ):
            unmasked = stored.length - stored.masked
            stored.skipped = min(skipped, unmasked)
            stored.rejected = min(rejected, unmasked - stored.skipped)
        for ticket in tickets:
            group = self.retained[ticket] = self.alive.pop(ticket)
            group.fold(retained_sums, trained=True)
            for stored in group.list_stored_samples():
                stored.runs = None
        self.committed = number + 1
        self.policy = label
        self.failed_samples = 0
        self.failed_machinery = 0
        if evidence is not None and self.settings.ess_floor:
            self.limit = admission.next_limit(
                self.limit, evidence, self.settings.ess_floor, int(self.max_lag)
            )
        if timing is not None and self.settings.wait:
            self.window = next_window(self.window, timing, self.settings.wait, self.max_lag, now)
        self.evaluations.on_commit(label, self.settings.steps)
        if len(self.tree) > 2 * VERSIONS:
            # forget old versions that no stored sample and no lease refers to
            groups = itertools.chain(self.alive.values(), self.retained.values())
            sampled = {
                span.label
                for group in groups
                for stored in group.list_stored_samples()
                for span in stored.trajectory.list_spans()
            }
            leases = (group.lease for group in self.alive.values())
            granted = {lease.granted for lease in leases if lease is not None}
            self.tree.prune(self.base - VERSIONS, sampled | granted)
        return True

    def retire_batches(self, oldest: int) -> None:
        """Retire the batches before `oldest`, the oldest checkpoint kept."""
        previous_base = self.base
        while self.base < min(oldest, self.committed) and self.comps:
            for ticket in self.comps.pop(0):
                self.composed.discard(ticket)
                if (group := self.retained.pop(ticket, None)) is not None:
                    self._retire(group, trained=True)
            self.base += 1
            self._retained_sums = None
        if self.base != previous_base:
            self.changes += 1
            self.evaluations.forget(self.base)

    def finish(self) -> None:
        """End the run, also for a buffer that restarts: grant no more tickets."""
        self.changes += 1
        self.finished = True

    def list_pinned_versions(self) -> list[Label]:
        """List the versions that the ring must keep.

        Granted or future tickets name exactly these."""
        pinned = {open_round.label for open_round in self.evaluations.rounds}
        if (inject := self.settings.inject) is not None:
            most_lag = inject if isinstance(inject, int) else len(inject) - 1
            pinned |= {
                Label(self.epoch, number)
                for number in range(max(0, self.committed - most_lag), self.committed + 1)
            }
        return sorted(pinned)

    # ---- the ledger ------------------------------------------------------------------------------

    def sum_ledger(self) -> LedgerTotals:
        """Compute the totals of each ledger line.

        Each generated token that the buffer knows is in exactly one line."""
        return self.make_ledger().compute_totals()

    def make_ledger(
        self, trained: Set[int] = frozenset(), rest: LedgerLine = "left_over"
    ) -> Ledger:
        """Make the ledger of final and current dispositions.

        trained: tickets of alive groups that count as trained.
        rest: the line of samples that are stored but not trained."""
        ledger = self.carried.copy()
        ledger.merge(self.past)
        ledger.merge(self._sum_retained())
        for group in self.alive.values():
            group.fold(ledger, trained=group.ticket in trained, rest=rest)
        return ledger

    def make_task_ledgers(
        self, trained: Set[int] = frozenset(), rest: LedgerLine = "left_over"
    ) -> dict[str, Ledger]:
        """Make the ledger of each task of a mixture, as `make_ledger` does; {} without one.

        Late copies of samples of removed groups are only in the run's ledger."""
        if not self.mixer:
            return {}
        past = self.mixer.state.past
        ledgers = {title: past.get(title, Ledger()).copy() for title in self.mixer.parts}
        for group in self.retained.values():
            group.fold(ledgers[group.task], trained=True)
        for group in self.alive.values():
            group.fold(ledgers[group.task], trained=group.ticket in trained, rest=rest)
        return ledgers

    def _sum_retained(self) -> Ledger:
        """Sum the lines of `retained`.

        The sum is cached: it covers thousands of samples, is needed for every batch, and rarely
        changes."""
        if self._retained_sums is None:
            self._retained_sums = Ledger()
            for group in self.retained.values():
                group.fold(self._retained_sums, trained=True)
        return self._retained_sums

    def _mark_changed(self, ticket: int) -> None:
        """Record that the ledger lines of a group change."""
        if ticket in self.retained:
            self._retained_sums = None
