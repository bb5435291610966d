import contextlib
import gc
import io
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import xxhash
import zmq
from process_kit import ROOT

from actors import delivery
from actors.delivery import Outbox
from actors.generator import WeightsReceiver
from asyncrl.config import load
from asyncrl.config.transports import TRANSPORTS
from asyncrl.config.tree import Config, WiresConfig
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, ConfigError, PeerUnreachable
from asyncrl.contract.messages import DeliveryAcks, RunStatus, Trajectory, WeightsSource
from asyncrl.contract.printable import describe_exit
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.records import rundir
from asyncrl.supervise import live
from asyncrl.transport import chunks, gpu_pairs, sockets, weight_transport, worker_pool
from asyncrl.transport.chunks import reachable_address
from asyncrl.transport.sockets import IN_PLACE_BYTES, BufferPeer, BufferSocket, PeerSocket
from asyncrl.transport.worker_pool import Worker, WorkerPool, frame, read_frame, take_frames
from buffer import numbers
from buffer.sessions import PeerState
from learner.publisher import Publisher


class Peer(BufferPeer):
    """A peer that notes what it does about silence."""

    def on_moved_buffer(self) -> None:
        self.noted.append("moved")

    def on_finished_run(self) -> None:
        self.noted.append("finished")


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    sets = ["wires.connect_s=100.0", "watchdog.floor_s=8.0", "learner.steps=5"]
    config = load.load(ROOT / "configs" / "demo.toml", sets)
    rundir.ensure("", tmp_path / "run")
    made = Peer(config, tmp_path / "run", "generator-0")
    made.noted = []  # type: ignore[attr-defined]
    made.socket.close()
    return made


def test_a_second_holder_of_an_identity_is_heard(tmp_path: Path) -> None:
    """A ROUTER of zmq without handover never reads one, even after the first has closed."""
    buffer = BufferSocket(f"ipc://{tmp_path}/b")
    context = zmq.Context()
    try:
        for _ in range(2):
            client = context.socket(zmq.DEALER)
            client.setsockopt(zmq.ROUTING_ID, b"same")
            client.connect(buffer.address)
            sockets.send_message(client, buffer.head, m.StatusRequest())
            assert buffer.recv(60.0) == (b"same", m.StatusRequest())
            assert bytes(buffer.payload) == msgspec.msgpack.encode(m.StatusRequest())
    finally:
        context.destroy(linger=0)
        buffer.close()


def test_a_socket_holds_as_much_as_it_should() -> None:
    beats = (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT)
    for most, unread in ((1 << 10, 1000), (1 << 20, 256), (1 << 25, 16)):
        buffer = BufferSocket("tcp://127.0.0.1:*", most=most)
        options = (zmq.LINGER, zmq.MAXMSGSIZE, zmq.RCVHWM, zmq.SNDHWM, *beats)
        held = [buffer.socket.getsockopt(option) for option in options]
        assert held == [200, most, unread, 1000, 5_000, 60_000] and buffer.most == most
        buffer.close()
    peer = sockets.PeerSocket(buffer.address)
    options = (*options[:3], zmq.RECONNECT_IVL, zmq.RECONNECT_IVL_MAX)  # type: ignore[assignment]
    held = [peer.socket.getsockopt(option) for option in options]
    assert held == [500, m.MAX_FRAME_BYTES, 1000, 50, 1000]
    peer.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (f"ipc://{'x' * 107}", ""),
        ("tcp://localhost:1", ""),
        ("tcp://[::1]:1", ""),
        ("here:1", "`here:1` is not an address; write ipc:///path or tcp://host:port"),
        ("tcp://", "`tcp://` is not an address; write ipc:///path or tcp://host:port"),
        (f"ipc://{'é' * 54}", f"{'é' * 54} has 108 bytes, the system allows 107; choose a shorter"),
        ("tcp://host:1", "tcp://host:1 is open to the network; give CURVE keys by wires.curve_dir"),
    ],
)
def test_an_address_that_cannot_work_or_is_open_is_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigError) if said else contextlib.nullcontext() as error:
        sockets.check_address(address, "", "a.key")
    assert not said or re.match(f"a.key: .*{re.escape(said)}", str(error.value))  # type: ignore[union-attr]
    buffer = BufferSocket("tcp://127.0.0.1:*")
    with pytest.raises(
        ConfigError, match=f"a.key: cannot listen on {buffer.address}: Add.*; is an"
    ):
        BufferSocket(buffer.address, key="a.key")
    buffer.close()
    sockets.check_address("tcp://host:1", "keys", "a.key")


