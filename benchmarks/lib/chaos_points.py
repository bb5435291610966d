"""What `benchmarks/chaos.py` hooks into the processes that it forks: named points where a process
kills or stops itself, records of its own, messages that are lost or doubled, mechanisms switched
off.  The product knows nothing of this."""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = {
    "generator": ("idle", "mid-answer", "mid-send"),
    "learner": ("idle", "mid-step", "mid-publication", "mid-checkpoint"),
    "buffer": ("idle", "mid-journal", "mid-answer"),
}
KILL, STOP = 1, 2
MECHANISMS = ("dedupe", "redelivery", "sync", "cursor", "ticket_order")


class Orders:
    """Who is to die, or to stop, at which point: shared by all processes of a run."""

    def __init__(self, roles: list[str]) -> None:
        self.roles = roles
        self.shared = mmap.mmap(-1, 4096)

    def _at(self, role: str) -> int:
        return 4 * self.roles.index(role)

    def give(self, role: str, point: str, action: int) -> None:
        at = self._at(role)
        self.shared[at + 1] = action
        self.shared[at + 2] = 0
        self.shared[at] = 1 + POINTS[role.split("-")[0]].index(point)

    def take_back(self, role: str) -> bool:
        """True: the point was never come to."""
        at = self._at(role)
        pending = bool(self.shared[at])
        self.shared[at] = 0
        return pending

    def stopped(self, role: str) -> bool:
        return bool(self.shared[self._at(role) + 2])

    def reached(self, role: str, point: str) -> bool:
        return self.shared[self._at(role)] == 1 + POINTS[role.split("-")[0]].index(point)

    def obey(self, role: str) -> None:
        at = self._at(role)
        self.shared[at] = 0
        if self.shared[at + 1] == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        self.shared[at + 2] = 1
        os.kill(os.getpid(), signal.SIGSTOP)


