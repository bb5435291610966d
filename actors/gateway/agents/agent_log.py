"""What agents print, kept: a file of bounded size, with a head for each session."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from asyncrl.records import private

MOST_BYTES = 16 << 20  # then it becomes NAME.old, and another begins


class AgentLog:
    """One writer's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writing = threading.Lock()

    def write(self, head: str, *texts: bytes) -> None:
        """One session's: a line of our own, then what it said.  A full disk stops no run here."""
        said = b"".join(text if text.endswith(b"\n") else text + b"\n" for text in texts if text)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self.writing, contextlib.suppress(OSError):
            with os.fdopen(private.open_private(self.path, flags), "ab") as file:
                file.write(f"--- {head}\n".encode("utf-8", "replace") + said)
                size = file.tell()
            if size > MOST_BYTES:
                self.path.replace(self.path.with_suffix(".log.old"))
