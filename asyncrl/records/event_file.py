"""RUN/tensorboard: the TensorBoard event file of a run, one event per row.

tensorboardX defines the messages and frames the records.  Its SummaryWriter is not used: it passes
every event through a process queue to a thread, a sixth of the buffer's cost of a batch."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.records.append_log import make_disk_full_error


class _TensorboardModules(NamedTuple):
    """The classes of tensorboardX in use."""

    RecordWriter: Any
    Event: Any
    SessionLog: Any
    HistogramProto: Any
    Summary: Any


def import_protocol() -> _TensorboardModules:
    """Import tensorboardX's messages and records, without torch unless torch is loaded already.

    torch would cost the buffer 200 MB and seconds."""
    absent = "torch" not in sys.modules
    if absent:
        # `import torch` raises ImportError, which tensorboardX expects
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary
    finally:
        if absent:
            del sys.modules["torch"]
    return _TensorboardModules(RecordWriter, Event, SessionLog, HistogramProto, Summary)


class EventFile:
    """Writer of events with numbers and histograms.

    An event that cannot be written is dropped, with one message: metrics.jsonl has all values.
    Without tensorboardX every event is dropped.

    Raises AsyncrlError if the file cannot be created."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.failed = False
        self.records: Any = None
        try:
            self.modules = import_protocol()
        except ImportError as error:
            self._give_up(error)
            return
        host, now = socket.gethostname(), time.time()
        # two incarnations in the same second need different files
        name = f"events.out.tfevents.{now:.6f}.{host}.{os.getpid()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.records = self.modules.RecordWriter(str(directory / name))
            self._write(self.modules.Event(wall_time=now, file_version="brain.Event:2"))
        except OSError as error:
            raise make_disk_full_error(directory, error) from error

    def add(
        self, step: int, values: Mapping[str, float], counts: Mapping[str, Counter[float]]
    ) -> None:
        """Add one event: a number per name, and histograms as counts of whole numbers."""
        if self.failed:
            return
        Value = self.modules.Summary.Value
        rows = [Value(tag=name, simple_value=value) for name, value in values.items()]
        rows += [Value(tag=name, histo=self._build_histogram(c)) for name, c in counts.items() if c]
        self._add_event(step, summary=self.modules.Summary(value=rows))

    def start_session(self, step: int) -> None:
        """Add the start of a session: TensorBoard drops all earlier events from `step` on."""
        if not self.failed:
            start = self.modules.SessionLog(status=self.modules.SessionLog.START)
            self._add_event(step, session_log=start)

    def _add_event(self, step: int, **content: Any) -> None:
        try:
            self._write(self.modules.Event(wall_time=time.time(), step=step, **content))
        except OSError as error:
            self._give_up(error)

    def _write(self, event: Any) -> None:
        """Write to the kernel without waiting for the disk.  Raises OSError."""
        self.records.write(event.SerializeToString())
        self.records._writer.flush()  # its own `flush` waits for the disk

    def _build_histogram(self, count: Counter[float]) -> Any:
        """Make a bucket for each whole number in the range, and an empty one before them."""
        least, most = int(min(count) // 1), int(max(count) // 1)
        buckets = [0.0] * (most - least + 2)
        for value, times in count.items():
            buckets[int(value // 1) - least + 1] += times
        return self.modules.HistogramProto(
            min=min(count),
            max=max(count),
            num=sum(count.values()),
            sum=sum(value * times for value, times in count.items()),
            sum_squares=sum(value * value * times for value, times in count.items()),
            bucket_limit=[least - 0.5 + index for index in range(len(buckets))],
            bucket=buckets,
        )

    def _give_up(self, error: OSError | ImportError) -> None:
        self.failed = True
        reason = error.strerror if isinstance(error, OSError) else None
        print(
            f"note: {self.directory} can no longer be written: {reason or error}",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if self.records is None:
            return
        try:
            self.records.close()
        except OSError as error:
            if not self.failed:
                self._give_up(error)
