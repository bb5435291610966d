"""A learner's life with a buffer that answers as the test says: what it sends, in which order, what
a resumed one says of itself, what it ignores and what ends it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock, Mock, call

import msgspec
import numpy as np
import pytest
import torch
from learner_step_kit import batch
from power import Disk
from pretend_gpu import pretend_gpu
from process_kit import ROOT, until

from asyncrl.config import load
from asyncrl.contract import messages as m
from asyncrl.contract.blobs.images import ImageShape
from asyncrl.contract.errors import (
    AsyncrlError,
    BadMessage,
    LearnerFenced,
    NotFiniteError,
    NothingToDo,
    PeerUnreachable,
)
from asyncrl.contract.versions import Label, PolicyTree
from asyncrl.models import policy
from asyncrl.records import jsonl, process_log, rundir, stream, trace
from asyncrl.supervise import run as runner
from asyncrl.transport import sockets
from asyncrl.transport.chunks import ChunkServer
from asyncrl.transport.ring import RingReader
from learner import checkpoint, loop, publisher
from learner.backend import TorchBackend
from learner.distributed import ranks
from learner.loop import Learner
from learner.state import BatchCursor, LearnerState

STEPS = 4
EXACT = ("exact='try'", "weights.in_flight='between_groups'")
LEDGER = {"trained": {"tokens": 7.0}}


class ServingBuffer:
    """Welcomes, answers asks with batches and commits with Committed, and says Finished to a
    goodbye.  lose: the classes of which the first message is lost on its way; `seen`: the run's
    files at each message."""

    address = "ipc:///nowhere"

    def __init__(self, run_dir: Path, lose: tuple[type, ...] = ()) -> None:
        self.run_dir, self.inbox = run_dir, deque[m.FromBuffer]()
        self.seen: dict[str, list[str]] = {}
        self.sent: list[m.FromPeer] = []
        self.moved = False  # it is elsewhere: told once
        self.crash = set(lose)
        self.checkpointed = 0  # what its Welcome says
        self.keep: list[Label] = []  # what its Committed says
        self.held: dict[Label, str] = {}  # of the ring, as each commit came
        self.ring: Any = None

    def find_moved_buffer(self, silent: float) -> bool:
        moved, self.moved = self.moved, False
        return moved

    def send(self, message: m.FromPeer) -> None:
        self.sent.append(message)
        if type(message) in self.crash:
            self.crash.remove(type(message))
            return
        files = ("model/config.json", "weights_digest")
        self.seen[type(message).__name__] = [n for n in files if (self.run_dir / n).exists()]
        if isinstance(message, m.LearnerHello):
            self.inbox.append(m.Welcome(message.epoch, self.checkpointed))
        if isinstance(message, m.LearnerGoodbye):
            self.inbox.append(m.RunFinished(message.epoch))
        if isinstance(message, m.BatchRequest):
            self.inbox.append(made(message.epoch, message.number))
        if isinstance(message, m.Commit):
            self.held[message.label] = self.ring.list_labels().get(message.label, "")
            self.inbox.append(m.CommitReply(message.epoch, message.number, self.keep))

    def recv(self, timeout: float) -> m.FromBuffer | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        pass

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def made(epoch: int, number: int) -> m.Batch:
    more = {"next_ticket": 10 * number + 6, "trained_above": [number], "limit": 2}
    one = batch(number, seed=number)
    return msgspec.structs.replace(one, epoch=epoch, ledger=LEDGER, **more)


Made = Callable[..., tuple[Learner, ServingBuffer]]


@pytest.fixture
def life(tmp_path: Path, small_model: Path) -> Iterator[Made]:
    """`life("key=value", ..., lose=(m.Commit,))`: (a learner of the run, its buffer)."""
    begun: list[Learner] = []

    def make(*sets: str, lose: tuple[type, ...] = ()) -> tuple[Learner, ServingBuffer]:
        text = f"learner.steps={STEPS} learner.threads=1 learner.checkpoint_every=3"
        words = [f"model.path={str(small_model)!r}", *text.split(), "wires.retry_s=0.001", *sets]
        config = load.load(ROOT / "configs" / "demo.toml", words)
        rundir.ensure("", tmp_path / "run")
        one = Learner(config, tmp_path / "run")
        one.socket.close()
        buffer = ServingBuffer(tmp_path / "run", lose)
        buffer.ring = one.publisher.ring
        one.socket = buffer
        begun.append(one)
        return one, buffer

    yield make
    for one in begun:
        one.close()
    rundir.clean(tmp_path / "run")


def flat(one: Learner) -> bytes:
    """Its weights as they lie in a ring."""
    data = bytearray(one.publisher.ring.size)
    one.core.backend.write_flat(memoryview(data))
    return bytes(data)


def test_the_timeline_has_every_step_checkpoint_and_publication(life: Made) -> None:
    one, _ = life()
    one.run_batches()
    one.tracer.close()
    spans = trace.read_sized_spans(one.run_dir)["learner"]
    names = Counter(span.name for span in spans)
    assert names == {"train": STEPS, "publish": STEPS, "checkpoint": 3}
    tokens = [sum(sample.length for sample in made(1, n).samples) for n in range(STEPS)]
    assert [span.size for span in spans if span.name == "train"] == tokens


def test_a_life_from_hello_to_goodbye(life: Made) -> None:
    one, buffer = life()
    start = one.digest
    one.run_batches()
    (hello,) = buffer.of(m.LearnerHello)
    assert (hello.epoch, hello.label, hello.parent, hello.origin) == (1, Label(1, 0), None, 0)
    assert hello.digest == start and hello.pid == os.getpid() and hello.protocol == m.PROTOCOL
    assert hello.ring == [] and hello.vocabulary == one.core.model.hf.config.vocab_size
    assert hello.source == one.publisher.source and hello.source.epoch == 1
    assert (hello.next_ticket, hello.ledger, hello.trained_above) == (0, {}, [])
    assert hello.max_lag == one.config.staleness.limit
    assert hello.run == rundir.read_run_id(one.run_dir)
    # each batch is asked for, the next one while this one is trained, and none past the last
    assert [a.number for a in buffer.of(m.BatchRequest)] == list(range(STEPS))
    at = {type(x).__name__ + str(getattr(x, "number", "")): n for n, x in enumerate(buffer.sent)}
    assert all(at[f"BatchRequest{n + 1}"] < at[f"Commit{n}"] for n in range(STEPS - 1))
    commits = buffer.of(m.Commit)
    made_by = [(c.epoch, c.number, c.label) for c in commits]
    assert made_by == [(1, n, Label(1, n + 1)) for n in range(STEPS)]
    # published before it is told of
    assert [c.digest for c in commits] == [buffer.held[c.label] for c in commits]
    assert len({start, *(c.digest for c in commits)}) == STEPS + 1
    # the first, every third, and the last one
    assert checkpoint.list_numbers(one.directory) == [3, 4] and one.directory.name == "epoch_1"
    assert [c.oldest for c in buffer.of(m.CheckpointNotice)] == [0, 0, 3]
    (goodbye,) = buffer.of(m.LearnerGoodbye)
    assert (goodbye.epoch, goodbye.number) == (1, STEPS) and one.finished
    assert stream.measure_size(one.run_dir) == 0, "a recording needs record.stream"
    assert (one.run_dir / "weights_digest").read_text() == commits[-1].digest
    left = policy.load_policy(one.run_dir / "model", device="cpu")
    assert policy.compute_weights_digest(left) == commits[-1].digest


def test_what_a_commit_says_of_its_step(life: Made) -> None:
    one, buffer = life()
    began = time.monotonic()
    one.run_batches()
    whole = time.monotonic() - began
    for commit in buffer.of(m.Commit):
        t = commit.metrics
        assert 0 < t["time/train"] < t["time/step"] < whole and 0 < t["time/publish"] < whole
        assert t["time/train"] + t["time/publish"] <= t["time/step"] + 1e-6
        busy = (t["time/train"] + t["time/publish"]) / t["time/step"]
        assert t["time/learner_idle_share"] == pytest.approx(1 - busy, abs=1e-6)
        tokens = sum(s.length for s in made(1, commit.number).samples)
        assert t["throughput/learner_tokens_per_s"] * t["time/step"] == pytest.approx(tokens)
        assert t["weights/bytes"] == t["weights/full_bytes"] == one.publisher.ring.size
        assert t["weights/bytes"] == len(flat(one)) and 50 < t["memory/learner_mb"] < 100_000
        rewards = [s.reward for s in made(1, commit.number).samples]
        assert t["reward/mean"] == pytest.approx(np.mean(rewards), rel=1e-5)
    assert sum(c.metrics["time/step"] for c in buffer.of(m.Commit)) < whole


def train_three(one: Learner) -> list[bytes]:
    """The weights before each batch and after the last."""
    one.send_hello()
    versions = [flat(one)]
    for _ in range(3):
        ready = one.wait_for_batch()
        assert ready is not None
        one.step(ready)
        versions.append(flat(one))
    return versions


@pytest.mark.parametrize("kept", [True, False])
def test_a_longer_run_reports_what_its_schedule_does_to_the_learning_rate(
    kept: bool, life: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both in the learner's log and by `asyncrl run --resume`; not where nothing changes."""
    keys = ["learner.lr=0.1", "learner.checkpoint_every=1", f"learner.steps={STEPS}"]
    one, _ = life(*keys, "learner.schedule=linear")
    train_three(one)
    one.close()
    longer = STEPS if kept else 2 * STEPS
    run_dir = one.run_dir
    (run_dir / "config.toml").write_text(load.dump(one.config))
    runner.resolve_resume(run_dir, [f"learner.steps={longer}"])
    told = capsys.readouterr().err
    life(*keys, "learner.schedule=linear", f"learner.steps={longer}")
    logged = capsys.readouterr().err
    for lines in (told, logged):
        assert kept != (
            "learner.steps was 4 and is 8: the linear schedule now covers the new length, so the "
            "learning rate of step 3 is 0.0625 instead of 0.025" in lines
        )


