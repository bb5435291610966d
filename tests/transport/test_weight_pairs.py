"""Weights through groups of two, Gloo between real processes: the path that NCCL takes between
GPUs."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait  # select.select knows no descriptor above 1023
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from process_kit import ENV, ROOT

from asyncrl.config import load
from asyncrl.contract.errors import ConfigError, PeerUnreachable
from asyncrl.contract.versions import Label
from asyncrl.transport import gpu_pairs
from asyncrl.transport import ring as weight_ring
from asyncrl.transport.gpu_pairs import PairClient, PairServer, compute_mark

SIZE, DEADLINE_S = 1 << 20, 600.0
ROWS: weight_ring.Rows = [("w", "uint8", [SIZE], 0, SIZE)]

# Generators, forked from one process that has imported everything: "fetch NUMBER DIGEST", or ask
# for NUMBER and then "stall" or "die".
GENERATORS = """
import os, signal, sys, time
import msgspec, torch, xxhash
from asyncrl.transport import gpu_pairs as weight_pairs
from asyncrl.contract.messages import WeightsSource
from asyncrl.config import load
from asyncrl.contract.versions import Label
from actors.generator import WeightsReceiver
torch.set_num_threads(1)
config = load.build({"model": {"path": "m"}, "task": {"name": "sort"}, "weights": {"transport": "gloo"}, "wires": {"connect_s": 600.0}})
for n, pair in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        orders, answers = (os.fdopen(int(fd), mode) for fd, mode in zip(pair.split(":"), "rw"))
        print(os.getpid(), file=answers, flush=True)
        receiver = WeightsReceiver(config, f"generator-{n}")
        for line in orders:
            what, source, number, digest = line.split(" ", 3)
            source, label, digest = msgspec.json.decode(source, type=WeightsSource), Label(1, int(number)), digest.strip() or None
            if what == "fetch":
                got = receiver.pull(source, label, digest)
                print("none" if got is None else f"{got[1]} {xxhash.xxh3_64_hexdigest(got[0]['w'].numpy())} {got[2].decode()}", file=answers, flush=True)
                continue
            receiver.open(source)
            receiver.pair.pair.write(weight_pairs._PairRequest(label, ""))
            receiver.pair.pair.read(weight_pairs._PairReply)
            print("asked", file=answers, flush=True)
            time.sleep(1000) if what == "stall" else os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
for _ in sys.argv[1:]:
    os.wait()
"""  # noqa: E501


class Generator:
    pid = 0

    def __init__(self) -> None:
        self.theirs_in, mine_out = os.pipe()
        mine_in, self.theirs_out = os.pipe()
        self.orders, self.answers = os.fdopen(mine_out, "w"), os.fdopen(mine_in)

    def order(self, what: str, source: Any, number: int, digest: str = "") -> None:
        print(
            what, msgspec.json.encode(source).decode(), number, digest, file=self.orders, flush=True
        )

    def answer(self) -> str:
        assert wait([self.answers], 600), "no answer"
        return self.answers.readline().strip()


@pytest.fixture
def generators() -> Iterator[list[Generator]]:
    made = [Generator() for _ in range(4)]
    fds = [fd for g in made for fd in (g.theirs_in, g.theirs_out)]
    argv = [sys.executable, "-c", GENERATORS, *[f"{g.theirs_in}:{g.theirs_out}" for g in made]]
    process = subprocess.Popen(argv, cwd=ROOT, env=ENV, pass_fds=fds)
    for fd in fds:
        os.close(fd)
    for each in made:
        each.pid = int(each.answer())
    yield made
    for pid in [*(each.pid for each in made), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def left(*pairs: int) -> None:
    end = time.monotonic() + 600
    while (
        alive := {t.name for t in threading.enumerate() if t.name.startswith("weight-pair-")}
    ) != {f"weight-pair-{number}" for number in pairs}:
        assert time.monotonic() < end, f"threads that wait: {alive}, not those of {pairs}"
        time.sleep(0.05)


def fill(value: int) -> Callable[[memoryview], None]:
    def write(buffer: memoryview) -> None:
        buffer[:] = bytes([value]) * SIZE

    return write


def test_each_generator_has_a_pair_of_its_own_and_none_holds_up_the_others(
    tmp_path: Path, generators: list[Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed between the answer and the bytes, one stands still there for good: the learner
    publishes on, the third and a fourth receive.  A thread of the learner ends with its generator,
    or at the deadline."""
    from asyncrl.contract.messages import WeightsSource

    move = gpu_pairs.GpuPair.transfer
    soon = threading.Event()

    def moved(self: gpu_pairs.GpuPair, flat: torch.Tensor) -> None:
        if soon.is_set():
            self.deadline = timedelta(seconds=1)
        move(self, flat)

    monkeypatch.setattr(gpu_pairs.GpuPair, "transfer", moved)
    ring = weight_ring.WeightRing(tmp_path / "ring", SIZE, 2, ROWS, 1)
    server = PairServer(tmp_path / "ring", "gloo", ROWS, DEADLINE_S)
    source = WeightsSource(1, socket.gethostname(), str(tmp_path / "ring"), server.address)
    good, killed, still, late = generators
    digests = []
    for n in range(6):
        digests.append(ring.write(Label(1, n), fill(n), probe=b"probe%d" % n))
        if n == 1:
            killed.order("die", source, 1)
            assert killed.answer() == "asked"
            still.order("stall", source, 1)
            assert still.answer() == "asked"
        for g in [good, late] if n > 2 else [good]:
            g.order("fetch", source, n, digests[-1] if n % 2 else "")
            found = g.answer()
            assert found == f"{digests[n]} {xxhash.xxh3_64_hexdigest(bytes([n]) * SIZE)} probe{n}"
    good.order("fetch", source, 0, digests[0])
    assert good.answer() == "none"  # two slots: it has gone
    left(1, 3, 4)  # all that, while the third one's transfer stood still
    soon.set()
    late.order("stall", source, 5)
    assert late.answer() == "asked"
    left(1, 3)
    os.kill(still.pid, signal.SIGKILL)
    left(1)
    assert server.bytes_sent == (6 + 3) * SIZE
    server.close()
    ring.close()


