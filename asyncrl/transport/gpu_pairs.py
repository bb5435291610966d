"""Weights from the learner to each generator through torch.distributed.

NCCL connects two GPUs, Gloo two CPUs. A group of all generators would hang when one of them is
killed, and could not admit a new one. Each generator therefore forms a group of two with the
learner, and a new one when either process restarts:

```
store     a TCPStore of the learner: the layout, and a counter that gives the next generator its
          number n
control   a Gloo group of two: "version, digest" from the generator; "digest, probe, mark" or "not
          here" from the learner
data      the flat bytes in pieces; the control group itself, or an NCCL group of two
```

The learner serves each pair from a thread, out of its ring (asyncrl/transport/ring.py), so that
training never waits. A transfer that stalls longer than the deadline, or whose peer has exited,
ends only that thread. The received bytes are compared by a checksum (`mark`) that is computed on
the device, so that they need not leave the GPU; the ring's own checksum was verified before. One
machine only: the store and the groups neither encrypt nor authenticate.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec
import torch
import torch.distributed
from msgspec import Struct
from torch import Tensor, uint8

from asyncrl.config.tree import Config
from asyncrl.contract.errors import PeerUnreachable
from asyncrl.contract.messages import WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.models.policy import count_flat_bytes
from asyncrl.transport.ring import RingReader, WeightRing
from asyncrl.transport.weight_transport import Rows, WeightsClient, WeightsServer

dist: Any = torch.distributed  # its types omit most of what is used here
cuda: Any = torch.cuda

Backend = Literal["gloo", "nccl"]
CONTROL_BYTES = 512  # of a control message in JSON, padded by spaces
PIECE = 64 << 20  # bytes of one send
WORDS = 1 << 18  # 8-byte words per row of the mark
IDLE = timedelta(days=365)  # the learner's deadline for a generator's request
ODD = 0x9E3779B97F4A7C15  # odd factor that mixes the bits of a word


class _PairRequest(Struct, frozen=True):
    """A generator's request for a version."""

    label: Label
    digest: str  # "": any version with that label


class _PairReply(Struct, frozen=True):
    """The learner's reply, before the bytes."""

    digest: str  # "": the ring does not have the version
    probe: bytes = b""
    mark: int = 0


def compute_mark(flat: Tensor) -> int:
    """Compute a 64-bit checksum of `flat` (uint8, multiple of 8 bytes) on its device.

    It sums the words, each mixed with an odd factor that depends on its position.
    """
    words = flat.view(torch.int64)
    factors = torch.arange(WORDS, device=flat.device) * 2 + 1
    factors *= ODD - (1 << 64)  # all arithmetic here is modulo 2^64
    sums = torch.stack(
        [
            ((mixed := row * factors[: len(row)]) ^ (mixed >> 32)).sum()
            for row in torch.split(words, WORDS)
        ]
    ).tolist()
    total = 0
    for row_sum in sums:
        total = (total * ODD + row_sum) % (1 << 64)
    return total


def find_device(backend: Backend) -> torch.device:
    """Return the device of the flat bytes in this process."""
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_group(backend: Backend, store: Any, name: str, rank: int, deadline_s: float) -> Any:
    """Make a group of two outside torch's global state.

    rank: 0 the learner, 1 the generator.
    Raises RuntimeError when the other process does not join in time.
    """
    store = dist.PrefixStore(name, store)
    process_group = dist.ProcessGroup(store, rank, 2)
    if backend == "gloo":
        kind = dist.ProcessGroup.BackendType.GLOO
        inner: Any = dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=deadline_s))
    else:
        kind = dist.ProcessGroup.BackendType.NCCL
        options = dist.ProcessGroupNCCL.Options()
        # NCCL's own watchdog would abort the process; `finish` enforces the deadline and drops
        # only this pair
        options._timeout = timedelta(days=1)
        inner = dist.ProcessGroupNCCL(store, rank, 2, options)
    process_group._set_default_backend(kind)
    process_group._register_backend(find_device(backend), kind, inner)
    return process_group


