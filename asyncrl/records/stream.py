"""A run's recorded stream on disk, which `asyncrl replay` trains on again.

The learner writes it (learner/publisher.py), one file per incarnation.

```
RUN/recording/epoch_E.log             a RecordingHeader, then a RecordedStep per batch, each as
                                      [mark 4 | length 4 | number 8 | xxh3-64 8 | zlib(msgpack)]
RUN/recording/weights/number_N/       a checkpoint: model, optimizer, state; always the first, and
                                      every record.weights_every batches
```

A later incarnation starts from its checkpoint, so its steps replace the earlier ones from there on.
An incomplete record at the end of a file shows that a process exited there; the stream ends before
it.
An unreadable record before a readable one is damage."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.contract.errors import ConfigError, DamagedDataError
from asyncrl.contract.messages import Batch, Numbers
from asyncrl.records import rundir
from asyncrl.records.append_log import AppendLog, FrameCodec

FORMAT = 1
FRAMES = FrameCodec(b"aRR1", covered=8)
# used as batch numbers: the first record of a file, and the mark that the size limit was reached
LIFE = 2**64 - 1
FULL = 2**64 - 2
MIB = 2**20


class RecordingHeader(msgspec.Struct, array_like=True):
    """The first record of a file.

    start: the version that this incarnation begins from, with weights `digest`."""

    format: int
    epoch: int
    start: int
    digest: str
    config: str  # TOML, resolved


class RecordedStep(msgspec.Struct, array_like=True):
    """One batch as it was trained, without texts and ledger.

    metrics: those of the batch.  digest: of the weights after it."""

    batch: Batch
    metrics: Numbers
    digest: str


def get_directory(run_dir: Path) -> Path:
    return run_dir / "recording"


def measure_size(run_dir: Path) -> int:
    """Return the bytes of a run's recording, weights included."""
    return sum(p.stat().st_size for p in get_directory(run_dir).rglob("*") if p.is_file())


def list_logs(run_dir: Path) -> dict[int, Path]:
    """Return epoch -> file, ascending."""
    return rundir.list_numbered(get_directory(run_dir), r"epoch_(\d+)\.log")


def list_weights(run_dir: Path) -> dict[int, Path]:
    """Return version -> checkpoint directory of the recorded weights."""
    return rundir.list_numbered(get_directory(run_dir) / "weights", r"number_(\d+)")


def encode_frame(number: int, value: msgspec.Struct | None) -> bytes:
    """Encode one record."""
    payload = zlib.compress(msgspec.msgpack.encode(value), 1) if value is not None else b""
    return FRAMES.make_header([payload], number) + payload


@dataclass
class Recording:
    """An indexed recording.

    places: steps by number, contiguous from `start`.  lives: (first batch, header) of each
    incarnation."""

    run_dir: Path
    # number -> (file, offset of the payload, length)
    places: dict[int, tuple[Path, int, int]] = field(default_factory=dict)
    lives: list[tuple[int, RecordingHeader]] = field(default_factory=list)
    torn: str = ""  # a record cut short at the end of the newest file
    full: bool = False
    hole: bool = False  # later batches were recorded, but they cannot be reached

    @property
    def start(self) -> int:
        return self.lives[0][0]

    @property
    def end(self) -> int:
        """Version after the last recorded batch."""
        return self.start + len(self.places)

    def read_step(self, number: int) -> RecordedStep:
        path, offset, length = self.places[number]
        with path.open("rb") as file:
            file.seek(offset)
            return msgspec.msgpack.decode(zlib.decompress(file.read(length)), type=RecordedStep)

    def read_steps(self, start: int, end: int) -> Iterator[RecordedStep]:
        """Yield the batches start, ..., end - 1."""
        return (self.read_step(n) for n in range(start, end))

    def find_header(self, number: int) -> RecordingHeader:
        """Return the header of the incarnation that trained batch `number`."""
        return [header for start, header in self.lives if start <= number][-1]

    def explain_missing_part(self, steps: int) -> str:
        """Explain why the stream ends before batch `steps`; empty if it does not."""
        if self.end >= steps:
            return ""
        reason = "the run ended there"
        if self.torn:
            reason = f"the run ended while it wrote the next record ({self.torn})"
        if self.full:
            reason = "it had reached record.stream_mib"
        if self.hole:
            reason = (
                f"batch {self.end} was not recorded (an incarnation had reached "
                "record.stream_mib, or had continued without record.stream)"
            )
        return f"the recording has {self.end} of {steps} batches: {reason}; replayed up to there"