def test_a_learners_end_reaches_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = weight_ring.WeightRing(tmp_path / "ring", SIZE, 2, ROWS, 1)
    digest = ring.write(Label(1, 0), fill(3))
    server = PairServer(tmp_path / "ring", "gloo", ROWS, DEADLINE_S)
    client = PairClient(server.address, "gloo", DEADLINE_S)
    assert client.fetch(Label(1, 0), digest) == digest and bool((client.flat == 3).all())
    monkeypatch.setattr(gpu_pairs, "compute_mark", lambda flat: 1)
    with pytest.raises(PeerUnreachable, match="damaged in transit"):
        client.fetch(Label(1, 0), digest)
    server.close()
    with pytest.raises(PeerUnreachable, match="is the learner running"):
        client.fetch(Label(1, 0), digest)
    with pytest.raises(PeerUnreachable):
        PairClient("tcp://127.0.0.1:9", "gloo", 0.5)
    ring.close()


def test_the_mark_changes_with_every_bit_and_place() -> None:
    words = torch.arange(3 * gpu_pairs.WORDS // 2, dtype=torch.int64)
    flat, seen = words.view(torch.uint8), {compute_mark(words.view(torch.uint8))}
    for at in (0, 7, 8, 8 * gpu_pairs.WORDS, len(flat) - 1):
        for bit in (1, 128):
            changed = flat.clone()
            changed[at] ^= bit
            seen.add(compute_mark(changed))
            changed[15] ^= bit  # two signs at once do not cancel out
            seen.add(compute_mark(changed))
    swapped = words.roll(gpu_pairs.WORDS)
    assert len(seen) == 21 and compute_mark(swapped.view(torch.uint8)) not in seen


def test_kills_leave_the_weights_of_shared_memory(forked: Any, tmp_path: Path) -> None:
    sets = ("exact=true", "staleness.max_lag=1", "staleness.inject=1", "generators=2")
    plain = forked(tmp_path / "plain", *sets)
    pairs = forked(
        tmp_path / "pairs",
        *sets,
        "weights.transport='gloo'",
        die={"generator-0": 6, "generator-1": 6, "learner": 3},
    )
    # of the 17 steps that a run takes at least, one of the two makes six
    died = set(pairs["deaths"])
    assert "learner" in died and died & {"generator-0", "generator-1"}
    assert pairs["digest"] == plain["digest"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["weights.transport='nccl'"], "nccl connects two GPUs"),
        (
            [
                "weights.transport='nccl'",
                "model.device='cuda'",
                "learner.gpus=[1]",
                "generator.gpus=[0, 1]",
            ],
            "nccl cannot connect GPU 1 with itself",
        ),
        (
            ["weights.transport='gloo'", "wires.weights_address='tcp://127.0.0.1:0'"],
            "weights_address: weights.transport = gloo takes a free port",
        ),
    ],
)
def test_what_cannot_work_is_refused(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load.load("configs/demo.toml", sets)