def finish(work: Any, device: torch.device, deadline: timedelta) -> None:
    """Wait for a send or receive. Raises RuntimeError when it fails or takes too long."""
    if device.type == "cpu":
        work.wait(deadline)
        return
    work.wait()  # the stream waits, the host does not
    event = cuda.Event()
    end = time.monotonic() + deadline.total_seconds()
    event.record()
    while not event.query():
        if time.monotonic() > end:
            raise RuntimeError(f"a transfer has stalled for {deadline.total_seconds():g} s")
        time.sleep(0.0005)


class GpuPair:
    """One end of a pair.

    number: of the pair. rank: 0 the learner, 1 the generator."""

    def __init__(
        self, backend: Backend, store: Any, number: int, rank: int, deadline_s: float
    ) -> None:
        self.rank = rank
        self.device = find_device(backend)
        self.deadline = timedelta(seconds=deadline_s)
        self.control = make_group("gloo", store, f"{number}/control", rank, deadline_s)
        self.data = self.control
        if backend == "nccl":
            self.data = make_group("nccl", store, f"{number}/data", rank, deadline_s)

    def write(self, message: Struct) -> None:
        """Send a control message. Raises RuntimeError when it takes too long."""
        data = bytearray(msgspec.json.encode(message).ljust(CONTROL_BYTES))
        padded = torch.frombuffer(data, dtype=uint8)
        finish(self.control.send([padded], 1 - self.rank, 0), padded.device, self.deadline)

    def read(self, kind: Any, deadline: timedelta | None = None) -> Any:
        """Receive a control message of type `kind`. Raises RuntimeError after the deadline."""
        padded = torch.zeros(CONTROL_BYTES, dtype=uint8)
        finish(
            self.control.recv([padded], 1 - self.rank, 0), padded.device, deadline or self.deadline
        )
        return msgspec.json.decode(padded.numpy().tobytes(), type=kind)

    def transfer(self, flat: Tensor) -> None:
        """Send or receive the flat bytes, uint8 [bytes]."""
        for piece in torch.split(flat, PIECE):
            work = (
                self.data.send([piece], 1, 1) if self.rank == 0 else self.data.recv([piece], 0, 1)
            )
            finish(work, self.device, self.deadline)

    def close(self) -> None:
        """Abort both groups."""
        for group in (self.data, self.control):
            try:
                group.abort()
            except RuntimeError:
                pass


class _StagedVersion(NamedTuple):
    """A version on the learner's device."""

    label: Label
    reply: _PairReply
    flat: Tensor


class PairServer(WeightsServer):
    """The learner's end: serves the versions in the ring at `directory`.

    deadline_s: seconds for one piece, and for a group to form.
    """

    def __init__(self, directory: Path, backend: Backend, layout: Rows, deadline_s: float) -> None:
        self.backend = backend
        self.deadline_s = deadline_s
        timeout = timedelta(seconds=deadline_s)
        self.store = dist.TCPStore(
            "127.0.0.1", 0, None, True, timeout=timeout, wait_for_workers=False
        )
        self.store.set("layout", msgspec.json.encode(layout).decode())
        self.address = f"tcp://127.0.0.1:{self.store.port}"
        self.device = find_device(backend)
        self.size = count_flat_bytes(layout)
        self.reader = RingReader(directory, "pairs")
        self.lock = threading.Lock()
        self.newest: _StagedVersion | None = None
        self.host = bytearray(self.size)
        self.ended = False
        self.thread = threading.Thread(target=self._accept, name="weight-pairs", daemon=True)
        self.thread.start()

    def _accept(self) -> None:
        pairs = 0
        while not self.ended:
            while pairs < self.store.add("pairs", 0):
                pairs += 1
                threading.Thread(
                    target=self._serve, args=(pairs,), name=f"weight-pair-{pairs}", daemon=True
                ).start()
            time.sleep(0.05)

    def _serve(self, number: int) -> None:
        pair = None
        try:
            with cuda.stream(cuda.Stream(self.device)) if self.backend == "nccl" else nullcontext():
                store = connect_store(self.address, self.deadline_s)
                pair = GpuPair(self.backend, store, number, 0, self.deadline_s)
                while not self.ended:
                    request = pair.read(_PairRequest, IDLE)
                    if self.ended:
                        return
                    staged = self._stage(request.label, request.digest)
                    pair.write(_PairReply("") if staged is None else staged.reply)
                    if staged is not None:
                        pair.transfer(staged.flat)
        except (RuntimeError, ValueError, OSError):
            # the generator exited or stalls; if it resumes, it makes a new pair
            pass
        finally:
            if pair is not None:
                pair.close()

    def _stage(self, label: Label, digest: str) -> _StagedVersion | None:
        """Copy the version to the device, unless it is there; None if the ring lacks it."""
        with self.lock:
            staged = self.newest
            if staged is None or staged.label != label or digest not in ("", staged.reply.digest):
                digest = self.reader.fetch(label, digest, memoryview(self.host))
                if not digest:
                    return None
                flat = torch.frombuffer(self.host, dtype=uint8).to(self.device, copy=True)
                reply = _PairReply(digest, self.reader.probe, compute_mark(flat))
                staged = self.newest = _StagedVersion(label, reply, flat)
            return staged

    def close(self) -> None:
        """Stop serving: a pair closes at its next request."""
        self.ended = True
        self.thread.join(2)
        with self.lock:
            self.reader.close()


