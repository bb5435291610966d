"""More connections than descriptors: the buffer's socket closes them all; its peers come again."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_kit import ENV, ROOT, until

from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import RunStatus, StatusRequest
from asyncrl.transport import connection_guard
from asyncrl.transport.sockets import PeerSocket

ALLOWED = 400
SERVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({ALLOWED}, {ALLOWED}))
from asyncrl.contract.messages import RunStatus
from asyncrl.transport.sockets import BufferSocket
buffer = BufferSocket(sys.argv[1])
print(buffer.address, flush=True)
while True:
    if (got := buffer.recv(0.02)) is not None:
        closed = buffer.connections.closings
        buffer.send(got[0], RunStatus("r", closed, 1, 1, {{}}, {{}}, [], {{}}, False, "", 0))
"""


def closed(peer: PeerSocket) -> int:
    """How often the server says that it has closed all; it is asked until it answers.  What it says
    may be an answer to an earlier question."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        peer.send(StatusRequest())
        reply = peer.recv(0.5)
        if isinstance(reply, RunStatus):
            return reply.committed
    raise AssertionError("the server does not answer any more")


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_flood_of_connections_ends_nothing(kind: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 's'}" if kind == "ipc" else "tcp://127.0.0.1:*"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, address],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    peer = PeerSocket(address)
    flood: list[socket.socket] = []
    try:
        assert closed(peer) == 0
        for _ in range(2 * ALLOWED // 20):
            for _ in range(20):
                with contextlib.suppress(OSError):  # refused while all are being closed
                    flood.append(connected(address))
            if closed_now(address):
                break
        assert closed_now(address) >= 1 and server.poll() is None and len(flood) < ALLOWED
        until(lambda: closed(peer))  # who was there before comes again
    finally:
        for one in flood:
            one.close()
        peer.close()
        server.kill()
        server.wait()


def closed_now(address: str) -> int:
    """The same, asked by one who has asked nothing before."""
    peer = PeerSocket(address)
    try:
        return closed(peer)
    finally:
        peer.close()


def connected(address: str) -> socket.socket:
    """A connection that says nothing."""
    if address.startswith("ipc://"):
        one = socket.socket(socket.AF_UNIX)
        one.connect(address.removeprefix("ipc://"))
    else:
        host, port = address.removeprefix("tcp://").split(":")
        one = socket.create_connection((host, int(port)))
    return one


class Bound:
    """A listening socket whose address comes free after some tries."""

    def __init__(self, tries: int) -> None:
        self.tries = tries
        self.said: list[str] = []

    def unbind(self, address: str) -> None:
        self.said.append(f"unbind {address}")

    def bind(self, address: str) -> None:
        self.said.append(f"bind {address}")
        self.tries -= 1
        if self.tries >= 0:
            raise connection_guard.zmq.ZMQError(98)


def test_an_address_that_stays_taken_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    free = 0
    monkeypatch.setattr(connection_guard.time, "sleep", slept.append)
    monkeypatch.setattr(connection_guard, "next_descriptor", lambda: free)
    bound = Bound(2)
    watched = connection_guard.ConnectionGuard(bound)
    again, address = "bind tcp://127.0.0.1:1", "tcp://127.0.0.1:1"
    free = watched.most - 1
    assert not watched.close_excess(address) and not bound.said
    for number in range(1, 5):
        bound.tries = 2
        opened: Callable[[], Any] = iter([watched.most] * 3 + [0] * 9).__next__
        monkeypatch.setattr(connection_guard, "next_descriptor", opened)
        assert watched.close_excess(address) and watched.closings == number
    assert bound.said == [f"un{again}", *[again] * 3] * 4 and slept == [0.01] * 5 * 4
    line = f"too many connections at {address}: closed all; real peers reconnect\n"
    assert capsys.readouterr() == ("", 3 * line)
    monkeypatch.setattr(connection_guard, "next_descriptor", iter([10**6, *[0] * 10**5]).__next__)
    bound.said.clear()
    bound.tries = 6000
    with pytest.raises(AsyncrlError, match="cannot be opened again"):
        watched.close_excess(address)
    assert watched.closings == 5 and bound.said == [f"un{again}", *[again] * 6000]
    assert watched.close_excess(address) and watched.closings == 5
    assert bound.said[6001:] == [again], "it is not bound: it is only opened"


def test_the_next_descriptor_is_the_lowest_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    assert [connection_guard.next_descriptor() for _ in range(2)] == [lowest] * 2
    monkeypatch.setattr(connection_guard.os, "devnull", "/nowhere/at/all")
    assert connection_guard.next_descriptor() == sys.maxsize


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, [(resource.RLIMIT_NOFILE, (4096, 4096))]),
        (1024, resource.RLIM_INFINITY, [(resource.RLIMIT_NOFILE, (65536, resource.RLIM_INFINITY))]),
        (4096, 4096, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_as_many_files_as_the_system_permits(
    soft: int, hard: int, raised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: (soft, hard)}.get)
    monkeypatch.setattr(resource, "setrlimit", lambda *words: asked.append(words))
    monkeypatch.setattr(connection_guard, "next_descriptor", lambda: 96)
    guard = connection_guard.ConnectionGuard(None)
    assert asked == raised and guard.most == (96 + 2000 if hard == 4096 else 96 + 6000)


def test_a_process_that_may_open_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (94, 94))
    for used in (29, 30):
        monkeypatch.setattr(connection_guard, "next_descriptor", lambda used=used: used)
        assert connection_guard.ConnectionGuard(None).most == used + 32
    monkeypatch.setattr(connection_guard, "next_descriptor", lambda: 31)
    with pytest.raises(AsyncrlError) as error:
        connection_guard.ConnectionGuard(None)
    said = "this process may open 94 files and has 31: raise the limit (`ulimit -n`)"
    assert str(error.value) == said
