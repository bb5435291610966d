"""benchmarks/chaos.py's checker falls for each mechanism that is off, for none while all are on."""

from __future__ import annotations

import copy
import random
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hostile_messages_kit import honest_hello
from journal_kit import open_recorded
from lib.chaos import checker, points
from schedules import PROMPTS, TOKENS

from actors.delivery import Outbox
from asyncrl.config.tree import WiresConfig
from asyncrl.contract import messages as m
from asyncrl.contract.versions import Label
from asyncrl.records import buffer_leadership
from buffer import batches, checks
from buffer.groups import StoreSettings
from buffer.journal import Record, RecordedStore
from buffer.service import BufferService
from buffer.state import StoreRules
from buffer.store import Store
from learner.state import BatchCursor

STEPS, GROUPS, SIZE, LIMIT = 16, 2, 2, 1
PASS_S = 0.05
MOST = 1000
PATCHED = [
    (StoreRules, "find_disposition"),
    (StoreRules, "uses_ticket_order"),
    (batches, "judge"),
    (checks, "check_commit"),
    (BufferService, "is_fenced"),
    (BatchCursor, "read"),
    (Outbox, "take_frames"),
    (RecordedStore, "flush_journal"),
]


@dataclass
class Learner:
    """A life: its number, what its weights were trained on, what its checkpoints hold."""

    epoch: int
    number: int
    history: tuple[str, ...] = ()
    witness: list[tuple[int, ...]] = field(default_factory=list)
    cursor: BatchCursor = field(default_factory=BatchCursor)
    checkpoints: list[Learner] = field(default_factory=list)


class Play:
    def __init__(self, seed: int, directory: Path, *, memory: bool = False) -> None:
        self.choice = random.Random(seed)
        self.directory = directory
        self.memory = memory
        self.settings = StoreSettings(GROUPS, SIZE, STEPS, m.SamplingSettings(), lease_s=2.0)
        self.history = checker.History()
        self.now = 0.0
        self.over = False
        self.service: Any = object.__new__(BufferService)
        self.service.outgoing = deque()
        self.service.learner = None
        self.service.socket = SimpleNamespace(send=self.heard)
        self.service.term = buffer_leadership.take_leadership(directory, "here")
        self.service.store = self.open()
        self.session = 0
        self.learners: list[Learner] = []
        self.begin_generator()
        self.begin_learner()

    def open(self) -> Store:
        if self.memory:
            return Store(self.settings, PROMPTS.__getitem__)
        return open_recorded(self.directory / "journal", self.settings, now=self.now)

    @property
    def store(self) -> Store:
        found: Store = self.service.store
        return found

    # ---- the generator ---------------------------------------------------------------------------

    def begin_generator(self) -> None:
        self.session += 1
        self.box = Outbox(WiresConfig(retry_s=0.3), "g", self.session)
        # when it is written, what it is
        self.held: list[tuple[float, m.Trajectory]] = []
        self.mine: set[tuple[int, ...]] = set()
        self.store.end_sessions("g", self.session)

    def generate(self) -> None:
        store, choice = self.store, self.choice
        for ticket in store.grant("g", self.session, max(0, 8 - len(self.held)), self.now):
            label = store.policy
            assert label is not None
            for sample in ticket.samples:
                tokens = choice.randint(1, 9)
                spans = [m.VersionSpan(label, "", 0, tokens, label)]
                at = self.now + (1.5 if choice.random() < 0.1 else choice.uniform(0.0, 0.2))
                fixed = (b"", TOKENS[tokens], b"", b"", spans, float(sample), {}, "stop", 1.0)
                self.held.append((at, m.Trajectory(ticket.ticket, sample, ticket.attempt, *fixed)))
        for entry in [x for x in self.held if x[0] <= self.now]:
            self.held.remove(entry)
            made = entry[1]
            key = (made.ticket, made.sample, made.attempt)
            self.mine.add(key)
            self.history.made[key] = made.length
            self.box.add(made)
        for frame in self.box.take_frames(self.now, flush=True):
            for _ in range(choice.choice((0, 1, 1, 1, 1, 2))):
                self.deliver(frame)

    def deliver(self, frame: m.Delivery) -> None:
        what = self.store.accept_samples(frame.samples, msgspec.msgpack.encode(frame))
        said = zip(frame.samples, what, strict=True)
        acks = [(x.ticket, x.sample, x.attempt, disposition) for x, disposition in said]
        BufferService.send(self.service, b"g", m.DeliveryAcks(frame.session, acks, 1 << 20, None))

    def heard(self, _peer: bytes, reply: Any) -> None:
        """A message of the buffer; an acknowledgement may be lost."""
        if not isinstance(reply, m.DeliveryAcks) or self.choice.random() < 0.1:
            return
        for ticket, sample, attempt, said in reply.acks:
            self.history.acks.setdefault((ticket, sample, attempt), set()).add(said)
        if reply.session == self.session:
            self.box.on_acks(reply, time.monotonic())

    # ---- learners --------------------------------------------------------------------------------

    def begin_learner(self) -> None:
        before = self.learners[-1] if self.learners else None
        epoch = before.epoch + 1 if before else 1
        kept = before.checkpoints[-1] if before else Learner(1, 0)
        life = Learner(epoch, kept.number, kept.history, list(kept.witness))
        life.cursor = (
            BatchCursor.read(msgspec.to_builtins(kept.cursor)) if before else BatchCursor()
        )
        life.checkpoints = [*before.checkpoints] if before else [copy.deepcopy(life)]
        origin = before.epoch if before else 0
        self.learners.append(life)
        self.history.lives[epoch] = (origin, life.number)
        self.published(life)
        parent = Label(origin, life.number - 1) if life.number else None
        cursor = life.cursor
        fields = {"epoch": epoch, "label": Label(epoch, life.number), "parent": parent}
        fields |= {"digest": "/".join(life.history), "max_lag": float(LIMIT), "origin": origin}
        fields |= {"next_ticket": cursor.next_ticket, "source": m.WeightsSource(epoch, "", "", "")}
        fields |= {"ledger": cursor.ledger, "trained_above": cursor.trained_above}
        hello = honest_hello("", **fields)
        # without a fence the first of two learners may have retired what the second needs
        self.over = not self.store.follow_learner(hello)

    def published(self, life: Learner) -> None:
        self.history.digests[life.epoch, life.number] = "/".join(life.history)

    def learn(self, life: Learner) -> bool:
        """A step of one life, if its batch is there; False: it was fenced."""
        if BufferService.is_fenced(self.service, b"l", life.epoch):
            return False
        if life.number >= STEPS:
            return True
        groups, _ = self.store.ask(life.epoch, life.number)
        if not groups:
            return True
        batch = self.store.make_batch(life.number)
        rows = [
            [x.ticket, x.sample, x.attempt, x.length, [list(span.label) for span in x.spans]]
            for x in batch.samples
        ]
        self.history.trained[life.number, life.epoch] = rows
        life.witness += [(life.number, life.epoch, *row[:4]) for row in rows]
        life.history += (f"{life.number}:{[row[:3] for row in rows]}",)
        parent = [life.epoch, life.number]
        life.number += 1
        life.cursor = BatchCursor(batch.next_ticket, batch.ledger, batch.trained_above, parent)
        self.published(life)
        if BufferService.is_fenced(self.service, b"l", life.epoch):
            return False
        label = Label(life.epoch, life.number)
        self.store.commit(batch.number, label, "/".join(life.history))
        if life.number % 2 == 0:
            kept = copy.deepcopy(life)
            kept.checkpoints = []
            life.checkpoints = [*life.checkpoints, kept][-2:]
            self.store.retire_batches(life.checkpoints[0].number)
        return True

    # ---- faults ----------------------------------------------------------------------------------

    def kill_generator(self) -> None:
        self.begin_generator()

    def kill_learner(self) -> None:
        self.begin_learner()
        self.alive = self.learners[-1:]

    def kill_buffer(self) -> None:
        self.service.outgoing.clear()
        if not self.memory:
            self.service.store = self.open()
            return
        self.service.store = self.open()
        self.kill_learner()
        self.begin_generator()

    def second_learner(self) -> None:
        self.begin_learner()
        self.alive = [*self.alive, self.learners[-1]]

    def run(self) -> dict[str, int]:
        """To the end, or until it is clear that there is none; what the checker found wrong."""
        faults: list[Callable[[], None]] = [self.kill_buffer]
        if not self.memory:
            faults += [self.kill_generator, self.kill_learner, self.second_learner]
        self.alive = [*self.learners]
        for _ in range(MOST):
            self.now += PASS_S
            self.generate()
            self.alive = [life for life in self.alive if self.learn(life)]
            BufferService.flush(self.service)
            self.store.expire(self.now)
            if self.choice.random() < 0.04 and self.store.committed < STEPS - 4:
                self.choice.choice(faults)()
            if self.over or (self.store.committed == STEPS and not self.box.list_unacked_keys()):
                break
        self.history.witness = self.learners[-1].witness
        self.history.made_by_survivors = self.mine
        lines = self.store.make_ledger().lines
        self.history.ledger = {name: line.tokens for name, line in lines.items()}
        found = checker.check(self.history, STEPS, GROUPS, SIZE, LIMIT, memory=self.memory)
        return {name: found[name] for name in WRONG if found[name]}


