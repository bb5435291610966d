"""A store whose every change is in the journal: what peers said and when, in order.  Folding it
again gives the same state.

The store is a function of these records (its clock is passed in, its prompts are the task's, its
lag is the tree's), so a record is what was asked, not what came of it.  A segment begins with a
snapshot, made with the settings that its records need."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.errors import AsyncrlError, Damaged
from asyncrl.contract.messages import (
    Disposition,
    LearnerHello,
    Prompt,
    Ticket,
    Trajectory,
    WeightsSource,
)
from asyncrl.contract.versions import Label
from buffer.batches import Lack
from buffer.evaluation import Evaluations, Job, Round
from buffer.groups import Group, Settings
from buffer.journal import Journal, read, segments
from buffer.ledger import Ledger
from buffer.store import Store

FORMAT = 1


class Granted(msgspec.Struct, tag="grant", array_like=True):
    producer: str
    session: int
    samples: int
    now: float
    attempts: int  # the counter afterwards: a fold that differs is found out


class Renewed(msgspec.Struct, tag="renew", array_like=True):
    producer: str
    session: int
    progress: list[tuple[int, int, int]]
    now: float
    judging: list[tuple[int, int]] = []  # which older journals lack


class Expired(msgspec.Struct, tag="expire", array_like=True):
    now: float


class Ended(msgspec.Struct, tag="end", array_like=True):
    producer: str
    session: int


class Delivered(msgspec.Struct, tag="deliver", array_like=True):
    trajectory: Trajectory


class Greeted(msgspec.Struct, tag="hello", array_like=True):
    hello: LearnerHello


class Asked(msgspec.Struct, tag="ask", array_like=True):
    epoch: int
    number: int


class Committed(msgspec.Struct, tag="commit", array_like=True):
    number: int
    label: Label
    digest: str
    unused: list[tuple[int, int]] = []


class Retired(msgspec.Struct, tag="checkpointed", array_like=True):
    oldest: int


class Finished(msgspec.Struct, tag="finish", array_like=True):
    pass


class Told(msgspec.Struct, tag="told", array_like=True):
    producer: str
    session: int
    drawn: int


class EvalState(msgspec.Struct):
    every: int
    prompts: int
    final_prompts: int
    ood_prompts: int
    temperature: float
    queue: list[Job]
    out: list[tuple[int, Job, str, int, float]]
    rounds: list[Round]
    results: list[tuple[str, int, dict[str, float]]]
    ood_every: int = 0  # which an older journal lacks


class Snapshot(msgspec.Struct, tag="snapshot"):
    """A store's whole state."""

    format: int
    settings: Settings
    plain: dict[str, int]
    max_lag: float | None  # None: no limit (msgpack keeps inf, JSON views of it do not)
    policy: Label | None
    source: WeightsSource | None
    alive: list[Group]
    retained: list[Group]
    comps: list[list[int]]
    past: Ledger
    gone: list[tuple[tuple[int, int, int], Disposition]]
    strays: list[tuple[tuple[int, int], list[int]]]
    skip: list[int]
    failures: dict[str, int]
    tree: list[tuple[Label, int]]
    parents: list[int]
    depths: list[int]
    digests: list[str]
    evaluations: EvalState
    leased: list[int] = []
    carried: Ledger = msgspec.field(default_factory=Ledger)
    drawn: list[tuple[tuple[str, int], int]] = []


