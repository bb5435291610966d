"""Our own model of the protocol: every schedule within small bounds, each rule needed, and the real
store in step with it."""

import random
from collections import Counter
from typing import Any

import protocol_model as pm
import pytest

from asyncrl.contract.admission import AdaptiveLimit
from asyncrl.contract.messages import (
    LearnerHello,
    Prompt,
    SamplingSettings,
    Trajectory,
    VersionSpan,
    WeightsSource,
)
from asyncrl.contract.versions import Label
from buffer import batches
from buffer.groups import Group, StoredSample, StoreSettings
from buffer.store import Store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("more", pm.RUNS, ids=str)
def test_every_schedule_within_the_bounds_keeps_the_invariants(more: dict[str, Any]) -> None:
    states, found = pm.search(pm.Bounds(**more))
    assert found is None, found
    assert states > 500  # the faults of these bounds do happen


@pytest.mark.parametrize("rule", pm.OFF)
def test_each_rule_is_needed(rule: str) -> None:
    """With one rule off the search finds a schedule that breaks the invariant; with it on, none."""
    invariant, more = pm.OFF[rule]
    _, found = pm.search(pm.Bounds(off=frozenset([rule]), **more))
    assert found is not None and found.what.startswith(invariant), found


class Differs(AssertionError):
    """Model and store do not do the same."""


def same(ours: Any, theirs: Any, what: str) -> None:
    if ours != theirs:
        raise Differs(f"{what}: model {ours}, store {theirs}")


class SideBySide:
    """One random schedule of the model; every buffer event also goes to the real store, and
    everything visible is compared."""

    def __init__(self, c: pm.Bounds, seed: int) -> None:
        self.c, self.r, self.w = c, random.Random(seed), pm.initial(c)
        settings = StoreSettings(
            c.batch,
            c.group,
            c.steps,
            SamplingSettings(),
            filter_no_spread=bool(c.filtered),
            lease_s=1e9,
            ess_floor=0.5 if c.moves else 0.0,
        )
        self.store = Store(settings, lambda i: Prompt(i, ""))
        self.parent: dict[int, Label | None] = {0: None}
        self.hello(1, 0, c.k[0], 0)

    def hello(self, epoch: int, policy: int, k: int, origin: int) -> None:
        source = WeightsSource(epoch, "", "", "")
        label = Label(epoch, pm.DEPTH[policy])
        assert self.store.follow_learner(
            LearnerHello(
                1, "", epoch, label, self.parent[policy], str(policy), 0, origin, k, source, []
            )
        )

    def run(self) -> int:
        """To the end; returns how many actions."""
        most = 4000 if self.c.mail else 400
        for n in range(most):
            if pm.over(self.c, self.w):
                return n
            options = list(pm.steps(self.c, self.w))
            calm = [a for a, fault in options if not fault]
            faults = [a for a, fault in options if fault]
            action = self.r.choice(faults if faults and self.r.random() < 0.1 else calm)
            before, self.w = self.w, pm.apply(self.c, self.w, action)
            getattr(self, f"do_{action[0].__name__}", lambda *_: None)(before, *action[1:])
            self.compare(pm.name(action))
        raise AssertionError(f"no end after {most} actions")

    def do_grant(self, before: pm.World, i: int) -> None:
        new = [letter[2] for letter in self.w.mail - before.mail] or [self.w.gens[i].held[-1]]
        t, a, todo, least, _ = new[0]
        got = self.store.grant(f"g{i}", before.gens[i].session, 1, 0.0)
        same(
            [(t, a, sorted(todo), least, self.w.buffer.now if self.c.moves else self.w.buffer.k)],
            [(x.ticket, x.attempt, x.samples, tuple(x.min_version), x.limit) for x in got],
            "ticket",
        )

    def do_deliver(self, before: pm.World, m: tuple[Any, ...], keep: bool) -> None:
        _, _, (t, s, a), tokens = m
        spans = [
            VersionSpan(Label(*label), str(policy), n, n + 1, Label(*label))
            for n, (label, policy, _) in enumerate(tokens)
        ]
        reward = 1.0 if t in self.c.filtered else float(s)
        ids = b"\0" * 4 * len(spans)
        adopted = [(earlier, 1) for *_, earlier in tokens if earlier != a]
        sample = Trajectory(
            t, s, a, b"", ids, b"", b"", spans, reward, {}, "stop", 1.0, adopted=adopted
        )
        said = self.store.deliver(sample, 0.0)
        line = dict(self.w.buffer.lines)[t, s, a]
        also = {"accepted": ("accepted", "trained"), "filtered": ("accepted", "filtered")}.get(
            line, (line,)
        )
        same(True, said in also, f"disposition {said} of {line}")

    def do_ask(self, before: pm.World, x: pm.Learner, way: int) -> None:
        number = pm.DEPTH[x.policy] + len(x.queue)
        groups, _ = self.store.ask(x.epoch, number)
        queue = next(y for y in self.w.learners if y.epoch == x.epoch).queue
        ours = list(queue[-1][1]) if len(queue) > len(x.queue) else []
        batch = self.store.make_batch(number) if groups else None
        same(
            [k for k, _ in ours],
            [(s.ticket, s.sample, s.attempt) for s in batch.samples] if batch else [],
            f"batch {number}",
        )
        lags = [max(pm.distance(x[1], before.buffer.policy, number) for x in t) for _, t in ours]
        same(lags, batch.lags if batch else [], f"lags of batch {number}")

    def do_train(self, before: pm.World, x: pm.Learner) -> None:
        policy = next(y for y in self.w.learners if y.epoch == x.epoch).policy
        self.parent[policy] = Label(x.epoch, pm.DEPTH[policy] - 1)

    def do_commit(self, before: pm.World, x: pm.Learner, to: int = -1) -> None:
        if x.epoch == before.buffer.epoch:  # else the service fences it
            policy = pm.ancestor(x.policy, x.told + 1)
            assert self.store.commit(x.told, Label(x.epoch, x.told + 1), str(policy))
            if to > 0:  # by whatever rule
                self.store.limit = AdaptiveLimit(to)

    def do_checkpoint(self, before: pm.World, x: pm.Learner) -> None:
        self.store.retire_batches(pm.DEPTH[self.w.kept[1][0]])

    def do_start(self, before: pm.World, policy: int, k: int, others: Any, fault: bool) -> None:
        self.hello(self.w.epochs, policy, k, before.kept[0])

    def do_answer(self, before: pm.World, letter: tuple[Any, ...]) -> None:
        _, i, taken, named = letter
        self.store.free_leases(
            self.store.leases.find_unnamed_attempts(f"g{i}", before.gens[i].session, taken, named)
        )

    def do_kill_generator(self, before: pm.World, i: int) -> None:
        self.store.end_sessions(f"g{i}", self.w.gens[i].session)

    def do_expire(self, before: pm.World, ticket: int, fault: bool) -> None:
        lease = self.store.alive[ticket].lease
        assert lease is not None
        lease.expires = -1.0
        assert self.store.expire(0.0) == 1

    def compare(self, after: str) -> None:
        b, s = self.w.buffer, self.store
        same(
            (b.epoch, b.committed, b.base, b.cursor, b.attempts),
            (s.epoch, s.committed, s.base, s.cursor, s.attempts),
            f"cursors after {after}",
        )
        if pm.grantable(self.c, b) is None:
            same([], s.grant("probe", 0, 1, 0.0), f"no ticket after {after}")
        for x in self.w.learners:
            number = pm.DEPTH[x.policy] + len(x.queue)
            if (
                x.epoch == b.epoch
                and number < self.c.steps
                and all(way == (b, ()) for way in pm.on_ask(self.c, b, number))
            ):
                same([], s.ask(x.epoch, number)[0], f"no batch {number} after {after}")
        same([list(comp) for comp in b.comps], s.comps, f"compositions after {after}")
        ours = [
            (g.ticket, g.lease[:1], tuple(x[0] if x else 0 for x in g.samples)) for g in pm.alive(b)
        ]
        theirs = [
            (
                g.ticket,
                (g.lease.attempt,) if g.lease else (),
                tuple(x.trajectory.attempt if x else 0 for x in g.samples),
            )
            for g in s.alive.values()
        ]
        same(ours, theirs, f"groups alive after {after}")
        lines, ledger = Counter(what for _, what in b.lines), s.sum_ledger()
        counted = {"accepted": ledger["trained"]["samples"] + ledger["left_over"]["samples"]} | {
            n: ledger[n]["samples"] for n in ("duplicate", "orphaned", "filtered")
        }
        same({n: lines[n] for n in counted}, counted, f"ledger after {after}")


