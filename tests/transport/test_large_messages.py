"""Messages of any size through the control sockets: small ones are copied, large ones leave from
where they were encoded and are read where they came in."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.contract import messages as m
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.versions import Label
from asyncrl.transport import sockets
from asyncrl.transport.sockets import IN_PLACE_BYTES, BufferSocket, PeerSocket


def answer(number: int, size: int) -> m.Trajectory:
    tokens = bytes([number % 251]) * size
    label = Label(1, 0)
    spans = [m.VersionSpan(label, "", 0, size // 4, label)]
    return m.Trajectory(
        number, 0, 1, b"", tokens, tokens, b"\1" * (size // 4), spans, 0.0, {}, "stop", 1.0
    )


@pytest.mark.parametrize("curve", [False, True])
@pytest.mark.parametrize("size", [64, IN_PLACE_BYTES])
def test_what_is_sent_is_what_comes_though_its_sender_has_forgotten_it(
    size: int, curve: bool, tmp_path: Path
) -> None:
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
    assert [reply.samples[0] for reply in replies] == [answer(n, size) for n in range(6)]
    assert spare
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
