"""Terms of the buffer: which buffer process leads the run, on whichever host.

```
RUN/terms/00000003   line 1: the buffer that took the term, written atomically; line 2: its end
```

A buffer takes the next number by a hard link, which only one process can create.  It then marks
every earlier term as ended, and only after that reads the journal.  A leader checks its own file
*after* a message is durable and *before* it sends the message, so that the next leader finds every
sent message in the journal.  A displaced buffer writes only to segments of its own term, which no
later buffer reads.

No clock decides, and no lock, because a suspended host would hold it.  Every check opens the file
again: network file systems ask their server only then.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NoReturn

import msgspec

from asyncrl.contract.errors import BufferTakenOver, ConfigError
from asyncrl.records import atomic_write

# locked by a running buffer; the locks of a displaced one mean nothing
LOCKS = (".buffer.alive", ".buffer.lock")


class TermStart(msgspec.Struct, frozen=True):
    """The buffer that took a term, as it wrote itself.

    moved: it listens at `address` and not where the config says."""

    host: str
    pid: int
    address: str
    moved: bool = False


def directory(run_dir: Path) -> Path:
    return run_dir / "terms"


def term_files(run_dir: Path) -> list[Path]:
    """Return the files of all terms, oldest first."""
    return sorted(path for path in directory(run_dir).glob("[0-9]*") if path.name.isdecimal())


def read(path: Path) -> tuple[TermStart | None, str]:
    """Read the buffer of a term and the reason of its end ("" before).  Raises OSError."""
    first, _, rest = path.read_bytes().partition(b"\n")
    try:
        began = msgspec.json.decode(first, type=TermStart)
    except msgspec.MsgspecError:
        began = None
    return began, rest.decode(errors="replace").strip()


def current_address(run_dir: Path) -> str:
    """Return the address of the newest buffer if it moved away from the config's, otherwise ""."""
    with contextlib.suppress(OSError):
        for path in term_files(run_dir)[-1:]:
            began, _ = read(path)
            return began.address if began is not None and began.moved else ""
    return ""


def displace(run_dir: Path) -> None:
    """Remove the lock files of a buffer that hangs or whose host is lost.

    The next buffer then locks new files."""
    for name in LOCKS:
        (run_dir / name).unlink(missing_ok=True)


def _end(path: Path, why: str) -> None:
    """Mark a term as ended, unless it is marked already."""
    if read(path)[1]:
        return
    with path.open("ab") as file:
        file.write(f"{why}\n".encode())
        file.flush()
        os.fsync(file.fileno())


class BufferTerm:
    """The term of this buffer, the newest until another buffer takes one."""

    def __init__(self, path: Path, began: TermStart, size: int) -> None:
        self.path = path
        self.began = began
        self.size = size  # bytes of its file before its end is written

    @property
    def number(self) -> int:
        return int(self.path.name)

    def check(self) -> None:
        """Raise BufferTakenOver if the term has ended."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            self._raise_taken_over(f"{self.path} is gone")
        try:
            if os.fstat(descriptor).st_size == self.size:
                return
        finally:
            os.close(descriptor)
        self._raise_taken_over(read(self.path)[1])

    def _raise_taken_over(self, why: str) -> NoReturn:
        raise BufferTakenOver(
            f"the buffer of {self.path.parent.parent} is another one ({why}): this one, process "
            f"{self.began.pid} on {self.began.host} at {self.began.address}, ends, and has said "
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

    moved: peers find this buffer at `address`, not where the config says.  Raises ConfigError if
    the newest term belongs to another host and has not ended, so that no run is taken over by
    mistake.  An explicit request (`moved`) or a supervisor may take it over."""
    where = directory(run_dir)
    atomic_write.directory(where)
    began = TermStart(socket.gethostname(), os.getpid(), address, moved)
    part = where / f".{began.host}-{began.pid}.part"
    data = msgspec.json.encode(began) + b"\n"
    atomic_write.write(part, data, sync=True)
    try:
        while True:
            before = term_files(run_dir)
            if before and not (moved or supervised):
                _refuse_elsewhere(run_dir, before[-1], began.host)
            path = where / f"{int(before[-1].name) + 1 if before else 1:08d}"
            try:
                os.link(part, path)
                break
            except FileExistsError:
                continue  # another buffer was faster and has an earlier term now
    finally:
        part.unlink(missing_ok=True)
    atomic_write.sync_path(where)
    for other in term_files(run_dir):
        if other < path:
            _end(other, f"term {path.name} is process {began.pid} on {began.host} at {address}")
    return BufferTerm(path, began, len(data))


def _refuse_elsewhere(run_dir: Path, newest: Path, host: str) -> None:
    """Raise ConfigError if a buffer may still run on another host."""
    began, over = read(newest)
    if began is not None and not over and began.host != host:
        raise ConfigError(
            f"{run_dir} has a buffer on {began.host} (process {began.pid}, {began.address}), which "
            "has not said its end: if it is lost or stands still, take the run over by "
            "--take-over ADDRESS, an address of this machine"
        )