def walk(k: tuple[int, ...], sizes: str, **more: Any) -> dict[str, Any]:
    """Bounds of a walk. sizes: batch, group, gens, slots and steps."""
    names = ("batch", "group", "gens", "slots", "steps")
    return {"k": k} | dict(zip(names, map(int, sizes.split()), strict=True)) | more


WALKS = [
    walk((1, 0, 2), "2 2 2 2 4", faults=4, prefetch=1, keep=2),
    walk((2, 1), "1 2 2 3 5", faults=5, keep=2, filtered=(0, 3)),
    walk((3, 1), "1 2 2 3 6", moves=(1, 2, 3), faults=3, prefetch=1),
    walk(
        (1, 0, 2),
        "1 2 2 2 4",
        faults=4,
        kinds="lose double gen learner slow older",
        keep=2,
        sessions=True,
    ),
    walk(
        (3,), "1 1 2 2 5", moves=(1, 3), faults=4, kinds="learner slow older", keep=2, sessions=True
    ),
    walk((0, 1), "2 1 3 1 5", faults=3, prefetch=1, same=True),
    walk(
        (1, 0, 2),
        "1 2 2 2 4",
        faults=5,
        kinds="lose gen learner slow older unheard",
        keep=2,
        mail=2,
    ),
]


@pytest.mark.parametrize("more", WALKS, ids=str)
def test_the_real_store_does_what_the_model_does(more: dict[str, Any]) -> None:
    for seed in range(16 if more.get("mail") else 60):  # messages more, and so longer
        try:
            SideBySide(pm.Bounds(**more), seed).run()
        except (AssertionError, pm.Broken) as e:
            raise AssertionError(f"seed {seed}: {e}") from e


def test_a_store_that_excuses_an_earlier_life_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the limit sets itself, by the limit of the grant that adopted a session."""

    def largest(store: Store, group: Group, stored: StoredSample) -> list[float]:
        limit = max(grant.limit for grant in group.grants.values())
        return [min(store.max_lag, limit)] * len(stored.trajectory.list_spans())

    monkeypatch.setattr(batches, "compute_announced_limits", largest)
    (walk,) = [more for more in WALKS if "moves" in more and "sessions" in more]
    for seed in range(300):
        try:
            SideBySide(pm.Bounds(**walk), seed).run()
        except Differs:
            return
    raise AssertionError("adopted tokens go by the largest limit, and nothing differs")