def test_a_peer_looks_for_its_buffer_by_the_run_directory(peer: Peer) -> None:
    assert peer.socket.find_address == peer.find_buffer_address
    assert peer.find_buffer_address() == rundir.get_current_buffer_address(
        peer.config, peer.run_dir
    )
    assert (peer.silent_since, peer.has_reply) == (0.0, False)
    assert peer.waiting_for == "the buffer's first reply" and peer.wait_log.first_s == 4.0
    assert peer.run == rundir.read_run_id(peer.run_dir) and peer.name == "generator-0"


class Replies:
    """The socket of a peer: what came, what was sent, and how long was waited."""

    address = "ipc:///nowhere"

    def __init__(self, *replies: m.FromBuffer) -> None:
        self.replies = [*replies]
        self.waited: list[float] = []
        self.sent: list[m.FromPeer] = []
        self.moved = False

    def recv(self, timeout: float) -> m.FromBuffer | None:
        self.waited.append(timeout)
        return self.replies.pop(0) if self.replies else None

    def send(self, message: m.FromPeer) -> None:
        self.sent.append(message)

    def find_moved_buffer(self, silent: float) -> bool:
        return self.moved


def test_a_reply_ends_the_silence_and_a_refusal_the_peer(peer: Peer) -> None:
    status = m.CommitReply(1, 3, [])
    wire = peer.socket = Replies(status, status)  # type: ignore[assignment]
    peer.request(m.StatusRequest())  # type: ignore[arg-type]
    since = peer.silent_since
    assert 0 < since <= time.monotonic() and wire.sent == [m.StatusRequest()]
    peer.request(m.StatusRequest())  # type: ignore[arg-type]
    assert peer.silent_since == since, "of the first that is not answered"
    assert list(peer.receive(2.0)) == [status, status]
    assert wire.waited == [2.0, 0.0, 0.0] and peer.has_reply and peer.silent_since == 0.0
    peer.socket = Replies(m.Refusal("another run", 5))  # type: ignore[assignment]
    with pytest.raises(AsyncrlError, match=r"^another run$") as error:
        list(peer.receive(0.0))
    assert error.value.exit_code == 5


