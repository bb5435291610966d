"""Terms of the buffer: which of its lives speaks for the run, on whichever host.

```
RUN/terms/00000003   line 1: whose it is, there whole or not at all; a second line: it is over
```

A life takes the next number by a hard link, which only one can make, and then writes into every
term before that it is over.  Only after that it reads the journal.  Whoever speaks for the run
looks into its own file *after* what it says is durable and *before* it says it: what was said then
lies in the journal that the next life has yet to read.  What a life that is over writes goes into
segments of its own term, which nobody reads any more.

No clock decides, and no lock, which a host that stands still would hold.  A file is opened anew
for every look, as network file systems ask their server for it then, and at no other time.
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

# held by a buffer for as long as it lives; of one that is displaced they say nothing any more
LOCKS = (".buffer.alive", ".buffer.lock")


class TermStart(msgspec.Struct, frozen=True):
    """Whose a term is.  Written by the buffer that takes it; read by those who look for it.

    moved: it is not where the config says, but at `address`."""

    host: str
    pid: int
    address: str
    moved: bool = False


def directory(run_dir: Path) -> Path:
    return run_dir / "terms"


def term_files(run_dir: Path) -> list[Path]:
    """Of all terms, oldest first."""
    return sorted(path for path in directory(run_dir).glob("[0-9]*") if path.name.isdecimal())


def read(path: Path) -> tuple[TermStart | None, str]:
    """Whose a term is, and why it is over, "" while it is not.  Raises OSError."""
    first, _, rest = path.read_bytes().partition(b"\n")
    try:
        began = msgspec.json.decode(first, type=TermStart)
    except msgspec.MsgspecError:
        began = None
    return began, rest.decode(errors="replace").strip()


def current_address(run_dir: Path) -> str:
    """The address of the newest buffer, where that is another than the config's; "" as a rule."""
    with contextlib.suppress(OSError):
        for path in term_files(run_dir)[-1:]:
            began, _ = read(path)
            return began.address if began is not None and began.moved else ""
    return ""


def displace(run_dir: Path) -> None:
    """The locks of a buffer that stands still, or whose host is lost, count no more: whoever comes
    now locks files of its own.
    """
    for name in LOCKS:
        (run_dir / name).unlink(missing_ok=True)


def _end(path: Path, why: str) -> None:
    """Write into a term that it is over, unless that stands there."""
    if read(path)[1]:
        return
    with path.open("ab") as file:
        file.write(f"{why}\n".encode())
        file.flush()
        os.fsync(file.fileno())


class BufferTerm:
    """The newest term, while no other is taken."""

    def __init__(self, path: Path, began: TermStart, size: int) -> None:
        self.path = path
        self.began = began
        self.size = size  # of its file, while it is not over

    @property
    def number(self) -> int:
        return int(self.path.name)

    def check(self) -> None:
        """Raises TakenOver when it is over."""
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
        """Its buffer ends: the next one, wherever it is, takes nothing from anybody."""
        with contextlib.suppress(OSError):
            _end(self.path, "ended")


def take_leadership(
    run_dir: Path, address: str, *, moved: bool = False, supervised: bool = False
) -> BufferTerm:
    """The next term, with all before it over.

    moved: peers find it at `address`, not where the config says.  Raises ConfigError where the
    newest term is another host's and not over: by mistake nobody takes a run over.  Who asks for it
    (`moved`), or has a supervisor, who knows of the one before, may."""
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
                continue  # somebody was faster, and has a term now that comes before ours
    finally:
        part.unlink(missing_ok=True)
    atomic_write.sync_path(where)
    for other in term_files(run_dir):
        if other < path:
            _end(other, f"term {path.name} is process {began.pid} on {began.host} at {address}")
    return BufferTerm(path, began, len(data))


def _refuse_elsewhere(run_dir: Path, newest: Path, host: str) -> None:
    """Raises ConfigError for a buffer that may live on another host."""
    began, over = read(newest)
    if began is not None and not over and began.host != host:
        raise ConfigError(
            f"{run_dir} has a buffer on {began.host} (process {began.pid}, {began.address}), which "
            "has not said its end: if it is lost or stands still, take the run over by "
            "--take-over ADDRESS, an address of this machine"
        )