def read(run_dir: Path) -> Recording:
    """Read the recording in a run's files.

    Raises ConfigError if there is none, and DamagedDataError if it is unreadable in the middle."""
    rundir.require_run(run_dir)
    if not list_logs(run_dir):
        raise ConfigError(
            f"{run_dir}: no recording in it; record a run's stream with `asyncrl run CONFIG --set "
            "record.stream=true`"
        )
    recording = Recording(run_dir)
    for path in list_logs(run_dir).values():
        _read(path, recording)
    if not recording.lives:
        raise ConfigError(
            f"{run_dir}: its recording ends before its first batch; there is nothing to replay"
        )
    end = recording.start
    # batches behind a hole (size limit reached, or an incarnation that did not record) are lost
    while end in recording.places:
        end += 1
    recording.hole = any(n > end for n in recording.places)
    recording.places = {n: p for n, p in recording.places.items() if recording.start <= n < end}
    recording.lives = [
        (start, header)
        for start, header in recording.lives
        if start < max(recording.end, recording.start + 1)
    ]
    return recording


def _read(path: Path, recording: Recording) -> None:
    """Add one incarnation's file to the records of the earlier ones."""
    data = path.read_bytes()
    end = 0
    recording.torn = ""
    recording.full = False
    for number, payload, end in FRAMES.read_all(data):
        if number == LIFE:
            header = msgspec.msgpack.decode(zlib.decompress(payload), type=RecordingHeader)
            if header.format != FORMAT:
                raise DamagedDataError(
                    f"{path} is a recording of format {header.format}; this version reads "
                    f"{FORMAT}: replay it with the version that made it"
                )
            recording.places = {n: p for n, p in recording.places.items() if n < header.start}
            recording.lives = [
                (begin, earlier) for begin, earlier in recording.lives if begin < header.start
            ] + [(header.start, header)]
        elif number == FULL:
            recording.full = True
        else:
            recording.places[number] = (path, end - len(payload), len(payload))
    if end < len(data):
        if any(FRAMES.find_later(data, end)):
            raise DamagedDataError(
                f"{path} is damaged at byte {end} of {len(data)}: a record there cannot be read "
                "and later ones can; restore the file"
            )
        recording.torn = f"{path.name}, byte {end} of {len(data)}"


class RecordingWriter(AppendLog):
    """Writer of one incarnation's file.

    Stops when the whole recording, with `used` bytes already, reaches `most`, and sets `full`."""

    def __init__(self, run_dir: Path, header: RecordingHeader, used: int, most: int) -> None:
        path = get_directory(run_dir) / f"epoch_{header.epoch}.log"
        path.parent.mkdir(exist_ok=True)
        super().__init__(path)
        self.used = used
        self.most = most
        self.full = False
        self.written = 0
        self._write(encode_frame(LIFE, header))

    def has_room(self, size: int) -> bool:
        """Decide whether `more` bytes may be added.

        The first refusal is final, because a stream with holes cannot be replayed."""
        if not self.full and self.used + size > self.most - FRAMES.size:
            self._write(encode_frame(FULL, None))
            self.full = True
        return not self.full

    def add(self, batch: Batch, numbers: Numbers, digest: str) -> bool:
        """Append a batch, its metrics and the weights after it; return False if it does not fit.

        Texts, the ledger and cursors of checkpoints are removed: training reads none of them."""
        replace = msgspec.structs.replace
        samples = [replace(sample, text="", prompt_text="") for sample in batch.samples]
        stripped = replace(batch, samples=samples, ledger={}, stats={}, trained_above=[])
        data = encode_frame(batch.number, RecordedStep(stripped, numbers, digest))
        if not self.has_room(len(data)):
            return False
        self._write(data)
        return True

    def _write(self, data: bytes) -> None:
        self.append(data)
        self.used += len(data)
        self.written += len(data)
