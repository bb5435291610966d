"""Publication of weights: into this epoch's ring, and to other hosts or GPUs.

Other hosts receive them in chunks, other GPUs by NCCL. With `record.stream`, weights and batches
also go into a recording.
"""

import math
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError, NotFiniteError
from asyncrl.contract.messages import Batch, WeightsSource
from asyncrl.contract.versions import Label
from asyncrl.models import policy
from asyncrl.records import buffer_leadership, private, rundir, stream
from asyncrl.records.stream import MIB, RecordingHeader, RecordingWriter
from asyncrl.transport import weight_transport
from asyncrl.transport.chunks import ChunkServer
from asyncrl.transport.ring import WeightRing
from learner import checkpoint
from learner.step import LearnerCore

# Weights of usable language models stay far below LARGE. From LARGE on, a forward pass checks that
# log-probabilities are still finite. Products and squares of HUGE weights overflow float32.
LARGE = 1e3
HUGE = 1e6


class Publisher:
    """Publisher of one epoch's ring.

    Rings of earlier epochs stay until the buffer has welcomed this one.
    """

    def __init__(self, config: Config, run_dir: Path, epoch: int, core: LearnerCore) -> None:
        self.epoch = epoch
        self.core = core
        self.depth = config.staleness.most_injected  # earlier versions to keep
        self.directory = rundir.get_ring_dir(run_dir, epoch)
        private.create_directory(self.directory.parent)
        layout = core.layout
        slots = config.weights.slots + self.depth
        self.window = 0  # earlier versions that no evaluation may displace
        if config.reads_versions:
            self.window = int(config.staleness.limit)
            # a resumed learner needs all that the ring held
            self.depth = max(self.depth, config.weights.slots - 1)
        self.ring = WeightRing(
            self.directory, policy.count_flat_bytes(layout), slots, layout, epoch, most=slots + 4
        )
        self.keep: list[Label] = []
        self.on_gpu = policy.resolve_device(config.model.device) != "cpu"
        if self.on_gpu:  # it copies into pinned memory several times as fast
            self.staging = torch.zeros(self.ring.size, dtype=torch.uint8).pin_memory()
        self.server = weight_transport.import_transport(config.weights.transport).serve(
            config, self.ring
        )
        if isinstance(self.server, ChunkServer):
            self.server.buffer = lambda: buffer_leadership.read_current_address(run_dir)

    @property
    def source(self) -> WeightsSource:
        return WeightsSource(
            self.epoch,
            socket.gethostname(),
            str(self.directory),
            self.server.address if self.server else "",
        )

    def publish(self, number: int) -> str:
        """Write the model's weights as version `number`; return their digest. See `begin`."""
        return self.begin(number)()

    def begin(self, number: int) -> Callable[[], str]:
        """Copy the weights off a GPU; return the function that publishes them as version `number`.

        That function returns their digest. Behind a GPU, the model may change before its call.
        Raises NotFiniteError for weights that are not finite or too large.
        """
        self.core.backend.broadcast("publish")
        probe = self.core.backend.probe()

        def fill(buffer: memoryview) -> None:
            bound = self.core.backend.write_flat(buffer)
            # usually no weight comes near LARGE
            if bound is not None and bound < LARGE**2:
                return
            if problem := self.find_problem(buffer):
                raise NotFiniteError(
                    f"the weights {problem} after {number} batches: learner.lr = "
                    f"{self.core.config.learner.lr:g} is too large, or the loss is; "
                    "nothing of them was published or kept: resume with a smaller one"
                )

        if not self.on_gpu:
            return partial(self._write, number, fill, probe)
        fill(self.staging.numpy().data)

        def unstage(buffer: memoryview) -> None:
            # without the interpreter's lock, which an assignment would hold
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(self.staging)

        return partial(self._write, number, unstage, probe)

    def _write(self, number: int, fill: Callable[[memoryview], None], probe: bytes = b"") -> str:
        label = Label(self.epoch, number)
        window = [Label(self.epoch, number - lag) for lag in range(1, self.window + 1)]
        digest = self.ring.write(label, fill, [*self.keep, *window], probe)
        if self.server is not None:
            self.server.on_published(label, digest)
        return digest

    def find_problem(self, buffer: memoryview) -> str:
        """Return why the flat weights in `buffer` are unusable; "" when they are usable."""
        weights = policy.read_flat(buffer, self.core.layout)
        largest = float(
            torch.stack(
                [torch.linalg.vector_norm(t, math.inf).float() for t in weights.values()]
            ).max()
        )
        if not math.isfinite(largest):
            return "are not finite"
        is_probed = largest >= LARGE and self.core.config.learner.backend == "torch"
        is_usable = largest < HUGE and not (
            is_probed and not np.isfinite(policy.compute_probe_logprobs(self.core.model)).all()
        )
        return "" if is_usable else f"are up to {largest:.1e}, too large for finite logprobs,"

    def publish_bytes(self, number: int, data: bytes) -> str:
        """Write an earlier version from its flat bytes in a checkpoint."""

        def fill(buffer: memoryview) -> None:
            buffer[:] = data

        return self._write(number, fill)

    def read_earlier_versions(self, number: int) -> dict[int, bytes]:
        """Return the flat bytes of versions before `number` that injection may still use."""
        versions = {}
        for label, digest in self.ring.list_labels().items():
            if number - self.depth <= label.number < number:
                versions[label.number] = self.ring.read_part(label, digest, 0, self.ring.size)[1]
        return versions

    def read_weights(self, label: Label, digest: str) -> bytes:
        """Return the flat bytes of version `label`; empty when the ring no longer holds it.

        A resumed learner publishes an earlier epoch's version again under its own epoch's label.
        `digest` finds it there ("" when unknown).
        """
        labels = self.ring.list_labels()
        equal_labels = [other for other in labels if digest and labels[other] == digest]
        for candidate in (label, *sorted(equal_labels)[-1:]):
            if data := self.ring.read_part(candidate, digest, 0, self.ring.size)[1]:
                return data
        return b""

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.ring.close()


