"""A generator's end of the weights: which transport, which version, and what is closed when."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actors import generator
from actors.generator import WeightsReceiver
from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.transport import gpu_pairs
from asyncrl.transport.ring import RingReader, Rows, WeightRing

ROWS: Rows = [("w", "float32", [2, 2], 0, 16), ("b", "uint8", [3], 16, 3)]
SIZE = policy.count_flat_bytes(ROWS)
HERE = socket.gethostname()


def config(transport: str) -> Config:
    plain = load.build({"model": {"path": "m"}, "task": {"name": "sort"}})
    weights = msgspec.structs.replace(plain.weights, transport=transport)
    return msgspec.structs.replace(plain, weights=weights)


def ring(path: Path, epoch: int = 1) -> WeightRing:
    return WeightRing(path / f"ring_{epoch}", SIZE, 2, ROWS, epoch)


def publish(to: WeightRing, label: Label, byte: int) -> str:
    def write(buffer: memoryview) -> None:
        buffer[:] = bytes([byte]) * len(buffer)

    return to.write(label, write, probe=bytes([byte]))


def source(of: WeightRing, epoch: int = 1, host: str = HERE) -> WeightsSource:
    return WeightsSource(epoch, host, str(of.directory), "")


@pytest.mark.parametrize(
    ("transport", "host", "is_there", "local"),
    [
        ("auto", HERE, True, True),
        ("auto", HERE, False, False),
        ("auto", "elsewhere", True, False),
        ("shared_memory", "elsewhere", False, True),
        ("tcp", HERE, True, False),
    ],
)
def test_shared_memory_is_read_on_one_host_or_by_the_config(
    tmp_path: Path, transport: str, host: str, is_there: bool, local: bool
) -> None:
    receiver = WeightsReceiver(config(transport), "generator-0")
    directory = tmp_path if is_there else tmp_path / "none"
    assert receiver.is_local(WeightsSource(1, host, str(directory), "")) is local


def test_a_version_is_read_by_its_label_and_digest(tmp_path: Path) -> None:
    made = ring(tmp_path)
    receiver = WeightsReceiver(config("auto"), "generator-0")
    digests = [publish(made, Label(1, n), n + 1) for n in range(2)]
    for n, given in ((0, digests[0]), (1, None), (0, None)):
        pulled = receiver.pull(source(made), Label(1, n), given)
        assert pulled is not None and (pulled.digest, pulled.probe) == (digests[n], bytes([n + 1]))
        assert pulled.tensors["w"].shape == (2, 2) and pulled.tensors["b"].tolist() == [n + 1] * 3
    assert receiver.epoch == 1 and list(tmp_path.rglob("pin_generator-0"))
    reader = receiver.client
    assert isinstance(reader, RingReader)
    # gone, or other bytes than were announced: not now, and the ring stays open
    assert receiver.pull(source(made), Label(1, 7), None) is None
    assert receiver.pull(source(made), Label(1, 0), digests[1]) is None
    assert receiver.client is reader
    assert receiver.collect_metrics() == {"link/fetch_s": 0.0, "link/fetched_mb": 0.0}
    receiver.close()
    assert receiver.client is None and receiver.epoch == -1
    made.close()


def test_the_ring_of_the_next_epoch_or_a_replaced_one_is_opened_anew(tmp_path: Path) -> None:
    first, second = ring(tmp_path), ring(tmp_path, 2)
    publish(first, Label(1, 0), 1)
    publish(second, Label(2, 0), 2)
    receiver = WeightsReceiver(config("auto"), "generator-0")
    assert receiver.pull(source(first), Label(1, 0), None) is not None
    old = receiver.client
    pulled = receiver.pull(source(second, 2), Label(2, 0), None)
    assert pulled is not None and pulled.tensors["b"].tolist() == [2] * 3
    assert receiver.client is not old and receiver.epoch == 2
    # the learner comes back in the same directory: one pull finds nothing, the next the new ring
    second.close()
    third = ring(tmp_path, 2)
    publish(third, Label(2, 1), 3)
    assert receiver.pull(source(third, 2), Label(2, 1), None) is None
    assert receiver.client is None and receiver.epoch == -1
    pulled = receiver.pull(source(third, 2), Label(2, 1), None)
    assert pulled is not None and pulled.tensors["b"].tolist() == [3] * 3
    receiver.close()
    for each in (first, third):
        each.close()


class Client:
    """A client of a transport: what it was asked, and what it answers with; None: it breaks.

    flat: its own copy of the weights, as of a pair of processes under nccl.
    """

    def __init__(self, answer: str | None, flat: torch.Tensor | None = None) -> None:
        self.answer, self.flat = answer, flat
        self.probe = b"p"
        self.bytes_received = 500_000 if flat is None else 0
        self.asked: list[tuple[Label, str]] = []
        self.closed = 0
        self.is_broken = False

    def fetch_layout(self) -> Rows:
        return ROWS

    def fetch(self, label: Label, digest: str, into: memoryview) -> str:
        self.asked.append((label, digest))
        if self.flat is None:
            self.bytes_received += 2_000_000
            into[:] = bytes([7]) * len(into)
        if self.answer is None:
            self.is_broken = self.flat is not None
            raise PeerUnreachable("gone")
        return self.answer

    def close(self) -> None:
        self.closed += 1


def test_over_a_socket_failures_are_timed_and_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    client, asked, now = Client("d"), [], iter([10.0, 12.5, 20.0, 21.0, 30.0, 31.5])
    settings, away = config("tcp"), WeightsSource(3, "away", "", "tcp://away:1")

    def connect(*given: Any) -> Client:
        asked.append(given)
        return client

    monkeypatch.setattr(
        generator.weight_transport,
        "import_transport",
        lambda name: SimpleNamespace(connect=connect),
    )
    monkeypatch.setattr(generator.time, "monotonic", lambda: next(now))
    receiver = WeightsReceiver(settings, "generator-0")
    pulled = receiver.pull(away, Label(3, 1), None)
    assert asked == [(settings, away, "generator-0")] and receiver.epoch == 3
    assert pulled is not None and (pulled.digest, pulled.probe) == ("d", b"p")
    assert pulled.tensors["b"].tolist() == [7] * 3
    assert receiver.collect_metrics() == {"link/fetch_s": 2.5, "link/fetched_mb": 2.0}
    assert receiver.client is client and client.bytes_received == 2_500_000
    client.answer = ""
    assert receiver.pull(away, Label(3, 2), "e") is None
    assert client.asked == [(Label(3, 1), ""), (Label(3, 2), "e")] and len(asked) == 1
    client.answer = None
    with pytest.raises(PeerUnreachable):
        receiver.pull(away, Label(3, 3), "e")
    assert receiver.collect_metrics() == {"link/fetch_s": 5.0, "link/fetched_mb": 6.0}
    receiver.close()
    receiver.close()
    assert client.closed == 1 and receiver.client is None


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_a_broken_pair_is_opened_anew(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    flat = torch.from_numpy(np.arange(SIZE, dtype=np.uint8))
    pairs, asked = [Client("d", flat), Client("d", flat)], []
    settings, away = config(transport), WeightsSource(3, "away", "", "tcp://away:1")

    def connect(*given: Any) -> Client:
        asked.append(given)
        return pairs[len(asked) - 1]

    monkeypatch.setattr(gpu_pairs, "connect", connect)
    receiver = WeightsReceiver(settings, "generator-0")
    pulled = receiver.pull(away, Label(3, 1), None)
    assert pulled is not None and (pulled.digest, pulled.probe) == ("d", b"p")
    assert pulled.tensors["b"].tolist() == [16, 17, 18]
    pairs[0].answer = ""
    assert receiver.pull(away, Label(3, 2), "e") is None and receiver.client is pairs[0]
    pairs[0].answer = None
    with pytest.raises(PeerUnreachable):
        receiver.pull(away, Label(3, 3), None)
    assert pairs[0].closed == 1 and receiver.client is None and receiver.epoch == -1
    assert receiver.pull(away, Label(3, 4), None) is not None and receiver.client is pairs[1]
    assert asked == [(settings, away, "generator-0")] * 2
    assert pairs[0].asked == [(Label(3, 1), ""), (Label(3, 2), "e"), (Label(3, 3), "")]
    receiver.close()
    assert pairs[1].closed == 1
