"""The training calls of a model on disk, so that a promised result survives a killed server.

```
MODEL/calls/N.call      call N as it arrived, written before the server promises its result
MODEL/calls/N.outcome   its result, written before the server returns it
MODEL/checkpoints/N-V/  the model at version V, after call N
```

Files are replaced by rename, so they are complete after a kill. A power cut may lose the newest.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.records import atomic_write
from asyncrl.tinker.messages import ErrorCategory


class TrainingCall(msgspec.Struct, frozen=True):
    """A call of a model: its route and the body of its request."""

    number: int  # seq_id; 0 creates the model
    route: str
    body: bytes


class TrainingOutcome(msgspec.Struct, frozen=True):
    """The result of a call, and its effect on the model's bookkeeping.

    version: of the model, after the call.
    branch, parents: of the model, after the call (`ModelAncestry`).
    lags: lag -> tokens in the gradient.  sequences: ids of the sequences of these tokens.
    token_lags: int32, for all positions of the call's datums; a repeated call uses the same lags.
    row, metrics: of an optimizer step, for trained.jsonl and metrics.jsonl.  They are written after
        the outcome, if need be by the next server.
    """

    reply: bytes = b""
    protobuf: bool = False
    version: int = 0
    branch: int = 0
    parents: dict[str, int] = {}
    error: str = ""
    category: ErrorCategory = "user"
    lags: dict[int, int] = {}
    sequences: list[str] = []
    token_lags: bytes = b""
    row: dict[str, Any] = {}
    metrics: dict[str, float] = {}


class CallLog:
    """Calls and outcomes of one model."""

    def __init__(self, folder: Path) -> None:
        self.calls = folder / "calls"
        self.checkpoints = folder / "checkpoints"
        self.calls.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def _locate_file(self, number: int, kind: str) -> Path:
        return self.calls / f"{number:09d}.{kind}"

    def write(self, number: int, kind: str, entry: TrainingCall | TrainingOutcome) -> None:
        atomic_write.write(self._locate_file(number, kind), msgspec.msgpack.encode(entry))

    def read_call(self, number: int) -> TrainingCall | None:
        path = self._locate_file(number, "call")
        if not path.exists():
            return None
        return msgspec.msgpack.decode(path.read_bytes(), type=TrainingCall)

    def read_outcome(self, number: int) -> TrainingOutcome | None:
        path = self._locate_file(number, "outcome")
        if not path.exists():
            return None
        return msgspec.msgpack.decode(path.read_bytes(), type=TrainingOutcome)

    def list_numbers(self, kind: str) -> list[int]:
        """Return the numbers of the calls or of the outcomes on disk, sorted."""
        return sorted(int(path.stem) for path in self.calls.glob(f"*.{kind}"))

    def locate_checkpoint(self, number: int, version: int) -> Path:
        return self.checkpoints / f"{number:09d}-{version}"

    def list_checkpoints(self) -> list[tuple[int, int]]:
        """Return (call, version) of every checkpoint, sorted."""
        names = [path.name.split("-") for path in self.checkpoints.glob("*-*")]
        return sorted((int(n), int(v)) for n, v in names if n.isdigit() and v.isdigit())

    def prune(self) -> None:
        """Remove calls that the newest checkpoint covers, and outcomes older than the one before.

        Call 0, which created the model, stays."""
        checkpoints = self.list_checkpoints()
        for number, version in checkpoints[:-2]:
            shutil.rmtree(self.locate_checkpoint(number, version), ignore_errors=True)
        if checkpoints:
            self._remove("call", checkpoints[-1][0])
        if len(checkpoints) > 1:
            self._remove("outcome", checkpoints[-2][0])

    def _remove(self, kind: str, last: int) -> None:
        for number in self.list_numbers(kind):
            if 0 < number <= last:
                self._locate_file(number, kind).unlink(missing_ok=True)