# ---- the recording -------------------------------------------------------------------------------


class Recorder:
    """The recording of a run.

    When it can no longer be written (bound reached, disk full), it reports that once and the run
    goes on without it.
    """

    def __init__(
        self, config: Config, run_dir: Path, epoch: int, core: LearnerCore, digest: str
    ) -> None:
        self.config = config
        self.core = core
        self.directory = stream.get_directory(run_dir) / "weights"
        self.start = core.state.number
        self.broken = ""
        header = RecordingHeader(stream.FORMAT, epoch, self.start, digest, load.dump(config))
        try:
            self.log = RecordingWriter(
                run_dir, header, stream.measure_size(run_dir), config.record.stream_mib * MIB
            )
        except (AsyncrlError, OSError) as error:
            raise AsyncrlError(
                f"record.stream: {stream.get_directory(run_dir)} cannot be written: "
                f"{error.__cause__ or error}; free some space, or leave record.stream out"
            ) from error
        # an estimate until weights have been written
        self.weights_bytes = policy.count_flat_bytes(core.layout) * (
            3 if config.learner.optimizer == "adamw" else 1
        )
        if not stream.list_weights(run_dir):  # the version that a replay starts from
            self.store_weights()
            if self.log.full:
                raise AsyncrlError(
                    f"record.stream_mib: {config.record.stream_mib} MiB do not hold the first "
                    f"weights ({self.weights_bytes / MIB:.0f} MiB)"
                )

    def add(self, batch: Batch, metrics: dict[str, float], digest: str) -> None:
        """Add one batch after its update; digest is that of the updated weights."""
        if self.broken:
            return
        try:
            has_room = self.log.add(batch, metrics, digest)
        except AsyncrlError as error:
            return self.stop(f"{self.log.path} cannot be written: {error.__cause__}")
        if not has_room:
            return self.stop(f"record.stream_mib = {self.config.record.stream_mib} is reached")
        every = self.config.record.weights_every
        if every and self.core.state.number % every == 0:
            self.store_weights()
        # the expected size, after the third batch
        if batch.number - self.start != 2:
            return
        config = self.config
        steps = config.learner.steps
        batch_bytes = self.log.written / 3
        weight_count = 1 + (steps // every if every else 0)
        total_bytes = batch_bytes * steps + weight_count * self.weights_bytes
        print(
            f"recording: {batch_bytes / 1024:.1f} KiB a batch and {weight_count} x "
            f"{self.weights_bytes / MIB:.1f} MiB of weights: about {total_bytes / MIB:.1f} MiB "
            f"after {steps} batches, bound {config.record.stream_mib} MiB (record.stream_mib)",
            file=sys.stderr,
        )

    def store_weights(self) -> None:
        """Store the current weights and optimizer."""
        if self.log.has_room(self.weights_bytes):
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                checkpoint.save(self.directory, self.core, {}, sys.maxsize)
            except AsyncrlError as error:
                return self.stop(str(error))
            path = self.directory / f"number_{self.core.state.number}"
            size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            # the first ones have no optimizer moments yet
            self.weights_bytes = max(size, self.weights_bytes)
            self.log.used += size

    def stop(self, reason: str) -> None:
        self.broken = reason
        print(
            f"recording: stops before batch {self.core.state.number}: {reason}; the run goes on, a "
            "replay ends there",
            file=sys.stderr,
        )

    def close(self) -> None:
        self.log.close()