class Notes:
    """A record that a killed process leaves behind: one write a row."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, row: Any) -> None:
        os.write(self.fd, json.dumps(row).encode() + b"\n")


def before(owner: Any, name: str, call: Callable[..., Any]) -> None:
    plain = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """call(result, *args)"""
    plain = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        call(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def lossy(owner: Any, seed: int, share: float, which: tuple[str, ...]) -> None:
    """`owner.send` loses, doubles or delays a share of the messages of these kinds."""
    plain = owner.send
    choice = random.Random(seed)
    held: list[tuple[Any, ...]] = []

    def send(*args: Any) -> None:
        what = choice.random() if type(args[-1]).__name__ in which else 1.0
        if what < share:
            return
        if what < 2 * share:
            plain(*args)
        if what < 3 * share and what >= 2 * share:
            held.append(args)
            return
        plain(*args)
        while held:
            plain(*held.pop())

    owner.send = send


def generator(role: str, orders: Orders, notes: Path, off: str, loss: float) -> None:
    from actors import delivery
    from actors import generator as module
    from actors.engine_embedded import EmbeddedEngine
    from asyncrl.transport.sockets import PeerSocket

    def point(name: str) -> Callable[..., None]:
        def look(*_args: Any, **_kwargs: Any) -> None:
            if orders.reached(role, name):
                orders.obey(role)

        return look

    kept = Notes(notes / f"{role}.{os.getpid()}.jsonl")

    def made(box: Any, sample: Any) -> None:
        kept.add({"made": [sample.ticket, sample.sample, sample.attempt, sample.length]})

    def acked(box: Any, reply: Any) -> None:
        kept.add({"acks": reply.acks})

    before(delivery.Outbox, "add", made)
    before(delivery.Outbox, "on_acks", acked)
    before(EmbeddedEngine, "step", point("mid-answer"))
    before(delivery.Outbox, "_frame", point("mid-send"))
    before(module.Generator, "wait", lambda g, what: what and point("idle")())
    if off == "redelivery":
        plain = delivery.Outbox.frames

        def frames(box: Any, now: float, *, flush: bool) -> Any:
            box.retry_s = 1e9
            return plain(box, now, flush=flush)

        delivery.Outbox.frames = frames  # type: ignore[method-assign]
    plain_init = PeerSocket.__init__

    def init(socket: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(socket, *args, **kwargs)
        lossy(socket, os.getpid(), loss, ("Deliver", "Want", "Renew"))

    PeerSocket.__init__ = init  # type: ignore[method-assign]


def learner(role: str, orders: Orders, notes: Path, off: str, loss: float) -> None:
    from asyncrl.transport.ring import Ring
    from learner import checkpoint, loop
    from learner.publisher import Publisher
    from learner.state import Cursor
    from learner.step import LearnerCore

    kept = Notes(notes / "learner.jsonl")
    witness: list[list[int]] = []
    life = [0]

    def look(name: str) -> None:
        if orders.reached(role, name):
            orders.obey(role)

    def trained(_metrics: Any, core: Any, batch: Any) -> None:
        rows = [
            [s.ticket, s.sample, s.attempt, s.length, sorted({tuple(x.label) for x in s.spans})]
            for s in batch.samples
        ]
        witness.extend([batch.number, life[0], *row[:4]] for row in rows)
        kept.add({"trained": batch.number, "epoch": life[0], "samples": rows})
        look("mid-step")

    def filled(_none: Any, part: Path, *_rest: Any) -> None:
        (part / "witness.json").write_text(json.dumps(witness))
        files = json.loads((part / "manifest").read_text())
        import xxhash

        data = (part / "witness.json").read_bytes()
        files["witness.json"] = [len(data), xxhash.xxh3_64_hexdigest(data)]
        (part / "manifest").write_text(json.dumps(files))
        look("mid-checkpoint")

    def restored(_extra: Any, _core: Any, path: Path) -> None:
        witness[:] = json.loads((path / "witness.json").read_text())

    def begun(found: Any, *_args: Any) -> None:
        life[0] = found[0]

    def published(digest: str, publisher: Any, number: int) -> None:
        kept.add({"published": [publisher.epoch, number], "digest": digest})

    def greeted(one: Any) -> None:
        kept.add({"life": one.epoch, "origin": one.origin, "number": one.number})

    after(LearnerCore, "train", trained)
    after(checkpoint, "_fill", filled)
    after(checkpoint, "restore", restored)
    after(checkpoint, "begin", begun)
    after(Publisher, "publish", published)
    before(loop.Learner, "hello", greeted)
    before(loop.Learner, "wait", lambda one, what: what and look("idle"))
    plain_write = Ring.write

    def write(ring: Any, label: Any, fill: Any, *args: Any, **kwargs: Any) -> str:
        def half(buffer: memoryview) -> None:
            fill(buffer)
            look("mid-publication")

        return plain_write(ring, label, half, *args, **kwargs)

    Ring.write = write  # type: ignore[method-assign]
    if off == "cursor":
        Cursor.read = classmethod(  # type: ignore[method-assign,assignment]
            lambda cls, extra: Cursor(parent=extra["parent"])
        )


def buffer(role: str, orders: Orders, notes: Path, off: str, loss: float) -> None:
    from asyncrl.transport.sockets import BufferSocket
    from buffer import journal
    from buffer.service import Service
    from buffer.store import Store

    def look(name: str) -> None:
        if orders.reached(role, name):
            orders.obey(role)

    plain = journal._write

    def write(fd: int, data: bytes) -> None:
        if orders.reached(role, "mid-journal"):
            plain(fd, data[: len(data) // 2])
            orders.obey(role)
            data = data[len(data) // 2 :]
        plain(fd, data)

    journal._write = write
    before(Service, "flush", lambda service: service.outgoing and look("mid-answer"))
    if off != "sync":
        before(BufferSocket, "recv", lambda socket, timeout: timeout and look("idle"))
    if off == "dedupe":
        Store.disposition = lambda store, group, trajectory: None  # type: ignore[method-assign]
    elif off == "ticket_order":
        any_order()
    elif off == "sync":
        unsynced(role, orders)
    plain_init = BufferSocket.__init__

    def init(socket: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(socket, *args, **kwargs)
        lossy(socket, os.getpid(), loss, ("Acks", "Batch", "Committed", "Welcome", "Heard"))

    BufferSocket.__init__ = init  # type: ignore[method-assign]


def any_order() -> None:
    """Batches take what is complete, and nobody looks at what is too old for them."""
    from buffer import batches
    from buffer.store import Store

    plain = batches.judge

    def judge(store: Any, groups: Any, number: int) -> Any:
        limit, store.max_lag = store.max_lag, math.inf
        try:
            return plain(store, groups, number)
        finally:
            store.max_lag = limit

    batches.judge = judge
    Store.in_order = property(lambda store: False)  # type: ignore[method-assign,assignment]


def unsynced(role: str, orders: Orders) -> None:
    """Answers are acknowledged a pass before they are written, and "idle" comes in between."""
    from buffer.durable_store import RecordedStore
    from buffer.service import Service

    plain = RecordedStore.settle
    held = [False]

    def taken(_what: Any, store: Any, _samples: Any) -> None:
        held[0] = True

    def settle(store: Any) -> None:
        # a frame, and the count that came with it: nothing else rests on this pass
        held[0] = held[0] and len(store.journal.waiting) <= 2
        if not held[0]:
            plain(store)
        store.journal.durable = store.journal.appended  # so it says

    def said(_none: Any, _service: Any) -> None:
        if held[0] and orders.reached(role, "idle"):
            time.sleep(0.05)  # the words are on their way
            orders.obey(role)
        held[0] = False

    after(RecordedStore, "take_all", taken)
    RecordedStore.settle = settle  # type: ignore[method-assign]
    after(Service, "flush", said)


HOOKS = {"generator": generator, "learner": learner, "buffer": buffer}
