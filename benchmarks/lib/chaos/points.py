"""Hooks of `benchmarks/chaos.py` in the processes that it forks.

They add named points where a process carries out its orders, records, lost, doubled and delayed
messages, and switched-off mechanisms.  The product does not depend on them."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.chaos.board import DOUBLED, HELD, LOST, WORK, Board, Notes

MECHANISMS = ("dedupe", "redelivery", "sync", "cursor", "ticket_order", "epoch_fence")


class Hook:
    """The hooks of a run.

    off: the mechanism that is switched off.  loss: share of the messages that are lost, and the
    same share doubled and delayed.  real: the learner trains a real model."""

    def __init__(self, board: Board, notes: Path, off: str, loss: float, *, real: bool) -> None:
        self.board = board
        self.notes = notes
        self.off = off
        self.loss = loss
        self.real = real

    def __call__(self, role: str) -> None:
        HOOKS[role.partition("-")[0]](self, role)

    def look(self, role: str, point: str, **more: Any) -> None:
        if self.board.reached(role, point):
            self.board.obey(role, **more)

    def worked(self, role: str) -> None:
        self.board.count(role, WORK)


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


def lossy(socket: Any, hook: Hook, role: str, which: tuple[str, ...]) -> None:
    """`socket.send` loses, doubles or holds back (behind the next one) a share of the messages of
    these kinds.
    """
    plain = socket.send
    choice = random.Random(os.getpid())
    held: list[tuple[Any, ...]] = []

    def send(*args: Any) -> None:
        what = choice.random() if type(args[-1]).__name__ in which else 1.0
        if what < hook.loss:
            hook.board.count(role, LOST)
            return
        if what < 2 * hook.loss:
            hook.board.count(role, DOUBLED)
            plain(*args)
        elif what < 3 * hook.loss:
            hook.board.count(role, HELD)
            held.append(args)
            return
        plain(*args)
        while held:
            plain(*held.pop())

    socket.send = send


def messages(owner: Any, hook: Hook, role: str, which: tuple[str, ...]) -> None:
    plain_init = owner.__init__

    def init(socket: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(socket, *args, **kwargs)
        lossy(socket, hook, role, which)

    owner.__init__ = init


def recorded(hook: Hook, role: str) -> None:
    """The samples that a process delivers, and what it hears of them."""
    from actors import delivery
    from asyncrl.transport.sockets import PeerSocket

    kept = Notes(hook.notes / f"{role}.{os.getpid()}.jsonl")

    def made(box: Any, sample: Any, *_: Any) -> None:
        kept.add({"made": [sample.ticket, sample.sample, sample.attempt, sample.length]})
        hook.worked(role)

    before(delivery.Outbox, "add", made)
    before(delivery.Outbox, "on_acks", lambda box, reply, *_: kept.add({"acks": reply.acks}))
    before(delivery.Outbox, "_make_frame", lambda *_args, **_kwargs: hook.look(role, "mid-send"))
    messages(PeerSocket, hook, role, ("Delivery", "TicketRequest", "LeaseRenewal"))


def generator(hook: Hook, role: str) -> None:
    from actors import generator as module
    from actors.engine_embedded import EmbeddedEngine
    from actors.generator import CallTurn

    recorded(hook, role)
    before(CallTurn, "finish", lambda *_: hook.worked(role))
    before(EmbeddedEngine, "step", lambda *_args, **_kwargs: hook.look(role, "mid-answer"))
    before(module.Generator, "set_wait", lambda g, what: what and hook.look(role, "idle"))
    if hook.off == "redelivery":
        switch_off(hook.off)


def gateway(hook: Hook, role: str) -> None:
    from actors.gateway.service import Gateway

    recorded(hook, role)
    before(Gateway, "on_result", lambda *_: hook.look(role, "mid-answer"))
    before(Gateway, "set_wait", lambda _, what: what and hook.look(role, "idle"))


def reward(hook: Hook, role: str) -> None:
    from actors import reward_worker

    before(reward_worker, "read_frame", lambda stream: hook.look(role, "idle"))
    before(reward_worker, "judge", lambda *_: hook.look(role, "mid-answer"))

    def judged(_reply: Any, *_args: Any) -> None:
        hook.worked(role)
        hook.look(role, "mid-send")

    after(reward_worker, "judge", judged)


def supervisor(hook: Hook, role: str) -> None:
    from asyncrl.supervise.run import Supervisor

    def looked(*_args: Any) -> None:
        hook.worked(role)
        hook.look(role, "idle")

    before(Supervisor, "check_progress", looked)
    after(Supervisor, "spawn", lambda *_: hook.look(role, "mid-start"))


def unreal(core: Any, batch: Any) -> dict[str, float]:
    """An update that costs nothing and is another one for other samples."""
    import torch

    ids = [(s.ticket, s.sample, s.attempt) for s in batch.samples]
    with torch.no_grad():
        weights = next(core.model.hf.parameters())
        weights[0, batch.number % weights.shape[1]] += 1e-4 * (1 + hash(tuple(ids)) % 97)
    core.unused = []
    core.state.number = batch.number + 1
    return {"optim/lr": 1e-4, "optim/steps": 1, "optim/grad_norm": 1.0}


def learner(hook: Hook, role: str) -> None:
    from asyncrl.transport.ring import WeightRing
    from asyncrl.transport.sockets import PeerSocket
    from learner import checkpoint, loop
    from learner.backend import TorchBackend
    from learner.publisher import Publisher
    from learner.step import LearnerCore

    kept = Notes(hook.notes / "learner.jsonl")
    witness: list[list[int]] = []
    life: list[Any] = [0, Path()]

    def look(name: str, **more: Any) -> None:
        hook.look(role, name, where=newest(hook.notes.parent), **more)

    def trained(_metrics: Any, core: Any, batch: Any) -> None:
        rows = [
            [s.ticket, s.sample, s.attempt, s.length, sorted({tuple(x.label) for x in s.spans})]
            for s in batch.samples
        ]
        witness.extend([batch.number, life[0], *row[:4]] for row in rows)
        kept.add({"trained": batch.number, "epoch": life[0], "samples": rows})
        hook.worked(role)
        look("mid-step")

    def filling(*_rest: Any) -> None:
        if hook.board.action(role) == "disk":
            look("mid-checkpoint", room=random.Random(os.getpid()).choice((0, 2000, 20_000)))

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

    def published(digest: str, publisher: Any, number: int, *_: Any) -> None:
        kept.add({"published": [publisher.epoch, number], "digest": digest})

    def greeted(one: Any) -> None:
        kept.add({"life": one.epoch, "origin": one.origin, "number": one.number})

    if hook.real:  # between the gradient and the optimizer's step
        before(TorchBackend, "apply", lambda *_: look("mid-step"))
    else:
        LearnerCore.train = unreal  # type: ignore[method-assign,assignment]
    after(LearnerCore, "train", trained)
    before(checkpoint, "write", filling)
    after(checkpoint, "seal", filled)
    after(checkpoint, "restore", restored)
    after(checkpoint, "start_epoch", begun)
    after(Publisher, "_write", published)
    before(loop.Learner, "send_hello", greeted)
    before(loop.Learner, "set_wait", lambda one, what: what and look("idle"))
    messages(PeerSocket, hook, role, ("BatchRequest", "Commit", "LearnerGoodbye"))
    plain_write = WeightRing.write

    def write(ring: Any, label: Any, fill: Any, *args: Any, **kwargs: Any) -> str:
        def half(buffer: memoryview) -> None:
            fill(buffer)
            look("mid-publication")

        return plain_write(ring, label, half, *args, **kwargs)

    WeightRing.write = write  # type: ignore[method-assign,assignment]
    if hook.off == "cursor":
        switch_off(hook.off)


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint of the newest learner, if there is one before it to fall back to."""
    epochs = [x for x in (run_dir / "checkpoints").glob("epoch_*") if x.name[6:].isdigit()]
    if not epochs:
        return None
    found = sorted(
        max(epochs, key=lambda x: int(x.name[6:])).glob("number_*"), key=lambda x: int(x.name[7:])
    )
    return found[-1] if len(found) > 1 else None


