"""Records beside a model's files: its origin, its saved weights, and its calls (`CallLog`)."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.contract.errors import ConfigError
from asyncrl.records import atomic_write
from asyncrl.tinker.messages import ErrorCategory

# NAME.json is the record of NAME, and NAME.part is what a process is writing
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(?<!\.json)(?<!\.part)")


class SavedWeights(msgspec.Struct):
    """NAME.json beside weights that a client saved.

    model: the branch of the weights.
    rank: of its adapter; 0: all weights.
    version: the optimizer steps behind them.
    parents: of that branch (`ModelAncestry`).
    time: when they were saved, in seconds since 1970.
    call: number of the call that saved them."""

    model: str
    rank: int
    version: int
    parents: dict[str, int]
    time: float
    call: int = -1


class ModelRecord(msgspec.Struct):
    """model.json.

    rank, seed: of its adapter; a rank of 0 trains all weights.
    source: tinker path that it was loaded from; "": the base model.
    optimizer: whether the optimizer was loaded, too.
    version: the model's version when it was created.
    parents: of its first branch (`ModelAncestry`).
    metadata: of the client, which the list of models shows."""

    model: str
    session: str
    rank: int
    seed: int
    time: float
    source: str = ""
    optimizer: bool = False
    version: int = 0
    parents: dict[str, int] = {}
    metadata: dict[str, Any] | None = None


def build_folder_name(model: str) -> str:
    """Return the folder of a model.

    >>> build_folder_name("s-1f:train:0")
    's-1f-train-0'
    """
    return model.replace(":", "-")


def strip_branch(branch: str) -> str:
    """Return the model of a branch, which is named by the load_weights call that began it.

    >>> strip_branch("s-1f:train:0@7")
    's-1f:train:0'
    """
    return branch.partition("@")[0]


def locate_note(weights: Path) -> Path:
    """Return the path of the record of saved weights."""
    return weights.with_name(f"{weights.name}.json")


def find_saved(root: Path, path: str, kind: str = "") -> tuple[Path, SavedWeights]:
    """Return the directory and the record of a tinker path.  Raises ConfigError."""
    match = re.fullmatch(r"tinker://([A-Za-z0-9:_-]+)/(weights|sampler_weights)/([^/]+)", path)
    if match is None or not NAME.fullmatch(match[3]):
        raise ConfigError(f"{path} is not a path of saved weights: tinker://MODEL/weights/NAME")
    if kind and match[2] != kind:
        raise ConfigError(
            f"{path} has no optimizer: training can continue only from tinker://MODEL/{kind}/"
        )
    folder = root / build_folder_name(match[1]) / match[2] / match[3]
    try:
        return folder, msgspec.json.decode(locate_note(folder).read_bytes(), type=SavedWeights)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: this server has no such weights") from error


class TrainingCall(msgspec.Struct, frozen=True):
    """A call of a model: its route and the body of its request."""

    number: int  # seq_id; 0 creates the model
    route: str
    body: bytes


class CallOutcome(msgspec.Struct, frozen=True):
    """The result of a request.

    reply: encoded, for the client.
    protobuf: how it is encoded; otherwise as JSON.
    error: why there is no reply, or "".
    category: whose error it was, as the API has it."""

    reply: bytes = b""
    protobuf: bool = False
    error: str = ""
    category: ErrorCategory = "user"


class TrainingOutcome(CallOutcome, frozen=True):
    """The result of a training call, and its effect on the model's bookkeeping.

    version: of the model, after the call.
    branch: of the model, after the call; the number of the load_weights call that began it.
    parents: of that branch (`ModelAncestry`).
    lags: lag -> tokens in the gradient.
    sequences: ids of the sequences of these tokens.
    token_lags: int32, for all positions of the call's datums, which a repeated call uses.
    limit: staleness.max_lag at that time; None: written by an earlier version of the server.
    row: of an optimizer step, for trained.jsonl. It is written after the outcome, if need be by the
        next server.
    metrics: of an optimizer step, for metrics.jsonl, in the same way.
    """

    version: int = 0
    branch: int = 0
    parents: dict[str, int] = {}
    lags: dict[int, int] = {}
    sequences: list[str] = []
    token_lags: bytes = b""
    limit: float | None = None
    row: dict[str, Any] = {}
    metrics: dict[str, float] = {}


_decode_call = msgspec.msgpack.Decoder(TrainingCall).decode
_decode_outcome = msgspec.msgpack.Decoder(TrainingOutcome).decode


class CallLog:
    """The training calls of a model, so that a promised result survives a killed server.

    ```
    MODEL/calls/N.call      call N as it arrived, written before the server promises its result
    MODEL/calls/N.outcome   its result, written before the server returns it
    MODEL/checkpoints/N-V/  the model at version V, after call N
    ```

    Files are replaced by rename, so they are complete after a kill. A power cut may lose the
    newest.
    """

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
        return _decode_call(path.read_bytes()) if path.exists() else None

    def read_outcome(self, number: int) -> TrainingOutcome | None:
        path = self._locate_file(number, "outcome")
        return _decode_outcome(path.read_bytes()) if path.exists() else None

    def list_numbers(self, kind: str) -> list[int]:
        """Return the numbers of the calls or of the outcomes on disk, sorted."""
        return sorted(int(path.stem) for path in self.calls.glob(f"*.{kind}"))

    def measure(self) -> int:
        """Return the bytes of all calls and results on disk."""
        size = 0
        for path in self.calls.iterdir():
            with suppress(FileNotFoundError):  # a thread may rename or prune it meanwhile
                size += path.stat().st_size
        return size

    def locate_checkpoint(self, number: int, version: int) -> Path:
        return self.checkpoints / f"{number:09d}-{version}"

    def list_checkpoints(self) -> list[tuple[int, int]]:
        """Return (call, version) of every checkpoint, sorted."""
        names = [path.name.split("-") for path in self.checkpoints.glob("*-*")]
        return sorted((int(n), int(v)) for n, v in names if n.isdigit() and v.isdigit())

    def prune(self) -> int:
        """Remove calls that the newest checkpoint covers, and outcomes older than the one before.

        Call 0, which created the model, stays.  Returns the bytes of what is left."""
        checkpoints = self.list_checkpoints()
        for number, version in checkpoints[:-2]:
            shutil.rmtree(self.locate_checkpoint(number, version), ignore_errors=True)
        if checkpoints:
            self._remove("call", checkpoints[-1][0])
        if len(checkpoints) > 1:
            self._remove("outcome", checkpoints[-2][0])
        return self.measure()

    def _remove(self, kind: str, last: int) -> None:
        for number in self.list_numbers(kind):
            if 0 < number <= last:
                self._locate_file(number, kind).unlink(missing_ok=True)
