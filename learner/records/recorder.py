"""The learner's own records: the log of optimizer steps, and the recording for replay.

A recording holds every batch as it was trained, and weights at chosen versions.
`asyncrl/records/stream.py` defines its format.
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.config import load
from asyncrl.config.tree import Config
from asyncrl.contract.errors import AsyncrlError
from asyncrl.contract.messages import Batch
from asyncrl.models import policy
from asyncrl.records import stream
from asyncrl.records.metrics import OPTIMIZER_STEPS
from asyncrl.records.stream import MIB, RecordedStep, RecordingHeader, RecordingWriter
from learner import checkpoint
from learner.records.sample_log import BatchLog
from learner.step import LearnerCore


class StepLog(BatchLog):
    """RUN/optimizer_steps.jsonl: a row for each optimizer step, `Update.as_row`."""

    def __init__(self, config: Config, run_dir: Path, number: int) -> None:
        """Keep the rows of batches below `number`: see `BatchLog`."""
        super().__init__(
            run_dir / OPTIMIZER_STEPS,
            number,
            batch_key="step",
            limit_mib=config.record.optimizer_steps_mib,
            limit_name="record.optimizer_steps_mib",
        )


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
        self.run_dir = run_dir
        self.start = core.state.number
        self.size_reported = False
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
            has_room = self.log.add(
                batch.number, RecordedStep(stream.strip_batch(batch), metrics, digest)
            )
        except AsyncrlError as error:
            return self.stop(f"{self.log.path} cannot be written: {error.__cause__}")
        if not has_room:
            return self.stop(f"record.stream_mib = {self.config.record.stream_mib} is reached")
        every = self.config.record.weights_every
        if every and self.core.state.number % every == 0:
            self.store_weights()
        self.report_size(batch.number)

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

    def report_size(self, number: int) -> None:
        """Report the expected size of the recording, after the third batch."""
        if number - self.start != 2 or self.size_reported:
            return
        self.size_reported = True
        config = self.config
        steps = config.learner.steps
        batch_bytes = self.log.written / 3
        weight_count = (
            steps // config.record.weights_every if config.record.weights_every else 0
        ) + 1
        total_bytes = batch_bytes * steps + weight_count * self.weights_bytes
        print(
            f"recording: {batch_bytes / 1024:.1f} KiB a batch and {weight_count} x "
            f"{self.weights_bytes / MIB:.1f} MiB of weights: about {total_bytes / MIB:.1f} MiB "
            f"after {steps} batches, bound {config.record.stream_mib} MiB (record.stream_mib)",
            file=sys.stderr,
        )

    def stop(self, reason: str) -> None:
        self.broken = reason
        print(
            f"recording: stops before batch {self.core.state.number}: {reason}; the run goes on, a "
            "replay ends there",
            file=sys.stderr,
        )

    def close(self) -> None:
        self.log.close()