def buffer(hook: Hook, role: str) -> None:
    from asyncrl.transport.sockets import BufferSocket
    from buffer import journal
    from buffer.service import BufferService

    board, off = hook.board, hook.off
    plain = journal.write_pieces

    def write(fd: int, pieces: Any) -> int:
        data = b"".join(pieces)
        if board.reached(role, "mid-journal"):
            half = len(data) // 2
            if board.action(role) == "disk":  # the kernel takes half of it
                board.obey(role, room=os.fstat(fd).st_size + half)
            else:
                plain(fd, [data[:half]])
                board.obey(role)
                return half + plain(fd, [data[half:]])
        return plain(fd, [data])

    def flushing(service: Any) -> None:
        hook.worked(role)
        if service.outgoing:
            hook.look(role, "mid-answer")

    journal.write_pieces = write
    before(BufferService, "flush", flushing)
    if off != "sync":
        before(BufferSocket, "recv", lambda _, timeout: timeout and hook.look(role, "idle"))
    if off in ("dedupe", "ticket_order", "epoch_fence"):
        switch_off(off)
    elif off == "sync":
        unsynced(hook, role)
    messages(
        BufferSocket,
        hook,
        role,
        ("DeliveryAcks", "Batch", "CommitReply", "Welcome", "HeartbeatReply"),
    )


