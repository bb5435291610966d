"""Terms of the buffer: they decide which buffer process of which host leads the run.

```
RUN/terms/00000003   line 1: the buffer that took the term, written atomically; line 2: its end
```

A buffer takes the next number by a hard link, which only one process can create.  It then marks
every earlier term as ended, and only after that reads the journal.  A leader checks its own file
*after* a message is durable and *before* it sends the message, so that the next leader finds every
sent message in the journal.  A displaced buffer writes only to segments of its own term, which no
later buffer reads.

No clock decides, and no lock, because a suspended host would hold it.  Every check opens the file
again, because network file systems ask their server only then.
"""

import contextlib
import os
import socket
from pathlib import Path
from typing import NoReturn

import msgspec

from asyncrl.contract.errors import BufferTakenOver, ConfigError
from asyncrl.records import atomic_write

# locked by a running buffer; those of a displaced buffer are removed
LOCKS = (".buffer.alive", ".buffer.lock")


class TermStart(msgspec.Struct, frozen=True):
    """The buffer that took a term, as it wrote it to the term's file.

    moved: it listens at `address` and not at the config's address."""

    host: str
    pid: int
    address: str
    moved: bool = False


def get_directory(run_dir: Path) -> Path:
    return run_dir / "terms"


def list_term_files(run_dir: Path) -> list[Path]:
    """Return the files of all terms, oldest first."""
    return sorted(path for path in get_directory(run_dir).glob("[0-9]*") if path.name.isdecimal())


def read(path: Path) -> tuple[TermStart | None, str]:
    """Read the buffer of a term and the reason of its end ("" before).  Raises OSError."""
    start_line, _, end_line = path.read_bytes().partition(b"\n")
    try:
        start = msgspec.json.decode(start_line, type=TermStart)
    except msgspec.MsgspecError:
        start = None
    return start, end_line.decode(errors="replace").strip()


def read_current_address(run_dir: Path) -> str:
    """Return the address of the newest buffer if it moved away from the config's, otherwise ""."""
    with contextlib.suppress(OSError):
        for path in list_term_files(run_dir)[-1:]:
            start, _ = read(path)
            return start.address if start is not None and start.moved else ""
    return ""


def _end(path: Path, reason: str) -> None:
    """Mark a term as ended, unless it is marked already."""
    if read(path)[1]:
        return
    with path.open("ab") as file:
        file.write(f"{reason}\n".encode())
        file.flush()
        os.fsync(file.fileno())


class BufferTerm:
    """The term of this buffer, the newest until another buffer takes one."""

    def __init__(self, path: Path, start: TermStart, size: int) -> None:
        self.path = path
        self.start = start
        self.size = size  # bytes of its file before its end is written

    @property
    def number(self) -> int:
        return int(self.path.name)

    def check(self) -> None:
        """Raise BufferTakenOver if the term has ended."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            self._raise_taken_over(f"{self.path} was removed")
        try:
            if os.fstat(descriptor).st_size == self.size:
                return
        finally:
            os.close(descriptor)
        self._raise_taken_over(read(self.path)[1])

    def _raise_taken_over(self, reason: str) -> NoReturn:
        raise BufferTakenOver(
            f"the buffer of {self.path.parent.parent} is another one ({reason}): this one, process "
            f"{self.start.pid} on {self.start.host} at {self.start.address}, ends, and has sent "
            "nothing since"
        )

    def end(self) -> None:
        """End the term, so that the next buffer on any host may start without a takeover."""
        with contextlib.suppress(OSError):
            _end(self.path, "ended")


def take_leadership(
    run_dir: Path, address: str, *, moved: bool = False, supervised: bool = False
) -> BufferTerm:
    """Take the next term and end all earlier ones.

    moved: peers find this buffer at `address`, not at the config's address.  Raises ConfigError if
    the newest term belongs to another host and has not ended, so that no run is taken over by
    mistake.  An explicit request (`moved`) or a supervisor may take it over."""
    folder = get_directory(run_dir)
    atomic_write.create_directory(folder)
    start = TermStart(socket.gethostname(), os.getpid(), address, moved)
    part = folder / f".{start.host}-{start.pid}.part"
    data = msgspec.json.encode(start) + b"\n"
    atomic_write.write(part, data, sync=True)
    try:
        while True:
            terms = list_term_files(run_dir)
            if terms and not (moved or supervised):
                newest, end = read(terms[-1])
                if newest is not None and not end and newest.host != start.host:
                    raise ConfigError(
                        f"{run_dir} has a buffer on {newest.host} (process {newest.pid}, "
                        f"{newest.address}), which has not recorded its end: if it is lost or "
                        "hangs, take over the run with --take-over ADDRESS, an address of this "
                        "machine"
                    )
            path = folder / f"{int(terms[-1].name) + 1 if terms else 1:08d}"
            try:
                os.link(part, path)
                break
            except FileExistsError:
                continue  # another buffer has taken that term
    finally:
        part.unlink(missing_ok=True)
    atomic_write.sync_path(folder)
    for earlier in list_term_files(run_dir):
        if earlier < path:
            _end(earlier, f"term {path.name} is process {start.pid} on {start.host} at {address}")
    return BufferTerm(path, start, len(data))