WRONG = ("lost", "duplicated", "over_limit", "miscounted", "foreign")


def play(seeds: range, tmp_path: Path, *, memory: bool = False) -> dict[str, int]:
    found: dict[str, int] = {}
    for seed in seeds:
        if found:
            break  # enough
        directory = tmp_path / str(seed)
        for name, count in Play(seed, directory, memory=memory).run().items():
            found[name] = found.get(name, 0) + count
        shutil.rmtree(directory, ignore_errors=True)
    return found


@pytest.mark.parametrize("memory", [False, True])
def test_with_everything_on_nothing_is_wrong(memory: bool, tmp_path: Path) -> None:
    assert play(range(10), tmp_path, memory=memory) == {}


def unsettled(store: RecordedStore) -> None:
    """What was appended is called durable; a pass of answers alone is written after the next."""
    log = store.journal
    late: list[Record] = vars(store).setdefault("late", [])
    if log.waiting and all(b"came" in kept[0] for kept in log.waiting):
        late += log.waiting
        log.waiting = []
    else:
        log.waiting = late + log.waiting
        late.clear()
        log.write()
    log.durable = log.appended


FALLS = {
    "dedupe": "duplicated",
    "redelivery": "lost",
    "sync": "lost",
    "cursor": "duplicated",
    "ticket_order": "over_limit",
    "epoch_fence": "lost",
}


@pytest.mark.parametrize("mechanism", points.MECHANISMS)
def test_the_checker_falls_when_a_mechanism_is_off(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in PATCHED:  # as they are now they will be again
        monkeypatch.setattr(owner, name, vars(owner)[name])
    points.switch_off(mechanism)
    if mechanism == "sync":
        RecordedStore.flush_journal = unsettled  # type: ignore[method-assign]
    assert set(points.MECHANISMS) == set(FALLS)
    assert FALLS[mechanism] in play(range(12), tmp_path, memory=mechanism == "cursor")