def connect_store(address: str, deadline_s: float) -> Any:
    """Connect to the learner's TCPStore. Raises RuntimeError or OSError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    # fail fast when nothing listens, without the long output of TCPStore
    socket.create_connection((host, int(port)), deadline_s).close()
    return dist.TCPStore(
        host, int(port), None, False, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
    )


class PairClient(WeightsClient):
    """A generator's end. Raises PeerUnreachable when the learner does not reply.

    flat: the bytes of the version fetched last, on the device of this process.
    """

    def __init__(self, address: str, backend: Backend, deadline_s: float) -> None:
        self.address = address
        with self._translate_errors():
            store = connect_store(address, deadline_s)
            self.layout: Rows = msgspec.json.decode(store.get("layout"), type=Rows)
            self.pair = GpuPair(backend, store, store.add("pairs", 1), 1, deadline_s)
        self.flat = torch.zeros(count_flat_bytes(self.layout), dtype=uint8, device=self.pair.device)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise PeerUnreachable for torch's errors."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            self.is_broken = True
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise PeerUnreachable(
                f"the learner's weights at {self.address}: {reason[:200]}; is the learner running?"
            ) from error

    def fetch_layout(self) -> Rows:
        """Return the layout of the flat bytes."""
        return self.layout

    def fetch(self, label: Label, digest: str, into: memoryview | None = None) -> str:
        """Receive version `label` into `flat`, instead of `into`, and return its digest.

        Returns "" if the learner does not have it. Raises PeerUnreachable.
        """
        with self._translate_errors():
            self.pair.write(_PairRequest(label, digest))
            reply: _PairReply = self.pair.read(_PairReply)
            if not reply.digest:
                return ""
            self.pair.transfer(self.flat)
            if compute_mark(self.flat) != reply.mark:
                raise RuntimeError(f"version {label} was damaged in transit")
        self.probe = reply.probe
        return reply.digest

    def close(self) -> None:
        """Disconnect."""
        self.pair.close()


def serve(config: Config, ring: WeightRing) -> PairServer:
    """Start the learner's end."""
    backend = cast(Backend, config.weights.transport)
    return PairServer(ring.directory, backend, ring.rows, config.wires.connect_s)


def connect(config: Config, source: WeightsSource, name: str) -> PairClient:
    """Connect generator `name`. Raises PeerUnreachable, also on a different host."""
    backend = cast(Backend, config.weights.transport)
    if source.host != socket.gethostname():
        raise PeerUnreachable(
            f"the learner is on host {source.host}: weights.transport = {backend} "
            "works on one machine; use tcp"
        )
    return PairClient(source.address, backend, config.wires.connect_s)
