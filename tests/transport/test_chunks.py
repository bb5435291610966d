"""The chunk server among peers that are broken, greedy or slow: bounded, counted, and the rest goes
on."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import chain, repeat
from multiprocessing.connection import wait  # select.select knows no descriptor above 1023
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import psutil
import pytest
import xxhash
import zmq
from process_kit import ROOT, until

from asyncrl.contract.errors import AsyncrlError, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.transport import chunks
from asyncrl.transport.chunks import CHUNK_BYTES, ChunkClient, ChunkServer
from asyncrl.transport.ring import WeightRing

SIZE = 8 * CHUNK_BYTES
LABEL = Label(1, 3)
WAIT_S = 600.0


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[WeightRing]:
    made = WeightRing(tmp_path / "ring", SIZE, 2, [("w", "uint8", [SIZE], 0, SIZE)], 1)

    def fill(into: memoryview) -> None:
        into[:] = bytes(range(256)) * (SIZE // 256)

    made.write(LABEL, fill)
    yield made
    made.close()


@pytest.fixture
def server(ring: WeightRing) -> Iterator[ChunkServer]:
    made = ChunkServer("tcp://127.0.0.1:*", ring.rows, ring.read_part)
    yield made
    made.close()


class Peer:
    def __init__(self, server: ChunkServer) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 1 << 16)
        self.socket.connect(server.address)

    def ask(self, *parts: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(list(parts)))

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def fetched(server: ChunkServer, ring: WeightRing) -> None:
    client = ChunkClient(server.address, WAIT_S)
    try:
        assert [list(row) for row in client.fetch_layout()] == [list(row) for row in ring.rows]
        digest = client.fetch(LABEL, "", memoryview(bytearray(SIZE)))
        assert digest == xxhash.xxh3_64_hexdigest(bytes(range(256)) * (SIZE // 256))
    finally:
        client.close()


ASK = msgspec.msgpack.encode(chunks._ChunkRequest(LABEL, "", 0, 16))
NO_ASKS: list[list[bytes]] = [
    [b"a", b"b", ASK],
    [ASK, ASK],
    [b""],
    [b"\xd9\x04\xff\xfe\xfd\xfc"],
    [b"\x91" * 4000],
    [b"\x81" * 4000],
    [ASK[:-1]],
    [ASK.replace(b"offset", b"of\xff\xfeet")],
    [b"\xc1"],
    [msgspec.msgpack.encode({"label": [1], "digest": "", "offset": 0, "size": 1})],
    [b"\xdf\xff\xff\xff\xff"],
    [struct.pack(">BI", 0xC6, 2**32 - 1)],
]


def test_what_is_no_ask_is_counted(server: ChunkServer, ring: WeightRing) -> None:
    peer = Peer(server)
    for frames in NO_ASKS:
        peer.socket.send_multipart(frames)
    until(lambda: server.refused == len(NO_ASKS))
    assert server.answered == 0 and server.thread.is_alive()
    fetched(server, ring)
    peer.close()


def test_an_address_that_cannot_be_opened_again_is_told_and_the_rest_goes_on(
    server: ChunkServer, ring: WeightRing, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    close = Mock(side_effect=chain([AsyncrlError("taken\t"), True], repeat(False)))
    monkeypatch.setattr(server.connections, "close_excess", close)
    until(lambda: close.call_count > 2)
    fetched(server, ring)
    close.assert_called_with(server.address)
    assert capsys.readouterr().err == "taken\\t\n"


def test_a_large_ask_costs_its_connection(server: ChunkServer, ring: WeightRing) -> None:
    peer = Peer(server)
    peer.socket.send(b"\0" * (chunks.REQUEST_BYTES + 1))
    fetched(server, ring)
    assert server.refused == 0  # nothing of it came as far as here
    peer.close()


@pytest.mark.parametrize("size", [-5000, -1, 0, 1, 2**40, -(2**62)])
@pytest.mark.parametrize("offset", [0, SIZE - 5, SIZE, SIZE + 1, 2**62])
def test_an_answer_is_a_chunk_at_most(
    server: ChunkServer, ring: WeightRing, size: int, offset: int
) -> None:
    peer = Peer(server)
    peer.socket.send(msgspec.msgpack.encode(chunks._ChunkRequest(LABEL, "", offset, size)))
    assert peer.socket.poll(int(WAIT_S * 1000))
    answer = msgspec.msgpack.decode(peer.socket.recv(), type=chunks._ChunkReply)
    assert len(answer.data) == max(0, min(size, CHUNK_BYTES, SIZE - offset))
    peer.close()


def test_one_who_asks_and_does_not_read_holds_little(server: ChunkServer, ring: WeightRing) -> None:
    asks = 300
    process = psutil.Process()
    fetched(server, ring)
    answered, before = server.answered, process.memory_info().rss
    slow = Peer(server)
    ask = msgspec.msgpack.encode(chunks._ChunkRequest(LABEL, "", 0, CHUNK_BYTES))
    for _ in range(asks):
        slow.socket.send(ask)
    until(lambda: server.answered == answered + asks)
    grown = process.memory_info().rss - before
    fetched(server, ring)
    slow.close()
    assert grown < asks * CHUNK_BYTES / 4, f"{grown / 2**20:.0f} MiB"


def test_a_break_costs_no_chunk_twice(server: ChunkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ChunkClient(server.address, WAIT_S)
    digest = first.fetch(LABEL, "", memoryview(bytearray(SIZE)))
    first.close()
    client = ChunkClient(server.address, WAIT_S)
    into = bytearray(SIZE)
    receive = client._receive
    answers = iter([True, True, True, False])

    def breaks() -> Any:
        if not next(answers, True):
            raise PeerUnreachable("the cable")
        return receive()

    monkeypatch.setattr(client, "_receive", breaks)
    try:
        with pytest.raises(PeerUnreachable, match="the cable"):
            client.fetch(LABEL, digest, memoryview(into))
        assert client.fetch(LABEL, digest, memoryview(into)) == digest
        assert client.bytes_received == SIZE and into == bytes(range(256)) * (SIZE // 256)
        # another version begins at its beginning, and so does one that was complete
        assert client.fetch(LABEL, digest, memoryview(into)) == digest
        answers = iter([True, False])
        with pytest.raises(PeerUnreachable):
            client.fetch(LABEL, digest, memoryview(into))
        assert client.fetch(LABEL, "", memoryview(into)) == digest
        assert client.bytes_received == 3 * SIZE + CHUNK_BYTES
    finally:
        client.close()


def test_a_connection_that_is_cut_is_not_waited_for(server: ChunkServer) -> None:
    """The rest comes over the next one; the answers that were under way never would."""
    direct = ChunkClient(server.address, WAIT_S)
    digest = direct.fetch(LABEL, "", memoryview(bytearray(SIZE)))
    direct.close()
    port = int(server.address.rpartition(":")[2])
    door = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def relay() -> None:
        most = 3 * CHUNK_BYTES + 99
        while not ended.is_set():
            here, _ = door.accept()
            there = socket.create_connection(("127.0.0.1", port))
            carried = 0
            with contextlib.suppress(OSError):  # the client's old socket may come again, and go
                while carried < most:
                    for wire in wait([here, there]):
                        data = wire.recv(1 << 16)
                        (here if wire is there else there).sendall(data)
                        carried += len(data) if wire is there else 0
                        carried += 0 if data else most
            if most < SIZE:  # what has not come by then goes with the connection
                until(lambda: client.bytes_received > 0)
            here.close()
            there.close()
            most = 1 << 40

    thread = threading.Thread(target=relay)
    thread.start()
    client = ChunkClient(f"tcp://127.0.0.1:{door.getsockname()[1]}", WAIT_S)
    into = bytearray(SIZE)
    try:
        with pytest.raises(PeerUnreachable, match="was cut"):
            client.fetch(LABEL, digest, memoryview(into))
        assert 0 < client.bytes_received < SIZE
        assert client.fetch(LABEL, digest, memoryview(into)) == digest
        assert client.bytes_received == SIZE and into == bytes(range(256)) * (SIZE // 256)
    finally:
        client.close()
        ended.set()
        socket.create_connection(door.getsockname()).close()
        thread.join()
        door.close()


RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    # last: benchmarks/learner.py must not hide the package
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from lib import kept_pages

    return kept_pages


def test_a_kept_page_names_no_directory_of_the_machine(kept, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = tmp_path / "report.html"
    made.write_text(f"ran {tmp_path}/r in {tmp_path.parent}/x")
    kept.keep(made, tmp_path / "kept.html", {tmp_path: "runs", tmp_path.parent: "."})
    assert (tmp_path / "kept.html").read_text() == "ran runs/r in ./x"


def test_no_file_beside_the_results_is_above_a_megabyte() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "benchmarks/results"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    files = [ROOT / name for name in listed] or [p for p in RESULTS.iterdir() if p.suffix != ".js"]
    assert [path.name for path in files if path.stat().st_size > 2**20] == []
