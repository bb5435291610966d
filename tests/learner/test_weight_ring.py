"""Weights through the ring: whole or not at all, whatever happens to a reader."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from shutil import rmtree

import psutil
import pytest
import torch
from process_kit import ENV, ROOT, until

from actors.generator import WeightsReceiver
from asyncrl.config import load
from asyncrl.contract.errors import AsyncrlError, DamagedDataError
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.transport import ring as weight_ring
from asyncrl.transport.chunks import ChunkClient, ChunkServer
from asyncrl.transport.ring import RingReader, WeightRing

ROWS: weight_ring.Rows = [("w", "uint8", [1 << 20], 0, 1 << 20)]
SIZE = 1 << 20


def ring(path: Path, slots: int = 2, **more: float) -> WeightRing:
    return WeightRing(path / "ring", SIZE, slots, ROWS, 1, **more)


def fill(value: int):
    def write(buffer: memoryview) -> None:
        buffer[:] = bytes([value]) * len(buffer)

    return write


def test_a_version_comes_out_as_it_went_in(tmp_path: Path) -> None:
    r = ring(tmp_path, 3)
    digests = {Label(1, n): r.write(Label(1, n), fill(n)) for n in range(5)}
    reader, into = RingReader(tmp_path / "ring", "a"), bytearray(SIZE)
    # the three newest
    assert reader.list_labels() == {Label(1, n): digests[Label(1, n)] for n in (2, 3, 4)}
    assert reader.read(Label(1, 3), digests[Label(1, 3)], memoryview(into))
    assert into == bytes([3]) * SIZE
    assert not reader.read(Label(1, 0), digests[Label(1, 0)], memoryview(into))
    assert not reader.read(Label(1, 3), digests[Label(1, 4)], memoryview(into))
    reader.close()
    r.close()
    assert not (tmp_path / "ring").exists()


def test_a_reader_denied_shared_memory_gets_every_byte_over_the_socket(tmp_path: Path) -> None:
    """As on another host: the directory is not there for it."""
    model = policy.build_model(tmp_path / "m", "abcdefgh", hidden=256, layers=3)
    layout = policy.build_manifest(model)
    r = WeightRing(tmp_path / "ring", policy.count_flat_bytes(layout), 2, layout, 1)
    server = ChunkServer("tcp://127.0.0.1:0", layout, r.read_part)
    raw = {"model": {"path": "m"}, "task": {"name": "sort"}, "wires": {"connect_s": 600.0}}
    receiver = WeightsReceiver(load.build(raw), "generator-0")
    denied = WeightsSource(1, "another-host", str(tmp_path / "not-there"), server.address)
    for n in range(3):
        with torch.no_grad():
            next(model.hf.parameters()).add_(n)
        digest = r.write(Label(1, n), lambda buffer: policy.write_flat(model, buffer))
        got = receiver.pull(denied, Label(1, n), digest)
        assert got is not None and got[1] == digest and isinstance(receiver.client, ChunkClient)
        for name, tensor in policy.list_named_weights(model):
            assert (got[0][name] == tensor).all(), name
        whole = (n + 1) * policy.count_flat_bytes(layout)
        assert whole <= receiver.client.bytes_received < whole + 100_000
    told, bytes_of_weights = receiver.collect_metrics(), 3 * policy.count_flat_bytes(layout)
    assert told["link/fetched_mb"] == bytes_of_weights / 1e6 and told["link/fetch_s"] > 0
    assert receiver.pull(denied, Label(1, 0), "gone") is None
    receiver.close()
    assert receiver.collect_metrics()["link/fetch_s"] > told["link/fetch_s"]
    server.close()
    r.close()


def test_kept_versions_stay_and_a_full_ring_names_its_holder(tmp_path: Path) -> None:
    r = ring(tmp_path, 2, most=3, wait_s=0.05)
    for n in range(4):
        r.write(Label(1, n), fill(n), keep=[Label(1, 0)])
    assert Label(1, 0) in r.list_labels()
    reader = RingReader(tmp_path / "ring", "generator-7")
    kept = list(r.list_labels())
    with pytest.raises(AsyncrlError, match=r"weights\.slots"):
        r.write(Label(1, 9), fill(9), keep=kept)
        r.write(Label(1, 10), fill(9), keep=[*kept, Label(1, 9)])
        r.write(Label(1, 11), fill(9), keep=[*kept, Label(1, 9), Label(1, 10)])
    reader.close()


def test_a_torn_copy_is_refused(tmp_path: Path) -> None:
    r = ring(tmp_path)
    digest = r.write(Label(1, 0), fill(1))
    with memoryview(r.slots[0]) as view:
        view[weight_ring.HEADER + 77] = 9
    reader = RingReader(tmp_path / "ring", "a")
    assert not reader.read(Label(1, 0), digest, memoryview(bytearray(SIZE)))


READER = (Path(__file__).parents[1] / "data" / "programs" / "weight_ring_reader.txt").read_text()


def test_stopped_readers_see_no_torn_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stands still whenever it has copied half; every other time its slot is overwritten
    meanwhile, as its pin is too old."""
    r, end = ring(tmp_path, 2, wait_s=600), tmp_path / "end"
    r.write(Label(1, 0), fill(0))
    argv = [sys.executable, "-c", READER, str(tmp_path / "ring"), str(end)]
    with subprocess.Popen(argv, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for n in range(1, 13):
                stopped(process.pid)
                monkeypatch.setattr(weight_ring, "PIN_S", 600.0)
                assert list(r.list_pins().values()) == ["slow"]
                monkeypatch.setattr(weight_ring, "PIN_S", 0.0)
                for extra in range(3 * (n % 2)):  # more versions than slots
                    r.write(Label(1, 3 * n + extra), fill((3 * n + extra) % 251))
                os.kill(process.pid, signal.SIGCONT)
                assert process.stdout.readline().strip() == ("given up" if n % 2 else "whole")
        finally:
            process.kill()


def stopped(pid: int) -> None:
    """Wait until the process has stopped itself."""
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def test_chunks_over_tcp_without_shared_memory(tmp_path: Path) -> None:
    r = ring(tmp_path, 2)
    digest = r.write(Label(1, 0), fill(7))
    server = ChunkServer("tcp://127.0.0.1:0", ROWS, r.read_part)
    client = ChunkClient(server.address, 600)
    try:
        assert client.fetch_layout() == ROWS
        before, into = client.bytes_received, bytearray(SIZE)
        assert client.fetch(Label(1, 0), digest, memoryview(into)) == digest
        assert into == bytes([7]) * SIZE and client.bytes_received - before == SIZE
        assert client.fetch(Label(1, 5), "", memoryview(into)) == ""
        # the connection is still in step
        assert client.fetch(Label(1, 0), "", memoryview(into)) == digest
    finally:
        client.close()
        server.close()


def test_a_removed_ring_is_made_anew_with_all_that_it_held(tmp_path: Path) -> None:
    """Who mapped the old files finds that nothing new comes there, and opens the new ones; who
    begins finds the newest version."""
    config = load.build({"model": {"path": "m"}, "task": {"name": "sort"}})
    r = WeightRing(tmp_path / "ring", SIZE, 3, [("w", "float32", [SIZE // 4], 0, SIZE)], 1)
    digests = {n: r.write(Label(1, n), fill(n), probe=bytes([n])) for n in range(2)}
    before = WeightsReceiver(config, "before")
    source = WeightsSource(1, socket.gethostname(), str(tmp_path / "ring"), "")
    assert before.pull(source, Label(1, 1), digests[1]) is not None and not r.recreate()
    rmtree(tmp_path / "ring")
    with pytest.raises(FileNotFoundError):
        weight_ring._map(tmp_path / "none", SIZE, create=False)
    assert before.pull(source, Label(1, 1), digests[1]) is not None  # its maps hold what they held
    assert r.recreate() and not r.recreate()
    assert r.list_labels() == {Label(1, n): digests[n] for n in range(2)}
    digests[2] = r.write(Label(1, 2), fill(2))
    assert before.pull(source, Label(1, 2), digests[2]) is None  # and lets go of them
    for name in ("before", "after"):
        reader = before if name == "before" else WeightsReceiver(config, name)
        for n in (2, 1):
            got = reader.pull(source, Label(1, n), digests[n])
            assert got is not None and got[1] == digests[n]
            assert got[2] == (b"\x01" if n == 1 else b"")
        reader.close()
    r.close()


def test_a_ring_that_cannot_be_made_anew_says_so(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    r = ring(tmp_path / "shm")
    rmtree(tmp_path / "shm")
    (tmp_path / "shm").write_text("something else")
    said = f"^the weights' directory {r.directory} was removed and cannot be created again: "
    with pytest.raises(AsyncrlError, match=said + r"\[Errno \d+\] \w+"):
        r.recreate()


def test_parts_of_a_version_end_with_it(tmp_path: Path) -> None:
    r = ring(tmp_path)
    probe = bytes(range(8))

    def write(buffer: memoryview) -> None:
        buffer[:] = bytes(n % 251 for n in range(SIZE))

    digest = r.write(Label(1, 0), write, probe=probe)
    whole = bytes(n % 251 for n in range(SIZE))
    assert r.read_part(Label(1, 0), digest, 0, SIZE) == (digest, whole, probe)
    assert r.read_part(Label(1, 0), "", 5, 3) == (digest, whole[5:8], probe)
    assert r.read_part(Label(1, 0), digest, SIZE - 2, 9) == (digest, whole[-2:], probe)
    gone = ("", b"", b"")
    assert r.read_part(Label(1, 0), "other", 0, 9) == gone == r.read_part(Label(1, 1), "", 0, 9)
    weight_ring._SLOT.pack_into(r.slots[0], 0, 3, 1, 0, 0)  # it is being written
    assert r.read_part(Label(1, 0), "", 0, 9) == gone
    reader = RingReader(r.directory, "a")
    assert reader.list_labels() == {} and r.list_labels().keys() == {Label(1, 0)}
    assert not reader.read(Label(1, 0), digest, memoryview(bytearray(SIZE)))
    reader.close()
    r.close()


def test_live_readers_hold_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = ring(tmp_path, 3)
    now = time.monotonic()
    for name, slot, beat in (("a", 0, now), ("b", 1, now - weight_ring.PIN_S - 1), ("c", -1, now)):
        pin = weight_ring._PIN.pack(slot, beat)
        (r.directory / f"pin_{name}").write_bytes(pin + bytes(16))
    (r.directory / "pin_torn").write_bytes(b"x")
    (r.directory / "pin_gone").symlink_to(tmp_path / "nothing")
    assert r.list_pins() == {0: "a"}
    r.close()


def test_a_full_ring_says_who_holds_it_and_what_to_raise(tmp_path: Path) -> None:
    r = ring(tmp_path, 2, most=2, wait_s=0.05)
    for n in range(2):
        r.write(Label(1, n), fill(n))
    message = "no weight slot has been free for 0.05 s: held by {}; raise weights.slots (2)"
    with pytest.raises(AsyncrlError) as error:
        r.write(Label(1, 2), fill(2), keep=[Label(1, 0)])
    assert str(error.value) == message.format("evaluation")
    for slot, name in enumerate("ba"):
        pin = weight_ring._PIN.pack(slot, time.monotonic() + 3600)
        (r.directory / f"pin_{name}").write_bytes(pin + bytes(16))
    with pytest.raises(AsyncrlError) as error:
        r.write(Label(1, 2), fill(2))
    assert str(error.value) == message.format("a, b") and len(r.slots) == 2
    r.close(remove=False)
    assert r.directory.exists() and r.slots == []


def test_without_room_for_slots_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_ring, "_map", full)
    with pytest.raises(AsyncrlError) as error:
        ring(tmp_path, 3)
    assert str(error.value) == (
        f"no room for 3 weight slots of 1.0 MiB in {tmp_path / 'ring'}: [Errno 28] No space left "
        "on device; lower weights.slots"
    )


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    r = ring(tmp_path)
    (r.directory / "manifest").write_bytes(b"\xc1")
    said = rf"^{r.directory}/manifest is not a manifest of wei"
    with pytest.raises(DamagedDataError, match=said):
        RingReader(r.directory, "a")
    r.close()