def switch_off(mechanism: str) -> None:
    """In this process, for good."""
    from actors.delivery import Outbox
    from buffer import checks
    from buffer.service import BufferService
    from buffer.state import StoreRules
    from learner.state import BatchCursor

    if mechanism == "dedupe":
        setattr(StoreRules, "find_disposition", lambda store, group, trajectory: None)  # noqa: B010
    elif mechanism == "ticket_order":
        any_order()
    elif mechanism == "epoch_fence":
        fenced = lambda service, *_: service.store.policy is None  # noqa: E731
        setattr(BufferService, "is_fenced", fenced)  # noqa: B010
        checks.check_commit = lambda *_: None  # it looks at the epoch again
    elif mechanism == "cursor":
        BatchCursor.read = staticmethod(  # type: ignore[method-assign,assignment]
            lambda extra: BatchCursor(parent=extra["parent"])
        )
    elif mechanism == "redelivery":
        plain = Outbox.take_frames

        def frames(box: Any, now: float, *, flush: bool) -> Any:
            box.retry_s = 1e9
            return plain(box, now, flush=flush)

        Outbox.take_frames = frames  # type: ignore[method-assign,assignment]


def any_order() -> None:
    """Let batches take any complete groups, without the check of their age."""
    from buffer import batches
    from buffer.state import StoreRules

    plain = batches.judge

    def judge(store: Any, groups: Any, number: int) -> Any:
        limit, store.max_lag = store.max_lag, math.inf
        try:
            return plain(store, groups, number)
        finally:
            store.max_lag = limit

    batches.judge = judge
    setattr(StoreRules, "uses_ticket_order", property(lambda store: False))  # noqa: B010


def unsynced(hook: Hook, role: str) -> None:
    """Answers are acknowledged a pass before they are written, and "idle" comes in between."""
    from buffer.journal import RecordedStore
    from buffer.service import BufferService

    plain = RecordedStore.flush_journal
    held = [False]

    def taken(_what: Any, store: Any, *_samples: Any) -> None:
        held[0] = True

    def settle(store: Any) -> None:
        # a frame, and the count that came with it: nothing else rests on this pass
        held[0] = held[0] and len(store.journal.waiting) <= 2
        if not held[0]:
            plain(store)
        store.journal.durable = store.journal.appended  # so it says

    def said(_none: Any, _service: Any) -> None:
        if held[0] and hook.board.reached(role, "idle"):
            time.sleep(0.05)  # the words are on their way
            hook.board.obey(role)
        held[0] = False

    after(RecordedStore, "accept_samples", taken)
    RecordedStore.flush_journal = settle  # type: ignore[method-assign,assignment]
    after(BufferService, "flush", said)


HOOKS = {
    "supervisor": supervisor,
    "buffer": buffer,
    "learner": learner,
    "generator": generator,
    "reward": reward,
    "gateway": gateway,
}
