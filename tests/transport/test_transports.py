import gc
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import xxhash

from actors.generator import WeightsReceiver
from asyncrl.config import load
from asyncrl.config.transports import TRANSPORTS
from asyncrl.config.tree import Config
from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError, PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.records import rundir
from asyncrl.transport import chunks, gpu_pairs, sockets, weight_transport
from asyncrl.transport.sockets import IN_PLACE_BYTES, BufferSocket, PeerSocket
from learner.publisher import Publisher

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


class Copier:
    is_broken, bytes_received = False, 0
    probe = b"probe"

    def __init__(self, server: Copies) -> None:
        self.server = server
        self.closed = False

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


def test_a_message_beyond_the_limit_is_an_error_at_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader would drop the connection without a word, and wait for it for ever."""
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 1 << 20)
    buffer = BufferSocket(f"ipc://{tmp_path}/b")
    try:
        buffer.send(b"peer", m.Refusal("x" * 1000))
        with pytest.raises(AsyncrlError, match="a Refusal of 2 MiB cannot be sent"):
            buffer.send(b"peer", m.Refusal("x" * (2 << 20)))
    finally:
        buffer.close()