Record = (
    Granted
    | Renewed
    | Expired
    | Ended
    | Delivered
    | Greeted
    | Asked
    | Committed
    | Retired
    | Finished
    | Told
)
# a segment folds with the settings that it was written under
EVALUATED = ("every", "prompts", "final_prompts", "ood_prompts", "temperature", "ood_every")
PLAIN = (
    "epoch",
    "active",
    "cursor",
    "attempts",
    "committed",
    "base",
    "completions",
    "failed_samples",
    "failed_machinery",
    "stored_bytes",
    "drawn_before",
)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def snapshot(s: Store) -> bytes:
    error = s.evaluations
    tree = s.tree
    kept = EvalState(
        error.every,
        error.prompts,
        error.final_prompts,
        error.ood_prompts,
        error.temperature,
        list(error.queue),
        [(a, *entry) for a, entry in error.out.items()],
        error.rounds,
        [(split, n, values) for (split, n), values in error.results.items()],
        error.ood_every,
    )
    plain = {name: getattr(s, name) for name in PLAIN} | {"finished": int(s.finished)}
    return _encode(
        Snapshot(
            FORMAT,
            s.s,
            plain,
            None if s.max_lag == float("inf") else s.max_lag,
            s.policy,
            s.source,
            list(s.alive.values()),
            list(s.retained.values()),
            s.comps,
            s.past,
            list(s.gone.items()),
            list(s.strays.items()),
            sorted(s.skip),
            s.failures,
            list(tree._node.items()),
            tree._parent,
            tree._depth,
            tree._digest,
            kept,
            sorted(s.leased),
            s.carried,
            list(s.drawn.items()),
        )
    )


def _restore(s: Store, x: Snapshot) -> None:
    """Put a snapshot's state into the fresh store `s`."""
    for name in PLAIN:
        setattr(s, name, x.plain.get(name, 0))  # a key that an older journal lacks
    s.s = x.settings
    s.finished = bool(x.plain["finished"])
    s.max_lag = float("inf") if x.max_lag is None else x.max_lag
    s.policy = x.policy
    s.source = x.source
    s.alive = {g.ticket: g for g in x.alive}
    s.retained = {g.ticket: g for g in x.retained}
    s.comps, s.composed, s.past = x.comps, {t for comp in x.comps for t in comp}, x.past
    s.gone = OrderedDict(x.gone)
    s.strays = OrderedDict(x.strays)
    s.skip = set(x.skip)
    s.failures = x.failures
    s.tree._node = dict(x.tree)
    s.tree._parent = x.parents
    s.tree._depth = x.depths
    s.tree._digest = x.digests
    s.tree.index()
    s.drawn = OrderedDict(x.drawn)
    s.leased = set(x.leased)
    s.carried = x.carried
    error = s.evaluations
    kept = x.evaluations
    for name in EVALUATED:
        setattr(error, name, getattr(kept, name))
    error.queue = deque(kept.queue)
    error.rounds = kept.rounds
    error.results = {(split, n): v for split, n, v in kept.results}
    error.out = {a: (job, who, session, expires) for a, job, who, session, expires in kept.out}