def test_what_a_peer_does_about_silence(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(sockets.time, "monotonic", lambda: now)
    wire = peer.socket = Replies()  # type: ignore[assignment]
    noted = peer.noted  # type: ignore[attr-defined]
    finished: list[tuple[Path, int]] = []

    def is_finished(directory: Path, steps: int) -> bool:
        finished.append((directory, steps))
        return len(finished) > 1

    monkeypatch.setattr(sockets, "is_finished", is_finished)
    peer.judge_silence()
    assert noted == [] == finished, "no reply is due"
    peer.silent_since = now - 100.0
    peer.judge_silence()
    assert noted == [] and finished == [(peer.run_dir, 5)]
    peer.judge_silence()
    assert noted == ["finished"]
    monkeypatch.setattr(sockets, "is_finished", lambda *_: False)
    peer.silent_since = now - 100.6
    with pytest.raises(PeerUnreachable) as error:
        peer.judge_silence()
    assert str(error.value) == (
        "the buffer at ipc:///nowhere has not answered for 101 s (wires.connect_s); start it with "
        "`asyncrl buffer`, or set wires.address"
    )
    wire.moved = True
    peer.judge_silence()
    assert noted == ["finished", "moved"] and peer.silent_since == 0.0
    late = peer.make_end_error("generator 3")
    assert str(late) == (
        f"the run in {peer.run_dir} has ended, all its 5 steps are made: generator 3 came too late"
    )


def test_what_a_peer_waits_for_and_since_when(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(sockets.time, "monotonic", lambda: now)
    peer.set_wait("weights")
    now = 1001.0
    peer.set_wait("weights")
    assert (peer.waiting_for, peer.waiting_since) == ("weights", 1000.0)
    assert peer.current_wait(1003.0) == m.ProcessWait("generator-0", "weights", "buffer", 3.0)
    peer.set_wait("")
    assert (peer.waiting_for, peer.waiting_since) == ("", 1001.0)
    assert peer.current_wait(1003.0) is None


def test_messages_of_others_and_too_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = m.PROTOCOL
    for head, why, code in (
        *(
            (head, "a message that is not of this protocol: its first frame names no run", 4)
            for head in (b"", b"other 1 x", b"asyncrl x run")
        ),
        (
            sockets.make_head("x", 2),
            f"the buffer speaks protocol {mine}, this process 2: install the same version on all "
            "hosts",
            4,
        ),
        *(
            (
                sockets.make_head(run),
                f"the buffer belongs to run mine, this process to run {name}: give it the same run "
                "directory",
                2,
            )
            for run, name in (("", "(none)"), ("its own", "its own"))
        ),
    ):
        found = sockets.make_foreign_refusal(head, "mine")
        assert (found.reason, found.exit_code) == (why, code)
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 3 << 20)
    sockets.send_message(Mock(), b"", m.Refusal("x" * (2 << 20)))
    with pytest.raises(AsyncrlError) as error:  # its reader would wait for it for ever
        sockets.send_message(None, b"", m.Refusal("x" * (5 << 20)))
    assert str(error.value) == (
        "a Refusal of 5 MiB cannot be sent, the limit is 3 MiB: use smaller batches "
        "(learner.groups, learner.group_size, generator.max_new_tokens) or, with top_p, a smaller "
        "support (generator.top_p, generator.top_k)"
    )


def test_waiting_ends_by_a_message_a_descriptor_or_the_time() -> None:
    reading, writing = os.pipe()
    context = zmq.Context()
    try:
        one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        other.connect(f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}")

        watched: Any = SimpleNamespace(socket=one)
        began = time.monotonic()
        sockets.wait([watched], [reading], 0.2)
        assert time.monotonic() - began > 0.15, "neither is readable"
        os.write(writing, b"x")
        sockets.wait([watched], [reading], 3600.0)
        os.read(reading, 1)
        other.send(b"x")
        sockets.wait([watched], [reading], 3600.0)
        sockets.wait([], [], -1.0)
    finally:
        context.destroy(linger=0)
        os.close(reading)
        os.close(writing)


def test_frames_are_whole_or_none() -> None:
    whole = frame(b"abc") + frame(b"")
    stream = io.BytesIO(whole)
    assert [read_frame(stream) for _ in range(3)] == [b"abc", b"", None]
    for end in (0, 1, 3, 4, 6):
        assert read_frame(io.BytesIO(frame(b"abc")[:end])) is None, end

    incoming = bytearray(whole + frame(b"xy")[:-1])
    assert list(take_frames(incoming)) == [b"abc", b""]
    assert bytes(incoming) == frame(b"xy")[:-1] and list(take_frames(incoming)) == []
    too_large = (worker_pool.FRAME_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(msgspec.DecodeError, match=r"^a frame of 67108865 bytes$"):
        list(take_frames(bytearray(too_large)))
    assert list(take_frames(bytearray(worker_pool.FRAME_BYTES.to_bytes(4, "big")))) == []


class PlayedWorker(Worker):
    """A worker without a process."""

    slack_s, busy = 2.0, False
    is_busy = property(lambda self: self.busy)

    def __init__(self) -> None:
        self.wire, self.other = socket.socketpair()
        self.wire.setblocking(False)
        self.process: Any = SimpleNamespace(poll=lambda: None)
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.closed, self.invalid, self.ready = False, "", False
        self.killed: list[float] = []
        self.restart_clock()

    def reply(self, kind: str, why: str = "") -> None:
        self.other.sendall(frame(msgspec.msgpack.encode(PlayedReply(kind, why))))

    def kill(self, wait_s: float = 0.0) -> int:
        self.killed.append(wait_s)
        return 3


class PlayedReply(msgspec.Struct):
    kind: str
    why: str


class PlayedPool(WorkerPool[PlayedWorker, PlayedReply]):
    hang_text = "it took {limit_s:g} s"
    start_text = "of them, the last one as {reason}"

    def __init__(self, call_s: float) -> None:
        self.noted: list[Any] = []
        super().__init__("agent.env = a:b", lambda index: PlayedWorker(), 2, PlayedReply, call_s)

    def on_ready(self, worker: PlayedWorker, reply: PlayedReply) -> None:
        self.noted.append((worker, reply.kind))

    def on_reply(self, worker: PlayedWorker, reply: PlayedReply) -> None:
        self.noted.append((worker, reply.why))

    def on_lost(self, worker: PlayedWorker, reason: str, *, hung: bool) -> None:
        self.noted.append((worker, reason, hung))


def test_a_pool_replaces_lost_workers_and_ends_when_none_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(worker_pool.time, "monotonic", lambda: now)
    assert PlayedPool(90.0).start_s == 90.0
    pool = PlayedPool(5.0)
    first, second = pool.workers
    assert pool.start_s == 60.0 and pool.compute_deadline(first) == 1060.0
    assert pool.wires == [first.wire, second.wire]
    pool.lost_starts = 2
    first.reply("ready")
    first.reply("done", "x")
    pool.read()
    assert pool.noted == [(first, "ready"), (first, "x")] and pool.lost_starts == 0
    assert pool.compute_deadline(first) == math.inf
    first.busy = True
    now = 1007.0
    pool.read()
    assert pool.workers[0] is first
    now = 1007.5
    pool.read()
    assert pool.noted[-1] == (first, "it took 5 s", True) and first.killed == [0.0]
    assert pool.lost_starts == 0
    third = pool.workers[0]
    third.reply("ready")
    pool.read()
    third.other.close()
    pool.read()
    assert pool.noted[-1] == (third, f"its process ended ({describe_exit(3)})", False)
    assert third.killed == [worker_pool.EXIT_S, 0.0] and pool.lost_starts == 0
    fourth = pool.workers[0]
    fourth.other.sendall(frame(b"\xc1"))
    pool.read()
    assert fourth.invalid and fourth.killed == [0.0] and pool.lost_starts == 1
    assert pool.noted[-1] == (
        fourth,
        f"its process sent an invalid reply ({fourth.invalid})",
        False,
    )
    now = 1060.5
    pool.read()
    assert pool.noted[-1] == (second, "it took 60 s", True)
    assert pool.lost_starts == 2
    pool.workers[1].process.poll = lambda: 3
    with pytest.raises(ConfigError) as error:
        pool.read()
    assert str(error.value) == (
        f"agent.env = a:b: 3 of them, the last one as its process ended ({describe_exit(3)})"
    )
    assert pool.workers[1].killed == [0.0, 0.0]
    pool.workers[0].reply("broken", "no module a")
    with pytest.raises(ConfigError, match=r"^no module a$"):
        pool.read()
    pool.exit_s = 1.5
    pool.close()
    assert [worker.killed[-1] for worker in pool.workers] == [1.5, 1.5]


def test_what_a_worker_prints_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool.BoundedOutput, "remaining", 5)
    stream = io.BytesIO()
    out = worker_pool.BoundedOutput(stream, "utf-8")
    assert [out.write(text) for text in ("abc", "de", "h")] == [3, 2, 1]
    out.writelines(["more"])
    out.flush()
    dropped = b"\n[the reward function has printed enough: the rest is dropped]\n"
    assert stream.getvalue() == b"abcde" + dropped
    again = worker_pool.BoundedOutput(stream, "utf-8")
    print("fghijkl", file=again, flush=True)
    assert stream.getvalue() == b"abcde" + dropped + b"fghij" + dropped


def test_a_server_at_every_host_is_reached_at_the_buffers() -> None:
    for host in ("0.0.0.0", "*", "[::]", "[::1]", "10.0.0.2"):
        address = f"tcp://{host}:5556"
        expected = address if host in ("[::1]", "10.0.0.2") else "tcp://10.0.0.1:5556"
        assert reachable_address(address, "tcp://10.0.0.1:5555") == expected
        assert reachable_address(address, "ipc:///run/buffer") == address


def sample(number: int) -> Trajectory:
    return Trajectory(0, number, 1, b"", b"1234", b"", b"\1", [], 0.0, {}, "stop", 1.0)


def test_an_acknowledgement_is_waited_for_from_the_first_sending() -> None:
    box = Outbox(WiresConfig(retry_s=1.0), "generator-0", 1)
    first, second = sample(0), sample(1)
    for each in (first, second):
        box.add(each)
    assert len(list(box.take_frames(10.0, flush=True))) == 1
    assert len(list(box.take_frames(11.5, flush=True))) == 1  # sent again
    acks = DeliveryAcks(1, [(0, 0, first.attempt, "accepted")], 1000, None)
    box.on_acks(acks, 13.0)
    box.on_acks(acks, 99.0)  # twice said is once heard
    assert box.collect_metrics() == {"link/acked": 1.0, "link/ack_waited_s": 3.0}
    box.on_acks(DeliveryAcks(1, [(0, 1, second.attempt, "accepted")], 1000, None), 12.0)
    assert box.collect_metrics() == {"link/acked": 2.0, "link/ack_waited_s": 5.0}
    assert not box.list_unacked_keys() and box.unacked_bytes == 0


def test_samples_share_frames_and_are_sent_again_until_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = delivery.estimate_size(sample(0))
    wires = WiresConfig(retry_s=1.0, frame_bytes=2 * size, credit_bytes=3 * size)
    box = Outbox(wires, "generator-0", 7)

    def sent(now: float, flush: bool = False) -> list[tuple[int, list[int], int]]:
        frames = list(box.take_frames(now, flush=flush))
        assert all((x.producer, x.session, x.images) == ("generator-0", 7, {}) for x in frames)
        return [(x.sequence, [each.sample for each in x.samples], x.drawn) for x in frames]

    box.add(sample(0))
    assert sent(10.0) == sent(10.01) == [] and box.fresh_bytes == size and not box.unacked_bytes
    assert sent(10.03) == [(1, [0], 1)] and box.unacked_bytes == size and not box.fresh_bytes
    for number in (1, 2, 3):
        box.add(sample(number))
    assert not box.is_full and sent(10.5) == [(2, [1, 2], 3), (3, [3], 4)] and box.is_full
    box.add(sample(4))
    assert sent(10.6, flush=True) == [], "no credit"
    assert sent(11.2) == [(4, [0], 4)] and sent(11.3) == []
    assert sent(12.0) == [(5, [1, 2], 4), (6, [3], 4)]
    assert box.list_unacked_keys() == {(0, number, 1) for number in range(5)}
    acks = [(0, number, 1, "accepted") for number in range(4)]
    box.on_acks(DeliveryAcks(1, acks, 9 * size, None), 13.0)
    waited = pytest.approx(13.0 - 10.03 + 3 * (13.0 - 10.5))
    assert box.collect_metrics() == {"link/acked": 4.0, "link/ack_waited_s": waited}
    assert (box.unacked_bytes, box.credit) == (0, 9 * size)
    assert sent(13.0) == [(7, [4], 5)] and list(box.sizes) == [(0, 4, 1)]
    monkeypatch.setattr(delivery, "REMEMBERED", 2)
    report = delivery.TokenReport()
    report.restore(0, 1, 4)
    assert report.on_report([(0, 1, 6), (m.EVAL_BASE, 2, 9)]) == 2
    assert report.on_delivery(1, 1, 3) == 5 == report.on_report([(1, 1, 2)])
    assert report.on_report([(2, 1, 1)]) == 6 and list(report.attempts) == [(1, 1), (2, 1)]


def test_two_generators_links_become_a_line() -> None:
    sums = {
        "generator/busy_s": 6.0,
        "generator/idle_s": 4.0,
        "link/fetch_s": 4.0,
        "link/fetched_mb": 48.0,
        "link/acked": 10.0,
        "link/ack_waited_s": 20.0,
    }
    generators = [PeerState(stats=each) for each in (sums, sums | {"link/fetch_s": 2.0})]
    found = numbers.compute_generator_metrics([], numbers.sum_growth(generators), 1.0)
    found = {name: value for name, value in found.items() if name.startswith("link/")}
    assert found == {
        "link/ack_s": 2.0,
        "link/fetch_share": pytest.approx(0.3),
        "link/fetch_mb_per_s": 16.0,
    }
    again = numbers.compute_generator_metrics([], numbers.sum_growth(generators), 1.0)
    assert again == {}, "nothing since then"
    status = RunStatus("r", 1, 9, 1, found, {}, [], {}, False)
    assert live.format_status(status).endswith(
        "the link holds generators up: fetching weights takes 30% of their time, 16 MB/s each; "
        "the link holds deliveries up: acknowledged after 2 s"
    )
    near = found | {"link/fetch_share": 0.09, "link/ack_s": 0.9}
    assert "link" not in live.format_status(RunStatus("r", 1, 9, 1, near, {}, [], {}, False))


def test_what_a_generator_spends_on_a_long_step_is_no_wait_for_the_link() -> None:
    """It reads between steps alone: on busy cores a step takes seconds."""

    def waited(sent: float, unread: tuple[float, float], read: float) -> float:
        box = Outbox(WiresConfig(), "generator-0", 1)
        box.add(sample(0))
        assert len(list(box.take_frames(sent, flush=True))) == 1
        box.on_acks(DeliveryAcks(1, [(0, 0, 1, "accepted")], 1000, None), read, unread)
        return box.collect_metrics()["link/ack_waited_s"]

    assert waited(10.0, (9.0, 18.0), 18.0) == 0.0, "sent, then a step of eight seconds"
    assert waited(10.0, (14.0, 18.0), 18.0) == 4.0, "it was not there after four seconds"
    assert waited(10.0, (10.0, 10.0), 13.0) == 3.0, "it stood by all the time"


def test_a_slow_generator_draws_once(forked: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A real run whose generator takes longer for each step than a lease lasts: it was slow, not
    dead, and there was nobody else to take its tickets."""
    sets = (
        "learner.steps=2",
        "generator.max_new_tokens=3",
        "wires.lease_s=1.0",  # ten of them, the longest lease, outlast a step beside other work
        "evaluation.every=0",
    )
    done = forked(tmp_path / "run", *sets, slow={"generator-0": 1.5})
    ledger = done["ledger"]
    assert ledger["generated"] == ledger["trained"] > 0, ledger


ROWS: list[Any] = [("w", "float32", [4], 0, 16)]


def config(transport: str) -> Config:
    plain = load.build({"model": {"path": "m"}, "task": {"name": "sort"}})
    return msgspec.structs.replace(
        plain, weights=msgspec.structs.replace(plain.weights, transport=transport)
    )


@pytest.fixture(autouse=True)
def ring_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "get_ring_dir", lambda run_dir, epoch: run_dir / f"epoch_{epoch}")


def learner() -> tuple[Any, Any]:
    """A learner's core whose weights are `flat` of the second value."""
    weights = SimpleNamespace(flat=b"")

    def write_flat(buffer: memoryview) -> None:
        buffer[:] = weights.flat

    backend = SimpleNamespace(
        broadcast=lambda word: None, probe=lambda: b"probe", write_flat=write_flat
    )
    return SimpleNamespace(layout=ROWS, backend=backend, config=config("copies")), weights


class Copies(weight_transport.WeightsServer):
    """Keeps what it is told of, as (label, digest) -> flat bytes."""

    address = "copies of 1"

    def __init__(self, ring: Any) -> None:
        self.ring = ring
        self.held: dict[tuple[Label, str], bytes] = {}
        self.closed = False

    def on_published(self, label: Label, digest: str) -> None:
        self.held[label, digest] = self.ring.read_part(label, digest, 0, self.ring.size)[1]

    def close(self) -> None:
        self.closed = True


class Copier(weight_transport.WeightsClient):
    probe = b"probe"
    closed = False

    def __init__(self, server: Copies) -> None:
        self.server = server

    def fetch_layout(self) -> list[Any]:
        return ROWS

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        flat = self.server.held.get((label, digest))
        if flat is None:
            return ""
        into[:] = flat
        self.bytes_received += len(flat)
        return digest

    def close(self) -> None:
        self.closed = True


def test_a_way_is_chosen_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[tuple[Copier, WeightsSource]] = []

    def connect(config: Config, source: WeightsSource, name: str) -> Copier:
        assert config.weights.transport == "copies" and isinstance(publisher.server, Copies)
        clients.append((Copier(publisher.server), source))
        return clients[-1][0]

    module = SimpleNamespace(serve=lambda config, ring: Copies(ring), connect=connect)
    monkeypatch.setitem(TRANSPORTS, "copies", "copies_of_weights")
    monkeypatch.setitem(sys.modules, "copies_of_weights", module)  # type: ignore[arg-type]
    core, weights = learner()
    publisher = Publisher(config("copies"), tmp_path, 1, core)
    publisher.window, publisher.ring.write = 2, Mock(wraps=publisher.ring.write)
    receiver = WeightsReceiver(config("copies"), "generator-0")
    size = policy.count_flat_bytes(ROWS)
    for number in range(3):
        flat = bytes([number]) * size
        weights.flat = flat
        digest = publisher.publish(number) if number else publisher.publish_bytes(number, flat)
        assert digest == xxhash.xxh3_64_hexdigest(flat)
        pulled = receiver.pull(publisher.source, Label(1, number), digest)
        assert pulled is not None and (pulled.digest, pulled.probe) == (digest, b"probe")
        assert pulled.tensors["w"].numpy().tobytes() == flat[:16]
        assert clients[0][0].bytes_received == (number + 1) * size
    assert publisher.ring.write.call_args.args[2] == [Label(1, 1), Label(1, 0)]
    assert receiver.pull(publisher.source, Label(1, 9), "gone") is None
    # one client for all of an epoch's versions, and it is told where the server is
    assert [source.address for _, source in clients] == ["copies of 1"]
    server = publisher.server
    assert isinstance(server, Copies) and not server.closed and not clients[0][0].closed
    receiver.close()
    publisher.close()
    assert server.closed and clients[0][0].closed


def test_every_row_names_a_module_that_serves_and_connects() -> None:
    for transport in TRANSPORTS:
        module = weight_transport.import_transport(transport)
        assert callable(module.serve) and callable(module.connect), transport


def test_a_learner_without_an_address_serves_no_chunks(tmp_path: Path) -> None:
    core: Any = SimpleNamespace(layout=ROWS)
    publisher = Publisher(config("auto"), tmp_path, 1, core)
    assert publisher.server is None and publisher.source.address == ""
    publisher.publish_bytes(0, bytes(policy.count_flat_bytes(ROWS)))
    publisher.close()


def test_who_cannot_reach_the_learner_is_told_what_to_set() -> None:
    away = WeightsSource(1, "elsewhere", "/not/here", "")
    with pytest.raises(PeerUnreachable, match=r"elsewhere in /not/here.*set wires\.weights_addr"):
        chunks.connect(config("auto"), away, "generator-0")
    with pytest.raises(PeerUnreachable, match=r"on host elsewhere: weights\.transport = gloo"):
        gpu_pairs.connect(config("gloo"), away, "generator-0")
    beside = load.load("demo", ["wires.address='tcp://127.0.0.1:1'"])
    everywhere = msgspec.structs.replace(away, address="tcp://*:2")
    client: Any = chunks.connect(beside, everywhere, "generator-0")
    assert client.address == "tcp://127.0.0.1:2"
    client.close()
    assert away.host != socket.gethostname()


def answer(number: int, size: int) -> m.Trajectory:
    tokens = bytes([number % 251]) * size
    label = Label(1, 0)
    spans = [m.VersionSpan(label, "", 0, size // 4, label)]
    return m.Trajectory(
        number, 0, 1, b"", tokens, tokens, b"\1" * (size // 4), spans, 0.0, {}, "stop", 1.0
    )


@pytest.mark.parametrize("curve", [False, True])
@pytest.mark.parametrize("size", [64, IN_PLACE_BYTES])
def test_what_is_sent_comes_unchanged(size: int, curve: bool, tmp_path: Path) -> None:
    folder = ""
    if curve:
        from asyncrl.transport import keys

        folder = str(tmp_path / "keys")
        keys.make_keys(tmp_path / "keys", generators=1)
    address = "tcp://127.0.0.1:*" if curve else f"ipc://{tmp_path}/s"
    buffer = BufferSocket(address, folder, run="r")
    peer = PeerSocket(buffer.address, folder, "generator-0", run="r")
    peer.check = lambda message: None
    gc.freeze()  # collections look at this test's objects alone
    for number in range(6):
        peer.send(m.Delivery("generator-0", 1, number, [answer(number, size)], 0))
        gc.collect()
        spare = [bytes(2 * size) for _ in range(4)]  # over what was freed
    for number in range(6):
        got = buffer.recv(600.0)
        assert got is not None
        who, said = got
        assert said.samples == [answer(number, size)]
        buffer.send(who, m.Batch(1, number, [answer(number, size)], [0], [0], [[]], {}, 1, {}))
        del got, said
        gc.collect()
    replies = [peer.recv(600.0) for _ in range(6)]
    assert [reply.samples[0] for reply in replies] == [answer(n, size) for n in range(6)] and spare
    peer.close()
    buffer.close()


def test_a_small_message_is_copied_and_a_large_one_is_not() -> None:
    sent: list[Any] = []
    socket = SimpleNamespace(send_multipart=lambda parts, flags, copy: sent.append((parts, copy)))
    for text in ("x", "x" * IN_PLACE_BYTES):
        sockets.send_message(socket, b"first", m.Refusal(text))
    assert [(parts[0], copy) for parts, copy in sent] == [(b"first", True), (b"first", False)]
    assert len(sent[1][0][1]) > IN_PLACE_BYTES