def test_a_resumed_learner_goes_on_from_its_checkpoint_and_its_own_version_has_no_lag(
    life: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    one, first = life()
    train_three(one)
    assert one.number == 3
    two, second = life()
    said = capsys.readouterr().err
    assert "resumed from" in said and "number_3 at version 3, 1 steps left" in said
    assert flat(two) == flat(one) and two.digest == one.digest
    two.send_hello()
    (hello,) = second.of(m.LearnerHello)
    assert (hello.epoch, hello.origin, hello.label) == (2, 1, Label(2, 3))
    # batch 2 made version 3 of version 2
    assert hello.parent == Label(1, 2)
    assert (hello.next_ticket, hello.ledger, hello.trained_above) == (26, LEDGER, [2])
    assert hello.limit == 2 and hello.digest == first.of(m.Commit)[-1].digest
    # as the buffer takes it: the same policy under both names, one update behind the one before
    tree = PolicyTree()
    tree.register(Label(1, 0), None, first.of(m.LearnerHello)[0].digest)
    for commit in first.of(m.Commit):
        tree.register(commit.label, Label(1, commit.number), commit.digest)
    tree.register(hello.label, hello.parent, hello.digest)
    assert tree.compute_lag(Label(1, 3), hello.label, 3) == 0
    assert tree.compute_lag(hello.label, hello.label, 3) == 0
    assert tree.compute_lag(Label(1, 2), hello.label, 3) == 1
    two.run_batches()
    assert [a.number for a in second.of(m.BatchRequest)] == [3]
    assert [(c.number, c.label) for c in second.of(m.Commit)] == [(3, Label(2, 4))] and two.finished


def test_what_a_life_says_of_itself(life: Made, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("record.samples_every=1", "record.token_samples=['best']", "learner.ranks='auto'")
    one, buffer = life("learner.steps=2", *more)
    assert one.core.measure.read_weights == one.publisher.read_weights
    one.run_batches()
    said = [line.partition("learner: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in said if line] == [
        "connected to the buffer at ipc:///nowhere",
        "follows epoch 1 from version 0 of 2",
        "wrote the checkpoint of version 0",
        "trains batch 0, its first one",
        "wrote the checkpoint of version 2",
    ]
    assert [c.metrics["time/learner_threads"] for c in buffer.of(m.Commit)] == [1, 1]
    assert [row["batch"] for row in jsonl.read(one.run_dir / "token_samples.jsonl")] == [0, 1]


@pytest.mark.parametrize("lora", ["merged", "adapter"])
def test_a_life_with_adapters_publishes_and_exports_them(life: Made, lora: str) -> None:
    one, buffer = life("lora.rank=2", f"export.lora='{lora}'", "learner.steps=1")
    one.run_batches()
    (commit,) = buffer.of(m.Commit)
    assert commit.metrics["weights/full_bytes"] == one.core.model.adapter.base_bytes
    assert commit.metrics["weights/bytes"] == one.publisher.ring.size != one.full_bytes
    assert (one.run_dir / "model" / "adapter_config.json").exists() == (lora == "adapter")
    assert (one.run_dir / "weights_digest").read_text() == commit.digest


@pytest.mark.parametrize(
    ("sets", "is_behind"),
    [
        (("model.device='cuda'", "staleness.max_lag=1"), True),
        (("model.device='cuda'", "staleness.max_lag=0"), False),
        (("model.device='cuda'", "staleness.max_lag=1", *EXACT), False),
        (("model.device='cpu'", "staleness.max_lag=1"), False),
    ],
)
def test_only_behind_a_gpu_training_goes_on_beside_a_publication(
    life: Made, sets: tuple[str, ...], is_behind: bool
) -> None:
    with pretend_gpu():
        one, buffer = life("learner.steps=2", *sets)
        assert one.publishes_behind == is_behind
        train, threads = one.core.train, []

        def train_and_note(batch: m.Batch) -> dict[str, float]:
            threads.append(threading.current_thread() is threading.main_thread())
            return train(batch)

        one.core.train = train_and_note  # type: ignore[method-assign]
        one.run_batches()
    assert threads == [True, not is_behind]
    assert [c.digest for c in buffer.of(m.Commit)] == list(buffer.held.values())


def test_a_lost_commit_is_repeated_in_order_while_training_goes_on(life: Made) -> None:
    one, buffer = life(lose=(m.Commit,))
    one.run_batches()
    numbers = [c.number for c in buffer.of(m.Commit)]
    assert numbers[0] == 0 and 0 in numbers[1:]
    # none is sent before those ahead of it are answered
    assert list(dict.fromkeys(numbers)) == list(range(STEPS)) == sorted(set(numbers))
    assert numbers.index(1) > numbers.index(0, 1) and one.finished


def test_checkpoints_follow_the_buffers_record(life: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run resumed from it skips them: what the buffer has not written by then is missing."""
    one, buffer = life("learner.checkpoint_every=1", lose=(m.Commit,))
    save, unanswered = one.save_checkpoint, []

    def saved() -> None:
        unanswered.append((one.number, list(one.commits), one.waiting_for))
        save()

    monkeypatch.setattr(one, "save_checkpoint", saved)
    one.run_batches()
    waits = ["the buffer's welcome"] + STEPS * [""]
    assert unanswered == [(number, [], wait) for number, wait in enumerate(waits)]
    assert [c.number for c in buffer.of(m.Commit)].count(0) > 1


@pytest.mark.parametrize("lost", [m.LearnerHello, m.BatchRequest, m.LearnerGoodbye])
def test_a_lost_request_is_sent_again(life: Made, lost: type) -> None:
    one, buffer = life(lose=(lost,))
    one.run_batches()
    sent = buffer.of(lost)
    assert one.finished and sent[0] in sent[1:]


def test_a_request_is_not_repeated_before_its_time(life: Made) -> None:
    one, buffer = life("wires.retry_s=1000")
    for _ in range(3):
        one.repeat("ask 0", m.BatchRequest(1, 0))
    one.repeat("ask 1", m.BatchRequest(1, 1))
    assert buffer.sent == [m.BatchRequest(1, 0), m.BatchRequest(1, 1)]


def test_what_is_not_for_this_life_changes_nothing(life: Made) -> None:
    one, _ = life()
    one.send_hello()
    one.commits = {0: "waits"}
    for other in (
        m.FencedReply(2, 3),
        m.RunFinished(2),
        m.CommitReply(2, 0, [Label(2, 0)]),
        made(2, 0),
        made(1, 2),  # only this number and the next one are asked for
        m.Welcome(2, 0),
    ):
        one.handle(other)
    assert not one.finished and one.commits and not one.batches and not one.publisher.keep
    one.handle(made(1, 1))
    second = made(1, 0)
    one.handle(second)
    one.handle(made(1, 0))
    assert set(one.batches) == {0, 1} and one.batches[0] is second
    one.batches.clear()
    one.core.state.number = 1
    one.handle(made(1, 0))  # an answer to a repeated request: the batch is trained already
    assert not one.batches
    one.core.state.number = 0
    one.handle(m.CommitReply(1, 0, [Label(1, 0)]))
    assert not one.commits and one.publisher.keep == [Label(1, 0)]
    with pytest.raises(LearnerFenced, match="epoch 3 of the learner has taken over from epoch 1"):
        one.handle(m.FencedReply(1, 3))
    with pytest.raises(AsyncrlError, match="of another run") as refused:
        one.socket.inbox.append(m.Refusal("of another run", 7))
        one.handle_messages(0)
    assert refused.value.exit_code == 7


def test_a_second_welcome_does_not_claim_again(life: Made) -> None:
    one, buffer = life()
    one.model = m.ModelShape(9, m.RoutingShape(1, 8, 2), ImageShape(5, 4))
    process_log.append_event(one.run_dir, "learner", 1, "exited", code=0)
    process_log.append_event(one.run_dir, "learner", os.getpid(), "began")
    one.send_hello()
    (hello,) = buffer.of(m.LearnerHello)
    assert (hello.vocabulary, hello.routing, hello.images) == one.model
    assert hello.before == "ended", "the life before this process"
    claimed = one.directory
    one.handle(m.Welcome(1, 0))
    assert one.directory == claimed == one.run_dir / "checkpoints" / "epoch_1"


def test_a_welcome_that_keeps_nothing_that_it_has_is_refused(life: Made) -> None:
    one, _ = life()
    one.check(m.Welcome(1, 0))
    one.check(m.Welcome(2, 1))  # of another life
    with pytest.raises(BadMessage, match="checkpoints are kept from 1, and this one is 0"):
        one.check(m.Welcome(1, 1))
    with pytest.raises(BadMessage):  # tokens that the model does not have
        bad = made(1, 0)
        worse = msgspec.structs.replace(bad.samples[0], tokens=b"\xff\xff\xff\x7f")
        one.check(msgspec.structs.replace(bad, samples=[worse, *bad.samples[1:]]))


def test_waits_go_to_buffer_and_stderr(life: Made, capsys: pytest.CaptureFixture[str]) -> None:
    one, buffer = life("watchdog.floor_s=8")
    now = time.monotonic()
    one.report(now + 3)
    assert not buffer.of(m.LearnerProgress), "it is not welcomed yet"
    one.send_hello()
    buffer.sent.clear()
    one.sent["progress"] = now
    one.set_wait("batch 0")
    one.report(now + loop.PROGRESS_S / 2)
    assert not buffer.sent
    one.waiting_since = now - 3
    one.report(now + 0.9)
    (told,) = buffer.of(m.LearnerProgress)
    assert (told.who, told.pid, told.epoch, told.stats) == ("learner", os.getpid(), 1, {})
    assert told.waiting.what == "batch 0" and told.waiting.seconds == pytest.approx(3.9)
    assert told.waiting.on == "buffer"
    assert "batch 0" not in capsys.readouterr().err, "not long enough: half of watchdog.floor_s"
    one.report(now + 2)
    said = capsys.readouterr().err
    assert "batch 0" in said and f"the buffer at {buffer.address}" in said
    one.set_wait("")
    buffer.sent.clear()
    one.report(now + 9)
    assert [p.waiting for p in buffer.of(m.LearnerProgress)] == [None]


def judge(life: Learner, silent: float) -> None:
    life.silent_since = time.monotonic() - silent
    life.judge_silence()


def test_silence_counts_from_the_wait_and_ends_it_after_connect_s(life: Made) -> None:
    one, _ = life("wires.connect_s=30")
    judge(one, 29.0)
    with pytest.raises(PeerUnreachable, match=r"has not answered for 31 s.*wires\.connect_s"):
        judge(one, 31.0)
    one.set_wait("")
    one.judge_silence()  # it has asked for nothing
    one.on_reply()
    assert one.silent_since == 0.0
    one.set_wait("batch 0")
    assert time.monotonic() - one.silent_since < 50 and one.silent_since == one.waiting_since
    since = one.waiting_since
    one.set_wait("batch 0")
    assert one.waiting_since == since, "the same wait goes on"
    with pytest.raises(PeerUnreachable):
        judge(one, 31.0)


@pytest.mark.parametrize(("welcomed", "number"), [(False, STEPS), (True, STEPS - 1)])
def test_a_run_that_ended_without_it_is_done(life: Made, welcomed: bool, number: int) -> None:
    one, _ = life()
    (one.run_dir / "buffer_summary.json").write_text(f'{{"finished": true, "steps": {STEPS}}}')
    (one.run_dir / "weights_digest").write_text("d")
    one.welcomed, one.core.state.number = welcomed, number
    judge(one, 0.5 * sockets.ENDED_S)
    with pytest.raises(NothingToDo, match="all its 4 steps are made"):
        judge(one, sockets.ENDED_S + 0.1)
    one.welcomed, one.core.state.number = True, STEPS
    judge(one, sockets.ENDED_S + 0.1)
    assert one.finished


def test_without_prefetch_one_batch_is_asked_for_at_a_time(life: Made) -> None:
    one, buffer = life("learner.prefetch=0", "learner.steps=2")
    one.run_batches()
    sent = [x for x in buffer.sent if isinstance(x, m.BatchRequest | m.Commit)]
    order = [(type(x).__name__, x.number) for x in sent]
    assert order == [("BatchRequest", 0), ("Commit", 0), ("BatchRequest", 1), ("Commit", 1)]


def test_on_a_gpu_a_version_is_committed_while_the_next_batch_trains(life: Made) -> None:
    sets = ("model.device='cuda'", "learner.checkpoint_every=9")
    with pretend_gpu():
        one, buffer = life(*sets, "staleness.max_lag=2")
        one.send_hello()
        one.step(one.wait_for_batch())
        assert list(one.publisher.ring.list_labels()) == [Label(1, 0)]
        assert one.unpublished and not buffer.of(m.Commit)
        one.close()  # it is killed between the copy and the commit
        two, second = life(*sets, "staleness.max_lag=2")
        train = two.core.train

        def train_after_commit(batch: m.Batch) -> dict[str, float]:
            until(lambda: batch.number in [0, *(c.number + 1 for c in second.of(m.Commit))])
            return train(batch)

        two.core.train = train_after_commit  # type: ignore[method-assign]
        two.run_batches()
        shutil.rmtree(two.run_dir / "checkpoints")
        three, third = life(*sets, "staleness.max_lag=0")
        three.run_batches()
    assert two.finished and not three.publishes_behind
    digests = [[c.digest for c in buffer.of(m.Commit)] for buffer in (second, third)]
    assert digests[0] == digests[1] == list(second.held.values()) and len(digests[0]) == STEPS


def test_a_publication_that_fails_in_the_background_ends_the_learner(life: Made) -> None:
    with pretend_gpu():
        one, buffer = life("model.device='cuda'", "staleness.max_lag=2")
        one.publisher.ring.write = Mock(side_effect=AsyncrlError("no slot"))
        with pytest.raises(AsyncrlError, match="no slot"):
            one.run_batches()
    assert not buffer.of(m.Commit)


def test_the_rings_of_lower_epochs_go_with_the_welcome(life: Made, tmp_path: Path) -> None:
    one, _ = life()
    two, _ = life()
    assert (one.publisher.directory.exists(), two.epoch) == (True, 2)
    above = two.publisher.directory.with_name("epoch_3")
    above.mkdir()
    (above.parent / "epoch_0.note").write_text("not a ring")
    (above.parent / "epoch_0").symlink_to(tmp_path)  # which cannot be removed as a directory
    two.send_hello()
    assert not one.publisher.directory.exists() and two.publisher.directory.exists()
    assert above.exists() and (above.parent / "epoch_0.note").exists()
    assert (above.parent / "epoch_0").is_symlink() and tmp_path.exists()


def test_versions_that_evaluations_still_need_stay_in_the_ring(life: Made) -> None:
    one, _ = life()
    one.send_hello()
    one.publisher.keep = [Label(1, 0)]
    for number in range(1, one.config.weights.slots + 2):
        one.publisher.publish(number)
    labels = one.publisher.ring.list_labels()
    assert Label(1, 0) in labels and Label(1, number) in labels and Label(1, 1) not in labels


def test_injected_versions_survive_a_resume(life: Made) -> None:
    sets = ("staleness.max_lag=2", "staleness.inject=2", "learner.checkpoint_every=1")
    one, buffer = life(*sets)
    assert one.publisher.depth == 2
    made_before = train_three(one)
    # as far as the injection names them
    assert set(one.publisher.read_earlier_versions(3)) == {1, 2}
    two, second = life(*sets)
    two.send_hello()
    (hello,) = second.of(m.LearnerHello)
    digests = {c.label.number: c.digest for c in buffer.of(m.Commit)}
    assert hello.ring == [(Label(2, n), digests[n]) for n in (1, 2)]
    for n in (1, 2, 3):
        assert two.publisher.read_weights(Label(2, n), "") == made_before[n]
    assert two.publisher.read_weights(Label(2, 0), "") == b""
    # answers of before the resume name the first life's labels: their weights are known by digest
    assert two.publisher.read_weights(Label(1, 2), digests[2]) == made_before[2]
    assert two.publisher.read_weights(Label(1, 2), "") == b"", "it may be of a branch that died"
    assert two.publisher.read_weights(Label(2, 2), digests[1]) == made_before[1]
    # as generators see them
    reader = RingReader(two.publisher.directory, "one")
    assert reader.list_labels() == {Label(2, n): digests[n] for n in (1, 2, 3)}
    reader.close()


def test_what_a_publication_gives_the_ring_and_the_server(
    life: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "probe", lambda self: b"probe")
    server = Mock(spec=ChunkServer, address="tcp://here:1")
    transport = SimpleNamespace(serve=lambda config, ring: server)
    monkeypatch.setattr(publisher.weight_transport, "import_transport", lambda name: transport)
    one, _ = life("correction.proximal='version'", "staleness.max_lag=2", "weights.slots=5")
    made = one.publisher
    here = 1, socket.gethostname(), str(made.directory), "tcp://here:1"
    assert made.source == m.WeightsSource(*here)
    with monkeypatch.context() as patch:
        patch.setattr(publisher.buffer_leadership, "read_current_address", lambda d: d / "x")
        assert server.buffer() == one.run_dir / "x"
    assert (made.window, made.depth, len(made.ring.slots), made.ring.most) == (2, 4, 5, 9)
    made.ring.write = Mock(return_value="d")
    made.keep = [Label(1, 0)]
    assert made.publish(7) == "d" and server.on_published.call_args == call(Label(1, 7), "d")
    label, _, keep, probe = made.ring.write.call_args.args
    assert (label, keep, probe) == (Label(1, 7), [Label(1, n) for n in (0, 6, 5)], b"probe")
    made.publish_bytes(2, b"x")
    assert made.ring.write.call_args.args[3] == b""
    with pretend_gpu():
        two, _ = life("model.device='cuda'", "staleness.max_lag=2", "staleness.inject=1")
        made = two.publisher
        slots = two.config.weights.slots + 1
        assert (made.window, made.depth, len(made.ring.slots)) == (0, 1, slots)
        write = made.ring.write = Mock(wraps=made.ring.write)
        assert made.read_weights(Label(2, 1), made.publish(1)) == flat(two)
    assert write.call_args.args[3] == b"probe"


def test_other_ranks_are_told_each_command(life: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(TorchBackend, "broadcast", lambda self, *command: sent.append(command))
    one, _ = life("learner.steps=2", "learner.checkpoint_every=2")
    one.run_batches()
    trained = ["train", "publish"]
    assert [c for c, *_ in sent] == ["publish", "save", *trained, *trained, "save"] + ["export"]
    assert [made.number for command, *more in sent if command == "train" for made in more] == [0, 1]
    saved = [Path(part) for command, *more in sent if command == "save" for part in more]
    assert saved == [one.directory / f".number_{n}.part" for n in (0, 2)]
    sent.clear()
    two, _ = life("learner.steps=2")
    assert sent == [("restore", str(two.directory / "number_2")), ("publish",)]


def test_how_many_versions_an_injection_names() -> None:
    for sets, depth in (([], 0), (["inject=3"], 3), (["inject=[0.5,0.25,0.25]"], 2)):
        sets = [f"staleness.{item}" for item in ("max_lag=4", *sets)]
        assert load.load(ROOT / "configs" / "demo.toml", sets).staleness.most_injected == depth


def test_weights_without_logprobs_stay_private(life: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = life()
    before = one.publisher.ring.list_labels()
    weight = next(p for n, p in policy.list_named_weights(one.core.model) if p.dim() == 2)
    kept = weight.detach().clone()

    def with_first(value: float) -> str:
        with torch.no_grad():
            weight.copy_(kept)
            weight.view(-1)[0] = value
        return one.publisher.find_problem(memoryview(bytearray(flat(one))))

    assert with_first(float(kept.view(-1)[0])) == "" and with_first(2e3) == ""
    assert with_first(float("nan")) == with_first(float("-inf")) == "are not finite"
    assert with_first(publisher.HUGE) == "are up to 1.0e+06, too large for finite logprobs,"
    with pytest.raises(NotFiniteError) as error:
        one.publisher.publish(7)
    assert str(error.value) == (
        "the weights are up to 1.0e+06, too large for finite logprobs, after 7 batches: learner.lr "
        f"= {one.config.learner.lr:g} is too large, or the loss is; nothing of them was published "
        "or kept: resume with a smaller one"
    )
    assert one.publisher.ring.list_labels() == before
    # a forward decides about large weights, where one process holds them all
    lost = np.array([0.0, np.nan], np.float32)
    monkeypatch.setattr(policy, "compute_probe_logprobs", lambda model: lost)
    assert with_first(float(kept.view(-1)[0])) == ""
    assert with_first(publisher.LARGE) == "are up to 1.0e+03, too large for finite logprobs,"
    assert with_first(2e3) == "are up to 2.0e+03, too large for finite logprobs,"
    with pytest.raises(NotFiniteError, match=r"up to 2\.0e\+03"):
        one.publisher.publish(7)
    elsewhere = SimpleNamespace(learner=SimpleNamespace(backend="fsdp2"))
    core = SimpleNamespace(config=elsewhere, layout=one.core.layout, model=one.core.model)
    monkeypatch.setattr(one.publisher, "core", core)
    assert with_first(2e3) == ""


def test_a_learner_told_to_stop_while_it_waits_has_no_batch(life: Made) -> None:
    one, buffer = life()
    one.send_hello()
    recv = buffer.recv

    def stop(timeout: float) -> Any:
        one.stopping = True
        is_batch = buffer.inbox and isinstance(buffer.inbox[0], m.Batch)
        return None if is_batch else recv(timeout)

    buffer.recv = stop
    buffer.inbox.clear()
    buffer.crash = {m.BatchRequest}
    assert one.wait_for_batch() is None and one.waiting_for == ""


def test_one_that_was_never_welcomed_leaves_nothing(life: Made) -> None:
    one, buffer = life(lose=(m.LearnerHello,))
    one.stopping = True
    one.run_batches()
    assert not one.finished and not buffer.of(m.LearnerGoodbye)
    assert checkpoint.list_numbers(one.directory) == [] and not (one.run_dir / "model").exists()


class FakeLearner:
    """What `main` does with lives: `lives` says how each ends."""

    made: ClassVar[list[FakeLearner]] = []
    lives: ClassVar[list[Any]] = []

    def __init__(self, config: Any, run_dir: Path) -> None:
        self.welcomed = self.finished = self.stopping = self.closed = False
        self.how = self.lives[len(self.made)]
        self.made.append(self)
        if isinstance(self.how, BaseException) and "overtaken at once" in str(self.how):
            self.closed = True
            raise self.how

    def run_batches(self) -> None:
        if isinstance(self.how, BaseException):
            raise self.how
        self.how(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """`lives(HOW, ...)`: what `main` returns where its lives end so."""
    monkeypatch.setattr(loop, "Learner", FakeLearner)
    monkeypatch.setattr(loop, "bind_learner", lambda config: None)
    monkeypatch.delenv("ASYNCRL_SUPERVISED", raising=False)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    config: Any = SimpleNamespace(learner=SimpleNamespace(backend="torch"))

    def run(*how: Any) -> bool:
        FakeLearner.made, FakeLearner.lives = [], list(how)
        return loop.main(config, Path("run"))

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_other_ranks_follow_the_first(
    lives: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, loaded = MagicMock(spec=ranks.DistributedBackend), Mock()
    core = MagicMock(backend=backend)
    commands = [("train", "b"), ("publish", None), ("save", "new"), ("export", None)]
    commands += [("restore", "old"), ("", None), ("end", None)]
    backend.receive_broadcast.side_effect = commands
    made = Mock(return_value=core)
    monkeypatch.setattr(loop, "LearnerCore", made)
    monkeypatch.setattr(loop.checkpoint, "load_checkpoint", loaded)
    monkeypatch.setattr(ranks, "exit_rank", Mock(side_effect=SystemExit))
    monkeypatch.setenv("RANK", "1")
    model, learner = SimpleNamespace(path="m"), SimpleNamespace(distributed=True)
    config: Any = SimpleNamespace(learner=learner, model=model)
    with pytest.raises(SystemExit):
        loop.main(config, Path("run"))
    assert made.mock_calls == [call(config, "m", Path("run"))]
    own = [one for one in core.mock_calls if one[0] in ("train", "save")]
    assert own == [call.train("b"), call.save(Path("new"))]
    done = [one for one in backend.method_calls if one[0] != "receive_broadcast"]
    gathered = call.gather_full_parameters()
    assert done == [call.probe(), call.write_flat(None), gathered, gathered, call.close()]
    assert loaded.mock_calls == [call(core, Path("old"))]
    handlers = {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    assert handlers == {signal.SIG_IGN}


def finish(one: FakeLearner) -> None:
    one.finished = True


def test_a_life_that_is_overtaken_before_its_welcome_starts_over(
    lives: Callable[..., bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert lives(LearnerFenced("overtaken"), LearnerFenced("overtaken at once"), finish) is True
    assert len(FakeLearner.made) == 3 and all(one.closed for one in FakeLearner.made)
    assert capsys.readouterr().err.count("starting over from the newest checkpoint") == 2
    fenced = map(LearnerFenced, ("overtaken", "again", "and again"))
    assert lives(*fenced, finish) is True
    assert len(FakeLearner.made) == loop.TRIES
    assert "and again; this one ends" in capsys.readouterr().err


def test_a_welcomed_life_that_is_fenced_ends(lives: Callable[..., bool]) -> None:
    def overtaken(one: FakeLearner) -> None:
        one.welcomed = True
        raise LearnerFenced("epoch 2 has taken over")

    assert lives(overtaken, finish) is True and len(FakeLearner.made) == 1
    with pytest.raises(NothingToDo):
        lives(NothingToDo("the run has ended"))
    assert FakeLearner.made[0].closed


def test_a_signal_stops_the_life_and_says_it_is_unfinished(lives: Callable[..., bool]) -> None:
    def told(number: int) -> Callable[[FakeLearner], None]:
        def life(one: FakeLearner) -> None:
            assert not one.stopping
            os.kill(os.getpid(), number)
            assert one.stopping

        return life

    assert lives(told(signal.SIGTERM)) is False and lives(told(signal.SIGINT)) is False

    def late(one: FakeLearner) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise LearnerFenced("overtaken as well")

    def begins_stopping(one: FakeLearner) -> None:
        assert one.stopping

    assert lives(late, begins_stopping) is False


def test_under_a_supervisor_the_terminals_interrupt_is_not_the_learners(
    lives: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_SUPERVISED", "1")

    def life(one: FakeLearner) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert not one.stopping
        finish(one)

    assert lives(life) is True


def test_a_recording_holds_each_batch_and_the_weights_that_were_asked_for(
    life: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    add = publisher.RecordingWriter.add

    def add_and_note(self: publisher.RecordingWriter, *row: Any) -> bool:
        has_room = add(self, *row)
        sizes.append(self.written)
        return has_room

    monkeypatch.setattr(publisher.RecordingWriter, "add", add_and_note)
    one, buffer = life("record.stream=true", "record.weights_every=2")
    one.run_batches()
    said = capsys.readouterr().err
    each, whole = sizes[2] / 3, one.recorder.weights_bytes
    assert said.partition("recording: ")[2].partition("\n")[0] == (
        f"{each / 1024:.1f} KiB a batch and 3 x {whole / 2**20:.1f} MiB of weights: about "
        f"{(each * STEPS + 3 * whole) / 2**20:.1f} MiB after {STEPS} batches, bound "
        f"{one.config.record.stream_mib} MiB (record.stream_mib)"
    )
    assert said.count("recording:") == 1 and list(stream.list_weights(one.run_dir)) == [0, 2, 4]
    found = stream.read(one.run_dir)
    ((first, whole),) = found.lives
    assert (first, whole.epoch, whole.start) == (0, 1, 0)
    assert found.explain_missing_part(STEPS) == ""
    assert whole.digest == buffer.of(m.LearnerHello)[0].digest
    for commit, step in zip(buffer.of(m.Commit), found.read_steps(0, STEPS), strict=True):
        assert (step.digest, step.batch.number) == (commit.digest, commit.number)
        assert step.metrics["reward/mean"] == commit.metrics["reward/mean"]
    used = one.recorder.log.used
    assert used == stream.measure_size(one.run_dir) and one.config.learner.optimizer == "adamw"
    again = loop.Recorder(one.config, one.run_dir, 2, one.core, one.digest)
    assert again.weights_bytes == 3 * policy.count_flat_bytes(one.core.layout), "an estimate"


@pytest.mark.parametrize("after", [0, 3])
def test_a_recording_that_reaches_its_bound_says_so_once_and_the_run_goes_on(
    life: Made, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    one, buffer = life("record.stream=true")
    send = buffer.send

    def fill(message: m.FromPeer) -> None:
        if isinstance(message, m.Commit) and message.number == after:
            one.recorder.log.most = one.recorder.log.used
        send(message)

    buffer.send = fill
    one.run_batches()
    said = capsys.readouterr().err
    assert one.finished and said.count("recording: stops") == 1
    assert f"recording: stops before batch {after + 1}: record.stream_mib = " in said
    assert "the run goes on, a replay ends there" in said
    assert ("KiB a batch and 1 x" in said) == (after == 3), "the first weights alone"
    assert stream.read(one.run_dir).end == after if after else True


def test_a_recording_that_cannot_hold_the_first_weights_is_refused(life: Made) -> None:
    one, _ = life("record.stream=true", "record.stream_mib=1")
    one.send_hello()
    record = msgspec.structs.replace(one.config.record, stream_mib=0)
    one.config = msgspec.structs.replace(one.config, record=record)
    with pytest.raises(AsyncrlError, match=r"0 MiB do not hold the first weights"):
        loop.Recorder(one.config, one.run_dir, 1, one.core, one.digest)


def test_the_model_is_exported_before_the_goodbye_is_sent(
    life: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed after the buffer's `Finished` leaves no work undone."""
    disk = Disk(monkeypatch)
    one, _ = life("learner.steps=2")
    one.core.state.number = 2  # restarted from a checkpoint of the last step
    one.run_batches()
    assert one.finished
    assert one.socket.seen["LearnerGoodbye"] == ["model/config.json", "weights_digest"]
    assert one.socket.seen["LearnerHello"] == []
    after_cut = disk.cut(one.run_dir, tmp_path / "after_cut")
    disk.close()
    left = policy.compute_weights_digest(policy.load_policy(after_cut / "model", device="cpu"))
    assert (after_cut / "weights_digest").read_text() == left


def test_a_run_past_its_end_has_no_final_weights_until_the_new_end(life: Made) -> None:
    one, _ = life("learner.steps=2")
    (one.run_dir / "weights_digest").write_text("of the end before")
    one.send_hello()
    assert one.welcomed and not (one.run_dir / "weights_digest").exists()


def test_a_learner_makes_a_removed_ring_anew_while_it_waits(life: Made) -> None:
    """A generator that is started then finds the weights, though no step has been made since."""
    one, _ = life("learner.steps=2")
    one.send_hello()
    shutil.rmtree(one.publisher.directory)
    one.sent["progress"] = 0.0
    one.handle_messages(0)
    reader = RingReader(one.publisher.directory, "late")
    assert reader.list_labels() == {Label(one.epoch, 0): one.digest}
    reader.close()


def test_a_moved_buffer_is_asked_again_for_the_unanswered(life: Made) -> None:
    one, _ = life("learner.steps=2")
    one.send_hello()
    one.repeat("ask 0", m.BatchRequest(one.epoch, 0))
    one.socket.sent.clear()
    one.waiting_for = "a batch"
    one.silent_since -= 1e6  # the one before would be given up
    one.socket.moved = True
    one.handle_messages(0)
    one.repeat("ask 0", m.BatchRequest(one.epoch, 0))
    assert m.BatchRequest(one.epoch, 0) in one.socket.sent


def test_at_the_end_it_waits_for_the_last_evaluation(life: Made) -> None:
    one, _ = life("learner.steps=2")
    one.send_hello()
    one.core.state.number = one.config.learner.steps
    seen: list[str] = []

    def answer(timeout: float) -> None:
        seen.append(one.waiting_for)
        one.finished = True

    one.handle_messages = answer
    one.run_batches()
    assert seen == ["the last evaluation"]


def test_told_to_stop_it_leaves_a_checkpoint_and_exports_nothing(life: Made) -> None:
    one, _ = life("learner.steps=2")
    one.send_hello()
    one.stopping = True
    one.run_batches()
    assert not one.finished and list(one.directory.glob("number_0"))
    assert "LearnerGoodbye" not in one.socket.seen and not (one.run_dir / "model").exists()


def test_what_an_earlier_program_did_not_keep_has_its_default() -> None:
    cursor = BatchCursor.read({"next_ticket": 3, "no more": 1})
    first = {"next_ticket": 3, "ledger": {}, "trained_above": [], "parent": None, "limit": 0}
    assert msgspec.to_builtins(cursor) == first | {"window": 0.0, "mixture": None}
    assert LearnerState() == LearnerState(0, 0.0, 0.0, 0, 0, 0, {}, 0)