class RecordedStore(Store):
    """A Store that appends each change to the journal after making it; nothing may leave the
    process before it is durable there.

    `open` folds what an earlier life left.  Raises Damaged when that does not fold.
    """

    journal: Journal

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        sync: bool,
        settings: Settings,
        prompt: Callable[[int], Prompt],
        evaluations: Evaluations,
        now: float,
        segment_bytes: int = 0,
    ) -> RecordedStore:
        store = cls(settings, prompt, evaluations)
        mine = {name: getattr(evaluations, name) for name in EVALUATED}
        if found := segments(directory):
            store._fold_segment(found[-1])
        for name, value in mine.items():
            setattr(evaluations, name, value)
        store.s = settings
        store.finished = store.finished and store.committed >= settings.steps
        evaluations.fresh = []
        store._leases_anew(now)
        store.journal = Journal(
            directory, sync=sync, **({"segment_bytes": segment_bytes} if segment_bytes else {})
        )
        store.journal.rotate(snapshot(store))
        return store

    def _fold_segment(self, path: Path) -> None:
        records = read(path)
        try:
            first = msgspec.msgpack.decode(next(records), type=Snapshot)
            if first.format != FORMAT:
                raise Damaged(
                    f"{path} has format {first.format}, this version reads {FORMAT}: go on with "
                    "the version that wrote it"
                )
            _restore(self, first)
            for payload in records:
                self._apply(_decode(payload))
        except (StopIteration, msgspec.MsgspecError, KeyError) as error:
            raise Damaged(
                f"{path} does not fold: {error or 'it is empty'}; start a new run, or restore the "
                "file"
            ) from error

    def _apply(self, r: Record) -> None:
        """One record again, by the plain store's own methods."""
        if isinstance(r, Granted):
            super().grant(r.producer, r.session, r.samples, r.now)
            if self.attempts != r.attempts:
                raise Damaged(
                    f"the journal does not fold: a grant gives attempt {self.attempts}, it gave "
                    f"{r.attempts}; was the task or the code changed?"
                )
        elif isinstance(r, Delivered):
            try:
                super().deliver(r.trajectory, 0.0)
            except AsyncrlError as error:
                raise Damaged(f"the journal does not fold: {error}") from error
        elif isinstance(r, Renewed):
            super().renew(r.producer, r.session, r.progress, r.now, r.judging)
        elif isinstance(r, Expired):
            super().expire(r.now)
        elif isinstance(r, Ended):
            super().end_sessions(r.producer, r.session)
        elif isinstance(r, Greeted):
            super().hello(r.hello)
        elif isinstance(r, Asked):
            super().ask(r.epoch, r.number)
        elif isinstance(r, Committed):
            super().commit(r.number, r.label, r.digest, r.unused)
        elif isinstance(r, Retired):
            super().checkpointed(r.oldest)
        elif isinstance(r, Told):
            super().told(r.producer, r.session, r.drawn)
        else:
            self.finished = True

    def _leases_anew(self, now: float) -> None:
        """The clock of the life before says nothing: every lease runs its full time from now."""
        for g in self.alive.values():
            if g.lease is not None:
                g.lease.expires = now + self.s.lease_s
        error = self.evaluations
        error.out = {
            a: (job, who, session, now + self.s.lease_s)
            for a, (job, who, session, _) in error.out.items()
        }

    def _record(self, record: Any) -> None:
        self.journal.append(_encode(record))

    def settle(self) -> None:
        """End of a pass of the loop: write what was appended; begin a new segment when this one is
        full.
        """
        if self.journal.full:
            self.journal.rotate(snapshot(self))
        self.journal.write()

    # ---- the store's changes, recorded -----------------------------------------------------------

    def grant(self, producer: str, session: int, samples: int, now: float) -> list[Ticket]:
        tickets = super().grant(producer, session, samples, now)
        if tickets:
            self._record(Granted(producer, session, samples, now, self.attempts))
        return tickets

    def renew(
        self,
        producer: str,
        session: int,
        progress: list[tuple[int, int, int]],
        now: float,
        judging: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().renew(producer, session, progress, now, judging)
        if progress or judging:
            self._record(Renewed(producer, session, progress, now, list(judging)))

    def told(self, producer: str, session: int, drawn: int) -> None:
        if drawn > self.drawn.get((producer, session), 0):
            super().told(producer, session, drawn)
            self._record(Told(producer, session, drawn))

    def expire(self, now: float) -> int:
        n = super().expire(now)
        if n:
            self._record(Expired(now))
        return n

    def end_sessions(self, producer: str, session: int) -> None:
        super().end_sessions(producer, session)
        self._record(Ended(producer, session))

    def deliver(self, t: Trajectory, now: float) -> Disposition:
        what = super().deliver(t, now)
        self._record(Delivered(t))
        return what

    def hello(self, h: LearnerHello) -> bool:
        new = h.epoch != self.epoch
        followed = super().hello(h)
        if followed and new:
            self._record(Greeted(h))
        return followed

    def ask(self, epoch: int, number: int) -> tuple[list[Group], Lack | None]:
        before = self.changes
        answer = super().ask(epoch, number)
        if self.changes != before:
            self._record(Asked(epoch, number))
        return answer

    def commit(
        self, number: int, label: Label, digest: str, unused: Sequence[tuple[int, int]] = ()
    ) -> bool | None:
        done = super().commit(number, label, digest, unused)
        if done:
            self._record(Committed(number, label, digest, list(unused)))
        return done

    def checkpointed(self, oldest: int) -> None:
        before = self.base
        super().checkpointed(oldest)
        if self.base != before:
            self._record(Retired(oldest))

    def finish(self) -> None:
        """The run is over; a buffer that starts again says so."""
        super().finish()
        self._record(Finished())
